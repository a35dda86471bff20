"""The base of all tables of a run file."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """Strict types, no unknown keys, frozen.

    The text under a field is its description. ``scripts/doc_tables.py`` reads it from the source: to have pydantic read
    it takes a tenth of a second of every start-up. For the same reason a model is built when it is first used.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)
