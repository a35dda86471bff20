"""The contracts of trainers and reference models, and of an engine together with its trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from backends.contract.engine import (
    BATCH,
    PROMPT,
    ROUNDING,
    EngineContract,
    check_close,
    check_metrics,
    raises,
    request,
)
from backends.interface import Reference, Sample, Trainer, TrainResult, Weights
from pipelinerl.errors import ReferenceLostError
from pipelinerl.rl.segments import Segment, extended
from pipelinerl.scheduler.events import WeightUpdate


def samples(seed: int = 0) -> list[Sample]:
    """Return a batch; no two answers have the same length, and every other one has two turns."""
    rng = np.random.default_rng(seed)
    made = []
    for index, num_tokens in enumerate(int(number) for number in 1 + rng.permutation(3 * BATCH)[:BATCH]):
        prompt_P = rng.integers(2, 16, int(rng.integers(2, 11)))
        tokens_T = rng.integers(2, 16, num_tokens)
        logprob_T = (-4.2 + 0.3 * rng.standard_normal(num_tokens)).astype(np.float32)
        half = num_tokens // 2
        parts = (
            Segment.generated(tokens_T[:half], logprob_T[:half]),
            Segment.observed(rng.integers(2, 16, 3 * (index % 2))),
            Segment.generated(tokens_T[half:], logprob_T[half:]),
        )
        segments: tuple[Segment, ...] = reduce(extended, parts, ())
        reward, advantage = float(rng.random()), float(rng.standard_normal())
        made.append(Sample(index, prompt_P, segments, reward=reward, advantage=advantage))
    return made


class ReferenceContract:
    """A reference model that has been started."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference

    async def every_answer_token_gets_a_log_probability_in_the_order_of_samples(self) -> None:
        batch = samples()
        together = await self.reference.logprobs(batch)
        assert [value_T.shape for value_T in together] == [sample.answer_T.shape for sample in batch]
        assert all(value_T.dtype == np.float32 and (value_T <= 0).all() for value_T in together)
        for sample, value_T in zip(batch, together, strict=True):
            (alone,) = await self.reference.logprobs([sample])
            check_close(alone, value_T)

    async def rewards_and_advantages_are_not_read(self) -> None:
        batch = samples()
        others = [
            replace(
                one,
                reward=np.nan,
                advantage=np.nan,
                segments=tuple(replace(part, logprobs=-part.logprobs) for part in one.segments),
            )
            for one in batch
        ]
        first, second = await self.reference.logprobs(batch), await self.reference.logprobs(others)
        assert (np.concatenate(first) == np.concatenate(second)).all()

    async def one_that_was_shut_down_is_lost_until_it_is_started_again(self) -> None:
        before = await self.reference.logprobs(samples())
        await self.reference.shutdown()
        await self.reference.shutdown()
        with raises(ReferenceLostError, begins="reference model lost: "):
            await self.reference.logprobs(samples())
        await self.reference.start()
        assert np.concatenate(await self.reference.logprobs(samples())).tolist() == np.concatenate(before).tolist()


class TrainerContract:
    """A started trainer of ``BATCH`` sequences a step; ``read`` returns the checksums of published weights."""

    def __init__(self, trainer: Trainer, read: Callable[[Weights], dict[str, str]], folder: Path) -> None:
        self.trainer, self.read, self.folder = trainer, read, folder
        self.version = 0
        self.saved: list[int] = []

    async def _train(self, batch: list[Sample], *, completes_step: bool) -> TrainResult:
        self.version += completes_step
        return await self.trainer.train(batch, completes_step=completes_step)

    async def _publish(self) -> Weights:
        return await self.trainer.publish(self.version)

    async def _save(self) -> int:
        self.saved.append(self.version)
        number = len(self.saved) - 1
        await self.trainer.snapshot()
        await self.trainer.save(self.folder / f"saved-{number}")
        return number

    async def _load(self, number: int) -> None:
        await self.trainer.load(self.folder / f"saved-{number}")
        self.version = self.saved[number]

    async def _step(self, seed: int = 0, *, cuts: tuple[int, ...] = ()) -> tuple[list[Any], dict[str, float]]:
        batch, logprobs, metrics, loss = samples(seed), [], {}, 0.0
        for start, end in zip((0, *cuts), (*cuts, BATCH), strict=True):
            result = await self._train(batch[start:end], completes_step=end == BATCH)
            logprobs += result.logprob_T
            metrics = result.metrics
            loss += metrics["loss"]
        return logprobs, metrics | {"loss": loss}

    # ----------------------------------------------------------------------------- training

    async def every_sample_gets_its_log_probabilities_in_order(self) -> None:
        half = samples()[: BATCH // 2]
        first = await self._train(half, completes_step=False)
        reverse = await self._train(half[::-1], completes_step=True)
        for sample, logprob_T, again_T in zip(half, first.logprob_T, reverse.logprob_T[::-1], strict=True):
            assert len(logprob_T) == len(again_T) == len(sample.answer_T)
            assert np.isfinite(logprob_T).all()
            assert (logprob_T <= 0).all()
            check_close(again_T, logprob_T)

    async def only_the_micro_batch_that_completes_a_step_reports_the_step(self) -> None:
        batch = samples()
        first = (await self._train(batch[:3], completes_step=False)).metrics
        last = (await self._train(batch[3:], completes_step=True)).metrics
        assert "loss" in first
        assert not {"gradient_norm", "learning_rate"} & first.keys()
        assert {"loss", "gradient_norm", "learning_rate"} <= last.keys()
        assert np.isfinite([*first.values(), *last.values()]).all()

    async def a_step_changes_log_probabilities(self) -> None:
        before, _ = await self._step()
        after, _ = await self._step()
        assert np.abs(np.concatenate(after) - np.concatenate(before)).max() > 10 * ROUNDING

    async def micro_batches_add_up_to_the_batch(self) -> None:
        saved = await self._save()
        whole, whole_metrics = await self._step(1)
        whole_after, _ = await self._step(2)
        await self._load(saved)
        cut, cut_metrics = await self._step(1, cuts=(4,))
        cut_after, _ = await self._step(2, cuts=(1, 6))
        check_close(np.concatenate(cut), np.concatenate(whole))
        check_close(np.concatenate(cut_after), np.concatenate(whole_after))
        check_metrics(cut_metrics, whole_metrics, rel=1e-4)

    async def what_was_observed_last_is_not_trained_on(self) -> None:
        """Of the last token of a sequence only the label could matter."""
        saved = await self._save()
        checksums = []
        for last in (3, 7):
            end = Segment.observed(np.array([5, last]))
            batch = [replace(one, segments=(*one.segments, end)) for one in samples()]
            await self._train(batch, completes_step=True)
            checksums.append((await self._publish()).checksums)
            await self._load(saved)
        assert checksums[0] == checksums[1] != (await self._publish()).checksums

    # ---------------------------------------------------------------------------- publishing

    async def published_weights_carry_their_version_and_change_with_a_step_only(self) -> None:
        first = await self._publish()
        await self.trainer.send(first)
        assert first.version == self.version
        assert first.checksums
        assert self.read(first) == first.checksums
        await self._train(samples()[:3], completes_step=False)
        assert (await self._publish()).checksums == first.checksums
        await self._train(samples()[3:], completes_step=True)
        second = await self._publish()
        assert (second.version, second.checksums.keys()) == (first.version + 1, first.checksums.keys())
        assert second.checksums != first.checksums

    async def published_weights_stay_as_they_are_until_the_next(self) -> None:
        weights = await self._publish()
        await self._step()
        assert self.read(weights) == weights.checksums
        assert (await self._publish()).checksums != weights.checksums

    # --------------------------------------------------------------------------------- files

    async def a_saved_trainer_goes_on_as_it_would_have(self) -> None:
        await self._step()
        before = await self._publish()
        saved = await self._save()
        _, metrics = await self._step(1)
        after = await self._publish()
        await self._load(saved)
        assert (await self._publish()).checksums == before.checksums
        _, again = await self._step(1)
        check_metrics(again, metrics, rel=1e-6)
        assert (await self._publish()).checksums == after.checksums

    async def what_is_saved_is_what_was_copied_whatever_is_trained_meanwhile(self) -> None:
        await self._step()
        copied = await self._publish()
        await self.trainer.snapshot()
        await asyncio.gather(self.trainer.save(self.folder / "meanwhile"), self._step(1))
        assert (await self._publish()).checksums != copied.checksums
        await self.trainer.load(self.folder / "meanwhile")
        self.version = copied.version
        assert (await self._publish()).checksums == copied.checksums

    async def an_export_writes_files_and_changes_nothing(self) -> None:
        before = await self._publish()
        folder = self.folder / "export"
        await self.trainer.export(folder)
        assert any(file.stat().st_size for file in folder.iterdir())
        assert (await self._publish()).checksums == before.checksums

    # ---------------------------------------------------------------------------------- life

    async def memory_given_up_comes_back_as_it_was(self) -> None:
        before = await self._publish()
        await self.trainer.offload()
        await self.trainer.reload()
        assert (await self._publish()).checksums == before.checksums
        await self._step()

    async def a_new_start_after_shutdown_is_at_version_0_until_something_is_loaded(self) -> None:
        await self._step()
        trained = await self._publish()
        saved = await self._save()
        await self.trainer.shutdown()
        await self.trainer.shutdown()
        await self.trainer.start()
        self.version = 0
        fresh = await self._publish()
        assert fresh.checksums != trained.checksums
        await self._load(saved)
        assert (await self._publish()).checksums == trained.checksums


async def a_published_version_is_what_an_engine_samples_with(engine: EngineContract, trainer: TrainerContract) -> None:
    """Train on answers generated after the trainer's last step: all importance weights are 1."""
    for _ in range(2):
        await trainer._step(5)
    weights = await trainer._publish()
    engine.version = trainer.version
    await trainer.trainer.send(weights)
    await engine.engine.update(weights, WeightUpdate.KEEP)
    assert await engine.engine.checksums() == weights.checksums
    answers = await asyncio.gather(*(engine.engine.generate(request(number, 20)) for number in range(BATCH)))
    batch = [
        Sample(
            number,
            np.array(PROMPT),
            (Segment.generated(answer.tokens_T, answer.logprob_T),),
            reward=1.0,
            advantage=1.0,
        )
        for number, answer in enumerate(answers)
    ]
    result = await trainer._train(batch, completes_step=True)
    check_close(np.concatenate(result.logprob_T), np.concatenate([answer.logprob_T for answer in answers]))
