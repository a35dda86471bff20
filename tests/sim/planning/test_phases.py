"""Answers that grow: the cheapest sequence of plans by hand and by property, and a plan of a run in phases."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

import numpy as np
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from pipelinerl.config.question import PHASES, Question, ask
from pipelinerl.config.run import RunConfig
from pipelinerl.records.plan_report import PlannedCandidate, PlanReport
from sim.planning.answer import PLAN_SWITCH_S, SLICES, PlannedCase, cheapest, compare_phases
from sim.planning.screen import Screener, screen_all
from sim.planning.simulate import HowToPlan
from sim.planning.space import SearchSpace, with_values

TIMES = arrays(float, array_shapes(min_dims=2, max_dims=2, max_side=4), elements=st.sampled_from([1.0, 2.0, 5.0, 9.0]))


def test_the_cheapest_plans_are_those_by_hand() -> None:
    """Two plans, of which the first is better at first: 10 + 11 + restart + 12 + 12, or 10 + 11 + 15 + 20 alone."""
    seconds_CS = np.array([[10.0, 11.0, 15.0, 20.0], [14.0, 13.0, 12.0, 12.0]])
    assert cheapest(seconds_CS, 0.0) == (45.0, [0, 0, 1, 1])
    assert cheapest(seconds_CS, 3.0) == (48.0, [0, 0, 1, 1])
    assert cheapest(seconds_CS, 7.0) == (51.0, [1, 1, 1, 1])
    seconds_CS[1, 0] = np.inf  # it breaks a limit at first
    assert cheapest(seconds_CS, 7.0) == (52.0, [0, 0, 1, 1])


@given(TIMES, st.sampled_from([0.0, 0.5, 3.0, 100.0]))
def test_switching_never_loses_and_no_sequence_is_cheaper(seconds_CS: np.ndarray, restart_s: float) -> None:
    """Against all sequences, one plan throughout among them; without restarts each slice has its best plan."""
    candidates, slices = seconds_CS.shape

    def seconds(path: tuple[int, ...]) -> float:
        switches = sum(one != other for one, other in itertools.pairwise(path))
        return float(sum(seconds_CS[one, part] for part, one in enumerate(path)) + restart_s * switches)

    total_s, path = cheapest(seconds_CS, restart_s)
    assert total_s == seconds(tuple(path))
    assert total_s == min(map(seconds, itertools.product(range(candidates), repeat=slices)))
    assert total_s <= seconds_CS.sum(axis=1).min()
    assert cheapest(seconds_CS, 0.0)[0] == seconds_CS.min(axis=0).sum()


HARDWARE = {
    "decode": {"kind": "affine", "step_s": 0.01, "sequence_s": 2e-5},
    "training": {"token_s": 4e-4, "step_s": 0.1},
    "kv_cache_tokens": 30_000,
}
"""Engines whose cache holds fewer sequences as answers grow."""
TABLES: dict[str, Any] = {
    "optimizer_steps": 20_000,
    "cluster": {"accelerators": 16},
    "scheduler": {"train_batch_size": 64},
    "workload": {
        "group_size": 2,
        "prompt_tokens": 20,
        "length": {"kind": "lognormal", "mean": 400, "cv": 1, "max": 4000},
    },
    "hardware": HARDWARE,
    "plan": {"schedulers": ["pipeline"], "generation_batch_size": [64], "publish_every": [1]},
}
SHORT, LONG = "pipeline 4/12 H=64", "pipeline 8/8 H=64"
"""The fastest of three splits with answers of fewer than 600 tokens, and with longer ones."""


def question_of(path: Path, *overrides: str) -> Question:
    """Return a question of answers that grow from 100 to 2400 tokens on 16 GPUs."""
    run = path / "run.toml"
    run.write_text(tomli_w.dumps(TABLES))
    return ask({"mean_length": "100..2400"}, run, ["plan.generation_accelerators=[4, 8, 12]", *overrides])


def cases_of(question: Question, labels: Sequence[str | None]) -> list[PlannedCase]:
    """Return the phases of a question with plans of these labels; None: nothing keeps to the limits."""
    reports = [
        label and PlanReport.model_construct(recommended=PlannedCandidate.model_construct(label=label))
        for label in labels
    ]
    return [PlannedCase(case.name, one or None) for case, one in zip(question.cases, reports, strict=True)]


def rates_at(config: RunConfig, mean: float) -> dict[str, tuple[float, float]]:
    """Return tokens and tokens per second of an optimizer step of each candidate at a mean answer, by label."""
    length = config.workload.length.model_copy(update={"mean": mean})
    space = SearchSpace.of(with_values(config, workload={"length": length}))
    kept, _ = screen_all(space, Screener(space.config, space.answers))
    return {one.candidate.label: (one.estimate.step_tokens, one.estimate.tokens_per_s) for one in kept}


def test_a_run_of_growing_answers_takes_the_time_of_its_slices(tmp_path: Path) -> None:
    """Hours of one plan: its tokens over the harmonic mean of its throughputs, weighted by tokens."""
    question = question_of(tmp_path)
    config = question.cases[0].config
    assert [one.config.workload.length.mean for one in question.cases] == [387.5, 962.5, 1537.5, 2112.5]
    report = compare_phases(question, cases_of(question, [SHORT, LONG, LONG, LONG]), HowToPlan())
    assert report is not None
    slices = [rates_at(config, 100 + 2300 * (part + 0.5) / SLICES) for part in range(SLICES)]

    def hours(label: str, parts: Sequence[dict[str, tuple[float, float]]]) -> float:
        tokens_S = [config.optimizer_steps / SLICES * one[label][0] for one in parts]
        return sum(tokens_S) / harmonic_mean([one[label][1] for one in parts], tokens_S) / 3600

    assert (report.single, report.single_hours) == (LONG, pytest.approx(hours(LONG, slices)))
    (early, step, mean), late = report.plans
    assert (early, late) == (SHORT, (LONG, config.optimizer_steps, 2400))
    number = round(step / config.optimizer_steps * SLICES)
    assert all(one[SHORT][1] > one[LONG][1] for one in slices[:number])
    assert all(one[SHORT][1] < one[LONG][1] for one in slices[number:])
    both = hours(SHORT, slices[:number]) + hours(LONG, slices[number:])
    assert report.hours_without_restarts == pytest.approx(both)
    assert report.hours == pytest.approx(both + PLAN_SWITCH_S / 3600)
    assert report.hours < report.single_hours
    assert mean == pytest.approx(100 + 2300 * step / config.optimizer_steps)


def test_a_short_run_has_one_plan_also_where_no_phase_has_it(tmp_path: Path) -> None:
    """A restart costs more than it gains; the best single plan is found among all choices."""
    question = question_of(tmp_path, "optimizer_steps=200")
    report = compare_phases(question, cases_of(question, [SHORT, None, None, None]), HowToPlan())
    assert report is not None
    assert (report.plans, report.single) == ([(LONG, 200, 2400)], LONG)
    assert report.hours_without_restarts < report.hours == pytest.approx(report.single_hours)


def test_limits_hold_in_every_part_of_the_run(tmp_path: Path) -> None:
    """The longer an answer, the smaller the lag: the faster plan is allowed late, or no plan at first."""
    planned = [SHORT, SHORT, SHORT, LONG]
    question = question_of(tmp_path, "plan.mean_lag_limit=7")
    report = compare_phases(question, cases_of(question, planned), HowToPlan())
    assert report is not None
    (early, _, mean), (late, *_) = report.plans
    assert (report.single, early, late) == (SHORT, SHORT, LONG)
    assert mean > 1200
    question = question_of(tmp_path, "plan.mean_lag_limit=4")
    assert compare_phases(question, cases_of(question, planned), HowToPlan()) is None
    assert compare_phases(question, cases_of(question, [None] * PHASES), HowToPlan()) is None
