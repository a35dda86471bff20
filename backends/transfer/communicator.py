"""How the members of a group come to send bytes from device to device, where all of them can.

Theory of operation. The sender asks all workers to make a communicator with it. Everybody makes one, tries it with 16
MB, and says what went wrong, if something did; the sender tells all whether it is used. So a GPU that two members
share, one without room for what will come, or a network that NCCL cannot cross, costs a line in the log and not the
run: bytes go through the host's memory. A member that has gone meanwhile ends the group. Messages cross the lines of
the group all the same, and a line that is closed ends the wait for bytes, too.

It is done while all stand still: on a GPU it waits for others, as decode's own communication does.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from backends.transfer.lines import Line
from backends.transfer.nccl import Nccl
from pipelinerl.errors import BackendError
from pipelinerl.util.user_code import kind_and_line

PROBE_BYTES, PROBE = 2**24, 0x5A
"""Size of what a new communicator is tried with (bytes), and each of its bytes."""
CHECK_S = 0.1
"""Time between two looks at whether the others are there, while it is made (seconds)."""
MAKE_TIMEOUT_S = 60.0
"""Longest wait for all to have made it (seconds)."""
HOST = torch.device("cpu")
"""Where rows of bytes lie that cross by connections."""


class Communicator(Protocol):
    """What bytes cross by, from device to device."""

    @staticmethod
    def new_id() -> str:
        """Return what its members have in common."""

    def __init__(self, common: str, rank: int, size: int, device: torch.device) -> None:
        """Return when all others have been made, too.

        Raises:
            BackendError: If it cannot be made.
        """

    def broadcast(self, row: torch.Tensor, *, check: Callable[[], None], timeout_s: float) -> None:
        """Send what rank 0 has in a row of bytes to the rows of all others; returns when this one's is as it should be.

        Args:
            row: On its device; nothing writes to it any more.
            check: Raises OSError if a member has gone, or the group has been left.
            timeout_s: Longest wait for the others (seconds).

        Raises:
            OSError: If a member has gone, or it takes longer: it is of no use then.
            BackendError: If it fails.
        """

    def close(self) -> None:
        """Give back what it has; a second call does nothing."""


COMMUNICATORS: dict[str, type[Communicator]] = {"cuda": Nccl}
"""What bytes cross by, by kind of device. Any other: the host's memory and connections."""


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a communicator that is to be made."""

    common: str
    """What rank 0 has made with ``new_id``."""
    rank: int
    """0 sends."""
    size: int
    """Members (count)."""
    room_bytes: int
    """Memory that what is sent needs at a time, on every device (bytes)."""
    device: torch.device


def agree(
    workers: Mapping[int, Line], device: torch.device, room_bytes: int, timeout_s: float
) -> tuple[Communicator | None, dict[int, str]]:
    """Have all members make a communicator; return it, or why it cannot be, by rank (the sender's part).

    Args:
        workers: Line to each worker, by its rank: 1 and more.
        device: Of the sender.
        room_bytes: Memory that what is sent needs at a time, on every device (bytes).
        timeout_s: Longest wait for the others (seconds).

    Raises:
        OSError: If a member has gone, or does not say.
    """
    try:
        member = Member(COMMUNICATORS[device.type].new_id(), 0, 1 + len(workers), room_bytes, device)
    except (BackendError, OSError) as error:
        return None, {0: str(error)}
    for rank, line in workers.items():
        line.tell(communicator=member.common, rank=rank, size=member.size, room_bytes=room_bytes)
    made, fault = _tried(member, list(workers.values()), timeout_s)
    with _closed_on_error(made):
        for line in workers.values():
            line.check_there()
        said = {0: fault} | {rank: line.hear()["fault"] for rank, line in workers.items()}
        faults = {rank: fault for rank, fault in said.items() if fault}
        for line in workers.values():
            line.tell(use=not faults)
    return _kept(made, use=not faults), faults


def answer(sender: Line, asked: Mapping[str, Any], device: torch.device, timeout_s: float) -> Communicator | None:
    """Make a communicator as the sender has asked; return it, unless a member cannot (a worker's part).

    Raises:
        OSError: If the sender has gone.
    """
    member = Member(asked["communicator"], asked["rank"], asked["size"], asked["room_bytes"], device)
    made, fault = _tried(member, [sender], timeout_s)
    with _closed_on_error(made):
        sender.tell(fault=fault)
        use: bool = sender.hear()["use"]
    return _kept(made, use=use)


@contextlib.contextmanager
def _closed_on_error(made: Communicator | None) -> Iterator[None]:
    try:
        yield
    except BaseException:
        _kept(made, use=False)
        raise


def _kept(made: Communicator | None, *, use: bool) -> Communicator | None:
    if made is not None and not use:
        made.close()
    return made if use else None


def _tried(member: Member, others: Sequence[Line], timeout_s: float) -> tuple[Communicator | None, str]:
    """Make a communicator and try it; return it, or what went wrong.

    Args:
        member: Whose.
        others: Lines that are closed if a member has gone.
        timeout_s: Longest wait of the others for what this one says (seconds).
    """
    limit_s = min(timeout_s / 2, MAKE_TIMEOUT_S)  # who is done at once waits for the others as long as it takes them
    until_s = time.monotonic() + limit_s
    tried: Future[Communicator] = Future()

    def check() -> None:
        for line in others:
            line.check_there()

    def make_and_try() -> None:
        try:
            tried.set_result(_right(member, check, limit_s))
        except Exception as error:
            tried.set_exception(error)

    threading.Thread(target=make_and_try, name="communicator", daemon=True).start()
    try:
        while not wait([tried], CHECK_S).done:
            check()
            if time.monotonic() > until_s:
                raise TimeoutError(f"no communicator of all after {limit_s:g} s")
        return tried.result(), ""
    except (BackendError, OSError, RuntimeError) as error:  # without memory torch raises a RuntimeError
        tried.add_done_callback(_closed)  # of a thread that waits on in NCCL
        return None, kind_and_line(error)


def _right(member: Member, check: Callable[[], None], timeout_s: float) -> Communicator:
    """Make a communicator that has been tried."""
    device = member.device
    communicator = COMMUNICATORS[device.type](member.common, member.rank, member.size, device)
    try:
        row = torch.empty(max(member.room_bytes, PROBE_BYTES), dtype=torch.uint8, device=device)[:PROBE_BYTES]
        row.fill_(PROBE if member.rank == 0 else 0)
        settle(device)
        communicator.broadcast(row, check=check, timeout_s=timeout_s)
        if not bool((row == PROBE).all()):
            raise BackendError("what arrives is not what is sent")
    except BaseException:
        communicator.close()
        raise
    return communicator


def _closed(tried: Future[Communicator]) -> None:
    if tried.exception() is None:
        tried.result().close()


def settle(device: torch.device) -> None:
    """Wait for what a GPU has been asked for by any thread of this process, on any stream."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
