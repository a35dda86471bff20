"""What a rank publishes: a snapshot of the policy's weights, in files or in a row of bytes to be sent from.

Theory of operation. All ranks put the parameters together; rank 0 keeps them, and nothing is trained meanwhile. A row
is made once and used for every version; on GPUs it is pinned, and checksums are computed where the parameters lie,
before they cross to the host. It is sent from while training goes on: by calls that come from a thread of their own
(``TRANSFER_THREAD``), one at a time. Publishing and sending never go together: the driver sees to it.

What is streamed is put together while it is sent: then nothing is kept, and nothing is trained meanwhile.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch

from backends.deepspeed.policy_model import PolicyModel, copy_policy, gathered, largest_bucket_bytes, saved_shapes
from backends.interface import TRANSFER_ATTEMPTS, Weights
from backends.transfer.broadcast import Sender
from backends.transfer.checksum64 import checksum64
from backends.transfer.layout import Parameters, Place, described, digest, label, layout, row_bytes, seen_as
from backends.transfer.lines import Door
from backends.transfer.meeting import own_address
from backends.transfer.shared_row import SharedRow
from backends.transfer.streaming import STREAM_BYTES, StreamSender
from backends.transfer.weights_check import check_names, checkpoint_shapes
from backends.transfer.weights_file import write_weights
from pipelinerl.errors import BackendError

FILES = "version-*.safetensors"
"""Names of published files."""
KEPT_FILES = 2
"""Published files kept: the newest, and the one that engines may still be reading (count)."""
TRANSFER_THREAD = "transfer"
"""Ray's concurrency group of the calls that send."""
ABORT_THREAD = "abort"
"""Ray's concurrency group of the calls that end a transfer under way."""


class Publisher:
    """One rank's part; rank 0 keeps what is published.

    Args:
        rank: Number of the rank.
        device: Of the rank.
        transport: Where to publish.
        folder: For files.
        model_path: Folder of the model that engines have, whose names they expect.
    """

    def __init__(
        self, rank: int, *, device: Literal["cpu", "gpu"], transport: str, folder: Path, model_path: str
    ) -> None:
        self._receives, self._device, self._transport = rank == 0, device, transport
        self._folder, self._model_path = folder, model_path
        self._files = sorted(folder.glob(FILES)) if self._receives else []  # of a rank before, that was killed
        self._door: Door | None = None
        self._meeting = self._why_aborted = ""
        self._changing_group = threading.Lock()
        self._sender: Sender | None = None
        self._parameters: Parameters = ()
        self._row: SharedRow | None = None
        self._held: tuple[int, list[int]] | None = None
        self._stream: StreamSender | None = None

    def check(self, model: PolicyModel) -> None:
        """Check (on rank 0) that what this model publishes is what engines expect: no later attempt would change it.

        Raises:
            BackendError: If a weight is missing, unknown, or of another shape.
        """
        if not self._receives:
            return
        shapes = {name: tuple(weight.shape) for name, weight in saved_shapes(model).items()}
        check_names(shapes, checkpoint_shapes(self._model_path), source="weights to be sent")

    def publish(self, model: PolicyModel, version: int) -> Weights | None:
        """Make the weights ready to be sent; all ranks call it together.

        Returns:
            Where they are; None on other ranks.
        """
        if self._transport == "broadcast":
            return self._snapshot(model, version)
        if self._transport == "streamed":
            self._parameters = self._parameters or described(saved_shapes(model))
            return Weights(version, f"streamed:{version}") if self._receives else None
        copies = copy_policy(model, receive=self._receives)
        return self._write(copies, version) if self._receives else None

    def close(self) -> None:
        """Remove the published files and leave the group."""
        for path in self._files:
            path.unlink(missing_ok=True)
        self._files = []
        if self._sender is not None:
            self._sender.leave()
        if self._door is not None:
            self._door.close()

    # ------------------------------------------------------------------------------------------ files

    def _write(self, copies: dict[str, torch.Tensor], version: int) -> Weights:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / FILES.replace("*", f"{version:08d}")
        weights = Weights(version, f"file:{path}", write_weights(path, copies))
        self._files = [*(old for old in self._files if old != path), path]
        for old in self._files[:-KEPT_FILES]:
            old.unlink(missing_ok=True)
        self._files = self._files[-KEPT_FILES:]
        return weights

    # ------------------------------------------------------------------------------------------ a row

    def _snapshot(self, model: PolicyModel, version: int) -> Weights | None:
        self._held = None
        places = self._places(model) if self._receives else {}
        on_gpu = self._device == "gpu"
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
            sums: dict[str, Any] = {}
            for bucket in gathered(model, receive=self._receives):
                for name, weight in bucket.items():
                    assert self._row is not None
                    kept, sent = seen_as(self._row.row, places[name]), weight.detach()
                    kept.copy_(sent, non_blocking=on_gpu)
                    sums[name] = checksum64(sent) if on_gpu else threads.submit(checksum64, kept)
                if on_gpu:
                    torch.cuda.synchronize()
        if not self._receives:
            return None
        in_order = [sums[name] if on_gpu else sums[name].result() for name in places]
        self._held = version, in_order
        checksum = digest(self._parameters, in_order)
        return Weights(version, f"broadcast:{label(version, checksum)}", {"all parameters": checksum})

    def _places(self, model: PolicyModel) -> dict[str, Place]:
        """Return the place of each weight in the row, which is made the first time."""
        if self._row is None:
            self._parameters = described(saved_shapes(model))
            device = torch.device("cuda:0" if self._device == "gpu" else "cpu")
            self._row = SharedRow.make(row_bytes(layout(self._parameters)), device)
        return {place.name: place for place in layout(self._parameters)}

    # ------------------------------------------------------------------------------------------ sending

    def open_group(self) -> str:
        """Leave the group of before; return what members of a new one have to know to join it (rank 0)."""
        with self._changing_group:
            if self._sender is not None:
                self._sender.leave()
                self._sender = None
            if self._door is not None:
                self._door.close()
            self._door = Door.open(own_address())
            self._meeting, self._why_aborted = self._door.meeting, ""
        return self._meeting

    def abort_group(self, meeting: str, why: str) -> None:
        """End at once what is under way in a group, from another thread; it is of no use then (rank 0).

        Args:
            meeting: What ``open_group`` has returned; nothing happens if there is another group by now.
            why: What ``join_group`` or ``send`` says then.
        """
        with self._changing_group:
            if meeting == self._meeting:
                self._why_aborted = why
                if self._sender is not None:
                    self._sender.leave(why)

    def join_group(self, names: Sequence[str], timeout_s: float) -> str | None:
        """Join the group that ``open_group`` has opened; returns when all have joined (rank 0).

        Args:
            names: What its members are called: rank 0, then all workers of all engines.
            timeout_s: Longest wait for them, now and in every transfer (seconds).

        Returns:
            What went wrong, if something did; this rank is well nevertheless.
        """
        assert self._door is not None
        with self._changing_group:
            sender = Sender(self._door, names=names, parameters=self._parameters, timeout_s=timeout_s)
            if self._why_aborted:
                sender.leave(self._why_aborted)
            self._sender = sender
        try:
            sender.meet()
        except BackendError as error:
            return str(error)
        return None

    def send(self, version: int) -> str | None:
        """Send what was published last to all members of the group; returns when all have it (rank 0).

        Args:
            version: That of what was published last.

        Returns:
            What went wrong, if something did; this rank is well nevertheless.
        """
        if self._sender is None or self._held is None or self._held[0] != version:
            return f"version {version} cannot be sent: {'no group' if self._sender is None else 'it is not held'}"
        assert self._row is not None
        try:
            for _ in range(TRANSFER_ATTEMPTS):
                num_refusing = self._sender.send(self._row.row, version=version, sums=self._held[1])
                if not num_refusing:
                    return None
        except BackendError as error:
            return str(error)
        return f"version {version} was refused {TRANSFER_ATTEMPTS} times (machines: {num_refusing})"

    def stream(self, model: PolicyModel, version: int) -> str | None:
        """Send the weights of this moment while they are put together; all ranks call it together.

        Args:
            model: The model.
            version: What they are called: that of what was published last.

        Returns:
            What went wrong, if something did; the ranks are well nevertheless.
        """
        parts = gathered(model, receive=self._receives, bucket_bytes=STREAM_BYTES)
        if not self._receives:
            for _ in parts:
                pass
            return None
        if self._stream is None:
            largest_bytes = largest_bucket_bytes(saved_shapes(model), STREAM_BYTES)
            device = torch.device("cuda:0" if self._device == "gpu" else "cpu")
            self._stream = StreamSender(self._parameters, largest_bytes, device)
        return self._stream.send(self._sender, version, parts)
