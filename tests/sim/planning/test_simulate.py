"""The outcome of a whole run from the optimizer steps that were simulated."""

from dataclasses import replace
from typing import Any

import pytest
from tiny_plan import tiny_run

from pipelinerl.records.step_ledger import Step
from pipelinerl.records.steps import StepRow
from sim.planning import simulate as planning_simulate
from sim.planning.screen import own_candidate
from sim.planning.simulate import HowToPlan, Job, Outcome, Runner, extended, is_steady, simulate_job
from sim.planning.space import SearchSpace
from sim.run import simulate, simulate_steps


@pytest.mark.parametrize(
    "overrides",
    [
        ("scheduler.micro_batch_size=4",),
        ("scheduler.max_lag=1", "scheduler.on_stale='drop'", "scheduler.filter_no_signal=true"),
        ("scheduler.weight_update='abort'", "workload.length.cv=1.5"),
        ("scheduler.kind=conventional", "scheduler.optimizer_steps_per_rl_step=4"),
        ("scheduler.kind=conventional", "scheduler.partial_rollouts=true"),
    ],
)
def test_the_step_ledger_has_the_numbers_of_the_run_ledger(overrides: tuple[str, ...]) -> None:
    rows: list[StepRow] = []
    simulate(tiny_run(*overrides), on_step=rows.append)
    short = simulate_steps(tiny_run(*overrides))
    assert [sum(one.tokens_by_lag) for one in short] == [one.tokens for one in rows]
    shared = [name for name in Step._fields if name in StepRow.model_fields]
    assert len(shared) == len(Step._fields) - 5
    assert [[getattr(one, name) for name in shared] for one in short] == [
        [getattr(one, name) for name in shared] for one in rows
    ]


def row(step: int, time_s: float, **changes: float) -> Step:
    numbers: dict[str, Any] = {
        "train_s": 1.0, "publish_s": 0.25, "wait_s": 0.75, "samples": 8, "tokens": 100, "lag_mean": 2.0, "lag_max": 3,
        "in_progress": 8, "ready": 0, "scoring": 0, "tokens_by_lag": (),
    }  # fmt: skip
    return Step(**{**numbers, **changes, "time_s": time_s})


def outcome_of(rows: list[Step], *overrides: str) -> Outcome:
    candidate = own_candidate(SearchSpace.of(tiny_run(*overrides)))
    return extended(Job(candidate, len(rows)), rows)


CONVENTIONAL = ("scheduler.kind=conventional", "scheduler.optimizer_steps_per_rl_step=2")


def test_the_second_half_of_a_simulation_stands_for_the_rest_of_the_run() -> None:
    """Start-up: 5 s and little lag for 2 steps; then 2 s each. 40 steps last 5 + 38 * 2 s."""
    outcome = outcome_of(
        [row(1, 4.0, tokens=60), row(2, 5.0, lag_mean=0.5), row(3, 7.0), row(4, 9.0, lag_mean=4.0, lag_max=6)]
    )
    assert (outcome.step_s, outcome.seconds) == (2.0, 81.0)
    assert outcome.tokens_per_s == pytest.approx((60 + 39 * 100) / 81)
    assert (outcome.lag_mean, outcome.lag_max) == (3.0, 6)
    assert (outcome.training, outcome.publishing, outcome.waiting) == (0.5, 0.125, 0.375)
    assert outcome.gpu_hours == pytest.approx(81 * 4 / 3600)


def test_of_conventional_rl_only_whole_rl_steps_count_unless_the_whole_run_was_simulated() -> None:
    """G = 2, 5 steps simulated: steps 1 and 2 are an RL step of 10 s, 3 and 4 one of 6 s; the last one is cut."""
    rows = [row(step + 1, time_s) for step, time_s in enumerate([9.0, 10.0, 15.0, 16.0, 23.0])]
    extended_run, whole = outcome_of(rows, *CONVENTIONAL), outcome_of(rows, *CONVENTIONAL, "optimizer_steps=5")
    assert (extended_run.step_s, extended_run.seconds) == (3.0, 16 + 36 * 3.0)
    assert (whole.step_s, whole.seconds, whole.tokens_per_s) == (3.0, 23.0, 500 / 23)


@pytest.mark.parametrize(
    ("unit", "later_step_s", "later_lag", "steady"),
    [
        (1, 2.0, 2.0, True),
        (1, 2.009, 2.09, True),  # 0.45 % slower; 0.09 steps more
        (1, 2.02, 2.0, False),
        (1, 2.0, 2.11, False),
        (16, 2.0, 2.0, True),  # steps 33 to 48 against 49 to 64
        (32, 2.0, 2.0, False),  # a single RL step stands for the rest
    ],
)
def test_a_simulation_is_steady_when_both_halves_of_its_second_half_agree(
    unit: int, later_step_s: float, later_lag: float, steady: bool
) -> None:
    """64 steps: 32 of start-up, whatever they took, 16 of 2 s at a lag of 2, and 16 others. Not asked after 63."""
    lasts = [9.0] * 32 + [2.0] * 16 + [later_step_s] * 16
    lags = [0.0] * 32 + [2.0] * 16 + [later_lag] * 16
    rows = [row(i + 1, sum(lasts[: i + 1]), lag_mean=lag) for i, lag in enumerate(lags)]
    assert is_steady(rows, unit) is steady
    assert not is_steady(rows[:63], unit)


def test_a_steady_simulation_ends_early_unless_it_is_the_whole_run_or_answers_grow() -> None:
    """Answers of one length and constant times: steady at the first look, and the same to 1 % as all 100 steps."""

    def ran(*overrides: str, steps: int = 100) -> tuple[Outcome, list[int]]:
        run = tiny_run("optimizer_steps=500", "workload.length={kind='fixed', max=50}", *overrides)
        seen: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                planning_simulate, "extended", lambda job, rows: seen.append(len(rows)) or extended(job, rows)
            )
            outcome = simulate_job(Job(own_candidate(SearchSpace.of(run)), steps))
        assert isinstance(outcome, Outcome)
        return outcome, seen

    short, steps = ran()
    assert steps == [64]
    assert ran("optimizer_steps=100")[1] == [100]
    assert ran("workload.length.growth=1.001")[1] == [100]
    whole, _ = ran("optimizer_steps=100")
    assert short.step_s == pytest.approx(whole.step_s, rel=0.01)
    assert short.lag_mean == pytest.approx(whole.lag_mean, abs=0.1)


def test_a_run_that_two_candidates_make_is_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one call or in two; with another number of steps it is another run."""
    simulated: list[int] = []

    def simulated_job(job: Job) -> Outcome | str:
        simulated.append(job.steps)
        return simulate_job(job)

    monkeypatch.setattr(planning_simulate, "simulate_job", simulated_job)
    own = own_candidate(SearchSpace.of(tiny_run()))
    other = replace(own, label="the same by another name")
    runner = Runner(HowToPlan(workers=1))
    both = runner.run([Job(own, 4), Job(other, 4)])
    assert sorted(one.candidate.label for one in both) == sorted([own.label, other.label])
    assert replace(both[0], candidate=own) == replace(both[1], candidate=own)
    again = runner.run([Job(other, 4), Job(own, 5)])
    assert {one.candidate.label for one in again} == {own.label, other.label}
    assert simulated == [4, 5]


def test_a_job_is_the_candidate_with_its_steps() -> None:
    config = Job(own_candidate(SearchSpace.of(tiny_run())), 7).config
    assert config == tiny_run("optimizer_steps=7").model_copy(update={"plan": None})
