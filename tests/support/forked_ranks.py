"""Ranks of a group as processes of this machine, forked from a server that has loaded their modules."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")


@contextmanager
def forked_ranks(
    target: Callable[..., None], arguments: Sequence[tuple[Any, ...]], *, preload: list[str]
) -> Iterator[list[Any]]:
    """Start a process for each tuple of arguments; in the end none is left, nor the server.

    The server is killed: one that ended by itself hung once, and held the output of the tests' worker open for ever.
    """
    CONTEXT.set_forkserver_preload(preload)
    ranks = [CONTEXT.Process(target=target, args=one) for one in arguments]
    for rank in ranks:
        rank.start()
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
