"""Conventional RL with turns, kept KV caches and a KV limit, against a simulator of its own, second by second.

It is written from docs/agents.md and the boundary rules of docs/simulator.md, and shares no code with the packages.
"""

from __future__ import annotations

import heapq
import random
from collections import deque

import pytest
from played_run import environment, fixed, play, trains_in, uniform

from pipelinerl.scheduler.events import RolloutFailed, RolloutFinished, RolloutPreempted, TurnFinished


class Reference:
    """A run, from lengths of turns and faults to a log of times, rollouts, and tokens or ends (mutable)."""

    def __init__(self, turns, failed, **settings):
        self.turns, self.failed = (
            turns,
            failed,
        )  # by rollout: tokens of each turn; tokens at which its environment fails
        self.__dict__.update(settings)
        self.log, self.events, self.num_events, self.now = [], [], 0, 0
        self.tokens, self.turn, self.longest = {}, {}, 0
        self.running, self.arrivals, self.contexts, self.idle = (
            [kind() for _ in range(self.engines)] for kind in (list, list, dict, dict)
        )
        self.waiting, self.returning = ([deque() for _ in range(self.engines)] for _ in range(2))
        self.in_use, self.planned = [0] * self.engines, [False] * self.engines
        self.fresh, self.num_open, self.next, self.scored, self.version = deque(), 0, 0, 0, 0
        self.to_start = self.scored_for_step = self.rollouts_of_an_rl_step()
        self.after(0, self.schedule)
        while self.events and self.version < self.steps:
            self.now, _, _, happen = heapq.heappop(self.events)
            happen()

    def after(self, seconds, happen, engine=-1):
        """Have something happen; at the same time trainer and environments are first, then engines by number."""
        self.num_events += 1
        heapq.heappush(self.events, (self.now + seconds, engine, self.num_events, happen))

    def size(self, rollout):
        return self.prompt + self.turn[rollout] * self.observation + self.tokens[rollout]

    def rollouts_of_an_rl_step(self):
        return min(self.rl_step, self.steps - self.version) * self.batch

    # scheduler

    def schedule(self):
        for engine, returning in enumerate(self.returning):
            while returning and self.in_use[engine] < self.slots:
                self.start(returning.popleft(), engine)
        while self.fresh and (engine := self.engine_with_room()) is not None:
            rollout = self.fresh.popleft()
            self.contexts[engine][rollout] = self.size(rollout)
            self.start(rollout, engine)
        while self.num_open < self.environments and self.to_start:
            rollout = self.next
            self.tokens[rollout] = self.turn[rollout] = 0
            self.next, self.to_start, self.num_open = self.next + 1, self.to_start - 1, self.num_open + 1
            self.after(self.reset_s, lambda rollout=rollout: self.observed(rollout, None))

    def engine_with_room(self):
        """The engine with the fewest tokens of context, if these and the longest context so far fit."""
        held = [sum(one.values()) for one in self.contexts]
        free = [(tokens, engine) for engine, tokens in enumerate(held) if self.in_use[engine] < self.slots]
        if not free or not self.has_room(min(held)):
            return None
        tokens, engine = min(free)
        return engine if self.has_room(tokens) else None

    def has_room(self, tokens):
        return tokens == 0 or tokens + self.longest <= self.capacity

    def start(self, rollout, engine):
        self.in_use[engine] += 1
        self.arrivals[engine].append((self.now, rollout))
        self.take_up(engine)

    def observed(self, rollout, home):
        if self.failed.get(rollout) == self.tokens[rollout]:
            if home is not None:
                del self.contexts[home][rollout]
            self.log.append((self.now, rollout, "failed"))
            self.num_open, self.to_start = self.num_open - 1, self.to_start + 1
            return self.schedule()
        if home is None:
            self.fresh.append(rollout)
        else:
            self.turn[rollout] += 1
            empty = [one for one, held in enumerate(self.contexts) if not held and self.in_use[one] < self.slots]
            engine = empty[0] if empty and self.in_use[home] == self.slots else home
            del self.contexts[home][rollout]
            self.contexts[engine][rollout] = self.size(rollout)
            self.returning[engine].append(rollout)
        self.longest = max(self.longest, self.size(rollout))
        return self.schedule()

    def left(self, rollout, engine):
        self.in_use[engine] -= 1
        self.log.append((self.now, rollout, self.tokens[rollout]))
        if self.goes_on(rollout):
            self.after(self.step_s, lambda: self.observed(rollout, engine))
        else:
            del self.contexts[engine][rollout]
            self.num_open, self.scored = self.num_open - 1, self.scored + 1
            if self.scored == self.scored_for_step:
                self.after(self.train_s, self.trained)
        self.schedule()

    def goes_on(self, rollout):
        return self.turn[rollout] + 1 < self.num_turns

    def trained(self):
        self.version, self.scored = self.version + 1, self.scored - self.batch
        if self.scored:
            self.after(self.train_s, self.trained)
        else:  # the engines load while the trainer publishes
            self.after(max(self.publish_s, self.pause_s), self.begin_rl_step)

    def begin_rl_step(self):
        self.to_start = self.scored_for_step = self.rollouts_of_an_rl_step()
        self.schedule()

    # engines

    def take_up(self, engine):
        """An engine without a batch has a boundary at once."""
        if not self.planned[engine]:
            self.planned[engine] = True
            self.after(0, lambda: self.boundary(engine, ends_step=False), engine)

    def boundary(self, engine, *, ends_step):
        running, waiting, idle = self.running[engine], self.waiting[engine], self.idle[engine]

        def needed():  # with the next step
            return sum(map(self.size, running)) + len(running)

        if ends_step:
            for rollout in running:
                self.tokens[rollout] += 1
            complete = [one for one in running if self.tokens[one] == sum(self.turns[one][: self.turn[one] + 1])]
            running[:] = [one for one in running if one not in complete]
            idle.update((one, self.size(one)) for one in complete if self.goes_on(one))
            for rollout in complete:
                self.left(rollout, engine)
        arrived = [one for one in self.arrivals[engine] if one[0] < self.now or not ends_step]
        self.arrivals[engine] = self.arrivals[engine][len(arrived) :]
        waiting.extend(rollout for _, rollout in arrived)
        preempts = needed() > self.capacity
        while needed() > self.capacity:
            waiting.appendleft(running.pop())
            self.log.append((self.now, waiting[0], "preempted"))
        prefill_s = 0
        while not preempts and waiting and len(running) < self.slots:
            tokens = self.size(waiting[0])
            if needed() + tokens + 1 > self.capacity:
                break
            cached = idle.pop(waiting[0], 0)
            prefill_s += tokens - cached + tokens**2 - cached**2
            running.append(waiting.popleft())
        while idle and needed() + sum(idle.values()) > self.capacity:
            del idle[next(iter(idle))]
        self.planned[engine] = bool(running)
        if running:
            self.after(prefill_s + 1, lambda: self.boundary(engine, ends_step=True), engine)
        elif self.arrivals[engine]:
            self.take_up(engine)


def both(seed, length, *, failure_rate=0.0, **settings):
    """Return the log of the simulator and of the reference for the same run, in the same order."""
    one = {"engines": 1, "rl_step": 1, "reset_s": 0, "publish_s": 0, "pause_s": 0, **settings}
    weights = {"publish_s": float(one["publish_s"]), "pause_s": float(one["pause_s"])}
    turns = environment(
        count=one["environments"], turns=one["num_turns"], observation=one["observation"], prefix_cache="kept",
        reset_s=float(one["reset_s"]), step_s=float(one["step_s"]), failure_rate=failure_rate,
        context_max=longest_of(one, length),
    )  # fmt: skip
    run = play(
        one["steps"], batch=one["batch"], slots=one["slots"], engines=one["engines"], length=length, seed=seed,
        prompt_tokens=one["prompt"], kind="conventional", optimizer_steps_per_rl_step=one["rl_step"], environment=turns,
        hardware={
            **trains_in(float(one["train_s"])), "kv_cache_tokens": one["capacity"], "weights": weights,
            "prefill": {"token_s": 1.0, "token_squared_s": 1.0},
        },
    )  # fmt: skip
    log, lengths, failed = [], {}, {}
    for time_s, entry in run.of(TurnFinished, RolloutFinished, RolloutPreempted, RolloutFailed):
        rollout = entry.rollout_id
        match entry:
            case RolloutPreempted():
                log.append((time_s, rollout, "preempted"))
            case RolloutFailed():
                log.append((time_s, rollout, "failed"))
                failed[rollout] = sum(lengths.get(rollout, ()))
            case _:
                log.append((time_s, rollout, entry.spans.num_tokens))
                lengths.setdefault(rollout, []).append(entry.spans.num_tokens - sum(lengths.get(rollout, ())))
    return sorted(log, key=str), sorted(
        ((float(time_s), *rest) for time_s, *rest in Reference(lengths, failed, **one).log), key=str
    )


def longest_of(one, length):
    return one["prompt"] + one["num_turns"] * length["max"] + (one["num_turns"] - 1) * one["observation"]


HAND = {
    "steps": 2, "batch": 2, "slots": 2, "environments": 2, "num_turns": 2, "prompt": 2, "observation": 1,
    "step_s": 3, "train_s": 5, "publish_s": 2, "pause_s": 1, "capacity": 17,
}  # fmt: skip
BY_HAND = [(16, 0, 4), (16, 1, 4), (48, 1, "preempted"), (51, 0, 8), (126, 1, 8)]
"""The first RL step, by hand. Prefill of n tokens after c cached ones lasts n + (c + n)^2 - c^2 s, a step 1 s.

0: both prompts, 2·(2 + 4) = 12 s; four steps to 16, where both turns end and their caches of 6 tokens stay.
19: both come back with an observation, and fit: 7 + 7 + 2 = 16 <= 17. Prefill 2·(1 + 49 - 36) = 28 s, a step: 48.
48: 8 + 8 + 2 = 18 > 17: the one admitted last, rollout 1, is preempted with 5 tokens. Rollout 0 ends at 51.
51: rollout 1 has lost its cache: its 8 tokens are prefilled, 8 + 64 = 72 s, and three steps: 126.
The RL step is trained on in 5 s; the engine loads while the trainer publishes for 2 s: the next one begins at 133.
"""


def test_a_preemption_between_turns_by_hand():
    ours, theirs = both(0, fixed(4), **HAND)
    again = [(133 + time_s, rollout + 2, what) for time_s, rollout, what in BY_HAND]  # no cache is left of the first
    assert ours == sorted(((float(time_s), *rest) for time_s, *rest in BY_HAND + again), key=str)
    assert theirs == ours


@pytest.mark.parametrize("seed", range(40))
def test_turns_with_kept_caches_and_a_kv_limit_are_those_of_the_pages(seed):
    """Every end of a turn, preemption and failure at its second; caches of failed rollouts outlive RL steps."""
    draw = random.Random(seed)
    choices = {
        "steps": (2, 3, 4), "batch": (2, 4, 8), "rl_step": (1, 2), "slots": (1, 2, 4, 8), "engines": (1, 1, 2),
        "environments": (2, 4, 8, 12), "num_turns": (2, 3, 4), "prompt": (1, 2, 5), "observation": (1, 3),
        "reset_s": (0, 1, 3), "step_s": (1, 2, 5), "train_s": (1, 4), "publish_s": (0, 3), "pause_s": (0, 2),
    }  # fmt: skip
    settings = {key: draw.choice(values) for key, values in choices.items()}
    length = uniform(draw.choice((2, 4, 7)))
    settings["capacity"] = longest_of(settings, length) + draw.choice((1, 5, 10, 20))
    ours, theirs = both(seed, length, failure_rate=draw.choice((0.0, 0.2)), **settings)
    assert theirs == ours
