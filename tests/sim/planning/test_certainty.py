"""A plan that knows what it does not know, from end to end: what is measured makes it surer, and right."""

from __future__ import annotations

import itertools
import math
import shlex
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import tomli_w
from tiny_plan import TINY, in_this_process, planned, two_arms, unknown_run

from pipelinerl.calibration.measured import Measured
from pipelinerl.config.question import Assumption
from pipelinerl.config.run import CHECK_STEPS, check_config
from pipelinerl.config.run_file import load_run, parse_run
from pipelinerl.hardware.prior import (
    ANSWERS_SD,
    CERTAIN,
    END_SDS,
    GENERATION_SD,
    MEAN_SD,
    MEASURED_SD,
    MEMORY_SD,
    RUN_SD,
    SYNC_ARM_SD,
    SYNC_SD,
    TRAINING_SD,
)
from pipelinerl.hardware.transport import WeightTransferConfig
from pipelinerl.records.plan_report import PlanReport
from pipelinerl.theory.lengths import LengthStatistics, uniform_lengths
from sim.planning.answer import plan
from sim.planning.certainty import (
    MEASURE_MINUTES,
    START_MINUTES,
    DrawnCandidates,
    Draws,
    Instruments,
    Unknown,
    ahead,
    chosen_after,
    effects_of,
    explained,
    longer_answers,
    make_draws,
    memory_suffices,
    observations,
    rightness,
    sensitivity,
    spreads,
    values_of_measurements,
)
from sim.planning.choose import TIE
from sim.planning.explain import NOTHING
from sim.planning.screen import Candidate, Screener, candidate_of
from sim.planning.simulate import HowToPlan
from sim.planning.space import Limits, SearchSpace, all_choices
from sim.run import simulate

TRUTH = "hardware.coefficients={sync_s_per_root_gb=6.0, kv_efficiency=0.6, training_mfu=0.5}"
"""A system whose weights take 10 s, five times as long as the hardware model has it."""


def planned_unknown(*overrides: str, measured: tuple[Path, ...] = ()) -> PlanReport:
    with in_this_process():
        return plan(unknown_run(*overrides), HowToPlan(measured=measured))


@cache
def before() -> PlanReport:
    return planned_unknown()


def checked(kind: str, folder: Path) -> Path:
    """Return the folder of a check of the true system, as `train --check` leaves one."""
    config = check_config(unknown_run(f"scheduler.kind={kind}", TRUTH))
    simulate(config, out=folder / kind, trace=True)
    return folder / kind


@pytest.mark.slow
def test_measurements_make_a_plan_surer_and_right(tmp_path):
    """A check of the pipeline turns the plan to the schedule that is the best in truth; one of both arms settles it."""
    pipeline, conventional = checked("pipeline", tmp_path), checked("conventional", tmp_path)
    first = before()
    second = planned_unknown(measured=(pipeline,))
    third = planned_unknown(measured=(pipeline, conventional))
    truth = planned_unknown(TRUTH)
    assert first.recommended.family == "pipeline"
    assert truth.recommended.family == second.recommended.family == third.recommended.family == "conventional"
    assert third.recommended.label == truth.recommended.label
    assert third.recommended.tokens_per_s == pytest.approx(truth.recommended.tokens_per_s, rel=0.1)

    right = [one.certainty.right for one in (first, second, third)]
    assert right == sorted(right)
    assert (right[0] < 0.7, right[2] > 0.95) == (True, True)
    regret = [one.certainty.regret for one in (first, second, third)]
    assert regret == sorted(regret, reverse=True)
    unknown = [one.certainty.unknown for one in (first, second, third)]
    for name in unknown[0]:
        assert unknown[1][name] <= unknown[0][name] or name == "weight transfer of synchronous RL"
        assert unknown[2][name] <= unknown[1][name]
    assert [one.certainty.asynchronous.certain for one in (first, second, third)] == [False, False, True]
    assert third.certainty.asynchronous.faster < 1 - CERTAIN


@pytest.mark.slow
def test_the_measurement_that_the_plan_asks_for_is_the_one_that_turned_it():
    certainty = before().certainty
    best = certainty.measurements[0]
    assert best.measured == ["weight transfer of asynchronous RL"]
    assert best.gain > 0.05
    assert best.regret == pytest.approx(certainty.least_regret - best.gain, abs=0.02)
    assert certainty.asynchronous.decided_by == best.measured[0]
    assert certainty.regret >= certainty.least_regret


@pytest.mark.slow
def test_a_plan_of_one_arm_is_compared_with_the_other_by_the_screening():
    certainty = planned("plan.schedulers=['pipeline']").certainty
    assert certainty.asynchronous is not None
    assert planned("plan.schedulers=['conventional']").certainty.asynchronous is None


@pytest.mark.slow
def test_hardware_in_numbers_leaves_the_answers_and_what_the_model_leaves_out():
    certainty = planned("hardware={decode={kind='affine', step_s=0.01}, training={token_s=1e-4}}").certainty
    assert certainty.fits is None
    assert [row.measured for row in certainty.measurements] == [["mean answer"]]
    assert before().certainty.fits > 0.99


@pytest.mark.slow
def test_the_same_plan_is_as_sure():
    assert planned_unknown().to_dict() == before().to_dict()
    other = planned_unknown("seed=1").certainty
    assert other.right != before().certainty.right or other.regret != before().certainty.regret


# How sure a plan is: draws, the throughput of ways in them, and the odds that follow.

NORMAL = NormalDist()


def at_quantiles(number):
    return np.array([NORMAL.inv_cdf((part + 0.5) / number) for part in range(number)])


def draws_of(**logs):
    """One draw in which some factors have these logs, and the others none."""
    return Draws({name: np.array([logs.get(name.name, 0.0)]) for name in Unknown}, {}, {})


def rates(draws, factors=None):
    space, some = two_arms()
    return np.exp(DrawnCandidates.of(space.config, space.answers, some, draws).log_rates(factors or {}))[0]


def screened():
    space, some = two_arms()
    screener = Screener(space.config, space.answers)
    return np.array([screener.screen(way).tokens_per_s for way in some])


# ------------------------------------------------------------------------------------------------------- odds


@pytest.mark.parametrize(("mean", "sd"), [(0.0, 0.2), (0.1, 0.2), (-0.1, 0.3), (0.02, 0.01)])
def test_two_ways_whose_log_ratio_is_normal_are_right_with_the_normals_probability(mean, sd):
    """Within a tie: P(r >= log(1 - TIE)) = Phi((mean - log(1 - TIE)) / sd), to the 1 / 4000 that quantiles leave."""
    log_DC = np.stack([mean + sd * at_quantiles(4000), np.zeros(4000)], axis=1)
    assert rightness(log_DC, 0)[0] == pytest.approx(NORMAL.cdf((mean - math.log(1 - TIE)) / sd), abs=2 / 4000)
    # E[1 - exp(min(r, 0))] of a normal r.
    lost = NORMAL.cdf(-mean / sd) - math.exp(mean + sd**2 / 2) * NORMAL.cdf(-mean / sd - sd)
    assert rightness(log_DC, 0)[1] == pytest.approx(lost, abs=2e-4)


def test_without_uncertainty_the_fastest_is_right_and_loses_nothing():
    log_DC = np.tile(np.log([100.0, 97.5, 90.0]), (20, 1))
    assert rightness(log_DC, 0) == (1.0, 0.0)
    assert rightness(log_DC, 1) == (1.0, pytest.approx(0.025))  # a tie
    assert rightness(log_DC, 2) == (0.0, pytest.approx(0.1))


def test_each_arm_is_compared_at_its_best():
    _, (apart, together) = two_arms()
    log_DC = np.log([[10.0, 12.0, 11.0], [9.0, 8.0, 18.0]])
    assert ahead([apart, apart, together], log_DC) == pytest.approx(np.log([12 / 11, 9 / 18]))
    assert ahead([apart, apart], log_DC) is None


def drawn(log_DC, lag_DC=None, hours_DC=None):
    """Two candidates with these rates in every draw."""
    nothing_DC = np.zeros(np.shape(log_DC))
    return DrawnCandidates(
        draws_of(),
        two_arms()[1],
        log_DC,
        nothing_DC if lag_DC is None else lag_DC,
        nothing_DC if hours_DC is None else hours_DC,
    )


def test_the_mean_share_of_the_fastest_is_one_less_the_regret():
    """10 and 5, 10 and 20 tokens/s: (1 + 1/2) / 2 and (1/2 + 1) / 2; of 20 and 5, 20 and 20: 1 and (1/4 + 1) / 2."""
    _, (apart, together) = two_arms()
    compared = drawn(np.log([[10.0, 5.0], [10.0, 20.0]]))
    assert compared.shares({apart.label: 1.0, together.label: 1.0}) == pytest.approx(
        {apart.label: 0.75, together.label: 0.75}
    )
    doubled = {apart.label: 2.0, together.label: 1.0}
    assert compared.shares(doubled) == pytest.approx({apart.label: 1.0, together.label: 0.625})
    assert compared.shares(doubled)[together.label] == pytest.approx(1 - rightness(compared.log_rates(doubled), 1)[1])
    assert compared.without([apart.label]).shares(doubled) == {together.label: 1.0}


def test_the_odds_of_keeping_to_a_limit_are_the_share_of_draws_that_keep_it():
    _, (apart, _) = two_arms()
    lag_DC, hours_DC = np.array([[1.0, 9.0], [2.0, 9.0], [3.0, 9.0], [4.0, 9.0]]), np.array([[8.0, 0.0]] * 4)
    compared = drawn(np.zeros((4, 2)), lag_DC, hours_DC)
    free = Limits(lag=3, mean_lag=None, min_ess=None, drift=None, gpu_hours=None, budget=None, price=None)

    def keeps(limits, slower=1.0, staler=1.0):
        return compared.keeps(apart.label, limits, slower=slower, staler=staler)

    assert keeps(free) is None
    assert keeps(replace(free, mean_lag=3.5)) == 0.75
    assert keeps(replace(free, mean_lag=3.5), staler=2.0) == 0.25
    assert keeps(replace(free, gpu_hours=8.0)) == 1.0
    assert keeps(replace(free, gpu_hours=8.0), slower=1.1) == 0.0


def test_memory_suffices_as_a_normal_error_has_it():
    assert memory_suffices([0.5, 1.0]) == 0.5
    assert memory_suffices([0.8, 0.2]) == pytest.approx(NORMAL.cdf(-math.log(0.8) / MEMORY_SD))
    assert memory_suffices([0.5]) > 0.999


def test_what_is_needed_of_memory_is_counted_by_hand():
    """1.544e9 parameters: an engine holds 2 bytes each and 320 tokens of 28,672 bytes; a trainer 16 bytes each."""
    space = SearchSpace.of(unknown_run())
    model = space.memory.model
    engine, trainer = space.memory.needed_shares(tensor_parallel=1, training_accelerators=2)
    usable = 0.9 * space.memory.gpu.memory_bytes
    assert engine * usable == pytest.approx(3.76e9 + 2 * model.parameters + 320 * 28672)
    assert trainer * usable > 16 * model.parameters / 2
    in_fp8 = SearchSpace.of(unknown_run("hardware.engine_weights=fp8", "hardware.kv_cache=fp8")).memory
    engine, same = in_fp8.needed_shares(tensor_parallel=1, training_accelerators=2)
    assert engine * usable == pytest.approx(3.76e9 + model.parameters + 320 * 28672 / 2)
    assert same == trainer
    assert SearchSpace.of(in_numbers()).memory.needed_shares(tensor_parallel=1, training_accelerators=2) is None


# ------------------------------------------------------------------------------------------------------ draws


def in_numbers():
    hardware = {"decode": {"kind": "affine", "step_s": 0.01}, "training": {"token_s": 1e-4}}
    return parse_run({**TINY, "hardware": hardware})


def test_what_nobody_has_measured_is_as_uncertain_as_the_prior_says():
    assert spreads(unknown_run(), Measured()) == {
        Unknown.GENERATION: GENERATION_SD,
        Unknown.TRAINING: TRAINING_SD,
        Unknown.WEIGHTS: SYNC_SD,
        Unknown.WEIGHTS_APART: SYNC_ARM_SD,
        Unknown.WEIGHTS_COLOCATED: SYNC_ARM_SD,
        Unknown.SWITCH: 0.7,
        Unknown.ANSWERS: ANSWERS_SD,
        Unknown.RUN_APART: RUN_SD,
        Unknown.RUN_COLOCATED: RUN_SD,
    }


def test_a_mean_answer_that_nobody_gave_is_believed_less_until_it_is_measured():
    given, guessed = (spreads(unknown_run(), Measured(), keys) for keys in ((), ["workload.length.mean"]))
    assert {name for name in Unknown if guessed[name] != given[name]} == {Unknown.ANSWERS}
    assert guessed[Unknown.ANSWERS] == MEAN_SD
    assert spreads(unknown_run(), Measured(answers=True), ["workload.length.mean"])[Unknown.ANSWERS] == MEASURED_SD


@pytest.mark.parametrize(
    ("override", "known"),
    [
        ("hardware.coefficients={kv_efficiency=0.8}", Unknown.GENERATION),
        ("hardware.training={token_s=1e-4}", Unknown.TRAINING),
        ("hardware.coefficients={training_mfu=0.5}", Unknown.TRAINING),
        ("hardware.coefficients={sync_s_per_root_gb=2.0}", Unknown.WEIGHTS),
        ("hardware.switch={to_training_s=3.0}", Unknown.SWITCH),
    ],
)
def test_what_the_run_file_states_is_known_as_well_as_a_measurement(override, known):
    before, after = spreads(unknown_run(), Measured()), spreads(unknown_run(override), Measured())
    assert after[known] == MEASURED_SD
    others = {name for name in Unknown if after[name] != before[name]}
    own = {Unknown.WEIGHTS_APART, Unknown.WEIGHTS_COLOCATED} if known is Unknown.WEIGHTS else set()
    assert others == {known} | own


def test_the_method_of_the_weights_narrows_their_spread():
    """Of shard to shard, 0.06 to 0.63, over all methods, 0.15 to 8.8."""
    share = math.log(0.63 / 0.06) / math.log(8.8 / 0.15)
    known = spreads(unknown_run("hardware.weight_sync=reshard"), Measured())
    assert known[Unknown.WEIGHTS] == pytest.approx(SYNC_SD * share)


def test_a_transport_of_ours_is_as_uncertain_as_the_least_known_of_its_bandwidths():
    """Their levels hold 80 %: log(50 / 10) of the host, log(2 / 0.25) of a file, over 2 * 1.28; nothing in common."""
    train = "train={model={path='m'}, task={name='math', settings={}}, optimizer={learning_rate=1e-6}}"
    known = spreads(unknown_run(train), Measured())
    assert known[Unknown.WEIGHTS] == 0
    assert known[Unknown.WEIGHTS_APART] == pytest.approx(math.log(5) / (2 * END_SDS))
    assert known[Unknown.WEIGHTS_COLOCATED] == pytest.approx(math.log(8) / (2 * END_SDS))
    named = spreads(unknown_run(train, "hardware.weight_sync=reshard"), Measured())
    assert named == spreads(unknown_run("hardware.weight_sync=reshard"), Measured())


def test_weights_measured_in_one_arm_say_nothing_certain_of_the_other():
    some = Measured(weights={False: WeightTransferConfig(publish_s=1.0)})
    now = spreads(unknown_run(), some)
    assert now[Unknown.WEIGHTS] == 0
    assert now[Unknown.WEIGHTS_APART] == MEASURED_SD
    assert now[Unknown.WEIGHTS_COLOCATED] == pytest.approx(math.hypot(SYNC_SD, SYNC_ARM_SD))
    both = Measured(weights=dict.fromkeys([False, True], WeightTransferConfig()))
    assert spreads(unknown_run(), both)[Unknown.WEIGHTS_COLOCATED] == MEASURED_SD
    given = spreads(unknown_run("hardware.weights={publish_s=1.0}"), Measured())
    assert (given[Unknown.WEIGHTS_APART], given[Unknown.WEIGHTS_COLOCATED]) == (0, SYNC_ARM_SD)
    assert spreads(in_numbers(), Measured())[Unknown.WEIGHTS_COLOCATED] == 0


def test_draws_have_the_spreads_and_are_the_same_for_a_seed():
    draws, config = make_draws(unknown_run(), Measured()), unknown_run()
    for name, sd in spreads(config, Measured()).items():
        assert draws.logs_D[name].mean() == pytest.approx(0, abs=1e-12)
        assert draws.logs_D[name].std() == pytest.approx(sd, rel=0.01)
    again, other = make_draws(config, Measured()), make_draws(config, Measured(), seed=1)
    assert all((again.logs_D[name] == draws.logs_D[name]).all() for name in Unknown)
    assert (other.logs_D[Unknown.TRAINING] != draws.logs_D[Unknown.TRAINING]).any()


def test_what_is_stated_is_not_drawn_and_leaves_the_other_draws_alone():
    free, stated = (
        make_draws(unknown_run(), Measured()),
        make_draws(unknown_run("hardware.coefficients={kv_efficiency=0.8}"), Measured()),
    )
    assert set(free.coefficients_D) - set(stated.coefficients_D) == {"kv_efficiency"}
    assert (free.coefficients_D["weight_efficiency"] == stated.coefficients_D["weight_efficiency"]).all()
    assert "recomputation" not in free.coefficients_D
    assert not make_draws(in_numbers(), Measured()).coefficients_D


def test_a_world_without_factors_is_the_screening_times_what_simulations_gave():
    _, (apart, _) = two_arms()
    assert rates(draws_of()) == pytest.approx(screened())
    assert rates(draws_of(), {apart.label: 0.9})[0] == pytest.approx(0.9 * screened()[0])


def test_a_way_without_simulation_has_the_mean_ratio_of_its_kind():
    space, (apart, together) = two_arms()
    log_DC = DrawnCandidates.of(space.config, space.answers, [apart, together], draws_of()).log_rates(
        {apart.label: 0.5}
    )
    assert np.exp(log_DC)[0] == pytest.approx(screened() * [0.5, 0.75])  # of a kind without any: of all, and 1


def test_factors_move_their_own_times_only():
    apart, together = screened()
    assert rates(draws_of(RUN_APART=math.log(2))) == pytest.approx([apart / 2, together])
    assert rates(draws_of(RUN_COLOCATED=math.log(2))) == pytest.approx([apart, together / 2])
    slower = rates(draws_of(WEIGHTS_COLOCATED=math.log(3)))
    assert slower[0] == pytest.approx(apart)
    assert slower[1] < together
    assert rates(draws_of(SWITCH=math.log(3)))[1] < together
    assert rates(draws_of(SWITCH=math.log(3)))[0] == pytest.approx(apart)
    for name in ("GENERATION", "TRAINING", "WEIGHTS"):
        assert rates(draws_of(**{name: math.log(3)}))[1] < together


def test_all_times_twice_as_long_are_half_the_throughput():
    names = ("GENERATION", "TRAINING", "WEIGHTS", "SWITCH")
    assert rates(draws_of(**dict.fromkeys(names, math.log(2)))) == pytest.approx(screened() / 2, rel=1e-6)


def test_longer_answers_are_as_much_longer_and_cut_at_the_limit():
    answers = LengthStatistics(uniform_lengths(1000), prompt_tokens=20, group_wait=10)
    twice = longer_answers(answers, 2.0, longest=5000)
    assert twice.mean == pytest.approx(2 * answers.mean, rel=1e-3)
    assert (twice.lengths.max_tokens, twice.group_wait, twice.prompt_tokens) == (2000, 20, 20)
    assert longer_answers(answers, 0.5, longest=5000).mean == pytest.approx(answers.mean / 2, rel=2e-3)
    cut = longer_answers(answers, 2.0, longest=1000)
    assert cut.lengths.max_tokens == 1000
    assert cut.mean == pytest.approx(750, rel=2e-3)  # half of them are cut


# The value of measurements: derivable for two ways whose log ratio is normal; and the commands that measure.

EXAMPLE = Path(__file__).parents[3] / "examples" / "plan_qwen7b_128_h100.toml"
WORLDS = 4000
SD = 0.2


def normals(number, seed=0):
    return np.random.default_rng(seed).standard_normal((number, WORLDS))


def regret_after(known, log_DC):
    return rightness(log_DC, chosen_after(known, log_DC))[1]


def two_candidates(ratio_D):
    return np.stack([ratio_D, np.zeros(WORLDS)], axis=1)


# ------------------------------------------------------------------------------------------------------- values


def test_a_measurement_of_half_the_variance_is_worth_what_the_normal_says():
    """Of r = a + b, each of SD: the sign of a loses (E|r| - E|a|) / 2 in logs, and E|N(0, s)| = s sqrt(2 / pi).

    Less by the curvature of the exponential, about a tenth at this SD, which the tolerance holds.
    """
    a_D, b_D = SD * normals(2)
    log_DC = two_candidates(a_D + b_D)
    each = math.sqrt(2 / math.pi) * SD
    assert regret_after([], log_DC) == pytest.approx(math.sqrt(2) * each / 2, rel=0.15)
    assert regret_after([a_D], log_DC) == pytest.approx((math.sqrt(2) - 1) * each / 2, rel=0.2)
    assert explained([a_D], a_D + b_D) == pytest.approx(0.5, abs=0.05)


def test_all_that_is_unknown_together_is_worth_the_oracles_bound():
    """Where the ratio is a sum of what is measured, nothing is lost but ties within the gain that counts."""
    parts = SD * normals(3)
    log_DC = two_candidates(parts.sum(axis=0))
    right, regret = rightness(log_DC, chosen_after(list(parts), log_DC))
    assert right > 0.98
    assert regret < 0.002


@pytest.mark.parametrize("seed", range(5))
def test_what_no_candidate_depends_on_is_worth_nothing(seed):
    """Noise is not predicted to gain more than the least gain, so the choice stays: exactly nothing."""
    ratio, noise_D = normals(2, seed=seed)
    log_DC = two_candidates(0.1 + SD * ratio)
    assert regret_after([noise_D], log_DC) == regret_after([], log_DC)


@pytest.mark.parametrize("seed", range(5))
def test_a_measurement_never_costs_more_than_noise(seed):
    """Expected value of information is 0 at least; over draws it is off by 0.002 at most, for each of 5 seeds."""
    log_DC = SD * normals(6, seed=seed).T
    before = regret_after([], log_DC)
    for way in range(6):
        assert before - regret_after([log_DC[:, way]], log_DC) > -0.002
    assert before - regret_after(list(log_DC.T), log_DC) > 0.05
    assert regret_after(list(log_DC.T), log_DC) >= 0


def test_without_uncertainty_nothing_is_gained():
    log_DC = np.tile([0.0, -0.1], (WORLDS, 1))
    assert (chosen_after([normals(1)[0]], log_DC) == 0).all()
    assert regret_after([], log_DC) == 0


def test_measurements_are_ranked_with_the_best_pair_and_all():
    a_D, b_D, noise_D = SD * normals(3)
    shown = {Unknown.TRAINING: noise_D, Unknown.GENERATION: a_D, Unknown.SWITCH: b_D}
    rows = values_of_measurements(shown, two_candidates(a_D + b_D), instruments(one_gpu=False))
    assert [row.measured for row in rows][1:] == [
        ["phase switch"] if rows[0].measured == ["decode step"] else ["decode step"],
        ["optimizer step"],
        ["decode step", "phase switch"],
        ["optimizer step", "decode step", "phase switch"],
    ]
    assert [row.settles for row in rows] == [True, True, False, True, True]
    assert rows[2].gain == pytest.approx(0, abs=NOTHING)
    assert rows[3].gain > rows[0].gain > 5 * NOTHING


# ------------------------------------------------------------------------------------- what a measurement shows


def test_what_is_known_or_of_no_arm_compared_is_not_measured():
    space, some = two_arms()
    everything = observed(space, some[0], {True, False})
    assert set(everything) == {
        Unknown.GENERATION, Unknown.TRAINING, Unknown.WEIGHTS_APART, Unknown.WEIGHTS_COLOCATED, Unknown.SWITCH,
        Unknown.ANSWERS,
    }  # fmt: skip
    alone = observed(space, some[0], {False})
    assert set(everything) - set(alone) == {Unknown.WEIGHTS_COLOCATED, Unknown.SWITCH}
    known = SearchSpace.of(unknown_run("hardware.training={token_s=1e-4}"))
    assert Unknown.TRAINING not in observed(known, some[0], {False})
    free = SearchSpace.of(unknown_run("hardware.training={token_s=0}"))  # a log of 0 seconds would be a warning
    assert Unknown.TRAINING not in observed(free, some[0], {False})


def observed(space, way, colocated):
    draws = make_draws(space.config, Measured(), number=40)
    return observations(space.config, space.answers, draws, way, colocated=colocated)


def test_a_measurement_shows_its_time_with_the_error_of_measurements():
    space, some = two_arms()
    draws = make_draws(space.config, Measured(), number=400)
    shown_D = observations(space.config, space.answers, draws, some[0], colocated={True, False})[Unknown.ANSWERS]
    error_D = shown_D - draws.logs_D[Unknown.ANSWERS]
    assert error_D.std() == pytest.approx(MEASURED_SD, rel=0.15)
    step_D = observed(space, some[0], {False})[Unknown.GENERATION]
    factor_D = make_draws(space.config, Measured(), number=40).logs_D[Unknown.GENERATION]
    assert np.corrcoef(step_D, factor_D)[0, 1] > 0.85  # its coefficients vary too


def test_the_way_of_the_weights_decides_between_the_arms_of_the_small_run():
    """A synchronization of 2 s in steps of half a second: nothing else explains as much of the difference."""
    space, some = two_arms()
    draws = make_draws(space.config, Measured())
    log_DC = DrawnCandidates.of(space.config, space.answers, some, draws).log_rates({})
    ahead_D = log_DC[:, 0] - log_DC[:, 1]
    shown = observations(space.config, space.answers, draws, some[0], colocated={True, False})
    shares = {name: explained([known_D], ahead_D) for name, known_D in shown.items()}
    assert max(shares, key=shares.get) in (Unknown.WEIGHTS_APART, Unknown.WEIGHTS_COLOCATED, Unknown.SWITCH)
    assert min(shares.values()) >= 0
    assert max(shares.values()) <= 1


# ------------------------------------------------------------------------------------------------------ commands


def instruments(*, one_gpu=True, config=None, file="runs/mine.toml", whole=True):
    space, some = two_arms()
    config = config or space.config
    arms = {way.config.colocated: way for way in some}
    return Instruments(config, file, arms, Screener(space.config, space.answers), whole=whole, one_gpu=one_gpu)


def test_without_a_train_table_commands_take_numbers():
    some = instruments()
    assert some.for_all([Unknown.GENERATION]) == (
        ["pipelinerl measure --model MODEL_FOLDER --out measured"], MEASURE_MINUTES, 1,
    )  # fmt: skip
    command = "pipelinerl calibrate --run runs/mine.toml --train-step-s SECONDS --out measured_step.toml"
    assert some.for_all([Unknown.TRAINING]) == ([command], None, None)
    assert some.for_all([Unknown.ANSWERS]) == ([], None, None)


def test_a_question_without_a_split_is_measured_with_that_of_the_plan(command, tmp_path):
    """The command runs as it stands, but for the seconds: the question has neither split nor H."""
    question, out = tmp_path / "question.toml", tmp_path / "measured_sync.toml"
    tables = {**TINY, "hardware": {"gpu": "H100", "model": "Qwen2.5-1.5B"}, "cluster": {"accelerators": 4}}
    question.write_text(tomli_w.dumps({**tables, "scheduler": {"train_batch_size": 8}}))
    ((asked,), _, _) = instruments(file=str(question), whole=False).for_all([Unknown.WEIGHTS_APART])
    words = shlex.split(asked.replace("SECONDS", "5").replace(out.name, str(out)))
    result = command(*words[1:])
    assert (result.status, result.err) == (0, "")
    assert out.exists()
    overrides = [value for name, value in itertools.pairwise(words) if name == "--set"]
    assert load_run(question, overrides).generation_accelerators == two_arms()[1][0].config.generation_accelerators


def of_the_example():
    config = load_run(EXAMPLE)
    space = SearchSpace.of(config)
    made = [one for one in (candidate_of(choice, space) for choice in all_choices(space)) if isinstance(one, Candidate)]
    arms = {one.config.colocated: one for one in made}
    screener = Screener(config, space.answers)
    return space, arms, Instruments(config, str(EXAMPLE), arms, screener, whole=True, one_gpu=True)


def test_a_check_is_a_command_ready_to_run_that_makes_the_run_it_says():
    space, arms, some = of_the_example()
    for shown, colocated in ((Unknown.WEIGHTS_APART, False), (Unknown.SWITCH, True)):
        (command,), minutes, gpus = some.for_all([shown])
        program, train, file, check, *options = shlex.split(command)
        assert (program, train, file, check) == ("pipelinerl", "train", str(EXAMPLE), "--check")
        overrides = [value for name, value in zip(options[::2], options[1::2], strict=True) if name == "--set"]
        made, way = load_run(file, overrides), arms[colocated].config
        assert made.cluster.tensor_parallel == way.cluster.tensor_parallel
        assert made.generation_accelerators == way.generation_accelerators
        same = {"kind", "generation_batch_size", "train_batch_size", "publish_every", "optimizer_steps_per_rl_step"}
        assert made.scheduler.model_dump(include=same) == way.scheduler.model_dump(include=same)
        assert gpus == 128
        assert START_MINUTES < minutes < 60
    assert space.config.train is not None


def test_a_check_of_a_way_that_leaves_gpus_idle_runs_on_the_others():
    sets = ["cluster.accelerators=61", "cluster.generation_accelerators=30"]
    config = load_run(EXAMPLE, [*sets, "plan={schedulers=['conventional'], tensor_parallel=[4]}"])
    space = SearchSpace.of(config)
    way = candidate_of(all_choices(space)[0], space)
    assert isinstance(way, Candidate)
    file = shlex.join([str(EXAMPLE), *(word for one in sets for word in ("--set", one))])
    some = Instruments(config, file, {True: way}, Screener(config, space.answers), whole=True, one_gpu=False)
    (command,), _, gpus = some.for_all([Unknown.SWITCH])
    words = shlex.split(command)
    overrides = [value for name, value in itertools.pairwise(words) if name == "--set"]
    assert (load_run(EXAMPLE, overrides).num_engines, way.idle, gpus) == (15, 1, 60)


def test_the_fewest_commands_are_taken_and_both_checks_where_one_shows_not_all():
    _, _, some = of_the_example()
    assert len(some.for_all([Unknown.GENERATION, Unknown.TRAINING])[0]) == 1
    both, minutes, gpus = some.for_all([Unknown.WEIGHTS_APART, Unknown.WEIGHTS_COLOCATED])
    assert ["--check" in command for command in both] == [True, True]
    assert minutes > 2 * START_MINUTES
    assert gpus == 128


def test_a_check_is_short_and_trains_publishes_and_switches_at_each_of_its_steps():
    config = check_config(load_run(EXAMPLE, ["scheduler.publish_every=8", "train.evaluation.problems=7"]))
    assert (config.optimizer_steps, config.scheduler.publish_every) == (CHECK_STEPS, 1)
    assert config.train.evaluation.problems == 0
    assert config.plan is None
    assert check_config(load_run(EXAMPLE, ["optimizer_steps=2"])).optimizer_steps == 2


# ------------------------------------------------------------------- bands, sensitivity and what-ifs of the same draws


def known_draws(number=400, **logs):
    """Draws of which all but some factors are known."""
    zero_D = np.zeros(number)
    given = {Unknown[name]: np.asarray(log_D) for name, log_D in logs.items()}
    return Draws({name: given.get(name, zero_D) for name in Unknown}, {}, dict.fromkeys(Unknown, 0.0))


def compared_in(draws, log_DC):
    return DrawnCandidates(draws, two_arms()[1], np.asarray(log_DC), np.zeros_like(log_DC), np.zeros_like(log_DC))


ARMS = [one.label for one in two_arms()[1]]
EVEN = dict.fromkeys(ARMS, 1.0)
EVENLY_D = np.array([NormalDist().inv_cdf((part + 0.5) / 400) for part in range(400)])


def test_a_band_holds_eight_of_ten_draws():
    log_DC = np.log([[float(rate), 1.0] for rate in range(1, 12)])
    band = compared_in(known_draws(11), log_DC).band(ARMS[0], EVEN)
    assert (band.low, band.high) == pytest.approx((2.0, 10.0))


def test_the_effect_of_an_unknown_is_found_beside_that_of_another():
    """Rates fall by 0.2 and rise by 0.1 with one standard deviation of each; a draw moves both."""
    other_D = np.random.default_rng(1).permutation(EVENLY_D)
    draws = known_draws(GENERATION=0.5 * EVENLY_D, TRAINING=0.3 * other_D)
    rate_D = -0.2 * EVENLY_D + 0.1 * other_D
    rows = sensitivity(compared_in(draws, np.stack([rate_D, rate_D - 1], axis=1)), ARMS[0], EVEN, least=0.06)
    assert [row.unknown for row in rows] == ["decode step", "optimizer step"]
    assert (rows[0].low, rows[0].high) == pytest.approx((math.exp(0.2563), math.exp(-0.2563)), rel=0.01)
    assert (rows[1].low, rows[1].high) == pytest.approx((math.exp(-0.1282), math.exp(0.1282)), rel=0.01)
    assert not any(row.changes_decision for row in rows)


def test_the_decision_at_an_end_is_that_of_the_draws_there():
    """The second candidate is as fast in the mean, and ahead where the unknown is large."""
    draws = known_draws(GENERATION=EVENLY_D)
    (row,) = sensitivity(compared_in(draws, np.stack([-EVENLY_D, EVENLY_D], axis=1)), ARMS[0], EVEN, least=0.06)
    assert (row.instead_low, row.instead_high) == (None, ARMS[1])


def test_another_value_of_an_assumption_is_read_from_the_draws():
    """Rates go with the mean answer: half of it gives half; of a key that is not drawn nothing is said."""
    draws = known_draws(ANSWERS=0.5 * EVENLY_D)
    drawn = compared_in(draws, np.stack([0.5 * EVENLY_D, -0.5 * EVENLY_D], axis=1))
    assumed = [Assumption("workload.group_size", 8, (1,)), Assumption("workload.length.mean", 1000, (500, 2000))]
    mean, group = effects_of(assumed, drawn, ARMS[0], EVEN)
    assert (group.key, group.instead) == ("workload.group_size", [])
    assert [one.throughput for one in mean.instead] == pytest.approx([0.5, 2.0])
    assert [one.fastest for one in mean.instead] == ["conventional", None]


def test_what_is_stated_has_no_effect():
    """A run file with [train] says how its weights travel, and a calibrated coefficient has no other value."""
    stated = planned("hardware.coefficients={training_step_s=0.7}", "plan.simulate=3").sensitivity
    assert "training_step_s" not in {row.unknown for row in stated}
    assert {row.unknown for row in stated} >= {"decode step", "the rest of asynchronous RL"}
