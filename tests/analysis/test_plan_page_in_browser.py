"""The page of a plan, and of the plans of two cases, in a headless Chromium: the first screen, the rest folded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from browser import needs_browser, opened, wait_until
from needs import need
from tiny_plan import priced_plan

need("playwright")
pytestmark = needs_browser

from analysis.figures import cases_charts, plan_charts  # noqa: E402
from analysis.page import page_html  # noqa: E402
from pipelinerl.pages.page import Page  # noqa: E402
from pipelinerl.pages.plans import cases_page, plan_page  # noqa: E402
from pipelinerl.records.plan_report import PlanReport  # noqa: E402

WIDTHS = "[...document.querySelectorAll('svg[role=img] rect')].map(one => one.getBoundingClientRect().width)"
OPENED = "[...document.querySelectorAll('details')].filter(one => one.open).length"


def made(**changed: Any) -> PlanReport:
    return priced_plan().model_copy(update={"made": "2026-01-02, pipelinerl 1.0: pipelinerl plan x.toml", **changed})


def written(page: Page, charts: Any, folder: Path) -> Path:
    path = folder / "page.html"
    path.write_text(page_html(page, charts), encoding="utf-8")
    return path


def test_the_first_screen_of_a_plan_is_its_number_split_and_kinds(tmp_path: Path) -> None:
    """GPUs by their work share the bar. Bar and line of the recommendation are its number and band."""
    report = made()
    page = plan_page(report)
    with opened(written(page, [*plan_charts(report).values()], tmp_path)) as tab:
        tab.set_viewport_size({"width": 1280, "height": 800})
        assert tab.evaluate(OPENED) == 0
        generate, train = tab.evaluate(WIDTHS)
        cluster = report.recommended.cluster
        assert generate / (generate + train) == pytest.approx(
            cluster.generation_accelerators / cluster.accelerators, rel=0.01
        )
        assert page.overview is not None
        usd, high = page.overview.best.value, page.overview.best.high
        chosen = tab.locator(".chosen")
        bar, line = (chosen.locator(one).bounding_box() for one in ("rect", "line"))
        assert (line["x"] + line["width"] - bar["x"]) / bar["width"] == pytest.approx(high / usd, rel=0.03)
        bars = tab.locator(".bars").bounding_box()
        assert bars["y"] + bars["height"] < 800
        assert tab.get_by_text("Planned on 2026-01-02, pipelinerl 1.0: pipelinerl plan x.toml").is_visible()
        assert not tab.locator(".bk-Figure").first.is_visible()
        tab.get_by_text("Throughput against mean lag of all candidates").click()
        tab.locator(".bk-Figure").first.wait_for(state="visible")
        assert tab.locator(".bk-Figure canvas").first.bounding_box()["width"] > 300


def test_two_cases_are_one_page_that_fits_a_phone(tmp_path: Path) -> None:
    cases = {name: made() for name in ("H100", "B200")}
    charts = cases_charts(cases)
    with opened(written(cases_page(cases), charts, tmp_path)) as tab:
        tab.set_viewport_size({"width": 375, "height": 700})
        assert tab.locator("svg[role=img]").count() == 2
        assert tab.locator(".bars > div").count() == 2 * len(made().families)
        assert tab.get_by_role("heading", name="The recommendation in each of 2 cases").is_visible()
        assert tab.locator("table").first.is_visible()
        assert tab.get_by_text("H100: Throughput against mean lag").is_visible()
        tab.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        wait_until(lambda: tab.locator(".bk-Figure:visible").count(), len(charts))
        assert tab.evaluate("document.documentElement.scrollWidth") == 375
        assert tab.locator("table").first.evaluate("one => one.scrollWidth > one.parentElement.clientWidth")
