"""Groups that end with their test, and threads and processes for their members."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest


@pytest.fixture
def group_of() -> Iterator[Callable[..., Any]]:
    """Makes groups of so many workers."""
    from transfer_group import Group

    with ExitStack() as ends:
        yield partial(Group, ends)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture
def spawned() -> Iterator[Callable[..., Any]]:
    """Starts processes that end with the test: ``target`` gets the arguments and the queue that is returned."""
    context = multiprocessing.get_context("spawn")
    results, processes = context.Queue(), list[Any]()

    def spawned(target: Callable[..., None], *arguments: Any) -> Any:
        processes.append(context.Process(target=target, args=(*arguments, results)))
        processes[-1].start()
        return results

    yield spawned
    for process in processes:
        process.kill()
        process.join(timeout=600)
    results.close()
