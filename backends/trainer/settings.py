"""Settings of a rank, and how it sets up its optimizer and its process."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from backends.this_machine import network_variables
from pipelinerl.config.train import LoraConfig, OptimizerConfig, TrainerConfig
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
    lora: LoraConfig | None = None
    """None: all weights are trained."""
    whole_parameter_elements: int = 100_000
    """ZeRO-3: parameters up to this size are not split. DeepSpeed's default; 0 in tests."""


def make_optimizer(config: OptimizerConfig, parameters: Iterable[torch.Tensor]) -> torch.optim.AdamW:
    """Return torch's fused AdamW: DeepSpeed's needs a compiler where it runs."""
    return torch.optim.AdamW(
        parameters,
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
