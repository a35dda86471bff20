"""The tables of ``[hardware]``: the speed of a cluster in numbers."""

from __future__ import annotations

from operator import not_
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from pipelinerl.hardware.catalogue import Precision
from pipelinerl.hardware.coefficients import Level, checked_coefficients
from pipelinerl.hardware.transport import PUBLISHED, WeightTransferConfig, WeightTransport, find_transport
from pipelinerl.util.strict_model import CachedTokens, Count, PositiveSeconds, Seconds, StrictModel


class TimedTable(StrictModel):
    """A table of times; each field is in one of four tuples, by how it changes when the work is slower."""

    SECONDS: ClassVar[tuple[str, ...]] = ()
    """Fields that grow in proportion to all times."""
    RATES: ClassVar[tuple[str, ...]] = ()
    """Peaks of the accelerator, in inverse proportion to all times."""
    SHARES: ClassVar[tuple[str, ...]] = ()
    """Shares of these peaks that the software reaches, at most 1, in inverse proportion to all times."""
    SIZES: ClassVar[tuple[str, ...]] = ()
    """Fields that do not depend on speed."""

    def on_slower_accelerators(self, factor: float) -> Self:
        """Return the table with all times ``factor`` times as long, by times and peaks."""
        return self._scaled(factor, {name: getattr(self, name) / factor for name in self.RATES})

    def with_slower_software(self, factor: float) -> Self:
        """Return the table with all times ``factor`` times as long, by times and shares of the peaks."""
        return self._scaled(factor, {name: min(1.0, getattr(self, name) / factor) for name in self.SHARES})

    def _scaled(self, factor: float, others: dict[str, float]) -> Self:
        seconds = {name: getattr(self, name) * factor for name in self.SECONDS}
        return self.model_copy(update={**seconds, **others})


class UtilisationDecode(TimedTable):
    """The paper's appendix A: a step of h sequences costs h/U(h) flashes, whatever their context."""

    SECONDS = ("flash_s",)
    SIZES = ("kind", "table")

    kind: Literal["utilisation"]
    flash_s: PositiveSeconds
    """Seconds of one flash: FLOPs per token / peak FLOP/s (eq. 9)."""
    table: str | None = None
    """CSV file with columns ``batch,utilisation``. None: the paper's curve."""


class AffineDecode(TimedTable):
    """A decode step costs step_s + sequence_s * b + context_token_s * (context tokens of all b sequences)."""

    SECONDS = ("step_s", "sequence_s", "context_token_s")
    SIZES = ("kind",)

    kind: Literal["affine"]
    step_s: PositiveSeconds
    """Seconds per step, whatever it holds."""
    sequence_s: Seconds = 0.0
    """Seconds per step and sequence."""
    context_token_s: Seconds = 0.0
    """Seconds per step and token of context."""


class RooflineDecode(TimedTable):
    """max(read the weights, multiply) + read the KV cache + overhead, from the figures of GPU and model."""

    SECONDS = ("step_overhead_s", "sequence_overhead_s")
    RATES = ("peak_flops", "bandwidth")
    SHARES = ("weight_efficiency", "kv_efficiency", "flops_efficiency")
    SIZES = (
        "kind", "parameters_read", "parameters_active", "bytes_per_parameter", "kv_bytes_per_token", "experts",
        "experts_per_token", "expert_parameters",
    )  # fmt: skip

    kind: Literal["roofline"]
    peak_flops: float = Field(gt=0)
    """Dense peak of one accelerator (FLOP/s)."""
    bandwidth: float = Field(gt=0)
    """Memory bandwidth of one accelerator (bytes/s)."""
    parameters_read: float = Field(gt=0)
    """Parameters read in every step: without input embedding and routed experts (count)."""
    parameters_active: float = Field(gt=0)
    """Parameters that multiply for one token (count)."""
    bytes_per_parameter: float = Field(default=2.0, gt=0)
    """Bytes of one weight."""
    kv_bytes_per_token: float = Field(ge=0)
    """Bytes of KV cache per token of context."""
    experts: Count | None = None
    """Routed experts of one layer (count)."""
    experts_per_token: Count | None = None
    """Routed experts per token and layer (count)."""
    expert_parameters: float | None = Field(default=None, gt=0)
    """Parameters of all routed experts (count)."""
    weight_efficiency: float = Field(default=0.72, gt=0, le=1)
    """Share of the bandwidth reached by weights (no unit)."""
    kv_efficiency: float = Field(default=0.75, gt=0, le=1)
    """Share of the bandwidth reached by the KV cache (no unit)."""
    flops_efficiency: float = Field(default=0.7, gt=0, le=1)
    """Share of the peak reached by products (no unit)."""
    step_overhead_s: Seconds = 1.2e-3
    """Seconds per step of the engine itself."""
    sequence_overhead_s: Seconds = 1.07e-5
    """Seconds per step and sequence of the engine itself."""

    @model_validator(mode="after")
    def _units_are_plausible(self) -> Self:
        for name, unit, example in (("peak_flops", "FLOP/s", "989e12"), ("bandwidth", "bytes/s", "3.35e12")):
            if not 1e9 <= (value := getattr(self, name)) <= 1e18:
                raise ValueError(f"{name} must be from 1e+09 to 1e+18 {unit}, got {value:g}; did you mean {example}?")
        return self

    @model_validator(mode="after")
    def _experts_are_complete(self) -> Self:
        names = ("experts", "experts_per_token", "expert_parameters")
        missing = [name for name in names if getattr(self, name) is None]
        if 0 < len(missing) < len(names):
            raise ValueError(f"{missing[0]} is missing; experts, experts_per_token and expert_parameters go together")
        if self.experts is not None and self.experts_per_token is not None and self.experts_per_token > self.experts:
            raise ValueError(
                "experts_per_token must be at most experts, got "
                f"experts_per_token={self.experts_per_token}, experts={self.experts}"
            )
        return self


Decode = Annotated[UtilisationDecode | AffineDecode | RooflineDecode, Field(discriminator="kind")]


class PrefillConfig(TimedTable):
    """Seconds to fill the KV cache of one sequence of n tokens: sequence_s + token_s * n + token_squared_s * n^2."""

    SECONDS = ("sequence_s", "token_s", "token_squared_s")

    sequence_s: Seconds = 0.0
    """Seconds per sequence."""
    token_s: Seconds = 0.0
    """Seconds per token."""
    token_squared_s: Seconds = 0.0
    """Seconds per squared token (attention)."""


class TrainingConfig(TimedTable):
    """Seconds of training: per optimizer step, per micro-batch, and per token over the accelerators that train.

    With ``sequence_accelerators`` a micro-batch lasts as long as its fullest rank (docs/hardware.md has the bound).
    """

    SECONDS = ("token_s", "token_squared_s", "step_s", "micro_batch_s")
    SIZES = ("sequence_accelerators",)

    token_s: Seconds
    """Accelerator-seconds per token, prompts included. Paper symbol tau (in flashes)."""
    token_squared_s: Seconds = 0.0
    """Accelerator-seconds per squared token of a sequence (attention)."""
    step_s: Seconds = 0.0
    """Seconds per optimizer step, whatever it holds."""
    micro_batch_s: Seconds = 0.0
    """Seconds per micro-batch, whatever it holds."""
    sequence_accelerators: Count | None = None
    """Accelerators that share one sequence, 1 under ZeRO (count). None: all share all tokens evenly."""


class PhaseSwitchConfig(StrictModel):
    """Seconds in which colocated accelerators neither generate nor train."""

    to_training_s: Seconds = 0.0
    """Seconds from the end of generation to the start of training."""
    to_generation_s: Seconds = 0.0
    """Seconds from the end of publishing to generation."""


class LatencyConfig(StrictModel):
    """Seconds that pass outside engines and trainer."""

    dispatch_s: Seconds = 0.0
    """Least seconds from the decision to the rollout's arrival at its engine."""
    dispatch_jitter_s: Seconds = 0.0
    """Mean of an exponential delay on top of ``dispatch_s`` (s)."""
    request_s: Seconds = Field(default=0.0, exclude_if=not_)
    """Seconds of an engine's front end per rollout, one after the other, before ``dispatch_s``."""
    report_s: Seconds = Field(default=0.0, exclude_if=not_)
    """Seconds from the last token of a rollout to its report; its slot stays taken."""
    reward_s: Seconds = 0.0
    """Seconds to score a finished rollout."""
    reward_workers: Count | None = Field(default=None, exclude_if=not_)
    """Rollouts scored at a time (count). None: all."""
    preprocess_s: Seconds = 0.0
    """Seconds to prepare a scored rollout for training."""

    def rewards_s(self, rollouts: int) -> float:
        """Return the seconds in which ``reward_workers`` score so many rollouts."""
        return 0.0 if self.reward_workers is None else rollouts * self.reward_s / self.reward_workers


class HardwareConfig(StrictModel):
    """Speed of the cluster. Read by the simulator only.

    With ``gpu`` and ``model`` every table that is not given is derived (``pipelinerl.hardware.derive``).
    """

    gpu: str | None = None
    """Accelerator: a name of the catalogue, or a TOML file."""
    generation_gpu: str | None = Field(default=None, exclude_if=not_)
    """Accelerator of the engines. None: ``gpu``."""
    model: str | None = None
    """Model: a name of the catalogue, a TOML file, a Hugging Face ``config.json``."""
    level: Level = Field(default=Level.CENTRAL, strict=False)
    """Value of every coefficient."""
    weight_sync: str | None = None
    """Method of weight synchronization: one of the catalogue, or ``package.module:ATTRIBUTE`` of a
    ``WeightTransport``. None: unknown, a wide band."""
    engine_weights: Precision = Field(default=Precision.BF16, strict=False)
    """Format of the weights in the engines."""
    kv_cache: Precision = Field(default=Precision.BF16, strict=False)
    """Format of the KV cache."""
    coefficients: dict[str, float] = {}
    """Coefficients by name, instead of the level's."""
    decode: Decode | None = None
    """Decode step. None: derived from gpu and model."""
    prefill: PrefillConfig | None = None
    """Filling the KV cache of a prompt. None: derived, or free."""
    kv_cache_tokens: CachedTokens | None = None
    """KV cache of one engine (tokens). None: derived from gpu and model, else unlimited."""
    step_tokens: Count | None = Field(default=None, exclude_if=not_)
    """Most tokens of an engine's step, vLLM's ``max_num_batched_tokens``: prefill is cut into chunks. None: it is not
    cut."""
    training: TrainingConfig | None = None
    """The trainer's step. None: derived from gpu and model."""
    weights: WeightTransferConfig | None = None
    """Transfer of new weights to the engines. None: derived, or free."""
    switch: PhaseSwitchConfig | None = None
    """The phase switch of colocated accelerators. None: derived, or free."""
    latency: LatencyConfig = LatencyConfig()
    """Delays outside engines and trainer."""

    @property
    def by_name(self) -> bool:
        """Whether tables that are not given are derived from gpu and model."""
        return self.gpu is not None

    @property
    def sync_method(self) -> WeightTransport | None:
        """The transport that ``weight_sync`` names."""
        return (self.weight_sync and find_transport(self.weight_sync, key="weight_sync", among=PUBLISHED)) or None

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if (self.gpu is None) != (self.model is None):
            missing, given = ("gpu", "model") if self.gpu is None else ("model", "gpu")
            raise ValueError(f"{missing} is missing; hardware.{given} needs it")
        for name in ("decode", "training"):
            if not self.by_name and getattr(self, name) is None:
                raise ValueError(f"{name} is missing")
        for name in ("generation_gpu", "weight_sync", "coefficients", "engine_weights", "kv_cache"):
            if not self.by_name and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} needs hardware.gpu and hardware.model, which are missing")
        checked_coefficients(self.level, self.coefficients)
        _ = self.sync_method
        return self


class ResolvedHardware(HardwareConfig):
    """Hardware with numbers in every table, as the simulator reads it."""

    decode: Decode
    """One decode step of an engine."""
    prefill: PrefillConfig
    """Filling the KV cache of a prompt."""
    training: TrainingConfig
    """The trainer's step."""
    weights: WeightTransferConfig
    """Transfer of new weights to the engines."""
    switch: PhaseSwitchConfig
    """The phase switch of colocated accelerators."""
