"""A plan with environments against the truth: all candidates are simulated, and the recommendation is a best one."""

from typing import Any

import pytest
from tiny_plan import in_this_process

from pipelinerl.config.run_file import parse_run
from sim.planning.answer import plan
from sim.planning.choose import TIE
from sim.planning.screen import Candidate, candidate_of
from sim.planning.simulate import Job, Outcome, simulate_job
from sim.planning.space import SearchSpace, all_choices

RUN: dict[str, Any] = {
    "optimizer_steps": 12,
    "cluster": {"accelerators": 6, "generation_accelerators": 4},
    "scheduler": {"train_batch_size": 16, "generation_batch_size": 8, "optimizer_steps_per_rl_step": 2},
    "workload": {
        "group_size": 4,
        "prompt_tokens": 100,
        "length": {"kind": "lognormal", "mean": 60, "cv": 1, "max": 300},
    },
    "environment": {
        "count": 16,
        "reset_s": 2.0,
        "step_s": 0.5,
        "step_cv": 1.0,
        "turns": {
            "kind": "lognormal", "mean": 6, "cv": 0.5, "max": 16, "observation_tokens": 200, "observation_cv": 1.0,
            "observation_max": 1000, "context_max": 8000,
        },
    },
    "hardware": {
        "decode": {"kind": "affine", "step_s": 7e-3, "sequence_s": 1e-3, "context_token_s": 2.3e-7},
        "prefill": {"token_s": 2e-5},
        "kv_cache_tokens": 30_000,
        "training": {"token_s": 2e-4, "step_s": 0.2},
        "weights": {"publish_s": 0.05, "pause_s": 0.1},
    },
    "plan": {
        "schedulers": ["pipeline", "conventional"],
        "generation_accelerators": [2, 4, 5],
        "generation_batch_size": [8],
        "optimizer_steps_per_rl_step": [2],
        "publish_every": [1],
        "tensor_parallel": [1],
        "environments": [8, 16, 40],
        "simulate": 4,
        "simulate_steps": 12,
    },
}  # fmt: skip


@pytest.mark.slow
def test_what_is_recommended_is_among_the_best_of_all_candidates() -> None:
    """Few environments, few engines or one trainer bind, each in other candidates; a third of them is simulated.

    Best is what has most tokens per second within ``TIE``, in which a plan takes candidates as equal.
    """
    config = parse_run(RUN)
    space = SearchSpace.of(config)
    made = [one for one in (candidate_of(choice, space) for choice in all_choices(space)) if isinstance(one, Candidate)]
    outcomes = [simulate_job(Job(one, config.optimizer_steps)) for one in made]
    rates = {one.candidate.label: one.tokens_per_s for one in outcomes if isinstance(one, Outcome)}
    assert len(rates) == len(made) == 12
    with in_this_process():
        report = plan(config)
    assert report.search.simulated <= len(made) / 3
    assert rates[report.recommended.label] >= (1 - TIE) * max(rates.values())
    assert sorted(rates.values())[-4] < (1 - TIE) * max(rates.values())  # most are not as good
