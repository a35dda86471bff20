"""The tables of docs/learning.md: intervals over seeds by hand, and of a comparison that learned."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
from learning_run import BASE

from pipelinerl.config.run import parse_run
from sim.compare import compare

pytest.importorskip("torch")

ROOT = Path(__file__).parents[3]
COMPARED = {
    "baseline": "pipeline",
    "seeds": [0, 1, 2],
    "arms": [{"name": "pipeline"}, {"name": "conventional", "set": ["scheduler.kind=conventional"]}],
}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("learning_intervals", ROOT / "scripts" / "learning_intervals.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_interval_is_students_of_the_mean_and_of_a_ratio_that_of_its_logarithm(script):
    """Of 1, 2, 3: mean 2, standard deviation 1, and t = 4.30 with two degrees of freedom."""
    assert script.interval([1.0, 2.0, 3.0]) == "2.000 ± 2.484"
    assert script.interval([1.0, 2.0]) == "1.500"
    half = 4.302653 / 3**0.5
    logs = [math.exp(one) for one in (1.0, 2.0, 3.0)]
    expected = f"{math.exp(2):.2f} ({math.exp(2 - half):.2f} to {math.exp(2 + half):.2f}), 3 seeds"
    assert script.ratio([5 * one for one in logs], [5.0] * 3) == expected


@pytest.mark.slow
def test_the_tables_have_a_row_per_arm_and_mark_a_reward_that_was_not_reached(script, tmp_path, monkeypatch, capsys):
    compare(parse_run({**BASE, "compare": COMPARED}), out=tmp_path / "runs", workers=1)
    monkeypatch.setattr(sys, "argv", ["learning_intervals.py", str(tmp_path / "runs")])
    script.main()
    arms, others = (table.splitlines() for table in capsys.readouterr().out.strip().split("\n\n"))
    assert [line.split(" | ")[:2] for line in arms[2:]] == [["| pipeline", "3"], ["| conventional", "3"]]
    assert [line.split(" | ")[0] for line in others[2:]] == ["| conventional"]
    assert others[2].endswith("| -; in 3 not reached by both |")  # six steps are fewer than the eight of a mean


def test_a_comparison_without_a_policy_is_refused(script, tmp_path, monkeypatch, capsys):
    data = {key: value for key, value in BASE.items() if key != "policy"}
    compare(parse_run({**data, "compare": COMPARED}), out=tmp_path / "runs", workers=1)
    monkeypatch.setattr(sys, "argv", ["learning_intervals.py", str(tmp_path / "runs")])
    with pytest.raises(SystemExit) as caught:
        script.main()
    assert caught.value.code == 2
    assert "needs a comparison with compare.seeds whose runs have a [policy]" in capsys.readouterr().err
