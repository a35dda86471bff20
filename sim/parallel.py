"""Run one function on many jobs at the same time: in processes of this machine, or on a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import spawn
from types import FrameType
from typing import TypeVar

from pipelinerl.errors import ConfigError, RunFailedError

NO_MAIN_GUARD = 78
"""Exit status of a worker that has run the script of the process that started it."""

Job = TypeVar("Job")
Result = TypeVar("Result")


def run_all(
    function: Callable[[Job], Result], jobs: Sequence[Job], *, workers: int | None = None
) -> Generator[Result, None, None]:
    """Yield the result of each job as it ends; jobs start in order, and closing the generator ends the others.

    ``function`` is of a module, so that other processes find it. With one of ``workers`` no process is started; None:
    one per core. Raises RunFailedError if a worker died, and the others with it, after all results that were ready;
    ConfigError if workers run the script that has called this, for want of a main guard.
    """
    workers = max(1, min(workers or os.cpu_count() or 1, len(jobs)))
    if workers == 1:
        yield from map(function, jobs)
        return
    _end_if_this_is_a_worker_that_imports_the_script()
    others = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_end_with_parent)
    with on_interrupt(signal.SIG_IGN):  # by the workers: Ctrl-C is for this process alone
        futures = [executor.submit(function, job) for job in jobs]
    processes = set(multiprocessing.active_children()) - others
    died = False
    try:
        for future in as_completed(futures):
            try:
                yield future.result()
            except BrokenProcessPool:
                died = True
    finally:
        if not all(future.done() for future in futures):
            for process in processes:
                process.terminate()
        executor.shutdown(cancel_futures=True)
    if any(process.exitcode == NO_MAIN_GUARD for process in processes):
        raise ConfigError(
            "worker processes import the script that starts them, and this one would start its own: put what it does "
            "under if __name__ == '__main__':, or ask for workers=1"
        )
    if died:
        raise RunFailedError(
            "a worker process died, perhaps for lack of memory; its run and those not yet begun are lost"
        )


def run_all_on_ray(
    function: Callable[[Job], Result], jobs: Sequence[Job], *, address: str
) -> Generator[Result, None, None]:
    """Yield the result of each job as it ends, from a running Ray cluster on whose nodes this package is installed.

    ``function`` is of a module; ``address`` may be ``auto``. Raises ConfigError if Ray is not installed, or there is no
    cluster.
    """
    try:
        import ray  # noqa: PLC0415 - needed only with a cluster
    except ModuleNotFoundError:
        raise ConfigError(f"--ray {address} needs Ray; install it with: pip install ray") from None
    try:
        ray.init(address=address, ignore_reinit_error=True, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"--ray must be the address of a running Ray cluster, got {address}: {reason}") from None
    try:
        remote = ray.remote(function)
        waiting = [remote.remote(job) for job in jobs]
        while waiting:
            (done,), waiting = ray.wait(waiting)
            yield ray.get(done)
    finally:
        ray.shutdown()


def _end_if_this_is_a_worker_that_imports_the_script() -> None:
    """End a worker that came here by the script it imports, before it makes a semaphore.

    The first such worker breaks the pool, which kills the others: Python would warn of the semaphores they leave.
    """
    try:
        spawn.get_preparation_data("worker")
    except RuntimeError:  # no process may be started while the main module is imported
        sys.exit(NO_MAIN_GUARD)


def _end_with_parent() -> None:
    """Have this worker end when the process that started it is gone, however that ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@contextmanager
def on_interrupt(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> Iterator[None]:
    """Handle Ctrl-C, where this thread may and the process does not ignore it.

    Processes that are started meanwhile inherit for good that it is ignored.
    """
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
