"""One rank of the DeepSpeed trainer.

DeepSpeed would divide the gradient by micro-batches and by ranks. So its own accumulation is set to one, the last row
of a step is marked as the boundary by hand, and the loss is multiplied by the number of ranks, over which it averages.
ZeRO's stage splits parameters, gradients and optimizer states; stage 3 splits parameters at the start.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from backends.trainer.model import (
    PREFETCHED_PARAMETERS,
    REDUCE_BUCKET,
    TRAINED_DTYPES,
    WHOLE_PARAMETERS,
    Split,
    trained_parameters,
)
from backends.trainer.rank import TrainerRank
from backends.trainer.settings import RankSettings, make_optimizer
from backends.trainer.state import Piece, RankState


class DeepSpeedRank(TrainerRank):
    """One rank: see the head of this file."""

    def _split(self) -> Split | None:
        device, stage = self._settings.device, self._settings.trainer.zero_stage
        os.environ["DS_ACCELERATOR"] = "cpu" if device == "cpu" else "cuda"
        import deepspeed  # reads DS_ACCELERATOR when it is imported

        # On CPU DeepSpeed would compile a faster all-reduce at the first start, for a minute and with a C++ compiler;
        # a process killed meanwhile leaves a lock that every later start waits for, for ever. gloo does without.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        return partial(split, config=deepspeed_config(self._settings)) if stage == 3 else None

    def _set_up(self, factor: Callable[[int], float]) -> None:
        import deepspeed

        settings = self._settings
        optimizer = make_optimizer(settings.optimizer, [one for _, one in trained_parameters(self._model)])
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        self._engine, *_ = deepspeed.initialize(
            model=self._model, optimizer=optimizer, lr_scheduler=schedule, config=deepspeed_config(settings)
        )
        if settings.trainer.zero_stage == 3:
            self._model.sharding = Zero3()
        self._trained = self._engine
        self._state = zero_state(self._engine, rank=settings.rank)

    def _backward(self, loss: torch.Tensor, completes_step: bool, /) -> None:
        self._engine.set_gradient_accumulation_boundary(completes_step)
        self._engine.backward(loss * self._settings.num_ranks)
        if not completes_step:
            self._engine.step()  # counts the row

    def _update(self) -> float:
        if self._settings.trainer.zero_stage == 0:  # DeepSpeed keeps no norm then, and would make the step
            norm = float(torch.nn.utils.get_total_norm([p.grad for _, p in trained_parameters(self._model)]))
            if not np.isfinite(norm):
                self._engine.zero_grad()
                self._engine.set_gradient_accumulation_boundary(False)
            self._engine.step()
            return norm
        self._engine.step()
        return float(self._engine.get_global_grad_norm())

    def _learning_rate(self) -> float:
        return float(self._engine.get_lr()[0])

    def offload(self) -> None:
        """Move everything from the GPU to the host's memory; needs ZeRO-2 or 3. On CPU there is nothing to move."""
        if self._settings.device == "gpu":
            with torch_adamw_passes():
                self._engine.offload_states()
            torch.cuda.empty_cache()

    def reload(self) -> None:
        if self._settings.device == "gpu":
            self._engine.reload_states()

    def shutdown(self) -> None:
        super().shutdown()
        self._engine.destroy()


def deepspeed_config(settings: RankSettings) -> dict[str, Any]:
    """Return DeepSpeed's configuration: in bfloat16 with float32 masters.

    Gradients are added up and reduced in float32: a sum in bfloat16 would be rounded by 2^-9 at every hop. Refuses
    bfloat16 without ZeRO, where DeepSpeed counts a step of Adam too many.
    """
    if settings.device == "gpu" and settings.trainer.zero_stage == 0:
        raise ValueError("trainer.zero_stage must be at least 1 on GPU, got 0")
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


@contextlib.contextmanager
def torch_adamw_passes() -> Iterator[None]:
    """Let DeepSpeed offload the moments of torch's AdamW.

    ZeRO-3 asks for an optimizer of DeepSpeed's own class, which is compiled when it is first used, and then moves
    ``exp_avg`` and ``exp_avg_sq``, which torch's has as well.
    """
    from deepspeed.ops.adam import fused_adam

    own = fused_adam.FusedAdam
    fused_adam.FusedAdam = torch.optim.AdamW
    try:
        yield
    finally:
        fused_adam.FusedAdam = own


def split(model: torch.nn.Module, dtype: torch.dtype, config: dict[str, Any]) -> None:
    """Split a model that is whole on rank 0, without memory elsewhere; rank 0 reads one parameter after the other."""
    import deepspeed  # reads DS_ACCELERATOR when it is imported

    splitter, reads = deepspeed.zero.Init(config_dict_or_path=config), torch.distributed.get_rank() == 0
    for parameter in model.parameters():
        # A copy even in the same type: broadcasts must not write into the pages of the file.
        whole = parameter.data
        parameter.data = whole.to(dtype, copy=True) if reads else torch.empty_like(whole, dtype=dtype)
        splitter._convert_to_zero_parameters([parameter])


class Zero3:
    """A ``Sharding``: ZeRO-3's."""

    def empty(self, weight: Any) -> torch.Tensor:
        return torch.empty(getattr(weight, "ds_shape", weight.shape), dtype=weight.dtype, device="meta")

    @contextlib.contextmanager
    def whole(self, weights: dict[str, Any]) -> Iterator[dict[str, Any]]:
        import deepspeed

        parted = [one for one in weights.values() if hasattr(one, "ds_id")]
        with deepspeed.zero.GatheredParameters(parted) if parted else contextlib.nullcontext():
            yield weights


# ----------------------------------------------------------------- where ZeRO keeps the float32 numbers of a parameter


def zero_state(engine: Any, *, rank: int) -> RankState:
    """Return the state of a rank of DeepSpeed's ``engine``."""
    stage = engine.zero_optimization_stage()
    return RankState(
        partial(_pieces, engine, rank),
        adamw=engine.optimizer.optimizer if stage else engine.optimizer,
        schedule=engine.lr_scheduler,
        rank=rank,
        device=engine.device,
        writes=stage > 0 or rank == 0,  # without ZeRO all ranks have the same
        round_masters=partial(_round_masters, engine),
    )


def _pieces(engine: Any, rank: int) -> Iterator[Piece]:
    for name, parameter in trained_parameters(engine.module):
        piece = _place(engine, rank, name, parameter)
        if piece is not None and piece.length > 0:
            yield piece


def _place(engine: Any, rank: int, name: str, parameter: Any) -> Piece | None:
    """Return a parameter's piece. None: it has none on this rank."""
    zero, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage == 0:
        return Piece(name, 0, parameter.numel(), parameter)
    if stage == 3:
        group, at, size = zero.grad_position[zero.get_param_id(parameter)]
        begin = rank * size
        return Piece(name, begin, min(size, parameter.ds_numel - begin), zero.fp32_partitioned_groups_flat[group], at)
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    inside, address = mapping.hp_fragment_address, mapping.lp_fragment_address
    (holder,) = zero.optimizer.param_groups[mapping.param_group_index]["params"]
    return Piece(name, address.start, address.numel, holder, inside.start)


def _round_masters(engine: Any) -> None:
    zero, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage == 3:
        zero.checkpoint_event_prologue()
        for group in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(group)
        zero.checkpoint_event_epilogue()
    elif stage:
        zero.update_lp_params()
