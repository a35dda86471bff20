"""Decode steps of an engine added up, and prefill and decode of a request by vLLM's times of it: by hand."""

from __future__ import annotations

import pytest

from backends.vllm.version import client as module
from backends.vllm.version.client import RequestTimes, StepMeter
from pipelinerl.records.reports import DecodeSteps
from pipelinerl.scheduler.events import EngineSeconds


def test_steps_are_added_up_with_what_was_in_them() -> None:
    """Two prompts of 5; a third of 7 joins the second step; in the third one of three ends."""
    meter = StepMeter()
    meter.begins(5)
    meter.begins(5)
    meter.output(1.0, 2, 0, num_tokens=2)  # nobody knows when it began
    meter.begins(7)
    meter.output(1.5, 2, 0, num_tokens=2)
    meter.output(1.5, 1, 0, num_tokens=1)  # the same step
    meter.output(1.75, 3, 1, num_tokens=3)
    meter.ends(5 + 3)
    meter.output(2.0, 2, 0, num_tokens=2)
    # The last step is still open. Contexts: 5 + 1 twice and 7; then a token more each.
    assert meter.take() == DecodeSteps(
        steps=2, sequences=6, tokens=6, context=(6 + 6 + 7) + (7 + 7 + 8), started=1, read_tokens=7, seconds=0.75
    )
    meter.output(2.5, 2, 2, num_tokens=2)
    assert meter.take() == DecodeSteps(
        steps=1, sequences=2, tokens=2, context=8 + 9, seconds=0.25
    )  # of the two that are left


def test_a_step_with_drafts_gives_a_sequence_several_tokens() -> None:
    """Two sequences of 5 tokens get 3 and 1, then 2 and 2: the second step has read 5 + 3 and 5 + 1."""
    meter = StepMeter()
    meter.begins(5)
    meter.begins(5)
    meter.output(1.0, 2, 0, num_tokens=4)
    meter.output(1.5, 2, 0, num_tokens=4)
    meter.stop()
    assert meter.take() == DecodeSteps(steps=1, sequences=2, tokens=4, context=8 + 6, seconds=0.5)


def test_a_request_counts_as_begun_in_the_step_after_it_is_sent() -> None:
    """The engine admits it between two steps."""
    meter = StepMeter()
    meter.begins(4)
    meter.output(1.0, 1, 0, num_tokens=1)
    started = []
    for end_s, num_sent, num in ((2.0, 3, 1), (3.0, 1, 4), (4.0, 0, 5), (5.0, 0, 5)):
        for _ in range(num_sent):
            meter.begins(4)
        meter.output(end_s, num, 0, num_tokens=num)
        started.append(meter.take().started)  # a step is added once the next one has ended
    assert started == [0, 0, 3, 1]


def test_neither_a_pause_nor_idle_time_is_a_step() -> None:
    meter = StepMeter()
    meter.begins(4)
    for end_s in (1.0, 2.0):
        meter.output(end_s, 1, 0, num_tokens=1)
    meter.stop()
    meter.output(50.0, 1, 0, num_tokens=1)  # after the pause
    meter.output(51.0, 1, 1, num_tokens=1)
    meter.output(90.0, 1, 0, num_tokens=1)  # nothing was in progress before it
    meter.output(92.0, 1, 0, num_tokens=1)
    meter.stop()
    taken = meter.take()
    assert (taken.steps, taken.seconds) == (3, 1.0 + 1.0 + 2.0)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> RequestTimes:
    """Of an engine that stood still from 2.0 to 2.5 s, from 5 to 6 s, and from 9.5 to 20 s."""
    clock_s = iter((2.0, 2.5, 5.0, 6.0, 9.5, 20.0))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock_s))
    times = RequestTimes()
    times.go_on()  # it did not stand still before
    for _ in range(3):
        times.stop()
        times.go_on()
    return times


@pytest.mark.parametrize(
    ("scheduled_s", "first_token_s", "last_token_s", "seconds"),
    [
        (1.0, 3.0, 10.0, EngineSeconds(1.5, 5.5)),  # 2.0 - 0.5 and 7.0 - 1.0 - 0.5
        (6.0, 7.0, 9.0, EngineSeconds(1.0, 2.0)),
        (10.0, 12.0, 19.0, EngineSeconds(0.0, 0.0)),
        (7.0, 0.0, 0.0, EngineSeconds(0.0, 0.0)),  # aborted before its first token
    ],
)
def test_seconds_of_a_request_by_hand(
    times: RequestTimes, scheduled_s: float, first_token_s: float, last_token_s: float, seconds: EngineSeconds
) -> None:
    assert times.of(scheduled_s, first_token_s, last_token_s) == seconds
