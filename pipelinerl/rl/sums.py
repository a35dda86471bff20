"""Tasks that a model of 80,000 parameters can do: sums of two numbers, and a digit added again and again."""

from __future__ import annotations

import asyncio
import re
from operator import add, mul, sub

from pipelinerl.rl.environments import Observation, Turn
from pipelinerl.rl.problems import Problem, shuffled


class _Listed:
    """A finite list of problems, shuffled by a seed; every tenth is held out."""

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._seed = seed
        self.num_held_out = count // 10
        self.num_training = count - self.num_held_out

    def _number(self, index: int, *, held_out: bool) -> int:
        """Return the problem of an index, in [0, count)."""
        place = index % self.num_held_out if held_out else self.num_held_out + index % self.num_training
        return shuffled(place, count=self._count, seed=self._seed)


_OPERATORS = {"+": add, "-": sub, "*": mul}


class Arithmetic(_Listed):
    """Sums, differences and products of two whole numbers: ``12+7=``, answered by ``19`` and nothing else.

    All ``len(operators) * (largest_operand + 1)**2`` problems are shuffled by ``seed``; every tenth is held out.
    ``7+12`` and ``12+7`` are two problems.
    """

    def __init__(self, *, largest_operand: int = 49, operators: str = "+", seed: int = 0) -> None:
        """Check the settings.

        Args:
            largest_operand: Operands are 0 to this, both included (no unit).
            operators: Some of ``+``, ``-`` and ``*``, each at most once.
            seed: Shuffles the problems, and so decides which are held out.

        Raises:
            ValueError: If there are fewer than 10 problems, or an operator is unknown, repeated or missing.
            TypeError: If a setting is of another type.
        """
        check_whole(largest_operand=largest_operand, seed=seed)
        if largest_operand < 3:
            raise ValueError(f"largest_operand must be at least 3, got {largest_operand}")
        if not isinstance(operators, str) or not operators or set(operators) - _OPERATORS.keys():
            raise ValueError(f"operators must be some of '+-*', got {operators!r}")
        if len(set(operators)) < len(operators):
            raise ValueError(f"operators must not repeat, got {operators!r}")
        self._operands = largest_operand + 1
        self._operators = operators
        super().__init__(len(operators) * self._operands**2, seed)

    def problem(self, index: int, *, held_out: bool) -> Problem:
        """Return the problem of an index; see ``pipelinerl/rl/problems.py``."""
        pair, operator = divmod(self._number(index, held_out=held_out), len(self._operators))
        left, right = divmod(pair, self._operands)
        sign = self._operators[operator]
        return Problem(prompt=f"{left}{sign}{right}=", expected=str(_OPERATORS[sign](left, right)))

    def reward(self, problem: Problem, answer: str) -> float:
        """Return 1 if the answer is the number, in its shortest form, up to surrounding space; else 0."""
        return float(answer.strip() == problem.expected)

    def worked_answer(self, problem: Problem) -> str:
        """Return the text of a right answer."""
        return str(problem.expected)


COUNTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOP"
"""Names of the steps, the last one first: one character each."""


class Chain(_Listed):
    """A digit added again and again, modulo 10, step by step: ``c7+5=`` is answered by ``c2b7a2``.

    The prompt names the first step, the digit to begin with and the digit to add; the answer names every step, the
    last one being ``a``. Only the result after ``a`` is judged, so the steps before it are the model's own reasoning:
    ``2 n`` tokens for n steps, if each character is a token.
    """

    def __init__(self, *, fewest_steps: int = 15, most_steps: int = len(COUNTERS), seed: int = 0) -> None:
        """Check the settings: steps of the shortest and of the longest problem; ``seed`` decides which are held out.

        Raises:
            ValueError: If the numbers of steps are not in order from 1 to 42.
            TypeError: If a setting is of another type.
        """
        check_whole(fewest_steps=fewest_steps, most_steps=most_steps, seed=seed)
        if not 1 <= fewest_steps <= most_steps <= len(COUNTERS):
            raise ValueError(
                f"fewest_steps and most_steps must be 1 to {len(COUNTERS)}, in order, got {fewest_steps}, {most_steps}"
            )
        self._fewest_steps = fewest_steps
        super().__init__(100 * (most_steps - fewest_steps + 1), seed)

    def problem(self, index: int, *, held_out: bool) -> Problem:
        """Return the problem of an index; see ``pipelinerl/rl/problems.py``."""
        steps, digits = divmod(self._number(index, held_out=held_out), 100)
        steps += self._fewest_steps
        start, added = divmod(digits, 10)
        return Problem(f"{COUNTERS[steps - 1]}{start}+{added}=", expected=f"a{(start + steps * added) % 10}")

    def reward(self, problem: Problem, answer: str) -> float:
        """Return 1 if the answer ends in the result of step ``a``, up to surrounding space; else 0."""
        return float(answer.strip().endswith(problem.expected))

    def worked_answer(self, problem: Problem) -> str:
        """Return the text of a right answer, all steps written out."""
        steps, start, added = COUNTERS.index(problem.prompt[0]) + 1, int(problem.prompt[1]), int(problem.prompt[3])
        return "".join(f"{COUNTERS[steps - step]}{(start + step * added) % 10}" for step in range(1, steps + 1))


def check_whole(**settings: object) -> None:
    """Raise TypeError if a setting is not a whole number."""
    for name, value in settings.items():
        if type(value) is not int:
            raise TypeError(f"{name} must be a whole number, got {value!r}")


# The environment of a calculator for two numbers at a time.

_CALL = re.compile(r"(\d{1,6})\+(\d{1,6})", re.ASCII)


class Calculator(_Listed):
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
        self._fewest, self._numbers, self._delay_s = fewest, largest + 1, delay_s
        self._terms: tuple[int, ...] = ()
        super().__init__((most - fewest + 1) * self._numbers**2, seed)  # of every length as many as sums of two

    def terms(self, index: int, *, held_out: bool) -> tuple[int, ...]:
        """Return the numbers of the sum of an index."""
        longer, pair = divmod(self._number(index, held_out=held_out), self._numbers**2)
        first = divmod(pair, self._numbers)
        rest = (
            shuffled(pair, count=self._numbers**2, seed=self._seed + 1 + one)
            for one in range(longer + self._fewest - 2)
        )
        return (*first, *(one % self._numbers for one in rest))

    def worked_episode(self, index: int) -> list[tuple[str, bool]]:
        """Return a right episode of a training sum: texts in their order, and whether each is the model's."""
        terms = self.terms(index, held_out=False)
        total, texts = terms[0], [("+".join(map(str, terms)) + "=", False)]
        for term in terms[1:]:
            texts += [(f"{total}+{term}", True), (f"{total + term},", False)]
            total += term
        return [*texts, (f"={total}", True)]

    async def reset(self, index: int, *, held_out: bool) -> str:
        """Return the sum."""
        self._terms = self.terms(index, held_out=held_out)
        return "+".join(map(str, self._terms)) + "="

    async def step(self, turn: Turn) -> Observation:
        """Answer a call, or judge a result."""
        await asyncio.sleep(self._delay_s)
        if turn.text.startswith("="):
            return Observation(reward=float(turn.text == f"={sum(self._terms)}"), done=True)
        call = _CALL.fullmatch(turn.text)
        return Observation("?" if call is None else f"{int(call[1]) + int(call[2])},")

    async def close(self) -> None:
        """Nothing is held."""
