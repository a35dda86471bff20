"""Results as tables on a terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def print_summary(summary: dict[str, Any], name: str) -> None:
    """Print one run as a table of two columns.

    Args:
        summary: The content of summary.json.
        name: What the title calls the run.
    """
    table = Table(title=escape(f"{name}: {_method(summary)}"), show_header=False, title_justify="left")
    lag, seconds = summary["lag"], summary["seconds"]
    duration_s = summary["duration_s"] or 1.0
    table.add_row("optimizer steps", f"{summary['optimizer_steps']:,}")
    table.add_row("time" if "updates" in summary else "simulated time", duration(summary["duration_s"]))
    table.add_row("throughput", f"{summary['tokens_per_s']:,.0f} tokens/s, {summary['samples_per_s']:,.1f} samples/s")
    if "tokens_per_flash" in summary:
        table.add_row("", f"{summary['tokens_per_flash']:.2f} tokens/flash")
    table.add_row(
        "token lag (optimizer steps)", f"mean {lag['mean']:.2f}, p95 {lag['p95']}, p99 {lag['p99']}, max {lag['max']}"
    )
    table.add_row("  of the mean", f"{lag['in_flight_mean']:.2f} in flight, {lag['in_queue_mean']:.2f} in queue")
    shares = ", ".join(f"{key.replace('_', ' ')} {value / duration_s:.0%}" for key, value in seconds.items() if value)
    table.add_row("trainer's time", shares or "none")
    utilisation = summary["utilisation"]
    table.add_row("busy", f"generation {utilisation['generation']:.0%}, training {utilisation['training']:.0%}")
    table.add_row("bottleneck", summary["bottleneck"])
    rollouts = summary["rollouts"]
    table.add_row("rollouts", ", ".join(f"{rollouts[key]:,} {key}" for key in rollouts if rollouts[key]))
    if "reward" in summary:
        table.add_row(
            "mean reward", f"{summary['reward']['first']:.3f} at first, {summary['reward']['last']:.3f} at last"
        )
    if "ess" in summary:
        ess, mismatch = summary["ess"], summary["mismatch"]
        floor = f", at lag 0 {mismatch['kl_at_lag_0']:.1e}" if "kl_at_lag_0" in mismatch else ""
        table.add_row("effective sample size", f"mean {ess['mean']:.3f}, min {ess['min']:.3f} (raw, per token)")
        table.add_row("KL, engine to trainer", f"{mismatch['kl']:.1e}{floor} (nats per token)")
    if "ess_modelled" in summary:
        band = summary["ess_modelled"]
        text = f"mean {band['mean']:.3f}, {band['low']:.3f} to {band['high']:.3f} (per token)"
        table.add_row("modelled effective sample size", text)
    if "updates" in summary:
        updates = summary["updates"]
        parts = ", ".join(f"{name} {1e3 * updates[f'{name}_s']:.1f} ms" for name in ("pause", "transfer", "resume"))
        table.add_row("weight updates", f"{updates['count']:,}: {parts}")
    if "evaluation" in summary:
        rates = ", ".join(f"{when} {rate:.1%}" for when, rate in summary["evaluation"].items())
        table.add_row("held-out problems", rates.replace("success_", ""))
    if not summary["complete"]:
        table.add_row("complete", "no: the run ended early")
    Console().print(table)


def print_comparison(comparison: dict[str, Any], name: str) -> None:
    """Print a comparison as one table, a block of rows per scenario.

    Args:
        comparison: The content of comparison.json.
        name: What the title calls the run file.
    """
    baseline = comparison["baseline"]
    title = escape(f"{name}: speed-up over {baseline}")
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False
    )
    table.add_column("scheduler", overflow="fold")  # a long name gives way, the numbers do not
    summaries = [arm["summary"] for scenario in comparison["scenarios"] for arm in scenario["arms"]]
    flashes = bool(summaries) and all("tokens_per_flash" in summary for summary in summaries)
    rate = "tok/flash" if flashes else "tok/s"
    learned = bool(summaries) and all("reward" in summary for summary in summaries)
    shares = ("reward", "ESS") if learned else ("gen", "train", "publ", "wait")
    for column in ("speed-up", rate, "s/step", "lag", "max", *shares):
        table.add_column(column, justify="right", no_wrap=True)
    for scenario in comparison["scenarios"]:
        table.add_section()
        table.add_row(f"[bold]{escape(scenario['name'])}[/bold]")
        for arm in scenario["arms"]:
            table.add_row(*_comparison_row(arm, flashes, learned))
    console = Console()
    console.print(table)
    rest = "mean reward of the last tenth" if learned else "the rest: shares of the trainer's time"
    console.print(f"Speed-up in trained tokens/s; mean and max lag in optimizer steps; {rest}.", style="dim")


def print_validation(report: dict[str, Any]) -> None:
    """Print predicted beside measured, the bad ones too.

    Args:
        report: The content of validation.json.
    """
    title = "Published runs: each predicted from its inputs and from other rows, never from its own result"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("run", overflow="fold")
    for column in ("unit", "measured", "predicted", "error"):
        table.add_column(column, justify="left" if column == "unit" else "right", no_wrap=True)
    for row in report["rows"]:
        name, unit, measured, predicted, _, error, *_ = (escape(cell) for cell in _validation_cells(row))
        table.add_row(name, unit, measured, predicted, error)
    console = Console()
    console.print(table)
    for words, names in _assumptions(report).items():
        console.print(f"assumed: {words}: {', '.join(names)}", style="dim", highlight=False, markup=False)
    for row in report["unusable"]:
        console.print(f"not usable: {row['id']}: {row['reason']}", style="dim", highlight=False, markup=False)
    console.print(validation_verdict(report), highlight=False, markup=False)


def validation_markdown(report: dict[str, Any]) -> str:
    """Return the table of a validation in Markdown, as docs/validation.md has it."""
    head = [
        "run",
        "unit",
        "measured",
        "predicted",
        "10-90 %",
        "error",
        "alone",
        "inputs of the row itself",
        "assumed",
        "rows used",
    ]
    rows = [head, ["---"] * len(head), *(_validation_cells(row) for row in report["rows"])]
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    unusable = [f"- `{row['id']}`: {row['reason']}" for row in report["unusable"]]
    return "\n".join([*lines, "", "Not usable:", "", *unusable, "", validation_verdict(report), ""])


def validation_verdict(report: dict[str, Any]) -> str:
    """Return in a sentence how far off the predictions are."""
    summary = report["summary"]
    parts = [f"{summary['rows']} rows predicted, {len(report['unusable'])} not usable"]
    if summary["median_error"] is not None:
        parts.append(f"median error {summary['median_error']:.0%}, 9 of 10 within {summary['p90_error']:.0%}")
        parts.append(f"{summary['within_30_percent']:.0%} within 30 %")
    if summary["median_error_simulated"] is not None:
        parts.append(f"of the simulated ones alone the median is {summary['median_error_simulated']:.0%}")
    if summary["median_error_alone"] is not None:
        parts.append(f"the hardware model without any other row is {summary['median_error_alone']:.0%} off")
    if summary["pairs_in_order"] is not None:
        parts.append(f"{summary['pairs_in_order']:.0%} of {summary['pairs']} pairs in the right order")
    if summary["largest_staleness_error"] is not None:
        parts.append(f"mean staleness off by {summary['largest_staleness_error']:.2f} at most")
    return "; ".join(parts) + "."


def _assumptions(report: dict[str, Any]) -> dict[str, list[str]]:
    """Return the rows of each thing that was assumed."""
    rows: dict[str, list[str]] = {}
    for row in report["rows"]:
        for words in row["assumed"]:
            rows.setdefault(words, []).append(row["id"])
    return rows


def _validation_cells(row: dict[str, Any]) -> list[str]:
    error = f"{row['error']:+.2f}" if row["quantity"] == "staleness" else f"{row['error']:+.0%}"
    band = "" if row["low"] == row["high"] else f"{row['low']:,.4g}-{row['high']:,.4g}"
    measured, predicted = (f"{row[key]:,.4g}" for key in ("measured", "predicted"))
    return [
        row["id"],
        row["quantity"],
        measured,
        predicted,
        band,
        error,
        "" if row["alone"] is None else f"{row['alone']:,.4g}",
        ", ".join(row["inputs"]),
        "; ".join(row["assumed"]),
        str(len(row["fitted_to"])),
    ]


def _comparison_row(arm: dict[str, Any], flashes: bool, learned: bool) -> list[str]:
    summary = arm["summary"]
    seconds, duration_s = summary["seconds"], summary["duration_s"] or 1.0
    shares = [seconds[key] / duration_s for key in ("generating", "training", "publishing", "waiting_for_data")]
    steps = summary["optimizer_steps"]
    repeats = arm.get("repeats", [])
    seeds = f" ({len(repeats)} seeds)" if learned and len(repeats) > 1 else ""
    return [
        escape(arm["name"]) + seeds,
        "-" if arm["speedup"] is None else f"{arm['speedup']:.2f}",
        f"{summary['tokens_per_flash']:.2f}" if flashes else f"{summary['tokens_per_s']:,.0f}",
        f"{summary['duration_s'] / steps:.4g}" if steps else "-",
        f"{summary['lag']['mean']:.2f}",
        f"{summary['lag']['max']}",
        *(
            (
                _mean_and_spread([one["reward"] for one in repeats] or [summary["reward"]["last"]]),
                _mean_and_spread([one["ess"] for one in repeats] or [summary["ess"]["mean"]]),
            )
            if learned
            else (f"{share:.0%}" if share else "-" for share in shares)
        ),
    ]


def _mean_and_spread(values: list[float]) -> str:
    """Return the mean, and of several values the sample standard deviation."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.3f}"
    return f"{mean:.3f}±{(sum((one - mean) ** 2 for one in values) / (len(values) - 1)) ** 0.5:.3f}"


def _method(summary: dict[str, Any]) -> str:
    steps = summary.get("optimizer_steps_per_rl_step")
    return f"{summary['scheduler']} G={steps}" if steps else str(summary["scheduler"])


def duration(seconds: float) -> str:
    """Return a time span in the unit that reads best."""
    for unit, size_s in (("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:,.2f} {unit}"
    return f"{seconds * 1e3:,.2f} ms"


def print_plan(plan: dict[str, Any], name: str) -> None:
    """Print a plan: what is recommended and what it was compared with, then the reasons.

    Args:
        plan: The content of plan.json.
        name: What the title calls the run file.
    """
    search, best = plan["search"], plan["recommended"]
    title = f"{name}: {search['candidates']:,} candidates screened, {search['simulated']} simulated"
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", overflow="fold", min_width=24)
    priced = best["cost_per_1000_steps"] is not None
    for column in ("tok/s", "band", "s/step", "$/1000" if priced else "GPU-h", "lag", "max", "wait"):
        table.add_column(column, justify="right", no_wrap=True)
    rows = [("recommended", best), ("runner-up", plan["runner_up"])]
    rows += [(f"best {family}", one) for family, one in plan["families"].items()]
    rows.append(("run file", plan["own"]))
    for what, one in rows:
        if one is not None and (what in ("recommended", "run file") or one["label"] != best["label"]):
            table.add_row(*_plan_row(what, one))
    console = Console()
    console.print(table)
    cost = (
        "USD per 1000 optimizer steps" if priced else f"GPU-hours of {plan['run']['optimizer_steps']:,} optimizer steps"
    )
    console.print(
        f"{cost}; mean and largest lag in optimizer steps; wait: share of the trainer's time; band: pessimistic to "
        "optimistic coefficients.\n",
        style="dim",
    )
    for line in _plan_reasons(plan):
        console.print(escape(line), soft_wrap=True)


def _plan_row(what: str, one: dict[str, Any]) -> list[str]:
    band, cost = one["band"], one["cost_per_1000_steps"]
    ends = [band[level]["tokens_per_s"] for level in ("pessimistic", "optimistic") if level in band]
    return [
        escape(f"{what}\n  {one['label'].removesuffix(' (run file)')}"),
        f"{one['tokens_per_s']:,.0f}",
        "-".join(f"{end:,.0f}" if end < 10_000 else f"{end / 1000:,.0f}k" for end in ends) or "-",
        f"{one['step_s']:.4g}",
        f"{one['gpu_hours']:,.1f}" if cost is None else f"{cost:,.0f}",
        f"{one['lag_mean']:.2f}",
        f"{one['lag_max']}",
        f"{one['waiting']:.0%}",
    ]


def _plan_reasons(plan: dict[str, Any]) -> list[str]:
    """Return the lines that say why."""
    best, other, own = plan["recommended"], plan["runner_up"], plan["own"]
    lines = [f"bottleneck: {best['verdict']}"]
    if other is not None:
        lines.append(f"runner-up ({other['label']}): {other['why']}")
    if own is not None:
        breaks = "" if own["keeps_to_limits"] else " (it breaks a limit)"
        if not own["among_schedulers"]:
            breaks = f" (only to compare with: plan.schedulers has no {own['family']})"
        lines.append(
            f"run file{breaks}: recommended is {own['recommended_over_own']:.2f} times as fast; {own['verdict']}"
        )
    for level, decision in plan["decisions"].items():
        if not decision["same"]:
            lines.append(
                f"with {level} coefficients the decision changes: {decision['label']}, {decision['faster']:.0%} faster"
            )
    for row in plan["search"]["not_tried"]:
        lines.append(f"not tried: {row['key']}={row['value']}: {row['why']}")
    changing = [row["coefficient"] for row in plan["sensitivity"] if any(_moves(row))]
    if changing:
        names = ", ".join(changing[:5]) + (f" and {len(changing) - 5} more" if len(changing) > 5 else "")
        lines.append(f"coefficients that alone change the decision, largest effect first: {names}")
    return lines


def _moves(row: dict[str, Any]) -> list[bool]:
    return [bool(row[level]["instead"]) for level in ("optimistic", "pessimistic") if level in row]
