"""The scheduler against a hostile but legal driver: everything that may happen does, in any order.

``HostileDriver`` keeps its own books and never reads the scheduler's: which weights each engine samples with *in truth*
(it reports them later), which version sampled each token, what has been reported. Whatever the scheduler
commands is held against these books at once, and after every event so is what it does *not* command: free
slots, an idle trainer or weights that could be published need a reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import groupby

import pytest
from hypothesis import strategies as st

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


class Place(Enum):
    """Where a rollout is as far as has been reported; the last three are for ever."""

    IN_FLIGHT = auto()
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

    def fresh(self):
        return make_scheduler(
            self.scheduler,
            optimizer_steps=self.optimizer_steps,
            num_engines=self.num_engines,
            group_size=self.group_size,
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
    return Case(scheduler, steps, draw(st.integers(1, 3)), group_size)


class HostileDriver:
    """What may happen, what has, and what must hold."""

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
        self.num_groups = 0
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
        self.events = []
        self.answers = [tuple(self.scheduler.start())]
        self.obey(self.answers[0])

    # ------------------------------------------------------------------------------- what may happen

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

    def engines_to_load(self):
        """Engines that may take the published weights now."""
        waits = self.weight_update is WeightUpdate.WAIT
        busy = {rollout.engine for _, _, rollout in self.running()} if waits else set()
        return [e for e, version in enumerate(self.true_version) if version < self.published and e not in busy]

    def engines_to_report(self):
        return [e for e, version in enumerate(self.true_version) if version > self.reported_version[e]]

    def decode(self, engine):
        """All rollouts on an engine get a token."""
        for _, _, rollout in self.running():
            if rollout.engine == engine:
                rollout.token_versions.append(self.true_version[engine])

    def generate_last(self, entry):
        """A rollout ends in truth; an abort comes too late from now on."""
        _, _, rollout = entry
        rollout.token_versions.append(self.true_version[rollout.engine])
        rollout.ended = "finished"

    def report(self, entry, *, obey_abort):
        """The end of a rollout is reported; one that still runs ends now, by abort if one was sent."""
        rollout_id, group, rollout = entry
        if not rollout.ended:
            if rollout.abort_sent and obey_abort:
                rollout.ended = "aborted"
            else:
                self.generate_last(entry)
        if rollout.ended == "finished":
            rollout.place = Place.SCORING
            self.deliver(RolloutFinished(rollout_id, rollout.engine, rollout.spans))
        else:
            rollout.place = Place.ABORTED if group.given_up else Place.INTERRUPTED
            self.deliver(RolloutAborted(rollout_id, rollout.engine, rollout.spans))

    def score(self, entry, reward):
        rollout_id, group, rollout = entry
        rollout.place, rollout.reward = Place.SCORED, reward
        if not group.given_up and len(group.members) == self.case.group_size and group.places() == {Place.SCORED}:
            self.ready.append(group.first // self.case.group_size)
        self.deliver(RolloutScored(rollout_id, reward))

    def preempt(self, entry):
        """A rollout loses its cache, not its tokens: nothing is decided."""
        rollout_id, _, rollout = entry
        self.deliver(RolloutPreempted(rollout_id, rollout.engine, len(rollout.token_versions)))
        assert self.stopped or self.answers[-1] == ()

    def fail(self, entry):
        rollout_id, group, rollout = entry
        in_flight = rollout.place is Place.IN_FLIGHT
        rollout.place = Place.FAILED
        self.give_up(group, DiscardReason.SIBLING_FAILED)
        self.deliver(RolloutFailed(rollout_id, rollout.engine if in_flight else None))

    def finish_training(self):
        command, self.training = self.training, None
        if command.completes_step:
            self.version += 1
            self.num_taken = self.num_given_up = 0
            if self.version - self.rl_step_start == self.config.optimizer_steps_per_rl_step:
                self.rl_step_start, self.last_trained = self.version, -1
        self.deliver(TrainingFinished(self.version, 0.0))

    def finish_publishing(self):
        self.publishing = False
        self.deliver(WeightsPublished(self.published, 0.0))

    def take_weights(self, engine, *, all_have_arrived):
        """An engine samples with the published weights from now on, and says so later."""
        self.true_version[engine] = self.published
        if self.weight_update is WeightUpdate.ABORT:
            for _, _, rollout in self.running():
                arrived = all_have_arrived or len(rollout.token_versions) > rollout.kept_tokens
                if rollout.engine == engine and arrived:
                    rollout.ended = "interrupted"

    def lose(self, entry):
        """An engine that is to be empty before it loads does not wait for a rollout any longer."""
        entry[2].ended = "interrupted"

    def losable(self):
        waits = self.weight_update is WeightUpdate.WAIT
        return [entry for entry in self.running() if waits and self.true_version[entry[2].engine] < self.published]

    def report_loaded(self, engine):
        self.reported_version[engine] = self.true_version[engine]
        self.held[engine] = False
        if not self.training and min(self.reported_version) == self.version == self.rl_step_start:
            self.closed = False
        self.deliver(WeightsLoaded(engine, self.reported_version[engine], 0.0))

    def impossible(self):
        """Events that cannot happen now."""
        yield RolloutScored(10**9, 1.0)
        yield RolloutFailed(10**9)
        yield RolloutPreempted(10**9, 0, 1)
        yield TrainingFinished(self.version + (0 if self.training and self.training.completes_step else 1), 0.0)
        yield WeightsPublished(self.published + (1 if self.publishing else 0), 0.0)
        for engine in (-1, self.case.num_engines):
            yield WeightsLoaded(engine, self.published, 0.0)
        for engine, version in enumerate(self.reported_version):
            yield WeightsLoaded(engine, version, 0.0)
            yield WeightsLoaded(engine, self.published + 1, 0.0)
        for rollout_id, engine in self.ended[-3:]:
            yield RolloutFinished(rollout_id, engine, VersionSpans((), ()))
            yield RolloutScored(rollout_id, 1.0)
            yield RolloutFailed(rollout_id)
        for rollout_id, group, rollout in self.rollouts(*Place):
            if rollout.place is Place.IN_FLIGHT:
                yield RolloutFinished(rollout_id, rollout.engine + 1, rollout.spans)
                yield RolloutFailed(rollout_id, rollout.engine + 1)
                yield RolloutFinished(rollout_id, rollout.engine, VersionSpans((group.bound - 1,), (1,)))
                yield RolloutAborted(rollout_id, rollout.engine, VersionSpans((self.published + 1,), (1,)))
            else:
                yield RolloutFinished(rollout_id, rollout.engine, rollout.spans)
                yield RolloutAborted(rollout_id, rollout.engine, rollout.spans)
            if rollout.place is not Place.SCORING:
                yield RolloutScored(rollout_id, 1.0)
                yield RolloutFailed(rollout_id)
                if rollout.place is not Place.IN_FLIGHT:
                    yield RolloutFailed(rollout_id, 0)

    def lie(self, pick):
        lies = [] if self.stopped else list(self.impossible())
        if lies:
            with pytest.raises(SchedulerError, match=r"^cannot handle"):
                self.scheduler.handle(lies[pick % len(lies)])

    # ------------------------------------------------------------------------- what the scheduler does

    def deliver(self, event):
        answer = tuple(self.scheduler.handle(event))
        self.events.append(event)
        self.answers.append(answer)
        self.obey(answer)

    def obey(self, commands):
        self.sound = False
        for command in commands:
            assert not self.stopped, "a command after Stop"
            match command:
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
        self.sound = True

    def obey_start(self, command):
        group_id, member = divmod(command.rollout_id, self.case.group_size)
        if group_id == self.num_groups:
            assert member == 0
            self.check_admission(command.prompt_id)
            bound, rl_step = min(self.reported_version), self.generating_for()
            self.groups[group_id] = Group(command.rollout_id, command.prompt_id, bound, rl_step)
            self.num_groups += 1
        group = self.groups[group_id]
        assert not group.given_up
        assert command.prompt_id == group.prompt_id
        assert not self.closed, "conventional: a rollout starts between the first train step and the last load"
        unheld = [engine for engine in range(self.case.num_engines) if not self.held[engine]]
        assert command.engine == min(unheld, key=lambda engine: len(self.in_flight(engine))), "not the emptiest engine"
        if member == len(group.members):
            assert command.kept_tokens == 0
            assert not self.rollouts(Place.INTERRUPTED), "a new rollout starts before an interrupted one"
            group.members.append(Rollout(command.engine))
        else:
            rollout = group.members[member]
            assert rollout.place is Place.INTERRUPTED, "a rollout starts twice"
            assert command.kept_tokens == len(rollout.token_versions)
            rollout.place, rollout.engine, rollout.ended = Place.IN_FLIGHT, command.engine, ""
            rollout.kept_tokens = command.kept_tokens
        assert len(self.in_flight(command.engine)) <= self.config.generation_batch_size

    def check_admission(self, prompt_id):
        """A prompt that is to be tried again, or else a new one; and only while there is a place for the group.

        With ``on_full = wait`` that means: ready + in flight + the new group <= slots + ``ready_queue_limit``. Until
        the next admission only what is in flight or has finished by now can become ready. So the ready queue never
        holds more than ``ready_queue_limit``, all slots, and what had finished without being ready at that time.
        """
        if self.prompts_again:
            assert prompt_id == self.prompts_again.pop(0)
        else:
            assert prompt_id == self.num_prompts
            self.num_prompts += 1
        if self.config.kind == "one_step_off":
            assert min(self.reported_version) == self.published == (self.met_at or 0), "not all engines are ready"
            rl_step = self.generating_for()
            assert self.num_generated(rl_step) + self.case.group_size <= self.rl_step_rollouts(rl_step)
        if self.pipeline and self.config.on_full is OnFull.WAIT:
            assert self.num_placed() + self.case.group_size <= self.num_places()
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
            assert rollout.place in (Place.SCORED, Place.INTERRUPTED)
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
        """When a step begins, what the next one comes too late for is given up: ready groups first, oldest first."""
        others = [group_id for group_id, group in self.groups.items() if group_id not in self.ready]
        for group_id in (*self.in_turn(), *others):
            if not self.groups[group_id].given_up and self.too_old(self.groups[group_id]):
                self.give_up(self.groups[group_id], DiscardReason.STALE)

    def too_old(self, group):
        """Whether the next batch would train it above ``max_lag``, by what the engines have reported."""
        generated = len(group.members) == self.case.group_size and group.places() <= {Place.SCORING, Place.SCORED}
        return self.next_version() - (group.oldest() if generated else group.bound) > self.config.max_lag

    def check_conventional_batch(self, command):
        """Batch i of an RL step has lag i, token for token; batches in order of admission."""
        if not self.closed:
            everything = self.rl_step_rollouts(self.rl_step_start)
            assert self.num_ready == self.num_live == everything, "not all of the RL step is ready"
        self.closed = True
        self.check_lag_and_order(command, lag=self.version - self.rl_step_start)

    def check_partial_batch(self, command, group_ids):
        """As many as the RL step needs, the first that are ready, or the oldest of them, on up-to-date engines."""
        if not self.chosen:
            assert self.version == self.rl_step_start == min(self.reported_version)
            num_groups = self.rl_step_rollouts(self.version) // self.case.group_size
            assert len(self.ready) >= num_groups
            chosen = self.in_turn()[:num_groups]
            bounded = self.config.max_lag is not None
            self.chosen = sorted(chosen, key=lambda one: (self.groups[one].oldest() if bounded else 0, one))
            self.held = [True] * self.case.num_engines
        assert group_ids == self.chosen[: len(group_ids)]
        del self.chosen[: len(group_ids)]

    def check_one_step_off_batch(self, command):
        """Batch i of an RL step has lag G + i, of the first i, token for token; batches in order of admission."""
        self.meet()
        before = self.config.optimizer_steps_per_rl_step if self.rl_step_start else 0
        self.check_lag_and_order(command, lag=before + self.version - self.rl_step_start)
        for rollout_id in command.rollout_ids:
            assert self.groups[rollout_id // self.case.group_size].rl_step == self.rl_step_start

    def meet(self):
        """Before an RL step is trained, or what follows it is published, all of it is ready."""
        if self.met_at != self.rl_step_start:
            assert self.version == self.rl_step_start
            ready = [group_id for group_id in self.ready if self.groups[group_id].rl_step == self.version]
            assert len(ready) * self.case.group_size == self.rl_step_rollouts(self.version)
            assert len(ready) == len(self.ready) == self.num_live // self.case.group_size
            self.met_at = self.version

    def generating_for(self):
        """Version at which the RL step that is being generated begins."""
        return 0 if self.met_at is None else self.met_at + self.config.optimizer_steps_per_rl_step

    def num_generated(self, rl_step):
        """Live rollouts of an RL step, started or not."""
        groups = [group for group in self.groups.values() if group.rl_step == rl_step and not group.given_up]
        return len(groups) * self.case.group_size

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
        assert min(self.reported_version) == self.published, "two publications at the same time"
        assert command == PublishWeights(self.version, self.weight_update)
        assert self.published < self.version < self.case.optimizer_steps
        if self.pipeline:
            assert self.is_due(), "published before it is time"
        else:
            assert self.version == self.rl_step_start, "published in the middle of an RL step"
        if self.config.kind == "one_step_off":
            self.meet()
            assert self.rl_step_rollouts(self.generating_for()), "published for nobody"
        self.published, self.publishing = self.version, True
        if self.weight_update is WeightUpdate.WAIT:
            self.held = [True] * self.case.num_engines

    def obey_stop(self, command):
        self.stopped = command.reason
        if command.reason is StopReason.DONE:
            assert self.version == self.case.optimizer_steps
            assert self.num_taken == 0
        else:
            assert self.num_given_up > self.config.discard_limit

    # -------------------------------------------------------------------------------- what must hold

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
        """Rollouts that may be in flight and ready together, when a group is admitted."""
        return self.case.num_engines * self.config.generation_batch_size + self.config.ready_queue_limit

    def num_placed(self):
        return self.num_ready + len(self.rollouts(Place.IN_FLIGHT))

    def in_turn(self):
        """Ready groups in the order they are trained on: oldest token first under max_lag, else as they came."""
        if self.config.max_lag is None:
            return self.ready
        return sorted(self.ready, key=lambda group_id: self.groups[group_id].oldest())

    def rl_step_rollouts(self, start):
        """Rollouts of the RL step that begins at a version."""
        steps = min(self.config.optimizer_steps_per_rl_step, self.case.optimizer_steps - start)
        return max(steps, 0) * self.config.train_batch_size

    def check_rollouts_go_on(self):
        """A free slot has a reason: nothing may be admitted. What is admitted starts."""
        unheld = [engine for engine in range(self.case.num_engines) if not self.held[engine]]
        if all(len(self.in_flight(engine)) == self.config.generation_batch_size for engine in unheld):
            return
        assert not self.rollouts(Place.INTERRUPTED), "an interrupted rollout waits beside a free slot"
        for group in self.groups.values():
            started = len(group.members) == self.case.group_size
            assert started or group.given_up, "a group waits beside a free slot"
        if self.conventional:
            assert self.closed or self.num_live == self.rl_step_rollouts(self.rl_step_start)
        elif self.config.kind == "one_step_off":
            rl_step = self.generating_for()
            loading = min(self.reported_version) < (self.met_at or 0)
            assert loading or self.num_generated(rl_step) == self.rl_step_rollouts(rl_step)
        else:
            size = self.case.group_size
            full = self.config.on_full is OnFull.WAIT and self.num_placed() + size > self.num_places()
            full = full and self.pipeline
            gated = self.gated and self.num_live + size > self.allowance()
            assert full or gated, "a free slot without a reason"

    def check_trainer_goes_on(self):
        """An idle trainer has a reason; the queue keeps its limit; and nobody waits for nobody."""
        if self.config.on_full is OnFull.DROP_OLDEST and self.pipeline:
            assert self.num_ready <= self.config.ready_queue_limit
        if self.training or self.publishing:
            return
        loading = min(self.reported_version) < self.published
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
            assert self.met_at != self.rl_step_start, "the trainer stopped in the middle of an RL step"
            assert self.num_ready < self.rl_step_rollouts(self.rl_step_start), "both are done and do not meet"
        else:
            assert not self.is_due() or loading, "weights wait beside an idle trainer"
            if self.num_ready >= self.config.micro_batch:
                assert self.gated, "a batch waits beside an idle trainer"
                assert pending, "the trainer waits for a straggler that does not exist"
        outstanding = self.rollouts(Place.IN_FLIGHT, Place.SCORING)
        assert outstanding or loading, "deadlock"

    def check_given_up_groups_end(self):
        """What nobody wants is aborted or discarded at once, or when its score arrives."""
        for group in self.groups.values():
            for member in group.members if group.given_up else ():
                assert member.place not in (Place.SCORED, Place.INTERRUPTED)
                assert member.place is not Place.IN_FLIGHT or member.abort_sent

    # ------------------------------------------------------------------------------------ by itself

    def happenings(self, rng, *, failures):
        """All that may happen now, by kind, each as a function to call."""
        ends = self.rollouts(Place.IN_FLIGHT)
        scorings = self.rollouts(Place.SCORING)
        rewards = (lambda rollout_id: rng.randint(0, 1)) if failures else (lambda rollout_id: rollout_id)
        kinds = {
            "decode": [lambda e=e: self.decode(e) for e in range(self.case.num_engines)],
            "generate last": [lambda r=r: self.generate_last(r) for r in self.running()],
            "report": [lambda r=r: self.report(r, obey_abort=rng.random() < 0.5) for r in ends],
            "score": [lambda r=r: self.score(r, float(rewards(r[0]))) for r in scorings],
            "fail": [lambda r=r: self.fail(r) for r in ends + scorings] if failures else [],
            "train": [self.finish_training] if self.training else [],
            "publish": [self.finish_publishing] if self.publishing else [],
            "take": [
                lambda e=e: self.take_weights(e, all_have_arrived=rng.random() < 0.5) for e in self.engines_to_load()
            ],
            "load": [lambda e=e: self.report_loaded(e) for e in self.engines_to_report()],
            "lose": [lambda r=r: self.lose(r) for r in self.losable()] if failures else [],
            "lie": [lambda: self.lie(rng.randrange(10**6))] if failures else [],
        }
        return {kind: calls for kind, calls in kinds.items() if calls}

    def go_on(self, rng, *, num_happenings, failures, pace=None):
        """Let up to ``num_happenings`` things happen; ``pace`` maps kinds to how often, against 1."""
        for _ in range(num_happenings):
            if self.stopped:
                return
            kinds = self.happenings(rng, failures=failures)
            names = list(kinds)
            weights = [(pace or {}).get(name, 1.0) for name in names]
            rng.choice(kinds[rng.choices(names, weights)[0]])()

    def replay(self):
        """Check that a fresh scheduler gives the recorded commands to the recorded events."""
        scheduler = self.case.fresh()
        assert tuple(scheduler.start()) == self.answers[0]
        assert [tuple(scheduler.handle(event)) for event in self.events] == self.answers[1:]
