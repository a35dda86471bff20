"""Plans of several cases of one question: other sizes of the cluster, GPUs, ways to bring weights to the engines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipelinerl.config.question import Question
from pipelinerl.errors import ConfigError, RunFailedError
from pipelinerl.records.plan_report import PlanReport
from sim.planning.search import plan
from sim.planning.simulate import OnProgress


@dataclass(frozen=True, slots=True)
class PlannedCase:
    """A case and its plan."""

    name: str
    """What it differs in from the others; empty if there is but one."""
    report: PlanReport | None
    """The plan. None: nothing keeps to the limits, or nothing fits."""
    failure: str | None = None
    """Why there is none."""

    @property
    def folder(self) -> str:
        """The name of its folder, of several cases."""
        return re.sub(r"[^\w.]+", "_", self.name)


def plan_cases(
    question: Question,
    *,
    out: Path | None = None,
    workers: int | None = None,
    ray_address: str | None = None,
    on_progress: OnProgress = lambda *_: None,
    measured: Sequence[Path] = (),
    run_file: str = "RUN.toml",
    against: tuple[str, PlanReport] | None = None,
) -> list[PlannedCase]:
    """Plan every case of a question; the first also tells what its assumptions decide.

    On Ctrl-C the case that is under way keeps what was simulated, and those after it are left out.

    Args:
        question: What is asked.
        out: Folder for the plan, or of several for a folder each.
        workers: Processes (count). None: one per core.
        ray_address: Simulate on this Ray cluster instead.
        on_progress: As of ``plan``; of several cases each stage has the name of its case.
        measured: Measurements to merge into each.
        run_file: As of ``plan``.
        against: Another plan to compare the first with, and its name.

    Raises:
        ConfigError: If the input is wrong, or nothing keeps to the limits in any case.
        RunFailedError: If no simulation ended.
    """
    several, done = len(question.cases) > 1, list[PlannedCase]()
    for case in question.cases:
        before = f"{case.name}: " if several else ""
        planned, first = PlannedCase(case.name, None), all(one.report is None for one in done)
        try:
            report = plan(
                case.config,
                out=out and (out / planned.folder if several else out),
                workers=workers,
                ray_address=ray_address,
                on_progress=lambda stage, *numbers, before=before: on_progress(before + stage, *numbers),
                measured=measured,
                run_file=run_file,
                whole=case.whole,
                assumed=question.assumed if first else (),
                against=against if first else None,
            )
        except (ConfigError, RunFailedError) as error:
            done.append(replace(planned, failure=str(error)))
            stop = isinstance(error, RunFailedError) or case is question.cases[-1]
            if stop and first:
                raise type(error)("\n".join(filter(None, (one.failure for one in done)))) from None
        else:
            done.append(replace(planned, report=report))
            stop = not report.search.complete
        if stop:
            break
    return done
