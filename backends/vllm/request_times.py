"""Where the time of requests on vLLM's engine has gone, by vLLM's own times of each."""

from __future__ import annotations

import time
from collections import deque

from pipelinerl.scheduler.events import EngineSeconds

MOST_STOPS = 64
"""Latest stops of the engine that are kept."""


class RequestTimes:
    """The seconds of requests, less those in which the engine stood still (mutable). A machine has one clock."""

    def __init__(self) -> None:
        self._stops: deque[tuple[float, float]] = deque(maxlen=MOST_STOPS)
        self._stopped_s: float | None = None

    def stop(self) -> None:
        """Note that the engine stands still from now on."""
        self._stopped_s = time.monotonic()

    def go_on(self) -> None:
        """Note that it goes on."""
        if self._stopped_s is not None:
            self._stops.append((self._stopped_s, time.monotonic()))
            self._stopped_s = None

    def of(self, scheduled_s: float, first_token_s: float, last_token_s: float) -> EngineSeconds:
        """Return where the time of a request that has ended has gone; a time is 0 if it did not come to that.

        Prefill lasts from when the request was scheduled to its first token, decode from there to its last one. The
        prefills of others in a decode step count as decode.
        """
        if not first_token_s:  # aborted before
            return EngineSeconds(0.0, 0.0)
        return EngineSeconds(self._worked_s(scheduled_s, first_token_s), self._worked_s(first_token_s, last_token_s))

    def _worked_s(self, begin_s: float, end_s: float) -> float:
        still_s = (max(0.0, min(end_s, last_s) - max(begin_s, first_s)) for first_s, last_s in self._stops)
        return max(0.0, end_s - begin_s - sum(still_s))
