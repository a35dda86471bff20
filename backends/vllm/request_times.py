"""Where the time of requests on vLLM's engine has gone, by vLLM's own times of each; off, they cost nothing.

vLLM keeps them if something logs its statistics. What logs is its Prometheus logger, whatever it is told, but for one
that takes its place: ``no_logger`` does, and does nothing.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import pairwise
from typing import Any

from pipelinerl.scheduler.events import EngineSeconds

MOST_STOPS = 64
"""Latest times that the engine stood still, of which it is known how long (count)."""


class RequestTimes:
    """The seconds of requests, less those in which the engine stood still for weights (mutable).

    The clock is the same in all processes of a machine, vLLM's among them.
    """

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

    def of(self, metrics: Any) -> EngineSeconds | None:
        """Return where the time of a request that has ended has gone; None where vLLM has not kept it.

        Prefill lasts from when the request was scheduled to its first token, decode from there to its last one. The
        prefills of others that a decode step holds besides count as decode.
        """
        if metrics is None:
            return None
        if not metrics.first_token_ts:  # aborted before it had one
            return EngineSeconds(0.0, 0.0)
        times_s = (metrics.scheduled_ts, metrics.first_token_ts, metrics.last_token_ts)
        return EngineSeconds(*(self._worked_s(begin_s, end_s) for begin_s, end_s in pairwise(times_s)))

    def _worked_s(self, begin_s: float, end_s: float) -> float:
        still_s = (max(0.0, min(end_s, last_s) - max(begin_s, first_s)) for first_s, last_s in self._stops)
        return max(0.0, end_s - begin_s - sum(still_s))


def no_logger() -> Any:
    """Return a class of vLLM's loggers that logs nothing."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class NoLogger(PrometheusStatLogger):  # type: ignore[misc,unused-ignore]
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def record(self, *_: Any, **__: Any) -> None:
            pass

        record_sleep_state = record_admission_rejection = log_engine_initialized = log = record

    return NoLogger
