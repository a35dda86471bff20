"""An event loop whose clock stands while it works and jumps when it would wait: sleeps are exact, and take no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now_s += timeout or 0.0
        return super().select(timeout if timeout is None else 0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Jumping()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run what waits for nothing but sleeps: for no thread, no process and no connection."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(main)
