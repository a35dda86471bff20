"""The version of vLLM, and its engine's arguments: checked by name before anything starts."""

from __future__ import annotations

import ast
import math
import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any, Literal

from backends.vllm.process import VLLMSettings
from pipelinerl.config.engine import SpeculationConfig
from pipelinerl.config.train import TrainConfig
from pipelinerl.errors import ConfigError
from pipelinerl.util.explain import did_you_mean, shown

VERSION = "0.32"
"""0.33 has changed the transfer of weights."""
KEY = "train.engine.vllm"
"""Its entries are arguments of vLLM."""
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
    "enable_lora": "train.lora",
    "max_loras": "train.lora",
    "max_lora_rank": "train.lora",
    "lora_dtype": "train.device",
    "lora_target_modules": "train.lora",
    "enable_return_routed_experts": "train.trainer.router_replay",
    "speculative_config": "engine.speculation",
}
"""Keys of the run file that arguments follow from."""
REFUSED = {
    "logprobs_mode": "importance weights need those of the distribution that is sampled from",
    "quantization_config": "quantization names a format that new weights can be loaded in",
    "cpu_offload_gb": "new weights can be loaded into parameters in place only",
    "pipeline_parallel_size": "an engine is one stage",
    "distributed_executor_backend": "an engine's workers are processes of one machine",
    "skip_tokenizer_init": "stop strings need the tokenizer",
}
"""They would break a promise of the driver."""
EIGHT_BIT = ("fp8_per_block", "fp8_per_channel", "fp8_per_tensor")
"""Values of ``quantization`` by which linear layers and experts are made from bfloat16, at the start and at every
update. vLLM's ``fp8`` is for checkpoints that are in fp8 already."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks of adapters that vLLM can have room for."""
NGRAM = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
"""Tokens at the end of a sequence that ``ngram`` looks up in it: the most that occur there, at least two."""
BESIDE_SCHEDULER = "vllm.v1.executor.uniproc_executor.UniProcExecutor"  # its short name, "uni", means "mp" on CPU
CUDA = "/usr/local/cuda"
MIN_BATCHED_TOKENS = 8192
"""Of prompts and answers that one decode step may compute, if not more slots."""


def check_version() -> None:
    """Raise ``ConfigError`` if another version of vLLM is installed; it is found, not loaded."""
    text = (_package() / "_version.py").read_text(encoding="utf-8")
    found = re.search(r"^__version__ = .*'(.+)'", text, re.MULTILINE)
    there = found[1] if found else "an unknown version"
    if not there.startswith(f"{VERSION}."):
        raise ConfigError(f"train needs vLLM {VERSION} (backends/vllm/version/ is written for it), got {there}")


def check_arguments(arguments: Mapping[str, Any], *, accelerators: int, device: Literal["cpu", "gpu"]) -> None:
    """Check the arguments of vLLM that a run file gives, as far as names go; the values are vLLM's to judge.

    ``accelerators``: of an engine. ``ConfigError`` if a name is unknown (where vLLM is installed) or decided elsewhere.
    """
    known = _argument_names() if find_spec("vllm") is not None else None
    for name, value in arguments.items():
        if name in DECIDED_BY or name in REFUSED:
            why = f"{DECIDED_BY[name]} decides" if name in DECIDED_BY else REFUSED[name]
            raise ConfigError(f"{KEY}.{name} must be left out, since {why}, got {shown(value)}")
        if known is not None and name not in known:
            near = did_you_mean(name, known)
            raise ConfigError(f"{KEY}.{name} is no argument of vLLM {VERSION}'s engine; {near}got {shown(value)}")
    quantization = arguments.get("quantization")
    if quantization is not None and device == "cpu":
        raise ConfigError(
            f"{KEY}.quantization must be left out on device='cpu', whose engines are in float32, got "
            f"{shown(quantization)}"
        )
    if quantization is not None and quantization not in EIGHT_BIT:
        raise ConfigError(f"{KEY}.quantization must be one of {', '.join(EIGHT_BIT)}, got {shown(quantization)}")
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


def check_speculation(train: TrainConfig, speculation: SpeculationConfig) -> None:
    """Raise ``ConfigError`` if engines could not speculate with these settings, or would break a promise."""
    key, device = "engine.speculation", train.device
    if speculation.method != "ngram":
        if device == "cpu":
            raise ConfigError(f"{key}.method must be 'ngram' on device='cpu', got {speculation.method!r}")
        if speculation.model is None and speculation.method != "mtp":
            raise ConfigError(f"{key}.model is missing; method={speculation.method!r} needs its weights")
    if min_p := train.sampling.min_p:
        raise ConfigError(f"train.sampling.min_p must be 0 with {key}, with which vLLM refuses it, got {min_p:g}")
    if train.trainer.router_replay:
        raise ConfigError(f"train.trainer.router_replay must be false with {key}, got true")


WITHOUT_ROUTES = (
    "kv_transfer_config", "kv_offloading_size", "decode_context_parallel_size", "prefill_context_parallel_size",
)  # fmt: skip
"""Arguments with which vLLM does not return the experts of every token."""


def check_returns_routes(arguments: Mapping[str, Any], device: Literal["cpu", "gpu"], *, caches: bool) -> None:
    """Raise ``ConfigError`` if engines would not return the experts of tokens; ``caches``: prefixes, by default."""
    why = f"on device='cpu', where vLLM {VERSION} does not return experts" if device == "cpu" else ""
    if not arguments.get("enable_prefix_caching", caches):
        why = "without the prefix cache, beside which vLLM keeps the experts"
    if given := [name for name in WITHOUT_ROUTES if name in arguments]:
        why = f"with {KEY}.{given[0]}"
    if why:
        raise ConfigError(f"train.trainer.router_replay must be false {why}, got true")


def check_serves_adapters(model_config: Any, device: Literal["cpu", "gpu"]) -> None:
    """Raise ``ConfigError`` if vLLM's class of a model, found in its source, serves no adapters, or no kernel does."""
    if device == "cpu" and any("experts" in key for key in model_config.to_dict()):
        raise ConfigError("train.lora must be left out for a mixture on device='cpu', where vLLM has no kernel for it")
    models = _package() / "model_executor" / "models"
    registry = (models / "registry.py").read_text(encoding="utf-8")
    for architecture in getattr(model_config, "architectures", None) or ():
        entry = re.search(rf'"{architecture}": \(\s*"(\w+)",\s*"(\w+)"', registry)
        source = entry and (models / f"{entry[1]}.py")
        if entry is None or source is None or not source.exists():
            continue  # vLLM has its own say
        bases = re.search(rf"^class {entry[2]}\(([^)]*)\)", source.read_text(encoding="utf-8"), re.MULTILINE)
        if bases is not None and "SupportsLoRA" not in bases[1] and "ForCausalLM" not in bases[1]:
            raise ConfigError(
                f"train.lora must be left out for {architecture}, whose class in vLLM {VERSION} takes none"
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


def has_compiler() -> bool:
    """Return whether CUDA's compiler is on this machine, where FlashInfer looks for it."""
    return which("nvcc", path=f"{os.environ.get('PATH', '')}:{os.environ.get('CUDA_HOME', CUDA)}/bin") is not None


def engine_arguments(settings: VLLMSettings) -> dict[str, Any]:
    """Return the arguments of vLLM's engine; the run file overrides our defaults where nothing depends on them."""
    replicas = settings.arguments.get("data_parallel_size", 1)
    on_cpu = settings.device == "cpu"
    ours: dict[str, Any] = {
        "enforce_eager": on_cpu,
        "max_num_batched_tokens": max(MIN_BATCHED_TOKENS, settings.num_slots),
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }
    if settings.tensor_parallel > replicas and not on_cpu and not has_compiler():
        # Else FlashInfer would compile it with nvcc at the first start.
        ours["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    fixed = {
        "model": settings.model_path,
        "dtype": "float32" if on_cpu else "bfloat16",
        "max_model_len": settings.max_tokens,
        "max_num_seqs": math.ceil(settings.num_slots / replicas),
        "tensor_parallel_size": settings.tensor_parallel // replicas,
        "distributed_executor_backend": BESIDE_SCHEDULER if on_cpu and settings.tensor_parallel == 1 else "mp",
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enable_sleep_mode": settings.colocated and not on_cpu,
        "logprobs_mode": "processed_logprobs",
    }
    if settings.routes:
        fixed["enable_return_routed_experts"] = True
    if settings.speculation is not None:
        fixed["speculative_config"] = _speculative(settings.speculation, settings.num_slots)
    if settings.lora is not None:
        from backends.lora import TARGETS

        room = next(rank for rank in LORA_RANKS if rank >= settings.lora.rank)
        fixed |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": room, "lora_target_modules": list(TARGETS)}
    return {**ours, **settings.arguments, **fixed}


def _speculative(speculation: SpeculationConfig, num_slots: int) -> dict[str, Any]:
    """Return vLLM's settings of speculative decoding."""
    tokens, limit = speculation.tokens, speculation.off_above
    given: dict[str, Any] = {"method": speculation.method, "num_speculative_tokens": tokens}
    if speculation.method == "ngram":
        given |= NGRAM
    if speculation.model is not None:
        given["model"] = speculation.model
    if limit is not None and limit < num_slots:
        given["num_speculative_tokens_per_batch_size"] = [(1, limit, tokens), (limit + 1, num_slots, 0)]
    return given
