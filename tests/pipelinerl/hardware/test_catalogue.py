"""The catalogue: names are found, shipped entries are sound, and wrong files are refused in one line."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from refusals import message

from pipelinerl.hardware.catalogue import Gpu, LanguageModel, find_gpu, find_model, gpu_names, gpu_of_device

DATA = Path(__file__).parents[3] / "pipelinerl" / "hardware" / "data"


@pytest.mark.parametrize("file", ["gpus.toml", "models.toml"])
def test_no_name_stands_for_two_entries(file):
    entries = tomllib.loads((DATA / file).read_text(encoding="utf-8"))
    names = [known.casefold() for name, table in entries.items() for known in (name, *table.get("aliases", []))]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("name", "flops_per_byte"),
    [
        ("A100", 153),
        ("H100", 295),
        ("H800", 295),
        ("H200", 206),
        ("H20", 37),
        ("L40S", 419),
        ("B200", 292),
        ("MI300X", 247),
        ("B300", 290),
        ("GB300", 312),
        ("RTX PRO 6000", 293),
        ("MI355X", 315),
    ],
)
def test_gpus_have_the_balance_of_their_data_sheets(name, flops_per_byte):
    gpu = find_gpu(name)
    assert gpu.bf16_flops / gpu.bandwidth == pytest.approx(flops_per_byte, rel=5e-3)
    assert gpu.fp8_flops is None or gpu.fp8_flops == pytest.approx(2 * gpu.bf16_flops, rel=0.02)


def test_every_gpu_has_a_source_and_every_price_its_terms_month_and_page():
    gpus = [find_gpu(name) for name in gpu_names()]
    assert len(gpus) == 13
    assert all(one.source for one in gpus)
    assert {one.name for one in gpus if one.price_per_hour is None} == {"H20", "H800", "GB300", "MI355X"}
    for one in gpus:
        dated = re.fullmatch(r"on-demand, 20[23]\d-[01]\d; \w+\.\w+\S*(, .+)?", one.price_source)
        assert (dated is not None) == (one.price_per_hour is not None), one.name


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GB300", "GB300"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("AMD Instinct MI355X", "MI355X"),
    ],
)
def test_a_driver_names_the_newest_gpus(device, name):
    found = gpu_of_device(device)
    assert found is not None
    assert found.name == name


def test_watts_are_those_of_the_data_sheets():
    watts = {name: find_gpu(name).watts for name in gpu_names()}
    assert watts == {
        "A100": 400, "B200": 1000, "GB200": 1200, "L40S": 350, "H20": 400, "MI300X": 750, "B300": 1100, "GB300": 1400,
        "RTX PRO 6000": 600, "MI355X": 1400, "H100": 700, "H200": 700, "H800": 700,
    }  # fmt: skip


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
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "Qwen3-30B-A3B"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen3-Next-80B-A3B"),
        ("Qwen/Qwen3-Next-80B-A3B-Thinking", "Qwen3-Next-80B-A3B"),
        ("zai-org/GLM-4.7", "GLM-4.5"),
        ("moonshotai/Kimi-K2-Instruct-0905", "Kimi-K2"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "Mixtral-8x7B"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Nemotron-3-Nano-30B-A3B"),
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


OWN_GPU = {"bf16_flops": 5e14, "memory_bytes": 64e9, "bandwidth": 2e12, "network": 25e9}
OWN_MODEL = {
    "parameters": 1e9, "active_parameters": 1e9, "layers": 16, "width": 2048, "attention_width": 2048,
    "kv_bytes_per_token": 32768,
}  # fmt: skip


def toml_file(folder, table, name="mine.toml"):
    path = folder / name
    lines = [f"{key} = {json.dumps(value)}" for key, value in table.items() if value is not None]
    path.write_text("\n".join(lines), encoding="utf-8")
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
        ({"watts": 0.7}, "watts must be from 1 to 100000 watts, got 0.7; did you mean 700?"),
        ({"bandwith": 1e12}, "bandwith is an unknown key; did you mean bandwidth? allowed: "),
    ],
)
def test_a_gpu_in_other_units_or_with_a_wrong_key_is_one_line(tmp_path, changed, line):
    path = toml_file(tmp_path, OWN_GPU | changed)
    assert message(find_gpu, path).startswith(f"hardware.gpu {path}: {line}")


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"parameters": 7.6},
            "parameters must be from 10000 to 1e+14 parameters, not billions, got 7.6; did you mean 7.6e9?"),
        ({"parameters": 7.6e18},
            "parameters must be from 10000 to 1e+14 parameters, not billions, got 7.6e+18; did you mean 7.6e9?"),
        ({"layers": 28_000_000}, "layers must be from 1 to 10000 layers, got 2.8e+07; did you mean 28?"),
        ({"width": 10**7}, "width must be from 1 to 1e+06 numbers, got 1e+07; did you mean 3584?"),
        ({"kv_bytes_per_token": 57e9},
            "kv_bytes_per_token must be from 1 to 1e+09 bytes per token, got 5.7e+10; did you mean 57344?"),
        ({"active_parameters": 2e9}, "active_parameters must be at most parameters = 1e+09, got 2e+09"),
        ({"experts": 8}, "experts, experts_per_token and expert_parameters belong together, got some of them"),
        ({"experts": 8, "experts_per_token": 9, "expert_parameters": 5e8},
            "experts_per_token must be at most experts = 8, got 9"),
        ({"expert_layers": 8}, "expert_layers needs experts, got expert_layers=8 of a dense model"),
        ({"experts": 8, "experts_per_token": 2, "expert_parameters": 5e8, "expert_layers": 17},
            "expert_layers must be at most layers = 16, got 17"),
    ],
)  # fmt: skip
def test_a_model_that_contradicts_itself_is_one_line(tmp_path, changed, line):
    path = toml_file(tmp_path, OWN_MODEL | changed)
    assert message(find_model, path) == f"hardware.model {path}: {line}"


def test_missing_and_broken_files_are_refused(tmp_path):
    broken = tmp_path / "broken.toml"
    broken.write_text("a = ", encoding="utf-8")
    assert message(find_gpu, str(tmp_path / "no.toml")).endswith("no.toml: No such file or directory")
    assert f"hardware.gpu {broken} is not valid TOML" in message(find_gpu, str(broken))
    assert message(find_model, str(tmp_path / "no.json")).endswith("no.json: No such file or directory")


def test_more_accelerators_than_heads_of_keys_and_values_hold_copies():
    """Qwen2.5-7B has 4: an engine of 8 holds each twice, one of 4 once."""
    model = find_model("Qwen2.5-7B")
    assert [model.cached_bytes(size) / model.kv_bytes_per_token for size in (1, 4, 8)] == [1, 1, 2]
    assert find_model("DeepSeek-V3").cached_bytes(8) == 70_272
