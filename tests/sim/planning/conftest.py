"""Simulations of these tests run in the process of the test."""

from collections.abc import Iterator

import pytest
from tiny_plan import in_this_process


@pytest.fixture(autouse=True)
def _in_this_process() -> Iterator[None]:
    with in_this_process():
        yield
