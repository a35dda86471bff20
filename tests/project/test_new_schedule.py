"""A new schedule is one file: this one. It runs everywhere that the shipped ones do, and no package knows of it.

*On policy*: the engines generate one batch while the trainer waits; the trainer makes one optimizer step and publishes
while the engines wait. So every token is trained on at lag 0, on accelerators of two kinds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config.run import RunConfig
from pipelinerl.config.run_file import load_run
from pipelinerl.errors import ConfigError
from pipelinerl.records.run_folder import TRACE_FILE
from pipelinerl.records.trace import Trace, replay
from pipelinerl.scheduler.base import Scheduler
from pipelinerl.scheduler.events import Command
from pipelinerl.scheduler.groups import RolloutGroup
from pipelinerl.scheduler.kinds import ScheduleKind
from sim.compare import compare
from sim.planning.search import plan
from sim.planning.simulate import HowToPlan
from sim.run import simulate


class OnPolicyScheduler(Scheduler):
    """Generates one batch with the newest weights, then trains on it."""

    _ready: tuple[RolloutGroup, ...] = ()

    def _may_admit(self) -> bool:
        up_to_date = self._published == self.version and not self._num_loading
        return up_to_date and not self._num_taken and self.num_live < self.settings.train_batch_size

    def _enqueue(self, group: RolloutGroup, commands: list[Command]) -> None:
        self._ready = (*self._ready, group)
        self.num_ready += self._pool.group_size

    def _take_micro_batch(self) -> list[int]:
        if self._num_taken + self.num_ready < self.settings.train_batch_size:
            return []
        number = self.settings.micro_batch // self._pool.group_size
        groups, self._ready = self._ready[:number], self._ready[number:]
        return [rollout_id for group in groups for rollout_id in self._take(group)]

    def _may_publish(self) -> bool:
        return not self._num_taken


ON_POLICY = ScheduleKind(
    name="on_policy",
    description="generate one batch, train on it, publish, and again, on accelerators of two kinds",
    scheduler=OnPolicyScheduler,
    colocated=False,
    has_rl_steps=False,
    least_lag=lambda _: 0,
    least_lag_reason="there is no lag",
    axes=("generation_accelerators",),
)
KIND = "test_new_schedule:ON_POLICY"
"""What a run file names it by, in a process that finds this file."""


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put this folder on the path, as a user's would be; worker processes inherit it."""
    monkeypatch.syspath_prepend(Path(__file__).parent)


def run_of(*overrides: str) -> RunConfig:
    example = Path(__file__).parents[2] / "examples" / "quickstart.toml"
    sets = (
        "optimizer_steps=6",
        "scheduler.train_batch_size=16",
        "scheduler.micro_batch_size=8",
        f"scheduler.kind={KIND}",
    )
    return load_run(example, (*sets, *overrides))


def replayed(folder: Path) -> None:
    """Check that a fresh scheduler gives the commands of a trace again."""
    result = replay(Trace(folder / TRACE_FILE))
    assert result.difference is None
    assert result.num_events > 100


def test_it_is_simulated_and_replayed(tmp_path: Path) -> None:
    summary = simulate(run_of(), out=tmp_path / "run", trace=True)
    assert (summary.optimizer_steps, summary.lag.max) == (6, 0)
    replayed(tmp_path / "run")
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
    """Its steady state is that of the shipped kind with the same facts, which is too fast; its simulation is right."""
    search = (f"plan.schedulers=['{KIND}', 'pipeline']", "plan.generation_batch_size=[8]", "plan.simulate=4")
    result = plan(run_of(*search, "plan.generation_accelerators=[2, 4]", "plan.lag_limit=0"), HowToPlan(workers=1))
    own = result.families[KIND]
    assert own is not None
    assert own.label.startswith("on_policy ")
    assert own.lag_max == 0


def test_it_drives_engines_and_a_trainer_in_memory(tmp_path: Path) -> None:
    from in_memory import config_of, parts_of, run  # skips without torch

    config = config_of(kind=KIND, steps=8)
    summary = run(config, tmp_path / "run", parts_of(config))
    assert (summary.optimizer_steps, summary.lag.max) == (8, 0)
    replayed(tmp_path / "run")


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
def test_what_is_no_schedule_is_one_clear_line(key: str, kind: str, message: str) -> None:
    value = json.dumps([kind] if key == "plan.schedulers" else kind)
    with pytest.raises(ConfigError, match=f"{key}.* {message}") as error:
        run_of(f"{key}={value}")
    assert len(str(error.value).splitlines()) == 1
