"""The tables of ``[hardware]``, the speed of a cluster in numbers, and the only formulas of seconds from them.

Simulator, steady state and calibration call these, with numbers or with arrays; docs/hardware.md has the reasons.
The order of the operations is fixed: another order changes last digits, and with them the bytes of results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul, not_
from typing import Annotated, ClassVar, Literal, Self, TypeVar, assert_never

import numpy as np
from pydantic import Field, model_validator

from pipelinerl.hardware.catalogue import Precision
from pipelinerl.hardware.coefficients import Level, checked_coefficients
from pipelinerl.hardware.stack import stack_levels
from pipelinerl.hardware.transport import PUBLISHED, WeightTransferConfig, WeightTransport, find_transport
from pipelinerl.hardware.utilisation import fitted_utilisation, read_utilisation
from pipelinerl.util.arrays import FloatArray
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
    engine: str | None = Field(default=None, exclude_if=not_)
    """Inference engine and version (docs/hardware.md). None: the newest that is known."""
    software: str | None = Field(default=None, exclude_if=not_)
    """Training software and version, for the seconds beside generation and training. None: a wide band."""
    weight_sync: str | None = None
    """Method of weight synchronization: one of the catalogue, or ``package.module:ATTRIBUTE`` of a
    ``WeightTransport``. None: ``software`` has one."""
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

    @property
    def named_coefficients(self) -> dict[str, float]:
        """The coefficients of ``engine`` and ``software`` at the level, and ``coefficients``, which go first."""
        stacks = stack_levels(self.engine, self.software)
        return {**{name: one[self.level] for name, one in stacks.items()}, **self.coefficients}

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if (self.gpu is None) != (self.model is None):
            missing, given = ("gpu", "model") if self.gpu is None else ("model", "gpu")
            raise ValueError(f"{missing} is missing; hardware.{given} needs it")
        for name in ("decode", "training"):
            if not self.by_name and getattr(self, name) is None:
                raise ValueError(f"{name} is missing")
        named = "generation_gpu engine software weight_sync coefficients engine_weights kv_cache"
        for name in named.split():
            if not self.by_name and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} needs hardware.gpu and hardware.model, which are missing")
        checked_coefficients(self.level, self.named_coefficients)
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


# ---------------------------------------------------------------------------------------- formulas

Number = TypeVar("Number", float, FloatArray)


@dataclass(frozen=True, slots=True)
class Speculation:
    """How engines draft: ``engine.speculation``, as the formulas read it."""

    tokens: int
    """Tokens drafted per sequence and step (count)."""
    draft_cost: float
    """Time to draft a token for the batch, over that of a step without speculation."""
    off_above: int | None
    """Sequences above which a step is a plain one (count). None: never."""
    acceptances: tuple[float, ...]
    """Acceptance of the versions of the policy, each of which gives as many tokens."""

    @property
    def mean_steps(self) -> float:
        """Steps with drafts per token of a sequence, mean over the versions."""
        return sum(1 / tokens_per_step(one, self.tokens) for one in self.acceptances) / len(self.acceptances)


class DecodeStep:
    """Seconds of a decode step, tabulated up to ``most`` sequences; ConfigError for an unreadable utilisation table.

    With ``speculation`` a step that drafts computes k + 1 tokens a sequence, reads the KV cache once, and takes k *
    draft_cost times a step without on top; ``of`` and ``of_all`` are then seconds per token of a sequence.
    """

    def __init__(
        self, decode: Decode, *, tensor_parallel: int, most: int, speculation: Speculation | None = None
    ) -> None:
        self._batch_N = np.arange(most + 2)
        self._seconds_N = _whole_batch_s(decode, tensor_parallel, np.maximum(self._batch_N, 1.0))
        self.context_s = context_token_s(decode, tensor_parallel)
        """Seconds per token of context of all sequences together."""
        self.draft_context_s = 0.0
        """The same on top, where a step drafts."""
        self.step_tokens = 1.0
        """Mean tokens of a sequence per step."""
        self._per_token_N: tuple[FloatArray, FloatArray] | None = None  # without context, and per token of context
        if speculation is not None:
            drafted, limit, steps = speculation.tokens, speculation.off_above, speculation.mean_steps
            drafts_N = self._batch_N <= (most + 1 if limit is None else limit)
            verify_N = _whole_batch_s(decode, tensor_parallel, np.maximum(self._batch_N, 1.0), tokens=drafted + 1)
            drafting = drafted * speculation.draft_cost
            self._seconds_N = np.where(drafts_N, verify_N + drafting * self._seconds_N, self._seconds_N)
            self.draft_context_s, self.step_tokens = drafting * self.context_s, 1 / steps
            steps_N = np.where(drafts_N, steps, 1.0)
            context_N = (self.context_s + self.draft_context_s * drafts_N) * steps_N
            self._per_token_N = self._seconds_N * steps_N, context_N
        self.batch_s: list[float] = self._seconds_N.tolist()
        """Seconds without context by number of sequences, 0 .. ``most`` + 1; 0 as 1, a step holds a sequence."""

    def of(self, batch: float, context_tokens: float) -> float:
        """Return the seconds of a step by sequences, at most ``most`` (a fraction is a mean), and all their context."""
        if self._per_token_N is not None:
            return float(self.of_all(np.array(batch), np.array(context_tokens)))
        below = int(batch)
        low, high = self.batch_s[below : below + 2]
        return low + (high - low) * (batch - below) + self.context_s * context_tokens

    def of_all(self, batch: FloatArray, context_tokens: FloatArray) -> FloatArray:
        """Return ``of``, elementwise."""
        seconds_N, context_s = self._seconds_N, np.array(self.context_s)
        if self._per_token_N is not None:
            seconds_N, context_s = self._per_token_N[0], np.interp(batch, self._batch_N, self._per_token_N[1])
        seconds: FloatArray = np.interp(batch, self._batch_N, seconds_N) + context_s * context_tokens
        return seconds


def tokens_per_step(acceptance: float, drafted: int) -> float:
    """Return the mean tokens of a sequence per step: 1 + a + a^2 + ... + a^k, for k = ``drafted``.

    Each drafted token is accepted with probability a = ``acceptance`` if those before it are, and the step samples one
    more: (1 - a^(k+1)) / (1 - a). Source: Leviathan, Kalman and Matias 2023 (arXiv:2211.17192), Eq. 1.
    """
    return sum(acceptance**accepted for accepted in range(drafted + 1))


def acceptance_of(tokens: float, drafted: int) -> float:
    """Return the acceptance that gives so many ``tokens_per_step``, at least 0 and at most 1."""
    low, high = 0.0, 1.0
    for _ in range(53):  # halved to the last bit
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_step(middle, drafted) < tokens else (low, middle)
    return low


def batch_s(decode: Decode, tensor_parallel: int, batch: FloatArray) -> FloatArray:
    """Return the seconds of decode steps without their context, by sequences in each, any shape.

    The formulas hold for whole numbers of sequences; a mean between two of them is interpolated.
    Raises ConfigError if a table of utilisations cannot be read.
    """
    below = np.floor(batch)
    low_s, high_s = _whole_batch_s(decode, tensor_parallel, np.stack([below, below + 1]))
    seconds: FloatArray = low_s + (high_s - low_s) * (batch - below)
    return seconds


def _whole_batch_s(decode: Decode, tensor_parallel: int, batch: FloatArray, tokens: int = 1) -> FloatArray:
    """Return the seconds of steps of whole numbers of sequences without their context, ``tokens`` computed for each.

    ``utilisation``: h/U(h) flashes (paper, appendix A). ``affine``: as given, for the engine as a whole. ``roofline``:
    max(read weights, multiply) + overhead, the first two spread over the accelerators of the engine; of E routed
    experts a batch of b reads 1 - (1 - k/E)^b. Several tokens of a sequence count as so many sequences, but for the
    overhead per sequence of ``roofline``.
    """
    seconds: FloatArray
    computed = batch * tokens
    match decode:
        case UtilisationDecode():
            curve = fitted_utilisation() if decode.table is None else read_utilisation(decode.table)
            seconds = curve.step_flashes(computed) * decode.flash_s
        case AffineDecode():
            seconds = decode.step_s + decode.sequence_s * computed
        case RooflineDecode():
            rate = tensor_parallel * decode.bandwidth * decode.weight_efficiency
            read_s = np.asarray(decode.parameters_read * decode.bytes_per_parameter / rate)
            if decode.experts is not None and decode.experts_per_token is not None and decode.expert_parameters:
                experts_s = decode.expert_parameters * decode.bytes_per_parameter / rate
                missed = 1 - decode.experts_per_token / decode.experts
                # float_power is the same on every processor; ``**`` of an array is not.
                read_s = read_s + experts_s * (1 - np.float_power(missed, computed))
            flops_s = 2 * decode.parameters_active / (tensor_parallel * decode.peak_flops * decode.flops_efficiency)
            seconds = np.maximum(read_s, flops_s * computed)
            seconds = seconds + decode.step_overhead_s + decode.sequence_overhead_s * batch
        case _:
            assert_never(decode)
    return seconds


def context_token_s(decode: Decode, tensor_parallel: int) -> float:
    """Return the seconds of a decode step per token of context: reading the KV cache."""
    match decode:
        case UtilisationDecode():
            return 0.0
        case AffineDecode():
            return decode.context_token_s
        case RooflineDecode():
            return decode.kv_bytes_per_token / (tensor_parallel * decode.bandwidth * decode.kv_efficiency)
        case _:
            assert_never(decode)


def prefill_s(prefill: PrefillConfig, *, sequences: Number, tokens: Number, squares: Number) -> Number:
    """Return the seconds to fill the KV cache of sequences; ``squares``: sum of their squared tokens filled in."""
    return prefill.sequence_s * sequences + prefill.token_s * tokens + prefill.token_squared_s * squares


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """One micro-batch: ``micro_batch_s``, the work of its fullest rank, and ``step_s`` if it completes the step.

    The fullest rank has at least the mean of all ranks, the longest sequence, and, of n sequences on R ranks, ceil(n/R)
    times the shortest one. Whole sequences can be spread so that it has no more than the mean and the longest together.
    """

    step_s: float
    micro_batch_s: float
    token_s: float
    """Per token, spread over all accelerators."""
    token_squared_s: float = 0.0
    """Per squared token, spread over all accelerators."""
    accelerators: int = 1
    sequence_accelerators: int | None = None
    """Accelerators that share one sequence: a rank (count). None: all share all tokens."""

    def seconds(self, lengths: Sequence[int], *, completes_step: bool) -> float:
        """Return the seconds to train on whole sequences, one or more, of ``lengths`` >= 1 tokens, prompts included."""
        squares = sum(map(mul, lengths, lengths)) if self.token_squared_s else 0
        longest, shortest = max(lengths), min(lengths)
        bounds_s = self.bounds_s(
            (sum(lengths), squares),
            longest=(longest, longest**2),
            shortest=(shortest, shortest**2),
            sequences=len(lengths),
            fixed_s=self.micro_batch_s + (self.step_s if completes_step else 0.0),
        )
        return max(bounds_s)

    def bounds_s(
        self,
        batch: tuple[Number, Number],
        *,
        longest: tuple[Number, Number],
        shortest: tuple[Number, Number],
        sequences: Number,
        fixed_s: Number,
    ) -> tuple[Number, ...]:
        """Return the least seconds of a micro-batch by each bound on its fullest rank; the largest holds.

        ``batch``, ``longest`` and ``shortest`` are tokens and squared tokens, which may be means.
        """
        mean_s = fixed_s + self.token_s * batch[0] + self.token_squared_s * batch[1]
        if self.sequence_accelerators is None:
            return (mean_s,)
        on_rank = -(-sequences * self.sequence_accelerators // self.accelerators)
        return mean_s, fixed_s + self._rank_s(*longest), fixed_s + self._rank_s(*shortest) * on_rank

    def _rank_s(self, tokens: Number, squares: Number) -> Number:
        assert self.sequence_accelerators is not None
        slower = self.accelerators / self.sequence_accelerators  # a rank than all of them
        return (self.token_s + self.token_squared_s * (squares / tokens)) * tokens * slower


def training_cost(config: TrainingConfig, *, training_accelerators: int) -> TrainingCost:
    """Return the cost of training: sequences are spread over the accelerators, the fixed parts are not."""
    shared = config.sequence_accelerators
    return TrainingCost(
        config.step_s,
        config.micro_batch_s,
        config.token_s / training_accelerators,
        config.token_squared_s / training_accelerators,
        training_accelerators,
        None if shared is None else min(shared, training_accelerators),
    )


def loading_s(weights: WeightTransferConfig) -> float:
    """Return the seconds of a publication for which trainer and engines both wait."""
    return max(weights.publish_s, weights.transfer_s + weights.pause_s)
