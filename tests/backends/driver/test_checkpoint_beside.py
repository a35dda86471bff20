"""Checkpoints are written while a run goes on, one at a time; an incomplete one is ignored."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import has_rows, wait_for
from in_memory import config_of, interrupted, parts_of, run, run_checked

from backends.driver.checkpoint import FOLDER, read_newest
from backends.fake import FakeTrainer
from pipelinerl.records.run_folder import METRICS_FILE, TRACE_FILE
from pipelinerl.records.steps import STEPS_FILE

CONFIG = config_of(steps=12, train={"checkpoint": {"every": 2, "keep": 10}})


class Writer(FakeTrainer):
    """Writes until so many steps have been trained meanwhile, and a moment more; or, from a version on, for ever."""

    def __init__(self, *, steps: int = 0, hangs_at: int | None = None) -> None:
        super().__init__(train_batch_size=8)
        self.steps, self.hangs_at, self.writing = steps, hangs_at, False
        self.trained_meanwhile: list[int] = []

    async def snapshot(self) -> None:
        assert not self.writing
        await super().snapshot()

    async def save(self, folder: Path) -> None:
        assert not self.writing
        self.writing, before = True, self._copied
        await super().save(folder)
        async with asyncio.timeout(60):
            while before == self.hangs_at or self.version < min(before + self.steps, CONFIG.optimizer_steps):
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        self.writing = False
        self.trained_meanwhile.append(self.version - before)


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits_for_it(out: Path) -> None:
    parts = parts_of(CONFIG, trainer=Writer(steps=2))
    run_checked(CONFIG, out, parts)
    *beside, last, end = parts.trainer.trained_meanwhile
    assert beside == [2] * 5  # until the next one is due
    assert last == end == 0
    for folder in (out / FOLDER).iterdir():
        version = json.loads((folder / "trainer" / "fake.json").read_text())["version"]
        assert folder.name == f"step_{version:06d}"
    assert len(list((out / FOLDER).iterdir())) == 6


def test_a_run_that_is_killed_while_a_checkpoint_is_written_goes_on_from_the_one_before(out: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, __file__, out], stderr=subprocess.PIPE, env={"PYTHONPATH": ":".join(sys.path)}
    )
    try:
        wait_for(lambda: has_rows(out / "steps.csv", 7) and any(out.glob("driver-1/*/checkpoint")), process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert {path.name for path in (out / FOLDER).iterdir()} == {"step_000002", "step_000004"}
    assert read_newest(out, CONFIG).state.version == 4
    parts = parts_of(CONFIG)
    run_checked(CONFIG, out, parts, resume=True)
    assert len(parts.trainer.trained) == 8
    assert not any(out.glob("driver-*"))


def test_records_that_are_cut_off_are_on_disk_before_they_take_the_place_of_the_old_ones(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a machine that stops then has a checkpoint, and none of the records that it goes on from."""
    interrupted(CONFIG, out)
    log: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def logged_fsync(descriptor: int) -> None:
        log.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def logged_rename(source: Path, target: Path) -> None:
        log.append(("rename", Path(target).name))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    for way in ("rename", "replace"):
        monkeypatch.setattr(os, way, logged_rename)
    run_checked(CONFIG, out, resume=True)
    for name in (TRACE_FILE, STEPS_FILE, METRICS_FILE):
        at = log.index(("rename", name))
        assert log[at - 1 : at + 2] == [("fsync", f"{name}.partial"), ("rename", name), ("fsync", out.name)]


KILLED = config_of(steps=8, longest=20, train={"checkpoint": {"every": 2, "keep": 1}})
NUM_KILLS = 20
FILES_CHANGE = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


@pytest.mark.slow(seconds=15)
def test_a_run_that_is_killed_anywhere_in_the_writing_of_checkpoints_goes_on_from_a_whole_one(tmp_path: Path) -> None:
    """At 20 of all operations on files, from the first whole checkpoint on, evenly spread: nothing is trained twice."""
    process = subprocess.run(
        [sys.executable, __file__, tmp_path, "killed"],
        capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    before = [json.loads(line) for line in process.stdout.splitlines()]
    assert len(before) == NUM_KILLS
    assert {2, 4, 6} <= set(before)  # steps of the checkpoints that they go on from


def _in_a_process_of_its_own(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
            sys.stdout.flush()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _kill_it_everywhere(folder: Path) -> None:
    counted = folder / "counted"

    def first(out: Path, *, killed_at: int | None) -> None:
        numbers = itertools.count(1)
        last = 0

        def look(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal last
            if event in FILES_CHANGE and (event in {"os.remove", "os.rmdir"} or FOLDER in str(arguments[0])):
                if not last and not (out / FOLDER / "step_000002").exists():
                    return
                last = next(numbers)
                if last == killed_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(look)
        run(KILLED, out, parts_of(KILLED))
        counted.write_text(str(last))

    def goes_on(out: Path) -> None:
        sys.stdout.write(f"{read_newest(out, KILLED).state.version}\n")
        run_checked(KILLED, out, resume=True)

    assert _in_a_process_of_its_own(lambda: first(folder / "whole", killed_at=None)) == 0
    for number in range(NUM_KILLS):
        out = folder / str(number)
        killed_at = 1 + number * int(counted.read_text()) // NUM_KILLS
        status = _in_a_process_of_its_own(lambda out=out, at=killed_at: first(out, killed_at=at))
        assert status == -signal.SIGKILL
        assert _in_a_process_of_its_own(lambda out=out: goes_on(out)) == 0


if __name__ == "__main__":
    if sys.argv[2:]:
        _kill_it_everywhere(Path(sys.argv[1]))
    else:
        run(CONFIG, Path(sys.argv[1]), parts_of(CONFIG, trainer=Writer(hangs_at=6)))
