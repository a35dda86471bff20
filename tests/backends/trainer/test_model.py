"""Which layers of the trained model are recomputed."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from backends.trainer.attention import register_packed_attention  # noqa: E402
from backends.trainer.model import PolicyModel, recompute  # noqa: E402

LAYERS = 3
CONFIG = transformers.Qwen2Config(
    vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=LAYERS, num_attention_heads=2,
    num_key_value_heads=1,
)  # fmt: skip


def gradients(wanted: bool | int) -> tuple[int, list[int], dict[str, Any]]:
    """Return layers recomputed, forward passes of each layer in a step, and gradients by parameter."""
    torch.manual_seed(0)
    attention = register_packed_attention()
    policy = transformers.AutoModelForCausalLM.from_config(CONFIG, attn_implementation=attention).train()
    recompute(policy, True)
    number, passes = recompute(policy, wanted), [0] * LAYERS
    for index, layer in enumerate(policy.base_model.layers):
        layer.register_forward_pre_hook(lambda *_, index=index: passes.__setitem__(index, passes[index] + 1))
    model = PolicyModel(policy, temperature=1.0, value_head=False)
    token_N = torch.arange(12) % 7
    row = {"token_N": token_N, "position_N": torch.arange(12) % 8, "predictor_M": torch.tensor([3, 6, 9])}
    boundary = torch.tensor([0, 8, 12], dtype=torch.int32)
    logprob_M, *_ = model(**row, answer_M=token_N[[4, 7, 10]], boundary=boundary, longest=8)
    logprob_M.sum().backward()
    return number, passes, {name: one.grad for name, one in model.named_parameters()}


@pytest.mark.parametrize(("wanted", "number"), [(1, 1), (2, 2), (True, LAYERS), (LAYERS + 1, LAYERS)])
def test_the_first_layers_are_recomputed_and_gradients_have_the_same_bits(wanted: bool | int, number: int) -> None:
    """A recomputed layer has two forward passes in a step, another one has one."""
    plain, (recomputed, passes, found) = gradients(False), gradients(wanted)
    assert plain[:2] == (0, [1] * LAYERS)
    assert (recomputed, passes) == (number, [2] * number + [1] * (LAYERS - number))
    assert all(one.abs().max() > 0 for one in found.values())
    assert all(torch.equal(found[name], one) for name, one in plain[2].items())
