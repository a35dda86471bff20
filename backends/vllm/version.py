"""All that holds for one version of vLLM only: its arguments, its calls, its classes, the form of its answers.

Another version: change this file and the pins in ``pyproject.toml``, then run the tests of ``tests/backends/vllm`` that
are marked ``real``. The worker's ends of the transports have the methods that its ``WeightTransferEngine`` asks for;
``offline.py`` uses its plainest interface. Importing this module does not load vLLM.
"""

from __future__ import annotations

import ast
import math
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np

from backends.busy import busy_s
from backends.interface import Generated, GenerateRequest
from backends.vllm.process import VLLMSettings
from backends.vllm.request_times import RequestTimes
from backends.vllm.spawned import main_of_children
from pipelinerl.errors import BackendError, ConfigError, install
from pipelinerl.scheduler.events import VersionSpans, WeightUpdate
from pipelinerl.util.explain import did_you_mean, shown

VERSION = "0.32"
"""What all of this was read in and run with. 0.33 has changed the transfer of weights."""
KEY = "train.engine.vllm"
"""Table of the run file whose entries are arguments of vLLM."""
DECIDED_BY = {
    "model": "train.model.path",
    "tokenizer": "train.model.path",
    "dtype": "train.device",
    "max_model_len": "train.task.max_prompt_tokens and workload.length.max",
    "max_num_seqs": "scheduler.generation_batch_size",
    "tensor_parallel_size": "cluster.tensor_parallel",
    "gpu_memory_utilization": "train.engine.gpu_memory_utilization",
    "enable_sleep_mode": "scheduler.kind",
    "weight_transfer_config": "train.transport",
}
"""Arguments that follow from a key of the run file."""
REFUSED = {
    "logprobs_mode": "importance weights need those of the distribution that is sampled from",
    "quantization": "new weights can be loaded into plain parameters only",
    "quantization_config": "new weights can be loaded into plain parameters only",
    "cpu_offload_gb": "new weights can be loaded into parameters in place only",
    "enable_lora": "all weights are trained",
    "speculative_config": "the weights of what drafts are not updated",
    "pipeline_parallel_size": "an engine is one stage",
    "distributed_executor_backend": "an engine's workers are processes of one machine",
    "skip_tokenizer_init": "stop strings need the tokenizer",
}
"""Arguments that would break what the driver relies on."""
MIN_BATCHED_TOKENS = 8192
"""Tokens of prompts and answers that one decode step may compute, if not more slots (tokens)."""
IN_PLACE = "PIPELINERL_PARAMETERS_IN_PLACE"
"""Variable that asks vLLM's processes for ``keep_parameters_in_place``."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # compiled on the spot; it knows no log-probabilities after top-p and top-k
}
"""Variables that vLLM reads, where they are not set."""
CPU_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}
"""The same on CPU, where every start would compile two lines of the sampler (4 s)."""
SHUTDOWN_S = 1.0
"""Time that vLLM's processes have to end before it kills them: workers heed nothing else (seconds)."""


class EngineDiedError(Exception):
    """A process of vLLM has ended."""


# ------------------------------------------------------------------------------------------ before anything starts


def check_version() -> None:
    """Check that the version of vLLM is the one that this file is for; vLLM is found, not loaded.

    Raises:
        ConfigError: If it is another one.
    """
    text = (_package() / "_version.py").read_text(encoding="utf-8")
    found = re.search(r"^__version__ = .*'(.+)'", text, re.MULTILINE)
    there = found[1] if found else "an unknown version"
    if not there.startswith(f"{VERSION}."):
        raise ConfigError(f"train needs vLLM {VERSION} (backends/vllm/version.py is written for it), got {there}")


def check_arguments(arguments: Mapping[str, Any], *, accelerators: int, device: Literal["cpu", "gpu"]) -> None:
    """Check the arguments of vLLM that a run file gives, as far as names go; the values are vLLM's to judge.

    Args:
        arguments: By their names in vLLM.
        accelerators: Of an engine: ``cluster.tensor_parallel`` (count).
        device: Of the engine.

    Raises:
        ConfigError: If a name is unknown (where vLLM is installed), or decided elsewhere.
    """
    known = _argument_names() if find_spec("vllm") is not None else None
    for name, value in arguments.items():
        if name in DECIDED_BY or name in REFUSED:
            why = f"{DECIDED_BY[name]} decides" if name in DECIDED_BY else REFUSED[name]
            raise ConfigError(f"{KEY}.{name} must be left out, since {why}, got {shown(value)}")
        if known is not None and name not in known:
            near = did_you_mean(name, known)
            raise ConfigError(f"{KEY}.{name} is no argument of vLLM {VERSION}'s engine; {near}got {shown(value)}")
    if device == "cpu" and arguments.get("enable_expert_parallel"):
        raise ConfigError(
            f"{KEY}.enable_expert_parallel must be false on device='cpu', where vLLM's kernel would read beyond the "
            "experts that a worker has, got true"
        )
    replicas = arguments.get("data_parallel_size", 1)
    if type(replicas) is not int or replicas < 1 or accelerators % replicas:
        raise ConfigError(
            f"{KEY}.data_parallel_size must divide cluster.tensor_parallel={accelerators}, the accelerators of an "
            f"engine, got {shown(replicas)}"
        )


def _package() -> Path:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def _argument_names() -> set[str]:
    """Return the fields of vLLM's ``EngineArgs``, read from its source: loading it takes seconds."""
    tree = ast.parse((_package() / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    fields = [*classes["EngineArgs"].body, *classes["AsyncEngineArgs"].body]
    names = {one.target.id for one in fields if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    return {name for name in names if not name.startswith("_")}


# --------------------------------------------------------------------------------------------- an engine's process


def engine_arguments(settings: VLLMSettings) -> dict[str, Any]:
    """Return the arguments of vLLM's engine; those of the run file go before ours where nothing depends on them."""
    replicas = settings.arguments.get("data_parallel_size", 1)
    on_cpu = settings.device == "cpu"
    ours = {
        "enforce_eager": on_cpu,
        "max_num_batched_tokens": max(MIN_BATCHED_TOKENS, settings.num_slots),
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }
    fixed = {
        "model": settings.model_path,
        "dtype": "float32" if on_cpu else "bfloat16",
        "max_model_len": settings.max_tokens,
        "max_num_seqs": math.ceil(settings.num_slots / replicas),
        "tensor_parallel_size": settings.tensor_parallel // replicas,
        "distributed_executor_backend": "mp",
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enable_sleep_mode": settings.colocated and not on_cpu,
        "logprobs_mode": "processed_logprobs",
    }
    return {**ours, **settings.arguments, **fixed}


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
    for name, value in (ENVIRONMENT | on_device | level).items():
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
        return Client(AsyncLLM.from_engine_args(arguments, stat_loggers=loggers))


def no_logger() -> Any:
    """Return a logger of statistics that logs nothing: vLLM keeps the times of requests if something logs.

    Its Prometheus logger would log besides, whatever it is told, but for one that takes its place.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class NoLogger(PrometheusStatLogger):  # type: ignore[misc,unused-ignore]
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
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self._times = RequestTimes()
        self.outputs_s = 0.0
        """Time that this process has been busy with the outputs of decode steps (seconds)."""
        self.last_output_s = time.monotonic()
        """When the last decode step's output came (seconds)."""
        process = llm.output_processor.process_outputs

        def timed(*arguments: Any, **keywords: Any) -> Any:
            begin_s, self.last_output_s = busy_s(), time.monotonic()
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
        try:
            async for output in self.llm.generate(prompt, parameters, request_id=str(request.rollout_id)):  # noqa: B007
                pass
        except EngineDeadError:
            raise EngineDiedError from None
        times = output.metrics  # type: ignore[union-attr]
        known = times and (times.scheduled_ts, times.first_token_ts, times.last_token_ts)
        seconds = self._times.of(*known) if known else None
        return replace(as_generated(output), front_end_s=busy_s() - self.outputs_s, seconds=seconds)

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

    async def resume(self) -> None:
        """Go on."""
        await self.llm.resume_generation()
        self._times.go_on()

    async def join_group(self, info: Mapping[str, Any]) -> None:
        """Have every worker join the group that weights are sent through; see ``broadcast_receiver.JoinInfo``."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=dict(info)))

    async def receive(self, info: Mapping[str, Any]) -> None:
        """Have every worker take new weights in and verify them; no model is touched."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self.llm.start_weight_update()
        await self.llm.update_weights(WeightTransferUpdateRequest(update_info=dict(info)))

    async def load(self, version: int) -> None:
        """Have every worker load what it has taken in, and label what is sampled from now on.

        Raises:
            BackendError: If the engine reports another label then.
        """
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
        """Tell vLLM's processes to end."""
        self.llm.shutdown(timeout=SHUTDOWN_S)


def sampling_parameters(request: GenerateRequest) -> Any:
    """Return vLLM's parameters of a request.

    With its ``processed_logprobs`` the log-probabilities are those of the distribution sampled from: after temperature,
    and among the words that ``top_k``, ``top_p`` and ``min_p`` leave.
    """
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
    """Turn vLLM's last output of a request into ours.

    Raises:
        BackendError: If it did not end as it should, or its spans or log-probabilities do not cover its tokens.
    """
    (completion,) = output.outputs
    if completion.finish_reason not in {"stop", "length", "abort"}:
        raise BackendError(f"generation failed: rollout={output.request_id} ended with {completion.finish_reason}")
    tokens, flat = list(completion.token_ids), completion.logprobs
    if tokens and list(flat.token_ids) != tokens:  # of each position the sampled token, and no other
        raise BackendError(f"generation failed: rollout={output.request_id} has log-probabilities of other tokens")
    return Generated(
        tokens_T=np.array(tokens, dtype=np.int64),
        logprob_T=np.array(flat.logprobs if tokens else (), dtype=np.float32),
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


# ------------------------------------------------------------------------------------------------- vLLM's workers


def transfer_bases() -> Any:
    """Return the module of the classes that the worker's end of a transport is made of."""
    from vllm.distributed.weight_transfer import base

    return base


def register_transports(engines: Mapping[str, tuple[str, str]]) -> None:
    """Make transports known to this process's vLLM, by name: module and class; a second call does nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    for name, (module, cls) in engines.items():
        if name not in Factory._registry:
            Factory.register_engine(name, module, cls)


def load_weights(model: Any, model_config: Any, weights: Iterable[tuple[str, Any]]) -> None:
    """Load a checkpoint's weights into a worker's model, in place.

    The model's parameters may be packed or fused after loading. vLLM's layerwise reload undoes that, lets the model's
    own loader have the weights, and packs again into the same storage. It is made for plain, unquantised models.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    if next(model.parameters()).device.type == "cpu":
        # Experts are packed for the CPU where their kernel is made, which is once: reloaded ones would stay unpacked,
        # and be read as if they were not. So it is made again.
        for module in model.modules():
            if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
                module.quant_method.moe_kernel = None
    initialize_layerwise_reload(model)
    try:
        model.load_weights(iter(weights))
    finally:  # what has not come is put back, and it can be tried again
        finalize_layerwise_reload(model, model_config)


def keep_parameters_in_place() -> None:
    """Keep linear layers on CPU from being packed for oneDNN, out of which no parameter can be changed."""
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False
