"""The rules of the part of the Trace Event Format that timelines use."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

KEYS = {
    "X": {"name", "dur", "args"},
    "M": {"name", "args"},
    "C": {"name", "args"},
    "i": {"name", "s"},
    "s": {"name", "cat", "id"},
    "f": {"name", "cat", "id", "bp"},
}
"""Fields of each phase, besides ``ph``, ``pid``, ``tid`` and ``ts``."""


def checked(path: Path) -> list[dict[str, Any]]:
    """Check the rules; return the entries of the file."""
    entries = json.loads(path.read_text())["traceEvents"]
    for entry in entries:
        assert {*KEYS[entry["ph"]], "ph", "pid", "tid", "ts"} == set(entry), entry
        assert all(type(entry[key]) is int for key in ("pid", "tid", "ts")), entry
    assert all(type(value) in {int, float} for one in entries if one["ph"] == "C" for value in one["args"].values())
    _check_slices(entries)
    _check_arrows(entries)
    named = {(one["pid"], one["tid"]) for one in entries if one["ph"] == "M" and one["name"] == "thread_name"}
    assert {(one["pid"], one["tid"]) for one in entries if one["ph"] == "X"} <= named
    return entries


def _check_slices(entries: list[dict[str, Any]]) -> None:
    """Check that slices of a thread are in order and do not overlap, unless one is inside the other."""
    tracks = defaultdict(list)
    for one in entries:
        if one["ph"] == "X":
            assert one["dur"] >= 0
            tracks[one["pid"], one["tid"]].append(one)
    assert all(thread > 0 for _, thread in tracks)  # readers treat thread 0 as the main thread
    for track in tracks.values():
        open_until: list[int] = []
        last = 0
        for one in track:
            assert one["ts"] >= last, one
            last = one["ts"]
            while open_until and open_until[-1] <= one["ts"]:
                open_until.pop()
            assert not open_until or one["ts"] + one["dur"] <= open_until[-1], one
            open_until.append(one["ts"] + one["dur"])


def _check_arrows(entries: list[dict[str, Any]]) -> None:
    """Check that every arrow has one start and one end, later or at once, each in a slice of its thread."""
    ends = {phase: {one["id"]: one for one in entries if one["ph"] == phase} for phase in "sf"}
    assert Counter(one["id"] for one in entries if one["ph"] in "sf") == dict.fromkeys(ends["s"], 2)
    slices = defaultdict(list)
    for one in entries:
        if one["ph"] == "X":
            slices[one["pid"], one["tid"]].append(one)
    for number, start in ends["s"].items():
        end = ends["f"][number]
        assert (start["cat"], start["name"]) == (end["cat"], end["name"])
        assert start["ts"] <= end["ts"]
        for one in (start, end):
            assert any(
                within["ts"] <= one["ts"] <= within["ts"] + within["dur"] for within in slices[one["pid"], one["tid"]]
            ), one
