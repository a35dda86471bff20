"""The commands of the pages: every line of a shell, whole commands in the text, and what stands with an answer."""

from __future__ import annotations

import re
import shlex

from pages import FENCE, PAGES, section

SHELLS = ("sh", "console", "bash")
INLINE = re.compile(r"`(pipelinerl (?:validate|[^`]*\bexamples/[^`]*))`")
"""A whole command in the text: one with a file to run it on, or that needs none."""
LOOP = re.compile(r"for (\w+) in ([^;]+); do ([^;]+); done")
ANSWERED = {
    "docs/questions.md": re.findall(r"^## (.+)$", PAGES["docs/questions.md"], re.MULTILINE),
    "docs/planning.md": ["A question in a line"],
    "docs/agents.md": ["How many sandboxes?", "Pipeline and conventional RL"],
    "README.md": ["Ask your own question"],
}
"""Headings with a command and, below it, what it prints."""


def lines_of(text: str, *, blocks_alone: bool = False) -> list[str]:
    """Return every command line of a page in order: joined where it goes on, without remarks, loops unrolled."""
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


def questions() -> dict[str, list[tuple[str, str]]]:
    """Return each command whose answer stands on a page with the headings and answers that it stands with."""
    found: dict[str, list[tuple[str, str]]] = {}
    for page, titles in ANSWERED.items():
        for title in titles:
            text = section(page, title)
            answer = next(content for language, _, content in FENCE.findall(text) if language == "text")
            found.setdefault(lines_of(text, blocks_alone=True)[0], []).append((title, answer))
    return found
