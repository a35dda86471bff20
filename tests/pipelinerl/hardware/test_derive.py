"""The hardware model: by hand, against published capacities, kernel times and pre-training runs, and its bands."""

from __future__ import annotations

import csv
import json
import math
import re
import tomllib
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.config.resolve import resolved_hardware, run_coefficients, run_trainer_fits
from pipelinerl.config.run_file import dump_run, load_run, parse_run
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.catalogue import LanguageModel, find_gpu, find_model, gpu_names, model_names
from pipelinerl.hardware.coefficients import Coefficients, Level, coefficient_table, coefficients
from pipelinerl.hardware.costs import DecodeStep
from pipelinerl.hardware.derive import derive_hardware, derive_switch, derive_training, derive_weights
from pipelinerl.hardware.memory import kept_numbers, kv_cache_tokens, pack_that_fits, training_memory
from pipelinerl.hardware.tables import PhaseSwitchConfig, RooflineDecode
from sim.run import simulate

ROOT = Path(__file__).parents[3]
DATA = ROOT / "tests" / "data"
H100, A100, H20 = (find_gpu(name) for name in ("H100", "A100", "H20"))
QWEN7B, QWEN30B, LLAMA8B = (find_model(name) for name in ("Qwen2.5-7B", "Qwen3-30B-A3B", "Llama-3.1-8B"))
SYSTEMS = {"h100_sxm": find_gpu("H100"), "h200_sxm": find_gpu("H200")}
PLAIN = {
    "weight_efficiency": 1.0,
    "kv_efficiency": 1.0,
    "flops_efficiency": 1.0,
    "step_overhead_s": 0.0,
    "layer_overhead_s": 0.0,
    "sequence_overhead_s": 0.0,
    "allreduce_s": 0.0,
    "prefill_mfu": 1.0,
    "memory_share": 1.0,
    "memory_reserve_bytes": 0.0,
    "training_mfu": 1.0,
    "activation_traffic": 0.0,
    "attention_flops_per_byte": 1e12,
    "recomputation": 0.0,
    "expert_mfu_factor": 1.0,
    "exchange_exposed": 0.0,
    "training_step_s": 0.0,
    "training_micro_batch_s": 0.0,
    "gather_exposed": 0.0,
    "pack_tokens": 16384.0,
    "sequence_accelerators": 1.0,
    "extra_forward_passes": 0.0,
    "transfer_share": 1.0,
    "transfer_sharded": 1.0,
    "transfer_fixed_s": 0.0,
    "pause_s": 0.0,
    "switch_to_training_s": 0.0,
    "switch_to_generation_s": 0.0,
    "host_bandwidth": 1e10,
}
"""Coefficients of a machine without losses, to count by hand."""


def plain(**changed):
    return Coefficients(**(PLAIN | changed))


def derived(
    gpu=H100, model=QWEN7B, *, tensor_parallel=1, trainers=8, colocated=False, level=Level.CENTRAL, values=None
):
    return derive_hardware(
        gpu,
        model,
        tensor_parallel=tensor_parallel,
        training_accelerators=trainers,
        colocated=colocated,
        coefficients=values or coefficients(level),
    )


def step_ms(hardware, batch, context, *, tensor_parallel=1):
    """Milliseconds of a decode step of sequences of ``context`` tokens each."""
    step = DecodeStep(hardware.decode, tensor_parallel=tensor_parallel, most=batch)
    return step.of(batch, batch * context) * 1e3


def rows_of(file):
    with (DATA / file).open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


# --------------------------------------------------------------------------------------- coefficients


def test_every_coefficient_has_three_ordered_values_and_a_source():
    table = coefficient_table()
    assert list(table) == list(Coefficients.model_fields)
    for name, entry in table.items():
        assert set(entry) == {"optimistic", "central", "pessimistic", "source"}, name
        values = [entry[level] for level in Level]
        assert values in (sorted(values), sorted(values, reverse=True)), name


def test_single_coefficients_are_replaced():
    values = coefficients(Level.OPTIMISTIC, {"training_mfu": 0.31})
    assert values == coefficients(Level.OPTIMISTIC).model_copy(update={"training_mfu": 0.31})


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"mfu": 0.3}, "hardware.coefficients.mfu is an unknown key; allowed: "),
        ({"training_mfo": 0.3}, "hardware.coefficients.training_mfo is an unknown key; did you mean training_mfu? "),
        ({"training_mfu": 31.0}, "hardware.coefficients.training_mfu must be at most 1, got 31"),
        ({"training_mfu": 0.0}, "hardware.coefficients.training_mfu must be above 0, got 0"),
        ({"pause_s": -1.0}, "hardware.coefficients.pause_s must be at least 0, got -1"),
        ({"pause_s": float("nan")}, "hardware.coefficients.pause_s must be a number, got NaN"),
    ],
)
def test_a_wrong_coefficient_is_one_line(changed, line):
    with pytest.raises(ConfigError) as caught:
        coefficients(Level.CENTRAL, changed)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------------------------- decode steps


def test_a_decode_step_by_hand():
    """Without losses: 7 070 619 136 parameters read, 2 bytes each, at 3.35e12 bytes/s, 4.2213 ms; KV cache of 64 * 4096
    tokens of 57 344 bytes, 4.4873 ms.
    """
    read = 7_615_616_512 - 152064 * 3584
    hardware = derived(values=plain())
    assert step_ms(hardware, 64, 4096) == pytest.approx((2 * read + 64 * 4096 * 57344) / 3.35e9)
    assert step_ms(hardware, 64, 4096) == pytest.approx(4.2213 + 4.4873, abs=1e-3)
    assert step_ms(hardware, 512, 0) == pytest.approx(2 * read * 512 / 989e9)  # products: above 295 sequences


def test_overheads_of_a_decode_step_by_hand():
    """1 ms and 28 layers of 10 us; 64 sequences of 5 us; with two accelerators 56 all-reduces of 3 us and of 2 bytes *
    3584 numbers per sequence, once back and forth over half of the data, at 450 GB/s.
    """
    values = plain(step_overhead_s=1e-3, layer_overhead_s=1e-5, sequence_overhead_s=5e-6, allreduce_s=3e-6)
    one, two = derived(values=values).decode, derived(values=values, tensor_parallel=2).decode
    assert one.step_overhead_s == pytest.approx(1.28e-3)
    assert one.sequence_overhead_s == pytest.approx(5e-6)
    assert two.step_overhead_s == pytest.approx(1.28e-3 + 56 * 3e-6)
    assert two.sequence_overhead_s == pytest.approx(5e-6 + 56 * 3584 * 2 / 450e9)
    over_nodes = derived(values=values, tensor_parallel=16).decode  # 2 * 15/16 of the data, at 50 GB/s
    assert over_nodes.sequence_overhead_s == pytest.approx(5e-6 + 56 * 2 * 15 / 16 * 3584 * 2 / 50e9)


@pytest.mark.parametrize(("batch", "share"), [(1, 8 / 128), (2, 1 - (120 / 128) ** 2), (10**4, 1.0)])
def test_a_batch_reads_the_experts_that_its_sequences_meet(batch, share):
    """One sequence meets 8 of 128, two 15.5, many all."""
    hardware = derived(H100.model_copy(update={"bf16_flops": 1e17}), QWEN30B, values=plain())
    dense = QWEN30B.parameters - QWEN30B.embedding_parameters - QWEN30B.expert_parameters
    read = 2 * (dense + share * QWEN30B.expert_parameters)
    assert step_ms(hardware, batch, 0) == pytest.approx(read / 3.35e9)


def test_a_roofline_with_half_of_its_experts_or_in_other_units_is_one_line():
    decode = {"kind": "roofline", "peak_flops": 1e15, "bandwidth": 1e12, "parameters_read": 1e9} | {
        "parameters_active": 1e9,
        "kv_bytes_per_token": 0.0,
        "experts": 8,
    }
    for more, line in (
        ({}, "hardware.decode.experts_per_token is missing; "),
        ({"experts_per_token": 9, "expert_parameters": 1e9}, "hardware.decode.experts_per_token must be at most"),
        ({"bandwidth": 3350.0}, "hardware.decode.bandwidth must be from 1e+09 to 1e+18 bytes/s, got 3350; did you"),
        ({"bandwidth": 3.35e24}, "hardware.decode.bandwidth must be from 1e+09 to 1e+18 bytes/s, got 3.35e+24; did"),
        ({"peak_flops": 989.0}, "hardware.decode.peak_flops must be from 1e+09 to 1e+18 FLOP/s, got 989; did you"),
    ):
        data = run_tables() | {"hardware": {"decode": decode | more, "training": {"token_s": 0.0}}}
        with pytest.raises(ConfigError, match=re.escape(line)):
            parse_run(data)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    gpu=st.sampled_from(gpu_names()),
    model=st.sampled_from(model_names()),
    tensor_parallel=st.sampled_from([1, 2, 4, 8]),
    batch=st.integers(1, 1024),
    context=st.integers(0, 20_000),
)
def test_the_band_is_ordered_and_steps_grow(gpu, model, tensor_parallel, batch, context):
    """Optimistic is fastest and pessimistic slowest, whatever runs; more sequences or context never take less time."""
    steps = []
    for level in Level:
        hardware = derived(find_gpu(gpu), find_model(model), tensor_parallel=tensor_parallel, level=level)
        steps.append(step_ms(hardware, batch, context, tensor_parallel=tensor_parallel))
        assert step_ms(hardware, batch + 1, context, tensor_parallel=tensor_parallel) >= steps[-1]
        assert step_ms(hardware, batch, context + 1, tensor_parallel=tensor_parallel) >= steps[-1]
    assert steps == sorted(steps)


@cache
def kernel_errors(level=Level.OPTIMISTIC):
    """Relative errors by (model, system, accelerators); points that the KV cache cannot hold are left out."""
    errors = {}
    for row in rows_of("decode_step_kernels.csv"):
        size, batch, context = int(row["tp"]), int(row["batch"]), int(row["ctx"])
        hardware = derived(SYSTEMS[row["system"]], find_model(row["model"]), tensor_parallel=size, level=level)
        if batch * context <= hardware.kv_cache_tokens:
            error = step_ms(hardware, batch, context, tensor_parallel=size) / float(row["tpot_ms"]) - 1
            errors.setdefault((row["model"], row["system"], size), []).append(error)
    return {series: np.array(errors[series]) for series in errors}


def test_the_optimistic_step_is_that_of_the_kernels():
    """One set of six numbers for three models, two GPUs and two sizes of engine: 2.7 % off on average, 16 % at most.

    A line fitted to each series alone (three numbers each) is off by 2.1 % on average.
    """
    errors = kernel_errors()
    together = np.concatenate(list(errors.values()))
    assert (len(errors), len(together)) == (8, 553)
    assert np.abs(together).mean() < 0.03
    assert np.abs(together).max() < 0.17
    assert all(np.abs(series).mean() < 0.035 and abs(series.mean()) < 0.02 for series in errors.values())


@pytest.mark.parametrize(("batch", "context", "measured_ms"), [(7, 300, 7.02), (10.6, 1750, 7.45)])
def test_the_central_step_is_that_of_a_measured_engine(batch, context, measured_ms):
    """vLLM 0.15.1, Qwen2.5-7B on one H100; batch and context by Little's law. Within 5 %, and inside the band."""
    steps = [step_ms(derived(level=level), batch, context) for level in Level]
    assert steps[0] < measured_ms < steps[2]
    assert steps[1] == pytest.approx(measured_ms, rel=0.05)


def test_a_measured_70b_on_four_accelerators_is_inside_the_band():
    """vLLM, Llama-3.1-70B, TP 4: 17.1 to 20.4 ms; its batch is not published, taken for 1 to 16 of 800 tokens."""
    rows = [row for row in rows_of("decode_step_measured_vllm.csv") if row["model"] == "Llama-3.1-70B-Instruct"]
    measured = [float(row["itl_mean_ms"]) for row in rows if row["stage"] != "-1"]
    model = find_model("Llama-3.1-70B-Instruct")
    low, high = (derived(model=model, tensor_parallel=4, level=Level(name)) for name in ("optimistic", "pessimistic"))
    assert step_ms(low, 1, 800, tensor_parallel=4) < min(measured)
    assert max(measured) < step_ms(high, 16, 800, tensor_parallel=4)


def test_prefill_is_that_of_the_kernels():
    """AIConfigurator, Qwen2.5-7B on one H100: 21.2, 85.6, 186.6 ms for 1024, 4096, 8192 tokens; 5 %."""
    prefill = derived(level=Level.OPTIMISTIC).prefill
    for tokens, measured_s in ((1024, 0.0212), (4096, 0.0856), (8192, 0.1866)):
        assert prefill.token_s * tokens + prefill.token_squared_s * tokens**2 == pytest.approx(measured_s, rel=0.05)


def test_prefill_by_hand():
    """Two accelerators: half the products each, and 56 all-reduces of 7168 bytes per token at 450 GB/s."""
    prefill = derived(values=plain(), tensor_parallel=2).prefill
    products_s = 2 * (7_615_616_512 - 152064 * 3584) / (2 * 989e12)
    assert prefill.token_s == pytest.approx(products_s + 56 * 7168 / 450e9)
    assert prefill.token_squared_s == pytest.approx(2 * 28 * 3584 / (2 * 989e12))


# ------------------------------------------------------------------------------------------- KV cache


@pytest.mark.parametrize(
    ("model", "h100", "h200"),
    [
        ("Qwen2.5-0.5B", 5905, 10_700),
        ("Qwen2.5-1.5B", 2458, 4514),
        ("Qwen2.5-3B", 1828, 3427),
        ("Qwen2.5-7B", 1017, 2045),
        ("Qwen2.5-14B", 224, 524),
        ("Qwen2.5-32B", 31, 255),
        ("Llama-3.1-8B", 439, 888),
        ("Qwen3-8B", 388, 787),
    ],
)
def test_capacities_are_those_derived_elsewhere(model, h100, h200):
    """Thousands of tokens, 0.9 of the memory, 3.76 GB kept back; the lists are rounded."""
    for gpu, thousands in (("H100", h100), ("H200", h200)):
        tokens = kv_cache_tokens(
            find_gpu(gpu), find_model(model), tensor_parallel=1, coefficients=coefficients(Level.CENTRAL)
        )
        assert tokens == pytest.approx(thousands * 1000, rel=2e-3, abs=600)


def test_capacity_by_hand():
    """Without losses: (2 * 80 GiB - 15.231 GB) / 57 344 bytes."""
    tokens = kv_cache_tokens(H100, QWEN7B, tensor_parallel=2, coefficients=plain())
    assert tokens == int((2 * 85.899e9 - 2 * 7_615_616_512) / 57_344)


def run_tables(**hardware):
    return {
        "optimizer_steps": 2,
        "cluster": {"accelerators": 16, "generation_accelerators": 8},
        "scheduler": {"train_batch_size": 16, "generation_batch_size": 8},
        "workload": {"length": {"kind": "fixed", "max": 100}},
        "hardware": hardware,
    }


def by_name(**more):
    return parse_run(run_tables(gpu="H100", model="Qwen2.5-7B", **more))


def test_a_model_that_does_not_fit_is_one_line_with_the_size_that_does():
    """141 GB on 73.5 usable of each: two have 147.1, which leaves room for 100 tokens."""
    config = parse_run(run_tables(gpu="H100", model="Llama-3.1-70B"))
    with pytest.raises(ConfigError) as caught:
        resolved_hardware(config)
    assert str(caught.value) == (
        "cluster.tensor_parallel=1 is too small for Llama-3.1-70B on H100: weights of 141.1 GB and the KV cache of one "
        "rollout of 100 tokens need 141.1 GB, 73.5 GB are available; the smallest that fits is tensor_parallel=2"
    )


def test_a_rollout_that_does_not_fit_is_one_line():
    """32B: 65.5 GB of weights leave 8 GB, 30 521 tokens, for a rollout of 40 000."""
    tables = run_tables(gpu="H100", model="Qwen2.5-32B") | {"workload": {"length": {"kind": "fixed", "max": 40_000}}}
    with pytest.raises(ConfigError, match=r"one rollout of 40000 tokens need 76\.0 GB, 73\.5 GB are available"):
        resolved_hardware(parse_run(tables))


def test_a_reserve_larger_than_the_memory_never_fits():
    config = by_name(coefficients={"memory_reserve_bytes": 1e12})
    with pytest.raises(ConfigError, match=r"0\.0 GB are available; none is large enough"):
        resolved_hardware(config)


# ------------------------------------------------------------------------------------------ training


def test_training_by_hand():
    """Without losses: 6 * 7.6156e9 / 989e12 s per token; attention 6 * 28 * 3584 / 989e12 per squared token."""
    training = derive_training(H100, QWEN7B, training_accelerators=1, coefficients=plain())
    assert training.token_s == pytest.approx(6 * 7_615_616_512 / 989e12)
    assert training.token_squared_s == pytest.approx(6 * 28 * 3584 / 989e12, rel=1e-4)
    assert training.step_s == pytest.approx(28 * 7_615_616_512 / 3.35e12)
    assert training.micro_batch_s == 0.0


def test_activations_and_gathers_by_hand():
    """Kept per token and layer 4*3584 + 2*3584 + 2*512 + 4*18944 = 98 304 numbers of 2 bytes, moved ten times; eight
    bytes per parameter gathered over eight links of 50 GB/s, once in 16 384 tokens and half once more.
    """
    assert kept_numbers(QWEN7B) == 98_304
    values = plain(activation_traffic=10.0, gather_exposed=1.0)
    training = derive_training(H100, QWEN7B, training_accelerators=64, coefficients=values)
    gather_s = 8 * 7_615_616_512 / 400e9
    expected = 6 * 7_615_616_512 / 989e12 + 10 * 2 * 28 * 98_304 / 3.35e12 + gather_s / 16_384
    assert training.token_s == pytest.approx(expected)
    assert training.micro_batch_s == pytest.approx(gather_s / 2)


@pytest.mark.parametrize(("changed", "passes"), [({"recomputation": 1.0}, 4), ({"extra_forward_passes": 2.0}, 5)])
def test_every_forward_pass_more_is_a_third_more(changed, passes):
    values = plain(activation_traffic=7.0)
    plainly = derive_training(H100, QWEN7B, training_accelerators=1, coefficients=values)
    more = derive_training(H100, QWEN7B, training_accelerators=1, coefficients=values.model_copy(update=changed))
    assert more.token_s == pytest.approx(plainly.token_s * passes / 3)
    assert more.token_squared_s == pytest.approx(plainly.token_squared_s * passes / 3)


def test_experts_exchange_tokens_inside_a_node_or_between_nodes():
    """30B: 489 GB of states fit into eight of 86 GB: eight copies at 450 GB/s. 235B does not: four at 50 GB/s."""
    for name, copies, link in (("Qwen3-30B-A3B", 8, 450e9), ("Qwen3-235B-A22B", 4, 50e9)):
        model = find_model(name)
        off, on = (
            derive_training(H100, model, training_accelerators=64, coefficients=plain(exchange_exposed=share))
            for share in (0.0, 1.0)
        )
        expected = 4 * model.layers * copies * model.width * 2 / link
        assert on.token_s - off.token_s == pytest.approx(expected, rel=1e-6)


def mpt(row):
    """The model of a row of pretraining_throughput.csv: no gate in its feed-forward of four times the width."""
    width, layers = int(row["width"]), int(row["layers"])
    parameters = 12.0 * layers * width**2 + 50_368 * width
    return LanguageModel(
        name=row["model"],
        parameters=parameters,
        active_parameters=parameters,
        layers=layers,
        width=width,
        attention_width=width,
        feed_forward_width=2 * width,
        kv_bytes_per_token=4.0 * layers * width,
    )


@cache
def pretraining_errors(level=Level.CENTRAL):
    """Relative errors of tokens/s by GPU; micro-batch and recomputation are those of the row."""
    errors = {}
    for row in rows_of("pretraining_throughput.csv"):
        length = int(row["sequence"])
        known = {"recomputation": float(row["recomputation"]), "pack_tokens": float(length * int(row["micro_batch"]))}
        training = derive_training(
            find_gpu(row["gpu"]),
            mpt(row),
            training_accelerators=int(row["gpus"]),
            coefficients=coefficients(level, known),
        )
        rate = 1 / (training.token_s + training.token_squared_s * length)
        errors.setdefault(row["gpu"], []).append(rate / float(row["tokens_per_s_per_gpu"]) - 1)
    return {gpu: np.array(errors[gpu]) for gpu in errors}


def test_training_is_as_fast_as_published_pretraining():
    """MPT of 1B to 70B, 512 to 65 536 tokens, 8 to 512 GPUs: one set of four numbers, 5.4 % off on average."""
    errors = pretraining_errors()
    together = np.concatenate(list(errors.values()))
    assert {gpu: len(errors[gpu]) for gpu in errors} == {"H100": 61, "A100": 36}
    assert np.abs(together).mean() < 0.06
    assert np.quantile(np.abs(together), 0.9) < 0.12
    assert all(np.abs(series).mean() < 0.07 for series in errors.values())


@pytest.mark.parametrize(
    ("model", "gpus", "tokens", "measured"),
    [
        pytest.param("Llama-3.1-8B", 8, 8192, 5762, id="torchtitan, FSDP"),
        pytest.param("Llama-3.1-8B", 8, 8192, 6667, id="torchtitan, compiled"),
        pytest.param("Llama-3.1-70B", 64, 8192, 867, id="NeMo AutoModel"),
        pytest.param("Qwen3-4B", 8, 16384, 6215, id="prime-rl, supervised"),
    ],
)
def test_other_dense_trainers_are_within_15_percent(model, gpus, tokens, measured):
    """Not fitted to. Pre-training and supervised rows; recomputation as by default."""
    training = derived(model=find_model(model), trainers=gpus).training
    assert 1 / (training.token_s + training.token_squared_s * tokens) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    ("model", "gpus", "measured"),
    [("Qwen3-30B-A3B", 8, 12_040), ("DeepSeek-V3", 256, 1002), ("DeepSeek-V3", 1024, 865)],
)
def test_trainers_of_mixtures_are_inside_the_band(model, gpus, measured):
    """NeMo AutoModel, H100, 4096 tokens. Central: 34 % low, 9 % low, 6 % high."""
    rates = []
    for level in Level:
        training = derived(model=find_model(model), trainers=gpus, level=level).training
        rates.append(1 / (training.token_s + training.token_squared_s * 4096))
    assert rates[0] > measured > rates[2]
    assert rates[1] == pytest.approx(measured, rel=0.35)


@pytest.mark.parametrize(
    ("model", "gpus", "tokens", "packs", "measured"),
    [
        pytest.param("Qwen3-4B", 8, 16384, 2, 3253, id="4B, two micro-batches of 16 k"),
        pytest.param("Qwen3-4B", 8, 65536, 1, 3621, id="4B, 64 k"),
        pytest.param("Qwen3-0.6B", 1, 16384, 1, 11896, id="0.6B, 16 k"),
        pytest.param("Qwen3-0.6B", 1, 65536, 1, 10147, id="0.6B, 64 k"),
    ],
)
def test_an_rl_trainer_with_few_tokens_per_step_is_inside_the_band(model, gpus, tokens, packs, measured):
    """prime-rl: what its step costs whatever it holds is part of the band."""
    rates = []
    for level in Level:
        training = derived(model=find_model(model), trainers=gpus, level=level).training
        pack_s = tokens * training.token_s + tokens**2 * training.token_squared_s + training.micro_batch_s
        rates.append(packs * tokens / (packs * pack_s + training.step_s))
    assert rates[0] > measured > rates[2]


def test_training_is_less_efficient_with_few_tokens_per_accelerator():
    """What a step costs whatever it holds is spread over fewer tokens: the same step on twice the accelerators."""
    tokens = 512 * 1000

    def share_of_ideal(trainers):
        training = derived(trainers=trainers).training
        ideal_s = tokens * training.token_s / trainers
        return ideal_s / (ideal_s + training.step_s + training.micro_batch_s)

    shares = [share_of_ideal(trainers) for trainers in (8, 16, 32, 64, 128)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.85
    assert shares[-1] < 0.4


@settings(derandomize=True, deadline=None, max_examples=60)
@given(gpu=st.sampled_from(gpu_names()), model=st.sampled_from(model_names()), trainers=st.sampled_from([1, 8, 64]))
def test_the_band_of_everything_else_is_ordered(gpu, model, trainers):
    seconds = []
    for level in Level:
        it = derived(find_gpu(gpu), find_model(model), trainers=trainers, colocated=True, level=level)
        training = it.training.model_dump()
        assert training.pop("sequence_accelerators") == (min(8, trainers) if level is Level.OPTIMISTIC else 1)
        parts = [*training.values(), *it.weights.model_dump().values()]
        seconds.append([*parts, *it.switch.model_dump().values(), *it.prefill.model_dump().values()])
    for fast, middle, slow in zip(*seconds, strict=True):
        assert fast <= middle <= slow


# -------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer"),
    [(0, 2, 2, 12), (1, 2, 2, 1.5), (2, 2, 0.25, 1.5), (3, 0.25, 0.25, 1.5)],
)
def test_zero_spreads_states_over_eight_accelerators(stage, weights, gradients, optimizer):
    """Bytes per parameter: bf16 weights and gradients, fp32 master weights and two moments."""
    memory = training_memory(QWEN7B, accelerators=8, zero_stage=stage)
    per_parameter = [part / QWEN7B.parameters for part in (memory.weights, memory.gradients, memory.optimizer)]
    assert per_parameter == pytest.approx([weights, gradients, optimizer])
    assert memory.states == pytest.approx((weights + gradients + optimizer) * QWEN7B.parameters)


def test_activations_by_hand():
    """16 384 tokens: 28 layers of 3584 numbers and one layer of 98 304, or 28 of these; 1024 tokens' logits of
    152 064 entries and 10 bytes.
    """
    logits = 1024 * 152_064 * 10
    again, kept = (training_memory(QWEN7B, accelerators=8, recomputation=flag) for flag in (True, False))
    assert again.activations == 2 * 16_384 * (28 * 3584 + 98_304) + logits
    assert kept.activations == 2 * 16_384 * 28 * 98_304 + logits
    assert again.total == again.states + again.activations
    assert training_memory(QWEN7B, accelerators=8, pack_tokens=512).activations == (
        512 * (2 * (28 * 3584 + 98_304) + 152_064 * 10)
    )


def test_training_memory_decides_what_fits():
    """7B needs 122 GB of states: too much for one H100, 15 GB each on eight; with activations kept 105 GB, too much."""
    assert training_memory(QWEN7B, accelerators=1).total > H100.memory_bytes
    assert training_memory(QWEN7B, accelerators=8).total < 0.4 * H100.memory_bytes
    assert training_memory(QWEN7B, accelerators=8, recomputation=False).total > H100.memory_bytes


def test_the_pack_that_fits_fills_the_memory():
    """7B on 8 of 85.9 GB: with stage 3, 90 % of them hold states, logits and this many tokens, and not more."""
    for stage, again in ((3, 1.0), (2, 1.0), (3, 0.0), (3, 0.5)):
        known = {"accelerators": 8, "zero_stage": stage, "recomputation": again}
        fits = pack_that_fits(QWEN7B, memory_bytes=0.9 * H100.memory_bytes, **known)
        assert training_memory(QWEN7B, pack_tokens=fits, **known).total == pytest.approx(0.9 * H100.memory_bytes)
    assert pack_that_fits(QWEN7B, memory_bytes=9e9, **known) < 0  # not even the states


def trained(level="central", trainer=None, **hardware):
    """A run file on 16 H100s, 8 of which train, with a table [train] if there is something about its trainer."""
    tables = run_tables(gpu="H100", model="Qwen2.5-7B", level=level, **hardware)
    if trainer is not None:
        task = {"name": "math", "settings": {}}
        trainer = {**trainer}
        tables["train"] = {
            "model": {"path": "m"}, "task": task, "optimizer": {"learning_rate": 1e-6}, "trainer": trainer
        }  # fmt: skip
    return parse_run(tables)


def run_values(config, *, accelerators=8, longest=9000):
    return run_coefficients(config, H100, QWEN7B, training_accelerators=accelerators, longest=longest)


def fits(config, *, accelerators=8, longest=9000):
    return run_trainer_fits(config, H100, QWEN7B, training_accelerators=accelerators, longest=longest)


@pytest.mark.parametrize("level", Level)
def test_every_level_has_packs_that_its_trainer_can_hold(level):
    """Without recomputation, 8 H100s beside 15.2 GB of states and 1.6 of logits: 60.5 GB / 5.5 MB = 10 993 tokens."""
    config = trained(level.value)
    values = run_values(config)
    expected = {"optimistic": 10_993, "central": 16_384, "pessimistic": 9000}  # the longest; not 8192
    assert math.floor(values.pack_tokens) == expected[level.value]
    assert fits(config)
    assert not fits(config, accelerators=1)
    resolved = resolved_hardware(config).training
    packed = derived(values=run_values(config, longest=100)).training
    assert resolved == packed


def test_a_pack_holds_the_longest_rollout_or_training_does_not_fit():
    """Without recomputation 8 share a sequence of 80 000 tokens; one alone holds 10 993 of them."""
    together, alone = trained("optimistic"), trained("optimistic", coefficients={"sequence_accelerators": 1.0})
    assert fits(together, longest=80_000)
    assert not fits(alone, longest=11_500)
    assert run_values(alone, longest=11_500).pack_tokens == 11_500
    assert fits(trained("central"), longest=80_000)


def test_what_the_run_file_says_about_its_trainer_counts_at_every_level():
    """Packs and recomputation are known then: of these the band has none, and a pack that does not fit is refused."""
    for level in Level:
        values = run_values(trained(level.value, {"pack_tokens": 12_000, "activation_checkpointing": True}))
        assert (values.pack_tokens, values.recomputation) == (12_000, 1.0)
    assert not fits(trained(trainer={"zero_stage": 3}))  # 16 384 tokens, not computed again: 90 GB
    assert fits(trained(trainer={"zero_stage": 3, "activation_checkpointing": True}))
    assert not fits(trained(trainer={"zero_stage": 0, "activation_checkpointing": True}))
    kept = run_values(trained(trainer={}, coefficients={"recomputation": 0.5}))
    assert (kept.recomputation, kept.pack_tokens) == (0.5, 16_384)
    slow, fast = (
        resolved_hardware(trained(trainer={"activation_checkpointing": again})).training.token_s
        for again in (True, False)
    )
    assert slow > fast


def test_sequences_are_shared_by_at_most_those_that_train():
    assert [derived(trainers=n, level=Level.OPTIMISTIC).training.sequence_accelerators for n in (2, 8, 64)] == [2, 8, 8]
    assert derived(trainers=64).training.sequence_accelerators == 1


# ----------------------------------------------------------------------------------- weights and switch


def test_a_transfer_of_7b_takes_at_least_what_its_link_needs():
    """15.2 GB at 50 GB/s: 0.30 s. Optimistic is that bound; all others are longer; the engine also pauses 20 ms."""
    times = [derived(level=level).weights for level in Level]
    assert times[0].publish_s == pytest.approx(2 * 7_615_616_512 / 50e9)
    assert times[0].publish_s == pytest.approx(0.30, abs=0.005)
    assert all(one.publish_s >= times[0].publish_s and one.transfer_s == 0.0 for one in times)
    assert [one.pause_s - one.publish_s for one in times] == pytest.approx([0.02] * 3)


TRANSFERS = [
    pytest.param(0.6e9, 1, 0.18, id="TRL, Qwen3-0.6B"),
    pytest.param(4.02e9, 1, 0.21, id="NeMo-RL, 4B"),
    pytest.param(4.02e9, 1, 0.34, id="NeMo-RL, 4B, slower"),
    pytest.param(30.5e9, 2, 0.74, id="NeMo-RL, 30B"),
    pytest.param(30.5e9, 2, 1.0, id="NeMo-RL, 30B, slower"),
    pytest.param(671e9, 32, 2.39, id="NeMo-RL, DeepSeek-V3"),
    pytest.param(9e9, 1, 3.5, id="verl user, 9B"),
    pytest.param(7.62e9, 1, 5.5, id="verl, 7B"),
    pytest.param(72.7e9, 8, 28.8, id="verl, 72B"),
    pytest.param(106e9, 8, 3.47, id="checkpoint-engine, GLM-4.5-Air"),
]
"""Parameters, accelerators of an engine (of some rows not published and taken as here), measured seconds."""


@pytest.mark.parametrize(("parameters", "tensor_parallel", "measured"), TRANSFERS)
def test_measured_transfers_are_inside_the_band(parameters, tensor_parallel, measured):
    """5 % of slack at the ends. Outside: verl's 30B-A3B (32 s: every expert's tensors one by one)."""
    model = QWEN7B.model_copy(update={"parameters": parameters})
    low, _, high = (
        derive_weights(H100, model, tensor_parallel=tensor_parallel, coefficients=coefficients(level)).publish_s
        for level in Level
    )
    assert 0.95 * low <= measured <= 1.05 * high


def test_a_shard_or_everything_travels_to_each_accelerator():
    """Of 15.2 GB to an engine of four: a quarter, or all; half of it sharded: 5/8."""
    for sharded, part in ((1.0, 0.25), (0.0, 1.0), (0.5, 0.625)):
        weights = derive_weights(H100, QWEN7B, tensor_parallel=4, coefficients=plain(transfer_sharded=sharded))
        assert weights.publish_s == pytest.approx(part * 2 * 7_615_616_512 / 50e9)


def test_the_switch_moves_the_trainers_states():
    """16 bytes per parameter over eight accelerators at 10 GB/s, both ways; none if trainer and engines are apart."""
    values = plain(switch_to_training_s=1.0, switch_to_generation_s=2.0)
    moved_s = 16 * 7_615_616_512 / 8 / 1e10
    switch = derive_switch(QWEN7B, training_accelerators=8, coefficients=values)
    assert (switch.to_training_s, switch.to_generation_s) == pytest.approx((1 + moved_s, 2 + moved_s))
    assert derived(values=values, colocated=True).switch == switch
    assert derived(values=values).switch == PhaseSwitchConfig()


# ------------------------------------------------------------------------------------------- run files


def test_by_name_gives_every_table():
    config = by_name(level="pessimistic")
    tables = resolved_hardware(config)
    expected = derived(level=Level.PESSIMISTIC)
    for name in ("decode", "prefill", "kv_cache_tokens", "training", "weights", "switch"):
        assert getattr(tables, name) == getattr(expected, name), name
    assert (tables.gpu, tables.model, tables.level) == ("H100", "Qwen2.5-7B", Level.PESSIMISTIC)


def test_a_copy_of_a_run_file_by_name_is_the_same():
    config = by_name(level="optimistic", coefficients={"pause_s": 0.5}, training={"token_s": 1e-4})
    assert parse_run(tomllib.loads(dump_run(config))) == config


def test_what_is_given_stays():
    given_tables = {
        "decode": {"kind": "affine", "step_s": 0.01},
        "prefill": {"token_s": 1e-5},
        "kv_cache_tokens": 1234,
        "training": {"token_s": 1e-3},
        "weights": {"pause_s": 0.5},
        "switch": {"to_training_s": 3.0},
        "latency": {"reward_s": 0.25},
    }
    for name, table in given_tables.items():
        config = by_name(**{name: table})
        tables = resolved_hardware(config)
        assert getattr(tables, name) == getattr(config.hardware, name), name
        others = [other for other in given_tables if other not in (name, "latency")]
        assert all(getattr(tables, other) == getattr(derived(), other) for other in others), name


def test_without_names_missing_tables_cost_nothing():
    config = parse_run(run_tables(decode={"kind": "affine", "step_s": 0.01}, training={"token_s": 1e-4}))
    tables = resolved_hardware(config)
    assert tables.kv_cache_tokens is None
    seconds = [*tables.prefill.model_dump().values(), *tables.weights.model_dump().values()]
    assert {*seconds, *tables.switch.model_dump().values()} == {0.0}


def test_a_given_capacity_needs_no_fit():
    config = parse_run(run_tables(gpu="H100", model="Llama-3.1-70B", kv_cache_tokens=500))
    assert resolved_hardware(config).kv_cache_tokens == 500


def test_coefficients_of_the_run_file_are_used():
    expected = derived(values=coefficients(Level.CENTRAL, {"training_mfu": 0.31}))
    assert resolved_hardware(by_name(coefficients={"training_mfu": 0.31})).training == expected.training


@pytest.mark.parametrize(("stage", "spread"), [(0, 16), (1, 4 + 12 / 16), (2, 2 + 14 / 16), (3, 1)])
def test_the_switch_moves_what_the_zero_stage_leaves_on_an_accelerator(stage, spread):
    """Bytes per parameter over 16 accelerators, at 25 GB/s, both ways, and 2 s besides."""
    config = trained(trainer={"zero_stage": stage})
    config = config.model_copy(update={"scheduler": config.scheduler.model_copy(update={"kind": "conventional"})})
    assert resolved_hardware(config).switch.to_training_s == pytest.approx(2 + spread * QWEN7B.parameters / 25e9)


def test_colocated_accelerators_all_train():
    tables = run_tables(gpu="H100", model="Qwen2.5-7B")
    tables["scheduler"]["kind"] = "conventional"
    assert resolved_hardware(parse_run(tables)).switch == derived(trainers=16, colocated=True).switch


@pytest.mark.parametrize(
    ("hardware", "line"),
    [
        ({"gpu": "H100"}, "run: hardware.model is missing; hardware.gpu needs it"),
        ({"model": "Qwen2.5-7B"}, "run: hardware.gpu is missing; hardware.model needs it"),
        ({"training": {"token_s": 0.0}}, "run: hardware.decode is missing"),
        ({"decode": {"kind": "affine", "step_s": 1.0}}, "run: hardware.training is missing"),
        (
            {
                "decode": {"kind": "affine", "step_s": 1.0},
                "training": {"token_s": 0.0},
                "coefficients": {"pause_s": 1.0},
            },
            "run: hardware.coefficients are read only with hardware.gpu and hardware.model, which are missing",
        ),
        (
            {"gpu": "H100", "model": "Qwen2.5-7B", "level": "best"},
            "run: hardware.level must be 'optimistic', 'central' or 'pessimistic', got \"best\"",
        ),
        (
            {"gpu": "H100", "model": "Qwen2.5-7B", "coefficients": {"training_mfu": 31.0}},
            "run: hardware.coefficients.training_mfu must be at most 1, got 31",
        ),
    ],
)
def test_wrong_hardware_is_one_line(hardware, line):
    with pytest.raises(ConfigError) as caught:
        parse_run(run_tables(**hardware))
    assert str(caught.value) == line


def test_paths_of_a_run_file_are_relative_to_it(tmp_path):
    """A GPU and a model of one's own, found from any folder, and kept by the copy that a run writes."""
    (tmp_path / "mine.toml").write_text(
        "bf16_flops = 5e14\nmemory_bytes = 64e9\nbandwidth = 2e12\nnetwork = 25e9\n", encoding="utf-8"
    )
    (tmp_path / "models" / "own").mkdir(parents=True)
    config = {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8, "vocab_size": 32000}
    config |= {"intermediate_size": 4096}
    (tmp_path / "models" / "own" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    text = "\n".join(
        (
            "optimizer_steps = 1",
            "cluster = { accelerators = 2, generation_accelerators = 1 }",
            "scheduler = { train_batch_size = 2, generation_batch_size = 2 }",
            'workload = { length = { kind = "fixed", max = 5 } }',
            'hardware = { gpu = "mine.toml", model = "models/own" }',
        )
    )
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    config = load_run(tmp_path / "run.toml")
    assert config.hardware.gpu == str(tmp_path / "mine.toml")
    assert config.hardware.model == str(tmp_path / "models" / "own")
    tables = resolved_hardware(config)
    assert isinstance(tables.decode, RooflineDecode)
    assert tables.decode.peak_flops == 5e14
    assert tomllib.loads(dump_run(config))["hardware"]["gpu"] == str(tmp_path / "mine.toml")
    assert simulate(config).samples_trained == 2


def test_the_simulator_charges_attention_by_squared_length():
    """Two sequences of 10 and 10 tokens at 1 s per squared token over 2 trainers: 100 s, and not 200."""
    hardware = {"decode": {"kind": "affine", "step_s": 1e-9}, "training": {"token_s": 0.0, "token_squared_s": 1.0}}
    tables = {
        "optimizer_steps": 1,
        "cluster": {"accelerators": 3, "generation_accelerators": 1},
        "scheduler": {"train_batch_size": 2, "generation_batch_size": 2},
        "workload": {"prompt_tokens": 4, "length": {"kind": "fixed", "max": 6}},
        "hardware": hardware,
    }
    assert simulate(parse_run(tables)).duration_s == pytest.approx(100.0, abs=1e-6)


# ----------------------------------------------------------------------------------------- the page


def percent(errors):
    """The cells of a table of errors: points, mean, largest, bias."""
    return f"{len(errors)} | {np.abs(errors).mean():.1%} | {np.abs(errors).max():.1%} | {errors.mean():+.1%}"


def page_rows():
    """Every row of the tables of docs/hardware.md that this code can make; after a change paste them there."""
    rows = [
        f"| `{name}` | {' | '.join(f'{entry[level]:g}' for level in Level)} | {entry['source']} |"
        for name, entry in coefficient_table().items()
    ]
    for name in gpu_names():
        gpu = find_gpu(name)
        fp8 = "–" if gpu.fp8_flops is None else f"{gpu.fp8_flops / 1e12:g}"
        cells = (gpu.memory_bytes / 1e9, gpu.bandwidth / 1e12, gpu.nvlink / 1e9, gpu.network / 1e9, gpu.gpus_per_node)
        numbers = " | ".join(f"{cell:.4g}" for cell in cells)
        rows.append(f"| {name} | {gpu.bf16_flops / 1e12:g} | {fp8} | {numbers} | {gpu.source} |")
    for name in model_names():
        model = find_model(name)
        active = "" if model.active_parameters == model.parameters else f"{model.active_parameters / 1e9:.2f}"
        parameters = f"{model.parameters / 1e9:.2f}"
        rows.append(f"| {name} | {parameters} | {active} | {model.layers} | {model.kv_bytes_per_token:,.0f} |")
    for (model_name, system, size), errors in kernel_errors().items():
        rows.append(f"| {model_name}, {system.removesuffix('_sxm').upper()}, TP {size} | {percent(errors)} |")
    rows.append(f"| all kernel points | {percent(np.concatenate(list(kernel_errors().values())))} |")
    for gpu_name, errors in pretraining_errors().items():
        rows.append(f"| pre-training on {gpu_name} | {percent(errors)} |")
    rows.append(f"| all pre-training runs | {percent(np.concatenate(list(pretraining_errors().values())))} |")
    points = [(7, 300), (10.6, 1750), (64, 4096), (128, 4096), (256, 4096)]
    for level in Level:
        steps = [f"{step_ms(derived(level=level), batch, context):.3g}" for batch, context in points]
        rows.append(f"| {level.value} | {' | '.join(steps)} |")
    return rows


def test_the_page_says_what_the_files_and_the_model_say():
    lines = (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8").splitlines()
    assert [row for row in page_rows() if row not in lines] == []


def test_more_accelerators_than_heads_of_keys_and_values_hold_copies():
    """Qwen2.5-7B has 4: an engine of 8 holds each twice, one of 4 once."""
    model = find_model("Qwen2.5-7B")
    assert [model.cached_bytes(size) / model.kv_bytes_per_token for size in (1, 4, 8)] == [1, 1, 2]
    assert find_model("DeepSeek-V3").cached_bytes(8) == 70_272
