"""Answers that grow in training: which plan when, and what switching gains over one plan for the whole run.

Theory of operation. The mean answer grows linearly. Candidates are the plans of the phases, and of all choices the one
that takes the least time over the phases. Each is screened in ``SLICES`` slices of the run. All train on the same
answers in a slice, so seconds add up: a run's throughput is the harmonic mean of its slices', weighted by tokens.
One plan throughout is a sequence, too: the cheapest one never loses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipelinerl.calibration.measured import Measured, merged
from pipelinerl.config.question import Question
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError, RunFailedError
from pipelinerl.records.plan_report import PhasesReport
from pipelinerl.records.run_folder import PLAN_FILE, write_json
from sim.planning.answer import PlannedCase
from sim.planning.screen import Screened, Screener, screen_all
from sim.planning.simulate import HowToPlan
from sim.planning.space import Choice, SearchSpace, with_values

SLICES = 16
"""Equal parts of a run between which a switch is possible (count)."""
RESTART_S = 600.0
"""Assumed time of a switch: a checkpoint, engines and trainer that start again, rollouts that are lost (seconds)."""


def compare_phases(question: Question, cases: Sequence[PlannedCase], how: HowToPlan) -> PhasesReport | None:
    """Return when to switch between the plans of growing answers; None if no plan is known for all."""
    if question.growth is None or len(cases) < len(question.cases):
        return None
    first, last = question.growth
    configs = [merged(case.config, how.measured) for case in question.cases]
    (base, measured), *_ = configs
    phases = [_screened(config, measured) for config, _ in configs]
    known = {label: one for phase in phases for label, one in phase.items()}
    planned = [case.report.recommended.label.removesuffix(" (run file)") for case in cases if case.report is not None]
    in_all = sorted(set.intersection(*map(set, phases)))
    best = sorted(in_all, key=lambda label: sum(_answer_s(phase[label]) for phase in phases))
    labels = [label for label in dict.fromkeys([*planned, *best[:1]]) if label in known]
    choices = [known[label].candidate.choice for label in labels]
    ends = [round(base.optimizer_steps * (part + 1) / SLICES) for part in range(SLICES)]
    seconds_CS = np.full((len(labels), SLICES), np.inf)
    for part, steps in enumerate(np.diff(ends, prepend=0)):
        mean = first + (last - first) * (part + 0.5) / SLICES
        length = base.workload.length.model_copy(update={"mean": mean})
        here = _screened(with_values(base, workload={"length": length}), measured, choices)
        for row, label in enumerate(labels):
            if label in here:
                seconds_CS[row, part] = steps * base.scheduler.train_batch_size * _answer_s(here[label])
    alone_C = seconds_CS.sum(axis=1)
    if not np.isfinite(alone_C.min(initial=np.inf)):
        return None
    total_s, path = cheapest(seconds_CS, RESTART_S)
    return PhasesReport(
        restart_s=RESTART_S,
        plans=[
            (labels[path[part]], ends[part], first + (last - first) * (part + 1) / SLICES)
            for part in range(SLICES)
            if part == SLICES - 1 or path[part] != path[part + 1]
        ],
        hours=total_s / 3600,
        hours_without_restarts=seconds_CS.min(axis=0).sum() / 3600,
        single=labels[int(alone_C.argmin())],
        single_hours=alone_C.min() / 3600,
    )


def with_phases(cases: Sequence[PlannedCase], phases: PhasesReport, out: Path | None) -> list[PlannedCase]:
    """Return the plans of the phases with their order, written to their folders in ``out`` again."""

    def ordered(one: PlannedCase) -> PlannedCase:
        if one.report is None or one.failure is not None:
            return one
        report, failure = one.report.model_copy(update={"phases": phases}), None
        if out is not None:
            try:
                write_json(out / one.folder / PLAN_FILE, report.to_dict())
            except (ConfigError, RunFailedError) as error:
                failure = str(error)
        return replace(one, report=report, failure=failure)

    return [ordered(one) for one in cases]


def cheapest(seconds_CS: np.ndarray, restart_s: float) -> tuple[float, list[int]]:
    """Return the least time of a run from those of slice S with candidate C, and the candidate of each slice."""
    total_C, before = seconds_CS[:, 0], list[np.ndarray]()
    for seconds_C in seconds_CS.T[1:]:
        other = int(total_C.argmin())
        before.append(np.where(total_C[other] + restart_s < total_C, other, np.arange(len(total_C))))
        total_C = np.minimum(total_C, total_C[other] + restart_s) + seconds_C
    path = [int(total_C.argmin())]
    for from_C in reversed(before):
        path.append(int(from_C[path[-1]]))
    return float(total_C.min()), path[::-1]


def _screened(config: RunConfig, measured: Measured, choices: Sequence[Choice] | None = None) -> dict[str, Screened]:
    """Return the choices that may keep to the limits, by label; None: of all."""
    space = SearchSpace.of(config, measured)
    kept, _ = screen_all(space, Screener(config, space.answers), choices)
    return {one.candidate.label: one for one in kept}


def _answer_s(one: Screened) -> float:
    """Return the seconds of a trained answer."""
    return one.estimate.step_s / one.candidate.config.scheduler.train_batch_size
