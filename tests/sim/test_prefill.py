"""Engines that only prefill: by hand, by identities, and against queueing theory.

By default a decode step lasts 1 s with any batch, and all else takes no time.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from played_run import environment, fixed
from recorded_run import Recorded
from refusals import message

from pipelinerl.config.resolve import cache_transfer_s, resolved_hardware
from pipelinerl.config.run import RunConfig, parse_run
from pipelinerl.records.reports import Prices
from pipelinerl.scheduler.events import (
    RolloutAborted,
    RolloutFinished,
    StartRollout,
    StartTraining,
    TurnFinished,
    WeightsLoaded,
    WeightUpdate,
)
from sim.clock import Clock, to_ticks
from sim.cluster import PrefilledEngine, PrefillEngines, SimulatedCluster
from sim.engine import ClosedFormEngine
from sim.interface import DecodeCost, EngineSettings, PrefillCost, Request
from sim.planning.answer import plan
from sim.run import simulate

TOGETHER = None
APART = {"prefill": 1, "decode": 1}


def run_of(generation: dict[str, Any] | None, *, engines: int = 2, steps: int = 1, **tables: Any) -> RunConfig:
    """A run on ``engines`` engines, those that only prefill included; ``tables`` are merged into its own."""
    run: dict[str, Any] = {
        "optimizer_steps": steps,
        "cluster": {"accelerators": engines + 1, "generation_accelerators": engines},
        "scheduler": {"train_batch_size": 3, "generation_batch_size": 3},
        "workload": {"prompt_tokens": 0, "length": fixed(2)},
        "hardware": {"decode": {"kind": "affine", "step_s": 1.0}, "training": {"token_s": 0.0}},
    }
    for name, table in tables.items():
        run[name] = {**run.get(name, {}), **table}
    return parse_run(run if generation is None else {**run, "generation": generation})


def played(config: RunConfig) -> Recorded:
    recorded = Recorded()
    SimulatedCluster(config).run(recorded)
    return recorded


def times_of(config: RunConfig, kind: type) -> list[float]:
    return [round(time_s, 9) for time_s, entry in played(config).entries if isinstance(entry, kind)]


def prefill_engines(number: int = 1, *, pause_s: float = 0.0, **tables: Any) -> PrefillEngines:
    """So many, whose prefill takes 1 s a token."""
    hardware = {"prefill": {"token_s": 1.0}, "weights": {"pause_s": pause_s}, **tables.pop("hardware", {})}
    generation = {"prefill": number, "decode": 1}
    config = run_of(generation, engines=number + 1, hardware=hardware, **tables)
    assert config.generation is not None
    return PrefillEngines(config, config.generation, resolved_hardware(config))


def done(engines: PrefillEngines, rollout_id: int, tokens: int, at: float, *, goes_on: bool = False) -> float:
    """The second at which the cache of a request that arrives at second ``at`` is at its decode engine."""
    request = Request(rollout_id, tokens, 1)
    request.goes_on = goes_on
    return engines.serve(request, to_ticks(at)) / to_ticks(1.0)


# ---------------------------------------------------------------------------------------- by hand


def test_prompts_are_prefilled_one_after_the_other_then_sent_then_decoded() -> None:
    """0.75 s of prefill each and 0.5 s of transfer: at the decode engine at 1.25, 2 and 2.75 s. Its steps begin at 1.25
    s, so the others join at 2.25 and 3.25 s; two steps each."""
    config = run_of(
        {**APART, "transfer_s": 0.3, "transfer_token_s": 0.02},
        workload={"prompt_tokens": 10},
        hardware={"prefill": {"sequence_s": 0.25, "token_s": 0.05}},
    )
    assert times_of(config, RolloutFinished) == [3.25, 4.25, 5.25]


def test_a_turn_is_prefilled_but_for_the_prompt_of_the_last_one() -> None:
    """Turns of 4 tokens, a prompt of 10, an observation of 5, 1 s a token. The second turn reads 19 tokens: 9 s without
    the first 10; 19 s where nothing is cached."""
    for caching, second_s in (("salted", 9.0), ("kept", 9.0), ("off", 19.0)):
        turns = environment(count=1, turns=2, observation=5, prefix_cache=caching)
        config = run_of(
            APART,
            scheduler={"train_batch_size": 1, "generation_batch_size": 1},
            workload={"prompt_tokens": 10, "length": fixed(4)},
            hardware={"prefill": {"token_s": 1.0}},
            environment=turns,
        )
        assert times_of(config, TurnFinished) == [14.0]
        assert times_of(config, RolloutFinished) == [14.0 + second_s + 4.0]
        report = simulate(config)
        assert report.environments is not None
        assert report.environments.seconds.prefill == 10.0 + second_s  # counted where it is done
        assert report.environments.seconds.decode == 8.0


def test_a_request_goes_where_it_is_done_first() -> None:
    """Rollout 0 has its first 100 tokens on engine 0. It waits there for 30 s of others rather than prefill 110 tokens
    on engine 1; for 150 s it does not."""
    turns = environment(count=2, turns=3)
    for others, expected in ((30, 130 + 10), (150, 100 + 110)):
        engines = prefill_engines(2, environment=turns)
        assert done(engines, 0, 100, 0.0, goes_on=True) == 100.0
        assert done(engines, 1, 100, 0.0) == 100.0
        assert done(engines, 2, others, 100.0) == 100.0 + others  # on engine 0, the first of two that are free
        assert done(engines, 0, 110, 100.0) == expected


def test_caches_are_dropped_least_recently_used_first() -> None:
    """Room for 100 tokens: the cache of 60 goes when one of 50 comes, and that of 50 stays beside one of 40."""
    engines = prefill_engines(
        environment=environment(count=3, turns=3, context_max=100), hardware={"kv_cache_tokens": 100}
    )
    for rollout_id, tokens in ((0, 60), (1, 50), (2, 40)):
        done(engines, rollout_id, tokens, 0.0, goes_on=True)
    assert done(engines, 1, 51, 1000.0) == 1001.0
    assert done(engines, 0, 61, 2000.0) == 2061.0


@pytest.mark.parametrize(
    ("caching", "update", "cached"),
    [("salted", "keep", 0), ("kept", "keep", 8), ("kept", "recompute", 0), ("off", "keep", 0)],
)
def test_new_weights_are_loaded_after_what_came_before_them(caching, update, cached) -> None:
    """8 s of prefill from 0 s on; weights come at 5 s and load from 8 to 10 s. The next turn of 9 tokens, which arrives
    at 6 s, begins at 10 s, with the cache or without."""
    turns = environment(count=2, turns=3, prefix_cache=caching)
    engines = prefill_engines(pause_s=2.0, environment=turns)
    assert done(engines, 0, 8, 0.0, goes_on=True) == 8.0
    engines.load(WeightUpdate(update), to_ticks(5.0))
    assert done(engines, 0, 9, 6.0) == 10.0 + 9 - cached


def test_a_cache_on_its_way_is_prefilled_again_where_it_arrives_only_under_recompute() -> None:
    """Batches of one: rollout 1 is on its way from 2 to 12 s when new weights load. The prefill of 1 s comes again."""
    common = {
        "steps": 2,
        "scheduler": {"train_batch_size": 1, "generation_batch_size": 2},
        "workload": {"prompt_tokens": 1, "length": fixed(1)},
        "hardware": {"prefill": {"token_s": 1.0}},
    }
    for update, more_s in (("keep", 0.0), ("recompute", 1.0)):
        tables = {**common, "scheduler": {**common["scheduler"], "weight_update": update}}
        config = run_of({**APART, "transfer_s": 10.0}, **tables)
        assert times_of(config, WeightsLoaded)[0] == 12.0  # rollout 0: 1 s, 10 s, one step of 1 s
        assert times_of(config, RolloutFinished)[1] == 13.0 + more_s


def test_a_cache_that_waits_for_admission_takes_no_room_of_its_decode_engine() -> None:
    """Two prompts of 20 tokens, prefilled at the same time, 20 s; room for one beside its answer of 10: the second
    rollout begins at 30 s, without a prefill."""
    config = run_of(
        {"prefill": 2, "decode": 1},
        engines=3,
        scheduler={"train_batch_size": 2, "generation_batch_size": 2},
        workload={"prompt_tokens": 20, "length": fixed(10)},
        hardware={"prefill": {"token_s": 1.0}, "kv_cache_tokens": 40},
        environment=environment(count=2, turns=1, context_max=40),
    )
    assert times_of(config, RolloutFinished) == [30.0, 40.0]


def test_a_request_that_comes_again_after_an_abort_arrives_at_its_own_time() -> None:
    """Aborted on its way to arrive at 10 s, it is on its way again to arrive at 20 s: 5 s of prefill, one step."""
    log: list[tuple[str, float]] = []
    clock = Clock()
    host = SimpleNamespace(
        rollout_finished=lambda *_: log.append(("finished", clock.now / to_ticks(1.0))),
        rollout_aborted=lambda *_: log.append(("aborted", clock.now / to_ticks(1.0))),
    )
    settings = EngineSettings(DecodeCost((0, to_ticks(1.0)), 0), PrefillCost(0, to_ticks(1.0), 0), None, 0)
    make = partial(PrefilledEngine, make=ClosedFormEngine, prefill=prefill_engines())
    engine, request = make(clock, host, 0, settings), Request(0, 5, 1)
    engine.submit(request, to_ticks(10.0))
    engine.abort(0)
    clock.run(until=to_ticks(1.0))
    engine.submit(request, to_ticks(20.0))
    clock.run()
    assert log == [("aborted", 0.0), ("finished", 26.0)]


def test_aisimulate_finds_the_same_times() -> None:
    """Duration of 1440 requests of 4096 + 512 tokens, 72 at a time, by `predict` of aisimulate 0.13 (development
    version of 2026-10-27): `mode: disaggregated`, Qwen/Qwen3-8B on `h100_sxm`, `timing: {type: fixed, decode_ms: 20}`,
    prefill workers with `max_sequences: 1`, no prefix caching, `kv_transfer` of 50 GB/s, `full_prompt`. With 3P1D it
    takes one decode step more."""
    published = {
        (1, 3, 0.1): 214.31207959552, (2, 2, 0.1): 210.71207959552, (3, 1, 0.1): 209.53207959552 - 0.02,
        (1, 3, 0.4): 586.27207959552, (2, 2, 0.4): 298.27207959552, (3, 1, 0.4): 222.43207959552 - 0.02,
    }  # fmt: skip
    for (prefill, decode, prompt_s), duration_s in published.items():
        config = run_of(
            {"prefill": prefill, "decode": decode},
            engines=4,
            steps=80,
            scheduler={"train_batch_size": 18, "generation_batch_size": 72 // decode, "ready_queue_size": 288},
            workload={"prompt_tokens": 4096, "length": fixed(512)},
            hardware={
                "gpu": "H100-SXM", "model": "Qwen3-8B", "decode": {"kind": "affine", "step_s": 0.02},
                "prefill": {"sequence_s": prompt_s}, "weights": {},
            },
        )  # fmt: skip
        assert simulate(config).duration_s == pytest.approx(duration_s, abs=1e-9)


# -------------------------------------------------------------------------------------- identities

FREE = {"prefill": {"sequence_s": 0.0}, "weights": {"publish_s": 0.3, "transfer_s": 0.2, "pause_s": 0.1}}
DEAR = {**FREE, "prefill": {"sequence_s": 3.0, "token_s": 0.1, "token_squared_s": 1e-3}}


@pytest.mark.parametrize(
    ("hardware", "prompt_tokens", "update"),
    [(FREE, 30, "keep"), (FREE, 30, "wait"), (FREE, 30, "abort"), (DEAR, 0, "keep"), (DEAR, 0, "wait")],
)
def test_with_nothing_to_prefill_a_run_is_that_of_its_decode_engines_alone(hardware, prompt_tokens, update) -> None:
    tables = {
        "steps": 20,
        "scheduler": {"weight_update": update, "max_lag": 2, "on_stale": "drop"},
        "workload": {"prompt_tokens": prompt_tokens, "length": {"kind": "uniform", "max": 20}},
        "hardware": {**hardware, "latency": {"dispatch_s": 0.05, "dispatch_jitter_s": 0.02}},
    }
    apart = played(run_of({"prefill": 1, "decode": 3}, engines=4, **tables))
    alone = played(run_of(TOGETHER, engines=3, **tables))
    assert apart.entries == alone.entries


def test_every_rollout_that_starts_ends_once_and_is_trained_on_once_at_most() -> None:
    """With rollouts dropped on their way to prefill engines, in prefill, in transfer and in the batch."""
    tables = {
        "steps": 60,
        "scheduler": {"max_lag": 1, "on_stale": "drop", "generation_batch_size": 8},
        "workload": {"prompt_tokens": 20, "length": {"kind": "uniform", "max": 20}},
        "hardware": {"prefill": {"token_s": 0.05}, "latency": {"dispatch_s": 0.5, "dispatch_jitter_s": 2.0}},
    }
    run = played(run_of({"prefill": 1, "decode": 2, "transfer_s": 1.0}, engines=3, **tables))
    started = [one.rollout_id for one in run.of(StartRollout)]
    ended = [one.rollout_id for one in run.of(RolloutFinished, RolloutAborted)]
    assert sorted(started) == sorted(ended)
    assert any(not one.spans.num_tokens for one in run.of(RolloutAborted))
    trained = [rollout_id for one in run.of(StartTraining) for rollout_id in one.rollout_ids]
    assert len(set(trained)) == len(trained) == 60 * 3


# ---------------------------------------------------------------------------------------- theory


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_a_prefill_engine_is_an_m_d_1_queue_and_its_busy_time_adds_up(load) -> None:
    """Mean wait load / (2 (1 - load)) services. Over 10^5 requests the standard error, from 40 queues of other seeds,
    is 0.0021 and 0.021 services; the bound is 5 of them: a false alarm in 1 of 10^6 seeds."""
    engines, number = prefill_engines(), 100_000
    arrivals = np.random.default_rng(1).exponential(1 / load, number).cumsum()
    waits = [done(engines, one, 1, at) - 1 - at for one, at in enumerate(arrivals.tolist())]
    assert np.mean(waits) == pytest.approx(load / (2 * (1 - load)), abs=5 * (0.0021 if load < 0.5 else 0.021))
    end = arrivals[-1] + waits[-1] + 1
    assert engines.utilisation(to_ticks(end)) == pytest.approx(number / end)


def test_a_run_that_waits_for_prefill_is_as_fast_as_its_prefill_engines() -> None:
    """10 s a prompt on one of two prefill engines: 0.2 rollouts a second, with both always at work."""
    config = run_of(
        {"prefill": 2, "decode": 1},
        engines=3,
        steps=50,
        scheduler={"generation_batch_size": 64},
        workload={"prompt_tokens": 100},
        hardware={"prefill": {"token_s": 0.1}},
    )
    report = simulate(config)
    assert report.duration_s == pytest.approx(150 / 0.2, rel=0.02)
    assert report.prefill_utilisation == 1.0


# ----------------------------------------------------------------------------------------- reports


def test_all_accelerators_are_paid_and_reported() -> None:
    apart, together = run_of(APART), run_of(TOGETHER)
    assert (apart.num_engines, apart.num_prefill_engines) == (1, 1)
    assert (together.num_engines, together.num_prefill_engines) == (2, 0)
    assert apart.generation_accelerators == together.generation_accelerators == 2
    assert Prices.of(apart).rates(apart).gpus == 3
    assert "prefill_utilisation" not in simulate(together).model_dump_json(exclude_none=True)
    assert simulate(apart).prefill_utilisation == 0.0


def test_the_network_of_named_gpus_sends_the_caches() -> None:
    """Qwen3-8B: 36 layers, 8 KV heads of 128 numbers, K and V, 2 bytes: 147,456 bytes a token; an H100 has 50 GB/s. Two
    GPUs of an engine send a half each; fp8 has half the bytes."""
    named = {"gpu": "H100-SXM", "model": "Qwen3-8B", "decode": None, "training": None}

    def seconds(size: int, **hardware: str) -> float:
        config = run_of(APART, engines=2 * size, hardware={**named, **hardware}, cluster={"tensor_parallel": size})
        assert config.generation is not None
        return cache_transfer_s(config, config.generation)

    assert seconds(1) == 147_456 / 50e9
    assert seconds(2) == pytest.approx(147_456 / 50e9 / 2)
    assert seconds(1, kv_cache="fp8") == pytest.approx(147_456 / 50e9 / 2)


# --------------------------------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    "tables",
    [
        {"policy": {"task": "reverse", "size": 1, "learning_rate": 1e-3}},
        {"fleet": {"groups": [{"name": "a", "engines": 1}]}},
        {"cluster": {"generation_accelerators": None, "accelerators": 2}, "scheduler": {"kind": "partial_rollouts"}},
        {"faults": [{"kind": "kill", "second": 1.0}]},
    ],
    ids=lambda tables: next(iter(tables)),
)
def test_what_knows_no_prefill_engines_is_refused_in_one_line(tables) -> None:
    faults = tables.pop("faults", None)
    config = run_of(APART, **tables)
    if faults is not None:
        config = parse_run({**config.model_dump(mode="json", exclude_none=True), "faults": faults})
    assert message(SimulatedCluster, config).startswith("generation must be left out with a [policy], fleet.groups")


def test_engines_that_do_not_divide_and_plans_are_refused() -> None:
    rule = "generation.prefill + generation.decode must divide the run's 3 engines, got prefill=1, decode=1"
    assert rule in message(run_of, APART, engines=3)
    assert message(plan, run_of(APART)).startswith("plan knows no engines that only prefill")
