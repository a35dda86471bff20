"""What the trainer needs of a GPU's memory: counted without one, beside what is measured, and what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from refusals import message  # noqa: E402
from torch.profiler import profile  # noqa: E402

from backends.trainer import footprint as module  # noqa: E402
from backends.trainer.attention import register_packed_attention  # noqa: E402
from backends.trainer.footprint import (  # noqa: E402
    LiveBytes,
    check_memory,
    check_trainable,
    footprint,
    on_meta,
    pack_activations,
)
from backends.trainer.model import PolicyModel  # noqa: E402
from pipelinerl.config.run_file import load_run  # noqa: E402
from pipelinerl.config.train import TrainerConfig  # noqa: E402
from pipelinerl.hardware.catalogue import find_model  # noqa: E402
from pipelinerl.hardware.memory import training_memory  # noqa: E402

EXAMPLE = Path(__file__).parents[3] / "examples" / "qwen7b_128_h100.toml"
SMALL = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


@pytest.fixture(scope="module")
def qwen7b() -> Any:
    """Qwen2.5-7B as its config.json has it."""
    return transformers.Qwen2Config(
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=131_072,
        tie_word_embeddings=False,
    )


def run(*changed: str) -> Any:
    return load_run(EXAMPLE, list(changed))


def test_live_bytes_are_those_of_the_tensors_that_live() -> None:
    known = torch.zeros(100)
    with LiveBytes([known]) as live:
        first = torch.ones(10) + known[:10]  # 40 bytes, and 40 for the ones until they go
        second = first.view(2, 5)[0]
        assert (live.now, live.peak) == (40, 80)
        del first
        assert live.now == 40
        del second
        assert live.now == 0


@pytest.mark.slow
def test_a_7b_that_keeps_its_activations_is_refused_with_the_key_and_the_figure(qwen7b: Any) -> None:
    """103.9 GB are kept, 3.9 GB more are needed in the backward pass; with all logits at once 115 GB would be."""
    says = message(check_memory, run("train.trainer.activation_checkpointing=false"), qwen7b)
    assert says.startswith("train.trainer.activation_checkpointing must be true, got activation_checkpointing=false: ")
    assert (
        "needs 114.7 GB a GPU (activations 107.7, states 1.7, workspace 5.3); of the 86 GB of hardware.gpu='H100'"
        in says
    )
    kept = pack_activations(on_meta(qwen7b, torch.bfloat16), 16_384, checkpointing=False).kept
    logits = 16_384 * 152_064 * 2
    assert kept == pytest.approx(108.9e9 - logits, rel=1e-3)  # 108.9 GB by a count of its own, with all logits


def test_the_7b_example_fits_as_it_is(qwen7b: Any) -> None:
    check_memory(run(), qwen7b)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sets", "fitting", "begins", "has"),
    [
        ("train.trainer.zero_stage=1", {"zero_stage": 3}, "zero_stage must be 3, got zero_stage=1", "; with it 0.1 GB"),
        ("train.trainer.pack_tokens=40000", {"pack_tokens": 30_000}, "pack_tokens must be at most 28466", ""),
        ("cluster.accelerators=49", {"pack_tokens": 5_000}, "pack_tokens must be smaller", "more GPUs"),
    ],
)
def test_the_key_to_change_is_the_one_that_helps(
    monkeypatch: pytest.MonkeyPatch, sets: str, fitting: dict[str, int], begins: str, has: str
) -> None:
    """A GPU that just holds a trainer with ``fitting``. 28466: the 10th of 16 steps of 1925 tokens from 9216."""
    config, small = run(sets), transformers.Qwen2Config(**SMALL)
    held = config.train.trainer.model_copy(update=fitting)
    ranks = config.training_accelerators
    needed = footprint(small, held, num_ranks=ranks, value_head=False, reference=False).total
    monkeypatch.setattr(module, "_gpu_memory", lambda _: (needed / 0.899, "a small GPU"))
    says = message(check_memory, config, small)
    assert says.startswith(f"train.trainer.{begins}")
    assert has in says


def test_states_are_those_of_mixed_precision() -> None:
    """2 bytes of weights, 4 of gradients, 4 of master weights and 8 of moments for each parameter."""
    small = transformers.Qwen2Config(**SMALL)
    num = 2 * 1000 * 128 + 3 * (128 * (2 * 128 + 128 + 3 * 256 + 2) + 256) + 128
    for stage, numbers in ((1, 6 + 12 / 8), (2, 2 + 16 / 8), (3, 18 / 8)):
        trainer = TrainerConfig(zero_stage=stage, pack_tokens=64)
        found = footprint(small, trainer, num_ranks=8, value_head=False, reference=False)
        assert found.states == pytest.approx(numbers * num)


@pytest.mark.slow
@pytest.mark.parametrize(("recomputation", "below"), [(1.0, 0.05), (0.0, 0.16)])
def test_the_planners_formula_is_near(qwen7b: Any, recomputation: float, below: float) -> None:
    """It is for norms that keep half of what those of transformers do; these weigh where activations are kept."""
    counted = pack_activations(on_meta(qwen7b, torch.bfloat16), 16_384, checkpointing=recomputation > 0).peak
    planned = training_memory(find_model("Qwen2.5-7B"), accelerators=80, recomputation=recomputation).activations
    assert (1 - below) * counted < planned < counted


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_is_counted_without_numbers_is_what_is_allocated_with_them(checkpointing: bool) -> None:
    """Torch's profiler sees every allocation on CPU, also those within an operation."""
    config, tokens = transformers.Qwen2Config(**SMALL), 2000
    counted = pack_activations(on_meta(config, torch.float32), tokens, checkpointing=checkpointing)
    attention = register_packed_attention()
    policy = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()
    if checkpointing:
        policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = PolicyModel(policy, temperature=1.0, value_head=False)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    row = {"token_N": torch.zeros(tokens, dtype=torch.int64), "position_N": torch.arange(tokens)}
    row |= {"predictor_M": torch.arange(tokens - 1), "answer_M": torch.zeros(tokens - 1, dtype=torch.int64)}
    boundary = torch.tensor([0, tokens], dtype=torch.int32)
    with profile(profile_memory=True) as seen:
        logprob_M, *_ = model(**row, boundary=boundary, longest=tokens)
        logprob_M.sum().backward()
    now = peak = 0
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    assert counted.peak == pytest.approx(peak, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        transformers.Qwen3Config(**SMALL, head_dim=32),
        transformers.LlamaConfig(**SMALL),
        transformers.GemmaConfig(**SMALL, head_dim=32, tie_word_embeddings=True),
        transformers.Qwen3MoeConfig(**SMALL, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64),
        transformers.Glm4MoeConfig(**SMALL, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=64),
    ],
    ids=lambda config: config.model_type,
)
def test_models_that_can_be_trained_are_counted(config: Any) -> None:
    check_trainable(config)
    kept, again = (
        pack_activations(on_meta(config, torch.bfloat16), 500, checkpointing=value) for value in (False, True)
    )
    assert again.kept < kept.kept
    assert again.peak < kept.peak


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (transformers.Gemma2Config(**SMALL, head_dim=32), "needs softcap, not supported"),
        (transformers.GraniteConfig(**SMALL, logits_scaling=8.0), "scaled, capped or biased besides, not supported"),
        (transformers.PhiConfig(**SMALL), "scaled, capped or biased besides, not supported"),
        (transformers.Qwen3NextConfig(**SMALL), "layers of linear_attention would mix them"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_models_that_the_trainer_would_compute_wrongly_are_refused(config: Any, says: str) -> None:
    assert says in message(check_trainable, config)
