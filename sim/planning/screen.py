"""Candidates of a plan: the run files that it may choose, their steady states, and the rejected choices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from pipelinerl.config.engine import SpeculationConfig
from pipelinerl.config.resolve import named_hardware, resolved_hardware, sequence_parallel_of
from pipelinerl.config.run import RunConfig
from pipelinerl.hardware.costs import DecodeStep, ResolvedHardware
from pipelinerl.scheduler.events import OnStale
from pipelinerl.scheduler.kinds import ScheduleKind
from pipelinerl.theory.lengths import LengthStatistics
from pipelinerl.theory.steady_state import Estimate, screen
from pipelinerl.util.strict_model import MOST_ROLLOUTS
from sim.planning.space import (
    AXES,
    ENGINE,
    SCHEDULE,
    Choice,
    Limits,
    Reason,
    SearchSpace,
    all_choices,
    choice_of,
    label_of,
    schedule_of,
    whole_engines,
    with_values,
)

LAG_ERROR = 0.1
"""Standard deviation of the screened mean lag (relative), or ``LAG_ERROR_STEPS`` where that is more."""
LAG_ERROR_STEPS = 0.25
"""The same of small lags (optimizer steps)."""
TIME_ERROR = 0.1
"""Largest error of the screened time (relative); ``tests/pipelinerl/theory`` holds it to it."""
TURNS_TIME_ERROR = 0.4
"""The same with turns (relative): preemption, and prefill while others wait, are left out."""


def lag_error(lag: float) -> float:
    """Return the standard deviation of a screened mean lag (optimizer steps)."""
    return max(LAG_ERROR * lag, LAG_ERROR_STEPS)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run."""

    choice: Choice
    """Its value on every axis."""
    config: RunConfig
    """The run file with these values, without ``[plan]`` and ``[compare]``; valid."""
    label: str
    idle: int = 0
    """Accelerators that are paid for and stand idle, as they make no whole engine (count)."""

    @property
    def family(self) -> str:
        """Its kind of schedule, as ``plan.schedulers`` names it."""
        return str(self.choice[SCHEDULE.name])

    @property
    def schedule(self) -> ScheduleKind:
        """Its kind of schedule."""
        return self.config.scheduler.schedule

    @property
    def layout(self) -> tuple[Any, ...]:
        """Kind, split, size of engine and G: candidates that differ otherwise are sizes of the same layout."""
        schedule = self.schedule
        return tuple(self.choice[one.name] for one in AXES if one.is_layout and one.applies_to(schedule))

    @property
    def rented(self) -> RunConfig:
        """Its run file with every accelerator that is paid for."""
        rented = self.config.cluster.accelerators + self.idle
        return with_values(self.config, cluster={"accelerators": rented}) if self.idle else self.config

    def changed(self, **tables: Mapping[str, Any]) -> Self:
        """Return this candidate with other values in some tables of its run file."""
        return replace(self, config=with_values(self.config, **tables))

    def gpu_hours(self, seconds: float) -> float:
        """Return the GPU-hours of so many seconds, of idle accelerators too."""
        return seconds / 3600 * self.rented.cluster.accelerators


@dataclass(frozen=True, slots=True)
class Rejected:
    """A choice that is no candidate, or a candidate that breaks a limit."""

    choice: Choice
    reason: Reason
    needed: float | None = None
    """The value of the limit that would let it in; None if the reason is not a limit."""

    @property
    def family(self) -> str:
        """Its kind of schedule, as ``plan.schedulers`` names it."""
        return str(self.choice[SCHEDULE.name])


@dataclass(frozen=True, slots=True)
class Screened:
    """A candidate and its steady state."""

    candidate: Candidate
    estimate: Estimate

    @property
    def seconds(self) -> float:
        """The whole run (seconds)."""
        return self.estimate.start_s + self.estimate.step_s * self.candidate.config.optimizer_steps

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per second over the whole run."""
        return self.estimate.tokens_per_s * self.estimate.step_s * self.candidate.config.optimizer_steps / self.seconds

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of the whole run."""
        return self.candidate.gpu_hours(self.seconds)

    @property
    def least_gpu_hours(self) -> float:
        """Fewest GPU-hours that the run can take within the error of the screening."""
        has_turns = self.candidate.config.environment is not None
        return self.gpu_hours / (1 + (TURNS_TIME_ERROR if has_turns else TIME_ERROR))

    @property
    def least_lag_mean(self) -> float:
        """Least mean lag that the run can have within the error of the screening (optimizer steps)."""
        lag = self.estimate.lag_mean
        return max(0.0, lag - 2 * lag_error(lag))

    def breaks(self, limits: Limits) -> Reason | None:
        """Return the first limit that it breaks, if any, at the price of its GPU-hours."""
        return limits.at(self.candidate.rented).broken(self.estimate.lag_mean, self.gpu_hours)


class Screener:
    """Screens candidates of one run file under one set of hardware coefficients.

    ``hardware`` has changes to its table, e.g. the level; ``drawn`` maps hardware, and whether colocated, to that of a
    draw.
    """

    def __init__(
        self,
        config: RunConfig,
        answers: LengthStatistics,
        hardware: Mapping[str, object] | None = None,
        *,
        drawn: Callable[[ResolvedHardware, bool], ResolvedHardware] = lambda hardware, _: hardware,
    ) -> None:
        self._drawn = drawn
        self.answers = answers
        self._hardware = config.hardware.model_copy(update=dict(hardware or {}))
        named = named_hardware(self._hardware)
        self._slots_keep_states = named is not None and named[1].state_bytes > 0  # each takes of the KV cache, then
        self._resolved: dict[tuple[int, int, bool, int | None, int], ResolvedHardware] = {}
        self._decode_steps: dict[tuple[int, int, SpeculationConfig | None], DecodeStep] = {}

    def resolved(self, config: RunConfig) -> ResolvedHardware:
        """Return the hardware of a candidate in numbers; ConfigError if the model does not fit into its engines."""
        slots = config.scheduler.generation_batch_size if self._slots_keep_states else None
        shared = sequence_parallel_of(config)
        key = (config.cluster.tensor_parallel, config.training_accelerators, config.colocated, slots, shared)
        if key not in self._resolved:
            given = self._hardware.model_copy(update={"weights": config.hardware.weights})
            hardware = resolved_hardware(config.model_copy(update={"hardware": given}))
            self._resolved[key] = self._drawn(hardware, config.colocated)
        return self._resolved[key]

    def screen(self, candidate: Candidate) -> Screened:
        """Return the steady state of a candidate."""
        config, hardware = candidate.config, self.resolved(candidate.config)
        tensor_parallel = config.cluster.tensor_parallel
        most = 1 << (config.scheduler.generation_batch_size - 1).bit_length()
        key = (tensor_parallel, most, config.speculation)
        if key not in self._decode_steps:
            self._decode_steps[key] = DecodeStep(
                hardware.decode, tensor_parallel=tensor_parallel, most=most, speculation=config.speculation_law
            )
        return Screened(candidate, screen(config, hardware, self._decode_steps[key], self.answers))


def candidate_of(choice: Choice, space: SearchSpace) -> Candidate | Rejected:
    """Return the candidate that makes a choice, or why there is none."""
    own, schedule = space.config.scheduler, schedule_of(choice)
    if schedule.colocated and space.config.hardware.generation_gpu is not None:
        return Rejected(choice, Reason.TWO_KINDS)
    idle = space.accelerators - whole_engines(space.accelerators, choice[ENGINE.name]) if schedule.colocated else 0
    changes: dict[str, dict[str, Any]] = {"scheduler": {"partial_rollouts": False}}
    for axis in AXES:
        if getattr(space.config, axis.table.split(".")[0]) is not None:
            changes.setdefault(axis.table, {})[axis.key.rpartition(".")[2]] = choice[axis.name]
    changes["cluster"]["accelerators"] = space.accelerators - idle
    if schedule.only_waits and choice["max_lag"] is not None:
        changes["scheduler"]["on_stale"] = OnStale.TRAIN
    if own.micro_batch_size is not None and choice["train_batch_size"] % own.micro_batch_size:
        changes["scheduler"]["micro_batch_size"] = None
    config = _as_measured(with_values(space.config, **changes), space)
    reason, max_lag = space.memory.excluded_because(config), config.scheduler.max_lag
    if reason is not None:
        return Rejected(choice, reason)
    if max(config.num_slots, config.rl_step_rollouts) > MOST_ROLLOUTS:
        return Rejected(choice, Reason.ROLLOUTS)
    if max_lag is not None and config.least_max_lag > max_lag:
        return Rejected(choice, Reason.LAG, config.least_max_lag)
    return Candidate(choice, config, label_of(choice, space), idle)


def own_candidate(space: SearchSpace) -> Candidate:
    """Return the run file as it is, as a candidate."""
    choice = choice_of(space.config)
    return Candidate(choice, _as_measured(space.config, space), f"{label_of(choice, space)} (run file)")


def _as_measured(config: RunConfig, space: SearchSpace) -> RunConfig:
    """Return the run file of a candidate, with the weight transfer that was measured in its arm, if any was."""
    config = config.model_copy(update={"compare": None, "plan": None})
    weights = space.measured.weights.get(config.colocated)
    return config if weights is None else with_values(config, hardware={"weights": weights})


def screen_all(
    space: SearchSpace, screener: Screener, choices: Iterable[Choice] | None = None
) -> tuple[list[Screened], list[Rejected]]:
    """Return the candidates that may keep to the limits, with their steady states, and the rejected ones with reasons.

    A limit rejects only beyond the largest error of the screening. ``choices`` None: all of the space.
    """
    kept: list[Screened] = []
    rejected: list[Rejected] = []
    for choice in all_choices(space) if choices is None else choices:
        one = candidate_of(choice, space)
        if isinstance(one, Rejected):
            rejected.append(one)
            continue
        screened = screener.screen(one)
        limits = space.limits.at(one.rented)
        reason = limits.broken(screened.least_lag_mean, screened.least_gpu_hours)
        if reason is None:
            kept.append(screened)
        else:
            needed = limits.values(screened.estimate.lag_mean, screened.gpu_hours)[reason]
            rejected.append(Rejected(choice, reason, needed))
    return kept, rejected


def within_limits(space: SearchSpace, screener: Screener) -> list[Screened]:
    """Return the candidates that keep to the limits by the screening, the fastest first."""
    kept, _ = screen_all(space, screener)
    within = [one for one in kept if one.breaks(space.limits) is None]
    return sorted(within, key=lambda one: -one.tokens_per_s)
