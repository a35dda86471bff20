"""Make the shipped set of turns from a table of agent sessions; ``sim/data/README.md`` describes both.

python scripts/make_turn_set.py agent_turns.csv sim/data/agent_turns.jsonl.gz
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import sys
from pathlib import Path
from typing import Any


def episode_of(session: str, rows: list[dict[str, str]]) -> dict[str, Any]:
    """Return one session; tokens that a turn adds to the context beyond the previous answer were observed."""
    context = [int(row["context_tokens"]) for row in rows]
    output = [int(row["output_tokens"]) for row in rows]
    return {
        "group": int(session),
        "stream": 0,
        "prompt_len": context[0],
        "out_lens": output,
        # A shortened context counts as no observation; one of 116 unknown gaps counts as 0 s.
        "obs_lens": [max(0, context[turn] - context[turn - 1] - output[turn - 1]) for turn in range(1, len(rows))],
        "tool_times": [float(row["gap_before_s"] or 0.0) for row in rows[1:]],
    }


def main(source: str, target: str) -> None:
    """Read the table, sorted by session and turn, and write the set; the same table gives the same bytes."""
    with Path(source).open(encoding="utf-8", newline="") as file:
        sessions = itertools.groupby(csv.DictReader(file), key=lambda row: row["session"])
        lines = [json.dumps(episode_of(one, list(rows)), separators=(",", ":")) + "\n" for one, rows in sessions]
    Path(target).write_bytes(gzip.compress("".join(lines).encode(), compresslevel=9, mtime=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
