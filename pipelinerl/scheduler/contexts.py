"""The contexts of rollouts between two turns: which engine has room for one more rollout.

Theory of operation. A rollout that has begun comes back to its engine turn after turn, with all that came before. If
the contexts of an engine's rollouts, those included whose environment acts, do not fit into its KV cache together, each
that comes back has lost its own, and all is prefilled again: more open rollouts then give less. So a rollout begins

* on the engine whose rollouts have the fewest tokens of context, of those with a free slot;
* if these and the longest context seen so far fit into the KV cache there, as contexts grow; or if the engine has none.

Each turn after the first it waits, first come first served, for a slot of its engine, since elsewhere all its context
would be prefilled again and take others' room. If its engine has no free slot and another has no rollouts, it moves.

Nobody waits for ever. One that comes back has a slot when as many turns have ended on its engine as rollouts waited for
it. Rollouts that have begun end, and an engine without any takes the first of those that have not.

Sources: ThunderAgent (arXiv:2602.13692), which counts contexts as here, and pauses rollouts besides. Routers of vLLM
and SGLang weigh the prefix that an engine has against its load in requests, and so do not see contexts.
"""

from __future__ import annotations

from pipelinerl.scheduler.slots import EngineSlots


class EngineContexts:
    """Tokens of context of rollouts that have begun, by the engine of their last turn (mutable, can be pickled).

    Args:
        num_engines: Engines (count).
        kv_cache_tokens: KV cache of an engine (tokens). None: it never fills.
    """

    def __init__(self, num_engines: int, kv_cache_tokens: int | None) -> None:
        self._tokens = [0] * num_engines
        self._capacity = kv_cache_tokens
        self._held: dict[int, tuple[int, int]] = {}  # rollout -> its engine, its tokens
        self._longest = 0

    def hold(self, rollout_id: int, engine: int, tokens: int) -> None:
        """Count a rollout on an engine, with so many tokens of context; it may have been counted before."""
        if (before := self._held.get(rollout_id)) is not None:
            self._tokens[before[0]] -= before[1]
        self._held[rollout_id] = (engine, tokens)
        self._tokens[engine] += tokens

    def drop(self, rollout_id: int) -> None:
        """Count a rollout no more, if it is counted."""
        engine, tokens = self._held.pop(rollout_id, (0, 0))
        self._tokens[engine] -= tokens

    def see(self, tokens: int) -> None:
        """Note that a context has so many tokens."""
        if tokens > self._longest:  # noqa: PLR1730 - a call would cost more, once per turn
            self._longest = tokens

    def engine_with_room(self, slots: EngineSlots) -> int | None:
        """Return the engine that a rollout begins on, or None if none has room; there must be a free slot."""
        if not self._fits_beside(min(self._tokens)):
            return None
        tokens, engine = min((tokens, one) for one, tokens in enumerate(self._tokens) if slots.has_free(one))
        return engine if self._fits_beside(tokens) else None

    def engine_to_go_on(self, home: int, slots: EngineSlots) -> int:
        """Return the engine on which a rollout waits for a slot."""
        if slots.has_free(home) or min(self._tokens):
            return home
        return next((one for one, tokens in enumerate(self._tokens) if not tokens and slots.has_free(one)), home)

    def _fits_beside(self, tokens: int) -> bool:
        return not tokens or self._capacity is None or tokens + self._longest <= self._capacity
