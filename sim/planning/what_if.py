"""What other values of a run file would change: of what was assumed, and of what differs between two plans.

Theory of operation. Each value is changed alone. The best way to run of the recommended kind of scheduler is then
looked for anew among some candidates, by the screening; its throughput is told over that of the best of that kind as
things are, found in the same way. The screening knows expectations only. A recommendation also counts the risk, so the
fastest kind by expectation need not be the recommended one: it is told only where another value makes it another.
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


def best_screened(tables: Mapping[str, Any]) -> dict[str, Screened]:
    """Return the fastest within the limits of each kind of scheduler, the fastest kind first.

    They are looked for among some candidates of a run file.

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
        if space.limits.at(one.candidate.rented).broken(one.estimate.lag_mean, one.gpu_hours) is None
    ]
    best: dict[str, Screened] = {}
    for one in sorted(within, key=lambda one: -one.tokens_per_s):
        best.setdefault(one.candidate.family, one)
    return best


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


def _instead(tables: Mapping[str, Any], key: str, value: Any, base: Mapping[str, Screened], family: str) -> Instead:
    """Return what another value of a key would change for a kind of scheduler, and whether another is the fastest."""
    try:
        best = best_screened(with_value(tables, key, value))
    except ConfigError:
        best = {}  # a value that does not go with the others, or nothing that fits
    if family not in best or family not in base:
        return Instead(value=value, throughput=None, fastest=None)
    (before, *_), (now, *_) = base, best
    ratio = best[family].tokens_per_s / base[family].tokens_per_s
    return Instead(value=value, throughput=ratio, fastest=now if now != before else None)


def effects_of(assumed: Sequence[Assumption], tables: Mapping[str, Any], family: str) -> list[Assumed]:
    """Return what was assumed with what other values would change, the most influential first.

    Args:
        assumed: What nobody gave.
        tables: The run file with it.
        family: The recommended kind of scheduler.
    """
    base = best_screened(tables) if assumed else {}
    rows = [
        Assumed(
            key=one.key,
            value=one.value,
            instead=[_instead(tables, one.key, other, base, family) for other in one.others],
        )
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
    base, best = best_screened(other.asked) if keys else {}, other.recommended
    changed = [
        Changed(key=key, before=before.get(key), alone=_instead(other.asked, key, now.get(key), base, best.family))
        for key in keys
    ]
    return Against(
        name=name,
        label=best.label,
        family=best.family,
        tokens_per_s=best.tokens_per_s,
        lag_mean=best.lag_mean,
        cost=best.cost,
        verdict=best.verdict,
        complete=other.search.complete,
        changed=sorted(changed, key=lambda one: -abs((one.alone.throughput or 1.0) - 1)),
    )
