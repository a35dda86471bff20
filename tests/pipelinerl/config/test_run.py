"""Run files: what is read, what overrides do, the way there and back, and the line for every fault."""

from __future__ import annotations

import json
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from pipelinerl.config.compare import CompareConfig, Variant
from pipelinerl.config.run import RunConfig
from pipelinerl.config.run_file import dump_run, load_run, parse_run, with_overrides
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.tables import Decode
from pipelinerl.scheduler.events import OnFull, OnStale, WeightUpdate

TINY = """
optimizer_steps = 6

[cluster]
accelerators = 4
generation_accelerators = 2

[scheduler]
train_batch_size = 8
generation_batch_size = 16

[workload]
length = { kind = "uniform", max = 64 }

[hardware]
decode = { kind = "affine", step_s = 0.01 }
training = { token_s = 1e-4 }
"""

ROOFLINE = {
    "kind": "roofline",
    "peak_flops": 9.89e14,
    "bandwidth": 3.35e12,
    "parameters_read": 7.1e9,
    "parameters_active": 7.1e9,
    "bytes_per_parameter": 1.0,
    "kv_bytes_per_token": 57344.0,
    "experts": 128,
    "experts_per_token": 8,
    "expert_parameters": 6e9,
    "weight_efficiency": 0.8,
    "kv_efficiency": 0.8,
    "flops_efficiency": 0.6,
    "step_overhead_s": 0.001,
    "sequence_overhead_s": 0.00001,
}

EVERY_KEY: dict[str, Any] = {
    "seed": 7,
    "optimizer_steps": 20,
    "cluster": {"accelerators": 16, "generation_accelerators": 8, "tensor_parallel": 2},
    "scheduler": {
        "kind": "pipeline",
        "train_batch_size": 32,
        "generation_batch_size": 64,
        "optimizer_steps_per_rl_step": 4,
        "publish_every": 1,
        "partial_rollouts": False,
        "micro_batch_size": 16,
        "max_lag": 5,
        "weight_update": "recompute",
        "on_stale": "drop",
        "ready_queue_size": 48,
        "on_full": "drop_oldest",
        "filter_no_signal": True,
        "discard_limit": 1000,
    },
    "workload": {
        "group_size": 4,
        "prompt_tokens": 100,
        "success_rate": 0.25,
        "length": {
            "kind": "lognormal",
            "max": 900,
            "mean": 300.0,
            "cv": 0.5,
            "source": "skythought",
            "growth": 1.5,
        },
    },
    "hardware": {
        "gpu": "H100",
        "model": "Qwen2.5-7B",
        "level": "optimistic",
        "coefficients": {"training_mfu": 0.31},
        "decode": {"kind": "affine", "step_s": 0.01, "sequence_s": 0.001, "context_token_s": 1e-7},
        "prefill": {"sequence_s": 0.001, "token_s": 1e-5, "token_squared_s": 1e-10},
        "kv_cache_tokens": 1000,
        "training": {
            "token_s": 1e-4,
            "token_squared_s": 1e-9,
            "step_s": 0.5,
            "micro_batch_s": 0.1,
            "sequence_accelerators": 2,
        },
        "weights": {"publish_s": 0.1, "transfer_s": 0.2, "pause_s": 0.3},
        "switch": {"to_training_s": 1.0, "to_generation_s": 2.0},
        "latency": {"dispatch_s": 0.01, "dispatch_jitter_s": 0.02, "reward_s": 0.03, "preprocess_s": 0.04},
    },
    "policy": {
        "task": "reverse",
        "size": 12,
        "layers": 3,
        "width": 24,
        "heads": 2,
        "temperature": 0.9,
        "learning_rate": 3e-4,
        "gradient_clip": 0.5,
        "loss": {
            "kind": "cispo",
            "truncation": 2.0,
            "clip_low": 0.1,
            "clip_high": 0.3,
            "kl_coefficient": 0.0,
            "value_coefficient": 0.0,
        },
        "warm_start": {"steps": 7, "batch_size": 8, "learning_rate": 1e-3, "seed": 3},
    },
    "drift": {"exponent": 1.5, "rates": [0.01, 0.02]},
    "compare": {
        "arms": [{"name": "as it is", "set": []}, {"name": "lag 1", "set": ["scheduler.max_lag=1"]}],
        "scenarios": [{"name": "slow", "set": ["hardware.training.token_s=1e-3"]}],
        "baseline": "lag 1",
        "seeds": [3, 5],
    },
    "plan": {
        "schedulers": ["pipeline", "one_step_off"],
        "generation_accelerators": [2, 4],
        "tensor_parallel": [1, 2],
        "generation_batch_size": [8, 16],
        "optimizer_steps_per_rl_step": [2, 4],
        "train_batch_size": [16],
        "ready_queue_size": [32],
        "max_lag": [0, 4],
        "lag_limit": 8,
        "mean_lag_limit": 3.5,
        "min_ess": 0.5,
        "gpu_hours": 100.0,
        "budget": 300.0,
        "price_per_gpu_hour": 2.5,
        "simulate": 4,
        "simulate_steps": 10,
    },
    "train": {
        "device": "cpu",
        "ray_address": "auto",
        "transport": "file",
        "weights_folder": "/dev/shm",
        "model": {"path": "/models/tiny"},
        "task": {
            "name": "arithmetic",
            "settings": {"largest_operand": 9},
            "max_prompt_tokens": 16,
            "overlong_tokens": 4,
            "reward_timeout_s": 5.0,
        },
        "sampling": {"temperature": 0.7},
        "optimizer": {
            "learning_rate": 1e-4,
            "schedule": "cosine",
            "warmup_steps": 5,
            "beta1": 0.8,
            "beta2": 0.99,
            "weight_decay": 0.1,
            "gradient_clip": 0.3,
        },
        "loss": {
            "kind": "ppo",
            "truncation": 2.0,
            "clip_low": 0.1,
            "clip_high": 0.3,
            "kl_coefficient": 0.01,
            "value_coefficient": 0.5,
        },
        "trainer": {
            "kind": "deepspeed",
            "zero_stage": 3,
            "pack_tokens": 2048,
            "activation_checkpointing": True,
            "step_timeout_s": 60.0,
        },
        "engine": {
            "kind": "vllm",
            "gpu_memory_utilization": 0.5,
            "cpu_kv_cache_gib": 2,
            "start_timeout_s": 100.0,
            "update_timeout_s": 10.0,
            "restarts": 1,
        },
        "checkpoint": {"every": 10, "keep": 3},
        "evaluation": {"problems": 50},
        "logging": {"wandb_project": "lag"},
    },
}
"""A valid run file with every key but those of the other two kinds of decode."""

DECODES = (
    EVERY_KEY["hardware"]["decode"],
    ROOFLINE,
    {"kind": "utilisation", "flash_s": 15.4e-6, "table": "/somewhere/curve.csv"},
)


def tiny(*overrides: str) -> RunConfig:
    return parse_run(with_overrides(tomllib.loads(TINY), overrides))


def faults(data: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_run(data)
    return str(caught.value).splitlines()


def tiny_faults(*overrides: str) -> list[str]:
    return faults(with_overrides(tomllib.loads(TINY), overrides))


def run_file(folder: Path, text: str = TINY) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


# ---------------------------------------------------------------------------------------- reading


def test_a_run_file_gives_what_it_says_and_the_defaults(tmp_path: Path) -> None:
    config = load_run(run_file(tmp_path))
    assert config.model_dump(exclude_defaults=True) == {
        "optimizer_steps": 6,
        "cluster": {"accelerators": 4, "generation_accelerators": 2},
        "scheduler": {"train_batch_size": 8, "generation_batch_size": 16},
        "workload": {"length": {"kind": "uniform", "max": 64}},
        "hardware": {"decode": {"kind": "affine", "step_s": 0.01}, "training": {"token_s": 1e-4}},
    }
    scheduler = config.scheduler
    assert (config.seed, config.cluster.tensor_parallel, config.workload.group_size) == (0, 1, 1)
    assert (scheduler.kind, scheduler.max_lag, scheduler.weight_update) == ("pipeline", None, WeightUpdate.KEEP)
    assert (scheduler.on_stale, scheduler.on_full) == (OnStale.TRAIN, OnFull.WAIT)
    assert (scheduler.micro_batch, scheduler.ready_queue_limit) == (8, 16)  # the whole batch; twice the batch
    assert config.compare is None


def test_every_key_is_read_as_written() -> None:
    for decode in DECODES:
        data = {**EVERY_KEY, "hardware": {**EVERY_KEY["hardware"], "decode": decode}}
        assert parse_run(data).model_dump(mode="json", exclude_none=True) == data


def test_every_key_of_the_configuration_is_in_this_test() -> None:
    tables = [EVERY_KEY, *EVERY_KEY.values(), EVERY_KEY["workload"]["length"], *EVERY_KEY["hardware"].values()]
    tables += [*EVERY_KEY["train"].values(), EVERY_KEY["policy"]["warm_start"]]
    tables += [*DECODES, *EVERY_KEY["compare"]["arms"]]
    keys = [set(one) for one in tables if isinstance(one, dict)]
    models = list(models_of(RunConfig))
    assert CompareConfig in models  # it looks through None
    assert {type(parse_run(EVERY_KEY).hardware.decode)} < set(models)  # and through unions
    for model in models:
        assert set(model.model_fields) in keys, model


def models_of(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield a model and all models inside it."""
    yield model
    for field in model.model_fields.values():
        for one in parts_of(field.annotation):
            if isinstance(one, type) and issubclass(one, BaseModel):
                yield from models_of(one)


def parts_of(annotation: Any) -> Iterator[Any]:
    """Yield a type and all types inside it."""
    yield annotation
    for one in get_args(annotation):
        yield from parts_of(one)


def test_whole_numbers_are_taken_for_seconds() -> None:
    assert tiny("hardware.decode.step_s=1").hardware.decode.model_dump()["step_s"] == 1.0


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        tiny().scheduler.train_batch_size = 16


def test_pipeline_splits_the_cluster_and_conventional_shares_it() -> None:
    data = with_overrides(EVERY_KEY, ["cluster.accelerators=20"])
    pipeline = parse_run(data)
    assert not pipeline.colocated
    assert (pipeline.generation_accelerators, pipeline.training_accelerators, pipeline.num_engines) == (8, 12, 4)
    conventional = parse_run(with_overrides(data, ["scheduler.kind=conventional"]))
    assert conventional.colocated
    assert (conventional.generation_accelerators, conventional.training_accelerators) == (20, 20)
    assert conventional.num_engines == 10


def test_conventional_needs_no_generation_accelerators() -> None:
    data = tomllib.loads(TINY)
    del data["cluster"]["generation_accelerators"]
    config = parse_run(with_overrides(data, ["scheduler.kind=conventional"]))
    assert (config.num_engines, config.training_accelerators) == (4, 4)


# -------------------------------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("override", "keys", "value"),
    [
        ("scheduler.max_lag=8", ("scheduler", "max_lag"), 8),
        ("scheduler.max_lag= 8", ("scheduler", "max_lag"), 8),
        (" scheduler . max_lag =8", ("scheduler", "max_lag"), 8),
        ("scheduler.kind=conventional", ("scheduler", "kind"), "conventional"),
        ('scheduler.kind="conventional"', ("scheduler", "kind"), "conventional"),
        ("scheduler.filter_no_signal=true", ("scheduler", "filter_no_signal"), True),
        ("hardware.training.token_s=2e-4", ("hardware", "training", "token_s"), 2e-4),
        ("hardware.kv_cache_tokens=1_000", ("hardware", "kv_cache_tokens"), 1000),
        ("hardware.weights.pause_s=0.5", ("hardware", "weights", "pause_s"), 0.5),  # a table that was not there
        ("workload.length={kind='fixed', max=3}", ("workload", "length"), {"kind": "fixed", "max": 3}),
        ("workload.length.source=a=b", ("workload", "length", "source"), "a=b"),  # only the first = parts
        ("workload.length.source=", ("workload", "length", "source"), ""),
        ("seed=1\noptimizer_steps=2", ("seed",), "1\noptimizer_steps=2"),  # one override sets one key
        ("compare.arms=[]", ("compare", "arms"), []),
    ],
)
def test_an_override_sets_one_key(override: str, keys: tuple[str, ...], value: Any) -> None:
    before = tomllib.loads(TINY)
    changed: Any = with_overrides(before, [override])
    assert before == tomllib.loads(TINY)  # left alone
    for key in keys:
        changed = changed[key]
    assert changed == value


def test_later_overrides_win() -> None:
    assert with_overrides({"a": {"b": 1, "c": 1}}, ["a.b=2", "a.b=3", "a={d=4}", "a.e=5"]) == {"a": {"d": 4, "e": 5}}


def test_the_seed_argument_replaces_the_seed_of_the_file(tmp_path: Path) -> None:
    path = run_file(tmp_path, "seed = 3\n" + TINY)
    assert [load_run(path).seed, load_run(path, seed=0).seed, load_run(path, seed=9).seed] == [3, 0, 9]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("max_lag", "--set must be KEY=VALUE with a dotted key, got 'max_lag'"),
        ("=3", "--set must be KEY=VALUE with a dotted key, got '=3'"),
        ("", "--set must be KEY=VALUE with a dotted key, got ''"),
        ("scheduler..max_lag=3", "--set must be KEY=VALUE with a dotted key, got 'scheduler..max_lag=3'"),
        ("optimizer_steps.x=3", "--set optimizer_steps.x=3: optimizer_steps is not a table"),
        ("workload.length.max.x=3", "--set workload.length.max.x=3: max is not a table"),
    ],
)
def test_a_wrong_override_is_one_line(tmp_path: Path, override: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run(run_file(tmp_path), [override])
    assert str(caught.value) == line


# ------------------------------------------------------------------------------------------ paths


def test_relative_paths_are_relative_to_the_run_file_and_come_out_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run_file(tmp_path / "runs")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    lengths = ["workload.length.kind=empirical", "workload.length.source=../data/lengths.csv"]
    decode = ["hardware.decode={kind='utilisation', flash_s=1e-5, table='curve.csv'}"]
    config = load_run(path, [*lengths, *decode])
    assert config.workload.length.source == str(tmp_path / "data" / "lengths.csv")
    assert config.hardware.decode.model_dump()["table"] == str(tmp_path / "runs" / "curve.csv")
    assert load_run(run_file(tmp_path / "copy", dump_run(config))) == config


def test_a_path_that_no_file_can_have_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run(run_file(tmp_path), ["workload.length.source=a\0.csv"])
    assert str(caught.value) == 'workload.length.source must be the path of a file, got "a\\u0000.csv"'


def test_a_path_that_leads_in_a_circle_is_left_to_who_opens_it(tmp_path: Path) -> None:
    loop = tmp_path / "loop.csv"
    loop.symlink_to(loop)
    overrides = ["workload.length.kind=empirical", "workload.length.source=loop.csv"]
    assert load_run(run_file(tmp_path), overrides).workload.length.source == str(loop)


@pytest.mark.parametrize("source", ["skythought", "/data/lengths.csv"])
def test_names_of_shipped_sets_and_absolute_paths_stay(tmp_path: Path, source: str) -> None:
    overrides = ["workload.length.kind=empirical", f"workload.length.source={source}"]
    assert load_run(run_file(tmp_path), overrides).workload.length.source == source


def test_paths_in_the_overrides_of_a_comparison_are_relative_to_the_run_file(tmp_path: Path) -> None:
    arms = [
        {"name": "plain", "set": ["workload.length.source=mine.csv", "seed=1", "not an override"]},
        {"name": "quoted", "set": ["workload.length.source = 'mine.csv'", "workload.length.source=skythought"]},
        {"name": "table", "set": ['workload.length={kind="empirical", source="mine.csv", max=9}']},
    ]
    scenario = {"name": "curve", "set": ["hardware.decode.table=a/curve.csv"]}
    compare = {"arms": arms, "scenarios": [scenario], "baseline": "plain"}
    config = load_run(run_file(tmp_path, tomli_w.dumps({**tomllib.loads(TINY), "compare": compare})))
    mine, curve = tmp_path / "mine.csv", tmp_path / "a" / "curve.csv"
    assert config.compare == CompareConfig(
        arms=[
            Variant(name="plain", set=[f"workload.length.source={mine}", "seed=1", "not an override"]),
            Variant(name="quoted", set=[f"workload.length.source = '{mine}'", "workload.length.source=skythought"]),
            Variant(name="table", set=[f'workload.length={{kind="empirical", source="{mine}", max=9}}']),
        ],
        scenarios=[Variant(name="curve", set=[f"hardware.decode.table={curve}"])],
        baseline="plain",
    )
    assert load_run(run_file(tmp_path / "copy", dump_run(config))) == config


# ----------------------------------------------------------------------------- the way there and back

seconds = st.floats(0, 1e6)
positive = st.floats(1e-12, 1e18)
share = st.floats(0.0, 1.0, exclude_min=True)
words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12)
paths = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12).map("{}.csv".format)


def table(required: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(required, optional=optional)


decodes = st.one_of(
    table({"kind": st.just("utilisation"), "flash_s": positive}, {"table": paths}),
    table({"kind": st.just("affine"), "step_s": positive}, {"sequence_s": seconds, "context_token_s": seconds}),
    table(
        {"kind": st.just("roofline"), "kv_bytes_per_token": st.floats(0, 1e6)}
        | dict.fromkeys(("peak_flops", "bandwidth"), st.floats(1e9, 1e18))
        | dict.fromkeys(("parameters_read", "parameters_active"), positive),
        {"bytes_per_parameter": positive, "step_overhead_s": seconds, "sequence_overhead_s": seconds}
        | dict.fromkeys(("weight_efficiency", "kv_efficiency", "flops_efficiency"), share),
    ),
)
variants = st.builds(lambda name, overrides: {"name": name, "set": overrides}, words, st.lists(words, max_size=3))


@st.composite
def run_tables(draw: st.DrawFn) -> dict[str, Any]:
    """Return the tables of a valid run file, any keys set or left out."""
    tensor_parallel = draw(st.integers(1, 4))
    engines = draw(st.integers(1, 5))
    accelerators = tensor_parallel * draw(st.integers(engines + 1, 9))
    group_size, groups, micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    batch = group_size * groups * micro_batches
    longest = draw(st.integers(2, 10**6))
    means = st.floats(1.0, longest, exclude_max=True)
    kind = draw(st.sampled_from(["fixed", "uniform", "lognormal", "empirical"]))
    needed = {"lognormal": {"mean": means, "cv": positive}, "empirical": {"source": words | paths}}.get(kind, {})
    length = table({"kind": st.just(kind), "max": st.just(longest)} | needed, {"growth": positive})
    rl_step = draw(st.integers(1, 9))
    scheduler = table(
        {"train_batch_size": st.just(batch), "generation_batch_size": st.integers(1, 512)},
        {
            "kind": st.sampled_from(["pipeline", "conventional", "one_step_off"]),
            "optimizer_steps_per_rl_step": st.just(rl_step),
            "micro_batch_size": st.just(group_size * groups),
            "publish_every": st.integers(1, rl_step),
            "max_lag": st.integers(2 * rl_step - 1, 100),
            "weight_update": st.sampled_from([one.value for one in WeightUpdate]),
            "on_stale": st.sampled_from([one.value for one in OnStale]),
            "ready_queue_size": st.integers(batch, 10**4),
            "on_full": st.sampled_from([one.value for one in OnFull]),
            "filter_no_signal": st.booleans() if group_size > 1 else st.just(False),
            "discard_limit": st.integers(1, 10**9),
        },
    )
    workload = table(
        {"group_size": st.just(group_size), "prompt_tokens": st.just(10), "length": length},
        {"success_rate": st.floats(0, 1)},
    )
    hardware = table(
        {
            "decode": decodes,
            "training": table(
                {"token_s": seconds},
                dict.fromkeys(("step_s", "micro_batch_s", "token_squared_s"), seconds)
                | {"sequence_accelerators": st.integers(1, 9)},
            ),
        },
        {
            "prefill": table({}, dict.fromkeys(("sequence_s", "token_s", "token_squared_s"), seconds)),
            "kv_cache_tokens": st.integers(longest + 10, 10**7),
            "weights": table({}, dict.fromkeys(("publish_s", "transfer_s", "pause_s"), seconds)),
            "switch": table({}, dict.fromkeys(("to_training_s", "to_generation_s"), seconds)),
            "latency": table(
                {}, dict.fromkeys(("dispatch_s", "dispatch_jitter_s", "reward_s", "preprocess_s"), seconds)
            ),
        },
    )
    cluster = {
        "accelerators": accelerators,
        "generation_accelerators": engines * tensor_parallel,
        "tensor_parallel": tensor_parallel,
    }
    tables = {"cluster": st.just(cluster), "scheduler": scheduler, "workload": workload, "hardware": hardware}
    names = st.lists(variants, min_size=1, max_size=3, unique_by=lambda one: one["name"])
    data = draw(table({"optimizer_steps": st.integers(1, 10**6), **tables}, {"seed": st.integers(0, 2**70)}))
    if draw(st.booleans()):
        arms = draw(names)
        data["compare"] = {"arms": arms, "baseline": draw(st.sampled_from(arms))["name"]}
        if draw(st.booleans()):
            data["compare"]["scenarios"] = draw(names)
    return data


@settings(deadline=None)
@given(run_tables())
def test_what_is_dumped_is_read_back_equal_from_any_folder(data: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = load_run(run_file(Path(folder) / "first", tomli_w.dumps(data)))
        text = dump_run(config)
        again = load_run(run_file(Path(folder) / "second", text))
    assert again == config
    assert dump_run(again) == text
    assert tomllib.loads(text) == config.model_dump(mode="json", exclude_none=True)


# ----------------------------------------------------------------------------------------- faults


def leaves(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and value of everything that is no table; of a list, its first entry stands for all."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from leaves(value, f"{path}.{key}" if path else key)
    else:
        yield path, data


def every_case() -> list[tuple[str, Any, dict[str, Any]]]:
    """Return each key that is no table, its value, and the run file it is in."""
    own = "train.task.settings."  # the task's business
    cases = [(key, value, EVERY_KEY) for key, value in leaves(EVERY_KEY) if not key.startswith(own)]
    for decode in DECODES[1:]:
        data = {**EVERY_KEY, "hardware": {**EVERY_KEY["hardware"], "decode": decode}}
        cases += [(f"hardware.decode.{key}", value, data) for key, value in decode.items()]
    return cases


NUMBERS = [case for case in every_case() if isinstance(case[1], int | float) and not isinstance(case[1], bool)]


@pytest.mark.parametrize(("key", "value", "data"), NUMBERS, ids=[case[0] for case in NUMBERS])
def test_a_number_that_is_negative_or_of_another_type_is_one_line(key: str, value: float, data: dict[str, Any]) -> None:
    (line,) = faults(with_overrides(data, [f"{key}=-1"]))
    least = [f"run: {key} must be at least {limit}, got -1" for limit in (0, 0.01, 1)]
    assert line in [*least, f"run: {key} must be above 0, got -1"]
    wanted = "a whole number" if isinstance(value, int) else "a number"
    for wrong in ('"3"', "true", "[3]", "nan", "{x=3}"):
        shown = json.dumps(tomllib.loads(f"value = {wrong}")["value"])
        assert faults(with_overrides(data, [f"{key}={wrong}"])) == [f"run: {key} must be {wanted}, got {shown}"]


COUNTS = (
    "optimizer_steps",
    "cluster.accelerators",
    "cluster.generation_accelerators",
    "cluster.tensor_parallel",
    "scheduler.train_batch_size",
    "scheduler.generation_batch_size",
    "scheduler.optimizer_steps_per_rl_step",
    "scheduler.publish_every",
    "scheduler.micro_batch_size",
    "scheduler.ready_queue_size",
    "scheduler.discard_limit",
    "workload.group_size",
    "workload.length.max",
    "hardware.kv_cache_tokens",
    "hardware.training.sequence_accelerators",
    "plan.simulate",
    "plan.simulate_steps",
    "hardware.decode.experts",
    "hardware.decode.experts_per_token",
    "policy.size",
    "policy.layers",
    "policy.width",
    "policy.heads",
    "policy.warm_start.batch_size",
    "train.task.max_prompt_tokens",
    "train.trainer.pack_tokens",
    "train.engine.cpu_kv_cache_gib",
    "train.checkpoint.every",
    "train.checkpoint.keep",
)
MAY_BE_ZERO = {
    "seed",
    "scheduler.max_lag",
    "plan.lag_limit",
    "workload.prompt_tokens",
    "train.task.overlong_tokens",
    "train.optimizer.warmup_steps",
    "train.trainer.zero_stage",
    "train.engine.restarts",
    "train.evaluation.problems",
    "policy.warm_start.steps",
    "policy.warm_start.seed",
}


@pytest.mark.parametrize("key", COUNTS)
@pytest.mark.parametrize("value", [0, -1, -(10**30)])
def test_a_count_is_at_least_one(key: str, value: int) -> None:
    (data,) = [data for one, _, data in NUMBERS if one == key]
    assert faults(with_overrides(data, [f"{key}={value}"])) == [f"run: {key} must be at least 1, got {value}"]


@pytest.mark.parametrize("key", ["policy.temperature", "train.sampling.temperature"])
@pytest.mark.parametrize(("value", "rule"), [(1e-300, "at least 0.01"), (0, "at least 0.01"), (1e300, "at most 100")])
def test_a_temperature_is_one_that_engines_sample_at(key: str, value: float, rule: str) -> None:
    (data,) = [data for one, _, data in NUMBERS if one == key]
    assert faults(with_overrides(data, [f"{key}={value}"])) == [f"run: {key} must be {rule}, got {value}"]


def test_all_other_whole_numbers_may_be_zero() -> None:
    whole = {key for key, value, _ in NUMBERS if isinstance(value, int)}
    assert whole - set(COUNTS) == MAY_BE_ZERO
    for key in sorted(MAY_BE_ZERO):
        parse_run(with_overrides(EVERY_KEY, [f"{key}=0"]))


@pytest.mark.parametrize("value", ["8.0", "8.5", "1e1"])
def test_a_count_is_a_whole_number(value: str) -> None:
    line = f"run: scheduler.train_batch_size must be a whole number, got {float(value)}"
    assert tiny_faults(f"scheduler.train_batch_size={value}") == [line]


TABLES = [
    "",
    "cluster",
    "scheduler",
    "workload",
    "workload.length",
    "hardware",
    "hardware.decode",
    "hardware.prefill",
    "hardware.training",
    "hardware.weights",
    "hardware.switch",
    "hardware.latency",
    "compare",
    "plan",
    "drift",
    "policy",
    "policy.loss",
    "policy.warm_start",
    "train",
    *(f"train.{name}" for name, value in EVERY_KEY["train"].items() if isinstance(value, dict)),
]


@pytest.mark.parametrize("name", TABLES)
def test_an_unknown_key_is_one_line_with_all_that_are_known(name: str) -> None:
    keys: Any = EVERY_KEY
    for part in name.split(".") if name else ():
        keys = keys[part]
    key = f"{name}.nonsense" if name else "nonsense"
    assert faults(with_overrides(EVERY_KEY, [f"{key}=1"])) == [
        f"run: {key} is an unknown key; allowed: {', '.join(sorted(keys))}"
    ]


@pytest.mark.parametrize("name", TABLES[1:])
def test_something_else_in_place_of_a_table_is_one_line(name: str) -> None:
    assert faults(with_overrides(EVERY_KEY, [f"{name}=5"])) == [f"run: {name} must be a table, got 5"]


CONVENTIONAL = "scheduler.kind=conventional"
LINES: list[tuple[tuple[str, ...], str]] = [
    # Unknown keys; the nearest known one is offered.
    (
        ("scheduler.max_lags=3",),
        "scheduler.max_lags is an unknown key; did you mean max_lag? allowed: discard_limit, filter_no_signal, "
        "generation_batch_size, kind, max_lag, micro_batch_size, on_full, on_stale, optimizer_steps_per_rl_step, "
        "partial_rollouts, publish_every, ready_queue_size, train_batch_size, weight_update",
    ),
    (
        ("hardware.decode.affine=3",),
        "hardware.decode.affine is an unknown key; allowed: context_token_s, kind, sequence_s, step_s",
    ),
    (
        ("affine=3",),
        "affine is an unknown key; allowed: "
        "cluster, compare, drift, hardware, optimizer_steps, plan, policy, scheduler, seed, train, workload",
    ),
    (
        ("hardware.decode.step=3",),
        "hardware.decode.step is an unknown key; did you mean step_s? allowed: context_token_s, kind, sequence_s, "
        "step_s",
    ),
    (
        ('compare={baseline="a", arms=[{name="a", sets=[]}]}',),
        "compare.arms.0.sets is an unknown key; did you mean set? allowed: name, set",
    ),
    # Words.
    (
        ("scheduler.kind=async",),
        "scheduler.kind must be pipeline, conventional, one_step_off, partial_rollouts or package.module:ATTRIBUTE, "
        "got 'async'",
    ),
    (
        ("scheduler.weight_update=drop",),
        "scheduler.weight_update must be 'keep', 'recompute', 'abort' or 'wait', got \"drop\"",
    ),
    (("scheduler.on_stale=3",), "scheduler.on_stale must be 'train', 'drop' or 'requeue', got 3"),
    (("scheduler.on_full=true",), "scheduler.on_full must be 'wait' or 'drop_oldest', got true"),
    (
        ("workload.length.kind=gamma",),
        "workload.length.kind must be 'fixed', 'uniform', 'lognormal' or 'empirical', got \"gamma\"",
    ),
    (("hardware.decode={}",), "hardware.decode.kind must be one of utilisation, affine, roofline, got none"),
    (("hardware.decode.kind=5",), "hardware.decode.kind must be one of utilisation, affine, roofline, got 5"),
    (("scheduler.filter_no_signal=1",), "scheduler.filter_no_signal must be true or false, got 1"),
    (("workload.length.source=5",), "workload.length.source must be a string, got 5"),
    # Numbers.
    (("seed=-1",), "seed must be at least 0, got -1"),
    (("seed=2020-01-01",), 'seed must be a whole number, got "2020-01-01"'),
    ((f"seed={'1' * 5000}",), f'seed must be a whole number, got "{"1" * 76}...'),
    (("workload.success_rate=1.5",), "workload.success_rate must be at most 1, got 1.5"),
    (("hardware.decode.step_s=0",), "hardware.decode.step_s must be above 0, got 0"),
    (("hardware.decode.step_s=inf",), "hardware.decode.step_s must be a number, got Infinity"),
    (("workload.length.growth=0",), "workload.length.growth must be above 0, got 0"),
    # Lengths.
    (
        ("workload.length.kind=lognormal", "workload.length.mean=9"),
        "workload.length.cv is missing; kind='lognormal' needs mean and cv",
    ),
    (
        ("workload.length.kind=lognormal", "workload.length.cv=9"),
        "workload.length.mean is missing; kind='lognormal' needs mean and cv",
    ),
    (
        ("workload.length={kind='lognormal', mean=64, cv=1, max=64}",),
        "workload.length.mean must be below max, got mean=64, max=64",
    ),
    (
        ("workload.length.kind=empirical",),
        "workload.length.source is missing; kind='empirical' needs the name of a shipped set or a CSV file",
    ),
    (
        ("workload.length={kind='empirical', source='skythought', mean=99.5, max=64}",),
        "workload.length.mean must be below max, got mean=99.5, max=64",
    ),
    # What does not fit together.
    (
        ("cluster.generation_accelerators=4",),
        "cluster.generation_accelerators must be below cluster.accelerators, got generation_accelerators=4, "
        "accelerators=4",
    ),
    (
        ("cluster={accelerators=4}",),
        "cluster.generation_accelerators is missing; scheduler.kind='pipeline' needs it",
    ),
    (
        ("scheduler.kind=one_step_off", "scheduler.optimizer_steps_per_rl_step=2", "scheduler.max_lag=2"),
        "scheduler.max_lag cannot be met: a one_step_off RL step trains its last batch at lag "
        "2 * optimizer_steps_per_rl_step - 1 = 3, got max_lag=2",
    ),
    (
        ("scheduler.partial_rollouts=true",),
        "scheduler.partial_rollouts needs scheduler.kind='conventional', got partial_rollouts=true, kind='pipeline'",
    ),
    (
        (CONVENTIONAL, "scheduler.partial_rollouts=true", "scheduler.max_lag=1", "scheduler.on_stale=drop"),
        "scheduler.on_stale must be 'train' with partial_rollouts and max_lag, got on_stale='drop'",
    ),
    (
        ("cluster={accelerators=8, generation_accelerators=3, tensor_parallel=2}",),
        "cluster.tensor_parallel must divide the 3 accelerators that generate, got tensor_parallel=2",
    ),
    (
        ("cluster.tensor_parallel=3", CONVENTIONAL),
        "cluster.tensor_parallel must divide the 4 accelerators that generate, got tensor_parallel=3",
    ),
    (
        ("workload.group_size=3",),
        "scheduler.train_batch_size must be a multiple of workload.group_size, got train_batch_size=8, group_size=3",
    ),
    (
        ("scheduler.micro_batch_size=3",),
        "scheduler.micro_batch_size must divide train_batch_size and be a multiple of group_size, got "
        "micro_batch_size=3, train_batch_size=8, group_size=1",
    ),
    (
        ("scheduler.micro_batch_size=2", "workload.group_size=4"),
        "scheduler.micro_batch_size must divide train_batch_size and be a multiple of group_size, got "
        "micro_batch_size=2, train_batch_size=8, group_size=4",
    ),
    (
        ("scheduler.filter_no_signal=true",),
        "scheduler.filter_no_signal needs workload.group_size of at least 2, since one reward alone has no signal, "
        "got filter_no_signal=true, group_size=1",
    ),
    (
        ("scheduler.ready_queue_size=7",),
        "scheduler.ready_queue_size must be at least train_batch_size, got ready_queue_size=7, train_batch_size=8",
    ),
    (
        (CONVENTIONAL, "scheduler.optimizer_steps_per_rl_step=5", "scheduler.max_lag=3"),
        "scheduler.max_lag cannot be met: a conventional RL step trains its last batch at lag "
        "optimizer_steps_per_rl_step - 1 = 4, got max_lag=3",
    ),
    (
        ("scheduler.publish_every=5", "scheduler.max_lag=3"),
        "scheduler.max_lag cannot be met: the last batch before a publication is trained at a lag of at least "
        "publish_every - 1 = 4, got max_lag=3",
    ),
    (
        ("hardware.kv_cache_tokens=73", "workload.prompt_tokens=10"),
        "hardware.kv_cache_tokens must hold the longest rollout, workload.prompt_tokens + workload.length.max = 74 "
        "tokens, got kv_cache_tokens=73",
    ),
    # The comparison.
    (("plan.schedulers=[]",), "plan.schedulers must not be empty, got []"),
    (
        ("plan.schedulers=['pipelines']",),
        "plan.schedulers.0 must be pipeline, conventional, one_step_off, partial_rollouts or package.module:ATTRIBUTE, "
        "got 'pipelines'; did you mean pipeline?",
    ),
    (("plan.generation_accelerators=[0]",), "plan.generation_accelerators.0 must be at least 1, got 0"),
    (("plan.min_ess=1.5",), "plan.min_ess must be below 1, got 1.5"),
    (
        ("plan.min_ess=0.5",),
        "plan.min_ess needs a [drift] table, which says how fast weights drift (`pipelinerl drift` fits one), got "
        "min_ess=0.5",
    ),
    (("compare={baseline='a'}",), "compare.arms is missing"),
    (("compare={baseline='a', arms=5}",), "compare.arms must be a list, got 5"),
    (("compare={baseline='a', arms=[]}",), "compare.arms must not be empty, got []"),
    (("compare={baseline='a', arms=[5]}",), "compare.arms.0 must be a table, got 5"),
    (("compare={baseline='', arms=[{name=''}]}",), 'compare.arms.0.name must not be empty, got ""'),
    (
        ("compare={baseline='a', arms=[{name='a', set=['x=1', 5]}]}",),
        "compare.arms.0.set.1 must be a string, got 5",
    ),
    (
        ("compare={baseline='a', arms=[{name='a'}, {name='a'}]}",),
        "compare.arms must have different names, got ['a', 'a']",
    ),
    (
        ("compare={baseline='a', arms=[{name='a'}], scenarios=[{name='s'}, {name='t'}, {name='s'}]}",),
        "compare.scenarios must have different names, got ['s', 't', 's']",
    ),
    (
        ('compare={baseline="a", arms=[{name="a"}], seeds=[1, 2, 1]}',),
        "compare.seeds must be different, got [1, 2, 1]",
    ),
    (
        ('compare={baseline="a", arms=[{name="a"}], seeds=[-1]}',),
        "compare.seeds.0 must be at least 0, got -1",
    ),
    (
        ("compare={baseline='c', arms=[{name='a'}, {name='b'}]}",),
        "compare.baseline must be the name of an arm, got 'c'; allowed: ['a', 'b']",
    ),
]


@pytest.mark.parametrize(("overrides", "line"), LINES, ids=[line[:40] for _, line in LINES])
def test_a_fault_is_one_line_with_key_rule_and_value(overrides: tuple[str, ...], line: str) -> None:
    assert tiny_faults(*overrides) == [f"run: {line}"]


@pytest.mark.parametrize(
    ("value", "reason"),
    [("\udcff", "lone leading surrogate in hex escape"), ("[" * 250 + "]" * 250, "recursion limit exceeded")],
)
def test_a_value_that_is_no_text_or_nested_too_deep_is_one_line(value: str, reason: str) -> None:
    (line,) = tiny_faults(f"workload.length.source={value}")
    assert line.startswith(f"run: a value cannot be read: Invalid JSON: {reason} at line 1 column ")


def test_a_max_lag_that_is_just_met_is_allowed() -> None:
    publish = ("scheduler.publish_every=5", "scheduler.max_lag=4")
    assert tiny(*publish).scheduler.publish_every == 5
    assert tiny("scheduler.publish_every=7", "scheduler.max_lag=5").scheduler.max_lag == 5  # 6 steps: never published
    rl_step = ("scheduler.kind=conventional", "scheduler.optimizer_steps_per_rl_step=5", "scheduler.max_lag=4")
    assert tiny(*rl_step).scheduler.max_lag == 4
    # A run of 3 optimizer steps ends before a fourth of its RL step: its largest lag is 2.
    assert tiny(*rl_step[:2], "optimizer_steps=3", "scheduler.max_lag=2").scheduler.max_lag == 2


def test_a_kv_cache_that_just_holds_the_longest_rollout_is_allowed() -> None:
    assert tiny("workload.prompt_tokens=10", "hardware.kv_cache_tokens=74").hardware.kv_cache_tokens == 74


def test_missing_keys_are_a_line_each() -> None:
    keys = ("optimizer_steps", "cluster", "scheduler", "workload", "hardware")
    assert faults({}) == [f"run: {key} is missing" for key in keys]


def test_all_faults_are_reported_at_once() -> None:
    assert tiny_faults("seed=-1", "scheduler.max_lags=1", "hardware.training.token_s=x") == [
        "run: seed must be at least 0, got -1",
        f"run: {LINES[0][1]}",
        'run: hardware.training.token_s must be a number, got "x"',
    ]


def test_a_long_value_is_cut() -> None:
    (line,) = tiny_faults(f"seed={'x' * 100}")
    assert line == f'run: seed must be a whole number, got "{"x" * 76}...'


def test_what_is_no_table_at_all_is_one_line() -> None:
    assert faults([]) == ["run: the root must be a table, got []"]


# --------------------------------------------------------------------------------- files that are none


def file_fault(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run(path)
    return str(caught.value)


def test_a_run_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\x80\x81 = 1")
    assert file_fault(tmp_path / "none.toml") == f"cannot read run file {tmp_path}/none.toml: No such file or directory"
    assert file_fault(tmp_path) == f"cannot read run file {tmp_path}: Is a directory"
    assert file_fault(binary) == f"cannot read run file {binary}: it is not UTF-8 text"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("seed = ", "Invalid value (at end of document)"),
        ("seed = 1\nseed = 2\n", "Cannot overwrite a value (at line 2, column 9)"),
        ("[cluster\n", "Expected ']' at the end of a table declaration (at line 1, column 9)"),
        (f"seed = {'1' * 5000}", "Exceeds the limit (4300 digits) for integer string conversion"),
        (f"seed = {'[' * 5000}", "maximum recursion depth exceeded"),
    ],
)
def test_a_run_file_that_is_no_toml_is_one_line_that_says_where(tmp_path: Path, text: str, reason: str) -> None:
    path = run_file(tmp_path, text)
    line = file_fault(path)
    assert line.startswith(f"{path} is not valid TOML: {reason}")
    assert "\n" not in line


def test_lines_name_the_run_file(tmp_path: Path) -> None:
    assert file_fault(run_file(tmp_path, TINY.replace("6", "0", 1))) == (
        "run.toml: optimizer_steps must be at least 1, got 0"
    )


def test_decode_is_one_of_three_kinds() -> None:
    kinds = {one.model_fields["kind"].annotation.__args__[0] for one in get_args(get_args(Decode)[0])}
    assert kinds == {decode["kind"] for decode in DECODES}
