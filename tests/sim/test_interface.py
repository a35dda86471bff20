"""Costs in the simulator, by hand, in whole picoseconds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import message

from pipelinerl.config.resolve import resolved_hardware
from pipelinerl.config.run import parse_run
from pipelinerl.hardware.costs import LatencyConfig, PhaseSwitchConfig, PrefillConfig, TrainingConfig
from pipelinerl.hardware.transport import WeightTransferConfig
from pipelinerl.util.strict_model import LONGEST_S
from sim.clock import to_seconds, to_ticks
from sim.interface import PrefillCost, decode_cost, prefill_cost
from sim.run import simulate

MICROSECOND = 10**6
"""Ticks."""
ROOFLINE = {
    "kind": "roofline", "peak_flops": 1e15, "bandwidth": 1e12, "parameters_read": 1e9, "parameters_active": 1e9,
    "kv_bytes_per_token": 1000.0,
}  # fmt: skip


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


def test_a_step_in_ticks_is_that_of_the_engine_and_its_context():
    """Affine: 7.05 ms + 64 * 10.65 us, 22.82 ns per token. Roofline on two: 2 GB / 2 TB/s + 1 ms, 1000 B / 2 TB/s."""
    affine = cost_of({"kind": "affine", "step_s": 7.05e-3, "sequence_s": 1.065e-5, "context_token_s": 2.282e-8})
    assert (affine.batch_ticks[64], affine.context_ticks) == (7_731_600_000, 22_820)
    perfect = {"weight_efficiency": 1.0, "kv_efficiency": 1.0, "step_overhead_s": 1e-3, "sequence_overhead_s": 0.0}
    roofline = cost_of({**ROOFLINE, "bytes_per_parameter": 2.0, **perfect}, tensor_parallel=2)
    assert (roofline.batch_ticks[1], roofline.context_ticks) == (2000 * MICROSECOND, 500)


@pytest.mark.parametrize("slots", [1, 7])
def test_there_is_a_cost_for_every_number_of_sequences_up_to_the_slots(slots):
    cost = cost_of({"kind": "affine", "step_s": 1e-9, "sequence_s": 1e-12}, slots=slots)
    assert cost.batch_ticks == (0, *(1000 + batch for batch in range(1, slots + 1)))


def test_prefill_grows_with_the_square_of_the_tokens():
    """10 tokens: 1 ms + 10 * 100 us + 100 * 1 us."""
    cost = prefill_cost(PrefillConfig(sequence_s=1e-3, token_s=1e-4, token_squared_s=1e-6))
    assert cost.ticks(10) == 2100 * MICROSECOND


def test_prefill_in_two_parts_costs_one_fixed_part_more_than_in_one():
    """Attention reads all tokens before: n^2 = c^2 + (n^2 - c^2)."""
    cost = PrefillCost(7, 3, 2)
    assert cost.ticks(50) == 7 + 3 * 50 + 2 * 2500
    assert cost.ticks(20) + cost.ticks(50, 20) == cost.ticks(50) + 7
    assert cost.ticks(20, 20) == cost.ticks(0) == 0


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


# ----------------------------------------------------------------------------------- extreme numbers


@pytest.mark.parametrize("kind", ["pipeline", "conventional", "one_step_off", "partial_rollouts"])
def test_a_run_with_every_time_at_its_largest_ends(kind):
    """All sums are of whole numbers without a largest, but for the delay drawn at random, which fits into 64 bits."""
    times = {
        "decode": {"kind": "affine", **dict.fromkeys(("step_s", "sequence_s", "context_token_s"), LONGEST_S)},
        "prefill": dict.fromkeys(PrefillConfig.SECONDS, LONGEST_S),
        "training": dict.fromkeys(TrainingConfig.SECONDS, LONGEST_S),
        "weights": dict.fromkeys(WeightTransferConfig.model_fields, LONGEST_S),
        "switch": dict.fromkeys(PhaseSwitchConfig.model_fields, LONGEST_S),
        "latency": dict.fromkeys((key for key in LatencyConfig.model_fields if key.endswith("_s")), LONGEST_S),
    }
    config = parse_run(
        {
            "optimizer_steps": 3,
            "cluster": {"accelerators": 4, "generation_accelerators": 2},
            "scheduler": {"kind": kind, "train_batch_size": 2, "generation_batch_size": 2},
            "workload": {"length": {"kind": "fixed", "max": 100, "growth": 1e6}},
            "hardware": times,
        }
    )
    report = simulate(config)
    assert report.complete
    assert report.duration_s > LONGEST_S * 100**2


def test_steps_that_hardly_ever_end_are_one_line():
    for change in ({"weight_efficiency": 1e-308}, {"parameters_active": 1e308}):
        line = message(cost_of, {**ROOFLINE, **change})
        assert line.startswith("hardware.decode must give steps of at most 100000 s and as much per sequence, got ")
    assert message(cost_of, {**ROOFLINE, "kv_bytes_per_token": 7.5e307}) == (
        "hardware.decode must give steps of at most 100000 s per token of context, got 1e+296 s"
    )
