"""Two ranks as Ray actors: what they do together, and what is said when one of them does not."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answered import when_others_have_answered
from needs import need

need("deepspeed")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
ray = pytest.importorskip("ray")

from character_model import make_model  # noqa: E402
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny_trainer import (  # noqa: E402
    BATCH,
    OPTIMIZER,
    largest_difference,
    parameters,
    path_of,
    plain_logprob,
    samples,
    settings,
    started,
    train,
)

import backends.ray.actors  # noqa: E402
from backends.contract import TrainerContract, promises  # noqa: E402
from backends.ray.actors import RayTrainer  # noqa: E402
from backends.trainer.deepspeed.rank import DeepSpeedRank  # noqa: E402
from backends.trainer.settings import RankSettings  # noqa: E402
from backends.transfer.verify import checkpoint_shapes, checksums  # noqa: E402
from pipelinerl.config.train import OptimizerConfig, TrainerConfig  # noqa: E402
from pipelinerl.errors import BackendError, TrainerLostError  # noqa: E402

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore")]  # Ray, torch and DeepSpeed warn of much


@pytest.mark.usefixtures("own_ray")
def test_two_ranks_work_together_until_one_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.ray.actors, "RANKS_SHUTDOWN_TIMEOUT_S", 1.0)
    make_model(tmp_path)
    given = settings(tmp_path, num_ranks=2, trainer=TrainerConfig(zero_stage=3, pack_tokens=60, step_timeout_s=600))
    group = ray.util.placement_group([{"CPU": 1}, {"CPU": 1}])
    options = [{"num_cpus": 1, "scheduling_strategy": PlacementGroupSchedulingStrategy(group, one)} for one in (0, 1)]

    class RankOfAGpu(DeepSpeedRank):  # here, so that Ray takes it along
        def __init__(self, settings: RankSettings) -> None:
            super().__init__(settings)
            torch.cuda.mem_get_info = lambda _: (0, [80e9, 40e9][settings.rank])

    trainer = RayTrainer(RankOfAGpu, given, options, recomputed={40e9: 1, 80e9: 0}.__getitem__)

    async def live() -> None:
        try:
            await trainer.start()
            await the_ranks_meet_at_a_store_that_hears_no_stranger(trainer)
            await logprobs_come_in_the_order_of_samples(trainer, tmp_path)
            await links_and_kernels_are_measured(trainer)
            await what_a_checkpoint_holds_comes_back(trainer, tmp_path)
            await silence_and_failure_are_named(trainer, tmp_path)
            monkeypatch.setattr(backends.ray.actors, "BLAME_TIMEOUT_S", 600.0)  # Ray may be slow to know of a death
            await death_is_named(trainer)
        finally:
            await trainer.shutdown()
            await trainer.shutdown()

    asyncio.run(live())


@pytest.mark.usefixtures("own_ray")
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_two_ranks_that_share_rows_keep_a_trainers_promises(tmp_path: Path, zero_stage: int) -> None:
    """A row of two packs is wider than a rank's: 40 tokens, and the longest sample has up to 37."""
    make_model(tmp_path)
    shared = TrainerConfig(zero_stage=zero_stage, sequence_parallel=2, pack_tokens=20, step_timeout_s=600)
    options = [{"num_cpus": 0}] * 2
    constant = OptimizerConfig(learning_rate=1e-3)
    given = settings(tmp_path, num_ranks=2, trainer=shared, optimizer=constant)
    trainer = RayTrainer(DeepSpeedRank, given, options)
    contract = TrainerContract(trainer, lambda weights: checksums(load_file(path_of(weights)).items()), tmp_path / "on")

    async def live() -> tuple[dict[str, Any], list[Any], dict[str, float]]:
        try:
            await trainer.start()
            for promise in promises(TrainerContract):
                if not promise.startswith("a_new_start"):  # which is as that of ranks that share nothing
                    await getattr(contract, promise)()
            await contract._save()
            saved = load_file(path_of(await trainer.publish(contract.version)))
            return saved, *await contract._step(9)
        finally:
            await trainer.shutdown()

    saved, logprobs, metrics = asyncio.run(live())
    alone = started(tmp_path, zero_stage=5 - zero_stage, optimizer=constant)
    alone.load(tmp_path / "on" / f"saved-{len(contract.saved) - 1}")
    assert largest_difference({name: saved[name] for name in parameters(alone)}, parameters(alone)) == 0
    others, again = train(alone, samples(9))
    assert np.concatenate(others) == pytest.approx(np.concatenate(logprobs), abs=1e-5)
    assert again == pytest.approx({name: metrics[name] for name in again}, rel=1e-4)
    assert metrics["answer_tokens_sum"] == sum(len(one.answer_T) for one in samples(9))


async def the_ranks_meet_at_a_store_that_hears_no_stranger(trainer: RayTrainer) -> None:
    at = await trainer._ranks[0].__ray_call__.remote(
        lambda _: (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    )
    socket.create_connection(at, timeout=600).close()  # from where a rank comes from
    with pytest.raises(TimeoutError):
        socket.create_connection(at, timeout=0.5, source_address=("127.0.0.9", 0))


async def logprobs_come_in_the_order_of_samples(trainer: RayTrainer, model_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path).eval()
    batch = samples()
    result = await trainer.train(batch[:3], completes_step=False)
    assert {"loss", "entropy_sum", "rank0/forward_s", "rank1/peak_memory_gb"} <= result.metrics.keys()
    assert "skipped" not in result.metrics
    assert result.metrics["recomputed_layers"] == 1  # by both, as the smaller GPU needs
    loss = result.metrics["loss"]
    rest = await trainer.train(batch[3:], completes_step=True)
    expected = 0.0
    for sample, logprob_T in zip(batch, result.logprob_T + rest.logprob_T, strict=True):
        assert logprob_T == pytest.approx(plain_logprob(model, sample).detach().numpy(), abs=1e-5)
        weight_T = np.minimum(1.2, np.exp(logprob_T - sample.behaviour_logprob_T))
        expected -= float((weight_T * logprob_T).sum()) * sample.advantage / BATCH
    assert loss + rest.metrics["loss"] == pytest.approx(expected, rel=1e-4)
    assert rest.metrics["learning_rate"] == OPTIMIZER.learning_rate / 2
    longer = replace(batch[7], prompt_P=np.ones(len(batch[7].prompt_P) + 60, dtype=np.int64))
    with pytest.raises(ValueError, match=f"got pack_tokens=60, rollout 7 has {batch[7].num_tokens + 60} tokens"):
        await trainer.train([longer], completes_step=False)


async def links_and_kernels_are_measured(trainer: RayTrainer) -> None:
    facts = await trainer.self_test(1_000_000)
    assert len(facts) == 2
    for one in facts:
        assert (one.device, one.same_checksum, one.to_host_gb_s) == ("CPU", True, None)
        assert one.attention_error < 1e-5
        assert min(one.reduce_gb_s, one.broadcast_gb_s) > 0


async def what_a_checkpoint_holds_comes_back(trainer: RayTrainer, model_path: Path) -> None:
    """By the contract of trainers, for all ranks together."""
    contract = TrainerContract(trainer, lambda weights: checksums(load_file(path_of(weights)).items()), model_path)
    await contract.what_is_saved_is_what_was_copied_whatever_is_trained_meanwhile()
    await contract.a_saved_trainer_goes_on_as_it_would_have()
    await contract.an_export_writes_files_and_changes_nothing()
    assert checkpoint_shapes(model_path / "export") == checkpoint_shapes(model_path)


async def silence_and_failure_are_named(trainer: RayTrainer, model_path: Path) -> None:
    with pytest.raises(
        BackendError,
        match=r"trainer failed: phase=load rank=0 after \S+ s; without its folder .*: BackendError: ch",
    ) as failed:
        await trainer.load(model_path / "nothing")
    assert failed.type is BackendError  # raised on purpose: a trainer that is started again would raise it again
    usual = trainer._settings
    trainer._settings = replace(usual, trainer=TrainerConfig(step_timeout_s=1, pack_tokens=60))
    process = await trainer._ranks[1].__ray_call__.remote(lambda _: os.getpid())
    os.kill(process, signal.SIGSTOP)
    hangs = pytest.raises(TrainerLostError, match=r"trainer hangs: phase=offload ranks=\[1\] after \d+\.\d s")
    with hangs, when_others_have_answered(1):
        await trainer.offload()
    os.kill(process, signal.SIGCONT)
    trainer._settings = usual
    await trainer.reload()


async def death_is_named(trainer: RayTrainer) -> None:
    """It stands still before it dies, so that the step cannot be done by then."""
    process = await trainer._ranks[1].__ray_call__.remote(lambda _: os.getpid())
    os.kill(process, signal.SIGSTOP)
    training = asyncio.ensure_future(trainer.train(samples(), completes_step=True))
    await asyncio.sleep(0)
    os.kill(process, signal.SIGKILL)
    with pytest.raises(TrainerLostError, match=r"trainer died: phase=train rank=1 after \d+\.\d s; go on from"):
        await training
