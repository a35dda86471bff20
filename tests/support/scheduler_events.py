"""Schedulers, events and commands in few words, for hand-made histories."""

from __future__ import annotations

from pipelinerl.config.run import SchedulerConfig
from pipelinerl.scheduler.events import (
    DiscardRollouts,
    PublishWeights,
    RolloutAborted,
    RolloutFailed,
    RolloutFinished,
    RolloutScored,
    StartRollout,
    StartTraining,
    TrainingFinished,
    VersionSpans,
    WeightsLoaded,
    WeightsPublished,
    WeightUpdate,
)
from pipelinerl.scheduler.kinds import make_scheduler


def make(*, optimizer_steps=10, num_engines=1, group_size=1, environments=None, kv_cache_tokens=None, **settings):
    config = SchedulerConfig(**{"train_batch_size": 2, "generation_batch_size": 4, **settings})
    return make_scheduler(
        config,
        optimizer_steps=optimizer_steps,
        num_engines=num_engines,
        group_size=group_size,
        environments=environments,
        kv_cache_tokens=kv_cache_tokens,
    )


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
