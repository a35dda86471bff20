"""Learn again from a trace alone: without engines or a scheduler, from the events and commands they recorded."""

from __future__ import annotations

from pipelinerl.errors import ConfigError, RunFailedError
from pipelinerl.records.trace import Trace
from pipelinerl.scheduler.events import (
    DiscardRollouts,
    PublishWeights,
    RolloutFinished,
    RolloutPreempted,
    StartRollout,
    StartTraining,
    TurnFinished,
    VersionSpans,
    WeightUpdate,
)
from sim.learning.loop import Learner, one_thread


def relearn(trace: Trace) -> Learner:
    """Return the learner of a recorded run as it was at the end, with the weights of every version.

    Tokens are sampled again by the versions that the spans name, and trained on in the recorded batches. The weights
    equal the run's to the last bit (``weights_sha256`` of its summary), also with preemptions or turns: the trace
    records where caches are refilled. A run that diverged is learned again up to the divergence.

    Raises:
        ConfigError: If the run had no policy.
        RunFailedError: If a rollout gets another length than it had: the trace is not complete, or another torch or
            processor sampled it.
        TraceError: If the trace is broken.
    """
    if trace.config.policy is None:
        raise ConfigError("the trace is of a run without [policy]: there is nothing to learn again")
    recompute = trace.config.scheduler.weight_update is not WeightUpdate.KEEP
    finished: dict[int, VersionSpans] = {}
    refills: dict[int, set[int]] = {}
    with one_thread():
        learner = Learner(trace.config)
        for record in trace.records():
            match record.event or record.command:
                case StartRollout() as command:
                    learner.answers.ask(command.rollout_id, command.prompt_id)
                case RolloutPreempted() | TurnFinished() as event:
                    refills.setdefault(event.rollout_id, set()).add(
                        event.num_tokens if isinstance(event, RolloutPreempted) else event.spans.num_tokens
                    )
                case RolloutFinished() as event:
                    finished[event.rollout_id] = event.spans
                case DiscardRollouts() as command:
                    for rollout_id in command.rollout_ids:
                        finished.pop(rollout_id, None)
                        refills.pop(rollout_id, None)
                        learner.forget(rollout_id)
                case StartTraining() as command:
                    spans = {rollout_id: finished.pop(rollout_id) for rollout_id in command.rollout_ids}
                    refilled = {rollout_id: refills.pop(rollout_id, set()) for rollout_id in spans}
                    learner.answers.restore(spans, refilled, recompute=recompute)
                    for rollout_id in command.rollout_ids:
                        _check_length(learner, rollout_id, spans[rollout_id].num_tokens)
                        learner.finished(rollout_id, spans[rollout_id])
                    try:
                        learner.train(command)
                    except RunFailedError:
                        break  # the run ended here too, with the weights before this step
                case PublishWeights() as command:
                    learner.publish(command.version, oldest=0)
    return learner


def _check_length(learner: Learner, rollout_id: int, num_tokens: int) -> None:
    again = learner.answers.answer(rollout_id).num_generated
    if again != num_tokens:
        raise RunFailedError(
            f"different: rollout {rollout_id} has {num_tokens} tokens in the trace and {again} when it is sampled "
            "again: the trace is not complete, or another torch or processor sampled it"
        )
