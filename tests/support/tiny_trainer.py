"""Parts of tests of the real trainer: a tiny model, a rank, and a plain torch loop to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from backends.contract import BATCH, FOLLOWING, TrainerContract, samples
from backends.interface import Sample, Weights
from backends.lora import adapter_weights, add_adapters
from backends.trainer.deepspeed.rank import DeepSpeedRank
from backends.trainer.model import PolicyModel, copy_policy, load_policy
from backends.trainer.packing import PackedRow, pack
from backends.trainer.rank import TrainerRank
from backends.trainer.settings import RankSettings
from backends.trainer.step import learning_rate_factor, row_loss
from backends.transfer.verify import checksums
from pipelinerl.config.train import LoraConfig, OptimizerConfig, TrainerConfig
from pipelinerl.hardware.transport import FILE
from pipelinerl.rl.config import LossConfig
from pipelinerl.rl.losses import kl_to_reference, policy_loss
from pipelinerl.rl.segments import all_tokens, loss_mask

MARKS = [
    pytest.mark.real,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),  # torch and DeepSpeed
]
"""Of tests of ranks."""
TEMPERATURE = 0.7
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, schedule="linear", warmup_steps=2, gradient_clip=0.5)
LOSS = LossConfig(truncation=1.2)
STEPS = 4
ROUNDING = 2e-5
"""Largest difference of a parameter, with steps of up to 1e-3: sums in another order, made larger by Adam."""


def settings(model_path: Path, **changed: Any) -> RankSettings:
    given: dict[str, Any] = {
        "num_ranks": 1,
        "device": "cpu",
        "model_path": str(model_path),
        "optimizer": OPTIMIZER,
        "loss": LOSS,
        "trainer": TrainerConfig(pack_tokens=100, step_timeout_s=600),
        "temperature": TEMPERATURE,
        "train_batch_size": BATCH,
        "optimizer_steps": STEPS,
        "transport": FILE,
        "weights_folder": str(model_path / "published"),
        "whole_parameter_elements": 0,
    }
    return RankSettings(**(given | changed))


def trainer_contract(rank: type, folder: Path, *, num_ranks: int) -> TrainerContract:
    """Return the contract of a trainer that Ray runs, of the model in a folder."""
    from backends.ray.actors import RayTrainer

    optimizer = OptimizerConfig(learning_rate=1e-3)
    given = settings(folder, optimizer=optimizer, temperature=1.0, num_ranks=num_ranks)
    return TrainerContract(
        RayTrainer(rank, given, [{"num_cpus": 1}] * num_ranks),
        lambda weights: checksums(load_file(path_of(weights)).items()),
        folder / "trainer",
    )


def started(
    model_path: Path, *, zero_stage: int = 2, port: int | None = None, kind: Any = DeepSpeedRank, **changed: Any
) -> Any:
    trainer = TrainerConfig.model_validate({"zero_stage": zero_stage, "pack_tokens": 100, "step_timeout_s": 600})
    rank = kind(settings(model_path, **({"trainer": trainer} | changed)))
    rank.start(*(("127.0.0.1", port) if port else rank.free_address()))
    return rank


def train(
    rank: TrainerRank, batch: Sequence[Sample], *, completes_step: bool = True, pack_tokens: int = 100
) -> tuple[list[Any], dict[str, float]]:
    """Train on one rank; return log-probabilities by sample and the metrics of what was trained."""
    (rows,) = pack(batch, pack_tokens=pack_tokens, num_ranks=1)
    logprob, metrics = rank.train(rows, completes_step=completes_step)
    of_training = {name: value for name, value in metrics.items() if name in FOLLOWING}
    return [logprob[index] for index in range(len(batch))], of_training


def parameters(rank: TrainerRank) -> dict[str, torch.Tensor]:
    return copy_policy(rank._model, receive=True)


def plain_logprob(model: Any, sample: Sample) -> torch.Tensor:
    """Return log pi of each answer token, of one sequence alone."""
    logprobs = plain_logits(model, sample).log_softmax(-1)
    return logprobs[torch.arange(len(sample.answer_T)), torch.tensor(sample.answer_T)]


def plain_logits(model: Any, sample: Sample) -> torch.Tensor:
    """Return the logits that each answer token was sampled from, of one sequence alone, observed tokens included."""
    tokens = torch.tensor(np.concatenate([sample.prompt_P, all_tokens(sample.segments)]))
    logits = model(tokens[None], use_cache=False).logits[0, len(sample.prompt_P) - 1 : -1] / TEMPERATURE
    return logits[torch.tensor(loss_mask(sample.segments))]


def plain_loss(logprob_M: torch.Tensor, batch: Sequence[Sample]) -> torch.Tensor:
    """Return the sum of the policy loss over the answer tokens of a batch."""
    lengths = torch.tensor([len(one.answer_T) for one in batch])
    return policy_loss(
        LOSS,
        logprob_N=logprob_M,
        behaviour_logprob_N=torch.tensor(np.concatenate([one.behaviour_logprob_T for one in batch])),
        advantage_N=torch.tensor([one.advantage for one in batch], dtype=torch.float32).repeat_interleave(lengths),
        sequence_N=torch.arange(len(batch)).repeat_interleave(lengths),
        num_sequences=len(batch),
    ).sum()


def with_reference(model_path: Path, batch: Sequence[Sample]) -> list[Sample]:
    """Return samples with the log-probabilities of transformers' own model in this folder."""
    model = AutoModelForCausalLM.from_pretrained(model_path).eval()
    with torch.no_grad():
        return [replace(one, reference_logprob_T=plain_logprob(model, one).numpy()) for one in batch]


def plain_training(
    model_path: Path, num_steps: int, *, kl_coefficient: float = 0.0, lora: LoraConfig | None = None
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Train with torch only, one sequence after the other; return parameters and each step's metrics.

    With ``kl_coefficient`` a frozen copy of the model is asked within the step.
    """
    model, frozen = (AutoModelForCausalLM.from_pretrained(model_path).eval() for _ in range(2))
    if lora is not None:
        add_adapters(model, lora)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=1.0, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), weight_decay=OPTIMIZER.weight_decay
    )
    factor = learning_rate_factor(OPTIMIZER, optimizer_steps=STEPS)
    metrics = []
    for step in range(num_steps):
        optimizer.zero_grad()
        total = divergence = 0.0
        for sample in samples(step):
            logprob_T = plain_logprob(model, sample)
            loss = plain_loss(logprob_T, [sample])
            if kl_coefficient:
                with torch.no_grad():
                    reference_T = plain_logprob(frozen, sample)
                kl = kl_coefficient * kl_to_reference(logprob_T, reference_logprob_N=reference_T).sum()
                loss, divergence = loss + kl, divergence + float(kl.detach()) / BATCH
            (loss / BATCH).backward()
            total += float(loss.detach()) / BATCH
        norm = torch.nn.utils.clip_grad_norm_(trained, OPTIMIZER.gradient_clip)
        rate = OPTIMIZER.learning_rate * factor(step)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        metrics.append({"loss": total, "gradient_norm": float(norm), "learning_rate": rate})
        if kl_coefficient:
            metrics[-1]["kl_loss"] = divergence
    named = adapter_weights(model) or dict(model.named_parameters())
    return {name: parameter.detach() for name, parameter in named.items()}, metrics


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert list(left) == list(right)
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def saved_state(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return masters and moments, flat, by kind and parameter, from the files of all ranks."""
    pieces: dict[str, dict[str, dict[int, torch.Tensor]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118  # no mapping
                kind, begin, name = key.split(":", maxsplit=2)
                pieces.setdefault(kind, {}).setdefault(name, {})[int(begin)] = file.get_tensor(key)
    for by_name in pieces.values():
        for parts in by_name.values():  # none overlaps, none is missing
            ends = [begin + len(part) for begin, part in sorted(parts.items())]
            assert sorted(parts) == [0, *ends[:-1]]
    return {
        kind: {name: torch.cat([part for _, part in sorted(parts.items())]) for name, parts in sorted(by_name.items())}
        for kind, by_name in pieces.items()
    }


def plain_gradients(
    model_path: Path, masters: dict[str, torch.Tensor], rows: Sequence[PackedRow]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the clipped gradient of each parameter, summed in float32, and the sum of its rows' sizes.

    ``masters``: the parameters, flat, which are rounded. ``rows``: of all ranks.
    """
    policy = load_policy(str(model_path), device="cpu")
    model = PolicyModel(policy, temperature=TEMPERATURE, value_head=False)
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(masters[name].view_as(parameter))
    total, sizes = ({name: torch.zeros(one.numel()) for name, one in named.items()} for _ in range(2))
    for row in rows:
        *_, parts = row_loss(model, row, config=LOSS, train_batch_size=BATCH, device=torch.device("cpu"))
        gradients = torch.autograd.grad(parts["policy_loss"], list(named.values()))
        for name, gradient in zip(named, gradients, strict=True):
            total[name] += gradient.float().view(-1)
            sizes[name] += gradient.float().view(-1).abs()
    norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(one) for one in total.values()])))
    factor = min(1.0, OPTIMIZER.gradient_clip / (norm + 1e-6))
    return tuple({name: one * factor for name, one in each.items()} for each in (total, sizes))  # type: ignore[return-value]


def spoilt_rows() -> list[PackedRow]:
    """Return a row whose gradient is not finite."""
    (row,) = pack(samples()[:1], pack_tokens=100, num_ranks=1)[0]
    row.advantage_M[0] = np.inf
    return [row]


def path_of(weights: Weights) -> Path:
    assert weights.location.startswith("file:")
    return Path(weights.location.removeprefix("file:"))
