"""The table ``train`` of a run file: what the real backend needs; the simulator reads ``trainer`` and ``transport``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from pipelinerl.hardware.tables import Transport
from pipelinerl.rl.config import LossConfig, TaskConfig
from pipelinerl.util.limits import Count, CountOrZero, Tokens
from pipelinerl.util.strict_model import StrictModel

LEAST_TEMPERATURE = 0.01
Temperature = Annotated[float, Field(ge=LEAST_TEMPERATURE, le=100)]
"""Temperature of a softmax (no unit). Below 0.01 engines sample at 0.01, as numbers overflow, and log-probabilities
would be of another distribution than the one sampled from; above 100 all words are alike."""


class ModelConfig(StrictModel):
    """The language model to train."""

    path: str
    """Folder in Hugging Face format: config.json, weights, tokenizer (relative to the run file)."""


class SamplingConfig(StrictModel):
    """Sampling of answers."""

    temperature: Temperature = 1.0
    """Softmax temperature (no unit); log-probabilities are those of the distribution sampled from."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Only the likeliest words that have this probability together are sampled (no unit). 1: all words."""
    top_k: CountOrZero = 0
    """Only so many of the likeliest words are sampled (count). 0: all words."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Words whose probability is below this share of the likeliest one's are not sampled (no unit). 0: all words."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end an answer, beside the model's end token; the answer keeps them."""

    @property
    def leaves_words_out(self) -> bool:
        """Whether some words are never sampled, so that engines sample from another distribution than is trained."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class OptimizerConfig(StrictModel):
    """AdamW, its schedule, and gradient clipping."""

    learning_rate: float = Field(gt=0)
    """Largest learning rate (no unit)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or down to zero at the last optimizer step."""
    warmup_steps: CountOrZero = 0
    """Optimizer steps of linear warm-up."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the mean of gradients (no unit)."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the mean of squared gradients (no unit)."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay (no unit)."""
    gradient_clip: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient of the whole batch (no unit)."""


class DeepSpeedConfig(StrictModel):
    """DeepSpeed."""

    kind: Literal["deepspeed"] = "deepspeed"
    """Kind of trainer."""
    zero_stage: int = Field(default=2, ge=0, le=3)
    """Parts that are split over the ranks: 1 optimizer states, 2 also gradients, 3 also parameters."""
    pack_tokens: Tokens = 16384
    """Tokens of one forward pass on one rank: sequences are packed up to here (tokens)."""
    activation_checkpointing: bool = True
    """Compute activations again in the backward pass instead of keeping them: without it little fits on a GPU."""
    step_timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds after which a micro-batch counts as hung."""
    collective_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds after which a rank that waits for the others (NCCL, gloo) gives up; a file of weights takes less."""
    restarts: CountOrZero = 3
    """Times the run goes on by itself from its last checkpoint after a rank was lost, before it fails (count)."""


TrainerConfig = DeepSpeedConfig
"""A union tagged by ``kind``, of one member. Every member has ``step_timeout_s`` and ``restarts``, which the driver
reads."""


class VLLMConfig(StrictModel):
    """vLLM."""

    kind: Literal["vllm"] = "vllm"
    """Kind of engines."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that an engine takes (no unit). Colocated: together with the trainer's."""
    cpu_kv_cache_gib: Count = 1
    """KV cache of one engine on CPU (GiB)."""
    start_timeout_s: float = Field(default=1200.0, gt=0)
    """Seconds an engine may take to start."""
    update_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds each phase of a weight update may take (pause, transfer, resume), and falling asleep or waking up."""
    generate_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds without a decode step, or without a sign of life of its process, after which an engine hangs."""
    restarts_per_hour: CountOrZero = 10
    """Losses within an hour, per engine of the run, after which the run fails (count): with 48 engines 480 of them all.
    An engine that cannot be started again costs its seat only."""
    vllm: dict[str, JsonValue] = {}
    """Arguments of vLLM's engine, by their names there: `kv_cache_dtype`, `max_num_batched_tokens`, ..."""


EngineConfig = VLLMConfig
"""A union tagged by ``kind``, of one member. Every member has ``restarts_per_hour``, which the driver reads."""


class CheckpointConfig(StrictModel):
    """Checkpoints, from which a run can be resumed."""

    every: Count | None = None
    """Optimizer steps between checkpoints. None: only at the end and on Ctrl-C."""
    keep: Count = 2
    """Newest checkpoints kept (count)."""


class EvaluationConfig(StrictModel):
    """Held-out problems, answered before the first and after the last optimizer step, and beside the run."""

    problems: CountOrZero = 0
    """Held-out problems (count). 0: no evaluation."""
    every: Count | None = None
    """Optimizer steps between evaluations beside the run, on slots that engines have besides those of rollouts: an
    eighth of ``scheduler.generation_batch_size``. None: before and after the run only."""
    temperature: float | None = Field(default=None, ge=0, le=100)
    """Softmax temperature (no unit): 0, the likeliest token, or at least 0.01. None: that of training."""
    max_tokens: Count | None = None
    """Length at which answers are cut (tokens), at most ``workload.length.max``. None: that."""
    settings: dict[str, Any] = {}
    """Settings of the task that are others here, such as the file or split of the problems."""

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.temperature is not None and 0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(f"temperature must be 0 or at least {LEAST_TEMPERATURE}, got {self.temperature}")
        return self


class LoggingConfig(StrictModel):
    """Destinations of metrics besides the run's folder (TensorBoard files are always written there)."""

    wandb_project: str | None = None
    """Project of Weights & Biases. None: not used."""


class TrainConfig(StrictModel):
    """Settings of a real run, read by ``pipelinerl train``; hardware by name reads ``trainer`` and ``transport``."""

    device: Literal["cpu", "gpu"] = "gpu"
    """What an accelerator of ``cluster`` is: a GPU (bfloat16), or a share of this machine's cores (float32)."""
    ray_address: str | None = None
    """Address of a running Ray cluster. None: a Ray of its own on this machine."""
    placement_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds to wait for accelerators of the Ray cluster that are in use."""
    transport: Transport | None = None
    """How weights reach engines: in a file in ``weights_folder``, or, not colocated, sent while they generate
    (broadcast) or while all stand still (streamed: no room for a copy). None: broadcast on GPUs, not colocated; else
    file."""
    weights_folder: str = "/dev/shm"
    """Where weights are handed over as files: memory of this machine, or a folder that all machines share."""
    model: ModelConfig
    """The language model to train."""
    task: TaskConfig
    """The task."""
    optimizer: OptimizerConfig
    """How it is trained."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of answers."""
    loss: LossConfig = LossConfig()
    """The policy gradient."""
    trainer: TrainerConfig = DeepSpeedConfig()
    """DeepSpeed."""
    engine: EngineConfig = VLLMConfig()
    """vLLM."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints, from which a run can be resumed."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out problems."""
    logging: LoggingConfig = LoggingConfig()
    """Destinations of metrics."""

    def chosen_transport(self, *, colocated: bool) -> Transport:
        """Return how weights reach the engines, of a run and of its simulation."""
        if colocated:
            return "file"
        return self.transport or ("broadcast" if self.device == "gpu" else "file")

    @model_validator(mode="after")
    def _restrictions(self) -> Self:
        if self.loss.kind == "gspo" and self.loss.value_coefficient:
            raise ValueError("loss.value_coefficient must be 0 with loss.kind='gspo': its advantage is per sequence")
        return self
