"""A vLLM engine behind the promises of ``interface.Engine``.

Theory of operation. ``VLLMEngine`` lives in one process and on one event loop; vLLM's scheduler and its workers
are child processes. ``generate`` calls run side by side. ``update`` stops the scheduler between two decode
steps, so that no token is computed with weights of two versions, and starts it again only when all weights of
the new version are in place, and labelled: the version of each token is the label that the engine's own process
attaches to it. If that cannot be reached the engine stays stopped and counts as lost.

=================  =====================================  ==================================================
coroutine          waits for                              is unblocked by
=================  =====================================  ==================================================
``generate``       the last token                         vLLM; ``abort``; loss of the engine
``update``         its turn (one update at a time), then  the phase; ``update_timeout_s``; loss of the engine
                   one phase after the other
``_watch``         the end of vLLM's processes            every ``WATCH_PERIOD_S``; it then declares the loss,
                                                          which ends all others (a call into a dead vLLM
                                                          would never return)
=================  =====================================  ==================================================

The prefix cache is off: after an update it would hand out keys and values of old weights.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Awaitable, Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from backends.busy import busy_s
from backends.interface import TRANSFER_ATTEMPTS, Generated, GenerateRequest, UpdateTimes, Weights
from backends.vllm.process import (
    VLLMSettings,
    check_model,
    end_processes,
    make_llm,
    process_tree,
    remove_shared_memory,
    shared_memory_of,
)
from pipelinerl.errors import BackendError, ConfigError, EngineLostError
from pipelinerl.scheduler.events import VersionSpans, WeightUpdate
from pipelinerl.util.user_code import kind_and_line

T = TypeVar("T")

WATCH_PERIOD_S = 0.2
"""Seconds between two looks at whether vLLM's processes live."""


class VLLMEngine:
    """One inference engine, at most one update at a time. Use it from one event loop only."""

    def __init__(self, settings: VLLMSettings) -> None:
        self._settings = settings
        self._llm: Any = None
        self._processes: list[Any] = []
        self._before: set[multiprocessing.process.BaseProcess] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._loss: str | None = None
        self._lost = asyncio.Event()
        self._updating = asyncio.Lock()
        self._running: dict[int, asyncio.Event] = {}
        self._checksums: dict[str, str] = {}
        self._outputs_s = 0.0  # busy with the outputs of decode steps

    # ------------------------------------------------------------------------------------ life

    async def start(self) -> None:
        """Load the model and generate one token, so that what is compiled on first use is compiled.

        Raises:
            ConfigError: If vLLM is not installed, or the model cannot be updated on this device.
            EngineLostError: If the engine cannot be started, or not in ``start_timeout_s``.
        """
        settings = self._settings
        check_model(settings)
        self._loss, self._lost, self._checksums = None, asyncio.Event(), {}
        began = time.perf_counter()
        self._before = set(multiprocessing.active_children())
        try:
            async with asyncio.timeout(settings.start_timeout_s):
                await asyncio.to_thread(self._launch)
                self._processes = process_tree(self._before)
                self._watcher = asyncio.create_task(self._watch())
                warm_up = GenerateRequest(-1, prompt_tokens=(0,), max_new_tokens=1, seed=0, temperature=1.0)
                await self.generate(warm_up)
        except BaseException as error:
            seconds = time.perf_counter() - began
            await self.shutdown()
            if isinstance(error, ConfigError) or not isinstance(error, Exception):
                raise
            cause = "no answer" if isinstance(error, TimeoutError) else kind_and_line(error)
            raise EngineLostError(
                f"engine start failed: engine={settings.engine_id} after {seconds:.1f} s; {cause}; see vLLM's output"
            ) from error

    def _launch(self) -> None:
        # Returns nothing: imports of optional packages that failed in here keep this thread's frames for ever.
        self._llm = make_llm(self._settings)
        outputs = self._llm.output_processor
        process = outputs.process_outputs

        def timed(*arguments: Any, **keywords: Any) -> Any:
            begin_s = busy_s()
            processed = process(*arguments, **keywords)
            self._outputs_s += busy_s() - begin_s
            return processed

        outputs.process_outputs = timed

    async def shutdown(self) -> None:
        """End all processes, and with them what is in progress; a second call does nothing."""
        self._lose(f"engine lost: engine={self._settings.engine_id} has been shut down")
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown()
        before, self._before = self._before, None
        if before is None:
            return
        processes, self._processes = self._processes or process_tree(before), []
        shared = await asyncio.to_thread(shared_memory_of, processes)
        await asyncio.to_thread(end_processes, processes)
        remove_shared_memory(shared)

    async def shared_memory(self) -> set[str]:
        """Return the files of shared memory that would be left if this process were killed."""
        return await asyncio.to_thread(shared_memory_of, self._processes)

    async def sleep(self) -> None:
        """Move the weights to main memory and drop the KV cache; nothing is in progress. Not colocated: nothing."""
        if self._settings.colocated:
            await self._control("sleep", self._alive().sleep(level=1))

    async def wake(self) -> None:
        """Take the memory back, with the weights as they were."""
        if self._settings.colocated:
            await self._control("wake", self._alive().wake_up())

    async def _watch(self) -> None:
        while not self._llm.errored:
            await asyncio.sleep(WATCH_PERIOD_S)
        self._lose(
            f"engine lost: engine={self._settings.engine_id}; a process of vLLM has ended, start the engine again"
        )

    def _alive(self) -> Any:
        """Return vLLM's engine, unless it is lost."""
        if self._loss is not None or self._llm is None:
            raise EngineLostError(self._loss or f"engine lost: engine={self._settings.engine_id} has not been started")
        return self._llm

    def _lose(self, reason: str) -> EngineLostError:
        """Declare the engine lost, once; end every call in progress; return the error to raise."""
        if self._loss is None and self._llm is not None:
            from vllm.v1.engine.exceptions import EngineDeadError

            self._loss = reason
            self._lost.set()
            self._llm.output_processor.propagate_error(EngineDeadError())
        return EngineLostError(reason)

    async def _until(self, call: Awaitable[T]) -> T:
        """Await a call into vLLM while the engine lives, for ``update_timeout_s`` at most.

        Raises:
            EngineLostError: If the engine has been lost meanwhile.
            TimeoutError: If the call takes longer.
        """
        task, lost = asyncio.ensure_future(call), asyncio.ensure_future(self._lost.wait())
        try:
            timeout_s = self._settings.update_timeout_s
            await asyncio.wait({task, lost}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            self._alive()
            raise TimeoutError(f"no answer for {timeout_s:g} s")
        finally:
            task.cancel()
            lost.cancel()

    async def _control(self, what: str, call: Awaitable[T]) -> T:
        """Await a call that leaves the engine in an unknown state if it fails."""
        began = time.perf_counter()
        try:
            return await self._until(call)
        except Exception as error:
            seconds = time.perf_counter() - began
            raise self._lose(
                f"{what} failed: engine={self._settings.engine_id} after {seconds:.1f} s; {error};"
                " start the engine again"
            ) from error

    # ------------------------------------------------------------------------------ generation

    async def generate(self, request: GenerateRequest) -> Generated:
        """Generate one answer.

        Log-probabilities are those of the distribution sampled from, temperature included; at temperature 0,
        those of temperature 1.

        Raises:
            EngineLostError: If the engine has died or has been declared lost.
            BackendError: If vLLM refuses the request, or it is already in progress.
        """
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.v1.engine.exceptions import EngineDeadError

        llm, rollout_id = self._alive(), request.rollout_id
        if rollout_id in self._running:
            raise BackendError(
                f"generation failed: engine={self._settings.engine_id} has rollout={rollout_id} in progress"
            )
        ended = self._running[rollout_id] = asyncio.Event()
        output = None
        try:
            parameters = SamplingParams(
                max_tokens=request.max_new_tokens,
                temperature=request.temperature,
                seed=request.seed,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            # Tokens in this form are taken in before the first suspension: an abort cannot come too early.
            prompt = tokens_input(list(request.prompt_tokens))
            async for output in llm.generate(prompt, parameters, request_id=str(rollout_id)):  # noqa: B007
                pass
        except EngineDeadError:
            await self._lost.wait()  # the watcher sees it, too, and says why
            raise EngineLostError(self._loss) from None
        except Exception as error:
            cause = error.__cause__ or error
            raise BackendError(
                f"generation failed: engine={self._settings.engine_id} rollout={rollout_id}; {cause}"
            ) from error
        finally:
            del self._running[rollout_id]
            ended.set()
        return replace(as_generated(output), front_end_s=busy_s() - self._outputs_s)

    async def abort(self, rollout_id: int) -> None:
        """See ``interface.Engine``."""
        if rollout_id in self._running and self._loss is None:
            await self._llm.abort(str(rollout_id))

    # --------------------------------------------------------------------------------- weights

    async def join_group(self, meeting: str, *, first_worker: int) -> None:
        """See ``interface.Receiver``.

        Raises:
            EngineLostError: If it does not succeed in ``update_timeout_s``.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        info = {
            "meeting": meeting,
            "first_worker": first_worker,
            "timeout_s": self._settings.update_timeout_s,
        }
        async with self._updating:
            request = WeightTransferInitRequest(init_info=info)
            await self._control("joining the group", self._alive().init_weight_transfer_engine(request))

    async def update(self, weights: Weights, weight_update: WeightUpdate) -> UpdateTimes:
        """See ``interface.Engine``.

        Raises:
            EngineLostError: If the update fails. The engine is then never resumed.
        """
        async with self._updating:
            llm = self._alive()
            phase = "pause"
            clock_s = [time.perf_counter()]
            try:
                await self._until(self._pause(weight_update))
                clock_s.append(time.perf_counter())
                phase = "transfer"
                await self._receive(weights)
                await self._until(llm.finish_weight_update(str(weights.version)))
                if (label := await self._until(llm.get_weight_version())) != str(weights.version):
                    raise BackendError(f"the engine reports version {label}")
                clock_s.append(time.perf_counter())
                phase = "resume"
                await self._until(llm.resume_generation())
                clock_s.append(time.perf_counter())
            except BaseException as error:
                lost = self._lose(
                    f"weight update failed: phase={phase} engine={self._settings.engine_id} version={weights.version}"
                    f" after {time.perf_counter() - clock_s[0]:.1f} s; {error}; start the engine again"
                )
                if isinstance(error, Exception):
                    raise lost from error
                raise  # cancelled
            self._checksums = dict(weights.checksums)
            return UpdateTimes(*(after - before for before, after in pairwise(clock_s)))

    async def _pause(self, weight_update: WeightUpdate) -> None:
        """Stop between two decode steps."""
        aborting = weight_update is WeightUpdate.ABORT
        in_progress = list(self._running.values())
        await self._llm.pause_generation(
            mode="abort" if aborting else "keep", clear_cache=weight_update is WeightUpdate.RECOMPUTE
        )
        if not await self._llm.is_paused():
            raise BackendError("the engine did not pause")
        if aborting:
            for ended in in_progress:
                await ended.wait()

    async def _receive(self, weights: Weights) -> None:
        """Have all workers verify a file, or find that the weights have arrived, verified.

        No worker's model is touched here, so another attempt is safe.
        """
        scheme, _, place = weights.location.partition(":")
        if scheme != self._settings.transport:
            raise BackendError(f"location must begin with {self._settings.transport}:, got {weights.location}")
        if scheme == "file":
            info: dict[str, Any] = {"checksums": weights.checksums, "path": place}
        else:
            info = {"label": place}
        for attempt in range(1, TRANSFER_ATTEMPTS + 1):
            try:
                await self._until(self._send_update(info))
                return
            except (EngineLostError, TimeoutError):
                raise
            except Exception:
                if attempt == TRANSFER_ATTEMPTS:
                    raise

    async def _send_update(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._llm.start_weight_update()
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))

    async def checksums(self) -> dict[str, str]:
        """See ``interface.Engine``; empty at version 0."""
        return dict(self._checksums)


# --------------------------------------------------------------------------------------- from and to vLLM


def as_generated(output: Any) -> Generated:
    """Turn vLLM's last output of a request into ours.

    Raises:
        BackendError: If it did not end as it should, or its spans do not cover its tokens.
    """
    (completion,) = output.outputs
    if completion.finish_reason not in {"stop", "length", "abort"}:
        raise BackendError(f"generation failed: rollout={output.request_id} ended with {completion.finish_reason}")
    tokens = list(completion.token_ids)
    logprobs = [step[token].logprob for token, step in zip(tokens, completion.logprobs or (), strict=True)]
    return Generated(
        tokens_T=np.array(tokens, dtype=np.int64),
        logprob_T=np.array(logprobs, dtype=np.float32),
        spans=version_spans(completion.weight_versions or (), len(tokens)),
        aborted=completion.finish_reason == "abort",
    )


def version_spans(reported: Iterable[Any], num_tokens: int) -> VersionSpans:
    """Turn vLLM's spans into ours: its label of the first weights, "default", is version 0.

    Raises:
        BackendError: If they do not cover ``num_tokens`` tokens.
    """
    ends: dict[int, int] = {}
    for span in reported:
        if span.end > span.start:
            ends[0 if span.version == "default" else int(span.version)] = span.end
    spans = VersionSpans(tuple(ends), tuple(ends.values()))
    if spans.num_tokens != num_tokens:
        raise BackendError(f"version spans end at token {spans.num_tokens}, but {num_tokens} tokens were generated")
    return spans
