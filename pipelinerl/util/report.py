"""A table of a JSON report as a type, shared by its writer and its readers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, SerializerFunctionWrapHandler, ValidationError, model_serializer, model_validator

from pipelinerl.errors import ConfigError
from pipelinerl.util.explain import explain
from pipelinerl.util.read import MOST_VALUES, read_text
from pipelinerl.util.strict_model import StrictModel


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
        """Return the report that plain values of ``to_dict`` hold.

        Raises ConfigError, a line with ``name``, usually the file, and the key, if one is missing, unknown or wrong.
        """
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
