"""Commands that measure what a plan does not know, ready to run, and what they cost."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipelinerl.config.check import CHECK_STEPS, check_config
from pipelinerl.config.run import RunConfig
from sim.planning.axes import AXES, choice_of
from sim.planning.candidates import Candidate, Screener
from sim.planning.draws import Unknown

START_MINUTES = 5.0
"""Minutes until engines and trainer have loaded a model: J, vLLM's start with its graphs takes 1 to 5."""
MEASURE_MINUTES = 2.0
"""Minutes of `pipelinerl measure` (docs/calibration.md)."""

OF_A_CHECK = {
    False: (Unknown.GENERATION, Unknown.TRAINING, Unknown.WEIGHTS_APART),
    True: (Unknown.GENERATION, Unknown.TRAINING, Unknown.WEIGHTS_COLOCATED, Unknown.SWITCH, Unknown.ANSWERS),
}
"""What a short run shows, apart and colocated. Apart, short answers are done first: their mean says nothing."""
NUMBERS = {
    Unknown.TRAINING: "--train-step-s SECONDS --out measured_step.toml",
    Unknown.WEIGHTS_APART: "--weight-sync-s SECONDS --out measured_sync.toml",
}
"""Without ``[train]``: what ``calibrate`` takes of measurements in a system of your own."""


@dataclass(frozen=True, slots=True)
class Instrument:
    """One command."""

    shows: tuple[Unknown, ...]
    command: str
    minutes: float | None
    gpus: int | None


class Instruments:
    """The commands of a plan.

    Args:
        config: The run file.
        run_file: Its path, and the overrides it was read with, as words of a command.
        arms: The best way of each arm, colocated or not.
        screener: Gives its steady state.
        whole: Whether the run file has all that a run needs; else commands say what the plan found.
        one_gpu: Whether the model runs on one GPU.
    """

    def __init__(
        self,
        config: RunConfig,
        run_file: str,
        arms: dict[bool, Candidate],
        screener: Screener,
        *,
        whole: bool,
        one_gpu: bool,
    ) -> None:
        self._config, self._file, self._whole = config, run_file, whole
        self.all = [self._measure()] if one_gpu else []
        if config.train is None:
            sets = "" if whole else self._sets(arms.get(False) or arms[True])
            self.all += [
                Instrument((shows,), f"pipelinerl calibrate --run {self._file}{sets} {number}", None, None)
                for shows, number in NUMBERS.items()
            ]
        else:
            self.all += [self._check(way, screener) for _, way in sorted(arms.items())]

    def _measure(self) -> Instrument:
        model = "MODEL_FOLDER" if self._config.train is None else self._config.train.model.path
        command = f"pipelinerl measure --model {shlex.quote(model)} --out measured"
        return Instrument((Unknown.GENERATION,), command, MEASURE_MINUTES, 1)

    def _check(self, way: Candidate, screener: Screener) -> Instrument:
        config = check_config(way.config)
        estimate = screener.screen(replace(way, config=config)).estimate
        seconds = CHECK_STEPS * estimate.step_s + estimate.start_s
        command = f"pipelinerl train {self._file} --check{self._sets(way)} --out check_{way.family}"
        return Instrument(
            OF_A_CHECK[way.config.colocated],
            command,
            START_MINUTES + seconds / 60,
            config.cluster.accelerators,
        )

    def _sets(self, way: Candidate) -> str:
        """Return the overrides that make the run file one of this way."""
        its, own = choice_of(way.config), choice_of(self._config)
        fewer = f" --set cluster.accelerators={way.config.cluster.accelerators}" if way.idle else ""
        return fewer + "".join(
            f" --set {axis.key}={its[axis.name]}"
            for axis in AXES
            if axis.applies_to(way.schedule)
            and its[axis.name] is not None
            and not (self._whole and its[axis.name] == own[axis.name])
        )

    def for_all(self, names: Sequence[Unknown]) -> tuple[list[str], float | None, int | None]:
        """Return the fewest commands that show all of these, their minutes, and the GPUs of the largest.

        No command if there are none that show all; minutes and GPUs are None where they are not known.
        """
        for some in _subsets(self.all):
            if set(names) <= {shown for one in some for shown in one.shows}:
                minutes = [one.minutes for one in some if one.minutes is not None]
                gpus = [one.gpus for one in some if one.gpus is not None]
                known = len(minutes) == len(gpus) == len(some)
                return [one.command for one in some], sum(minutes) if known else None, max(gpus) if known else None
        return [], None, None


def _subsets(instruments: Sequence[Instrument]) -> list[list[Instrument]]:
    """Return every choice of instruments, the fewest first, the earlier first."""
    chosen = [
        [one for place, one in enumerate(instruments) if number >> place & 1]
        for number in range(1, 1 << len(instruments))
    ]
    return sorted(chosen, key=len)
