"""What other values of a run file would change: of what was assumed, and of what differs between two plans.

Theory of operation. Each value is changed alone. The best way to run is then looked for anew among some candidates, by
the screening; its throughput is told over that of the best as things are, found in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipelinerl.config.plan import PlanConfig
from pipelinerl.config.question import FOUND, Assumption, flat, with_placeholders, with_value
from pipelinerl.config.run import RunConfig
from pipelinerl.config.run_file import parse_run
from pipelinerl.errors import ConfigError
from pipelinerl.records.plan_report import Against, Assumed, Changed, Instead, PlanReport
from sim.planning.axes import BATCH_SIZES, all_choices
from sim.planning.candidates import Screened, Screener, candidate_of, screen_all
from sim.planning.search_space import SearchSpace

NUM_SPLITS = 8
"""Splits that are tried where the run file lists none (count)."""
NOT_COMPARED = (*FOUND, "seed", "plan.simulate", "plan.simulate_steps")
"""Keys in which plans may differ without a difference in what is asked."""


def best_screened(tables: Mapping[str, Any]) -> Screened | None:
    """Return the fastest within the limits among some candidates of a run file; None if there is none.

    Raises:
        ConfigError: If the run file is wrong.
    """
    config = parse_run(with_placeholders(tables, resized=True)[0])
    space = SearchSpace.of(config.model_copy(update={"plan": _some(config)}))
    candidates = (candidate_of(one, space) for one in all_choices(space))
    kept, _ = screen_all(candidates, space.limits, Screener(config, space.answers))
    within = [
        one
        for one in kept
        if space.limits.at(one.candidate.config).broken(one.estimate.lag_mean, one.gpu_hours) is None
    ]
    return max(within, key=lambda one: one.tokens_per_s, default=None)


def _some(config: RunConfig) -> PlanConfig:
    """Return the search space with fewer values where the run file lists none."""
    plan, number = config.plan or PlanConfig(), config.cluster.accelerators
    some = {
        "generation_accelerators": sorted({number * part // NUM_SPLITS // 8 * 8 for part in range(1, NUM_SPLITS)} - {0})
        if number >= 16
        else None,
        "generation_batch_size": [*BATCH_SIZES[::2]],
        "optimizer_steps_per_rl_step": [steps for steps in (2, 8, 32) if steps <= config.optimizer_steps] or None,
        "publish_every": [steps for steps in (1, 4) if steps <= config.optimizer_steps],
    }
    return plan.model_copy(update={name: values for name, values in some.items() if getattr(plan, name) is None})


def _instead(tables: Mapping[str, Any], key: str, value: Any, base: Screened | None) -> Instead:
    """Return what another value of a key would change."""
    try:
        best = best_screened(with_value(tables, key, value))
    except ConfigError:
        best = None  # a value that does not go with the others, or nothing that fits
    if best is None or base is None:
        return Instead(value=value, throughput=None, family=None)
    return Instead(value=value, throughput=best.tokens_per_s / base.tokens_per_s, family=best.candidate.family)


def effects_of(assumed: Sequence[Assumption], tables: Mapping[str, Any]) -> list[Assumed]:
    """Return what was assumed with what other values would change, the most influential first.

    Args:
        assumed: What nobody gave.
        tables: The run file with it.
    """
    base = best_screened(tables) if assumed else None
    rows = [
        Assumed(key=one.key, value=one.value, instead=[_instead(tables, one.key, other, base) for other in one.others])
        for one in assumed
    ]
    return sorted(rows, key=lambda row: -row.largest)


def compared_with(name: str, other: PlanReport, tables: Mapping[str, Any]) -> Against:
    """Return another plan, and what each key that differs changes there alone, the largest effect first.

    Args:
        name: Its file or folder.
        other: The plan.
        tables: The run file of this one.
    """
    before, now = flat(other.asked), flat(tables)
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key) and key not in NOT_COMPARED]
    base = best_screened(other.asked) if keys else None
    changed = [
        Changed(key=key, before=before.get(key), alone=_instead(other.asked, key, now.get(key), base)) for key in keys
    ]
    best = other.recommended
    return Against(
        name=name,
        label=best.label,
        family=best.family,
        tokens_per_s=best.tokens_per_s,
        lag_mean=best.lag_mean,
        cost=best.cost,
        verdict=best.verdict,
        changed=sorted(changed, key=lambda one: -abs((one.alone.throughput or 1.0) - 1)),
    )
