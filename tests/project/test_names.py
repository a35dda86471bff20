"""Identifiers of the packages are words of the field."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from pages import ROOT

PACKAGES = ("pipelinerl", "sim", "backends", "analysis")
PRIVATE = {
    *("tell", "tells", "told", "hear", "hears", "heard", "say", "says", "said", "seat", "seats", "door", "doors"),
    *("meeting", "meetings", "misfit", "misfits", "bet", "bets", "ways", "worth", "dear", "dearer"),
}
"""Words that no identifier may hold: send or report, receive, slot, server, rendezvous, candidates, cost, ..."""
ALLOWED = {"tell"}
"""The method of Python's files."""


def words(identifier: str) -> set[str]:
    """Words of a snake_case or CamelCase identifier."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)}


def identifiers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.arg(arg=name) | ast.Attribute(attr=name) | ast.Name(id=name):
                yield name
            case ast.keyword(arg=str(name)) | ast.alias(asname=str(name)):
                yield name
            case _:
                pass


@pytest.mark.parametrize("package", PACKAGES)
def test_no_identifier_holds_a_private_word(package: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / package).rglob("*.py")
        for name in (path.stem, *identifiers(ast.parse(path.read_text(encoding="utf-8"))))
        if name not in ALLOWED and words(name) & PRIVATE
    }
    assert not found


def test_words_of_an_identifier() -> None:
    assert words("_hearOnly_toldBy") == {"hear", "only", "told", "by"}
    assert words("DoorWay_HTTPSeat2") == {"door", "way", "http", "seat"}
