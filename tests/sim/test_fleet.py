"""Engines of a fleet and faults of a trainer against the laws of their processes.

False-alarm rates say for how many seeds a test fails although the code is right; the seeds are fixed.
"""

import math
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import message

from pipelinerl.config.fleet import FleetGroupConfig, TrainerFaultsConfig
from pipelinerl.config.run import parse_run
from pipelinerl.theory.steady_state import daly_interval
from sim.fleet import Life, LifeEnd, TrainerFaults, lives, read_capacity
from sim.run import simulate

Z = 4.9
"""A standard normal is farther from 0 once in a million."""
FAILED, RECLAIMED = LifeEnd.FAILED, LifeEnd.RECLAIMED
SPOT = {"kind": "spot", "reclaim_hours": 2.0, "away_s": 1800.0}

# ------------------------------------------------------------------------------------------------------------- engines


def places(*, name="g", engines=1, seed=0, tensor_parallel=1, **keys):
    group = FleetGroupConfig(name=name, engines=engines, **keys)
    return lives(group, seed=seed, tensor_parallel=tensor_parallel)


def lives_at(place=0, *, count=10**6, **keys):
    """Return the first lives at a place."""
    return list(islice(places(engines=keys.pop("engines", place + 1), **keys)[place], count))


def ends_before(horizon_s, engines):
    """Return when lives end at each place, up to a time (seconds)."""
    ends = []
    for place in engines:
        at_place = []
        while (end_s := next(place).end_s) < horizon_s:
            at_place.append(end_s)
        ends.append(at_place)
    return ends


def test_a_reserved_engine_that_never_fails_lives_forever():
    assert lives_at() == [Life(0.0, math.inf, math.inf, FAILED, 1.0)]


def test_availability_is_mtbf_over_mtbf_and_repair():
    """Four accelerators of 4 h, so 1 h, and 900 s: 0.8. Of n = 20 000 exponential lives and fixed repairs, the standard
    error is A (1 - A) / sqrt(n); 1 seed in 10^6.
    """
    n, share = 20_000, 0.8
    some = lives_at(count=n + 1, mtbf_hours=4.0, repair_s=900.0, tensor_parallel=4)
    alive_s = sum(life.end_s - life.start_s for life in some[:n])
    assert alive_s / some[n].start_s == pytest.approx(share, abs=Z * share * (1 - share) / math.sqrt(n))


def test_availability_of_spot_is_the_share_of_the_means():
    """2 h there, 30 min away: 0.8. Both are exponential, so the error is A (1 - A) sqrt(2 / n); 1 seed in 10^6."""
    n, share = 20_000, 0.8
    some = lives_at(count=n + 1, **SPOT)
    assert {life.cause for life in some} == {RECLAIMED}
    alive_s = sum(life.end_s - life.start_s for life in some[:n])
    assert alive_s / some[n].start_s == pytest.approx(share, abs=Z * share * (1 - share) * math.sqrt(2 / n))


def test_failures_of_an_engine_are_a_poisson_process_of_all_its_accelerators():
    """20 expected at each of n = 1000 places: their sum is Poisson, and sum (x - 20)^2 / 20 is near chi-squared, with
    mean n and variance n (2 + 1 / 20). 2 seeds in 10^6.
    """
    n, mean = 1000, 20
    counts = np.array([len(ends) for ends in ends_before(3600 * 100 * mean / 2, places(
        engines=n, mtbf_hours=100.0, repair_s=0.0, tensor_parallel=2))])  # fmt: skip
    assert abs(counts.sum() - n * mean) < Z * math.sqrt(n * mean)
    assert abs(((counts - mean) ** 2 / mean).sum() - n) < Z * math.sqrt(n * (2 + 1 / mean))


def test_failures_of_a_group_together_are_a_poisson_process():
    """100 engines of 50 h fail every half hour, about n = 10 000 times: the mean of the times between is within Z
    / sqrt(n), the share above it 1/e, neighbours are uncorrelated. 3 seeds in 10^6.
    """
    ends = ends_before(3600 * 5000, places(engines=100, mtbf_hours=50.0, repair_s=0.0))
    gaps = np.diff(sorted(end_s for at_place in ends for end_s in at_place))
    error = Z / math.sqrt(len(gaps))
    assert gaps.mean() == pytest.approx(1800, rel=error)
    assert abs((gaps > 1800).mean() - math.exp(-1)) < error * math.sqrt(math.exp(-1) * (1 - math.exp(-1)))
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < error


def test_failures_and_reclaims_compete_by_their_rates():
    """Every 2 h a reclaim, every 6 h a failure: a quarter of n = 20 000 lives fail; 1 seed in 10^6."""
    n, share = 20_000, 0.25
    failed = [life.cause is FAILED for life in lives_at(count=n, **SPOT, mtbf_hours=6.0, repair_s=0.0)]
    assert abs(sum(failed) / n - share) < Z * math.sqrt(share * (1 - share) / n)


def test_a_share_of_lives_is_slow_and_changes_no_times():
    """A binomial of n = 10 000; 1 seed in 10^6."""
    n, share = 10_000, 0.05
    plain, some = (lives_at(count=n, mtbf_hours=1.0, **keys) for keys in ({}, {"stragglers": share, "slowdown": 1.5}))
    slow = sum(life.slowdown == 1.5 for life in some)
    assert {life.slowdown for life in some} == {1.0, 1.5}
    assert abs(slow / n - share) < Z * math.sqrt(share * (1 - share) / n)
    assert [life.end_s for life in plain] == [life.end_s for life in some]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    mtbf_hours=st.none() | st.floats(0.05, 20),
    repair_s=st.sampled_from([0.0, 60.0, 9000.0]),
    notice_s=st.none() | st.sampled_from([0.0, 30.0, 9000.0]),
    seed=st.integers(0, 2**40),
)
def test_lives_do_not_overlap_and_notice_comes_before_the_end(mtbf_hours, repair_s, notice_s, seed):
    some = lives_at(count=40, seed=seed, mtbf_hours=mtbf_hours, repair_s=repair_s, notice_s=notice_s, **SPOT)
    assert some[0].start_s == 0
    for life, later in pairwise(some):
        assert life.start_s <= life.notice_at_s <= life.end_s <= later.start_s
        assert life.start_s < life.end_s
        if life.cause is RECLAIMED:
            assert life.notice_at_s == max(life.start_s, life.end_s - (notice_s or 0.0))
    assert mtbf_hours is not None or {life.cause for life in some} == {RECLAIMED}


def test_the_same_place_has_the_same_lives_whatever_the_others():
    keys = {**SPOT, "mtbf_hours": 5.0}
    some = lives_at(2, count=50, **keys)
    assert some == lives_at(2, count=50, engines=9, **keys)
    others = [lives_at(1, count=50, **keys), lives_at(2, count=50, seed=1, **keys)]
    others.append(lives_at(2, count=50, name="h", **keys))
    assert not {life.end_s for other in others for life in other} & {life.end_s for life in some}


def test_failures_move_no_reclaim():
    """Repairs take no time, so that engines are there at all reclaims."""
    plain, failing = (lives_at(count=300, repair_s=0.0, **SPOT, **keys) for keys in ({}, {"mtbf_hours": 2.0}))
    reclaims = [life.end_s for life in failing if life.cause is RECLAIMED]
    assert len(reclaims) < 300
    assert reclaims == [life.end_s for life in plain[: len(reclaims)]]


@pytest.mark.parametrize("other", [{"place": 1}, {"seed": 1}, {"name": "h"}])
def test_lives_of_other_places_seeds_and_groups_are_uncorrelated(other):
    """n = 20 000 pairs: a correlation above 4.9 / sqrt(n) has a chance of 1 in 10^6."""
    n = 20_000
    one, two = (lives_at(count=n, mtbf_hours=1.0, **keys) for keys in ({}, other))
    lengths = [[life.end_s - life.start_s for life in some] for some in (one, two)]
    assert abs(np.corrcoef(*lengths)[0, 1]) < Z / math.sqrt(n)


# --------------------------------------------------------------------------------------------------- recorded capacity


def capacity(folder: Path, *rows: str) -> str:
    path = folder / "spot.csv"
    path.write_text("\n".join(["second,engines", *rows, ""]), encoding="utf-8")
    return str(path)


def test_a_place_is_there_while_the_recorded_capacity_is_above_it(tmp_path):
    """By hand; the last value stays, and an offer of 10 s has no longer notice."""
    path = capacity(tmp_path, "0,2", "100,0", "160,1", "400,3", "410,2", "500,1")
    keys = {"kind": "spot", "capacity": path, "notice_s": 30.0, "engines": 3}
    assert lives_at(0, **keys) == [
        Life(0.0, 70.0, 100.0, RECLAIMED, 1.0),
        Life(160.0, math.inf, math.inf, FAILED, 1.0),
    ]
    assert lives_at(1, **keys) == [Life(0.0, 70.0, 100.0, RECLAIMED, 1.0), Life(400.0, 470.0, 500.0, RECLAIMED, 1.0)]
    assert lives_at(2, **keys) == [Life(400.0, 400.0, 410.0, RECLAIMED, 1.0)]


def test_a_repair_ends_with_the_offer_of_its_machine(tmp_path):
    """A repair outlasts each offer of 1000 s, in which all but e^-28 of the machines fail: one life an offer."""
    path = capacity(tmp_path, *(f"{1000 * second},{(second + 1) % 2}" for second in range(40)))
    some = lives_at(kind="spot", capacity=path, mtbf_hours=0.01, repair_s=1500.0)
    assert [life.start_s for life in some] == [2000.0 * offer for offer in range(20)]
    assert {life.cause for life in some} == {FAILED}


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        (("5,1",), "line 2: second must be 0 in the first row, got 5"),
        (("0,1", "9,2", "9,1"), "line 4: second must be above the row before, 9, got 9"),
        (("0,1", "9,-1"), "line 3: engines must be a whole number from 0 to 65536, got '-1'"),
        (("0,1.5",), "line 2: engines must be a whole number from 0 to 65536, got '1.5'"),
        ((), "line 1: there must be a row below the header, got none"),
    ],
)
def test_a_fault_of_a_recorded_capacity_is_one_line(tmp_path, rows, line):
    path = capacity(tmp_path, *rows)
    assert message(read_capacity, Path(path)) == f"{path} {line}"


def test_a_run_whose_engines_came_and_went_is_a_recorded_capacity(tmp_path):
    """The run of a recorded capacity has it as its own, but for what happens at one time, and its end."""
    path = capacity(tmp_path, "0,2", "30,1", "60,2", "90,0", "90.5,1")
    groups = [{"name": "a", "kind": "spot", "engines": 2, "capacity": path}]
    tables = {
        "optimizer_steps": 20,
        "cluster": {"accelerators": 3, "generation_accelerators": 2},
        "scheduler": {"train_batch_size": 8, "generation_batch_size": 2},
        "workload": {"group_size": 1, "prompt_tokens": 0, "length": {"kind": "fixed", "max": 20}},
        "hardware": {"decode": {"kind": "affine", "step_s": 1.0}, "training": {"token_s": 0.0}},
        "fleet": {"start_s": 0.0, "groups": groups},
    }
    for out in ("run", "again"):
        simulate(parse_run(tables), out=tmp_path / out)
        assert [(row.second, row.engines) for row in read_capacity(tmp_path / out)][:-1] == [
            (0, 2), (30, 1), (60, 2), (90, 0), (90.5, 1)
        ]  # fmt: skip
        tables["fleet"]["start_s"] = 60.0  # engines of a run have started
        groups[0]["capacity"] = str(tmp_path / "run")
    del tables["fleet"]
    simulate(parse_run(tables), out=tmp_path / "other")
    rule = "fleet.groups.capacity must be a run whose engines came and went"
    assert message(read_capacity, tmp_path / "other") == f"{rule}, got {tmp_path / 'other'}"


def test_a_missing_capacity_is_one_line_as_soon_as_lives_are_asked_for():
    assert "fleet.groups.capacity" in message(places, kind="spot", capacity="/nowhere/spot.csv")


# ------------------------------------------------------------------------------------------------------------- trainer


def trainer(failures=(), *, every=100.0, checkpoint=10.0, restart=20.0):
    return TrainerFaults(
        TrainerFaultsConfig(checkpoint_every_s=every, checkpoint_s=checkpoint, restart_s=restart), failures
    )


def drawn(mtbf_s, *, every, checkpoint=0.0, restart=0.0, seed=0, accelerators=1):
    config = TrainerFaultsConfig(
        mtbf_hours=mtbf_s / 3600, checkpoint_every_s=every, checkpoint_s=checkpoint, restart_s=restart
    )
    return TrainerFaults.drawn(config, accelerators=accelerators, seed=seed)


def sums(faults):
    return faults.checkpoint_s, faults.restart_s, faults.redone_s, faults.num_failures


def test_failures_in_work_restart_checkpoint_and_waits_by_hand():
    """Without waits: work until 100, checkpoint 110, failure at 130 after 20 s of work, another in the restart at 145,
    restarted 165, redone 185, work until 265, failure in the checkpoint at 270, restarted 290, redone 390, checkpoint
    400, 50 s of work. Then waits, with a failure at 480, and one at 1060 that finds all saved.
    """
    faults = trainer([130.0, 145.0, 270.0, 480.0, 1060.0])
    assert faults.extend(0.0, 250.0) == 450
    assert sums(faults) == (10 + 5 + 10, 15 + 20 + 20, 20 + 100, 3)
    assert faults.extend(500.0, 10.0) == 60  # restarted 500, redone 550
    assert sums(faults) == (25, 75, 170, 4)
    assert faults.extend(720.0, 5.0) == 5  # a checkpoint 600 - 610 in the wait: due 100 s after the redone work began
    assert faults.extend(790.0, 10.0) == 10
    assert faults.extend(820.0, 1.0) == 11  # due at 820
    assert faults.extend(905.0, 3.0) == 3
    assert faults.extend(935.0, 1.0) == 6  # begun in the wait at 930
    assert faults.extend(1300.0, 1.0) == 1  # checkpoint 1050, restarted 1080; no checkpoint of nothing
    assert sums(faults) == (65, 95, 170, 5)


@pytest.mark.parametrize(("work_s", "num_checkpoints"), [(0.0, 0), (100.0, 0), (100.5, 1), (250.0, 2), (1000.0, 9)])
def test_without_failures_only_checkpoints_take_time(work_s, num_checkpoints):
    """Every 100 s of work, as far as more follows."""
    faults = trainer()
    assert faults.extend(7.0, work_s) == work_s + 10 * num_checkpoints
    assert sums(faults) == (10 * num_checkpoints, 0, 0, 0)


def test_a_trainer_that_never_fails_has_no_failures():
    config = TrainerFaultsConfig(checkpoint_every_s=1.0)
    faults = TrainerFaults.drawn(config, accelerators=64, seed=0)
    assert faults.extend(0.0, 1e4) == 1e4
    assert faults.num_failures == 0


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    gaps=st.lists(st.integers(1, 150), max_size=30),
    pieces=st.lists(st.integers(1, 120), min_size=1, max_size=20),
)
def test_all_time_has_a_cause_and_work_in_pieces_lasts_as_long_as_at_once(gaps, pieces):
    """Whole seconds are exact."""
    failures = np.cumsum(gaps, dtype=float).tolist()
    once, piecewise, now_s = trainer(failures), trainer(failures), 0.0
    for work_s in pieces:
        now_s += piecewise.extend(now_s, float(work_s))
    assert once.extend(0.0, float(sum(pieces))) == now_s
    assert sums(once) == sums(piecewise)
    assert now_s == sum(pieces) + once.checkpoint_s + once.restart_s + once.redone_s
    assert once.num_failures == sum(failure < now_s for failure in failures)


@pytest.mark.parametrize(
    ("mtbf_s", "every", "checkpoint", "restart"),
    [(1000.0, 1000.0, 0.0, 0.0), (1000.0, 300.0, 50.0, 100.0), (400.0, 500.0, 100.0, 50.0)],
)
def test_the_mean_time_of_a_job_is_dalys(mtbf_s, every, checkpoint, restart):
    """Work L between checkpoints takes m (e^(L/m) - 1), with checkpoints and restarts m e^(r/m) (e^((L+c)/m) - 1)
    (Daly 2006, complete model). 200 batches of 100 such jobs; their error from the batches, 1 seed in 10^5 (t of 199).
    The number of failures minus time / m is a martingale of variance time / m; 1 seed in 10^6.
    """
    faults, now_s, batch_s = drawn(mtbf_s, every=every, checkpoint=checkpoint, restart=restart), 0.0, []
    for _ in range(200):
        batch_s.append(faults.extend(now_s, 100 * every))
        now_s += batch_s[-1]
    mean_s = mtbf_s * math.exp(restart / mtbf_s) * math.expm1((every + checkpoint) / mtbf_s)
    assert abs(np.mean(batch_s) / 100 - mean_s) < Z * np.std(batch_s, ddof=1) / 100 / math.sqrt(200)
    assert abs(faults.num_failures - now_s / mtbf_s) < Z * math.sqrt(now_s / mtbf_s)


def test_the_simulated_optimum_of_the_checkpoint_interval_is_dalys():
    """Checkpoints of 100 s, mtbf 1000 s: a cubic through the time of the same work at 9 intervals around Daly's has
    its least at Daly's (through the expected times within 0.3 %). 40 seeds with the same failures at all intervals; 1
    in 10^6 alarms are false (5.8: t of 39). Young's interval, 17 % longer, would be seen.
    """
    checkpoint_s, mtbf_s, work_s = 100.0, 1000.0, 1e5
    best_s = daly_interval(checkpoint_s, mtbf_s)
    log_ratios = np.log(np.geomspace(0.5, 2, 9))
    grid = np.linspace(log_ratios[0], log_ratios[-1], 2001)

    def least_at(times):
        return grid[np.argmin(np.polynomial.Polynomial.fit(log_ratios, times, 3)(grid))]

    found = [
        least_at([
            drawn(mtbf_s, every=best_s * math.exp(one), checkpoint=checkpoint_s, seed=seed).extend(0.0, work_s)
            for one in log_ratios
        ])
        for seed in range(40)
    ]  # fmt: skip
    bound = 0.003 + 5.8 * np.std(found, ddof=1) / math.sqrt(len(found))
    assert abs(np.mean(found)) < bound < 0.5 * math.log(math.sqrt(2 * checkpoint_s * mtbf_s) / best_s)


def test_llama_3_was_interrupted_as_often():
    """16,384 GPUs for 54 days, 419 unexpected interruptions: 16384 * 54 * 24 / 419 = 50,700 h a GPU
    (arXiv 2407.21783). The counts of 10 seeds are within 4.9 sqrt(419) = 100 each; 1 alarm in 10^5 is false.
    """
    for seed in range(10):
        faults = drawn(3600 * 50_700, every=1800.0, accelerators=16_384, seed=seed)
        assert faults.extend(54 * 86_400.0, 0.0) == 0
        assert abs(faults.num_failures - 419) < Z * math.sqrt(419)


def test_the_same_seed_has_the_same_failures_and_another_has_others():
    one, same, other = (drawn(1000.0, every=300.0, seed=seed).extend(0.0, 1e4) for seed in (3, 3, 4))
    assert one == same != other
