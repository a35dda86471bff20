"""Progress where stderr is no terminal, as in the log of a job."""

import threading
import time
from types import SimpleNamespace

import pytest

from pipelinerl.cli import output

METRICS = {"ess/token_raw": 0.98, "idle/trainer": 0.125, "throughput/tokens_per_s": 1234.4}


def test_without_a_terminal_steps_are_lines_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that goes on from step 20; each piece of text is waited for, for a minute at most."""
    monkeypatch.setattr(output, "LINE_EVERY_S", 0.001)
    monkeypatch.setattr(output, "SAME_LINE_EVERY", 1)
    said = ""

    def wait_for(text: str) -> None:
        nonlocal said
        over = time.monotonic() + 60
        while text not in said and time.monotonic() < over:
            said += capsys.readouterr().err
        assert text in said

    with output.training_bar(40) as step_done:
        wait_for("0:00:00  starting\n")
        for step in (21, 22):
            step_done(SimpleNamespace(step=step, reward_mean=0.25, lag_mean=1.5), METRICS)
            line = f"  {step}/40  reward 0.250  lag 1.50  ESS 0.980  trainer waits 12%  1,234 tokens/s"
            wait_for(f"{line}\n" if step == 21 else f"{line}  0:00:")  # of one step no speed is known
        wait_for(" left\n")
    assert capsys.readouterr().out == ""


def test_a_line_that_only_the_clock_has_changed_comes_rarely(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the 1st, 7th and 13th of 13 ticks."""
    shown, over = threading.Event(), threading.Event()

    class Ticks(threading.Event):
        num_ticks = 0

        def wait(self, timeout: float | None = None) -> bool:
            assert timeout == output.LINE_EVERY_S == 10.0
            assert shown.wait(60)
            self.num_ticks += 1
            if self.num_ticks > 13:
                over.set()
            return self.num_ticks > 13

    monkeypatch.setattr(output, "Event", Ticks)
    with output.status("fitting"):
        shown.set()
        assert over.wait(60)
    assert [line.rpartition("  ")[2] for line in capsys.readouterr().err.splitlines()] == 3 * ["fitting"]
