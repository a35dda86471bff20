"""Predict published runs from what was published about them and about other runs of the same system.

Theory. Three numbers about a system are uncertain: a factor g on its times of generation, a factor t on its times of
training, and the mean answer m where it is not published. Before any measurement each is log-normal around the hardware
model's central value. Measurements of the *other* rows of a family sharpen that (Bayes' rule on a grid); the row itself
is never among them. Simulations on the grid say what each row's step would last; the prediction is the median over what
is then likely, and its band the 10th and 90th percentile. A row without a family is predicted from the hardware model
alone.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from importlib import resources
from typing import Any

import numpy as np

from pipelinerl.errors import ConfigError, PipelineRLError
from pipelinerl.hardware.coefficients import Level
from pipelinerl.theory.paper import staleness_applied_compute
from sim.parallel import run_all
from sim.validation.inference import Band, Table, seconds_band, simulated_table
from sim.validation.reconstruct import ReconstructedRun, as_subject, measured_seconds, overhead_s
from sim.validation.records import Mode, PublishedRun, read_published_runs

ROUNDING = 0.005
"""Logs of two measurements nearer than this, of rows that agree in all else, are one measurement, rounded."""
SAME = 0.05
"""Logs of two measurements nearer than this say nothing about which is faster."""


Job = tuple[ReconstructedRun, bool]
"""A row to simulate, and whether its training lasts the published seconds."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """One row, predicted beside measured."""

    id: str
    family: str
    mode: str
    quantity: str
    """What is predicted: ``s/step``, ``tokens/s``, ``staleness`` or ``trainer idle``."""
    measured: float
    predicted: float
    low: float
    high: float
    inputs: tuple[str, ...]
    """Published numbers of this row that went in, besides cluster, batch and lengths."""
    fitted_to: tuple[str, ...]
    """Other rows whose measurements were used."""
    assumed: tuple[str, ...] = ()
    alone: float | None = None
    """What the hardware model predicts without any other row; None where that is no seconds or no model is asked."""

    @property
    def simulated(self) -> bool:
        """Whether a simulation predicts it, and not a sum of its own parts or a closed form."""
        return self.quantity in ("s/step", "tokens/s") and "generation" not in self.inputs

    @property
    def error(self) -> float:
        """Relative error; absolute for staleness."""
        difference = self.predicted - self.measured
        return difference if self.quantity == "staleness" else difference / self.measured


@dataclass(frozen=True, slots=True)
class Unusable:
    """A row that nothing can be predicted of, and why."""

    id: str
    reason: str


def validate(
    runs: Sequence[PublishedRun],
    *,
    others: Sequence[PublishedRun] = (),
    workers: int | None = None,
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> list[Prediction | Unusable]:
    """Predict every run from its published inputs and from the other rows of its family.

    Args:
        runs: The rows to predict.
        others: Further rows to learn from; rows of the same id count once.
        workers: Processes (count). None: one per core.
        on_progress: Told how many of how many rows have been simulated.

    Returns:
        One entry per row, in order.
    """
    known, jobs, reasons = _jobs(runs, others)
    tables: dict[tuple[str, bool], Table] = {}
    results = run_all(_table_job, jobs, workers=workers) if workers != 1 else (_table_job(job) for job in jobs)
    with closing(results):
        for done, table in enumerate(results, start=1):
            if isinstance(table, Unusable):
                reasons[table.id] = table.reason
            else:
                tables[table.subject.run.id, table.training_given] = table
            on_progress(done, len(jobs))
    return [_predicted(run, known, tables, reasons) for run in runs]


def _jobs(
    runs: Sequence[PublishedRun], others: Sequence[PublishedRun]
) -> tuple[list[PublishedRun], list[Job], dict[str, str]]:
    """Return all rows, what to simulate, and why some rows cannot be."""
    ids = {run.id for run in runs}
    known = [*runs, *(run for run in others if run.id not in ids)]
    families: dict[tuple[str, str, str], list[PublishedRun]] = {}
    for run in known:
        families.setdefault(run.family, []).append(run)
    wanted = {run.family for run in runs}
    subjects: dict[str, ReconstructedRun] = {}
    reasons: dict[str, str] = {}
    for run in known:
        if run.family in wanted and _staleness(run) is None and _idle_share(run) is None:
            try:
                subjects[run.id] = as_subject(run, families[run.family])
            except ConfigError as error:
                reasons[run.id] = str(error)
    jobs: list[Job] = [(subject, False) for subject in subjects.values()]
    jobs += [(subject, True) for subject in subjects.values() if _training_given(subject.run) and subject.run.id in ids]
    return known, jobs, reasons


def report(predictions: Sequence[Prediction | Unusable]) -> dict[str, Any]:
    """Return the content of validation.json: every row, and how far off they are together.

    Returns:
        ``rows`` with ``error`` (relative; absolute for staleness), ``unusable`` with reasons, ``pairs`` of one family
        that were measured more than 5 % apart with whether they are predicted in the same order, and ``summary``:
        median (of all, of those simulated, of the hardware model alone) and 90th percentile of the size of the relative
        errors, share within 30 %, share of pairs in order.
    """
    rows = [one for one in predictions if isinstance(one, Prediction)]
    relative = sorted(abs(one.error) for one in rows if one.quantity != "staleness")
    simulated = [abs(one.error) for one in rows if one.simulated]
    alone = [abs(one.alone / one.measured - 1) for one in rows if one.alone is not None]
    absolute = [abs(one.error) for one in rows if one.quantity == "staleness"]
    pairs = [
        (one.id, other.id, (one.predicted < other.predicted) is (one.measured < other.measured))
        for one, other in itertools.combinations(rows, 2)
        if one.family == other.family
        and one.quantity == other.quantity
        and abs(math.log(one.measured / other.measured)) > SAME
    ]
    return {
        "rows": [{**asdict(one), "error": one.error} for one in rows],
        "unusable": [asdict(one) for one in predictions if isinstance(one, Unusable)],
        "pairs": [{"rows": [one, other], "in_order": right} for one, other, right in pairs],
        "summary": {
            "rows": len(rows),
            "median_error": float(np.median(relative)) if relative else None,
            "median_error_simulated": float(np.median(simulated)) if simulated else None,
            "median_error_alone": float(np.median(alone)) if alone else None,
            "p90_error": float(np.quantile(relative, 0.9)) if relative else None,
            "within_30_percent": sum(one <= 0.3 for one in relative) / len(relative) if relative else None,
            "largest_staleness_error": max(absolute) if absolute else None,
            "pairs": len(pairs),
            "pairs_in_order": sum(right for _, _, right in pairs) / len(pairs) if pairs else None,
        },
    }


def shipped_runs() -> list[PublishedRun]:
    """Return the published runs that come with the simulator (``published_runs/README.md`` says from where)."""
    with resources.as_file(resources.files("sim.validation") / "published_runs" / "runs.csv") as path:
        return read_published_runs(path)


def _predicted(
    run: PublishedRun,
    known: Sequence[PublishedRun],
    tables: Mapping[tuple[str, bool], Table],
    reasons: Mapping[str, str],
) -> Prediction | Unusable:
    """Return the prediction of one row, by the first way that its published numbers allow."""
    others = [other for other in known if not _same_run(other, run)]
    closed = _staleness(run) or _idle_share(run) or _sum_of_parts(run, others)
    if closed is not None:
        return closed
    table = tables.get((run.id, _training_given(run)))
    if table is None:
        return Unusable(run.id, reasons[run.id])
    if measured_seconds(run) is None:
        return Unusable(run.id, "neither seconds per step nor hours and steps nor tokens/s are published")
    references = [
        tables[other.id, False]
        for other in others
        if other.family == run.family and (other.id, False) in tables and measured_seconds(other) is not None
    ]
    alike = [one for one in references if one.subject.scale_is_known is table.subject.scale_is_known]
    if not alike and run.gpus is not None and not table.subject.scale_is_known:
        subject = table.subject  # hours alone: their steps stand for seconds, as nothing else is there
        assumed = (*subject.assumed, "no time outside the steps")
        table = replace(table, subject=replace(subject, scale_is_known=True, assumed=assumed))
        alike = [one for one in references if one.subject.scale_is_known]
    references = alike
    inputs = tables[run.id, False] if table.training_given else None
    switch, _ = _switch(run, others)
    return _from_simulations(table, references, switch_s=switch.middle_s, inputs=inputs)


def _from_simulations(
    table: Table, references: Sequence[Table], *, switch_s: float, inputs: Table | None
) -> Prediction | Unusable:
    subject, run = table.subject, table.subject.run
    if not subject.scale_is_known and not references:
        return Unusable(run.id, "the cluster's size is not published, and no other row of its system to compare with")
    band = seconds_band(table, references, switch_s=switch_s, inputs=inputs)
    measured_s = measured_seconds(run)
    assert measured_s is not None
    quantity, measured, low, middle, high = "s/step", measured_s, *band
    alone = seconds_band(table, [], switch_s=switch_s, inputs=inputs).middle_s if subject.scale_is_known else None
    if run.measured_step_s is None:  # tokens/s were measured, so tokens/s are reported
        assert run.tokens_per_s is not None
        quantity, measured = "tokens/s", run.tokens_per_s
        high, middle, low = (measured * measured_s / seconds for seconds in band)
        alone = None if alone is None else measured * measured_s / alone
    return Prediction(
        id=run.id,
        family=_family_name(run),
        mode=subject.mode.value,
        quantity=quantity,
        measured=measured,
        predicted=middle,
        low=low,
        high=high,
        inputs=("training",) if table.training_given else (),
        fitted_to=tuple(reference.subject.run.id for reference in references),
        assumed=subject.assumed,
        alone=alone,
    )


def _training_given(run: PublishedRun) -> bool:
    return run.train_s is not None and run.schedule is not Mode.SYNC


def _same_run(one: PublishedRun, other: PublishedRun) -> bool:
    """Return whether two rows report one and the same measurement."""
    if one.id == other.id:
        return True
    counts = ((one.gpus, other.gpus), (one.gpus_gen, other.gpus_gen), (one.gpus_train, other.gpus_train))
    conflict = any(mine is not None and theirs is not None and mine != theirs for mine, theirs in counts)
    asked = [(row.family, row.schedule, row.staleness_rl_steps) for row in (one, other)]
    seconds, theirs_s = measured_seconds(one), measured_seconds(other)
    if conflict or asked[0] != asked[1] or seconds is None or theirs_s is None:
        return False
    return abs(math.log(seconds / theirs_s)) < ROUNDING


def _staleness(run: PublishedRun) -> Prediction | None:
    """Predict a published mean staleness from the published C, B, q, rho and tail, in closed form."""
    names = ("C", "B", "q", "rho", "Mtail")
    numbers = [run.number_after(name) for name in (*names, "measured")]
    given = [number for number in numbers if number is not None]
    if len(given) < len(numbers):
        return None
    in_flight, batch, queue, ratio, tail, measured = given
    predicted = staleness_applied_compute(
        in_flight=in_flight, train_batch_size=round(batch), rate_ratio=ratio, queue_batches=queue, tailness=tail
    ).total
    return Prediction(
        run.id, _family_name(run), Mode.ASYNC.value, "staleness", measured, predicted, predicted, predicted, names, ()
    )


def _idle_share(run: PublishedRun) -> Prediction | None:
    """Predict the share of time in which a trainer waits from both sides' published samples per second."""
    trains = re.search(r"trainer (\d+\.?\d*) samp/s", run.note)
    makes = re.search(r"generator (\d+\.?\d*)(?:-(\d+\.?\d*))? samp/s", run.note)
    idle = re.search(r"trainer idle ~?(\d+)\s?%", run.note)
    if not (trains and makes and idle):
        return None
    low, high = (float(one) for one in (makes[1], makes[2] or makes[1]))
    share_low, share_high = (max(0.0, 1 - rate / float(trains[1])) for rate in (high, low))
    middle = (share_low + share_high) / 2
    inputs = ("samples/s of trainer and generator",)
    measured = int(idle[1]) / 100
    if not measured or not float(trains[1]):
        return None  # of nothing there is no relative error
    return Prediction(
        run.id, _family_name(run), Mode.ASYNC.value, "trainer idle", measured, middle, share_low, share_high, inputs, ()
    )


def _switch(run: PublishedRun, others: Sequence[PublishedRun]) -> tuple[Band, tuple[str, ...]]:
    """Return what a colocated RL step lasts beyond generation and training, and the rows it was learned from.

    Offloading, resharding and publishing the weights, rewards, the data's way: nobody publishes it by itself. Rows of
    the same family tell most; without any, those of all systems; without these, the hardware model.
    """
    rests = [
        (other, max(0.0, other.measured_step_s - other.generate_s - other.train_s))
        for other in others
        if other.schedule is Mode.SYNC
        and other.measured_step_s is not None
        and other.generate_s is not None
        and other.train_s is not None
    ]
    own = [(other, rest_s) for other, rest_s in rests if other.family == run.family]
    if rests:
        seconds = [rest_s for _, rest_s in own or rests]
        names = tuple(other.id for other, _ in own or rests)
        return Band(min(seconds), float(np.median(seconds)), max(seconds)), names
    return _derived_rest(run, colocated=True), ()


def _derived_rest(run: PublishedRun, *, colocated: bool) -> Band:
    low_s, middle_s, high_s = (overhead_s(run, level, colocated=colocated) for level in Level)
    return Band(low_s, middle_s, high_s)


def _sum_of_parts(run: PublishedRun, others: Sequence[PublishedRun]) -> Prediction | None:
    """Predict a step from its published parts: one after the other, or side by side, and what no part shows."""
    generate_s, train_s, measured = run.generate_s, run.train_s, run.measured_step_s
    if generate_s is None or train_s is None or measured is None or run.schedule in (Mode.ASYNC, Mode.PARTIAL):
        return None
    both = max(generate_s, train_s) if run.schedule is Mode.ONE_STEP_OFF else generate_s + train_s
    rest, learned_from = (
        _switch(run, others) if run.schedule is Mode.SYNC else (_derived_rest(run, colocated=False), ())
    )
    return Prediction(
        id=run.id,
        family=_family_name(run),
        mode=str(run.schedule),
        quantity="s/step",
        measured=measured,
        predicted=both + rest.middle_s,
        low=both + rest.low_s,
        high=both + rest.high_s,
        inputs=("generation", "training"),
        fitted_to=learned_from,
    )


def _table_job(job: Job) -> Table | Unusable:
    """Simulate all nodes of a row."""
    subject, training_given = job
    try:
        return simulated_table(subject, training_given=training_given)
    except PipelineRLError as error:
        return Unusable(subject.run.id, str(error))


def _family_name(run: PublishedRun) -> str:
    return ", ".join(one for one in run.family if one)
