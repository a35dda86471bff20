"""The loss of a teacher's pupil; the learning rate step by step, FLOP and the peak of a GPU, by hand."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from backends.trainer.packing import PackedRow  # noqa: E402
from backends.trainer.step import learning_rate_factor, row_loss, training_flop  # noqa: E402
from pipelinerl.config.train import OptimizerConfig  # noqa: E402
from pipelinerl.hardware.catalogue import find_model, gpu_of_device  # noqa: E402
from pipelinerl.rl.config import LossConfig  # noqa: E402


def answer_of_one_token(token: int, *, behaviour: float, teacher: float | None) -> PackedRow:
    """Return a row of a prompt of one token and an answer of one, with an advantage and a reward of 9."""
    one, nine = np.zeros(1, np.int64), np.full(1, 9, np.float32)
    return PackedRow(
        sample_index_S=(0,),
        token_N=np.array([0, token]),
        position_N=np.arange(2),
        predictor_M=one,
        answer_M=np.array([token]),
        sequence_M=one,
        behaviour_logprob_M=np.array([behaviour], np.float32),
        advantage_M=nine,
        reward_M=nine,
        reference_logprob_M=None if teacher is None else np.array([teacher], np.float32),
    )


@pytest.mark.parametrize("kind", ["reinforce", "plain", "ppo", "cispo"])
def test_a_pupil_has_on_average_the_gradient_of_its_divergence_from_the_teacher(kind: str) -> None:
    """Over all words, weighed by pi, which samples them; the reward has no part in it."""
    generator = torch.Generator().manual_seed(0)
    logit_V, teacher_V = (torch.randn(5, generator=generator) for _ in range(2))
    logit_V.requires_grad_()
    ref_V = teacher_V.log_softmax(-1)
    config = LossConfig.model_validate({"kind": kind, "teacher": "/teacher", "truncation": 100.0})

    def model(*, answer_M: torch.Tensor, **_: object) -> tuple[torch.Tensor, torch.Tensor, None]:
        return logit_V.log_softmax(-1)[answer_M], torch.zeros(1), None

    mean = torch.zeros(5)
    logprob_V = logit_V.detach().log_softmax(-1)
    for token, logprob in enumerate(logprob_V):
        row = answer_of_one_token(token, behaviour=float(logprob), teacher=float(ref_V[token]))
        *_, parts = row_loss(model, row, config=config, train_batch_size=2, device=torch.device("cpu"))
        assert list(parts) == ["policy_loss"]
        mean += 2 * logprob.exp() * torch.autograd.grad(parts["policy_loss"], logit_V)[0]
    pi_V = logit_V.softmax(-1)
    divergence = (pi_V * (logit_V.log_softmax(-1) - ref_V)).sum()
    assert torch.allclose(mean, torch.autograd.grad(divergence, logit_V)[0], atol=1e-6)
    with pytest.raises(ValueError, match="reference_logprob_T must be there"):
        row_loss(
            model,
            answer_of_one_token(1, behaviour=-1.0, teacher=None),
            config=config,
            train_batch_size=1,
            device=torch.device("cpu"),
        )


def test_flop_of_a_7b() -> None:
    """Products: 6 * 7.6156e9 parameters a token; attention: 6 * 28 layers * 3584 numbers a squared token."""
    model = find_model("Qwen2.5-7B")
    flop = training_flop(model, np.array([1000, 3000]))
    products, attention = 6 * 7.6156e9 * 4000, 6 * 28 * 3584 * (1000**2 + 3000**2)
    assert flop == pytest.approx(products + attention, rel=1e-4)
    adapters = training_flop(model, np.array([1000, 3000]), adapter_rank=16)
    assert adapters == pytest.approx((4 * 7.6156e9 + 2 * 40_370_176) * 4000 + attention, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("Tesla T4", None),
    ],
)
def test_the_peak_of_a_gpu(name: str, peak: float | None) -> None:
    gpu = gpu_of_device(name)
    assert (gpu and gpu.bf16_flops) == peak


@pytest.mark.parametrize(
    ("schedule", "warmup", "optimizer_steps", "factors"),
    [
        ("constant", 2, 6, [0.5, 1, 1, 1, 1, 1, 1]),
        ("linear", 2, 6, [0.5, 1, 1, 0.75, 0.5, 0.25, 0]),
        ("cosine", 2, 6, [0.5, 1, 1, 0.8535534, 0.5, 0.1464466, 0]),
        ("linear", 4, 2, [0.25, 0.5]),  # all warm-up
        ("cosine", 0, 4, [1, 0.8535534, 0.5, 0.1464466, 0, 0]),  # beyond the last step
    ],
)
def test_the_rate_rises_in_the_warm_up_and_then_follows_the_schedule(
    schedule: str, warmup: int, optimizer_steps: int, factors: list[float]
) -> None:
    config = OptimizerConfig.model_validate({"learning_rate": 1e-3, "warmup_steps": warmup, "schedule": schedule})
    factor = learning_rate_factor(config, optimizer_steps=optimizer_steps)
    assert [factor(done) for done in range(len(factors))] == pytest.approx(factors, abs=1e-7)
