"""Adapters: what they are by identities, how they are trained, and that engines serve them."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from needs import need

need("torch", "transformers")

import torch  # noqa: E402
import transformers  # noqa: E402
from character_model import make_model  # noqa: E402
from model_configs import ARCHITECTURES  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from backends.lora import (  # noqa: E402
    ADAPTER_FOLDER,
    LoraLinear,
    adapter_shapes,
    adapter_weights,
    add_adapters,
    save_folded,
)
from backends.trainer.footprint import check_adapters, on_meta  # noqa: E402
from backends.transfer.verify import checkpoint_shapes  # noqa: E402
from pipelinerl.config.train import LoraConfig  # noqa: E402
from pipelinerl.errors import ConfigError  # noqa: E402
from pipelinerl.hardware.catalogue import find_model  # noqa: E402

LORA = LoraConfig(rank=4, alpha=6)
TOKENS = torch.arange(12)[None] % 7


@pytest.fixture(scope="module")
def base(model_path):
    return transformers.AutoModelForCausalLM.from_pretrained(model_path).double()


def adapted(base, *, seed=None):
    """The model with new adapters, or with random ones."""
    model = copy.deepcopy(base)
    add_adapters(model, LORA)
    generator = torch.Generator().manual_seed(seed or 0)
    for weight in adapter_weights(model).values() if seed is not None else ():
        weight.data = torch.randn(weight.shape, generator=generator, dtype=weight.dtype) / 4
    return model


def test_new_adapters_change_no_bit_and_are_the_same_on_all_ranks(base):
    one, other = adapted(base), adapted(base)
    assert torch.equal(one(TOKENS).logits, base(TOKENS).logits)
    assert [name for name, weight in adapter_weights(one).items() if weight.any()] == [
        name for name in adapter_weights(one) if "lora_A" in name
    ]
    assert all(torch.equal(weight, adapter_weights(other)[name]) for name, weight in adapter_weights(one).items())


def test_the_gradient_of_an_adapter_is_that_of_its_layer_projected(base):
    """W + s B A: with G the gradient of W, that of B is s G A^T, and that of A is s B^T G."""
    model, whole = adapted(base, seed=1), copy.deepcopy(base)
    scale, gradient = LORA.alpha / LORA.rank, {}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    for name, layer in layers.items():
        whole.get_submodule(name).weight.data += scale * layer.lora_B.detach() @ layer.lora_A.detach()
    for one in (model, whole):
        one(TOKENS, labels=TOKENS).loss.backward()
    assert {name for name, weight in model.named_parameters() if weight.grad is not None} == {
        f"{name}.{part}" for name in layers for part in ("lora_A", "lora_B")
    }
    assert len(layers) == 7 * base.config.num_hidden_layers
    for name, layer in layers.items():
        gradient = whole.get_submodule(name).weight.grad
        assert torch.allclose(layer.lora_B.grad, scale * gradient @ layer.lora_A.T, atol=1e-12)
        assert torch.allclose(layer.lora_A.grad, scale * layer.lora_B.T @ gradient, atol=1e-12)


def test_a_folded_model_answers_as_the_one_with_adapters_and_loads_without_us(base, tmp_path):
    model = adapted(base, seed=2).float()
    expected, adapters = model(TOKENS).logits, {name: one.clone() for name, one in adapter_weights(model).items()}
    save_folded(model, tmp_path)
    folded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.allclose(folded(TOKENS).logits, expected, atol=1e-5)
    assert not torch.allclose(folded(TOKENS).logits, base.float()(TOKENS).logits, atol=1e-2)
    base.double()
    shapes = checkpoint_shapes(tmp_path / ADAPTER_FOLDER)
    assert shapes == {name: tuple(one.shape) for name, one in adapters.items()}


def test_experts_and_routers_have_no_adapter(tmp_path):
    config = transformers.Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path)
    add_adapters(model, LORA)
    shapes = {name: tuple(one.shape) for name, one in adapter_weights(model).items()}
    assert shapes == adapter_shapes(checkpoint_shapes(tmp_path), LORA.rank)
    assert {name.split(".")[-3] for name in shapes} == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Qwen3-32B", "Qwen3-30B-A3B"])
def test_the_planner_counts_the_adapters_of_a_model(name):
    config = transformers.AutoConfig.for_model(**ARCHITECTURES[name][0])
    model = on_meta(config, torch.bfloat16)
    add_adapters(model, LORA)
    assert find_model(name).adapter_parameters(LORA.rank) == sum(one.numel() for one in adapter_weights(model).values())


SMALL = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        ("qwen2", {}, None),
        ("qwen2_moe", {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}, None),
        ("gpt_neox", {}, "its layers have attention.dense, attention.query_key_value, mlp.dense_4h_to_h besides"),
        ("phi3", {"pad_token_id": 0}, "its layers have mlp.gate_up_proj, self_attn.qkv_proj besides"),
    ],
)
def test_models_whose_layers_have_other_names_are_refused(tmp_path, kind, settings, says):
    config = transformers.AutoConfig.for_model(kind, **SMALL, **settings)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    if says is None:
        check_adapters(config, str(tmp_path), LORA)
    else:
        with pytest.raises(ConfigError, match=says):
            check_adapters(config, str(tmp_path), LORA)


def test_a_model_whose_checkpoint_has_other_names_is_refused(base, tmp_path):
    make_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({f"language_model.{name}": one for name, one in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="its layers have other names in memory than in its files"):
        check_adapters(base.config, str(tmp_path), LORA)


def test_vllm_serves_adapters_of_some_models_only():
    need("vllm")
    from backends.vllm.version.arguments import check_serves_adapters

    for served in ("Qwen2ForCausalLM", "Qwen3MoeForCausalLM", "MistralForCausalLM", "SomethingNewForCausalLM"):
        check_serves_adapters(transformers.PretrainedConfig(architectures=[served]), "cpu")
    with pytest.raises(ConfigError, match=r"^train.lora must be left out for FalconForCausalLM"):
        check_serves_adapters(transformers.PretrainedConfig(architectures=["FalconForCausalLM"]), "gpu")
    mixture = transformers.Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"])
    check_serves_adapters(mixture, "gpu")
    with pytest.raises(ConfigError, match=r"^train.lora must be left out for a mixture on device='cpu'"):
        check_serves_adapters(mixture, "cpu")


real = pytest.mark.real
ignore = pytest.mark.filterwarnings("ignore")


@real
@ignore
@pytest.mark.parametrize("zero_stage", [0, 2, 3, None])
def test_a_rank_trains_adapters_as_plain_torch_does_and_goes_on_from_its_checkpoint(
    model_path: Path, tmp_path: Path, zero_stage: int | None
) -> None:
    """None: FSDP2, whose checkpoint DeepSpeed reads.

    The rounding counts fivefold: at first B is 0, so the gradient of A is tiny, and Adam divides by its size.
    """
    need("deepspeed")
    from tiny_trainer import (
        ROUNDING,
        largest_difference,
        parameters,
        plain_training,
        samples,
        saved_state,
        started,
        train,
    )

    from backends.trainer.deepspeed.rank import DeepSpeedRank
    from backends.trainer.fsdp2.rank import FSDP2Rank

    wanted, metrics = plain_training(model_path, 3, lora=LORA)
    kind: Any = FSDP2Rank if zero_stage is None else DeepSpeedRank
    rank = started(model_path, zero_stage=3 if zero_stage is None else zero_stage, kind=kind, lora=LORA)
    for step in range(2):
        assert train(rank, samples(step))[1] == pytest.approx(metrics[step], rel=1e-4, abs=1e-9)
    rank.snapshot()
    rank.save(tmp_path / "checkpoint")
    assert len(saved_state(tmp_path / "checkpoint")["master"]) == len(wanted)
    again = started(model_path, zero_stage=2, lora=LORA)
    again.load(tmp_path / "checkpoint")
    for one in (rank, again):
        assert train(one, samples(2))[1] == pytest.approx(metrics[2], rel=1e-4, abs=1e-9)
        assert largest_difference(parameters(one), wanted) < 5 * ROUNDING
    again.export(tmp_path / "model")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path)
    add_adapters(model, LORA)
    for name, weight in adapter_weights(model).items():
        weight.data = wanted[name]
    assert torch.allclose(exported(TOKENS).logits, model(TOKENS).logits, atol=1e-4)


@real
@ignore
def test_an_engine_serves_the_adapters_of_a_version_also_to_sequences_in_progress(tmp_path):
    need("vllm")
    from vllm_engine import PROMPT, settings

    from backends.interface import GenerateRequest, Weights
    from backends.transfer.file import write_weights
    from backends.vllm.engine import VLLMEngine
    from pipelinerl.scheduler.events import WeightUpdate

    make_model(tmp_path / "model")
    first = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    add_adapters(first, LORA)
    second = copy.deepcopy(first)
    for number, weight in enumerate(adapter_weights(second).values()):
        torch.manual_seed(number)
        torch.nn.init.normal_(weight, std=0.3)
    checksums = write_weights(tmp_path / "version-1.safetensors", adapter_weights(second))
    weights = Weights(1, f"file:{tmp_path / 'version-1.safetensors'}", checksums)

    async def answer():
        engine = VLLMEngine(settings(tmp_path / "model", lora=LORA))
        await engine.start()
        try:
            request = GenerateRequest(0, prompt_tokens=PROMPT, max_new_tokens=300, seed=0, temperature=1.0)
            running = asyncio.create_task(engine.generate(request))
            await engine.generate(replace(request, rollout_id=1, max_new_tokens=40))
            await engine.update(weights, WeightUpdate.RECOMPUTE)
            return await running
        finally:
            await engine.shutdown()

    generated = asyncio.run(answer())
    assert generated.spans.versions == (0, 1)
    split, ids = generated.spans.ends[0], torch.tensor([[*PROMPT, *generated.tokens_T]])
    for model, part in ((first, slice(0, split)), (second, slice(split, None))):
        with torch.no_grad():
            logprob = model(ids).logits.log_softmax(-1)[0, len(PROMPT) - 1 : -1]
        logprob_T = logprob.gather(1, torch.tensor(generated.tokens_T)[:, None])[:, 0]
        assert logprob_T[part].numpy() == pytest.approx(generated.logprob_T[part], abs=1e-4)
