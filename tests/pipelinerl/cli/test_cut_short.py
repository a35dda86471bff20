"""Ctrl-C and kill: what was finished stays readable."""

import json
import os
import pty
import signal
import subprocess
import time
from pathlib import Path

import pytest
from command_line import TINY, Command, all_of, assert_fails, has_rows, program, started, wait_for
from run_folders import rows_of

from pipelinerl.cli.train import interruptible
from pipelinerl.config.run import load_run
from pipelinerl.errors import ConfigError, RunInterruptedError

ARITHMETIC = Path(__file__).parents[3] / "examples" / "tiny_arithmetic.toml"


def cut_short(tiny: Path, out: Path, number: signal.Signals) -> tuple[int, str, str]:
    """Send a signal to a run without end after three steps; return its status and output. Its rows are whole."""
    process = started("simulate", tiny, "--set", "optimizer_steps=1000000", "--out", out, "--trace", "full")
    wait_for(lambda: has_rows(out / "steps.csv", 3), process)
    os.killpg(process.pid, number)
    stdout, stderr = process.communicate(timeout=300)
    steps = [int(row["step"]) for row in rows_of(out)]
    assert steps == list(range(1, max(3, len(steps)) + 1))
    return process.returncode, stdout, stderr


def test_ctrl_c_leaves_what_was_finished_readable(command: Command, tmp_path: Path, tiny: Path) -> None:
    out = tmp_path / "run"
    line = "pipelinerl: interrupted; what was finished is kept\n"
    assert cut_short(tiny, out, signal.SIGINT) == (1, "", line)
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["complete"], summary["optimizer_steps"]) == (False, len(rows_of(out)))
    result = command("replay", out)
    assert result.status == 0
    assert result.out.startswith("identical: ")


def test_a_killed_run_leaves_whole_rows_of_the_steps_it_made(command: Command, tmp_path: Path, tiny: Path) -> None:
    out = tmp_path / "run"
    cut_short(tiny, out, signal.SIGKILL)
    assert load_run(out / "run.toml").optimizer_steps == 1_000_000
    assert_fails(command("plot", out), 2, f"{out}/summary.json")
    assert_fails(command("replay", out), 2)


ONE_LONG = """
[compare]
baseline = "short"
arms = [{ name = "short" }, { name = "long", set = ["optimizer_steps=1000000"] }]
"""


@pytest.mark.slow
def test_ctrl_c_leaves_the_finished_runs_of_a_comparison(
    command: Command, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.write_text(TINY + ONE_LONG)
    out = tmp_path / "out"
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    process = started("compare", tiny, "--out", out, stderr=theirs)
    os.close(theirs)
    wait_for(lambda: has_rows(out / "as_given" / "long" / "steps.csv", 3), process)
    shown = b""
    while b"1/2" not in shown:  # the short run has ended, and is known to
        shown += os.read(ours, 4096)
    os.killpg(process.pid, signal.SIGINT)
    assert b"pipelinerl: interrupted; the runs that had ended are kept\r\n" in all_of(ours)  # then figures are drawn
    stdout, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "short" in stdout
    assert "long" not in stdout
    comparison = json.loads((out / "comparison.json").read_text())
    assert [arm["name"] for arm in comparison["scenarios"][0]["arms"]] == ["short"]
    assert comparison["complete"] is False
    assert len(rows_of(out / "as_given" / "short")) == 6
    assert len(rows_of(out / "as_given" / "long")) >= 3
    assert_fails(command("compare", tiny, "--out", out), 2, f"got {out}, which holds comparison.json")


@pytest.mark.slow
def test_the_workers_of_a_killed_comparison_end_too(tmp_path: Path, tiny: Path) -> None:
    tiny.write_text(TINY + ONE_LONG)
    steps = tmp_path / "out" / "as_given" / "long" / "steps.csv"
    process = started("compare", tiny, "--out", tmp_path / "out")
    wait_for(lambda: has_rows(steps, 3), process)
    process.kill()
    process.communicate(timeout=300)  # ends when the last worker has closed its end of stdout
    size = steps.stat().st_size
    time.sleep(0.2)
    assert steps.stat().st_size == size


def signal_at_import_of(module: str, name: str = "SIGINT") -> str:
    return (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "finder = type('Finder', (), {'find_spec': staticmethod("
        f"lambda name, *_: signal.raise_signal(signal.{name}) if name == '{module}' else None)}}); "
        "sys.meta_path.insert(0, finder)"
    )


INTERRUPTED = "interrupted; --resume goes on from the last checkpoint if there is one"


@pytest.mark.parametrize(
    ("module", "name", "status", "line"),
    [
        ("typer", "SIGINT", 130, "interrupted"),
        ("pipelinerl.config.run", "SIGINT", 1, INTERRUPTED),
        ("backends.run", "SIGINT", 1, INTERRUPTED),
        ("backends.run", "SIGTERM", 1, INTERRUPTED),
    ],
)
def test_a_signal_while_train_is_being_loaded_is_one_line_and_nothing_is_written(
    tmp_path: Path, module: str, name: str, status: int, line: str
) -> None:
    command = [*program(signal_at_import_of(module, name)), "train", str(ARITHMETIC), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", f"pipelinerl: {line}\n")
    assert not (tmp_path / "out").exists()


def test_an_error_that_a_library_raises_after_ctrl_c_is_an_interruption() -> None:
    def load() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("libsomething could not be initialised") from None

    with pytest.raises(RunInterruptedError, match=INTERRUPTED), interruptible():
        load()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_errors_are_not_interruptions() -> None:
    with pytest.raises(ImportError), interruptible():
        raise ImportError("libsomething is not there")
    with pytest.raises(ConfigError), interruptible():
        raise ConfigError("key must be another")
