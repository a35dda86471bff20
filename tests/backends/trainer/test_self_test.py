"""What a rank measures of itself: attention that is wrong is seen, and what its links give is that of the clock."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from backends.check.machine_rows import ATTENTION_ERROR  # noqa: E402
from backends.trainer import self_test  # noqa: E402

CPU = torch.device("cpu")


def test_packed_attention_is_plain_attention_up_to_rounding() -> None:
    assert self_test.attention_error(CPU, torch.float32) < ATTENTION_ERROR["cpu"]
    assert 0 < self_test.attention_error(CPU, torch.bfloat16) < ATTENTION_ERROR["gpu"]
    assert self_test.same_checksum(CPU)


def test_attention_that_crosses_a_boundary_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = self_test.packed_attention

    def crosses(*arguments: object, cu_seq_lens_q: object, **others: object) -> object:
        whole = torch.tensor([0, sum(self_test.LENGTHS)], dtype=torch.int32)
        return right(*arguments, cu_seq_lens_q=whole, **others)

    monkeypatch.setattr(self_test, "packed_attention", crosses)
    assert self_test.attention_error(CPU, torch.float32) > ATTENTION_ERROR["gpu"]
