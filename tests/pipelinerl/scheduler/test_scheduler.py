"""The scheduler on short hand-made histories: what it answers, literally.

In short: B is ``train_batch_size``, H ``generation_batch_size``, m ``max_lag``; unless a test says otherwise there
is one engine with H = 4, B = 2, and groups of one rollout, so that rollout r answers prompt r.
"""

from __future__ import annotations

import pickle

import pytest

from pipelinerl.config.scheduler import SchedulerConfig
from pipelinerl.errors import SchedulerError
from pipelinerl.scheduler.events import (
    AbortRollout,
    DiscardReason,
    DiscardRollouts,
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
from pipelinerl.scheduler.kinds import make_scheduler


def make(*, optimizer_steps=10, num_engines=1, group_size=1, **settings):
    config = SchedulerConfig(**{"train_batch_size": 2, "generation_batch_size": 4, **settings})
    return make_scheduler(config, optimizer_steps=optimizer_steps, num_engines=num_engines, group_size=group_size)


def started(**kwargs):
    scheduler = make(**kwargs)
    scheduler.start()
    return scheduler


def report(scheduler, *events):
    """Report events and return all that is answered."""
    return [command for event in events for command in scheduler.handle(event)]


def start(rollout_id, engine=0, *, prompt_id=None, kept_tokens=0):
    return StartRollout(rollout_id, rollout_id if prompt_id is None else prompt_id, engine, kept_tokens)


def starts(commands):
    """Rollouts that are started."""
    return [command.rollout_id for command in commands if isinstance(command, StartRollout)]


def others(commands):
    """All commands that start nothing."""
    return [command for command in commands if not isinstance(command, StartRollout)]


def tokens(*versions):
    """One token of each version."""
    return VersionSpans(versions, tuple(range(1, len(versions) + 1)))


def finished(rollout_id, *versions, engine=0):
    return RolloutFinished(rollout_id, engine, tokens(*versions))


def scored(rollout_id, reward=1.0):
    return RolloutScored(rollout_id, reward)


def done(*rollout_ids, version=0, engine=0, rewards=(1.0,)):
    """Rollouts finish and are scored, one after the other."""
    return [
        event
        for i, rollout_id in enumerate(rollout_ids)
        for event in (finished(rollout_id, version, engine=engine), scored(rollout_id, rewards[i % len(rewards)]))
    ]


def failed(rollout_id, engine=0):
    return RolloutFailed(rollout_id, engine)


def aborted(rollout_id, *versions, engine=0):
    return RolloutAborted(rollout_id, engine, tokens(*versions))


def trained(version):
    return TrainingFinished(version, 1.0)


def published(version):
    return WeightsPublished(version, 1.0)


def loaded(version, engine=0):
    return WeightsLoaded(engine, version, 1.0)


def train(*rollout_ids, version=0, completes_step=True):
    return StartTraining(rollout_ids, version, completes_step)


def publish(version, weight_update=WeightUpdate.KEEP):
    return PublishWeights(version, weight_update)


def discard(*rollout_ids, reason):
    return DiscardRollouts(rollout_ids, reason)


# ------------------------------------------------------------------------------------------- pipeline


def test_the_start_fills_all_slots_emptiest_engine_first():
    scheduler = make(generation_batch_size=2, num_engines=2)
    assert scheduler.start() == [start(0, 0), start(1, 1), start(2, 0), start(3, 1)]
    assert scheduler.num_in_flight == 4


def test_a_finished_rollout_is_replaced_at_once_where_it_ran():
    scheduler = started(generation_batch_size=2, num_engines=2)
    assert report(scheduler, finished(1, 0, engine=1)) == [start(4, 1)]
    assert scheduler.num_in_flight == 4


def test_the_emptiest_engine_is_found_after_any_number_of_rollouts():
    """4 rollouts on 2 engines of 100 slots, 2 on each; whenever one fails on engine 1, that is the emptier one."""
    scheduler = started(max_lag=0, train_batch_size=4, generation_batch_size=100, num_engines=2)
    failing = [3, *range(4, 100)]
    assert report(scheduler, *(failed(rollout_id, engine=1) for rollout_id in failing)) == [
        start(rollout_id, 1) for rollout_id in range(4, 101)
    ]


def test_rollouts_of_a_group_share_a_prompt_and_start_one_by_one():
    scheduler = make(generation_batch_size=3, group_size=2)
    assert scheduler.start() == [start(0, prompt_id=0), start(1, prompt_id=0), start(2, prompt_id=1)]
    assert report(scheduler, finished(0, 0), finished(2, 0)) == [start(3, prompt_id=1), start(4, prompt_id=2)]


def test_a_group_is_ready_only_when_all_its_rollouts_are_scored():
    scheduler = started(generation_batch_size=2, group_size=2)
    assert others(report(scheduler, finished(0, 0), scored(0), finished(1, 0))) == []
    assert report(scheduler, scored(1)) == [train(0, 1)]


def test_a_batch_is_exactly_B_rollouts_in_order_of_arrival():
    scheduler = started()
    assert others(report(scheduler, *done(3))) == []
    assert others(report(scheduler, *done(1))) == [train(3, 1)]
    assert others(report(scheduler, *done(0, 2, 4))) == [], "the trainer is busy"
    assert others(report(scheduler, trained(1), published(1))) == [publish(1), train(0, 2, version=1)]
    assert others(report(scheduler, trained(2))) == [], "rollout 4 alone is no batch, and version 1 is on its way"


def test_weights_are_published_before_the_next_batch():
    scheduler = started()
    report(scheduler, *done(0, 1, 2, 3))
    assert report(scheduler, trained(1)) == [publish(1)]
    assert report(scheduler, published(1)) == [train(2, 3, version=1)]


def test_weights_are_published_even_if_no_batch_is_ready():
    scheduler = started()
    report(scheduler, *done(0, 1))
    assert report(scheduler, trained(1), published(1), loaded(1)) == [publish(1)]


def test_publications_are_made_up_for_by_one_when_the_last_engine_has_loaded():
    """Steps 2 and 3 end while engine 1 still loads version 1: version 2 is never published."""
    scheduler = started(num_engines=2)
    report(scheduler, *done(0, 2, 4, 6, 8, 9, 10, 11), trained(1))
    assert others(report(scheduler, loaded(1, 0), published(1))) == [train(4, 6, version=1)]
    assert others(report(scheduler, trained(2))) == [train(8, 9, version=2)]
    assert others(report(scheduler, loaded(1, 1))) == [], "the trainer is busy"
    assert others(report(scheduler, trained(3))) == [publish(3)]


def test_an_idle_trainer_publishes_as_soon_as_the_last_engine_has_loaded():
    scheduler = started(num_engines=2)
    report(scheduler, *done(0, 2, 4, 6), trained(1), loaded(1, 0), published(1), trained(2))
    assert report(scheduler, loaded(1, 1)) == [publish(2)]


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


def test_conventional_generates_exactly_BG_rollouts():
    scheduler = conventional()
    assert scheduler.start() == [start(0), start(1), start(2), start(3)]
    assert report(scheduler, *done(0, 1, 2)) == []


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


def test_conventional_trains_in_micro_batches_and_publishes_after_the_last():
    scheduler = conventional(micro_batch_size=1)
    scheduler.start()
    assert report(scheduler, *done(0, 1, 2, 3), trained(0), trained(1), trained(1), trained(2)) == [
        train(0, completes_step=False),
        train(1),
        train(2, version=1, completes_step=False),
        train(3, version=1),
        publish(2),
    ]


def test_conventional_makes_the_last_RL_step_shorter():
    """3 steps at G = 2: an RL step of 2, then one of 1 that generates B rollouts only."""
    scheduler = conventional(optimizer_steps=3)
    scheduler.start()
    report(scheduler, *done(0, 1, 2, 3), trained(1), trained(2), published(2))
    assert report(scheduler, loaded(2)) == [start(4), start(5)]
    assert report(scheduler, *done(4, 5, version=2)) == [train(4, 5, version=2)]
    assert report(scheduler, trained(3)) == [Stop(StopReason.DONE)]


def test_conventional_replaces_what_fails():
    scheduler = conventional()
    scheduler.start()
    assert report(scheduler, *done(0, 1, 2), failed(3)) == [start(4)]
    assert report(scheduler, *done(4)) == [train(0, 1)]


# ------------------------------------------------------------------------------------- weight updates


def test_wait_starts_nothing_on_an_engine_until_it_has_loaded():
    scheduler = started(weight_update=WeightUpdate.WAIT, generation_batch_size=2, num_engines=2)
    report(scheduler, *done(0, engine=0), *done(1, engine=1))
    assert report(scheduler, trained(1)) == [publish(1, WeightUpdate.WAIT)]
    assert report(scheduler, finished(2, 0, engine=0), finished(4, 0, engine=0), finished(3, 0, engine=1)) == []
    assert report(scheduler, loaded(1, 0)) == [start(6, 0), start(7, 0)], "both slots of engine 0, none of engine 1"
    assert report(scheduler, finished(5, 0, engine=1), loaded(1, 1)) == [start(8, 1), start(9, 1)]


def test_wait_releases_an_engine_that_is_full():
    """The rollouts of an engine may be reported after its load; its slots are free only then."""
    scheduler = started(weight_update=WeightUpdate.WAIT, generation_batch_size=1)
    report(scheduler, *done(0, 1), trained(1))
    assert report(scheduler, loaded(1)) == []
    assert report(scheduler, finished(2, 0)) == [start(3)]


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


# --------------------------------------------------------------------------------------------- max_lag


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


# ------------------------------------------------------------------------------------ discards, failures


def test_groups_without_signal_are_discarded_and_replaced():
    scheduler = started(filter_no_signal=True, group_size=2)
    assert others(report(scheduler, *done(0, 1, rewards=(1.0, 1.0)))) == [discard(0, 1, reason=DiscardReason.NO_SIGNAL)]
    assert others(report(scheduler, *done(2, 3, rewards=(1.0, 0.0)))) == [train(2, 3)]


def test_a_reward_that_differs_in_the_middle_is_a_signal():
    scheduler = started(filter_no_signal=True, group_size=3, train_batch_size=3)
    assert others(report(scheduler, *done(0, 1, 2, rewards=(0.0, 1.0, 0.0)))) == [train(0, 1, 2)]


def test_groups_without_signal_are_trained_on_unless_filtered():
    scheduler = started(group_size=2)
    assert others(report(scheduler, *done(0, 1, rewards=(0.0, 0.0)))) == [train(0, 1)]


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


def test_rollouts_of_a_failed_group_that_have_not_started_never_do():
    scheduler = started(group_size=4, train_batch_size=4, generation_batch_size=2)
    assert report(scheduler, failed(0)) == [AbortRollout(1, 0), start(4, prompt_id=1)]


def test_a_rollout_that_fails_while_it_is_scored_ends_its_group():
    scheduler = started(group_size=2, generation_batch_size=2)
    report(scheduler, finished(0, 0))
    assert report(scheduler, failed(0, engine=None)) == [AbortRollout(1, 0)]


def test_all_rollouts_of_a_group_may_fail():
    scheduler = started(group_size=2, generation_batch_size=2)
    assert report(scheduler, failed(0)) == [AbortRollout(1, 0), start(2, prompt_id=1)]
    assert report(scheduler, failed(1)) == [start(3, prompt_id=1)]


def test_an_interrupted_rollout_of_a_failed_group_is_discarded():
    """Rollout 2 is being scored and 3 waits for its engine to load when 2 fails."""
    scheduler = started(weight_update=WeightUpdate.WAIT, group_size=2, generation_batch_size=2)
    report(scheduler, *done(0, 1), trained(1), finished(2, 0), aborted(3, 0))
    assert report(scheduler, failed(2, engine=None)) == [discard(3, reason=DiscardReason.SIBLING_FAILED)]
    assert report(scheduler, loaded(1)) == [start(4, prompt_id=2), start(5, prompt_id=2)]


# ------------------------------------------------------------------------------------- the ready queue


def test_ready_and_in_flight_together_fill_the_slots_and_the_ready_queue_and_no_more():
    """H = 2, queue of 2: 4 places. While the trainer works, 2 .. 5 become ready, and each takes a place for good.

    A batch that is taken gives 2 places back.
    """
    scheduler = started(ready_queue_size=2, generation_batch_size=2)
    report(scheduler, *done(0, 1, 2, 3))
    assert report(scheduler, finished(4, 0), scored(4)) == [start(6)]
    assert report(scheduler, finished(5, 0), scored(5), finished(6, 0)) == []
    assert (scheduler.num_ready, scheduler.num_in_flight) == (4, 0)
    assert report(scheduler, trained(1), published(1)) == [publish(1), train(2, 3, version=1), start(7), start(8)]


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


def test_nothing_is_answered_after_the_stop_whatever_is_reported():
    scheduler = started(optimizer_steps=1)
    report(scheduler, *done(0, 1), trained(1))
    assert report(scheduler, *done(2, 3), aborted(4, 0), failed(99), trained(1), published(5), loaded(9)) == []


def test_the_run_stops_when_more_than_discard_limit_rollouts_are_given_up_in_one_step():
    scheduler = started(discard_limit=2)
    assert others(report(scheduler, failed(0), failed(1))) == []
    assert others(report(scheduler, failed(2))) == [Stop(StopReason.STALLED)]
    assert scheduler.stopped is StopReason.STALLED
    assert report(scheduler, failed(3)) == []


def test_every_optimizer_step_has_its_own_discard_limit():
    scheduler = started(discard_limit=1)
    assert others(report(scheduler, failed(0), *done(1, 2), trained(1))) == [train(1, 2), publish(1)]
    assert others(report(scheduler, failed(3))) == []
    assert others(report(scheduler, failed(4))) == [Stop(StopReason.STALLED)]


def test_a_group_that_is_given_up_counts_with_all_its_rollouts():
    scheduler = started(discard_limit=3, group_size=2)
    assert others(report(scheduler, failed(0))) == [AbortRollout(1, 0)]
    assert others(report(scheduler, failed(2))) == [AbortRollout(3, 0), Stop(StopReason.STALLED)]


def test_filtering_without_end_stalls():
    scheduler = started(discard_limit=50, filter_no_signal=True, group_size=2)
    answers = others(report(scheduler, *done(*range(60))))
    assert answers == [
        *(discard(r, r + 1, reason=DiscardReason.NO_SIGNAL) for r in range(0, 52, 2)),
        Stop(StopReason.STALLED),
    ]


# ------------------------------------------------------------------------------------ impossible events


TRAINING = done(0, 1)
PUBLISHING = [*TRAINING, trained(1)]
LOADING = [*PUBLISHING, published(1)]
LOADED = [*LOADING, loaded(1)]


@pytest.mark.parametrize(
    ("history", "event", "state"),
    [
        ([], finished(7, 0), "rollout 7 on engine 0: it is not there"),
        ([], finished(0, 0, engine=1), "rollout 0 on engine 1: it is not there"),
        ([], finished(0, 1), "tokens of versions 1 to 1: engines have had versions 0 to 0"),
        ([*LOADED, *done(2)], finished(6, 0, 1), "tokens of versions 0 to 1: engines have had versions 1 to 1"),
        ([finished(0, 0)], finished(0, 0), "rollout 0 on engine 0: it is not there"),
        ([finished(0, 0)], aborted(0, 0), "rollout 0 on engine 0: it is not there"),
        ([], aborted(7), "rollout 7 on engine 0: it is not there"),
        ([], aborted(0, engine=1), "rollout 0 on engine 1: it is not there"),
        ([], aborted(0, 1), "tokens of versions 1 to 1"),
        ([], scored(0), "rollout 0: it is not being scored"),
        ([], scored(7), "rollout 7: it is not being scored"),
        (done(0), scored(0), "rollout 0: it is not being scored"),
        (TRAINING, scored(1), "rollout 1: it is not being scored"),
        ([], RolloutPreempted(7, 0, 1), "version 0"),
        ([], RolloutPreempted(0, 1, 1), "version 0"),
        (done(0), RolloutPreempted(0, 0, 1), "version 0"),
        ([], failed(7), "rollout 7 on engine 0: it is not there"),
        ([], failed(0, engine=1), "rollout 0 on engine 1: it is not there"),
        ([], failed(0, engine=None), "rollout 0: it is not being scored"),
        (done(0), failed(0), "rollout 0 on engine 0: it is not there"),
        (done(0), failed(0, engine=None), "rollout 0: it is not being scored"),
        ([failed(0)], failed(0), "rollout 0 on engine 0: it is not there"),
        ([], trained(1), "version 0, trainer IDLE"),
        (TRAINING, trained(0), "version 0, trainer TRAINING"),
        (TRAINING, trained(2), "version 0, trainer TRAINING"),
        (PUBLISHING, trained(2), "version 1, trainer PUBLISHING"),
        (TRAINING, published(0), "trainer TRAINING"),
        (PUBLISHING, published(2), "trainer PUBLISHING, published 1"),
        (LOADING, published(1), "trainer IDLE, published 1"),
        ([], loaded(0), "published 0, engines still loading 0"),
        ([], loaded(1), "published 0, engines still loading 0"),
        (PUBLISHING, loaded(2), "published 1, engines still loading 1"),
        (PUBLISHING, loaded(1, engine=1), "published 1, engines still loading 1"),
        (PUBLISHING, loaded(1, engine=-1), "published 1, engines still loading 1"),
        (LOADED, loaded(1), "published 1, engines still loading 0"),
    ],
)
def test_an_impossible_event_is_refused_and_changes_nothing(history, event, state):
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
