"""A transformer of Qwen2's shape in plain torch, for measuring: random weights, nothing learnt."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch.nn import functional

from pipelinerl.errors import ConfigError

# Legend of shapes: B sequences; L tokens of each; C tokens of context of each; V words; D width; H heads; K heads of
# keys and values; E size of a head.

Cache = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class PlainShape:
    """Sizes of a model."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    """Width inside the feed-forward part."""
    vocabulary: int

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Read the shape of a model in Hugging Face format.

        Raises:
            ConfigError: If its config.json cannot be read or lacks a size; models with experts are not supported.
        """
        path = folder / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
            heads, width = int(config["num_attention_heads"]), int(config["hidden_size"])
            return cls(
                layers=int(config["num_hidden_layers"]),
                width=width,
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_size=int(config.get("head_dim") or width // heads),
                inner=int(config["intermediate_size"]),
                vocabulary=int(config["vocab_size"]),
            )
        except OSError as error:
            raise ConfigError(f"--model must be a folder in Hugging Face format, {path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--model must be a folder of a dense model, {path} lacks {error}") from None

    def products(self) -> list[tuple[int, int]]:
        """Return the sizes of the matrices of a layer."""
        attention, kv = self.heads * self.head_size, 2 * self.kv_heads * self.head_size
        return [
            (self.width, attention + kv),
            (attention, self.width),
            (self.width, 2 * self.inner),
            (self.inner, self.width),
        ]


def parameter_count(shape: PlainShape) -> int:
    """Return the parameters of the model: matrices, and embeddings that are not shared (count)."""
    return shape.layers * sum(rows * columns for rows, columns in shape.products()) + 2 * shape.vocabulary * shape.width


class PlainModel(torch.nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    """Attention with grouped heads and a gated feed-forward part per layer; no positions, no biases."""

    def __init__(self, shape: PlainShape, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape

        def matrix(rows: int, columns: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(rows, columns, device=device, dtype=dtype) / rows**0.5)

        self.embedding = matrix(shape.vocabulary, shape.width)
        self.head = matrix(shape.width, shape.vocabulary)
        layers = ([matrix(*size) for size in shape.products()] for _ in range(shape.layers))
        self.layers = torch.nn.ModuleList(torch.nn.ParameterList(layer) for layer in layers)

    def hidden(self, token_BL: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states of whole sequences, shape [B, L, D]."""
        x_BLD = self.embedding[token_BL]
        for layer in self.layers:
            x_BLD = self._layer(layer, x_BLD, None)
        return x_BLD

    def loss(self, token_BL: torch.Tensor) -> torch.Tensor:
        """Return the mean negative log-likelihood of every next token (nats)."""
        logit_BLV = _norm(self.hidden(token_BL[:, :-1])) @ self.head
        return functional.cross_entropy(logit_BLV.flatten(0, 1).float(), token_BL[:, 1:].flatten())

    def decode(self, token_B: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Return the likeliest next token of every sequence after one more; the last place of the cache is written."""
        x_BLD = self.embedding[token_B][:, None]
        for layer, kv in zip(self.layers, cache, strict=True):
            x_BLD = self._layer(layer, x_BLD, kv)
        return (_norm(x_BLD[:, 0]) @ self.head).argmax(dim=-1)

    def empty_cache(self, batch: int, ctx: int) -> Cache:
        """Return keys and values of ``ctx`` tokens of context and the one to come, each of shape [B, K, C + 1, E]."""
        shape = self.shape
        size = (batch, shape.kv_heads, ctx + 1, shape.head_size)
        like = self.embedding
        return [(like.new_zeros(size), like.new_zeros(size)) for _ in range(shape.layers)]

    def _layer(
        self, layer: torch.nn.ParameterList, x_BLD: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        shape = self.shape
        into, out, up, down = layer
        heads = (_norm(x_BLD) @ into).unflatten(-1, (-1, shape.head_size)).transpose(1, 2)
        q_BHLE, k_BKLE, v_BKLE = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        if kv is not None:
            kv[0][:, :, -1:], kv[1][:, :, -1:] = k_BKLE, v_BKLE
            k_BKLE, v_BKLE = kv
        attended = functional.scaled_dot_product_attention(
            q_BHLE, k_BKLE, v_BKLE, is_causal=kv is None, enable_gqa=shape.heads != shape.kv_heads
        )
        x_BLD = x_BLD + attended.transpose(1, 2).flatten(2) @ out
        gate, value = (_norm(x_BLD) @ up).chunk(2, dim=-1)
        return x_BLD + (functional.silu(gate) * value) @ down


def _norm(x: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:])
