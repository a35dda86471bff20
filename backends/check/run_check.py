"""``train --check``: all of it, in the order in which it can fail.

Theory of operation. The task and its data need no package and come first. Then a run of a few optimizer steps on the
engines and the trainer of the run file, where they will be; when they are up, and before the first rollout, the
machines are measured. So every number is one of the calls that the run itself makes.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from backends.check.task_rows import (
    Expected,
    environment_rows,
    longest_pack,
    machine_rows,
    pack_rows,
    task_rows,
    taught,
)
from backends.huggingface_codec import load_codec
from backends.interface import Backend, Codec, Parts
from backends.kinds import RayBackend, backend_of, own_share, with_local_model
from backends.owner import driving
from backends.preflight import check_run, evaluation_task, task_of, trainer_ranks
from backends.run import drive
from pipelinerl.calibration.calibrate import HARDWARE_FILE, calibrate_trace, doubts, hardware_toml, write_hardware
from pipelinerl.calibration.solve import HardwareFit
from pipelinerl.config.run import RunConfig, check_config
from pipelinerl.errors import BackendError, ConfigError, RunFailedError, RunInterruptedError, install
from pipelinerl.hardware.costs import loading_s
from pipelinerl.hardware.transport import WeightTransferConfig
from pipelinerl.records.check_report import CheckReport, CheckRow, unchecked, wrong
from pipelinerl.records.reports import RunReport, UpdateReport
from pipelinerl.records.run_folder import CHECK_FILE, LOGS_FOLDER, TRACE_FILE, check_vacant, make_folder, write_json
from pipelinerl.records.steps import StepRow
from pipelinerl.records.trace import Trace
from pipelinerl.rl.problems import Task
from pipelinerl.scheduler.events import RolloutScored, StartRollout

MOST_LOST = 0.1
"""Share of the effective sample size that arithmetic may cost: more, and engine and trainer have different weights.

Weights w = pi/mu of log-normal spread have KL = s^2 / 2 and ESS = exp(-s^2), so ESS = exp(-2 KL).
"""


def run_rows(
    report: RunReport, folder: Path, expected: Expected, *, weights: dict[str, Any], weights_gb: float
) -> list[CheckRow]:
    """Judge a run of a few steps, recorded in ``folder``.

    ``weights``: the table ``hardware.weights`` fitted to them; empty: nothing was published. ``weights_gb``: as an
    engine holds them.
    """
    text = f"{report.optimizer_steps}, {report.tokens_per_s:,.0f} tokens/s, {report.rollouts.failed} rollouts failed"
    rows = [CheckRow(what="optimizer steps", measured=text)]
    if weights and report.updates is not None:
        rows += _weight_rows(report.updates, expected, weights, weights_gb)
    rows += _agreement(report, expected.config)
    taught = expected.config.train_table.loss.teacher is not None  # by log-probabilities, not by rewards
    return rows if taught else [*rows, _signal_row(expected.config, folder)]


def _weight_rows(
    update: UpdateReport, expected: Expected, weights: dict[str, Any], weights_gb: float
) -> list[CheckRow]:
    way_s = loading_s(WeightTransferConfig.model_validate(weights))
    text = f"{weights_gb:.3g} GB in {way_s:.3g} s ({weights_gb / way_s if way_s else math.inf:.3g} GB/s)"
    advice = "look at the network that leads to rank 0's address, at train.transport, and at rank 0's log"

    times = {name: getattr(update, name) for name in ("pause_s", "transfer_s", "resume_s")}
    still = ", ".join(f"{name[:-2]} {seconds:.3g} s" for name, seconds in times.items())
    return [
        expected.seconds(
            "weights, trainer to all engines", text, way_s, lambda values: loading_s(expected.weights(values)), advice
        ),
        expected.seconds(
            "  an engine stands still", still, sum(times.values()), lambda of: expected.weights(of).pause_s, advice
        ),
    ]


def _agreement(report: RunReport, config: RunConfig) -> list[CheckRow]:
    floor = None if report.mismatch is None else report.mismatch.kl_at_lag_0
    if floor is None:
        return []
    most = -math.log(1 - MOST_LOST) / 2
    text = f"{floor:.1e} nats per token between engine and trainer, of the same weights"
    if config.train_table.sampling.leaves_words_out:
        return [CheckRow(what="agreement", measured=text, expected="nothing: sampling leaves words out")]
    if not floor <= most:
        return [wrong("agreement", text, f"above {most:.2g} it is no rounding: engines have other weights or settings")]
    return [CheckRow(what="agreement", measured=text, expected=f"at most {most:.2g}: costs {MOST_LOST:.0%} of the ESS")]


def _signal_row(config: RunConfig, folder: Path) -> CheckRow:
    prompts: dict[int, int] = {}
    rewards: defaultdict[int, list[float]] = defaultdict(list)
    for record in Trace(folder / TRACE_FILE).records():
        if isinstance(record.command, StartRollout):
            prompts[record.command.rollout_id] = record.command.prompt_id
        elif isinstance(record.event, RolloutScored):
            rewards[prompts[record.event.rollout_id]].append(record.event.reward)
    size = config.workload.group_size
    whole = [some for some in rewards.values() if len(some) == size]
    equal = sum(len(set(some)) == 1 for some in whole)
    text = f"{equal} of {len(whole)} groups have equal rewards"
    if size == 1 or not equal:
        return CheckRow(what="signal", measured=text)
    if equal == len(whole):
        return wrong("signal", text, "nothing can be learned: take other problems, or another model")
    filtered = config.scheduler.filter_no_signal
    advice = "" if filtered else "scheduler.filter_no_signal = true trains on the others only"
    return CheckRow(what="signal", measured=text, advice=advice)


MARKER = ".seen"
"""All machines are asked for this file of the folder."""
LINK_BYTES = {"cpu": 64_000_000, "gpu": 1_000_000_000}


def check(
    config: RunConfig,
    *,
    out: Path,
    shared: bool = True,
    backend: Backend | None = None,
    on_step: Callable[[StepRow, dict[str, float]], None] | None = None,
) -> CheckReport:
    """Check a run on its own machines; without the training packages only its task.

    ``out``: new folder for the report, a hardware.toml and the few steps, seen by all machines if ``shared``.
    ``backend`` None: of the run file.

    Raises:
        ConfigError: If the input is wrong; nothing has been started or written then.
        RunInterruptedError: After Ctrl-C.
    """
    train = check_run(config)
    task = task_of(config)
    evaluation_task(config, task)
    backend = backend or backend_of(train)
    missing = backend.missing() if isinstance(backend, RayBackend) else []
    if not missing:
        config = with_local_model(config)
        backend.check(config)
    check_vacant(out)
    if (out / HARDWARE_FILE).exists():
        raise ConfigError(f"--out must be a folder without a {HARDWARE_FILE}, got {out}")
    codec, why_not = _codec(config)
    rows = environment_rows(config, codec, why_not) if task is None else task_rows(config, task, codec, why_not)
    if missing:
        advice = install(f"train-{train.device}")
        why = f"{', '.join(missing)} not installed"
        rows += [unchecked(what, why, advice) for what in ("machines and links", "training", "engines and weights")]
    else:
        make_folder(out)
        model = Path(config.train_table.model.path)
        weights_gb = sum(file.stat().st_size for file in model.glob("*.safetensors")) / 1e9
        if train.lora is not None:
            from backends.lora import adapter_shapes
            from backends.transfer.verify import checkpoint_shapes

            shapes = adapter_shapes(checkpoint_shapes(model), train.lora.rank)
            weights_gb = (4 if train.device == "cpu" else 2) * sum(map(math.prod, shapes.values())) / 1e9
        rows += _Trial(config, task, out, shared, backend, on_step, weights_gb).run()
    report = CheckReport(rows=rows)
    make_folder(out)
    write_json(out / CHECK_FILE, report.to_dict())
    return report


def _codec(config: RunConfig) -> tuple[Codec | None, str]:
    path = config.train_table.model.path
    if not Path(path).is_dir():  # a name would be looked for in the network
        return None, f"train.model.path={path!r} is no folder"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        return load_codec(config), ""
    except ModuleNotFoundError as error:
        return None, f"{error.name} is not installed"
    except ConfigError as error:
        return None, str(error)


@dataclass(slots=True)
class _Trial:
    """A run of a few steps with measurements before it (mutable)."""

    config: RunConfig
    task: Task | None
    out: Path
    shared: bool
    backend: Backend
    on_step: Callable[[StepRow, dict[str, float]], None] | None
    weights_gb: float
    rows: list[CheckRow] = field(default_factory=list)
    device: str = "CPU"

    def run(self) -> list[CheckRow]:
        """Run; return the findings, a failure last."""
        short, began_s = check_config(self.config), time.monotonic()
        try:
            with driving(self.out) as lock, self.backend.open(short, logs=self.out / LOGS_FOLDER) as parts:
                measure = partial(self._measure, parts, began_s)
                report = drive(short, parts=parts, task=self.task, lock=lock, on_step=self.on_step, trial=measure)
        except RunInterruptedError:
            raise RunInterruptedError("interrupted; the check is not complete") from None
        except (RunFailedError, BackendError) as error:
            return [*self.rows, wrong("run", str(error), "mend this first; see docs/training_faults.md")]
        fitted = self._fitted()
        weights = {} if fitted is None else fitted.table.get("weights", {})
        expected = Expected.of(self.config, self.device)
        self.rows += run_rows(report, self.out, expected, weights=weights, weights_gb=self.weights_gb)
        return [*self.rows, self._hardware_row(fitted)]

    async def _measure(self, parts: Parts, began_s: float) -> None:
        what = f"start of {len(parts.engines)} engines and {trainer_ranks(self.config)} ranks"
        self.rows.append(CheckRow(what=what, measured=f"{time.monotonic() - began_s:.0f} s"))
        if parts.self_test is None:
            self.rows.append(unchecked("machines and links", "this backend does not measure them"))
            return
        from backends.ray.placement import versions

        marker = self.out / MARKER
        marker.touch()
        try:
            link_bytes = LINK_BYTES[self.config.train_table.device]
            test = await parts.self_test(link_bytes, str(marker) if self.shared else None)
        finally:
            marker.unlink()
        self.device = test.ranks[0].device
        self.rows += machine_rows(self.config, test, versions(), self.weights_gb)
        samples, lengths = longest_pack(self.config, parts.codec.encode("0123456789"))
        first = await parts.trainer.train(samples, completes_step=True)  # the first step allocates and compiles
        result = await parts.trainer.train(taught(samples, first), completes_step=True)
        preflight_gb = self._preflight_gb(int(result.metrics.get("recomputed_layers", 0)))
        self.rows += pack_rows(self.config, result, lengths, test.ranks[0], preflight_gb)

    def _preflight_gb(self, recomputed: int) -> float | None:
        if self.config.train_table.device == "cpu":
            return None
        from transformers import AutoConfig

        from backends.trainer.footprint import footprint

        model = AutoConfig.from_pretrained(self.config.train_table.model.path)
        return footprint(self.config, model, own_share(self.config), activation_checkpointing=recomputed).total / 1e9

    def _fitted(self) -> HardwareFit | None:
        try:
            return calibrate_trace(self.out, self.config)
        except ConfigError:  # no step, or no rollout, that ended
            return None

    def _hardware_row(self, fitted: HardwareFit | None) -> CheckRow:
        if fitted is None:
            return unchecked(HARDWARE_FILE, "no optimizer step with a finished rollout was made")
        write_hardware(self.out, hardware_toml(fitted, "train --check"))
        poor = doubts(fitted)
        text = "; ".join(part.what for part in fitted.parts)
        return CheckRow(what=HARDWARE_FILE, measured=f"fitted: {text}", advice="; ".join(poor))
