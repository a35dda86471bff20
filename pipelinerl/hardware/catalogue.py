"""The catalogue: accelerators and language models by name, from a user's TOML file, or from Hugging Face."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from pydantic import Field, model_validator

from pipelinerl.errors import ConfigError
from pipelinerl.util.explain import did_you_mean, explaining
from pipelinerl.util.read import read_json, read_toml
from pipelinerl.util.strict_model import StrictModel

# Parameters of a model from its Hugging Face ``config.json``, without network or transformers.

STATE_BYTES = 4
"""Of one number of the state of a gated delta net or a Mamba-2 layer, which engines keep in fp32."""
BYTES = 2
"""Of one number in bf16."""
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Keys for the number of routed experts: Qwen, DeepSeek, Mixtral."""
ROUTER_BIAS = ("deepseek_v3", "kimi_k2", "glm4_moe", "glm4_moe_lite", "nemotron_h", "gpt_oss")
"""Values of ``model_type`` whose router has a bias per expert, most to balance them."""
SHORT_WINDOW = 512
"""A sliding window of so many tokens or fewer (gpt-oss has 128) counts as no cache, and its attention as none."""
BLOCKS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
"""Letters of ``hybrid_override_pattern``, and the same in ``layers_block_type``."""


def model_tables(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the fields of ``LanguageModel`` that a config gives.

    Handles the usual decoder: grouped-query attention (with an output gate or not) or multi-head latent attention
    (DeepSeek), a feed-forward of three matrices (without a gate, ``relu2``, of two), RMS norms, routed experts (in a
    latent width or not) and shared ones. Gated delta nets (Qwen3-Next, Qwen3.5) and Mamba-2 layers (Nemotron-H) have
    parameters but no KV cache. Biases of queries, keys and values and the norms of queries and keys follow
    ``model_type`` (Qwen2 has the first, Qwen3 the second).

    Layers with a sliding window count as full attention if the window is longer than ``SHORT_WINDOW``. Layers that
    predict further tokens (MTP) are not counted.
    Raises ConfigError if a needed key is missing or no number, or a kind of layer is unknown.
    """
    text = config.get("text_config")
    outer, config = config, text if "hidden_size" not in config and isinstance(text, dict) else config
    read = _Reader(config, name)
    kind = str(config.get("model_type", ""))
    width, vocabulary = read.count("hidden_size"), read.count("vocab_size")
    heads = read.count("num_attention_heads")
    stack = _stack(read, config, name)
    kv_heads, attention, attention_width, kv_numbers = _attention(read, config, kind, width, heads)
    feed = _feed_forward(read, config, kind, width, stack)

    mixers = (stack.attention + stack.windowed) * attention
    state_numbers = 0
    if stack.delta:
        mixers += stack.delta * _delta_net(read, width)
        values = read.count("linear_num_value_heads") * read.count("linear_value_head_dim")
        state_numbers = stack.delta * values * read.count("linear_key_head_dim")
    if stack.mamba:
        mixers += stack.mamba * _mamba(read, width)
        inner = read.count("mamba_num_heads") * read.count("mamba_head_dim")
        state_numbers = stack.mamba * inner * read.count("ssm_state_size")
    blocks = stack.attention + stack.windowed + stack.delta + stack.mamba + stack.dense + stack.sparse
    tied = bool(outer.get("tie_word_embeddings", config.get("tie_word_embeddings", kind.startswith("gemma"))))
    embedding = vocabulary * width
    other = mixers + blocks * width + width + embedding * (1 if tied else 2) + feed.other  # a norm per block, and one
    return {
        "parameters": float(other + feed.experts),
        "active_parameters": float(other + feed.active_experts),
        "embedding_parameters": 0.0 if tied else float(embedding),
        "layers": stack.layers,
        "width": width,
        "attention_width": attention_width * stack.attention / stack.layers,
        "feed_forward_width": feed.width / stack.layers,
        "vocabulary": vocabulary,
        "kv_bytes_per_token": float(stack.attention * kv_numbers * BYTES),
        "state_bytes": float(state_numbers * STATE_BYTES),
        "attention_heads": heads,
        "kv_heads": kv_heads,
        "experts": stack.experts,
        "experts_per_token": feed.per_token,
        "expert_parameters": float(feed.experts),
        "expert_layers": stack.sparse if 0 < stack.sparse < stack.layers else None,
        "source": "counted from the model's config.json",
    }


class _Stack(NamedTuple):
    """How many layers of each kind a model has, and routed experts in each of the sparse ones (counts)."""

    layers: int
    attention: int
    windowed: int
    delta: int
    mamba: int
    dense: int
    sparse: int
    experts: int


def _stack(read: _Reader, config: Mapping[str, Any], name: str) -> _Stack:
    """Return the layers. Where mixers and feed-forwards are counted apart (Nemotron-H), two of them are one layer."""
    experts = next((n for key in EXPERTS if (n := read.optional(key))), 0)
    pattern, listed = config.get("hybrid_override_pattern"), config.get("layers_block_type")
    if isinstance(pattern, str):
        listed = [BLOCKS.get(one, one) for one in pattern]
    if isinstance(listed, list) and listed:
        blocks = Counter(str(one) for one in listed)
        _refuse_other_kinds(blocks, BLOCKS.values(), name)
        mixers = {"attention": blocks["attention"], "windowed": 0, "delta": 0, "mamba": blocks["mamba"]}
        layers = (blocks.total() + 1) // 2
        return _Stack(layers, **mixers, dense=blocks["mlp"], sparse=blocks["moe"], experts=experts)
    layers = read.count("num_hidden_layers")
    kinds = _mixer_kinds(read, config, layers, name)
    short = 0 < read.optional("sliding_window") <= SHORT_WINDOW
    windowed = kinds["sliding_attention"] if short else 0
    delta = kinds["linear_attention"]
    dense = _dense_layers(read, config, layers) if experts else layers
    return _Stack(layers, layers - windowed - delta, windowed, delta, 0, dense, layers - dense, experts)


ATTENTION_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")
"""Entries of ``layer_types`` that can be counted."""


def _mixer_kinds(read: _Reader, config: Mapping[str, Any], layers: int, name: str) -> Counter[str]:
    listed = config.get("layer_types")
    if isinstance(listed, list):
        kinds = Counter(str(one) for one in listed)
        _refuse_other_kinds(kinds, ATTENTION_KINDS, name)
        if len(listed) != layers:
            raise ConfigError(
                f"model {name}: layer_types of config.json must have as many entries as num_hidden_layers={layers}, "
                f"got {len(listed)}"
            )
        return kinds
    interval = read.optional("full_attention_interval")
    return Counter(linear_attention=layers - layers // interval if interval else 0)


def _refuse_other_kinds(kinds: Counter[str], known: Iterable[str], name: str) -> None:
    if others := sorted(set(kinds) - set(known)):
        raise ConfigError(
            f"model {name}: layers of type {', '.join(others)} cannot be counted from config.json; give its parameters "
            "and KV cache in a TOML file"
        )


def _dense_layers(read: _Reader, config: Mapping[str, Any], layers: int) -> int:
    dense_only = config.get("mlp_only_layers")
    dense = read.optional("first_k_dense_replace") + len(dense_only if isinstance(dense_only, list) else ())
    if (every := read.optional("decoder_sparse_step")) > 1:
        dense += layers - layers // every
    return dense


def _attention(
    read: _Reader, config: Mapping[str, Any], kind: str, width: int, heads: int
) -> tuple[int, int, float, int]:
    """Return of one layer: heads of keys and values, parameters, attention width, cached numbers per token."""
    if read.optional("kv_lora_rank"):
        return 0, *_latent_attention(read, width, heads)
    kv_heads = read.optional("num_key_value_heads") or heads
    head = read.optional("head_dim") or width // heads
    queries, kv_width = heads * head, kv_heads * head
    parameters = 2 * width * queries + 2 * width * kv_width
    if config.get("attn_output_gate") or kind == "qwen3_next":
        parameters += width * queries
    if kind.startswith("qwen2") or config.get("attention_bias"):
        parameters += queries + 2 * kv_width
    if kind.startswith("qwen3") or config.get("use_qk_norm"):
        parameters += 2 * head
    if kind == "gpt_oss":
        parameters += width + heads  # bias of the output, and a sink per head
    return kv_heads, parameters, float(queries), 2 * kv_width


def _latent_attention(read: _Reader, width: int, heads: int) -> tuple[int, float, int]:
    """Return parameters, attention width and cached numbers per token of one layer of latent attention."""
    rank, rope = read.count("kv_lora_rank"), read.count("qk_rope_head_dim")
    nope, value = read.count("qk_nope_head_dim"), read.count("v_head_dim")
    query_rank = read.optional("q_lora_rank")
    queries = heads * (nope + rope)
    parameters = width * query_rank + query_rank + query_rank * queries if query_rank else width * queries
    parameters += width * (rank + rope) + rank + rank * heads * (nope + value) + heads * value * width
    return parameters, heads * (nope + rope + value) / 2, rank + rope


def _delta_net(read: _Reader, width: int) -> int:
    """Return the parameters: queries, keys, values, gate, decay, rate per head; convolution, norm of a head, output."""
    value_heads, value_head = read.count("linear_num_value_heads"), read.count("linear_value_head_dim")
    keys = read.count("linear_num_key_heads") * read.count("linear_key_head_dim")
    values = value_heads * value_head
    projected = width * (2 * keys + 2 * values + 2 * value_heads)
    convolution = (2 * keys + values) * read.count("linear_conv_kernel_dim")
    return projected + convolution + 2 * value_heads + value_head + values * width


def _mamba(read: _Reader, width: int) -> int:
    """Return the parameters: inputs, gate, state's inputs and outputs, step widths; convolution, norm, output."""
    heads = read.count("mamba_num_heads")
    inner = heads * read.count("mamba_head_dim")
    convolved = inner + 2 * read.count("n_groups") * read.count("ssm_state_size")
    return (
        width * (inner + convolved + heads)
        + convolved * (read.count("conv_kernel") + 1)
        + 3 * heads
        + inner
        + inner * width
    )


class _FeedForward(NamedTuple):
    """The feed-forwards of all layers together: parameters (counts) and the intermediate size that a token passes."""

    other: int
    experts: int
    active_experts: int
    per_token: int
    width: float


def _feed_forward(read: _Reader, config: Mapping[str, Any], kind: str, width: int, stack: _Stack) -> _FeedForward:
    """Return the feed-forwards. One without a gate keeps half as many numbers per token: its width counts half."""
    gated = "relu2" not in (config.get("mlp_hidden_act"), config.get("hidden_act"))
    matrices, kept = (3, 1.0) if gated else (2, 0.5)
    other, passed = 0, 0
    if stack.dense:
        passed = stack.dense * read.count("intermediate_size")
        other = matrices * width * passed
    if not stack.sparse:
        return _FeedForward(other, 0, 0, 0, kept * passed)
    per_token, inner = read.count("num_experts_per_tok"), read.count("moe_intermediate_size", "intermediate_size")
    latent = read.optional("moe_latent_size")
    expert = matrices * (latent or width) * inner
    if kind == "gpt_oss":
        expert += 2 * inner + width  # biases
    shared = next((n for key in SHARED if (n := read.optional(key))), read.optional("n_shared_experts") * inner)
    beside = matrices * width * shared + 2 * width * latent + width * stack.experts
    beside += stack.experts if kind in ROUTER_BIAS else 0
    beside += width if read.optional(SHARED[0]) else 0  # the gate of the shared expert
    experts = stack.sparse * expert
    passed += stack.sparse * (per_token * inner + shared)
    other += stack.sparse * beside
    return _FeedForward(other, experts * stack.experts, experts * per_token, per_token, kept * passed)


SHARED = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
"""Keys for the intermediate size of the experts that every token passes: Qwen's, which have a gate, and Nemotron's."""


class _Reader:
    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self._config, self._name = config, name

    def count(self, *keys: str) -> int:
        """Return the first of the keys that exists; one must."""
        for key in keys:
            if value := self.optional(key):
                return value
        found = ", ".join(sorted(self._config)[:20]) or "nothing"
        raise ConfigError(
            f"model {self._name}: config.json must have {' or '.join(keys)}, a whole number of at least 1; "
            f"it has {found}"
        )

    def optional(self, key: str) -> int:
        """Return a whole number, 0 if it is missing or null."""
        value = self._config.get(key)
        if value is None:
            return 0
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(f"model {self._name}: {key} of config.json must be a whole number, got {value!r}")
        return value


GPU_RANGES = {
    "bf16_flops": (1e11, 1e17, "FLOP/s", "989e12"),
    "fp8_flops": (1e11, 1e17, "FLOP/s", "1979e12"),
    "memory_bytes": (1e9, 1e14, "bytes", "85.9e9"),
    "bandwidth": (1e9, 1e15, "bytes/s", "3.35e12"),
    "nvlink": (1e9, 1e14, "bytes/s", "450e9"),
    "network": (1e9, 1e14, "bytes/s", "50e9"),
    "gpus_per_node": (1, 10_000, "accelerators", "8"),
    "watts": (1, 1e5, "watts", "700"),
    "price_per_hour": (1e-3, 1e4, "USD per hour", "2.5"),
}
"""Least and largest figure, its unit, and the figure of an H100: outside, the unit is probably another one.

The largest are 20 to 100 times the figures of any accelerator on sale; the least are a weak laptop's.
"""
MODEL_RANGES = {
    "parameters": (1e4, 1e14, "parameters, not billions", "7.6e9"),
    "layers": (1, 10_000, "layers", "28"),
    "width": (1, 1e6, "numbers", "3584"),
    "attention_width": (1, 1e7, "numbers", "3584"),
    "feed_forward_width": (1, 1e8, "numbers", "18944"),
    "vocabulary": (1, 1e8, "entries", "152064"),
    "kv_bytes_per_token": (1, 1e9, "bytes per token", "57344"),
    "attention_heads": (1, 1e5, "heads", "28"),
    "kv_heads": (1, 1e5, "heads", "4"),
    "experts": (1, 1e6, "experts", "128"),
}
"""The same for a language model, with the figures of a 7B model; 0 means "not known" where it is allowed."""


def _check_ranges(entry: Gpu | LanguageModel, ranges: Mapping[str, tuple[float, float, str, str]]) -> None:
    """Raise ValueError if a given figure is out of its range."""
    for key, (least, most, unit, example) in ranges.items():
        value = getattr(entry, key)
        if value and not least <= value <= most:
            raise ValueError(f"{key} must be from {least:g} to {most:g} {unit}, got {value:g}; did you mean {example}?")


class Precision(StrEnum):
    """Format of numbers."""

    BF16 = "bf16"
    FP8 = "fp8"


class Named(StrictModel):
    """An entry of the catalogue."""

    name: str = Field(min_length=1)
    """Its name in tables."""
    aliases: list[str] = []
    """Other names; for a model, of others with the same architecture."""
    source: str = ""
    """Source of the figures."""


class Gpu(Named):
    """One accelerator. Figures are per accelerator, dense (no sparsity), decimal bytes."""

    bf16_flops: float = Field(gt=0)
    """Dense bf16 matrix products (FLOP/s)."""
    fp8_flops: float | None = Field(default=None, gt=0)
    """Dense fp8 matrix products (FLOP/s). None: it has none."""
    memory_bytes: float = Field(gt=0)
    """Device memory (bytes)."""
    bandwidth: float = Field(gt=0)
    """Memory bandwidth (bytes/s)."""
    nvlink: float = Field(default=0.0, ge=0)
    """Bandwidth to the other accelerators of its node, per direction (bytes/s). 0: there is no such link."""
    network: float = Field(gt=0)
    """Bandwidth between nodes (bytes/s)."""
    gpus_per_node: int = Field(default=8, ge=1)
    """Accelerators that share a node's fast link (count)."""
    attention_factor: float = Field(default=1.0, gt=0)
    """Speed of attention in training, where a kernel is faster than FlashAttention 2 (no unit)."""
    training_factor: float = Field(default=1.0, gt=0)
    """Share of peak that training reaches, over the share on an H100 (no unit)."""
    expert_training_factor: float | None = Field(default=None, gt=0)
    """The same for models with routed experts. None: ``training_factor``."""
    watts: float | None = Field(default=None, gt=0)
    """Board power at full load (W). None: not known."""
    price_per_hour: float | None = Field(default=None, gt=0)
    """Rent of one accelerator (USD per hour). None: not known."""
    price_source: str = ""
    """Terms, month and page of a public price, which ``plan`` alone assumes. Empty: the price is yours."""

    @model_validator(mode="after")
    def _units_are_plausible(self) -> Self:
        _check_ranges(self, GPU_RANGES)
        return self


class LanguageModel(Named):
    """One language model, in parameters (counts) and bytes of bf16."""

    parameters: float = Field(gt=0)
    """All parameters (count)."""
    active_parameters: float = Field(gt=0)
    """Parameters that one token uses, embeddings included (count); for a dense model all."""
    embedding_parameters: float = Field(default=0.0, ge=0)
    """Input embedding, of which a decode step reads a few rows only (count); 0 if it is also the output head."""
    layers: int = Field(ge=1)
    """Transformer layers (count); pairs, where mixers and feed-forwards are counted apart."""
    width: int = Field(ge=1)
    """Hidden size."""
    attention_width: float = Field(gt=0)
    """Query heads * head size (of scores and values the mean, where they differ), averaged over the layers; 0 in layers
    of linear attention and Mamba."""
    feed_forward_width: float = Field(default=0.0, ge=0)
    """Intermediate size that one token passes, of all its experts together, averaged over the layers. Without a gate it
    counts half: half as many numbers are kept for the backward pass."""
    vocabulary: int = Field(default=0, ge=0)
    """Entries of the output head (count)."""
    weight_bytes: float = Field(default=2.0, gt=0)
    """Bytes of one weight in an engine."""
    kv_bytes_per_token: float = Field(gt=0)
    """KV cache of one token in bf16 (bytes)."""
    state_bytes: float = Field(default=0.0, ge=0)
    """State of one sequence in layers of linear attention, of any length (bytes)."""
    attention_heads: int = Field(default=0, ge=0)
    """Query heads, which an engine divides among its accelerators (count); 0: not known."""
    kv_heads: int = Field(default=0, ge=0)
    """Heads of keys and values (count); 0: not known, or a latent cache."""
    experts: int = Field(default=0, ge=0)
    """Routed experts per layer (count); 0: dense."""
    experts_per_token: int = Field(default=0, ge=0)
    """Routed experts that one token passes (count); 0: dense."""
    expert_parameters: float = Field(default=0.0, ge=0)
    """Routed experts of all layers together (count); 0: dense."""
    expert_layers: int | None = Field(default=None, ge=1)
    """Layers with routed experts (count). None: all."""

    @model_validator(mode="after")
    def _counts_fit(self) -> Self:
        _check_ranges(self, MODEL_RANGES)
        for key in ("active_parameters", "embedding_parameters", "expert_parameters"):
            if getattr(self, key) > self.parameters:
                raise ValueError(f"{key} must be at most parameters = {self.parameters:g}, got {getattr(self, key):g}")
        given = [bool(self.experts), bool(self.experts_per_token), bool(self.expert_parameters)]
        if any(given) and not all(given):
            raise ValueError("experts, experts_per_token and expert_parameters belong together, got some of them")
        if self.expert_layers is not None and not self.experts:
            raise ValueError(f"expert_layers needs experts, got expert_layers={self.expert_layers} of a dense model")
        if self.expert_layers is not None and self.expert_layers > self.layers:
            raise ValueError(f"expert_layers must be at most layers = {self.layers}, got {self.expert_layers}")
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token must be at most experts = {self.experts}, got {self.experts_per_token}"
            )
        return self

    @property
    def routed_layers(self) -> int:
        """Layers with routed experts (count); 0 of a dense model."""
        return (self.expert_layers or self.layers) if self.experts else 0

    def adapter_parameters(self, rank: float) -> float:
        """Return the parameters of LoRA adapters of attention and, in a dense model, feed-forward layers (count).

        An adapter of a layer from I to O numbers has rank (I + O) parameters.
        """
        kv_width = self.kv_bytes_per_token / (2 * self.layers)  # of keys and values together
        numbers = 2 * (self.width + self.attention_width) + 2 * self.width + kv_width
        if not self.experts:
            numbers += 3 * (self.width + self.feed_forward_width)
        return rank * self.layers * numbers

    def divides_by(self, tensor_parallel: int) -> bool:
        """Return whether every accelerator of an engine gets as many whole heads."""
        return self.attention_heads % tensor_parallel == 0

    def cached_bytes(self, tensor_parallel: int) -> float:
        """Return the KV cache of one token on all accelerators of an engine (bytes): with fewer heads, copies."""
        return self.kv_bytes_per_token * (max(1.0, tensor_parallel / self.kv_heads) if self.kv_heads else 1.0)


def in_engine(gpu: Gpu, model: LanguageModel, weights: Precision, cache: Precision) -> tuple[Gpu, LanguageModel]:
    """Return accelerator and model as an engine of these formats has them.

    fp8 weights take half the bytes and are multiplied at the fp8 peak, or where there is none at that of bf16.
    A cache in fp8 takes half the bytes. States of linear attention stay as they are.
    """
    if weights is Precision.FP8:
        gpu = gpu.model_copy(update={"bf16_flops": gpu.fp8_flops or gpu.bf16_flops})
        model = model.model_copy(update={"weight_bytes": model.weight_bytes / 2})
    if cache is Precision.FP8:
        model = model.model_copy(update={"kv_bytes_per_token": model.kv_bytes_per_token / 2})
    return gpu, model


Entry = TypeVar("Entry", bound=Named)


def find_gpu(name: str, *, key: str = "hardware.gpu") -> Gpu:
    """Return an accelerator of the catalogue or of a TOML file (keys of ``Gpu``); else ConfigError, naming ``key``."""
    if is_path(name):
        return _from_file(Gpu, Path(name), key)
    return _found(_gpus(), name, key)


def find_model(name: str) -> LanguageModel:
    """Return a language model by its name in the catalogue, with or without ``owner/``, or from a file.

    The file: TOML with the keys of ``LanguageModel``, a Hugging Face ``config.json``, or a folder that has one.
    Raises ConfigError if the name is unknown, or the file is wrong.
    """
    if not is_path(name):
        return _found(_models(), _base_name(name), "hardware.model")
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if path.suffix == ".toml":
        return _from_file(LanguageModel, path, "hardware.model")
    config = read_json(path, "hardware.model")
    if not isinstance(config, dict):
        raise ConfigError(f"hardware.model {path} must hold a JSON object, as a Hugging Face config.json does")
    return model_from_huggingface(config, path.parent.name or str(path))


def model_from_huggingface(config: Mapping[str, Any], name: str) -> LanguageModel:
    """Return the model of a ``config.json``, parameters counted; ConfigError if a needed key is missing or wrong."""
    return _checked(LanguageModel, {"name": name, **model_tables(config, name)}, f"model {name}")


def gpu_names() -> list[str]:
    """Return the names of the accelerators in the catalogue."""
    return _names(_gpus())


def gpu_of_device(device_name: str) -> Gpu | None:
    """Return a GPU by the name of its driver, such as ``NVIDIA H100 80GB HBM3``; None: the catalogue has it not."""
    named = [name for name in gpu_names() if name.casefold() in device_name.casefold()]
    return find_gpu(max(named, key=len)) if named else None


def model_names() -> list[str]:
    """Return the names of the models in the catalogue."""
    return _names(_models())


def is_path(name: str) -> bool:
    """Return whether a name in a run file means a file or folder: by its form, or because it exists."""
    return name.endswith((".toml", ".json")) or ("/" in name and Path(name).exists()) or name.startswith(("/", "."))


def _base_name(name: str) -> str:
    name = name.rpartition("/")[2]
    for ending in ("-instruct", "-base", "-instruct-2507", "-thinking-2507"):
        if name.casefold().endswith(ending):
            name = name[: -len(ending)]
    return name


@functools.cache
def _gpus() -> Mapping[str, Gpu]:
    return _shipped(Gpu, "gpus.toml")


@functools.cache
def _models() -> Mapping[str, LanguageModel]:
    return _shipped(LanguageModel, "models.toml")


def _shipped(kind: type[Entry], file: str) -> Mapping[str, Entry]:
    """Return the entries of a shipped file by name and alias, in lower case."""
    tables = read_toml(Path(__file__).parent / "data" / file, "the catalogue")
    entries = [_checked(kind, {"name": name, **table}, name) for name, table in tables.items()]
    return {known.casefold(): one for one in entries for known in (*one.aliases, one.name)}


def _names(entries: Mapping[str, Named]) -> list[str]:
    return list(dict.fromkeys(one.name for one in entries.values()))


def _found(entries: Mapping[str, Entry], name: str, key: str) -> Entry:
    found = entries.get(name.casefold())
    if found is not None:
        return found
    shown = {known: one.name for known, one in entries.items()}
    hint = did_you_mean(name.casefold(), shown, shown_as=shown, num_names=3, cutoff=0.4)
    known_names = ", ".join(_names(entries))
    raise ConfigError(f"{key} must be a name of the catalogue or a file, got {name!r}; {hint}known: {known_names}")


def _from_file(kind: type[Entry], path: Path, key: str) -> Entry:
    return _checked(kind, {"name": path.stem, **read_toml(path, key)}, f"{key} {path}")


def _checked(kind: type[Entry], table: Mapping[str, Any], what: str) -> Entry:
    with explaining(kind, f"{what}: "):
        return kind.model_validate_json(json.dumps(table, default=str))
