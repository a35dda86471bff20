"""The figures of a plan: throughput against lag of every candidate (Fig. 3b of the paper), and against the split."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.canvas import add_legend, handy_scale, house_style, make_panels
from analysis.json_file import FloatArray, JsonTable
from analysis.report import save_figure
from analysis.style import BLUE, COLUMN_IN, INK, MUTED, series_styles
from pipelinerl.errors import ConfigError
from pipelinerl.records.run_folder import PLAN_FILE


@dataclass(frozen=True, slots=True, eq=False)
class Points:
    """Candidates of one kind of scheduler."""

    family: str
    tokens_per_s: FloatArray
    lag_mean: FloatArray
    """Optimizer steps, shape as ``tokens_per_s``."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One simulated candidate."""

    label: str
    family: str
    tokens_per_s: float
    lag_mean: float
    low: float
    """Least throughput of its band."""
    high: float
    """Largest throughput of its band."""


@dataclass(frozen=True, slots=True, eq=False)
class Splits:
    """Screened throughput of the recommendation at every split."""

    generation_accelerators: FloatArray
    levels: dict[str, FloatArray]
    """Tokens/s by level of the coefficients."""
    chosen: float
    """Accelerators that generate in the recommendation."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What figures need of a plan."""

    screened: tuple[Points, ...]
    simulated: tuple[Choice, ...]
    front: tuple[Choice, ...]
    recommended: Choice
    own: Choice | None
    splits: Splits | None
    """None: the recommendation generates and trains on the same accelerators."""


def read_plan(folder: str | Path) -> Plan:
    """Read the ``plan.json`` that ``plan`` wrote.

    Raises:
        ConfigError: If the file is missing or broken; one line that names it.
    """
    data = JsonTable.read(Path(folder) / PLAN_FILE)
    families = data.value("screened.family")
    rates, lags = data.array("screened.tokens_per_s"), data.array("screened.lag_mean")
    if not isinstance(families, list) or not len(families) == len(rates) == len(lags):
        raise ConfigError(f"{data.path}: the columns of screened must be equally long")
    screened = []
    for family in dict.fromkeys(families):
        mine = [index for index, one in enumerate(families) if one == family]
        screened.append(Points(family, rates[mine], lags[mine]))
    simulated = tuple(_choice(one) for one in data.tables("simulated"))
    front = data.value("front")
    recommended = _choice(JsonTable(data.path, data.value("recommended")))
    own = data.value("own")
    return Plan(
        screened=tuple(screened),
        simulated=simulated,
        front=tuple(one for label in front for one in simulated if one.label == label),
        recommended=recommended,
        own=None if own is None else _choice(JsonTable(data.path, own)),
        splits=_splits(data),
    )


def _choice(one: JsonTable) -> Choice:
    rate = one.number("tokens_per_s")
    band = one.data.get("band", {})
    ends = [JsonTable(one.path, level).number("tokens_per_s") for level in band.values()] or [rate]
    return Choice(one.text("label"), one.text("family"), rate, one.number("lag_mean"), min(ends), max(ends))


def _splits(data: JsonTable) -> Splits | None:
    table = data.value("splits")
    if not table:
        return None
    levels = {name: data.array(f"splits.{name}") for name in table if name != "generation_accelerators"}
    chosen = data.number("recommended.cluster.generation_accelerators")
    return Splits(data.array("splits.generation_accelerators"), levels, chosen)


@house_style
def throughput_against_lag(plan: Plan) -> Figure:
    """Draw throughput against mean lag (Fig. 3b): every screened candidate, the simulated ones, their Pareto front.

    Returns:
        One panel; bars through the recommendation and the run file reach from pessimistic to optimistic.
    """
    figure, [[axes]] = make_panels(COLUMN_IN, 2.4)
    scale, word = handy_scale(max(one.tokens_per_s for one in plan.simulated))
    for points in plan.screened:
        style = series_styles([points.family], [0.0])[0]
        axes.plot(
            points.lag_mean,
            points.tokens_per_s / scale,
            ".",
            color=style.color,
            markersize=1.6,
            alpha=0.35,
            markeredgewidth=0,
        )
    for family in dict.fromkeys(one.family for one in plan.simulated):
        style = series_styles([family], [0.0])[0]
        mine = [one for one in plan.simulated if one.family == family]
        lags, rates = [one.lag_mean for one in mine], [one.tokens_per_s / scale for one in mine]
        look: dict[str, Any] = {"color": style.color, "markeredgecolor": "white", "linestyle": "none"}
        axes.plot(lags, rates, style.marker, **look, label=f"{family}, simulated")
    axes.plot(
        [one.lag_mean for one in plan.front],
        [one.tokens_per_s / scale for one in plan.front],
        color=MUTED,
        linewidth=0.7,
        label="Pareto front",
    )
    for choice, marker, name in ((plan.own, "D", "run file"), (plan.recommended, "*", "recommended")):
        if choice is not None:
            axes.vlines(choice.lag_mean, choice.low / scale, choice.high / scale, color=INK, linewidth=0.7)
            axes.plot(choice.lag_mean, choice.tokens_per_s / scale, marker, color=INK, markersize=7, label=name)
    axes.set(xlabel="mean lag (optimizer steps)", ylabel=f"throughput ({word}tokens/s)", xlim=(0, None), ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.grid()
    add_legend(figure, axes)
    return figure


@house_style
def throughput_against_split(splits: Splits) -> Figure:
    """Draw the screened throughput of the recommendation against the split, with its band.

    Returns:
        One panel; the line is the level of the run file, the vertical line the recommended split.
    """
    figure, [[axes]] = make_panels(COLUMN_IN, 1.9)
    scale, word = handy_scale(max(float(one.max()) for one in splits.levels.values()))
    across = splits.generation_accelerators
    if {"optimistic", "pessimistic"} <= splits.levels.keys():
        low, high = splits.levels["pessimistic"] / scale, splits.levels["optimistic"] / scale
        axes.fill_between(across, low, high, color=BLUE, alpha=0.2, linewidth=0, label="pessimistic to optimistic")
    central = splits.levels.get("central", next(iter(splits.levels.values())))
    axes.plot(across, central / scale, color=BLUE, label="screened")
    axes.axvline(splits.chosen, color=MUTED, linewidth=0.8, linestyle="--", label="recommended")
    axes.set(xlabel="accelerators that generate", ylabel=f"throughput ({word}tokens/s)", xlim=(0, None), ylim=(0, None))
    axes.grid()
    add_legend(figure, axes)
    return figure


def save_plan(folder: str | Path, figures: str | Path) -> list[Path]:
    """Draw a plan.

    Args:
        folder: What ``plan`` wrote.
        figures: Where the figures go; made if it does not exist.

    Returns:
        The files, two per figure.

    Raises:
        ConfigError: If the plan is missing or broken.
        OSError: If a file cannot be written.
    """
    plan, figures = read_plan(folder), Path(figures)
    figures.mkdir(parents=True, exist_ok=True)
    paths = save_figure(throughput_against_lag(plan), figures, "plan_throughput_against_lag")
    if plan.splits is not None:
        paths += save_figure(throughput_against_split(plan.splits), figures, "plan_throughput_against_split")
    return paths
