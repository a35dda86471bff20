"""Stacks: inference engines, and software of training, by name and version, with their own coefficients.

``data/stacks.toml`` has each with its sources. A name of software without a version means the newest known version. A
run file without a name uses ``coefficients.toml``, which has the newest engine and no particular software.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelinerl.errors import ConfigError
from pipelinerl.hardware.coefficients import Level
from pipelinerl.hardware.transport import OURS, PUBLISHED, WeightTransport, find_transport
from pipelinerl.util.explain import did_you_mean
from pipelinerl.util.read import read_toml


@dataclass(frozen=True, slots=True)
class Stack:
    """An engine or a software."""

    coefficients: Mapping[str, Mapping[Level, float]]
    """Those in which it differs, at their levels, by name."""
    transports: Mapping[bool, WeightTransport]
    """Weight synchronization by colocated; empty where it is not known."""
    also: tuple[str, ...]
    """Other names for it: versions with the same published facts."""


@functools.cache
def _stacks() -> Mapping[str, Mapping[str, Stack]]:
    tables = read_toml(Path(__file__).parent / "data" / "stacks.toml", "the stacks")
    return {kind: {name: _stack(name, table) for name, table in rows.items()} for kind, rows in tables.items()}


def _stack(name: str, table: Mapping[str, Any]) -> Stack:
    arms = {False: table.get("apart"), True: table.get("colocated")}
    methods = {arm: find_transport(one, key=name, among=(*PUBLISHED, *OURS)) for arm, one in arms.items() if one}
    also = tuple(table.get("also", ()))
    levels = {key: one for key, one in table.items() if isinstance(one, list) and key != "also"}
    return Stack({key: dict(zip(Level, values, strict=True)) for key, values in levels.items()}, methods, also)


def find_stack(kind: str, name: str | None) -> Stack | None:
    """Return the ``engine`` or ``software`` of a name, None of no name; ConfigError, with the key, if unknown.

    A third number of a version does not count: ``verl-0.7.1`` is ``verl-0.7``.
    """
    known = _stacks()[kind]
    every = {also: one for stack, one in known.items() for also in (stack, *one.also)}
    if name is None:
        return None
    if (found := every.get(re.sub(r"(-\d+\.\d+)\.\d+$", r"\1", name))) is not None:
        return found
    raise ConfigError(f"{kind} must be one of {', '.join(known)}; {did_you_mean(name, every)}got {name!r}")


def stack_levels(engine: str | None, software: str | None) -> dict[str, Mapping[Level, float]]:
    """Return the coefficients that engine and software have of their own, at their levels, by name."""
    stacks = (find_stack("engine", engine), find_stack("software", software))
    return {name: levels for one in stacks if one is not None for name, levels in one.coefficients.items()}
