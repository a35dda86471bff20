"""The store at which a process group forms, on one address of this machine, for the members' machines only."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
from collections.abc import Sequence
from datetime import timedelta

import psutil
import ray
from torch.distributed import TCPStore

from backends.transfer.connection import address_towards

INTERFACES = "NCCL_SOCKET_IFNAME"
WAITING = 4096
"""Members that may be about to connect at a time."""


SO_ATTACH_FILTER = 26
"""Linux: attach a BPF program, which filters the packets of a socket."""
SOURCE_ADDRESS = 0xFFF00000 + 12
"""In BPF: the sender's address in a packet of IPv4."""
LOAD, JUMP_UNLESS, RETURN = 0x20, 0x15, 0x06
"""Of BPF: load a word; go on if it equals the operand, else skip one instruction; keep so many bytes of the packet."""


class RendezvousStore(TCPStore):  # type: ignore[misc]  # torch is Any to mypy
    """A store that listens on one address and admits listed machines; torch's own listens on all, for all.

    It does not authenticate: anyone on an admitted machine can connect. ``port`` 0: a free one. ``members``: admitted
    addresses (Linux, IPv4); None: all. ``timeout_s``: longest wait for an answer.
    """

    def __init__(self, address: str, port: int = 0, *, timeout_s: float, members: Sequence[str] | None = None) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as listener:
            if members is not None and family == socket.AF_INET and sys.platform == "linux":
                _accept_only(listener, members)
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


def _accept_only(listener: socket.socket, addresses: Sequence[str]) -> None:
    """Drop the packets of all other machines, before the socket listens."""
    program = [(LOAD, 0, SOURCE_ADDRESS)]
    for address in sorted(set(addresses)):
        (number,) = struct.unpack("!I", socket.inet_aton(address))
        program += [(JUMP_UNLESS, 1, number), (RETURN, 0, 0xFFFFFFFF)]
    program.append((RETURN, 0, 0))
    code = ctypes.create_string_buffer(
        b"".join(struct.pack("HBBI", operation, 0, skip, k) for operation, skip, k in program)
    )
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("@HP", len(program), ctypes.addressof(code)))


def reserved_port(address: str) -> socket.socket:
    """Return a socket that reserves a free port of this machine for a ``RendezvousStore``."""
    held = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((address, 0))
    return held


def own_address() -> str:
    """Return the address of this machine for others; no packet is sent.

    The first IPv4 address of an interface that ``NCCL_SOCKET_IFNAME`` lists, as NCCL reads it (beginnings of names, or
    ``=`` and names); else the one that Ray uses.
    """
    listed = os.environ.get(INTERFACES, "")
    wanted = tuple(name for name in listed.lstrip("=").split(",") if name and not listed.startswith("^"))
    for interface, addresses in psutil.net_if_addrs().items():
        if interface in wanted or (not listed.startswith("=") and interface.startswith(wanted)):
            for one in addresses:
                if one.family == socket.AF_INET:
                    return str(one.address)
    if ray.is_initialized():
        return str(ray.util.get_node_ip_address())
    try:
        return address_towards("10.255.255.255")
    except OSError:  # no network
        return "127.0.0.1"
