"""The promises of ``interface.py`` as checks: parts that pass them are a backend.

Each public coroutine of ``EngineContract``, ``ReferenceContract`` and ``TrainerContract`` is one promise. The promises
of one contract share a started object, may run in any order, and leave it usable for the next. With pytest::

    @pytest.mark.parametrize("promise", promises(EngineContract))
    def test_an_engine_keeps_its_promises(contract, runner, promise):
        runner.run(asyncio.wait_for(getattr(contract, promise)(), 60))

``pytest.register_assert_rewrite("backends.contract")`` before the import makes failures show values.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from backends.interface import (
    AnswerLostError,
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
from pipelinerl.rl.segments import Segment, extended
from pipelinerl.scheduler.events import VersionSpans, WeightUpdate

Of = TypeVar("Of")

PROMPT = (3, 13, 4, 11)
BATCH = 8
ROUNDING = 1e-5
"""Largest difference of a log-probability that is computed in another order (nats)."""


def promises(contract: type) -> list[str]:
    """Return the names of a contract's promises, in order."""
    return [name for name, value in vars(contract).items() if inspect.iscoroutinefunction(value) and name[0] != "_"]


def check_close(actual: ArrayLike, expected: ArrayLike) -> None:
    """Check that log-probabilities are the same up to ``ROUNDING``."""
    one, other = np.asarray(actual, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    np.testing.assert_allclose(one, other, rtol=0, atol=ROUNDING, equal_nan=False)


FOLLOWING = ("loss", "kl_loss", "value_loss", "gradient_norm", "learning_rate")
"""Metrics that follow from weights and samples; the others are measured, or sums of their own."""


def check_metrics(actual: Mapping[str, float], expected: Mapping[str, float], *, rel: float) -> None:
    """Check that metrics have the same names and, those in ``FOLLOWING``, up to a share ``rel`` the same values."""
    assert actual.keys() == expected.keys()
    following = expected.keys() & set(FOLLOWING)
    one, other = (np.array([metrics[name] for name in following]) for metrics in (actual, expected))
    np.testing.assert_allclose(one, other, rtol=rel, atol=1e-12, equal_nan=False)


class OvertakenError(Exception):
    """The request under test ended before the promise could be observed."""


TRIES = 10


def tried_again(promise: Callable[[Of], Awaitable[None]]) -> Callable[[Of], Awaitable[None]]:
    """Have a promise tried again where it was overtaken: the machine is slow, or stands still for seconds."""

    @functools.wraps(promise)
    async def until_shown(contract: Of) -> None:
        for _ in range(TRIES):
            with suppress(OvertakenError):
                return await promise(contract)
        raise AssertionError(f"{promise.__name__}: answers were whole too early, {TRIES} times")

    return until_shown


@contextmanager
def raises(error: type[Exception], *, but_not: type[Exception] | None = None, begins: str = "") -> Iterator[None]:
    """Check that the block raises an error, none of the kind ``but_not``, with a text that begins so."""
    raised: Exception | None = None
    try:
        yield
    except error as expected:
        raised = expected
    assert raised is not None, f"{error.__name__} was not raised"
    assert but_not is None or not isinstance(raised, but_not), repr(raised)
    assert str(raised).startswith(begins), repr(raised)


def request(rollout_id: int, num_tokens: int, *, seed: int | None = None, temperature: float = 1.0) -> GenerateRequest:
    """Return a request for so many tokens; its seed is the rollout's number unless given."""
    seed = rollout_id if seed is None else seed
    return GenerateRequest(rollout_id, PROMPT, num_tokens, seed=seed, temperature=temperature)


def check(generated: Generated, asked: int, *, aborted: bool = False) -> None:
    """Check the invariants of answers, for a model that never ends one by itself."""
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


async def ends(tasks: list[asyncio.Task[Generated]], shows: Callable[[Generated], bool]) -> list[Generated]:
    """Return the answers; ``OvertakenError`` if a request ended before its promise could be observed."""
    answers = await asyncio.gather(*tasks)
    if not all(map(shows, answers)):
        raise OvertakenError
    return answers


class EngineContract:
    """A started engine with ``num_slots`` slots (at least 5) and a model that never ends an answer."""

    def __init__(self, engine: Engine, weights_of: Callable[[int], Weights], *, num_slots: int) -> None:
        self.engine, self.weights_of, self.num_slots = engine, weights_of, num_slots
        self.version = 0

    async def _update(self, kind: WeightUpdate) -> UpdateTimes:
        self.version += 1
        return await self.engine.update(self.weights_of(self.version), kind)

    async def _in_progress(self, num_tokens: int) -> list[asyncio.Task[Generated]]:
        """Return four requests that have some tokens by now, and need more; else ``OvertakenError``."""
        tasks = [asyncio.create_task(self.engine.generate(request(number, num_tokens))) for number in range(4)]
        await self.engine.generate(request(100, 20))
        if any(task.done() for task in tasks):
            await asyncio.gather(*tasks)
            raise OvertakenError
        return tasks

    # ------------------------------------------------------------------------------ answers

    async def an_answer_has_a_log_probability_and_a_version_for_every_token(self) -> None:
        generated = await self.engine.generate(request(0, 30))
        check(generated, 30)
        assert generated.spans == VersionSpans((self.version,), (30,))
        check(await self.engine.generate(request(0, 1)), 1)

    async def seconds_of_an_answer_are_some_of_those_that_it_took(self) -> None:
        begin_s = time.monotonic()
        if (seconds := (await self.engine.generate(request(0, 30))).seconds) is not None:
            assert seconds.decode > 0
            assert 0 <= seconds.prefill <= time.monotonic() - begin_s - seconds.decode

    async def the_same_seed_gives_the_same_tokens_alone_and_in_company(self) -> None:
        alone = [await self.engine.generate(request(number, 20)) for number in range(4)]
        together = await asyncio.gather(*(self.engine.generate(request(7 - number, 20)) for number in range(8)))
        for one, other in zip(alone, together[:3:-1], strict=True):
            assert one.tokens_T.tolist() == other.tokens_T.tolist()
            check_close(one.logprob_T, other.logprob_T)
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
        with raises(BackendError, but_not=EngineLostError):
            await self.engine.generate(request(0, 5))
        check(await first, 50)
        check(await self.engine.generate(request(0, 5)), 5)

    # --------------------------------------------------------------------------- early ends

    @tried_again
    async def an_abort_returns_what_is_there(self) -> None:
        at_once = asyncio.create_task(self.engine.generate(request(50, 300)))
        await asyncio.sleep(0)
        await self.engine.abort(50)
        (first,) = await ends([at_once], lambda answer: answer.aborted)
        tasks = await self._in_progress(200)
        await self.engine.abort(1)
        await self.engine.abort(1)
        check(first, 300, aborted=True)
        aborted = tasks.pop(1)
        for answer in await asyncio.gather(*tasks):
            check(answer, 200)
        (second,) = await ends([aborted], lambda answer: answer.aborted)
        check(second, 200, aborted=True)
        assert len(second.tokens_T) > 1

    async def an_abort_of_what_is_unknown_or_has_ended_has_no_effect(self) -> None:
        await self.engine.abort(1234)
        check(await self.engine.generate(request(1234, 5)), 5)
        await self.engine.abort(1234)
        check(await self.engine.generate(request(1234, 5)), 5)

    @tried_again
    async def a_cancelled_call_leaves_nothing_behind(self) -> None:
        tasks = await self._in_progress(200)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)
        check(await self.engine.generate(request(0, 30)), 30)

    # ------------------------------------------------------------------------------ updates

    @tried_again
    async def a_kept_or_recomputed_sequence_goes_on_with_the_new_version(self) -> None:
        for kind in (WeightUpdate.KEEP, WeightUpdate.RECOMPUTE):
            first = self.version
            tasks = await self._in_progress(200)
            times = [await self._update(kind)]
            check(await self.engine.generate(request(100, 20)), 20)
            times.append(await self._update(kind))
            for generated in await ends(tasks, lambda answer: self.version in answer.spans.versions):
                check(generated, 200)
                assert generated.spans.versions == (first, first + 1, first + 2)
                assert generated.spans.ends[0] > 1
                assert generated.spans.ends[1] - generated.spans.ends[0] >= 10
            assert min(min(each.pause_s, each.transfer_s, each.resume_s) for each in times) >= 0

    @tried_again
    async def an_aborting_update_returns_what_the_old_version_has_generated(self) -> None:
        tasks = await self._in_progress(200)
        times = await self._update(WeightUpdate.ABORT)
        assert min(times.pause_s, times.transfer_s, times.resume_s) >= 0
        for generated in await ends(tasks, lambda answer: answer.aborted):
            check(generated, 200, aborted=True)
            assert generated.spans.versions == (self.version - 1,)
        assert (await self.engine.generate(request(0, 20))).spans == VersionSpans((self.version,), (20,))

    async def an_engine_reports_what_it_has_loaded(self) -> None:
        await self._update(WeightUpdate.WAIT)
        assert await self.engine.checksums() == self.weights_of(self.version).checksums
        assert (await self.engine.generate(request(0, 20))).spans == VersionSpans((self.version,), (20,))

    async def new_weights_change_log_probabilities(self) -> None:
        before = await self.engine.generate(request(0, 1))
        await self._update(WeightUpdate.WAIT)
        assert abs((await self.engine.generate(request(0, 1))).logprob_T[0] - before.logprob_T[0]) > ROUNDING

    @tried_again
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

    @tried_again
    async def updates_at_the_same_time_take_turns(self) -> None:
        first = self.version
        tasks = await self._in_progress(200)
        await asyncio.gather(self._update(WeightUpdate.KEEP), self._update(WeightUpdate.KEEP))
        for answer in await ends(tasks, lambda answer: self.version in answer.spans.versions):
            versions = answer.spans.versions
            assert (versions[0], versions[-1]) == (first, first + 2)
        assert await self.engine.checksums() == self.weights_of(self.version).checksums

    # --------------------------------------------------------------------------------- life

    async def an_engine_that_has_slept_generates_as_before(self) -> None:
        before = await self.engine.generate(request(0, 10))
        await self.engine.sleep()
        await self.engine.wake()
        after = await self.engine.generate(request(0, 10))
        assert (after.tokens_T.tolist(), after.spans) == (before.tokens_T.tolist(), before.spans)

    @tried_again
    async def what_is_in_progress_at_shutdown_is_lost_but_for_what_was_reported(self) -> None:
        """A new start is at version 0. Reported tokens of version 0 are as an engine of version 0 has them."""
        await self.engine.shutdown()
        await self.engine.start()
        self.version = 0
        tasks = await self._in_progress(200)
        await self._update(WeightUpdate.KEEP)
        await self.engine.generate(request(100, 20))
        await self.engine.shutdown()
        each: list[Any] = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(end) for end in each} <= {AnswerLostError, EngineLostError, Generated}, each
        await self.engine.shutdown()
        with raises(EngineLostError):
            await self.engine.generate(request(0, 5))
        with raises(EngineLostError):
            await self.engine.update(self.weights_of(1), WeightUpdate.KEEP)
        await self.engine.start()
        self.version = 0
        assert await self.engine.checksums() == {}
        for number, end in enumerate(each):
            whole = await self.engine.generate(request(number, 200))
            assert whole.spans == VersionSpans((0,), (200,))
            if isinstance(end, AnswerLostError):
                check(end.known, 200, aborted=True)
                assert end.known.spans.versions in ((), (0,), (0, 1))
                first = slice(0, min(end.known.spans.ends, default=0))
                assert end.known.tokens_T[first].tolist() == whole.tokens_T[first].tolist()
                check_close(end.known.logprob_T[first], whole.logprob_T[first])
        if any(isinstance(end, Generated) for end in each):
            raise OvertakenError


# ---------------------------------------------- trainers and reference models, and an engine together with its trainer


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
