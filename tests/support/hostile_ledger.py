"""What a hostile driver knows: configurations, rollouts and groups, and a ledger that never reads the scheduler's."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import groupby

from hypothesis import strategies as st

from pipelinerl.config.scheduler import SchedulerConfig
from pipelinerl.scheduler.events import DiscardReason, OnFull, OnStale, VersionSpans, WeightUpdate
from pipelinerl.scheduler.kinds import make_scheduler


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
    read: int = 0  # tokens of its prompt and of what it has observed
    context: int = 0  # those and its own, at its last observation
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

    def places(self):
        return {member.place for member in self.members}

    def oldest(self):
        return min(version for member in self.members for version in member.token_versions)


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
    def keeps_caches(self):
        return self.environments is not None and self.kv_cache_tokens != 0

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
        generation_batch_size=draw(st.integers(1, 5)),
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
    environments = draw(st.sampled_from([None, None, 1, 3, 8]))
    kv_cache_tokens = draw(st.sampled_from([None, 0, 8, 20, 20, 40]))
    return Case(scheduler, steps, draw(st.integers(1, 3)), group_size, environments, kv_cache_tokens)


class HostileLedger:
    """What is true of rollouts, weights and training, and what of it has been reported."""

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
        self.most_placed = 0  # rollouts that may be in flight, being scored and ready until the next admission
        self.num_prompts = 0
        self.prompts_again = []  # prompts of stale groups, not yet started again
        self.ready = []  # ids of ready groups, in order of arrival
        self.true_version = [0] * case.num_engines
        self.reported_version = [0] * case.num_engines
        self.held = [False] * case.num_engines
        self.version = 0  # optimizer steps done
        self.published = 0
        self.training = None  # the outstanding StartTraining
        self.publishing = False
        self.num_taken = 0  # rollouts given to the trainer in this optimizer step
        self.num_given_up = 0  # rollouts of the groups given up in this optimizer step
        self.rl_step_start = 0  # not pipeline: version at which the RL step in training begins
        self.last_trained = -1  # not pipeline: last rollout trained on in this RL step
        self.chosen = []  # partial: groups of the RL step in training, not yet given to the trainer
        self.met_at = None  # one_step_off: version at the last meeting
        self.closed = False  # conventional: training has begun and the engines have not all loaded since
        self.stopped = None

    def ask(self, rollout):
        """A rollout begins to wait for a slot or room."""
        self.num_asked += 1
        rollout.asked = self.num_asked

    def waiting(self, engine):
        """Rollouts that wait for this engine, in order; -1: those that have not begun, and wait for room."""
        waiting = [one for _, _, one in self.rollouts(Place.INTERRUPTED) if one.engine == engine]
        return sorted(waiting, key=lambda one: one.asked)

    def tokens_on(self, engine):
        """Tokens of context of all rollouts of an engine."""
        begun = self.rollouts(Place.IN_FLIGHT, Place.ACTING, Place.INTERRUPTED)
        return sum(one.context for _, _, one in begun if one.engine == engine)

    def engine_with_room(self, free):
        """Of some engines that with the fewest tokens of context, if the longest fits too."""
        tokens, engine = min((self.tokens_on(engine), engine) for engine in free)
        capacity = self.case.kv_cache_tokens
        fits = capacity is None or tokens + self.longest <= capacity
        return engine if fits or not tokens else None

    def engine_to_go_on(self, home):
        """Where a rollout waits whose environment has answered: elsewhere if its engine is full and one has none."""
        free = self.free_engines()
        empty = [] if home in free else [engine for engine in free if not self.tokens_on(engine)]
        return empty[0] if empty else home

    def free_engines(self):
        """Engines that have a slot to give."""
        engines = range(self.case.num_engines)
        return [engine for engine in engines if not self.held[engine] and self.num_free(engine)]

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
        """The gate at the top of scheduler.py, less what the running step has taken already."""
        batches = min(self.reported_version) + self.config.max_lag - self.next_version() + 1
        return self.config.train_batch_size * batches - self.num_taken % self.config.train_batch_size

    def num_places(self):
        """Rollouts that may be open and ready together, when a group is admitted."""
        slots = self.case.num_engines * self.config.generation_batch_size
        return max(slots, self.case.environments or 0) + self.config.ready_queue_limit

    def num_placed(self):
        return self.num_ready + self.num_open()

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
        return 0 if self.met_at is None else self.met_at + self.config.optimizer_steps_per_rl_step

    def num_generated(self, rl_step):
        """Live rollouts of an RL step, started or not."""
        groups = [group for group in self.groups.values() if group.rl_step == rl_step and not group.given_up]
        return len(groups) * self.case.group_size

    def too_old(self, group):
        """Whether the next batch would train it above ``max_lag``, by what the engines have reported."""
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
