"""Tables of JSON reports: read back as written, and every message for a broken one."""

import json
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
from pydantic import model_validator
from refusals import message

from pipelinerl.util.strict_model import Report


class Inner(Report):
    """A table in the table below, with a rule of its own."""

    low: int = 0
    high: int = 9

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.high < self.low:
            raise ValueError(f"high must be at least low = {self.low}, got {self.high}")
        return self


class Whole(Report):
    """Nested tables, absent values, and a rule over two fields."""

    rate_s: float
    count: int
    name: str
    inner: Inner
    tables: dict[str, Inner]
    span: tuple[float, float]
    limit: int | None
    extra: int | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.name == "none" and self.count:
            raise ValueError(f"count must be 0, got {self.count}")
        return self


GOOD: dict[str, Any] = {
    "rate_s": 0.5, "count": 3, "name": "x", "inner": {"low": 1, "high": 2}, "tables": {"t": {"low": 1, "high": 2}},
    "span": [0.0, 1.0], "limit": None,
}  # fmt: skip


def test_a_report_is_read_back_as_written(tmp_path: Path) -> None:
    """A field that is None stays if it has no default, and is left out if it has one."""
    path = tmp_path / "report.json"
    path.write_text(json.dumps(GOOD))
    report = Whole.read(path)
    assert report == Whole.from_dict(GOOD, name="good")
    assert json.dumps(report.to_dict()) == json.dumps(GOOD)
    assert Whole.from_dict({**GOOD, "extra": 1}, name="good").to_dict() == {**GOOD, "extra": 1}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"inner": {"colour": 1}}, "inner.colour is an unknown key; allowed: high, low"),
        ({"tables": {"low": {"colour": 1}}}, "tables.low.colour is an unknown key; allowed: high, low"),
        ({"rate_s": None}, "rate_s must be a number, got null"),
        ({"rate_s": float("nan")}, "rate_s must be a number, got NaN"),
        ({"tables": []}, "tables must be a table, got []"),
        ({"tables": {"t": 1}}, "tables.t must be a table, got 1"),
        ({"span": 1.0}, "span must be a list, got 1.0"),
        ({"span": [1.0]}, "span.1 is missing"),
        ({"tables": {"t": {"low": 5, "high": 4}}}, "tables.t.high must be at least low = 5, got 4"),
        ({"name": "none"}, "count must be 0, got 3"),
        ({"limit": ...}, "limit is missing"),
    ],
)
def test_a_wrong_or_missing_value_is_one_line_that_names_its_key(changes: dict[str, Any], complaint: str) -> None:
    data = {name: value for name, value in (GOOD | changes).items() if value is not ...}
    assert message(partial(Whole.from_dict, name="report.json"), data) == f"report.json: {complaint}"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "{path} is not valid JSON: EOF while parsing a value at line 1 column 0"),
        (b"garbage", "{path} is not valid JSON: expected value at line 1 column 1"),
        (b"[1]", "{path} must hold a table, got list"),
        (b"\xff", "cannot read {path}: it is not UTF-8 text"),
        (None, "cannot read {path}: No such file or directory"),
    ],
)
def test_a_file_that_holds_no_table_is_one_line(tmp_path: Path, content: bytes | None, complaint: str) -> None:
    path = tmp_path / "report.json"
    if content is not None:
        path.write_bytes(content)
    assert message(Whole.read, path) == complaint.format(path=path)
