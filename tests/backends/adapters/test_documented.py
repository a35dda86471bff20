"""What docs/agents.md shows of the adapters fits them."""

import inspect
import re
import sys
import tomllib
from pathlib import Path

import pytest
from refusals import message

from pipelinerl.errors import install
from pipelinerl.rl.config import TaskConfig
from pipelinerl.rl.tasks import load_environment
from pipelinerl.util.user_code import named_attribute

PAGE = (Path(__file__).parents[3] / "docs/agents.md").read_text()
TABLES = [tomllib.loads(block) for block in re.findall(r"```toml\n(\[train\.task\].*?)```", PAGE, re.DOTALL)]


def test_all_three_are_shown() -> None:
    names = [table["train"]["task"]["name"].rpartition(":")[2] for table in TABLES]
    assert names == ["ToolEnvironment", "Verifiers", "OpenEnv"]


@pytest.mark.parametrize("table", TABLES)
def test_the_settings_shown_are_arguments(table: dict) -> None:
    task = TaskConfig.model_validate(table["train"]["task"])
    kind = named_attribute(task.name, key="name", allowed="module:attribute")
    inspect.signature(kind).bind(**task.settings)


@pytest.mark.parametrize(
    ("number", "absent", "extra"),
    [(0, "transformers", "train"), (1, "verifiers", "verifiers"), (2, "websockets", "openenv")],
)
def test_a_package_that_is_missing_is_one_line(
    number: int, absent: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    task = TaskConfig.model_validate(TABLES[number]["train"]["task"])
    own = {"task": {"name": "arithmetic"}, "tools": []} if number == 0 else {}
    refusal = message(load_environment, task.model_copy(update={"settings": {**task.settings, **own}}))
    assert refusal == f"train.task.name needs the package {absent}: {install(extra)}"
