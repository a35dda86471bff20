"""Draws of the unknowns, the same for every candidate (common random numbers): how sure is a recommendation?

Theory. A draw has a factor for each uncertain time (``pipelinerl.hardware.prior``), and values between their levels for
the coefficients that do not move all seconds alike; the steady state of every candidate is found in it. A number in
the run file is as certain as a measurement where it decides a whole time, and exact where it is a choice of the user.

A candidate is *right* in a draw if it is the fastest there, within ``TIE``. *Faster* is a higher expected throughput,
the mean over the draws. The *regret* of a candidate is its loss against the fastest of each draw, over the mean of
these. Draws in which asynchronous against synchronous RL comes out as in published pairs count more
(``with_evidence``). A limit broken in a draw costs no throughput: its probability is given beside the regret. Bands,
sensitivity, effects of assumptions, probabilities and the value of a measurement are all read from these draws.

Shapes: D draws, C candidates.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import chain, combinations
from statistics import NormalDist
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from pipelinerl.calibration.measured import Measured
from pipelinerl.calibration.solve import DECODE_COEFFICIENTS, TRAINING_COEFFICIENTS
from pipelinerl.config.question import Assumption
from pipelinerl.config.resolve import stated_coefficients, transport_of
from pipelinerl.config.run import CHECK_STEPS, RunConfig, check_config
from pipelinerl.hardware import prior
from pipelinerl.hardware.coefficients import Level, coefficient_table
from pipelinerl.hardware.costs import PhaseSwitchConfig, ResolvedHardware
from pipelinerl.hardware.prior import CERTAIN, between_levels
from pipelinerl.hardware.stack import stack_levels
from pipelinerl.hardware.transport import ROOT_LAW, WeightTransferConfig, WeightTransport
from pipelinerl.records.plan_report import (
    Assumed,
    AsynchronousOdds,
    Band,
    CertaintyReport,
    Instead,
    MeasurementValue,
    Safest,
    SplitCurve,
    Threshold,
    UnknownEffect,
)
from pipelinerl.theory.lengths import Lengths, LengthStatistics
from pipelinerl.util.arrays import FloatArray, IntArray
from sim.planning.choose import TIE
from sim.planning.explain import (
    DECODE,
    LOG_PROBABILITIES,
    NOTHING,
    SWITCH,
    TRAIN,
    UPDATE,
    screened_synchronous,
    stages_of,
    step_times,
)
from sim.planning.screen import Candidate, Screener
from sim.planning.simulate import Outcome
from sim.planning.space import AXES, Limits, SearchSpace, choice_of

PERCENTILES = (0.1, 0.9)
"""Ends of a band."""
MOST_SPLITS = 32
"""Points of the curve of splits, about (count)."""
SPLIT_DRAWS = 40
"""Draws behind its band (count)."""
DRAWN_KEYS = {"workload.length.mean": "mean answer"}
"""Keys of a run file, each with the unknown that it decides."""
FIFTH = 0.2
"""Share of the draws with the lowest, the highest, or the nearest values of an unknown."""
NUM_DRAWS = 400
"""Draws (count): a probability of 0.95 is found to 0.011."""


class Unknown(StrEnum):
    """A factor that is not known."""

    GENERATION = "decode step"
    """On all seconds of generation."""
    TRAINING = "optimizer step"
    """On all seconds of training."""
    WEIGHTS = "weight transfer"
    """On the seconds of a transfer, of both arms."""
    WEIGHTS_APART = "weight transfer of asynchronous RL"
    """On the arm's own part."""
    WEIGHTS_COLOCATED = "weight transfer of synchronous RL"
    """On the arm's own part."""
    SWITCH = "phase switch"
    """On the seconds between the phases of synchronous RL."""
    ANSWERS = "mean answer"
    """On the tokens of every answer."""
    RUN_APART = "the rest of asynchronous RL"
    """On its whole step: the error of the model's form."""
    RUN_COLOCATED = "the rest of synchronous RL"
    """On its whole step."""


OWN_WEIGHTS = {False: Unknown.WEIGHTS_APART, True: Unknown.WEIGHTS_COLOCATED}
"""The unknown on each arm's own part of the weight transfer, by colocated."""
OWN_RUN = {False: Unknown.RUN_APART, True: Unknown.RUN_COLOCATED}
"""The unknown on each arm's whole step, by colocated."""
NOT_DRAWN = (
    "sync_s_per_root_gb", "stream_bandwidth", "file_bandwidth", "host_bandwidth",
    "changed_share", "delta_bandwidth",
    "switch_to_training_s", "switch_to_generation_s",
    "recomputation", "adapter_rank", "pack_tokens", "sequence_accelerators", "extra_forward_passes",
)  # fmt: skip
"""Coefficients of times that have a factor of their own, and choices of the trainer, which its user knows."""


def spreads(config: RunConfig, measured: Measured, guessed: Collection[str] = ()) -> dict[Unknown, float]:
    """Return the standard deviation of the log of each factor; ``guessed`` keys are believed less.

    A table of ``[hardware]``, or a coefficient that a calibration fits, is a measurement. A table of weights beside GPU
    and model by name is measured in the arm of the run file's schedule.
    """
    believed = prior.MEAN_SD if "workload.length.mean" in guessed else prior.ANSWERS_SD
    given, stated = config.hardware, config.hardware.coefficients
    error, by_name = prior.MEASURED_SD, given.by_name
    switch = stack_levels(None, given.software).get("switch_to_training_s")
    engine_known = given.engine is not None and "hardware.engine" not in guessed
    decode_known = given.decode is not None or any(name in stated for name in DECODE_COEFFICIENTS)
    training_known = given.training is not None or any(name in stated for name in TRAINING_COEFFICIENTS)
    switch_known = not by_name or given.switch is not None or "switch_to_training_s" in stated
    return {
        Unknown.GENERATION: error if decode_known else prior.ENGINE_SD if engine_known else prior.GENERATION_SD,
        Unknown.TRAINING: error if training_known else prior.TRAINING_SD,
        **_weights(config, measured),
        Unknown.SWITCH: error if switch_known else prior.SWITCH_SD if switch is None else _level_sd(switch),
        Unknown.ANSWERS: error if measured.answers else believed,
        Unknown.RUN_APART: prior.RUN_SD,
        Unknown.RUN_COLOCATED: prior.RUN_SD,
    }


def _weights(config: RunConfig, measured: Measured) -> dict[Unknown, float]:
    """Return the spreads of the weight transfer: common to both arms, and each arm's own.

    A measured arm shows only the sum of both, so the other arm stays as uncertain as it was.
    """
    given, (common, own) = config.hardware, _unmeasured_weights(config)
    if not given.by_name or "sync_s_per_root_gb" in given.coefficients:
        common, own = prior.MEASURED_SD, dict.fromkeys(own, 0.0)
    elif given.weights is not None:
        common, own = prior.MEASURED_SD, own | {config.colocated: 0.0}
    elif measured.weights:
        apart = {arm: math.hypot(common, sd) for arm, sd in own.items()}
        common, own = 0.0, apart | dict.fromkeys(measured.weights, prior.MEASURED_SD)
    return {Unknown.WEIGHTS: common, **{OWN_WEIGHTS[arm]: sd for arm, sd in own.items()}}


def _unmeasured_weights(config: RunConfig) -> tuple[float, dict[bool, float]]:
    """Return the spread common to both arms before any measurement, and each arm's own.

    A transport of ours is as uncertain as the least known of its bandwidths; a published method has its share of the
    spread of an unknown one, half of whose variance both arms share, if it is the same in both.
    """
    methods = {arm: transport_of(config, colocated=arm) for arm in (False, True)}
    sds = {arm: _transport_sd(one) for arm, one in methods.items()}
    if methods[False] is not methods[True] or ROOT_LAW not in methods[False].coefficients:
        return 0.0, sds
    return sds[False] / math.sqrt(2), {arm: sd / math.sqrt(2) for arm, sd in sds.items()}


def _transport_sd(transport: WeightTransport) -> float:
    """Return the standard deviation of the log of the seconds of a weight transfer."""
    table = coefficient_table()
    if ROOT_LAW not in transport.coefficients:
        return max((_level_sd(table[name]) for name in transport.coefficients), default=0.0)
    unknown_sd = math.hypot(prior.SYNC_SD, prior.SYNC_ARM_SD)
    return unknown_sd * _level_sd(transport.levels or table[ROOT_LAW]) / _level_sd(table[ROOT_LAW])


def _level_sd(levels: Mapping[Any, float]) -> float:
    """Return the standard deviation of the log of a coefficient, whose levels are the ends that hold 80 %."""
    return abs(math.log(levels[Level.PESSIMISTIC] / levels[Level.OPTIMISTIC])) / (2 * prior.END_SDS)


@dataclass(frozen=True, eq=False)
class Draws:
    """Draws of every uncertain number."""

    values_D: dict[str, FloatArray]
    """Log of each factor, and each uncertain coefficient, by draw."""
    sds: dict[Unknown, float]
    """Standard deviation of the log of each factor."""

    @property
    def unknowns(self) -> dict[str, FloatArray]:
        """The values that differ between draws."""
        return {name: value_D for name, value_D in self.values_D.items() if value_D.std() > 0}

    @property
    def number(self) -> int:
        """Draws (count)."""
        return len(self.values_D[Unknown.GENERATION])

    def first(self, number: int) -> Self:
        """Return the first draws."""
        return replace(self, values_D={name: value_D[:number] for name, value_D in self.values_D.items()})

    def weights(self, *, colocated: bool) -> FloatArray:
        """Return the log of the factor on an arm's weight transfer."""
        return self.values_D[Unknown.WEIGHTS] + self.values_D[OWN_WEIGHTS[colocated]]

    def screener(self, draw: int, space: SearchSpace) -> Screener:
        """Return the screener of one draw, counted from 0."""
        config = space.config
        factors = {name: math.exp(self.values_D[name][draw]) for name in self.sds}

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

        longer = longer_answers(space.answers, factors[Unknown.ANSWERS], longest=config.workload.length.max)
        coefficients = {name: float(value_D[draw]) for name, value_D in self.values_D.items() if name not in self.sds}
        hardware: dict[str, object] = {}
        if config.hardware.by_name:
            hardware = {"level": Level.CENTRAL, "coefficients": {**config.hardware.coefficients, **coefficients}}
        return Screener(config, longer, hardware, drawn=drawn)


def make_draws(
    config: RunConfig, measured: Measured, *, guessed: Collection[str] = (), number: int = NUM_DRAWS
) -> Draws:
    """Return draws; each unknown is spread evenly over its distribution, and apart from all others."""
    stated = stated_coefficients(config)
    generator = np.random.default_rng(config.seed)
    sds = spreads(config, measured, guessed)
    values_D = {name.value: sd * _normals(number, generator) for name, sd in sds.items()}
    own = stack_levels(config.hardware.engine, config.hardware.software)
    for name, entry in coefficient_table().items():
        normal_D = _normals(number, generator)  # drawn in any case: a stated coefficient does not move the other draws
        values = own.get(name) or {level: float(entry[level]) for level in Level}
        if config.hardware.by_name and name not in (*stated, *NOT_DRAWN) and len(set(values.values())) > 1:
            values_D[name] = between_levels(values, normal_D)
    return Draws(values_D, sds)


def _normals(number: int, generator: np.random.Generator) -> FloatArray:
    """Return standard normal numbers, one from each of so many parts of equal probability, in random order."""
    inverse = NormalDist().inv_cdf
    return np.array([inverse((part + 0.5) / number) for part in generator.permutation(number)])


def _longer(table: WeightTransferConfig | PhaseSwitchConfig, factor: float) -> WeightTransferConfig | PhaseSwitchConfig:
    return table.model_copy(update={name: value * factor for name, value in table.model_dump().items()})


def longer_answers(answers: LengthStatistics, factor: float, *, longest: int) -> LengthStatistics:
    """Return answers that are all longer by a factor above 0, and cut at the longest (tokens)."""
    unfinished = answers.lengths.unfinished
    most = min(max(1, round(len(unfinished) * factor)), max(longest, 1))
    place = np.minimum((np.arange(most) / factor).astype(np.int64), len(unfinished) - 1)
    return replace(answers, lengths=Lengths(unfinished[place]), group_wait=answers.group_wait * factor)


# --------------------------------------------------------------------------------------------- candidates in every draw


@dataclass(frozen=True, eq=False)
class DrawnCandidates:
    """Candidates screened in every draw, each corrected by its simulation."""

    draws: Draws
    candidates: Sequence[Candidate]
    numbers_3DC: FloatArray
    """By the screening: log of the throughput, mean lag (optimizer steps), GPU-hours of the whole run."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Simulated over screened throughput by label; a candidate without simulation has the mean of its kind."""

    @classmethod
    def of(cls, space: SearchSpace, candidates: Sequence[Candidate], draws: Draws) -> Self:
        """Screen candidates in every draw."""
        numbers_3DC = np.empty((3, draws.number, len(candidates)))
        for draw in range(draws.number):
            screener = draws.screener(draw, space)
            for place, one in enumerate(candidates):
                row = screener.screen(one)
                numbers_3DC[:, draw, place] = row.tokens_per_s, row.estimate.lag_mean, row.gpu_hours
        run_DC = np.stack([draws.values_D[OWN_RUN[one.schedule.colocated]] for one in candidates], axis=1)
        numbers_3DC[0] = np.log(numbers_3DC[0]) - run_DC
        numbers_3DC[2] *= np.exp(run_DC)
        return cls(draws, candidates, numbers_3DC)

    @cached_property
    def log_rates(self) -> FloatArray:
        """Log of the throughput, corrected by the simulations."""
        known: dict[str, list[float]] = {}
        for one in self.candidates:
            known.setdefault(one.family, []).extend([self.factors[one.label]] if one.label in self.factors else [])
        usual = {family: float(np.mean(some or [*self.factors.values(), 1.0])) for family, some in known.items()}
        log_C: FloatArray = np.log([self.factors.get(one.label, usual[one.family]) for one in self.candidates])
        return np.asarray(self.numbers_3DC[0] + log_C)

    @cached_property
    def shares(self) -> dict[str, float]:
        """Expected throughput of every candidate over that of the fastest of each draw: 1 - regret; by label."""
        return dict(zip([one.label for one in self.candidates], mean_shares(self.log_rates), strict=True))

    def expected(self, label: str) -> float:
        """Return the expected throughput of a candidate (tokens/s)."""
        return float(np.exp(self.log_rates[:, self.place(label)]).mean())

    def with_evidence(self) -> Self:
        """Return the candidates in as many draws, taken again by their likelihood in view of published pairs.

        Systematic resampling: draw D is taken in proportion to the density, at its log of asynchronous over synchronous
        throughput, of those of published pairs (``prior.PAIRS_MEAN``). Unchanged without both arms.
        """
        ahead_D = ahead(self.candidates, self.log_rates)
        if ahead_D is None:
            return self
        weight_D = np.exp(-(((ahead_D - prior.PAIRS_MEAN) / prior.PAIRS_SD) ** 2) / 2)
        if not weight_D.any():
            return self
        places = (np.arange(len(weight_D)) + 0.5) / len(weight_D)
        taken_D = np.searchsorted(np.cumsum(weight_D / weight_D.sum()), places).clip(max=len(weight_D) - 1)
        values_D = {name: value_D[taken_D] for name, value_D in self.draws.values_D.items()}
        return replace(self, draws=replace(self.draws, values_D=values_D), numbers_3DC=self.numbers_3DC[:, taken_D])

    def place(self, label: str) -> int:
        """Return the column of a candidate."""
        return [one.label for one in self.candidates].index(label)

    def with_candidates(self, space: SearchSpace, more: Sequence[Candidate]) -> Self:
        """Return these and further candidates, screened in the same draws."""
        new = type(self).of(space, more, self.draws)
        numbers_3DC = np.concatenate([self.numbers_3DC, new.numbers_3DC], axis=2)
        return replace(self, candidates=[*self.candidates, *more], numbers_3DC=numbers_3DC)

    def without(self, label: str) -> Self:
        """Return all candidates but one."""
        left = [place for place, one in enumerate(self.candidates) if one.label != label]
        candidates = [self.candidates[place] for place in left]
        return replace(self, candidates=candidates, numbers_3DC=self.numbers_3DC[:, :, left])

    def band(self, label: str) -> Band:
        """Return the band of a candidate's throughput (tokens/s)."""
        return band_of(np.exp(self.log_rates[:, self.place(label)]))

    def over(self, label: str, other: str) -> Band:
        """Return the band of a candidate's throughput over that of another (ratio)."""
        return band_of(np.exp(self.log_rates[:, self.place(label)] - self.log_rates[:, self.place(other)]))

    def keeps(self, label: str, limits: Limits, *, staler: float) -> float | None:
        """Return the probability that a simulated candidate keeps to the limits; None if none depends on the draws.

        The largest lag is kept by waiting. ``staler`` is simulated over screened mean lag.
        """
        if limits.broken(math.inf, math.inf, ess=0.0) is None:
            return None
        place, slower = self.place(label), 1 / self.factors[label]
        limits = limits.at(self.candidates[place].rented)
        broken = [limits.broken(lag * staler, hours * slower) for lag, hours in self.numbers_3DC[1:, :, place].T]
        return broken.count(None) / len(broken)


def band_of(value_D: FloatArray) -> Band:
    """Return the range of 80 % of the draws."""
    low, high = np.quantile(value_D, PERCENTILES)
    return Band(low=float(low), high=float(high))


def mean_shares(log_DC: FloatArray) -> list[float]:
    """Return the expected throughput of every candidate over that of the fastest of each draw."""
    share_C: list[float] = _shares(log_DC).mean(axis=0).tolist()
    return share_C


def _shares(log_DC: FloatArray) -> FloatArray:
    """Return throughput over the mean of the fastest of each draw, shape [D, C]."""
    rate_DC = np.exp(log_DC - log_DC.max())
    return np.asarray(rate_DC / rate_DC.max(axis=1).mean())


def sensitivity(drawn: DrawnCandidates, label: str, *, least: float) -> list[UnknownEffect]:
    """Return the effect of each unknown on the recommendation (``label``), the largest first.

    The log of its throughput is regressed on all unknowns at once, as no draw moves one of them alone. A relative
    difference of ``least`` makes another decision.
    """
    place, unknown, rows = drawn.place(label), drawn.draws.unknowns, []
    for name, slope in _slopes(unknown, drawn.log_rates[:, place]).items():
        value_D = unknown[name]
        row = UnknownEffect(
            unknown=name,
            low=math.exp(-prior.END_SDS * slope),
            high=math.exp(prior.END_SDS * slope),
            instead_low=_instead(drawn, value_D <= np.quantile(value_D, FIFTH), place, least),
            instead_high=_instead(drawn, value_D >= np.quantile(value_D, 1 - FIFTH), place, least),
        )
        if row.largest > NOTHING or row.changes_decision:
            rows.append(row)
    return sorted(rows, key=lambda row: -row.largest)


def _slopes(unknown: Mapping[str, FloatArray], log_D: FloatArray) -> dict[str, float]:
    """Return the change of a log with one standard deviation of each unknown."""
    features_DK = np.stack([np.ones(len(log_D)), *map(_standardized, unknown.values())], axis=1)
    slope_K, *_ = np.linalg.lstsq(features_DK, log_D, rcond=None)
    return dict(zip(unknown, slope_K[1:], strict=True))


def _instead(drawn: DrawnCandidates, chosen_D: NDArray[np.bool_], place: int, least: float) -> str | None:
    """Return the candidate that loses least in some of the draws, if it is another layout and not a tie."""
    shares = mean_shares(drawn.log_rates[chosen_D])
    best = int(np.argmax(shares))
    same = drawn.candidates[best].layout == drawn.candidates[place].layout
    return None if same or shares[best] <= (1 + least) * shares[place] else drawn.candidates[best].label


def effects_of(assumed: Sequence[Assumption], drawn: DrawnCandidates, label: str) -> list[Assumed]:
    """Return the assumptions, the most influential first, with the effects of other values on the recommendation."""
    families, rate_DC, place = [one.family for one in drawn.candidates], np.exp(drawn.log_rates), drawn.place(label)
    unknown, slopes = drawn.draws.unknowns, _slopes(drawn.draws.unknowns, drawn.log_rates[:, place])

    def instead(name: str, other: Any, log_ratio: float) -> Instead:
        value_D = unknown[name]
        near_D = np.argsort(abs(value_D - log_ratio))[: round(FIFTH * drawn.draws.number)]
        first = families[int(rate_DC[near_D].mean(axis=0).argmax())]
        ratio = math.exp(slopes[name] * log_ratio / value_D.std())
        return Instead(value=other, throughput=ratio, fastest=None if first == families[place] else first)

    rows = []
    for one in assumed:
        name = DRAWN_KEYS.get(one.key, "")
        others = [instead(name, other, math.log(other / one.value)) for other in one.others if name in unknown]
        rows.append(Assumed(key=one.key, value=one.value, instead=others))
    return sorted(rows, key=lambda row: -row.largest)


def rightness(log_DC: FloatArray, chosen: int | IntArray) -> tuple[float, float]:
    """Return the probability that a choice, one or by draw [D], is right, and its mean regret (share)."""
    draw_D, share_DC = np.arange(len(log_DC)), _shares(log_DC)
    lost_D = log_DC.max(axis=1) - log_DC[draw_D, chosen]
    return float((lost_D <= -math.log1p(-TIE)).mean()), float(1 - share_DC[draw_D, chosen].mean())


def ahead(candidates: Sequence[Candidate], log_DC: FloatArray) -> FloatArray | None:
    """Return the log of asynchronous over synchronous throughput, both at their best by draw, [D]; None: one arm."""
    apart_C = np.array([not one.schedule.colocated for one in candidates])
    if apart_C.all() or not apart_C.any():
        return None
    return np.asarray(log_DC[:, apart_C].max(axis=1) - log_DC[:, ~apart_C].max(axis=1))


def memory_suffices(needed_shares: Sequence[float]) -> float:
    """Return the probability that memory suffices, from its need over its size for each kind of accelerator."""
    normal = NormalDist(sigma=prior.MEMORY_SD)
    return min((normal.cdf(-math.log(share)) for share in needed_shares), default=1.0)


# ------------------------------------------------------------------------------ commands that measure an unknown

START_MINUTES = 5.0
"""Minutes until engines and trainer have loaded a model: J, vLLM's start with its graphs takes 1 to 5."""
MEASURE_MINUTES = 2.0
"""Minutes of `pipelinerl measure` (docs/calibration.md)."""

OF_A_CHECK = {
    False: (Unknown.GENERATION, Unknown.TRAINING, Unknown.WEIGHTS_APART),
    True: (Unknown.GENERATION, Unknown.TRAINING, Unknown.WEIGHTS_COLOCATED, Unknown.SWITCH, Unknown.ANSWERS),
}
"""Unknowns that a short run shows, by colocated. Apart, short answers are done first, so their mean is too short."""
NUMBERS = {
    Unknown.TRAINING: "--train-step-s SECONDS --out measured_step.toml",
    Unknown.WEIGHTS_APART: "--weight-sync-s SECONDS --out measured_sync.toml",
}
"""Without ``[train]``: options of ``calibrate`` for measurements in a system of your own."""


@dataclass(frozen=True, slots=True)
class Instrument:
    """One command that measures."""

    shows: tuple[Unknown, ...]
    command: str
    minutes: float | None = None
    gpus: int | None = None


def instruments_of(
    config: RunConfig, run_file: str, arms: dict[bool, Candidate], screener: Screener, *, whole: bool, one_gpu: bool
) -> list[Instrument]:
    """Return the commands that measure the unknowns of a plan.

    ``run_file`` has path and overrides as words of a command, ``arms`` the best candidate of each arm, by colocated.
    Not ``whole``: the run file lacks a value that a run needs, so commands state the plan's. ``one_gpu``: the model
    runs on one GPU.
    """

    def sets(candidate: Candidate) -> str:
        """Return the overrides that make the run file one of this candidate."""
        its, own = choice_of(candidate.config), choice_of(config)
        fewer = f" --set cluster.accelerators={candidate.config.cluster.accelerators}" if candidate.idle else ""
        return fewer + "".join(
            f" --set {axis.key}={its[axis.name]}"
            for axis in AXES
            if axis.applies_to(candidate.schedule)
            and its[axis.name] is not None
            and not (whole and its[axis.name] == own[axis.name])
        )

    model = "MODEL_FOLDER" if config.train is None else shlex.quote(config.train.model.path)
    measure = f"pipelinerl measure --model {model} --out measured"
    found = [Instrument((Unknown.GENERATION,), measure, MEASURE_MINUTES, 1)] if one_gpu else []
    if config.train is None:
        calibrate = f"pipelinerl calibrate --run {run_file}{'' if whole else sets(arms.get(False) or arms[True])}"
        return found + [Instrument((shows,), f"{calibrate} {number}") for shows, number in NUMBERS.items()]
    for colocated, candidate in sorted(arms.items()):
        checked = check_config(candidate.config)
        estimate = screener.screen(replace(candidate, config=checked)).estimate
        minutes = START_MINUTES + (CHECK_STEPS * estimate.step_s + estimate.start_s) / 60
        check = f"pipelinerl train {run_file} --check{sets(candidate)} --out check_{candidate.family}"
        found.append(Instrument(OF_A_CHECK[colocated], check, minutes, checked.cluster.accelerators))
    return found


def fewest(instruments: Sequence[Instrument], names: Sequence[Unknown]) -> tuple[list[str], float | None, int | None]:
    """Return the fewest commands that show all of these, their minutes, and the GPUs of the largest.

    No command if none show all; minutes and GPUs are None where they are not known.
    """
    for some in chain.from_iterable(combinations(instruments, size) for size in range(1, len(instruments) + 1)):
        if set(names) <= {shown for one in some for shown in one.shows}:
            minutes = [one.minutes for one in some if one.minutes is not None]
            gpus = [one.gpus for one in some if one.gpus is not None]
            known = len(minutes) == len(gpus) == len(some)
            return [one.command for one in some], sum(minutes) if known else None, max(gpus) if known else None
    return [], None, None


def split_curve(space: SearchSpace, recommended: Candidate, screener: Screener, draws: Draws) -> SplitCurve:
    """Return the throughput at every split (band: the first ``SPLIT_DRAWS`` draws); empty if colocated."""
    if recommended.config.colocated:
        return SplitCurve()
    cluster = recommended.config.cluster
    unit = cluster.tensor_parallel
    step = unit * max(1, cluster.accelerators // unit // MOST_SPLITS)
    splits = range(step, cluster.accelerators, step)
    candidates = [recommended.changed(cluster={"generation_accelerators": split}) for split in splits]
    drawn = DrawnCandidates.of(space, candidates, draws.first(SPLIT_DRAWS))
    low_C, high_C = np.quantile(np.exp(drawn.log_rates), PERCENTILES, axis=0)
    return SplitCurve(
        generation_accelerators=list(splits),
        tokens_per_s=[screener.screen(one).tokens_per_s for one in candidates],
        low=low_C.tolist(),
        high=high_C.tolist(),
    )


# ------------------------------------------------------------------------------------------- the value of a measurement

FOLDS = 5
"""Parts of the draws, each predicted from the others (count)."""
RIDGE = 10.0
"""Penalty on the weights of features of standard deviation 1, in draws."""
LEAST_GAIN = 0.01
"""Least gain predicted of another way than the best on average (share of the fastest): less is noise."""
MEASURABLE = (
    Unknown.GENERATION, Unknown.TRAINING, Unknown.WEIGHTS_APART, Unknown.WEIGHTS_COLOCATED, Unknown.SWITCH,
    Unknown.ANSWERS,
)  # fmt: skip
"""Unknowns that can be measured; the error of the model's form shows only in the run itself."""


def observations(
    space: SearchSpace, draws: Draws, recommended: Candidate, *, colocated: Collection[bool]
) -> dict[Unknown, FloatArray]:
    """Return the log that each measurement left to make would show in every draw, with its error, shape [D].

    ``recommended`` is the candidate whose steps are timed; ``colocated`` has True, False or both: the arms compared.
    """
    shown = {OWN_WEIGHTS[arm]: draws.weights(colocated=arm) for arm in colocated}
    shown |= {name: draws.values_D[name] for name in (Unknown.SWITCH, Unknown.ANSWERS)}
    shown |= _step_times(space, draws, recommended)
    if True not in colocated:
        del shown[Unknown.SWITCH]
    generator = np.random.default_rng([space.config.seed, 1])
    rows = {}
    for name in MEASURABLE:
        error_D = prior.MEASURED_SD * generator.standard_normal(draws.number)
        if name in shown and shown[name].std() > 2 * prior.MEASURED_SD:
            rows[name] = shown[name] + error_D
    return rows


def _step_times(space: SearchSpace, draws: Draws, recommended: Candidate) -> dict[Unknown, FloatArray]:
    """Return the logs of the seconds of a decode step and of an optimizer step of the recommendation, by draw."""
    config = recommended.config
    screeners = (draws.screener(draw, space) for draw in range(draws.number))
    decode_D, train_D = np.array([step_times(config, space.answers, one.resolved(config)) for one in screeners]).T
    shortest = np.finfo(float).tiny  # a run file may have a step last no time
    times = {Unknown.GENERATION: decode_D, Unknown.TRAINING: train_D}
    return {name: np.log(np.maximum(time_D, shortest)) for name, time_D in times.items()}


def chosen_after(known_KD: Sequence[FloatArray], log_DC: FloatArray) -> IntArray:
    """Return the candidate chosen in each draw from K measurements (none: the best on average), shape [D]."""
    share_DC = _shares(log_DC)
    features_DF = _features(known_KD, len(log_DC))
    penalty_FF = RIDGE * np.eye(features_DF.shape[1])
    penalty_FF[0, 0] = 0.0
    chosen_D = np.empty(len(log_DC), dtype=np.int64)
    for here_D in _folds(len(log_DC)):
        learnt_DF, learnt_DC = features_DF[~here_D], share_DC[~here_D]
        weights_FC = np.linalg.solve(learnt_DF.T @ learnt_DF + penalty_FF, learnt_DF.T @ learnt_DC)
        predicted_DC = features_DF[here_D] @ weights_FC
        usual = int(learnt_DC.mean(axis=0).argmax())
        better_D = predicted_DC.max(axis=1) > predicted_DC[:, usual] + LEAST_GAIN
        chosen_D[here_D] = np.where(better_D, predicted_DC.argmax(axis=1), usual)
    return chosen_D


def _folds(number: int) -> Iterator[NDArray[np.bool_]]:
    """Yield the draws of each fold, which are predicted from the others."""
    for fold in range(FOLDS):
        yield np.arange(number) % FOLDS == fold


def _features(known_KD: Sequence[FloatArray], number: int) -> FloatArray:
    """Return 1, the measurements, their squares and products, each of mean 0 and standard deviation 1."""
    pairs = [(one, one) for one in known_KD] + list(combinations(known_KD, 2))
    standard = [_standardized(one) for one in (*known_KD, *(_standardized(a) * _standardized(b) for a, b in pairs))]
    return np.stack([np.ones(number), *standard], axis=1)


def _standardized(value_D: FloatArray) -> FloatArray:
    return np.asarray((value_D - value_D.mean()) / max(float(value_D.std()), 1e-12))


def explained(known_KD: Sequence[FloatArray], value_D: FloatArray) -> float:
    """Return the share of the variance of a value that measurements explain; cross-fitted, 0 at least."""
    features_DF = _features(known_KD, len(value_D))
    error_D = np.empty(len(value_D))
    for here_D in _folds(len(value_D)):
        weights_F, *_ = np.linalg.lstsq(features_DF[~here_D], value_D[~here_D], rcond=None)
        error_D[here_D] = value_D[here_D] - features_DF[here_D] @ weights_F
    return max(0.0, 1 - float((error_D**2).mean()) / max(float(value_D.var()), 1e-300))


def values_of_measurements(
    shown: Mapping[Unknown, FloatArray], log_DC: FloatArray, instruments: Sequence[Instrument]
) -> list[MeasurementValue]:
    """Return the worth of measurements: each alone, the best two, all of a command, and all."""
    _, before = rightness(log_DC, chosen_after([], log_DC))

    def value(names: Sequence[Unknown]) -> MeasurementValue:
        right, regret = rightness(log_DC, chosen_after([shown[name] for name in names], log_DC))
        commands, minutes, gpus = fewest(instruments, names)
        return MeasurementValue(
            measured=[name.value for name in names],
            right=right,
            regret=regret,
            gain=before - regret,
            settles=before - regret > NOTHING,
            commands=commands,
            minutes=minutes,
            gpus=gpus,
        )

    alone = [value([name]) for name in shown]
    pairs = [value(pair) for pair in combinations(shown, 2)]
    several = [[name for name in shown if name in one.shows] for one in instruments] + [list(shown)]
    larger = {tuple(names): value(names) for names in several if len(names) > 2}
    best_first = sorted(alone, key=lambda one: -one.gain)
    return [*best_first, *sorted(pairs, key=lambda one: -one.gain)[:1], *larger.values()]


# ----------------------------------------------------------------------------------- the table `certainty` of plan.json


def certainty(
    space: SearchSpace, drawn: DrawnCandidates, best: Outcome, *, screener: Screener, run_file: str, whole: bool
) -> CertaintyReport:
    """Return how sure a recommendation (``best``) is; ``run_file`` and ``whole`` as in ``instruments_of``."""
    chosen, draws, shares = best.candidate, drawn.draws, drawn.shares
    other = drawn.candidates[int(np.quantile(drawn.log_rates, PERCENTILES[0], axis=0).argmax())]
    safest = other if (1 - TIE) * drawn.band(other.label).low > drawn.band(chosen.label).low else chosen
    by_share = sorted(drawn.candidates, key=lambda one: (one.label != chosen.label, -shares[one.label]))
    arms = {one.config.colocated: one for one in reversed(by_share)}
    both = drawn
    if True not in arms and (screened := screened_synchronous(space, screener)) is not None:
        arms[True] = screened.candidate
        both = drawn.with_candidates(space, [screened.candidate])
    ahead_D = ahead(both.candidates, both.log_rates)
    shown = observations(space, draws, chosen, colocated=arms.keys())
    right, regret = rightness(drawn.log_rates, drawn.place(chosen.label))
    memory = space.memory.needed_shares(chosen.config)
    one_gpu = space.memory.engine_fits(1)
    instruments = instruments_of(space.config, run_file, arms, screener, whole=whole, one_gpu=one_gpu)
    screened_lag = screener.screen(chosen).estimate.lag_mean
    staler = best.lag_mean / screened_lag if screened_lag > 0 else 1.0
    return CertaintyReport(
        draws=draws.number,
        compared=len(drawn.candidates),
        tie=TIE,
        right=right,
        regret=regret,
        safest=Safest(
            label=safest.label,
            slower=1 - shares[safest.label] / shares[chosen.label],
            low=drawn.band(safest.label).low,
        ),
        keeps_limits=drawn.keeps(chosen.label, space.limits, staler=staler),
        asynchronous=None if ahead_D is None else _odds(ahead_D, shown, draws, in_units(space, chosen, arms, screener)),
        fits=None if memory is None else memory_suffices(memory),
        unknown={name.value: sd for name, sd in draws.sds.items()},
        measurements=values_of_measurements(shown, drawn.log_rates, instruments),
    )


def in_units(
    space: SearchSpace, chosen: Candidate, arms: Mapping[bool, Candidate], screener: Screener
) -> dict[Unknown, tuple[float, str]]:
    """Return the central value of unknowns that a user may know, each with its unit and meaning in words."""
    slots, stages = chosen.config.scheduler.generation_batch_size, stages_of(space, chosen, screener)
    values = {
        Unknown.GENERATION: (stages[DECODE] * 1e3, f"ms per decode step of {slots} sequences"),
        Unknown.TRAINING: (stages[TRAIN] + stages[LOG_PROBABILITIES], "s of training per optimizer step"),
        Unknown.ANSWERS: (space.answers.mean, "tokens per answer"),
    }
    if True in arms:
        values[Unknown.SWITCH] = (stages_of(space, arms[True], screener)[SWITCH], "s of phase switches per RL step")
    if False in arms:
        update_s = stages_of(space, arms[False], screener)[UPDATE]
        values[Unknown.WEIGHTS_APART] = (update_s, "s per weight update of asynchronous RL")
    return {name: (value, unit) for name, (value, unit) in values.items() if value > 0}


def _odds(
    ahead_D: FloatArray, shown: Mapping[Unknown, FloatArray], draws: Draws, units: Mapping[Unknown, tuple[float, str]]
) -> AsynchronousOdds:
    faster = float((ahead_D > 0).mean())
    known = {**shown, **{name: draws.values_D[name] for name in OWN_RUN.values()}}
    shares = {name.value: explained([known_D], ahead_D) for name, known_D in known.items()}
    decided_by = max(shares, key=lambda name: shares[name])
    low, ratio, high = np.exp(np.quantile(ahead_D, [PERCENTILES[0], 0.5, PERCENTILES[1]])).tolist()
    by_share = sorted((name for name in units if name in shown), key=lambda name: -shares[name.value])
    return AsynchronousOdds(
        faster=faster,
        certain=not 1 - CERTAIN < round(faster, 2) < CERTAIN,  # as it is shown
        ratio=ratio,
        ratio_band=Band(low=low, high=high),
        decided_by=decided_by,
        share=shares[decided_by],
        threshold=next(filter(None, (_threshold(ahead_D, name, draws, *units[name]) for name in by_share)), None),
    )


def _threshold(ahead_D: FloatArray, name: Unknown, draws: Draws, expected: float, unit: str) -> Threshold | None:
    """Return the value of an unknown at which the kinds are as fast; None: far off.

    The line through the draws passes through both medians: at the median of the value the likelier kind is the faster.
    """
    arm = name is Unknown.WEIGHTS_APART
    value_D = draws.weights(colocated=False) if arm else draws.values_D[name]
    slope, middle = np.polyfit(value_D, ahead_D, 1)[0], float(np.median(value_D))
    place = middle - float(np.median(ahead_D)) / slope if slope else math.inf
    low, high = np.quantile(value_D, PERCENTILES)
    if not low < place < high:
        return None
    return Threshold(
        unknown=name.value,
        value=expected * math.exp(place),
        unit=unit,
        asynchronous_below=bool(slope < 0),
        expected=expected * math.exp(middle),
        band=Band(low=expected * math.exp(low), high=expected * math.exp(high)),
    )
