"""Logs of other systems: what is read from each, and the hardware that a simulation of known hardware gets back."""

from collections.abc import Callable
from pathlib import Path

import foreign_logs as logs
import pytest
from calibrated import NAMED, run_of

from pipelinerl.calibration.hardware_file import doubts
from pipelinerl.calibration.log import (
    CalibratedLog,
    LoggedRun,
    LoggedStep,
    Models,
    calibrate_log,
    described_run,
    logged_lengths,
    logged_run,
    quantile,
)
from pipelinerl.calibration.log_formats import FORMATS, read_log
from pipelinerl.errors import ConfigError
from sim.batch import measured_steps, rollout_batch_s, train_step_s

MODELS = Models(train_step_s, measured_steps)
Write = Callable[[list[LoggedStep]], dict[str, str]]

SYNCHRONOUS: dict[str, tuple[str, Write]] = {
    "verl console": ("verl", lambda steps: {"a.log": logs.verl_console(steps)}),
    "verl jsonl": ("verl", lambda steps: {"a.jsonl": logs.verl_jsonl(steps)}),
    "verl history": ("verl", lambda steps: {"a.csv": logs.history(logs.verl_metrics, steps)}),
    "verl charts": ("verl", lambda steps: {"a.csv": logs.charts(logs.verl_metrics, steps)}),
    "nemo-rl console": ("nemo-rl", lambda steps: {"a.log": logs.nemo_console(steps)}),
    "nemo-rl history": ("nemo-rl", lambda steps: {"a.csv": logs.history(logs.nemo_metrics, steps)}),
    "slime console": ("slime", lambda steps: {"a.log": logs.slime_console(steps)}),
    "areal console": ("areal", lambda steps: {"a.log": logs.areal_console(steps)}),
    "areal trace": (
        "areal",
        lambda steps: {
            "rank1.jsonl": logs.areal_trace(steps, rank=1),
            "traces.jsonl": logs.areal_trace(steps),
            "a.csv": logs.history(logs.areal_lengths, steps),
        },
    ),
    "plain": ("csv", lambda steps: {"a.csv": logs.plain(steps)}),
}
ASYNCHRONOUS: dict[str, tuple[str, Write]] = {
    "prime-rl jsonl": (
        "prime-rl",
        lambda steps: {
            "orchestrator.jsonl": logs.lines(logs.prime_orchestrator, steps),
            "trainer.jsonl": logs.lines(logs.prime_trainer, steps),
        },
    ),
    **{name: one for name, one in SYNCHRONOUS.items() if name not in ("verl jsonl", "verl charts")},
}


def log_of(folder: Path, steps: list[LoggedStep], system: str, write: Write) -> LoggedRun:
    paths = []
    for name, text in write(steps).items():
        (folder / name).write_text(text, encoding="utf-8")
        paths.append(folder / name)
    return logged_run(read_log(paths, system))


def calibrated(log: LoggedRun, *overrides: str, accelerators: int | None = 16) -> CalibratedLog:
    named = {"gpu": "H100", "model": "Qwen2.5-7B", "accelerators": accelerators}
    run, assumed = described_run(log, run=None, named=named, overrides=overrides)
    return calibrate_log(log, run, assumed, MODELS)


@pytest.fixture(scope="module")
def synchronous() -> list[LoggedStep]:
    return logs.steps_of(logs.true_run("scheduler.kind=conventional"))


@pytest.fixture(scope="module")
def waiting() -> list[LoggedStep]:
    """Steps of an asynchronous job whose two engines cannot keep up with its trainer."""
    return logs.steps_of(logs.true_run("cluster.generation_accelerators=2", "scheduler.max_lag=8"))


@pytest.mark.parametrize("case", SYNCHRONOUS)
def test_a_synchronous_log_tells_its_steps(tmp_path: Path, synchronous: list[LoggedStep], case: str) -> None:
    log = log_of(tmp_path, synchronous, *SYNCHRONOUS[case])
    truth = logged_run(synchronous).mean
    assert (log.asynchronous, log.num_steps, log.num_left_out) == (False, 15, 1)
    for name in ("generation_s", "training_s", "sync_s", "samples", "length_mean", "prompt_mean", "tokens"):
        if (case, name) != ("nemo-rl console", "prompt_mean"):
            assert getattr(log.mean, name) == pytest.approx(getattr(truth, name), rel=3e-3), name
    if case.startswith("areal"):  # it logs its parts, not the whole step
        assert log.mean.step_s == pytest.approx(truth.generation_s + truth.training_s + truth.sync_s, rel=1e-3)
    else:
        assert log.mean.step_s == pytest.approx(truth.step_s, rel=1e-3)
    if case.startswith("verl"):
        assert log.mean.accelerators == pytest.approx(16)
    if case == "nemo-rl history":
        assert log.mean.generation_accelerators == pytest.approx(8)


@pytest.mark.parametrize("case", ASYNCHRONOUS)
def test_an_asynchronous_log_tells_how_long_its_trainer_waits(
    tmp_path: Path, waiting: list[LoggedStep], case: str
) -> None:
    log = log_of(tmp_path, waiting, *ASYNCHRONOUS[case])
    truth = logged_run(waiting).mean
    assert log.asynchronous
    assert truth.wait_s / truth.step_s > 0.2
    for name in ("step_s", "wait_s", "training_s", "sync_s", "samples", "length_mean"):
        assert getattr(log.mean, name) == pytest.approx(getattr(truth, name), rel=3e-3), name
    if case.partition(" ")[0] in ("nemo-rl", "prime-rl", "areal", "plain"):
        assert log.mean.lag_mean == pytest.approx(truth.lag_mean, rel=1e-3, abs=5e-3)
    if case.startswith("prime-rl"):
        assert (log.mean.training_accelerators, log.mean.lag_max) == (pytest.approx(8), truth.lag_max)


def test_every_format_is_read_of_both_kinds_of_jobs() -> None:
    names = {one.name for one in FORMATS} | {"csv"}
    assert {system for system, _ in SYNCHRONOUS.values()} == names - {"prime-rl"}  # which has no synchronous jobs
    assert {system for system, _ in ASYNCHRONOUS.values()} == names


def assert_close(found: dict[str, float], truth: dict[str, float], *, by: float) -> None:
    """Assert that coefficients are the true ones, but for a share."""
    assert {name: found[name] for name in truth} == pytest.approx(truth, rel=by)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["verl console", "slime console", "areal console"])
def test_a_synchronous_job_gives_its_hardware_back(tmp_path: Path, synchronous: list[LoggedStep], case: str) -> None:
    """Simulated with known hardware: seconds within 3 %, also where the log says nothing: at another batch."""
    result = calibrated(
        log_of(tmp_path, synchronous, *SYNCHRONOUS[case]), accelerators=None if case.startswith("verl") else 16
    )
    truth, found = logs.true_run("scheduler.kind=conventional"), result.run
    assert (found.cluster.accelerators, found.scheduler.kind) == (16, "conventional")
    assert found.scheduler.train_batch_size == truth.scheduler.train_batch_size
    assert result.fit.table["weights"] == {"publish_s": pytest.approx(2.5), "pause_s": pytest.approx(2.5)}
    rest_s = 0.0 if case.startswith("areal") else 3.0  # AReaL logs its parts, not the whole step
    assert result.fit.table["switch"]["to_training_s"] == pytest.approx(rest_s, rel=1e-3, abs=1e-3)
    assert set(result.fit.factors) == {"training", "generation"}
    for name in ("step_s", "generation_s", "training_s", "sync_s", "tokens_per_s"):
        measured = getattr(result.log.mean, name)
        assert getattr(result.simulated, name) == pytest.approx(measured, rel=0.03), name
    assert_close(result.fit.table["coefficients"], logs.SLOW, by=0.05)
    assert result.predicted.generation_s < 0.6 * result.log.mean.generation_s  # before, it was another system
    larger = {"train_batch_size": 256, "generation_batch_size": 64}
    scheduled = {"scheduler": truth.scheduler.model_copy(update=larger)}
    again = [one.model_copy(update=scheduled) for one in (truth, found)]
    seconds = [rollout_batch_s(one) + train_step_s(one) for one in again]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["nemo-rl history", "prime-rl jsonl"])
def test_an_asynchronous_job_that_waits_gives_its_generation_back(
    tmp_path: Path, waiting: list[LoggedStep], case: str
) -> None:
    log = log_of(tmp_path, waiting, *ASYNCHRONOUS[case])
    result = calibrated(
        log,
        "cluster.generation_accelerators=2",
        "scheduler.generation_batch_size=32",
        "scheduler.max_lag=8",
        "workload.group_size=8",
    )
    assert result.run.scheduler.kind == "pipeline"
    for name in ("step_s", "training_s", "sync_s", "tokens_per_s"):
        assert getattr(result.simulated, name) == pytest.approx(getattr(log.mean, name), rel=0.03), name
    assert result.simulated.wait_s == pytest.approx(log.mean.wait_s, rel=0.03)
    assert result.simulated.lag_mean == pytest.approx(log.mean.lag_mean, rel=0.03)
    assert_close(result.fit.table["coefficients"], logs.SLOW, by=0.03)


def test_a_trainer_that_never_waits_says_nothing_of_generation(tmp_path: Path) -> None:
    steps = logs.steps_of(logs.true_run("cluster.generation_accelerators=14"))
    result = calibrated(log_of(tmp_path, steps, *ASYNCHRONOUS["nemo-rl history"]), "cluster.generation_accelerators=14")
    assert set(result.fit.factors) == {"training"}
    assert any(line.startswith("generation: the trainer hardly ever waits") for line in result.assumed)
    assert result.simulated.step_s == pytest.approx(result.log.mean.step_s, rel=0.03)


def test_a_factor_far_from_1_is_warned_of(synchronous: list[LoggedStep]) -> None:
    longer = [
        step.model_copy(update={"generation_s": 3 * step.generation_s, "step_s": 3 * step.step_s})
        for step in synchronous
    ]
    result = calibrated(logged_run(longer))
    factor = result.fit.factors["generation"]
    assert factor > 6
    assert any(line.startswith(f"generation lasts {factor:.2g} times as long") for line in doubts(result.fit))


def test_a_number_just_out_of_reach_is_taken_with_a_warning_and_another_is_refused() -> None:
    """A trainer can do no more than multiply at the peak; the log's rounding may be 5 %."""
    run = run_of(NAMED, "scheduler.kind=conventional")
    zero = dict.fromkeys(("training_step_s", "training_micro_batch_s", "activation_traffic"), 0.0)
    fastest = run.hardware.model_copy(update={"coefficients": {**zero, "training_mfu": 1.0}})
    least_s = train_step_s(run.model_copy(update={"hardware": fastest}))

    def log(share: float) -> LoggedRun:
        mean = LoggedStep(step=9, step_s=100.0, training_s=share * least_s, samples=256.0, length_mean=1500.0)
        return LoggedRun(9, 1, mean, 8000.0)

    result = calibrate_log(log(0.97), run, [], MODELS)
    assert any("training_s of the log" in line and "just out of reach" in line for line in doubts(result.fit))
    assert any(line.startswith("generation: not in the log") for line in result.assumed)
    with pytest.raises(ConfigError, match=r"training_s of the log=.* is out of reach"):
        calibrate_log(log(0.8), run, [], MODELS)


def test_a_batch_of_another_size_than_the_run_files_is_warned_of(synchronous: list[LoggedStep]) -> None:
    given = run_of(
        NAMED, "scheduler.kind=conventional", "scheduler.train_batch_size=64", "scheduler.micro_batch_size=64"
    )
    log = logged_run(synchronous)
    run, assumed = described_run(log, run=given, named={})
    assert run.workload.length.mean == pytest.approx(log.mean.length_mean, rel=1e-3)
    assert run.workload.group_size == given.workload.group_size
    result = calibrate_log(log, run, assumed, MODELS)
    assert any(line.startswith("a step of the log has 128 answers, 1 optimizer steps") for line in doubts(result.fit))


def test_a_file_of_ones_own_is_found_from_any_folder(
    synchronous: list[LoggedStep], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    named = {"gpu": "my_gpu.toml", "model": "Qwen2.5-7B", "accelerators": 8}
    run, _ = described_run(logged_run(synchronous), run=None, named=named)
    assert (run.hardware.gpu, run.hardware.model) == (str(tmp_path / "my_gpu.toml"), "Qwen2.5-7B")


# --------------------------------------------------------------------------------------------- lengths


def lengths(**known: float) -> LoggedRun:
    mean = LoggedStep(step=1, step_s=1.0, length_mean=1000.0, **known)
    return LoggedRun(1, 0, mean, known.get("length_max", 1e9))


def test_a_quantile_decides_the_spread_by_hand() -> None:
    """Hardly cut, log-normal with sd s and mean 1000: p95 = 1000 exp(1.64485 s - s^2 / 2). s = 0.6: 2241.1."""
    length, fitted = logged_lengths(lengths(length_p95=2241.1))
    assert fitted == "mean and 95 % quantile"
    assert length.cv == pytest.approx((2.718281828**0.36 - 1) ** 0.5, rel=2e-3)
    assert quantile(length, 0.95) == pytest.approx(2241.1, rel=2e-3)


@pytest.mark.parametrize("what", ["length_p95", "length_p90", "clipped_share"])
def test_lengths_that_were_drawn_come_back(what: str, synchronous: list[LoggedStep]) -> None:
    """1600 answers with cv 0.8: the standard error of a 95 % quantile is 4 %, of the cv by it a tenth."""
    others = {name: None for name in ("length_p95", "length_p90", "clipped_share") if name != what}
    step = logged_run(synchronous).mean.model_copy(update=others)
    if what == "clipped_share":
        step = step.model_copy(update={"clipped_share": 0.012})
        length, _ = logged_lengths(LoggedRun(1, 0, step, 4000.0))
        assert quantile(length, 1 - 0.012) == pytest.approx(4000, rel=1e-3)
        return
    length, _ = logged_lengths(LoggedRun(1, 0, step, step.length_max))
    assert (length.mean, length.cv) == (pytest.approx(1000, rel=0.02), pytest.approx(0.8, rel=0.15))


def test_a_spread_that_no_log_normal_has_is_named() -> None:
    length, fitted = logged_lengths(lengths(length_p95=9000.0, length_max=20_000.0))
    assert "which no log-normal of this mean reaches" in fitted
    assert length.mean == 1000
    assert logged_lengths(lengths())[1] == "the mean alone; the spread is assumed"


# ---------------------------------------------------------------------------------------- steps by hand


def test_what_follows_from_a_step_by_hand() -> None:
    step = LoggedStep(step=3, step_s=20.0, training_s=6.0, sync_s=1.0, generation_s=18.0, total_tokens=12_000,
                      sequence_mean=120.0, prompt_mean=20.0)  # fmt: skip
    done = step.completed()
    assert (done.length_mean, done.samples, done.tokens, done.tokens_per_s) == (100, 100, 10_000, 500)
    assert done.wait_s == 13  # 18 + 6 + 1 > 20: side by side


def test_steps_with_an_evaluation_are_left_out() -> None:
    seconds = (90.0, 10.0, 11.0, 9.0, 50.0, 10.0)
    log = logged_run([LoggedStep(step=one, step_s=s, length_mean=100.0) for one, s in enumerate(seconds)])
    assert (log.num_steps, log.num_left_out, log.mean.step_s) == (4, 2, 10.0)


def test_metrics_of_one_step_may_come_in_several_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("step:4 - timing_s/step:10.0 - timing_s/gen:6.0\nstep:4 - timing_s/update_actor:2.5\n")
    assert read_log([path], "verl") == [LoggedStep(step=4, step_s=10.0, generation_s=6.0, training_s=2.5)]


def test_one_step_off_in_verl_is_an_asynchronous_job_with_seconds_of_generation(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text(
        "step:4 - timing_s/step:10.0 - timing_s/gen:2.5 - timing_s/generate_async:9.0 - timing_s/update_actor:6.0 - "
        "timing_s/ref:0.5 - timing_s/sync_rollout_weights:1.0 - perf/time_per_step:10.0 - perf/throughput:75.0 - "
        "perf/total_num_tokens:12000.0 - response_length/mean:100.0 - prompt_length/mean:20.0\n"
    )
    (step,) = read_log([path], "verl")
    assert (step.wait_s, step.generation_s, step.training_s, step.sync_s) == (2.5, 9.0, 6.5, 1.0)
    assert step.accelerators == 16  # 12000 tokens in 10 s at 75 each
    assert logged_run([step]).asynchronous
    assert logged_run([step]).mean.samples == 100


@pytest.mark.parametrize(
    ("name", "text", "system", "message"),
    [
        ("a.log", "", "verll", r"--from must be one of verl, .*, csv, got 'verll'; did you mean verl\?"),
        ("a.log", "hello", "verl", r"a\.log must hold steps as verl logs them, got none"),
        ("a.csv", "x,y\n1,2\n", "verl", r"a\.csv must number its steps in a column training/global_step"),
        ("a.csv", "_step,loss\n1,2\n", "verl", r"a\.csv must hold metrics of verl, such as timing_s/step, .*got none"),
        ("a.jsonl", "{]", "verl", r"a\.jsonl is neither JSON nor JSON lines"),
        ("a.jsonl", "[3]", "verl", r"a\.jsonl must hold an object per line, got 3"),
        ("a.log", "step:1 - timing_s/step:-3.0\n", "verl", r"step 1 of the log: step_s must be above 0, got -3"),
        ("a.csv", "step,step_s,lenght\n1,2,3\n", "csv", r"'lenght' is an unknown column"),
        ("a.csv", "step,step_s\n1,x\n", "csv", r"step_s must be a number above 0, got 'x'"),
        ("a.csv", "step,sync_s\n1,2\n", "csv", r"the log must tell the seconds of a step"),
    ],
)
def test_a_log_that_cannot_be_used_is_refused_in_one_line(
    tmp_path: Path, name: str, text: str, system: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        logged_run(read_log([tmp_path / name], system))
    assert "\n" not in str(error.value)
