"""No module but the kinds' own decides by the name of a schedule: each asks for the fact that it depends on."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from pipelinerl.scheduler.kinds import KINDS

ROOT = Path(__file__).parents[2]
HOME = ROOT / "pipelinerl" / "scheduler" / "kinds.py"
PACKAGES = ("pipelinerl", "sim", "backends", "analysis", "benchmarks")
NAMES = {kind.name for kind in KINDS}


def is_name(node: ast.AST) -> bool:
    """Whether an expression holds a kind's name, or reads it: ``"pipeline"``, ``PIPELINE.name``, ``schedule.name``."""
    for one in ast.walk(node):
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and one.value in NAMES:
            return True
        if isinstance(one, ast.Attribute) and (one.attr, ast.unparse(one.value).rpartition(".")[2].lower()) in READS:
            return True
    return False


READS = {("name", owner) for owner in (*NAMES, "schedule")} | {("kind", "scheduler")}
"""Attributes that are a kind's name, and the last part of the expression that they are of."""


def decisions(source: str) -> list[int]:
    """Lines that compare with a kind's name, match it, or look something up by it in a table written on the spot."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Compare() if any(is_name(side) for side in (node.left, *node.comparators)):
                lines.append(node.lineno)
            case ast.MatchValue() if is_name(node.value):
                lines.append(node.value.lineno)
            case ast.Subscript(value=ast.Dict(keys=keys)) if any(key is not None and is_name(key) for key in keys):
                lines.append(node.lineno)
    return lines


@pytest.mark.parametrize(
    "source",
    [
        'if config.kind == "pipeline": pass',
        'if family in ("conventional", "partial_rollouts"): pass',
        "if family != PIPELINE.name: pass",
        "if schedule.name == other: pass",
        "if config.scheduler.kind == other: pass",
        'match family:\n    case "one_step_off": pass',
        'steps = {"pipeline": 1, "conventional": 2}[kind]',
    ],
)
def test_a_decision_by_name_is_found(source: str) -> None:
    assert decisions(source)


def test_no_module_decides_by_the_name_of_a_schedule() -> None:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if path != HOME]
    assert len(paths) > 100
    found = {path.relative_to(ROOT).as_posix(): decisions(path.read_text(encoding="utf-8")) for path in paths}
    assert {path: lines for path, lines in found.items() if lines} == {}
