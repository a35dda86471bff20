"""Two real runs of the tiny example, recorded: calibrated on themselves, they simulate as they were measured."""

import csv
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.calibration.calibrate import calibrate_trace
from pipelinerl.config.run import RunConfig
from pipelinerl.records.reports import RunReport
from pipelinerl.records.trace import Trace
from pipelinerl.scheduler.events import RolloutFinished, StartTraining
from sim.run import simulate

RUNS = Path(__file__).parents[2] / "data" / "real_runs"
REQUEST_S = {"pipeline": 0.0011, "conventional": 0.0019}
"""Measured: processor seconds per rollout of the front end, or of the driver for two engines."""


class Measured:
    """Measurements in the trace of a run."""

    def __init__(self, trace: Trace) -> None:
        spans, lag, self.num_tokens, self.lengths = {}, 0, 0, dict[int, int]()
        for record in trace.records():
            self.duration_s = record.time_s
            match record.event or record.command:
                case RolloutFinished(rollout_id=one, spans=of_one):
                    spans[one] = of_one
                    self.lengths[one] = of_one.num_tokens
                case StartTraining(rollout_ids=batch, version=version):
                    for one in batch:
                        for sampled, begin, end in zip(
                            spans[one].versions, (0, *spans[one].ends[:-1]), spans[one].ends, strict=True
                        ):
                            lag += (version - sampled) * (end - begin)
                        self.num_tokens += spans[one].num_tokens
        self.lag_mean = lag / self.num_tokens

    def write_lengths(self, path: Path, group_size: int, longest: int) -> None:
        """Write the lengths of whole groups, for ``workload.length.source``."""
        with path.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(["prompt_id", "response_tokens"])
            for first in range(0, max(self.lengths) + 1, group_size):
                group = range(first, first + group_size)
                if all(one in self.lengths for one in group):
                    rows.writerows([first // group_size, min(self.lengths[one], longest)] for one in group)


def calibrated(source: Path, tmp_path: Path, request_s: float | None = None) -> tuple[Measured, dict[str, Any]]:
    """Return a run as it was measured, and its run file with its own lengths and the hardware calibrated on it."""
    trace = Trace(source / "trace.jsonl.gz" if source.is_dir() else source)
    measured, data = Measured(trace), trace.config.model_dump(mode="json", exclude_none=True)
    if request_s is not None:
        data["hardware"]["latency"]["request_s"] = request_s
    data["hardware"] = calibrate_trace(source, RunConfig.model_validate(data, strict=False)).table
    longest = trace.config.workload.length.max
    measured.write_lengths(tmp_path / "lengths.csv", trace.config.workload.group_size, longest)
    data["workload"]["length"] = {"kind": "empirical", "source": str(tmp_path / "lengths.csv"), "max": longest}
    return measured, data


def simulated(data: dict[str, Any]) -> RunReport:
    return simulate(RunConfig.model_validate(data, strict=False))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipeline", "conventional"])
def test_a_real_runs_mean_lag_and_speed_come_out_right(name: str, tmp_path: Path) -> None:
    """Before reports took time and transfers counted in the mean, the pipeline's lag came out at 0.90 or 0.57 of it."""
    measured, data = calibrated(RUNS / f"{name}.jsonl.gz", tmp_path, REQUEST_S[name])
    report = simulated(data)
    assert report.lag.mean == pytest.approx(measured.lag_mean, rel=0.10)
    assert report.tokens_per_s == pytest.approx(measured.num_tokens / measured.duration_s, rel=0.15)


def test_step_times_of_one_h_predict_others(tmp_path: Path) -> None:
    """Of `tiny_reasoning` at H = 32, 64 and 128, one after the other on two busy cores; only the first is looked at.

    The seconds of its decode steps, which it measured, tell what a sequence costs. A step clock that could run
    backwards made the lag twice as large.
    """
    _, data = calibrated(RUNS / "reasoning_32", tmp_path)
    for slots, tokens_per_s, lag, within in ((32, 3363, 0.555, 0.1), (64, 4243, 0.957, 0.2), (128, 4306, 1.931, 0.2)):
        data["scheduler"]["generation_batch_size"] = slots
        report = simulated(data)
        assert report.tokens_per_s == pytest.approx(tokens_per_s, rel=within)
        assert report.lag.mean == pytest.approx(lag, rel=within)


@pytest.mark.slow
def test_the_report_latency_of_a_real_run_is_near_its_measurement(tmp_path: Path) -> None:
    """The engine's own clock, which a trace does not hold, said 59 ms in the median and 109 ms in the mean."""
    trace = RUNS / "pipeline.jsonl.gz"
    latency = calibrate_trace(trace).table["latency"]
    assert 0.03 < latency["report_s"] < 0.11


def test_the_lag_that_staged_weights_add_is_simulated_as_it_was_measured() -> None:
    """31 optimizer steps, a random model of 0.27 GB sent for 1.2 s of each (docs/measurements/weight_updates.md).

    The trainer is the slower part: three steps of lag are in the queue, and all that is in flight comes from the
    weights' way. With the transport that has engines stand still it was 0.
    """
    folder = RUNS / "staged"
    measured = RunReport.read(folder / "summary.json")
    data = Trace(folder / "trace.jsonl.gz").config.model_dump(mode="json", exclude_none=True)
    data["optimizer_steps"] = measured.optimizer_steps
    data["hardware"] = calibrate_trace(folder).table
    there = simulated(data)
    assert there.lag.mean == pytest.approx(measured.lag.mean, rel=0.10)
    assert there.lag.in_queue_mean == pytest.approx(measured.lag.in_queue_mean, rel=0.05)
    assert there.lag.in_flight_mean == pytest.approx(measured.lag.in_flight_mean, abs=0.2)
    assert data["hardware"]["weights"].pop("transfer_s") == pytest.approx(1.2, abs=0.1)
    without = simulated(data)
    assert without.lag.in_flight_mean == 0.0
    assert measured.lag.mean - without.lag.mean > 0.5
