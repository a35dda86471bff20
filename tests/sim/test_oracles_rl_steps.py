"""RL steps of the simulator against theory: conventional RL, one-step-off RL, partial rollouts.

Each docstring derives the expected value. By default a decode step lasts 1 s with any batch, and all else takes no
time.
"""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from played_run import fixed, oldest_trained, play, trains_in, uniform

from pipelinerl.scheduler.events import PublishWeights, RolloutFinished, StartTraining
from sim.clock import to_ticks

# ------------------------------------------------------------------------------------ lag of batch i


@pytest.mark.slow
@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize("micro_batch_size", [4, 8])
@pytest.mark.parametrize(
    ("kind", "rl_step", "train_s", "expected"),
    [
        ("conventional", 1, 5.0, [0] * 9),
        ("conventional", 2, 0.0, [0, 1] * 4),
        ("conventional", 5, 3.0, [0, 1, 2, 3, 4] * 3 + [0, 1]),
        ("conventional", 8, 0.0, [*range(8)] * 2),
        ("one_step_off", 1, 0.0, [0, *[1] * 10]),
        ("one_step_off", 3, 30.0, [0, 1, 2, *[3, 4, 5] * 2, 3, 4]),
        ("one_step_off", 4, 0.0, [0, 1, 2, 3, *[4, 5, 6, 7] * 3]),
    ],
)
def test_batch_i_has_lag_i_or_is_one_rl_step_later(group_size, micro_batch_size, kind, rl_step, train_s, expected):
    """Batch i = 0 .. G - 1 of an RL step comes i steps after the first; each rollout is trained on once, in order.

    Conventional, algorithm 1: all tokens of an RL step are of one version, so lag i, all of it in the queue: on-policy
    at G = 1, (G - 1)/2 on average. 17 steps are three RL steps of G = 5 and one of 2. Batches are cut in order of
    admission, so that the first ones do not get the short answers. One step off: what is trained was generated while
    the G steps before it were made, so lag G + i, within max_lag = 2 G - 1, but i in the first RL step. 11 steps are
    three RL steps of G = 3 and one of 2.
    """
    scheduler = {"kind": kind, "optimizer_steps_per_rl_step": rl_step, "micro_batch_size": micro_batch_size}
    if group_size > 1:
        scheduler["max_lag"] = max(expected)  # just met
    hardware = {"weights": {"pause_s": 0.5}, "latency": {"dispatch_jitter_s": 2.0}, **trains_in(train_s)}
    run = play(
        len(expected), batch=8, slots=5, engines=2, length=uniform(60), group_size=group_size, hardware=hardware,
        **scheduler,
    )  # fmt: skip
    assert [row.lag_mean for row in run.steps] == expected
    assert [row.lag_max for row in run.steps] == expected
    if kind == "conventional":
        assert [row.lag_in_queue_mean for row in run.steps] == expected
    assert run.trained == list(range(run.summary().rollouts.started)) == list(range(len(expected) * 8))


# --------------------------------------------------------------------------------- conventional RL


@dataclass(frozen=True)
class Hardware:
    """Seconds of everything, for formulas."""

    step_s: float = 0.007
    sequence_s: float = 1e-5
    context_s: float = 2e-8
    prefill_s: float = 2e-5
    publish_s: float = 0.3

    def tables(self):
        return {
            "decode": {
                "kind": "affine", "step_s": self.step_s, "sequence_s": self.sequence_s,
                "context_token_s": self.context_s,
            },
            "prefill": {"token_s": self.prefill_s}, "training": {"token_s": 3e-4, "step_s": 0.5},
            "weights": {"publish_s": self.publish_s, "transfer_s": 0.2, "pause_s": 0.4},
            "switch": {"to_training_s": 1.5, "to_generation_s": 2.5},
            "latency": {"dispatch_s": 0.003, "reward_s": 0.02, "preprocess_s": 0.05},
        }  # fmt: skip


def drain_ticks(hardware, lengths, prompt_tokens):
    """Ticks to generate all of ``lengths``, started together on one engine: the sum of its steps."""
    prefill = len(lengths) * prompt_tokens * to_ticks(hardware.prefill_s)
    ticks = 0
    for step in range(max(lengths)):
        unfinished = sum(length > step for length in lengths)
        ticks += to_ticks(hardware.step_s + hardware.sequence_s * unfinished)
        ticks += to_ticks(hardware.context_s) * unfinished * (prompt_tokens + step)
    return prefill + ticks


@pytest.mark.parametrize(("publish_s", "weights_s"), [(0.3, 0.2 + 0.4), (5.0, 5.0)])
def test_the_makespan_of_conventional_rl_is_the_sum_of_its_parts_to_the_picosecond(publish_s, weights_s):
    """3 RL steps of G = 4: B G = 96 rollouts in 2 waves of 16 slots on 3 engines, 40 tokens each, prompts of 50.

    A wave: dispatch, then prefill and 40 steps of 16 requests. Then, once per RL step, the last score and the
    switch; 4 optimizer steps of 24 * 90 tokens on 3 accelerators; and, between RL steps, the switch back and the longer
    of publication and transfer with pause, which go on at the same time.
    """
    hardware = Hardware(publish_s=publish_s)
    scheduler = {"kind": "conventional", "optimizer_steps_per_rl_step": 4}
    run = play(
        12, batch=24, slots=16, engines=3, length=fixed(40), prompt_tokens=50, hardware=hardware.tables(), **scheduler
    )
    wave = to_ticks(0.003) + drain_ticks(hardware, [40] * 16, 50)
    rl_step = 2 * wave + to_ticks(0.02 + 0.05) + to_ticks(1.5) + 4 * to_ticks(0.5 + 3e-4 / 3 * 24 * 90)
    between = to_ticks(weights_s) + to_ticks(2.5)
    assert to_ticks(run.summary().duration_s) == 3 * rl_step + 2 * between


def test_generation_of_conventional_rl_lasts_as_long_as_its_slowest_engine():
    """Random lengths, all B G = 60 rollouts at once in 20 slots of 3 engines: the longest of three drains."""
    hardware = Hardware()
    scheduler = {"kind": "conventional", "optimizer_steps_per_rl_step": 5}
    run = play(
        5, batch=12, slots=20, engines=3, length=uniform(300), prompt_tokens=50, hardware=hardware.tables(), **scheduler
    )
    lengths = {engine: [] for engine in range(3)}
    for _, event in run.of(RolloutFinished):
        lengths[event.engine].append(event.spans.num_tokens)
    assert [len(one) for one in lengths.values()] == [20, 20, 20]
    slowest = max(drain_ticks(hardware, one, 50) for one in lengths.values())
    assert to_ticks(run.of(RolloutFinished)[-1][0]) == to_ticks(0.003) + slowest


# --------------------------------------------------------------------------------- one-step-off RL


@pytest.mark.parametrize("token_s", [1e-6, 3e-4])
@pytest.mark.parametrize(("publish_s", "pause_s"), [(0.3, 0.4), (5.0, 0.0)])
def test_the_makespan_of_one_step_off_rl_is_the_longer_side_of_every_round(token_s, publish_s, pause_s):
    """4 RL steps of G = 2: B G = 96 rollouts in 2 waves of 16 slots on 3 engines, 40 tokens each, prompts of 50.

    The first RL step is generated alone, the last trained alone. In between both sides are at work: the trainer
    publishes and makes 2 steps, the engines get the weights and generate; the slower one sets the period. Nothing is
    published before the first of these rounds, nor after the last.
    """
    hardware = Hardware(publish_s=publish_s)
    tables = hardware.tables()
    tables["training"] = {"token_s": token_s, "step_s": 0.01}
    tables["weights"]["pause_s"] = pause_s
    scheduler = {"kind": "one_step_off", "optimizer_steps_per_rl_step": 2, "weight_update": "wait"}
    run = play(8, batch=48, slots=16, engines=3, length=fixed(40), prompt_tokens=50, hardware=tables, **scheduler)
    generate = 2 * (to_ticks(0.003) + drain_ticks(hardware, [40] * 16, 50)) + to_ticks(0.02 + 0.05)
    train = 2 * to_ticks(0.01 + token_s * 48 * 90)
    first = max(generate, train)
    later = max(to_ticks(0.2 + pause_s) + generate, to_ticks(publish_s) + train)
    assert to_ticks(run.summary().duration_s) == generate + first + 2 * later + train
    assert len(run.of(PublishWeights)) == 2


def test_one_step_off_goes_on_until_enough_groups_have_a_signal():
    """Only groups with different rewards are trained on; groups that replace the others are no younger."""
    scheduler = {"kind": "one_step_off", "optimizer_steps_per_rl_step": 2, "filter_no_signal": True}
    run = play(
        9, batch=8, slots=16, length=uniform(40), group_size=4, success_rate=0.2, hardware=trains_in(10.0), **scheduler
    )
    summary = run.summary()
    assert [row.lag_mean for row in run.steps] == [0, 1, 2, 3, 2, 3, 2, 3, 2]
    assert summary.discarded_by_reason["no_signal"] > 0
    assert summary.rollouts.started == 9 * 8 + summary.discarded_by_reason["no_signal"]


# ----------------------------------------------------------------------------------- partial rollouts


def partial(**scheduler):
    return {"kind": "conventional", "partial_rollouts": True, **scheduler}


@pytest.mark.parametrize(
    ("slots", "ends_s", "lags"), [(4, [12.5, 25, 37.5], [0, 0, 0]), (6, [12.5, 25, 27.5], [0, 0.5, 1])]
)
def test_ready_rollouts_left_by_an_rl_step_are_the_first_of_the_next(slots, ends_s, lags):
    """B = 4, answers of 10 s, steps of 2.5 s, all else free; engines stand still from 10 s to 12.5 s and so on.

    4 slots: all finish at 10 s, their places are taken at once by 4 others, which begin under version 1, at 12.5 s.
    6 slots: 4 and 5 are left over. The second step takes them, a version old, and the first two of those that finish
    at 22.5 s; the third step the other four, which were ready when it began, and all of them a version old.
    """
    run = play(3, batch=4, slots=slots, length=fixed(10), hardware=trains_in(2.5), **partial())
    assert [row.time_s for row in run.steps] == ends_s
    assert [row.lag_mean for row in run.steps] == lags
    assert run.trained == list(range(12))


def run_of_partial_rollouts(prefill_s, **scheduler):
    hardware = {**trains_in(500.0), "prefill": {"token_s": prefill_s}}
    return play(20, batch=8, slots=40, length=uniform(100), prompt_tokens=20, hardware=hardware, **partial(**scheduler))


def test_rollouts_that_go_on_after_an_rl_step_are_prefilled_again_with_their_tokens():
    """One engine: prefill stretches time and changes nothing else. A span ends where an engine stood still."""
    free, costly = run_of_partial_rollouts(0.0), run_of_partial_rollouts(1e-3)
    assert [row.lag_mean for row in free.steps] == [row.lag_mean for row in costly.steps]
    ended = [entry.spans for _, entry in costly.of(RolloutFinished)]
    carried_over = [20 + end for spans in ended for end in spans.ends[:-1]]
    assert len(carried_over) > 100
    extra_s = costly.summary().duration_s - free.summary().duration_s
    assert extra_s > 1e-3 * (20 * 40 + sum(carried_over))  # and of the rollouts still unfinished at the end


def test_engines_stand_still_while_the_same_accelerators_train():
    """Steps of 500 s: nothing finishes from 1 s (the decode step under way) after the start of one until its end."""
    run = run_of_partial_rollouts(0.0)
    starts_s = [time_s for time_s, _ in run.of(StartTraining)]
    for time_s, _ in run.of(RolloutFinished):
        assert not any(start_s + 1 < time_s < start_s + 500 for start_s in starts_s)
    generating_s = run.summary().duration_s - 20 * 500
    busy_s = run.summary().utilisation.generation * run.summary().duration_s
    assert generating_s <= busy_s <= generating_s + 20  # a decode step per RL step


def test_partial_rollouts_do_not_wait_for_the_longest_answer():
    """Conventional RL drains for up to 100 s per RL step; with all slots full 8 of 40 rollouts end far sooner."""
    scheduler = {"kind": "conventional"}
    drained = play(20, batch=8, slots=40, length=uniform(100), hardware=trains_in(500.0), **scheduler)
    without, partly = (run.summary().duration_s - 10_000 for run in (drained, run_of_partial_rollouts(0.0)))
    assert partly < 0.4 * without


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    rl_step=st.integers(1, 3),
    slack=st.integers(0, 4),
    group_size=st.sampled_from([1, 4]),
    micro_batch_size=st.sampled_from([4, 8]),
    slots=st.integers(1, 20),
    dispatch_s=st.sampled_from([0.0, 5.0]),
)
def test_no_token_of_a_partial_rollout_is_older_than_max_lag(
    rl_step, slack, group_size, micro_batch_size, slots, dispatch_s
):
    max_lag = rl_step - 1 + slack
    hardware = {
        **trains_in(3.0),
        "weights": {"publish_s": 0.5, "transfer_s": 1.5, "pause_s": 0.5},
        "latency": {"dispatch_s": dispatch_s, "dispatch_jitter_s": dispatch_s, "reward_s": 1.0},
    }
    run = play(
        10, batch=8, slots=slots, engines=2, length=uniform(20), group_size=group_size, hardware=hardware,
        **partial(max_lag=max_lag, optimizer_steps_per_rl_step=rl_step, micro_batch_size=micro_batch_size),
    )  # fmt: skip
    assert oldest_trained(run) == run.summary().lag.max <= max_lag
    assert run.summary().rollouts.discarded == run.summary().rollouts.aborted == 0
    tokens = run.summary().tokens
    assert tokens.generated == tokens.trained + tokens.unfinished
