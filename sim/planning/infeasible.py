"""A plan without a feasible candidate: which limit keeps each kind of scheduler out, and what would relax it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from sim.planning.candidates import Rejected
from sim.planning.search_space import Reason, Space

MOST = 4096
"""Accelerators up to which a size that fits is looked for (count)."""


def why_nothing_is_left(rejected: Sequence[Rejected], space: Space) -> str:
    """Return a line per family: how many candidates each limit rules out, and what would let one in."""
    lines = []
    for family in dict.fromkeys(one.candidate.family for one in rejected):
        mine = [one for one in rejected if one.candidate.family == family]
        counts = Counter(one.reason for one in mine)
        parts = [
            f"{count:,} by {reason.value} ({_relaxed(reason, [one for one in mine if one.reason is reason], space)})"
            for reason, count in counts.most_common()
        ]
        lines.append(f"plan: no feasible {family} among {counts.total():,}: {'; '.join(parts)}")
    return "\n".join(lines) or "plan: there is no candidate; the lists of [plan] leave none for this cluster"


def _relaxed(reason: Reason, mine: Sequence[Rejected], space: Space) -> str:
    """Return what would let in one of the candidates that a reason keeps out."""
    limits, memory, accelerators = space.limits, space.memory, space.config.cluster.accelerators
    screened = [one.screened for one in mine if one.screened is not None]
    match reason:
        case Reason.HEADS:
            whole = [size for size in range(1, accelerators + 1) if memory.heads_divide(size)]
            return f"tensor_parallel of {', '.join(map(str, whole))} would do"
        case Reason.ENGINE_MEMORY:
            sizes = (size for size in range(1, MOST + 1) if memory.heads_divide(size))
            size = next((size for size in sizes if memory.engine_fits(size)), None)
            there = f", and there are {accelerators}" if size is not None and size > accelerators else ""
            return f"fits from tensor_parallel={size} on{there}" if size else "no tensor_parallel would do"
        case Reason.TRAINER_MEMORY:
            fewest = next((n for n in range(1, MOST + 1) if memory.trainer_fits(n)), None)
            if fewest:
                return f"fits from {fewest} training accelerators on"
            packs = "smaller packs or activation_checkpointing in [train.trainer] may help"
            return f"no number of accelerators would do{'' if space.config.train is None else f'; {packs}'}"
        case Reason.LAG:
            return f"lag_limit={min(one.candidate.config.least_max_lag for one in mine)} would do"
        case Reason.MEAN_LAG:
            return f"mean_lag_limit={min(one.estimate.lag_mean for one in screened):.2g} would do"
        case Reason.ESS:
            best = max(limits.ess(one.estimate.lag_mean) or 0.0 for one in screened)
            return f"min_ess={best:.2g} would do"
    hours = min(one.candidate.gpu_hours(one.seconds) for one in screened)
    if reason is Reason.GPU_HOURS:
        return f"gpu_hours={math.ceil(hours):,} would do"
    return f"budget={math.ceil(hours * (limits.price or 0.0)):,} would do"
