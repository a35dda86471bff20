"""Diagnose a job from its log: where its GPU-seconds go, and the changes that gain most.

Theory of operation. Seconds are those of the log; what it lacks comes from the simulation of the calibrated job. No log
has the tail, engines without an answer while others still generate: its share of the generation is simulated. ``plan``
finds the best candidate of every kind of schedule; its draws compare it with the job, and published pairs of runs count
as evidence. A change of a single key keeps the kind and takes the slots that go with it. No pairs of such changes are
published, so the same draws compare it without evidence. Draws of two run files differ only where their unknowns do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from pipelinerl.calibration.log import CalibratedLog, LoggedStep
from pipelinerl.config.resolve import resolved_hardware
from pipelinerl.config.run import RunConfig, flat
from pipelinerl.errors import ConfigError
from pipelinerl.records.plan_report import Band, DiagnosisReport, Gain, GpuTime, PlannedCandidate
from pipelinerl.util.arrays import FloatArray
from sim.planning.answer import searched
from sim.planning.certainty import DrawnCandidates, band_of, make_draws
from sim.planning.choose import TIE
from sim.planning.screen import Candidate, Screener, own_candidate, screen_all
from sim.planning.simulate import HowToPlan, Job, Outcome, Runner, cycle
from sim.planning.space import ENGINE, GENERATION_BATCH, PUBLISH, RL_STEP, SPLIT, TRAIN_BATCH, SearchSpace, choice_of
from sim.run import busy_engines

MOST_GAINS = 3
"""Changes that are shown (count)."""
ALONE = (GENERATION_BATCH, ENGINE, SPLIT, RL_STEP, PUBLISH, TRAIN_BATCH)
"""Keys that are changed alone."""
LEARNT = "other optimizer_steps_per_rl_step and train_batch_size change what is learnt, not only the speed"


def gpu_time(log: LoggedStep, simulated: LoggedStep, run: RunConfig, *, busy: float) -> list[GpuTime]:
    """Return the parts of a step's GPU-seconds; they add up to all of them.

    ``simulated`` is a step of the calibrated job, ``busy`` the share of the time in which its engines generate. Parts
    that the log lacks have the time that it leaves at most; logged ones longer than the step are shortened alike.
    """
    logged = log.model_dump(exclude_none=True)
    step_s = logged["step_s"]
    names = ("training_s", "sync_s", "generation_s" if run.colocated else "wait_s")
    lacking = {name: getattr(simulated, name) or 0.0 for name in names if name not in logged}
    left_s = max(0.0, step_s - sum(logged.get(name, 0.0) for name in (*names, "reward_s", "switch_s")))
    fitting = min(1.0, left_s / max(sum(lacking.values()), 1e-9))
    training_s, sync_s, other_s = (logged.get(name, fitting * lacking.get(name, 0.0)) for name in names)

    def source(name: str) -> str:
        return "log" if name in logged else "simulation"

    logprob_s, sync = min(log.logprob_s or 0.0, training_s), "weight synchronization"
    training = "training" if log.logprob_s is not None else "training, log-probabilities included"
    trainer = [
        (training, training_s - logprob_s, source("training_s")),
        ("log-probabilities", logprob_s, "log"),
        (sync, sync_s, source("sync_s")),
        ("rewards and environments", log.reward_s or 0.0, "log"),
    ]
    if run.colocated:
        tail_s = other_s * max(0.0, 1 - busy * (simulated.step_s or 0.0) / (simulated.generation_s or step_s))
        engines = [("generation", other_s - tail_s, source("generation_s")), ("tail", tail_s, "simulation")]
        rest = "phase switch and unexplained" if log.switch_s is None else "unexplained"
        parts = [*engines, *trainer, ("phase switch", log.switch_s or 0.0, "log")]
        sides = [(run.cluster.accelerators, parts, rest)]
    else:
        weights = resolved_hardware(run).weights
        pause_s = sync_s * min(1.0, weights.pause_s / (weights.publish_s or 1.0))
        engines = [("generation", busy * step_s, "simulation"), (sync, pause_s, source("sync_s"))]
        waits = [*trainer, ("trainer waits", other_s, source("wait_s"))]
        sides = [
            (run.generation_accelerators, engines, "engines idle"),
            (run.training_accelerators, waits, "trainer: unexplained"),
        ]
    gpu_s: dict[tuple[str, str], float] = {}
    for number, parts, rest in sides:
        all_s = sum(seconds for _, seconds, _ in parts)
        for name, seconds, origin in [*parts, (rest, max(0.0, step_s - all_s), "rest")]:
            before = gpu_s.get((name, origin), 0.0)
            gpu_s[name, origin] = before + number * seconds * step_s / max(step_s, all_s)
    total = sum(gpu_s.values())
    return [
        GpuTime(part=name, gpu_s=one, share=one / total, source=origin) for (name, origin), one in gpu_s.items() if one
    ]


def diagnose(job: CalibratedLog, how: HowToPlan | None = None) -> DiagnosisReport:
    """Return where a job's GPU-seconds go, and the changes within its limits that gain most.

    Raises:
        ConfigError: If the job does not fit by the memory model, or nothing keeps to its limits.
        RunFailedError: If no simulation ended.
    """
    how, run, log = how or HowToPlan(), job.run, job.log
    planned, _ = searched(run, how, effects=False)
    if (own := planned.own) is None:
        raise ConfigError("the job does not fit by the memory model: check GPU, model and cluster.tensor_parallel")
    kinds = [_of_plan(one, own, run) for one in planned.families.values() if one is not None]
    kinds = [(colocated, one) for colocated, one in kinds if one.set]
    gains = sorted([*(one for _, one in kinds), *_alone(run, Runner(how))], key=lambda one: -one.times)
    limits = {"largest lag": planned.run.lag_limit, "mean lag": planned.run.mean_lag_limit}
    kept = ", ".join(f"{name} {most:g} at most" for name, most in limits.items() if most is not None)
    return DiagnosisReport(
        num_steps=log.num_steps,
        num_left_out=log.num_left_out,
        step_s=log.mean.step_s or 0.0,
        accelerators=run.cluster.accelerators,
        gpu_time=gpu_time(log.mean, job.simulated, run, busy=busy_engines(run)),
        asynchronous=max((one for colocated, one in kinds if not colocated), key=lambda one: one.times, default=None),
        gains=[one for one in gains if one.times > 1 + TIE][:MOST_GAINS],
        notes=[*job.assumed, f"limits of every change: {kept or 'none'}", LEARNT],
    )


def _of_plan(one: PlannedCandidate, own: PlannedCandidate, run: RunConfig) -> tuple[bool, Gain]:
    """Return whether the best of a kind is colocated, and its gain; its keys are empty if it is the job itself."""
    changed = run.model_copy(update={"cluster": one.cluster, "scheduler": one.scheduler})
    words = f"{'' if changed.colocated else 'a'}synchronous RL at its best: {one.label}"
    band = one.over_own or Band(low=0.0, high=0.0)
    times = one.tokens_per_s / own.tokens_per_s
    return changed.colocated, _gain(words, run, changed, times=times, band=band, lag_mean=one.lag_mean)


def _gain(words: str, run: RunConfig, changed: RunConfig, *, times: float, band: Band, lag_mean: float) -> Gain:
    before, after = (flat(one.model_dump(mode="json", exclude_none=True)) for one in (run, changed))
    values = {key: value for key, value in after.items() if value != before.get(key)}
    sets = [f"{key}={_shown(value)}" for key, value in values.items()]
    return Gain(change=words, set=sets, times=times, band=band, lag_mean=lag_mean)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _alone(run: RunConfig, runner: Runner) -> Iterator[Gain]:
    """Yield the best change of each key alone that keeps to the limits, simulated."""
    space = SearchSpace.of(run)
    first, changes = own_candidate(space), dict(_of_axes(space))
    steps = min(space.plan.simulate_steps, run.optimizer_steps)
    candidates = [first, *changes.values()]
    jobs = [Job(one, min(run.optimizer_steps, max(steps, 2 * cycle(one)))) for one in candidates]
    outcomes = {one.candidate.label: one for one in runner.run(jobs)}
    own = outcomes.get(first.label)
    for words, candidate in changes.items():
        outcome = outcomes.get(candidate.label)
        if own is not None and outcome is not None and outcome.rejected(space.limits) is None:
            rate_D, own_D = _rates(space, outcome), _rates(space, own)
            times, band = float(rate_D.mean() / own_D.mean()), band_of(rate_D / own_D)
            yield _gain(words, run, candidate.config, times=times, band=band, lag_mean=outcome.lag_mean)


def _rates(space: SearchSpace, outcome: Outcome) -> FloatArray:
    """Return the throughput of a simulated candidate in every draw [D] (tokens/s)."""
    one = outcome.candidate
    drawn = DrawnCandidates.of(space, [one], make_draws(space.config, space.measured))
    screened = Screener(space.config, space.answers).screen(one).tokens_per_s
    return np.exp(replace(drawn, factors={one.label: outcome.tokens_per_s / screened}).log_rates[:, 0])


def _of_axes(space: SearchSpace) -> Iterator[tuple[str, Candidate]]:
    """Yield the fastest other value of every key within the limits, by the screening, with any slots."""
    own, screener = choice_of(space.config), Screener(space.config, space.answers)
    for axis in ALONE:
        values = [2 * own[axis.name]] if axis is TRAIN_BATCH else axis.values(space, own)
        others = [{**own, axis.name: one} for one in values if one != own[axis.name] or axis is GENERATION_BATCH]
        whole = [one for one in others if one[SPLIT.name] in SPLIT.values(space, one)]
        sizes = [{**one, GENERATION_BATCH.name: size} for one in whole for size in GENERATION_BATCH.values(space, one)]
        kept, _ = screen_all(space, screener, [one for one in sizes if one != own])
        within = [one for one in kept if one.breaks(space.limits) is None]
        if axis.applies_to(space.config.scheduler.schedule) and within:
            yield f"another {axis.name}", max(within, key=lambda one: one.tokens_per_s).candidate
