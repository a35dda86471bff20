"""A second trainer in one file, torch's AdamW in the driver's own process, under the engines there are.

It passes the contract suite, trains through the driver, and a run file names it; no package changes.
"""

import asyncio
import copy

import pytest
from needs import need

need("torch", "transformers", "safetensors")

import torch  # noqa: E402
from in_memory import config_of  # noqa: E402
from ledger_check import check_ledger, metrics_of  # noqa: E402
from real_run import EXAMPLE  # noqa: E402
from refusals import message  # noqa: E402

from backends.contract import (  # noqa: E402
    BATCH,
    TrainerContract,
    promises,
)
from backends.fake import FakeBackend  # noqa: E402
from backends.interface import Place, TrainerKind, TrainResult  # noqa: E402
from backends.kinds import backend_of  # noqa: E402
from backends.run import train  # noqa: E402
from backends.trainer.model import PolicyModel, copy_policy, load_policy, save_policy  # noqa: E402
from backends.trainer.packing import pack  # noqa: E402
from backends.trainer.publish import Publisher  # noqa: E402
from backends.trainer.step import row_loss  # noqa: E402
from pipelinerl.config.run import load_run  # noqa: E402
from pipelinerl.errors import ConfigError  # noqa: E402
from pipelinerl.hardware.transport import FILE  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
CPU = torch.device("cpu")


class AdamW:
    """One process, one optimizer; weights are published as files."""

    def __init__(self, config, place):
        self.config, self.folder, self.batch = config.train, place.weights_folder, config.scheduler.train_batch_size

    async def start(self):
        path, temperature = self.config.model.path, self.config.sampling.temperature
        self.model = PolicyModel(load_policy(path, device="cpu"), temperature=temperature, value_head=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.config.optimizer.learning_rate)
        self.publisher = Publisher(0, device="cpu", transport=FILE, folder=self.folder, model_path=path)

    async def train(self, samples, *, completes_step):
        (rows,) = pack(samples, pack_tokens=self.config.trainer.pack_tokens, num_ranks=1)
        logprob, metrics = {}, {"loss": 0.0}
        for row in rows:
            logprob_M, _, parts = row_loss(
                self.model, row, config=self.config.loss, train_batch_size=self.batch, device=CPU
            )
            loss = sum(parts.values())
            loss.backward()
            metrics["loss"] += float(loss.detach())
            logprob |= row.split(logprob_M.detach().numpy())
        if completes_step:
            optimizer = self.config.optimizer
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), optimizer.gradient_clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            metrics |= {"gradient_norm": float(norm), "learning_rate": optimizer.learning_rate, "skipped": 0}
        return TrainResult([logprob[index] for index in range(len(samples))], metrics)

    async def publish(self, version):
        return self.publisher.publish(self.model, version)

    async def snapshot(self):
        self.copied = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    async def save(self, folder):
        folder.mkdir()
        torch.save(self.copied, folder / "state.pt")

    async def load(self, folder):
        weights, optimizer = torch.load(folder / "state.pt")
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(optimizer)
        self.optimizer.zero_grad()

    async def export(self, folder):
        save_policy(self.model, copy_policy(self.model, receive=True), folder)

    async def shutdown(self):
        self.publisher.close()

    async def nothing(self, *_):
        pass

    send = offload = reload = nothing


def check(config):
    if config.train.device != "cpu":
        raise ConfigError(f"train.device must be 'cpu' with this trainer, got {config.train.device!r}")


TORCH = TrainerKind(name="adamw", make=AdamW, check=check)
KIND = f"{__name__}:TORCH"


def of_model(model, **changed):
    return {"model": {"path": str(model)}, "optimizer": {"learning_rate": 1e-3}, "trainer": {"kind": KIND}} | changed


def test_it_passes_the_contract_suite(model_path, tmp_path):
    async def suite():
        config = config_of(batch=BATCH, train=of_model(model_path))
        trainer = AdamW(config, Place(options=({},), weights_folder=tmp_path / "weights"))
        await trainer.start()
        contract = TrainerContract(trainer, lambda weights: weights.checksums, tmp_path)
        for promise in promises(TrainerContract):
            await asyncio.wait_for(getattr(contract, promise)(), 600)
        await trainer.shutdown()

    asyncio.run(suite())


def test_it_trains_through_the_driver_and_goes_on_from_its_checkpoint(model_path, tmp_path):
    config = config_of(train=of_model(model_path, checkpoint={"every": 1}))
    summary = train(config, out=tmp_path / "run", backend=FakeBackend(trainer_kind=TORCH))
    check_ledger(tmp_path / "run", config, summary)
    assert (tmp_path / "run" / "model" / "model.safetensors").stat().st_size > 0
    assert [step["train/learning_rate"] for step in metrics_of(tmp_path / "run")] == [1e-3] * config.optimizer_steps
    train(config, out=tmp_path / "run", backend=FakeBackend(trainer_kind=TORCH), resume=True)  # it was complete


def test_a_run_file_names_it_and_its_check_comes_before_anything_is_written(model_path, tmp_path):
    assert backend_of(config_of(train=of_model(model_path)).train).trainer is TORCH
    config, backend = config_of(train=of_model(model_path, device="gpu")), FakeBackend(trainer_kind=TORCH)
    refusal = message(train, config, out=tmp_path / "run", backend=backend)
    assert refusal == "train.device must be 'cpu' with this trainer, got 'gpu'"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("part", "kind", "rule"),
    [
        ("trainer", "tiny_trainer:STEPS", "name a TrainerKind, got 'tiny_trainer:STEPS'"),
        ("trainer", "nowhere.at_all:X", "be importable, got 'nowhere.at_all:X'"),
        ("engine", KIND, "name a EngineKind, got"),
    ],
)
def test_a_wrong_name_is_one_line(model_path, part, kind, rule):
    refusal = message(backend_of, config_of(train=of_model(model_path, **{part: {"kind": kind}})).train)
    assert refusal.startswith(f"train.{part}.kind must {rule}")
    with pytest.raises(ValueError, match=r"train\.trainer\.kind"):
        config_of(train=of_model(model_path, trainer={"kind": "deepsped"}))


@pytest.mark.real
def test_it_trains_under_the_engines_of_vllm(tmp_path):
    from tiny_model import make_tiny_model

    make_tiny_model(tmp_path / "model", fit_steps=0)
    changed = [f"train.model.path={str(tmp_path / 'model')!r}", f"train.trainer.kind={KIND!r}", "optimizer_steps=2"]
    config = load_run(EXAMPLE, changed)
    summary = train(config, out=tmp_path / "run")
    check_ledger(tmp_path / "run", config, summary)
