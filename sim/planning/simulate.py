"""Simulations of candidates, in parallel, each extended to the whole run."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import zip_longest

from pipelinerl.config.run import RunConfig
from pipelinerl.errors import PipelineRLError, RunFailedError
from pipelinerl.hardware.coefficients import Level
from pipelinerl.records.bottleneck import Admission, Bottleneck, find_bottleneck
from pipelinerl.records.step_ledger import Step
from pipelinerl.rl.drift import modelled_ess
from sim.parallel import run_all, run_all_on_ray
from sim.planning.candidates import Candidate
from sim.run import simulate_steps

OnProgress = Callable[[str, int, int], None]
"""Called with the stage, the number done, and the number in all."""


@dataclass(frozen=True, slots=True)
class Job:
    """One simulation."""

    candidate: Candidate
    level: Level
    steps: int
    """Optimizer steps to simulate (count)."""

    @property
    def config(self) -> RunConfig:
        """The run to simulate."""
        config = self.candidate.config
        hardware = config.hardware.model_copy(update={"level": self.level} if config.hardware.by_name else {})
        return config.model_copy(update={"optimizer_steps": self.steps, "hardware": hardware})


@dataclass(frozen=True, slots=True)
class Outcome:
    """The whole run of a candidate, extended from its simulation."""

    candidate: Candidate
    level: Level
    tokens_per_s: float
    """Trained tokens per second over the whole run."""
    step_s: float
    """One optimizer step of the steady state."""
    seconds: float
    """The whole run."""
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
    """Effective sample size that the run file's drift model gives the lags of the steady state."""

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of the whole run."""
        return self.candidate.gpu_hours(self.seconds)


class Runner:
    """Simulates jobs in parallel; remembers whether it was stopped."""

    def __init__(self, *, workers: int | None, ray_address: str | None, on_progress: OnProgress) -> None:
        self._workers, self._ray_address, self._on_progress = workers, ray_address, on_progress
        self.failures: list[str] = []
        self.interrupted = False

    def run(self, what: str, jobs: Sequence[Job], *, before: int = 0, total: int | None = None) -> list[Outcome]:
        """Return the outcomes of the simulations that ended, by level and label.

        Args:
            what: The stage that ``on_progress`` is told.
            jobs: What to simulate.
            before: Simulations of this stage that have ended (count).
            total: Simulations of this stage in all. None: these.
        """
        if self.interrupted or not jobs:
            return []
        # Those with the most in progress take longest: they go first.
        jobs = sorted(jobs, key=lambda job: -job.candidate.config.num_engines * _slots(job))
        outcomes: dict[tuple[str, str], Outcome] = {}
        try:
            self._on_progress(what, before, total or len(jobs))
            with closing(self._results(jobs)) as results:
                for done, result in enumerate(results, before + 1):
                    if isinstance(result, str):
                        self.failures.append(result)
                    else:
                        outcomes[result.level.value, result.candidate.label] = result
                    self._on_progress(what, done, total or len(jobs))
        except RunFailedError as error:
            self.failures.append(str(error))
        except KeyboardInterrupt:
            self.interrupted = True
        return [outcomes[key] for key in sorted(outcomes)]

    def _results(self, jobs: Sequence[Job]) -> Generator[Outcome | str, None, None]:
        if self._ray_address is not None:
            return run_all_on_ray(simulate_job, jobs, address=self._ray_address)
        return run_all(simulate_job, jobs, workers=self._workers)


def _slots(job: Job) -> int:
    return job.candidate.config.scheduler.generation_batch_size


def simulate_job(job: Job) -> Outcome | str:
    """Simulate one candidate and extend its steady state to the whole run; return what failed, if anything, as text."""
    try:
        return extended(job, simulate_steps(job.config))
    except PipelineRLError as error:
        return f"{job.candidate.label}: {error}"


def cycle(candidate: Candidate) -> int:
    """Return the optimizer steps after which a run repeats itself: of an RL step, or between publications (count)."""
    scheduler = candidate.config.scheduler
    return scheduler.optimizer_steps_per_rl_step if candidate.schedule.has_rl_steps else scheduler.publish_every


def extended(job: Job, rows: Sequence[Step]) -> Outcome:
    """Return the outcome of a whole run from the rows of its first optimizer steps."""
    config = job.candidate.config
    unit = min(cycle(job.candidate), len(rows))
    end = len(rows) // unit * unit
    start = end // 2 // unit * unit
    window = rows[start:end]
    start_s = rows[start - 1].time_s if start else 0.0
    window_s = rows[end - 1].time_s - start_s
    step_s, tokens = window_s / len(window), sum(row.tokens for row in window)
    known = len(rows) if len(rows) >= config.optimizer_steps else end  # of a whole run, a broken RL step at its end too
    rest = config.optimizer_steps - known
    seconds = rows[known - 1].time_s + rest * step_s
    training_s, waiting_s = sum(row.train_s for row in window), sum(row.wait_s for row in window)
    return Outcome(
        job.candidate,
        job.level,
        tokens_per_s=(sum(row.tokens for row in rows[:known]) + rest * tokens / len(window)) / seconds,
        step_s=step_s,
        seconds=seconds,
        lag_mean=sum(row.lag_mean * row.tokens for row in window) / tokens,
        lag_max=max(row.lag_max for row in rows),
        training=training_s / window_s,
        publishing=sum(row.publish_s for row in window) / window_s,
        waiting=waiting_s / window_s,
        bottleneck=find_bottleneck(
            window,
            colocated=config.colocated,
            duration_s=window_s,
            training_s=training_s,
            waiting_s=waiting_s,
            admission=Admission.of(config),
            scoring=sum(row.scoring for row in window) / len(window),
        ),
        ess=_modelled_ess(config, window),
    )


def _modelled_ess(config: RunConfig, window: Sequence[Step]) -> float | None:
    if config.drift is None:
        return None
    by_lag = [sum(tokens) for tokens in zip_longest(*(row.tokens_by_lag for row in window), fillvalue=0)]
    return modelled_ess(config.drift, by_lag).mean
