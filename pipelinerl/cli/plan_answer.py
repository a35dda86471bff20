"""The answer of a plan in sentences: what to run, why it, how sure, what it depends on, what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipelinerl.cli.render_certainty import measurement_to_make, named, probability, time_of
from pipelinerl.cli.render_cost import short
from pipelinerl.cli.render_run import duration
from pipelinerl.cli.render_what_if import assumption
from pipelinerl.records.plan_report import PlannedCandidate, PlanReport

COMMAND = "$ "
"""Before a command."""


def plan_answer(report: PlanReport) -> dict[str, list[str]]:
    """Return the answer of a plan: lines by what they answer, in the order in which they are read."""
    return {
        "answer": [choice(report.recommended)],
        "why": [why(report)],
        "how sure": [_how_sure(report)],
        "depends on": _changes(report),
        "next": next_step(report),
    }


def print_answers(answers: Mapping[str, Sequence[str]]) -> None:
    """Print answers as paragraphs beside their names; below them their commands, each on a line."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for name, lines in answers.items():
        said = [line for line in lines if not line.startswith(COMMAND)]
        if said:
            grid.add_row(escape(name), escape("\n".join(said)))
    console = Console()
    console.print(grid)
    for lines in answers.values():
        for line in lines:
            if line.startswith(COMMAND):
                console.print(escape(line), soft_wrap=True)
    console.print()


def choice(best: PlannedCandidate) -> str:
    """Return what a candidate is and what it gives, in two sentences."""
    cluster, scheduler = best.cluster, best.scheduler
    number, generate, schedule = cluster.accelerators, cluster.generation_accelerators, scheduler.schedule
    if schedule.colocated or generate is None:
        what = [f"all {number} GPUs generate, then all train"]
        if best.idle:
            rest = f"{best.idle} stand{'s' if best.idle == 1 else ''} idle"
            what = [f"{number} of {number + best.idle} GPUs generate, then these train, and {rest}"]
    else:
        trains = f"{number - generate} train{'s' if number - generate == 1 else ''}"
        what = [f"{generate} GPU{' generates' if generate == 1 else 's generate'} and {trains}"]
    size = "one GPU" if cluster.tensor_parallel == 1 else f"{cluster.tensor_parallel} GPUs"
    what.append(f"{scheduler.generation_batch_size} sequences in progress on each engine of {size}")
    if schedule.has_rl_steps:
        what.append(f"{scheduler.optimizer_steps_per_rl_step} optimizer steps on what was generated at once")
    if scheduler.publish_every > 1:
        what.append(f"new weights every {scheduler.publish_every} optimizer steps")
    if best.environments is not None:
        what.append(f"{best.environments} environments")
    low, high = best.band_tokens_per_s
    band = f" ({low:,.0f} to {high:,.0f})" if low < high else ""
    usd = best.cost.usd_per_million_tokens
    cost = "" if usd is None else f" for {short(usd)} USD per million trained tokens"
    words = sentence(f"{schedule.name} RL: {'; '.join(what)} ({best.label})")
    return (
        f"{words} That gives {best.tokens_per_s:,.0f} tokens/s{band}{cost}, an optimizer step every "
        f"{duration(best.step_s)}, a mean lag of {best.lag_mean:.2f} optimizer steps, at most {best.lag_max}."
    )


def sentence(words: str) -> str:
    """Return words as a sentence."""
    return f"{words[:1].upper()}{words[1:]}."


def why(report: PlanReport) -> str:
    """Return why the recommendation is made: because it is the fastest, or although another one looks faster."""
    sure = report.certainty
    behind_all = f"behind the fastest of {sure.ways} ways"
    behind = f"{sure.regret:.1%} {behind_all}"
    over = f"on average over {sure.draws} draws of what is not measured"
    own = report.own
    if sure.expected_faster <= sure.tie:
        fastest = f"Nothing else within the limits is more than {sure.tie:.0%} faster if all is as expected"
        breaks = ""
        if own is not None and not own.keeps_to_limits and own.recommended_over_own < 1:
            breaks = f" The run file is {1 / own.recommended_over_own - 1:.0%} faster and breaks a limit."
        return f"{fastest}; {over} it is {behind}.{breaks}"
    faster = f"{sure.expected} is {sure.expected_faster:.0%} faster if all is as expected"
    if 1 - sure.expected_regret < (1 - sure.regret) * (1 - sure.tie):
        theirs = f"{sure.expected_regret:.1%} {behind_all}"
        return f"{faster}, but a greater risk: {over} it is {theirs}, this one {sure.regret:.1%}."
    lag = next(one.lag_mean for one in report.simulated if one.label == sure.expected)
    return (
        f"{faster}, but at a mean lag of {lag:.2f} instead of {report.recommended.lag_mean:.2f}, and {over} no faster "
        f"within {sure.tie:.0%}: this one is {behind}."
    )


def _how_sure(report: PlanReport) -> str:
    sure = report.certainty
    said = [f"fastest within {sure.tie:.0%} {probability(sure.right)}"]
    if sure.keeps_limits is not None:
        said.append(f"keeps to the limits {probability(sure.keeps_limits)}")
    if sure.fits is not None:
        said.append(f"memory suffices {probability(sure.fits)}")
    if sure.asynchronous is not None:
        certain = "" if sure.asynchronous.certain else ": not certain"
        said.append(f"asynchronous RL is faster than synchronous RL {probability(sure.asynchronous.faster)}{certain}")
    return sentence("; ".join(said))


def _changes(report: PlanReport) -> list[str]:
    odds = report.certainty.asynchronous
    lines = [
        f"With {level} coefficients {decision.label} is {decision.faster:.0%} faster."
        for level, decision in report.decisions.items()
        if not decision.same
    ]
    if odds is not None and not odds.certain:
        share = f"{odds.share:.0%} of the difference"
        lines.insert(0, f"Asynchronous or synchronous: {odds.decided_by} decides most, {share}.")
    if report.assumed and report.assumed[0].instead:
        lines.append(f"The assumption with the most effect is {assumption(report.assumed[0])}.")
    return lines


def next_step(report: PlanReport) -> list[str]:
    """Return what to do next: a measurement and its commands, or to run it."""
    best = measurement_to_make(report.certainty)
    if best is None:
        return ["No measurement would change the plan: run it."]
    gained = f"which gains {best.gain:.1%} throughput on average"
    if not best.commands:
        how = "train --check measures that where the run file has [train]"
        if "train" in report.asked:
            how = "no command measures that"
        return [f"Know {named(best)}, {gained}, and ask again; {how}."]
    return [
        f"Measure {named(best)}{time_of(best)}, {gained}, and plan again with --measured:",
        *(f"{COMMAND}{command}" for command in best.commands),
    ]
