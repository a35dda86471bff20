"""Names that run a script, leave their place or drive a terminal where they are taken for more than text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

NAMES = (
    '<img src=x onerror="window.taken=1">',
    '"><script>window.taken=1</script>',
    "</script><script>window.taken=1</script><!--<script>",
    '\'"--></style></title><svg onload="window.taken=1">',
    '<a href="javascript:window.taken=1">[a](javascript:alert(1))</a>',
    "{{ 7 * 7 }}{% raw %}<%= 7 * 7 %><% window.taken=1 %>${7 * 7}",
    '"}],"x":"</script><!--" \\u003cimg src=x onerror=window.taken=1>',
    "$$\\href{javascript:window.taken=1}{x}$$ $\\frac$ @{x}{safe} @name{safe} $x",
    "[red]red[/] [/] [link=https://example.com]link[/link] :bomb: \\[bold] \\",
    "\x1b[2J\x1b]0;taken\x07\x1b]8;;https://example.com\x1b\\x \x9b31m \x08\r\u202egnp.exe\u2066 \u200b \x7f",
)
"""Markup, scripts, templates of jinja2, Bokeh and underscore, JSON, TeX, markup of rich, control bytes."""
HIDDEN = "\x1b\x07\x08\r\x7f\x9b\u202e\u2066\u200b"
"""Characters of the last name that may reach nobody as they are."""


def visible(name: str) -> str:
    """Return a name as pages and terminals show it."""
    return "".join(one.encode("unicode_escape").decode() if one in HIDDEN else one for one in name)


def in_every_text(model: type[Any], data: Any) -> Any:
    """Return a report with a name behind every text of ``data`` that may be any text; equal texts stay equal."""
    fixed, names = set[tuple[Any, ...]](), dict[str, str]()
    while True:
        try:
            return model.model_validate_json(json.dumps(_changed(data, (), fixed, names)))
        except ValidationError as error:
            found = {_place(data, one["loc"]) for one in error.errors()}
            if found <= fixed:
                raise
            fixed |= found


def _changed(value: Any, place: tuple[Any, ...], fixed: set[tuple[Any, ...]], names: dict[str, str]) -> Any:
    if place in fixed or place[-1:] == ("folder",):
        return value
    match value:
        case str():
            return names.setdefault(value, f"{value} {NAMES[len(names) % len(NAMES)]}")
        case list():
            return [_changed(one, (*place, number), fixed, names) for number, one in enumerate(value)]
        case dict():
            return {key: _changed(one, (*place, key), fixed, names) for key, one in value.items()}
    return value


def _place(data: Any, loc: Sequence[Any]) -> tuple[Any, ...]:
    """Return the place of pydantic's fault, without the tags of unions."""
    place: list[Any] = []
    for part in loc:
        if isinstance(data, list) or (isinstance(data, dict) and part in data):
            data = data[part]
            place.append(part)
    return tuple(place)
