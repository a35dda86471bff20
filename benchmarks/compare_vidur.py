"""Simulated tokens per second of Vidur and of this simulator, on the same decode-only work, in one run.

    python benchmarks/compare_vidur.py VIDUR    # a checkout of https://github.com/microsoft/vidur

Neither tests nor `make bench` run it. Its Python needs the requirements of both (pandas, scikit-learn and so on:
`pip install -e . -r VIDUR/requirements.txt`). Written for Vidur's commit 7d47513.

The work: one engine, 64 sequences at a time, all waiting from the start, prompts of one token. This simulator draws the
lengths and runs them as one conventional RL step whose training takes no time; Vidur replays the same lengths from a
trace, in the same order, under its own default scheduler (Sarathi), Llama-3-8B on one A100.

Not timed, in Vidur's favour: training and tabulating its predictor of execution times (once per model and hardware,
printed at the end), its imports, its metrics and its trace. Here the time includes the ledger. Both build their
simulation before the clock starts, and both run without the garbage collector.

Straight lines replace Vidur's profile of attention, so that a checkout without its largest files is enough, and linear
regression replaces its default, a search over random forests. A run looks times up, so its speed hardly depends on
either.
"""

from __future__ import annotations

import csv
import gc
import logging
import os
import sys
import time
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from step_by_step import StepByStepEngine

from pipelinerl.config.run import parse_run
from pipelinerl.records.ledger import RunLedger
from pipelinerl.scheduler.events import RolloutFinished
from sim.cluster import SimulatedCluster
from sim.engine import ClosedFormEngine

SEQUENCES = 64
ROLLOUTS = 512
MODEL = "meta-llama/Meta-Llama-3-8B"
ROUNDS = 3


class Seconds(NamedTuple):
    """Processor time of the best round, and its wall time."""

    processor: float
    wall: float


def workload(kind, longest):
    """One optimizer step on all rollouts, in which only decoding takes time."""
    return parse_run(
        {
            "optimizer_steps": 1,
            "cluster": {"accelerators": 1},
            "scheduler": {"kind": "conventional", "train_batch_size": ROLLOUTS, "generation_batch_size": SEQUENCES},
            "workload": {"group_size": 1, "prompt_tokens": 1, "length": {"kind": kind, "max": longest}},
            "hardware": {
                "decode": {"kind": "affine", "step_s": 7.05e-3, "sequence_s": 1.065e-5, "context_token_s": 2.282e-8},
                "training": {"token_s": 0.0},
            },
        }
    )


def timed(call):
    """Seconds of one call."""
    gc.collect()
    gc.disable()
    processor, wall = time.process_time(), time.perf_counter()
    call()
    seconds = Seconds(time.process_time() - processor, time.perf_counter() - wall)
    gc.enable()
    return seconds


def lengths_of(config):
    """Answer lengths in order of rollouts."""
    lengths = {}

    class Recorder:
        def event(self, _time_s, event):
            if isinstance(event, RolloutFinished):
                lengths[event.rollout_id] = event.spans.num_tokens

        def command(self, _time_s, _command):
            pass

    SimulatedCluster(config).run(Recorder())
    assert len(lengths) == ROLLOUTS
    return [lengths[rollout] for rollout in sorted(lengths)]


def run_here(config, engine):
    """Seconds of one simulation with its ledger, as ``pipelinerl simulate`` does without a folder."""
    ledger = RunLedger(num_engines=config.num_engines, colocated=config.colocated, longest=config.workload.length.max)
    cluster = SimulatedCluster(config, engine_factory=engine)
    return timed(lambda: cluster.run(ledger))


def attention_profile(path):
    """Write a profile of attention with the columns that Vidur reads: milliseconds, straight lines."""
    shape = {"n_embd": 4096, "n_q_head": 32, "n_kv_head": 8, "block_size": 16, "num_tensor_parallel_workers": 1}
    points = [(1, chunk, kept) for chunk, kept in product((64, 128, 256, 512), (0, 512, 1024, 2048, 4096))]
    points += [(batch, 0, kept) for batch, kept in product((1, 8, 16, 32, 64), (64, 512, 1024, 2048, 4096))]
    with path.open("w", newline="") as file:
        rows = None
        for batch, chunk, kept in points:
            row = shape | {
                "batch_size": batch,
                "prefill_chunk_size": chunk,
                "kv_cache_size": kept,
                "time_stats.attn_kv_cache_save.median": 0.01 + 1e-5 * max(batch, chunk),
                "time_stats.attn_prefill.median": 0.01 + 1e-7 * chunk * (chunk + kept) if chunk else 0.0,
                "time_stats.attn_decode.median": 0.01 + 2e-6 * batch * kept if not chunk else 0.0,
            }
            if rows is None:
                rows = csv.DictWriter(file, row)
                rows.writeheader()
            rows.writerow(row)


def vidur_simulator(checkout, folder, lengths):
    """Build Vidur's simulator; trains and tabulates its predictor, or finds both in ``folder``."""
    # Vidur comes from the checkout named on the command line.
    from vidur.config import (  # noqa: PLC0415
        ClusterConfig,
        LinearRegressionExecutionTimePredictorConfig,
        MetricsConfig,
        ReplicaConfig,
        SarathiSchedulerConfig,
        SimulationConfig,
        TraceRequestGeneratorConfig,
    )
    from vidur.entities import Replica  # noqa: PLC0415
    from vidur.simulator import Simulator  # noqa: PLC0415

    Replica._id = -1  # Vidur numbers replicas over the whole process, and schedules only for number 0
    trace = folder / "trace.csv"
    trace.write_text(
        "arrived_at,num_prefill_tokens,num_decode_tokens\n" + "".join(f"0.0,1,{length}\n" for length in lengths)
    )
    attention = folder / "attention.csv"
    attention_profile(attention)
    profiles = checkout / "data" / "profiling"
    return Simulator(
        SimulationConfig(
            log_level="warning",
            cluster_config=ClusterConfig(
                replica_config=ReplicaConfig(model_name=MODEL),
                replica_scheduler_config=SarathiSchedulerConfig(batch_size_cap=SEQUENCES),
            ),
            request_generator_config=TraceRequestGeneratorConfig(trace_file=str(trace)),
            execution_time_predictor_config=LinearRegressionExecutionTimePredictorConfig(
                compute_input_file=str(profiles / "compute" / "{DEVICE}" / "{MODEL}" / "mlp.csv"),
                attention_input_file=str(attention),
                polynomial_degree=[1],
                k_fold_cv_splits=2,
                num_training_job_threads=1,
            ),
            metrics_config=MetricsConfig(
                write_metrics=False,
                enable_chrome_trace=False,
                output_dir=str(folder / "output"),
                cache_dir=str(folder / "cache"),
            ),
        )
    )


def run_vidur(simulator, lengths):
    """Seconds of one simulation, in which every request must end."""
    requests = [event._request for _, event in simulator._event_queue]
    seconds = timed(simulator.run)
    assert all(request.completed for request in requests)
    assert sorted(request.num_decode_tokens for request in requests) == sorted(lengths)
    assert all(request.num_restarts == 0 for request in requests)
    return seconds


def compare(checkout, folder, kind, longest):
    """Print the rows of one kind of lengths; return seconds spent on building Vidur's simulator first."""
    config = workload(kind, longest)
    lengths = lengths_of(config)
    tokens = sum(lengths)
    print(f"\n{ROLLOUTS} answers, {kind}, at most {longest} tokens, {tokens:,} in all")
    before = time.perf_counter()
    vidur_simulator(checkout, folder, lengths)
    built_s = time.perf_counter() - before
    rounds = [
        (
            run_vidur(vidur_simulator(checkout, folder, lengths), lengths),
            run_here(config, StepByStepEngine),
            run_here(config, ClosedFormEngine),
        )
        for _ in range(ROUNDS)
    ]
    vidur, steps, closed = (min(column) for column in zip(*rounds, strict=True))
    print(f"{'':<20} {'simulated tokens per second':>31} {'times Vidur':>21}")
    print(f"{'':<20} {'processor':>15} {'wall':>15} {'processor':>10} {'wall':>10}")
    for what, seconds in (("Vidur", vidur), ("here, single steps", steps), ("here, closed form", closed)):
        print(
            f"{what:<20} {tokens / seconds.processor:>15,.0f} {tokens / seconds.wall:>15,.0f} "
            f"{vidur.processor / seconds.processor:>10.1f} {vidur.wall / seconds.wall:>10.1f}"
        )
    return built_s


def main():
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "vidur" / "simulator.py").is_file():
        sys.exit("usage: python benchmarks/compare_vidur.py VIDUR, the folder of a checkout of microsoft/vidur")
    checkout = Path(sys.argv[1]).resolve()
    sys.path.insert(0, str(checkout))
    os.environ["WANDB_MODE"] = "disabled"
    logging.disable(logging.INFO)
    with TemporaryDirectory() as name:
        folder = Path(name)
        built_s = compare(checkout, folder, "fixed", 1000)
        for longest in (500, 2000, 4000):
            compare(checkout, folder, "uniform", longest)
    print(f"\nNot counted: {built_s:.1f} s to import Vidur, train its predictor and tabulate it, once.")


if __name__ == "__main__":
    main()
