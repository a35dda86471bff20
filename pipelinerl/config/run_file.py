"""Read and write run files.

Everything wrong with a file is reported at once, a line per fault, as a ``ConfigError``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from pipelinerl.config.run import CompareConfig, RunConfig, Variant
from pipelinerl.errors import ConfigError
from pipelinerl.util.explain import explain, shown
from pipelinerl.util.read import parse_toml, read_toml


def load_run(
    path: str | Path, overrides: Sequence[str] = (), seed: int | None = None, *, hardware: Path | None = None
) -> RunConfig:
    """Read a run file, apply overrides in order, and check everything; paths in the result are absolute.

    Args:
        path: The TOML file.
        overrides: ``a.b=value`` each; the value is TOML, or else a plain string.
        seed: Replaces ``seed`` of the file.
        hardware: A file whose table ``[hardware]`` replaces that of the run file, before the overrides.

    Raises:
        ConfigError: If the file cannot be read or anything in it is wrong, one line per fault.
    """
    path = Path(path)
    tables = completed(read_toml(path, "run file"), overrides, seed, folder=path.parent, hardware=hardware)
    config = parse_run(tables, name=path.name)
    if config.compare is None:
        return config
    return config.model_copy(update={"compare": _with_absolute_paths(config.compare, path.parent)})


def read_hardware(path: Path, option: str) -> dict[str, Any]:
    """Return ``[hardware]`` of a file, paths absolute; ConfigError, naming ``option``, if there is no valid one."""
    table = read_toml(path, option).get("hardware")
    if not isinstance(table, dict):
        raise ConfigError(f"{option} {path} must hold a table [hardware], as `calibrate` writes it")
    make_paths_absolute({"hardware": table}, path.parent)
    return table


def completed(
    tables: Mapping[str, Any],
    overrides: Sequence[str] = (),
    seed: int | None = None,
    *,
    folder: Path,
    hardware: Path | None = None,
) -> dict[str, Any]:
    """Return the tables of a run file with overrides, seed, ``[hardware]`` of another file, and absolute paths.

    Raises ConfigError as ``with_overrides`` and ``read_hardware``, or if a path has a zero byte.
    """
    replaced = {} if hardware is None else {"hardware": read_hardware(hardware, "--hardware")}
    data = with_overrides({**tables, **({} if seed is None else {"seed": seed}), **replaced}, overrides)
    make_paths_absolute(data, folder)
    return data


def parse_run(data: Mapping[str, Any], name: str = "run") -> RunConfig:
    """Check the tables of a run file; ConfigError, one line per fault of the input called ``name``."""
    try:
        return RunConfig.model_validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        raise ConfigError(*(f"{name}: {line}" for line in explain(error, RunConfig))) from None


def with_overrides(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a copy with every ``a.b=value`` set in order; ConfigError without ``=``, or through a non-table."""
    result: dict[str, Any] = json.loads(json.dumps(data, default=str))
    for override in overrides:
        key, separator, text = override.partition("=")
        parts = [part.strip() for part in key.split(".")]
        if not separator or not all(parts):
            raise ConfigError(f"--set must be KEY=VALUE with a dotted key, got {override!r}")
        try:
            tables = parse_toml(f"value = {text}", "--set")
        except ConfigError:
            tables = {}
        value: Any = tables["value"] if len(tables) == 1 else text
        table = result
        for part in parts[:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ConfigError(f"--set {override}: {part} is not a table")
        table[parts[-1]] = value
    return result


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return values by their dotted key."""
    values: dict[str, Any] = {}
    for key, value in tables.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return values


def dump_run(config: RunConfig) -> str:
    """Return the configuration as TOML that ``load_run`` reads back to an equal one."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


NAMES_OR_PATHS = (
    ("workload", "length", "source"),
    ("environment", "turns", "source"),
    ("hardware", "gpu"),
    ("hardware", "generation_gpu"),
    ("hardware", "model"),
)
"""Keys that hold a name, or the path of a file."""
PATHS = (
    *NAMES_OR_PATHS,
    ("hardware", "decode", "table"),
    ("train", "model", "path"),
    ("train", "weights_folder"),
    ("train", "task", "settings", "path"),
    ("train", "task", "settings", "held_out_path"),
    ("train", "evaluation", "settings", "path"),
    ("train", "evaluation", "settings", "held_out_path"),
)
"""Keys that hold a path, relative to the run file."""


def make_paths_absolute(data: dict[str, Any], folder: Path) -> list[tuple[str, str]]:
    """Make relative paths absolute, in place; return each before and after. ConfigError if one has a zero byte."""
    changes = []
    for keys in PATHS:
        table: Any = data
        for key in keys[:-1]:
            table = table.get(key) if isinstance(table, dict) else None
        value = table.get(keys[-1]) if isinstance(table, dict) else None
        if isinstance(value, str) and (keys not in NAMES_OR_PATHS or _is_path(value, folder)):
            if "\0" in value:
                raise ConfigError(f"{'.'.join(keys)} must be the path of a file, got {shown(value)}")
            table[keys[-1]] = os.path.realpath(folder / value)
            changes.append((value, table[keys[-1]]))
    return changes


def _is_path(value: str, folder: Path) -> bool:
    """Return whether a name or path is a path: by its ending, or because that folder is there."""
    if "\0" in value:
        return True  # and is refused as one
    return value.endswith((".csv", ".toml", ".json", ".jsonl", ".jsonl.gz")) or (
        "/" in value and (folder / value).is_dir()
    )


def _with_absolute_paths(compare: CompareConfig, folder: Path) -> CompareConfig:

    def changed(variants: list[Variant]) -> list[Variant]:
        return [one.model_copy(update={"set": [absolute(override) for override in one.set]}) for one in variants]

    def absolute(override: str) -> str:
        try:
            tables = with_overrides({}, [override])
        except ConfigError:
            return override  # the comparison reports the fault
        for before, now in make_paths_absolute(tables, folder):
            override = override.replace(before, now)
        return override

    return compare.model_copy(update={"arms": changed(compare.arms), "scenarios": changed(compare.scenarios)})
