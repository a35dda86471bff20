"""Commands print the output that the pages show."""

import shlex
from pathlib import Path

import pytest
from command_line import Command
from page_commands import questions
from pages import EXAMPLES

FEWER = {"How many sandboxes?": "plan.environments=[96, 320]"}
"""Overrides that print fewer lines, the same ones but for the sentence at the end."""
QUESTIONS = questions()


def is_in_order(lines: list[str], printed: list[str]) -> bool:
    """Whether the lines are printed in the same order, perhaps with others between them."""
    rest = iter(printed)
    return all(line in rest for line in lines)


@pytest.fixture(autouse=True)
def beside_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader's folder."""
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
            assert len(lines) == 6  # the head, two rows, the legend
        assert is_in_order(lines, printed), [line for line in lines if line not in printed]
