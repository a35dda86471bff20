"""Search for the best way to run: screen every candidate, simulate the best, and explain the recommendation.

Theory of operation. ``space`` lists the choices, ``screen`` screens them, ``choose`` picks the next to simulate, in
rounds, with at least two of every kind of schedule. The second half of the ``simulate_steps``, in whole RL steps,
stands for the rest of a run. Outcomes within the limits, and candidates likely to be, are compared over draws of the
unknowns; the candidate with the highest rank there is simulated if it was not. ``choose`` ranks the outcomes,
``explain`` gives the reasons.

Of answers that grow, the mean grows linearly. Candidates are the plans of the phases, and of all choices the one that
takes the least time over the phases. Each is screened in ``SLICES`` slices of the run. All train on the same answers in
a slice, so seconds add up: a run's throughput is the harmonic mean of its slices', weighted by tokens. One plan
throughout is a sequence, too: the cheapest one never loses.
"""

from __future__ import annotations

import math
import re
import shlex
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pipelinerl.calibration.measured import Measured, merged
from pipelinerl.config.engine import EngineConfig, SpeculationConfig
from pipelinerl.config.fleet import FleetConfig, FleetGroupConfig, SpotOffer, TrainerFaultsConfig
from pipelinerl.config.question import FOUND, Assumption, Question, asked_of, with_placeholders, with_value
from pipelinerl.config.resolve import named_engine, named_hardware
from pipelinerl.config.run import PlanConfig, RunConfig, dump_run, flat, parse_run
from pipelinerl.errors import ConfigError, RunFailedError
from pipelinerl.hardware.costs import DecodeStep, prefill_s
from pipelinerl.records import run_folder
from pipelinerl.records.plan_report import (
    Against,
    Assumed,
    Band,
    CandidateNumbers,
    Changed,
    FleetPlan,
    FleetRow,
    Instead,
    OwnRun,
    PhasesReport,
    PlannedCandidate,
    PlannedRun,
    PlanReport,
    RunnerUp,
    SearchReport,
    SpeculationPlan,
)
from pipelinerl.records.reports import Prices
from pipelinerl.theory.steady_state import daly_interval, daly_share
from pipelinerl.util.arrays import FloatArray
from sim.planning import choose, explain
from sim.planning.certainty import DrawnCandidates, Draws, certainty, effects_of, make_draws, sensitivity, split_curve
from sim.planning.choose import TIE
from sim.planning.screen import Candidate, Screened, Screener, own_candidate, screen_all, within_limits
from sim.planning.simulate import HowToPlan, Job, Outcome, Runner, cycle
from sim.planning.space import BATCH_SIZES, Choice, SearchSpace, all_choices, check_lists, with_values

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
    """Compares fleets for a candidate with engines apart: how many spot engines pay, and when.

    Theory. Engines come and go rarely, compared with an optimizer step. So throughput is, at any time, that of the
    engines that are there, X(n), and on average E[X(n)] over the stationary number n: each place is there for a share
    of the time that follows from the means alone, independently of the others (a renewal process). X(n) is screened, in
    proportion to the plan's own throughput. Engines that end cost more: others prefill their rollouts again, and a
    failure loses tokens. Daly's model gives the share of time in which the trainer makes progress, with checkpoints at
    his interval. In the rest of the time the whole run stands still.

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


MOST_SEQUENCES = 4096
"""Sequences of an engine up to which a loss by speculation is looked for (count)."""
REFRESH_STEP = 1.1
"""Ratio between numbers of optimizer steps from one refresh to the next that are tried."""


def speculating(candidate: Candidate, speculation: SpeculationConfig | None) -> Candidate:
    """Return a candidate whose engines draft so, or not."""
    engine = None if speculation is None else EngineConfig(speculation=speculation)
    label = f"{candidate.label} {'without' if engine is None else 'with'} drafts"
    return replace(candidate, config=candidate.config.model_copy(update={"engine": engine}), label=label)


def gains_by_batch(candidate: Candidate, speculation: SpeculationConfig, screener: Screener) -> FloatArray:
    """Return the speed of an engine that drafts over that without, by sequences of mean context, from 1 on."""
    config, batch = candidate.config, np.arange(1.0, MOST_SEQUENCES + 1, dtype=np.float64)
    decode, size = screener.resolved(config).decode, config.cluster.tensor_parallel
    step = partial(DecodeStep, decode, tensor_parallel=size, most=MOST_SEQUENCES)
    law, context = replace(speculation.law(config.optimizer_steps), off_above=None), batch * screener.answers.context
    ratio: FloatArray = step(speculation=None).of_all(batch, context) / step(speculation=law).of_all(batch, context)
    return ratio


def best_refresh(candidate: Candidate, speculation: SpeculationConfig, screener: Screener) -> tuple[int, float]:
    """Return the optimizer steps between refreshes with the best throughput, and that over the one as given."""

    def rate(one: SpeculationConfig) -> float:
        return screener.screen(speculating(candidate, one)).tokens_per_s

    steps = candidate.config.optimizer_steps
    number = 1 + math.ceil(math.log(steps, REFRESH_STEP))
    tried = {min(steps, round(REFRESH_STEP**power)) for power in range(number)}
    rates = {every: rate(speculation.model_copy(update={"refresh_every": every})) for every in tried}
    best = max(tried, key=lambda every: (rates[every], every))  # of equals the one with the fewest refreshes
    return best, rates[best] / rate(speculation)


def speculation_plan(
    candidate: Candidate, speculation: SpeculationConfig, screener: Screener, *, gain: float
) -> SpeculationPlan:
    """Return the comparison of engines that draft with such that do not; ``gain``: as simulated."""
    gains_B = gains_by_batch(candidate, speculation, screener)
    batches = len(gains_B) - np.argmax(gains_B[::-1] >= 1) if (gains_B >= 1).any() else 0  # up to the last that gains
    every, faster = best_refresh(candidate, speculation, screener) if speculation.decay < 1 else (None, None)
    return SpeculationPlan(
        speculation=speculation,
        gain=gain,
        tokens_per_step=1 / speculation.law(candidate.config.optimizer_steps).mean_steps,
        loses_from=int(batches) + 1 if batches < len(gains_B) else None,
        tail_gain=float(gains_B[0]),
        refresh_every=every,
        refresh_gain=faster,
    )


def cluster_of(config: RunConfig, engines: int) -> dict[str, int]:
    """Return the accelerators of so many engines beside the trainer of a run, by key of ``[cluster]``."""
    generating = engines * config.cluster.tensor_parallel
    return {"accelerators": generating + config.training_accelerators, "generation_accelerators": generating}


def fleet_run(config: RunConfig, fleet: FleetConfig) -> RunConfig:
    """Return a run file with another fleet of reserved and spot engines."""
    sizes = cluster_of(config, sum(group.engines for group in fleet.groups))
    return with_values(config, cluster=sizes).model_copy(update={"fleet": fleet})


# ------------------------------------------------------------------------------------------- other values of a run file

NUM_SPLITS = 8
"""Splits tried where the run file lists none (count)."""
NOT_COMPARED = (*FOUND, "seed", "plan.simulate", "plan.simulate_steps")
"""Keys that may differ between plans of the same question."""


def best_screened(tables: Mapping[str, Any]) -> dict[str, Screened]:
    """Return the fastest of some candidates within the limits by scheduler, fastest first; ConfigError if invalid."""
    config = parse_run(with_placeholders(tables, resized=True)[0])
    space = SearchSpace.of(config.model_copy(update={"plan": _some(config)}))
    best: dict[str, Screened] = {}
    for one in within_limits(space, Screener(config, space.answers)):
        best.setdefault(one.candidate.family, one)
    return best


def _some(config: RunConfig) -> PlanConfig:
    """Return the lists to search, with fewer values where the run file gives none."""
    plan, number = config.plan or PlanConfig(), config.cluster.accelerators
    some = {
        "generation_accelerators": sorted({number * part // NUM_SPLITS // 8 * 8 for part in range(1, NUM_SPLITS)} - {0})
        if number >= 16
        else None,
        "generation_batch_size": [*BATCH_SIZES[::2]],
        "optimizer_steps_per_rl_step": [steps for steps in (2, 8, 32) if steps <= config.optimizer_steps] or None,
        "publish_every": [steps for steps in (1, 4) if steps <= config.optimizer_steps],
    }
    return plan.model_copy(update={name: values for name, values in some.items() if getattr(plan, name) is None})


def _instead(tables: Mapping[str, Any], key: str, value: Any, base: Mapping[str, Screened], family: str) -> Instead:
    """Return the effect of another value of a key on a kind of scheduler, and the kind that is the fastest then."""
    try:
        best = best_screened(with_value(tables, key, value))
    except ConfigError:
        best = {}  # a value that does not go with the others, or nothing that fits
    if family not in best or family not in base:
        return Instead(value=value, throughput=None, fastest=None)
    (before, *_), (now, *_) = base, best
    ratio = best[family].tokens_per_s / base[family].tokens_per_s
    return Instead(value=value, throughput=ratio, fastest=None if now in (before, family) else now)


def _with_choices(
    rows: Sequence[Assumed], assumed: Sequence[Assumption], tables: Mapping[str, Any], family: str
) -> list[Assumed]:
    """Return assumptions, the most influential first, with screened effects of keys that no draw moves."""
    others = {one.key: one.others for one in assumed}
    base = best_screened(tables) if any(not row.instead for row in rows) else {}
    made = []
    for row in rows:
        instead = row.instead or [_instead(tables, row.key, other, base, family) for other in others[row.key]]
        made.append(row.model_copy(update={"instead": instead}))
    return sorted(made, key=lambda row: -row.largest)


def compared_with(name: str, other: PlanReport, tables: Mapping[str, Any]) -> Against:
    """Return another plan, and the effect there of each key that differs in ``tables``, alone, the largest first."""
    before, now = flat(other.asked), flat(tables)
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key) and key not in NOT_COMPARED]
    base, best = best_screened(other.asked) if keys else {}, other.recommended
    changed = [
        Changed(key=key, before=before.get(key), alone=_instead(other.asked, key, now.get(key), base, best.family))
        for key in keys
    ]
    return Against(
        name=name,
        complete=other.search.complete,
        changed=sorted(changed, key=lambda one: -abs((one.alone.throughput or 1.0) - 1)),
        **{field: getattr(best, field) for field in Against.model_fields if hasattr(best, field)},
    )


ASKS_FOR_FLEETS = ("spot", "mtbf_hours", "lend_switch_s")
"""Keys of ``[plan]`` that ask for a comparison of fleets."""
NO_FLEET = (
    "spot engines and failures are compared only for schedules whose engines have accelerators of their own: "
    "plan.schedulers = ['pipeline']"
)
MOST_COMPARED = 24
"""Candidates compared over draws, if no more have been simulated (count)."""
CHANGE = 2 * choose.TIE
"""Relative difference that makes another decision: the recommendation may itself be ``TIE`` below the best."""


def plan(config: RunConfig, how: HowToPlan | None = None, *, assumed: Sequence[Assumption] = ()) -> PlanReport:
    """Search for the best way to run; on Ctrl-C the simulations that have ended are kept.

    The ``plan`` table of ``config``, a complete candidate to compare with, holds the lists to search and the limits.
    ``assumed``: defaults of missing keys.

    Raises:
        ConfigError: If the input is wrong or nothing keeps to the limits; nothing is written.
        RunFailedError: If no simulation ended, or a file cannot be written.
    """
    how = how or HowToPlan()
    report, recommended = searched(config, how, assumed=assumed)
    _keep(how.out, report, recommended)
    return report


def searched(
    config: RunConfig, how: HowToPlan, *, whole: bool = True, assumed: Sequence[Assumption] = (), effects: bool = True
) -> tuple[PlanReport, Candidate]:
    """Return the plan and its candidate; ``whole``: ``config`` is a candidate, else it has placeholders.

    ``effects``: also screen other values of assumed keys that no draw varies.
    """
    if config.policy is not None:
        raise ConfigError(
            "plan simulates without [policy], with the lengths of [workload]: remove the table, and give "
            f"workload.length as a run with it has them, got policy.task='{config.policy.task}'"
        )
    if config.faults is not None:
        raise ConfigError(f"plan searches without [[faults]]: leave them out, got {len(config.faults)}")
    if config.generation is not None:
        raise ConfigError("plan knows no engines that only prefill: remove [generation], and `compare` such runs")
    if config.fleet is not None and config.fleet.groups:
        names = ", ".join(group.name for group in config.fleet.groups)
        raise ConfigError(f"plan searches the engines: give plan.spot in place of fleet.groups, got groups {names}")
    if how.out is not None:
        run_folder.check_vacant(how.out)
    runner = Runner(how)
    with runner.interruptible():
        search = _Search(*merged(config, how.measured), run_file=shlex.join(how.run_file), whole=whole, assumed=assumed)
        report, recommended = search.report(search.simulated(runner), runner)
        if effects and not runner.interrupted:
            rows = _with_choices(report.assumed, assumed, report.asked, report.recommended.family)
            report = report.model_copy(update={"assumed": rows})
        if how.against is not None:
            report = report.model_copy(update={"against": compared_with(*how.against, report.asked)})
    return report.model_copy(update={"made": how.made}), recommended


def _keep(out: Path | None, report: PlanReport, recommended: Candidate) -> None:
    if out is not None:
        run_folder.make_folder(out)
        run_folder.write_json(out / run_folder.PLAN_FILE, report.to_dict())
        header = f"# Recommended by `pipelinerl plan`: {recommended.label}.\n# {report.recommended.verdict}\n\n"
        with run_folder.writing(out):
            (out / run_folder.RECOMMENDED_FILE).write_text(header + dump_run(recommended.config), encoding="utf-8")
            if report.fleet is not None:
                run = dump_run(fleet_run(recommended.config, report.fleet.fleet))
                (out / run_folder.FLEET_FILE).write_text(
                    f"# The same with the cheapest fleet.\n\n{run}", encoding="utf-8"
                )


class _Search:
    """One search: the screening, and the report that follows from the simulations."""

    def __init__(
        self, config: RunConfig, measured: Measured, *, run_file: str, whole: bool, assumed: Sequence[Assumption]
    ) -> None:
        self.config, self.run_file, self.whole, self.assumed = config, run_file, whole, assumed
        self.space = SearchSpace.of(config, measured)
        self.plan, self.limits, self.prices = self.space.plan, self.space.limits, Prices.of(config, assume=True)
        self.compares_fleets = any(getattr(self.plan, name) is not None for name in ASKS_FOR_FLEETS)
        if self.compares_fleets and None in (self.prices.gpu_usd, self.prices.generation_usd):
            keys = " and ".join(f"plan.{name}" for name in ASKS_FOR_FLEETS)
            raise ConfigError(f"{keys} need price.gpu_hour, as the catalogue has no price")
        self.choices = all_choices(self.space)
        check_lists(self.space, self.choices)
        self.screener = Screener(config, self.space.answers)
        self.kept, self.rejected = screen_all(self.space, self.screener, self.choices)
        if not self.kept:
            raise ConfigError(*explain.why_infeasible(self.rejected, self.space))
        self.own = own_candidate(self.space)
        self.steps = min(self.plan.simulate_steps, config.optimizer_steps)
        self.own_runs = whole and self.space.memory.excluded_because(config) is None
        self.total = min(max(self.plan.simulate, 1 + self.own_runs), len(self.kept) + self.own_runs)

    def simulated(self, runner: Runner) -> list[Outcome]:
        """Simulate in rounds: the run file as it is where it can run, and the most promising candidates.

        One of ``plan.simulate`` is left for the candidate with the highest rank over the draws.
        """
        own = [self.own] if self.own_runs else []
        number = max(1, self.total - len(own) - 1)
        outcomes: list[Outcome] = []
        tried: list[str] = []
        for size in (*choose.round_sizes(number), 1):
            if len(tried) >= number and self.within(outcomes):
                break
            chosen = choose.next_to_simulate(self.kept, self.limits, size, outcomes=outcomes, tried=tried)
            jobs = [self.job(one) for one in (*own, *(one.candidate for one in chosen))]
            ended = runner.run(jobs[: self.total - len(outcomes)], before=len(outcomes), total=self.total)
            if not ended:
                break
            outcomes += ended
            tried += [one.candidate.label for one in chosen]
            own = []
        return outcomes

    def job(self, candidate: Candidate) -> Job:
        """Return a simulation of ``simulate_steps``; at least one RL step or two publications."""
        least = cycle(candidate) if candidate.schedule.has_rl_steps else 2 * cycle(candidate)
        return Job(candidate, min(self.config.optimizer_steps, max(least, self.steps)))

    def within(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Return the outcomes of the kinds asked for that keep to the limits."""
        return [one for one in outcomes if self._is_asked_for(one) and one.rejected(self.limits) is None]

    def _is_asked_for(self, outcome: Outcome) -> bool:
        return outcome.candidate.family in self.plan.schedulers

    def report(self, outcomes: Sequence[Outcome], runner: Runner) -> tuple[PlanReport, Candidate]:
        """Return the content of plan.json, and the recommended candidate.

        Raises ConfigError if no simulated candidate keeps to the limits, RunFailedError if no simulation ended.
        """
        tried = [one for one in outcomes if self._is_asked_for(one)]
        if not tried:
            raise RunFailedError("; ".join(runner.failures) or "interrupted before the first simulation ended")
        broken = [(one, rejected) for one in tried if (rejected := one.rejected(self.limits)) is not None]
        if len(broken) == len(tried):
            simulated = [one.candidate.label for one in outcomes]
            num_left = sum(one.candidate.label not in simulated for one in self.kept)
            if num_left:
                raise ConfigError(explain.why_none_kept(broken, self.space, num_kept=len(self.kept), num_left=num_left))
            raise ConfigError(*explain.why_infeasible(self.rejected + [rejected for _, rejected in broken], self.space))
        guessed = {one.key for one in self.assumed}
        draws = make_draws(self.config, self.space.measured, guessed=guessed)
        outcomes, drawn = self._compared(outcomes, draws, runner)

        averse = self.plan.risk == "averse"
        ranked_by = choose.AT_LOW_END if averse else choose.ON_AVERAGE

        def share(one: Outcome) -> float:
            return self._rank(drawn, one.candidate.label)

        ranked = choose.in_order(self.within(outcomes), share)
        best = ranked[0]
        other = next((one for one in ranked if one.candidate.layout != best.candidate.layout), None)
        families = {
            family: choose.best_of(some, share)
            if (some := [one for one in ranked if one.candidate.family == family])
            else None
            for family in self.plan.schedulers
        }
        own = next((one for one in outcomes if one.candidate.label == self.own.label), None)
        left_out = [own.candidate] if own is not None and own.candidate.label not in drawn.shares else []
        known = drawn.with_candidates(self.space, left_out) if left_out else drawn
        described = {
            one.candidate.label: self._described(one, known, own)
            for one in (best, other, own, *families.values())
            if one is not None
        }
        second = None if other is None else described[other.candidate.label]
        found = [one for one in families.values() if one]
        slower = explain.synchronous_is_faster(found, self.space, self.screener, share, ranked=ranked_by)
        front = choose.pareto_front([(one.tokens_per_s, one.lag_mean) for one in ranked])
        report = PlanReport(
            run=PlannedRun(
                accelerators=self.config.cluster.accelerators,
                optimizer_steps=self.config.optimizer_steps,
                price_per_gpu_hour=self.limits.price,
                price_notes=list(self.prices.notes),
                lag_limit=self.limits.lag,
                mean_lag_limit=self.limits.mean_lag,
                risk_averse=averse,
            ),
            asked=asked_of(self.config, whole=self.whole),
            assumed=effects_of(self.assumed, drawn, best.candidate.label),
            search=self._search_report(outcomes, runner),
            warnings=[*self.space.measured.doubts, *filter(None, [slower])],
            certainty=certainty(
                self.space, drawn, best, screener=self.screener, run_file=self.run_file, whole=self.whole
            ),
            recommended=described[best.candidate.label],
            runner_up=None
            if other is None or second is None
            else RunnerUp(**dict(second), why=choose.why_not(other, best, share, second.verdict, ranked=ranked_by)),
            families={
                family: None if one is None else described[one.candidate.label] for family, one in families.items()
            },
            own=None
            if own is None
            else OwnRun(
                **dict(described[own.candidate.label]),
                keeps_to_limits=own.rejected(self.limits) is None,
                among_schedulers=self._is_asked_for(own),
                recommended_over_own=known.expected(best.candidate.label) / known.expected(own.candidate.label),
            ),
            simulated=[self._numbers(one) for one in sorted(outcomes, key=lambda one: -one.tokens_per_s)],
            front=[ranked[index].candidate.label for index in front],
            screened=explain.screened_columns(self.kept),
            sensitivity=sensitivity(drawn, best.candidate.label, least=CHANGE),
            splits=split_curve(self.space, best.candidate, self.screener, drawn.draws),
            stages=explain.stages_of(self.space, best.candidate, self.screener),
        )
        return self._with_speculation(self._with_fleet(report, best, runner), best, runner), best.candidate

    def _with_speculation(self, report: PlanReport, outcome: Outcome, runner: Runner) -> PlanReport:
        """Return the report with the comparison that ``plan.speculate`` asks for, if both simulations end."""
        if (asked := self.plan.speculate) is None:
            return report
        job, best = self.job(outcome.candidate), outcome.candidate
        both = [speculating(best, asked), speculating(best, None)]
        ended = {one.candidate.label: one for one in runner.run([replace(job, candidate=one) for one in both])}
        if len(ended) < len(both):
            return report
        drafts, plain = (ended[one.label].tokens_per_s for one in both)
        compared = speculation_plan(best, asked, self.screener, gain=drafts / plain)
        return report.model_copy(update={"speculation": compared})

    def _with_fleet(self, report: PlanReport, outcome: Outcome, runner: Runner) -> PlanReport:
        """Return the report with the fleets that ``[plan]`` asks for, if the engines of the best can come and go."""
        plan, prices, best = self.plan, self.prices, outcome.candidate
        if not self.compares_fleets:
            return report
        if best.config.colocated:
            return report.model_copy(update={"warnings": [*report.warnings, NO_FLEET]})
        assert prices.gpu_usd is not None  # else the search has not begun
        assert prices.generation_usd is not None
        planner = FleetPlanner(
            best,
            self.screener,
            expected=report.recommended.tokens_per_s,
            band=report.recommended.band,
            price=(prices.gpu_usd, prices.generation_usd),
            mtbf_hours=plan.mtbf_hours,
        )
        fleet = planner.report(plan.spot)
        if plan.lend_switch_s is not None:
            job = self.job(best)
            for lent in runner.run([replace(job, candidate=lending(best, plan.lend_switch_s))]):
                gain = {"lend_switch_s": plan.lend_switch_s, "lend_gain": lent.tokens_per_s / outcome.tokens_per_s}
                fleet = fleet.model_copy(update=gain)
        return report.model_copy(update={"fleet": fleet})

    def _rank(self, drawn: DrawnCandidates, label: str) -> float:
        return drawn.band(label).low if self.plan.risk == "averse" else drawn.shares[label]

    def _search_report(self, outcomes: Sequence[Outcome], runner: Runner) -> SearchReport:
        return SearchReport(
            candidates=len(self.choices),
            kept=len(self.kept),
            simulated=len(outcomes),
            simulated_steps=self.steps,
            complete=not runner.interrupted and not runner.failures,
            failures=sorted(runner.failures),
            within_limits=sum(one.rejected(self.limits) is None for one in outcomes),
            lag_ratios={family: one.ratio for family, one in choose.check_lags(outcomes, self.kept).items()},
            not_tried=explain.not_tried(self.space, self.choices, self.kept, self.rejected),
        )

    def _compared(
        self, outcomes: Sequence[Outcome], draws: Draws, runner: Runner
    ) -> tuple[list[Outcome], DrawnCandidates]:
        """Compare candidates over draws: the simulated ones, and others that are likely to keep to the limits.

        The candidate with the highest rank is simulated if it was not, then the others, up to ``plan.simulate``.
        """
        runner.on_progress("certainty", 0, 1)
        outcomes, done = list(outcomes), {one.candidate.label for one in outcomes}
        likely = choose.likely_to_keep(self.kept, self.limits, outcomes)
        others = choose.next_to_simulate(likely, self.limits, MOST_COMPARED, outcomes=outcomes) if likely else []
        compared = [one.candidate for one in self.within(outcomes)]
        unsimulated = [one.candidate for one in others if one.candidate.label not in done]
        compared += unsimulated[: max(0, MOST_COMPARED - len(compared))]
        drawn = self._corrected(DrawnCandidates.of(self.space, compared, draws), outcomes)
        runner.on_progress("certainty", 1, 1)
        while len(outcomes) < self.total:
            left = [one for one in drawn.candidates if one.label not in done]
            if not left:
                break
            chosen = max(left, key=lambda one: self._rank(drawn, one.label))
            ended = runner.run([self.job(chosen)], before=len(outcomes), total=self.total)
            if not ended:
                break
            done.add(chosen.label)
            outcomes += ended
            drawn = self._corrected(drawn if self.within(ended) else drawn.without(chosen.label), outcomes)
        return outcomes, drawn.with_evidence()

    def _corrected(self, drawn: DrawnCandidates, outcomes: Sequence[Outcome]) -> DrawnCandidates:
        """Return drawn candidates corrected by simulations."""
        screened = [self.screener.screen(one.candidate).tokens_per_s for one in outcomes]
        pairs = zip(outcomes, screened, strict=True)
        return replace(drawn, factors={one.candidate.label: one.tokens_per_s / rate for one, rate in pairs})

    def _described(self, outcome: Outcome, drawn: DrawnCandidates, own: Outcome | None) -> PlannedCandidate:
        config, label = outcome.candidate.config, outcome.candidate.label
        faster = drawn.expected(label) / outcome.tokens_per_s
        expected = replace(
            outcome,
            tokens_per_s=outcome.tokens_per_s * faster,
            step_s=outcome.step_s / faster,
            seconds=outcome.seconds / faster,
        )
        return PlannedCandidate(
            **dict(self._numbers(expected)),
            simulated_tokens_per_s=outcome.tokens_per_s,
            cluster=config.cluster,
            scheduler=config.scheduler,
            environments=None if config.environment is None else config.environment.count,
            idle=outcome.candidate.idle or None,
            band=drawn.band(label),
            over_own=None if own is None else drawn.over(label, own.candidate.label),
            verdict=explain.verdict(outcome, self.screener, self.limits),
        )

    def _numbers(self, outcome: Outcome) -> CandidateNumbers:
        shared = {name: getattr(outcome, name) for name in CandidateNumbers.model_fields if hasattr(outcome, name)}
        tokens = outcome.tokens_per_s * outcome.seconds
        return CandidateNumbers(
            label=outcome.candidate.label,
            family=outcome.candidate.family,
            hours=outcome.seconds / 3600,
            cost=self.prices.rates(outcome.candidate.rented).cost(outcome.seconds, tokens=tokens),
            **shared,
        )


# ---------------------------------------------------------------------------------------- several cases of one question


@dataclass(frozen=True, slots=True)
class PlannedCase:
    """A case and its plan."""

    name: str
    """Its values that differ from the other cases; empty if there is but one."""
    report: PlanReport | None
    """None: nothing keeps to the limits, or nothing fits."""
    failure: str | None = None
    """The reason, or why the report could not be written."""

    @property
    def folder(self) -> str:
        """The name of its folder, of several cases."""
        return re.sub(r"[^\w.]+", "_", self.name)


def plan_cases(question: Question, how: HowToPlan) -> list[PlannedCase]:
    """Plan every case of a question; the first also gets the effects of its assumptions, and is compared.

    On Ctrl-C the case under way keeps its simulations, and later ones are left out. Raises ConfigError if the input is
    wrong or no case keeps to the limits, RunFailedError if no simulation ended.
    """
    for case in question.cases:  # an unknown name is wrong input, and no case that does not fit
        if named := named_hardware(case.config.hardware):
            named_engine(case.config.hardware, *named)
    several, done = len(question.cases) > 1, list[PlannedCase]()
    for case in question.cases:
        before = f"{case.name}: " if several else ""
        planned, first = PlannedCase(case.name, None), all(one.report is None for one in done)
        its = replace(
            how,
            out=how.out and (how.out / planned.folder if several else how.out),
            on_progress=lambda stage, *numbers, before=before: how.on_progress(before + stage, *numbers),
            run_file=(*how.run_file, *(word for one in case.sets for word in ("--set", one))),
            against=how.against if first else None,
        )
        try:
            report, recommended = searched(case.config, its, whole=case.whole, assumed=question.assumed, effects=first)
        except (ConfigError, RunFailedError) as error:
            done.append(replace(planned, failure=str(error)))
            stop = isinstance(error, RunFailedError) or case is question.cases[-1]
            if stop and first:
                raise type(error)(*(line for one in done for line in (one.failure or "").splitlines())) from None
        else:
            try:
                _keep(its.out, report, recommended)
            except (ConfigError, RunFailedError) as error:
                planned = replace(planned, failure=str(error))
            done.append(replace(planned, report=report))
            stop = not report.search.complete
        if stop:
            break
    return done


# ---------------------------------------------------------------------------------- answers that grow: which plan when

SLICES = 16
"""Equal parts of a run between which a switch is possible (count)."""
PLAN_SWITCH_S = 600.0
"""Assumed time of a switch: a checkpoint, engines and trainer that start again, rollouts that are lost (seconds)."""


def compare_phases(question: Question, cases: Sequence[PlannedCase], how: HowToPlan) -> PhasesReport | None:
    """Return when to switch between the plans of growing answers; None if no plan is known for all."""
    if question.growth is None or len(cases) < len(question.cases):
        return None
    first, last = question.growth
    configs = [merged(case.config, how.measured) for case in question.cases]
    (base, measured), *_ = configs
    phases = [_screened(config, measured) for config, _ in configs]
    known = {label: one for phase in phases for label, one in phase.items()}
    planned = [case.report.recommended.label.removesuffix(" (run file)") for case in cases if case.report is not None]
    in_all = sorted(set.intersection(*map(set, phases)))
    best = sorted(in_all, key=lambda label: sum(_answer_s(phase[label]) for phase in phases))
    labels = [label for label in dict.fromkeys([*planned, *best[:1]]) if label in known]
    choices = [known[label].candidate.choice for label in labels]
    ends = [round(base.optimizer_steps * (part + 1) / SLICES) for part in range(SLICES)]
    seconds_CS = np.full((len(labels), SLICES), np.inf)
    for part, steps in enumerate(np.diff(ends, prepend=0)):
        mean = first + (last - first) * (part + 0.5) / SLICES
        length = base.workload.length.model_copy(update={"mean": mean})
        here = _screened(with_values(base, workload={"length": length}), measured, choices)
        for row, label in enumerate(labels):
            if label in here:
                seconds_CS[row, part] = steps * base.scheduler.train_batch_size * _answer_s(here[label])
    alone_C = seconds_CS.sum(axis=1)
    if not np.isfinite(alone_C.min(initial=np.inf)):
        return None
    total_s, path = cheapest(seconds_CS, PLAN_SWITCH_S)
    return PhasesReport(
        restart_s=PLAN_SWITCH_S,
        plans=[
            (labels[path[part]], ends[part], first + (last - first) * (part + 1) / SLICES)
            for part in range(SLICES)
            if part == SLICES - 1 or path[part] != path[part + 1]
        ],
        hours=total_s / 3600,
        hours_without_restarts=seconds_CS.min(axis=0).sum() / 3600,
        single=labels[int(alone_C.argmin())],
        single_hours=alone_C.min() / 3600,
    )


def with_phases(cases: Sequence[PlannedCase], phases: PhasesReport, out: Path | None) -> list[PlannedCase]:
    """Return the plans of the phases with their order, written to their folders in ``out`` again."""

    def ordered(one: PlannedCase) -> PlannedCase:
        if one.report is None or one.failure is not None:
            return one
        report, failure = one.report.model_copy(update={"phases": phases}), None
        if out is not None:
            try:
                run_folder.write_json(out / one.folder / run_folder.PLAN_FILE, report.to_dict())
            except (ConfigError, RunFailedError) as error:
                failure = str(error)
        return replace(one, report=report, failure=failure)

    return [ordered(one) for one in cases]


def cheapest(seconds_CS: np.ndarray, restart_s: float) -> tuple[float, list[int]]:
    """Return the least time of a run from those of slice S with candidate C, and the candidate of each slice."""
    total_C, before = seconds_CS[:, 0], list[np.ndarray]()
    for seconds_C in seconds_CS.T[1:]:
        other = int(total_C.argmin())
        before.append(np.where(total_C[other] + restart_s < total_C, other, np.arange(len(total_C))))
        total_C = np.minimum(total_C, total_C[other] + restart_s) + seconds_C
    path = [int(total_C.argmin())]
    for from_C in reversed(before):
        path.append(int(from_C[path[-1]]))
    return float(total_C.min()), path[::-1]


def _screened(config: RunConfig, measured: Measured, choices: Sequence[Choice] | None = None) -> dict[str, Screened]:
    """Return the choices that may keep to the limits, by label; None: of all."""
    space = SearchSpace.of(config, measured)
    kept, _ = screen_all(space, Screener(config, space.answers), choices)
    return {one.candidate.label: one for one in kept}


def _answer_s(one: Screened) -> float:
    """Return the seconds of a trained answer."""
    return one.estimate.step_s / one.candidate.config.scheduler.train_batch_size
