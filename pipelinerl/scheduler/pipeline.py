"""The scheduler: events in, commands out; no clock, no I/O, no randomness.

Theory of operation. Two machines run side by side and meet in the ready queue.

* Rollouts: a group is *admitted*, its rollouts start where there is room, finish, are scored; when all
  are scored the group is *ready* (or discarded, if its rewards carry no signal).
* Trainer: ``IDLE -> TRAINING -> IDLE`` per micro-batch; after the last micro-batch of a step the
  version rises by one, and every ``publish_every`` versions the weights are published (``PUBLISHING``) unless the
  previous publication is still on its way to some engine; then the publication is made up for, with the version
  there is by then, as soon as that has arrived.

``handle`` books the event, then decides by looking at the books only. What differs between conventional
RL (Algorithm 1), one-step-off RL and PipelineRL (Algorithm 2) is three answers: may a group be admitted, which
ready groups form the next micro-batch, and is it time to publish. The first two, whose lag is fixed, and
conventional RL with partial rollouts are in ``phases``; from here on this is about PipelineRL.

==================  ================================  ==================================================
waiting             waits for                         is unblocked by
==================  ================================  ==================================================
admission           a slot; room in the ready queue;  ``RolloutFinished``, ``StartTraining``,
                    the lag gate (``max_lag``)        ``WeightsLoaded``, a discarded group
trainer             a micro-batch of ready groups;    ``RolloutScored``
                    a batch that is safe for the lag
publication         all engines at the last version   ``WeightsLoaded``
==================  ================================  ==================================================

The bound ``max_lag`` on every trained token, kept by waiting (``on_stale = train``). Write v for the
version the next batch trains at, e for the oldest version on any engine, m for ``max_lag``. A group
admitted now has no token older than e, so it is in time for the batches at versions v .. e + m. Call a
group *live* from admission until it is taken for training or doomed.

    gate:  admit only if  live + group_size <= B * (e + m - v + 1)
    safe:  take a batch only if afterwards, for every version x,
           (live rollouts with bound <= x) <= B * (x + m - v)

The gate keeps ``live with bound <= x <= B * (x + m - v + 1)`` for all x, since bounds only rise; if all
live groups were ready, taking the B oldest would therefore be safe. While it is not, the missing ones are
in flight, they will finish, and no rule stops admitted rollouts from starting: so the trainer waits, but
not for ever. Nothing of this depends on when weights are published. What does is that there is enough to wait
for. If less than B rollouts are live, the trainer will be idle; then a publication that is due goes out, or was
on its way, and arrives. With K for ``publish_every``, one is due from the first multiple of K above the last
published version on: so all engines will reach a version above v - K, the gate admits at least B * (m - K + 2)
live rollouts, and that is a batch, since m >= K - 1 (``RunConfig`` refuses less: the batch before a publication
is K - 1 versions ahead of the engines). With K = 1 the engines reach v. What is left of a batch that was taken in
part is admitted likewise. Right after a publication has arrived at v the gate admits up to B * (m + 1) live
rollouts, and each step takes B of them while v rises by one: so B * (m + 1), less those carried over, are
admitted until the next. Groups that are discarded leave ``live``, so filtering never uses up the allowance.

The bounded ready queue, ``on_full = wait``: a group is admitted only if the rollouts in flight and those
ready are then at most all slots and the ready queue together. So while engines are full,
``ready_queue_size`` rollouts may be ready, and each slot that stays empty lends its place to one more; each
batch taken lets one batch of new rollouts in. (Stopping and resuming at a number of *ready* rollouts instead
makes engines drain and refill in turns: what is ready now was admitted a whole answer ago.)

With ``drop`` and ``requeue`` there is no gate; what is too old is doomed. What is admitted once the engines have
come above v - K is not, while v is the next version: so here too a batch comes together. In every mode a group is
looked at once more, by the versions its engines reported, before it is trained on.
"""

from __future__ import annotations

import heapq

from pipelinerl.scheduler.base import Scheduler, SchedulerSettings
from pipelinerl.scheduler.events import Command, DiscardReason, OnFull, OnStale
from pipelinerl.scheduler.rollouts import RolloutGroup


class PipelineScheduler(Scheduler):
    """Algorithm 2: engines always generate, the trainer always trains, weights are updated in flight."""

    def __init__(self, settings: SchedulerSettings, *, optimizer_steps: int, num_engines: int, group_size: int) -> None:
        super().__init__(settings, optimizer_steps=optimizer_steps, num_engines=num_engines, group_size=group_size)
        # Ready groups, first to be trained on first: in order of arrival, or oldest first under max_lag.
        self._ready: list[tuple[int, int, RolloutGroup]] = []
        self._ready_by_bound: dict[int, int] = {}
        self._num_enqueued = 0
        self._waits = settings.max_lag is not None and settings.on_stale is OnStale.TRAIN
        self._drops_oldest = settings.on_full is OnFull.DROP_OLDEST
        self._room = num_engines * settings.generation_batch_size + settings.ready_queue_limit

    def _may_admit(self) -> bool:
        settings, size = self.settings, self._pool.group_size
        if not self._drops_oldest and self.num_ready + self._pool.num_in_flight + size > self._room:
            return False
        if not self._waits or settings.max_lag is None:
            return True
        num_batches = self._oldest_loaded + settings.max_lag - self._next_version + 1
        num_taken = self._num_taken % settings.train_batch_size
        return self.num_live + size <= settings.train_batch_size * num_batches - num_taken

    def _enqueue(self, group: RolloutGroup, commands: list[Command]) -> None:
        size = self._pool.group_size
        self._know_age(group)
        age = group.oldest_bound if self.settings.max_lag is not None else 0
        heapq.heappush(self._ready, (age, self._num_enqueued, group))
        self._num_enqueued += 1
        self.num_ready += size
        self._ready_by_bound[group.oldest_bound] = self._ready_by_bound.get(group.oldest_bound, 0) + size
        self._discard_stale_ready(commands)
        if self._drops_oldest:
            while self.num_ready > self.settings.ready_queue_limit:
                self._discard_first(DiscardReason.QUEUE_FULL, commands)

    def _take_micro_batch(self) -> list[int]:
        size = self.settings.micro_batch
        if self.num_ready < size or (self._waits and not self._is_safe()):
            return []
        return [
            rollout_id for _ in range(size // self._pool.group_size) for rollout_id in self._take(self._pop_ready())
        ]

    def _may_publish(self) -> bool:
        every = self.settings.publish_every
        return self.version // every > self._published // every

    def _doom_stale(self, commands: list[Command]) -> None:
        if self.settings.max_lag is None or self._waits:
            return
        self._discard_stale_ready(commands)
        oldest = self._next_version - self.settings.max_lag
        for group in list(self._pool.groups.values()):
            if group.ready or group.doomed:
                continue
            if group.oldest_bound >= oldest:
                break  # in order of admission bounds never fall, until a group is ready
            if self._pool.oldest(group) < oldest:
                self._doom(group, DiscardReason.STALE, commands)

    @property
    def _next_version(self) -> int:
        """Version that the next micro-batch is trained at."""
        return self.version + (self._num_taken == self.settings.train_batch_size)

    def _is_safe(self) -> bool:
        """Return whether all other live rollouts can still be trained in time after the next micro-batch.

        See the top of this file. O(max_lag): the micro-batch is the oldest of what is ready, so counts do.
        """
        assert self.settings.max_lag is not None
        batch, to_take = self.settings.train_batch_size, self.settings.micro_batch
        left_in_step = batch - self._num_taken - to_take
        num_due = 0
        for bound in sorted(self._live_by_bound):
            num_chosen = min(to_take, self._ready_by_bound.get(bound, 0))
            to_take -= num_chosen
            num_due += self._live_by_bound[bound] - num_chosen
            if num_due > batch * (bound + self.settings.max_lag - self.version) + left_in_step:
                return False
        return True

    def _pop_ready(self) -> RolloutGroup:
        _, _, group = heapq.heappop(self._ready)
        count = self._ready_by_bound[group.oldest_bound] - self._pool.group_size
        if count:
            self._ready_by_bound[group.oldest_bound] = count
        else:
            del self._ready_by_bound[group.oldest_bound]
        return group

    def _discard_stale_ready(self, commands: list[Command]) -> None:
        """Discard the ready groups that the next batch comes too late for."""
        max_lag = self.settings.max_lag
        while max_lag is not None and self._ready and self._next_version - self._ready[0][0] > max_lag:
            self._discard_first(DiscardReason.STALE, commands)

    def _discard_first(self, reason: DiscardReason, commands: list[Command]) -> None:
        self.num_ready -= self._pool.group_size
        self._doom(self._pop_ready(), reason, commands)
