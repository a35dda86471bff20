"""The planner: what it lists, rules out, simulates and recommends, and one clear line where nothing is left."""

from __future__ import annotations

import json
import math
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.planning import read_plan, save_plan
from pipelinerl import cli
from pipelinerl.cli.render_plan import print_plan
from pipelinerl.config.run import RunConfig
from pipelinerl.config.run_file import load_run, parse_run, with_overrides
from pipelinerl.errors import ConfigError, RunFailedError
from pipelinerl.hardware.coefficients import Level
from pipelinerl.records.steps import StepRow
from pipelinerl.theory.steady_state import Estimate
from sim import parallel
from sim.parallel import run_all_on_ray
from sim.planning import simulate as outcomes
from sim.planning.candidates import Screened, Screener, enumerate_candidates, own_candidate, screen_all, way
from sim.planning.explain import sensitivity
from sim.planning.search import choose_survivors, pareto_front, plan
from sim.planning.search_space import Limits, Reason, space_of
from sim.planning.simulate import Job, extended
from sim.run import simulate
from sim.stepbooks import simulate_steps

TINY: dict[str, Any] = {
    "optimizer_steps": 40,
    "cluster": {"accelerators": 4, "generation_accelerators": 2},
    "scheduler": {"train_batch_size": 8, "generation_batch_size": 8},
    "workload": {
        "group_size": 2,
        "prompt_tokens": 20,
        "length": {"kind": "lognormal", "mean": 100, "cv": 0.5, "max": 300},
    },
    "hardware": {"gpu": "H100", "model": "Qwen2.5-1.5B"},
    "plan": {
        "tensor_parallel": [1],
        "generation_batch_size": [4, 8, 16],
        "optimizer_steps_per_rl_step": [1, 2, 4],
        "simulate": 6,
        "simulate_steps": 12,
    },
}


class InThisProcess:
    """Runs what is submitted at once; processes are slow to start."""

    def __init__(self, workers: int, context: Any, *, initializer: Callable[[], None]) -> None:
        assert workers >= 1

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future

    def shutdown(self, *, wait: bool = True, cancel_futures: bool = False) -> None:
        """Nothing is left to end."""


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "ProcessPoolExecutor", InThisProcess)


def run(*overrides: str) -> RunConfig:
    return parse_run(with_overrides(TINY, overrides))


def fault(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(run(*overrides))
    return str(caught.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A plan with everything, made once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "ProcessPoolExecutor", InThisProcess)
        path = tmp_path_factory.mktemp("plan") / "out"
        plan(run("plan.price_per_gpu_hour=2.0"), out=path)
        yield path


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    return data


# ------------------------------------------------------------------------------------------- candidates


def labels(*overrides: str) -> list[str]:
    return [one.label for one in enumerate_candidates(space_of(run(*overrides)))]


def test_every_combination_of_the_lists_is_a_candidate() -> None:
    """3 splits of 4 GPUs * 3 H; conventional: 8 G answers on 4 engines need 2, 4, 8 slots each, and no more."""
    splits = [f"pipeline {split}/{4 - split} H={size}" for split in (1, 2, 3) for size in (4, 8, 16)]
    rounds = ["conventional H=4 G=1", "conventional H=4 G=2", "conventional H=4 G=4", "conventional H=8 G=4"]
    assert labels() == splits + rounds


def test_lists_of_bounds_queues_batches_and_engines_multiply_and_are_told_in_the_label() -> None:
    table = (
        "plan={schedulers=['pipeline'], generation_accelerators=[2], generation_batch_size=[8], tensor_parallel=[2], "
        "max_lag=[1, 9], lag_limit=4, ready_queue_size=[16, 24], train_batch_size=[8, 16]}"
    )
    assert labels(table) == [
        f"pipeline 2/2 H=8 TP=2{batch} queue={queue} max_lag={lag}"
        for batch in ("", " B=16")
        for queue in (16, 24)
        for lag in (1, 4)
    ]


def test_an_engine_needs_its_accelerators_and_someone_has_to_train() -> None:
    assert labels(
        "plan.tensor_parallel=[2]", "plan.generation_accelerators=[1, 2, 3, 4]", "plan.schedulers=['pipeline']"
    ) == [f"pipeline 2/2 H={size} TP=2" for size in (4, 8, 16)]


def test_choices_that_no_run_file_may_make_are_no_candidates() -> None:
    """Engines of 3 on 4 accelerators that all generate; queues shorter than a batch, the run file's own among them."""
    assert labels("plan.tensor_parallel=[3]", "plan.schedulers=['conventional']") == []
    assert labels("plan.tensor_parallel=[3]", "plan.generation_batch_size=[8]") == ["pipeline 3/1 H=8 TP=3"]
    table = (
        "plan={schedulers=['pipeline'], generation_accelerators=[2], generation_batch_size=[8], tensor_parallel=[1], "
        "train_batch_size=[8, 32]}"
    )
    assert labels(table, "plan.ready_queue_size=[16]") == ["pipeline 2/2 H=8 queue=16"]
    own = [one.config for one in enumerate_candidates(space_of(run(table, "scheduler.ready_queue_size=16")))]
    assert [one.scheduler.ready_queue_limit for one in own] == [16, 64]


def test_a_listed_value_that_no_candidate_can_have_is_a_fault_with_key_rule_and_value() -> None:
    assert fault("plan.tensor_parallel=[1, 3]", "plan.schedulers=['conventional']") == (
        "plan.tensor_parallel must hold divisors of cluster.accelerators=4, got 3"
    )
    assert fault("plan.tensor_parallel=[1, 2, 8]") == (
        "plan.tensor_parallel must hold divisors of cluster.accelerators=4 or sizes below cluster.accelerators=4, as "
        "others have to train, got 8"
    )
    assert fault("plan.tensor_parallel=[2]", "plan.generation_accelerators=[2, 3, 4]").splitlines() == [
        "plan.generation_accelerators must hold multiples of an engine, 2 accelerators, got 3",
        "plan.generation_accelerators must hold numbers below cluster.accelerators=4, as the others train, got 4",
    ]
    assert fault("plan.tensor_parallel=[1, 2]", "plan.generation_accelerators=[3]", "plan.schedulers=['pipeline']") == (
        "plan.tensor_parallel must hold divisors of a number of plan.generation_accelerators=[3], got 2"
    )
    assert fault("plan.optimizer_steps_per_rl_step=[4, 64]") == (
        "plan.optimizer_steps_per_rl_step must hold numbers of at most optimizer_steps=40, got 64"
    )
    assert fault("plan.ready_queue_size=[4, 16]") == (
        "plan.ready_queue_size must hold sizes of at least the train_batch_size, 8, got 4"
    )
    pipeline = "plan.schedulers=['pipeline']"
    assert fault(pipeline, "plan.ready_queue_size=[16]", "plan.train_batch_size=[8, 32]") == (
        "plan.train_batch_size must hold sizes of at most the largest plan.ready_queue_size, 16, got 32"
    )
    assert fault("scheduler.publish_every=3", "plan.max_lag=[1, 4]") == (
        "plan.max_lag must hold bounds of at least scheduler.publish_every - 1 = 2, got 1"
    )


def untried(*overrides: str) -> list[tuple[str, Any, str]]:
    rows = plan(run("plan.simulate=2", "plan.simulate_steps=4", *overrides))["search"]["not_tried"]
    return [(row["key"], row["value"], row["why"]) for row in rows]


def test_what_does_not_fit_by_default_is_left_out_without_a_word() -> None:
    """64 optimizer steps per RL step and engines of 8 are more than there are."""
    plain = "plan={simulate=2, simulate_steps=4, generation_batch_size=[8]}"
    assert plan(run(plain))["search"]["not_tried"] == []


def test_a_listed_value_that_turns_out_not_to_fit_or_is_another_is_told() -> None:
    assert untried("hardware.model=Qwen2.5-7B", "cluster.accelerators=8", "plan.tensor_parallel=[2, 8]") == [
        ("plan.tensor_parallel", 8, "no candidate with it fits: the attention heads do not divide by tensor_parallel")
    ]
    assert untried("plan.lag_limit=2", "plan.max_lag=[1, 9]", "plan.optimizer_steps_per_rl_step=[1, 4]") == [
        ("plan.optimizer_steps_per_rl_step", 4, "no candidate with it fits: lag_limit"),
        ("plan.max_lag", 9, "tried as the lag limit, 2"),
    ]
    assert untried("plan.schedulers=['conventional']", "plan.max_lag=[1]") == [
        ("plan.generation_batch_size", 16, "the same as a smaller one, whose slots are never all full"),
        ("plan.max_lag", [1], "none of plan.schedulers has it"),
    ]
    assert untried("plan.lag_limit=0", "plan.optimizer_steps_per_rl_step=[2]")[0] == (
        ("plan.schedulers", "conventional", "no candidate with it fits: lag_limit")
    )


def test_partial_rollouts_keep_a_bound_by_waiting_whatever_the_run_file_does() -> None:
    result = plan(
        run("scheduler.on_stale='drop'", "plan.schedulers=['partial_rollouts']", "plan.lag_limit=4", "plan.simulate=2")
    )
    assert result["search"]["complete"]
    assert result["recommended"]["scheduler"]["on_stale"] == "train"


def test_a_run_file_of_a_kind_that_is_not_asked_for_is_shown_and_not_recommended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With all slots it is by far the fastest, and as soon as its kind may be chosen it is."""
    slow = (
        "plan.generation_batch_size=[1]",
        "plan.generation_accelerators=[1]",
        "plan.optimizer_steps_per_rl_step=[1]",
    )
    small = ("scheduler.generation_batch_size=64", *slow, "plan.simulate=4")
    result = plan(run(*small, "plan.schedulers=['conventional']"))
    assert result["own"]["tokens_per_s"] > 1.5 * result["recommended"]["tokens_per_s"]
    assert result["recommended"]["family"] == "conventional"
    assert not result["own"]["among_schedulers"]
    assert result["own"]["label"] not in result["front"]
    assert {one["label"] for one in result["decisions"].values()} == {result["recommended"]["label"]}
    print_plan(result, "run.toml")
    assert "run file (only to compare with: plan.schedulers has no pipeline): recommended is 0." in (
        capsys.readouterr().out
    )
    asked = plan(run(*small, "plan.schedulers=['pipeline', 'conventional']"))
    assert asked["recommended"]["label"] == asked["own"]["label"]
    assert asked["own"]["among_schedulers"]


def test_a_run_file_alone_that_is_not_asked_for_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "run_all", lambda function, jobs, workers: (function(job) for job in jobs))

    def stop(_stage: str, done: int, _total: int) -> None:
        if done == 1:  # the run file, which has the most in progress, goes first
            raise KeyboardInterrupt

    with pytest.raises(RunFailedError, match="interrupted before the first simulation ended"):
        plan(run("scheduler.generation_batch_size=64", "plan.schedulers=['conventional']"), on_progress=stop, workers=1)


def test_engines_get_whole_heads() -> None:
    """Qwen2.5-7B has 28 heads: vLLM refuses to spread them over 8 accelerators."""
    some = ("cluster.accelerators=16", "hardware.model=Qwen2.5-7B", "plan={schedulers=['conventional']}")
    sizes = {one.config.cluster.tensor_parallel for one in enumerate_candidates(space_of(run(*some)))}
    assert sizes == {1, 2, 4}
    assert "by the attention heads do not divide by tensor_parallel (tensor_parallel of 1, 2, 4, 7, 14 would do)" in (
        fault(*some, "plan.tensor_parallel=[8]")
    )


def test_batches_are_whole_groups() -> None:
    with pytest.raises(ConfigError, match=r"plan.train_batch_size must hold multiples of .* got 7, group_size=2"):
        run("plan.train_batch_size=[8, 7]")


def test_a_decode_step_given_as_numbers_holds_for_its_own_engine_only() -> None:
    decode = "hardware.decode={kind='affine', step_s=0.01}"
    table = "plan={schedulers=['pipeline'], generation_accelerators=[2], generation_batch_size=[8]}"
    assert labels(decode, table) == ["pipeline 2/2 H=8"]
    assert labels(table) == ["pipeline 2/2 H=8", "pipeline 2/2 H=8 TP=2"]  # 4 and 8 leave nobody to train


def test_more_sequences_than_the_kv_cache_holds_are_not_tried_by_default() -> None:
    """71 + 20 tokens on average: 16 * 91 < 2500 < 32 * 91."""
    table = "plan={schedulers=['pipeline'], generation_accelerators=[2]}"
    assert labels(table, "hardware.kv_cache_tokens=2500") == [f"pipeline 2/2 H={size}" for size in (8, 16, 24)]


# ------------------------------------------------------------------------------------------ front, choice


POINTS = st.lists(st.tuples(st.integers(0, 6).map(float), st.integers(0, 6).map(float)), max_size=30)


def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one != other and one[0] >= other[0] and one[1] <= other[1]


@given(points=POINTS)
def test_the_front_is_what_nothing_beats_and_everything_else_is_beaten_or_equal(points: list[Any]) -> None:
    front = pareto_front(points)
    chosen = [points[index] for index in front]
    assert not [one for one in chosen for other in points if beats(other, one)]
    for point in points:
        assert point in chosen or any(beats(one, point) for one in chosen)
    assert chosen == sorted(chosen)
    assert len(set(chosen)) == len(chosen)


def some(label_family_rate_lag: list[tuple[str, str, float, float]]) -> list[Screened]:
    own = own_candidate(run())
    estimate = Estimate(
        step_s=1.0, generation_s=1.0, training_s=1.0, publishing_s=0.0, tokens_per_s=0.0, lag_mean=0.0, lag_max=0.0,
        start_s=0.0, cache_bound=False, colocated=False,
    )  # fmt: skip
    return [
        Screened(replace(own, label=label, family=family), replace(estimate, tokens_per_s=rate, lag_mean=lag))
        for label, family, rate, lag in label_family_rate_lag
    ]


def test_survivors_are_two_of_each_family_fast_ones_and_the_front() -> None:
    fast = [(f"p{index}", "pipeline", 100 - 2 * index, 20.0 + index) for index in range(10)]
    front = [("half", "pipeline", 52.0, 3.0), ("most", "pipeline", 80.5, 8.0)]
    slow = [("c1", "conventional", 30.0, 5.0), ("c2", "conventional", 20.0, 4.0), ("c3", "conventional", 10.0, 9.0)]
    chosen = [one.candidate.label for one in choose_survivors(some([*fast, *front, *slow]), 8)]
    assert chosen[:4] == ["p0", "p1", "c1", "c2"]
    assert "half" in chosen  # the least lag that reaches half of the best
    assert len(chosen) == 8
    assert choose_survivors(some(slow), 8) == choose_survivors(some(slow), 3)


# --------------------------------------------------------------------------------------------- outcomes


@pytest.mark.parametrize(
    "overrides",
    [
        ("scheduler.micro_batch_size=4",),
        ("scheduler.max_lag=1", "scheduler.on_stale='drop'", "scheduler.filter_no_signal=true"),
        ("scheduler.weight_update='abort'", "workload.length.cv=1.5"),
        ("scheduler.kind=conventional", "scheduler.optimizer_steps_per_rl_step=4"),
        ("scheduler.kind=conventional", "scheduler.partial_rollouts=true"),
    ],
)
def test_the_short_books_say_what_the_full_ones_say(overrides: tuple[str, ...]) -> None:
    rows: list[StepRow] = []
    simulate(run(*overrides), on_step=rows.append)
    short = simulate_steps(run(*overrides))
    assert [sum(one.tokens_by_lag) for one in short] == [one.tokens for one in rows]
    assert [one[:-1] for one in short] == [
        (one.time_s, one.train_s, one.publish_s, one.wait_s, one.tokens, one.lag_mean, one.lag_max) for one in rows
    ]


def row(step: int, time_s: float, **changes: float) -> StepRow:
    numbers: dict[str, Any] = {
        "train_s": 1.0, "publish_s": 0.25, "wait_s": 0.75, "samples": 8, "tokens": 100, "lag_mean": 2.0, "lag_max": 3,
        "lag_in_flight_mean": 1.0, "lag_in_queue_mean": 1.0, "in_progress": 8, "ready": 0, "reward_mean": 0.5,
        "length_mean": 12.5,
    }  # fmt: skip
    return StepRow(**{**numbers, **changes, "step": step, "time_s": time_s})


def test_the_second_half_of_a_simulation_stands_for_the_rest_of_the_run() -> None:
    """Start-up: 5 s and little lag for 2 steps; then 2 s each. 40 steps last 5 + 38 * 2 s."""
    rows = [row(1, 4.0, tokens=60), row(2, 5.0, lag_mean=0.5), row(3, 7.0), row(4, 9.0, lag_mean=4.0, lag_max=6)]
    outcome = extended(Job(own_candidate(run()), Level.CENTRAL, 4), rows)
    assert (outcome.step_s, outcome.seconds) == (2.0, 81.0)
    assert outcome.tokens_per_s == pytest.approx((60 + 39 * 100) / 81)
    assert (outcome.lag_mean, outcome.lag_max) == (3.0, 6)
    assert (outcome.training, outcome.publishing, outcome.waiting) == (0.5, 0.125, 0.375)
    assert outcome.gpu_hours == pytest.approx(81 * 4 / 3600)


def test_of_conventional_rl_only_whole_rl_steps_count() -> None:
    """G = 2, 5 steps simulated: steps 1 and 2 are an RL step of 10 s, 3 and 4 one of 6 s."""
    config = run("scheduler.kind=conventional", "scheduler.optimizer_steps_per_rl_step=2")
    rows = [row(1, 9.0), row(2, 10.0), row(3, 15.0), row(4, 16.0), row(5, 23.0)]
    outcome = extended(Job(own_candidate(config), Level.CENTRAL, 5), rows)
    assert (outcome.step_s, outcome.seconds) == (3.0, 16 + 36 * 3.0)


def test_a_run_that_was_simulated_as_a_whole_is_not_extended() -> None:
    """Its last RL step has one optimizer step and not two, and takes as long as it took."""
    conventional = ("scheduler.kind=conventional", "scheduler.optimizer_steps_per_rl_step=2", "optimizer_steps=5")
    rows = [row(1, 9.0), row(2, 10.0), row(3, 15.0), row(4, 16.0), row(5, 23.0)]
    outcome = extended(Job(own_candidate(run(*conventional)), Level.CENTRAL, 5), rows)
    assert (outcome.step_s, outcome.seconds, outcome.tokens_per_s) == (3.0, 23.0, 500 / 23)


# ----------------------------------------------------------------------------------------------- result


def test_the_recommendation_is_the_fastest_and_among_equals_the_one_with_the_least_lag(result: dict[str, Any]) -> None:
    most = max(one["tokens_per_s"] for one in result["simulated"])
    equals = [one for one in result["simulated"] if one["tokens_per_s"] >= 0.97 * most]
    best = min(equals, key=lambda one: one["lag_mean"])
    assert result["recommended"]["label"] == best["label"]
    assert result["recommended"]["tokens_per_s"] == best["tokens_per_s"]


def test_the_recommended_run_file_loads_and_gives_what_the_plan_says(folder: Path, result: dict[str, Any]) -> None:
    config = load_run(folder / "recommended.toml")
    best = result["recommended"]
    assert config.optimizer_steps == 40
    assert config.cluster.model_dump(mode="json") == best["cluster"]
    assert config.scheduler.model_dump(mode="json") == best["scheduler"]
    assert config.hardware == run().hardware
    assert simulate(config).tokens_per_s == pytest.approx(best["tokens_per_s"], rel=0.1)


def test_everything_that_is_told_is_told_with_its_band_hours_and_cost(result: dict[str, Any]) -> None:
    for one in (result["recommended"], result["runner_up"], result["own"]):
        band = one["band"]
        assert list(band) == ["optimistic", "central", "pessimistic"]
        assert band["optimistic"]["tokens_per_s"] > band["central"]["tokens_per_s"] == one["tokens_per_s"]
        assert band["central"]["tokens_per_s"] > band["pessimistic"]["tokens_per_s"]
        assert one["gpu_hours"] == pytest.approx(4 * one["hours"])
        assert one["cost_per_1000_steps"] == pytest.approx(one["gpu_hours"] * 2.0 / 40 * 1000)
        assert one["training"] + one["publishing"] + one["waiting"] == pytest.approx(1.0)
    assert result["own"]["recommended_over_own"] == pytest.approx(
        result["recommended"]["tokens_per_s"] / result["own"]["tokens_per_s"]
    )


def test_front_families_and_decisions_name_what_was_simulated(result: dict[str, Any]) -> None:
    simulated = {one["label"]: one for one in result["simulated"]}
    assert result["search"]["simulated"] == len(simulated) == 6
    points = [(simulated[label]["tokens_per_s"], simulated[label]["lag_mean"]) for label in result["front"]]
    assert pareto_front(points) == list(range(len(points)))
    for family, one in result["families"].items():
        assert one["family"] == family
        assert one["tokens_per_s"] >= max(
            0.97 * other["tokens_per_s"] for other in simulated.values() if other["family"] == family
        )
    assert set(result["decisions"]) == {"optimistic", "pessimistic"}


def test_the_runner_up_is_another_way_and_says_why_it_lost(result: dict[str, Any]) -> None:
    best, other = result["recommended"], result["runner_up"]
    assert (best["family"], best["cluster"]["generation_accelerators"]) != (
        other["family"],
        other["cluster"]["generation_accelerators"],
    )
    slower = 1 - other["tokens_per_s"] / best["tokens_per_s"]
    assert other["why"].startswith(f"{slower:.0%} slower" if slower > 0.03 else "as fast within 3%")


def test_sensitivity_is_of_single_coefficients_the_largest_first(result: dict[str, Any]) -> None:
    rows = result["sensitivity"]
    effects = [max(abs(row[level]["throughput"] - 1) for level in row if level != "coefficient") for row in rows]
    assert effects == sorted(effects, reverse=True)
    assert {"training_step_s", "step_overhead_s"} <= {row["coefficient"] for row in rows}
    (step,) = [row for row in rows if row["coefficient"] == "training_step_s"]
    assert step["optimistic"]["throughput"] >= 1 >= step["pessimistic"]["throughput"]


def test_what_is_faster_whatever_the_coefficients_is_put_down_to_none_of_them() -> None:
    """After Ctrl-C the recommendation may be far from the best that was screened."""
    space = space_of(run())
    kept, _ = screen_all(enumerate_candidates(space), space, Screener(space.config, space.answers))
    slow, fast = (choose(kept, key=lambda one: one.tokens_per_s).candidate for choose in (min, max))
    rows = sensitivity(space, slow, [one.candidate for one in kept], {slow.label: 1.0}, least=0.06)
    assert rows
    assert fast.label not in {row[level]["instead"] for row in rows for level in row if level != "coefficient"}


def test_the_same_plan_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    plan(run("plan.price_per_gpu_hour=2.0"), out=tmp_path / "again", workers=1)
    for name in ("plan.json", "recommended.toml"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_a_calibrated_coefficient_and_hardware_in_numbers_have_no_band() -> None:
    result = plan(run("hardware.coefficients={training_step_s=0.7}", "plan.simulate=3"))
    assert "training_step_s" not in {row["coefficient"] for row in result["sensitivity"]}
    numbers = plan(
        parse_run(
            {
                **TINY,
                "hardware": {
                    "decode": {"kind": "affine", "step_s": 0.01},
                    "training": {"token_s": 1e-4, "step_s": 0.1},
                },
                "plan": {"generation_batch_size": [8], "simulate": 3, "simulate_steps": 6},
            }
        )
    )
    assert list(numbers["recommended"]["band"]) == ["central"]
    assert (numbers["sensitivity"], numbers["decisions"]) == ([], {})


def test_verdict_of_a_starved_trainer_is_that_more_generation_helps() -> None:
    table = (
        "plan={schedulers=['pipeline'], generation_accelerators=[1], generation_batch_size=[2], tensor_parallel=[1]}"
    )
    fast = "hardware.training={token_s=1e-6}"
    verdict = plan(run(table, "plan.simulate_steps=12", fast))["recommended"]["verdict"]
    assert verdict.startswith("generation-bound: the trainer waits ")
    assert "; 1 more generation GPU gives +" in verdict


def test_verdict_of_a_slow_trainer_is_that_more_training_helps() -> None:
    table = (
        "plan={schedulers=['pipeline'], generation_accelerators=[2], generation_batch_size=[32], tensor_parallel=[1]}"
    )
    slow = ("hardware.training={token_s=4e-3}", "hardware.weights={}")
    verdict = plan(run(table, "plan.simulate_steps=12", *slow))["recommended"]["verdict"]
    assert verdict.startswith("training-bound: generation could give ")
    assert verdict.endswith("1 more training GPU gives +50%")  # 3 train in place of 2


def test_verdict_of_a_tight_bound_on_the_lag_is_what_it_costs() -> None:
    table = (
        "plan={schedulers=['pipeline'], generation_accelerators=[2], generation_batch_size=[16], tensor_parallel=[1], "
        "lag_limit=0}"
    )
    result = plan(run(table, "plan.simulate_steps=12", "hardware.training={token_s=1e-5}"))
    assert result["recommended"]["lag_max"] == 0
    assert result["recommended"]["scheduler"]["max_lag"] == 0
    assert result["recommended"]["verdict"].startswith("lag-bound: max_lag=0 makes the trainer wait ")


# --------------------------------------------------------------------------------------------- limits


def test_the_bound_on_lag_is_kept_by_every_kind_of_scheduler() -> None:
    kinds = "plan.schedulers=['pipeline', 'conventional', 'one_step_off', 'partial_rollouts']"
    result = plan(run(kinds, "plan.lag_limit=2", "plan.simulate=8"))
    within = [one for one in result["simulated"] if not one["label"].endswith("(run file)")]
    assert {one["family"] for one in within} == {"pipeline", "conventional", "one_step_off", "partial_rollouts"}
    assert max(one["lag_max"] for one in within) <= 2
    assert result["recommended"]["lag_max"] <= 2


def test_a_mean_lag_limit_holds_for_what_is_recommended() -> None:
    assert plan(run("plan.mean_lag_limit=1.2"))["recommended"]["lag_mean"] <= 1.2


def test_min_ess_bounds_the_modelled_ess_of_what_is_recommended() -> None:
    """By Jensen's inequality 1 / E[exp(0.25 lag)] is at most exp(-0.25 E[lag])."""
    result = plan(run("plan.min_ess=0.7", "drift.exponent=1.0", "drift.rates=[0.25]"))
    best = result["recommended"]
    assert best["ess"] < math.exp(-0.25 * best["lag_mean"])
    assert best["ess"] >= 0.7


def test_limits_are_checked_in_order_and_exactly() -> None:
    limits = Limits(lag=None, mean_lag=2.0, min_ess=None, drift=None, gpu_hours=10.0, budget=30.0, price=4.0)
    assert limits.broken(2.0, 7.5) is None
    assert limits.broken(2.1, 20.0) is Reason.MEAN_LAG
    assert limits.broken(2.0, 10.1) is Reason.GPU_HOURS
    assert limits.broken(2.0, 7.6) is Reason.BUDGET
    assert limits.broken(2.1, 8.0, slack=1.1) is None


def test_a_model_that_fits_nowhere_says_which_engine_would_do() -> None:
    line = fault("hardware.model='Llama-3.1-70B'", "plan.schedulers=['pipeline']")
    assert line == (
        "plan: no feasible pipeline among 9: 9 by weights and the longest rollout do not fit into an engine (fits from "
        "tensor_parallel=2 on)"
    )


def test_a_model_that_needs_more_gpus_than_there_are_says_so() -> None:
    """671e9 parameters of 2 bytes over 73.5 GB each are 18.3; of 128 heads 32 engines have as many each."""
    assert (
        fault("hardware.model='DeepSeek-V3'")
        .splitlines()[0]
        .endswith("(fits from tensor_parallel=32 on, and there are 4)")
    )


def test_every_family_says_what_keeps_it_out_and_what_would_relax_it() -> None:
    lines = fault("plan.gpu_hours=1e-4", "plan.optimizer_steps_per_rl_step=[4]", "plan.lag_limit=2").splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("plan: no feasible pipeline among 9: 9 by gpu_hours (gpu_hours=1 would do)")
    assert lines[1] == "plan: no feasible conventional among 2: 2 by lag_limit (lag_limit=3 would do)"


@pytest.mark.parametrize("level", Level)
def test_what_fits_into_the_trainer_is_what_the_coefficients_of_the_level_need(level: Level) -> None:
    """At every level a 7B is trained on 8 GPUs: packs are as large as the memory holds."""
    memory = space_of(run("hardware.model='Qwen2.5-7B'", f"hardware.level='{level.value}'")).memory
    assert memory.trainer_fits(8)
    assert not memory.trainer_fits(1)


def test_a_trainer_that_keeps_its_activations_needs_smaller_packs() -> None:
    """As the run file says: 16 384 tokens of a 7B do not fit beside its states unless they are computed again."""
    train = "train={model={path='m'}, task={name='math'}, optimizer={learning_rate=1e-6}, trainer={zero_stage=3}}"
    overrides = ("hardware.model='Qwen2.5-7B'", train)
    assert not space_of(run(*overrides)).memory.trainer_fits(64)
    assert space_of(run(*overrides, "train.trainer.pack_tokens=8192")).memory.trainer_fits(64)
    assert space_of(run(*overrides, "train.trainer.activation_checkpointing=true")).memory.trainer_fits(64)
    assert "[train.trainer]" in fault(*overrides, "plan.schedulers=['conventional']")


def test_training_that_does_not_fit_says_how_many_accelerators_would_do() -> None:
    line = fault("hardware.model='Qwen2.5-32B'", "plan.schedulers=['conventional']", "plan.tensor_parallel=[2]")
    assert "training does not fit into the memory of the accelerators that train (fits from " in line


def test_a_limit_on_the_mean_lag_that_nothing_keeps_says_the_least_there_is() -> None:
    line = fault("plan.mean_lag_limit=0.01", "plan.schedulers=['pipeline']")
    assert line.startswith("plan: no feasible pipeline among 9: 9 by mean_lag_limit (mean_lag_limit=")
    least = float(line.partition("mean_lag_limit=")[2].partition(" ")[0])
    assert (
        plan(run(f"plan.mean_lag_limit={least * 1.2}", "plan.schedulers=['pipeline']"))["recommended"]["lag_mean"]
        > 0.01
    )


def test_a_budget_needs_a_price() -> None:
    data = with_overrides(TINY, ["plan.budget=10.0"])
    data["hardware"] = {"decode": {"kind": "affine", "step_s": 0.01}, "training": {"token_s": 1e-4}}
    with pytest.raises(ConfigError) as caught:
        plan(parse_run(data))
    assert str(caught.value) == (
        "plan.budget needs plan.price_per_gpu_hour, as the catalogue has no price, got budget=10"
    )


def test_plan_and_simulate_count_the_same_longest_rollout(tmp_path: Path) -> None:
    """The longest prompt of the source, 100, and 30 tokens of answer; it has prompts of its own, so 1000 is void."""
    source = tmp_path / "lengths.csv"
    source.write_text("prompt_id,prompt_tokens,response_tokens\n0,40,9\n1,100,30\n")
    table = f"workload={{group_size=2, prompt_tokens=1000, length={{kind='empirical', source='{source}', max=30}}}}"
    small = (table, "plan={generation_batch_size=[8], tensor_parallel=[1], simulate=2, simulate_steps=4}")
    simulate(run(*small, "hardware.kv_cache_tokens=130"))
    assert plan(run(*small, "hardware.kv_cache_tokens=130"))["search"]["kept"] > 0
    with pytest.raises(ConfigError, match="130 tokens in all, got kv_cache_tokens=129"):
        simulate(run(*small, "hardware.kv_cache_tokens=129"))
    assert "weights and the longest rollout do not fit" in fault(*small, "hardware.kv_cache_tokens=129")


def test_prompts_of_a_source_that_fit_into_no_engine_are_told_alike_by_plan_and_simulate(tmp_path: Path) -> None:
    """Qwen2.5-1.5B has 28 kB of cache per token: 3 million tokens are 86 GB."""
    source = tmp_path / "lengths.csv"
    source.write_text("prompt_id,prompt_tokens,response_tokens\n0,40,9\n1,3000000,30\n")
    table = f"workload={{group_size=2, length={{kind='empirical', source='{source}', max=30}}}}"
    with pytest.raises(ConfigError, match=r"cluster.tensor_parallel=1 is too small .* one rollout of 3000030 tokens"):
        simulate(run(table))
    assert "do not fit into an engine (fits from tensor_parallel=2 on)" in fault(table)


# ------------------------------------------------------------------------------------- interrupts, Ray


def test_on_ctrl_c_what_has_ended_is_kept(tmp_path: Path) -> None:
    def stop(_stage: str, done: int, _total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    result = plan(run(), out=tmp_path / "out", on_progress=stop)
    assert (result["search"]["simulated"], result["search"]["complete"]) == (2, False)
    assert list(result["recommended"]["band"]) == ["central"]
    assert (tmp_path / "out" / "recommended.toml").exists()


def test_on_ctrl_c_before_anything_has_ended_there_is_no_plan(tmp_path: Path) -> None:
    def stop(_stage: str, _done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(RunFailedError, match="interrupted before the first simulation ended"):
        plan(run(), out=tmp_path / "out", on_progress=stop)
    assert not (tmp_path / "out").exists()


def double(number: int) -> int:
    return 2 * number


def test_jobs_go_to_the_ray_cluster_and_it_is_left_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    ray = types.SimpleNamespace(
        init=lambda address, **_: calls.append(f"init {address}"),
        remote=lambda function: types.SimpleNamespace(remote=lambda job: (function, job)),
        wait=lambda waiting: ([waiting[-1]], waiting[:-1]),
        get=lambda reference: reference[0](reference[1]),
        shutdown=lambda: calls.append("shutdown"),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert list(run_all_on_ray(double, [1, 2, 3], address="auto")) == [6, 4, 2]
    assert calls == ["init auto", "shutdown"]


def test_without_ray_or_a_cluster_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="--ray auto needs Ray; install it with: pip install ray"):
        plan(run(), ray_address="auto")

    def refuse(**_: Any) -> None:
        raise ConnectionError("no cluster\nmore")

    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(init=refuse))
    with pytest.raises(ConfigError) as caught:
        plan(run(), ray_address="here:1")
    assert str(caught.value) == "--ray must be the address of a running Ray cluster, got here:1: no cluster"


# --------------------------------------------------------------------------------- table, figures, command


def test_the_table_says_what_why_and_what_it_was_compared_with(
    result: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    print_plan(result, "run.toml")
    text = capsys.readouterr().out
    assert "run.toml: 13 candidates screened, 6 simulated" in text
    for key in ("recommended", "runner_up", "own"):
        assert result[key]["label"].removesuffix(" (run file)") in text
        assert f"{result[key]['tokens_per_s']:,.0f}" in text
    assert f"bottleneck: {result['recommended']['verdict']}" in text


def test_the_plan_is_drawn_and_a_broken_one_is_one_line(folder: Path, result: dict[str, Any], tmp_path: Path) -> None:
    read = read_plan(folder)
    assert read.recommended.tokens_per_s == result["recommended"]["tokens_per_s"]
    assert [one.label for one in read.front] == result["front"]
    names = {path.name for path in save_plan(folder, tmp_path / "figures")}
    assert {"plan_throughput_against_lag.png", "plan_throughput_against_lag.pdf"} <= names
    (tmp_path / "plan.json").write_text(
        json.dumps({**result, "screened": {"family": ["x"], "tokens_per_s": [], "lag_mean": []}})
    )
    with pytest.raises(ConfigError, match="the columns of screened must be equally long"):
        read_plan(tmp_path)


@pytest.mark.filterwarnings("default")
def test_the_command_prints_json_and_keeps_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import tomli_w

    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(TINY))
    out = tmp_path / "out"
    monkeypatch.setattr(cli, "_draw", lambda folders: [])
    monkeypatch.setattr(
        sys, "argv", ["pipelinerl", "plan", str(path), "--set", "plan.simulate=3", "--out", str(out), "--json"]
    )
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 0
    assert json.loads(capsys.readouterr().out) == json.loads((out / "plan.json").read_text())
    monkeypatch.setattr(sys, "argv", ["pipelinerl", "plan", str(path), "--out", str(out)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert (
        capsys.readouterr().err
        == f"pipelinerl: --out must be a folder without a run, got {out}, which holds plan.json\n"
    )


def test_the_same_size_at_another_split_is_another_way_but_another_size_is_not() -> None:
    one, bigger, elsewhere = (
        own_candidate(run(*changes))
        for changes in ((), ("scheduler.generation_batch_size=16",), ("cluster.generation_accelerators=3",))
    )
    assert way(one) == way(bigger) != way(elsewhere)
