"""Published runs as they are collected: rows of text, translated into the typed columns of ``PublishedRun``.

A collected row keeps the words of its source. The schedule stands in ``mode``, its bound in ``staleness_setting``, and
further numbers in these two and in ``note``. ``published_runs/README.md`` explains the columns; others are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from pipelinerl.errors import ConfigError
from pipelinerl.util.explain import explain
from pipelinerl.util.table import Table
from sim.validation.records import PublishedRun, Schedule

TEXTS = (
    "id",
    "source",
    "url_or_path",
    "evidence",
    "hw",
    "model",
    "algo",
    "mode",
    "precision",
    "staleness_setting",
    "note",
)
"""Columns that keep their text."""
COUNTS = (
    "gpus_total", "gpus_train", "gpus_gen", "gen_tensor_parallel", "prompts_per_step", "n_per_prompt", "max_len",
    "steps",
)  # fmt: skip
"""Columns of whole numbers."""
AMOUNTS = (
    "avg_len", "step_s", "gen_or_wait_s", "old_logp_s", "ref_s", "update_s", "total_h", "tok_s_per_gpu", "tok_s_total"
)  # fmt: skip
"""Columns of other numbers."""

COLOCATED = r"\bcolocat|\bhybrid\b"
SYNCHRONOUS = r"sync|\bcolocat|\bhybrid\b|\bon policy\b"
SCHEDULES: tuple[tuple[tuple[str, ...], Schedule, Schedule | None], ...] = (
    (("colocate", "async"), Schedule.PARTIAL_ROLLOUTS, Schedule.PARTIAL_ROLLOUTS),
    ((r"\b(one|1) step off\b",), Schedule.ONE_STEP_OFF, Schedule.ONE_STEP_OFF),
    ((r"async|\b\d+ ?(step )?off\b|\bpipeline|\bin ?flight\b|\bstream",), Schedule.ASYNC, Schedule.ASYNC),
    ((COLOCATED, "partial"), Schedule.PARTIAL_ROLLOUTS, Schedule.PARTIAL_ROLLOUTS),
    ((SYNCHRONOUS, "partial"), Schedule.PARTIAL_ROLLOUTS, None),  # the GPUs that generate would stand still
    ((COLOCATED,), Schedule.SYNC, Schedule.SYNC),
    ((SYNCHRONOUS,), Schedule.SYNC, Schedule.SYNC_APART),
)
"""Patterns of ``mode``, the schedule if all are found, and the same where some GPUs generate and others train.

The first row that fits counts. Case is ignored, and ``_`` and ``-`` are spaces.
"""

NUMBER = (
    r"(?<![\w.,])(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?) ?([kK]?)"
    r"(?![\w%]|[.,]\d| ?(?:ms|min|minutes|h|hours)\b)"
)
"""A number in a text, thousands separated or not, alone or with a k for thousand; nothing that only begins like one."""
STALENESS_NAMES = (
    "staleness_threshold",
    "eta",
    "max_trajectory_age_steps",
    "max_off_policy_steps",
    "max_head_offpolicyness",
    "max_staleness",
    "async_steps",
    "staleness",
    "max",
)
"""Names of the bound of staleness in the systems that publish runs; the first that is found counts."""
BARE_BOUND = r"(?:<=?|≤|at most|up to)?\s*(\d+(?:\.\d+)?)\s*(?:steps?|versions?|updates?)?"
"""A bound of staleness without a name."""
CLOSED_FORM = {
    "in_flight": "C",
    "train_batch_size": "B",
    "queue_batches": "q",
    "rate_ratio": "rho",
    "tailness": "Mtail",
    "mean_staleness": "measured",
}
"""Names of the numbers of Applied Compute's closed form; only all together are they these."""
IDLE_SHARE = {
    "trainer": r"trainer (\d+\.?\d*) samp/s",
    "generator": r"generator (\d+\.?\d*)(?:-(\d+\.?\d*))? samp/s",
    "idle": r"trainer idle ~?(\d+)\s?%",
}
"""Patterns of the note of a trainer that waits; only all together are they read."""
NOTHING = ("n/a", "nan", "-", "–", "—", "?")
"""Cells of a number that was not published."""


def is_collected(header: Sequence[str]) -> bool:
    """Return whether a file has collected columns, and not typed ones.

    Software is named in ``source`` there, and in ``system`` of typed columns; ``gen_or_wait_s`` is no typed column.
    """
    return "source" in header and ("system" not in header or "gen_or_wait_s" in header)


def collected_runs(table: Table) -> list[PublishedRun]:
    """Return the rows of a file of collected columns, translated.

    Columns that it lacks count as empty. Cells beyond the header belong to ``evidence``, a text in which a comma was
    not quoted.

    Raises:
        ConfigError: If there is no row or no column ``id``, or a cell is no number of the right kind.
    """
    where, header = table.header
    if "id" not in header or not table.lines:
        raise ConfigError(f"{where}: there must be columns id, source, ... and a row for each run")
    at = header.index("evidence") if "evidence" in header else len(header)
    runs = []
    for place, cells in table.lines:
        surplus = max(0, len(cells) - len(header))
        whole = [*cells[:at], ", ".join(cells[at : at + 1 + surplus]), *cells[at + 1 + surplus :]]
        runs.append(translated(dict(zip(header, whole, strict=False)), where=place))
    return runs


def translated(row: Mapping[str, str], *, where: str) -> PublishedRun:
    """Return one row in typed columns.

    Args:
        row: Cells by column.
        where: File and line, for messages.

    Raises:
        ConfigError: If it has no ``id``, or a cell is no number of the right kind.
    """
    values: dict[str, Any] = {name: row.get(name, "") for name in TEXTS}
    if not values["id"]:
        raise ConfigError(f"{where}: id must not be empty")
    for name in (*COUNTS, *AMOUNTS):
        values[name] = _number_cell(row.get(name, ""), whole=name in COUNTS, where=f"{where}: {name}")
    generate_or_wait_s = values.pop("gen_or_wait_s")
    values["gpus_per_engine"] = values.pop("gen_tensor_parallel")
    values["system"] = values["source"].partition(" v")[0]
    try:
        plain = PublishedRun(**values)
        return PublishedRun(**(values | _from_words(plain, generate_or_wait_s)))
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain(error, PublishedRun)[0]}") from None


def number_after(name: str, *texts: str) -> float | None:
    """Return the number that follows a word, as in ``eta=8``, of the first text that has one.

    ``16,384`` and ``1.5k`` are read as such. What is no plain number (``458ms``, ``7.6 min``, ``16.384.000``) is not
    read.
    """
    for text in texts:
        value = _value(re.search(rf"\b{re.escape(name)}\s*(?:<=?|[=: ≤])\s*{NUMBER}", text))
        if value is not None:
            return value
    return None


def _from_words(row: PublishedRun, generate_or_wait_s: float | None) -> dict[str, Any]:
    """Return the typed columns that are made from the texts of a row."""
    texts = (row.staleness_setting, row.mode, row.note)
    schedule = _schedule(row)
    colocated = schedule is not None and schedule.colocated
    generates = colocated or schedule is Schedule.SYNC_APART
    stated_s = None if schedule is Schedule.SYNC else number_after("generate_sequences", *texts)
    shared_by = number_after("sp", *texts)
    values: dict[str, Any] = {
        "schedule": schedule,
        "generate_s": stated_s or (generate_or_wait_s if generates else None),
        "wait_s": None if generates else generate_or_wait_s,
        "max_len": _count(number_after("max_new", *texts)) or row.max_len,
        "max_staleness": _max_staleness(row),
        "prompts_per_optimizer_step": _count(number_after("mini", *texts)),
        "gpus_per_sequence": None if shared_by is None else max(1, int(shared_by)),
        "answers_per_step": _answers_per_step(row),
    }
    if colocated and row.apart:  # words count before the numbers of GPUs
        values |= {"gpus_total": row.gpus, "gpus_train": None, "gpus_gen": None}
    return values | _closed_form(texts) | _idle_share(row.note)


def _schedule(row: PublishedRun) -> Schedule | None:
    """Return the schedule that ``mode`` names and the numbers of GPUs allow; None if it names none of ours."""
    words = row.mode.lower().replace("_", " ").replace("-", " ")
    for patterns, schedule, where_apart in SCHEDULES:
        if all(re.search(one, words) for one in patterns):
            return where_apart if row.apart else schedule
    return None


def _max_staleness(row: PublishedRun) -> float | None:
    """Return the bound of staleness.

    The note is not asked: "max 8192 tokens" and "mean staleness 1.3" there bound nothing.
    """
    for name in STALENESS_NAMES:
        value = number_after(name, row.staleness_setting, row.mode)
        if value is not None:
            return value
    found = re.search(r"(?<![\w.,])(\d+)[ _-]?(?:step[ _-])?off\b", row.mode)
    found = found or re.fullmatch(BARE_BOUND, row.staleness_setting)
    return float(found[1]) if found else None


def _answers_per_step(row: PublishedRun) -> int | None:
    """Return the answers of "G-GBS=512 sequences" in the note, unless the columns have them."""
    if row.prompts_per_step is not None and row.n_per_prompt is not None:
        return None
    found = re.search(rf"{NUMBER} sequences", row.note)
    return None if found is None or found[2] else _count(_value(found))  # a k may be 1000 or 1024; a count is exact


def _closed_form(texts: Sequence[str]) -> dict[str, Any]:
    values: dict[str, float | None] = {field: number_after(name, *texts) for field, name in CLOSED_FORM.items()}
    batch = values["train_batch_size"]
    if batch is None or None in values.values():
        return {}
    return values | {"train_batch_size": round(batch)}


def _idle_share(note: str) -> dict[str, float]:
    trainer, generator, idle = (re.search(pattern, note) for pattern in IDLE_SHARE.values())
    if trainer is None or generator is None or idle is None:
        return {}
    values = {
        "trainer_samples_per_s": float(trainer[1]),
        "generator_samples_per_s": float(generator[1]),
        "generator_samples_per_s_high": float(generator[2] or generator[1]),
        "trainer_idle_share": int(idle[1]) / 100,
    }
    return values if all(values.values()) else {}  # of nothing there is no relative error


def _value(found: re.Match[str] | None) -> float | None:
    return None if found is None else float(found[1].replace(",", "")) * (1000 if found[2] else 1)


def _count(value: float | None) -> int | None:
    """Return a whole number of at least 1, and None for anything else."""
    return None if value is None or value < 1 or value % 1 else int(value)


def _number_cell(text: str, *, whole: bool, where: str) -> float | int | None:
    """Return a positive number; None for words ("about 14k, not stated for this row"), for signs of nothing, for 0."""
    if not text or text.casefold() in NOTHING:
        return None
    if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d*)?", text):
        text = text.replace(",", "")
    try:
        value = float(text)
    except ValueError:
        if re.search(r"[A-Za-z]{2}", text):
            return None
        raise ConfigError(f"{where} must be a number, got {text!r}") from None
    if value == 0:  # of no part of a row is 0 more than "there is none"
        return None
    if not 0 < value < float("inf"):
        raise ConfigError(f"{where} must be above 0, got {text!r}")
    if whole and value != int(value):
        raise ConfigError(f"{where} must be a whole number, got {text!r}")
    return int(value) if whole else value
