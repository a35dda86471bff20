"""Spot engines beside reserved ones: how many pay, and at which price or rate of reclaims they do not.

Theory of operation. Engines come and go rarely, compared with an optimizer step. So throughput is, at any time, that of
the engines that are there, X(n), and on average E[X(n)] over the stationary number n: each place is there for a share
of the time that follows from the means alone, independently of the others (a renewal process). X(n) is screened, in
proportion to the plan's own throughput. To that come the rollouts that move with each engine that ends, which others
prefill again, and the tokens that a failure loses. The trainer works for the share of time that Daly's model leaves it
at his interval of checkpoints; as it then stands still, so does the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from pipelinerl.config.fleet import FleetConfig, FleetGroupConfig, SpotOffer, TrainerFaultsConfig
from pipelinerl.config.run import RunConfig
from pipelinerl.hardware.costs import prefill_s
from pipelinerl.records.plan_report import Band, FleetPlan, FleetRow
from pipelinerl.theory.checkpoints import daly_interval, daly_share
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


class FleetPlanner:
    """Compares fleets for a candidate whose engines have accelerators of their own.

    ``expected``: its throughput (tokens/s), with its ``band``; ``price``: of a reserved GPU that trains and of one that
    generates (USD per hour).
    """

    def __init__(
        self, candidate: Candidate, screener: Screener, *, expected: float, band: Band, price: tuple[float, float]
    ) -> None:
        self._candidate, self._screener = candidate, screener
        self._expected, self._band, self._price = expected, band, price
        config = candidate.config
        self._engine, self._training = config.cluster.tensor_parallel, config.training_accelerators
        self.engines = config.num_engines
        self._rates: dict[int, float] = {0: 0.0}

    def rate(self, engines: int) -> float:
        """Return the throughput with so many engines (tokens/s)."""
        if engines not in self._rates:
            own, other = (
                self._screener.screen(self._candidate.changed(cluster=self.cluster(number))).tokens_per_s
                for number in (self.engines, engines)
            )
            self._rates[engines] = self._expected * other / own
        return self._rates[engines]

    def cluster(self, engines: int) -> dict[str, int]:
        """Return the accelerators of so many engines with the trainer, by key of ``[cluster]``."""
        generating = engines * self._engine
        return {"accelerators": generating + self._training, "generation_accelerators": generating}

    def fleet(self, spot: SpotOffer | None, mtbf_hours: float | None, *, reserved: int, spots: int) -> FleetConfig:
        """Return the table ``[fleet]`` of so many engines of each kind."""
        own = self._candidate.config.fleet or FleetConfig()
        groups = [FleetGroupConfig(name="reserved", engines=max(1, reserved), mtbf_hours=mtbf_hours)]
        if spot is not None and spots:
            offer = {**dict(spot), "mtbf_hours": mtbf_hours}
            groups.append(FleetGroupConfig(name="spot", kind="spot", engines=spots, **offer))
        trainer = None
        if mtbf_hours is not None:
            given = own.trainer
            checkpoint_s = CHECKPOINT_S if given is None else given.checkpoint_s
            trainer = TrainerFaultsConfig(
                mtbf_hours=mtbf_hours,
                checkpoint_every_s=daly_interval(checkpoint_s, 3600 * mtbf_hours / self._training),
                checkpoint_s=checkpoint_s,
                restart_s=RESTART_S if given is None else given.restart_s,
            )
        return own.model_copy(update={"groups": groups if reserved else groups[1:], "trainer": trainer})

    def long_run(self, fleet: FleetConfig) -> tuple[float, float, float]:
        """Return engines that are there, tokens/s, and money (USD per hour) of a fleet, means over time."""
        numbers = {group.kind: group.engines for group in fleet.groups}
        reserved, spot = numbers.get("reserved", 0), numbers.get("spot", 0)
        shares = {group.kind: place_shares(fleet, group, tensor_parallel=self._engine) for group in fleet.groups}
        none = PlaceShares(0.0, 0.0, 0.0, 0.0)
        both = (shares.get("reserved", none), shares.get("spot", none))
        probability_N = number_there(reserved, spot, both)
        rate_N = np.array([self.rate(one) for one in range(len(probability_N))])
        there = float(probability_N @ np.arange(len(probability_N)))
        moved = sum(
            number * self._lost_engine_s(fleet, one) for number, one in zip((reserved, spot), both, strict=True)
        )
        rate = float(probability_N @ rate_N) * max(0.0, 1 - moved / max(there, 1e-300)) * self.trainer_share(fleet)
        prices = {group.kind: group.price_per_hour or self._price[1] for group in fleet.groups}
        paid = [
            (reserved * self._engine * both[0].paid, prices.get("reserved", 0.0)),
            (spot * self._engine * both[1].paid, prices.get("spot", 0.0)),
        ]
        usd = self._training * self._price[0] + sum(number * each for number, each in paid)
        return there, rate, usd

    def row(self, fleet: FleetConfig) -> FleetRow:
        """Return the numbers of a fleet that makes progress."""
        numbers = {group.kind: group.engines for group in fleet.groups}
        there, rate, usd = self.long_run(fleet)
        per_million = usd / (rate * 3600 / 1e6)
        return FleetRow(
            reserved=numbers.get("reserved", 0),
            spot=numbers.get("spot", 0),
            there_mean=there,
            tokens_per_s=rate,
            usd_per_hour=usd,
            usd_per_million_tokens=per_million,
            band=Band(
                low=per_million * self._expected / self._band.high, high=per_million * self._expected / self._band.low
            ),
        )

    def _lost_engine_s(self, fleet: FleetConfig, place: PlaceShares) -> float:
        """Return the engine-seconds of work that the end of a place's engines costs others, per second."""
        config = self._candidate.config
        sequences, answers = config.scheduler.generation_batch_size, self._screener.answers
        context = answers.context
        prefill = self._screener.resolved(config).prefill
        again_s = prefill_s(prefill, sequences=sequences, tokens=sequences * context, squares=sequences * context**2)
        per_engine = self.rate(self.engines) / self.engines
        lost_tokens = sequences * min(fleet.stream_tokens, answers.lengths.mean_tokens) / 2
        lost_s = lost_tokens / per_engine if per_engine else 0.0
        return place.ends_per_s * (again_s + place.lost_share * lost_s)

    def trainer_share(self, fleet: FleetConfig) -> float:
        """Return the share of its time that the trainer makes progress."""
        faults = fleet.trainer
        if faults is None or faults.mtbf_hours is None:
            return 1.0
        return daly_share(
            faults.checkpoint_every_s,
            checkpoint_s=faults.checkpoint_s,
            restart_s=faults.restart_s,
            mtbf_s=3600 * faults.mtbf_hours / self._training,
        )

    def rows(self, spot: SpotOffer | None, mtbf_hours: float | None) -> Iterator[tuple[FleetRow, FleetConfig]]:
        """Yield the reserved fleet, then for fewer reserved engines the fewest spot ones that are as fast."""
        fleet = self.fleet(None, mtbf_hours, reserved=self.engines, spots=0)
        yield (base := self.row(fleet)), fleet
        enough = (1 - TIE) * base.tokens_per_s
        for piece in range(PIECES - 1, -1, -1) if spot is not None else ():
            reserved = round(self.engines * piece / PIECES)
            low, high = self.engines - reserved, MOST_ENGINES * self.engines - reserved
            while low < high:
                middle = (low + high) // 2
                fleet = self.fleet(spot, mtbf_hours, reserved=reserved, spots=middle)
                low, high = (low, middle) if self.long_run(fleet)[1] >= enough else (middle + 1, high)
            fleet = self.fleet(spot, mtbf_hours, reserved=reserved, spots=low)
            if self.long_run(fleet)[1] >= enough:
                yield self.row(fleet), fleet

    def pays(self, spot: SpotOffer, mtbf_hours: float | None) -> bool:
        """Return whether the cheapest fleet has spot engines."""
        rows = (row for row, _ in self.rows(spot, mtbf_hours))
        return min(rows, key=lambda row: row.usd_per_million_tokens).spot > 0

    def flips(self, spot: SpotOffer, mtbf_hours: float | None) -> tuple[float | None, float | None]:
        """Return the largest spot price (USD per hour) and the shortest mean time until a reclaim (hours) that pay.

        None: no such price is above 0, or no time between ``HOURS`` makes a difference.
        """
        base, *others = (row for row, _ in self.rows(spot, mtbf_hours))
        prices = []
        for row in (one for one in others if one.spot):
            paid = (
                row.usd_per_hour - self._training * self._price[0] - row.reserved * self._engine * self._price[1]
            ) / (spot.price_per_hour)
            allowed = base.usd_per_million_tokens * row.tokens_per_s * 3600 / 1e6
            prices.append(spot.price_per_hour + (allowed - row.usd_per_hour) / paid)
        price = max([one for one in prices if one > 0], default=None)

        def pays(hours: float) -> bool:
            return self.pays(spot.model_copy(update={"reclaim_hours": hours}), mtbf_hours)

        low, high = HOURS
        if pays(low) or not pays(high):
            return price, None
        while high / low > 1.01:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if pays(middle) else (middle, high)
        return price, high


def plan_fleet(planner: FleetPlanner, spot: SpotOffer | None, mtbf_hours: float | None) -> FleetPlan:
    """Return the fleets compared."""
    rows = list(planner.rows(spot, mtbf_hours))
    best = int(np.argmin([row.usd_per_million_tokens for row, _ in rows]))
    fleet = rows[best][1]
    flip_price, flip_hours = (None, None) if spot is None else planner.flips(spot, mtbf_hours)
    return FleetPlan(
        rows=[row for row, _ in rows],
        best=best,
        accelerators=planner.cluster(sum(group.engines for group in fleet.groups))["accelerators"],
        fleet=fleet,
        spot_price=None if spot is None else spot.price_per_hour,
        flip_price=flip_price,
        reclaim_hours=None if spot is None else spot.reclaim_hours,
        flip_hours=flip_hours,
        checkpoint_every_s=None if fleet.trainer is None else fleet.trainer.checkpoint_every_s,
        trainer_share=planner.trainer_share(fleet),
    )


def lending(candidate: Candidate, switch_s: float) -> Candidate:
    """Return a candidate whose trainer lends all accelerators that make whole engines while it waits."""
    config = candidate.config
    lent = config.training_accelerators // config.cluster.tensor_parallel
    own = FleetGroupConfig(name="own", engines=config.num_engines)
    groups = [own, *([FleetGroupConfig(name="lent", kind="lent", engines=lent, switch_s=switch_s)] if lent else [])]
    fleet = FleetConfig(groups=groups)
    return replace(candidate, config=config.model_copy(update={"fleet": fleet}), label=f"{candidate.label} lending")


def fleet_run(config: RunConfig, plan: FleetPlan) -> RunConfig:
    """Return the run file of the cheapest fleet."""
    generating = plan.accelerators - config.training_accelerators
    sizes = {"accelerators": plan.accelerators, "generation_accelerators": generating}
    return with_values(config, cluster=sizes).model_copy(update={"fleet": plan.fleet})
