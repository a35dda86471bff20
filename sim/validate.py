"""Predict published runs from what was published about them and about other runs of the same system.

Theory. Three numbers about a system are uncertain: a factor g on its times of generation, a factor t on its times of
training, and the mean answer m where it is not published. Before any measurement each is log-normal around the hardware
model's central value. Measurements of the *other* rows of a family sharpen that (Bayes' rule on a grid); the row itself
is never among them. Simulations on the grid say what each row's step would last; the prediction is the median over what
is then likely, and its band the 10th and 90th percentile. A row without a family is predicted from the hardware model
alone.
"""

from __future__ import annotations

import math
import multiprocessing
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib import resources
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelinerl.accounting import StepRow
from pipelinerl.analytic import staleness_applied_compute
from pipelinerl.coefficients import Level
from pipelinerl.errors import ConfigError
from pipelinerl.published import Mode, PublishedRun, read_published_runs
from sim.published import MEAN_OVER_LONGEST, Subject, as_run_config, as_subject, overhead_s
from sim.run import simulate

FloatArray = NDArray[np.float64]

GENERATION_SD = 0.35
"""Standard deviation of log g before measurements: the decode model's absolute scale is uncertain by 40 %."""
TRAINING_SD = 0.5
"""Standard deviation of log t before measurements: published training efficiencies range over a factor of 3."""
MEAN_SD = 0.8
"""Standard deviation of log m before measurements, where no mean is published."""
MEASUREMENT_SD = 0.15
"""Standard deviation of the log of a measurement about the model: run-to-run spread, and what the model leaves out."""
_RATIO_NODES = np.linspace(-1.4, 1.4, 5)
_MEAN_NODES = np.linspace(-2.0, 1.2, 5)
_FINE = 31
RL_STEPS = 7
"""RL steps of one simulation."""
WARM_UP = 3
"""Of these, left out of the time per step of asynchronous runs."""


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


class Steady(NamedTuple):
    """What a simulation says about one RL step."""

    step_s: float
    generate_s: float
    """Seconds in which the trainer waited for answers: of synchronous runs the time of generation."""
    train_s: float


@dataclass(frozen=True, slots=True)
class _Table:
    """Simulations of one row: logs of ``Steady`` by node of (log g - log t, or log g where training is given; log m)."""

    subject: Subject
    training_given: bool
    log_RMQ: FloatArray
    """Logs of step, generation and training seconds (Q) by node."""

    def at(self, ratio_P: FloatArray, mean_P: FloatArray, quantity: int) -> FloatArray:
        """Return the logs at points, linear in between the nodes."""
        nodes_R, nodes_M = _RATIO_NODES, self.mean_nodes
        table_RM = self.log_RMQ[:, :, quantity]
        r_P, fr_P = _cell(ratio_P, nodes_R)
        if len(nodes_M) == 1:
            return np.asarray(table_RM[r_P, 0] * (1 - fr_P) + table_RM[r_P + 1, 0] * fr_P)
        m_P, fm_P = _cell(mean_P, nodes_M)
        low_P = table_RM[r_P, m_P] * (1 - fr_P) + table_RM[r_P + 1, m_P] * fr_P
        high_P = table_RM[r_P, m_P + 1] * (1 - fr_P) + table_RM[r_P + 1, m_P + 1] * fr_P
        return np.asarray(low_P * (1 - fm_P) + high_P * fm_P)

    @property
    def mean_nodes(self) -> FloatArray:
        """Logs of factors on the mean answer."""
        return np.zeros(1) if self.subject.mean_is_known else _MEAN_NODES


def _cell(value_P: FloatArray, nodes: FloatArray) -> tuple[NDArray[np.int64], FloatArray]:
    """Return the cell of each value and the fraction of the way through it."""
    cell_P = np.clip(np.searchsorted(nodes, value_P) - 1, 0, len(nodes) - 2)
    return cell_P, (value_P - nodes[cell_P]) / (nodes[cell_P + 1] - nodes[cell_P])


class _Points(NamedTuple):
    """What may be true: log g, log t, log m at every point, and the log of its probability before measurements."""

    generation_P: FloatArray
    training_P: FloatArray
    mean_P: FloatArray
    log_prior_P: FloatArray


def _points(*, mean_is_known: bool) -> _Points:
    axes = [
        np.linspace(-3 * sd, 3 * sd, _FINE) if sd else np.zeros(1)
        for sd in (GENERATION_SD, TRAINING_SD, 0.0 if mean_is_known else MEAN_SD)
    ]
    g_P, t_P, m_P = (axis.ravel() for axis in np.meshgrid(*axes, indexing="ij"))
    log_prior_P = -0.5 * ((g_P / GENERATION_SD) ** 2 + (t_P / TRAINING_SD) ** 2 + (m_P / MEAN_SD) ** 2)
    return _Points(g_P, t_P, m_P, log_prior_P)


STEP, GENERATE, TRAIN = range(3)


def _log_seconds(table: _Table, points: _Points, quantity: int, switch_s: float) -> FloatArray:
    """Return the log of the seconds that a row's step, generation or training would last, at every point.

    ``switch_s`` is what a colocated step lasts beyond generation and training.
    """
    if table.training_given:
        log_P = table.at(points.generation_P, points.mean_P, quantity)
    else:
        log_P = table.at(points.generation_P - points.training_P, points.mean_P, quantity) + points.training_P
    if quantity == STEP and table.subject.colocated:
        return np.asarray(np.log(np.exp(log_P) + switch_s))
    return log_P


def _simulated(subject: Subject, *, ratio: float, log_mean: float, training_given: bool) -> Steady:
    """Simulate one node."""
    num_steps, first = (3, 1) if subject.mode is Mode.SYNC else (RL_STEPS, WARM_UP)
    if not training_given:
        subject = replace(subject, run=replace(subject.run, update_s=None))
    mean = min(subject.mean_tokens * math.exp(log_mean), 0.95 * subject.longest_tokens)
    config = as_run_config(subject, generation=math.exp(ratio), training=1.0, mean_tokens=mean, rl_steps=num_steps)
    rows: list[StepRow] = []
    simulate(config, on_step=rows.append)
    each = subject.optimizer_steps
    rows = rows[first * each - 1 :]
    num = (len(rows) - 1) / each
    waited_s = sum(row.wait_s for row in rows[1:]) / num
    return Steady(
        step_s=(rows[-1].time_s - rows[0].time_s) / num,
        generate_s=max(waited_s, 1e-3),
        train_s=sum(row.train_s for row in rows[1:]) / num,
    )


def _table_job(job: tuple[Subject, bool]) -> _Table:
    subject, training_given = job
    means = np.zeros(1) if subject.mean_is_known else _MEAN_NODES
    log_RMQ = np.array(
        [
            [
                [
                    math.log(seconds)
                    for seconds in _simulated(subject, ratio=r, log_mean=m, training_given=training_given)
                ]
                for m in means
            ]
            for r in _RATIO_NODES
        ]
    )
    return _Table(subject, training_given, log_RMQ)


def validate(
    runs: Sequence[PublishedRun],
    *,
    others: Sequence[PublishedRun] = (),
    workers: int | None = None,
    on_done: Callable[[], None] | None = None,
) -> list[Prediction | Unusable]:
    """Predict every run from its published inputs and from the other rows of its family.

    Args:
        runs: The rows to predict.
        others: Further rows to learn from; rows of the same id count once.
        workers: Processes (count). None: one per core.
        on_done: Called after each row that was simulated.

    Returns:
        One entry per row, in order.
    """
    ids = {run.id for run in runs}
    known = [*runs, *(run for run in others if run.id not in ids)]
    families: dict[tuple[str, str, str], list[PublishedRun]] = {}
    for run in known:
        families.setdefault(run.family, []).append(run)
    wanted = {run.family for run in runs if _needs_simulation(run)}
    subjects: dict[str, Subject] = {}
    reasons: dict[str, str] = {}
    for run in known:
        if run.family in wanted and _needs_simulation(run):
            try:
                subjects[run.id] = as_subject(run, families[run.family])
            except ConfigError as error:
                reasons[run.id] = str(error)
    jobs = [(subject, False) for subject in subjects.values()]
    jobs += [(subject, True) for subject in subjects.values() if _training_given(subject.run) and subject.run.id in ids]
    tables: dict[tuple[str, bool], _Table] = {}
    for table in _map(_table_job, jobs, workers):
        tables[table.subject.run.id, table.training_given] = table
        if on_done is not None:
            on_done()
    return [_predicted(run, known, tables, reasons) for run in runs]


def shipped_runs() -> list[PublishedRun]:
    """Return the published runs that come with the simulator (``sim/data/README.md`` says from where)."""
    with resources.as_file(resources.files("sim") / "data" / "published_runs.csv") as path:
        return read_published_runs(path)


def _predicted(
    run: PublishedRun,
    known: Sequence[PublishedRun],
    tables: Mapping[tuple[str, bool], _Table],
    reasons: Mapping[str, str],
) -> Prediction | Unusable:
    """Return the prediction of one row, by the first way that its published numbers allow."""
    others = [other for other in known if not _same_run(other, run)]
    closed = _staleness(run) or _idle_share(run) or _sum_of_parts(run, others)
    if closed is not None:
        return closed
    if _measured_step_s(run) is None:
        return Unusable(run.id, "no seconds per step, hours or tokens/s are published")
    table = tables.get((run.id, _training_given(run)))
    if table is None:
        return Unusable(run.id, reasons.get(run.id, "no schedule is named"))
    references = [
        tables[other.id, False]
        for other in others
        if other.family == run.family and (other.id, False) in tables and _measured_step_s(other) is not None
    ]
    scale = table.subject.scale_is_known
    return _from_simulations(
        table, [one for one in references if one.subject.scale_is_known is scale], _switch(run, others).middle_s
    )


def _from_simulations(table: _Table, references: Sequence[_Table], switch_s: float) -> Prediction | Unusable:
    subject, run = table.subject, table.subject.run
    if not subject.scale_is_known and not references:
        return Unusable(run.id, "the cluster's size is not published, and no other row of its system to compare with")
    points = _points(mean_is_known=all(one.subject.mean_is_known for one in (table, *references)))
    log_P = points.log_prior_P.copy()
    offset_P = np.zeros(len(log_P))
    if subject.scale_is_known:
        for reference in references:
            for quantity, seconds in _observed(reference.subject.run):
                residual_P = _log_seconds(reference, points, quantity, switch_s) - math.log(seconds)
                log_P -= 0.5 * (residual_P / MEASUREMENT_SD) ** 2
    else:  # tokens/s of clusters of one unknown size: only their ratios tell
        residual_KP = np.array([_log_step_per_token(one, points, switch_s) for one in references])
        offset_P = residual_KP.mean(axis=0)
        log_P -= 0.5 * (((residual_KP - offset_P) / MEASUREMENT_SD) ** 2).sum(axis=0)
    weight_P = np.exp(log_P - log_P.max())
    weight_P /= weight_P.sum()
    if subject.scale_is_known:
        value_P, measured, quantity = _log_seconds(table, points, STEP, switch_s), _measured_step_s(run), "s/step"
    else:
        value_P, measured, quantity = offset_P - _log_step_per_token(table, points, switch_s), 1.0, "tokens/s"
        value_P, measured = value_P + math.log(run.tok_s_total or 1.0), run.tok_s_total
    assert measured is not None
    middle = _median(value_P, weight_P)
    spread = math.hypot(
        math.sqrt(float((weight_P * (value_P - (weight_P * value_P).sum()) ** 2).sum())), MEASUREMENT_SD
    )
    return Prediction(
        id=run.id,
        family=_family_name(run),
        mode=subject.mode.value,
        quantity=quantity,
        measured=measured,
        predicted=math.exp(middle),
        low=math.exp(middle - 1.28 * spread),
        high=math.exp(middle + 1.28 * spread),
        inputs=("training",) if table.training_given else (),
        fitted_to=tuple(reference.subject.run.id for reference in references),
        assumed=subject.assumed,
    )


def _log_step_per_token(table: _Table, points: _Points, switch_s: float) -> FloatArray:
    """Return how much longer the simulated step is than sequences over measured tokens/s, in logs."""
    run = table.subject.run
    assert run.tok_s_total is not None
    return _log_seconds(table, points, STEP, switch_s) - math.log(table.subject.sequences / run.tok_s_total)


def _observed(run: PublishedRun) -> list[tuple[int, float]]:
    """Return what a row tells about others: its training seconds, and its generation seconds or else its step."""
    observed = [] if run.train_s is None else [(TRAIN, run.train_s)]
    if run.schedule is Mode.SYNC and run.generate_s is not None:
        return [*observed, (GENERATE, run.generate_s)]
    seconds = _measured_step_s(run)
    return observed if seconds is None else [*observed, (STEP, seconds)]


def _measured_step_s(run: PublishedRun) -> float | None:
    """Return seconds per RL step; where only tokens/s are published, those of its answers."""
    if run.measured_step_s is not None:
        return run.measured_step_s
    rate = run.tok_s_total
    if rate is None and run.tok_s_per_gpu is not None and run.gpus_total is not None:
        rate = run.tok_s_per_gpu * run.gpus_total
    if rate is None or run.sequences_per_step is None:
        return None
    mean = run.avg_len or MEAN_OVER_LONGEST * (run.longest_tokens or 0)
    return run.sequences_per_step * mean / rate if mean else None


def _needs_simulation(run: PublishedRun) -> bool:
    return run.schedule is not None and _staleness(run) is None and _idle_share(run) is None


def _training_given(run: PublishedRun) -> bool:
    return run.train_s is not None and run.schedule is not Mode.SYNC


def _same_run(one: PublishedRun, other: PublishedRun) -> bool:
    """Return whether two rows report one and the same measurement."""
    if one.id == other.id:
        return True
    same = (one.gpus_total, one.gpus_gen, one.step_s) == (other.gpus_total, other.gpus_gen, other.step_s)
    return same and one.step_s is not None


def _staleness(run: PublishedRun) -> Prediction | None:
    """Predict a published mean staleness from the published C, B, q, rho and tail, in closed form."""
    names = ("C", "B", "q", "rho", "Mtail")
    in_flight, batch, queue, ratio, tail = (run.number_after(name) for name in names)
    measured = run.number_after("measured")
    if None in (in_flight, batch, queue, ratio, tail, measured):
        return None
    assert in_flight and batch and queue and ratio and tail and measured
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
    return Prediction(
        run.id, _family_name(run), Mode.ASYNC.value, "trainer idle", measured, middle, share_low, share_high, inputs, ()
    )


class _Seconds(NamedTuple):
    """A duration with its band."""

    low_s: float
    middle_s: float
    high_s: float


def _switch(run: PublishedRun, others: Sequence[PublishedRun]) -> _Seconds:
    """Return what a colocated RL step lasts beyond generation and training, where others published all three.

    Offloading, resharding and publishing the weights, rewards, the data's way: nobody publishes it by itself. Rows of
    the same family tell most; without any, those of all systems; without these, the hardware model.
    """
    rests = {
        family: [
            max(0.0, other.measured_step_s - other.generate_s - other.train_s)
            for other in others
            if other.schedule is Mode.SYNC
            and other.family in family
            and other.measured_step_s is not None
            and other.generate_s is not None
            and other.train_s is not None
        ]
        for family in ((run.family,), tuple(other.family for other in others))
    }
    for seconds in rests.values():
        if seconds:
            return _Seconds(min(seconds), float(np.median(seconds)), max(seconds))
    return _Seconds(*(overhead_s(run, level, colocated=True, assumed=[]) for level in Level))


def _sum_of_parts(run: PublishedRun, others: Sequence[PublishedRun]) -> Prediction | None:
    """Predict a step from its published parts: one after the other, or side by side, and what no part shows."""
    generate_s, train_s, measured = run.generate_s, run.train_s, run.measured_step_s
    if generate_s is None or train_s is None or measured is None or run.schedule in (Mode.ASYNC, Mode.PARTIAL):
        return None
    if run.schedule is Mode.SYNC:
        both, rest = generate_s + train_s, _switch(run, others)
    else:
        both = max(generate_s, train_s)
        rest = _Seconds(*(overhead_s(run, level, colocated=False, assumed=[]) for level in Level))
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
        fitted_to=(),
    )


def _family_name(run: PublishedRun) -> str:
    return ", ".join(one for one in run.family if one)


def _median(value_P: FloatArray, weight_P: FloatArray) -> float:
    order_P = np.argsort(value_P)
    return float(value_P[order_P][np.searchsorted(np.cumsum(weight_P[order_P]), 0.5)])


def _map(
    function: Callable[[tuple[Subject, bool]], _Table], jobs: Sequence[tuple[Subject, bool]], workers: int | None
) -> Iterable[_Table]:
    """Yield the results of all jobs, in order, from parallel processes."""
    if workers == 1 or len(jobs) < 2:
        yield from map(function, jobs)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as executor:
        yield from executor.map(function, jobs)
