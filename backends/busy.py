"""How long a thread has been busy: what an event loop has no time for in the meantime."""

from __future__ import annotations

import time

SCHEDULER_STATISTICS = "/proc/thread-self/schedstat"
"""Linux: nanoseconds that this thread has run, and has waited for a processor."""


def busy_s() -> float:
    """Return the seconds that the calling thread has worked or waited for a processor since it began.

    Where the system does not tell the waits, only those that it has worked.
    """
    try:
        with open(SCHEDULER_STATISTICS, encoding="ascii") as file:
            run_ns, wait_ns, _ = map(int, file.read().split())
    except (OSError, ValueError):
        return time.thread_time()
    return (run_ns + wait_ns) / 1e9
