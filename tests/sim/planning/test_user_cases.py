"""Plans as their users meet them: a slow publication, few simulations, too few GPUs; hardware in numbers."""

from functools import cache

import pytest
from tiny_plan import planned, refused

from pipelinerl.records.plan_report import PlanReport

SIXTEEN = (
    "optimizer_steps=200",
    "cluster={accelerators=16, generation_accelerators=8}",
    "scheduler.train_batch_size=64",
    "workload.length={kind='lognormal', mean=400, cv=1.0, max=4000}",
    "hardware={decode={kind='affine', step_s=0.01, sequence_s=2e-5}, training={token_s=4e-4, step_s=0.1}}",
    "plan={mean_lag_limit=4, generation_batch_size=[8, 12, 16, 24, 32], optimizer_steps_per_rl_step=[2, 4, 8]}",
    "plan.simulate=16",
    "plan.simulate_steps=60",
)
TWO = (
    *SIXTEEN,
    "cluster={accelerators=2, generation_accelerators=1}",
    "scheduler.train_batch_size=16",
    "workload.length={kind='lognormal', mean=400, cv=0.05, max=500}",
    "plan.generation_batch_size=[32, 64]",
    "plan.publish_every=[1]",
    "plan.simulate=6",
)
SLOW_PUBLICATION = "hardware.weights={publish_s=4, pause_s=4}"
PIPELINE = "plan.schedulers=['pipeline']"


def best_of_kind(report: PlanReport, family: str) -> float:
    best = report.families[family]
    assert best is not None
    return best.tokens_per_s


@pytest.mark.slow
def test_where_publications_are_slow_the_pipeline_makes_fewer_of_them() -> None:
    """With one per optimizer step it is no faster than conventional RL at less lag; with one in three by two thirds."""
    always = planned(*SIXTEEN, SLOW_PUBLICATION, "plan.publish_every=[1]")
    assert always.recommended.family == "conventional"
    searched = planned(*SIXTEEN, SLOW_PUBLICATION)
    assert searched.recommended.scheduler.publish_every > 1
    assert searched.recommended.lag_mean <= 4
    assert searched.recommended.tokens_per_s > 1.5 * always.recommended.tokens_per_s
    assert searched.warnings == always.warnings == []


@cache
def plan_of(simulate: int) -> PlanReport:
    """A plan of so many simulations, made once."""
    return planned(*SIXTEEN, PIPELINE, f"plan.simulate={simulate}")


@pytest.mark.slow
@pytest.mark.parametrize("simulate", [1, 2, 3, 6])
def test_a_plan_of_few_simulations_finds_one_that_keeps_the_limit(simulate: int) -> None:
    """The fastest of the screening have lags of 4.2 to 4.8, where 4 is allowed."""
    report = plan_of(simulate)
    assert report.recommended.lag_mean <= 4
    assert report.recommended.tokens_per_s > 13_000
    assert max(2, simulate) <= report.search.simulated <= simulate + 4  # and the best bet, where it was not


@pytest.mark.slow
def test_more_simulations_keep_the_candidates_of_fewer_and_lose_no_throughput() -> None:
    last: set[str] = set()
    fastest = 0.0
    for number in (3, 6, 12):
        report = plan_of(number)
        now = {one.label for one in report.simulated}
        assert last < now
        assert report.recommended.tokens_per_s >= 0.97 * fastest
        last, fastest = now, report.recommended.tokens_per_s


def test_what_was_not_simulated_is_not_called_infeasible() -> None:
    small = (*SIXTEEN, PIPELINE, "plan.generation_accelerators=[7]", "plan.publish_every=[1]")
    own = ("cluster.generation_accelerators=7", "scheduler.generation_batch_size=24", "plan.mean_lag_limit=3.9")
    line = refused(*small, *own, "plan.generation_batch_size=[24, 26]", "plan.simulate=2")
    assert line == (
        "plan: none of the 2 simulated keeps to the limits: 2 by mean_lag_limit (nearest: 4, pipeline 7/9 H=24); they "
        "had the best odds of the 2 that the screening lets through; not simulated: 1; raise plan.simulate, got 2"
    )
    line = refused(*small, *own, "plan.generation_batch_size=[24, 26]", "plan.simulate=3")
    assert line.startswith("plan: no feasible pipeline among 3: 3 by mean_lag_limit (mean_lag_limit=4 would do)")


@pytest.mark.slow
def test_more_gpus_are_said_to_give_what_they_give_within_the_limits() -> None:
    one = (*SIXTEEN, PIPELINE, "plan.generation_accelerators=[5]", "plan.publish_every=[1]")
    verdict = planned(*one, "plan.generation_batch_size=[32]").recommended.verdict
    head, _, tail = verdict.partition("; 1 more GPU gives +")
    assert head.startswith("generation-bound: ")
    assert ", within mean_lag_limit (+" in tail
    within, without = (int(part.partition("%")[0]) for part in tail.split("(+"))
    assert 0 < within < without
    free = planned(*one, "plan.generation_batch_size=[32]", "plan.mean_lag_limit=50").recommended.verdict
    assert free.endswith(f"; 1 more GPU gives +{without}%, all to generate")


ONE_SIZE = ("plan.generation_accelerators=[8]", "plan.generation_batch_size=[32]", "plan.mean_lag_limit=50")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        pytest.param((PIPELINE, "hardware.training={token_s=0.0, step_s=10.0}", "hardware.weights={publish_s=5}"),
            "training takes 10 s (10 s of it whatever the number of GPUs) and publishing 5 s per step with them too",
            id="fixed costs"),
        pytest.param((PIPELINE, "hardware.training={token_s=0.1, sequence_accelerators=1}", "workload.group_size=2",
            "scheduler.train_batch_size=8", "plan.max_lag=[50]", "workload.length={kind='fixed', max=100}"),
            "training takes 12 s (B=8 is 0.89 sequences for each rank) and publishing 0 s per step with them too",
            id="a sequence of 120 tokens for each rank, and one rank without"),
        pytest.param(("plan.schedulers=['conventional']", "plan.optimizer_steps_per_rl_step=[1]",
            "workload.length={kind='fixed', max=100}", "scheduler.train_batch_size=8", "workload.group_size=2",
            "hardware.decode={kind='affine', step_s=1.0}", "hardware.training={token_s=1e-9}", "hardware.switch={}"),
            "the 8 sequences of an RL step are 0.471 for each engine with 32 slots, the longest answers and the "
            "switches take 100 s of a step of 100 s with them too", id="8 sequences on 17 engines"),
    ],
)  # fmt: skip
def test_more_gpus_that_give_nothing_are_explained(overrides: tuple[str, ...], why: str) -> None:
    verdict = planned(
        *SIXTEEN, "plan.publish_every=[1]", *ONE_SIZE, "hardware.weights={}", *overrides
    ).recommended.verdict
    assert verdict.partition("1 more GPU ")[2] == f"gives nothing: {why}"


@pytest.mark.slow
def test_gpus_that_make_no_whole_engine_are_paid_for_and_one_more_makes_one_of_them() -> None:
    """Engines of 2 on 5: the run is that of 4 and costs a quarter more; with one more, 6 generate."""
    lists = "plan={schedulers=['conventional'], tensor_parallel=[2], generation_batch_size=[16], simulate=1}"
    steps = ("optimizer_steps=16", "plan.optimizer_steps_per_rl_step=[4]", "plan.simulate_steps=8", "price.gpu_hour=2")
    four, five = (planned(lists, *steps, f"cluster.accelerators={number}").recommended for number in (4, 5))
    assert (four.idle, five.idle, five.cluster) == (None, 1, four.cluster)
    assert five.tokens_per_s == four.tokens_per_s
    for key in ("gpu_hours", "usd", "kwh"):
        assert getattr(five.cost, key) == pytest.approx(getattr(four.cost, key) * 5 / 4)
    (gain_of_2, gain_of_1) = (one.verdict.partition(" give")[::2] for one in (four, five))
    assert gain_of_2[0].endswith("2 more GPUs")
    assert gain_of_1[0].endswith("1 more GPU")
    assert gain_of_2[1] == gain_of_1[1].removeprefix("s")


@pytest.mark.slow
def test_where_too_few_gpus_are_there_for_both_sides_the_plan_warns() -> None:
    report = planned(*TWO)
    slower = 1 - best_of_kind(report, "pipeline") / best_of_kind(report, "conventional")
    assert slower > 0.1
    (warning,) = report.warnings
    start = "asynchronous RL is slower here: 1 of 2 GPUs to generate and the others to train gives"
    assert warning.startswith(f"{start} {slower:.0%} less")
    (warning,) = planned(*TWO, PIPELINE).warnings
    assert warning.startswith("asynchronous RL may be slower here: by the screening conventional H=")
    assert warning.endswith("simulate it: add 'conventional' to plan.schedulers")
    assert planned(*TWO, "plan.schedulers=['conventional']").warnings == []
