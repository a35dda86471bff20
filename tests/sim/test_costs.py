"""What decode steps, prefill and training cost, by hand, in whole picoseconds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.deepspeed.packing import pack
from backends.interface import Sample
from pipelinerl.config.resolve import resolved_hardware
from pipelinerl.config.run_file import parse_run
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.costs import training_cost
from pipelinerl.hardware.tables import PrefillConfig, TrainingConfig
from pipelinerl.rl.segments import Segment
from sim.clock import to_seconds, to_ticks
from sim.costs import PrefillCost, decode_cost, prefill_cost
from sim.run import simulate

MICROSECOND = 10**6
"""Ticks."""


def cost_of(decode, *, slots=256, tensor_parallel=1):
    config = parse_run(
        {
            "optimizer_steps": 1,
            "cluster": {"accelerators": 4, "generation_accelerators": 2, "tensor_parallel": tensor_parallel},
            "scheduler": {"train_batch_size": 1, "generation_batch_size": slots},
            "workload": {"length": {"kind": "fixed", "max": 10}},
            "hardware": {"decode": decode, "training": {"token_s": 0.0}},
        }
    )
    decode = resolved_hardware(config).decode
    return decode_cost(decode, tensor_parallel=tensor_parallel, num_slots=slots)


# --------------------------------------------------------------------------------------- decode steps

CENTRAL = {"kind": "affine", "step_s": 7.05e-3, "sequence_s": 1.065e-5, "context_token_s": 2.282e-8}
"""Qwen2.5-7B on one H100, as in the examples."""


def test_an_affine_step_is_the_sum_of_its_three_parts():
    """64 sequences: 7.05 ms + 64 * 10.65 us = 7.7316 ms, and 22.82 ns per token of context.

    With 4096 tokens each: 7.7316 + 262144 * 22.82e-6 = 13.714 ms.
    """
    cost = cost_of(CENTRAL)
    assert cost.batch_ticks[64] == 7_731_600_000
    assert cost.context_ticks == 22_820
    assert to_seconds(cost.batch_ticks[64] + cost.context_ticks * 64 * 4096) == pytest.approx(13.714e-3, rel=1e-4)


def test_an_affine_step_is_that_of_the_whole_engine():
    assert cost_of(CENTRAL, tensor_parallel=2) == cost_of(CENTRAL)


@pytest.mark.parametrize("slots", [1, 7])
def test_there_is_a_cost_for_every_number_of_sequences_up_to_the_slots(slots):
    cost = cost_of({"kind": "affine", "step_s": 1e-9, "sequence_s": 1e-12}, slots=slots)
    assert cost.batch_ticks == (0, *(1000 + batch for batch in range(1, slots + 1)))


ROOFLINE = {
    "kind": "roofline",
    "peak_flops": 1e15,
    "bandwidth": 1e12,
    "parameters_read": 1e9,
    "parameters_active": 2e9,
    "bytes_per_parameter": 2.0,
    "kv_bytes_per_token": 1000.0,
    "weight_efficiency": 0.5,
    "kv_efficiency": 0.25,
    "flops_efficiency": 0.5,
    "step_overhead_s": 1e-3,
    "sequence_overhead_s": 1e-5,
}


@pytest.mark.parametrize(
    ("batch", "tensor_parallel", "microseconds"),
    [
        pytest.param(100, 1, 4000 + 1000 + 1000, id="reading weights"),
        pytest.param(500, 1, 4000 + 1000 + 5000, id="both the same"),
        pytest.param(1000, 1, 8000 + 1000 + 10_000, id="multiplying"),
        pytest.param(100, 2, 2000 + 1000 + 1000, id="half the weights each"),
        pytest.param(1000, 2, 4000 + 1000 + 10_000, id="half the products each"),
    ],
)
def test_a_roofline_step_is_the_longer_of_reading_and_multiplying(batch, tensor_parallel, microseconds):
    """Weights: 2 GB / (1 TB/s * 0.5) = 4 ms. Products: 4 GFLOP / (1 PFLOP/s * 0.5) = 8 us per sequence.

    On top 1 ms per step and 10 us per sequence, which more accelerators do not shorten.
    """
    cost = cost_of(ROOFLINE, slots=1000, tensor_parallel=tensor_parallel)
    assert cost.batch_ticks[batch] == microseconds * MICROSECOND


@pytest.mark.parametrize(("tensor_parallel", "ticks"), [(1, 4000), (2, 2000)])
def test_a_roofline_reads_the_cache_of_every_token(tensor_parallel, ticks):
    """1000 bytes / (1 TB/s * 0.25) = 4 ns."""
    assert cost_of(ROOFLINE, tensor_parallel=tensor_parallel).context_ticks == ticks


def test_the_papers_step_costs_batch_over_utilisation_whatever_its_context():
    """Appendix A.4: U(192) = 16.9/44, so a step lasts 192 * 44/16.9 = 499.9 flashes of 15.4 us (0.3 %: rounding)."""
    cost = cost_of({"kind": "utilisation", "flash_s": 15.4e-6}, slots=192)
    assert to_seconds(cost.batch_ticks[192]) == pytest.approx(499.9 * 15.4e-6, rel=3e-3)
    assert to_seconds(cost.batch_ticks[1]) == pytest.approx(467.1 * 15.4e-6, rel=1e-6)
    assert cost.context_ticks == 0


def test_a_measured_table_of_utilisation_is_interpolated_in_cost(tmp_path):
    """64/0.2 = 320 and 128/0.32 = 400 flashes of 1 us, 360 half way; below the first row as there."""
    table = tmp_path / "measured.csv"
    table.write_text("batch,utilisation\n64,0.2\n128,0.32\n")
    cost = cost_of({"kind": "utilisation", "flash_s": 1e-6, "table": str(table)}, slots=128)
    assert [cost.batch_ticks[batch] / MICROSECOND for batch in (0, 1, 64, 96, 128)] == [0, 320, 320, 360, 400]


def test_a_missing_table_is_the_users_mistake(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.csv"):
        cost_of({"kind": "utilisation", "flash_s": 1e-6, "table": str(tmp_path / "absent.csv")})


# ------------------------------------------------------------------------------------ prefill, training


def test_prefill_grows_with_the_square_of_the_tokens():
    """10 tokens: 1 ms + 10 * 100 us + 100 * 1 us."""
    cost = prefill_cost(PrefillConfig(sequence_s=1e-3, token_s=1e-4, token_squared_s=1e-6))
    assert cost.ticks(10) == 2100 * MICROSECOND


def test_an_empty_prompt_needs_no_prefill():
    assert PrefillCost(5, 5, 5).ticks(0) == 0


@settings(derandomize=True, deadline=None)
@given(
    tokens=st.integers(1, 10**6), fixed=st.integers(0, 10**9), linear=st.integers(0, 10**6), square=st.integers(0, 99)
)
def test_prefill_is_exact_for_long_prompts(tokens, fixed, linear, square):
    assert PrefillCost(fixed, linear, square).ticks(tokens) == fixed + linear * tokens + square * tokens**2


@pytest.mark.parametrize(("completes_step", "seconds"), [(False, 0.5 + 2.0), (True, 0.5 + 2.0 + 3.0)])
def test_training_spreads_tokens_over_the_accelerators_but_not_its_fixed_parts(completes_step, seconds):
    """1000 tokens at 8 ms over 4 accelerators: 2 s; 0.5 s per micro-batch; 3 s for the one that makes the step."""
    cost = training_cost(TrainingConfig(token_s=8e-3, step_s=3.0, micro_batch_s=0.5), training_accelerators=4)
    assert cost.seconds([600, 400], completes_step=completes_step) == pytest.approx(seconds)


def trainer(accelerators, shared, **seconds):
    config = TrainingConfig(**{"token_s": 8e-3, **seconds}, sequence_accelerators=shared)
    return training_cost(config, training_accelerators=accelerators)


@pytest.mark.parametrize(
    ("lengths", "accelerators", "shared", "seconds"),
    [
        pytest.param([400, 200, 100, 100], 4, None, 1.6, id="divided: 800 tokens at 8 ms over 4"),
        pytest.param([400, 200, 100, 100], 4, 1, 3.2, id="the longest on one"),
        pytest.param([400, 200, 100, 100], 4, 2, 1.6, id="the longest on two, as long as the mean"),
        pytest.param([100] * 64, 128, 1, 0.8, id="half of 128 have nothing to do"),
        pytest.param([100] * 96, 64, 1, 1.6, id="somebody has two of 96 equal ones on 64"),
        pytest.param([100] * 96, 64, 2, 1.2, id="three each on 32 ranks of two"),
        pytest.param([100] * 64, 64, 1, 0.8, id="one each"),
        pytest.param([300], 2, 8, 1.2, id="no more than there are share a sequence"),
    ],
)
def test_a_micro_batch_lasts_as_long_as_its_fullest_rank(lengths, accelerators, shared, seconds):
    cost = trainer(accelerators, shared, micro_batch_s=0.5, step_s=3.0)
    assert cost.seconds(lengths, completes_step=False) == pytest.approx(0.5 + seconds)
    assert cost.seconds(lengths, completes_step=True) == pytest.approx(3.5 + seconds)


def test_attention_of_the_longest_is_that_of_a_rank():
    """20 tokens at 8 ms and 400 squared ones at 1 ms: 0.56 s on one; all 50 tokens on two: 0.55 s."""
    cost = trainer(2, 1, token_squared_s=1e-3)
    assert cost.seconds([20, 10, 10, 10], completes_step=True) == pytest.approx(20 * 8e-3 + 0.4)
    assert cost.seconds([20, 10, 10, 10, 10], completes_step=True) == pytest.approx((60 * 8e-3 + 0.8) / 2)


LENGTHS = st.lists(st.integers(1, 5000), min_size=1, max_size=40)


@settings(derandomize=True, deadline=None)
@given(lengths=LENGTHS, accelerators=st.integers(1, 99), more=st.integers(0, 99), shared=st.integers(1, 9))
def test_more_accelerators_are_never_slower(lengths, accelerators, more, shared):
    few, many = (trainer(n, shared, token_squared_s=1e-6) for n in (accelerators, accelerators + more))
    assert many.seconds(lengths, completes_step=True) <= few.seconds(lengths, completes_step=True) * (1 + 1e-12)


@settings(derandomize=True, deadline=None)
@given(lengths=LENGTHS, ranks=st.integers(1, 30), shared=st.integers(1, 9))
def test_a_micro_batch_is_between_what_is_needed_and_what_the_greedy_spread_takes(lengths, ranks, shared):
    """No faster than the longest, or all divided; no slower than if each, longest first, goes to the emptiest rank."""
    cost = trainer(ranks * shared, shared, token_squared_s=1e-6)
    seconds = cost.seconds(lengths, completes_step=True)
    work_s = [(8e-3 + 1e-6 * length) * length / shared for length in lengths]
    loads = [0.0] * ranks
    for one_s in sorted(work_s, reverse=True):
        loads[loads.index(min(loads))] += one_s
    assert max(*work_s, sum(work_s) / ranks) * (1 - 1e-12) <= seconds <= max(loads) * (1 + 1e-12)
    assert max(loads) <= (sum(work_s) / ranks + max(work_s)) * (1 + 1e-12)


@settings(derandomize=True, deadline=None)
@given(length=st.integers(1, 9999), ranks=st.integers(1, 99), each=st.integers(1, 9), shared=st.integers(1, 9))
def test_as_many_equal_sequences_on_every_rank_are_as_if_divided(length, ranks, each, shared):
    lengths = [length] * (ranks * each)
    whole, divided = (trainer(ranks * shared, one).seconds(lengths, completes_step=True) for one in (shared, None))
    assert whole == pytest.approx(divided, rel=1e-12)


@pytest.mark.parametrize("sequences", [16, 24, 32, 48, 64, 128, 256])
def test_our_own_packing_is_as_balanced_as_the_simulator_takes_it_for(sequences):
    """16 ranks, log-normal lengths: the fullest rank has what the simulator says or a little more, 13 % at most."""
    lengths = np.random.default_rng(sequences).lognormal(6.0, 0.6, sequences).astype(int) + 2
    samples = [
        Sample(
            rollout_id=index,
            prompt_P=np.ones(1, np.int64),
            segments=(Segment.generated(np.ones(length - 1, np.int64), np.zeros(length - 1, np.float32)),),
            advantage=1.0,
            reward=1.0,
        )
        for index, length in enumerate(lengths.tolist())
    ]
    ranks = pack(samples, pack_tokens=100_000, num_ranks=16)
    fullest = max(sum(len(row.token_N) for row in rows) for rows in ranks)
    seconds = trainer(16, 1, token_s=1.0).seconds(lengths.tolist(), completes_step=True)
    assert seconds <= fullest <= 1.13 * seconds


def test_the_papers_trainer_makes_17_tokens_per_flash():
    """A.4: 84 accelerators at tau = 84/17.08 = 4.918 flashes per token; the example says 75.7372 us at 15.4 us."""
    flash_s = 15.4e-6
    cost = training_cost(TrainingConfig(token_s=7.57372e-5), training_accelerators=84)
    assert 10**6 / (cost.seconds([10**6], completes_step=True) / flash_s) == pytest.approx(17.08, rel=1e-4)


# ------------------------------------------------------------------------------------------- ticks


@pytest.mark.parametrize(
    ("seconds", "ticks"),
    [(1.0, 10**12), (2.282e-8, 22_820), (1.4e-12, 1), (1.6e-12, 2), (0.0, 0), (3600.0, 3600 * 10**12)],
)
def test_a_tick_is_a_picosecond_to_the_nearest(seconds, ticks):
    assert to_ticks(seconds) == ticks


@settings(derandomize=True, deadline=None)
@given(ticks=st.integers(0, 10**15))
def test_ticks_survive_the_way_to_seconds_and_back(ticks):
    """A float has 53 bits: exact up to 2^53 ps, two and a half hours."""
    assert to_ticks(to_seconds(ticks)) == ticks


def test_a_step_lasts_a_tick_at_least():
    """Half a picosecond rounds to none; then the clock would stand still."""
    cost = cost_of({"kind": "affine", "step_s": 4e-13}, slots=2)
    assert cost.batch_ticks == (0, 1, 1)


def test_the_simulator_charges_attention_by_squared_length():
    """Two sequences of 10 and 10 tokens at 1 s per squared token over 2 trainers: 100 s, and not 200."""
    hardware = {"decode": {"kind": "affine", "step_s": 1e-9}, "training": {"token_s": 0.0, "token_squared_s": 1.0}}
    tables = {
        "optimizer_steps": 1,
        "cluster": {"accelerators": 3, "generation_accelerators": 1},
        "scheduler": {"train_batch_size": 2, "generation_batch_size": 2},
        "workload": {"prompt_tokens": 4, "length": {"kind": "fixed", "max": 6}},
        "hardware": hardware,
    }
    assert simulate(parse_run(tables)).duration_s == pytest.approx(100.0, abs=1e-6)
