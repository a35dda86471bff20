"""The line for every fault of a run file: key, rule and value."""

import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from run_tables import DECODES, EVERY_KEY, faults, tiny, tiny_faults

from pipelinerl.config.run import parse_run, with_overrides
from pipelinerl.util.strict_model import LONGEST_S

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
    assert re.fullmatch(rf"run: {key} must be (above 0|at least (0|0\.01|1)), got -1", line)
    wanted = "a whole number" if isinstance(value, int) else "a number"
    fractions = ("8.0", "8.5", "1e1") if isinstance(value, int) else ()
    for wrong in ('"3"', "true", "[3]", "nan", "{x=3}", *fractions):
        shown = json.dumps(tomllib.loads(f"value = {wrong}")["value"])
        assert faults(with_overrides(data, [f"{key}={wrong}"])) == [f"run: {key} must be {wanted}, got {shown}"]


MAY_BE_ZERO = {
    "seed", "scheduler.max_lag", "plan.lag_limit", "workload.prompt_tokens", "train.task.overlong_tokens",
    "train.optimizer.warmup_steps", "train.trainer.zero_stage", "train.trainer.restarts",
    "train.engine.restarts_per_hour", "train.evaluation.problems", "train.sampling.top_k",
    "policy.warm_start.steps", "policy.warm_start.seed", "environment.turns.observation_max", "environment.retries",
}  # fmt: skip


WHOLE = {key: data for key, value, data in NUMBERS if isinstance(value, int)}
"""A run file with the key, by key of a whole number: those not in ``MAY_BE_ZERO`` are counts of at least 1."""
NO_COUNTS = {"seed", "policy.warm_start.seed", "train.trainer.zero_stage"}


@pytest.mark.parametrize("key", sorted(WHOLE))
def test_a_whole_number_has_a_least_value_and_a_count_a_largest_one(key: str) -> None:
    data, least = WHOLE[key], 0 if key in MAY_BE_ZERO else 1
    parse_run(with_overrides(data, [f"{key}=0"] if least == 0 else []))
    for value in (least - 1, -(10**30)):
        line = f"run: {key} must be at least {least}, got {value}"
        assert faults(with_overrides(data, [f"{key}={value}"])) == [line]
    if key not in NO_COUNTS:
        (line,) = faults(with_overrides(data, [f"{key}={2**63}"]))
        assert re.fullmatch(rf"run: {key} must be at most [\de+]+, got {2**63}", line)


TIMES = [case for case in NUMBERS if case[0].startswith("hardware.") and case[0].endswith("_s")]


@pytest.mark.parametrize(("key", "value", "data"), TIMES, ids=[case[0] for case in TIMES])
def test_a_time_of_the_hardware_has_a_largest_value(key: str, value: float, data: dict[str, Any]) -> None:
    assert value < LONGEST_S
    parse_run(with_overrides(data, [f"{key}={LONGEST_S}"]))
    assert faults(with_overrides(data, [f"{key}=1e308"])) == [f"run: {key} must be at most 100000, got 1e+308"]


@pytest.mark.parametrize("key", ["train.task.settings", "train.evaluation.settings", "train.engine.vllm"])
@pytest.mark.parametrize("value", ["nan", "inf", "[1, -inf]"])
def test_a_setting_that_a_run_file_cannot_keep_is_one_line(key: str, value: str) -> None:
    (line,) = faults(with_overrides(EVERY_KEY, [f"{key}.x={value}"]))
    assert line.startswith(f"run: {key}: must hold finite numbers, got ")


@pytest.mark.parametrize(("value", "got"), [("all", '"all"'), ("-1", "-1"), ("1.5", "1.5")])
def test_a_key_of_two_types_has_one_line(value: str, got: str) -> None:
    rule = "train.trainer.activation_checkpointing must be true, false or a number of layers"
    given = with_overrides(EVERY_KEY, [f"train.trainer.activation_checkpointing={value}"])
    assert faults(given) == [f"run: {rule}, got {got}"]


def test_a_number_of_one_layer_is_not_taken_for_all() -> None:
    for value in (True, False, 0, 1, 15):
        data = with_overrides(EVERY_KEY, [f"train.trainer.activation_checkpointing={str(value).lower()}"])
        kept = parse_run(parse_run(data).model_dump(mode="json")).train_table.trainer.activation_checkpointing
        assert (kept, type(kept)) == (value, type(value))


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (("train.trainer.step_timeout_s=30.0",),
            "step_timeout_s must be above trainer.collective_timeout_s, else no rank can name the one it waits for, "
            "got 30 and 30"),
        (("train.trainer.collective_timeout_s=10.0",), None),  # an engine's update may last as long: no rank waits
    ],
)  # fmt: skip
def test_who_waits_for_another_waits_longer_than_that_one(overrides: tuple[str, ...], line: str | None) -> None:
    expected = [] if line is None else [f"run: train.trainer.{line}"]
    data = with_overrides(EVERY_KEY, list(overrides))
    if line is None:
        parse_run(data)
    else:
        assert faults(data) == expected


@pytest.mark.parametrize("key", ["policy.temperature", "train.sampling.temperature"])
@pytest.mark.parametrize(("value", "rule"), [(1e-300, "at least 0.01"), (0, "at least 0.01"), (1e300, "at most 100")])
def test_a_temperature_is_one_that_engines_sample_at(key: str, value: float, rule: str) -> None:
    assert faults(with_overrides(EVERY_KEY, [f"{key}={value}"])) == [f"run: {key} must be {rule}, got {value}"]


def tables(data: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield the dotted key of every table whose keys are fixed."""
    yield path
    for key, value in data.items():
        if isinstance(value, dict) and key not in ("coefficients", "settings", "vllm"):
            yield from tables(value, f"{path}.{key}" if path else key)


TABLES = list(tables(EVERY_KEY))


@pytest.mark.parametrize("name", TABLES)
def test_an_unknown_key_is_one_line_with_all_that_are_known(name: str) -> None:
    keys: Any = EVERY_KEY
    for part in name.split(".") if name else ():
        keys = keys[part]
    key = f"{name}.nonsense" if name else "nonsense"
    assert faults(with_overrides(EVERY_KEY, [f"{key}=1"])) == [
        f"run: {key} is an unknown key; allowed: {', '.join(sorted(keys))}"
    ]


CONVENTIONAL = "scheduler.kind=conventional"
LINES: list[tuple[tuple[str, ...], str]] = [
    # Words.
    (("scheduler.weight_update=drop",),
        "scheduler.weight_update must be 'keep', 'recompute', 'abort' or 'wait', got \"drop\""),
    (("scheduler.on_stale=3",), "scheduler.on_stale must be 'train', 'drop' or 'requeue', got 3"),
    (("scheduler.on_full=true",), "scheduler.on_full must be 'wait' or 'drop_oldest', got true"),
    (("workload.length.kind=gamma",),
        "workload.length.kind must be 'fixed', 'uniform', 'lognormal' or 'empirical', got \"gamma\""),
    (("hardware.decode.kind=5",), "hardware.decode.kind must be one of utilisation, affine, roofline, got 5"),
    # Numbers.
    (("seed=2020-01-01",), 'seed must be a whole number, got "2020-01-01"'),
    ((f"seed={'1' * 5000}",), f'seed must be a whole number, got "{"1" * 76}...'),
    (("workload.success_rate=1.5",), "workload.success_rate must be at most 1, got 1.5"),
    (("hardware.decode.step_s=0",), "hardware.decode.step_s must be above 0, got 0"),
    (("workload.length.growth=0",), "workload.length.growth must be above 0, got 0"),
    # Lengths.
    (("workload.length.kind=lognormal", "workload.length.mean=9"),
        "workload.length.cv is missing; kind='lognormal' needs mean and cv"),
    (("workload.length.kind=lognormal", "workload.length.cv=9"),
        "workload.length.mean is missing; kind='lognormal' needs mean and cv"),
    (("workload.length={kind='lognormal', mean=64, cv=1, max=64}",),
        "workload.length.mean must be below max, got mean=64, max=64"),
    (("workload.length.kind=empirical",),
        "workload.length.source is missing; kind='empirical' needs the name of a shipped set or a CSV file"),
    (("workload.length.source=skythought",),
        "workload.length.source must be left out with kind='uniform', got 'skythought'"),
    (("workload.length={kind='empirical', source='skythought', mean=99.5, max=64}",),
        "workload.length.mean must be below max, got mean=99.5, max=64"),
    # What does not fit together.
    (("cluster.generation_accelerators=4",),
        "cluster.generation_accelerators must be below cluster.accelerators, got generation_accelerators=4, "
        "accelerators=4"),
    (("cluster={accelerators=4}",), "cluster.generation_accelerators is missing; scheduler.kind='pipeline' needs it"),
    (("scheduler.kind=one_step_off", "scheduler.optimizer_steps_per_rl_step=2", "scheduler.max_lag=2"),
        "scheduler.max_lag cannot be met: a one_step_off RL step trains its last batch at lag "
        "2 * optimizer_steps_per_rl_step - 1 = 3, got max_lag=2"),
    (("scheduler.partial_rollouts=true",),
        "scheduler.partial_rollouts needs scheduler.kind='conventional', got partial_rollouts=true, kind='pipeline'"),
    ((CONVENTIONAL, "scheduler.partial_rollouts=true", "scheduler.max_lag=1", "scheduler.on_stale=drop"),
        "scheduler.on_stale must be 'train' with partial_rollouts and max_lag, got on_stale='drop'"),
    (("cluster={accelerators=8, generation_accelerators=3, tensor_parallel=2}",),
        "cluster.tensor_parallel must divide the 3 accelerators that generate, got tensor_parallel=2"),
    (("cluster.tensor_parallel=3", CONVENTIONAL),
        "cluster.tensor_parallel must divide the 4 accelerators that generate, got tensor_parallel=3"),
    (("workload.group_size=3",),
        "scheduler.train_batch_size must be a multiple of workload.group_size, got train_batch_size=8, group_size=3"),
    (("scheduler.micro_batch_size=3",),
        "scheduler.micro_batch_size must divide train_batch_size and be a multiple of group_size, got "
        "micro_batch_size=3, train_batch_size=8, group_size=1"),
    (("scheduler.micro_batch_size=2", "workload.group_size=4"),
        "scheduler.micro_batch_size must divide train_batch_size and be a multiple of group_size, got "
        "micro_batch_size=2, train_batch_size=8, group_size=4"),
    (("scheduler.filter_no_signal=true",),
        "scheduler.filter_no_signal needs workload.group_size of at least 2, since one reward alone has no signal, "
        "got filter_no_signal=true, group_size=1"),
    (("scheduler.ready_queue_size=7",),
        "scheduler.ready_queue_size must be at least train_batch_size, got ready_queue_size=7, train_batch_size=8"),
    ((CONVENTIONAL, "scheduler.optimizer_steps_per_rl_step=5", "scheduler.max_lag=3"),
        "scheduler.max_lag cannot be met: a conventional RL step trains its last batch at lag "
        "optimizer_steps_per_rl_step - 1 = 4, got max_lag=3"),
    (("scheduler.publish_every=5", "scheduler.max_lag=3"),
        "scheduler.max_lag cannot be met: the last batch before a publication is trained at a lag of at least "
        "publish_every - 1 = 4, got max_lag=3"),
    (("hardware={gpu='H100', model='Qwen2.5-7B', generation_gpu='H20'}", CONVENTIONAL),
        "hardware.generation_gpu needs a schedule whose engines have accelerators of their own, got scheduler.kind="
        "'conventional', which generates and trains on the same ones; kind='pipeline' with max_lag=0 lets two pools "
        "wait for each other"),
    (("hardware.kv_cache_tokens=73", "workload.prompt_tokens=10"),
        "hardware.kv_cache_tokens must hold the longest rollout, workload.prompt_tokens + workload.length.max = 74 "
        "tokens, got kv_cache_tokens=73"),
    # No more rollouts than memory has room for.
    (("cluster={accelerators=100, generation_accelerators=99}", "scheduler.generation_batch_size=101011"),
        "scheduler.generation_batch_size must give all engines at most 10000000 sequences together, got "
        "generation_batch_size=101011 on 99 engines"),
    (("scheduler.kind=one_step_off", "scheduler.optimizer_steps_per_rl_step=1000000", "scheduler.train_batch_size=16"),
        "scheduler.optimizer_steps_per_rl_step must give an RL step at most 10000000 sequences, got "
        "optimizer_steps_per_rl_step=1000000, train_batch_size=16"),
    # The comparison.
    (("plan.schedulers=[]",), "plan.schedulers must not be empty, got []"),
    (("plan.generation_batch_size=[9223372036854775808]",),
        "plan.generation_batch_size.0 must be at most 1e+06, got 9223372036854775808"),
    (("plan.generation_accelerators=[0]",), "plan.generation_accelerators.0 must be at least 1, got 0"),
    (("plan.min_ess=1.5",), "plan.min_ess must be below 1, got 1.5"),
    (("plan.min_ess=0.5",),
        "plan.min_ess needs a [drift] table, which says how fast weights drift (`pipelinerl drift` fits one), got "
        "min_ess=0.5"),
    (("compare={baseline='a', arms=[]}",), "compare.arms must not be empty, got []"),
    (("compare={baseline='', arms=[{name=''}]}",), 'compare.arms.0.name must not be empty, got ""'),
    (("compare={baseline='a', arms=[{name='a'}, {name='a'}]}",),
        "compare.arms must have different names, got ['a', 'a']"),
    (("compare={baseline='a', arms=[{name='a'}], scenarios=[{name='s'}, {name='t'}, {name='s'}]}",),
        "compare.scenarios must have different names, got ['s', 't', 's']"),
    (('compare={baseline="a", arms=[{name="a"}], seeds=[1, 2, 1]}',), "compare.seeds must be different, got [1, 2, 1]"),
    (('compare={baseline="a", arms=[{name="a"}], seeds=[-1]}',), "compare.seeds.0 must be at least 0, got -1"),
    (("compare={baseline='c', arms=[{name='a'}, {name='b'}]}",),
        "compare.baseline must be the name of an arm, got 'c'; allowed: ['a', 'b']"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "line"), LINES, ids=[line[:40] for _, line in LINES])
def test_a_fault_is_one_line_with_key_rule_and_value(overrides: tuple[str, ...], line: str) -> None:
    assert tiny_faults(*overrides) == [f"run: {line}"]


def test_a_value_that_is_no_text_is_one_line() -> None:
    (line,) = tiny_faults("workload.length.source=\udcff")
    assert line.startswith("run: a value cannot be read: Invalid JSON: lone leading surrogate in hex escape at line 1 ")


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
    seed, key, seconds = tiny_faults("seed=-1", "scheduler.max_lags=1", "hardware.training.token_s=x")
    assert seed == "run: seed must be at least 0, got -1"
    assert key.startswith(
        "run: scheduler.max_lags is an unknown key; did you mean max_lag? allowed: admission, discard_limit, "
    )
    assert seconds == 'run: hardware.training.token_s must be a number, got "x"'
