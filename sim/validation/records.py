"""Published runs of other systems: rows of a CSV file, and what they say about schedule and staleness.

A row describes one run or one line of a published table; ``published_runs/README.md`` explains the columns.
Nothing is computed here but the meaning of words: which of our schedules ``mode`` and ``staleness_setting`` are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from pipelinerl.errors import ConfigError
from pipelinerl.util.table import read_table


class Mode(StrEnum):
    """How generation and training share time and accelerators."""

    SYNC = "synchronous"
    """Colocated: all generate, then all train."""
    APART = "synchronous, on separate GPUs"
    """Apart: what generates waits for the training, what trains for the generation."""
    PARTIAL = "colocated, partial rollouts"
    """Colocated: generation ends when enough is finished; what is in flight goes on after the training."""
    ONE_STEP_OFF = "one step off"
    """Apart: the next RL step's answers are generated while the last one's are trained on."""
    ASYNC = "asynchronous"
    """Apart: generation goes on, within a bound of staleness."""


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """One row. Times in seconds unless named otherwise; None where nothing was published."""

    id: str
    source: str
    hw: str = ""
    model: str = ""
    algo: str = ""
    mode: str = ""
    gpus_total: int | None = None
    gpus_train: int | None = None
    gpus_gen: int | None = None
    prompts_per_step: int | None = None
    n_per_prompt: int | None = None
    max_len: int | None = None
    avg_len: float | None = None
    staleness_setting: str = ""
    steps: int | None = None
    step_s: float | None = None
    gen_or_wait_s: float | None = None
    old_logp_s: float | None = None
    ref_s: float | None = None
    update_s: float | None = None
    total_h: float | None = None
    tok_s_per_gpu: float | None = None
    tok_s_total: float | None = None
    note: str = ""

    @property
    def family(self) -> tuple[str, str, str]:
        """Rows of one family share their software, hardware and model, so one can tell about another."""
        return (self.source.partition(" v")[0], self.hw, self.model)

    @property
    def schedule(self) -> Mode | None:
        """The schedule that ``mode`` names and the GPU columns allow; None if it names none that we have."""
        words = self.mode.lower().replace("_", " ").replace("-", " ")
        if "colocate" in words and "async" in words:
            return Mode.PARTIAL
        if re.search(r"\b(one|1) step off\b", words):
            return Mode.ONE_STEP_OFF
        if "async" in words or re.search(r"\b\d+ ?(step )?off\b|\bpipeline|\bin ?flight\b|\bstream", words):
            return Mode.ASYNC
        if not re.search(r"sync|\bcolocat|\bhybrid\b|\bon policy\b", words):
            return None
        apart = self.apart and not re.search(r"\bcolocat|\bhybrid\b", words)
        if "partial" in words:
            return None if apart else Mode.PARTIAL
        return Mode.APART if apart else Mode.SYNC

    @property
    def apart(self) -> bool:
        """Whether some GPUs generate and others train, as far as their numbers say."""
        return any(part is not None and part != self.gpus for part in (self.gpus_gen, self.gpus_train))

    @property
    def gpus(self) -> int | None:
        """GPUs of the whole cluster (count), published as such or in its two parts."""
        if self.gpus_total is None and self.gpus_gen is not None and self.gpus_train is not None:
            return self.gpus_gen + self.gpus_train
        return self.gpus_total

    @property
    def train_s(self) -> float | None:
        """Seconds of training in one RL step: old and reference log-probabilities and the update."""
        return None if self.update_s is None else self.update_s + (self.old_logp_s or 0.0) + (self.ref_s or 0.0)

    @property
    def generate_s(self) -> float | None:
        """Seconds of generation in one RL step, where they are published."""
        stated = self.number_after("generate_sequences")
        if stated is not None and self.schedule is not Mode.SYNC:
            return stated
        return self.gen_or_wait_s if self.schedule in (Mode.SYNC, Mode.PARTIAL, Mode.APART) else None

    @property
    def measured_step_s(self) -> float | None:
        """Seconds per RL step, from ``step_s`` or else the hours of all steps."""
        if self.step_s is not None:
            return self.step_s
        return None if self.total_h is None or not self.steps else self.total_h * 3600 / self.steps

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of the whole cluster, published as such or per GPU."""
        if self.tok_s_total is not None:
            return self.tok_s_total
        return None if self.tok_s_per_gpu is None or self.gpus is None else self.tok_s_per_gpu * self.gpus

    @property
    def longest_tokens(self) -> int | None:
        """Longest answer (tokens): a limit in the note counts before the column."""
        stated = self.number_after("max_new")
        return self.max_len if stated is None or stated % 1 or stated < 1 else int(stated)

    @property
    def sequences_per_step(self) -> int | None:
        """Answers per RL step (count), from the columns, or from the note's "G-GBS=512 sequences"."""
        if self.prompts_per_step is not None and self.n_per_prompt is not None:
            return self.prompts_per_step * self.n_per_prompt
        found = re.search(rf"{NUMBER} sequences", self.note)
        stated = _number(found)
        if found and stated and stated % 1 == 0 and not found[2]:  # a k may be 1000 or 1024, and a count is exact
            return int(stated)
        if self.prompts_per_step is None:
            return None
        return self.prompts_per_step * (self.n_per_prompt or DEFAULT_GROUP_SIZE)

    @property
    def optimizer_steps_per_rl_step(self) -> int:
        """Optimizer steps on the answers of one RL step (count): prompts per step over the ``mini`` batch."""
        mini = self.number_after("mini")
        if mini is None or mini < 1 or self.prompts_per_step is None or self.prompts_per_step % mini:
            return 1
        return self.prompts_per_step // int(mini)

    @property
    def staleness_rl_steps(self) -> float | None:
        """Bound of staleness in RL steps, beyond the one being trained on; None if none is stated.

        The note is not asked: "max 8192 tokens" and "mean staleness 1.3" there bound nothing.
        """
        for name in STALENESS_NAMES:
            value = _number_after(name, self.staleness_setting, self.mode)
            if value is not None:
                return value
        found = re.search(r"(?<![\w.,])(\d+)[ _-]?(?:step[ _-])?off\b", self.mode)
        if found:
            return float(found[1])
        bare = r"(?:<=?|≤|at most|up to)?\s*(\d+(?:\.\d+)?)\s*(?:steps?|versions?|updates?)?"
        found = re.fullmatch(bare, self.staleness_setting)
        return float(found[1]) if found else None

    def number_after(self, name: str) -> float | None:
        """Return the number that follows a word of ``staleness_setting``, ``mode`` or ``note``, as in ``eta=8``.

        ``16,384`` and ``1.5k`` are read as such. What is no plain number (``458ms``, ``7.6 min``, ``16.384.000``) is
        not read.
        """
        return _number_after(name, self.staleness_setting, self.mode, self.note)


NUMBER = (
    r"(?<![\w.,])(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?) ?([kK]?)"
    r"(?![\w%]|[.,]\d| ?(?:ms|min|minutes|h|hours)\b)"
)
"""A number in a text, thousands separated or not, alone or with a k for thousand; nothing that only begins like one."""


def _number_after(name: str, *texts: str) -> float | None:
    for text in texts:
        value = _number(re.search(rf"\b{re.escape(name)}\s*(?:<=?|[=: ≤])\s*{NUMBER}", text))
        if value is not None:
            return value
    return None


def _number(found: re.Match[str] | None) -> float | None:
    """Return the value of a match of ``NUMBER``."""
    return None if found is None else float(found[1].replace(",", "")) * (1000 if found[2] else 1)


DEFAULT_GROUP_SIZE = 8
"""Answers per prompt where a row does not say (count): the commonest choice of the field."""
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
"""What the bound of staleness is called in the systems that publish runs."""


def read_published_runs(path: str | Path) -> list[PublishedRun]:
    """Read rows of published runs.

    Args:
        path: A CSV file with a header; columns it lacks count as blank, columns we do not know are ignored.

    Returns:
        One value per row, in order.

    Raises:
        ConfigError: If the file cannot be read, has no rows, or a cell is no number of the right kind.
    """
    table = read_table(Path(path), "published runs")
    header, lines = table.header.cells, table.lines
    if not lines or "id" not in header or "source" not in header:
        raise ConfigError(f"{path} must have the columns id, source, ... and a row for each run")
    runs = [_run(_with_its_commas(header, cells), where=where) for where, cells in lines]
    names = [run.id for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{path}: id must be different in every row, got {name!r} {names.count(name)} times")
    return runs


def _with_its_commas(header: list[str], cells: list[str]) -> dict[str, str]:
    """Return a row by column; cells beyond the header belong to ``evidence``, words in which a comma was not quoted."""
    surplus = len(cells) - len(header)
    if surplus > 0 and "evidence" in header:
        at = header.index("evidence")
        cells = [*cells[:at], ", ".join(cells[at : at + 1 + surplus]), *cells[at + 1 + surplus :]]
    return dict(zip(header, cells, strict=False))  # columns that a short line lacks are blank


_NUMBERS = {one.name: one.type for one in fields(PublishedRun) if "None" in str(one.type)}


def _run(row: Mapping[str, str], *, where: str) -> PublishedRun:
    values: dict[str, Any] = {}
    for one in fields(PublishedRun):
        text = row.get(one.name, "").strip()
        kind = _NUMBERS.get(one.name)
        if kind is None:
            values[one.name] = text
        elif text:
            values[one.name] = _cell(text, whole="int" in str(kind), where=f"{where}, {one.name}")
    if not values["id"]:
        raise ConfigError(f"{where}, id must not be empty")
    return PublishedRun(**values)


def _cell(text: str, *, whole: bool, where: str) -> float | int | None:
    """Return a positive number; None for words ("about 14k, not stated for this row"), for signs of nothing, for 0."""
    if text.casefold() in ("n/a", "nan", "-", "–", "—", "?"):
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
