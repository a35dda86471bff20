"""Metrics of a real run: lines of JSON, TensorBoard, Weights & Biases; what a resumed run keeps of them."""

import math
import sys
from functools import partial
from unittest.mock import Mock

import pytest
from in_memory import config_of

from backends.driver.metrics import TENSORBOARD_FOLDER, MetricsLog, StepMetrics
from pipelinerl.errors import RunFailedError
from pipelinerl.records.ledger import RunLedger
from pipelinerl.records.recording import Recording
from pipelinerl.records.reports import DecodeSteps
from pipelinerl.records.steps import StepRow
from pipelinerl.rl.config import LossConfig

# Measurements of an optimizer step, from those of its micro-batches and ranks.


def taken(metrics: StepMetrics) -> dict[str, float]:
    """End a step; return what the trainer reports of it."""
    row = StepRow(**dict.fromkeys(StepRow.model_fields, 0))
    logged = metrics.take(row, RunLedger(num_engines=1, colocated=False, longest=100))
    return {name.removeprefix("train/"): value for name, value in logged.items() if name.startswith("train/")}


def test_micro_batches_and_ranks_make_one_step() -> None:
    """Losses, seconds and tokens add up; memory is the largest; entropy is per token, FLOP/s per rank."""
    metrics = StepMetrics(LossConfig())
    micro_batch = {"loss": 0.25, "entropy_sum": 6.0, "answer_tokens_sum": 3.0, "flop_sum": 8e12, "peak_flops": 1e13}
    micro_batch |= {"rank0/forward_s": 0.5, "rank1/forward_s": 1.0, "rank1/backward_s": 0.5, "rank1/peak_memory_gb": 7}
    metrics.add_trainer_metrics(micro_batch)
    metrics.add_trainer_metrics(micro_batch | {"entropy_sum": 0.0, "rank1/peak_memory_gb": 6.0, "skipped": 1.0})
    step = {"loss": 0.5, "entropy": 1.0, "flop_per_s": 4e12, "mfu": 0.4, "skipped": 1.0}
    step |= {"rank0/forward_s": 1.0, "rank1/forward_s": 2.0, "rank1/backward_s": 1.0, "rank1/peak_memory_gb": 7.0}
    assert taken(metrics) == pytest.approx(step)
    assert metrics.summary().skipped_steps == 1
    assert taken(metrics) == {}


def test_tokens_per_step_are_those_of_steps_with_drafts_since_the_step_before() -> None:
    metrics = StepMetrics(LossConfig())
    row, ledger = (
        StepRow(**dict.fromkeys(StepRow.model_fields, 0)),
        RunLedger(num_engines=1, colocated=False, longest=9),
    )
    metrics.decoded(DecodeSteps(steps=2, sequences=8, tokens=12, seconds=0.5))
    metrics.decoded(DecodeSteps(steps=1, sequences=2, tokens=3, seconds=0.5))
    assert metrics.take(row, ledger)["engines/tokens_per_step"] == 15 / 10
    metrics.decoded(DecodeSteps(steps=1, sequences=2, tokens=2, seconds=0.5))
    assert "engines/tokens_per_step" not in metrics.take(row, ledger)


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TensorBoard's
WANDB = config_of(train={"logging": {"wandb_project": "lag"}})


def write(out, config, metrics, *, go_on_after=0):
    """Open a log, write these metrics by their steps, and close it; return the lines."""
    recording = Mock()
    log = MetricsLog(out, config, recording, go_on_after=go_on_after)
    for step, values in metrics.items():
        log.write(step, values)
    log.close()
    return [call.args for call in recording.append.call_args_list]


def test_a_full_disk_is_said_with_the_path(tmp_path):
    recording = Recording(config_of(), out=tmp_path)
    (tmp_path / "metrics.jsonl.partial").symlink_to("/dev/full")
    for write in (partial(recording.append, "metrics.jsonl", {"step": 1}), recording.close):
        with pytest.raises(RunFailedError, match=f"^cannot write {tmp_path}/metrics.jsonl: No space left on device$"):
            write()


def test_tensorboard_gets_every_number_at_its_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, config_of(), {1: {"reward/mean": 0.25, "lag/mean": 0.0}, 2: {"reward/mean": 0.5, "lag/mean": 1.5}})
    board = EventAccumulator(str(tmp_path / TENSORBOARD_FOLDER))
    board.Reload()
    assert [(one.step, one.value) for one in board.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    assert [(one.step, one.value) for one in board.Scalars("lag/mean")] == [(1, 0.0), (2, 1.5)]


def test_weights_and_biases_gets_the_same_under_one_name_over_restarts(tmp_path, monkeypatch):
    wandb = Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    write(tmp_path, WANDB, {1: {"reward/mean": 0.25}})
    write(tmp_path, WANDB, {}, go_on_after=1)
    first, again = (init.kwargs for init in wandb.init.call_args_list)
    assert first == again
    assert (first["project"], first["resume"], first["config"]["seed"]) == ("lag", "allow", 0)
    assert [name for name, *_ in wandb.mock_calls] == ["init", "init().log", "init().finish", "init", "init().finish"]
    wandb.init.return_value.log.assert_called_once_with({"reward/mean": 0.25}, step=1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_real_weights_and_biases_keeps_an_offline_run_and_its_id(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    for done in (0, 2):
        steps = range(done + 1, done + 3)
        write(tmp_path, WANDB, {k: {"reward/mean": 0.25 * k, "lag/mean": 1.5} for k in steps}, go_on_after=done)
    run_id = (tmp_path / "wandb_id.txt").read_text()
    written = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert [path.name for path in written] == [f"run-{run_id}.wandb"] * 2


def test_what_is_not_finite_is_left_out_since_json_has_no_word_for_it(tmp_path):
    metrics = {1: {"train/loss": math.nan, "train/gradient_norm": math.inf, "lag/mean": 1.0}}
    assert write(tmp_path, config_of(), metrics) == [("metrics.jsonl", {"step": 1, "lag/mean": 1.0})]
