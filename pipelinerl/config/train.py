"""The table ``train`` of a run file: settings of a real run; the simulator reads ``trainer`` and ``transport``."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from pipelinerl.hardware.transport import WeightTransport, chosen_transport
from pipelinerl.rl.config import LossConfig, TaskConfig
from pipelinerl.util.strict_model import Count, CountOrZero, Settings, StrictModel, Tokens

LEAST_TEMPERATURE = 0.01
Temperature = Annotated[float, Field(ge=LEAST_TEMPERATURE, le=100)]
"""Temperature of a softmax (no unit). Below 0.01 engines sample at 0.01, as numbers overflow, and log-probabilities
would be of another distribution than the one sampled from; above 100 all words are alike."""


class ModelConfig(StrictModel):
    """The language model to train."""

    path: str
    """Hugging Face folder, or an id."""
    chat_template: bool = True
    """Use the tokenizer's chat template, if any; not in environments."""


class LoraConfig(StrictModel):
    """Adapters of the linear layers, trained in place of all weights; not of experts."""

    rank: int = Field(ge=1, le=512)
    """Rank of an adapter."""
    alpha: Count
    """An adapter counts alpha / rank times."""


class SamplingConfig(StrictModel):
    """Sampling of answers."""

    temperature: Temperature = 1.0
    """Softmax temperature, also of the log-probabilities."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the likeliest tokens of this total probability. 1: all."""
    top_k: CountOrZero = 0
    """Likeliest tokens sampled. 0: all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Least probability sampled, relative to the likeliest token's. 0: all."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end an answer and stay in it, beside the end token."""

    @property
    def leaves_words_out(self) -> bool:
        """Whether sampling excludes tokens: mu is then another distribution than pi at lag 0."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class OptimizerConfig(StrictModel):
    """AdamW, its schedule, and gradient clipping."""

    learning_rate: float = Field(gt=0)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or to zero at the last step."""
    warmup_steps: CountOrZero = 0
    """Linear warm-up (optimizer steps)."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's first decay."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's second decay."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay."""
    gradient_clip: float = Field(default=1.0, gt=0)
    """Largest norm of the batch's gradient."""


def _flag_or_number(value: object) -> object:
    """Refuse other values in one line: a union would have one for each of its types."""
    if isinstance(value, int) and value >= 0:
        return value
    raise PydanticCustomError("literal_error", "", {"expected": "true, false or a number of layers"})


Layers = Annotated[bool | Annotated[int, Field(ge=0)], BeforeValidator(_flag_or_number)]
"""True: as many as are needed."""


class TrainerConfig(StrictModel):
    """The trainer."""

    kind: str = Field(default="deepspeed", pattern="^(deepspeed|fsdp2)$|^[^:]+:[^:]+$")
    """``deepspeed``, ``fsdp2``, or your own as ``package.module:ATTRIBUTE``."""
    zero_stage: int = Field(default=2, ge=0, le=3)
    """Split over the ranks: 1 optimizer states, 2 also gradients, 3 (``fsdp2``) also parameters."""
    expert_parallel: Count = 1
    """Ranks that share a layer's experts, ``fsdp2`` only (count)."""
    pack_tokens: Tokens = 16384
    """Tokens of a rank's forward pass."""
    sequence_parallel: int = Field(default=1, ge=1, le=8)
    """Consecutive ranks that share rows of so many times ``pack_tokens`` (count); divides ranks and heads."""
    activation_checkpointing: Layers = True
    """Layers recomputed in the backward pass. true: as many as GPU memory needs; CPU: all."""
    router_replay: bool = False
    """Route each token of a mixture to the experts that the engine used. GPUs only."""
    fused: bool | None = None
    """Compile norms, RoPE, SwiGLU, softmax to one pass over memory each. None: on GPUs."""
    start_timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds for all ranks to load the model."""
    step_timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds until a micro-batch counts as hung."""
    collective_timeout_s: float = Field(default=900.0, gt=0)
    """Seconds a rank waits for others after the start."""
    restarts: CountOrZero = 3
    """Restarts from the last checkpoint after a lost rank (count)."""

    @property
    def row_tokens(self) -> int:
        """Most tokens of a row, which ``sequence_parallel`` ranks share."""
        return self.pack_tokens * self.sequence_parallel

    def fuses(self, device: Literal["cpu", "gpu"]) -> bool:
        """Return whether a rank on such a device compiles."""
        return device == "gpu" if self.fused is None else self.fused


class EngineConfig(StrictModel):
    """The engines."""

    kind: str = Field(default="vllm", pattern="^vllm$|^[^:]+:[^:]+$")
    """``vllm``, or your own as ``package.module:ATTRIBUTE``."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory for an engine; colocated, with the trainer's."""
    cpu_kv_cache_gib: Count = 1
    """KV cache of a CPU engine (GiB)."""
    start_timeout_s: float = Field(default=1200.0, gt=0)
    """Seconds for an engine to start."""
    update_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds for each phase of a weight update; also for sleeping and for waking."""
    generate_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds without a sign of life until an engine counts as hung."""
    restarts_per_hour: CountOrZero = 10
    """Losses of engines, per engine and hour, that the run survives (count): 480 for 48 engines."""
    vllm: Settings = {}
    """vLLM's own arguments."""


class CheckpointConfig(StrictModel):
    """Checkpoints, from which a run can be resumed."""

    every: Count | None = None
    """Optimizer steps between checkpoints. None: at the end and on Ctrl-C."""
    keep: Count = 2
    """Newest checkpoints kept (count)."""
    export_every: Count | None = None
    """Optimizer steps between exports to ``model/``. None: at the end."""


class EvaluationConfig(StrictModel):
    """Held-out problems, answered before the first and after the last optimizer step, and beside the run."""

    problems: CountOrZero = 0
    """Held-out problems (count). 0: none."""
    every: Count | None = None
    """Optimizer steps between evaluations. None: before and after only."""
    temperature: float | None = Field(default=None, ge=0, le=100)
    """0 (the likeliest token) or at least 0.01. None: as in training."""
    max_tokens: Count | None = None
    """Longest answer (tokens), at most and by default ``workload.length.max``."""
    settings: Settings = {}
    """Settings of the task that differ here."""

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.temperature is not None and 0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(f"temperature must be 0 or at least {LEAST_TEMPERATURE}, got {self.temperature}")
        return self


class LoggingConfig(StrictModel):
    """Destinations of metrics besides the run's folder (TensorBoard files are always written there)."""

    wandb_project: str | None = None
    """Project of Weights & Biases."""


class TrainConfig(StrictModel):
    """Settings of a real run, read by ``pipelinerl train``; hardware by name reads ``trainer`` and ``transport``."""

    device: Literal["cpu", "gpu"] = "gpu"
    """Accelerators: GPUs (bfloat16) or cores (float32)."""
    ray_address: str | None = None
    """A running Ray cluster. None: a private one."""
    placement_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds to wait for busy accelerators."""
    transport: str | None = None
    """Way of the weights to the engines: ``file``, ``broadcast``, ``delta``, or ``package.module:ATTRIBUTE`` of a
    ``WeightTransport``. None: delta on GPUs, not colocated; else file."""
    weights_folder: str = "/dev/shm"
    """Folder for weights as files; shared by all machines."""
    model: ModelConfig
    """The language model to train."""
    lora: LoraConfig | None = None
    """Train adapters. None: all weights."""
    task: TaskConfig
    """The task."""
    optimizer: OptimizerConfig
    """How it is trained."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of answers."""
    loss: LossConfig = LossConfig()
    """The policy gradient."""
    trainer: TrainerConfig = TrainerConfig()
    """DeepSpeed."""
    engine: EngineConfig = EngineConfig()
    """vLLM."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints, from which a run can be resumed."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out problems."""
    logging: LoggingConfig = LoggingConfig()
    """Destinations of metrics."""

    def chosen_transport(self, *, colocated: bool) -> WeightTransport:
        """Return the weight transport of a run and of its simulation."""
        return chosen_transport(self.transport, on_gpus=self.device == "gpu", colocated=colocated)

    @model_validator(mode="after")
    def _restrictions(self) -> Self:
        self.chosen_transport(colocated=False)  # an unknown name is refused
        waits_s = self.trainer.collective_timeout_s
        if self.trainer.step_timeout_s <= waits_s:
            raise ValueError(
                "trainer.step_timeout_s must be above trainer.collective_timeout_s, else no rank can name the one it "
                f"waits for, got {self.trainer.step_timeout_s:g} and {waits_s:g}"
            )
        return self
