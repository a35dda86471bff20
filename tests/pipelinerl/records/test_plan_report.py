"""The report of a plan: plain values and back, and one line for a broken file."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_plan import priced_plan

from pipelinerl.errors import ConfigError
from pipelinerl.records.plan_report import PlanReport


def test_the_report_is_read_back_from_its_values(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(priced_plan().to_dict()))
    assert PlanReport.read(path) == priced_plan()


def test_keys_stand_in_the_order_of_the_file_and_absent_ones_are_left_out() -> None:
    data = priced_plan().to_dict()
    assert list(data)[:5] == ["run", "asked", "assumed", "search", "warnings"]
    assert list(data["recommended"])[-4:] == ["cluster", "scheduler", "band", "verdict"]
    assert data["recommended"]["ess"] is None


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"screened": {"label": [], "family": ["x"], "tokens_per_s": [], "lag_mean": [], "lag_max": []}}, "columns"),
        (
            {"splits": {"generation_accelerators": [1], "tokens_per_s": [1.0, 2.0], "low": [1.0], "high": [1.0]}},
            "columns",
        ),
        ({"front": ["nobody"]}, "front.labels must be those of simulated candidates"),
        ({"simulated": "x"}, "simulated must be a list"),
    ],
)
def test_a_broken_report_is_one_line(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        PlanReport.from_dict({**priced_plan().to_dict(), **changes}, name="plan.json")
    assert "\n" not in str(caught.value)
