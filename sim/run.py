"""Simulate one run."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipelinerl.accounting import StepRow
from pipelinerl.config import RunConfig
from pipelinerl.recording import Recording
from sim.world import World


def simulate(
    config: RunConfig,
    *,
    out: Path | None = None,
    trace: bool = False,
    on_step: Callable[[StepRow], None] | None = None,
) -> dict[str, Any]:
    """Simulate a run; the same configuration gives the same numbers and the same bytes.

    On Ctrl-C the run ends at the next event, and what happened until then is kept.

    Args:
        config: What to simulate.
        out: Folder to keep the run in; None keeps only the summary returned.
        trace: Whether the folder gets the trace of every event and command.
        on_step: Called with each row as soon as its optimizer step is done.

    Returns:
        The content of summary.json (``docs/concepts.md`` explains its keys).

    Raises:
        ConfigError: If a file of the configuration is wrong, or the folder holds a run; nothing is written.
        RunFailedError: If the run could not reach its end; the folder holds what happened until then.
    """
    world = World(config)  # before anything is written: it finds what is wrong with the input
    recording = Recording(config, out=out, trace=trace, on_step=on_step)
    try:
        with _interruptible(world), no_garbage_collection():
            world.run(recording.recorder)
    finally:
        summary = recording.finish()
    return summary


@contextmanager
def _interruptible(world: World) -> Iterator[None]:
    """Turn Ctrl-C into a clean end of the run, where this thread may and the process does not ignore it."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda _signal, _frame: world.interrupt())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Switch the collector of reference cycles off: a run makes none, and looking for them costs a tenth of it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
