"""The scheduler on short hand-made histories, with its literal answers; others are in test_scheduler_machine.

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
    train,
    trained,
)

from pipelinerl.scheduler.events import (
    AbortRollout,
    DiscardReason,
    EngineJoined,
    OnFull,
    OnStale,
    Stop,
    StopReason,
    WeightUpdate,
)

# ------------------------------------------------------------------------------------------- pipeline


def test_the_start_fills_all_slots_emptiest_engine_first():
    scheduler = make(generation_batch_size=2, num_engines=2)
    assert scheduler.start() == [start(0, 0), start(1, 1), start(2, 0), start(3, 1)]
    assert scheduler.num_in_flight == 4


def test_rollouts_of_a_group_share_a_prompt_and_start_one_by_one():
    scheduler = make(generation_batch_size=3, group_size=2)
    assert scheduler.start() == [start(0, prompt_id=0), start(1, prompt_id=0), start(2, prompt_id=1)]
    assert report(scheduler, finished(0, 0), finished(2, 0)) == [start(3, prompt_id=1), start(4, prompt_id=2)]


def test_a_batch_is_exactly_B_rollouts_in_order_of_arrival():
    scheduler = started()
    assert others(report(scheduler, *done(3))) == []
    assert others(report(scheduler, *done(1))) == [train(3, 1)]
    assert others(report(scheduler, *done(0, 2, 4))) == [], "the trainer is busy"
    assert others(report(scheduler, trained(1), published(1))) == [publish(1), train(0, 2, version=1)]
    assert others(report(scheduler, trained(2))) == [], "rollout 4 alone is no batch, and version 1 is on its way"


def test_publications_are_made_up_for_by_one_when_the_last_engine_has_loaded():
    """Steps 2 and 3 end while engine 1 still loads version 1: version 2 is never published."""
    scheduler = started(num_engines=2)
    report(scheduler, *done(0, 2, 4, 6, 8, 9, 10, 11), trained(1))
    assert others(report(scheduler, loaded(1, 0), published(1))) == [train(4, 6, version=1)]
    assert others(report(scheduler, trained(2))) == [train(8, 9, version=2)]
    assert others(report(scheduler, loaded(1, 1))) == [], "the trainer is busy"
    assert others(report(scheduler, trained(3))) == [publish(3)]


def test_one_step_off_waits_at_a_hand_over_for_an_engine_that_joins():
    """Engine 1 joins with version 0 and still loads 1 when rollouts 4 and 5 are handed over at version 2.

    If they were trained on, and 6 and 7 started, with version 1 published, 6 and 7 would have lag 2 in place of 1.
    """
    scheduler = started(kind="one_step_off", optimizer_steps_per_rl_step=1)
    report(scheduler, *done(0, 1, 2, 3))
    assert others(report(scheduler, trained(1), EngineJoined(1, 0))) == [publish(1)]
    assert others(report(scheduler, published(1))) == [train(2, 3, version=1)]
    assert report(scheduler, trained(2), loaded(1, 0)) == [start(4), start(5)]
    assert report(scheduler, *done(4, 5, version=1)) == []
    assert report(scheduler, loaded(1, 1)) == [publish(2)]
    assert report(scheduler, published(2)) == [train(4, 5, version=2)]
    assert report(scheduler, loaded(2, 0)) == []
    assert report(scheduler, loaded(2, 1)) == [start(6, 0), start(7, 1)]


def test_only_the_last_micro_batch_completes_the_step():
    """B = 4 in micro-batches of 2: training starts when half the batch is there, the version rises at its end."""
    scheduler = started(train_batch_size=4, micro_batch_size=2)
    assert others(report(scheduler, *done(0, 1))) == [train(0, 1, completes_step=False)]
    assert others(report(scheduler, trained(0))) == []
    assert scheduler.version == 0
    assert others(report(scheduler, *done(2, 3))) == [train(2, 3)]
    assert others(report(scheduler, trained(1))) == [publish(1)]
    assert scheduler.version == 1


def test_a_publication_that_had_to_wait_goes_out_between_two_micro_batches():
    """Version 1 is still on its way when step 2 ends; it arrives while the first half of step 3 is trained."""
    scheduler = started(train_batch_size=4, micro_batch_size=2)
    report(scheduler, *done(0, 1, 2, 3), trained(0), trained(1), published(1))
    report(scheduler, *done(4, 5, 6, 7), trained(1))
    assert others(report(scheduler, trained(2))) == [], "version 2 has to wait"
    assert others(report(scheduler, *done(8, 9), loaded(1))) == [train(8, 9, version=2, completes_step=False)]
    assert others(report(scheduler, trained(2))) == [publish(2)]


# --------------------------------------------------------------------------------------- conventional


def conventional(**kwargs):
    return make(kind="conventional", **{"generation_batch_size": 8, "optimizer_steps_per_rl_step": 2, **kwargs})


def test_conventional_trains_G_batches_in_order_of_admission_then_publishes_once():
    scheduler = conventional(generation_batch_size=2)
    scheduler.start()
    assert report(scheduler, *done(1, 0, 3, 2)) == [start(2), start(3), train(0, 1)]
    assert report(scheduler, trained(1)) == [train(2, 3, version=1)]
    assert report(scheduler, trained(2)) == [publish(2)]


def test_conventional_starts_nothing_from_the_first_training_to_the_last_load():
    scheduler = conventional(num_engines=2)
    scheduler.start()
    report(scheduler, *done(0, 2, engine=0), *done(1, 3, engine=1))
    assert others(report(scheduler, trained(1), trained(2))) == [train(2, 3, version=1), publish(2)]
    assert report(scheduler, published(2), loaded(2, 1)) == []
    assert report(scheduler, loaded(2, 0)) == [start(4, 0), start(5, 1), start(6, 0), start(7, 1)]


def test_conventional_makes_the_last_RL_step_shorter():
    """3 steps at G = 2: an RL step of 2, then one of 1 that generates B rollouts only."""
    scheduler = conventional(optimizer_steps=3)
    scheduler.start()
    report(scheduler, *done(0, 1, 2, 3), trained(1), trained(2), published(2))
    assert report(scheduler, loaded(2)) == [start(4), start(5)]
    assert report(scheduler, *done(4, 5, version=2)) == [train(4, 5, version=2)]
    assert report(scheduler, trained(3)) == [Stop(StopReason.DONE)]


# ------------------------------------------------------------------------------------- weight updates


def test_wait_starts_nothing_on_an_engine_until_it_has_loaded():
    scheduler = started(weight_update=WeightUpdate.WAIT, generation_batch_size=2, num_engines=2)
    report(scheduler, *done(0, engine=0), *done(1, engine=1))
    assert report(scheduler, trained(1)) == [publish(1, WeightUpdate.WAIT)]
    assert report(scheduler, finished(2, 0, engine=0), finished(4, 0, engine=0), finished(3, 0, engine=1)) == []
    assert report(scheduler, loaded(1, 0)) == [start(6, 0), start(7, 0)], "both slots of engine 0, none of engine 1"
    assert report(scheduler, finished(5, 0, engine=1), loaded(1, 1)) == [start(8, 1), start(9, 1)]


def test_rollouts_aborted_by_a_weight_update_start_again_with_their_tokens_before_new_ones():
    scheduler = started(weight_update=WeightUpdate.ABORT, generation_batch_size=2, num_engines=2)
    report(scheduler, *done(0, 2))
    assert report(scheduler, trained(1)) == [publish(1, WeightUpdate.ABORT)]
    assert report(scheduler, aborted(1, 0, engine=1)) == [start(1, 1, kept_tokens=1)]
    assert report(scheduler, aborted(4, engine=0)) == [start(4, 0)], "it had not begun"
    assert report(scheduler, finished(1, 0, 1, engine=1)) == [start(6, 1)]


def test_interrupted_rollouts_start_first_come_first_served_before_new_ones():
    """An engine that is to be empty before it loads gives two rollouts up; nothing starts there until it has."""
    scheduler = started(weight_update=WeightUpdate.WAIT, generation_batch_size=3)
    report(scheduler, *done(0, 1), trained(1))
    assert report(scheduler, aborted(3, 0), aborted(2, 0), finished(4, 0)) == []
    assert report(scheduler, loaded(1)) == [start(3, kept_tokens=1), start(2, kept_tokens=1), start(5)]


def test_an_interrupted_rollout_starts_again_while_no_group_may_be_admitted():
    """m = 1: until engine 1 has loaded, 2 and 3 are all that can be trained in time."""
    scheduler = started(max_lag=1, weight_update=WeightUpdate.WAIT, generation_batch_size=2, num_engines=2)
    report(scheduler, *done(0), *done(1, engine=1), trained(1))
    assert report(scheduler, aborted(2, 0), loaded(1)) == [start(2, kept_tokens=1)]


# ------------------------------------------------------------------------------------ discards, failures


def test_groups_without_signal_are_discarded_and_replaced():
    scheduler = started(filter_no_signal=True, group_size=2)
    assert others(report(scheduler, *done(0, 1, rewards=(1.0, 1.0)))) == [discard(0, 1, reason=DiscardReason.NO_SIGNAL)]
    assert others(report(scheduler, *done(2, 3, rewards=(1.0, 0.0)))) == [train(2, 3)]


def test_the_failure_of_one_rollout_ends_its_group():
    """Rollout 0 is scored, 1 is being scored, 2 in flight, 3 fails: each ends in its own way, and once."""
    scheduler = started(group_size=4, train_batch_size=4)
    report(scheduler, *done(0), finished(1, 0))
    assert report(scheduler, failed(3)) == [
        AbortRollout(2, 0),
        discard(0, reason=DiscardReason.SIBLING_FAILED),
        start(6, prompt_id=1),
    ]
    assert report(scheduler, scored(1)) == [discard(1, reason=DiscardReason.SIBLING_FAILED)]
    assert report(scheduler, aborted(2, 0)) == [start(7, prompt_id=1)]


def test_an_interrupted_rollout_of_a_failed_group_is_discarded():
    """Rollout 2 is being scored and 3 waits for its engine to load when 2 fails."""
    scheduler = started(weight_update=WeightUpdate.WAIT, group_size=2, generation_batch_size=2)
    report(scheduler, *done(0, 1), trained(1), finished(2, 0), aborted(3, 0))
    assert report(scheduler, failed(2, engine=None)) == [discard(3, reason=DiscardReason.SIBLING_FAILED)]
    assert report(scheduler, loaded(1)) == [start(4, prompt_id=2), start(5, prompt_id=2)]


# ------------------------------------------------------------------------------------- the ready queue


def test_in_flight_scored_and_ready_together_fill_the_slots_and_the_ready_queue_and_no_more():
    """H = 2, queue of 2: 4 places. While the trainer works, 2 .. 5 become ready, and each takes a place for good.

    A batch that is taken gives 2 places back.
    """
    scheduler = started(ready_queue_size=2, generation_batch_size=2)
    report(scheduler, *done(0, 1, 2, 3))
    assert report(scheduler, finished(4, 0), scored(4), finished(5, 0), scored(5)) == []
    assert (scheduler.num_ready, scheduler.num_in_flight) == (4, 0)
    assert report(scheduler, trained(1), published(1)) == [publish(1), train(2, 3, version=1), start(6), start(7)]


@pytest.mark.parametrize("kind", [{"on_full": OnFull.DROP_OLDEST}, {"kind": "partial_rollouts"}])
def test_rollouts_being_scored_are_bounded_where_nothing_waits_for_the_ready_queue(kind):
    """H = 2, queue 2: at most 4 are in flight or being scored; a score lets the next one in."""
    scheduler = started(ready_queue_size=2, generation_batch_size=2, **kind)
    assert report(scheduler, finished(0, 0), finished(1, 0)) == [start(2), start(3)]
    assert report(scheduler, finished(2, 0), finished(3, 0)) == []
    assert report(scheduler, scored(2)) == [start(4)]


def test_a_full_ready_queue_drops_the_group_that_came_first():
    scheduler = started(ready_queue_size=3, on_full=OnFull.DROP_OLDEST)
    assert others(report(scheduler, *done(0, 1))) == [train(0, 1)]
    assert others(report(scheduler, *done(3, 2, 4))) == []
    assert others(report(scheduler, *done(5))) == [discard(3, reason=DiscardReason.QUEUE_FULL)]
    assert others(report(scheduler, trained(1), published(1))) == [publish(1), train(2, 4, version=1)]


def test_a_full_ready_queue_drops_the_oldest_tokens_first_under_max_lag():
    scheduler = started(ready_queue_size=2, on_full=OnFull.DROP_OLDEST, on_stale=OnStale.DROP, max_lag=5)
    report(
        scheduler, *done(0, 1), trained(1), published(1), loaded(1), *done(2, 3, version=1), finished(4, 1), scored(4)
    )
    assert others(report(scheduler, finished(5, 0, 1), scored(5))) == []
    assert others(report(scheduler, finished(6, 1), scored(6))) == [discard(5, reason=DiscardReason.QUEUE_FULL)]


# --------------------------------------------------------------------------------------------- the end


def test_the_run_stops_after_the_last_step_without_publishing_it():
    scheduler = started(optimizer_steps=2)
    report(scheduler, *done(0, 1, 2, 3), trained(1), published(1))
    assert report(scheduler, trained(2)) == [Stop(StopReason.DONE)]
    assert scheduler.stopped is StopReason.DONE


def test_the_run_stops_when_more_than_discard_limit_rollouts_are_given_up_in_one_step():
    scheduler = started(discard_limit=2)
    assert others(report(scheduler, failed(0), failed(1))) == []
    assert others(report(scheduler, failed(2))) == [Stop(StopReason.STALLED)]
    assert scheduler.stopped is StopReason.STALLED
    assert report(scheduler, failed(3)) == []


# ------------------------------------------------------------------------------------------- max_lag


def test_the_lag_gate_admits_rollouts_that_can_be_trained_in_time():
    """m = 1, B = 2: at version 0 two batches can be in time, so 4 of 8 slots are used; one batch per load follows."""
    scheduler = make(max_lag=1, generation_batch_size=8)
    assert scheduler.start() == [start(0), start(1), start(2), start(3)]
    assert report(scheduler, *done(0, 1)) == [train(0, 1)], "the next step could be the last for what starts now"
    assert report(scheduler, trained(1), published(1)) == [publish(1)]
    assert report(scheduler, loaded(1)) == [start(4), start(5)]


def test_the_lag_gate_counts_rollouts_taken_by_the_running_step():
    """m = 0, B = 4: micro-batches make room for nothing until the step is published and loaded."""
    scheduler = make(max_lag=0, train_batch_size=4, micro_batch_size=2, generation_batch_size=8)
    assert scheduler.start() == [start(0), start(1), start(2), start(3)]
    step = [*done(0, 1), trained(0), *done(2, 3), trained(1), published(1)]
    assert report(scheduler, *step) == [train(0, 1, completes_step=False), train(2, 3), publish(1)]
    assert report(scheduler, loaded(1)) == [start(4), start(5), start(6), start(7)]


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


def test_a_straggler_whose_tokens_are_new_does_not_hold_the_trainer():
    """Rollouts 0 and 3 began so late that they have no token of version 0: 4 and 5 were first, and go first."""
    scheduler = started(max_lag=1)
    report(scheduler, *done(1, 2), trained(1), published(1), loaded(1), *done(4, 5, version=1))
    assert report(scheduler, finished(0, 1), scored(0)) == []
    assert report(scheduler, finished(3, 1), scored(3)) == [train(4, 5, version=1)]


@pytest.mark.parametrize(
    ("on_stale", "prompt_ids"), [(OnStale.DROP, {0: 6, 3: 7, 4: 8}), (OnStale.REQUEUE, {0: 0, 3: 3, 4: 4})]
)
def test_rollouts_too_old_for_the_next_batch_are_aborted_once_and_replaced(on_stale, prompt_ids):
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


def test_a_ready_group_too_old_for_the_next_batch_is_discarded():
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
