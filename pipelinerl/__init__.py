"""Plan and run asynchronous reinforcement learning of language models: one scheduler, simulated and real.

A run is one TOML file. Read it, simulate it, look at the report::

    import pipelinerl as prl

    run = prl.load_run("examples/quickstart.toml", overrides=["scheduler.max_lag=4"])
    report = prl.simulate(run)
    print(report.tokens_per_s, report.lag.mean, report.bottleneck)
    report.steps           # a row per optimizer step, as a numpy record array
    report.to_dict()       # the content of summary.json
    report.to_frame()      # the rows as a pandas data frame; in a notebook a report shows itself, table and figure

=====================================  ==============================================================================
``load_run(path, overrides, seed)``    reads and checks a run file; a ``RunConfig``
``simulate(run)``                      one run in simulated time; a ``RunReport``
``compare(run)``                       the same workload under several schedules; a ``ComparisonReport``
``plan(run)``, ``plan(model=..., …)``    the search for the best way to run on a cluster; a ``PlanReport``
``replay(folder)``                     recorded events into a fresh scheduler; a ``ReplayResult``
``plot(folders)``                      figures of runs, comparisons and plans; their paths
=====================================  ==============================================================================

``run`` is a ``RunConfig`` or the path of a run file. With ``out=FOLDER`` results are kept as the command line keeps
them. Training for real is a command, ``pipelinerl train``: it starts processes, and ends with them.

The scheduler is a pure object, and can be driven by hand: ``make_scheduler(settings, ...)`` gives a ``Scheduler``,
``start()`` its first commands, ``handle(event)`` those that follow. Events and commands are in ``events``.
A schedule of your own is a ``Scheduler`` and one ``ScheduleKind`` (docs/extending.md).

Wrong input raises ``ConfigError``, one line per fault; a run that could not reach its end ``RunFailedError``; a broken
trace ``TraceError``; an event that cannot have happened ``SchedulerError``. All are ``PipelineRLError``.

``import pipelinerl`` loads nothing else: each name is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelinerl.api import compare, plan, plot, replay, simulate
    from pipelinerl.config.run import RunConfig, load_run
    from pipelinerl.errors import ConfigError, PipelineRLError, RunFailedError, SchedulerError, TraceError
    from pipelinerl.records.comparison_report import ComparisonReport
    from pipelinerl.records.plan_report import PlanReport
    from pipelinerl.records.reports import RunReport
    from pipelinerl.records.trace import ReplayResult
    from pipelinerl.scheduler import events
    from pipelinerl.scheduler.base import Scheduler
    from pipelinerl.scheduler.kinds import ScheduleKind, make_scheduler

__version__ = "0.2.0"

__all__ = [
    "ComparisonReport", "ConfigError", "PipelineRLError", "PlanReport", "ReplayResult", "RunConfig", "RunFailedError",
    "RunReport", "ScheduleKind", "Scheduler", "SchedulerError", "TraceError", "__version__", "compare", "events",
    "load_run", "make_scheduler", "plan", "plot", "replay", "simulate",
]  # fmt: skip

_HOMES = {
    "pipelinerl.api": ("compare", "plan", "plot", "replay", "simulate"),
    "pipelinerl.config.run": ("RunConfig", "load_run"),
    "pipelinerl.errors": ("ConfigError", "PipelineRLError", "RunFailedError", "SchedulerError", "TraceError"),
    "pipelinerl.records.comparison_report": ("ComparisonReport",),
    "pipelinerl.records.plan_report": ("PlanReport",),
    "pipelinerl.records.reports": ("RunReport",),
    "pipelinerl.records.trace": ("ReplayResult",),
    "pipelinerl.scheduler": ("events",),
    "pipelinerl.scheduler.base": ("Scheduler",),
    "pipelinerl.scheduler.kinds": ("ScheduleKind", "make_scheduler"),
}


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = import_module(f"{home}.{name}") if name == "events" else getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
