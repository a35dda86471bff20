"""The commands of the pages: lines of shell blocks, whole commands in the text, and commands with a printed answer."""

from __future__ import annotations

import re
import shlex
from typing import Any

from pages import FENCE, PAGES, section
from typer.main import get_command

from pipelinerl.cli.app import app

SHELLS = ("sh", "console", "bash")
INLINE = re.compile(r"`(pipelinerl (?:validate|[^`]*\bexamples/[^`]*))`")
"""A whole command in the text: with the file that it needs, if any."""
LOOP = re.compile(r"for (\w+) in ([^;]+); do ([^;]+); done")
ANSWERED = {
    "docs/questions.md": re.findall(r"^## (.+)$", PAGES["docs/questions.md"], re.MULTILINE),
    "docs/planning.md": ["A question in a line"],
    "docs/agents.md": ["How many sandboxes?", "Pipeline and conventional RL"],
    "README.md": ["Ask your own question"],
}
"""Headings of sections with a command and its output."""


def lines_of(text: str, *, blocks_alone: bool = False) -> list[str]:
    """Return the command lines of a page in order: continued lines joined, comments removed, loops unrolled."""
    found = [(one.start(), one[3].replace("\\\n", " ")) for one in FENCE.finditer(text) if one[1] in SHELLS]
    if not blocks_alone:
        plain = FENCE.sub(lambda block: " " * len(block[0]), text)  # the rest keeps its places
        found += [(one.start(), one[1].replace("\n", " ")) for one in INLINE.finditer(plain)]
    lines = [line for _, block in sorted(found) for line in block.splitlines()]
    return [one for line in lines for one in _single(" ".join(shlex.split(line, comments=True, posix=False)))]


def _single(line: str) -> list[str]:
    if loop := LOOP.fullmatch(line):
        name, values, body = loop.groups()
        return [body.replace(f"${name}", value) for value in values.split()]
    return [one for one in line.split(" && ") if one]


def parsed(line: str) -> dict[str, Any]:
    """Parse a command line of ours as the program would, and return the values of its arguments."""
    _, name, *words = shlex.split(line)
    with get_command(app).commands[name].make_context(name, words) as context:
        return context.params


def questions() -> dict[str, list[tuple[str, str]]]:
    """Return each command with its headings and answers."""
    found: dict[str, list[tuple[str, str]]] = {}
    for page, titles in ANSWERED.items():
        for title in titles:
            text = section(page, title)
            answer = next(content for language, _, content in FENCE.findall(text) if language == "text")
            found.setdefault(lines_of(text, blocks_alone=True)[0], []).append((title, answer))
    return found
