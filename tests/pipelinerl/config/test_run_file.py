"""Run files: what is read, what overrides do, paths, and the way there and back."""

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
from refusals import message
from run_tables import DECODES, EVERY_KEY, TINY, run_file, tiny

from pipelinerl.config.run import CompareConfig, RunConfig, Variant, dump_run, load_run, parse_run, with_overrides
from pipelinerl.scheduler.events import OnFull, OnStale, WeightUpdate

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
        assert parse_run(data).model_dump(mode="json", exclude_none=True) == as_given(data)


def as_given(table: dict[str, Any]) -> dict[str, Any]:
    """Leave out the keys that exclude others, which are None."""

    def given(value: Any) -> Any:
        if isinstance(value, list):
            return [given(one) for one in value]
        return as_given(value) if isinstance(value, dict) else value

    return {key: given(value) for key, value in table.items() if value is not None}


def test_every_key_of_the_configuration_is_in_this_test() -> None:
    tables = [EVERY_KEY, *EVERY_KEY.values(), EVERY_KEY["workload"]["length"], *EVERY_KEY["hardware"].values()]
    tables += [*EVERY_KEY["train"].values(), EVERY_KEY["policy"]["warm_start"], EVERY_KEY["environment"]["turns"]]
    tables += [*DECODES, *EVERY_KEY["compare"]["arms"], *EVERY_KEY["fleet"].values(), *EVERY_KEY["fleet"]["groups"]]
    tables += [EVERY_KEY["plan"]["spot"], EVERY_KEY["faults"][0], EVERY_KEY["engine"]["speculation"]]
    tables.append(EVERY_KEY["scheduler"]["admission"])
    keys = [set(one) for one in tables if isinstance(one, dict)]
    models = list(models_of(RunConfig))
    assert CompareConfig in models  # it looks through None
    assert {type(parse_run(EVERY_KEY).hardware.decode)} < set(models)  # and through unions
    for model in models:
        assert set(model.model_fields) in keys, model


def models_of(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield a model and all models inside it."""
    yield model
    types = [field.annotation for field in model.model_fields.values()]
    for one in types:  # it grows
        types += get_args(one)
        if isinstance(one, type) and issubclass(one, BaseModel):
            yield from models_of(one)


def test_whole_numbers_are_taken_for_seconds() -> None:
    assert tiny("hardware.decode.step_s=1").hardware.decode.model_dump()["step_s"] == 1.0


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        tiny().scheduler.train_batch_size = 16


def test_pipeline_splits_the_cluster_and_conventional_shares_it() -> None:
    data = with_overrides(EVERY_KEY, ["cluster.accelerators=24"])
    pipeline = parse_run(data)
    assert not pipeline.colocated
    assert (pipeline.generation_accelerators, pipeline.training_accelerators, pipeline.num_engines) == (8, 16, 3)
    del data["hardware"]["generation_gpu"], data["fleet"]["groups"]
    conventional = parse_run(with_overrides(data, ["scheduler.kind=conventional"]))
    assert conventional.colocated
    assert (conventional.generation_accelerators, conventional.training_accelerators) == (24, 24)
    assert conventional.num_engines == 9


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
        ("workload.length.source=a\0.csv", 'workload.length.source must be the path of a file, got "a\\u0000.csv"'),
    ],
)
def test_a_wrong_override_is_one_line(tmp_path: Path, override: str, line: str) -> None:
    assert message(load_run, run_file(tmp_path), [override]) == line


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


@pytest.mark.parametrize(
    ("source", "expected"),
    [("skythought", "skythought"), ("/data/lengths.csv", "/data/lengths.csv"), ("loop.csv", "{folder}/loop.csv")],
)
def test_names_of_shipped_sets_and_absolute_paths_stay_and_circles_are_for_the_reader(
    tmp_path: Path, source: str, expected: str
) -> None:
    (tmp_path / "loop.csv").symlink_to(tmp_path / "loop.csv")
    config = load_run(run_file(tmp_path), ["workload.length.kind=empirical", f"workload.length.source={source}"])
    assert config.workload.length.source == expected.format(folder=tmp_path)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("models/tiny", "{folder}/models/tiny"),  # which is there
        *((path, f"{{folder}}/{path}") for path in ("tiny", "a/b/c", ".models/tiny")),
    ],
)
def test_a_model_is_the_id_of_one_or_the_path_of_a_folder(tmp_path: Path, path: str, expected: str) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    train = {"model": {"path": path}, "task": {"name": "arithmetic"}, "optimizer": {"learning_rate": 1e-3}}
    config = load_run(run_file(tmp_path, tomli_w.dumps({**tomllib.loads(TINY), "train": train})))
    assert config.train is not None
    assert config.train.model.path == expected.format(folder=tmp_path)


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

words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12)
paths = words.map("{}.csv".format)


@st.composite
def run_tables(draw: st.DrawFn) -> dict[str, Any]:
    """Return the tables of a valid run file with other numbers, words and paths, and without some of its tables."""

    def shortened(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shortened(one) for key, one in value.items()}
        return value * draw(st.floats(0.5, 1.0)) if isinstance(value, float) else value

    every = as_given(EVERY_KEY)
    data = shortened({**every, "hardware": {**EVERY_KEY["hardware"], "decode": draw(st.sampled_from(DECODES))}})
    data["seed"] = draw(st.integers(0, 2**70))
    data["workload"]["length"]["source"] = draw(words | paths)
    data["hardware"]["model"] = draw(words | paths)
    data["train"]["task"]["settings"] = {"path": draw(paths), draw(words): draw(words)}
    names = draw(st.lists(words, min_size=2, max_size=2, unique=True))
    arms = [{"name": name, "set": draw(st.lists(words, max_size=3))} for name in names]
    data["compare"] |= {"arms": arms, "baseline": names[0]}
    for name in draw(st.sets(st.sampled_from(["policy", "compare", "price", "plan", "train"]))):
        del data[name]
    return data


@pytest.mark.slow
@settings(deadline=None)
@given(run_tables())
def test_a_dumped_run_file_is_read_back_equal_from_any_folder(data: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = load_run(run_file(Path(folder) / "first", tomli_w.dumps(data)))
        text = dump_run(config)
        again = load_run(run_file(Path(folder) / "second", text))
    assert again == config
    assert dump_run(again) == text
    assert tomllib.loads(text) == config.model_dump(mode="json", exclude_none=True)


# --------------------------------------------------------------------------------- files that are none


@pytest.mark.parametrize(
    ("name", "reason"),
    [("none.toml", "No such file or directory"), ("", "Is a directory"), ("binary.toml", "it is not UTF-8 text")],
)
def test_a_run_file_that_cannot_be_read_is_one_line(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\x80\x81 = 1")
    assert message(load_run, tmp_path / name) == f"cannot read run file {tmp_path / name}: {reason}"


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
    assert message(load_run, path).startswith(f"run file {path} is not valid TOML: {reason}")


def test_lines_name_the_run_file(tmp_path: Path) -> None:
    line = message(load_run, run_file(tmp_path, TINY.replace("6", "0", 1)))
    assert line == "run.toml: optimizer_steps must be at least 1, got 0"
