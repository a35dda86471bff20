"""Predict published runs from their published settings and from other runs of the same system.

Theory. Four numbers about a system are uncertain: a factor g on its times of generation, a factor t on its times of
training, one on the rest of a step, and the mean answer m where it is not published. Before any measurement each is
log-normal around the hardware model's central value. Measurements of the *other* rows of a family sharpen that (Bayes'
rule on a grid of simulations). The prediction is the median over the likely seconds of a step; its band holds 80 %, as
a normal distribution of the logs. A row without a family is predicted from the hardware model alone, with a band from
its error for other families (``unseen.py``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from importlib import resources

import numpy as np

from pipelinerl.errors import ConfigError, PipelineRLError
from pipelinerl.hardware.coefficients import Level
from pipelinerl.hardware.prior import END_SDS
from pipelinerl.records.validation_report import (
    AloneSummary,
    PredictedRow,
    Quantity,
    RowPair,
    SpeedUp,
    UnusableRow,
    ValidationReport,
    ValidationSummary,
)
from pipelinerl.theory.paper import staleness_applied_compute
from sim.parallel import run_all
from sim.validation.infer import Band, SimulationGrid, seconds_band, simulation_grid
from sim.validation.pairs import speed_up_summary, speed_ups
from sim.validation.reconstruct import ReconstructedRun, measured_seconds, reconstruct_run, rest_s, same_run
from sim.validation.rows import PublishedRun, Schedule, read_published_runs
from sim.validation.unseen import (
    AloneRun,
    alone_run,
    by_family,
    family_interval,
    spread_of,
    truly_simulated,
    unseen_bands,
)

# ----------------------------------------------------------------------------------------------------------- the report

SAME = 0.05
"""Two measurements with logs nearer than this count as equally fast."""


def validation_report(
    predictions: Sequence[PredictedRow | UnusableRow], made: tuple[SpeedUp, ...] = ()
) -> ValidationReport:
    """Return the content of validation.json: every row, and how far off they are together."""
    rows = tuple(one for one in predictions if isinstance(one, PredictedRow))
    pairs = tuple(
        RowPair(rows=(one.id, other.id), in_order=(one.predicted < other.predicted) is (one.measured < other.measured))
        for one, other in itertools.combinations(rows, 2)
        if one.family == other.family
        and one.quantity == other.quantity
        and abs(math.log(one.measured / other.measured)) > SAME
    )
    return ValidationReport(
        rows=rows,
        unusable=tuple(one for one in predictions if isinstance(one, UnusableRow)),
        pairs=pairs,
        speed_ups=made,
        summary=_summary(rows, pairs, made),
    )


def _summary(rows: Sequence[PredictedRow], pairs: Sequence[RowPair], made: Sequence[SpeedUp]) -> ValidationSummary:
    relative = sorted(abs(one.error) for one in rows if one.is_relative)
    simulated = [abs(one.error) for one in rows if one.is_simulated]
    absolute = [abs(one.error) for one in rows if not one.is_relative]
    return ValidationSummary(
        rows=len(rows),
        median_error=_median(relative),
        median_error_simulated=_median(simulated),
        alone=_alone([one for one in rows if one.alone is not None]),
        speed_ups=speed_up_summary(made),
        p90_error=float(np.quantile(relative, 0.9)) if relative else None,
        within_30_percent=sum(one <= 0.3 for one in relative) / len(relative) if relative else None,
        largest_staleness_error=max(absolute) if absolute else None,
        pairs=len(pairs),
        pairs_in_order=sum(pair.in_order for pair in pairs) / len(pairs) if pairs else None,
    )


def _median(errors: Sequence[float]) -> float | None:
    return float(np.median(errors)) if errors else None


def _alone(rows: Sequence[PredictedRow]) -> AloneSummary | None:
    if not rows:
        return None
    ratios = [(row.family, row.alone / row.measured) for row in rows if row.alone is not None]
    log_errors = by_family((family, math.log(ratio)) for family, ratio in ratios)
    errors = by_family((family, abs(ratio - 1)) for family, ratio in ratios)
    every = [error for family in errors.values() for error in family]
    samples = [np.asarray(family) for family in errors.values()]
    low, high = family_interval(samples, lambda sample: float(np.median(np.concatenate(sample))))
    spread = spread_of(log_errors)
    return AloneSummary(
        rows=len(rows),
        families=len(errors),
        median_error=float(np.median(every)),
        median_error_low=low,
        median_error_high=high,
        p90_error=float(np.quantile(every, 0.9)),
        within_45_percent=sum(error <= 0.45 for error in every) / len(every),
        within_band=sum(_inside(row) for row in rows) / len(rows),
        bias=float(np.mean([error for family in log_errors.values() for error in family])),
        family_sd=spread.family_sd,
        row_sd=spread.row_sd,
        naive_median_error=_naive(rows),
    )


def _inside(row: PredictedRow) -> bool:
    return row.alone_low is not None and row.alone_high is not None and row.alone_low <= row.measured <= row.alone_high


def _naive(rows: Sequence[PredictedRow]) -> float | None:
    """Return the median error of the rule that all systems make as many tokens per second and GPU."""
    log_s = {
        row.id: math.log(row.measured * row.gpus / row.answer_tokens)
        for row in rows
        if row.gpus and row.answer_tokens and row.quantity == "s/step"
    }
    errors = []
    for row in rows:
        others = [log_s[one.id] for one in rows if one.family != row.family and one.id in log_s]
        if row.id in log_s and others:
            errors.append(abs(math.exp(float(np.median(others)) - log_s[row.id]) - 1))
    return _median(errors)


OWN_REST_SD = 0.7
"""Standard deviation of the log of a step's remaining seconds, between rows of one system (verl: 11 to 55 s)."""

IN_PARTS = (Schedule.SYNC, Schedule.SYNC_APART, Schedule.ONE_STEP_OFF)
"""Schedules whose step is a sum, or the longer, of generation and training."""

Job = tuple[ReconstructedRun, bool | None]
"""A row to simulate, and whether its training lasts the published seconds; None: alone, once."""


def validate(
    runs: Sequence[PublishedRun],
    *,
    others: Sequence[PublishedRun] = (),
    workers: int | None = None,
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> ValidationReport:
    """Predict every run from its published inputs and from the other rows of its family, also those of ``others``.

    Rows of the same id count once. ``workers``: processes (None: one per core). ``on_progress`` gets the numbers of
    rows simulated and to simulate. Rows of the report are in order, its pairs are of ``runs``.
    """
    known, jobs, reasons = _jobs(runs, others)
    grids: dict[tuple[str, bool], SimulationGrid] = {}
    alone: list[AloneRun] = []
    results = run_all(_simulated_job, jobs, workers=workers) if workers != 1 else (_simulated_job(job) for job in jobs)
    with closing(results):
        for done, result in enumerate(results, start=1):
            match result:
                case UnusableRow():
                    reasons[result.id] = result.reason
                case SimulationGrid():
                    grids[result.run.id, result.training_given] = result
                case AloneRun():
                    alone.append(result)
            on_progress(done, len(jobs))
    order = {run.id: place for place, run in enumerate(known)}  # whichever process was first
    bands = unseen_bands(sorted(alone, key=lambda one: order[one.id]))
    asked = {run.id for run in runs}
    free = [grids[run.id, False] for run in known if (run.id, False) in grids]
    pairs = [one for one in speed_ups(free) if asked >= {one.synchronous, one.asynchronous}]
    return validation_report([_predicted(run, known, grids, bands, reasons) for run in runs], tuple(pairs))


def shipped_runs() -> list[PublishedRun]:
    """Return the published runs that come with the simulator (``published_runs/README.md`` names their sources)."""
    with resources.as_file(resources.files("sim.validation") / "published_runs" / "runs.csv") as path:
        return read_published_runs(path)


def _jobs(
    runs: Sequence[PublishedRun], others: Sequence[PublishedRun]
) -> tuple[list[PublishedRun], list[Job], dict[str, str]]:
    """Return all rows, the simulations to make, and why some rows cannot be simulated."""
    ids = {run.id for run in runs}
    known = [*runs, *(run for run in others if run.id not in ids)]
    families = by_family((run.family, run) for run in known)
    wanted = {run.family for run in runs}
    rebuilt: list[ReconstructedRun] = []
    reasons: dict[str, str] = {}
    for run in known:
        if run.family in wanted and _staleness(run) is None and _idle_share(run) is None:
            try:
                rebuilt.append(reconstruct_run(run, families[run.family]))
            except ConfigError as error:
                reasons[run.id] = str(error)
    jobs: list[Job] = [(run, False) for run in rebuilt]
    jobs += [(run, True) for run in rebuilt if run.published.training_is_input and run.id in ids]
    alone = [run for run in map(truly_simulated, known) if run is not None]
    compared = [run.published.family for run in alone if run.id in ids]  # a row alone is compared with other families
    jobs += [(run, None) for run in alone if run.id in ids or any(run.published.family != one for one in compared)]
    return known, jobs, reasons


def _simulated_job(job: Job) -> SimulationGrid | AloneRun | UnusableRow:
    run, training_given = job
    try:
        return alone_run(run) if training_given is None else simulation_grid(run, training_given=training_given)
    except PipelineRLError as error:
        return UnusableRow(id=run.id, reason=str(error))


def _predicted(
    run: PublishedRun,
    known: Sequence[PublishedRun],
    grids: Mapping[tuple[str, bool], SimulationGrid],
    bands: Mapping[str, Band],
    reasons: Mapping[str, str],
) -> PredictedRow | UnusableRow:
    """Return the prediction of one row, by the first way that its published numbers allow."""
    others = [other for other in known if not same_run(other, run)]
    alone = bands.get(run.id)
    closed = _staleness(run) or _idle_share(run) or _sum_of_parts(run, others, alone)
    if closed is not None:
        return closed
    grid = grids.get((run.id, run.training_is_input))
    if grid is None:
        return UnusableRow(id=run.id, reason=reasons[run.id])
    if measured_seconds(grid.run.published) is None:
        reason = "neither seconds per step nor hours and steps nor tokens/s are published"
        return UnusableRow(id=run.id, reason=reason)
    references = [
        _with_rest(grids[other.id, False], others)
        for other in others
        if other.family == run.family and (other.id, False) in grids
    ]
    references = [one for one in references if measured_seconds(one.run.published) is not None]
    alike = [one for one in references if one.run.scale_is_known is grid.run.scale_is_known]
    if not alike and run.gpus is not None and not grid.run.scale_is_known:
        # Hours alone: their steps stand for seconds, as nothing else is there.
        assumed = (*grid.run.assumed, "no time outside the steps")
        grid = replace(grid, run=replace(grid.run, scale_is_known=True, assumed=assumed))
        alike = [one for one in references if one.run.scale_is_known]
    inputs = grids[run.id, False] if grid.training_given else None
    return _from_simulations(_with_rest(grid, others), alike, alone, inputs=inputs)


def _with_rest(grid: SimulationGrid, others: Sequence[PublishedRun]) -> SimulationGrid:
    """Return the simulations of a row plus the remaining seconds of its step, learned from other rows."""
    return replace(grid, rest_s=_rest(grid.run.published, others)[0].middle_s)


def _from_simulations(
    grid: SimulationGrid,
    references: Sequence[SimulationGrid],
    alone: Band | None,
    *,
    inputs: SimulationGrid | None,
) -> PredictedRow | UnusableRow:
    run, row = grid.run, grid.run.published
    if not run.scale_is_known and not references:
        reason = "the cluster's size is not published, and no other row of its system to compare with"
        return UnusableRow(id=run.id, reason=reason)
    if not (run.mean_is_known or references or inputs):
        reason = "avg_len is not published: without the mean answer, or another row of its system, no seconds are known"
        return UnusableRow(id=run.id, reason=reason)
    unseen = alone if not references and inputs is None else None
    band = unseen or seconds_band(grid, references, inputs=inputs)
    measured_s = measured_seconds(row)
    assert measured_s is not None
    quantity: Quantity = "s/step"
    measured = measured_s
    if row.measured_step_s is None:  # tokens/s were measured, so tokens/s are reported
        assert row.tokens_per_s is not None
        quantity, measured = "tokens/s", row.tokens_per_s
        band = _inverse(band, measured * measured_s)
        alone = None if alone is None else _inverse(alone, measured * measured_s)
    return _row(
        row,
        quantity,
        measured,
        band,
        inputs=("training",) if grid.training_given else (),
        fitted_to=tuple(reference.run.id for reference in references),
        assumed=run.assumed,
        alone=alone,
    )


def _inverse(band: Band, tokens: float) -> Band:
    """Return tokens per second from seconds for that many tokens."""
    high, middle, low = (tokens / seconds for seconds in band)
    return Band(low, middle, high)


def _row(
    run: PublishedRun,
    quantity: Quantity,
    measured: float,
    band: Band | float,
    *,
    inputs: tuple[str, ...],
    fitted_to: tuple[str, ...] = (),
    assumed: tuple[str, ...] = (),
    alone: Band | None = None,
) -> PredictedRow:
    """Return a row of the report; the band is in the unit of ``quantity``, a number alone has none."""
    low, predicted, high = (None, band, None) if isinstance(band, float) else band
    error = predicted - measured
    answers, mean = run.sequences_per_step, run.avg_len
    is_time = quantity in ("s/step", "tokens/s")  # the closed forms are of asynchronous RL
    return PredictedRow(
        id=run.id,
        family=run.family_name,
        mode=(run.schedule if run.schedule and is_time else Schedule.ASYNC).label,
        quantity=quantity,
        gpus=run.gpus,
        answer_tokens=None if answers is None or mean is None else answers * mean,
        measured=measured,
        predicted=predicted,
        low=low,
        high=high,
        inputs=inputs,
        fitted_to=fitted_to,
        assumed=assumed,
        alone=None if alone is None else alone.middle_s,
        alone_low=None if alone is None else alone.low_s,
        alone_high=None if alone is None else alone.high_s,
        error=error if quantity == "staleness" else error / measured,
    )


def _staleness(run: PublishedRun) -> PredictedRow | None:
    """Predict a published mean staleness from the published C, B, q, rho and tail, in closed form."""
    in_flight, batch, queue, ratio = run.in_flight, run.train_batch_size, run.queue_batches, run.rate_ratio
    tailness, measured = run.tailness, run.mean_staleness
    if in_flight is None or batch is None or queue is None or ratio is None or tailness is None or measured is None:
        return None
    predicted = staleness_applied_compute(
        in_flight=in_flight, train_batch_size=batch, rate_ratio=ratio, queue_batches=queue, tailness=tailness
    ).total
    inputs = ("C", "B", "q", "rho", "Mtail")
    return _row(run, "staleness", measured, predicted, inputs=inputs)


def _idle_share(run: PublishedRun) -> PredictedRow | None:
    """Predict the share of time in which a trainer waits from both sides' published samples per second."""
    trained, made, idle = run.trainer_samples_per_s, run.generator_samples_per_s, run.trainer_idle_share
    if trained is None or made is None or not idle:  # of nothing there is no relative error
        return None
    most = run.generator_samples_per_s_high or made
    low, high = (max(0.0, 1 - rate / trained) for rate in (most, made))
    return _row(
        run, "trainer idle", idle, Band(low, (low + high) / 2, high), inputs=("samples/s of trainer and generator",)
    )


def _rest(run: PublishedRun, others: Sequence[PublishedRun]) -> tuple[Band, tuple[str, ...]]:
    """Return the seconds of an RL step beyond generation and training, and the rows they were learned from.

    Offloading, resharding and publishing weights, rewards, data: of colocated rows of the same family with published
    parts, else of the hardware model.
    """
    own = [
        (other.id, max(0.0, other.measured_step_s - other.generate_s - other.train_s))
        for other in others
        if run.schedule is not None
        and run.schedule.colocated
        and other.schedule is Schedule.SYNC
        and other.family == run.family
        and other.measured_step_s is not None
        and other.generate_s is not None
        and other.train_s is not None
    ]
    if own:
        middle = float(np.median([rest for _, rest in own]))
        factor = math.exp(END_SDS * OWN_REST_SD)
        return Band(middle / factor, middle, middle * factor), tuple(name for name, _ in own)
    return Band(*(rest_s(run, level) for level in Level)), ()


def _sum_of_parts(run: PublishedRun, others: Sequence[PublishedRun], alone: Band | None) -> PredictedRow | None:
    """Predict a step from its published parts, in sequence or side by side, and the rest."""
    generate_s, train_s, measured = run.generate_s, run.train_s, run.measured_step_s
    if generate_s is None or train_s is None or measured is None or run.schedule not in IN_PARTS:
        return None
    both = max(generate_s, train_s) if run.schedule is Schedule.ONE_STEP_OFF else generate_s + train_s
    rest, learned_from = _rest(run, others)
    return _row(
        run,
        "s/step",
        measured,
        Band(both + rest.low_s, both + rest.middle_s, both + rest.high_s),
        inputs=("generation", "training"),
        fitted_to=learned_from,
        alone=alone,
    )
