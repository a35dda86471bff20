"""The output layer in chunks: the values of log_softmax of all logits, in less memory than these take."""

import math

import pytest

torch = pytest.importorskip("torch")

from backends.trainer.footprint import LiveBytes  # noqa: E402
from pipelinerl.rl import losses as module  # noqa: E402
from pipelinerl.rl.losses import CHUNK_TOKENS, token_logprobs  # noqa: E402

QWEN = {"width": 3584, "vocabulary": 152_064}
"""Qwen2.5-7B."""


def plain(hidden_NH, weight_VH, token_N, *, temperature):
    """The same as ``token_logprobs``, from all logits at once."""
    logprob_NV = (hidden_NH @ weight_VH.T / temperature).log_softmax(-1)
    return logprob_NV.gather(1, token_N[:, None])[:, 0], -(logprob_NV.exp() * logprob_NV).sum(-1)


def made_up(num, width, vocabulary, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    if device == "meta":
        hidden_NH, weight_VH = (torch.empty(rows, width, dtype=dtype, device=device) for rows in (num, vocabulary))
        token_N = torch.empty(num, dtype=torch.int64, device=device)
    else:
        hidden_NH, weight_VH = (
            torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype) for rows in (num, vocabulary)
        )
        token_N = torch.randint(vocabulary, (num,), generator=generator)
    return hidden_NH.requires_grad_(), weight_VH.requires_grad_(), token_N


def test_token_logprobs_of_two_words() -> None:
    # softmax(ln 3, 0) = (3/4, 1/4) with entropy ln 4 - 3/4 ln 3; at temperature 1/2 the odds are 9.
    hidden_NH, weight_VH = torch.ones(2, 1).double(), torch.tensor([[math.log(3)], [0.0]]).double()
    token_N = torch.tensor([0, 1])
    at_1, entropy = token_logprobs(hidden_NH, weight_VH, token_N, temperature=1.0)
    at_half, _ = token_logprobs(hidden_NH, weight_VH, token_N, temperature=0.5)
    assert at_1.exp().tolist() == pytest.approx([0.75, 0.25])
    assert at_half.exp().tolist() == pytest.approx([0.9, 0.1])
    assert entropy.tolist() == pytest.approx([math.log(4) - 0.75 * math.log(3)] * 2)


@pytest.mark.parametrize(
    ("vocabulary", "num", "chunk"),  # one, some and all tokens at a time
    [
        *(pytest.param(152_064, 96, chunk, marks=pytest.mark.slow) for chunk in (40, 96)),
        *((7, 5, chunk) for chunk in (1, 2, 10**6)),
        (7, 0, 2),
    ],
)
def test_chunks_give_the_values_and_gradients_of_all_logits_at_once(monkeypatch, chunk, vocabulary, num) -> None:
    monkeypatch.setattr(module, "CHUNK_TOKENS", chunk)
    hidden_NH, weight_VH, token_N = made_up(num, 8, vocabulary)
    upstream_N = torch.linspace(-2, 3, num, dtype=torch.float64)
    results = []
    for function in (token_logprobs, plain):
        logprob_N, entropy_N = function(hidden_NH, weight_VH, token_N, temperature=0.7)
        gradients = torch.autograd.grad((upstream_N * logprob_N).sum(), (hidden_NH, weight_VH))
        results.append((logprob_N, entropy_N.detach(), *gradients))
        assert entropy_N.requires_grad is (function is plain)
    for mine, wanted in zip(*results, strict=True):
        assert torch.allclose(mine, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", ["hidden_NH", "weight_VH"])
def test_no_gradient_is_computed_for_a_frozen_input(frozen) -> None:
    hidden_NH, weight_VH, token_N = made_up(3, 4, 5)
    inputs = {"hidden_NH": hidden_NH, "weight_VH": weight_VH}
    inputs[frozen].requires_grad_(False)
    logprob_N, _ = token_logprobs(**inputs, token_N=token_N, temperature=1.0)
    logprob_N.sum().backward()
    assert [name for name, tensor in inputs.items() if tensor.grad is None] == [frozen]


@pytest.mark.slow
def test_the_gradient_of_the_weights_is_added_up_in_float32(monkeypatch) -> None:
    """300 chunks of one token, each of which adds and takes a half: bfloat16 would stop at 128."""
    monkeypatch.setattr(module, "CHUNK_TOKENS", 1)
    hidden_NH = torch.ones(300, 1, dtype=torch.bfloat16)
    weight_VH = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    logprob_N, _ = token_logprobs(hidden_NH, weight_VH, torch.zeros(300, dtype=torch.int64), temperature=1.0)
    logprob_N.sum().backward()
    assert weight_VH.grad is not None
    assert weight_VH.grad[:, 0].tolist() == [150, -150]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_type_is_computed_in_float32_and_gets_gradients_of_its_own(dtype) -> None:
    hidden_NH = torch.tensor([[1.0], [2.0], [-1.0]]).to(dtype).requires_grad_()
    weight_VH = torch.linspace(-20, 20, 100)[:, None].to(dtype).requires_grad_()
    token_N = torch.tensor([99, 50, 0])
    logprob_N, entropy_N = token_logprobs(hidden_NH, weight_VH, token_N, temperature=0.9)
    exact_N, exact_entropy_N = plain(hidden_NH.double(), weight_VH.double(), token_N, temperature=0.9)
    assert logprob_N.dtype == entropy_N.dtype == torch.float32
    assert logprob_N.tolist() == pytest.approx(exact_N.tolist(), abs=1e-5)
    assert entropy_N.tolist() == pytest.approx(exact_entropy_N.tolist(), abs=1e-5)
    logprob_N.sum().backward()
    assert hidden_NH.grad.dtype == weight_VH.grad.dtype == dtype


def test_logits_of_any_height_are_stable_and_a_sure_token_keeps_its_digits() -> None:
    weight_VH = torch.tensor([[1e4, 60.0], [1e4, 50.0], [-1e4, 50.0]])
    logprob_N, entropy_N = token_logprobs(torch.eye(2), weight_VH, torch.tensor([0, 0]), temperature=1.0)
    assert logprob_N.tolist() == pytest.approx([-math.log(2), -math.log1p(2 * math.exp(-10))], rel=2e-3)
    assert float(entropy_N[0]) == pytest.approx(math.log(2), rel=1e-6)


def needed(num_tokens):
    """Return memory of Qwen2.5-7B's output layer besides its inputs: kept for the backward pass, and at its peak."""
    hidden_NH, weight_VH, token_N = made_up(num_tokens, **QWEN, dtype=torch.bfloat16, device="meta")
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        LiveBytes((hidden_NH, weight_VH, token_N)) as live,
    ):
        logprob_N, _ = token_logprobs(hidden_NH, weight_VH, token_N, temperature=1.0)
        torch.autograd.grad(logprob_N.sum(), (hidden_NH, weight_VH))
    inputs = {id(tensor.untyped_storage()) for tensor in (hidden_NH, weight_VH, token_N)}
    return sum(tensor.nbytes for tensor in kept if id(tensor.untyped_storage()) not in inputs), live.peak


@pytest.mark.slow
def test_memory_does_not_grow_with_tokens_times_vocabulary() -> None:
    """Nothing is kept, and a token needs its hidden gradient and some numbers; all logits would take 5 GB."""
    chunk_bytes = CHUNK_TOKENS * QWEN["vocabulary"]
    weight_numbers = QWEN["vocabulary"] * QWEN["width"]
    peaks = {}
    for num_tokens in (4096, 8192, 16_384, 65_536):
        kept, peaks[num_tokens] = needed(num_tokens)
        assert kept == 0
    assert peaks[16_384] < 8 * chunk_bytes + 6 * weight_numbers + 16_384 * (2 * QWEN["width"] + 64)
    for shorter, longer in ((4096, 8192), (8192, 16_384), (16_384, 65_536)):
        assert 0 < peaks[longer] - peaks[shorter] <= (longer - shorter) * (2 * QWEN["width"] + 64)


def test_a_second_derivative_is_refused_rather_than_wrong() -> None:
    hidden_NH, weight_VH, token_N = made_up(1, 2, 3)
    logprob_N, _ = token_logprobs(hidden_NH, weight_VH, token_N, temperature=1.0)
    (first,) = torch.autograd.grad(logprob_N.sum(), hidden_NH, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(first.square().sum(), hidden_NH)


@pytest.mark.parametrize(
    ("hidden", "weight", "token", "temperature", "message"),
    [
        (torch.zeros(2), torch.zeros(3, 2), [0, 0], 1.0, r"hidden_NH must be two-dimensional, got shape \(2,\)"),
        (torch.zeros(2, 4), torch.zeros(3, 2), [0, 0], 1.0, r"weight_VH must have shape \(V, 4\), got \(3, 2\)"),
        (torch.zeros(2, 4), torch.zeros(3, 4), [0], 1.0, r"token_N must have shape \(2,\), got \(1,\)"),
        (torch.zeros(1, 4), torch.zeros(3, 4), [0.0], 1.0, r"token_N must be int64, got torch\.float32"),
        (torch.zeros(1, 4), torch.zeros(3, 4), [0], 0.0, r"temperature must be above 0, got 0\.0"),
    ],
)
def test_wrong_input_is_refused(hidden, weight, token, temperature, message) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        token_logprobs(hidden, weight, torch.tensor(token), temperature=temperature)
