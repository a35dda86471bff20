"""Weights from the trainer's rank 0 to all machines of all engines, host to host, while the engines generate.

Theory of operation. A *group* is rank 0, which sends, and all workers of all engines. One worker of every machine
receives, into a row of bytes that all workers of that machine see (``shared_row.py``). Every worker has a line to the
sender, for messages; the bytes go along a chain, from the sender to one machine and on to the next, so every weight
leaves every machine once. What the row holds is said when the group is made, not with every version.

==========  ===========================================  ======================================================
step        sender                                       receiver
==========  ===========================================  ======================================================
join        waits for all; says who receives             makes its machine's row, or sees it
notice      version, checksum of every parameter         waits for it, for as long as it takes
bytes       from its row, without a copy                 into its row; hands on; verifies what is whole meanwhile
verdict     waits for all                                right, or refused; labels its row if right
==========  ===========================================  ======================================================

When all say that it is right the weights can be loaded everywhere. When one refuses they can be sent again. Where
anything else goes wrong (a member has died, or does not answer in ``timeout_s``) the group is left, and a new one made.
Whoever knows before these time-outs that a member is lost has the sender leave at once, from another thread; and a
receiver leaves when the sender has, whatever it waits for.

Plain connections, because they can be closed under whoever waits, and report the death of the other end; with several
sends under way gloo ends the whole process then. The bytes stay in the host's memory. A GPU reads them there to verify
them, on a stream of its own: none of its kernels waits for a peer, beside those of decode.

Where all stand still, and every worker receives, the bytes can go from GPU to GPU instead (``communicator.py``): a
sender that asks ``rows_on`` where to put them together finds out whether.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch

from backends.transfer.communicator import COMMUNICATORS, HOST, Communicator, agree
from backends.transfer.layout import BUCKET_BYTES, Parameters, cuts
from backends.transfer.lines import Door, Line, come_in, empty
from pipelinerl.errors import BackendError

JOIN_TIMEOUT_S = 180.0
"""Longest wait for the workers of a group: they have been told of it, but join in threads that let all others go first
(seconds)."""
CHAIN = 0
"""Stands for the sender where workers are counted from 1."""
BLAME_TIMEOUT_S = 2.0
"""Time to look for the member that is to blame when a transfer has failed (seconds)."""
LOG = logging.getLogger("pipelinerl")


class Sender:
    """Rank 0's end: to ``meet`` first.

    Args:
        door: What the members meet at.
        names: What messages call them: the sender, then every worker of every engine.
        parameters: What will be sent, every time.
        timeout_s: Longest wait for the others, when joining and in every step of a transfer (seconds).
    """

    def __init__(self, door: Door, *, names: Sequence[str], parameters: Parameters, timeout_s: float) -> None:
        self._door, self._names, self._parameters, self._timeout_s = door, names, parameters, timeout_s
        self._lines: dict[int, Line] = {}  # by worker; CHAIN: to the first machine
        self._leaders: list[int] = []
        self._awaited: list[int] = []  # leaders that have not said whether what they received is right
        self._why_left: str | None = None  # None: it has not been left
        self._communicator: Communicator | None = None
        self._tried = False

    @property
    def left(self) -> bool:
        """Whether the group has been left: it is of no use then."""
        return self._why_left is not None

    def meet(self) -> None:
        """Return when all workers have joined.

        Raises:
            BackendError: If not all come in time, or one refuses the list of parameters, or the group is left.
        """
        began = time.perf_counter()
        try:
            self._meet()
        except Exception as error:
            absent = [name for worker, name in enumerate(self._names) if worker and worker not in self._lines]
            who = f"{', '.join(absent)} did not come; " if absent else ""
            raise self._broken("join", began, error, who) from error
        finally:
            self._door.close()

    def send(self, row: torch.Tensor, *, version: int, sums: Sequence[int], parts: Sequence[int] | None = None) -> int:
        """Send a row of bytes to all machines.

        Args:
            row: Parameters as ``layout`` has them, where ``rows_on`` says; it must stay as it is until this returns.
            version: Optimizer steps done.
            sums: ``checksum64`` of each parameter.
            parts: Which of the parameters they are, in their order. None: all.

        Returns:
            How many machines refuse what they have received.

        Raises:
            BackendError: If a machine does not say, or the group is left. It is of no use then.
        """
        if self._why_left is not None:
            raise BackendError(f"the group has been left{self._why_left and ': '}{self._why_left}")
        began = time.perf_counter()
        try:
            self._awaited = list(self._leaders)
            for worker in self._leaders:
                self._lines[worker].tell(version=version, sums=sums, parts=parts)
            self._send_bytes(row)
            num_refusing = 0
            while self._awaited:
                num_refusing += self._lines[self._awaited[0]].hear()["refused"]
                self._awaited.pop(0)
            return num_refusing
        except Exception as error:
            raise self._broken("send", began, error, "" if self.left else self._to_blame()) from error

    def rows_on(self, device: torch.device, room_bytes: int) -> torch.device:
        """Return where rows to be sent lie: on this device, if bytes can go from it to those of all workers.

        That is found out once, while all stand still and wait for a transfer; a line of the log says why not.

        Args:
            device: Of the sender; workers have one of the same kind each.
            room_bytes: Memory of each that what is sent needs at a time (bytes).

        Raises:
            BackendError: If a worker does not say, or the group is left. It is of no use then.
        """
        if not self._tried and device.type in COMMUNICATORS:
            began, self._tried = time.perf_counter(), True
            try:
                workers = {worker: self._lines[worker] for worker in self._leaders}
                self._communicator, faults = agree(workers, device, room_bytes, self._timeout_s)
            except Exception as error:
                raise self._broken("connect", began, error, "") from error
            if faults:
                why = "; ".join(f"{self._names[rank]}: {fault}" for rank, fault in faults.items())
                LOG.warning("weights go through the host's memory, not from device to device: %s", why)
        return HOST if self._communicator is None else device

    def leave(self, why: str = "") -> None:
        """Leave the group, also under a thread that meets or sends: whatever anybody waits for fails at once.

        A second call does nothing.
        """
        if self._why_left is None:
            self._why_left = why
        self._door.close()
        for line in list(self._lines.values()):
            line.close()
        if self._communicator is not None:
            self._communicator.close()

    def _send_bytes(self, row: torch.Tensor) -> None:
        if self._communicator is None:
            content = memoryview(row.numpy())
            for begin, end in cuts(row.numel(), BUCKET_BYTES):
                empty(self._lines[CHAIN].connection, content[begin:end])
            return
        self._communicator.broadcast(row, check=self._check_there, timeout_s=self._timeout_s)

    def _check_there(self) -> None:
        for worker in self._leaders:
            self._lines[worker].check_there()

    def _meet(self) -> None:
        until_s = time.monotonic() + min(self._timeout_s, JOIN_TIMEOUT_S)
        hellos: dict[int, dict[str, Any]] = {}
        while len(hellos) + 1 < len(self._names):
            line, hello = self._door.let_in(until_s=until_s, timeout_s=self._timeout_s)
            self._keep(hello["worker"], line)
            hellos[hello["worker"]] = hello
        workers = sorted(hellos)
        places = [hellos[worker]["place"] for worker in workers]
        self._leaders = [workers[index] for index, place in enumerate(places) if place not in places[:index]]
        rows: dict[str, str] = {}
        for worker, after in zip(self._leaders, [*self._leaders[1:], None], strict=True):
            meeting = None if after is None else hellos[after]["meeting"]
            self._lines[worker].tell(parameters=self._parameters, leads=True, after=meeting)
        for worker in self._leaders:
            rows[hellos[worker]["place"]] = self._lines[worker].hear()["row"]
        mates = [worker for worker in workers if worker not in self._leaders]
        for worker in mates:
            self._lines[worker].tell(parameters=self._parameters, leads=False, row=rows[hellos[worker]["place"]])
        for worker in mates:
            self._lines[worker].hear()
        self._keep(CHAIN, come_in(hellos[self._leaders[0]]["meeting"], timeout_s=self._timeout_s))

    def _keep(self, worker: int, line: Line) -> None:
        self._lines[worker] = line
        if self.left:  # meanwhile, by another thread
            line.close()

    def _to_blame(self) -> str:
        """Say which members have gone or have failed, if any."""
        said, until_s = [], time.monotonic() + BLAME_TIMEOUT_S
        for worker in self._awaited:
            try:
                Line(self._lines[worker].connection, max(0.01, until_s - time.monotonic())).hear()
            except ConnectionError:
                said.append(f"{self._names[worker]} has gone; ")
            except (OSError, ValueError, BackendError) as error:
                said.append(f"{self._names[worker]}: {error}; ")
        return "".join(said)

    def _broken(self, phase: str, began: float, error: Exception, who: str) -> BackendError:
        seconds = time.perf_counter() - began
        why = f"{who}{error}" if self._why_left is None else self._why_left
        failure = f"transfer failed: phase={phase} at {self._names[0]} after {seconds:.1f} s; {why}"
        self.leave(failure)
        return BackendError(failure)
