"""One rank against plain torch, and two ranks against one."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
transformers = pytest.importorskip("transformers")

from character_model import make_model  # noqa: E402
from tiny_trainer import (  # noqa: E402
    BATCH,
    MARKS,
    ROUNDING,
    largest_difference,
    parameters,
    path_of,
    plain_logits,
    plain_logprob,
    plain_training,
    samples,
    settings,
    spoilt_rows,
    started,
    train,
    with_reference,
)
from transfer_group import held_by, row_of  # noqa: E402

import backends.trainer.model  # noqa: E402
import backends.trainer.publish  # noqa: E402
import backends.trainer.rank  # noqa: E402
from backends.check.run_check import taught  # noqa: E402
from backends.interface import Sample, TrainResult  # noqa: E402
from backends.trainer.deepspeed.rank import DeepSpeedRank, deepspeed_config, torch_adamw_passes  # noqa: E402
from backends.trainer.model import load_policy  # noqa: E402
from backends.trainer.packing import pack  # noqa: E402
from backends.trainer.rank import MAX_SKIPPED, reach  # noqa: E402
from backends.trainer.step import PHASES  # noqa: E402
from backends.transfer.file import read_verified  # noqa: E402
from backends.transfer.group import Receiver  # noqa: E402
from backends.transfer.rendezvous import RendezvousStore, reserved_port  # noqa: E402
from backends.transfer.row import digest, label, ranges  # noqa: E402
from backends.transfer.transport import Membership  # noqa: E402
from backends.transfer.verify import checkpoint_shapes, checksum64  # noqa: E402
from pipelinerl.config.train import TrainerConfig  # noqa: E402
from pipelinerl.errors import BackendError  # noqa: E402
from pipelinerl.hardware.transport import BROADCAST  # noqa: E402
from pipelinerl.rl.config import LossConfig  # noqa: E402

pytestmark = MARKS
STAGES = (0, 1, 2, 3)


Plain = tuple[dict[str, Any], list[dict[str, float]]]


@pytest.fixture(scope="module")
def plain(model_path: Path) -> Plain:
    return plain_training(model_path, 3)


def check_trains_as(
    plain: Plain, rank: DeepSpeedRank, *, batch: Callable[[int], list[Sample]] = samples, rel: float = 1e-4
) -> None:
    for step, metrics in enumerate(plain[1]):
        assert train(rank, batch(step))[1] == pytest.approx(metrics, rel=rel, abs=1e-9)
    assert largest_difference(parameters(rank), plain[0]) < ROUNDING


@pytest.mark.parametrize("zero_stage", STAGES)
def test_however_a_batch_is_cut_the_step_is_that_of_plain_adamw(
    model_path: Path, plain: Plain, zero_stage: int
) -> None:
    whole, cut = (started(model_path, zero_stage=zero_stage) for _ in range(2))
    first = transformers.AutoModelForCausalLM.from_pretrained(model_path).eval()
    for step, expected in enumerate(plain[1]):
        batch = samples(step)
        logprob, metrics = train(whole, batch)
        assert metrics == pytest.approx(expected, rel=1e-4)
        if step == 0:
            for sample, logprob_T in zip(batch, logprob, strict=True):
                assert logprob_T == pytest.approx(plain_logprob(first, sample).detach().numpy(), abs=1e-5)
        parts = [train(cut, batch[at : at + 2], completes_step=at == 6, pack_tokens=40) for at in range(0, 8, 2)]
        assert sum(metrics["loss"] for _, metrics in parts) == pytest.approx(expected["loss"], rel=1e-4)
        again = [logprob_T for part, _ in parts for logprob_T in part]
        assert np.concatenate(again) == pytest.approx(np.concatenate(logprob), abs=1e-4)
    assert largest_difference(parameters(whole), plain[0]) < ROUNDING
    assert largest_difference(parameters(cut), plain[0]) < ROUNDING


@pytest.mark.parametrize("kind", get_args(LossConfig.model_fields["kind"].annotation))
def test_the_pack_of_a_check_changes_weights_whatever_the_loss(model_path: Path, kind: str) -> None:
    """Equal weights would prove no direct copies, and the first update of the run would be one that proves them."""
    rank = started(model_path, loss=LossConfig.model_validate({"kind": kind}))
    before, nothing = parameters(rank), [replace(one, advantage=0.0) for one in samples()]
    logprob, _ = train(rank, nothing)
    _, metrics = train(rank, taught(nothing, TrainResult(logprob, {})))
    assert metrics["gradient_norm"] > 0
    assert any(not torch.equal(parameters(rank)[name], old) for name, old in before.items())


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_an_output_layer_that_is_the_embedding_learns_as_both(tmp_path: Path, zero_stage: int) -> None:
    make_model(tmp_path, tied=True)
    check_trains_as(plain_training(tmp_path, 2), started(tmp_path, zero_stage=zero_stage))


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_what_is_published_and_exported_is_what_is_trained(
    model_path: Path, tmp_path: Path, zero_stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends.trainer.model, "BUCKET_BYTES", 50_000)
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "version-00000009.safetensors").touch()  # of a rank that was killed
    loss = LossConfig(value_coefficient=0.5)
    rank = started(model_path, zero_stage=zero_stage, weights_folder=str(folder), loss=loss)
    train(rank, samples())
    now = parameters(rank)
    weights = rank.publish(1)
    assert weights is not None
    train(rank, samples(1))
    assert largest_difference(parameters(rank), now) > 1e-4
    read = read_verified(path_of(weights), weights.checksums, checkpoint_shapes(model_path))
    assert largest_difference({name: read[name] for name in now}, now) == 0
    for version in (2, 3):
        rank.publish(version)
    names = [f"version-{version:08d}.safetensors" for version in (2, 3)]
    assert sorted(path.name for path in folder.iterdir()) == names
    rank.export(tmp_path / "export")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert largest_difference(exported.state_dict(), parameters(rank)) == 0
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "export")("12")["input_ids"] == [3, 4]
    rank.shutdown()
    assert list(folder.iterdir()) == []


def first_worker(rank: DeepSpeedRank, model_path: Path) -> Membership:
    """Open a group; return the membership of its first worker."""
    shapes, cpu = checkpoint_shapes(model_path), torch.device("cpu")
    return Membership(rendezvous=rank.open_group(), worker=1, shapes=shapes, device=cpu, timeout_s=600.0)


def test_what_is_sent_is_what_was_trained_when_it_was_published(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends.trainer.model, "BUCKET_BYTES", 50_000)
    rank = started(model_path, zero_stage=3, transport=BROADCAST)
    train(rank, samples())
    published = parameters(rank)
    weights = rank.publish(1)
    assert weights is not None
    parameters_sent, ends = rank._publisher._source.parameters, rank._publisher._sender._ends
    assert len(ends) > 1  # buckets
    row = row_of(published, parameters_sent)
    checksum = digest(parameters_sent, [checksum64(part) for part in ranges(row, ends)])
    assert weights.location == f"broadcast:{label(1, checksum)}"
    assert weights.checksums == {"all parameters": checksum}
    train(rank, samples(1))
    assert rank.send(1) == "version 1 cannot be sent: no group"
    membership = first_worker(rank, model_path)

    def receive() -> Receiver:
        member = Receiver(membership, place="here")
        for right in (False, False, False, True):
            notice = member.next_transfer()
            assert member.receive(notice if right else {**notice, "sums": []}) is right
        return member

    with ThreadPoolExecutor(max_workers=1) as thread:
        receiving = thread.submit(receive)
        assert rank.join_group(["trainer", "engine 0"], 600.0) is None
        assert rank.send(2) == "version 2 cannot be sent: it is not held"
        assert rank.send(1) == "version 1 was refused 2 times (machines: 1)"
        assert rank.send(1) is None
        member = receiving.result()
    assert largest_difference(dict(sorted(published.items())), dict(sorted(held_by(member).items()))) == 0
    assert member.row.label == label(1, checksum)
    rank.shutdown()
    assert "the group has been left" in str(rank.send(1))
    member.close()


def test_weights_that_engines_do_not_know_end_the_start(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = checkpoint_shapes(model_path) | {"model.experts.0.weight": (4, 4)}
    monkeypatch.setattr(backends.trainer.publish, "checkpoint_shapes", lambda path: shapes)
    with pytest.raises(BackendError, match=r"^weights to be sent lack 1 of \d+ parameters: model.experts.0.weight$"):
        started(model_path, transport=BROADCAST)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_the_value_head_starts_at_zero_and_is_the_baseline(model_path: Path, zero_stage: int) -> None:
    rank = started(model_path, zero_stage=zero_stage, loss=LossConfig(truncation=1.2, value_coefficient=0.5))
    batch = samples()
    squares = sum(len(sample.answer_T) * sample.reward**2 for sample in batch)
    logprob, first = train(rank, batch, completes_step=False)
    weighted = sum(
        float((np.minimum(1.2, np.exp(logprob_T - sample.behaviour_logprob_T)) * logprob_T).sum()) * sample.reward
        for sample, logprob_T in zip(batch, logprob, strict=True)
    )
    assert first["value_loss"] == pytest.approx(0.5 * 0.5 * squares / BATCH, rel=1e-5)
    assert first["loss"] - first["value_loss"] == pytest.approx(-weighted / BATCH, rel=1e-5)
    for _ in range(3):
        _, metrics = train(rank, batch)
    assert metrics["value_loss"] < first["value_loss"]


@pytest.mark.parametrize("zero_stage", STAGES)
def test_the_step_is_that_of_a_frozen_copy_asked_within_the_step(model_path: Path, zero_stage: int) -> None:
    plain = plain_training(model_path, 3, kl_coefficient=0.5)
    assert plain[1][-1]["kl_loss"] > 1e-4  # at the start it is 0
    rank = started(model_path, zero_stage=zero_stage, loss=LossConfig(truncation=1.2, kl_coefficient=0.5))
    check_trains_as(plain, rank, batch=lambda step: with_reference(model_path, samples(step)), rel=1e-3)


def test_a_loss_with_a_reference_needs_its_log_probabilities(model_path: Path) -> None:
    rank = started(model_path, loss=LossConfig(kl_coefficient=0.1))
    with pytest.raises(
        ValueError,
        match=r"^reference_logprob_T must be there with loss.kl_coefficient > 0 or",
    ):
        train(rank, samples())


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_compiled_functions_change_nothing(model_path: Path, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers that are split, one of them recomputed; nine functions, compiled once for rows of any length.

    Without the last stage of the compiler, which calls one of C++.
    """
    module = backends.trainer.rank
    monkeypatch.setattr(module, "check_compiler", lambda _: None)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # of an engine of this process
    monkeypatch.setattr(torch._dynamo.config, "disable", False)
    monkeypatch.setattr(module, "compiled", partial(module.compiled, backend="aot_eager", least_rows=1))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    trainer = TrainerConfig(zero_stage=3, pack_tokens=100, activation_checkpointing=1, fused=True)
    check_trains_as(plain, started(model_path, trainer=trainer))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 9


def test_activation_checkpointing_changes_nothing(model_path: Path, plain: Plain) -> None:
    trainer = TrainerConfig(zero_stage=3, pack_tokens=100, activation_checkpointing=1)
    rank = started(model_path, trainer=trainer)
    check_trains_as(plain, rank)
    (rows,) = pack(samples(), pack_tokens=100, num_ranks=1)
    assert rank.train(rows, completes_step=False)[1]["recomputed_layers"] == 1


def test_without_zero_a_step_that_is_not_finite_is_skipped_too(model_path: Path) -> None:
    rank = started(model_path, zero_stage=0)
    before = parameters(rank)
    assert rank.train(spoilt_rows(), completes_step=True)[1]["skipped"] == 1
    assert largest_difference(parameters(rank), before) == 0


def test_the_port_that_ranks_meet_at_is_given_to_nobody_else_before_they_do(model_path: Path) -> None:
    rank = DeepSpeedRank(settings(model_path))
    address, port = rank.free_address()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((address, port))
    rank.start(address, port)


def test_ranks_wait_for_one_another_as_long_as_the_configuration_says(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In DeepSpeed's own copy of the group, too; longer while they load the model."""
    loading: list[float] = []

    def timeouts() -> list[float]:
        backends = [one._get_backend(torch.device("cpu")) for one in torch.distributed.distributed_c10d._world.pg_map]
        return [one.options._timeout.total_seconds() for one in backends]

    def load(*arguments: Any, **named: Any) -> Any:
        loading.extend(timeouts())
        return load_policy(*arguments, **named)

    monkeypatch.setattr(backends.trainer.rank, "load_policy", load)
    started(model_path)
    assert set(loading) == {3600} == {TrainerConfig().start_timeout_s}
    assert timeouts() == [900, 900] == 2 * [TrainerConfig().collective_timeout_s]


@pytest.mark.parametrize(("zero_stage", "overlaps"), [(1, False), (2, True), (3, True)])
def test_gradients_are_reduced_and_parameters_gathered_beside_other_work(
    model_path: Path, zero_stage: int, overlaps: bool
) -> None:
    """ZeRO-3 gathers a layer of a 7B ahead, which has 233,057,792 numbers."""
    engine = started(model_path, zero_stage=zero_stage)._engine
    assert engine.zero_overlap_comm() is overlaps
    assert engine.zero_prefetch_bucket_size() >= 2 * 3584 * (3584 + 512) + 3 * 3584 * 18_944 + 3584 + 2 * 512 + 2 * 3584


def test_a_rank_that_cannot_reach_rank_0_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its packets are dropped: the store admits another address than the one that it comes from, as behind NAT."""
    monkeypatch.setattr(backends.trainer.rank, "ANSWER_S", 0.2)
    store = RendezvousStore("127.0.0.1", timeout_s=600, members=["127.0.0.1"])
    behind_nat = partial(socket.create_connection, source_address=("127.0.0.2", 0))
    monkeypatch.setattr(socket, "create_connection", behind_nat)
    with pytest.raises(BackendError, match=rf"^no connection to rank 0 at 127.0.0.1:{store.port}: .*firewall or NAT"):
        reach("127.0.0.1", store.port, timeout_s=600)


def test_a_rank_waits_until_rank_0_listens() -> None:
    with reserved_port("127.0.0.1") as held, ThreadPoolExecutor(1) as thread:
        port = held.getsockname()[1]
        waits = thread.submit(reach, "127.0.0.1", port, timeout_s=600)
        with pytest.raises(TimeoutError):
            waits.result(timeout=0.3)
        store = RendezvousStore("127.0.0.1", port, timeout_s=600)
        waits.result()
    store.set("key", "the store is as good as before")
    with pytest.raises(BackendError, match="Connection refused"):
        reach("127.0.0.1", 1, timeout_s=0)


def test_steps_that_are_skipped_in_a_row_end_the_run(model_path: Path) -> None:
    rank = started(model_path)
    for _ in range(2):
        for _ in range(MAX_SKIPPED - 1):
            rank.train(spoilt_rows(), completes_step=True)
        rank.train(pack(samples(), pack_tokens=100, num_ranks=1)[0], completes_step=True)
    for _ in range(MAX_SKIPPED - 1):
        rank.train(spoilt_rows(), completes_step=True)
    with pytest.raises(BackendError, match=r"the gradient was not finite in 5 optimizer steps in a row"):
        rank.train(spoilt_rows(), completes_step=True)


def test_a_rank_measures_its_work(model_path: Path) -> None:
    """Entropy from all logits; FLOP of 6 a parameter and token, and 6 a layer, number of a head, and squared token."""
    batch = samples()
    (rows,) = pack(batch, pack_tokens=100, num_ranks=1)
    _, metrics = started(model_path).train(rows, completes_step=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path).eval()
    entropy = 0.0
    for sample in batch:
        with torch.no_grad():
            logits = plain_logits(model, sample)
        entropy += float(torch.distributions.Categorical(logits=logits).entropy().sum())
    assert metrics["answer_tokens_sum"] == sum(len(sample.answer_T) for sample in batch)
    assert metrics["entropy_sum"] == pytest.approx(entropy, rel=1e-5)
    num = sum(parameter.numel() for parameter in model.parameters())
    tokens, squares = (sum(sample.num_tokens**power for sample in batch) for power in (1, 2))
    assert metrics["flop_sum"] == pytest.approx(6 * num * tokens + 6 * 2 * 64 * squares, rel=1e-6)
    assert all(metrics[name] > 0 for name in (*PHASES, "peak_memory_gb"))


@pytest.mark.parametrize("kind", ["reinforce", "ppo", "cispo", "gspo", "topr"])
def test_a_row_without_sequences_adds_nothing(model_path: Path, kind: str) -> None:
    value_coefficient = 0 if kind == "gspo" else 1
    loss = LossConfig.model_validate({"kind": kind, "kl_coefficient": 0.1, "value_coefficient": value_coefficient})
    padded, bare = (started(model_path, zero_stage=2, loss=loss) for _ in range(2))
    _, metrics = train(padded, [], completes_step=False)
    assert set(metrics.values()) == {0}
    batch = with_reference(model_path, samples())
    assert train(padded, batch)[1] == train(bare, batch)[1]
    assert largest_difference(parameters(padded), parameters(bare)) == 0


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_a_rank_that_was_offloaded_in_between_trains_as_one_that_was_not(model_path: Path, zero_stage: int) -> None:
    stays, goes = (started(model_path, zero_stage=zero_stage) for _ in range(2))
    for number in range(3):
        for rank in (stays, goes):
            train(rank, samples(number))
        with torch_adamw_passes():  # what ``offload`` does on a GPU; here all is in the host's memory before and after
            goes._engine.offload_states(pin_memory=False)
        goes._engine.reload_states()
    assert largest_difference(parameters(stays), parameters(goes)) == 0


def test_gpus_need_zero(model_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer.zero_stage must be at least 1 on GPU, got 0"):
        deepspeed_config(settings(model_path, device="gpu", trainer=TrainerConfig(zero_stage=0)))
