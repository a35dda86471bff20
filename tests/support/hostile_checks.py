"""What a scheduler may command, and what it must: each command is held against a ledger of its own.

After every event so is what it does *not* command: free slots, an idle trainer or weights that could be published need
a reason.
"""

from __future__ import annotations

from hostile_ledger import Group, HostileLedger, Place, Rollout

from pipelinerl.scheduler.events import (
    AbortRollout,
    DiscardReason,
    DiscardRollouts,
    OnFull,
    OpenEnvironment,
    PublishWeights,
    StartRollout,
    StartTraining,
    Stop,
    StopReason,
    WeightUpdate,
)


class CommandChecks(HostileLedger):
    """Checks commands and carries them out in the ledger."""

    # ------------------------------------------------------------------------------- each command

    def obey(self, commands):
        self.sound = False
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
        self.sound = True

    def group_of(self, command):
        """The group of a rollout that starts, and which of it that is; a new group may be admitted for it."""
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
        if self.case.keeps_caches:
            rollout = group.members[member]
            if rollout.engine < 0:
                assert command.engine == self.engine_with_room(free), "not the engine with room"
            else:
                assert command.engine == rollout.engine, "not the engine that has its KV cache"
            assert rollout is self.waiting(rollout.engine)[0], "another waits longer"
            assert not self.waiting(command.engine) or rollout.engine >= 0, "one that has begun waits beside it"
        else:
            assert command.engine == (home if home in free else emptiest), "neither the engine before nor the emptiest"
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
            self.most_placed = self.num_places() + self.num_waiting_for_siblings()
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

    # --------------------------------------------------------------- what must go on without one

    def check_rollouts_go_on(self):
        """A free slot has a reason: nothing may be admitted. What is admitted starts."""
        free = self.free_engines()
        if self.case.keeps_caches:
            assert not any(self.waiting(engine) for engine in free), "a rollout waits beside a free slot of its engine"
            assert not (free and self.waiting(-1)) or self.engine_with_room(free) is None, "one waits beside free room"
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
            loading = min(self.reported_version) < (self.met_at or 0)
            assert loading or self.num_generated(rl_step) == self.rl_step_rollouts(rl_step)
        else:
            size = self.case.group_size
            full = self.config.on_full is OnFull.WAIT and self.num_placed() + size > self.num_places()
            full = full and self.pipeline
            gated = self.gated and self.num_live + size > self.allowance()
            in_rl_step = self.partial and (self.chosen or self.num_taken)
            assert full or gated or in_rl_step, "a free slot or environment without a reason"

    def check_trainer_goes_on(self):
        """An idle trainer has a reason; the queue keeps its limit; and nobody waits for nobody."""
        if self.config.on_full is OnFull.DROP_OLDEST and self.pipeline:
            assert self.num_ready <= self.config.ready_queue_limit
        elif self.pipeline:
            assert self.num_placed() <= self.most_placed
            assert self.num_live <= self.case.group_size * self.num_places()
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
        outstanding = self.rollouts(Place.IN_FLIGHT, Place.ACTING, Place.SCORING)
        assert outstanding or loading, "deadlock"

    def check_given_up_groups_end(self):
        """What nobody wants is aborted or discarded at once, or when its score arrives."""
        for group in self.groups.values():
            for member in group.members if group.given_up else ():
                assert member.place not in (Place.SCORED, Place.INTERRUPTED, Place.ACTING)
                assert member.place is not Place.IN_FLIGHT or member.abort_sent
