"""What the ledger of turns tells figures: lag by turn, who is dropped, where the open rollouts are."""

import math

import numpy as np
import pytest
from ledger_histories import play_to

from pipelinerl.records.ledger import TurnLedger
from pipelinerl.records.step_ledger import Gathered
from pipelinerl.rl.drift import DriftModel
from pipelinerl.scheduler.events import (
    AbortRollout,
    DiscardReason,
    DiscardRollouts,
    OpenEnvironment,
    RolloutAborted,
    RolloutFinished,
    StartRollout,
    TurnFinished,
    VersionSpans,
)


def tokens(number: int) -> VersionSpans:
    return VersionSpans((0,), (number,))


def test_lag_by_turn_by_hand() -> None:
    """Turns of 4 and 6 tokens. The first 6 tokens by version 1, 4 by version 3, trained at version 5.

    Turn 1 has lag 4 four times; turn 2 has it twice, and lag 2 four times. A second rollout has one turn of lag 0.
    """
    ledger = TurnLedger(count=3)
    play_to(ledger, [
        (0.0, OpenEnvironment(7, 0), OpenEnvironment(8, 0), OpenEnvironment(9, 0)),
        (1.0, StartRollout(7, 0, 0)),
        (2.0, TurnFinished(7, 0, tokens(4))),
        (3.0, RolloutFinished(7, 0, tokens(10)), RolloutFinished(8, 0, tokens(5), 0.0)),
        (4.0, TurnFinished(9, 0, tokens(3)), DiscardRollouts((9,), DiscardReason.STALE)),
    ])  # fmt: skip
    arrays = (np.array(one) for one in ([0, 6, 0], [6, 10, 5], [1, 3, 5], [5, 5, 5]))
    ledger.trained([7, 8], Gathered([1.0, 0.0], *arrays), 5)
    profile = ledger.profile(DriftModel(exponent=1.0, rates=[0.1]))
    assert profile.tokens == [4 + 5, 6]
    ess = [9 / (5 + 4 * math.exp(0.4)), 6 / (2 * math.exp(0.4) + 4 * math.exp(0.2))]  # rl/drift.py: at the tokens' lags
    assert profile.ess_modelled == pytest.approx(ess)
    assert profile.lag_mean == [4 * 4 / 9, (2 * 4 + 4 * 2) / 6]
    assert (profile.trained, profile.dropped) == ([0, 1, 1], [0, 1, 0])
    places = profile.places.to_dict()
    assert places["time_s"] == [0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 3.0, 4.0, 4.0]
    assert places["environment"] == [1, 2, 3, 2, 3, 2, 1, 1, 0]
    assert places["engine"] == [0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert places["scoring"] == [0, 0, 0, 0, 0, 1, 1, 1, 1]


def test_of_many_moves_few_points_are_kept() -> None:
    ledger = TurnLedger(count=1)
    play_to(ledger, [(float(time_s), OpenEnvironment(time_s, 0)) for time_s in range(3000)])
    places = ledger.profile().places
    assert 512 <= len(places.time_s) < 1024
    assert places.environment == [1 + time_s for time_s in places.time_s]


def test_a_turn_that_its_environment_ended_counts_once() -> None:
    ledger = TurnLedger(count=1)
    ended = RolloutFinished(0, None, tokens(4))
    play_to(ledger, [(0.0, OpenEnvironment(0, 0)), (1.0, TurnFinished(0, 0, tokens(4))), (2.0, ended)])
    assert ledger.report(2.0, finished=1).turns_mean == 1.0
    play_to(ledger, [(2.0, DiscardRollouts((0,), DiscardReason.STALE))])
    assert ledger.profile().dropped == [0, 1]


def test_a_rollout_that_is_aborted_is_dropped_and_one_that_weights_abort_waits() -> None:
    ledger = TurnLedger(count=2)
    play_to(ledger, [(0.0, OpenEnvironment(0, 0), OpenEnvironment(1, 0), AbortRollout(0, 0))])
    play_to(ledger, [(1.0, RolloutAborted(0, 0, tokens(1)), RolloutAborted(1, 0, tokens(1)))])
    profile = ledger.profile()
    assert profile.dropped == [1]
    assert profile.places.waiting[-1] == 1
