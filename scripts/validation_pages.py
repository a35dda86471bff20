"""Write the numbers of the pages on published runs anew, from one ``validate`` of the shipped rows: two minutes.

    python scripts/validation_pages.py

A part is between ``<!--validate NAME-->`` and ``<!--end-->``. Then ``draw_figures.py validation`` for the picture.
"""

from __future__ import annotations

import math
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from pipelinerl.pages.evidence import validation_cells
from pipelinerl.pages.page import markdown_table
from pipelinerl.records.validation_report import PredictedRow, SpeedUp, ValidationReport
from pipelinerl.util.arrays import FloatArray, grouped
from sim.validation.predict import alone_run, shipped_runs, speed_up_summary, truly_simulated, validate
from sim.validation.rows import PublishedRun

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/validation.md", "docs/measurements/validation.md")
PART = re.compile(r"(<!--validate (\w+)-->\n?).*?(<!--end-->)", re.DOTALL)
APART = "NeMo-RL"
"""The software of most rows that are predicted alone, shown apart from the others."""
FAR = 0.45
"""Relative error from which on a row alone is named."""
Published = Mapping[str, PublishedRun]


def percent(share: float, digits: int = 0) -> str:
    """Return a share as the pages write it."""
    return f"{share:.{digits}%}".replace("%", " %")


def signed(number: float, form: str) -> str:
    """Return a number with its sign, a minus in place of a hyphen."""
    return f"{number:+{form}}".replace("-", "−").replace("%", " %")


def is_informed(row: PredictedRow) -> bool:
    """Return whether other rows of its system predict the row, and its limit on answers is published."""
    return row.is_relative and bool(row.fitted_to) and not any(one.startswith("limit of") for one in row.assumed)


def medians(errors: Sequence[tuple[float, float]]) -> tuple[int, float, float]:
    """Return the number of rows, the median error of a naive rule, and ours."""
    rule, ours = np.median(np.array(errors), axis=0)
    return len(errors), float(rule), float(ours)


def sum_of_parts(rows: Iterable[PredictedRow], published: Published) -> tuple[int, float, float]:
    """Return ``medians`` of: a step lasts as long as its published generation and training."""
    errors = []
    for one in rows:
        run = published[one.id]
        if "generation" in one.inputs and run.generate_s is not None and run.train_s is not None:
            errors.append((abs((run.generate_s + run.train_s) / one.measured - 1), abs(one.error)))
    return medians(errors)


def as_much_per_gpu(rows: Iterable[PredictedRow]) -> tuple[int, float, float]:
    """Return ``medians`` of: every GPU of a system makes as many tokens per second as in the system's other rows."""
    log_s = {
        one: math.log(one.measured * one.gpus / one.answer_tokens)
        for one in rows
        if one.quantity == "s/step" and one.gpus and one.answer_tokens
    }
    errors = []
    for one, mine in log_s.items():
        rows = [other for other in log_s if other.family == one.family and other.measured != one.measured]
        if rows:
            errors.append(
                (abs(math.exp(float(np.median([log_s[other] for other in rows])) - mine) - 1), abs(one.error))
            )
    return medians(errors)


def more_apart_staler(report: ValidationReport, published: Published) -> tuple[int, int, int]:
    """Return the pairs that a rule decides, its right ones, and ours.

    More GPUs are faster; or else asynchronous RL is; or else the staler.
    """
    rows, decided = {one.id: one for one in report.rows}, []
    for pair in report.pairs:
        one, other = (rows[name] for name in pair.rows)
        first, second = (
            (run.gpus or 0, run.schedule is not None and run.schedule.at_once, run.max_staleness or 0)
            for run in (published[name] for name in pair.rows)
        )
        faster = (one.measured > other.measured) is (one.quantity == "tokens/s")
        if first != second:
            decided.append(((first > second) is faster, pair.in_order))
    return len(decided), sum(rule for rule, _ in decided), sum(ours for _, ours in decided)


def base_rates(pairs: Sequence[SpeedUp]) -> tuple[float, float, float]:
    """Return what no knowledge of a system could beat: two Brier scores, and the families that tell them from "always".

    The first forecasts the share of the other families whose asynchronous run is faster (one of either kind added), the
    second their share in hindsight, the best constant. Families: until 1.645 standard errors of the difference of
    that to "always" are as large as the difference.
    """
    faster_F = np.array(list(by_family_means((one.family, float(one.measured > 1)) for one in pairs).values()))
    others_F = (faster_F.sum() - faster_F + 1) / (len(faster_F) + 1)
    known = faster_F.mean()

    def scores(forecast_F: FloatArray | float) -> FloatArray:
        return np.asarray(faster_F * (1 - forecast_F) ** 2 + (1 - faster_F) * forecast_F**2)

    gain_F = scores(known) - scores(1.0)
    return float(scores(others_F).mean()), float(scores(known).mean()), (1.645 * gain_F.std() / gain_F.mean()) ** 2


def by_family_means(values: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the mean of each family."""
    return {str(name): float(np.mean(some)) for name, some in grouped(values).items()}


def parts(report: ValidationReport, published: Published, central: Mapping[str, float]) -> dict[str, str]:
    """Return every part by name. ``central``: relative errors of the central coefficients, of rows alone by id."""
    alone = {one.id: one.alone / one.measured - 1 for one in report.rows if one.alone is not None}
    words = _filled(_orders(report, published) + _software(report, published))
    return {
        "readme": _readme(report),
        "summary": "\n".join([*_summary(report, published), "", words]),
        "alone": _alone(report, published, alone, central),
        "pairs": _pairs(report, published),
        "informed": _informed_pairs(report),
        "rows": "\n".join(_rows(report, published)) + "\n",
        "far": _far(alone, central),
    }


def _filled(text: str, indent: str = "") -> str:
    lines = textwrap.wrap(text, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def _readme(report: ValidationReport) -> str:
    alone = report.summary.alone
    assert alone is not None
    return _filled(
        f"Of {alone.rows} published runs of systems that it had not seen, [half are predicted within "
        f"{percent(alone.median_error)}, {percent(alone.within_45_percent)} within 45 %](docs/validation.md). It "
        f'predicts whether asynchronous RL is faster {_verdict_of_pairs(report)[0]} than the guess "always". The model '
        "was built with knowledge of these runs.",
        "  ",
    ).rstrip()


def _verdict(low: float, high: float) -> str:
    return "better" if high < 0 else "worse" if low > 0 else "no better"


def _verdict_of_pairs(report: ValidationReport) -> tuple[str, str]:
    """Return the words on the Brier score and on the ratios, beside the naive rules."""
    pairs = report.summary.speed_ups
    assert pairs is not None
    return (
        _verdict(pairs.brier_difference_low, pairs.brier_difference_high),
        _verdict(pairs.error_difference_low, pairs.error_difference_high),
    )


def _summary(report: ValidationReport, published: Published) -> list[str]:
    summary, alone, pairs = report.summary, report.summary.alone, report.summary.speed_ups
    assert alone is not None
    assert pairs is not None
    assert summary.median_error is not None
    assert alone.naive_median_error is not None
    informed = np.array([abs(one.error) for one in report.rows if is_informed(one)])
    per_gpu, parts_alone = as_much_per_gpu(report.rows), sum_of_parts(report.rows, published)
    decided, rule, ours = more_apart_staler(report, published)
    brier, ratio = _verdict_of_pairs(report)
    rows = [
        ("all, with other rows of their system", f"{summary.rows}",
         f"median error {percent(summary.median_error)}, 9 of 10 within {percent(summary.p90_error or 0)}, "
         f"{percent(summary.within_30_percent or 0)} within 30 %", ""),
        ("of these, with a published limit on answers", f"{len(informed)}",
         f"median error {percent(float(np.median(informed)))}, {percent(float(np.mean(informed <= 0.3)))} within 30 %",
         ""),
        ("tokens per second and GPU of the system's other rows", f"{per_gpu[0]}", percent(per_gpu[2]),
         percent(per_gpu[1])),
        ("sum of the published parts", f"{parts_alone[0]}", percent(parts_alone[2], 1), percent(parts_alone[1], 1)),
        ("**alone**: without other rows of the system", f"{alone.rows} of {alone.families} systems",
         f"{percent(alone.median_error)} ({100 * alone.median_error_low:.0f} to {percent(alone.median_error_high)})",
         f"{percent(alone.naive_median_error)}: tokens per second and GPU of other systems"),
        ("order of two rows of a system", f'{decided} pairs that the rule "more GPUs, asynchronous, staler" decides',
         f"{ours} in order", f"{rule}"),
        ("asynchronous faster than synchronous, on equal GPUs", f"{pairs.pairs} pairs",
         f"Brier {pairs.brier:.2f}: **{brier}** ({signed(pairs.brier_difference_low, '.2f')} to "
         f"{signed(pairs.brier_difference_high, '.2f')})", f'{pairs.always_brier:.2f}: "always"'),
        ("the ratio of the two", f"{pairs.pairs} pairs",
         f"{percent(pairs.median_error)} off: **{ratio}** ({signed(100 * pairs.error_difference_low, '.0f')} to "
         f"{signed(100 * pairs.error_difference_high, '.0f')} points)",
         f"{percent(pairs.constant_median_error)}: the median of other systems"),
    ]  # fmt: skip
    _, _, *lines = markdown_table(("", "rows", "predicted", "naive rule"), rows)
    return ["| | rows | predicted | naive rule |", "|---|---|---|---|", *lines]


def _orders(report: ValidationReport, published: Published) -> str:
    decided, _, ours = more_apart_staler(report, published)
    in_order, number = sum(one.in_order for one in report.pairs), len(report.pairs)
    return (
        f"Intervals are 90 % (families resampled); a *family* is software, GPU and model. Of all {number} pairs "
        f"{percent(in_order / number)} are in order, of the {number - decided} that the rule does not decide "
        f"{in_order - ours}. "
    )


def _scored(rows: Sequence[PredictedRow]) -> tuple[str, str]:
    """Return in words the rows inside their band, of those with one, and the median error; the same alone."""
    alone = [one for one in rows if one.alone is not None]
    inside = [one.low <= one.measured <= one.high for one in rows if one.low is not None and one.high is not None]
    inside_alone = [(one.alone_low or 0) <= one.measured <= (one.alone_high or 0) for one in alone]
    errors = [abs(one.error) for one in rows if one.is_relative]
    errors_alone = [abs((one.alone or 0) / one.measured - 1) for one in alone]
    return _score(inside, errors), _score(inside_alone, errors_alone)


def _score(inside: Sequence[bool], errors: Sequence[float]) -> str:
    return f"{sum(inside)} of {len(inside)}, {percent(float(np.median(errors)))}" if errors else ""


def _software(report: ValidationReport, published: Published) -> str:
    rows = [one for one in report.rows if one.is_relative]
    theirs, others = ([one for one in rows if (published[one.id].system == APART) is apart] for apart in (True, False))
    (inside, alone), (inside_others, alone_others) = _scored(theirs), _scored(others)
    names = dict.fromkeys(published[one.id].system.split()[0] for one in others if one.alone is not None)
    return (
        f"Rows inside their 80 % band, and median error: {APART} {inside} (alone {alone}); all others {inside_others} "
        f"(alone, {' and '.join(names)}: {alone_others})."
    )


def _alone(
    report: ValidationReport, published: Published, alone: Mapping[str, float], central: Mapping[str, float]
) -> str:
    summary = report.summary.alone
    assert summary is not None
    errors = np.abs([central[name] for name in alone])
    far = sum(abs(one) > FAR for one in alone.values())
    return _filled(
        f"{summary.rows} rows, {summary.families} families; "
        f"{percent(summary.within_45_percent)} are within 45 %, and {percent(summary.within_band)} inside their 80 % "
        f"band; 9 of 10 are within {percent(summary.p90_error)} (without the correction: median "
        f"{percent(float(np.median(errors)))}, 9 of 10 within {percent(float(np.quantile(errors, 0.9)))}). "
        f"[{far} rows](measurements/validation.md#furthest-off-alone) are more than 45 % off. "
        + _biases(report, published)
    )


def _biases(report: ValidationReport, published: Published) -> str:
    """Return the mean error of rows alone by system, with its standard error by the spread of families and rows."""
    summary, logs = report.summary.alone, dict[str, dict[str, list[float]]]()
    assert summary is not None
    for one in report.rows:
        if one.alone is not None:
            software = logs.setdefault(published[one.id].system.split()[0], {})
            software.setdefault(one.family, []).append(math.log(one.alone / one.measured))
    texts = []
    for name, families in logs.items():
        every = [error for errors in families.values() for error in errors]
        error = math.sqrt(summary.family_sd**2 / len(families) + summary.row_sd**2 / len(every))
        texts.append(f"{name} {signed(float(np.mean(every)), '.2f')} ± {error:.2f} ({len(families)}, {len(every)})")
    needed = math.ceil((1.645 * summary.family_sd / 0.1) ** 2)
    return (
        f"Mean of log(predicted / measured) ± standard error, by system (families, rows): {', '.join(texts)}. About "
        f"{needed} families are needed to detect a mean error of 0.1."
    )


def _pairs(report: ValidationReport, published: Published) -> str:
    one = report.summary.speed_ups
    assert one is not None
    faster = [pair.measured for pair in report.speed_ups if pair.measured > 1]
    known = [pair for pair in report.speed_ups if published[pair.synchronous].avg_len]
    limited = [pair for pair in known if published[pair.synchronous].max_len]
    of_others, in_hindsight, needed = base_rates(report.speed_ups)
    return _filled(
        f"Of {one.pairs} pairs the asynchronous run is faster in {one.faster}, by {min(faster):.1f} to "
        f"{max(faster):.1f} times. Brier scores: all "
        f"{_scores(report.speed_ups)}; "
        f"{len(known)} with a published mean answer {_scores(known)}; {len(limited)} of these with a published limit "
        f"{_scores(limited)}; a coin 0.25. P is 0.95 or more for {one.certain}, rightly for {one.certain_right}; "
        f"80 % bands hold {percent(one.within_band)}. **{one.families} families cannot show more.** A forecast by the "
        f"share of faster runs in the other families scores {of_others:.2f}. The best constant, known only in "
        f"hindsight, scores {in_hindsight:.2f}. About {needed:.0f} families are needed to tell that constant from "
        f'"always".'
    )


def _scores(pairs: Sequence[SpeedUp]) -> str:
    one = speed_up_summary(pairs)
    assert one is not None
    return f"{one.brier:.2f} (always: {one.always_brier:.2f})"


def _informed_pairs(report: ValidationReport) -> str:
    """Return how far off the ratios of verl's 7B pairs are, with the training of both arms and other rows of verl."""
    rows = {one.id: one for one in report.rows}
    pairs = [one for one in report.speed_ups if one.asynchronous.startswith("verl7b")]
    ours = [rows[one.synchronous].predicted / rows[one.asynchronous].predicted for one in pairs]
    measured = [one.measured for one in pairs]
    return percent(float(np.median([abs(one / other - 1) for one, other in zip(ours, measured, strict=True)])))


def _rows(report: ValidationReport, published: Published) -> Iterator[str]:
    groups: dict[tuple[str, str], list[PredictedRow]] = {}
    for one in report.rows:
        run = published[one.id]
        anchor = ", ".join(part for part in (run.source or run.system, run.hw, run.engine) if part)
        groups.setdefault((run.date or "undated", anchor), []).append(one)
    yield "| run | measured | predicted (80 % band) | error | alone |"
    yield "|---|---|---|---|---|"
    for (date, anchor), rows in sorted(groups.items()):
        yield f"| **{date}: {anchor}** |"
        for one in rows:
            name, unit, measured, predicted, band, error, of_alone, *_ = validation_cells(one)
            shown = measured if unit == "s/step" else f"{measured} {unit}"
            banded = f"{predicted} ({band})" if band else predicted
            far = "" if one.alone is None else f" ({one.alone / one.measured - 1:+.0%})"
            yield f"| {name} | {shown} | {banded} | {error} | {of_alone}{far} |"
    yield ""
    yield from _filled("Not usable: " + ", ".join(f"`{one.id}`" for one in report.unusable) + ".").splitlines()


def _far(alone: Mapping[str, float], central: Mapping[str, float]) -> str:
    """Return the rows that are furthest off alone."""
    far = [
        f"`{name}` {signed(one, '.0%')} ({signed(central[name], '.0%')})"
        for name, one in alone.items()
        if abs(one) > FAR
    ]
    return _filled(f"More than 45 % off (with central values): {', '.join(far)}.")


def central_errors(runs: Iterable[PublishedRun]) -> dict[str, float]:
    """Return the relative error of the central coefficients, by id, of all rows that are predicted alone."""
    alone = [alone_run(run) for run in map(truly_simulated, runs) if run is not None]
    return {one.id: one.predicted_s / one.measured_s - 1 for one in alone}


def with_parts(text: str, made: Mapping[str, str]) -> str:
    """Return a page with its parts made anew."""
    return PART.sub(lambda match: f"{match[1]}{made[match[2]]}{match[3]}", text)


def main() -> None:
    """Validate the shipped rows and write the pages."""
    runs = shipped_runs()
    report = validate(runs, others=runs, others_only=True)
    made = parts(report, {run.id: run for run in runs}, central_errors(runs))
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        if (fresh := with_parts(text, made)) != text:
            (ROOT / name).write_text(fresh, encoding="utf-8")
            sys.stdout.write(f"{name}: written\n")


if __name__ == "__main__":
    main()
