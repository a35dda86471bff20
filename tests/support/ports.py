"""A port of this machine that nobody else is given while a test has it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def port_taken() -> Iterator[int]:
    """Yield a port of 127.0.0.1; who says so, by SO_REUSEADDR, may listen there meanwhile."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
