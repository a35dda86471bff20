"""Validation: a row never informs itself, known truths come out, the shipped rows keep their promised errors."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from naive_rules import as_much_per_gpu, more_apart_staler, sum_of_parts
from published import changed, predicted, row

from pipelinerl.hardware.coefficients import Level
from pipelinerl.pages.evidence import validation_markdown, validation_page
from pipelinerl.records.validation_report import PredictedRow, UnusableRow, ValidationReport
from sim.run import simulate
from sim.validation.infer import STEP, run_config, simulation_grid
from sim.validation.pairs import speed_up_summary
from sim.validation.predict import shipped_runs, validate, validation_report
from sim.validation.reconstruct import MEAN_OVER_LONGEST, reconstruct_run, rest_s

ROOT = Path(__file__).parents[3]


def simulated_seconds(run, *, generation, training, weights=True):
    """Seconds per RL step of a row whose system is slower than the hardware model by two known factors."""
    rebuilt = reconstruct_run(run, [run])
    config = run_config(
        rebuilt,
        generation=generation,
        training=training,
        mean_tokens=600.0,
        rl_steps=8,
        training_given=False,
        weights=True,
    )
    ends, each = [], rebuilt.optimizer_steps
    simulate(config, on_step=lambda step: ends.append(step.time_s))
    return (ends[-1] - ends[4 * each - 1]) / (len(ends) / each - 4)


def made_up_family():
    """Three rows of a system that generates 1.5 and trains 1.7 times as slowly as the hardware model's centre, with the
    rest of a step as it says.
    """
    rows = [row("sync", "sync"), row("async", "async", gpus_gen=4, gpus_train=4, max_staleness=2.0)]
    rows.append(row("wide", "async", gpus_total=12, gpus_gen=8, gpus_train=4, max_staleness=2.0))
    seconds = [
        simulated_seconds(one, generation=1.5, training=1.7, weights=False) + rest_s(one, Level.CENTRAL) for one in rows
    ]
    return [changed(one, step_s=s) for one, s in zip(rows, seconds, strict=True)]


@pytest.mark.slow
def test_the_factors_of_a_made_up_system_are_found_from_its_other_rows():
    family = made_up_family()
    others = [one for one in family if one.id != "wide"]
    alone = {one.id: one for one in predicted([family[2]])}["wide"]
    informed = next(one for one in predicted(family) if one.id == "wide")
    assert isinstance(alone, PredictedRow)
    assert isinstance(informed, PredictedRow)
    assert informed.fitted_to == tuple(one.id for one in others)
    assert abs(informed.error) < 0.1 < abs(alone.error)
    assert informed.high / informed.low < alone.high / alone.low  # what is known narrows the band


@pytest.mark.slow
def test_a_row_never_informs_itself():
    family = made_up_family()
    wrong = [changed(family[0], step_s=7 * family[0].step_s), *family[1:]]
    honest, fooled = (next(one for one in predicted(rows) if one.id == "sync") for rows in (family, wrong))
    assert fooled.predicted == honest.predicted
    assert fooled.measured == pytest.approx(7 * honest.measured)
    other_honest, other_fooled = (next(one for one in predicted(rows) if one.id == "async") for rows in (family, wrong))
    assert other_fooled.predicted > other_honest.predicted  # but it does inform others


@pytest.mark.slow
def test_one_run_in_two_rows_counts_as_one():
    family = made_up_family()
    twin = changed(family[1], id="again")
    with_twin = next(one for one in predicted([*family, twin]) if one.id == "async")
    assert "again" not in with_twin.fitted_to


def test_parts_add_up_or_run_side_by_side():
    sync = row("sync", "sync", step_s=110.0, generate_s=60.0, old_logp_s=10.0, update_s=30.0)
    twin = changed(sync, id="twin", step_s=105.0)  # 5 s that no part shows
    off = row("off", "one_step_off", step_s=70.0, update_s=50.0, old_logp_s=10.0, generate_s=55.0)
    predictions = {one.id: one for one in predicted([sync, twin, off])}
    assert predictions["sync"].predicted == 60 + 10 + 30 + 5
    assert predictions["sync"].error == pytest.approx(-5 / 110)
    assert predictions["twin"].predicted == 60 + 10 + 30 + 10
    sync_s = 1.13 * math.sqrt(2 * 7.6156)  # of 15.2 GB; engines pause for 0.3 of it, and 20 ms
    assert predictions["off"].predicted == pytest.approx(60 + (1.3 * sync_s + 0.02) / 2, rel=1e-3)
    assert predictions["off"].inputs == ("generation", "training")


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [None, 4])
def test_a_synchronous_run_on_separate_gpus_generates_and_trains_in_turn(prompts):
    """It lasts as a colocated one on as many GPUs for each, and the weights' way besides; whatever G is."""
    apart = row("apart", "sync_apart", gpus_gen=4, gpus_train=4, prompts_per_optimizer_step=prompts)
    colocated = row("colocated", "sync", gpus_total=4, prompts_per_optimizer_step=prompts)
    seconds, together = (simulated_seconds(one, generation=1.0, training=1.0) for one in (apart, colocated))
    way = rest_s(apart, Level.CENTRAL)
    assert seconds == pytest.approx(together + way, rel=0.02)
    with_parts = changed(apart, step_s=1.0, generate_s=20.0, update_s=6.0)
    (one,) = predicted([with_parts])
    assert one.predicted == pytest.approx(26 + way, rel=0.05)
    assert one.fitted_to == ()


STALENESS = {
    "in_flight": 120.0, "train_batch_size": 240, "queue_batches": 2.0, "rate_ratio": 0.63, "tailness": 1.42,
    "mean_staleness": 1.26,
}  # fmt: skip


def test_staleness_and_idle_share_follow_from_published_rates():
    stale = row("stale", "async", **STALENESS)
    rates = {"trainer_samples_per_s": 2.0, "generator_samples_per_s": 1.4, "generator_samples_per_s_high": 1.6}
    idle = row("idle", "one_step_off", **rates, trainer_idle_share=0.3)
    first, second = predicted([stale, idle])
    assert first.predicted == pytest.approx(120 * 1.42 / 240 + 0.63)
    assert first.error == pytest.approx(0.08)
    assert second.predicted == pytest.approx(0.25)
    assert (second.low, second.high) == (pytest.approx(0.2), pytest.approx(0.3))
    assert first.mode == second.mode == "asynchronous"  # both closed forms are


def test_other_rows_are_simulated_only_where_a_row_is_compared_with_them():
    simulated = []
    theirs = row("other", "sync", system="theirs", step_s=10.0)
    predicted([row("stale", "async", **STALENESS)], others=[theirs], on_progress=lambda *done: simulated.append(done))
    assert simulated == []


def test_hours_of_a_whole_run_stand_for_its_steps_where_nothing_else_is_there():
    (one,) = predicted([row("a", "async", gpus_gen=4, total_h=5.0, steps=100)])
    assert isinstance(one, PredictedRow)
    assert one.measured == 180.0
    assert one.assumed == ("bf16", "no time outside the steps")


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"step_s": 10.03}, {"gpus_total": None, "step_s": 10.0}])
def test_a_rounded_copy_of_a_row_is_the_row(changes):
    base = row("a", "async", gpus_gen=4, gpus_train=4, step_s=10.0, max_staleness=2.0)
    copy = changed(base, id="copy", **changes)
    other = changed(base, id="other", max_staleness=4.0)  # as fast, and another run
    predictions = {one.id: one for one in predicted([base, copy, other])}
    assert predictions["a"].fitted_to == ("other",)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schedule": None, "mode": "who knows"}, "mode 'who knows' names no schedule"),
        ({"schedule": None, "gpus_gen": 1, "gpus_train": 1}, "with generation and training on separate GPUs"),
        ({"prompts_per_step": None}, "the batch is unknown"),
        ({"max_len": None, "avg_len": None}, "lengths are unknown"),
        ({"gpus_total": None}, "the cluster's size is not published"),
        ({"gpus_gen": None, "gpus_train": 8}, "no GPU is left to generate"),
        ({"gpus_gen": 8}, "gpus_gen must be below gpus_total=8, got 8"),
        ({"model": "DeepSeek-V3"}, "does not fit"),
        ({"step_s": None}, "neither seconds per step nor"),
    ],
)
def test_a_row_that_cannot_be_used_says_why(changes, reason):
    (one,) = predicted([changed(row("a", "async", gpus_gen=4, step_s=10.0), **changes)])
    assert isinstance(one, UnusableRow)
    assert reason in one.reason


def test_tokens_per_gpu_need_no_total_where_both_parts_are_published():
    parts = row("a", "async", gpus_total=None, gpus_gen=4, gpus_train=4, tok_s_per_gpu=1000.0)
    (one,) = predicted([parts])
    (whole,) = predicted([changed(parts, gpus_total=8)])
    assert one == whole
    assert one.measured == 8000.0


SAME_SPEED = {"trainer_samples_per_s": 2.0, "generator_samples_per_s": 2.0, "trainer_idle_share": 0.0}


def test_a_trainer_that_never_waits_is_no_division_by_zero():
    idle = row("a", "async", gpus_gen=4, step_s=9.0, **SAME_SPEED)
    (one,) = predicted([idle])
    assert one.quantity == "s/step"


def shipped_rows_validated():
    """The report of the shipped rows, made in this process, and the simulations with free training by row."""
    grids = {}

    def kept(run, *, training_given):
        grid = simulation_grid(run, training_given=training_given)
        if not training_given:
            grids[run.id] = grid
        return grid

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sim.validation.predict.simulation_grid", kept)
        return validate(shipped_runs(), workers=1), grids


def error_of_areals_curve(grids):
    """Largest error of throughput over that at eta = 0, at any of six points, with one rate and one length tail."""
    runs = [one for one in shipped_runs() if one.id.startswith("areal_eta")]
    assert len(runs) == 6
    ratio_P, mean_P = (axis.ravel() for axis in np.meshgrid(np.linspace(-1.4, 1.4, 29), np.linspace(-2, 1.2, 33)))
    seconds_KP = np.exp([grids[one.id].at(ratio_P, mean_P, STEP) for one in runs])
    measured_K = np.array([one.tok_s_total for one in runs])
    error_KP = (seconds_KP[0] / seconds_KP) / (measured_K / measured_K[0])[:, None] - 1
    return np.abs(error_KP).max(axis=0).min()


def words_on_pairs(result, grids):
    """What docs/validation.md says of the pairs: all, those whose mean answer is published, and the limit, too."""
    published = {run.id: run for run in shipped_runs()}
    rows = {row.id: row for row in result.rows}

    def scores(name, pairs, families=""):
        one = speed_up_summary(pairs)
        always = f"{one.always_brier:.2f}" if one.always_brier else "0"
        errors = f"{one.median_error:.0%} | {one.constant_median_error:.0%}".replace("%", " %")
        return f"| {name}: {one.pairs} of {one.families}{families} | {one.brier:.2f} | {always} | {errors} |"

    known = [one for one in result.speed_ups if published[one.synchronous].avg_len]
    limited = [one for one in known if published[one.synchronous].max_len]
    yield scores("all", result.speed_ups, " families")
    yield scores("mean answer published", known)
    yield scores("limit published, too", limited)
    theirs = [one for one in result.speed_ups if one.asynchronous.startswith("verl7b")]
    ratios = [rows[one.synchronous].predicted / rows[one.asynchronous].predicted for one in theirs]
    off = np.median([abs(ratio / one.measured - 1) for ratio, one in zip(ratios, theirs, strict=True)])
    for numbers in (ratios, [one.measured for one in theirs]):
        yield ", ".join(f"{number:.2f}" for number in numbers[:-1]) + f" and {numbers[-1]:.2f}"
    yield f"measured: {off:.0%} off in the median".replace("%", " %")
    at = np.zeros(1), np.log([0.4])
    arms = [[grids[name].at(*at, STEP)[0] for name in (one.synchronous, one.asynchronous)] for one in result.speed_ups]
    speeds = {one.asynchronous: math.exp(a - b) for one, (a, b) in zip(result.speed_ups, arms, strict=True)}
    ends = [f(speeds[one.asynchronous] for one in theirs) for f in (min, max)]
    areal = speeds["areal_7B_AReaLasync"]
    yield f"AReaL would be {areal:.1f} and verl's five pairs {ends[0]:.1f} to {ends[1]:.1f} times as fast"


def test_docs_say_what_is_published_of_trainers_apart():
    """GPU-seconds of one update, synchronous over asynchronous."""
    runs = {run.id: run for run in shipped_runs()}

    def work(run):
        return run.update_s * (run.gpus_train or run.gpus_total)

    sync = {32: "verl7b_sync32", 64: "verl7b_sync64", 128: "verl7b_sync128"}
    asynchronous = [run for name, run in runs.items() if name.startswith(("verl7b_async", "verl7b_128"))]
    shares = [work(runs[sync[run.gpus_total]]) / work(run) for run in asynchronous]
    other = work(runs["verl1off_fsdp_sync"]) / work(runs["verl1off_fsdp_async"])
    page = " ".join(PAGE.split())
    assert f"takes {min(shares):.1f} to {max(shares):.1f} times the GPU-seconds" in page
    assert f"(`verl1off_fsdp`) has {other:.1f}" in page


def test_most_published_systems_have_longer_mean_answers_than_is_assumed_without_one():
    means = {}
    for run in shipped_runs():
        if run.avg_len and run.max_len:
            means.setdefault(run.family, []).append(math.log(run.avg_len / run.max_len))
    logs = [np.mean(one) for one in means.values()]
    more = sum(one > math.log(MEAN_OVER_LONGEST) for one in logs)
    assert (len(logs), more, round(math.exp(np.mean(logs)), 2)) == (10, 8, 0.33)


PAGE = "\n".join(
    (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("validation.md", "measurements/validation.md")
)
"""Both pages; the table of the second has the rows, all columns but the last three."""
FAR_OFF = {
    "miles_qwen3.8_27b",
    "nemo_v0.5_H100_bf16_Llama3.1-8B_1off_16",
    "unirl40_unirl_light",
    "unirl40_verl_light",
}
"""Rows that are predicted alone and more than 45 % off: docs/validation.md says of each what is not published."""


@pytest.mark.slow(seconds=80)
def test_the_shipped_rows_keep_the_promised_errors_and_docs_say_what_comes_out():
    result, grids = shipped_rows_validated()
    summary = result.summary
    assert summary.median_error <= 0.15
    assert summary.within_30_percent >= 0.9
    without_limit = {one.id for one in result.rows if any(words.startswith("limit of") for words in one.assumed)}
    orders = [pair.in_order for pair in result.pairs if not without_limit & set(pair.rows)]
    assert sum(orders) >= 0.9 * len(orders) == 0.9 * 75
    assert summary.largest_staleness_error <= 0.3
    alone = summary.alone
    assert (alone.rows, alone.families) == (22, 9)
    assert alone.median_error <= 0.15 < alone.naive_median_error  # levels
    far = {one.id for one in result.rows if one.alone and abs(one.alone / one.measured - 1) > 0.45}
    assert far == FAR_OFF
    assert 0.75 <= alone.within_band <= 0.9
    informed = [
        abs(one.error) for one in result.rows if one.is_relative and one.fitted_to and one.id not in without_limit
    ]
    assert len(informed) == 43  # 11 % and 84 % before, of those shipped then 93 %
    assert np.median(informed) <= 0.11
    assert sum(error <= 0.3 for error in informed) >= 0.93 * len(informed)
    pairs = summary.speed_ups  # and ratios
    assert (pairs.pairs, pairs.families) == (14, 9)
    assert pairs.median_error <= 0.35
    assert pairs.brier <= 0.2  # a coin has 0.25
    assert 0.75 <= pairs.within_band <= 0.9
    assert pairs.certain_right == pairs.certain >= 1
    parts, per_gpu = sum_of_parts(result, shipped_runs()), as_much_per_gpu(result)  # with other rows of the system
    assert (parts.rows, per_gpu.rows) == (12, 25)
    assert parts.ours < parts.rule
    assert per_gpu.ours < per_gpu.rule / 2
    order = more_apart_staler(result, shipped_runs())
    assert (order.rows, order.rule) == (61, 56)
    assert order.ours >= order.rule
    curve = {one.id: one for one in result.rows if one.id.startswith("areal_eta")}
    start = curve.pop("areal_eta0").measured
    assert len(curve) == 5
    for point in curve.values():  # the curve over what was measured at 0, as the plot of the paper has it
        assert abs(point.predicted / start - point.measured / start) <= 0.15 * point.measured / start
    assert error_of_areals_curve(grids) <= 0.15
    inside, near = (f"{share:.0%}".replace("%", " %") for share in (alone.within_band, alone.within_45_percent))
    assert f"{alone.rows} rows, {alone.families} families; {near} are within 45 %, and {inside} inside" in " ".join(
        PAGE.split()
    )
    assert all(f"`{one}`" in PAGE for one in FAR_OFF)
    median, near = (
        f"{share:.0%}".replace("%", " %") for share in (np.median(informed), np.mean(np.array(informed) <= 0.3))
    )
    assert f"| {len(informed)} | median error {median}, {near} within 30 % |" in PAGE
    assert [words for words in words_on_pairs(result, grids) if words not in " ".join(PAGE.split())] == []
    between = re.search(r"<!-- table -->\n(.*?)<!-- end -->", PAGE, flags=re.DOTALL)
    assert between is not None
    rows, _, _ = validation_markdown(result).partition("\nAsynchronous against")
    assert between[1] == re.sub(r"^(\| .*)( \| [^|\n]*){3} \|$", r"\1 |", rows, flags=re.MULTILINE)


# The report of a validation: errors, pairs in order, assumptions, and what is printed.


def made_row(name, measured, predicted, *, family="f", quantity="s/step", assumed=()):
    return PredictedRow(
        id=name, family=family, mode="", quantity=quantity, gpus=None, answer_tokens=None, measured=measured,
        predicted=predicted, low=0.0, high=0.0, inputs=(), fitted_to=(), assumed=assumed, alone=None, alone_low=None,
        alone_high=None, error=predicted / measured - 1,
    )  # fmt: skip


def test_errors_and_orders_are_counted():
    rows = [made_row("a", 10, 11), made_row("b", 20, 15), made_row("c", 30, 12), made_row("d", 1, 1, family="g")]
    result = validation_report([*rows, UnusableRow(id="e", reason="no")])
    assert result.summary.median_error == pytest.approx(0.175)
    assert result.summary.within_30_percent == 0.75
    assert [pair.in_order for pair in result.pairs] == [True, True, False]  # ab, ac, bc
    assert "- `e`: no" in validation_markdown(result)
    assert ValidationReport.from_dict(result.to_dict(), name="validation.json") == result
    assert "alone" in result.to_dict()["rows"][0]


def test_without_rows_there_are_no_errors():
    summary = validation_report([]).summary
    assert (summary.rows, summary.pairs) == (0, 0)
    assert {value for _, value in summary} == {0, None}


def test_assumptions_stand_beside_the_prediction():
    first = made_row("a", 10, 11, quantity="tokens/s", assumed=("an H100", "mean length"))
    result = validation_report([first, made_row("b", 10, 11, assumed=("mean length",))])
    assert "| an H100; mean length | 0 |" in validation_markdown(result)
    assert "mean length: a, b" in validation_page(result).sections[0].lines
