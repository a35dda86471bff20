"""Observed tokens are read and never trained on: gradients of a packed row against plain torch with a mask."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny_trainer import TEMPERATURE, plain_logprob, samples  # noqa: E402

from backends.interface import Sample  # noqa: E402
from backends.trainer.model import PolicyModel, load_policy, row_tensors  # noqa: E402
from backends.trainer.packing import pack  # noqa: E402
from pipelinerl.rl.config import LossConfig  # noqa: E402
from pipelinerl.rl.losses import policy_loss  # noqa: E402
from pipelinerl.rl.segments import Segment, SegmentKind, extended  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def loss_of(logprob_M: torch.Tensor, batch: list[Sample]) -> torch.Tensor:
    lengths = torch.tensor([len(one.answer_T) for one in batch])
    return policy_loss(
        LossConfig(truncation=1.2),
        logprob_N=logprob_M,
        behaviour_logprob_N=torch.tensor(np.concatenate([one.behaviour_logprob_T for one in batch])),
        advantage_N=torch.tensor([one.advantage for one in batch], dtype=torch.float32).repeat_interleave(lengths),
        sequence_N=torch.arange(len(batch)).repeat_interleave(lengths),
        num_sequences=len(batch),
    ).sum()


def packed_gradient(model_path: Path, batch: list[Sample]) -> list[torch.Tensor]:
    model = PolicyModel(load_policy(str(model_path), device="cpu"), temperature=TEMPERATURE, value_head=False)
    ((row,),) = pack(batch, pack_tokens=400, num_ranks=1)
    logprob_M, *_ = model(**row_tensors(row, torch.device("cpu")))
    return list(torch.autograd.grad(loss_of(logprob_M, batch), list(model.parameters())))


def with_end(sample: Sample, tokens: list[int]) -> Sample:
    return replace(sample, segments=extended(sample.segments, Segment.observed(np.array(tokens))))


@pytest.mark.slow
def test_the_gradient_is_that_of_generated_tokens_alone_behind_all_that_was_read(model_path: Path) -> None:
    """Plain torch reads each sequence whole, observed tokens included, and keeps the terms of generated ones only."""
    batch = samples()
    observed = [one for sample in batch for one in sample.segments if one.kind is SegmentKind.OBSERVED]
    assert len(observed) == 2
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path).eval()
    logprob_M = torch.cat([plain_logprob(model, one) for one in batch])
    expected = torch.autograd.grad(loss_of(logprob_M, batch), list(model.parameters()))
    for ours, plain in zip(packed_gradient(model_path, batch), expected, strict=True):
        assert torch.allclose(ours, plain, rtol=1e-4, atol=1e-5)


def test_what_an_observed_token_is_does_not_matter_where_only_its_label_could(model_path: Path) -> None:
    """The last token of a sequence is a label and no input. Observed, it changes no bit of the gradient.

    A loss that counted observed tokens would differ, as it does where the last token is a generated one.
    """
    batch = samples()
    first, other = ([with_end(one, [5, 9, last]) for one in batch] for last in (7, 8))
    one, same = packed_gradient(model_path, first), packed_gradient(model_path, other)
    assert all(torch.equal(left, right) for left, right in zip(one, same, strict=True))
    said = [Segment.generated(np.array([last]), np.array([-4.0], np.float32)) for last in (7, 8)]
    ends = [replace(batch[0], segments=extended(batch[0].segments, one)) for one in said]
    left, right = (packed_gradient(model_path, [one]) for one in ends)
    assert not all(torch.equal(*pair) for pair in zip(left, right, strict=True))


def test_what_was_observed_before_a_token_matters_to_it(model_path: Path) -> None:
    """The model reads it: another observation gives the tokens after it other log-probabilities, and none before it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path).eval()
    (sample,) = [one for one in samples() if len(one.segments) == 3][:1]
    before, seen, _ = sample.segments
    changed = tuple(replace(one, tokens=(one.tokens + 1) % 60) if one is seen else one for one in sample.segments)
    with torch.no_grad():
        first, other = (plain_logprob(model, replace(sample, segments=parts)) for parts in (sample.segments, changed))
    num = len(before.tokens)
    assert torch.equal(first[:num], other[:num])
    assert (first[num:] != other[num:]).any()
