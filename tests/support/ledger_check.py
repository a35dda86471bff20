"""What must hold of the folder of any finished real run, whatever happened in it."""

import csv
import json

from pipelinerl.records.recording import replay_run
from pipelinerl.records.run_folder import METRICS_FILE, SAMPLES_FILE, TRACE_FILE
from pipelinerl.records.trace import Trace
from pipelinerl.scheduler.events import DiscardRollouts, RolloutFinished, StartTraining, TrainingFinished


def records(out):
    return list(Trace(out / TRACE_FILE).records())


def lines_of(out, name):
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


def metrics_of(out):
    return lines_of(out, METRICS_FILE)


def check_ledger(out, config, summary):
    """What must hold of any finished run, whatever happened in it."""
    again = replay_run(Trace(out / TRACE_FILE))
    assert (again.difference, again.compared) == (None, ("summary.json", "steps.csv"))
    rows = records(out)
    trained = [r for row in rows if isinstance(row.command, StartTraining) for r in row.command.rollout_ids]
    discarded = [r for row in rows if isinstance(row.command, DiscardRollouts) for r in row.command.rollout_ids]
    finished = [row.event.rollout_id for row in rows if isinstance(row.event, RolloutFinished)]
    assert len(trained) == config.optimizer_steps * config.scheduler.train_batch_size
    assert len(set(trained)) == len(trained), "a rollout is trained on twice"
    assert len(set(finished)) == len(finished)  # none finishes twice
    assert set(trained) <= set(finished)
    assert not set(trained) & set(discarded)
    versions = [row.event.version for row in rows if isinstance(row.event, TrainingFinished)]
    assert sorted(set(versions) | {0}) == list(range(config.optimizer_steps + 1))
    times = [row.time_s for row in rows]
    assert times == sorted(times)
    counts = summary.rollouts
    assert counts.started == counts.trained + counts.discarded + counts.aborted + counts.failed + counts.unfinished
    tokens = summary.tokens
    assert tokens.generated == tokens.trained + tokens.discarded + tokens.aborted + tokens.failed + tokens.unfinished
    with (out / "steps.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(1, config.optimizer_steps + 1))
    steps = list(range(1, config.optimizer_steps + 1))
    assert [line["step"] for line in lines_of(out, METRICS_FILE)] == steps
    samples = [line["step"] for line in lines_of(out, SAMPLES_FILE) if not line["held_out"]]
    assert samples == [step for step in steps for _ in range(2)]
