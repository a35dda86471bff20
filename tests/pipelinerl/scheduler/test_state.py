"""The scheduler's state: impossible events leave it alone, and it does not grow."""

import pickle

import pytest
from scheduler_events import aborted, done, failed, finished, loaded, make, published, report, scored, started, trained

from pipelinerl.errors import SchedulerError
from pipelinerl.scheduler.events import (
    OnFull,
    OnStale,
    PublishWeights,
    RolloutPreempted,
    StartRollout,
    StartTraining,
    StepsRaised,
    WeightsLoaded,
    WeightUpdate,
)

# ------------------------------------------------------------------------------------ impossible events


TRAINING = done(0, 1)
PUBLISHING = [*TRAINING, trained(1)]
LOADED = [*PUBLISHING, published(1), loaded(1)]


@pytest.mark.parametrize(
    ("history", "event", "state"),
    [
        ([], finished(7, 0), "rollout 7 on engine 0: it is not there"),
        ([], finished(0, 0, engine=1), "rollout 0 on engine 1: it is not there"),
        ([], finished(0, 1), "tokens of versions 1 to 1: engines have had versions 0 to 0"),
        ([*LOADED, *done(2)], finished(6, 0, 1), "tokens of versions 0 to 1: engines have had versions 1 to 1"),
        ([], aborted(0, 1), "tokens of versions 1 to 1"),
        ([], scored(0), "rollout 0: it is not being scored"),
        ([], RolloutPreempted(7, 0, 1), "version 0"),
        ([], failed(7), "rollout 7 on engine 0: it is not there"),
        ([], failed(0, engine=None), "rollout 0: it is not being scored"),
        ([], trained(1), "version 0, trainer IDLE"),
        ([], StepsRaised(10), "version 0, trainer IDLE"),  # as many as there were
        (TRAINING, trained(0), "version 0, trainer TRAINING"),
        (PUBLISHING, published(2), "trainer PUBLISHING, published 1"),
        (PUBLISHING, loaded(2), "published 1, engines still loading 1"),
        (LOADED, loaded(1), "published 1, engines still loading 0"),
    ],
)
def test_an_impossible_event_is_refused_and_changes_nothing(history, event, state):
    """In these words; that every impossible event is refused is tested with the hostile driver."""
    scheduler = started()
    report(scheduler, *history)
    before = pickle.dumps(scheduler)
    with pytest.raises(SchedulerError, match=f"^cannot handle .*{state}"):
        scheduler.handle(event)
    assert pickle.dumps(scheduler) == before


# ---------------------------------------------------------------------------------------------- memory


def at_once(command, version):
    """What a driver reports that does everything at once; too fast for any abort."""
    match command:
        case StartRollout():
            return done(command.rollout_id, version=version, engine=command.engine)
        case StartTraining():
            return [trained(command.version + command.completes_step)]
        case PublishWeights():
            return [published(command.version), loaded(command.version, 0), loaded(command.version, 1)]
    return []


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_lag": 0, "generation_batch_size": 64},
        {"max_lag": 1, "on_stale": OnStale.REQUEUE},
        {"on_full": OnFull.DROP_OLDEST},
        {"kind": "conventional", "generation_batch_size": 64, "weight_update": WeightUpdate.WAIT},
    ],
    ids=str,
)
def test_the_scheduler_does_not_grow_with_the_length_of_the_run(settings):
    """It holds no more around step 2000 than around step 200, but for larger numbers (64 bytes pickled)."""
    scheduler = make(optimizer_steps=10**6, num_engines=2, **settings)
    commands, version, sizes = scheduler.start(), 0, {200: 0, 2000: 0}
    while scheduler.version < 2000:
        events = [event for command in commands for event in at_once(command, version)]
        commands = report(scheduler, *events)
        version = max([version, *(event.version for event in events if isinstance(event, WeightsLoaded))])
        for step, size in sizes.items():
            if step - 50 < scheduler.version <= step:
                sizes[step] = max(size, len(pickle.dumps(scheduler)))
    assert sizes[2000] <= sizes[200] + 64
