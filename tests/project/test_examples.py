"""The shipped examples run, give the promised numbers, and replay."""

from __future__ import annotations

import functools
import json
import re

import numpy as np
import pytest
from command_line import Command
from pages import EXAMPLES, ROOT

import pipelinerl as prl
from pipelinerl.config.resolve import resolved_hardware
from pipelinerl.config.run import load_run
from sim.compare import compare, plan_cells
from sim.run import simulate
from sim.workload import Workload

QUICKSTART, APPENDIX_A, QWEN7B, QWEN7B_LONG, BY_NAME, SPOT = (
    EXAMPLES / f"{name}.toml"
    for name in ("quickstart", "appendix_a", "qwen7b_128_h100", "qwen7b_128_h100_long", "h100_by_name", "spot")
)
CONVENTIONAL = "scheduler.kind=conventional"


def as_compared(example):
    """The overrides of the arm "pipeline" of an example: the paper's transport."""
    return next(arm.set for arm in load_run(example).compare.arms if arm.name == "pipeline")


@functools.cache
def summary_of(example, *overrides):
    return simulate(load_run(example, overrides))


def rows_of(example, *overrides):
    rows = []
    simulate(load_run(example, overrides), on_step=rows.append)
    return rows


def tokens_per_s(rows):
    """Trained tokens per second, from the end of the first step to the end of the last."""
    return sum(row.tokens for row in rows[1:]) / (rows[-1].time_s - rows[0].time_s)


def test_every_run_on_gpus_keeps_checkpoints() -> None:
    """Its job may end, or lose a rank, at any time."""
    trained = {path.stem: load_run(path).train for path in EXAMPLES.glob("*.toml")}
    every = {name: one.checkpoint.every for name, one in trained.items() if one is not None and one.device == "gpu"}
    assert every.keys() >= {"qwen7b_8_h100", "qwen7b_128_h100", "plan_qwen7b_128_h100"}
    assert None not in every.values()


# ------------------------------------------------------------------------------------------ quickstart


def test_the_quickstart_gives_its_golden_numbers(command: Command):
    """A change here changes every number of the docs."""
    summary = json.loads(command("simulate", QUICKSTART, "--json").out)
    assert (summary["samples_trained"], summary["tokens_trained"]) == (6400, 6_410_941)
    assert summary["duration_s"] == pytest.approx(533.052947648254, abs=1e-9)
    assert summary["lag"]["max"] == 11
    assert summary["lag"]["mean"] == pytest.approx(4.155434280240607, abs=1e-9)
    assert (summary["bottleneck"], summary["complete"]) == ("generation", True)


def test_the_quickstart_generates_at_the_rate_of_full_engines():
    """Full slots: 32 sequences, each with 200 + (1 + cv^2)/2 * 1000 tokens of context on average (cv after the cut).

    A step lasts 7.05 ms + 32 * 10.65 us + 22.82 ns * 32 * context. A rollout takes its length and one step, 10 ms of
    dispatch, and the prefill of the 32 that start meanwhile, 25.7 us * 200 + 0.34 ns * 200^2 each. Each of the 99
    publications stops the engines for 1.02 s. Generated tokens per second from these alone: within 2 %.
    """
    config = load_run(QUICKSTART)
    workload = Workload(config.workload, seed=0)
    lengths = np.array([length for group in range(2000) for length in workload.group(group, group).lengths])
    mean = lengths.mean()
    context = 200 + (1 + (lengths.std() / mean) ** 2) / 2 * mean
    step_s = 7.05e-3 + 32 * 1.065e-5 + 32 * context * 2.282e-8
    rollout_s = (mean + 1) * step_s + 0.010 + 32 * (200 * 2.57e-5 + 200**2 * 3.4e-10)
    summary = summary_of(QUICKSTART)
    running = 1 - 99 * 1.02 / summary.duration_s
    expected = 4 * 32 * mean / rollout_s * running
    assert summary.tokens.generated / summary.duration_s == pytest.approx(expected, rel=0.02)


def test_overrides_of_the_quickstart_change_lag_and_throughput():
    """Conventional RL has lags up to 3; a bound of 1 is kept by waiting, which costs throughput."""
    pipeline, conventional, bounded = (
        summary_of(QUICKSTART, *overrides) for overrides in ((), (CONVENTIONAL,), ("scheduler.max_lag=1",))
    )
    assert conventional.lag.max == 3
    assert bounded.lag.max == 1
    assert bounded.tokens_per_s < pipeline.tokens_per_s
    assert bounded.rollouts.discarded == 0


# ------------------------------------------------------------------- the paper's case study (appendix A)


@pytest.mark.slow
def test_the_case_study_comes_out_as_in_the_paper():
    """r_gen = U(192) * 44 = 16.9 within 2 % once engines are full; 1/(1/18.3 + 1/26.02) = 10.74 within 3 %.

    So their ratio, 1.57, within 5 %. Largest lag 132 by the formula, 1 more for the busy trainer, and a few for
    fluctuations; conventional with G = 134: lag 0 to 133.
    """
    config, rows = load_run(APPENDIX_A, ("optimizer_steps=1005",)), []
    pipeline = simulate(config, on_step=rows.append)
    conventional = summary_of(APPENDIX_A, CONVENTIONAL, "optimizer_steps=402")  # G = 134
    per_flash = tokens_per_s(rows[201:]) * config.hardware.decode.flash_s
    assert per_flash == pytest.approx(16.9, rel=0.02)
    assert conventional.tokens_per_flash == pytest.approx(10.7, rel=0.03)
    assert per_flash / conventional.tokens_per_flash == pytest.approx(1.57, rel=0.05)
    assert pipeline.lag.p99 <= 132 <= pipeline.lag.max <= 140
    assert (conventional.lag.max, conventional.lag.mean) == (133, pytest.approx(66.5, rel=0.01))


# ------------------------------------------------------------------------ the paper's main run (section 5)


@functools.cache
def main_run(example):
    """Rows of the first 500 steps."""
    return rows_of(example, *as_compared(example), "optimizer_steps=500")


@functools.cache
def lengths_of(example):
    """Lengths of 32,000 answers."""
    workload = Workload(load_run(example).workload, seed=0)
    return np.array([length for group in range(4000) for length in workload.group(group, group).lengths])


@pytest.mark.parametrize(("example", "filled"), [(QWEN7B, 64), (QWEN7B_LONG, 16)], ids=["short", "long"])
@pytest.mark.slow
def test_the_main_run_has_the_in_flight_lag_of_its_formula(example, filled):
    """H I/B (1 + cv^2)/2 in steady state, generation-bound: 3 (1 + 0.43)/2 = 2.14 steps with long answers, sd 0.05.

    4.4 with short ones, whose longest are in progress for 44 steps; sd 0.06. Bound 5 %.
    """
    lengths = lengths_of(example)
    rows = main_run(example)[filled : filled + 48]
    in_flight = sum(row.tokens * row.lag_in_flight_mean for row in rows) / sum(row.tokens for row in rows)
    assert in_flight == pytest.approx(3 * (1 + (lengths.std() / lengths.mean()) ** 2) / 2, rel=0.05)


def test_the_main_run_has_the_lengths_that_its_largest_lag_implies():
    """More than 50,000 samples of lag: H I L/mean + 5,000 to 13,000 in queues, so L/mean is 12 to 15."""
    config, lengths = load_run(QWEN7B), lengths_of(QWEN7B)
    assert 550 < lengths.mean() < 680
    assert 12 < config.workload.length.max / lengths.mean() < 15
    assert lengths.max() == config.workload.length.max  # some are cut


@pytest.mark.slow
def test_the_main_run_has_the_largest_lag_of_its_answers():
    """About 3 L/mean = 41 steps and a few in queues (the paper: 50); with long answers 3 * 2.7 and a few."""
    short, long = (max(row.lag_max for row in main_run(example)[:80]) for example in (QWEN7B, QWEN7B_LONG))
    assert 38 <= short <= 48
    assert 8 <= long <= 12


def test_conventional_arms_of_the_main_run_have_the_costs_of_the_paper():
    """64 sequences per engine, an eighth of the fixed cost of an optimizer step, no change of phase."""
    arms = {cell.arm: cell.config for cell in plan_cells(load_run(QWEN7B))}
    pipeline = arms["pipeline"]
    charged = [arms[f"conventional G={steps}"] for steps in (8, 16, 32)]
    assert {config.scheduler.generation_batch_size for config in charged} == {64}
    assert {config.hardware.training.step_s for config in charged} == {pipeline.hardware.training.step_s / 8}
    assert {config.hardware.switch.to_training_s + config.hardware.switch.to_generation_s for config in charged} == {0}
    paid = arms["G=32 in full"].hardware
    assert paid.training == pipeline.hardware.training
    assert paid.switch.to_training_s + paid.switch.to_generation_s == 4


def test_the_main_run_for_real_has_the_transport_of_train():
    """15.2 GB are gathered over links of 50 GB/s, compared on 80 GPUs of 3.35 TB/s; changes (1.2 % at a rate of
    1e-6, 3 bytes each, 4.5 % more for long gaps) are copied at 25 GB/s and sent at 0.6 GB/s; the file has no seconds.
    """
    config = load_run(QWEN7B)
    size, share = 2 * 7_615_616_512, 0.0122370
    changes = 1.5 * size * share / (1 - (1 - share) ** 255)
    published = size / (8 * 50e9) + 8 * size / (80 * 3.35e12) + changes / 25e9
    assert config.hardware.weights is None
    assert config.scheduler.filter_no_signal
    weights = resolved_hardware(config).weights
    assert weights.publish_s == pytest.approx(published, rel=1e-4)
    assert weights.transfer_s == pytest.approx(published + changes / 0.6e9, rel=1e-4)
    assert weights.pause_s == pytest.approx(changes / 25e9 + 0.02, rel=1e-4)


@pytest.mark.slow
def test_make_demo_prints_the_first_table_of_the_main_run():
    """Speed-up within 0.02, largest lag within 1, with the overrides of the Makefile."""
    command = next(line for line in (ROOT / "Makefile").read_text().splitlines() if "pipelinerl compare" in line)
    config = load_run(QWEN7B, re.findall(r"--set '?(.+?)'?(?= --|$)", command))
    report = compare(config)
    table = re.search(r"^scheduler .*?^```", (ROOT / "docs" / "main_run.md").read_text(), re.M | re.S)[0]
    rows = re.findall(r"^(\w.*?) {3,}(\d\.\d\d) .* (\d+) +[-\d]+%? +\d+% +\d+% +[-\d]+%?$", table, re.M)
    assert [name for name, *_ in rows] == [arm.name for arm in report.arms]
    for (_, speedup, largest), arm in zip(rows, report.arms, strict=True):
        assert arm.speedup == pytest.approx(float(speedup), abs=0.02)
        assert arm.summary.lag.max == pytest.approx(int(largest), abs=1)


@pytest.mark.slow
@pytest.mark.parametrize(("example", "mean"), [(QWEN7B, 600), (QWEN7B_LONG, 3000)], ids=["short", "long"])
def test_the_main_run_is_steady(example, mean):
    """500 steps of 1024: throughput and lag of the second and the last quarter are the same within 2 %."""
    quarters = main_run(example)[125:250], main_run(example)[375:]
    rates = [tokens_per_s(part) for part in quarters]
    lags = [sum(row.tokens * row.lag_mean for row in part) / sum(row.tokens for row in part) for part in quarters]
    assert rates[0] == pytest.approx(rates[1], rel=0.02)
    assert lags[0] == pytest.approx(lags[1], rel=0.02)
    assert np.mean([row.length_mean for part in quarters for row in part]) == pytest.approx(mean, rel=0.01)


# ------------------------------------------------------------------------------------ hardware by name


@pytest.mark.slow
def test_the_levels_of_the_example_by_name_are_ordered_and_the_weights_decide_the_winner():
    """With the same answers the run lasts longer from level to level. The pipeline, which sends weights eight times as
    often, is ahead unless an update takes half a minute, as at the pessimistic level of an unknown method.
    """
    levels = ("optimistic", "central", "pessimistic")

    def durations(*overrides):
        return [summary_of(BY_NAME, *overrides, f"hardware.level={level}").duration_s for level in levels]

    pipeline, conventional = durations(), durations(CONVENTIONAL)
    assert pipeline == sorted(pipeline)
    assert conventional == sorted(conventional)
    assert [ahead < behind for ahead, behind in zip(pipeline, conventional, strict=True)] == [True, True, False]
    known = "hardware.weight_sync=reshard"
    assert all(ahead < behind for ahead, behind in zip(durations(known), durations(known, CONVENTIONAL), strict=True))


@pytest.mark.slow
def test_a_better_gpu_is_faster():
    """More memory bandwidth generates faster; fewer FLOP/s train more slowly."""
    h200, h100, h20 = (summary_of(BY_NAME, f"hardware.gpu={gpu}") for gpu in ("H200", "H100", "H20"))
    assert h200.duration_s < h100.duration_s < h20.duration_s
    assert h100.bottleneck == "generation"
    assert h20.utilisation.training > 0.75 > h100.utilisation.training


# ------------------------------------------------------------------------------- spot engines


def test_the_example_of_spot_engines_is_the_main_run_with_published_failures():
    """419 of 16,384 GPUs in 54 days; 128 GPUs fail once in 16.5 days. All else is that of the paper's transport."""
    spot, main = load_run(SPOT), load_run(QWEN7B, as_compared(QWEN7B))
    fleet = spot.fleet
    (hours,) = {one.mtbf_hours for one in (*fleet.groups, fleet.trainer)}
    assert hours == pytest.approx(16_384 * 54 * 24 / 419, rel=1e-3)
    assert hours / 128 / 24 == pytest.approx(16.5, rel=0.01)
    assert (spot.cluster, spot.workload) == (main.cluster, main.workload)
    parts = ("decode", "prefill", "kv_cache_tokens", "training", "weights", "latency")
    assert [getattr(spot.hardware, part) for part in parts] == [getattr(main.hardware, part) for part in parts]
    sizes = ("train_batch_size", "generation_batch_size", "filter_no_signal", "kind")
    assert [getattr(spot.scheduler, key) for key in sizes] == [getattr(main.scheduler, key) for key in sizes]


# ---------------------------------------------------------------------------------- all of them


MIXTURE = (
    "cluster.accelerators=64", "cluster.generation_accelerators=24", "scheduler.train_batch_size=512",
    'hardware={ gpu = "H100", model = "Qwen3-30B-A3B" }',
)  # fmt: skip


@pytest.mark.parametrize("sets", [(), MIXTURE], ids=["7B on 128", "30B-A3B on 64"])
def test_changed_numbers_arrive_sooner_than_all_and_cost_no_tokens(sets):
    """By the hardware model's own numbers, the learning rate of the run file; in 40 steps the lag still rises."""
    delta, broadcast = (
        summary_of(QWEN7B, *sets, f"train.transport={one}", "optimizer_steps=40") for one in ("delta", "broadcast")
    )
    assert delta.lag.mean <= 10 < broadcast.lag.mean
    assert delta.tokens_per_s >= broadcast.tokens_per_s


@pytest.mark.slow
@pytest.mark.parametrize(
    "example", [QUICKSTART, APPENDIX_A, QWEN7B, QWEN7B_LONG, BY_NAME, SPOT], ids=lambda path: path.stem
)
def test_every_arm_of_an_example_is_a_run_that_replays(example, tmp_path):
    """Cut to three steps, in the first scenario: others differ in hardware and lengths only."""
    cells = plan_cells(load_run(example))
    for cell in cells:
        if cell.scenario == cells[0].scenario:
            config = cell.config.model_copy(update={"optimizer_steps": 3})
            simulate(config, out=tmp_path / cell.folder, trace=True)
            assert prl.replay(tmp_path / cell.folder).difference is None
