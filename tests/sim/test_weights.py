"""Which version sampled which token, by hand."""

from __future__ import annotations

from pipelinerl.scheduler.events import NO_TOKENS, VersionSpans
from sim.request import Request
from sim.weights import WeightHistory


def joined_at(step: int, history: WeightHistory) -> Request:
    request = Request(0, prompt_tokens=5, length=100)
    request.start_step, request.first_update = step, len(history.versions)
    return request


def test_a_token_has_the_version_that_its_engine_had_at_its_step() -> None:
    history = WeightHistory()
    history.loaded(1, 10)
    history.loaded(2, 10)  # nothing was sampled with version 1
    request = joined_at(10, history)
    assert history.spans(request, 10) is NO_TOKENS
    assert history.spans(request, 13) == VersionSpans((2,), (3,))
    history.loaded(3, 13)
    assert history.spans(request, 13) == VersionSpans((2,), (3,))  # version 3 samples from the next step on
    history.loaded(4, 15)
    assert history.spans(request, 19) == VersionSpans((2, 3, 4), (3, 5, 9))


def test_tokens_from_before_a_preemption_keep_their_versions() -> None:
    history = WeightHistory()
    request = joined_at(0, history)
    request.keep(history.spans(request, 4))
    history.loaded(1, 7)
    request.start_step, request.first_update = 8, len(history.versions)
    assert history.spans(request, 10) == VersionSpans((0, 1), (4, 6))
