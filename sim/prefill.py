"""Engines that only prefill, and engines that decode behind them (``[generation]``).

Theory of operation. A request is served where its prefill ends first, by what each prefill engine was given before and
by the cache it has of the rollout's last turn; no request overtakes another there. So on arrival it is known when the
KV cache is ready and, a transfer later, at the decode engine, where the request arrives then. Transfers do not wait for
each other. From its arrival until its admission the cache stays at the prefill engine, whose room for such caches has
no limit. New weights are loaded once all that came before them is done.

Decode engines keep no caches between turns, as in SGLang: each turn is sent with its whole cache. Prefill engines keep
those that they have computed, by ``environment.prefix_cache``, least recently used dropped first. A request that is
preempted is prefilled where it is.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from pipelinerl.config.engine import GenerationConfig
from pipelinerl.config.environment import PrefixCaching
from pipelinerl.config.resolve import cache_transfer_s
from pipelinerl.config.run import RunConfig
from pipelinerl.hardware.costs import ResolvedHardware
from pipelinerl.scheduler.events import VersionSpans, WeightUpdate
from sim.clock import CLUSTER_PRIORITY, Clock, Wake, to_ticks
from sim.engine import UNLIMITED, PrefixCache
from sim.interface import DecodeEngineFactory, EngineHost, EngineSettings, Request, prefill_cost


class PrefillEngines:
    """All engines of a run that only prefill (mutable)."""

    def __init__(self, config: RunConfig, generation: GenerationConfig, hardware: ResolvedHardware) -> None:
        caching = PrefixCaching.OFF if config.environment is None else config.environment.prefix_cache
        self._keeps_caches, self._drops_old = caching is not PrefixCaching.OFF, caching is PrefixCaching.SALTED
        capacity = UNLIMITED if hardware.kv_cache_tokens is None else hardware.kv_cache_tokens
        self._caches = [PrefixCache(capacity) for _ in range(config.num_prefill_engines)]
        self._free = [0] * len(self._caches)  # tick from which each engine is
        self._idle_ticks = 0  # of all engines, before that tick of each
        self._cost, self._pause_ticks = prefill_cost(hardware.prefill), to_ticks(hardware.weights.pause_s)
        self._transfer_ticks = to_ticks(generation.transfer_s)
        self._transfer_token_ticks = to_ticks(cache_transfer_s(config, generation))
        self._version = 0  # newest that is on its way

    def serve(self, request: Request, now: int) -> int:
        """Prefill a request that arrives now; return the tick at which its KV cache is at its decode engine."""
        rollout_id, tokens, free = request.rollout_id, request.tokens_to_prefill, self._free
        cost = self._cost
        ticks = [cost.ticks(tokens, min(tokens, cache.kept.get(rollout_id, 0))) for cache in self._caches]
        chosen = min(range(len(free)), key=lambda engine: max(now, free[engine]) + ticks[engine])
        self._work(chosen, now, ticks[chosen])
        request.prefill_ticks += ticks[chosen]
        if request.goes_on and self._keeps_caches:
            self._caches[chosen].keep(rollout_id, tokens)
            self._caches[chosen].make_room(0)
        return free[chosen] + self._transfer_ticks + self._transfer_token_ticks * tokens

    def update(self, clock: Clock, version: int, weight_update: WeightUpdate, at: int) -> None:
        """Have new weights arrive at tick ``at``; every decode engine says so."""
        if version != self._version:
            self._version = version
            drops = self._drops_old or weight_update is WeightUpdate.RECOMPUTE
            Wake(clock, at - clock.now, CLUSTER_PRIORITY, 0, partial(self._load, clock, drops))

    def utilisation(self, now: int) -> float:
        """Return the share of the time until now that the engines have prefilled or loaded weights."""
        idle_ticks = self._idle_ticks + sum(max(0, now - free) for free in self._free)
        return 1 - idle_ticks / (len(self._free) * now) if now else 0.0

    def _load(self, clock: Clock, drops: bool, _: Wake) -> None:
        for engine, cache in enumerate(self._caches):
            self._work(engine, clock.now, self._pause_ticks)
            if drops:
                cache.clear()

    def _work(self, engine: int, now: int, ticks: int) -> None:
        self._idle_ticks += max(0, now - self._free[engine])
        self._free[engine] = max(now, self._free[engine]) + ticks


class PrefilledEngine:
    """An engine that decodes what others have prefilled (mutable)."""

    def __init__(
        self,
        clock: Clock,
        host: EngineHost,
        engine_id: int,
        settings: EngineSettings,
        *,
        make: DecodeEngineFactory,
        prefill: PrefillEngines,
    ) -> None:
        self._clock, self._prefill = clock, prefill
        self._engine = engine = make(clock, host, engine_id, replace(settings, prefix_cache=PrefixCaching.OFF))
        self.suspend, self.disturb, self.kv_cache_share = engine.suspend, engine.disturb, engine.kv_cache_share
        self._coming: dict[int, tuple[Request, Wake]] = {}  # on their way to the prefill engines, by rollout

    @property
    def version(self) -> int:
        """Version that the engine samples with."""
        return self._engine.version

    def submit(self, request: Request, at: int) -> None:
        """Have a request arrive at the prefill engines at tick ``at``."""
        rollout_id = request.rollout_id
        wake = Wake(self._clock, at - self._clock.now, CLUSTER_PRIORITY, rollout_id, self._arrived)
        self._coming[rollout_id] = request, wake

    def abort(self, rollout_id: int) -> None:
        """End a rollout early; a prefill is made to its end."""
        if rollout_id in self._coming:
            self._engine.submit(self._coming.pop(rollout_id)[0], self._clock.now)
        self._engine.abort(rollout_id)

    def update(self, version: int, weight_update: WeightUpdate, at: int) -> None:
        """Have new weights arrive at tick ``at``."""
        self._prefill.update(self._clock, version, weight_update, at)
        self._engine.update(version, weight_update, at)

    def end(self) -> list[tuple[Request, VersionSpans]]:
        """Return the rollouts in progress, in order of id."""
        coming = [(request, request.spans) for request, _ in self._coming.values()]
        return sorted([*self._engine.end(), *coming], key=lambda pair: pair[0].rollout_id)

    def _arrived(self, wake: Wake) -> None:
        request, current = self._coming.get(wake.tag, (None, None))
        if request is not None and wake is current:  # else it was aborted
            del self._coming[wake.tag]
            self._engine.receive(request, self._prefill.serve(request, self._clock.now))
