"""Speed of ``plan``. Seconds go into the table at the end; only ratios within one run are asserted.

    make bench

The timed simulations are of the size of ``pipelinerl plan examples/plan_qwen7b_128_h100.toml``.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

from pipelinerl.config.run import load_run
from sim.planning.answer import plan
from sim.planning.screen import Screener, own_candidate, screen_all
from sim.planning.simulate import HowToPlan, Job, Runner, simulate_job
from sim.planning.space import SearchSpace

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "plan_qwen7b_128_h100.toml"


def test_a_thousand_candidates_are_screened_in_less_time_than_one_is_simulated(benchmark, table):
    """From the run file to the steady states, including the draws of answers."""
    config = load_run(EXAMPLE)

    def screened():
        space = SearchSpace.of(config)
        kept, rejected = screen_all(space, Screener(config, space.answers))
        return len(kept) + len(rejected)

    number = benchmark.pedantic(screened, rounds=3, warmup_rounds=1)
    seconds = benchmark.stats.stats.min
    before = time.process_time()
    simulate_job(Job(own_candidate(SearchSpace.of(config)), 200))
    simulated = time.process_time() - before
    table.append(("plan: candidates screened per second", f"{number / seconds:,.0f}"))
    table.append(("plan: processor seconds of one simulation of 200 optimizer steps", f"{simulated:.2f}"))
    assert number >= 1000
    assert seconds / number * 1000 < simulated


def test_the_whole_plan_of_the_example_takes_a_minute_and_a_half_on_two_cores(table):
    """1000 configurations, 20 simulations, and the uncertainty. Needs two idle cores."""

    def processor_s():
        return sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))

    before, before_s = time.perf_counter(), processor_s()
    report = plan(load_run(EXAMPLE), HowToPlan(workers=2))
    seconds, used = time.perf_counter() - before, processor_s() - before_s
    table.append(("plan: the whole example, seconds on two processes", f"{seconds:.0f}"))
    table.append(("plan: the whole example, processor seconds", f"{used:.0f}"))
    assert report.search.candidates >= 1000
    assert report.search.simulated == 20
    busy = os.getloadavg()[0] > 3 or (os.cpu_count() or 1) < 2
    assert busy or seconds < 90


def test_two_processes_are_nearly_twice_as_fast_as_one(benchmark, table):
    """Eight simulations of 60 optimizer steps each, including the start of the processes. Needs two idle cores."""
    config = load_run(EXAMPLE)
    own = own_candidate(SearchSpace.of(config))
    jobs = [Job(own, 60 + index % 2) for index in range(8)]

    def seconds(workers):
        before = time.perf_counter()
        Runner(HowToPlan(workers=workers)).run(jobs)
        return time.perf_counter() - before

    one = seconds(1)
    two = benchmark.pedantic(seconds, args=(2,), rounds=1)
    table.append(("plan: one process over two, eight simulations", f"{one / two:.2f}"))
    busy = os.getloadavg()[0] > 3 or (os.cpu_count() or 1) < 2
    assert busy or one / two > 1.5
