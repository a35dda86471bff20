"""Engines and software by name: the data, errors, precedence, and what a measurement replaces."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from calibrated import NAMED, run_of, table_of
from refusals import message

from pipelinerl.calibration.calibrate import calibrate_table
from pipelinerl.config.resolve import named_coefficients, resolved_hardware, transport_of
from pipelinerl.config.run import RunConfig, parse_run
from pipelinerl.hardware.coefficients import Level, coefficient_table, coefficients
from pipelinerl.hardware.costs import HardwareConfig, batch_s, context_token_s
from pipelinerl.hardware.stack import find_stack, stack_levels
from pipelinerl.hardware.transport import OURS, PUBLISHED
from pipelinerl.util.read import read_toml
from sim.validation.predict import shipped_runs

DATA = Path(__file__).parents[3] / "pipelinerl" / "hardware" / "data" / "stacks.toml"
STACKS = {
    (kind, name): table for kind, tables in read_toml(DATA, "the stacks").items() for name, table in tables.items()
}
REST = "generation_rest_share"
SHARE = 0.2
"""Of verl, at the central level."""
TRAIN = "train={model={path='m'}, task={name='math', settings={}}, optimizer={learning_rate=1e-6}, device='gpu'}"
BATCHES, CONTEXT = (1, 4, 16, 64, 256), 1000


@pytest.mark.parametrize(("kind", "name"), STACKS)
def test_a_stack_has_a_source_ordered_coefficients_and_transports_that_exist(kind, name):
    table = dict(STACKS[kind, name])
    assert table.pop("source")
    also = table.pop("also", [])
    arms = {False: table.pop("apart", None), True: table.pop("colocated", None)}
    named = {arm: one for arm, one in arms.items() if one is not None}
    assert {*named.values()} <= {one.name for one in (*PUBLISHED, *OURS)}
    assert kind == "software" or not named
    for coefficient, values in table.items():
        fast, _, slow = (coefficient_table()[coefficient][level] for level in Level)
        assert values == sorted(values, reverse=fast > slow), coefficient
        for value in values:
            assert getattr(coefficients(Level.CENTRAL, {coefficient: value}), coefficient) == value
    stack = find_stack(kind, name)
    assert {arm: one.name for arm, one in stack.transports.items()} == named
    assert {key: [*levels.values()] for key, levels in stack.coefficients.items()} == table
    assert all(find_stack(kind, one) is stack for one in also)
    assert all(one.rpartition("-")[0] in (name, name.rpartition("-")[0]) for one in also)  # a version of the same


def test_a_phase_switch_of_an_older_verl_is_between_the_published_ones_and_central_at_their_median():
    """Of colocated rows of 2025: the rest beside the parts, less the weights by ``refit`` (1.3 s by root GB)."""
    gigabytes = {"Qwen2.5-Math-7B": 15.2, "Qwen3-30B-A3B-Base": 61.1}
    left = [
        run.step_s - run.generate_s - run.train_s - 1.3 * math.sqrt(gigabytes[run.model])
        for run in shipped_runs()
        if run.system.startswith("verl ") and run.schedule == "sync" and run.date.startswith("2025")
    ]
    stack = find_stack("software", "verl-0.6").coefficients
    fast, middle, slow = (
        stack["switch_to_training_s"][level] + stack["switch_to_generation_s"][level] for level in Level
    )
    assert len(left) == 5
    assert (fast, middle, slow) == pytest.approx((min(left), np.median(left), max(left)), rel=0.03)


@pytest.mark.parametrize(
    ("key", "value", "near"),
    [("engine", "vlm-0.32", "did you mean vllm-0.32? "), ("software", "nemorl", "did you mean nemo-rl? "),
     ("software", "zzz", "")],
)  # fmt: skip
def test_an_unknown_name_is_one_line_with_the_key_the_value_and_the_nearest_name(key, value, near):
    names = ", ".join(name for kind, name in STACKS if kind == key)
    assert message(run_of, NAMED, f"hardware.{key}={value}") == (
        f"run: hardware.{key} must be one of {names}; {near}got '{value}'"
    )


@pytest.mark.parametrize("key", ["engine", "software"])
def test_a_name_needs_gpu_and_model(key):
    name = next(name for kind, name in STACKS if kind == key)
    tables = {"decode": {"kind": "affine", "step_s": 0.01}, "training": {"token_s": 1e-4}, key: name}
    hardware = {**NAMED, "hardware": tables}
    assert message(parse_run, hardware).startswith(f"run: hardware.{key} needs hardware.gpu ")


@pytest.mark.parametrize("colocated", [False, True])
def test_weights_of_our_software_travel_as_with_a_trainer_of_ours_on_gpus(colocated):
    ours, trained = run_of(NAMED, "hardware.software=ours"), run_of(NAMED, TRAIN)
    assert transport_of(ours, colocated=colocated) is transport_of(trained, colocated=colocated)


@pytest.mark.parametrize(
    ("sets", "name"),
    [
        ((), "rdma"),
        (("hardware.weight_sync=changed_values",), "changed_values"),
        ((TRAIN,), "delta"),
        (("hardware.coefficients={sync_s_per_root_gb=0.5}",), "unknown"),
    ],
)
def test_the_transport_of_software_is_the_last_that_counts(sets, name):
    assert transport_of(run_of(NAMED, "hardware.software=verl", *sets), colocated=False).name == name


@pytest.mark.parametrize("level", Level)
def test_stated_coefficients_go_before_software_and_software_before_the_level(level):
    sets = (f"hardware.level={level}", "hardware.engine=vllm-0.15", "hardware.software=verl")
    own = {name: levels[level] for name, levels in stack_levels("vllm-0.15", "verl").items()}
    assert own.keys() >= {"kv_efficiency", REST}  # of either
    assert {name: named_coefficients(run_of(NAMED, *sets))[name] for name in own} == own
    stated = run_of(NAMED, *sets, f"hardware.coefficients={{{REST}=0.5}}")
    assert named_coefficients(stated)[REST] == 0.5
    assert stated.hardware.named_coefficients == own | {REST: 0.5}


@pytest.mark.parametrize("table", ["decode", "prefill"])
def test_generation_takes_longer_by_its_rest(table):
    step_s = [generation_s(run_of(NAMED, f"hardware.software={name}"), table) for name in ("ours", "verl")]
    assert step_s[1] == pytest.approx(np.array(step_s[0]) * (1 + SHARE))


def generation_s(run: RunConfig, table: str = "decode") -> list[float]:
    """Seconds of decode steps of ``BATCHES``, or of a prefilled token."""
    hardware = resolved_hardware(run)
    if table == "prefill":
        return [hardware.prefill.token_s, hardware.prefill.token_squared_s]
    batch = np.array(BATCHES, float)
    seconds = batch_s(hardware.decode, 1, batch) + context_token_s(hardware.decode, 1) * batch * CONTEXT
    return [float(one) for one in seconds]


@pytest.mark.parametrize(
    "sets", [("hardware.software=verl",), ("hardware.level=pessimistic",), (f"hardware.coefficients={{{REST}=0.3}}",)]
)
def test_measured_decode_steps_hold_the_rest_and_come_back(tmp_path, sets):
    run = run_of(NAMED, *sets)
    measured = [1.5 * one for one in generation_s(run)]
    rows = (f"decode,1,{batch},{CONTEXT},,{one!r}," for batch, one in zip(BATCHES, measured, strict=True))
    found = calibrate_table(table_of(tmp_path / "steps.csv", *rows), run)
    again = run.model_copy(update={"hardware": HardwareConfig.model_validate(found.table)})
    assert generation_s(again) == pytest.approx(measured, rel=0.01)


def test_steps_of_a_kernel_table_leave_the_rest_to_the_software(tmp_path):
    verl, kernels = run_of(NAMED, "hardware.software=verl"), generation_s(run_of(NAMED))
    rows = (f"Qwen2.5-7B,h100,1,{batch},{CONTEXT},{1e3 * one!r}" for batch, one in zip(BATCHES, kernels, strict=True))
    file = tmp_path / "kernels.csv"
    file.write_text("model,system,tp,batch,ctx,tpot_ms\n" + "\n".join(rows) + "\n")
    again = verl.model_copy(update={"hardware": HardwareConfig.model_validate(calibrate_table(file, verl).table)})
    assert generation_s(again) == pytest.approx(np.array(kernels) * (1 + SHARE), rel=0.01)
