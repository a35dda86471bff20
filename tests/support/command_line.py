"""The command line in a test: a short run, what a command leaves behind, how to run it here or in its own process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tiny_comparison
import tomli_w
from tiny_comparison import BASE

from pipelinerl.config.run import with_overrides

TINY = tomli_w.dumps(
    with_overrides(
        BASE,
        [
            "scheduler.optimizer_steps_per_rl_step=3",
            "workload.prompt_tokens=10",
            "hardware.weights={publish_s=0.01, pause_s=0.01}",
        ],
    )
)
"""A run file of six optimizer steps."""
COMPARE = """
[compare]
baseline = "conventional"
arms = [{ name = "pipeline" }, { name = "conventional", set = ["scheduler.kind=conventional"] }]
"""
STALLS = tiny_comparison.STALLS["set"]
"""Overrides with which a run fails."""
EMPIRICAL = "workload.length.kind=empirical"
RUN_FILES = ["profile.json", "run.toml", "steps.csv", "summary.json"]


@dataclass(frozen=True)
class Result:
    """Exit status and output of a command."""

    status: int
    out: str
    err: str


Command = Callable[..., Result]


def assert_fails(result: Result, status: int, *words: str) -> None:
    """Assert that a command printed nothing but one line on stderr, with these words."""
    assert (result.status, result.out, result.err.count("\n")) == (status, "", 1), result
    assert result.err.startswith("pipelinerl: ")
    for word in words:
        assert word in result.err


def sets(*overrides: str) -> list[str]:
    return [part for override in overrides for part in ("--set", override)]


# ------------------------------------------------------------------------------ processes of their own


def program(first: str = "pass") -> list[str]:
    """Return how to start the program in a process of its own, after a statement."""
    return [sys.executable, "-c", f"{first}; from pipelinerl.cli import main; main()"]


def started(*arguments: object, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
    """Start the program as a terminal does: in a process group of its own that heeds Ctrl-C."""
    return subprocess.Popen(
        [*program("import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


def all_of(terminal: int) -> bytes:
    """Return what a terminal shows until its other end is closed, and close it."""
    shown = b""
    with contextlib.suppress(OSError):  # Linux: the other end is closed
        while chunk := os.read(terminal, 4096):
            shown += chunk
    os.close(terminal)
    return shown


def has_rows(path: Path, number: int) -> bool:
    return path.exists() and path.read_bytes().count(b"\n") > number
