"""The base of all tables of a run file."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

# Limits of numbers in a run file, far above any real run: beyond them memory or whole numbers run out.

MOST = 1_000_000
"""Largest of most counts: sequences, optimizer steps, problems, GiB (count)."""
MOST_ACCELERATORS = 65_536
"""Largest number of accelerators, and so of engines (count)."""
MOST_ROLLOUTS = 10_000_000
"""Rollouts that slots, or the batches of one RL step, may hold (count). A simulated one takes about a kilobyte."""
MOST_TOKENS = 1_000_000_000
"""Longest prompt, answer or pack (tokens)."""
MOST_CACHED_TOKENS = 1_000_000_000_000
"""Largest KV cache of an engine (tokens)."""
LONGEST_S = 1e5
"""Longest time that a key may give: 28 hours (seconds). The simulator counts in picoseconds; a delay drawn at random
with this mean still fits into 64 bits."""

Count = Annotated[int, Field(ge=1, le=MOST)]
CountOrZero = Annotated[int, Field(ge=0, le=MOST)]
Accelerators = Annotated[int, Field(ge=1, le=MOST_ACCELERATORS)]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
TokensOrZero = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
CachedTokens = Annotated[int, Field(ge=1, le=MOST_CACHED_TOKENS)]
Seconds = Annotated[float, Field(ge=0, le=LONGEST_S)]
PositiveSeconds = Annotated[float, Field(gt=0, le=LONGEST_S)]


def _finite(settings: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(settings, allow_nan=False, default=str)  # a TOML file may hold dates
    except ValueError:
        raise PydanticCustomError("finite", "must hold finite numbers") from None
    return settings


Settings = Annotated[dict[str, Any], AfterValidator(_finite)]
"""Values that a run file can keep."""


class StrictModel(BaseModel):
    """Strict types, no unknown keys, frozen.

    The text under a field is its description. ``scripts/doc_tables.py`` reads it from the source: to have pydantic read
    it takes a tenth of a second of every start-up. For the same reason a model is built when it is first used.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)
