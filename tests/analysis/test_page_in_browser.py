"""A page in a headless Chromium: it draws without errors and loads nothing; hover, switches, scales, tables work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import needs_browser, opened, wait_until
from needs import need

need("playwright")
pytestmark = needs_browser

from playwright.sync_api import Page as Tab  # noqa: E402

from analysis.page import page_html, run_charts  # noqa: E402
from analysis.read import Run  # noqa: E402
from pipelinerl.pages.page import Page, Section, Table  # noqa: E402
from pipelinerl.records.comparison_report import ComparisonReport  # noqa: E402

ROWS = [["pipeline", "9,500", "-"], ["conventional G=8", "70", "3%"], ["conventional G=32", "1,200", "20%"]]
HOSTILE = "</script><script>document.title = 'taken'</script><%= 1 %>"

VISIBLE = """name => {
  const models = new Set(Bokeh.documents[0].roots().flatMap(root => [...root.references()]))
  const items = [...models].filter(one => one.type === "LegendItem" && one.label.value === name)
  return [...new Set(items.flatMap(item => item.renderers))].map(one => one.visible)
}"""
"""Whether each mark of a legend's name is drawn, in every figure."""
PLACE = """([x, y]) => {
  const figure = Bokeh.documents[0].get_model_by_name("figure0").tabs[0].child
  const view = [...Bokeh.index.query(one => one.model === figure)][0]
  view.el.scrollIntoView()
  const box = view.canvas_view.el.getBoundingClientRect()
  return [box.x + view.frame.x_scale.compute(x), box.y + view.frame.y_scale.compute(y)]
}"""
"""Window coordinates of a point of the first figure."""
RANGES = """() => {
  const {x_range, y_range} = Bokeh.documents[0].get_model_by_name("figure0").tabs[0].child
  return [[x_range.start, x_range.end], [y_range.start, y_range.end]]
}"""
"""Ranges of both axes of the first figure."""
SCALE = """() => {
  const figure = Bokeh.documents[0].get_model_by_name("figure0")
  return figure.tabs[figure.active].child.y_scale.type
}"""
"""Scale of the vertical axis in the open tab of the first figure."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, runs: list[Run], comparison: ComparisonReport) -> Path:
    page = Page(
        title="A title",
        question="Which?",
        answer="This one.",
        facts=[("Band", HOSTILE)],
        sections=[Section("depends on", [HOSTILE])],
        tables=[
            Table(title="rates", columns=("scheduler", "tok/s", "wait"), rows=ROWS),
            Table(title="names", columns=("name",), rows=[[HOSTILE]]),
        ],
        assumptions=[HOSTILE],
        run_file="seed = 0\n",
    )
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page_html(page, run_charts(runs, comparison)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def page(path: Path) -> Iterator[Tab]:
    """The page, open."""
    with opened(path) as tab:
        yield tab


@pytest.fixture
def tab(page: Tab) -> Tab:
    """The page with the window size and color scheme of its start, after any other test."""
    page.emulate_media(media="screen", color_scheme="light")
    page.set_viewport_size({"width": 1000, "height": 900})
    wait_until(lambda: page.evaluate("innerWidth"), 1000)
    return page


def test_markup_in_names_is_shown_as_text(tab: Tab, path: Path) -> None:
    assert tab.title() == "A title"
    assert tab.get_by_text(HOSTILE).count() == 4  # as text, in a fact, a list, a table and the assumptions
    assert path.stat().st_size < 3e6


def test_a_name_in_a_legend_switches_a_run_off_in_every_figure(tab: Tab) -> None:
    other, name = (tab.evaluate(VISIBLE, one) for one in ("pipeline", "conventional G=8"))
    assert len(other) == len(name) == 9  # four figures, linear and logarithmic, and the speed-ups
    assert all(other + name)
    entry = tab.locator(".bk-Legend:visible").first.get_by_text("conventional G=8")
    entry.click()
    wait_until(lambda: any(tab.evaluate(VISIBLE, "conventional G=8")), False)
    assert all(tab.evaluate(VISIBLE, "pipeline"))
    entry.click()
    wait_until(lambda: all(tab.evaluate(VISIBLE, "conventional G=8")), True)


def test_the_mouse_over_a_point_shows_its_numbers(tab: Tab, runs: list[Run]) -> None:
    report = runs[0].report
    tab.mouse.move(*tab.evaluate(PLACE, [report.lag.max, report.tokens_per_s]))
    tooltip = tab.locator(".bk-Tooltip:visible")
    for text in (runs[0].name, f"{report.tokens_per_s:,.0f} tokens/s", str(report.lag.max)):
        tooltip.get_by_text(text, exact=True).wait_for()


def test_a_box_drawn_with_the_mouse_is_zoomed_to_and_reset_goes_back(tab: Tab) -> None:
    before = tab.evaluate(RANGES)
    (left, right), (low, high) = before
    corners = [[left + 0.25 * (right - left), low + 0.25 * (high - low)], [(left + right) / 2, (low + high) / 2]]
    tab.locator(".bk-tool-icon-box-zoom:visible").first.click()
    tab.mouse.move(*tab.evaluate(PLACE, corners[0]))
    tab.mouse.down()
    tab.mouse.move(*tab.evaluate(PLACE, corners[1]), steps=3)
    tab.mouse.up()
    wait_until(lambda: tab.evaluate(RANGES) != before, True)
    for zoomed, wanted, whole in zip(tab.evaluate(RANGES), zip(*corners, strict=True), before, strict=True):
        assert zoomed == pytest.approx(wanted, abs=0.01 * (whole[1] - whole[0]))  # a pixel
    tab.locator(".bk-tool-icon-reset:visible").first.click()
    wait_until(lambda: tab.evaluate(RANGES), before)


def test_a_figure_has_a_linear_and_a_logarithmic_scale(tab: Tab) -> None:
    for name, scale in (("logarithmic", "LogScale"), ("linear", "LinearScale")):
        tab.get_by_text(name, exact=True).first.click()
        wait_until(lambda: tab.evaluate(SCALE), scale)


def test_a_click_on_a_column_sorts_by_its_numbers(tab: Tab) -> None:
    def first_column() -> list[str]:
        return tab.locator(".sortable").first.locator("tbody td:first-child").all_inner_texts()

    assert first_column() == [row[0] for row in ROWS]
    header = tab.get_by_role("button", name="tok/s")
    header.click()
    wait_until(first_column, ["conventional G=8", "conventional G=32", "pipeline"])
    header.click()
    wait_until(first_column, ["pipeline", "conventional G=32", "conventional G=8"])


def test_a_page_follows_the_dark_scheme_and_fits_a_phone(tab: Tab) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    wait_until(lambda: tab.evaluate(paper), "rgb(255, 255, 255)")
    tab.emulate_media(color_scheme="dark")
    wait_until(lambda: tab.evaluate(paper), "rgb(22, 24, 28)")
    tab.emulate_media(media="print", color_scheme="dark")
    wait_until(lambda: tab.evaluate(paper), "rgb(255, 255, 255)")
    tab.emulate_media(media="screen", color_scheme="light")
    tab.set_viewport_size({"width": 390, "height": 800})
    wait_until(lambda: tab.evaluate("document.querySelector('.bk-Tabs').getBoundingClientRect().width <= 390"), True)
    wait_until(lambda: tab.evaluate("document.documentElement.scrollWidth"), 390)
