"""Lines that jobs of other systems printed, as their users made them public, and the table of the docs."""

from pathlib import Path
from typing import Any

import pytest
from pages import section

from pipelinerl.calibration.log import (
    CalibratedLog,
    LoggedStep,
    Models,
    calibrate_log,
    described_run,
    logged_run,
    simulated_step,
)
from pipelinerl.calibration.log_formats import read_log
from pipelinerl.config.run import RunConfig, parse_run, with_overrides
from pipelinerl.errors import ConfigError
from sim.run import measured_steps, train_step_s

LOGS = Path(__file__).parents[2] / "data" / "logs"
"""Cut to the metrics that are read and some of their neighbours; their sources are in tests/data/README.md."""
MODELS = Models(train_step_s, measured_steps)


def read(name: str, system: str) -> list[LoggedStep]:
    return read_log([LOGS / name], system)


@pytest.mark.parametrize(
    ("name", "system", "known"),
    [
        # verl 0.7: the number of accelerators is tokens / (tokens per second and accelerator) / seconds.
        ("verl_c550_tp4.log", "verl", {"step_s": 1268.488, "generation_s": 698.880, "training_s": 569.270,
                                       "total_tokens": 5_322_462, "length_mean": 4003.341, "length_max": 4096,
                                       "clipped_share": 0.896875, "prompt_mean": 154.832, "accelerators": 8,
                                       "logprob_s": 143.3216061 + 98.1364644, "reward_s": 0.000155381858}),
        # A terminal broke names and numbers; evaluation and checkpoint were timed, but not as parts of the step.
        ("verl_wrapped.log", "verl", {"step_s": 7725.571, "generation_s": 4191.591, "training_s": 3531.701,
                                      "total_tokens": 38_357_151, "length_mean": 4352.70458984375,
                                      "length_max": 10_240, "clipped_share": 0.0328369, "prompt_mean": 329.564,
                                      "accelerators": 8, "logprob_s": 769.5199340535, "reward_s": 0.016539367848}),
        # verl of April 2025: three decimals, no update_weights.
        ("verl_gh200.log", "verl", {"step_s": 96.551, "generation_s": 74.02, "training_s": 22.455,
                                    "length_mean": 324.958, "length_max": 1024, "clipped_share": 0.004,
                                    "prompt_mean": 102.534, "logprob_s": 3.566 + 3.42}),
        ("nemo_rl_async.log", "nemo-rl", {"step_s": 66.55, "wait_s": 32.52, "training_s": 32.23, "sync_s": 0.13,
                                          "lag_mean": 1, "logprob_s": 6.12}),
        ("prime_rl_minutes.log", "prime-rl", {"step_s": 956, "lag_max": 0}),
        ("slime.log", "slime", {"generation_s": 872.248, "length_mean": 2395.802, "length_max": 13_349,
                                "clipped_share": 0.0295653}),
        # slime of January 2026, a dictionary over several lines: other names for length and the share that was cut.
        ("slime_older.log", "slime", {"step_s": 412.324, "training_s": 64.718, "sync_s": 2.530,
                                      "total_tokens": 351_790, "length_mean": 12_245.5, "clipped_share": 0.03125,
                                      "sequence_mean": 13_109.75, "logprob_s": 17.1816488}),
        ("areal.log", "areal", {"step_s": 223.746, "generation_s": 88.992, "training_s": 31.464, "sync_s": 103.29}),
    ],
)  # fmt: skip
def test_the_last_step_of_a_public_log_by_hand(name: str, system: str, known: dict[str, float]) -> None:
    found = read(name, system)[-1].model_dump(exclude_none=True, exclude={"step"})
    assert found == pytest.approx(known, rel=1e-4)


def test_an_older_console_of_prime_rl_gives_batch_and_staleness() -> None:
    """2408.9 tokens/s for 73.77 s are 514 sequences of 345.6 tokens; the progress bar says 512."""
    steps = read("prime_rl_orchestrator.log", "prime-rl")
    assert [(step.step, step.step_s) for step in steps] == [(28, 73.77), (29, 72.73), (30, 79.39), (31, 79.28)]
    assert [step.completed().samples for step in steps] == pytest.approx([512] * 4, rel=0.01)
    log = logged_run(steps)
    assert (log.asynchronous, log.mean.lag_max) == (True, 1)
    run, assumed = described_run(log, run=None, named={"model": "Qwen3-4B", "gpu": "H100", "accelerators": 8})
    assert run.scheduler.max_lag == 1
    assert run.workload.length.mean == pytest.approx(log.mean.sequence_mean, rel=1e-3)
    assert "workload.prompt_tokens: not in the log, 0 taken; where it knows but sums, answers hold prompts" in assumed


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2s", 2.0), ("850ms", 0.85), ("1m 5s", 65.0), ("15m", 900.0), ("1h 2m", 3720.0), ("1d 3h", 97_200.0)],
)
def test_seconds_in_units_are_read(tmp_path: Path, text: str, seconds: float) -> None:
    (tmp_path / "a.log").write_text(f"\x1b[32mSUCCESS\x1b[0m Step 4 | {text:>7} | Reward 0.5 | Max Off-Policy 2\n")
    assert read_log([tmp_path / "a.log"], "prime-rl") == [LoggedStep(step=4, step_s=seconds, lag_max=2)]


def test_numbers_of_numpy_2_are_read_in_dictionaries(tmp_path: Path) -> None:
    """As slime prints them: colours, the prefix of Ray, np.float64 around the value."""
    (tmp_path / "a.log").write_text(
        "\x1b[36m(RolloutManager pid=2)\x1b[0m [2026-09-02 18:00:01] metrics.py:120 - perf 3: "
        "{'perf/rollout_time': np.float64(4.5), 'rollout/response_len/mean': np.float32(98.0)}\n"
        "(TrainRayActor pid=1) train_metric_utils.py:50 - perf 3: {'perf/step_time': 8.0, 'perf/train_time': 3.0}\n"
    )
    step = LoggedStep(step=3, step_s=8.0, generation_s=4.5, training_s=3.0, length_mean=98.0)
    assert read_log([tmp_path / "a.log"], "slime") == [step]


def test_lines_of_other_processes_are_no_part_of_a_broken_line(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(
        "(TaskRunner pid=1) step:1 - timing_s/gen:12.0 - timing_s/step:3\n0.5 - timing_s/update_actor:7\n"
        "2025-10-07 07:01:41,025 - verl - INFO: saved\n(WorkerDict pid=2) 5 - actor/lr:0.1\n"
    )
    step = LoggedStep(step=1, step_s=30.5, generation_s=12.0, training_s=7.0)
    assert read_log([tmp_path / "a.log"], "verl") == [step]


@pytest.mark.parametrize(("step_s", "taken"), [(30.0, 20.0), (21.0, 21.0)], ids=["in the step", "beside it"])
def test_evaluation_and_checkpoint_are_no_part_of_a_step(tmp_path: Path, step_s: float, taken: float) -> None:
    """Older versions of verl count them in the step: then its parts leave room for them."""
    (tmp_path / "a.log").write_text(
        f"step:1 - timing_s/gen:12.0 - timing_s/update_actor:7.0 - timing_s/testing:8.0 - "
        f"timing_s/save_checkpoint:2.0 - timing_s/step:{step_s}\n"
    )
    assert [step.step_s for step in read_log([tmp_path / "a.log"], "verl")] == [taken]


def test_a_log_without_lengths_needs_them_from_its_user() -> None:
    log = logged_run(read("nemo_rl_async.log", "nemo-rl"))
    named = {"model": "Qwen2.5-7B", "gpu": "H100", "accelerators": 16}
    batch = "scheduler.train_batch_size=64"
    with pytest.raises(ConfigError, match=r"--set 'workload\.length=\{\.\.\.\}' is missing: the log must tell"):
        described_run(log, run=None, named=named, overrides=[batch])
    length = "workload.length={ kind = 'lognormal', mean = 900, cv = 0.7, max = 4096 }"
    run, assumed = described_run(log, run=None, named=named, overrides=[batch, length])
    assert (run.workload.length.mean, run.workload.length.max) == (900, 4096)
    assert "lengths: not in the log, those that were given" in assumed


# ----------------------------------------------------------------------------------- the table of the docs

STEPS = "scheduler.optimizer_steps_per_rl_step=4"
VERL: dict[str, Any] = {"model": "Qwen3-8B", "gpu": str(LOGS / "c550.toml")}
TP2 = ("cluster.tensor_parallel=2", "workload.group_size=4", "scheduler.train_batch_size=256",
       "scheduler.generation_batch_size=256")  # fmt: skip
NEMO = ("workload.group_size=32", "scheduler.train_batch_size=512", "workload.prompt_tokens=200")
JOBS: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    "verl, TP 4": ("verl_c550_tp4.log", "verl", VERL,
                   ("cluster.tensor_parallel=4", "workload.group_size=5", "scheduler.train_batch_size=320",
                    "scheduler.generation_batch_size=640")),
    "verl, TP 2": ("verl_c550_tp2.log", "verl", VERL, TP2),
    "NeMo-RL, 8B": ("nemo_rl_8b.csv", "csv", {"model": "Llama-3.1-8B", "gpu": "H100"},
                    (*NEMO, "scheduler.generation_batch_size=256")),
    "NeMo-RL, 70B": ("nemo_rl_70b.csv", "csv", {"model": "Llama-3.1-70B", "gpu": "H100"},
                     (*NEMO, "cluster.tensor_parallel=4", "scheduler.generation_batch_size=128")),
}  # fmt: skip
"""Job of the table: its log, the system, and further facts known of it."""


def calibrated(job: str) -> CalibratedLog:
    name, system, named, overrides = JOBS[job]
    log = logged_run(read(name, system))
    run, assumed = described_run(log, run=None, named=named, overrides=[STEPS, *overrides])
    return calibrate_log(log, run, assumed, MODELS)


def cell(step: LoggedStep) -> str:
    assert step.step_s is not None
    return f"{step.step_s:,.0f} ({step.generation_s:.0f}, {step.training_s:.0f})"


def predicted(run: RunConfig, *overrides: str) -> LoggedStep:
    """Return the mean step of another job on the hardware of a calibrated one."""
    other = parse_run(with_overrides(run.model_dump(mode="json", exclude_none=True, exclude_unset=True), overrides))
    return simulated_step(other, measured_steps(other), 4)


@pytest.mark.slow
def test_the_table_of_public_logs_is_what_the_simulation_gives() -> None:
    table = section("docs/measurements/calibration_accuracy.md", "Public logs, read and simulated")
    lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    rows = {name: cells for name, *cells in lines if cells}
    first = None
    for job in JOBS:
        result = calibrated(job)
        first = first or result
        shown = [cell(result.log.mean), cell(result.predicted), cell(result.simulated)]
        if job == "verl, TP 2":
            other, log = predicted(first.run, *TP2), result.log.mean
            shown.append(cell(other))
            assert f"come out {100 * (other.step_s / log.step_s - 1):.0f} % too slow" in table
        assert rows[job][1 : 1 + len(shown)] == shown, job
