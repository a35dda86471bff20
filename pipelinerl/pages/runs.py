"""Pages of runs: one or several side by side, a comparison, numbers of environments, and the check before a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from pipelinerl.config.run import RunConfig, flat, load_run
from pipelinerl.pages.page import Layout, Page, Place, Section, Table, cost_line, duration, sentence, short
from pipelinerl.records.comparison_report import ArmReport, ComparisonReport, EnvironmentsReport, SharingReport
from pipelinerl.records.reports import Bottleneck, CheckReport, RunReport
from pipelinerl.records.run_folder import RUN_FILE
from pipelinerl.util.read import read_text, read_toml

DEPENDS = "depends on"
LAST_EVALUATIONS = 5
"""Newest evaluations that are shown (count)."""
_BOTTLENECKS = {
    Bottleneck.PREFILL: "prefill-bound: engines spend more time on prefill than on decoding",
    Bottleneck.LAG: "lag-bound: slots stay free to keep max_lag",
    Bottleneck.ENVIRONMENT: "environment-bound: slots stay free while all environments are in use",
    Bottleneck.REWARD: "reward-bound: slots stay free while rollouts are scored",
    Bottleneck.DISCARDS: "discard-bound: more rollouts are given up than trained on",
}
_REMEDIES = {
    Bottleneck.GENERATION: "Generation is the bottleneck: more accelerators that generate, larger engine batches or "
    "shorter answers make it faster; a faster trainer does not.",
    Bottleneck.PREFILL: "Prefill is the bottleneck: shorter prompts or more accelerators that generate make it faster.",
    Bottleneck.TRAINING: "Training is the bottleneck: more accelerators that train make it faster; more engines only "
    "add lag.",
    Bottleneck.BALANCED: "Generation and training take the same time: only more of both makes it faster.",
    Bottleneck.LAG: "The bound on lag is the bottleneck: a larger max_lag makes it faster, more accelerators do not.",
    Bottleneck.ENVIRONMENT: "Environments are the bottleneck: more of them make it faster, more accelerators do not.",
    Bottleneck.REWARD: "Rewards are the bottleneck: faster or more parallel scoring makes it faster.",
    Bottleneck.DISCARDS: "Discards are the bottleneck: fewer of them make it faster; summary.json has the reasons.",
}
_TABLES = ("decode", "prefill", "training", "weights", "switch")
_ONE_RUN = "none: one seed, and the hardware as the run file has it"


def run_page(reports: Mapping[str, RunReport], folders: Sequence[Path] = ()) -> Page:
    """Return the page of one run, or of several side by side; ``folders``, in the same order, supply the run file."""
    names = list(reports)
    best = max(names, key=lambda name: reports[name].tokens_per_s)
    report = reports[best]
    config, run_file = config_and_text(folders[names.index(best)] / RUN_FILE if folders else None)
    steps = report.optimizer_steps_per_rl_step
    method = f"{report.scheduler} G={steps}" if steps else report.scheduler
    answer = f"{_speed(report)}, with a mean lag of {report.lag.mean:.2f} optimizer steps, at most {report.lag.max}."
    columns: tuple[str, ...]
    if len(names) == 1:
        question = f"How fast does {report.scheduler} RL train {setting_of(config)}, and how old are its tokens?"
        title, columns, heading = f"{best}: {report.scheduler} RL", ("", ""), method
    else:
        question, title, columns = "Which of these runs trains fastest?", ", ".join(names), ("", *names)
        answer, heading = f"{best}: {answer}", "In numbers"
    cells = [dict(_numbers_of_run(one)) for one in reports.values()]
    keys = dict.fromkeys(key for one in cells for key in one)
    real = report.updates is not None
    return Page(
        title=title,
        question=question,
        answer=answer,
        facts=[("Kind", _kind(report)), ("Band", "none: one run" if real else _ONE_RUN), *_cost(report)],
        sections=[Section(DEPENDS, [_REMEDIES[report.bottleneck]])],
        tables=[
            Table(
                title=heading,
                columns=columns,
                rows=[[key, *(one.get(key, "-") for one in cells)] for key in keys],
                sortable=False,
                texts=columns,
            )
        ],
        assumptions=[] if real else setting_assumptions(config),
        run_file=run_file,
    )


def _numbers_of_run(report: RunReport) -> Iterator[tuple[str, str]]:
    """Yield name and text of each number; an indented name belongs to the row above."""
    lag, busy, duration_s = report.lag, report.utilisation, report.duration_s or 1.0
    yield "optimizer steps", f"{report.optimizer_steps:,}"
    yield "time" if report.updates else "simulated time", duration(report.duration_s)
    yield "throughput", f"{report.tokens_per_s:,.0f} tokens/s, {report.samples_per_s:,.1f} samples/s"
    if report.too_short:
        yield "  too few optimizer steps", ";\n".join(report.too_short)
    if report.tokens_per_flash is not None:
        yield "", f"{report.tokens_per_flash:.2f} tokens/flash"
    yield "token lag (optimizer steps)", f"mean {lag.mean:.2f}, p95 {lag.p95}, p99 {lag.p99}, max {lag.max}"
    yield "  of the mean", f"{lag.in_flight_mean:.2f} in flight, {lag.in_queue_mean:.2f} in queue"
    shares = (f"{key.replace('_', ' ')} {value / duration_s:.0%}" for key, value in report.seconds if value)
    yield "trainer's time", ", ".join(shares) or "none"
    yield "busy", f"generation {busy.generation:.0%}, training {busy.training:.0%}"
    yield "bottleneck", _BOTTLENECKS.get(report.bottleneck, report.bottleneck)
    yield "rollouts", ", ".join(f"{num:,} {key}" for key, num in report.rollouts if num)
    if one := report.environments:
        seconds = ", ".join(f"{name} {value:,.1f}" for name, value in one.seconds.parts.items())
        yield "environments", f"{one.in_use_mean:,.0f} of {one.count:,} in use, {one.turns_mean:.1f} turns a rollout"
        yield "  seconds of a rollout", seconds
    yield from _numbers_of_fleet(report)
    if report.cost:
        yield "cost", cost_line(report.cost).replace("; ", ";\n")
    if report.reward:
        yield "mean reward", f"{report.reward.first:.3f} at first, {report.reward.last:.3f} at last"
    if report.ess and report.mismatch:
        floor = report.mismatch.kl_at_lag_0
        at_lag_0 = "" if floor is None else f", at lag 0 {floor:.1e}"
        yield "effective sample size", f"mean {report.ess.mean:.3f}, min {report.ess.min:.3f} (raw, per token)"
        yield "KL, engine to trainer", f"{report.mismatch.kl:.1e}{at_lag_0} (nats per token)"
    if band := report.ess_modelled:
        yield "modelled effective sample size", f"mean {band.mean:.3f}, {band.low:.3f} to {band.high:.3f} (per token)"
    if report.updates:
        parts = (f"{name[:-2]} {duration(value)}" for name, value in report.updates if name.endswith("_s"))
        yield "weight updates", f"{report.updates.count:,}: {', '.join(parts)}"
    if report.evaluation:
        before, after, during = dict(report.evaluation).values()
        rates = [
            ("before", before),
            *((f"step {one.step}", one.success) for one in (during or [])[-LAST_EVALUATIONS:]),
            ("after", after),
        ]
        yield "held-out problems", ", ".join(f"{when} {rate:.1%}" for when, rate in rates if rate is not None)
    if not report.complete:
        yield "complete", "no: the run ended early"


def _numbers_of_fleet(report: RunReport) -> Iterator[tuple[str, str]]:
    if one := report.fleet:
        lost = one.lost_tokens
        yield "engines", f"{one.engines_mean:,.1f} there in the mean, {one.joined:,} joined, {one.left:,} left"
        yield "  rollouts moved", f"{one.moved:,}" + ("" if lost is None else f", {lost:,} tokens lost")
        if lost is not None and (generated := report.tokens.generated + lost):
            yield "goodput", f"{report.tokens.trained / generated:.1%} of all generated tokens trained"
        if one.step_s_p95 is not None:
            yield "p95 of an optimizer step", duration(one.step_s_p95)
    if (capacity := report.capacity) is None:
        return
    for group in capacity.groups:
        usd = "" if group.usd is None else f", {short(group.usd)} USD"
        ended = f"{group.failures:,} failures, {group.reclaims:,} reclaims"
        yield f"group {group.name}", f"{group.there_mean:,.1f} of {group.engines:,} there, {ended}{usd}"
    if trainer := capacity.trainer:
        parts = {"checkpoints": trainer.checkpoint_s, "restarts": trainer.restart_s, "work redone": trainer.redone_s}
        shares = ", ".join(f"{name} {value / (report.duration_s or 1.0):.1%}" for name, value in parts.items())
        yield "trainer's failures", f"{trainer.failures:,}; of its time {shares}"


def comparison_page(comparison: ComparisonReport, folder: Path | None = None) -> Page:
    """Return the page of a comparison; the first scenario gives the answer. Its folder has the run file."""
    scenarios = [one for one in comparison.scenarios if one.arms]
    tables, facts, depends = [_comparison_table(comparison)], list[tuple[str, str]](), list[str]()
    config, run_file = None, None
    if scenarios:
        first, *others = scenarios
        best = _fastest(first.arms)
        config, run_file = config_and_text(folder and folder / best.folder / RUN_FILE)
        for scenario in others:
            winner = _fastest(scenario.arms)
            same = "the same one is fastest" if winner.name == best.name else f"{winner.name} is fastest instead"
            gain = "" if winner.speedup is None else f", {winner.speedup:.2f} times as fast as {comparison.baseline}"
            depends.append(f"{scenario.name}: {same}{gain}.")
        depends.append(_REMEDIES[best.summary.bottleneck])
        speedups = [one.speedup for one in best.repeats or () if one.speedup is not None]
        seeds = f"speed-up {min(speedups):.2f} to {max(speedups):.2f}, {len(speedups)} seeds" if speedups else _ONE_RUN
        speed = f"{_speed(best.summary)}, a mean lag of {best.summary.lag.mean:.2f} optimizer steps"
        facts = [("Speed", speed), ("Band", seeds), *_cost(best.summary)]
        if folder is not None:
            tables.append(_differences(first.arms, folder))
    return Page(
        title=f"Schedules for {setting_of(config)}",
        question=f"Which schedule trains {setting_of(config)} fastest?",
        answer=comparison.answer,
        facts=facts,
        sections=[
            Section("too short", comparison.too_short, Place.LINES),
            Section(DEPENDS, depends),
            Section("failed", comparison.failures),
        ],
        tables=tables,
        assumptions=setting_assumptions(config),
        run_file=run_file,
    )


def _comparison_table(comparison: ComparisonReport) -> Table:
    reports = [arm.summary for arm in comparison.arms]
    flashes = bool(reports) and all(report.tokens_per_flash is not None for report in reports)
    learned = bool(reports) and all(report.reward is not None for report in reports)
    priced = bool(reports) and all(report.cost and report.cost.usd is not None for report in reports)
    cost = "$/Mtok: USD per million trained tokens; " if priced else ""
    text = "mean reward of the last tenth" if learned else "the rest: shares of the trainer's time"
    rows = []
    for scenario in comparison.scenarios:
        for arm in scenario.arms:
            seeds = f" ({len(arm.folders)} seeds)" if learned and len(arm.folders) > 1 else ""
            run_s = arm.summary.duration_s or 1.0
            shares = [f"{seconds / run_s:.0%}" if seconds else "-" for _, seconds in arm.summary.seconds]
            rest = _learning(arm) if learned else shares
            rows.append([scenario.name, arm.name + seeds, *_numbers_of_arm(arm, flashes, priced), *rest])
    return Table(
        title=f"speed-up over {comparison.baseline}",
        columns=(
            "scenario",
            "scheduler",
            "speed-up",
            "tok/flash" if flashes else "tok/s",
            "s/step",
            *(["$/Mtok"] if priced else []),
            "lag",
            "max",
            *(("reward", "ESS") if learned else ("gen", "train", "publ", "wait")),
        ),
        rows=rows,
        note=f"Speed-up in trained tokens/s; mean and max lag in optimizer steps; {cost}{text}.",
        layout=Layout.GROUPED,
    )


def _numbers_of_arm(arm: ArmReport, flashes: bool, priced: bool) -> list[str]:
    report, steps = arm.summary, arm.summary.optimizer_steps
    usd = report.cost.usd_per_million_tokens if priced and report.cost else None
    return [
        "-" if arm.speedup is None else f"{arm.speedup:.2f}",
        f"{report.tokens_per_flash:.2f}" if flashes else f"{report.tokens_per_s:,.0f}",
        f"{report.duration_s / steps:.4g}" if steps else "-",
        *(["-" if usd is None else short(usd)] if priced else []),
        f"{report.lag.mean:.2f}",
        f"{report.lag.max}",
    ]


def _learning(arm: ArmReport) -> list[str]:
    report = arm.summary
    rewards = [one.reward for one in arm.repeats or () if one.reward is not None]
    ess = [one.ess for one in arm.repeats or () if one.ess is not None]
    assert report.reward is not None
    assert report.ess is not None
    return [_mean_and_spread(rewards or [report.reward.last]), _mean_and_spread(ess or [report.ess.mean])]


def _mean_and_spread(values: Sequence[float]) -> str:
    """Return the mean, and of several values the sample standard deviation."""
    return f"{fmean(values):.3f}" + (f"±{stdev(values):.3f}" if len(values) > 1 else "")


def _differences(arms: Sequence[ArmReport], folder: Path) -> Table:
    runs = [flat(read_toml(folder / arm.folder / RUN_FILE, "run file")) for arm in arms]
    keys = dict.fromkeys(key for one in runs for key in one)
    values = {key: [str(one.get(key, "-")) for one in runs] for key in keys}
    rows = [[key, *row] for key, row in values.items() if len(set(row)) > 1]
    return Table(title="What the arms differ in", columns=("key", *(arm.name for arm in arms)), rows=rows)


def environments_page(report: EnvironmentsReport, folder: Path | None = None) -> Page:
    """Return the page of a run with several numbers of environments; the folder gives setting and run file."""
    knee = next(row for row in report.rows if row.count == report.knee)
    config, run_file = config_and_text(folder and folder / knee.folder / RUN_FILE)
    priced = report.rows[0].usd_per_1000_rollouts is not None
    cost = "; $/1000: USD of 1000 rollouts, accelerators and environments" if priced else ""
    rows = [
        {
            "environments": f"{row.count:,}",
            "rollouts/h": f"{row.rollouts_per_hour:,.0f}",
            "in use": f"{row.in_use_mean:,.0f}",
            "engines": f"{row.generation:.0%}",
            "trainer": f"{row.training:.0%}",
            "lag": f"{row.lag_mean:.2f}",
            **({} if row.usd_per_1000_rollouts is None else {"$/1000": f"{row.usd_per_1000_rollouts:,.0f}"}),
            "bottleneck": row.bottleneck.value,
        }
        for row in report.rows
    ]
    table = Table(
        title=f"environments for {report.slots:,} slots of engines",
        columns=tuple(rows[0]),
        rows=[list(row.values()) for row in rows],
        note=f"Busy shares of engines and trainer; mean lag in optimizer steps{cost}.",
        texts=("bottleneck",),
        marked=report.rows.index(knee),
    )
    return Page(
        title=f"Environments for {setting_of(config)}",
        question=f"How many environments does {setting_of(config)} need?",
        answer=sentence(report.verdict),
        sections=[Section(DEPENDS, [_REMEDIES[knee.bottleneck]]), Section("failed", report.failures)],
        tables=[table],
        assumptions=setting_assumptions(config),
        run_file=run_file,
    )


def sharing_page(report: SharingReport) -> Page:
    """Return the page of jobs that share accelerators."""
    rows = [
        [
            job.name,
            *(f"{one.tokens_per_s:,.0f}" for one in (job.alone, job.together)),
            f"{job.together.duration_s / job.alone.duration_s - 1:+.0%}",
            *(f"{one.lag.mean:.2f}" for one in (job.alone, job.together)),
            f"{job.alone.seconds.waiting_for_data / job.alone.duration_s:.0%}",
            f"{max(0.0, job.together.seconds.waiting_for_data - job.waited_s) / job.together.duration_s:.0%}",
            duration(job.waited_s),
        ]
        for job in report.jobs
    ]
    columns = ("job", "tok/s", "shared", "longer", "lag", "shared", "waits", "shared", "for others")
    hours = f"{report.gpu_hours_alone:,.0f} GPU-hours alone, {report.gpu_hours_together:,.0f} together"
    return Page(
        title="Jobs that share accelerators",
        question="What does it save if these jobs train on the same accelerators in turn?",
        answer=report.answer,
        tables=[
            Table(
                title=f"{report.switches:,} switches of {report.switch_s:g} s",
                columns=columns,
                rows=rows,
                note=f"{hours}. Waits: the trainer without data; for others: batches, for other jobs and switches.",
                texts=("job",),
            )
        ],
    )


def check_page(report: CheckReport) -> Page:
    """Return the page of ``train --check``."""
    advice = [f"{row.finding}, {row.what.strip()}: {row.advice}" for row in report.rows if row.advice]
    columns = ("what", "measured", "expected", "finding")
    rows = [[row.what, row.measured, row.expected, row.finding] for row in report.rows]
    return Page(
        title="A check",
        question="Would this run work, and as fast as its hardware allows?",
        answer="",
        sections=[Section("advice", advice, Place.LINES)],
        tables=[Table(title="check", columns=columns, rows=rows, texts=columns[:3])],
    )


def config_and_text(path: Path | None) -> tuple[RunConfig | None, str | None]:
    """Return a run file as configuration and as text; None for both without a path."""
    return (None, None) if path is None else (load_run(path), read_text(path))


def _kind(report: RunReport) -> str:
    kind = "a simulation" if report.updates is None else "a real run: everything is measured"
    early = "" if report.complete else "; it ended early"
    return f"{kind}, seed {report.seed}, {report.optimizer_steps:,} optimizer steps{early}"


def _speed(report: RunReport) -> str:
    steps = max(1, report.optimizer_steps)
    return f"{report.tokens_per_s:,.0f} tokens/s, an optimizer step every {duration(report.duration_s / steps)}"


def _cost(report: RunReport) -> list[tuple[str, str]]:
    return [] if report.cost is None else [("Cost", cost_line(report.cost))]


def _fastest(arms: Sequence[ArmReport]) -> ArmReport:
    return max(arms, key=lambda arm: arm.summary.tokens_per_s)


def setting_of(config: RunConfig | None) -> str:
    """Return model and accelerators, by name where the run file has names."""
    if config is None:
        return "this run"
    model = config.hardware.model or (config.train and Path(config.train.model.path).name) or "a model"
    return f"{model} on {config.cluster.accelerators} {config.hardware.gpu or 'accelerators'}"


def setting_assumptions(config: RunConfig | None) -> list[str]:
    """Return the inputs of a simulation, a line each."""
    if config is None:
        return []
    work, length, hardware = config.workload, config.workload.length, config.hardware
    mean = "" if length.mean is None else f" of {length.mean:g} tokens in the mean"
    source = "" if length.source is None else f" of {length.source}"
    cv = "" if length.cv is None else f", cv {length.cv:g}"
    lines = [
        f"answers: {length.kind}{source}{mean}{cv}, at most {length.max:,}; prompts of {work.prompt_tokens:,} tokens, "
        f"groups of {work.group_size}"
    ]
    derived = []
    for part in _TABLES:
        given: Any = getattr(hardware, part, None)
        if given is None:
            derived.append(part)
            continue
        numbers = given.model_dump(mode="json", exclude_defaults=True)
        words = (f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in numbers.items())
        lines.append(f"{part}, from the run file: {', '.join(words) or 'costs nothing'}")
    if derived and hardware.gpu is not None:
        names = ", ".join(derived)
        lines.append(f"{names}: derived from {hardware.gpu} and {hardware.model}, {hardware.level} coefficients")
    return lines
