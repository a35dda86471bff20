"""How sure a plan is, and what would settle it: the table ``certainty`` of plan.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipelinerl.hardware.prior import CERTAIN
from pipelinerl.records.certainty_report import AsynchronousOdds, CertaintyReport
from pipelinerl.util.arrays import FloatArray
from sim.planning.candidates import Candidate, Screener
from sim.planning.choose import TIE
from sim.planning.draws import Draws, Unknown, make_draws, spreads
from sim.planning.instruments import Instruments
from sim.planning.measurements import explained, observations, values_of_measurements
from sim.planning.search_space import SearchSpace
from sim.planning.uncertainty import arms, log_rates, memory_suffices, rightness


def certainty(
    space: SearchSpace,
    ways: Sequence[Candidate],
    *,
    others: Sequence[Candidate],
    factors: Mapping[str, float],
    screener: Screener,
    run_file: str,
) -> CertaintyReport:
    """Return how sure a recommendation is.

    Args:
        space: The run file and its limits.
        ways: What keeps to the limits, the recommendation first.
        others: Of an arm that the plan does not have, to compare with.
        factors: Simulated over screened throughput as things are, by label.
        screener: Gives steady states as things are.
        run_file: Its path and overrides, as words of a command.
    """
    config, answers, best = space.config, space.answers, ways[0]
    draws = make_draws(config, space.measured, seed=config.seed)
    log_DW = log_rates(config, answers, [*ways, *others], draws=draws, factors=factors)
    mine_DW = log_DW[:, : len(ways)]
    ahead_D = arms([*ways, *others], log_DW)
    colocated = {way.config.colocated for way in (*ways, *others)}
    shown = observations(config, answers, draws, best, colocated=colocated, seed=config.seed)
    right, regret = rightness(mine_DW, 0)
    least = min(range(len(ways)), key=lambda way: rightness(mine_DW, way)[1])
    on_average = rightness(mine_DW, least)
    memory = space.memory.needed_shares(
        tensor_parallel=best.config.cluster.tensor_parallel, training_accelerators=best.config.training_accelerators
    )
    of_arms = {way.config.colocated: way for way in reversed([*ways, *others])}
    instruments = Instruments(config, run_file, of_arms, screener, one_gpu=space.memory.engine_fits(1))
    return CertaintyReport(
        draws=draws.number,
        ways=len(ways),
        tie=TIE,
        right=right,
        regret=regret,
        on_average=ways[least].label,
        on_average_right=on_average[0],
        on_average_regret=on_average[1],
        asynchronous=None if ahead_D is None else _odds(ahead_D, shown, draws),
        fits=None if memory is None else memory_suffices(memory),
        unknown={name.value: sd for name, sd in spreads(config, space.measured).items()},
        measurements=values_of_measurements(shown, mine_DW, instruments),
    )


def _odds(ahead_D: FloatArray, shown: Mapping[Unknown, FloatArray], draws: Draws) -> AsynchronousOdds:
    faster = float((ahead_D > 0).mean())
    left = {Unknown.RUN_APART: draws.run(colocated=False), Unknown.RUN_COLOCATED: draws.run(colocated=True)}
    shares = {name.value: explained([known_D], ahead_D) for name, known_D in {**shown, **left}.items()}
    decided_by = max(shares, key=lambda name: shares[name])
    return AsynchronousOdds(
        faster=faster, certain=not 1 - CERTAIN < faster < CERTAIN, decided_by=decided_by, share=shares[decided_by]
    )
