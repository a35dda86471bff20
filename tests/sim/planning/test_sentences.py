"""No sentence of a plan contradicts the numbers beside it: random questions, and random draws."""

import sys
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tiny_plan import candidates_of, unknown_run

from pipelinerl.calibration.measured import Measured
from pipelinerl.records.reports import Bottleneck
from sim.planning import answer
from sim.planning.answer import _Search
from sim.planning.certainty import DrawnCandidates, Unknown, make_draws
from sim.planning.screen import Candidate
from sim.planning.simulate import HowToPlan, Outcome, Runner

sys.path.append(str(Path(__file__).parents[3] / "scripts"))
from random_questions import Planned, contradictions, contradictions_of_cases, planned_cases, random_question

DRAWS = 60
LIMIT = 3.0
KINDS = "plan.schedulers=['pipeline', 'conventional', 'one_step_off']"


@cache
def search(averse: bool, limited: bool) -> _Search:
    sets = [KINDS, *(["plan.risk=averse"] if averse else []), *([f"plan.mean_lag_limit={LIMIT}"] if limited else [])]
    return _Search(unknown_run(*sets), Measured(), run_file="R.toml", whole=True, assumed=())


def random_draws(chance: np.random.Generator, some: list[Candidate]) -> DrawnCandidates:
    """Rates about as high, each kind of schedule moved by two unknowns of its own, skewed or not."""
    draws = make_draws(unknown_run(), Measured(), number=DRAWS)
    log_DC = np.log(1000) + chance.choice([0.0, 0.01, 0.1]) * chance.standard_normal((DRAWS, len(some)))
    log_DC += chance.choice([0.005, 0.03, 0.3]) * chance.standard_normal(len(some))
    for family in sorted({one.family for one in some}):
        here_C = np.array([one.family == family for one in some])
        for name in chance.choice([Unknown.TRAINING, Unknown.SWITCH, Unknown.GENERATION, Unknown.ANSWERS], 2):
            value_D = draws.values_D[name] + chance.choice([0.0, 1.0]) * draws.values_D[name] ** 2
            log_DC += chance.uniform(-1, 1) * np.outer(value_D, here_C)
    return DrawnCandidates(draws, some, np.stack(np.broadcast_arrays(log_DC, 1.0, 1.0)))


def random_plan(seed: int) -> Planned:
    """The plan of a search in which the simulations and the draws are of chance; half of them are averse to risk."""
    chance = np.random.default_rng(seed)
    made = search(bool(chance.integers(2)), bool(chance.integers(2)))
    every = candidates_of(made.space)
    some = [every[place] for place in chance.choice(len(every), chance.integers(2, 9), replace=False)]
    lag_C = chance.uniform(0, 1.5 * LIMIT, len(some)) * chance.choice([0.1, 1.0])
    lag_C[0] = min(lag_C[0], LIMIT)
    simulated = [
        Outcome(
            one, tokens_per_s=float(chance.uniform(900, 1100)), step_s=1.0, seconds=1.0, lag_mean=float(lag), lag_max=9,
            training=1.0, publishing=0.0, waiting=0.0, bottleneck=Bottleneck.TRAINING,
        )
        for one, lag in zip(some, lag_C, strict=True)
    ]  # fmt: skip
    simulated = simulated[: chance.integers(1, len(simulated) + 1)]
    within = made.within(simulated)
    broken = {one.candidate.label for one in simulated} - {one.candidate.label for one in within}
    drawn = random_draws(chance, [one for one in some if one.label not in broken])
    drawn = DrawnCandidates(
        drawn.draws, drawn.candidates, drawn.numbers_3DC, {one.candidate.label: 1.0 for one in simulated}
    )
    with (
        patch.object(_Search, "_compared", lambda *_: (simulated, drawn)),
        patch.object(answer, "make_draws", lambda *_, **__: drawn.draws.first(4)),
    ):
        report, _ = made.report(simulated, Runner(HowToPlan()))

    def rank(one: Outcome) -> float:
        label = one.candidate.label
        return drawn.band(label).low if report.run.risk_averse else drawn.shares[label]

    return Planned(report, within, rank, drawn)


@hypothesis_settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1))
def test_no_sentence_contradicts_draws_of_chance(seed: int) -> None:
    assert contradictions(random_plan(seed)) == []


@hypothesis_settings(max_examples=5)
@given(seeds=st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=3))
def test_no_line_about_several_cases_contradicts_their_table(seeds: list[int]) -> None:
    assert (
        contradictions_of_cases({f"case {index}": random_plan(seed).report for index, seed in enumerate(seeds)}) == []
    )


def small(chance: Random, options: dict[str, str], sets: list[str]) -> tuple[dict[str, str], list[str]]:
    """A question with a small model on few GPUs, in less time."""
    sizes = {"model": "Qwen2.5-1.5B", "train_batch_size": "32", "mean_length": "300", "max_length": "2000"}
    number = chance.choice([4, 8])
    several = {"accelerators": f"{number},{2 * number}" if "," in options["accelerators"] else str(number)}
    kept = [one for one in sets if not one.startswith(("cluster", "scheduler", "optimizer", "plan.simulate_steps"))]
    fewer = ["optimizer_steps=30", "plan.simulate_steps=8", "plan.generation_batch_size=[32, 64]"]
    return options | sizes | several, kept + fewer


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_no_sentence_of_a_random_question_contradicts_its_numbers(seed: int) -> None:
    """``scripts/random_questions.py`` asks many more, of large models too."""
    chance = Random(seed)
    plans = planned_cases(*small(chance, *random_question(chance)))
    assert plans
    assert [line for one in plans.values() for line in contradictions(one)] == []
    assert len(plans) == 1 or contradictions_of_cases({name: one.report for name, one in plans.items()}) == []


@pytest.mark.parametrize(("recommended", "said"), [("pipeline", None), ("conventional", "pipeline")])
def test_another_value_turns_a_kind_the_fastest_only_if_it_is_not_recommended(
    recommended: str, said: str | None
) -> None:
    """At central values conventional is the fastest, with the other value the pipeline."""
    slow, fast = SimpleNamespace(tokens_per_s=90.0), SimpleNamespace(tokens_per_s=100.0)
    base: dict[str, Any] = {"conventional": fast, "pipeline": slow}
    with patch.object(answer, "best_screened", lambda _: {"pipeline": fast, "conventional": slow}):
        found = answer._instead({}, "seed", 2, base, recommended)
    assert (found.throughput, found.fastest) == (pytest.approx(100 / 90 if said is None else 90 / 100), said)
