"""Published runs of other systems: a typed row (``published_runs/README.md`` explains the columns)."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from pipelinerl.util.strict_model import StrictModel

DEFAULT_GROUP_SIZE = 8
"""Answers per prompt where a row does not say (count): the commonest choice of the field."""


class Schedule(StrEnum):
    """Division of time and accelerators between generation and training."""

    SYNC = "sync"
    """Colocated: all generate, then all train."""
    SYNC_APART = "sync_apart"
    """On separate GPUs: generation waits for the training, and training for the generation."""
    PARTIAL_ROLLOUTS = "partial_rollouts"
    """Colocated: generation ends when enough is finished; what is in flight goes on after the training."""
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
        match self:
            case Schedule.SYNC:
                return "synchronous"
            case Schedule.SYNC_APART:
                return "synchronous, on separate GPUs"
            case Schedule.PARTIAL_ROLLOUTS:
                return "colocated, partial rollouts"
            case Schedule.ONE_STEP_OFF:
                return "one step off"
            case Schedule.ASYNC:
                return "asynchronous"


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
        """Rows of one family share their software, hardware and model, so one can inform another."""
        return (self.system, self.hw, self.model)

    @property
    def family_name(self) -> str:
        """The family in words."""
        return ", ".join(one for one in self.family if one)

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
        """Optimizer steps on the answers of one RL step (count); 1 where their prompts do not divide those of it."""
        prompts, each = self.prompts_per_step, self.prompts_per_optimizer_step
        return 1 if prompts is None or each is None or prompts % each else prompts // each
