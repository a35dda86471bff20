"""The value of measurements: derivable for two ways whose log ratio is normal; and the commands that measure."""

import itertools
import math
import shlex
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from tiny_plan import TINY, two_arms, unknown_run

from pipelinerl.calibration.measured import Measured
from pipelinerl.config.check import CHECK_STEPS, check_config
from pipelinerl.config.run_file import load_run
from pipelinerl.hardware.prior import MEASURED_SD
from sim.planning.axes import all_choices
from sim.planning.candidates import Candidate, Screener, candidate_of
from sim.planning.draws import Unknown, make_draws
from sim.planning.instruments import MEASURE_MINUTES, START_MINUTES, Instruments
from sim.planning.measurements import chosen_after, explained, observations, values_of_measurements
from sim.planning.more_gpus import NOTHING
from sim.planning.search_space import SearchSpace
from sim.planning.uncertainty import Bets, rightness

EXAMPLE = Path(__file__).parents[3] / "examples" / "plan_qwen7b_128_h100.toml"
WORLDS = 4000
SD = 0.2


def normals(number, seed=0):
    return np.random.default_rng(seed).standard_normal((number, WORLDS))


def regret_after(known, log_DW):
    return rightness(log_DW, chosen_after(known, log_DW))[1]


def two_ways(ratio_D):
    return np.stack([ratio_D, np.zeros(WORLDS)], axis=1)


# ------------------------------------------------------------------------------------------------------- values


def test_a_measurement_of_half_the_variance_is_worth_what_the_normal_says():
    """Of r = a + b, each of SD: the sign of a loses (E|r| - E|a|) / 2 in logs, and E|N(0, s)| = s sqrt(2 / pi).

    Less by the curvature of the exponential, about a tenth at this SD, which the tolerance holds.
    """
    a_D, b_D = SD * normals(2)
    log_DW = two_ways(a_D + b_D)
    each = math.sqrt(2 / math.pi) * SD
    assert regret_after([], log_DW) == pytest.approx(math.sqrt(2) * each / 2, rel=0.15)
    assert regret_after([a_D], log_DW) == pytest.approx((math.sqrt(2) - 1) * each / 2, rel=0.2)
    assert explained([a_D], a_D + b_D) == pytest.approx(0.5, abs=0.05)


def test_all_that_is_unknown_together_is_worth_the_oracles_bound():
    """Where the ratio is a sum of what is measured, nothing is lost but ties within the gain that counts."""
    parts = SD * normals(3)
    log_DW = two_ways(parts.sum(axis=0))
    right, regret = rightness(log_DW, chosen_after(list(parts), log_DW))
    assert right > 0.98
    assert regret < 0.002


@pytest.mark.parametrize("seed", range(5))
def test_what_no_candidate_depends_on_is_worth_nothing(seed):
    """Noise is not predicted to gain more than the least gain, so the choice stays: exactly nothing."""
    ratio, noise_D = normals(2, seed=seed)
    log_DW = two_ways(0.1 + SD * ratio)
    assert regret_after([noise_D], log_DW) == regret_after([], log_DW)


@pytest.mark.parametrize("seed", range(5))
def test_a_measurement_never_costs_more_than_noise(seed):
    """Expected value of information is 0 at least; over draws it is off by 0.002 at most, for each of 5 seeds."""
    log_DW = SD * normals(6, seed=seed).T
    before = regret_after([], log_DW)
    for way in range(6):
        assert before - regret_after([log_DW[:, way]], log_DW) > -0.002
    assert before - regret_after(list(log_DW.T), log_DW) > 0.05
    assert regret_after(list(log_DW.T), log_DW) >= 0


def test_without_uncertainty_nothing_is_gained():
    log_DW = np.tile([0.0, -0.1], (WORLDS, 1))
    assert (chosen_after([normals(1)[0]], log_DW) == 0).all()
    assert regret_after([], log_DW) == 0


def test_measurements_are_ranked_with_the_best_pair_and_all():
    a_D, b_D, noise_D = SD * normals(3)
    shown = {Unknown.TRAINING: noise_D, Unknown.GENERATION: a_D, Unknown.SWITCH: b_D}
    rows = values_of_measurements(shown, two_ways(a_D + b_D), instruments(one_gpu=False))
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
    log_DW = Bets.of(space.config, space.answers, some, draws).log_rates({})
    ahead_D = log_DW[:, 0] - log_DW[:, 1]
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
