"""Settings and fixtures of all tests."""

import gc
import importlib
import os
import signal
from pathlib import Path

import pytest
from command_line import Command, Result
from hypothesis import HealthCheck, settings
from in_this_process import InThisProcess

from pipelinerl.cli import app as cli

# Failures of the shipped contract suite show values, as failures of test modules do.
pytest.register_assert_rewrite("backends.contract")

# No deadline, since machines are noisy; every run has the same examples.
settings.register_profile("pipelinerl", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pipelinerl")

# Tests send SIGINT, which a process started in the background of a script ignores by default.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Make matplotlib's list of fonts before any test: matplotlib warns on stderr if that takes more than 5 s.

    All processes that are started from here on, those that run the tests and theirs, read ``support/at_start``.
    """
    if not hasattr(config, "workerinput"):  # once, before the processes that run the tests are started
        importlib.import_module("matplotlib.font_manager")
        patch = pytest.MonkeyPatch()
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "support" / "at_start"), prepend=os.pathsep)
        config.add_cleanup(patch.undo)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest tests, so that no core waits for another at the end."""

    def seconds(item: pytest.Item) -> float:
        marks = (mark for name in ("slow", "real") for mark in item.iter_markers(name))
        return max((mark.kwargs.get("seconds", 0) for mark in marks), default=0)

    items.sort(key=seconds, reverse=True)


def pytest_collection_finish() -> None:
    """Exclude imported modules and collected tests from garbage collection, which took a sixth of all time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command line in this process; however slow, it says nothing of its progress."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("pipelinerl.cli.output.LINE_EVERY_S", 1e6)

    def call(*arguments: object) -> Result:
        monkeypatch.setattr("sys.argv", ["pipelinerl", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return Result(int(ended.value.code or 0), captured.out, captured.err)

    return call


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run comparisons in this process."""
    monkeypatch.setattr("sim.parallel.ProcessPoolExecutor", InThisProcess)
