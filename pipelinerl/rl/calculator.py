"""An environment that a model of 80,000 parameters can learn to use: a calculator for two numbers at a time."""

from __future__ import annotations

import asyncio
import re

from pipelinerl.rl.environments import Observation, Turn
from pipelinerl.rl.problems import shuffled
from pipelinerl.rl.sums import check_whole

_CALL = re.compile(r"(\d{1,6})\+(\d{1,6})", re.ASCII)


class Calculator:
    """Sums of some numbers, ``7+12+30=``, by a calculator that adds two of them.

    A turn ``7+12`` is answered by ``19,``. A turn ``=49`` is the result: it ends the episode, with reward 1 if it is
    right, else 0. Anything else is answered by ``?``. So n numbers take n turns.
    """

    def __init__(
        self, *, fewest: int = 2, most: int = 4, largest: int = 29, delay_s: float = 0.0, seed: int = 0
    ) -> None:
        """Check the settings.

        Args:
            fewest: Numbers of the shortest sum (count).
            most: Numbers of the longest sum, 2 to 8 (count).
            largest: The largest number, 9 to 999 (no unit).
            delay_s: Time in which the calculator answers (s).
            seed: Decides the sums.

        Raises:
            ValueError: If a setting is out of range.
            TypeError: If a setting is of another type.
        """
        check_whole(fewest=fewest, most=most, largest=largest, seed=seed)
        if not 2 <= fewest <= most <= 8:
            raise ValueError(f"fewest and most must be 2 to 8, in order, got {fewest}, {most}")
        if not 9 <= largest <= 999:
            raise ValueError(f"largest must be 9 to 999, got {largest}")
        if not 0 <= delay_s < float("inf"):
            raise ValueError(f"delay_s must be at least 0, got {delay_s}")
        self._fewest, self._numbers, self._delay_s, self._seed = fewest, largest + 1, delay_s, seed
        self._count = (most - fewest + 1) * self._numbers**2  # of every length as many as there are sums of two
        self._terms: tuple[int, ...] = ()

    @property
    def num_held_out(self) -> int:
        """Distinct held-out sums (count): every tenth."""
        return self._count // 10

    @property
    def num_training(self) -> int:
        """Distinct training sums (count)."""
        return self._count - self.num_held_out

    def terms(self, index: int, *, held_out: bool) -> tuple[int, ...]:
        """Return the numbers of the sum of an index."""
        place = index % self.num_held_out if held_out else self.num_held_out + index % self.num_training
        number = shuffled(place, count=self._count, seed=self._seed)
        longer, pair = divmod(number, self._numbers**2)
        first = divmod(pair, self._numbers)
        rest = (
            shuffled(pair, count=self._numbers**2, seed=self._seed + 1 + one)
            for one in range(longer + self._fewest - 2)
        )
        return (*first, *(one % self._numbers for one in rest))

    def worked_episode(self, index: int) -> list[tuple[str, bool]]:
        """Return a right episode of a training sum: texts in their order, and whether each is the model's."""
        terms = self.terms(index, held_out=False)
        total, texts = terms[0], [("+".join(str(one) for one in terms) + "=", False)]
        for term in terms[1:]:
            texts += [(f"{total}+{term}", True), (f"{total + term},", False)]
            total += term
        return [*texts, (f"={total}", True)]

    async def reset(self, index: int, *, held_out: bool) -> str:
        """Return the sum."""
        self._terms = self.terms(index, held_out=held_out)
        return "+".join(str(one) for one in self._terms) + "="

    async def step(self, turn: Turn) -> Observation:
        """Answer a call, or judge a result."""
        await asyncio.sleep(self._delay_s)
        if turn.text.startswith("="):
            return Observation(reward=float(turn.text == f"={sum(self._terms)}"), done=True)
        call = _CALL.fullmatch(turn.text)
        return Observation("?" if call is None else f"{int(call[1]) + int(call[2])},")

    async def close(self) -> None:
        """Nothing is held."""
