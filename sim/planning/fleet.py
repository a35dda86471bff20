"""Spot engines beside reserved ones: how many pay, and at which price or rate of reclaims they do not.

Theory of operation. Engines come and go rarely, compared with an optimizer step. So throughput is, at any time, that of
the engines that are there, X(n), and on average E[X(n)] over the stationary number n: each place is there for a share
of the time that follows from the means alone, independently of the others (a renewal process). X(n) is screened, in
proportion to the plan's own throughput. Engines that end cost more: others prefill their rollouts again, and a failure
loses tokens. Daly's model gives the share of time in which the trainer makes progress, with checkpoints at his
interval. In the rest of the time the whole run stands still.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from pipelinerl.config.fleet import FleetConfig, FleetGroupConfig, SpotOffer, TrainerFaultsConfig
from pipelinerl.config.run import RunConfig, parse_run
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.costs import prefill_s
from pipelinerl.records.plan_report import Band, FleetPlan, FleetRow
from pipelinerl.theory.steady_state import daly_interval, daly_share
from pipelinerl.util.arrays import FloatArray
from sim.planning.choose import TIE
from sim.planning.screen import Candidate, Screener
from sim.planning.space import with_values

PIECES = 8
"""Numbers of reserved engines tried, evenly spread (count)."""
MOST_ENGINES = 2
"""Engines tried at most, over those of the plan (ratio)."""
CHECKPOINT_S, RESTART_S = 20.0, 300.0
"""Time of a checkpoint and of a restart of the trainer, where ``[fleet.trainer]`` does not say (seconds)."""
HOURS = (0.01, 1e5)
"""Mean times until a reclaim between which the answer is looked for (hours)."""


@dataclass(frozen=True, slots=True)
class PlaceShares:
    """What a place of an engine is, on average over time."""

    there: float
    """Share of the time in which its engine takes rollouts."""
    paid: float
    """Share in which it is paid for."""
    ends_per_s: float
    """Engines that end there (1/s)."""
    lost_share: float
    """Of these, those that fail without notice (share)."""


NEVER_THERE = PlaceShares(0.0, 0.0, 0.0, 0.0)


def place_shares(fleet: FleetConfig, group: FleetGroupConfig, *, tensor_parallel: int) -> PlaceShares:
    """Return the shares of a place by the mean times of its group; ``tensor_parallel``: accelerators of an engine."""
    fails = 0.0 if group.mtbf_hours is None else tensor_parallel / (3600 * group.mtbf_hours)
    reclaims = 0.0 if group.reclaim_hours is None else 1 / (3600 * group.reclaim_hours)
    if not fails + reclaims:
        return PlaceShares(1.0, 1.0, 0.0, 0.0)
    lasts_s = 1 / (fails + reclaims)  # machine offered, its start included
    away_s = (fails * group.repair_s + reclaims * (group.away_s or 0.0)) * lasts_s
    # An engine that ends before it has joined is never there.
    there_s = lasts_s * math.exp(-fleet.start_s / lasts_s)
    cycle_s = lasts_s + away_s
    paid = 1.0 if group.kind == "reserved" else lasts_s / cycle_s
    without_notice = fails + (0.0 if group.notice_s else reclaims)
    return PlaceShares(there_s / cycle_s, paid, 1 / cycle_s, without_notice * lasts_s)


def number_there(reserved: int, spot: int, shares: tuple[PlaceShares, PlaceShares]) -> FloatArray:
    """Return the probability of each number of engines that are there, shape [reserved + spot + 1]."""
    first, second = (_binomial(number, one.there) for number, one in zip((reserved, spot), shares, strict=True))
    return np.convolve(first, second).astype(np.float64)


def _binomial(number: int, share: float) -> FloatArray:
    count = np.arange(number + 1)
    choose = np.array([math.comb(number, int(one)) for one in count], dtype=np.float64)
    chances: FloatArray = choose * share**count * (1 - share) ** (number - count)
    return chances


@dataclass(frozen=True, slots=True)
class LongRun:
    """Means over the time of a fleet of reserved and spot engines."""

    reserved: int
    spot: int
    there: float
    """Engines that are there (count)."""
    tokens_per_s: float
    spot_gpus: float
    """Spot GPUs paid for (count)."""
    usd_per_hour: float

    @property
    def usd_per_million_tokens(self) -> float:
        """Money per million tokens (USD); the fleet makes progress."""
        return self.usd_per_hour / (self.tokens_per_s * 3600 / 1e6)


class FleetPlanner:
    """Compares fleets for a candidate whose engines have accelerators of their own.

    ``expected``: its throughput (tokens/s), with its ``band``; ``price``: of a reserved GPU that trains and of one that
    generates (USD per hour); ``mtbf_hours``: of an accelerator, None: it never fails. ConfigError if failures leave the
    trainer no chance to reach its next checkpoint, or engines no time to generate.
    """

    def __init__(
        self,
        candidate: Candidate,
        screener: Screener,
        *,
        expected: float,
        band: Band,
        price: tuple[float, float],
        mtbf_hours: float | None,
    ) -> None:
        self._candidate, self._screener = candidate, screener
        self._expected, self._band, self._price, self._mtbf_hours = expected, band, price, mtbf_hours
        config = candidate.config
        self._engine, self._training = config.cluster.tensor_parallel, config.training_accelerators
        self.engines = config.num_engines
        self._rates = {0: 0.0, self.engines: expected}
        self._screened = screener.screen(candidate).tokens_per_s
        self._own = config.fleet or FleetConfig()
        self._trainer = self._trainer_faults()
        reserved = self.fleet(None, reserved=self.engines, spots=0)
        parse_run(fleet_run(config, reserved).model_dump(mode="json", exclude_none=True), "plan")
        if not self.long_run(reserved).tokens_per_s:
            raise ConfigError(f"plan.mtbf_hours must leave engines time to generate, got {mtbf_hours:g}")

    def rate(self, engines: int) -> float:
        """Return the throughput with so many engines (tokens/s)."""
        if engines not in self._rates:
            other = self._candidate.changed(cluster=cluster_of(self._candidate.config, engines))
            self._rates[engines] = self._expected * self._screener.screen(other).tokens_per_s / self._screened
        return self._rates[engines]

    def _trainer_faults(self) -> TrainerFaultsConfig | None:
        if self._mtbf_hours is None:
            return None
        given = self._own.trainer
        checkpoint_s = CHECKPOINT_S if given is None else given.checkpoint_s
        every_s = daly_interval(checkpoint_s, 3600 * self._mtbf_hours / self._training)
        if given is not None and not checkpoint_s:  # nothing speaks against any interval
            every_s = given.checkpoint_every_s
        return TrainerFaultsConfig(
            mtbf_hours=self._mtbf_hours,
            checkpoint_every_s=every_s,
            checkpoint_s=checkpoint_s,
            restart_s=RESTART_S if given is None else given.restart_s,
        )

    @property
    def trainer_share(self) -> float:
        """Share of its time in which the trainer makes progress."""
        faults = self._trainer
        if faults is None or faults.mtbf_hours is None:
            return 1.0
        return daly_share(
            faults.checkpoint_every_s,
            checkpoint_s=faults.checkpoint_s,
            restart_s=faults.restart_s,
            mtbf_s=3600 * faults.mtbf_hours / self._training,
        )

    def fleet(self, spot: SpotOffer | None, *, reserved: int, spots: int) -> FleetConfig:
        """Return the table ``[fleet]`` of so many engines of each kind."""
        mtbf_hours, groups = self._mtbf_hours, list[FleetGroupConfig]()
        if reserved:
            groups.append(FleetGroupConfig(name="reserved", engines=reserved, mtbf_hours=mtbf_hours))
        if spot is not None and spots:
            groups.append(
                FleetGroupConfig(name="spot", kind="spot", engines=spots, mtbf_hours=mtbf_hours, **dict(spot))
            )
        return self._own.model_copy(update={"groups": groups, "trainer": self._trainer})

    def long_run(self, fleet: FleetConfig) -> LongRun:
        """Return the means over the time of a fleet."""
        numbers, shares = {"reserved": 0, "spot": 0}, dict.fromkeys(("reserved", "spot"), NEVER_THERE)
        usd_per_hour, spot_gpus = self._training * self._price[0], 0.0
        for group in fleet.groups:
            numbers[group.kind] = group.engines
            shares[group.kind] = one = place_shares(fleet, group, tensor_parallel=self._engine)
            paid = group.engines * self._engine * one.paid
            usd_per_hour += paid * (group.price_per_hour or self._price[1])
            spot_gpus += paid if group.kind == "spot" else 0.0
        probability_N = number_there(numbers["reserved"], numbers["spot"], (shares["reserved"], shares["spot"]))
        rate_N = np.array([self.rate(one) for one in range(len(probability_N))])
        there = float(probability_N @ np.arange(len(probability_N)))
        moved = sum(numbers[kind] * self._lost_engine_s(fleet, shares[kind]) for kind in numbers)
        rate = float(probability_N @ rate_N) * max(0.0, 1 - moved / max(there, 1e-300)) * self.trainer_share
        return LongRun(numbers["reserved"], numbers["spot"], there, rate, spot_gpus, usd_per_hour)

    def _lost_engine_s(self, fleet: FleetConfig, place: PlaceShares) -> float:
        """Return the engine-seconds of work that the end of a place's engines costs others, per second."""
        config, answers = self._candidate.config, self._screener.answers
        sequences, context = config.scheduler.generation_batch_size, answers.context
        prefill = self._screener.resolved(config).prefill
        again_s = prefill_s(prefill, sequences=sequences, tokens=sequences * context, squares=sequences * context**2)
        lost_tokens = sequences * min(fleet.stream_tokens, answers.lengths.mean_tokens) / 2
        lost_s = lost_tokens * self.engines / self._expected
        return place.ends_per_s * (again_s + place.lost_share * lost_s)

    def fleets(self, spot: SpotOffer | None) -> Iterator[tuple[LongRun, FleetConfig]]:
        """Yield the reserved fleet, then for fewer reserved engines the fewest spot ones that are as fast."""
        fleet = self.fleet(None, reserved=self.engines, spots=0)
        yield (base := self.long_run(fleet)), fleet
        enough = (1 - TIE) * base.tokens_per_s
        for piece in range(PIECES - 1, -1, -1) if spot is not None else ():
            reserved = round(self.engines * piece / PIECES)
            several = [
                self.fleet(spot, reserved=reserved, spots=spots)
                for spots in range(self.engines - reserved, MOST_ENGINES * self.engines - reserved + 1)
            ]
            place = bisect_left(several, enough, key=lambda one: self.long_run(one).tokens_per_s)
            if place < len(several):
                yield self.long_run(several[place]), several[place]

    def pays(self, spot: SpotOffer) -> bool:
        """Return whether the cheapest fleet has spot engines."""
        return min((run for run, _ in self.fleets(spot)), key=lambda run: run.usd_per_million_tokens).spot > 0

    def flip_price(self, spot: SpotOffer) -> float | None:
        """Return the largest price of a spot GPU-hour that pays (USD); None if none does."""
        base, *others = (run for run, _ in self.fleets(spot))
        prices = [
            spot.price_per_hour
            + (base.usd_per_million_tokens / run.usd_per_million_tokens - 1) * run.usd_per_hour / run.spot_gpus
            for run in others
            if run.spot
        ]
        return max((price for price in prices if price > 0), default=None)

    def flip_hours(self, spot: SpotOffer) -> float | None:
        """Return the shortest mean time until a reclaim that pays (hours); None if none of ``HOURS`` changes that."""

        def pays(hours: float) -> bool:
            return self.pays(spot.model_copy(update={"reclaim_hours": hours}))

        low, high = HOURS
        if pays(low) or not pays(high):
            return None
        while high / low > 1.01:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if pays(middle) else (middle, high)
        return high

    def report(self, spot: SpotOffer | None) -> FleetPlan:
        """Return the fleets compared."""
        runs, fleets = zip(*self.fleets(spot), strict=True)
        best = int(np.argmin([run.usd_per_million_tokens for run in runs]))
        return FleetPlan(
            rows=[self._row(run) for run in runs],
            best=best,
            fleet=fleets[best],
            spot_price=None if spot is None else spot.price_per_hour,
            flip_price=None if spot is None else self.flip_price(spot),
            reclaim_hours=None if spot is None else spot.reclaim_hours,
            flip_hours=None if spot is None else self.flip_hours(spot),
            checkpoint_every_s=None if self._trainer is None else self._trainer.checkpoint_every_s,
            trainer_share=self.trainer_share,
        )

    def _row(self, run: LongRun) -> FleetRow:
        usd = run.usd_per_million_tokens * self._expected
        return FleetRow(
            reserved=run.reserved,
            spot=run.spot,
            there_mean=run.there,
            tokens_per_s=run.tokens_per_s,
            usd_per_hour=run.usd_per_hour,
            usd_per_million_tokens=run.usd_per_million_tokens,
            band=Band(low=usd / self._band.high, high=usd / self._band.low),
        )


def lending(candidate: Candidate, switch_s: float) -> Candidate:
    """Return a candidate whose trainer lends all accelerators that make whole engines while it waits."""
    config = candidate.config
    lent = config.training_accelerators // config.cluster.tensor_parallel
    own = FleetGroupConfig(name="own", engines=config.num_engines)
    groups = [own, *([FleetGroupConfig(name="lent", kind="lent", engines=lent, switch_s=switch_s)] if lent else [])]
    fleet = FleetConfig(groups=groups)
    return replace(candidate, config=config.model_copy(update={"fleet": fleet}), label=f"{candidate.label} lending")


def cluster_of(config: RunConfig, engines: int) -> dict[str, int]:
    """Return the accelerators of so many engines beside the trainer of a run, by key of ``[cluster]``."""
    generating = engines * config.cluster.tensor_parallel
    return {"accelerators": generating + config.training_accelerators, "generation_accelerators": generating}


def fleet_run(config: RunConfig, fleet: FleetConfig) -> RunConfig:
    """Return a run file with another fleet of reserved and spot engines."""
    sizes = cluster_of(config, sum(group.engines for group in fleet.groups))
    return with_values(config, cluster=sizes).model_copy(update={"fleet": fleet})
