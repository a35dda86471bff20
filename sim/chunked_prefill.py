"""A prefill that takes several steps of an engine.

Theory of operation. As in vLLM (``max_num_batched_tokens``; Sarathi-Serve, arXiv:2403.02310) a step takes so many
tokens at most, one of each request of the batch, then those of prefill, in order of admission. What of a prefill does
not fit waits for the next step, and meanwhile nobody is admitted. Its request has its slot and the room of all its
tokens and of one more step from its admission on, and joins the batch with its last chunk. Chunks take together what
the whole prefill takes, beside the steps of the batch.
"""

from __future__ import annotations

from sim.costs import PrefillCost
from sim.decode_batch import DecodeBatch
from sim.request import Request


class ChunkedPrefill:
    """The prefill that an engine has begun and not ended, if there is one (mutable).

    Args:
        batch: The batch of the engine; its capacity is without the room that is held here.
        cost: What a prefill takes.
    """

    def __init__(self, batch: DecodeBatch, cost: PrefillCost) -> None:
        self.request: Request | None = None
        self.held_tokens = 0
        """Room in the KV cache that it has (tokens)."""
        self._cached_tokens = 0
        self._batch, self._cost = batch, cost

    def begin(self, request: Request, cached_tokens: int) -> None:
        """Admit a request, some tokens of which are in the KV cache already; its chunks come with ``go_on``."""
        batch, self.request, self._cached_tokens = self._batch, request, cached_tokens
        self.held_tokens = request.tokens_to_prefill + 1
        batch.capacity -= self.held_tokens
        batch.prefill_ticks += self._cost.fixed_ticks
        request.prefill_ticks -= batch.tick - batch.still_ticks

    def go_on(self, request: Request, tokens: int) -> tuple[int, int | None]:
        """Make a chunk of at most so many tokens in the next step.

        Returns:
            The tokens of the chunk, and if it was the last one its ticks: the request can join the batch with them.
        """
        cached, whole = self._cached_tokens, request.tokens_to_prefill
        self._cached_tokens = end = min(whole, cached + tokens)
        ticks = self._cost.more_ticks(end, cached)
        if end == whole:
            self.release()
            return end - cached, ticks
        self._batch.prefill_ticks += ticks
        return end - cached, None

    def begin_again(self) -> None:
        """Prefill from the first token again: the weights are new."""
        if self.request is not None:
            self._cached_tokens = 0
            self._batch.prefill_ticks += self._cost.fixed_ticks

    def release(self) -> list[Request]:
        """Return the request, if there is one; it is not admitted any more."""
        if self.request is None:
            return []
        batch, request, self.request = self._batch, self.request, None
        batch.capacity += self.held_tokens
        self.held_tokens = 0
        request.prefill_ticks += batch.tick - batch.still_ticks
        return [request]
