"""One solve for all measurements: the hardware model's parameters that give the measured seconds.

Parameters are coefficients of the hardware model, where ``hardware.gpu`` and ``hardware.model`` are known, so that the
result carries over to other splits and tensor-parallel sizes; else the numbers of the run file's tables.
``DecodeTimes`` and ``TrainingTimes`` have many rows: least squares, with the model's derivative by each parameter
(shares of a peak enter as their inverse). One known number determines one factor on all times of a part: a secant in
logarithms, since its model is a simulation (``calibrate_numbers``).

Least squares. A time is a sum of coefficients, each times something known: ``seconds = step_s * steps + sequence_s *
sequences``. What counts is the relative error. Rows are divided by their fitted seconds, not by the measured ones:
those that happened to be short would count more, and the fit would come out too low. No coefficient may be below its
bound (times are not negative); with a handful of coefficients the best solution is found by trying which of them stand
at theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

import numpy as np

from pipelinerl.calibration.trace import DecodeTimes, TrainingTimes
from pipelinerl.config.resolve import named_engine, named_hardware, resolved_hardware, run_coefficients
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.catalogue import Gpu, LanguageModel
from pipelinerl.hardware.coefficients import SHARES_OF_PEAK, Coefficients, coefficients
from pipelinerl.hardware.costs import (
    AffineDecode,
    Decode,
    HardwareConfig,
    PrefillConfig,
    TrainingConfig,
    batch_s,
    context_token_s,
    prefill_s,
    training_cost,
)
from pipelinerl.hardware.derive import NOTHING_BESIDE, derive_decode, derive_prefill, derive_training
from pipelinerl.util.arrays import FloatArray, ratio

COLLINEAR = 1e-6
"""Singular value, as a share of the largest, below which columns count as one (no unit)."""
UNSURE_SHARE = 0.1
"""A coefficient whose standard error is a larger share of the time than this is not determined (no unit)."""
TINY_SHARE = 0.01
"""A coefficient whose known value is a smaller share of the time is kept before the others (no unit)."""
FIT_ROUNDS = 5
"""Rounds of weighting the rows by the fitted times, at most (count)."""
LEAST_WEIGHED = 0.1
"""Lower limit of the fitted time that weights a row, as a share of the measured time (no unit)."""
NOT_WORSE = 1.05
"""Factor on the root mean square error up to which a kept value counts as no worse (no unit)."""


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """One coefficient and its factor in every row."""

    name: str
    factors: FloatArray
    """Shape [rows]."""
    kept: float = 0.0
    """Its value where the data do not determine it."""
    least: float = 0.0
    """Its lower bound."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients and how good they are."""

    rows: int
    """Measurements (count)."""
    values: dict[str, float]
    """Fitted or kept."""
    undetermined: dict[str, str]
    """Kept coefficients, each with the reason."""
    mean_error: float
    """Mean of |fitted / measured - 1| (no unit)."""
    max_error: float
    """Largest of them (no unit)."""
    held_out_error: float | None
    """Mean of |predicted / measured - 1| where each row is predicted from all others (no unit). None: too few rows."""


def fit(columns: Sequence[Column], seconds: FloatArray, base: FloatArray | None = None) -> Fit:
    """Fit coefficients to measured times by least squares on the relative error.

    A coefficient is not determined if its column is 0 everywhere, if a combination of columns is 0 everywhere, or if
    its standard error is more than a tenth of the time. Example of the second: measurements at one context do not
    separate the time per sequence from the time per context token. Then one of the coefficients concerned is kept at
    ``kept`` and the others are fitted again. The last of the list is kept first; a coefficient whose known value is a
    negligible share of the time is kept before it, unless the error grows.

    Args:
        columns: At most a handful, the surest first.
        seconds: Measured times, above 0, shape [rows] (seconds). ValueError if there is none.
        base: The known part of these times, same shape (seconds). None: 0.
    """
    if not len(seconds):
        raise ValueError("seconds must have a row, got none")
    factors_RC = np.stack([column.factors for column in columns], axis=1)
    base_R = np.zeros(len(seconds)) if base is None else base
    scale_R = seconds
    for _ in range(FIT_ROUNDS):
        values_C, undetermined = _weighted(factors_RC / scale_R[:, None], (seconds - base_R) / scale_R, columns)
        fitted_R = base_R + factors_RC @ values_C
        last_R, scale_R = scale_R, np.maximum(fitted_R, LEAST_WEIGHED * seconds)
        if np.allclose(last_R, scale_R, rtol=1e-9):
            break
    error_R = np.abs(fitted_R / seconds - 1)
    kept = {index for index, column in enumerate(columns) if column.name in undetermined}
    return Fit(
        rows=len(seconds),
        values={column.name: float(value) for column, value in zip(columns, values_C, strict=True)},
        undetermined=undetermined,
        mean_error=float(error_R.mean()),
        max_error=float(error_R.max()),
        held_out_error=_held_out(
            factors_RC / seconds[:, None], (fitted_R - seconds) / seconds, values_C, columns, kept
        ),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Problem:
    """Values that bring ``share @ values`` near ``goal``, with the rows reduced to one more than there are columns.

    The triangle of a QR factorisation of [share, goal] has the same squared error for all values as the rows have.
    """

    share_RC: FloatArray
    goal_R: FloatArray
    mean_C: FloatArray
    """Mean of each column over all rows: share of the time of a mean row, per unit."""
    num_rows: int

    @classmethod
    def of(cls, share_RC: FloatArray, goal_R: FloatArray) -> _Problem:
        mean_C = np.abs(share_RC).mean(axis=0)
        triangle: FloatArray = np.linalg.qr(np.concatenate([share_RC, goal_R[:, None]], axis=1)).R
        return cls(triangle[:, :-1], triangle[:, -1], mean_C, len(goal_R))

    def loss(self, values_C: FloatArray) -> float:
        return float(np.linalg.norm(self.share_RC @ values_C - self.goal_R) / np.sqrt(self.num_rows))


def _weighted(share_RC: FloatArray, goal_R: FloatArray, columns: Sequence[Column]) -> tuple[FloatArray, dict[str, str]]:
    """Return the coefficients nearest to ``goal_R``, and the reasons for kept ones."""
    kept = {index: column.kept for index, column in enumerate(columns) if not share_RC[:, index].any()}
    undetermined = {columns[index].name: "no measurement depends on it" for index in kept}
    problem = _Problem.of(share_RC, goal_R)
    values_C, loss = _bounded(problem, columns, kept)
    while together := _undecided(problem, loss, [index for index in range(len(columns)) if index not in kept]):
        tried = {index: _bounded(problem, columns, kept | {index: columns[index].kept}) for index in together}
        allowed = max(NOT_WORSE * loss, 1e-9)
        fitting = [one for one in together if tried[one][1] <= allowed]
        # One with a negligible share of the time would have to change by a large factor to make up for the others.
        tiny = [one for one in fitting if 0 < problem.mean_C[one] * columns[one].kept < TINY_SHARE]
        # If every kept value contradicts the measurements, the one that contradicts them least.
        index = [*fitting, *tiny][-1] if fitting else min(together, key=lambda one: tried[one][1])
        kept[index] = columns[index].kept
        others = [columns[one].name for one in together if one != index]
        undetermined[columns[index].name] = f"cannot be told from {' and '.join(others)}"
        values_C, loss = tried[index]
    return values_C, undetermined


def _bounded(problem: _Problem, columns: Sequence[Column], kept: dict[int, float]) -> tuple[FloatArray, float]:
    """Return the best coefficients not below their bounds, and their RMS error: all sets at bounds are tried."""
    base_C = np.array([kept.get(index, column.least) for index, column in enumerate(columns)])
    least_C = np.array([column.least for column in columns])
    free = [index for index in range(len(columns)) if index not in kept]
    best_C, best = base_C, problem.loss(base_C)
    for some in (list(chosen) for size in range(1, len(free) + 1) for chosen in combinations(free, size)):
        values_C = base_C.copy()
        values_C[some] = 0.0
        rest_R = problem.goal_R - problem.share_RC @ values_C
        some_RF = problem.share_RC[:, some]
        scale_F = np.abs(some_RF).max(axis=0)
        values_C[some] = np.linalg.lstsq(some_RF / scale_F, rest_R, rcond=None)[0] / scale_F
        loss = problem.loss(values_C)
        if (values_C[some] >= least_C[some]).all() and loss < best - 1e-15:
            best_C, best = values_C, loss
    return best_C, best


def _undecided(problem: _Problem, loss: float, free: list[int]) -> list[int]:
    """Return two or more coefficients that the data cannot separate; empty if there are none."""
    if not free:
        return []
    some_RF = problem.share_RC[:, free]
    norm_F = np.linalg.norm(some_RF, axis=0)
    _, singular, right_FF = np.linalg.svd(some_RF / norm_F, full_matrices=True)
    singular_F = np.zeros(len(free))
    singular_F[: len(singular)] = singular
    weak = singular_F < COLLINEAR * singular_F[0]
    if weak.any():
        direction_F = right_FF[np.flatnonzero(weak)[0]]
        return [index for index, part in zip(free, np.abs(direction_F), strict=True) if part > 1e-3]
    if problem.num_rows <= len(free):
        return []  # as many unknowns as equations: an exact solution, and no noise to judge by
    variance = loss**2 * problem.num_rows / (problem.num_rows - len(free))
    error_F = np.sqrt(variance * np.square(right_FF.T / singular_F).sum(axis=1)) / norm_F
    share_F = error_F * problem.mean_C[free]
    if share_F.max() <= UNSURE_SHARE or len(free) == 1:
        return []  # each is determined, or there is no other to be fitted again
    direction_F = np.abs(right_FF[singular_F.argmin()])
    direction_F[share_F.argmax()] = np.inf
    most = np.sort(direction_F)[-2]  # the coefficient that depends most on the least certain one
    return [index for index, part in zip(free, direction_F, strict=True) if part >= 0.5 * most]


def _held_out(
    share_RC: FloatArray, error_R: FloatArray, values_C: FloatArray, columns: Sequence[Column], kept: set[int]
) -> float | None:
    """Return the mean error of predicting each row from all others, with the same coefficients at their bounds."""
    inside = [index for index, column in enumerate(columns) if index not in kept and values_C[index] > column.least]
    if len(share_RC) < len(inside) + 2:
        return None
    if inside:
        some_RF = share_RC[:, inside]
        orthogonal_RF = np.linalg.qr(some_RF / np.linalg.norm(some_RF, axis=0))[0]
        leverage_R = np.square(orthogonal_RF).sum(axis=1)
        if (leverage_R > 1 - 1e-9).any():
            return None  # a coefficient depends on one row alone
        error_R = error_R / (1 - leverage_R)
    return float(np.abs(error_R).mean())


MUCH_BETTER = 0.8
"""For lives of rollouts: further coefficients are believed if the error falls below this share of it (no unit)."""
QUIET_SHARE = 0.2
"""The same for engines that are always full: only noise-free times reach it (no unit)."""
PROBE = 1e-4
"""Relative change by which the factor of a coefficient is found."""
ROUNDS = 10
"""Times that derivatives and parameters are determined in turn, at most (count)."""
LEAST_PLACE = 1e-9
"""Value above which the derivative is taken by a relative change, and not by one of ``PROBE`` thousandths."""


def fit_parameters(
    start: Mapping[str, float],
    seconds: FloatArray,
    model_s: Callable[[Mapping[str, float]], FloatArray],
    others: Sequence[Column] = (),
) -> Fit:
    """Fit parameters so that a model gives measured seconds; the fit's values are parameters, not inverses.

    ``start`` has the surest parameter first, with values kept where the data do not determine them. ``seconds``, and
    those of ``model_s``: shape [rows]. ``others`` are further terms of the seconds, as certain as the first parameter.
    """
    now = dict(start)
    for _ in range(ROUNDS):
        now_R = base_R = model_s(now)
        columns = []
        for name in start:
            inverse = name in SHARES_OF_PEAK
            place, kept = (1 / one if inverse else one for one in (now[name], start[name]))
            change = PROBE * (place if place > LEAST_PLACE else 1e-3)
            moved = place + change
            factor_R = (model_s({**now, name: 1 / moved if inverse else moved}) - now_R) / change
            factor_R[np.abs(factor_R) * max(place, 1e-3) < 1e-9 * seconds] = 0.0
            columns.append(Column(name, factor_R, kept, 1.0 if inverse else 0.0))
            base_R = base_R - factor_R * place
        found = fit([*columns[:1], *others, *columns[1:]], seconds, base_R)
        fitted = {name: 1 / found.values[name] if name in SHARES_OF_PEAK else found.values[name] for name in start}
        close = all(abs(fitted[name] - now[name]) <= 1e-9 * max(fitted[name], 1e-6) for name in start)
        now = fitted
        if close:
            break
    return replace(found, values={**found.values, **fitted})


def simpler(simple: Fit, full: Fit, fitted: Sequence[str], *, always_full: bool) -> Fit:
    """Return the fit of fewer coefficients unless the error is much larger.

    On an engine that is always full, the tokens that other rollouts sample meanwhile are proportional to the time of a
    rollout, whatever its cause: with noisy times the error falls and nothing is learned. So a fit attributes time to
    other rollouts only if the error falls far enough.
    """
    if full.mean_error < (QUIET_SHARE if always_full else MUCH_BETTER) * simple.mean_error:
        return full
    kept = {*fitted, "dispatch_s"}
    others = {
        name: "fitted, it explains the times hardly better: kept as given" for name in full.values if name not in kept
    }
    return replace(simple, undetermined={**others, **simple.undetermined})


REST = "generation_rest_share"
"""Coefficient of the seconds of generation beside the engines' steps."""
DECODE_COEFFICIENTS = (
    "kv_efficiency", "sequence_overhead_s", "step_overhead_s", "weight_efficiency", "flops_efficiency", "allreduce_s",
)  # fmt: skip
"""The surest first."""
GENERATION_COEFFICIENTS = (
    *DECODE_COEFFICIENTS, "layer_overhead_s", "expert_layer_s", "node_allreduce_s", "prefill_mfu"
)  # fmt: skip
TRAINING_COEFFICIENTS = ("training_mfu", "training_step_s", "training_micro_batch_s", "activation_traffic")
"""The surest first."""
FASTEST_TRAINING = {
    "training_mfu": 1.0,
    "expert_mfu_factor": 1.0,
    "attention_flops_per_byte": 1e9,
    **dict.fromkeys(("training_step_s", "training_micro_batch_s", "activation_traffic", "extra_forward_passes"), 0.0),
    **dict.fromkeys(("recomputation", "exchange_exposed", "gather_exposed", "training_rest_share"), 0.0),
    "sequence_accelerators": 1e9,
}
"""Coefficients of a trainer that does nothing but multiply, at the peak."""
NO_DECODE = AffineDecode(kind="affine", step_s=1.0).model_copy(update={"step_s": 0.0})
"""Start of a fit where the run file has no such table."""
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
    fit: Fit


class HardwareFit:
    """A table ``[hardware]`` in the making; values of ``hardware``, its start, stay where the data determine nothing.

    ``trainer``: coefficients that no time determines (``fixed_coefficients``). ConfigError for an unknown GPU or model.
    """

    def __init__(self, hardware: HardwareConfig, trainer: Mapping[str, float] | None = None) -> None:
        self.given = hardware
        self._trainer = trainer or {}
        self.table: dict[str, Any] = hardware.model_dump(mode="json", exclude_none=True, exclude_unset=True)
        self.parts: list[Part] = []
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.factors: dict[str, float] = {}
        self.acceptance: float | None = None  # engine.speculation.acceptance; None: engines did not draft
        self.named: tuple[Gpu, LanguageModel] | None = named_hardware(hardware)
        if self.named is not None:
            self._values = coefficients(hardware.level, {**self._trainer, **hardware.named_coefficients})

    @property
    def coefficients(self) -> Coefficients:
        """Return the current coefficients; GPU and model must be known."""
        changed = {**self.given.named_coefficients, **self._trainer, **self.table.get("coefficients", {})}
        return coefficients(self.given.level, changed)

    def decode(
        self,
        times: DecodeTimes,
        tensor_parallel: FloatArray,
        data: str,
        *,
        with_dispatch: bool = False,
        always_full: bool = False,
        kernels: bool = False,
    ) -> float:
        """Fit the decode step, and prefill where the times hold some; return the dispatch latency (seconds).

        ``tensor_parallel``: of the engine of each row. ``data``: the name of the measurements in reports.
        ``with_dispatch``: also fit the dispatch latency; the times are lives of rollouts. With engines
        ``always_full`` these do not determine sequence and context costs. ``kernels``: of an engine alone, without
        the rest of generation.
        """
        if self.named is not None:
            self._check_unit("decode", times.seconds, self._named_s({}, tensor_parallel, times))
            names = [name for name in DECODE_COEFFICIENTS if name != "allreduce_s" or (tensor_parallel > 1).any()]
            names += ["prefill_mfu"] if times.prefill_tokens.any() else []
            start, sure = {name: getattr(self._values, name) for name in names}, "step_overhead_s"
        else:
            given = self.given.decode if isinstance(self.given.decode, AffineDecode) else NO_DECODE
            start, sure = {name: getattr(given, name) for name in AffineDecode.SECONDS}, "step_s"
            start |= {"token_s": self._given_prefill.token_s} if times.prefill_tokens.any() else {}

        def model_s(values: Mapping[str, float]) -> FloatArray:
            return self._decode_s({**start, **values}, tensor_parallel, times) + times.front_end

        way = [Column("dispatch_s", times.lives, self.given.latency.dispatch_s)] if with_dispatch else []
        found = fit_parameters(start, times.seconds, model_s, way)
        if with_dispatch:
            simple = fit_parameters({sure: start[sure]}, times.seconds, model_s, way)
            found = simpler(simple, found, [sure], always_full=always_full)
        if self.named is not None:
            self._take("decode", data, found, ["decode", "prefill"] if "prefill_mfu" in start else ["decode"])
            if not kernels and getattr(self._values, REST):
                self.table["coefficients"][REST] = 0.0  # measured steps hold it
        else:
            values = {name: rounded(value) for name, value in {**start, **found.values}.items()}
            table = {name: values[name] for name in AffineDecode.SECONDS}
            self.table["decode"] = {"kind": "affine", **table, "step_s": max(LEAST_STEP_S, table["step_s"])}
            if "token_s" in start:
                self.table["prefill"] = {**self._given_prefill.model_dump(), "token_s": values["token_s"]}
            self.parts.append(Part("decode", data, found))
        return found.values.get("dispatch_s", 0.0)

    @property
    def _given_prefill(self) -> PrefillConfig:
        return self.given.prefill or PrefillConfig()

    def _decode_s(self, values: Mapping[str, float], tensor_parallel: FloatArray, times: DecodeTimes) -> FloatArray:
        if self.named is not None:
            return self._named_s(values, tensor_parallel, times)
        decode = NO_DECODE.model_copy(update={name: values[name] for name in AffineDecode.SECONDS})
        token_s = values.get("token_s", self._given_prefill.token_s)
        prefill = self._given_prefill.model_copy(update={"token_s": token_s})
        return _stretches_s(decode, prefill, times, tensor_parallel=1)

    def prefill(self, times: DecodeTimes, tensor_parallel: FloatArray, data: str) -> None:
        """Fit prefill to passes that do nothing else."""
        if self.named is not None:
            self._check_unit("prefill", times.seconds, self._named_s({}, tensor_parallel, times))
            start = {"prefill_mfu": self._values.prefill_mfu}
            found = fit_parameters(start, times.seconds, lambda values: self._named_s(values, tensor_parallel, times))
            self._take("prefill", data, found, ["prefill"])
            return
        start = {name: getattr(self._given_prefill, name) for name in ("token_s", "token_squared_s", "sequence_s")}
        found = fit_parameters(start, times.seconds, lambda values: _filled_s(PrefillConfig(**values), times))
        self.table["prefill"] = {name: rounded(value) for name, value in found.values.items()}
        self.parts.append(Part("prefill", data, found))

    def requests(self, times: DecodeTimes, tensor_parallel: FloatArray, data: str) -> None:
        """Fit the front end's cost per request to the seconds of requests without decode steps, prefill included."""
        column = Column("request_s", times.prefills, self.given.latency.request_s)
        prefill_R = (
            self._named_s(self.coefficients.model_dump(), tensor_parallel, times)
            if self.named is not None
            else _filled_s(PrefillConfig.model_validate(self.table.get("prefill", {})), times)
        )
        found = fit([column], times.seconds, prefill_R)
        self.table["latency"] = {**self.table.get("latency", {}), "request_s": rounded(found.values["request_s"])}
        self.parts.append(Part("requests", data, found))

    def training(self, times: TrainingTimes, accelerators: FloatArray, data: str) -> None:
        """Fit the trainer's step, on so many accelerators in each row; ConfigError if it was faster than their peak."""
        if self.named is not None:
            self._check_peak(times, accelerators)
            self._check_unit("training", times.seconds, self._training_s({}, times, accelerators))
            start = {name: getattr(self._values, name) for name in TRAINING_COEFFICIENTS}
        else:
            before = self.given.training or TrainingConfig(token_s=0.0)
            start = {name: getattr(before, name) for name in ("token_s", "step_s", "micro_batch_s", "token_squared_s")}
        found = fit_parameters(start, times.seconds, lambda values: self._training_s(values, times, accelerators))
        if self.named is not None:
            self._take("training", data, found, ["training"])
            return
        self.table["training"] = {name: rounded(value) for name, value in found.values.items()}
        if before.sequence_accelerators is not None:
            self.table["training"]["sequence_accelerators"] = before.sequence_accelerators
        self.parts.append(Part("training", data, found))

    def decode_s(self, times: DecodeTimes, tensor_parallel: FloatArray) -> FloatArray:
        """Return the seconds of stretches of decode with the fitted coefficients."""
        if self.named is not None:
            return self._named_s(self.coefficients.model_dump(), tensor_parallel, times)
        decode = AffineDecode.model_validate(self.table["decode"])
        prefill = PrefillConfig.model_validate(self.table.get("prefill", {}))
        return _stretches_s(decode, prefill, times, tensor_parallel=1)

    def _named_s(self, changed: Mapping[str, float], tensor_parallel: FloatArray, times: DecodeTimes) -> FloatArray:
        assert self.named is not None
        gpu, model = named_engine(self.given, *self.named)
        values = self._values.model_copy(update=dict(changed))
        seconds = np.zeros(len(times.seconds))
        for size in np.unique(tensor_parallel):
            of, tp = tensor_parallel == size, int(size)
            decode = derive_decode(gpu, model, tensor_parallel=tp, coefficients=values)
            prefill = derive_prefill(gpu, model, tensor_parallel=tp, coefficients=values)
            seconds[of] = _stretches_s(decode, prefill, times, tensor_parallel=tp)[of]
        return seconds

    def _training_s(self, changed: Mapping[str, float], times: TrainingTimes, accelerators: FloatArray) -> FloatArray:

        def config_of(number: int) -> TrainingConfig:
            if self.named is None:
                return (self.given.training or TrainingConfig(token_s=0.0)).model_copy(update=dict(changed))
            values = self._values.model_copy(update=dict(changed))
            return derive_training(*self.named, training_accelerators=number, coefficients=values)

        seconds = np.zeros(len(times.seconds))
        for number in np.unique(accelerators):
            cost = training_cost(config_of(int(number)), training_accelerators=int(number))
            seconds = np.where(accelerators == number, times.bounds_s(cost).max(axis=0), seconds)
        return seconds

    def _check_unit(self, what: str, measured: FloatArray, expected: FloatArray) -> None:
        times = float(np.median(measured / expected))
        if not 1 / MOST_TIMES < times < MOST_TIMES:
            raise ConfigError(
                f"{what} seconds have a median of {np.median(measured):.3g}, {times:.2g} times what {self._system} "
                f"needs by the hardware model, {np.median(expected):.3g}: check unit, GPU and model"
            )

    def check_number(self, name: str, given_s: float, expected_s: float) -> None:
        """Raise ConfigError for seconds far above the estimate; never for an unknown GPU or model.

        Seconds far below are either refused by the fit, which cannot reach them, or belong to a fast link.
        """
        if self.named is not None and given_s > MOST_TIMES * expected_s:
            raise ConfigError(
                f"{name}={given_s:g} is {given_s / expected_s:.2g} times what {self._system} needs by the hardware "
                f"model, {expected_s:.3g} s: check unit, GPU and model"
            )

    @property
    def _system(self) -> str:
        assert self.named is not None
        return "{1.name} on {0.name}".format(*self.named)

    def _check_peak(self, times: TrainingTimes, accelerators: FloatArray) -> None:
        """Raise ConfigError if training was faster than the accelerator's peak: another unit, or another model."""
        assert self.named is not None
        gpu, model = self.named
        least_s = self._training_s(FASTEST_TRAINING, times, accelerators)
        share = float(np.median(least_s / times.seconds))
        if share > 1.0:
            raise ConfigError(
                f"training seconds of {np.median(times.seconds):.3g} (median) would be {share:.1f} times the peak of "
                f"{gpu.name} for {model.name}: check the unit, the tokens and the model"
            )

    def _take(self, what: str, data: str, found: Fit, tables: Sequence[str]) -> None:
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
    batch = ratio(times.sequences, times.steps)
    context_s = context_token_s(decode, tensor_parallel) * times.context
    return times.steps * batch_s(decode, tensor_parallel, batch) + context_s + _filled_s(prefill, times)


def _filled_s(prefill: PrefillConfig, times: DecodeTimes) -> FloatArray:
    return prefill_s(prefill, sequences=times.prefills, tokens=times.prefill_tokens, squares=times.prefill_squares)


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


def rounded(value: float, digits: int = 6) -> float:
    """Return a number with so many significant digits."""
    return float(f"{value:.{digits}g}")


# Three known numbers: train step, rollout batch, weight synchronization.

TRIES = 12
"""Simulations to find a factor, at most (count)."""
CLOSE = 1e-3
"""Share of the measured time at which they end (no unit)."""
LEAST_SLOPE = 0.2
"""Least slope, of the log of the time over that of the factor, by which the next factor is chosen (no unit)."""
WITHIN = 0.01
"""Share by which the model may miss a number and count as giving it (no unit)."""
JUST_OUT = 0.05
"""Share by which a number may be out of the model's reach with a warning: rounding and spread in logs (no unit)."""


def calibrate_numbers(
    run: RunConfig,
    *,
    train_step_s: float | None = None,
    rollout_batch_s: float | None = None,
    weight_sync_s: float | None = None,
    model_train_s: Callable[[RunConfig], float],
    model_rollout_s: Callable[[RunConfig], float],
) -> HardwareFit:
    """Fit one speed factor of the trainer and one of generation to numbers that a user saw in ``run`` (seconds).

    ``train_step_s``: of an optimizer step. ``rollout_batch_s``: for the rollouts of an RL step, from empty engines to
    the last token. ``weight_sync_s``: from the end of an optimizer step to engines with its weights. ``model_train_s``
    and ``model_rollout_s`` return the first two as simulated.
    Raises ConfigError if no number is given, or for the reasons of ``fit_factor`` and ``take_weight_sync``.
    """
    if train_step_s is None and rollout_batch_s is None and weight_sync_s is None:
        raise ConfigError(
            "calibrate needs SOURCE, or some of --train-step-s, --rollout-batch-s, --weight-sync-s with --run RUN.toml"
        )
    result = HardwareFit(run.hardware, fixed_coefficients(run))
    if train_step_s is not None:
        fit_factor(result, run, "training", train_step_s, model_train_s, name="--train-step-s")
    if rollout_batch_s is not None:
        fit_factor(result, run, "generation", rollout_batch_s, model_rollout_s, name="--rollout-batch-s")
    if weight_sync_s is not None:
        take_weight_sync(result, run, weight_sync_s, name="--weight-sync-s")
    return result


def fit_factor(
    result: HardwareFit,
    run: RunConfig,
    what: Literal["training", "generation"],
    goal_s: float,
    model_s: Callable[[RunConfig], float],
    *,
    name: str,
) -> None:
    """Add the factor on all times of ``what`` with which the model takes ``goal_s`` for a run of this hardware.

    It warns where the model just misses. ConfigError, which calls the number ``name``, if it is not above 0, shorter
    than the hardware model allows, or so long that it must be in another unit.
    """
    table = run.hardware.model_dump(mode="json", exclude_none=True)

    def slowed(factor: float) -> dict[str, Any]:
        return {
            part: {key: rounded(one) if isinstance(one, float) else one for key, one in values.items()}
            for part, values in _slower(run, what, factor).items()
        }

    def slowed_s(factor: float) -> float:
        hardware = HardwareConfig.model_validate(merged_tables(table, slowed(factor)))
        return model_s(run.model_copy(update={"hardware": hardware}))

    _check_seconds(name, goal_s)
    now_s = model_s(run)
    result.check_number(name, goal_s, now_s)
    factor, slope = 1.0, 1.0
    for _ in range(TRIES):
        if abs(now_s / goal_s - 1) < CLOSE:
            break
        last, last_s = factor, now_s
        factor *= (goal_s / now_s) ** (1 / slope)
        now_s = slowed_s(factor)
        if abs(now_s / last_s - 1) < CLOSE / 10:
            break  # other times set it
        # Where other times stand beside these, a factor changes the sum by a smaller one.
        slope = min(1.0, max(LEAST_SLOPE, math.log(now_s / last_s) / math.log(factor / last)))
    missed = abs(now_s / goal_s - 1)
    if missed > JUST_OUT:
        raise ConfigError(
            f"{name}={goal_s:g} is out of reach: the nearest that the hardware model gives is {now_s:.3g} s; check "
            "the unit, and the batch, lengths, latencies and accelerators of --run"
        )
    if missed > WITHIN:
        result.warnings.append(
            f"{name}={goal_s:g} is just out of reach: the nearest that the hardware model gives is {now_s:.3g} s, taken"
        )
    result.table = merged_tables(result.table, slowed(factor))
    result.factors[what] = factor
    result.notes.append(
        f"{what}: one number gives one factor, {factor:.3g} on all its times; how they divide among their parts is not "
        "determined and stays as it was"
    )


def take_weight_sync(result: HardwareFit, run: RunConfig, seconds: float, *, name: str) -> None:
    """Add a weight synchronization of so many seconds; ConfigError if they are not above 0, or in another unit."""
    _check_seconds(name, seconds)
    result.check_number(name, seconds, resolved_hardware(run).weights.pause_s)
    result.table["weights"] = {"publish_s": seconds, "pause_s": seconds}
    result.notes.append(
        "weights: taken to stop trainer and engines all the time; one number does not say whether engines go on "
        "generating meanwhile (transfer_s)"
    )


def _check_seconds(name: str, seconds: float) -> None:
    if not 0 < seconds < 1e7:
        raise ConfigError(f"{name} must be above 0 and in seconds, got {seconds:g}")


def _slower(run: RunConfig, what: Literal["training", "generation"], factor: float) -> dict[str, Any]:
    hardware, training = run.hardware, what == "training"
    tables = {name: getattr(hardware, name) for name in (("training",) if training else ("decode", "prefill"))}
    parts: dict[str, Any] = {
        name: one.with_slower_software(factor).model_dump(exclude_none=True)
        for name, one in tables.items()
        if one is not None
    }
    if (training and not parts) or (not training and hardware.by_name):
        values = coefficients(hardware.level, hardware.named_coefficients)
        parts["coefficients"] = {
            name: min(1.0, getattr(values, name) / factor) if name in SHARES_OF_PEAK else getattr(values, name) * factor
            for name in (TRAINING_COEFFICIENTS if training else GENERATION_COEFFICIENTS)
        }
    return parts


def merged_tables(table: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table ``[hardware]`` with the keys of another in place of its own; coefficients one by one."""
    merged = {**table, **parts}
    if "coefficients" in parts:
        merged["coefficients"] = {**table.get("coefficients", {}), **parts["coefficients"]}
    return merged
