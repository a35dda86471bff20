"""Only their own modules compare names of schedules, transports, trainers and engines; others ask for facts."""

from __future__ import annotations

import ast
from collections.abc import Set
from dataclasses import dataclass

import pytest
from pages import ROOT

from backends import kinds as parts
from pipelinerl.hardware.transport import OURS, PUBLISHED
from pipelinerl.scheduler.kinds import KINDS

PACKAGES = ("pipelinerl", "sim", "backends", "analysis", "benchmarks")


@dataclass(frozen=True)
class Names:
    """Names of values that a run file chooses."""

    homes: tuple[str, ...]
    """Modules that may compare these names."""
    names: Set[str]
    expressions: Set[str]
    """The last two parts of expressions whose value is such a name."""
    dictionaries: bool = False
    """Whether a dictionary with such names as keys is a decision."""


SCHEDULES = Names(
    ("pipelinerl/scheduler/kinds.py",), {one.name for one in KINDS}, {"schedule.name", "scheduler.kind"}
)  # figures have a dictionary of colours
TRANSPORTS = Names(
    ("pipelinerl/hardware/transport.py", "backends/transfer/transport.py"),
    {one.name for one in (*OURS, *PUBLISHED)},
    {"transport.name", "train.transport", "hardware.weight_sync"},
    dictionaries=True,
)
TRAINERS = Names(("backends/kinds.py",), set(parts.TRAINERS), {"trainer_kind.name", "trainer.kind"})
ENGINES = Names(("backends/kinds.py",), set(), {"engine_kind.name", "engine.kind"})
"""Without the names: logs of other systems have them, too."""
CHOICES = {"schedules": SCHEDULES, "transports": TRANSPORTS, "trainers": TRAINERS, "engines": ENGINES}


def is_name(node: ast.AST, kinds: Names) -> bool:
    """Whether an expression holds such a name: ``"pipeline"``, ``PIPELINE.name``, ``schedule.name``."""
    for one in ast.walk(node):
        match one:
            case ast.Constant(value=str(text)) if text in kinds.names:
                return True
            case ast.Attribute(value=value, attr=attr):
                owner = ast.unparse(value).rpartition(".")[2].lower()
                if f"{owner}.{attr}" in kinds.expressions or (attr == "name" and owner in kinds.names):
                    return True
    return False


def decisions(source: str, kinds: Names) -> list[int]:
    """Lines that compare with such a name, match it, or look it up in a dictionary literal."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Compare(ops=[ast.Is() | ast.IsNot()]):
                pass  # is None
            case ast.Compare() if any(is_name(side, kinds) for side in (node.left, *node.comparators)):
                lines.append(node.lineno)
            case ast.MatchValue() if is_name(node.value, kinds):
                lines.append(node.value.lineno)
            case ast.Dict(keys=keys) if (
                kinds.dictionaries and sum(bool(key and is_name(key, kinds)) for key in keys) > 1
            ):
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
        (TRANSPORTS, 'if train.transport in ("broadcast", "delta"): pass'),
        (TRANSPORTS, "if settings.transport.name == other: pass"),
        (TRANSPORTS, 'BANDWIDTHS = {"broadcast": 1, "file": 2}'),
        (TRANSPORTS, 'if method == "reshard": pass'),
        (TRAINERS, 'if config.train.trainer.kind == "mine": pass'),
        (TRAINERS, 'if name == "deepspeed": pass'),
        (ENGINES, "if train.engine.kind == other: pass"),
    ],
)
def test_a_decision_by_name_is_found(kinds: Names, source: str) -> None:
    assert decisions(source, kinds)


@pytest.mark.parametrize("kinds", CHOICES.values(), ids=CHOICES)
def test_no_other_module_decides_by_such_a_name(kinds: Names) -> None:
    homes = {ROOT / home for home in kinds.homes}
    paths = {path for package in PACKAGES for path in (ROOT / package).rglob("*.py")} - homes
    assert len(paths) > 100
    found = {path.relative_to(ROOT).as_posix(): decisions(path.read_text(encoding="utf-8"), kinds) for path in paths}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_no_name_is_used_twice() -> None:
    names = [one.name for one in (*KINDS, *PUBLISHED, *OURS)]
    assert len(set(names)) == len(names)
