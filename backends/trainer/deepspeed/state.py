"""Where ZeRO keeps the float32 numbers of a parameter."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from backends.trainer.model import trained_parameters
from backends.trainer.state import Piece, RankState


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
