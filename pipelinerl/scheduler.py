"""The scheduler: events in, commands out; no clock, no I/O, no randomness.

Theory of operation. Two machines run side by side and meet in the ready queue.

* Rollouts: a group is *admitted*, its rollouts start where there is room, finish, are scored; when all
  are scored the group is *ready* (or discarded, if its rewards carry no signal).
* Trainer: ``IDLE -> TRAINING -> IDLE`` per micro-batch; after the last micro-batch of a step the
  version rises by one, and every ``publish_every`` versions the weights are published (``PUBLISHING``) unless the
  previous publication is still on its way to some engine; then the publication is made up for, with the version
  there is by then, as soon as that has arrived.

``handle`` books the event, then decides by looking at the books only. What differs between conventional
RL (Algorithm 1) and PipelineRL (Algorithm 2) is three answers: may a group be admitted, which ready
groups form the next micro-batch, and is it time to publish.

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
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum, auto
from typing import Protocol, assert_never

from pipelinerl.errors import SchedulerError
from pipelinerl.events import (
    Command,
    DiscardReason,
    Event,
    OnFull,
    OnStale,
    PublishWeights,
    RolloutAborted,
    RolloutFailed,
    RolloutFinished,
    RolloutScored,
    StartTraining,
    Stop,
    StopReason,
    TrainingFinished,
    WeightsLoaded,
    WeightsPublished,
    WeightUpdate,
)
from pipelinerl.pool import Group, RolloutPool


class SchedulerSettings(Protocol):
    """What a scheduler reads of its configuration (``SchedulerConfig`` satisfies it)."""

    @property
    def kind(self) -> str:
        """``pipeline`` or ``conventional``."""

    @property
    def train_batch_size(self) -> int:
        """Sequences per optimizer step (count). Paper symbol B."""

    @property
    def generation_batch_size(self) -> int:
        """Sequences in progress per engine, at most (count). Paper symbol H."""

    @property
    def optimizer_steps_per_rl_step(self) -> int:
        """Optimizer steps per RL step (count), conventional only. Paper symbol G."""

    @property
    def publish_every(self) -> int:
        """Optimizer steps from one publication to the next (count), pipeline only."""

    @property
    def micro_batch(self) -> int:
        """Sequences per micro-batch (count)."""

    @property
    def max_lag(self) -> int | None:
        """Largest lag of any trained token (optimizer steps)."""

    @property
    def weight_update(self) -> WeightUpdate:
        """What happens to rollouts in progress when weights arrive."""

    @property
    def on_stale(self) -> OnStale:
        """How ``max_lag`` is kept."""

    @property
    def ready_queue_limit(self) -> int:
        """Finished rollouts that may wait for the trainer (sequences)."""

    @property
    def on_full(self) -> OnFull:
        """What happens when the ready queue is full."""

    @property
    def filter_no_signal(self) -> bool:
        """Whether groups with equal rewards are discarded."""

    @property
    def discard_limit(self) -> int:
        """Rollouts given up between two optimizer steps before the run counts as stalled (count)."""


class Trainer(Enum):
    """What the trainer does, as far as the scheduler knows."""

    IDLE = auto()
    """It waits for a command."""
    TRAINING = auto()
    """It works on a micro-batch."""
    PUBLISHING = auto()
    """It sends its weights."""


class Scheduler(ABC):
    """What conventional and pipelined RL have in common."""

    def __init__(self, settings: SchedulerSettings, *, optimizer_steps: int, num_engines: int, group_size: int) -> None:
        self.settings = settings
        self.optimizer_steps = optimizer_steps
        self.version = 0  # optimizer steps done
        self.stopped: StopReason | None = None
        self.trainer = Trainer.IDLE
        self.num_ready = 0  # rollouts in the ready queue
        self.num_live = 0  # rollouts of groups admitted, not yet taken for training, not doomed
        self._live_by_bound: dict[int, int] = {}  # the same by version that no token of theirs is older than
        self._pool = RolloutPool(
            num_engines=num_engines, slots_per_engine=settings.generation_batch_size, group_size=group_size
        )
        self._num_taken = 0  # rollouts of the current step already given to the trainer
        self._loaded = [0] * num_engines  # version each engine has reported
        self._published = 0  # last version published
        self._num_loading = 0  # engines that have not yet reported it
        self._num_doomed_at_step = 0  # doomed rollouts when the last optimizer step ended

    @property
    def num_in_flight(self) -> int:
        """Rollouts in progress on the engines (count)."""
        return self._pool.num_in_flight

    @property
    def loaded(self) -> tuple[int, ...]:
        """Version that each engine has reported to have loaded (optimizer steps done)."""
        return tuple(self._loaded)

    def start(self) -> Sequence[Command]:
        """Return the first commands."""
        commands: list[Command] = []
        self._decide(commands)
        return commands

    def handle(self, event: Event) -> Sequence[Command]:
        """Book an event and return what to do now.

        Args:
            event: What has happened in the world.

        Returns:
            Commands, to be carried out in this order. None after ``Stop``, whatever is reported.

        Raises:
            SchedulerError: If the event cannot have happened: the world has a fault.
        """
        if self.stopped is not None:
            return ()
        commands: list[Command] = []
        # These two come once per rollout; `match` would cost three times as much as `isinstance`.
        if isinstance(event, RolloutFinished):
            self._pool.finish(event.rollout_id, event.engine, event.spans)
            self._fill(commands)  # all that a free slot can change
            return commands
        if isinstance(event, RolloutScored):
            group = self._pool.score(event.rollout_id, event.reward, commands)
            if group is None:
                return commands
            self._group_scored(group, commands)
            self._decide(commands)
            return commands
        match event:
            case TrainingFinished():
                self._training_finished(event)
            case WeightsPublished():
                if self.trainer is not Trainer.PUBLISHING or event.version != self._published:
                    raise self._impossible(event)
                self.trainer = Trainer.IDLE
            case WeightsLoaded():
                self._weights_loaded(event)
            case RolloutAborted():
                self._pool.abort(event.rollout_id, event.engine, event.spans)
            case RolloutFailed():
                group = self._pool.fail(event.rollout_id)
                if group is not None:
                    self._doom(group, DiscardReason.SIBLING_FAILED, commands)
            case _:
                assert_never(event)
        self._decide(commands)
        return commands

    # ----------------------------------------------------------------------- what the kinds differ in

    @abstractmethod
    def _may_admit(self) -> bool:
        """Return whether a new group may be admitted."""

    @abstractmethod
    def _enqueue(self, group: Group, commands: list[Command]) -> None:
        """Put a ready group into the ready queue."""

    @abstractmethod
    def _take_micro_batch(self) -> list[int]:
        """Take the next micro-batch off the ready queue: its rollouts, or none while there is none."""

    @abstractmethod
    def _may_publish(self) -> bool:
        """Return whether this version is one to publish."""

    @abstractmethod
    def _doom_stale(self, commands: list[Command]) -> None:
        """Give up what the batch after the one just started will come too late for."""

    # -------------------------------------------------------------------------------------- decisions

    def _decide(self, commands: list[Command]) -> None:
        """Look at the books and append what is to be done."""
        if self.version == self.optimizer_steps:
            self._stop(StopReason.DONE, commands)
            return
        if self.trainer is Trainer.IDLE:
            if self._published < self.version and not self._num_loading and self._may_publish():
                self._publish(commands)
            else:
                self._train(commands)
        self._fill(commands)
        if self._pool.num_doomed - self._num_doomed_at_step > self.settings.discard_limit:
            self._stop(StopReason.STALLED, commands)

    def _fill(self, commands: list[Command]) -> None:
        """Start rollouts while there is room and something to start."""
        pool = self._pool
        while pool.num_free:
            if pool.starting is None and not pool.interrupted:
                if not self._may_admit():
                    return
                bound = min(self._loaded)
                pool.admit(bound)
                self._count_live(bound, pool.group_size)
            commands.append(pool.start_one())

    def _train(self, commands: list[Command]) -> None:
        """Start the next micro-batch, if there is one."""
        rollout_ids = self._take_micro_batch()
        if not rollout_ids:
            return
        self._num_taken += len(rollout_ids)
        completes_step = self._num_taken == self.settings.train_batch_size
        self.trainer = Trainer.TRAINING
        commands.append(StartTraining(tuple(rollout_ids), self.version, completes_step))
        if completes_step:
            self._doom_stale(commands)

    def _publish(self, commands: list[Command]) -> None:
        """Send the current version to all engines."""
        self.trainer = Trainer.PUBLISHING
        self._published = self._pool.newest_version = self.version
        self._num_loading = len(self._loaded)
        if self.settings.weight_update is WeightUpdate.WAIT:
            for engine in range(len(self._loaded)):
                self._pool.hold(engine)
        commands.append(PublishWeights(self.version, self.settings.weight_update))

    def _stop(self, reason: StopReason, commands: list[Command]) -> None:
        self.stopped = reason
        commands.append(Stop(reason))

    # ------------------------------------------------------------------------------------------ books

    def _group_scored(self, group: Group, commands: list[Command]) -> None:
        """Queue a group whose rollouts are all scored, or discard it."""
        if self.settings.filter_no_signal and not group.rewards_differ:
            self._doom(group, DiscardReason.NO_SIGNAL, commands)
        else:
            self._enqueue(group, commands)

    def _doom(self, group: Group, reason: DiscardReason, commands: list[Command]) -> None:
        """Give a live group up; have its prompt tried again if that is the wish for stale ones."""
        self._count_live(group.oldest_bound, -self._pool.group_size)
        self._pool.doom(group, reason, commands)
        if reason is DiscardReason.STALE and self.settings.on_stale is OnStale.REQUEUE:
            self._pool.again(group)

    def _take(self, group: Group) -> list[int]:
        """Take a ready group for training."""
        self._count_live(group.oldest_bound, -self._pool.group_size)
        self.num_ready -= self._pool.group_size
        return self._pool.take(group)

    def _count_live(self, bound: int, change: int) -> None:
        """Count live rollouts, in all and by the version bound of their group."""
        self.num_live += change
        count = self._live_by_bound.get(bound, 0) + change
        if count:
            self._live_by_bound[bound] = count
        else:
            del self._live_by_bound[bound]

    def _training_finished(self, event: TrainingFinished) -> None:
        step_done = self._num_taken == self.settings.train_batch_size
        if self.trainer is not Trainer.TRAINING or event.version != self.version + step_done:
            raise self._impossible(event)
        self.trainer = Trainer.IDLE
        if step_done:
            self.version = event.version
            self._num_taken = 0
            self._num_doomed_at_step = self._pool.num_doomed

    def _weights_loaded(self, event: WeightsLoaded) -> None:
        loading = event.version == self._published and 0 <= event.engine < len(self._loaded)
        if not loading or self._loaded[event.engine] == event.version:
            raise self._impossible(event)
        self._loaded[event.engine] = event.version
        self._num_loading -= 1
        self._pool.release(event.engine)

    def _impossible(self, event: Event) -> SchedulerError:
        return SchedulerError(
            f"cannot handle {event}: version {self.version}, trainer {self.trainer.name}, "
            f"published {self._published}, engines still loading {self._num_loading}"
        )


class PipelineScheduler(Scheduler):
    """Algorithm 2: engines always generate, the trainer always trains, weights are updated in flight."""

    def __init__(self, settings: SchedulerSettings, *, optimizer_steps: int, num_engines: int, group_size: int) -> None:
        super().__init__(settings, optimizer_steps=optimizer_steps, num_engines=num_engines, group_size=group_size)
        # Ready groups, first to be trained on first: in order of arrival, or oldest first under max_lag.
        self._ready: list[tuple[int, int, Group]] = []
        self._ready_by_bound: dict[int, int] = {}
        self._num_enqueued = 0
        self._waits = settings.max_lag is not None and settings.on_stale is OnStale.TRAIN
        self._room = num_engines * settings.generation_batch_size + settings.ready_queue_limit

    def _may_admit(self) -> bool:
        settings, size = self.settings, self._pool.group_size
        if settings.on_full is OnFull.WAIT and self.num_ready + self._pool.num_in_flight + size > self._room:
            return False
        if not self._waits or settings.max_lag is None:
            return True
        num_batches = min(self._loaded) + settings.max_lag - self._next_version + 1
        num_taken = self._num_taken % settings.train_batch_size
        return self.num_live + size <= settings.train_batch_size * num_batches - num_taken

    def _enqueue(self, group: Group, commands: list[Command]) -> None:
        size = self._pool.group_size
        self._count_live(group.oldest_bound, -size)  # from now on by what the engines have reported
        group.oldest_bound = group.oldest_reported
        self._count_live(group.oldest_bound, size)
        age = group.oldest_bound if self.settings.max_lag is not None else 0
        heapq.heappush(self._ready, (age, self._num_enqueued, group))
        self._num_enqueued += 1
        self.num_ready += size
        self._ready_by_bound[group.oldest_bound] = self._ready_by_bound.get(group.oldest_bound, 0) + size
        self._discard_stale_ready(commands)
        if self.settings.on_full is OnFull.DROP_OLDEST:
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

    def _pop_ready(self) -> Group:
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


class ConventionalScheduler(Scheduler):
    """Algorithm 1: generate what G optimizer steps need, make the G steps, publish, and again.

    Rollouts are split into batches in order of admission, not of arrival: otherwise the first batches
    would hold the short answers and the last ones the long. The last RL step may have fewer steps.
    """

    def __init__(self, settings: SchedulerSettings, *, optimizer_steps: int, num_engines: int, group_size: int) -> None:
        super().__init__(settings, optimizer_steps=optimizer_steps, num_engines=num_engines, group_size=group_size)
        self._ready: list[Group] = []
        self._num_to_train = 0  # rollouts of this RL step not yet given to the trainer; 0 while generating

    def _may_admit(self) -> bool:
        training = self._num_to_train or self._num_taken
        up_to_date = self._published == self.version and not self._num_loading
        return not training and up_to_date and self.num_live < self._num_needed

    def _enqueue(self, group: Group, commands: list[Command]) -> None:  # noqa: ARG002 - discards nothing
        self._ready.append(group)
        self.num_ready += self._pool.group_size
        if self.num_ready == self._num_needed:
            self._num_to_train = self.num_ready
            self._ready.sort(key=lambda one: one.group_id, reverse=True)  # taken from the end

    def _take_micro_batch(self) -> list[int]:
        if not self._num_to_train:
            return []
        self._num_to_train -= self.settings.micro_batch
        num_groups = self.settings.micro_batch // self._pool.group_size
        return [rollout_id for _ in range(num_groups) for rollout_id in self._take(self._ready.pop())]

    def _may_publish(self) -> bool:
        return not self._num_to_train and not self._num_taken

    def _doom_stale(self, commands: list[Command]) -> None:
        """Nothing: all rollouts of an RL step are trained in it, at a lag below G."""

    @property
    def _num_needed(self) -> int:
        """Rollouts of the RL step that begins at this version (count)."""
        steps = min(self.settings.optimizer_steps_per_rl_step, self.optimizer_steps - self.version)
        return steps * self.settings.train_batch_size


def make_scheduler(
    settings: SchedulerSettings, *, optimizer_steps: int, num_engines: int, group_size: int
) -> Scheduler:
    """Return the scheduler that the settings ask for.

    Args:
        settings: The ``scheduler`` table of a run file, or anything with the same attributes.
        optimizer_steps: Optimizer steps to make (count).
        num_engines: Engines to keep busy (count).
        group_size: Rollouts per prompt (count).

    Returns:
        A fresh scheduler; call ``start`` once, then ``handle`` with every event.
    """
    kind = ConventionalScheduler if settings.kind == "conventional" else PipelineScheduler
    return kind(settings, optimizer_steps=optimizer_steps, num_engines=num_engines, group_size=group_size)
