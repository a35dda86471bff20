"""The contract of every engine, and helpers of all contracts: plain asserts and numpy."""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from backends.interface import AnswerLostError, Engine, Generated, GenerateRequest, UpdateTimes, Weights
from pipelinerl.errors import BackendError, EngineLostError
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
        seconds = (await self.engine.generate(request(0, 30))).seconds
        if seconds is not None:
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
