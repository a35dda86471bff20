"""How long driver and front ends are busy with each rollout."""

import time
from pathlib import Path

import pytest

from backends import busy
from backends.step_metrics import StepMetrics


def test_a_thread_is_busy_while_it_works_and_not_while_it_sleeps() -> None:
    begin_s = busy.busy_s()
    until_s = time.thread_time() + 0.05
    while time.thread_time() < until_s:
        pass
    worked_s = busy.busy_s()
    time.sleep(0.2)
    assert worked_s - begin_s >= 0.045  # the system counts in ticks of a few milliseconds
    assert busy.busy_s() - worked_s < 0.15


def test_without_the_systems_statistics_work_alone_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(busy, "SCHEDULER_STATISTICS", str(tmp_path / "none"))
    assert busy.busy_s() == pytest.approx(time.thread_time(), abs=0.05)


def test_busy_time_is_counted_per_rollout_and_a_restart_begins_anew() -> None:
    """Engine 0 goes from 10 to 16 s over two rollouts and, started again, from 1 to 2 s over one; engine 1 has 1 s."""
    metrics = StepMetrics(truncation=5.0)
    for engine, seconds in ((0, 10.0), (0, 12.0), (1, 3.0), (0, 16.0), (0, 1.0), (0, 2.0), (1, 4.0)):
        metrics.busy(engine, seconds)
    for seconds in (5.0, 5.5):
        metrics.busy(None, seconds)
    summary = metrics.summary()
    assert summary.front_end_busy_s_per_rollout == pytest.approx((6 + 1 + 1) / 4)
    assert summary.driver_busy_s_per_rollout == pytest.approx(0.5)


def test_front_ends_that_do_not_say_are_left_out() -> None:
    metrics = StepMetrics(truncation=5.0)
    for _ in range(3):
        metrics.busy(0, 0.0)
    assert metrics.summary().front_end_busy_s_per_rollout is None
