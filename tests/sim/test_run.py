"""One run: interrupted, beside other threads, and its files on disk at any time."""

import gc
import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from tiny_comparison import run

from pipelinerl.config.run import load_run
from pipelinerl.errors import RunFailedError
from sim.clock import CLUSTER_PRIORITY, Clock, Happening, Wake
from sim.run import simulate


def test_a_clock_stands_still_once_what_it_waits_for_has_happened() -> None:
    clock, times = Clock(), list[int]()
    done = Happening(clock)
    Wake(clock, 3, CLUSTER_PRIORITY, 0, lambda _: done.succeed())
    Wake(clock, 5, CLUSTER_PRIORITY, 0, lambda _: times.append(clock.now))
    for _ in range(2):
        clock.run_until(done)
        assert (clock.now, times) == (3, [])


def test_a_run_in_another_thread_leaves_ctrl_c_alone() -> None:
    summaries: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: summaries.append(simulate(run())))
    thread.start()
    thread.join()
    assert summaries == [simulate(run())]


def test_a_process_that_ignores_ctrl_c_goes_on_ignoring_it() -> None:
    """As one that a shell has put into the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        summary = simulate(run(), on_step=lambda _row: signal.raise_signal(signal.SIGINT))
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert summary == simulate(run())


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_left_as_it_was(enabled: bool) -> None:
    before = gc.isenabled()
    states: list[bool] = []
    try:
        (gc.enable if enabled else gc.disable)()
        simulate(run(), on_step=lambda _row: states.append(gc.isenabled()))
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert states == [False] * 6


def test_a_row_is_on_disk_as_soon_as_its_step_is_done(tmp_path: Path) -> None:
    """So that a killed run leaves every step it made."""
    seen: list[list[str]] = []

    def look(_row: Any) -> None:
        text = (tmp_path / "steps.csv").read_text()
        assert text.endswith("\n")
        seen.append([line.partition(",")[0] for line in text.splitlines()])

    simulate(run("optimizer_steps=3"), out=tmp_path, on_step=look)
    assert seen == [["step", "1"], ["step", "1", "2"], ["step", "1", "2", "3"]]


def test_ctrl_c_ends_a_run_at_the_step_it_was_in_and_is_free_again(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match="interrupted; what was finished is kept"):
        simulate(run(), out=tmp_path, on_step=lambda row: row.step == 2 and signal.raise_signal(signal.SIGINT))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["optimizer_steps"], summary["complete"]) == (2, False)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_rollout_costs_about_one_wake_up_also_while_weights_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request joins ahead of its boundary; without that these rollouts cost 1.55 each."""
    schedule, num_scheduled = Clock.schedule, []
    monkeypatch.setattr(Clock, "schedule", lambda *given: (num_scheduled.append(1), schedule(*given)))
    example = Path(__file__).parents[2] / "examples" / "qwen7b_128_h100.toml"
    summary = simulate(load_run(example, ["optimizer_steps=10"]))
    assert len(num_scheduled) / summary.rollouts.finished < 1.2


def test_many_rollouts_given_up_without_a_step_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Every reward is 1, so no group of 8 has a signal; B = 64: 501 groups are more than 4000 rollouts and 10 B."""
    quickstart = Path(__file__).parents[2] / "examples" / "quickstart.toml"
    config = load_run(quickstart, ["scheduler.filter_no_signal=true", "workload.success_rate=1.0"])
    with pytest.raises(RunFailedError, match=r"^stalled: .* = 64000 .*: rewards of a group are equal; "):
        simulate(config)
    (line,) = [one.message for one in caplog.records]
    assert line.startswith("4,008 rollouts given up without an optimizer step, ")
