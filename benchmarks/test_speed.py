"""Speed of the simulator. Seconds go into the table at the end; only ratios within one run are asserted.

    make bench

Seconds are processor time, the best of a few rounds, so that other work on the machine matters little.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import pytest
from step_by_step import StepByStepEngine

from pipelinerl.config.run import load_run, parse_run
from pipelinerl.records.ledger import RunLedger
from pipelinerl.scheduler.events import Event
from pipelinerl.scheduler.kinds import make_scheduler
from sim.cluster import SimulatedCluster
from sim.engine import ClosedFormEngine
from sim.run import simulate

ROOT = Path(__file__).parent.parent
QWEN7B = ROOT / "examples" / "qwen7b_128_h100_long.toml"

pytestmark = pytest.mark.benchmark(timer=time.process_time)


@pytest.fixture(autouse=True)
def _no_garbage_collection():
    """Without the garbage collector, as in ``sim.run``: a run makes no reference cycles."""
    gc.disable()
    yield
    gc.enable()


class Recorded:
    """Keeps every event and command."""

    def __init__(self):
        self.entries = []

    def event(self, time_s, event):
        self.entries.append((time_s, event))

    def command(self, time_s, command):
        self.entries.append((time_s, command))


def workload(steps, *, mean=3000, engines=4):
    """A 7B model on H100s, 64 sequences each, B = 128, log-normal answers."""
    return parse_run(
        {
            "optimizer_steps": steps,
            "cluster": {"accelerators": 2 * engines, "generation_accelerators": engines},
            "scheduler": {"train_batch_size": 128, "generation_batch_size": 64},
            "workload": {
                "group_size": 8,
                "prompt_tokens": 200,
                "length": {"kind": "lognormal", "mean": mean, "cv": 0.7, "max": 4 * mean},
            },
            "hardware": {
                "decode": {"kind": "affine", "step_s": 7.05e-3, "sequence_s": 1.065e-5, "context_token_s": 2.282e-8},
                "prefill": {"token_s": 2.57e-5, "token_squared_s": 3.4e-10},
                "training": {"token_s": 1.294e-4, "step_s": 1.0},
                "weights": {"publish_s": 1.0, "pause_s": 1.02},
                "latency": {"dispatch_s": 0.005, "dispatch_jitter_s": 0.005},
            },
        }
    )


def played(config, make=ClosedFormEngine):
    """Simulate and keep everything."""
    recorded = Recorded()
    SimulatedCluster(config, engine_factory=make).run(recorded)
    return recorded.entries


def with_ledger(config):
    """Simulate with a ledger only, as ``pipelinerl simulate`` does without a folder."""
    ledger = RunLedger(num_engines=config.num_engines, colocated=config.colocated, longest=config.workload.length.max)
    SimulatedCluster(config).run(ledger)
    return ledger


def seconds(call, *, rounds=3):
    """Processor seconds of a call, the best of a few."""
    best = float("inf")
    for _ in range(rounds):
        before = time.process_time()
        call()
        best = min(best, time.process_time() - before)
    return best


def test_the_closed_form_is_a_hundred_times_as_fast_as_single_steps(benchmark, table):
    """Answers of 8000 tokens on average, and for comparison the long main example with 3000."""
    for mean, steps in ((3000, 16), (8000, 8)):
        config = workload(steps, mean=mean, engines=2)
        entries = played(config)  # and warm up
        if mean == 8000:
            benchmark.pedantic(played, (config,), rounds=5)
        closed_s = seconds(lambda config=config: played(config), rounds=5)
        before = time.process_time()
        by_steps = played(config, StepByStepEngine)
        by_steps_s = time.process_time() - before
        assert entries == by_steps
        ratio = by_steps_s / closed_s
        tokens = sum(entry.spans.num_tokens for _, entry in entries if hasattr(entry, "spans"))
        table.append((f"answers of {mean}: closed form, simulated tokens per second", f"{tokens / closed_s:,.0f}"))
        table.append((f"answers of {mean}: single steps, simulated tokens per second", f"{tokens / by_steps_s:,.0f}"))
        table.append((f"answers of {mean}: closed form is faster by", f"{ratio:.0f} x"))
    assert ratio >= 100


def test_twice_the_rollouts_take_twice_the_time(benchmark, table):
    benchmark.pedantic(with_ledger, (workload(160),), rounds=3, warmup_rounds=1)
    ratio = benchmark.stats.stats.min / seconds(lambda: with_ledger(workload(80)))
    table.append(("time for twice the optimizer steps", f"{ratio:.2f} x"))
    assert 1.5 <= ratio <= 2.6


def test_ten_times_the_tokens_take_no_longer(benchmark, table):
    benchmark.pedantic(with_ledger, (workload(80, mean=30_000),), rounds=3, warmup_rounds=1)
    ratio = benchmark.stats.stats.min / seconds(lambda: with_ledger(workload(80, mean=3000)))
    table.append(("time for the same rollouts with answers ten times as long", f"{ratio:.2f} x"))
    assert ratio <= 1.5


def test_a_turn_takes_at_most_25_microseconds_where_a_rollout_of_one_turn_takes_14(benchmark, table):
    """Processor time of a turn over a rollout of the long example, in alternating runs of one process.

    The 3rd and the 10th of 12 ratios bound the median with 96 % confidence for any distribution.
    """
    agents = load_run(ROOT / "examples" / "agents.toml", ["optimizer_steps=3", "scheduler.train_batch_size=128"])
    single = load_run(QWEN7B, ["optimizer_steps=30"])

    def pair():
        before = time.process_time()
        report = simulate(agents)
        turns_s = time.process_time() - before
        before = time.process_time()
        rollouts = simulate(single).rollouts.finished
        single_s = time.process_time() - before
        per_turn_s, per_rollout_s = (
            turns_s / (report.environments.turns_mean * report.rollouts.finished),
            single_s / rollouts,
        )
        pairs.append((per_turn_s, per_rollout_s, per_turn_s / per_rollout_s))

    pairs = []
    benchmark.pedantic(pair, rounds=12, warmup_rounds=0)
    turn_s, rollout_s, ratios = (sorted(column) for column in zip(*pairs, strict=True))
    table.append(("agents, microseconds per turn, median", f"{1e6 * statistics.median(turn_s):.1f}"))
    table.append(("long example, microseconds per rollout, median", f"{1e6 * statistics.median(rollout_s):.1f}"))
    table.append(("a turn over a rollout, median", f"{statistics.median(ratios):.2f} x"))
    table.append(("a turn over a rollout, 96 % interval of the median", f"{ratios[2]:.2f} to {ratios[9]:.2f} x"))
    assert ratios[2] <= 25 / 14  # a larger value would show that it is slower


def test_events_per_second_of_the_scheduler(benchmark, table):
    config = workload(80)
    events = [entry for _, entry in played(config) if isinstance(entry, get_args(Event))]

    def replay():
        scheduler = make_scheduler(config.scheduler, optimizer_steps=80, num_engines=config.num_engines, group_size=8)
        scheduler.start()
        for event in events:
            scheduler.handle(event)

    benchmark.pedantic(replay, rounds=5, warmup_rounds=1)
    table.append(("scheduler, events per second", f"{len(events) / benchmark.stats.stats.min:,.0f}"))
    share = benchmark.stats.stats.min / seconds(lambda: with_ledger(config))
    table.append(("scheduler, share of a simulated run", f"{share:.0%}"))
    assert share < 1


MEASURE = """
import json, resource, sys, time
from pipelinerl.config.run import load_run
from sim.run import simulate
config = load_run(sys.argv[1], sys.argv[2:])
summary = simulate(config)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"seconds": time.process_time(), "peak_mib": peak, "tokens": summary.tokens.generated}))
"""


def measured(*overrides):
    """Seconds and peak memory of a whole process that simulates the main example with long answers."""
    command = [sys.executable, "-c", MEASURE, str(QWEN7B), *overrides]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)


@pytest.mark.benchmark(timer=time.perf_counter)
def test_the_long_example_takes_time_in_proportion_and_no_more_memory(benchmark, table):
    part = measured("optimizer_steps=200")
    whole = benchmark.pedantic(measured, rounds=1)
    for what, result in (("200 steps", part), ("1000 steps", whole)):
        table.append((f"qwen7b_128_h100_long, {what}, processor seconds", f"{result['seconds']:.1f}"))
        table.append((f"qwen7b_128_h100_long, {what}, peak memory (MiB)", f"{result['peak_mib']:.0f}"))
    table.append(("qwen7b_128_h100_long, extrapolated from 200 steps, seconds", f"{5 * part['seconds']:.1f}"))
    table.append(("qwen7b_128_h100_long, simulated tokens per second", f"{whole['tokens'] / whole['seconds']:,.0f}"))
    assert 3 <= whole["seconds"] / part["seconds"] <= 6.5
    assert whole["peak_mib"] <= 1.5 * part["peak_mib"]


def process_seconds(*arguments, rounds=5):
    """Wall seconds of a Python process, the best of a few."""
    best = float("inf")
    for _ in range(rounds):
        before = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True, cwd=ROOT)
        best = min(best, time.perf_counter() - before)
    return best


@pytest.mark.benchmark(timer=time.perf_counter)
def test_start_up_is_short_beside_what_it_would_be_with_everything_loaded(benchmark, table):
    bare_s = process_seconds("-c", "pass")
    import_s = process_seconds("-c", "import pipelinerl")
    everything_s = process_seconds("-c", "import sim.run, sim.compare, analysis.plot")
    help_s = benchmark.pedantic(process_seconds, ("-c", "from pipelinerl.cli import main; main()", "--help"), rounds=1)
    table.append(("python -c pass, seconds", f"{bare_s:.3f}"))
    table.append(("import pipelinerl, seconds more", f"{import_s - bare_s:.3f}"))
    table.append(("pipelinerl --help, seconds", f"{help_s:.3f}"))
    table.append(("all packages loaded, seconds", f"{everything_s:.3f}"))
    assert import_s - bare_s < 0.5 * (everything_s - bare_s)
    assert help_s < everything_s
