"""Models counted from config.json: by hand, against the published counts, and refused."""

import json

import pytest
from model_configs import ARCHITECTURES, COUNTED, DEEPSEEK_V3, NANO, QWEN35_27B, SUPER, gpt_oss, llama
from refusals import message

from pipelinerl.hardware.catalogue import find_model, model_from_huggingface, model_names


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


def test_deepseek_v3_by_hand():
    """Latent attention caches 512 + 64 numbers per layer and token. 58 of 61 layers have experts; 8 and a shared one of
    2048 are passed there, 18432 in the first three.
    """
    model = model_from_huggingface(DEEPSEEK_V3, "it")
    assert model.kv_bytes_per_token == 61 * (512 + 64) * 2 == 70_272
    assert model.expert_parameters == 58 * 256 * 3 * 7168 * 2048
    assert model.feed_forward_width == pytest.approx((58 * 9 * 2048 + 3 * 18432) / 61)
    assert model.attention_width == 128 * (192 + 128) / 2


def test_experts_in_every_second_layer_only():
    """24 of 48 layers of the 30B: half of the experts, and 24 feed-forward layers of 6144."""
    config, _, _ = ARCHITECTURES["Qwen3-30B-A3B"]
    half, whole = (model_from_huggingface(config | {"decoder_sparse_step": step}, "it") for step in (2, 1))
    assert half.expert_parameters == whole.expert_parameters / 2
    assert half.feed_forward_width == (24 * 8 * 768 + 24 * 6144) / 48


def test_the_text_part_of_a_multimodal_model_is_counted():
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


def test_gpt_oss_20b_by_hand():
    """Every second layer sees 128 tokens only. Experts, router, queries, keys, values and output have biases."""
    model = model_from_huggingface(gpt_oss(24, 32), "it")
    expert = 3 * 2880 * 2880 + 2 * 2880 + 2880
    assert model.expert_parameters == 24 * 32 * expert
    attention = 2 * 2880 * 4096 + 2 * 2880 * 512 + 4096 + 2 * 512 + 2880 + 64
    dense = 24 * (attention + 2 * 2880 + 2880 * 32 + 32) + 2880 + 2 * 201088 * 2880
    assert model.active_parameters == dense + 24 * 4 * expert
    assert model.kv_bytes_per_token == 12 * 2 * 8 * 64 * 2
    assert (model.attention_width, model.expert_layers) == (64 * 64 / 2, None)


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


def test_layer_types_of_another_length_are_refused():
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


def test_mlp_only_layers_that_are_no_list_count_as_none():
    config = ARCHITECTURES["Qwen3-30B-A3B"][0]
    assert model_from_huggingface(config | {"mlp_only_layers": 3}, "it") == model_from_huggingface(config, "it")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_shipped_model_has_the_counts_of_its_architecture_and_its_publication(name):
    config, parameters, active = ARCHITECTURES[name]
    counted, shipped = model_from_huggingface(config, name), find_model(name)
    same = {"source": "", "aliases": []}
    assert counted.model_copy(update=same) == shipped.model_copy(update=same)
    assert shipped.parameters == pytest.approx(parameters, rel=0.01)
    assert shipped.active_parameters == pytest.approx(active, rel=0.02)  # published with two digits
    assert shipped.source


@pytest.mark.parametrize("name", COUNTED)
def test_a_shipped_model_has_the_counts_of_transformers_and_its_publication(name):
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


def test_a_config_that_is_no_json_object_is_one_line(tmp_path):
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
def test_a_text_part_that_is_no_table_is_one_line(text):
    assert message(model_from_huggingface, {"text_config": text}, "it").startswith("model it: config.json must have ")


def test_a_config_with_a_wrong_number_names_it():
    config = llama(4096, 32, 32, 14336) | {"num_hidden_layers": "many"}
    line = "model it: num_hidden_layers of config.json must be a whole number, got 'many'"
    assert message(model_from_huggingface, config, "it") == line
