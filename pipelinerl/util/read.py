"""Read files of users: a reader for each format. ConfigError, one line with the path, if a file cannot be read.

The limits are far above real files; within them no file takes seconds or half a gigabyte.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
import stat
import tomllib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from pipelinerl.errors import ConfigError

MOST_BYTES = 2**24
"""Largest file that is read whole (bytes). The index of a model's weights may have 10 MB."""
MOST_TOML_BYTES = 2**18
"""Largest TOML file (bytes); a megabyte of it takes a second."""
MOST_VALUES = 200_000
"""Values of a report, about (count); pydantic takes up to 2 kB for a wrong one."""
MOST_DEPTH = 100
"""Tables and lists inside each other (count)."""
LONGEST_LINE = 2**22
"""Longest line of a file that is read line by line, and longest value of one that is read by values (characters)."""
_LIST = re.compile(r'\s*(\[|\{.*?"traceEvents"\s*:\s*\[)', re.DOTALL)
_GAP, _LIST_GAP = re.compile(r"\s*"), re.compile(r"[\s,]*")


@contextmanager
def opened(path: Path, what: str = "") -> Iterator[BinaryIO]:
    """Open a regular file: a FIFO would keep the reader waiting, and a device may have no end."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(None, "it is no regular file")
            yield file
    except OSError as error:
        raise _cannot_read(path, what, error.strerror or str(error)) from None


def _cannot_read(path: Path, what: str, reason: str) -> ConfigError:
    return ConfigError(f"cannot read {f'{what} {path}'.lstrip()}: {reason}")


def read_text(path: Path, what: str = "", *, most: int = MOST_BYTES) -> str:
    """Return a UTF-8 file's text, without byte order mark; ``what`` names it in messages."""
    with opened(path, what) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise _cannot_read(path, what, f"it must have at most {most:,} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _cannot_read(path, what, "it is not UTF-8 text") from None


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Return the tables of a TOML file."""
    return parse_toml(read_text(path, what, most=MOST_TOML_BYTES), f"{what} {path}")


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Return the tables of a TOML text; ``where`` begins the message if it is none."""
    # Every further key below a header of so many parts would take as long as all of them.
    if any(line.partition("=")[0].partition(",")[0].count(".") > MOST_DEPTH for line in text.splitlines()):
        raise _too_deep(where)
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # broken, or a number of thousands of digits
        raise ConfigError(f"{where} is not valid TOML: {error}") from None
    if _is_deep(tables):
        raise _too_deep(where)
    return tables


def read_json(path: Path, what: str = "") -> Any:
    """Return the values of a JSON file."""
    return parse_json(read_text(path, what), f"{what} {path}".lstrip())


def parse_json(text: str, where: str) -> Any:
    """Return the values of a JSON text; ``where`` begins the message if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid JSON: {error}") from None
    if text.count("[") + text.count("{") > MOST_DEPTH and _is_deep(value):
        raise _too_deep(where)
    return value


def _is_deep(value: Any) -> bool:
    tables = [value]
    for _ in range(MOST_DEPTH):
        parts = (part for one in tables for part in (one.values() if isinstance(one, dict) else one))
        tables = [part for part in parts if isinstance(part, dict | list)]
    return bool(tables)


def _too_deep(where: str) -> ConfigError:
    return ConfigError(f"{where} must have at most {MOST_DEPTH} tables inside each other")


@contextmanager
def _text(path: Path, what: str, *, packed: bool = False) -> Iterator[io.TextIOWrapper]:
    with opened(path, what) as file:
        try:
            binary = gzip.GzipFile(fileobj=file) if packed else file
            with io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as text:
                yield text
        except UnicodeDecodeError:
            raise _cannot_read(path, what, "it is not UTF-8 text") from None


def read_lines(path: Path, what: str = "", *, packed: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the lines of a UTF-8 file of any length, with their numbers and ends; ``packed``: by gzip."""
    number = 0
    with _text(path, what, packed=packed) as text:
        try:
            for number, line in enumerate(iter(partial(text.readline, LONGEST_LINE + 1), ""), start=1):
                if len(line) > LONGEST_LINE:
                    raise ConfigError(f"{path}, line {number}: must have at most {LONGEST_LINE:,} characters")
                yield number, line
        except EOFError:
            raise ConfigError(f"{path} is cut off after line {number}") from None
        except zlib.error as error:
            raise ConfigError(f"{path} is broken after line {number} ({error})") from None


def read_values(path: Path, what: str = "") -> Iterator[Any]:
    """Yield the values of JSON lines, or of a file's one list, maybe the ``traceEvents`` of a table, of any length."""
    decode, number = json.JSONDecoder().raw_decode, 1
    with _text(path, what) as text:
        read = text.read(LONGEST_LINE)
        listed = _LIST.match(read)
        at, gap = (listed.end(), _LIST_GAP) if listed else (0, _GAP)
        while True:
            if found := gap.match(read, at):
                at = found.end()
            if listed and read.startswith("]", at):
                return
            fault: Exception | None = None
            try:
                value, end = decode(read, at)
            except (ValueError, RecursionError) as error:
                fault, end = error, len(read)
            if end == len(read) and len(read) - at <= LONGEST_LINE and (more := text.read(LONGEST_LINE)):
                read, at = read[at:] + more, 0  # its rest
                continue
            if at == len(read) and not listed:
                return
            where = f"{what} {path}".lstrip()
            if fault is not None:
                rest = f"value {number} is broken, or above {LONGEST_LINE:,} characters: {fault}"
                raise ConfigError(f"{where} is not valid JSON: {rest}")
            if read.count("[", at, end) + read.count("{", at, end) > MOST_DEPTH and _is_deep(value):
                raise _too_deep(f"{where}, value {number}")
            yield value
            at, number = end, number + 1


def read_rows(path: Path, what: str = "") -> Iterator[tuple[int, list[str]]]:
    """Yield the cells of each row of a comma-separated file, with the number of the row's last line."""
    reader = csv.reader((line for _, line in read_lines(path, what)), strict=True)
    try:
        for cells in reader:
            yield reader.line_num, cells
    except csv.Error as error:
        raise ConfigError(f"{path} line {reader.line_num}: not a comma-separated table: {error}") from None
