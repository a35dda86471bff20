"""The engine in closed form against one step at a time: scripts of chance, many digits, whole runs."""

from dataclasses import dataclass, replace

import pytest
from engine_log import Log, settings_with
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_run import Recorded
from step_by_step import StepByStepEngine

from pipelinerl.config.engine import SpeculationConfig
from pipelinerl.config.environment import PrefixCaching
from pipelinerl.config.run import RunConfig
from pipelinerl.scheduler.events import WeightUpdate
from sim.cluster import SimulatedCluster
from sim.engine import ClosedFormEngine
from sim.interface import DecodeCost, Drafting, EngineSettings, PrefillCost, Request

# --------------------------------------------------------------- the closed form equals single steps


@dataclass(frozen=True, kw_only=True)
class Script:
    """What happens to a few engines, chance included: all that a host does is looked up here."""

    engine: EngineSettings
    num_engines: int
    num_at_once: int
    """Rollouts started at the beginning."""
    rollouts: list[tuple[int, int, int]]
    """Prompt tokens, length, and delay until it arrives; rollout k is started when an earlier one has ended."""
    turns: dict[int, list[tuple[int, int, int, int]]]
    """Further turns of rollouts: tokens observed, tokens generated, ticks until it arrives, engine."""
    moves: bool
    """Whether an aborted rollout goes on on the next engine."""
    updates: list[tuple[int, int, WeightUpdate, bool]]
    """Publications: ticks after the one before has been loaded everywhere, ticks of transfer, kind, suspend first."""
    aborts: list[tuple[int, int]]
    """Tick, rollout."""
    aborts_on_finish: dict[int, int]
    """When the first rollout finishes, the second is aborted."""
    late: list[tuple[int, int]]
    """Tick, engine: one more rollout is started."""
    disturbances: list[tuple[int, int, int, int]]
    """Tick, engine, ticks for which it stands still, factor on its costs from then on."""
    ends_at: int
    """Tick of the end, before all that engines do at it."""


class Scripted(Log):
    """Reacts like a scheduler: replaces ended rollouts, resumes those that an update aborted, publishes again."""

    def __init__(self, make, script):
        super().__init__(make, script.engine, num_engines=script.num_engines)
        self.script = script
        self.requests = [Request(k, prompt, length) for k, (prompt, length, _) in enumerate(script.rollouts)]
        self.turns = {k: list(turns) for k, turns in script.turns.items()}
        for rollout_id in self.turns:
            self.requests[rollout_id].goes_on = True
        self.place = [None] * len(self.requests)
        self.unwanted = set()
        self.num_started = 0
        self.num_published = 0
        self.num_loading = 0
        self.over = False

    def at(self, tick, call):
        super().at(tick, lambda: None if self.over else call())

    def play(self):
        script = self.script
        for k in range(script.num_at_once):
            self.start_next(k % script.num_engines)
        for tick, rollout_id in script.aborts:
            self.at(tick, lambda rollout_id=rollout_id: self.abort(rollout_id))
        for tick, engine in script.late:
            self.at(tick, lambda engine=engine: self.start_next(engine))
        for tick, *disturbance in script.disturbances:
            self.at(tick, lambda disturbance=disturbance: self.disturb(*disturbance))
        self.publish_next()
        self.clock.run(until=script.ends_at)
        ended = [
            [(one.rollout_id, spans, self.times_of(one)) for one, spans in engine.end()] for engine in self.engines
        ]
        versions = [engine.version for engine in self.engines]
        self.over = True
        self.clock.run()  # engines that have ended do nothing any more
        return self.entries, ended, versions

    def start_next(self, engine):
        if self.num_started < len(self.requests):
            self.num_started += 1
            self.start(self.num_started - 1, engine)

    def start(self, rollout_id, engine):
        self.place[rollout_id] = engine
        delay = self.script.rollouts[rollout_id][2]
        self.engines[engine].submit(self.requests[rollout_id], self.clock.now + delay)

    def disturb(self, engine, still_ticks, factor):
        given = self.script.engine
        slower = replace(given, decode=given.decode.slower(factor), prefill=given.prefill.slower(factor))
        self.engines[engine].disturb(still_ticks, slower)

    def abort(self, rollout_id):
        if self.place[rollout_id] is not None:
            self.unwanted.add(rollout_id)
            self.engines[self.place[rollout_id]].abort(rollout_id)

    def publish_next(self):
        if self.num_published < len(self.script.updates):
            delay, *_ = self.script.updates[self.num_published]
            self.num_published += 1
            self.num_loading = len(self.engines)
            if delay:
                self.at(self.clock.now + delay, self.publish)
            else:
                self.publish()  # in the middle of a boundary of the engine that has loaded last

    def publish(self):
        _, transfer, kind, stand_still = self.script.updates[self.num_published - 1]
        for engine in self.engines:
            if stand_still:
                engine.suspend()
            engine.update(self.num_published, kind, self.clock.now + transfer)

    def times_of(self, request):
        return (request.prefill_ticks, request.decode_ticks) if self.script.engine.counts_time else None

    def note(self, *entry):
        self.entries.append((self.clock.now, *entry, [engine.version for engine in self.engines]))

    def rollout_finished(self, engine, request, spans):
        rollout_id = request.rollout_id
        self.note("finished", engine, rollout_id, spans, self.times_of(request))
        if self.turns.get(rollout_id):
            observed, generated, delay, home = self.turns[rollout_id].pop(0)
            request.keep(spans)
            request.observe(observed, request.length + generated)
            request.goes_on = bool(self.turns[rollout_id])
            self.place[rollout_id] = home % len(self.engines)
            self.engines[self.place[rollout_id]].submit(request, self.clock.now + delay)
            return
        self.place[rollout_id] = None
        self.start_next(engine)
        if rollout_id in self.script.aborts_on_finish:
            self.abort(self.script.aborts_on_finish[rollout_id])

    def rollout_preempted(self, engine, rollout_id, num_tokens):
        self.note("preempted", engine, rollout_id, num_tokens)

    def rollout_aborted(self, engine, request):
        rollout_id = request.rollout_id
        self.note("aborted", engine, rollout_id, request.spans, self.times_of(request))
        self.place[rollout_id] = None
        if rollout_id in self.unwanted:
            self.start_next(engine)
        else:
            self.start(rollout_id, (engine + self.script.moves) % len(self.engines))

    def weights_loaded(self, engine, version, pause_ticks):
        self.note("loaded", engine, version, pause_ticks)
        self.num_loading -= 1
        if not self.num_loading:
            self.publish_next()


@st.composite
def scripts(draw, *, unit=1, longest=12):
    """Times are small multiples of ``unit``, so that much happens at the same tick; half the caches fill up."""
    small, kind = st.integers(0, 3), st.sampled_from(WeightUpdate)
    delay, tick = (st.integers(0, most).map(unit.__mul__) for most in (9, 10 * longest))
    num_slots = draw(st.integers(1, 5))
    step = draw(st.lists(st.integers(1, 4), min_size=num_slots, max_size=num_slots))
    rollouts = draw(st.lists(st.tuples(small, st.integers(1, longest), delay), min_size=1, max_size=30))
    rollout_id = st.integers(0, len(rollouts) - 1)
    turn = st.tuples(small, st.integers(1, longest), delay, small)
    turns = draw(st.dictionaries(rollout_id, st.lists(turn, min_size=1, max_size=4), max_size=10))
    totals = [prompt + length for prompt, length, _ in rollouts]
    for k, more in turns.items():
        totals[k] += sum(observed + generated for observed, generated, _, _ in more)
    most_tokens = max(totals)
    num_engines = draw(st.integers(1, 3))
    engine = st.integers(0, num_engines - 1)
    return Script(
        engine=EngineSettings(
            decode=DecodeCost((0, *(unit * ticks for ticks in step)), unit * draw(st.sampled_from([0, 0, 1, 2]))),
            prefill=PrefillCost(*(unit * draw(st.sampled_from([0, 0, 1])) for _ in range(3))),
            kv_cache_tokens=draw(st.none() | st.integers(most_tokens, 2 * most_tokens + 10)),
            pause_ticks=unit * draw(small),
            prefix_cache=draw(st.sampled_from(PrefixCaching)),
            step_tokens=draw(st.none() | st.integers(1, 12)),
            counts_time=draw(st.booleans()),
        ),
        num_engines=num_engines,
        num_at_once=draw(st.integers(0, 12)),
        rollouts=rollouts,
        turns=turns,
        moves=draw(st.booleans()),
        updates=draw(st.lists(st.tuples(delay, delay, kind, st.sampled_from([False, False, True])), max_size=8)),
        aborts=draw(st.lists(st.tuples(tick, rollout_id), max_size=6)),
        aborts_on_finish=draw(st.dictionaries(rollout_id, rollout_id, max_size=4)),
        late=draw(st.lists(st.tuples(tick, engine), max_size=8)),
        disturbances=draw(st.lists(st.tuples(tick, engine, st.just(0) | delay, st.integers(1, 3)), max_size=4)),
        ends_at=draw(tick) + unit,
    )


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=400)
@given(script=scripts())
def test_both_engines_report_the_same_at_the_same_tick(script):
    assert Scripted(ClosedFormEngine, script).play() == Scripted(StepByStepEngine, script).play()


@st.composite
def drafting_scripts(draw, **sizes):
    """The same with drafts: caches hold a rollout and its drafts at least."""
    script = draw(scripts(**sizes))
    speculation = SpeculationConfig(
        method="ngram",
        tokens=draw(st.integers(1, 4)),
        acceptance=draw(st.sampled_from([0.0, 0.3, 0.7, 1.0])),
        decay=draw(st.sampled_from([1.0, 0.5])),
        refresh_every=draw(st.none() | st.integers(1, 3)),
        off_above=draw(st.none() | st.integers(1, 4)),
    )
    given = script.engine
    decode = replace(given.decode, draft_context_ticks=given.decode.context_ticks * draw(st.integers(0, 2)))
    capacity = given.kv_cache_tokens and given.kv_cache_tokens + speculation.tokens
    drafting = Drafting(speculation, seed=draw(st.integers(0, 3)))
    return replace(script, engine=replace(given, decode=decode, kv_cache_tokens=capacity, drafting=drafting))


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=400)
@given(script=drafting_scripts())
def test_engines_that_draft_report_the_same_at_the_same_tick(script):
    assert Scripted(ClosedFormEngine, script).play() == Scripted(StepByStepEngine, script).play()


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=60)
@given(script=drafting_scripts(unit=10**12 + 7, longest=60))
def test_engines_that_draft_agree_over_longer_rollouts(script):
    assert Scripted(ClosedFormEngine, script).play() == Scripted(StepByStepEngine, script).play()


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=100)
@given(script=scripts(unit=10**15 + 7, longest=60))
def test_both_engines_agree_on_ticks_of_more_digits_than_a_float_has(script):
    decode = replace(script.engine.decode, context_ticks=37)
    script = replace(script, engine=replace(script.engine, decode=decode))
    assert Scripted(ClosedFormEngine, script).play() == Scripted(StepByStepEngine, script).play()


@settings(derandomize=True, deadline=None)
@given(
    num_steps=st.integers(1, 10**6),
    num_requests=st.integers(1, 512),
    prompt_tokens=st.integers(0, 10**5),
    ticks=st.tuples(st.integers(1, 10**11), st.integers(0, 10**5), st.integers(0, 10**6)),
    early=st.integers(0, 1),
)
def test_steps_are_counted_to_the_tick_over_a_million_steps(num_steps, num_requests, prompt_tokens, ticks, early):
    """The run ends when step n does, or a tick before: n tokens or n - 1.

    n steps last n (step + k C) + k b n (n - 1) / 2 for context C and b requests, and the prefill before.
    """
    step_ticks, context_ticks, prefill_ticks = ticks
    given = settings_with(
        step=(step_ticks,) * num_requests, context=context_ticks, prefill=PrefillCost(0, prefill_ticks, 0)
    )
    log = Log(ClosedFormEngine, given)
    for rollout_id in range(num_requests):
        log.engines[0].submit(Request(rollout_id, prompt_tokens, 10**6 + 1), 0)
    context = num_requests * prompt_tokens
    end = num_steps * (step_ticks + context_ticks * context) + prefill_ticks * context
    end += context_ticks * num_requests * num_steps * (num_steps - 1) // 2
    if end > early:  # a clock at 0 cannot run until 0
        log.clock.run(until=end - early)
    assert {spans.num_tokens for _, spans in log.end()} == {num_steps - early}


def run_of(make, tables):
    run = {
        "optimizer_steps": 10,
        "cluster": {"accelerators": 5, "generation_accelerators": 3},
        "scheduler": {"train_batch_size": 16, "generation_batch_size": 6},
        "workload": {"group_size": 2, "prompt_tokens": 5, "length": {"kind": "uniform", "max": 40}},
        "hardware": {
            "decode": {"kind": "affine", "step_s": 0.01, "sequence_s": 1e-4, "context_token_s": 1e-6},
            "prefill": {"sequence_s": 1e-3, "token_s": 1e-4, "token_squared_s": 1e-6},
            "training": {"token_s": 1e-3, "step_s": 0.05},
            "weights": {"publish_s": 0.02, "transfer_s": 0.1, "pause_s": 0.03},
            "latency": {"dispatch_s": 2e-3, "dispatch_jitter_s": 1e-3, "reward_s": 0.02, "preprocess_s": 0.01},
            "switch": {"to_training_s": 0.2, "to_generation_s": 0.1},
        },
    }
    for name, table in tables.items():
        run[name] = {**run.get(name, {}), **table}
    recorded = Recorded()
    SimulatedCluster(RunConfig.model_validate(run), engine_factory=make).run(recorded)
    return recorded.entries


TURNS = {
    "count": 20,
    "reset_s": 0.2,
    "step_s": 0.1,
    "step_cv": 1.0,
    "failure_rate": 0.02,
    "turns": {
        "kind": "lognormal",
        "mean": 4,
        "cv": 0.7,
        "max": 9,
        "observation_tokens": 5,
        "observation_cv": 1.0,
        "observation_max": 20,
        "context_max": 150,
    },
}
TIES = {"decode": {"kind": "affine", "step_s": 0.01}, "training": {"token_s": 0.0, "step_s": 0.05}}
"""Every time a multiple of 10 ms, and no latency: engines and trainer do much at the same instant."""

SPECULATION = {
    "method": "eagle3", "tokens": 3, "acceptance": 0.7, "decay": 0.9, "refresh_every": 3, "refresh_s": 0.02,
    "draft_cost": 0.05,
}  # fmt: skip

FIXED = {"prompt_tokens": 0, "length": {"kind": "fixed", "max": 12}}

RUNS = {
    **{f"weight update {kind}": {"scheduler": {"weight_update": kind}} for kind in WeightUpdate},
    **{
        f"ties, weight update {kind}": {
            "scheduler": {"weight_update": kind},
            "workload": FIXED,
            "hardware": {**TIES, "weights": {}, "latency": {}, "prefill": {}},
        }
        for kind in WeightUpdate
    },
    "conventional": {"scheduler": {"kind": "conventional", "optimizer_steps_per_rl_step": 3}},
    "conventional, ties": {"scheduler": {"kind": "conventional"}, "workload": FIXED, "hardware": TIES},
    "partial rollouts": {
        "scheduler": {"kind": "conventional", "optimizer_steps_per_rl_step": 2, "partial_rollouts": True},
        "hardware": {"kv_cache_tokens": 120},
    },
    "partial rollouts within max_lag": {
        "scheduler": {"kind": "conventional", "partial_rollouts": True, "max_lag": 1, "train_batch_size": 8}
    },
    "partial rollouts, ties": {
        "scheduler": {"kind": "conventional", "partial_rollouts": True, "train_batch_size": 8},
        "workload": {**FIXED, "length": {"kind": "uniform", "max": 12}},
        "hardware": {**TIES, "weights": {}, "latency": {}, "prefill": {}},
    },
    "one step off": {"scheduler": {"kind": "one_step_off", "optimizer_steps_per_rl_step": 3}},
    "one step off, ties": {"scheduler": {"kind": "one_step_off"}, "workload": FIXED, "hardware": TIES},
    "preemption": {"hardware": {"kv_cache_tokens": 90}},
    "preemption and recompute": {
        "scheduler": {"weight_update": "recompute"},
        "hardware": {"kv_cache_tokens": 50, "latency": {}},
    },
    "stale rollouts dropped": {"scheduler": {"max_lag": 1, "on_stale": "drop"}},
    "stale rollouts started again": {
        "scheduler": {"max_lag": 1, "on_stale": "requeue", "micro_batch_size": 4},
        "hardware": {"kv_cache_tokens": 60},
    },
    "trainer waits for max_lag": {"scheduler": {"max_lag": 2}, "workload": FIXED},
    **{
        f"turns, {schedule}, caches {caches}, KV cache of {capacity} tokens": {
            "scheduler": {"kind": schedule, "optimizer_steps_per_rl_step": 2},
            "environment": {**TURNS, "prefix_cache": caches},
            "hardware": {"kv_cache_tokens": capacity},
        }
        for schedule in ("pipeline", "conventional", "partial_rollouts")
        for caches in PrefixCaching
        for capacity in (160, 600)
    },
    **{
        f"turns, weight update {kind}": {
            "scheduler": {"weight_update": kind, "max_lag": 3, "on_stale": "drop"},
            "environment": {**TURNS, "prefix_cache": "kept"},
        }
        for kind in WeightUpdate
    },
    **{
        f"turns, chunks, weight update {kind}, KV cache of {capacity} tokens": {
            "scheduler": {"weight_update": kind, "max_lag": 3, "on_stale": "drop"},
            "environment": {**TURNS, "prefix_cache": "kept"},
            "hardware": {"kv_cache_tokens": capacity, "step_tokens": 6},
        }
        for kind in WeightUpdate
        for capacity in (160, 600)
    },
    "chunks, partial rollouts": {
        "scheduler": {"kind": "conventional", "optimizer_steps_per_rl_step": 2, "partial_rollouts": True},
        "hardware": {"kv_cache_tokens": 120, "step_tokens": 7},
    },
    "lengths grow": {"workload": {"prompt_tokens": 0, "length": {"kind": "uniform", "max": 40, "growth": 0.5}}},
    **{
        f"front end, weight update {kind}": {
            "scheduler": {"weight_update": kind, "max_lag": 1, "on_stale": "drop"},
            "hardware": {"latency": {"request_s": 0.013, "report_s": 0.05}},
        }
        for kind in WeightUpdate
    },
    **{
        f"{drafts}, {what}": {**tables, "engine": {"speculation": {**SPECULATION, **keys}}}
        for drafts, keys in {"drafts": {}, "drafts, off above 3": {"off_above": 3}}.items()
        for what, tables in {
            "pipeline": {},
            "conventional": {"scheduler": {"kind": "conventional", "optimizer_steps_per_rl_step": 3}},
            "recompute, preemption": {
                "scheduler": {"weight_update": "recompute"},
                "hardware": {"kv_cache_tokens": 90},
            },
            "turns, chunks": {
                "environment": {**TURNS, "prefix_cache": "kept"},
                "hardware": {"kv_cache_tokens": 200, "step_tokens": 16},
            },
        }.items()
    },
    **{
        f"admission, {what}": {
            "scheduler": {"admission": {"soft": 0.6, "hard": 0.8}, "generation_batch_size": 12},
            "hardware": {"kv_cache_tokens": 90},
            **tables,
        }
        for what, tables in {
            "pipeline": {},
            "turns, chunks": {
                "environment": {**TURNS, "prefix_cache": "kept"},
                "hardware": {"kv_cache_tokens": 200, "step_tokens": 16},
            },
            "drafts, front end": {
                "engine": {"speculation": SPECULATION},
                "hardware": {"kv_cache_tokens": 120, "latency": {"request_s": 0.013, "report_s": 0.05}},
            },
        }.items()
    },
    **{
        f"prefill apart, {what}": {
            "generation": {"prefill": 1, "decode": 2, "transfer_s": 0.003, "transfer_token_s": 1e-4},
            **tables,
        }
        for what, tables in {
            **{f"weight update {kind}": {"scheduler": {"weight_update": kind}} for kind in WeightUpdate},
            **{
                f"turns, caches {caches}, weight update {kind}": {
                    "scheduler": {"weight_update": kind, "max_lag": 3, "on_stale": "drop"},
                    "environment": {**TURNS, "prefix_cache": caches},
                    "hardware": {"kv_cache_tokens": 160},
                }
                for caches in PrefixCaching
                for kind in WeightUpdate
            },
            "conventional": {
                "cluster": {"accelerators": 6},
                "scheduler": {"kind": "conventional", "optimizer_steps_per_rl_step": 3},
            },
            "ties": {"workload": FIXED, "hardware": {**TIES, "weights": {}, "latency": {}, "prefill": {}}},
            "drafts, chunks": {
                "engine": {"speculation": SPECULATION},
                "hardware": {"kv_cache_tokens": 90, "step_tokens": 24},
            },
            "admission, front end": {
                "scheduler": {"admission": {"soft": 0.6, "hard": 0.8}, "max_lag": 1, "on_stale": "drop"},
                "hardware": {"kv_cache_tokens": 90, "latency": {"request_s": 0.013, "report_s": 0.05}},
            },
            "stale rollouts dropped on their way": {
                "scheduler": {"max_lag": 0, "on_stale": "drop"},
                "hardware": {"latency": {"dispatch_s": 0.1, "dispatch_jitter_s": 0.1}},
            },
        }.items()
    },
    "rollouts move to other engines": {
        "cluster": {"accelerators": 5, "generation_accelerators": 4},
        "scheduler": {"train_batch_size": 2, "generation_batch_size": 1, "weight_update": "abort"},
        "hardware": {"weights": {"publish_s": 0.1, "transfer_s": 0.01}, "latency": {"dispatch_jitter_s": 0.01}},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("tables", RUNS.values(), ids=RUNS)
def test_a_run_is_the_same_with_both_engines(tables):
    entries = run_of(ClosedFormEngine, tables)
    assert entries == run_of(StepByStepEngine, tables)
