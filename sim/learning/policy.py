"""A small autoregressive transformer with a KV cache, as functions of its weights.

Pre-norm blocks, learned positions, ReLU, no biases. ``forward`` reads whole sequences (training, prefill);
``decode`` reads one token of each of ``M`` rows whose earlier keys and values are in a cache. Both give the same
log-probabilities but for rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

# Legend of shapes: M rows; T positions; V words; W width; H heads; D = W / H; K layers.

EPSILON = 1e-6
"""Added to the mean square before its root is taken."""
Weights = dict[str, torch.Tensor]
"""Parameters by name."""


@dataclass(frozen=True, slots=True)
class PolicyShape:
    """The sizes of a policy (counts)."""

    words: int
    positions: int
    layers: int
    width: int
    heads: int


class Cache(NamedTuple):
    """Keys and values of rows; positions that were not computed hold anything."""

    key_KMHDT: torch.Tensor
    value_KMHTD: torch.Tensor


def initial_weights(shape: PolicyShape, *, seed: int) -> Weights:
    """Return random weights: normal, of variance 1/inputs; the last of each block smaller, for the depth."""
    generator = torch.Generator().manual_seed(seed)
    width, inner = shape.width, 4 * shape.width

    def normal(rows: int, columns: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale

    to_residual = (2 * shape.layers) ** -0.5
    weights = {
        "word": normal(shape.words, width, 0.3),
        "position": normal(shape.positions, width, 0.3),
        "head": normal(shape.words, width, width**-0.5),
        "norm": torch.ones(width),
    }
    for layer in range(shape.layers):
        weights |= {
            f"{layer}.norm1": torch.ones(width),
            f"{layer}.qkv": normal(3 * width, width, width**-0.5),
            f"{layer}.out": normal(width, width, width**-0.5 * to_residual),
            f"{layer}.norm2": torch.ones(width),
            f"{layer}.up": normal(inner, width, width**-0.5),
            f"{layer}.down": normal(width, inner, inner**-0.5 * to_residual),
        }
    return weights


def new_cache(shape: PolicyShape, *, rows: int) -> Cache:
    """Return an empty cache."""
    size = shape.width // shape.heads
    return Cache(
        torch.zeros(shape.layers, rows, shape.heads, size, shape.positions),
        torch.zeros(shape.layers, rows, shape.heads, shape.positions, size),
    )


def forward(weights: Weights, shape: PolicyShape, word_MT: torch.Tensor) -> tuple[torch.Tensor, Cache]:
    """Return the logits after every position, shape [M, T, V], and a cache of all, from words [M, T] (int64)."""
    rows, length = word_MT.shape
    keys, values = [], []
    x_MTW = weights["word"][word_MT] + weights["position"][:length]
    for layer in range(shape.layers):
        qkv = functional.linear(_norm(x_MTW, weights[f"{layer}.norm1"]), weights[f"{layer}.qkv"])
        query, key, value = qkv.view(rows, length, 3, shape.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)  # [M, H, T, D]
        keys.append(key.transpose(2, 3))
        values.append(value)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_MTW = x_MTW + functional.linear(attended.transpose(1, 2).flatten(2), weights[f"{layer}.out"])
        x_MTW = x_MTW + _feed_forward(x_MTW, weights, layer)
    logit_MTV = functional.linear(_norm(x_MTW, weights["norm"]), weights["head"])
    return logit_MTV, Cache(torch.stack(keys), torch.stack(values))


def decode(
    weights: Weights, shape: PolicyShape, cache: Cache, *, word_M: torch.Tensor, position_M: torch.Tensor
) -> torch.Tensor:
    """Return the logits after one more word per row, shape [M, V], and put its keys and values into the cache.

    ``word_M`` and ``position_M``: shape [M], int64. Sizes do not depend on the content of the rows, so the result of a
    row is a function of that row alone, to the last bit: answers do not depend on their neighbours.
    """
    rows = len(word_M)
    row_M = torch.arange(rows)
    size = shape.width // shape.heads
    later_MT = torch.arange(shape.positions) > position_M[:, None]
    mask = torch.zeros(rows, shape.positions).masked_fill_(later_MT, float("-inf"))[:, None, None]
    x_MW = weights["word"][word_M] + weights["position"][position_M]
    for layer in range(shape.layers):
        qkv = functional.linear(_norm(x_MW, weights[f"{layer}.norm1"]), weights[f"{layer}.qkv"])
        query, key, value = qkv.view(rows, 3, shape.heads, size).unbind(1)  # [M, H, D]
        cache.key_KMHDT[layer][row_M, :, :, position_M] = key
        cache.value_KMHTD[layer][row_M, :, position_M] = value
        score = torch.matmul(query[:, :, None] * size**-0.5, cache.key_KMHDT[layer]) + mask  # [M, H, 1, T]
        attended = torch.matmul(score.softmax(-1), cache.value_KMHTD[layer])
        x_MW = x_MW + functional.linear(attended.reshape(rows, -1), weights[f"{layer}.out"])
        x_MW = x_MW + _feed_forward(x_MW, weights, layer)
    return functional.linear(_norm(x_MW, weights["norm"]), weights["head"])


def _norm(x: torch.Tensor, gain_W: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, (x.shape[-1],), gain_W, EPSILON)


def _feed_forward(x: torch.Tensor, weights: Weights, layer: int) -> torch.Tensor:
    inner = functional.relu(functional.linear(_norm(x, weights[f"{layer}.norm2"]), weights[f"{layer}.up"]))
    return functional.linear(inner, weights[f"{layer}.down"])
