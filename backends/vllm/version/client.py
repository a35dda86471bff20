"""The start of vLLM's processes, and the calls of its engine."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from backends.busy import busy_s, worked_s
from backends.cores import has_one_core
from backends.interface import Generated, GenerateRequest
from backends.vllm.decode_steps import NO_WORK, StepMeter, Worked
from backends.vllm.process import VLLMSettings, process_tree
from backends.vllm.request_times import RequestTimes
from backends.vllm.spawned import main_of_children
from backends.vllm.version.answers import as_generated, sampling_parameters
from backends.vllm.version.arguments import engine_arguments
from backends.vllm.version.workers import IN_PLACE
from pipelinerl.errors import BackendError, ConfigError, install
from pipelinerl.scheduler.events import WeightUpdate

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # compiled on the spot; it knows no log-probabilities after top-p and top-k
}
"""Variables that vLLM reads, where they are not set."""
CPU_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}
"""The same on CPU, where every start would compile two lines of the sampler (4 s)."""
STREAMED_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": f"{2**20}"}
"""The same where weights are streamed: glibc gives blocks of this size back when they are freed (bytes).

Else it keeps those of the weights before when others come in their place, a third of the model on a CPU.
"""
SHUTDOWN_S = 1.0
"""Time that vLLM's processes have to end before it kills them: workers heed nothing else (seconds)."""


def worked(pids: Sequence[int]) -> Worked:
    """Return what processes and this one have worked; nothing, where there are none or one has ended."""
    try:
        return Worked(sum(map(worked_s, pids)), time.process_time()) if pids else NO_WORK
    except OSError:
        return NO_WORK


class EngineDiedError(Exception):
    """A process of vLLM has ended."""


def start_client(settings: VLLMSettings) -> Client:
    """Start vLLM's processes; blocks until the model is loaded.

    Raises:
        ConfigError: If vLLM is not installed.
    """
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and "pipelinerl" not in plugins.split(","):
        os.environ["VLLM_PLUGINS"] = f"{plugins},pipelinerl"
    os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] = str(math.ceil(settings.start_timeout_s))
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = f"{settings.cpu_kv_cache_gib}"
    if settings.cpu_in_place:
        os.environ[IN_PLACE] = "1"
    if settings.cpu_cores is not None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = settings.cpu_cores
    level = {} if settings.log_file is None else {"VLLM_LOGGING_LEVEL": "INFO"}
    on_device = CPU_ENVIRONMENT if settings.device == "cpu" else {}
    on_transport = STREAMED_ENVIRONMENT if settings.transport == "streamed" else {}
    for name, value in (ENVIRONMENT | on_device | on_transport | level).items():
        os.environ.setdefault(name, value)
    with main_of_children():
        try:
            from vllm.config.weight_transfer import WeightTransferConfig
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
        except ModuleNotFoundError as error:
            raise ConfigError(f"{error.name} is not installed: {install(f'train-{settings.device}')}") from error
        transfer = WeightTransferConfig(backend=f"pipelinerl_{settings.transport}")
        arguments = AsyncEngineArgs(**engine_arguments(settings), weight_transfer_config=transfer)
        loggers = [no_logger()] if settings.request_times else None
        before = set(multiprocessing.active_children())
        llm = AsyncLLM.from_engine_args(arguments, stat_loggers=loggers)
    one_core = settings.device == "cpu" and has_one_core()
    return Client(llm, [process.pid for process in process_tree(before)] if one_core else [])


def no_logger() -> Any:
    """Return a logger of statistics that logs nothing: vLLM keeps the times of requests if something logs.

    Its Prometheus logger would log besides, whatever it is told, but for one that takes its place.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class NoLogger(PrometheusStatLogger):  # type: ignore[misc]  # vLLM is Any to mypy
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def record(self, *_: Any, **__: Any) -> None:
            pass

        record_sleep_state = record_admission_rejection = log_engine_initialized = log = record

    return NoLogger


class Client:
    """The calls of vLLM's engine that we use. None of them is timed here, and none returns once the engine is dead.

    Args:
        llm: vLLM's ``AsyncLLM``; its processes run.
        pids: Its processes, where they have one core together with this one.
    """

    def __init__(self, llm: Any, pids: Sequence[int] = ()) -> None:
        self.llm = llm
        self._times = RequestTimes()
        self._steps = StepMeter()
        self._updating = False  # vLLM expects the rest of an update
        self.outputs_s = 0.0
        """Time that this process has been busy with the outputs of decode steps (seconds)."""
        self.last_output_s = time.monotonic()
        """When the last decode step's output came (seconds)."""
        process = llm.output_processor.process_outputs

        def timed(*arguments: Any, **keywords: Any) -> Any:
            begin_s, self.last_output_s = busy_s(), time.monotonic()
            outputs, end_s, *_ = arguments
            num_ended = sum(one.finish_reason is not None for one in outputs)
            self._steps.output(end_s, len(outputs), num_ended, worked(pids))
            processed = process(*arguments, **keywords)
            self.outputs_s += busy_s() - begin_s
            return processed

        llm.output_processor.process_outputs = timed

    @property
    def died(self) -> bool:
        """Whether a process of vLLM has ended."""
        return bool(self.llm.errored)

    def end_calls(self) -> None:
        """Have every ``generate`` in progress raise ``EngineDiedError``."""
        from vllm.v1.engine.exceptions import EngineDeadError

        self.llm.output_processor.propagate_error(EngineDeadError())

    async def generate(self, request: GenerateRequest, *, salt: str) -> Generated:
        """Generate one answer.

        Args:
            request: What to generate.
            salt: Keys and values of a prompt are shared among requests of one salt.

        Raises:
            EngineDiedError: If a process of vLLM has ended.
            BackendError: If the answer is not what it should be.
            Exception: Whatever vLLM raises where it refuses the request.
        """
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        output = None
        # Tokens in this form are taken in before the first suspension: an abort cannot come too early.
        prompt = tokens_input(list(request.prompt_tokens), cache_salt=salt)
        parameters = sampling_parameters(request)
        self._steps.begins(len(request.prompt_tokens))
        try:
            async for output in self.llm.generate(prompt, parameters, request_id=str(request.rollout_id)):  # noqa: B007
                pass
        except EngineDeadError:
            raise EngineDiedError from None
        assert output is not None  # it has given one at least
        times = output.metrics
        known = times and (times.scheduled_ts, times.first_token_ts, times.last_token_ts)
        seconds = self._times.of(*known) if known else None
        generated = as_generated(output)
        self._steps.ends(len(request.prompt_tokens) + len(generated.tokens_T))
        return replace(
            generated, front_end_s=busy_s() - self.outputs_s, decode_steps=self._steps.take(), seconds=seconds
        )

    async def abort(self, rollout_id: int) -> None:
        """End a request early; no effect if it is unknown."""
        await self.llm.abort(str(rollout_id))

    async def pause(self, weight_update: WeightUpdate) -> None:
        """Stop between two decode steps.

        Raises:
            BackendError: If vLLM goes on.
        """
        mode: Literal["abort", "keep"] = "abort" if weight_update is WeightUpdate.ABORT else "keep"
        await self.llm.pause_generation(mode=mode, clear_cache=weight_update is WeightUpdate.RECOMPUTE)
        if not await self.llm.is_paused():
            raise BackendError("the engine did not pause")
        self._times.stop()
        self._steps.stop()

    async def resume(self) -> None:
        """Go on."""
        await self.llm.resume_generation()
        self._times.go_on()

    async def join_group(self, info: Mapping[str, Any]) -> None:
        """Have every worker join the group that weights are sent through; see ``broadcast_receiver.JoinInfo``."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=dict(info)))

    async def receive(self, info: Mapping[str, Any]) -> None:
        """Have every worker take new weights in and verify them; no model is touched but where they are streamed."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        if not self._updating:
            await self.llm.start_weight_update()
        self._updating = False  # if it raises
        await self.llm.update_weights(WeightTransferUpdateRequest(update_info=dict(info)))
        self._updating = True

    async def transfer_faults(self) -> list[str]:
        """Return, where weights are streamed, why they have not come in full; empty: every worker has loaded them."""
        return [fault for fault in await self.llm.collective_rpc("transfer_fault") if fault]

    async def load(self, version: int) -> None:
        """Have every worker load what it has taken in, and label what is sampled from now on.

        Raises:
            BackendError: If the engine reports another label then.
        """
        await self.llm.finish_weight_update(str(version))
        self._updating = False
        if (label := await self.llm.get_weight_version()) != str(version):
            raise BackendError(f"the engine reports version {label}")

    async def sleep(self) -> None:
        """Move the weights to main memory and drop the KV cache."""
        await self.llm.sleep(level=1)

    async def wake(self) -> None:
        """Take the memory back."""
        await self.llm.wake_up()

    def shutdown(self) -> None:
        """Tell vLLM's processes to end."""
        self.llm.shutdown(timeout=SHUTDOWN_S)
