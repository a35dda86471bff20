"""What a run needs of its machine's memory: by hand for small models, and what is said where it is short."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from character_model import make_model  # noqa: E402
from refusals import message  # noqa: E402

from backends.interface import Share  # noqa: E402
from backends.trainer import footprint as module  # noqa: E402
from backends.trainer.footprint import check_host_memory, host_memory, shape_of  # noqa: E402
from backends.trainer.model import PolicyModel, load_policy  # noqa: E402
from backends.trainer.publish import Publisher  # noqa: E402
from backends.transfer import row as shared_row  # noqa: E402
from pipelinerl.config.run_file import load_run  # noqa: E402
from pipelinerl.errors import BackendError  # noqa: E402
from pipelinerl.hardware.transport import BROADCAST  # noqa: E402

EXAMPLE = Path(__file__).parents[3] / "examples" / "qwen7b_128_h100.toml"
EIGHT = ("cluster.accelerators=8", "cluster.generation_accelerators=4")
SMALL = {
    "vocab_size": 1000, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 32, "tie_word_embeddings": False,
}  # fmt: skip
LAYER = 4 * 128 * 128 + 2 * 128
"""Parameters of attention and norms."""


def dense() -> Any:
    return transformers.LlamaConfig(**SMALL, intermediate_size=256)


def experts() -> Any:
    return transformers.Qwen3MoeConfig(**SMALL, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64)


def run(*changed: str) -> Any:
    return load_run(EXAMPLE, [*EIGHT, *changed])


WHOLE = Share("here", 1e12, workers=4, ranks=4, leads=True)
DENSE = 2 * 1000 * 128 + 128 + 2 * (LAYER + 3 * 128 * 256)
ROUTED = 2 * 8 * 3 * 128 * 64
"""Parameters of the experts, which are fused."""


@pytest.mark.parametrize(
    ("transport", "expected"),
    [("broadcast", 2 * 2 * DENSE), ("streamed", 2 * 2**28 * (1 + 4)), ("file", (1 + 1 + 2) * 2 * DENSE)],
)
def test_weights_are_counted_as_each_transport_holds_them(transport: str, expected: int) -> None:
    """Rank 0's row and the engines'; two buckets of each end; a copy, the file being written and the two before."""
    needs = host_memory(run(f"train.transport={transport}"), shape_of(dense()), WHOLE)
    assert (needs.weights, needs.checkpoint, needs.loading) == (expected, 12 * DENSE, 0)
    assert needs.total == expected + 12 * DENSE


def test_a_layer_that_is_larger_than_a_bucket_is_one() -> None:
    """An embedding of 300 MB, in pinned memory of a power of two: twice 512 MiB for rank 0 and each of 4 workers."""
    wide = transformers.LlamaConfig(**SMALL | {"vocab_size": 1_200_000}, intermediate_size=256)
    assert host_memory(run("train.transport=streamed"), shape_of(wide), WHOLE).weights == 2 * 2**29 * (1 + 4)


@pytest.mark.parametrize(
    ("sets", "readers"),
    [((), 1), (("train.trainer.zero_stage=2",), 4), (("train.loss.kl_coefficient=0.1",), 1 + 4)],
)
def test_experts_that_are_fused_are_whole_where_they_are_read(sets: tuple[str, ...], readers: int) -> None:
    assert host_memory(run(*sets), shape_of(experts()), WHOLE).loading == readers * 2 * ROUTED


@pytest.mark.parametrize(
    ("sets", "gigabytes", "key"),
    [
        (("train.trainer.zero_stage=2", "train.loss.kl_coefficient=0"), 28, "train.trainer.zero_stage must be 3: "),
        ((), 13, "train.transport must be 'streamed': "),
        (
            (),
            11,
            "train.ray_address must lead to a cluster of more machines: 15.0 GB of the memory of this machine are ",
        ),
    ],
)
def test_the_key_to_change_is_the_one_that_helps(
    monkeypatch: pytest.MonkeyPatch, sets: tuple[str, ...], gigabytes: int, key: str
) -> None:
    """Of 15 GB 3 go as weights; with streaming 12.3; 36 for fused experts on four ranks."""
    one = SimpleNamespace(weights=3e9, checkpoint=12e9, loading=0.0, total=15e9)
    cases = {
        ("broadcast", 3): one,
        ("streamed", 3): SimpleNamespace(weights=0.3e9, checkpoint=12e9, loading=0.0, total=12.3e9),
        ("broadcast", 2): SimpleNamespace(weights=3e9, checkpoint=12e9, loading=36e9, total=36e9),
        ("streamed", 2): SimpleNamespace(weights=0.3e9, checkpoint=12e9, loading=36e9, total=36e9),
    }

    def counted(config: Any, *_: Any) -> Any:
        train = config.train
        return cases[train.chosen_transport(colocated=config.colocated).name, train.trainer.zero_stage]

    monkeypatch.setattr(module, "host_memory", counted)
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: SimpleNamespace(total=gigabytes * 1e9))
    assert message(check_host_memory, run(*sets), dense()).startswith(key)


@pytest.mark.parametrize(
    ("share", "weights", "ranks", "readers"),
    [
        (Share("a", 1e12, workers=4, ranks=0, leads=False), 1, 0, 0),
        (Share("b", 1e12, workers=0, ranks=3, leads=True), 1, 3, 3),
        (Share("c", 1e12, workers=2, ranks=1, leads=False), 1, 1, 1),
    ],
)
def test_a_machine_needs_what_of_the_run_is_on_it(share: Share, weights: int, ranks: int, readers: int) -> None:
    """Weights once where they leave and once per machine where they arrive; a quarter of the states per rank."""
    needs = host_memory(run("train.trainer.zero_stage=2"), shape_of(experts()), share)
    whole = host_memory(run("train.trainer.zero_stage=2"), shape_of(experts()), WHOLE)
    assert (needs.weights, needs.checkpoint) == (weights * whole.weights / 2, ranks / 4 * whole.checkpoint)
    assert needs.loading == readers * 2 * ROUTED


def test_the_machine_of_a_cluster_that_is_too_small_is_named() -> None:
    """Rank 0's has no room for the states of four ranks; the engines' has room for weights."""
    config = run("train.ray_address=auto")
    shares = [
        Share("host-a 10.0.0.1", 12 * DENSE, 0, 4, leads=True),
        Share("host-b 10.0.0.2", 12 * DENSE, 4, 0, leads=False),
    ]
    line = message(check_host_memory, config, dense(), shares)
    assert line.startswith("train.ray_address must lead to machines of more memory: ")
    assert "of the memory of host-a 10.0.0.1 are needed" in line
    check_host_memory(config, dense(), shares[1:])


def test_what_fits_passes() -> None:
    check_host_memory(run(), dense())


# Copies that a rank keeps in the host's memory take what they hold and no more: ``SharedRow`` pins no power of two.


def adamw_of(module: Any) -> Any:
    """In the place of DeepSpeed's engine, without ZeRO."""
    optimizer = torch.optim.AdamW(module.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    counts = dict.fromkeys(("global_steps", "global_samples", "skipped_steps", "micro_steps"), 0)
    return SimpleNamespace(
        module=module,
        optimizer=optimizer,
        lr_scheduler=schedule,
        device=torch.device("cpu"),
        zero_optimization_stage=lambda: 0,
        **counts,
    )


@pytest.mark.filterwarnings("ignore")  # DeepSpeed uses what torch renamed
def test_a_checkpoint_that_the_host_has_no_memory_for_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    from backends.trainer.deepspeed.state import RankState

    state = RankState(adamw_of(torch.nn.Linear(100, 7)), rank=0)
    monkeypatch.setattr(shared_row, "_free_bytes", lambda: 12 * 707 - 1)
    with pytest.raises(
        BackendError, match=r"^the host has no memory for a copy: 8484 bytes are needed, 8483 are free$"
    ):
        state.copy()
    monkeypatch.setattr(shared_row, "_free_bytes", lambda: 12 * 707)
    state.copy()


@pytest.mark.filterwarnings("ignore")
def test_weights_that_the_host_has_no_memory_for_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    make_model(tmp_path)
    policy = load_policy(str(tmp_path), device="cpu", dtype=torch.bfloat16)
    model = PolicyModel(policy, temperature=1.0, value_head=False)
    num_bytes = 2 * sum(parameter.numel() for parameter in policy.parameters())
    publisher = Publisher(0, device="cpu", transport=BROADCAST, folder=tmp_path, model_path=str(tmp_path))
    monkeypatch.setattr(shared_row, "_free_bytes", lambda: num_bytes - 1)
    with pytest.raises(BackendError, match=f": {num_bytes} bytes are needed"):
        publisher.publish(model, 1)
    monkeypatch.setattr(shared_row, "_free_bytes", lambda: num_bytes)
    assert publisher.publish(model, 1) is not None
