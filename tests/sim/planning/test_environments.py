"""How many environments: rates by hand, the knee, the command, and plans with environments."""

import json
from pathlib import Path

import pytest
import tomli_w
from command_line import Command, assert_fails
from tiny_plan import candidates_of, in_this_process

from analysis.plot import environments_figure
from pipelinerl.config.run import parse_run, with_overrides
from pipelinerl.errors import ConfigError
from pipelinerl.records.comparison_report import EnvironmentsReport
from pipelinerl.records.plan_report import PlanReport
from sim.planning.answer import plan
from sim.planning.choose import TIE
from sim.planning.environments import counts_to_try, environments
from sim.planning.simulate import Job, Outcome, simulate_job
from sim.planning.space import SearchSpace

RUN = {
    "optimizer_steps": 60,
    "cluster": {"accelerators": 2, "generation_accelerators": 1},
    "scheduler": {"train_batch_size": 2, "generation_batch_size": 16},
    "workload": {"group_size": 1, "length": {"kind": "fixed", "max": 4}},
    "hardware": {"decode": {"kind": "affine", "step_s": 1.0}, "training": {"token_s": 0.0, "step_s": 7.0}},
    "environment": {
        "count": 6,
        "reset_s": 5.0,
        "step_s": 2.0,
        "turns": {"kind": "lognormal", "mean": 3, "max": 3, "observation_max": 0, "context_max": 1000},
    },
    "plan": {"environments": [12, 1, 3, 6]},
    "price": {"gpu_hour": 2.0, "environment_hour": 0.5},
}
"""A rollout has its environment for 5 + 3 x 4 + 2 x 2 = 21 s; the trainer takes 2 of them every 7 s."""


@pytest.fixture(scope="module")
def report() -> EnvironmentsReport:
    with in_this_process():
        return environments(parse_run(RUN))


def test_rates_and_the_knee_are_those_by_hand(report: EnvironmentsReport) -> None:
    """E environments give E rollouts every 21 s, the trainer takes 6 in that time: the knee is at 6."""
    per_hour = {count: 3600 * min(count, 6) / 21 for count in (1, 3, 6, 12)}
    assert {row.count: row.rollouts_per_hour for row in report.rows} == pytest.approx(per_hour, rel=0.02)
    assert (report.knee, report.slots) == (6, 16)
    assert [row.bottleneck for row in report.rows[:2]] == ["environment", "environment"]
    assert report.rows[-1].bottleneck == "training"
    assert report.verdict.startswith("the knee is at 6 environments: ")
    assert "1 give 17% of that, as environments bind; more give nothing: 12 give " in report.verdict


def test_the_cost_is_that_of_accelerators_and_environments(report: EnvironmentsReport) -> None:
    """Two GPUs at 2 USD and so many environments at 0.5, used or not: 6 cost 7 USD for 1029 rollouts."""
    for row in report.rows:
        assert row.usd_per_1000_rollouts == pytest.approx(1000 / row.rollouts_per_hour * (4 + 0.5 * row.count))
    assert report.verdict.endswith("6 are the cheapest, 7 USD per 1000 rollouts")


def test_without_a_list_shares_of_the_slots_are_tried() -> None:
    bare = parse_run({**RUN, "plan": {}})
    assert counts_to_try(bare) == [4, 6, 8, 12, 16, 18, 20, 24, 32]


def test_a_rate_that_still_rises_has_no_knee() -> None:
    with in_this_process():
        report = environments(parse_run(with_overrides(RUN, ["plan.environments=[1, 2]", "optimizer_steps=20"])))
    assert report.verdict.startswith("no knee up to 2 environments: ")


def test_a_run_or_a_list_without_environments_is_one_line() -> None:
    bare = {key: value for key, value in RUN.items() if key != "environment"}
    with pytest.raises(ConfigError, match=r"^environments needs a table \[environment\]"):
        environments(parse_run({**bare, "plan": {}}))
    with pytest.raises(ConfigError, match=r"plan\.environments needs a table \[environment\], got \[12, 1, 3, 6\]"):
        parse_run(bare)


# ------------------------------------------------------------------------------------------------- plan

PLAN = (
    "plan.schedulers=['pipeline']",
    "plan.simulate=4",
    "plan.simulate_steps=20",
    "optimizer_steps=100",
    "plan.generation_batch_size=[16]",
)


def planned(*overrides: str) -> PlanReport:
    with in_this_process():
        return plan(parse_run(with_overrides(RUN, [*PLAN, *overrides])))


@pytest.mark.slow
def test_a_plan_takes_the_environments_that_the_trainer_needs() -> None:
    """6 give all that the trainer takes, 12 no more and older: in a tie the mean lag decides."""
    report = planned("plan.environments=[3, 6, 12]", "environment.count=12")
    best = report.recommended
    assert (best.environments, best.label) == (6, "pipeline 1/1 H=16 environments=6")
    assert best.cost.usd == pytest.approx(best.hours * (4 + 0.5 * 6))


@pytest.mark.slow
def test_the_verdict_names_binding_environments_and_the_gain_of_more() -> None:
    """2 of the 6 that the trainer could use: one more is half as many again."""
    best = planned("plan.environments=[2]", "environment.count=2").recommended
    assert best.verdict.startswith(
        "environment-bound: the trainer waits 67% of the time, all 2 environments are in use; "
    )
    assert "1 more give +50%" in best.verdict


@pytest.mark.slow
def test_a_budget_counts_environments() -> None:
    """100 steps of 7 s are 0.19 h; 3 environments take twice as long: 0.39 h at 2 x 2 + 3 x 0.5 USD are 2.1 USD."""
    assert planned("plan.environments=[3]", "environment.count=3", "plan.budget=2.3").recommended.environments == 3
    with pytest.raises(ConfigError, match="by budget"):
        planned("plan.environments=[3]", "environment.count=3", "plan.budget=1.7")


def test_the_figure_has_rate_cost_and_knee(report: EnvironmentsReport) -> None:
    figure = environments_figure(report)
    upper, lower = figure.axes
    rates, knee, slots = upper.lines
    assert list(rates.get_ydata()) == [row.rollouts_per_hour for row in report.rows]
    assert (list(knee.get_xdata()), list(slots.get_xdata())) == ([6, 6], [16, 16])
    assert list(lower.lines[0].get_ydata()) == [row.usd_per_1000_rollouts for row in report.rows]
    assert len(figure.legends[0].get_texts()) == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("in_this_process")
def test_the_command_prints_keeps_and_draws(command: Command, tmp_path: Path) -> None:
    path, out = tmp_path / "run.toml", tmp_path / "out"
    path.write_text(tomli_w.dumps(RUN))
    words = ("environments", path, "--set", "optimizer_steps=10")
    result = command(*words, "--out", out, "--json")
    assert result.status == 0
    assert json.loads(result.out) == json.loads((out / "environments.json").read_text())
    assert (out / "figures" / "rollouts_against_environments.png").exists()
    assert command("plot", out, "--out", tmp_path / "again").status == 0
    assert "The knee is at 6 environments" in command(*words).out
    assert_fails(command(*words, "--set", "plan.environments=[0]"), 2, "plan.environments.0 must be at least 1, got 0")


# ------------------------------------------------------- a plan against the truth: all candidates are simulated

SIX = (
    "optimizer_steps=12",
    "cluster={accelerators=6, generation_accelerators=4}",
    "scheduler={train_batch_size=16, generation_batch_size=8, optimizer_steps_per_rl_step=2}",
    "workload={group_size=4, prompt_tokens=100, length={kind='lognormal', mean=60, cv=1, max=300}}",
    "environment={count=16, reset_s=2.0, step_s=0.5, step_cv=1.0}",
    "environment.turns={kind='lognormal', mean=6, cv=0.5, max=16, context_max=8000}",
    "environment.turns.observation_tokens=200",
    "environment.turns.observation_cv=1.0",
    "environment.turns.observation_max=1000",
    "hardware={kv_cache_tokens=30000, prefill={token_s=2e-5}, weights={publish_s=0.05, pause_s=0.1}}",
    "hardware.decode={kind='affine', step_s=7e-3, sequence_s=1e-3, context_token_s=2.3e-7}",
    "hardware.training={token_s=2e-4, step_s=0.2}",
    "plan={schedulers=['pipeline', 'conventional'], generation_accelerators=[2, 4, 5], generation_batch_size=[8]}",
    "plan.optimizer_steps_per_rl_step=[2]",
    "plan.publish_every=[1]",
    "plan.tensor_parallel=[1]",
    "plan.environments=[8, 16, 40]",
    "plan.simulate=4",
    "plan.simulate_steps=12",
)


@pytest.mark.slow
def test_the_recommendation_is_among_the_best_of_all_candidates() -> None:
    """Few environments, few engines or one trainer bind, each in other candidates; a third of them is simulated.

    The best have most tokens per second within ``TIE``, in which a plan takes candidates as equal.
    """
    config = parse_run(with_overrides({}, SIX))
    made = candidates_of(SearchSpace.of(config))
    outcomes = [simulate_job(Job(one, config.optimizer_steps)) for one in made]
    rates = {one.candidate.label: one.tokens_per_s for one in outcomes if isinstance(one, Outcome)}
    assert len(rates) == len(made) == 12
    with in_this_process():
        report = plan(config)
    assert report.search.simulated <= len(made) / 3
    assert rates[report.recommended.label] >= (1 - TIE) * max(rates.values())
    assert sorted(rates.values())[-4] < (1 - TIE) * max(rates.values())  # most are not as good
