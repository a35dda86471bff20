"""``max_lag`` on short hand-made histories: by waiting, by dropping, by starting prompts again.

In short: B is ``train_batch_size``, H ``generation_batch_size``, m ``max_lag``; unless a test says otherwise there
is one engine with H = 4, B = 2, and groups of one rollout, so that rollout r answers prompt r.
"""

import pytest
from scheduler_events import (
    aborted,
    discard,
    done,
    failed,
    finished,
    loaded,
    make,
    others,
    publish,
    published,
    report,
    scored,
    start,
    started,
    starts,
    train,
    trained,
)

from pipelinerl.scheduler.events import AbortRollout, DiscardReason, OnStale


def test_the_lag_gate_admits_what_can_be_trained_in_time():
    """m = 1, B = 2: at version 0 two batches can be in time, so 4 of 8 slots are used; one batch per load follows."""
    scheduler = make(max_lag=1, generation_batch_size=8)
    assert scheduler.start() == [start(0), start(1), start(2), start(3)]
    assert report(scheduler, *done(0, 1)) == [train(0, 1)], "the next step could be the last for what starts now"
    assert report(scheduler, trained(1), published(1)) == [publish(1)]
    assert report(scheduler, loaded(1)) == [start(4), start(5)]


def test_the_lag_gate_counts_what_the_running_step_has_taken():
    """m = 0, B = 4: micro-batches make room for nothing until the step is published and loaded."""
    scheduler = make(max_lag=0, train_batch_size=4, micro_batch_size=2, generation_batch_size=8)
    assert starts(scheduler.start()) == [0, 1, 2, 3]
    assert starts(report(scheduler, *done(0, 1), trained(0), *done(2, 3), trained(1), published(1))) == []
    assert starts(report(scheduler, loaded(1))) == [4, 5, 6, 7]


def test_a_discarded_group_leaves_the_lag_gate():
    scheduler = started(max_lag=0, generation_batch_size=8)
    assert report(scheduler, failed(0)) == [start(2)]


def test_the_trainer_waits_for_a_straggler_that_would_be_too_old_afterwards():
    """m = 1, B = 2. Rollouts 0 and 3 hold tokens of version 0, so both must be in the batch at version 1.

    When 4 and 5 (version 1) are ready first, training on them would leave 0 and 3 to version 2: lag 2. When 0
    comes, a batch of 0 and 4 would leave 3. When 3 comes, 0 and 3 are trained on at lag 1, and 4 and 5 can wait.
    """
    scheduler = started(max_lag=1)
    assert others(report(scheduler, *done(1, 2))) == [train(1, 2)]
    assert report(scheduler, trained(1), published(1), loaded(1)) == [publish(1), start(4), start(5)]
    assert report(scheduler, *done(4, 5, version=1)) == []
    assert report(scheduler, finished(0, 0, 1), scored(0)) == []
    assert report(scheduler, finished(3, 0, 1), scored(3)) == [train(0, 3, version=1)]
    assert report(scheduler, trained(2), published(2)) == [publish(2), train(4, 5, version=2)]


def test_the_trainer_does_not_wait_for_a_straggler_that_failed():
    scheduler = started(max_lag=1)
    report(scheduler, *done(1, 2), trained(1), published(1), loaded(1), *done(4, 5, version=1))
    assert others(report(scheduler, failed(0))) == []
    assert others(report(scheduler, failed(3))) == [train(4, 5, version=1)]


def test_a_straggler_whose_tokens_are_new_does_not_hold_the_trainer():
    """Rollouts 0 and 3 began so late that they have no token of version 0: 4 and 5 were first, and go first."""
    scheduler = started(max_lag=1)
    report(scheduler, *done(1, 2), trained(1), published(1), loaded(1), *done(4, 5, version=1))
    assert report(scheduler, finished(0, 1), scored(0)) == []
    assert report(scheduler, finished(3, 1), scored(3)) == [train(4, 5, version=1)]


@pytest.mark.parametrize(
    ("on_stale", "prompt_ids"), [(OnStale.DROP, {0: 6, 3: 7, 4: 8}), (OnStale.REQUEUE, {0: 0, 3: 3, 4: 4})]
)
def test_what_the_next_batch_comes_too_late_for_is_aborted_once_and_replaced(on_stale, prompt_ids):
    """m = 0: when the step at version 0 starts, all that began before it can only be too old.

    ``drop`` starts new prompts in its place, ``requeue`` the same ones as new rollouts, first aborted first.
    """
    scheduler = started(max_lag=0, on_stale=on_stale)
    report(scheduler, finished(1, 0), finished(2, 0), scored(1))
    assert report(scheduler, scored(2)) == [train(1, 2), *(AbortRollout(r, 0) for r in (0, 3, 4, 5))]
    assert report(scheduler, aborted(0, 0)) == [start(6, prompt_id=prompt_ids[0])]
    assert report(scheduler, aborted(3, 0)) == [start(7, prompt_id=prompt_ids[3])]
    assert report(scheduler, finished(4, 0)) == [start(8, prompt_id=prompt_ids[4])], "it had finished before the abort"
    assert report(scheduler, scored(4)) == [discard(4, reason=DiscardReason.STALE)]
    assert others(report(scheduler, trained(1))) == [publish(1)]


def test_a_ready_group_that_the_next_batch_comes_too_late_for_is_discarded():
    """m = 1, B = 1: rollouts 1 and 2 are ready, of version 0. One is trained on at version 1, the other is too old."""
    scheduler = started(max_lag=1, on_stale=OnStale.DROP, train_batch_size=1, generation_batch_size=2)
    report(scheduler, *done(0), *done(1, 2), trained(1))
    assert report(scheduler, published(1)) == [
        train(1, version=1),
        discard(2, reason=DiscardReason.STALE),
        AbortRollout(3, 0),
        AbortRollout(4, 0),
    ]


def test_a_group_whose_tokens_are_too_old_is_discarded_when_it_is_scored():
    """m = 0: rollout 6 starts after the step at version 0 has begun, but before the engine has version 1."""
    scheduler = started(max_lag=0, on_stale=OnStale.DROP)
    report(scheduler, *done(0, 1))
    assert report(scheduler, aborted(2, 0)) == [start(6)]
    assert report(scheduler, finished(6, 0), scored(6)) == [start(7), discard(6, reason=DiscardReason.STALE)]


def test_a_group_that_has_finished_is_judged_by_its_tokens():
    """m = 1, B = 1. Rollouts 2, 3, 4 started when the engine had reported version 0 only.

    When the step at version 1 begins, 2 has finished, and all its tokens are of version 1: in time for version 2.
    Of 3 and 4 nothing has been reported: they may be too old.
    """
    scheduler = started(max_lag=1, on_stale=OnStale.DROP, train_batch_size=1, generation_batch_size=2)
    report(scheduler, *done(0), trained(1), published(1))
    assert report(scheduler, finished(2, 1), finished(1, 0)) == [start(3), start(4)]
    assert report(scheduler, scored(1)) == [train(1, version=1), AbortRollout(3, 0), AbortRollout(4, 0)]
    assert report(scheduler, scored(2), trained(2)) == [train(2, version=2)]


def test_under_max_lag_the_oldest_is_trained_on_first():
    scheduler = started(max_lag=3, on_stale=OnStale.DROP, generation_batch_size=6)
    report(scheduler, *done(0, 1), trained(1), published(1), loaded(1))
    report(scheduler, finished(2, 1), scored(2))
    assert others(report(scheduler, finished(3, 0, 1), scored(3))) == [train(3, 2, version=1)]


def test_without_max_lag_nothing_is_too_old():
    scheduler = started(train_batch_size=1, generation_batch_size=2)
    for version in range(5):
        report(scheduler, *done(1 + version, version=version), trained(version + 1), published(version + 1))
        report(scheduler, loaded(version + 1))
    assert others(report(scheduler, *done(0))) == [train(0, version=5)]
