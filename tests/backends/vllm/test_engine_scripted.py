"""The vLLM engine without processes: version spans, refused models, updates of a scripted vLLM that fails or hangs."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import virtual_clock
from vllm_engine import real, settings

import backends.vllm.engine
from backends.interface import STREAM_TOKENS, Generated, GenerateRequest, Weights
from backends.vllm.engine import VLLMEngine
from backends.vllm.version.client import Client, version_spans
from pipelinerl.errors import BackendError, EngineLostError, TransferError, WeightsRefusedError
from pipelinerl.hardware.transport import BROADCAST
from pipelinerl.scheduler.events import VersionSpans, WeightUpdate


def reported(*spans: tuple[str, int, int]) -> list[Any]:
    return [SimpleNamespace(version=version, start=start, end=end) for version, start, end in spans]


@pytest.mark.parametrize(
    ("spans", "versions", "ends"),
    [
        ((("default", 0, 182), ("1", 182, 290), ("12", 290, 400)), (0, 1, 12), (182, 290, 400)),
        ((), (), ()),
        ((("default", 0, 0), ("1", 0, 3), ("1", 3, 5), ("2", 5, 5)), (1,), (5,)),  # empty ones; equal neighbours
    ],
)
def test_spans_are_the_engines_with_its_first_label_as_version_0(
    spans: Any, versions: tuple[int, ...], ends: tuple[int, ...]
) -> None:
    assert version_spans(reported(*spans), max(ends, default=0)) == VersionSpans(versions, ends)


def test_spans_that_do_not_cover_the_tokens_are_refused() -> None:
    with pytest.raises(BackendError, match="version spans end at token 3, but 4 tokens were generated"):
        version_spans(reported(("1", 0, 3)), 4)


def answering(name: str, tokens: int, label: str, before: Any = None) -> Any:
    """vLLM's state of a request with a prompt of 5 tokens, ``tokens`` more of which carry ``label`` than ``before``."""
    number = 0 if before is None else before.detokenizer.num
    spans = [] if before is None else before._weight_version_spans()
    flat = SimpleNamespace(
        token_ids=list(range(number + tokens)), logprobs=[-1.0 - one for one in range(number + tokens)]
    )
    chunks = [] if before is None else before.routed_experts_chunks
    rows = tokens + (4 if before is None else 0)  # of the prompt, too; not of the last token
    return SimpleNamespace(
        external_req_id=name,
        prompt_len=5,
        detokenizer=SimpleNamespace(output_token_ids=flat.token_ids, num=number + tokens),
        logprobs_processor=SimpleNamespace(logprobs=flat),
        _weight_version_spans=lambda: [*spans, *reported((label, number, number + tokens))],
        routed_experts_chunks=[*chunks, np.full((rows, 1, 1), int(label), np.int16)],
    )


def test_reports_of_an_answer_are_together_what_it_is_so_far() -> None:
    """The second of two requests ends after the first report: the engine forgets it, and reports it no more."""
    states = {"0-a": answering("0", 3, "1"), "1-b": answering("1", 2, "1")}
    processor = SimpleNamespace(request_states=states, process_outputs=lambda *_: None)
    client = Client(SimpleNamespace(output_processor=processor))

    async def reports() -> Any:
        yield await client.report(0.0)
        assert await client.report(0.0) == {}
        states["0-a"] = answering("0", 4, "2", states["0-a"])
        del states["1-b"]
        yield await client.report(0.0)

    async def both() -> Any:
        return [one async for one in reports()]

    first, second = asyncio.run(both())
    assert (first.keys(), second.keys()) == ({(0, 5), (1, 5)}, {(0, 5)})
    whole, joined = client.so_far(0), Generated.so_far([first[0, 5], second[0, 5]])
    assert whole is not None
    assert whole.spans == joined.spans == VersionSpans((1, 2), (3, 7))
    assert joined.tokens_T.tolist() == whole.tokens_T.tolist() == list(range(7))
    assert joined.logprob_T.tolist() == whole.logprob_T.tolist() == [-1.0 - one for one in range(7)]
    for one in (joined, whole):
        assert one.routed_NLK is not None
        assert one.routed_NLK.ravel().tolist() == [1] * 7 + [2] * 4
    assert client.so_far(1) is None


@pytest.mark.parametrize("stream_tokens", [3, STREAM_TOKENS])
def test_a_report_is_due_after_so_many_decode_steps_whatever_the_parts_of_their_outputs(stream_tokens: int) -> None:
    processor = SimpleNamespace(request_states={}, process_outputs=lambda *_: None)
    client = Client(SimpleNamespace(output_processor=processor), stream_tokens=stream_tokens)

    async def steps_until_due() -> int:
        due, num_steps = asyncio.create_task(client.report(600.0)), 0
        await asyncio.sleep(0)
        while not due.done():
            num_steps += 1
            for _ in range(2):
                processor.process_outputs([], float(num_steps))
            await asyncio.sleep(0.001)
        return num_steps

    assert asyncio.run(steps_until_due()) == stream_tokens


def engine_with(client: Any, **changed: Any) -> VLLMEngine:
    engine = VLLMEngine(settings(Path("model"), **changed))
    engine._vllm = client
    return engine


class Salted:
    """Stands in for the client of vLLM: notes the salt of every request, and its shutdown."""

    died, last_output_s = False, 0.0

    def __init__(self) -> None:
        self.salts: list[str] = []
        self.ended = False

    async def generate(self, request: GenerateRequest, *, salt: str) -> Generated:
        self.salts.append(salt)
        return Generated(np.zeros(0, np.int64), np.zeros(0, np.float32), VersionSpans((), ()), aborted=False)

    def end_calls(self) -> None:
        pass

    def shutdown(self) -> None:
        self.ended = True

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any) -> None:
            """Pause, receive, load, resume."""

        return call


def test_a_turn_finds_the_cache_of_the_turns_before_until_new_weights_come() -> None:
    """Keys and values are shared by salt: the same for all turns between two updates, and never used again."""
    client: Any = Salted()

    async def scenario() -> None:
        engine = engine_with(client)
        for version in (1, 2, 2):  # the last one is loaded again, as after a restart of the trainer
            for turn in (1, 2):
                await engine.generate(GenerateRequest(0, (3,) * turn, 1, seed=0, temperature=1.0))
            await engine.update(Weights(version, "file:/weights"), WeightUpdate.KEEP)

    asyncio.run(scenario())
    assert [client.salts[0] == client.salts[1], client.salts[2] == client.salts[3]] == [True, True]
    assert len(set(client.salts)) == 3


def test_a_hang_is_time_in_which_the_engine_could_have_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the time before it has work, nor time in which the listening process itself stood still."""
    monkeypatch.setattr(backends.vllm.engine, "WATCH_PERIOD_S", 0.02)
    client: Any = Salted()

    async def scenario() -> None:
        engine = engine_with(client, generate_timeout_s=0.3)
        watching = asyncio.create_task(engine._watch(client))
        await asyncio.sleep(0.5)  # without work
        engine._running[1] = asyncio.Event()
        for _ in range(2):
            time.sleep(0.5)  # this process stands still, and the engine's output waits for it
            await asyncio.sleep(0.03)
            assert not watching.done()
            client.last_output_s += 1.0
        await watching  # from now on there is no output
        with pytest.raises(EngineLostError, match=r"no decode step for 0.3 s, 1 requests in progress"):
            engine._alive()

    asyncio.run(asyncio.wait_for(scenario(), 600))


def test_an_engine_that_ends_well_leaves_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are looked up while its processes live, which vLLM's own shutdown ends, and removed after that."""
    client, removed, module = Salted(), list[tuple[bool, set[str]]](), backends.vllm.engine
    monkeypatch.setattr(module, "start_client", lambda *_: client)
    monkeypatch.setattr(module, "shared_memory_of", lambda _: set() if client.ended else {"/dev/shm/psm_1"})
    monkeypatch.setattr(module, "remove_shared_memory", lambda paths: removed.append((client.ended, paths)))

    async def scenario() -> None:
        engine = VLLMEngine(settings(Path("model")))
        await engine.start()
        assert await engine.shared_memory() == {"/dev/shm/psm_1"}
        await engine.shutdown()

    asyncio.run(scenario())
    assert removed == [(True, {"/dev/shm/psm_1"})]


class ScriptedLLM:
    """Stands in for vLLM's client: notes the calls of an update; some fail or hang."""

    def __init__(
        self, *, fail: tuple[str, ...] = (), hang: str = "", label: str = "7", text: str = "Call to {} failed"
    ) -> None:
        self.calls: list[str] = []
        self._fail, self._hang, self._label, self._text = list(fail), hang, label, text
        self.output_processor = SimpleNamespace(
            propagate_error=lambda error: self.calls.append("propagate"), process_outputs=lambda: None
        )

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            if name == self._hang:
                await asyncio.Event().wait()
            if name in self._fail:
                self._fail.remove(name)
                raise Exception(self._text.format(name))
            return {"is_paused": True, "get_weight_version": self._label}.get(name)

        return call


def update_scripted(llm: ScriptedLLM) -> None:
    engine = engine_with(Client(llm), update_timeout_s=60.0)
    virtual_clock.run(engine.update(Weights(7, "file:/weights"), WeightUpdate.KEEP))


@real
def test_a_transfer_that_fails_is_tried_once_more_before_anything_is_loaded() -> None:
    llm = ScriptedLLM(fail=("update_weights",))
    update_scripted(llm)
    transfer = ["start_weight_update", "update_weights"]
    loading = ["finish_weight_update", "get_weight_version", "resume_generation"]
    assert llm.calls == ["pause_generation", "is_paused", *transfer, *transfer, *loading]


@real
@pytest.mark.parametrize("workers", [1, 2])
def test_an_engine_whose_file_is_damaged_goes_on_unless_its_workers_may_differ(workers: int) -> None:
    """vLLM leaves the answers of the other workers of a call that failed to the next call."""
    llm = ScriptedLLM(fail=("update_weights",) * (2 if workers == 1 else 1))

    async def scenario() -> None:
        engine = engine_with(Client(llm), update_timeout_s=60.0, tensor_parallel=workers)
        with pytest.raises(TransferError, match=r"^engine 2: Call to update_weights failed$"):
            await engine.update(Weights(7, "file:/weights"), WeightUpdate.KEEP)
        if workers == 1:
            await engine.update(Weights(7, "file:/weights"), WeightUpdate.KEEP)
        else:
            with pytest.raises(EngineLostError, match=r"^engine 2: Call to update_weights failed; start the engine"):
                await engine.update(Weights(7, "file:/weights"), WeightUpdate.KEEP)

    virtual_clock.run(scenario())
    pause, transfer = ["pause_generation", "is_paused"], ["start_weight_update", "update_weights"]
    loading = ["finish_weight_update", "get_weight_version", "resume_generation"]
    alone = [*pause, *transfer, *transfer, "resume_generation", *pause, *transfer, *loading]
    assert llm.calls == (alone if workers == 1 else [*pause, *transfer, "propagate"])


@real
def test_a_broadcast_that_is_refused_twice_costs_the_engine() -> None:
    llm = ScriptedLLM(fail=("update_weights", "update_weights"))
    engine = engine_with(Client(llm), update_timeout_s=60.0, transport=BROADCAST)
    with pytest.raises(EngineLostError, match=r"phase=transfer engine=2 .* Call to update_weights failed"):
        virtual_clock.run(engine.update(Weights(7, "broadcast:7"), WeightUpdate.KEEP))
    assert "resume_generation" not in llm.calls


@real
@pytest.mark.parametrize(("what", "hangs"), [("sleep", "sleep"), ("wake", "wake_up")])
def test_an_engine_that_hangs_while_it_changes_turns_is_lost(what: str, hangs: str) -> None:
    engine = engine_with(Client(ScriptedLLM(hang=hangs)), update_timeout_s=60.0, colocated=True)
    with pytest.raises(EngineLostError, match=rf"{what} failed: engine=2 after \d+\.\d s; no answer for 60 s; start"):
        virtual_clock.run(getattr(engine, what)())


@real
def test_weights_of_another_model_are_not_tried_again() -> None:
    text = "Call to update_weights failed: weights in /x lack 1 of 27 parameters: lm_head.weight"
    llm = ScriptedLLM(fail=("update_weights",), text=text)
    with pytest.raises(WeightsRefusedError, match=f"weight update failed: phase=transfer engine=2 .*; {text}; start"):
        update_scripted(llm)
    assert llm.calls == ["pause_generation", "is_paused", "start_weight_update", "update_weights", "propagate"]


@real
@pytest.mark.parametrize(
    ("llm", "text"),
    [
        (ScriptedLLM(fail=("finish_weight_update",)), "phase=transfer engine=2 .* Call to finish_weight_update failed"),
        (ScriptedLLM(label="6"), "phase=transfer engine=2 .* the engine reports version 6"),
        (ScriptedLLM(hang="pause_generation"), r"phase=pause engine=2 version=7 after \d+\.\d s; no answer for 60 s; "),
        (
            ScriptedLLM(hang="update_weights"),
            r"phase=transfer engine=2 .* no answer for 60 s; start the engine again",
        ),
    ],
)
def test_an_update_that_fails_or_hangs_ends_in_a_loss_and_never_in_a_resume(llm: ScriptedLLM, text: str) -> None:
    with pytest.raises(EngineLostError, match=f"weight update failed: {text}"):
        update_scripted(llm)
    assert "resume_generation" not in llm.calls
    assert llm.calls[-1] == "propagate"
