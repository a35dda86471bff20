"""A vLLM engine behind the promises of ``interface.Engine``.

Theory of operation. ``VLLMEngine`` lives in one process and on one event loop; vLLM's scheduler and its workers
are child processes (on CPU an only worker shares the scheduler's). ``generate`` calls run side by side. ``update``
stops the scheduler between two decode steps, so that no token is computed with weights of two versions, and starts it
again only when all weights of the new version are in place, and labelled: the version of each token is the label that
the engine's own process attaches to it. If that cannot be reached the engine stays stopped and counts as lost.

=================  =====================================  ==================================================
coroutine          waits for                              is unblocked by
=================  =====================================  ==================================================
``generate``       the last token                         vLLM; ``abort``; loss of the engine, a hang included
``update``         its turn (one update at a time), then  the phase; ``update_timeout_s``; loss of the engine
                   one phase after the other
``_watch``         the end of vLLM's processes, or        every ``WATCH_PERIOD_S``; it then declares the loss,
                   ``generate_timeout_s`` without a       which ends all others (a call into a dead vLLM
                   decode step and with requests          would never return)
=================  =====================================  ==================================================

The prefix cache is on. Its entries are salted with the number of updates: a request that begins after an update never
gets keys and values of old weights.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import time
from collections.abc import Awaitable
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from backends.interface import TRANSFER_ATTEMPTS, AnswerLostError, Generated, GenerateRequest, UpdateTimes, Weights
from backends.lora import save_no_adapters
from backends.transfer.transport import is_mismatch, place_of
from backends.transfer.verify import checkpoint_shapes
from backends.vllm.process import (
    SHARED_MEMORY,
    VLLMSettings,
    end_processes,
    process_tree,
    remove_shared_memory,
    shared_memory_of,
)
from backends.vllm.version.client import Client, EngineDiedError, start_client
from backends.workers.main import log_to
from pipelinerl.errors import BackendError, ConfigError, EngineLostError, TransferError, WeightsRefusedError
from pipelinerl.scheduler.events import WeightUpdate
from pipelinerl.util.user_code import kind_and_line

T = TypeVar("T")

WATCH_PERIOD_S = 0.2
"""Between two looks at whether vLLM's processes live."""


class VLLMEngine:
    """One inference engine, at most one update at a time. Use it from one event loop only."""

    def __init__(self, settings: VLLMSettings) -> None:
        self._settings = settings
        self._vllm: Client | None = None
        self._processes: list[Any] = []
        self._shared_memory: set[str] = set()
        self._before: set[multiprocessing.process.BaseProcess] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._loss: str | None = None
        self._lost = asyncio.Event()
        self._updating = asyncio.Lock()
        self._running: dict[int, asyncio.Event] = {}
        self._checksums: dict[str, str] = {}
        self._num_updates = 0
        self._adapters: TemporaryDirectory[str] | None = None  # of version 0, with ``lora``

    # ------------------------------------------------------------------------------------ life

    async def start(self) -> None:
        """Load the model and generate one token, which compiles everything that is compiled on first use.

        ``ConfigError`` if vLLM is not installed; ``EngineLostError`` if it cannot be started in ``start_timeout_s``.
        """
        settings = self._settings
        log_to(settings.log_file)
        self._loss, self._lost, self._checksums = None, asyncio.Event(), {}
        began = time.perf_counter()
        self._before = set(multiprocessing.active_children())
        try:
            if settings.lora is not None:
                self._adapters = TemporaryDirectory(prefix="pipelinerl-adapters-", dir=SHARED_MEMORY)
                shapes = checkpoint_shapes(settings.model_path)
                save_no_adapters(Path(self._adapters.name), shapes, settings.lora, model_path=settings.model_path)
            async with asyncio.timeout(settings.start_timeout_s):
                await asyncio.to_thread(self._launch)
                self._processes = process_tree(self._before)
                self._watcher = asyncio.create_task(self._watch(self._alive()))
                async with self._updating:  # compiling is no hang
                    warm_up = GenerateRequest(-1, prompt_tokens=(0,), max_new_tokens=1, seed=0, temperature=1.0)
                    await self.generate(warm_up)
                self._shared_memory = await self.shared_memory()
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
        self._vllm = start_client(self._settings, None if self._adapters is None else self._adapters.name)

    async def shutdown(self) -> None:
        """End all processes and their requests; a second call does nothing."""
        self._lose(f"engine lost: engine={self._settings.engine_id} has been shut down")
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
        client, self._vllm = self._vllm, None
        before, self._before = self._before, None
        processes, self._processes = self._processes, []
        if before is not None and not processes:
            processes = process_tree(before)
        # While they live: nobody knows the shared memory of a process that has ended, or that vLLM ends here.
        shared, self._shared_memory = self._shared_memory | await asyncio.to_thread(shared_memory_of, processes), set()
        if client is not None:
            client.shutdown()
        if self._adapters is not None:
            self._adapters.cleanup()
            self._adapters = None
        if before is None:
            return
        await asyncio.to_thread(end_processes, processes)
        remove_shared_memory(shared)

    async def report(self, within_s: float) -> dict[tuple[int, int], bytes]:
        """Return ``Client.report``, each pickled, as a sign of life; ``EngineLostError`` if vLLM's processes are lost.

        The driver keeps the bytes. It unpickles only the reports of a lost engine, which takes a quarter of the time.
        """
        report = await self._alive().report(within_s)
        self._alive()
        return {key: pickle.dumps(new) for key, new in report.items()}

    async def shared_memory(self) -> set[str]:
        """Return the files of shared memory that would be left if this process were killed."""
        own = set() if self._adapters is None else {self._adapters.name}
        return own | await asyncio.to_thread(shared_memory_of, self._processes)

    async def sleep(self) -> None:
        """Move the weights to main memory and drop the KV cache; nothing is in progress. Not colocated: nothing."""
        if self._settings.colocated:
            await self._control("sleep", self._alive().sleep())

    async def wake(self) -> None:
        """Take the memory back, with the weights as they were."""
        if self._settings.colocated:
            await self._control("wake", self._alive().wake())

    async def _watch(self, client: Client) -> None:
        quiet_s, seen_s, what = 0.0, client.last_output_s, "a process of vLLM has ended"
        while not client.died:
            await asyncio.sleep(WATCH_PERIOD_S)
            if (
                not self._running or self._updating.locked() or client.last_output_s != seen_s
            ):  # updates have own limits
                quiet_s, seen_s = 0.0, client.last_output_s
            else:  # time in which this process itself stood still does not count
                quiet_s += WATCH_PERIOD_S
            limit_s = self._settings.generate_timeout_s
            if quiet_s > limit_s:
                what = f"no decode step for {limit_s:g} s, {len(self._running)} requests in progress"
                break
        self._lose(f"engine lost: engine={self._settings.engine_id}; {what}, start the engine again")

    @property
    def _folder(self) -> str:
        """Of what the weights are: the model, or its adapters."""
        return self._adapters.name if self._adapters is not None else self._settings.model_path

    def _alive(self) -> Client:
        if self._loss is not None or self._vllm is None:
            raise EngineLostError(self._loss or f"engine lost: engine={self._settings.engine_id} has not been started")
        return self._vllm

    def _lose(self, reason: str) -> EngineLostError:
        """Declare the engine lost, once; end every call in progress; return the error to raise."""
        if self._loss is None and self._vllm is not None:
            self._loss = reason
            self._lost.set()
            self._vllm.end_calls()
        return EngineLostError(reason)

    async def _until(self, call: Awaitable[T]) -> T:
        """Await a call into vLLM; ``EngineLostError`` if that is lost, ``TimeoutError`` after ``update_timeout_s``."""
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

    async def _control(self, action: str, call: Awaitable[T]) -> T:
        """Await a call whose failure leaves the engine in an unknown state."""
        began = time.perf_counter()
        try:
            return await self._until(call)
        except Exception as error:
            seconds = time.perf_counter() - began
            raise self._lose(
                f"{action} failed: engine={self._settings.engine_id} after {seconds:.1f} s; {error};"
                " start the engine again"
            ) from error

    # ------------------------------------------------------------------------------ generation

    async def generate(self, request: GenerateRequest) -> Generated:
        """See ``interface.Engine``; ``BackendError`` if vLLM refuses the request, or it is already in progress.

        Log-probabilities are of the distribution sampled from: after temperature (at 0, of temperature 1), and among
        the words that ``top_p``, ``top_k`` and ``min_p`` leave.
        """
        client, rollout_id = self._alive(), request.rollout_id
        if rollout_id in self._running:
            raise BackendError(
                f"generation failed: engine={self._settings.engine_id} has rollout={rollout_id} in progress"
            )
        ended = self._running[rollout_id] = asyncio.Event()
        try:
            return await client.generate(request, salt=str(self._num_updates))
        except EngineDiedError:
            await self._lost.wait()  # the watcher finds the reason
            raise AnswerLostError(str(self._loss), client.so_far(rollout_id)) from None
        except BackendError:
            raise
        except Exception as error:
            cause = error.__cause__ or error
            raise BackendError(
                f"generation failed: engine={self._settings.engine_id} rollout={rollout_id}; {cause}"
            ) from error
        finally:
            del self._running[rollout_id]
            ended.set()

    async def abort(self, rollout_id: int) -> None:
        """See ``interface.Engine``."""
        if rollout_id in self._running and self._loss is None:
            await self._alive().abort(rollout_id)

    # --------------------------------------------------------------------------------- weights

    async def join_group(self, rendezvous: str, *, first_worker: int) -> None:
        """See ``interface.Receiver``; ``EngineLostError`` if it does not succeed in ``update_timeout_s``."""
        info = {
            "ends": self._settings.transport.ends,
            "folder": self._folder,
            "rendezvous": rendezvous,
            "first_worker": first_worker,
            "timeout_s": self._settings.update_timeout_s,
        }
        async with self._updating:
            await self._control("joining the group", self._alive().join_group(info))

    async def update(self, weights: Weights, weight_update: WeightUpdate) -> UpdateTimes:
        """See ``interface.Engine``; an engine whose update fails is lost, and never resumed.

        ``TransferError``: a file is damaged; it goes on with the weights from before, with several workers it is lost.
        """
        async with self._updating:
            client = self._alive()
            phase = "pause"
            clock_s = [time.perf_counter()]
            try:
                await self._until(self._pause(client, weight_update))
                clock_s.append(time.perf_counter())
                self._num_updates += 1
                phase = "transfer"
                await self._receive(client, weights)
                await self._until(client.load(weights.version))
                clock_s.append(time.perf_counter())
                phase = "resume"
                await self._until(client.resume())
                clock_s.append(time.perf_counter())
            except TransferError:
                raise
            except BaseException as error:
                lost = self._lose(
                    f"weight update failed: phase={phase} engine={self._settings.engine_id} version={weights.version}"
                    f" after {time.perf_counter() - clock_s[0]:.1f} s; {error}; start the engine again"
                )
                if is_mismatch(str(error)):
                    raise WeightsRefusedError(str(lost)) from error
                if isinstance(error, Exception):
                    raise lost from error
                raise  # cancelled
            self._checksums = dict(weights.checksums)
            return UpdateTimes(*(after - before for before, after in pairwise(clock_s)))

    async def _pause(self, client: Client, weight_update: WeightUpdate) -> None:
        in_progress = list(self._running.values())
        await client.pause(weight_update)
        if weight_update is WeightUpdate.ABORT:
            for ended in in_progress:
                await ended.wait()

    async def _receive(self, client: Client, weights: Weights) -> None:
        """Have all workers receive and verify; no model is touched, so another attempt is safe."""
        transport = self._settings.transport
        place_of(weights, transport)
        info = {
            "ends": transport.ends,
            "folder": self._folder,
            "version": weights.version,
            "location": weights.location,
            "checksums": weights.checksums,
        }
        attempts_left = TRANSFER_ATTEMPTS
        while True:
            try:
                await self._until(client.receive(info))
                return
            except (EngineLostError, TimeoutError):
                raise
            except Exception as error:
                attempts_left -= 1
                # vLLM leaves the answers of the other workers of a call that failed to the next call.
                unusable = self._settings.tensor_parallel > 1
                if attempts_left and not unusable and not is_mismatch(str(error)):
                    continue
                if is_mismatch(str(error)) or not transport.in_folder:
                    raise
                damage = f"engine {self._settings.engine_id}: {error}"
                if unusable:
                    self._lose(f"{damage}; start the engine again")
                else:
                    await self._until(client.resume())
                raise TransferError(damage) from error

    async def checksums(self) -> dict[str, str]:
        """See ``interface.Engine``; empty before the first update."""
        return dict(self._checksums)
