"""The store that the members of a process group meet at, on one address of this machine only."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
from datetime import timedelta

import ray
from torch.distributed import TCPStore

SO_ATTACH_FILTER = 26
"""Linux: have a program look at every packet of a socket."""
DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""That program: of every packet keep 0 bytes."""
WAITING = 4096
"""Members that may be about to connect at a time (count)."""


class MeetingStore(TCPStore):  # type: ignore[misc]
    """A store that listens on one address; once all members have met, strangers cannot connect any more.

    torch's own listens on all interfaces and asks nobody who he is.

    Args:
        address: Of this machine, as the members reach it.
        port: 0: one that is free (``port``).
        timeout_s: Longest wait for an answer of it (seconds).
    """

    def __init__(self, address: str, port: int = 0, *, timeout_s: float) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(WAITING)
            taken = listener.getsockname()[1]
            self._listener = listener.detach()  # the store's from now on
        super().__init__(
            address,
            taken,
            None,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=self._listener,
        )

    def close_to_others(self) -> None:
        """Take no connection any more; those there are stay. Where the system is not Linux nothing changes."""
        program = ctypes.create_string_buffer(DROP_ALL)
        listener = socket.socket(fileno=self._listener)
        with contextlib.suppress(OSError):
            listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(program)))
        listener.detach()


def own_address() -> str:
    """Return the address that the others reach this machine at: the one that Ray uses; no packet is sent."""
    if ray.is_initialized():
        return str(ray.util.get_node_ip_address())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))
        except OSError:  # no network
            return "127.0.0.1"
        return str(probe.getsockname()[0])
