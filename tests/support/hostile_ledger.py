"""The ledger of a hostile driver, which never reads the scheduler's: it checks each command, and carries it out.

After every event it also checks the commands that did *not* come: free slots, an idle trainer or weights that could be
published need a reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from hashlib import blake2b
from itertools import groupby

from hypothesis import strategies as st

from pipelinerl.config.run import SchedulerConfig
from pipelinerl.scheduler.events import (
    AbortRollout,
    DiscardReason,
    DiscardRollouts,
    OnFull,
    OnStale,
    OpenEnvironment,
    PublishWeights,
    Routing,
    StartRollout,
    StartTraining,
    Stop,
    StopReason,
    VersionSpans,
    WeightUpdate,
)
from pipelinerl.scheduler.kinds import make_scheduler
from pipelinerl.scheduler.routing import PREFILL_WEIGHT


class Place(Enum):
    """Where a rollout is as far as has been reported; the last three are for ever."""

    IN_FLIGHT = auto()
    ACTING = auto()  # its environment acts
    INTERRUPTED = auto()
    SCORING = auto()
    SCORED = auto()
    DISCARDED = auto()
    ABORTED = auto()
    FAILED = auto()


@dataclass
class Rollout:
    engine: int
    place: Place = Place.IN_FLIGHT
    token_versions: list[int] = field(default_factory=list)
    kept_tokens: int = 0
    num_turns: int = 0
    home: int | None = None  # engine of its last turn, while it waits for the next
    read: int = 0  # tokens of its prompt and its observations
    context: int = 0  # tokens read and generated, at its last observation
    asked: int = 0  # its place among all that have waited for a slot or room
    ended: str = ""  # in truth, not yet reported: "finished" or "interrupted"
    abort_sent: bool = False
    reward: float = 0.0

    @property
    def spans(self):
        versions, ends = [], []
        for version, tokens in groupby(self.token_versions):
            versions.append(version)
            ends.append((ends[-1] if ends else 0) + len(list(tokens)))
        return VersionSpans(tuple(versions), tuple(ends))


@dataclass
class Group:
    """Rollouts of one prompt; ``members[i]`` is the rollout ``first + i``."""

    first: int
    prompt_id: int
    bound: int  # oldest version reported by an engine when the group was admitted
    rl_step: int  # one_step_off: version at which its RL step begins; else 0
    members: list[Rollout] = field(default_factory=list)
    given_up: bool = False
    reason: DiscardReason | None = None
    reported: list[int] = field(default_factory=list)  # oldest versions reported, also of tokens lost since

    def places(self):
        return {member.place for member in self.members}

    def oldest(self):
        return min(self.reported)


@dataclass(frozen=True)
class Case:
    """A configuration and the cluster it runs on."""

    scheduler: SchedulerConfig
    optimizer_steps: int
    num_engines: int
    group_size: int
    environments: int | None
    kv_cache_tokens: int | None

    @property
    def routing(self):
        return self.scheduler.routing

    @property
    def routed(self):
        """Whether a rollout waits for an engine of its own."""
        without = {Routing.MOST_FREE} | ({Routing.ROOM} if self.kv_cache_tokens == 0 else set())
        return self.environments is not None and self.routing not in without

    def fresh(self):
        return make_scheduler(
            self.scheduler,
            optimizer_steps=self.optimizer_steps,
            num_engines=self.num_engines,
            group_size=self.group_size,
            environments=self.environments,
            kv_cache_tokens=self.kv_cache_tokens,
        )


@st.composite
def cases(draw):
    group_size = draw(st.sampled_from([1, 2, 3]))
    micro = group_size * draw(st.sampled_from([1, 1, 2]))
    batch = micro * draw(st.sampled_from([1, 2, 3]))
    steps = draw(st.integers(1, 6))
    rl_steps = draw(st.integers(1, 4))
    kinds = ["pipeline"] * 6 + ["conventional", "partial_rollouts"] * 2 + ["one_step_off"] * 2
    kind = draw(st.sampled_from(kinds))
    partial = kind == "partial_rollouts"
    max_lag = draw(st.sampled_from([None, 0, 1, 3]))
    publish_every = draw(st.sampled_from([1, 1, 2, 3]))
    if max_lag is not None:  # less is refused by RunConfig
        least = {"pipeline": publish_every, "one_step_off": 2 * rl_steps}.get(kind, rl_steps)
        max_lag = max(max_lag, min(least, steps) - 1)
    scheduler = SchedulerConfig(
        kind=kind,
        train_batch_size=batch,
        generation_batch_size=draw(st.sampled_from([1, 2, 2, 5])),
        optimizer_steps_per_rl_step=rl_steps,
        publish_every=publish_every,
        micro_batch_size=micro,
        max_lag=max_lag,
        weight_update=draw(st.sampled_from(WeightUpdate)),
        on_stale=OnStale.TRAIN if partial else draw(st.sampled_from(OnStale)),
        ready_queue_size=batch + draw(st.integers(0, 6)),
        on_full=draw(st.sampled_from(OnFull)),
        filter_no_signal=group_size > 1 and draw(st.booleans()),
        discard_limit=draw(st.sampled_from([10**6, 10**6, 5])),
    )
    environments = draw(st.sampled_from([None, 1, 3, 8, None, 8]))
    if environments is not None:
        scheduler = scheduler.model_copy(update={"routing": draw(st.sampled_from([Routing.ROOM, *Routing]))})
    kv_cache_tokens = draw(st.sampled_from([None, 0, 8, 20, 20, 40]))
    return Case(scheduler, steps, draw(st.integers(1, 3)), group_size, environments, kv_cache_tokens)


class HostileLedger:
    """The true state of rollouts, weights and training, and the part of it that has been reported."""

    def __init__(self, case):
        self.case = case
        self.config = case.scheduler
        self.pipeline = self.config.kind == "pipeline"
        self.partial = self.config.kind == "partial_rollouts"
        self.conventional = self.config.kind == "conventional"
        self.weight_update = WeightUpdate.RECOMPUTE if self.partial else self.config.weight_update
        bounded = (self.pipeline or self.partial) and self.config.max_lag is not None
        self.gated = bounded and self.config.on_stale is OnStale.TRAIN
        self.drops = bounded and self.config.on_stale is not OnStale.TRAIN
        self.scheduler = case.fresh()
        self.groups = {}  # group id -> group, until all its rollouts have ended
        self.ended = []  # (id, engine) of all rollouts that have ended for ever
        self.num_asked = 0  # times that a rollout has begun to wait for a slot or room
        self.longest = 0  # tokens of the longest context after an observation
        self.num_groups = 0
        self.places = 0  # those at the last admission: engines may have left since
        self.most_placed = 0  # rollouts that may be in flight, being scored and ready until the next admission
        self.num_prompts = 0
        self.prompts_again = []  # prompts of stale groups, not yet started again
        self.ready = []  # ids of ready groups, in order of arrival
        self.true_version = dict.fromkeys(range(case.num_engines), 0)  # also of engines that are leaving
        self.reported_version = dict.fromkeys(range(case.num_engines), 0)  # of engines that are not leaving
        self.joining = set()  # those of them that have joined with older weights, and take nothing yet
        self.held = set()
        self.oldest_loaded = 0
        self.num_joined = case.num_engines
        self.version = 0  # optimizer steps done
        self.published = 0
        self.training = None  # the outstanding StartTraining
        self.publishing = False
        self.num_taken = 0  # rollouts given to the trainer in this optimizer step
        self.num_given_up = 0  # rollouts of the groups given up in this optimizer step
        self.rl_step_start = 0  # not pipeline: version at which the RL step in training begins
        self.last_trained = -1  # not pipeline: last rollout trained on in this RL step
        self.chosen = []  # partial: groups of the RL step in training, not yet given to the trainer
        self.handed_over_at = None  # one_step_off: version at the last hand-over
        self.closed = False  # conventional: training has begun and the engines have not all loaded since
        self.stopped = None

    def ask(self, rollout):
        """A rollout begins to wait for a slot or room."""
        self.num_asked += 1
        rollout.asked = self.num_asked

    def waiting(self, engine):
        """Rollouts that wait for this engine, in order; -1: rollouts that have not begun, and wait for room."""
        waiting = [one for _, _, one in self.rollouts(Place.INTERRUPTED) if one.engine == engine]
        return sorted(waiting, key=lambda one: one.asked)

    @property
    def loading(self):
        """Whether some engine is to report the published weights."""
        return any(version < self.published for version in self.reported_version.values())

    def engines_changed(self):
        """Note the oldest version of engines that take rollouts: the last one, if none does."""
        takes = [version for engine, version in self.reported_version.items() if engine not in self.joining]
        self.oldest_loaded = min(takes, default=self.published)
        if not self.training and self.published == self.oldest_loaded == self.version == self.rl_step_start:
            self.closed = False

    def tokens_on(self, engine):
        """Tokens of context of all rollouts of an engine."""
        begun = self.rollouts(Place.IN_FLIGHT, Place.ACTING, Place.INTERRUPTED)
        return sum(one.context for _, _, one in begun if one.engine == engine)

    def engine_to_begin(self, free, rollout_id):
        """Where a rollout that has no engine begins; None: nowhere yet. Some engines have free slots."""
        match self.case.routing:
            case Routing.ROOM:
                return self.engine_with_room(free)
            case Routing.HASH:
                return self.engine_by_hash(rollout_id)
            case Routing.STICKY:
                begun = self.rollouts(Place.IN_FLIGHT, Place.ACTING, Place.INTERRUPTED)
                return min(free, key=lambda engine: (sum(one.engine == engine for _, _, one in begun), engine))
            case _:
                return min(free, key=lambda engine: self.cost(engine, 0))

    def engine_to_go_on(self, rollout_id, rollout):
        """Where a rollout waits whose environment answers now."""
        home, free = rollout.engine, self.free_engines()
        match self.case.routing:
            case Routing.ROOM:  # elsewhere if its engine is full and one has none
                empty = [] if home in free else [engine for engine in free if not self.tokens_on(engine)]
                return empty[0] if empty else home
            case Routing.HASH:
                return self.engine_by_hash(rollout_id)
            case Routing.STICKY:
                return home
            case _:
                cached = self.cached_tokens(rollout, home)
                choice = {home, *free}
                return min(choice, key=lambda engine: self.cost(engine, cached if engine == home else 0))

    def engine_with_room(self, free):
        """Of some engines that with the fewest tokens of context, if the longest fits too."""
        tokens, engine = min((self.tokens_on(engine), engine) for engine in free)
        capacity = self.case.kv_cache_tokens
        fits = capacity is None or tokens + self.longest <= capacity
        return engine if fits or not tokens else None

    def engine_by_hash(self, rollout_id):
        """Rendezvous hashing: of those that take rollouts, that with the largest digest of rollout and engine."""
        takes = [engine for engine in self.reported_version if engine not in self.joining]
        return max(takes, key=lambda engine: blake2b(f"{rollout_id} {engine}".encode(), digest_size=8).digest())

    def resting_on(self, engine):
        """Tokens of context of an engine's rollouts whose environment acts."""
        return sum(one.context for _, _, one in self.rollouts(Place.ACTING) if one.engine == engine)

    def cached_tokens(self, rollout, home):
        """Tokens of a rollout whose environment acts that its engine's KV cache is expected to hold."""
        capacity, resting = self.case.kv_cache_tokens, self.resting_on(home)
        if self.case.routing is Routing.LEAST_LOADED:
            return 0
        if capacity is None:
            return rollout.context
        left = capacity - self.tokens_on(home) + resting
        return rollout.context * min(max(left, 0), resting) // resting

    def cost(self, engine, cached):
        """Tokens in progress, less the gain of those cached; of equals one not full, the emptiest, the first."""
        full, used = engine not in self.free_engines(), len(self.in_flight(engine))
        return self.tokens_on(engine) - self.resting_on(engine) - PREFILL_WEIGHT * cached, full, used, engine

    def name_engines(self, rollout=None):
        """Under ``hash`` all that wait for any engine, or those before one, wait for the one of their hash from now on.

        They are asked in order while a slot is free, and behind those that wait there already.
        """
        while self.case.routing is Routing.HASH and (waiting := self.waiting(-1)) and waiting[0] is not rollout:
            rollout_id = next(one for one, _, other in self.rollouts(Place.INTERRUPTED) if other is waiting[0])
            waiting[0].engine = self.engine_by_hash(rollout_id)
            assert waiting[0].engine not in self.free_engines(), "one waits beside a free slot of its engine"
            self.ask(waiting[0])

    def free_engines(self):
        """Engines that have a slot to give."""
        return [engine for engine in self.reported_version if engine not in self.held and self.num_free(engine)]

    def num_free(self, engine):
        return self.config.generation_batch_size - len(self.in_flight(engine))

    def rollouts(self, *places):
        """Rollouts in one of these places: (id, group, rollout), oldest first."""
        return [
            (group.first + i, group, member)
            for group in self.groups.values()
            for i, member in enumerate(group.members)
            if member.place in places
        ]

    def running(self):
        """Rollouts that are still generating in truth."""
        return [entry for entry in self.rollouts(Place.IN_FLIGHT) if not entry[2].ended]

    def in_flight(self, engine):
        return [entry for entry in self.rollouts(Place.IN_FLIGHT) if entry[2].engine == engine]

    @property
    def num_ready(self):
        return len(self.ready) * self.case.group_size

    @property
    def num_live(self):
        return sum(not group.given_up for group in self.groups.values()) * self.case.group_size

    def next_version(self):
        """Version that the next micro-batch is trained at."""
        return self.version + (self.num_taken == self.config.train_batch_size)

    def is_due(self):
        """Whether there is a multiple of ``publish_every`` above the published version, up to this one."""
        return any(version % self.config.publish_every == 0 for version in range(self.published + 1, self.version + 1))

    def allowance(self):
        """The gate of ``lag_bound``, less the rollouts that the running step has taken already."""
        batches = self.oldest_loaded + self.config.max_lag - self.next_version() + 1
        return self.config.train_batch_size * batches - self.num_taken % self.config.train_batch_size

    def num_places(self):
        """Rollouts that may be open and ready together, when a group is admitted."""
        slots = len(self.reported_version) * self.config.generation_batch_size
        return max(slots, self.case.environments or 0) + self.config.ready_queue_limit

    def num_placed(self):
        return self.num_ready + self.num_open()

    def num_limited(self):
        waits = self.pipeline and self.config.on_full is OnFull.WAIT
        return self.num_placed() if waits else self.num_open()

    def num_open(self):
        """Rollouts started and neither scored nor gone: with environments, each has one."""
        return len(self.rollouts(Place.IN_FLIGHT, Place.ACTING, Place.INTERRUPTED, Place.SCORING))

    def num_waiting_for_siblings(self):
        """Scored rollouts of groups that are not ready."""
        return len(self.rollouts(Place.SCORED)) - self.num_ready

    def in_turn(self):
        """Ready groups in the order they are trained on: oldest token first under max_lag, else as they came."""
        if self.config.max_lag is None:
            return self.ready
        return sorted(self.ready, key=lambda group_id: self.groups[group_id].oldest())

    def rl_step_rollouts(self, start):
        """Rollouts of the RL step that begins at a version."""
        steps = min(self.config.optimizer_steps_per_rl_step, self.case.optimizer_steps - start)
        return max(steps, 0) * self.config.train_batch_size

    def generating_for(self):
        """Version at which the RL step that is being generated begins."""
        return 0 if self.handed_over_at is None else self.handed_over_at + self.config.optimizer_steps_per_rl_step

    def num_generated(self, rl_step):
        """Live rollouts of an RL step, started or not."""
        groups = [group for group in self.groups.values() if group.rl_step == rl_step and not group.given_up]
        return len(groups) * self.case.group_size

    def too_old(self, group):
        """Whether the next batch would train it above ``max_lag``, by the reports of the engines."""
        generated = len(group.members) == self.case.group_size and group.places() <= {Place.SCORING, Place.SCORED}
        return self.next_version() - (group.oldest() if generated else group.bound) > self.config.max_lag

    def give_up(self, group, reason):
        if group.given_up:
            return
        group.given_up, group.reason = True, reason
        self.num_given_up += self.case.group_size
        group_id = group.first // self.case.group_size
        if group_id in self.ready:
            self.ready.remove(group_id)
        if reason is DiscardReason.STALE and self.config.on_stale is OnStale.REQUEUE:
            self.prompts_again.append(group.prompt_id)

    def forget_ended(self):
        over = {Place.DISCARDED, Place.ABORTED, Place.FAILED}
        for group_id, group in list(self.groups.items()):
            if group.places() <= over:
                self.ended += [(group.first + i, member.engine) for i, member in enumerate(group.members)]
                del self.groups[group_id]

    # ------------------------------------------------------------------------------- each command

    def obey(self, commands):
        for command in commands:
            assert not self.stopped, "a command after Stop"
            match command:
                case OpenEnvironment():
                    self.obey_open(command)
                case StartRollout():
                    self.obey_start(command)
                case AbortRollout():
                    self.obey_abort(command)
                case DiscardRollouts():
                    self.obey_discard(command)
                case StartTraining():
                    self.obey_training(command)
                case PublishWeights():
                    self.obey_publish(command)
                case Stop():
                    self.obey_stop(command)
        self.forget_ended()
        if not self.stopped:
            assert self.num_given_up <= self.config.discard_limit
            self.check_rollouts_go_on()
            self.check_trainer_goes_on()
            self.check_given_up_groups_end()

    def group_of(self, command):
        """The group of a rollout that starts, and which of it that is; a new group may be admitted for it."""
        group_id, member = divmod(command.rollout_id, self.case.group_size)
        if group_id == self.num_groups:
            assert member == 0
            self.check_admission(command.prompt_id)
            bound, rl_step = self.oldest_loaded, self.generating_for()
            self.groups[group_id] = Group(command.rollout_id, command.prompt_id, bound, rl_step)
            self.num_groups += 1
        group = self.groups[group_id]
        assert not group.given_up
        assert command.prompt_id == group.prompt_id
        return group, member

    def obey_open(self, command):
        group, member = self.group_of(command)
        assert self.case.environments is not None
        assert member == len(group.members), "a rollout starts twice"
        assert not (self.closed and self.conventional)
        group.members.append(Rollout(-1, Place.ACTING))
        assert self.num_open() <= self.case.environments

    def obey_start(self, command):
        group, member = self.group_of(command)
        assert not self.closed, "conventional: a rollout starts between the first train step and the last load"
        free = self.free_engines()
        home = group.members[member].home if member < len(group.members) else None
        emptiest = min(free, key=lambda engine: len(self.in_flight(engine)))
        if self.case.routed:
            rollout = group.members[member]
            if rollout.engine < 0:
                self.name_engines(rollout)
                assert command.engine == self.engine_to_begin(free, command.rollout_id), "not the engine to begin on"
            else:
                assert command.engine == rollout.engine, "not the engine that it waits for"
            assert rollout is self.waiting(rollout.engine)[0], "another waits longer"
            assert not self.waiting(command.engine) or rollout.engine >= 0, "one that has begun waits beside it"
        else:
            near = home in free and self.case.routing is not Routing.MOST_FREE
            assert command.engine == (home if near else emptiest), "neither the engine before nor the emptiest"
            interrupted = [one for _, _, one in self.rollouts(Place.INTERRUPTED)]
            assert not interrupted or min(interrupted, key=lambda one: one.asked) is group.members[member]
        if member == len(group.members):
            assert self.case.environments is None, "a rollout starts without its environment"
            assert command.kept_tokens == 0
            assert not self.rollouts(Place.INTERRUPTED), "a new rollout starts before an interrupted one"
            group.members.append(Rollout(command.engine))
        else:
            rollout = group.members[member]
            assert rollout.place is Place.INTERRUPTED, "a rollout starts twice"
            assert command.kept_tokens == len(rollout.token_versions)
            rollout.place, rollout.engine, rollout.ended, rollout.home = Place.IN_FLIGHT, command.engine, "", None
            rollout.kept_tokens = command.kept_tokens

    def check_admission(self, prompt_id):
        """A prompt that is to be tried again, or else a new one; and only while there is a place for the group.

        With ``on_full = wait`` that means: open + ready + the new group <= slots (or environments) +
        ``ready_queue_limit``. Until the next admission only scored rollouts that wait for siblings now can come on top.
        With ``drop_oldest`` and partial rollouts the same without the ready ones.
        """
        if self.prompts_again:
            assert prompt_id == self.prompts_again.pop(0)
        else:
            assert prompt_id == self.num_prompts
            self.num_prompts += 1
        if self.config.kind == "one_step_off":
            assert self.oldest_loaded == self.published, "not all engines are ready"
            assert self.published == (self.handed_over_at or 0)
            rl_step = self.generating_for()
            assert self.num_generated(rl_step) + self.case.group_size <= self.rl_step_rollouts(rl_step)
        if self.pipeline or self.partial:
            assert self.num_limited() + self.case.group_size <= self.num_places()
            self.places = self.num_places()
            self.most_placed = self.places + self.num_waiting_for_siblings()
        if self.gated:
            assert self.num_live + self.case.group_size <= self.allowance()

    def obey_abort(self, command):
        group_id, member = divmod(command.rollout_id, self.case.group_size)
        group = self.groups[group_id]
        rollout = group.members[member]
        assert rollout.place is Place.IN_FLIGHT
        assert rollout.engine == command.engine
        assert not rollout.abort_sent, "a second abort"
        assert group.given_up
        rollout.abort_sent = True

    def obey_discard(self, command):
        group_ids = {rollout_id // self.case.group_size for rollout_id in command.rollout_ids}
        assert len(group_ids) == 1
        assert len(set(command.rollout_ids)) == len(command.rollout_ids) > 0
        group_id = group_ids.pop()
        group = self.groups[group_id]
        match command.reason:
            case DiscardReason.STALE if not group.given_up:
                assert self.drops, "with on_stale = train nothing goes stale"
                assert group_id == self.ready[-1]
                assert self.too_old(group)
            case DiscardReason.STALE:
                assert group.reason is DiscardReason.STALE
            case DiscardReason.NO_SIGNAL:
                assert self.config.filter_no_signal
                assert len({member.reward for member in group.members}) == 1
                assert group_id == self.ready[-1]
            case DiscardReason.QUEUE_FULL:
                assert self.config.on_full is OnFull.DROP_OLDEST
                assert self.num_ready > self.config.ready_queue_limit
                assert group_id == self.in_turn()[0]
            case DiscardReason.SIBLING_FAILED:
                assert group.reason is DiscardReason.SIBLING_FAILED
        self.give_up(group, command.reason)
        for rollout_id in command.rollout_ids:
            rollout = group.members[rollout_id - group.first]
            assert rollout.place in (Place.SCORED, Place.INTERRUPTED, Place.ACTING)
            rollout.place = Place.DISCARDED

    def obey_training(self, command):
        size = self.case.group_size
        group_ids = list(dict.fromkeys(rollout_id // size for rollout_id in command.rollout_ids))
        assert command.rollout_ids == tuple(g * size + i for g in group_ids for i in range(size)), "not whole groups"
        assert self.training is None
        assert not self.publishing
        assert command.version == self.version
        assert len(command.rollout_ids) == self.config.micro_batch
        self.num_taken += len(command.rollout_ids)
        assert self.num_taken <= self.config.train_batch_size
        assert command.completes_step == (self.num_taken == self.config.train_batch_size)
        if self.conventional:
            self.check_conventional_batch(command)
        elif self.partial:
            self.check_partial_batch(command, group_ids)
        elif not self.pipeline:
            self.check_one_step_off_batch(command)
        else:
            assert not self.is_due() or self.loading, "trained before it published"
            assert group_ids == self.in_turn()[: len(group_ids)]
        for group_id in group_ids:
            group = self.groups[group_id]
            assert not group.given_up
            assert group.places() == {Place.SCORED}
            if self.config.filter_no_signal:
                assert len({member.reward for member in group.members}) > 1
            if self.config.max_lag is not None:
                assert self.version - group.oldest() <= self.config.max_lag, "a token older than max_lag"
            self.ready.remove(group_id)
            self.ended += [(group.first + i, member.engine) for i, member in enumerate(group.members)]
            del self.groups[group_id]
        self.training = command
        if command.completes_step and self.drops:
            self.give_up_stale()

    def give_up_stale(self):
        """When a step begins, groups too old for the next one are given up: ready groups first, oldest first."""
        others = [group_id for group_id, group in self.groups.items() if group_id not in self.ready]
        for group_id in (*self.in_turn(), *others):
            if not self.groups[group_id].given_up and self.too_old(self.groups[group_id]):
                self.give_up(self.groups[group_id], DiscardReason.STALE)

    def check_conventional_batch(self, command):
        """Batch i of an RL step has lag i, token for token; batches in order of admission."""
        if not self.closed:
            everything = self.rl_step_rollouts(self.rl_step_start)
            assert self.num_ready == self.num_live == everything, "not all of the RL step is ready"
        self.closed = True
        self.check_lag_and_order(command, lag=self.version - self.rl_step_start)

    def check_partial_batch(self, command, group_ids):
        """As many groups as the RL step needs, the first or the oldest ready ones, on up-to-date engines."""
        if not self.chosen:
            assert self.version == self.rl_step_start == self.published
            assert not self.loading
            num_groups = self.rl_step_rollouts(self.version) // self.case.group_size
            assert len(self.ready) >= num_groups
            chosen = self.in_turn()[:num_groups]
            bounded = self.config.max_lag is not None
            self.chosen = sorted(chosen, key=lambda one: (self.groups[one].oldest() if bounded else 0, one))
            self.held = set(self.reported_version)
        assert group_ids == self.chosen[: len(group_ids)]
        del self.chosen[: len(group_ids)]

    def check_one_step_off_batch(self, command):
        """Batch i of an RL step has lag G + i, of the first i, token for token; batches in order of admission."""
        self.hand_over()
        before = self.config.optimizer_steps_per_rl_step if self.rl_step_start else 0
        self.check_lag_and_order(command, lag=before + self.version - self.rl_step_start)
        for rollout_id in command.rollout_ids:
            assert self.groups[rollout_id // self.case.group_size].rl_step == self.rl_step_start

    def hand_over(self):
        """Before an RL step is trained, or the weights after it are published, all its groups are ready."""
        if self.handed_over_at != self.rl_step_start:
            assert self.version == self.rl_step_start
            ready = [group_id for group_id in self.ready if self.groups[group_id].rl_step == self.version]
            assert len(ready) * self.case.group_size == self.rl_step_rollouts(self.version)
            assert len(ready) == len(self.ready) == self.num_live // self.case.group_size
            self.handed_over_at = self.version

    def check_lag_and_order(self, command, *, lag):
        for _, group, rollout in self.rollouts(Place.SCORED):
            if group.first in command.rollout_ids:
                assert {self.version - version for version in rollout.token_versions} == {lag}
        assert command.rollout_ids[0] > self.last_trained
        assert sorted(command.rollout_ids) == list(command.rollout_ids)
        self.last_trained = command.rollout_ids[-1]

    def obey_publish(self, command):
        assert self.training is None
        assert not self.publishing
        assert not self.loading, "two publications at the same time"
        assert command == PublishWeights(self.version, self.weight_update)
        assert self.published < self.version < self.case.optimizer_steps
        if self.pipeline:
            assert self.is_due(), "published before it is time"
        else:
            assert self.version == self.rl_step_start, "published in the middle of an RL step"
        if self.config.kind == "one_step_off":
            self.hand_over()
            assert self.rl_step_rollouts(self.generating_for()), "published for nobody"
        self.published, self.publishing = self.version, True
        if self.weight_update is WeightUpdate.WAIT:
            self.held = set(self.reported_version)
        self.engines_changed()

    def obey_stop(self, command):
        self.stopped = command.reason
        if command.reason is StopReason.DONE:
            assert self.version == self.case.optimizer_steps
            assert self.num_taken == 0
        else:
            assert self.num_given_up > self.config.discard_limit

    # ------------------------------------------------------- checks that commands are not missing

    def check_rollouts_go_on(self):
        """A free slot has a reason: nothing may be admitted. What is admitted starts."""
        free = self.free_engines()
        if self.case.routed:
            assert not any(self.waiting(engine) for engine in free), "a rollout waits beside a free slot of its engine"
            if free:
                self.name_engines()
                waits = self.waiting(-1)
                assert not waits or self.engine_to_begin(free, -1) is None, "one waits beside free room"
        elif free:
            assert not self.rollouts(Place.INTERRUPTED), "an interrupted rollout waits beside a free slot"
        elif self.case.environments is None:
            return
        if self.case.environments is not None and self.num_open() >= self.case.environments:
            return
        for group in self.groups.values():
            started = len(group.members) == self.case.group_size
            assert started or group.given_up, "a group waits beside a free slot or environment"
        if self.conventional:
            assert self.closed or self.num_live == self.rl_step_rollouts(self.rl_step_start)
        elif self.config.kind == "one_step_off":
            rl_step = self.generating_for()
            loading = self.oldest_loaded < self.published
            assert loading or self.num_generated(rl_step) == self.rl_step_rollouts(rl_step)
        else:
            size = self.case.group_size
            full = self.num_limited() + size > self.num_places()
            gated = self.gated and self.num_live + size > self.allowance()
            in_rl_step = self.partial and (self.chosen or self.num_taken)
            assert full or gated or in_rl_step, "a free slot or environment without a reason"

    def check_trainer_goes_on(self):
        """An idle trainer has a reason; the queue keeps its limit; and nobody waits for nobody."""
        if self.partial or (self.config.on_full is OnFull.DROP_OLDEST and self.pipeline):
            assert self.partial or self.num_ready <= self.config.ready_queue_limit
            assert self.num_open() <= self.places
        elif self.pipeline:
            assert self.num_placed() <= self.most_placed
            assert self.num_live <= self.case.group_size * self.places
        if self.training or self.publishing:
            return
        loading = self.loading
        pending = [group for group in self.groups.values() if not group.given_up and group.places() != {Place.SCORED}]
        if self.conventional:
            assert not self.closed or loading, "the trainer stopped in the middle of an RL step"
        elif self.partial:
            assert self.version == self.rl_step_start, "the trainer stopped in the middle of an RL step"
            assert not self.chosen
            assert self.published == self.version or loading
            if not loading and self.num_ready >= self.rl_step_rollouts(self.version):
                assert self.gated, "an RL step waits beside an idle trainer"
                assert pending, "the trainer waits for a straggler that does not exist"
        elif not self.pipeline:
            assert self.handed_over_at != self.rl_step_start, "the trainer stopped in the middle of an RL step"
            assert self.num_ready < self.rl_step_rollouts(self.rl_step_start), "both are done and do not hand over"
        else:
            assert not self.is_due() or loading, "weights wait beside an idle trainer"
            if self.num_ready >= self.config.micro_batch:
                assert self.gated, "a batch waits beside an idle trainer"
                assert pending, "the trainer waits for a straggler that does not exist"
        outstanding = self.rollouts(Place.IN_FLIGHT, Place.ACTING, Place.SCORING)
        assert outstanding or loading or not self.reported_version, "deadlock"

    def check_given_up_groups_end(self):
        """What nobody wants is aborted or discarded at once, or when its score arrives."""
        for group in self.groups.values():
            for member in group.members if group.given_up else ():
                assert member.place not in (Place.SCORED, Place.INTERRUPTED, Place.ACTING)
                assert member.place is not Place.IN_FLIGHT or member.abort_sent
