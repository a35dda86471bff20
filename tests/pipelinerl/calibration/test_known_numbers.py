"""Three numbers of a user: the calibrated model gives them back."""

from typing import Any

import pytest
from calibrated import NAMED, RUN, run_of

from pipelinerl.calibration.solve import HardwareFit, calibrate_numbers
from pipelinerl.config.faults import FaultConfig
from pipelinerl.config.resolve import resolved_hardware
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.costs import HardwareConfig, RooflineDecode
from sim.run import rollout_batch_s, train_step_s

SLOW = "name = 'a', engines = 2, stragglers = 1.0, slowdown = 2.0"


def numbers(run: RunConfig, **values: float) -> HardwareFit:
    return calibrate_numbers(run, **values, model_train_s=train_step_s, model_rollout_s=rollout_batch_s)


def test_a_speed_factor_does_not_change_how_sequences_are_shared() -> None:
    config = run_of(RUN, "hardware.training.sequence_accelerators=2")
    goal_s = 3 * train_step_s(config)
    table = numbers(config, train_step_s=goal_s).table
    assert table["training"]["sequence_accelerators"] == 2
    assert train_step_s(run_of({**RUN, "hardware": table})) == pytest.approx(goal_s, rel=1e-3)


@pytest.mark.parametrize("data", [RUN, NAMED], ids=["tables", "names"])
def test_the_calibrated_model_gives_the_numbers_back(data: dict[str, Any]) -> None:
    run = run_of(data)
    train_s, rollout_s = 1.7 * train_step_s(run), 2.5 * rollout_batch_s(run)
    result = numbers(run, train_step_s=train_s, rollout_batch_s=rollout_s, weight_sync_s=3.0)
    again = run_of({**data, "hardware": result.table})
    assert train_step_s(again) == pytest.approx(train_s, rel=1e-3)
    assert rollout_batch_s(again) == pytest.approx(rollout_s, rel=1e-3)
    assert result.table["weights"] == {"publish_s": 3.0, "pause_s": 3.0}
    assert len(result.notes) == 3


@pytest.mark.parametrize("size", [2, 16])
def test_the_factor_of_a_mixture_is_on_all_fixed_times_of_its_step(size: int) -> None:
    """In a node, and over two."""
    cluster = f"cluster={{accelerators=32, generation_accelerators=16, tensor_parallel={size}}}"
    run = run_of(NAMED, "hardware.model=Qwen3-235B-A22B", "hardware.kv_cache_tokens=1000000", cluster)
    result = numbers(run, rollout_batch_s=2.0 * rollout_batch_s(run))
    again = run.model_copy(update={"hardware": HardwareConfig.model_validate(result.table)})
    before, after = (resolved_hardware(one).decode for one in (run, again))
    assert isinstance(before, RooflineDecode)
    assert isinstance(after, RooflineDecode)
    assert after.step_overhead_s == pytest.approx(result.factors["generation"] * before.step_overhead_s, rel=1e-5)


def test_the_time_of_one_train_step_is_the_sum_of_its_parts() -> None:
    run = run_of(RUN, "workload.length={ kind = 'fixed', max = 300 }")
    # 32 sequences of 400 tokens on 2 accelerators, in 4 micro-batches
    expected = 0.7 + 4 * 0.1 + (4e-4 * 32 * 400 + 2e-7 * 32 * 400**2) / 2
    assert train_step_s(run) == pytest.approx(expected)


@pytest.mark.parametrize("fleet", [(), (f"fleet.groups=[{{ {SLOW} }}]",)])
def test_the_time_of_one_rollout_batch_is_that_of_its_decode_steps(fleet: tuple[str, ...]) -> None:
    """Also of engines that would be slow, or fail."""
    run = run_of(
        RUN,
        "workload.length={ kind = 'fixed', max = 300 }",
        "hardware.decode={ kind = 'affine', step_s = 0.01 }",
        "hardware.prefill.token_s=0",
        "hardware.latency={ reward_s = 0.3 }",
        *fleet,
    )
    assert rollout_batch_s(run) == pytest.approx(300 * 0.01 + 0.3)  # 16 sequences per engine at once


def test_faults_of_the_run_are_none_of_the_batch_alone() -> None:
    faults = [FaultConfig(kind="kill", engine=0, step=1)]
    run = run_of(RUN)
    assert rollout_batch_s(run.model_copy(update={"faults": faults})) == rollout_batch_s(run)


def test_a_batch_faster_than_the_roofline_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--rollout-batch-s=0\.001 is out of reach"):
        numbers(run_of(NAMED), rollout_batch_s=0.001)


@pytest.mark.parametrize("name", ["train_step_s", "rollout_batch_s", "weight_sync_s"])
def test_milliseconds_for_seconds_are_refused_where_gpu_and_model_are_known(name: str) -> None:
    run = run_of(NAMED)
    usual = {"train_step_s": train_step_s, "rollout_batch_s": rollout_batch_s, "weight_sync_s": lambda _run: 1.0}
    with pytest.raises(ConfigError, match=rf"--{name.replace('_', '-')}=.* times what .* check unit, GPU and model"):
        numbers(run, **{name: 1000 * usual[name](run)})


def test_numbers_must_be_given_and_positive() -> None:
    with pytest.raises(ConfigError, match="calibrate needs SOURCE, or some of --train-step-s"):
        numbers(run_of(RUN))
    with pytest.raises(ConfigError, match="--weight-sync-s must be above 0 and in seconds, got -1"):
        numbers(run_of(RUN), weight_sync_s=-1.0)
    with pytest.raises(ConfigError, match="--train-step-s must be above 0 and in seconds, got 0"):
        numbers(run_of(RUN), train_step_s=0.0)
