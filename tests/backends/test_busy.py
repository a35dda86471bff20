"""How long driver and front ends are busy with each rollout."""

import time
from pathlib import Path

import pytest

from backends import interface
from backends.driver.metrics import StepMetrics
from pipelinerl.records.reports import DecodeSteps
from pipelinerl.rl.config import LossConfig

TICK_S = 0.01
"""In which the system counts, at most (s)."""


def test_a_thread_is_busy_while_it_works_and_not_while_it_sleeps() -> None:
    """Whoever sleeps 0.2 s is busy 0.2 s less than the time that passes, however long it waits for a processor."""
    time.sleep(0.01)  # the system counts when a thread stops running
    clock_s = time.monotonic()  # first here and last below: a wait between the two readings is no busy time
    begin_s = interface.busy_s()
    until_s = time.thread_time() + 0.05
    while time.thread_time() < until_s:
        pass
    time.sleep(0.2)
    busy_s = interface.busy_s() - begin_s
    passed_s = time.monotonic() - clock_s
    assert 0.05 - TICK_S <= busy_s <= passed_s - 0.2 + TICK_S


def test_waits_for_a_processor_count_where_the_system_has_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    statistics = tmp_path / "statistics"
    monkeypatch.setattr(interface, "SCHEDULER_STATISTICS", str(statistics))
    assert time.thread_time() <= interface.busy_s() <= time.thread_time()
    statistics.write_text("2000000000 500000000 7\n")
    assert interface.busy_s() == 2.5


def test_busy_time_is_counted_per_rollout_and_a_restart_begins_anew() -> None:
    """Engine 0 goes from 10 to 16 s over two rollouts and, started again, from 1 to 2 s over one; engine 1 has 1 s."""
    metrics = StepMetrics(LossConfig())
    metrics.driver_busy(5.0)
    for engine, seconds in ((0, 10.0), (0, 12.0), (1, 3.0), (0, 16.0), (0, 1.0), (0, 2.0), (1, 4.0)):
        metrics.answered(engine, seconds)
    metrics.driver_busy(8.5)
    summary = metrics.summary()
    assert summary.front_end_busy_s_per_rollout == pytest.approx((6 + 1 + 1) / 4)
    assert summary.driver_busy_s_per_rollout == pytest.approx(0.5)


def test_front_ends_that_do_not_say_are_left_out() -> None:
    metrics = StepMetrics(LossConfig())
    for _ in range(3):
        metrics.answered(0, 0.0)
    assert metrics.summary().front_end_busy_s_per_rollout is None


def test_decode_steps_of_about_as_many_sequences_are_added_up() -> None:
    metrics = StepMetrics(LossConfig())
    for num, sequences in ((2, 8), (1, 64), (0, 0), (1, 4), (1, 63)):
        metrics.decoded(DecodeSteps(steps=num, sequences=sequences, seconds=0.5))
    metrics.decoded(None)
    found = metrics.summary().decode_steps
    assert [(one.steps, one.sequences, one.seconds) for one in found] == [(3, 12, 1.0), (2, 127, 1.0)]
