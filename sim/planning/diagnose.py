"""Diagnose a job from its log: where its GPU-seconds go, and the changes that gain most.

Theory of operation. Seconds are those of the log; what it lacks comes from the simulation of the calibrated job. No log
has the tail, engines without an answer while others still generate: its share of the generation is simulated. The best
of every kind of schedule is that of ``plan``; a single key is changed alone, with the slots that go with it. Both are
compared with the job in the same draws: the draws of two run files differ only where their unknowns do.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipelinerl.calibration.log import CalibratedLog, LoggedStep
from pipelinerl.calibration.measured import Measured
from pipelinerl.config.resolve import resolved_hardware
from pipelinerl.config.run import RunConfig, flat
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.transport import PUBLISHED
from pipelinerl.records.diagnosis_report import DiagnosisReport, Gain, GpuTime
from pipelinerl.records.plan_report import PlanReport
from pipelinerl.util.arrays import FloatArray
from sim.batch import busy_engines
from sim.planning.answer import plan
from sim.planning.certainty import DrawnCandidates, band_of, make_draws
from sim.planning.choose import TIE
from sim.planning.screen import Candidate, Screener, own_candidate, screen_all, with_values
from sim.planning.simulate import HowToPlan, Job, Runner, cycle
from sim.planning.space import ENGINE, GENERATION_BATCH, PUBLISH, RL_STEP, SPLIT, TRAIN_BATCH, SearchSpace, choice_of

MOST_GAINS = 3
"""Changes that are shown (count)."""
ALONE = {
    GENERATION_BATCH: "other slots per engine",
    ENGINE: "engines of another size",
    SPLIT: "another split",
    RL_STEP: "other optimizer steps per RL step, which changes the lag",
    PUBLISH: "other optimizer steps between publications",
    TRAIN_BATCH: "twice the answers per optimizer step, which changes what is learnt",
}
"""Keys that are changed alone, in words."""


def gpu_time(log: LoggedStep, simulated: LoggedStep, run: RunConfig, *, busy: float) -> list[GpuTime]:
    """Return the parts of a step's GPU-seconds; they add up to all of them.

    ``simulated`` is a step of the calibrated job, ``busy`` the share of the time in which its engines generate. Parts
    that last longer than the step together are all shortened alike.
    """
    step_s = log.step_s or 0.0

    def known(column: str) -> tuple[float, str]:
        logged = getattr(log, column)
        return (getattr(simulated, column) or 0.0, "simulation") if logged is None else (logged, "log")

    (training_s, trained), (sync_s, synced) = known("training_s"), known("sync_s")
    logprob_s = min(log.logprob_s or 0.0, training_s)
    sync = ("weight synchronization", sync_s, synced)
    trainer = [("training", training_s - logprob_s, trained), ("log-probabilities", logprob_s, "log"), sync]
    trainer += [("rewards and environments", log.reward_s or 0.0, "log")]
    if run.colocated:
        (generation_s, generated), simulated_s = known("generation_s"), simulated.generation_s or 0.0
        tail_s = generation_s * max(0.0, 1 - busy * (simulated.step_s or 0.0) / max(simulated_s, 1e-9))
        engines = [("generation", generation_s - tail_s, generated), ("tail", tail_s, "simulation")]
        switch, rest = log.switch_s or 0.0, f"{'phase switch and ' if log.switch_s is None else ''}unexplained"
        sides = [(run.cluster.accelerators, [*engines, *trainer, ("phase switch", switch, "log")], rest)]
    else:
        waits = ("trainer waits", log.wait_s or 0.0, "log")
        sides = [
            (run.generation_accelerators, [("generation", busy * step_s, "simulation"), sync], "engines idle"),
            (run.training_accelerators, [*trainer, waits], "trainer: unexplained"),
        ]
    gpu_s: dict[tuple[str, str], float] = {}
    for number, parts, rest in sides:
        all_s = sum(seconds for _, seconds, _ in parts)
        for name, seconds, source in [*parts, (rest, max(0.0, step_s - all_s), "rest")]:
            key = (name, source)
            gpu_s[key] = gpu_s.get(key, 0.0) + number * seconds * step_s / max(step_s, all_s)
    total = sum(gpu_s.values())
    return [GpuTime(part=name, gpu_s=one, share=one / total, source=source) for (name, source), one in gpu_s.items() if one]


def diagnose(job: CalibratedLog, how: HowToPlan | None = None) -> DiagnosisReport:
    """Return where a job's GPU-seconds go, and the changes within its limits that gain most.

    Raises:
        ConfigError: If the job does not fit by the memory model, or nothing keeps to its limits.
        RunFailedError: If no simulation ended.
    """
    how, run, log = how or HowToPlan(), job.run, job.log
    planned = plan(run, how, effects=False)
    if planned.own is None:
        raise ConfigError("the job does not fit its GPUs by the memory model: check --gpu, --model, cluster.tensor_parallel")
    best = _best_of_kinds(planned, run)
    gains = sorted([*(one for _, one in best), *_alone(run, Runner(how))], key=lambda one: -one.times)
    apart = [one for colocated, one in best if not colocated]
    limits = {"largest lag": planned.run.lag_limit, "mean lag": planned.run.mean_lag_limit}
    kept = [f"{name} at most {most:g}" for name, most in limits.items() if most is not None]
    return DiagnosisReport(
        num_steps=log.num_steps,
        num_left_out=log.num_left_out,
        step_s=log.mean.step_s or 0.0,
        accelerators=run.cluster.accelerators,
        gpu_time=gpu_time(log.mean, job.simulated, run, busy=busy_engines(run)),
        asynchronous=max(apart, key=lambda one: one.times, default=None),
        gains=[one for one in gains if one.times > 1 + TIE][:MOST_GAINS],
        notes=[*job.assumed, f"limits of all changes: {', '.join(kept) or 'none'}"],
    )


def _best_of_kinds(planned: PlanReport, run: RunConfig) -> list[tuple[bool, Gain]]:
    """Return the gain of the best of every kind of schedule that differs from the job, and whether it is colocated."""
    found = []
    for one in planned.families.values():
        if one is None or one.over_own is None or planned.own is None:
            continue
        changed = run.model_copy(update={"cluster": one.cluster, "scheduler": one.scheduler})
        colocated, sets = changed.colocated, _sets(run, changed)
        gain = Gain(
            change=f"{'' if colocated else 'a'}synchronous RL at its best: {one.label}",
            set=sets,
            times=one.tokens_per_s / planned.own.tokens_per_s,
            band=one.over_own,
            lag_mean=one.lag_mean,
        )
        found += [(colocated, gain)] if sets else []
    return found


def _sets(run: RunConfig, changed: RunConfig) -> list[str]:
    """Return the keys of the run file that make it another one, as ``--set`` has them."""
    before, after = (flat(one.model_dump(mode="json", exclude_none=True)) for one in (run, changed))
    differing = {key: value for key, value in after.items() if value != before.get(key)}
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in differing.items()]


def _alone(run: RunConfig, runner: Runner) -> Iterator[Gain]:
    """Yield the best change of each key alone that keeps to the limits, simulated."""
    space = SearchSpace.of(run)
    own, base_D = own_candidate(space), _drawn(run)
    changes = [("", run, own), *_of_axes(space), *_of_sync(run)]
    steps = min(space.plan.simulate_steps, run.optimizer_steps)
    jobs = [Job(one, min(run.optimizer_steps, max(steps, 2 * cycle(one)))) for _, _, one in changes]
    outcomes = {one.candidate.label: one for one in runner.run(jobs)}
    for words, changed, candidate in changes[1:]:
        outcome, before = outcomes.get(candidate.label), outcomes.get(own.label)
        if outcome is None or before is None or outcome.rejected(space.limits) is not None:
            continue
        screened = [Screener(one.config, space.answers).screen(one).tokens_per_s for one in (candidate, own)]
        times = outcome.tokens_per_s / before.tokens_per_s
        ratio_D = np.exp(_drawn(changed) - base_D) * times * screened[1] / screened[0]
        yield Gain(
            change=words, set=_sets(run, changed), times=times, band=band_of(ratio_D), lag_mean=outcome.lag_mean
        )


def _drawn(run: RunConfig) -> FloatArray:
    """Return the log of the throughput of a run file in every draw [D]."""
    space = SearchSpace.of(run)
    return DrawnCandidates.of(space, [own_candidate(space)], make_draws(run, Measured())).log_rates[:, 0]


def _of_axes(space: SearchSpace) -> Iterator[tuple[str, RunConfig, Candidate]]:
    """Yield the fastest value of every key within the limits, by the screening, with any slots."""
    own, screener = choice_of(space.config), Screener(space.config, space.answers)
    for axis, words in ALONE.items():
        values = [2 * own[axis.name]] if axis is TRAIN_BATCH else axis.values(space, own)
        others = [one for one in values if one != own[axis.name] or axis is GENERATION_BATCH]
        choices = [
            {**changed, GENERATION_BATCH.name: slots}
            for changed in ({**own, axis.name: value} for value in others)
            if changed[SPLIT.name] in SPLIT.values(space, changed)
            for slots in GENERATION_BATCH.values(space, changed)
        ]
        kept, _ = screen_all(space, screener, [one for one in choices if one != own])
        within = [one for one in kept if one.breaks(space.limits) is None]
        if axis.applies_to(space.config.scheduler.schedule) and within:
            best = max(within, key=lambda one: one.tokens_per_s).candidate
            tables = {"cluster": best.config.cluster, "scheduler": best.config.scheduler}
            yield words, space.config.model_copy(update=tables), best


def _of_sync(run: RunConfig) -> Iterator[tuple[str, RunConfig, Candidate]]:
    """Yield the fastest published method of weight synchronization, if it is faster than the log's."""
    if not run.hardware.by_name or run.hardware.weights is None:
        return
    methods = {one.name: with_values(run, hardware={"weight_sync": one.name, "weights": None}) for one in PUBLISHED}
    seconds = {name: resolved_hardware(one).weights.publish_s for name, one in methods.items()}
    name = min(seconds, key=lambda one: seconds[one])
    if seconds[name] < run.hardware.weights.publish_s:
        changed = methods[name]
        yield f"weight synchronization by {name}", changed, own_candidate(SearchSpace.of(changed))
