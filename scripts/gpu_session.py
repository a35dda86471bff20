"""Half an hour on one GPU: what only a GPU can show, most telling first, each part in a process of its own.

    for part in train delta decode mixture checkpoint control; do
        timeout 600 python scripts/gpu_session.py --part $part --out session
    done

``--tiny``: tiny sizes, on CPU. A part writes PART.json: medians, in seconds unless a name says otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace as Sizes
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from tiny_model import make_tiny_model, make_tokenizer
from trainer_traffic import Counted

from backends.interface import Sample
from backends.measure import bench
from backends.trainer.attention import register_packed_attention
from backends.trainer.fused import compiled
from backends.trainer.model import PolicyModel, recompute
from backends.trainer.packing import PackedRow, pack
from backends.trainer.step import row_loss
from backends.transfer.row import SharedRow
from backends.transfer.verify import checksum64
from pipelinerl.config.train import OptimizerConfig, TrainerConfig
from pipelinerl.hardware.catalogue import gpu_of_device
from pipelinerl.hardware.coefficients import Level
from pipelinerl.hardware.transport import FILE, changed_share
from pipelinerl.records.run_folder import METRICS_FILE, SUMMARY_FILE, write_json
from pipelinerl.rl.config import LossConfig
from pipelinerl.rl.segments import Segment

RATE, DRIFT_STEPS = 1e-6, 10
FEW, MANY = 8, 40  # tokens of two generations, whose difference is timed
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if ON_GPU else "cpu")
BENCH = bench.Bench("gpu" if ON_GPU else "cpu", bench.Sizes((), (), (), (), warm_up=2, repeats=3, least_s=0.0))
DENSE = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size"
EXPERTS = f"{DENSE} moe_intermediate_size num_experts num_experts_per_tok"
SIZES = {  # on a GPU, and tiny
    "large": ((3584, 18944, 28, 28, 4, 152064), (64, 128, 4, 2, 1, 64)),  # DENSE: Qwen2.5-7B
    "small": ((1536, 8960, 28, 12, 2, 151936), (64, 128, 2, 2, 1, 64)),  # DENSE: 18.5 GB of optimizer states
    "mixture": ((2048, 6144, 8, 32, 4, 64, 768, 128, 8), (64, 128, 2, 2, 1, 64, 32, 4, 2)),  # EXPERTS
    "row": ((8, 2048), (4, 32)),  # sequences of a pack, tokens of each
    "units": (7_600_000_000, 100_000),  # bf16 numbers that are compared, a tenth at a time
    "tensors": ((2358, 768 * 2048), (20, 1000)),  # of a mixture, summed one by one: count, numbers of each
    "decode": ((64, 256, 512), (2,)),  # sequences of a step, H
    "context": (1024, 64),  # tokens of each
    "control": ((None, 40), (0, 3)),  # steps in which its model is fitted, and optimizer steps
}


def once(work: Callable[[], Any]) -> float:
    """Return the seconds of a call that waits for the GPU itself."""
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s


def new_policy(sizes: tuple[int, ...], names: str = DENSE, **changed: Any) -> Any:
    """Return a model of random weights, as a rank has it."""
    kind = transformers.Qwen2Config if names is DENSE else transformers.Qwen3MoeConfig
    config = kind(**dict(zip(names.split(), sizes, strict=True), bos_token_id=2, eos_token_id=1) | changed)
    torch.manual_seed(0)
    make, dtype = transformers.AutoModelForCausalLM.from_config, torch.bfloat16 if ON_GPU else torch.float32
    with DEVICE:
        return make(config, dtype=dtype, attn_implementation=register_packed_attention()).train()


def row_of(sizes: Sizes, seed: int = 0) -> PackedRow:
    """Return a full pack of random tokens."""
    random, (count, length), words = np.random.default_rng(seed), sizes.row, min(sizes.large[-1], sizes.small[-1])
    logprob_T = np.full(length - length // 8, -np.log(words), dtype=np.float32)

    def sample(number: int) -> Sample:
        prompt_P, answer_T = np.split(random.integers(words, size=length), [length // 8])
        return Sample(number, prompt_P, (Segment.generated(answer_T, logprob_T),), 0.0, random.standard_normal())

    return pack([sample(number) for number in range(count)], pack_tokens=count * length, num_ranks=1)[0][0]


def passes(model: PolicyModel, row: PackedRow) -> None:
    """Make a forward and a backward pass."""
    model.zero_grad(set_to_none=True)
    *_, parts = row_loss(model, row, config=LossConfig(), train_batch_size=8, device=DEVICE)
    parts["policy_loss"].backward()


def train(sizes: Sizes, _: Path) -> dict[str, Any]:
    """Measure passes with 0, half and all layers recomputed, eager and fused, against what they count."""
    result: dict[str, Any] = {}
    for name, compiler in (("eager", None), ("fused", compiled if ON_GPU else lambda function: function)):
        policy = new_policy(sizes.large, num_hidden_layers=sizes.large[2] // 2)
        model, row = PolicyModel(policy, temperature=1.0, value_head=False, compiler=compiler), row_of(sizes)
        work, layers = partial(passes, model, row), len(policy.base_model.layers)
        if compiler is None:
            with Counted() as counted:
                work()
            result |= {"tokens": len(row.token_N), "flop": counted.flop, "moved_bytes": counted.moved_bytes}
            if ON_GPU and (gpu := gpu_of_device(torch.cuda.get_device_name())) is not None:
                result["roofline_s"] = counted.flop / gpu.bf16_flops + counted.moved_bytes / gpu.bandwidth
        for number in (layers, layers // 2, 0):
            recompute(policy, number)
            if ON_GPU:
                torch.cuda.reset_peak_memory_stats()
            with contextlib.suppress(torch.OutOfMemoryError):
                result[f"{name}_{number}_s"] = BENCH.seconds(work)
                result[f"{name}_{number}_gb"] = torch.cuda.max_memory_allocated() / 1e9
        del policy, model, work
        gc.collect()  # methods in place of others are circles
        torch.cuda.empty_cache()
    return result


def delta(sizes: Sizes, _: Path) -> dict[str, Any]:
    """Measure what a delta costs, sums of bytes, a row on its way, and the share of numbers that steps change."""
    result = coding(sizes)
    tensors = torch.randn(*sizes.tensors, dtype=torch.float16, device=DEVICE)
    result["sums_per_tensor_s"] = BENCH.seconds(lambda: [checksum64(one) for one in tensors])
    result["sum_per_bucket_s"] = BENCH.seconds(lambda: checksum64(tensors))
    shared = SharedRow.make(2 * sizes.units, DEVICE)
    model = torch.empty_like(shared.row, device=DEVICE)
    result["row_to_model_s"] = BENCH.seconds(lambda: model.copy_(shared.row, non_blocking=True))
    result["expected_share"] = {level.value: changed_share(RATE, level) for level in Level}
    return result | {"changed_shares": changed_shares(sizes)}


def coding(sizes: Sizes) -> dict[str, Any]:
    """Measure encoding and patching where 1.5 % of the numbers change."""
    from backends.transfer.delta import Changes, apply, encode  # noqa: PLC0415

    torch.manual_seed(0)
    parts = torch.empty(sizes.units, dtype=torch.int16, device=DEVICE).random_().split(sizes.units // 10)
    new = [part ^ (torch.rand(len(part), device=DEVICE) < 0.015) for part in parts]
    first, changes = parts[0].cpu(), [encode(*pair) for pair in zip(parts, new, strict=True)]
    there = Changes(changes[0].gaps_C.cpu(), changes[0].values_C.cpu())
    return {
        "delta_bytes": sum(one.gaps_C.nbytes + one.values_C.nbytes for one in changes),
        "encode_s": BENCH.seconds(lambda: [encode(*pair) for pair in zip(parts, new, strict=True)]),
        "to_host_s": BENCH.seconds(lambda: [(one.gaps_C.cpu(), one.values_C.cpu()) for one in changes]),
        "patch_s": BENCH.seconds(lambda: [apply(*pair) for pair in zip(parts, changes, strict=True)]),
        "equal": all(torch.equal(*pair) for pair in zip(parts, new, strict=True)),
        "patch_on_host_ns_per_entry": once(lambda: apply(first, there)) / len(there.values_C) * 1e9,
    }


def changed_shares(sizes: Sizes) -> list[float]:
    """Return the shares of bf16 numbers of layers that each step of AdamW changes, with float32 masters."""
    policy = new_policy(sizes.large, num_hidden_layers=2, tie_word_embeddings=True)
    model, shares = PolicyModel(policy, temperature=1.0, value_head=False), []
    weights = [one for name, one in policy.named_parameters() if ".layers." in name and one.ndim == 2]
    masters = [one.detach().bfloat16().float() for one in weights]
    optimizer = torch.optim.AdamW(masters, lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(DRIFT_STEPS):
        passes(model, row_of(sizes, seed=step))
        for master, weight in zip(masters, weights, strict=True):
            master.grad = weight.grad.float()
        optimizer.step()
        changed = 0
        for master, weight in zip(masters, weights, strict=True):
            changed += int((weight.bfloat16() != master.bfloat16()).sum())
            weight.data.copy_(master.bfloat16())
        shares.append(changed / sum(one.numel() for one in masters))
    return shares


def decode(sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Measure decode steps of vLLM without and with log-probabilities."""
    from vllm import SamplingParams  # noqa: PLC0415

    from backends.vllm.offline import OfflineEngine  # noqa: PLC0415

    new_policy(sizes.large).save_pretrained(folder)
    torch.cuda.empty_cache()
    most = {"num_slots": max(sizes.decode), "max_tokens": sizes.context + MANY}
    engine, result = OfflineEngine(folder, device="gpu" if ON_GPU else "cpu", **most), {}
    for name, logprobs in (("plain", None), ("log_probabilities", 0)):
        with patch("vllm.SamplingParams", partial(SamplingParams, logprobs=logprobs)):
            for batch in (*sizes.decode[:1], *sizes.decode):  # the first is a warm-up
                few_s, many_s = (engine.generate_s(batch, sizes.context, tokens) for tokens in (FEW, MANY))
                result[f"{name}_{batch}_s"] = (many_s - few_s) / (MANY - FEW)
    engine.shutdown()
    return result


def run(model: Path, *sets: str) -> dict[str, Any]:
    """Train ``tiny_reasoning`` with another model; return its summary and the metrics of its last step."""
    changed, example = [f"train.model.path={model}", *sets], Path(__file__).parents[1] / "examples/tiny_reasoning.toml"
    if ON_GPU:  # engine and rank share it; the cluster ends with this process
        os.environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
        import ray  # noqa: PLC0415

        ray.init(num_gpus=2, include_dashboard=False)
        address = ray.get_runtime_context().gcs_address
        changed += ["train.device=gpu", f"train.ray_address={address}", "train.engine.gpu_memory_utilization=0.4"]
    command = [sys.executable, "-m", "pipelinerl", "train", str(example), "--out", f"{model}.run", "--json"]
    subprocess.run([*command, *(f"--set={one}" for one in changed)], check=True, stdout=subprocess.DEVNULL)
    last = Path(f"{model}.run", METRICS_FILE).read_text(encoding="utf-8").splitlines()[-1]
    return {"summary": json.loads(Path(f"{model}.run", SUMMARY_FILE).read_text()), "last_step": json.loads(last)}


def mixture(sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Train a random mixture for some updates: seconds of each, divergence of engine and trainer at lag 0."""
    new_policy(sizes.mixture, EXPERTS, head_dim=32).save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    return run(folder / "model", "optimizer_steps=6", "scheduler.train_batch_size=16", "train.transport=delta")


def control(sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Train a model that learns on CPU, too."""
    make_tiny_model(folder / "model", task="chain", fit_steps=sizes.control[0])
    return run(folder / "model", f"optimizer_steps={sizes.control[1]}")


def checkpoint(sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Measure a rank's stand-still for a checkpoint, and its part of the switch of ``conventional``."""
    from backends.trainer.deepspeed.rank import DeepSpeedRank  # noqa: PLC0415
    from backends.trainer.settings import RankSettings  # noqa: PLC0415

    new_policy(sizes.small, tie_word_embeddings=True).save_pretrained(folder / "model")
    rank = DeepSpeedRank(
        RankSettings(
            num_ranks=1, device="gpu" if ON_GPU else "cpu", model_path=str(folder / "model"), loss=LossConfig(),
            optimizer=OptimizerConfig(learning_rate=RATE), trainer=TrainerConfig(), temperature=1.0,
            train_batch_size=sizes.row[0], optimizer_steps=10, transport=FILE, weights_folder=str(folder),
        )
    )  # fmt: skip
    rank.start(*rank.free_address())
    step = partial(rank.train, [row_of(sizes)], completes_step=True)
    result = {f"step_{number}_s": once(step) for number in range(2)}
    result |= {f"snapshot_{number}_s": once(rank.snapshot) for number in range(2)}
    result["save_s"] = once(partial(rank.save, folder / "state"))
    return result | {"offload_s": once(rank.offload), "reload_s": once(rank.reload)}


PARTS = {one.__name__: one for one in (train, delta, decode, mixture, checkpoint, control)}


def main(arguments: list[str] | None = None) -> None:
    """Run a part and write what it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    given, begin_s = parser.parse_args(arguments), time.perf_counter()
    given.out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir="/dev/shm") as folder:
        sizes = Sizes(**{name: both[given.tiny] for name, both in SIZES.items()})
        found = PARTS[given.part](sizes, Path(folder))
    found |= {"device": torch.cuda.get_device_name() if ON_GPU else "CPU", "part_s": time.perf_counter() - begin_s}
    write_json(given.out / f"{given.part}.json", found)


if __name__ == "__main__":
    main()
