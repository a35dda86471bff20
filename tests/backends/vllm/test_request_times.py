"""Prefill and decode of a request by vLLM's times of it, less the seconds in which the engine stood still."""

import pytest

from backends.vllm import request_times
from backends.vllm.request_times import RequestTimes
from pipelinerl.scheduler.events import EngineSeconds


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> RequestTimes:
    """Of an engine that stood still from 2.0 to 2.5 s, from 5 to 6 s, and from 9.5 to 20 s."""
    clock_s = iter((2.0, 2.5, 5.0, 6.0, 9.5, 20.0))
    monkeypatch.setattr(request_times.time, "monotonic", lambda: next(clock_s))
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
