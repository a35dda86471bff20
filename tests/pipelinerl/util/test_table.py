"""The reader of a user's CSV files: typed rows, and one line with file, line, column, rule and value for each fault."""

from enum import StrEnum
from pathlib import Path
from typing import Literal, Self

import pytest
from pydantic import Field, model_validator
from refusals import message

from pipelinerl.errors import ConfigError
from pipelinerl.util.strict_model import StrictModel
from pipelinerl.util.table import read_table


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Row(StrictModel):
    name: str
    count: int = Field(ge=0, le=1000000000)
    share: float | None = Field(default=None, gt=0, le=1)
    seconds: float = Field(default=2.0, gt=0)
    limit: int | None = Field(default=None, ge=1)
    bound: float | None = Field(default=None, lt=5)
    any: int | None = None
    colour: Colour | None = None
    unit: Literal["s", "ms"] = "s"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.count == 13:
            raise ValueError("13 of anything is too many")
        return self


def write(folder: Path, text: str) -> Path:
    path = folder / "t.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_rows_are_typed_and_an_empty_cell_has_the_default(tmp_path: Path) -> None:
    path = write(tmp_path, "name,count,share,seconds,colour,unit\na,3,0.5,,red,ms\nb,1.0,,1e-3,,\n")
    (first_at, first), (_, second) = read_table(path, "t").rows(Row)
    assert first_at == f"{path} line 2"
    assert first == Row(name="a", count=3, share=0.5, colour=Colour.RED, unit="ms")
    assert second == Row(name="b", count=1, seconds=1e-3)


def test_a_table_may_come_from_a_spreadsheet(tmp_path: Path) -> None:
    path = write(tmp_path, '\ufeff count , name \r\n\r\n2.0,"a, b"\r\n,\r\n3,"c\nd"\r\n')
    rows = read_table(path, "t").rows(Row)
    assert [(where[-6:], row.name, row.count) for where, row in rows] == [("line 3", "a, b", 2), ("line 6", "c\nd", 3)]


COLUMNS = "name, count, share, seconds, limit, bound, any, colour, unit"
FAULTS = {
    "empty file": ("", "line 1: column name is missing; needed: name, count"),
    "no such column": (
        "name,coumt\n",
        f"line 1: 'coumt' is an unknown column; did you mean count? allowed, with commas in between: {COLUMNS}",
    ),
    "semicolons": ("a;b\n1;2\n", f"line 1: 'a;b' is an unknown column; allowed, with commas in between: {COLUMNS}"),
    "column twice": ("name,count,count\n", "line 1: column count must stand there once, got 2"),
    "column missing": ("name\na\n", "line 1: column count is missing; needed: name, count"),
    "no rows": ("name,count\n\n", "line 1: there must be a row below the header, got none"),
    "a cell too few": ("name,count\na,1\na\n", "line 3: there must be 2 cells (name, count), got 1"),
    "a cell too many": ("name,count\na,1,2\n", "line 2: there must be 2 cells (name, count), got 3"),
    "text missing": ("name,count\n,1\n", "line 2: name must not be empty, got ''"),
    "number missing": ("name,count\na,\n", "line 2: count must be a whole number from 0 to 1000000000, got ''"),
    "open quote": ('name,count\na,"1\n', "line 2: not a comma-separated table: unexpected end of data"),
    "rule across columns": ("name,count\na,13\n", "line 2: 13 of anything is too many"),
    "long cell": (
        f"name,count\na,{'9' * 5000}\n",
        f"line 2: count must be a whole number from 0 to 1000000000, got '{'9' * 37}...'",
    ),
    "two lines": ('name,count\na,"3\n4"\n', "line 3: count must be a whole number from 0 to 1000000000, got '3\\n4'"),
    "huge field": ("x" * 200_000, "line 1: not a comma-separated table: field larger than field limit (131072)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_line_with_file_line_column_rule_and_value(tmp_path: Path, fault: str) -> None:
    text, line = FAULTS[fault]
    path = write(tmp_path, text)
    assert message(lambda: read_table(path, "t").rows(Row)) == f"{path} {line}"


@pytest.mark.parametrize(
    "cell", ["many", "-3", "1_000", "1,024", "2.5", "1000000001", "inf", "\u0663", "\u00b2", "0x1"]
)
def test_a_cell_that_is_no_whole_number_is_refused(tmp_path: Path, cell: str) -> None:
    path = write(tmp_path, f'name,count\na,"{cell}"\n')
    with pytest.raises(ConfigError, match=f"line 2: count must be a whole number from 0 to 1000000000, got '{cell}'"):
        read_table(path, "t").rows(Row)


@pytest.mark.parametrize(
    ("column", "cell", "rule"),
    [
        ("share", "0", "a number above 0 and at most 1"),
        ("share", "nan", "a number above 0 and at most 1"),
        ("seconds", "-1", "a number above 0"),
        ("limit", "0", "a whole number of at least 1"),
        ("bound", "5", "a number below 5"),
        ("any", "x", "a whole number"),
        ("colour", "green", "one of red, blue"),
        ("unit", "h", "one of s, ms"),
    ],
)
def test_the_rule_of_a_column_is_in_words(tmp_path: Path, column: str, cell: str, rule: str) -> None:
    path = write(tmp_path, f"name,count,{column}\na,1,{cell}\n")
    with pytest.raises(ConfigError, match=f"line 2: {column} must be {rule}, got '{cell}'$"):
        read_table(path, "t").rows(Row)


def test_a_number_may_be_left_out_by_its_column_only_where_cells_must_be_filled(tmp_path: Path) -> None:
    assert len(read_table(write(tmp_path, "name,count\na,1\n"), "t").rows(Row, filled=True)) == 1
    path = write(tmp_path, "name,count,share\na,1,0.5\nb,1,\n")
    assert len(read_table(path, "t").rows(Row)) == 2
    with pytest.raises(ConfigError, match="line 3: share must be a number above 0 and at most 1, got ''"):
        read_table(path, "t").rows(Row, filled=True)


def test_a_file_that_is_not_there_or_no_text_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    assert message(read_table, path, "some table") == f"cannot read some table {path}: No such file or directory"
    path.write_bytes(b"name,count\n\xff,3\n")
    assert message(read_table, path, "some table") == f"cannot read some table {path}: it is not UTF-8 text"
