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
    ("hw", "name"),
    [("H100", "H100"), ("8xH100", "H100"), ("8x NVIDIA H200 SXM", "H200"), ("GB200 NVL72", "GB200"), ("h20", "H20")],
)
def test_a_gpu_is_found_by_its_name_within_words(hw, name):
    rebuilt = reconstruct_run(run(hw=hw), [])
    assert (rebuilt.gpu.name, rebuilt.doubts) == (name, ())


@pytest.mark.parametrize("hw", ["Ascend 910", "A800", "GH200", "H800+H20", "not stated"])
def test_another_accelerator_or_several_are_refused(hw):
    expected = f"hw must name one GPU of the catalogue, or none if none is published, got {hw!r}; known: H100, "
    assert message(reconstruct_run, run(hw=hw), []).startswith(expected)


def test_without_a_gpu_it_is_an_h100_with_twice_the_spread():
    rebuilt = reconstruct_run(run(hw=""), [])
    assert rebuilt.gpu.name == "H100"
    assert rebuilt.doubts == ("H100, as no GPU is published: simulated bands are 2 times as wide",)
    assert rebuilt.assumed[-1:] == rebuilt.doubts
    assert (rebuilt.spread_factor, reconstruct_run(run(), []).spread_factor) == (2.0, 1.0)


@pytest.mark.parametrize("values", [{"algo": "PPO"}, {"algo": "VC-PPO"}, {"features": "LoRA, a critic"}])
def test_a_critic_is_refused(values):
    assert message(reconstruct_run, run(**values), []).endswith(": training and memory of a critic are not simulated")


@pytest.mark.parametrize(
    "values", [{"algo": "DRPO/DAPO"}, {"algo": "GRPO without critic"}, {"features": "critic-free"}]
)
def test_an_algorithm_without_a_critic_is_not(values):
    assert reconstruct_run(run(**values), []).gpu.name == "H100"


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"features": "LoRA, rank 32"}, ("LoRA", "rank 32")),
        ({"features": "multi-token prediction; frobnication"}, ("multi-token prediction", "frobnication")),
        ({"features": "fsdp2, partial rollouts"}, ()),
        ({"mode": "sync speculative decoding"}, ("multi-token prediction",)),
        ({"mode": "sync agentic SWE-bench"}, ("environments",)),
        ({"note": "CPU Adam, generation per micro-batch"}, ("CPU optimizer", "generation per micro-batch")),
        ({"note": "no LoRA, without speculative decoding, exploration"}, ()),
    ],
)
def test_features_that_are_not_simulated_widen_the_bands_and_make_another_system(values, names):
    one = run(**values)
    rebuilt = reconstruct_run(one, [])
    assert rebuilt.doubts == tuple(f"{name} is not simulated: simulated bands are 2 times as wide" for name in names)
    assert rebuilt.spread_factor == (2.0 if names else 1.0)
    assert one.family == (", ".join(("s", *names)), "H100", "Qwen2.5-7B")


def test_without_the_size_of_the_cluster_or_its_steps_only_ratios_count():
    base = {"schedule": Schedule.ASYNC, "gpus_total": None}
    parts = reconstruct_run(run(**base, gpus_gen=24, gpus_train=8, step_s=9.0), [])
    assert (parts.accelerators, parts.generating, parts.scale_is_known) == (32, 24, True)
    assert not reconstruct_run(run(**base | {"gpus_total": 32}, total_h=9.0, steps=100), []).scale_is_known
    assert not reconstruct_run(run(**base, step_s=9.0), []).scale_is_known


@pytest.mark.parametrize(
    ("model", "gpus", "nearest"),
    [
        ("Qwen9-31B-A3B", 32, "Qwen3-30B-A3B"),
        ("gemma-2-9b-it", 32, "Qwen3-8B"),  # Qwen3.5-9B is nearer, but of linear attention
        ("Qwen3.5-25B", 32, "Qwen3.5-27B"),  # has it, as others of its series
        ("SmolLM-360M", 8, "Qwen2.5-0.5B"),
    ],
)
def test_a_model_that_is_not_catalogued_is_stood_in_for_by_the_nearest_of_its_kind(model, gpus, nearest):
    rebuilt = reconstruct_run(run(model=model, gpus_total=gpus), [])
    assert rebuilt.model.name == nearest
    assert f"{nearest} for {model}" in rebuilt.assumed
    assert rebuilt.doubts == ()


def test_a_dense_model_is_never_replaced_by_a_mixture_and_a_far_one_is_doubtful():
    """72.7B is less than half of 405B; a mixture of 397B is in the catalogue."""
    rebuilt = reconstruct_run(run(model="Llama-3.1-405B", gpus_total=64), [])
    assert (rebuilt.model.experts, rebuilt.model.active_parameters) == (0, 405e9)
    assert rebuilt.doubts == ("Qwen2.5-72B for Llama-3.1-405B: simulated bands are 2 times as wide",)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("Frobnicator", "model 'Frobnicator' is not in the catalogue and has no size in its name, such as 7B or "),
        ("Frobnicator-8x7B", "model 'Frobnicator-8x7B' is not in the catalogue and has no size in its name"),
        ("Kimi-K9-1T", "model 'Kimi-K9-1T' names no active parameters, as in 1T-A32B"),
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
