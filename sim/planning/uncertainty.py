"""How sure a plan is: the throughput of every way to run in every draw, and what follows from it.

A way is *right* in a draw if it is the fastest there, within ``TIE``; its *regret* is what it loses against the
fastest. Ways are compared that keep to the limits as far as is known now. A limit that one of them breaks in a draw
costs no throughput there: how often it does is told beside the regret.

Shapes: D draws, W ways.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Self

import numpy as np

from pipelinerl.config.run import RunConfig
from pipelinerl.hardware import prior
from pipelinerl.theory.lengths import LengthStatistics
from pipelinerl.util.arrays import FloatArray, IntArray
from sim.planning.candidates import Candidate
from sim.planning.choose import TIE
from sim.planning.draws import Draws
from sim.planning.search_space import Limits


@dataclass(frozen=True, eq=False)
class Bets:
    """Ways to run, screened in every draw."""

    ways: Sequence[Candidate]
    screened_DW: FloatArray
    """Log of the throughput."""
    lag_DW: FloatArray
    """Mean lag (optimizer steps)."""
    hours_DW: FloatArray
    """GPU-hours of the whole run."""

    @classmethod
    def of(cls, config: RunConfig, answers: LengthStatistics, ways: Sequence[Candidate], draws: Draws) -> Self:
        """Return ways screened in every draw.

        Args:
            config: The run file.
            answers: Its prompts and answers.
            ways: What is compared.
            draws: Draws of what is not known.
        """
        screened_DW, lag_DW, hours_DW = np.empty((3, draws.number, len(ways)))
        for draw in range(draws.number):
            screener = draws.screener(draw, config, answers)
            rows = [screener.screen(way) for way in ways]
            screened_DW[draw] = np.log([row.tokens_per_s for row in rows])
            lag_DW[draw] = [row.estimate.lag_mean for row in rows]
            hours_DW[draw] = [row.gpu_hours for row in rows]
        run_DW = np.stack([draws.run(colocated=way.schedule.colocated) for way in ways], axis=1)
        return cls(ways, screened_DW - run_DW, lag_DW, hours_DW * np.exp(run_DW))

    def without(self, labels: Collection[str]) -> Self:
        """Return all ways but some."""
        left = [place for place, way in enumerate(self.ways) if way.label not in labels]
        arrays = (self.screened_DW, self.lag_DW, self.hours_DW)
        return type(self)([self.ways[place] for place in left], *(array_DW[:, left] for array_DW in arrays))

    def log_rates(self, factors: Mapping[str, float]) -> FloatArray:
        """Return the log of the throughput of every way in every draw, shape [D, W].

        Args:
            factors: Simulated over screened throughput as things are, by label; another way has the mean of its kind.
        """
        known: dict[str, list[float]] = {}
        for way in self.ways:
            known.setdefault(way.family, []).extend([factors[way.label]] if way.label in factors else [])
        usual = {family: float(np.mean(some or [*factors.values(), 1.0])) for family, some in known.items()}
        log_W: FloatArray = np.log([factors.get(way.label, usual[way.family]) for way in self.ways])
        return self.screened_DW + log_W

    def shares(self, factors: Mapping[str, float]) -> dict[str, float]:
        """Return the throughput of every way over that of the fastest, on average: 1 less its regret; by label."""
        log_DW = self.log_rates(factors)
        share_W = np.exp(log_DW - log_DW.max(axis=1, keepdims=True)).mean(axis=0)
        return {way.label: float(share) for way, share in zip(self.ways, share_W, strict=True)}

    def keeps(self, label: str, limits: Limits, *, slower: float, staler: float) -> float | None:
        """Return the probability that a way keeps to the limits; None if nothing that is drawn has one.

        Args:
            label: The way.
            limits: The limits. That on the largest lag is kept in any case, by waiting.
            slower: Screened over simulated throughput as things are.
            staler: Simulated over screened mean lag.
        """
        if limits.free_of_draws:
            return None
        place = [way.label for way in self.ways].index(label)
        lag_D, hours_D = self.lag_DW[:, place] * staler, self.hours_DW[:, place] * slower
        limits = limits.at(self.ways[place].rented)
        broken = [limits.broken(lag, hours) for lag, hours in zip(lag_D, hours_D, strict=True)]
        return broken.count(None) / len(broken)


def rightness(log_DW: FloatArray, chosen: int | IntArray) -> tuple[float, float]:
    """Return the probability that a choice is right, and its mean regret.

    Args:
        log_DW: Log of the throughput of every way in every draw.
        chosen: The way chosen, or the one chosen in each draw, shape [D].
    """
    lost_D = log_DW.max(axis=1) - log_DW[np.arange(len(log_DW)), chosen]
    return float((lost_D <= -math.log1p(-TIE)).mean()), float(-np.expm1(-lost_D).mean())


def ahead(ways: Sequence[Candidate], log_DW: FloatArray) -> FloatArray | None:
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
