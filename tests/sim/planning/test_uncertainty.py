"""How sure a plan is: draws, the throughput of ways in them, and the odds that follow."""

import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from tiny_plan import TINY, two_arms, unknown_run

from pipelinerl.calibration.measured import Measured
from pipelinerl.config.run_file import parse_run
from pipelinerl.hardware.prior import (
    ANSWERS_SD,
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
from pipelinerl.hardware.tables import WeightTransferConfig
from pipelinerl.theory.lengths import LengthStatistics, uniform_lengths
from sim.planning.candidates import Screener
from sim.planning.choose import TIE
from sim.planning.draws import Draws, Unknown, longer_answers, make_draws, spreads
from sim.planning.search_space import Limits, SearchSpace
from sim.planning.uncertainty import Bets, ahead, memory_suffices, rightness

NORMAL = NormalDist()


def at_quantiles(number):
    return np.array([NORMAL.inv_cdf((part + 0.5) / number) for part in range(number)])


def draws_of(**logs):
    """One draw in which some factors have these logs, and the others none."""
    return Draws({name: np.array([logs.get(name.name, 0.0)]) for name in Unknown}, {}, {})


def rates(draws, factors=None):
    space, some = two_arms()
    return np.exp(Bets.of(space.config, space.answers, some, draws).log_rates(factors or {}))[0]


def screened():
    space, some = two_arms()
    screener = Screener(space.config, space.answers)
    return np.array([screener.screen(way).tokens_per_s for way in some])


# ------------------------------------------------------------------------------------------------------- odds


@pytest.mark.parametrize(("mean", "sd"), [(0.0, 0.2), (0.1, 0.2), (-0.1, 0.3), (0.02, 0.01)])
def test_two_ways_whose_log_ratio_is_normal_are_right_with_the_normals_probability(mean, sd):
    """Within a tie: P(r >= log(1 - TIE)) = Phi((mean - log(1 - TIE)) / sd), to the 1 / 4000 that quantiles leave."""
    log_DW = np.stack([mean + sd * at_quantiles(4000), np.zeros(4000)], axis=1)
    assert rightness(log_DW, 0)[0] == pytest.approx(NORMAL.cdf((mean - math.log(1 - TIE)) / sd), abs=2 / 4000)
    # E[1 - exp(min(r, 0))] of a normal r.
    lost = NORMAL.cdf(-mean / sd) - math.exp(mean + sd**2 / 2) * NORMAL.cdf(-mean / sd - sd)
    assert rightness(log_DW, 0)[1] == pytest.approx(lost, abs=2e-4)


def test_without_uncertainty_the_fastest_is_right_and_loses_nothing():
    log_DW = np.tile(np.log([100.0, 97.5, 90.0]), (20, 1))
    assert rightness(log_DW, 0) == (1.0, 0.0)
    assert rightness(log_DW, 1) == (1.0, pytest.approx(0.025))  # a tie
    assert rightness(log_DW, 2) == (0.0, pytest.approx(0.1))


def test_each_arm_is_compared_at_its_best():
    _, (apart, together) = two_arms()
    log_DW = np.log([[10.0, 12.0, 11.0], [9.0, 8.0, 18.0]])
    assert ahead([apart, apart, together], log_DW) == pytest.approx(np.log([12 / 11, 9 / 18]))
    assert ahead([apart, apart], log_DW) is None


def bets(log_DW, lag_DW=None, hours_DW=None):
    """Two ways with these rates in every draw."""
    nothing_DW = np.zeros(np.shape(log_DW))
    return Bets(
        two_arms()[1], log_DW, nothing_DW if lag_DW is None else lag_DW, nothing_DW if hours_DW is None else hours_DW
    )


def test_what_a_way_is_worth_is_its_share_of_the_fastest_on_average_and_one_less_its_regret():
    """10 and 5, 10 and 20 tokens/s: (1 + 1/2) / 2 and (1/2 + 1) / 2; of 20 and 5, 20 and 20: 1 and (1/4 + 1) / 2."""
    _, (apart, together) = two_arms()
    compared = bets(np.log([[10.0, 5.0], [10.0, 20.0]]))
    assert compared.shares({apart.label: 1.0, together.label: 1.0}) == pytest.approx(
        {apart.label: 0.75, together.label: 0.75}
    )
    doubled = {apart.label: 2.0, together.label: 1.0}
    assert compared.shares(doubled) == pytest.approx({apart.label: 1.0, together.label: 0.625})
    assert compared.shares(doubled)[together.label] == pytest.approx(1 - rightness(compared.log_rates(doubled), 1)[1])
    assert compared.without([apart.label]).shares(doubled) == {together.label: 1.0}


def test_the_odds_of_keeping_to_a_limit_are_the_share_of_draws_that_keep_it():
    _, (apart, _) = two_arms()
    lag_DW, hours_DW = np.array([[1.0, 9.0], [2.0, 9.0], [3.0, 9.0], [4.0, 9.0]]), np.array([[8.0, 0.0]] * 4)
    compared = bets(np.zeros((4, 2)), lag_DW, hours_DW)
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
    log_DW = Bets.of(space.config, space.answers, [apart, together], draws_of()).log_rates({apart.label: 0.5})
    assert np.exp(log_DW)[0] == pytest.approx(screened() * [0.5, 0.75])  # of a kind without any: of all, and 1


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
