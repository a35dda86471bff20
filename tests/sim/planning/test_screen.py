"""Candidates: each is a valid run file; choices that do not fit or break a limit are rejected with the reason."""

import re
from pathlib import Path

import pytest
from tiny_plan import candidates_of, planned, refused, tiny_run

from pipelinerl.config.resolve import resolved_hardware
from pipelinerl.config.run import parse_run
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.coefficients import Level
from sim.planning.screen import Candidate, Rejected, Screener, candidate_of, own_candidate
from sim.planning.space import Limits, Reason, SearchSpace, all_choices, engine_sizes
from sim.run import simulate

ALL_KINDS = "plan.schedulers=['pipeline', 'conventional', 'one_step_off', 'partial_rollouts']"


def space_of(*overrides: str) -> SearchSpace:
    return SearchSpace.of(tiny_run(*overrides))


def made(*overrides: str) -> list[Candidate]:
    return candidates_of(space_of(*overrides))


def rejected(*overrides: str) -> list[Rejected]:
    space = space_of(*overrides)
    return [one for choice in all_choices(space) if isinstance(one := candidate_of(choice, space), Rejected)]


@pytest.mark.parametrize(
    "overrides",
    [
        ("plan={}", "plan.lag_limit=3", "scheduler.publish_every=3", "scheduler.on_stale='drop'"),
        ("plan.train_batch_size=[8, 10, 24]", "scheduler.micro_batch_size=4", "plan.max_lag=[0, 5]"),
        ("scheduler.publish_every=3", "plan.max_lag=[4]", "plan.lag_limit=1"),
        ("scheduler.kind=conventional", "cluster={accelerators=4}", "scheduler.ready_queue_size=16"),
    ],
)
def test_a_candidate_is_a_valid_run_file_with_the_values_of_its_choice(overrides: tuple[str, ...]) -> None:
    some = made(*overrides, ALL_KINDS)
    assert some
    for one in some:
        assert parse_run(one.config.model_dump(mode="json", exclude_none=True)) == one.config
        assert one.config.scheduler.schedule.name == one.family
        assert one.config.scheduler.train_batch_size == one.choice["train_batch_size"]


def test_a_choice_that_has_a_larger_lag_in_any_case_is_rejected_with_the_limit_that_would_do() -> None:
    some = rejected("plan.schedulers=['conventional']", "plan.lag_limit=1")
    assert {(one.choice["optimizer_steps_per_rl_step"], one.reason, one.needed) for one in some} == {(4, Reason.LAG, 3)}


@pytest.mark.slow
def test_every_number_of_optimizer_steps_has_g_of_1_and_the_run_files_own() -> None:
    """Training on one's own answers only, a mean lag of 0, is conventional RL with G = 1."""
    some = ("plan={schedulers=['conventional']}", "optimizer_steps=20", "scheduler.optimizer_steps_per_rl_step=12")
    assert {one.choice["optimizer_steps_per_rl_step"] for one in made(*some)} == {1, 2, 4, 8, 12, 16}
    report = planned(*some, "plan.mean_lag_limit=0", "plan.simulate=1")
    assert (report.recommended.scheduler.optimizer_steps_per_rl_step, report.recommended.lag_mean) == (1, 0.0)


def test_a_candidate_holds_no_more_sequences_than_a_run_file_may() -> None:
    """Two engines with 10^6 slots fit into a cluster of 4 GPUs; 16 engines with 10^6, or 16 steps of 10^6, do not."""
    table = "plan={{generation_batch_size=[1000000], tensor_parallel=[1], publish_every=[1], {}}}"
    pipeline = table.format("generation_accelerators=[2, 16], schedulers=['pipeline']")
    assert [one.reason for one in rejected("cluster.accelerators=20", pipeline)] == [Reason.ROLLOUTS]
    conventional = table.format("optimizer_steps_per_rl_step=[16], schedulers=['conventional']")
    assert "at most 10,000,000 would do" in refused(conventional, "scheduler.train_batch_size=1000000")


def test_the_run_files_own_queue_is_kept_where_a_batch_fits_into_it() -> None:
    table = "plan={schedulers=['pipeline'], generation_accelerators=[2], tensor_parallel=[1], train_batch_size=[8, 32]}"
    lists = ("plan.generation_batch_size=[8]", "plan.publish_every=[1]")
    some = made(table, *lists, "scheduler.ready_queue_size=16")
    assert [one.config.scheduler.ready_queue_limit for one in some] == [16, 64]


def test_engines_apart_from_the_trainer_need_not_divide_the_cluster() -> None:
    """The GPUs left over train: 145 GB of weights fit on 65 GPUs as on 64."""
    some = ("cluster.accelerators=65", "hardware.model=Qwen2.5-72B", "plan={schedulers=['pipeline', 'conventional']}")
    fit = made(*some)
    sizes = {(one.family, one.choice["tensor_parallel"]) for one in [*fit, *rejected(*some)]}
    assert sizes == {(kind, size) for kind in ("conventional", "pipeline") for size in (1, 2, 4, 8)}
    assert {4, 8} <= {one.choice["tensor_parallel"] for one in fit} <= {2, 4, 8}


def test_where_all_generate_in_turn_the_accelerators_that_make_no_whole_engine_stand_idle_and_are_paid_for() -> None:
    """Engines of 2 on 5: 4 generate and train, 5 are paid for. The same H fills the engines of 4 as of 5."""
    lists = "plan={schedulers=['conventional'], tensor_parallel=[2], optimizer_steps_per_rl_step=[4]}"
    of_5, of_4 = (made(lists, f"cluster.accelerators={number}") for number in (5, 4))
    assert [one.label for one in of_5] == [one.label for one in of_4]
    assert {(one.config.cluster.accelerators, one.idle, one.rented.cluster.accelerators) for one in of_5} == {(4, 1, 5)}
    assert {one.gpu_hours(3600.0) for one in of_5} == {5.0}
    assert {one.gpu_hours(3600.0) for one in of_4} == {4.0}
    assert [one.config.cluster for one in of_5] == [one.config.cluster for one in of_4]


def test_a_hybrids_cache_is_that_of_its_own_slots_whatever_was_screened_before() -> None:
    """Each slot keeps a state of 168 MB: 512 of them take 86 GB of an engine's cache, 16 take 3 GB."""
    some = (
        "cluster.accelerators=64", "cluster.generation_accelerators=32", "hardware.model=Nemotron-3-Super-120B-A12B",
        "plan={schedulers=['pipeline'], tensor_parallel=[8], generation_batch_size=[16, 512], publish_every=[1]}",
        "plan.generation_accelerators=[32]", "workload.length={kind='fixed', max=8000}",
    )  # fmt: skip
    space, (few, many) = space_of(*some), made(*some)
    after, alone = (Screener(space.config, space.answers) for _ in range(2))
    after.screen(few)
    assert after.resolved(many.config).kv_cache_tokens == resolved_hardware(many.config).kv_cache_tokens
    assert after.resolved(few.config).kv_cache_tokens > 1.2 * after.resolved(many.config).kv_cache_tokens
    assert after.screen(many).estimate == alone.screen(many).estimate


def test_accelerators_of_two_kinds_are_split_and_never_generate_and_train_in_turn() -> None:
    two = ("hardware.generation_gpu=H20", "plan.generation_accelerators=[1]", "plan.generation_batch_size=[8]")
    reasons = {(one.family, one.reason) for one in rejected(*two, ALL_KINDS)}
    assert reasons == {(kind, Reason.TWO_KINDS) for kind in ("conventional", "partial_rollouts")}
    labels = {one.label for one in made(*two, ALL_KINDS) if one.family == "pipeline"}
    assert labels == {"pipeline 1 H20/3 H100 H=8"}
    assert "a pipeline would do" in refused(*two, "plan.schedulers=['conventional']")


DEEPSEEK = ("hardware.model=DeepSeek-V3", "plan={}", "plan.publish_every=[1]", "plan.generation_batch_size=[8]")


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        ((*DEEPSEEK, "cluster.accelerators=256"), [1, 32, 64]),
        ((*DEEPSEEK, "hardware.gpu=H200", "cluster.accelerators=64"), [1, 16, 32]),
        (("hardware.model=Qwen2.5-7B", "plan={}", "cluster.accelerators=256"), [1, 2, 4]),
    ],
)
def test_engines_hold_the_model_and_get_whole_heads(overrides: tuple[str, ...], sizes: list[int]) -> None:
    """1342 GB of weights: 17 to 24 H100s of 80 GB hold them, whatever is kept free, 10 to 14 H200s of 141 GB.

    Qwen2.5-7B has 28 heads: vLLM refuses to spread them over 8 accelerators.
    """
    assert list(engine_sizes(space_of(*overrides))) == sizes


@pytest.mark.parametrize(("kind", "engines_besides"), [("pipeline", 1), ("conventional", 0)])
def test_a_trainer_that_does_not_fit_is_refused_with_the_least_cluster_that_would_do(
    kind: str, engines_besides: int
) -> None:
    """The states alone, 16 bytes of each of 671e9 parameters, need 135 GPUs of 80 GB. Engines are of 32."""
    some = (*DEEPSEEK, f"plan.schedulers=['{kind}']")
    line = refused("cluster.accelerators=64", *some)
    ((training, least),) = (
        map(int, found)
        for found in re.findall(r"fits from (\d+) training accelerators on, cluster.accelerators=(\d+) at", line)
    )
    memory = space_of(*some).memory
    assert training >= 135
    assert memory.trainer_fits(training)
    assert not memory.trainer_fits(training - 1)
    assert least - 32 < training + 32 * engines_besides <= least
    assert not made(f"cluster.accelerators={least - 32}", *some)
    assert made(f"cluster.accelerators={least}", *some)


def test_the_same_size_at_another_split_is_another_layout_but_another_size_is_not() -> None:
    one, bigger, elsewhere = (
        own_candidate(space_of(*changes))
        for changes in ((), ("scheduler.generation_batch_size=16",), ("cluster.generation_accelerators=3",))
    )
    assert one.layout == bigger.layout != elsewhere.layout


# --------------------------------------------------------------------------------------------- limits, memory


def test_limits_are_checked_in_order_and_exactly() -> None:
    limits = Limits(mean_lag=2.0, gpu_hours=10.0, budget=30.0, price=4.0)
    assert limits.broken(2.0, 7.5) is None
    assert limits.broken(2.1, 20.0) is Reason.MEAN_LAG
    assert limits.broken(2.0, 10.1) is Reason.GPU_HOURS
    assert limits.broken(2.0, 7.6) is Reason.BUDGET


def test_a_budget_needs_a_price() -> None:
    numbers = "hardware={decode={kind='affine', step_s=0.01}, training={token_s=1e-4}}"
    assert refused("plan.budget=10.0", numbers) == (
        "plan.budget needs price.gpu_hour, as the catalogue has no price, got budget=10"
    )


@pytest.mark.parametrize("level", Level)
def test_training_memory_is_that_of_the_coefficients_of_the_level(level: Level) -> None:
    """At every level a 7B is trained on 8 GPUs: packs are as large as the memory holds."""
    memory = space_of("hardware.model='Qwen2.5-7B'", f"hardware.level='{level.value}'").memory
    assert memory.trainer_fits(8)
    assert not memory.trainer_fits(1)


def test_a_trainer_that_keeps_its_activations_needs_smaller_packs() -> None:
    """As the run file says: 16 384 tokens of a 7B do not fit beside its states unless they are computed again."""
    train = "train={model={path='m'}, task={name='math'}, optimizer={learning_rate=1e-6}, "
    train += "trainer={zero_stage=3, activation_checkpointing=false}}"
    overrides = ("hardware.model='Qwen2.5-7B'", train)
    assert not space_of(*overrides).memory.trainer_fits(64)
    for fits in ("train.trainer.pack_tokens=8192", "train.trainer.activation_checkpointing=true"):
        assert space_of(*overrides, fits).memory.trainer_fits(64)
    assert "[train.trainer]" in refused(*overrides, "plan.schedulers=['conventional']")


def workload_with(folder: Path, longest_prompt: int) -> str:
    """Return the override of a workload whose prompts and answers, of 30 tokens at most, are in a file."""
    source = folder / "lengths.csv"
    source.write_text(f"prompt_id,prompt_tokens,response_tokens\n0,40,9\n1,{longest_prompt},30\n")
    return f"workload={{group_size=2, prompt_tokens=1000, length={{kind='empirical', source='{source}', max=30}}}}"


@pytest.mark.slow
def test_plan_and_simulate_count_the_same_longest_rollout(tmp_path: Path) -> None:
    """The longest prompt of the source, 100, and 30 tokens of answer; it has prompts of its own, so 1000 is void."""
    lists = "plan={generation_batch_size=[8], tensor_parallel=[1], simulate=2, simulate_steps=4}"
    small = (workload_with(tmp_path, 100), lists)
    simulate(tiny_run(*small, "hardware.kv_cache_tokens=130"))
    assert planned(*small, "hardware.kv_cache_tokens=130").search.kept > 0
    with pytest.raises(ConfigError, match="kv_cache_tokens=129"):
        simulate(tiny_run(*small, "hardware.kv_cache_tokens=129"))
    assert Reason.ENGINE_MEMORY.value in refused(*small, "hardware.kv_cache_tokens=129")


def test_prompts_of_a_source_that_fit_into_no_engine_are_refused_by_plan_and_simulate(tmp_path: Path) -> None:
    """Qwen2.5-1.5B has 28 kB of cache per token: 3 million tokens are 86 GB."""
    table = workload_with(tmp_path, 3_000_000)
    with pytest.raises(ConfigError, match=r"cluster.tensor_parallel=1 is too small .* one rollout of 3000030 tokens"):
        simulate(tiny_run(table))
    assert "do not fit into an engine (fits from tensor_parallel=2 on)" in refused(table)
