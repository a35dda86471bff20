"""Run folders of realistic shape with made-up numbers, for the figures."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from analysis.figures import RateCurves
from analysis.read import Run
from pipelinerl.records.profile_report import EnginesOverTime
from pipelinerl.records.reports import CapacityReport, FleetGroupReport, TrainerFaultsReport
from pipelinerl.records.steps import COLUMNS

BATCH, SLOTS, LONGEST_TOKENS, ENGINES = 64, 64, 2048, 4


def write_run(folder: Path, *, rl_step: int | None = None, num_steps: int = 40) -> Path:
    """Write a small run folder of realistic shape: conventional with G = ``rl_step``, or pipeline if that is None.

    Rates are made up; the lag follows theory: step i of an RL step has lag i, and a pipeline with lengths uniform
    on 1..L and g = 8 has a mean lag of g (1 - p / L) / 2 at position p.
    """
    folder.mkdir(parents=True)
    rows = _rows(num_steps, rl_step)
    with (folder / "steps.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    (folder / "summary.json").write_text(json.dumps(_summary(rows, rl_step)))
    (folder / "profile.json").write_text(json.dumps(_profile(rows, rl_step)))
    return folder


def _rows(num_steps: int, rl_step: int | None) -> list[dict[str, float]]:
    rng = np.random.default_rng(1)
    rows, time_s = [], 0.0
    for step in range(1, num_steps + 1):
        if rl_step is None:
            seconds = (14.4, 0.5, float(rng.uniform(0.5, 3.0)))
            lags = (8 / 3 * (1 - np.exp(-step / 8)) + rng.normal(0, 0.1), rng.uniform(0.3, 0.6))
            top = min(step - 1, int(rng.integers(7, 10)))
        else:
            top = (step - 1) % rl_step
            seconds = (9.0, 0.5 if top == rl_step - 1 else 0.0, 40.0 + 12.0 * rl_step if top == 0 else 0.0)
            lags = (0.0, float(top))
        time_s += sum(seconds)
        rows.append(_row(step, time_s, seconds, lags, top))
    return rows


def _row(step: int, time_s: float, seconds: tuple[float, ...], lags: tuple[float, float], top: int) -> dict[str, float]:
    size = (BATCH, BATCH * LONGEST_TOKENS // 2)
    lag = (sum(lags), top, *lags)
    ended = (SLOTS * ENGINES, 10, 0.5, LONGEST_TOKENS / 2)
    return dict(zip(COLUMNS, (step, time_s, *seconds, *size, *lag, *ended), strict=True))


def _summary(rows: list[dict[str, float]], rl_step: int | None) -> dict[str, Any]:
    duration_s, waited_s = rows[-1]["time_s"], sum(row["wait_s"] for row in rows)
    samples, tokens = BATCH * len(rows), sum(int(row["tokens"]) for row in rows)
    ended = dict.fromkeys(("discarded", "aborted", "failed", "unfinished"), 0)
    lags = dict.fromkeys(("p50", "p95", "p99", "max"), max(row["lag_max"] for row in rows))
    return {
        "scheduler": "pipeline" if rl_step is None else "conventional",
        "seed": 0,
        "max_lag": None,
        "optimizer_steps": len(rows),
        "duration_s": duration_s,
        "samples_trained": samples,
        "tokens_trained": tokens,
        "samples_per_s": samples / duration_s,
        "tokens_per_s": tokens / duration_s,
        "lag": {"mean": 3.0, **lags, "in_flight_mean": 1.0, "in_queue_mean": 2.0},
        "rollouts": {"started": samples, "finished": samples, "trained": samples, **ended, "interruptions": 0},
        "tokens": {"generated": tokens, "trained": tokens, **ended},
        "discarded_by_reason": {},
        "length": {"finished_mean": LONGEST_TOKENS / 2, "trained_mean": LONGEST_TOKENS / 2},
        "utilisation": {"generation": 0.97 if rl_step is None else 0.41, "training": 1 - waited_s / duration_s},
        "seconds": {
            "generating": 0.0 if rl_step is None else waited_s,
            "training": sum(row["train_s"] for row in rows),
            "publishing": sum(row["publish_s"] for row in rows),
            "waiting_for_data": waited_s if rl_step is None else 0.0,
        },
        "bottleneck": "training",
        "complete": True,
    }


def _profile(rows: list[dict[str, float]], rl_step: int | None) -> dict[str, Any]:
    position = (np.arange(32) + 0.5) / 32
    lag = 4 * (1 - position) if rl_step is None else np.full(32, (rl_step - 1) / 2)
    if rl_step is None:
        in_flight, in_queue = 10**6 * np.arange(9, 0, -1), 10**6 * np.array([30, 13, 2])
        total = np.round(np.convolve(in_flight, in_queue) / 45e6).astype(int)
    else:
        in_flight, in_queue = np.array([10**6 * rl_step]), np.full(rl_step, 10**6)
        total = in_queue
    time = np.linspace(0, 1, 60)
    busy = np.ones(60) if rl_step is None else np.clip(1.2 * (1 - time), 0, 1)
    return {
        "lag_by_position": {
            "width_tokens": LONGEST_TOKENS // 32,
            "lag_mean": [*lag[:-1].tolist(), None],
            "tokens": [*(1e6 * (1 - position[:-1])).astype(int).tolist(), 0],
        },
        "lag_histogram": {"total": total.tolist(), "in_flight": in_flight.tolist(), "in_queue": in_queue.tolist()},
        "generation_window": {
            "start_s": 0.0,
            "width_s": 2.0 if rl_step is None else 0.7 + 0.1 * rl_step,
            "in_progress": (SLOTS * ENGINES * busy).tolist(),
            "tokens_per_s": (9000 * busy / (0.4 + 0.6 * busy)).tolist(),
        },
        "timeline": _timeline(rows, rl_step, until_s=260.0),
    }


def _timeline(rows: list[dict[str, float]], rl_step: int | None, until_s: float) -> dict[str, Any]:
    rng = np.random.default_rng(2)
    trainer, updates, generates_T = [], [], np.full(int(until_s), rl_step is None)  # T: seconds
    for row in rows:
        end = row["time_s"] - row["publish_s"]
        start = end - row["train_s"]
        trainer.append([start, min(end, until_s), "training"])
        generates_T[int(start - row["wait_s"]) : int(start)] = True
        if row["publish_s"]:
            trainer.append([end, min(row["time_s"], until_s), "publishing"])
            updates.append({"version": row["step"], "published_s": row["time_s"], "loaded_s": row["time_s"] + 1.0})
    paused = [[one["published_s"], one["loaded_s"]] for one in updates if one["loaded_s"] < until_s]
    engines = [
        {
            "engine": engine,
            "time_s": np.arange(until_s).tolist(),
            "in_progress": (generates_T * (SLOTS - rng.integers(0, 3, len(generates_T)))).tolist(),
            "paused": paused if rl_step is None else [],
        }
        for engine in range(ENGINES)
    ]
    return {
        "until_s": until_s,
        "trainer": [block for block in trainer if block[0] < until_s],
        "engines": engines,
        "updates": [one for one in updates if one["published_s"] < until_s],
    }


METRICS: list[dict[str, float]] = [
    {"step": 1, "reward/mean": 0.25, "ess/token_raw": 1.0, "ess/token_truncated": 1.0, "ess/lag_0": 1.0},
    {"step": 2, "reward/mean": 0.5, "ess/token_raw": 0.75, "ess/token_truncated": 0.875, "ess/lag_0": 0.5}
    | {"ess/lag_1": 0.75, "ess/lag_10": 0.25},
    {"step": 3, "reward/mean": -0.5, "ess/token_raw": 0.5, "ess/token_truncated": 0.625, "ess/lag_1": 0.25},
]
"""What a real run of three optimizer steps logs, as far as figures show it."""


def write_real_run(folder: Path, lines: list[dict[str, float]] = METRICS, **keywords: Any) -> Path:
    """Write a small run folder with metrics, by default of as many steps as those."""
    write_run(folder, **{"num_steps": len(lines)} | keywords)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def with_metrics(runs: list[Run]) -> list[Run]:
    """Return runs of 200 steps as if they were real."""
    rng = np.random.default_rng(3)
    metrics = {"reward/mean": rng.uniform(0, 1, 200), "ess/token_raw": rng.uniform(0.8, 0.9, 200)}
    metrics |= {"ess/token_truncated": rng.uniform(0.9, 1, 200)}
    metrics |= {f"ess/lag_{lag}": np.full(200, 1 - lag / 50) for lag in range(9)}
    return [replace(run, metrics=metrics) for run in runs]


CAPACITY = CapacityReport(
    groups=[
        FleetGroupReport(
            name="spot", engines=4, there_mean=2.4, starting_mean=0.2, training_mean=0.0, failed_mean=0.4,
            reclaimed_mean=1.0, failures=3, reclaims=5, gpus_paid=2.6, usd=12.0,
        )
    ],
    trainer=TrainerFaultsReport(failures=2, checkpoint_s=10.0, restart_s=20.0, redone_s=30.0),
)  # fmt: skip


def with_fleet(run: Run, capacity: CapacityReport = CAPACITY) -> Run:
    """Return a run whose engines come and go: 4 of them, 3 from 60 s on, 4 again from 120 s on."""
    fleet = EnginesOverTime(time_s=[0.0, 60.0, 120.0, run.report.duration_s], engines=[4, 3, 4, 4])
    report = run.report.model_copy(update={"capacity": capacity})
    return replace(run, report=report, figure_data=run.figure_data.model_copy(update={"fleet": fleet}))


def with_figure_data(run: Run, **parts: dict[str, Any]) -> Run:
    """Return a run with other values in parts of its figure data."""
    changed = {name: getattr(run.figure_data, name).model_copy(update=values) for name, values in parts.items()}
    return replace(run, figure_data=run.figure_data.model_copy(update=changed))


CURVES = RateCurves(
    max_lag=np.array([8.0, 132.0]), pipeline=np.array([1.10, 16.90]), conventional=np.array([1.18, 10.69])
)


def case_study(run: Run) -> list[Run]:
    """Return runs that are ``run`` but for their place in Fig. 9."""
    places = [("G=134", "conventional", 133, 10.4), ("H=192", "pipeline", 132, 16.2), ("H=64", "pipeline", 64, 8.1)]
    return [placed(run, *place) for place in places]


def placed(run: Run, name: str, scheduler: str, largest_lag: int, tokens_per_flash: float) -> Run:
    lag = run.report.lag.model_copy(update={"max": largest_lag})
    changed = {"scheduler": scheduler, "lag": lag, "tokens_per_flash": tokens_per_flash}
    return replace(run, name=name, report=run.report.model_copy(update=changed))
