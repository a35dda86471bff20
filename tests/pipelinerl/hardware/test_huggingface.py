"""Models counted from config.json: by hand, against the published counts, and refused."""

import json

import pytest
from refusals import message

from pipelinerl.hardware.catalogue import find_model, model_from_huggingface, model_names


def qwen25(width, layers, heads, kv_heads, feed_forward, *, vocabulary=152064, tied=False):
    return {
        "model_type": "qwen2", "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": feed_forward, "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }  # fmt: skip


def qwen3(width, layers, heads, kv_heads, feed_forward, *, tied=False, **more):
    config = qwen25(width, layers, heads, kv_heads, feed_forward, vocabulary=151936, tied=tied)
    return config | {"model_type": "qwen3", "head_dim": 128} | more


def qwen3_moe(width, layers, heads, feed_forward, expert_width):
    more = {"moe_intermediate_size": expert_width, "num_experts": 128, "num_experts_per_tok": 8}
    return qwen3(width, layers, heads, 4, feed_forward, **more) | {"model_type": "qwen3_moe"}


def llama(width, layers, heads, feed_forward):
    return qwen25(width, layers, heads, 8, feed_forward, vocabulary=128256) | {"model_type": "llama"}


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 129280,
    "tie_word_embeddings": False,
}  # fmt: skip
ARCHITECTURES = {
    "Qwen2.5-0.5B": (qwen25(896, 24, 14, 2, 4864, vocabulary=151936, tied=True), 0.494e9, 0.494e9),
    "Qwen2.5-1.5B": (qwen25(1536, 28, 12, 2, 8960, vocabulary=151936, tied=True), 1.54e9, 1.54e9),
    "Qwen2.5-3B": (qwen25(2048, 36, 16, 2, 11008, vocabulary=151936, tied=True), 3.09e9, 3.09e9),
    "Qwen2.5-7B": (qwen25(3584, 28, 28, 4, 18944), 7.61e9, 7.61e9),
    "Qwen2.5-14B": (qwen25(5120, 48, 40, 8, 13824), 14.7e9, 14.7e9),
    "Qwen2.5-32B": (qwen25(5120, 64, 40, 8, 27648), 32.5e9, 32.5e9),
    "Qwen2.5-72B": (qwen25(8192, 80, 64, 8, 29568), 72.7e9, 72.7e9),
    "Qwen3-0.6B": (qwen3(1024, 28, 16, 8, 3072, tied=True), 0.6e9, 0.6e9),
    "Qwen3-1.7B": (qwen3(2048, 28, 16, 8, 6144, tied=True), 1.72e9, 1.72e9),
    "Qwen3-4B": (qwen3(2560, 36, 32, 8, 9728, tied=True), 4.02e9, 4.02e9),
    "Qwen3-8B": (qwen3(4096, 36, 32, 8, 12288), 8.19e9, 8.19e9),
    "Qwen3-14B": (qwen3(5120, 40, 40, 8, 17408), 14.8e9, 14.8e9),
    "Qwen3-32B": (qwen3(5120, 64, 64, 8, 25600), 32.8e9, 32.8e9),
    "Qwen3-30B-A3B": (qwen3_moe(2048, 48, 32, 6144, 768), 30.5e9, 3.3e9),
    "Qwen3-235B-A22B": (qwen3_moe(4096, 94, 64, 12288, 1536), 235e9, 22e9),
    "Llama-3.1-8B": (llama(4096, 32, 32, 14336), 8.03e9, 8.03e9),
    "Llama-3.1-70B": (llama(8192, 80, 64, 28672), 70.6e9, 70.6e9),
    "Llama-3.2-1B": (llama(2048, 16, 32, 8192) | {"tie_word_embeddings": True}, 1.24e9, 1.24e9),
    "Llama-3.2-3B": (llama(3072, 28, 24, 8192) | {"tie_word_embeddings": True}, 3.21e9, 3.21e9),
    "DeepSeek-V3": (DEEPSEEK_V3, 671e9, 37e9),
}
"""The figures of each config.json, and the published parameters: all, and active."""


def delta_net(width, layers, heads, kv_heads, value_heads, *, model_type, **more):
    """Full attention in every fourth layer, gated delta nets in the others."""
    return {
        "model_type": model_type, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 256, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 16, "linear_num_value_heads": value_heads, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "vocab_size": 248320, "tie_word_embeddings": False, "attn_output_gate": True,
    } | more  # fmt: skip


def shared_and_routed(width, experts, per_token):
    return {
        "moe_intermediate_size": width, "shared_expert_intermediate_size": width, "num_experts": experts,
        "num_experts_per_tok": per_token,
    }  # fmt: skip


NEMOTRON = {
    "model_type": "nemotron_h", "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
    "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "mlp_hidden_act": "relu2",
    "n_shared_experts": 1, "vocab_size": 131072, "tie_word_embeddings": False,
}  # fmt: skip
NANO = NEMOTRON | {
    "hidden_size": 2688, "num_hidden_layers": 52, "mamba_num_heads": 64, "n_routed_experts": 128,
    "hybrid_override_pattern": "MEMEM*E" + 4 * "MEMEM*E" + "MEMEMEM*E" + "MEMEMEME", "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
}  # fmt: skip
SUPER = NEMOTRON | {
    "hidden_size": 4096, "num_hidden_layers": 88, "mamba_num_heads": 128, "n_routed_experts": 512,
    "hybrid_override_pattern": 3 * "MEMEMEM*E" + 4 * "MEMEMEMEM*E" + "MEMEMEM*E" + "MEMEMEME",
    "num_experts_per_tok": 22, "moe_intermediate_size": 2688, "moe_latent_size": 1024,
    "moe_shared_expert_intermediate_size": 5376,
}  # fmt: skip
QWEN35_35B = delta_net(2048, 40, 16, 2, 32, model_type="qwen3_5_moe_text") | shared_and_routed(512, 256, 8)
QWEN35_27B = delta_net(5120, 64, 24, 4, 48, model_type="qwen3_5_text", intermediate_size=17408)
COUNTED = {
    "Nemotron-3-Nano-30B-A3B": (NANO, 31_577_940_288, 31.6e9, 3.2e9, 1),
    "Nemotron-3-Super-120B-A12B": (SUPER, 120_668_707_840, 120e9, 12e9, 1),
    "Qwen3.5-35B-A3B": (QWEN35_35B, 34_660_610_688, 35e9, 3e9, 1),
    "Qwen3.5-27B": (QWEN35_27B, 26_895_998_464, 27e9, 27e9, 0),
}
"""The figures of each config.json; the parameters of the model that transformers 5.19 makes of it (without weights,
with the biases that balance the experts); those published, all and active; how many of the two embeddings the latter
leaves out.
"""


def test_qwen25_7b_by_hand():
    """Per layer: queries and output 2 * 3584^2, keys and values 2 * 3584 * 512, their biases 3584 + 2 * 512,
    feed-forward 3 * 3584 * 18944, two norms of 3584. 28 of them, one norm, two embeddings of 152064 * 3584.
    """
    layer = 2 * 3584**2 + 2 * 3584 * 512 + 4608 + 3 * 3584 * 18944 + 2 * 3584
    model = model_from_huggingface(ARCHITECTURES["Qwen2.5-7B"][0], "it")
    assert model.parameters == model.active_parameters == 28 * layer + 3584 + 2 * 152064 * 3584 == 7_615_616_512
    assert model.embedding_parameters == 152064 * 3584
    assert model.kv_bytes_per_token == 2 * 28 * 4 * 128 * 2 == 57_344
    assert (model.attention_width, model.feed_forward_width, model.experts) == (3584, 18944, 0)


def test_qwen3_30b_a3b_by_hand():
    """Per layer: queries and output 2 * 2048 * 4096, keys and values 2 * 2048 * 512, two norms of heads of 128, two of
    2048, a router of 2048 * 128; 128 experts of 3 * 2048 * 768, of which a token passes 8.
    """
    attention = 2 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 128 + 2 * 2048
    expert = 3 * 2048 * 768
    dense = 48 * (attention + 2048 * 128) + 2048 + 2 * 151936 * 2048
    model = model_from_huggingface(ARCHITECTURES["Qwen3-30B-A3B"][0], "it")
    assert model.expert_parameters == 48 * 128 * expert
    assert model.parameters == dense + 48 * 128 * expert
    assert model.active_parameters == dense + 48 * 8 * expert
    assert (model.experts, model.experts_per_token, model.feed_forward_width) == (128, 8, 8 * 768)
    assert model.attention_width == 4096


def test_deepseek_v3_by_hand():
    """Latent attention caches 512 + 64 numbers per layer and token. 58 of 61 layers have experts; 8 and a shared one of
    2048 are passed there, 18432 in the first three.
    """
    model = model_from_huggingface(DEEPSEEK_V3, "it")
    assert model.kv_bytes_per_token == 61 * (512 + 64) * 2 == 70_272
    assert model.expert_parameters == 58 * 256 * 3 * 7168 * 2048
    assert model.feed_forward_width == pytest.approx((58 * 9 * 2048 + 3 * 18432) / 61)
    assert model.attention_width == 128 * (192 + 128) / 2


def test_mixtral_names_its_experts_differently():
    """8x7B: 46.7e9 parameters, 12.9e9 of them active, as published."""
    config = llama(4096, 32, 32, 14336) | {"vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
    model = model_from_huggingface(config | {"model_type": "mixtral"}, "it")
    assert model.parameters == pytest.approx(46.7e9, rel=1e-3)
    assert model.active_parameters == pytest.approx(12.9e9, rel=2e-3)


def test_a_shared_expert_with_a_gate():
    """Qwen1.5-MoE-A2.7B: 14.3e9 parameters, 2.7e9 of them active, as published."""
    config = qwen25(2048, 24, 16, 16, 5632, vocabulary=151936) | {"model_type": "qwen2_moe", "num_experts": 60}
    config |= {"num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
    model = model_from_huggingface(config, "it")
    assert model.parameters == pytest.approx(14.3e9, rel=2e-3)
    assert model.active_parameters == pytest.approx(2.69e9, rel=2e-3)


def test_experts_in_every_second_layer_only():
    """24 of 48 layers of the 30B: half of the experts, and 24 feed-forward layers of 6144."""
    config, _, _ = ARCHITECTURES["Qwen3-30B-A3B"]
    half, whole = (model_from_huggingface(config | {"decoder_sparse_step": step}, "it") for step in (2, 1))
    assert half.expert_parameters == whole.expert_parameters / 2
    assert half.feed_forward_width == (24 * 8 * 768 + 24 * 6144) / 48


def test_the_text_part_of_a_model_that_also_sees():
    config, _, _ = ARCHITECTURES["Qwen2.5-7B"]
    assert model_from_huggingface({"text_config": config, "vision_config": {}}, "it").parameters == 7_615_616_512


def test_nemotron_3_super_by_hand():
    """40 Mamba-2 layers, 40 of 512 experts (22 passed) of two matrices in a width of 1024, 8 of attention: 44 pairs.

    Only attention has a KV cache, of 2 heads of 128. Without a gate the width of the feed-forward counts half.
    """
    model = model_from_huggingface(SUPER, "it")
    assert [SUPER["hybrid_override_pattern"].count(one) for one in "ME*"] == [40, 40, 8]
    assert model.expert_parameters == 40 * 512 * 2 * 1024 * 2688
    assert model.parameters - model.active_parameters == 40 * (512 - 22) * 2 * 1024 * 2688
    assert (model.layers, model.expert_layers) == (44, 40)
    assert model.kv_bytes_per_token == 8 * 2 * 2 * 128 * 2 == 8192
    assert model.attention_width == pytest.approx(8 * 4096 / 44)
    assert model.feed_forward_width == pytest.approx(40 * (22 * 2688 + 5376) / 44 / 2)


def test_nemotron_layers_named_instead_of_lettered():
    names = {"M": "mamba", "E": "moe", "*": "attention"}
    config = {key: value for key, value in NANO.items() if key not in ("hybrid_override_pattern", "num_hidden_layers")}
    config["layers_block_type"] = [names[one] for one in NANO["hybrid_override_pattern"]]
    assert model_from_huggingface(config, "it") == model_from_huggingface(NANO, "it")


def test_linear_attention_has_no_kv_cache():
    """Qwen3.5-27B: 16 of 64 layers keep 2 * 4 * 256 numbers of each token, and attend with 24 heads of 256."""
    model = model_from_huggingface(QWEN35_27B, "it")
    assert model.kv_bytes_per_token == 16 * 2 * 4 * 256 * 2 == 65_536
    assert model.attention_width == 24 * 256 / 4
    kinds = (3 * ["linear_attention"] + ["full_attention"]) * 16
    without = {key: value for key, value in QWEN35_27B.items() if key != "full_attention_interval"}
    assert model_from_huggingface(without | {"layer_types": kinds}, "it") == model


def test_whether_embeddings_are_tied_may_stand_beside_the_text_part():
    text = {key: value for key, value in QWEN35_27B.items() if key != "tie_word_embeddings"}
    tied, apart = (
        model_from_huggingface({"text_config": text, "tie_word_embeddings": one}, "it") for one in (True, False)
    )
    assert apart.parameters - tied.parameters == apart.embedding_parameters == 248320 * 5120
    assert tied.embedding_parameters == 0


@pytest.mark.parametrize(
    ("more", "kinds"),
    [
        ({"layer_types": ["conv", "full_attention", "recurrent"]}, "conv, recurrent"),
        ({"hybrid_override_pattern": "MX*E"}, "X"),
        ({"layers_block_type": ["mamba", "rwkv"]}, "rwkv"),
    ],
)
def test_other_kinds_of_layers_are_refused(more, kinds):
    line = message(model_from_huggingface, ARCHITECTURES["Qwen3-8B"][0] | more, "it")
    assert line.startswith(f"model it: layers of type {kinds} cannot be counted from config.json; give its ")


@pytest.mark.parametrize(
    "more", [{"layer_types": 18 * ["linear_attention", "full_attention"]}, {"full_attention_interval": 4}]
)
def test_linear_attention_of_another_kind_than_delta_nets_is_refused(more):
    line = message(model_from_huggingface, ARCHITECTURES["Qwen3-8B"][0] | more, "it")
    assert line.startswith("model it: config.json must have linear_num_value_heads, a whole number of at least 1; ")


def test_kinds_of_other_many_layers_are_refused():
    line = message(model_from_huggingface, ARCHITECTURES["Qwen3-8B"][0] | {"layer_types": ["full_attention"]}, "it")
    assert line == ("model it: layer_types of config.json must have as many entries as num_hidden_layers=36, got 1")


def test_long_sliding_windows_count_as_full_attention_and_short_ones_as_none():
    config = ARCHITECTURES["Qwen3-8B"][0]
    whole = model_from_huggingface(config, "it")
    config = config | {"layer_types": 18 * ["full_attention", "sliding_attention"]}
    for window in (None, 513):
        assert model_from_huggingface(config | {"sliding_window": window}, "it") == whole
    short = model_from_huggingface(config | {"sliding_window": 512}, "it")
    assert short.kv_bytes_per_token == whole.kv_bytes_per_token / 2
    assert short.attention_width == whole.attention_width / 2
    assert short.parameters == whole.parameters


def test_layers_without_experts_that_are_no_list_are_none():
    config = ARCHITECTURES["Qwen3-30B-A3B"][0]
    assert model_from_huggingface(config | {"mlp_only_layers": 3}, "it") == model_from_huggingface(config, "it")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_shipped_model_is_what_its_architecture_gives_and_what_is_published(name):
    config, parameters, active = ARCHITECTURES[name]
    counted, shipped = model_from_huggingface(config, name), find_model(name)
    same = {"source": "", "aliases": []}
    assert counted.model_copy(update=same) == shipped.model_copy(update=same)
    assert shipped.parameters == pytest.approx(parameters, rel=0.01)
    assert shipped.active_parameters == pytest.approx(active, rel=0.02)  # published with two digits
    assert shipped.source


@pytest.mark.parametrize("name", COUNTED)
def test_a_shipped_model_is_what_transformers_counts_and_what_is_published(name):
    config, exact, parameters, active, left_out = COUNTED[name]
    counted, shipped = model_from_huggingface(config, name), find_model(name)
    same = {"source": "", "aliases": []}
    assert counted.model_copy(update=same) == shipped.model_copy(update=same)
    assert shipped.parameters == exact
    assert shipped.parameters == pytest.approx(parameters, rel=0.02)
    of_a_token = shipped.active_parameters - left_out * shipped.embedding_parameters
    assert of_a_token == pytest.approx(active, abs=0.5e9 if active % 1e9 == 0 else 0.02 * active)  # its last digit
    assert shipped.source


def test_every_shipped_model_is_tested():
    assert sorted(model_names()) == sorted({**ARCHITECTURES, **COUNTED})


def test_a_model_from_its_folder_or_config_file(tmp_path):
    folder = tmp_path / "My-7B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(ARCHITECTURES["Qwen2.5-7B"][0]), encoding="utf-8")
    for path in (folder, folder / "config.json"):
        model = find_model(str(path))
        assert (model.name, model.parameters) == ("My-7B", 7_615_616_512)


def test_a_config_that_is_none_is_one_line(tmp_path):
    path = tmp_path / "config.json"
    for text, line in (("[]", "must hold a JSON object"), ("{", "is not valid JSON")):
        path.write_text(text, encoding="utf-8")
        assert line in message(find_model, str(path))


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_config_without_a_key_names_it(key):
    config = {name: value for name, value in ARCHITECTURES["Llama-3.1-8B"][0].items() if name != key}
    line = message(model_from_huggingface, config, "it")
    assert line.startswith(f"model it: config.json must have {key}, a whole number of at least 1; it has ")


@pytest.mark.parametrize("text", [None, [], "x"])
def test_a_config_whose_text_part_is_none_is_one_line(text):
    assert message(model_from_huggingface, {"text_config": text}, "it").startswith("model it: config.json must have ")


def test_a_config_with_a_wrong_number_names_it():
    config = llama(4096, 32, 32, 14336) | {"num_hidden_layers": "many"}
    line = "model it: num_hidden_layers of config.json must be a whole number, got 'many'"
    assert message(model_from_huggingface, config, "it") == line
