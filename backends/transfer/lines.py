"""Messages over a connection between two processes, and who may connect."""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import select
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Any

from pipelinerl.errors import BackendError

HELLO_BYTES = 4096
"""Longest message of somebody who has not yet said the password (bytes)."""
HELLO_TIMEOUT_S = 5.0
"""Longest wait for the rest of it, once it has begun (seconds)."""
LONGEST_QUEUE = 64
"""Connections that may stand at a door and say nothing: with one more the first of them is closed (count)."""
HOST_PERIOD_S = 0.5
"""Time between two looks at whether the host is there (seconds)."""
CONNECT_TIMEOUT_S = 20.0
"""Longest wait for a machine whose door is open to answer (seconds)."""
KEEPALIVE_S = 30
"""Seconds of silence after which it is asked whether the other end's machine is still there."""


class Line:
    """A connection that messages cross: JSON, each after its length.

    Args:
        connection: To the other end.
        timeout_s: Longest wait for the other end (seconds).
    """

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # nothing crosses between updates
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        self.connection, self._timeout_s = connection, timeout_s
        _wait_at_most(connection, timeout_s)

    def tell(self, **message: Any) -> None:
        """Send a message."""
        content = json.dumps(message).encode()
        empty(self.connection, memoryview(len(content).to_bytes(8, "big") + content))

    def hear(self, *, patiently: bool = False, longest: int = 2**40) -> dict[str, Any]:
        """Receive a message.

        Args:
            patiently: Whether to wait for its beginning as long as it takes.
            longest: Longest message that is accepted (bytes).

        Raises:
            BackendError: If it is that something has failed at the other end.
            OSError: If the other end has gone, or does not answer.
        """
        _wait_at_most(self.connection, 0 if patiently else self._timeout_s)
        head = bytearray(8)
        fill(self.connection, memoryview(head)[:1])
        _wait_at_most(self.connection, self._timeout_s)
        fill(self.connection, memoryview(head)[1:])
        size = int.from_bytes(head, "big")
        if size > longest:
            raise ConnectionError(f"a message of {size} bytes")
        content = bytearray(size)
        fill(self.connection, memoryview(content))
        message: dict[str, Any] = json.loads(content)
        if "error" in message:
            raise BackendError(message["error"])
        return message

    def check_there(self) -> None:
        """Check that the other end has not gone; what it has said stays to be heard.

        Raises:
            OSError: If it has.
        """
        looking = select.poll()
        try:
            looking.register(self.connection, select.POLLRDHUP)
        except ValueError:  # this end has been closed
            raise ConnectionError("the connection has been closed") from None
        if looking.poll(0):
            raise ConnectionError("the other end has gone")

    def close(self) -> None:
        """Close the connection, also under whoever waits in another thread; a second call does nothing."""
        _shut(self.connection)

    def wait_for_end(self) -> None:
        """Wait until the other end has gone, or ``close`` has been called; what it has said stays to be heard."""
        looking = select.poll()
        with contextlib.suppress(OSError, ValueError):  # closed already
            looking.register(self.connection, select.POLLRDHUP)
            looking.poll()


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def _wait_at_most(connection: socket.socket, timeout_s: float) -> None:
    """Have the kernel end a wait that takes longer; 0: none.

    A time-out of Python's own would return to Python for every few packets. Where the process has another busy thread,
    as engines and ranks have, each return waits for it: an H100's weights arrived at 0.2 GB/s.
    """
    connection.settimeout(None)
    microseconds = round(timeout_s * 1e6)
    limit = struct.pack("ll", *divmod(max(microseconds, 1) if timeout_s else 0, 10**6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, limit)


def fill(connection: socket.socket, memory: memoryview) -> None:
    """Receive as many bytes as the memory has room for.

    Raises:
        ConnectionError: If the other end has gone.
        TimeoutError: If it sends nothing for the time of its ``Line``.
    """
    while memory:
        try:
            num_bytes = connection.recv_into(memory, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise TimeoutError("timed out") from None
        if not num_bytes:
            raise ConnectionError("the other end has gone")
        memory = memory[num_bytes:]


def empty(connection: socket.socket, memory: memoryview) -> None:
    """Send all bytes of the memory.

    Raises:
        OSError: If the other end has gone, or takes nothing for the time of its ``Line``.
    """
    try:
        connection.sendall(memory)
    except BlockingIOError:
        raise TimeoutError("timed out") from None


@dataclass(frozen=True, slots=True)
class Door:
    """Where others connect, if they know the password. Whoever says nothing yet holds nobody else up."""

    listener: socket.socket
    password: str
    silent: list[socket.socket] = field(default_factory=list)
    """Those that have come and have said nothing yet: on a busy machine a member may need a while for it."""

    @classmethod
    def open(cls, address: str, password: str | None = None) -> Door:
        """Open a door at a port that is free; without a password, with one that is made up."""
        return cls(socket.create_server((address, 0)), password or secrets.token_hex(16))

    @property
    def meeting(self) -> str:
        """What others have to be told to come in."""
        address, port = self.listener.getsockname()[:2]
        return f"{address}:{port}:{self.password}"

    def let_in(self, *, until_s: float, timeout_s: float, host: Line | None = None) -> tuple[Line, dict[str, Any]]:
        """Wait for somebody who knows the password; return the line, and what was said.

        Args:
            until_s: When to give up, on the clock of ``time.monotonic``.
            timeout_s: Of the line (seconds).
            host: Who has everybody come: without it nobody does.

        Raises:
            TimeoutError: If nobody comes.
            OSError: If the host has gone.
        """
        while True:
            if host is not None:
                host.check_there()
            for connection in self._who_speak(min(HOST_PERIOD_S, until_s - time.monotonic())):
                self.silent.remove(connection)
                with contextlib.suppress(OSError, ValueError, BackendError):
                    hello = Line(connection, HELLO_TIMEOUT_S).hear(longest=HELLO_BYTES)
                    if hmac.compare_digest(str(hello.get("password")), self.password):
                        return Line(connection, timeout_s), hello
                connection.close()
            if time.monotonic() >= until_s:
                raise TimeoutError("timed out")

    def _who_speak(self, timeout_s: float) -> list[socket.socket]:
        """Wait until somebody comes or says something; return those that have said something, or have gone."""
        looking = select.poll()
        try:
            for one in (self.listener, *self.silent):
                looking.register(one, select.POLLIN)
        except ValueError:
            raise ConnectionError("the door has been closed") from None
        ready = {descriptor for descriptor, _ in looking.poll(max(1, round(timeout_s * 1e3)))}
        speaking = [one for one in self.silent if one.fileno() in ready]
        if self.listener.fileno() in ready:
            self.listener.setblocking(False)  # who has come may have gone
            with contextlib.suppress(BlockingIOError):
                self.silent.append(self.listener.accept()[0])
            if len(self.silent) > LONGEST_QUEUE and self.silent[0] not in speaking:
                self.silent.pop(0).close()
        return speaking

    def close(self) -> None:
        """Let nobody in any more, and end the wait of another thread for somebody; a second call does nothing."""
        for one in (self.listener, *self.silent):
            _shut(one)


def come_in(meeting: str, /, *, timeout_s: float, **said: Any) -> Line:
    """Connect to a door; return the line.

    Args:
        meeting: What ``Door.meeting`` said.
        timeout_s: Of the line; to connect takes no longer, and ``CONNECT_TIMEOUT_S`` at most (seconds).
        said: What the other end is told.

    Raises:
        OSError: If it cannot be reached.
    """
    address, port, password = meeting.split(":")
    connection = socket.create_connection((address, int(port)), timeout=min(timeout_s, CONNECT_TIMEOUT_S))
    line = Line(connection, timeout_s)
    try:
        line.tell(password=password, **said)
    except OSError:  # the door has been closed meanwhile
        line.close()
        raise
    return line


def address_towards(address: str) -> str:
    """Return the address of this machine on the way to another one; no packet is sent.

    Raises:
        OSError: If there is no way.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 1))
        return str(probe.getsockname()[0])
