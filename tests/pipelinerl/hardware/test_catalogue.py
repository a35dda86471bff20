"""The catalogue: parameters counted from the architecture, names found, wrong files refused in one line."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from pipelinerl.errors import ConfigError
from pipelinerl.hardware.catalogue import (
    Gpu,
    LanguageModel,
    find_gpu,
    find_model,
    gpu_names,
    model_from_huggingface,
    model_names,
)

DATA = Path(__file__).parents[3] / "pipelinerl" / "hardware" / "data"


def qwen25(width, layers, heads, kv_heads, feed_forward, *, vocabulary=152064, tied=False):
    return {
        "model_type": "qwen2",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": feed_forward,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }


def qwen3(width, layers, heads, kv_heads, feed_forward, *, tied=False, **more):
    config = qwen25(width, layers, heads, kv_heads, feed_forward, vocabulary=151936, tied=tied)
    return config | {"model_type": "qwen3", "head_dim": 128} | more


def qwen3_moe(width, layers, heads, feed_forward, expert_width):
    more = {"moe_intermediate_size": expert_width, "num_experts": 128, "num_experts_per_tok": 8}
    return qwen3(width, layers, heads, 4, feed_forward, **more) | {"model_type": "qwen3_moe"}


def llama(width, layers, heads, feed_forward):
    return qwen25(width, layers, heads, 8, feed_forward, vocabulary=128256) | {"model_type": "llama"}


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "tie_word_embeddings": False,
}
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


def message(call, *arguments):
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------------------------ counted by hand


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


@pytest.mark.parametrize(
    "more", [{"layer_types": ["linear_attention", "full_attention"]}, {"full_attention_interval": 4}]
)
def test_layers_without_a_kv_cache_are_refused(more):
    line = message(model_from_huggingface, ARCHITECTURES["Qwen3-8B"][0] | more, "it")
    assert line.startswith("model it: layers of type linear_attention cannot be counted from config.json; give its ")


def test_sliding_windows_are_counted_as_full_attention():
    config = ARCHITECTURES["Qwen3-8B"][0]
    layers = {"layer_types": ["full_attention", "sliding_attention"]}
    assert model_from_huggingface(config | layers, "it") == model_from_huggingface(config, "it")


# ----------------------------------------------------------------------------------- the shipped files


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_shipped_model_is_what_its_architecture_gives_and_what_is_published(name):
    config, parameters, active = ARCHITECTURES[name]
    counted, shipped = model_from_huggingface(config, name), find_model(name)
    same = {"source": "", "aliases": []}
    assert counted.model_copy(update=same) == shipped.model_copy(update=same)
    assert shipped.parameters == pytest.approx(parameters, rel=0.01)
    assert shipped.active_parameters == pytest.approx(active, rel=0.02)  # published with two digits
    assert shipped.source


def test_every_shipped_model_is_tested():
    assert sorted(model_names()) == sorted(ARCHITECTURES)


@pytest.mark.parametrize("file", ["gpus.toml", "models.toml"])
def test_no_name_stands_for_two_entries(file):
    entries = tomllib.loads((DATA / file).read_text(encoding="utf-8"))
    names = [known.casefold() for name, table in entries.items() for known in (name, *table.get("aliases", []))]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("name", "flops_per_byte"),
    [("A100", 153), ("H100", 295), ("H800", 295), ("H200", 206), ("H20", 37), ("L40S", 419), ("B200", 292)],
)
def test_gpus_have_the_balance_of_their_data_sheets(name, flops_per_byte):
    gpu = find_gpu(name)
    assert gpu.bf16_flops / gpu.bandwidth == pytest.approx(flops_per_byte, rel=5e-3)
    assert gpu.fp8_flops is None or gpu.fp8_flops == pytest.approx(2 * gpu.bf16_flops, rel=0.02)


def test_every_gpu_has_a_source_and_no_price():
    """Prices change by the week; the user gives his."""
    assert len(gpu_names()) == 8
    assert all(find_gpu(name).source and find_gpu(name).price_per_hour is None for name in gpu_names())


# ------------------------------------------------------------------------------------------ found by name


@pytest.mark.parametrize("name", ["H100", "h100", "H100 SXM", "h100_sxm"])
def test_a_gpu_is_found_by_its_aliases_in_any_case(name):
    assert find_gpu(name).name == "H100"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B"),
        ("qwen2.5-math-7b", "Qwen2.5-7B"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "Qwen2.5-1.5B"),
        ("Qwen3-8B-Base", "Qwen3-8B"),
        ("meta-llama/Llama-3.3-70B-Instruct", "Llama-3.1-70B"),
        ("Qwen3-30B-A3B-Thinking-2507", "Qwen3-30B-A3B"),
        ("Qwen3-235B-A22B-Instruct-2507", "Qwen3-235B-A22B"),
    ],
)
def test_a_model_is_found_with_its_owner_and_by_models_of_its_architecture(name, found):
    assert find_model(name).name == found


def test_an_unknown_gpu_is_one_line_with_the_nearest_names():
    assert message(find_gpu, "H1000") == (
        "hardware.gpu must be a name of the catalogue or a file, got 'H1000'; did you mean H100 or H800? "
        f"known: {', '.join(gpu_names())}"
    )


def test_an_unknown_model_is_one_line_with_the_nearest_names():
    line = message(find_model, "Qwen2.5-8B")
    assert line.startswith("hardware.model must be a name of the catalogue or a file, got 'Qwen2.5-8B'; did you mean ")
    assert "Qwen2.5-7B" in line.partition("known:")[0]


def test_a_name_like_no_other_has_no_suggestion():
    assert "did you mean" not in message(find_gpu, "?")


# ---------------------------------------------------------------------------------------- a user's own


OWN_GPU = {"bf16_flops": 5e14, "memory_bytes": 64e9, "bandwidth": 2e12, "network": 25e9}
OWN_MODEL = {
    "parameters": 1e9,
    "active_parameters": 1e9,
    "layers": 16,
    "width": 2048,
    "attention_width": 2048,
    "kv_bytes_per_token": 32768,
}


def toml_file(folder, table, name="mine.toml"):
    path = folder / name
    path.write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in table.items()), encoding="utf-8")
    return str(path)


def test_a_gpu_of_ones_own(tmp_path):
    gpu = find_gpu(toml_file(tmp_path, OWN_GPU))
    assert gpu == Gpu(name="mine", **OWN_GPU)
    assert (gpu.nvlink, gpu.gpus_per_node, gpu.fp8_flops) == (0.0, 8, None)


def test_a_model_of_ones_own(tmp_path):
    assert find_model(toml_file(tmp_path, OWN_MODEL)) == LanguageModel(name="mine", **OWN_MODEL)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"bandwidth": 3350.0}, "bandwidth must be from 1e+09 to 1e+15 bytes/s, got 3350; did you mean 3.35e12?"),
        ({"network": 400.0}, "network must be from 1e+09 to 1e+14 bytes/s, got 400; did you mean 50e9?"),
        ({"nvlink": 450.0}, "nvlink must be from 1e+09 to 1e+14 bytes/s, got 450; did you mean 450e9?"),
        ({"memory_bytes": 80.0}, "memory_bytes must be from 1e+09 to 1e+14 bytes, got 80; did you mean 85.9e9?"),
        ({"bf16_flops": 989.0}, "bf16_flops must be from 1e+11 to 1e+17 FLOP/s, got 989; did you mean 989e12?"),
        ({"bandwidth": 3.35e24}, "bandwidth must be from 1e+09 to 1e+15 bytes/s, got 3.35e+24; did you mean 3.35e12?"),
        ({"bf16_flops": 989e15}, "bf16_flops must be from 1e+11 to 1e+17 FLOP/s, got 9.89e+17; did you mean 989e12?"),
        ({"fp8_flops": 2e18}, "fp8_flops must be from 1e+11 to 1e+17 FLOP/s, got 2e+18; did you mean 1979e12?"),
        ({"memory_bytes": 85.9e15}, "memory_bytes must be from 1e+09 to 1e+14 bytes, got 8.59e+16; did you mean"),
        ({"nvlink": 450e12}, "nvlink must be from 1e+09 to 1e+14 bytes/s, got 4.5e+14; did you mean 450e9?"),
        ({"network": 400e12}, "network must be from 1e+09 to 1e+14 bytes/s, got 4e+14; did you mean 50e9?"),
        (
            {"gpus_per_node": 8_000_000},
            "gpus_per_node must be from 1 to 10000 accelerators, got 8e+06; did you mean 8?",
        ),
        ({"price_per_hour": 2e6}, "price_per_hour must be from 0.001 to 10000 USD per hour, got 2e+06; did you mean"),
        ({"bandwith": 1e12}, "bandwith is an unknown key; did you mean bandwidth? allowed: "),
        ({"network": "fast"}, 'network must be a number, got "fast"'),
    ],
)
def test_a_gpu_in_other_units_is_one_line(tmp_path, changed, line):
    path = toml_file(tmp_path, OWN_GPU | changed)
    assert message(find_gpu, path).startswith(f"hardware.gpu {path}: {line}")


def test_a_gpu_without_a_key_is_one_line(tmp_path):
    path = toml_file(tmp_path, {key: value for key, value in OWN_GPU.items() if key != "network"})
    assert message(find_gpu, path) == f"hardware.gpu {path}: network is missing"


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (
            {"parameters": 7.6},
            "parameters must be from 10000 to 1e+14 parameters, not billions, got 7.6; did you mean 7.6e9?",
        ),
        (
            {"parameters": 7.6e18},
            "parameters must be from 10000 to 1e+14 parameters, not billions, got 7.6e+18; did you mean 7.6e9?",
        ),
        ({"layers": 28_000_000}, "layers must be from 1 to 10000 layers, got 2.8e+07; did you mean 28?"),
        ({"width": 10**7}, "width must be from 1 to 1e+06 numbers, got 1e+07; did you mean 3584?"),
        (
            {"kv_bytes_per_token": 57e9},
            "kv_bytes_per_token must be from 1 to 1e+09 bytes per token, got 5.7e+10; did you mean 57344?",
        ),
        ({"active_parameters": 2e9}, "active_parameters must be at most parameters = 1e+09, got 2e+09"),
        ({"experts": 8}, "experts, experts_per_token and expert_parameters belong together, got some of them"),
        (
            {"experts": 8, "experts_per_token": 9, "expert_parameters": 5e8},
            "experts_per_token must be at most experts = 8, got 9",
        ),
    ],
)
def test_a_model_that_contradicts_itself_is_one_line(tmp_path, changed, line):
    path = toml_file(tmp_path, OWN_MODEL | changed)
    assert message(find_model, path) == f"hardware.model {path}: {line}"


def test_files_that_are_none(tmp_path):
    broken = tmp_path / "broken.toml"
    broken.write_text("a = ", encoding="utf-8")
    assert message(find_gpu, str(tmp_path / "no.toml")).endswith("no.toml: No such file or directory")
    assert f"hardware.gpu {broken} is not valid TOML" in message(find_gpu, str(broken))
    assert message(find_model, str(tmp_path / "no.json")).endswith("no.json: No such file or directory")


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


def test_layers_without_experts_that_are_no_list_are_none():
    config = ARCHITECTURES["Qwen3-30B-A3B"][0]
    assert model_from_huggingface(config | {"mlp_only_layers": 3}, "it") == model_from_huggingface(config, "it")


def test_a_config_with_a_wrong_number_names_it():
    config = llama(4096, 32, 32, 14336) | {"num_hidden_layers": "many"}
    line = "model it: num_hidden_layers of config.json must be a whole number, got 'many'"
    assert message(model_from_huggingface, config, "it") == line
