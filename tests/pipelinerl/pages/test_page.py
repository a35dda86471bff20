"""Words and numbers of all pages; a page in Markdown and on a terminal."""

from dataclasses import replace
from typing import Any

import pytest

from pipelinerl.pages.page import Layout, Page, Place, Section, Table, cost_line, duration, page_markdown, sort_values
from pipelinerl.pages.terminal import print_page
from pipelinerl.records.reports import Rates

TABLE = Table(
    title="numbers of [/] z",
    columns=("scenario", "arm", "tok/s"),
    rows=[["[red]x", "fast", "1,250"], ["[red]x", "A" * 90, "-"], ["[/] y", "a|b\nc", "123,456,789"]],
    note="A note.",
    layout=Layout.GROUPED,
)
PAGE = Page(
    title="A title",
    question="Which?",
    answer="The fast one.",
    facts=[("Cost", "none")],
    sections=[
        Section("why", ["It is [bold]fast."], Place.LINES),
        Section("assumed", ["cv = 1"], Place.LIST),
        Section("empty", [], Place.LIST),
        Section("failed", ["one arm"]),
    ],
    tables=[TABLE],
    assumptions=["all of it"],
    run_file="seed = 1\n",
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"), (0.0025, "2.5 ms"), (0.25649, "256.5 ms"), (0.99996, "1 s"), (1.92045, "1.92 s"),
        (33.868, "33.87 s"), (119.9, "119.9 s"), (120.0, "2 min"), (7199.0, "120 min"), (7200.0, "2 h"),
        (9e6, "2,500 h"), (9e9, "2,500,000 h"),
    ],
)  # fmt: skip
def test_a_time_span_is_in_the_unit_that_reads_best(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_cost_is_a_line_with_the_range_of_each_number() -> None:
    cost, dear = (Rates(gpus=4, usd_per_hour=12.0, watts=2800.0).cost(seconds, tokens=8e6) for seconds in (7200, 9000))
    assert cost_line(cost, [cost, dear]) == (
        "3 USD (3 to 3.75) or 1 GPU-hours (1 to 1.25) per million trained tokens; "
        "24 USD (24 to 30), 8 GPU-hours (8 to 10), at most 5.6 kWh (5.6 to 7) for the run"
    )
    unpriced = Rates(gpus=4, usd_per_hour=None, watts=None).cost(7200, tokens=8e6)
    assert cost_line(unpriced) == "1 GPU-hours per million trained tokens; 8 GPU-hours for the run"


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (["1,250", "35%", "-1.5", "2e-3"], [1250.0, 35.0, -1.5, 0.002]),
        (["9,500-12k", "12k", "-", ""], [9500.0, 12000.0, None, None]),
        (["7", "seven"], ["7", "seven"]),
        (["-", ""], ["-", ""]),
        ([], []),
    ],
)
def test_a_column_is_sorted_by_the_numbers_that_its_cells_begin_with(cells: list[str], values: list[Any]) -> None:
    assert sort_values(cells) == values


def test_a_page_in_markdown() -> None:
    assert (
        page_markdown(PAGE).replace("A" * 90, "A")
        == """# A title

**Which?**

The fast one.

- Cost: none

## Why

- It is [bold]fast.

## Assumed

- cv = 1

## Failed

- one arm

## Numbers of [/] z

| scenario | arm | tok/s |
| --- | --- | --- |
| [red]x | fast | 1,250 |
| [red]x | A | - |
| [/] y | a\\|b c | 123,456,789 |

A note.

## Assumptions

- all of it

<details><summary>The run file</summary>

```toml
seed = 1
```

</details>
"""
    )


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Print a page, or a table alone, on a terminal of 80 columns; return the lines without spaces at their ends."""
    monkeypatch.setenv("COLUMNS", "80")

    def show(shown: Page | Table, **options: bool) -> list[str]:
        page = Page(title="", question="", answer="", tables=[shown]) if isinstance(shown, Table) else shown
        print_page(page, "[blue]run.toml", **options)
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80
        return [line.rstrip() for line in lines]

    return show


def test_a_page_on_a_terminal_is_its_table_its_sections_and_the_answer(printed: Any) -> None:
    """Square brackets are markup to rich, which drops what it knows and raises at a lone [/]; a long name wraps."""
    title, head, *rest = printed(PAGE)
    assert title == "[blue]run.toml: numbers of [/] z"
    assert head.split() == ["arm", "tok/s"]
    assert rest[-5:] == ["A note.", "It is [bold]fast.", "assumed:", "  cv = 1", "The fast one."]
    assert "".join(rest).count("A" * 20) >= 4  # in full
    assert printed(PAGE, only_table=True)[-1] == "A note."


def test_rows_are_below_a_heading_or_below_their_first_cell(printed: Any) -> None:
    def table(layout: Layout) -> list[str]:
        rows = [["x", "fast", "1,250"], ["x", "slow", "12"]]
        made = Table(title="t", columns=("scenario", "arm", "tok/s"), rows=rows, layout=layout)
        lines = [line for line in printed(made) if line]
        return lines[1 + next(number for number, line in enumerate(lines) if "───" in line) :]

    assert [line.split() for line in table(Layout.GROUPED)] == [["x"], ["fast", "1,250"], ["slow", "12"]]
    assert [line.split() for line in table(Layout.STACKED)] == [["x", "1,250"], ["fast"], ["x", "12"], ["slow"]]


def test_an_answer_with_reasons_is_above_the_table_and_its_commands_are_below_it(printed: Any) -> None:
    reasons = [Section("why", ["It is fast."], Place.ANSWER), Section("next", ["Measure:", "$ do it"], Place.ANSWER)]
    facts = [("Cost", "2 USD")]
    lines = printed(replace(PAGE, answer="One.\nTwo.", facts=facts, sections=reasons))
    assert lines[:6] == ["answer  One.", "        Two.", "why     It is fast.", "next    Measure:", "$ do it", ""]
    assert "One." not in lines[6:]
    assert lines[-1] == "cost: 2 USD"


def test_a_table_to_read_from_top_to_bottom_is_ruled_and_findings_have_colours(printed: Any) -> None:
    ruled = Table(title="t", columns=("", ""), rows=[["busy", "2 %"]], sortable=False, texts=("",))
    assert any(line.startswith("│ busy │ 2 %") for line in printed(ruled))
    found = Table(title="t", columns=("what", "finding"), rows=[["links", "ok"], ["disk", "wrong"]])
    assert [line.split() for line in printed(found)[-3:-1]] == [["links", "ok"], ["disk", "wrong"]]


@pytest.mark.parametrize("layout", [Layout.PLAIN, Layout.STACKED])
@pytest.mark.parametrize("width", [30, 40, 120])
def test_a_column_for_which_a_terminal_has_no_room_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int, layout: Layout
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    numbers = [f"number{place}" for place in range(6)]
    row = ["best", "a b", *(f"{one:,}" for one in range(1000, 1006))]
    table = Table(title="t", columns=("", "candidate", *numbers), rows=[row])
    print_page(replace(PAGE, tables=[replace(table, layout=layout)]), "run.toml", only_table=True)
    drawn, _, left_out = capsys.readouterr().out.partition("left out at")
    shown = [number for number in numbers if number in drawn]
    assert "best" in drawn
    assert [one for one in numbers if one in left_out] == numbers[len(shown) :]
    assert all(f"{1000 + place:,}" in drawn for place in range(len(shown)))
    assert (len(shown) == 6) == (width == 120)
