"""The base of all tables of a run file, and of JSON reports, which their writers and readers share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from pipelinerl.errors import ConfigError
from pipelinerl.util.explain import explain
from pipelinerl.util.read import MOST_VALUES, read_text

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


class Report(StrictModel):
    """A table of a report; a field that is None and has a default is a key that is left out."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    @model_serializer(mode="wrap")
    def _leave_out_absent_keys(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        return {key: value for key, value in serialize(self).items() if value is not None or fields[key].is_required()}

    shown_by: ClassVar[Callable[[Any], str | None] | None] = None
    """Renderer of a report's HTML, set by ``pipelinerl.api``."""

    def _repr_html_(self) -> str | None:
        """Show itself in a notebook. None: as text."""
        return None if Report.shown_by is None else Report.shown_by(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values as JSON has them, keys in the order of the file."""
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, name: str) -> Self:
        """Return the report that ``to_dict`` gave; ConfigError, with ``name`` (usually the file), if it is wrong."""
        return cls._parsed(json.dumps(data), name)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the report that a JSON file holds; ConfigError as ``from_dict``, and if it cannot be read."""
        return cls._parsed(read_text(path), str(path))

    @classmethod
    def _parsed(cls, text: str, name: str) -> Self:
        if (num_values := sum(map(text.count, ",[{"))) > MOST_VALUES:
            raise ConfigError(f"{name} must hold at most {MOST_VALUES:,} values, got about {num_values:,}")
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            if fault["type"] == "json_invalid":
                line = f" is not valid JSON: {fault['ctx']['error']}"
            elif fault["type"] == "model_type" and not fault["loc"]:
                line = f" must hold a table, got {type(fault['input']).__name__}"
            else:
                line = f": {explain(error, cls)[0]}"
            raise ConfigError(name + line) from None


def equally_long(first: str, *others: str) -> Any:
    """Return the validator of a report whose lists of these keys must be equally long, where they are present."""

    def check(report: Any) -> Any:
        number = len(getattr(report, first))
        for key in others:
            values = getattr(report, key)
            if values is not None and len(values) != number:
                raise ValueError(f"{key} must have {number} values, got {len(values)}")
        return report

    return model_validator(mode="after")(check)


def data_frame(rows: Any) -> Any:
    """Return records as a pandas data frame; ConfigError without pandas, which comes with the extra ``math``."""
    try:
        import pandas as pd  # noqa: PLC0415  # not everybody has it
    except ModuleNotFoundError:
        raise ConfigError("to_frame() needs pandas, which is not installed: pip install pandas") from None
    return pd.DataFrame.from_records(rows)
