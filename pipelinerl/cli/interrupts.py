"""Ctrl-C where no run listens to it yet: one line."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from pipelinerl.errors import PipelineRLError, RunInterruptedError


@contextmanager
def said_if_interrupted() -> Iterator[None]:
    """Turn whatever Ctrl-C makes of the work in this block into one line; imports make other errors of it, too.

    Raises:
        RunInterruptedError: After Ctrl-C, unless the work has said so itself.
    """
    pressed = False

    def press(_signal: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    before = None if ignored else signal.signal(signal.SIGINT, press)
    try:
        yield
    except PipelineRLError:
        raise
    except BaseException as error:
        if pressed or isinstance(error, KeyboardInterrupt):
            raise RunInterruptedError(
                "interrupted; --resume goes on from the last checkpoint if there is one"
            ) from None
        raise
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
