"""Hostile names on a terminal, in Markdown, in a notebook, in a timeline; in pages: tests/analysis."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from command_line import COMPARE, TINY, Command
from hostile_names import HIDDEN, NAMES, visible
from tiny_comparison import CONVENTIONAL, PIPELINE, run
from tiny_plan import in_this_process

import pipelinerl
from analysis.timeline import read_timeline
from pipelinerl.api import compare
from pipelinerl.cli.output import complain
from pipelinerl.pages.page import Page, Place, Section, Table, page_markdown
from pipelinerl.pages.terminal import print_page
from pipelinerl.util.explain import printable

ANSWER = Section("ways", ["\n".join(NAMES)], Place.ANSWER)
LINES = Section("lines", NAMES, Place.LINES)
PAGE = Page(
    title=NAMES[0],
    question=NAMES[0],
    answer="\n".join(NAMES),
    facts=[*zip(NAMES, NAMES, strict=True)],
    sections=[LINES, ANSWER, *(Section(name, NAMES, Place.LIST) for name in NAMES)],
    tables=[Table(title=NAMES[8], columns=("", *NAMES), rows=[[name, *NAMES] for name in NAMES], note=NAMES[8])],
    run_file="\n".join((*NAMES, "````", "```\n<img src=x onerror=window.taken=1>")),
)


@pytest.mark.parametrize("colours", [False, True])
def test_a_terminal_shows_names_as_they_are(
    colours: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No byte drives the terminal but rich's own colours, and no markup or emoji of rich is read in a name."""
    monkeypatch.setenv("COLUMNS", "9000")
    if colours:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
    print_page(PAGE, NAMES[8])
    shown = capsys.readouterr().out
    assert ("\x1b[" in shown) is colours  # bold titles
    assert set(HIDDEN) & set(shown) <= ({"\x1b"} if colours else set())
    assert "\x1b]" not in shown
    assert "\x1b[2J" not in shown
    if not colours:
        for name in NAMES:
            assert shown.count(visible(name)) > 2 * len(NAMES)


def test_an_error_line_shows_names_as_they_are(command: Command, tmp_path: Path) -> None:
    for bad in ("\x1b[31mred", "a\x9b2Jb", "\u202egnp"):
        done = command("simulate", tmp_path / bad)
        assert (done.status, done.err.count("\n")) == (2, 1)
        assert visible(bad) in done.err
        assert done.err.strip("\n").isprintable()


def test_every_kind_of_unseen_character_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """Of all of Unicode: what moves a cursor, turns or hides text or has no bytes; not letters, spaces and signs."""
    unseen = [chr(code) for code in range(sys.maxunicode + 1) if printable(chr(code)) != chr(code)]
    assert set(HIDDEN) | {"\udcff", "\u2028", "\u2029", "\xad", "\x00", "\U000e0001"} <= set(unseen)
    assert not set("\n\t aä中\u3000\xa0→²🙂") & set(unseen)
    complain("".join(unseen))
    assert capsys.readouterr().err.replace("\n", "").isprintable()
    assert printable("a\r\nb\rc") == "a\nb\\rc"


def test_markdown_has_no_html_and_no_link_of_a_name() -> None:
    text = page_markdown(PAGE)
    body, fold = text.split("<details>")
    assert "<" not in body
    assert "](" not in body
    assert not set(HIDDEN) & set(text)
    fence = fold.split("\n")[2].removesuffix("toml")
    assert fence == "`" * 5  # longer than any in the run file, which so cannot leave it
    assert fold.split("\n").count(fence) == 1


def test_a_notebook_gets_names_as_text() -> None:
    arms = [one | {"name": name} for one, name in zip((PIPELINE, CONVENTIONAL), (NAMES[0], NAMES[9]), strict=True)]
    with in_this_process():
        report = compare(run(arms=arms, baseline=NAMES[0]))
    html = report._repr_html_()
    assert html is not None
    assert "<img src=x" not in html
    assert "&lt;img src=x" in html
    assert not set(HIDDEN) & set(html)


def test_a_timeline_has_no_text_of_a_run(command: Command, tmp_path: Path) -> None:
    """Names of metrics are the only text beside numbers and our words: one that is no phase of a rank is left out."""
    folder = tmp_path / NAMES[0]
    (tmp_path / "run.toml").write_text(TINY + COMPARE)
    assert command("simulate", tmp_path / "run.toml", "--out", folder, "--trace", "full").status == 0
    names = [f"train/rank0/{name}_s" for name in (*NAMES, "forward")]
    lines = [{"step": step, "reward/mean": 0.0} | dict.fromkeys(names, 0.01) for step in range(1, 7)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    text = json.dumps(read_timeline(folder).entries)
    assert '"forward"' in text
    assert [name for name in NAMES if json.dumps(name)[1:-1] in text] == []


def test_one_function_prints_what_pages_do_not() -> None:
    files = [path for path in (Path(pipelinerl.__file__).parent).rglob("*.py") if "typer.echo(" in path.read_text()]
    assert [path.name for path in files] == ["output.py"]
