"""The pages with questions: each command gives the answer that stands there."""

import re
import shlex

import pytest
from in_this_process import InThisProcess
from pages import PAGES, section
from typer.testing import CliRunner

from pipelinerl.cli import app
from sim import parallel

COMMAND, ANSWER = (re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL) for language in ("sh", "text"))
QUESTIONS = [
    (page, title)
    for page in ("docs/questions.md", "docs/agents.md")
    for title in re.findall(r"^## (.+)$", PAGES[page], re.MULTILINE)
    if ANSWER.search(section(page, title)) or page == "docs/questions.md"
]


@pytest.mark.slow  # seconds each
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("page", "question"), QUESTIONS)
def test_a_question_has_its_answer(page, question, monkeypatch):
    monkeypatch.setattr(parallel, "ProcessPoolExecutor", InThisProcess)
    text = section(page, question)
    commands, answers = COMMAND.findall(text), ANSWER.findall(text)
    words = shlex.split(commands[0].replace("\\\n", " "))
    result = CliRunner(env={"COLUMNS": "80"}).invoke(
        app.app, [*words[1:], *([] if words[1] in ("compare", "simulate") else ["--workers", "1"])]
    )
    printed = [line.rstrip() for line in result.stdout.splitlines()]
    assert result.exit_code == 0
    assert answers
    assert [line for line in answers[0].splitlines() if line.rstrip() not in printed] == []
