"""A check of the task and its data, which needs neither torch nor vLLM: prompts, rewards, lengths."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from backends.interface import Codec
from backends.rewards import RewardThreads
from pipelinerl.config.run import RunConfig
from pipelinerl.records.check_report import CheckRow, unchecked, wrong
from pipelinerl.rl.problems import Problem, Task
from pipelinerl.util.user_code import kind_and_line

SAMPLE = 64
"""Problems that are looked at (count)."""
SOLVED = 1.0
"""Reward from which on an answer is right."""


def task_rows(config: RunConfig, task: Task, codec: Codec | None, why_not: str = "") -> list[CheckRow]:
    """Check a sample of the training problems.

    Args:
        config: What is to be run; ``config.train`` is there.
        task: Its task.
        codec: Text to tokens. None: there is no tokenizer.
        why_not: Why there is none.
    """
    try:
        problems = [task.problem(index, held_out=False) for index in range(SAMPLE)]
        prompts = [problem.prompt for problem in problems]
        empty = sum(not prompt for prompt in prompts)
    except Exception as error:  # the user's own task may raise anything
        return [wrong("prompts", f"a problem raised {kind_and_line(error)}", "mend problem() of the task")]
    first = prompts[0] if len(prompts[0]) <= 60 else prompts[0][:60] + "..."
    text = f"{len(set(prompts))} different among {SAMPLE}; the first: {first!r}"
    rows = [wrong("prompts", f"{empty} of {SAMPLE} are empty", "mend problem() of the task")] if empty else []
    rows += [] if empty else [CheckRow(what="prompts", measured=text)]
    rows.append(asyncio.run(_reward_row(config, task, problems)))
    if codec is None:
        rows.append(unchecked("lengths in tokens", why_not))
    else:
        rows += _length_rows(config, problems, codec)
    return rows


async def _reward_row(config: RunConfig, task: Task, problems: Sequence[Problem]) -> CheckRow:
    """Reward expected answers, as they are and boxed, and empty ones: the first must earn more."""
    assert config.train is not None
    threads, timeout_s = RewardThreads(), config.train.task.reward_timeout_s
    begin_s = time.perf_counter()

    async def reward(problem: Problem, answer: str) -> float | str:
        try:
            return await threads.call(task.reward, problem, answer, timeout_s=timeout_s)
        except (Exception, SystemExit) as error:
            return kind_and_line(error)

    given = [one for one in problems if isinstance(one.expected, str)]
    calls = [[reward(one, text) for text in _answers(one)] for one in given or problems]
    earned = await asyncio.gather(*(asyncio.gather(*some) for some in calls))
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
    """Return an empty answer, then right ones if they are known."""
    expected = problem.expected
    return ["", expected, f"\\boxed{{{expected}}}"] if isinstance(expected, str) else [""]


def _number(earned: float | str) -> float:
    return -np.inf if isinstance(earned, str) else earned


def _length_rows(config: RunConfig, problems: Sequence[Problem], codec: Codec) -> list[CheckRow]:
    assert config.train is not None
    longest, cut = config.train.task.max_prompt_tokens, config.workload.length.max
    lengths = [len(codec.encode(one.prompt)) for one in problems]
    failing = sum(not 0 < length <= longest for length in lengths)
    rows = [lengths_row("prompt tokens", lengths, failing, f"1 to train.task.max_prompt_tokens = {longest}", "fail")]
    answers: list[Any] = [one.expected for one in problems if isinstance(one.expected, str)]
    if answers:
        lengths = [len(codec.encode(answer)) for answer in answers]
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
