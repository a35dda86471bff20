"""Settings of a rank, and how it sets up DeepSpeed, its optimizer, and its process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

import torch

from backends.this_machine import network_variables
from backends.trainer.model import PREFETCHED_PARAMETERS, REDUCE_BUCKET, TRAINED_DTYPES, WHOLE_PARAMETERS, PolicyModel
from pipelinerl.config.train import OptimizerConfig, TrainerConfig
from pipelinerl.hardware.transport import WeightTransport
from pipelinerl.rl.config import LossConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """The same for all ranks but for ``rank``."""

    rank: int = 0
    num_ranks: int
    device: Literal["cpu", "gpu"]
    """CPU: float32, gloo. GPU: bfloat16 with float32 master weights, NCCL; the process sees one GPU only."""
    model_path: str
    optimizer: OptimizerConfig
    loss: LossConfig
    trainer: TrainerConfig
    temperature: float
    train_batch_size: int
    """Sequences. Paper symbol B."""
    optimizer_steps: int
    """Of the whole run, where the learning rate has come down to zero."""
    transport: WeightTransport
    weights_folder: str
    """For published weights (``file``): this run's own, in memory that engines share."""
    logs: str | None = None
    """A file per rank. None: to where its process prints."""
    colocated: bool = False
    """Whether the GPU is an engine's in turn."""
    whole_parameter_elements: int = 100_000
    """ZeRO-3: parameters up to this size are not split. DeepSpeed's default; 0 in tests."""

    def __post_init__(self) -> None:
        """Refuse bfloat16 without ZeRO, where DeepSpeed counts a step of Adam too many."""
        if self.device == "gpu" and self.trainer.zero_stage == 0:
            raise ValueError("trainer.zero_stage must be at least 1 on GPU, got 0")


def deepspeed_config(settings: RankSettings) -> dict[str, Any]:
    """Return DeepSpeed's configuration: in bfloat16 with float32 masters.

    Gradients are added up and reduced in float32: a sum in bfloat16 would be rounded by 2^-9 at every hop.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # a row
        "gradient_accumulation_steps": 1,  # boundaries are marked by hand
        "gradient_clipping": settings.optimizer.gradient_clip,
        "zero_optimization": {
            "stage": settings.trainer.zero_stage,
            "reduce_bucket_size": REDUCE_BUCKET,
            "overlap_comm": settings.trainer.zero_stage >= 2,  # DeepSpeed's default is 3 only
            "stage3_max_live_parameters": WHOLE_PARAMETERS,
            "stage3_prefetch_bucket_size": PREFETCHED_PARAMETERS,
            "stage3_param_persistence_threshold": settings.whole_parameter_elements,
        },
    }
    if TRAINED_DTYPES[settings.device] is torch.bfloat16:
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        config["communication_data_type"] = "fp32"
    return config


def make_optimizer(settings: RankSettings, model: PolicyModel) -> torch.optim.Optimizer:
    """Return torch's fused AdamW: DeepSpeed's needs a compiler where it runs."""
    config = settings.optimizer
    return torch.optim.AdamW(
        model.parameters(),
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
        fused=True,
    )


def nccl_logs(logs: str | None, rank: int) -> dict[str, str]:
    """Return variables for a log of NCCL, and for torch's record of collectives when one times out, where not set."""
    wanted = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_BUFFER_SIZE": "2000"}
    if logs is not None:
        wanted |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{logs}/nccl-{rank}.log"}
        wanted["TORCH_FR_DUMP_TEMP_FILE"] = f"{logs}/collectives-"  # the rank is appended
    return wanted | {name: os.environ[name] for name in wanted if name in os.environ}


def rank_environment(device: Literal["cpu", "gpu"], *, num_threads: int) -> dict[str, str]:
    """Return the environment variables of a rank's process.

    Rows differ in length: without expandable segments the allocator would keep pieces that fit no row. Few functions
    are compiled: no processes for it.
    """
    variables = network_variables() | {"OMP_NUM_THREADS": str(num_threads), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    if device == "gpu":
        variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return variables
