"""Effective sample size without a policy: how fast importance weights spread with lag, fitted to a run that learned.

The model. Let w = pi/mu be the weight of a token of lag g, sampled from mu. Then E[w] = 1, and the ESS of many such
tokens is 1 / E[w^2]. If log w is normal with variance s, its mean is -s/2 (since E[w] = 1) and E[w^2] = exp(s): the
ESS is exp(-s). Weights of real policies have longer tails. So s is not the measured variance of log w; it is derived
from the measured ESS, s = -log ESS ("effective variance"), and assumed to grow as a power of lag:

    s(g) = rate * g^exponent          1: a random walk of the weights; 2: a steady direction

Tokens of several lags, shares p_g of a batch, have E[w^2] = sum_g p_g exp(s(g)), hence

    ESS = 1 / sum_g p_g exp(rate * g^exponent)

The rate changes while a policy learns, fast at first. The model keeps quantiles of it over the steps of the run;
they give a band. The model holds only for the learning rate, batch size, loss and policy that it was fitted to: its
results are labelled as modelled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, model_validator

from pipelinerl.errors import ConfigError
from pipelinerl.rl.ess import ess_by_lag
from pipelinerl.util.arrays import check
from pipelinerl.util.strict_model import Report, StrictModel

QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Quantiles of the rate that a model keeps (share of the optimizer steps)."""
EXPONENTS = tuple(np.round(np.arange(0.3, 2.51, 0.05), 2).tolist())
"""Exponents that are tried (no unit)."""
LEAST_ESS = 1e-3
"""ESS below which a lag of a step is ignored: a few tokens outweigh all others."""
BLOCK_STEPS = 64
"""Steps over which the rate counts as the same while the exponent is fitted (count)."""


class DriftModel(StrictModel):
    """How the effective variance of log w grows with lag: a fit to a run that learned."""

    exponent: float = Field(ge=0)
    """Power of lag: 1 for a random walk, 2 for a steady direction (no unit)."""
    rates: list[Annotated[float, Field(ge=0)]] = Field(min_length=1)
    """Rising quantiles over optimizer steps of the effective variance at lag 1 (nats squared)."""

    @model_validator(mode="after")
    def _rates_rise(self) -> Self:
        check(self.rates == sorted(self.rates), "rates must rise", self.rates)
        return self


class EssBand(Report):
    """A modelled effective sample size per token (share of the tokens)."""

    mean: float
    """Mean over optimizer steps."""
    low: float
    """ESS of a step whose rate is at the highest quantile."""
    high: float
    """ESS of a step whose rate is at the lowest quantile."""


@dataclass(frozen=True, slots=True)
class LearnedRun:
    """Data on the importance weights of a run that learned."""

    steps: Sequence[Mapping[str, float]]
    """Metrics per optimizer step (the lines of ``metrics.jsonl``), with ``ess/lag_1`` and so on."""
    tokens_by_lag: Sequence[float]
    """Trained tokens of lag 0, 1, 2, ... over the whole run: the weight of the ESS of each lag."""


def fit_drift(runs: Sequence[LearnedRun]) -> DriftModel:
    """Fit a model to one or more runs that learned, real or simulated with a policy.

    Each step gives an effective variance for each lag that its tokens had. For every exponent the rate of a block of
    ``BLOCK_STEPS`` steps is the mean of variance / lag^exponent; the exponent with the least squared error of the ESS
    is taken; lags are weighted by their tokens. (Blocks, because a step of conventional RL has one lag only, from which
    no exponent follows.) The model keeps the rates of single steps at that exponent.
    Raises ConfigError if no step has an ESS of a lag above 0.
    """
    blocks = [block for run in runs for block in _blocks(run)]
    if not blocks:
        raise ConfigError("a drift model needs metrics with the ESS of a lag above 0 (ess/lag_1, ...), got none")

    def rate(points: NDArray[np.float64], exponent: float) -> float:
        lag_N, ess_N, weight_N = points[1:]
        return float(np.average(-np.log(ess_N) / lag_N**exponent, weights=weight_N))

    def squared_error(exponent: float) -> float:
        total = 0.0
        for block in blocks:
            lag_N, ess_N, weight_N = block[1:]
            modelled_N = np.exp(-rate(block, exponent) * lag_N**exponent)
            total += float((weight_N * (modelled_N - ess_N) ** 2).sum())
        return total

    exponent = min(EXPONENTS, key=squared_error)
    rates = [rate(block[:, block[0] == step], exponent) for block in blocks for step in np.unique(block[0]).tolist()]
    return DriftModel(exponent=exponent, rates=np.quantile(rates, QUANTILES).tolist())


def modelled_ess(model: DriftModel, tokens_by_lag: ArrayLike) -> EssBand:
    """Return the ESS of batches with so many tokens (any unit) of lag 0, 1, 2, ...: mean and band, each in (0, 1].

    Raises ValueError if there are no tokens, or a count is negative.
    """
    tokens_G = np.asarray(tokens_by_lag, dtype=float)
    right = tokens_G.ndim == 1 and tokens_G.sum() > 0 and not (tokens_G < 0).any()
    check(right, "tokens_by_lag must hold tokens, none of them below 0", f"shape {tokens_G.shape}")
    there_G = np.flatnonzero(tokens_G)  # a weight may be infinite at a lag that no token has
    share_G = tokens_G[there_G] / tokens_G.sum()
    growth_G = there_G**model.exponent
    with np.errstate(over="ignore"):
        ess = [float(1.0 / (share_G * np.exp(rate * growth_G)).sum()) for rate in model.rates]
    return EssBand(mean=math.fsum(ess) / len(ess), low=ess[-1], high=ess[0])


def ess_at_lag(model: DriftModel, lag: float) -> float:
    """Return the modelled ESS of tokens of one lag (optimizer steps): the mean over the rates."""
    return math.fsum(math.exp(-rate * lag**model.exponent) for rate in model.rates) / len(model.rates)


def _blocks(run: LearnedRun) -> list[NDArray[np.float64]]:
    """Return step, lag, ESS and weight of the steps of each block, shape [4, N] per block."""
    weight_G = np.asarray(run.tokens_by_lag, dtype=float)
    blocks = []
    for start in range(0, len(run.steps), BLOCK_STEPS):
        points = [
            (float(start + place), float(lag), min(1.0, ess), weight_G[lag])
            for place, step in enumerate(run.steps[start : start + BLOCK_STEPS])
            for lag, ess in ess_by_lag(step)
            if 0 < lag < len(weight_G) and weight_G[lag] > 0 and ess > LEAST_ESS
        ]
        if points:
            blocks.append(np.array(points).T)
    return blocks
