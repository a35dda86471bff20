"""A worker's thread that receives weights while the worker generates.

Theory of operation. ``join`` starts a thread and returns at once; the thread joins the group, and from then on receives
whatever the sender sends, without being asked: the worker's own loop is not disturbed by a transfer, neither to begin
it nor to end it. Whether a version has arrived is read from the row's label when it is to be loaded. One worker of
every machine receives; the thread of any other ends when it sees the row.

Every thread has an object of its own: what an abandoned one does is seen by nobody. The next thread waits for it before
it makes a row: there are never two.

================  =========================================  ====================================================
thread            waits for                                  bounded by
================  =========================================  ====================================================
joining           the thread before; the others              ``timeout_s`` each
receiving         the sender's notice; then the bytes        not at all, but the end of the sender, and being
                                                             abandoned, end it at once; ``timeout_s`` per bucket
================  =========================================  ====================================================
"""

from __future__ import annotations

import contextlib
import os
import threading

import torch

from backends.transfer.layout import layout, seen_as
from backends.transfer.receiver import Membership, Receiver
from backends.transfer.shared_row import SharedRow, machine
from pipelinerl.errors import BackendError

NICER = 19
"""How much nicer the thread is: the engine's scheduler and front end, which decode waits for, go before it."""


class Staging:
    """The thread, and what it has received (mutable). Making it starts the thread.

    Args:
        member: What the worker joins the group with.
        before: The thread of the group before; it is abandoned.
    """

    def __init__(self, member: Membership, *, before: Staging | None = None) -> None:
        self._member = member
        self._abandoned = False
        self._receiver: Receiver | None = None
        self._failure = "it has not been joined yet"
        decoding = os.sched_getaffinity(0)  # of the worker's own loop: this is called from there
        if before is not None:
            before.abandon()
        self._thread = threading.Thread(target=self._run, args=(decoding, before), name="weights", daemon=True)
        self._thread.start()

    def abandon(self) -> None:
        """Have the thread end, without waiting for it."""
        self._abandoned = True
        if self._receiver is not None:
            self._receiver.close()

    def staged(self, label: str) -> dict[str, torch.Tensor]:
        """Return the parameters by name, as they lie in the row, without a copy.

        Raises:
            BackendError: If it is not these weights that lie there, complete and verified.
        """
        receiver = self._receiver
        if receiver is None:
            raise BackendError(f"no weights are staged: {self._failure}")
        if (there := receiver.row.label) != label:
            what = f"{there[:16]} are" if there else "nothing that is complete and right is"
            raise BackendError(f"weights {label[:16]} are not staged: {what}")
        return {place.name: seen_as(receiver.row.row, place) for place in layout(receiver.parameters)}

    # ------------------------------------------------------------------------------------ in the thread

    def _run(self, decoding: set[int], before: Staging | None) -> None:
        # A thread begins on the cores of whoever starts it: it would take turns with decode.
        with contextlib.suppress(OSError):  # there are no others
            os.sched_setaffinity(0, set(range(os.cpu_count() or 1)) - decoding)
        os.nice(NICER)  # this thread and those that it starts: on Linux threads have priorities of their own
        try:
            if self._member.device.type == "cuda":
                torch.cuda.set_device(self._member.device)
            self._receiver = receiver = self._join(before)
            while receiver.leads and not self._abandoned:
                receiver.receive(receiver.next_transfer())
        except Exception as error:  # the sender is told by the group, the engine when it is to load
            self._failure = str(error)
        finally:  # the row stays
            if self._receiver is not None:
                self._receiver.close()

    def _join(self, before: Staging | None) -> Receiver:
        reuse: SharedRow | None = None
        if before is not None:
            before._thread.join(self._member.timeout_s)
            if before._thread.is_alive():
                raise BackendError(f"the group before is still being waited for, after {self._member.timeout_s:g} s")
            reuse = before._take_row()
        return Receiver(self._member, place=machine(), reuse=reuse)

    def _take_row(self) -> SharedRow | None:
        """Let go of the row; return it if it was made here."""
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return None
        if not receiver.leads:
            receiver.row.close()
            return None
        return receiver.row
