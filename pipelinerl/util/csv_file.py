"""Read the lines of a user's CSV file, with what every reader of one has to say about a broken one."""

from __future__ import annotations

import csv
from pathlib import Path

from pipelinerl.errors import ConfigError


def read_csv(path: Path, what: str) -> list[tuple[int, list[str]]]:
    """Return the lines of a CSV file that are not blank: the number of each and its cells, without space around them.

    Args:
        path: The file, in UTF-8, with or without a byte order mark.
        what: What messages call it, such as ``utilisation table``.

    Raises:
        ConfigError: If it cannot be read, is no UTF-8 text, or its quotes do not match. How many cells a line has is
            not looked at.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            lines = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader]
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read {what} {path}: it is not UTF-8 text") from None
    except csv.Error as error:
        raise ConfigError(f"{path} line {reader.line_num}: not a comma-separated table: {error}") from None
    return [(number, cells) for number, cells in lines if any(cells)]
