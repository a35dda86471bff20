"""Garbage collections during a run: they do not look through what was imported before it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from in_memory import config_of

import backends.run
from backends.garbage import imports_left_alone


@pytest.fixture
def collected() -> Iterator[int]:
    """How many objects a collection looks through before; these tests are started with most of them left alone."""
    gc.unfreeze()
    yield len(gc.get_objects())
    gc.freeze()


def test_a_run_begins_with_nothing_to_look_through_and_leaves_it_as_it_was(
    out: Path, collected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def opened(*_: object, **__: object) -> Iterator[None]:
        yield

    backend: Any = SimpleNamespace(check=lambda _: None, open=opened)
    monkeypatch.setattr(backends.run, "drive", lambda *_, **__: len(gc.get_objects()))
    assert backends.run.train(config_of(), out=out, backend=backend) < collected / 100  # type: ignore[operator]
    assert len(gc.get_objects()) > collected / 2


def test_what_a_process_has_left_alone_itself_stays_so(collected: int) -> None:
    gc.freeze()
    with imports_left_alone():
        pass
    assert gc.get_freeze_count() > collected / 2
