"""Pages of plans: one, or the cases of a question side by side."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pipelinerl.pages.page import (
    COMMAND,
    Layout,
    Page,
    Place,
    Section,
    Table,
    cost_line,
    duration,
    overview,
    sentence,
    short,
)
from pipelinerl.pages.runs import DEPENDS, config_and_text, setting_assumptions, setting_of
from pipelinerl.records.plan_report import (
    Assumed,
    CertaintyReport,
    Instead,
    MeasurementValue,
    PhasesReport,
    PlannedCandidate,
    PlanReport,
    Threshold,
)
from pipelinerl.records.run_folder import RECOMMENDED_FILE
from pipelinerl.util.arrays import grouped

NEARLY_ALL = 0.8
"""Share of the largest gain that a cheaper measurement must have to be preferred."""
ALMOST_ONE = 0.995
"""Probability from which on only a bound is given, and 1 less it below."""


def plan_page(report: PlanReport, folder: Path | None = None) -> Page:
    """Return the page of a plan; its folder gives the run file."""
    config, run_file = config_and_text(folder and folder / RECOMMENDED_FILE)
    limits = [
        f"{name} of at most {most:g}"
        for name, most in (("a lag", report.run.lag_limit), ("a mean lag", report.run.mean_lag_limit))
        if most is not None
    ]
    limit = f" with {' and '.join(limits)}" if limits else ", at any lag"
    setting = f"this model on {report.run.accelerators} accelerators" if config is None else setting_of(config)
    unknown = sorted(report.certainty.unknown.items(), key=lambda one: -one[1])
    cost = cost_line(report.recommended.cost, report.recommended.band_costs)
    return Page(
        title=f"A plan for {setting}",
        question=f"How to train {setting} fastest{limit}?",
        answer=choice(report.recommended, prices=_prices([report])),
        facts=[("Cost", cost), *price_facts([report])],
        sections=[
            Section("why", [why(report)], Place.ANSWER),
            Section("how sure", [how_sure(report)], Place.ANSWER),
            Section(DEPENDS, depends_on(report), Place.ANSWER),
            Section("fleet", fleet_answer(report), Place.ANSWER),
            Section("drafts", speculation_answer(report), Place.ANSWER),
            Section("next", next_step(report), Place.ANSWER),
            Section("what limits it", _reasons(report), Place.LINES),
            measurements(report.certainty),
            fleets(report),
            *what_if(report),
        ],
        tables=[_plan_table(report)],
        assumptions=[
            *(f"not measured: {name}, off by {sd:.0%} (one standard deviation)" for name, sd in unknown if sd > 0),
            *setting_assumptions(config),
        ],
        run_file=run_file,
        made=report.made,
        overview=overview(
            {"": report},
            "",
            [("How sure", how_sure(report)), ("Cost", cost)],
            priced=_priced({"": report}),
            prices=_prices([report]),
        ),
    )


def cases_page(plans: Mapping[str, PlanReport], folders: Sequence[Path] = (), *, failures: Sequence[str] = ()) -> Page:
    """Return the page of the plans of several cases by name; folders, in that order, give the run file."""
    priced, names = _priced(plans), ", ".join(plans)
    best = min(
        plans, key=lambda name: _per_token(plans[name], True) if priced else -plans[name].recommended.tokens_per_s
    )
    report = plans[best]
    config, run_file = config_and_text(folders[list(plans).index(best)] / RECOMMENDED_FILE if folders else None)
    with_effects = max(plans.values(), key=lambda one: sum(1 + len(row.instead) for row in one.assumed))
    cost = cost_line(report.recommended.cost, report.recommended.band_costs)
    known = [one.phases for one in plans.values() if one.phases is not None]  # not of a case that has failed
    phases = known[0] if known and all(one == known[0] for one in known) else None
    limits = [f"{name}: {one.recommended.verdict}" for name, one in plans.items()]
    limits += [f"{name}: warning: {warning}" for name, one in plans.items() for warning in one.warnings]
    return Page(
        title=f"Plans for {(config and config.hardware.model) or 'a model'}: {names}",
        question=f"Which is the best of these: {names}?",
        answer=switching(phases) if phases else "\n".join(who_wins(plans)),
        facts=price_facts(plans.values()),
        sections=[
            *(
                Section(name, [choice(one.recommended, prices=_prices([one]))], Place.ANSWER)
                for name, one in plans.items()
            ),
            Section("why", merged_lines({name: [why(one)] for name, one in plans.items()}), Place.ANSWER),
            Section("how sure", [f"{name}: {how_sure(one)}" for name, one in plans.items()]),
            Section("next", merged_lines({name: next_step(one) for name, one in plans.items()}), Place.ANSWER),
            Section("what limits each", [*limits, *failures], Place.LINES),
            *what_if(with_effects),
        ],
        tables=[_cases_table(plans), *(_plan_table(one, f"{name}: ") for name, one in plans.items())],
        assumptions=setting_assumptions(config),
        run_file=run_file,
        made=report.made,
        overview=overview(
            plans, best, [("How sure", how_sure(report)), ("Cost", cost)], priced=priced, prices=_prices(plans.values())
        ),
    )


def fleet_answer(report: PlanReport) -> list[str]:
    """Return which fleet is the cheapest per token, and when it is not."""
    plan = report.fleet
    if plan is None:
        return []
    base, best, lines = plan.rows[0], plan.rows[plan.best], list[str]()
    if plan.spot_price is not None:
        saved = 1 - best.usd_per_million_tokens / base.usd_per_million_tokens
        text = f"{best.reserved} reserved engines and {best.spot} spot ones are as fast for {saved:.0%} less money"
        text = text if best.spot else "spot engines do not pay"
        limits = []
        if plan.flip_price is not None:
            limits.append(f"below {plan.flip_price:.2f} USD per GPU-hour ({plan.spot_price:g} given)")
        if plan.flip_hours is not None:
            hours = f"{plan.flip_hours:.2g} h between reclaims"
            limits.append(f"from {hours} on ({plan.reclaim_hours:g} h given)")
        pay = f"; they pay {' and '.join(limits)}, if reclaims are independent" if limits else ""
        lines.append(sentence(text + pay))
    if plan.lend_gain is not None:
        lines.append(
            f"Lending the trainer's GPUs while it waits gives {plan.lend_gain - 1:+.0%} throughput, with switches of "
            f"{duration(plan.lend_switch_s or 0.0)}."
        )
    if plan.checkpoint_every_s is not None:
        lines.append(
            f"A checkpoint every {duration(plan.checkpoint_every_s)} costs least: the trainer makes progress "
            f"{plan.trainer_share:.1%} of the time."
        )
    return lines


def speculation_answer(report: PlanReport) -> list[str]:
    """Return the gain by speculative decoding, and where it ends."""
    if (plan := report.speculation) is None:
        return []
    drafts, most = plan.speculation, report.recommended.scheduler.generation_batch_size
    lines = [
        f"{drafts.tokens} tokens drafted by {drafts.method} give {plan.tokens_per_step:.2f} a step and "
        f"{plan.gain - 1:+.0%} throughput, with up to {most} sequences per engine; the last one is "
        f"{plan.tail_gain:.2g} times as fast."
    ]
    where = "at no batch" if plan.loses_from is None else f"from a batch of {plan.loses_from} on"
    lines.append(f"A step that drafts costs more than its tokens gain {where}.")
    if plan.refresh_every is not None and plan.refresh_gain is not None:
        lines.append(
            f"A refresh of the drafter every {plan.refresh_every} optimizer steps is best: "
            f"{plan.refresh_gain - 1:+.1%} against the one given."
        )
    return lines


def fleets(report: PlanReport) -> Section:
    """Return a line per fleet."""
    lines = [
        f"{row.reserved} reserved, {row.spot} spot: {row.there_mean:.1f} there, {row.tokens_per_s:,.0f} tokens/s, "
        f"{short(row.usd_per_hour)} USD per hour, {short(row.usd_per_million_tokens)} per million trained tokens "
        f"({short(row.band.low)} to {short(row.band.high)})"
        for row in (report.fleet.rows if report.fleet is not None and report.fleet.spot_price is not None else [])
    ]
    return Section("fleets of engines that are as fast in the long run", lines, Place.LIST)


def merged_lines(lines: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the lines of cases by name; lines that differ only in percentages are one, with the percentages of all."""
    alike: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for name, some in lines.items():
        for line in some:
            parts = re.split(r"(\d[\d.]*%)", line)
            alike.setdefault(tuple(parts[::2]), {})[name] = parts[1::2]
    texts = []
    for words, by_name in alike.items():
        values = [each[0] if len({*each}) == 1 else ", ".join(each) for each in zip(*by_name.values(), strict=True)]
        line = "".join(word + value for word, value in zip(words, [*values, ""], strict=True))
        texts.append(line if line.startswith(COMMAND) else f"{', '.join(by_name)}: {line}")
    return texts


# Answers


def choice(best: PlannedCandidate, *, prices: str = "") -> str:
    """Return the choices of a candidate and its numbers in two sentences; ``prices`` says on which its cost rests."""
    cluster, scheduler = best.cluster, best.scheduler
    number, generate, schedule = cluster.accelerators, cluster.generation_accelerators, scheduler.schedule
    if schedule.colocated or generate is None:
        parts = [f"all {number} GPUs generate, then all train"]
        if best.idle:
            rest = f"{best.idle} stand{'s' if best.idle == 1 else ''} idle"
            parts = [f"{number} of {number + best.idle} GPUs generate, then these train, and {rest}"]
    else:
        trains = f"{number - generate} train{'s' if number - generate == 1 else ''}"
        parts = [f"{generate} GPU{' generates' if generate == 1 else 's generate'} and {trains}"]
    size = "one GPU" if cluster.tensor_parallel == 1 else f"{cluster.tensor_parallel} GPUs"
    parts.append(f"{scheduler.generation_batch_size} sequences in progress on each engine of {size}")
    if schedule.has_rl_steps:
        parts.append(f"{scheduler.optimizer_steps_per_rl_step} optimizer steps on what was generated at once")
    if scheduler.publish_every > 1:
        parts.append(f"new weights every {scheduler.publish_every} optimizer steps")
    if best.environments is not None:
        parts.append(f"{best.environments} environments")
    low, high = best.band_tokens_per_s
    band = f" ({low:,.0f} to {high:,.0f})" if low < high else ""
    usd = best.cost.usd_per_million_tokens
    cost = "" if usd is None else f" for {short(usd)} USD per million trained tokens{prices}"
    lag = f"a mean lag of {best.lag_mean:.2f} optimizer steps, at most {best.lag_max}"
    words = sentence(f"{schedule.name} RL at {lag}: {'; '.join(parts)} ({best.label})")
    return (
        f"{words} That gives {best.tokens_per_s:,.0f} tokens/s{band}{cost}, an optimizer step every "
        f"{duration(best.step_s)}."
    )


def why(report: PlanReport) -> str:
    """Return why the recommendation is made: its expected throughput against the other kinds and the safest."""
    sure, best, averse = report.certainty, report.recommended, report.run.risk_averse
    over = f"on average over {sure.draws} draws of everything unmeasured"
    others = [one for one in report.families.values() if one is not None and one.family != best.family]
    lines = []
    for one in others:
        more = best.tokens_per_s / one.tokens_per_s - 1
        speed = f"{more:.0%} more" if more >= 0 else f"{-more:.0%} less"
        lines.append(f"{speed} than {one.family} at its best ({one.label})")
    made = "".join(f"{line}, " for line in lines) + "and " * bool(lines)
    text = sentence(f"{over} it trains {made}{sure.regret:z.1%} less than the fastest of each draw")
    if not others and len(report.families) > 1:
        text += " No other kind of schedule was found to keep to the limits."
    if sure.safest.label != best.label:
        word = "slower on average, but" if sure.safest.slower >= 0 else "faster on average, and"
        simulated = any(one.label == sure.safest.label for one in report.simulated)
        text += (
            f" The safest of {sure.compared} is {sure.safest.label}: {abs(sure.safest.slower):.0%} {word} "
            f"one draw in ten is below {sure.safest.low:,.0f} tokens/s instead of {best.band.low:,.0f} "
            f"({'plan.risk=averse' if simulated else 'not simulated: raise plan.simulate'})."
        )
    elif averse:
        text += f" It is the safest way: one draw in ten is below {best.band.low:,.0f} tokens/s, within a tie the most."
    own = report.own
    if own is not None and not own.keeps_to_limits and own.recommended_over_own < 1:
        text += f" The run file is {1 / own.recommended_over_own - 1:.0%} faster and breaks a limit."
    return text


def how_sure(report: PlanReport) -> str:
    """Return the probabilities of speed, limits and memory in a sentence."""
    sure = report.certainty
    parts = [f"fastest within {sure.tie:.0%} {probability(sure.right)}"]
    if sure.keeps_limits is not None:
        parts.append(f"keeps to the limits {probability(sure.keeps_limits)}")
    if sure.fits is not None:
        parts.append(f"memory suffices {probability(sure.fits)}")
    if sure.asynchronous is not None:
        odds, band = sure.asynchronous, sure.asynchronous.ratio_band
        certain = "" if odds.certain else ": not certain"
        apart = not report.recommended.scheduler.schedule.colocated
        if apart != (odds.faster > 0.5):
            certain = f", though {'a' if apart else ''}synchronous RL is recommended{certain}"
        parts.append(
            f"asynchronous RL is faster than synchronous RL {probability(odds.faster)}, {odds.ratio:.2f} times as fast "
            f"({band.low:.2f} to {band.high:.2f}){certain}"
        )
    return sentence("; ".join(parts))


def depends_on(report: PlanReport) -> list[str]:
    """Return what would change the answer, a sentence each."""
    odds = report.certainty.asynchronous
    lines = []
    if odds is not None and not odds.certain:
        share = f"{odds.share:.0%} of the difference"
        lines.append(f"Asynchronous or synchronous: {odds.decided_by} decides most, {share}.")
        if odds.threshold is not None:
            lines.append(threshold(odds.threshold))
    if report.assumed and report.assumed[0].instead:
        lines.append(f"The assumption with the most effect is {_assumption(report.assumed[0])}.")
    return lines


def threshold(one: Threshold) -> str:
    """Return the value of an unknown at which the kinds change places, beside the value here, in a sentence."""
    below, above = ("asynchronous", "synchronous")[:: 1 if one.asynchronous_below else -1]
    return (
        f"Below {short(one.value)} {one.unit}, {below} RL is faster, above it {above} RL; here it is about "
        f"{short(one.expected)} ({short(one.band.low)} to {short(one.band.high)})."
    )


def next_step(report: PlanReport) -> list[str]:
    """Return a measurement and its commands, or the advice to run the plan."""
    best, odds = measurement_to_make(report.certainty), report.certainty.asynchronous
    if best is None:
        if odds is not None and not odds.certain:
            return [
                "No measurement gains enough to decide between asynchronous and synchronous RL; a run of each does."
            ]
        return ["No measurement would gain throughput: run it."]
    gained = f"which gains {best.gain:.1%} throughput on average"
    if not best.commands:
        how = "train --check measures that where the run file has [train]"
        if "train" in report.asked:
            how = "no command measures that"
        return [f"Know {_named(best)}, {gained}, and ask again; {how}."]
    return [
        f"Measure {_named(best)}{_time_of(best)}, {gained}, and plan again with --measured:",
        *(f"{COMMAND}{command}" for command in best.commands),
    ]


def who_wins(plans: Mapping[str, PlanReport]) -> list[str]:
    """Return the fastest case, the cheapest, and the kind of scheduler that wins in each, in two lines."""
    priced = _priced(plans)
    unit = _unit(plans)
    fastest, its = max(plans.items(), key=lambda one: one[1].recommended.tokens_per_s)
    cheapest, other = min(plans.items(), key=lambda one: (_per_token(one[1], priced), -one[1].recommended.tokens_per_s))
    of_fastest, of_cheapest = _per_token(its, priced), _per_token(other, priced)
    speed = f"{its.recommended.tokens_per_s:,.0f} tokens/s"
    if cheapest == fastest:
        line = f"Fastest and cheapest: {fastest}, {speed} for {short(of_fastest)} {unit}."
    else:
        faster = its.recommended.tokens_per_s / other.recommended.tokens_per_s - 1
        line = (
            f"Fastest: {fastest}, {speed} for {short(of_fastest)} {unit}. Cheapest: {cheapest}, {short(of_cheapest)}. "
            f"{fastest}: {faster:.0%} faster than {cheapest}, for {of_fastest / of_cheapest - 1:.0%} more per token."
        )
    winners = grouped((report.recommended.family, name) for name, report in plans.items())
    return [line, sentence("; ".join(f"{family} wins with {', '.join(names)}" for family, names in winners.items()))]


def switching(report: PhasesReport) -> str:
    """Return the plans of answers that grow, and the gain over one plan for the whole run."""
    (first, *_), *others = report.plans
    text = f"{first}{' at first' if others else ' throughout'}"
    for (_, step, mean), (label, *_) in itertools.pairwise(report.plans):
        text += f"; after step {step:,}, with answers of {mean:,.0f} tokens, {label}"
    most, restart = report.single_hours / report.hours_without_restarts - 1, duration(report.restart_s)
    gain = f"a switch gains too little, {most:.1%} at most, restarts ({restart}, assumed) apart"
    if others:
        gain = f"{report.single_hours / report.hours - 1:.1%} faster than {report.single} throughout, restarts "
        gain += f"({len(others)} of {restart}, assumed) included; {most:.1%} without them"
    return f"{sentence(text)} By the screening {duration(3600 * report.hours)}: {gain}."


# Measurements


def probability(value: float) -> str:
    """Return a probability to two digits, never 0 or 1."""
    return f"with probability {_number(value)}"


def _number(value: float) -> str:
    return "at least 0.995" if value >= ALMOST_ONE else "at most 0.005" if value <= 1 - ALMOST_ONE else f"{value:.2f}"


def measurement_to_make(report: CertaintyReport) -> MeasurementValue | None:
    """Return the measurement with the fewest commands that gains nearly all; None if nothing is gained.

    Where no command has nearly all, it is the one that gains the most of those with commands, or else of all.
    """
    settling = [one for one in report.measurements if one.settles]
    most = max((one.gain for one in settling), default=0.0)
    by_command = [one for one in settling if one.commands]
    enough = [one for one in by_command if one.gain >= NEARLY_ALL * most]
    if enough:
        return min(enough, key=lambda one: len(one.commands))
    return max(by_command or settling, key=lambda one: one.gain, default=None)


def measurements(report: CertaintyReport) -> Section:
    """Return a line per measurement: its gain, and the probability that its choice is the fastest.

    The choice loses least on average and need not be the fastest most often: a gain may leave it unchanged.
    """
    title = (
        "throughput that a measurement gains on average, and the probability of the fastest, "
        f"{_number(report.right)} now"
    )
    some = any(one.settles for one in report.measurements)
    lines = [f"{_gain(one, report.right)} {_named(one)}{_time_of(one)}" for one in report.measurements if some]
    return Section(title, lines, Place.LIST)


def _named(one: MeasurementValue) -> str:
    *some, last = one.measured
    return f"{', '.join(some)} and {last}" if some else last


def _time_of(one: MeasurementValue) -> str:
    known = one.settles and one.minutes is not None
    return f" (about {one.minutes:.0f} minutes on {one.gpus} GPUs)" if known else ""


def _gain(one: MeasurementValue, now: float) -> str:
    if not one.settles:
        return "nothing:"
    surer = f", {_number(one.right)}" if round(one.right, 2) > round(now, 2) else ""
    return f"{one.gain:+.1%}{surer}:"


# Assumptions, and another plan


def what_if(report: PlanReport) -> list[Section]:
    """Return the assumptions, the most influential first, and the differences from the plan compared with."""
    title = (
        "assumed, the most influential first (tokens/s that another value gives "
        f"{report.recommended.family} at its best, by the screening)"
    )
    assumed = Section(title, [_assumption(one) for one in report.assumed], Place.LIST)
    other, best = report.against, report.recommended
    if other is None:
        return [assumed]
    cut_short = "" if other.complete else " (cut short: the best of what it had simulated)"
    lines = []
    for one in other.changed:
        alone = " tokens/s alone" if one.alone.throughput else ""
        lines.append(f"{one.key}: {_shown(one.before)} -> {_shown(one.alone.value)}: {_effect(one.alone)}{alone}")
    if not other.changed:
        lines.append("the same question")
    faster = best.tokens_per_s / other.tokens_per_s - 1
    lines.append(f"tokens/s: {other.tokens_per_s:,.0f} -> {best.tokens_per_s:,.0f} ({faster:+z.0%})")
    lines.append(f"mean lag: {other.lag_mean:.2f} -> {best.lag_mean:.2f}")
    for unit, before, after in (
        ("USD", other.cost.usd_per_million_tokens, best.cost.usd_per_million_tokens),
        ("GPU-hours", other.cost.gpu_hours_per_million_tokens, best.cost.gpu_hours_per_million_tokens),
    ):
        if before is not None and after is not None:
            lines.append(f"{unit} per million tokens: {short(before)} -> {short(after)}")
    same = " (the same)" if other.label == best.label else ""
    lines += [f"recommended: {other.label} -> {best.label}{same}", f"bottleneck: {other.verdict} -> {best.verdict}"]
    return [assumed, Section(f"against {other.name}{cut_short}", lines, Place.LIST)]


def _assumption(one: Assumed) -> str:
    others = (f"{_shown(other.value)} gives {_effect(other)}" for other in one.instead)
    return f"{one.key} = {_shown(one.value)}{': ' if one.instead else ''}{', '.join(others)}"


def _shown(value: object) -> str:
    return "not given" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _effect(one: Instead) -> str:
    if one.throughput is None:
        return "nothing that keeps to the limits, or no valid run file alone"
    wins = "" if one.fastest is None else f" ({one.fastest} turns the fastest)"
    return f"{one.throughput - 1:+z.0%}{wins}"


# Tables, and the reasons below them


def _plan_table(report: PlanReport, case: str = "") -> Table:
    search, best, other = report.search, report.recommended, report.runner_up
    priced = best.cost.usd is not None
    places = [("recommended", best), ("runner-up", other)]
    shown = {one.label for one in (best, other) if one is not None}
    places += [(f"best {family}", one) for family, one in report.families.items() if one and one.label not in shown]
    places.append(("run file", report.own))
    hours = f"GPU-hours of {report.run.optimizer_steps:,} optimizer steps"
    cost = f"USD per million trained tokens{_prices([report])}" if priced else hours
    rows = [_row(place, one, priced=priced) for place, one in places if one is not None]
    return Table(
        title=f"{case}{search.candidates:,} candidates screened, {report.certainty.compared} compared in "
        f"{report.certainty.draws} draws, {search.simulated} simulated",
        columns=tuple(rows[0]),
        rows=[list(row.values()) for row in rows],
        note=f"{cost}; mean and largest lag in optimizer steps; wait: share of the trainer's time; band: 80 % of "
        "the draws.",
        layout=Layout.STACKED,
    )


def _row(place: str, one: PlannedCandidate, *, priced: bool) -> dict[str, str]:
    usd = one.cost.usd_per_million_tokens
    return {
        "": place,
        "candidate": one.label.removesuffix(" (run file)"),
        "tok/s": f"{one.tokens_per_s:,.0f}",
        "band": _band(one),
        "s/step": f"{one.step_s:.4g}",
        "$/Mtok" if priced else "GPU-h": f"{one.cost.gpu_hours:,.1f}" if usd is None else short(usd),
        "lag": f"{one.lag_mean:.2f}",
        "max": f"{one.lag_max}",
        "wait": f"{one.waiting:.0%}",
    }


def _cases_table(plans: Mapping[str, PlanReport]) -> Table:
    priced = _priced(plans)
    rows = []
    for name, report in plans.items():
        best = report.recommended
        numbers = [f"{best.tokens_per_s:,.0f}", _band(best), f"{best.step_s:.4g}", short(_per_token(report, priced))]
        sure = ">0.99" if report.certainty.right >= ALMOST_ONE else f"{report.certainty.right:.2f}"
        rows.append([name, best.label, *numbers, f"{best.lag_mean:.2f}", sure])
    per = "$/Mtok" if priced else "GPU-h/Mtok"
    return Table(
        title=f"the recommendation in each of {len(plans)} cases",
        columns=("", "candidate", "tok/s", "band", "s/step", per, "lag", "sure"),
        rows=rows,
        note=f"{per}: {_unit(plans)}; mean lag in optimizer steps; band: 80 % of the draws; "
        "sure: probability that it is the fastest of its case within a tie.",
        layout=Layout.STACKED,
    )


def _band(one: PlannedCandidate) -> str:
    ends = one.band_tokens_per_s
    return "-".join(f"{end:,.0f}" if end < 10_000 else f"{end / 1000:,.0f}k" for end in ends)


def price_facts(reports: Iterable[PlanReport]) -> list[tuple[str, str]]:
    """Return the prices that nobody gave, and the kinds of GPU without any."""
    notes = dict.fromkeys(line for one in reports for line in one.run.price_notes)
    return [("Assumed", f"{'; '.join(notes)}; --price sets yours")] if notes else []


def _prices(reports: Iterable[PlanReport]) -> str:
    return " at assumed prices" if any(one.run.price_notes for one in reports) else ""


def _priced(plans: Mapping[str, PlanReport]) -> bool:
    return all(report.recommended.cost.usd is not None for report in plans.values())


def _unit(plans: Mapping[str, PlanReport]) -> str:
    """Return the unit of ``_per_token``."""
    usd = "USD per million trained tokens" + _prices(plans.values())
    return usd if _priced(plans) else "GPU-hours per million trained tokens"


def _per_token(report: PlanReport, priced: bool) -> float:
    """Return USD, or GPU-hours, per million trained tokens of the recommendation."""
    cost = report.recommended.cost
    return (cost.usd_per_million_tokens if priced else cost.gpu_hours_per_million_tokens) or 0.0


def _reasons(report: PlanReport) -> list[str]:
    best, other, own = report.recommended, report.runner_up, report.own
    lines = [f"warning: {warning}" for warning in report.warnings]
    lines.append(f"bottleneck: {best.verdict}")
    charged = (f"{name} {duration(seconds)}" for name, seconds in report.stages.items() if seconds > 0)
    lines.append(f"charged, at central values: {', '.join(charged)}")
    if other is not None:
        lines.append(f"runner-up ({other.label}): {other.why}")
    if own is not None:
        over = best.over_own
        band = "" if over is None else f" ({over.low:.2f} to {over.high:.2f})"
        breaks = "" if own.keeps_to_limits else " (it breaks a limit)"
        if not own.among_schedulers:
            breaks = f" (only to compare with: plan.schedulers has no {own.family})"
        lines.append(
            f"run file{breaks}: recommended is {own.recommended_over_own:.2f} times as fast{band}; {own.verdict}"
        )
    search = report.search
    if search.within_limits < search.simulated:
        ratios = ", ".join(f"{family} {ratio:.2f}" for family, ratio in search.lag_ratios.items())
        lines.append(
            f"{search.within_limits} of the {search.simulated} simulated keep to the limits; simulated over screened "
            f"mean lag: {ratios}"
        )
    lines += [f"not tried: {row.key}={row.value}: {row.why}" for row in search.not_tried]
    if changing := [row.unknown for row in report.sensitivity if row.changes_decision]:
        names = ", ".join(changing[:5]) + (f" and {len(changing) - 5} more" if len(changing) > 5 else "")
        lines.append(f"unknowns that alone change the decision, largest effect first: {names}")
    return lines
