"""The schedulers that generate in rounds: an *RL step* is G optimizer steps on rollouts generated together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Unpack

from pipelinerl.scheduler.base import Scheduler, SchedulerSettings, Sizes, TrainerState
from pipelinerl.scheduler.events import Command, WeightUpdate
from pipelinerl.scheduler.rollouts import RolloutGroup


class ConventionalScheduler(Scheduler):
    """Algorithm 1: generate the rollouts of G optimizer steps, make the G steps, publish, and again.

    Rollouts are split into batches in order of admission, not of arrival: otherwise the first batches
    would hold the short answers and the last ones the long. All rollouts of an RL step are trained in it, at a lag
    below G. The last RL step may have fewer steps.
    """

    def __init__(self, settings: SchedulerSettings, **sizes: Unpack[Sizes]) -> None:
        super().__init__(settings, **sizes)
        self._ready: list[RolloutGroup] = []
        self._num_to_train = 0  # rollouts of this RL step not yet given to the trainer; 0 while generating

    def may_admit(self) -> bool:
        """Return whether the newest weights generate and the RL step needs more rollouts."""
        training = self._num_to_train or self.num_taken
        return not training and self.up_to_date and self.num_live < self._num_needed

    def enqueue(self, group: RolloutGroup, commands: list[Command]) -> None:  # noqa: ARG002 - discards nothing
        """Collect; training begins once the RL step is complete."""
        self._ready.append(group)
        if self.num_ready == self._num_needed:
            self._num_to_train = self.num_ready
            self._ready.sort(key=lambda one: one.group_id, reverse=True)  # taken from the end

    def take_micro_batch(self) -> Sequence[RolloutGroup]:
        """Take groups in order of admission."""
        if not self._num_to_train:
            return ()
        self._num_to_train -= self.settings.micro_batch
        return _take_off(self._ready, self.groups_per_micro_batch)

    def may_publish(self) -> bool:
        """Return whether all rollouts of the RL step have been trained on."""
        return not self._num_to_train and not self.num_taken

    @property
    def _num_needed(self) -> int:
        steps = min(self.settings.optimizer_steps_per_rl_step, self.optimizer_steps - self.version)
        return steps * self.settings.train_batch_size


def _take_off(groups: list[RolloutGroup], number: int) -> list[RolloutGroup]:
    taken = groups[: -number - 1 : -1]
    del groups[-number:]
    return taken


class PartialRolloutScheduler(Scheduler):
    """Algorithm 1 with engines that are not drained: rollouts unfinished when an RL step begins go on after it.

    All slots are kept in use until the rollouts of G optimizer steps are ready. Then nothing starts any more, the
    engines stand still with their rollouts in progress, the G steps are made, and after the publication these rollouts
    go on, on a KV cache computed again. The RL step takes the rollouts that were ready first, or under ``max_lag`` the
    ones with the oldest tokens, and splits them into batches in order of admission, or oldest first.

    ``max_lag`` is kept by waiting (``lag_bound``).
    """

    def __init__(self, settings: SchedulerSettings, **sizes: Unpack[Sizes]) -> None:
        super().__init__(settings, **sizes)
        self.weight_update = WeightUpdate.RECOMPUTE
        self._ready: list[RolloutGroup] = []  # in order of arrival
        self._to_train: list[RolloutGroup] = []  # of this RL step, not yet given to the trainer, last one first

    def _decide(self, commands: list[Command]) -> None:
        trained = not self._to_train and not self.num_taken and self.trainer is TrainerState.IDLE
        if trained and self.up_to_date:
            self._begin_rl_step()
        super()._decide(commands)

    def _begin_rl_step(self) -> None:
        """Choose the rollouts of an RL step and hold the engines, if enough are ready and ``max_lag`` is safe."""
        steps = min(self.settings.optimizer_steps_per_rl_step, self.optimizer_steps - self.version)
        num_groups = steps * self.settings.train_batch_size // self.group_size
        if not num_groups or len(self._ready) < num_groups:
            return
        chosen, rest = self._ready, []
        if len(self._ready) > num_groups or self.settings.max_lag is not None:
            in_turn = sorted(self._ready, key=self._age)
            chosen, rest = in_turn[:num_groups], in_turn[num_groups:]
        if not self._is_safe(chosen, steps):
            return
        self._to_train = sorted(chosen, key=lambda one: (self._age(one), one.group_id), reverse=True)
        self._ready = rest
        for engine in self._loaded:
            self._pool.slots.hold(engine)

    def _age(self, group: RolloutGroup) -> int:
        return group.oldest_bound if self.settings.max_lag is not None else 0

    def _is_safe(self, chosen: list[RolloutGroup], steps: int) -> bool:
        next_version = self.version + steps
        if next_version == self.optimizer_steps:
            return True
        taken: Counter[int] = Counter()
        for group in chosen:
            taken[group.oldest_bound] += self.group_size
        return self.lag_bound.is_safe(taken, version=next_version, left=self.settings.train_batch_size)

    def may_admit(self) -> bool:
        """Return whether engines generate, and the lag gate and rollouts being scored leave room."""
        if self._to_train or self.num_taken or self._pool.num_open + self.group_size > self.room:
            return False
        return self.lag_bound.admits(
            self.group_size, bound=self.oldest_loaded, version=self.version, left=self.settings.train_batch_size
        )

    def enqueue(self, group: RolloutGroup, commands: list[Command]) -> None:  # noqa: ARG002 - discards nothing
        """Queue in order of arrival."""
        self._know_age(group)
        self._ready.append(group)

    def take_micro_batch(self) -> Sequence[RolloutGroup]:
        """Take groups of the RL step under way."""
        return _take_off(self._to_train, self.groups_per_micro_batch)

    def may_publish(self) -> bool:
        """Return whether all rollouts of the RL step have been trained on."""
        return not self._to_train and not self.num_taken


class OneStepOffScheduler(Scheduler):
    """Generate the rollouts of the next RL step while the trainer makes the G steps of this one; hand over; publish.

    At a *hand-over* the rollouts of one RL step are ready and the trainer has made all steps of the one before. The
    weights are published, unless nothing is left to generate with them, and both sides go on: the trainer as soon as it
    is free, the engines, which are empty, once all have loaded. So the rollouts of an RL step that trains from version
    v on were generated at version v - G, of the first RL step at 0: batch i = 0 .. G - 1 has lag G + i, in the first RL
    step i. Batches are split in order of admission. The last RL step may have fewer steps.

    Where an engine that joins still loads the weights before, both sides wait for it at the hand-over.
    """

    def __init__(self, settings: SchedulerSettings, **sizes: Unpack[Sizes]) -> None:
        super().__init__(settings, **sizes)
        self._ready: list[RolloutGroup] = []  # of the RL step being generated
        # of the RL step being trained, not yet given to the trainer, last one first
        self._to_train: list[RolloutGroup] = []
        self._handed_over_at = 0  # version at the last hand-over: rollouts started since are generated with it
        self._generating_for = 0  # version at which the training of it will begin

    def _decide(self, commands: list[Command]) -> None:
        trained = not self._to_train and not self.num_taken
        if trained and self._ready and len(self._ready) * self.group_size == self._num_needed:
            self._to_train, self._ready = sorted(self._ready, key=lambda one: one.group_id, reverse=True), []
            self._handed_over_at = self.version
            self._generating_for += self.settings.optimizer_steps_per_rl_step
        super()._decide(commands)

    def may_admit(self) -> bool:
        """Return whether engines are loaded and the RL step being generated needs more rollouts."""
        num_generated = self.num_live - len(self._to_train) * self.group_size
        return not self.num_loading and not self._must_publish and num_generated < self._num_needed

    def enqueue(self, group: RolloutGroup, commands: list[Command]) -> None:  # noqa: ARG002 - discards nothing
        """Collect for the next RL step."""
        self._ready.append(group)

    def take_micro_batch(self) -> Sequence[RolloutGroup]:
        """Take groups of the RL step being trained."""
        return () if self._must_publish else _take_off(self._to_train, self.groups_per_micro_batch)

    @property
    def _must_publish(self) -> bool:
        """Whether the weights of the last hand-over are wanted and not published."""
        return self.published < self._handed_over_at and self._num_needed > 0

    @property
    def may_be_longer(self) -> bool:
        """Whether the last hand-over has published weights: more rollouts would be generated with those before."""
        return self._num_needed > 0

    def may_publish(self) -> bool:
        """Return whether rollouts were handed over since the last publication and more are to be generated."""
        return self._must_publish

    @property
    def _num_needed(self) -> int:
        steps = min(self.settings.optimizer_steps_per_rl_step, self.optimizer_steps - self._generating_for)
        return max(steps, 0) * self.settings.train_batch_size
