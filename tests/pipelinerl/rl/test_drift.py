"""The drift model: its formula by hand, recovery by a fit, and the order of its band."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import message

from pipelinerl.config.run import load_run
from pipelinerl.errors import ConfigError
from pipelinerl.rl.drift import DriftModel, LearnedRun, ess_at_lag, fit_drift, modelled_ess
from pipelinerl.rl.ess import ess_of_log_weights
from sim.run import simulate

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.toml"


def test_the_formula_by_hand():
    """Half of the tokens at lag 0, half at lag 2, rate 0.25, exponent 1: 1 / (1/2 + exp(0.5)/2) = 0.7551."""
    model = DriftModel(exponent=1.0, rates=[0.25])
    assert modelled_ess(model, [3, 0, 3]).mean == pytest.approx(2 / (1 + math.exp(0.5)))
    assert modelled_ess(model, [7]).mean == 1.0  # no lag


def test_log_normal_weights_have_the_modelled_ess():
    """4 * 10^5 weights of variance 0.2 and 0.4: the standard error of the ESS is below 0.002."""
    stream = np.random.default_rng(1)
    log_weight = [stream.normal(-0.1 * lag, math.sqrt(0.2 * lag), 200_000) for lag in (1, 2)]
    measured = ess_of_log_weights(np.concatenate(log_weight))
    assert modelled_ess(DriftModel(exponent=1.0, rates=[0.2]), [0, 1, 1]).mean == pytest.approx(measured, abs=0.01)


LAGS = (1, 2, 5, 9)
TOKENS = [10, 10, 10, 0, 0, 10, 0, 0, 0, 10]


@pytest.mark.slow
@given(exponent=st.sampled_from([0.5, 1.0, 1.5, 2.0]), rate=st.floats(1e-4, 0.05))
def test_a_fit_finds_the_model_that_made_the_metrics(exponent, rate):
    """Whether every step has all lags, as in pipelined RL, or one, as in conventional RL."""
    ess = {f"ess/lag_{lag}": math.exp(-rate * lag**exponent) for lag in LAGS}
    for steps in ([{name: value} for name, value in ess.items()] * 20, [ess] * 80):
        model = fit_drift([LearnedRun(steps, TOKENS)])
        assert model.exponent == pytest.approx(exponent)
        assert model.rates == pytest.approx([rate] * 5, rel=1e-6)


def test_the_rates_are_quantiles_over_the_steps():
    """Rates 1 to 11 hundredths: their 10, 30, 50, 70 and 90 % quantiles are 2, 4, 6, 8 and 10 hundredths."""
    steps = [{f"ess/lag_{lag}": math.exp(-number / 100 * lag) for lag in LAGS} for number in range(1, 12)]
    model = fit_drift([LearnedRun([step] * 64, TOKENS) for step in steps])
    assert model.exponent == pytest.approx(1.0)
    assert model.rates == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.10], rel=1e-3)


@given(
    exponent=st.floats(0.3, 2.5),
    rates=st.lists(st.floats(0, 3), min_size=5, max_size=5).map(sorted),
    tokens=st.lists(st.integers(0, 100), min_size=1, max_size=30).filter(any),
)
def test_the_band_holds_the_mean_and_more_lag_never_raises_it(exponent, rates, tokens):
    model = DriftModel(exponent=exponent, rates=rates)
    band = modelled_ess(model, tokens)
    assert 0 <= band.low <= band.mean + 1e-12
    assert band.mean <= band.high + 1e-12
    assert band.high <= 1 + 1e-12
    assert modelled_ess(model, [0, *tokens]).mean <= band.mean + 1e-12  # everything one step older


@pytest.mark.parametrize("steps", [[], [{"reward/mean": 1.0}], [{"ess/lag_0": 1.0}]])
def test_without_lag_there_is_nothing_to_fit(steps):
    with pytest.raises(ConfigError, match="a drift model needs metrics"):
        fit_drift([LearnedRun(steps, [1, 1])])


@pytest.mark.parametrize("tokens", [[], [0, 0], [1, -1], [[1]]])
def test_tokens_must_be_tokens(tokens):
    with pytest.raises(ValueError, match="tokens_by_lag must hold tokens"):
        modelled_ess(DriftModel(exponent=1.0, rates=[0.1]), tokens)


def test_a_run_without_a_policy_reports_the_band_as_modelled():
    overrides = ["optimizer_steps=6", "drift.exponent=1.0", "drift.rates=[0.01, 0.02, 0.04]"]
    config = load_run(QUICKSTART, overrides)
    summary, plain = simulate(config), simulate(load_run(QUICKSTART, overrides[:1]))
    band = summary.ess_modelled
    assert summary.model_copy(update={"ess_modelled": None}) == plain
    assert 0 < band.low < band.mean < band.high < 1


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["drift.exponent=1", "drift.rates=[0.2, 0.1]"], "quickstart.toml: drift.rates must rise, got [0.2, 0.1]"),
        (["drift.exponent=-1", "drift.rates=[0.2]"], "quickstart.toml: drift.exponent must be at least 0, got -1"),
        (["drift.exponent=1", "drift.rates=[]"], "quickstart.toml: drift.rates must not be empty, got []"),
    ],
)
def test_a_model_that_cannot_be_is_one_line(overrides, line):
    assert message(load_run, QUICKSTART, overrides) == line


def test_the_ess_of_one_lag_is_that_of_a_batch_of_this_lag() -> None:
    model = DriftModel(exponent=1.3, rates=[0.01, 0.02, 0.05])
    for lag in (0, 1, 4, 9):
        batch = [0.0] * lag + [1.0]
        assert ess_at_lag(model, lag) == pytest.approx(modelled_ess(model, batch).mean)
    assert ess_at_lag(model, 4) > ess_at_lag(model, 4.5) > ess_at_lag(model, 5)
