"""What a run needs of the memory of its machine, beside the GPUs', counted before anything starts.

Published weights lie there on their way to the engines, the state of the ranks while a checkpoint is written, and what
ranks have whole while a model is loaded. A Ray of our own is on this machine, so it is looked at before Ray starts; the
machines of a cluster are looked at when it has said what is placed where.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from backends.deepspeed.footprint import on_meta
from backends.deepspeed.policy_model import PolicyModel, largest_bucket_bytes, policy_weights, saved_shapes
from backends.deepspeed.publisher import KEPT_FILES
from backends.place_facts import SHARED_MEMORY
from backends.preflight import trainer_ranks
from backends.transfer.streaming import STREAM_BYTES
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError

STATE_BYTES = 12
"""Bytes of a parameter in a checkpoint: float32 master and two moments."""


@dataclass(frozen=True, slots=True)
class Share:
    """What of a run is on one machine."""

    machine: str
    """Its name."""
    memory: float
    """It has (bytes)."""
    workers: int
    """Accelerators of engines (count)."""
    ranks: int
    """Ranks of the trainer (count)."""
    leads: bool
    """Whether rank 0 is one of them."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes, of what is on one machine."""

    weights: float
    """Snapshots of rank 0, and what arrives for the engines."""
    checkpoint: float
    """Copies of the states of the ranks."""
    loading: float
    """Fused experts, which a rank has whole while it loads them; they are gone when the rest comes."""

    @property
    def total(self) -> float:
        """The most at once."""
        return max(self.loading, self.weights + self.checkpoint)


def shape_of(model_config: Any) -> PolicyModel:
    """Return the model without its numbers: making it takes a second, so once for all machines.

    Args:
        model_config: Of transformers.
    """
    return PolicyModel(on_meta(model_config, torch.bfloat16), temperature=1.0, value_head=False)


def host_memory(config: RunConfig, model: PolicyModel, share: Share) -> HostMemory:
    """Return what a run in bfloat16 needs of a machine; see the head of this file.

    Args:
        config: What is to be run; ``config.train`` is there.
        model: Of ``shape_of``.
        share: What is on the machine.
    """
    assert config.train is not None
    saved = {name: weight.nbytes for name, weight in saved_shapes(model).items()}
    fused = sum(weight.nbytes for name, weight in policy_weights(model).items() if name not in saved)
    size, leads = sum(saved.values()), int(share.leads)
    in_memory = config.train.weights_folder.startswith(SHARED_MEMORY)
    weights = {
        "broadcast": (leads + bool(share.workers)) * size,
        "streamed": 2 * _bucket_bytes(model) * (leads + share.workers),
        "file": leads * (1 + in_memory * (1 + KEPT_FILES)) * size,  # a copy; a new file beside the others
    }
    readers = leads if config.train.trainer.zero_stage == 3 else share.ranks
    if config.train.loss.kl_coefficient:
        readers += share.ranks
    state = STATE_BYTES * sum(parameter.numel() for parameter in model.parameters())
    transport = config.train.chosen_transport(colocated=config.colocated)
    return HostMemory(weights[transport], state * share.ranks / trainer_ranks(config), readers * fused)


def _bucket_bytes(model: PolicyModel) -> int:
    """Return the size of the largest bucket, often the embedding: pinned memory has a power of two (bytes)."""
    largest = max(STREAM_BYTES, largest_bucket_bytes(policy_weights(model), STREAM_BYTES))
    return 1 << (largest - 1).bit_length()


def check_host_memory(config: RunConfig, model_config: Any, shares: Iterable[Share] | None = None) -> None:
    """Check that a run fits into the memory of its machines.

    Args:
        config: What is to be run; ``config.train`` is there.
        model_config: Of transformers.
        shares: What is on each machine of a cluster. None: all is on this one, in a Ray of our own.

    Raises:
        ConfigError: If it does not; it names the key to change.
    """
    assert config.train is not None
    if shares is None:
        memory, ranks = psutil.virtual_memory().total, trainer_ranks(config)
        shares = [Share("this machine", memory, config.generation_accelerators, ranks, leads=True)]
        otherwise = "train.ray_address must lead to a cluster of more machines"
    else:
        otherwise = "train.ray_address must lead to machines of more memory"
    model = shape_of(model_config)
    for share in shares:
        needs = host_memory(config, model, share)
        if needs.total <= share.memory:
            continue
        what = (
            f"{needs.total / 1e9:.1f} GB of the memory of {share.machine} are needed, of {share.memory / 1e9:.0f} GB "
            f"(weights on their way {needs.weights / 1e9:.1f}, a checkpoint's copy {needs.checkpoint / 1e9:.1f}; "
            f"before, fused experts while they are loaded {needs.loading / 1e9:.1f})"
        )
        split = config.train.trainer.model_copy(update={"zero_stage": 3})
        remedies: dict[str, dict[str, Any]] = {"train.trainer.zero_stage must be 3": {"trainer": split}}
        if not config.colocated:
            remedies["train.transport must be 'streamed'"] = {"transport": "streamed"}
        for remedy, changed in remedies.items():
            other = config.model_copy(update={"train": config.train.model_copy(update=changed)})
            if host_memory(other, model, share).total <= share.memory:
                raise ConfigError(f"{remedy}: {what}")
        raise ConfigError(f"{otherwise}: {what}")
