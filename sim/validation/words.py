"""What the words of a published row say besides its schedule: the precision, and what the simulation does not know."""

from __future__ import annotations

import re

from pipelinerl.hardware.catalogue import Precision
from sim.validation.records import PublishedRun

UNDERSTOOD = (
    r"a?sync\w*|pipeline\w*|stream\w*|(co|hybrid|on|fully|in|one|step|off|policy|engine|separate|apart|rollouts?)",
    r"colocat\w*|partial|inflight|flight|updates?|staleness|max|at|most|steps?|nodes?|gpus?|and|the|of",
    r"bf16|fp8|kv|cache|fsdp\d?|zero\d?|\d+(off)?",
)
"""Words of ``mode`` that the simulation knows: schedules, bounds, counts, precisions, and the kind of its trainer."""


def unknown_words(row: PublishedRun) -> tuple[str, ...]:
    """Return the words of ``mode`` that change nothing in the simulation; names of the row's own are none."""
    own = " ".join((row.system, row.source, row.model, row.hw)).lower()
    known = "|".join(UNDERSTOOD)
    words = re.split(r"[\s,;_+()=<≤/]+", row.mode)
    return tuple(word for word in words if word and word.lower() not in own and not _is_known(word.lower(), known))


def _is_known(word: str, known: str) -> bool:
    return all(re.fullmatch(known, part) for part in word.split("-") if part)


def precisions(row: PublishedRun, assumed: list[str]) -> tuple[Precision, Precision]:
    """Return the formats of an engine's weights and cache, and note what of them is assumed.

    "fp8" in ``precision`` or ``mode`` is that of the engines' weights; of the cache only where "cache" or "kv" is next
    to it. Training is in bf16 whatever they say.
    """
    text = f"{row.precision} {row.mode}".lower()
    if "fp8" not in text:
        if "bf16" not in text or "not stated" in text:
            assumed.append("bf16")
        return Precision.BF16, Precision.BF16
    if not re.search(r"bf16 train|train\w* (in )?bf16", text):
        assumed.append("training in bf16")
    cache = re.search(r"fp8 (kv|cache)|(kv|cache) (in )?fp8", text)
    return Precision.FP8, Precision.FP8 if cache else Precision.BF16
