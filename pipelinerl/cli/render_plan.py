"""A plan as a table on a terminal, and the reasons for it."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table


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
