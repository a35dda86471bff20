"""How sure a plan is: the throughput of every way to run in every draw, and what follows from it.

A way is *right* in a draw if it is the fastest there, within ``TIE``; its *regret* is what it loses against the
fastest. Whether a way keeps to the limits is taken as it is known now, and is the same in all draws.

Shapes: D draws, W ways.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist

import numpy as np

from pipelinerl.config.run import RunConfig
from pipelinerl.hardware import prior
from pipelinerl.theory.lengths import LengthStatistics
from pipelinerl.util.arrays import FloatArray, IntArray
from sim.planning.candidates import Candidate
from sim.planning.choose import TIE
from sim.planning.draws import Draws


def log_rates(
    config: RunConfig,
    answers: LengthStatistics,
    ways: Sequence[Candidate],
    *,
    draws: Draws,
    factors: Mapping[str, float],
) -> FloatArray:
    """Return the log of the throughput of every way in every draw, shape [D, W].

    Args:
        config: The run file.
        answers: Its prompts and answers.
        ways: What is compared.
        draws: Draws of what is not known.
        factors: Simulated over screened throughput as things are, by label; another way has the mean of its kind.
    """
    known: dict[str, list[float]] = {}
    for way in ways:
        known.setdefault(way.family, []).extend([factors[way.label]] if way.label in factors else [])
    usual = {family: float(np.mean(some or [*factors.values(), 1.0])) for family, some in known.items()}
    log_W = np.log([factors.get(way.label, usual[way.family]) for way in ways])
    log_DW = np.empty((draws.number, len(ways)))
    for draw in range(draws.number):
        screener = draws.screener(draw, config, answers)
        log_DW[draw] = log_W + np.log([screener.screen(way).tokens_per_s for way in ways])
    apart_W = np.array([not way.schedule.colocated for way in ways])
    log_DW[:, apart_W] -= draws.run(colocated=False)[:, None]
    log_DW[:, ~apart_W] -= draws.run(colocated=True)[:, None]
    return log_DW


def rightness(log_DW: FloatArray, chosen: int | IntArray) -> tuple[float, float]:
    """Return the probability that a choice is right, and its mean regret.

    Args:
        log_DW: Log of the throughput of every way in every draw.
        chosen: The way chosen, or the one chosen in each draw, shape [D].
    """
    lost_D = log_DW.max(axis=1) - log_DW[np.arange(len(log_DW)), chosen]
    return float((lost_D <= -math.log1p(-TIE)).mean()), float(-np.expm1(-lost_D).mean())


def arms(ways: Sequence[Candidate], log_DW: FloatArray) -> FloatArray | None:
    """Return by how much asynchronous RL is faster than synchronous RL, each at its best in every draw (logs, [D]).

    None if there is but one of them.
    """
    apart_W = np.array([not way.schedule.colocated for way in ways])
    if apart_W.all() or not apart_W.any():
        return None
    return np.asarray(log_DW[:, apart_W].max(axis=1) - log_DW[:, ~apart_W].max(axis=1))


def memory_suffices(needed_shares: Sequence[float]) -> float:
    """Return the probability that memory suffices.

    Args:
        needed_shares: Of each kind of accelerator, what is needed over what there is.
    """
    normal = NormalDist(sigma=prior.MEMORY_SD)
    return min((normal.cdf(-math.log(share)) for share in needed_shares), default=1.0)
