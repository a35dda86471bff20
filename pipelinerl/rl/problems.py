"""The interface of a task: problems for the model, and rewards for its answers.

A task is an endless list of training problems and a finite list of held-out ones; no problem is in both.
The problem of an index depends on the index alone: a resumed run continues with the same problems from one number.
Past the last training problem the list starts again, in the same order: index
``i + count`` is problem ``i``. Held-out indices wrap the same way, from ``num_held_out`` on.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Problem:
    """One question."""

    prompt: str
    """Text that the model continues."""
    expected: Any = None
    """The data by which the task judges an answer; only the task reads it."""


class Task(Protocol):
    """Methods that a task must have. Any thread may call them."""

    @property
    def num_held_out(self) -> int | None:
        """Distinct held-out problems (count). None: as many as are asked for."""

    def problem(self, index: int, *, held_out: bool) -> Problem:
        """Return a problem, a function of the arguments alone; ``index`` is at least 0 and unbounded."""

    def reward(self, problem: Problem, answer: str) -> float:
        """Return the reward of an answer, generated text without the end token: 1 if right, 0 if wrong. May raise."""


def shuffled(place: int, *, count: int, seed: int) -> int:
    """Return the number at a place in [0, count) of the shuffled list 0..count-1, without making the list.

    A Feistel network of four rounds on the next even number of bits; values past the end go through it again.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for turn in range(4):
            digest = hashlib.blake2b(f"{seed} {turn} {right}".encode(), digest_size=16).digest()
            left, right = right, left ^ int.from_bytes(digest, "big") & mask
        place = left << half | right
        if place < count:
            return place
