"""Traces: the hardware that made them comes back."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calibrated import CONVENTIONAL, NAMED, RUN, decode_s, numbers_of, run_of, traced, undetermined

from pipelinerl.calibration.calibrate import Drafts, calibrate_trace, fit_decode, hardware_toml
from pipelinerl.calibration.measured import merged as with_measured
from pipelinerl.calibration.solve import HardwareFit, fixed_coefficients
from pipelinerl.calibration.trace import DecodeTimes, EngineLog, Life, read_times
from pipelinerl.config.engine import SpeculationConfig
from pipelinerl.config.resolve import resolved_hardware
from pipelinerl.config.run import RunConfig, dump_run, load_run
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.costs import AffineDecode
from pipelinerl.records.reports import RunReport
from pipelinerl.records.trace import Trace, TraceWriter
from pipelinerl.scheduler.events import RolloutFinished, RolloutScored, StartRollout, TurnFinished, VersionSpans
from sim.run import simulate

EXAMPLES = Path(__file__).parents[3] / "examples"
BLANK = "hardware={ decode = { kind = 'affine', step_s = 1.0 }, training = { token_s = 1.0 } }"
"""Where a fit begins that knows nothing."""


def test_a_simulated_trace_gives_back_the_hardware_it_was_made_with(pipeline_folder: Path) -> None:
    result = calibrate_trace(pipeline_folder, run_of(RUN, BLANK))
    true = RUN["hardware"]
    assert numbers_of(result.table["decode"]) == pytest.approx(numbers_of(true["decode"]), rel=1e-5)
    assert result.table["prefill"]["token_s"] == pytest.approx(1e-4, rel=1e-5)
    assert result.table["training"] == pytest.approx(true["training"], rel=1e-5)
    assert result.table["weights"] == pytest.approx({**true["weights"], "transfer_s": 0.0}, abs=1e-3)
    assert result.table["latency"]["reward_s"] == pytest.approx(0.3)
    assert result.table["latency"]["dispatch_s"] == pytest.approx(0.05, abs=0.01)  # a step lasts 0.03 s
    assert not undetermined(result)


def test_a_trace_of_engines_that_draft_gives_back_hardware_and_acceptance(tmp_path: Path) -> None:
    """Lives of rollouts have tokens, which chance spreads over steps: costs come back to 3 %, the mean to 1 %."""
    draft = {"speculation": {"method": "eagle3", "tokens": 3, "acceptance": 0.6, "draft_cost": 0.1}}
    base = {**RUN, "engine": draft}
    result = calibrate_trace(traced(tmp_path / "run", run_of(base)), run_of(base, BLANK))
    assert result.acceptance == pytest.approx(0.6, abs=0.01)
    found = AffineDecode.model_validate(result.table["decode"])
    true = AffineDecode.model_validate(RUN["hardware"]["decode"])
    assert decode_s(found, 1, 24, 8000) == pytest.approx(decode_s(true, 1, 24, 8000), rel=0.03)
    (tmp_path / "hardware.toml").write_text(hardware_toml(result, "run"))
    run_file = tmp_path / "run.toml"
    run_file.write_text(dump_run(run_of(base)))
    read = load_run(run_file, [], hardware=tmp_path / "hardware.toml")
    assert read.speculation is not None
    assert read.speculation.acceptance == result.acceptance
    merged, _ = with_measured(run_of(base), [tmp_path / "hardware.toml"])
    assert merged.speculation is not None
    assert merged.speculation.acceptance == result.acceptance


def test_windows_of_steps_count_drafted_tokens_where_steps_drafted() -> None:
    """Two bins of steps: 4 sequences with k = 2 drafts each, and 8 without, above the limit."""
    given = SpeculationConfig(method="eagle", tokens=2, off_above=4, draft_cost=0.5)
    drafts = Drafts(given, tokens_per_step=1.5, share=1 / 3)
    some = DecodeTimes.of(
        steps=np.array([10.0, 5.0]),
        sequences=np.array([40.0, 40.0]),
        context=np.array([100.0, 100.0]),
        seconds=np.ones(2),
    )
    plain = drafts.windows(some)
    # A step verifies three tokens a sequence, and has drafted two at half of a plain step's cost each.
    assert plain.steps.tolist() == [10 * 2.0, 5.0]
    assert plain.sequences.tolist() == [40 * (3 + 1.0), 40.0]
    assert plain.context.tolist() == [200.0, 100.0]
    # The third that drafted got 1 + 0.5 * 3 tokens a step: 1 + a + a^2 = 2.5.
    assert drafts.acceptance == pytest.approx((7**0.5 - 1) / 2)


TURNS: dict[str, Any] = {
    "kind": "lognormal", "mean": 3, "cv": 0.5, "max": 8, "observation_tokens": 400, "observation_cv": 1.0,
    "observation_max": 2000, "context_max": 12000,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("prefix_cache", ["off", "salted", "kept"])
def test_a_trace_with_turns_gives_back_its_hardware(tmp_path: Path, prefix_cache: str) -> None:
    """Observations are prefilled and trained on; before, the fit read ``workload.prompt_tokens`` per turn."""
    environment = {"count": 96, "reset_s": 0.5, "step_s": 2.0, "prefix_cache": prefix_cache, "turns": TURNS}
    base = {**RUN, "environment": environment}
    table = calibrate_trace(traced(tmp_path / "run", run_of(base)), run_of(base, BLANK)).table
    assert numbers_of(table["decode"]) == pytest.approx(numbers_of(RUN["hardware"]["decode"]), rel=1e-5)
    assert table["prefill"]["token_s"] == pytest.approx(1e-4, rel=1e-5)
    assert table["training"] == pytest.approx(RUN["hardware"]["training"], rel=1e-5)
    assert table["latency"]["reward_s"] == pytest.approx(0.3)


def test_the_answer_to_the_last_turn_counts_as_scoring(tmp_path: Path) -> None:
    """As in a simulation: a real run has it between ``TurnFinished`` and ``RolloutFinished`` without an engine."""
    spans = VersionSpans((0,), (10,))
    with closing(TraceWriter(tmp_path / "trace.jsonl.gz", run_of(RUN))) as trace:
        for rollout_id, engine in ((0, 0), (1, 1)):
            trace.command(0.0, StartRollout(rollout_id, 0, engine))
            trace.event(1.0, TurnFinished(rollout_id, engine, spans))
        trace.event(1.75, RolloutFinished(0, None, spans))
        trace.event(2.0, RolloutScored(0, 1.0))
        trace.event(2.5, RolloutFinished(1, None, spans, 1.0))
    assert read_times(Trace(tmp_path / "trace.jsonl.gz")).score_s == [1.0, 1.5]


def test_calibrated_hardware_simulates_like_the_run(pipeline_folder: Path) -> None:
    result = calibrate_trace(pipeline_folder)
    again = simulate(run_of({**RUN, "hardware": result.table}))
    before = RunReport.read(pipeline_folder / "summary.json")
    assert again.tokens_per_s == pytest.approx(before.tokens_per_s, rel=0.01)
    assert again.lag.mean == pytest.approx(before.lag.mean, rel=0.05)


def test_a_conventional_trace_gives_decode_from_its_drains_and_the_phase_switch(tmp_path: Path) -> None:
    config = run_of(RUN, *CONVENTIONAL, "hardware.switch={ to_training_s = 1.5, to_generation_s = 0.8 }")
    result = calibrate_trace(traced(tmp_path / "run", config))
    assert numbers_of(result.table["decode"]) == pytest.approx(numbers_of(RUN["hardware"]["decode"]), rel=1e-5)
    assert result.table["switch"] == pytest.approx({"to_training_s": 1.5, "to_generation_s": 0.8})
    assert any("prefill" in note for note in result.notes)


def test_lives_of_rollouts_alone_come_close(tmp_path: Path) -> None:
    folder = traced(tmp_path / "run", run_of(RUN, *CONVENTIONAL, "hardware.latency.dispatch_jitter_s=0.01"))
    times = read_times(Trace(folder / "trace.jsonl.gz"))
    times.windows = None
    result = HardwareFit(times.config.hardware)
    fit_decode(result, times)
    true = decode_s(resolved_hardware(times.config).decode, 1, 12, 12 * 250)
    fitted = run_of({**RUN, "hardware": {**RUN["hardware"], "decode": result.table["decode"]}})
    assert decode_s(resolved_hardware(fitted).decode, 1, 12, 12 * 250) == pytest.approx(true, rel=0.03)


def test_lives_come_close_with_gpu_and_model_too(tmp_path: Path) -> None:
    overrides = ("scheduler.kind=conventional", "hardware.coefficients.step_overhead_s=0.004", "optimizer_steps=4")
    folder = traced(tmp_path / "run", run_of(NAMED, *overrides, "hardware.latency.dispatch_s=0.5"))
    times = read_times(Trace(folder / "trace.jsonl.gz"))
    times.windows = None
    result = HardwareFit(run_of(NAMED).hardware)
    fit_decode(result, times)
    assert result.table["coefficients"]["step_overhead_s"] == pytest.approx(0.004, rel=0.1)
    assert result.table["latency"]["dispatch_s"] == pytest.approx(0.5, rel=0.3)  # in 8 s and more of each rollout


def run_with_a_front_end(num_slots: int, latency: str) -> RunConfig:
    """Answers of a few tokens, 128 at a time: the front end takes longer for them than the steps do."""
    overrides = (
        f"scheduler.generation_batch_size={num_slots}",
        "optimizer_steps=40",
        "hardware.decode={kind = 'affine', step_s = 0.02}",
        "hardware.prefill={token_s = 0.0}",
        "hardware.training={token_s = 1.34e-4}",
        "hardware.weights={publish_s = 0.02, transfer_s = 0.05, pause_s = 0.05}",
        f"hardware.latency={latency}",
    )
    return load_run(EXAMPLES / "tiny_arithmetic.toml", [*overrides])


@pytest.mark.slow
def test_a_trace_of_one_h_predicts_another_if_the_front_end_is_known(tmp_path: Path) -> None:
    """Without it its queue counts as a way that is as long at any H, and fewer slots come out half as fast."""
    rest = "dispatch_s = 0.01, report_s = 0.03, reward_s = 0.02"
    folder = traced(tmp_path / "run", run_with_a_front_end(128, f"{{request_s = 0.0022, {rest}}}"))
    errors = {}
    for request_s in (0.0022, 0.0):
        table = calibrate_trace(folder, run_with_a_front_end(128, f"{{request_s = {request_s}}}")).table
        for num_slots in (64, 32):
            truth = run_with_a_front_end(num_slots, f"{{request_s = 0.0022, {rest}}}")
            data = {**truth.model_dump(mode="json", exclude_none=True), "hardware": table}
            speed = simulate(RunConfig.model_validate(data, strict=False)).tokens_per_s
            errors[request_s, num_slots] = speed / simulate(truth).tokens_per_s - 1
    assert [errors[0.0022, one] for one in (64, 32)] == pytest.approx([0.0, 0.0], abs=0.02)
    assert max(errors[0.0, one] for one in (64, 32)) < -0.4


def measured(folder: Path, **more: Any) -> Path:
    """Return the folder of a simulated run whose summary also has keys of a real one."""
    summary = traced(folder, run_of(RUN)) / "summary.json"
    summary.write_text(json.dumps({**json.loads(summary.read_text()), **more}))
    return folder


def test_the_measured_front_end_of_a_real_run_is_taken(tmp_path: Path) -> None:
    """2 ms per rollout of the driver, which serves both engines, is more than 3 ms of each of them."""
    folder = measured(tmp_path / "run", driver_busy_s_per_rollout=0.002, front_end_busy_s_per_rollout=0.003)
    assert calibrate_trace(folder).table["latency"]["request_s"] == pytest.approx(2 * 0.002)


def test_decode_steps_that_a_real_run_measured_tell_what_a_sequence_and_a_prompt_cost(tmp_path: Path) -> None:
    """10 ms, 1 ms a sequence, 0.1 ms a token of a prompt. A pipeline's batch is always full: its trace cannot tell."""
    steps = []
    for num, size, started in ((10, 1, 0), (20, 2, 1), (30, 5, 2), (40, 9, 4), (900, 16, 3)):
        each = {"steps": 1, "sequences": size, "context": 40 * size, "started": started, "read_tokens": 20 * started}
        seconds = 0.010 + 0.001 * size + 0.0001 * 20 * started
        steps.append({name: num * value for name, value in {**each, "seconds": seconds}.items()})
    folder = measured(tmp_path / "run", decode_steps=steps)
    result = calibrate_trace(folder, run_of(RUN, BLANK, "hardware.prefill={ token_s = 0.5 }"))
    expected = {"step_s": 0.010, "sequence_s": 0.001, "context_token_s": 0.0}
    assert numbers_of(result.table["decode"]) == pytest.approx(expected, abs=1e-7)
    fills = {"token_s": 0.0001, "sequence_s": 0.0, "token_squared_s": 0.0}
    assert result.table["prefill"] == pytest.approx(fills, abs=1e-7)


def test_rollouts_that_come_in_a_pause_share_the_first_step_after_it() -> None:
    """One is in progress, two come in the pause from 1 s to 2 s: each waits for the prompts of both."""
    lived = [
        Life(start_s, end_s, read=5, kept=0, cached=0, pieces=[(0, 0, tokens)], number=number)
        for number, (start_s, end_s, tokens) in enumerate([(0.0, 3.0, 6), (1.2, 3.0, 3), (1.8, 3.0, 3)])
    ]
    log = EngineLog(sent_s=[0.0, 1.2, 1.8], lived=lived, loads=[(2.0, 1.0, 1)])
    rows_LC = log.lives(0.0, None, np.zeros(3))
    prefills, tokens, squares = rows_LC[:, 3:6].T
    assert list(prefills) == [3, 2, 2]
    assert list(tokens) == [15, 10, 10]
    assert list(squares) == [75, 50, 50]


def test_the_report_latency_comes_back(tmp_path: Path) -> None:
    folder = traced(tmp_path / "run", run_of(RUN, "hardware.latency.report_s=0.4"))
    latency = calibrate_trace(folder, run_of(RUN, BLANK)).table["latency"]
    assert latency["report_s"] == pytest.approx(0.4, rel=0.15)
    assert latency["dispatch_s"] == pytest.approx(0.05, abs=0.07)


@pytest.mark.parametrize("data", [RUN, NAMED], ids=["tables", "names"])
def test_mean_batches_below_one_are_not_raised_to_one(data: dict[str, Any]) -> None:
    """Where the KV cache is full a life can hold fewer tokens than steps: their cost is linear there, too."""
    run = run_of({**data, "hardware": {**data["hardware"], "latency": {}}})
    decode = resolved_hardware(run).decode
    empty_s = 2 * decode_s(decode, 1, 1, 0) - decode_s(decode, 1, 2, 0)
    sequence_s = decode_s(decode, 1, 1, 0) - empty_s
    context_token_s = decode_s(decode, 1, 1, 1) - decode_s(decode, 1, 1, 0)
    rows = [
        (steps, steps * mean, steps * 900.0 * (1 + index % 3))
        for index, steps in enumerate((200.0, 500.0, 800.0, 1100.0))
        for mean in (0.25, 0.5, 2.0)
    ]
    steps, sequences, context = np.array(rows).T
    lives = np.arange(1.0, len(rows) + 1)
    work_s = empty_s * steps + sequence_s * sequences + context_token_s * context
    times = DecodeTimes.of(
        steps=steps, sequences=sequences, context=context, seconds=work_s + 60.0 * lives, lives=lives
    )
    result, ones = HardwareFit(run.hardware), np.ones(len(rows))
    assert result.decode(times, ones, "lives", with_dispatch=True) == pytest.approx(60.0, rel=1e-6)
    assert result.decode_s(times, ones) == pytest.approx(work_s, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("update", ["recompute", "abort", "wait"])
def test_every_kind_of_weight_update_leaves_the_decode_step_as_it_is(tmp_path: Path, update: str) -> None:
    folder = traced(tmp_path / "run", run_of(RUN, f"scheduler.weight_update={update}"))
    result = calibrate_trace(folder, run_of(RUN, BLANK))
    assert 0 <= result.table["latency"]["dispatch_s"] < 1  # it is 0.05 s
    fitted = run_of({**RUN, "hardware": result.table})
    true = decode_s(resolved_hardware(run_of(RUN)).decode, 1, 20, 20 * 250)
    assert decode_s(resolved_hardware(fitted).decode, 1, 20, 20 * 250) == pytest.approx(true, rel=0.1)


def test_a_run_of_one_step_has_no_publication_to_time(tmp_path: Path) -> None:
    result = calibrate_trace(traced(tmp_path / "run", run_of(RUN, "optimizer_steps=1")))
    assert "weights: no publication in the trace" in result.notes


@pytest.mark.slow
def test_with_gpu_and_model_the_coefficients_come_back(tmp_path: Path) -> None:
    changed = {"kv_efficiency": 0.8, "training_mfu": 0.33, "step_overhead_s": 0.002, "training_step_s": 2.5}
    overrides = [f"hardware.coefficients.{name}={value}" for name, value in changed.items()]
    folder = traced(tmp_path / "run", run_of(NAMED, *overrides))
    result = calibrate_trace(folder, run_of(NAMED))
    found = result.table["coefficients"]
    assert {name: found[name] for name in changed} == pytest.approx(changed, rel=1e-3)
    assert "decode" not in result.table
    assert "training" not in result.table
    # one engine size: reading weights and the step's own overhead are both the same in every step
    assert "step_overhead_s" in undetermined(result)["weight_efficiency"]
    assert "weight_efficiency" not in found


FEW: dict[str, Any] = {"train_batch_size": 16, "generation_batch_size": 16, "micro_batch_size": 8}


def test_a_trainer_with_few_sequences_is_not_taken_for_a_slow_one(tmp_path: Path) -> None:
    """8 sequences on 8 accelerators: a micro-batch lasts as long as its longest, in the simulator and in the fit."""
    base = {**NAMED, "scheduler": FEW}
    folder = traced(tmp_path / "run", run_of(base, "hardware.coefficients.training_mfu=0.33", "optimizer_steps=40"))
    found = calibrate_trace(folder, run_of(base)).table["coefficients"]
    assert found["training_mfu"] == pytest.approx(0.33, rel=1e-3)
    linear = calibrate_trace(folder, run_of(base, "hardware.coefficients.sequence_accelerators=8")).table
    assert linear["coefficients"].get("training_mfu", 0.9) != pytest.approx(0.33, rel=0.1)


@pytest.mark.parametrize(("shares", "found"), [((None, 0.01, 0.0, 0.03), 0.02), ((None, 0.0), None)])
def test_the_share_of_changed_numbers_of_a_real_run_comes_back(tmp_path: Path, shares, found) -> None:
    """The mean of versions sent as changes; other lines are of steps without one, and of whole weights."""
    run = run_of({**NAMED, "scheduler": FEW}, "optimizer_steps=4")
    folder = traced(tmp_path / "run", run)
    lines = [{"step": step, "weights/delta_share": share} for step, share in enumerate(shares, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert calibrate_trace(folder).table["coefficients"].get("changed_share") == found


def test_tables_of_a_trainer_with_few_sequences_come_back(tmp_path: Path) -> None:
    shared = "hardware.training.sequence_accelerators=1"
    folder = traced(tmp_path / "run", run_of({**RUN, "scheduler": {**FEW, "micro_batch_size": 4}}, shared))
    training = calibrate_trace(folder, run_of(RUN, BLANK, shared)).table["training"]
    assert training == pytest.approx({**RUN["hardware"]["training"], "sequence_accelerators": 1}, rel=1e-3)


def test_packs_are_calibrated_for_the_longest_rollout_that_is_simulated() -> None:
    """A length source knows its own prompts: ``workload.prompt_tokens``, far beyond any pack here, is not read."""
    length = "workload.length={ kind = 'empirical', source = 'rgym_llama_400', mean = 300, max = 8000 }"
    run = run_of(NAMED, length, "workload.prompt_tokens=500000")
    trainer = fixed_coefficients(run)
    assert trainer["pack_tokens"] < 500_000
    hardware = run.hardware.model_copy(update={"coefficients": trainer})
    again = resolved_hardware(run.model_copy(update={"hardware": hardware}))
    assert again.training == resolved_hardware(run).training


@pytest.mark.slow
def test_recomputation_in_the_run_file_is_not_taken_for_slowness(tmp_path: Path) -> None:
    """Recomputing or not is read from train.trainer: the same speed of the products comes back either way."""
    task = {"name": "math", "settings": {}}
    train = {"model": {"path": "m"}, "task": task, "optimizer": {"learning_rate": 1e-6}}
    run = {**NAMED, "train": train}
    for again in ("true", "false"):
        overrides = (f"train.trainer.activation_checkpointing={again}", "optimizer_steps=12")
        slow = run_of(run, *overrides, "hardware.coefficients.training_mfu=0.33")
        result = calibrate_trace(traced(tmp_path / again, slow), run_of(run, *overrides))
        assert result.table["coefficients"]["training_mfu"] == pytest.approx(0.33, rel=1e-3)


def test_equal_answers_leave_no_way_to_tell_the_trainers_fixed_part(tmp_path: Path) -> None:
    folder = traced(tmp_path / "run", run_of(RUN, "workload.length={ kind = 'fixed', max = 300 }"))
    result = calibrate_trace(folder, run_of(RUN, BLANK))
    names = undetermined(result)
    assert {"micro_batch_s", "token_squared_s"} <= set(names)  # all micro-batches are alike
    assert result.table["training"]["micro_batch_s"] == 0.0
    training = result.table["training"]
    work_s = (training["token_s"] * 3200 + training["token_squared_s"] * 8 * 400**2) / 2
    assert work_s == pytest.approx(0.1 + (4e-4 * 3200 + 2e-7 * 8 * 400**2) / 2, rel=1e-5)


def test_a_trace_that_ends_before_the_first_step_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    TraceWriter(tmp_path / "run" / "trace.jsonl.gz", run_of(RUN)).close()
    with pytest.raises(ConfigError, match="must hold an optimizer step and a finished rollout"):
        calibrate_trace(tmp_path / "run")
