"""The lists of ``[plan]``: which of their values no candidate can have, and which nothing came of, and why.

A value that arithmetic rules out (engines of 3 on 4 accelerators that all generate) is a fault of the run file. One
that only turns out not to fit (memory, limits) or to be the same as another is told beside the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipelinerl.errors import ConfigError
from pipelinerl.scheduler.kinds import ScheduleKind
from sim.planning.candidates import Candidate, Rejected, Screened, engine_sizes
from sim.planning.search_space import Space


@dataclass(frozen=True, slots=True)
class _Key:
    """A list of ``[plan]``."""

    value: Callable[[Candidate], Any]
    """What a candidate has of it."""
    common: bool = False
    """Whether every kind of schedule has it; else those that name it among their ``axes``."""


_KEYS = {
    "schedulers": _Key(lambda one: one.family, common=True),
    "tensor_parallel": _Key(lambda one: one.config.cluster.tensor_parallel, common=True),
    "train_batch_size": _Key(lambda one: one.config.scheduler.train_batch_size, common=True),
    "generation_batch_size": _Key(lambda one: one.config.scheduler.generation_batch_size, common=True),
    "generation_accelerators": _Key(lambda one: one.config.cluster.generation_accelerators),
    "optimizer_steps_per_rl_step": _Key(lambda one: one.config.scheduler.optimizer_steps_per_rl_step),
    "ready_queue_size": _Key(lambda one: one.config.scheduler.ready_queue_size),
    "max_lag": _Key(lambda one: one.config.scheduler.max_lag),
}


def check_lists(space: Space, candidates: Sequence[Candidate]) -> None:
    """Raise ConfigError if some listed value is one that no candidate can have, a line per value: key, rule, value.

    Lists that the run file leaves out hold what fits; a list that no kind of scheduler tried reads is not looked at.
    """
    faults = []
    for key, values, used in _lists(space, candidates):
        for value in values:
            rule = None if value in used else _rule(key, value, space)
            if rule is not None:
                faults.append(f"plan.{key} must hold {rule}, got {value}")
    if faults:
        raise ConfigError("\n".join(faults))


def not_tried(
    space: Space, candidates: Sequence[Candidate], kept: Sequence[Screened], rejected: Sequence[Rejected]
) -> list[dict[str, Any]]:
    """Return the listed values that are in none of the candidates that the screening kept.

    Returns:
        A row per value: ``key``, ``value``, and in words ``why``.
    """
    rows = []
    left = [one.candidate for one in kept]
    listed = {key: (values, used) for key, values, used in _lists(space, candidates)}
    for key, (values, used) in listed.items():
        there = {_KEYS[key].value(one) for one in left if _has(key, one.schedule)}
        for value in values:
            if value in there:
                continue
            if value in used:
                reasons = Counter(
                    one.reason.value
                    for one in rejected
                    if _has(key, one.candidate.schedule) and _KEYS[key].value(one.candidate) == value
                )
                parts = [f"{count:,} {reason}" for reason, count in reasons.most_common()]
                why = f"no candidate with it fits: {'; '.join(parts) if len(parts) > 1 else next(iter(reasons))}"
            else:
                why = _same_as(key, space)
            rows.append({"key": f"plan.{key}", "value": value, "why": why})
    for key in _KEYS:
        values = getattr(space.plan, key)
        if values is not None and key not in listed:
            rows.append({"key": f"plan.{key}", "value": values, "why": "none of plan.schedulers has it"})
    return rows


def _lists(space: Space, candidates: Sequence[Candidate]) -> list[tuple[str, list[Any], set[Any]]]:
    """Return every list that the run file gives and something tried reads, with the values that candidates have."""
    lists = []
    for key, one in _KEYS.items():
        values = getattr(space.plan, key)
        if values is not None and any(_has(key, schedule) for schedule in space.plan.schedules):
            used = {one.value(candidate) for candidate in candidates if _has(key, candidate.schedule)}
            lists.append((key, list(dict.fromkeys(values)), used))
    return lists


def _has(key: str, schedule: ScheduleKind) -> bool:
    """Return whether a kind of schedule has a list of ``[plan]``."""
    return _KEYS[key].common or key in schedule.axes


def _rule(key: str, value: Any, space: Space) -> str | None:
    """Return what a value that no candidate has would have to be; None if there is nothing wrong with it."""
    config, plan = space.config, space.plan
    colocated = {schedule.colocated for schedule in plan.schedules}
    total, batches = config.cluster.accelerators, plan.train_batch_size or [config.scheduler.train_batch_size]
    match key:
        case "tensor_parallel":
            rules = [f"divisors of cluster.accelerators={total}"] if True in colocated else []
            if False in colocated and plan.generation_accelerators is not None:
                rules.append(f"divisors of a number of plan.generation_accelerators={plan.generation_accelerators}")
            elif False in colocated:
                rules.append(f"sizes below cluster.accelerators={total}, as others have to train")
            return " or ".join(rules)
        case "generation_accelerators" if value >= total:
            return f"numbers below cluster.accelerators={total}, as the others train"
        case "generation_accelerators":
            return f"multiples of an engine, {' or '.join(map(str, engine_sizes(space)))} accelerators"
        case "optimizer_steps_per_rl_step" if value > config.optimizer_steps:
            return f"numbers of at most optimizer_steps={config.optimizer_steps}"
        case "ready_queue_size" if value < min(batches):
            return f"sizes of at least the train_batch_size, {min(batches)}"
        case "train_batch_size" if plan.ready_queue_size is not None and value > max(plan.ready_queue_size):
            return f"sizes of at most the largest plan.ready_queue_size, {max(plan.ready_queue_size)}"
        case "max_lag" if value < config.scheduler.publish_every - 1:
            return f"bounds of at least scheduler.publish_every - 1 = {config.scheduler.publish_every - 1}"
    return None


def _same_as(key: str, space: Space) -> str:
    """Return why a value that is all right is in no candidate."""
    match key:
        case "schedulers":
            return "no split of the accelerators into engines and, where others train, a trainer is left"
        case "generation_batch_size":
            return "the same as a smaller one, whose slots are never all full"
        case "max_lag":
            return f"tried as the lag limit, {space.limits.lag}"
    return "nothing that goes with it is left"
