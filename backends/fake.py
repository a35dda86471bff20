"""A backend in memory, for tests and for trying a run file out: no model, no process, no GPU.

Theory of operation. ``FakeEngine`` makes decode steps: every sequence in progress gets one random token; updates, as
real ones, come between two steps. The log-probability of any token under version v is ``-1 - DRIFT * v``: so the
importance weight of a token of lag g is exp(-DRIFT * g), exactly. ``FakeTrainer`` counts optimizer steps, and its
weights are that count. ``FakeReference`` is version 0.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.interface import (
    STREAM_TOKENS,
    AnswerLostError,
    EngineKind,
    Generated,
    GenerateRequest,
    Parts,
    Place,
    Sample,
    TrainerKind,
    TrainResult,
    UpdateTimes,
    Weights,
)
from backends.transfer.transport import SenderContext, TransportEnds, WeightReceiver, WeightSender, ends_of
from pipelinerl.config.faults import FaultConfig
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import BackendError, EngineLostError, ReferenceLostError, TrainerLostError, TransferError
from pipelinerl.hardware.transport import OURS
from pipelinerl.scheduler.events import VersionSpans, WeightUpdate

DRIFT = 0.01
"""Fall of every token's log-probability per optimizer step (nats)."""
END_TOKEN = 0
NUM_TOKENS = 16
"""The end token among them."""


def logprob(version: int) -> float:
    """Return the log-probability of any token under a version (nats)."""
    return -1.0 - DRIFT * version


LOSS = "engine lost: it does not run"


class _Sequence:
    def __init__(self, request: GenerateRequest) -> None:
        self.rng = np.random.default_rng(request.seed if request.temperature else request.prompt_tokens)
        self.max_new_tokens = request.max_new_tokens
        self.tokens: list[int] = []
        self.versions: list[int] = []
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()  # whether it was aborted

    def end(self, *, aborted: bool) -> None:
        if not self.done.done():  # cancelled
            self.done.set_result(aborted)

    def generated(self, *, aborted: bool, reported_every: int = 1) -> Generated:
        num_tokens = len(self.tokens) - len(self.tokens) % reported_every
        spans: dict[int, int] = {}
        for end, version in enumerate(self.versions[:num_tokens], start=1):
            spans[version] = end
        return Generated(
            tokens_T=np.array(self.tokens[:num_tokens], dtype=np.int64),
            logprob_T=np.array([logprob(version) for version in self.versions[:num_tokens]], dtype=np.float32),
            spans=VersionSpans(tuple(spans), tuple(spans.values())),
            aborted=aborted,
        )


class FakeEngine:
    """Keeps the promises of ``interface.Engine``: decode steps of ``step_s``, weight transfers of ``update_s``.

    ``endless``: no token ends an answer, all have the length asked for. ``stream_tokens``: each answer is reported
    every so many. ``receiver`` None: weights are in memory.
    """

    def __init__(
        self,
        *,
        num_slots: int = 8,
        step_s: float = 0.0,
        update_s: float = 0.0,
        endless: bool = False,
        stream_tokens: int = STREAM_TOKENS,
        receiver: WeightReceiver | None = None,
    ) -> None:
        self.num_started = 0
        self._stream_tokens = stream_tokens
        self._receiver = receiver
        self._end_token = None if endless else END_TOKEN
        self._num_slots, self._step_s, self._update_s = num_slots, step_s, update_s
        self._lost, self._cut, self._factor = True, False, 1.0
        self._weights = Weights(0, "memory:0")
        self._sequences: dict[int, _Sequence] = {}  # in order of arrival: the first ``num_slots`` run
        self._loop: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.num_started += 1
        self._lost, self._weights = False, Weights(0, "memory:0")
        self._cut, self._factor = False, 1.0
        self._work, self._between_steps = asyncio.Event(), asyncio.Lock()  # of this event loop
        self._loop = asyncio.create_task(self._steps())

    def die(self) -> None:
        """Be lost, as a process that is killed."""
        self._lost = True
        if self._loop is not None:
            self._loop.cancel()
        for sequence in self._sequences.values():
            if not sequence.done.done():
                known = sequence.generated(aborted=True, reported_every=self._stream_tokens)
                sequence.done.set_exception(AnswerLostError(LOSS, known))
        self._sequences.clear()

    async def suffer(self, fault: FaultConfig) -> None:
        match fault.kind:
            case "kill":
                self.die()
            case "cut":
                self._cut = True
            case "stop":
                async with self._between_steps:
                    await asyncio.sleep(fault.seconds or 0.0)
            case "slow":
                self._factor = fault.factor or 1.0
                await asyncio.sleep(fault.seconds or 0.0)
                self._factor = 1.0

    async def generate(self, request: GenerateRequest) -> Generated:
        self._check()
        if request.rollout_id in self._sequences:
            raise BackendError(f"rollout {request.rollout_id} is in progress already")
        sequence = self._sequences[request.rollout_id] = _Sequence(request)
        self._work.set()
        try:
            return sequence.generated(aborted=await sequence.done)
        except asyncio.CancelledError:
            self._sequences.pop(request.rollout_id, None)
            raise

    async def abort(self, rollout_id: int) -> None:
        self._check()
        if (sequence := self._sequences.pop(rollout_id, None)) is not None:
            sequence.end(aborted=True)

    async def update(self, weights: Weights, weight_update: WeightUpdate) -> UpdateTimes:
        if self._cut:
            self.die()
        self._check()
        begin_s = time.monotonic()
        async with self._between_steps:
            paused_s = time.monotonic()
            if weight_update is WeightUpdate.ABORT:
                for rollout_id in list(self._sequences):
                    await self.abort(rollout_id)
            await asyncio.sleep(self._update_s)
            self._check()
            if self._receiver is not None:
                try:
                    _check_received(dict(self._receiver.receive(weights)), weights)
                except BackendError as error:
                    raise TransferError(str(error)) from error
                self._receiver.loaded(weights)
            self._weights = weights
            loaded_s = time.monotonic()
        return UpdateTimes(paused_s - begin_s, loaded_s - paused_s, time.monotonic() - loaded_s)

    async def checksums(self) -> dict[str, str]:
        self._check()
        return dict(self._weights.checksums)

    async def sleep(self) -> None:
        self._check()

    async def wake(self) -> None:
        self._check()

    async def shutdown(self) -> None:
        self.die()

    async def _steps(self) -> None:
        while True:
            await self._work.wait()
            async with self._between_steps:
                await asyncio.sleep(self._factor * self._step_s)
                for rollout_id, sequence in list(self._sequences.items())[: self._num_slots]:
                    sequence.tokens.append(int(sequence.rng.integers(NUM_TOKENS)))
                    sequence.versions.append(self._weights.version)
                    if sequence.tokens[-1] == self._end_token or len(sequence.tokens) == sequence.max_new_tokens:
                        del self._sequences[rollout_id]
                        sequence.end(aborted=False)
            if not self._sequences:
                self._work.clear()

    def _check(self) -> None:
        if self._lost:
            raise EngineLostError(LOSS)


class FakeReference:
    """Keeps the promises of ``interface.Reference``; a batch of any size takes ``batch_s``."""

    def __init__(self, *, batch_s: float = 0.0) -> None:
        self.num_started = 0
        self.batches: list[int] = []
        """Samples of each batch (count)."""
        self._batch_s = batch_s
        self._lost = True

    async def start(self) -> None:
        self.num_started += 1
        self._lost = False

    def die(self) -> None:
        """Be lost, as a process that is killed."""
        self._lost = True

    async def logprobs(self, samples: list[Sample]) -> list[NDArray[np.float32]]:
        self._check()
        await asyncio.sleep(self._batch_s)
        self._check()
        self.batches.append(len(samples))
        return [np.full(len(sample.answer_T), logprob(0), dtype=np.float32) for sample in samples]

    async def shutdown(self) -> None:
        self.die()

    def _check(self) -> None:
        if self._lost:
            raise ReferenceLostError("reference model lost: it does not run")


class FakeWeights:
    """A ``WeightSource``: one parameter, the number of optimizer steps."""

    device: Any = "cpu"
    parameters = (("steps", "int64", ()),)

    def __init__(self, steps: int) -> None:
        self._steps = np.array(steps)

    def buckets(self, *, everywhere: bool = False) -> Iterator[dict[str, NDArray[np.int64]]]:  # noqa: ARG002
        """Yield the parameter."""
        yield {"steps": self._steps}


def _check_received(tensors: dict[str, Any], weights: Weights) -> None:
    if tensors.keys() != {"steps"} or tensors["steps"] < weights.version:
        raise BackendError(f"version {weights.version} has not come in full: {tensors}")


class FakeTrainer:
    """Keeps the promises of ``interface.Trainer``; checks the batch; ``sender`` None: weights are in memory."""

    def __init__(
        self,
        *,
        train_batch_size: int,
        train_s: float = 0.0,
        kl_coefficient: float = 0.0,
        sender: WeightSender | None = None,
    ) -> None:
        self._sender = sender
        self.version = 0
        self.trained: list[tuple[int, ...]] = []
        self._batch, self._train_s = train_batch_size, train_s
        self._kl_coefficient = kl_coefficient
        self._accumulated: list[int] = []
        self._copied, self._lost = 0, False

    async def start(self) -> None:
        self.version, self._accumulated, self._lost = 0, [], False

    async def suffer(self, fault: FaultConfig) -> None:
        self._lost = fault.kind == "kill"

    async def train(self, samples: list[Sample], *, completes_step: bool) -> TrainResult:
        await asyncio.sleep(self._train_s)
        if self._lost:
            raise TrainerLostError("trainer lost: it does not run")
        self._accumulated += [sample.rollout_id for sample in samples]
        if completes_step != (len(self._accumulated) == self._batch):
            raise BackendError(f"{len(self._accumulated)} samples of {self._batch}, completes_step={completes_step}")
        now = logprob(self.version)
        result = [np.full(len(sample.answer_T), now, dtype=np.float32) for sample in samples]
        metrics = {"loss": -sum(sample.advantage for sample in samples) / self._batch}
        if self._kl_coefficient:
            metrics["kl_loss"] = self._kl_coefficient * sum(_divergence(one, now) for one in samples) / self._batch
        if completes_step:
            self.trained.append(tuple(self._accumulated))
            self._accumulated = []
            self.version += 1
            metrics |= {"gradient_norm": 1.0, "learning_rate": 1.0}
        return TrainResult(result, metrics)

    async def publish(self, version: int) -> Weights:
        await asyncio.sleep(0)
        if self._sender is not None:
            published = self._sender.publish(FakeWeights(self.version), version)
            assert published is not None
            return published
        return Weights(version, f"memory:{version}", {"steps": hashlib.sha256(str(self.version).encode()).hexdigest()})

    async def send(self, weights: Weights) -> None:
        """Send by the transport, if there is one."""
        if fault := self._sender and self._sender.send(weights.version):
            raise TransferError(fault)

    async def snapshot(self) -> None:
        self._copied = self.version

    async def save(self, folder: Path) -> None:
        _write(folder, self._copied)

    async def load(self, folder: Path) -> None:
        self.version = json.loads((folder / "fake.json").read_text(encoding="utf-8"))["version"]
        self._accumulated = []

    async def export(self, folder: Path) -> None:
        _write(folder, self.version)

    async def offload(self) -> None:
        """Do nothing: no memory is shared."""

    async def reload(self) -> None:
        """Do nothing: no memory is shared."""

    async def shutdown(self) -> None:
        """Free the published weights."""
        if self._sender is not None:
            self._sender.close()


def _write(folder: Path, version: int) -> None:
    folder.mkdir(parents=True)
    (folder / "fake.json").write_text(json.dumps({"version": version}), encoding="utf-8")


def _divergence(sample: Sample, now: float) -> float:
    """Return the sum of exp(d) - d - 1 over an answer, d = log ref - log pi (nats)."""
    if sample.reference_logprob_T is None:
        raise BackendError(f"rollout {sample.rollout_id} has no reference log-probabilities")
    difference_T = sample.reference_logprob_T - now
    return float((np.exp(difference_T) - difference_T - 1).sum())


class FakeCodec:
    """A token is a letter."""

    def encode(self, prompt: str) -> tuple[int, ...]:
        return tuple(1 + ord(character) % (NUM_TOKENS - 1) for character in prompt)

    def decode(self, tokens: NDArray[np.int64]) -> str:
        return "".join(chr(ord("a") + token) for token in tokens if token != END_TOKEN)


def _ends(config: RunConfig) -> TransportEnds | None:
    """Return the ends of the user's own transport; memory stands for ours, which send real models."""
    assert config.train is not None
    transport = config.train.chosen_transport(colocated=config.colocated)
    return None if transport in OURS else ends_of(transport.ends)


def _make_engine(config: RunConfig, *_: Any) -> FakeEngine:
    ends = _ends(config)
    receiver = None if ends is None else ends.receiver("")
    return FakeEngine(num_slots=config.scheduler.generation_batch_size, receiver=receiver)


def _make_trainer(config: RunConfig, place: Place) -> FakeTrainer:
    ends, context = _ends(config), SenderContext(receives=True, folder=place.weights_folder, group=None)
    return FakeTrainer(
        train_batch_size=config.scheduler.train_batch_size,
        kl_coefficient=config.train_table.loss.kl_coefficient,
        sender=None if ends is None else ends.sender(context),
    )


FAKE_ENGINE = EngineKind(name="fake", make=_make_engine)
FAKE_TRAINER = TrainerKind(name="fake", make=_make_trainer)


@dataclass
class FakeBackend:
    """A ``Backend`` without Ray: engines and a trainer in this process."""

    engine_kind: EngineKind = FAKE_ENGINE
    trainer_kind: TrainerKind = FAKE_TRAINER

    def check(self, config: RunConfig) -> None:
        for kind in (self.engine_kind, self.trainer_kind):
            kind.check(config)

    @contextmanager
    def open(self, config: RunConfig, *, logs: Path | None = None) -> Iterator[Parts]:
        with TemporaryDirectory() as folder:
            place = Place(options=({},), weights_folder=Path(folder), logs=logs)
            yield Parts(
                engines={
                    engine_id: self.engine_kind.make(config, engine_id, place)
                    for engine_id in range(config.num_engines)
                },
                trainer=self.trainer_kind.make(config, place),
                codec=FakeCodec(),
                reference=FakeReference() if config.train_table.loss.needs_reference else None,
            )
