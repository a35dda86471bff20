"""Which measurement would settle a plan, and at what cost: the value of information over measurements.

Theory. A measurement tells how long something takes in reality, with the error that measurements have. What
is chosen then is predicted from it: the throughput of every way as a share of the fastest, by ridge regression over
draws on the measurements, their squares and products. It is cross-fitted, each fifth of the draws predicted from the
others, or noise would show as value. The value is the regret that this spares, over that of the way which is the best
on average. Measurements are of times, not of coefficients: a time is a sum of several of these.

Shapes: D draws, W ways, K measurements, F features.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

import numpy as np

from pipelinerl.config.run import RunConfig
from pipelinerl.hardware import prior
from pipelinerl.hardware.costs import batch_s, context_token_s, training_cost
from pipelinerl.records.certainty_report import MeasurementValue
from pipelinerl.theory.lengths import LengthStatistics
from pipelinerl.util.arrays import FloatArray, IntArray
from sim.planning.candidates import Candidate
from sim.planning.draws import Draws, Unknown
from sim.planning.instruments import Instruments
from sim.planning.more_gpus import NOTHING
from sim.planning.uncertainty import rightness

FOLDS = 5
"""Parts of the draws, each predicted from the others (count)."""
RIDGE = 10.0
"""Penalty on the weights of features of standard deviation 1, in draws."""
LEAST_GAIN = 0.01
"""Gain that must be predicted of another way than the best on average (share of the fastest): less is noise."""
MEASURABLE = (
    Unknown.GENERATION, Unknown.TRAINING, Unknown.WEIGHTS_APART, Unknown.WEIGHTS_COLOCATED, Unknown.SWITCH,
    Unknown.ANSWERS,
)  # fmt: skip
"""What a measurement tells; what the model leaves out only the run itself tells."""


def observations(
    config: RunConfig,
    answers: LengthStatistics,
    draws: Draws,
    recommended: Candidate,
    *,
    colocated: Collection[bool],
    seed: int = 0,
) -> dict[Unknown, FloatArray]:
    """Return what each measurement that is left to make would show in every draw: a log, with its error, shape [D].

    Args:
        config: The run file.
        answers: Its prompts and answers, as the run file has them.
        draws: Draws of what is not known.
        recommended: The way to run whose steps are timed.
        colocated: Whether the arms compared are colocated, for each of them.
        seed: Of the errors of measurements.
    """
    arms = {False: [Unknown.WEIGHTS_APART], True: [Unknown.WEIGHTS_COLOCATED, Unknown.SWITCH]}
    elsewhere = [one for arm, unknown in arms.items() if arm not in colocated for one in unknown]
    shown = {
        Unknown.WEIGHTS_APART: draws.weights(colocated=False),
        Unknown.WEIGHTS_COLOCATED: draws.weights(colocated=True),
        Unknown.SWITCH: draws.logs_D[Unknown.SWITCH],
        Unknown.ANSWERS: draws.logs_D[Unknown.ANSWERS],
    }
    shown |= _step_times(config, answers, draws, recommended)
    generator = np.random.default_rng([seed, 1])
    rows = {}
    for name in MEASURABLE:
        error_D = prior.MEASURED_SD * generator.standard_normal(draws.number)
        if name not in elsewhere and shown[name].std() > 2 * prior.MEASURED_SD:
            rows[name] = shown[name] + error_D
    return rows


def _step_times(
    config: RunConfig, answers: LengthStatistics, draws: Draws, recommended: Candidate
) -> dict[Unknown, FloatArray]:
    """Return the logs of the seconds of a decode step and of an optimizer step of the recommendation, by draw."""
    way = recommended.config
    size, batch = way.cluster.tensor_parallel, float(way.scheduler.generation_batch_size)
    decode_D, train_D = np.empty(draws.number), np.empty(draws.number)
    for draw in range(draws.number):
        hardware = draws.screener(draw, config, answers).resolved(way)
        context_s = context_token_s(hardware.decode, size) * batch * answers.context
        decode_D[draw] = batch_s(hardware.decode, size, np.array([batch]))[0] + context_s
        train_D[draw] = answers.training_s(
            training_cost(hardware.training, training_accelerators=way.training_accelerators),
            sequences=way.scheduler.train_batch_size,
            micro_batch=way.scheduler.micro_batch,
        )
    shortest = np.finfo(float).tiny  # a run file may have a step last no time
    return {
        Unknown.GENERATION: np.log(np.maximum(decode_D, shortest)),
        Unknown.TRAINING: np.log(np.maximum(train_D, shortest)),
    }


def chosen_after(known_KD: Sequence[FloatArray], log_DW: FloatArray) -> IntArray:
    """Return the way that is chosen in each draw once something is known of it, shape [D].

    Args:
        known_KD: What measurements show in every draw; none: what is the best on average is chosen.
        log_DW: Log of the throughput of every way in every draw.
    """
    share_DW = np.exp(log_DW - log_DW.max(axis=1, keepdims=True))
    features_DF = _features(known_KD, len(log_DW))
    penalty_FF = RIDGE * np.eye(features_DF.shape[1])
    penalty_FF[0, 0] = 0.0
    fold_D = np.arange(len(log_DW)) % FOLDS
    chosen_D = np.empty(len(log_DW), dtype=np.int64)
    for fold in range(FOLDS):
        here_D = fold_D == fold
        learnt_DF, learnt_DW = features_DF[~here_D], share_DW[~here_D]
        weights_FW = np.linalg.solve(learnt_DF.T @ learnt_DF + penalty_FF, learnt_DF.T @ learnt_DW)
        predicted_DW = features_DF[here_D] @ weights_FW
        usual = int(learnt_DW.mean(axis=0).argmax())
        better_D = predicted_DW.max(axis=1) > predicted_DW[:, usual] + LEAST_GAIN
        chosen_D[here_D] = np.where(better_D, predicted_DW.argmax(axis=1), usual)
    return chosen_D


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
    fold_D = np.arange(len(value_D)) % FOLDS
    error_D = np.empty(len(value_D))
    for fold in range(FOLDS):
        here_D = fold_D == fold
        weights_F, *_ = np.linalg.lstsq(features_DF[~here_D], value_D[~here_D], rcond=None)
        error_D[here_D] = value_D[here_D] - features_DF[here_D] @ weights_F
    return max(0.0, 1 - float((error_D**2).mean()) / max(float(value_D.var()), 1e-300))


def values_of_measurements(
    shown: Mapping[Unknown, FloatArray], log_DW: FloatArray, instruments: Instruments
) -> list[MeasurementValue]:
    """Return what measurements are worth: each alone, the best two, all that a command shows, and all.

    Args:
        shown: What each measurement shows in every draw.
        log_DW: Log of the throughput of every way in every draw.
        instruments: What measures.
    """
    _, before = rightness(log_DW, chosen_after([], log_DW))

    def value(names: Sequence[Unknown]) -> MeasurementValue:
        right, regret = rightness(log_DW, chosen_after([shown[name] for name in names], log_DW))
        commands, minutes, gpus = instruments.for_all(names)
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
    several = [[name for name in shown if name in one.shows] for one in instruments.all] + [list(shown)]
    larger = {tuple(names): value(names) for names in several if len(names) > 2}
    best_first = sorted(alone, key=lambda one: -one.gain)
    return [*best_first, *sorted(pairs, key=lambda one: -one.gain)[:1], *larger.values()]
