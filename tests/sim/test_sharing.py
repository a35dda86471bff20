"""Jobs that share a trainer: turns by hand, laws of whole runs, and what cannot share."""

from __future__ import annotations

import json
from typing import Any

import pytest
from command_line import Command, assert_fails

from pipelinerl.config.run import RunConfig, parse_run, with_overrides
from pipelinerl.errors import ConfigError
from sim.clock import CLUSTER_PRIORITY, TICKS_PER_S, Clock, Wake
from sim.sharing import SharedTrainer, share

RUN: dict[str, Any] = {
    "optimizer_steps": 20,
    "cluster": {"accelerators": 4, "generation_accelerators": 2},
    "scheduler": {"train_batch_size": 32, "generation_batch_size": 16},
    "workload": {
        "group_size": 4,
        "prompt_tokens": 20,
        "length": {"kind": "lognormal", "mean": 200, "cv": 0.5, "max": 800},
    },
    "hardware": {
        "decode": {"kind": "affine", "step_s": 0.01, "sequence_s": 1e-4},
        "training": {"token_s": 1e-3, "step_s": 0.1},
        "weights": {"publish_s": 0.2, "transfer_s": 0.3, "pause_s": 0.05},
    },
}
FREE = ("hardware.training={ token_s = 0.0 }", "hardware.weights.publish_s=0")
SLOW = ("hardware.training.token_s=0.01",)


def run(*overrides: str) -> RunConfig:
    return parse_run(with_overrides(RUN, overrides))


def test_turns_go_first_come_first_served_and_another_job_pays_the_switch() -> None:
    """a trains from 0 to 3 and asks again at 3, behind b, which has asked at 1: b from 3 + 2 to 6, a from 6 + 2 on."""
    clock, begun = Clock(), []
    shared = SharedTrainer(clock, 2.0)

    def trains(job: str, seconds: float, then: str = "") -> None:
        begun.append((job, clock.now / TICKS_PER_S))

        def ends(_: Wake) -> None:
            if then:
                shared.ask(job, lambda: trains(then, 1.0))
            shared.release(job.split(maxsplit=1)[0])

        Wake(clock, round(seconds * TICKS_PER_S), CLUSTER_PRIORITY, 0, ends)

    shared.ask("a", lambda: trains("a", 3.0, then="a again"))
    Wake(clock, TICKS_PER_S, CLUSTER_PRIORITY, 0, lambda _: shared.ask("b", lambda: trains("b", 1.0)))
    clock.run()
    assert begun == [("a", 0.0), ("b", 5.0), ("a again", 8.0)]
    assert shared.num_switches == 2
    assert shared.waited_ticks == {"a": 5 * TICKS_PER_S, "b": 4 * TICKS_PER_S}


def test_a_job_beside_one_that_takes_no_time_is_as_it_is_alone() -> None:
    report = share({"own": run(), "other": run(*FREE)}, switch_s=0.0)
    own = report.jobs[0]
    assert own.together == own.alone
    assert own.waited_s == 0
    assert report.jobs[1].waited_s > 0  # it waits for the other


def test_jobs_that_always_train_get_half_each() -> None:
    """The trainer is the bottleneck of both: together they take as long as one after the other."""
    report = share({"a": run(*SLOW), "b": run(*SLOW, "seed=1")}, switch_s=0.0)
    alone_s = sum(job.alone.duration_s for job in report.jobs)
    assert max(job.together.duration_s for job in report.jobs) == pytest.approx(alone_s, rel=0.05)


def test_a_publication_that_comes_late_waits_for_the_accelerators() -> None:
    """Weights take longer to arrive than a batch to come: they are published while another job trains, or after it.

    ``SharedTrainer.release`` asserts that a job gives back its own turn.
    """
    slow_weights = "hardware.weights={ publish_s = 1.0, transfer_s = 6.0, pause_s = 0.1 }"
    report = share({"a": run(slow_weights), "b": run(*SLOW)}, switch_s=0.0)
    last_s = max(job.together.duration_s for job in report.jobs)
    busy_s = sum(job.together.seconds.training + job.together.seconds.publishing for job in report.jobs)
    assert busy_s <= last_s


@pytest.mark.parametrize("switch_s", [0.0, 3.0])
def test_the_shared_accelerators_are_with_one_job_at_a_time(switch_s: float) -> None:
    """What all do on them and all switches fit into the time; GPU-hours are engines until their ends, and these."""
    report = share({"a": run(), "b": run("seed=1"), "c": run(*SLOW)}, switch_s=switch_s)
    last_s = max(job.together.duration_s for job in report.jobs)
    busy_s = sum(job.together.seconds.training + job.together.seconds.publishing for job in report.jobs)
    assert busy_s + (report.switches - 3) * switch_s <= last_s
    assert report.switches > 20
    hours = (2 * sum(job.together.duration_s for job in report.jobs) + 2 * last_s) / 3600
    assert report.gpu_hours_together == pytest.approx(hours)
    assert report.gpu_hours_alone == pytest.approx(4 * sum(job.alone.duration_s for job in report.jobs) / 3600)
    assert [job.together.optimizer_steps for job in report.jobs] == [20] * 3


def test_the_same_jobs_give_the_same_numbers() -> None:
    jobs = {"a": run(), "b": run("seed=1", "scheduler.max_lag=2")}
    assert share(jobs, switch_s=1.0) == share(jobs, switch_s=1.0)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["cluster.accelerators=5"], "with equally many accelerators that train, got"),
        (["scheduler.kind=conventional", "cluster.accelerators=2"], "b: scheduler.kind must have two pools, got 'conv"),
        (["fleet={}"], "b: fleet must be left out of a job that shares accelerators"),
    ],
)
def test_jobs_that_cannot_share_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        share({"a": run(), "b": run(*overrides)}, switch_s=0.0)


def test_the_command_prints_what_sharing_saves(command: Command) -> None:
    quickstart = "examples/quickstart.toml"
    assert_fails(command("share", quickstart, "--json"), 2, "two at least")
    both = ("share", quickstart, quickstart, "--set", "optimizer_steps=5")
    assert [job["name"] for job in json.loads(command(*both, "--json").out)["jobs"]] == ["quickstart 1", "quickstart 2"]
    assert "GPU-hours" in command(*both).out
