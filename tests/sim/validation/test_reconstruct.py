"""A published run as a run of ours: filled up from its family, its hardware found, its assumptions listed."""

import pytest
from refusals import message

from pipelinerl.errors import ConfigError
from sim.validation.reconstruct import reconstruct_run
from sim.validation.rows import PublishedRun, Schedule


def run(**values):
    base = {
        "id": "a", "system": "s", "schedule": Schedule.SYNC, "hw": "H100", "model": "Qwen2.5-7B", "gpus_total": 8,
        "max_len": 4096, "prompts_per_step": 64,
    }  # fmt: skip
    return PublishedRun(**base | values)


def test_missing_workload_is_taken_from_the_family():
    """But for the mean answer, which is the row's own: 0.2 of the limit where it is not published."""
    nothing = {"max_len": None, "prompts_per_step": None}
    alone = run(schedule=Schedule.ASYNC, gpus_total=16, **nothing)
    sibling = run(id="b", gpus_total=16, avg_len=900.0, n_per_prompt=16, prompts_per_optimizer_step=16)
    with pytest.raises(ConfigError, match="neither max_len nor avg_len is published"):
        reconstruct_run(alone, [alone])
    rebuilt = reconstruct_run(alone, [alone, sibling])
    assert (rebuilt.longest_tokens, rebuilt.mean_tokens, rebuilt.sequences) == (4096, 819.2, 1024)
    assert rebuilt.optimizer_steps == 4
    assert (rebuilt.generating, rebuilt.assumed) == (8, ("bf16", "mean length", "half of the GPUs generate"))


def test_a_stated_number_of_answers_needs_no_prompts_of_the_family():
    stated = run(answers_per_step=512, prompts_per_step=None)
    sibling = run(id="b", prompts_per_step=16, n_per_prompt=8, gpus_per_sequence=4)
    rebuilt = reconstruct_run(stated, [stated, sibling])
    assert (rebuilt.sequences, rebuilt.published.n_per_prompt) == (512, None)
    assert rebuilt.published.gpus_per_sequence == 4
    assert reconstruct_run(stated, [stated]).published.gpus_per_sequence is None


@pytest.mark.parametrize(
    ("hw", "name", "assumed"),
    [
        ("H100", "H100", False),
        ("8x NVIDIA H200 SXM", "H200", False),
        ("GB200 NVL72", "GB200", False),
        ("Abacus", "H100", True),
        ("", "H100", True),
    ],
)
def test_a_gpu_is_found_by_its_name_within_words(hw, name, assumed):
    rebuilt = reconstruct_run(run(hw=hw), [])
    assert rebuilt.gpu.name == name
    assert any("H100" in words for words in rebuilt.assumed) is assumed


def test_without_the_size_of_the_cluster_or_its_steps_only_ratios_count():
    base = {"schedule": Schedule.ASYNC, "gpus_total": None}
    parts = reconstruct_run(run(**base, gpus_gen=24, gpus_train=8, step_s=9.0), [])
    assert (parts.accelerators, parts.generating, parts.scale_is_known) == (32, 24, True)
    assert not reconstruct_run(run(**base | {"gpus_total": 32}, total_h=9.0, steps=100), []).scale_is_known
    assert not reconstruct_run(run(**base, step_s=9.0), []).scale_is_known


@pytest.mark.parametrize(
    ("model", "gpus", "nearest"),
    [("Qwen9-31B-A3B", 32, "Qwen3-30B-A3B"), ("gemma-2-9b-it", 32, None), ("SmolLM-360M", 8, "Qwen2.5-0.5B")],
)
def test_a_model_that_is_not_catalogued_is_stood_in_for_by_the_nearest(model, gpus, nearest):
    rebuilt = reconstruct_run(run(model=model, gpus_total=gpus), [])
    assert f"{rebuilt.model.name} for {model}" in rebuilt.assumed
    assert nearest in (rebuilt.model.name, None)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("Frobnicator", "model 'Frobnicator' is not in the catalogue and has no size in its name, such as 7B or "),
        ("Frobnicator-8x7B", "model 'Frobnicator-8x7B' is not in the catalogue and has no size in its name"),
        ("", "model is not published"),
    ],
)
def test_a_model_of_unknown_size_is_refused(model, reason):
    assert message(reconstruct_run, run(model=model), []).startswith(reason)


def test_seconds_from_tokens_per_s_name_the_mean_length_behind_them():
    by_tokens = run(max_len=5000, tok_s_total=9000.0)
    assert reconstruct_run(by_tokens, []).assumed == (
        "8 answers per prompt", "bf16", "mean length of 1,000 tokens, by which tokens/s become seconds"
    )  # fmt: skip
    assert "mean length" in reconstruct_run(run(step_s=90.0), []).assumed
    assert "mean length" not in reconstruct_run(run(tok_s_total=9e3, avg_len=900.0), []).assumed[-1]
