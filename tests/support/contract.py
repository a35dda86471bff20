"""What every engine, reference model and trainer keeps to, fake or real: the promises of ``interface.py`` as checks.

``test_contract.py`` runs them. Each public coroutine is one promise. They share one of each, may run in any order, and
leave them as they can be used by the next.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.interface import (
    Engine,
    Generated,
    GenerateRequest,
    Reference,
    Sample,
    Trainer,
    TrainResult,
    UpdateTimes,
    Weights,
)
from pipelinerl.errors import BackendError, EngineLostError, ReferenceLostError
from pipelinerl.rl.segments import Segment
from pipelinerl.scheduler.events import VersionSpans, WeightUpdate

PROMPT = (3, 13, 4, 11)
BATCH = 8
"""Sequences per optimizer step (count)."""
ROUNDING = 1e-5
"""Largest difference of a log-probability that is computed in another order (nats)."""


def promises(contract: type) -> list[str]:
    """Return the names of a contract's promises, in order."""
    return [name for name, value in vars(contract).items() if inspect.iscoroutinefunction(value) and name[0] != "_"]


def request(rollout_id: int, num_tokens: int, *, seed: int | None = None, temperature: float = 1.0) -> GenerateRequest:
    seed = rollout_id if seed is None else seed
    return GenerateRequest(rollout_id, PROMPT, num_tokens, seed=seed, temperature=temperature)


def check(generated: Generated, asked: int, *, aborted: bool = False) -> None:
    """Check what is true of every answer of an engine whose model never ends one by itself."""
    num_tokens = len(generated.tokens_T)
    assert 0 <= num_tokens < asked if aborted else num_tokens == asked
    assert generated.aborted is aborted
    assert len(generated.logprob_T) == generated.spans.num_tokens == num_tokens
    assert np.isfinite(generated.logprob_T).all()
    assert (generated.logprob_T <= 0).all()
    versions, ends = generated.spans.versions, generated.spans.ends
    assert len(versions) == len(ends)
    assert (np.diff(versions) > 0).all()
    assert (np.diff((0, *ends)) > 0).all()


class EngineContract:
    """An engine that has been started, has ``num_slots`` slots, and a model that never ends an answer by itself.

    Args:
        engine: The engine.
        weights_of: Makes the weights of a version.
        num_slots: Sequences in progress, at most (count); at least 5.
    """

    def __init__(self, engine: Engine, weights_of: Callable[[int], Weights], *, num_slots: int) -> None:
        self.engine, self.weights_of, self.num_slots = engine, weights_of, num_slots
        self.version = 0

    async def _update(self, kind: WeightUpdate) -> UpdateTimes:
        """Load the next version."""
        self.version += 1
        return await self.engine.update(self.weights_of(self.version), kind)

    async def _in_progress(self, num_tokens: int) -> list[asyncio.Task[Generated]]:
        """Return four requests that have some tokens by now, and need many more."""
        tasks = [asyncio.create_task(self.engine.generate(request(number, num_tokens))) for number in range(4)]
        await self.engine.generate(request(100, 20))
        assert [task.result() for task in tasks if task.done()] == []
        return tasks

    # ------------------------------------------------------------------------------ answers

    async def an_answer_has_a_log_probability_and_a_version_for_every_token(self) -> None:
        generated = await self.engine.generate(request(0, 30))
        check(generated, 30)
        assert generated.spans == VersionSpans((self.version,), (30,))
        check(await self.engine.generate(request(0, 1)), 1)

    async def the_same_seed_gives_the_same_tokens_alone_and_in_company(self) -> None:
        alone = [await self.engine.generate(request(number, 20)) for number in range(4)]
        together = await asyncio.gather(*(self.engine.generate(request(7 - number, 20)) for number in range(8)))
        for one, other in zip(alone, together[:3:-1], strict=True):
            assert one.tokens_T.tolist() == other.tokens_T.tolist()
            assert one.logprob_T == pytest.approx(other.logprob_T, abs=ROUNDING)
        assert len({tuple(generated.tokens_T) for generated in together}) > 1

    async def at_temperature_0_the_seed_does_not_matter(self) -> None:
        answers = [await self.engine.generate(request(0, 10, seed=seed, temperature=0.0)) for seed in range(3)]
        assert len({tuple(generated.tokens_T) for generated in answers}) == 1

    async def more_requests_than_slots_all_come_back(self) -> None:
        lengths = [1 + number % 7 for number in range(5 * self.num_slots)]
        requests = [request(number, length) for number, length in enumerate(lengths)]
        for generated, length in zip(await asyncio.gather(*map(self.engine.generate, requests)), lengths, strict=True):
            check(generated, length)

    async def a_second_request_of_a_rollout_in_progress_is_refused(self) -> None:
        first = asyncio.create_task(self.engine.generate(request(0, 50)))
        await asyncio.sleep(0)
        with pytest.raises(BackendError) as refused:
            await self.engine.generate(request(0, 5))
        assert not isinstance(refused.value, EngineLostError)
        check(await first, 50)
        check(await self.engine.generate(request(0, 5)), 5)

    # --------------------------------------------------------------------------- early ends

    async def an_abort_returns_what_is_there(self) -> None:
        at_once = asyncio.create_task(self.engine.generate(request(50, 300)))
        await asyncio.sleep(0)
        await self.engine.abort(50)
        tasks = await self._in_progress(200)
        await self.engine.abort(1)
        await self.engine.abort(1)
        check(await at_once, 300, aborted=True)
        aborted = await tasks.pop(1)
        check(aborted, 200, aborted=True)
        assert len(aborted.tokens_T) > 1
        for task in tasks:
            check(await task, 200)

    async def an_abort_of_what_is_unknown_or_has_ended_has_no_effect(self) -> None:
        await self.engine.abort(1234)
        check(await self.engine.generate(request(1234, 5)), 5)
        await self.engine.abort(1234)
        check(await self.engine.generate(request(1234, 5)), 5)

    async def a_cancelled_call_leaves_nothing_behind(self) -> None:
        tasks = await self._in_progress(200)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)
        check(await self.engine.generate(request(0, 30)), 30)

    # ------------------------------------------------------------------------------ updates

    async def a_kept_sequence_goes_on_with_the_new_version(self) -> None:
        await self._goes_on_through_two_updates(WeightUpdate.KEEP)

    async def a_recomputed_sequence_goes_on_with_the_new_version(self) -> None:
        await self._goes_on_through_two_updates(WeightUpdate.RECOMPUTE)

    async def _goes_on_through_two_updates(self, kind: WeightUpdate) -> None:
        first = self.version
        tasks = await self._in_progress(200)
        times = [await self._update(kind)]
        check(await self.engine.generate(request(100, 20)), 20)
        times.append(await self._update(kind))
        for task in tasks:
            generated = await task
            check(generated, 200)
            assert generated.spans.versions == (first, first + 1, first + 2)
            assert generated.spans.ends[0] > 1
            assert generated.spans.ends[1] - generated.spans.ends[0] >= 10
        assert min(min(each.pause_s, each.transfer_s, each.resume_s) for each in times) >= 0

    async def an_aborting_update_returns_what_the_old_version_has_generated(self) -> None:
        tasks = await self._in_progress(200)
        times = await self._update(WeightUpdate.ABORT)
        assert min(times.pause_s, times.transfer_s, times.resume_s) >= 0
        for task in tasks:
            generated = await task
            check(generated, 200, aborted=True)
            assert generated.spans.versions == (self.version - 1,)
        assert (await self.engine.generate(request(0, 20))).spans == VersionSpans((self.version,), (20,))

    async def an_engine_says_what_it_has_loaded(self) -> None:
        await self._update(WeightUpdate.WAIT)
        assert await self.engine.checksums() == self.weights_of(self.version).checksums
        assert (await self.engine.generate(request(0, 20))).spans == VersionSpans((self.version,), (20,))

    async def new_weights_change_log_probabilities(self) -> None:
        before = await self.engine.generate(request(0, 1))
        await self._update(WeightUpdate.WAIT)
        assert abs((await self.engine.generate(request(0, 1))).logprob_T[0] - before.logprob_T[0]) > ROUNDING

    async def the_version_it_has_can_be_loaded_again(self) -> None:
        await self._update(WeightUpdate.KEEP)
        tasks = await self._in_progress(100)
        await self.engine.update(self.weights_of(self.version), WeightUpdate.KEEP)
        for task in tasks:
            assert (await task).spans == VersionSpans((self.version,), (100,))

    async def a_request_during_an_update_is_answered(self) -> None:
        for kind in WeightUpdate:
            updating = asyncio.create_task(self._update(kind))
            requests: list[asyncio.Task[Generated]] = []
            while not updating.done():
                if len(requests) < 5 * self.num_slots:
                    requests.append(asyncio.create_task(self.engine.generate(request(len(requests), 5))))
                await asyncio.sleep(0.002)
            await updating
            for generated in await asyncio.gather(*requests):
                check(generated, 5, aborted=generated.aborted)
                assert kind is WeightUpdate.ABORT or not generated.aborted
            assert (await self.engine.generate(request(0, 5))).spans.versions == (self.version,)

    async def updates_at_the_same_time_take_turns(self) -> None:
        first = self.version
        tasks = await self._in_progress(200)
        await asyncio.gather(self._update(WeightUpdate.KEEP), self._update(WeightUpdate.KEEP))
        for task in tasks:
            versions = (await task).spans.versions
            assert (versions[0], versions[-1]) == (first, first + 2)
        assert await self.engine.checksums() == self.weights_of(self.version).checksums

    # --------------------------------------------------------------------------------- life

    async def an_engine_that_has_slept_generates_as_before(self) -> None:
        before = await self.engine.generate(request(0, 10))
        await self.engine.sleep()
        await self.engine.wake()
        after = await self.engine.generate(request(0, 10))
        assert (after.tokens_T.tolist(), after.spans) == (before.tokens_T.tolist(), before.spans)

    async def what_is_in_progress_at_shutdown_is_lost_and_a_new_start_is_at_version_0(self) -> None:
        tasks = await self._in_progress(200)
        await self.engine.shutdown()
        ends: list[Any] = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [EngineLostError] * 4, ends
        await self.engine.shutdown()
        with pytest.raises(EngineLostError):
            await self.engine.generate(request(0, 5))
        with pytest.raises(EngineLostError):
            await self.engine.update(self.weights_of(1), WeightUpdate.KEEP)
        await self.engine.start()
        self.version = 0
        assert await self.engine.checksums() == {}
        assert (await self.engine.generate(request(0, 20))).spans == VersionSpans((0,), (20,))


def samples(seed: int = 0) -> list[Sample]:
    """Return a batch; no two answers have the same length."""
    rng = np.random.default_rng(seed)
    return [
        Sample(
            rollout_id=index,
            prompt_P=rng.integers(2, 16, int(rng.integers(2, 11))),
            segments=(
                Segment.generated(
                    rng.integers(2, 16, num_tokens),
                    (-4.2 + 0.3 * rng.standard_normal(num_tokens)).astype(np.float32),
                ),
            ),
            reward=float(rng.random()),
            advantage=float(rng.standard_normal()),
        )
        for index, num_tokens in enumerate(int(number) for number in 1 + rng.permutation(3 * BATCH)[:BATCH])
    ]


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
            assert alone == pytest.approx(value_T, abs=ROUNDING)

    async def rewards_and_advantages_are_not_read(self) -> None:
        batch = samples()
        others = [
            replace(
                one,
                reward=np.nan,
                advantage=np.nan,
                segments=(Segment.generated(one.answer_T, -one.behaviour_logprob_T),),
            )
            for one in batch
        ]
        first, second = await self.reference.logprobs(batch), await self.reference.logprobs(others)
        assert (np.concatenate(first) == np.concatenate(second)).all()

    async def one_that_was_shut_down_is_lost_until_it_is_started_again(self) -> None:
        before = await self.reference.logprobs(samples())
        await self.reference.shutdown()
        await self.reference.shutdown()
        with pytest.raises(ReferenceLostError, match="reference model lost: "):
            await self.reference.logprobs(samples())
        await self.reference.start()
        assert np.concatenate(await self.reference.logprobs(samples())).tolist() == np.concatenate(before).tolist()


class TrainerContract:
    """A trainer that has been started, with ``BATCH`` sequences per optimizer step.

    Args:
        trainer: The trainer.
        read: Returns the checksums of published weights as they are now.
        folder: Where to write.
    """

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
        await self.trainer.save(self.folder / f"saved-{number}")
        return number

    async def _load(self, number: int) -> None:
        await self.trainer.load(self.folder / f"saved-{number}")
        self.version = self.saved[number]

    async def _step(self, seed: int = 0, *, cuts: tuple[int, ...] = ()) -> tuple[list[Any], dict[str, float]]:
        """Make an optimizer step, cut into micro-batches; return log-probabilities and metrics, added up."""
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
            assert again_T == pytest.approx(logprob_T, abs=ROUNDING)

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
        assert np.concatenate(cut) == pytest.approx(np.concatenate(whole), abs=ROUNDING)
        assert np.concatenate(cut_after) == pytest.approx(np.concatenate(whole_after), abs=ROUNDING)
        assert cut_metrics == pytest.approx(whole_metrics, rel=1e-4)

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
        assert again == pytest.approx(metrics, rel=1e-6)
        assert (await self._publish()).checksums == after.checksums

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
    """Train on what the engine has generated after the trainer's last step: all importance weights are 1."""
    for _ in range(2):
        await trainer._step(5)
    weights = await trainer._publish()
    engine.version = trainer.version
    await asyncio.gather(engine.engine.update(weights, WeightUpdate.KEEP), trainer.trainer.send(weights))
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
    assert np.concatenate(result.logprob_T) == pytest.approx(
        np.concatenate([answer.logprob_T for answer in answers]), abs=ROUNDING
    )
