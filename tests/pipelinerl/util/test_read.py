"""Files that have no end, that nobody writes, or that are too large, too long or too deep: one line, at once."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refusals import message

from pipelinerl.errors import ConfigError
from pipelinerl.util import read

READERS: list[Callable[[Path], Any]] = [
    lambda path: read.read_toml(path, ""),
    read.read_json,
    lambda path: list(read.read_lines(path)),
    lambda path: list(read.read_rows(path)),
    lambda path: list(read.read_values(path)),
]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (os.mkfifo, "it is no regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "it is no regular file"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
        (Path.mkdir, "Is a directory"),
        (lambda path: path.write_bytes(b"\xff"), "it is not UTF-8 text"),
    ],
)
def test_what_is_no_text_file_is_refused_at_once(
    tmp_path: Path, make: Callable[[Path], object], reason: str, reader: Callable[[Path], Any]
) -> None:
    path = tmp_path / "x"
    make(path)
    assert message(reader, path).endswith(reason)


def test_a_file_that_is_read_whole_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b" " * (read.MOST_BYTES + 1))
    assert "at most 16,777,216 bytes" in message(read.read_json, path)
    assert "at most 262,144 bytes" in message(read.read_toml, path, "")


def test_a_long_line_is_refused_before_it_is_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(b"short\n" + b"a" * (read.LONGEST_LINE + 1)))
    lines = read.read_lines(path, packed=True)
    assert next(lines) == (1, "short\n")
    assert message(lambda: next(lines)).endswith("line 2: must have at most 4,194,304 characters")


VALUES = [{"a": "é"}, {"b": [1, {"c": 2}]}, {}, {"d": "]"}]


@pytest.mark.parametrize("length", [50, 51, 57, 97, 10_000])
@pytest.mark.parametrize(
    "text",
    [
        "\n".join(map(json.dumps, VALUES)),
        " \r\n\n".join(json.dumps(one, indent=2) for one in VALUES) + "\n",
        json.dumps(VALUES),
        json.dumps({"schema": 1, "traceEvents": VALUES, "unit": "ms"}),
        json.dumps({"traceEvents": VALUES}, indent=1, ensure_ascii=False),
    ],
)
def test_values_of_json_lines_and_of_a_list_are_read_piece_by_piece(
    tmp_path: Path, text: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the file falls into pieces, as long as a piece holds a value."""
    (tmp_path / "x").write_text("\ufeff" + text, encoding="utf-8")
    monkeypatch.setattr(read, "LONGEST_LINE", length)
    assert list(read.read_values(tmp_path / "x")) == VALUES


@pytest.mark.parametrize(
    ("text", "message_"),
    [
        ('{"a": 1}\n{"a": ', "x is not valid JSON: value 2 is broken, or above 4,194,304 characters: "),
        ("{}, {}", "x is not valid JSON: value 2 is broken, or above 4,194,304 characters: "),
        ('[{"a": 1}, ', "x is not valid JSON: value 2 is broken, or above 4,194,304 characters: "),
        (
            "{}\n" + "9" * 5000,
            "x is not valid JSON: value 2 is broken, or above 4,194,304 characters: Exceeds",
        ),
        ('{"a": "' + "x" * 2**23 + '"}', "x is not valid JSON: value 1 is broken, or above 4,194,304 characters: "),
        ("{}\n" + "[" * 101 + "]" * 101, "x, value 2 must have at most 100 tables inside each other"),
        ("{}\n" + "[" * 100_000, "x is not valid JSON: value 2 is broken"),
    ],
    ids=["line", "comma", "list", "digits", "long", "deep", "very deep"],
)
def test_a_value_that_is_none_is_one_line(tmp_path: Path, text: str, message_: str) -> None:
    (tmp_path / "x").write_text(text)
    assert message_ in message(READERS[4], tmp_path / "x")


def test_a_cell_longer_than_the_csv_module_takes_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1," + "x" * 200_000)
    assert "line 2: not a comma-separated table: field larger than field limit" in message(READERS[3], path)


@pytest.mark.parametrize("depth", [101, 5000, 100_000])
def test_tables_inside_each_other_have_a_limit(depth: int) -> None:
    for parse, text in (
        (read.parse_json, "[" * depth + "]" * depth),
        (read.parse_toml, "a = " + "[" * depth + "]" * depth),
        (read.parse_toml, ".".join("a" * (depth + 1)) + " = 1"),
        (read.parse_toml, f"[{'.'.join('a' * (depth + 1))}]"),
    ):
        assert message(parse, text, "x").startswith(("x must have at most 100 tables", "x is not valid "))


def test_a_message_is_printable_and_short() -> None:
    error = ConfigError("\x1b[2J\n\u2028" + "x" * 200_000 + "end", "é")
    first, second = str(error).split("\n")
    assert first.startswith("\\x1b[2J\\n\\u2028xxx")
    assert first.endswith("xend")
    assert len(first) < 1050
    assert second == "é"
