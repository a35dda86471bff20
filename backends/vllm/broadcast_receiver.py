"""How vLLM's workers get weights that have arrived while they generated; runs inside vLLM's processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from backends.transfer.receiver import Membership
from backends.transfer.staging import Staging
from backends.transfer.weights_check import checkpoint_shapes
from backends.vllm.verified_receiver import VerifiedTransferEngine
from backends.vllm.version.workers import transfer_bases
from pipelinerl.errors import BackendError

InitInfo: Any = transfer_bases().WeightTransferInitInfo
UpdateInfo: Any = transfer_bases().WeightTransferUpdateInfo


@dataclass
class JoinInfo(InitInfo):  # type: ignore[misc]  # vLLM is Any to mypy
    """Meeting place of the members of a group."""

    meeting: str
    """Where: address, port and password."""
    first_worker: int
    """Number of this engine's first worker among all: 1 and the workers before."""
    timeout_s: float
    """Longest wait for the others (seconds)."""


@dataclass
class StagedUpdateInfo(UpdateInfo):  # type: ignore[misc]  # vLLM is Any to mypy
    """Weights that have arrived."""

    label: str
    """Which: version and checksum."""


def membership(info: JoinInfo, worker: Any) -> Membership:
    """Return what a worker's end of a transport, vLLM's ``WeightTransferEngine``, joins a group with."""
    config = worker.parallel_config
    own: int = config.data_parallel_index * config.world_size + config.rank
    return Membership(
        meeting=info.meeting,
        worker=info.first_worker + own,
        shapes=checkpoint_shapes(worker.model_config.model),
        device=worker.device,
        timeout_s=info.timeout_s,
    )


class BroadcastTransferEngine(VerifiedTransferEngine):
    """A worker's end of the broadcast transport; see ``verified_receiver.py`` and ``staging.py``."""

    init_info_cls = JoinInfo
    update_info_cls = StagedUpdateInfo
    _staging: Staging | None = None
    _label = ""

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Begin to join a group; the sender knows when all have joined."""
        self._staging = Staging(membership(init_info, self), before=self._staging)

    def receive(self, update_info: StagedUpdateInfo) -> dict[str, torch.Tensor]:
        """Return what has arrived.

        Raises:
            BackendError: If it is something else, or not complete and verified.
        """
        if self._staging is None:
            raise BackendError("the engine has joined no group")
        self._label = update_info.label
        return self._staging.staged(update_info.label)

    def finish_weight_update(self) -> None:
        """Load what has arrived.

        Raises:
            BackendError: If something else has arrived meanwhile: the model may be a mixture then.
        """
        super().finish_weight_update()
        assert self._staging is not None
        self._staging.staged(self._label)

    def shutdown(self) -> None:
        """Leave the group and forget what has been received."""
        super().shutdown()
        if self._staging is not None:
            self._staging.abandon()
            self._staging = None
