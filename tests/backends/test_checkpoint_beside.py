"""Checkpoints are written while a run goes on, one at a time, and one that is not complete does not count."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

from command_line import has_rows, wait_for
from in_memory import config_of, parts_of, run, run_checked

from backends.checkpoint import FOLDER, read_newest
from backends.fake import FakeTrainer

CONFIG = config_of(steps=12, train={"checkpoint": {"every": 2, "keep": 10}})


class Writer(FakeTrainer):
    """Takes its time to write; from a version on for ever."""

    def __init__(self, *, save_s: float = 0.0, hangs_at: int | None = None) -> None:
        super().__init__(train_batch_size=8, train_s=0.02)
        self.save_s, self.hangs_at = save_s, hangs_at
        self.writing = False
        self.trained_meanwhile: list[int] = []

    async def snapshot(self) -> None:
        assert not self.writing
        await super().snapshot()

    async def save(self, folder: Path) -> None:
        assert not self.writing
        self.writing, before = True, self.version
        await super().save(folder)
        await asyncio.sleep(self.save_s if before != self.hangs_at else 600.0)
        self.writing = False
        self.trained_meanwhile.append(self.version - before)


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits_for_it(out: Path) -> None:
    parts = parts_of(CONFIG, trainer=Writer(save_s=0.2))
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
        wait_for(lambda: has_rows(out / "steps.csv", 7), process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert {path.name for path in (out / FOLDER).iterdir()} == {"step_000002", "step_000004", "partial"}
    assert read_newest(out, CONFIG).state.version == 4
    parts = parts_of(CONFIG)
    run_checked(CONFIG, out, parts, resume=True)
    assert len(parts.trainer.trained) == 8
    assert "partial" not in {path.name for path in (out / FOLDER).iterdir()}


if __name__ == "__main__":
    run(CONFIG, Path(sys.argv[1]), parts_of(CONFIG, trainer=Writer(hangs_at=6)))
