"""The store that the members of a process group meet at, on one address of this machine only."""

from __future__ import annotations

import socket
from datetime import timedelta

import ray
from torch.distributed import TCPStore

from backends.transfer.lines import address_towards

WAITING = 4096
"""Members that may be about to connect at a time (count)."""


class MeetingStore(TCPStore):  # type: ignore[misc]  # torch is Any to mypy
    """A store that listens on one address; torch's own listens on all. Neither asks who connects.

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
            descriptor = listener.detach()  # the store's from now on
        super().__init__(
            address,
            taken,
            None,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )


def own_address() -> str:
    """Return the address that the others reach this machine at: the one that Ray uses; no packet is sent."""
    if ray.is_initialized():
        return str(ray.util.get_node_ip_address())
    try:
        return address_towards("10.255.255.255")
    except OSError:  # no network
        return "127.0.0.1"
