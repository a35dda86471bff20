"""Count the parameters of a model from its Hugging Face ``config.json``. No network, no transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipelinerl.errors import ConfigError

BYTES = 2
"""Bytes of one number in bf16."""


def model_tables(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return what a config says about a model, with the keys of ``LanguageModel``.

    A sliding window is not seen: its cache is counted as if it kept everything.

    Handles the usual decoder: grouped-query attention or multi-head latent attention (DeepSeek), a gated feed-forward
    of three matrices, RMS norms, routed and shared experts. Biases of queries, keys and values and the norms of
    queries and keys follow ``model_type`` (Qwen2 has the first, Qwen3 the second).

    Raises:
        ConfigError: If a key that is needed is missing or no number.
    """
    text = config.get("text_config")
    config = text if "hidden_size" not in config and isinstance(text, dict) else config
    read = _Reader(config, name)
    kind = str(config.get("model_type", ""))
    _refuse_layers_without_cache(config, name)
    width, layers, vocabulary = read.count("hidden_size"), read.count("num_hidden_layers"), read.count("vocab_size")
    heads = read.count("num_attention_heads")
    if read.optional("kv_lora_rank"):
        kv_heads = 0
        attention, attention_width, kv_numbers = _latent_attention(read, width, heads)
    else:
        kv_heads = read.optional("num_key_value_heads") or heads
        head = read.optional("head_dim") or width // heads
        attention_width, kv_width = float(heads * head), kv_heads * head
        attention = 2 * width * heads * head + 2 * width * kv_width
        if kind.startswith("qwen2") or config.get("attention_bias"):
            attention += heads * head + 2 * kv_width
        if kind.startswith("qwen3"):
            attention += 2 * head
        kv_numbers = 2 * kv_width

    experts = next((n for key in EXPERTS if (n := read.optional(key))), 0)
    if experts:
        per_token = read.count("num_experts_per_tok")
        expert = 3 * width * read.count("moe_intermediate_size", "intermediate_size")
        shared = _shared(read, width)
        dense_only = config.get("mlp_only_layers")
        dense_layers = read.optional("first_k_dense_replace") + len(dense_only if isinstance(dense_only, list) else ())
        if (every := read.optional("decoder_sparse_step")) > 1:
            dense_layers += layers - layers // every
        router = width * experts + (experts if kind == "deepseek_v3" else 0)  # and a bias per expert to balance them
        sparse_layers = layers - dense_layers
        expert_parameters = sparse_layers * experts * expert
        dense_mlp = 3 * width * read.count("intermediate_size") if dense_layers else 0
        other_mlp = sparse_layers * (shared + router) + dense_layers * dense_mlp
        active_mlp = other_mlp + sparse_layers * per_token * expert
        passed = (sparse_layers * (per_token * expert + shared) + dense_layers * dense_mlp) / layers
    else:
        per_token = expert_parameters = 0
        passed = 3 * width * read.count("intermediate_size")
        other_mlp = active_mlp = layers * passed

    tied = bool(config.get("tie_word_embeddings", kind.startswith("gemma")))
    embedding = vocabulary * width
    other = layers * (attention + 2 * width) + width + embedding * (1 if tied else 2)
    return {
        "parameters": float(other + other_mlp + expert_parameters),
        "active_parameters": float(other + active_mlp),
        "embedding_parameters": 0.0 if tied else float(embedding),
        "layers": layers,
        "width": width,
        "attention_width": attention_width,
        "feed_forward_width": passed / (3 * width),
        "vocabulary": vocabulary,
        "kv_bytes_per_token": float(layers * kv_numbers * BYTES),
        "attention_heads": heads,
        "kv_heads": kv_heads,
        "experts": experts,
        "experts_per_token": per_token,
        "expert_parameters": float(expert_parameters),
        "source": "counted from the model's config.json",
    }


EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Keys for the number of routed experts: Qwen, DeepSeek, Mixtral."""


def _refuse_layers_without_cache(config: Mapping[str, Any], name: str) -> None:
    """Raise ConfigError for layers that keep a state instead of a KV cache: neither is counted here."""
    kinds = config.get("layer_types")
    others = sorted({str(kind) for kind in kinds if "attention" not in str(kind)} if isinstance(kinds, list) else ())
    if (isinstance(kinds, list) and "linear_attention" in kinds) or config.get("full_attention_interval"):
        others.append("linear_attention")
    if others:
        raise ConfigError(
            f"model {name}: layers of type {', '.join(others)} cannot be counted from config.json; give its parameters "
            "and KV cache in a TOML file"
        )


def _latent_attention(read: _Reader, width: int, heads: int) -> tuple[int, float, int]:
    """Return parameters, attention width and cached numbers per token of one layer of latent attention."""
    rank, rope = read.count("kv_lora_rank"), read.count("qk_rope_head_dim")
    nope, value = read.count("qk_nope_head_dim"), read.count("v_head_dim")
    query_rank = read.optional("q_lora_rank")
    queries = heads * (nope + rope)
    parameters = width * query_rank + query_rank + query_rank * queries if query_rank else width * queries
    parameters += width * (rank + rope) + rank + rank * heads * (nope + value) + heads * value * width
    return parameters, heads * (nope + rope + value) / 2, rank + rope


def _shared(read: _Reader, width: int) -> int:
    """Return the parameters of the experts of one layer that every token passes."""
    if shared_width := read.optional("shared_expert_intermediate_size"):
        return 3 * width * shared_width + width  # and the gate of the shared expert
    return read.optional("n_shared_experts") * 3 * width * read.optional("moe_intermediate_size")


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
