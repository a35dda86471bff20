"""The formulas of decode steps, prefill and training, in seconds, by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from backends.interface import Sample
from backends.trainer.packing import pack
from pipelinerl.hardware.costs import (
    AffineDecode,
    Decode,
    DecodeStep,
    PrefillConfig,
    Speculation,
    TrainingConfig,
    batch_s,
    prefill_s,
    tokens_per_step,
    training_cost,
)
from pipelinerl.rl.segments import Segment


def step_of(decode, *, most=256, tensor_parallel=1):
    return DecodeStep(TypeAdapter(Decode).validate_python(decode), tensor_parallel=tensor_parallel, most=most)


CENTRAL = {"kind": "affine", "step_s": 7.05e-3, "sequence_s": 1.065e-5, "context_token_s": 2.282e-8}
"""Qwen2.5-7B on one H100, as in the examples."""


def test_an_affine_step_is_the_sum_of_its_three_parts():
    """64 sequences: 7.05 ms + 64 * 10.65 us = 7.7316 ms, and 22.82 ns per token of context.

    With 4096 tokens each: 7.7316 + 262144 * 22.82e-6 = 13.714 ms.
    """
    cost = step_of(CENTRAL)
    assert cost.batch_s[64] == pytest.approx(7.7316e-3, rel=1e-12)
    assert cost.context_s == 2.282e-8
    assert cost.of(64, 64 * 4096) == pytest.approx(7.7316e-3 + 262_144 * 2.282e-8, rel=1e-12)
    assert cost.of(64, 64 * 4096) == pytest.approx(13.714e-3, rel=1e-4)


def test_an_affine_step_is_that_of_the_whole_engine():
    one, two = (step_of(CENTRAL, tensor_parallel=size) for size in (1, 2))
    assert (one.batch_s, one.context_s) == (two.batch_s, two.context_s)


ROOFLINE = {
    "kind": "roofline", "peak_flops": 1e15, "bandwidth": 1e12, "parameters_read": 1e9, "parameters_active": 2e9,
    "bytes_per_parameter": 2.0, "kv_bytes_per_token": 1000.0, "weight_efficiency": 0.5, "kv_efficiency": 0.25,
    "flops_efficiency": 0.5, "step_overhead_s": 1e-3, "sequence_overhead_s": 1e-5,
}  # fmt: skip


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
    cost = step_of(ROOFLINE, most=1000, tensor_parallel=tensor_parallel)
    assert cost.batch_s[batch] == pytest.approx(microseconds * 1e-6, rel=1e-12)


@pytest.mark.parametrize(("tensor_parallel", "seconds"), [(1, 4e-9), (2, 2e-9)])
def test_a_roofline_reads_the_cache_of_every_token(tensor_parallel, seconds):
    """1000 bytes / (1 TB/s * 0.25) = 4 ns."""
    assert step_of(ROOFLINE, tensor_parallel=tensor_parallel).context_s == pytest.approx(seconds, rel=1e-12)


def test_the_papers_step_costs_batch_over_utilisation_whatever_its_context():
    """Appendix A.4: U(192) = 16.9/44, so a step lasts 192 * 44/16.9 = 499.9 flashes of 15.4 us (0.3 %: rounding)."""
    cost = step_of({"kind": "utilisation", "flash_s": 15.4e-6}, most=192)
    assert cost.batch_s[192] == pytest.approx(499.9 * 15.4e-6, rel=3e-3)
    assert cost.batch_s[1] == pytest.approx(467.1 * 15.4e-6, rel=1e-6)
    assert cost.context_s == 0


def test_a_measured_table_of_utilisation_is_interpolated_in_cost(tmp_path):
    """64/0.2 = 320 and 128/0.32 = 400 flashes of 1 us, 360 half way; below the first row as there."""
    table = tmp_path / "measured.csv"
    table.write_text("batch,utilisation\n64,0.2\n128,0.32\n")
    cost = step_of({"kind": "utilisation", "flash_s": 1e-6, "table": str(table)}, most=128)
    assert [cost.batch_s[batch] * 1e6 for batch in (1, 64, 96, 128)] == pytest.approx([320, 320, 360, 400], rel=1e-12)


EXPERTS = {**ROOFLINE, "experts": 4, "experts_per_token": 1, "expert_parameters": 1e9}


@pytest.mark.parametrize(("batch", "microseconds"), [(1, 1000), (2, 1750), (3, 2312.5)])
def test_a_roofline_with_experts_reads_those_that_the_batch_meets(batch, microseconds):
    """All experts: 2 GB / (1 TB/s * 0.5) = 4 ms; of four a batch meets 1/4, 7/16, 37/64. And 4 + 1 ms, 10 us each."""
    cost = step_of(EXPERTS)
    assert cost.batch_s[batch] == pytest.approx((5000 + 10 * batch + microseconds) * 1e-6, rel=1e-12)


# ---------------------------------------------------------------------------------------------- steps that draft


def drafting(decode, *, tokens=3, cost=0.0, off_above=None, acceptances=(0.0,), most=1000):
    law = Speculation(tokens, cost, off_above, acceptances)
    return DecodeStep(TypeAdapter(Decode).validate_python(decode), tensor_parallel=1, most=most, speculation=law)


@pytest.mark.parametrize(
    ("decode", "batch", "microseconds"),
    [
        pytest.param(CENTRAL, 10, 7050 + 40 * 10.65, id="affine: a row is a token"),
        pytest.param(ROOFLINE, 100, 4000 + 1000 + 1000, id="roofline: 400 tokens are bound by memory"),
        pytest.param(ROOFLINE, 250, 8000 + 1000 + 2500, id="roofline: 1000 tokens are multiplied, 250 sequences"),
        pytest.param(EXPERTS, 1, 5000 + 10 + 4000 * (1 - 0.75**4), id="experts: those that 4 tokens meet"),
    ],
)
def test_a_step_that_verifies_three_drafts_costs_four_tokens_a_sequence(decode, batch, microseconds):
    """Where no draft is accepted, a token takes a step. Weights are read once, and so is the context."""
    cost = drafting(decode)
    assert cost.batch_s[batch] == pytest.approx(microseconds * 1e-6, rel=1e-12)
    assert cost.of(batch, 0) == pytest.approx(cost.batch_s[batch])
    assert cost.of(batch, 1000) - cost.of(batch, 0) == pytest.approx(1000 * step_of(decode).context_s)


def test_a_step_that_verifies_is_as_many_flashes_as_one_of_all_its_tokens():
    paper = {"kind": "utilisation", "flash_s": 15.4e-6}
    assert drafting(paper, most=48).batch_s[48] == step_of(paper, most=192).batch_s[192]


def test_drafting_takes_its_share_of_plain_steps_and_ends_above_a_number_of_sequences():
    """3 drafts of 0.1 plain steps each, up to two sequences: context costs 1.3 times, too. 1 + 0.5 + 0.25 + 0.125
    tokens a step."""
    cost, plain = drafting(CENTRAL, cost=0.1, off_above=2, acceptances=(0.5,)), step_of(CENTRAL)
    for batch in (1, 2):
        seconds = drafting(CENTRAL).batch_s[batch] + 0.3 * plain.batch_s[batch] + 500 * 1.3 * plain.context_s
        assert cost.of(batch, 500) == pytest.approx(seconds / 1.875)
    assert cost.of(3, 500) == pytest.approx(plain.of(3, 500))
    assert cost.of_all(np.array([1.0, 3.0]), np.array([500.0, 500.0])).tolist() == [cost.of(1, 500), cost.of(3, 500)]


def test_the_steps_of_versions_with_as_many_tokens_each_are_averaged():
    """Half of the tokens at 2 a step, half at 1: 1.5 half-steps a token."""
    cost = drafting(CENTRAL, tokens=1, acceptances=(1.0, 0.0))
    assert cost.step_tokens == pytest.approx(1 / 0.75)
    assert cost.of(1, 0) == pytest.approx(0.75 * cost.batch_s[1])


@given(st.floats(0, 1), st.integers(1, 64))
def test_more_drafts_never_give_fewer_tokens(acceptance, drafted):
    assert 1 <= tokens_per_step(acceptance, drafted) <= tokens_per_step(acceptance, drafted + 1) <= drafted + 2


def test_a_mean_batch_costs_the_mean_of_its_neighbours():
    """Half way from one sequence to two: 1.5 sequences; to none, half of one, and a batch is not raised to 1."""
    decode = AffineDecode(**CENTRAL)
    assert step_of(CENTRAL).of(1.5, 0) == pytest.approx(7.05e-3 + 1.5 * 1.065e-5, rel=1e-12)
    assert batch_s(decode, 1, np.array([0.5, 1.5])) == pytest.approx(
        7.05e-3 + np.array([0.5, 1.5]) * 1.065e-5, rel=1e-12
    )


def test_prefill_is_the_sum_of_its_three_parts():
    """Two sequences of 10 and 20 tokens: 2 * 1 ms + 30 * 100 us + 500 * 1 us = 5.5 ms."""
    prefill = PrefillConfig(sequence_s=1e-3, token_s=1e-4, token_squared_s=1e-6)
    assert prefill_s(prefill, sequences=2.0, tokens=30.0, squares=500.0) == pytest.approx(5.5e-3, rel=1e-12)


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
def test_a_micro_batch_is_between_the_least_time_and_the_greedy_spread(lengths, ranks, shared):
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
    """16 ranks, log-normal lengths: the fullest rank has the simulated load or a little more, 13 % at most."""
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
