"""The table ``[fleet]``: defaults, the line for every fault, the path of a recorded capacity."""

from pathlib import Path

import pytest
from run_tables import run_file, tiny, tiny_faults

from pipelinerl.config.fleet import FleetConfig
from pipelinerl.config.run import load_run

RECLAIMED = "kind='spot', reclaim_hours=8, away_s=1800"
CONVENTIONAL = "scheduler.kind=conventional"


def test_a_fleet_that_says_nothing_never_fails() -> None:
    assert tiny().fleet is None
    fleet = tiny("fleet={}").fleet
    assert fleet == FleetConfig(start_s=60.0, keep_tokens=True, stream_tokens=64, groups=[], trainer=None)


@pytest.mark.parametrize(
    ("group", "line"),
    [
        ("kind='lend'", ".0.kind must be 'reserved', 'spot' or 'lent', got \"lend\""),
        ("kind='lent'", ".0.switch_s is missing; kind='lent' needs it"),
        ("kind='lent', switch_s=1, mtbf_hours=9", ".0.mtbf_hours must be left out with kind='lent', got 9.0"),
        ("switch_s=1", ".0.switch_s needs kind='lent', got switch_s=1.0, kind='reserved'"),
        ("reclaim_hours=8", ".0.reclaim_hours needs kind='spot', got reclaim_hours=8.0, kind='reserved'"),
        ("away_s=0", ".0.away_s needs kind='spot', got away_s=0.0, kind='reserved'"),
        ("notice_s=30", ".0.notice_s needs kind='spot', got notice_s=30.0, kind='reserved'"),
        ("capacity='c.csv'", ".0.capacity needs kind='spot', got capacity='c.csv', kind='reserved'"),
        ("kind='spot'", ".0.reclaim_hours is missing; kind='spot' needs reclaim_hours and away_s, or capacity"),
        ("kind='spot', reclaim_hours=8",
            ".0.away_s is missing; kind='spot' needs reclaim_hours and away_s, or capacity"),
        (f"{RECLAIMED}, capacity='c.csv'",
            ".0.reclaim_hours must be left out with capacity, which has these times, got 8"),
        ("kind='spot', away_s=60, capacity='c.csv'",
            ".0.away_s must be left out with capacity, which has these times, got 60"),
        ("kind='spot', notice_s=9, capacity='/'",
            ".0.notice_s must be left out with capacity, which has these times, got 9"),
        ("stragglers=0.1", ".0.slowdown is missing; stragglers=0.1 needs it"),
        ("stragglers=1.1", ".0.stragglers must be at most 1, got 1.1"),
        ("slowdown=0.9", ".0.slowdown must be at least 1, got 0.9"),
        ("mtbf_hours=0", ".0.mtbf_hours must be at least 0.01, got 0"),
        ("price_per_hour=0", ".0.price_per_hour must be above 0, got 0"),
        ("engines=3", " must have the run's 2 engines together, got 3"),
    ],
)  # fmt: skip
def test_a_fault_of_a_group_is_one_line(group: str, line: str) -> None:
    engines = "" if "engines" in group else ", engines=2"
    assert tiny_faults(f"fleet.groups=[{{name='a', {group}{engines}}}]") == [f"run: fleet.groups{line}"]


def test_groups_have_different_names() -> None:
    same = tiny_faults("fleet.groups=[{name='a', engines=1}, {name='a', engines=1}]")
    assert same == ["run: fleet.groups must have different names, got ['a', 'a']"]


def test_the_trainer_lends_what_it_has_to_one_group() -> None:
    own, lent = "{name='a', engines=2}", "{name='b', engines=2, kind='lent', switch_s=1}"
    fleet = tiny(f"fleet.groups=[{own}, {lent}]").fleet
    assert fleet is not None
    assert fleet.lent == fleet.groups[1]
    assert tiny_faults(f"fleet.groups=[{own}, {lent.replace('engines=2', 'engines=3')}]") == [
        "run: fleet.groups must lend at most the 2 engines that the accelerators that train have room for, got 3"
    ]
    assert tiny_faults(f"fleet.groups=[{own}, {lent}, {lent.replace('b', 'c')}]") == [
        "run: fleet.groups must have one of kind='lent' at most, got ['a', 'b', 'c']"
    ]


def test_groups_together_have_the_engines_of_the_run() -> None:
    fleet = tiny(f"fleet.groups=[{{name='a', engines=1}}, {{name='b', engines=1, {RECLAIMED}}}]").fleet
    assert fleet is not None
    assert [group.engines for group in fleet.groups] == [1, 1]
    assert tiny_faults("fleet.groups=[{name='a', engines=1}]") == [
        "run: fleet.groups must have the run's 2 engines together, got 1"
    ]


def test_only_the_trainer_of_a_colocated_schedule_may_fail() -> None:
    assert tiny(CONVENTIONAL, "fleet.trainer={checkpoint_every_s=600}").fleet is not None
    assert tiny_faults(CONVENTIONAL, "fleet.groups=[{name='a', engines=4}]") == [
        "run: fleet.groups needs a schedule whose engines have accelerators of their own, got "
        "scheduler.kind='conventional'; fleet.trainer has failures of all its accelerators"
    ]


def test_a_trainer_must_have_a_chance_to_reach_its_next_checkpoint() -> None:
    """Two of the tiny run's four accelerators train, so 0.1 h make 180 s: a fifth of 900 s; colocated all train."""
    trainer = "fleet.trainer={mtbf_hours=0.1, checkpoint_every_s=600, checkpoint_s=100, restart_s=200}"
    assert tiny(trainer).fleet is not None
    rule = "a mean of at least 0.2 (checkpoint_every_s + checkpoint_s + restart_s) ="
    assert tiny_faults(trainer, "fleet.trainer.restart_s=205") == [
        f"run: fleet.trainer.mtbf_hours must leave 2 accelerators {rule} 181 s between failures, got 180 s"
    ]
    assert tiny_faults(trainer, CONVENTIONAL) == [
        f"run: fleet.trainer.mtbf_hours must leave 4 accelerators {rule} 180 s between failures, got 90 s"
    ]


def test_a_recorded_capacity_is_relative_to_the_run_file(tmp_path: Path) -> None:
    groups = "[{name='a', engines=1}, {name='b', engines=1, kind='spot', capacity='spot.csv'}]"
    fleet = load_run(run_file(tmp_path), [f"fleet.groups={groups}"]).fleet
    assert fleet is not None
    assert [group.capacity for group in fleet.groups] == [None, str(tmp_path / "spot.csv")]
