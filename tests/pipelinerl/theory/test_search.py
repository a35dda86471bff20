"""Rates and the search for the best split: identities, ties, wrong arguments."""

import dataclasses

import numpy as np
import pytest
from case_study import LINEAR, case_study
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.hardware.utilisation import UtilisationCurve, fitted_utilisation
from pipelinerl.theory.lengths import lengths_from, uniform_lengths
from pipelinerl.theory.paper import (
    Setting,
    conventional_rates,
    largest_lag,
    pipeline_rates,
    search_pipeline,
    staleness_applied_compute,
)


@st.composite
def a_setting(draw: st.DrawFn) -> Setting:
    """Small settings, so that the constraint and the limits bind in turn."""
    lengths = draw(
        st.one_of(
            st.integers(1, 60).map(uniform_lengths),
            st.lists(st.integers(1, 60), min_size=1, max_size=8).map(lengths_from),
        )
    )
    return Setting(
        curve=draw(st.sampled_from([fitted_utilisation(), LINEAR])),
        lengths=lengths,
        accelerators=draw(st.integers(2, 40)),
        train_batch_size=draw(st.integers(1, 64)),
        training_flashes_per_token=draw(st.floats(0.01, 100)),
    )


@settings(max_examples=60, deadline=None)
@given(setting=a_setting(), spare=st.integers(0, 80), limit=st.integers(1, 60))
def test_search_is_the_best_of_all_feasible_points_with_the_stated_tie_break(setting, spare, limit):
    def lag_of(batch, generators):
        sizes = {"generation_batch_size": batch, "generation_accelerators": generators}
        return largest_lag(setting.lengths, train_batch_size=setting.train_batch_size, **sizes)

    max_lag = lag_of(1, 1) + spare
    choice = search_pipeline(setting, max_lag=max_lag, generation_batch_limit=limit)
    batches = np.arange(1, limit + 1)
    feasible = []
    for generators in range(1, setting.accelerators):
        for batch, share in zip(batches.tolist(), setting.curve.utilisation(batches).tolist(), strict=True):
            lag = lag_of(batch, generators)
            training = (setting.accelerators - generators) / setting.training_flashes_per_token
            if lag <= max_lag:
                feasible.append((-min(share * generators, training), batch * generators, batch, generators, lag))
    rate, _, *best = min(feasible)
    assert [choice.generation_batch_size, choice.generation_accelerators, choice.largest_lag] == best
    assert choice.rates.total == pytest.approx(-rate, rel=1e-12)  # powers of numbers and arrays: the last bit


def test_ties_go_to_the_least_in_flight_and_then_to_the_least_batch():
    # Training is far slower than any generation: all H at I = 1 tie, and H = 1 has least lag.
    slow = case_study(training_flashes_per_token=1e9)
    choice = search_pipeline(slow, max_lag=50)
    assert (choice.generation_batch_size, choice.generation_accelerators) == (1, 1)
    # Free training and an exactly linear curve: H I = 12 ties for all its factorings, and H = 1 is least.
    fast = case_study(
        curve=UtilisationCurve(lambda h: np.full_like(h, 512.0)),
        lengths=lengths_from([1]),
        train_batch_size=1,
        training_flashes_per_token=1e-9,
    )
    choice = search_pipeline(fast, max_lag=12)
    assert (choice.generation_batch_size, choice.generation_accelerators) == (1, 12)
    # U is 0.25 from H = 2 on and 0.5 from H = 8 on: I = 2, H = 8 and I = 4, H = 2 both reach 1, the second with
    # less in flight (8 against 16 sequences).
    steps = UtilisationCurve(lambda h: h / np.select([h >= 8, h >= 2], [0.5, 0.25], 0.0625))
    choice = search_pipeline(dataclasses.replace(fast, curve=steps, accelerators=5), max_lag=16)
    assert (choice.generation_batch_size, choice.generation_accelerators) == (2, 4)


@given(setting=a_setting(), steps=st.integers(1, 100))
def test_conventional_rates_are_positive_and_rise_with_steps_per_rl_step(setting, steps):
    one = conventional_rates(setting, optimizer_steps_per_rl_step=steps)
    more = conventional_rates(setting, optimizer_steps_per_rl_step=steps + 1)
    assert 0 < one.total < min(one.generation, one.training)
    assert more.generation >= one.generation
    assert more.training == one.training


@given(setting=a_setting(), batch=st.integers(1, 2000), share=st.floats(0, 1))
def test_pipeline_rate_is_the_slower_side_and_generation_rises_with_batch(setting, batch, share):
    generators = 1 + int(share * (setting.accelerators - 2))
    one = pipeline_rates(setting, generation_batch_size=batch, generation_accelerators=generators)
    more = pipeline_rates(setting, generation_batch_size=batch + 1, generation_accelerators=generators)
    assert 0 < one.total == min(one.generation, one.training)
    assert more.generation > one.generation
    used = one.training * setting.training_flashes_per_token + generators
    assert used == pytest.approx(setting.accelerators)


VALID = {
    conventional_rates: {"setting": case_study()},
    pipeline_rates: {"setting": case_study(), "generation_batch_size": 1, "generation_accelerators": 1},
    search_pipeline: {"setting": case_study(), "max_lag": 9},
    staleness_applied_compute: {
        "in_flight": 1,
        "train_batch_size": 1,
        "queue_batches": 1,
        "rate_ratio": 1,
        "tailness": 1,
    },
}
"""Arguments that are allowed."""
BELOW_ALL = "generation_accelerators must be at least 1 and below accelerators=128, got"


@pytest.mark.parametrize(
    ("call", "changes", "message"),
    [
        (uniform_lengths, {"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        (case_study, {"accelerators": 0}, "accelerators must be at least 1, got 0"),
        (case_study, {"train_batch_size": 0}, "train_batch_size must be at least 1, got 0"),
        (case_study, {"training_flashes_per_token": 0.0},
            "training_flashes_per_token must be finite and above 0, got 0.0"),
        (conventional_rates, {"optimizer_steps_per_rl_step": 0},
            "optimizer_steps_per_rl_step must be at least 1, got 0"),
        (pipeline_rates, {"generation_batch_size": 0}, "generation_batch_size must be at least 1, got 0"),
        (pipeline_rates, {"generation_accelerators": 128}, f"{BELOW_ALL} 128"),
        (pipeline_rates, {"generation_accelerators": 0}, f"{BELOW_ALL} 0"),
        (search_pipeline, {"setting": case_study(accelerators=1)},
            "accelerators must be at least 2 to generate and train at once, got 1"),
        (search_pipeline, {"generation_batch_limit": 0}, "generation_batch_limit must be at least 1, got 0"),
        (search_pipeline, {"setting": case_study(train_batch_size=1), "max_lag": 1},
            "max_lag must be at least 2, the g_max of H=1, I=1, got 1"),
        (staleness_applied_compute, {"rate_ratio": 0}, "rate_ratio must be above 0, got 0"),
        (staleness_applied_compute, {"tailness": 0.9}, "tailness must be at least 1, got 0.9"),
    ],
)  # fmt: skip
def test_wrong_argument_is_refused_by_name_rule_and_value(call, changes, message):
    with pytest.raises(ValueError, match=r"must be") as caught:
        call(**{**VALID.get(call, {}), **changes})
    assert str(caught.value) == message
