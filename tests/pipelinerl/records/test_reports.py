"""Reports of runs and plans: an older summary is read, steps as arrays, every message for a broken table."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_runs import write_run
from refusals import message
from tiny_plan import priced_plan

from pipelinerl.records.comparison_report import ArmReport
from pipelinerl.records.plan_report import PlanReport
from pipelinerl.records.reports import RunReport
from pipelinerl.records.steps import COLUMNS, read_steps


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", num_steps=3)


def test_a_summary_without_preemptions_is_read_and_written_without_them(folder: Path) -> None:
    """Runs that were recorded before preemptions were counted have no such key."""
    written = json.loads((folder / "summary.json").read_text())
    assert "preemptions" not in written["rollouts"]
    report = RunReport.read(folder / "summary.json")
    assert report.rollouts.preemptions is None
    assert report.to_dict() == written


def test_steps_are_arrays_of_the_rows_beside_the_summary(folder: Path) -> None:
    steps = RunReport.read(folder / "summary.json").steps
    assert steps.dtype.names == COLUMNS
    assert steps.step.tolist() == [1, 2, 3]
    assert steps.step.dtype == np.int64
    assert steps.time_s.tolist() == read_steps(folder / "steps.csv").time_s.tolist()
    (folder / "steps.csv").unlink()
    assert len(RunReport.read(folder / "summary.json").steps) == 0


def test_an_arm_keeps_the_folders_of_all_seeds_and_the_failure_of_one(folder: Path) -> None:
    """A seed without a speed-up has failed."""
    summary = json.loads((folder / "summary.json").read_text())
    repeats = [
        {"seed": 5, "folder": "a/5", "speedup": 1.5, "reward": 0.5},
        {"seed": 1, "folder": "a/1", "speedup": None},
    ]
    arm = {"name": "a", "folder": "a/5", "speedup": 1.5, "summary": summary, "repeats": repeats}
    report = ArmReport.from_dict(arm, name="arm")
    assert (report.to_dict(), report.folders) == (arm, ["a/5", "a/1"])


def test_a_plan_is_read_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(priced_plan().to_dict()))
    assert PlanReport.read(path) == priced_plan()


SCREENED = {"label": [], "family": ["x"], "tokens_per_s": [], "lag_mean": [], "lag_max": []}
SPLITS = {"generation_accelerators": [1], "tokens_per_s": [1.0], "low": [1.0], "high": [1.0, 2.0]}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"screened": SCREENED}, "screened.family must have 0 values, got 1"),
        ({"splits": SPLITS}, "splits.high must have 1 values, got 2"),
        ({"front": ["nobody"]}, "front.labels must be those of simulated candidates, got ['nobody']"),
    ],
)
def test_a_broken_plan_is_one_line(changes: dict[str, Any], complaint: str) -> None:
    data = {**priced_plan().to_dict(), **changes}
    assert message(partial(PlanReport.from_dict, name="plan.json"), data) == f"plan.json: {complaint}"


CELLS = dict.fromkeys(COLUMNS, "1")


def table(*rows: dict[str, str], columns: tuple[str, ...] = COLUMNS) -> str:
    return "\n".join([",".join(columns), *(",".join(row.values()) for row in rows)]) + "\n"


def test_a_table_is_read_by_its_header(tmp_path: Path) -> None:
    """Columns in any order, unknown ones passed over, an empty cell is NaN, and no rows of a run cut short."""
    path = tmp_path / "steps.csv"
    columns = ("later", *reversed(COLUMNS))
    path.write_text(table({**dict.fromkeys(columns, "1"), "later": "x", "reward_mean": ""}, columns=columns))
    [row] = read_steps(path)
    assert np.isnan(row.reward_mean)
    assert [row[name] for name in COLUMNS if name != "reward_mean"] == [1] * (len(COLUMNS) - 1)
    path.write_text(table({**CELLS, "step": "3.0", "reward_mean": "inf"}))
    assert (read_steps(path).step, read_steps(path).reward_mean) == ([3], [np.inf])
    path.write_text(table())
    assert len(read_steps(path)) == 0


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "{path} lacks the columns " + ", ".join(COLUMNS)),
        (table(columns=COLUMNS[:-2]), "{path} lacks the columns " + ", ".join(COLUMNS[-2:])),
        (table(CELLS, CELLS) + "1,2\n", f"{{path}}, line 4: must have {len(COLUMNS)} values, got 2"),
        (table({**CELLS, "lag_mean": "much"}), "{path}, line 2: lag_mean must be a number, got much"),
        (table(CELLS, {**CELLS, "step": "1.5"}), "{path}, line 3: step must be a number, got 1.5"),
        (table({**CELLS, "tokens": str(2**63)}), f"{{path}}, line 2: tokens must be a number, got {2**63}"),
        (table({**CELLS, "lag_mean": "nan"}), "{path}, line 2: lag_mean must be a number, got nan"),
        (table({**CELLS, "time_s": "inf"}), "{path}, line 2: time_s must be a number, got inf"),
        (table({**CELLS, "step": ""}), "{path}, line 2: step must be a number, got nan"),
    ],
)
def test_a_broken_table_is_one_line(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(content)
    assert message(read_steps, path) == complaint.format(path=path)
