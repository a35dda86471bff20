"""Calibration: known coefficients come back from tables and traces, unknown ones are named, nonsense is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl import cli
from pipelinerl.calibration.calibrate import (
    calibrate_numbers,
    calibrate_table,
    calibrate_trace,
    doubts,
    hardware_toml,
    write_hardware,
)
from pipelinerl.calibration.hardware_fit import HardwareFit, fixed_coefficients
from pipelinerl.calibration.least_squares import Column, fit
from pipelinerl.calibration.step_times import read_step_times
from pipelinerl.calibration.trace_times import read_times
from pipelinerl.config.resolve import resolved_hardware
from pipelinerl.config.run import RunConfig
from pipelinerl.config.run_file import load_run, parse_run, with_overrides
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.catalogue import find_gpu, find_model
from pipelinerl.hardware.coefficients import Level, coefficients
from pipelinerl.hardware.costs import DecodeStep
from pipelinerl.hardware.derive import derive_decode, derive_training
from pipelinerl.records.reports import RunReport
from pipelinerl.records.trace import Trace
from sim.batch import rollout_batch_s, train_step_s
from sim.run import simulate

RUN: dict[str, Any] = {
    "seed": 3,
    "optimizer_steps": 40,
    "cluster": {"accelerators": 4, "generation_accelerators": 2},
    "scheduler": {"train_batch_size": 32, "generation_batch_size": 24, "micro_batch_size": 8},
    "workload": {
        "group_size": 4,
        "prompt_tokens": 100,
        "length": {"kind": "lognormal", "mean": 300, "cv": 0.8, "max": 1500},
    },
    "hardware": {
        "decode": {"kind": "affine", "step_s": 0.01, "sequence_s": 2e-4, "context_token_s": 3e-7},
        "prefill": {"token_s": 1e-4},
        "training": {"token_s": 4e-4, "step_s": 0.7, "micro_batch_s": 0.1, "token_squared_s": 2e-7},
        "weights": {"publish_s": 0.3, "pause_s": 0.1},
        "latency": {"dispatch_s": 0.05, "reward_s": 0.3},
    },
}
NAMED: dict[str, Any] = {
    **RUN,
    "optimizer_steps": 20,
    "cluster": {"accelerators": 16, "generation_accelerators": 8},
    "scheduler": {"train_batch_size": 256, "generation_batch_size": 64, "micro_batch_size": 64},
    "workload": {
        "group_size": 8,
        "prompt_tokens": 200,
        "length": {"kind": "lognormal", "mean": 1500, "cv": 0.8, "max": 8000},
    },
    "hardware": {"gpu": "H100", "model": "Qwen2.5-7B"},
}
CONVENTIONAL = ("scheduler.kind=conventional", "scheduler.optimizer_steps_per_rl_step=2")


def decode_s(decode, tensor_parallel, batch, context_tokens):
    """Seconds of a decode step."""
    return DecodeStep(decode, tensor_parallel=tensor_parallel, most=batch).of(batch, context_tokens)


def run_of(data: dict[str, Any], *overrides: str) -> RunConfig:
    return parse_run(with_overrides(data, overrides))


def traced(folder: Path, config: RunConfig) -> Path:
    simulate(config, out=folder, trace=True)
    return folder


def numbers_of(table: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in table.items() if name != "kind"}


def undetermined(result: HardwareFit) -> dict[str, str]:
    return {name: why for part in result.parts for name, why in part.fit.undetermined.items()}


def table_of(path: Path, *rows: str) -> Path:
    path.write_text("kind,accelerators,batch,ctx,tokens,seconds,utilisation\n" + "\n".join(rows) + "\n")
    return path


def decode_rows(*sizes: tuple[int, int], unit: float = 1.0) -> list[str]:
    return [f"decode,1,{b},{ctx},,{unit * (5e-3 + 1e-5 * b + 2e-8 * b * ctx)!r}," for b, ctx in sizes]


GRID = tuple((batch, ctx) for batch in (1, 16, 64) for ctx in (512, 4096))

# --------------------------------------------------------------------------------------------- fits


@settings(deadline=None, max_examples=50)
@given(
    true=st.tuples(*[st.floats(0, 10)] * 3),
    seed=st.integers(0, 99),
)
def test_a_fit_gives_back_the_coefficients_of_noiseless_times(true: tuple[float, ...], seed: int) -> None:
    factors = np.random.default_rng(seed).uniform(0.5, 2.0, size=(12, 3))
    base = np.full(12, 0.1)
    seconds = base + factors @ np.array(true)
    found = fit([Column(name, factors[:, index]) for index, name in enumerate("abc")], seconds, base)
    assert list(found.values.values()) == pytest.approx(true, abs=1e-6)
    assert not found.undetermined
    assert found.max_error < 1e-6


def test_no_coefficient_falls_below_its_bound_and_the_others_are_the_best_with_it_there() -> None:
    x = np.array([1.0, 2.0, 3.0, 4.0])
    seconds = 5.0 - x  # falls with x: the slope would be -1
    found = fit([Column("fixed", np.ones(4)), Column("slope", x)], seconds)
    assert found.values["slope"] == 0.0
    # weighted by 1 / fitted^2, a constant is the plain mean of 4, 3, 2, 1
    assert found.values["fixed"] == pytest.approx(2.5)


def test_columns_that_are_proportional_are_named_and_the_last_is_kept() -> None:
    batch = np.array([1.0, 2.0, 4.0, 8.0])
    columns = [Column("step", np.ones(4)), Column("sequence", batch), Column("context", 512 * batch, kept=0.001)]
    found = fit(columns, 3 + 1.512 * batch)
    assert found.undetermined == {"context": "cannot be told from sequence"}
    assert found.values == pytest.approx({"step": 3.0, "sequence": 1.0, "context": 0.001})


def test_of_columns_that_are_proportional_one_that_is_nothing_of_the_time_is_kept() -> None:
    batch = np.array([1.0, 2.0, 4.0, 8.0])
    found = fit([Column("context", 0.001 * batch, kept=1.0), Column("sequence", batch, kept=0.5)], batch)
    assert found.values == pytest.approx({"context": 1.0, "sequence": 0.999})  # and not 500 and 0.5


def test_equal_short_contexts_do_not_make_the_cache_slow(tmp_path: Path) -> None:
    rows = ["decode,1,1,10,,0.01,"] * 4
    result = calibrate_table(table_of(tmp_path / "t.csv", *rows), run_of(NAMED))
    assert "kv_efficiency" not in result.table["coefficients"]


def test_a_row_of_absurd_size_takes_no_time(tmp_path: Path) -> None:
    rows = [f"decode,1,{batch},10,,0.01," for batch in (1, 2, 4, 10**15)]
    calibrate_table(table_of(tmp_path / "t.csv", *rows), run_of(NAMED))


def test_a_value_to_keep_that_contradicts_the_times_is_not_kept_if_another_can_be() -> None:
    batch = np.array([1.0, 2.0, 4.0, 8.0])
    columns = [Column("sequence", batch), Column("context", 512 * batch, kept=1.0)]  # 512 times too much
    found = fit(columns, batch)
    assert found.undetermined == {"sequence": "cannot be told from context"}
    assert found.max_error < 1e-9


def test_a_coefficient_that_noise_hides_is_named() -> None:
    rng = np.random.default_rng(1)
    tokens = rng.uniform(0.99, 1.01, 40)  # always about the same: no line through them
    seconds = (0.5 + 0.5 * tokens) * rng.normal(1, 0.05, 40)
    found = fit([Column("token", tokens), Column("fixed", np.ones(40))], seconds)
    assert set(found.undetermined) == {"fixed"}
    assert found.values["token"] == pytest.approx(1.0, rel=0.03)


def test_the_error_left_out_is_that_of_fitting_without_the_row() -> None:
    x, noise = np.arange(1.0, 7.0), np.array([1.02, 0.97, 1.01, 0.99, 1.04, 0.98])
    seconds = (2 + x) * noise
    columns = [Column("fixed", np.ones(6)), Column("slope", x)]
    found = fit(columns, seconds)
    errors = []
    for left in range(6):
        rest = np.arange(6) != left
        one = fit([Column(c.name, c.factors[rest]) for c in columns], seconds[rest])
        errors.append(abs((one.values["fixed"] + one.values["slope"] * x[left]) / seconds[left] - 1))
    assert found.held_out_error == pytest.approx(np.mean(errors), rel=0.1)


# ------------------------------------------------------------------------------------------- traces


@pytest.fixture(scope="module")
def pipeline_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return traced(tmp_path_factory.mktemp("pipeline") / "run", run_of(RUN))


def test_a_simulated_trace_gives_back_the_hardware_it_was_made_with(pipeline_folder: Path) -> None:
    blank = run_of(RUN, "hardware={ decode = { kind = 'affine', step_s = 1.0 }, training = { token_s = 1.0 } }")
    result = calibrate_trace(pipeline_folder, blank)
    true = RUN["hardware"]
    assert numbers_of(result.table["decode"]) == pytest.approx(numbers_of(true["decode"]), rel=1e-5)
    assert result.table["prefill"]["token_s"] == pytest.approx(1e-4, rel=1e-5)
    assert result.table["training"] == pytest.approx(true["training"], rel=1e-5)
    assert result.table["weights"] == pytest.approx({**true["weights"], "transfer_s": 0.0}, abs=1e-3)
    assert result.table["latency"]["reward_s"] == pytest.approx(0.3)
    assert result.table["latency"]["dispatch_s"] == pytest.approx(0.05, abs=0.01)  # a step lasts 0.03 s
    assert not undetermined(result)


def test_what_was_calibrated_simulates_as_the_run_did(pipeline_folder: Path) -> None:
    result = calibrate_trace(pipeline_folder)
    again = simulate(run_of({**RUN, "hardware": result.table}))
    before = RunReport.read(pipeline_folder / "summary.json")
    assert again.tokens_per_s == pytest.approx(before.tokens_per_s, rel=0.01)
    assert again.lag.mean == pytest.approx(before.lag.mean, rel=0.05)


def test_a_conventional_trace_gives_decode_from_its_drains_and_the_phase_switch(tmp_path: Path) -> None:
    config = run_of(RUN, *CONVENTIONAL, "hardware.switch={ to_training_s = 1.5, to_generation_s = 0.8 }")
    result = calibrate_trace(traced(tmp_path / "run", config))
    assert numbers_of(result.table["decode"]) == pytest.approx(numbers_of(RUN["hardware"]["decode"]), rel=1e-5)
    assert result.table["switch"] == pytest.approx({"to_training_s": 1.5, "to_generation_s": 0.8})
    assert any("prefill" in note for note in result.notes)


def test_lives_of_rollouts_alone_come_close(tmp_path: Path) -> None:
    folder = traced(tmp_path / "run", run_of(RUN, *CONVENTIONAL, "hardware.latency.dispatch_jitter_s=0.01"))
    times = read_times(Trace(folder / "trace.jsonl.gz"))
    times.windows = None
    result = HardwareFit(times.config.hardware)
    from pipelinerl.calibration.calibrate import _fit_decode

    _fit_decode(result, times)
    true = decode_s(resolved_hardware(times.config).decode, 1, 12, 12 * 250)
    fitted = run_of({**RUN, "hardware": {**RUN["hardware"], "decode": result.table["decode"]}})
    assert decode_s(resolved_hardware(fitted).decode, 1, 12, 12 * 250) == pytest.approx(true, rel=0.03)


def test_lives_come_close_with_gpu_and_model_too(tmp_path: Path) -> None:
    overrides = ("scheduler.kind=conventional", "hardware.coefficients.step_overhead_s=0.004", "optimizer_steps=4")
    folder = traced(tmp_path / "run", run_of(NAMED, *overrides, "hardware.latency.dispatch_s=0.5"))
    times = read_times(Trace(folder / "trace.jsonl.gz"))
    times.windows = None
    result = HardwareFit(run_of(NAMED).hardware)
    from pipelinerl.calibration.calibrate import _fit_decode

    _fit_decode(result, times)
    assert result.table["coefficients"]["step_overhead_s"] == pytest.approx(0.004, rel=0.1)
    assert result.table["latency"]["dispatch_s"] == pytest.approx(0.5, rel=0.3)  # in 8 s and more of each rollout


@pytest.mark.parametrize("update", ["recompute", "abort", "wait"])
def test_every_kind_of_weight_update_leaves_the_decode_step_as_it_is(tmp_path: Path, update: str) -> None:
    folder = traced(tmp_path / "run", run_of(RUN, f"scheduler.weight_update={update}"))
    blank = run_of(RUN, "hardware={ decode = { kind = 'affine', step_s = 1.0 }, training = { token_s = 1.0 } }")
    result = calibrate_trace(folder, blank)
    fitted = run_of({**RUN, "hardware": result.table})
    true = decode_s(resolved_hardware(run_of(RUN)).decode, 1, 20, 20 * 250)
    assert decode_s(resolved_hardware(fitted).decode, 1, 20, 20 * 250) == pytest.approx(true, rel=0.1)


def test_a_run_of_one_step_has_no_publication_to_time(tmp_path: Path) -> None:
    result = calibrate_trace(traced(tmp_path / "run", run_of(RUN, "optimizer_steps=1")))
    assert "weights: no publication in the trace" in result.notes


def test_with_gpu_and_model_the_coefficients_come_back(tmp_path: Path) -> None:
    changed = {"kv_efficiency": 0.8, "training_mfu": 0.33, "step_overhead_s": 0.002, "training_step_s": 2.5}
    overrides = [f"hardware.coefficients.{name}={value}" for name, value in changed.items()]
    folder = traced(tmp_path / "run", run_of(NAMED, *overrides))
    result = calibrate_trace(folder, run_of(NAMED))
    found = result.table["coefficients"]
    assert {name: found[name] for name in changed} == pytest.approx(changed, rel=1e-3)
    assert "decode" not in result.table
    assert "training" not in result.table
    # one engine size: reading weights and the step's own overhead are both the same in every step
    assert "step_overhead_s" in undetermined(result)["weight_efficiency"]
    assert "weight_efficiency" not in found


FEW: dict[str, Any] = {"train_batch_size": 16, "generation_batch_size": 16, "micro_batch_size": 8}


def test_a_trainer_with_few_sequences_is_not_taken_for_a_slow_one(tmp_path: Path) -> None:
    """8 sequences on 8 accelerators: a micro-batch lasts as long as its longest, in the simulator and in the fit."""
    base = {**NAMED, "scheduler": FEW}
    folder = traced(tmp_path / "run", run_of(base, "hardware.coefficients.training_mfu=0.33", "optimizer_steps=40"))
    found = calibrate_trace(folder, run_of(base)).table["coefficients"]
    assert found["training_mfu"] == pytest.approx(0.33, rel=1e-3)
    linear = calibrate_trace(folder, run_of(base, "hardware.coefficients.sequence_accelerators=8")).table
    assert linear["coefficients"].get("training_mfu", 0.9) != pytest.approx(0.33, rel=0.1)


def test_tables_of_a_trainer_with_few_sequences_come_back(tmp_path: Path) -> None:
    shared = "hardware.training.sequence_accelerators=1"
    folder = traced(tmp_path / "run", run_of({**RUN, "scheduler": {**FEW, "micro_batch_size": 4}}, shared))
    start = "hardware={ decode = { kind = 'affine', step_s = 1.0 }, training = { token_s = 1.0 } }"
    training = calibrate_trace(folder, run_of(RUN, start, shared)).table["training"]
    assert training == pytest.approx({**RUN["hardware"]["training"], "sequence_accelerators": 1}, rel=1e-3)


def test_fewer_rows_of_a_table_than_accelerators_are_as_slow_as_one_each(tmp_path: Path) -> None:
    """As measured: one sequence on each of b accelerators of 8, in the time of one."""
    values = coefficients(Level.CENTRAL, {"training_mfu": 0.4})
    one = derive_training(find_gpu("H100"), find_model("Qwen2.5-7B"), training_accelerators=8, coefficients=values)

    def seconds(batch: int, tokens: int) -> float:
        work_s = one.token_s * tokens + one.token_squared_s * tokens**2
        return one.step_s + one.micro_batch_s + work_s * -(-batch // 8)

    sizes = [(batch, tokens) for batch in (1, 3, 8, 20, 64) for tokens in (512, 4096)]
    rows = [f"train,8,{batch},,{batch * tokens},{seconds(batch, tokens)!r}," for batch, tokens in sizes]
    result = calibrate_table(table_of(tmp_path / "t.csv", *rows), run_of(NAMED))
    assert result.table["coefficients"]["training_mfu"] == pytest.approx(0.4, rel=1e-3)
    assert result.parts[0].fit.max_error < 1e-6


def test_a_speed_factor_does_not_change_how_sequences_are_shared() -> None:
    config = run_of(RUN, "hardware.training.sequence_accelerators=2")
    goal_s = 3 * train_step_s(config)
    table = calibrate_numbers(
        config, train_step_s=goal_s, model_train_s=train_step_s, model_rollout_s=rollout_batch_s
    ).table
    assert table["training"]["sequence_accelerators"] == 2
    assert train_step_s(run_of({**RUN, "hardware": table})) == pytest.approx(goal_s, rel=1e-3)


def test_packs_are_calibrated_for_the_longest_rollout_that_is_simulated() -> None:
    """A length source knows its own prompts: ``workload.prompt_tokens``, far beyond any pack here, is not read."""
    length = "workload.length={ kind = 'empirical', source = 'rgym_llama_400', mean = 300, max = 8000 }"
    run = run_of(NAMED, length, "workload.prompt_tokens=500000")
    trainer = fixed_coefficients(run)
    assert trainer["pack_tokens"] < 500_000
    hardware = run.hardware.model_copy(update={"coefficients": trainer})
    again = resolved_hardware(run.model_copy(update={"hardware": hardware}))
    assert again.training == resolved_hardware(run).training


def test_what_the_trainer_of_the_run_file_does_is_no_slowness(tmp_path: Path) -> None:
    """Recomputing or not is read from train.trainer: the same speed of the products comes back either way."""
    task = {"name": "math", "settings": {}}
    train = {"model": {"path": "m"}, "task": task, "optimizer": {"learning_rate": 1e-6}}
    run = {**NAMED, "train": train}
    for again in ("true", "false"):
        overrides = (f"train.trainer.activation_checkpointing={again}", "optimizer_steps=12")
        slow = run_of(run, *overrides, "hardware.coefficients.training_mfu=0.33")
        result = calibrate_trace(traced(tmp_path / again, slow), run_of(run, *overrides))
        assert result.table["coefficients"]["training_mfu"] == pytest.approx(0.33, rel=1e-3)


def test_equal_answers_leave_no_way_to_tell_the_trainers_fixed_part(tmp_path: Path) -> None:
    folder = traced(tmp_path / "run", run_of(RUN, "workload.length={ kind = 'fixed', max = 300 }"))
    blank = run_of(RUN, "hardware={ decode = { kind = 'affine', step_s = 1.0 }, training = { token_s = 1.0 } }")
    result = calibrate_trace(folder, blank)
    names = undetermined(result)
    assert {"micro_batch_s", "token_squared_s"} <= set(names)  # all micro-batches are alike
    assert result.table["training"]["micro_batch_s"] == 0.0
    training = result.table["training"]
    work_s = (training["token_s"] * 3200 + training["token_squared_s"] * 8 * 400**2) / 2
    assert work_s == pytest.approx(0.1 + (4e-4 * 3200 + 2e-7 * 8 * 400**2) / 2, rel=1e-5)


def test_a_trace_that_ends_before_the_first_step_is_refused(tmp_path: Path) -> None:
    from pipelinerl.records.trace import TraceWriter

    (tmp_path / "run").mkdir()
    TraceWriter(tmp_path / "run" / "trace.jsonl.gz", run_of(RUN)).close()
    with pytest.raises(ConfigError, match="must hold an optimizer step and a finished rollout"):
        calibrate_trace(tmp_path / "run")


# ------------------------------------------------------------------------------------------- tables


def test_a_table_gives_back_its_line(tmp_path: Path) -> None:
    train = [
        f"train,2,{b},,{b * n},{1.0 + 2e-4 * b * n + 3e-8 * b * n * n!r}," for b, n in ((1, 512), (4, 512), (2, 4096))
    ]
    train.append(f"train,2,8,,8192,{1.0 + 2e-4 * 8192 + 3e-8 * 8192 * 1024!r},")
    path = table_of(tmp_path / "t.csv", *decode_rows(*GRID), *train)
    result = calibrate_table(path)
    assert numbers_of(result.table["decode"]) == pytest.approx(
        {"step_s": 5e-3, "sequence_s": 1e-5, "context_token_s": 2e-8}, rel=1e-5
    )
    training = result.table["training"]  # accelerator-seconds: two of them
    assert training["token_s"] == pytest.approx(4e-4, rel=1e-5)
    assert training["token_squared_s"] == pytest.approx(6e-8, rel=1e-5)
    assert training["step_s"] == pytest.approx(1.0, rel=1e-5)
    assert undetermined(result) == {"micro_batch_s": "cannot be told from step_s"}


def prefill_rows(token_s: float, token_squared_s: float) -> list[str]:
    sizes = ((1, 512), (1, 2048), (4, 512), (1, 8192))
    return [f"prefill,1,{b},,{b * n},{b * (token_s * n + token_squared_s * n * n)!r}," for b, n in sizes]


def test_prefill_rows_give_the_prefill_table(tmp_path: Path) -> None:
    result = calibrate_table(table_of(tmp_path / "t.csv", *prefill_rows(2e-5, 3e-10)))
    assert result.table["prefill"] == pytest.approx(
        {"sequence_s": 0.0, "token_s": 2e-5, "token_squared_s": 3e-10}, rel=1e-4, abs=1e-9
    )
    assert sum("was not measured" in note for note in result.notes) == 2  # decode, training


def test_prefill_rows_give_the_share_of_the_peak(tmp_path: Path) -> None:
    prefill = resolved_hardware(run_of(NAMED, "hardware.coefficients.prefill_mfu=0.5")).prefill
    rows = prefill_rows(prefill.token_s, prefill.token_squared_s)
    result = calibrate_table(table_of(tmp_path / "t.csv", *rows), run_of(NAMED))
    assert result.table["coefficients"] == pytest.approx({"prefill_mfu": 0.5})


def test_products_are_told_and_not_fitted(tmp_path: Path) -> None:
    result = calibrate_table(table_of(tmp_path / "t.csv", "matmul,,1,,,,0.1", "matmul,,64,,,,0.8"))
    assert "matmul: utilisation 0.80 at most, with 64 rows" in result.notes[0]
    assert not result.parts


def test_one_context_leaves_the_context_undetermined(tmp_path: Path) -> None:
    rows = decode_rows((1, 1024), (8, 1024), (32, 1024), (64, 1024))
    result = calibrate_table(table_of(tmp_path / "t.csv", *rows))
    assert undetermined(result) == {"context_token_s": "cannot be told from sequence_s"}


def test_two_engine_sizes_tell_weights_from_overhead(tmp_path: Path) -> None:
    run = run_of(
        NAMED, "hardware.coefficients={ weight_efficiency = 0.7, kv_efficiency = 0.6, step_overhead_s = 3e-3 }"
    )
    start = HardwareFit(run.hardware)
    assert start.gpu is not None
    assert start.model is not None
    rows = []
    for size in (1, 2, 4):
        decode = derive_decode(start.gpu, start.model, tensor_parallel=size, coefficients=start.coefficients)
        rows += [f"decode,{size},{b},{ctx},,{decode_s(decode, size, b, b * ctx)!r}," for b, ctx in GRID]
    result = calibrate_table(table_of(tmp_path / "t.csv", *rows), run_of(NAMED))
    found = result.table["coefficients"]
    assert found["weight_efficiency"] == pytest.approx(0.7, rel=1e-3)
    assert found["kv_efficiency"] == pytest.approx(0.6, rel=1e-3)
    assert found["step_overhead_s"] == pytest.approx(3e-3, rel=1e-2)


def test_the_export_of_aiconfigurator_is_read_in_milliseconds(tmp_path: Path) -> None:
    path = tmp_path / "kernels.csv"
    rows = [f"Qwen2.5-7B,h100_sxm,1,{b},{ctx},{5 + 0.01 * b + 2e-5 * b * ctx}" for b, ctx in GRID]
    other = [f"Qwen2.5-7B,h200_sxm,1,{b},{ctx},{4 + 0.01 * b + 1e-5 * b * ctx}" for b, ctx in GRID]
    path.write_text("model,system,tp,batch,ctx,tpot_ms\n" + "\n".join(rows))
    assert calibrate_table(path).table["decode"]["step_s"] == pytest.approx(5e-3)
    path.write_text("model,system,tp,batch,ctx,tpot_ms\n" + "\n".join(rows + other))
    with pytest.raises(ConfigError, match="holds several series"):
        calibrate_table(path)
    result = calibrate_table(path, run_of(NAMED))
    assert result.notes == ["series: Qwen2.5-7B on h100_sxm"]
    assert result.parts[0].fit.rows == len(GRID)


HEADER = "kind,batch,ctx,tokens,seconds\n"
WRONG_TABLES = {
    "no kind": ("batch,ctx,seconds\n1,512,0.1\n", "line 1: column kind is missing"),
    "unknown kind": (HEADER + "dekode,1,512,,1\n", "line 2: kind must be one of decode, prefill, train, matmul"),
    "more sequences than tokens": (HEADER + "train,8,,4,1\n", "line 2: tokens are those of all sequences"),
    "missing cell": (HEADER + "decode,1,,,0.1\n", "line 2: a decode row needs ctx"),
    "too few rows": (HEADER + "decode,1,512,,0.1\n", "decode needs at least 4 rows, got 1"),
}


@pytest.mark.parametrize(("text", "message"), WRONG_TABLES.values(), ids=WRONG_TABLES.keys())
def test_a_wrong_table_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_step_times(path)


@pytest.mark.parametrize(
    ("column", "cell"),
    [
        ("accelerators", "0"), ("batch", "0"), ("batch", "1.5"), ("ctx", "-1"), ("tokens", "0"), ("tokens", "2.5"),
        ("seconds", "0"), ("seconds", "fast"), ("seconds", "inf"), ("utilisation", "0"), ("utilisation", "1.2"),
    ],
)  # fmt: skip
def test_a_cell_that_cannot_be_is_refused_by_column_and_value(tmp_path: Path, column: str, cell: str) -> None:
    row = {"kind": "decode", "batch": "1", "ctx": "512", "seconds": "0.1", column: cell}
    path = tmp_path / "t.csv"
    path.write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
    with pytest.raises(ConfigError, match=f"line 2: {column} must be .*, got '{cell}'"):
        read_step_times(path)


def test_milliseconds_are_noticed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"median of 5.*plausible are 1e-05 to 2 s; are they milliseconds"):
        calibrate_table(table_of(tmp_path / "t.csv", *decode_rows(*GRID, unit=1000)))
    mixed = decode_rows(*GRID[:3]) + decode_rows(*GRID[3:], unit=1000)
    mixed[0] = mixed[0].replace("0.00", "50.0")
    with pytest.raises(ConfigError, match="units differ between rows"):
        calibrate_table(table_of(tmp_path / "t.csv", *decode_rows(*GRID), "decode,1,1,512,,5.0,"))


def test_times_that_the_gpu_cannot_reach_are_refused(tmp_path: Path) -> None:
    rows = [f"train,1,{b},,{1024 * b},{1e-3 * b}," for b in (1, 2, 4)]  # 1 M tokens/s of a 7B
    with pytest.raises(ConfigError, match=r"times the peak of H100 for Qwen2\.5-7B"):
        calibrate_table(table_of(tmp_path / "t.csv", *rows), run_of(NAMED))
    slow = decode_rows(*GRID, unit=200)
    with pytest.raises(ConfigError, match=r"decode seconds have a median of .* check unit, GPU and model"):
        calibrate_table(table_of(tmp_path / "t.csv", *slow), run_of(NAMED))


def test_engines_of_several_sizes_need_gpu_and_model(tmp_path: Path) -> None:
    rows = [*decode_rows(*GRID), *(row.replace("decode,1", "decode,2") for row in decode_rows(*GRID))]
    with pytest.raises(ConfigError, match="engines of 1, 2 accelerators: give --run"):
        calibrate_table(table_of(tmp_path / "t.csv", *rows))


# ------------------------------------------------------------------------------------ three numbers


def numbers(run: RunConfig, **values: float) -> HardwareFit:
    return calibrate_numbers(run, **values, model_train_s=train_step_s, model_rollout_s=rollout_batch_s)


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


def test_the_time_of_one_train_step_is_the_sum_of_its_parts() -> None:
    run = run_of(RUN, "workload.length={ kind = 'fixed', max = 300 }")
    # 32 sequences of 400 tokens on 2 accelerators, in 4 micro-batches
    expected = 0.7 + 4 * 0.1 + (4e-4 * 32 * 400 + 2e-7 * 32 * 400**2) / 2
    assert train_step_s(run) == pytest.approx(expected)


def test_the_time_of_one_rollout_batch_is_that_of_its_decode_steps() -> None:
    run = run_of(
        RUN,
        "workload.length={ kind = 'fixed', max = 300 }",
        "hardware.decode={ kind = 'affine', step_s = 0.01 }",
        "hardware.prefill.token_s=0",
        "hardware.latency={ reward_s = 0.3 }",
    )
    assert rollout_batch_s(run) == pytest.approx(300 * 0.01 + 0.3)  # 16 sequences per engine at once


def test_a_batch_faster_than_the_roofline_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--rollout-batch-s=0\.001 is out of reach"):
        numbers(run_of(NAMED), rollout_batch_s=0.001)


@pytest.mark.parametrize("name", ["train_step_s", "rollout_batch_s", "weight_sync_s"])
def test_milliseconds_for_seconds_are_refused_where_gpu_and_model_are_known(name: str) -> None:
    run = run_of(NAMED)
    usual = {"train_step_s": train_step_s, "rollout_batch_s": rollout_batch_s, "weight_sync_s": lambda _run: 1.0}
    with pytest.raises(ConfigError, match=rf"--{name.replace('_', '-')}=.* times what .* check unit, GPU and model"):
        numbers(run, **{name: 1000 * usual[name](run)})


# ------------------------------------------------------------------------------------- command line


def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["pipelinerl", "calibrate", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def test_the_file_written_is_a_table_that_a_run_file_takes(
    pipeline_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = call(monkeypatch, capsys, pipeline_folder, "--out", tmp_path / "new")
    text = (tmp_path / "new" / "hardware.toml").read_text()
    assert status == 0
    assert out == text
    assert text.startswith("# Calibrated from run.")
    run = tmp_path / "run.toml"
    import tomli_w

    run.write_text(tomli_w.dumps({name: value for name, value in RUN.items() if name != "hardware"}) + text)
    assert load_run(run).hardware.decode is not None
    status, _, err = call(monkeypatch, capsys, pipeline_folder, "--out", tmp_path / "new")
    assert (status, err.count("\n")) == (2, 1)
    assert "which exists" in err


def test_results_as_json(
    pipeline_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = call(monkeypatch, capsys, pipeline_folder, "--json")
    data = json.loads(out)
    assert status == 0
    assert set(data) == {"hardware", "fits", "notes", "warnings"}
    assert data["warnings"] == []
    assert [part["what"] for part in data["fits"]] == ["decode", "training"]


def test_a_poor_fit_is_warned_of_on_stderr_and_in_the_json_and_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every other row takes twice as long: no line is nearer than a third to both."""
    rows = [row if index % 2 else doubled(row) for index, row in enumerate(decode_rows(*GRID))]
    source = table_of(tmp_path / "t.csv", *rows)
    status, out, err = call(monkeypatch, capsys, source, "--json")
    assert (status, err.count("\n")) == (0, 1)
    assert err.startswith(f"pipelinerl: warning: decode is a poor fit to {len(GRID)} rows of t.csv: error ")
    assert json.loads(out)["warnings"] == [err.removeprefix("pipelinerl: warning: ").rstrip()]
    status, out, err = call(monkeypatch, capsys, table_of(tmp_path / "good.csv", *decode_rows(*GRID)))
    assert (status, err) == (0, "")


def doubled(row: str) -> str:
    *cells, seconds, last = row.split(",")
    return ",".join([*cells, str(2 * float(seconds)), last])


def test_a_share_of_the_peak_that_is_all_of_it_is_warned_of(tmp_path: Path) -> None:
    """Prefill in a third of the time that the optimistic level needs cannot be."""
    run = run_of(NAMED)
    prefill = resolved_hardware(run).prefill
    rows = [f"prefill,1,1,,{n},{(prefill.token_s * n + prefill.token_squared_s * n**2) / 3}," for n in (256, 512, 1024)]
    (line,) = [one for one in doubts(calibrate_table(table_of(tmp_path / "t.csv", *rows), run)) if "bound" in one]
    assert line.startswith("prefill_mfu came out at its bound, 1: prefill is as fast as the accelerator can be")


def test_what_simulated_traces_and_kernels_give_is_not_doubted(pipeline_folder: Path) -> None:
    assert doubts(calibrate_trace(pipeline_folder)) == []
    kernels = calibrate_table(Path(__file__).parents[2] / "data" / "decode_step_kernels.csv", run_of(NAMED))
    assert doubts(kernels) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "calibrate needs SOURCE, or --run RUN.toml"),
        (("--set", "seed=1"), "--set overrides keys of --run RUN.toml"),
        (("nowhere",), "cannot read trace nowhere"),
        (("nowhere.csv",), "cannot read the table of step times nowhere.csv"),
        (("nowhere", "--train-step-s", "3"), "calibrate takes SOURCE or numbers"),
    ],
)
def test_wrong_use_ends_with_one_line_and_status_2(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = call(monkeypatch, capsys, *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_numbers_must_be_given_and_positive() -> None:
    with pytest.raises(ConfigError, match="calibrate needs SOURCE, or some of --train-step-s"):
        numbers(run_of(RUN))
    with pytest.raises(ConfigError, match="--weight-sync-s must be above 0 and in seconds, got -1"):
        numbers(run_of(RUN), weight_sync_s=-1.0)


def test_a_file_name_is_written_to(tmp_path: Path) -> None:
    result = calibrate_table(table_of(tmp_path / "t.csv", *decode_rows(*GRID)))
    write_hardware(tmp_path / "mine.toml", hardware_toml(result, "t.csv"))
    assert "[hardware.decode]" in (tmp_path / "mine.toml").read_text()
    assert "training was not measured" in (tmp_path / "mine.toml").read_text()
    with pytest.raises(ConfigError, match="--out must be a folder or file that can be written"):
        write_hardware(tmp_path / "mine.toml" / "x", "")
