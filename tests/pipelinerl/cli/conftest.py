"""Fixtures of the command line."""

from pathlib import Path

import pytest
from command_line import TINY, Command

import analysis.chart
import analysis.plot


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw nothing: it is most of the time of a short run."""
    monkeypatch.setattr(analysis.plot, "save_figures", lambda *_, **__: [])


@pytest.fixture
def small_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw everything, but with few pixels."""
    monkeypatch.setattr(analysis.chart, "DPI", 20)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A run file."""
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.fixture
def finished(command: Command, tmp_path: Path, tiny: Path, no_figures: None) -> Path:
    """A run folder with its trace."""
    assert command("simulate", tiny, "--out", tmp_path / "run", "--trace", "full").status == 0
    return tmp_path / "run"
