"""A hostile but legal driver of a scheduler: every legal event may happen, in any order.

It never reads the scheduler's state. Its ledger has the weights that each engine samples with *in truth* (reported
later), the version that sampled each token, and all that has been reported.
"""

from __future__ import annotations

from types import MappingProxyType

import pytest
from hostile_ledger import HostileLedger, Place

from pipelinerl.errors import SchedulerError
from pipelinerl.scheduler.events import (
    DiscardReason,
    EngineJoined,
    EngineLeaving,
    EngineLeft,
    EnvironmentFailed,
    EnvironmentFault,
    ObservationReady,
    RolloutAborted,
    RolloutFailed,
    RolloutFinished,
    RolloutPreempted,
    RolloutScored,
    TrainingFinished,
    TurnFinished,
    VersionSpans,
    WeightsLoaded,
    WeightsPublished,
    WeightUpdate,
)

FAILING = (Place.IN_FLIGHT, Place.ACTING, Place.SCORING)
"""Where a rollout can fail."""
HAPPENINGS = (
    "decode", "generate last", "report", "score", "end turn", "observe", "end episode", "fail", "train", "publish",
    "take", "load", "lose", "preempt", "join", "leave", "end of notice", "load late", "lie",
)  # fmt: skip


class HostileDriver(HostileLedger):
    """A scheduler, and all that may happen to it."""

    def __init__(self, case):
        super().__init__(case)
        self.events = []
        self.answers = [tuple(self.scheduler.start())]
        self.obey(self.answers[0])

    # ------------------------------------------------------------------------------- legal happenings

    def engines_to_load(self):
        """Engines that may take the published weights now."""
        waits = self.weight_update is WeightUpdate.WAIT
        busy = {rollout.engine for _, _, rollout in self.running()} if waits else set()
        return [e for e in self.reported_version if self.true_version[e] < self.published and e not in busy]

    def engines_to_report(self):
        return [e for e, version in self.reported_version.items() if self.true_version[e] > version]

    def engines_leaving(self):
        return [engine for engine in self.true_version if engine not in self.reported_version]

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
        group.reported += rollout.token_versions[:1]
        if rollout.ended == "finished":
            rollout.place = Place.SCORING
            self.deliver(RolloutFinished(rollout_id, rollout.engine, rollout.spans))
        else:
            rollout.place = Place.ABORTED if group.given_up else Place.INTERRUPTED
            self.ask(rollout)
            if rollout.engine not in self.reported_version:
                rollout.engine, left = -1, rollout.engine
                self.deliver(RolloutAborted(rollout_id, left, rollout.spans))
                return
            self.deliver(RolloutAborted(rollout_id, rollout.engine, rollout.spans))

    def turning(self):
        """Rollouts whose turn may end now, and not the last one."""
        turns = self.case.environments is not None
        return [entry for entry in self.running() if turns and entry[2].num_turns < 3]

    def end_turn(self, entry):
        """A turn ends in truth and is reported, whether an abort was sent or not."""
        rollout_id, group, rollout = entry
        rollout.token_versions.append(self.true_version[rollout.engine])
        rollout.num_turns += 1
        group.reported += rollout.token_versions[:1]
        rollout.place, rollout.home = Place.ACTING, rollout.engine
        self.deliver(TurnFinished(rollout_id, rollout.engine, rollout.spans))
        assert rollout.place is (Place.DISCARDED if group.given_up else rollout.place)

    def observe(self, entry):
        """The environment answers, at the second try."""
        rollout_id, _, rollout = entry
        self.deliver(EnvironmentFailed(rollout_id, EnvironmentFault.TIMEOUT, again=True))
        read = rollout.read + 1 + rollout_id % 5
        context = read + len(rollout.token_versions)
        self.longest = max(self.longest, context)
        if rollout.engine not in self.reported_version:
            rollout.engine = -1
        elif self.case.routed:
            rollout.engine = self.engine_to_go_on(rollout_id, rollout)
        rollout.place, rollout.read, rollout.context = Place.INTERRUPTED, read, context
        self.ask(rollout)
        self.deliver(ObservationReady(rollout_id, rollout.read))

    def end_episode(self, entry):
        """The environment answers that the turn before was the last one."""
        rollout_id, _, rollout = entry
        rollout.place = Place.SCORING
        self.deliver(RolloutFinished(rollout_id, None, rollout.spans))

    def answered(self):
        """Rollouts whose environment acts on a turn."""
        return [entry for entry in self.rollouts(Place.ACTING) if entry[2].num_turns]

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
        """An engine samples with the published weights from now on, and reports it later."""
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
        self.held.discard(engine)
        self.joining.discard(engine)
        self.engines_changed()
        self.deliver(WeightsLoaded(engine, self.reported_version[engine], 0.0))

    def join(self, version):
        """An engine joins with some weights; it takes rollouts at once if these are the published ones."""
        engine = self.num_joined
        self.num_joined += 1
        self.true_version[engine] = self.reported_version[engine] = version
        if version < self.published:
            self.joining.add(engine)
            self.held.add(engine)
        self.engines_changed()
        self.deliver(EngineJoined(engine, version))

    def leave(self, engine):
        """An engine gets notice; those that wait for it find another."""
        del self.reported_version[engine]
        self.joining.discard(engine)
        self.held.discard(engine)
        if self.case.routed:
            for rollout in self.waiting(engine):
                rollout.engine = -1
                self.ask(rollout)
        self.engines_changed()
        self.deliver(EngineLeaving(engine))

    def end_of_notice(self, engine, kept):
        """The rollouts that are left on an engine end with the tokens that are known; then it is gone."""
        for entry in self.in_flight(engine):
            rollout = entry[2]
            if not rollout.ended:
                rollout.ended = "interrupted"
            if rollout.ended != "finished":
                del rollout.token_versions[kept(len(rollout.token_versions)) :]
            self.report(entry, obey_abort=True)
        del self.true_version[engine]
        self.deliver(EngineLeft(engine))

    def load_late(self, engine):
        """An engine that is leaving has loaded the weights that were on their way to it."""
        self.true_version[engine] = self.published
        self.deliver(WeightsLoaded(engine, self.published, 0.0))
        assert self.stopped or self.answers[-1] == ()

    def impossible(self):
        """Events that cannot happen now."""
        yield RolloutScored(10**9, 1.0)
        yield RolloutFailed(10**9)
        yield RolloutPreempted(10**9, 0, 1)
        yield ObservationReady(10**9)
        yield EnvironmentFailed(10**9, EnvironmentFault.ERROR, again=True)
        yield RolloutFinished(10**9, None, VersionSpans((), ()))
        yield TrainingFinished(self.version + (0 if self.training and self.training.completes_step else 1), 0.0)
        yield WeightsPublished(self.published + (1 if self.publishing else 0), 0.0)
        yield EngineJoined(self.num_joined - 1, self.published)
        yield EngineJoined(self.num_joined, self.published + 1)
        for engine in (-1, self.num_joined):
            yield WeightsLoaded(engine, self.published, 0.0)
            yield EngineLeaving(engine)
            yield EngineLeft(engine)
        for engine in self.engines_leaving():
            yield EngineLeaving(engine)
            if self.in_flight(engine):
                yield EngineLeft(engine)
        for engine, version in self.reported_version.items():
            yield EngineLeft(engine)
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
                yield TurnFinished(rollout_id, rollout.engine, rollout.spans)
            if rollout.place is not Place.ACTING:
                yield ObservationReady(rollout_id)
                yield EnvironmentFailed(rollout_id, EnvironmentFault.ERROR, again=False)
                yield RolloutFinished(rollout_id, None, rollout.spans)
            if rollout.place is not Place.SCORING:
                yield RolloutScored(rollout_id, 1.0)
                if rollout.place is not Place.ACTING:
                    yield RolloutFailed(rollout_id)
                if rollout.place is not Place.IN_FLIGHT:
                    yield RolloutFailed(rollout_id, 0)

    def lie(self, pick):
        lies = [] if self.stopped else list(self.impossible())
        if lies:
            with pytest.raises(SchedulerError, match=r"^cannot handle"):
                self.scheduler.handle(lies[pick % len(lies)])

    def deliver(self, event):
        answer = tuple(self.scheduler.handle(event))
        self.events.append(event)
        self.answers.append(answer)
        self.obey(answer)

    # ------------------------------------------------------------------------------------ by itself

    def happenings(self, rng, *, failures):
        """All that may happen now, by kind, each as a function to call."""
        ends = self.rollouts(Place.IN_FLIGHT)
        scorings = self.rollouts(Place.SCORING)
        leaves = failures and not self.partial  # colocated engines come and go with the trainer
        joins = leaves or not self.reported_version
        rewards = (lambda rollout_id: rng.randint(0, 1)) if failures else (lambda rollout_id: rollout_id)
        kinds = {
            "decode": [lambda e=e: self.decode(e) for e in self.true_version],
            "generate last": [lambda r=r: self.generate_last(r) for r in self.running()],
            "report": [lambda r=r: self.report(r, obey_abort=rng.random() < 0.5) for r in ends],
            "score": [lambda r=r: self.score(r, float(rewards(r[0]))) for r in scorings],
            "end turn": [lambda r=r: self.end_turn(r) for r in self.turning()],
            "observe": [lambda r=r: self.observe(r) for r in self.rollouts(Place.ACTING)],
            "end episode": [lambda r=r: self.end_episode(r) for r in self.answered()],
            "fail": [lambda r=r: self.fail(r) for r in self.rollouts(*FAILING)] if failures else [],
            "train": [self.finish_training] if self.training else [],
            "publish": [self.finish_publishing] if self.publishing else [],
            "take": [
                lambda e=e: self.take_weights(e, all_have_arrived=rng.random() < 0.5) for e in self.engines_to_load()
            ],
            "load": [lambda e=e: self.report_loaded(e) for e in self.engines_to_report()],
            "lose": [lambda r=r: self.lose(r) for r in self.losable()] if failures else [],
            "preempt": [lambda r=r: self.preempt(r) for r in self.running()] if failures else [],
            "join": [lambda: self.join(max(0, self.published - rng.choice([0, 0, 1, 2])))] if joins else [],
            "leave": [lambda e=e: self.leave(e) for e in self.reported_version] if leaves else [],
            "end of notice": [
                lambda e=e: self.end_of_notice(e, lambda number: rng.randint(0, number)) for e in self.engines_leaving()
            ],
            "load late": [lambda e=e: self.load_late(e) for e in self.engines_leaving()] if failures else [],
            "lie": [lambda: self.lie(rng.randrange(10**6))] if failures else [],
        }
        return {kind: calls for kind, calls in kinds.items() if calls}

    def go_on(self, rng, *, num_happenings, failures, pace=MappingProxyType({})):
        """Let up to ``num_happenings`` things happen; ``pace``: relative frequency of some kinds, others 1."""
        for _ in range(num_happenings):
            if self.stopped:
                return
            kinds = self.happenings(rng, failures=failures)
            names = list(kinds)
            weights = [pace.get(name, 1.0) for name in names]
            rng.choice(kinds[rng.choices(names, weights)[0]])()
