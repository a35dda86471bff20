"""A plan that knows its own uncertainty, from end to end: measurements make it surer, and right."""

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
from tiny_plan import TINY, UNKNOWN, candidates_of, planned, two_arms, unknown_run

from pipelinerl.calibration.measured import Measured
from pipelinerl.config.question import Assumption
from pipelinerl.config.run import check_config, load_run
from pipelinerl.hardware import prior
from pipelinerl.hardware.transport import WeightTransferConfig
from pipelinerl.records.plan_report import PlanReport
from pipelinerl.theory.lengths import LengthStatistics, uniform_lengths
from sim.planning.certainty import (
    MEASURE_MINUTES,
    START_MINUTES,
    DrawnCandidates,
    Draws,
    Unknown,
    _threshold,
    ahead,
    chosen_after,
    effects_of,
    explained,
    fewest,
    instruments_of,
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
from sim.planning.screen import Screener
from sim.planning.space import Limits, SearchSpace
from sim.run import simulate

TRUTH = "hardware.coefficients={sync_s_per_root_gb=6.0, kv_efficiency=0.6, training_mfu=0.5}"
"""A system whose weights take 10 s, five times as long as in the hardware model."""


@cache
def before() -> PlanReport:
    return planned(UNKNOWN)


def checked(kind: str, folder: Path) -> Path:
    """Return the folder of a check of the true system, as `train --check` leaves one."""
    config = check_config(unknown_run(f"scheduler.kind={kind}", TRUTH))
    simulate(config, out=folder / kind, trace=True)
    return folder / kind


@pytest.mark.slow
def test_measurements_make_a_plan_surer_and_right(tmp_path):
    """Checks of both arms turn the plan to the schedule that is the best in truth."""
    pipeline, conventional = checked("pipeline", tmp_path), checked("conventional", tmp_path)
    plans = [before(), *(planned(UNKNOWN, measured=some) for some in ((pipeline,), (pipeline, conventional)))]
    truth = planned(UNKNOWN, TRUTH).recommended
    assert [one.recommended.family for one in plans] == ["pipeline", "conventional", "conventional"]
    assert plans[2].recommended.label == truth.label
    best = plans[2].recommended
    assert best.tokens_per_s == pytest.approx(best.simulated_tokens_per_s, rel=0.15)
    assert best.simulated_tokens_per_s == pytest.approx(truth.simulated_tokens_per_s, rel=0.1)

    first, second, third = (one.certainty for one in plans)
    assert third.right > 0.95 > first.right
    assert third.regret < min(first.regret, second.regret)
    for name, sd in first.unknown.items():
        assert second.unknown[name] <= sd or name == "weight transfer of synchronous RL"
        assert third.unknown[name] <= second.unknown[name]
    assert first.asynchronous.faster > second.asynchronous.faster > 0.1 > third.asynchronous.faster


@pytest.mark.slow
def test_a_plan_of_one_arm_is_compared_with_the_other_by_the_screening():
    assert planned("plan.schedulers=['pipeline']").certainty.asynchronous is not None
    assert planned("plan.schedulers=['conventional']").certainty.asynchronous is None


# Draws, the throughput of candidates in them, and the odds that follow.

NORMAL = NormalDist()
NUMBERS = "hardware={decode={kind='affine', step_s=0.01}, training={token_s=1e-4}}"
ARMS = [one.label for one in two_arms()[1]]


def at_quantiles(number):
    return np.array([NORMAL.inv_cdf((part + 0.5) / number) for part in range(number)])


def draws_of(number=1, **logs):
    """Draws in which some factors have these logs, and all others are known."""
    values_D = {name.value: np.broadcast_to(logs.get(name.name, 0.0), number) for name in Unknown}
    return Draws(values_D, dict.fromkeys(Unknown, 0.0))


def drawn(log_DC, *, draws=None, lag_DC=0.0, hours_DC=0.0, factors=(1.0, 1.0)):
    """A pipeline and a conventional candidate with these rates in every draw."""
    numbers_3DC = np.stack(np.broadcast_arrays(log_DC, lag_DC, hours_DC))
    factors = dict(zip(ARMS, factors, strict=True))
    return DrawnCandidates(draws or draws_of(len(log_DC)), two_arms()[1], numbers_3DC, factors)


def rates(factors=None, **logs):
    """Throughput of both candidates in a draw, over the screened throughput."""
    space, some = two_arms()
    screener = Screener(space.config, space.answers)
    in_draw = replace(DrawnCandidates.of(space, some, draws_of(**logs)), factors=factors or {})
    return np.exp(in_draw.log_rates)[0] / [screener.screen(one).tokens_per_s for one in some]


# ------------------------------------------------------------------------------------------------------- odds


@pytest.mark.parametrize(("mean", "sd"), [(0.0, 0.2), (0.1, 0.2), (-0.1, 0.3), (0.02, 0.01)])
def test_two_candidates_whose_log_ratio_is_normal_are_right_with_the_normals_probability(mean, sd):
    """Within a tie: P(r >= log(1 - TIE)) = Phi((mean - log(1 - TIE)) / sd), to the 1 / 4000 that quantiles leave.

    The regret is 1 - E[exp r] / E[max(exp r, 1)] of a normal r.
    """
    right, regret = rightness(np.stack([mean + sd * at_quantiles(4000), np.zeros(4000)], axis=1), 0)
    assert right == pytest.approx(NORMAL.cdf((mean - math.log(1 - TIE)) / sd), abs=2 / 4000)
    own = math.exp(mean + sd**2 / 2)
    fastest = NORMAL.cdf(-mean / sd) + own * NORMAL.cdf(mean / sd + sd)
    assert regret == pytest.approx(1 - own / fastest, abs=3e-4)


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


def test_the_mean_share_of_the_fastest_is_one_less_the_regret():
    """10 and 5, 10 and 20 tokens/s: means of 10 and 12.5, of the fastest 15; of 20 and 5, 20 and 20: 20, 12.5 of 20."""
    log_DC = np.log([[10.0, 5.0], [10.0, 20.0]])
    doubled = drawn(log_DC, factors=(2.0, 1.0))
    assert list(drawn(log_DC).shares.values()) == pytest.approx([10 / 15, 12.5 / 15])
    assert doubled.shares == pytest.approx(dict(zip(ARMS, (1.0, 0.625), strict=True)))
    assert doubled.shares[ARMS[1]] == pytest.approx(1 - rightness(doubled.log_rates, 1)[1])
    assert doubled.without(ARMS[0]).shares == {ARMS[1]: 1.0}


@pytest.mark.parametrize(("mean", "sd"), [(0.2, 0.3), (-0.3, 0.5)])
def test_published_pairs_count_as_an_observation_of_the_log_ratio(mean, sd):
    """Two normals: the precisions add up, and the mean is theirs by precision; 4000 quantiles leave 0.02."""
    log_DC = np.stack([mean + sd * at_quantiles(4000), np.zeros(4000)], axis=1)
    after = drawn(log_DC, draws=draws_of(4000)).with_evidence()
    precisions = np.array([sd, prior.PAIRS_SD]) ** -2.0
    ahead_D = ahead(after.candidates, after.log_rates)
    assert ahead_D.mean() == pytest.approx(precisions @ [mean, prior.PAIRS_MEAN] / precisions.sum(), abs=0.02)
    assert ahead_D.std() == pytest.approx(precisions.sum() ** -0.5, rel=0.05)


def test_without_both_kinds_published_pairs_say_nothing():
    one = drawn(np.log([[10.0, 5.0], [10.0, 20.0]])).without(ARMS[0])
    assert one.with_evidence() is one


def line_of(slope, cross, number=400):
    """Draws of one unknown whose log decides the ratio: asynchronous RL is faster where slope (x - cross) > 0."""
    value_D = 0.5 * at_quantiles(number)
    draws = draws_of(number, TRAINING=value_D)
    return _threshold(slope * (value_D - cross), Unknown.TRAINING, draws, 10.0, "s")


@pytest.mark.parametrize("slope", [2.0, -0.5])
def test_the_threshold_is_where_the_kinds_are_as_fast(slope):
    found = line_of(slope, math.log(1.3))
    assert found.value == pytest.approx(13.0)
    assert found.asynchronous_below is (slope < 0)
    assert (found.expected, found.band.low) == pytest.approx((10.0, 10 * math.exp(-0.5 * prior.END_SDS)), rel=0.01)
    assert line_of(slope, 1.0) is None  # twice the spread away: nobody will find it there


def test_the_odds_of_keeping_to_a_limit_are_the_share_of_draws_that_keep_it():
    lags, hours = [[1.0, 9.0], [2.0, 9.0], [3.0, 9.0], [4.0, 9.0]], [[8.0, 0.0]] * 4

    def keeps(factor=1.0, staler=1.0, **limits):
        compared = drawn(np.zeros((4, 2)), lag_DC=lags, hours_DC=hours, factors=(factor, 1.0))
        return compared.keeps(ARMS[0], Limits(lag=3, **limits), staler=staler)

    assert keeps() is None
    assert keeps(mean_lag=3.5) == 0.75
    assert keeps(mean_lag=3.5, staler=2.0) == 0.25
    assert keeps(gpu_hours=8.0) == 1.0
    assert keeps(gpu_hours=8.0, factor=1 / 1.1) == 0.0


def test_memory_suffices_as_a_normal_error_has_it():
    assert memory_suffices([0.5, 1.0]) == 0.5
    assert memory_suffices([0.8, 0.2]) == pytest.approx(NORMAL.cdf(-math.log(0.8) / prior.MEMORY_SD))
    assert memory_suffices([0.5]) > 0.999


def test_the_memory_that_a_run_needs_is_counted_by_hand():
    """1.544e9 parameters: an engine holds 2 bytes each and 320 tokens of 28,672 bytes; a trainer 16 bytes each."""

    def needed(*overrides):
        config = unknown_run(*overrides)
        return SearchSpace.of(config).memory.needed_shares(config)

    memory = two_arms()[0].memory
    parameters, usable = memory.model.parameters, 0.9 * memory.gpu.memory_bytes
    engine, trainer = needed()
    assert engine * usable == pytest.approx(3.76e9 + 2 * parameters + 320 * 28672)
    assert trainer * usable > 16 * parameters / 2
    in_fp8, same = needed("hardware.engine_weights=fp8", "hardware.kv_cache=fp8")
    assert in_fp8 * usable == pytest.approx(3.76e9 + parameters + 320 * 28672 / 2)
    assert same == trainer
    assert needed(NUMBERS) is None


# ------------------------------------------------------------------------------------------------------ draws


def spreads_of(*overrides, guessed=(), **measured):
    return spreads(unknown_run(*overrides), Measured(**measured), guessed)


def test_a_system_that_nobody_has_measured_is_as_uncertain_as_the_prior():
    assert prior.SYNC_SD == prior.SYNC_ARM_SD  # half of the variance for either
    assert spreads_of() == pytest.approx(
        {
            Unknown.GENERATION: prior.GENERATION_SD,
            Unknown.TRAINING: prior.TRAINING_SD,
            Unknown.WEIGHTS: prior.SYNC_SD,
            Unknown.WEIGHTS_APART: prior.SYNC_ARM_SD,
            Unknown.WEIGHTS_COLOCATED: prior.SYNC_ARM_SD,
            Unknown.SWITCH: 0.7,
            Unknown.ANSWERS: prior.ANSWERS_SD,
            Unknown.RUN_APART: prior.RUN_SD,
            Unknown.RUN_COLOCATED: prior.RUN_SD,
        }
    )


MEASURED = prior.MEASURED_SD
GUESSED = ["workload.length.mean"]
ENGINE = "hardware.engine=vllm-0.32"
RESHARD = "hardware.weight_sync=reshard"
SHARE = math.log(0.63 / 0.06) / math.log(8.8 / 0.15)
TRAIN = "train={model={path='m'}, task={name='math', settings={}}, optimizer={learning_rate=1e-6}}"
TABLE = WeightTransferConfig(publish_s=1.0)


def weights(*sds):
    """Spreads of the transfer: common to both arms, asynchronous, synchronous."""
    return dict(zip((Unknown.WEIGHTS, Unknown.WEIGHTS_APART, Unknown.WEIGHTS_COLOCATED), sds, strict=True))


@pytest.mark.parametrize(
    ("overrides", "options", "known"),
    [
        pytest.param([], {"guessed": GUESSED}, {Unknown.ANSWERS: prior.MEAN_SD}, id="a guess is believed less"),
        pytest.param([], {"guessed": GUESSED, "answers": True}, {Unknown.ANSWERS: MEASURED}, id="until measured"),
        ([ENGINE], {}, {Unknown.GENERATION: prior.ENGINE_SD}),
        pytest.param([ENGINE], {"guessed": ["hardware.engine"]}, {}, id="an assumed engine is not known"),
        pytest.param(["hardware.software=verl"], {},
            weights(0, prior.SYNC_SD * math.sqrt(2) * math.log(1.6 / 0.31) / math.log(8.8 / 0.15),
                prior.SYNC_SD * math.sqrt(2) * math.log(2.2 / 0.34) / math.log(8.8 / 0.15))
            | {Unknown.SWITCH: math.log(5 / 0.2) / (2 * prior.END_SDS)},
            id="rdma apart and refit colocated have nothing in common"),
        (["hardware.coefficients={kv_efficiency=0.8}"], {}, {Unknown.GENERATION: MEASURED}),
        (["hardware.training={token_s=1e-4}"], {}, {Unknown.TRAINING: MEASURED}),
        (["hardware.coefficients={training_mfu=0.5}"], {}, {Unknown.TRAINING: MEASURED}),
        (["hardware.switch={to_training_s=3.0}"], {}, {Unknown.SWITCH: MEASURED}),
        (["hardware.coefficients={sync_s_per_root_gb=2.0}"], {}, weights(MEASURED, 0, 0)),
        ([NUMBERS], {}, dict.fromkeys((Unknown.GENERATION, Unknown.TRAINING, Unknown.SWITCH), MEASURED)
            | weights(MEASURED, 0, 0)),
        pytest.param([RESHARD], {}, weights(prior.SYNC_SD * SHARE, *[prior.SYNC_ARM_SD * SHARE] * 2),
            id="shard to shard has 0.06 to 0.63, all methods 0.15 to 8.8"),
        pytest.param([TRAIN], {}, weights(0, *(math.log(ratio) / (2 * prior.END_SDS) for ratio in (1.5 / 0.17, 8))),
            id="our transports have 0.17 to 1.5 of a delta, 0.25 to 2 of a file, and nothing in common"),
        pytest.param([TRAIN, RESHARD], {}, weights(prior.SYNC_SD * SHARE, *[prior.SYNC_ARM_SD * SHARE] * 2),
            id="a named method counts before our transport"),
        pytest.param([], {"weights": {False: TABLE}},
            weights(0, MEASURED, math.hypot(prior.SYNC_SD, prior.SYNC_ARM_SD)), id="the other arm stays as it was"),
        ([], {"weights": {False: TABLE, True: TABLE}}, weights(0, MEASURED, MEASURED)),
        (["hardware.weights={publish_s=1.0}"], {}, weights(MEASURED, 0, prior.SYNC_ARM_SD)),
    ],
)  # fmt: skip
def test_a_value_of_the_run_file_or_a_measurement_narrows_its_own_spread_only(overrides, options, known):
    assert spreads_of(*overrides, **options) == pytest.approx({**spreads_of(), **known})


def draws_for(*overrides, **options):
    return make_draws(unknown_run(*overrides), Measured(), **options)


def test_draws_have_the_spreads_and_are_the_same_for_a_seed():
    draws, again, other = draws_for(), draws_for(), draws_for("seed=1")
    for name, sd in spreads_of().items():
        assert draws.values_D[name].mean() == pytest.approx(0, abs=1e-12)
        assert draws.values_D[name].std() == pytest.approx(sd, rel=0.01)
        assert (again.values_D[name] == draws.values_D[name]).all()
    assert (other.values_D[Unknown.TRAINING] != draws.values_D[Unknown.TRAINING]).any()


def test_a_stated_coefficient_is_not_drawn_and_leaves_the_other_draws_alone():
    free, stated = (draws_for(*some).values_D for some in ([], ["hardware.coefficients={kv_efficiency=0.8}"]))
    assert set(free) - set(stated) == {"kv_efficiency"}
    assert (free["weight_efficiency"] == stated["weight_efficiency"]).all()
    assert "recomputation" not in free
    assert set(draws_for(NUMBERS).values_D) == set(Unknown)


def test_simulations_correct_the_screening_of_a_candidate_or_else_of_its_kind():
    """A kind without any simulation has the mean of all, and 1."""
    assert rates() == pytest.approx([1.0, 1.0])
    assert rates({ARMS[0]: 0.5}) == pytest.approx([0.5, 0.75])


@pytest.mark.parametrize(
    ("logs", "apart", "together"),
    [
        ({"RUN_APART": 2}, 1 / 2, 1.0),
        ({"RUN_COLOCATED": 2}, 1.0, 1 / 2),
        (dict.fromkeys(("GENERATION", "TRAINING", "WEIGHTS", "SWITCH"), 2), 1 / 2, 1 / 2),
        ({"WEIGHTS_COLOCATED": 3}, 1.0, None),
        ({"SWITCH": 3}, 1.0, None),
        ({"GENERATION": 3}, None, None),
        ({"TRAINING": 3}, None, None),
        ({"WEIGHTS": 3}, None, None),
    ],
)
def test_factors_move_their_own_times_only(logs, apart, together):
    """None: the arm gets slower."""
    drawn = rates(**{name: math.log(factor) for name, factor in logs.items()})
    if apart is not None:
        assert drawn[0] == pytest.approx(apart, rel=1e-6)
    assert drawn[1] < 0.999 if together is None else drawn[1] == pytest.approx(together, rel=1e-6)


def test_longer_answers_are_as_much_longer_and_cut_at_the_limit():
    answers = LengthStatistics(uniform_lengths(1000), prompt_tokens=20, group_wait=10)
    twice = longer_answers(answers, 2.0, longest=5000)
    assert twice.mean == pytest.approx(2 * answers.mean, rel=1e-3)
    assert (twice.lengths.max_tokens, twice.group_wait, twice.prompt_tokens) == (2000, 20, 20)
    assert longer_answers(answers, 0.5, longest=5000).mean == pytest.approx(answers.mean / 2, rel=2e-3)
    cut = longer_answers(answers, 2.0, longest=1000)
    assert cut.lengths.max_tokens == 1000
    assert cut.mean == pytest.approx(750, rel=2e-3)  # half of them are cut


# The value of measurements: derivable for two candidates whose log ratio is normal; and the commands that measure.

EXAMPLE = Path(__file__).parents[3] / "examples" / "plan_qwen7b_128_h100.toml"
SD = 0.2


def normals(number, seed=0):
    return np.random.default_rng(seed).standard_normal((number, 4000))


def regret_after(known, log_DC):
    return rightness(log_DC, chosen_after(known, log_DC))[1]


def two_candidates(ratio_D):
    return np.stack([ratio_D, np.zeros(len(ratio_D))], axis=1)


# ------------------------------------------------------------------------------------------------------- values


def test_a_measurement_of_half_the_variance_has_the_value_of_the_normal():
    """Of r = a + b, each of SD, and a rate of 1 beside exp(r): E[exp r] = exp(SD^2), and if a is known

    Phi(-SD / 2) + exp(SD^2) Phi(3 SD / 2); both over E[max(exp r, 1)] = 1/2 + exp(SD^2) Phi(SD sqrt 2).
    """
    a_D, b_D = SD * normals(2)
    log_DC = two_candidates(a_D + b_D)
    mean = math.exp(SD**2)
    fastest = 0.5 + mean * NORMAL.cdf(SD * math.sqrt(2))
    known = NORMAL.cdf(-SD / 2) + mean * NORMAL.cdf(1.5 * SD)
    assert regret_after([], log_DC) == pytest.approx(1 - mean / fastest, rel=0.1)
    assert regret_after([a_D], log_DC) == pytest.approx(1 - known / fastest, rel=0.1)
    assert explained([a_D], a_D + b_D) == pytest.approx(0.5, abs=0.05)


def test_all_unknowns_together_are_worth_the_oracles_bound():
    """Where the ratio is a sum of measured values, nothing is lost but ties within the gain that counts."""
    parts = SD * normals(3)
    log_DC = two_candidates(parts.sum(axis=0))
    right, regret = rightness(log_DC, chosen_after(list(parts), log_DC))
    assert right > 0.98
    assert regret < 0.002


@pytest.mark.parametrize("seed", range(5))
def test_a_measurement_that_no_candidate_depends_on_is_worth_nothing(seed):
    """Noise is not predicted to gain more than the least gain, so the choice stays: exactly nothing."""
    ratio, noise_D = normals(2, seed=seed)
    log_DC = two_candidates(0.03 + SD * ratio)
    assert regret_after([noise_D], log_DC) == regret_after([], log_DC)


@pytest.mark.parametrize("seed", range(5))
def test_a_measurement_never_costs_more_than_noise(seed):
    """Expected value of information is 0 at least; over draws it is off by 0.002 at most, for each of 5 seeds."""
    log_DC = SD * normals(6, seed=seed).T
    before, after = regret_after([], log_DC), regret_after(list(log_DC.T), log_DC)
    for place in range(6):
        assert before - regret_after([log_DC[:, place]], log_DC) > -0.002
    assert before - after > 0.05
    assert after >= 0


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


def observed(*overrides, colocated=(True, False), number=40):
    """Draws of a run file with overrides, and the times that measurements show in them."""
    space = replace(two_arms()[0], config=unknown_run(*overrides))
    draws = make_draws(space.config, Measured(), number=number)
    return draws, observations(space, draws, two_arms()[1][0], colocated=colocated)


def test_only_unknowns_of_the_arms_compared_are_measured():
    everything = {
        Unknown.GENERATION, Unknown.TRAINING, Unknown.WEIGHTS_APART, Unknown.WEIGHTS_COLOCATED, Unknown.SWITCH,
        Unknown.ANSWERS,
    }  # fmt: skip
    assert set(observed()[1]) == everything
    assert set(observed(colocated=(False,))[1]) == everything - {Unknown.WEIGHTS_COLOCATED, Unknown.SWITCH}
    for token_s in (1e-4, 0):  # a log of 0 seconds would be a warning
        assert set(observed(f"hardware.training={{token_s={token_s}}}")[1]) == everything - {Unknown.TRAINING}


def test_a_measurement_shows_its_time_with_the_error_of_measurements():
    draws, shown = observed(number=400)
    error_D = shown[Unknown.ANSWERS] - draws.values_D[Unknown.ANSWERS]
    assert error_D.std() == pytest.approx(prior.MEASURED_SD, rel=0.15)
    step_D, factor_D = shown[Unknown.GENERATION], draws.values_D[Unknown.GENERATION]
    assert np.corrcoef(step_D, factor_D)[0, 1] > 0.85  # its coefficients vary too


def test_the_transfer_of_the_weights_decides_between_the_arms_of_the_small_run():
    """A synchronization of 2 s in steps of half a second: nothing else explains as much of the difference."""
    draws, shown = observed(number=400)
    log_DC = DrawnCandidates.of(*two_arms(), draws).log_rates
    shares = {name: explained([known_D], log_DC[:, 0] - log_DC[:, 1]) for name, known_D in shown.items()}
    assert max(shares, key=shares.get) in (Unknown.WEIGHTS_APART, Unknown.WEIGHTS_COLOCATED, Unknown.SWITCH)
    assert min(shares.values()) >= 0
    assert max(shares.values()) <= 1


# ------------------------------------------------------------------------------------------------------ commands


def instruments(space=None, some=None, *, file="runs/mine.toml", one_gpu=True, whole=True):
    space, some = space or two_arms()[0], some or two_arms()[1]
    arms = {one.config.colocated: one for one in some}
    return instruments_of(space.config, file, arms, Screener(space.config, space.answers), whole=whole, one_gpu=one_gpu)


def overrides_in(words):
    return [value for name, value in itertools.pairwise(words) if name == "--set"]


def test_without_a_train_table_commands_take_numbers():
    some = instruments()
    measure = "pipelinerl measure --model MODEL_FOLDER --out measured"
    assert fewest(some, [Unknown.GENERATION]) == ([measure], MEASURE_MINUTES, 1)
    calibrate = "pipelinerl calibrate --run runs/mine.toml --train-step-s SECONDS --out measured_step.toml"
    assert fewest(some, [Unknown.TRAINING]) == ([calibrate], None, None)
    assert fewest(some, [Unknown.ANSWERS]) == ([], None, None)


def test_a_question_without_a_split_is_measured_with_that_of_the_plan(command, tmp_path):
    """The command runs as it stands, but for the seconds: the question has neither split nor H."""
    question, out = tmp_path / "question.toml", tmp_path / "measured_sync.toml"
    tables = {**TINY, "hardware": {"gpu": "H100", "model": "Qwen2.5-1.5B"}, "cluster": {"accelerators": 4}}
    question.write_text(tomli_w.dumps({**tables, "scheduler": {"train_batch_size": 8}}))
    ((asked,), _, _) = fewest(instruments(file=str(question), whole=False), [Unknown.WEIGHTS_APART])
    words = shlex.split(asked.replace("SECONDS", "5").replace(out.name, str(out)))
    result = command(*words[1:])
    assert (result.status, result.err) == (0, "")
    assert out.exists()
    made = load_run(question, overrides_in(words))
    assert made.generation_accelerators == two_arms()[1][0].config.generation_accelerators


@cache
def of_the_example():
    space = SearchSpace.of(load_run(EXAMPLE))
    some = candidates_of(space)
    return {one.config.colocated: one.config for one in some}, instruments(space, some, file=str(EXAMPLE))


def test_a_check_is_a_command_ready_to_run_that_makes_the_run_it_names():
    arms, some = of_the_example()
    for shown, colocated in ((Unknown.WEIGHTS_APART, False), (Unknown.SWITCH, True)):
        (command,), minutes, gpus = fewest(some, [shown])
        words = shlex.split(command)
        assert words[:4] == ["pipelinerl", "train", str(EXAMPLE), "--check"]
        made, config = load_run(EXAMPLE, overrides_in(words)), arms[colocated]
        assert made.cluster.tensor_parallel == config.cluster.tensor_parallel
        assert made.generation_accelerators == config.generation_accelerators
        same = {"kind", "generation_batch_size", "train_batch_size", "publish_every", "optimizer_steps_per_rl_step"}
        assert made.scheduler.model_dump(include=same) == config.scheduler.model_dump(include=same)
        assert gpus == 128
        assert START_MINUTES < minutes < 60


def test_a_check_of_a_candidate_that_leaves_gpus_idle_runs_on_the_others():
    sets = ["cluster.accelerators=61", "cluster.generation_accelerators=30"]
    config = load_run(EXAMPLE, [*sets, "plan={schedulers=['conventional'], tensor_parallel=[4]}"])
    space = SearchSpace.of(config)
    first = candidates_of(space)[0]
    file = shlex.join([str(EXAMPLE), *(word for one in sets for word in ("--set", one))])
    (command,), _, gpus = fewest(instruments(space, [first], file=file, one_gpu=False), [Unknown.SWITCH])
    made = load_run(EXAMPLE, overrides_in(shlex.split(command)))
    assert (made.num_engines, first.idle, gpus) == (15, 1, 60)


def test_the_fewest_commands_are_taken_and_both_checks_where_one_does_not_show_all():
    _, some = of_the_example()
    assert len(fewest(some, [Unknown.GENERATION, Unknown.TRAINING])[0]) == 1
    both, minutes, gpus = fewest(some, [Unknown.WEIGHTS_APART, Unknown.WEIGHTS_COLOCATED])
    assert ["--check" in command for command in both] == [True, True]
    assert minutes > 2 * START_MINUTES
    assert gpus == 128


def test_a_check_publishes_at_each_of_its_steps_and_evaluates_nothing():
    config = check_config(load_run(EXAMPLE, ["scheduler.publish_every=8", "train.evaluation.problems=7"]))
    assert (config.scheduler.publish_every, config.train.evaluation.problems, config.plan) == (1, 0, None)
    assert check_config(load_run(EXAMPLE, ["optimizer_steps=2"])).optimizer_steps == 2


# ------------------------------------------------------------------- bands, sensitivity and what-ifs of the same draws

EVENLY_D = at_quantiles(400)


def test_a_band_holds_eight_of_ten_draws():
    band = drawn(np.log([[float(rate), 1.0] for rate in range(1, 12)])).band(ARMS[0])
    assert (band.low, band.high) == pytest.approx((2.0, 10.0))


def test_the_effect_of_an_unknown_is_found_beside_that_of_another():
    """Rates fall by 0.2 and rise by 0.1 with one standard deviation of each; a draw moves both."""
    other_D = np.random.default_rng(1).permutation(EVENLY_D)
    draws = draws_of(400, GENERATION=0.5 * EVENLY_D, TRAINING=0.3 * other_D)
    rate_D = -0.2 * EVENLY_D + 0.1 * other_D
    rows = sensitivity(drawn(np.stack([rate_D, rate_D - 1], axis=1), draws=draws), ARMS[0], least=0.06)
    assert [row.unknown for row in rows] == ["decode step", "optimizer step"]
    assert (rows[0].low, rows[0].high) == pytest.approx((math.exp(0.2563), math.exp(-0.2563)), rel=0.01)
    assert (rows[1].low, rows[1].high) == pytest.approx((math.exp(-0.1282), math.exp(0.1282)), rel=0.01)
    assert not any(row.changes_decision for row in rows)


def test_the_decision_at_an_end_is_that_of_the_draws_there():
    """The second candidate is as fast in the mean, and ahead where the unknown is large."""
    draws = draws_of(400, GENERATION=EVENLY_D)
    (row,) = sensitivity(drawn(np.stack([-EVENLY_D, EVENLY_D], axis=1), draws=draws), ARMS[0], least=0.06)
    assert (row.instead_low, row.instead_high) == (None, ARMS[1])


def test_another_value_of_an_assumption_is_read_from_the_draws():
    """Rates go with the mean answer: half of it gives half. Draws hold nothing of the other key."""
    draws = draws_of(400, ANSWERS=0.5 * EVENLY_D)
    assumed = [Assumption("workload.group_size", 8, (1,)), Assumption("workload.length.mean", 1000, (500, 2000))]
    log_DC = np.stack([0.5 * EVENLY_D, -0.5 * EVENLY_D], axis=1)
    mean, group = effects_of(assumed, drawn(log_DC, draws=draws), ARMS[0])
    assert (group.key, group.instead) == ("workload.group_size", [])
    assert [one.throughput for one in mean.instead] == pytest.approx([0.5, 2.0])
    assert [one.fastest for one in mean.instead] == ["conventional", None]
