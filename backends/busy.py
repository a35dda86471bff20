"""Busy time of an event loop: its thread works, or waits for a processor."""

from __future__ import annotations

import time

SCHEDULER_STATISTICS = "/proc/thread-self/schedstat"
"""Linux: nanoseconds that this thread has run, and nanoseconds that it has waited for a processor."""


def busy_s() -> float:
    """Return the seconds that the calling thread has worked or, if the system counts them, waited for a processor."""
    try:
        with open(SCHEDULER_STATISTICS, encoding="ascii") as file:
            run_ns, wait_ns, _ = map(int, file.read().split())
    except (OSError, ValueError):
        return time.thread_time()
    return (run_ns + wait_ns) / 1e9
