"""Find a shipped value by its name, or the user's own code."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any, TypeVar

from pipelinerl.errors import ConfigError

T = TypeVar("T")


def named_attribute(name: str, *, key: str, allowed: str) -> Any:
    """Import the object that ``package.module:attribute`` names; ``key`` and ``allowed`` are for messages.

    Raises ConfigError, one line, if the name has another form, the module cannot be imported or lacks the attribute.
    """
    module_name, colon, attribute = name.partition(":")
    if not (colon and attribute and all(part.isidentifier() for part in f"{module_name}.{attribute}".split("."))):
        raise ConfigError(f"{key} must be {allowed}, got {name!r}")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # the user's own module may raise anything
        raise ConfigError(f"{key} must be importable, got {name!r} ({kind_and_line(error)})") from error
    try:
        for part in attribute.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise ConfigError(f"{key} must name an attribute of {module_name}, got {name!r}") from error
    return found


def named_value(name: str, shipped: Mapping[str, T], kind: type[T], *, key: str) -> T:
    """Return the ``shipped`` value of this name, or the user's at ``package.module:ATTRIBUTE``; else a ConfigError."""
    if name in shipped:
        return shipped[name]
    allowed = f"{', '.join(shipped)} or package.module:ATTRIBUTE"
    if near := difflib.get_close_matches(name, list(shipped), n=1):
        raise ConfigError(f"{key} must be {allowed}, got {name!r}; did you mean {near[0]}?")
    found = named_attribute(name, key=key, allowed=allowed)
    if not isinstance(found, kind):
        raise ConfigError(f"{key} must name a {kind.__name__}, got {name!r}")
    return found


LONGEST_MESSAGE = 300
"""Characters; an error may hold megabytes of data."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, its first ``LONGEST_MESSAGE`` characters."""
    return str(error).strip().partition("\n")[0][:LONGEST_MESSAGE].rstrip()


def kind_and_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message, if any."""
    line = first_line(error)
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
