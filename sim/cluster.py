"""The simulated cluster: it carries out the scheduler's commands and reports what happens.

Theory of operation. Everything happens in events of the SimPy environment. ``_deliver`` hands an event to the
scheduler and carries out what it answers; carrying out only schedules, it never delivers, so events are
handled one after the other.

==================  ======================================================  ==============================
command             simulated by                                            answered after
==================  ======================================================  ==============================
``OpenEnvironment`` a wait                                                  its reset
``StartRollout``    the engine's front end, one rollout after the other;    dispatch + generation + report,
                    the engine, from arrival on                             then reward + preprocessing
``AbortRollout``    the engine, at its next step boundary                   the running step
``StartTraining``   a wait (with a phase switch before it, if colocated)    ``training`` seconds
``PublishWeights``  a wait; the engines get an update                       ``publish_s``; transfer, running
                                                                            step, ``pause_s`` per engine
==================  ======================================================  ==============================

Every number that chance decides is a function of the seed and an id (rollout, group, prompt), never of the
order of events: two schedulers meet the same answers and the same delays (common random numbers).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from heapq import heapreplace
from itertools import repeat
from pathlib import Path
from typing import Protocol, assert_never

from simpy.events import Event as SimPyEvent

from pipelinerl.config.engine import GenerationConfig
from pipelinerl.config.environment import PrefixCaching
from pipelinerl.config.faults import FaultConfig
from pipelinerl.config.fleet import FleetConfig, FleetGroupConfig
from pipelinerl.config.resolve import cache_transfer_s, named_hardware, new_scheduler, resolved_hardware
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError, RunFailedError, RunInterruptedError
from pipelinerl.hardware.catalogue import find_gpu
from pipelinerl.hardware.costs import LatencyConfig, ResolvedHardware, training_cost
from pipelinerl.records.reports import RunMeasurements
from pipelinerl.records.run_folder import TRACE_FILE
from pipelinerl.records.trace import FanOut, FaultWatch, Recorder
from pipelinerl.scheduler.base import Scheduler, TrainerState
from pipelinerl.scheduler.events import (
    AbortRollout,
    Command,
    DiscardRollouts,
    EngineSeconds,
    Event,
    KVCacheUsed,
    OpenEnvironment,
    PublishWeights,
    RolloutAborted,
    RolloutFinished,
    RolloutPreempted,
    RolloutScored,
    StartRollout,
    StartTraining,
    Stop,
    StopReason,
    TrainingFinished,
    VersionSpans,
    WeightsLoaded,
    WeightsPublished,
    WeightUpdate,
)
from pipelinerl.scheduler.kinds import StallWatch, stalled
from sim.clock import CLUSTER_PRIORITY, TICKS_PER_S, Clock, Happening, Wake, to_seconds, to_ticks
from sim.engine import UNLIMITED, ClosedFormEngine, PrefixCache
from sim.engines import EngineFleet, capacity_report
from sim.episodes import Environments, Episodes, check_turns
from sim.fleet import TrainerFaults
from sim.interface import (
    DecodeEngine,
    Drafting,
    EngineHost,
    EngineSettings,
    LearningPolicy,
    Request,
    SimulatedEngine,
    decode_cost,
    prefill_cost,
)
from sim.learning.tasks import checked_task
from sim.workload import DispatchDelays, Workload, grown_length, growth_factor


class Scoring:
    """Rewards, first come first served, and preprocessing without a limit, of finished rollouts (mutable)."""

    def __init__(self, latency: LatencyConfig) -> None:
        self.takes_time = bool(to_ticks(latency.reward_s + latency.preprocess_s))
        self._ticks = to_ticks(latency.reward_s + latency.preprocess_s)
        self._reward_ticks = to_ticks(latency.reward_s)
        self._free = [0] * (latency.reward_workers or 0)  # heap: tick from which each worker is free

    def ticks(self, now: int) -> int:
        """Score a rollout that finishes now; return the ticks until its score."""
        if not self._free:
            return self._ticks
        begins = max(now, self._free[0])
        heapreplace(self._free, begins + self._reward_ticks)
        return begins - now + self._ticks


LEND_BELOW = 0.5
"""Ready rollouts, over a micro-batch, below which a trainer that begins to wait lends its accelerators (ratio)."""


class TrainerAccess(Protocol):
    """Accelerators that train for several runs on one clock, by turns (``sim.sharing``)."""

    @property
    def clock(self) -> Clock:
        """The clock of all."""

    def ask(self, work: Callable[[], None], *, holds: bool = False) -> None:
        """Call once they are this run's; at once if they are and it ``holds`` them for this, too."""

    def release(self) -> None:
        """Give them back."""


EngineFactory = Callable[[Clock, EngineHost, int, EngineSettings], SimulatedEngine]
DecodeEngineFactory = Callable[[Clock, EngineHost, int, EngineSettings], DecodeEngine]


class FrontEnd:
    """An engine behind its front end (mutable), which takes a request at a time; reports do not wait for each other."""

    def __init__(
        self,
        clock: Clock,
        host: EngineHost,
        engine_id: int,
        settings: EngineSettings,
        *,
        make: EngineFactory,
        latency: LatencyConfig,
    ) -> None:
        self._clock, self._host, self._engine_id = clock, host, engine_id
        self.rollout_aborted, self.rollout_preempted = host.rollout_aborted, host.rollout_preempted
        self.weights_loaded = host.weights_loaded
        self._engine = engine = make(clock, self, engine_id, settings)
        self.abort, self.update, self.suspend = engine.abort, engine.update, engine.suspend
        self.disturb, self.kv_cache_share = engine.disturb, engine.kv_cache_share
        self._request_ticks, self._report_ticks = to_ticks(latency.request_s), to_ticks(latency.report_s)
        self._free = 0  # tick from which it takes the next request
        self._reports: dict[int, tuple[Request, VersionSpans]] = {}  # on their way, by rollout

    @property
    def version(self) -> int:
        """Version that the engine samples with."""
        return self._engine.version

    def submit(self, request: Request, at: int) -> None:
        """Have a request arrive at tick ``at``, or later by the time until the front end has taken it."""
        now = self._clock.now
        self._free = max(now, self._free) + self._request_ticks
        self._engine.submit(request, at + self._free - now)

    def rollout_finished(self, engine: int, request: Request, spans: VersionSpans) -> None:
        """Report a finished rollout, later."""
        if not self._report_ticks:
            self._host.rollout_finished(engine, request, spans)
            return
        self._reports[request.rollout_id] = request, spans
        Wake(self._clock, self._report_ticks, CLUSTER_PRIORITY, request.rollout_id, self._arrived)

    def end(self) -> list[tuple[Request, VersionSpans]]:
        """Return the rollouts in progress, in order of id; rollouts with a report on its way count."""
        reports, self._reports = self._reports, {}
        return sorted([*self._engine.end(), *reports.values()], key=lambda pair: pair[0].rollout_id)

    def _arrived(self, wake: Wake) -> None:
        if wake.tag in self._reports:  # else the engine has ended
            self._host.rollout_finished(self._engine_id, *self._reports.pop(wake.tag))


class RoomMeter:
    """An engine whose KV cache is looked at whenever a request ends (mutable)."""

    def __init__(
        self, clock: Clock, host: EngineHost, engine_id: int, settings: EngineSettings, *, make: EngineFactory
    ) -> None:
        self._host, self._engine = host, make(clock, self, engine_id, settings)
        self.submit, self.abort, self.end = self._engine.submit, self._engine.abort, self._engine.end
        self.update, self.suspend, self.disturb = self._engine.update, self._engine.suspend, self._engine.disturb
        self.rollout_aborted, self.weights_loaded = host.rollout_aborted, host.weights_loaded
        self._share, self._preempted = 0.0, False

    @property
    def version(self) -> int:
        """Version that the engine samples with."""
        return self._engine.version

    def rollout_finished(self, engine: int, request: Request, spans: VersionSpans) -> None:
        """Report a finished rollout, with the KV cache as it leaves it."""
        self._share = self._engine.kv_cache_share()
        self._host.rollout_finished(engine, request, spans)

    def rollout_preempted(self, engine: int, rollout_id: int, num_tokens: int) -> None:
        """Report a rollout that will be prefilled again."""
        self._preempted = True
        self._host.rollout_preempted(engine, rollout_id, num_tokens)

    def kv_cache_share(self) -> float:
        """Return the share in use when a request ended last; 1 if one was preempted since the last call."""
        share, self._preempted = 1.0 if self._preempted else self._share, False
        return share


class PrefillEngines:
    """The engines that only prefill (mutable).

    A request is served where its prefill ends first, by what each engine was given before, and by the cache it has of
    the rollout's last turn; there no request overtakes another. So on arrival it is known when the KV cache is at the
    decode engine. Transfers do not wait for each other. Caches of turns are kept by ``environment.prefix_cache``, least
    recently used dropped first; others have room. New weights are loaded after all that came before them.
    """

    def __init__(self, config: RunConfig, generation: GenerationConfig, hardware: ResolvedHardware) -> None:
        come_and_go = (config.fleet and config.fleet.groups) or any(one.hits_engine for one in config.faults or ())
        if come_and_go or config.policy is not None or config.scheduler.schedule.carries_over:
            raise ConfigError(
                "generation must be left out with a [policy], fleet.groups, [[faults]] of engines, or partial_rollouts"
            )
        self._caching = PrefixCaching.OFF if config.environment is None else config.environment.prefix_cache
        room = generation.cache_tokens or hardware.kv_cache_tokens or UNLIMITED
        self._caches = [PrefixCache(room) for _ in range(config.num_prefill_engines)]
        self._free = [0] * len(self._caches)  # tick from which each engine is
        self._idle_ticks = 0  # of all engines, before that tick of each
        self._cost, self._pause_ticks = prefill_cost(hardware.prefill), to_ticks(hardware.weights.pause_s)
        self._transfer_ticks = to_ticks(generation.transfer_s)
        self._transfer_token_ticks = to_ticks(cache_transfer_s(config, generation))

    def serve(self, request: Request, now: int) -> int:
        """Prefill a request that arrives now; return the tick at which its KV cache is at its decode engine."""
        rollout_id, tokens, free = request.rollout_id, request.tokens_to_prefill, self._free
        cached = [min(tokens, cache.kept.get(rollout_id, 0)) for cache in self._caches]
        ticks = [self._cost.ticks(tokens, one) for one in cached]
        chosen = min(range(len(free)), key=lambda engine: max(now, free[engine]) + ticks[engine])
        self._work(chosen, now, ticks[chosen])
        request.prefill_ticks += ticks[chosen]
        request.cached_tokens -= tokens - cached[chosen]  # the decode engine finds and counts all of them
        if request.goes_on and self._caching is not PrefixCaching.OFF:
            self._caches[chosen].keep(rollout_id, tokens)
            self._caches[chosen].make_room(0)
        return free[chosen] + self._transfer_ticks + self._transfer_token_ticks * tokens

    def load(self, weight_update: WeightUpdate, now: int) -> None:
        """Have new weights arrive now."""
        for engine, cache in enumerate(self._caches):
            self._work(engine, now, self._pause_ticks)
            if self._caching is PrefixCaching.SALTED or weight_update is WeightUpdate.RECOMPUTE:
                cache.clear()

    def utilisation(self, now: int) -> float:
        """Return the share of the time until now that the engines have prefilled or loaded weights."""
        idle_ticks = self._idle_ticks + sum(max(0, now - free) for free in self._free)
        return 1 - idle_ticks / (len(self._free) * now) if now else 0.0

    def _work(self, engine: int, now: int, ticks: int) -> None:
        self._idle_ticks += max(0, now - self._free[engine])
        self._free[engine] = max(now, self._free[engine]) + ticks


class PrefilledEngine:
    """An engine that decodes what others have prefilled (mutable). It keeps no caches between turns, as in SGLang."""

    def __init__(
        self, clock: Clock, host: EngineHost, engine_id: int, settings: EngineSettings, *,
        make: DecodeEngineFactory, prefill: PrefillEngines,
    ) -> None:  # fmt: skip
        self._clock, self._prefill = clock, prefill
        self._engine = engine = make(clock, host, engine_id, replace(settings, prefix_cache=PrefixCaching.OFF))
        self.update, self.suspend, self.disturb = engine.update, engine.suspend, engine.disturb
        self.kv_cache_share = engine.kv_cache_share
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

    def end(self) -> list[tuple[Request, VersionSpans]]:
        """Return the rollouts in progress, in order of id."""
        coming = [(request, request.spans) for request, _ in self._coming.values()]
        return sorted([*self._engine.end(), *coming], key=lambda pair: pair[0].rollout_id)

    def _arrived(self, wake: Wake) -> None:
        request, current = self._coming.get(wake.tag, (None, None))
        if request is not None and wake is current:  # else it was aborted
            del self._coming[wake.tag]
            self._engine.receive(request, self._prefill.serve(request, self._clock.now))


class GroupCache:
    """Cache of the last drawn group: its rollouts mostly start one after the other (mutable).

    ``policy_prompt_tokens``: length of every prompt of a policy's task. None: chance draws answers and rewards.
    """

    def __init__(
        self, config: RunConfig, workload: Workload, delays: DispatchDelays, policy_prompt_tokens: int | None
    ) -> None:
        self.first = -config.workload.group_size  # rollout
        self.requests: list[Request] = []
        self.delays: list[int] = []  # to the engine (ticks)
        self._size, self._longest = config.workload.group_size, config.workload.length.max
        self._workload, self._delays, self._policy_prompt_tokens = workload, delays, policy_prompt_tokens

    def draw(self, group_id: int, prompt_id: int) -> None:
        """Draw another group."""
        ids = range(group_id * self._size, (group_id + 1) * self._size)
        if self._policy_prompt_tokens is None:
            drawn = self._workload.group(group_id, prompt_id)
            self.requests = list(map(Request, ids, repeat(drawn.prompt_tokens), drawn.lengths, drawn.rewards))
        else:
            self.requests = [Request(one, self._policy_prompt_tokens, self._longest) for one in ids]
        self.delays = self._delays.group(group_id)
        self.first = ids.start


class SimulatedCluster:
    """One simulated run."""

    # Beyond 30 attributes, access is a look-up in a dictionary.
    __slots__ = (
        "_aborted",
        "_aborting",
        "_clock",
        "_config",
        "_delays",
        "_done",
        "_drafting",
        "_drawn",
        "_engines",
        "_environments",
        "_failure",
        "_faults",
        "_fleet",
        "_generating",
        "_group_size",
        "_growth",
        "_interrupted",
        "_longest",
        "_now",
        "_policy",
        "_prefill",
        "_publish_ticks",
        "_recorder",
        "_rewards",
        "_scheduler",
        "_scoring",
        "_stall_watch",
        "_start_rollout",
        "_stop",
        "_to_training_ticks",
        "_tokens",
        "_trainer",
        "_training",
        "_transfer_ticks",
        "_worked_until_s",
        "rollout_finished",
    )

    def __init__(
        self,
        config: RunConfig,
        *,
        engine_factory: DecodeEngineFactory = ClosedFormEngine,
        policy: LearningPolicy | None = None,
        trainer: TrainerAccess | None = None,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Build the cluster; nothing runs yet.

        Without ``policy`` chance gives answers and rewards, and nothing learns. ``trainer`` has the clock, and is
        shared with other clusters on it. ``warn`` gets warnings.
        Raises ConfigError if a file the configuration names cannot be used, or a prompt can never fit.
        """
        check_turns(config)
        self._config = config
        self._recorder: Recorder  # set by run()
        self._now = 0  # of the event being handled
        workload = Workload(config.workload, seed=config.seed)
        policy_prompt_tokens = None if config.policy is None else checked_task(config).prompt_tokens
        longest = _longest_tokens(config, workload, policy_prompt_tokens)
        if config.policy is None:
            _check_capacity(config.hardware.kv_cache_tokens, longest)
        self._policy, self._longest = policy, longest
        hardware = resolved_hardware(config, longest_tokens=longest)
        self._clock = Clock() if trainer is None else trainer.clock
        self._trainer = trainer
        # Nothing is asked per rollout that the configuration answers.
        self.rollout_finished: Callable[[int, Request, VersionSpans], None] = self._rollout_finished
        self._start_rollout: Callable[[StartRollout], None] = self._start_answer
        if config.environment is not None:
            self.rollout_finished, self._start_rollout = self._turn_finished, self._start_turn
        if config.scheduler.admission is not None:
            self.rollout_finished = partial(self._finished_beside_room, self.rollout_finished)
        self._scheduler: Scheduler = new_scheduler(config)
        self._stall_watch = StallWatch(warn)
        self._drafting = None if config.speculation is None else Drafting(config.speculation, seed=config.seed)
        settings = self._engine_settings(config, hardware)
        self._prefill = None if config.generation is None else PrefillEngines(config, config.generation, hardware)
        make = _with_its_surroundings(engine_factory, config, hardware, self._prefill)
        self._publish_ticks, self._transfer_ticks = _weight_ticks(hardware, colocated=config.colocated)
        self._engines: dict[int, SimulatedEngine] = {}  # by engine id
        self._fleet = self._make_engines(partial(make, self._clock, self), settings)
        # Colocated, all until then counts as work that a failure makes to be done again.
        self._faults, self._worked_until_s = _trainer_faults(config), 0.0
        self._training = training_cost(hardware.training, training_accelerators=config.training_accelerators)
        # A rollout in progress is known to its engine alone: small tables stay in the processor's cache. Of a finished
        # one its tokens are kept, prompt included, four bytes until the run ends; 0: not finished.
        self._aborted: dict[int, Request] = {}  # aborted by a weight update, to be started again
        self._rewards: dict[int, float] = {}  # of what is being scored
        self._tokens = array("I")
        self._environments: Environments | None = None
        if config.environment is not None:
            self._environments = Environments(
                self._clock,
                config.environment,
                Episodes(config, workload),
                answers=None if policy is None else policy.answers,
                deliver=self.deliver,
                forget=self._forget,
            )
        self._aborting: set[int] = set()  # to be forgotten once their engines have ended them
        self._group_size = config.workload.group_size
        self._growth = config.workload.length.growth
        self._delays = DispatchDelays(
            fixed_s=hardware.latency.dispatch_s,
            jitter_s=hardware.latency.dispatch_jitter_s,
            group_size=config.workload.group_size,
            seed=config.seed,
        )
        self._drawn = GroupCache(config, workload, self._delays, policy_prompt_tokens)
        self._to_training_ticks = to_ticks(hardware.switch.to_training_s)
        self._scoring = Scoring(hardware.latency)
        self._generating = config.colocated  # colocated only: in the generation phase
        self._stop: StopReason | None = None
        self._failure: RunFailedError | None = None
        self._interrupted = False
        self._done = Happening(self._clock)

    def _make_engines(
        self, make: Callable[[int, EngineSettings], SimulatedEngine], settings: EngineSettings
    ) -> EngineFleet | None:
        config, fleet = self._config, self._config.fleet
        for name in ("fleet", "faults"):
            if getattr(config, name) is not None and config.policy is not None:
                raise ConfigError(f"{name} must be left out with a [policy], whose engines and trainer never fail")
        if any(one.hits_engine for one in config.faults or ()):
            if config.colocated:
                kind = config.scheduler.kind
                raise ConfigError(f"simulated faults of engines need two pools, got scheduler.kind={kind!r}")
            fleet = fleet or FleetConfig()
            own = [FleetGroupConfig(name="engines", engines=config.num_engines)]
            fleet = fleet.model_copy(update={"groups": fleet.groups or own})
        if fleet is None or not fleet.groups:
            self._engines.update((engine, make(engine, settings)) for engine in range(config.num_engines))
            return None
        return EngineFleet(
            config,
            fleet,
            clock=self._clock,
            host=self,
            engines=self._engines,
            make=make,
            settings=lambda group: settings if group.gpu is None else self._settings_of(group.gpu),
            transfer_ticks=self._transfer_ticks,
        )

    def _settings_of(self, gpu: str) -> EngineSettings:
        """Return the settings of engines of another kind of GPU."""
        find_gpu(gpu, key="fleet.groups.gpu")
        given = self._config.hardware
        if named_hardware(given) is None or given.decode is not None or given.kv_cache_tokens is not None:
            raise ConfigError(
                "fleet.groups.gpu needs hardware.gpu and hardware.model, without hardware.decode and "
                f"hardware.kv_cache_tokens, got gpu={gpu!r}"
            )
        other = self._config.model_copy(update={"hardware": given.model_copy(update={"generation_gpu": gpu})})
        return self._engine_settings(other, resolved_hardware(other, longest_tokens=self._longest))

    def _engine_settings(self, config: RunConfig, hardware: ResolvedHardware) -> EngineSettings:
        return EngineSettings(
            decode=decode_cost(
                hardware.decode,
                tensor_parallel=config.cluster.tensor_parallel,
                num_slots=config.scheduler.generation_batch_size,
                speculation=config.speculation_law,
            ),
            prefill=prefill_cost(hardware.prefill),
            kv_cache_tokens=hardware.kv_cache_tokens,
            pause_ticks=to_ticks(hardware.weights.pause_s),
            tokens=None if self._policy is None else self._policy.answers,
            prefix_cache=PrefixCaching.OFF if config.environment is None else config.environment.prefix_cache,
            counts_time=config.environment is not None,
            step_tokens=hardware.step_tokens,
            drafting=self._drafting,
        )

    def run(self, recorder: Recorder) -> None:
        """Run until the scheduler stops; rollouts still in progress then are recorded as aborted.

        Raises RunFailedError if the scheduler gave up, or the run was interrupted; the events until then are recorded.
        """
        if self._config.faults:
            faults = self._config.drawn_faults
            watch = FaultWatch(faults, self._fault_comes, path=Path(TRACE_FILE))
            recorder = FanOut(watch, recorder)
            for fault in faults:
                if self._faults is not None and fault.rank is not None and fault.second is not None:
                    self._faults.strike(fault.second)  # its work is planned beforehand
                elif fault.second is not None:
                    self._after(to_ticks(fault.second), lambda _, fault=fault: watch.comes(fault))  # type: ignore[misc]
        self.begin(recorder)
        self._clock.run_until(self._done)
        self.finish()

    def begin(self, recorder: Recorder) -> SimPyEvent:
        """Make the first decisions; the clock has to run then. Return what happens when the run is over."""
        self._recorder = recorder
        for command in self._scheduler.start():
            recorder.command(0.0, command)
            self._carry_out(command)
        if self._fleet is not None:
            self._fleet.begin()
        return self._done

    def finish(self) -> None:
        """Record rollouts in progress as aborted, and nothing more; raises as ``run``."""
        now_s = to_seconds(self._clock.now)
        for engine_id, engine in self._engines.items():
            for request, spans in engine.end():
                aborted = RolloutAborted(request.rollout_id, engine_id, spans, self._take_seconds(request))
                self._recorder.event(now_s, aborted)
        self._recorder = FanOut()
        if self._failure is not None:
            raise self._failure
        if not self._done.triggered:
            raise RunFailedError("no engine of fleet.groups is left, and none comes back")
        if self._stop is None:
            raise RunInterruptedError("interrupted; what was finished is kept")
        if self._stop is StopReason.STALLED:
            raise stalled(self._scheduler)

    def _fault_comes(self, fault: FaultConfig) -> None:
        if self._fleet is not None and fault.engine is not None:
            self._fleet.suffer(fault)
        elif self._faults is not None and fault.rank is not None:
            self._faults.strike(to_seconds(self._now))

    def measured(self) -> RunMeasurements:
        """Return what the ledger cannot know: of what comes and goes, of drafts, and of caches."""
        cached = None if self._environments is None else self._environments.cached_share
        drafting, comes_and_goes = self._drafting, self._fleet is not None or self._faults is not None
        return RunMeasurements(
            capacity=capacity_report(self._config, self._fleet, self._faults) if comes_and_goes else None,
            cached_share=cached,
            prefill_utilisation=None if self._prefill is None else self._prefill.utilisation(self._clock.now),
            tokens_per_step=drafting.num_tokens / drafting.num_steps if drafting and drafting.num_steps else None,
        )

    def interrupt(self) -> None:
        """End the run at the next event; may be called from a signal handler."""
        self._interrupted = True

    # ---------------------------------------------------------------------------------- from engines

    def _turn_finished(self, engine: int, request: Request, spans: VersionSpans) -> None:
        """Report a finished turn, or a rollout that has finished with it."""
        assert self._environments is not None
        self._aborting.discard(request.rollout_id)
        if not self._environments.goes_on(engine, request, spans):
            self._rollout_finished(engine, request, spans, request.take_seconds())

    def _rollout_finished(
        self, engine: int, request: Request, spans: VersionSpans, seconds: EngineSeconds | None = None
    ) -> None:
        """Report a finished rollout; its score follows unless it takes no time."""
        rollout_id = request.rollout_id
        if self._aborting:
            self._aborting.discard(rollout_id)
        if self._policy is not None:
            request.reward = self._policy.finished(rollout_id, spans)
        self._tokens[rollout_id] = request.prompt_tokens + request.length
        if not self._scoring.takes_time:
            self.deliver(RolloutFinished(rollout_id, engine, spans, request.reward, seconds))
            return
        self._rewards[rollout_id] = request.reward
        self.deliver(RolloutFinished(rollout_id, engine, spans, None, seconds))
        Wake(self._clock, self._scoring.ticks(self._clock.now), CLUSTER_PRIORITY, rollout_id, self._scored)

    def rollout_aborted(self, engine: int, request: Request) -> None:
        """Report a rollout that ended early."""
        rollout_id = request.rollout_id
        self._aborted[rollout_id] = request
        request.num_known = request.spans.num_tokens
        if rollout_id in self._aborting:
            self._aborting.remove(rollout_id)
            self._forget(rollout_id)
        self.deliver(RolloutAborted(rollout_id, engine, request.spans, self._take_seconds(request)))

    def _finished_beside_room(
        self,
        finished: Callable[[int, Request, VersionSpans], None],
        engine: int,
        request: Request,
        spans: VersionSpans,
    ) -> None:
        """Report the room in a KV cache, then that a rollout or turn has finished."""
        self.deliver(KVCacheUsed(engine, self._engines[engine].kv_cache_share()))
        finished(engine, request, spans)

    def _take_seconds(self, request: Request) -> EngineSeconds | None:
        """Return the seconds of a request on its engine, by use; None where rollouts have one turn."""
        return None if self._environments is None else request.take_seconds()

    def rollout_preempted(self, engine: int, rollout_id: int, num_tokens: int) -> None:
        """Report a rollout that will be prefilled again."""
        self.deliver(RolloutPreempted(rollout_id, engine, num_tokens))

    def weights_loaded(self, engine: int, version: int, pause_ticks: int) -> None:
        """Report new weights on an engine."""
        self.deliver(WeightsLoaded(engine, version, to_seconds(pause_ticks)))

    def _scored(self, wake: Wake) -> None:
        self.deliver(RolloutScored(wake.tag, self._rewards.pop(wake.tag)))

    def start_of_turn(self, rollout_id: int) -> int:
        """Return the tokens that a rollout had generated when its turn began (count)."""
        return 0 if self._environments is None else self._environments.start_of_turn(rollout_id)

    def fail(self, error: RunFailedError) -> None:
        """End the run, which has failed."""
        self._failure = error
        self._end()

    # ------------------------------------------------------------------------------------- commands

    def deliver(self, event: Event) -> None:
        """Report an event and carry out the answer."""
        # As now and to_seconds(now), without calls: this comes once per rollout.
        self._now = now = self._clock._now  # type: ignore[assignment] # whole ticks
        now_s = now / TICKS_PER_S
        recorder, start_rollout = self._recorder, self._start_rollout
        recorder.event(now_s, event)
        for command in self._scheduler.handle(event):
            recorder.command(now_s, command)
            if isinstance(command, StartRollout):  # comes once per rollout
                start_rollout(command)
            else:
                self._carry_out(command)
        if self._interrupted:
            self._end()

    def _carry_out(self, command: Command) -> None:
        match command:
            case StartRollout():
                self._start_rollout(command)
            case OpenEnvironment():
                self._open_environment(command)
            case StartTraining():
                if self._trainer is None:
                    self._start_training(command)
                else:
                    self._trainer.ask(partial(self._start_training, command))
            case PublishWeights():
                if self._trainer is None:
                    self._publish(command)
                else:
                    self._trainer.ask(partial(self._publish, command), holds=True)
            case DiscardRollouts():
                for rollout_id in command.rollout_ids:
                    self._forget(rollout_id)
                self._stall_watch.look(to_seconds(self._now), self._scheduler)
            case AbortRollout():
                self._stall_watch.look(to_seconds(self._now), self._scheduler)
                self._aborting.add(command.rollout_id)
                if command.engine in self._engines:  # else it is being lost
                    self._engines[command.engine].abort(command.rollout_id)
            case Stop():
                self._stop = command.reason
                self._end()
            case _:
                assert_never(command)

    def _end(self) -> None:
        if not self._done.triggered:
            self._done.succeed()

    def _start_turn(self, command: StartRollout) -> None:
        assert self._environments is not None
        rollout_id = command.rollout_id
        self._aborted.pop(rollout_id, None)
        group_id, member = divmod(rollout_id, self._group_size)
        delay = self._delays.group(group_id)[member]
        self._engines[command.engine].submit(self._environments.request(rollout_id), self._now + delay)

    def _start_answer(self, command: StartRollout) -> None:
        rollout_id, drawn = command.rollout_id, self._drawn
        member = rollout_id - drawn.first
        if not 0 <= member < self._group_size:
            self._draw(rollout_id // self._group_size, command.prompt_id)
            member = rollout_id - drawn.first
        if self._aborted and rollout_id in self._aborted:  # it goes on where it was aborted
            request = self._aborted.pop(rollout_id)
        else:
            request = drawn.requests[member]
            if self._growth != 1.0:
                request.finish_at(self._grown(request.length, self._engines[command.engine].version))
        if self._policy is not None:
            self._policy.answers.ask(rollout_id, command.prompt_id)
        self._engines[command.engine].submit(request, self._now + drawn.delays[member])

    def _open_environment(self, command: OpenEnvironment) -> None:
        assert self._environments is not None
        group_id, member = divmod(command.rollout_id, self._group_size)
        if group_id * self._group_size != self._drawn.first:
            self._draw(group_id, command.prompt_id)
        self._environments.open(self._drawn.requests[member], command.prompt_id)

    def _draw(self, group_id: int, prompt_id: int) -> None:
        self._drawn.draw(group_id, prompt_id)
        num_rollouts = (group_id + 1) * self._group_size
        self._tokens.extend(repeat(0, num_rollouts - len(self._tokens)))  # nothing for a group drawn again

    def _grown(self, tokens: int, version: int) -> int:
        length = self._config.workload.length
        factor = growth_factor(length, version=version, optimizer_steps=self._config.optimizer_steps)
        return grown_length(tokens, factor=factor, max_tokens=length.max)

    def _start_training(self, command: StartTraining) -> None:
        if self._policy is not None:
            try:
                self._policy.train(command)
            except RunFailedError as error:
                self.fail(error)
                return
        switch_ticks = self._to_training_ticks if self._generating else 0
        if self._fleet is not None:
            switch_ticks += self._fleet.take_back()
        if self._generating and self._config.scheduler.schedule.carries_over:
            for engine in self._engines.values():
                engine.suspend()
        self._generating = False
        tokens = self._tokens
        lengths = [tokens[rollout_id] for rollout_id in command.rollout_ids]
        assert all(lengths)  # they have finished
        train_s = self._training.seconds(lengths, completes_step=command.completes_step)
        if self._config.speculation is not None and command.completes_step:
            train_s += self._config.speculation.refresh_after_s(command.version + 1)
        train_ticks = to_ticks(train_s)
        if self._faults is not None:
            train_ticks = self._with_faults(self._faults, switch_ticks, train_ticks)
        finished = TrainingFinished(command.version + command.completes_step, to_seconds(train_ticks))
        self._after(switch_ticks + train_ticks, lambda _: self._trainer_is_free(finished))

    def _with_faults(self, faults: TrainerFaults, switch_ticks: int, train_ticks: int) -> int:
        """Return the ticks of training with failures and checkpoints; colocated, what was generated is work, too."""
        begin_s = to_seconds(self._now + switch_ticks)
        generating_s = max(0.0, begin_s - self._worked_until_s) if self._config.colocated else 0.0
        work_s = generating_s + to_seconds(train_ticks)
        ticks = max(train_ticks, to_ticks(faults.extend(begin_s - generating_s, work_s) - generating_s))
        self._worked_until_s = begin_s + to_seconds(ticks)
        return ticks

    def _trainer_is_free(self, event: TrainingFinished | WeightsPublished) -> None:
        """Report that the trainer has finished; lend its accelerators if it has nothing to do, and little is ready."""
        self.deliver(event)
        scheduler = self._scheduler
        if self._trainer is not None and scheduler.trainer is not TrainerState.PUBLISHING:
            self._trainer.release()
        waits = scheduler.trainer is TrainerState.IDLE and scheduler.stopped is None
        if waits and self._fleet is not None and scheduler.num_ready < LEND_BELOW * scheduler.settings.micro_batch:
            self._fleet.lend()

    def _publish(self, command: PublishWeights) -> None:
        self._generating = self._config.colocated
        if self._policy is not None:
            self._policy.publish(command.version, oldest=min(engine.version for engine in self._engines.values()))
        published = WeightsPublished(command.version, to_seconds(self._publish_ticks))
        self._after(self._publish_ticks, lambda _: self._trainer_is_free(published))
        arrival = self._clock.now + self._transfer_ticks
        if (prefill := self._prefill) is not None:
            self._after(self._transfer_ticks, lambda _: prefill.load(command.weight_update, arrival))
        engines = self._engines.values() if self._fleet is None else self._fleet.publishes(command)
        for engine in engines:
            engine.update(command.version, command.weight_update, arrival)

    def _forget(self, rollout_id: int) -> None:
        self._aborted.pop(rollout_id, None)
        if self._environments is not None:
            self._environments.forget(rollout_id)
        if self._policy is not None:
            self._policy.forget(rollout_id)

    def _after(self, ticks: int, call: Callable[[Wake], None]) -> None:
        Wake(self._clock, ticks, CLUSTER_PRIORITY, 0, call)


def _with_its_surroundings(
    engine: DecodeEngineFactory, config: RunConfig, hardware: ResolvedHardware, prefill: PrefillEngines | None
) -> EngineFactory:
    make: EngineFactory = engine if prefill is None else partial(PrefilledEngine, make=engine, prefill=prefill)
    if config.scheduler.admission is not None:
        if hardware.kv_cache_tokens is None:
            raise ConfigError("scheduler.admission needs hardware.kv_cache_tokens, or hardware.gpu and hardware.model")
        make = partial(RoomMeter, make=make)
    if hardware.latency.request_s or hardware.latency.report_s:
        make = partial(FrontEnd, make=make, latency=hardware.latency)
    return make


def _trainer_faults(config: RunConfig) -> TrainerFaults | None:
    faults = None if config.fleet is None else config.fleet.trainer
    ranks = [one for one in config.faults or () if one.rank is not None]
    if faults is None:
        if ranks:
            raise ConfigError(f"fleet.trainer is missing; simulated faults need it, got rank={ranks[0].rank}")
        return None
    return TrainerFaults.drawn(faults, accelerators=config.training_accelerators, seed=config.seed)


def _weight_ticks(hardware: ResolvedHardware, *, colocated: bool) -> tuple[int, int]:
    """Return the ticks from the start of a publication until the trainer is free, and engines can load its weights."""
    weights = hardware.weights
    publish_ticks, transfer_ticks = to_ticks(weights.publish_s), to_ticks(weights.transfer_s)
    if not colocated:
        return publish_ticks, transfer_ticks
    # The same accelerators publish and generate: no engine is ready before the publication is over.
    after_publication = publish_ticks - to_ticks(weights.pause_s)
    return publish_ticks, max(transfer_ticks, after_publication) + to_ticks(hardware.switch.to_generation_s)


def _longest_tokens(config: RunConfig, workload: Workload, policy_prompt_tokens: int | None) -> int:
    """Return the most tokens of a rollout in the KV cache, drafted ones included."""
    drafted = 0 if config.speculation is None else config.speculation.tokens
    if config.environment is not None:
        return drafted + config.longest_rollout_tokens
    if policy_prompt_tokens is None:
        return drafted + workload.longest_rollout_tokens
    return drafted + policy_prompt_tokens + config.workload.length.max


def _check_capacity(capacity: int | None, longest: int) -> None:
    """Raise ConfigError if a rollout can be longer than a KV cache given as a number can ever hold."""
    if capacity is not None and longest > capacity:
        raise ConfigError(
            "hardware.kv_cache_tokens must hold the longest prompt of workload.length.source and "
            f"workload.length.max, {longest} tokens in all, got kv_cache_tokens={capacity}"
        )
