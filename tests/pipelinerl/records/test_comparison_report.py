"""The report of a comparison: keys in the order of the file, read back as written, a wrong value in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
from made_up_runs import write_run

from pipelinerl.errors import ConfigError
from pipelinerl.records.comparison_report import ComparisonReport

REPEATS = [
    {"seed": 5, "folder": "s/a/seed_5", "speedup": 1.5, "reward": 0.5, "ess": 0.9},
    {"seed": 1, "folder": "s/a/seed_1", "speedup": None},
]


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    summary = json.loads((write_run(tmp_path / "run", num_steps=2) / "summary.json").read_text())
    arms = [
        {"name": "a", "folder": "s/a/seed_5", "speedup": 1.5, "summary": summary, "repeats": REPEATS},
        {"name": "b", "folder": "s/b", "speedup": None, "summary": summary},
    ]
    scenarios = [{"name": "s", "arms": arms}, {"name": "empty", "arms": []}]
    return {"baseline": "b", "scenarios": scenarios, "failures": ["scenario 'empty': no"], "complete": False}


def test_it_is_read_as_written_and_written_as_read(tmp_path: Path, data: dict[str, Any]) -> None:
    path = tmp_path / "comparison.json"
    path.write_text(json.dumps(data))
    report = ComparisonReport.read(path)
    assert json.dumps(report.to_dict()) == json.dumps(data)
    assert [(arm.name, arm.folders) for arm in report.arms] == [("a", ["s/a/seed_5", "s/a/seed_1"]), ("b", ["s/b"])]


def test_a_wrong_value_names_its_place(data: dict[str, Any]) -> None:
    data["scenarios"][0]["arms"][0]["speedup"] = "fast"
    with pytest.raises(ConfigError, match=r"^file: scenarios\.0\.arms\.0\.speedup must be a number, got \"fast\"$"):
        ComparisonReport.from_dict(data, name="file")
