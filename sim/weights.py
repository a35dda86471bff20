"""The weights of an engine: those it has had, and those on their way to it."""

from __future__ import annotations

from dataclasses import dataclass

from pipelinerl.scheduler.events import VersionSpans, WeightUpdate, joined
from sim.request import Request


@dataclass(frozen=True, slots=True)
class Update:
    """Weights on their way."""

    at: int
    """Tick of their arrival."""
    version: int
    weight_update: WeightUpdate


class WeightHistory:
    """Which version sampled at which decode step (mutable): version ``versions[i]`` from step ``steps[i]`` on."""

    def __init__(self) -> None:
        self.steps = [0]
        self.versions = [0]

    def loaded(self, version: int, step: int) -> None:
        """Record that another version samples from a step on."""
        if self.steps[-1] == step:
            self.versions[-1] = version
        else:
            self.steps.append(step)
            self.versions.append(version)

    def spans(self, request: Request, step: int) -> VersionSpans:
        """Return the spans of all tokens that a request of the batch has at the boundary before a step."""
        start, steps, versions = request.start_step, self.steps, self.versions
        if step == start:
            return request.spans
        first, last = request.first_update, len(steps)
        if steps[-1] == step:
            last -= 1  # it samples nothing before the next step
        if first == last:
            spans = VersionSpans((versions[first - 1],), (step - start,))
        else:
            ends = [one - start for one in steps[first:last]]
            ends.append(step - start)
            spans = VersionSpans(tuple(versions[first - 1 : last]), tuple(ends))
        return joined(request.spans, spans) if request.spans.ends else spans
