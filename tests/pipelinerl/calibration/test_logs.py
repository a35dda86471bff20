"""Logs of other systems: a step of each format, and known hardware that comes back from simulated steps."""

import json
import math
from pathlib import Path

import pytest
from calibrated import NAMED, run_of

import sim.run
from pipelinerl.calibration.calibrate import doubts
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
    simulated_step,
)
from pipelinerl.calibration.log_formats import read_log
from pipelinerl.calibration.solve import HardwareFit, fit_factor
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.coefficients import Level, coefficients
from sim.run import measured_steps, rollout_batch_s, train_step_s
from sim.workload import Workload

MODELS = Models(train_step_s, measured_steps)

# ------------------------------------------------------------------- one step, as each system logs it

STEP = {"step_s": 20.0, "training_s": 5.0, "sync_s": 2.0, "samples": 32.0, "tokens": 3200.0, "length_mean": 100.0,
        "length_max": 300.0, "prompt_mean": 20.0}  # fmt: skip
SYNCHRONOUS, ASYNCHRONOUS = {**STEP, "generation_s": 12.0}, {**STEP, "wait_s": 13.0}
VERL = {
    "training/global_step": 7, "actor/pg_loss": -0.01, "timing_s/step": 20.0, "timing_s/old_log_prob": 1.0,
    "timing_s/update_actor": 4.0, "perf/total_num_tokens": 3840, "perf/time_per_step": 20.0, "perf/throughput": 12.0,
    "response_length/mean": 100.0, "response_length/max": 300, "response_length/clip_ratio": 0.05,
    "prompt_length/mean": 20.0,
}  # fmt: skip
VERL_SYNCHRONOUS = VERL | {"timing_s/gen": 12.0, "timing_s/update_weights": 2.0}
VERL_ASYNCHRONOUS = VERL | {
    "timing_s/gen": 13.0, "timing_s/param_sync": 2.0, "fully_async/count/current_param_version": 7,
}  # fmt: skip
VERL_KNOWN = {"total_tokens": 3840, "clipped_share": 0.05, "accelerators": 16}
NEMO = {
    "timing/train/total_step_time": 20.0, "timing/train/policy_training": 3.5,
    "timing/train/policy_and_reference_logprobs": 1.5, "train/total_num_tokens": 3840, "train/mean_prompt_length": 20.0,
    "train/gen_tokens_per_sample/mean": 100.0, "train/gen_tokens_per_sample/max": 300,
    "train/max_gen_tokens_per_turn/p95": 250, "performance/tokens_per_sec": 192.0,
    "performance/tokens_per_sec_per_gpu": 12.0, "performance/generation_tokens_per_sec": 900.0,
    "performance/generation_tokens_per_sec_per_gpu": 112.5,
}  # fmt: skip
NEMO_SYNCHRONOUS = {"timing/train/generation": 12.0, "timing/train/prepare_for_generation/total": 2.0}
NEMO_ASYNCHRONOUS = {
    "timing/train/exposed_generation": 13.0, "timing/train/weight_sync": 2.0, "train/avg_trajectory_age": 1.5,
}  # fmt: skip
NEMO_KNOWN = {"length_p95": 250, "accelerators": 16, "generation_accelerators": 8}
NEMO_CONSOLE = f"""
{"=" * 25} Step 7/500 {"=" * 25}

📊 Training Results:
  • Loss: 0.0123
  • Mean Generation Length: 100.0000

⏱️  Timing:
  • Total step time: 20.00s
  • generation: 12.00s (60.0%)
  • policy_training: 3.50s (17.5%)
  • policy_and_reference_logprobs: 1.50s (7.5%)
  • prepare_for_generation/total: 2.00s (10.0%)

🔍 Performance Metrics:
  • Mean Total Tokens per Sample: 120.00
    - E2E (Samples/sec): 1.60
    - E2E (Tokens/sec): 192.00
    - E2E (Tokens/sec/gpu): 12.00
    - Generation Worker Group (Tokens/sec): 900.00
    - Generation Worker Group (Tokens/sec/gpu): 112.50
"""
PRIME_ORCHESTRATOR = {
    "progress/output_tokens": 3200, "train/agg/effective/num_output_tokens/mean": 100.0,
    "train/agg/effective/num_output_tokens/p90": 180, "train/agg/effective/num_output_tokens/max": 300,
    "train/agg/effective/num_input_tokens/mean": 20.0, "off_policy/mean": 1.5, "off_policy/max": 3,
}  # fmt: skip
PRIME_TRAINER = {
    "time/step": 20.0, "time/wait_for_batch": 13.0, "time/load_data": 0.0, "time/forward_backward": 5.0,
    "time/broadcast_weights": 2.0, "perf/throughput": 8000.0, "perf/throughput_per_gpu": 1000.0,
}  # fmt: skip
AREAL_SECONDS = {"rollout": 13.0, "recompute_logp": 0.5, "train_step": 4.5, "update_weights": 2.0}
AREAL_TIMERS = {f"timeperf/{name}": seconds for name, seconds in AREAL_SECONDS.items()}
AREAL_LENGTHS = {
    "ppo_actor/n_seqs": 32, "ppo_actor/prompt_len/avg": 20.0, "ppo_actor/seq_len/avg": 120.0,
    "ppo_actor/seq_len/max": 320, "ppo_actor/no_eos_ratios/avg": 0.05,
}  # fmt: skip
AREAL_STALENESS = {
    f"ppo_actor/update/version_stats/sample_staleness_theta_{name}": value for name, value in (("avg", 1.5), ("max", 3))
}


def jsonl(metrics: dict[str, float]) -> str:
    return json.dumps({"step": 7, "time": 1.7e9, **metrics}) + "\n"


def history(metrics: dict[str, float]) -> str:
    """Return the CSV that W&B's API gives: a row per call of ``log``."""
    return f"_step,_runtime,{','.join(metrics)}\n7,60,{','.join(map(str, metrics.values()))}\n"


def charts(metrics: dict[str, float]) -> str:
    """Return the CSV that the button of W&B's charts exports: each column of a run with its extremes."""
    names = [f'"my - run - {name}{end}"' for name in metrics for end in ("", "__MIN", "__MAX")]
    return f'"Step",{",".join(names)}\n"7",{",".join(f"{value},0,1e9" for value in metrics.values())}\n'


def areal_trace() -> str:
    """Return a Chrome trace, a line per event; the spans of rank 1 are shorter."""
    text = json.dumps({"name": "process_name", "ph": "M", "pid": 7, "args": {"name": "rank 0"}}) + "\n"
    for rank, speed in ((0, 1.0), (1, 2.0)):
        for name, seconds in AREAL_SECONDS.items():
            span = "train.ppo_update" if name == "train_step" else f"train.{name}"
            event = {"name": span, "ph": "X", "ts": 0, "dur": int(1e6 * seconds / speed), "args": {"global_step": 7}}
            text += json.dumps(event | {"rank": rank}) + "\n"
    return text


LOGS: dict[str, tuple[str, dict[str, str], dict[str, float]]] = {
    "verl jsonl": ("verl", {"a.jsonl": json.dumps({"step": 7, "data": VERL_SYNCHRONOUS})}, SYNCHRONOUS | VERL_KNOWN),
    "verl charts": ("verl", {"a.csv": charts(VERL_SYNCHRONOUS)}, SYNCHRONOUS | VERL_KNOWN),
    "verl asynchronous": ("verl", {"a.csv": history(VERL_ASYNCHRONOUS)}, ASYNCHRONOUS | VERL_KNOWN),
    "nemo-rl history": ("nemo-rl", {"a.csv": history(NEMO | NEMO_SYNCHRONOUS)}, SYNCHRONOUS | NEMO_KNOWN),
    "nemo-rl console": (
        "nemo-rl",
        {"a.log": NEMO_CONSOLE},
        {name: one for name, one in (SYNCHRONOUS | NEMO_KNOWN).items() if name not in ("length_max", "length_p95")},
    ),
    "nemo-rl asynchronous": (
        "nemo-rl", {"a.csv": history(NEMO | NEMO_ASYNCHRONOUS)}, ASYNCHRONOUS | NEMO_KNOWN | {"lag_mean": 1.5},
    ),
    "prime-rl": (
        "prime-rl",
        {"orchestrator.jsonl": jsonl(PRIME_ORCHESTRATOR), "trainer.jsonl": jsonl(PRIME_TRAINER)},
        ASYNCHRONOUS | {"length_p90": 180, "lag_mean": 1.5, "lag_max": 3, "training_accelerators": 8},
    ),
    "areal": (
        "areal",
        {"a.csv": history(AREAL_TIMERS | AREAL_LENGTHS | AREAL_STALENESS)},
        ASYNCHRONOUS | {"lag_mean": 1.5, "lag_max": 3, "clipped_share": 0.05},
    ),
    "areal trace": (
        "areal",
        {"traces.jsonl": areal_trace(), "a.csv": history(AREAL_LENGTHS)},
        SYNCHRONOUS | {"generation_s": 13.0},
    ),
    "areal trace asynchronous": (
        "areal",
        {"traces.jsonl": areal_trace(), "a.csv": history(AREAL_LENGTHS | AREAL_STALENESS)},
        ASYNCHRONOUS,
    ),
    "areal trace as a table": (
        "areal",
        {
            "a.log": json.dumps({"unit": "ms", "traceEvents": [json.loads(one) for one in areal_trace().splitlines()]}),
            "a.csv": history(AREAL_LENGTHS),
        },
        SYNCHRONOUS | {"generation_s": 13.0},
    ),
    "plain": (
        "csv",
        {"a.csv": f"step,{','.join(SYNCHRONOUS)},length_p95\n7,{','.join(map(str, SYNCHRONOUS.values()))},\n"},
        SYNCHRONOUS,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("system", "files", "known"), LOGS.values(), ids=LOGS)
def test_a_log_tells_its_step(tmp_path: Path, system: str, files: dict[str, str], known: dict[str, float]) -> None:
    """AReaL logs its parts, not the whole step."""
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (step,) = read_log([tmp_path / name for name in files], system)
    found = step.completed().model_dump(exclude_none=True)
    assert {name: found.get(name) for name in known} == pytest.approx(known, rel=1e-3)
    assert ("wait_s" in found) == ("wait_s" in known)
    assert step.step == 7


# ------------------------------------------------------------------------------------- the hardware comes back

GENERATION, TRAINING = 2.0, 1.6
"""Factors of the true system on the hardware model's seconds of generation and training."""
CENTRAL = coefficients(Level.CENTRAL)
SLOW = {
    **{
        name: getattr(CENTRAL, name) / GENERATION
        for name in ("kv_efficiency", "weight_efficiency", "flops_efficiency", "prefill_mfu")
    },
    **{
        name: getattr(CENTRAL, name) * GENERATION
        for name in ("step_overhead_s", "sequence_overhead_s", "layer_overhead_s")
    },
    "training_mfu": CENTRAL.training_mfu / TRAINING,
    **{
        name: getattr(CENTRAL, name) * TRAINING
        for name in ("training_step_s", "training_micro_batch_s", "activation_traffic")
    },
}
"""The central coefficients of docs/hardware.md, so much slower."""
SIZES = (
    "scheduler={ train_batch_size = 128, generation_batch_size = 32 }",
    "workload.length={ kind = 'lognormal', mean = 1000, cv = 0.8, max = 3000 }",
)
"""One micro-batch, and answers of which one in twenty is cut: so the longest of a step hardly varies."""


def true_run(*overrides: str) -> RunConfig:
    """Return a run of known hardware."""
    hardware = {
        **NAMED["hardware"],
        "coefficients": SLOW,
        "weights": {"publish_s": 2.5, "pause_s": 2.5},
        "switch": {"to_training_s": 3.0, "to_generation_s": 0.0},
    }
    return run_of({**NAMED, "hardware": hardware}, *SIZES, *overrides)


def steps_of(run: RunConfig) -> list[LoggedStep]:
    """Return simulated steps, with the facts of lengths that a log has."""
    rows, workload = measured_steps(run), Workload(run.workload, seed=run.seed)
    groups = [workload.group(one, one).lengths for one in range(200)]
    drawn = sorted(length for lengths in groups for length in lengths)
    known = {
        "prompt_mean": 200.0,
        "length_p90": float(drawn[int(0.90 * len(drawn))]),
        "length_p95": float(drawn[int(0.95 * len(drawn))]),
        "length_max": float(drawn[-1]),
        "clipped_share": drawn.count(run.workload.length.max) / len(drawn),
    }
    steps = [simulated_step(run, rows[number : number + 2]) for number in range(len(rows) - 1)]
    return [step.model_copy(update={**known, "step": number}) for number, step in enumerate(steps, start=1)]


def calibrated(log: LoggedRun, *overrides: str, accelerators: int | None = 16) -> CalibratedLog:
    named = {"gpu": "H100", "model": "Qwen2.5-7B", "accelerators": accelerators}
    run, assumed = described_run(log, run=None, named=named, overrides=overrides)
    return calibrate_log(log, run, assumed, MODELS)


@pytest.fixture(scope="module")
def synchronous() -> list[LoggedStep]:
    return steps_of(true_run("scheduler.kind=conventional"))


def assert_close(found: dict[str, float], truth: dict[str, float], *, by: float) -> None:
    """Assert that coefficients are the true ones, but for a share."""
    assert {name: found[name] for name in truth} == pytest.approx(truth, rel=by)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False], ids=["whole step", "parts only"])
def test_a_synchronous_job_gives_its_hardware_back(synchronous: list[LoggedStep], whole: bool) -> None:
    """Simulated with known hardware: seconds within 3 %, also at a batch that is not in the log."""
    steps = [step.model_copy(update={"accelerators": 16.0}) for step in synchronous]
    if not whole:
        seconds = [step.generation_s + step.training_s + step.sync_s for step in synchronous]
        steps = [step.model_copy(update={"step_s": one}) for step, one in zip(synchronous, seconds, strict=True)]
    result = calibrated(logged_run(steps), accelerators=None if whole else 16)
    truth, found = true_run("scheduler.kind=conventional"), result.run
    assert (found.cluster.accelerators, found.scheduler.kind) == (16, "conventional")
    assert found.scheduler.train_batch_size == truth.scheduler.train_batch_size
    assert result.fit.table["weights"] == {"publish_s": pytest.approx(2.5), "pause_s": pytest.approx(2.5)}
    assert result.fit.table["switch"]["to_training_s"] == pytest.approx(3.0 if whole else 0.0, rel=1e-3, abs=1e-3)
    assert set(result.fit.factors) == {"training", "generation"}
    for name in ("step_s", "generation_s", "training_s", "sync_s", "tokens_per_s"):
        measured = getattr(result.log.mean, name)
        assert getattr(result.simulated, name) == pytest.approx(measured, rel=0.03), name
    assert_close(result.fit.table["coefficients"], SLOW, by=0.05)
    assert result.predicted.generation_s < 0.6 * result.log.mean.generation_s  # before, it was another system
    larger = {"train_batch_size": 256, "generation_batch_size": 64}
    scheduled = {"scheduler": truth.scheduler.model_copy(update=larger)}
    again = [one.model_copy(update=scheduled) for one in (truth, found)]
    seconds = [rollout_batch_s(one) + train_step_s(one) for one in again]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.05)


@pytest.mark.slow
def test_an_asynchronous_job_that_waits_gives_its_generation_back() -> None:
    """Its two engines cannot keep up with its trainer."""
    log = logged_run(steps_of(true_run("cluster.generation_accelerators=2", "scheduler.max_lag=8")))
    assert log.mean.wait_s / log.mean.step_s > 0.2
    result = calibrated(
        log,
        "cluster.generation_accelerators=2",
        "scheduler.generation_batch_size=32",
        "scheduler.max_lag=8",
        "workload.group_size=8",
    )
    assert result.run.scheduler.kind == "pipeline"
    for name in ("step_s", "training_s", "sync_s", "tokens_per_s", "wait_s", "lag_mean"):
        assert getattr(result.simulated, name) == pytest.approx(getattr(log.mean, name), rel=0.03), name
    assert_close(result.fit.table["coefficients"], SLOW, by=0.03)


@pytest.mark.slow
def test_a_step_of_many_answers_is_simulated_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generation of four steps of 10,000 answers is within 3 % of that of sixteen."""
    many = "scheduler={ kind = 'conventional', train_batch_size = 10_000, generation_batch_size = 256 }"
    few = measured_steps(true_run(many))
    assert sum(row.samples for row in few) <= sim.run.MOST_ROLLOUTS
    assert len(measured_steps(true_run(many.replace("10_000", "2272")))) == 1 + sim.run.STEADY
    monkeypatch.setattr(sim.run, "MOST_ROLLOUTS", math.inf)
    all_ = measured_steps(true_run(many))
    seconds = [simulated_step(true_run(many), rows).generation_s for rows in (few, all_)]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.03)


def test_a_time_that_other_times_set_ends_the_search_at_once() -> None:
    run, tried = run_of(NAMED), list[RunConfig]()
    fit = HardwareFit(run.hardware)
    with pytest.raises(ConfigError, match=r"s=0\.1 is out of reach: the nearest that the hardware model gives is 3 s"):
        fit_factor(fit, run, "generation", 0.1, lambda config: tried.append(config) or 3.0, name="s")
    assert len(tried) == 2


def test_a_step_of_more_answers_than_can_be_simulated_is_refused() -> None:
    log = logged_run([LoggedStep(step=1, step_s=60.0, generation_s=30.0, samples=200_000.0, length_mean=100.0)])
    with pytest.raises(ConfigError, match="must have at most 100,000 answers, got 200,000"):
        calibrated(log)


def test_a_trainer_that_never_waits_says_nothing_of_generation() -> None:
    steps = steps_of(true_run("cluster.generation_accelerators=14"))
    result = calibrated(logged_run(steps), "cluster.generation_accelerators=14")
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
    with pytest.raises(ConfigError, match=r"training_s of the log=.* is out of reach"):
        calibrate_log(log(0.8), run, [], MODELS)


def test_parts_that_a_log_lacks_are_those_of_the_hardware_model() -> None:
    run = run_of(NAMED, "scheduler.kind=conventional")
    mean = LoggedStep(step=9, step_s=100.0, samples=256.0, length_mean=1500.0)
    result = calibrate_log(LoggedRun(9, 1, mean, 8000.0), run, [], MODELS)
    lacking = [line.partition(":")[0] for line in result.assumed]
    assert lacking == ["training", "weight synchronization", "phase switch", "generation"]
    factors = {
        name: math.exp(1.2816 * sd) for name, sd in zip(lacking, (0.5, math.hypot(1.1, 1.1), 0, 0.35), strict=True)
    }
    costs = [
        f"which holds to a factor of {factors[name]:.2g} (80 %)" in line
        for name, line in zip(lacking, result.assumed, strict=True)
    ]
    assert costs == [True, True, False, True]
    assert result.run == run


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


def test_missing_values_of_a_step_by_hand() -> None:
    step = LoggedStep(step=3, step_s=20.0, training_s=6.0, sync_s=1.0, generation_s=18.0, total_tokens=12_000,
                      sequence_mean=120.0, prompt_mean=20.0)  # fmt: skip
    done = step.completed()
    assert (done.length_mean, done.samples, done.tokens, done.tokens_per_s) == (100, 100, 10_000, 500)
    assert done.wait_s == 13  # 18 + 6 + 1 > 20: side by side
    done = LoggedStep(step=3, step_s=2.0, tokens_per_s=500.0, samples=10).completed()
    assert (done.tokens, done.length_mean) == (1000, 100)


def test_steps_with_an_evaluation_are_left_out() -> None:
    seconds = (90.0, 10.0, 11.0, 9.0, 50.0, 10.0)
    log = logged_run([LoggedStep(step=one, step_s=s, length_mean=100.0) for one, s in enumerate(seconds)])
    assert (log.num_steps, log.num_left_out, log.mean.step_s) == (4, 2, 10.0)


def test_metrics_of_one_step_may_come_in_several_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("step:4 - timing_s/step:10.0 - timing_s/gen:6.0\nstep:4 - timing_s/update_actor:2.5\n")
    assert read_log([path], "verl") == [LoggedStep(step=4, step_s=10.0, generation_s=6.0, training_s=2.5)]


def console(*steps: tuple[int, float]) -> str:
    return "".join(f"step:{step} - timing_s/step:{seconds}\n" for step, seconds in steps)


def test_a_log_holds_another_run_where_its_steps_begin_anew(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(console((1, 10.0), (2, 10.0), (3, 10.0), (1, 7.0), (2, 7.0)))
    steps = read_log([tmp_path / "a.log"], "verl")
    assert [step.step for step in steps] == [1, 2, 3, 1, 2]
    runs = [logged_run(steps, number) for number in (1, 2, None)]
    assert [(run.number, run.num_runs, run.mean.step_s) for run in runs] == [(1, 2, 10.0), (2, 2, 7.0), (2, 2, 7.0)]
    with pytest.raises(ConfigError, match="--run must be at most 2, the runs in the log, got 3"):
        logged_run(steps, 3)


def test_a_job_that_goes_on_from_a_checkpoint_is_one_run(tmp_path: Path) -> None:
    """Steps that it makes again count as they were made last."""
    (tmp_path / "a.log").write_text(console((1, 10.0), (2, 10.0), (3, 10.0), (2, 8.0), (3, 8.0), (4, 8.0)))
    steps = read_log([tmp_path / "a.log"], "verl")
    assert [(step.step, step.step_s) for step in steps] == [(1, 10.0), (2, 8.0), (3, 8.0), (4, 8.0)]
    assert logged_run(steps).num_runs == 1


def test_a_chart_of_several_runs_has_them_one_after_the_other(tmp_path: Path) -> None:
    """A second chart has its metric of the same runs."""
    (tmp_path / "a.csv").write_text("Step,one - timing_s/step,two - timing_s/step\n1,10,7\n2,10,\n3,,7\n")
    (tmp_path / "b.csv").write_text("Step,one - timing_s/gen,two - timing_s/gen\n1,5,3\n2,5,\n3,,3\n")
    steps = read_log([tmp_path / "a.csv", tmp_path / "b.csv"], "verl")
    found = [(step.step, step.step_s, step.generation_s) for step in steps]
    assert found == [(1, 10, 5), (2, 10, 5), (1, 7, 3), (3, 7, 3)]


def test_rows_of_a_plain_table_that_begin_anew_are_another_run(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("step,step_s\n0,5\n1,5\n0,6\n1,6\n")
    assert logged_run(read_log([tmp_path / "a.csv"], "csv"), 1).mean.step_s == 5


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
        ("a.jsonl", "{]", "verl", r"a\.jsonl is not valid JSON"),
        ("a.jsonl", "[3]", "verl", r"a\.jsonl must hold an object per line, got 3"),
        ("a.log", "step:1 - timing_s/step:-3.0\n", "verl", r"step 1 of the log: step_s must be above 0, got -3"),
        ("a.csv", "step,step_s,lenght\n1,2,3\n", "csv", r"'lenght' is an unknown column"),
        ("a.csv", "step,step_s\n1,x\n", "csv", r"step_s must be a number above 0, got 'x'"),
        ("a.csv", "step,sync_s\n1,2\n", "csv", r"the log must tell the seconds of a step"),
        ("a.jsonl", '{"ph": "X", "dur": 1, "args": [1]}', "areal", r"a\.jsonl must hold steps as areal logs them"),
        ("a.jsonl", '{"step": NaN, "timing_s/step": 1}', "verl", r"a\.jsonl must hold steps as verl logs them"),
        ("a.log", f"step:{'9' * 5000} - timing_s/step:1\n", "verl", r"a\.log must hold steps as verl logs them"),
        ("a.csv", "step,step_s\n1,1e308\n2,1e308\n", "csv", r"step 1 of the log: step_s must be at most 1e\+15, got"),
        (
            "a.csv",
            "_step,timing_s/step\n" + "".join(f"{step},1\n" for step in range(100_001)),
            "verl",
            r"a\.csv must hold at most 100,000 steps",
        ),
    ],
)
def test_a_log_that_cannot_be_used_is_refused_in_one_line(
    tmp_path: Path, name: str, text: str, system: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        logged_run(read_log([tmp_path / name], system))
    assert "\n" not in str(error.value)
