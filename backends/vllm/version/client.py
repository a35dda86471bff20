"""The start of vLLM's processes, the calls of its engine, and the times of its decode steps and of every request."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from backends.interface import STREAM_TOKENS, Generated, GenerateRequest, busy_s
from backends.this_machine import local_cache
from backends.vllm.process import VLLMSettings
from backends.vllm.version.arguments import engine_arguments
from backends.vllm.version.workers import IN_PLACE, RECEIVER, adapter_request
from pipelinerl.errors import BackendError, ConfigError, install
from pipelinerl.records.reports import DecodeSteps
from pipelinerl.scheduler.events import EngineSeconds, VersionSpans, WeightUpdate


def sampling_parameters(request: GenerateRequest) -> Any:
    """Return vLLM's parameters of a request; for its log-probabilities see ``VLLMEngine.generate``."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        max_tokens=request.max_new_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        stop=list(request.stop),
        seed=request.seed,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(request.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def as_generated(output: Any) -> Generated:
    """Turn vLLM's last output into ours; ``BackendError`` if its end, spans or log-probabilities are not right."""
    (completion,) = output.outputs
    if completion.finish_reason not in {"stop", "length", "abort"}:
        raise BackendError(f"generation failed: rollout={output.request_id} ended with {completion.finish_reason}")
    return _generated(
        output.request_id,
        completion.token_ids,
        completion.logprobs,
        completion.weight_versions,
        aborted=completion.finish_reason == "abort",
        routed_NLK=completion.routed_experts,
    )


def so_far(state: Any, *, after: int = 0, routes_after: int = 0) -> Generated:
    """Turn vLLM's state of a request in progress into the answer so far, less its first tokens and chunks of routes."""
    routes = state.routed_experts_chunks[routes_after:]
    return _generated(
        state.external_req_id,
        state.detokenizer.output_token_ids,
        state.logprobs_processor.logprobs,
        state._weight_version_spans(),
        after=after,
        aborted=True,
        routed_NLK=np.concatenate(routes) if routes else None,
    )


def _generated(name: str, token_ids: Any, flat: Any, spans: Any, *, after: int = 0, **rest: Any) -> Generated:
    tokens = list(token_ids[after:])
    if tokens and list(flat.token_ids[after:]) != tokens:  # of each position the sampled token, and no other
        raise BackendError(f"generation failed: rollout={name} has log-probabilities of other tokens")
    return Generated(
        tokens_T=np.array(tokens, dtype=np.int64),
        logprob_T=np.array(flat.logprobs[after:] if tokens else (), dtype=np.float32),
        spans=version_spans(spans or (), len(tokens), after=after),
        **rest,
    )


def version_spans(reported: Iterable[Any], num_tokens: int, *, after: int = 0) -> VersionSpans:
    """Turn vLLM's spans, of ``num_tokens`` tokens behind the first ``after``, into ours ("default" is version 0).

    ``BackendError`` if they do not cover all tokens.
    """
    ends: dict[int, int] = {}
    for span in reported:
        if span.end > max(span.start, after):
            ends[0 if span.version == "default" else int(span.version)] = span.end - after
    spans = VersionSpans(tuple(ends), tuple(ends.values()))
    if spans.num_tokens != num_tokens:
        raise BackendError(f"version spans end at token {spans.num_tokens}, but {num_tokens} tokens were generated")
    return spans


ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # compiled on the spot; it knows no log-probabilities after top-p and top-k
}
"""Variables that vLLM reads, where they are not set."""
ROUTES_ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
"""The same with ``routes``, which vLLM's older model runner does not return."""
CPU_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
"""The same on CPU, where every start would compile two lines of the sampler (4 s), and a worker has one core."""
SHUTDOWN_S = 1.0
"""Then vLLM kills its processes: workers heed nothing else."""


class EngineDiedError(Exception):
    """A process of vLLM has ended."""


def environment(settings: VLLMSettings) -> dict[str, str]:
    """Return the variables of an engine's processes, where they are not set."""
    level = {} if settings.log_file is None else {"VLLM_LOGGING_LEVEL": "INFO"}
    on_device = CPU_ENVIRONMENT if settings.device == "cpu" else local_cache()
    return ENVIRONMENT | on_device | level | (ROUTES_ENVIRONMENT if settings.routes else {})


def start_client(settings: VLLMSettings, adapter_folder: str | None = None) -> Client:
    """Start vLLM's processes; blocks until the model is loaded. ``ConfigError`` if vLLM is not installed.

    ``adapter_folder``: of the adapters of version 0, by which all requests are answered.
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
    for name, value in environment(settings).items():
        os.environ.setdefault(name, value)
    try:
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: {install(f'train-{settings.device}')}") from error
    transfer = WeightTransferConfig(backend=RECEIVER)
    arguments = AsyncEngineArgs(**engine_arguments(settings), weight_transfer_config=transfer)
    meter = KVCacheMeter() if settings.kv_cache_use else None
    loggers = [silent_logger(meter)] if settings.request_times or meter is not None else None
    llm = AsyncLLM.from_engine_args(arguments, stat_loggers=loggers)
    return Client(
        llm,
        adapter_folder,
        meter=meter,
        stream_tokens=settings.stream_tokens,
        speculates=settings.speculation is not None,
    )


class KVCacheMeter:
    """The room in a KV cache by vLLM's statistics of each step, until ``take`` (mutable)."""

    def __init__(self) -> None:
        self._share, self._preempted = 0.0, False

    def note(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """Note a step; either may be None."""
        if scheduler_stats is not None:
            self._share = scheduler_stats.kv_cache_usage
        if iteration_stats is not None and iteration_stats.num_preempted_reqs:
            self._preempted = True

    def take(self) -> float:
        """Return the share in use after the last step, 1 if a sequence was preempted since the last call."""
        share, self._preempted = 1.0 if self._preempted else self._share, False
        return share


def silent_logger(meter: KVCacheMeter | None) -> Any:
    """Return a logger for Prometheus', which cannot be disabled: vLLM has times and statistics if one logs."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class SilentLogger(PrometheusStatLogger):  # type: ignore[misc]  # vLLM is Any to mypy
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            if meter is not None:
                meter.note(scheduler_stats, iteration_stats)

        def log(self, *_: Any, **__: Any) -> None:
            pass

        record_sleep_state = record_admission_rejection = log_engine_initialized = log

    return SilentLogger


class Client:
    """Our calls of vLLM's running ``AsyncLLM``. None is timed here, and none returns once the engine is dead."""

    def __init__(
        self,
        llm: Any,
        adapter_folder: str | None = None,
        *,
        meter: KVCacheMeter | None = None,
        stream_tokens: int = STREAM_TOKENS,
        speculates: bool = False,
    ) -> None:
        self.llm = llm
        self._adapters = None if adapter_folder is None else adapter_request(adapter_folder)
        self._times = RequestTimes()
        self._steps = StepMeter()
        self._kv_cache = meter
        self._reported: dict[str, tuple[int, int]] = {}  # request in progress -> its tokens and chunks of routes
        self._unreported_steps, self._step_end_s, self._report_is_due = 0, 0.0, asyncio.Event()
        self.outputs_s = 0.0
        self.last_output_s = time.monotonic()
        process = llm.output_processor.process_outputs
        tokens_of = num_tokens if speculates else len

        def timed(*arguments: Any, **keywords: Any) -> Any:
            begin_s, self.last_output_s = busy_s(), time.monotonic()
            outputs, end_s, *_ = arguments
            num_ended = sum(one.finish_reason is not None for one in outputs)
            self._steps.output(end_s, len(outputs), num_ended, num_tokens=tokens_of(outputs))
            processed = process(*arguments, **keywords)
            if end_s != self._step_end_s:  # the outputs of a step may come in parts
                self._step_end_s = end_s
                self._unreported_steps += 1
                if self._unreported_steps >= stream_tokens:
                    self._report_is_due.set()
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
        self._report_is_due.set()

    async def generate(self, request: GenerateRequest, *, salt: str) -> Generated:
        """Generate; one ``salt`` shares the cache. Raises ``EngineDiedError``, ``BackendError``, vLLM's refusal."""
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        output = None
        # Tokens in this form are taken in before the first suspension: an abort cannot come too early.
        prompt = tokens_input(list(request.prompt_tokens), cache_salt=salt)
        parameters = sampling_parameters(request)
        self._steps.begins(len(request.prompt_tokens))
        try:
            answers = self.llm.generate(
                prompt, parameters, request_id=str(request.rollout_id), lora_request=self._adapters
            )
            async for output in answers:  # noqa: B007
                pass
        except EngineDeadError:
            raise EngineDiedError from None
        assert output is not None  # it has given one at least
        times = output.metrics
        seconds = times and self._times.of(times.scheduled_ts, times.first_token_ts, times.last_token_ts)
        generated = as_generated(output)
        self._steps.ends(len(request.prompt_tokens) + len(generated.tokens_T))
        return replace(
            generated,
            front_end_s=busy_s() - self.outputs_s,
            decode_steps=self._steps.take(),
            seconds=seconds,
            cached_tokens=output.num_cached_tokens,
            # An evaluation's answer, of a negative id, must not take the report of a preemption.
            kv_cache_share=self._kv_cache.take() if self._kv_cache is not None and request.rollout_id >= 0 else None,
        )

    def so_far(self, rollout_id: int) -> Generated | None:
        """Return the answer so far of a request in progress; None if it is unknown."""
        states = self.llm.output_processor.request_states.values()
        return next((so_far(state) for state in states if state.external_req_id == str(rollout_id)), None)

    async def report(self, within_s: float) -> dict[tuple[int, int], Generated]:
        """Return what requests in progress have generated since the last report, by rollout and length of the prompt.

        Waits for ``stream_tokens`` decode steps, at most ``within_s``, or for ``end_calls``.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._report_is_due.wait()
        self._report_is_due.clear()
        self._unreported_steps = 0
        before, self._reported, report = self._reported, {}, {}
        for name, state in self.llm.output_processor.request_states.items():
            tokens, chunks = before.get(name, (0, 0))
            new = so_far(state, after=tokens, routes_after=chunks)
            self._reported[name] = tokens + len(new.tokens_T), len(state.routed_experts_chunks)
            if len(new.tokens_T):
                report[int(state.external_req_id), state.prompt_len] = new
        return report

    async def abort(self, rollout_id: int) -> None:
        """End a request early; no effect if it is unknown."""
        await self.llm.abort(str(rollout_id))

    async def pause(self, weight_update: WeightUpdate) -> None:
        """Stop between two decode steps; ``BackendError`` if vLLM goes on."""
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
        """Have every worker join the group that weights are sent through; see ``receiver.JoinInfo``."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=dict(info)))

    async def receive(self, info: Mapping[str, Any]) -> None:
        """Have every worker take new weights in and verify them; no model is touched."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self.llm.start_weight_update()
        await self.llm.update_weights(WeightTransferUpdateRequest(update_info=dict(info)))

    async def load(self, version: int) -> None:
        """Have workers load their weights, and label tokens from now on; ``BackendError`` if the label is another."""
        await self.llm.finish_weight_update(str(version))
        if (label := await self.llm.get_weight_version()) != str(version):
            raise BackendError(f"the engine reports version {label}")

    async def sleep(self) -> None:
        """Move the weights to main memory and drop the KV cache."""
        await self.llm.sleep(level=1)

    async def wake(self) -> None:
        """Take the memory back."""
        await self.llm.wake_up()

    def shutdown(self) -> None:
        """Terminate vLLM's processes."""
        self.llm.shutdown(timeout=SHUTDOWN_S)


def num_tokens(outputs: list[Any]) -> int:
    """Return the tokens of a step's outputs (count)."""
    return sum(len(one.new_token_ids) for one in outputs)


MOST_STOPS = 64
"""Latest stops of the engine that are kept."""


class StepMeter:
    """Adds up decode steps (mutable), but for the first after a stop or of an idle engine, whose begin is unknown.

    Every sequence in progress gets a token at least in a step: those beyond the ones left of the step before have begun
    in it.
    """

    def __init__(self) -> None:
        self._sums = DecodeSteps()
        self._end_s = 0.0  # of the last step, whose outputs may come in parts
        self._num = self._num_tokens = self._num_ended = 0
        self._had = self._had_unread = 0  # tokens of contexts and of prompts in that step
        self._began_s: float | None = None
        self._left = 0
        self._context = self._unread = 0  # tokens of all requests; of prompts that no step has had yet

    def begins(self, prompt_tokens: int) -> None:
        """Note that a request is sent to the engine."""
        self._context += prompt_tokens
        self._unread += prompt_tokens

    def ends(self, tokens: int) -> None:
        """Note that a request has ended, with so many tokens, prompt included."""
        self._context -= tokens

    def output(self, end_s: float, num: int, num_ended: int, *, num_tokens: int) -> None:
        """Note that ``num`` sequences got tokens in the step that ended at ``end_s``, and ``num_ended`` ended."""
        if end_s != self._end_s:
            self._close()
            self._end_s, self._had, self._had_unread = end_s, self._context, self._unread
            self._unread = 0
        self._context += num_tokens
        self._num_tokens += num_tokens
        self._num += num
        self._num_ended += num_ended

    def stop(self) -> None:
        """Note that the engine stops."""
        self._close()
        self._began_s = None

    def take(self) -> DecodeSteps:
        """Return the sums since the last call."""
        taken, self._sums = self._sums, DecodeSteps()
        return taken

    def _close(self) -> None:
        if not self._num:
            return
        if self._began_s is not None:
            self._sums += DecodeSteps(
                steps=1,
                sequences=self._num,
                tokens=self._num_tokens,
                context=self._had,
                started=max(0, self._num - self._left),
                read_tokens=self._had_unread,
                seconds=self._end_s - self._began_s,
            )
        self._left = self._num - self._num_ended
        self._began_s = self._end_s if self._left else None
        self._num = self._num_ended = self._num_tokens = 0


class RequestTimes:
    """The seconds of requests, less the time in which the engine stood still (mutable). A machine has one clock."""

    def __init__(self) -> None:
        self._stops: deque[tuple[float, float]] = deque(maxlen=MOST_STOPS)
        self._stopped_s: float | None = None

    def stop(self) -> None:
        """Note that the engine stands still from now on."""
        self._stopped_s = time.monotonic()

    def go_on(self) -> None:
        """Note that it goes on."""
        if self._stopped_s is not None:
            self._stops.append((self._stopped_s, time.monotonic()))
            self._stopped_s = None

    def of(self, scheduled_s: float, first_token_s: float, last_token_s: float) -> EngineSeconds:
        """Return the seconds of prefill, until the first token, and of decode, until the last; 0 if neither came.

        Prefills of other requests in a decode step count as decode.
        """
        if not first_token_s:  # aborted before
            return EngineSeconds(0.0, 0.0)
        return EngineSeconds(self._worked_s(scheduled_s, first_token_s), self._worked_s(first_token_s, last_token_s))

    def _worked_s(self, begin_s: float, end_s: float) -> float:
        still_s = (max(0.0, min(end_s, last_s) - max(begin_s, first_s)) for first_s, last_s in self._stops)
        return max(0.0, end_s - begin_s - sum(still_s))
