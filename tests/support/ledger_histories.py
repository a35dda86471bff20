"""Hand-written histories of runs for the ledger, and the ledger of a history."""

from __future__ import annotations

from typing import get_args

from pipelinerl.records.ledger import RunLedger
from pipelinerl.records.trace import FanOut
from pipelinerl.scheduler.events import (
    Event,
    PublishWeights,
    RolloutAborted,
    RolloutFinished,
    RolloutScored,
    StartRollout,
    StartTraining,
    Stop,
    StopReason,
    TrainingFinished,
    VersionSpans,
    WeightsLoaded,
    WeightsPublished,
    WeightUpdate,
)


def spans(*pairs):
    """Spans of (version, end) pairs."""
    return VersionSpans(tuple(version for version, _ in pairs), tuple(end for _, end in pairs))


def start(rollout_id, engine=0, kept_tokens=0):
    return StartRollout(rollout_id, rollout_id, engine, kept_tokens)


def ended(rollout_id, *pairs, engine=0, reward=0.0):
    """A rollout finishes and is scored at once."""
    return RolloutFinished(rollout_id, engine, spans(*pairs)), RolloutScored(rollout_id, reward)


def ledger_of(history, *, num_engines=1, colocated=False, longest=10, environments=None):
    """Keep the ledger of (time, event or command, ...) entries."""
    ledger = RunLedger(num_engines=num_engines, colocated=colocated, longest=longest, environments=environments)
    play_to(FanOut(*filter(None, (ledger, ledger.turns))), history)
    return ledger


def play_to(recorder, history):
    """Pass (time, event or command, ...) entries to a recorder."""
    for time_s, *entries in history:
        for entry in entries:
            record = recorder.event if isinstance(entry, get_args(Event)) else recorder.command
            record(time_s, entry)


def summary_of(history, **settings):
    """The summary of a history, as plain values."""
    return ledger_of(history, **settings).summary().to_dict()


def figures_of(history, **settings):
    """The data of its figures, as plain values."""
    return ledger_of(history, **settings).figure_data().to_dict()


def keys(summary, table):
    """A table of the summary without its zeros."""
    return {key: value for key, value in summary[table].items() if value}


STORY = [
    (0.0, start(0, 0), start(1, 1), start(2, 0)),
    (4.0, *ended(0, (0, 4), engine=0, reward=1.0), start(3, 0)),
    (6.0, *ended(1, (0, 6), engine=1), StartTraining((0, 1), 0, True), start(4, 1)),
    (8.0, TrainingFinished(1, 2.0), PublishWeights(1, WeightUpdate.KEEP)),
    (9.0, WeightsPublished(1, 1.0)),
    (9.5, WeightsLoaded(0, 1, 0.5), WeightsLoaded(1, 1, 0.25)),
    (10.0, *ended(2, (0, 8), (1, 10), engine=0, reward=1.0)),
    (12.0, *ended(3, (0, 4), (1, 8), engine=0, reward=1.0), StartTraining((2, 3), 1, True), start(5, 0)),
    (13.0, *ended(4, (0, 3), (1, 7), engine=1)),
    (14.0, TrainingFinished(2, 2.0), PublishWeights(2, WeightUpdate.KEEP)),
    (15.0, WeightsPublished(2, 1.0)),
    (16.0, WeightsLoaded(0, 2, 0.5), *ended(5, (1, 2), (2, 4), engine=0), StartTraining((4, 5), 2, True), start(6, 1)),
    (19.0, TrainingFinished(3, 3.0), Stop(StopReason.DONE), RolloutAborted(6, 1, spans((1, 3)))),
]
"""Two engines, three steps of two rollouts; both engines load version 1 late, engine 1 never loads version 2."""


FIRST_STEP = [
    (0.0, start(9)),
    (1.0, *ended(9, (0, 1)), StartTraining((9,), 0, True)),
    (2.0, TrainingFinished(1, 1.0), PublishWeights(1, WeightUpdate.ABORT)),
]
"""A step of one rollout with one token."""


def in_rounds(*, rounds, slots=2):
    """Rollouts of one second each, one round after the other, each round a step."""
    history = [(0.0, *(start(k) for k in range(slots)))]
    for done in range(rounds):
        first = done * slots
        ids = tuple(range(first, first + slots))
        entries = [entry for k in ids for entry in (*ended(k, (done, 1)), start(k + slots))]
        history.append((done + 1.0, *entries, StartTraining(ids, done, True), TrainingFinished(done + 1, 0.0)))
    return history
