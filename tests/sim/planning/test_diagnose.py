"""GPU-seconds of a job by hand and as a whole; changes and their bands."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from calibrated import CONVENTIONAL, NAMED, RUN, run_of, traced
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_plan import TINY

import sim.planning.diagnose
from pipelinerl.calibration.calibrate import calibrate_run
from pipelinerl.calibration.log import CalibratedLog, LoggedRun, LoggedStep
from pipelinerl.calibration.measured import Measured
from pipelinerl.calibration.solve import HardwareFit
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.pages.evidence import diagnosis_page
from pipelinerl.pages.page import page_markdown
from pipelinerl.records.plan_report import DiagnosisReport, GpuTime, PlanReport
from sim.planning.answer import searched
from sim.planning.certainty import make_draws
from sim.planning.diagnose import diagnose, gpu_time
from sim.planning.screen import Candidate
from sim.planning.simulate import HowToPlan
from sim.run import measured_steps

PARTS = ("generation_s", "training_s", "logprob_s", "sync_s", "switch_s", "reward_s", "wait_s")
SECONDS = st.none() | st.floats(0, 1e4)
SIMULATED = LoggedStep(step=1, step_s=10.0, generation_s=8.0, training_s=1.5, sync_s=0.5)
TOGETHER, APART = run_of(NAMED, *CONVENTIONAL), run_of(NAMED)
HERE = HowToPlan(workers=1)


def shown(parts: list[GpuTime]) -> dict[str, tuple[float, str]]:
    return {one.part: (pytest.approx(one.gpu_s), one.source) for one in parts}


@given(
    step_s=st.floats(0.1, 1e4), busy=st.floats(0, 1), run=st.sampled_from([TOGETHER, APART]),
    parts=st.fixed_dictionaries(dict.fromkeys(PARTS, SECONDS)),
)  # fmt: skip
@settings(max_examples=200)
def test_the_parts_are_all_gpu_seconds_of_a_step(
    step_s: float, busy: float, run: RunConfig, parts: dict[str, float | None]
) -> None:
    found = gpu_time(LoggedStep(step=1, step_s=step_s, **parts), SIMULATED, run, busy=busy)
    assert min(one.gpu_s for one in found) > 0
    assert sum(one.gpu_s for one in found) == pytest.approx(16 * step_s)
    assert sum(one.share for one in found) == pytest.approx(1)
    assert [one.share for one in found] == pytest.approx([one.gpu_s / (16 * step_s) for one in found])


def test_the_gpu_seconds_of_a_synchronous_step_by_hand() -> None:
    """Engines generate 6 of 8 simulated seconds: a quarter of the logged 12 s on 16 GPUs is tail. 2 s are left over."""
    log = LoggedStep(step=1, step_s=20.0, generation_s=12.0, training_s=4.0, logprob_s=1.0, sync_s=1.5, reward_s=0.5)
    assert shown(gpu_time(log, SIMULATED, TOGETHER, busy=0.6)) == {
        "generation": (144, "log"),
        "tail": (48, "simulation"),
        "training": (48, "log"),
        "log-probabilities": (16, "log"),
        "weight synchronization": (24, "log"),
        "rewards and environments": (8, "log"),
        "phase switch and unexplained": (32, "rest"),
    }
    switched = shown(gpu_time(log.model_copy(update={"switch_s": 0.5}), SIMULATED, TOGETHER, busy=0.6))
    assert (switched["phase switch"], switched["unexplained"]) == ((8, "log"), (24, "rest"))


def test_the_gpu_seconds_of_an_asynchronous_step_by_hand() -> None:
    """8 GPUs generate, 8 train; a synchronization of 2 s pauses the engines for a half of it."""
    run = run_of(NAMED, "hardware.weights={publish_s = 2.0, pause_s = 1.0}")
    log = LoggedStep(step=1, step_s=20.0, training_s=10.0, sync_s=2.0, wait_s=5.0)
    assert shown(gpu_time(log, SIMULATED, run, busy=0.9)) == {
        "generation": (144, "simulation"),
        "weight synchronization": (8 + 16, "log"),
        "engines idle": (8, "rest"),
        "training, log-probabilities included": (80, "log"),
        "trainer waits": (40, "log"),
        "trainer: unexplained": (24, "rest"),
    }


def test_a_part_that_is_not_in_the_log_is_that_of_the_simulation() -> None:
    found = shown(gpu_time(LoggedStep(step=1, step_s=10.0), SIMULATED, TOGETHER, busy=0.8))
    assert found == {
        "generation": (128, "simulation"),
        "training, log-probabilities included": (24, "simulation"),
        "weight synchronization": (8, "simulation"),
    }
    log = LoggedStep(step=1, step_s=10.0, generation_s=8.0, training_s=1.75)  # leaves 0.25 s, and not the simulated 0.5
    left = shown(gpu_time(log, SIMULATED, TOGETHER, busy=0.8))
    assert left == {
        "generation": (128, "log"),
        "training, log-probabilities included": (28, "log"),
        "weight synchronization": (4, "simulation"),
    }


# ------------------------------------------------------------------------------------------------------ changes


def job_of(run: RunConfig) -> CalibratedLog:
    log = LoggedRun(9, 1, SIMULATED, None)
    return CalibratedLog(log, run, HardwareFit(run.hardware), SIMULATED, SIMULATED, ("lengths: assumed",))


def found(*overrides: str) -> DiagnosisReport:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(make_draws.__kwdefaults__, "number", 40)
        return diagnose(job_of(run_of(TINY, *overrides)), HERE)


@cache
def found_of_a_synchronous_job() -> tuple[DiagnosisReport, PlanReport]:
    """Return the diagnosis and the plan that it asks for."""
    planned: list[PlanReport] = []

    def recorded(run: RunConfig, how: HowToPlan, *, effects: bool) -> tuple[PlanReport, Candidate]:
        report, best = searched(run, how, effects=effects)
        planned.append(report)
        return report, best

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim.planning.diagnose, "searched", recorded)
        return found("scheduler.kind=conventional", "scheduler.max_lag=1"), planned[0]


def test_changes_are_sorted_gain_more_than_a_tie_and_are_of_the_job_itself() -> None:
    report, _ = found_of_a_synchronous_job()
    times = [one.times for one in report.gains]
    assert times == sorted(times, reverse=True)
    assert min(times) > 1.03
    assert len(times) <= 3
    assert all(one.set for one in report.gains)
    assert report.notes[:2] == ["lengths: assumed", "limits of every change: largest lag 1 at most"]
    text = page_markdown(diagnosis_page(report))
    assert [one for one in report.gains if f"{one.times:.2f} times as fast" not in text] == []
    assert DiagnosisReport.model_validate_json(report.model_dump_json()) == report


def test_another_kind_gains_as_in_plan_and_no_single_key_changes_the_kind() -> None:
    report, plan = found_of_a_synchronous_job()
    best = plan.families["pipeline"]
    assert plan.own is not None
    assert best is not None
    assert report.asynchronous is not None
    assert report.asynchronous.times == best.tokens_per_s / plan.own.tokens_per_s
    assert report.asynchronous.band == best.over_own
    kinds = [one.change for one in report.gains if any(key.startswith("scheduler.kind=") for key in one.set)]
    assert kinds
    assert all("RL at its best" in one for one in kinds)


def test_draws_of_another_run_file_are_the_same_where_their_unknowns_are() -> None:
    """The premise of a ratio of two run files in common draws."""
    one, other = run_of(TINY), run_of(TINY, "hardware.weights={publish_s = 1.0}")
    drawn, others = (make_draws(run, Measured(), number=20).values_D for run in (one, other))
    differ = [name for name, value_D in drawn.items() if not np.array_equal(value_D, others[name])]
    assert set(differ) <= {"weight transfer", "weight transfer of asynchronous RL"}


def test_a_job_that_the_memory_model_refuses_is_refused() -> None:
    """A trainer of 7.6 billion parameters takes 16 bytes each, more than the 80 GB of the one GPU that trains."""
    with pytest.raises(ConfigError, match="the job does not fit by the memory model: check GPU, model and"):
        found("hardware.model=Qwen2.5-7B", "cluster.generation_accelerators=3")


def test_a_run_folder_is_read_as_a_log(tmp_path) -> None:
    """Its seconds are those of steps.csv; the switch of the trace is 2 s, the first RL step is left out."""
    run = run_of(RUN, *CONVENTIONAL, "hardware.switch={to_training_s = 1.5, to_generation_s = 0.5}")
    job = calibrate_run(traced(tmp_path / "run", run), measured_steps)
    assert (job.log.num_steps, job.log.num_left_out) == (38, 2)
    assert job.log.mean.switch_s == pytest.approx(2.0, rel=1e-3)
    assert job.log.mean.step_s == pytest.approx(job.simulated.step_s, rel=0.05)
    parts = gpu_time(job.log.mean, job.simulated, job.run, busy=0.5)
    unexplained = sum(one.share for one in parts if one.source == "rest")
    assert unexplained < 0.01
    with pytest.raises(ConfigError, match=r"must hold 2 RL steps, 4 optimizer steps, got 2"):
        calibrate_run(traced(tmp_path / "short", run.model_copy(update={"optimizer_steps": 2})), measured_steps)
