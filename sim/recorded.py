"""Recorded episodes: turns, observations and seconds of a user's file, or of the trace of a run."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from pydantic import Field, ValidationError, model_validator

from pipelinerl.errors import ConfigError, TraceError
from pipelinerl.records.run_folder import TRACE_FILE
from pipelinerl.records.trace import Trace
from pipelinerl.scheduler.events import (
    ObservationReady,
    RolloutFinished,
    RolloutScored,
    StartRollout,
    TurnFinished,
    VersionSpans,
)
from pipelinerl.util.explain import explain
from pipelinerl.util.strict_model import LONGEST_S, MOST_TOKENS, StrictModel


class RecordedEpisode(StrictModel):
    """A line of a source of turns: one episode."""

    group: int | str
    """Episodes of one task are a group."""
    stream: int | str
    """Number or name of the episode in its group; not read."""
    prompt_len: int = Field(ge=0, le=MOST_TOKENS)
    """Length of the prompt (tokens)."""
    out_lens: list[int] = Field(min_length=1)
    """Tokens generated in each turn, at least 1; 0 counts as 1."""
    obs_lens: list[int]
    """Tokens observed after each turn but the last."""
    tool_times: list[float]
    """Time that the environment acted after each turn but the last (s)."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        turns = len(self.out_lens)
        for name, values in (("obs_lens", self.obs_lens), ("tool_times", self.tool_times)):
            if len(values) != turns - 1:
                raise ValueError(f"{name} must have one value less than out_lens, {turns - 1}, got {len(values)}")
        for name, values, most in (
            ("out_lens", self.out_lens, MOST_TOKENS),
            ("obs_lens", self.obs_lens, MOST_TOKENS),
            ("tool_times", self.tool_times, LONGEST_S),
        ):
            for value in values:
                if not 0 <= value <= most:
                    raise ValueError(f"{name} must be from 0 to {most:g}, got {value:g}")
        return self


@dataclass(frozen=True, slots=True)
class TracedRollout:
    """A rollout of a run."""

    episode: RecordedEpisode
    reward: float
    begins_s: tuple[float, ...]
    """When each turn's request was ready for an engine, seconds from the start of the run."""
    ends_s: tuple[float, ...]
    """When each turn ended, likewise."""


@dataclass(slots=True)
class _Recorded:
    """State of a rollout so far in the trace (mutable)."""

    read: int
    """Tokens of its prompt and observations."""
    read_L: list[int] = field(default_factory=list)
    """The same before each turn."""
    out_lens: list[int] = field(default_factory=list)
    begins_s: list[float] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)

    def end_turn(self, now_s: float, spans: VersionSpans) -> None:
        self.out_lens.append(spans.num_tokens - sum(self.out_lens))
        self.read_L.append(self.read)
        self.ends_s.append(now_s)

    def rollout(self, rollout_id: int, *, group_size: int, reward: float) -> TracedRollout:
        group, member = divmod(rollout_id, group_size)
        observed = [after - before for before, after in zip(self.read_L, self.read_L[1:], strict=False)]
        content = {"group": group, "stream": member, "prompt_len": self.read_L[0], "out_lens": self.out_lens}
        acted_s = [begin - end for end, begin in zip(self.ends_s, self.begins_s[1:], strict=False)]
        tools = {"obs_lens": observed, "tool_times": acted_s[: len(observed)]}
        episode = RecordedEpisode.model_validate({**content, **tools})
        return TracedRollout(episode, reward, tuple(self.begins_s), tuple(self.ends_s))


def read_trace(source: str, *, key: str, group_size: int) -> list[list[TracedRollout]]:
    """Return the rollouts of a run, simulated or real, that were scored: whole groups, in the order of their numbers.

    ``source`` is the run's folder or trace, ``key`` the setting in messages. The seconds of an environment hold its
    failed tries. A run without turns does not record the lengths of its prompts: they are its
    ``workload.prompt_tokens``. Raises ConfigError if it cannot be read, or has no group of ``group_size`` rollouts.
    """
    path = Path(source) / TRACE_FILE if Path(source).is_dir() else Path(source)
    try:
        trace = Trace(path)
        size = trace.config.workload.group_size
        scored = _scored(trace, key=key)
    except TraceError as error:
        raise ConfigError(f"{key}: {error}") from None
    except ValidationError as error:
        raise ConfigError(f"{key}: {path}: {explain(error, RecordedEpisode)[0]}") from None
    groups: dict[int, list[TracedRollout]] = defaultdict(list)
    for rollout_id in sorted(scored):
        groups[rollout_id // size].append(scored[rollout_id])
    whole = [group for group in groups.values() if len(group) == size]
    if size < group_size or not whole:
        raise ConfigError(
            f"{key} must be a run with groups of at least workload.group_size={group_size} rollouts that were scored, "
            f"got {source!r} with {len(whole)} of {size}"
        )
    return whole


def _scored(trace: Trace, *, key: str) -> dict[int, TracedRollout]:
    group_size = trace.config.workload.group_size
    recorded: dict[int, _Recorded] = defaultdict(lambda: _Recorded(trace.config.workload.prompt_tokens))
    scored: dict[int, TracedRollout] = {}
    one_turn = trace.config.environment is None
    for record in trace.records():
        if one_turn and isinstance(record.command, StartRollout):
            one = recorded[record.command.rollout_id]
            one.begins_s = one.begins_s or [record.time_s]
        match record.event:
            case ObservationReady(rollout_id=number, read_tokens=tokens):
                if tokens is None:
                    raise ConfigError(f"{key}: {trace.path} was recorded before observed tokens were: record it again")
                one = recorded[number]
                one.read = tokens
                one.begins_s.append(record.time_s)
            case TurnFinished(rollout_id=number, spans=spans):
                recorded[number].end_turn(record.time_s, spans)
            case RolloutFinished(rollout_id=number, engine=engine, spans=spans, reward=reward):
                if engine is not None:
                    recorded[number].end_turn(record.time_s, spans)
                if reward is not None:
                    scored[number] = recorded.pop(number).rollout(number, group_size=group_size, reward=reward)
            case RolloutScored(rollout_id=number, reward=reward):
                scored[number] = recorded.pop(number).rollout(number, group_size=group_size, reward=reward)
    return scored
