"""Cores of the parts of a run on CPU: no part is on a core that is another accelerator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from backends.cores import cores_for, keep_to, kept_to, trainer_cores
from pipelinerl.config.run_file import load_run

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_reasoning.toml"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems bind nothing")


def cores(monkeypatch: pytest.MonkeyPatch, here: set[int], *sets: str) -> tuple[list[set[int] | None], set[int] | None]:
    """Return the cores of each engine, and of the trainer, where a process may use these."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: here)
    config = load_run(EXAMPLE, list(sets))
    each = config.cluster.tensor_parallel
    engines = [cores_for(config, range(one * each, (one + 1) * each)) for one in range(config.num_engines)]
    return [one if one is None else set(one) for one in engines], trainer_cores(config)


def test_engines_and_trainer_have_cores_of_their_own_and_share_those_that_are_spare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert cores(monkeypatch, {0, 1}) == ([{0}], {1})
    assert cores(monkeypatch, {3, 5}) == ([{3}], {5})  # of a container
    sets = ("cluster.accelerators=5", "cluster.generation_accelerators=4", "cluster.tensor_parallel=2")
    assert cores(monkeypatch, set(range(7)), *sets) == ([{0, 1, 5, 6}, {2, 3, 5, 6}], {4, 5, 6})


def test_who_takes_turns_shares_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cores(monkeypatch, {0, 1}, "scheduler.kind=conventional") == ([{0}, {1}], {0, 1})


@pytest.mark.parametrize("sets", [("train.ray_address=auto",), ("cluster.accelerators=3",)])
def test_nothing_is_bound_where_accelerators_are_not_the_cores_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, sets: tuple[str, ...]
) -> None:
    assert cores(monkeypatch, {0, 1}, *sets) == ([None], None)


def test_all_threads_and_children_keep_to_the_cores() -> None:
    code = """
import os, subprocess, sys, threading
from backends.cores import keep_to
held, seen = threading.Event(), []
other = threading.Thread(target=lambda: (held.wait(), seen.append(os.sched_getaffinity(0))))
other.start()
keep_to(frozenset({min(os.sched_getaffinity(0))}))
held.set()
other.join()
child = [sys.executable, "-c", "import os; print(len(os.sched_getaffinity(0)))"]
print(len(seen[0]), subprocess.check_output(child, text=True).strip())
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["1", "1"]


def test_the_driver_gets_its_cores_back() -> None:
    before = os.sched_getaffinity(0)
    with kept_to(frozenset({min(before)})):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before
    keep_to(None)
    assert os.sched_getaffinity(0) == before
