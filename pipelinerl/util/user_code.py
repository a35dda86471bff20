"""Find the user's own code by its name."""

from __future__ import annotations

import importlib
from typing import Any

from pipelinerl.errors import ConfigError


def named_attribute(name: str, *, key: str, allowed: str) -> Any:
    """Return the object that ``package.module:attribute`` names.

    Args:
        name: Module and attribute; the module is imported.
        key: What messages call the setting that holds the name.
        allowed: What the setting may be.

    Raises:
        ConfigError: One line: the name has another form, the module cannot be imported, or it lacks the attribute.
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


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).splitlines() or [""])[0]


def kind_and_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message; the type alone where there is none."""
    line = first_line(error).strip()
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
