"""Published runs of other systems: typed rows and their files (``published_runs/README.md`` explains the columns)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from pipelinerl.errors import ConfigError
from pipelinerl.hardware.catalogue import Precision
from pipelinerl.util.explain import explaining
from pipelinerl.util.strict_model import StrictModel
from pipelinerl.util.table import Table, read_table

DEFAULT_GROUP_SIZE = 8
"""Answers per prompt where a row has none (count): the most common choice."""


class Schedule(StrEnum):
    """Division of time and accelerators between generation and training."""

    SYNC = "sync"
    """Colocated: all generate, then all train."""
    SYNC_APART = "sync_apart"
    """On separate GPUs: generation waits for the training, and training for the generation."""
    PARTIAL_ROLLOUTS = "partial_rollouts"
    """Colocated: generation ends when enough is finished; rollouts in flight go on after the training."""
    ONE_STEP_OFF = "one_step_off"
    """On separate GPUs: the next RL step's answers are generated while the last one's are trained on."""
    ASYNC = "async"
    """On separate GPUs: generation goes on, within a bound of staleness."""

    @property
    def colocated(self) -> bool:
        """Whether the same accelerators generate and train in turn."""
        return self in (Schedule.SYNC, Schedule.PARTIAL_ROLLOUTS)

    @property
    def at_once(self) -> bool:
        """Whether generation and training go on at once."""
        return self in (Schedule.ONE_STEP_OFF, Schedule.ASYNC)

    @property
    def label(self) -> str:
        """The schedule in the words of the report."""
        return {
            Schedule.SYNC: "synchronous",
            Schedule.SYNC_APART: "synchronous, on separate GPUs",
            Schedule.PARTIAL_ROLLOUTS: "colocated, partial rollouts",
            Schedule.ONE_STEP_OFF: "one step off",
            Schedule.ASYNC: "asynchronous",
        }[self]


class PublishedRun(StrictModel):
    """One row: a run, or a line of a published table. None and empty text: not published."""

    id: str
    """Name of the row."""
    system: str
    """Software; rows of one family share it, the GPU and the model."""
    source: str = ""
    """Evidence: where the row is from."""
    url_or_path: str = ""
    """Evidence: the document."""
    evidence: str = ""
    """Evidence: how strong it is."""
    hw: str = ""
    """GPU."""
    model: str = ""
    """Language model."""
    algo: str = ""
    """Evidence: the RL algorithm."""
    mode: str = ""
    """Evidence: the schedule in the source's words."""
    features: str = ""
    """Features of the software in words, a comma between two of them: "LoRA, multi-token prediction"."""
    engine: str = ""
    """Evidence: the inference engine and its version."""
    date: str = ""
    """Evidence: when it was published, such as 2026-04."""
    precision: str = ""
    """Formats of numbers in words, such as "bf16" or "bf16 training, fp8 generation"."""
    schedule: Schedule | None = None
    """The schedule that is simulated. None: none of ours."""
    gpus_total: int | None = Field(default=None, ge=1)
    """GPUs of the cluster (count)."""
    gpus_train: int | None = Field(default=None, ge=1)
    """Of these, GPUs that train (count)."""
    gpus_gen: int | None = Field(default=None, ge=1)
    """Of these, GPUs that generate (count)."""
    gpus_per_engine: int | None = Field(default=None, ge=1)
    """GPUs of one engine (count): tensor parallelism of generation."""
    gpus_per_sequence: int | None = Field(default=None, ge=1)
    """GPUs that share one sequence in training (count)."""
    prompts_per_step: int | None = Field(default=None, ge=1)
    """Prompts per RL step (count)."""
    n_per_prompt: int | None = Field(default=None, ge=1)
    """Answers per prompt (count)."""
    answers_per_step: int | None = Field(default=None, ge=1)
    """Answers per RL step (count), where prompts and answers per prompt are not both published."""
    prompts_per_optimizer_step: int | None = Field(default=None, ge=1)
    """Prompts whose answers one optimizer step trains on (count). None: all of an RL step."""
    optimizer_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of an RL step (count), where its prompts are not published."""
    max_len: int | None = Field(default=None, ge=1)
    """Longest answer (tokens)."""
    avg_len: float | None = Field(default=None, gt=0)
    """Mean answer (tokens)."""
    staleness_setting: str = ""
    """Evidence: the bound of staleness in the source's words."""
    max_staleness: float | None = Field(default=None, ge=0)
    """Bound of staleness (RL steps), beyond the one being trained on. None: none is stated."""
    steps: int | None = Field(default=None, ge=1)
    """RL steps of the run (count)."""
    step_s: float | None = Field(default=None, gt=0)
    """Seconds per RL step."""
    generate_s: float | None = Field(default=None, gt=0)
    """Seconds of generation per RL step."""
    wait_s: float | None = Field(default=None, gt=0)
    """Evidence: seconds per RL step in which the trainer waited for answers."""
    old_logp_s: float | None = Field(default=None, gt=0)
    """Seconds of the old log-probabilities per RL step."""
    ref_s: float | None = Field(default=None, gt=0)
    """Seconds of the reference log-probabilities per RL step."""
    update_s: float | None = Field(default=None, gt=0)
    """Seconds of the update per RL step."""
    total_h: float | None = Field(default=None, gt=0)
    """Hours of the whole run."""
    tok_s_per_gpu: float | None = Field(default=None, gt=0)
    """Tokens of answers per second and GPU."""
    tok_s_total: float | None = Field(default=None, gt=0)
    """Tokens of answers per second of the cluster."""
    trainer_samples_per_s: float | None = Field(default=None, gt=0)
    """Samples per second that the trainer can train on."""
    generator_samples_per_s: float | None = Field(default=None, gt=0)
    """Samples per second that the generators make, at least."""
    generator_samples_per_s_high: float | None = Field(default=None, gt=0)
    """The same, at most. None: one number is published."""
    trainer_idle_share: float | None = Field(default=None, ge=0, le=1)
    """Share of its time in which the trainer waits (no unit)."""
    mean_staleness: float | None = Field(default=None, ge=0)
    """Measured mean staleness (optimizer steps)."""
    in_flight: float | None = Field(default=None, gt=0)
    """C: sequences in flight on all engines (count)."""
    train_batch_size: int | None = Field(default=None, ge=1)
    """B: sequences of an optimizer step (count)."""
    queue_batches: float | None = Field(default=None, ge=0)
    """q: length of the ready queue (batches)."""
    rate_ratio: float | None = Field(default=None, gt=0)
    """rho: speed of generation over that of training (no unit)."""
    tailness: float | None = Field(default=None, ge=1)
    """M_tail: longest over mean time of an answer (no unit)."""
    note: str = ""
    """Evidence: anything else."""

    @model_validator(mode="after")
    def _colocated_is_not_apart(self) -> Self:
        if self.schedule is not None and self.schedule.colocated and self.apart:
            raise ValueError(
                "schedule must be sync_apart, one_step_off or async where some GPUs generate and others train, got "
                f"{self.schedule.value!r}"
            )
        return self

    @property
    def family(self) -> tuple[str, str, str]:
        """Rows of one family share their software, hardware and model, so one can inform another.

        Software with features that are not simulated is another one than without them.
        """
        return (", ".join((self.system, *unmodelled(self))), self.hw, self.model)

    @property
    def family_name(self) -> str:
        """The family in words."""
        return ", ".join(one for one in self.family if one)

    @property
    def apart(self) -> bool:
        """Whether some GPUs generate and others train, by their published numbers."""
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
    def training_is_input(self) -> bool:
        """Whether the published seconds of training go into the prediction of the row itself."""
        return self.train_s is not None and self.schedule is not Schedule.SYNC

    @property
    def measured_step_s(self) -> float | None:
        """Seconds per RL step, from ``step_s`` or else the hours of all steps."""
        if self.step_s is not None:
            return self.step_s
        return None if self.total_h is None or self.steps is None else self.total_h * 3600 / self.steps

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of the whole cluster, published as such or per GPU."""
        if self.tok_s_total is not None:
            return self.tok_s_total
        return None if self.tok_s_per_gpu is None or self.gpus is None else self.tok_s_per_gpu * self.gpus

    @property
    def sequences_per_step(self) -> int | None:
        """Answers per RL step (count)."""
        if self.prompts_per_step is not None and self.n_per_prompt is not None:
            return self.prompts_per_step * self.n_per_prompt
        if self.answers_per_step is not None or self.prompts_per_step is None:
            return self.answers_per_step
        return self.prompts_per_step * DEFAULT_GROUP_SIZE

    @property
    def optimizer_steps_per_rl_step(self) -> int:
        """Optimizer steps on the answers of one RL step (count); 1 where they do not divide the answers."""
        prompts, each, answers = self.prompts_per_step, self.prompts_per_optimizer_step, self.sequences_per_step
        if prompts is not None and each is not None:
            return 1 if prompts % each else prompts // each
        return 1 if self.optimizer_steps is None or (answers or 0) % self.optimizer_steps else self.optimizer_steps


# ---------------------------------------------------------------------------------------------- files of published runs


def read_published_runs(path: str | Path) -> list[PublishedRun]:
    """Return the rows of a CSV file of published runs, in order.

    Its columns are fields of ``PublishedRun`` and no others, or the collected ones: these have ``source`` and no
    ``system``, or ``gen_or_wait_s``. Raises ConfigError if the file cannot be read or has no rows, a column or a cell
    is wrong, or two rows have one id.
    """
    table = read_table(Path(path), "published runs")
    columns = table.header.cells
    collected = "source" in columns and ("system" not in columns or "gen_or_wait_s" in columns)
    runs = collected_runs(table) if collected else [run for _, run in table.rows(PublishedRun)]
    names = [run.id for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{path}: id must be different in every row, got {name!r} {names.count(name)} times")
    return runs


# ------------------------------------------------------------------------------------------------------- words of a row

UNDERSTOOD = (
    r"a?sync\w*|pipeline\w*|stream\w*|(co|hybrid|on|fully|in|one|step|off|policy|engine|separate|apart|rollouts?)",
    r"colocat\w*|partial|inflight|flight|updates?|staleness|max|at|most|steps?|nodes?|gpus?|and|the|of",
    r"bf16|fp8|kv|cache|fsdp\d?|zero\d?|\d+(off)?",
)
"""Words of ``mode`` that the simulation knows: schedules, bounds, counts, precisions, and the kind of its trainer."""
FEATURES = {
    "multi-token prediction": r"multi[- ]token prediction|\bmtp\b|speculati(ve decoding|on)|\beagle\b",
    "LoRA": r"\bq?lora\b",
    "CPU optimizer": r"\bcpu[ _-]?(adam|optimi[sz]er|offload)|(adam|optimi[sz]er) on the cpu",
    "generation per micro-batch": r"(generation|rollouts?) (per|by) micro[- ]?batch",
    "environments": r"\bagentic\b|multi[- ]turn|\b(swe|terminal)-bench\b",
}
"""Features that change seconds and are not simulated, and their names in ``features``, ``mode`` and ``note``."""


def unmodelled(row: PublishedRun) -> tuple[str, ...]:
    """Return the features that no simulation has: known ones in any text, and all others of ``features``."""
    text = f"{row.features}, {row.mode}, {row.note}"
    found = [name for name, one in FEATURES.items() if re.search(rf"(?<!no )(?<!without )({one})", text, re.IGNORECASE)]
    known = "|".join(FEATURES.values())
    named = [one.strip() for one in re.split("[,;]", row.features) if not re.search(known, one, re.IGNORECASE)]
    return (*found, *(one for one in named if _unknown(one, row)))


def unknown_words(row: PublishedRun) -> tuple[str, ...]:
    """Return the words of ``mode`` that change nothing in the simulation; names of the row's own are none."""
    return tuple(_unknown(row.mode, row))


def _unknown(text: str, row: PublishedRun) -> list[str]:
    own = " ".join((row.system, row.source, row.model, row.hw)).lower()
    known = "|".join(UNDERSTOOD)
    words = re.split(r"[\s,;_+()=<≤/]+", text)
    named = [word for word in words if word and word.lower() not in own]
    return [word for word in named if not all(re.fullmatch(known, part) for part in word.lower().split("-") if part)]


def precisions(row: PublishedRun, assumed: list[str]) -> tuple[Precision, Precision]:
    """Return the formats of an engine's weights and cache, and note assumed ones.

    "fp8" in ``precision`` or ``mode`` is the engines' weights; the cache only where "cache" or "kv" is next to it.
    Training is in bf16 whatever they say.
    """
    text = f"{row.precision} {row.mode}".lower()
    if "fp8" not in text:
        if "bf16" not in text or "not stated" in text:
            assumed.append("bf16")
        return Precision.BF16, Precision.BF16
    if not re.search(r"bf16 train|train\w* (in )?bf16", text):
        assumed.append("training in bf16")
    cache = re.search(r"fp8 (kv|cache)|(kv|cache) (in )?fp8", text)
    return Precision.FP8, Precision.FP8 if cache else Precision.BF16


# ------------------------------------------------------------------------------------------------------- collected rows

TEXTS = (
    "id", "source", "url_or_path", "evidence", "hw", "model", "algo", "mode", "features", "engine", "date", "precision",
    "staleness_setting", "note",
)  # fmt: skip
COUNTS = (
    "gpus_total", "gpus_train", "gpus_gen", "gen_tensor_parallel", "prompts_per_step", "n_per_prompt", "max_len",
    "steps",
)  # fmt: skip
AMOUNTS = (
    "avg_len", "step_s", "gen_or_wait_s", "old_logp_s", "ref_s", "update_s", "total_h", "tok_s_per_gpu", "tok_s_total"
)  # fmt: skip

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
    "staleness_threshold", "eta", "max_trajectory_age_steps", "max_off_policy_steps", "max_head_offpolicyness",
    "max_staleness", "async_steps", "staleness", "max",
)  # fmt: skip
"""Names of the bound of staleness in the systems that publish runs; the first that is found counts."""
BARE_BOUND = r"(?:<=?|≤|at most|up to)?\s*(\d+(?:\.\d+)?)\s*(?:steps?|versions?|updates?)?"
CLOSED_FORM = {
    "in_flight": "C",
    "train_batch_size": "B",
    "queue_batches": "q",
    "rate_ratio": "rho",
    "tailness": "Mtail",
    "mean_staleness": "measured",
}
"""Names of the numbers of Applied Compute's closed form; only all together are they these."""
SETTING = rf"\b([A-Za-z_]+)\s*(?:<=?|[=: ≤])\s*{NUMBER}"
"""A setting in a text: ``eta=8``, ``max 16``, ``generate_sequences 458``."""
IDLE_SHARE = (
    r"trainer (\d+\.?\d*) samp/s",
    r"generator (\d+\.?\d*)(?:-(\d+\.?\d*))? samp/s",
    r"trainer idle ~?(\d+)\s?%",
)
"""Rates of both sides, and the share of the time in which the trainer waits, in any order; read only together."""
NOTHING = ("n/a", "nan", "-", "–", "—", "?")
"""Cells of a number that was not published."""


def collected_runs(table: Table) -> list[PublishedRun]:
    """Return the published runs of a table, a row each; missing columns count as empty.

    Cells beyond the header belong to ``evidence``, a text in which a comma was not quoted. Raises ConfigError if there
    is no row or no column ``id``, or a cell is no number of the right kind.
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
    """Return one row in typed columns; ``where`` is file and line, for messages.

    Raises ConfigError if it has no ``id``, or a cell is no number of the right kind.
    """
    values: dict[str, Any] = {name: row.get(name, "") for name in TEXTS}
    if not values["id"]:
        raise ConfigError(f"{where}: id must not be empty")
    for name in (*COUNTS, *AMOUNTS):
        values[name] = _number_cell(row.get(name, ""), whole=name in COUNTS, where=f"{where}: {name}")
    generate_or_wait_s = values.pop("gen_or_wait_s")
    values["gpus_per_engine"] = values.pop("gen_tensor_parallel")
    values["system"] = values["source"].partition(" v")[0]
    with explaining(PublishedRun, f"{where}: ", most=1):
        plain = PublishedRun(**values)
        return PublishedRun(**(values | _from_words(plain, generate_or_wait_s)))


def settings_of(*texts: str) -> dict[str, float]:
    """Return the settings of texts by name; of a name that comes again the first.

    ``16,384`` and ``1.5k`` are read as such, but only plain numbers: not ``458ms``, ``7.6 min``, ``16.384.000``.
    """
    settings: dict[str, float] = {}
    for text in texts:
        for found in re.finditer(SETTING, text):
            settings.setdefault(found[1], _value(found[2], found[3]))
    return settings


def _from_words(row: PublishedRun, generate_or_wait_s: float | None) -> dict[str, Any]:
    schedule, settings = _schedule(row), settings_of(row.staleness_setting, row.mode, row.note)
    colocated = schedule is not None and schedule.colocated
    generates = colocated or schedule is Schedule.SYNC_APART
    stated_s = None if schedule is Schedule.SYNC else settings.get("generate_sequences")
    shared_by, updates = settings.get("sp"), re.search(r"(?<![\d.,-])(\d+) mini-updates?\b", row.note)
    values: dict[str, Any] = {
        "schedule": schedule,
        "generate_s": stated_s or (generate_or_wait_s if generates else None),
        "wait_s": None if generates else generate_or_wait_s,
        "max_len": _count(settings.get("max_new")) or row.max_len,
        "max_staleness": _max_staleness(row),
        "prompts_per_optimizer_step": _count(settings.get("mini")),
        "gpus_per_sequence": None if shared_by is None else max(1, int(shared_by)),
        "answers_per_step": _answers_per_step(row),
        "optimizer_steps": None if updates is None else _count(float(updates[1])),
    }
    if colocated and row.apart:  # words count before the numbers of GPUs
        values |= {"gpus_total": row.gpus, "gpus_train": None, "gpus_gen": None}
    if settings.keys() >= set(CLOSED_FORM.values()):
        values |= {field: settings[name] for field, name in CLOSED_FORM.items()}
        values["train_batch_size"] = round(settings["B"])
    return values | _idle_share(row.note)


def _idle_share(note: str) -> dict[str, float]:
    trainer, generator, idle = (re.search(pattern, note) for pattern in IDLE_SHARE)
    if trainer is None or generator is None or idle is None:
        return {}
    values = {
        "trainer_samples_per_s": float(trainer[1]),
        "generator_samples_per_s": float(generator[1]),
        "generator_samples_per_s_high": float(generator[2] or generator[1]),
        "trainer_idle_share": int(idle[1]) / 100,
    }
    return values if all(values.values()) else {}  # of nothing there is no relative error


def _schedule(row: PublishedRun) -> Schedule | None:
    """Return the schedule that ``mode`` names and the numbers of GPUs allow; None if it names none of ours."""
    words = row.mode.lower().replace("_", " ").replace("-", " ")
    for patterns, schedule, where_apart in SCHEDULES:
        if all(re.search(one, words) for one in patterns):
            return where_apart if row.apart else schedule
    return None


def _max_staleness(row: PublishedRun) -> float | None:
    """Return the bound of staleness, but not from the note: "max 8192 tokens" there bounds nothing."""
    settings = settings_of(row.staleness_setting, row.mode)
    for name in STALENESS_NAMES:
        if name in settings:
            return settings[name]
    found = re.search(r"(?<![\w.,])(\d+)[ _-]?(?:step[ _-])?off\b", row.mode)
    found = found or re.fullmatch(BARE_BOUND, row.staleness_setting)
    return float(found[1]) if found else None


def _answers_per_step(row: PublishedRun) -> int | None:
    """Return the answers of "G-GBS=512 sequences" in the note, unless the columns have them."""
    if row.prompts_per_step is not None and row.n_per_prompt is not None:
        return None
    found = re.search(rf"{NUMBER} sequences", row.note)
    return None if found is None or found[2] else _count(_value(found[1]))  # a k may be 1000 or 1024; a count is exact


def _value(digits: str, thousand: str = "") -> float:
    return float(digits.replace(",", "")) * (1000 if thousand else 1)


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
