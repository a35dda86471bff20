"""Cost of a weight update: real vLLM engines and a DeepSpeed trainer on this machine's CPU, random weights.

    python benchmarks/weight_updates.py --transport file --updates 3       # or staged, direct, delta

With more cores than engines (``--engines 1``) only engines use the cores of decode. ``direct``: staged, with engines
whose parameters keep their place, as on GPUs.

An engine *stands still* from the order to pause until it generates again. ``engine_swap_s`` excludes the decode step
that it finishes first, which loses nothing and depends on the model.

Engines answer all the time; with ``--train`` the trainer trains except while it must stand still. The script prints
medians over the updates, with their range: seconds that an engine and the trainer stand still; tokens per second
before the update, while weights arrive, and after it; the most memory of a worker, the trainer and all processes above
that before the first update, including buffers that are made once (proportional share of shared memory).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
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

from backends.driver.weight_sync import WeightSyncGroup
from backends.interface import GenerateRequest, GroupMembers, Sample
from backends.ray.actors import RayEngine, RayTrainer
from backends.trainer.deepspeed.rank import DeepSpeedRank
from backends.trainer.settings import RankSettings
from backends.vllm.process import VLLMSettings
from pipelinerl.config.train import OptimizerConfig, TrainerConfig
from pipelinerl.hardware.transport import BROADCAST, DELTA, FILE
from pipelinerl.rl.config import LossConfig
from pipelinerl.rl.segments import Segment
from pipelinerl.scheduler.events import WeightUpdate

ANSWER_TOKENS = 8
"""Tokens of an answer, few so that many answers end (tokens)."""
AT_ONCE = 8
"""Answers in progress on an engine (count)."""
CALM_S = 8.0
"""Seconds before and after an update for which the rate is measured."""
TRANSPORTS = {one.name: one for one in (FILE, DELTA)} | dict.fromkeys(("staged", "direct"), BROADCAST)
"""``train.transport`` of each option."""
POLL_S = 0.1
"""Seconds between two measurements of memory."""


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
    """Counted tokens and measured memory over time (mutable)."""

    def __init__(self) -> None:
        self.tokens: list[tuple[float, int]] = []
        self.memory: list[dict[str, int]] = []
        self.memory_before: dict[str, int] = {}

    def rate(self, begin_s: float, end_s: float) -> float:
        """Return the tokens per second of all engines between two times."""
        return sum(count for at_s, count in self.tokens if begin_s < at_s <= end_s) / (end_s - begin_s)

    def begin_memory(self) -> None:
        """Store the current memory of the processes as the base."""
        self.memory_before, self.memory = self.memory[-1], []

    def extra(self) -> dict[str, float]:
        """Return the most memory above the base (GB)."""
        more = [{name: size - self.memory_before[name] for name, size in one.items()} for one in self.memory]
        workers = [name for name in self.memory_before if name != "trainer"]
        return {
            "extra_gb_worker": max(one[name] for one in more for name in workers) / 1e9,
            "extra_gb_trainer": max(one["trainer"] for one in more) / 1e9,
            "extra_gb_all": max(sum(one.values()) for one in more) / 1e9,
        }


def keep_off(cores: set[int]) -> None:
    """Keep this process and its children off the cores of the workers, if there are other cores."""
    others = set(range(os.cpu_count() or 1)) - cores
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.Error, OSError):
            if others and "VLLM::Worker" not in " ".join((process.name(), *process.cmdline())):
                for thread in process.threads():
                    os.sched_setaffinity(thread.id, others)


async def answer_for_ever(engine: RayEngine, slot: int, watch: Watch) -> None:
    """Keep one slot of an engine busy."""
    number = slot
    while True:
        request = GenerateRequest(number, (3, 13, 4, 16), ANSWER_TOKENS, seed=number, temperature=1.0)
        generated = await engine.generate(request)
        watch.tokens.append((time.perf_counter(), len(generated.tokens_T)))
        number += AT_ONCE


async def look_at_memory(watch: Watch) -> None:
    """Record the proportional memory of every worker and of the trainer, without end."""
    processes: dict[str, psutil.Process] = {}
    for process in psutil.Process().children(recursive=True):
        title = " ".join((process.name(), *process.cmdline()))
        if "ray::DeepSpeedRank" in title:
            processes["trainer"] = process
        elif "VLLM::Worker" in title:
            processes[f"worker {process.pid}"] = process
    while True:
        watch.memory.append({name: process.memory_full_info().pss for name, process in processes.items()})
        await asyncio.sleep(POLL_S)


async def train_for_ever(trainer: RayTrainer, free: asyncio.Lock, steps: list[float]) -> None:
    """Train whenever the trainer is free."""
    while True:
        async with free:
            begin_s = time.perf_counter()
            await trainer.train(batch(), completes_step=True)
            steps.append(time.perf_counter() - begin_s)
        await asyncio.sleep(0)


async def one_update(
    version: int,
    trainer: RayTrainer,
    engines: list[RayEngine],
    group: WeightSyncGroup | None,
    free: asyncio.Lock,
) -> tuple[tuple[float, float], dict[str, float]]:
    """Update the engines; return begin and end of the transfer, and seconds of standing still."""
    async with free:
        await trainer.train(batch(), completes_step=True)  # some numbers change
    begin_s = time.perf_counter()
    async with free:
        weights = await trainer.publish(version)
        trainer_s = time.perf_counter() - begin_s
    begin_s = time.perf_counter()
    if group is not None:
        sent, lost = await group.send(weights, range(len(engines)))
        assert sent, lost
    arriving_s = begin_s, time.perf_counter()
    times = await asyncio.gather(*(one.update(weights, WeightUpdate.KEEP) for one in engines))
    engine_s = {
        "engine_still_s": max(one.total_s for one in times),
        "engine_swap_s": max(one.total_s - one.pause_s for one in times),
    }
    return arriving_s, {"trainer_still_s": trainer_s, **engine_s}


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run everything; return the figures."""
    model_bytes = make_model(folder / "model", arguments.layers)
    transport = TRANSPORTS[arguments.transport]
    as_loaded = {"cpu_in_place": True} if arguments.transport == "direct" else {}
    engines = [
        RayEngine(
            VLLMSettings(
                engine_id=index,
                model_path=str(folder / "model"),
                num_slots=AT_ONCE,
                max_tokens=64,
                device="cpu",
                transport=transport,
                cpu_cores=str(index % (os.cpu_count() or 1)),
                **as_loaded,
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
        transport=transport,
        weights_folder=str(folder / "weights"),
    )
    trainer = RayTrainer(DeepSpeedRank, settings, [{"num_cpus": 1}])
    members = GroupMembers(trainer, dict(enumerate(engines)), timeout_s=120)
    group = WeightSyncGroup(members) if transport.grouped else None
    watch, free, steps, rows = Watch(), asyncio.Lock(), list[float](), list[dict[str, float]]()
    tasks: list[asyncio.Task[None]] = []
    try:
        await asyncio.gather(trainer.start(), *(one.start() for one in engines))
        keep_off(set(range(arguments.engines)))
        for engine in engines:
            tasks += [asyncio.create_task(answer_for_ever(engine, slot, watch)) for slot in range(AT_ONCE)]
        tasks.append(asyncio.create_task(look_at_memory(watch)))
        if arguments.train:
            tasks.append(asyncio.create_task(train_for_ever(trainer, free, steps)))
        await asyncio.sleep(CALM_S)
        watch.begin_memory()
        # Makes buffers, and verifies direct copies.
        await one_update(1, trainer, engines, group, free)
        for version in range(2, 2 + arguments.updates):
            await asyncio.sleep(CALM_S)
            before_s, num_steps = time.perf_counter(), len(steps)
            (begin_s, end_s), row = await one_update(version, trainer, engines, group, free)
            after_s = time.perf_counter()
            row |= {"transfer_s": end_s - begin_s, "steps_meanwhile": float(len(steps) - num_steps)}
            await asyncio.sleep(CALM_S)
            before, during = watch.rate(before_s - CALM_S, before_s), watch.rate(begin_s, end_s)
            row["tokens_per_s_before"] = before
            row["tokens_per_s_during"] = during
            row["share_of_speed_kept"] = during / before
            row["tokens_per_s_after"] = watch.rate(after_s, after_s + CALM_S)
            rows.append(row | watch.extra())
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
    parser.add_argument("--transport", choices=tuple(TRANSPORTS), default="staged")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12, help="12: 0.6 GB")
    parser.add_argument("--train", action="store_true", help="have the trainer train meanwhile, on a core of its own")
    arguments = parser.parse_args()
    ray.init(num_cpus=arguments.engines + 2, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        load = os.getloadavg()[0]
        print(json.dumps({"load_before": load, **asyncio.run(measure(arguments, Path(folder)))}, indent=2))


if __name__ == "__main__":
    main()
