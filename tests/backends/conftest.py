"""Fixtures of the tests of the driver."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

MAKE_MODEL = Path(__file__).parents[2] / "scripts" / "make_tiny_model.py"
Fits = dict[str, tuple[Path, subprocess.Popen[bytes]]]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where a run writes to; it is not there yet."""
    return tmp_path / "run"


@pytest.fixture(scope="session", autouse=True)
def fits(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fits]:
    """Tiny models that tests will ask for, each fitted by a process of its own, beside the tests before them."""
    names = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    begun: Fits = {}
    for task in ("arithmetic", "calculator"):
        if f"fitted_{task}" in names:
            folder = tmp_path_factory.mktemp("fitted") / task
            words = [sys.executable, str(MAKE_MODEL), str(folder), task]
            begun[task] = (folder, subprocess.Popen(words, stdout=subprocess.DEVNULL))
    yield begun
    for _, process in begun.values():
        process.kill()
        process.wait()


def fitted(fits: Fits, task: str) -> Path:
    folder, process = fits[task]
    assert process.wait() == 0
    return folder


@pytest.fixture(scope="session")
def fitted_arithmetic(fits: Fits) -> Path:
    return fitted(fits, "arithmetic")


@pytest.fixture(scope="session")
def fitted_calculator(fits: Fits) -> Path:
    return fitted(fits, "calculator")
