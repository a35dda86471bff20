"""Facts of one version of vLLM: its arguments, checked by name before anything starts; its answers."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from refusals import message
from vllm_engine import settings

from backends.vllm.version import arguments
from backends.vllm.version.arguments import check_arguments, check_version, engine_arguments
from backends.vllm.version.client import as_generated, environment
from pipelinerl.config.engine import SpeculationConfig
from pipelinerl.errors import BackendError, ConfigError

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


@needs_vllm
def test_an_unknown_argument_is_one_line_with_the_nearest_names() -> None:
    assert message(check_arguments, {"kv_cache_type": "fp8"}, accelerators=1, device="cpu") == (
        'train.engine.vllm.kv_cache_type is no argument of vLLM 0.32\'s engine; did you mean kv_cache_dtype? got "fp8"'
    )
    check_arguments({"kv_cache_dtype": "fp8", "enable_expert_parallel": True, "seed": 3}, accelerators=1, device="gpu")


def test_weights_in_8_bits_are_of_formats_that_vllm_makes_from_bfloat16() -> None:
    for quantization in arguments.EIGHT_BIT:
        check_arguments({"quantization": quantization}, accelerators=1, device="gpu")
    for other in ("fp8", "awq", True):  # of checkpoints; no name
        says = message(check_arguments, {"quantization": other}, accelerators=1, device="gpu")
        assert says.startswith(
            "train.engine.vllm.quantization must be one of fp8_per_block, fp8_per_channel, fp8_per_tensor, got "
        )


REPLICAS = "data_parallel_size must divide cluster.tensor_parallel=4, the accelerators of an engine, got "


@pytest.mark.parametrize(
    ("argument", "value", "text"),
    [
        ("max_num_seqs", 64, "max_num_seqs must be left out, since scheduler.generation_batch_size decides, got 64"),
        (
            "quantization",
            "fp8_per_block",
            "quantization must be left out on device='cpu', whose engines are in float32",
        ),
        ("quantization_config", {}, "quantization_config must be left out, since quantization names a format that"),
        ("enable_expert_parallel", True, "enable_expert_parallel must be false on device='cpu', where"),
        *(("data_parallel_size", replicas, REPLICAS) for replicas in (0, 3, "2", True)),
    ],
)
def test_an_argument_that_cannot_be_is_refused_with_the_reason(argument: str, value: object, text: str) -> None:
    says = message(check_arguments, {argument: value}, accelerators=4, device="cpu")
    assert says.startswith(f"train.engine.vllm.{text}")
    check_arguments({"data_parallel_size": 2}, accelerators=4, device="cpu")


@needs_vllm
def test_every_argument_that_is_named_here_is_one_of_this_version() -> None:
    check_version()
    named = engine_arguments(settings(Path("model"))).keys() | arguments.DECIDED_BY.keys() | arguments.REFUSED.keys()
    assert named - arguments._argument_names() == set()
    source = (arguments._package() / "config" / "quantization.py").read_text(encoding="utf-8")
    assert all(f'    "{name}": QuantizationConfigArgs(' in source for name in arguments.EIGHT_BIT)


@needs_vllm
def test_another_version_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "VERSION", "0.3")  # not even the beginning of it is enough
    with pytest.raises(ConfigError, match=r"^train needs vLLM 0\.3 \(backends/vllm/version/ .*\), got 0\.32\.\d+$"):
        check_version()


def test_arguments_of_the_run_file_override_ours_but_not_arguments_that_follow_from_its_keys() -> None:
    plain = engine_arguments(settings(Path("model"), num_slots=64, tensor_parallel=4))
    assert (plain["enable_prefix_caching"], plain["max_num_seqs"], plain["tensor_parallel_size"]) == (True, 64, 4)
    given = {"enable_prefix_caching": False, "data_parallel_size": 4, "max_num_batched_tokens": 1000, "max_num_seqs": 1}
    changed = engine_arguments(settings(Path("model"), num_slots=66, tensor_parallel=4, arguments=given))
    assert (changed["enable_prefix_caching"], changed["max_num_batched_tokens"]) == (False, 1000)
    assert (changed["data_parallel_size"], changed["tensor_parallel_size"], changed["max_num_seqs"]) == (4, 1, 17)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"method": "ngram"}, {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}),
        ({"method": "eagle3", "model": "/drafter"}, {"method": "eagle3", "model": "/drafter"}),
        (
            {"method": "mtp", "off_above": 8},
            {"method": "mtp", "num_speculative_tokens_per_batch_size": [(1, 8, 3), (9, 64, 0)]},
        ),
        ({"method": "mtp", "off_above": 64}, {"method": "mtp"}),  # no batch is larger
    ],
)
def test_a_drafter_of_the_run_file_is_the_engine_s(keys: dict[str, Any], expected: dict[str, Any]) -> None:
    speculation = SpeculationConfig(tokens=3, **keys)
    asked = engine_arguments(settings(Path("model"), num_slots=64, speculation=speculation))["speculative_config"]
    assert asked == {"num_speculative_tokens": 3, **expected}


@pytest.mark.parametrize(
    ("device", "tensor_parallel", "compiler", "given", "off"),
    [
        ("gpu", 2, False, {}, True),
        ("gpu", 2, True, {}, False),
        ("gpu", 1, False, {}, False),
        ("cpu", 2, False, {}, False),
        ("gpu", 2, False, {"data_parallel_size": 2}, False),
        ("gpu", 2, False, {"compilation_config": {"mode": 3}}, False),
    ],
)
def test_the_fused_all_reduce_is_off_where_it_could_not_be_compiled(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    tensor_parallel: int,
    compiler: bool,
    given: dict[str, Any],
    off: bool,
) -> None:
    """It needs nvcc on the machine, and several workers that share a layer; the run file has the last word."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    if compiler:
        (tmp_path / "cuda" / "bin").mkdir(parents=True)
        (tmp_path / "cuda" / "bin" / "nvcc").touch(mode=0o755)
    asked = engine_arguments(settings(tmp_path, device=device, tensor_parallel=tensor_parallel, arguments=given))
    switched = {"pass_config": {"fuse_allreduce_rms": False}}
    assert (asked.get("compilation_config") == switched) is off


@needs_vllm
def test_vllm_knows_the_switch_of_the_fused_all_reduce() -> None:
    """Read from its source: loading it takes seconds."""
    source = (arguments._package() / "config" / "compilation.py").read_text()
    assert "    pass_config: PassConfig" in source
    assert "    fuse_allreduce_rms: bool" in source


def test_only_engines_on_gpus_compile_and_keep_it_on_their_own_disk() -> None:
    assert "VLLM_CACHE_ROOT" not in environment(settings(Path("model")))
    assert environment(settings(Path("model"), device="gpu"))["VLLM_CACHE_ROOT"].startswith("/tmp/")


def answer(tokens: list[int], of_tokens: list[int]) -> Any:
    spans = [SimpleNamespace(version="default", start=0, end=len(tokens))]
    flat = SimpleNamespace(token_ids=of_tokens, logprobs=[-1.0 - index for index in range(len(of_tokens))])
    completion = SimpleNamespace(
        finish_reason="stop", token_ids=tokens, logprobs=flat, weight_versions=spans, routed_experts=None
    )
    return SimpleNamespace(outputs=[completion], request_id="7")


def test_every_token_has_its_own_log_probability() -> None:
    assert as_generated(answer([4, 5], [4, 5])).logprob_T.tolist() == [-1.0, -2.0]
    assert as_generated(answer([], [])).logprob_T.tolist() == []
    for others in ([4], [4, 6], [4, 5, 6]):
        with pytest.raises(BackendError, match="rollout=7 has log-probabilities of other tokens"):
            as_generated(answer([4, 5], others))


NO_CACHE = "without the prefix cache, beside which vLLM keeps the experts"


@pytest.mark.parametrize(
    ("given", "device", "caches", "why"),
    [
        ({}, "cpu", True, "on device='cpu', where vLLM 0.32 does not return experts"),
        ({}, "gpu", False, NO_CACHE),
        ({"enable_prefix_caching": False}, "gpu", True, NO_CACHE),
        ({"kv_offloading_size": 4.0}, "gpu", True, "with train.engine.vllm.kv_offloading_size"),
        ({}, "gpu", True, None),
    ],
)
def test_engines_that_would_not_return_experts_are_refused(given: Any, device: Any, caches: bool, why: Any) -> None:
    check = partial(arguments.check_returns_routes, given, device, caches=caches)
    if why is None:
        check()
    else:
        assert message(check) == f"train.trainer.router_replay must be false {why}, got true"
