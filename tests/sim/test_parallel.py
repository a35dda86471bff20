"""Runs in parallel processes: Ctrl-C, workers that die, and workers without a parent."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from in_this_process import InThisProcess
from tiny_comparison import PIPELINE, run, two_by_two

from pipelinerl.config.run import RunConfig
from pipelinerl.records.comparison_report import ComparisonReport
from sim import parallel
from sim.compare import Cell, compare


@pytest.mark.usefixtures("in_this_process")
def test_on_ctrl_c_the_runs_that_had_ended_are_kept(tmp_path: Path) -> None:
    ended: list[str] = []

    def interrupt_the_second(cell: Cell, failure: str | None) -> None:
        ended.append(cell.folder)
        if len(ended) == 2:
            raise KeyboardInterrupt

    result = compare(two_by_two(), out=tmp_path, on_done=interrupt_the_second)
    kept = [arm.folder for arm in result.arms]
    assert sorted(kept) == sorted(ended)
    assert (len(kept), result.failures, result.complete) == (2, [], False)
    assert json.loads((tmp_path / "comparison.json").read_text()) == result.to_dict()


def long_and_short() -> RunConfig:
    long = {"name": "long", "set": ["optimizer_steps=1000000"]}
    return run(arms=[{"name": "short"}, long], baseline="short")


def test_ctrl_c_ends_the_workers(tmp_path: Path) -> None:
    def interrupt(_cell: Cell, _failure: str | None) -> None:
        signal.raise_signal(signal.SIGINT)

    result = compare(long_and_short(), out=tmp_path, workers=2, on_done=interrupt)
    assert multiprocessing.active_children() == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [arm.name for arm in result.scenarios[0].arms] == ["short"]
    assert (result.failures, result.complete) == ([], False)


def test_workers_are_started_with_ctrl_c_ignored_which_they_inherit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal sends Ctrl-C to all workers, and one that heeded it would print a traceback."""
    handlers: list[Any] = []

    class Watching(InThisProcess):
        def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
            handlers.append(signal.getsignal(signal.SIGINT))
            return super().submit(function, *arguments)

    monkeypatch.setattr(parallel, "ProcessPoolExecutor", Watching)
    compare(two_by_two())
    assert handlers == [signal.SIG_IGN] * 4
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_worker_that_dies_is_reported_and_ended_runs_are_kept(tmp_path: Path) -> None:
    """As when the system runs out of memory and kills one."""

    def kill(_cell: Cell, _failure: str | None) -> None:
        for process in multiprocessing.active_children():
            process.kill()

    result = compare(long_and_short(), out=tmp_path, workers=2, on_done=kill)
    assert result.failures == [
        "a worker process died, perhaps for lack of memory; its run and those not yet begun are lost"
    ]
    assert [arm.name for arm in result.scenarios[0].arms] == ["short"]
    assert json.loads((tmp_path / "comparison.json").read_text()) == result.to_dict()


def test_it_runs_in_any_thread() -> None:
    """Signal handlers can be set in the main thread only."""
    results: list[ComparisonReport] = []
    config = run(arms=[PIPELINE], baseline="pipeline")
    thread = threading.Thread(target=lambda: results.append(compare(config)))
    thread.start()
    thread.join()
    assert results[0].complete is True


def test_a_worker_ends_when_its_parent_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of every worker, made here."""
    gone, ended = threading.Event(), threading.Event()
    codes: list[int] = []

    class Started(InThisProcess):
        def __init__(self, *arguments: Any, initializer: Callable[[], None]) -> None:
            initializer()

    class Parent:
        def join(self) -> None:
            gone.wait()

    def leave(code: int) -> None:
        codes.append(code)
        ended.set()

    monkeypatch.setattr(multiprocessing, "parent_process", Parent)
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(parallel, "ProcessPoolExecutor", Started)
    assert sorted(parallel.run_all(abs, [-1, -2], workers=2)) == [1, 2]
    assert not ended.wait(0.05)
    gone.set()
    assert ended.wait(300.0)
    assert codes == [1]


# ----------------------------------------------------------------------------- called from a user's script

SCRIPT = """
from sim.parallel import run_all
print(sorted(run_all(abs, [-1, -2], workers={workers})))
"""


def script(path: Path, workers: int) -> subprocess.CompletedProcess[str]:
    path.write_text(SCRIPT.format(workers=workers))
    return subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=600, check=False)


def test_one_worker_needs_no_main_guard_for_it_is_this_process(tmp_path: Path) -> None:
    done = script(tmp_path / "plain.py", workers=1)
    assert (done.stdout, done.stderr) == ("[1, 2]\n", "")
    assert list(parallel.run_all(_process_id, [0, 0], workers=1)) == [os.getpid()] * 2


def _process_id(_job: int) -> int:
    return os.getpid()


def test_with_more_workers_a_missing_main_guard_is_an_error(tmp_path: Path) -> None:
    last = script(tmp_path / "plain.py", workers=2).stderr.splitlines()
    assert last[-1].startswith("pipelinerl.errors.ConfigError: worker processes import the script that starts them")
    assert last[-1].endswith("put what it does under if __name__ == '__main__':, or ask for workers=1")
    assert len([line for line in last if line.startswith("Traceback")]) == 1


KILLED_WITH_A_POOL_OF_ITS_OWN = """
import multiprocessing
import time
from pathlib import Path
from sim import parallel

class Pool(parallel.ProcessPoolExecutor):
    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        if multiprocessing.current_process().name != "MainProcess":
            one, both = Path(__file__).with_suffix(".one"), Path(__file__).with_suffix(".both")
            try:
                one.mkdir()
            except FileExistsError:
                both.mkdir()
                time.sleep(60.0)
            while not both.exists():
                time.sleep(0.01)

parallel.ProcessPoolExecutor = Pool
list(parallel.run_all(abs, [-1, -2], workers=2))
"""


def test_a_worker_killed_on_its_way_to_that_leaves_no_semaphore_to_be_warned_of(tmp_path: Path) -> None:
    """The error would not be the last line: CI met that once."""
    path = tmp_path / "plain.py"
    path.write_text(KILLED_WITH_A_POOL_OF_ITS_OWN)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=600, check=False)
    assert "ConfigError: worker processes import the script" in done.stderr.splitlines()[-1], done.stderr


def test_ctrl_c_ends_all_runs_of_a_comparison_in_one_process(tmp_path: Path) -> None:
    """While the long run is under way, which comes last."""
    seen: list[str] = []

    def interrupt_soon(cell: Cell, _failure: str | None) -> None:
        seen.append(cell.arm)
        threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,)).start()

    result = compare(long_and_short(), out=tmp_path, workers=1, on_done=interrupt_soon)
    assert seen == [arm.name for arm in result.scenarios[0].arms] == ["short"]
    assert (result.failures, result.complete) == ([], False)
