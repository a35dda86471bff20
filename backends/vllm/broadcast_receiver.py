"""How vLLM's workers receive weights through a group of processes; runs inside vLLM's processes."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from backends.transfer.broadcast import BroadcastGroup
from backends.transfer.weights_check import verified
from backends.vllm.verified_receiver import VerifiedTransferEngine
from pipelinerl.errors import BackendError


@dataclass
class JoinInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is Any to mypy
    """Meeting place of the members of a group."""

    address: str
    """The sender's machine."""
    port: int
    """Port of the store on that machine."""
    rank_offset: int
    """Rank of this engine's first worker: 1 for the sender, plus the workers before."""
    num_members: int
    """The sender and all workers of all engines (count)."""
    timeout_s: float
    """Longest wait for the others (seconds)."""


@dataclass
class BroadcastUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM is Any to mypy
    """The parameters that will be sent."""

    parameters: list[tuple[str, str, tuple[int, ...]]]
    """Name, type and shape of each, in the order in which they are sent."""
    checksums: dict[str, str]
    """SHA-256 of each parameter's bytes."""


class BroadcastTransferEngine(VerifiedTransferEngine):
    """A worker's end of the broadcast transport; see ``verified_receiver.py`` and ``broadcast.py``."""

    init_info_cls = JoinInfo
    update_info_cls = BroadcastUpdateInfo
    _group: BroadcastGroup | None = None

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Join a group, and leave that of before.

        Raises:
            BackendError: If not all members come in time.
        """
        self._leave()
        worker = self.parallel_config.data_parallel_index * self.parallel_config.world_size + self.parallel_config.rank
        with _environment_of_all_members(self.device):
            self._group = BroadcastGroup.join(
                init_info.address,
                init_info.port,
                rank=init_info.rank_offset + worker,
                num_members=init_info.num_members,
                device=self.device,
                timeout_s=init_info.timeout_s,
            )

    def receive(self, update_info: BroadcastUpdateInfo, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
        """Receive and verify; agree with all members that all have.

        Raises:
            BackendError: If this member, or another one, refuses what it has received: all may try again then. If the
                group broke: it has been left then.
        """
        if self._group is None:
            raise BackendError("the engine has joined no group")
        refusal: BackendError | None = None
        tensors: dict[str, torch.Tensor] = {}
        try:
            arriving = self._group.receive(update_info.parameters)
            tensors = verified(arriving, expected=update_info.checksums, shapes=shapes, source="weights received")
        except BackendError as error:
            if self._group.left:
                raise
            refusal = error
        except BaseException as error:  # out of step with the others
            self._group.leave(str(error))
            raise
        num_refusing = self._group.agree(refused=refusal is not None)
        if refusal is not None:
            raise refusal
        if num_refusing:
            raise BackendError(f"other workers refuse the weights that they received (workers: {num_refusing})")
        return tensors

    def shutdown(self) -> None:
        """Leave the group and forget what has been received."""
        super().shutdown()
        self._leave()

    def _leave(self) -> None:
        if self._group is not None:
            self._group.leave()
            self._group = None


def _environment_of_all_members(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Take back what vLLM sets for NCCL in its own processes: members of one group must be set alike, or they hang."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    from vllm.utils.nccl import unpinned_nccl_env

    environment: contextlib.AbstractContextManager[None] = unpinned_nccl_env()
    return environment
