"""Checkpoints are written while a run goes on, one at a time; an incomplete one is ignored."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

from command_line import has_rows, wait_for
from in_memory import config_of, parts_of, run, run_checked

from backends.driver.checkpoint import FOLDER, read_newest
from backends.fake import FakeTrainer

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
        wait_for(lambda: has_rows(out / "steps.csv", 7) and any((out / FOLDER).glob("partial-*")), process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert {path.name.partition("-")[0] for path in (out / FOLDER).iterdir()} == {
        "step_000002",
        "step_000004",
        "partial",
    }
    assert read_newest(out, CONFIG).state.version == 4
    parts = parts_of(CONFIG)
    run_checked(CONFIG, out, parts, resume=True)
    assert len(parts.trainer.trained) == 8
    assert not any((out / FOLDER).glob("partial*"))


if __name__ == "__main__":
    run(CONFIG, Path(sys.argv[1]), parts_of(CONFIG, trainer=Writer(hangs_at=6)))
