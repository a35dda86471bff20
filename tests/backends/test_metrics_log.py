"""Metrics of a real run: lines of JSON, TensorBoard, Weights & Biases; what a resumed run keeps of them."""

from __future__ import annotations

import json
import secrets
import sys
import time
from types import SimpleNamespace

import pytest
from in_memory import config_of

from backends.metrics_log import TENSORBOARD_FOLDER, MetricsLog
from pipelinerl.errors import RunFailedError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TensorBoard's
WANDB = config_of(train={"logging": {"wandb_project": "lag"}})


def write(out, config, metrics, *, go_on_after=0):
    """Open a log, write these metrics by their steps, and close it."""
    log = MetricsLog(out, config, go_on_after=go_on_after)
    for step, values in metrics.items():
        log.write(step, values)
    log.close()


def lines(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_line_is_on_disk_before_the_log_is_closed(tmp_path):
    log = MetricsLog(tmp_path, config_of())
    log.write(1, {"reward/mean": 0.25})
    assert lines(tmp_path) == [{"step": 1, "reward/mean": 0.25}]
    log.close()


def test_a_full_disk_is_said_with_the_path(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    log = MetricsLog(tmp_path, config_of())
    with pytest.raises(RunFailedError, match=rf"^cannot write {tmp_path}/metrics.jsonl: No space left on device$"):
        log.write(1, {"reward/mean": 0.25})
    with pytest.raises(RunFailedError, match="cannot write"):
        log.close()


def test_tensorboard_gets_every_number_at_its_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, config_of(), {1: {"reward/mean": 0.25, "lag/mean": 0.0}, 2: {"reward/mean": 0.5, "lag/mean": 1.5}})
    board = EventAccumulator(str(tmp_path / TENSORBOARD_FOLDER))
    board.Reload()
    assert [(one.step, one.value) for one in board.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    assert [(one.step, one.value) for one in board.Scalars("lag/mean")] == [(1, 0.0), (2, 1.5)]


def test_a_resumed_log_forgets_what_came_after_the_checkpoint(tmp_path):
    write(tmp_path, config_of(), {step: {"reward/mean": 0.1 * step} for step in (1, 2, 3)})
    write(tmp_path, config_of(), {3: {"reward/mean": 0.9}}, go_on_after=2)
    assert [(one["step"], one["reward/mean"]) for one in lines(tmp_path)] == [(1, 0.1), (2, 0.2), (3, 0.9)]


def test_weights_and_biases_gets_the_same_under_one_name_over_restarts(tmp_path, monkeypatch):
    calls = []
    run = SimpleNamespace(
        log=lambda metrics, step: calls.append(("log", metrics, step)), finish=lambda: calls.append(("finish",))
    )

    def init(**options):
        calls.append(("init", options["project"], options["id"], options["resume"], options["config"]["seed"]))
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.setattr(secrets, "token_hex", lambda _: f"run-{len(calls)}")
    write(tmp_path, WANDB, {1: {"reward/mean": 0.25}})
    write(tmp_path, WANDB, {}, go_on_after=1)
    assert calls == [
        ("init", "lag", "run-0", "allow", 0),
        ("log", {"reward/mean": 0.25}, 1),
        ("finish",),
        ("init", "lag", "run-0", "allow", 0),
        ("finish",),
    ]


def records_of(path):
    """The records of an offline run of real wandb: a LevelDB log of chunks that end at every 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record = path.read_bytes(), 7, b""
    assert data[:4] in {b"", b":W&B"}
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if at + 7 + length > len(data):
            return  # it is being written
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in {1, 4}:  # whole, or the last part
            yield Record.FromString(record)
            record = b""


def all_records_of(path):
    """Wandb's process writes on for a moment when ``finish`` has returned."""
    over_s = time.monotonic() + 300
    while not (records := list(records_of(path))) or records[-1].WhichOneof("record_type") != "exit":
        assert time.monotonic() < over_s, records
        time.sleep(0.02)
    return records


def offline_runs(folder):
    """Project, id and history of each offline run, in order of their start."""
    runs = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        records = all_records_of(path)
        (run,) = (one.run for one in records if one.WhichOneof("record_type") == "run")
        rows = [one.history.item for one in records if one.WhichOneof("record_type") == "history"]
        named = [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]
        runs.append(((run.project, run.run_id), named))
    return runs


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
    (begun, before), (resumed, after) = offline_runs(tmp_path)
    assert begun == resumed == ("lag", run_id)
    logged = [(one["_step"], one["reward/mean"], one["lag/mean"]) for one in before + after]
    assert logged == [(1, 0.25, 1.5), (2, 0.5, 1.5), (3, 0.75, 1.5), (4, 1.0, 1.5)]


def test_what_is_not_finite_is_left_out_since_json_has_no_word_for_it(tmp_path):
    write(
        tmp_path, config_of(), {1: {"train/loss": float("nan"), "train/gradient_norm": float("inf"), "lag/mean": 1.0}}
    )
    assert lines(tmp_path) == [{"step": 1, "lag/mean": 1.0}]
