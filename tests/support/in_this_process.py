"""Stands in for a pool of processes, which are slow to start and cannot be looked into."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class InThisProcess:
    """Stands in for ``ProcessPoolExecutor``: runs what is submitted at once."""

    def __init__(self, workers: int, context: Any, *, initializer: Callable[[], None]) -> None:
        assert workers >= 1

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future

    def shutdown(self, *, wait: bool = True, cancel_futures: bool = False) -> None:
        """Nothing is left to end."""
