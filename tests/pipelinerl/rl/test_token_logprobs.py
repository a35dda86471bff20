"""Log-probabilities of tokens: those of log_softmax, in any type and any number of rows at a time."""

import math
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from pipelinerl.rl import token_logprobs as module  # noqa: E402
from pipelinerl.rl.token_logprobs import token_logprobs  # noqa: E402


def gradient(value_N, logits_NV):
    return torch.autograd.grad(value_N.sum(), logits_NV, retain_graph=True)[0]


def test_token_logprobs_of_two_words() -> None:
    # softmax(ln 3, 0) = (3/4, 1/4); at temperature 1/2 the odds are 9.
    logits_NV, token_N = torch.tensor([[math.log(3), 0.0]] * 2).double(), torch.tensor([0, 1])
    at_1 = token_logprobs(logits_NV, token_N, temperature=1.0)
    at_half = token_logprobs(logits_NV, token_N, temperature=0.5)
    assert at_1.exp().tolist() == pytest.approx([0.75, 0.25])
    assert at_half.exp().tolist() == pytest.approx([0.9, 0.1])


@pytest.mark.parametrize("chunk", [1, 14, 10**6])  # one, two and all rows at a time
def test_chunks_give_the_values_and_gradients_of_log_softmax(monkeypatch, chunk) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk)
    generator = torch.Generator().manual_seed(0)
    logits_NV = torch.randn(5, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    token_N, upstream_N = torch.tensor([0, 6, 3, 3, 1]), torch.tensor([1.0, -2.0, 0.0, 0.5, 3.0]).double()
    logprob_N = token_logprobs(logits_NV, token_N, temperature=0.7)
    plain_N = (logits_NV / 0.7).log_softmax(-1)[torch.arange(5), token_N]
    assert torch.allclose(logprob_N, plain_N, rtol=1e-12)
    mine, plain = (gradient(upstream_N * value_N, logits_NV) for value_N in (logprob_N, plain_N))
    assert torch.allclose(mine, plain, rtol=1e-12, atol=1e-15)
    call = partial(token_logprobs, token_N=token_N, temperature=0.7)
    assert torch.autograd.gradcheck(call, (logits_NV,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_type_of_logits_is_computed_in_float32_and_gets_a_gradient_of_its_own(dtype) -> None:
    logits_NV = torch.linspace(-20, 20, 300).reshape(3, 100).to(dtype).requires_grad_()
    token_N = torch.tensor([99, 50, 0])
    logprob_N = token_logprobs(logits_NV, token_N, temperature=0.9)
    exact_N = (logits_NV.detach().double() / 0.9).log_softmax(-1)[torch.arange(3), token_N]
    assert logprob_N.dtype == torch.float32
    assert logprob_N.tolist() == pytest.approx(exact_N.tolist(), abs=2e-6)
    assert gradient(logprob_N, logits_NV).dtype == dtype


def test_logits_of_any_height_are_stable_and_a_sure_token_keeps_its_digits() -> None:
    logits_NV = torch.tensor([[1e4, 1e4, -1e4], [60.0, 50.0, 50.0]])
    logprob_N = token_logprobs(logits_NV, torch.tensor([0, 0]), temperature=1.0)
    assert logprob_N.tolist() == pytest.approx([-math.log(2), -math.log1p(2 * math.exp(-10))], rel=2e-3)


def test_a_second_derivative_is_refused_rather_than_wrong() -> None:
    logits_NV = torch.zeros(1, 3, requires_grad=True)
    logprob_N = token_logprobs(logits_NV, torch.tensor([0]), temperature=1.0)
    (first,) = torch.autograd.grad(logprob_N.sum(), logits_NV, create_graph=True)
    with pytest.raises(RuntimeError):
        first.square().sum().backward()


@pytest.mark.parametrize(
    ("logits", "token", "temperature", "message"),
    [
        (torch.zeros(2), torch.tensor([0, 0]), 1.0, r"logits_NV must be two-dimensional, got shape \(2,\)"),
        (torch.zeros(2, 3), torch.tensor([0]), 1.0, r"token_N must have shape \(2,\), got \(1,\)"),
        (torch.zeros(1, 3), torch.tensor([0.0]), 1.0, r"token_N must be int64, got torch\.float32"),
        (torch.zeros(1, 3), torch.tensor([0]), 0.0, r"temperature must be above 0, got 0\.0"),
    ],
)
def test_wrong_logits_are_refused(logits, token, temperature, message) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        token_logprobs(logits, token, temperature=temperature)
