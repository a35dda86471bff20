"""The limit on sequences in progress, against reports by hand, and in simulated runs against every fixed one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.config.run import AdmissionConfig, RunConfig, parse_run, with_overrides
from pipelinerl.errors import ConfigError
from pipelinerl.records.steps import StepRow
from pipelinerl.scheduler.admission import AdmissionControl
from pipelinerl.scheduler.events import Routing
from sim.run import simulate


def control(slots: int = 64, **settings: float) -> AdmissionControl:
    return AdmissionControl(AdmissionConfig(**settings), range(2), slots_per_engine=slots)


def test_the_limit_goes_to_what_would_use_the_share_aimed_at() -> None:
    """Ten sequences use 0.2: forty would use 0.8. The limit rises by one a report, from an eighth of the slots."""
    one = control(soft=0.8)
    assert [one.reported(0, 0.2, 10) for _ in range(40)] == [min(40, 8 + number) for number in range(1, 41)]
    assert one.limits[1] == 8  # each engine has its own


def test_a_limit_of_one_rises_too() -> None:
    """A sequence that ends alone leaves none whose share could be known."""
    one = control(slots=4)
    assert one.limits[0] == 1
    assert [one.reported(0, 0.0, 0) for _ in range(4)] == [2, 3, 4, 4]
    assert one.reported(0, 0.95, 1) == 1
    assert [one.reported(0, 0.0, 0) for _ in range(2)] == [2, 3]  # what one sequence used tells nothing of others


def test_the_limit_falls_at_once_where_sequences_have_grown() -> None:
    """The mean of 0.01 a sequence and, with weight 1 / 50, 0.05 is 0.0108: 0.5 / 0.0108 = 46.3."""
    one = control(soft=0.5)
    for _ in range(64):
        one.reported(0, 0.16, 16)
    assert one.limits[0] == 50
    assert one.reported(0, 0.8, 16) == 46


def test_from_the_hard_share_on_nothing_starts() -> None:
    """Twenty are left when one ends: it is not replaced, nor are others until less is used."""
    one = control(soft=0.8, hard=0.9)
    for _ in range(64):
        one.reported(0, 0.2, 21)
    assert one.reported(0, 0.95, 20) == 20
    assert one.reported(0, 0.9, 19) == 19
    assert one.reported(0, 0.89, 18) == 20  # one more a report


def test_an_engine_that_joins_has_the_least_limit_of_the_others() -> None:
    one = control()
    one.reported(1, 0.1, 4)
    assert one.join(2) == 8
    one.leave(0)
    assert one.join(3) == 8
    assert sorted(one.limits) == [1, 2, 3]


@given(
    reports=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 100)), max_size=60),
    slots=st.integers(1, 70),
)
def test_the_limit_is_from_one_to_the_slots(reports: list[tuple[float, int]], slots: int) -> None:
    one = control(slots)
    for used, num in reports:
        assert 1 <= one.reported(0, used, num) <= slots


# ------------------------------------------------------------------------------------ simulated runs

RUN = {
    "seed": 1,
    "optimizer_steps": 240,
    "cluster": {"accelerators": 16, "generation_accelerators": 8},
    "scheduler": {"train_batch_size": 512, "generation_batch_size": 1024, "ready_queue_size": 2048},
    "workload": {
        "group_size": 8,
        "prompt_tokens": 200,
        "length": {"kind": "lognormal", "mean": 2000, "cv": 0.8, "max": 40000, "growth": 5.0},
    },
    "hardware": {"gpu": "H100", "model": "Qwen2.5-7B", "training": {"token_s": 1e-9}},
}
PHASES = 4


def rates(config: RunConfig) -> np.ndarray:
    """Tokens per second of each phase, of as many optimizer steps."""
    rows: list[StepRow] = []
    simulate(config, on_step=rows.append)
    ends = [len(rows) * (phase + 1) // PHASES for phase in range(PHASES)]
    time_s = np.array([0.0, *(rows[end - 1].time_s for end in ends)])
    tokens = np.add.reduceat([row.tokens for row in rows], [0, *ends[:-1]])
    return tokens / np.diff(time_s)


@pytest.mark.slow
def test_answers_that_grow_are_generated_as_fast_as_by_the_best_fixed_number_of_each_phase() -> None:
    """Means of 2,000 to 10,000 tokens, engines of 400,000: the best fixed H falls from 256 to 128. Within 5 %."""
    fixed = {
        h: rates(parse_run(with_overrides(RUN, [f"scheduler.generation_batch_size={h}"])))
        for h in (96, 128, 192, 256, 384)
    }
    best = np.max(list(fixed.values()), axis=0)
    own = rates(parse_run(with_overrides(RUN, ["scheduler.admission={}"])))
    assert (own >= 0.95 * best).all(), own / best
    assert [max(fixed, key=lambda h: fixed[h][phase]) for phase in range(PHASES)] == [256, 192, 192, 128]
    assert all((one < 0.95 * best).any() for one in fixed.values())


TURNS = {"kind": "lognormal", "mean": 3, "max": 6, "observation_max": 0, "context_max": 400}
SPOT = {"name": "spot", "kind": "spot", "engines": 3, "reclaim_hours": 0.01, "away_s": 5.0, "notice_s": 1.0}


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    soft=st.floats(0.05, 0.95),
    capacity=st.integers(450, 4000),
    routing=st.sampled_from(list(Routing)),
    turns=st.booleans(),
    comes_and_goes=st.booleans(),
    max_lag=st.sampled_from([None, 1, 3]),
)
def test_a_run_of_any_room_ends_within_its_bound_on_lag(
    soft: float, capacity: int, routing: Routing, turns: bool, comes_and_goes: bool, max_lag: int | None
) -> None:
    """Whether engines come and go or not, under every routing: it neither waits for ever nor breaks its bound."""
    tables: dict[str, Any] = {
        "optimizer_steps": 8,
        "cluster": {"accelerators": 4, "generation_accelerators": 3},
        "scheduler": {
            "train_batch_size": 16, "generation_batch_size": 24, "routing": routing.value,
            "admission": {"soft": soft, "hard": min(1.0, soft + 0.1)}, "max_lag": max_lag,
        },
        "workload": {"group_size": 4, "prompt_tokens": 20, "length": {"kind": "uniform", "max": 100}},
        "hardware": {
            "decode": {"kind": "affine", "step_s": 0.01}, "training": {"token_s": 1e-4}, "kv_cache_tokens": capacity,
        },
    }  # fmt: skip
    if turns:
        tables["environment"] = {"count": 40, "step_s": 0.1, "turns": TURNS}
    if comes_and_goes:
        tables["fleet"] = {"start_s": 1.0, "groups": [SPOT]}
    assert simulate(parse_run(tables)).complete


def test_admission_needs_a_known_kv_cache() -> None:
    table = {"decode": {"kind": "affine", "step_s": 0.01}, "training": {"token_s": 1e-4}}
    config = parse_run({**RUN, "hardware": table, "scheduler": {**RUN["scheduler"], "admission": {}}})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"^scheduler.admission needs hardware.kv_cache_tokens, or hardware.gpu and"):
        simulate(config)
