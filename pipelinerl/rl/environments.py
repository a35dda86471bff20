"""The interface of an environment: it opens with a prompt, and answers every turn of the model until the episode ends.

``Task`` is the case of one turn. A run file names an environment where it names a task, ``train.task.name``, and has a
table ``[environment]`` with the number of environments.

*Token in, token out*: tokens that an engine has generated are never tokenized again; the environment's answer is
appended to them. An answer in text is tokenized once; an environment that answers with tokens, such as a tool behind a
chat template, decides on every token itself.

Each environment lives in a process of its own, and has one rollout at a time: a ``reset``, then ``step`` after
``step``. The constructor should be quick: it is also called to check the settings. Its prints go to stderr.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

Content = str | tuple[int, ...]
"""Text, or tokens of the model's vocabulary."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the model: everything generated since the last observation."""

    tokens: tuple[int, ...]
    """Its tokens, the end token included if there is one."""
    text: str
    """The same as text, without the end token."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The answer of an environment to a turn."""

    content: Content = ""
    """Text or tokens that the model reads next; not trained on."""
    reward: float = 0.0
    """Reward of this turn (no unit); that of the rollout is the sum over its turns."""
    done: bool = False
    """Whether the episode is over: nothing is generated any more."""


class Environment(Protocol):
    """Methods that an environment must have. An exception costs this rollout and its group only.

    An episode also ends where ``environment.turns`` cuts it: after ``max`` turns, or when its context is full. Its
    reward is the sum until then.
    """

    @property
    def num_held_out(self) -> int | None:
        """Distinct held-out problems (count). None: as many as are asked for."""

    async def reset(self, index: int, *, held_out: bool) -> Content:
        """Begin a new episode, also after an unfinished one, and return its prompt; siblings share ``index``, 0 up."""

    async def step(self, turn: Turn) -> Observation:
        """Act on a turn and answer."""

    async def close(self) -> None:
        """Free resources at the end of the run. Not called if the process is killed or has crashed."""
