"""``train --check``: all of it, in the order in which it can fail.

Theory of operation. First what needs no package: the task and its data. Then a run of a few optimizer steps on the
engines and the trainer of the run file, where they will be; when they are up, and before the first rollout, the
machines are measured. So every number is one of the calls that the run itself makes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from backends.check.environment_rows import environment_rows
from backends.check.expected import Expected
from backends.check.machine_rows import longest_pack, machine_rows, pack_rows, taught
from backends.check.run_rows import run_rows
from backends.check.task_rows import task_rows
from backends.huggingface_codec import load_codec
from backends.interface import Backend, Codec, Parts
from backends.place_facts import versions
from backends.preflight import check_run, evaluation_task, task_of, trainer_ranks
from backends.run import backend_of, drive
from backends.vllm_deepspeed import NEEDED
from pipelinerl.calibration.calibrate import calibrate_trace
from pipelinerl.calibration.hardware_file import HARDWARE_FILE, doubts, hardware_toml, write_hardware
from pipelinerl.calibration.hardware_fit import HardwareFit
from pipelinerl.config.check import check_config
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import BackendError, ConfigError, RunFailedError, RunInterruptedError, install
from pipelinerl.records.check_report import CheckReport, CheckRow, unchecked, wrong
from pipelinerl.records.run_folder import CHECK_FILE, LOGS_FOLDER, check_vacant, make_folder, write_json
from pipelinerl.records.steps import StepRow
from pipelinerl.rl.problems import Task

MARKER = ".seen"
"""A file in the folder that all machines are asked for."""
LINK_BYTES = {"cpu": 64_000_000, "gpu": 1_000_000_000}
"""Bytes that links are measured with, by device."""


def check(
    config: RunConfig,
    *,
    out: Path,
    shared: bool = True,
    backend: Backend | None = None,
    on_step: Callable[[StepRow, dict[str, float]], None] | None = None,
) -> CheckReport:
    """Check a run on the machines that are to carry it out.

    Args:
        config: The run.
        out: New folder for the report, a hardware.toml and the few steps.
        shared: Whether all machines must see that folder.
        backend: Makes engines, trainer and the rest; None: the one that the run file names.
        on_step: Called with the row and the metrics of each optimizer step.

    Returns:
        What was found. Without the packages of training only the task is checked.

    Raises:
        ConfigError: If the input is wrong; nothing has been started or written then.
        RunInterruptedError: After Ctrl-C.
    """
    train = check_run(config)
    task = task_of(config)
    evaluation_task(config, task)
    missing = [] if backend else [name for package, name in NEEDED.items() if find_spec(package) is None]
    backend = backend or backend_of(train)
    if not missing:
        backend.check(config)
    _check_vacant(out)
    codec, why_not = _codec(train.model.path)
    rows = environment_rows(config, codec, why_not) if task is None else task_rows(config, task, codec, why_not)
    if missing:
        advice = install(f"train-{train.device}")
        why = f"{', '.join(missing)} not installed"
        rows += [unchecked(what, why, advice) for what in ("machines and links", "training", "engines and weights")]
    else:
        make_folder(out)
        rows += _Trial(config, task, out, shared=shared, backend=backend, on_step=on_step).rows()
    report = CheckReport(rows=rows)
    make_folder(out)
    write_json(out / CHECK_FILE, report.to_dict())
    return report


def _check_vacant(out: Path) -> None:
    check_vacant(out)
    if (out / HARDWARE_FILE).exists():
        raise ConfigError(f"--out must be a folder without a {HARDWARE_FILE}, got {out}")


def _codec(path: str) -> tuple[Codec | None, str]:
    """Return the model's tokenizer, or why there is none."""
    if not Path(path).is_dir():  # a name would be looked for in the network
        return None, f"train.model.path={path!r} is no folder"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        return load_codec(path), ""
    except ModuleNotFoundError as error:
        return None, f"{error.name} is not installed"
    except ConfigError as error:
        return None, str(error)


class _Trial:
    """A run of a few steps with measurements before it (mutable)."""

    def __init__(
        self,
        config: RunConfig,
        task: Task | None,
        out: Path,
        *,
        shared: bool,
        backend: Backend,
        on_step: Callable[[StepRow, dict[str, float]], None] | None,
    ) -> None:
        assert config.train is not None
        self._config, self._train, self._task, self._out, self._shared = config, config.train, task, out, shared
        self._backend, self._on_step = backend, on_step
        self._rows: list[CheckRow] = []
        self._device = "CPU"
        self._weights_gb = sum(file.stat().st_size for file in Path(self._train.model.path).glob("*.safetensors")) / 1e9

    def rows(self) -> list[CheckRow]:
        """Run, and return what was found; the row of what has failed is the last one."""
        short, began_s = check_config(self._config), time.monotonic()
        try:
            with self._backend.open(short, logs=self._out / LOGS_FOLDER) as parts:

                async def when_up() -> None:
                    up_s = time.monotonic() - began_s
                    what = f"start of {len(parts.engines)} engines and {trainer_ranks(short)} ranks"
                    self._rows.append(CheckRow(what=what, measured=f"{up_s:.0f} s"))
                    await self._measure(parts)

                report = drive(short, parts=parts, task=self._task, out=self._out, on_step=self._on_step, trial=when_up)
        except RunInterruptedError:
            raise RunInterruptedError("interrupted; the check is not complete") from None
        except (RunFailedError, BackendError) as error:
            return [
                *self._rows,
                wrong("run", str(error), "mend this first; see docs/training.md, When something fails"),
            ]
        fitted = self._fitted()
        weights = {} if fitted is None else fitted.table.get("weights", {})
        expected = Expected.of(self._config, self._device)
        self._rows += run_rows(report, self._out, expected, weights=weights, weights_gb=self._weights_gb)
        return [*self._rows, self._hardware_row(fitted)]

    async def _measure(self, parts: Parts) -> None:
        """Measure machines and links, and train on one longest pack."""
        if parts.self_test is None:
            self._rows.append(unchecked("machines and links", "this backend does not measure them"))
            return
        marker = self._out / MARKER
        marker.touch()
        try:
            test = await parts.self_test(LINK_BYTES[self._train.device], str(marker) if self._shared else None)
        finally:
            marker.unlink()
        self._device = test.ranks[0].device
        self._rows += machine_rows(self._config, test, versions(), self._weights_gb)
        samples, lengths = longest_pack(self._config, parts.codec.encode("0123456789"))
        first = await parts.trainer.train(samples, completes_step=True)  # what is made once, is made now
        result = await parts.trainer.train(taught(samples, first), completes_step=True)
        self._rows += pack_rows(self._config, result, lengths, test.ranks[0], self._preflight_gb())

    def _preflight_gb(self) -> float | None:
        """Return what the preflight counted for a GPU."""
        if self._train.device == "cpu":
            return None
        from transformers import AutoConfig

        from backends.deepspeed.footprint import footprint_of

        return footprint_of(self._config, AutoConfig.from_pretrained(self._train.model.path)).total / 1e9

    def _fitted(self) -> HardwareFit | None:
        try:
            return calibrate_trace(self._out, self._config)
        except ConfigError:  # no step, or no rollout, that ended
            return None

    def _hardware_row(self, fitted: HardwareFit | None) -> CheckRow:
        if fitted is None:
            return unchecked(HARDWARE_FILE, "no optimizer step with a finished rollout was made")
        write_hardware(self._out, hardware_toml(fitted, "train --check"))
        poor = doubts(fitted)
        text = "; ".join(part.what for part in fitted.parts)
        return CheckRow(what=HARDWARE_FILE, measured=f"fitted: {text}", advice="; ".join(poor))
