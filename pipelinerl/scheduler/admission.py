"""How many sequences an engine may have in progress, by the room that they take: ``scheduler.admission``."""

from __future__ import annotations

from typing import Protocol


class AdmissionSettings(Protocol):
    """The part of the configuration that is read here (``AdmissionConfig`` satisfies it)."""

    @property
    def soft(self) -> float:
        """Share of a KV cache that is aimed at."""

    @property
    def hard(self) -> float:
        """Share from which on nothing starts."""


FIRST = 8
"""Slots / first limit (ratio)."""


class AdmissionControl:
    """The limit of each engine, from 1 to its slots (mutable, can be pickled).

    Theory of operation. Whenever a sequence ends, its engine reports the share u of its KV cache that is in use, by n
    other sequences in progress. The share s of one sequence is a mean of u / n over about as many reports as the limit,
    or n if it is more: so the last ones of a round count little. With n = 0 it is forgotten. The limit is ``soft`` / s:
    as many sequences as would use the share aimed at. So it follows answers that grow, with the delay of one answer,
    and needs no search. From u = ``hard`` on nothing starts until something has ended. An engine that had to preempt
    reports u = 1.

    It begins at slots / ``FIRST`` and rises by one a report at most: answers that begin together are short at first.
    """

    def __init__(self, settings: AdmissionSettings, engines: range, *, slots_per_engine: int) -> None:
        self._settings, self._slots = settings, slots_per_engine
        self._share: dict[int, float] = {}  # of a sequence, by engine that has reported
        self.limits = dict.fromkeys(engines, max(1, slots_per_engine // FIRST))
        """Sequences in progress, at most, by engine that is not leaving (count)."""

    def reported(self, engine: int, used: float, num: int) -> int:
        """Take a report of an engine with ``num`` sequences in progress; return its limit (count)."""
        if num:
            before = self._share.get(engine, used / num)
            self._share[engine] = before + (used / num - before) / max(num, self.limits[engine])
        else:
            self._share.pop(engine, None)
        share, soft = self._share.get(engine, 0.0), self._settings.soft
        most = self._slots if share * self._slots <= soft else int(soft / share)
        limit = min(most, self.limits[engine] + 1)
        self.limits[engine] = max(1, min(limit, num) if used >= self._settings.hard else limit)
        return self.limits[engine]

    def join(self, engine: int) -> int:
        """Add an engine with the least limit of the others; return it (count)."""
        self.limits[engine] = limit = min(self.limits.values(), default=self._slots)
        return limit

    def leave(self, engine: int) -> None:
        """Forget an engine."""
        del self.limits[engine]
        self._share.pop(engine, None)
