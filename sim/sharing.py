"""Several jobs whose trainers share accelerators: each trains when it has a batch and the others do not.

Theory of operation. Each job is a ``SimulatedCluster`` with engines of its own; all are on one clock. A trainer asks
for the shared accelerators with each micro-batch, first come first served, and gives them back with the weights
published. Another job than before waits ``switch_s`` for its states to be loaded. Nobody is interrupted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.records.comparison_report import JobReport, SharingReport
from pipelinerl.records.recording import Recording
from pipelinerl.scheduler.kinds import check_lags
from sim.clock import CLUSTER_PRIORITY, Clock, Wake, to_seconds, to_ticks
from sim.cluster import SimulatedCluster
from sim.run import no_garbage_collection, simulate


class SharedTrainer:
    """Accelerators that train for jobs in turn (mutable)."""

    def __init__(self, clock: Clock, switch_s: float) -> None:
        self.clock, self._switch_ticks = clock, to_ticks(switch_s)
        self._queue: deque[tuple[str, int, Callable[[], None]]] = deque()  # job, tick at which it asked, what to do
        self._holder, self._last = "", ""  # jobs; none has an empty name
        self.num_switches = 0
        self.waited_ticks: dict[str, int] = {}
        """Ticks between asking and training, by job: for other jobs, and for the switch to it."""

    def ask(self, job: str, work: Callable[[], None], *, holds: bool = False) -> None:
        """Call once the accelerators are this job's; at once if they are and it ``holds`` them for this, too."""
        if holds and self._holder == job:
            work()
            return
        self._queue.append((job, self.clock.now, work))
        self._next()

    def release(self, job: str) -> None:
        """Let the next job have them; this one must."""
        assert self._holder == job
        self._holder = ""
        self._next()

    def _next(self) -> None:
        if self._holder or not self._queue:
            return
        job, asked, work = self._queue.popleft()
        switches = self._last not in ("", job)
        switch_ticks = self._switch_ticks if switches else 0
        self._holder, self._last, self.num_switches = job, job, self.num_switches + switches
        self.waited_ticks[job] = self.waited_ticks.get(job, 0) + self.clock.now - asked + switch_ticks
        if switch_ticks:
            Wake(self.clock, switch_ticks, CLUSTER_PRIORITY, 0, lambda _: work())
        else:
            work()


class _OneJob:
    """A job's access to the shared accelerators."""

    def __init__(self, shared: SharedTrainer, job: str) -> None:
        self.clock = shared.clock
        self.ask, self.release = partial(shared.ask, job), partial(shared.release, job)


def share(configs: Mapping[str, RunConfig], *, switch_s: float) -> SharingReport:
    """Simulate each job alone, then all with one pool of accelerators that train.

    Raises ConfigError if they cannot share them, and as ``simulate``.
    """
    sizes = {name: config.training_accelerators for name, config in configs.items()}
    if len(configs) < 2 or len(set(sizes.values())) > 1:
        raise ConfigError(
            f"jobs that share must be two at least, with equally many accelerators that train, got {sizes}"
        )
    for name, config in configs.items():
        for key in ("fleet", "faults", "policy"):
            if getattr(config, key) is not None:
                raise ConfigError(f"{name}: {key} must be left out of a job that shares accelerators")
        if config.colocated:
            raise ConfigError(f"{name}: scheduler.kind must have two pools, got {config.scheduler.kind!r}")
    alone = {name: simulate(config) for name, config in configs.items()}
    shared = SharedTrainer(Clock(), switch_s)
    clusters = {name: SimulatedCluster(config, trainer=_OneJob(shared, name)) for name, config in configs.items()}
    recordings = {name: Recording(config) for name, config in configs.items()}
    with no_garbage_collection():
        ends = []
        for name, cluster in clusters.items():
            ends.append(done := cluster.begin(recordings[name].recorder))
            done.callbacks.append(lambda _, cluster=cluster: cluster.finish())  # type: ignore[misc]
        for done in ends:
            shared.clock.run_until(done)
    jobs = []
    for name, recording in recordings.items():
        together = recording.finish(clusters[name].measured())
        check_lags(configs[name].scheduler, together.lag.max, optimizer_steps=together.optimizer_steps)
        waited_s = to_seconds(shared.waited_ticks.get(name, 0))
        jobs.append(JobReport(name=name, alone=alone[name], together=together, waited_s=waited_s))
    training = next(iter(sizes.values()))
    generation_s = sum(one.together.duration_s * configs[one.name].generation_accelerators for one in jobs)
    last_s = max(one.together.duration_s for one in jobs)
    alone_s = sum(one.alone.duration_s * configs[one.name].cluster.accelerators for one in jobs)
    return SharingReport(
        jobs=jobs,
        switch_s=switch_s,
        switches=shared.num_switches,
        gpu_hours_alone=alone_s / 3600,
        gpu_hours_together=(generation_s + training * last_s) / 3600,
    )
