"""A check of the task and its data, which needs neither torch nor vLLM: prompts, rewards, lengths."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from backends.interface import Codec
from backends.workers.environments import EnvironmentPool
from backends.workers.processes import WorkerFailedError
from backends.workers.rewards import RewardThreads
from pipelinerl.config.environment import EnvironmentConfig
from pipelinerl.config.run import RunConfig
from pipelinerl.records.check_report import CheckRow, compared, unchecked, wrong
from pipelinerl.rl.environments import Content, Turn
from pipelinerl.rl.problems import Problem, Task
from pipelinerl.rl.tasks import load_environment
from pipelinerl.scheduler.events import EnvironmentFault
from pipelinerl.util.user_code import kind_and_line

SAMPLE = 64
SOLVED = 1.0


def task_rows(config: RunConfig, task: Task, codec: Codec | None, why_not: str = "") -> list[CheckRow]:
    """Check a sample of the training problems; ``why_not``: why there is no codec."""
    try:
        problems = [task.problem(index, held_out=False) for index in range(SAMPLE)]
        prompts = [problem.prompt for problem in problems]
        empty = sum(not prompt for prompt in prompts)
    except Exception as error:  # the user's own task may raise anything
        return [wrong("prompts", f"a problem raised {kind_and_line(error)}", "mend problem() of the task")]
    first = prompts[0] if len(prompts[0]) <= 60 else prompts[0][:60] + "..."
    text = f"{len(set(prompts))} different among {SAMPLE}; the first: {first!r}"
    rows = [CheckRow(what="prompts", measured=text)]
    if empty:
        rows = [wrong("prompts", f"{empty} of {SAMPLE} are empty", "mend problem() of the task")]
    rows.append(asyncio.run(_reward_row(config, task, problems)))
    if codec is None:
        rows.append(unchecked("lengths in tokens", why_not))
    else:
        rows += _length_rows(config, problems, codec)
    return rows


async def _reward_row(config: RunConfig, task: Task, problems: Sequence[Problem]) -> CheckRow:
    """Reward expected answers, plain and boxed, and empty ones: the expected must earn more."""
    threads, timeout_s = RewardThreads(), config.train_table.task.reward_timeout_s
    begin_s = time.perf_counter()

    async def reward(problem: Problem, answer: str) -> float | str:
        try:
            return await threads.call(task.reward, problem, answer, timeout_s=timeout_s)
        except (Exception, SystemExit) as error:
            return kind_and_line(error)

    given = [one for one in problems if isinstance(one.expected, str)]
    calls = [[reward(one, text) for text in _answers(one)] for one in given or problems]
    earned = await asyncio.gather(*(asyncio.gather(*some) for some in calls))
    threads.close()
    each_s = (time.perf_counter() - begin_s) / sum(map(len, earned))
    raised = [some for some in earned if isinstance(some[0], str)]
    if len(raised) == len(earned):
        return wrong("rewards", f"all of {len(earned)} raised: {raised[0][0]}", "mend reward() of the task")
    failed = f"; {len(raised)} raised, the first: {raised[0][0]}" if raised else ""
    advice = "a rollout whose reward raises fails, and its group is given up" if raised else ""
    if not given:
        text = f"of empty answers only, since expected ones are no texts{failed}"
        return CheckRow(what="rewards", measured=text, advice=advice)
    better = sum(_number(max(some[1:], key=_number)) > _number(some[0]) for some in earned)
    text = f"{better} of {len(earned)} expected answers earn more than an empty one, {1e3 * each_s:.2g} ms each{failed}"
    if not better and min(_number(some[0]) for some in earned) >= SOLVED:
        return wrong("rewards", text, "whatever is answered is right: compare reward() with the expected answers")
    if not better:
        return unchecked(
            "rewards", text, "reward() may want more than the answer alone; samples.jsonl has rewarded ones"
        )
    return CheckRow(what="rewards", measured=text, expected="all", advice=advice)


def _answers(problem: Problem) -> list[str]:
    expected = problem.expected
    return ["", expected, f"\\boxed{{{expected}}}"] if isinstance(expected, str) else [""]


def _number(earned: float | str) -> float:
    return -np.inf if isinstance(earned, str) else earned


def _length_rows(config: RunConfig, problems: Sequence[Problem], codec: Codec) -> list[CheckRow]:
    longest, cut = config.train_table.task.max_prompt_tokens, config.workload.length.max
    lengths = [len(codec.encode(one.prompt)) for one in problems]
    failing = sum(not 0 < length <= longest for length in lengths)
    rows = [lengths_row("prompt tokens", lengths, failing, f"1 to train.task.max_prompt_tokens = {longest}", "fail")]
    answers: list[Any] = [one.expected for one in problems if isinstance(one.expected, str)]
    if answers:
        around = len(codec.encode(""))  # a chat template puts it around prompts
        lengths = [len(codec.encode(answer)) - around for answer in answers]
        too_long = sum(length >= cut for length in lengths)  # the end token comes on top
        rows.append(
            lengths_row("expected answer tokens", lengths, too_long, f"below workload.length.max = {cut}", "be cut")
        )
    return rows


def lengths_row(what: str, lengths: Sequence[int], num_wrong: int, expected: str, fate: str) -> CheckRow:
    """Return the row of some lengths (tokens), so many of which are not as expected."""
    text = f"mean {np.mean(lengths):.0f}, largest {max(lengths)}"
    if not num_wrong:
        return CheckRow(what=what, measured=text, expected=expected)
    share = f"; {num_wrong} of {len(lengths)} would {fate}"
    advice = f"{expected.rpartition(' = ')[0].rpartition(' ')[2]} must be larger, or such problems left out"
    if num_wrong == len(lengths):
        return wrong(what, text + share, advice)
    return CheckRow(what=what, measured=text + share, expected=expected, advice=advice)


# ------------------------------------------------------------------------------------- environments
# A few training problems are played in processes of their own, as in the run. An environment with a method
# ``worked_episode(index)`` gives the turns of a right episode: texts, and whether each is the model's. Any other gets
# empty texts until it ends the episode, or the limit on turns does.

EPISODES = 8
"""Played one after the other: nobody holds an environment up."""
SLOW, SHORT_S = 2.0, 0.01
"""An environment is slow above this multiple of the run file's seconds, and these more."""


@dataclass(slots=True)
class _Played:
    prompts: list[Content] = field(default_factory=list)
    observed: list[Content] = field(default_factory=list)
    episodes: list[list[Content]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    start_s: float = 0.0
    """Of its process and the first reset."""
    reset_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    given: bool = True
    """Whether the turns came from worked episodes."""


def environment_rows(config: RunConfig, codec: Codec | None, why_not: str = "") -> list[CheckRow]:
    """Play a few episodes; ``why_not``: why there is no codec."""
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
    rows += [_episode_reward_row(played), *_time_rows(config.environment, played)]
    return rows + (
        [unchecked("lengths in tokens", why_not)] if codec is None else _episode_length_rows(config, codec, played)
    )


async def _played(config: RunConfig, environment: EnvironmentConfig) -> _Played:
    played = _Played()
    worked = getattr(load_environment(config.train_table.task), "worked_episode", None)
    played.given = worked is not None
    pool = EnvironmentPool(config.train_table.task, environment, number=1)
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


def _episode_reward_row(played: _Played) -> CheckRow:
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
    """Compare with the seconds of the run file, which ``simulate`` and ``plan`` use."""
    step_s = environment.step_s if environment.turns.kind == "lognormal" else None
    rows = []
    for key, seconds, expected_s in (
        ("reset_s", played.reset_s, environment.reset_s),
        ("step_s", played.step_s, step_s),
    ):
        if not seconds:
            continue
        mean_s, what = float(np.mean(seconds)), f"seconds of a {key[:-2]}"
        text = f"mean {mean_s:.2g} s, largest {max(seconds):.2g} s"
        if expected_s is None:
            rows.append(CheckRow(what=what, measured=text, expected="nothing: those of recorded turns differ"))
            continue
        limit_s = SLOW * expected_s + SHORT_S
        expected = f"environment.{key} = {expected_s:g}; slow above {limit_s:.2g} s"
        advice = f"environment.{key} = {mean_s:.2g} has simulate and plan reckon with that"
        rows.append(compared(what, text, expected, slow=mean_s > limit_s, advice=advice))
    return rows


def _episode_length_rows(config: RunConfig, codec: Codec, played: _Played) -> list[CheckRow]:
    assert config.environment is not None
    turns = config.environment.turns

    def tokens(content: Content) -> int:
        return len(codec.encode(content) if isinstance(content, str) else content)

    longest, prompts = config.train_table.task.max_prompt_tokens, [tokens(one) for one in played.prompts]
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
    """Turns that are not known count as the longest, end tokens as one each."""
    assert config.environment is not None
    most, total = config.environment.turns.observation_max, tokens(episode[0])
    for number, content in enumerate(episode[1:]):
        own = number % 2 == 0
        longest = config.workload.length.max if own else most
        total += min(longest, tokens(content) + own if content else longest)
    return int(total)
