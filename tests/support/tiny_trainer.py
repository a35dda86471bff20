"""What the tests of the real trainer share: a tiny model, rollouts, a rank, and a plain torch loop to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from backends.contract.checks import FOLLOWING
from backends.deepspeed.lr_schedule import learning_rate_factor
from backends.deepspeed.packing import pack
from backends.deepspeed.policy_model import copy_policy
from backends.deepspeed.rank import TrainerRank
from backends.deepspeed.rank_settings import RankSettings
from backends.interface import Sample, Weights
from pipelinerl.config.train import OptimizerConfig, TrainerConfig
from pipelinerl.rl.config import LossConfig
from pipelinerl.rl.losses import kl_to_reference, policy_loss
from pipelinerl.rl.segments import Segment

TEMPERATURE = 0.7
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, schedule="linear", warmup_steps=2, gradient_clip=0.5)
STEPS = 4
BATCH = 8


def save_tiny_model(folder: Path, *, tied: bool = False) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        attention_dropout=0.5,  # would show if it were left on
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(folder)


def samples(step: int = 0) -> list[Sample]:
    """Return a batch of sequences of 3 to 40 tokens."""
    rng = np.random.default_rng(step)
    made = []
    for index in range(BATCH):
        answer = int(rng.integers(1, 30))
        made.append(
            Sample(
                rollout_id=index,
                prompt_P=rng.integers(2, 64, rng.integers(2, 11)),
                segments=(
                    Segment.generated(
                        rng.integers(2, 64, answer), (-4.2 + 0.3 * rng.standard_normal(answer)).astype(np.float32)
                    ),
                ),
                reward=float(rng.random()),
                advantage=float(rng.standard_normal()),
            )
        )
    return made


def settings(model_path: Path, **changed: Any) -> RankSettings:
    given: dict[str, Any] = {
        "num_ranks": 1,
        "device": "cpu",
        "model_path": str(model_path),
        "optimizer": OPTIMIZER,
        "loss": LossConfig(truncation=1.2),
        "trainer": TrainerConfig(pack_tokens=100, step_timeout_s=60),
        "temperature": TEMPERATURE,
        "train_batch_size": BATCH,
        "optimizer_steps": STEPS,
        "transport": "file",
        "weights_folder": str(model_path / "published"),
        "whole_parameter_elements": 0,
    }
    return RankSettings(**(given | changed))


def started(model_path: Path, *, zero_stage: int = 2, **changed: Any) -> TrainerRank:
    trainer = TrainerConfig.model_validate({"zero_stage": zero_stage, "pack_tokens": 100, "step_timeout_s": 60})
    rank = TrainerRank(settings(model_path, **({"trainer": trainer} | changed)))
    rank.start(*rank.free_address())
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
    return copy_policy(rank._engine.module, receive=True)


def plain_logprob(model: Any, sample: Sample) -> torch.Tensor:
    """Return log pi of each answer token, of one sequence alone."""
    tokens = torch.tensor(np.concatenate([sample.prompt_P, sample.answer_T]))
    logits = model(tokens[None], use_cache=False).logits[0, len(sample.prompt_P) - 1 : -1] / TEMPERATURE
    return logits.log_softmax(-1)[torch.arange(len(sample.answer_T)), torch.tensor(sample.answer_T)]


def with_reference(model_path: Path, batch: Sequence[Sample]) -> list[Sample]:
    """Return samples with the log-probabilities of transformers' own model in this folder."""
    model = AutoModelForCausalLM.from_pretrained(model_path).eval()
    with torch.no_grad():
        return [replace(one, reference_logprob_T=plain_logprob(model, one).numpy()) for one in batch]


def plain_training(
    model_path: Path, num_steps: int, *, kl_coefficient: float = 0.0
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Train with torch only, one sequence after the other; return parameters and each step's metrics.

    With ``kl_coefficient`` a frozen copy of the model is asked within the step.
    """
    model, frozen = (AutoModelForCausalLM.from_pretrained(model_path).eval() for _ in range(2))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1.0, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), weight_decay=OPTIMIZER.weight_decay
    )
    factor = learning_rate_factor(OPTIMIZER, optimizer_steps=STEPS)
    metrics = []
    for step in range(num_steps):
        optimizer.zero_grad()
        total = divergence = 0.0
        for sample in samples(step):
            logprob_T = plain_logprob(model, sample)
            loss = policy_loss(
                LossConfig(truncation=1.2),
                logprob_N=logprob_T,
                behaviour_logprob_N=torch.tensor(sample.behaviour_logprob_T),
                advantage_N=torch.full_like(logprob_T, sample.advantage),
                sequence_N=torch.zeros(len(logprob_T), dtype=torch.int64),
                num_sequences=1,
            ).sum()
            if kl_coefficient:
                with torch.no_grad():
                    reference_T = plain_logprob(frozen, sample)
                kl = kl_coefficient * kl_to_reference(logprob_T, reference_logprob_N=reference_T).sum()
                loss, divergence = loss + kl, divergence + float(kl.detach()) / BATCH
            (loss / BATCH).backward()
            total += float(loss.detach()) / BATCH
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.gradient_clip)
        rate = OPTIMIZER.learning_rate * factor(step)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        metrics.append({"loss": total, "gradient_norm": float(norm), "learning_rate": rate})
        if kl_coefficient:
            metrics[-1]["kl_loss"] = divergence
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, metrics


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert list(left) == list(right)
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def path_of(weights: Weights) -> Path:
    assert weights.location.startswith("file:")
    return Path(weights.location.removeprefix("file:"))
