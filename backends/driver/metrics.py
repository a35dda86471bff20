"""Logs of a real run: metrics per optimizer step and over the run, and some answers for people to read."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from backends.driver.rollouts import RolloutData
from backends.interface import Codec, UpdateTimes, Weights
from pipelinerl.config.run import RunConfig
from pipelinerl.config.train import TrainConfig
from pipelinerl.errors import ConfigError, install
from pipelinerl.hardware.transport import SHARE_METRIC
from pipelinerl.records.ledger import RunLedger
from pipelinerl.records.recording import Recording
from pipelinerl.records.reports import DecodeSteps, EvaluationPoint, RunMeasurements, UpdateReport
from pipelinerl.records.run_folder import METRICS_FILE, SAMPLES_FILE, writing
from pipelinerl.records.steps import StepRow
from pipelinerl.rl.config import LossConfig
from pipelinerl.rl.ess import RatioMeans, RatioStats
from pipelinerl.util.arrays import RunningMean

TENSORBOARD_FOLDER = "tensorboard"


def check_logging(train: TrainConfig) -> None:
    """Raise ``ConfigError`` if Weights & Biases is to be used and is not installed."""
    if train.logging.wandb_project is not None and find_spec("wandb") is None:
        raise ConfigError(f"train.logging.wandb_project needs wandb: {install('wandb')}")


class MetricsLog:
    """Writes metrics.jsonl, TensorBoard and Weights & Biases; a resumed run goes on after ``go_on_after``."""

    def __init__(self, out: Path, config: RunConfig, recording: Recording, *, go_on_after: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._out, self._recording = out, recording
        self._board: Any = SummaryWriter(out / TENSORBOARD_FOLDER, purge_step=go_on_after + 1 if go_on_after else None)
        self._wandb: Any = None
        if (project := config.train_table.logging.wandb_project) is not None:
            import wandb

            self._wandb = wandb.init(
                project=project,
                dir=out,
                config=config.model_dump(mode="json", exclude_none=True),
                id=_run_id(out, fresh=not go_on_after),
                resume="allow",
            )

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics of an optimizer step (counted from 1), finite ones only."""
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._recording.append(METRICS_FILE, {"step": step, **metrics})
        with writing(self._out / TENSORBOARD_FOLDER):
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(metrics, step=step)

    def close(self) -> None:
        """Finish TensorBoard's file and Weights & Biases."""
        with writing(self._out):
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def _run_id(out: Path, *, fresh: bool) -> str:
    """Return the name under which Weights & Biases knows this run, also when it is resumed."""
    path = out / "wandb_id.txt"
    if fresh or not path.exists():
        path.write_text(secrets.token_hex(4), encoding="utf-8")
    return path.read_text(encoding="utf-8")


PER_STEP = 2
"""Answers kept per batch and per evaluation (count)."""
LONGEST_TEXT = 8192
"""Characters kept of a prompt or an answer."""


class SamplesLog:
    """Writes samples.jsonl, each step as soon as it is done."""

    def __init__(self, codec: Codec, recording: Recording) -> None:
        self._codec, self._recording = codec, recording

    def trained(self, step: int, rollouts: Sequence[RolloutData]) -> None:
        """Keep some rollouts of the batch of an optimizer step (counted from 1), of different groups if it has them."""
        self._write({"step": step, "held_out": False}, [(one, one.reward) for one in _spread(rollouts)])

    def evaluated(self, step: int, answers: Sequence[tuple[RolloutData, float]]) -> None:
        """Keep some answers to held-out problems, with their rewards."""
        self._write({"step": step, "held_out": True}, _spread(answers))

    def _write(self, about: dict[str, Any], answers: Sequence[tuple[RolloutData, float]]) -> None:
        for data, reward in answers:
            sample = {
                "prompt": data.problem.prompt[:LONGEST_TEXT],
                "answer": self._codec.decode(data.tokens)[:LONGEST_TEXT],
                "tokens": data.spans.num_tokens,
                "reward": reward,
                "versions": list(data.spans.versions),
            }
            self._recording.append(SAMPLES_FILE, about | sample)


def _spread(items: Sequence[Any]) -> list[Any]:
    """Return ``PER_STEP`` items at equal distances, or all if they are fewer."""
    number = min(PER_STEP, len(items))
    return [items[place * len(items) // number] for place in range(number)]


SIZES_PER_DOUBLING = 4
"""Bins of decode steps per doubling of their number of sequences (count)."""


class StepMetrics:
    """Collects measurements of a step, until ``take`` (mutable, can be pickled)."""

    def __init__(self, loss: LossConfig) -> None:
        self._loss, self._ratios = loss, RatioStats(loss)
        self._trainer: dict[str, float] = {}
        self._step_updates = {name: RunningMean() for name in ("pause", "transfer", "resume")}
        self._updates = {name: RunningMean() for name in ("pause", "transfer", "resume")}
        self._ratio_means = RatioMeans()
        self._num_restarts = self._num_skipped = 0
        self._evaluation: dict[str, float] = {}
        self._delta: dict[str, float] = {}  # of the newest version published in this step
        self.trainer_restarts = 0
        """Times the run has gone on from a checkpoint because its trainer was lost."""
        self._driver_s = 0.0
        self._last_s = self._last_busy_engine_s = 0.0
        self._num_rollouts = 0
        self._decode_steps: dict[int, DecodeSteps] = {}
        self._decoded = DecodeSteps()  # in this step
        self._num_read = self._num_cached = 0
        self._busy: dict[int | None, tuple[float, float, int]] = {}  # by engine; None: the driver
        self._num_answers = 0  # since the driver's last reading

    def trained(self, log_ratio_T: ArrayLike, lag_T: ArrayLike, turn_T: NDArray[np.integer] | tuple[()] = ()) -> None:
        """Add a rollout: log pi - log mu (nats), lag (optimizer steps) and turn of its tokens, each of shape [T]."""
        self._ratios.add(log_ratio_T, lag_T, turn_T)

    def add_trainer_metrics(self, metrics: dict[str, float]) -> None:
        """Add the metrics of a micro-batch; see ``interface.TrainResult``."""
        self._num_skipped += int(metrics.get("skipped", 0))
        for name, value in metrics.items():
            before = self._trainer.get(name, 0.0)
            if name.endswith(("loss", "_sum", "_s")):
                self._trainer[name] = before + value
            else:
                self._trainer[name] = max(before, value) if name.endswith("_gb") else value

    def updated(self, times: UpdateTimes) -> None:
        """Add the update of an engine."""
        for name, means in self._step_updates.items():
            seconds = getattr(times, f"{name}_s")
            means.add(seconds)
            self._updates[name].add(seconds)

    def published(self, weights: Weights) -> None:
        """Add a published version, of which the newest is logged."""
        if weights.delta_bytes:
            self._delta = {SHARE_METRIC: weights.delta_share, "weights/delta_bytes": float(weights.delta_bytes)}

    def restarted(self) -> None:
        """Count the restart of an engine."""
        self._num_restarts += 1

    def evaluated(self, point: EvaluationPoint) -> None:
        """Add an evaluation that has ended."""
        self._evaluation = {f"evaluation/{name}": float(value) for name, value in point}

    def driver_worked(self, seconds: float, *, num_rollouts: int) -> None:
        """Add time that the driver spent on an event (s), and the rollouts that ended with it (count)."""
        self._driver_s += seconds
        self._num_rollouts += num_rollouts

    def answered(self, engine: int, seconds: float) -> None:
        """Count an answer; ``seconds``: busy time of its engine's front end since its start (s)."""
        self._num_answers += 1
        self._add_busy(engine, seconds, 1)

    def driver_busy(self, seconds: float) -> None:
        """Count the answers since the last call; ``seconds``: busy time of the driver since its start (s)."""
        self._add_busy(None, seconds, self._num_answers)
        self._num_answers = 0

    def _add_busy(self, engine: int | None, seconds: float, num_answers: int) -> None:
        last_s, busy_s, num = self._busy.get(engine, (math.inf, 0.0, 0))
        if seconds >= last_s:  # else it is the first reading, or the process has restarted
            busy_s, num = busy_s + seconds - last_s, num + num_answers
        self._busy[engine] = (seconds, busy_s, num)

    def decoded(self, some: DecodeSteps | None) -> None:
        """Add decode steps of an engine."""
        if some is not None and some.steps:
            self._decoded += some
            size = round(SIZES_PER_DOUBLING * math.log2(some.sequences / some.steps))
            self._decode_steps[size] = self._decode_steps.get(size, DecodeSteps()) + some

    def began_turn(self, tokens: int, cached: int) -> None:
        """Add the context of a turn that begins, and the part of it that a KV cache held (tokens)."""
        self._num_read += tokens
        self._num_cached += cached

    def _busy_s_per_rollout(self, *, driver: bool) -> float | None:
        both = [(busy_s, num) for engine, (_, busy_s, num) in self._busy.items() if (engine is None) is driver]
        busy_s, num = (sum(parts) for parts in zip(*both, strict=True)) if both else (0.0, 0)
        return busy_s / num if busy_s and num else None

    def take(self, row: StepRow, ledger: RunLedger) -> dict[str, float]:
        """End an optimizer step; return its metrics to log, by name."""
        step_s = row.time_s - self._last_s
        busy_engine_s = ledger.busy_engine_s()
        engine_s = step_s * ledger.num_engines
        busy_share = (busy_engine_s - self._last_busy_engine_s) / engine_s if engine_s else 0.0
        self._last_s, self._last_busy_engine_s = row.time_s, busy_engine_s
        ratios = self._ratios.metrics()
        self._ratio_means.add(ratios)
        logged = {
            "reward/mean": row.reward_mean,
            "length/mean": row.length_mean,
            "lag/mean": row.lag_mean,
            "lag/max": float(row.lag_max),
            "lag/in_flight_mean": row.lag_in_flight_mean,
            "lag/in_queue_mean": row.lag_in_queue_mean,
            "queue/in_progress": float(row.in_progress),
            "queue/ready": float(row.ready),
            "time/step_s": step_s,
            "time/train_s": row.train_s,
            "time/publish_s": row.publish_s,
            "idle/trainer": row.wait_s / step_s if step_s else 0.0,
            "idle/engines": 1.0 - busy_share,
            "throughput/tokens_per_s": row.tokens / step_s if step_s else 0.0,
            "throughput/samples_per_s": row.samples / step_s if step_s else 0.0,
            **{f"rollouts/{end}": float(num) for end, num in ledger.ended().items()},
            "restarts/engines": float(self._num_restarts),
            "restarts/trainer": float(self.trainer_restarts),
            **{f"train/{name}": value for name, value in _derived(self._trainer).items()},
            **ratios,
            **{f"sync/{name}_s": means.mean for name, means in self._step_updates.items() if means.num},
        }
        logged |= self._delta | self._evaluation
        if self._decoded.tokens != self._decoded.sequences:  # engines speculate
            logged["engines/tokens_per_step"] = self._decoded.tokens / self._decoded.sequences
        self._ratios = RatioStats(self._loss)
        self._trainer, self._evaluation, self._delta, self._decoded = {}, {}, {}, DecodeSteps()
        self._step_updates = {name: RunningMean() for name in self._step_updates}
        return logged

    def summary(self) -> RunMeasurements:
        """Return the parts of summary.json that only real runs have: means over optimizer steps, or over updates."""
        updates, num = self._updates, self._num_rollouts
        decoded = sum(self._decode_steps.values(), DecodeSteps())
        ess, mismatch = self._ratio_means.summary()
        return RunMeasurements(
            updates=UpdateReport(
                count=updates["pause"].num, **{f"{name}_s": means.mean for name, means in updates.items()}
            ),
            engine_restarts=self._num_restarts,
            trainer_restarts=self.trainer_restarts,
            skipped_steps=self._num_skipped,
            driver_s_per_rollout=self._driver_s / num if num else 0.0,
            driver_busy_s_per_rollout=self._busy_s_per_rollout(driver=True),
            front_end_busy_s_per_rollout=self._busy_s_per_rollout(driver=False),
            cached_share=self._num_cached / self._num_read if self._num_read else None,
            tokens_per_step=decoded.tokens / decoded.sequences if decoded.tokens != decoded.sequences else None,
            decode_steps=[some for _, some in sorted(self._decode_steps.items())] or None,
            ess=ess,
            mismatch=mismatch,
        )


def _derived(trainer: dict[str, float]) -> dict[str, float]:
    """Replace the sums of the trainer's metrics by means and rates."""
    derived = {name: value for name, value in trainer.items() if not name.endswith(("_sum", "peak_flops"))}
    num_tokens, flop = trainer.get("answer_tokens_sum", 0.0), trainer.get("flop_sum", 0.0)
    rank_s = sum(value for name, value in trainer.items() if name.startswith("rank") and name.endswith("_s"))
    if num_tokens:
        sums = [name for name in ("entropy_sum", "reverse_kl_sum") if name in trainer]
        derived |= {name.removesuffix("_sum"): trainer[name] / num_tokens for name in sums}
    if flop and rank_s:
        derived["flop_per_s"] = flop / rank_s
        if "peak_flops" in trainer:
            derived["mfu"] = derived["flop_per_s"] / trainer["peak_flops"]
    return derived
