"""Rollouts given up without an optimizer step: a run says so once, and ends when there are too many."""

from __future__ import annotations

from collections.abc import Callable

from pipelinerl.errors import RunFailedError
from pipelinerl.scheduler.base import Scheduler
from pipelinerl.scheduler.events import DiscardReason

MANY_ROLLOUTS, MANY_BATCHES = 4000, 10
"""Rollouts given up without a step, and their train batches, above which a run says so (counts)."""
_CAUSES = {
    DiscardReason.STALE: "they break scheduler.max_lag; raise it, or set scheduler.on_stale = 'train'",
    DiscardReason.NO_SIGNAL: "rewards of a group are equal; change the task or scheduler.filter_no_signal",
    DiscardReason.QUEUE_FULL: "the ready queue is full; raise scheduler.ready_queue_size or change scheduler.on_full",
    DiscardReason.SIBLING_FAILED: "a rollout of the group fails; mend train.task, or raise its time-outs",
}


class StallWatch:
    """Says once that many rollouts have been given up without an optimizer step (mutable)."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn, self._warned = warn, False
        self._version, self._since_s, self._before = -1, 0.0, 0  # at the first look after a step or a resume

    def look(self, time_s: float, scheduler: Scheduler) -> None:
        """Look at a scheduler that has given rollouts up at ``time_s``."""
        number = scheduler.num_given_up
        if scheduler.version != self._version:
            self._version, self._since_s, self._before = scheduler.version, time_s, number
        many = max(MANY_ROLLOUTS, MANY_BATCHES * scheduler.settings.train_batch_size)
        if number > many and time_s > self._since_s and not self._warned:
            self._warned = True
            rate = f"{(number - self._before) / (time_s - self._since_s):,.1f} per second"
            self._warn(f"{number:,} rollouts given up without an optimizer step, {rate}: {_cause(scheduler)}")


def stalled(scheduler: Scheduler) -> RunFailedError:
    """Return the error of a run that its scheduler has stopped as stalled."""
    limit = f"stalled: more than scheduler.discard_limit = {scheduler.settings.stall_limit} rollouts were given up"
    return RunFailedError(f"{limit} without an optimizer step in between: {_cause(scheduler)}")


def _cause(scheduler: Scheduler) -> str:
    return _CAUSES[scheduler.given_up.most_common(1)[0][0]]
