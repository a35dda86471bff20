"""The run file of a published run: a fraction of a cluster stands for all of it."""

import pytest
from published import changed, row

from pipelinerl.hardware.coefficients import Level, coefficients
from pipelinerl.hardware.derive import NOTHING_BESIDE, derive_training
from sim.batch import train_step_s
from sim.validation.reconstruct import reconstruct_run
from sim.validation.run_config import run_config


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
