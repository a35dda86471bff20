"""The empirical numbers of the hardware model: three values each, with their sources, in ``coefficients.toml``."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from pipelinerl.errors import ConfigError
from pipelinerl.util.explain import explain
from pipelinerl.util.read import read_toml
from pipelinerl.util.strict_model import StrictModel


class Level(StrEnum):
    """One of the three values of every coefficient."""

    OPTIMISTIC = "optimistic"
    """As fast as kernels and links allow, or as the best published measurement."""
    CENTRAL = "central"
    """The expected value in a well-run system."""
    PESSIMISTIC = "pessimistic"
    """The slowest published measurement that is no mistake."""


SHARES_OF_PEAK = ("weight_efficiency", "kv_efficiency", "flops_efficiency", "prefill_mfu", "training_mfu")
"""Coefficients in inverse proportion to the times they decide; the others that are fitted are in proportion."""


class Coefficients(StrictModel):
    """Every empirical number of the hardware model, one value each."""

    weight_efficiency: float = Field(gt=0, le=1)
    """Share of the memory bandwidth reached while a decode step reads weights."""
    kv_efficiency: float = Field(gt=0, le=1)
    """Share of the memory bandwidth reached while a decode step reads the KV cache."""
    flops_efficiency: float = Field(gt=0, le=1)
    """Share of the peak FLOP/s reached by the matrix products of a decode step."""
    step_overhead_s: float = Field(ge=0)
    """Fixed time of a decode step (seconds)."""
    layer_overhead_s: float = Field(ge=0)
    """Fixed time of a decode step per layer: kernels that read neither weights nor KV cache (seconds)."""
    sequence_overhead_s: float = Field(ge=0)
    """Time of a decode step per sequence (seconds)."""
    allreduce_s: float = Field(ge=0)
    """One all-reduce in a decode step under tensor parallelism, two per layer, without its bytes (seconds)."""
    node_allreduce_s: float = Field(ge=0)
    """The same of an engine over several nodes (seconds)."""
    allreduce_share: float = Field(gt=0, le=1)
    """Share of the link's bytes/s that the bytes of an all-reduce reach."""
    expert_layer_s: float = Field(ge=0)
    """Products of routed experts, per decode step and layer, independent of the bytes read (seconds)."""
    generation_rest_share: float = Field(ge=0)
    """Share by which generation takes longer than the engines' steps: front ends, queues, the driver's loop."""
    prefill_mfu: float = Field(gt=0, le=1)
    """Share of the peak FLOP/s reached by prefill."""
    memory_share: float = Field(gt=0, le=1)
    """Share of the memory that an engine may use."""
    memory_reserve_bytes: float = Field(ge=0)
    """Part of that memory for activations, graphs, libraries (bytes per accelerator)."""
    training_mfu: float = Field(gt=0, le=1)
    """Share of the peak FLOP/s reached by the matrix products of training; a published MFU is lower."""
    activation_traffic: float = Field(ge=0)
    """Times that every number kept for the backward pass moves through the memory, forward and backward (count)."""
    attention_flops_per_byte: float = Field(gt=0)
    """FLOP of attention in training per byte of memory bandwidth, if its matrix products cost nothing, with
    FlashAttention 2; the catalogue has the factor of an accelerator with a faster kernel."""
    recomputation: float = Field(ge=0, le=1)
    """Share of the forward pass that the backward pass makes again."""
    expert_mfu_factor: float = Field(gt=0, le=1)
    """Factor on the speed of training a model with routed experts, for their small products."""
    exchange_exposed: float = Field(ge=0, le=1)
    """Share of the exchange of tokens between experts in training that computing does not hide."""
    training_step_s: float = Field(ge=0)
    """Fixed time of an optimizer step (seconds)."""
    training_micro_batch_s: float = Field(ge=0)
    """Fixed time of a micro-batch (seconds)."""
    gather_exposed: float = Field(ge=0, le=1)
    """Share of the gathers of weights and reductions of gradients that computing does not hide."""
    training_rest_share: float = Field(ge=0)
    """Share by which a trainer apart from the engines takes longer: data, logging and the like."""
    pack_tokens: float = Field(gt=0)
    """Tokens of one forward and backward pass on one accelerator, between two gathers of the weights (count)."""
    sequence_accelerators: float = Field(ge=1)
    """Accelerators that share one sequence in training (count); the fraction is dropped."""
    extra_forward_passes: float = Field(ge=0)
    """Forward passes per trained token besides the training pass: old or reference log-probabilities (count)."""
    log_probability_cost: float = Field(ge=0)
    """What such a pass costs, in forward passes of training (no unit)."""
    sync_s_per_root_gb: float = Field(ge=0)
    """A weight synchronization lasts this times the root of the GB of its weights (seconds)."""
    pause_share: float = Field(ge=0, le=1)
    """Share of the transfer for which engines apart from the trainer stand still."""
    pause_s: float = Field(ge=0)
    """Pause of an engine for an update, besides the transfer (seconds)."""
    stream_bandwidth: float = Field(gt=0)
    """Of weights on their way from machine to machine, one stream, verified on arrival (bytes/s)."""
    file_bandwidth: float = Field(gt=0)
    """Of a file of weights in a machine's memory, written or read, with its checksum (bytes/s)."""
    switch_to_training_s: float = Field(ge=0)
    """Time of the phase switch to training, besides moving states (seconds)."""
    switch_to_generation_s: float = Field(ge=0)
    """Time of the phase switch to generation, besides moving states (seconds)."""
    host_bandwidth: float = Field(gt=0)
    """Bandwidth between an accelerator and its host's memory, where colocated training keeps its states (bytes/s)."""
    changed_share: float = Field(gt=0, le=1)
    """Share of the bf16 numbers that change from one published version to the next."""
    delta_bandwidth: float = Field(gt=0)
    """Of these on their way: from rank 0 to patched rows on all machines (bytes/s)."""
    adapter_rank: float = Field(ge=0)
    """Rank of the adapters that are trained in place of all weights (LoRA); 0: all weights."""


def coefficients(level: Level, changed: Mapping[str, float] | None = None) -> Coefficients:
    """Return a level's coefficients, some ``changed``; ConfigError if a name is unknown or a value out of range."""
    try:
        return checked_coefficients(level, changed or {})
    except ValueError as error:
        raise ConfigError(f"hardware.{error}") from None


def checked_coefficients(level: Level, changed: Mapping[str, float]) -> Coefficients:
    """Return the coefficients of a level with some changed; a ValueError names the key under ``hardware``."""
    values = {name: entry[level.value] for name, entry in coefficient_table().items()}
    try:
        return Coefficients.model_validate({**values, **changed})
    except ValidationError as error:
        raise ValueError(f"coefficients.{explain(error, Coefficients)[0]}") from None


@functools.cache
def coefficient_table() -> Mapping[str, Mapping[str, Any]]:
    """Return coefficients.toml: per name ``optimistic``, ``central``, ``pessimistic`` and ``source``."""
    return read_toml(Path(__file__).parent / "data" / "coefficients.toml", "the coefficients")
