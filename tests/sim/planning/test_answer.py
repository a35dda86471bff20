"""The search: which candidates are simulated and recommended, and the plan that is left after Ctrl-C."""

from __future__ import annotations

import math
import signal
import sys
import types
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from refusals import message
from tiny_plan import SIXTEEN, TINY, in_this_process, planned, priced_plan, refused, tiny_run

from pipelinerl.config.question import Assumption, asked_of, with_value
from pipelinerl.config.run import load_run, with_overrides
from pipelinerl.errors import RunFailedError
from pipelinerl.records.plan_report import PlanReport
from sim.parallel import run_all_on_ray
from sim.planning import simulate as planning_simulate
from sim.planning.answer import best_screened, compared_with, plan
from sim.planning.choose import TIE, pareto_front
from sim.planning.simulate import HowToPlan, Runner
from sim.run import simulate

# ------------------------------------------------------------------------------------- recommendation


def test_the_recommendation_is_simulated_and_the_fastest_on_average_within_a_tie() -> None:
    report = priced_plan()
    best = report.recommended
    simulated = {one.label: one.tokens_per_s for one in report.simulated}
    assert best.simulated_tokens_per_s == simulated[best.label]
    for one in report.families.values():
        assert one is None or best.tokens_per_s >= (1 - TIE) * one.tokens_per_s
        assert one is None or one.family == best.family or best.tokens_per_s > (1 - TIE) * one.tokens_per_s
    safest = report.certainty.safest
    assert safest.label == best.label or safest.low > best.band.low
    assert safest.slower >= 0


def test_every_described_candidate_has_its_band_hours_and_cost() -> None:
    report = priced_plan()
    for one in (report.recommended, report.runner_up, report.own):
        assert one is not None
        assert one.band.low < one.tokens_per_s < one.band.high
        assert math.sqrt(one.band.low * one.band.high) == pytest.approx(one.tokens_per_s, rel=0.3)
        dearest, cheapest = (cost.gpu_hours for cost in one.band_costs)
        assert dearest / cheapest == pytest.approx(one.band.high / one.band.low)
        cost, millions = one.cost, one.tokens_per_s * one.hours * 3600 / 1e6
        assert cost.gpu_hours == pytest.approx(4 * one.hours)
        assert cost.usd == pytest.approx(cost.gpu_hours * 2.0)
        assert cost.usd_per_million_tokens == pytest.approx(cost.gpu_hours * 2.0 / millions)
        assert cost.kwh == pytest.approx(cost.gpu_hours * 0.7)  # an H100 has 700 W
        assert one.training + one.publishing + one.waiting == pytest.approx(1.0)
    assert report.own is not None
    assert report.own.recommended_over_own == pytest.approx(report.recommended.tokens_per_s / report.own.tokens_per_s)


def test_the_runner_up_is_another_layout_and_has_the_reason_why_it_lost() -> None:
    report = priced_plan()
    best, other = report.recommended, report.runner_up
    assert other is not None
    assert (best.family, best.cluster.generation_accelerators) != (other.family, other.cluster.generation_accelerators)
    slower = 1 - other.tokens_per_s / best.tokens_per_s
    assert other.why.startswith(f"{slower:.0%} slower" if slower > TIE else ("as good within 3%", "a tie"))


def test_front_kinds_and_decisions_name_simulated_candidates() -> None:
    report = priced_plan()
    simulated = {one.label: one for one in report.simulated}
    assert report.search.simulated == len(simulated) == 6  # plan.simulate, the run file and the least regret among them
    points = [(simulated[label].tokens_per_s, simulated[label].lag_mean) for label in report.front]
    assert pareto_front(points) == list(range(len(points)))
    for family, one in report.families.items():
        assert one is not None
        assert one.family == family
        fastest = max(other.tokens_per_s for other in simulated.values() if other.family == family)
        assert one.tokens_per_s >= 0.97 * fastest


@pytest.mark.slow
def test_a_run_file_of_a_kind_that_is_not_asked_for_is_shown_and_not_recommended() -> None:
    """With all slots it is by far the fastest, and as soon as its kind may be chosen it is."""
    small = (
        "scheduler.generation_batch_size=64",
        "plan.generation_batch_size=[1]",
        "plan.generation_accelerators=[1]",
        "plan.optimizer_steps_per_rl_step=[1]",
        "plan.simulate=4",
    )
    report = planned(*small, "plan.schedulers=['conventional']")
    assert report.own is not None
    assert report.own.tokens_per_s > 1.5 * report.recommended.tokens_per_s
    assert report.recommended.family == "conventional"
    assert not report.own.among_schedulers
    assert report.own.label not in report.front
    asked = planned(*small, "plan.schedulers=['pipeline', 'conventional']")
    assert asked.own is not None
    assert asked.recommended.label == asked.own.label
    assert asked.own.among_schedulers


# ------------------------------------------------------------------------ slow publications, few simulations

SOME_SIZES = (
    *SIXTEEN,
    "plan.generation_batch_size=[8, 12, 16, 24, 32]",
    "plan.optimizer_steps_per_rl_step=[2, 4, 8]",
)


@pytest.mark.slow
def test_the_pipeline_publishes_less_often_where_publications_are_slow() -> None:
    """With one in three optimizer steps it is faster by a third and more than with one per step."""
    slow = (*SOME_SIZES, "hardware.weights={publish_s=4, pause_s=4}")
    always, searched = planned(*slow, "plan.publish_every=[1]"), planned(*slow)
    assert always.recommended.scheduler.publish_every == 1
    assert searched.recommended.scheduler.publish_every > 1
    assert searched.recommended.lag_mean <= 4
    assert searched.recommended.tokens_per_s > 1.35 * always.recommended.tokens_per_s
    assert searched.warnings == always.warnings == []


@cache
def plan_of(simulate: int) -> PlanReport:
    return planned(*SOME_SIZES, "plan.schedulers=['pipeline']", f"plan.simulate={simulate}")


@pytest.mark.slow
@pytest.mark.parametrize("simulate", [1, 2, 3, 6])
def test_a_plan_of_few_simulations_finds_one_that_keeps_the_limit(simulate: int) -> None:
    """The fastest of the screening have lags of 4.2 to 4.8, where 4 is allowed."""
    report = plan_of(simulate)
    assert report.recommended.lag_mean <= 4
    assert report.recommended.tokens_per_s > 13_000
    assert max(2, simulate) <= report.search.simulated <= simulate + 4  # and the best bet, where it was not


@pytest.mark.slow
def test_more_simulations_keep_the_candidates_of_fewer_and_lose_no_throughput() -> None:
    last: set[str] = set()
    fastest = 0.0
    for number in (3, 6, 12):
        report = plan_of(number)
        now = {one.label for one in report.simulated}
        assert last < now
        assert report.recommended.tokens_per_s >= 0.97 * fastest
        last, fastest = now, report.recommended.tokens_per_s


# --------------------------------------------------------------------------------------------- limits


@pytest.mark.slow
def test_the_bound_on_lag_is_kept_by_every_kind_of_schedule() -> None:
    kinds = "plan.schedulers=['pipeline', 'conventional', 'one_step_off', 'partial_rollouts']"
    report = planned(kinds, "plan.lag_limit=2", "plan.simulate=8")
    within = [one for one in report.simulated if not one.label.endswith("(run file)")]
    assert {one.family for one in within} == {"pipeline", "conventional", "one_step_off", "partial_rollouts"}
    assert max(one.lag_max for one in [*within, report.recommended]) <= 2


def test_a_mean_lag_limit_holds_for_the_recommendation() -> None:
    assert planned("plan.mean_lag_limit=1.2").recommended.lag_mean <= 1.2


def test_min_ess_bounds_the_modelled_ess_of_the_recommendation() -> None:
    """By Jensen's inequality 1 / E[exp(0.25 lag)] is at most exp(-0.25 E[lag])."""
    best = planned("plan.min_ess=0.7", "drift.exponent=1.0", "drift.rates=[0.25]").recommended
    assert best.ess is not None
    assert 0.7 <= best.ess < math.exp(-0.25 * best.lag_mean)


@pytest.mark.slow
def test_the_least_mean_lag_that_is_named_is_feasible() -> None:
    line = refused("plan.mean_lag_limit=0.01", "plan.schedulers=['pipeline']")
    least = float(line.partition("(mean_lag_limit=")[2].partition(" ")[0])
    report = planned(f"plan.mean_lag_limit={least * 1.2}", "plan.schedulers=['pipeline']")
    assert report.recommended.lag_mean > 0.01


# --------------------------------------------------------------------------------------------- folder


@pytest.mark.slow
def test_the_folder_holds_the_report_and_a_run_file_that_gives_its_numbers(tmp_path: Path) -> None:
    """The same plan gives the same bytes, of the report and of the run file."""
    best = planned("price.gpu_hour=2.0", out=tmp_path / "out", workers=1).recommended
    planned("price.gpu_hour=2.0", out=tmp_path / "again")
    for name in ("plan.json", "recommended.toml"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    config = load_run(tmp_path / "out" / "recommended.toml")
    assert config.optimizer_steps == 40
    assert (config.cluster, config.scheduler) == (best.cluster, best.scheduler)
    assert config.hardware == tiny_run().hardware
    assert simulate(config).tokens_per_s == pytest.approx(best.simulated_tokens_per_s, rel=0.1)


# ------------------------------------------------------------------------------------- interrupts, Ray


def test_ctrl_c_between_simulations_ends_them_and_a_second_one_ends_all() -> None:
    """The first is remembered, so that the plan is finished from the simulations that have ended."""
    runner = Runner(HowToPlan(workers=1))
    before = signal.getsignal(signal.SIGINT)
    with runner.interruptible():
        signal.raise_signal(signal.SIGINT)
        assert runner.interrupted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_ctrl_c_in_the_certainty_keeps_the_plan() -> None:
    stages: list[str] = []

    def press(stage: str, _done: int, _total: int) -> None:
        if stage == "certainty" and stage not in stages:
            signal.raise_signal(signal.SIGINT)
        stages.append(stage)

    report = planned("plan.simulate=2", on_progress=press)
    assert not report.search.complete
    assert "certainty" in stages


def stop_at(number: int) -> Any:
    """Return an ``on_progress`` that presses Ctrl-C when so many simulations have ended."""

    def stop(_stage: str, done: int, _total: int) -> None:
        if done == number:
            raise KeyboardInterrupt

    return stop


@pytest.mark.slow
def test_on_ctrl_c_the_simulations_that_ended_are_kept(tmp_path: Path) -> None:
    report = planned(out=tmp_path / "out", on_progress=stop_at(2))
    assert (report.search.simulated, report.search.complete) == (2, False)
    assert (tmp_path / "out" / "recommended.toml").exists()


def test_on_ctrl_c_before_anything_has_ended_there_is_no_plan(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match="interrupted before the first simulation ended"):
        planned(out=tmp_path / "out", on_progress=stop_at(0))
    assert not (tmp_path / "out").exists()


def test_a_run_file_alone_that_is_not_asked_for_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run file, which has the most in progress, goes first."""
    monkeypatch.setattr(planning_simulate, "run_all", lambda function, jobs, workers: (function(job) for job in jobs))
    other = ("scheduler.generation_batch_size=64", "plan.schedulers=['conventional']")
    with pytest.raises(RunFailedError, match="interrupted"):
        planned(*other, on_progress=stop_at(1), workers=1)


def double(number: int) -> int:
    return 2 * number


def test_jobs_go_to_the_ray_cluster_and_it_is_left_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    ray = types.SimpleNamespace(
        init=lambda address, **_: calls.append(f"init {address}"),
        remote=lambda function: types.SimpleNamespace(remote=lambda job: (function, job)),
        wait=lambda waiting: ([waiting[-1]], waiting[:-1]),
        get=lambda reference: reference[0](reference[1]),
        shutdown=lambda: calls.append("shutdown"),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert list(run_all_on_ray(double, [1, 2, 3], address="auto")) == [6, 4, 2]
    assert calls == ["init auto", "shutdown"]


def test_without_ray_or_a_cluster_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert message(planned, ray_address="auto") == "--ray auto needs Ray; install it with: pip install ray"

    def refuse(**_: Any) -> None:
        raise ConnectionError("no cluster\nmore")

    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(init=refuse))
    line = "--ray must be the address of a running Ray cluster, got here:1: no cluster"
    assert message(planned, ray_address="here:1") == line


# ------------------------------------------------------------------- other values, and differences of two plans


def test_a_plan_against_another_names_every_key_that_differs_and_no_other() -> None:
    before = priced_plan()
    overrides = ("hardware.gpu='A100'", "price.gpu_hour=2.0", "optimizer_steps=60", "seed=4", "plan.simulate=9")
    against = compared_with("old", before, asked_of(tiny_run(*overrides), whole=True))
    assert {one.key: (one.before, one.alone.value) for one in against.changed} == {
        "hardware.gpu": ("H100", "A100"),
        "optimizer_steps": (40, 60),
    }
    gpu = next(one for one in against.changed if one.key == "hardware.gpu")
    assert gpu.alone.throughput is not None
    assert gpu.alone.throughput < 1.0
    assert against.tokens_per_s == before.recommended.tokens_per_s


def test_another_value_of_a_key_that_no_draw_moves_is_screened_alone() -> None:
    """The best of the recommended kind over that with the value as it is: 1 for that value; largest effect first."""
    keys = [Assumption("price.gpu_hour", None, (2.0,)), Assumption("hardware.gpu", "H100", ("H100", "A100"))]
    with in_this_process():
        report = plan(tiny_run("plan.simulate=1"), assumed=keys)
    kind = report.recommended.family
    rates = [
        best_screened(with_value(report.asked, "hardware.gpu", gpu))[kind].tokens_per_s for gpu in ("H100", "A100")
    ]
    gpu, price = report.assumed
    assert (gpu.key, price.key) == ("hardware.gpu", "price.gpu_hour")
    assert [one.throughput for one in gpu.instead] == pytest.approx([1.0, rates[1] / rates[0]])
    assert rates[1] < rates[0]
    assert [(one.throughput, one.fastest) for one in price.instead] == [(1.0, None)]


def test_a_plan_cut_short_is_compared_as_such() -> None:
    report = priced_plan()
    for complete in (True, False):
        search = report.search.model_copy(update={"complete": complete})
        against = compared_with("old", report.model_copy(update={"search": search}), report.asked)
        assert (against.complete, against.changed, against.label) == (complete, [], report.recommended.label)


@pytest.mark.parametrize("number", [1, 2, 64])
def test_some_candidates_are_there_for_clusters_of_every_size(number: int) -> None:
    tables = with_overrides(TINY, [f"cluster.accelerators={number}"])
    del tables["plan"]["generation_batch_size"], tables["plan"]["publish_every"]
    tables["cluster"].pop("generation_accelerators")
    assert best_screened(tables)


def test_a_plan_has_no_groups_of_engines(tmp_path: Path) -> None:
    """Their number is what it searches."""
    config = tiny_run("fleet.groups=[{ name = 'a', engines = 2 }]")
    assert message(plan, config, HowToPlan(out=tmp_path / "plan")) == (
        "plan searches the engines: give plan.spot in place of fleet.groups, got groups a"
    )
    assert not (tmp_path / "plan").exists()
