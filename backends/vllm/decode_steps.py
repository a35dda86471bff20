"""The decode steps of an engine, added up as they happen: how long they took, with how many sequences."""

from __future__ import annotations

from typing import NamedTuple

from pipelinerl.records.reports import DecodeSteps


class Worked(NamedTuple):
    """Processor time since the start (seconds)."""

    engine_s: float = 0.0
    """Of the engine's processes."""
    front_end_s: float = 0.0
    """Of the process that the calls come from."""


NO_WORK = Worked()


class StepMeter:
    """Adds up decode steps (mutable).

    The first after a stop, or of an idle engine, is left out: nobody knows when it began. Every sequence in progress
    gets a token in a step, so that those beyond the ones that were left of the step before have begun in it.
    """

    def __init__(self) -> None:
        self._sums = DecodeSteps()
        self._end_s, self._num, self._num_ended = 0.0, 0, 0  # of the last step, whose outputs may come in parts
        self._had = self._had_unread = 0  # tokens that it had of contexts, and of prompts
        self._began_s: float | None = None
        self._began = self._worked = NO_WORK  # when the last step began, and ended
        self._left = 0
        self._context = self._unread = 0  # tokens of all requests; of prompts that no step has had yet
        self._sent = self._had_sent = 0  # requests sent since the last step ended, and in it

    def begins(self, prompt_tokens: int) -> None:
        """Note that a request is sent to the engine."""
        self._context += prompt_tokens
        self._unread += prompt_tokens
        self._sent += 1

    def ends(self, tokens: int) -> None:
        """Note that a request has ended, with so many tokens, prompt included."""
        self._context -= tokens

    def output(self, end_s: float, num: int, num_ended: int, worked: Worked = NO_WORK) -> None:
        """Note outputs of a step.

        Args:
            end_s: When the step ended, which tells steps apart.
            num: Sequences that got a token.
            num_ended: Those of them that ended with it.
            worked: Processor time up to now.
        """
        if end_s != self._end_s:
            self._close()
            self._worked = worked
            self._end_s, self._had, self._had_unread = end_s, self._context, self._unread
            self._had_sent, self._sent = self._sent, 0
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
        """Add the last step, all of whose outputs have come."""
        if not self._num:
            return
        if self._began_s is not None:
            self._sums += DecodeSteps(
                steps=1,
                sequences=self._num,
                context=self._had,
                started=max(0, self._num - self._left),
                read_tokens=self._had_unread,
                sent=self._had_sent,
                seconds=self._end_s - self._began_s,
                engine_worked_s=self._worked.engine_s - self._began.engine_s,
                front_end_worked_s=self._worked.front_end_s - self._began.front_end_s,
            )
        self._left = self._num - self._num_ended
        self._began_s, self._began = self._end_s if self._left else None, self._worked
        self._num = self._num_ended = 0
