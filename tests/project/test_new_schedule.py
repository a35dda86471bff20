"""A new schedule is one file: this one. It runs wherever the shipped ones do, and no package names it.

*On policy*: the engines generate one batch while the trainer waits; the trainer makes one optimizer step and publishes
while the engines wait. So every token is trained on at lag 0, on accelerators of two kinds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pages import EXAMPLES

import pipelinerl as prl
from pipelinerl.config.run import RunConfig, load_run
from pipelinerl.errors import ConfigError, RunFailedError, SchedulerError
from pipelinerl.scheduler.base import Scheduler
from pipelinerl.scheduler.events import Command
from pipelinerl.scheduler.kinds import ScheduleKind, SteadyState, StepTimes, check_lags
from pipelinerl.scheduler.rollouts import RolloutGroup
from sim.compare import compare
from sim.planning.answer import plan
from sim.planning.screen import TIME_ERROR
from sim.planning.simulate import HowToPlan
from sim.run import simulate


class OnPolicyScheduler(Scheduler):
    """Generates one batch with the newest weights, then trains on it."""

    _ready: tuple[RolloutGroup, ...] = ()

    def may_admit(self) -> bool:
        return self.up_to_date and not self.num_taken and self.num_live < self.settings.train_batch_size

    def enqueue(self, group: RolloutGroup, commands: list[Command]) -> None:
        self._ready = (*self._ready, group)

    def take_micro_batch(self) -> Sequence[RolloutGroup]:
        if self.num_taken + self.num_ready < self.settings.train_batch_size:
            return ()
        number = self.groups_per_micro_batch
        groups, self._ready = self._ready[:number], self._ready[number:]
        return groups

    def may_publish(self) -> bool:
        return not self.num_taken


def on_policy_steady_state(times: StepTimes) -> SteadyState:
    """Generation, training and publication follow each other."""
    generation_s = times.generation_s(times.settings.train_batch_size)
    return SteadyState(step_s=generation_s + times.training_s + times.loading_s, lag_mean=0.0, lag_max=0.0)


ON_POLICY = ScheduleKind(
    name="on_policy",
    description="generate one batch, train on it, publish, and again, on accelerators of two kinds",
    scheduler=OnPolicyScheduler,
    colocated=False,
    has_rl_steps=False,
    least_lag=lambda _: 0,
    least_lag_reason="there is no lag",
    axes=("generation_accelerators",),
    steady_state=on_policy_steady_state,
)
STALER = replace(ON_POLICY, name="staler", least_lag=lambda _: 2)
"""Promises more lag than it has."""
KIND = "test_new_schedule:ON_POLICY"
"""Its name in run files, for processes with this folder on their path."""


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put this folder on the path, as a user's would be; worker processes inherit it."""
    monkeypatch.syspath_prepend(Path(__file__).parent)


def run_of(*overrides: str) -> RunConfig:
    size = ("optimizer_steps=6", "scheduler.train_batch_size=16", "scheduler.micro_batch_size=8")
    return load_run(EXAMPLES / "quickstart.toml", (*size, f"scheduler.kind={KIND}", *overrides))


def test_it_is_simulated_and_replayed(tmp_path: Path) -> None:
    summary = simulate(run_of(), out=tmp_path / "run", trace=True)
    assert (summary.optimizer_steps, summary.lag.max) == (6, 0)
    assert prl.replay(tmp_path / "run").difference is None
    assert load_run(tmp_path / "run" / "run.toml").scheduler.schedule.name == "on_policy"


def test_it_is_compared_in_other_processes() -> None:
    arms = '[{ name = "on policy" }, { name = "pipeline", set = ["scheduler.kind=pipeline"] }]'
    result = compare(run_of(f"compare.arms={arms}", "compare.baseline=pipeline"), workers=1)
    assert result.complete
    own, pipeline = result.scenarios[0].arms
    assert own.speedup < pipeline.speedup == 1.0
    assert own.summary.lag.max == 0 < pipeline.summary.lag.max


@pytest.mark.slow
def test_it_is_planned() -> None:
    """It is screened by its own steady state, within the error that the planner assumes for screening.

    The steady state of the pipeline, which has the same facts, is off by more.
    """
    search = (f"plan.schedulers=['{KIND}', 'pipeline']", "plan.generation_batch_size=[8]", "plan.simulate=4")
    result = plan(run_of(*search, "plan.generation_accelerators=[2, 4]", "plan.lag_limit=0"), HowToPlan(workers=1))
    own = result.families[KIND]
    assert own is not None
    assert own.label.startswith("on_policy ")
    assert own.lag_max == 0
    screened = dict(zip(result.screened.label, result.screened.tokens_per_s, strict=True))
    assert screened[own.label] == pytest.approx(own.tokens_per_s, rel=TIME_ERROR)


def test_a_false_promise_of_lag_is_one_clear_error(tmp_path: Path) -> None:
    message = "least_lag of schedule 'staler' must be at most the largest lag of any run, got 2, and 6 optimizer steps"
    staler = KIND.replace("ON_POLICY", "STALER")
    with pytest.raises(SchedulerError, match=message):
        simulate(run_of(f"scheduler.kind={staler}"), out=tmp_path / "run")
    assert (tmp_path / "run" / "summary.json").exists()
    with pytest.raises(RunFailedError, match=f"staler .*: {message}"):
        plan(run_of(f"plan.schedulers=['{staler}']", "plan.simulate=1"), HowToPlan(workers=1))
    with pytest.raises(SchedulerError, match="schedule 'on_policy' must keep max_lag=0, got a lag of 1"):
        check_lags(run_of("scheduler.max_lag=0").scheduler, 1, optimizer_steps=6)


def test_it_drives_engines_and_a_trainer_in_memory(tmp_path: Path) -> None:
    from in_memory import config_of, parts_of, run  # skips without torch

    config = config_of(kind=KIND, steps=8)
    summary = run(config, tmp_path / "run", parts_of(config))
    assert (summary.optimizer_steps, summary.lag.max) == (8, 0)
    assert prl.replay(tmp_path / "run").difference is None


NO_SCHEDULE: Any = len


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("pipelin", r"got 'pipelin'; did you mean pipeline\?"),
        ("async", "must be pipeline, conventional, one_step_off, partial_rollouts or package.module:ATTRIBUTE, got"),
        ("no_such_module:KIND", ""),
        ("test_new_schedule:NO_SCHEDULE", "must name a ScheduleKind, got"),
    ],
)
@pytest.mark.parametrize("key", ["scheduler.kind", "plan.schedulers"])
def test_a_wrong_name_of_a_schedule_is_one_clear_line(key: str, kind: str, message: str) -> None:
    value = json.dumps([kind] if key == "plan.schedulers" else kind)
    with pytest.raises(ConfigError, match=f"{key}.* {message}") as error:
        run_of(f"{key}={value}")
    assert len(str(error.value).splitlines()) == 1
