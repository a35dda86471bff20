"""What a page says of the content of a folder: the question, the answer, what it rests on, what would change it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipelinerl.cli.plan_answer import plan_answer, sentence
from pipelinerl.cli.render_cases import case_answers, case_limits, case_next, cases_table, who_wins
from pipelinerl.cli.render_certainty import measurement_lines
from pipelinerl.cli.render_comparison import comparison_table
from pipelinerl.cli.render_cost import cost_line
from pipelinerl.cli.render_environments import environments_table
from pipelinerl.cli.render_plan import deciding_coefficients, plan_cost, plan_reasons, plan_table
from pipelinerl.cli.render_run import duration, summary_rows
from pipelinerl.cli.render_what_if import assumption_lines
from pipelinerl.config.run import RunConfig
from pipelinerl.config.run_file import load_run
from pipelinerl.records.bottleneck import Bottleneck
from pipelinerl.records.comparison_report import ArmReport, ComparisonReport
from pipelinerl.records.environments_report import EnvironmentsReport
from pipelinerl.records.page import Page, Table
from pipelinerl.records.plan_report import PlanReport
from pipelinerl.records.reports import RunReport
from pipelinerl.records.run_folder import RECOMMENDED_FILE, RUN_FILE
from pipelinerl.records.validation_report import ValidationReport
from pipelinerl.records.validation_table import (
    COLUMNS,
    PAIRS_TITLE,
    speed_up_words,
    validation_cells,
    validation_sentence,
)

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
}
"""What would make a run faster, by its bottleneck."""
CHANGES, NEXT, ASSUMED = "What would change it", "What to do next", "Assumed by the question"
"""Above what would change the answer, what follows from it, and what nobody gave."""
_PARTS = ("decode", "prefill", "training", "weights", "switch")
"""Tables of ``[hardware]`` that a run file gives, or that are derived from names."""
_ONE_RUN = "none: one seed, and the hardware as the run file has it"


def run_page(reports: dict[str, RunReport], folders: Sequence[Path]) -> Page:
    """Return the page of one run, simulated or real, or of several side by side.

    Args:
        reports: The reports by the names of the runs, in the order of ``folders``.
        folders: Their folders.
    """
    names, configs = list(reports), [load_run(folder / RUN_FILE) for folder in folders]
    best = max(names, key=lambda name: reports[name].tokens_per_s)
    place = names.index(best)
    report, config = reports[best], configs[place]
    facts = [("Kind", _kind(report)), ("Band", _ONE_RUN if report.updates is None else "none: one run"), *_cost(report)]
    sentence = f"{_speed(report)}, with a mean lag of {report.lag.mean:.2f} optimizer steps, at most {report.lag.max}."
    if len(names) == 1:
        question = f"How fast does {config.scheduler.kind} RL train {_setting(config)}, and on how old tokens?"
        title, columns = f"{best}: {config.scheduler.kind} RL", ["", "value"]
    else:
        question, title, columns = "Which of these runs trains fastest?", ", ".join(names), ["", *names]
        sentence = f"{best}: {sentence}"
    cells = {name: dict(_joined(reports[name])) for name in names}
    rows = [
        [key, *(cells[name].get(key, "-") for name in names)]
        for key in dict.fromkeys(k for c in cells.values() for k in c)
    ]
    return Page(
        title=title,
        question=question,
        answer=sentence,
        facts=facts,
        lists={CHANGES: [_REMEDIES[report.bottleneck]]},
        assumptions=_assumptions(config, real=report.updates is not None),
        tables=[Table("In numbers", tuple(columns), rows, sortable=False)],
        run_file=(folders[place] / RUN_FILE).read_text(encoding="utf-8"),
    )


def comparison_page(comparison: ComparisonReport, folder: Path) -> Page:
    """Return the page of a comparison; its first scenario gives the answer, the others what would change it."""
    first, *others = [one for one in comparison.scenarios if one.arms]
    best, config = _fastest(first.arms), load_run(folder / _fastest(first.arms).folder / RUN_FILE)
    report = best.summary
    faster = best.speedup is not None and best.name != comparison.baseline
    over = f"{best.speedup:.2f} times as fast as {comparison.baseline}; " if faster else ""
    lag = f"a mean lag of {report.lag.mean:.2f} optimizer steps"
    changes = []
    for scenario in others:
        winner = _fastest(scenario.arms)
        same = "the same one is fastest" if winner.name == best.name else f"{winner.name} is fastest instead"
        gain = "" if winner.speedup is None else f", {winner.speedup:.2f} times as fast as {comparison.baseline}"
        changes.append(f"{scenario.name}: {same}{gain}.")
    speedups = [one.speedup for one in best.repeats or () if one.speedup is not None]
    seeds = f"speed-up {min(speedups):.2f} to {max(speedups):.2f}, {len(speedups)} seeds" if speedups else _ONE_RUN
    tables = [comparison_table(comparison), _differences(first.arms, folder)]
    return Page(
        title=f"Schedules for {_setting(config)}",
        question=f"Which schedule trains {_setting(config)} fastest?",
        answer=f"{best.name} trains fastest: {over}{_speed(report)}, with {lag}.",
        facts=[("Band", seeds), *_cost(report)],
        lists={
            "Too short": comparison.too_short,
            CHANGES: [*changes, _REMEDIES[report.bottleneck]],
            "Failed": comparison.failures,
        },
        assumptions=_assumptions(config),
        tables=[one for one in tables if one.rows],
        run_file=(folder / best.folder / RUN_FILE).read_text(encoding="utf-8"),
    )


def plan_page(report: PlanReport, folder: Path) -> Page:
    """Return the page of a plan."""
    best, config = report.recommended, load_run(folder / RECOMMENDED_FILE)
    low, high = best.band_tokens_per_s
    band = f"{low:,.0f} to {high:,.0f} tokens/s, pessimistic to optimistic" if low < high else "none: hardware as given"
    limits = [
        f"{name} of at most {most:g}"
        for name, most in (("a lag", report.run.lag_limit), ("a mean lag", report.run.mean_lag_limit))
        if most is not None
    ]
    limit = f" with {' and '.join(limits)}" if limits else ""
    said = plan_answer(report)
    head, *gains = measurement_lines(report.certainty) or [""]
    measured = {sentence(head).rstrip(":."): [line.strip() for line in gains]} if gains else {}
    unknown = sorted(report.certainty.unknown.items(), key=lambda one: -one[1])
    return Page(
        title=f"A plan for {_setting(config)}",
        question=f"How to train {_setting(config)} fastest{limit}?",
        answer=" ".join(said["answer"]),
        facts=[("Band", band), ("Cost", plan_cost(report))],
        lists={
            "Why": said["why"],
            "How sure": said["how sure"],
            CHANGES: [*said["depends on"], *deciding_coefficients(report)],
            NEXT: said["next"],
            "What limits it": plan_reasons(report),
            **measured,
            ASSUMED: [line.strip() for line in assumption_lines(report)[1:]],
        },
        assumptions=[
            *(f"not measured: {name}, off by {sd:.0%} (one standard deviation)" for name, sd in unknown if sd > 0),
            *_assumptions(config),
        ],
        tables=[plan_table(report)],
        run_file=(folder / RECOMMENDED_FILE).read_text(encoding="utf-8"),
    )


def cases_page(reports: dict[str, PlanReport], folders: Sequence[Path]) -> Page:
    """Return the page of the plans of several cases of a question.

    Args:
        reports: The plans by the names of the cases, in the order of ``folders``.
        folders: Their folders.
    """
    best = max(reports, key=lambda name: reports[name].recommended.tokens_per_s)
    folder = folders[list(reports).index(best)]
    assumed = next((lines for lines in map(assumption_lines, reports.values()) if lines), [""])
    config, its = load_run(folder / RECOMMENDED_FILE), reports[best].recommended
    low, high = its.band_tokens_per_s
    return Page(
        title=f"Plans for {config.hardware.model or 'a model'}: {', '.join(reports)}",
        question=f"Which is the best of these: {', '.join(reports)}?",
        answer=" ".join(who_wins(reports)),
        facts=[
            ("Band", f"{low:,.0f} to {high:,.0f} tokens/s, pessimistic to optimistic" if low < high else "none"),
            ("Cost", plan_cost(reports[best])),
        ],
        lists={
            **case_answers(reports),
            "What limits each": case_limits(reports),
            NEXT: case_next(reports),
            ASSUMED: [line.strip() for line in assumed[1:]],
        },
        assumptions=_assumptions(config),
        tables=[cases_table(reports)],
        run_file=(folder / RECOMMENDED_FILE).read_text(encoding="utf-8"),
    )


def environments_page(report: EnvironmentsReport, folder: Path) -> Page:
    """Return the page of a run with several numbers of environments."""
    knee = next(row for row in report.rows if row.count == report.knee)
    run_file = folder / knee.folder / RUN_FILE
    config = load_run(run_file)
    return Page(
        title=f"Environments for {_setting(config)}",
        question=f"How many environments does {_setting(config)} need?",
        answer=f"{report.verdict[:1].upper()}{report.verdict[1:]}.",
        facts=[],
        lists={CHANGES: [_REMEDIES[knee.bottleneck]], "Failed": report.failures},
        assumptions=_assumptions(config),
        tables=[environments_table(report)],
        run_file=run_file.read_text(encoding="utf-8"),
    )


def validation_page(report: ValidationReport) -> Page:
    """Return the page of a validation."""
    assumed: dict[str, list[str]] = {}
    for row in report.rows:
        for words in row.assumed:
            assumed.setdefault(words, []).append(row.id)
    return Page(
        title="Predictions beside published runs",
        question="How far are predictions from what others have measured and published?",
        answer=validation_sentence(report),
        facts=[("Not usable", f"{one.id}: {one.reason}") for one in report.unusable],
        lists={PAIRS_TITLE.rstrip(":"): [speed_up_words(pair) for pair in report.speed_ups]},
        assumptions=[f"{words}: {', '.join(ids)}" for words, ids in assumed.items()],
        tables=[Table("Predicted beside measured", COLUMNS, [validation_cells(row) for row in report.rows])],
        run_file=None,
    )


def _kind(report: RunReport) -> str:
    what = "a simulation" if report.updates is None else "a real run: everything is measured"
    return f"{what}, seed {report.seed}, {report.optimizer_steps:,} optimizer steps" + (
        "" if report.complete else "; it ended early"
    )


def _joined(report: RunReport) -> Iterator[tuple[str, str]]:
    """Yield the rows of a summary; what belongs to the row above is named after it."""
    above = ""
    for key, text in summary_rows(report):
        if key.strip() == key and key:
            above = key
        yield key if key == above else f"{above}: {key.strip() or 'besides'}", text.replace("\n", " ")


def _speed(report: RunReport) -> str:
    steps = max(1, report.optimizer_steps)
    return f"{report.tokens_per_s:,.0f} tokens/s, an optimizer step every {duration(report.duration_s / steps)}"


def _cost(report: RunReport) -> list[tuple[str, str]]:
    return [] if report.cost is None else [("Cost", cost_line(report.cost))]


def _setting(config: RunConfig) -> str:
    """Return model and accelerators, by name where the run file has names."""
    model = config.hardware.model or (config.train and Path(config.train.model.path).name) or "a model"
    return f"{model} on {config.cluster.accelerators} {config.hardware.gpu or 'accelerators'}"


def _fastest(arms: Sequence[ArmReport]) -> ArmReport:
    return max(arms, key=lambda arm: arm.summary.tokens_per_s)


def _assumptions(config: RunConfig, *, real: bool = False) -> list[str]:
    """Return what the numbers of a simulation rest on, a line each."""
    if real:
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
    for part in _PARTS:
        given: Any = getattr(hardware, part, None)
        if given is None:
            derived.append(part)
        else:
            numbers = given.model_dump(mode="json", exclude_defaults=True)
            said = ", ".join(
                f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in numbers.items()
            )
            lines.append(f"{part}, from the run file: {said or 'costs nothing'}")
    if derived and hardware.gpu is not None:
        names = ", ".join(derived)
        lines.append(f"{names}: derived from {hardware.gpu} and {hardware.model}, {hardware.level} coefficients")
    return lines


def _differences(arms: Sequence[ArmReport], folder: Path) -> Table:
    """Return the keys in which the run files of arms differ, a column per arm."""
    flat = [_flat(tomllib.loads((folder / arm.folder / RUN_FILE).read_text(encoding="utf-8"))) for arm in arms]
    keys = [
        key for key in dict.fromkeys(key for one in flat for key in one) if len({str(one.get(key)) for one in flat}) > 1
    ]
    rows = [[key, *(str(one.get(key, "-")) for one in flat)] for key in keys]
    return Table("What the arms differ in", ("key", *(arm.name for arm in arms)), rows)


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested table with one key per value."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
