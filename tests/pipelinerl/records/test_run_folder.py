"""The folder of a run: what may be in it before the run, and the messages where it cannot be used."""

from collections.abc import Callable
from pathlib import Path

import pytest
from refusals import message
from traces import run

from pipelinerl.errors import RunFailedError
from pipelinerl.records.run_folder import check_vacant, write_json
from pipelinerl.records.trace import TraceWriter

HELD = "--out must be a folder without a run, got {tmp}/out, which holds "
UNWRITABLE = "--out must be a folder that can be written, got "


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no folder that nobody can write to, root neither")
def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_computed() -> None:
    """A plan writes at its end: it must not search for minutes before it says so."""
    assert message(check_vacant, Path("/proc/a/out")) == f"{UNWRITABLE}/proc/a/out: No such file or directory"


def test_a_folder_that_can_be_made_is_not_touched(tmp_path: Path) -> None:
    check_vacant(tmp_path / "a" / "out")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("there", "out", "line"),
    [
        ("out/run.toml", "out", f"{HELD}run.toml"),
        ("out/comparison.json", "out", f"{HELD}comparison.json"),
        ("out/steps.csv", "out", f"{HELD}steps.csv"),
        ("out/summary.json", "out", f"{HELD}summary.json"),
        ("out/trace.jsonl.gz/x", "out", f"{HELD}trace.jsonl.gz"),
        ("out", "out", "--out must be a folder, got the file {tmp}/out"),
        ("file", "file/out", UNWRITABLE + "{tmp}/file/out: Not a directory"),
        ("file", "x" * 300, f"{UNWRITABLE}{{tmp}}/{'x' * 300}: File name too long"),
    ],
)
def test_a_folder_that_is_taken_or_cannot_be_made_is_one_line(tmp_path: Path, there: str, out: str, line: str) -> None:
    (tmp_path / there).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / there).write_text("precious")
    assert message(check_vacant, tmp_path / out) == line.format(tmp=tmp_path)
    assert (tmp_path / there).read_text() == "precious"


def write_trace(path: Path) -> None:
    TraceWriter(path, run()).close()


def write_summary(path: Path) -> None:
    path.with_name(path.name + ".partial").symlink_to("/dev/full")
    write_json(path, {"steps": 1})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("write", [write_trace, write_summary])
def test_a_full_disk_is_said_with_the_path(tmp_path: Path, write: Callable[[Path], None]) -> None:
    (tmp_path / "file").symlink_to("/dev/full")
    with pytest.raises(RunFailedError, match=f"^cannot write {tmp_path}/file: No space left on device$"):
        write(tmp_path / "file")
