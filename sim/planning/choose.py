"""Choices of a plan: the next simulations, and the recommendation among their outcomes.

Theory of operation. The screening errs, in the mean lag by about ``lag_error``. So candidates are simulated in rounds,
by their *promise*: the odds that the limits are kept, times the gain in screened tokens/s over the best outcome that
keeps them. After each round the screened lags of a kind of schedule are corrected by its simulations, and their error
is the residual. Rounds do not depend on the number of simulations: more only add to those of fewer.

Candidates are ranked by their expected throughput over the draws, or, averse to risk, by its 10th percentile. The kind
of schedule with the highest rank is recommended. Within it lag decides where it differs: of the outcomes within ``TIE``
of the highest rank, the recommendation is the highest whose mean lag is the least, to ``same_lag``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import median

from sim.planning.screen import Screened, lag_error
from sim.planning.simulate import Outcome
from sim.planning.space import Limits

TIE = 0.03
"""Relative difference in throughput within which the mean lag decides: far below the error of the coefficients."""
SAME_LAG = 0.1
"""Relative difference in mean lag that counts for nothing."""
SAME_LAG_STEPS = 0.25
"""Difference in mean lag that counts for nothing (optimizer steps)."""
FIRST_ROUND = 4
"""Candidates simulated in the first round, each later round having twice as many (count)."""
FROM_EACH_KIND = 2
"""Candidates of each kind of schedule that come first (count)."""
ERRORS = tuple(step / 2 for step in range(-4, 5))
"""Errors of a mean lag with which the odds are found (standard deviations): -2 to 2."""

Rank = Callable[[Outcome], float]
"""What outcomes are ranked by: the larger, the better."""


throughput: Rank = attrgetter("tokens_per_s")
"""The rank of an outcome where all is known (tokens/s)."""
ON_AVERAGE, AT_LOW_END = "on average", "at the 10th percentile"
"""Ranks in words: neutral, and averse to risk."""


def same_lag(lag: float) -> float:
    """Return the difference from a mean lag that counts for nothing (optimizer steps)."""
    return max(SAME_LAG_STEPS, SAME_LAG * lag)


# ------------------------------------------------------------------------------------------- the recommendation


def best_of(outcomes: Sequence[Outcome], rank: Rank = throughput) -> Outcome:
    """Return the recommendation among outcomes that keep to the limits: none of its kind ranks as high at less lag.

    Its kind has the highest rank. More outcomes never cost it more than ``TIE`` of its rank, and any only where a new
    one of the same kind ranks as high within ``TIE`` at a lag less by more than ``same_lag``.
    """
    highest = max(outcomes, key=rank)
    most, family = rank(highest), highest.candidate.family
    as_good = [one for one in outcomes if one.candidate.family == family and rank(one) >= most * (1 - TIE)]
    least = min(one.lag_mean for one in as_good)
    as_fresh = [one for one in as_good if one.lag_mean <= least + same_lag(least)]
    return max(as_fresh, key=lambda one: (rank(one), -one.lag_mean))


def in_order(outcomes: Sequence[Outcome], rank: Rank = throughput) -> list[Outcome]:
    """Return outcomes that keep to the limits, the recommendation first, then each that would follow without it."""
    left, order = list(outcomes), []
    while left:
        order.append(best_of(left, rank))
        left.remove(order[-1])
    return order


def why_not(loser: Outcome, winner: Outcome, rank: Rank, verdict: str, *, ranked: str = ON_AVERAGE) -> str:
    """Return one line: the loss against the recommendation by rank (``ranked``: in words), and why, or that it ties."""
    slower = 1 - rank(loser) / rank(winner)
    lags = f"its mean lag is {loser.lag_mean:.3g} instead of {winner.lag_mean:.3g}"
    if slower > TIE:
        return f"{slower:.0%} slower {ranked}, {lags}; {verdict}"
    return f"a tie: {abs(slower):.1%} {'slower' if slower >= 0 else 'faster'} {ranked}, {lags}"


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the pairs (throughput, lag) that no other beats, by rising lag; of equal ones the first."""
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda one: (points[one][1], -points[one][0], one)):
        if not front or points[index][0] > points[front[-1]][0]:
            front.append(index)
    return front


# ---------------------------------------------------------------------------------------------- the next simulations


def round_sizes(number: int) -> Iterator[int]:
    """Yield the sizes of the rounds that make so many simulations (count)."""
    size = FIRST_ROUND
    while number > 0:
        yield min(size, number)
        number, size = number - size, 2 * size


@dataclass(frozen=True, slots=True)
class LagCheck:
    """Screened mean lags of a kind of schedule against its simulations."""

    ratio: float = 1.0
    """Simulated over screened, the median."""
    doubt: float = 1.0
    """Error that is left, over ``lag_error``."""


def check_lags(outcomes: Sequence[Outcome], kept: Sequence[Screened]) -> dict[str, LagCheck]:
    """Return the check of the screened lags by kind of schedule; ``lag_error`` counts as a simulation."""
    screened = {one.candidate.label: one.estimate.lag_mean for one in kept}
    lags: dict[str, list[tuple[float, float]]] = {}
    for one in outcomes:
        lag = screened.get(one.candidate.label, 0.0)
        if lag > 0:
            lags.setdefault(one.candidate.family, []).append((one.lag_mean, lag))
    checks = {}
    for family, some in lags.items():
        ratio = median(simulated / lag for simulated, lag in some)
        squares = sum(((simulated - ratio * lag) / lag_error(lag)) ** 2 for simulated, lag in some)
        checks[family] = LagCheck(ratio, math.sqrt((1 + squares) / (1 + len(some))))
    return checks


def odds(one: Screened, limits: Limits, check: LagCheck) -> float:
    """Return the odds that a candidate keeps to the limits, by its screening and the simulations of its kind."""
    lag, limits = one.estimate.lag_mean * check.ratio, limits.at(one.candidate.rented)
    error = lag_error(lag) * check.doubt
    weights = [(math.exp(-(size**2) / 2), lag + size * error) for size in ERRORS]
    kept = sum(weight for weight, lag in weights if limits.broken(max(lag, 0.0), one.least_gpu_hours) is None)
    return kept / sum(weight for weight, _ in weights)


def _all_odds(kept: Sequence[Screened], limits: Limits, outcomes: Sequence[Outcome]) -> list[float]:
    checks = check_lags(outcomes, kept)
    return [odds(one, limits, checks.get(one.candidate.family, LagCheck())) for one in kept]


def likely_to_keep(kept: Sequence[Screened], limits: Limits, outcomes: Sequence[Outcome]) -> list[Screened]:
    """Return the candidates that keep to the limits at odds of a half at least."""
    return [one for one, chance in zip(kept, _all_odds(kept, limits, outcomes), strict=True) if chance >= 0.5]


def next_to_simulate(
    kept: Sequence[Screened],
    limits: Limits,
    number: int,
    *,
    outcomes: Sequence[Outcome] = (),
    tried: Sequence[str] = (),
) -> list[Screened]:
    """Return at most ``number`` to simulate next: two of each kind, then promising ones and some of the front in turn.

    Of the Pareto front of throughput against lag, among those that keep the limits at odds of a half at least, come the
    ones with the least lag that are as fast as the fastest within ``TIE``, half, a quarter, 3/4, ... as fast. ``tried``
    has the labels simulated, failed ones included.
    """
    chances = _all_odds(kept, limits, outcomes)
    promises = _promises(kept, chances, [one for one in outcomes if one.breaks(limits) is None])
    order = sorted(range(len(kept)), key=lambda i: (-promises[i], kept[i].estimate.lag_mean))
    ranked = {kept[i].candidate.label: kept[i] for i in order}
    likely = [one for one, chance in zip(kept, chances, strict=True) if chance >= 0.5] or list(kept)
    front = [likely[i] for i in pareto_front([(one.tokens_per_s, one.estimate.lag_mean) for one in likely])]

    first: list[str] = []
    for family in dict.fromkeys(one.candidate.family for one in ranked.values()):
        first += [label for label, one in ranked.items() if one.candidate.family == family][:FROM_EACH_KIND]
    left = dict.fromkeys(label for label in [*([] if tried else first), *ranked] if label not in tried)
    chosen: list[str] = []
    while left and len(chosen) < number:
        label, place = next(iter(left)), len(tried) + len(chosen)
        if place % 2 and (tried or label not in first):
            share = _even_share(place // 2) * front[-1].tokens_per_s
            others = (one.candidate.label for one in front if one.tokens_per_s >= share)
            label = next((one for one in others if one in left), label)
        chosen.append(label)
        del left[label]
    return [ranked[label] for label in chosen]


def _promises(kept: Sequence[Screened], chances: Sequence[float], within: Sequence[Outcome]) -> list[float]:
    """Return the gain of each candidate over the best outcome within the limits and the best of its kind (tokens/s).

    It is multiplied by ``chances``, the odds of each to keep the limits. Ties gain, too; without gain, faster is
    better.
    """
    best: dict[str, float] = {}
    for outcome in within:
        best[outcome.candidate.family] = max(best.get(outcome.candidate.family, 0.0), outcome.tokens_per_s)
    of_all = max(best.values(), default=0.0)
    promises = []
    for one, chance in zip(kept, chances, strict=True):
        rate, of_its_kind = one.tokens_per_s, best.get(one.candidate.family, 0.0)
        gain = sum(max(0.0, rate - known * (1 - TIE)) for known in (of_all, of_its_kind))
        promises.append(chance * (gain + 1e-3 * rate))
    return promises


def _even_share(index: int) -> float:
    """Return a share of the best throughput: just below 1, then spread evenly (van der Corput's sequence)."""
    share, part = 0.0, 0.5
    while index:
        index, bit = divmod(index, 2)
        share, part = share + bit * part, part / 2
    return share or 1 - TIE
