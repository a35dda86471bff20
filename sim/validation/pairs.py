"""Is asynchronous RL faster than synchronous RL on the same GPUs? The probability, for pairs of published runs.

Theory. The two runs of a pair are arms of one system (``pipelinerl.hardware.prior``): factors on generation, training,
mean answer and weights are common, so drawn once for both; each arm has its own factor on its weights, on its phase
switch, and its own run-to-run spread. An arm lasts S(g, t, m) + weights + switch, S from its simulations. The
probability is the share of draws in which the asynchronous step is shorter. Draws are of the prior, without any
measurement of the family; the mean log error of the ratios is that of the pairs of all other families.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from pipelinerl.hardware.coefficients import Level
from pipelinerl.hardware.prior import (
    CERTAIN,
    END_SDS,
    GENERATION_SD,
    MEAN_SD,
    RUN_SD,
    SEVERAL_NODES_FACTOR,
    SWITCH_SD,
    SYNC_ARM_SD,
    SYNC_SD,
    TRAINING_SD,
)
from pipelinerl.records.validation_report import SpeedUp, SpeedUpSummary
from pipelinerl.util.arrays import FloatArray
from sim.validation.infer import STEP, SimulationGrid, across_nodes
from sim.validation.reconstruct import LOG_MOST_MEAN, measured_seconds, same_run, switch_s, weights_s
from sim.validation.rows import Schedule
from sim.validation.unseen import by_family, family_interval, spread_of

DRAWS = 4000
SAME_WORK = 0.1
"""Largest difference of the logs of the tokens of two steps that are as much work."""
SYNCHRONOUS = (Schedule.SYNC, Schedule.SYNC_APART)


class Pair(NamedTuple):
    """Simulations of a synchronous and of an asynchronous run."""

    sync: SimulationGrid
    other: SimulationGrid

    @property
    def family(self) -> tuple[str, str, str]:
        """Software, GPU and model."""
        return self.sync.run.published.family

    @property
    def measured(self) -> float:
        """Synchronous over asynchronous seconds per step."""
        first, second = (measured_seconds(one.run.published) for one in self)
        assert first is not None
        assert second is not None
        return first / second


def speed_ups(grids: Iterable[SimulationGrid]) -> tuple[SpeedUp, ...]:
    """Return the predictions for pairs of runs of a family with equal GPUs and similar answers."""
    pairs = _pairs(list(grids))
    factors = [_drawn(pair) for pair in pairs]
    ratios = [_log_ratio(pair, drawn) for pair, drawn in zip(pairs, factors, strict=True)]
    errors = [float(np.median(ratio_D)) - math.log(pair.measured) for pair, ratio_D in zip(pairs, ratios, strict=True)]
    made = []
    for pair, drawn, ratio_D in zip(pairs, factors, ratios, strict=True):
        others = [(one, error) for one, error in zip(pairs, errors, strict=True) if one.family != pair.family]
        measured = [one.measured for one, _ in others]
        shifted_D = ratio_D - spread_of(by_family((one.family, error) for one, error in others)).centre
        middle, spread = float(np.median(shifted_D)), END_SDS * float(shifted_D.std())
        made.append(
            SpeedUp(
                synchronous=pair.sync.run.id,
                asynchronous=pair.other.run.id,
                family=pair.sync.run.published.family_name,
                measured=pair.measured,
                predicted=math.exp(middle),
                low=math.exp(middle - spread),
                high=math.exp(middle + spread),
                probability=float((shifted_D > 0).mean()),
                decided_by=_decided_by(drawn, ratio_D),
                constant=float(np.median(measured)) if measured else 1.0,
            )
        )
    return tuple(made)


def speed_up_summary(made: Sequence[SpeedUp]) -> SpeedUpSummary | None:
    """Return how good the probabilities are, beside naive rules; None without pairs."""
    if not made:
        return None
    faster = np.array([one.measured > 1 for one in made], dtype=float)
    probability = np.array([one.probability for one in made])
    sure = (probability >= CERTAIN) | (probability <= 1 - CERTAIN)
    square, always = (probability - faster) ** 2, (1 - faster) ** 2
    error = np.array([abs(one.predicted / one.measured - 1) for one in made])
    constant = np.array([abs(one.constant / one.measured - 1) for one in made])
    brier_ends = family_interval(_by_family(made, square - always), _mean_of_means)
    error_ends = family_interval(_by_family(made, np.column_stack([error, constant])), _median_difference)
    return SpeedUpSummary(
        pairs=len(made),
        families=len({one.family for one in made}),
        faster=int(faster.sum()),
        median_error=float(np.median(error)),
        constant_median_error=float(np.median(constant)),
        error_difference_low=error_ends[0],
        error_difference_high=error_ends[1],
        within_band=_mean_of_means(_by_family(made, [float(one.low <= one.measured <= one.high) for one in made])),
        brier=_mean_of_means(_by_family(made, square)),
        always_brier=_mean_of_means(_by_family(made, always)),
        brier_difference_low=brier_ends[0],
        brier_difference_high=brier_ends[1],
        certain=int(sure.sum()),
        certain_right=int(((probability > 0.5) == (faster > 0.5))[sure].sum()),
    )


def _by_family(made: Sequence[SpeedUp], values: Sequence[float] | FloatArray) -> list[FloatArray]:
    """Return the data of each pair, shape [pairs, ...], by family."""
    families = by_family((one.family, index) for index, one in enumerate(made))
    return [np.asarray(values, dtype=float)[indices] for indices in families.values()]


def _mean_of_means(families: Sequence[FloatArray]) -> float:
    """Return a mean in which every family counts as much, however many pairs it has."""
    return float(np.mean([family.mean() for family in families]))


def _median_difference(families: Sequence[FloatArray]) -> float:
    """Return the median of the first column less that of the second, of all pairs together."""
    first, second = np.median(np.concatenate(families), axis=0)
    return float(first - second)


def _pairs(grids: Sequence[SimulationGrid]) -> list[Pair]:
    rows = [one for one in grids if measured_seconds(one.run.published) is not None and one.run.published.gpus]
    distinct = [one for index, one in enumerate(rows) if not any(_same(one, other) for other in rows[:index])]
    pairs = (Pair(one, other) for one, other in itertools.product(distinct, distinct))
    return [
        pair
        for pair in pairs
        if pair.sync.run.schedule in SYNCHRONOUS
        and pair.other.run.schedule.at_once
        and pair.family == pair.other.run.published.family
        and pair.sync.run.published.gpus == pair.other.run.published.gpus
        and pair.sync.run.mean_is_known is pair.other.run.mean_is_known
        and abs(math.log(_tokens(pair.sync) / _tokens(pair.other))) < SAME_WORK
    ]


def _same(one: SimulationGrid, other: SimulationGrid) -> bool:
    """Return whether two rows of an asynchronous run are one measurement."""
    return one.run.schedule.at_once and same_run(one.run.published, other.run.published)


def _tokens(grid: SimulationGrid) -> float:
    return grid.run.sequences * grid.run.mean_tokens


def _drawn(pair: Pair) -> dict[str, FloatArray]:
    """Return the logs of all factors, [draws] each and those of an arm's own [arms, draws]; the same for every pair."""
    generator = np.random.default_rng(0)
    factor = SEVERAL_NODES_FACTOR if across_nodes(pair) else 1
    mean_sd = 0.0 if pair.sync.run.mean_is_known else MEAN_SD
    sds = {"generation": GENERATION_SD * factor, "training": TRAINING_SD * factor, "mean answer": mean_sd}
    common = {name: generator.normal(0, 1, DRAWS) * sd for name, sd in sds.items()}
    common["mean answer"] = np.minimum(common["mean answer"], LOG_MOST_MEAN)
    weights = generator.normal(0, SYNC_SD, DRAWS) + generator.normal(0, SYNC_ARM_SD, (2, DRAWS))
    return {
        **common,
        "weights": weights,
        "phase switch": generator.normal(0, SWITCH_SD, (2, DRAWS)),
        "run-to-run spread": generator.normal(0, RUN_SD, (2, DRAWS)),
    }


def _log_ratio(pair: Pair, drawn: dict[str, FloatArray]) -> FloatArray:
    """Return the log of the synchronous seconds over the asynchronous ones, [draws]."""
    sync_D, other_D = (
        np.log(
            np.exp(grid.at(drawn["generation"] - drawn["training"], drawn["mean answer"], STEP) + drawn["training"])
            + weights_s(grid.run.published, Level.CENTRAL) * np.exp(drawn["weights"][arm])
            + switch_s(grid.run.published, Level.CENTRAL) * np.exp(drawn["phase switch"][arm])
        )
        + drawn["run-to-run spread"][arm]
        for arm, grid in enumerate(pair)
    )
    return np.asarray(sync_D - other_D)


def _decided_by(drawn: dict[str, FloatArray], ratio_D: FloatArray) -> str:
    """Return the factor that explains most of the variance of the ratio; of an arm's own, those of both arms."""

    def explained(values: FloatArray) -> float:
        rows = [one for one in np.atleast_2d(values) if one.std() > 0]
        return sum(float(np.corrcoef(one, ratio_D)[0, 1]) ** 2 for one in rows)

    return max(drawn, key=lambda name: explained(drawn[name]))
