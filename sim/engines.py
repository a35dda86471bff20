"""The engines of a simulated fleet: they join, get notice and leave by the lives of their machines.

Theory of operation. Each place of a group has one engine at a time, or none. It is in one of five states, whose
seconds are added up. From the return of its machine on an engine is ``starting``: for ``start_s``, not where a run says
that it has started, then while it loads the newest weights published by then, as long as a transfer and a pause take.
It joins with them and is ``there`` until its life ends; then the place is ``failed`` or ``reclaimed``. Machines that
are there at second 0 are loaded. An engine that fails has reported the tokens of its rollouts at every multiple of
``stream_tokens``; one that is reclaimed with notice, all of them. A rollout's last token is known only with its end.

A lent engine joins when the trainer begins to wait with little ready. When the trainer has a batch, the engine leaves,
all its tokens are known, and the trainer trains after the switch; the place is in state ``training`` then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from pipelinerl.config.faults import FaultConfig
from pipelinerl.config.fleet import FleetConfig, FleetGroupConfig
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import RunFailedError
from pipelinerl.records.reports import CapacityReport, FleetGroupReport, Prices, TrainerFaultsReport
from pipelinerl.scheduler import events
from pipelinerl.scheduler.slots import ID_LIMIT
from sim.clock import CLUSTER_PRIORITY, Clock, Wake, to_seconds, to_ticks
from sim.fleet import Life, LifeEnd, TrainerFaults, lives
from sim.interface import EngineSettings, Request, SimulatedEngine

THERE, STARTING, TRAINING = "there", "starting", "training"
WITH_TRAINER = Life(0.0, 0.0, 0.0, LifeEnd.RECLAIMED, 1.0)


class FleetHost(Protocol):
    """The cluster, as its fleet knows it."""

    def deliver(self, event: events.Event) -> None:
        """Report an event and carry out the answer."""

    def rollout_aborted(self, engine: int, request: Request) -> None:
        """Report a rollout that ended early; it keeps the tokens it has."""

    def start_of_turn(self, rollout_id: int) -> int:
        """Return the tokens that a rollout had generated when its turn began (count)."""

    def fail(self, error: RunFailedError) -> None:
        """End the run, which has failed."""


@dataclass(slots=True)
class Place:
    """A place of a group (mutable)."""

    group: FleetGroupConfig
    lives: Iterator[Life]
    engine: int | None
    """Its engine, if one is there or leaving."""
    life: Life
    state: str = LifeEnd.RECLAIMED
    since: int = 0
    """Tick at which the state began."""
    ticks: dict[str, int] = field(default_factory=lambda: dict.fromkeys((THERE, STARTING, TRAINING, *LifeEnd), 0))
    ended: dict[LifeEnd, int] = field(default_factory=lambda: dict.fromkeys(LifeEnd, 0))
    """Engines that ended, by cause (counts)."""
    due: list[FaultConfig] = field(default_factory=list)
    """Faults that wait for its engine."""


class EngineFleet:
    """Brings engines and takes them away (mutable). ``engines``: those of the cluster, which it changes."""

    def __init__(
        self,
        config: RunConfig,
        fleet: FleetConfig,
        *,
        clock: Clock,
        host: FleetHost,
        engines: dict[int, SimulatedEngine],
        make: Callable[[int, EngineSettings], SimulatedEngine],
        settings: Callable[[FleetGroupConfig], EngineSettings],
        transfer_ticks: int,
    ) -> None:
        self.leaving: set[int] = set()
        self._cut: dict[int, Place] = {}  # by engine: its next transfer fails
        self._fleet, self._clock, self._host, self._engines = fleet, clock, host, engines
        self._make, self._transfer_ticks = make, transfer_ticks
        self._settings = {group.name: settings(group) for group in fleet.groups}
        starts = {group.name: 0.0 if group.comes_started else fleet.start_s for group in fleet.groups}
        self._start_ticks = {name: to_ticks(start_s) for name, start_s in starts.items()}
        self._published: events.PublishWeights | None = None
        self._places: list[Place] = []
        self._lent: list[Place] = []
        for group in fleet.groups:
            if group.kind == "lent":
                self._lent = [Place(group, iter(()), None, WITH_TRAINER, TRAINING) for _ in range(group.engines)]
                continue
            for here in lives(group, seed=config.seed, tensor_parallel=config.cluster.tensor_parallel):
                first = next(here, Life(math.inf, math.inf, math.inf, LifeEnd.RECLAIMED, 1.0))
                self._places.append(Place(group, here, len(self._places), first))
        for engine, place in enumerate(self._places):
            engines[engine] = make(engine, self._of(place, version=0))
        self._num_engines = self._num_started = len(self._places)

    def begin(self) -> None:
        """Begin all lives; engines without a machine at second 0 leave at once."""
        for place in self._places:
            if place.life.start_s:
                self._lose(place, with_notice=True)
                self._await(place)
            else:
                self._enter(place, THERE)
                self._plan_end(place)
        self.lend()

    def lend(self) -> None:
        """Have the trainer's accelerators generate, if they do not."""
        for place in self._lent:
            if place.life is WITH_TRAINER:
                place.life = Life(0.0, math.inf, math.inf, LifeEnd.RECLAIMED, 1.0)
                self._enter(place, STARTING)
                self._after(self._switch_ticks(place), partial(self._load, place, place.life))

    def take_back(self) -> int:
        """Have them train again; return the ticks until they can."""
        if not self._lent or self._lent[0].life is WITH_TRAINER:
            return 0
        self._after(0, self._end_lending)
        return self._switch_ticks(self._lent[0])

    def _end_lending(self) -> None:
        for place in self._lent:
            place.life = WITH_TRAINER
            self._enter(place, TRAINING)
            self._lose(place, with_notice=True)

    @staticmethod
    def _switch_ticks(place: Place) -> int:
        return to_ticks(place.group.switch_s or 0.0)

    def publishes(self, command: events.PublishWeights) -> Iterator[SimulatedEngine]:
        """Note a publication; yield the engines that take it."""
        self._published = command
        for engine_id, engine in self._engines.items():
            if engine_id in self.leaving:
                continue
            if (place := self._cut.get(engine_id)) is None:
                yield engine
            else:
                self._after(self._transfer_ticks, partial(self._kill, place, engine_id))

    def _of(self, place: Place, *, version: int, factor: float = 1.0) -> EngineSettings:
        settings, factor = self._settings[place.group.name], factor * place.life.slowdown
        if factor != 1.0:
            settings = replace(settings, decode=settings.decode.slower(factor), prefill=settings.prefill.slower(factor))
        return replace(settings, version=version)

    # ----------------------------------------------------------------------------------------- a life

    def _enter(self, place: Place, state: str) -> None:
        now = self._clock.now
        place.ticks[place.state] += now - place.since
        place.state, place.since = state, now

    def _at(self, time_s: float, call: Callable[[], None]) -> None:
        """Call at a second of the run, or now if that is over; never if it is infinite."""
        if time_s < math.inf:
            self._after(max(0, to_ticks(time_s) - self._clock.now), call)

    def _after(self, ticks: int, call: Callable[[], None]) -> None:
        Wake(self._clock, ticks, CLUSTER_PRIORITY, 0, lambda _: call())

    def _await(self, place: Place) -> None:
        self._at(place.life.start_s, partial(self._start, place))

    def _start(self, place: Place) -> None:
        self._num_started += 1
        if self._num_started == ID_LIMIT:
            self._host.fail(
                RunFailedError(f"engines of fleet.groups have started {ID_LIMIT:,} times; they end too soon")
            )
        self._enter(place, STARTING)
        self._plan_end(place)
        self._after(self._start_ticks[place.group.name], partial(self._load, place, place.life))

    def _load(self, place: Place, life: Life) -> None:
        """Load the newest weights; others may be on their way when the engine joins."""
        version = 0 if self._published is None else self._published.version
        pause_ticks = self._settings[place.group.name].pause_ticks
        self._after(self._transfer_ticks + pause_ticks, partial(self._join, place, life, version))

    def _join(self, place: Place, life: Life, version: int) -> None:
        now, published = self._clock.now, self._published
        if place.life is not life or (life.notice_at_s < math.inf and now >= to_ticks(life.notice_at_s)):
            return  # it has ended meanwhile, or is about to
        place.engine, self._num_engines = self._num_engines, self._num_engines + 1
        self._engines[place.engine] = engine = self._make(place.engine, self._of(place, version=version))
        self._enter(place, THERE)
        self._host.deliver(events.EngineJoined(place.engine, version))
        if published is not None and published.version != version:
            engine.update(published.version, published.weight_update, now + self._transfer_ticks)
        due, place.due = place.due, []
        for fault in due:
            self.suffer(fault)

    def _plan_end(self, place: Place) -> None:
        life = place.life
        if life.notice_at_s < life.end_s:
            self._at(life.notice_at_s, partial(self._give_notice, place))
        self._at(life.end_s, partial(self._end, place))

    def _give_notice(self, place: Place) -> None:
        if place.engine is not None:
            self.leaving.add(place.engine)
            self._host.deliver(events.EngineLeaving(place.engine))

    def _end(self, place: Place) -> None:
        life = place.life
        self._lose(place, with_notice=life.cause is LifeEnd.RECLAIMED and life.notice_at_s < life.end_s)
        self._enter(place, life.cause)
        place.ended[life.cause] += 1
        following = next(place.lives, None)
        if following is not None:
            place.life = following
            self._await(place)

    def _lose(self, place: Place, *, with_notice: bool) -> None:
        """Take the engine of a place away, if it has one; its rollouts keep the tokens that are known."""
        engine_id, place.engine = place.engine, None
        if engine_id is None:
            return
        if engine_id not in self.leaving:
            self.leaving.add(engine_id)
            self._host.deliver(events.EngineLeaving(engine_id))
        num_lost = 0
        for request, spans in self._engines.pop(engine_id).end():
            num_known = self._num_known(request, spans, every=1 if with_notice else self._fleet.stream_tokens)
            num_lost += spans.num_tokens - num_known
            request.keep(events.first_tokens(spans, num_known))
            self._host.rollout_aborted(engine_id, request)
        self.leaving.remove(engine_id)
        self._host.deliver(events.EngineLeft(engine_id, num_lost))

    def _num_known(self, request: Request, spans: events.VersionSpans, *, every: int) -> int:
        if not self._fleet.keep_tokens:
            return self._host.start_of_turn(request.rollout_id)
        reported = min(spans.num_tokens, request.length - 1) // every * every
        return max(request.num_known, reported)

    # ----------------------------------------------------------------------------------------- faults

    def suffer(self, fault: FaultConfig) -> None:
        """Have a fault come to the engine of a place, or its next one; ``cut`` at once, others in the next event."""
        assert fault.engine is not None  # drawn
        place = self._places[fault.engine]
        if place.engine is None:
            place.due.append(fault)
        elif fault.kind == "cut":
            self._cut[place.engine] = place
        else:
            self._after(0, partial(self._strike, place, place.engine, fault))

    def _strike(self, place: Place, engine: int, fault: FaultConfig) -> None:
        ticks = to_ticks(fault.seconds or 0.0)
        if fault.kind == "kill":
            self._kill(place, engine)
        elif fault.factor is None:
            self._disturb(place, engine, still_ticks=ticks)
        else:
            self._disturb(place, engine, factor=fault.factor)
            self._after(ticks, partial(self._disturb, place, engine))

    def _disturb(self, place: Place, engine: int, *, still_ticks: int = 0, factor: float = 1.0) -> None:
        if place.engine == engine:
            self._engines[engine].disturb(still_ticks, self._of(place, version=0, factor=factor))

    def _kill(self, place: Place, engine: int) -> None:
        """End an engine, whose machine stays, and start one in its place."""
        if place.engine == engine:
            self._lose(place, with_notice=False)
            place.ended[LifeEnd.FAILED] += 1
            self._enter(place, STARTING)
            self._after(to_ticks(self._fleet.start_s), partial(self._load, place, place.life))

    # ---------------------------------------------------------------------------------------- results

    def groups(self, config: RunConfig) -> list[FleetGroupReport]:
        """Return the numbers of each group up to now."""
        everywhere = [*self._places, *self._lent]
        for place in everywhere:
            self._enter(place, place.state)
        run_s, each = to_seconds(self._clock.now), config.cluster.tensor_parallel
        hours, price = run_s / 3600, Prices.of(config).generation_usd
        reports = []
        for group in self._fleet.groups:
            places = [one for one in everywhere if one.group is group]
            seconds = {state: to_seconds(sum(one.ticks[state] for one in places)) for state in places[0].ticks}
            mean = {state: value / run_s if run_s else 0.0 for state, value in seconds.items()}
            paid = {"reserved": float(len(places)), "spot": mean[THERE] + mean[STARTING], "lent": 0.0}[group.kind]
            own = None if group.gpu is not None else price
            usd = own if group.price_per_hour is None else group.price_per_hour
            reports.append(
                FleetGroupReport(
                    name=group.name,
                    engines=group.engines,
                    **{f"{state}_mean": value for state, value in mean.items()},
                    failures=sum(one.ended[LifeEnd.FAILED] for one in places),
                    reclaims=sum(one.ended[LifeEnd.RECLAIMED] for one in places),
                    gpus_paid=paid * each,
                    usd_per_gpu_hour=usd,
                    usd=None if usd is None else paid * each * usd * hours,
                )
            )
        return reports


def capacity_report(config: RunConfig, fleet: EngineFleet | None, faults: TrainerFaults | None) -> CapacityReport:
    """Return what the fleet and the trainer's failures made of a run."""
    trainer = None
    if faults is not None:
        trainer = TrainerFaultsReport(
            failures=faults.num_failures,
            checkpoint_s=faults.checkpoint_s,
            restart_s=faults.restart_s,
            redone_s=faults.redone_s,
        )
    return CapacityReport(groups=[] if fleet is None else fleet.groups(config), trainer=trainer)
