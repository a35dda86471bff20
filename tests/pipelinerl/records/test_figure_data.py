"""Data of figures: hand-written histories with hand-made positions, windows and timelines."""

import numpy as np
import pytest
from ledger_histories import FIRST_STEP, STORY, ended, figures_of, in_rounds, ledger_of, spans, start

import pipelinerl.records.figure_data
from pipelinerl.scheduler.events import (
    NO_TOKENS,
    DiscardReason,
    DiscardRollouts,
    ObservationReady,
    OpenEnvironment,
    PublishWeights,
    RolloutAborted,
    RolloutFailed,
    RolloutFinished,
    StartTraining,
    Stop,
    StopReason,
    TrainingFinished,
    TurnFinished,
    WeightsLoaded,
    WeightsPublished,
    WeightUpdate,
)


def test_every_key_of_the_profile_by_hand():
    """Positions 0 to 9 in bins of one token: all six answers reach position 3, three position 6, one position 9.

    Version-0 tokens 0..3 of rollouts 2 and 3 and 4..7 of 2 are at lag 1; rollout 4 is at 2, 2, 2, 1, 1, 1, 1,
    rollout 5 at 1, 1, 0, 0. So position 0: (0 + 0 + 1 + 1 + 2 + 1)/6, position 3: (0 + 0 + 1 + 1 + 1 + 0)/6.
    """
    profile = figures_of(STORY, num_engines=2)
    assert profile["lag_histogram"] == {"total": [18, 18, 3], "in_flight": [22, 17], "in_queue": [32, 7]}
    assert profile["lag_by_position"] == {
        "width_tokens": 1,
        "lag_mean": [5 / 6, 5 / 6, 4 / 6, 3 / 6, 2 / 4, 2 / 4, 2 / 3, 1 / 2, 0.0, 0.0],
        "tokens": [6, 6, 6, 6, 4, 4, 3, 2, 1, 1],
    }
    assert profile["timeline"] == {
        "until_s": 19.0,
        "trainer": [
            [6.0, 8.0, "training"], [8.0, 9.0, "publishing"], [12.0, 14.0, "training"], [14.0, 15.0, "publishing"],
            [16.0, 19.0, "training"],
        ],
        "engines": [
            {
                "engine": 0, "time_s": [0.0, 4.0, 10.0, 12.0, 16.0], "in_progress": [2, 2, 1, 1, 0],
                "paused": [[9.0, 9.5], [15.5, 16.0]],
            },
            {
                "engine": 1, "time_s": [0.0, 6.0, 13.0, 16.0, 19.0], "in_progress": [1, 1, 0, 1, 0],
                "paused": [[9.25, 9.5]],
            },
        ],
        "updates": [
            {"version": 1, "published_s": 8.0, "loaded_s": 9.5}, {"version": 2, "published_s": 14.0, "loaded_s": 16.0},
        ],
    }  # fmt: skip


def test_the_generation_window_spreads_tokens_over_the_time_of_their_rollout():
    """Six ends are not three times three starts, so the window is the whole run: 200 bins of 0.095 s.

    At 5 s rollouts 1, 2 and 3 are in progress, at 6/6, 10/10 and 8/8 tokens per second. At 18 s only rollout 6 is,
    at 3/3. In all there are 4 + 6 + 10 + 8 + 7 + 4 + 3 rollout seconds.
    """
    window = figures_of(STORY, num_engines=2)["generation_window"]
    assert window["start_s"] == 0.0
    assert window["width_s"] == pytest.approx(0.095)
    at = {second: int(second / 0.095) for second in (5, 18)}
    assert [window["in_progress"][at[second]] for second in (5, 18)] == pytest.approx([3.0, 1.0])
    assert [window["tokens_per_s"][at[second]] for second in (5, 18)] == pytest.approx([3.0, 1.0])
    assert sum(window["in_progress"]) * 0.095 == pytest.approx(42.0)
    assert sum(window["tokens_per_s"]) * 0.095 == pytest.approx(42.0)


def test_lag_by_position_has_at_most_64_bins_and_null_where_no_token_is():
    """130 positions: 44 bins of 3. Positions 0-3 at lag 1, 4-6 at lag 0; one more token at position 0, lag 0."""
    ledger = ledger_of(
        [
            (0.0, start(0)),
            *FIRST_STEP,
            (3.0, *ended(0, (0, 4), (1, 7)), StartTraining((0,), 1, True)),
            (4.0, TrainingFinished(2, 1.0)),
        ],
        longest=130,
    )
    assert ledger.figure_data().to_dict()["lag_by_position"] == {
        "width_tokens": 3,
        "lag_mean": [3 / 4, 1 / 3, 0.0, *[None] * 41],
        "tokens": [4, 3, 1, *[0] * 41],
    }


AGAIN = [RolloutAborted(0, 0, NO_TOKENS), start(0)]
WINDOWS = {
    # Two slots: the sixth rollout ends at 3 s.
    "until three times the first rollouts have ended": (in_rounds(rounds=9), 3.0, 2.0),
    # Two rollouts of 4 tokens in 4 s, one interrupted at 2 s; the window is the whole run.
    "an interrupted rollout counts once to its end": (
        [
            (0.0, start(0), start(1)),
            (2.0, RolloutAborted(0, 0, spans((0, 2))), start(0, 0, 2)),
            (4.0, *ended(0, (0, 4)), *ended(1, (0, 4)), StartTraining((0, 1), 0, True), TrainingFinished(1, 0.0)),
        ],
        4.0,
        2.0,
    ),
    # One slot; the third rollout ends at 8 s, the first was interrupted twice before.
    "an interruption is no end": (
        [
            (0.0, start(0)),
            (1.0, *AGAIN),
            (2.0, *AGAIN),
            (4.0, *ended(0, (0, 4)), start(1)),
            (6.0, *ended(1, (0, 2)), start(2)),
            (8.0, *ended(2, (0, 2)), start(3)),
            (9.0, *ended(3, (0, 1)), StartTraining((0,), 0, True)),
            (10.0, TrainingFinished(1, 1.0)),
        ],
        8.0,
        1.0,
    ),
}
"""History; end of the window; rollouts in progress and tokens per second all the time."""


@pytest.mark.parametrize(("history", "end_s", "level"), WINDOWS.values(), ids=WINDOWS)
def test_the_generation_window(history, end_s, level):
    check_window(figures_of(history)["generation_window"], end_s, level)


def check_window(window, end_s, level):
    assert window["width_s"] == end_s / 200
    assert window["in_progress"] == pytest.approx([level] * 200)
    assert window["tokens_per_s"] == pytest.approx([level] * 200)


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
    profile = figures_of(history, colocated=True)
    assert profile["generation_window"]["width_s"] == 4.0 / 200
    assert profile["timeline"]["until_s"] == 10.0  # the second publication
    assert profile["timeline"]["engines"][0]["time_s"] == [0.0, 4.0, 7.0, 9.0]


def test_the_timeline_is_the_first_twelve_steps():
    timeline = figures_of(in_rounds(rounds=14))["timeline"]
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
    timeline = figures_of(history)["timeline"]
    assert timeline["until_s"] == 12.0
    assert timeline["trainer"] == [[6.0, 12.0, "training"]]
    assert timeline["engines"][0]["time_s"] == [0.0, 2.0, 4.0, 8.0, 12.0]
    assert timeline["engines"][0]["in_progress"] == [1, 0, 1, 0, 1]


def test_a_full_window_ends_where_its_rollouts_do(monkeypatch):
    """Room for four rollouts: the fifth starts at 2 s, so the window is the first two rounds."""
    monkeypatch.setattr(pipelinerl.records.figure_data, "WINDOW_ROLLOUTS", 4)
    check_window(figures_of(in_rounds(rounds=9))["generation_window"], 2.0, 2.0)


@pytest.mark.parametrize("last", ["finishes on its engine", "is ended by its environment", "fails", "is discarded"])
def test_with_turns_the_window_ends_when_three_times_the_first_rollouts_have_ended(last):
    """One environment: rollouts of two turns, 2 s and 3 tokens each in all; the end of a turn is no end of a rollout.

    Before, nothing counted as started at the first instant, since environments are made ready first.
    """
    history = []
    for k in range(5):
        history += [
            (2.0 * k, OpenEnvironment(k, k)),
            (2.0 * k + 0.5, ObservationReady(k, 3), start(k)),
            (2.0 * k + 1.0, TurnFinished(k, 0, spans((0, 1)))),
        ]
        go_on = (ObservationReady(k, 5), start(k, 0, 1))
        ends = {
            "finishes on its engine": ((2.0 * k + 1.5, *go_on), (2.0 * k + 2.0, *ended(k, (0, 3)))),
            "is ended by its environment": (
                (2.0 * k + 1.5, *go_on),
                (2.0 * k + 1.75, TurnFinished(k, 0, spans((0, 3)))),
                (2.0 * k + 2.0, RolloutFinished(k, None, spans((0, 3)), 1.0)),
            ),
            "fails": ((2.0 * k + 2.0, RolloutFailed(k)),),
            "is discarded": ((2.0 * k + 2.0, DiscardRollouts((k,), DiscardReason.STALE)),),
        }
        history += ends[last]
    ledger = ledger_of(history, environments=1)
    window = ledger.figure_data().to_dict()["generation_window"]
    assert window["width_s"] == 6.0 / 200  # the end of the third rollout
    assert np.mean(window["in_progress"]) == pytest.approx(0.75)  # from its first slot on
    tokens = 1 if last in {"fails", "is discarded"} else 3
    assert np.mean(window["tokens_per_s"]) == pytest.approx(tokens / 2)
