"""Prompts, answer lengths, rewards and delays of a simulated run, and the random streams that draw them.

Theory of operation
-------------------
The workload is a pure function of (configuration, seed, prompt, group): ``Workload.group`` takes any ids in
any order, and two runs that differ in scheduler or hardware get the same groups (common random numbers). Draws
come from named streams: the stream's name and the number of a block seed a generator that draws the whole block
at once, in numpy. The last few blocks are kept; an older one is drawn again. A new stream changes none of the others.

=============  ===================  ====================================================================
stream         indexed by           decides
=============  ===================  ====================================================================
``prompts``    ``prompt_id``        which prompt of an empirical source the whole group answers
``answers``    ``group_id``         which answers of that prompt the rollouts give
``lengths``    ``group_id``         lengths of the kinds ``uniform`` and ``lognormal``
``rounding``   ``group_id``         whether a log-normal length is rounded up or down
``rewards``    ``group_id``         rewards, where no source has them
``dispatch``   ``group_id``         delays of its rollouts on the way to their engines
=============  ===================  ====================================================================

A length is a whole number of tokens from 1 to ``max``, and rounding does not move its mean: a log-normal
length x becomes floor(x) or floor(x) + 1 at random with mean x; an empirical source is scaled so that the
mean of the *rounded and cut* lengths is the one asked for, which leaves at most half a token.

With a run or another system's trace as the source no lengths are drawn: the prompts are its groups in their order,
again and again.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from pipelinerl.config.run import LengthConfig, WorkloadConfig
from pipelinerl.errors import ConfigError
from pipelinerl.util.explain import did_you_mean
from pipelinerl.util.lognormal import argument_nearest, location_of_mean, log_sd_of
from pipelinerl.util.strict_model import MOST_TOKENS, StrictModel
from pipelinerl.util.table import read_table
from sim.clock import TICKS_PER_S, to_ticks
from sim.recorded import comes_in_order, read_groups

CV_RANGE = (1e-6, 1e3)
"""Log-normal ``cv`` for which the closed form neither divides by zero nor overflows."""

SHIPPED_FOLDER = Path(__file__).parent / "data"

DRAWS_PER_BLOCK = 8192
"""Random numbers that a stream draws at once (count)."""
BLOCKS_KEPT = 4
"""Blocks of a stream that are kept, most recently used first (count)."""


def named_stream(seed: int, name: str, block: int) -> np.random.Generator:
    """Return a fresh generator of a block of a stream; ``seed`` and ``block`` are at least 0.

    Its bit generator is named here, since numpy's default may change.
    """
    key = (zlib.crc32(name.encode()), block)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))


class DispatchDelays:
    """Delays of the rollouts of a group on the way to their engines, by random access.

    ``fixed_s`` for every rollout, and an exponential delay of mean ``jitter_s`` on top (s); 0 draws nothing.
    """

    def __init__(self, *, fixed_s: float, jitter_s: float, group_size: int, seed: int) -> None:
        self._fixed_ticks = to_ticks(fixed_s)
        self._jitter_s = jitter_s
        self._seed = seed
        self._shape = (max(1, DRAWS_PER_BLOCK // group_size), group_size)
        self._blocks = lru_cache(maxsize=BLOCKS_KEPT)(self._draw)

    def group(self, group_id: int) -> list[int]:
        """Return the delay of each rollout of a group (ticks)."""
        block, row = divmod(group_id, self._shape[0])
        return self._blocks(block)[row]

    def _draw(self, block: int) -> list[list[int]]:
        jitter_s = np.zeros(self._shape)
        if self._jitter_s:
            jitter_s = named_stream(self._seed, "dispatch", block).exponential(self._jitter_s, self._shape)
        delays: list[list[int]] = (self._fixed_ticks + np.rint(jitter_s * TICKS_PER_S).astype(np.int64)).tolist()
        return delays


class AnswerRow(StrictModel):
    """A row of a length source: one answer."""

    prompt_id: str
    """Rows of the same prompt make a group."""
    response_tokens: int = Field(ge=0, le=MOST_TOKENS)
    """Length of the answer (tokens)."""
    prompt_tokens: int | None = Field(default=None, ge=0, le=MOST_TOKENS)
    """Length of the prompt (tokens)."""
    correct: int | None = Field(default=None, ge=0, le=1)
    """1 if the answer was correct, else 0."""


class DrawnGroup(NamedTuple):
    """Lengths and rewards of the rollouts of one prompt; a scheduler must not see them beforehand."""

    prompt_tokens: int
    """Length of the prompt (tokens)."""
    lengths: tuple[int, ...]
    """Length of each rollout's answer before growth, from 1 to ``max`` (tokens)."""
    rewards: tuple[float, ...]
    """Reward of each rollout, 0 or 1."""


@dataclass(frozen=True, slots=True, eq=False)
class SourcePrompt:
    """A prompt of a length source with all its answers."""

    prompt_tokens: int
    """Length of the prompt (tokens)."""
    lengths: NDArray[np.int64]
    """Length of each answer, at least 1, shape [number of answers] (tokens)."""
    rewards: NDArray[np.float64] | None
    """1 for a correct answer, 0 for a wrong one, same shape. None: unknown."""


class Workload:
    """The groups of a run, by random access.

    Raises ConfigError if the length source is unknown, cannot be read or has a fault, or if no distribution of the kind
    has the mean asked for.
    """

    def __init__(self, config: WorkloadConfig, *, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._groups_per_block = max(1, DRAWS_PER_BLOCK // config.group_size)
        self._shape = (self._groups_per_block, config.group_size)
        self._prompts: tuple[SourcePrompt, ...] = ()
        self._in_order = False
        self._location = self._log_sd = 0.0
        if config.length.kind == "empirical":
            assert config.length.source is not None  # checked by the configuration
            self._in_order = config.length.source not in shipped_sets() and comes_in_order(config.length.source)
            prompts = read_source(
                config.length.source, prompt_tokens=config.prompt_tokens, group_size=config.group_size
            )
            _check_mean(config.length)
            self._prompts = _scaled(prompts, config.length)
        elif config.length.kind == "lognormal":
            _check_mean(config.length)
            self._location, self._log_sd = _lognormal(config.length)
        # Kept per number of answers as well, which is the same for all prompts of the shipped sets.
        num_sizes = len({len(prompt.lengths) for prompt in self._prompts})
        self._made = lru_cache(maxsize=BLOCKS_KEPT)(self._draw_groups)
        self._chosen_prompts = lru_cache(maxsize=BLOCKS_KEPT)(self._draw_prompts)
        self._chosen_answers = lru_cache(maxsize=BLOCKS_KEPT * num_sizes)(self._draw_answers)
        self._rewards = lru_cache(maxsize=BLOCKS_KEPT)(self._draw_rewards)

    @property
    def longest_rollout_tokens(self) -> int:
        """Longest rollout that there can be: the longest prompt and an answer of ``max`` (tokens)."""
        prompt = max((prompt.prompt_tokens for prompt in self._prompts), default=self._config.prompt_tokens)
        return prompt + self._config.length.max

    def group(self, group_id: int, prompt_id: int) -> DrawnGroup:
        """Return the lengths and rewards of the rollouts of a group; equal numbers (0 at least) give equal groups.

        In a source, a prompt has a length and answers, and the group chooses among these answers. So a prompt that is
        started again in a new group gets other answers.
        """
        block, row = divmod(group_id, self._groups_per_block)
        if not self._prompts:
            return self._made(block)[row]
        if self._in_order:
            prompt, size = self._prompts[prompt_id % len(self._prompts)], self._config.group_size
            scored = self._rewards(block)[row] if prompt.rewards is None else prompt.rewards[:size].tolist()
            return DrawnGroup(prompt.prompt_tokens, tuple(prompt.lengths[:size].tolist()), tuple(scored))
        prompt_block, prompt_row = divmod(prompt_id, DRAWS_PER_BLOCK)
        prompt = self._prompts[self._chosen_prompts(prompt_block)[prompt_row]]
        answers = self._chosen_answers(block, len(prompt.lengths))[row]
        rewards = self._rewards(block)[row] if prompt.rewards is None else prompt.rewards[answers].tolist()
        return DrawnGroup(prompt.prompt_tokens, tuple(prompt.lengths[answers].tolist()), tuple(rewards))

    def _draw_groups(self, block: int) -> list[DrawnGroup]:
        """Return the groups of a block, for the kinds without a source."""
        lengths = map(tuple, self._draw_lengths(block).tolist())
        rewards = map(tuple, self._rewards(block))
        return list(map(DrawnGroup, repeat(self._config.prompt_tokens), lengths, rewards))

    def _draw_lengths(self, block: int) -> NDArray[np.int64]:
        """Return the lengths of a block, shape [groups, group_size] (tokens)."""
        length = self._config.length
        if length.kind == "fixed":
            return np.full(self._shape, length.max)
        stream = named_stream(self._seed, "lengths", block)
        if length.kind == "uniform":
            return stream.integers(1, length.max, size=self._shape, endpoint=True)
        logarithm = self._location + self._log_sd * stream.standard_normal(self._shape)
        exact = np.minimum(np.exp(logarithm), length.max)
        whole = np.floor(exact)
        up = named_stream(self._seed, "rounding", block).random(self._shape) < exact - whole
        lengths: NDArray[np.int64] = np.maximum(whole + up, 1).astype(np.int64)
        return lengths

    def _draw_prompts(self, block: int) -> list[int]:
        """Return which prompt of the source each prompt of a block is."""
        prompts: list[int] = (
            named_stream(self._seed, "prompts", block).integers(len(self._prompts), size=DRAWS_PER_BLOCK).tolist()
        )
        return prompts

    def _draw_answers(self, block: int, num_answers: int) -> NDArray[np.int64]:
        """Return which of a prompt's answers the rollouts of a block's groups give, shape [groups, group_size].

        Without replacement where the prompt has enough answers: Floyd's algorithm on all groups at once
        (Bentley and Floyd 1987, CACM 30 (9)), then a shuffle, since it favours late answers in late places.
        """
        stream = named_stream(self._seed, "answers", block)
        groups, group_size = self._shape
        if num_answers < group_size:
            return stream.integers(num_answers, size=self._shape)
        answers = np.empty((group_size, groups), dtype=np.int64)
        for place, last in enumerate(range(num_answers - group_size, num_answers)):
            drawn = stream.integers(last + 1, size=groups)
            answers[place] = np.where((answers[:place] == drawn).any(axis=0), last, drawn)
        return stream.permuted(answers.T, axis=1)

    def _draw_rewards(self, block: int) -> list[list[float]]:
        """Return Bernoulli rewards of a block, shape [groups, group_size]."""
        uniform = named_stream(self._seed, "rewards", block).random(self._shape)
        rewards: list[list[float]] = (uniform < self._config.success_rate).astype(float).tolist()
        return rewards


# ----------------------------------------------------------------------------------------- growth


def growth_factor(config: LengthConfig, *, version: int, optimizer_steps: int) -> float:
    """Return the factor on all lengths of rollouts that start at a version (optimizer steps done).

    Linear from 1 at version 0, which the first optimizer step trains, to ``config.growth`` at version
    ``optimizer_steps - 1``, which the last one trains; the version after that keeps the last factor.
    """
    if optimizer_steps == 1:
        return 1.0
    return 1.0 + (config.growth - 1.0) * min(1.0, version / (optimizer_steps - 1))


def grown_length(length_tokens: int, *, factor: float, max_tokens: int) -> int:
    """Return a length after growth, rounded and cut: from 1 to ``max_tokens``.

    An answer that was already cut at ``max_tokens`` counts as that long, so a factor below 1 shortens it.
    """
    return min(max_tokens, max(1, round(length_tokens * factor)))


# ----------------------------------------------------------------- distributions with a given mean


def _lognormal(length: LengthConfig) -> tuple[float, float]:
    """Return mean and standard deviation of log X for which the drawn lengths have the mean ``length.mean``."""
    low, high = CV_RANGE
    assert length.mean is not None  # checked by the configuration
    assert length.cv is not None
    if not low <= length.cv <= high:
        raise ConfigError(f"workload.length.cv must be from {low:g} to {high:g}, got {length.cv}")
    log_sd = log_sd_of(length.cv)
    return location_of_mean(length.mean, log_sd=log_sd, longest=length.max), log_sd


def _scaled(prompts: Sequence[SourcePrompt], length: LengthConfig) -> tuple[SourcePrompt, ...]:
    """Return the prompts with lengths scaled to the mean ``length.mean`` (None: by 1), rounded and cut.

    Every prompt counts the same, however many answers it has, as it is drawn.
    """
    factor = 1.0
    if length.mean is not None:
        tokens = np.concatenate([prompt.lengths for prompt in prompts])
        sizes = np.array([len(prompt.lengths) for prompt in prompts])
        starts = np.cumsum(sizes) - sizes

        def mean_at(factor: float) -> float:
            # Whole numbers and an exact sum: a tie between two factors falls the same way on every machine.
            totals = np.add.reduceat(_rounded_and_cut(tokens, factor, length.max), starts)
            return math.fsum((totals / sizes).tolist()) / len(prompts)

        low, high = 0.5 / int(tokens.max()), length.max / int(tokens.min())
        factor = argument_nearest(mean_at, length.mean, low=low, high=high)
    return tuple(
        SourcePrompt(p.prompt_tokens, _rounded_and_cut(p.lengths, factor, length.max), p.rewards) for p in prompts
    )


def _rounded_and_cut(tokens: NDArray[np.int64], factor: float, longest: int) -> NDArray[np.int64]:
    """Return scaled lengths as whole numbers from 1 to ``longest`` (tokens)."""
    lengths: NDArray[np.int64] = np.clip(np.rint(tokens * factor), 1, longest).astype(np.int64)
    return lengths


def _check_mean(length: LengthConfig) -> None:
    """Reject a mean that no lengths from 1 to ``max`` have; the configuration has rejected those from ``max`` on."""
    if length.mean is not None and length.mean < 1:
        raise ConfigError(
            f"workload.length.mean must be at least 1 for kind={length.kind!r}, as an answer has at least one token, "
            f"got {length.mean}"
        )


# ----------------------------------------------------------------------------------------- sources


def shipped_sets() -> tuple[str, ...]:
    """Return the names of the sets that come with the package; ``sim/data/README.md`` describes them."""
    return tuple(sorted(path.stem for path in SHIPPED_FOLDER.glob("*.csv")))


def read_source(source: str, *, prompt_tokens: int = 0, group_size: int = 1) -> tuple[SourcePrompt, ...]:
    """Return the prompts of a length source, unscaled, in its order; a prompt without a length has ``prompt_tokens``.

    ``source`` is the name of a shipped set, or the path of a file that ends in ``.csv``, a row per answer: UTF-8,
    commas, a header with ``prompt_id, response_tokens`` and, if known, ``prompt_tokens, correct``; every cell filled;
    0 ``response_tokens`` count as 1. Or a run or another system's trace, without turns, in which a prompt must have
    ``group_size`` answers at least. Raises ConfigError at the first fault: file, line, column, allowed values, value.
    """
    shipped = shipped_sets()
    if source not in shipped and comes_in_order(source):
        return _read_groups(source, group_size=group_size)
    hint = did_you_mean(Path(source).stem, shipped) + f"shipped sets: {', '.join(shipped)}"
    if source not in shipped and not source.endswith(".csv"):
        rule = "a shipped set, a .csv file, a run or another system's trace"
        raise ConfigError(f"workload.length.source must be {rule}, got {source!r}; {hint}")
    path = SHIPPED_FOLDER / f"{source}.csv" if source in shipped else Path(source)
    try:
        table = read_table(path, "workload.length.source")
    except ConfigError as error:
        if path.is_file():
            raise
        raise ConfigError(f"{error}; {hint}") from None
    answers: dict[str, list[AnswerRow]] = {}
    for where, answer in table.rows(AnswerRow, filled=True):
        siblings = answers.setdefault(answer.prompt_id, [])
        siblings.append(answer)
        if answer.prompt_tokens != siblings[0].prompt_tokens:
            raise ConfigError(
                f"{where}: prompt_tokens must be the same in all rows of prompt_id {answer.prompt_id!r}, "
                f"{siblings[0].prompt_tokens}, got {answer.prompt_tokens}"
            )
    return tuple(_prompt_of(group, prompt_tokens=prompt_tokens) for group in answers.values())


def _read_groups(source: str, *, group_size: int) -> tuple[SourcePrompt, ...]:
    key = "workload.length.source"
    groups = read_groups(source, key=key, group_size=group_size)
    if any(len(episode.out_lens) > 1 for group in groups for episode, _ in group):
        raise ConfigError(f"{key} must be a run without turns, got {source!r}: environment.turns.source reads it")
    prompts = []
    for group in groups:
        lengths = np.array([max(1, episode.out_lens[0]) for episode, _ in group], dtype=np.int64)
        rewards = [reward for _, reward in group if reward is not None]
        prompt_tokens = round(sum(episode.prompt_len for episode, _ in group) / len(group))
        prompts.append(SourcePrompt(prompt_tokens, lengths, np.array(rewards) if rewards else None))
    return tuple(prompts)


def _prompt_of(answers: Sequence[AnswerRow], *, prompt_tokens: int) -> SourcePrompt:
    """Return a prompt from its rows, with ``prompt_tokens`` if they have no length."""
    lengths = np.array([max(1, answer.response_tokens) for answer in answers], dtype=np.int64)
    correct = [answer.correct for answer in answers if answer.correct is not None]
    stated = answers[0].prompt_tokens
    rewards = np.array(correct, dtype=np.float64) if correct else None
    return SourcePrompt(prompt_tokens if stated is None else stated, lengths, rewards)
