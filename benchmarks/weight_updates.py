"""What a weight update costs: real vLLM engines and a DeepSpeed trainer on this machine's CPU, random weights.

::

    python benchmarks/weight_updates.py --transport broadcast --updates 3
    python benchmarks/weight_updates.py --transport file --updates 3

Engines answer all the time, the trainer trains all the time but while it makes a version ready. Printed are, as medians
over the updates, with their range: seconds that an engine and the trainer stand still, tokens per second before, during
and after the transfer, and the most memory that the processes take above what they had before (proportional share of
what they have in common).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from backends.deepspeed.rank_settings import RankSettings
from backends.deepspeed.trainer import DeepSpeedTrainer
from backends.interface import GenerateRequest, GroupMembers, Sample, Weights
from backends.transfer.group import WeightSyncGroup
from backends.vllm.process import VLLMSettings
from backends.vllm.ray_engine import RayEngine
from pipelinerl.config.train import OptimizerConfig, TrainerConfig
from pipelinerl.rl.config import LossConfig
from pipelinerl.rl.segments import Segment
from pipelinerl.scheduler.events import WeightUpdate

ANSWER_TOKENS = 8
"""Tokens of an answer; many answers make a rate (tokens)."""
AT_ONCE = 8
"""Answers in progress on an engine (count)."""
CALM_S = 8.0
"""Seconds before and after an update for which the rate is measured."""
POLL_S = 0.1
"""Seconds between two looks at memory."""


def make_model(folder: Path, layers: int) -> int:
    """Write a model of random weights; return its bytes in float32."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        eos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return sum(parameter.numel() * 4 for parameter in model.parameters())


def batch() -> list[Sample]:
    """Return two short rollouts to train on."""
    answer = Segment.generated(np.arange(2, 34), np.full(32, -8.0, dtype=np.float32))
    return [Sample(index, np.arange(2, 6), (answer,), reward=1.0, advantage=1.0) for index in range(2)]


class Watch:
    """Tokens as they are counted, and memory as it is looked at (mutable)."""

    def __init__(self) -> None:
        self.tokens: list[tuple[float, int]] = []
        self.memory: list[tuple[float, dict[str, int]]] = []

    def rate(self, begin_s: float, end_s: float) -> float:
        """Return the tokens per second of all engines between two times."""
        return sum(count for at_s, count in self.tokens if begin_s < at_s <= end_s) / (end_s - begin_s)

    def extra(self, begin_s: float, end_s: float) -> dict[str, float]:
        """Return the most memory of each kind of process above that before (GB)."""
        before = [sizes for at_s, sizes in self.memory if begin_s - CALM_S < at_s <= begin_s]
        during = [sizes for at_s, sizes in self.memory if begin_s < at_s <= end_s]
        return {kind: (max(one[kind] for one in during) - min(one[kind] for one in before)) / 1e9 for kind in during[0]}


async def answer_for_ever(engine: RayEngine, slot: int, watch: Watch) -> None:
    """Keep one place of an engine busy."""
    number = slot
    while True:
        request = GenerateRequest(number, (3, 13, 4, 16), ANSWER_TOKENS, seed=number, temperature=1.0)
        generated = await engine.generate(request)
        watch.tokens.append((time.perf_counter(), len(generated.tokens_T)))
        number += AT_ONCE


async def look_at_memory(watch: Watch) -> None:
    """Note the proportional memory of workers and trainer, for ever."""
    kinds = {"VLLM::Worker": "workers", "ray::TrainerRank": "trainer"}
    processes: list[tuple[str, psutil.Process]] = []
    for process in psutil.Process().children(recursive=True):
        for title, kind in kinds.items():
            if title in " ".join((process.name(), *process.cmdline())):
                processes.append((kind, process))
    while True:
        sizes = dict.fromkeys(kinds.values(), 0)
        for kind, process in processes:
            sizes[kind] += process.memory_full_info().pss
        watch.memory.append((time.perf_counter(), sizes))
        await asyncio.sleep(POLL_S)


async def train_for_ever(trainer: DeepSpeedTrainer, free: asyncio.Lock, steps: list[float]) -> None:
    """Train whenever the trainer is free."""
    while True:
        async with free:
            begin_s = time.perf_counter()
            await trainer.train(batch(), completes_step=True)
            steps.append(time.perf_counter() - begin_s)
        await asyncio.sleep(0)


async def one_update(
    version: int, trainer: DeepSpeedTrainer, engines: list[RayEngine], group: WeightSyncGroup | None, free: asyncio.Lock
) -> tuple[Weights, float, float, list[float]]:
    """Bring a version to the engines; return it, and seconds: trainer, transfer, each engine."""
    async with free:
        begin_s = time.perf_counter()
        weights = await trainer.publish(version)
        published_s = time.perf_counter()
    if group is not None:
        assert not await group.form(range(len(engines)))
        assert await group.send(weights)
    sent_s = time.perf_counter()
    times = await asyncio.gather(*(one.update(weights, WeightUpdate.KEEP) for one in engines))
    return weights, published_s - begin_s, sent_s - published_s, [one.total_s for one in times]


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run everything; return the figures."""
    model_bytes = make_model(folder / "model", arguments.layers)
    engines = [
        RayEngine(
            VLLMSettings(
                engine_id=index,
                model_path=str(folder / "model"),
                num_slots=AT_ONCE,
                max_tokens=64,
                device="cpu",
                transport=arguments.transport,
                cpu_cores=str(index),
            ),
            {"num_cpus": 1, "max_concurrency": 100},
        )
        for index in range(arguments.engines)
    ]
    settings = RankSettings(
        num_ranks=1,
        device="cpu",
        model_path=str(folder / "model"),
        optimizer=OptimizerConfig(learning_rate=1e-6),
        loss=LossConfig(),
        trainer=TrainerConfig(zero_stage=2, pack_tokens=256),
        temperature=1.0,
        train_batch_size=2,
        optimizer_steps=10_000,
        transport=arguments.transport,
        weights_folder=str(folder / "weights"),
    )
    trainer = DeepSpeedTrainer(settings, num_cpus=1, num_gpus=0)
    members = GroupMembers(trainer, dict(enumerate(engines)), timeout_s=120)
    group = WeightSyncGroup(members) if arguments.transport == "broadcast" else None
    watch, free, steps, rows = Watch(), asyncio.Lock(), list[float](), list[dict[str, float]]()
    tasks: list[asyncio.Task[None]] = []
    try:
        await asyncio.gather(trainer.start(), *(one.start() for one in engines))
        for engine in engines:
            tasks += [asyncio.create_task(answer_for_ever(engine, slot, watch)) for slot in range(AT_ONCE)]
        tasks.append(asyncio.create_task(look_at_memory(watch)))
        if arguments.train:
            tasks.append(asyncio.create_task(train_for_ever(trainer, free, steps)))
        await one_update(1, trainer, engines, group, free)  # makes the group, and all that is made once
        for version in range(2, 2 + arguments.updates):
            await asyncio.sleep(CALM_S)
            begin_s, num_steps = time.perf_counter(), len(steps)
            _, trainer_s, transfer_s, engine_s = await one_update(version, trainer, engines, group, free)
            end_s = time.perf_counter()
            row = {"trainer_still_s": trainer_s, "transfer_s": transfer_s, "engine_still_s": max(engine_s)}
            row |= {"steps_meanwhile": float(len(steps) - num_steps)}
            await asyncio.sleep(CALM_S)
            row["tokens_per_s_before"] = watch.rate(begin_s - CALM_S, begin_s)
            row["tokens_per_s_during"] = watch.rate(begin_s, end_s)
            row["tokens_per_s_after"] = watch.rate(end_s, end_s + CALM_S)
            rows.append(row | {f"extra_gb_{kind}": size for kind, size in watch.extra(begin_s, end_s).items()})
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(trainer.shutdown(), *(one.shutdown() for one in engines))
    figures = {
        name: [statistics.median(values), min(values), max(values)]
        for name, values in ((name, [row[name] for row in rows]) for name in rows[0])
    }
    return {"model_gb": model_bytes / 1e9, "step_s": statistics.median(steps) if steps else None, **figures}


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=("broadcast", "file"), default="broadcast")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12, help="12: 0.6 GB")
    parser.add_argument("--train", action="store_true", help="have the trainer train meanwhile, on a core of its own")
    arguments = parser.parse_args()
    ray.init(num_cpus=arguments.engines + 2, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        print(json.dumps(asyncio.run(measure(arguments, Path(folder))), indent=2))


if __name__ == "__main__":
    main()
