"""Run files, traces and tables of step times to calibrate from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipelinerl.calibration.solve import HardwareFit
from pipelinerl.config.run import RunConfig, parse_run, with_overrides
from pipelinerl.hardware.costs import DecodeStep
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
