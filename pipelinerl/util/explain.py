"""Messages for wrong input: one line per fault, with key, rule and value."""

from __future__ import annotations

import difflib
import json
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pipelinerl.errors import ConfigError

MOST_FAULTS = 20
"""Faults of a file that are told one by one (count)."""

UNSEEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories of characters that drive terminals, turn or hide text, or have no bytes in UTF-8."""


def did_you_mean(
    word: str,
    known: Iterable[str],
    *,
    shown_as: Mapping[str, str] | None = None,
    num_names: int = 1,
    cutoff: float = 0.6,
) -> str:
    """Return ``did you mean X? ``, or nothing if no known name is near (``difflib``); offered as in ``shown_as``."""
    near = difflib.get_close_matches(word, list(known), n=num_names, cutoff=cutoff)
    names = dict.fromkeys((shown_as or {}).get(name, name) for name in near)
    return f"did you mean {' or '.join(names)}? " if names else ""


def shown(value: Any) -> str:
    """Return a value as a user would write it, on one line, cut to a readable length: 80 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def printable(value: Any) -> Any:
    """Return text, or all text in a container, with unseen characters but tabs and line ends as Python's escapes."""
    match value:
        case str() if not isinstance(value, Enum) and not value.isprintable():
            kept = ("\t", "\n")
            return "".join(
                repr(one)[1:-1] if one not in kept and unicodedata.category(one) in UNSEEN else one
                for one in value.replace("\r\n", "\n")
            )
        case list() | tuple():
            return type(value)(printable(one) for one in value)
        case dict():
            return {printable(key): printable(one) for key, one in value.items()}
        case _ if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{one.name: printable(getattr(value, one.name)) for one in fields(value)})
    return value


def explain(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """Return a line per fault that pydantic found in ``model``: key, rule, value; unknown keys get its own offered."""
    faults = error.errors(include_url=False)
    lines = [fault_line(fault, *_place(fault["loc"], model)) for fault in faults[:MOST_FAULTS]]
    return lines + [f"{len(faults) - MOST_FAULTS:,} faults more"] * (len(faults) > MOST_FAULTS)


@contextmanager
def explaining(model: type[BaseModel], before: str, *, most: int | None = None) -> Iterator[None]:
    """Raise faults that pydantic finds in ``model`` inside this block as ConfigError: a line each, after ``before``."""
    try:
        yield
    except ValidationError as error:
        raise ConfigError(*(f"{before}{line}" for line in explain(error, model)[:most])) from None


def fault_line(fault: ErrorDetails, key: str, models: Sequence[type[BaseModel]] = ()) -> str:
    """Return a line for pydantic's fault at the user's ``key``; ``models``: of its value, or if unknown its table."""
    value, ctx = fault["input"], fault.get("ctx", {})
    got = f"got {shown(value)}"
    got_number = f"got {value:.12g}" if isinstance(value, float) else got
    match fault["type"]:
        case "extra_forbidden":
            names = sorted(models[0].model_fields)
            return f"{key} is an unknown key; {did_you_mean(str(fault['loc'][-1]), names)}allowed: {', '.join(names)}"
        case "missing":
            return f"{key} is missing"
        case "greater_than_equal":
            return f"{key} must be at least {ctx['ge']:g}, {got_number}"
        case "greater_than":
            return f"{key} must be above {ctx['gt']:g}, {got_number}"
        case "less_than":
            return f"{key} must be below {ctx['lt']:g}, {got_number}"
        case "less_than_equal":
            return f"{key} must be at most {ctx['le']:g}, {got_number}"
        case "int_type" | "int_from_float" | "int_parsing":
            return f"{key} must be a whole number, {got}"
        case "float_type" | "finite_number" | "float_parsing":
            return f"{key} must be a number, {got}"
        case "string_type":
            return f"{key} must be a string, {got}"
        case "bool_type":
            return f"{key} must be true or false, {got}"
        case "list_type" | "tuple_type":
            return f"{key} must be a list, {got}"
        case "model_type" | "dict_type":
            return f"{key} must be a table, {got}"
        case "literal_error" | "enum":
            return f"{key} must be {ctx['expected']}, {got}"
        case "union_tag_not_found" | "union_tag_invalid":
            name = ctx["discriminator"].strip("'")
            found = shown(value[name]) if name in value else "none"
            return f"{key}.{name} must be one of {', '.join(map(_tag, models))}, got {found}"
        case "value_error":
            rule = str(ctx["error"])
            return f"{key}.{rule}" if fault["loc"] else rule
        case "too_short" | "string_too_short":
            return f"{key} must not be empty, {got}"
        case _:  # of the root: a value somewhere that JSON, the way into pydantic, cannot hold
            return f"{key}: {fault['msg']}, {got}" if fault["loc"] else f"a value cannot be read: {fault['msg']}"


def _place(loc: tuple[int | str, ...], model: type[BaseModel]) -> tuple[str, list[type[BaseModel]]]:
    """Return the dotted key of a fault, without tags of unions, and the models of its value (unknown: of its table)."""
    key: list[str] = []
    models, in_dict = [model], False
    for part in loc:
        if tagged := [one for one in models if len(models) > 1 and _tag(one) == part]:
            models = tagged
            continue
        key.append(str(part))
        if isinstance(part, str) and models and part in models[0].model_fields and not in_dict:
            annotation = models[0].model_fields[part].annotation
            models, in_dict = _models_in(annotation), get_origin(annotation) is dict
        else:
            in_dict = False
    return ".".join(key) or "the root", models


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the models in ``Model | None``, ``list[Model]`` and unions of several."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]


def _tag(model: type[BaseModel]) -> str:
    return str(get_args(model.model_fields["kind"].annotation)[0])
