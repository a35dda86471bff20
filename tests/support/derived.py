"""The hardware model of GPUs and models of the catalogue, and its errors against published data."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

import numpy as np

from pipelinerl.config.run import parse_run
from pipelinerl.hardware.catalogue import LanguageModel, find_gpu, find_model
from pipelinerl.hardware.coefficients import Coefficients, Level, coefficients
from pipelinerl.hardware.costs import DecodeStep
from pipelinerl.hardware.derive import NOTHING_BESIDE, derive_hardware, derive_training
from pipelinerl.hardware.stack import stack_levels

DATA = Path(__file__).parents[1] / "data"
H100, QWEN7B = find_gpu("H100"), find_model("Qwen2.5-7B")
SYSTEMS = {"h100_sxm": find_gpu("H100"), "h200_sxm": find_gpu("H200")}
PLAIN = dict.fromkeys(Coefficients.model_fields, 0.0) | {
    **{f"{what}_efficiency": 1.0 for what in ("weight", "kv", "flops")},
    **dict.fromkeys(("prefill_mfu", "training_mfu", "expert_mfu_factor", "memory_share"), 1.0),
    **dict.fromkeys(("sequence_accelerators", "allreduce_share", "log_probability_cost"), 1.0),
    "attention_flops_per_byte": 1e12,
    "pack_tokens": 16384.0,
    **dict.fromkeys(("host_bandwidth", "stream_bandwidth", "file_bandwidth"), 1e10),
    **{"changed_share": 0.01, "delta_bandwidth": 1e10},
}
"""Coefficients of a machine without losses, to count by hand."""


def plain(**changed):
    return Coefficients(**(PLAIN | changed))


def derived(
    gpu=H100, model=QWEN7B, *, tensor_parallel=1, trainers=8, colocated=False, level=Level.CENTRAL, values=None, **more
):
    return derive_hardware(
        gpu,
        model,
        tensor_parallel=tensor_parallel,
        training_accelerators=trainers,
        colocated=colocated,
        coefficients=values or coefficients(level),
        **more,
    )


def step_ms(hardware, batch, context, *, tensor_parallel=1):
    """Milliseconds of a decode step of sequences of ``context`` tokens each."""
    step = DecodeStep(hardware.decode, tensor_parallel=tensor_parallel, most=batch)
    return step.of(batch, batch * context) * 1e3


def run_data(**hardware):
    """A run file with this table [hardware]: 16 accelerators, 8 of which train."""
    return {
        "optimizer_steps": 2,
        "cluster": {"accelerators": 16, "generation_accelerators": 8},
        "scheduler": {"train_batch_size": 16, "generation_batch_size": 8},
        "workload": {"length": {"kind": "fixed", "max": 100}},
        "hardware": hardware,
    }


def by_name(**more):
    """A run on H100s, with more keys of [hardware]."""
    return parse_run(run_data(gpu="H100", model="Qwen2.5-7B", **more))


def trained(level="central", trainer=None, **hardware):
    """A run file on 16 H100s, 8 of which train, with a table [train] if ``trainer`` has keys."""
    tables = run_data(gpu="H100", model="Qwen2.5-7B", level=level, **hardware)
    if trainer is not None:
        tables["train"] = {
            "model": {"path": "m"},
            "task": {"name": "math", "settings": {}},
            "optimizer": {"learning_rate": 1e-6},
            "trainer": trainer,
        }
    return parse_run(tables)


def rows_of(file):
    with (DATA / file).open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


@cache
def kernel_errors():
    """Relative errors by (model, system, accelerators); points that the KV cache cannot hold are left out.

    The fitted numbers are the optimistic level of vLLM 0.15: kernels without an engine.
    """
    errors = {}
    fitted = {name: one[Level.OPTIMISTIC] for name, one in stack_levels("vllm-0.15", None).items()}
    values = coefficients(Level.OPTIMISTIC, fitted)
    for row in rows_of("decode_step_kernels.csv"):
        size, batch, context = int(row["tp"]), int(row["batch"]), int(row["ctx"])
        hardware = derived(SYSTEMS[row["system"]], find_model(row["model"]), tensor_parallel=size, values=values)
        if batch * context <= hardware.kv_cache_tokens:
            error = step_ms(hardware, batch, context, tensor_parallel=size) / float(row["tpot_ms"]) - 1
            errors.setdefault((row["model"], row["system"], size), []).append(error)
    return {series: np.array(errors[series]) for series in errors}


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
        known = NOTHING_BESIDE | {
            "recomputation": float(row["recomputation"]),
            "pack_tokens": float(length * int(row["micro_batch"])),
        }
        training = derive_training(
            find_gpu(row["gpu"]).model_copy(update={"attention_factor": 1.0}),  # FlashAttention 1 and 2
            mpt(row),
            training_accelerators=int(row["gpus"]),
            coefficients=coefficients(level, known),
        )
        rate = 1 / (training.token_s + training.token_squared_s * length)
        errors.setdefault(row["gpu"], []).append(rate / float(row["tokens_per_s_per_gpu"]) - 1)
    return {gpu: np.array(errors[gpu]) for gpu in errors}
