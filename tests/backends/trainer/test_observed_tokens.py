"""Observed tokens are read and never trained on: gradients of a packed row against plain torch with a mask."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny_trainer import TEMPERATURE, plain_logprob, plain_loss, samples  # noqa: E402

from backends.trainer.model import PolicyModel, load_policy, row_tensors  # noqa: E402
from backends.trainer.packing import pack  # noqa: E402
from pipelinerl.rl.segments import Segment, SegmentKind  # noqa: E402


@pytest.mark.filterwarnings("ignore")
def test_a_gradient_is_of_generated_tokens_alone_and_all_others_are_read(model_path: Path) -> None:
    """Plain torch reads each sequence whole and keeps the terms of generated tokens only.

    Observed tokens are within four of the answers, and at the end of another, where they are no input of a prediction.
    """
    batch = samples()
    batch[0] = replace(batch[0], segments=(*batch[0].segments, Segment.observed(np.array([5, 9, 7]))))
    assert sum(part.kind is SegmentKind.OBSERVED for one in batch for part in one.segments) == 5
    plain = transformers.AutoModelForCausalLM.from_pretrained(model_path).eval()
    logprob_M = torch.cat([plain_logprob(plain, one) for one in batch])
    expected = torch.autograd.grad(plain_loss(logprob_M, batch), list(plain.parameters()))
    model = PolicyModel(load_policy(str(model_path), device="cpu"), temperature=TEMPERATURE, value_head=False)
    ((row,),) = pack(batch, pack_tokens=400, num_ranks=1)
    packed_M, *_ = model(**row_tensors(row, torch.device("cpu")))
    gradients = torch.autograd.grad(plain_loss(packed_M, batch), list(model.parameters()))
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert torch.allclose(gradient, wanted, rtol=1e-4, atol=1e-5)
