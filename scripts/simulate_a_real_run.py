"""Simulate real runs with step times measured in one of them, and print both side by side.

    python scripts/simulate_a_real_run.py runs/tiny runs/tiny_conventional ...

Every run is simulated with its own answer lengths, once with the step times measured in itself (does the simulator
put them together rightly?) and once with those of the first run (do they carry over to another configuration?).

=====================  ================================================================================
hardware.decode        slope of (finish - start) of a rollout over its tokens, less the share of pauses
hardware.latency       intercept of the same line; median of (scored - finished)
hardware.training      line through the seconds of the optimizer steps over their tokens
hardware.weights       means of the publications and of the engines' pauses
=====================  ================================================================================
"""

from __future__ import annotations

import csv
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from pipelinerl.config import RunConfig
from pipelinerl.events import (
    RolloutAborted,
    RolloutFinished,
    RolloutScored,
    StartRollout,
    StartTraining,
    TrainingFinished,
    WeightsLoaded,
    WeightsPublished,
)
from pipelinerl.runfolder import TRACE_FILE
from pipelinerl.trace import Trace
from sim.run import simulate

ROWS = (
    ("tokens/s", lambda s: s["tokens_per_s"], "{:,.0f}"),
    ("seconds per optimizer step", lambda s: s["duration_s"] / s["optimizer_steps"], "{:.3f}"),
    ("lag, mean (optimizer steps)", lambda s: s["lag"]["mean"], "{:.2f}"),
    ("lag, p95 (optimizer steps)", lambda s: s["lag"]["p95"], "{:.0f}"),
    ("trainer idle", lambda s: 1 - (s["seconds"]["training"] + s["seconds"]["publishing"]) / s["duration_s"], "{:.0%}"),
    ("engines idle or paused", lambda s: 1 - s["utilisation"]["generation"], "{:.0%}"),
)


class Measured:
    """What a trace says of the time that things take, and of the lengths of answers."""

    def __init__(self, folder: Path) -> None:
        trace = Trace(folder / TRACE_FILE)
        self.config = trace.config
        started: dict[int, float] = {}
        finished: dict[int, float] = {}
        self.tokens: dict[int, int] = {}
        interrupted: set[int] = set()
        latency: list[tuple[int, float]] = []
        training: list[tuple[int, float]] = []
        self.scoring_s: list[float] = []
        self.publish_s: list[float] = []
        self.pause_s: list[float] = []
        batch: tuple[int, ...] = ()
        for record in trace.records():
            match record.event or record.command:
                case StartRollout(rollout_id=one):
                    started[one] = record.time_s
                case RolloutAborted(rollout_id=one):
                    interrupted.add(one)
                case RolloutFinished(rollout_id=one, spans=spans):
                    finished[one] = record.time_s
                    self.tokens[one] = spans.num_tokens
                    if one not in interrupted:
                        latency.append((spans.num_tokens, record.time_s - started[one]))
                case RolloutScored(rollout_id=one):
                    self.scoring_s.append(record.time_s - finished[one])
                case StartTraining(rollout_ids=ids):
                    batch = ids
                case TrainingFinished(train_s=seconds):
                    prompts = self.config.workload.prompt_tokens * len(batch)
                    training.append((prompts + sum(self.tokens[one] for one in batch), seconds))
                case WeightsPublished(publish_s=seconds):
                    self.publish_s.append(seconds)
                case WeightsLoaded(pause_s=seconds):
                    self.pause_s.append(seconds)
            self.duration_s = record.time_s
        self.latency_line = _line(latency)
        self.training_line = _line(training)

    def hardware(self) -> dict[str, Any]:
        """Return the table ``hardware`` that the measured times make."""
        pause_share = sum(self.pause_s) / self.config.num_engines / self.duration_s
        fixed_s, token_s = self.latency_line
        step_s, train_token_s = self.training_line
        return {
            "decode": {"kind": "affine", "step_s": token_s * (1 - pause_share)},
            "training": {"step_s": step_s, "token_s": train_token_s * self.config.training_accelerators},
            "weights": {"publish_s": float(np.mean(self.publish_s)), "pause_s": float(np.mean(self.pause_s))},
            "latency": {"dispatch_s": fixed_s, "reward_s": float(np.median(self.scoring_s))},
        }

    def write_lengths(self, path: Path) -> None:
        """Write the lengths of the finished answers in whole groups, for ``workload.length.source``."""
        size, longest = self.config.workload.group_size, self.config.workload.length.max
        with path.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(["prompt_id", "response_tokens"])
            for first in range(0, max(self.tokens) + 1, size):
                group = range(first, first + size)
                if all(one in self.tokens for one in group):
                    rows.writerows([first // size, min(self.tokens[one], longest)] for one in group)


def simulated(measured: Measured, table: dict[str, Any]) -> dict[str, Any]:
    """Return the summary of a run simulated with these step times and its own lengths."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "lengths.csv"
        measured.write_lengths(source)
        data = measured.config.model_dump(mode="json", exclude_none=True)
        data["hardware"] = table
        length = {"kind": "empirical", "source": str(source), "max": measured.config.workload.length.max}
        data["workload"] = data["workload"] | {"length": length}
        return simulate(RunConfig.model_validate(data, strict=False))


def _line(pairs: list[tuple[int, float]]) -> tuple[float, float]:
    """Return intercept and slope of the least-squares line, neither below 0."""
    x, y = np.array(pairs, dtype=np.float64).T
    slope = max(0.0, float(np.polyfit(x, y, 1)[0])) if x.std() else 0.0
    intercept = float(y.mean() - slope * x.mean())
    if intercept < 0:  # all of it grows with the tokens
        return 0.0, float((x * y).sum() / (x * x).sum())
    return intercept, slope


def main(folders: list[Path]) -> None:
    """Print the measured step times and the table."""
    runs = [Measured(folder) for folder in folders]
    tables = [run.hardware() for run in runs]
    for folder, table in zip(folders, tables, strict=True):
        print(folder.name, json.dumps(table))
    print(f"| run | | measured | simulated | error | with the step times of {folders[0].name} | error |")
    print("|---|---|---|---|---|---|---|")
    for folder, run, table in zip(folders, runs, tables, strict=True):
        real = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        own, carried = simulated(run, table), simulated(run, tables[0])
        for name, value, form in ROWS:
            cells = [f"{form.format(value(one))} | {_error(value(one), value(real), form)}" for one in (own, carried)]
            print(f"| {folder.name} | {name} | {form.format(value(real))} | {' | '.join(cells)} |")


def _error(simulated: float, measured: float, form: str) -> str:
    if "%" in form:
        return f"{100 * (simulated - measured):+.0f} points"
    return f"{simulated / measured - 1:+.0%}" if measured else ""


if __name__ == "__main__":
    main([Path(one) for one in sys.argv[1:]])
