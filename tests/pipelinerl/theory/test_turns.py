"""The steady state of rollouts with turns: by hand, and against the simulator."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelinerl.config.resolve import resolved_hardware
from pipelinerl.config.run import RunConfig, load_run, parse_run, with_overrides
from pipelinerl.hardware.costs import DecodeStep, PrefillConfig
from pipelinerl.theory.lengths import Turn, TurnMeans
from pipelinerl.theory.steady_state import Engines, Estimate, screen
from sim.planning.screen import Screener, own_candidate
from sim.planning.space import SearchSpace, answers_of
from sim.run import simulate

RUN: dict[str, Any] = {
    "optimizer_steps": 40,
    "cluster": {"accelerators": 8, "generation_accelerators": 4},
    "scheduler": {"train_batch_size": 32, "generation_batch_size": 16, "optimizer_steps_per_rl_step": 4},
    "workload": {
        "group_size": 4,
        "prompt_tokens": 100,
        "length": {"kind": "lognormal", "mean": 60, "cv": 1, "max": 300},
    },
    "environment": {
        "count": 32,
        "reset_s": 3.0,
        "step_s": 0.5,
        "step_cv": 1.0,
        "turns": {
            "kind": "lognormal", "mean": 8, "cv": 0.5, "max": 24, "observation_tokens": 200, "observation_cv": 1.0,
            "observation_max": 1000, "context_max": 8000,
        },
    },
    "hardware": {
        "decode": {"kind": "affine", "step_s": 7e-3, "sequence_s": 1e-5, "context_token_s": 2.3e-7},
        "prefill": {"token_s": 2e-5},
        "kv_cache_tokens": 30_000,
        "training": {"token_s": 1e-5, "step_s": 0.2},
        "weights": {"publish_s": 0.05, "pause_s": 0.1},
    },
}  # fmt: skip


def run(*overrides: str) -> RunConfig:
    return parse_run(with_overrides(RUN, overrides))


def screened(config: RunConfig) -> Estimate:
    hardware = resolved_hardware(config)
    decode_step = DecodeStep(hardware.decode, tensor_parallel=1, most=config.scheduler.generation_batch_size)
    return screen(config, hardware, decode_step, answers_of(config)[0])


def means_of(*columns: list[int] | list[float]) -> TurnMeans:
    """Return the means of one rollout, from the arrays of its turns."""
    return TurnMeans.of([Turn(*map(np.array, columns))])


TWO_TURNS = means_of([10, 17], [10, 3], [4, 4], [2.0, 3.0])


def test_means_of_three_turns_by_hand() -> None:
    """A prompt of 10 tokens, three turns of 4, 3 tokens observed between them; a reset of 2 s, steps of 3 and 5 s."""
    means = means_of([10, 17, 24], [10, 3, 3], [4, 4, 4], [2.0, 3.0, 5.0])
    assert (means.acting_s, means.reset_s, means.gap_s) == (10.0, 2.0, 4.0)
    assert means.context == 17 + 2  # half of its own four tokens besides
    assert means.held == (3 * 14 + 5 * 21) / 8
    assert means.observed == (3, 16, 10**2 + (17**2 - 14**2) + (24**2 - 21**2))
    assert means.whole == (3, 51, 10**2 + 17**2 + 24**2)
    prefill = PrefillConfig(token_s=1.0, sequence_s=10.0)
    assert [means.prefill_s(prefill, kept=share) for share in (1.0, 0.5, 0.0)] == [46.0, 63.5, 81.0]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3, 10])
def test_few_environments_bound_the_rate_by_hand(count: int) -> None:
    """A rollout has its environment for 5 + 2 x 2 s and 3 turns of 4 s, a step missed per slot: 22 s."""
    config = parse_run({
        "optimizer_steps": 10,
        "cluster": {"accelerators": 2, "generation_accelerators": 1},
        "scheduler": {"train_batch_size": 2, "generation_batch_size": 16},
        "workload": {"length": {"kind": "fixed", "max": 4}},
        "environment": {
            "count": count, "reset_s": 5.0, "step_s": 2.0,
            "turns": {"kind": "lognormal", "mean": 3, "max": 3, "observation_max": 0, "context_max": 100},
        },
        "hardware": {"decode": {"kind": "affine", "step_s": 1.0}, "training": {"token_s": 0.0}},
    })  # fmt: skip
    assert screened(config).step_s == pytest.approx(2 * 22 / count, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipeline", "conventional"])
@pytest.mark.parametrize("prefix_cache", ["salted", "kept", "off"])
@pytest.mark.parametrize("count", [16, 48, 64, 128])
def test_the_closed_form_is_near_to_the_simulator(kind: str, prefix_cache: str, count: int) -> None:
    """From far too few environments to so many that their contexts do not fit into the KV caches."""
    changes = (f"scheduler.kind={kind}", f"environment.prefix_cache={prefix_cache}", f"environment.count={count}")
    config = run(*changes)
    report, estimate = simulate(config), screened(config)
    steady = report.steps
    step_s = (steady.time_s[-1] - steady.time_s[19]) / (len(steady) - 20)
    assert step_s / estimate.step_s == pytest.approx(1.0, abs=0.1)
    if kind == "pipeline":
        assert estimate.lag_mean == pytest.approx(report.lag.mean, rel=0.2, abs=0.1)


def engines_of(number: float, **decode: float) -> Engines:
    """Return an engine of 16 slots, answers of 1,000 tokens, and environments that act for 1,000 s."""
    hardware = parse_run({**RUN, "hardware": {**RUN["hardware"], "decode": {"kind": "affine", **decode}}}).hardware
    assert hardware.decode is not None
    table = {**RUN, "workload": {"length": {"kind": "fixed", "max": 1000}}}
    answers = answers_of(parse_run({key: value for key, value in table.items() if key != "environment"}))[0]
    return Engines(
        number=1, slots=16.0, cache_tokens=math.inf,
        decode_step=DecodeStep(hardware.decode, tensor_parallel=1, most=16),
        prompt_s=0.0, dispatch_s=0.0, request_s=0.0, report_s=0.0, answers=answers, acting_s=1000.0,
    ).of_rollouts(number)  # fmt: skip


@pytest.mark.parametrize("number", [0.5, 1.0, 2.0, 8.0])  # a half: every second engine has one
def test_rollouts_that_do_not_slow_each_other_down_are_independent(number: float) -> None:
    """A token takes 1 s whoever else is there: each rollout is there 1001 of 2001 s."""
    engines = engines_of(number, step_s=1.0)
    assert engines.slots == pytest.approx(number * 1001 / 2001)
    assert engines.uneven == pytest.approx(1.0)


@pytest.mark.parametrize("number", [1, 2, 5])
def test_rollouts_that_share_an_engine_leave_it_empty_as_often_as_theory_says(number: int) -> None:
    """A token takes b s where b are there, so that as many come out however many there are, but of an empty engine.

    One repairman (Erlang): with s the seconds of an answer alone, P(0) = 1 / sum over k of N!/(N - k)! (s/Z)^k.
    """
    engines = engines_of(number, step_s=1e-9, sequence_s=1.0)
    terms = [math.perm(number, k) * (1001 / 1000) ** k for k in range(number + 1)]
    rate = (1 - 1 / sum(terms)) / 1001
    assert engines.slots / engines.answer_s(engines.busy(engines.slots)) == pytest.approx(rate, rel=2e-3)
    assert number - engines.slots == pytest.approx(rate * 1000, rel=2e-3)  # Little: those with their environment


def test_the_wait_for_prefills_of_others_by_hand() -> None:
    """Three turns prefill 16 tokens, or without caches 51, at 1 s a token: 16/3 or 17 s each.

    An engine that ends a rollout in 100 s is in a prefill of the one kind for 16 % of the time; a turn that comes then
    waits for half of it.
    """
    prefill = PrefillConfig(token_s=1.0)
    turns = means_of([10, 17, 24], [10, 3, 3], [4, 4, 4], [2.0, 3.0, 5.0])
    assert turns.held_up_s(prefill, kept=1.0, rate=0.01) == pytest.approx(3 * 0.16 * (16 / 3) / 2)
    assert turns.held_up_s(prefill, kept=0.0, rate=0.01) == pytest.approx(3 * 0.51 * 17 / 2)


def test_the_caches_of_the_longest_gaps_are_dropped_first() -> None:
    """Of gaps of 1, 1, 2 and 4 s a quarter of the time is beyond 2 s, and a half of the gaps is at least as long."""
    turns = replace(TWO_TURNS, gap_quantiles=(1.0, 1.0, 2.0, 4.0))
    assert turns.dropped(np.array([0.0, 1e-9, 0.25, 0.5, 1.0])) == pytest.approx([0.0, 0.25, 0.5, 1.0, 1.0])


def test_of_exponential_gaps_as_many_are_dropped_as_room_is_missing() -> None:
    """E[(gap - T)+] / E[gap] = exp(-T) = P(gap >= T)."""
    turns = replace(TWO_TURNS, gap_quantiles=tuple(-math.log1p(-(part + 0.5) / 20_000) for part in range(20_000)))
    lost = np.array([0.01, 0.1, 0.5, 0.9])
    assert turns.dropped(lost) == pytest.approx(lost, abs=2e-3)


def test_the_longest_life_by_hand() -> None:
    """Two rollouts of 2 or 4 tokens, 0.5 s each, whose environments act for 0 or 1 s: lives of 1 and 3 s.

    Of two the longest is 3 s with probability 3/4. One alone is as long as the mean.
    """
    turns = replace(TWO_TURNS, generated_R=np.array([4.0, 2.0]), acting_R=np.array([1.0, 0.0]))
    assert turns.longest_s(2, 0.5) == pytest.approx(3 * 0.75 + 1 * 0.25)
    assert turns.longest_s(1, 0.5) == pytest.approx(2.0)


@pytest.mark.parametrize("number", [1, 9, 99])
def test_a_drain_of_equal_lives_by_theory(number: int) -> None:
    """Lives of 3 s that begin together end together; residual ones are uniform, the longest of n is 3 n/(n + 1)."""
    turns = replace(TWO_TURNS, generated_R=np.array([2.0]), acting_R=np.array([1.0]))
    assert turns.drain_s(number, lambda _: 1.0, refilled=False) == pytest.approx(3.0)
    assert turns.drain_s(number, lambda _: 1.0, refilled=True) == pytest.approx(3 * number / (number + 1), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "step_s"), [(192, 1586), (320, 1170), (512, 1159), (768, 1182)])
def test_more_environments_than_caches_have_room_for_are_screened_as_simulated(count: int, step_s: float) -> None:
    """``pipelinerl environments examples/agents.toml``: from 320 on rollouts wait to begin, and nothing changes."""
    config = load_run(Path(__file__).parents[3] / "examples" / "agents.toml", [f"environment.count={count}"])
    space = SearchSpace.of(config)
    screened = Screener(config, space.answers).screen(own_candidate(space))
    assert screened.estimate.step_s == pytest.approx(step_s, rel=0.1)


@pytest.mark.parametrize(("steps", "step_s"), [(4, 2150), (8, 1581)])
def test_the_tail_of_conventional_rl_is_one_of_lives(steps: int, step_s: float) -> None:
    """``pipelinerl compare examples/agents.toml --set optimizer_steps=24``: the last sessions have most gaps."""
    path = Path(__file__).parents[3] / "examples" / "agents.toml"
    kind = ["scheduler.kind=conventional", f"scheduler.optimizer_steps_per_rl_step={steps}", "optimizer_steps=24"]
    space = SearchSpace.of(config := load_run(path, kind))
    estimate = Screener(config, space.answers).screen(own_candidate(space)).estimate
    assert estimate.step_s == pytest.approx(step_s, rel=0.05)
