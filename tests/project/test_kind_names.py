"""No module but its own decides by the name of a schedule, transport, trainer or engine: it asks for facts."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

from backends import kinds as parts
from pipelinerl.hardware.transport import OURS, PUBLISHED
from pipelinerl.scheduler.kinds import KINDS

ROOT = Path(__file__).parents[2]
PACKAGES = ("pipelinerl", "sim", "backends", "analysis", "benchmarks")


@dataclass(frozen=True)
class Table:
    """Values that have a name in run files."""

    homes: tuple[str, ...]
    """The modules that may compare names."""
    names: frozenset[str]
    reads: frozenset[tuple[str, str]]
    """Attributes that are such a name, and the last part of the expression that they are of."""

    tables: bool
    """Whether a table by name is a decision."""


def table(homes: tuple[str, ...], names: set[str], owner: str, *keys: tuple[str, str], tables: bool) -> Table:
    reads = {("name", one) for one in (*names, owner)} | set(keys)
    return Table(homes, frozenset(names), frozenset(reads), tables)


SCHEDULES = table(
    ("pipelinerl/scheduler/kinds.py",),
    {one.name for one in KINDS},
    "schedule",
    ("kind", "scheduler"),
    tables=False,  # figures have a colour for each
)
TRANSPORTS = table(
    ("pipelinerl/hardware/transport.py", "backends/transfer/transport.py"),
    {one.name for one in (*OURS, *PUBLISHED)},
    "transport",
    ("transport", "train"),
    ("weight_sync", "hardware"),
    tables=True,
)
TRAINERS = table(("backends/kinds.py",), set(parts.TRAINERS), "trainer_kind", ("kind", "trainer"), tables=False)
ENGINES = table(("backends/kinds.py",), set(), "engine_kind", ("kind", "engine"), tables=False)
"""Without the names: logs of other systems have them, too."""
TABLES = {"schedules": SCHEDULES, "transports": TRANSPORTS, "trainers": TRAINERS, "engines": ENGINES}


def is_name(node: ast.AST, kinds: Table) -> bool:
    """Whether an expression holds such a name, or reads it: ``"pipeline"``, ``PIPELINE.name``, ``schedule.name``."""
    for one in ast.walk(node):
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and one.value in kinds.names:
            return True
        if isinstance(one, ast.Attribute) and (one.attr, _owner(one)) in kinds.reads:
            return True
    return False


def _owner(attribute: ast.Attribute) -> str:
    return ast.unparse(attribute.value).rpartition(".")[2].lower()


def decisions(source: str, kinds: Table) -> list[int]:
    """Lines that compare with such a name, match it, or look something up by it in a table written on the spot."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Compare(ops=[ast.Is() | ast.IsNot()]):
                pass  # whether it is given
            case ast.Compare() if any(is_name(side, kinds) for side in (node.left, *node.comparators)):
                lines.append(node.lineno)
            case ast.MatchValue() if is_name(node.value, kinds):
                lines.append(node.value.lineno)
            case ast.Dict(keys=keys) if kinds.tables and sum(bool(key and is_name(key, kinds)) for key in keys) > 1:
                lines.append(node.lineno)
            case ast.Subscript(value=ast.Dict(keys=keys)) if any(key and is_name(key, kinds) for key in keys):
                lines.append(node.lineno)
    return lines


@pytest.mark.parametrize(
    ("kinds", "source"),
    [
        (SCHEDULES, 'if config.kind == "pipeline": pass'),
        (SCHEDULES, 'if family in ("conventional", "partial_rollouts"): pass'),
        (SCHEDULES, "if family != PIPELINE.name: pass"),
        (SCHEDULES, "if schedule.name == other: pass"),
        (SCHEDULES, "if config.scheduler.kind == other: pass"),
        (SCHEDULES, 'match family:\n    case "one_step_off": pass'),
        (SCHEDULES, 'steps = {"pipeline": 1, "conventional": 2}[kind]'),
        (TRANSPORTS, 'if train.transport in ("broadcast", "streamed"): pass'),
        (TRANSPORTS, "if settings.transport.name == other: pass"),
        (TRANSPORTS, 'BANDWIDTHS = {"broadcast": 1, "file": 2}'),
        (TRANSPORTS, 'if method == "reshard": pass'),
        (TRAINERS, 'if config.train.trainer.kind == "mine": pass'),
        (TRAINERS, 'if name == "deepspeed": pass'),
        (ENGINES, "if train.engine.kind == other: pass"),
    ],
)
def test_a_decision_by_name_is_found(kinds: Table, source: str) -> None:
    assert decisions(source, kinds)


@pytest.mark.parametrize("kinds", TABLES.values(), ids=TABLES)
def test_no_module_decides_by_such_a_name(kinds: Table) -> None:
    homes = {ROOT / home for home in kinds.homes}
    paths = {path for package in PACKAGES for path in (ROOT / package).rglob("*.py")} - homes
    assert len(paths) > 100
    found = {path.relative_to(ROOT).as_posix(): decisions(path.read_text(encoding="utf-8"), kinds) for path in paths}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_no_name_is_used_twice() -> None:
    names = [one.name for one in (*KINDS, *PUBLISHED, *OURS)]
    assert len(set(names)) == len(names)
