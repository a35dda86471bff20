"""The hardware of a run in explicit numbers, by one precedence rule, and its scheduler.

A table that the run file gives stays as it is; a missing one is derived from ``hardware.gpu`` and ``hardware.model``;
without these two it costs nothing. Coefficients follow the same rule: ``hardware.coefficients``, then
``[train]``, then the transport, then ``hardware.engine`` and ``hardware.software``, then the level. Weights
travel as ``hardware.weight_sync`` or ``hardware.coefficients`` says, else ``[train]``, else ``hardware.software``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from pipelinerl.config.engine import GenerationConfig
from pipelinerl.config.environment import PrefixCaching
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.hardware import derive
from pipelinerl.hardware.catalogue import Gpu, LanguageModel, find_gpu, find_model, in_engine
from pipelinerl.hardware.coefficients import Coefficients, coefficients
from pipelinerl.hardware.costs import HardwareConfig, PhaseSwitchConfig, PrefillConfig, ResolvedHardware
from pipelinerl.hardware.stack import find_stack
from pipelinerl.hardware.transport import ROOT_LAW, UNKNOWN, WeightTransferConfig, WeightTransport, changed_share
from pipelinerl.scheduler.base import Scheduler
from pipelinerl.scheduler.kinds import make_scheduler
from pipelinerl.util.explain import explain
from pipelinerl.util.strict_model import StrictModel


def new_scheduler(config: RunConfig) -> Scheduler:
    """Return a fresh scheduler; with environments it knows the KV cache, and raises as ``resolved_hardware``."""
    environments, kv_cache_tokens = config.environment, config.hardware.kv_cache_tokens
    if environments is not None:
        keeps = environments.prefix_cache is not PrefixCaching.OFF and environments.turns.max > 1
        if not keeps or config.generation is not None:
            kv_cache_tokens = 0
        elif kv_cache_tokens is None:
            kv_cache_tokens = resolved_hardware(config).kv_cache_tokens
    return make_scheduler(
        config.scheduler,
        optimizer_steps=config.optimizer_steps,
        num_engines=config.num_engines,
        group_size=config.workload.group_size,
        environments=None if environments is None else environments.count,
        kv_cache_tokens=kv_cache_tokens,
    )


def resolved_hardware(config: RunConfig, *, longest_tokens: int | None = None) -> ResolvedHardware:
    """Return the hardware of a run with every table as explicit numbers.

    ``longest_tokens``: longest rollout of an engine, prompt included (tokens). None: by the run file.
    Raises ConfigError if GPU or model are unknown, or the model or the longest rollout do not fit.
    """
    given = config.hardware
    tables: dict[str, Any] = {name: getattr(given, name) for name in type(given).model_fields}
    missing: Mapping[str, Any] = {
        "prefill": PrefillConfig(),
        "weights": WeightTransferConfig(),
        "switch": PhaseSwitchConfig(),
    }
    if (named := named_hardware(given)) is not None:
        gpu, model = named
        engine = named_engine(given, gpu, model)
        tensor_parallel, trainers = config.cluster.tensor_parallel, config.training_accelerators
        longest = config.longest_rollout_tokens if longest_tokens is None else longest_tokens
        values = run_coefficients(config, gpu, model, training_accelerators=trainers, longest=longest)
        if given.kv_cache_tokens is None:
            derive.check_fits(*engine, tensor_parallel=tensor_parallel, coefficients=values, longest=longest)
        try:
            derived = derive.derive_hardware(
                gpu,
                model,
                tensor_parallel=tensor_parallel,
                training_accelerators=trainers,
                colocated=config.colocated,
                coefficients=values,
                zero_stage=zero_stage_of(config),
                engine=engine,
                sequences=config.scheduler.generation_batch_size,
                longest=longest,
                transport=transport_of(config),
                sequence_parallel=sequence_parallel_of(config),
            )
        except ValidationError as error:
            raise ConfigError(
                "hardware.gpu, hardware.model and hardware.coefficients give a table that a run file could not have: "
                f"{error.title}.{explain(error, StrictModel)[0]}"
            ) from None
        missing = {name: getattr(derived, name) for name in type(derived).model_fields}
    tables |= {name: missing[name] for name, value in tables.items() if value is None and name in missing}
    return ResolvedHardware.model_construct(**tables)


def named_hardware(hardware: HardwareConfig) -> tuple[Gpu, LanguageModel] | None:
    """Return the accelerator and model of ``[hardware]``; None if it names none. ConfigError if one is unknown."""
    if hardware.gpu is None or hardware.model is None:
        return None
    return find_gpu(hardware.gpu), find_model(hardware.model)


def named_engine(hardware: HardwareConfig, gpu: Gpu, model: LanguageModel) -> tuple[Gpu, LanguageModel]:
    """Return accelerator and model as the engines have them; ConfigError if ``generation_gpu`` is unknown."""
    if hardware.generation_gpu is not None:
        gpu = find_gpu(hardware.generation_gpu, key="hardware.generation_gpu")
    return in_engine(gpu, model, hardware.engine_weights, hardware.kv_cache)


def cache_transfer_s(config: RunConfig, generation: GenerationConfig) -> float:
    """Return the seconds per token in which a KV cache gets from a prefill to a decode engine, every GPU its part."""
    named = named_hardware(config.hardware)
    if generation.transfer_token_s is not None or named is None:
        return generation.transfer_token_s or 0.0
    gpu, model = named_engine(config.hardware, *named)
    size = config.cluster.tensor_parallel
    return model.cached_bytes(size) / (size * gpu.network)


def transport_of(config: RunConfig, *, colocated: bool | None = None) -> WeightTransport:
    """Return the transport of a run; ``colocated`` None: as in the run."""
    given, colocated = config.hardware, config.colocated if colocated is None else colocated
    if given.sync_method is not None:
        return given.sync_method
    if ROOT_LAW in given.coefficients:
        return UNKNOWN
    if config.train is not None:
        return config.train.chosen_transport(colocated=colocated)
    software = find_stack("software", given.software)
    return UNKNOWN if software is None else software.transports.get(colocated, UNKNOWN)


def stated_coefficients(config: RunConfig) -> dict[str, float]:
    """Return the coefficients that a run file states: of ``[train]``, and ``hardware.coefficients``."""
    stated: dict[str, float] = {}
    if config.train is not None:
        trainer = config.train.trainer
        recomputed, layers = trainer.activation_checkpointing, 1  # true: all, since memory is counted by torch only
        if not isinstance(recomputed, bool) and (named := named_hardware(config.hardware)) is not None:
            layers = named[1].layers
        stated = {"recomputation": min(1.0, recomputed / layers), "pack_tokens": float(trainer.pack_tokens)}
        if config.train.lora is not None:
            stated["adapter_rank"] = float(config.train.lora.rank)
        if trainer.sequence_parallel > 1:
            stated["sequence_accelerators"] = float(trainer.sequence_parallel)
        steps = config.scheduler.publish_every  # taken to move all weights on and on
        share = changed_share(steps * config.train.optimizer.learning_rate, config.hardware.level)
        stated["changed_share"] = share
    return {**stated, **config.hardware.coefficients}


def named_coefficients(config: RunConfig) -> dict[str, float]:
    """Return the coefficients that differ from the level's: of engine, software, transport, and stated ones."""
    given = config.hardware
    transport = transport_of(config).stated(given.level)
    return {**given.named_coefficients, **transport, **stated_coefficients(config)}


def run_coefficients(
    config: RunConfig, gpu: Gpu, model: LanguageModel, *, training_accelerators: int, longest: int
) -> Coefficients:
    """Return the coefficients of a run; a level's ``pack_tokens`` fits its trainer, but is not below ``longest``.

    Raises ConfigError if a coefficient is unknown, or a value is out of range.
    """
    values = coefficients(config.hardware.level, named_coefficients(config))
    if "pack_tokens" in stated_coefficients(config):
        return values
    fits = derive.pack_that_fits(
        model,
        memory_bytes=values.memory_share * gpu.memory_bytes,
        accelerators=training_accelerators,
        zero_stage=zero_stage_of(config),
        recomputation=values.recomputation,
        adapter_rank=values.adapter_rank,
    )
    needed = longest / min(int(values.sequence_accelerators), training_accelerators)
    return values.model_copy(update={"pack_tokens": max(needed, min(values.pack_tokens, fits))})


def run_trainer_fits(
    config: RunConfig, gpu: Gpu, model: LanguageModel, *, training_accelerators: int, longest: int
) -> bool:
    """Return whether training fits into the memory of its accelerators; arguments as for ``run_coefficients``."""
    values = run_coefficients(config, gpu, model, training_accelerators=training_accelerators, longest=longest)
    needed = _trainer_bytes(config, model, values, training_accelerators, values.pack_tokens)
    return needed <= values.memory_share * gpu.memory_bytes * (1 + derive.ROUNDING)


def _trainer_bytes(
    config: RunConfig, model: LanguageModel, values: Coefficients, accelerators: int, pack_tokens: float
) -> float:
    """Return the memory of one accelerator that trains (bytes)."""
    return derive.training_memory(
        model,
        accelerators=accelerators,
        zero_stage=zero_stage_of(config),
        pack_tokens=pack_tokens,
        recomputation=values.recomputation,
        adapter_rank=values.adapter_rank,
        sequence_parallel=sequence_parallel_of(config),
    ).total


def least_memory(
    config: RunConfig, gpu: Gpu, model: LanguageModel, *, tensor_parallel: int, training_accelerators: int, longest: int
) -> list[float]:
    """Return the least memory of an engine and of a trainer, each over its share of an accelerator.

    An engine holds the weights and the longest rollout; packs are the run file's, or no larger than that rollout.
    """
    values = run_coefficients(config, gpu, model, training_accelerators=training_accelerators, longest=longest)
    pack = longest / min(int(values.sequence_accelerators), training_accelerators)
    if "pack_tokens" in stated_coefficients(config):
        pack = values.pack_tokens
    trainer = _trainer_bytes(config, model, values, training_accelerators, pack)
    engine, own = named_engine(config.hardware, gpu, model)
    held = own.weight_bytes * own.parameters + own.state_bytes + longest * own.cached_bytes(tensor_parallel)
    needed = (values.memory_reserve_bytes + held / tensor_parallel) / (values.memory_share * engine.memory_bytes)
    shares = [] if config.hardware.kv_cache_tokens is not None else [needed]
    return [*shares, trainer / (values.memory_share * gpu.memory_bytes)]


def zero_stage_of(config: RunConfig) -> int:
    """Return the ZeRO stage that a run file states, or 3, which the formulas of training assume."""
    return derive.ZERO_STAGE if config.train is None else config.train.trainer.zero_stage


def sequence_parallel_of(config: RunConfig) -> int:
    """Return the ranks that share rows, as a run file states, or 1."""
    return 1 if config.train is None else config.train.trainer.sequence_parallel
