"""Rollouts that are given up without an optimizer step: one warning, and the line of a run that has stalled."""

import re

import pytest
from scheduler_events import done, failed, finished, make, report, started, trained

from pipelinerl.config.run import SchedulerConfig
from pipelinerl.scheduler.events import DiscardReason, OnFull, OnStale, Stop, StopReason
from pipelinerl.scheduler.kinds import StallWatch, stalled


def test_the_limit_is_a_thousand_batches_unless_it_is_given():
    settings = {"train_batch_size": 6, "generation_batch_size": 4}
    assert SchedulerConfig(**settings).stall_limit == 6000
    assert SchedulerConfig(**settings, discard_limit=7).stall_limit == 7


def test_a_step_that_ends_after_the_run_has_stalled_leaves_the_cause():
    """Rollouts 0 and 1 are being trained on when 2 and 3 fail; nothing is decided after the stop."""
    scheduler = started(discard_limit=1)
    commands = report(scheduler, *done(0, 1), failed(2), failed(3))
    assert commands[-1] == Stop(StopReason.STALLED)
    assert report(scheduler, failed(4), finished(5, 0), trained(1)) == []
    assert scheduler.version == 1
    assert str(stalled(scheduler)).endswith(": a rollout of the group fails; mend train.task, or raise its time-outs")


def fail(scheduler, number, watch=None):
    """Fail so many rollouts, one a second."""
    for second in range(number):
        report(scheduler, failed(second))
        if watch is not None:
            watch.look(float(second), scheduler)


@pytest.mark.parametrize(("batch", "many"), [(2, 4000), (500, 5000)])
def test_many_rollouts_without_a_step_are_said_once_with_rate_cause_and_key(batch, many):
    """One is given up at second 0, and one each second after: more than ``many`` at second ``many``."""
    lines = []
    scheduler, watch = started(train_batch_size=batch, discard_limit=10**6), StallWatch(lines.append)
    fail(scheduler, many, watch)
    assert lines == []
    report(scheduler, failed(many))
    watch.look(float(many), scheduler)
    assert lines == [
        f"{many + 1:,} rollouts given up without an optimizer step, 1.0 per second: "
        "a rollout of the group fails; mend train.task, or raise its time-outs"
    ]


def test_after_a_resume_the_rate_is_of_the_seconds_since():
    """The scheduler goes on with its 4000, the new watch sees one each second."""
    lines = []
    scheduler, watch = started(discard_limit=10**6), StallWatch(lines.append)
    fail(scheduler, 4000)
    for second in (4000, 4001):
        report(scheduler, failed(second))
        watch.look(float(second), scheduler)
    (line,) = lines
    assert line.startswith("4,002 rollouts given up without an optimizer step, 1.0 per second: ")


def test_an_optimizer_step_begins_a_new_count():
    scheduler = started(train_batch_size=1, optimizer_steps=2)
    report(scheduler, failed(0), failed(1))
    assert scheduler.given_up == {DiscardReason.SIBLING_FAILED: 2}
    report(scheduler, *done(2), trained(1))
    assert not scheduler.given_up


@pytest.mark.parametrize(
    ("settings", "events", "says"),
    [
        (
            {"filter_no_signal": True, "group_size": 2},
            done(0, 1),
            "rewards of a group are equal; change the task or .*",
        ),
        ({}, [failed(0), failed(1)], "a rollout of the group fails; mend train.task, .*"),
        (
            {"on_full": OnFull.DROP_OLDEST, "ready_queue_size": 2, "micro_batch_size": 2},
            done(0, 1, 2, 3, 4, 5),
            "the ready queue is full; raise scheduler.ready_queue_size or change scheduler.on_full",
        ),
        (
            {"max_lag": 0, "on_stale": OnStale.REQUEUE},
            done(0, 1),
            "they break scheduler.max_lag; raise it, or set scheduler.on_stale = 'train'",
        ),
    ],
)
def test_a_stalled_run_names_what_most_rollouts_were_given_up_for(settings, events, says):
    scheduler = make(discard_limit=1, **settings)
    scheduler.start()
    report(scheduler, *events)
    assert scheduler.stopped is StopReason.STALLED
    limit = "stalled: more than scheduler.discard_limit = 1 rollouts were given up without an optimizer step in between"
    assert re.fullmatch(f"{limit}: {says}", str(stalled(scheduler)))
