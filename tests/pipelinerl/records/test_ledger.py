"""The books of a run: hand-written histories with hand-made sums, and identities on simulated runs."""

from __future__ import annotations

import json
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipelinerl.records.figure_data
from pipelinerl.config.run_file import parse_run
from pipelinerl.errors import RunFailedError
from pipelinerl.records.ledger import RunLedger
from pipelinerl.records.trace import Trace
from pipelinerl.scheduler.events import (
    NO_TOKENS,
    AbortRollout,
    DiscardReason,
    DiscardRollouts,
    Event,
    OnFull,
    OnStale,
    PublishWeights,
    RolloutAborted,
    RolloutFailed,
    RolloutFinished,
    RolloutPreempted,
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
from sim.cluster import SimulatedCluster
from sim.run import simulate


def spans(*pairs):
    """Spans of (version, end) pairs."""
    return VersionSpans(tuple(version for version, _ in pairs), tuple(end for _, end in pairs))


def start(rollout_id, engine=0, kept_tokens=0):
    return StartRollout(rollout_id, rollout_id, engine, kept_tokens)


def ended(rollout_id, *pairs, engine=0, reward=0.0):
    """A rollout finishes and is scored at once."""
    return RolloutFinished(rollout_id, engine, spans(*pairs)), RolloutScored(rollout_id, reward)


def books_of(history, *, num_engines=1, colocated=False, longest=10):
    """Keep the books of (time, event or command, ...) entries."""
    books = RunLedger(num_engines=num_engines, colocated=colocated, longest=longest)
    for time_s, *entries in history:
        for entry in entries:
            if isinstance(entry, get_args(Event)):
                books.event(time_s, entry)
            else:
                books.command(time_s, entry)
    return books


def keys(summary, table):
    """A table of the summary without its zeros."""
    return {key: value for key, value in summary[table].items() if value}


# ------------------------------------------------------------------------------------- a whole run

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


def test_every_key_of_the_summary_by_hand():
    """Lag of the 39 tokens, total = in flight + in queue.

    Step 1: 10 tokens of version 0 at 0. Step 2, at version 1: rollouts 2 and 3 have 12 tokens of version 0, lag
    1 + 0, and 6 of version 1, lag 0. Step 3, at version 2: rollout 4 ended under version 1: 3 tokens of version 0,
    1 + 1, and 4 of version 1, 0 + 1. Rollout 5 ended under version 2: 2 tokens of version 1, 1 + 0; 2 at 0.

        lag 0: 10 + 6 + 2 = 18    lag 1: 12 + 4 + 2 = 18    lag 2: 3        mean 24/39
        in flight: 12 + 3 + 2 = 17 tokens at 1              in queue: 3 + 4 = 7 tokens at 1

    Engine 0 is busy from 0 to 16 less 0.5 + 0.5, engine 1 from 0 to 13 less 0.25 and from 16 to 19: 30.75 of 38.
    """
    assert books_of(STORY, num_engines=2).summary().to_dict() == {
        "optimizer_steps": 3,
        "duration_s": 19.0,
        "samples_trained": 6,
        "tokens_trained": 39,
        "samples_per_s": 6 / 19,
        "tokens_per_s": 39 / 19,
        "lag": {
            "mean": 24 / 39,
            "p50": 1,
            "p95": 2,
            "p99": 2,
            "max": 2,
            "in_flight_mean": 17 / 39,
            "in_queue_mean": 7 / 39,
        },
        "rollouts": {
            "started": 7,
            "finished": 6,
            "trained": 6,
            "discarded": 0,
            "aborted": 0,
            "failed": 0,
            "unfinished": 1,
            "interruptions": 0,
            "preemptions": 0,
        },
        "tokens": {"generated": 42, "trained": 39, "discarded": 0, "aborted": 0, "failed": 0, "unfinished": 3},
        "discarded_by_reason": {"stale": 0, "no_signal": 0, "queue_full": 0, "sibling_failed": 0},
        "length": {"finished_mean": 6.5, "trained_mean": 6.5},
        "utilisation": {"generation": 30.75 / 38, "training": 7 / 19},
        "seconds": {"generating": 0.0, "training": 7.0, "publishing": 2.0, "waiting_for_data": 10.0},
        "bottleneck": "generation",
        "complete": True,
    }


def test_every_column_of_the_steps_by_hand():
    """Step 2 begins at 8: 1 s publishing, 2 s training, 3 s of waiting. Step 3: 14 to 19."""
    columns = list(zip(*([value for _, value in row] for row in rows_of(STORY)), strict=True))
    assert columns == [
        (1, 2, 3),  # step
        (8.0, 14.0, 19.0),  # time_s
        (2.0, 2.0, 3.0),  # train_s
        (0.0, 1.0, 1.0),  # publish_s
        (6.0, 3.0, 1.0),  # wait_s
        (2, 2, 2),  # samples
        (10, 18, 11),  # tokens
        (0.0, 12 / 18, 12 / 11),  # lag_mean
        (0, 1, 2),  # lag_max
        (0.0, 12 / 18, 5 / 11),  # lag_in_flight_mean
        (0.0, 0.0, 7 / 11),  # lag_in_queue_mean
        (3, 1, 1),  # in_progress
        (0, 1, 0),  # ready
        (0.5, 1.0, 0.0),  # reward_mean
        (5.0, 9.0, 5.5),  # length_mean
    ]


def rows_of(history):
    return books_of(history, num_engines=2).steps


def test_a_step_is_told_as_soon_as_it_is_done():
    told = []
    books = RunLedger(num_engines=2, colocated=False, longest=10, on_step=lambda row: told.append(row.time_s))
    for time_s, *entries in STORY[:10]:
        for entry in entries:
            (books.event if isinstance(entry, get_args(Event)) else books.command)(time_s, entry)
    assert told == [8.0, 14.0]


def test_every_key_of_the_profile_by_hand():
    """Positions 0 to 9 in bins of one token: all six answers reach position 3, three position 6, one position 9.

    Version-0 tokens 0..3 of rollouts 2 and 3 and 4..7 of 2 are at lag 1; rollout 4 is at 2, 2, 2, 1, 1, 1, 1,
    rollout 5 at 1, 1, 0, 0. So position 0: (0 + 0 + 1 + 1 + 2 + 1)/6, position 3: (0 + 0 + 1 + 1 + 1 + 0)/6.
    """
    profile = books_of(STORY, num_engines=2).figure_data().to_dict()
    assert profile["lag_histogram"] == {"total": [18, 18, 3], "in_flight": [22, 17], "in_queue": [32, 7]}
    assert profile["lag_by_position"] == {
        "width_tokens": 1,
        "lag_mean": [5 / 6, 5 / 6, 4 / 6, 3 / 6, 2 / 4, 2 / 4, 2 / 3, 1 / 2, 0.0, 0.0],
        "tokens": [6, 6, 6, 6, 4, 4, 3, 2, 1, 1],
    }
    assert profile["timeline"] == {
        "until_s": 19.0,
        "trainer": [
            [6.0, 8.0, "training"],
            [8.0, 9.0, "publishing"],
            [12.0, 14.0, "training"],
            [14.0, 15.0, "publishing"],
            [16.0, 19.0, "training"],
        ],
        "engines": [
            {
                "engine": 0,
                "time_s": [0.0, 4.0, 10.0, 12.0, 16.0],
                "in_progress": [2, 2, 1, 1, 0],
                "paused": [[9.0, 9.5], [15.5, 16.0]],
            },
            {
                "engine": 1,
                "time_s": [0.0, 6.0, 13.0, 16.0, 19.0],
                "in_progress": [1, 1, 0, 1, 0],
                "paused": [[9.25, 9.5]],
            },
        ],
        "updates": [
            {"version": 1, "published_s": 8.0, "loaded_s": 9.5},
            {"version": 2, "published_s": 14.0, "loaded_s": 16.0},
        ],
    }


def test_the_generation_window_spreads_tokens_over_the_time_of_their_rollout():
    """Six ends are not three times three starts, so the window is the whole run: 200 bins of 0.095 s.

    At 5 s rollouts 1, 2 and 3 are in progress, at 6/6, 10/10 and 8/8 tokens per second. At 18 s only rollout 6 is,
    at 3/3. In all there are 4 + 6 + 10 + 8 + 7 + 4 + 3 rollout seconds.
    """
    window = books_of(STORY, num_engines=2).figure_data().to_dict()["generation_window"]
    assert window["start_s"] == 0.0
    assert window["width_s"] == pytest.approx(0.095)
    at = {second: int(second / 0.095) for second in (5, 18)}
    assert [window["in_progress"][at[second]] for second in (5, 18)] == pytest.approx([3.0, 1.0])
    assert [window["tokens_per_s"][at[second]] for second in (5, 18)] == pytest.approx([3.0, 1.0])
    assert sum(window["in_progress"]) * 0.095 == pytest.approx(42.0)
    assert sum(window["tokens_per_s"]) * 0.095 == pytest.approx(42.0)


# ------------------------------------------------------------------------------------ how rollouts end


FIRST_STEP = [
    (0.0, start(9)),
    (1.0, *ended(9, (0, 1)), StartTraining((9,), 0, True)),
    (2.0, TrainingFinished(1, 1.0), PublishWeights(1, WeightUpdate.ABORT)),
]
"""A step of one rollout with one token."""


def test_an_aborting_update_interrupts_and_the_tokens_kept_count_once():
    """Rollout 0: 3 tokens, interrupted, 3 + 5 in the end. Rollout 1: 2 tokens, interrupted, 2 + 1, and no more.

    Rollout 0 is trained on; with the 1 token of the first step that makes 9.
    """
    books = books_of(
        [
            (0.0, start(0), start(1)),
            *FIRST_STEP,
            (2.5, RolloutPreempted(0, 0, 3)),
            (3.0, RolloutAborted(0, 0, spans((0, 3))), start(0, 0, 3)),
            (3.0, RolloutAborted(1, 0, spans((0, 2))), start(1, 0, 2), WeightsLoaded(0, 1, 0.0)),
            (5.0, *ended(0, (0, 3), (1, 8)), StartTraining((0,), 1, True)),
            (6.0, TrainingFinished(2, 1.0), Stop(StopReason.DONE), RolloutAborted(1, 0, spans((0, 2), (1, 3)))),
        ]
    )
    summary = books.summary().to_dict()
    assert keys(summary, "rollouts") == {
        "started": 3,
        "finished": 2,
        "trained": 2,
        "unfinished": 1,
        "interruptions": 2,
        "preemptions": 1,
    }
    assert keys(summary, "tokens") == {"generated": 12, "trained": 9, "unfinished": 3}
    assert summary["length"] == {"finished_mean": 4.5, "trained_mean": 4.5}
    assert summary["lag"]["mean"] == 3 / 9


def test_an_interrupted_rollout_that_is_discarded_was_aborted():
    """It never finished, so it counts for no reason of discarding; its finished sibling (4 tokens) does."""
    summary = (
        books_of(
            [
                (0.0, start(0), start(1), start(2)),
                (
                    4.0,
                    *ended(0, (0, 4)),
                    RolloutAborted(1, 0, spans((0, 3))),
                    DiscardRollouts((0, 1), DiscardReason.STALE),
                ),
            ]
        )
        .summary()
        .to_dict()
    )
    assert keys(summary, "rollouts") == {"started": 3, "finished": 1, "discarded": 1, "aborted": 1, "unfinished": 1}
    assert keys(summary, "tokens") == {"generated": 7, "discarded": 4, "aborted": 3}
    assert keys(summary, "discarded_by_reason") == {"stale": 1}


@pytest.mark.parametrize("reason", DiscardReason)
def test_a_discard_counts_under_its_reason(reason):
    summary = (
        books_of(
            [(0.0, start(0), start(1)), (1.0, *ended(0, (0, 1)), *ended(1, (0, 5)), DiscardRollouts((1,), reason))]
        )
        .summary()
        .to_dict()
    )
    assert keys(summary, "discarded_by_reason") == {reason.value: 1}
    assert keys(summary, "tokens") == {"generated": 6, "discarded": 5, "unfinished": 1}


def test_an_abort_on_command_is_an_end_and_one_that_came_too_late_is_none():
    """Rollout 0 is aborted with 2 tokens; rollout 1 finishes first, then is discarded; 2 is unfinished at the stop."""
    summary = (
        books_of(
            [
                (0.0, start(0), start(1), start(2)),
                (2.0, AbortRollout(0, 0), AbortRollout(1, 0), AbortRollout(2, 0)),
                (
                    2.5,
                    RolloutAborted(0, 0, spans((0, 2))),
                    *ended(1, (0, 3)),
                    DiscardRollouts((1,), DiscardReason.STALE),
                ),
                (3.0, Stop(StopReason.STALLED), RolloutAborted(2, 0, spans((0, 4)))),
            ]
        )
        .summary()
        .to_dict()
    )
    assert keys(summary, "rollouts") == {
        "started": 3,
        "finished": 1,
        "discarded": 1,
        "aborted": 1,
        "unfinished": 1,
    }
    assert keys(summary, "tokens") == {"generated": 9, "discarded": 3, "aborted": 2, "unfinished": 4}
    assert summary["complete"] is False


def test_the_books_do_not_grow_with_the_rollouts_that_have_ended(monkeypatch):
    """Each round one rollout is trained on, one aborted, one aborted too late, one failed, one discarded."""
    monkeypatch.setattr(pipelinerl.records.figure_data, "WINDOW_ROLLOUTS", 5)

    def kept(num_rounds):
        history = []
        for n in range(num_rounds):
            trained, aborted, late, failed, unwanted = range(5 * n, 5 * n + 5)
            history.append((n + 0.1, *(start(k) for k in range(5 * n, 5 * n + 5))))
            history.append((n + 0.2, AbortRollout(aborted, 0), AbortRollout(late, 0)))
            history.append((n + 0.3, RolloutAborted(aborted, 0, NO_TOKENS), RolloutFailed(failed, 0)))
            history.append((n + 0.4, *(entry for k in (trained, late, unwanted) for entry in ended(k, (0, 1)))))
            history.append((n + 0.5, DiscardRollouts((late, unwanted), DiscardReason.STALE)))
            history.append((n + 0.6, StartTraining((trained,), n, True), TrainingFinished(n + 1, 0.0)))
        books = books_of(history)
        assert books.summary().to_dict()["rollouts"]["unfinished"] == 0
        parts = (getattr(books, name) for name in RunLedger.__slots__)
        return sum(len(one) for one in parts if isinstance(one, dict | set))

    assert kept(3) == kept(30)


def test_a_reward_that_comes_with_the_end_is_booked_as_one_that_follows():
    """A step of two rollouts, scored one way and the other: the same books."""

    def finished(*scored):
        return [
            (0.0, start(0), start(1)),
            (1.0, *scored, StartTraining((0, 1), 0, True)),
            (2.0, TrainingFinished(1, 1.0), Stop(StopReason.DONE)),
        ]

    at_once = [RolloutFinished(n, 0, spans((0, 3 + n)), 0.25 + n) for n in range(2)]
    apart = [event for n in range(2) for event in ended(n, (0, 3 + n), reward=0.25 + n)]
    books = [books_of(finished(*scored)) for scored in (at_once, apart)]
    assert books[0].steps == books[1].steps
    assert books[0].steps[0].reward_mean == 0.75
    assert books[0].summary().to_dict() == books[1].summary().to_dict()


def test_a_failure_loses_the_tokens_that_are_known():
    """Rollout 0 fails in generation (unknown tokens), 1 in scoring (6); 2 of the same group is aborted (1 token)."""
    summary = (
        books_of(
            [
                (0.0, start(0), start(1), start(2), start(3)),
                (5.0, RolloutFinished(1, 0, spans((0, 6)))),
                (6.0, RolloutFailed(0, 0), RolloutFailed(1), AbortRollout(2, 0)),
                (7.0, RolloutAborted(2, 0, spans((0, 1)))),
                (8.0, *ended(3, (0, 3)), DiscardRollouts((3,), DiscardReason.SIBLING_FAILED)),
            ]
        )
        .summary()
        .to_dict()
    )
    assert keys(summary, "rollouts") == {"started": 4, "finished": 2, "failed": 2, "aborted": 1, "discarded": 1}
    assert keys(summary, "tokens") == {"generated": 10, "failed": 6, "aborted": 1, "discarded": 3}
    assert keys(summary, "discarded_by_reason") == {"sibling_failed": 1}
    assert summary["length"]["finished_mean"] == 4.5


def test_a_rollout_without_a_token_ends_like_any_other():
    summary = (
        books_of([(0.0, start(0), start(1)), (1.0, AbortRollout(0, 0)), (2.0, RolloutAborted(0, 0, NO_TOKENS))])
        .summary()
        .to_dict()
    )
    assert keys(summary, "rollouts") == {"started": 2, "aborted": 1, "unfinished": 1}
    assert keys(summary, "tokens") == {}


# ------------------------------------------------------------------------------------ the trainer's time


MICRO_BATCHES = [
    (0.0, start(0), start(1)),
    (2.0, *ended(0, (0, 2), reward=1.0), StartTraining((0,), 0, False)),
    (3.0, TrainingFinished(0, 1.0)),
    (4.0, *ended(1, (0, 4)), StartTraining((1,), 0, True), start(2)),
    (6.0, TrainingFinished(1, 2.0)),
]


def test_micro_batches_make_one_step():
    """1 s + 2 s of training in 6 s, 2 s and 1 s of waiting; 2 + 4 tokens."""
    books = books_of(MICRO_BATCHES)
    [row] = books.steps
    assert (row.samples, row.tokens, row.train_s, row.wait_s, row.reward_mean) == (2, 6, 3.0, 3.0, 0.5)
    assert books.summary().to_dict()["tokens_trained"] == 6


def test_a_micro_batch_without_its_step_is_not_trained():
    """Rollout 2 (5 tokens of version 0) was given to the trainer at version 1; the run ends before the step does."""
    cut = books_of(
        [*MICRO_BATCHES, (7.0, *ended(2, (0, 5)), StartTraining((2,), 1, False)), (9.0, TrainingFinished(1, 2.0))]
    )
    summary, profile = cut.summary().to_dict(), cut.figure_data().to_dict()
    assert keys(summary, "tokens") == {"generated": 11, "trained": 6, "unfinished": 5}
    assert keys(summary, "rollouts") == {"started": 3, "finished": 3, "trained": 2, "unfinished": 1}
    assert summary["lag"]["max"] == 0
    assert profile["lag_histogram"]["total"] == [6]
    assert sum(profile["lag_by_position"]["tokens"]) == 6
    assert summary["seconds"]["training"] == 5.0


def test_colocated_accelerators_generate_when_they_do_not_train_or_publish():
    """0 to 6 generation, 6 to 9 training, 9 to 10 publishing, 10 to 12 generation; nobody waits for data."""
    summary = (
        books_of(
            [
                (0.0, start(0)),
                (6.0, *ended(0, (0, 6)), StartTraining((0,), 0, True)),
                (9.0, TrainingFinished(1, 3.0), PublishWeights(1, WeightUpdate.KEEP)),
                (10.0, WeightsPublished(1, 1.0), WeightsLoaded(0, 1, 1.0), start(1)),
                (12.0, *ended(1, (1, 2))),
            ],
            colocated=True,
        )
        .summary()
        .to_dict()
    )
    assert summary["seconds"] == {"generating": 8.0, "training": 3.0, "publishing": 1.0, "waiting_for_data": 0.0}
    assert summary["utilisation"] == {"generation": 8 / 12, "training": 3 / 12}
    assert summary["bottleneck"] == "generation"


# ---------------------------------------------------------------------------------- bottleneck, lag, time


def one_step(*, waits_s, trains_s, num_ahead=0):
    """A step after a wait; so many rollouts besides the trained one have ended when it does."""
    ahead = [ended(1 + k, (0, 1)) for k in range(num_ahead)]
    return [
        (0.0, *(start(k) for k in range(num_ahead + 2))),
        (waits_s, *ended(0, (0, 1)), StartTraining((0,), 0, True), *(entry for pair in ahead for entry in pair)),
        (waits_s + trains_s, TrainingFinished(1, trains_s), Stop(StopReason.DONE)),
    ]


@pytest.mark.parametrize(
    ("history", "colocated", "bottleneck"),
    [
        (one_step(waits_s=6.0, trains_s=94.0), False, "generation"),
        (one_step(waits_s=6.0, trains_s=94.0, num_ahead=1), False, "generation"),
        (one_step(waits_s=4.0, trains_s=96.0), False, "balanced"),
        (one_step(waits_s=4.0, trains_s=96.0, num_ahead=1), False, "training"),
        (one_step(waits_s=53.0, trains_s=47.0), True, "generation"),
        (one_step(waits_s=52.0, trains_s=48.0), True, "balanced"),
        (one_step(waits_s=48.0, trains_s=52.0), True, "balanced"),
        (one_step(waits_s=47.0, trains_s=53.0), True, "training"),
        ([], False, "balanced"),
        ([], True, "balanced"),
    ],
)
def test_the_bottleneck_is_the_side_the_other_waits_for(history, colocated, bottleneck):
    """More than 5 % of waiting; else a whole batch ahead after most steps. Colocated: the longer phase by 5 %."""
    assert books_of(history, colocated=colocated).summary().to_dict()["bottleneck"] == bottleneck


@pytest.mark.parametrize(("oldest", "quantiles"), [(1, [0, 1, 2, 3]), (2, [1, 2, 3, 3])])
def test_quantiles_are_the_least_lags_that_reach_their_share(oldest, quantiles):
    """Of 100 tokens 50 have lag 0, 45 lag 1, 4 lag 2, 1 lag 3: 50, 95, 99, 100 % at or below.

    With one more at lag 3, 50, 95 and 99 of 101 are less than 50, 95 and 99 %.
    """
    num_tokens = [50, 45, 4, oldest]
    history = [(0.0, *(start(k) for k in range(4)))]
    history += [(1.0, *ended(k, (0, tokens))) for k, tokens in enumerate(num_tokens)]
    history += [(2.0 + k, StartTraining((k,), k, True), TrainingFinished(k + 1, 0.0)) for k in range(4)]
    lag = books_of(history, longest=50).summary().to_dict()["lag"]
    assert [lag[key] for key in ("p50", "p95", "p99", "max")] == quantiles
    assert lag["mean"] == lag["in_queue_mean"] == (45 + 2 * 4 + 3 * oldest) / sum(num_tokens)


def test_lag_by_position_has_at_most_64_bins_and_null_where_no_token_is():
    """130 positions: 44 bins of 3. Positions 0-3 at lag 1, 4-6 at lag 0; one more token at position 0, lag 0."""
    books = books_of(
        [
            (0.0, start(0)),
            *FIRST_STEP,
            (3.0, *ended(0, (0, 4), (1, 7)), StartTraining((0,), 1, True)),
            (4.0, TrainingFinished(2, 1.0)),
        ],
        longest=130,
    )
    assert books.figure_data().to_dict()["lag_by_position"] == {
        "width_tokens": 3,
        "lag_mean": [3 / 4, 1 / 3, 0.0, *[None] * 41],
        "tokens": [4, 3, 1, *[0] * 41],
    }


@pytest.mark.parametrize(
    ("history", "busy_s"),
    [
        pytest.param([(2.0, start(0)), (5.0, *ended(0, (0, 3)))], 3.0, id="while it has a rollout"),
        pytest.param(
            [(2.0, start(0)), (3.0, start(1)), (5.0, *ended(0, (0, 3))), (6.0, *ended(1, (0, 3)))], 4.0, id="or two"
        ),
        pytest.param([(2.0, start(0)), (6.0, WeightsLoaded(0, 1, 1.5))], 6.5, id="less a pause"),
        pytest.param([(2.0, start(0)), (6.0, WeightsLoaded(0, 1, 5.0))], 4.0, id="a pause longer than it was busy"),
        pytest.param([(6.0, WeightsLoaded(0, 1, 5.0)), (7.0, start(0))], 3.0, id="a pause while it is idle"),
        pytest.param(
            [(2.0, start(0)), (5.0, RolloutAborted(0, 0, NO_TOKENS), start(0)), (6.0, WeightsLoaded(0, 1, 1.0))],
            7.0,
            id="an aborting update",
        ),
        pytest.param([(2.0, start(0)), (3.0, RolloutFailed(0, 0)), (8.0, start(1))], 3.0, id="until it fails"),
    ],
)
def test_an_engine_is_busy_while_it_works_on_a_rollout(history, busy_s):
    """Ten seconds long each, so that busy seconds are tenths; the publication is only there to end the history."""
    books = books_of([*history, (10.0, WeightsPublished(1, 0.0))])
    assert books.summary().to_dict()["utilisation"]["generation"] == busy_s / 10


# ------------------------------------------------------------------------------- nothing, and cut short


@pytest.mark.parametrize("colocated", [False, True])
def test_an_empty_run_is_all_zeros(colocated):
    books = books_of([], colocated=colocated)
    summary, profile = books.summary().to_dict(), books.figure_data().to_dict()
    numbers = [
        value for table in summary.values() for value in (table.values() if isinstance(table, dict) else [table])
    ]
    assert [value for value in numbers if value not in {0, "balanced"}] == []
    assert profile["lag_histogram"] == {"total": [0], "in_flight": [0], "in_queue": [0]}
    assert profile["lag_by_position"]["lag_mean"] == [None] * 10
    assert profile["generation_window"]["tokens_per_s"] == [0.0] * 200
    assert profile["timeline"]["until_s"] == 0.0


def test_a_run_cut_short_counts_what_is_there():
    """At 5 s: rollout 0 trained on for 1 s of a 3 s step, so not yet trained; 1 in progress since 2 s."""
    summary = (
        books_of(
            [(0.0, start(0)), (2.0, start(1)), (4.0, *ended(0, (0, 4)), StartTraining((0,), 0, True)), (5.0, start(2))]
        )
        .summary()
        .to_dict()
    )
    assert keys(summary, "rollouts") == {"started": 3, "finished": 1, "unfinished": 3}
    assert keys(summary, "tokens") == {"generated": 4, "unfinished": 4}
    assert summary["utilisation"] == {"generation": 1.0, "training": 0.0}
    assert keys(summary, "seconds") == {"waiting_for_data": 5.0}
    assert (summary["optimizer_steps"], summary["complete"]) == (0, False)


# ------------------------------------------------------------------------------ windows of the profile


def in_rounds(*, rounds, slots=2):
    """Rollouts of one second each, one round after the other, each round a step."""
    history = [(0.0, *(start(k) for k in range(slots)))]
    for done in range(rounds):
        first = done * slots
        ids = tuple(range(first, first + slots))
        entries = [entry for k in ids for entry in (*ended(k, (done, 1)), start(k + slots))]
        history.append((done + 1.0, *entries, StartTraining(ids, done, True), TrainingFinished(done + 1, 0.0)))
    return history


def test_the_generation_window_ends_when_three_times_the_first_rollouts_have_ended():
    """Two slots: the sixth rollout ends at 3 s. Two rollouts and two tokens per second all the time."""
    window = books_of(in_rounds(rounds=9)).figure_data().to_dict()["generation_window"]
    assert window["width_s"] == 3.0 / 200
    assert window["in_progress"] == pytest.approx([2.0] * 200)
    assert window["tokens_per_s"] == pytest.approx([2.0] * 200)


def test_a_rollout_in_the_window_that_was_interrupted_counts_once_to_its_end():
    """Two rollouts of 4 tokens in 4 s, one interrupted at 2 s; the window is the whole run of 4 s."""
    history = [
        (0.0, start(0), start(1)),
        (2.0, RolloutAborted(0, 0, spans((0, 2))), start(0, 0, 2)),
        (4.0, *ended(0, (0, 4)), *ended(1, (0, 4)), StartTraining((0, 1), 0, True), TrainingFinished(1, 0.0)),
    ]
    window = books_of(history).figure_data().to_dict()["generation_window"]
    assert window["in_progress"] == pytest.approx([2.0] * 200)
    assert window["tokens_per_s"] == pytest.approx([2.0] * 200)


def test_an_interruption_is_no_end_for_the_window():
    """One slot; the third rollout ends at 8 s, the first was interrupted twice before."""
    again = [RolloutAborted(0, 0, NO_TOKENS), start(0)]
    history = [
        (0.0, start(0)),
        (1.0, *again),
        (2.0, *again),
        (4.0, *ended(0, (0, 4)), start(1)),
        (6.0, *ended(1, (0, 2)), start(2)),
        (8.0, *ended(2, (0, 2)), start(3)),
        (9.0, *ended(3, (0, 1)), StartTraining((0,), 0, True)),
        (10.0, TrainingFinished(1, 1.0)),
    ]
    assert books_of(history).figure_data().to_dict()["generation_window"]["width_s"] == 8.0 / 200


def test_the_window_of_a_colocated_run_is_its_first_generation_phase():
    history = [
        (0.0, start(0)),
        (4.0, *ended(0, (0, 4)), StartTraining((0,), 0, True)),
        (6.0, TrainingFinished(1, 2.0), PublishWeights(1, WeightUpdate.KEEP)),
        (7.0, WeightsPublished(1, 1.0), WeightsLoaded(0, 1, 1.0), start(1)),
        (9.0, *ended(1, (1, 2)), StartTraining((1,), 1, True)),
        (10.0, TrainingFinished(2, 1.0), PublishWeights(2, WeightUpdate.KEEP)),
        (11.0, WeightsPublished(2, 1.0), WeightsLoaded(0, 2, 1.0), start(2)),
        (12.0, *ended(2, (2, 1)), StartTraining((2,), 2, True)),
        (13.0, TrainingFinished(3, 1.0), Stop(StopReason.DONE)),
    ]
    profile = books_of(history, colocated=True).figure_data().to_dict()
    assert profile["generation_window"]["width_s"] == 4.0 / 200
    assert profile["timeline"]["until_s"] == 10.0  # the second publication
    assert profile["timeline"]["engines"][0]["time_s"] == [0.0, 4.0, 7.0, 9.0]


def test_the_timeline_is_the_first_twelve_steps():
    timeline = books_of(in_rounds(rounds=14)).figure_data().to_dict()["timeline"]
    assert timeline["until_s"] == 12.0
    assert len(timeline["trainer"]) == 12


def test_a_full_timeline_ends_where_its_points_do(monkeypatch):
    """The fifth point is at 12 s, while the trainer is at work from 6 s to 16 s: known until 12 s, and no further."""
    monkeypatch.setattr(pipelinerl.records.figure_data, "TIMELINE_POINTS", 5)
    history = [
        (0.0, start(0)),
        (2.0, *ended(0, (0, 2))),
        (4.0, start(1)),
        (6.0, StartTraining((0,), 0, True)),
        (8.0, *ended(1, (0, 4))),
        (12.0, start(2)),
        (14.0, start(3)),
        (16.0, TrainingFinished(1, 10.0)),
        (18.0, *ended(2, (0, 6)), StartTraining((1,), 1, True)),
        (19.0, TrainingFinished(2, 1.0), Stop(StopReason.DONE)),
    ]
    timeline = books_of(history).figure_data().to_dict()["timeline"]
    assert timeline["until_s"] == 12.0
    assert timeline["trainer"] == [[6.0, 12.0, "training"]]
    assert timeline["engines"][0]["time_s"] == [0.0, 2.0, 4.0, 8.0, 12.0]
    assert timeline["engines"][0]["in_progress"] == [1, 0, 1, 0, 1]


def test_a_full_window_ends_where_its_rollouts_do(monkeypatch):
    """Room for four rollouts: the fifth starts at 2 s, so the window is the first two rounds."""
    monkeypatch.setattr(pipelinerl.records.figure_data, "WINDOW_ROLLOUTS", 4)
    window = books_of(in_rounds(rounds=9)).figure_data().to_dict()["generation_window"]
    assert window["width_s"] == 2.0 / 200
    assert window["in_progress"] == pytest.approx([2.0] * 200)


# ------------------------------------------------------------------------------ identities on simulated runs


@st.composite
def runs(draw):
    """Small runs of all kinds."""
    conventional = draw(st.booleans())
    group_size = draw(st.sampled_from([1, 2, 4]))
    batch = group_size * draw(st.integers(1, 4))
    scheduler = {
        "kind": "conventional" if conventional else "pipeline",
        "train_batch_size": batch,
        "generation_batch_size": draw(st.integers(1, 8)),
        "optimizer_steps_per_rl_step": draw(st.integers(1, 4)),
        "micro_batch_size": draw(st.sampled_from([batch, group_size])),
        "weight_update": draw(st.sampled_from(list(WeightUpdate))).value,
        "filter_no_signal": draw(st.booleans()) and group_size > 1 and not conventional,
    }
    if not conventional:
        scheduler["on_full"] = draw(st.sampled_from(list(OnFull))).value
        scheduler["on_stale"] = draw(st.sampled_from(list(OnStale))).value
        max_lag = draw(st.none() | st.integers(0, 3))
        if max_lag is not None and (max_lag or scheduler["on_stale"] == "train"):
            scheduler["max_lag"] = max_lag
    return {
        "seed": draw(st.integers(0, 99)),
        "optimizer_steps": draw(st.integers(1, 12)),
        "cluster": {"accelerators": 4, "generation_accelerators": draw(st.integers(1, 3))},
        "scheduler": scheduler,
        "workload": {"group_size": group_size, "prompt_tokens": 5, "length": {"kind": "uniform", "max": 40}},
        "hardware": {
            "decode": {"kind": "affine", "step_s": 0.01, "context_token_s": draw(st.sampled_from([0.0, 1e-5]))},
            "prefill": {"token_s": 1e-4},
            "kv_cache_tokens": draw(st.sampled_from([None, 60])),
            "training": {"token_s": draw(st.sampled_from([0.0, 1e-3])), "step_s": draw(st.sampled_from([0.0, 0.1]))},
            "weights": {"publish_s": draw(st.sampled_from([0.0, 0.05])), "pause_s": draw(st.sampled_from([0.0, 0.2]))},
            "latency": {"reward_s": draw(st.sampled_from([0.0, 0.1])), "dispatch_jitter_s": 0.01},
        },
    }


class Kept(RunLedger):
    """Books that keep the entries as well, and stop the run after so many steps."""

    def __init__(self, tables, *, stop_after=None):
        self.config = parse_run(drop_none(tables))
        super().__init__(
            num_engines=self.config.num_engines,
            colocated=self.config.colocated,
            longest=self.config.workload.length.max,
            on_step=self.step_done,
        )
        self.entries = []
        self.stop_after = stop_after
        self.world = SimulatedCluster(self.config)
        try:
            self.world.run(self)
        except RunFailedError:
            assert stop_after is not None

    def step_done(self, row):
        if row.step == self.stop_after:
            self.world.interrupt()

    def event(self, time_s, event):
        self.entries.append((time_s, event))
        super().event(time_s, event)

    def command(self, time_s, command):
        self.entries.append((time_s, command))
        super().command(time_s, command)


def drop_none(tables):
    return {
        key: drop_none(value) if isinstance(value, dict) else value
        for key, value in tables.items()
        if value is not None
    }


ENDS = ("trained", "discarded", "aborted", "failed", "unfinished")


def check_identities(books):
    """What holds for every run, whole or cut short."""
    summary, profile, rows = books.summary().to_dict(), books.figure_data().to_dict(), books.steps
    lag, tokens, rollouts = summary["lag"], summary["tokens"], summary["rollouts"]
    assert rollouts["started"] == sum(rollouts[end] for end in ENDS)
    assert tokens["generated"] == sum(tokens[end] for end in ENDS)
    assert min(*rollouts.values(), *tokens.values()) >= 0
    assert sum(summary["discarded_by_reason"].values()) == rollouts["discarded"]
    assert sum(summary["seconds"].values()) == pytest.approx(summary["duration_s"])
    assert lag["mean"] == pytest.approx(lag["in_flight_mean"] + lag["in_queue_mean"])
    for name, part in profile["lag_histogram"].items():
        assert sum(part) == tokens["trained"]
        mean = sum(steps * count for steps, count in enumerate(part)) / max(1, tokens["trained"])
        assert mean == pytest.approx(lag["mean" if name == "total" else f"{name}_mean"])
    assert sum(profile["lag_by_position"]["tokens"]) == tokens["trained"]
    pairs = zip(profile["lag_by_position"]["lag_mean"], profile["lag_by_position"]["tokens"], strict=True)
    assert sum((mean or 0.0) * count for mean, count in pairs) == pytest.approx(lag["mean"] * tokens["trained"])
    assert 0 <= summary["utilisation"]["generation"] <= 1 + 1e-9
    assert 0 <= summary["utilisation"]["training"] <= 1 + 1e-9
    assert [row.step for row in rows] == list(range(1, summary["optimizer_steps"] + 1))
    assert sum(row.tokens for row in rows) == tokens["trained"]
    assert sum(row.samples for row in rows) == rollouts["trained"]
    assert sum(row.tokens * row.lag_mean for row in rows) == pytest.approx(lag["mean"] * tokens["trained"])
    assert max((row.lag_max for row in rows), default=0) == lag["max"]
    assert all(row.lag_mean == pytest.approx(row.lag_in_flight_mean + row.lag_in_queue_mean) for row in rows)


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=100)
@given(tables=runs())
def test_the_books_of_a_run_balance(tables):
    books = Kept(tables)
    check_identities(books)
    summary, rows = books.summary().to_dict(), books.steps
    assert summary["complete"]
    assert summary["rollouts"]["trained"] == summary["optimizer_steps"] * books.config.scheduler.train_batch_size
    assert rows[-1].time_s == summary["duration_s"]
    assert sum(row.train_s for row in rows) == pytest.approx(summary["seconds"]["training"])
    assert sum(row.publish_s for row in rows) == pytest.approx(summary["seconds"]["publishing"])
    waited_s = summary["seconds"]["waiting_for_data"] + summary["seconds"]["generating"]
    assert sum(row.wait_s for row in rows) == pytest.approx(waited_s, abs=1e-9)


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=40)
@given(tables=runs(), stop_after=st.integers(1, 6))
def test_the_books_of_a_run_cut_short_balance(tables, stop_after):
    books = Kept({**tables, "optimizer_steps": 12}, stop_after=stop_after)
    check_identities(books)
    assert books.summary().to_dict()["optimizer_steps"] == stop_after
    assert not books.summary().to_dict()["complete"]


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=40)
@given(tables=runs())
def test_the_sums_are_those_of_the_single_rollouts(tables):
    """Every token by hand: its lag from its span, its trainer version from the events before."""
    books = Kept(tables)
    version, generated, finished, trained = 0, {}, {}, []
    for _, entry in books.entries:
        match entry:
            case RolloutFinished():
                generated[entry.rollout_id] = entry.spans.num_tokens
                finished[entry.rollout_id] = (entry.spans, version)
            case RolloutAborted():
                generated[entry.rollout_id] = entry.spans.num_tokens
            case TrainingFinished():
                version = entry.version
            case StartTraining():
                for rollout_id in entry.rollout_ids:
                    answer, version_then = finished[rollout_id]
                    for span, token_version in enumerate(answer.versions):
                        num_tokens = answer.ends[span] - (answer.ends[span - 1] if span else 0)
                        trained += [(entry.version - token_version, entry.version - version_then)] * num_tokens
    summary = books.summary().to_dict()
    assert summary["tokens"]["generated"] == sum(generated.values())
    assert summary["tokens"]["trained"] == len(trained)
    assert summary["lag"]["max"] == max(lag for lag, _ in trained)
    assert summary["lag"]["mean"] == pytest.approx(sum(lag for lag, _ in trained) / len(trained))
    assert summary["lag"]["in_queue_mean"] == pytest.approx(sum(queue for _, queue in trained) / len(trained))
    assert summary["lag"]["p95"] == sorted(lag for lag, _ in trained)[-(-95 * len(trained) // 100) - 1]


@pytest.mark.parametrize("kind", ["pipeline", "conventional"])
@pytest.mark.parametrize("weight_update", WeightUpdate)
def test_the_books_of_a_written_trace_are_those_of_the_run(tmp_path, kind, weight_update):
    config = parse_run(
        {
            "optimizer_steps": 15,
            "cluster": {"accelerators": 4, "generation_accelerators": 2},
            "scheduler": {
                "kind": kind,
                "train_batch_size": 8,
                "generation_batch_size": 5,
                "optimizer_steps_per_rl_step": 3,
                "weight_update": weight_update.value,
            },
            "workload": {"group_size": 2, "prompt_tokens": 5, "length": {"kind": "uniform", "max": 40}},
            "hardware": {
                "decode": {"kind": "affine", "step_s": 0.01},
                "prefill": {"token_s": 1e-4},
                "training": {"token_s": 1e-3},
                "weights": {"publish_s": 0.02, "pause_s": 0.03},
                "latency": {"dispatch_jitter_s": 0.01},
            },
        }
    )
    report = simulate(config, out=tmp_path / "run", trace=True)
    books = RunLedger(num_engines=config.num_engines, colocated=config.colocated, longest=40)
    for record in Trace(tmp_path / "run" / "trace.jsonl.gz").records():
        if record.event is not None:
            books.event(record.time_s, record.event)
        else:
            books.command(record.time_s, record.command)
    recomputed = books.summary().to_dict()
    assert recomputed == {key: value for key, value in report.to_dict().items() if key in recomputed}
    assert books.figure_data().to_dict() == json.loads((tmp_path / "run" / "profile.json").read_text())
