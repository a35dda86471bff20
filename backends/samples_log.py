"""Some answers of a run with their rewards and versions, to be read by people: samples.jsonl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backends.interface import Codec
from backends.rollouts import RolloutData
from pipelinerl.records.run_folder import SAMPLES_FILE
from pipelinerl.util.files import writing

PER_STEP = 2
"""Answers that are kept of a batch, and of an evaluation (count)."""
LONGEST_TEXT = 8192
"""What of a prompt or an answer is kept, from its beginning (characters)."""


class SamplesLog:
    """Writes them; a line is on disk as soon as its step is done.

    Args:
        out: The run's folder.
        codec: Tokens to text.
        go_on_after: Optimizer steps whose answers stay: the folder holds them already (count).
    """

    def __init__(self, out: Path, codec: Codec, *, go_on_after: int = 0) -> None:
        self._path, self._codec = out / SAMPLES_FILE, codec
        kept = self._path.read_text(encoding="utf-8").splitlines(keepends=True) if self._path.exists() else []
        with writing(self._path):
            self._path.write_text("".join(line for line in kept if _step_of(line) <= go_on_after), encoding="utf-8")

    def trained(self, step: int, rollouts: Sequence[RolloutData]) -> None:
        """Keep some rollouts of the batch of an optimizer step (counted from 1), of different groups if it has them."""
        self._write({"step": step, "held_out": False}, [(one, one.reward) for one in _spread(rollouts)])

    def evaluated(self, step: int, answers: Sequence[tuple[RolloutData, float]]) -> None:
        """Keep some answers to held-out problems, with their rewards."""
        self._write({"step": step, "held_out": True}, _spread(answers))

    def _write(self, about: dict[str, Any], answers: Sequence[tuple[RolloutData, float]]) -> None:
        lines = [
            json.dumps(
                {
                    **about,
                    "prompt": data.problem.prompt[:LONGEST_TEXT],
                    "answer": self._codec.decode(data.tokens)[:LONGEST_TEXT],
                    "tokens": data.spans.num_tokens,
                    "reward": reward,
                    "versions": list(data.spans.versions),
                }
            )
            for data, reward in answers
        ]
        with writing(self._path), self._path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)


def _spread(items: Sequence[Any]) -> list[Any]:
    """Return ``PER_STEP`` items at equal distances, or all if they are fewer."""
    number = min(PER_STEP, len(items))
    return [items[place * len(items) // number] for place in range(number)]


def _step_of(line: str) -> float:
    """Return the step of a line; of one that was cut, one after all others."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
