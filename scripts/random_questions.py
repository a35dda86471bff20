"""Ask ``pipelinerl plan`` random questions, and look for sentences that contradict the numbers beside them.

    python scripts/random_questions.py 100 [SEED]

Each question is planned with a few short simulations and checked with every function of ``PROPERTIES``. A contradiction
is printed with its question, and the exit status is 1. ``tests/sim/planning/test_sentences.py`` has the same on a few.
"""

from __future__ import annotations

import math
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from pipelinerl.config.question import ask
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.prior import CERTAIN
from pipelinerl.pages.page import page_markdown, short
from pipelinerl.pages.plans import cases_page, depends_on, how_sure, next_step, plan_page, who_wins, why
from pipelinerl.records.plan_report import PlannedCandidate, PlanReport
from sim.planning import answer, choose
from sim.planning.answer import plan_cases
from sim.planning.certainty import NUM_DRAWS, DrawnCandidates
from sim.planning.choose import TIE, Rank, best_of, same_lag
from sim.planning.explain import NOTHING
from sim.planning.simulate import HowToPlan, Outcome

ROUNDING = 1e-9
"""Relative difference of two sums of the same floats."""
EVEN = 0.02
"""Distance of a probability from 1/2 below which neither kind is the more probable one: one in 400 draws, and more."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and the numbers behind it."""

    report: PlanReport
    within: Sequence[Outcome]
    """Simulated candidates within the limits."""
    rank: Rank
    drawn: DrawnCandidates

    @property
    def averse(self) -> bool:
        """Whether the low end of the band decides."""
        return self.report.run.risk_averse

    def rank_of(self, one: PlannedCandidate) -> float:
        """Return the number by which a described candidate is ranked (tokens/s)."""
        return one.band.low if self.averse else one.tokens_per_s


Property = Callable[[Planned], Iterator[str]]
"""Yields the contradictions of a plan, a line each."""


def described(report: PlanReport) -> list[PlannedCandidate]:
    """Return the candidates that a plan describes and that keep to the limits."""
    own = report.own
    some = [report.recommended, report.runner_up, *report.families.values()]
    some += [own] if own is not None and own.keeps_to_limits and own.among_schedulers else []
    return [one for one in some if one is not None]


def ranked(one: Planned) -> str:
    """Return the rank in words."""
    return "at the 10th percentile" if one.averse else "on average"


def the_recommendation_ranks_highest(one: Planned) -> Iterator[str]:
    """No candidate ranks above the recommendation by more than a tie, and no kind above its kind."""
    best, mine = one.report.recommended, one.rank_of(one.report.recommended)
    for other in described(one.report):
        if mine < (1 - TIE) * one.rank_of(other) * (1 - ROUNDING):
            yield f"{best.label} ranks {mine:.6g}, {other.label} {one.rank_of(other):.6g}"
    top = max(one.within, key=one.rank)
    if top.candidate.family != best.family and one.rank(top) > max(
        one.rank(other) for other in one.within if other.candidate.family == best.family
    ) * (1 + ROUNDING):
        yield f"{best.family} is recommended, {top.candidate.family} has the highest rank"


def numbers_are_those_of_the_draws(one: Planned) -> Iterator[str]:
    """Throughput is the mean over the draws, and a band their 10th and 90th percentile."""
    for other in described(one.report):
        if other.label in one.drawn.shares:
            expected, band = one.drawn.expected(other.label), one.drawn.band(other.label)
            if not math.isclose(other.tokens_per_s, expected, rel_tol=ROUNDING) or other.band != band:
                yield f"{other.label}: {other.tokens_per_s} of {expected}, {other.band} of {band}"


def nothing_dominates_the_recommendation(one: Planned) -> Iterator[str]:
    """No candidate of its kind within the limits ranks higher at a lag that is less by more than counts for nothing."""
    best = next(some for some in one.within if some.candidate.label == one.report.recommended.label)
    if best is not best_of(one.within, one.rank):
        yield f"{best.candidate.label} is not the best of the outcomes"
    for other in one.within:
        fresher = other.lag_mean + same_lag(other.lag_mean) < best.lag_mean
        if other.candidate.family == best.candidate.family and fresher and one.rank(other) > one.rank(best):
            yield f"{other.candidate.label} has more throughput and less lag than {best.candidate.label}"


def bands_are_ordered_around_their_centre(one: Planned) -> Iterator[str]:
    """Low end, centre and high end are in this order."""
    for other in described(one.report):
        if not 0 < other.band.low <= other.tokens_per_s * (1 + ROUNDING):
            yield f"{other.label}: {other.tokens_per_s} below {other.band}"
        if not other.tokens_per_s <= other.band.high * (1 + ROUNDING):
            yield f"{other.label}: {other.tokens_per_s} above {other.band}"
    odds = one.report.certainty.asynchronous
    if odds is not None:
        bands = [(odds.ratio_band, odds.ratio)]
        bands += [] if odds.threshold is None else [(odds.threshold.band, odds.threshold.expected)]
        for band, centre in bands:
            if not band.low <= centre * (1 + ROUNDING) <= band.high * (1 + 2 * ROUNDING):
                yield f"{centre} outside of {band}"


def probabilities_are_between_0_and_1(one: Planned) -> Iterator[str]:
    """Probabilities and shares are."""
    sure = one.report.certainty
    values = [sure.right, sure.regret, sure.keeps_limits, sure.fits, *(some.right for some in sure.measurements)]
    values += [] if sure.asynchronous is None else [sure.asynchronous.faster, sure.asynchronous.share]
    for value in values:
        if value is not None and not -ROUNDING <= value <= 1 + ROUNDING:
            yield f"probability or share {value}"


def the_runner_up_loses_by_its_numbers(one: Planned) -> Iterator[str]:
    """A runner-up called a tie is one, a slower one is not, and the loss is that of the ranks."""
    best, other = one.report.recommended, one.report.runner_up
    if other is None:
        return
    slower = 1 - one.rank_of(other) / one.rank_of(best)
    if abs(slower - TIE) < 1e-6:
        return
    tie = re.match(r"a tie: ([\d.]+)% (slower|faster) (on average|at the 10th percentile)", other.why)
    loss = re.match(r"([\d.]+)% slower (on average|at the 10th percentile)", other.why)
    where = ranked(one)
    if (tie or loss or [""])[0][-len(where) :] != where:
        yield f"runner-up: {other.why}, ranked {where}"
    if tie is not None and (slower > TIE or abs(abs(100 * slower) - float(tie[1])) > 0.0501):
        yield f"runner-up: {other.why}, slower {slower:.3%}"
    if tie is not None and abs(slower) > ROUNDING and (tie[2] == "slower") != (slower > 0):
        yield f"runner-up: {other.why}, slower {slower:.3%}"
    if loss is not None and (slower <= TIE or abs(100 * slower - float(loss[1])) > 0.501):
        yield f"runner-up: {other.why}, slower {slower:.3%}"


def reasons_agree_with_the_table(one: Planned) -> Iterator[str]:
    """Differences from other kinds and from the fastest of each draw are those of the numbers."""
    report, text, best = one.report, why(one.report), one.report.recommended
    for more, sign, family, label in re.findall(r"([\d.]+)% (more|less) than (\S+) at its best \((.*?)\)", text):
        other = report.families[family]
        ratio = 100 * (best.tokens_per_s / other.tokens_per_s - 1) if other else math.nan
        if other is None or other.label != label or abs(ratio - float(more) * (1 if sign == "more" else -1)) > 0.501:
            yield f"{more}% {sign} than {label}, by the table {ratio:.2f}%"
    if "No other kind" in text and {some.candidate.family for some in one.within} != {best.family}:
        yield f"another kind is within the limits: {text}"
    behind = re.search(r"([\d.]+)% less than the fastest of each draw", text)
    shares = one.drawn.shares
    if behind is None or abs(100 * (1 - shares[best.label]) - float(behind[1])) > 0.0501:
        yield f"1 - {shares[best.label]}: {text}"
    if "It is the safest way" in text and "The safest of" in text:
        yield f"two safest ways: {text}"


def the_safest_has_the_highest_low_end(one: Planned) -> Iterator[str]:
    """The safest has a higher low end than the recommendation, or is it; the advice to reach it would."""
    sure, best, text = one.report.certainty, one.report.recommended, why(one.report)
    safest = sure.safest
    if not math.isclose(safest.low, one.drawn.band(safest.label).low, rel_tol=ROUNDING):
        yield f"safest.low {safest.low}"
    if "(plan.risk=averse)" in text and (
        one.averse or all(some.candidate.label != safest.label for some in one.within)
    ):
        yield f"averse to risk already, or not simulated: {text}"
    if safest.label != best.label and not safest.low > best.band.low:
        yield f"safest {safest.label} {safest.low} is not above {best.band.low}"
    slower = 1 - one.drawn.expected(safest.label) / one.drawn.expected(best.label)
    for share, sign in re.findall(r"(-?[\d.]+)% (slower|faster) on average, (?:but|and) one draw", text):
        if abs(100 * slower * (1 if sign == "slower" else -1) - float(share)) > 0.501 or float(share) < 0:
            yield f"safest {slower:.2%} slower: {text}"
    lows = [one.drawn.band(some.label).low for some in one.drawn.candidates]
    if ("It is the safest way" in text) != (one.averse and (1 - TIE) * max(lows) <= best.band.low):
        yield f"not the safest: {best.band.low} of {max(lows)}: {text}"


def sure_is_not_beside_unsure(one: Planned) -> Iterator[str]:
    """Advice to run the plan is not beside an uncertain kind, and the median ratio is on the probable side of 1."""
    words = " ".join([how_sure(one.report), *next_step(one.report)])
    odds = one.report.certainty.asynchronous
    if "run it" in words and "not certain" in words:
        yield words
    if odds is not None and odds.certain != (not 1 - CERTAIN < odds.faster < CERTAIN):
        yield f"certain={odds.certain} of {odds.faster}"
    if odds is not None and (odds.ratio - 1) * (odds.faster - 0.5) < 0 and abs(odds.faster - 0.5) > EVEN:
        yield f"median {odds.ratio}, probability {odds.faster}"


def warnings_do_not_contradict_the_recommendation(one: Planned) -> Iterator[str]:
    """A kind with a warning is not recommended, nor the likelier one without a word on that."""
    odds, apart = one.report.certainty.asynchronous, not one.report.recommended.scheduler.schedule.colocated
    for warning in one.report.warnings:
        if warning.startswith("asynchronous RL is slower here") and apart:
            yield f"asynchronous recommended: {warning}"
        said = "though synchronous RL is recommended" in how_sure(one.report)
        if warning.startswith("asynchronous RL is slower here") and odds is not None and odds.faster > 0.5 and not said:
            yield f"P(asynchronous) {odds.faster}: {warning}"
        if warning.startswith("asynchronous RL is slower here") and ranked(one) not in warning:
            yield f"ranked {ranked(one)}: {warning}"
        if warning.startswith("asynchronous RL may be slower here") and odds is not None and odds.faster >= CERTAIN:
            yield f"P(asynchronous) {odds.faster}: {warning}"


def the_probable_kind_is_recommended_or_the_difference_is_said(one: Planned) -> Iterator[str]:
    """The mean decides, so the less likely kind may be recommended: it is said then, and only then."""
    odds, apart = one.report.certainty.asynchronous, not one.report.recommended.scheduler.schedule.colocated
    said = f"though {'a' if apart else ''}synchronous RL is recommended" in how_sure(one.report)
    if odds is not None and odds.faster != 0.5 and said != (apart != (odds.faster > 0.5)):
        yield f"recommended apart={apart}, P(asynchronous) {odds.faster}: {how_sure(one.report)}"


def the_threshold_has_the_probable_kind_on_its_side(one: Planned) -> Iterator[str]:
    """On the side of the threshold where the value is expected the likelier kind is faster."""
    odds = one.report.certainty.asynchronous
    if odds is None or odds.threshold is None:
        return
    at = odds.threshold
    apart_here = (at.expected < at.value) == at.asynchronous_below
    if abs(odds.faster - 0.5) > EVEN and apart_here != (odds.faster > 0.5):
        yield f"threshold {at}, P(asynchronous) {odds.faster}"
    for line in depends_on(one.report):
        if (found := re.match(r"Below (\S+) .* (asynchronous|synchronous) RL is faster, above", line)) is not None and (
            found[1] != short(at.value) or (found[2] == "asynchronous") != at.asynchronous_below
        ):
            yield f"{line}: {at}"


def a_measurement_gains_at_most_the_regret(one: Planned) -> Iterator[str]:
    """No measurement gains more than is lost against the fastest of each draw, but for the noise of cross-fitting."""
    for some in one.report.certainty.measurements if one.report.certainty.draws >= NUM_DRAWS else ():
        if some.gain > one.report.certainty.regret + NOTHING or some.settles != (some.gain > NOTHING):
            yield f"{some.measured} gain {some.gain:.2%}, regret {one.report.certainty.regret:.2%}"


def the_run_file_loses_by_its_band(one: Planned) -> Iterator[str]:
    """The ratio to the run file is within its band, and above 1 where the run file keeps to the limits, ties apart."""
    own, band = one.report.own, one.report.recommended.over_own
    if own is None or band is None:
        return
    if not band.low <= own.recommended_over_own * (1 + ROUNDING) <= band.high * (1 + 2 * ROUNDING):
        yield f"{own.recommended_over_own} outside of {band}"
    if not one.averse and own.keeps_to_limits and own.among_schedulers and own.recommended_over_own < 1 - TIE:
        yield f"the run file is faster: {own.recommended_over_own}"
    if ("breaks a limit" in why(one.report)) != (own.recommended_over_own < 1 and not own.keeps_to_limits):
        yield f"{own.recommended_over_own}, {own.keeps_to_limits}: {why(one.report)}"


def no_other_value_turns_the_recommended_kind_into_itself(one: Planned) -> Iterator[str]:
    """Another value turns no kind the fastest that is recommended anyway; advice adds no kind that is there."""
    for some in one.report.assumed:
        if any(other.fastest == one.report.recommended.family for other in some.instead):
            yield f"{some} beside {one.report.recommended.family}"
    for warning in one.report.warnings:
        if (kind := re.search(r"add '(.*)' to plan.schedulers", warning)) is not None and kind[
            1
        ] in one.report.families:
            yield warning


def words_have_no_broken_numbers(one: Planned) -> Iterator[str]:
    """The whole page of the plan has none."""
    yield from broken_numbers(page_markdown(plan_page(one.report)))


def broken_numbers(words: str) -> Iterator[str]:
    """Yield the lines of a page that have a number that is none, or a zero with a sign."""
    for line in words.splitlines():
        if re.search(r"\b(nan|inf)\b|(?<![\w.])-0(\.0+)?%|(?<![\w.-])--?\d[\d.]*% (slower|faster|more|less)", line):
            yield line


PROPERTIES: tuple[Property, ...] = (
    the_recommendation_ranks_highest,
    numbers_are_those_of_the_draws,
    nothing_dominates_the_recommendation,
    bands_are_ordered_around_their_centre,
    probabilities_are_between_0_and_1,
    the_runner_up_loses_by_its_numbers,
    reasons_agree_with_the_table,
    the_safest_has_the_highest_low_end,
    sure_is_not_beside_unsure,
    warnings_do_not_contradict_the_recommendation,
    the_probable_kind_is_recommended_or_the_difference_is_said,
    the_threshold_has_the_probable_kind_on_its_side,
    a_measurement_gains_at_most_the_regret,
    the_run_file_loses_by_its_band,
    no_other_value_turns_the_recommended_kind_into_itself,
    words_have_no_broken_numbers,
)


def contradictions(one: Planned, properties: Sequence[Property] = PROPERTIES) -> list[str]:
    """Return the contradictions of a plan, each after the property that it breaks."""
    return [f"{check.__name__}: {line}" for check in properties for line in check(one)]


def contradictions_of_cases(plans: Mapping[str, PlanReport]) -> list[str]:
    """Return the contradictions of the lines that compare several cases, as ``contradictions``."""
    text, page = "\n".join(who_wins(plans)), cases_page(plans)
    table = {str(row[0]): [str(cell) for cell in row] for row in page.tables[0].rows}
    speeds = {name: float(row[2].replace(",", "")) for name, row in table.items()}
    costs = {name: float(row[5].replace(",", "")) for name, row in table.items()}
    found = re.match(r"Fastest and cheapest: (.*?), ([\d,]+) tokens", text)
    names = re.match(r"Fastest: (.*?), ([\d,]+) tokens/s for .*? Cheapest: (.*?), [\d.,]+\.", text, re.DOTALL)
    match = found or names
    lines = []
    if match is None:
        return [f"who_wins: {text}"]
    if speeds[match[1]] < max(speeds.values()) or float(match[2].replace(",", "")) != speeds[match[1]]:
        lines.append(f"who_wins: {match[1]} is not the fastest of {speeds}: {text}")
    if costs[match[1] if found else match[3]] > min(costs.values()):
        lines.append(f"who_wins: {match[0]} is not the cheapest of {costs}: {text}")
    for name, report in plans.items():
        if not re.search(rf"{re.escape(report.recommended.family)} wins with [^;]*{re.escape(name)}", text, re.I):
            lines.append(f"who_wins: {report.recommended.family} with {name}: {text}")
    return lines + [f"words: {line}" for line in broken_numbers(page_markdown(page))]


# ------------------------------------------------------------------------------------------------------ questions

MODELS = ("Qwen2.5-1.5B", "Qwen3-4B", "Qwen2.5-7B", "Qwen3-8B", "Qwen2.5-32B", "Qwen3-30B-A3B", "Llama-3.1-70B",
          "Qwen3-235B-A22B")  # fmt: skip
GPUS = ("H100", "H200", "A100", "H20", "B200", "GB200", "MI300X", "L40S")
KINDS = ("pipeline", "conventional", "one_step_off", "partial_rollouts")


def random_question(chance: random.Random) -> tuple[dict[str, str], list[str]]:
    """Return options and overrides of a question."""
    batch = chance.choice([32, 64, 128, 256, 512, 1024])
    mean = round(2 ** chance.uniform(7, 14))
    number = chance.choice([8, 16, 24, 32, 64, 96, 128, 256, 512])
    options = {
        "model": chance.choice(MODELS), "gpu": chance.choice(GPUS), "accelerators": str(number),
        "train_batch_size": str(batch), "group_size": str(chance.choice([4, 8, 16])), "mean_length": str(mean),
    }  # fmt: skip
    several = chance.random()
    if several < 0.1:
        options["gpu"] = ",".join(chance.sample(GPUS, 2))
    elif several < 0.2:
        options["accelerators"] = f"{number},{2 * number}"
    if chance.random() < 0.5:
        options["max_length"] = str(round(mean * chance.uniform(1.5, 10)))
    limit = chance.random()
    if limit < 0.3:
        options["max_lag"] = str(chance.choice([1, 2, 4, 8]))
    elif limit < 0.6:
        options["max_mean_lag"] = str(chance.choice([0.6, 1, 2, 6]))
    if chance.random() < 0.6:
        options["software"] = chance.choice(["verl", "nemo-rl", "ours"])
    if chance.random() < 0.4:
        options["engine"] = chance.choice(["vllm-0.32", "vllm-0.15", "sglang-0.5"])
    if chance.random() < 0.3:
        options["sync"] = chance.choice(["refit", "reshard"])
    if chance.random() < 0.3:
        options["price"] = str(chance.choice([0.5, 2, 7.25]))
    if chance.random() < 0.4:
        options["risk"] = "averse"
    sets = ["plan.simulate=3", "plan.simulate_steps=24", f"optimizer_steps={chance.choice([30, 200, 1000])}",
            f"workload.length.cv={chance.choice([0.3, 1.0, 1.5])}"]  # fmt: skip
    if chance.random() < 0.3:
        sets.append(f"plan.schedulers={sorted(chance.sample(KINDS, chance.choice([1, 2, 3])))}")
    if chance.random() < 0.3:
        sets += [f"cluster.generation_accelerators={number // 2}", "scheduler.generation_batch_size=64"]
    if chance.random() < 0.7:
        sets += ["plan.generation_batch_size=[32, 64, 128, 256]", "plan.publish_every=[1, 4]"]
    return options, sets


def planned_cases(options: Mapping[str, Any], sets: Sequence[str]) -> dict[str, Planned]:
    """Return the plan of every case of a question, with the numbers behind it; ConfigError if none is feasible."""
    ranked: list[tuple[Sequence[Outcome], Rank]] = []
    draws: list[DrawnCandidates] = []

    def in_order(outcomes: Sequence[Outcome], rank: Rank) -> list[Outcome]:
        ranked.append((outcomes, rank))
        return inner_order(outcomes, rank)

    def certainty(space: Any, drawn: DrawnCandidates, *args: Any, **named: Any) -> Any:
        draws.append(drawn)
        return inner_certainty(space, drawn, *args, **named)

    inner_order, inner_certainty = choose.in_order, answer.certainty
    with patch.object(choose, "in_order", in_order), patch.object(answer, "certainty", certainty):
        cases = plan_cases(ask(options, None, sets), HowToPlan(workers=1))
    reports = {one.name: one.report for one in cases if one.report is not None}
    return {
        name: Planned(report, within, rank, drawn)
        for (name, report), (within, rank), drawn in zip(reports.items(), ranked, draws, strict=True)
    }


def main(number: int, seed: int) -> int:
    """Ask so many questions; return the exit status."""
    asked = refused = faults = 0
    for index in range(number):
        options, sets = random_question(random.Random(f"{seed} {index}"))
        start = time.monotonic()
        try:
            plans = planned_cases(options, sets)
        except ConfigError as error:
            refused += 1
            print(f"{index}: refused: {str(error)[:150]}", flush=True)
            continue
        asked += 1
        lines = [f"{name}: {line}" for name, one in plans.items() for line in contradictions(one)]
        lines += contradictions_of_cases({name: one.report for name, one in plans.items()}) if len(plans) > 1 else []
        faults += len(lines)
        print(f"{index}: {time.monotonic() - start:.1f} s, {len(lines)} contradictions", flush=True)
        if lines:
            print(f"  {options} {sets}", *(f"    {line}" for line in lines), sep="\n", flush=True)
    print(f"{asked} questions planned, {refused} refused, {faults} contradictions")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
