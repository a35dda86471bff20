"""Read the log of a job: console, JSONL, an export of W&B, a Chrome trace, or a plain CSV file."""

from __future__ import annotations

import codecs
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipelinerl.calibration.log import LoggedStep
from pipelinerl.errors import ConfigError
from pipelinerl.util.explain import did_you_mean, explaining, shown
from pipelinerl.util.read import LONGEST_LINE, opened, read_lines, read_rows, read_values
from pipelinerl.util.table import read_table

# Metrics of each system by column of a logged step. Names were read in the projects' sources (files named per format).
# A column has alternatives in order of preference; the metrics of one are added, and its first must be there. A metric
# matches by its whole name or by its end after a slash, since some systems put a scope before it.

Alternatives = tuple[tuple[str, ...], ...]

NUMBER = r"(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)"
NUMPY = r"(?:np\.\w+\()?"
"""Printed by NumPy 2 before a number in a dictionary."""
DURATION = r"(\d[\d.]*(?:ms|[dhms])(?: \d+[hms])?)"
"""Seconds in units: 15m 56s."""


@dataclass(frozen=True, slots=True)
class Format:
    """The format of a system's log."""

    name: str
    """As ``--from`` has it."""
    steps: tuple[str, ...]
    """Columns of an export that number the steps, the best first."""
    columns: Mapping[str, Alternatives]
    """Metrics by column of ``LoggedStep``."""
    ratios: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=dict)
    """Columns that are a product of metrics over a product of others."""
    asynchronous: tuple[str, ...] = ()
    """Metrics that only an asynchronous job has, or has above 0."""
    asynchronous_columns: Mapping[str, Alternatives] = field(default_factory=dict)
    """Columns with other metrics in an asynchronous job."""
    console_step: re.Pattern[str] | None = None
    """A line of the console that begins a step; its group is the number."""
    console_marks: tuple[str, ...] = ()
    """A line of the console without any of them says nothing; a tenth of the time of a pattern."""
    console: tuple[tuple[re.Pattern[str], str], ...] = ()
    """Patterns of numbers and their metrics: ``{0}`` stands for the first group, the last group is the value."""
    console_wraps: re.Pattern[str] | None = None
    """The beginning of a line before which a terminal put a line's end, not the system."""
    besides: tuple[str, ...] = ()
    """Seconds that are no part of a step, though some versions count them in it: evaluation, checkpoint."""


VERL = Format(
    name="verl",
    steps=("training/global_step", "_step", "step"),
    columns={
        "step_s": (("timing_s/step",), ("perf/time_per_step",)),
        "generation_s": (("timing_s/gen",),),
        "training_s": (
            ("timing_s/update_actor", "timing_s/old_log_prob", "timing_s/ref", "timing_s/values", "timing_s/adv",
             "timing_s/update_critic"),
        ),
        "logprob_s": (("timing_s/old_log_prob", "timing_s/ref"), ("timing_s/ref",)),
        "sync_s": (("timing_s/update_weights",), ("timing_s/sync_rollout_weights",), ("timing_s/param_sync",)),
        "reward_s": (("timing_s/reward",),),
        "total_tokens": (("perf/total_num_tokens",),),
        "length_mean": (("response_length/mean",),),
        "length_max": (("response_length/max",),),
        "clipped_share": (("response_length/clip_ratio",),),
        "prompt_mean": (("prompt_length/mean",),),
    },
    ratios={"accelerators": (("perf/total_num_tokens",), ("perf/throughput", "perf/time_per_step"))},
    asynchronous=("fully_async/count/current_param_version", "timing_s/generate_async", "timing_s/param_sync"),
    asynchronous_columns={"wait_s": (("timing_s/gen",),), "generation_s": (("timing_s/generate_async",),)},
    console_step=re.compile(r"\bstep:(\d{1,9}) - "),
    console_marks=("step:", "timing_s/"),
    console=((re.compile(rf" - ([^\s:]+):{NUMPY}{NUMBER}"), "{0}"),),
    console_wraps=re.compile(r"(?!\(|.*\bstep:\d+ - ).* - [\w.@-]+/[\w/.@-]+:"),
    besides=("timing_s/testing", "timing_s/save_checkpoint"),
)  # fmt: skip
"""volcengine/verl, March 2025 to January 2026: ``verl/trainer/ppo/metric_utils.py``,
``verl/trainer/ppo/ray_trainer.py``, console in ``verl/utils/logger/aggregate_logger.py``, JSONL in
``verl/utils/tracking.py``; asynchronous in ``verl/experimental/one_step_off_policy/ray_trainer.py`` and
``verl/experimental/fully_async_policy/``."""

NEMO_RL = Format(
    name="nemo-rl",
    steps=("_step", "step"),
    columns={
        "step_s": (("timing/train/total_step_time",),),
        "generation_s": (("timing/train/generation",),),
        "wait_s": (("timing/train/exposed_generation",),),
        "training_s": (
            ("timing/train/policy_training", "timing/train/policy_and_reference_logprobs",
             "timing/train/training_prep", "timing/train/logprob_inference_prep",
             "timing/train/advantage_calculation"),
        ),
        "logprob_s": (("timing/train/policy_and_reference_logprobs", "timing/train/logprob_inference_prep"),),
        "sync_s": (("timing/train/weight_sync",), ("timing/train/prepare_for_generation/total",)),
        "reward_s": (("timing/train/reward_calculation",),),
        "total_tokens": (("train/total_num_tokens",),),
        "samples_per_s": (("performance/samples_per_sec",),),
        "length_mean": (("train/mean_gen_tokens_per_sample",), ("train/gen_tokens_per_sample/mean",)),
        "length_p95": (("train/max_gen_tokens_per_turn/p95",),),
        "length_max": (("train/gen_tokens_per_sample/max",), ("train/max_gen_tokens_per_sample",)),
        "clipped_share": (("train/truncation_rate",),),
        "prompt_mean": (("train/mean_prompt_length",),),
        "sequence_mean": (("train/mean_total_tokens_per_sample",), ("train/total_tokens_per_sample/mean",)),
        "lag_mean": (("train/avg_trajectory_age",),),
    },
    ratios={
        "accelerators": (("performance/tokens_per_sec",), ("performance/tokens_per_sec_per_gpu",)),
        "generation_accelerators": (
            ("performance/generation_tokens_per_sec",), ("performance/generation_tokens_per_sec_per_gpu",),
        ),
    },
    console_step=re.compile(r"={5,} Step (\d{1,9})/"),
    console_marks=("= Step ", "• ", "/sec"),
    console=(
        (re.compile(rf"• Total step time: {NUMBER}s"), "timing/train/total_step_time"),
        (re.compile(rf"• ([a-z][\w/]*): {NUMBER}s \("), "timing/train/{0}"),
        (re.compile(rf"• Mean Generation Length: {NUMBER}"), "train/mean_gen_tokens_per_sample"),
        (re.compile(rf"• Mean Total Tokens per Sample: {NUMBER}"), "train/mean_total_tokens_per_sample"),
        (re.compile(rf"• Avg Trajectory Age: {NUMBER}"), "train/avg_trajectory_age"),
        (re.compile(rf"- E2E \(Samples/sec\): {NUMBER}"), "performance/samples_per_sec"),
        (re.compile(rf"- E2E \(Tokens/sec\): {NUMBER}"), "performance/tokens_per_sec"),
        (re.compile(rf"- E2E \(Tokens/sec/gpu\): {NUMBER}"), "performance/tokens_per_sec_per_gpu"),
        (re.compile(rf"- Generation Worker Group \(Tokens/sec\): {NUMBER}"), "performance/generation_tokens_per_sec"),
        (
            re.compile(rf"- Generation Worker Group \(Tokens/sec/gpu\): {NUMBER}"),
            "performance/generation_tokens_per_sec_per_gpu",
        ),
    ),
    besides=("timing/train/checkpointing",),
)  # fmt: skip
"""NVIDIA-NeMo/RL, August 2026: ``nemo_rl/algorithms/grpo.py`` (timers, console), ``nemo_rl/algorithms/utils.py``
(performance), ``nemo_rl/experience/rollouts.py`` and ``rollout_manager.py`` (lengths)."""

PRIME_RL = Format(
    name="prime-rl",
    steps=("step", "_step"),
    columns={
        "step_s": (("time/step",),),
        "wait_s": (("time/wait_for_batch",),),
        "training_s": (("time/forward_backward", "time/load_data"),),
        "sync_s": (("time/broadcast_weights",),),
        "tokens": (("progress/output_tokens",), ("progress/decode_tokens",)),
        "samples": (("progress/samples",),),
        "length_mean": (("train/agg/effective/num_output_tokens/mean",), ("decode_len/mean",)),
        "length_p90": (("train/agg/effective/num_output_tokens/p90",),),
        "length_max": (("train/agg/effective/num_output_tokens/max",),),
        "clipped_share": (("is_truncated/mean",),),
        "prompt_mean": (("train/agg/effective/num_input_tokens/mean",), ("prefill_len/mean",)),
        "sequence_mean": (("seq_len/mean",),),
        "lag_mean": (("off_policy/mean",),),
        "lag_max": (("console/async_level", "off_policy/max"), ("off_policy/max",)),
    },
    ratios={
        "training_accelerators": (("perf/throughput",), ("perf/throughput_per_gpu",)),
        "total_tokens": (("console/throughput", "time/step"), ()),
    },
    console_step=re.compile(r"\bStep (\d{1,9}) \|"),
    console_marks=("|",),
    console=(
        (re.compile(rf"\bStep \d+ \|(?: Time:)?\s+{DURATION} \|"), "time/step"),
        (re.compile(rf"Throughput: {NUMBER} tokens/s \| Seq"), "console/throughput"),
        (re.compile(rf"Seq\. Length: {NUMBER} tokens/sample"), "seq_len/mean"),
        (re.compile(rf"\| Async Level: {NUMBER}"), "console/async_level"),
        (re.compile(rf"\| Max\.? Off-Policy(?: Level:)? {NUMBER}"), "off_policy/max"),
    ),
)
"""PrimeIntellect-ai/prime-rl, December 2025 to August 2026: ``src/prime_rl/trainer/rl/train.py``,
``src/prime_rl/orchestrator/orchestrator.py``, ``src/prime_rl/orchestrator/metrics.py``; JSONL in
``src/prime_rl/monitors/file.py``. Trainer and orchestrator write a file each: give both."""

SLIME = Format(
    name="slime",
    steps=("rollout/step", "_step", "step"),
    columns={
        "step_s": (("perf/step_time",), ("perf/total_train_time",)),
        "generation_s": (("perf/rollout_time",),),
        "training_s": (("perf/train_time",),),
        "logprob_s": (("perf/log_probs_time", "perf/ref_log_probs_time"), ("perf/ref_log_probs_time",)),
        "sync_s": (("perf/update_weights_time",),),
        "length_mean": (("rollout/response_len/mean",), ("rollout/response_lengths",)),
        "length_max": (("rollout/response_len/max",),),
        "clipped_share": (("rollout/truncated_ratio",), ("rollout/truncated",)),
        "sequence_mean": (("rollout/total_lengths",),),
    },
    ratios={"total_tokens": (("perf/actor_train_tok_per_s", "perf/actor_train_time"), ())},
    console_step=re.compile(r"\b(?:perf|rollout) (\d{1,9}): \{"),
    console_marks=(": {", "': "),
    console=((re.compile(rf"'([\w/.@-]+)': {NUMPY}{NUMBER}"), "{0}"),),
)  # fmt: skip
"""THUDM/slime, September 2025 to August 2026: ``slime/observability/train_metric_utils.py``,
``slime/observability/rollout_metrics.py``, timers in ``slime/backends/megatron_utils/actor.py``; the older names in
``slime/utils/train_metric_utils.py``."""

AREAL_PARTS = (
    "timeperf/train_step", "timeperf/recompute_logp", "timeperf/ref_logp", "timeperf/teacher_logp",
    "timeperf/critic_values", "timeperf/critic_train_step", "timeperf/compute_advantage",
)  # fmt: skip
TRACED_PARTS = (
    "train.ppo_update", "train.recompute_logp", "train.ref_logp", "train.teacher_logp", "train.compute_values",
    "train.critic_ppo_update", "train.compute_advantage",
)  # fmt: skip
AREAL = Format(
    name="areal",
    steps=("_step", "step"),
    columns={
        "step_s": (
            ("timeperf/rollout", *AREAL_PARTS, "timeperf/update_weights", "timeperf/clear_batches"),
            ("train.rollout", *TRACED_PARTS, "train.update_weights", "train.clear_batches"),
        ),
        "generation_s": (("timeperf/rollout",), ("train.rollout",)),
        "training_s": (AREAL_PARTS, TRACED_PARTS),
        "logprob_s": (AREAL_PARTS[1:4], TRACED_PARTS[1:4]),
        "sync_s": (("timeperf/update_weights",), ("train.update_weights",)),
        "samples": (("ppo_actor/n_seqs",),),
        "prompt_mean": (("ppo_actor/prompt_len/avg",),),
        "sequence_mean": (("ppo_actor/seq_len/avg",),),
        "sequence_max": (("ppo_actor/seq_len/max",),),
        "clipped_share": (("ppo_actor/no_eos_ratios/avg",),),
        "lag_mean": (("version_stats/sample_staleness_theta_avg",),),
        "lag_max": (("version_stats/sample_staleness_theta_max",),),
    },
    asynchronous=("version_stats/sample_staleness_theta_max",),
    asynchronous_columns={"wait_s": (("timeperf/rollout",), ("train.rollout",)), "generation_s": ()},
    console_step=re.compile(r"Train step (\d{1,9})/\d+ done"),
    console_marks=("Train step ", "│"),
    console=((re.compile(rf"│\s*([\w/-]+)\s*│\s*{NUMBER}\s*(?=│)"), "{0}"),),
)
"""inclusionAI/AReaL, May 2026: ``areal/trainer/rl_trainer.py`` (timers and trace), ``areal/trainer/ppo/actor.py``
(lengths, staleness), console in ``areal/utils/printing.py``, traces in ``areal/utils/perf_tracer.py``. Its trace has no
lengths: give it together with another export."""

FORMATS = (VERL, NEMO_RL, PRIME_RL, SLIME, AREAL)
PLAIN = "csv"
"""The name of a plain CSV file with the columns of ``LoggedStep``."""


MOST_STEPS = 100_000
"""Steps of a log (count)."""
Wanted = Callable[[str], bool]
"""Whether a format reads a metric of this name."""
Metrics = dict[int, dict[str, float]]
"""Numbers by step and name."""

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
DURATIONS = re.compile(r"([\d.]+)(ms|[dhms])")
UNITS = {"d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3}
RUN_PREFIX = " - "
"""Separates the name of a run from that of a metric where W&B exports a chart."""
MAY_BE_0 = ("generation_s", "training_s", "sync_s", "wait_s", "clipped_share", "prompt_mean", "lag_mean", "lag_max")
"""Columns in which 0 is a value; elsewhere it means not measured."""


def read_log(paths: Sequence[Path], name: str) -> list[LoggedStep]:
    """Return the steps of a log, in order; several files of one job are put together step by step.

    A file begins another run where it comes back to the first step of a run with metrics that this step has already;
    the steps of all runs are returned one after the other. A job that goes on from a checkpoint is one run.

    Raises ConfigError if ``name`` is not of ``FORMATS`` nor ``csv``, a file cannot be read, or holds no step.
    """
    names = [one.name for one in FORMATS] + [PLAIN]
    if name not in names:
        raise ConfigError(
            f"--from must be one of {', '.join(names)}, got {name!r}; {did_you_mean(name, names)}".rstrip("; ")
        )
    if name == PLAIN:
        return [row for path in paths for _, row in read_table(path, "log").rows(LoggedStep)]
    format_ = FORMATS[names.index(name)]
    runs: list[Metrics] = []
    wanted = _wanted(format_)
    for path in paths:
        place, first, last, seen = -1, math.inf, -math.inf, set[str]()  # of the run in this file; seen: in its first
        for number, values in _numbers(path, format_, wanted):
            if place < 0 or (number == first < last and seen & values.keys()):
                place, first, last = place + 1, math.inf, -math.inf
                runs += [defaultdict(dict)] if place == len(runs) else []
            if values:
                seen = {*values} if number < first else seen | values.keys() if number == first else seen
                first, last = min(first, number), max(last, number)
            runs[place][number].update(values)
            if sum(map(len, runs)) > MOST_STEPS:
                raise ConfigError(f"{path} must hold at most {MOST_STEPS:,} steps")
        if place < 0:
            raise ConfigError(f"{path} must hold steps as {name} logs them, got none; is it of another system?")
    numbered = ((number, run[number]) for run in runs for number in sorted(run))
    steps = [step for number, metrics in numbered if (step := _step(number, metrics, format_)) is not None]
    if not steps:
        columns = (format_.columns.get(name) for name in ("step_s", "training_s", "length_mean"))
        examples = ", ".join(alternatives[0][0] for alternatives in columns if alternatives)
        raise ConfigError(
            f"{', '.join(map(str, paths))} must hold metrics of {name}, such as {examples}, got none of them"
        )
    return steps


def _step(number: int, metrics: Mapping[str, float], format_: Format) -> LoggedStep | None:
    columns = dict(format_.columns)
    if any(_metric(name, metrics) for name in format_.asynchronous):
        columns |= format_.asynchronous_columns
    found = {column: _sum(alternatives, metrics) for column, alternatives in columns.items()}
    for column, (above, below) in format_.ratios.items():
        values = [[_metric(name, metrics) for name in names] for names in (above, below)]
        if all(one for names in values for one in names):
            over, under = (math.prod(one for one in names if one) for names in values)
            found[column] = over / under
    if found.get("step_s") is not None:
        found["step_s"] = _without(sum(_metric(name, metrics) or 0.0 for name in format_.besides), found)
    known = {column: value for column, value in found.items() if value or (value is not None and column in MAY_BE_0)}
    if not known:
        return None
    with explaining(LoggedStep, f"step {number} of the log: ", most=1):
        return LoggedStep(step=number, **known)


def _without(besides_s: float, found: Mapping[str, float | None]) -> float:
    """Return the seconds of a step without evaluation and checkpoint, if its parts leave room for them."""
    waits = "generation_s" if found.get("wait_s") is None else "wait_s"
    step_s, *parts_s = (found.get(name) or 0.0 for name in ("step_s", waits, "training_s", "sync_s"))
    return step_s - besides_s if sum(parts_s) + besides_s <= step_s else step_s


def _sum(alternatives: Alternatives, metrics: Mapping[str, float]) -> float | None:
    for first, *others in alternatives:
        if (value := _metric(first, metrics)) is not None:
            return value + sum(_metric(name, metrics) or 0.0 for name in others)
    return None


def _metric(name: str, metrics: Mapping[str, float]) -> float | None:
    if name in metrics:
        return metrics[name]
    end = "/" + name
    return next((value for key, value in metrics.items() if key.endswith(end)), None)


def _wanted(format_: Format) -> Wanted:
    tables = [*format_.columns.values(), *format_.asynchronous_columns.values(), *format_.ratios.values()]
    names = {name for alternatives in tables for names in alternatives for name in names}
    names |= {*format_.asynchronous, *format_.besides}

    @lru_cache(maxsize=10_000)
    def wanted(name: str) -> bool:
        return name in names or any(name.endswith("/" + one) for one in names)

    return wanted


def _numbers(path: Path, format_: Format, wanted: Wanted) -> Iterator[tuple[int, dict[str, float]]]:
    """Return the numbers of a file, a step at a time; a step may come several times."""
    with opened(path, "log") as file:
        table = file.read(1000).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{")
    if table or path.suffix in (".json", ".jsonl"):
        return _from_json(path, format_, wanted)
    if path.suffix == ".csv":
        return _from_csv(path, format_, wanted)
    return _from_console(path, format_, wanted)


def _unwrapped(path: Path, format_: Format) -> Iterator[str]:
    """Yield the lines of a console without colours, those that a terminal wrapped put together."""
    before = ""
    for _, read in read_lines(path, "log"):
        line = COLOURS.sub("", read) if "\x1b" in read else read
        if begun := before.rstrip("\r\n"):
            wraps = " - " in line and format_.console_wraps is not None and format_.console_wraps.match(line)
            if wraps and not begun[-1].isspace() and len(begun) < LONGEST_LINE:
                before = begun + line
                continue
            yield from begun.splitlines()
        before = line
    yield from before.splitlines()


def _from_console(path: Path, format_: Format, wanted: Wanted) -> Iterator[tuple[int, dict[str, float]]]:
    assert format_.console_step is not None
    step = None
    for line in _unwrapped(path, format_):
        if not any(map(line.__contains__, format_.console_marks)):
            continue
        if begun := format_.console_step.search(line):
            step = int(begun[1])
        if step is None:
            continue
        matches = (
            (name.format(*match.groups()), match.groups()[-1])
            for pattern, name in format_.console
            for match in pattern.finditer(line)
        )
        yield step, {name: _seconds(text) for name, text in matches if wanted(name)}


def _seconds(text: str) -> float:
    if text[-1].isdigit():
        return float(text)
    return sum(float(number) * UNITS[unit] for number, unit in DURATIONS.findall(text))


def _from_csv(path: Path, format_: Format, wanted: Wanted) -> Iterator[tuple[int, dict[str, float]]]:
    rows = (cells for _, cells in read_rows(path, "log"))
    given = [name.rpartition(RUN_PREFIX) for name in next(rows, [])]
    header = [name for _, _, name in given]
    place = next((header.index(name) for name in (*format_.steps, "Step") if name in header), None)
    if place is None:
        raise ConfigError(
            f"{path} must number its steps in a column {', '.join(format_.steps)} or Step, got none of them"
        )
    runs: dict[str, list[tuple[int, str]]] = {}
    for column, (run, _, name) in enumerate(given):
        if wanted(name):
            runs.setdefault(run, []).append((column, name))
    kept = list(rows) if len(runs) > 1 else rows
    for columns in runs.values() or [[]]:  # a chart of several runs has a column of each: one run after the other
        for cells in kept:
            pairs = ((name, _number(cells[column])) for column, name in columns if column < len(cells))
            step = _number(cells[place]) if place < len(cells) else None
            if step is not None and (
                (values := {name: one for name, one in pairs if one is not None}) or len(runs) < 2
            ):
                yield int(step), values


def _from_json(path: Path, format_: Format, wanted: Wanted) -> Iterator[tuple[int, dict[str, float]]]:
    spans: Metrics = defaultdict(dict)
    for row in read_values(path, "log"):
        if not isinstance(row, dict):
            raise ConfigError(f"{path} must hold an object per line, got {shown(row)}")
        if "ph" in row:
            _take_span(row, spans, wanted)
            if len(spans) > MOST_STEPS:
                break
            continue
        data = row.get("data", row)
        step = next((one for name in (*format_.steps, "step") if (one := _number(row.get(name))) is not None), None)
        if step is not None and isinstance(data, dict):
            pairs = ((name, _number(value)) for name, value in data.items() if wanted(name))
            yield int(step), {name: value for name, value in pairs if value is not None}
    yield from spans.items()


def _take_span(event: Mapping[str, Any], spans: Metrics, wanted: Wanted) -> None:
    args, name, micros = event.get("args"), str(event.get("name")), _number(event.get("dur"))
    step = args.get("global_step") if isinstance(args, dict) else None
    if event["ph"] == "X" and isinstance(step, int) and micros is not None and wanted(name):
        spans[step][name] = max(micros / 1e6, spans[step].get(name, 0.0))


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
