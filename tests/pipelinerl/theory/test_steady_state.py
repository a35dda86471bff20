"""The steady state in closed form: against numbers by hand, identities, and the simulator."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.config.resolve import resolved_hardware
from pipelinerl.config.run import RunConfig, parse_run, with_overrides
from pipelinerl.hardware.costs import DecodeStep, tokens_per_step, training_cost
from pipelinerl.records.steps import StepRow
from pipelinerl.theory.lengths import LengthStatistics, lengths_from, uniform_lengths
from pipelinerl.theory.steady_state import Estimate, screen
from sim.planning.space import answers_of
from sim.run import simulate
from sim.workload import Workload

FIXED: dict[str, Any] = {
    "optimizer_steps": 100,
    "cluster": {"accelerators": 4, "generation_accelerators": 2},
    "scheduler": {"train_batch_size": 8, "generation_batch_size": 4},
    "workload": {"length": {"kind": "fixed", "max": 100}},
    "hardware": {
        "decode": {"kind": "affine", "step_s": 0.01, "sequence_s": 0.001},
        "training": {"token_s": 0.0, "step_s": 0.1},
    },
}
SPREAD: dict[str, Any] = {
    "optimizer_steps": 120,
    "cluster": {"accelerators": 8, "generation_accelerators": 4},
    "scheduler": {"train_batch_size": 32, "generation_batch_size": 16, "optimizer_steps_per_rl_step": 4},
    "workload": {
        "group_size": 4,
        "prompt_tokens": 100,
        "length": {"kind": "lognormal", "mean": 300, "cv": 0.6, "max": 1200},
    },
    "hardware": {
        "decode": {"kind": "affine", "step_s": 7e-3, "sequence_s": 1e-5, "context_token_s": 2.3e-7},
        "prefill": {"token_s": 2e-5},
        "training": {"token_s": 4e-4, "step_s": 0.2},
        "weights": {"publish_s": 0.05, "pause_s": 0.1},
        "switch": {"to_training_s": 0.5, "to_generation_s": 0.3},
        "latency": {"dispatch_s": 0.005, "dispatch_jitter_s": 0.005},
    },
}


def run(base: dict[str, Any], *overrides: str) -> RunConfig:
    return parse_run(with_overrides(base, overrides))


def screened(config: RunConfig, answers: LengthStatistics | None = None) -> Estimate:
    hardware = resolved_hardware(config)
    engine = {"tensor_parallel": config.cluster.tensor_parallel, "most": config.scheduler.generation_batch_size}
    step = DecodeStep(hardware.decode, **engine, speculation=config.speculation_law)
    return screen(config, hardware, step, answers or answers_of(config)[0])


# ------------------------------------------------------------------------------------------- by hand


def test_full_slots_give_an_answer_per_slot_and_101_steps() -> None:
    """A slot decodes 100 of 101 steps, so 400/101 sequences are decoded; 8 answers need one round of 8 slots.

    The lag is half of what is in flight over the batch, and the trainer's share.
    """
    estimate = screened(run(FIXED))
    assert estimate.lag_mean == pytest.approx(8 / 8 / 2 + 0.1 / 1.41)
    assert estimate.step_s == pytest.approx(101 * (0.01 + 0.001 * 400 / 101))
    assert estimate.tokens_per_s == pytest.approx(800 / 1.41)
    assert estimate.training_s + estimate.publishing_s == pytest.approx(0.1)
    assert estimate.generation_s == estimate.step_s


def test_conventional_drains_all_slots_at_once_and_then_trains() -> None:
    """G = 2: 16 answers on 4 engines, 100 steps of 4 sequences; the switches and 2 steps of 0.1 s."""
    config = run(
        FIXED,
        "scheduler.kind=conventional",
        "scheduler.optimizer_steps_per_rl_step=2",
        "hardware.switch={to_training_s=0.3, to_generation_s=0.5}",
    )
    estimate = screened(config)
    assert estimate.step_s == pytest.approx((100 * 0.014 + 0.8) / 2 + 0.1)
    assert (estimate.lag_mean, estimate.lag_max) == (0.5, 1)
    assert estimate.training_s + estimate.publishing_s == pytest.approx(0.1)


def test_a_step_that_verifies_counts_over_its_tokens() -> None:
    """k = 3: 0.01 s and 4 * 0.001 s a sequence for 1 + 0.5 + 0.25 + 0.125 tokens. A slot is missed for a step: it
    decodes 100 of 101.875 tokens. A refresh of 2 s in 4 steps is half a second of training."""
    config = run(FIXED, "engine.speculation={method='ngram', tokens=3, acceptance=0.5, refresh_every=4, refresh_s=2.0}")
    estimate = screened(config)
    assert estimate.generation_s == pytest.approx((0.01 + 0.004 * 400 / 101.875) / tokens_per_step(0.5, 3) * 101.875)
    assert estimate.training_s == pytest.approx(0.1 + 0.5)


def test_drafts_take_room_of_the_cache() -> None:
    """A sequence has 50 tokens on average, and 3 drafts: 106 tokens hold two."""
    drafts = "engine.speculation={method='ngram', tokens=3, acceptance=0.5}"
    two_slots = screened(run(FIXED, drafts, "scheduler.generation_batch_size=2"))
    assert screened(run(FIXED, drafts, "hardware.kv_cache_tokens=106")) == two_slots


def test_one_step_off_is_as_slow_as_the_slower_of_generation_and_training() -> None:
    """G = 4: 32 answers on 2 engines of 16 slots last 100 * 0.026 s; 4 steps of training are longer or not."""
    changes = ("scheduler.kind=one_step_off", "scheduler.optimizer_steps_per_rl_step=4")
    slots = "scheduler.generation_batch_size=16"
    assert screened(run(FIXED, *changes, slots)).step_s == pytest.approx(100 * 0.026 / 4)
    slow = screened(run(FIXED, *changes, slots, "hardware.training.step_s=2.0"))
    assert slow.step_s == pytest.approx(2.0)
    assert (slow.lag_mean, slow.lag_max) == (5.5, 7)


def test_the_kv_cache_bounds_the_slots() -> None:
    """A sequence of 100 tokens holds 50 on average: 100 tokens of cache are 2 slots."""
    config = run(FIXED, "hardware.kv_cache_tokens=100")
    two_slots, four_slots = (screened(run(FIXED, f"scheduler.generation_batch_size={size}")) for size in (2, 4))
    assert screened(config).step_s == pytest.approx(two_slots.step_s)
    assert screened(run(FIXED, "hardware.kv_cache_tokens=200")) == four_slots


def test_a_slow_trainer_sets_the_pace_and_the_queue_fills() -> None:
    """As in the scheduler: empty slots lend their places to the ready queue, in all 8 slots + 16 places."""
    estimate = screened(run(FIXED, "hardware.training.step_s=5.0"))
    assert estimate.step_s == 5.0
    assert estimate.training_s + estimate.publishing_s == 5.0
    assert estimate.generation_s == pytest.approx(1.41)
    in_flight = 8 * (100 * 0.01) / 5  # about one sequence per engine, by Little's law; each step a little longer
    assert estimate.lag_mean == pytest.approx((24 - in_flight) / 8 + in_flight / 8 / 2 + 1, abs=0.05)


def test_training_counts_tokens_and_their_squares_over_the_accelerators_that_train() -> None:
    training = "hardware.training={token_s=1e-3, token_squared_s=1e-5, step_s=0.5, micro_batch_s=0.25}"
    estimate = screened(run(FIXED, training, "scheduler.micro_batch_size=2", "workload.prompt_tokens=20"))
    assert estimate.training_s == pytest.approx(0.5 + 4 * 0.25 + (1e-3 * 8 * 120 + 1e-5 * 8 * 120**2) / 2)


def test_training_of_few_sequences_lasts_as_long_as_the_longest() -> None:
    """Fixed lengths of 120 tokens: 8 of them on 2 are 4 each, on 3 somebody has 3, on 16 one each."""
    training = "hardware.training={token_s=1e-3, token_squared_s=1e-5, sequence_accelerators=1}"
    for trainers, each in ((2, 4), (3, 3), (16, 1)):
        config = run(FIXED, training, "workload.prompt_tokens=20", f"cluster.accelerators={trainers + 2}")
        assert screened(config).training_s == pytest.approx(each * (1e-3 * 120 + 1e-5 * 120**2))


@pytest.mark.parametrize(("sequences", "error"), [(4, 0.02), (16, 0.02), (48, 0.09), (64, 0.02), (512, 0.02)])
def test_the_screened_training_step_is_the_mean_of_simulated_ones(sequences: int, error: float) -> None:
    """16 ranks. At 3 sequences each mean and longest are about equal, and the mean of the larger one is 8 % more."""
    training = "hardware.training={token_s=4e-4, token_squared_s=2e-7, sequence_accelerators=2}"
    config = run(SPREAD, training, "cluster.accelerators=36", f"scheduler.train_batch_size={sequences}")
    cost = training_cost(resolved_hardware(config).training, training_accelerators=32)
    workload = Workload(config.workload, seed=0)
    drawn = [100 + length for index in range(4000) for length in workload.group(index, index).lengths]
    batches = [drawn[start : start + sequences] for start in range(0, len(drawn) - sequences + 1, sequences)]
    mean_s = np.mean([cost.seconds(batch, completes_step=True) for batch in batches])
    assert screened(config).training_s == pytest.approx(float(mean_s), rel=error)


def test_publishing_every_4_steps_costs_a_quarter_and_adds_a_lag_of_one_and_a_half() -> None:
    weights = "hardware.weights={publish_s=0.4, pause_s=0.2}"
    every, fourth = (screened(run(FIXED, weights, f"scheduler.publish_every={steps}")) for steps in (1, 4))
    assert (every.publishing_s, fourth.publishing_s) == pytest.approx((0.4, 0.1))
    assert (every.step_s, fourth.step_s) == pytest.approx((1.61, 1.46))
    behind = fourth.lag_mean - fourth.training_s / fourth.step_s - fourth.publishing_s / fourth.step_s
    assert behind == pytest.approx(0.5 + 1.5)


def test_a_staged_transfer_costs_its_snapshot_and_adds_its_way_to_the_lag() -> None:
    """A step of 1.41 s: 3 s on the way are 3 steps between publications, and (3 - 0.3) / step behind on average."""
    paused, staged = (
        screened(run(FIXED, f"hardware.weights={{publish_s={publish_s}, transfer_s={transfer_s}}}"))
        for publish_s, transfer_s in ((0.3, 0.3), (0.3, 3.0))
    )
    assert (paused.publishing_s, staged.publishing_s) == pytest.approx((0.3, 0.1))
    late = (3 - 1) / 2 + (3.0 - 0.3) / staged.step_s
    after = (staged.training_s + staged.publishing_s - paused.training_s - paused.publishing_s) / staged.step_s
    assert staged.lag_mean - paused.lag_mean == pytest.approx(late + after, abs=0.02)


def test_a_report_lengthens_an_answer_and_ages_its_tokens() -> None:
    """101 steps and 0.5 s per answer. Nothing ages on the way there; on the way back all 0.5 s count."""
    reported, dispatched = (screened(run(FIXED, f"hardware.latency.{name}=0.5")) for name in ("report_s", "dispatch_s"))
    assert reported.step_s == pytest.approx(dispatched.step_s)
    in_flight = 0.5 / reported.step_s / 2  # slots at the front end, times half a step
    assert reported.lag_mean == pytest.approx(dispatched.lag_mean + 0.5 / reported.step_s - in_flight, abs=0.01)


def test_a_front_end_that_is_the_slowest_takes_a_batch_one_by_one() -> None:
    """8 answers on 2 engines, 0.5 s each; conventional: 4 on each of 4 engines, and then the last one's 100 steps."""
    slow = "hardware.latency.request_s=0.5"
    assert screened(run(FIXED, slow)).step_s == pytest.approx(4 * 0.5)
    conventional = ("scheduler.kind=conventional", "scheduler.optimizer_steps_per_rl_step=2")
    assert screened(run(FIXED, slow, *conventional)).generation_s == pytest.approx((4 * 0.5 + 100 * 0.014) / 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipeline", "conventional", "one_step_off"])
@pytest.mark.parametrize("request_s", [0.01, 0.1, 0.4])
def test_the_front_end_of_the_closed_form_is_that_of_the_simulator(kind: str, request_s: float) -> None:
    """Idle, busy about half of the time, and the slowest of all."""
    changes = (f"scheduler.kind={kind}", f"hardware.latency.request_s={request_s}", "hardware.latency.report_s=0.5")
    config = run(SPREAD, *changes)
    report = simulate(config)
    assert screened(config).step_s == pytest.approx(report.duration_s / report.optimizer_steps, rel=0.15)


# ----------------------------------------------------------------------------------------- identities


def test_the_grid_keeps_the_means_of_long_answers() -> None:
    answers = LengthStatistics(uniform_lengths(5000), prompt_tokens=0.0)
    assert answers.width == 5
    assert answers.width * answers.share.sum() == pytest.approx(2500.5)
    # A slot is full at all times, and in the long run begins an answer per mean answer.
    assert np.convolve(answers.begun, answers.share)[: len(answers.begun)] == pytest.approx(1.0)
    assert answers.begun[-100:].mean() == pytest.approx(answers.width / answers.mean, rel=1e-2)


@given(tokens=st.lists(st.integers(1, 3000), min_size=1, max_size=30))
def test_the_longest_of_one_is_the_mean_and_of_many_the_longest(tokens: list[int]) -> None:
    answers = LengthStatistics(lengths_from(tokens), prompt_tokens=0.0)
    assert answers.longest(1) == pytest.approx(np.mean(tokens))
    assert answers.longest(10_000) == pytest.approx(max(tokens), abs=answers.width)
    assert answers.longest(2) >= answers.longest(1) - 1e-9


ANSWERS = answers_of(run(SPREAD))[0]


@given(
    split=st.sampled_from([1, 2, 4, 6]),
    size=st.integers(1, 64),
    bounds=st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted),
)
@settings(max_examples=60, deadline=None)
def test_a_looser_bound_on_the_lag_never_slows_and_is_kept(split: int, size: int, bounds: list[int]) -> None:
    """Without one a step is no shorter than training or generation alone."""
    changes = (f"cluster.generation_accelerators={split}", f"scheduler.generation_batch_size={size}")
    tight, loose = (screened(run(SPREAD, *changes, f"scheduler.max_lag={bound}"), ANSWERS) for bound in bounds)
    free = screened(run(SPREAD, *changes), ANSWERS)
    assert tight.step_s >= loose.step_s * (1 - 2e-3) >= free.step_s * (1 - 4e-3)
    assert free.step_s >= max(free.training_s + free.publishing_s, free.generation_s) - 1e-9
    assert tight.lag_max <= bounds[0]
    assert tight.lag_mean <= bounds[0]


# -------------------------------------------------------------------------------------- the simulator

DRAFTS = "engine.speculation={method='ngram', tokens=3, acceptance=0.6, draft_cost=0.05}"
CASES = {
    "generation-bound": ("scheduler.generation_batch_size=6",),
    "training-bound": ("scheduler.generation_batch_size=32",),
    "one at a time": ("workload.group_size=1", "scheduler.generation_batch_size=8"),
    "lag 3": ("scheduler.max_lag=3", "scheduler.generation_batch_size=12"),
    "few sequences per rank": (
        "cluster.accelerators=20",
        "hardware.training={token_s=4e-3, step_s=0.2, sequence_accelerators=1}",
    ),
    "no lag": ("scheduler.max_lag=0",),
    "recompute": ("scheduler.weight_update='recompute'", "scheduler.generation_batch_size=6"),
    "staged": ("hardware.weights={publish_s=0.1, transfer_s=2.5, pause_s=0.2}",),
    "staged, generation-bound": (
        "scheduler.generation_batch_size=6",
        "hardware.weights={publish_s=0.1, transfer_s=6.0, pause_s=0.2}",
    ),
    "staged, lag 8": (
        "scheduler.max_lag=8",
        "scheduler.generation_batch_size=12",
        "hardware.weights={publish_s=0.1, transfer_s=2.5, pause_s=0.2}",
    ),
    "small cache": ("hardware.kv_cache_tokens=2600",),
    "conventional": ("scheduler.kind=conventional", "scheduler.generation_batch_size=64"),
    "conventional, few slots": ("scheduler.kind=conventional", "scheduler.generation_batch_size=4"),
    "one step off": ("scheduler.kind=one_step_off", "scheduler.generation_batch_size=32"),
    "partial": ("scheduler.kind=conventional", "scheduler.partial_rollouts=true", "scheduler.generation_batch_size=8"),
    "drafts": (DRAFTS, "scheduler.generation_batch_size=6"),
    "drafts, conventional, refreshed": (
        "scheduler.kind=conventional",
        "engine.speculation={method='eagle3', tokens=4, acceptance=0.8, decay=0.9, refresh_every=4, refresh_s=2.0}",
    ),
    "drafts, off above 4, small cache": (DRAFTS.replace("}", ", off_above=4}"), "hardware.kv_cache_tokens=2600"),
    "drafts, lag 3": (DRAFTS, "scheduler.max_lag=3", "scheduler.generation_batch_size=12"),
}


@pytest.mark.parametrize("slots", [240, 128, 48])
def test_slots_that_are_refilled_take_as_long_as_in_the_simulator(slots: int) -> None:
    """256 answers of each engine: with 240 slots almost all are begun at once, with 48 four times as many follow."""
    changes = (
        "scheduler={kind='conventional', train_batch_size=512, optimizer_steps_per_rl_step=4}",
        f"scheduler.generation_batch_size={slots}",
        "workload.length={kind='lognormal', mean=300, cv=1.0, max=2400}",
        "hardware.decode={kind='affine', step_s=2e-3, sequence_s=1e-4, context_token_s=2.3e-7}",
        "hardware.training={token_s=0.0}",
        "optimizer_steps=16",
    )
    report = simulate(run(SPREAD, *changes))
    assert screened(run(SPREAD, *changes)).step_s == pytest.approx(report.duration_s / 16, rel=0.06)


def test_fixed_answers_in_more_rounds_than_slots_hold() -> None:
    """12 answers for each engine of 8 slots: 100 steps of 8, a step to begin the others, and 100 of 4."""
    changes = ("scheduler.kind=conventional", "scheduler.generation_batch_size=8", "scheduler.train_batch_size=48")
    begun_s = 0.5 * (0.01 + 0.001 * 8 * 100 / 101)  # for every slot, where half of them miss a step
    assert screened(run(FIXED, *changes)).step_s == pytest.approx(1.8 + 1.4 + begun_s + 0.1, rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
def test_the_simulator_agrees_within_a_tenth(overrides: tuple[str, ...]) -> None:
    """Step time within 10 %, mean lag within 20 % or half an optimizer step; the second half of 120 steps."""
    config = run(SPREAD, *overrides)
    rows: list[StepRow] = []
    simulate(config, on_step=rows.append)
    estimate, window = screened(config), rows[60:]
    step_s = (rows[-1].time_s - rows[59].time_s) / len(window)
    lag_mean = sum(row.lag_mean * row.tokens for row in window) / sum(row.tokens for row in window)
    assert estimate.step_s == pytest.approx(step_s, rel=0.1)
    assert estimate.lag_mean == pytest.approx(lag_mean, rel=0.2, abs=0.5)
