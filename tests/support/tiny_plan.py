"""A small plan for tests: four GPUs, a model of 1.5B, short answers; simulations run in the process of the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
from in_this_process import InThisProcess

from pipelinerl.config.run import RunConfig, parse_run, with_overrides
from pipelinerl.errors import ConfigError
from pipelinerl.records.plan_report import PlanReport
from sim import parallel
from sim.planning.answer import plan
from sim.planning.screen import Candidate, candidate_of
from sim.planning.simulate import HowToPlan
from sim.planning.space import SearchSpace, all_choices

FAST_SYNC = {"sync_s_per_root_gb": 0.2, "pause_share": 1.0, "switch_to_training_s": 0.5, "switch_to_generation_s": 0.5}
"""Coefficients of weights that arrive in 0.35 s, while engines wait, and of a phase switch of a second."""
TINY: dict[str, Any] = {
    "optimizer_steps": 40,
    "cluster": {"accelerators": 4, "generation_accelerators": 2},
    "scheduler": {"train_batch_size": 8, "generation_batch_size": 8},
    "workload": {
        "group_size": 2,
        "prompt_tokens": 20,
        "length": {"kind": "lognormal", "mean": 100, "cv": 0.5, "max": 300},
    },
    "hardware": {"gpu": "H100", "model": "Qwen2.5-1.5B", "coefficients": FAST_SYNC},
    "plan": {
        "tensor_parallel": [1],
        "generation_batch_size": [4, 8, 16],
        "optimizer_steps_per_rl_step": [1, 2, 4],
        "publish_every": [1],
        "simulate": 6,
        "simulate_steps": 12,
    },
}


SIXTEEN = (
    "optimizer_steps=200",
    "cluster={accelerators=16, generation_accelerators=8}",
    "scheduler.train_batch_size=64",
    "workload.length={kind='lognormal', mean=400, cv=1.0, max=4000}",
    "hardware={decode={kind='affine', step_s=0.01, sequence_s=2e-5}, training={token_s=4e-4, step_s=0.1}}",
    "plan={mean_lag_limit=4, simulate=16, simulate_steps=60}",
)
"""Overrides of a larger plan: 16 GPUs, longer answers, hardware in numbers, a limit on the mean lag."""


def tiny_run(*overrides: str) -> RunConfig:
    """Return the run file with overrides."""
    return parse_run(with_overrides(TINY, overrides))


def planned(*overrides: str, **arguments: Any) -> PlanReport:
    """Return the plan of the run file with overrides."""
    with in_this_process():
        return plan(tiny_run(*overrides), HowToPlan(**arguments))


def refused(*overrides: str) -> str:
    """Return the message of the ConfigError that ends the plan."""
    with pytest.raises(ConfigError) as caught:
        planned(*overrides)
    return str(caught.value)


UNKNOWN = "hardware={gpu='H100', model='Qwen2.5-1.5B'}"
"""Override of a system that nobody has measured: GPU and model by name."""


def unknown_run(*overrides: str) -> RunConfig:
    """Return the run file of a system that nobody has measured, with overrides."""
    return tiny_run(UNKNOWN, *overrides)


def candidates_of(space: SearchSpace) -> list[Candidate]:
    """Return all candidates of a search space."""
    made = (candidate_of(choice, space) for choice in all_choices(space))
    return [one for one in made if isinstance(one, Candidate)]


@cache
def two_arms() -> tuple[SearchSpace, list[Candidate]]:
    """Return the search space of that run file, and a pipeline and a conventional candidate."""
    space = SearchSpace.of(unknown_run())
    kinds = {one.family: one for one in candidates_of(space)}
    return space, [kinds["pipeline"], kinds["conventional"]]


@cache
def priced_plan() -> PlanReport:
    """Return a plan with a price, made once."""
    return planned("price.gpu_hour=2.0")


@contextmanager
def in_this_process() -> Iterator[None]:
    """Run simulations in this process while the context is open: others are slow to start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "ProcessPoolExecutor", InThisProcess)
        yield
