"""Count the parameters of a model from its Hugging Face ``config.json``. No network, no transformers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pipelinerl.errors import ConfigError

STATE_BYTES = 4
"""Of one number of the state of a gated delta net or a Mamba-2 layer, which engines keep in fp32."""
BYTES = 2
"""Bytes of one number in bf16."""
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Keys for the number of routed experts: Qwen, DeepSeek, Mixtral."""
ROUTER_BIAS = ("deepseek_v3", "kimi_k2", "glm4_moe", "glm4_moe_lite", "nemotron_h", "gpt_oss")
"""Values of ``model_type`` whose router has a bias per expert, most to balance them."""
SHORT_WINDOW = 512
"""A sliding window of so many tokens or fewer (gpt-oss has 128) counts as no cache, and its attention as none."""
BLOCKS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
"""Letters of ``hybrid_override_pattern``, and the same in ``layers_block_type``."""


def model_tables(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return what a config says about a model, with the keys of ``LanguageModel``.

    Handles the usual decoder: grouped-query attention (with an output gate or not) or multi-head latent attention
    (DeepSeek), a feed-forward of three matrices (without a gate, ``relu2``, of two), RMS norms, routed experts (in a
    latent width or not) and shared ones. Gated delta nets (Qwen3-Next, Qwen3.5) and Mamba-2 layers (Nemotron-H) have
    parameters but no KV cache. Biases of queries, keys and values and the norms of queries and keys follow
    ``model_type`` (Qwen2 has the first, Qwen3 the second).

    Layers with a sliding window count as full attention if the window is longer than ``SHORT_WINDOW``. Layers that
    predict further tokens (MTP) are not counted.

    Raises:
        ConfigError: If a key that is needed is missing or no number, or a kind of layer is not known.
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
    """Return how many layers are of each kind."""
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
    others = sorted(set(kinds) - set(known))
    if others:
        raise ConfigError(
            f"model {name}: layers of type {', '.join(others)} cannot be counted from config.json; give its parameters "
            "and KV cache in a TOML file"
        )


def _dense_layers(read: _Reader, config: Mapping[str, Any], layers: int) -> int:
    """Return how many layers of a mixture of experts have none (count)."""
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
    """Return the parameters of one gated delta net: queries and keys; values and their gate; a decay, a rate per head.

    Then a convolution over the first three, the norm of a head, and the output.
    """
    value_heads, value_head = read.count("linear_num_value_heads"), read.count("linear_value_head_dim")
    keys = read.count("linear_num_key_heads") * read.count("linear_key_head_dim")
    values = value_heads * value_head
    projected = width * (2 * keys + 2 * values + 2 * value_heads)
    convolution = (2 * keys + values) * read.count("linear_conv_kernel_dim")
    return projected + convolution + 2 * value_heads + value_head + values * width


def _mamba(read: _Reader, width: int) -> int:
    """Return the parameters of one Mamba-2 layer: inputs and their gate, the state's inputs and outputs, step widths.

    Then a convolution with bias, three numbers per head, a norm, and the output.
    """
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
    """Takes whole numbers out of a config."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self._config, self._name = config, name

    def count(self, *keys: str) -> int:
        """Return the first of the keys that is there; one has to be."""
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
