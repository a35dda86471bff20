"""The state machine that all schedulers share; ``pipeline`` has the theory of operation.

A schedule of your own is a subclass that answers four questions: ``may_admit``, ``enqueue``, ``take_micro_batch`` and
``may_publish``. They look at the public state below, and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import NotRequired, Protocol, TypedDict, Unpack, assert_never

from pipelinerl.errors import SchedulerError
from pipelinerl.scheduler.admission import AdmissionControl, AdmissionSettings
from pipelinerl.scheduler.events import (
    Command,
    DiscardReason,
    EngineJoined,
    EngineLeaving,
    EngineLeft,
    EnvironmentFailed,
    Event,
    KVCacheUsed,
    ObservationReady,
    OnFull,
    OnStale,
    PublishWeights,
    RolloutAborted,
    RolloutFailed,
    RolloutFinished,
    RolloutPreempted,
    RolloutScored,
    Routing,
    StartTraining,
    StepsRaised,
    Stop,
    StopReason,
    TrainingFinished,
    TurnFinished,
    WeightsLoaded,
    WeightsPublished,
    WeightUpdate,
)
from pipelinerl.scheduler.rollouts import RolloutGroup, RolloutPool
from pipelinerl.scheduler.routing import make_router
from pipelinerl.scheduler.slots import EngineSlots


class SchedulerSettings(Protocol):
    """The part of its configuration that a scheduler reads (``SchedulerConfig`` satisfies it)."""

    @property
    def train_batch_size(self) -> int:
        """Sequences per optimizer step (count). Paper symbol B."""

    @property
    def generation_batch_size(self) -> int:
        """Sequences in progress per engine, at most (count). Paper symbol H."""

    @property
    def optimizer_steps_per_rl_step(self) -> int:
        """Optimizer steps per RL step (count), not pipeline. Paper symbol G."""

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
        """How rollouts in progress go on when weights arrive."""

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
    def admission(self) -> AdmissionSettings | None:
        """How many slots are given. None: all."""

    @property
    def routing(self) -> Routing:
        """Which engine takes a rollout, and its next turn."""

    @property
    def filter_no_signal(self) -> bool:
        """Whether groups with equal rewards are discarded."""

    @property
    def stall_limit(self) -> int:
        """Rollouts given up between two optimizer steps before the run counts as stalled (count)."""


class Sizes(TypedDict):
    """The arguments of a scheduler beside its settings, documented in ``Scheduler``."""

    optimizer_steps: int
    num_engines: int
    group_size: int
    environments: NotRequired[int | None]
    kv_cache_tokens: NotRequired[int | None]


class TrainerState(Enum):
    """State of the trainer, as far as the scheduler knows."""

    IDLE = auto()
    TRAINING = auto()
    PUBLISHING = auto()


class Scheduler(ABC):
    """Decides what is generated, trained on and published (mutable, can be pickled).

    Args:
        settings: The ``scheduler`` table of a run file.
        optimizer_steps: Optimizer steps to make (count).
        num_engines: Engines at the start (count); their ids are 0 to below that. Others may join, and each leave.
        group_size: Rollouts per prompt (count).
        environments: Largest number of open rollouts with environments (count). None: rollouts have none.
        kv_cache_tokens: KV cache of an engine (tokens). None: it never fills. 0: none of it outlasts a turn.

    Attributes:
        version: Optimizer steps done.
        published: Last version published.
        num_loading: Engines that take rollouts and have not yet reported ``published`` (count).
        joining: Engines that take none before they have reported it.
        newest_engine: Largest id of an engine so far.
        oldest_loaded: Oldest version of any engine that takes rollouts.
        num_ready: Rollouts in the ready queue (count).
        num_taken: Rollouts of the current optimizer step given to the trainer (count).
        room: Rollouts that may be open or ready: slots of engines, or environments, and the ready queue (count).
        trainer: State of the trainer.
        given_up: Rollouts cancelled since the last optimizer step, by reason (counts).
        num_given_up: Their number.
        stopped: Why the run is over; None while it is not.
        lag_bound: Live rollouts by age, for a schedule that keeps ``max_lag`` by waiting.
    """

    def __init__(self, settings: SchedulerSettings, **sizes: Unpack[Sizes]) -> None:
        self.settings, self.weight_update = settings, settings.weight_update
        self.optimizer_steps, self.group_size = sizes["optimizer_steps"], sizes["group_size"]
        self.environments, kv_cache_tokens = sizes.get("environments"), sizes.get("kv_cache_tokens")
        num_engines = sizes["num_engines"]
        self.version = self.published = 0
        self.num_loading = self.oldest_loaded = 0
        self.num_ready = self.num_taken = 0
        self.stopped: StopReason | None = None
        self.trainer = TrainerState.IDLE
        self.lag_bound = LagBound(
            settings.max_lag if settings.on_stale is OnStale.TRAIN else None, train_batch_size=settings.train_batch_size
        )
        slots = EngineSlots(num_engines, slots_per_engine=settings.generation_batch_size)
        router = make_router(
            settings.routing, num_engines, turns=self.environments is not None, kv_cache_tokens=kv_cache_tokens
        )
        returns = settings.routing is not Routing.MOST_FREE
        self._pool = RolloutPool(slots, group_size=self.group_size, router=router, returns=returns)
        self._admission: AdmissionControl | None = None
        if settings.admission is not None:
            slots_per_engine = settings.generation_batch_size
            self._admission = AdmissionControl(
                settings.admission, range(num_engines), slots_per_engine=slots_per_engine
            )
            for engine, most in self._admission.limits.items():
                slots.limit(engine, most)
        self._loaded = dict.fromkeys(range(num_engines), 0)  # version that each engine, not leaving, has reported
        self.joining: set[int] = set()
        self.newest_engine = num_engines - 1
        self._count_room()
        self.given_up: Counter[DiscardReason] = Counter()
        self.num_given_up = 0

    @property
    def num_in_flight(self) -> int:
        """Rollouts in progress on the engines (count)."""
        return self._pool.num_in_flight

    @property
    def num_live(self) -> int:
        """Rollouts of groups admitted, not yet taken for training, not cancelled (count)."""
        return self.lag_bound.num_live

    @property
    def loaded(self) -> dict[int, int]:
        """Version that each engine that is not leaving has loaded, by its id."""
        return dict(self._loaded)

    @property
    def leaving(self) -> frozenset[int]:
        """Engines that are leaving and have not left."""
        return frozenset(self._pool.leaving)

    @property
    def up_to_date(self) -> bool:
        """Whether all engines that take rollouts have the newest version."""
        return self.published == self.version and not self.num_loading

    @property
    def may_be_longer(self) -> bool:
        """Whether ``optimizer_steps`` may be raised: nothing was left out because the run ends."""
        return True

    @property
    def groups_per_micro_batch(self) -> int:
        """Groups of a micro-batch (count)."""
        return self.settings.micro_batch // self.group_size

    def start(self) -> Sequence[Command]:
        """Return the first commands."""
        commands: list[Command] = []
        self._decide(commands)
        return commands

    def handle(self, event: Event) -> Sequence[Command]:
        """Record an event and return the commands to execute now, in this order; empty after ``Stop``.

        Raises SchedulerError if it cannot have happened: the simulated cluster or the driver has a fault.
        """
        commands: list[Command] = []
        stopped = self.stopped is not None
        # These four come once per rollout or turn; `match` would cost three times as much as `isinstance`.
        if isinstance(event, RolloutFinished):
            self._finished(event, commands)
        elif isinstance(event, RolloutScored):
            self._scored(event.rollout_id, event.reward, commands)
        elif isinstance(event, TurnFinished):
            self._pool.end_turn(event.rollout_id, event.engine, event.spans, commands)
            if commands:  # its group is cancelled: its environment is free
                self._fill(commands)
            elif not stopped:
                self._pool.go_on(commands)  # all that a free slot can change
        elif isinstance(event, ObservationReady):
            self._pool.observed(event.rollout_id, event.read_tokens or 0)
            if not stopped:
                self._pool.go_on(commands)
        else:
            match event:
                case TrainingFinished():
                    self._training_finished(event)
                case StepsRaised():
                    longer = event.optimizer_steps > self.optimizer_steps
                    if self.stopped is not None or not (self.may_be_longer and longer):
                        raise self._impossible(event)
                    self.optimizer_steps = event.optimizer_steps
                case WeightsPublished():
                    if self.trainer is not TrainerState.PUBLISHING or event.version != self.published:
                        raise self._impossible(event)
                    self.trainer = TrainerState.IDLE
                case WeightsLoaded():
                    self._weights_loaded(event)
                case EngineJoined() | EngineLeaving() | EngineLeft():
                    self._engines_changed(event)
                case RolloutAborted():
                    self._pool.abort(event.rollout_id, event.engine, event.spans)
                case RolloutPreempted() | EnvironmentFailed():
                    if not self._pool.can_have(event):
                        raise self._impossible(event)
                    return ()
                case KVCacheUsed():
                    self._report_kv_cache(event)
                case RolloutFailed():
                    failed = self._pool.fail(event.rollout_id, event.engine)
                    if failed is not None:
                        self._cancel(failed, DiscardReason.SIBLING_FAILED, commands)
                case _:
                    assert_never(event)
            self._decide(commands)
        return () if stopped else commands

    # ----------------------------------------------------------------- the questions of a schedule

    @abstractmethod
    def may_admit(self) -> bool:
        """Return whether a new group may be admitted."""

    @abstractmethod
    def enqueue(self, group: RolloutGroup, commands: list[Command]) -> None:
        """Put a ready group, already counted in ``num_ready``, into the ready queue; append what that discards."""

    @abstractmethod
    def take_micro_batch(self) -> Sequence[RolloutGroup]:
        """Take the ``groups_per_micro_batch`` groups to train on next off the ready queue, or none yet.

        Asked while the trainer is idle; ``num_ready`` and ``num_taken`` count them afterwards.
        """

    @abstractmethod
    def may_publish(self) -> bool:
        """Return whether to publish ``version``, which is newer than ``published``; asked while the trainer is idle."""

    def cancel_stale(self, commands: list[Command]) -> None:  # noqa: B027 - most schedules cancel nothing
        """Cancel groups that would be too old in the batch after the one just taken; by default none."""

    # -------------------------------------------------------------------------------------- decisions

    def _decide(self, commands: list[Command]) -> None:
        if self.stopped is not None:
            return
        if self.version == self.optimizer_steps:
            self._stop(StopReason.DONE, commands)
            return
        if self.trainer is TrainerState.IDLE:
            arrived = not (self.num_loading or self.joining)
            if arrived and self.published < self.version and self.may_publish():
                self._publish(commands)
            else:
                self._train(commands)
        self._fill(commands)
        if self.num_given_up > self.settings.stall_limit:
            self._stop(StopReason.STALLED, commands)

    def _fill(self, commands: list[Command]) -> None:
        if self.stopped is not None:
            return
        pool, slots = self._pool, self._pool.slots
        if self.environments is not None:
            pool.go_on(commands)
            while pool.num_open < self.environments and self._has_starting():
                commands.append(pool.open_one())
            return
        if pool.router is not None:
            while pool.num_open - pool.num_scoring < self._num_slots and self._has_starting():
                pool.queue_one()
            pool.go_on(commands)
            return
        while slots.num_free:
            if pool.interrupted:
                commands.append(pool.resume_one())
            elif pool.starting is not None or self._has_starting():
                commands.append(pool.start_one())
            else:
                return

    def _has_starting(self) -> bool:
        """Return whether a group has rollouts to start; admit one if none has and it may be."""
        pool = self._pool
        if pool.starting is None:
            if not self.may_admit():
                return False
            pool.admit(self.oldest_loaded)
            self.lag_bound.add(self.oldest_loaded, pool.group_size)
        return True

    def _train(self, commands: list[Command]) -> None:
        groups = self.take_micro_batch()
        if not groups:
            return
        rollout_ids = [rollout_id for group in groups for rollout_id in self._take(group)]
        self.num_taken += len(rollout_ids)
        completes_step = self.num_taken == self.settings.train_batch_size
        self.trainer = TrainerState.TRAINING
        commands.append(StartTraining(tuple(rollout_ids), self.version, completes_step))
        if completes_step:
            self.cancel_stale(commands)

    def _publish(self, commands: list[Command]) -> None:
        self.trainer = TrainerState.PUBLISHING
        self.published = self._pool.newest_version = self.version
        self.num_loading = len(self._loaded)
        if self.weight_update is WeightUpdate.WAIT:
            for engine in self._loaded:
                self._pool.slots.hold(engine)
        commands.append(PublishWeights(self.version, self.weight_update))
        self._none_loads()

    def _stop(self, reason: StopReason, commands: list[Command]) -> None:
        self.stopped = reason
        commands.append(Stop(reason))

    # ------------------------------------------------------------------------------------------ state

    def _finished(self, event: RolloutFinished, commands: list[Command]) -> None:
        """Record a finished rollout, and its score if scoring took no time."""
        pool, rollout_id, reward = self._pool, event.rollout_id, event.reward
        if event.engine is None:
            group = pool.leave_environment(rollout_id)
        else:
            group = pool.leave_engine(rollout_id, event.engine, event.spans)
        if reward is not None and not group.cancelled and len(group.scored) + 1 < pool.group_size:
            pool.score(group, rollout_id, reward, commands)  # its siblings are awaited: it only frees places
            self._fill(commands)
            return
        pool.await_score(group, rollout_id)
        self._fill(commands)  # all that a free slot can change
        if reward is not None:
            self._scored(rollout_id, reward, commands)

    def _scored(self, rollout_id: int, reward: float, commands: list[Command]) -> None:
        """Record a score; queue the group if it was its last one, or discard it."""
        group = self._pool.awaited(rollout_id)
        if not self._pool.score(group, rollout_id, reward, commands):
            self._fill(commands)  # all that it can change to be scored no more
            return
        if self.settings.filter_no_signal and not group.rewards_differ:
            self._cancel(group, DiscardReason.NO_SIGNAL, commands)
        else:
            self.num_ready += self.group_size
            self.enqueue(group, commands)
        self._decide(commands)

    def _cancel(self, group: RolloutGroup, reason: DiscardReason, commands: list[Command]) -> None:
        """Cancel a live group; start its prompt again if it is stale and ``on_stale`` is ``requeue``."""
        self.lag_bound.add(group.oldest_bound, -self.group_size)
        self._pool.cancel(group, reason, commands)
        self.given_up[reason] += self.group_size
        self.num_given_up += self.group_size
        if reason is DiscardReason.STALE and self.settings.on_stale is OnStale.REQUEUE:
            self._pool.retry(group)

    def _take(self, group: RolloutGroup) -> list[int]:
        self.lag_bound.add(group.oldest_bound, -self.group_size)
        self.num_ready -= self.group_size
        return self._pool.take(group)

    def _know_age(self, group: RolloutGroup) -> None:
        """From now on, count a live group by the versions that engines have reported."""
        self.lag_bound.add(group.oldest_bound, -self.group_size)
        group.oldest_bound = group.oldest_reported
        self.lag_bound.add(group.oldest_bound, self.group_size)

    def _training_finished(self, event: TrainingFinished) -> None:
        step_done = self.num_taken == self.settings.train_batch_size
        if self.trainer is not TrainerState.TRAINING or event.version != self.version + step_done:
            raise self._impossible(event)
        self.trainer = TrainerState.IDLE
        if step_done:
            self.version = event.version
            self.num_taken = 0
            if self.stopped is None:  # else they say why it stalled
                self.given_up.clear()
                self.num_given_up = 0

    def _engines_changed(self, event: EngineJoined | EngineLeaving | EngineLeft) -> None:
        pool, engine = self._pool, event.engine
        if isinstance(event, EngineJoined):
            if engine <= self.newest_engine or not 0 <= event.version <= self.published:
                raise self._impossible(event)
            self.newest_engine = engine
            self._loaded[engine] = event.version
            pool.join(engine)
            if self._admission is not None:
                pool.slots.limit(engine, self._admission.join(engine))
            if event.version < self.published:
                self.joining.add(engine)
            else:
                pool.release(engine)
            self._none_loads()
        elif isinstance(event, EngineLeaving):
            version = self._loaded.pop(engine, None)
            if version is None:
                raise self._impossible(event)
            pool.stop_taking(engine)
            if self._admission is not None:
                self._admission.leave(engine)
            self._loads_no_more(engine, version)
        else:
            if engine not in pool.leaving or pool.slots.num_used(engine):
                raise self._impossible(event)
            pool.left(engine)
        self._count_room()

    def _count_room(self) -> None:
        if self._admission is None:
            self._num_slots = len(self._loaded) * self.settings.generation_batch_size
        else:
            self._num_slots = sum(self._admission.limits.values())
        self.room = max(self._num_slots, self.environments or 0) + self.settings.ready_queue_limit

    def _report_kv_cache(self, event: KVCacheUsed) -> None:
        """Set the limit of an engine anew; one of its sequences has ended, and is not yet reported."""
        engine, slots = event.engine, self._pool.slots
        if self._admission is None or engine not in slots or not slots.num_used(engine):
            raise self._impossible(event)
        if engine in self._loaded:
            slots.limit(engine, self._admission.reported(engine, event.share, slots.num_used(engine) - 1))
            self._count_room()

    def _loads_no_more(self, engine: int, version: int) -> None:
        """Record that an engine that had a version has loaded, or never will."""
        if engine in self.joining:
            self.joining.remove(engine)
        else:
            self.num_loading -= version < self.published
        self._none_loads()

    def _none_loads(self) -> None:
        if not self.num_loading:  # one publication at a time: until then some engine has had the one before
            self.oldest_loaded = self.published

    def _weights_loaded(self, event: WeightsLoaded) -> None:
        if event.engine in self._pool.leaving and event.version <= self.published:
            return
        before = self._loaded.get(event.engine, event.version)
        if event.version != self.published or before == event.version:
            raise self._impossible(event)
        self._loaded[event.engine] = event.version
        self._loads_no_more(event.engine, before)
        self._pool.release(event.engine)

    def _impossible(self, event: Event) -> SchedulerError:
        return SchedulerError(
            f"cannot handle {event}: version {self.version}, trainer {self.trainer.name}, "
            f"published {self.published}, engines still loading {self.num_loading + len(self.joining)}"
        )


# ------------------------------------------------------------------------------------ the bound on lag


class LagBound:
    """Counts live rollouts; decides on admission and training (mutable, can be pickled). ``max_lag`` None: no bound.

    The bound ``max_lag`` on every trained token is kept by waiting (``on_stale = "train"``): the rules and their proof.

    Let m be ``max_lag``, B the train batch, v the version that the next batch is trained at, and e the oldest version
    on any engine that takes rollouts. The *bound* x of a group is a version that none of its tokens is older than: e
    when it is admitted, later the oldest version that its engines report, which is not smaller. A group is in time for
    the batches at versions up to x + m. A group is *live* from its admission until it is taken for training or
    cancelled. Let L(x) be the number of live rollouts with a bound of at most x.

        gate:  admit a group only if afterwards   L(any) <= B (e + m - v + 1)
        safe:  take a batch only if afterwards    L(x) <= B max(0, x + m - v)   for every x

    *Claim 1*: L(x) <= B max(0, x + m - v + 1) for every x. At the start nothing is live. An admission changes L(x) for
    x >= e only, and there L(x) <= L(any) <= B (e + m - v + 1) <= B (x + m - v + 1). When a batch is taken, v rises by
    one, and *safe* is the claim for the new v. A bound only rises and a cancelled group only leaves: L(x) falls.

    *Claim 2*: the bound is kept. A group with bound x that is taken at version v was live, so 0 < L(x), so by claim 1 v
    <= x + m, and its oldest token has lag v - x <= m.

    *Claim 3*: the trainer does not wait for ever, if started rollouts end. If all live groups were ready, taking the B
    oldest rollouts would be safe: where L(x) <= B none with a bound of at most x is left; elsewhere L(x) falls by B,
    and claim 1 gives the rest. So while no batch is safe, live rollouts are missing from the ready queue. They are in
    flight or will start, since no rule stops admitted rollouts from starting, and they end. It remains to show that B
    rollouts become live. If fewer are, the trainer will be idle; then a publication that is due goes out, or is under
    way, and arrives. With K for ``publish_every``, one is due from the first multiple of K above the last published
    version on. So all engines reach a version above v - K, and the gate admits at least B (m - K + 2) >= B live
    rollouts, since m >= K - 1 (``RunConfig`` refuses less: the batch before a publication is K - 1 versions ahead of
    the engines).

    *Engines that join or leave*: one that joins takes nothing before it has the last version published, so e does not
    fall; without one that is leaving e can only rise, and what goes on there belongs to groups admitted before, at
    bounds of at most its version. The gate counts no engines, so claim 3 holds while one takes rollouts.

    *Micro-batches*: of the batch at v only what is left of it counts. So each rule subtracts what has been taken
    already.

    *RL steps* (``PartialRolloutScheduler``): G batches are chosen at once and trained at v .. v + G - 1. That is safe
    if afterwards L(x) <= B max(0, x + m - (v + G) + 1) for every x. Claim 1 holds for all v in between, since v does
    not change while the gate admits. In order of age, the live rollouts with a bound of at most x fit into the batches
    up to version x + m. So if all live groups were ready, taking the G B oldest would be safe. There are as many: when
    all engines have loaded v, the gate admits B (m + 1) >= G B, since m >= G - 1. The last RL step is always safe, as
    nothing that it leaves has to be trained.

    Cancelled groups leave L, so filtering never uses up the allowance. Right after a publication has arrived at v, the
    gate admits up to B (m + 1) live rollouts; each step takes B of them while v rises by one; so B (m + 1), less those
    carried over, are admitted until the next publication.

    *Rejected*: to bound the lag at admission only, as capacity rules do. They bound the total, and an unlucky order of
    finishing still breaks the bound.
    """

    def __init__(self, max_lag: int | None, *, train_batch_size: int) -> None:
        self._max_lag = max_lag
        self._batch = train_batch_size
        self._live: dict[int, int] = {}  # rollouts by bound
        self.num_live = 0

    def add(self, bound: int, num_rollouts: int) -> None:
        """Count rollouts that are live from now on; negative: no more."""
        self.num_live += num_rollouts
        count = self._live.get(bound, 0) + num_rollouts
        if count:
            self._live[bound] = count
        else:
            del self._live[bound]

    def admits(self, num_rollouts: int, *, bound: int, version: int, left: int) -> bool:
        """Return whether rollouts may be admitted: the gate. ``bound``: oldest version on any engine."""
        return self._max_lag is None or self.num_live + num_rollouts <= self._capacity(bound, version, left)

    def is_safe(self, taken: Mapping[int, int], *, version: int, left: int) -> bool:
        """Return whether all other live rollouts can be trained in time once ``taken`` (by bound) are. O(max_lag).

        ``version``: of the next batch then; ``left``: its rollouts not yet taken.
        """
        if self._max_lag is None:
            return True
        num_due = 0
        for bound in sorted(self._live):
            num_due += self._live[bound] - taken.get(bound, 0)
            if num_due > self._capacity(bound, version, left):
                return False
        return True

    def _capacity(self, bound: int, version: int, left: int) -> int:
        assert self._max_lag is not None
        num_later = bound + self._max_lag - version
        return left + self._batch * num_later if num_later >= 0 else 0
