"""How sure a plan is, and what would settle it: the table ``certainty`` of plan.json."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pipelinerl.hardware.prior import CERTAIN
from pipelinerl.records.certainty_report import AsynchronousOdds, CertaintyReport
from pipelinerl.util.arrays import FloatArray
from sim.planning.candidates import Screener
from sim.planning.choose import TIE
from sim.planning.draws import Draws, Unknown
from sim.planning.explain import screened_synchronous
from sim.planning.instruments import Instruments
from sim.planning.measurements import explained, observations, values_of_measurements
from sim.planning.search_space import SearchSpace
from sim.planning.simulate import Outcome
from sim.planning.uncertainty import Bets, ahead, memory_suffices, rightness


def certainty(
    space: SearchSpace,
    bets: Bets,
    best: Outcome,
    *,
    expected: Outcome,
    draws: Draws,
    factors: Mapping[str, float],
    screener: Screener,
    run_file: str,
    whole: bool,
) -> CertaintyReport:
    """Return how sure a recommendation is.

    Args:
        space: The run file and its limits.
        bets: What was compared.
        best: The recommendation, one of them.
        expected: What would be recommended if all were as expected, one of them, too.
        draws: In which they were.
        factors: Simulated over screened throughput as things are, by label.
        screener: Gives steady states as things are.
        run_file: Its path and overrides, as words of a command.
        whole: Whether it has all that a run needs.
    """
    config, answers, chosen = space.config, space.answers, best.candidate
    shares, log_DW = bets.shares(factors), bets.log_rates(factors)
    by_share = sorted(bets.ways, key=lambda way: (way.label != chosen.label, -shares[way.label]))
    arms = {way.config.colocated: way for way in reversed(by_share)}
    all_DW, ways = log_DW, list(bets.ways)
    if True not in arms and (other := screened_synchronous(space, screener)) is not None:
        arms[True] = other.candidate
        ways.append(other.candidate)
        of_other = Bets.of(config, answers, [other.candidate], draws)
        all_DW = np.concatenate([log_DW, of_other.log_rates(factors)], axis=1)
    ahead_D = ahead(ways, all_DW)
    shown = observations(config, answers, draws, chosen, colocated=arms.keys(), seed=config.seed)
    right, regret = rightness(log_DW, [way.label for way in bets.ways].index(chosen.label))
    memory = space.memory.needed_shares(
        tensor_parallel=chosen.config.cluster.tensor_parallel,
        training_accelerators=chosen.config.training_accelerators,
    )
    instruments = Instruments(config, run_file, arms, screener, whole=whole, one_gpu=space.memory.engine_fits(1))
    screened_lag = screener.screen(chosen).estimate.lag_mean
    return CertaintyReport(
        draws=draws.number,
        ways=len(bets.ways),
        tie=TIE,
        right=right,
        regret=regret,
        least_regret=1 - max(shares.values()),
        expected=expected.candidate.label,
        expected_faster=expected.tokens_per_s / best.tokens_per_s - 1,
        expected_regret=1 - shares[expected.candidate.label],
        keeps_limits=bets.keeps(
            chosen.label,
            space.limits,
            slower=1 / factors[chosen.label],
            staler=best.lag_mean / screened_lag if screened_lag > 0 else 1.0,
        ),
        asynchronous=None if ahead_D is None else _odds(ahead_D, shown, draws),
        fits=None if memory is None else memory_suffices(memory),
        unknown={name.value: sd for name, sd in draws.sds.items()},
        measurements=values_of_measurements(shown, log_DW, instruments),
    )


def _odds(ahead_D: FloatArray, shown: Mapping[Unknown, FloatArray], draws: Draws) -> AsynchronousOdds:
    faster = float((ahead_D > 0).mean())
    left = {Unknown.RUN_APART: draws.run(colocated=False), Unknown.RUN_COLOCATED: draws.run(colocated=True)}
    shares = {name.value: explained([known_D], ahead_D) for name, known_D in {**shown, **left}.items()}
    decided_by = max(shares, key=lambda name: shares[name])
    return AsynchronousOdds(
        faster=faster, certain=not 1 - CERTAIN < faster < CERTAIN, decided_by=decided_by, share=shares[decided_by]
    )
