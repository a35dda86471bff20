"""Simulate real runs with hardware calibrated from one of them, and print both side by side.

    python scripts/simulate_a_real_run.py runs/tiny runs/tiny_conventional ...

Every run is simulated with its own answer lengths, once calibrated on its own trace (does the simulator combine the
step times correctly?) and once on that of the first run (do they carry over?).
"""

from __future__ import annotations

import csv
import json
import sys
import tempfile
from pathlib import Path

from pipelinerl.calibration.calibrate import calibrate_trace
from pipelinerl.calibration.solve import HardwareFit
from pipelinerl.config.engine import as_measured
from pipelinerl.config.run import RunConfig
from pipelinerl.records.reports import RunReport
from pipelinerl.records.run_folder import SUMMARY_FILE, TRACE_FILE
from pipelinerl.records.trace import Trace
from pipelinerl.scheduler.events import RolloutFinished
from sim.run import simulate

ROWS = (
    ("tokens/s", lambda s: s.tokens_per_s, "{:,.0f}"),
    ("seconds per optimizer step", lambda s: s.duration_s / s.optimizer_steps, "{:.3f}"),
    ("lag, mean (optimizer steps)", lambda s: s.lag.mean, "{:.2f}"),
    ("lag, p95 (optimizer steps)", lambda s: s.lag.p95, "{:.0f}"),
    ("trainer idle", lambda s: 1 - (s.seconds.training + s.seconds.publishing) / s.duration_s, "{:.0%}"),
    ("engines idle or paused", lambda s: 1 - s.utilisation.generation, "{:.0%}"),
)


def write_lengths(trace: Trace, path: Path) -> None:
    """Write the lengths of the finished answers in whole groups, for ``workload.length.source``."""
    size, longest = trace.config.workload.group_size, trace.config.workload.length.max
    tokens = {
        record.event.rollout_id: record.event.spans.num_tokens
        for record in trace.records()
        if isinstance(record.event, RolloutFinished)
    }
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["prompt_id", "response_tokens"])
        for first in range(0, max(tokens) + 1, size):
            group = range(first, first + size)
            if all(one in tokens for one in group):
                rows.writerows([first // size, min(tokens[one], longest)] for one in group)


def simulated(folder: Path, fit: HardwareFit) -> RunReport:
    """Return the report of a run simulated with calibrated hardware and its own lengths."""
    trace = Trace(folder / TRACE_FILE)
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "lengths.csv"
        write_lengths(trace, source)
        data = trace.config.model_dump(mode="json", exclude_none=True)
        data["hardware"] = fit.table
        if fit.acceptance is not None and "speculation" in data.get("engine", {}):
            data["engine"]["speculation"] |= as_measured(fit.acceptance)
        length = {"kind": "empirical", "source": str(source), "max": trace.config.workload.length.max}
        data["workload"] = data["workload"] | {"length": length}
        return simulate(RunConfig.model_validate(data, strict=False))


def main(folders: list[Path]) -> None:
    """Print the calibrated tables, and the comparison."""
    fits = [calibrate_trace(folder) for folder in folders]
    for folder, fit in zip(folders, fits, strict=True):
        print(folder.name, json.dumps(fit.table), fit.acceptance or "")
    print(f"| run | | measured | simulated | error | with the hardware of {folders[0].name} | error |")
    print("|---|---|---|---|---|---|---|")
    for folder, fit in zip(folders, fits, strict=True):
        real = RunReport.read(folder / SUMMARY_FILE)
        own, carried = simulated(folder, fit), simulated(folder, fits[0])
        for name, value, form in ROWS:
            cells = [f"{form.format(value(one))} | {_error(value(one), value(real), form)}" for one in (own, carried)]
            print(f"| {folder.name} | {name} | {form.format(value(real))} | {' | '.join(cells)} |")


def _error(simulated: float, measured: float, form: str) -> str:
    if "%" in form:
        return f"{100 * (simulated - measured):+.0f} points"
    return f"{simulated / measured - 1:+.0%}" if measured else ""


if __name__ == "__main__":
    main([Path(one) for one in sys.argv[1:]])
