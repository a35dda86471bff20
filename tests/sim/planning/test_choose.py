"""The next simulations, and the recommendation among their outcomes."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_plan import tiny_run

from pipelinerl.records.reports import Bottleneck
from pipelinerl.rl.drift import DriftModel
from pipelinerl.theory.steady_state import Estimate
from sim.planning.choose import (
    TIE,
    LagCheck,
    best_of,
    check_lags,
    in_order,
    likely_to_keep,
    next_to_simulate,
    odds,
    pareto_front,
    round_sizes,
    same_lag,
    why_not,
)
from sim.planning.screen import Candidate, Screened, own_candidate
from sim.planning.simulate import Outcome
from sim.planning.space import SCHEDULE, Limits, Reason, SearchSpace

FREE = Limits()


@cache
def own() -> Candidate:
    return own_candidate(SearchSpace.of(tiny_run()))


def candidate(label: str, family: str = "pipeline") -> Candidate:
    return replace(own(), label=label, choice={**own().choice, SCHEDULE.name: family})


def screened(label: str, rate: float, lag: float, family: str = "pipeline") -> Screened:
    estimate = Estimate(
        step_s=1.0, generation_s=1.0, training_s=1.0, publishing_s=0.0, step_tokens=rate, lag_mean=lag, lag_max=0.0
    )  # fmt: skip
    return Screened(candidate(label, family), estimate)


def outcome(label: str, rate: float, lag: float, family: str = "pipeline") -> Outcome:
    return Outcome(
        candidate(label, family), tokens_per_s=rate, step_s=1.0, seconds=1.0, lag_mean=lag, lag_max=9,
        training=1.0, publishing=0.0, waiting=0.0, bottleneck=Bottleneck.TRAINING,
    )  # fmt: skip


def labels(some: list[Screened]) -> list[str]:
    return [one.candidate.label for one in some]


# --------------------------------------------------------------------------------------------- recommendation

RATES_AND_LAGS = st.lists(st.tuples(st.floats(90.0, 110.0), st.floats(0.0, 6.0)), min_size=1, max_size=12)


def outcomes_of(pairs: list[tuple[float, float]]) -> list[Outcome]:
    return [outcome(str(index), rate, lag) for index, (rate, lag) in enumerate(pairs)]


@given(pairs=RATES_AND_LAGS, more=RATES_AND_LAGS)
def test_more_simulations_lose_throughput_only_for_less_lag(pairs: list[Any], more: list[Any]) -> None:
    """Never more than a tie; and then another as fast has less lag, by an amount that counts."""
    before = best_of(outcomes_of(pairs))
    everything = outcomes_of([*pairs, *more])
    after = best_of(everything)
    assert after.tokens_per_s >= (1 - TIE) * before.tokens_per_s
    if after.tokens_per_s < before.tokens_per_s:
        most = max(one.tokens_per_s for one in everything)  # all are of one kind
        least = min(one.lag_mean for one in everything if one.tokens_per_s >= (1 - TIE) * most)
        assert before.lag_mean > least + same_lag(least)
        assert after.lag_mean < before.lag_mean


@given(pairs=RATES_AND_LAGS)
def test_nothing_is_as_fast_as_the_recommendation_at_less_lag(pairs: list[Any]) -> None:
    everything = outcomes_of(pairs)
    best, *others = in_order(everything)
    assert best is best_of(everything)
    assert len(others) == len(everything) - 1
    for one in others:
        rank, best_rank = ((some.tokens_per_s, -some.lag_mean) for some in (one, best))
        assert one.lag_mean > best.lag_mean or rank <= best_rank


def test_the_limit_that_a_run_breaks_and_its_own_value_of_each() -> None:
    """Seconds are 1, so GPU-hours are the cluster's size over 3600; the run knows its effective sample size."""
    one, hours = replace(outcome("a", 100.0, 3.0), ess=0.4), own().config.cluster.accelerators / 3600
    drift = DriftModel(rates=[1e-3], exponent=1.0)  # at lag 3 the model alone would give nearly 1

    def broken(**limits: Any) -> tuple[Reason, float | None] | None:
        rejected = one.rejected(Limits(**limits))
        return None if rejected is None else (rejected.reason, rejected.needed)

    assert broken(lag=9, mean_lag=3.0, gpu_hours=hours) is None
    assert broken(lag=8, mean_lag=2.9) == (Reason.MEAN_LAG, 3.0)
    assert broken(lag=8) == (Reason.LAG, 9)
    assert broken(gpu_hours=hours / 2) == (Reason.GPU_HOURS, hours)
    assert broken(min_ess=0.5, drift=drift) == (Reason.ESS, pytest.approx(1.0, abs=0.01))
    assert one.breaks(Limits(lag=8)) is None  # the largest lag is judged apart
    assert screened("a", 100.0, 3.0).breaks(Limits(mean_lag=2.9)) is Reason.MEAN_LAG


def test_lag_decides_between_ties_only_where_it_differs() -> None:
    """The third decimal of the lag does not cost 2 % of the throughput; half an optimizer step may."""
    fast, third_decimal, fresh = outcome("fast", 100, 3.5), outcome("same", 98, 3.496), outcome("fresh", 98, 3.0)
    assert best_of([fast, third_decimal]) is fast
    assert best_of([fast, third_decimal, fresh]) is fresh
    assert best_of([fast, outcome("slow", 96.9, 0.0)]) is fast


def test_the_highest_expected_throughput_is_recommended_and_not_the_fastest_as_things_are() -> None:
    """85 are expected of the fastest, 95 of another; and 93 of a third, a tie at half the lag."""
    fastest, safe, fresh = outcome("fastest", 100, 4.0), outcome("safe", 90, 4.0), outcome("fresh", 89, 2.0)
    rates = {"fastest": 85.0, "safe": 95.0, "fresh": 93.0}

    def expected(one: Outcome) -> float:
        return rates[one.candidate.label]

    assert best_of([fastest, safe]) is fastest
    assert best_of([fastest, safe], expected) is safe
    assert best_of([fastest, safe, fresh], expected) is fresh
    assert in_order([fastest, safe, fresh], expected) == [fresh, safe, fastest]


def test_the_kind_is_chosen_before_the_lag_decides() -> None:
    """Synchronous RL has less lag by its nature; a tie with it does not turn the kind that is best in expectation."""
    apart, fresh = outcome("apart", 100, 4.0), outcome("fresh", 98, 3.0)
    together = outcome("together", 99, 1.0, family="conventional")
    assert best_of([apart, fresh, together]) is fresh
    assert in_order([apart, fresh, together]) == [fresh, apart, together]


@pytest.mark.parametrize(
    ("rate", "lag", "line"),
    [
        (99.5, 3.51, "a tie: 0.5% slower on average, its mean lag is 3.51 instead of 3.5"),
        (102.0, 4.0, "a tie: 2.0% faster on average, its mean lag is 4 instead of 3.5"),
        (90.0, 3.0, "10% slower on average, its mean lag is 3 instead of 3.5; stuck"),
    ],
)
def test_a_tie_is_called_a_tie(rate: float, lag: float, line: str) -> None:
    """By the rank, whatever the throughput as things are expected."""
    loser, winner = outcome("loser", 50, lag), outcome("winner", 40, 3.5)
    assert why_not(loser, winner, lambda one: rate if one is loser else 100.0, "stuck") == line


# ------------------------------------------------------------------------------------------------------ front

POINTS = st.lists(st.tuples(st.integers(0, 6).map(float), st.integers(0, 6).map(float)), max_size=30)


def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one != other and one[0] >= other[0] and one[1] <= other[1]


@given(points=POINTS)
def test_no_point_of_the_front_is_beaten_and_every_other_is_beaten_or_equal(points: list[Any]) -> None:
    front = pareto_front(points)
    chosen = [points[index] for index in front]
    assert not [one for one in chosen for other in points if beats(other, one)]
    for point in points:
        assert point in chosen or any(beats(one, point) for one in chosen)
    assert chosen == sorted(chosen)
    assert len(set(chosen)) == len(chosen)


# -------------------------------------------------------------------------------------------- what is simulated


def test_two_of_each_kind_come_first_then_fast_ones_and_the_front_in_turn() -> None:
    fast = [screened(f"p{index}", 100 - 2 * index, 20.0 + index) for index in range(10)]
    front = [screened("half", 52.0, 3.0), screened("most", 98.5, 8.0)]
    slow = [screened(f"c{n}", rate, 5.0 - n, "conventional") for n, rate in ((1, 30.0), (2, 20.0), (3, 10.0))]
    chosen = labels(next_to_simulate([*fast, *front, *slow], FREE, 8))
    assert chosen[:4] == ["p0", "most", "c1", "c2"]
    assert "half" in chosen  # the least lag that reaches half of the best
    assert len(chosen) == 8
    assert len(next_to_simulate(slow, FREE, 8)) == 3


@given(number=st.integers(1, 200), more=st.integers(0, 200))
def test_more_simulations_only_add_to_the_rounds_of_fewer(number: int, more: int) -> None:
    few, many = list(round_sizes(number)), list(round_sizes(number + more))
    assert sum(few) == number
    assert few[:-1] == many[: len(few) - 1]
    assert few[-1] <= many[len(few) - 1]


@pytest.mark.parametrize("tried", [[], ["p3", "p5"]])
def test_a_round_cut_short_is_the_start_of_the_whole_round(tried: list[str]) -> None:
    limits = Limits(mean_lag=4.0)
    kept = [screened(f"p{n}", 100 - n, 5 - 0.2 * n) for n in range(20)]
    done = [outcome(label, 95.0, 4.5) for label in tried]
    whole = labels(next_to_simulate(kept, limits, 8, outcomes=done, tried=tried))
    assert len(set(whole) - set(tried)) == 8
    for number in range(8):
        assert labels(next_to_simulate(kept, limits, number, outcomes=done, tried=tried)) == whole[:number]


def test_a_candidate_that_hardly_keeps_the_limit_waits_for_a_sure_one() -> None:
    """The fastest ten are screened at a lag of 4.7 where 4 is allowed: the odds are one in fourteen."""
    near = [screened(f"near{n}", 110 - n, 4.7) for n in range(10)]
    sure = screened("sure", 90.0, 3.0)
    assert labels(next_to_simulate([*near, sure], Limits(mean_lag=4.0), 1)) == ["sure"]
    assert labels(next_to_simulate([*near, sure], FREE, 1)) == ["near0"]


def test_simulated_lags_correct_the_screened_lags_of_the_same_kind() -> None:
    """Lags come out a fifth larger: a candidate screened within the limit breaks it, and goes last."""
    kept = [screened("a", 80.0, 3.0), screened("b", 85.0, 3.8), screened("c", 82.0, 3.2), screened("d", 84.0, 3.7)]
    limits = Limits(mean_lag=4.0)
    assert labels(next_to_simulate(kept, limits, 1))[0] == "c"
    done = [outcome("a", 80.0, 3.6)]
    checks = check_lags(done, kept)
    assert checks["pipeline"].ratio == pytest.approx(1.2)
    assert 0 < checks["pipeline"].doubt < 1
    chances = {one.candidate.label: odds(one, limits, checks["pipeline"]) for one in kept}
    assert chances["b"] < 0.1
    assert 0.5 < chances["c"] < chances["a"]
    assert odds(kept[1], limits, LagCheck()) > 0.5
    assert odds(kept[1], FREE, LagCheck()) == 1.0
    assert labels(likely_to_keep(kept, limits, [])) == ["a", "b", "c", "d"]
    assert labels(likely_to_keep(kept, limits, done)) == ["a", "c"]
