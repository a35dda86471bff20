"""Fit the hardware model to a trace or to a table of step times of a real system.

The result is the table ``[hardware]`` as a file, its errors and doubts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from pipelinerl.calibration.log import CalibratedLog, LoggedRun, simulated_step
from pipelinerl.calibration.solve import Fit, HardwareFit, fixed_coefficients, rounded
from pipelinerl.calibration.table import read_step_times
from pipelinerl.calibration.trace import DecodeTimes, TraceTimes, TrainingTimes, read_times
from pipelinerl.config.engine import SpeculationConfig
from pipelinerl.config.run import RunConfig, load_run
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.coefficients import SHARES_OF_PEAK
from pipelinerl.hardware.costs import HardwareConfig, acceptance_of
from pipelinerl.hardware.transport import SHARE_METRIC
from pipelinerl.records.reports import DecodeSteps, RunReport
from pipelinerl.records.run_folder import METRICS_FILE, RUN_FILE, SUMMARY_FILE, TRACE_FILE
from pipelinerl.records.steps import COLUMNS, STEPS_FILE, StepRow, read_steps
from pipelinerl.records.trace import Trace
from pipelinerl.util.arrays import FloatArray, ratio
from pipelinerl.util.read import parse_json, read_lines

ROWS = 200
"""Rows of measured decode steps, about (count)."""
QUIET = 0.02
"""Mean error up to which single lives of rollouts count as free of noise (no unit)."""


def calibrate_trace(source: Path, run: RunConfig | None = None) -> HardwareFit:
    """Fit the hardware to a trace or a run folder; GPU and model, or tables, are those of ``run`` (None: of the trace).

    An engine is taken to have its accelerator, or core, to itself. Where its front end works on the same core, the
    requests sent meanwhile lengthen the steps, and the fit is off by as much.

    Raises:
        TraceError: If the trace is missing or broken.
        ConfigError: If it holds no optimizer step or no finished rollout, or GPU or model are unknown.
    """
    times = read_times(Trace(source / TRACE_FILE if source.is_dir() else source))
    num_batches = len(times.training.seconds)
    if not num_batches or not any(log.lived for log in times.engines):
        raise ConfigError(f"{source} must hold an optimizer step and a finished rollout, got a run that ended before")
    run = times.config if run is None else run
    result = HardwareFit(run.hardware, fixed_coefficients(run))
    report = RunReport.read(source / SUMMARY_FILE) if (source / SUMMARY_FILE).is_file() else None
    drafts = _drafts(times.config, report)
    if report is not None and report.decode_steps and times.config.environment is None:
        times.windows = _measured(report.decode_steps)
        if drafts is not None:
            times.windows = drafts.windows(times.windows)
    elif drafts is not None and times.windows is not None:
        times.windows = drafts.lives(times.windows)  # the trace knows the steps of an interval by a rollout's tokens
    half_step_s = fit_decode(result, times, front_end_s=_front_end_s(report, times.config), drafts=drafts)
    result.acceptance = None if drafts is None else rounded(drafts.acceptance)
    accelerators = np.full(num_batches, float(times.config.training_accelerators))
    result.training(times.training, accelerators, f"{num_batches} micro-batches")
    _take_waits(result, times, half_step_s)
    if result.named is not None and (share := _changed_share(source / METRICS_FILE)) is not None:
        result.table.setdefault("coefficients", {})["changed_share"] = rounded(share)
    return result


def _changed_share(path: Path) -> float | None:
    """Return the mean share of changed numbers of the versions that were sent as such; None: there was none."""
    lines = [parse_json(text, f"{path}, line {number}") for number, text in read_lines(path)] if path.is_file() else []
    shares = [one.get(SHARE_METRIC) for one in lines if isinstance(one, dict)]
    known = [one for one in shares if isinstance(one, float) and 0 < one <= 1]
    return float(np.mean(known)) if known else None


def _measured(sums: list[DecodeSteps]) -> DecodeTimes:
    """Return the decode steps that a real run measured, each batch size with rows in proportion to its steps."""
    columns = ("steps", "sequences", "context", "started", "read_tokens", "seconds")
    some = np.array([[getattr(one, name) for name in columns] for one in sums], dtype=np.float64)
    some = np.repeat(some, np.ceil(ROWS * some[:, 0] / some[:, 0].sum()).astype(int), axis=0)
    steps, sequences, context, started, read_tokens, seconds = some.T
    return DecodeTimes.of(
        steps=steps,
        sequences=sequences,
        context=context,
        prefills=started,
        prefill_tokens=read_tokens,
        prefill_squares=ratio(read_tokens**2, started),
        seconds=seconds,
    )


def _front_end_s(report: RunReport | None, config: RunConfig) -> float | None:
    """Return the seconds per rollout of an engine's front end or the driver, whichever is slower; None: unmeasured."""
    if report is None or report.front_end_busy_s_per_rollout is None or report.driver_busy_s_per_rollout is None:
        return None
    return max(report.front_end_busy_s_per_rollout, report.driver_busy_s_per_rollout * config.num_engines)


@dataclass(frozen=True, slots=True)
class Drafts:
    """What steps of engines that draft gave, and cost: ``given`` has their law."""

    given: SpeculationConfig
    tokens_per_step: float
    """Tokens of a sequence per step, mean over all steps."""
    share: float
    """Steps of sequences that drafted, over all."""

    @property
    def acceptance(self) -> float:
        """That of the law, which gives the tokens of steps that drafted."""
        return acceptance_of(1 + (self.tokens_per_step - 1) / self.share if self.share else 1.0, self.given.tokens)

    def windows(self, times: DecodeTimes) -> DecodeTimes:
        """Return stretches of steps with the sequences and steps that cost as much without drafts."""
        limit = self.given.off_above
        drafts = np.full(len(times.steps), limit is None) | (ratio(times.sequences, times.steps) <= (limit or 0))
        return self._plain(times, drafts.astype(np.float64))

    def lives(self, times: DecodeTimes) -> DecodeTimes:
        """Return the same of stretches whose ``steps`` are tokens of a sequence."""
        columns = {name: getattr(times, name) / self.tokens_per_step for name in ("steps", "sequences", "context")}
        return self._plain(replace(times, **columns), np.array(self.share))

    def _plain(self, times: DecodeTimes, share: FloatArray) -> DecodeTimes:
        drafting = share * self.given.tokens * self.given.draft_cost
        computed = 1 + share * self.given.tokens + drafting
        steps, context = (some * (1 + drafting) for some in (times.steps, times.context))
        return replace(times, steps=steps, context=context, sequences=times.sequences * computed)


def _drafts(config: RunConfig, report: RunReport | None) -> Drafts | None:
    """Return what a run with ``engine.speculation`` measured; ConfigError if it did not. None: it has none."""
    given = config.speculation
    if given is None:
        return None
    limit, steps = given.off_above, None if report is None else report.decode_steps
    if report is None or (steps is None and (limit is not None or report.tokens_per_step is None)):
        raise ConfigError("calibrate needs decode_steps in the summary.json of a run with engine.speculation, got none")
    if steps is None:
        return Drafts(given, report.tokens_per_step or 1.0, 1.0)
    all_steps = sum(steps, DecodeSteps())
    drafted = sum(one.sequences for one in steps if limit is None or one.sequences <= limit * one.steps)
    return Drafts(given, all_steps.tokens / all_steps.sequences, drafted / all_steps.sequences)


def fit_decode(
    result: HardwareFit, times: TraceTimes, *, front_end_s: float | None = None, drafts: Drafts | None = None
) -> float:
    """Fit decode step, prefill and latency; return half a decode step (s). ``front_end_s`` None: as in the run file."""
    size = float(times.config.cluster.tensor_parallel)
    request_s = result.given.latency.request_s if front_end_s is None else front_end_s
    always_full = not times.config.scheduler.schedule.has_rl_steps

    def plain(stretches: DecodeTimes) -> DecodeTimes:
        return stretches if drafts is None else drafts.lives(stretches)

    def stretches_s(stretches: DecodeTimes) -> FloatArray:
        return result.decode_s(plain(stretches), np.full(len(stretches.seconds), size))

    def step_s(batch: FloatArray, context: FloatArray) -> FloatArray:
        ones = np.ones(len(batch))
        return stretches_s(DecodeTimes.of(steps=ones, sequences=batch, context=context, seconds=np.zeros(len(batch))))

    if times.windows is not None:
        num_windows = len(times.windows.seconds)
        data = f"{num_windows} intervals with a known number of decode steps"
        result.decode(times.windows, np.full(num_windows, size), data)
        if not times.windows.prefills.any():
            result.notes.append("prefill is not determined: no interval holds one")
        way_s = 0.0
        for _ in range(4):
            lives = times.lives(max(0.0, way_s), step_s, request_s=request_s)
            rest_s = lives.seconds - lives.front_end - stretches_s(lives)
            # No delay exceeds the shortest life; without this limit, errors in the rest can grow from round to round.
            way_s = min(times.shortest_life_s, float(rest_s.sum() / lives.lives.sum()))
    else:
        table = dict(result.table)
        for together in (False, True):
            way_s, speed = 0.0, None
            for _ in range(4):
                lives = times.lives(max(0.0, way_s), speed, request_s=request_s, together=together)
                result.table, result.parts = dict(table), []
                data = f"{lives.lives.sum():.0f} lives of rollouts"
                sizes = np.full(len(lives.seconds), size)
                way_s = result.decode(plain(lives), sizes, data, with_dispatch=True, always_full=always_full)
                speed = step_s
            if result.parts[-1].fit.mean_error < QUIET:
                break
    num_steps = lives.steps.sum() / (1.0 if drafts is None else drafts.tokens_per_step)
    half_step_s = float(stretches_s(lives).sum() / num_steps) / 2
    _take_way(result, times, way_s, half_step_s, request_s)
    return half_step_s


def _take_way(result: HardwareFit, times: TraceTimes, way_s: float, half_step_s: float, request_s: float) -> None:
    """Split a rollout's delay ``way_s`` into dispatch and report; the front end, ``request_s``, is not part of it."""
    latency = result.given.latency.model_dump(exclude={"dispatch_jitter_s"}, exclude_defaults=True)
    if times.late_s is not None:
        # Rollouts whose last step is running when the pause begins are counted, too: half a step too much.
        latency["report_s"] = rounded(min(max(0.0, times.late_s - half_step_s), max(0.0, way_s)))
    if request_s:
        latency["request_s"] = rounded(request_s)
    result.table["latency"] = {**latency, "dispatch_s": rounded(max(0.0, way_s - latency.get("report_s", 0.0)))}


def _take_waits(result: HardwareFit, times: TraceTimes, half_step_s: float) -> None:
    if times.publish_s and times.pause_s:
        weights = {"publish_s": _mean(times.publish_s), "pause_s": _mean(times.pause_s)}
        if times.transfer_s:
            # It includes the wait for the running step to end: half a step on average.
            weights["transfer_s"] = rounded(max(0.0, _mean(times.transfer_s) - half_step_s))
        result.table["weights"] = weights
    else:
        result.notes.append("weights: no publication in the trace")
    if times.to_training_s and times.to_generation_s:
        switch = {"to_training_s": _mean(times.to_training_s), "to_generation_s": _mean(times.to_generation_s)}
        result.table["switch"] = {name: max(0.0, value) for name, value in switch.items()}
    if times.score_s:
        result.table["latency"].pop("preprocess_s", None)
        result.table["latency"]["reward_s"] = rounded(float(np.median(times.score_s)))
        result.notes.append("latency.reward_s holds reward and preprocessing, which a trace does not tell apart")


def _mean(values: Iterable[float]) -> float:
    return rounded(float(np.mean(list(values))))


def calibrate_table(source: Path, run: RunConfig | None = None) -> HardwareFit:
    """Fit GPU and model, or tables, of ``run`` (None: tables) to a CSV table of step times (see ``table``).

    Raises ConfigError if the table cannot be used, or GPU or model are unknown.
    """
    empty = HardwareConfig.model_construct()
    result = HardwareFit(empty) if run is None else HardwareFit(run.hardware, fixed_coefficients(run))
    table = read_step_times(source, named=result.named)
    if table.series is not None:
        result.notes.append("series: {} on {}".format(*table.series))
    # Requests are last: they need the fitted prefill.
    for kind, rows in sorted(table.kinds.items(), key=lambda one: one[0] == "request"):
        data = f"{len(rows.batch)} rows of {source.name}"
        ones = np.ones(len(rows.batch))
        if kind == "matmul":
            best = int(rows.utilisation.argmax())
            result.notes.append(
                f"matmul: utilisation {rows.utilisation[best]:.2f} at most, with {rows.batch[best]:g} rows; for "
                'hardware.decode of kind "utilisation" give utilisation.csv as its table'
            )
        elif kind == "train":
            each = rows.tokens / rows.batch
            times = TrainingTimes(rows.tokens, rows.tokens * each, rows.batch, each, each, ones, rows.seconds)
            result.training(times, rows.accelerators, data)
        else:
            sizes = rows.accelerators
            if result.named is None and len(held := np.unique(sizes)) > 1:
                raise ConfigError(
                    f"{source} holds engines of {', '.join(f'{size:g}' for size in held)} accelerators: give --run "
                    "RUN.toml with hardware.gpu and hardware.model"
                )
            if kind == "decode":
                context = rows.batch * rows.ctx
                steps = DecodeTimes.of(steps=ones, sequences=rows.batch, context=context, seconds=rows.seconds)
                result.decode(steps, sizes, data, kernels=table.series is not None)
            else:
                passes = DecodeTimes.of(
                    prefills=rows.batch,
                    prefill_tokens=rows.tokens,
                    prefill_squares=rows.tokens**2 / rows.batch,
                    seconds=rows.seconds,
                )
                (result.prefill if kind == "prefill" else result.requests)(passes, sizes, data)
    if result.named is None:
        for name in ("decode", "training"):
            if name not in result.table:
                result.notes.append(f"{name} was not measured: a run file needs hardware.{name} from elsewhere")
    return result


def calibrate_run(folder: Path, steps: Callable[[RunConfig], Sequence[StepRow]]) -> CalibratedLog:
    """Return a run folder with a trace as a calibrated log; ``steps`` as of ``Models``.

    Raises as ``calibrate_trace``, and ConfigError without two RL steps, of which the first is left out.
    """
    fit, run = calibrate_trace(folder), load_run(folder / RUN_FILE)
    now = run.model_copy(update={"hardware": HardwareConfig.model_validate(fit.table)})
    per = run.scheduler.optimizer_steps_per_rl_step if run.scheduler.schedule.has_rl_steps else 1
    rows = [StepRow(**dict(zip(COLUMNS, row.tolist(), strict=True))) for row in read_steps(folder / STEPS_FILE)]
    if len(rows) < 2 * per:
        raise ConfigError(f"{folder} must hold 2 RL steps, {2 * per} optimizer steps, got {len(rows)}")
    mean, again = (simulated_step(now, some, per) for some in (rows[per - 1 :], steps(now)))
    return CalibratedLog(LoggedRun(len(rows) - per, per, mean, None), now, fit, again, again, tuple(fit.notes))


# ----------------------------------------------------------------------------------------- results

HARDWARE_FILE = "hardware.toml"
AT_PEAK = 1e-6
"""Distance from 1 within which a fitted share of the peak counts as at its bound (no unit)."""
POOR = 0.2
"""Mean error from which on a fit is called poor (no unit): a good fit is 2 %, one on a noisy machine 10 %."""
FAR = 2.0
"""Factor on the hardware model's times, or its inverse, beyond which a warning asks to check the input."""


def hardware_toml(result: HardwareFit, source: str) -> str:
    """Return the table ``[hardware]`` as TOML, its notes as comments."""
    lines = [f"# Calibrated from {source}. Replaces the table [hardware] of a run file."]
    if result.acceptance is not None:
        lines.append("# A run file that drafts takes the mean acceptance.")
    for part in result.parts:
        lines.append(f"# {part.what}: fitted to {part.data}; {error_text(part.fit)}")
        lines += [f"#   {name} is not determined: {reason}" for name, reason in part.fit.undetermined.items()]
    lines += [f"# {note}" for note in result.notes]
    tables: dict[str, Any] = {"hardware": result.table}
    if result.acceptance is not None:
        tables["engine"] = {"speculation": {"acceptance": result.acceptance}}
    return "\n".join(lines) + "\n\n" + tomli_w.dumps(tables)


def write_hardware(out: Path, text: str, *, run: str | None = None) -> None:
    """Write the table as ``hardware.toml`` into a folder, beside a whole ``run`` as ``run.toml``, or into a ``.toml``.

    Raises ConfigError if that cannot be done, or there is such a file.
    """
    path = out if out.suffix == ".toml" else out / HARDWARE_FILE
    files = {path: text} if run is None else {path: text, out / RUN_FILE: run}
    for one in files:
        if one.exists():
            raise ConfigError(f"--out must be a new file or a folder without one, got {one}, which exists")
    try:
        for one, content in files.items():
            one.parent.mkdir(parents=True, exist_ok=True)
            with one.open("x", encoding="utf-8") as file:
                file.write(content)
    except OSError as error:
        raise ConfigError(f"--out must be a folder or file that can be written, got {out}: {error.strerror}") from None


def error_text(one: Fit) -> str:
    """Return the errors of a fit in words."""
    held_out = "" if one.held_out_error is None else f", {one.held_out_error:.1%} in the mean on a row left out"
    return f"error {one.mean_error:.1%} in the mean, {one.max_error:.1%} at most{held_out}"


def doubts(result: HardwareFit) -> list[str]:
    """Return a line per number just out of reach, factor far from 1, poor fit, and share of a peak at its bound."""
    lines = list(result.warnings)
    lines += [
        f"{what} lasts {factor:.2g} times as long as the hardware model says: check GPU, model, tensor_parallel and "
        "batch, and what the seconds hold besides"
        for what, factor in result.factors.items()
        if not 1 / FAR <= factor <= FAR
    ]
    for part in result.parts:
        one = part.fit
        if max(one.mean_error, one.held_out_error or 0.0) > POOR:
            lines.append(
                f"{part.what} is a poor fit to {part.data}: {error_text(one)}; above {POOR:.0%} it says "
                "no more than no calibration: check that the rows are of one system, and their units"
            )
        fitted = {name: value for name, value in one.values.items() if name not in one.undetermined}
        lines += [
            f"{name} came out at its bound, {value:g}: {part.what} is as fast as the accelerator can be, or faster; "
            "check units, GPU and model"
            for name, value in fitted.items()
            if name in SHARES_OF_PEAK and value >= 1 - AT_PEAK
        ]
    return lines


def as_json(result: HardwareFit) -> dict[str, Any]:
    """Return plain values: table, fits, notes, warnings."""
    fits = [{"what": part.what, "data": part.data, **asdict(part.fit)} for part in result.parts]
    found = {} if result.acceptance is None else {"acceptance": result.acceptance}
    return {"hardware": result.table, **found, "fits": fits, "notes": result.notes, "warnings": doubts(result)}
