"""Memory of an accelerator: KV cache of an engine; weights, gradients, optimizer states, activations of a trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipelinerl.errors import ConfigError
from pipelinerl.hardware.catalogue import Gpu, LanguageModel
from pipelinerl.hardware.coefficients import Coefficients

BF16_BYTES = 2
ZERO_STAGE = 3
"""Default where a run file states none."""
ROUNDING = 1e-9
"""By which a pack that just fits may be too large (no unit)."""


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Bytes per accelerator."""

    weights: float
    """bf16."""
    gradients: float
    """bf16."""
    optimizer: float
    """fp32: master weights and two Adam moments."""
    activations: float
    """bf16, kept for the backward pass of one pack; logits included."""

    @property
    def states(self) -> float:
        """All but the activations (bytes)."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """Sum (bytes)."""
        return self.states + self.activations


LOGITS_TOKENS = 1024
"""Tokens whose logits exist at once (count)."""
LOGIT_BYTES = 2 + 4 + 4
"""Bytes of one logit: bf16, fp32 for the softmax, and its gradient."""


def kept_numbers(model: LanguageModel) -> float:
    """Return the numbers that one layer keeps of one token for its backward pass.

    Two norms, in and out; queries and the attention's output; keys and values; of the feed-forward gate, up, their
    product before and after the activation.
    """
    kv_numbers = model.kv_bytes_per_token / (2 * model.layers)
    return 4 * model.width + 2 * model.attention_width + kv_numbers + 4 * model.feed_forward_width


def training_memory(
    model: LanguageModel,
    *,
    accelerators: int,
    zero_stage: int = ZERO_STAGE,
    pack_tokens: float = 16384,
    recomputation: float = 1.0,
) -> TrainingMemory:
    """Return the memory of one accelerator that trains: model and gradients in bf16, optimizer states in fp32.

    Args:
        model: The model.
        accelerators: Over which ZeRO spreads the states (count).
        zero_stage: 0: nothing is spread; 1: optimizer states; 2: gradients too; 3: weights too.
        pack_tokens: Tokens of one forward and backward pass on one accelerator.
        recomputation: Share of the layers whose activations are computed again in the backward pass (no unit).
    """
    p = model.parameters
    spread = [accelerators if zero_stage >= stage else 1 for stage in (3, 2, 1)]
    logits = min(LOGITS_TOKENS, pack_tokens) * model.vocabulary * LOGIT_BYTES
    return TrainingMemory(
        weights=2 * p / spread[0],
        gradients=2 * p / spread[1],
        optimizer=12 * p / spread[2],
        activations=pack_tokens * _kept_bytes(model, recomputation) + logits,
    )


def pack_that_fits(
    model: LanguageModel, *, memory_bytes: float, accelerators: int, zero_stage: int, recomputation: float
) -> float:
    """Return the tokens of a pass that fits beside the states in ``memory_bytes``; 0 or less: the states do not fit."""
    nothing = training_memory(model, accelerators=accelerators, zero_stage=zero_stage, pack_tokens=0)
    logits = LOGITS_TOKENS * model.vocabulary * LOGIT_BYTES
    return (memory_bytes - nothing.states - logits) / _kept_bytes(model, recomputation)


def _kept_bytes(model: LanguageModel, recomputation: float) -> float:
    """Return the bytes of one token until its backward pass: recomputed layers keep their input, and one all."""
    again, inside = recomputation, kept_numbers(model)
    numbers = model.layers * (again * model.width + (1 - again) * inside) + again * inside
    return 2.0 * numbers


def trainer_fits(
    gpu: Gpu, model: LanguageModel, *, accelerators: int, zero_stage: int, coefficients: Coefficients
) -> bool:
    """Return whether states and the activations of a pack fit into an accelerator; as for ``training_memory``."""
    memory = training_memory(
        model,
        accelerators=accelerators,
        zero_stage=zero_stage,
        pack_tokens=coefficients.pack_tokens,
        recomputation=coefficients.recomputation,
    )
    return memory.total <= coefficients.memory_share * gpu.memory_bytes * (1 + ROUNDING)


def kv_cache_tokens(
    gpu: Gpu,
    model: LanguageModel,
    *,
    tensor_parallel: int,
    coefficients: Coefficients,
    sequences: int = 1,
    longest: int = 0,
) -> int:
    """Return the tokens that the KV cache of one engine holds; 0 or less: the weights do not fit.

    Args:
        gpu: The accelerator.
        model: As an engine has it (``in_engine``).
        tensor_parallel: Accelerators of the engine (count).
        coefficients: The empirical numbers.
        sequences: Sequences whose states of linear attention lie in the same memory (count).
        longest: Tokens returned at least, if they fit beside one sequence's states; then not every slot can be filled.
    """
    usable = coefficients.memory_share * gpu.memory_bytes - coefficients.memory_reserve_bytes
    free = usable * tensor_parallel - model.parameters * model.weight_bytes
    cached = model.cached_bytes(tensor_parallel)
    of_all, of_one = ((free - count * model.state_bytes) / cached for count in (sequences, 1))
    return math.floor(max(of_all, min(of_one, longest)))


def check_fits(
    gpu: Gpu, model: LanguageModel, *, tensor_parallel: int, coefficients: Coefficients, longest: int
) -> None:
    """Raise ConfigError if weights and the KV cache of one rollout of ``longest`` tokens do not fit into an engine."""
    if kv_cache_tokens(gpu, model, tensor_parallel=tensor_parallel, coefficients=coefficients) >= longest:
        return
    weights = model.parameters * model.weight_bytes
    kept = weights + model.state_bytes
    needed = kept + longest * model.cached_bytes(tensor_parallel)
    usable = coefficients.memory_share * gpu.memory_bytes - coefficients.memory_reserve_bytes
    sizes = (2**power for power in range(17))
    fits = (size for size in sizes if size * usable >= kept + longest * model.cached_bytes(size))
    least = next((f"the smallest that fits is tensor_parallel={size}" for size in fits), "none is large enough")
    raise ConfigError(
        f"cluster.tensor_parallel={tensor_parallel} is too small for {model.name} on {gpu.name}: weights of "
        f"{weights / 1e9:.1f} GB and the KV cache of one rollout of {longest} tokens need {needed / 1e9:.1f} GB, "
        f"{max(0.0, usable) * tensor_parallel / 1e9:.1f} GB are available; {least}"
    )
