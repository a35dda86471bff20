"""Rows that ranks share against the same rows on one rank, in float64, and runs that cannot share them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from forked_ranks import CONTEXT, forked_ranks  # noqa: E402
from refusals import message  # noqa: E402

from backends.contract import samples  # noqa: E402
from backends.trainer.attention import PACKED_ATTENTION, register_packed_attention  # noqa: E402
from backends.trainer.model import PolicyModel, recompute  # noqa: E402
from backends.trainer.packing import PackedRow, pack  # noqa: E402
from backends.trainer.sequence_parallel import (  # noqa: E402
    SequenceGroup,
    check_sequence_parallel,
    over_ranks,
    spread,
)
from backends.trainer.step import row_loss  # noqa: E402
from backends.transfer.rendezvous import reserved_port  # noqa: E402
from pipelinerl.config.run import load_run  # noqa: E402
from pipelinerl.rl.config import LossConfig  # noqa: E402

SHAPE: dict[str, Any] = {
    "vocab_size": 20, "hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 2,
    "max_position_embeddings": 512,
}  # fmt: skip
QWEN = SHAPE | {"model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
MODELS: dict[str, dict[str, Any]] = {
    "two heads of keys": QWEN,
    "one head of keys": QWEN | {"num_key_value_heads": 1},
    "three heads of keys": QWEN | {"num_attention_heads": 12, "num_key_value_heads": 3},
    "a window of 5": QWEN | {"model_type": "mistral", "sliding_window": 5},
    "values narrower than keys": QWEN | LATENT | {
        "model_type": "deepseek_v3", "num_key_value_heads": 4, "first_k_dense_replace": 2,
    },
}  # fmt: skip
SIZES = (2, 4)
RANKS = 4


def with_references(rows: list[list[PackedRow]]) -> list[PackedRow]:
    rng = np.random.default_rng(1)
    return [
        replace(row, reference_logprob_M=(row.behaviour_logprob_M + rng.normal(0, 0.2, len(row.answer_M))).astype("f4"))
        for of_rank in rows
        for row in of_rank
    ]


def rows_of() -> dict[str, PackedRow]:
    """Return rows by what is special of them; 4 ranks have borders inside sequences of all but the last two."""
    batch = samples()
    tiny = replace(batch[0], prompt_P=batch[0].prompt_P[:1], segments=(one_token(batch[0]),))
    given = {"eight sequences": batch, "one": batch[3:4], "two": batch[4:6], "three tokens": [tiny], "none": []}
    return {name: with_references(pack(some, pack_tokens=500, num_ranks=1))[0] for name, some in given.items()}


def one_token(sample: Any) -> Any:
    first = sample.segments[0]
    return replace(first, tokens=first.tokens[:1], logprobs=first.logprobs[:1])


def losses() -> dict[str, LossConfig]:
    kinds = get_args(LossConfig.model_fields["kind"].annotation)
    masks = [("reinforce", "token"), ("sequence", "sequence"), ("reinforce", "geometric")]
    made = {kind: {"kind": kind} for kind in kinds}
    made |= {f"{mask} mask": {"kind": kind, "mask": mask, "mask_low": 0.9, "mask_high": 1.1} for kind, mask in masks}
    made |= {"kl": {"kl_coefficient": 0.3}, "value": {"value_coefficient": 0.5, "kl_coefficient": 0.1}}
    return {name: LossConfig.model_validate(one) for name, one in made.items()}


def policy_of(model: str) -> Any:
    torch.manual_seed(0)
    given = dict(MODELS[model])
    config = transformers.AutoConfig.for_model(given.pop("model_type"), **given)
    return transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float64, attn_implementation=register_packed_attention()
    ).train()


def results(model: PolicyModel, forward: Callable[..., Any], row: PackedRow, loss: LossConfig) -> list[Any]:
    """Return log-probabilities, entropies, loss and the gradients of one rank."""
    logprob_M, entropy_M, parts = row_loss(forward, row, config=loss, train_batch_size=8, device=torch.device("cpu"))
    total = torch.stack(list(parts.values())).sum()
    named = list(model.parameters())
    gradients = torch.autograd.grad(total, named, allow_unused=True)
    filled = [torch.zeros_like(one) if grad is None else grad for one, grad in zip(named, gradients, strict=True)]
    return [logprob_M.detach(), entropy_M.detach(), total.detach()[None], *filled]


def difference(model_name: str, row: PackedRow, loss: LossConfig, group: SequenceGroup, *, again: bool) -> float:
    """Return the largest difference between a row on a group and on one rank, over the largest value of each result."""
    policy = policy_of(model_name)
    recompute(policy, again)
    model = PolicyModel(policy, temperature=0.7, value_head=loss.value_coefficient > 0)
    if model.value_head is not None:
        torch.nn.init.constant_(model.value_head.weight, 0.01)
    alone = results(model, model, row, loss)
    policy.set_attn_implementation(PACKED_ATTENTION)
    spread(policy, group)
    shared = results(model, over_ranks(model, group), row, loss)
    for gradient in shared[3:]:
        torch.distributed.all_reduce(gradient, group=group.ranks)
    largest = 0.0
    for one, other in zip(alone, shared, strict=True):
        assert one.shape == other.shape
        if one.numel():
            largest = max(largest, float((one - other).abs().max() / one.abs().max().clamp(min=1e-6)))
    return largest


def cases() -> dict[str, tuple[str, str, str]]:
    """Return model, row and loss by name."""
    rows = {f"row: {row}": ("two heads of keys", row, "reinforce") for row in rows_of()}
    models = {f"model: {model}": (model, "eight sequences", "reinforce") for model in MODELS}
    return rows | models | {f"loss: {loss}": ("two heads of keys", "eight sequences", loss) for loss in losses()}


def one_rank(rank: int, port: int, found: Any) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    rows, by_loss = rows_of(), losses()
    largest = {}
    for size in SIZES:
        group = SequenceGroup.of(size, rank)
        for again, (name, (model, row, loss)) in product([True, False], cases().items()):
            if not again or name.startswith("row"):
                error = difference(model, rows[row], by_loss[loss], group, again=again)
                largest[size, name] = max(error, largest.get((size, name), 0.0))
    found.put((rank, largest))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found() -> dict[int, dict[tuple[int, str], float]]:
    """The differences that four ranks found, by size of group and case, for each rank."""
    results = CONTEXT.Queue()
    with reserved_port("127.0.0.1") as held:
        port = held.getsockname()[1]
    arguments = [(rank, port, results) for rank in range(RANKS)]
    with forked_ranks(one_rank, arguments, preload=[__name__, "transformers.models.qwen2", "torch._dynamo"]) as ranks:
        found = dict(results.get(timeout=600) for _ in ranks)
        for rank in ranks:
            rank.join(timeout=60)
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", cases())
def test_a_row_on_several_ranks_is_the_row_on_one(found: dict[int, dict[tuple[int, str], float]], size: int, case: str):
    assert max(of_rank[size, case] for of_rank in found.values()) < 1e-12


# ------------------------------------------------------------------------------------------------ what cannot be shared

EXAMPLE = Path(__file__).parents[3] / "examples" / "qwen7b_128_h100.toml"  # of 80 ranks


@pytest.mark.parametrize(
    ("size", "model", "rule"),
    [
        (3, QWEN, "divide the 80 ranks of the trainer, got 3"),
        (8, QWEN, "divide the 4 attention heads, got 8"),
        (
            2, QWEN | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "be 1 for a model with rope_type='dynamic', as ranks would rotate the same position differently, got 2",
        ),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_shared_are_one_line(size: int, model: dict[str, Any], rule: str) -> None:
    given = dict(model)
    config = load_run(EXAMPLE, [f"train.trainer.sequence_parallel={size}"])
    model_config = transformers.AutoConfig.for_model(given.pop("model_type"), **given)
    assert message(check_sequence_parallel, config, model_config) == f"train.trainer.sequence_parallel must {rule}"
    for others in (1, 4):
        fits = load_run(EXAMPLE, [f"train.trainer.sequence_parallel={others}"])
        check_sequence_parallel(fits, transformers.AutoConfig.for_model(**QWEN))
