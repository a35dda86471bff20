"""One FSDP2 rank against plain torch, and four, with experts shared or not, against DeepSpeed's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
transformers = pytest.importorskip("transformers")

from character_model import make_model  # noqa: E402
from forked_ranks import forked_ranks  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny_trainer import (  # noqa: E402
    MARKS,
    ROUNDING,
    STEPS,
    largest_difference,
    parameters,
    path_of,
    plain_training,
    samples,
    saved_state,
    spoilt_rows,
    started,
    train,
)

from backends.trainer.deepspeed.rank import DeepSpeedRank  # noqa: E402
from backends.trainer.fsdp2.rank import FSDP2Rank  # noqa: E402
from backends.trainer.model import TRAINED_DTYPES  # noqa: E402
from backends.trainer.packing import pack  # noqa: E402
from backends.transfer.file import read_verified  # noqa: E402
from backends.transfer.rendezvous import reserved_port  # noqa: E402
from backends.transfer.verify import checkpoint_shapes  # noqa: E402
from pipelinerl.config.train import TrainerConfig  # noqa: E402
from pipelinerl.rl.config import LossConfig  # noqa: E402

pytestmark = MARKS
MIXTURE = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
RANKS = 4
DENSE, SHARED = "dense", (1, 2, 4)
"""A model whose output layer is its embedding; ranks that share the experts of a mixture."""
WITH_VALUE = LossConfig(value_coefficient=0.5)
"""With a parameter of one row, of which most ranks have nothing."""


# ----------------------------------------------------------------------------------------------- one rank


@pytest.mark.parametrize("tied", [False, True])
def test_steps_are_those_of_plain_adamw_with_layers_recomputed_or_not(tmp_path: Path, tied: bool) -> None:
    make_model(tmp_path, tied=tied)
    trainer = TrainerConfig(pack_tokens=100, activation_checkpointing=1)
    rank = started(tmp_path, kind=FSDP2Rank, trainer=trainer)
    expected, steps = plain_training(tmp_path, 3)
    for step, metrics in enumerate(steps):
        parts = [train(rank, part, completes_step=last)[1] for part, last in _halves(step)]
        assert sum(one["loss"] for one in parts) == pytest.approx(metrics["loss"], rel=1e-4)
        assert {**parts[1], "loss": 0} == pytest.approx({**metrics, "loss": 0}, rel=1e-4)
    assert largest_difference(parameters(rank), expected) < ROUNDING


def _halves(step: int) -> list[tuple[list[Any], bool]]:
    batch = samples(step)
    return [(batch[:3], False), (batch[3:], True)]


def test_in_bfloat16_the_masters_are_deepspeeds_and_a_step_that_is_not_finite_changes_no_bit(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both read the same rows in the same type; gradients are added up in float32."""
    monkeypatch.setitem(TRAINED_DTYPES, "cpu", torch.bfloat16)
    kinds = {"fsdp2": FSDP2Rank, "deepspeed": DeepSpeedRank}
    ranks = {name: started(model_path, kind=kind, zero_stage=3) for name, kind in kinds.items()}
    for number in range(2):
        states = {}
        for name, rank in ranks.items():
            train(rank, samples(number))
            states[name] = _saved(rank, tmp_path / f"{name}-{number}")
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            assert largest_difference(states["fsdp2"][kind], states["deepspeed"][kind]) < 1e-6
    rank, before = ranks["fsdp2"], states["fsdp2"]
    assert rank.train(spoilt_rows(), completes_step=True)[1]["skipped"] == 1
    after = _saved(rank, tmp_path / "after")
    assert all(largest_difference(after[kind], before[kind]) == 0 for kind in before)
    for name, parameter in parameters(rank).items():
        assert torch.equal(parameter.view(-1), after["master"][f"policy.{name}"].bfloat16()), name
    rank.export(tmp_path / "model")
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto").dtype is torch.bfloat16


def _saved(rank: Any, folder: Path) -> dict[str, dict[str, Any]]:
    rank.snapshot()
    rank.save(folder)
    return saved_state(folder)


def test_going_on_from_a_checkpoint_and_after_making_room_is_the_same_as_never_having_stopped(
    model_path: Path, tmp_path: Path
) -> None:
    straight, resumed = (started(model_path, kind=FSDP2Rank, loss=WITH_VALUE) for _ in range(2))
    for step in range(2):
        train(straight, samples(step))
    _saved(straight, tmp_path / "checkpoint")
    resumed.load(tmp_path / "checkpoint")
    for step in range(2, STEPS):
        resumed._move_out()  # what ``offload`` does on a GPU
        resumed._move_back()
        assert train(straight, samples(step))[1] == train(resumed, samples(step))[1]
    assert largest_difference(parameters(straight), parameters(resumed)) == 0
    straight.export(tmp_path / "export")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert largest_difference(exported.state_dict(), parameters(straight)) == 0


# --------------------------------------------------------------------------------------------- four ranks


def _start(kind: Any, rank: int, port: int, folder: Path, shared: int) -> Any:
    trainer = TrainerConfig(zero_stage=3, pack_tokens=60, expert_parallel=shared)
    return started(folder, kind=kind, port=port, rank=rank, num_ranks=RANKS, trainer=trainer, loss=WITH_VALUE)


def _step(one: Any, rank: int, step: int) -> tuple[dict[int, Any], float]:
    logprob, metrics = one.train(pack(samples(step), pack_tokens=60, num_ranks=RANKS)[rank], completes_step=True)
    return logprob, metrics["gradient_norm"]


def _trained(kind: Any, rank: int, port: int, folder: Path, shared: int, name: str) -> dict[str, Any]:
    """Publish, make three steps, save; then make a fourth one; go on from DeepSpeed's checkpoint in the same way."""
    one = _start(kind, rank, port, folder, shared)
    weights = one.publish(0)
    at_start = None
    if weights is not None:
        read = read_verified(path_of(weights), weights.checksums, checkpoint_shapes(folder))
        at_start = {key: tensor.clone() for key, tensor in read.items()}
    steps = []
    for step in range(3):
        one.snapshot()
        if kind is FSDP2Rank:  # as colocated on GPUs: the first snapshot comes before the first step
            one._move_out()
            one._move_back()
        steps.append(_step(one, rank, step))
    one.snapshot()
    one.save(folder / name)
    steps.append(_step(one, rank, 3))
    after = parameters(one)
    one.export(folder / f"{name}-exported")
    one.load(folder / "deepspeed")
    again = _step(one, rank, 3)
    one.shutdown()
    return {"at_start": at_start, "steps": steps, "after": after, "again": again}


def _one_of_four(rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    reports = {}
    for model, shared in ((DENSE, (1,)), ("mixture", SHARED)):
        reports[model, 0] = _trained(DeepSpeedRank, rank, port, folder / model, 1, "deepspeed")
        for one in shared:
            reports[model, one] = _trained(FSDP2Rank, rank, port, folder / model, one, f"fsdp2-{one}")
    torch.save(reports, folder / f"report-{rank}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, the state that four ranks saved after three steps, and reports of the ranks.

    The router of one layer is 0 at first: all tokens go to the same two experts, and most ranks get none.
    """
    folder = tmp_path_factory.mktemp("four")
    for name in (DENSE, "mixture"):
        make_model(folder / name, tied=name == DENSE)
        (folder / name / "published").mkdir()
    mixture = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**MIXTURE))
    torch.nn.init.zeros_(mixture.model.layers[1].mlp.gate.weight)
    mixture.save_pretrained(folder / "mixture")
    preload = ["deepspeed", "transformers.models.qwen3_moe.modeling_qwen3_moe"]
    with pytest.MonkeyPatch.context() as patch, reserved_port("127.0.0.1") as held:
        patch.setenv("OMP_NUM_THREADS", "1")
        arguments = [(rank, held.getsockname()[1], folder) for rank in range(RANKS)]
        with forked_ranks(_one_of_four, arguments, preload=preload) as ranks:
            for rank in ranks:
                rank.join(timeout=900)
            assert [rank.exitcode for rank in ranks] == [0] * RANKS
    return folder


CASES = [(DENSE, 1), *(("mixture", shared) for shared in SHARED)]


def _reports(folder: Path, model: str, shared: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield what DeepSpeed's rank and ours report."""
    for rank in range(RANKS):
        report = torch.load(folder / f"report-{rank}", weights_only=False)
        yield report[model, 0], report[model, shared]


@pytest.mark.parametrize(("model", "shared"), CASES)
def test_four_ranks_publish_the_bits_and_make_the_steps_of_deepspeeds(folder: Path, model: str, shared: int) -> None:
    for rank, (theirs, ours) in enumerate(_reports(folder, model, shared)):
        if rank == 0:
            assert largest_difference(ours["at_start"], theirs["at_start"]) == 0
        for (logprob, norm), (their_logprob, their_norm) in zip(ours["steps"], theirs["steps"], strict=True):
            assert norm == pytest.approx(their_norm, rel=1e-5)
            assert logprob.keys() == their_logprob.keys()
            for sample, logprob_T in logprob.items():
                assert logprob_T == pytest.approx(their_logprob[sample], abs=1e-5)
        assert largest_difference(ours["after"], theirs["after"]) < 1e-5
    exported = load_file(folder / model / f"fsdp2-{shared}-exported" / "model.safetensors")
    assert largest_difference(dict(sorted(exported.items())), dict(sorted(ours["after"].items()))) == 0


@pytest.mark.parametrize(("model", "shared"), CASES)
def test_four_ranks_go_on_from_deepspeeds_checkpoint(folder: Path, model: str, shared: int) -> None:
    for theirs, ours in _reports(folder, model, shared):
        (logprob, norm), (their_logprob, their_norm) = ours["again"], theirs["steps"][3]
        assert norm == pytest.approx(their_norm, rel=1e-5)
        for sample, logprob_T in logprob.items():
            assert logprob_T == pytest.approx(their_logprob[sample], abs=1e-6)


@pytest.mark.parametrize(("model", "shared"), CASES)
def test_one_rank_of_either_kind_goes_on_from_four(folder: Path, tmp_path: Path, model: str, shared: int) -> None:
    state = saved_state(folder / model / f"fsdp2-{shared}")
    for kind in (DeepSpeedRank, FSDP2Rank):
        alone = started(folder / model, kind=kind, zero_stage=3, loss=WITH_VALUE)
        alone.load(folder / model / f"fsdp2-{shared}")
        again = _saved(alone, tmp_path / kind.__name__)
        assert all(largest_difference(again[kind], state[kind]) == 0 for kind in state)
        train(alone, samples(3))
        *_, (_, ours) = _reports(folder, model, shared)
        assert largest_difference(parameters(alone), ours["after"]) < ROUNDING
