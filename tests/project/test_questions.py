"""What the pages print is what their commands print, and the commands that take a second run."""

import re
import shlex
from pathlib import Path

import pytest
from command_line import Command
from pages import EXAMPLES, FENCE, PAGES, section

PAGE_COMMAND = re.compile(r"^pipelinerl .*$", re.MULTILINE)
SHELLS = ("sh", "console", "bash")
ANSWERED = {
    "docs/questions.md": re.findall(r"^## (.+)$", PAGES["docs/questions.md"], re.MULTILINE),
    "docs/planning.md": ["A question in a line"],
    "docs/agents.md": ["How many sandboxes?", "Pipeline and conventional RL"],
    "README.md": ["Ask your own question"],
}
"""Headings with a command and, below it, what it prints."""
FEWER = {"How many sandboxes?": "plan.environments=[96, 320]"}
"""What makes a command shorter and leaves every line as it is that it prints then, but for the sentence at the end."""
QUICK = ("simulate", "report", "timeline", "replay", "calibrate")
"""Commands that take a second or two, ..."""
SLOW_RUNS = ("agents.toml", "learning.toml")
"""... but of these runs."""


def commands_of(text: str) -> list[str]:
    """Every command in the blocks of a shell, its lines joined."""
    blocks = [content for language, _, content in FENCE.findall(text) if language in SHELLS]
    return [one for content in blocks for one in PAGE_COMMAND.findall(content.replace("\\\n", " "))]


def questions() -> dict[str, list[tuple[str, str]]]:
    """Each command with the headings and answers that it stands with."""
    found: dict[str, list[tuple[str, str]]] = {}
    for page, titles in ANSWERED.items():
        for title in titles:
            text = section(page, title)
            answer = next(content for language, _, content in FENCE.findall(text) if language == "text")
            command = " ".join(commands_of(text)[0].split())
            found.setdefault(command, []).append((title, answer))
    return found


QUESTIONS = questions()


def is_in_order(lines: list[str], printed: list[str]) -> bool:
    """Whether the lines are among those printed, in the same order."""
    rest = iter(printed)
    return all(line in rest for line in lines)


@pytest.fixture(autouse=True)
def beside_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader's folder: the examples, and room for what commands write."""
    (tmp_path / "examples").symlink_to(EXAMPLES)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow(seconds=40)  # each
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("asked", QUESTIONS, ids=[answers[0][0] for answers in QUESTIONS.values()])
def test_a_question_has_its_answer(command: Command, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (title, _), *_ = QUESTIONS[asked]
    fewer = FEWER.get(title)
    _, *words = shlex.split(asked)
    result = command(*words, *([] if fewer is None else ["--set", fewer]))
    assert result.status == 0, result.err
    printed = [line.rstrip() for line in result.out.splitlines()]
    for _, answer in QUESTIONS[asked]:
        lines = [line.rstrip() for line in answer.splitlines()]
        if fewer is not None:
            lines = [line for line in lines if line in printed]
            assert len(lines) == 6  # the head, two rows, what they mean
        assert is_in_order(lines, printed), [line for line in lines if line not in printed]


def can_run(words: list[str]) -> bool:
    """Whether a command is quick, and all that it reads is here."""
    name, *arguments = words
    read = [one for place, one in enumerate(arguments) if is_read(arguments, place)]
    return (
        name in QUICK
        and not any(one.endswith(SLOW_RUNS) or "$" in one for one in arguments)
        and all(Path(one).exists() for one in read)
    )


def is_read(arguments: list[str], place: int) -> bool:
    """Whether a word names a file or folder that a command reads."""
    word, before = arguments[place], arguments[place - 1] if place else ""
    return not word.startswith("--") and ("/" in word or "." in word) and before not in ("--out", "--set", "--model")


@pytest.mark.slow  # some seconds in all
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("in_this_process")
def test_quick_commands_of_the_pages_run(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of their page, each once, beside the examples; what the one writes the next may read."""
    monkeypatch.setattr("analysis.plot.save_figures", lambda *_, **__: [])  # most of the time of a short run
    done = set[str]()
    for page, text in PAGES.items():
        for line in commands_of(text):
            words = shlex.split(line, comments=True)[1:]
            if shlex.join(words) not in done and can_run(words):
                result = command(*words)
                assert result.status == 0, (page, line, result.err)
                done.add(shlex.join(words))
    assert {one.split()[0] for one in done} == set(QUICK)
    assert len(done) > 10
