"""The ledger of a run: hand-written histories with hand-made sums."""

import pickle

import pytest
from ledger_histories import FIRST_STEP, STORY, ended, figures_of, keys, ledger_of, play_to, spans, start, summary_of

import pipelinerl.records.figure_data
import pipelinerl.records.ledger
from pipelinerl.records.ledger import RunLedger
from pipelinerl.scheduler.events import (
    NO_TOKENS,
    AbortRollout,
    DiscardReason,
    DiscardRollouts,
    EngineJoined,
    EngineLeaving,
    EngineLeft,
    PublishWeights,
    RolloutAborted,
    RolloutFailed,
    RolloutFinished,
    RolloutPreempted,
    StartTraining,
    Stop,
    StopReason,
    TrainingFinished,
    WeightsLoaded,
    WeightsPublished,
    WeightUpdate,
)


def test_every_key_of_the_summary_by_hand():
    """Lag of the 39 tokens, total = in flight + in queue.

    Step 1: 10 tokens of version 0 at 0. Step 2, at version 1: rollouts 2 and 3 have 12 tokens of version 0, lag
    1 + 0, and 6 of version 1, lag 0. Step 3, at version 2: rollout 4 ended under version 1: 3 tokens of version 0,
    1 + 1, and 4 of version 1, 0 + 1. Rollout 5 ended under version 2: 2 tokens of version 1, 1 + 0; 2 at 0.

        lag 0: 10 + 6 + 2 = 18    lag 1: 12 + 4 + 2 = 18    lag 2: 3        mean 24/39
        in flight: 12 + 3 + 2 = 17 tokens at 1              in queue: 3 + 4 = 7 tokens at 1

    Engine 0 is busy from 0 to 16 less 0.5 + 0.5, engine 1 from 0 to 13 less 0.25 and from 16 to 19: 30.75 of 38.
    """
    assert summary_of(STORY, num_engines=2) == {
        "optimizer_steps": 3, "duration_s": 19.0, "samples_trained": 6, "tokens_trained": 39, "samples_per_s": 6 / 19,
        "tokens_per_s": 39 / 19,
        "lag": {
            "mean": 24 / 39, "p50": 1, "p95": 2, "p99": 2, "max": 2, "in_flight_mean": 17 / 39, "in_queue_mean": 7 / 39,
        },
        "rollouts": {
            "started": 7, "finished": 6, "trained": 6, "discarded": 0, "aborted": 0, "failed": 0, "unfinished": 1,
            "interruptions": 0, "preemptions": 0,
        },
        "tokens": {"generated": 42, "trained": 39, "discarded": 0, "aborted": 0, "failed": 0, "unfinished": 3},
        "discarded_by_reason": {"stale": 0, "no_signal": 0, "queue_full": 0, "sibling_failed": 0},
        "length": {"finished_mean": 6.5, "trained_mean": 6.5},
        "utilisation": {"generation": 30.75 / 38, "training": 7 / 19},
        "seconds": {"generating": 0.0, "training": 7.0, "publishing": 2.0, "waiting_for_data": 10.0},
        "bottleneck": "generation", "complete": True,
    }  # fmt: skip


def test_every_column_of_the_steps_by_hand():
    """Step 2 begins at 8: 1 s publishing, 2 s training, 3 s of waiting. Step 3: 14 to 19."""
    rows = ledger_of(STORY, num_engines=2).steps
    columns = list(zip(*([value for _, value in row] for row in rows), strict=True))
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


def test_a_step_is_reported_as_soon_as_it_is_done():
    reported = []
    ledger = RunLedger(num_engines=2, colocated=False, longest=10, on_step=lambda row: reported.append(row.time_s))
    play_to(ledger, STORY[:10])
    assert reported == [8.0, 14.0]


def test_an_aborting_update_interrupts_and_the_tokens_kept_count_once():
    """Rollout 0: 3 tokens, interrupted, 3 + 5 in the end. Rollout 1: 2 tokens, interrupted, 2 + 1, and no more.

    Rollout 0 is trained on; with the 1 token of the first step that makes 9.
    """
    ledger = ledger_of(
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
    summary = ledger.summary().to_dict()
    assert keys(summary, "rollouts") == {
        "started": 3, "finished": 2, "trained": 2, "unfinished": 1, "interruptions": 2, "preemptions": 1,
    }  # fmt: skip
    assert keys(summary, "tokens") == {"generated": 12, "trained": 9, "unfinished": 3}
    assert summary["length"] == {"finished_mean": 4.5, "trained_mean": 4.5}
    assert summary["lag"]["mean"] == 3 / 9


ENDS = {
    # Rollout 1 never finished, so it counts for no reason of discarding; its finished sibling does.
    "an interrupted rollout that is discarded was aborted": (
        [
            (0.0, start(0), start(1), start(2)),
            (4.0, *ended(0, (0, 4)), RolloutAborted(1, 0, spans((0, 3))), DiscardRollouts((0, 1), DiscardReason.STALE)),
        ],
        {"started": 3, "finished": 1, "discarded": 1, "aborted": 1, "unfinished": 1},
        {"generated": 7, "discarded": 4, "aborted": 3},
        {"stale": 1},
        4.0,
    ),
    # Rollout 0 is aborted with 2 tokens; 1 finishes first, then is discarded; 2 is unfinished at the stop.
    "an abort on command is an end, one that comes too late is none": (
        [
            (0.0, start(0), start(1), start(2)),
            (2.0, AbortRollout(0, 0), AbortRollout(1, 0), AbortRollout(2, 0)),
            (2.5, RolloutAborted(0, 0, spans((0, 2))), *ended(1, (0, 3)), DiscardRollouts((1,), DiscardReason.STALE)),
            (3.0, Stop(StopReason.STALLED), RolloutAborted(2, 0, spans((0, 4)))),
        ],
        {"started": 3, "finished": 1, "discarded": 1, "aborted": 1, "unfinished": 1},
        {"generated": 9, "discarded": 3, "aborted": 2, "unfinished": 4},
        {"stale": 1},
        3.0,
    ),
    # Rollout 0 fails in generation (unknown tokens), 1 in scoring (6); 2 of the same group is aborted (1 token).
    "a failure loses the tokens that are known": (
        [
            (0.0, start(0), start(1), start(2), start(3)),
            (5.0, RolloutFinished(1, 0, spans((0, 6)))),
            (6.0, RolloutFailed(0, 0), RolloutFailed(1), AbortRollout(2, 0)),
            (7.0, RolloutAborted(2, 0, spans((0, 1)))),
            (8.0, *ended(3, (0, 3)), DiscardRollouts((3,), DiscardReason.SIBLING_FAILED)),
        ],
        {"started": 4, "finished": 2, "failed": 2, "aborted": 1, "discarded": 1},
        {"generated": 10, "failed": 6, "aborted": 1, "discarded": 3},
        {"sibling_failed": 1},
        4.5,
    ),
    "a rollout without a token ends like any other": (
        [(0.0, start(0), start(1)), (1.0, AbortRollout(0, 0)), (2.0, RolloutAborted(0, 0, NO_TOKENS))],
        {"started": 2, "aborted": 1, "unfinished": 1},
        {},
        {},
        0.0,
    ),
} | {
    f"discarded: {reason}": (
        [(0.0, start(0), start(1)), (1.0, *ended(0, (0, 1)), *ended(1, (0, 5)), DiscardRollouts((1,), reason))],
        {"started": 2, "finished": 2, "discarded": 1, "unfinished": 1},
        {"generated": 6, "discarded": 5, "unfinished": 1},
        {reason.value: 1},
        3.0,
    )
    for reason in DiscardReason
}
"""History; rollouts, tokens and discarded rollouts by reason, without zeros; mean length of finished rollouts."""


@pytest.mark.parametrize(("history", "rollouts", "tokens", "reasons", "finished_mean"), ENDS.values(), ids=ENDS)
def test_a_rollout_counts_once_by_how_it_ends(history, rollouts, tokens, reasons, finished_mean):
    summary = summary_of(history)
    assert keys(summary, "rollouts") == rollouts
    assert keys(summary, "tokens") == tokens
    assert keys(summary, "discarded_by_reason") == reasons
    assert summary["length"]["finished_mean"] == finished_mean
    assert summary["complete"] is False


def test_the_ledger_does_not_grow_with_the_rollouts_that_have_ended(monkeypatch):
    """Each round one rollout is trained on, one aborted, one aborted too late, one failed, one discarded.

    Pickled, without its rows, after the rounds that fill its figures: no more, but for larger numbers.
    """
    monkeypatch.setattr(pipelinerl.records.figure_data, "WINDOW_ROLLOUTS", 5)

    def kept(num_rounds):
        history = []
        for n in range(num_rounds):
            trained, aborted, late, failed, unwanted = range(5 * n, 5 * n + 5)
            history.append((n + 0.1, *(start(k) for k in range(5 * n, 5 * n + 5))))
            history.append((n + 0.2, AbortRollout(aborted, 0), AbortRollout(late, 0)))
            history.append((n + 0.3, RolloutAborted(aborted, 0, NO_TOKENS), RolloutFailed(failed, 0)))
            history.append((n + 0.4, *(entry for k in (trained, late, unwanted) for entry in ended(k, (n, 1)))))
            history.append((n + 0.5, DiscardRollouts((late, unwanted), DiscardReason.STALE)))
            history.append((n + 0.6, StartTraining((trained,), n, True), TrainingFinished(n + 1, 0.0)))
        ledger = ledger_of(history)
        assert ledger.summary().to_dict()["rollouts"]["unfinished"] == 0
        ledger.steps.clear()
        return len(pickle.dumps(ledger))

    assert kept(300) <= kept(20) + 64


def test_a_reward_that_comes_with_the_end_counts_as_one_that_follows():
    """A step of two rollouts, scored one way and the other: the same ledger."""

    def finished(*scored):
        return [
            (0.0, start(0), start(1)),
            (1.0, *scored, StartTraining((0, 1), 0, True)),
            (2.0, TrainingFinished(1, 1.0), Stop(StopReason.DONE)),
        ]

    at_once = [RolloutFinished(n, 0, spans((0, 3 + n)), 0.25 + n) for n in range(2)]
    apart = [event for n in range(2) for event in ended(n, (0, 3 + n), reward=0.25 + n)]
    one, other = (ledger_of(finished(*scored)) for scored in (at_once, apart))
    assert one.steps == other.steps
    assert one.steps[0].reward_mean == 0.75
    assert one.summary() == other.summary()


MICRO_BATCHES = [
    (0.0, start(0), start(1)),
    (2.0, *ended(0, (0, 2), reward=1.0), StartTraining((0,), 0, False)),
    (3.0, TrainingFinished(0, 1.0)),
    (4.0, *ended(1, (0, 4)), StartTraining((1,), 0, True), start(2)),
    (6.0, TrainingFinished(1, 2.0)),
]


def test_micro_batches_make_one_step():
    """1 s + 2 s of training in 6 s, 2 s and 1 s of waiting; 2 + 4 tokens."""
    ledger = ledger_of(MICRO_BATCHES)
    [row] = ledger.steps
    assert (row.samples, row.tokens, row.train_s, row.wait_s, row.reward_mean) == (2, 6, 3.0, 3.0, 0.5)
    assert ledger.summary().to_dict()["tokens_trained"] == 6


def test_a_micro_batch_without_its_step_is_not_trained():
    """Rollout 2 (5 tokens of version 0) was given to the trainer at version 1; the run ends before the step does."""
    cut = ledger_of(
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
    summary = summary_of(
        [
            (0.0, start(0)),
            (6.0, *ended(0, (0, 6)), StartTraining((0,), 0, True)),
            (9.0, TrainingFinished(1, 3.0), PublishWeights(1, WeightUpdate.KEEP)),
            (10.0, WeightsPublished(1, 1.0), WeightsLoaded(0, 1, 1.0), start(1)),
            (12.0, *ended(1, (1, 2))),
        ],
        colocated=True,
    )
    assert summary["seconds"] == {"generating": 8.0, "training": 3.0, "publishing": 1.0, "waiting_for_data": 0.0}
    assert summary["utilisation"] == {"generation": 8 / 12, "training": 3 / 12}
    assert summary["bottleneck"] == "generation"


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
    assert summary_of(history, colocated=colocated)["bottleneck"] == bottleneck


@pytest.mark.parametrize(("oldest", "quantiles"), [(1, [0, 1, 2, 3]), (2, [1, 2, 3, 3])])
def test_quantiles_are_the_least_lags_that_reach_their_share(oldest, quantiles):
    """Of 100 tokens 50 have lag 0, 45 lag 1, 4 lag 2, 1 lag 3: 50, 95, 99, 100 % at or below.

    With one more at lag 3, 50, 95 and 99 of 101 are less than 50, 95 and 99 %.
    """
    num_tokens = [50, 45, 4, oldest]
    history = [(0.0, *(start(k) for k in range(4)))]
    history += [(1.0, *ended(k, (0, tokens))) for k, tokens in enumerate(num_tokens)]
    history += [(2.0 + k, StartTraining((k,), k, True), TrainingFinished(k + 1, 0.0)) for k in range(4)]
    lag = summary_of(history, longest=50)["lag"]
    assert [lag[key] for key in ("p50", "p95", "p99", "max")] == quantiles
    assert lag["mean"] == lag["in_queue_mean"] == (45 + 2 * 4 + 3 * oldest) / sum(num_tokens)


BUSY = {
    "while it has a rollout": ([(2.0, start(0)), (5.0, *ended(0, (0, 3)))], 3.0),
    "or two": ([(2.0, start(0)), (3.0, start(1)), (5.0, *ended(0, (0, 3))), (6.0, *ended(1, (0, 3)))], 4.0),
    "less a pause": ([(2.0, start(0)), (6.0, WeightsLoaded(0, 1, 1.5))], 6.5),
    "a pause longer than it was busy": ([(2.0, start(0)), (6.0, WeightsLoaded(0, 1, 5.0))], 4.0),
    "a pause while it is idle": ([(6.0, WeightsLoaded(0, 1, 5.0)), (7.0, start(0))], 3.0),
    "an aborting update": (
        [(2.0, start(0)), (5.0, RolloutAborted(0, 0, NO_TOKENS), start(0)), (6.0, WeightsLoaded(0, 1, 1.0))],
        7.0,
    ),
    "until it fails": ([(2.0, start(0)), (3.0, RolloutFailed(0, 0)), (8.0, start(1))], 3.0),
}


@pytest.mark.parametrize(("history", "busy_s"), BUSY.values(), ids=BUSY)
def test_an_engine_is_busy_while_it_works_on_a_rollout(history, busy_s):
    """Ten seconds long each, so that busy seconds are tenths; the publication is only there to end the history."""
    ledger = ledger_of([*history, (10.0, WeightsPublished(1, 0.0))])
    assert ledger.summary().to_dict()["utilisation"]["generation"] == busy_s / 10


# ------------------------------------------------------------------------------------------ engines that come and go

LOSS = [
    (0.0, start(0, 0), start(1, 1)),
    (2.0, EngineLeaving(1)),
    (4.0, RolloutAborted(1, 1, spans((0, 3))), EngineLeft(1, 2)),
    (5.0, EngineJoined(2, 0), start(1, 2, 3)),
    (7.0, *ended(1, (0, 8), engine=2)),
    (10.0, WeightsPublished(1, 0.0)),
]
"""Engine 1 is leaving from 2 s to 4 s; engine 2 is there from 5 s on, and takes its rollout until 7 s."""


def test_an_engine_counts_while_it_is_there():
    """There: 10 + 4 + 5 engine-seconds. Busy: 10 + 4 + 2. Of the 8 tokens of rollout 1 another 2 were lost.

    One that is leaving takes no rollouts.
    """
    summary = summary_of(LOSS, num_engines=2)
    assert summary["utilisation"]["generation"] == 16 / 19
    assert summary["fleet"] == {
        "engines_mean": 1.9, "joined": 1, "left": 1, "moved": 1, "moved_tokens": 3, "lost_tokens": 2,
    }  # fmt: skip
    assert keys(summary, "tokens") == {"generated": 8, "unfinished": 8}
    assert figures_of(LOSS, num_engines=2)["fleet"] == {"time_s": [0.0, 2.0, 5.0, 10.0], "engines": [2, 1, 2, 2]}


def test_engines_that_all_stay_are_no_fleet():
    assert "fleet" not in summary_of(STORY, num_engines=2)
    assert "fleet" not in figures_of(STORY, num_engines=2)


@pytest.mark.parametrize(
    ("aborted", "moved"),
    [([AbortRollout(1, 1)], 0), ([Stop(StopReason.DONE)], 0), ([], 1)],
    ids=["cancelled", "at the end", "else"],
)
def test_a_rollout_moves_if_it_goes_on(aborted, moved):
    """Engines that do not count what they lose leave that open."""
    history = [*LOSS[:2], (3.0, *aborted), (4.0, RolloutAborted(1, 1, spans((0, 3))), EngineLeft(1))]
    fleet = ledger_of(history, num_engines=2).summary().fleet
    assert (fleet.moved, fleet.moved_tokens, fleet.lost_tokens) == (moved, 3 * moved, None)


def test_the_time_of_a_step_has_a_tail():
    """Steps of 8, 6 and 5 s: nine tenths of the way from 6 to 8."""
    fleet = ledger_of([(0.0, EngineJoined(2, 0)), *STORY], num_engines=2).summary().fleet
    assert fleet.step_s_p95 == pytest.approx(7.8)


@pytest.mark.parametrize("history", [LOSS[:2], LOSS[:3]], ids=["is leaving", "has left"])
def test_an_engine_that_is_leaving_at_the_end_takes_nothing_more(history):
    """Engine 1 of two, from 2 s on."""
    fleet = ledger_of(history, num_engines=2).figure_data().fleet
    assert (fleet.time_s[:2], fleet.engines) == ([0.0, 2.0], [2, 1, 1])


def test_engines_over_time_are_a_bounded_number_of_points(monkeypatch):
    """One engine joins each second: 1 + t after t seconds."""
    monkeypatch.setattr(pipelinerl.records.ledger, "MOST_POINTS", 8)
    history = [(float(second), EngineJoined(second, 0)) for second in range(1, 100)]
    fleet = ledger_of(history).figure_data().fleet
    assert len(fleet.time_s) <= 8
    assert fleet.engines == [1 + time_s for time_s in fleet.time_s]
    assert (fleet.time_s[0], fleet.time_s[-1]) == (0, 99)


@pytest.mark.parametrize("colocated", [False, True])
def test_an_empty_run_is_all_zeros(colocated):
    ledger = ledger_of([], colocated=colocated)
    summary, profile = ledger.summary().to_dict(), ledger.figure_data().to_dict()
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
    summary = summary_of(
        [(0.0, start(0)), (2.0, start(1)), (4.0, *ended(0, (0, 4)), StartTraining((0,), 0, True)), (5.0, start(2))]
    )
    assert keys(summary, "rollouts") == {"started": 3, "finished": 1, "unfinished": 3}
    assert keys(summary, "tokens") == {"generated": 4, "unfinished": 4}
    assert summary["utilisation"] == {"generation": 1.0, "training": 0.0}
    assert keys(summary, "seconds") == {"waiting_for_data": 5.0}
    assert (summary["optimizer_steps"], summary["complete"]) == (0, False)
