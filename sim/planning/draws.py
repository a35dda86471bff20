"""Draws of all that is not known, the same for every candidate.

Theory. ``pipelinerl.hardware.prior`` says how far each time may be off. A draw has a factor for each, and values
between their levels for the coefficients that do not move all seconds alike; the steady state of every candidate is
then found in it. Candidates share the draws (common random numbers), so what moves all alike does not blur their
order. What the run file states is known: as well as a measurement is where it decides a whole time, and exactly where
it is a choice of the user.

Shapes: D draws.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import NormalDist
from typing import TypeVar

import numpy as np

from pipelinerl.calibration.hardware_fit import DECODE_COEFFICIENTS, TRAINING_COEFFICIENTS
from pipelinerl.calibration.measured import Measured
from pipelinerl.config.resolve import stated_coefficients, transport_of
from pipelinerl.config.run import RunConfig
from pipelinerl.hardware import prior
from pipelinerl.hardware.coefficients import Level, coefficient_table, sync_coefficient
from pipelinerl.hardware.prior import between_levels
from pipelinerl.hardware.tables import PhaseSwitchConfig, ResolvedHardware, WeightTransferConfig
from pipelinerl.theory.lengths import Lengths, LengthStatistics
from pipelinerl.util.arrays import FloatArray
from sim.planning.candidates import Screener

SecondsTable = TypeVar("SecondsTable", WeightTransferConfig, PhaseSwitchConfig)

NUM_DRAWS = 400
"""Draws (count): a probability of 0.95 is found to 0.011."""


class Unknown(StrEnum):
    """A factor that is not known."""

    GENERATION = "decode step"
    """On all seconds of generation."""
    TRAINING = "optimizer step"
    """On all seconds of training."""
    WEIGHTS = "weight transfer"
    """On the seconds of a weight transfer, of both arms."""
    WEIGHTS_APART = "weight transfer of asynchronous RL"
    """On those of asynchronous RL besides."""
    WEIGHTS_COLOCATED = "weight transfer of synchronous RL"
    """On those of synchronous RL besides."""
    SWITCH = "phase switch"
    """On the seconds between the phases of synchronous RL."""
    ANSWERS = "mean answer"
    """On the tokens of every answer."""
    RUN_APART = "the rest of asynchronous RL"
    """On its step as a whole: what the model leaves out."""
    RUN_COLOCATED = "the rest of synchronous RL"
    """The same of synchronous RL."""


NOT_DRAWN = (
    "sync_s_per_root_gb", "stream_bandwidth", "nccl_bandwidth", "file_bandwidth", "host_bandwidth",
    "switch_to_training_s", "switch_to_generation_s",
    "recomputation", "pack_tokens", "sequence_accelerators", "extra_forward_passes",
)  # fmt: skip
"""Coefficients of times that have a factor of their own, and choices of the trainer, which its user knows."""


def spreads(config: RunConfig, measured: Measured, guessed: Collection[str] = ()) -> dict[Unknown, float]:
    """Return the standard deviation of the log of each factor.

    Args:
        config: The run file. A table of ``[hardware]``, or a coefficient that a calibration fits, is a measurement. A
            table of weights is measured in one arm, that of the run file's schedule, beside GPU and model by name.
        measured: What has been merged into it.
        guessed: Keys of it that nobody gave: a mean answer among them is believed less.
    """
    believed = prior.MEAN_SD if "workload.length.mean" in guessed else prior.ANSWERS_SD
    given, stated = config.hardware, config.hardware.coefficients
    error, by_name = prior.MEASURED_SD, given.by_name
    decode_known = given.decode is not None or any(name in stated for name in DECODE_COEFFICIENTS)
    training_known = given.training is not None or any(name in stated for name in TRAINING_COEFFICIENTS)
    switch_known = not by_name or given.switch is not None or "switch_to_training_s" in stated
    return {
        Unknown.GENERATION: error if decode_known else prior.GENERATION_SD,
        Unknown.TRAINING: error if training_known else prior.TRAINING_SD,
        **_weights(config, measured),
        Unknown.SWITCH: error if switch_known else prior.SWITCH_SD,
        Unknown.ANSWERS: error if measured.answers else believed,
        Unknown.RUN_APART: prior.RUN_SD,
        Unknown.RUN_COLOCATED: prior.RUN_SD,
    }


def _weights(config: RunConfig, measured: Measured) -> dict[Unknown, float]:
    """Return the spreads of the weight transfer: what both arms share, and each arm's own.

    An arm that was measured tells what both share and its own only together, so the other stays as uncertain as it was.
    """
    given, (common, own) = config.hardware, _unmeasured_weights(config)
    arms = {False: Unknown.WEIGHTS_APART, True: Unknown.WEIGHTS_COLOCATED}
    if not given.by_name or "sync_s_per_root_gb" in given.coefficients:
        return {Unknown.WEIGHTS: prior.MEASURED_SD, **dict.fromkeys(arms.values(), 0.0)}
    if given.weights is not None:
        known, other = config.colocated, not config.colocated
        return {Unknown.WEIGHTS: prior.MEASURED_SD, arms[known]: 0.0, arms[other]: own[other]}
    if measured.weights:
        sds = {arm: prior.MEASURED_SD if arm in measured.weights else math.hypot(common, own[arm]) for arm in arms}
        return {Unknown.WEIGHTS: 0.0, **{arms[arm]: sd for arm, sd in sds.items()}}
    return {Unknown.WEIGHTS: common, **{arms[arm]: own[arm] for arm in arms}}


BANDWIDTHS = {
    "broadcast": ("host_bandwidth", "stream_bandwidth"),
    "streamed": ("nccl_bandwidth",),
    "file": ("host_bandwidth", "file_bandwidth"),
}
"""Coefficients that decide the seconds of a transport."""


def _unmeasured_weights(config: RunConfig) -> tuple[float, dict[bool, float]]:
    """Return what both arms share of the spread before any measurement, and each arm's own.

    A transport of ours is as uncertain as the least known of its bandwidths. A method that the run file names has its
    share of the spread of an unknown one.
    """
    if transport_of(config) is not None:
        assert config.train is not None
        transports = {arm: config.train.chosen_transport(colocated=arm) for arm in (False, True)}
        return 0.0, {arm: max(map(_level_sd, BANDWIDTHS[one])) for arm, one in transports.items()}
    share, method = 1.0, config.hardware.weight_sync
    if method is not None:
        name = "sync_s_per_root_gb"
        known = [sync_coefficient(method, level)[name] for level in (Level.OPTIMISTIC, Level.PESSIMISTIC)]
        unknown = [coefficient_table()[name][level] for level in (Level.OPTIMISTIC, Level.PESSIMISTIC)]
        share = math.log(known[1] / known[0]) / math.log(unknown[1] / unknown[0])
    return prior.SYNC_SD * share, dict.fromkeys([False, True], prior.SYNC_ARM_SD * share)


def _level_sd(name: str) -> float:
    """Return the standard deviation of the log of a coefficient, whose levels are the ends that hold 80 %."""
    entry = coefficient_table()[name]
    return abs(math.log(entry[Level.PESSIMISTIC] / entry[Level.OPTIMISTIC])) / (2 * prior.END_SDS)


@dataclass(frozen=True, eq=False)
class Draws:
    """Draws of all that is not known."""

    logs_D: dict[Unknown, FloatArray]
    """Log of each factor by draw."""
    coefficients_D: dict[str, FloatArray]
    """Coefficients between their levels by draw."""
    sds: dict[Unknown, float]
    """Standard deviation of each of these logs."""

    @property
    def number(self) -> int:
        """Draws (count)."""
        return len(self.logs_D[Unknown.GENERATION])

    def weights(self, *, colocated: bool) -> FloatArray:
        """Return the log of the factor on an arm's weight transfer."""
        own = Unknown.WEIGHTS_COLOCATED if colocated else Unknown.WEIGHTS_APART
        return self.logs_D[Unknown.WEIGHTS] + self.logs_D[own]

    def run(self, *, colocated: bool) -> FloatArray:
        """Return the log of what an arm's step lasts longer than its parts."""
        return self.logs_D[Unknown.RUN_COLOCATED if colocated else Unknown.RUN_APART]

    def screener(self, draw: int, config: RunConfig, answers: LengthStatistics) -> Screener:
        """Return what screens candidates in one draw.

        Args:
            draw: Its number, from 0.
            config: The run file.
            answers: Its prompts and answers.
        """
        factors = {name: math.exp(log_D[draw]) for name, log_D in self.logs_D.items()}

        def drawn(central: ResolvedHardware, colocated: bool) -> ResolvedHardware:
            weights = math.exp(self.weights(colocated=colocated)[draw])
            tables = {
                "decode": central.decode.on_slower_accelerators(factors[Unknown.GENERATION]),
                "prefill": central.prefill.on_slower_accelerators(factors[Unknown.GENERATION]),
                "training": central.training.on_slower_accelerators(factors[Unknown.TRAINING]),
                "weights": _longer(central.weights, weights),
                "switch": _longer(central.switch, factors[Unknown.SWITCH]),
            }
            return central.model_copy(update=tables)

        longer = longer_answers(answers, factors[Unknown.ANSWERS], longest=config.workload.length.max)
        coefficients = {name: float(value_D[draw]) for name, value_D in self.coefficients_D.items()}
        hardware: dict[str, object] = {}
        if config.hardware.by_name:
            hardware = {"level": Level.CENTRAL, "coefficients": {**config.hardware.coefficients, **coefficients}}
        return Screener(config, longer, hardware, drawn=drawn)


def make_draws(
    config: RunConfig, measured: Measured, *, guessed: Collection[str] = (), number: int = NUM_DRAWS, seed: int = 0
) -> Draws:
    """Return draws; each unknown is spread evenly over its distribution, and apart from all others.

    Args:
        config: The run file.
        measured: What has been merged into it.
        guessed: Keys of it that nobody gave.
        number: Draws (count).
        seed: Of the draws.
    """
    stated = stated_coefficients(config)
    generator = np.random.default_rng(seed)
    sds = spreads(config, measured, guessed)
    logs_D = {name: sd * _normals(number, generator) for name, sd in sds.items()}
    coefficients_D = {}
    for name, entry in coefficient_table().items():
        normal_D = _normals(number, generator)  # drawn in any case: what is stated does not move the other draws
        values = {level: float(entry[level]) for level in Level}
        if config.hardware.by_name and name not in (*stated, *NOT_DRAWN) and len(set(values.values())) > 1:
            coefficients_D[name] = between_levels(values, normal_D)
    return Draws(logs_D, coefficients_D, sds)


def _normals(number: int, generator: np.random.Generator) -> FloatArray:
    """Return standard normal numbers, one from each of so many parts of equal probability, in random order."""
    inverse = NormalDist().inv_cdf
    return np.array([inverse((part + 0.5) / number) for part in generator.permutation(number)])


def _longer(table: SecondsTable, factor: float) -> SecondsTable:
    return table.model_copy(update={name: value * factor for name, value in table.model_dump().items()})


def longer_answers(answers: LengthStatistics, factor: float, *, longest: int) -> LengthStatistics:
    """Return answers that are all longer by a factor, and cut at a limit.

    Args:
        answers: What is made longer.
        factor: Above 0.
        longest: The limit (tokens).
    """
    unfinished = answers.lengths.unfinished
    most = min(max(1, round(len(unfinished) * factor)), max(longest, 1))
    place = np.minimum((np.arange(most) / factor).astype(np.int64), len(unfinished) - 1)
    return replace(answers, lengths=Lengths(unfinished[place]), group_wait=answers.group_wait * factor)
