"""What training needs in an accelerator's memory: weights, gradients, optimizer states, activations."""

from __future__ import annotations

from dataclasses import dataclass

from pipelinerl.catalogue import LanguageModel


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
        """All of it (bytes)."""
        return self.states + self.activations


LOGIT_BYTES = 2 + 4 + 4
"""Of one logit: bf16, fp32 for the softmax, and its gradient."""


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
    zero_stage: int = 3,
    pack_tokens: int = 16384,
    recomputation: bool = True,
    logits_tokens: int = 1024,
) -> TrainingMemory:
    """Return the memory of one accelerator that trains.

    Args:
        model: In bf16, with gradients in bf16, and master weights and two Adam moments in fp32.
        accelerators: Over which ZeRO spreads the states (count).
        zero_stage: 0: nothing is spread; 1: optimizer states; 2: gradients too; 3: weights too.
        pack_tokens: Tokens of one forward and backward pass on one accelerator.
        recomputation: Whether activations inside a layer are computed again in the backward pass.
        logits_tokens: Tokens whose logits exist at once.
    """
    p = model.parameters
    spread = [accelerators if zero_stage >= stage else 1 for stage in (3, 2, 1)]
    inside = kept_numbers(model)
    per_token = model.layers * model.width + inside if recomputation else model.layers * inside
    logits = min(logits_tokens, pack_tokens) * model.vocabulary * LOGIT_BYTES
    return TrainingMemory(
        weights=2 * p / spread[0],
        gradients=2 * p / spread[1],
        optimizer=12 * p / spread[2],
        activations=2.0 * pack_tokens * per_token + logits,
    )
