"""PipelineRL's scheduler (Algorithm 2), and how all schedulers work: events in, commands out.

Theory of operation. Two machines run side by side and meet in the ready queue.

* Rollouts: a group is *admitted*, its rollouts start where there is room, finish, are scored; when all
  are scored the group is *ready* (or discarded, if its rewards carry no signal).
* Trainer: ``IDLE -> TRAINING -> IDLE`` per micro-batch; after the last micro-batch of a step the
  version rises by one, and every ``publish_every`` versions the weights are published (``PUBLISHING``). If an engine
  has not yet loaded the previous publication, the newest version is published as soon as all have.

``handle`` records the event, then decides by looking at the state only. Each kind of schedule says whether a group may
be admitted, where a ready group goes, which rollouts form the next micro-batch, whether it is time to publish, and what
is stale. The kinds that generate in rounds are in ``rounds``; the rest of this text is about PipelineRL.

==================  ================================  ==================================================
waiting             waits for                         is unblocked by
==================  ================================  ==================================================
admission           a slot; room in the ready queue;  ``RolloutFinished``, ``RolloutScored``,
                    the lag gate (``max_lag``)        ``StartTraining``, ``WeightsLoaded``,
                                                      a discarded group
trainer             a micro-batch of ready groups;    ``RolloutScored``
                    a batch that is safe for the lag
publication         all engines at the last version   ``WeightsLoaded``
==================  ================================  ==================================================

The bound ``max_lag``, kept by waiting, and why the trainer never waits for ever: ``LagBound`` in ``base``.

The bounded ready queue, ``on_full = wait``: a group is admitted only if then

    open + ready <= slots + ready_queue_size =: R,

where the *open* ones are in flight, between two turns, or being scored; with environments, R has them in place of slots
if they are more. The slots are those of engines that are not leaving: when some leave, R falls below the sum, and
nothing is admitted until enough has ended.

So while engines are full, ``ready_queue_size`` rollouts may be ready or being scored, and each slot that stays empty
lends its place to one more; each batch taken lets one batch of new rollouts in. (Stopping and resuming at a number of
*ready* rollouts instead makes engines drain and refill in turns: what is ready now was admitted a whole answer ago.)
A scored rollout whose siblings are not all scored is in no term: long answers would keep their siblings' slots empty.
But one of them is in flight or being scored; so of groups of n at most n R rollouts are live. Until the next admission
the sum cannot come above R and the scored rollouts that waited for siblings when it was made. Alone (n = 1) none waits,
and the sum never exceeds R. If the sum keeps a group out, something of it ends or is taken: were all of it ready, there
would be more than ``ready_queue_size`` - n >= B - n of them, so B, which is a multiple of n.

With ``drop_oldest``, and where rollouts are partial, ready ones do not count: open <= R. This bounds the rollouts being
scored, for which engines wait then; some of them are scored, and a group comes in.

With ``drop`` and ``requeue`` there is no gate; groups that are too old are cancelled. While v is the next version, a
group admitted after the engines have come above v - K (K for ``publish_every``) is not too old: so here too a batch
comes together. In every mode the lag of a group is checked again before it is trained on, by the versions that its
engines reported.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Unpack

from pipelinerl.scheduler.base import Scheduler, SchedulerSettings, Sizes
from pipelinerl.scheduler.events import Command, DiscardReason, OnFull, OnStale
from pipelinerl.scheduler.rollouts import RolloutGroup


class PipelineScheduler(Scheduler):
    """Algorithm 2: engines always generate, the trainer always trains, weights are updated in flight."""

    def __init__(self, settings: SchedulerSettings, **sizes: Unpack[Sizes]) -> None:
        super().__init__(settings, **sizes)
        # Ready groups, first to be trained on first: in order of arrival, or oldest first under max_lag.
        self._ready: list[tuple[int, int, RolloutGroup]] = []
        self._ready_by_bound: dict[int, int] = {}
        self._num_enqueued = 0
        self._waits = settings.max_lag is not None and settings.on_stale is OnStale.TRAIN

    def may_admit(self) -> bool:
        """Return whether ready queue and lag gate have room for a group."""
        settings, size = self.settings, self.group_size
        beside = 0 if settings.on_full is OnFull.DROP_OLDEST else self.num_ready
        if self._pool.num_open + beside + size > self.room:
            return False
        if not self._waits:
            return True
        left = settings.train_batch_size - self.num_taken % settings.train_batch_size
        return self.lag_bound.admits(size, bound=self.oldest_loaded, version=self._next_version, left=left)

    def enqueue(self, group: RolloutGroup, commands: list[Command]) -> None:
        """Queue by arrival, or oldest first under ``max_lag``; drop stale groups and the first of a full queue."""
        size = self.group_size
        self._know_age(group)
        age = group.oldest_bound if self.settings.max_lag is not None else 0
        heapq.heappush(self._ready, (age, self._num_enqueued, group))
        self._num_enqueued += 1
        self._ready_by_bound[group.oldest_bound] = self._ready_by_bound.get(group.oldest_bound, 0) + size
        self._discard_stale_ready(commands)
        if self.settings.on_full is OnFull.DROP_OLDEST:
            while self.num_ready > self.settings.ready_queue_limit:
                self._discard_first(DiscardReason.QUEUE_FULL, commands)

    def take_micro_batch(self) -> Sequence[RolloutGroup]:
        """Take the first groups, once the other live ones can still be trained in time."""
        if self.num_ready < self.settings.micro_batch or (self._waits and not self._is_safe()):
            return ()
        return [self._pop_ready() for _ in range(self.groups_per_micro_batch)]

    def may_publish(self) -> bool:
        """Return whether a multiple of ``publish_every`` has been reached since the last publication."""
        every = self.settings.publish_every
        return self.version // every > self.published // every

    def cancel_stale(self, commands: list[Command]) -> None:
        """Cancel groups, ready or not, that exceed ``max_lag`` in the next batch."""
        if self.settings.max_lag is None or self._waits:
            return
        self._discard_stale_ready(commands)
        oldest = self._next_version - self.settings.max_lag
        for group in list(self._pool.groups.values()):
            if group.ready or group.cancelled:
                continue
            if group.oldest_bound >= oldest:
                break  # in order of admission bounds never fall, until a group is ready
            if self._pool.oldest(group) < oldest:
                self._cancel(group, DiscardReason.STALE, commands)

    @property
    def _next_version(self) -> int:
        return self.version + (self.num_taken == self.settings.train_batch_size)

    def _is_safe(self) -> bool:
        to_take = self.settings.micro_batch
        left = self.settings.train_batch_size - self.num_taken - to_take
        taken: dict[int, int] = {}
        for bound in sorted(self._ready_by_bound):
            taken[bound] = min(to_take, self._ready_by_bound[bound])
            to_take -= taken[bound]
        return self.lag_bound.is_safe(taken, version=self.version, left=left)

    def _pop_ready(self) -> RolloutGroup:
        _, _, group = heapq.heappop(self._ready)
        count = self._ready_by_bound[group.oldest_bound] - self.group_size
        if count:
            self._ready_by_bound[group.oldest_bound] = count
        else:
            del self._ready_by_bound[group.oldest_bound]
        return group

    def _discard_stale_ready(self, commands: list[Command]) -> None:
        max_lag = self.settings.max_lag
        while max_lag is not None and self._ready and self._next_version - self._ready[0][0] > max_lag:
            self._discard_first(DiscardReason.STALE, commands)

    def _discard_first(self, reason: DiscardReason, commands: list[Command]) -> None:
        self.num_ready -= self.group_size
        self._cancel(self._pop_ready(), reason, commands)
