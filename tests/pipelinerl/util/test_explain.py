"""Words for wrong input: key, rule and value of every fault that pydantic finds, and the nearest known name."""

import json
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

import pytest
from pydantic import Field, ValidationError, model_validator

from pipelinerl.util.explain import did_you_mean, explain, shown
from pipelinerl.util.strict_model import StrictModel


class Round(StrictModel):
    kind: Literal["round"]
    radius: float = Field(gt=0, lt=9)


class Square(StrictModel):
    kind: Literal["square"]
    width: float


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Part(StrictModel):
    shape: Annotated[Round | Square, Field(discriminator="kind")] | None = None
    count: int = Field(default=1, ge=1, le=4)
    names: list[str] = Field(default=[])
    colour: Colour = Field(default=Colour.RED, strict=False)
    good: bool = True
    tag: str = Field(default="t", min_length=1)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.count == 3:
            raise ValueError("count must not be 3")
        return self


class Machine(StrictModel):
    main: Part
    others: list[Part] = Field(default=[])


@pytest.mark.parametrize(
    ("part", "line"),
    [
        (
            {"counts": 1},
            "main.counts is an unknown key; did you mean count? allowed: colour, count, good, names, shape, tag",
        ),
        ({"x": 1}, "main.x is an unknown key; allowed: colour, count, good, names, shape, tag"),
        ({"count": 0}, "main.count must be at least 1, got 0"),
        ({"count": 5}, "main.count must be at most 4, got 5"),
        ({"count": 1.5}, "main.count must be a whole number, got 1.5"),
        ({"count": "1"}, 'main.count must be a whole number, got "1"'),
        ({"count": 3}, "main.count must not be 3"),
        ({"shape": {"kind": "round", "radius": 0}}, "main.shape.radius must be above 0, got 0"),
        ({"shape": {"kind": "round", "radius": 9.0}}, "main.shape.radius must be below 9, got 9"),
        ({"shape": {"kind": "round", "radius": True}}, "main.shape.radius must be a number, got true"),
        ({"shape": {"kind": "round", "radius": float("nan")}}, "main.shape.radius must be a number, got NaN"),
        ({"shape": {"kind": "square"}}, "main.shape.width is missing"),
        (
            {"shape": {"kind": "square", "with": 1}},
            "main.shape.with is an unknown key; did you mean width? allowed: kind, width",
        ),
        ({"shape": {"kind": "oval"}}, 'main.shape.kind must be one of round, square, got "oval"'),
        ({"shape": {}}, "main.shape.kind must be one of round, square, got none"),
        ({"names": 1}, "main.names must be a list, got 1"),
        ({"names": ["a", 1]}, "main.names.1 must be a string, got 1"),
        ({"good": "yes"}, 'main.good must be true or false, got "yes"'),
        ({"colour": "green"}, "main.colour must be 'red' or 'blue', got \"green\""),
        ({"tag": ""}, 'main.tag must not be empty, got ""'),
        ("round", 'main must be a table, got "round"'),
    ],
)  # fmt: skip
def test_a_fault_is_one_line_with_key_rule_and_value(part: Any, line: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Machine.model_validate_json(json.dumps({"main": part}))
    lines = explain(caught.value, Machine)
    assert line in lines
    assert "\n" not in "".join(lines)


def test_every_fault_has_a_line_and_a_list_its_index() -> None:
    with pytest.raises(ValidationError) as caught:
        Machine.model_validate_json(json.dumps({"others": [{}, {"nam": 1, "count": 0}]}))
    assert explain(caught.value, Machine) == [
        "main is missing",
        "others.1.count must be at least 1, got 0",
        "others.1.nam is an unknown key; did you mean names? allowed: colour, count, good, names, shape, tag",
    ]


def test_an_input_that_is_no_table_is_named_the_root() -> None:
    with pytest.raises(ValidationError) as caught:
        Machine.model_validate_json("[]")
    assert explain(caught.value, Machine) == ["the root must be a table, got []"]
    with pytest.raises(ValidationError) as caught:
        Machine.model_validate_json("{")
    (line,) = explain(caught.value, Machine)
    assert line.startswith("a value cannot be read: ")


def test_near_names_are_offered() -> None:
    assert did_you_mean("coumt", ["count", "colour"]) == "did you mean count? "
    assert did_you_mean("zzz", ["count"]) == ""
    near = did_you_mean("h10", ["h100", "h800"], shown_as={"h100": "H100", "h800": "H800"}, num_names=2, cutoff=0.4)
    assert near == "did you mean H100 or H800? "


def test_a_long_value_is_cut() -> None:
    assert shown("x" * 100) == '"' + "x" * 76 + "..."
