"""Speculative decoding of a plan: from which batch it loses, what the tail gains, when to refresh, and the answer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from refusals import message
from tiny_plan import planned

from pipelinerl.config.engine import SpeculationConfig
from pipelinerl.config.question import ask
from pipelinerl.config.run import RunConfig, parse_run
from pipelinerl.hardware.costs import tokens_per_step
from pipelinerl.pages.plans import plan_page, speculation_answer
from pipelinerl.records.plan_report import PlanReport
from pipelinerl.records.run_folder import PLAN_FILE
from sim.planning import answer
from sim.planning.answer import best_refresh, gains_by_batch, speculating, speculation_plan
from sim.planning.screen import Screener, own_candidate
from sim.planning.simulate import Job
from sim.planning.space import SearchSpace

THREE = SpeculationConfig(method="ngram", tokens=3, acceptance=0.6)


def run_of(**tables: Any) -> RunConfig:
    return parse_run(
        {
            "optimizer_steps": 400,
            "cluster": {"accelerators": 9, "generation_accelerators": 8},
            "scheduler": {"train_batch_size": 64, "generation_batch_size": 16},
            "workload": {"group_size": 1, "prompt_tokens": 0, "length": {"kind": "fixed", "max": 200}},
            "hardware": {"decode": {"kind": "affine", "step_s": 0.01}, "training": {"token_s": 0.0, "step_s": 0.1}},
            **tables,
        }
    )


def searched(config: RunConfig) -> tuple[Any, Screener]:
    space = SearchSpace.of(config)
    return own_candidate(space), Screener(config, space.answers)


def test_drafts_lose_from_where_verification_costs_more_than_its_tokens():
    """10 ms and 0.1 ms a row: (10 + 0.4 b) / m > 10 + 0.1 b with m = 2.176 from b = 64.5 on. One sequence alone gains
    m * 10.1 / 10.4."""
    decode = {"kind": "affine", "step_s": 0.01, "sequence_s": 1e-4}
    candidate, screener = searched(run_of(hardware={"decode": decode, "training": {"token_s": 0.0}}))
    tokens = tokens_per_step(0.6, 3)
    flip = 10 * (tokens - 1) / (0.4 - 0.1 * tokens)
    assert flip == pytest.approx(64.5, abs=0.1)
    plan = speculation_plan(candidate, THREE, screener, gain=1.0)
    assert (plan.loses_from, plan.refresh_every) == (math.ceil(flip), None)
    assert plan.tail_gain == pytest.approx(tokens * 10.1 / 10.4)
    assert plan.tokens_per_step == pytest.approx(tokens)
    off = THREE.model_copy(update={"off_above": 2})
    assert speculation_plan(candidate, off, screener, gain=1.0).loses_from == math.ceil(flip)


@pytest.mark.parametrize(
    ("gains", "loses_from"),
    [([1.08, 0.96, 0.97, 1.14, 2.15], None), ([1.1, 0.9, 1.2, 0.8, 0.9], 4), ([0.9, 0.9], 1)],
)
def test_small_batches_that_read_more_experts_are_not_where_drafts_begin_to_lose(
    monkeypatch: pytest.MonkeyPatch, gains: list[float], loses_from: int | None
) -> None:
    """From that batch on every larger one loses."""
    candidate, screener = searched(run_of())
    monkeypatch.setattr(answer, "gains_by_batch", lambda *_: np.array(gains))
    assert speculation_plan(candidate, THREE, screener, gain=1.0).loses_from == loses_from


def test_drafts_that_cost_nothing_lose_nowhere_and_useless_ones_everywhere():
    candidate, screener = searched(run_of())
    useless = SpeculationConfig(method="mtp", tokens=3, acceptance=0.0, draft_cost=0.1)
    assert speculation_plan(candidate, THREE, screener, gain=1.0).loses_from is None
    assert speculation_plan(candidate, useless, screener, gain=1.0).loses_from == 1
    assert gains_by_batch(candidate, useless, screener) == pytest.approx(1 / 1.3)


@pytest.mark.parametrize("refresh_s", [0.2, 2.0, 20.0])
def test_the_best_refresh_is_where_both_its_costs_are_least(refresh_s):
    """Generation and training follow each other: r steps after a refresh generation takes 1 / m(a d^r) of its tokens.
    To first order the mean step is longer by g c (r - 1) / 2 + refresh_s / r: least at sqrt(2 refresh_s / (g c)), as
    Daly's interval is. c: relative slowdown of generation per version, g: its seconds with a fresh drafter."""
    config = run_of(
        cluster={"accelerators": 8},
        scheduler={"kind": "conventional", "train_batch_size": 64, "generation_batch_size": 16},
        optimizer_steps=10_000,
    )
    candidate, screener = searched(config)
    keys = {"decay": 0.9999, "refresh_every": 100, "refresh_s": refresh_s}
    drafter = SpeculationConfig(method="eagle3", tokens=3, acceptance=0.6, **keys)
    fresh = drafter.model_copy(update={"refresh_every": 1, "refresh_s": 0.0})
    generation_s = screener.screen(speculating(candidate, fresh)).estimate.generation_s
    slowdown = tokens_per_step(0.6, 3) / tokens_per_step(0.6 * 0.9999, 3) - 1
    best, gain = best_refresh(candidate, drafter, screener)
    assert best == pytest.approx(math.sqrt(2 * refresh_s / (generation_s * slowdown)), rel=0.15)
    assert gain >= 1


def test_a_refresh_that_nobody_waits_for_comes_every_step():
    """The trainer of a generation-bound pipeline has time: a drafter of the newest version costs nothing."""
    candidate, screener = searched(run_of())
    drafter = SpeculationConfig(method="eagle3", tokens=3, acceptance=0.6, decay=0.9, refresh_every=50, refresh_s=0.01)
    best, gain = best_refresh(candidate, drafter, screener)
    assert best == 1
    assert gain > 1.3


def test_a_plan_compares_the_recommendation_with_and_without(tmp_path):
    """A model of 1.5B reads its weights at few sequences: the tail gains the tokens per step; the run gains less, as it
    trains in between. The trainer refreshes in no time. The answer comes back from plan.json."""
    asked = "{method='ngram', tokens=3, acceptance=0.6, decay=0.99, refresh_every=10}"
    report = planned(f"plan.speculate={asked}", "plan.schedulers=['conventional']", out=tmp_path / "plan")
    plan = report.speculation
    assert plan is not None
    assert plan.speculation == THREE.model_copy(update={"decay": 0.99, "refresh_every": 10})
    assert 1.0 < plan.gain < plan.tokens_per_step
    assert plan.tail_gain == pytest.approx(plan.tokens_per_step)
    assert plan.refresh_every == 1
    assert PlanReport.read(tmp_path / "plan" / PLAN_FILE).speculation == plan
    assert any("tokens drafted by ngram" in line for line in speculation_answer(report))
    assert "drafts" in [section.title for section in plan_page(report).sections]


def test_a_plan_that_is_not_asked_is_silent():
    report = planned()
    assert "speculation" not in report.to_dict()
    assert speculation_answer(report) == []


def test_the_drafter_of_a_question_is_a_table_of_the_plan():
    question = ask({"model": "Qwen3-14B", "speculate": "eagle3:k=4, accept=0.8, decay=0.99, off_above=32"})
    plan = question.cases[0].config.plan
    assert plan is not None
    assert plan.speculate == SpeculationConfig(method="eagle3", tokens=4, acceptance=0.8, decay=0.99, off_above=32)


@pytest.mark.parametrize("text", ["ngram", "ngram:", "ngram:k", ":k=3", "ngram:k=3,,accept=1"])
def test_a_drafter_that_cannot_be_read_is_refused(text):
    assert message(lambda: ask({"model": "Qwen3-14B", "speculate": text})).startswith("--speculate must be a drafter")


def test_a_comparison_needs_an_acceptance():
    text = message(lambda: ask({"model": "Qwen3-14B", "speculate": "ngram:k=3"}))
    assert text.endswith("plan.speculate.acceptance is missing; a comparison needs it")


def test_a_part_of_a_run_stands_for_a_drafter_that_grows_old():
    """Of 400 steps with a drafter that is never refreshed 40 are simulated: with the mean of all 400, and with a 50th
    of a refresh in every step."""
    candidate, _ = searched(run_of())
    old = SpeculationConfig(method="eagle", tokens=3, acceptance=0.9, decay=0.99)
    part, whole = (Job(speculating(candidate, old), steps).config.speculation for steps in (40, 400))
    assert whole == old
    assert part is not None
    assert part.decay == 1.0
    mean = sum(1 / tokens_per_step(0.9 * 0.99**version, 3) for version in range(400)) / 400
    assert part.acceptance is not None
    assert 1 / tokens_per_step(part.acceptance, 3) == pytest.approx(mean, rel=1e-5)
    fresh = old.model_copy(update={"refresh_every": 50, "refresh_s": 20.0})
    part = Job(speculating(candidate, fresh), 40).config.speculation
    assert part is not None
    assert (part.refresh_every, part.refresh_s) == (1, 0.4)
    assert Job(speculating(candidate, THREE), 40).config.speculation == THREE
