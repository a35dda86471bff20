"""A check of a run's environment, which needs neither torch nor vLLM: start, prompts, times, observations, rewards.

A few training problems are played in processes of their own, as in the run. An environment that has a method
``worked_episode(index)``, such as ``calculator``, gives the turns of a right episode: texts in their order, and whether
each is the model's. Any other is answered with empty texts until it ends the episode, or the turns of the run file do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from backends.check.task_rows import SOLVED, lengths_row
from backends.environments import EnvironmentPool
from backends.interface import Codec
from backends.workers import WorkerFailedError
from pipelinerl.config.environment import EnvironmentConfig
from pipelinerl.config.run import RunConfig
from pipelinerl.records.check_report import CheckRow, Finding, unchecked, wrong
from pipelinerl.rl.environments import Content, Turn
from pipelinerl.rl.tasks import load_environment
from pipelinerl.scheduler.events import EnvironmentFault

EPISODES = 8
"""Problems that are played, one after the other: nobody holds an environment up (count)."""
SLOW = 2.0
"""Times the seconds of the run file from which on an environment is slow (no unit)."""
SHORT_S = 0.01
"""Seconds that are no matter, whatever the run file says."""


@dataclass(slots=True)
class _Played:
    """What was seen (mutable)."""

    prompts: list[Content] = field(default_factory=list)
    observed: list[Content] = field(default_factory=list)
    episodes: list[list[Content]] = field(default_factory=list)
    """Prompt, turns and observations of each."""
    rewards: list[float] = field(default_factory=list)
    start_s: float = 0.0
    """Of its process and the first reset (s)."""
    reset_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    given: bool = True
    """Whether the turns were those of right episodes."""


def environment_rows(config: RunConfig, codec: Codec | None, why_not: str = "") -> list[CheckRow]:
    """Play a few episodes.

    Args:
        config: What is to be run; ``config.train`` and ``config.environment`` are there.
        codec: Text to tokens. None: there is no tokenizer.
        why_not: Why there is none.
    """
    assert config.environment is not None
    played = asyncio.run(_played(config, config.environment))
    if not played.prompts:
        return [wrong("environment", f"it never opened: {played.failures[0]}", "mend reset() of the environment")]
    rows = [CheckRow(what="environment", measured=f"{played.start_s:.2g} s until its first prompt")]
    if played.failures:
        num_played = len(played.failures) + len(played.rewards)
        text = f"{len(played.failures)} of {num_played} episodes failed, the first: {played.failures[0]}"
        if played.rewards:
            advice = "a rollout whose environment fails is given up, with its group"
            rows.append(CheckRow(what="episodes", measured=text, advice=advice))
        else:
            rows.append(wrong("episodes", text, "mend step() of the environment"))
    rows += [_reward_row(played), *_time_rows(config.environment, played)]
    return rows + ([unchecked("lengths in tokens", why_not)] if codec is None else _length_rows(config, codec, played))


async def _played(config: RunConfig, environment: EnvironmentConfig) -> _Played:
    assert config.train is not None
    played = _Played()
    worked = getattr(load_environment(config.train.task), "worked_episode", None)
    played.given = worked is not None
    pool = EnvironmentPool(config.train.task, environment, number=1)
    try:
        for index in range(EPISODES):
            turns = [text for text, own in worked(index) if own] if worked else [""] * environment.turns.max
            try:
                await _play(pool, index, turns[: environment.turns.max], played)
            except WorkerFailedError as error:
                played.failures.append(str(error))
                if error.fault is EnvironmentFault.TIMEOUT:
                    break  # the others would take as long
    finally:
        await pool.shutdown()
    return played


async def _play(pool: EnvironmentPool, index: int, turns: Sequence[str], played: _Played) -> None:
    begin_s = time.perf_counter()
    prompt = (await pool.open(index, index)).content
    seconds = time.perf_counter() - begin_s
    if played.prompts:
        played.reset_s.append(seconds)
    else:
        played.start_s = seconds
    played.prompts.append(prompt)
    episode: list[Content] = [prompt]
    played.episodes.append(episode)
    reward = 0.0
    try:
        for number, text in enumerate(turns, start=1):
            begin_s = time.perf_counter()
            answer = await pool.step(index, Turn((), text))
            played.step_s.append(time.perf_counter() - begin_s)
            episode.append(text)
            reward += answer.reward
            if answer.done or number == len(turns):
                break
            played.observed.append(answer.content)
            episode.append(answer.content)
        played.rewards.append(reward)
    finally:
        pool.release(index)


def _reward_row(played: _Played) -> CheckRow:
    if not played.rewards:
        return unchecked("rewards", "no episode came to its end")
    right = sum(one >= SOLVED for one in played.rewards)
    if not played.given:
        text = f"{right} of {len(played.rewards)} episodes with empty answers earn {SOLVED:g} or more"
        if right == len(played.rewards):
            return wrong("rewards", text, "whatever is answered is right: look at step() of the environment")
        return CheckRow(what="rewards", measured=text)
    text = f"{right} of {len(played.rewards)} worked episodes earn {SOLVED:g} or more"
    if not right:
        return wrong("rewards", text, "compare step() of the environment with its worked_episode()")
    return CheckRow(what="rewards", measured=text, expected="all")


def _time_rows(environment: EnvironmentConfig, played: _Played) -> list[CheckRow]:
    """Compare the seconds of resets and steps with those that ``simulate`` and ``plan`` take from the run file."""
    stated: dict[str, tuple[list[float], float | None]] = {
        "reset_s": (played.reset_s, environment.reset_s),
        "step_s": (played.step_s, environment.step_s if environment.turns.kind == "lognormal" else None),
    }
    rows = []
    for key, (seconds, expected_s) in stated.items():
        if not seconds:
            continue
        mean_s, what = float(np.mean(seconds)), f"seconds of a {key[:-2]}"
        text = f"mean {mean_s:.2g} s, largest {max(seconds):.2g} s"
        if expected_s is None:
            rows.append(CheckRow(what=what, measured=text, expected="nothing: those of recorded turns differ"))
            continue
        limit_s = SLOW * expected_s + SHORT_S
        slow = mean_s > limit_s
        advice = f"environment.{key} = {mean_s:.2g} has simulate and plan reckon with that" if slow else ""
        rows.append(
            CheckRow(
                what=what,
                measured=text,
                expected=f"environment.{key} = {expected_s:g}; slow above {limit_s:.2g} s",
                finding=Finding.SLOW if slow else Finding.OK,
                advice=advice,
            )
        )
    return rows


def _length_rows(config: RunConfig, codec: Codec, played: _Played) -> list[CheckRow]:
    assert config.train is not None and config.environment is not None  # noqa: PT018  # not a test
    turns = config.environment.turns

    def tokens(content: Content) -> int:
        return len(codec.encode(content) if isinstance(content, str) else content)

    longest, prompts = config.train.task.max_prompt_tokens, [tokens(one) for one in played.prompts]
    failing = sum(not 0 < one <= min(longest, turns.context_max - 1) for one in prompts)
    limit = f"1 to train.task.max_prompt_tokens = {longest}"
    if longest >= turns.context_max:
        limit = f"below environment.turns.context_max = {turns.context_max}"
    rows = [lengths_row("prompt tokens", prompts, failing, limit, "fail")]
    if played.observed:
        observed = [tokens(one) for one in played.observed]
        cut = sum(one > turns.observation_max for one in observed)
        limit = f"at most environment.turns.observation_max = {turns.observation_max}"
        rows.append(lengths_row("observation tokens", observed, cut, limit, "be cut"))
    whole = [_episode_tokens(config, one, tokens) for one in played.episodes]
    limit = f"at most environment.turns.context_max = {turns.context_max}"
    if played.given:
        return [
            *rows,
            lengths_row("episode tokens", whole, sum(one > turns.context_max for one in whole), limit, "end early"),
        ]
    text = f"mean {np.mean(whole):.0f}, largest {max(whole)} if all turns are the longest"
    return [*rows, CheckRow(what="episode tokens", measured=text, expected=f"{limit}, where an episode ends early")]


def _episode_tokens(config: RunConfig, episode: Sequence[Content], tokens: Any) -> int:
    """Return the tokens of an episode; turns that are not known count as the longest, end tokens as one each."""
    assert config.environment is not None
    most, total = config.environment.turns.observation_max, tokens(episode[0])
    for number, content in enumerate(episode[1:]):
        own = number % 2 == 0
        longest = config.workload.length.max if own else most
        total += min(longest, tokens(content) + own if content else longest)
    return int(total)
