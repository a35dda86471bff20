"""What a run needs of the memory of its machine, beside the GPUs', counted before anything starts.

Published weights lie there on their way to the engines, the state of the ranks while a checkpoint is written, and what
ranks have whole while a model is loaded. Only a Ray of our own is sure to be on this machine; on a cluster ``--check``
looks at every machine while engines and ranks are up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psutil
import torch

from backends.deepspeed.footprint import on_meta
from backends.deepspeed.policy_model import PolicyModel, policy_weights, saved_shapes
from backends.deepspeed.publisher import KEPT_FILES
from backends.place_facts import SHARED_MEMORY
from backends.preflight import trainer_ranks
from backends.transfer.streaming import STREAM_BYTES
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError

STATE_BYTES = 12
"""Bytes of a parameter in a checkpoint: float32 master and two moments."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes, of a run with all its parts on one machine."""

    weights: float
    """Snapshots of rank 0, and what arrives for the engines."""
    checkpoint: float
    """Copies of the states of all ranks."""
    loading: float
    """Fused experts, which a rank has whole while it loads them; they are gone when the rest comes."""

    @property
    def total(self) -> float:
        """The most at once."""
        return max(self.loading, self.weights + self.checkpoint)


def host_memory(config: RunConfig, model_config: Any) -> HostMemory:
    """Return what a run in bfloat16 needs; see the head of this file.

    Args:
        config: What is to be run; ``config.train`` is there.
        model_config: Of transformers.
    """
    assert config.train is not None
    model = PolicyModel(on_meta(model_config, torch.bfloat16), temperature=1.0, value_head=False)
    saved = {name: weight.nbytes for name, weight in saved_shapes(model).items()}
    fused = sum(weight.nbytes for name, weight in policy_weights(model).items() if name not in saved)
    size, ranks, workers = sum(saved.values()), trainer_ranks(config), config.generation_accelerators
    in_memory = config.train.weights_folder.startswith(SHARED_MEMORY)
    weights = {
        "broadcast": 2 * size,
        "streamed": 2 * STREAM_BYTES * (1 + workers),
        "file": (1 + in_memory * (1 + KEPT_FILES)) * size,  # a copy; a new file beside the others
    }
    readers = 1 if config.train.trainer.zero_stage == 3 else ranks
    if config.train.loss.kl_coefficient:
        readers += ranks
    parameters = sum(parameter.numel() for parameter in model.parameters())
    transport = config.train.chosen_transport(colocated=config.colocated)
    return HostMemory(weights[transport], STATE_BYTES * parameters, readers * fused)


def check_host_memory(config: RunConfig, model_config: Any) -> None:
    """Check that a run on a Ray of our own fits into the memory of this machine.

    Raises:
        ConfigError: If it does not; it names the key to change.
    """
    assert config.train is not None
    if config.train.ray_address is not None:
        return
    needs, memory = host_memory(config, model_config), psutil.virtual_memory().total
    if needs.total <= memory:
        return
    what = (
        f"{needs.total / 1e9:.1f} GB of this machine's memory are needed, of {memory / 1e9:.0f} GB (weights on their "
        f"way {needs.weights / 1e9:.1f}, a checkpoint's copy {needs.checkpoint / 1e9:.1f}; before, fused experts "
        f"while they are loaded {needs.loading / 1e9:.1f})"
    )
    split = config.train.trainer.model_copy(update={"zero_stage": 3})
    remedies: dict[str, dict[str, Any]] = {"train.trainer.zero_stage must be 3": {"trainer": split}}
    if not config.colocated:
        remedies["train.transport must be 'streamed'"] = {"transport": "streamed"}
    for remedy, changed in remedies.items():
        other = config.model_copy(update={"train": config.train.model_copy(update=changed)})
        if host_memory(other, model_config).total <= memory:
            raise ConfigError(f"{remedy}: {what}")
    raise ConfigError(f"train.ray_address must lead to a cluster of more machines: {what}")
