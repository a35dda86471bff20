"""Times of an engine: its decode steps, added up as they happen, and prefill and decode of every request."""

from __future__ import annotations

import time
from collections import deque

from pipelinerl.records.reports import DecodeSteps
from pipelinerl.scheduler.events import EngineSeconds

MOST_STOPS = 64
"""Latest stops of the engine that are kept."""


class StepMeter:
    """Adds up decode steps (mutable), but for the first after a stop or of an idle engine, whose begin is unknown.

    Every sequence in progress gets a token in a step: those beyond the ones left of the step before have begun in it.
    """

    def __init__(self) -> None:
        self._sums = DecodeSteps()
        self._end_s, self._num, self._num_ended = 0.0, 0, 0  # of the last step, whose outputs may come in parts
        self._had = self._had_unread = 0  # tokens of contexts and of prompts in that step
        self._began_s: float | None = None
        self._left = 0
        self._context = self._unread = 0  # tokens of all requests; of prompts that no step has had yet

    def begins(self, prompt_tokens: int) -> None:
        """Note that a request is sent to the engine."""
        self._context += prompt_tokens
        self._unread += prompt_tokens

    def ends(self, tokens: int) -> None:
        """Note that a request has ended, with so many tokens, prompt included."""
        self._context -= tokens

    def output(self, end_s: float, num: int, num_ended: int) -> None:
        """Note that ``num`` sequences got a token in the step that ended at ``end_s``, and ``num_ended`` ended."""
        if end_s != self._end_s:
            self._close()
            self._end_s, self._had, self._had_unread = end_s, self._context, self._unread
            self._unread = 0
        self._context += num
        self._num += num
        self._num_ended += num_ended

    def stop(self) -> None:
        """Note that the engine stops."""
        self._close()
        self._began_s = None

    def take(self) -> DecodeSteps:
        """Return the sums since the last call."""
        taken, self._sums = self._sums, DecodeSteps()
        return taken

    def _close(self) -> None:
        if not self._num:
            return
        if self._began_s is not None:
            self._sums += DecodeSteps(
                steps=1,
                sequences=self._num,
                context=self._had,
                started=max(0, self._num - self._left),
                read_tokens=self._had_unread,
                seconds=self._end_s - self._began_s,
            )
        self._left = self._num - self._num_ended
        self._began_s = self._end_s if self._left else None
        self._num = self._num_ended = 0


class RequestTimes:
    """The seconds of requests, less the time in which the engine stood still (mutable). A machine has one clock."""

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
        """Return the seconds of prefill, until the first token, and of decode, until the last; 0 if neither came.

        Prefills of other requests in a decode step count as decode.
        """
        if not first_token_s:  # aborted before
            return EngineSeconds(0.0, 0.0)
        return EngineSeconds(self._worked_s(scheduled_s, first_token_s), self._worked_s(first_token_s, last_token_s))

    def _worked_s(self, begin_s: float, end_s: float) -> float:
        still_s = (max(0.0, min(end_s, last_s) - max(begin_s, first_s)) for first_s, last_s in self._stops)
        return max(0.0, end_s - begin_s - sum(still_s))
