"""The report of a plan: read back as written, and one line for a broken file."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from refusals import message
from tiny_plan import priced_plan

from pipelinerl.records.plan_report import PlanReport


def test_the_report_is_read_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(priced_plan().to_dict()))
    assert PlanReport.read(path) == priced_plan()


COLUMNS = {"label": [], "family": ["x"], "tokens_per_s": [], "lag_mean": [], "lag_max": []}
SPLITS = {"generation_accelerators": [1], "tokens_per_s": [1.0], "low": [1.0], "high": [1.0, 2.0]}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"screened": COLUMNS}, "screened.family must have 0 values, got 1"),
        ({"splits": SPLITS}, "splits.high must have 1 values, got 2"),
        ({"front": ["nobody"]}, "front.labels must be those of simulated candidates, got ['nobody']"),
    ],
)
def test_a_broken_report_is_one_line(changes: dict[str, Any], complaint: str) -> None:
    data = {**priced_plan().to_dict(), **changes}
    assert message(partial(PlanReport.from_dict, name="plan.json"), data) == f"plan.json: {complaint}"
