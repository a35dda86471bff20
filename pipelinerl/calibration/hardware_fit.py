"""Fits of the hardware model: decode steps, prefill and training, to measured times.

Every fit is linear: a time is a known part plus each coefficient times a factor. With ``hardware.gpu`` and
``hardware.model`` known the coefficients are those of the hardware model, so that the result carries over to other
splits and tensor-parallel sizes. Their factors come from the hardware model itself, by changing a coefficient a little:
an efficiency enters as its inverse, all others as they are. Only the maximum of reading weights and multiplying is not
linear, so factors and coefficients are determined in turn until they agree. Otherwise the tables of the run file are
fitted as they stand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from pipelinerl.calibration.coefficient_fit import ROUNDS, fit_coefficients, simpler
from pipelinerl.calibration.least_squares import Column, Fit, fit
from pipelinerl.calibration.trace_times import DecodeTimes, TrainingTimes
from pipelinerl.config.resolve import named_engine, named_hardware, run_coefficients
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.catalogue import Gpu, LanguageModel
from pipelinerl.hardware.coefficients import Coefficients, coefficients
from pipelinerl.hardware.costs import batch_s, context_token_s, prefill_s, training_cost
from pipelinerl.hardware.derive import NOTHING_BESIDE, derive_decode, derive_prefill, derive_training
from pipelinerl.hardware.tables import AffineDecode, Decode, HardwareConfig, PrefillConfig, TrainingConfig
from pipelinerl.util.arrays import FloatArray

DECODE_COEFFICIENTS = (
    "kv_efficiency", "sequence_overhead_s", "step_overhead_s", "weight_efficiency", "flops_efficiency", "allreduce_s",
)  # fmt: skip
"""Coefficients that decode steps can determine, the surest first."""
TRAINING_COEFFICIENTS = ("training_mfu", "training_step_s", "training_micro_batch_s", "activation_traffic")
"""Coefficients that training can determine, the surest first."""
FASTEST_TRAINING = {
    "training_mfu": 1.0,
    "expert_mfu_factor": 1.0,
    "attention_flops_per_byte": 1e9,
    **dict.fromkeys(("training_step_s", "training_micro_batch_s", "activation_traffic", "extra_forward_passes"), 0.0),
    **dict.fromkeys(("recomputation", "exchange_exposed", "gather_exposed", "training_rest_share"), 0.0),
    "sequence_accelerators": 1e9,
}
"""Coefficients of a trainer that does nothing but multiply, at the peak."""
LEAST_STEP_S = 1e-9
"""Least time of a decode step: time must advance (seconds)."""
MOST_TIMES = 100.0
"""Factor between measured and derived seconds from which on one of them is taken for a mistake (no unit)."""


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that was fitted."""

    what: str
    """Such as ``decode``."""
    data: str
    """Name of the measurements."""
    fit: Fit


class HardwareFit:
    """A table ``[hardware]`` in the making.

    Args:
        hardware: What it begins with: GPU and model, or tables; where the data determine nothing, its values stay.
        trainer: Coefficients of the run's trainer that no time determines (``fixed_coefficients``).

    Raises:
        ConfigError: If GPU or model are unknown.
    """

    def __init__(self, hardware: HardwareConfig, trainer: Mapping[str, float] | None = None) -> None:
        self.given = hardware
        self._trainer = trainer or {}
        self.table: dict[str, Any] = hardware.model_dump(mode="json", exclude_none=True, exclude_unset=True)
        self.parts: list[Part] = []
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.factors: dict[str, float] = {}
        self.gpu: Gpu | None = None
        self.model: LanguageModel | None = None
        if (named := named_hardware(hardware)) is not None:
            self.gpu, self.model = named
            self._values = coefficients(hardware.level, {**self._trainer, **hardware.coefficients})

    @property
    def coefficients(self) -> Coefficients:
        """Return the coefficients as they are now; GPU and model are known."""
        return coefficients(self.given.level, {**self._trainer, **self.table.get("coefficients", {})})

    def decode(
        self,
        times: DecodeTimes,
        tensor_parallel: FloatArray,
        data: str,
        *,
        with_dispatch: bool = False,
        always_full: bool = False,
    ) -> float:
        """Fit the decode step, and prefill where the times hold some.

        Args:
            times: What was measured.
            tensor_parallel: Accelerators of the engine of each row (count).
            data: What reports call the measurements.
            with_dispatch: Whether to fit the dispatch latency; the times are lives of rollouts.
            always_full: Whether the engines are: then lives do not tell what a sequence or its context takes.

        Returns:
            The dispatch latency (seconds).
        """
        if self.model is None:
            return self._decode_table(times, data, with_dispatch=with_dispatch, always_full=always_full)
        names = [name for name in DECODE_COEFFICIENTS if name != "allreduce_s" or (tensor_parallel > 1).any()]
        tables = ["decode"]
        if times.prefill_tokens.any():
            names.append("prefill_mfu")
            tables.append("prefill")
        self._check_unit("decode", times.seconds, self._named_s(self._values, tensor_parallel, times))
        way = [Column("dispatch_s", times.lives, self.given.latency.dispatch_s)] if with_dispatch else []

        def model_s(values: Coefficients) -> FloatArray:
            return self._named_s(values, tensor_parallel, times) + times.front_end

        found = fit_coefficients(names, self._values, times.seconds, model_s, way)
        if with_dispatch:
            sure = ["step_overhead_s"]
            simple = fit_coefficients(sure, self._values, times.seconds, model_s, way)
            found = simpler(simple, found, sure, always_full=always_full)
        way_s = found.values.get("dispatch_s", 0.0)
        self._take("decode", data, found, tables)
        return way_s

    def _decode_table(self, times: DecodeTimes, data: str, *, with_dispatch: bool, always_full: bool) -> float:
        given = self.given.decode if isinstance(self.given.decode, AffineDecode) else None
        prefill = self.given.prefill or PrefillConfig()
        columns = [Column("step_s", times.steps, given.step_s if given else 0.0)]
        if with_dispatch:
            columns.append(Column("dispatch_s", times.lives, self.given.latency.dispatch_s))
        columns += [
            Column("sequence_s", times.sequences, given.sequence_s if given else 0.0),
            Column("context_token_s", times.context, given.context_token_s if given else 0.0),
        ]
        base = prefill.sequence_s * times.prefills + prefill.token_squared_s * times.prefill_squares + times.front_end
        if times.prefill_tokens.any():
            columns.append(Column("prefill.token_s", times.prefill_tokens, prefill.token_s))
        elif times.prefills.any():  # requests whose tokens are not known: all that each costs
            prefill, base = PrefillConfig(), times.front_end
            columns.append(Column("prefill.sequence_s", times.prefills, 0.0))
        found = fit(columns, times.seconds, base)
        if with_dispatch:
            known = base + sum(column.kept * column.factors for column in columns[2:])
            simple = fit(columns[:2], times.seconds, known)
            kept = {column.name: column.kept for column in columns[2:]}
            simple = replace(simple, values={**simple.values, **kept})
            found = simpler(simple, found, [column.name for column in columns[:2]], always_full=always_full)
        values = {name: rounded(value) for name, value in found.values.items()}
        self.table["decode"] = {
            "kind": "affine",
            "step_s": max(LEAST_STEP_S, values["step_s"]),
            "sequence_s": values["sequence_s"],
            "context_token_s": values["context_token_s"],
        }
        if fitted := {name.removeprefix("prefill."): value for name, value in values.items() if "prefill" in name}:
            self.table["prefill"] = {**prefill.model_dump(), **fitted}
        self.parts.append(Part("decode", data, found))
        return found.values.get("dispatch_s", 0.0)

    def prefill(self, times: DecodeTimes, tensor_parallel: FloatArray, data: str) -> None:
        """Fit prefill to passes that do nothing else."""
        if self.model is not None:
            self._check_unit("prefill", times.seconds, self._named_s(self._values, tensor_parallel, times))
            model_s = partial(self._named_s, tensor_parallel=tensor_parallel, times=times)
            found = fit_coefficients(["prefill_mfu"], self._values, times.seconds, model_s)
            self._take("prefill", data, found, ["prefill"])
            return
        before = self.given.prefill or PrefillConfig()
        columns = [
            Column("token_s", times.prefill_tokens, before.token_s),
            Column("token_squared_s", times.prefill_squares, before.token_squared_s),
            Column("sequence_s", times.prefills, before.sequence_s),
        ]
        found = fit(columns, times.seconds)
        self.table["prefill"] = {name: rounded(value) for name, value in found.values.items()}
        self.parts.append(Part("prefill", data, found))

    def requests(self, times: DecodeTimes, tensor_parallel: FloatArray, data: str) -> None:
        """Fit the front end's cost per request to what requests take besides their decode steps, prefill included."""
        column = Column("request_s", times.prefills, self.given.latency.request_s)
        if self.model is not None:
            prefill_R = self._named_s(self.coefficients, tensor_parallel, times)
        else:
            prefill = PrefillConfig.model_validate(self.table.get("prefill", {}))
            prefill_R = prefill_s(
                prefill, sequences=times.prefills, tokens=times.prefill_tokens, squares=times.prefill_squares
            )
        found = fit([column], times.seconds, prefill_R)
        self.table["latency"] = {**self.table.get("latency", {}), "request_s": rounded(found.values["request_s"])}
        self.parts.append(Part("requests", data, found))

    def training(self, times: TrainingTimes, accelerators: FloatArray, data: str) -> None:
        """Fit the trainer's step.

        Args:
            times: What was measured.
            accelerators: That trained, for each row (count).
            data: What reports call the measurements.

        Raises:
            ConfigError: If it was faster than the accelerator's peak.
        """
        if self.model is not None:
            self._check_peak(times, accelerators)
            self._check_unit("training", times.seconds, self._training_s(self._values, times, accelerators))
            model_s = partial(self._training_s, times=times, accelerators=accelerators)
            found = fit_coefficients(TRAINING_COEFFICIENTS, self._values, times.seconds, model_s)
            self._take("training", data, found, ["training"])
            return
        before = self.given.training or TrainingConfig(token_s=0.0)
        shared = before.sequence_accelerators
        per_token = TrainingConfig(token_s=1.0, sequence_accelerators=shared)
        per_square = TrainingConfig(token_s=0.0, token_squared_s=1.0, sequence_accelerators=shared)
        tokens = _bounds_s(lambda _: per_token, times, accelerators)
        squares = _bounds_s(lambda _: per_square, times, accelerators)
        rows, largest = np.arange(len(times.seconds)), tokens.argmax(axis=0)
        for _ in range(1 if shared is None else ROUNDS):  # which bound of a micro-batch holds depends on what is fitted
            columns = [
                Column("token_s", tokens[largest, rows], before.token_s),
                Column("step_s", times.steps, before.step_s),
                Column("micro_batch_s", np.ones(len(rows)), before.micro_batch_s),
                Column("token_squared_s", squares[largest, rows], before.token_squared_s),
            ]
            found = fit(columns, times.seconds)
            work_s = found.values["token_s"] * tokens + found.values["token_squared_s"] * squares
            largest = work_s.argmax(axis=0)
        self.table["training"] = {name: rounded(value) for name, value in found.values.items()}
        if shared is not None:
            self.table["training"]["sequence_accelerators"] = shared
        self.parts.append(Part("training", data, found))

    def decode_s(self, times: DecodeTimes, tensor_parallel: FloatArray) -> FloatArray:
        """Return the seconds of stretches of decode with what has been fitted."""
        if self.model is not None:
            return self._named_s(self.coefficients, tensor_parallel, times)
        decode = AffineDecode.model_validate(self.table["decode"])
        prefill = PrefillConfig.model_validate(self.table.get("prefill", {}))
        return _stretches_s(decode, prefill, times, tensor_parallel=1)

    def _gpu_and_model(self) -> tuple[Gpu, LanguageModel]:
        assert self.gpu is not None
        assert self.model is not None
        return self.gpu, self.model

    def _named_s(self, values: Coefficients, tensor_parallel: FloatArray, times: DecodeTimes) -> FloatArray:
        """Return the seconds of stretches of decode by the hardware model."""
        gpu, model = named_engine(self.given, *self._gpu_and_model())
        seconds = np.zeros(len(times.seconds))
        for size in np.unique(tensor_parallel):
            of, tp = tensor_parallel == size, int(size)
            decode = derive_decode(gpu, model, tensor_parallel=tp, coefficients=values)
            prefill = derive_prefill(gpu, model, tensor_parallel=tp, coefficients=values)
            seconds[of] = _stretches_s(decode, prefill, times, tensor_parallel=tp)[of]
        return seconds

    def _training_s(self, values: Coefficients, times: TrainingTimes, accelerators: FloatArray) -> FloatArray:
        """Return the seconds of micro-batches by the hardware model."""
        gpu, model = self._gpu_and_model()

        def config_of(number: int) -> TrainingConfig:
            return derive_training(gpu, model, training_accelerators=number, coefficients=values)

        seconds: FloatArray = _bounds_s(config_of, times, accelerators).max(axis=0)
        return seconds

    def _check_unit(self, what: str, measured: FloatArray, expected: FloatArray) -> None:
        """Raise ConfigError if measured and expected seconds are far apart."""
        gpu, model = self._gpu_and_model()
        ratio = float(np.median(measured / expected))
        if not 1 / MOST_TIMES < ratio < MOST_TIMES:
            raise ConfigError(
                f"{what} seconds have a median of {np.median(measured):.3g}, {ratio:.2g} times what {model.name} "
                f"on {gpu.name} needs by the hardware model, {np.median(expected):.3g}: check unit, GPU and model"
            )

    def check_number(self, name: str, given_s: float, expected_s: float) -> None:
        """Raise ConfigError if a number of seconds is much longer than what GPU and model need, where they are known.

        What is much shorter is refused by the fit, which cannot reach it, or is a fast link.
        """
        if self.gpu is not None and self.model is not None and given_s > MOST_TIMES * expected_s:
            raise ConfigError(
                f"{name}={given_s:g} is {given_s / expected_s:.2g} times what {self.model.name} on {self.gpu.name} "
                f"needs by the hardware model, {expected_s:.3g} s: check unit, GPU and model"
            )

    def _check_peak(self, times: TrainingTimes, accelerators: FloatArray) -> None:
        """Raise ConfigError if training was faster than the accelerator's peak: another unit, or another model."""
        gpu, model = self._gpu_and_model()
        least_s = self._training_s(self._values.model_copy(update=FASTEST_TRAINING), times, accelerators)
        share = float(np.median(least_s / times.seconds))
        if share > 1.0:
            raise ConfigError(
                f"training seconds of {np.median(times.seconds):.3g} (median) would be {share:.1f} times the peak of "
                f"{gpu.name} for {model.name}: check the unit, the tokens and the model"
            )

    def _take(self, what: str, data: str, found: Fit, tables: Sequence[str]) -> None:
        """Keep fitted coefficients, in place of the tables that said it before."""
        for table in tables:
            self.table.pop(table, None)
        fitted = {
            name: rounded(value)
            for name, value in found.values.items()
            if name not in found.undetermined and name in Coefficients.model_fields
        }
        self.table["coefficients"] = {**self.table.get("coefficients", {}), **fitted}
        self.parts.append(Part(what, data, found))


def _stretches_s(decode: Decode, prefill: PrefillConfig, times: DecodeTimes, *, tensor_parallel: int) -> FloatArray:
    """Return the seconds of stretches of decode, in each of which all steps are taken to hold the mean batch."""
    batch = np.divide(times.sequences, times.steps, out=np.zeros(len(times.steps)), where=times.steps > 0)
    filled_s = prefill_s(prefill, sequences=times.prefills, tokens=times.prefill_tokens, squares=times.prefill_squares)
    context_s = context_token_s(decode, tensor_parallel) * times.context
    return times.steps * batch_s(decode, tensor_parallel, batch) + context_s + filled_s


def _bounds_s(config_of: Callable[[int], TrainingConfig], times: TrainingTimes, accelerators: FloatArray) -> FloatArray:
    """Return the seconds of each micro-batch by each bound on its fullest rank, shape [bounds, micro-batches].

    Args:
        config_of: The trainer of so many accelerators.
        times: The micro-batches.
        accelerators: That trained, for each row (count).
    """
    seconds = np.zeros((1, len(times.seconds)))
    for number in np.unique(accelerators):
        bounds_s = times.bounds_s(training_cost(config_of(int(number)), training_accelerators=int(number)))
        seconds = np.where(accelerators == number, bounds_s, seconds)
    return seconds


def fixed_coefficients(run: RunConfig) -> dict[str, float]:
    """Return the coefficients of a run's trainer that no time determines; none without GPU and model."""
    named = named_hardware(run.hardware)
    if named is None:
        return {}
    values = run_coefficients(
        run, *named, training_accelerators=run.training_accelerators, longest=run.longest_rollout_tokens
    )
    fixed = {"recomputation": values.recomputation, "pack_tokens": values.pack_tokens}
    return {**fixed, **NOTHING_BESIDE} if run.colocated else fixed


def rounded(value: float) -> float:
    """Return a number with as many digits as mean anything."""
    return float(f"{value:.6g}")
