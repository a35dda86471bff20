"""Environments and a task for the tests of the driver, in processes of their own."""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path

from pipelinerl.rl.environments import Content, Observation, Turn
from pipelinerl.rl.problems import Problem


class Game:
    """So many turns, each answered by its length and its number; the reward of a turn is its share of the letter b.

    While it is open there is a file named as its process in the folder ``pids``.
    """

    num_held_out: int | None = None

    def __init__(
        self, *, turns: int = 3, as_tokens: bool = False, delay_s: float = 0.0, pids: str | None = None
    ) -> None:
        self.turns, self.as_tokens, self.delay_s = turns, as_tokens, delay_s
        self.pid_file = None if pids is None else Path(pids) / str(os.getpid())
        self.turn = 0

    async def reset(self, index: int, *, held_out: bool) -> Content:
        if self.pid_file is not None:
            self.pid_file.touch()
        self.turn = 0
        return f"{'held out' if held_out else 'problem'} {index}"

    async def step(self, turn: Turn) -> Observation:
        await asyncio.sleep(self.delay_s)
        self.turn += 1
        content: Content = (len(turn.tokens) % 15, self.turn) if self.as_tokens else f"{len(turn.text)} {self.turn}"
        share = turn.text.count("b") / max(1, len(turn.text))
        return Observation(content, share / self.turns, self.turn == self.turns)

    async def close(self) -> None:
        if self.pid_file is not None:
            self.pid_file.unlink(missing_ok=True)


class Three(Game):
    num_held_out = 3


class Sleepy(Game):
    """Raises at its first two resets."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self.resets = 0

    async def reset(self, index: int, *, held_out: bool) -> Content:
        self.resets += 1
        if self.resets <= 2:
            raise RuntimeError("not yet")
        return await super().reset(index, held_out=held_out)


NEVER = object  # makes no environment


class Hostile(Game):
    """Fails in one of these ways at a share ``rate`` of resets and steps; None: at all steps of the first problem."""

    def __init__(self, *, ways: str, rate: float | None = None, **settings: object) -> None:
        super().__init__(**settings)
        self.rate, self.ways = rate, ways.split()
        self.index = 0

    def fail(self) -> object:
        chance = random.Random(f"{self.index} {self.turn}")
        if self.index if self.rate is None else chance.random() >= self.rate:
            return None
        match chance.choice(self.ways):
            case "dies":
                os.kill(os.getpid(), 9)
            case "hangs":
                time.sleep(1000.0)
            case "raises":
                raise RuntimeError("no game today")
            case "megabytes":
                return Observation("x" * 5_000_000)
            case "undecodable":
                return Observation(b"\xff".decode(errors="surrogateescape"))
            case "giant":
                return Observation((2**63,))
        return Observation(reward=float("nan"))

    async def reset(self, index: int, *, held_out: bool) -> Content:
        self.index, self.turn = index, -1
        if self.rate is not None and self.fail() is not None:
            return 7
        return await super().reset(index, held_out=held_out)

    async def step(self, turn: Turn) -> Observation:
        return self.fail() or await super().step(turn)


class Judge:
    """Rewards an answer that is the problem's index, and does what an answer says; or the share of the letter b."""

    num_held_out = None

    def __init__(self, *, pids: str | None = None, dies_every: int | None = None) -> None:
        self.dies_every = dies_every
        if pids is not None:
            (Path(pids) / str(os.getpid())).touch()

    def problem(self, index: int, *, held_out: bool) -> Problem:
        return Problem(f"{'held out' if held_out else 'problem'} {index}", index)

    def reward(self, problem: Problem, answer: str) -> object:
        if self.dies_every is not None:
            if problem.expected % self.dies_every == 0:
                os.kill(os.getpid(), 9)
            return answer.count("b") / max(1, len(answer))
        match answer:
            case "raise":
                raise KeyError("no key")
            case "die":
                os.kill(os.getpid(), 9)
            case "hang":
                time.sleep(1000.0)
            case "nonsense":
                return object()
        return answer == str(problem.expected)


class Ends:
    """Ends its process in the reward of problem 40, in the way that an environment variable names."""

    num_held_out = None

    def problem(self, index: int, *, held_out: bool) -> Problem:
        return Problem(f"{'held out' if held_out else 'problem'} {index}", index)

    def reward(self, problem: Problem, answer: str) -> float:
        way = os.environ.get("PIPELINERL_TEST_ENDS") if problem.expected == 40 else None
        if way == "exit":
            os._exit(3)
        if way == "fault":
            os.kill(os.getpid(), 11)
        return 1.0
