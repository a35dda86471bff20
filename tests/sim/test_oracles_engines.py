"""Engines and workload of whole runs against theory: speed, weight updates, common random numbers, KV cache.

Each docstring derives the expected value. By default a decode step lasts 1 s with any batch, and all else takes no
time.
"""

import numpy as np
import pytest
from played_run import fixed, play, trains_in, uniform

import sim.engine
from pipelinerl.scheduler.events import RolloutFinished, RolloutPreempted, StartRollout, WeightsLoaded
from sim.clock import to_ticks
from sim.engine import DecodeBatch
from sim.workload import Workload

# ------------------------------------------------------------------------------------------ extremes


def scaled(entries, factor):
    """Entries with times and reported durations in ticks, divided by ``factor``."""
    return [
        (to_ticks(time_s) / factor, str(type(entry)), getattr(entry, "rollout_id", None)) for time_s, entry in entries
    ]


@pytest.mark.parametrize("kind", ["pipeline", "conventional"])
def test_infinitely_fast_hardware_does_the_same_in_no_time(kind):
    """A decode step of one picosecond, the least there is: the run of a step of 1 s, 10^12 times as fast."""
    sizes = {"batch": 8, "slots": 5, "engines": 2, "length": uniform(30)}
    scheduler = {"kind": kind, "optimizer_steps_per_rl_step": 4}
    steps = [{"decode": {"kind": "affine", "step_s": step_s}, **trains_in(7 * step_s)} for step_s in (1e-12, 1.0)]
    runs = [play(20, **sizes, hardware=hardware, **scheduler) for hardware in steps]
    assert scaled(runs[0].entries, 1) == scaled(runs[1].entries, 10**12)
    assert runs[0].summary().lag == runs[1].summary().lag
    assert runs[0].summary().duration_s < 1e-8


# --------------------------------------------------------------------------------------- weight updates


def run_with(weight_update, *, prefill_s, pause_s=0.5, engines=1):
    scheduler = {"weight_update": weight_update}
    hardware = {"prefill": {"token_s": prefill_s}, "weights": {"pause_s": pause_s}}
    return play(
        30, batch=8, slots=16, engines=engines, length=uniform(50), prompt_tokens=20, hardware=hardware, **scheduler
    )


def test_recomputing_a_free_cache_is_keeping_it():
    keep, recompute = (run_with(kind, prefill_s=0.0) for kind in ("keep", "recompute"))
    assert keep.steps == recompute.steps
    assert keep.summary() == recompute.summary()


def test_recompute_and_abort_cost_the_prefill_of_rollouts_in_progress():
    """One engine that is never waited for: prefill only stretches its time, so the extra seconds are exact.

    At each of 28 updates (the last version is not published, and one more is made up for by the next) the prompts
    and answers in progress are computed again, at 1 ms per token: the restarts of ``abort`` count them.
    """
    keep, recompute, abort = (run_with(kind, prefill_s=1e-3) for kind in ("keep", "recompute", "abort"))
    restarts = [entry for _, entry in abort.of(StartRollout) if entry.kept_tokens]
    extra_s = 1e-3 * sum(20 + entry.kept_tokens for entry in restarts)
    assert len(restarts) == abort.summary().rollouts.interruptions > 300
    assert extra_s > 10
    for run in (recompute, abort):
        assert run.summary().duration_s - keep.summary().duration_s == pytest.approx(extra_s)


def test_a_pause_costs_its_seconds():
    """The same decode steps, and 1000 s for every load of the one engine. Other lags: fewer versions get published."""
    without, with_pause = (run_with("keep", prefill_s=0.0, pause_s=pause_s) for pause_s in (0.0, 1000.0))
    num_loads = len(with_pause.of(WeightsLoaded))
    assert num_loads > 20
    assert with_pause.summary().duration_s - without.summary().duration_s == 1000 * num_loads


def test_waiting_drains_the_engines_and_keeps_every_rollout_on_one_version():
    """Slots stay empty until the longest answer ends: much slower; never two spans, while ``keep`` has many."""
    keep, wait = (run_with(kind, prefill_s=1e-3, engines=2) for kind in ("keep", "wait"))
    assert wait.summary().tokens_per_s < 0.8 * keep.summary().tokens_per_s
    num_spans = [[len(entry.spans.versions) for _, entry in run.of(RolloutFinished)] for run in (keep, wait)]
    assert max(num_spans[0]) > 2
    assert set(num_spans[1]) == {1}


@pytest.mark.parametrize(("transfer_s", "loaded_s"), [(3.0, 15.5), (7.0, 17.5)])
def test_wait_goes_on_with_rollouts_in_progress_and_starts_none_from_the_publication_on(transfer_s, loaded_s):
    """Two slots, answers of 5 steps of 1 s, batches of 4. At 10 two start, and the first version is published.

    These two go on during the transfer, which ends at 13 or 17, and finish at 15. Then the engine is empty: it loads
    at the later of the two, for 0.5 s, and the next two start.
    """
    weights = {"transfer_s": transfer_s, "pause_s": 0.5}
    run = play(2, batch=4, slots=2, length=fixed(5), hardware={"weights": weights}, weight_update="wait")
    assert [time_s for time_s, _ in run.of(StartRollout)][:8] == [0, 0, 5, 5, 10, 10, loaded_s, loaded_s]
    assert [time_s for time_s, _ in run.of(RolloutFinished)][:6] == [5, 5, 10, 10, 15, 15]
    assert [time_s for time_s, _ in run.of(WeightsLoaded)] == [loaded_s]


# ----------------------------------------------------------------------------- the workload that both meet


@pytest.mark.parametrize(
    "length", [uniform(50), {"kind": "lognormal", "mean": 20, "cv": 1.0, "max": 50}, {"kind": "empirical", "max": 50}]
)
def test_two_schedulers_meet_the_same_answers(length):
    """Common random numbers: rollout r has the same length and reward, whoever starts it, wherever, whenever."""
    source = {"source": "rgym_llama_400", "mean": 20} if length["kind"] == "empirical" else {}
    answers = []
    for scheduler in ({}, {"kind": "conventional", "optimizer_steps_per_rl_step": 3}, {"max_lag": 1}):
        hardware = {"latency": {"dispatch_jitter_s": 3.0}}
        run = play(
            9, batch=16, slots=7, engines=3, length={**length, **source}, group_size=8, hardware=hardware, **scheduler
        )
        rewards = {entry.rollout_id: entry.reward for _, entry in run.of(RolloutFinished)}
        tokens = {entry.rollout_id: entry.spans.num_tokens for _, entry in run.of(RolloutFinished)}
        answers.append({rollout_id: (tokens[rollout_id], reward) for rollout_id, reward in rewards.items()})
    for other in answers[1:]:
        common = answers[0].keys() & other.keys()
        assert len(common) >= 100
        assert {key: answers[0][key] for key in common} == {key: other[key] for key in common}


def test_every_rollout_gets_its_answer_of_the_workload():
    run = play(9, batch=16, slots=7, length=uniform(50), group_size=4)
    workload = Workload(run.config.workload, seed=run.config.seed)
    for _, entry in run.of(RolloutFinished):
        group, member = divmod(entry.rollout_id, 4)
        assert entry.spans.num_tokens == workload.group(group, group).lengths[member]


def test_growth_follows_the_version_that_a_rollout_starts_under():
    """Fixed length 100, factor 1 to 0.5 over 11 on-policy steps: 5 tokens less per step."""
    run = play(11, batch=4, slots=4, length={"kind": "fixed", "max": 100, "growth": 0.5}, kind="conventional")
    assert [row.length_mean for row in run.steps] == [100 - 5 * step for step in range(11)]


def test_growth_makes_later_answers_longer():
    """Factor 1 to 3 over 200 steps of 32 around a mean of 100, cv 0.3: first and last 20 steps about 1.1 and 2.9."""
    length = {"kind": "lognormal", "mean": 100, "cv": 0.3, "max": 1000, "growth": 3.0}
    run = play(200, batch=32, slots=32, length=length)
    first, last = (np.mean([row.length_mean for row in rows]) for rows in (run.steps[:20], run.steps[-20:]))
    assert first == pytest.approx(110, rel=0.1)
    assert last == pytest.approx(285, rel=0.05)


# -------------------------------------------------------------------------------------------- KV cache


def test_a_small_cache_is_never_overfull_and_preempts(monkeypatch):
    """200 tokens for up to 10 requests of up to 10 + 60: every step fits, though all at once would not.

    Every token comes out all the same: each answer has its length of the workload.
    """
    fullest = 0

    class Watched(DecodeBatch):
        def advance(self, steps, tick):
            nonlocal fullest
            fullest = max(fullest, self.context_tokens + steps * len(self.running))
            return super().advance(steps, tick)

    sizes = {"batch": 8, "slots": 10, "engines": 2, "length": uniform(60), "prompt_tokens": 10}
    roomy = play(12, **sizes)
    monkeypatch.setattr(sim.engine, "DecodeBatch", Watched)
    run = play(12, hardware={"kv_cache_tokens": 200}, **sizes)
    assert fullest == 200
    assert run.summary().rollouts.preemptions == len(run.of(RolloutPreempted)) > 20
    assert run.summary().duration_s > 1.2 * roomy.summary().duration_s
    workload = Workload(run.config.workload, seed=0)
    for _, entry in run.of(RolloutFinished):
        assert entry.spans.num_tokens == workload.group(entry.rollout_id, entry.rollout_id).lengths[0]
