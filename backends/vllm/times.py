"""The decode steps of an engine, added up as they happen: how long they took, with how many sequences."""

from __future__ import annotations

from pipelinerl.records.reports import DecodeSteps


class StepMeter:
    """Adds up decode steps (mutable).

    The first after a stop, or of an idle engine, is left out: nobody knows when it began. Every sequence in progress
    gets a token in a step: more sequences than were left of the step before have begun in it.
    """

    def __init__(self) -> None:
        self._sums = DecodeSteps()
        self._end_s, self._num, self._num_ended = 0.0, 0, 0  # of the last step, whose outputs may come in parts
        self._had = self._had_unread = 0  # tokens that it had of contexts, and of prompts
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
        """Note that ``num`` sequences got a token in the step that ended at ``end_s``, and so many of them ended."""
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
