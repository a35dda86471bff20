"""Search for the best way to run: screen every candidate, simulate the best, and explain the recommendation.

Theory of operation. ``axes`` lists the choices, ``candidates`` screens them, and ``choose`` says which are simulated,
round by round, with at least two of every kind of schedule. Each is simulated event by event for ``simulate_steps``
optimizer steps, and the second half of these, in whole RL steps, stands for the rest of the run. Outcomes that keep to
the limits, and candidates likely to, are compared over draws of what is not known; what loses least there is simulated
if it was not. ``choose`` ranks the outcomes; ``more_gpus`` and ``explain`` say why. The front-runners are simulated
again with the optimistic and the pessimistic coefficients.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pipelinerl.calibration.measured import Measured, merged
from pipelinerl.config.question import Assumption, asked_of
from pipelinerl.config.run import RunConfig
from pipelinerl.config.run_file import dump_run
from pipelinerl.errors import ConfigError, RunFailedError
from pipelinerl.hardware.coefficients import Level
from pipelinerl.records.cost import Prices
from pipelinerl.records.plan_report import (
    CandidateNumbers,
    CoefficientEffects,
    Decision,
    OwnRun,
    PlannedCandidate,
    PlannedRun,
    PlanReport,
    RunnerUp,
    SearchReport,
)
from pipelinerl.records.run_folder import PLAN_FILE, RECOMMENDED_FILE, check_vacant, make_folder, write_json
from sim.planning.axes import all_choices, check_lists
from sim.planning.candidates import Candidate, Screener, candidate_of, own_candidate, screen_all
from sim.planning.certainty import certainty
from sim.planning.choose import (
    TIE,
    Worth,
    best_of,
    check_lags,
    in_order,
    likely_to_keep,
    next_to_simulate,
    pareto_front,
    round_sizes,
    why_not,
)
from sim.planning.draws import Draws, make_draws
from sim.planning.explain import (
    not_tried,
    preferred_elsewhere,
    screened_columns,
    sensitivity,
    simulated_out,
    split_curve,
    synchronous_is_faster,
    why_infeasible,
    why_none_kept,
)
from sim.planning.more_gpus import bottleneck, verdict
from sim.planning.search_space import SearchSpace
from sim.planning.simulate import HowToPlan, Job, Outcome, Runner, cycle
from sim.planning.uncertainty import Bets
from sim.planning.what_if import compared_with, effects_of

MOST_WAYS = 24
"""Candidates that are compared over draws of what is not known, if no more have been simulated (count)."""
CHANGE = 2 * TIE
"""Relative difference that makes another decision: the recommendation may itself be ``TIE`` below the best."""

Bands = dict[Level, list[Outcome]]
"""Simulations with the other coefficients, by level."""


def plan(
    config: RunConfig,
    how: HowToPlan | None = None,
    *,
    whole: bool = True,
    assumed: Sequence[Assumption] = (),
    effects: bool = True,
) -> PlanReport:
    """Search for the best way to run.

    On Ctrl-C the simulations that have ended are kept, and the best of them is recommended.

    Args:
        config: The run file; its ``plan`` table holds the lists to search and the limits.
        how: Where to, with which processes, beside what. None: as its defaults have it.
        whole: Whether the run file is a way to run as it is, to compare with; else it has placeholders.
        assumed: What of it nobody gave.
        effects: Whether to tell what other values of that would change.

    Raises:
        ConfigError: If the input is wrong or nothing keeps to the limits; nothing is written.
        RunFailedError: If no simulation ended.
    """
    if config.policy is not None:
        raise ConfigError(
            "plan simulates without [policy], with the lengths of [workload]: remove the table, and give "
            f"workload.length as a run with it has them, got policy.task='{config.policy.task}'"
        )
    how = how or HowToPlan()
    out = how.out
    if out is not None:
        check_vacant(out)
    runner = Runner(how)
    with runner.interruptible():
        guessed = {one.key for one in assumed}
        search = _Search(*merged(config, how.measured), run_file=shlex.join(how.run_file), whole=whole, guessed=guessed)
        report, recommended = search.report(search.simulated(runner), runner)
        told = () if runner.interrupted or not effects else assumed
        rows = effects_of(told, report.asked, report.recommended.family)
        other = None if how.against is None else compared_with(*how.against, report.asked)
        report = report.model_copy(update={"assumed": rows, "against": other})
    if out is not None:
        make_folder(out)
        write_json(out / PLAN_FILE, report.to_dict())
        header = f"# Recommended by `pipelinerl plan`: {recommended.label}.\n# {report.recommended.verdict}\n\n"
        (out / RECOMMENDED_FILE).write_text(header + dump_run(recommended.config), encoding="utf-8")
    return report


class _Search:
    """One search: the screening, and the report that follows from the simulations."""

    def __init__(
        self, config: RunConfig, measured: Measured, *, run_file: str, whole: bool, guessed: Collection[str]
    ) -> None:
        self.config, self.run_file, self.whole, self.guessed = config, run_file, whole, guessed
        self.space = SearchSpace.of(config, measured)
        self.plan, self.limits, self.prices = self.space.plan, self.space.limits, Prices.of(config)
        self.choices = all_choices(self.space)
        check_lists(self.space, self.choices)
        self.screener = Screener(config, self.space.answers)
        candidates = (candidate_of(choice, self.space) for choice in self.choices)
        self.kept, self.rejected = screen_all(candidates, self.limits, self.screener)
        if not self.kept:
            raise ConfigError(why_infeasible(self.rejected, self.space))
        self.own = own_candidate(self.space)
        self.steps = min(self.plan.simulate_steps, config.optimizer_steps)

    def simulated(self, runner: Runner) -> list[Outcome]:
        """Simulate in rounds: the run file as it is where it can run, and the candidates most likely to be the best."""
        misfit = self.space.memory.misfit(
            tensor_parallel=self.config.cluster.tensor_parallel, training_accelerators=self.config.training_accelerators
        )
        own = [self.own] if misfit is None and self.whole else []
        number = min(max(1, self.plan.simulate - len(own)), len(self.kept))
        outcomes: list[Outcome] = []
        tried: list[str] = []
        for size in round_sizes(number):
            chosen = next_to_simulate(self.kept, self.limits, size, outcomes=outcomes, tried=tried)
            jobs = [self.job(one, self.config.hardware.level) for one in (*own, *(one.candidate for one in chosen))]
            ended = runner.run("simulations", jobs, before=len(outcomes), total=number + (self.whole and not misfit))
            if not ended:
                break
            outcomes += ended
            tried += [one.candidate.label for one in chosen]
            own = []
        return outcomes

    def job(self, candidate: Candidate, level: Level, *, share: float = 1.0) -> Job:
        """Return a simulation of a share of ``simulate_steps``, but of an RL step at least."""
        least = cycle(candidate) if candidate.schedule.has_rl_steps else 2 * cycle(candidate)
        return Job(candidate, level, min(self.config.optimizer_steps, max(least, round(self.steps * share))))

    def within(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Return the outcomes of the kinds asked for that keep to the limits."""
        return [one for one in outcomes if self._is_asked_for(one) and self._keeps(one)]

    def _is_asked_for(self, outcome: Outcome) -> bool:
        return outcome.candidate.family in self.plan.schedulers

    def _keeps(self, outcome: Outcome) -> bool:
        lag = self.limits.lag
        in_lag = lag is None or outcome.lag_max <= lag
        limits = self.limits.at(outcome.candidate.rented)
        return in_lag and limits.broken(outcome.lag_mean, outcome.gpu_hours, ess=outcome.ess) is None

    def report(self, outcomes: Sequence[Outcome], runner: Runner) -> tuple[PlanReport, Candidate]:
        """Return the content of plan.json, and the recommended candidate.

        Raises:
            ConfigError: If no simulated candidate keeps to the limits.
            RunFailedError: If no simulation ended.
        """
        tried = [one for one in outcomes if self._is_asked_for(one)]
        if not tried:
            raise RunFailedError("; ".join(runner.failures) or "interrupted before the first simulation ended")
        within = self.within(tried)
        simulated = [one.candidate.label for one in outcomes]
        num_left = sum(one.candidate.label not in simulated for one in self.kept)
        if not within and num_left:
            raise ConfigError(why_none_kept(tried, self.space, num_kept=len(self.kept), num_left=num_left))
        if not within:
            raise ConfigError(why_infeasible(self.rejected + simulated_out(tried, self.limits), self.space))
        preferred = preferred_elsewhere(self.space, self.kept)
        draws = make_draws(self.config, self.space.measured, guessed=self.guessed, seed=self.config.seed)
        outcomes, bets = self._compared(outcomes, preferred, draws, runner)
        shares = bets.shares(self._factors(outcomes))

        def worth(one: Outcome) -> float:
            return shares[one.candidate.label]

        ranked = in_order(self.within(outcomes), worth)
        best = ranked[0]
        other = next((one for one in ranked if one.candidate.way != best.candidate.way), None)
        by_family = {
            family: [one for one in ranked if one.candidate.family == family]
            for family in dict.fromkeys(self.plan.schedulers)
        }
        families = {family: best_of(some, worth) if some else None for family, some in by_family.items()}
        own = next((one for one in outcomes if one.candidate.label == self.own.label), None)
        front_runners = [one.candidate for one in (best, other, *families.values(), own) if one is not None]
        bands = self._bands(front_runners, preferred, runner)
        front = pareto_front([(one.tokens_per_s, one.lag_mean) for one in ranked])
        report = PlanReport(
            run=PlannedRun(
                accelerators=self.config.cluster.accelerators,
                optimizer_steps=self.config.optimizer_steps,
                price_per_gpu_hour=self.limits.price,
                lag_limit=self.limits.lag,
                mean_lag_limit=self.limits.mean_lag,
            ),
            asked=asked_of(self.config, whole=self.whole),
            assumed=[],
            search=self._search_report(outcomes, runner),
            warnings=[*self.space.measured.doubts, *self._warnings(families)],
            certainty=certainty(
                self.space,
                bets,
                best,
                expected=best_of(ranked),
                draws=draws,
                factors=self._factors(outcomes),
                screener=self.screener,
                run_file=self.run_file,
                whole=self.whole,
            ),
            recommended=PlannedCandidate(**self._described(best, bands)),
            runner_up=None if other is None else self._runner_up(other, best, worth, bands),
            families={
                family: None if one is None else PlannedCandidate(**self._described(one, bands))
                for family, one in families.items()
            },
            own=None if own is None else self._own(own, best, bands),
            decisions=self._decisions(bands, best),
            simulated=[self._numbers(one) for one in sorted(outcomes, key=lambda one: -one.tokens_per_s)],
            front=[ranked[index].candidate.label for index in front],
            screened=screened_columns(self.kept),
            sensitivity=self._sensitivity(best.candidate, outcomes),
            splits=split_curve(self.space, best.candidate),
        )
        return report, best.candidate

    def _search_report(self, outcomes: Sequence[Outcome], runner: Runner) -> SearchReport:
        return SearchReport(
            candidates=len(self.choices),
            kept=len(self.kept),
            simulated=len(outcomes),
            simulated_steps=self.steps,
            complete=not runner.interrupted and not runner.failures,
            failures=sorted(runner.failures),
            within_limits=sum(map(self._keeps, outcomes)),
            lag_ratios={family: one.ratio for family, one in check_lags(outcomes, self.kept).items()},
            not_tried=not_tried(self.space, self.choices, self.kept, self.rejected),
        )

    def _compared(
        self,
        outcomes: Sequence[Outcome],
        preferred: Mapping[Level, Sequence[Candidate]],
        draws: Draws,
        runner: Runner,
    ) -> tuple[list[Outcome], Bets]:
        """Compare over draws what was simulated, what is preferred elsewhere, and what is likely to keep to the limits.

        What loses least on average is simulated if it was not, and again, until that has been.

        Returns:
            The outcomes with those of these simulations, and the ways that keep to the limits for all that is known.
        """
        runner.say("certainty", 0, 1)
        outcomes, done = list(outcomes), {one.candidate.label for one in outcomes}
        likely = likely_to_keep(self.kept, self.limits, outcomes)
        labels = {one.candidate.label for one in likely}
        others = [way for some in preferred.values() for way in some if way.label in labels]
        if likely:
            others += [one.candidate for one in next_to_simulate(likely, self.limits, MOST_WAYS, outcomes=outcomes)]
        ways = {one.candidate.label: one.candidate for one in self.within(outcomes)}
        unsimulated = {way.label: way for way in others if way.label not in done}
        ways |= dict(list(unsimulated.items())[: max(0, MOST_WAYS - len(ways))])
        bets = Bets.of(self.config, self.space.answers, list(ways.values()), draws)
        runner.say("certainty", 1, 1)
        while True:
            shares = bets.shares(self._factors(outcomes))
            best = max(bets.ways, key=lambda way: shares[way.label])
            if best.label in {one.candidate.label for one in outcomes}:
                return outcomes, bets
            ended = runner.run("the best bet", [self.job(best, self.config.hardware.level)])
            if not self.within(ended):
                bets = bets.without([best.label])
            outcomes += ended

    def _bands(
        self, candidates: Sequence[Candidate], preferred: Mapping[Level, Sequence[Candidate]], runner: Runner
    ) -> Bands:
        """Simulate the front-runners, and what is preferred there, with the other coefficients."""
        jobs = []
        for level, some in preferred.items():
            unique = {one.label: one for one in (*candidates, *some)}
            jobs += [self.job(one, level, share=0.5) for one in unique.values()]
        outcomes = runner.run("optimistic and pessimistic", jobs)
        return {level: [one for one in outcomes if one.level is level] for level in preferred}

    def _decisions(self, bands: Bands, best: Outcome) -> dict[Level, Decision]:
        """Return the recommendation with the coefficients of each level, among the candidates simulated there.

        The decision stays where the recommendation is as fast as that within ``CHANGE``, or the same way to run.
        """
        decisions = {}
        for level, outcomes in bands.items():
            ranked = in_order(self.within(outcomes))
            here = next((one for one in outcomes if one.candidate.label == best.candidate.label), None)
            if ranked and here is not None:
                faster = ranked[0].tokens_per_s / here.tokens_per_s - 1
                same = ranked[0].candidate.way == best.candidate.way or faster <= CHANGE
                decisions[level] = Decision(label=ranked[0].candidate.label, faster=faster, same=same)
        return decisions

    def _runner_up(self, other: Outcome, best: Outcome, worth: Worth, bands: Bands) -> RunnerUp:
        return RunnerUp(**self._described(other, bands), why=why_not(other, best, worth, lambda: self._verdict(other)))

    def _verdict(self, outcome: Outcome) -> str:
        return verdict(outcome, self.screener, self.limits)

    def _warnings(self, families: Mapping[str, Outcome | None]) -> list[str]:
        best = {family: one for family, one in families.items() if one is not None}
        warning = synchronous_is_faster(
            best, self.space, self.screener, tie=TIE, bottleneck=lambda one: bottleneck(one, self.screener)
        )
        return [] if warning is None else [warning]

    def _own(self, own: Outcome, best: Outcome, bands: Bands) -> OwnRun:
        return OwnRun(
            **self._described(own, bands),
            keeps_to_limits=self._keeps(own),
            among_schedulers=self._is_asked_for(own),
            recommended_over_own=best.tokens_per_s / own.tokens_per_s,
        )

    def _described(self, outcome: Outcome, bands: Bands) -> dict[str, Any]:
        """Return the fields of ``PlannedCandidate``."""
        label, config = outcome.candidate.label, outcome.candidate.config
        levels = {outcome.level: outcome} | {
            level: one for level, outcomes in bands.items() for one in outcomes if one.candidate.label == label
        }
        return dict(self._numbers(outcome)) | {
            "cluster": config.cluster,
            "scheduler": config.scheduler,
            "environments": config.environment and config.environment.count,
            "idle": outcome.candidate.idle or None,
            "band": {level: self._numbers(levels[level]) for level in Level if level in levels},
            "verdict": self._verdict(outcome),
        }

    def _numbers(self, outcome: Outcome) -> CandidateNumbers:
        tokens = outcome.tokens_per_s * outcome.seconds
        return CandidateNumbers(
            label=outcome.candidate.label,
            family=outcome.candidate.family,
            tokens_per_s=outcome.tokens_per_s,
            step_s=outcome.step_s,
            hours=outcome.seconds / 3600,
            cost=self.prices.rates(outcome.candidate.rented).cost(outcome.seconds, tokens=tokens),
            lag_mean=outcome.lag_mean,
            lag_max=outcome.lag_max,
            ess=outcome.ess,
            training=outcome.training,
            publishing=outcome.publishing,
            waiting=outcome.waiting,
        )

    def _factors(self, outcomes: Sequence[Outcome]) -> dict[str, float]:
        """Return simulated over screened throughput by label."""
        return {
            one.candidate.label: one.tokens_per_s / self.screener.screen(one.candidate).tokens_per_s for one in outcomes
        }

    def _sensitivity(self, recommended: Candidate, outcomes: Sequence[Outcome]) -> list[CoefficientEffects]:
        factors = self._factors(outcomes)
        pool = [one.candidate for one in next_to_simulate(self.kept, self.limits, 100, outcomes=outcomes)]
        return sensitivity(self.space, recommended, pool, factors, least=CHANGE)
