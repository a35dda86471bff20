"""Started rollouts: their groups, their engines and their progress.

Theory of operation. A *group* is ``group_size`` rollouts of one prompt; rollout ``r`` belongs to group
``r // group_size``. A group is admitted as a whole, its rollouts start one by one where there is room,
and it becomes ready when all of them are scored. A group that cannot be trained on any more is
*cancelled*: its rollouts in progress are aborted, its scored ones are discarded, and those being scored are
discarded when their scores arrive, so that every started rollout ends exactly once.

A started rollout is in one of five places::

    in flight --finish--> being scored --score--> scored --(train or discard)--> gone
      | |  ^
      | |  `--start again--- interrupted (aborted by a weight update or a loss, or its environment has answered)
      | `--end of a turn--> with its environment --answer--> interrupted, or if the episode is over being scored
      `--abort or fail--> gone

One with an environment begins with it. Of rollouts that wait for a slot those that were interrupted go first. Those of
an engine that is leaving finish there, or are aborted and interrupted, and go on elsewhere.

The pool decides nothing. A ``router`` chooses the engine of a rollout, and when it begins there (``routing``). Without
one ``slots`` choose: after a turn the engine of the last one, if ``returns`` and it has a free slot.
"""

from __future__ import annotations

from collections import defaultdict, deque

from pipelinerl.errors import SchedulerError
from pipelinerl.scheduler.events import (
    NO_TOKENS,
    AbortRollout,
    Command,
    DiscardReason,
    DiscardRollouts,
    EnvironmentFailed,
    OpenEnvironment,
    RolloutPreempted,
    StartRollout,
    VersionSpans,
)
from pipelinerl.scheduler.routing import Router
from pipelinerl.scheduler.slots import EngineSlots

NEVER_REPORTED = 2**62
"""Oldest version of a group no token of which has been reported: later than any."""

NOWHERE = -1
"""In place of the engine: not in flight, being scored, with its environment acting."""
SCORING = -2
ENVIRONMENT = -3


class RolloutGroup:
    """The rollouts of one prompt (mutable; only the pool changes it)."""

    __slots__ = (
        "cancelled",
        "engines",
        "group_id",
        "num_scoring",
        "num_started",
        "oldest_bound",
        "oldest_reported",
        "prompt_id",
        "ready",
        "rewards_differ",
        "scored",
        "scored_reward",
    )

    def __init__(self, group_id: int, prompt_id: int, oldest_bound: int, group_size: int) -> None:
        self.group_id = group_id
        self.prompt_id = prompt_id
        self.oldest_bound = oldest_bound  # no token of the group is older than this version
        self.oldest_reported = NEVER_REPORTED  # oldest version among the tokens reported so far
        self.num_started = 0
        self.engines = [NOWHERE] * group_size  # where each of its rollouts is in flight, or SCORING, or ENVIRONMENT
        self.num_scoring = 0
        self.scored: list[int] = []
        self.scored_reward = 0.0
        self.rewards_differ = False
        self.ready = False
        self.cancelled: DiscardReason | None = None


class RolloutPool:
    """All rollouts, by group (mutable, can be pickled)."""

    def __init__(
        self, slots: EngineSlots, *, group_size: int, router: Router | None = None, returns: bool = True
    ) -> None:
        self.slots = slots
        self.router = router
        self._returns = returns
        self.group_size = group_size
        self.groups: dict[int, RolloutGroup] = {}  # admitted and neither trained on nor gone, in order of admission
        self.newest_version = 0  # last version published: no token is newer
        self.interrupted: dict[int, int] = {}  # rollout -> tokens it has; to be started again, in this order
        # Rollout without an engine, to start where the ``router`` says -> its context, its tokens; in this order.
        self.fresh: dict[int, tuple[int, int]] = {}
        self.leaving: set[int] = set()
        self._returning: dict[int, dict[int, int]] = defaultdict(dict)  # engine -> rollouts that wait for it, as above
        self._num_returning = 0
        self._called: list[int] = []  # engines that may have slots for them
        self.starting: RolloutGroup | None = None  # the one admitted group with rollouts not yet started
        self.num_in_flight = 0  # rollouts in progress on the engines
        self.num_scoring = 0  # rollouts being scored, those of cancelled groups included
        self._acting: dict[int, tuple[int, int]] = {}  # rollout whose environment acts -> tokens it has, engine before
        self._homes: dict[int, int] = {}  # interrupted rollout -> engine of its last turn
        self._next_group_id = 0
        self._next_prompt_id = 0
        self._prompts_to_retry: deque[int] = deque()

    @property
    def num_open(self) -> int:
        """Rollouts started and neither scored nor gone (count); each has an environment, if there are any."""
        waiting = len(self.interrupted) + len(self.fresh) + self._num_returning
        return self.num_in_flight + self.num_scoring + waiting + len(self._acting)

    # ------------------------------------------------------------------------------------- starting

    def admit(self, oldest_bound: int) -> None:
        """Admit a group, of a prompt to try again or else the next; no token will be older than ``oldest_bound``."""
        assert self.starting is None
        if self._prompts_to_retry:
            prompt_id = self._prompts_to_retry.popleft()
        else:
            prompt_id = self._next_prompt_id
            self._next_prompt_id += 1
        group = RolloutGroup(self._next_group_id, prompt_id, oldest_bound, self.group_size)
        self._next_group_id += 1
        self.groups[group.group_id] = group
        self.starting = group

    def start_one(self) -> StartRollout:
        """Start a rollout of ``starting``, which there must be, on the engine with most room; a slot must be free."""
        group, member = self._next_to_start()
        group.engines[member] = engine = self.slots.take()
        self.num_in_flight += 1
        return StartRollout(group.group_id * self.group_size + member, group.prompt_id, engine)

    def resume_one(self) -> StartRollout:
        """Start the first of ``interrupted``, on its engine or the one with most room; a slot must be free."""
        rollout_id = next(iter(self.interrupted))
        kept_tokens, home = self.interrupted.pop(rollout_id), self._homes.pop(rollout_id, NOWHERE)
        engine = self.slots.take() if home == NOWHERE else self.slots.take_near(home)
        return self._started_on(engine, rollout_id, kept_tokens)

    def go_on(self, commands: list[Command]) -> None:
        """Start what waits for any engine, or for its own, then ``fresh`` ones, while there are slots and room."""
        while self.interrupted and self.slots.num_free:
            commands.append(self.resume_one())
        for engine in self._called:
            waiting = self._returning[engine]
            while waiting and self.slots.has_free(engine):
                rollout_id = next(iter(waiting))
                self._num_returning -= 1
                commands.append(self._started_on(self.slots.take_near(engine), rollout_id, waiting.pop(rollout_id)))
        self._called.clear()
        while self.fresh and self.slots.num_free:
            assert self.router is not None  # there are none otherwise
            rollout_id = next(iter(self.fresh))
            begins_on = self.router.begin(rollout_id, self.slots)
            if begins_on is None:
                return
            context, kept_tokens = self.fresh.pop(rollout_id)
            self.router.hold(rollout_id, begins_on, context)
            if self.slots.has_free(begins_on):
                commands.append(self._started_on(self.slots.take_near(begins_on), rollout_id, kept_tokens))
            else:
                self._wait_for(begins_on, rollout_id, kept_tokens)

    def _started_on(self, engine: int, rollout_id: int, kept_tokens: int) -> StartRollout:
        group_id, member = divmod(rollout_id, self.group_size)
        group = self.groups[group_id]
        group.engines[member] = engine
        self.num_in_flight += 1
        return StartRollout(rollout_id, group.prompt_id, engine, kept_tokens)

    def open_one(self) -> OpenEnvironment:
        """Start a rollout of the group that is ``starting``, which there must be, with its environment."""
        group, member = self._next_to_start()
        rollout_id = group.group_id * self.group_size + member
        group.engines[member] = ENVIRONMENT
        self._acting[rollout_id] = (0, NOWHERE)
        return OpenEnvironment(rollout_id, group.prompt_id)

    def queue_one(self) -> None:
        """Have a rollout of ``starting``, which there must be, wait for the engine that the router says."""
        group, member = self._next_to_start()
        self.fresh[group.group_id * self.group_size + member] = (0, 0)

    def _next_to_start(self) -> tuple[RolloutGroup, int]:
        assert self.starting is not None  # the caller has seen to it
        group, member = self.starting, self.starting.num_started
        group.num_started = member + 1
        if group.num_started == self.group_size:
            self.starting = None
        return group, member

    # --------------------------------------------------------------------------------------- turns

    def end_turn(self, rollout_id: int, engine: int, spans: VersionSpans, commands: list[Command]) -> None:
        """Record that a rollout has left its engine and its environment acts; forget it if its group is cancelled."""
        group = self.leave_engine(rollout_id, engine, spans, over=False)
        if group.cancelled:
            self._drop_context(rollout_id)
            commands.append(DiscardRollouts((rollout_id,), group.cancelled))
            self._forget_if_over(group)
            return
        group.engines[rollout_id % self.group_size] = ENVIRONMENT
        self._acting[rollout_id] = (spans.num_tokens, engine)
        if self.router is not None:
            self.router.rest(rollout_id)

    def observed(self, rollout_id: int, read_tokens: int) -> None:
        """Record that the environment has answered: the rollout, of so many tokens read, waits for a slot."""
        if rollout_id not in self._acting:
            raise SchedulerError(f"cannot handle the observation of rollout {rollout_id}: its environment does not act")
        group_id, member = divmod(rollout_id, self.group_size)
        self.groups[group_id].engines[member] = NOWHERE
        kept_tokens, home = self._acting.pop(rollout_id)
        context = read_tokens + kept_tokens
        if self.router is not None:
            self.router.see(context)
            if home == NOWHERE or not self._takes(home):
                self.router.drop(rollout_id)
                self.fresh[rollout_id] = context, kept_tokens
                return
            engine = self.router.go_on(rollout_id, home, context, self.slots)
            self.router.hold(rollout_id, engine, context)
            self._wait_for(engine, rollout_id, kept_tokens)
            return
        self.interrupted[rollout_id] = kept_tokens
        if home != NOWHERE and self._returns:
            self._homes[rollout_id] = home

    def _wait_for(self, engine: int, rollout_id: int, kept_tokens: int) -> None:
        self._returning[engine][rollout_id] = kept_tokens
        self._num_returning += 1
        self._called.append(engine)

    def release(self, engine: int) -> None:
        """Give slots of an engine again, if it is held."""
        self.slots.release(engine)
        if self.router is not None:
            self.router.add(engine)
            self._called.append(engine)

    def leave_environment(self, rollout_id: int) -> RolloutGroup:
        """Record that the environment of a rollout has ended its episode, and return its group."""
        if rollout_id not in self._acting:
            raise SchedulerError(f"cannot handle the end of rollout {rollout_id}: its environment does not act")
        del self._acting[rollout_id]
        self._drop_context(rollout_id)
        group_id, member = divmod(rollout_id, self.group_size)
        group = self.groups[group_id]
        group.engines[member] = NOWHERE
        return group

    def _drop_context(self, rollout_id: int) -> None:
        if self.router is not None:
            self.router.drop(rollout_id)

    # --------------------------------------------------------------------------------------- engines

    def _takes(self, engine: int) -> bool:
        return engine in self.slots and engine not in self.leaving

    def join(self, engine: int) -> None:
        """Add an engine, held."""
        self.slots.add(engine)

    def stop_taking(self, engine: int) -> None:
        """Start nothing more on an engine; rollouts that wait for it start where there is room."""
        if not self.slots.is_held(engine):
            self.slots.hold(engine)
        self.leaving.add(engine)
        if self.router is not None:
            self.router.close(engine)
        waiting = self._returning.pop(engine, {})
        self._num_returning -= len(waiting)
        for rollout_id, kept_tokens in waiting.items():
            self._find_another(rollout_id, kept_tokens)

    def left(self, engine: int) -> None:
        """Remove an engine that was leaving, and on which nothing is in progress."""
        self.leaving.remove(engine)
        self.slots.remove(engine)
        self._returning.pop(engine, None)
        if self.router is not None:
            self.router.remove(engine)

    def _find_another(self, rollout_id: int, kept_tokens: int) -> None:
        assert self.router is not None
        self.fresh[rollout_id] = self.router.tokens(rollout_id), kept_tokens
        self.router.drop(rollout_id)

    # --------------------------------------------------------------------------------------- ending

    def leave_engine(self, rollout_id: int, engine: int, spans: VersionSpans, *, over: bool = True) -> RolloutGroup:
        """Record that a rollout has left its engine, for ever if ``over``, and return its group."""
        group_id, member = divmod(rollout_id, self.group_size)
        group = self.groups.get(group_id)
        if group is None or group.engines[member] != engine or engine < 0:
            raise SchedulerError(f"cannot handle the end of rollout {rollout_id} on engine {engine}: it is not there")
        versions = spans.versions
        if versions:
            oldest = versions[0]
            if oldest < group.oldest_bound or versions[-1] > self.newest_version:
                raise SchedulerError(
                    f"cannot handle the end of rollout {rollout_id} with tokens of versions {oldest} to "
                    f"{versions[-1]}: "
                    f"engines have had versions {group.oldest_bound} to {self.newest_version} since it was admitted"
                )
            if oldest < group.oldest_reported:  # noqa: PLR1730 - a call would cost more, once per rollout
                group.oldest_reported = oldest
        group.engines[member] = NOWHERE
        self.num_in_flight -= 1
        self.slots.free(engine)
        if self.router is not None:
            self._called.append(engine)
            if over:
                self.router.drop(rollout_id)
        return group

    def await_score(self, group: RolloutGroup, rollout_id: int) -> None:
        """Record that a finished rollout, which has left its engine or environment, is being scored."""
        group.engines[rollout_id % self.group_size] = SCORING
        group.num_scoring += 1
        self.num_scoring += 1

    def awaited(self, rollout_id: int) -> RolloutGroup:
        """Record the end of a rollout's scoring, and return its group; ``score`` follows if it succeeded."""
        group_id, member = divmod(rollout_id, self.group_size)
        group = self.groups.get(group_id)
        if group is None or group.engines[member] != SCORING:
            raise SchedulerError(f"cannot handle the score of rollout {rollout_id}: it is not being scored")
        group.engines[member] = NOWHERE
        self.num_scoring -= 1
        group.num_scoring -= 1
        return group

    def score(self, group: RolloutGroup, rollout_id: int, reward: float, commands: list[Command]) -> bool:
        """Record the reward of a finished rollout; return whether its group, not cancelled, is ready now."""
        if group.cancelled:
            commands.append(DiscardRollouts((rollout_id,), group.cancelled))
            self._forget_if_over(group)
            return False
        scored = group.scored
        if scored and reward != group.scored_reward:
            group.rewards_differ = True
        group.scored_reward = reward
        scored.append(rollout_id)
        group.ready = ready = len(scored) == self.group_size
        return ready

    def abort(self, rollout_id: int, engine: int, spans: VersionSpans) -> None:
        """Record a rollout that ended early: forget it if its group is cancelled, else start it again later."""
        group = self.leave_engine(rollout_id, engine, spans, over=False)
        if group.cancelled:
            self._drop_context(rollout_id)
            self._forget_if_over(group)
            return
        if self.router is None:
            self.interrupted[rollout_id] = spans.num_tokens
        elif self._takes(engine):
            self._wait_for(engine, rollout_id, spans.num_tokens)
        else:
            self._find_another(rollout_id, spans.num_tokens)

    def fail(self, rollout_id: int, engine: int | None) -> RolloutGroup | None:
        """Record a rollout that will never be scored; return its group if not cancelled.

        ``engine`` None: its environment was acting, or it had finished.
        """
        if engine is not None:
            group = self.leave_engine(rollout_id, engine, NO_TOKENS)
        elif rollout_id in self._acting:
            group = self.leave_environment(rollout_id)
        else:
            group = self.awaited(rollout_id)
        if group.cancelled:
            self._forget_if_over(group)
            return None
        return group

    def cancel(self, group: RolloutGroup, reason: DiscardReason, commands: list[Command]) -> None:
        """Cancel a group of ``groups`` that is not cancelled: abort its rollouts in flight, discard the others."""
        group.cancelled = reason
        ended = list(group.scored)
        first = group.group_id * self.group_size
        for rollout_id, engine in enumerate(group.engines, start=first):
            if engine >= 0:
                commands.append(AbortRollout(rollout_id, engine))
            elif engine == ENVIRONMENT:
                self.leave_environment(rollout_id)
                ended.append(rollout_id)
            elif self._stop_waiting(rollout_id):
                ended.append(rollout_id)
        if ended:
            commands.append(DiscardRollouts(tuple(ended), reason))
        if self.starting is group:
            self.starting = None
        self._forget_if_over(group)

    def _stop_waiting(self, rollout_id: int) -> bool:
        """Forget a rollout that waits for a slot or room; return whether it did."""
        self._homes.pop(rollout_id, None)
        self._drop_context(rollout_id)
        if any(one.pop(rollout_id, None) is not None for one in self._returning.values()):
            self._num_returning -= 1
            return True
        return any(one.pop(rollout_id, None) is not None for one in (self.interrupted, self.fresh))

    def retry(self, group: RolloutGroup) -> None:
        """Start the prompt of a cancelled group again, before any new prompt."""
        self._prompts_to_retry.append(group.prompt_id)

    def take(self, group: RolloutGroup) -> list[int]:
        """Hand a ready group over to training and return its rollouts."""
        del self.groups[group.group_id]
        first = group.group_id * self.group_size
        return list(range(first, first + self.group_size))

    def can_have(self, event: RolloutPreempted | EnvironmentFailed) -> bool:
        """Return whether a rollout is in progress on the engine that preempted it, or its environment acts."""
        if isinstance(event, EnvironmentFailed):
            return event.rollout_id in self._acting
        group_id, member = divmod(event.rollout_id, self.group_size)
        group = self.groups.get(group_id)
        return group is not None and group.engines[member] == event.engine >= 0

    def oldest(self, group: RolloutGroup) -> int:
        """Return the oldest version of a group's tokens: a bound until all its rollouts are reported."""
        generated = group.num_scoring + len(group.scored) == self.group_size
        return group.oldest_reported if generated else group.oldest_bound

    def _forget_if_over(self, group: RolloutGroup) -> None:
        if not group.num_scoring and max(group.engines) == NOWHERE:
            del self.groups[group.group_id]
