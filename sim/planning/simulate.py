"""Simulations of candidates, in parallel, each extended to the whole run."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from types import FrameType

from pipelinerl.config.engine import EngineConfig
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import PipelineRLError, RunFailedError
from pipelinerl.records.plan_report import PlanReport
from pipelinerl.records.reports import Bottleneck, steady_part
from pipelinerl.records.step_ledger import Admission, Step, find_bottleneck
from pipelinerl.rl.drift import modelled_ess
from sim.parallel import on_interrupt, run_all, run_all_on_ray
from sim.planning.screen import Candidate, Rejected
from sim.planning.space import Limits, Reason
from sim.run import simulate_steps

LOOK_EVERY = 32
"""Optimizer steps between checks whether a simulation is steady, the first after twice as many (count)."""
STEADY_RATE = 0.005
"""Relative difference in tokens/s between the halves of the steady part that counts for nothing."""
STEADY_LAG = 0.02
"""The same in mean lag (relative), or ``STEADY_LAG_STEPS`` if that is more."""
STEADY_LAG_STEPS = 0.1
"""The same of a small lag (optimizer steps)."""

OnProgress = Callable[[str, int, int], None]
"""Called with the stage, the number done, and the number in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HowToPlan:
    """Options of a plan besides its question."""

    out: Path | None = None
    """Folder of plan.json and recommended.toml; of several cases a folder each."""
    workers: int | None = None
    """Processes (count). None: one per core."""
    ray_address: str | None = None
    """Simulate on this Ray cluster instead."""
    on_progress: OnProgress = lambda *_: None
    measured: Sequence[Path] = ()
    """Measurements to merge into the run file (``pipelinerl.calibration.measured``)."""
    run_file: tuple[str, ...] = ("RUN.toml",)
    """The run file and its options, as words of the commands that measure."""
    against: tuple[str, PlanReport] | None = None
    """Another plan to compare with, and its name."""
    made: str | None = None
    """Date, version and command of the call."""


@dataclass(frozen=True, slots=True)
class Job:
    """One simulation."""

    candidate: Candidate
    steps: int
    """Optimizer steps to simulate, at most (count)."""

    @property
    def config(self) -> RunConfig:
        """The run to simulate."""
        config = self.candidate.config
        changes: dict[str, object] = {"optimizer_steps": self.steps}
        if config.speculation is not None and self.steps < config.optimizer_steps:
            changes["engine"] = EngineConfig(speculation=config.speculation.averaged(config.optimizer_steps))
        return config.model_copy(update=changes)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A candidate's whole run, extrapolated from its simulation."""

    candidate: Candidate
    tokens_per_s: float
    """Trained tokens per second over the whole run."""
    step_s: float
    """Seconds of an optimizer step of the steady state."""
    seconds: float
    """Seconds of the whole run."""
    lag_mean: float
    """Mean lag of a token of the steady state (optimizer steps)."""
    lag_max: int
    """Largest lag of any token (optimizer steps)."""
    training: float
    """Share of the steady state in which the trainer works."""
    publishing: float
    """Share in which it publishes."""
    waiting: float
    """Share in which it does neither."""
    bottleneck: Bottleneck
    """The side that limits the throughput of the steady state."""
    ess: float | None = None
    """Effective sample size of the lags of the steady state, by the drift model."""

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of the whole run."""
        return self.candidate.gpu_hours(self.seconds)

    def breaks(self, limits: Limits) -> Reason | None:
        """Return the first limit that it breaks, if any, but for the largest lag, at the price of its GPU-hours."""
        return limits.at(self.candidate.rented).broken(self.lag_mean, self.gpu_hours, ess=self.ess)

    def rejected(self, limits: Limits) -> Rejected | None:
        """Return the first limit that it breaks, and the value that it would keep to; None: it keeps to all."""
        if (reason := self.breaks(limits)) is not None:
            values = limits.at(self.candidate.rented).values(self.lag_mean, self.gpu_hours)
            return Rejected(self.candidate.choice, reason, values[reason])
        if limits.lag is not None and self.lag_max > limits.lag:
            return Rejected(self.candidate.choice, Reason.LAG, self.lag_max)
        return None


class Runner:
    """Simulates jobs in parallel, each run once however many candidates make it; remembers whether it was stopped."""

    def __init__(self, how: HowToPlan) -> None:
        self._workers, self._ray_address, self.on_progress = how.workers, how.ray_address, how.on_progress
        self._done: dict[str, Outcome] = {}  # by the run simulated, as text
        self.failures: list[str] = []
        self.interrupted = False
        self._simulating = False

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Have Ctrl-C end the simulations and let the rest go on, where this thread may; a second one ends all."""

        def press(_signal: int, _frame: FrameType | None) -> None:
            if self._simulating or self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True

        with on_interrupt(press):
            yield

    def run(self, jobs: Sequence[Job], *, before: int = 0, total: int | None = None) -> list[Outcome]:
        """Return the outcomes of the simulations that ended, by label.

        For ``on_progress``, ``before`` of ``total`` simulations have ended already (counts); total None: these jobs.
        """
        if self.interrupted or not jobs:
            return []
        runs = [job.config.model_dump_json() for job in jobs]
        # Those with the most in progress take longest: they go first.
        new = {run: job for run, job in zip(runs, jobs, strict=True) if run not in self._done}
        in_order = sorted(new.values(), key=lambda job: -job.candidate.config.num_slots)
        run_of = {job.candidate.label: run for run, job in new.items()}
        known = before + len(jobs) - len(new)
        try:
            self._simulating = True
            self.on_progress("simulations", known, total or len(jobs))
            with closing(self._results(in_order)) as results:
                for done, result in enumerate(results, known + 1):
                    if isinstance(result, str):
                        self.failures.append(result)
                    else:
                        self._done[run_of[result.candidate.label]] = result
                    self.on_progress("simulations", done, total or len(jobs))
        except RunFailedError as error:
            self.failures.append(str(error))
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            self._simulating = False
        ended = [(job, self._done[run]) for run, job in zip(runs, jobs, strict=True) if run in self._done]
        outcomes = [replace(one, candidate=job.candidate) for job, one in ended]
        return sorted(outcomes, key=lambda one: one.candidate.label)

    def _results(self, jobs: Sequence[Job]) -> Generator[Outcome | str, None, None]:
        if self._ray_address is not None:
            return run_all_on_ray(simulate_job, jobs, address=self._ray_address)
        return run_all(simulate_job, jobs, workers=self._workers)


def simulate_job(job: Job) -> Outcome | str:
    """Simulate one candidate and extend its steady state to the whole run; return a failure as text.

    A simulation ends when it is steady, unless it is of the whole run, or answers grow and never are.
    """
    config, unit = job.candidate.config, cycle(job.candidate)
    to_the_end = job.steps == config.optimizer_steps or config.workload.length.growth != 1.0
    try:
        return extended(job, simulate_steps(job.config, enough=lambda rows: not to_the_end and is_steady(rows, unit)))
    except PipelineRLError as error:
        return f"{job.candidate.label}: {error}"


def cycle(candidate: Candidate) -> int:
    """Return the optimizer steps after which a run repeats itself: of an RL step, or between publications (count)."""
    scheduler = candidate.config.scheduler
    return scheduler.optimizer_steps_per_rl_step if candidate.schedule.has_rl_steps else scheduler.publish_every


def is_steady(rows: Sequence[Step], unit: int) -> bool:
    """Return whether the steps that stand for the rest have the same tokens/s and mean lag in both halves.

    A run repeats itself after ``unit`` steps. In ten of the candidates of ``examples/plan_qwen7b_128_h100.toml`` this
    ends the simulation after 113 steps of 200 on average. Against 500 steps tokens/s are then off by 0.3 % (root mean
    square), at most 0.7 %, and the mean lag by at most 0.3 steps; after 200 steps by 0.2 % and 0.1 steps.
    """
    if len(rows) % LOOK_EVERY or len(rows) < 2 * LOOK_EVERY:
        return False
    start, end = steady_part(len(rows), unit)
    middle = start + (end - start) // 2 // unit * unit
    if middle == start:
        return False
    (rate, lag), (later_rate, later_lag) = _speed_and_lag(rows, start, middle), _speed_and_lag(rows, middle, end)
    same_lag = max(STEADY_LAG_STEPS, STEADY_LAG * lag)
    return abs(later_rate / rate - 1) <= STEADY_RATE and abs(later_lag - lag) <= same_lag


def _speed_and_lag(rows: Sequence[Step], start: int, end: int) -> tuple[float, float]:
    """Return tokens per second and mean lag of rows ``start`` to before ``end``; 0 < start < end."""
    window = rows[start:end]
    tokens = sum(row.tokens for row in window)
    lag = sum(row.lag_mean * row.tokens for row in window) / tokens
    return tokens / (rows[end - 1].time_s - rows[start - 1].time_s), lag


def extended(job: Job, rows: Sequence[Step]) -> Outcome:
    """Return the outcome of a whole run from the rows of its first optimizer steps."""
    config = job.candidate.config
    unit = min(cycle(job.candidate), len(rows))
    start, end = steady_part(len(rows), unit)
    window = rows[start:end]

    def total(name: str) -> float:
        return float(sum(getattr(row, name) for row in window))

    start_s = rows[start - 1].time_s if start else 0.0
    window_s = rows[end - 1].time_s - start_s
    step_s, tokens = window_s / len(window), total("tokens")
    known = len(rows) if len(rows) >= config.optimizer_steps else end  # of a whole run, a broken RL step at its end too
    rest = config.optimizer_steps - known
    seconds = rows[known - 1].time_s + rest * step_s
    return Outcome(
        job.candidate,
        tokens_per_s=(sum(row.tokens for row in rows[:known]) + rest * tokens / len(window)) / seconds,
        step_s=step_s,
        seconds=seconds,
        lag_mean=sum(row.lag_mean * row.tokens for row in window) / tokens,
        lag_max=max(row.lag_max for row in rows),
        training=total("train_s") / window_s,
        publishing=total("publish_s") / window_s,
        waiting=total("wait_s") / window_s,
        bottleneck=find_bottleneck(
            window,
            colocated=config.colocated,
            duration_s=window_s,
            training_s=total("train_s"),
            waiting_s=total("wait_s"),
            admission=Admission.of(config),
            scoring=total("scoring") / len(window),
            in_use=total("in_use") / len(window),
            scorers_s=config.hardware.latency.rewards_s(int(total("samples"))),
            prefill=total("prefill_s") / max(1e-300, total("prefill_s") + total("decode_s")),
        ),
        ess=_modelled_ess(config, window),
    )


def _modelled_ess(config: RunConfig, window: Sequence[Step]) -> float | None:
    if config.drift is None:
        return None
    by_lag = [sum(tokens) for tokens in zip_longest(*(row.tokens_by_lag for row in window), fillvalue=0)]
    return modelled_ess(config.drift, by_lag).mean
