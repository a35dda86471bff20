"""Attention on packed rows against attention written out, sequence by sequence; a rank's self-test of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from refusals import message  # noqa: E402

from backends.check.run_check import ATTENTION_ERROR  # noqa: E402
from backends.trainer import attention as module  # noqa: E402
from backends.trainer import rank as self_test  # noqa: E402
from backends.trainer.attention import check_kernel, packed_attention  # noqa: E402

LENGTHS = (1, 7, 4)
CPU = torch.device("cpu")


def tensors(value_width: int = 8, device: str = "cpu"):
    """Return queries of four heads, keys and values of two."""
    torch.manual_seed(0)
    sizes = ((4, 8), (2, 8), (2, value_width))
    return [torch.randn(1, heads, sum(LENGTHS), width, dtype=torch.float64).to(device) for heads, width in sizes]


def attention(query, key, value, **settings):
    boundary = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32).to(query.device)
    settings |= {"cu_seq_lens_q": boundary, "max_length_q": max(LENGTHS)}
    return packed_attention(torch.nn.Identity(), query, key, value, None, **settings)[0]


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("value_width", [8, 6])
def test_a_token_attends_to_earlier_tokens_of_its_sequence_within_the_window(window, value_width) -> None:
    query, key, value = tensors(value_width)
    got = attention(query, key, value, scaling=0.3, sliding_window=window)
    sequence_N = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    back_NN = torch.arange(sum(LENGTHS))[:, None] - torch.arange(sum(LENGTHS))
    seen_NN = (sequence_N[:, None] == sequence_N) & (back_NN >= 0) & (back_NN < (window or 1000))
    for head in range(4):
        scores_NN = (0.3 * query[0, head] @ key[0, head // 2].T).masked_fill(~seen_NN, -torch.inf)
        assert torch.allclose(got[0, :, head], scores_NN.softmax(-1) @ value[0, head // 2], rtol=1e-12)


@pytest.mark.parametrize("value_width", [8, 6])
def test_the_kernel_of_gpus_gives_the_same_shape(value_width) -> None:
    """Its values need a GPU; that its arguments are accepted is seen on torch's device ``meta``."""
    assert attention(*tensors(value_width, "meta")).shape == attention(*tensors(value_width)).shape


def test_a_feature_that_the_kernel_lacks_is_refused() -> None:
    assert "the attention of Identity needs softcap, not supported" in message(attention, *tensors(), softcap=50.0)


def test_a_gpu_without_the_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    says = message(check_kernel, torch.device("cuda:0"))
    assert says.startswith("train.device='gpu' needs GPUs with FlashAttention, compute capability 8.0")
    assert says.endswith("got Tesla T4 with 7.5")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    check_kernel(torch.device("cuda:0"))


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


@pytest.fixture(autouse=True)
def another_machine() -> Iterator[None]:
    """Have each test ask anew what its machine has."""
    module.hopper_kernel.cache_clear()
    yield
    module.hopper_kernel.cache_clear()


@pytest.mark.parametrize("releases", ["out", "out and sums"])
def test_flash_attention_3_gets_what_torchs_kernel_gets(monkeypatch: pytest.MonkeyPatch, releases: str) -> None:
    """A stand-in that computes as the CPU does; values are as wide as queries, as the kernel needs them."""
    seen: dict[str, object] = {}

    def flash_attn_varlen_func(*given: Any, **named: Any) -> Any:
        query, key, value, boundary, keys_boundary, longest, keys_longest = given
        seen.update(named, longest=longest, shapes=[tuple(one.shape) for one in (query, key, value)])
        assert boundary is keys_boundary
        assert longest == keys_longest
        heads = tuple(one.transpose(0, 1)[None] for one in (query, key, value))
        window = named["window_size"][0] + 1
        out = module._one_by_one(heads, boundary, named["softmax_scale"], window or None)[0]
        return out if releases == "out" else (out, None)

    expected = attention(*tensors(6), scaling=0.3, sliding_window=3)
    stand_in = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", stand_in)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    kernel = module.hopper_kernel(torch.device("cuda:0"))
    assert kernel is flash_attn_varlen_func
    monkeypatch.setattr(module, "hopper_kernel", lambda _: kernel)
    torch.testing.assert_close(attention(*tensors(6), scaling=0.3, sliding_window=3), expected, rtol=1e-12, atol=1e-12)
    assert seen == {
        "softmax_scale": 0.3, "causal": True, "window_size": (2, 0), "longest": 7,
        "shapes": [(12, 4, 8), (12, 2, 8), (12, 2, 8)],
    }  # fmt: skip


@pytest.mark.parametrize(("capability", "installed"), [((8, 0), True), ((10, 0), True), ((9, 0), False)])
def test_flash_attention_3_is_for_hopper_and_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], installed: bool
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace() if installed else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert module.hopper_kernel(torch.device("cuda:0")) is None
    assert module.hopper_kernel(CPU) is None
