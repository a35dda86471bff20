"""Cost in a line, the same words in every report."""

from __future__ import annotations

from collections.abc import Sequence

from pipelinerl.records.cost import CostReport


def cost_line(cost: CostReport, band: Sequence[CostReport] = ()) -> str:
    """Return what a million trained tokens and the run cost.

    Args:
        cost: The cost.
        band: The same with other coefficients, for the range of each number.
    """
    dear, every = cost.usd_per_million_tokens is not None, (cost, *band)
    each = [_amount([one.gpu_hours_per_million_tokens for one in every], " GPU-hours")]
    run = [_amount([one.gpu_hours for one in every], " GPU-hours")]
    if dear:
        each.insert(0, _amount([one.usd_per_million_tokens for one in every], " USD"))
        run.insert(0, _amount([one.usd for one in every], " USD"))
    if cost.kwh is not None:
        run.append(f"at most {_amount([one.kwh for one in every], ' kWh')}")
    return f"{' or '.join(each)} per million trained tokens; {', '.join(run)} for the run"


def _amount(values: Sequence[float | None], unit: str) -> str:
    """Return the first of some numbers, and from which to which they go if there are more."""
    there = [one for one in values if one is not None]
    if not there:
        return f"no{unit}"
    low, high = min(there), max(there)
    return f"{short(there[0])}{unit}{f' ({short(low)} to {short(high)})' if low < high else ''}"


def short(number: float) -> str:
    """Return a number with three digits that count, and with its whole part."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
