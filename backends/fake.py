"""A backend in memory, for tests and for trying a run file out: no model, no process, no GPU.

Theory of operation. ``FakeEngine`` makes decode steps: every sequence in progress gets one random token, then the
next step begins; updates, as real ones, come between two steps. The log-probability of a token under version v is
``-1 - DRIFT * v``, whatever the token: so the importance weight of a token of lag g is exp(-DRIFT * g), exactly.
``FakeTrainer`` counts optimizer steps, and its weights are that count. ``FakeReference`` is version 0.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from backends.interface import Generated, GenerateRequest, Parts, Sample, TrainResult, UpdateTimes, Weights
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import BackendError, EngineLostError, ReferenceLostError
from pipelinerl.scheduler.events import VersionSpans, WeightUpdate

DRIFT = 0.01
"""Fall of every token's log-probability per optimizer step (nats)."""
END_TOKEN = 0
"""The token that ends an answer."""
NUM_TOKENS = 16
"""Tokens there are, the end token among them (count)."""


def logprob(version: int) -> float:
    """Return the log-probability of any token under a version (nats)."""
    return -1.0 - DRIFT * version


class _Sequence:
    """One request in progress (mutable)."""

    def __init__(self, request: GenerateRequest) -> None:
        self.rng = np.random.default_rng(request.seed if request.temperature else request.prompt_tokens)
        self.max_new_tokens = request.max_new_tokens
        self.tokens: list[int] = []
        self.versions: list[int] = []
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()  # whether it was aborted

    def end(self, *, aborted: bool) -> None:
        if not self.done.done():  # cancelled
            self.done.set_result(aborted)

    def generated(self, *, aborted: bool) -> Generated:
        spans: dict[int, int] = {}
        for end, version in enumerate(self.versions, start=1):
            spans[version] = end
        return Generated(
            tokens_T=np.array(self.tokens, dtype=np.int64),
            logprob_T=np.array([logprob(version) for version in self.versions], dtype=np.float32),
            spans=VersionSpans(tuple(spans), tuple(spans.values())),
            aborted=aborted,
        )


class FakeEngine:
    """Keeps the promises of ``interface.Engine``.

    Args:
        num_slots: Sequences in progress, at most (count).
        step_s: Seconds of a decode step.
        update_s: Seconds of a weight transfer.
        endless: Whether no token ends an answer, so that all have the length asked for.
    """

    def __init__(
        self, *, num_slots: int = 8, step_s: float = 0.0, update_s: float = 0.0, endless: bool = False
    ) -> None:
        self.num_started = 0
        self._end_token = None if endless else END_TOKEN
        self._num_slots, self._step_s, self._update_s = num_slots, step_s, update_s
        self._lost = True
        self._weights = Weights(0, "memory:0")
        self._running: dict[int, _Sequence] = {}
        self._waiting: dict[int, _Sequence] = {}
        self._loop: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin, at version 0."""
        self.num_started += 1
        self._lost, self._weights = False, Weights(0, "memory:0")
        self._work, self._between_steps = asyncio.Event(), asyncio.Lock()  # of this event loop
        self._loop = asyncio.create_task(self._steps())

    def die(self) -> None:
        """Be lost, as a process that is killed."""
        self._lost = True
        if self._loop is not None:
            self._loop.cancel()
        for sequence in (*self._running.values(), *self._waiting.values()):
            if not sequence.done.done():
                sequence.done.set_exception(self._loss())
        self._running.clear()
        self._waiting.clear()

    async def generate(self, request: GenerateRequest) -> Generated:
        """Generate one answer; see ``interface.Engine``."""
        self._check()
        if request.rollout_id in self._running or request.rollout_id in self._waiting:
            raise BackendError(f"rollout {request.rollout_id} is in progress already")
        sequence = _Sequence(request)
        self._waiting[request.rollout_id] = sequence
        self._work.set()
        try:
            return sequence.generated(aborted=await sequence.done)
        except asyncio.CancelledError:
            self._running.pop(request.rollout_id, None)
            self._waiting.pop(request.rollout_id, None)
            raise

    async def abort(self, rollout_id: int) -> None:
        """End a request early; see ``interface.Engine``."""
        self._check()
        sequence = self._running.pop(rollout_id, None) or self._waiting.pop(rollout_id, None)
        if sequence is not None:
            sequence.end(aborted=True)

    async def update(self, weights: Weights, weight_update: WeightUpdate) -> UpdateTimes:
        """Load new weights; see ``interface.Engine``."""
        self._check()
        begin_s = time.monotonic()
        async with self._between_steps:
            paused_s = time.monotonic()
            if weight_update is WeightUpdate.ABORT:
                for rollout_id in (*self._running, *self._waiting):
                    await self.abort(rollout_id)
            await asyncio.sleep(self._update_s)
            self._check()
            self._weights = weights
            loaded_s = time.monotonic()
        return UpdateTimes(paused_s - begin_s, loaded_s - paused_s, time.monotonic() - loaded_s)

    async def checksums(self) -> dict[str, str]:
        """Return the checksums of the weights; see ``interface.Engine``."""
        self._check()
        return dict(self._weights.checksums)

    async def sleep(self) -> None:
        """Do nothing while it runs: no memory is shared."""
        self._check()

    async def wake(self) -> None:
        """Do nothing while it runs: no memory is shared."""
        self._check()

    async def shutdown(self) -> None:
        """End."""
        self.die()

    async def _steps(self) -> None:
        while True:
            await self._work.wait()
            async with self._between_steps:
                await asyncio.sleep(self._step_s)
                while self._waiting and len(self._running) < self._num_slots:
                    rollout_id = next(iter(self._waiting))
                    self._running[rollout_id] = self._waiting.pop(rollout_id)
                for rollout_id, sequence in list(self._running.items()):
                    sequence.tokens.append(int(sequence.rng.integers(NUM_TOKENS)))
                    sequence.versions.append(self._weights.version)
                    if sequence.tokens[-1] == self._end_token or len(sequence.tokens) == sequence.max_new_tokens:
                        del self._running[rollout_id]
                        sequence.end(aborted=False)
            if not self._running and not self._waiting:
                self._work.clear()

    def _check(self) -> None:
        if self._lost:
            raise self._loss()

    @staticmethod
    def _loss() -> EngineLostError:
        return EngineLostError("engine lost: it does not run")


class FakeReference:
    """Keeps the promises of ``interface.Reference``.

    Args:
        batch_s: Seconds of a batch, whatever its size.
    """

    def __init__(self, *, batch_s: float = 0.0) -> None:
        self.num_started = 0
        self.batches: list[int] = []
        """Samples of each batch (count), in order."""
        self._batch_s = batch_s
        self._lost = True

    async def start(self) -> None:
        """Begin."""
        self.num_started += 1
        self._lost = False

    def die(self) -> None:
        """Be lost, as a process that is killed."""
        self._lost = True

    async def logprobs(self, samples: list[Sample]) -> list[NDArray[np.float32]]:
        """Return log-probabilities of answer tokens; see ``interface.Reference``."""
        self._check()
        await asyncio.sleep(self._batch_s)
        self._check()
        self.batches.append(len(samples))
        return [np.full(len(sample.answer_T), logprob(0), dtype=np.float32) for sample in samples]

    async def shutdown(self) -> None:
        """End."""
        self.die()

    def _check(self) -> None:
        if self._lost:
            raise ReferenceLostError("reference model lost: it does not run")


class FakeTrainer:
    """Keeps the promises of ``interface.Trainer``.

    Args:
        train_batch_size: Sequences per optimizer step (count), checked.
        train_s: Seconds per micro-batch.
        kl_coefficient: As ``loss.kl_coefficient``: above 0, samples must have reference log-probabilities.
    """

    def __init__(self, *, train_batch_size: int, train_s: float = 0.0, kl_coefficient: float = 0.0) -> None:
        self.version = 0
        self.trained: list[tuple[int, ...]] = []
        """Rollouts of each optimizer step, in order."""
        self._batch, self._train_s = train_batch_size, train_s
        self._kl_coefficient = kl_coefficient
        self._accumulated: list[int] = []
        self._copied = 0

    async def start(self) -> None:
        """Begin, at version 0."""
        self.version, self._accumulated = 0, []

    async def train(self, samples: list[Sample], *, completes_step: bool) -> TrainResult:
        """Train on a micro-batch; see ``interface.Trainer``."""
        await asyncio.sleep(self._train_s)
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
        """Make the weights ready; see ``interface.Trainer``."""
        await asyncio.sleep(0)
        return Weights(version, f"memory:{version}", {"steps": hashlib.sha256(str(self.version).encode()).hexdigest()})

    async def send(self, weights: Weights) -> None:
        """Do nothing: the weights are in memory."""

    async def snapshot(self) -> None:
        """Copy the weights."""
        self._copied = self.version

    async def save(self, folder: Path) -> None:
        """Write what was copied."""
        _write(folder, self._copied)

    async def load(self, folder: Path) -> None:
        """Go on from what ``save`` wrote."""
        self.version = json.loads((folder / "fake.json").read_text(encoding="utf-8"))["version"]
        self._accumulated = []

    async def export(self, folder: Path) -> None:
        """Write the weights."""
        _write(folder, self.version)

    async def offload(self) -> None:
        """Do nothing: no memory is shared."""

    async def reload(self) -> None:
        """Do nothing: no memory is shared."""

    async def shutdown(self) -> None:
        """Do nothing: no process runs."""


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
        """Return a token per character."""
        return tuple(1 + ord(character) % (NUM_TOKENS - 1) for character in prompt)

    def decode(self, tokens: list[int]) -> str:
        """Return a letter per token, without the end token."""
        return "".join(chr(ord("a") + token) for token in tokens if token != END_TOKEN)


class FakeBackend:
    """Keeps the promises of ``interface.Backend``."""

    def check(self, config: RunConfig) -> None:
        """Accept every run file: nothing is needed."""

    @contextmanager
    def open(self, config: RunConfig, *, logs: Path | None = None) -> Iterator[Parts]:  # noqa: ARG002
        """Make the parts; they print nothing."""
        assert config.train is not None
        kl_coefficient, slots = config.train.loss.kl_coefficient, config.scheduler.generation_batch_size
        yield Parts(
            engines={engine_id: FakeEngine(num_slots=slots) for engine_id in range(config.num_engines)},
            trainer=FakeTrainer(train_batch_size=config.scheduler.train_batch_size, kl_coefficient=kl_coefficient),
            codec=FakeCodec(),
            reference=FakeReference() if kl_coefficient else None,
        )
