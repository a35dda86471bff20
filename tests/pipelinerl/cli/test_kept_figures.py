"""What is said of the figures that a command draws, and what stays where they cannot be drawn."""

import sys
from pathlib import Path

import pytest
from command_line import COMPARE, RUN_FILES, TINY, Command

from pipelinerl.cli.output import LOOK_FIRST, figures_named


def test_three_figures_are_shown_and_the_others_named() -> None:
    stems = ["lag_by_position", "lag_by_step", "time_split", "reward", "throughput_against_max_lag"]
    said = figures_named([Path("out") / f"{stem}.{kind}" for stem in stems for kind in ("png", "pdf")])
    assert said.splitlines() == [
        "Figures:",
        "  out/throughput_against_max_lag.png",
        "  out/time_split.png",
        "  out/lag_by_step.png",
        "  and lag_by_position, reward",
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process", "small_figures")
def test_compare_ends_with_what_was_seen_and_its_figures(command: Command, tmp_path: Path, tiny: Path) -> None:
    tiny.write_text(TINY + COMPARE)
    said = command("compare", tiny, "--out", tmp_path / "out").out
    assert "\nThe fastest is " in said
    shown = [line.strip() for line in said.splitlines() if line.endswith(".png")]
    assert [Path(one).stem for one in shown] == [name for name in LOOK_FIRST if name in "".join(shown)]
    assert len(shown) == 3
    assert all(Path(one).is_file() for one in shown)


def test_without_matplotlib_the_numbers_are_kept_and_a_line_says_so(
    command: Command, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in {"matplotlib", "analysis"}]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = command("simulate", tiny, "--out", tmp_path / "out")
    assert result.status == 0
    assert result.err.count("\n") == 1
    assert "matplotlib is not installed" in result.err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == RUN_FILES
