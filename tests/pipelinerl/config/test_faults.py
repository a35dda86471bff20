"""The tables ``[[faults]]``: the line for every wrong one, engines drawn by the seed, ``--faults FILE``."""

from pathlib import Path

import pytest
from run_tables import TINY, run_file, tiny, tiny_faults

from pipelinerl.config.run import check_config, dump_run, load_run
from pipelinerl.errors import ConfigError

CONVENTIONAL = "scheduler.kind=conventional"


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("kind='halt', step=1", ".kind must be 'kill', 'stop', 'slow', 'cut' or 'disk_full', got \"halt\""),
        ("kind='kill'", ".step or second must be given, and one only, got step=None, second=None"),
        ("kind='kill', step=1, second=2", ".step or second must be given, and one only, got step=1, second=2.0"),
        ("kind='stop', step=1", ".seconds is missing; kind='stop' needs it"),
        ("kind='slow', step=1, seconds=5", ".factor is missing; kind='slow' needs it"),
        ("kind='slow', step=1, seconds=5, factor=1", ".factor must be above 1, got 1"),
        ("kind='kill', step=1, seconds=5", ".seconds must be left out with kind='kill', got 5"),
        ("kind='stop', step=1, seconds=5, factor=2", ".factor must be left out with kind='stop', got 2"),
        ("kind='cut', step=1, rank=0", ".rank needs kind='kill', got rank=0, kind='cut'"),
        ("kind='kill', step=1, rank=0, engine=1", ".engine must be left out with rank or kind='disk_full', got 1"),
        ("kind='disk_full', step=1, engine=1", ".engine must be left out with rank or kind='disk_full', got 1"),
        ("kind='kill', step=1, engine=2", ".engine must be at most 1, got 2"),
        ("kind='kill', step=1, rank=2", ".rank must be at most 1, got 2"),
        ("kind='kill', step=6", ".step must be at most 5, got 6"),  # the sixth step ends the run
    ],
)
def test_a_wrong_fault_is_one_line_with_key_rule_and_value(fault: str, line: str) -> None:
    assert tiny_faults(f"faults=[{{kind='cut', step=1}}, {{ {fault} }}]") == [f"run: faults.1{line}"]


def test_engines_and_ranks_of_accelerators_that_do_both_are_counted_each() -> None:
    """Four accelerators, engines of two: two engines, two ranks."""
    sets = CONVENTIONAL, "cluster.tensor_parallel=2"
    assert tiny(*sets, "faults=[{kind='kill', rank=1, step=1}, {kind='kill', engine=1, step=1}]").faults
    assert tiny_faults(*sets, "faults=[{kind='kill', rank=2, step=1}]") == [
        "run: faults.0.rank must be at most 1, got 2"
    ]


def test_the_engine_of_a_fault_without_one_is_drawn_by_seed_and_place_in_the_list() -> None:
    """Of 200 draws of two engines all are the same once in 2^199."""
    tables = ["{kind='kill', step=1}"] * 200
    tables[7], tables[8] = "{kind='kill', rank=0, step=1}", "{kind='disk_full', step=1}"
    faults, other = (
        [one.engine for one in tiny(f"faults=[{', '.join(tables)}]", f"seed={n}").drawn_faults] for n in (0, 1)
    )
    assert faults[7:9] == [None, None]
    assert set(faults[9:]) == {0, 1}
    assert faults != other
    tables[0] = "{kind='kill', engine=1, step=1}"
    changed = tiny(f"faults=[{', '.join(tables)}]").drawn_faults
    assert [one.engine for one in changed] == [1, *faults[1:]]


def test_a_file_of_faults_replaces_those_of_the_run_file_and_is_kept_with_the_run(tmp_path: Path) -> None:
    run = run_file(tmp_path, f"{TINY}\n[[faults]]\nkind = 'cut'\nstep = 2\n")
    (tmp_path / "faults.toml").write_text("[[faults]]\nkind = 'kill'\nstep = 5\n[[faults]]\nkind = 'cut'\nsecond = 1\n")
    config = load_run(run, faults=tmp_path / "faults.toml")
    assert [(one.kind, one.step, one.second) for one in config.faults or ()] == [("kill", 5, None), ("cut", None, 1.0)]
    (tmp_path / "kept.toml").write_text(dump_run(config))
    assert load_run(tmp_path / "kept.toml") == config
    assert [one.step for one in load_run(run).faults or ()] == [2]


def test_a_file_without_faults_is_refused(tmp_path: Path) -> None:
    (tmp_path / "faults.toml").write_text("[[fault]]\nkind = 'kill'\nstep = 5\n")
    with pytest.raises(ConfigError, match=r"faults must not be empty, got \[\]"):
        load_run(run_file(tmp_path), faults=tmp_path / "faults.toml")


def test_a_check_of_a_run_has_no_faults() -> None:
    assert check_config(tiny("faults=[{kind='cut', step=5}]")).faults is None
