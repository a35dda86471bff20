"""The front ends of the engines: what a request passes on its way to its engine, and a report on its way back."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pipelinerl.hardware.tables import LatencyConfig
from pipelinerl.scheduler.events import VersionSpans
from sim.clock import CLUSTER_PRIORITY, Clock, Wake, to_ticks
from sim.request import Request, SimulatedEngine


class FrontEnds:
    """One for each engine (mutable). It takes one request after the other; reports do not wait for each other.

    Args:
        clock: Simulated time.
        engines: The engines, by id.
        latency: The seconds of a request and of a report.
        report: Called with engine, request and the spans of its tokens when a report has arrived.
    """

    def __init__(
        self,
        clock: Clock,
        engines: Mapping[int, SimulatedEngine],
        latency: LatencyConfig,
        *,
        report: Callable[[int, Request, VersionSpans], None],
    ) -> None:
        self._clock, self._engines, self._report = clock, engines, report
        self._request_ticks = to_ticks(latency.request_s)
        self.report_ticks = to_ticks(latency.report_s)
        self._free = dict.fromkeys(engines, 0)  # tick from which each takes the next request
        self._reports: dict[int, tuple[int, Request, VersionSpans]] = {}  # on their way, by rollout

    def submit(self, request: Request, engine: int, now: int, delay: int) -> None:
        """Send a request to an engine, which it reaches ``delay`` ticks after the front end has taken it."""
        if self._request_ticks:
            now = max(now, self._free[engine]) + self._request_ticks
            self._free[engine] = now
        self._engines[engine].submit(request, now + delay)

    def report_later(self, engine: int, request: Request, spans: VersionSpans) -> None:
        """Report a finished rollout after ``report_ticks``."""
        self._reports[request.rollout_id] = (engine, request, spans)
        Wake(self._clock, self.report_ticks, CLUSTER_PRIORITY, request.rollout_id, self._arrived)

    def reports_of(self, engine: int) -> list[tuple[Request, VersionSpans]]:
        """Return what an engine has finished, and nobody knows yet."""
        return [(request, spans) for at, request, spans in self._reports.values() if at == engine]

    def _arrived(self, wake: Wake) -> None:
        self._report(*self._reports.pop(wake.tag))
