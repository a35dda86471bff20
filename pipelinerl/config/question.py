"""A question to ``plan`` in a line: its values, and assumptions for the rest.

Theory of operation. Options are keys of a run file. Without a run file every key has an ``Assumption``, with other
values that are as plausible; the answer shows their effects. Missing keys that ``plan`` itself finds get a placeholder,
so that the rest can be checked; such a run file is no run to compare with.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from pipelinerl.config.run import RunConfig, completed, find_schedule, flat, parse_run, read_hardware, with_overrides
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.catalogue import find_gpu
from pipelinerl.scheduler.kinds import CONVENTIONAL
from pipelinerl.util.read import read_toml

OPTIONS = {
    "model": "hardware.model",
    "gpu": "hardware.gpu",
    "accelerators": "cluster.accelerators",
    "engine": "hardware.engine",
    "software": "hardware.software",
    "sync": "hardware.weight_sync",
    "train_batch_size": "scheduler.train_batch_size",
    "group_size": "workload.group_size",
    "mean_length": "workload.length.mean",
    "max_length": "workload.length.max",
    "max_lag": "plan.lag_limit",
    "max_mean_lag": "plan.mean_lag_limit",
    "price": "price.gpu_hour",
    "risk": "plan.risk",
    "spot_price": "plan.spot.price_per_hour",
    "spot_mtbf": "plan.spot.reclaim_hours",
    "mtbf": "plan.mtbf_hours",
    "lend": "plan.lend_switch_s",
    "speculate": "plan.speculate",
}
"""The key that each option of the command sets; ``speculate`` sets the keys of a table."""
SHORT = {"k": "tokens", "accept": "acceptance"}
"""Short names of keys in ``speculate``."""
UNITS = {OPTIONS["accelerators"]: " GPUs", OPTIONS["mean_length"]: " tokens"}
"""What follows a value in the name of a case."""
SEVERAL = ("gpu", "accelerators", "engine", "software", "sync")
"""Options that take several values, each another case."""
MOST_CASES = 24
"""Cases of one question (count)."""
PER_KIND = ("price", "accelerators")
"""Options that take a value per kind of GPU, by name."""
WITH_UNIT = {"spot_mtbf": "h", "mtbf": "h", "lend": "s"}
"""Options that may have their unit at the end: hours and seconds."""
PHASES = 4
"""Plans of a run whose answers grow, each at the mean of an equal part of the run (count)."""
LENGTH_RATIO = 8
"""Longest answer over the mean, if only one of them is given (no unit)."""
FIXED: dict[str, Any] = {"workload": {"length": {"kind": "lognormal"}}, "plan": {"simulate": 8, "simulate_steps": 64}}
"""Defaults of a question without a run file: few and short simulations, for an answer within a minute."""
MEAN_LAG_LIMIT = 4.0
"""Mean lag allowed where nobody limits the lag (optimizer steps)."""
ENGINE, SOFTWARE = "vllm-0.32", "ours"
"""Engine and software of training where nobody names one."""
FOUND = ("cluster.generation_accelerators", "scheduler.generation_batch_size")
"""Keys that every plan finds."""


@dataclass(frozen=True, slots=True)
class Assumption:
    """A value that nobody gave."""

    key: str
    value: Any
    """None: the key is left out."""
    others: tuple[Any, ...]
    """Equally plausible values."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run file of a question."""

    name: str
    """The values that differ from other cases; empty if there is but one."""
    config: RunConfig
    whole: bool
    """Whether it can run unchanged: nothing is left to ``plan``."""
    sets: tuple[str, ...] = ()
    """Overrides that turn the given run file into this case, without overrides of ``[plan]``."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked."""

    tables: dict[str, Any]
    """The run file of the first case, as it was given."""
    cases: tuple[Case, ...]
    assumed: tuple[Assumption, ...] = ()
    growth: tuple[float, float] | None = None
    """Mean answer at first and at last, of which the cases are phases (tokens)."""


def ask(
    options: Mapping[str, Any],
    run: Path | None = None,
    overrides: Sequence[str] = (),
    seed: int | None = None,
    *,
    hardware: Path | None = None,
) -> Question:
    """Return the question that a command line asks.

    Args:
        options: Values by the names of ``OPTIONS``; those of ``SEVERAL`` may be several, joined by commas, those of
            ``PER_KIND`` one per kind of GPU, ``H100=2.5,GB200=6``, ``mean_length`` ``FIRST..LAST``, and ``speculate``
            ``METHOD:KEY=VALUE,...``. None: none.
        run: The run file that they change. None: assumptions take its place.
        overrides: ``a.b=value`` each, applied last.
        seed: Replaces ``seed``.
        hardware: File with the table ``[hardware]``.

    Raises:
        ConfigError: If anything is wrong, one line per fault.
    """
    per_kind = {name: _per_kind(name, str(options[name])) for name in PER_KIND if "=" in str(options.get(name))}
    if (drafts := options.get("speculate")) is not None:
        overrides = [*_drafts(str(drafts)), *overrides]
    apart = {*per_kind, "speculate"}
    lists = [_values(name, str(value)) for name, value in options.items() if value is not None and name not in apart]
    growth = _growth(str(options.get("mean_length") or ""))
    combinations = list(itertools.product(*lists))
    if len(combinations) > MOST_CASES:
        raise ConfigError(f"a question must have at most {MOST_CASES} cases, got {len(combinations)}")
    first = [f"{key}={value}" for key, value in combinations[0]]
    given = flat(with_overrides({}, [*first, *overrides])) | {OPTIONS[name]: None for name in per_kind}
    if growth is not None:  # the longest answer is that of the whole run
        given[OPTIONS["mean_length"]] = max(growth)
    if hardware is not None:
        given |= flat({"hardware": read_hardware(hardware, "--hardware")[0]})
    assumed = () if run is not None else _assumed(given)
    base = read_toml(run, "run file") if run is not None else FIXED
    for one in assumed:
        base = with_value(base, one.key, one.value)
    folder, title = (Path.cwd(), "question") if run is None else (run.parent, run.name)
    several = {values[0][0] for values in lists if len(values) > 1}
    if growth is not None:
        base = with_value(base, "workload.length.growth", None)
        if len(several) > 1:
            raise ConfigError("--mean-length FIRST..LAST must be the only option with several values")
    tables, cases, used = [], list[Case](), set[str]()
    for settings in combinations:
        sets = [f"{key}={value}" for key, value in settings]
        tables.append(completed(base, [*sets, *overrides], seed, folder=folder, hardware=hardware))
        if per_kind:
            kinds = _kinds(tables[-1].get("hardware", {}))
            used.update(kinds)
            sets += _kind_sets(per_kind, kinds)
            tables[-1] = completed(base, [*sets, *overrides], seed, folder=folder, hardware=hardware)
        resized = any(one.startswith(OPTIONS["accelerators"]) for one in sets)
        filled, whole = with_placeholders(tables[-1], resized=resized)
        name = " ".join(f"{value}{UNITS.get(key, '')}" for key, value in settings if key in several)
        if "accelerators" in per_kind and several:
            name += f" {tables[-1]['cluster']['accelerators']} GPUs"
        own = [*sets, *overrides]
        if run is None:  # what the first case has is in the question's own file
            first = own if not cases else first
            own = [one for one in sets if one not in first]
        own = [one for one in own if not one.startswith("plan.")]
        cases.append(Case(name, parse_run(filled, title), whole, tuple(own)))
    if unused := [kind for kind in per_kind.get("accelerators", {}) if kind not in used]:
        raise ConfigError(f"--accelerators must name kinds of GPU that --gpu asks for, got {unused[0]}")
    return Question(tables[0], tuple(cases), assumed, growth)


def _values(name: str, text: str) -> list[tuple[str, str]]:
    values = list(dict.fromkeys(one.strip() for one in text.split(","))) if name in SEVERAL else [text.strip()]
    if name in WITH_UNIT:
        values = [one.removesuffix(WITH_UNIT[name]).rstrip() for one in values]
    if name == "mean_length" and (growth := _growth(text)) is not None:
        first, last = growth
        values = [f"{first + (last - first) * (part + 0.5) / PHASES:.6g}" for part in range(PHASES)]
    if not all(values):
        raise ConfigError(f"--{name.replace('_', '-')} must have a value, got {text!r}")
    return [(OPTIONS[name], one) for one in values]


def _drafts(text: str) -> list[str]:
    """Return the overrides of ``METHOD:k=N,accept=A``."""
    method, _, rest = text.partition(":")
    pairs = [("method", method), *((name, value) for name, _, value in (one.partition("=") for one in rest.split(",")))]
    if not all(name.strip() and value.strip() for name, value in pairs):
        raise ConfigError(f"--speculate must be a drafter and its keys as ngram:k=3,accept=0.6, got {text!r}")
    return [f"plan.speculate.{SHORT.get(name.strip(), name.strip())}={value.strip()}" for name, value in pairs]


def _growth(text: str) -> tuple[float, float] | None:
    """Return both ends of ``FIRST..LAST``; None for a single number."""
    if ".." not in text:
        return None
    try:
        first, last = (float(one) for one in text.split(".."))
    except ValueError:
        first = last = 0.0
    if not (0 < first < math.inf and 0 < last < math.inf and first != last):
        raise ConfigError(f"--mean-length must be tokens, or FIRST..LAST of answers that grow, got {text!r}")
    return first, last


def _per_kind(name: str, text: str) -> dict[str, str]:
    """Return the value of each kind of GPU by its name in the catalogue."""
    pairs = [one.partition("=") for one in text.split(",")]
    if not all(kind.strip() and equals and value.strip() for kind, equals, value in pairs):
        raise ConfigError(f"--{name} must be a number, or one per kind of GPU as H100=64,GB200=36, got {text!r}")
    return {find_gpu(kind.strip(), key=f"--{name}").name: value.strip() for kind, _, value in pairs}


def _kinds(hardware: Mapping[str, Any]) -> list[str]:
    """Return the kinds of GPU of a case: that trains or does both, and of two the one that generates."""
    keys = [key for key in ("gpu", "generation_gpu") if isinstance(hardware.get(key), str)]
    return [find_gpu(hardware[key], key=f"hardware.{key}").name for key in keys]


def _kind_sets(per_kind: Mapping[str, Mapping[str, str]], kinds: Sequence[str]) -> list[str]:
    """Return the overrides that give the kinds of GPU of a case their values; of two kinds each has its side."""
    sets = []
    for name, values in per_kind.items():
        if not kinds:
            raise ConfigError(f"--{name} must be one number where no kind of GPU is named, got {', '.join(values)}")
        if missing := [kind for kind in kinds if kind not in values]:
            raise ConfigError(f"--{name} must have every kind of GPU that is asked for, got none for {missing[0]}")
        each = [values[kind] for kind in kinds]
        if name == "price":
            sets += [f"price.{key}={usd}" for key, usd in zip(("gpu_hour", "generation_gpu_hour"), each, strict=False)]
        elif not all(one.isdecimal() for one in each):
            raise ConfigError(f"--accelerators must be whole numbers, got {', '.join(each)}")
        else:
            sets.append(f"{OPTIONS[name]}={sum(map(int, each))}")
            sets += [f"cluster.generation_accelerators={one}" for one in each[1:]]
            sets += [f"plan.generation_accelerators=[{one}]" for one in each[1:]]
    return sets


def _assumed(given: Mapping[str, Any]) -> tuple[Assumption, ...]:
    """Return defaults of missing keys; ConfigError if no model is given."""
    measured = any(key.startswith("hardware.") and key not in OPTIONS.values() for key in given)
    if "hardware.model" not in given and not measured:
        raise ConfigError("plan needs a run file, or a model: --model NAME")
    batch, longest = _number(given, "scheduler.train_batch_size"), _number(given, "workload.length.max")
    group = round(_number(given, "workload.group_size") or math.gcd(round(batch or 8), 8))
    batch = batch or group * max(1, round(512 / group))
    mean = _number(given, "workload.length.mean") or round((longest or LENGTH_RATIO * 2000) / LENGTH_RATIO)
    every = (
        Assumption("optimizer_steps", 1000, (200,)),
        Assumption("cluster.accelerators", 64, (32, 128)),
        Assumption("hardware.gpu", "H100", ("A100", "H200")),
        Assumption("hardware.engine", ENGINE, ("vllm-0.15",)),
        Assumption("hardware.software", SOFTWARE, ("verl", "nemo-rl")),
        Assumption("scheduler.train_batch_size", round(batch), (round(batch / 2), round(2 * batch))),
        Assumption("workload.group_size", group, (1,)),
        Assumption("workload.prompt_tokens", 500, (100, 2000)),
        Assumption("workload.length.mean", mean, (mean / 2, mean * 2)),
        Assumption("workload.length.cv", 1.0, (0.5, 1.5)),
        Assumption("workload.length.max", round(LENGTH_RATIO * mean), (round(4 * mean), round(16 * mean))),
        *([] if "plan.lag_limit" in given else [Assumption("plan.mean_lag_limit", MEAN_LAG_LIMIT, (2.0, 8.0))]),
    )
    return tuple(one for one in every if one.key not in given and not (measured and one.key.startswith("hardware.")))


def _number(given: Mapping[str, Any], key: str) -> float | None:
    """Return a given number above 0; None if it is missing or wrong, which the run file's check reports."""
    value = given.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9 else None


def with_value(tables: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return tables with another value of a key; None leaves it out."""
    result = with_overrides(tables, [f"{key}=0"])
    *path, name = key.split(".")
    table = result
    for part in path:
        table = table[part]
    if value is None:
        del table[name]
    else:
        table[name] = value
    return result


def with_placeholders(tables: Mapping[str, Any], *, resized: bool = False) -> tuple[dict[str, Any], bool]:
    """Fill in the missing keys that ``plan`` searches; return the tables, and whether none was missing.

    Half of the accelerators generate, in whole engines, 64 sequences each; of a list of ``[plan]`` the first value
    is taken. ``resized``: the cluster has another size than its own split was written for.
    """
    given = flat(tables)
    sets = _split_placeholder(given, resized=resized)
    listed = {
        "scheduler.train_batch_size": "plan.train_batch_size",
        "environment.count": "plan.environments",
        "scheduler.generation_batch_size": "plan.generation_batch_size",
    }
    for key, values in listed.items():
        first = given.get(values)
        if key in given or key.partition(".")[0] not in tables:
            continue
        if isinstance(first, list) and first:
            sets.append(f"{key}={first[0]}")
        elif key in FOUND:
            sets.append(f"{key}=64")
    return with_overrides(tables, sets), not sets


def _split_placeholder(given: Mapping[str, Any], *, resized: bool) -> list[str]:
    number, engine = _number(given, "cluster.accelerators"), round(_number(given, "cluster.tensor_parallel") or 1)
    split, kind = given.get("cluster.generation_accelerators"), given.get("scheduler.kind")
    alone = given.get("scheduler.partial_rollouts") is True
    alone |= isinstance(kind, str) and find_schedule(kind, key="scheduler.kind").colocated
    if number is None or alone or (split is not None and not (resized and isinstance(split, int) and split >= number)):
        return []
    half = round(number) // 2 // engine * engine
    if not half and kind is None:
        return [f"scheduler.kind={CONVENTIONAL.name}"]
    return [f"cluster.generation_accelerators={half or engine}"]


def asked_of(config: RunConfig, *, whole: bool) -> dict[str, Any]:
    """Return the tables of a case, without placeholders."""
    tables = config.model_dump(mode="json", exclude_none=True)
    for key in () if whole else FOUND:
        table, name = key.split(".")
        tables[table].pop(name, None)
    return tables


def save_question(question: Question, path: Path) -> None:
    """Write the run file of a question; ConfigError if another file is there, or it cannot be written."""
    text = question_text(question)
    try:
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise ConfigError(f"--save must be a new file, got {path}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--save must be a file that can be written, got {path}: {error.strerror}") from None


def question_text(question: Question) -> str:
    """Return the run file of a question, assumptions marked."""
    lines, table = ["# A question to `pipelinerl plan`; change it, and ask again.", ""], ""
    keys = {one.key for one in question.assumed}
    for line in tomli_w.dumps(question.tables).splitlines():
        if line.startswith("["):
            table = f"{line.strip('[]')}."
        note = "  # assumed" if f"{table}{line.partition(' = ')[0]}" in keys else ""
        lines.append(line + note)
    return "\n".join(lines) + "\n"
