"""Explanations: bottlenecks, more GPUs, warnings, and a line per kind of schedule where nothing is feasible."""

import re
from types import SimpleNamespace

import pytest
from tiny_plan import SIXTEEN, planned, refused

from pipelinerl.records.reports import Bottleneck
from sim.planning.explain import bottleneck

PIPELINE = "plan.schedulers=['pipeline']"
CONVENTIONAL = "plan.schedulers=['conventional']"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("generating", "slots", "overrides", "verdict"),
    [
        pytest.param(1, 2, ["hardware.training={token_s=1e-6}"],
            r"generation-bound: the trainer waits .*; 1 more GPU gives \+.*, all to generate", id="a starved trainer"),
        pytest.param(2, 32, ["hardware.training={token_s=4e-3}", "hardware.weights={}"],
            r"training-bound: generation could give .*; 1 more GPU gives \+50%, all to train", id="3 train, not 2"),
        pytest.param(2, 16, ["plan.lag_limit=0", "hardware.training={token_s=1e-5}"],
            r"lag-bound: max_lag=0 makes the trainer wait .*", id="a tight bound on the lag"),
    ],
)  # fmt: skip
def test_the_verdict_names_the_bottleneck_and_the_side_that_needs_more_gpus(
    generating: int, slots: int, overrides: list[str], verdict: str
) -> None:
    lists = f"generation_accelerators=[{generating}], generation_batch_size=[{slots}], tensor_parallel=[1]"
    table = f"plan={{schedulers=['pipeline'], {lists}, publish_every=[1], simulate_steps=12}}"
    assert re.fullmatch(verdict, planned(table, *overrides).recommended.verdict)


@pytest.mark.parametrize(("rate", "words"), [(150.0, "2 more give +50%"), (40.0, "2 more would do harm: -60%")])
def test_the_gain_or_the_harm_of_more_environments_is_named(rate: float, words: str) -> None:
    """8 are in use; a quarter more screens at another rate than 100 tokens/s, higher or lower."""
    config, grown = SimpleNamespace(colocated=False, environment=SimpleNamespace(count=8)), object()
    here = SimpleNamespace(config=config, changed=lambda *, environment: {10: grown}[environment["count"]])
    screener = SimpleNamespace(screen=lambda one: SimpleNamespace(tokens_per_s=rate if one is grown else 100.0))
    outcome = SimpleNamespace(candidate=here, waiting=0.3, bottleneck=Bottleneck.ENVIRONMENT)
    assert bottleneck(outcome, screener).endswith(f"all 8 environments are in use; {words}")


ONE_SIZE = (*SIXTEEN, "plan.generation_batch_size=[32]", "plan.publish_every=[1]")


@pytest.mark.slow
def test_the_gain_of_more_gpus_is_the_gain_within_the_limits() -> None:
    one = (*ONE_SIZE, PIPELINE, "plan.generation_accelerators=[5]")
    verdict = planned(*one).recommended.verdict
    head, _, tail = verdict.partition("; 1 more GPU gives +")
    assert head.startswith("generation-bound: ")
    assert ", within mean_lag_limit (+" in tail
    within, without = (int(part.partition("%")[0]) for part in tail.split("(+"))
    assert 0 < within < without
    free = planned(*one, "plan.mean_lag_limit=50").recommended.verdict
    assert free.endswith(f"; 1 more GPU gives +{without}%, all to generate")


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
        pytest.param((CONVENTIONAL, "plan.optimizer_steps_per_rl_step=[1]",
            "workload.length={kind='fixed', max=100}", "scheduler.train_batch_size=8", "workload.group_size=2",
            "hardware.decode={kind='affine', step_s=1.0}", "hardware.training={token_s=1e-9}", "hardware.switch={}"),
            "the 8 sequences of an RL step are 0.471 for each engine with 32 slots, the longest answers and the "
            "switches take 100 s of a step of 100 s with them too", id="8 sequences on 17 engines"),
    ],
)  # fmt: skip
def test_more_gpus_that_give_nothing_are_explained(overrides: tuple[str, ...], why: str) -> None:
    limits = ("plan.generation_accelerators=[8]", "plan.mean_lag_limit=50", "hardware.weights={}")
    verdict = planned(*ONE_SIZE, *limits, *overrides).recommended.verdict
    assert verdict.partition("1 more GPU ")[2] == f"gives nothing: {why}"


@pytest.mark.slow
def test_gpus_that_make_no_whole_engine_are_paid_for_and_one_more_makes_one_of_them() -> None:
    """Engines of 2 on 5: the run is that of 4 and costs a quarter more; with one more, 6 generate."""
    lists = "plan={schedulers=['conventional'], tensor_parallel=[2], generation_batch_size=[16], simulate=1}"
    steps = ("optimizer_steps=16", "plan.optimizer_steps_per_rl_step=[4]", "plan.simulate_steps=8", "price.gpu_hour=2")
    sizes = [("scheduler.kind=conventional", f"cluster={{accelerators={number}}}") for number in (4, 5)]
    four, five = (planned(lists, *steps, *size).recommended for size in sizes)
    assert (four.idle, five.idle, five.cluster) == (None, 1, four.cluster)
    assert five.tokens_per_s == four.tokens_per_s
    for key in ("gpu_hours", "usd", "kwh"):
        assert getattr(five.cost, key) == pytest.approx(getattr(four.cost, key) * 5 / 4)
    (gain_of_2, gain_of_1) = (one.verdict.partition(" give")[::2] for one in (four, five))
    assert gain_of_2[0].endswith("2 more GPUs")
    assert gain_of_1[0].endswith("1 more GPU")
    assert gain_of_2[1] == gain_of_1[1].removeprefix("s")


TWO = (
    *ONE_SIZE,
    "cluster={accelerators=2, generation_accelerators=1}",
    "scheduler.train_batch_size=16",
    "workload.length={kind='lognormal', mean=400, cv=0.05, max=500}",
    "plan.generation_batch_size=[32, 64]",
    "plan.optimizer_steps_per_rl_step=[2, 4, 8]",
    "plan.simulate=6",
)


@pytest.mark.slow
def test_a_plan_with_too_few_gpus_for_both_sides_warns() -> None:
    report = planned(*TWO)
    rates = {family: one.tokens_per_s for family, one in report.families.items() if one is not None}
    slower = 1 - rates["pipeline"] / rates["conventional"]
    assert slower > 0.1
    (warning,) = report.warnings
    start = "asynchronous RL is slower here on average: 1 of 2 GPUs to generate and the others to train gives"
    assert warning.startswith(f"{start} {slower:.0%} less")
    (warning,) = planned(*TWO, PIPELINE).warnings
    assert warning.startswith("asynchronous RL may be slower here: by the screening conventional H=")
    assert warning.endswith("simulate it: add 'conventional' to plan.schedulers")
    assert planned(*TWO, CONVENTIONAL).warnings == []


# ------------------------------------------------------------------------------------------- nothing is feasible


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        pytest.param(("hardware.model='Llama-3.1-70B'", PIPELINE),
            "plan: no feasible pipeline among 9: 9 by weights and the longest rollout do not fit into an engine (fits "
            "from tensor_parallel=2 on)", id="a model that fits nowhere"),
        pytest.param(("hardware.model='DeepSeek-V3'", PIPELINE),
            "plan: no feasible pipeline among 9: 9 by weights and the longest rollout do not fit into an engine (fits "
            "from tensor_parallel=32 on, and there are 4)",
            id="671e9 parameters of 2 bytes over 73.5 GB each are 18.3; of 128 heads 32 engines have as many each"),
        pytest.param(("cluster.accelerators=16", "hardware.model=Qwen2.5-7B",
            "plan={schedulers=['conventional'], tensor_parallel=[8]}"),
            "plan: no feasible conventional among 22: 22 by the attention heads do not divide by tensor_parallel "
            "(tensor_parallel of 1, 2, 4, 7, 14 would do)", id="heads"),
        pytest.param(("hardware.model='Qwen2.5-32B'", CONVENTIONAL, "plan.tensor_parallel=[2]"),
            "plan: no feasible conventional among 6: 6 by training does not fit into the memory of the accelerators "
            "that train (fits from 7 training accelerators on, cluster.accelerators=8 at least)", id="training memory"),
        pytest.param(("plan.mean_lag_limit=0.01", PIPELINE),
            "plan: no feasible pipeline among 9: 9 by mean_lag_limit (mean_lag_limit=3.5 would do)", id="mean lag"),
        pytest.param(("plan.gpu_hours=1e-4", "plan.optimizer_steps_per_rl_step=[4]", "plan.lag_limit=2"),
            "plan: no feasible pipeline among 9: 9 by gpu_hours (gpu_hours=1 would do)\n"
            "plan: no feasible conventional among 2: 2 by lag_limit (lag_limit=3 would do)", id="hours and lag"),
        pytest.param(("plan.budget=1e-4", "price.gpu_hour=2.0", CONVENTIONAL),
            "plan: no feasible conventional among 4: 4 by budget (budget=1 would do)", id="budget"),
    ],
)  # fmt: skip
def test_every_kind_of_schedule_has_a_line_with_its_limits_and_their_relaxation(
    overrides: tuple[str, ...], line: str
) -> None:
    assert refused(*overrides) == line


def test_a_candidate_that_was_not_simulated_is_not_called_infeasible() -> None:
    own = ("cluster.generation_accelerators=7", "scheduler.generation_batch_size=24", "plan.mean_lag_limit=3.9")
    small = (*ONE_SIZE, *own, PIPELINE, "plan.generation_accelerators=[7]", "plan.generation_batch_size=[24, 26]")
    assert refused(*small, "plan.simulate=2") == (
        "plan: none of the 2 simulated keeps to the limits: 2 by mean_lag_limit (nearest: 4, pipeline 7/9 H=24); they "
        "had the best odds of the 2 that the screening lets through; not simulated: 1; raise plan.simulate, got 2"
    )
    all_three = "plan: no feasible pipeline among 3: 3 by mean_lag_limit (mean_lag_limit=4 would do)"
    assert refused(*small, "plan.simulate=3").startswith(all_three)
