"""Published and exported weights have the names and bits of ``save_pretrained``: tiny models of random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from own_memory import own_bytes  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import backends.trainer.model  # noqa: E402
from backends.trainer.model import TRAINED_DTYPES, PolicyModel, copy_policy, load_policy, save_policy  # noqa: E402
from backends.trainer.publish import Publisher  # noqa: E402
from backends.transfer.row import layout, view_of  # noqa: E402
from backends.transfer.transport import is_mismatch  # noqa: E402
from backends.transfer.verify import checkpoint_shapes  # noqa: E402
from pipelinerl.errors import BackendError  # noqa: E402
from pipelinerl.hardware.transport import BROADCAST, DELTA, FILE, WeightTransport  # noqa: E402

SHAPE = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
ROUTED = EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
LOW_RANK = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": SHAPE,
    "qwen3": SHAPE,
    "qwen3_moe": SHAPE | EXPERTS | {"num_experts": 4},
    "llama": SHAPE,
    "gemma3_text": SHAPE | {"tie_word_embeddings": True},
    "glm4_moe": SHAPE | ROUTED | {"first_k_dense_replace": 1},
    "deepseek_v3": SHAPE | ROUTED | LOW_RANK | {"first_k_dense_replace": 1},
}


@pytest.fixture(autouse=True)
def small_buckets_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.trainer.model, "BUCKET_BYTES", 50_000)
    monkeypatch.setitem(TRAINED_DTYPES, "cpu", torch.bfloat16)


def saved_model(model_type: str, folder: Path) -> dict[str, Any]:
    """Write a model of random weights; return the tensors of its file. Biases that balance experts are in float32."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **MODELS[model_type])
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = torch.randn_like(buffer, dtype=torch.float32)
    model.save_pretrained(folder)
    weights: dict[str, Any] = load_file(folder / "model.safetensors")
    return weights


def loaded(folder: Path) -> PolicyModel:
    return PolicyModel(load_policy(str(folder), device="cpu"), temperature=1.0, value_head=True)


def publisher(folder: Path, transport: WeightTransport) -> Publisher:
    published = folder / "published"
    return Publisher(0, device="cpu", transport=transport, folder=published, model_path=str(folder))


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and left[name].shape == right[name].shape
        and torch.equal(left[name].view(torch.uint8), right[name].view(torch.uint8))
        for name in left
    )  # fmt: skip


@pytest.mark.parametrize("model_type", MODELS)
def test_names_bits_and_types_are_those_of_save_pretrained(model_type: str, tmp_path: Path) -> None:
    saved = saved_model(model_type, tmp_path)
    biases = [one for name, one in saved.items() if name.endswith("e_score_correction_bias")]
    assert len(biases) == (model_type in {"glm4_moe", "deepseek_v3"})
    assert all(one.dtype == torch.float32 and one.abs().min() > 0 for one in biases)
    model = loaded(tmp_path)
    assert same(copy_policy(model, receive=True), saved)
    in_file, sent = publisher(tmp_path, FILE), publisher(tmp_path, BROADCAST)
    for one in (in_file, sent):
        one.check(model)
    weights = in_file.publish(model, 1)
    assert weights is not None
    assert same(load_file(weights.location.removeprefix("file:")), saved)
    sent.publish(model, 1)
    row = sent._sender._row.row  # type: ignore[attr-defined]
    assert same({place.name: view_of(row, place) for place in layout(sent._source.parameters)}, saved)  # type: ignore[union-attr]
    save_policy(model, copy_policy(model, receive=True), tmp_path / "exported")
    assert same(load_file(tmp_path / "exported" / "model.safetensors"), saved)


@pytest.mark.parametrize("model_type", MODELS)
def test_a_delta_brings_the_row_to_what_the_model_has(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of fused experts, tied parameters and biases in float32, too; gathered in several buckets."""
    monkeypatch.setattr(backends.trainer.model, "BUCKET_BYTES", 50_000)
    saved_model(model_type, tmp_path)
    model = loaded(tmp_path)
    one = publisher(tmp_path, DELTA)
    one.publish(model, 1)
    for parameter in model.policy.parameters():
        parameter.data.view(-1)[::50] += 1
    weights = one.publish(model, 2)
    assert weights is not None
    assert weights.delta_share == pytest.approx(1 / 50, rel=0.1)
    assert len(one._sender._ends) > 2  # type: ignore[attr-defined]
    one._sender._apply()  # type: ignore[attr-defined]
    row = one.group.row.row  # type: ignore[union-attr]
    held = {place.name: view_of(row, place) for place in layout(one._source.parameters)}  # type: ignore[union-attr]
    assert same(held, copy_policy(model, receive=True))


def test_layers_that_only_draft_tokens_are_neither_trained_nor_missed(tmp_path: Path) -> None:
    saved = saved_model("glm4_moe", tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.num_nextn_predict_layers == 1
    last = "model.layers.1."
    draft = {name.replace(last, "model.layers.2."): one.clone() for name, one in saved.items() if last in name}
    draft["mtp.fc.weight"] = torch.ones(64, 128, dtype=torch.bfloat16)  # as Qwen3-Next and Qwen3.5 name them
    save_file(saved | draft, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert checkpoint_shapes(tmp_path).keys() == saved.keys()
    publisher(tmp_path, FILE).check(loaded(tmp_path))


@pytest.mark.parametrize("transport", [FILE, BROADCAST], ids=lambda transport: transport.name)
def test_weights_that_engines_do_not_know_are_refused_when_the_trainer_starts(
    transport: WeightTransport, tmp_path: Path
) -> None:
    saved = saved_model("qwen3_moe", tmp_path)
    model = loaded(tmp_path)
    more = {"model.layers.0.mlp.experts.4.up_proj.weight": torch.zeros(32, 64)}
    save_file(saved | more, tmp_path / "model.safetensors", metadata={"format": "pt"})
    pattern = rf"^weights to be sent lack 1 of {len(saved) + 1} parameters: {next(iter(more))}$"
    with pytest.raises(BackendError, match=pattern) as refused:
        publisher(tmp_path, transport).check(model)
    assert is_mismatch(str(refused.value))
    assert not is_mismatch("weights to be sent have a wrong checksum in 1 of 3 parameters: x")  # another transfer helps


def test_only_the_named_group_is_aborted(tmp_path: Path) -> None:
    one = publisher(tmp_path, BROADCAST)
    before, _ = one.group.open(), one.group.open()
    one.group.abort(before, "engine 0 is lost")
    assert "did not come" in str(one.join_group(["trainer", "engine 0"], 0.01))
    rendezvous = one.group.open()
    one.group.abort(rendezvous, "engine 0 is lost")  # before the call that it is to end
    fault = one.join_group(["trainer", "engine 0"], 1000.0)
    assert str(fault).endswith("; engine 0 is lost")
    one.close()


def test_the_ranks_of_a_machine_share_the_pages_of_the_weights_file(tmp_path: Path) -> None:
    """A rank maps the file, bit for bit, and has no copy of the model of its own in the host's memory."""
    config = transformers.LlamaConfig(
        vocab_size=40_000, hidden_size=512, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    saved = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    saved.save_pretrained(tmp_path)
    load_policy(str(tmp_path), device="cpu")  # libraries load once
    size, before = (tmp_path / "model.safetensors").stat().st_size, own_bytes()
    loaded = load_policy(str(tmp_path), device="cpu")
    assert size > 80e6
    assert own_bytes() - before < 0.1 * size
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in saved.state_dict().items())
