"""The two rules of ``max_lag`` by hand; that they keep the bound is tested with the hostile driver."""

import pytest

from pipelinerl.scheduler.base import LagBound


@pytest.mark.parametrize(
    ("num_live", "bound", "version", "left", "admitted"),
    [
        (0, 0, 0, 4, 12),  # batches of 4 at versions 0, 1, 2
        (5, 0, 0, 4, 7),
        (0, 0, 2, 4, 4),
        (0, 0, 2, 1, 1),  # three of the batch at version 2 are taken
        (0, 0, 3, 4, 0),
        (4, 1, 3, 4, 0),
    ],
)
def test_the_gate_admits_rollouts_for_the_batches_that_are_in_time(num_live, bound, version, left, admitted):
    rule = LagBound(2, train_batch_size=4)
    if num_live:
        rule.add(0, num_live)
    most = next(n for n in range(20) if not rule.admits(n + 1, bound=bound, version=version, left=left))
    assert most == admitted


@pytest.mark.parametrize(
    ("live", "taken", "version", "left", "safe"),
    [
        ({0: 4, 1: 4}, {}, 2, 4, True),  # max_lag 2: bound 0 fits into the batch at version 2, bound 1 into that at 3
        ({0: 5, 1: 3}, {}, 2, 4, False),
        ({0: 5, 1: 3}, {0: 1}, 2, 4, True),
        ({0: 1, 1: 8}, {}, 2, 4, False),
        ({0: 1}, {}, 3, 4, False),
        ({0: 1}, {0: 1}, 3, 4, True),
        ({0: 3}, {}, 2, 2, False),
    ],
)
def test_rollouts_left_after_a_batch_must_fit_into_the_batches_in_time(live, taken, version, left, safe):
    rule = LagBound(2, train_batch_size=4)
    for bound, number in live.items():
        rule.add(bound, number)
    assert rule.is_safe(taken, version=version, left=left) is safe
    assert LagBound(None, train_batch_size=4).is_safe(taken, version=version, left=left)
