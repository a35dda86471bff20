"""Plans of several cases of one question: other sizes of the cluster, GPUs, ways to bring weights to the engines."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from pipelinerl.config.question import Question
from pipelinerl.config.resolve import named_engine, named_hardware
from pipelinerl.errors import ConfigError, RunFailedError
from pipelinerl.records.plan_report import PlanReport
from sim.planning.search import plan
from sim.planning.simulate import HowToPlan


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


def plan_cases(question: Question, how: HowToPlan) -> list[PlannedCase]:
    """Plan every case of a question; the first also tells what its assumptions decide.

    On Ctrl-C the case that is under way keeps what was simulated, and those after it are left out.

    Args:
        question: What is asked.
        how: As of ``plan``. Of several cases each stage has the name of its case, and the first is compared.

    Raises:
        ConfigError: If the input is wrong, or nothing keeps to the limits in any case.
        RunFailedError: If no simulation ended.
    """
    for case in question.cases:  # what the catalogue does not know is wrong input, and no case that does not fit
        if named := named_hardware(case.config.hardware):
            named_engine(case.config.hardware, *named)
    several, done = len(question.cases) > 1, list[PlannedCase]()
    for case in question.cases:
        before = f"{case.name}: " if several else ""
        planned, first = PlannedCase(case.name, None), all(one.report is None for one in done)
        its = replace(
            how,
            out=how.out and (how.out / planned.folder if several else how.out),
            on_progress=lambda stage, *numbers, before=before: how.on_progress(before + stage, *numbers),
            run_file=(*how.run_file, *(word for one in case.sets for word in ("--set", one))),
            against=how.against if first else None,
        )
        try:
            report = plan(case.config, its, whole=case.whole, assumed=question.assumed, effects=first)
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
