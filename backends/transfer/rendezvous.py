"""Connections between processes: the store at which a group forms, and messages to a server.

The store listens on one address of this machine, for the members' machines only.
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import json
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import psutil
import ray
from torch.distributed import TCPStore

from pipelinerl.errors import BackendError

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


# --------------------------------------------------------- JSON messages and bytes over a TCP connection, and a server

HELLO_BYTES = 4096
"""Longest first message of a peer that has not been authenticated."""
HELLO_TIMEOUT_S = 5.0
"""Longest wait for the rest of it, once it has begun."""
LONGEST_QUEUE = 64
"""Peers without a first message yet; with one more the oldest is closed."""
HOST_PERIOD_S = 0.5
"""Between two checks of the host."""
CONNECT_TIMEOUT_S = 20.0
"""Longest wait for a listening machine to answer."""
KEEPALIVE_S = 30
"""Silence before TCP probes the peer."""


class Connection:
    """Length-prefixed JSON messages over a socket; ``timeout_s`` is the longest wait for the peer."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # nothing crosses between updates
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        self.sock, self._timeout_s = sock, timeout_s
        _set_timeout(sock, timeout_s)

    def send(self, **message: Any) -> None:
        """Send a message."""
        content = json.dumps(message).encode()
        send_bytes(self.sock, memoryview(len(content).to_bytes(8, "big") + content))

    def recv(self, *, patiently: bool = False, longest: int = 2**40) -> dict[str, Any]:
        """Receive a message of at most ``longest`` bytes, whose first byte may take any time if ``patiently``.

        ``BackendError`` reports an error of the peer, ``OSError`` its loss or silence.
        """
        _set_timeout(self.sock, 0 if patiently else self._timeout_s)
        head = bytearray(8)
        recv_bytes(self.sock, memoryview(head)[:1])
        _set_timeout(self.sock, self._timeout_s)
        recv_bytes(self.sock, memoryview(head)[1:])
        size = int.from_bytes(head, "big")
        if size > longest:
            raise ConnectionError(f"a message of {size} bytes")
        content = bytearray(size)
        recv_bytes(self.sock, memoryview(content))
        message: dict[str, Any] = json.loads(content)
        if "error" in message:
            raise BackendError(message["error"])
        return message

    def check_open(self) -> None:
        """Raise ``OSError`` if either end is closed; unread messages stay."""
        poll = select.poll()
        try:
            poll.register(self.sock, select.POLLRDHUP)
        except ValueError:  # this end
            raise ConnectionError("the connection has been closed") from None
        if poll.poll(0):
            raise ConnectionError("the other end has gone")

    def close(self) -> None:
        """Close the connection, also under another thread's ``recv``; a second call does nothing."""
        _shut(self.sock)

    def wait_closed(self) -> None:
        """Wait until either end is closed; unread messages stay."""
        poll = select.poll()
        with contextlib.suppress(OSError, ValueError):  # closed already
            poll.register(self.sock, select.POLLRDHUP)
            poll.poll()


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def _set_timeout(sock: socket.socket, timeout_s: float) -> None:
    """Set the kernel's time-out of a socket; 0: none.

    With Python's own time-out a receive returns to Python every few packets and waits there for the busy threads of an
    engine or a rank: an H100's weights arrived at 0.2 GB/s.
    """
    sock.settimeout(None)
    microseconds = round(timeout_s * 1e6)
    limit = struct.pack("ll", *divmod(max(microseconds, 1) if timeout_s else 0, 10**6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, limit)


def recv_bytes(sock: socket.socket, memory: memoryview) -> None:
    """Fill the memory; ``ConnectionError`` if the peer has gone, ``TimeoutError`` if it is silent."""
    while memory:
        try:
            num_bytes = sock.recv_into(memory, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise TimeoutError("timed out") from None
        if not num_bytes:
            raise ConnectionError("the other end has gone")
        memory = memory[num_bytes:]


def send_bytes(sock: socket.socket, memory: memoryview) -> None:
    """Send the memory; ``OSError`` if the peer has gone, or takes nothing for the time-out of its ``Connection``."""
    try:
        sock.sendall(memory)
    except BlockingIOError:
        raise TimeoutError("timed out") from None


@dataclass(frozen=True, slots=True)
class RendezvousServer:
    """Listens for peers that know the password. A silent peer holds nobody up."""

    listener: socket.socket
    password: str
    silent: list[socket.socket] = field(default_factory=list)
    """Without a first message yet, which takes a while on a busy machine."""

    @classmethod
    def open(cls, address: str, password: str | None = None) -> RendezvousServer:
        """Listen at a free port; without a password, a random one is made."""
        return cls(socket.create_server((address, 0)), password or secrets.token_hex(16))

    @property
    def rendezvous(self) -> str:
        """The argument of ``connect``: address, port and password."""
        address, port = self.listener.getsockname()[:2]
        return f"{address}:{port}:{self.password}"

    def accept(
        self, *, until_s: float, timeout_s: float, host: Connection | None = None
    ) -> tuple[Connection, dict[str, Any]]:
        """Wait until ``until_s`` (``time.monotonic``) for a peer with the password; return it and its first message.

        ``TimeoutError`` if nobody comes; ``OSError`` if the ``host``, the group's sender, goes meanwhile.
        """
        while True:
            if host is not None:
                host.check_open()
            for sock in self._readable(min(HOST_PERIOD_S, until_s - time.monotonic())):
                self.silent.remove(sock)
                with contextlib.suppress(OSError, ValueError, BackendError):
                    hello = Connection(sock, HELLO_TIMEOUT_S).recv(longest=HELLO_BYTES)
                    if hmac.compare_digest(str(hello.get("password")), self.password):
                        return Connection(sock, timeout_s), hello
                sock.close()
            if time.monotonic() >= until_s:
                raise TimeoutError("timed out")

    def _readable(self, timeout_s: float) -> list[socket.socket]:
        """Wait for an event; return the peers that have begun their first message, or have gone."""
        poll = select.poll()
        try:
            for one in (self.listener, *self.silent):
                poll.register(one, select.POLLIN)
        except ValueError:
            raise ConnectionError("the rendezvous has been closed") from None
        ready = {descriptor for descriptor, _ in poll.poll(max(1, round(timeout_s * 1e3)))}
        speaking = [one for one in self.silent if one.fileno() in ready]
        if self.listener.fileno() in ready:
            self.listener.setblocking(False)  # the peer may have gone again
            with contextlib.suppress(BlockingIOError):
                self.silent.append(self.listener.accept()[0])
            if len(self.silent) > LONGEST_QUEUE and self.silent[0] not in speaking:
                self.silent.pop(0).close()
        return speaking

    def close(self) -> None:
        """Stop listening and end another thread's ``accept``; a second call does nothing."""
        for one in (self.listener, *self.silent):
            _shut(one)


def connect(rendezvous: str, /, *, timeout_s: float, **hello: Any) -> Connection:
    """Connect to a ``RendezvousServer``, with a first message, in ``CONNECT_TIMEOUT_S``, else ``OSError``."""
    address, port, password = rendezvous.split(":")
    sock = socket.create_connection((address, int(port)), timeout=min(timeout_s, CONNECT_TIMEOUT_S))
    connection = Connection(sock, timeout_s)
    try:
        connection.send(password=password, **hello)
    except OSError:  # the server has been closed meanwhile
        connection.close()
        raise
    return connection


def address_towards(address: str) -> str:
    """Return this machine's address on the route to another, sending no packet; ``OSError`` if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 1))
        return str(probe.getsockname()[0])
