"""What the ledger of turns tells figures: lag by turn, who is dropped, where the open rollouts are."""

import math

import numpy as np
import pytest

from pipelinerl.records.rollout_buffer import Gathered
from pipelinerl.records.turn_ledger import Place, TurnLedger
from pipelinerl.rl.drift import DriftModel


def test_lag_by_turn_by_hand() -> None:
    """Turns of 4 and 6 tokens. The first 6 tokens by version 1, 4 by version 3, trained at version 5.

    Turn 1 has lag 4 four times; turn 2 has it twice, and lag 2 four times. A second rollout has one turn of lag 0.
    """
    ledger = TurnLedger(count=3)
    for rollout_id in (7, 8, 9):
        ledger.open(0.0, rollout_id)
    ledger.move(1.0, 7, Place.ENGINE)
    ledger.end_turn(2.0, 7, Place.ENVIRONMENT, 4)
    ledger.end_turn(3.0, 7, Place.SCORING, 10)
    ledger.end_turn(3.0, 8, None, 5)
    ledger.end_turn(4.0, 9, Place.ENVIRONMENT, 3)
    ledger.drop(9)
    arrays = (np.array(one) for one in ([0, 6, 0], [6, 10, 5], [1, 3, 5], [5, 5, 5]))
    ledger.trained([7, 8], Gathered([1.0, 0.0], *arrays), 5)
    profile = ledger.profile(DriftModel(exponent=1.0, rates=[0.1]))
    assert profile.tokens == [4 + 5, 6]
    ess = [9 / (5 + 4 * math.exp(0.4)), 6 / (2 * math.exp(0.4) + 4 * math.exp(0.2))]  # rl/drift.py: at the tokens' lags
    assert profile.ess_modelled == pytest.approx(ess)
    assert profile.lag_mean == [4 * 4 / 9, (2 * 4 + 4 * 2) / 6]
    assert (profile.trained, profile.dropped) == ([0, 1, 1], [0, 1, 0])
    places = profile.places.to_dict()
    assert places["time_s"] == [0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 3.0, 4.0]
    assert places["environment"] == [1, 2, 3, 2, 3, 2, 1, 1]
    assert places["engine"] == [0, 0, 0, 1, 0, 0, 0, 0]
    assert places["scoring"] == [0, 0, 0, 0, 0, 1, 1, 1]


def test_of_many_moves_few_points_are_kept() -> None:
    ledger = TurnLedger(count=1)
    for time_s in range(3000):
        ledger.open(float(time_s), time_s)
    places = ledger.profile().places
    assert 512 <= len(places.time_s) < 1024
    assert places.environment == [1 + time_s for time_s in places.time_s]


def test_a_turn_that_its_environment_ended_counts_once() -> None:
    ledger = TurnLedger(count=1)
    ledger.open(0.0, 0)
    ledger.end_turn(1.0, 0, Place.ENVIRONMENT, 4)
    ledger.end_turn(2.0, 0, Place.SCORING, None)
    assert ledger.report(2.0, finished=1).turns_mean == 1.0
    ledger.drop(0)
    assert ledger.profile().dropped == [0, 1]
