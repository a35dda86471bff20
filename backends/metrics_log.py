"""Destinations of the metrics of a real run: a line of JSON per optimizer step, TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import math
import secrets
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipelinerl.config.run import RunConfig
from pipelinerl.config.train import TrainConfig
from pipelinerl.errors import ConfigError, install
from pipelinerl.records.run_folder import METRICS_FILE, keep_lines
from pipelinerl.util.files import writing

TENSORBOARD_FOLDER = "tensorboard"
"""Folder of a run's TensorBoard files."""


def check_logging(train: TrainConfig) -> None:
    """Check that the packages are there that the configuration asks for.

    Raises:
        ConfigError: If Weights & Biases is to be used and is not installed.
    """
    if train.logging.wandb_project is not None and find_spec("wandb") is None:
        raise ConfigError(f"train.logging.wandb_project needs wandb: {install('wandb')}")


class MetricsLog:
    """Writes metrics; a line is on disk as soon as its step is done.

    Args:
        out: The run's folder.
        config: The resolved configuration.
        go_on_after: Optimizer steps that have been logged already and stay (count).
    """

    def __init__(self, out: Path, config: RunConfig, *, go_on_after: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        assert config.train is not None
        self._out, path = out, out / METRICS_FILE
        if go_on_after:
            keep_lines(path, go_on_after)
        self._file = path.open("a" if go_on_after else "w", encoding="utf-8", buffering=1)
        self._board: Any = SummaryWriter(out / TENSORBOARD_FOLDER, purge_step=go_on_after + 1 if go_on_after else None)
        self._wandb: Any = None
        if config.train.logging.wandb_project is not None:
            import wandb

            self._wandb = wandb.init(
                project=config.train.logging.wandb_project,
                dir=out,
                config=config.model_dump(mode="json", exclude_none=True),
                id=_run_id(out, fresh=not go_on_after),
                resume="allow",
            )

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics of an optimizer step (counted from 1); those that are not finite are left out."""
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        with writing(self._out / METRICS_FILE):
            self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        with writing(self._out / TENSORBOARD_FOLDER):
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(metrics, step=step)

    def close(self) -> None:
        """Finish all files."""
        with writing(self._out):
            self._file.close()
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def _run_id(out: Path, *, fresh: bool) -> str:
    """Return the name under which Weights & Biases knows this run, also when it is resumed."""
    path = out / "wandb_id.txt"
    if fresh or not path.exists():
        path.write_text(secrets.token_hex(4), encoding="utf-8")
    return path.read_text(encoding="utf-8")
