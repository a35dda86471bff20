"""Fleets of a plan: against a simulation, by hand, and by what holds at the price and the rate at which they flip."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from refusals import message
from tiny_plan import planned, refused, tiny_run

from pipelinerl.config.fleet import FleetConfig, FleetGroupConfig, SpotOffer
from pipelinerl.config.run import RunConfig, load_run, parse_run
from pipelinerl.records.plan_report import Band
from pipelinerl.records.run_folder import FLEET_FILE
from pipelinerl.theory.steady_state import daly_interval, daly_share
from sim.planning.answer import FleetPlanner, fleet_run, number_there, place_shares
from sim.planning.screen import Screener, own_candidate
from sim.planning.space import SearchSpace
from sim.run import simulate

OFFER = SpotOffer(price_per_hour=1.0, reclaim_hours=0.1, away_s=100.0, notice_s=0.0)


def run_of(**tables: Any) -> RunConfig:
    """Return a generation-bound run of eight engines: a token a second in each of four slots."""
    return parse_run(
        {
            "optimizer_steps": 4500,
            "cluster": {"accelerators": 9, "generation_accelerators": 8},
            "scheduler": {"train_batch_size": 8, "generation_batch_size": 4},
            "workload": {"group_size": 1, "prompt_tokens": 0, "length": {"kind": "fixed", "max": 50}},
            "hardware": {"decode": {"kind": "affine", "step_s": 1.0}, "training": {"token_s": 0.0}},
            **tables,
        }
    )


def planner_of(config: RunConfig, *, expected: float = 32.0, mtbf_hours: float | None = None) -> FleetPlanner:
    space = SearchSpace.of(config)
    band = Band(low=expected / 2, high=expected * 2)
    screener = Screener(config, space.answers)
    return FleetPlanner(
        own_candidate(space), screener, expected=expected, band=band, price=(2.0, 2.0), mtbf_hours=mtbf_hours
    )


def test_the_shares_of_a_place_by_hand():
    """Two accelerators that fail every 10 h each: 5 h. Reclaims every 5 h too: lives of 2.5 h. Half of them end in 600
    s of repair, half in 1200 s away: 900 s. A start of 90 s: there for 9000 e^-0.01 of 9900 s."""
    group = FleetGroupConfig(
        name="s", kind="spot", engines=1, mtbf_hours=10, repair_s=600, reclaim_hours=5, away_s=1200, notice_s=30
    )
    shares = place_shares(FleetConfig(start_s=90), group, tensor_parallel=2)
    assert shares.there == pytest.approx(9000 * math.exp(-0.01) / 9900)
    assert (shares.paid, shares.ends_per_s, shares.lost_share) == pytest.approx((9000 / 9900, 1 / 9900, 0.5))
    reserved = place_shares(FleetConfig(), FleetGroupConfig(name="r", engines=1), tensor_parallel=2)
    assert (reserved.there, reserved.paid, reserved.ends_per_s) == (1.0, 1.0, 0.0)


def test_the_number_of_engines_by_hand():
    """One place that is there half of the time and one that is there a quarter of it."""
    half, quarter = (replace(place_shares(FleetConfig(), GROUP, tensor_parallel=1), there=one) for one in (0.5, 0.25))
    np.testing.assert_allclose(number_there(1, 1, (half, quarter)), [3 / 8, 4 / 8, 1 / 8])
    np.testing.assert_allclose(number_there(3, 0, (half, quarter)), [1 / 8, 3 / 8, 3 / 8, 1 / 8])


GROUP = FleetGroupConfig(name="r", engines=1)


def test_a_long_simulation_has_the_predicted_throughput_and_money():
    """Four spot engines, lives of 6 minutes: 480 of them end. An on-off process of correlation time t = 1 / (1/360 +
    1/100) = 78 s has its mean over T = 66,000 s within sqrt(2 t p (1 - p) 4 / T) = 0.6 % of the engines that are there:
    four of these are passed once in 16,000 times. 1 % more for what a moved rollout repeats."""
    config = run_of(price={"gpu_hour": 2.0})
    planner = planner_of(config)
    fleet = planner.fleet(OFFER, reserved=4, spots=4)
    run = planner.long_run(fleet)
    report = simulate(fleet_run(config, fleet))
    assert report.fleet is not None
    assert report.fleet.left > 400
    assert report.fleet.engines_mean == pytest.approx(run.there, rel=0.024)
    assert report.tokens_per_s == pytest.approx(run.tokens_per_s, rel=0.034)
    assert report.cost is not None
    assert report.cost.usd is not None
    assert report.cost.usd / (report.duration_s / 3600) == pytest.approx(run.usd_per_hour, rel=0.024)


def test_money_without_spot_engines_by_hand():
    """Nine GPUs at 2 USD: 18 USD per hour, 32 tokens/s: 156.25 USD per million; the band of the plan turned round."""
    (row,) = planner_of(run_of()).report(None).rows
    assert (row.usd_per_hour, row.tokens_per_s) == pytest.approx((18.0, 32.0))
    assert row.usd_per_million_tokens == pytest.approx(156.25)
    assert (row.band.low, row.band.high) == pytest.approx((78.125, 312.5))


def test_every_fleet_is_as_fast_with_the_fewest_spot_engines():
    planner = planner_of(run_of())
    (base, _), *others = planner.fleets(OFFER)
    assert (base.reserved, base.spot) == (8, 0)
    assert [row.reserved for row, _ in others] == [7, 6, 5, 4, 3, 2, 1, 0]
    for row, _ in others:
        fewer = planner.long_run(planner.fleet(OFFER, reserved=row.reserved, spots=row.spot - 1))
        assert fewer.tokens_per_s < 0.97 * base.tokens_per_s <= row.tokens_per_s


def test_at_the_flip_price_a_fleet_with_spot_engines_costs_as_much_and_above_it_none_pays():
    planner = planner_of(run_of())
    price = planner.flip_price(OFFER)
    assert price is not None
    for factor, pays in ((0.99, True), (1.01, False)):
        offer = OFFER.model_copy(update={"price_per_hour": factor * price})
        assert planner.pays(offer) is pays


def test_at_the_flip_rate_spot_engines_begin_to_pay():
    planner = planner_of(run_of())
    offer = OFFER.model_copy(update={"price_per_hour": 1.9})
    hours = planner.flip_hours(offer)
    assert hours is not None
    for factor, pays in ((0.97, False), (1.03, True)):
        assert planner.pays(offer.model_copy(update={"reclaim_hours": factor * hours})) is pays


def test_a_trainer_that_fails_checkpoints_at_dalys_interval_and_loses_his_share():
    plan = planner_of(run_of(), mtbf_hours=10.0).report(None)
    every_s = daly_interval(20.0, 36_000.0)
    assert plan.checkpoint_every_s == pytest.approx(every_s)
    assert plan.trainer_share == pytest.approx(daly_share(every_s, checkpoint_s=20, restart_s=300, mtbf_s=36_000))
    (row,) = plan.rows
    assert row.tokens_per_s < 32.0 * plan.trainer_share
    assert (plan.flip_price, plan.flip_hours, plan.spot_price) == (None, None, None)


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.1, 2.0])
def test_no_interval_is_better_than_dalys(factor):
    """To 1e-3, which is the error of his series at these times."""
    every_s, times = daly_interval(60.0, 7200.0), {"checkpoint_s": 60.0, "restart_s": 300.0, "mtbf_s": 7200.0}
    assert daly_share(factor * every_s, **times) < daly_share(every_s, **times) * (1 + 1e-3)


SPOT = "plan.spot={price_per_hour=1.0, reclaim_hours=8.0}"


def test_a_plan_says_which_fleet_is_cheapest_and_writes_its_run_file(tmp_path):
    report = planned(SPOT, "plan.schedulers=['pipeline']", "price.gpu_hour=2.0", out=tmp_path / "plan")
    assert report.fleet is not None
    best = report.fleet.rows[report.fleet.best]
    config = load_run(tmp_path / "plan" / FLEET_FILE)
    assert config.fleet == report.fleet.fleet
    assert sum(group.engines for group in report.fleet.fleet.groups) == best.reserved + best.spot == config.num_engines
    assert config.training_accelerators == (
        report.recommended.cluster.accelerators - (report.recommended.cluster.generation_accelerators or 0)
    )
    assert report.fleet.rows[0].tokens_per_s == pytest.approx(report.recommended.tokens_per_s)


def test_a_plan_that_is_not_asked_for_fleets_has_none():
    assert planned("plan.schedulers=['pipeline']").fleet is None


def test_fleets_need_prices_and_engines_apart():
    config = tiny_run(SPOT, "hardware={decode={kind='affine', step_s=0.01}, training={token_s=1e-4}}")
    assert config.price is None
    for asks in (SPOT, "plan.mtbf_hours=9", "plan.lend_switch_s=1"):
        message = refused(asks, "hardware={decode={kind='affine', step_s=0.01}, training={token_s=1e-4}}")
        assert "price.gpu_hour" in message
    report = planned(SPOT, "plan.schedulers=['conventional']")
    assert report.fleet is None
    assert any("plan.schedulers" in warning for warning in report.warnings)


@pytest.mark.parametrize(
    ("hours", "line"),
    [
        (0.01, "plan: fleet.trainer.mtbf_hours must leave 1 accelerators a mean of at least"),
        (0.05, "plan.mtbf_hours must leave engines time to generate, got 0.05"),
    ],
)
def test_failures_that_stop_everything_are_refused(hours, line):
    """Eight engines of four slots: each of them lasts 180 s, of which it starts for 600 s."""
    slow = {"start_s": 600.0, "trainer": {"checkpoint_every_s": 60.0}} if hours == 0.05 else None
    assert message(planner_of, run_of(fleet=slow), mtbf_hours=hours).startswith(line)
