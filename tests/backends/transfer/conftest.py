"""Groups that end with their test, and threads for their members."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest


@pytest.fixture
def meet() -> Iterator[Callable[..., Any]]:
    from transfer_group import Meeting

    meetings: list[Meeting] = []

    def meet(num_workers: int, **changed: Any) -> Meeting:
        meetings.append(Meeting(num_workers, **changed))
        return meetings[-1]

    yield meet
    for one in meetings:
        one.end()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool
