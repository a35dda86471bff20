"""How fast engines are in closed form: with so many full slots, and from the start of many answers to the last end.

The formulas stand in ``pipelinerl.theory.steady_state``, which puts them together with a trainer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from pipelinerl.hardware.costs import DecodeStep
from pipelinerl.theory.lengths import LengthStatistics
from pipelinerl.theory.turns import TurnMeans
from pipelinerl.util.arrays import FloatArray

GRID = 17
"""Numbers of full slots for which the seconds of an answer are computed (count)."""


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines of a candidate."""

    number: int
    slots: float
    """Sequences that an engine decodes together: H, or what the KV cache holds of them (mean)."""
    cache_tokens: float
    decode_step: DecodeStep
    prompt_s: float
    """Prefill of a prompt."""
    dispatch_s: float
    request_s: float
    """Front end of an engine, per answer: one after the other."""
    report_s: float
    answers: LengthStatistics
    acting_s: float = 0.0
    """Seconds in which the environment of a rollout acts, without a slot."""
    reset_s: float = 0.0
    """Those of them before its first token."""
    held_up_s: float = 0.0
    """Seconds in which an answer waits at its engine for the ends of prefills that were under way when it came."""
    uneven: float = 1.0
    """Seconds of a token over those in a batch of the mean size: of rollouts with turns as many as chance has it are
    there (``of_rollouts``)."""

    @property
    def front_end_s(self) -> float:
        """Seconds of an answer before its engine and after its last token, besides the dispatch."""
        return self.request_s + self.report_s

    def step_s(self, batch: float) -> float:
        """Return seconds per token of a sequence in a stationary batch, the prefill of others included."""
        even_s = self.decode_step.of(batch, batch * self.answers.context) + batch / self.answers.mean * self.prompt_s
        return even_s * self.uneven

    def of_rollouts(self, each: float) -> Engines:
        """Return engines of so many rollouts each (mean), which come back to the same one turn after turn.

        A rollout is there, or for Z seconds in all with its environment. Whatever the distributions of single turns and
        gaps, of N rollouts k are there with probability p(k) ~ p(k - 1) (N - k + 1) / Z * (seconds of an answer beside
        k) / k. What an engine loses while it happens to be empty, it does not make up for while it is crowded.
        Source: Baskett, Chandy, Muntz and Palacios 1975: a station where nobody waits, and one that all share.
        """
        if not self.acting_s:
            return replace(self, slots=min(each, self.slots))
        low = math.floor(each)
        (low_slots, low_rate), (high_slots, high_rate) = self._shared(low), self._shared(low + 1)
        slots = low_slots + (each - low) * (high_slots - low_slots)
        rate = low_rate + (each - low) * (high_rate - low_rate)
        rest_s = self.dispatch_s + self.front_end_s + self.held_up_s
        uneven = (slots / rate - rest_s) / (self.answer_s(self.busy(slots)) - rest_s)
        return replace(self, slots=slots, uneven=uneven)

    def _shared(self, number: int) -> tuple[float, float]:
        """Return full slots and answers per second of an engine of so many rollouts, as ``of_rollouts`` has it."""
        if not number:
            return 0.0, 0.0
        grid = np.linspace(1.0, max(1.0, self.slots), GRID)
        slots_K = np.minimum(np.arange(1.0, number + 1), self.slots)
        answer_K = np.interp(slots_K, grid, [self.answer_s(self.busy(slots)) for slots in grid.tolist()])
        left_K = np.arange(number, 0, -1)  # with their environment, and one more
        log_p_K = np.cumsum(np.log(left_K / self.acting_s * answer_K / slots_K))
        most = max(0.0, float(log_p_K.max()))
        p_K = np.exp(log_p_K - most)
        p_K /= p_K.sum() + math.exp(-most)
        return float((p_K * slots_K).sum()), float((p_K * slots_K / answer_K).sum())

    def answer_s(self, batch: float) -> float:
        """Return seconds from one answer of a slot to the next; a freed slot misses a step."""
        return self._answer_s(self.step_s(batch))

    def _answer_s(self, step_s: float) -> float:
        return (self.answers.mean + 1) * step_s + self.dispatch_s + self.front_end_s + self.held_up_s

    def open_over_slots(self, slots: float, *, with_tokens: bool = False) -> float:
        """Return rollouts that are open over those that have a slot, with so many slots of an engine full.

        ``with_tokens``: only those that have a token, which ages.
        """
        outside_s = self.acting_s - (self.reset_s if with_tokens else 0.0)
        return 1 + outside_s / self.answer_s(self.busy(slots)) if outside_s else 1.0

    def longest_s(self, number: int, slots: float) -> float:
        """Return the mean of the longest of so many rollouts (s), with so many slots of an engine full."""
        token_s, turns = self.step_s(self.busy(slots)), self.answers.turns
        return self.answers.longest(number) * token_s if turns is None else turns.longest_s(number, token_s)

    def busy(self, slots: float) -> float:
        """Return how many of an engine's slots are decoding on average."""
        step_s = self.step_s(slots)
        at_front_end_s, answer_s = self._at_front_end_s(slots, step_s)
        return slots * (1 - (step_s + self.dispatch_s + at_front_end_s) / answer_s)

    def sampling(self, slots: float) -> float:
        """Return how many of an engine's slots are not at its front end on average."""
        at_front_end_s, answer_s = self._at_front_end_s(slots, self.step_s(slots))
        return slots * (1 - at_front_end_s / answer_s)

    def _at_front_end_s(self, slots: float, step_s: float) -> tuple[float, float]:
        """Return an answer's seconds at the front end, queue included where that is the slowest, and all its own."""
        answer_s = self._answer_s(step_s)
        queue_s = max(0.0, slots * self.request_s - answer_s)
        return self.front_end_s + queue_s, answer_s + queue_s

    def batch_s(self, number: float, slots: float) -> float:
        """Return seconds for so many answers of all engines, each with so many slots full."""
        return number * self.answer_s(self.busy(slots)) / (self.number * slots)

    def sent_s(self, number: float) -> float:
        """Return seconds in which the front ends of all engines take so many answers, one after the other."""
        return number * self.request_s / self.number

    def phase_s(self, number: int) -> float:
        """Return seconds from the start of so many answers to the end of the last."""
        if self.answers.turns is not None:
            return self._turns_phase_s(self.answers.turns, number)
        each = number / self.number
        answers = self.answers
        peak = float((answers.share * (answers.prompt_tokens + answers.position)).max())
        fresh = min(each, self.slots, self.cache_tokens / peak)
        drain_s = self._drain_s(fresh * answers.share, number, answers.share, answers.prompt_tokens + answers.position)
        if each > fresh:
            drain_s = max(drain_s, self._refilled_s(each, number))
            drain_s = max(drain_s, self.sent_s(number) - fresh * self.request_s)
        return drain_s + each * self.prompt_s + self.dispatch_s + fresh * self.request_s + self.report_s

    def _turns_phase_s(self, turns: TurnMeans, number: int) -> float:
        """Return the same of rollouts with turns: full environments first, then a drain of lives."""
        opened = self.number * self.slots * self.open_over_slots(self.slots)

        def token_s(working: float) -> float:
            """Return seconds of a token if so many rollouts are not with their environment."""
            batch = working / self.number
            slots = max(1.0, min(batch, self.slots))
            return self.step_s(slots) * max(1.0, batch / slots)

        drain_s = turns.drain_s(min(opened, number), token_s, refilled=False)
        if number > opened:
            life_s = turns.lives_s(self.answer_s(self.busy(self.slots)) / self.answers.mean)
            spread = 1 + float(life_s.var() / life_s.mean() ** 2)
            full_s = self.batch_s(max(0.0, number - opened * spread / 2), self.slots)
            drain_s = max(drain_s, full_s + turns.drain_s(opened, token_s, refilled=True))
        return max(drain_s, self.sent_s(number)) + self.dispatch_s + self.front_end_s

    def _refilled_s(self, each: float, number: int) -> float:
        """Return seconds until the last of ``number`` is done without prefill, ``each`` per engine, as slots get free.

        What is begun after the grid's end is begun in a stationary batch.
        """
        answers, slots = self.answers, min(self.slots, each)
        rounds = each / slots
        later = max(0.0, rounds - float(answers.begun.sum()))
        begun = np.diff(np.minimum(answers.begun.cumsum(), rounds), prepend=0.0)
        begun = begun[: int(np.flatnonzero(begun)[-1]) + 1]
        full = np.asarray(np.convolve(begun, answers.share), dtype=np.float64)
        tokens = np.convolve(begun, answers.share * answers.position)
        context = answers.prompt_tokens + tokens / np.maximum(full, 1e-300)
        missed_s = (rounds - 1) * (self.answer_s(slots) - answers.mean * self.step_s(slots))
        later_s = later * answers.mean * (self.step_s(slots) - slots / answers.mean * self.prompt_s)
        return later_s + missed_s + self._drain_s(slots * full, number, np.minimum(full / rounds, 1.0), context)

    def _drain_s(self, batch: FloatArray, number: int, share: FloatArray, context: FloatArray) -> float:
        """Return seconds until the last of ``number`` is done: an engine that still has one has one at least."""
        alive = 1 - (1 - share) ** max(number, 1)
        batch = np.maximum(batch, 1.0)
        return float(self.answers.width * (alive * self.decode_step.of_all(batch, batch * context)).sum())
