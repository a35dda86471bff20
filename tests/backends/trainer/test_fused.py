"""Fused functions against transformers' and torch's own operations, in float64; how often they are compiled."""

from __future__ import annotations

import shutil
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from refusals import message  # noqa: E402
from torch import _dynamo  # noqa: E402
from torch.nn.functional import rms_norm  # noqa: E402

from backends.lora import add_adapters  # noqa: E402
from backends.trainer import fused as module  # noqa: E402
from backends.trainer.attention import register_packed_attention  # noqa: E402
from backends.trainer.fused import check_compiler, compiled, fuse  # noqa: E402
from backends.trainer.model import PolicyModel, recompute  # noqa: E402
from pipelinerl.config.train import LoraConfig  # noqa: E402
from pipelinerl.rl.losses import token_logprobs  # noqa: E402

SMALL = {
    "vocab_size": 100, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]}
CONFIGS = {
    config.model_type: config
    for config in (
        transformers.Qwen2Config(**SMALL),
        transformers.LlamaConfig(**SMALL),
        transformers.Qwen3Config(**SMALL, head_dim=16),
        transformers.Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=16),
    )
}


def as_it_is(function: Any) -> Any:
    return function


def new_policy(config: Any, dtype: Any = torch.float64) -> Any:
    torch.manual_seed(0)
    make, attention = transformers.AutoModelForCausalLM.from_config, register_packed_attention()
    policy = make(config, dtype=dtype, attn_implementation=attention).train()
    policy.config._experts_implementation = "batched_mm"  # grouped ones take no float64
    for name, parameter in policy.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    return policy


def results(policy: Any, compiler: Any = None, lengths: tuple[int, ...] = (11, 20, 33)) -> list[Any]:
    """Return the results of rows of two sequences, and gradients, a layer recomputed."""
    recompute(policy, 1)
    model, found = PolicyModel(policy, temperature=0.7, value_head=False, compiler=compiler), []
    for length in lengths:
        token_N = torch.randint(100, (length,), generator=torch.Generator().manual_seed(length))
        position_N, boundary = torch.arange(length) % 7, torch.tensor([0, 7, length], dtype=torch.int32)
        row = {"token_N": token_N, "position_N": position_N, "predictor_M": torch.arange(length - 1)}
        logprob_M, entropy_M, _ = model(**row, answer_M=token_N[1:], boundary=boundary, longest=length - 7)
        (torch.linspace(-1, 2, length - 1) * logprob_M).sum().backward()
        found += [logprob_M.detach(), entropy_M]
    return [*found, *(one.grad for one in policy.parameters())]


def exact(policy: Any) -> Any:
    """Replace norms, which transformers computes in float32."""
    for one in policy.modules():
        if hasattr(one, "variance_epsilon"):
            one.forward = lambda x, one=one: rms_norm(x, one.weight.shape, one.weight, one.variance_epsilon)
    return policy


def check_equal(found: list[Any], expected: list[Any]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_values_and_gradients_are_those_of_single_operations(config: Any) -> None:
    check_equal(results(new_policy(config), as_it_is), results(exact(new_policy(config))))


def test_heads_that_are_turned_in_part_stay_as_they_are() -> None:
    config = transformers.Phi3Config(**SMALL, partial_rotary_factor=0.75, pad_token_id=0)
    check_equal(results(new_policy(config), as_it_is), results(exact(new_policy(config))))


def test_weights_that_are_not_trained_have_no_gradient() -> None:
    both = []
    for compiler in (as_it_is, None):
        policy = new_policy(CONFIGS["qwen3"])
        add_adapters(policy, LoraConfig(rank=2, alpha=4))
        found = results(policy if compiler else exact(policy), compiler)
        assert [one is not None for one in found[6:]] == [one.requires_grad for one in policy.parameters()]
        both.append([one for one in found if one is not None])
    check_equal(*both)


@pytest.fixture
def graphs() -> Any:
    """Return how many functions were compiled."""
    _dynamo.reset()
    _dynamo.utils.counters.clear()
    yield lambda: _dynamo.utils.counters["stats"]["unique_graphs"]
    _dynamo.reset()


@pytest.mark.slow(seconds=3)
def test_each_function_is_compiled_once_for_all_layers_and_lengths(graphs: Any) -> None:
    """Norms, also of heads, 3 each; SwiGLU, of a dense layer and of experts, RoPE and the output layer 2 each."""
    config, lengths = CONFIGS["qwen3_moe"], (11, 20, 33, 64, 9)
    expected = results(exact(new_policy(config)), lengths=lengths)
    check_equal(results(new_policy(config), partial(compiled, backend="eager"), lengths), expected)
    assert graphs() == 0  # so few rows are not worth a kernel, and would choose it for all others
    check_equal(results(new_policy(config), partial(compiled, backend="eager", least_rows=1), lengths), expected)
    assert graphs() == 2 * 3 + 4 * 2


ROWS = (torch.zeros(64, 96),) * 4
FACTORS = torch.zeros(64, 1)
ANGLES = (torch.zeros(64, 16),) * 2
HEADS = (torch.zeros(64, 16, 16), torch.zeros(64, 2, 16))
CHUNK = (torch.zeros(64, 960), torch.zeros(64, dtype=torch.int64))


@pytest.mark.slow(seconds=6)
@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler asks it for its instructions")
@pytest.mark.parametrize(
    ("function", "given"),
    [
        (module.norm, (ROWS[0], ROWS[0][:1], 1e-6)),
        (module.norm_gradient, (*ROWS[:2], ROWS[0][:1], FACTORS)),
        (module.norm_weight_gradient, (*ROWS[:2], FACTORS)),
        (module.gated, ROWS[:2]),
        (module.gated_gradient, ROWS[:3]),
        (module.gated_halves, ROWS[:1]),
        (module.gated_halves_gradient, (ROWS[0][:, :48].clone(), ROWS[1])),
        (module.rotated, (*HEADS, *ANGLES)),
        (module.rotated_gradient, (*HEADS, *ANGLES)),
        (module.chunk_logprobs, (*CHUNK, 0.7)),
        (module.chunk_gradient, (*CHUNK, torch.zeros(64), 0.7, torch.zeros(64))),
    ],
)
def test_the_compilers_kernels_move_inputs_and_outputs_once(
    graphs: Any, monkeypatch: pytest.MonkeyPatch, function: Any, given: Any
) -> None:
    """By its own count, before kernels are built. Angles are read for queries and for keys, 1/19 more; sums of rows
    that several kernels read, less than 1/96.
    """
    from torch._inductor import config, graph

    found = []

    def counts(lowered: Any) -> None:
        lowered.codegen()
        found.append(lowered.count_bytes()[0])
        raise InterruptedError

    monkeypatch.setattr(graph.GraphLowering, "compile_to_module", counts)
    with config.patch(fx_graph_cache=False), pytest.raises(Exception, match="InterruptedError"):
        compiled(function, least_rows=1)(*given)
    tensors = [one for one in torch.utils._pytree.tree_leaves((given, function(*given))) if torch.is_tensor(one)]
    assert (
        1 <= found[0] / sum(one.nbytes for one in tensors) < 1 + (1 / 18 if "rotated" in function.__name__ else 1 / 96)
    )


def test_other_kinds_of_modules_stay_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    """Gemma's norms add 1 to their weights, and its gates are gelu."""
    config = transformers.GemmaConfig(**SMALL, head_dim=16)
    module._warn_once.cache_clear()
    policy, plain = new_policy(config), new_policy(config)
    for _ in range(2):
        fuse(policy, as_it_is)
    assert len(caplog.records) == 1
    assert "does not know GemmaMLP, GemmaRMSNorm: " in caplog.text
    changed = {type(one).__name__ for one in policy.modules() if "forward" in vars(one)}
    assert changed == {"GemmaAttention"}
    assert not any("forward" in vars(one) for one in plain.modules())
    check_equal(results(policy), results(plain))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [2, 5, 100])
def test_the_output_layer_in_chunks(monkeypatch: pytest.MonkeyPatch, chunk: int, dtype: Any) -> None:
    """In bfloat16 both round logits and gradients alike, but for some gradients at the middle of two numbers."""
    monkeypatch.setattr(module, "CHUNK_TOKENS", chunk)
    torch.manual_seed(0)
    hidden_NH, weight_VH = (torch.randn(rows, 8, dtype=torch.float64).to(dtype).requires_grad_() for rows in (11, 30))
    token_N, both = torch.randint(30, (11,)), []
    for softmax in (fuse(torch.nn.Identity(), as_it_is), None):
        logprob_N, entropy_N = token_logprobs(hidden_NH, weight_VH, token_N, temperature=0.7, softmax=softmax)
        assert not entropy_N.requires_grad
        loss = (torch.linspace(-2, 3, 11) * logprob_N).sum()
        both.append([logprob_N.detach(), entropy_N, *torch.autograd.grad(loss, (hidden_NH, weight_VH))])
    within = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    for mine, theirs in zip(*both, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=within, atol=within)


def test_high_logits_are_stable_and_a_sure_token_keeps_its_digits() -> None:
    weight_VH = torch.tensor([[1e4, 60.0], [1e4, 50.0], [-1e4, 50.0]], requires_grad=True)
    softmax = fuse(torch.nn.Identity(), as_it_is)
    logprob_N, entropy_N = token_logprobs(
        torch.eye(2), weight_VH, torch.tensor([0, 0]), temperature=1.0, softmax=softmax
    )
    assert logprob_N.tolist() == pytest.approx([-0.6931472, -9.0796e-5], rel=2e-3)
    assert float(entropy_N[0]) == pytest.approx(0.6931472, rel=1e-6)
    logprob_N[0].backward()
    assert weight_VH.grad[:, 0].tolist() == pytest.approx([0.5, -0.5, 0.0], rel=1e-3)


@pytest.mark.parametrize(("device", "words"), [("cpu", "g++, or CXX"), ("gpu", "gcc or clang, or CC")])
def test_a_machine_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch, device: str, words: str) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    says = message(check_compiler, device)
    assert says == f"train.trainer.fused must be false: torch.compile needs {words}, and this machine has none"
    monkeypatch.setattr(shutil, "which", lambda name: name or None)
    check_compiler(device)
