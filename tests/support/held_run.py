"""`pipelinerl train` with parts in memory, in a process of its own that stands still until a file is there."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from command_line import program, sets
from real_run import EXAMPLE, UNDRAWN

import backends.run
from backends.driver import tasks
from backends.fake import FakeBackend, FakeTrainer
from backends.interface import Parts, TrainerKind
from pipelinerl.cli import output
from pipelinerl.config.run import RunConfig

SETS = (
    *(
        "optimizer_steps=6",
        "scheduler.train_batch_size=8",
        "workload.group_size=4",
        "scheduler.generation_batch_size=8",
    ),
    *("train.checkpoint.every=2", "train.checkpoint.keep=10", "train.evaluation.problems=0"),
)
"""Checkpoints of steps 2, 4 and 6."""
ELSEWHERE = "import socket; socket.gethostname = lambda: 'elsewhere'"
"""First statement of a process on a machine that cannot see the others' processes."""


def installed(*, go: str = "", save: int | None = None, opens: bool = False) -> None:
    """Have ``pipelinerl train`` use them; until ``go`` exists it stands still at its start, or in a checkpoint."""

    class Trainer(FakeTrainer):
        async def save(self, folder: Path) -> None:
            while self._copied == save and not Path(go).exists():
                Path(f"{go}.stands").touch()
                await asyncio.sleep(0.01)
            await super().save(folder)

    class Backend(FakeBackend):
        @contextmanager
        def open(self, config: RunConfig, *, logs: Path | None = None) -> Iterator[Parts]:
            while opens and not Path(go).exists():
                Path(f"{go}.stands").touch()
                time.sleep(0.01)
            with super().open(config, logs=logs) as parts:
                yield parts

    kind = TrainerKind(name="held", make=lambda config, _: Trainer(train_batch_size=config.scheduler.train_batch_size))
    tasks.LONGEST_TICK_S = math.inf  # nor does it say that it stood still
    output.LINE_EVERY_S = 1e6  # nor how far it is
    backends.run.backend_of = lambda _: Backend(trainer_kind=kind)


def command(out: Path, *arguments: str) -> list[str]:
    """Arguments of the program."""
    return ["train", str(EXAMPLE), "--out", str(out), "--json", *arguments, *sets(*SETS)]


def start(out: Path, *arguments: str, first: str = "pass", **held: object) -> subprocess.Popen[str]:
    """Start it; ``held``: see ``installed``. ``go`` is a file beside ``out``."""
    held = {"go": f"{out}.go", **held}
    statement = f"import held_run; held_run.installed(**{held!r}); {UNDRAWN}; {first}"
    return subprocess.Popen(
        [*program(statement), *command(out, *arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONWARNINGS": "ignore"},
    )
