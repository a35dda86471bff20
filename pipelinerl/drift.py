"""Effective sample size without a policy: how fast importance weights spread with lag, fitted to a run that learned.

The model. Let w = pi/mu be the weight of a token of lag g, and mu what it was sampled from. Then E[w] = 1, and the
ESS of many such tokens is 1 / E[w^2]. If log w is normal with variance s, its mean is -s/2 (since E[w] = 1) and
E[w^2] = exp(s): the ESS is exp(-s). Weights of real policies have longer tails than that, so s is not the measured
variance of log w but what the measured ESS says, s = -log ESS ("effective variance"), and it is taken to grow as a
power of lag:

    s(g) = rate * g^exponent          1: a random walk of the weights; 2: a steady direction

Tokens of several lags, shares p_g of a batch, have E[w^2] = sum_g p_g exp(s(g)), hence

    ESS = 1 / sum_g p_g exp(rate * g^exponent)

The rate changes while a policy learns, fast at first. The model keeps quantiles of it over the steps of the run;
they give a band. It holds for the learning rate, batch size, loss and policy that it was fitted to, and for nothing
else: what it says is labelled as modelled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field, model_validator

from pipelinerl.errors import ConfigError
from pipelinerl.strictmodel import StrictModel

QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Quantiles of the rate that a model keeps (share of the optimizer steps)."""
EXPONENTS = tuple(np.round(np.arange(0.3, 2.51, 0.05), 2).tolist())
"""Exponents that are tried (no unit)."""
LEAST_ESS = 1e-3
"""ESS below which a lag of a step says nothing: a few tokens outweigh all others."""
LAG_PREFIX = "ess/lag_"
"""Metrics of a step that hold the ESS of the tokens of a lag."""


class DriftModel(StrictModel):
    """How the effective variance of log w grows with lag: a fit to a run that learned."""

    exponent: float = Field(ge=0)
    """Power of lag: 1 for a random walk of the weights, 2 for a steady direction (no unit)."""
    rates: list[Annotated[float, Field(ge=0)]] = Field(min_length=1)
    """Effective variance at lag 1: quantiles over the optimizer steps of the run, rising (nats squared)."""

    @model_validator(mode="after")
    def _rates_rise(self) -> Self:
        if self.rates != sorted(self.rates):
            raise ValueError(f"rates must rise, got {self.rates}")
        return self


@dataclass(frozen=True, slots=True)
class EssBand:
    """A modelled effective sample size (share of the tokens)."""

    mean: float
    """Mean over optimizer steps."""
    low: float
    """Of a step whose rate is at the highest quantile."""
    high: float
    """Of a step whose rate is at the lowest quantile."""


def fit_drift(steps: Sequence[Mapping[str, float]]) -> DriftModel:
    """Fit a model to the metrics of a run, real or simulated with a policy.

    Each step gives an effective variance for each lag that its tokens had. For every exponent the rate of a step is
    the mean of variance / lag^exponent; the exponent is taken that leaves the least squared error of the ESS.

    Args:
        steps: Metrics per optimizer step (the lines of ``metrics.jsonl``), with ``ess/lag_1`` and so on.

    Returns:
        The model.

    Raises:
        ConfigError: If no step has an ESS of a lag above 0.
    """
    found = [points for points in map(_points, steps) if points]
    if not found:
        raise ConfigError("a drift model needs metrics with the ESS of a lag above 0 (ess/lag_1, ...), got none")
    best: tuple[float, float, list[float]] | None = None
    for exponent in EXPONENTS:
        error, rates = 0.0, []
        for points in found:
            lag_N, ess_N = np.array(list(points), dtype=float), np.array(list(points.values()))
            rate = float(np.mean(-np.log(ess_N) / lag_N**exponent))
            error += float(np.mean((np.exp(-rate * lag_N**exponent) - ess_N) ** 2))
            rates.append(rate)
        if best is None or error < best[0]:
            best = (error, exponent, rates)
    assert best is not None
    return DriftModel(exponent=best[1], rates=np.quantile(best[2], QUANTILES).tolist())


def modelled_ess(model: DriftModel, tokens_by_lag: ArrayLike) -> EssBand:
    """Return the ESS of batches whose tokens have these lags.

    Args:
        model: A fitted model.
        tokens_by_lag: Tokens of lag 0, 1, 2, ... (any unit).

    Returns:
        Mean and band; each in (0, 1].

    Raises:
        ValueError: If there are no tokens, or a count is negative.
    """
    tokens_G = np.asarray(tokens_by_lag, dtype=float)
    if tokens_G.ndim != 1 or not tokens_G.sum() > 0 or (tokens_G < 0).any():
        raise ValueError(f"tokens_by_lag must hold tokens, none of them below 0, got shape {tokens_G.shape}")
    share_G = tokens_G / tokens_G.sum()
    growth_G = np.arange(len(tokens_G), dtype=float) ** model.exponent
    with np.errstate(over="ignore"):
        ess = [float(1.0 / (share_G * np.exp(rate * growth_G)).sum()) for rate in model.rates]
    return EssBand(mean=math.fsum(ess) / len(ess), low=ess[-1], high=ess[0])


def _points(step: Mapping[str, float]) -> dict[int, float]:
    """Return the ESS by lag of a step, lags above 0 only, where it says something."""
    points = {
        int(name.removeprefix(LAG_PREFIX)): float(value) for name, value in step.items() if name.startswith(LAG_PREFIX)
    }
    return {lag: min(1.0, ess) for lag, ess in points.items() if lag > 0 and ess > LEAST_ESS}
