"""The driver with the engines of 128 H100s: rollouts per second on one core, and its memory.

    python benchmarks/driver_at_scale.py                    # 100,000 rollouts
    python benchmarks/driver_at_scale.py --rollouts 20000 --profile

48 fake engines of 64 sequences answer at once with 3000 random tokens; a fake trainer takes 1024 rollouts a step. So
nearly all the time is the driver's: scheduler, rewards, samples, trace, metrics, and a Hugging Face tokenizer that
decodes the answers. 128 H100s need about 160 rollouts per second. Transport from a real engine's process is not
included.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from tiny_model import make_tokenizer

from backends.fake import FakeBackend, FakeEngine, FakeTrainer
from backends.huggingface_codec import HuggingFaceCodec
from backends.interface import Generated, GenerateRequest, Parts, Weights
from backends.owner import driving
from backends.run import drive
from pipelinerl.config.run import RunConfig
from pipelinerl.rl.tasks import Arithmetic
from pipelinerl.scheduler.events import VersionSpans

ENGINES, SLOTS, TOKENS, BATCH = 48, 64, 3000, 1024
RNG = np.random.default_rng(0)
ANSWERS = RNG.integers(1, 16, size=1_000_000)
LOGPROBS = -RNG.exponential(size=1_000_000).astype(np.float32)
"""Tokens and log-probabilities from which answers are cut."""


class AtOnce(FakeEngine):
    """Answers at once, with the most tokens allowed."""

    async def generate(self, request: GenerateRequest) -> Generated:
        await asyncio.sleep(0)
        version = self._weights.version
        first = 977 * request.rollout_id % (len(ANSWERS) - request.max_new_tokens)
        answer = slice(first, first + request.max_new_tokens)
        return Generated(
            tokens_T=ANSWERS[answer].copy(),
            logprob_T=LOGPROBS[answer].copy(),
            spans=VersionSpans((version,), (request.max_new_tokens,)),
            aborted=False,
        )


class StandIns(FakeBackend):
    @contextmanager
    def open(self, config: RunConfig) -> Iterator[Parts]:
        with super().open(config) as parts:
            yield replace(parts, engines={engine_id: AtOnce(num_slots=SLOTS) for engine_id in parts.engines})


def run_file(steps: int) -> RunConfig:
    data = {
        "optimizer_steps": steps,
        "cluster": {"accelerators": 128, "generation_accelerators": ENGINES},
        "scheduler": {"train_batch_size": BATCH, "generation_batch_size": SLOTS},
        "workload": {"group_size": 8, "length": {"kind": "fixed", "max": TOKENS}},
        "hardware": {"decode": {"kind": "affine", "step_s": 0.01}, "training": {"token_s": 1e-6}},
        "train": {
            "device": "cpu",
            "model": {"path": "none"},
            "task": {"name": "arithmetic"},
            "optimizer": {"learning_rate": 1e-3},
        },
    }
    return RunConfig.model_validate_json(json.dumps(data))


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize() / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    options = parser.parse_args()
    config = run_file(max(1, options.rollouts // BATCH))
    profile = cProfile.Profile()
    memory: list[float] = []

    class Trainer(FakeTrainer):
        async def publish(self, version: int) -> Weights:
            memory.append(resident_mb())
            return await super().publish(version)

    with tempfile.TemporaryDirectory() as scratch, StandIns().open(config) as stand_ins:
        parts = replace(stand_ins, trainer=Trainer(train_batch_size=BATCH), codec=HuggingFaceCodec(make_tokenizer()))
        before_s, before_cpu_s = time.monotonic(), time.process_time()
        if options.profile:
            profile.enable()
        with driving(Path(scratch) / "run") as lock:
            summary = drive(config, parts=parts, task=Arithmetic(), lock=lock)
        profile.disable()
        wall_s, cpu_s = time.monotonic() - before_s, time.process_time() - before_cpu_s
        size = sum(file.stat().st_size for file in Path(scratch).rglob("*") if file.is_file())
    done = config.optimizer_steps * BATCH
    print(f"{done:,} rollouts: {wall_s:.1f} s, {cpu_s:.1f} s of processor time; {done / cpu_s:,.0f} rollouts a second")
    print(f"driver by its own measure: {1e3 * summary.driver_s_per_rollout:.2f} ms a rollout")
    tenths = [memory[min(len(memory) - 1, part * len(memory) // 10)] for part in range(11)]
    print("resident memory (MB) at each tenth of the run:", *(f"{one:.0f}" for one in tenths))
    print(f"run folder: {size / done:,.0f} bytes a rollout")
    if options.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(35)


if __name__ == "__main__":
    main()
