"""Bayes' rule on a grid: interpolation, the prior alone, ratios alone, and the hypotheses."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from published import changed, row

from pipelinerl.hardware.coefficients import Level, coefficients
from pipelinerl.hardware.derive import NOTHING_BESIDE, derive_training
from sim.run import train_step_s
from sim.validation.predict import STEP, SimulationGrid, hypotheses_for, run_config, seconds_band
from sim.validation.reconstruct import reconstruct_run


def made_grid(step_s, *, scale=True):
    """A row whose step lasts step_s times the factor on generation, whatever the rest is."""
    run = row("made", "async", gpus_gen=4, gpus_train=4, step_s=step_s)
    rebuilt = replace(reconstruct_run(run, [run]), scale_is_known=scale)
    ratio = np.linspace(-1.4, 1.4, 5)
    log_RMQ = np.repeat((math.log(step_s) + ratio)[:, None, None], 3, axis=2)
    return SimulationGrid(rebuilt, False, log_RMQ)


def test_between_nodes_the_grid_is_linear_and_at_nodes_exact():
    grid = made_grid(10.0)
    for ratio in (-1.4, -0.3, 0.0, 0.35, 1.4, 2.0):
        assert grid.at(np.array([ratio]), np.zeros(1), STEP) == pytest.approx([math.log(10) + ratio])


def test_without_other_rows_the_prediction_is_the_model_and_its_own_uncertainty():
    band = seconds_band(made_grid(10.0), [])
    assert band.middle_s == pytest.approx(10.0, rel=0.02)
    assert math.log(band.high_s / band.middle_s) == pytest.approx(1.28 * math.hypot(0.35, 0.15), rel=0.1)


def test_the_rest_of_a_step_is_learnt_from_other_rows():
    """10 s of parts and 5 s besides; another row of 20 s of parts lasts 40: so the rest is four times as long."""
    grid = replace(made_grid(10.0), rest_s=5.0)
    reference = replace(made_grid(20.0), rest_s=5.0)
    measured = changed(reference.run.published, id="other", step_s=40.0)
    known = replace(reference, run=replace(reference.run, published=measured))
    alone, informed = (seconds_band(grid, references) for references in ([], [known]))
    assert 14 < alone.middle_s < 18  # the median of a sum is more than the sum of the medians
    assert 22 < informed.middle_s < 31
    assert informed.high_s / informed.low_s < alone.high_s / alone.low_s


def test_of_an_unknown_scale_only_ratios_count():
    twice = made_grid(20.0, scale=False)
    reference = made_grid(10.0, scale=False)
    measured = changed(reference.run.published, id="other", step_s=7.0)
    known = replace(reference, run=replace(reference.run, published=measured))
    assert seconds_band(twice, [known]).middle_s == pytest.approx(14.0)


def test_hypotheses_are_every_combination_once():
    some = hypotheses_for([made_grid(10.0)])
    triples = {*zip(some.generation_P, some.training_P, some.mean_P, strict=True)}
    assert len(triples) == len(some.log_prior_P)
    assert some.log_prior_P.max() == 0.0


# The run file of a published run: a fraction of a cluster stands for all of it.


def test_a_fraction_of_a_cluster_waits_for_the_longest_of_the_whole():
    """2048 sequences on 512 GPUs, simulated as 1024 on 256: an optimizer step lasts as if none were left out."""
    many = {"gpus_total": 512, "prompts_per_step": 256, "max_len": 8192, "avg_len": 1000.0}
    wide = row("wide", "sync", **many, gpus_per_sequence=1)
    rebuilt = reconstruct_run(wide, [wide])
    scales = {"generation": 1.0, "mean_tokens": 1000.0, "rl_steps": 1, "training_given": False}
    config = run_config(rebuilt, training=1.0, weights=True, **scales)
    assert (config.cluster.accelerators, config.scheduler.train_batch_size) == (256, 1024)
    whole = config.model_copy(
        update={
            "cluster": config.cluster.model_copy(update={"accelerators": 512}),
            "scheduler": config.scheduler.model_copy(update={"train_batch_size": 2048}),
            "hardware": config.hardware.model_copy(
                update={"training": derived_training(rebuilt, accelerators=512, shared=1)}
            ),
        }
    )
    assert train_step_s(config) == pytest.approx(train_step_s(whole), rel=0.05)
    shared = changed(wide, gpus_per_sequence=8)
    divided = run_config(reconstruct_run(shared, [shared]), training=1.0, weights=True, **scales).hardware.training
    assert divided.step_s < 0.7 * config.hardware.training.step_s
    slower = run_config(rebuilt, training=2.0, weights=True, **scales).hardware.training
    assert slower.step_s == pytest.approx(2 * config.hardware.training.step_s)


def derived_training(rebuilt, *, accelerators, shared):
    known = {**NOTHING_BESIDE, "extra_forward_passes": 1.0, "sequence_accelerators": float(shared)}
    return derive_training(
        rebuilt.gpu, rebuilt.model, training_accelerators=accelerators, coefficients=coefficients(Level.CENTRAL, known)
    )
