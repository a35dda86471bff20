"""Pages of plans: the sentences of an answer, measurements, assumptions and another plan, cases side by side."""

from typing import Any

import pytest
from tiny_plan import priced_plan

from pipelinerl.config.run import ClusterConfig, SchedulerConfig
from pipelinerl.pages.page import Page
from pipelinerl.pages.plans import cases_page, choice, merged_lines, plan_page, probability, switching
from pipelinerl.records.plan_report import (
    Against,
    Assumed,
    AsynchronousOdds,
    Band,
    CertaintyReport,
    Changed,
    Instead,
    MeasurementValue,
    PhasesReport,
    PlanReport,
    Safest,
    Threshold,
)

CHANGES = "Below 3.1 s, synchronous RL is faster, above it asynchronous RL; here it is about 6 (2 to 9)."
DECIDES = "phase switch decides most, 40% of the difference"


def value(
    *measured: str, gain: float, commands: tuple[str, ...] = ("do it",), minutes: float = 6.0
) -> MeasurementValue:
    return MeasurementValue(
        measured=list(measured), right=0.7, regret=0.04 - gain, gain=gain, settles=gain > 0.005,
        commands=list(commands), minutes=minutes, gpus=8,
    )  # fmt: skip


def report(*measurements: MeasurementValue, **changed: Any) -> CertaintyReport:
    made = CertaintyReport(
        draws=400, compared=24, tie=0.03, right=0.58, regret=0.043,
        safest=Safest(label=priced_plan().recommended.label, slower=0.0, low=1.0),
        keeps_limits=None, asynchronous=None, fits=None, unknown={},
        measurements=list(measurements),
    )  # fmt: skip
    return made.model_copy(update=changed)


def sections(page: Page) -> dict[str, list[str]]:
    """The lines of each section by title."""
    return {one.title: list(one.lines) for one in page.sections}


def answers(*measurements: MeasurementValue, **changed: Any) -> dict[str, list[str]]:
    """The sections of a plan with these measurements; ``changed`` are keys of its certainty or of the plan."""
    of_plan = {key: changed.pop(key) for key in [*changed] if key in PlanReport.model_fields}
    certainty = report(*measurements, **changed)
    return sections(plan_page(priced_plan().model_copy(update={"certainty": certainty, **of_plan})))


def test_what_is_recommended_says_why_against_the_other_kinds_and_the_safest() -> None:
    best = priced_plan().recommended
    over = "On average over 400 draws of everything unmeasured it trains"
    behind = "4.3% less than the fastest of each draw."
    assert answers(families={best.family: best})["why"] == [f"{over} {behind}"]
    alone = answers(families={best.family: best, "conventional": None})
    assert alone["why"] == [f"{over} {behind} No other kind of schedule was found to keep to the limits."]
    other = best.model_copy(update={"family": "conventional", "label": "C", "tokens_per_s": best.tokens_per_s / 1.25})
    both = {best.family: best, "conventional": other}
    fastest = f"{over} 25% more than conventional at its best (C), and {behind}"
    assert answers(families=both)["why"] == [fastest]
    own = priced_plan().own
    assert own is not None
    beyond = own.model_copy(update={"keeps_to_limits": False, "recommended_over_own": 0.8})
    assert answers(families=both, own=beyond)["why"] == [f"{fastest} The run file is 25% faster and breaks a limit."]
    below = f"one draw in ten is below 12,345 tokens/s instead of {best.band.low:,.0f}"
    simulated = next(one.label for one in priced_plan().simulated if one.label != best.label)
    safest = Safest(label=simulated, slower=0.05, low=12_345.0)
    assert answers(families=both, safest=safest)["why"] == [
        f"{fastest} The safest of 24 is {simulated}: 5% slower on average, but {below} (plan.risk=averse)."
    ]
    better = Safest(label="C", slower=-0.05, low=12_345.0)
    assert answers(families=both, safest=better)["why"] == [
        f"{fastest} The safest of 24 is C: 5% faster on average, and {below} (not simulated: raise plan.simulate)."
    ]
    averse = priced_plan().run.model_copy(update={"risk_averse": True})
    assert answers(families=both, run=averse)["why"][0].startswith(f"{fastest} It is the safest way: one draw")


@pytest.mark.parametrize(
    ("kind", "gpus", "generate", "idle", "words"),
    [
        ("pipeline", 4, 3, None, "Pipeline RL: 3 GPUs generate and 1 trains"),
        ("pipeline", 2, 1, None, "Pipeline RL: 1 GPU generates and 1 trains"),
        ("one_step_off", 4, 3, None, "One_step_off RL: 3 GPUs generate and 1 trains"),
        ("conventional", 4, 3, None, "Conventional RL: all 4 GPUs generate, then all train"),
        ("partial_rollouts", 4, 3, None, "Partial_rollouts RL: all 4 GPUs generate, then all train"),
        ("conventional", 4, None, 1, "Conventional RL: 4 of 5 GPUs generate, then these train, and 1 stands idle"),
        ("conventional", 4, None, 3, "Conventional RL: 4 of 7 GPUs generate, then these train, and 3 stand idle"),
    ],
)
def test_the_answer_says_which_gpus_do_what(
    kind: str, gpus: int, generate: int | None, idle: int | None, words: str
) -> None:
    """Where the same GPUs generate and train, the answer has no split, even if the question has one."""
    best = priced_plan().recommended
    scheduler = SchedulerConfig(kind=kind, train_batch_size=8, generation_batch_size=8, publish_every=2)
    cluster = ClusterConfig(accelerators=gpus, generation_accelerators=generate)
    said = choice(best.model_copy(update={"scheduler": scheduler, "cluster": cluster, "idle": idle}))
    schedule, split = words.split(": ")
    lag = f"a mean lag of {best.lag_mean:.2f} optimizer steps, at most {best.lag_max}"
    assert said.startswith(f"{schedule} at {lag}: {split}; 8 sequences in progress on each engine of one GPU; ")
    assert ("optimizer steps on what was generated at once" in said) == (kind != "pipeline")
    assert "; new weights every 2 optimizer steps (" in said
    assert f"That gives {best.tokens_per_s:,.0f} tokens/s (" in said


def test_how_sure_a_plan_is_of_its_speed_its_limits_and_its_memory() -> None:
    assert answers()["how sure"] == ["Fastest within 3% with probability 0.58."]
    assert answers(keeps_limits=0.62, fits=0.876)["how sure"] == [
        "Fastest within 3% with probability 0.58; keeps to the limits with probability 0.62; memory suffices with "
        "probability 0.88."
    ]


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.0, "at most 0.005"), (0.006, "0.01"), (0.5, "0.50"), (0.994, "0.99"), (0.9951, "at least 0.995")],
)
def test_no_probability_is_shown_as_certain(value: float, words: str) -> None:
    assert probability(value) == f"with probability {words}"


@pytest.mark.parametrize(
    ("faster", "certain", "end", "changes"),
    [
        (0.71, False, "(0.90 to 1.80): not certain.", [f"Asynchronous or synchronous: {DECIDES}.", CHANGES]),
        (0.97, True, "(0.90 to 1.80).", []),
        (0.01, True, "(0.90 to 1.80), though asynchronous RL is recommended.", []),
    ],
)
def test_asynchronous_rl_is_certain_or_it_is_said_what_decides(
    faster: float, certain: bool, end: str, changes: list[str]
) -> None:
    place = Threshold(
        unknown="phase switch",
        value=3.1,
        unit="s",
        asynchronous_below=False,
        expected=6.0,
        band=Band(low=2.0, high=9.0),
    )
    odds = AsynchronousOdds(
        faster=faster, certain=certain, ratio=1.25, ratio_band=Band(low=0.9, high=1.8), decided_by="phase switch",
        share=0.4, threshold=place,
    )  # fmt: skip
    said = answers(asynchronous=odds)
    which = f"asynchronous RL is faster than synchronous RL with probability {faster:.2f}, 1.25 times as fast {end}"
    assert said["how sure"][0].endswith(f"; {which}")
    assert said["depends on"] == changes


def test_the_assumption_with_the_most_effect_is_among_what_it_depends_on() -> None:
    others = [
        Instead(value=v, throughput=x, fastest=kind) for v, x, kind in ((0.5, 1.47, "pipeline"), (2.0, 0.9, None))
    ]
    assert answers(assumed=[Assumed(key="workload.length.cv", value=1.0, instead=others)])["depends on"][-1] == (
        "The assumption with the most effect is workload.length.cv = 1: 0.5 gives +47% (pipeline turns "
        "the fastest), 2 gives -10%."
    )


def test_the_next_step_is_the_measurement_that_gains_nearly_all_for_the_fewest_commands() -> None:
    some = (
        value("weight transfer", gain=0.02),
        value("decode step", gain=0.001),
        value("weight transfer", "mean answer", gain=0.024, commands=("this", "that")),
    )
    assert answers(*some)["next"] == [
        "Measure weight transfer (about 6 minutes on 8 GPUs), which gains 2.0% throughput on average, and plan again "
        "with --measured:",
        "$ do it",
    ]
    title = "throughput that a measurement gains on average, and the probability of the fastest, {} now"
    assert answers(*some)[title.format("0.58")] == [
        "+2.0%, 0.70: weight transfer (about 6 minutes on 8 GPUs)",
        "nothing: decode step",
        "+2.4%, 0.70: weight transfer and mean answer (about 6 minutes on 8 GPUs)",
    ]
    assert answers(*some, right=0.7)[title.format("0.70")][0] == "+2.0%: weight transfer (about 6 minutes on 8 GPUs)"


def test_without_a_command_that_gains_nearly_all_the_best_command_is_next() -> None:
    far, near = value("mean answer", gain=0.05, commands=()), value("switch", gain=0.01)
    assert answers(far, near)["next"][1:] == ["$ do it"]
    know = "Know mean answer, which gains 5.0% throughput on average, and ask again;"
    assert answers(far)["next"] == [f"{know} train --check measures that where the run file has [train]."]
    assert answers(far, asked={"train": {}})["next"] == [f"{know} no command measures that."]


def test_nothing_to_measure_is_said() -> None:
    for some in ((), (value("switch", gain=0.0),)):
        said = answers(*some)
        assert said["next"] == ["No measurement would gain throughput: run it."]
        assert not next(lines for title, lines in said.items() if title.startswith("throughput that a measurement"))


def test_the_table_has_the_recommendation_and_the_candidates_it_was_compared_with() -> None:
    report = priced_plan()
    page = plan_page(report)
    (table,) = page.tables
    number = report.certainty.compared
    assert table.title == f"13 candidates screened, {number} compared in 400 draws, 6 simulated"
    for one in (report.recommended, report.runner_up, report.own):
        assert one is not None
        assert [f"{one.tokens_per_s:,.0f}"] in [row[2:3] for row in table.rows if row[1] in one.label]
    assert f"bottleneck: {report.recommended.verdict}" in sections(page)["what limits it"]


def test_a_run_file_of_a_kind_that_was_not_tried_is_marked() -> None:
    own = priced_plan().own
    assert own is not None
    lines = answers(own=own.model_copy(update={"among_schedulers": False}))["what limits it"]
    marked = "run file (only to compare with: plan.schedulers has no pipeline): recommended is "
    assert any(line.startswith(marked) for line in lines)


def test_assumptions_and_the_differences_from_another_plan_are_listed() -> None:
    report = priced_plan()
    best = report.recommended
    assert plan_page(report).sections[-1].lines == []
    slower = Instead(value="A100", throughput=0.5, fastest=None)
    other = Against(
        name="old", label=best.label, family=best.family, tokens_per_s=best.tokens_per_s / 2, lag_mean=1.0,
        cost=best.cost, verdict="slow", complete=False, changed=[Changed(key="gpu", before="H100", alone=slower)],
    )  # fmt: skip
    assumption = Assumed(key="hardware.weight_sync", value=None, instead=[slower])
    *_, assumed, against = plan_page(report.model_copy(update={"assumed": [assumption], "against": other})).sections
    assert assumed.lines == ["hardware.weight_sync = not given: A100 gives -50%"]
    assert against.title == "against old (cut short: the best of what it had simulated)"
    assert against.lines[0] == "gpu: H100 -> A100: -50% tokens/s alone"
    assert against.lines[1].endswith(f" -> {best.tokens_per_s:,.0f} (+100%)")
    assert against.lines[-2:] == [
        f"recommended: {best.label} -> {best.label} (the same)",
        f"bottleneck: slow -> {best.verdict}",
    ]
    same = other.model_copy(update={"changed": [], "complete": True})
    *_, against = plan_page(report.model_copy(update={"against": same})).sections
    assert (against.title, against.lines[0]) == ("against old", "the same question")


def test_answers_that_grow_have_plans_in_order_and_the_gain_of_switching() -> None:
    """10 h with two restarts of 10 min, where one plan takes 11 h: 10 %, or 13.8 % if a restart took no time."""
    plans = [("A", 100, 1000.0), ("B", 250, 2500.0), ("C", 400, 4000.0)]
    report = PhasesReport(
        restart_s=600, plans=plans, hours=10, hours_without_restarts=10 - 1 / 3, single="B", single_hours=11
    )
    assert switching(report) == (
        "A at first; after step 100, with answers of 1,000 tokens, B; after step 250, with answers of 2,500 tokens, C. "
        "By the screening 10 h: 10.0% faster than B throughout, restarts (2 of 10 min, assumed) included; "
        "13.8% without them."
    )
    one = report.model_copy(update={"plans": plans[2:], "hours": 11.0})
    assert switching(one) == (
        "C throughout. By the screening 11 h: a switch gains too little, 13.8% at most, restarts "
        "(10 min, assumed) apart."
    )


def test_costs_at_prices_that_nobody_gave_say_so_and_given_ones_do_not() -> None:
    given = priced_plan()
    line = "2.00 USD per H100-hour (on-demand, 2026-10; page)"
    run = given.run.model_copy(update={"price_notes": [line, "no price of H20 is known"]})
    for report, said in ((given, False), (given.model_copy(update={"run": run}), True)):
        alone, cases = plan_page(report), cases_page({"4 GPUs": report, "8 GPUs": report})
        texts = [
            alone.answer,
            cases.answer,
            cases.sections[0].lines[0],
            *(page.tables[0].note for page in (alone, cases)),
        ]
        assert [" USD per million trained tokens at assumed prices" in f" {text}" for text in texts] == [said] * 5
        facts = [("Assumed", f"{line}; no price of H20 is known; --price sets yours")]
        assert cases.facts == (facts if said else [])
        assert alone.facts[1:] == cases.facts


def test_the_page_of_cases_names_the_fastest_the_cheapest_and_the_winners() -> None:
    report = priced_plan()
    best = report.recommended
    dear = best.cost.model_copy(update={"usd_per_million_tokens": 3 * (best.cost.usd_per_million_tokens or 0)})
    faster = best.model_copy(
        update={"tokens_per_s": 2 * best.tokens_per_s, "cost": dear, "family": "conventional", "label": "other"}
    )
    page = cases_page({"4 GPUs": report, "8 GPUs": report.model_copy(update={"recommended": faster})}, failures=["no"])
    said = sections(page)
    first, second = page.answer.splitlines()
    assert first.startswith(f"Fastest: 8 GPUs, {2 * best.tokens_per_s:,.0f} tokens/s for ")
    assert ". Cheapest: 4 GPUs, " in first
    assert first.endswith(". 8 GPUs: 100% faster than 4 GPUs, for 200% more per token.")
    assert second == "Pipeline wins with 4 GPUs; conventional wins with 8 GPUs."
    assert f"{2 * best.tokens_per_s:,.0f} tokens/s" in said["8 GPUs"][0]
    limits = said["what limits each"]
    assert (limits[0], limits[-1]) == (f"4 GPUs: {best.verdict}", "no")
    assert [line.partition(":")[0] for line in said["next"] if not line.startswith("$ ")] == ["4 GPUs, 8 GPUs"]
    assert [row[:2] for row in page.tables[0].rows] == [["4 GPUs", best.label], ["8 GPUs", "other"]]
    alone = cases_page({"4 GPUs": report}).answer
    assert alone.startswith(f"Fastest and cheapest: 4 GPUs, {best.tokens_per_s:,.0f} tokens/s for ")


def test_lines_of_cases_that_differ_in_percentages_are_merged() -> None:
    lines = {
        "A": ["loses 12.5% of 24", "$ measure"], "B": ["loses 7% of 24", "$ measure"], "C": ["loses 7% of 23", "$ run"],
    }  # fmt: skip
    assert merged_lines(lines) == ["A, B: loses 12.5%, 7% of 24", "$ measure", "C: loses 7% of 23", "$ run"]
    assert merged_lines({"A": ["7% of 9%"], "B": ["7% of 8%"]}) == ["A, B: 7% of 9%, 8%"]


def test_the_first_screen_of_cases_has_the_cheapest_or_without_prices_the_fastest() -> None:
    """The second case is twice as fast at three times the price of a token."""
    report, names = priced_plan(), ("4 GPUs", "8 GPUs")
    best = report.recommended
    usd = best.cost.usd_per_million_tokens
    assert usd is not None
    dear = best.cost.model_copy(update={"usd_per_million_tokens": 3 * usd})
    faster = best.model_copy(update={"tokens_per_s": 2 * best.tokens_per_s, "cost": dear})
    plans = dict(zip(names, (report, report.model_copy(update={"recommended": faster})), strict=True))
    screen = cases_page(plans).overview
    assert screen is not None
    assert (screen.best.name, screen.best.value) == (f"4 GPUs, {best.family}", usd)
    assert screen.unit == "USD per million trained tokens"
    ends = [usd * best.tokens_per_s / rate for rate in (best.band.high, best.band.low)]
    assert [screen.best.low, screen.best.high] == pytest.approx(ends)
    assert [*screen.splits.values()] == 2 * [{"generate": 2, "train": 2}]
    unpriced = {"cost": best.cost.model_copy(update={"usd": None})}
    free = {name: {"recommended": one.recommended.model_copy(update=unpriced)} for name, one in plans.items()}
    screen = cases_page({name: report.model_copy(update=one) for name, one in free.items()}).overview
    assert screen is not None
    assert (screen.best.name, screen.best.value) == (f"8 GPUs, {best.family}", 2 * best.tokens_per_s)


def test_the_first_screen_has_a_bar_for_each_kind_of_schedule() -> None:
    report = priced_plan().model_copy(update={"families": {"pipeline": None, "conventional": None, "other": None}})
    screen = plan_page(report).overview
    assert screen is not None
    assert [(one.name, one.value > 0) for one in screen.bars] == [
        ("pipeline", True), ("conventional", False), ("other", False),
    ]  # fmt: skip
    assert screen.best in screen.bars
