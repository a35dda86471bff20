"""Which cores of this machine the parts of a run on CPU keep to, where an accelerator is a core.

vLLM binds a worker's threads to its core and leaves all else to the system. Then engines, ranks and driver wait for
each other's cores, and a decode step takes as long as whatever else runs: what is measured of one part holds for this
mixture only. So every part keeps off the cores that other accelerators are.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator

from pipelinerl.config.run import RunConfig


def cores_for(config: RunConfig, accelerators: Iterable[int]) -> frozenset[int] | None:
    """Return the cores of what computes on some accelerators: all but those of the others.

    Args:
        config: What is to be run; ``config.train`` is there.
        accelerators: Numbers of them, those of the engines first.

    Returns:
        The cores. None: any, as accelerators are no cores, or those of a cluster of many machines, or too few are here.
    """
    assert config.train is not None
    if sys.platform != "linux":
        return None
    cores, all_of_them = sorted(os.sched_getaffinity(0)), range(config.cluster.accelerators)
    if config.train.device == "gpu" or config.train.ray_address is not None or len(all_of_them) > len(cores):
        return None
    return frozenset(cores) - {cores[one] for one in set(all_of_them) - set(accelerators)}


def trainer_cores(config: RunConfig) -> frozenset[int] | None:
    """Return the cores of the ranks, which the reference model and the driver share."""
    first = 0 if config.colocated else config.generation_accelerators
    return cores_for(config, range(first, config.cluster.accelerators))


def has_one_core() -> bool:
    """Return whether this process, and what it starts, keeps to one core."""
    return sys.platform == "linux" and len(os.sched_getaffinity(0)) == 1


def keep_to(cores: frozenset[int] | None) -> None:
    """Have this process and what it starts run on these cores only. None: on those that it has."""
    if cores is not None:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread), cores)


@contextlib.contextmanager
def kept_to(cores: frozenset[int] | None) -> Iterator[None]:
    """Keep to these cores for a while."""
    before = None if cores is None else frozenset(os.sched_getaffinity(0))
    keep_to(cores)
    try:
        yield
    finally:
        keep_to(before)
