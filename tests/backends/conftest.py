"""Fixtures of the tests of the driver."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where a run writes to; it is not there yet."""
    return tmp_path / "run"
