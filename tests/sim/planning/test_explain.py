"""Explanations: bottlenecks, sensitivity, the runner-up, and a line per kind of schedule where nothing is feasible."""

import pytest
from tiny_plan import planned, priced_plan, refused


def only_pipeline(*, generation_accelerators: int, generation_batch_size: int) -> tuple[str, ...]:
    return (
        f"plan={{schedulers=['pipeline'], generation_accelerators=[{generation_accelerators}], "
        f"generation_batch_size=[{generation_batch_size}], tensor_parallel=[1], publish_every=[1], simulate_steps=12}}",
    )


@pytest.mark.slow
def test_the_runner_up_is_another_way_and_has_the_reason_why_it_lost() -> None:
    report = priced_plan()
    best, other = report.recommended, report.runner_up
    assert other is not None
    assert (best.family, best.cluster.generation_accelerators) != (other.family, other.cluster.generation_accelerators)
    slower = 1 - other.tokens_per_s / best.tokens_per_s
    assert other.why.startswith(f"{slower:.0%} slower" if slower > 0.03 else ("as good within 3%", "a tie"))


@pytest.mark.slow
def test_a_starved_trainer_needs_more_generation() -> None:
    small = only_pipeline(generation_accelerators=1, generation_batch_size=2)
    verdict = planned(*small, "hardware.training={token_s=1e-6}").recommended.verdict
    assert verdict.startswith("generation-bound: the trainer waits ")
    assert "; 1 more GPU gives +" in verdict
    assert verdict.endswith(", all to generate")


@pytest.mark.slow
def test_a_slow_trainer_needs_more_training() -> None:
    small = only_pipeline(generation_accelerators=2, generation_batch_size=32)
    verdict = planned(*small, "hardware.training={token_s=4e-3}", "hardware.weights={}").recommended.verdict
    assert verdict.startswith("training-bound: generation could give ")
    assert verdict.endswith("1 more GPU gives +50%, all to train")  # 3 train in place of 2


@pytest.mark.slow
def test_a_tight_bound_on_the_lag_is_the_bottleneck() -> None:
    small = only_pipeline(generation_accelerators=2, generation_batch_size=16)
    best = planned(*small, "plan.lag_limit=0", "hardware.training={token_s=1e-5}").recommended
    assert best.lag_max == 0
    assert best.scheduler.max_lag == 0
    assert best.verdict.startswith("lag-bound: max_lag=0 makes the trainer wait ")


PIPELINE = "plan.schedulers=['pipeline']"
CONVENTIONAL = "plan.schedulers=['conventional']"


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
            "plan: no feasible pipeline among 9: 9 by mean_lag_limit (mean_lag_limit=3.4 would do)", id="mean lag"),
        pytest.param(("plan.gpu_hours=1e-4", "plan.optimizer_steps_per_rl_step=[4]", "plan.lag_limit=2"),
            "plan: no feasible pipeline among 9: 9 by gpu_hours (gpu_hours=1 would do)\n"
            "plan: no feasible conventional among 2: 2 by lag_limit (lag_limit=3 would do)", id="hours and lag"),
        pytest.param(("plan.budget=1e-4", "price.gpu_hour=2.0", CONVENTIONAL),
            "plan: no feasible conventional among 4: 4 by budget (budget=1 would do)", id="budget"),
    ],
)  # fmt: skip
def test_every_kind_of_schedule_has_a_line_with_its_limits_and_what_relaxes_them(
    overrides: tuple[str, ...], line: str
) -> None:
    assert refused(*overrides) == line
