"""Axes: the combinations that are candidates, and the reasons why a listed value is in none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_plan import planned, refused, tiny_run

from pipelinerl.config.run import ClusterConfig, PlanConfig, RunConfig, SchedulerConfig, WorkloadConfig, load_run
from pipelinerl.config.train import TrainConfig, TrainerConfig
from pipelinerl.errors import ConfigError
from pipelinerl.scheduler.kinds import KINDS
from sim.planning.screen import Rejected, candidate_of
from sim.planning.space import AXES, NOT_SEARCHED, Reason, SearchSpace, all_choices, label_of

ONE_SPLIT = "plan={schedulers=['pipeline'], generation_accelerators=[2], generation_batch_size=[8], publish_every=[1]}"


PIPELINE, CONVENTIONAL = "plan.schedulers=['pipeline']", "plan.schedulers=['conventional']"


def test_every_list_of_the_table_is_an_axis_and_every_kind_names_axes() -> None:
    lists = {name for name, field in PlanConfig.model_fields.items() if "list" in str(field.annotation)}
    assert {axis.name for axis in AXES} == lists
    assert {name for kind in KINDS for name in kind.axes} == {axis.name for axis in AXES if not axis.every_kind}


MANY_LISTS = (
    "plan={schedulers=['pipeline'], generation_accelerators=[2], generation_batch_size=[8], tensor_parallel=[2], "
    "max_lag=[1, 9], lag_limit=4, ready_queue_size=[16, 24], train_batch_size=[8, 16], publish_every=[1, 3]}"
)
NO_PUBLICATIONS = "plan={generation_accelerators=[2], generation_batch_size=[8], tensor_parallel=[1]}"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        pytest.param((), [*(f"pipeline {split}/{4 - split} H={size}" for split in (1, 2, 3) for size in (4, 8, 16)),
            "conventional H=4 G=1", "conventional H=4 G=2", "conventional H=4 G=4", "conventional H=8 G=4"],
            id="3 splits * 3 H; conventional: 8 G answers on 4 engines need 2, 4, 8 slots each, and no more"),
        pytest.param((MANY_LISTS,), [f"pipeline 2/2 H=8 TP=2{batch} queue={queue}{publish} max_lag={lag}"
            for batch in ("", " B=16") for queue in (16, 24)
            for publish, lags in (("", (1, 4)), (" publish_every=3", (4,))) for lag in lags],
            id="lists of bounds, queues, batches and engines multiply and are in the label"),
        pytest.param((NO_PUBLICATIONS, PIPELINE, "scheduler.publish_every=6"),
            [f"pipeline 2/2 H=8{part}" for part in ("", *(f" publish_every={n}" for n in (2, 3, 4, 6, 8)))],
            id="publications are searched by default, with the run file's own"),
        pytest.param((NO_PUBLICATIONS, CONVENTIONAL, "plan.optimizer_steps_per_rl_step=[2]"),
            ["conventional H=8 G=2"], id="but where a kind has none"),
        pytest.param(("plan.tensor_parallel=[2]", "plan.generation_accelerators=[1, 2, 3, 4]", PIPELINE),
            [f"pipeline 2/2 H={size} TP=2" for size in (4, 8, 16)],
            id="an engine needs its accelerators and someone has to train"),
        pytest.param(("plan.tensor_parallel=[3]", "plan.generation_batch_size=[8]"),
            ["pipeline 3/1 H=8 TP=3", *(f"conventional H=8 G={steps} TP=3" for steps in (1, 2, 4))],
            id="engines of 3 with one that trains, or that stands idle"),
        pytest.param((ONE_SPLIT, "plan.tensor_parallel=[1]", "plan.train_batch_size=[8, 32]",
            "plan.ready_queue_size=[16]"), ["pipeline 2/2 H=8 queue=16"], id="a queue is not shorter than a batch"),
        pytest.param((ONE_SPLIT, "hardware.decode={kind='affine', step_s=0.01}"), ["pipeline 2/2 H=8"],
            id="a decode step in numbers holds for its own engine only"),
        pytest.param((ONE_SPLIT,), ["pipeline 2/2 H=8", "pipeline 2/2 H=8 TP=2"], id="4 and 8 leave nobody to train"),
        pytest.param(("plan={schedulers=['pipeline'], generation_accelerators=[2]}", "plan.publish_every=[1]",
            "hardware.kv_cache_tokens=2500"),
            [f"pipeline 2/2 H={size}" for size in (8, 16, 24)],
            id="71 + 20 tokens on average: 16 * 91 < 2500 < 32 * 91"),
    ],
)  # fmt: skip
def test_every_combination_that_a_run_file_may_make_is_a_candidate(
    overrides: tuple[str, ...], expected: list[str]
) -> None:
    space = SearchSpace.of(tiny_run(*overrides))
    assert [label_of(choice, space) for choice in all_choices(space)] == expected


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (("plan.tensor_parallel=[1, 2, 8]",),
            ["plan.tensor_parallel must hold sizes of at most cluster.accelerators=4, got 8"]),
        (("plan.tensor_parallel=[1, 4]", "plan.schedulers=['pipeline']"),
            ["plan.tensor_parallel must hold sizes below cluster.accelerators=4, as others have to train, got 4"]),
        (("plan.tensor_parallel=[2]", "plan.generation_accelerators=[2, 3, 4]"),
            ["plan.generation_accelerators must hold multiples of an engine, 2 accelerators, got 3",
            "plan.generation_accelerators must hold numbers below cluster.accelerators=4, as the others train, got "
            "4"]),
        (("plan.tensor_parallel=[1, 2]", "plan.generation_accelerators=[3]", "plan.schedulers=['pipeline']"),
            ["plan.tensor_parallel must hold divisors of a number of plan.generation_accelerators=[3], got 2"]),
        (("plan.optimizer_steps_per_rl_step=[4, 64]",),
            ["plan.optimizer_steps_per_rl_step must hold numbers of at most optimizer_steps=40, got 64"]),
        (("plan.ready_queue_size=[4, 16]",),
            ["plan.ready_queue_size must hold sizes of at least the train_batch_size, 8, got 4"]),
        (("plan.schedulers=['pipeline']", "plan.ready_queue_size=[16]", "plan.train_batch_size=[8, 32]"),
            ["plan.train_batch_size must hold sizes of at most the largest plan.ready_queue_size, 16, got 32"]),
        (("plan.publish_every=[3, 4]", "plan.max_lag=[1, 4]"),
            ["plan.max_lag must hold bounds of at least publish_every - 1 = 2, got 1"]),
        (("plan.publish_every=[2, 41]",),
            ["plan.publish_every must hold numbers of at most optimizer_steps=40, got 41"]),
    ],
)  # fmt: skip
def test_a_listed_value_that_no_candidate_can_have_is_refused(overrides: tuple[str, ...], lines: list[str]) -> None:
    assert refused(*overrides).splitlines() == lines


def test_batches_are_whole_groups() -> None:
    with pytest.raises(ConfigError, match=r"plan.train_batch_size must hold multiples of .* got 7, group_size=2"):
        tiny_run("plan.train_batch_size=[8, 7]")


NO_FIT = "no candidate with it fits: "


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        pytest.param(("plan={generation_batch_size=[8]}",), [], id="a list left out holds what fits"),
        pytest.param(("hardware.model=Qwen2.5-7B", "cluster.accelerators=8", "plan.tensor_parallel=[2, 8]"),
            [("plan.tensor_parallel", 8, f"{NO_FIT}the attention heads do not divide by tensor_parallel")],
            id="engines get whole heads"),
        pytest.param(("plan.lag_limit=2", "plan.max_lag=[1, 9]", "plan.optimizer_steps_per_rl_step=[1, 4]"),
            [("plan.optimizer_steps_per_rl_step", 4, f"{NO_FIT}lag_limit"),
            ("plan.max_lag", 9, "tried as the lag limit, 2")], id="the lag limit"),
        pytest.param(("plan.schedulers=['conventional']", "plan.max_lag=[1]"),
            [("plan.generation_batch_size", 16, "the same as a smaller one, whose slots are never all full"),
            ("plan.publish_every", [1], "none of plan.schedulers has it"),
            ("plan.max_lag", [1], "none of plan.schedulers has it")],
            id="more slots than sequences; a list that no kind has"),
        pytest.param(("plan={generation_batch_size=[8], optimizer_steps_per_rl_step=[2], lag_limit=0}",),
            [("plan.schedulers", "conventional", f"{NO_FIT}lag_limit"),
            ("plan.optimizer_steps_per_rl_step", 2, f"{NO_FIT}lag_limit")], id="a kind of schedule"),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_a_listed_value_that_does_not_fit_or_equals_another_is_reported(
    overrides: tuple[str, ...], expected: list[tuple[str, Any, str]]
) -> None:
    rows = planned(*overrides, "plan.simulate=2", "plan.simulate_steps=4").search.not_tried
    assert [(row.key, row.value, row.why) for row in rows] == expected


# Every key that a user may turn is an axis or has the reason why it is none.

TIMEOUTS = ("start_timeout_s", "step_timeout_s", "collective_timeout_s")
OTHERS = {f"train.trainer.{name}" for name in ("kind", *TIMEOUTS, "restarts")}
"""Keys of these tables that move neither throughput nor lag."""
TABLES = {
    "cluster": ClusterConfig,
    "scheduler": SchedulerConfig,
    "workload": WorkloadConfig,
    "train.trainer": TrainerConfig,
}


def test_every_key_of_cluster_schedule_workload_and_trainer_is_searched_or_has_the_reason_why_not() -> None:
    keys = {f"{table}.{name}" for table, model in TABLES.items() for name in model.model_fields}
    searched, reasons = {axis.key for axis in AXES}, set(NOT_SEARCHED)
    assert not searched & reasons
    assert keys - OTHERS <= searched | reasons
    assert "engine" in TrainConfig.model_fields
    others = {"train.engine.gpu_memory_utilization", "train.transport", *RunConfig.model_fields}
    assert reasons <= keys | others  # none is of a key that is gone


# ------------------------------------------------------------------------------------------------ long answers

LONG = (
    "cluster.accelerators=64", "cluster.generation_accelerators=48", "scheduler.train_batch_size=128",
    "workload.length.mean=24000", "workload.length.max=131072", PIPELINE, "plan.tensor_parallel=[4]",
    "plan.generation_accelerators=[44, 48, 62]", "plan.generation_batch_size=[96]", "plan.publish_every=[1]",
)  # fmt: skip
"""Qwen2.5-7B with 128k-token answers on 64 H100s; 32,853 tokens a rank hold a quarter of the longest rollout."""
QWEN7B = Path(__file__).parents[3] / "examples" / "plan_qwen7b_128_h100.toml"


def long_answers(*overrides: str) -> list[str | Reason]:
    space = SearchSpace.of(load_run(QWEN7B, [*LONG, *overrides]))
    candidates = [candidate_of(choice, space) for choice in all_choices(space)]
    return [one.reason if isinstance(one, Rejected) else one.label.partition(" TP=4")[2] for one in candidates]


def test_the_fewest_ranks_that_hold_the_longest_rollout_share_rows() -> None:
    """Of 20 and 16 ranks 4 can; 7B has 28 heads, so 8 cannot. Two ranks alone do not hold the states."""
    assert long_answers("train.trainer.pack_tokens=33000") == [" sequence_parallel=4", " sequence_parallel=4"]
    assert long_answers("train.trainer.pack_tokens=66000") == [" sequence_parallel=2", " sequence_parallel=2"]
    assert long_answers("train.trainer.pack_tokens=132000") == ["", ""]
    assert long_answers("train.trainer.pack_tokens=32000") == [Reason.ROW] * 2
    # Of 20 ranks none are divided by 8, stated or not, and 7B's 28 heads neither.
    stated = ("train.trainer.pack_tokens=33000", "train.trainer.sequence_parallel=8")
    assert long_answers(*stated) == []
