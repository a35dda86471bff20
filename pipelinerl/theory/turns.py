"""Turns, as far as the steady state of a run depends on them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipelinerl.hardware.costs import prefill_s
from pipelinerl.hardware.tables import PrefillConfig
from pipelinerl.util.arrays import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Turn:
    """The turns of one rollout; T of them."""

    before_T: IntArray
    """Tokens of the context before each turn, its observation included (count)."""
    observed_T: IntArray
    """Tokens of that which are new: the prompt, then the observations (count)."""
    generated_T: IntArray
    """Tokens that each turn generates (count)."""
    acting_T: FloatArray
    """Time in which the environment acts before each turn (s)."""


@dataclass(frozen=True, slots=True)
class TurnMeans:
    """Means over rollouts."""

    acting_s: float
    """Time in which the environment of a rollout acts, its reset included (s)."""
    reset_s: float
    """Those of them before the first turn (s)."""
    gap_s: float
    """Time in which it acts before a turn but the first, of those gaps (s)."""
    context: float
    """Context of a token that is generated (tokens)."""
    held: float
    """Context of a rollout between two turns, over time (tokens)."""
    observed: tuple[float, float, float]
    """Of the prefills of a rollout whose KV cache is there: their number, tokens, and squares."""
    whole: tuple[float, float, float]
    """The same without any cache: every turn prefills all that came before it."""

    @classmethod
    def of(cls, rollouts: list[Turn]) -> TurnMeans:
        """Return the means over some rollouts."""
        number = len(rollouts)
        before, observed, generated, acting = (
            np.concatenate([getattr(one, name) for one in rollouts]).astype(np.float64)
            for name in ("before_T", "observed_T", "generated_T", "acting_T")
        )
        first = np.concatenate([np.arange(len(one.before_T)) == 0 for one in rollouts])
        gaps = acting[~first]
        held = before - observed
        return cls(
            acting_s=float(acting.sum()) / number,
            reset_s=float(acting[first].sum()) / number,
            gap_s=float(gaps.mean()) if len(gaps) else 0.0,
            context=float((generated * (before + generated / 2)).sum() / generated.sum()),
            held=float((held * acting)[~first].sum() / gaps.sum()) if gaps.sum() else 0.0,
            observed=(
                float((observed > 0).sum()) / number,
                float(observed.sum()) / number,
                float((observed * (before + held)).sum()) / number,
            ),
            whole=(float((before > 0).sum()) / number, float(before.sum()) / number, float((before**2).sum()) / number),
        )

    def prefill_s(self, prefill: PrefillConfig, *, kept: float) -> float:
        """Return the seconds in which all turns of a rollout are prefilled.

        Args:
            prefill: The coefficients.
            kept: Share of the turns whose KV cache is still there.
        """
        number, tokens, squares = (
            kept * there + (1 - kept) * gone for there, gone in zip(self.observed, self.whole, strict=True)
        )
        return prefill_s(prefill, sequences=number, tokens=tokens, squares=squares)
