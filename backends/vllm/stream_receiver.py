"""How vLLM's workers load weights while they arrive; runs inside vLLM's processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from backends.transfer.streaming import Streaming
from backends.vllm.broadcast_receiver import JoinInfo, membership
from backends.vllm.version.workers import load_weights, transfer_bases
from pipelinerl.errors import BackendError
from pipelinerl.util.user_code import kind_and_line

TransferEngine: Any = transfer_bases().WeightTransferEngine
UpdateInfo: Any = transfer_bases().WeightTransferUpdateInfo

NOTHING_YET = "no weights have come"


@dataclass
class StreamedUpdateInfo(UpdateInfo):  # type: ignore[misc]  # vLLM is Any to mypy
    """Weights that come."""

    version: int
    """Optimizer steps done."""


class StreamTransferEngine(TransferEngine):  # type: ignore[misc]  # vLLM is Any to mypy
    """A worker's end of the streamed transport; see ``streaming.py``. What it has loaded is a mixture until the end.

    What breaks off raises nothing here, but is asked for: vLLM leaves the answers of the other workers of a call that
    raises to the next call.
    """

    init_info_cls = JoinInfo
    update_info_cls = StreamedUpdateInfo
    _streaming: Streaming | None = None
    fault = NOTHING_YET
    """Why the weights have not come in full; empty: they have."""

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Begin to join a group; the sender knows when all have joined."""
        self._streaming = Streaming(membership(init_info, self), before=self._streaming)

    def start_weight_update(self) -> None:
        """Do nothing: the model stays whole until the first weights have come."""

    def receive_weights(self, update_info: StreamedUpdateInfo) -> None:
        """Load what comes. If not all of it comes the model is a mixture, until a version has come in full."""
        self.fault = NOTHING_YET
        try:
            if self._streaming is None:
                raise BackendError("the engine has joined no group")
            arriving = self._streaming.arriving(update_info.version)
            # The first one before the model is touched.
            load_weights(self.model, self.model_config, _all(next(arriving), arriving))
            self.fault = "" if next(arriving, None) is None else "more has come than was loaded"
        except Exception as error:
            self.fault = kind_and_line(error)
        finally:
            if self._streaming is not None:
                self._streaming.give_back()

    def finish_weight_update(self) -> None:
        """Check that all has come.

        Raises:
            BackendError: If not.
        """
        if self.fault:
            raise BackendError(self.fault)

    def shutdown(self) -> None:
        """Leave the group."""
        if self._streaming is not None:
            self._streaming.abandon()
            self._streaming = None


def _all(
    first: tuple[str, torch.Tensor] | None, others: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all parameters and keep none: its bucket is used again when nothing of it is seen any more."""
    assert first is not None
    yield first
    first = None
    yield from others
