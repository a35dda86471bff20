"""Hostile names in every text that reaches a page, in a headless Chromium: shown as text, no script, no request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from browser import needs_browser, open_tab, opened, wait_until
from hostile_names import HIDDEN, NAMES, in_every_text, visible
from made_up_runs import CAPACITY, with_fleet, write_run
from needs import need
from tiny_comparison import BASE
from tiny_plan import planned

need("playwright")
pytestmark = needs_browser

from analysis.chart import Axis, Chart, Mark, Series  # noqa: E402
from analysis.figures import cases_charts, environments_charts, plan_charts, validation_chart  # noqa: E402
from analysis.page import page_html, run_charts  # noqa: E402
from analysis.read import read_run, read_runs  # noqa: E402
from pipelinerl.pages.evidence import validation_page  # noqa: E402
from pipelinerl.pages.page import Page, Section, Table  # noqa: E402
from pipelinerl.pages.plans import cases_page, plan_page  # noqa: E402
from pipelinerl.pages.runs import comparison_page, environments_page, run_page  # noqa: E402
from pipelinerl.records.comparison_report import ComparisonReport, EnvironmentsReport  # noqa: E402
from pipelinerl.records.plan_report import PlanReport  # noqa: E402
from pipelinerl.records.reports import CapacityReport  # noqa: E402
from pipelinerl.records.validation_report import PredictedRow, UnusableRow, ValidationReport  # noqa: E402
from sim.validation.predict import validation_report  # noqa: E402

GPU = "bf16_flops = 500e12\nmemory_bytes = 64e9\nbandwidth = 2e12\nnetwork = 25e9\n"
"""A file of one's own; the page shows its path."""
PLACE = """([x, y]) => {
  const figure = Bokeh.documents[0].get_model_by_name("figure0")
  const view = [...Bokeh.index.query(one => one.model === figure)][0]
  view.el.scrollIntoView()
  const box = view.canvas_view.el.getBoundingClientRect()
  return [box.x + view.frame.x_scale.compute(x), box.y + view.frame.y_scale.compute(y)]
}"""
"""Window coordinates of a point of the first figure."""
SHOWN = """[document.body, ...Bokeh.index.query(() => true).map(one => one.shadow_el ?? one.el)]
  .map(one => one?.textContent)"""
"""All text of a page and of Bokeh's parts of it."""


def fits_a_phone(tab: Any) -> bool:
    """Whether a page does not scroll sideways with all its parts unfolded."""
    tab.set_viewport_size({"width": 375, "height": 700})
    tab.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    return bool(tab.evaluate("document.documentElement.scrollWidth") == 375)


def run_folder(root: Path, name: str, **made: Any) -> Path:
    """Write a run with hostile names of its folder and its GPU, and others in a comment of its run file."""
    folder = write_run(root / name.replace("/", "\\"), **made)
    gpu = root / "<img src=x onerror=window.taken=1>.toml"
    gpu.write_text(GPU)
    hardware = {"gpu": str(gpu), "model": "Qwen2.5-1.5B"}
    comments = "".join(f"# {one}\n" for one in NAMES if one.isprintable())
    (folder / "run.toml").write_text(comments + tomli_w.dumps(BASE | {"hardware": hardware}))
    return folder


def run(root: Path) -> tuple[Page, list[Chart]]:
    return runs(root, NAMES[:1])


def runs(root: Path, names: Sequence[str] = NAMES) -> tuple[Page, list[Chart]]:
    folders = [run_folder(root, name) for name in names]
    read = read_runs(folders)
    read = [with_fleet(one, in_every_text(CapacityReport, CAPACITY.to_dict())) for one in read]
    return run_page({run.name: run.report for run in read}, folders), run_charts(read)


def comparison(root: Path) -> tuple[Page, list[Chart]]:
    folders = [run_folder(root, f"a{number}", rl_step=number or None) for number in range(len(NAMES))]
    arms = [
        {"name": one.name, "folder": one.name, "speedup": 1.5, "summary": read_run(one).report.to_dict()}
        for one in folders
    ]
    texts = {"failures": ["one", "two"], "complete": True, "baseline": "a1"}
    scenarios = [{"name": name, "arms": [arm | {"too_short": ["short"]} for arm in arms]} for name in ("x", "y")]
    report = in_every_text(ComparisonReport, texts | {"scenarios": scenarios})
    read = [read_run(root / arm.folder, arm.name) for arm in report.scenarios[0].arms]
    return comparison_page(report, root), run_charts(read, report)


def plan(_: Path) -> tuple[Page, list[Chart]]:
    report = in_every_text(PlanReport, planned().to_dict())
    return plan_page(report), [*plan_charts(report).values()]


def plans(_: Path) -> tuple[Page, list[Chart]]:
    cases = dict.fromkeys(NAMES, in_every_text(PlanReport, planned().to_dict()))
    return cases_page(cases, failures=NAMES), cases_charts(dict([*cases.items()][:1]))


def environments(_: Path) -> tuple[Page, list[Chart]]:
    row = dict.fromkeys(("rollouts_per_hour", "in_use_mean", "generation", "training", "lag_mean"), 1.0)
    seconds = dict.fromkeys(("environment", "waiting", "engine", "scoring"), 1.0)
    rows = [row | {"count": 8, "seconds": seconds, "bottleneck": "environment", "folder": "run"}]
    told = {"verdict": "the knee", "failures": ["one", "two"], "complete": False}
    rows[0]["usd_per_1000_rollouts"] = 3.0
    report = in_every_text(EnvironmentsReport, told | {"accelerators": 4, "slots": 12, "rows": rows, "knee": 8})
    return environments_page(report), environments_charts(report)


def validation(_: Path) -> tuple[Page, list[Chart]]:
    numbers = {"gpus": 8, "answer_tokens": None, "fitted_to": (), "error": 0.1, "measured": 10.0, "predicted": 11.0}
    ends = {"low": 9.0, "high": 13.0, "alone": None, "alone_low": None, "alone_high": None}
    words = {"family": "f", "quantity": "s/step", "mode": "m", "assumed": ("no cv",), "inputs": ("a",)}
    rows = [PredictedRow(id="one", **words, **numbers, **ends), UnusableRow(id="e", reason="no")]
    report = in_every_text(ValidationReport, validation_report(rows).to_dict())
    chart = validation_chart(report)
    assert chart is not None
    return validation_page(report), [chart]


def anything(_: Path) -> tuple[Page, list[Chart]]:
    """A page whose every field is hostile, and figures of every mark with hostile names, rows and texts to hover."""
    table = Table(title=NAMES[0], columns=NAMES, rows=[[*NAMES], [*NAMES[::-1]]], note=NAMES[1])
    page = Page(
        title=NAMES[2],
        question=NAMES[3],
        answer="\n".join(NAMES),
        facts=[*zip(NAMES, NAMES, strict=True)],
        sections=[Section(name, NAMES) for name in NAMES],
        tables=[table, Table(title=NAMES[4], columns=NAMES, rows=table.rows, sortable=False)],
        assumptions=NAMES,
        run_file="\n".join(NAMES),
    )
    series = [
        Series(label=name, mark=Mark.POINTS, x=[1.0 + number], y=[number], hover={"": [name], name: [name]})
        for number, name in enumerate(NAMES)
    ]
    x, words = Axis(label="x", values="0"), {"title": NAMES[5], "caption": NAMES[6], "switch": None}
    axes = (Axis(label="y"), Axis(label="y", rows=NAMES))
    return page, [Chart(**words, x=x, y=y, series=series) for y in axes]


@pytest.mark.parametrize("make", [run, runs, comparison, plan, plans, environments, validation, anything])
def test_a_page_shows_hostile_names_as_text(make: Any, tmp_path: Path) -> None:
    """No script, no request, no error, nothing refused by the page's policy: text is escaped before it is asked."""
    page, charts = make(tmp_path)
    path = tmp_path / "page.html"
    path.write_text(page_html(page, charts), encoding="utf-8")
    with opened(path) as tab:
        assert tab.evaluate("window.taken") is None
        assert tab.title() == " ".join(page.title.split())
        shown = "".join(one or "" for one in tab.evaluate(SHOWN))
        texts = [page.question, page.answer, *page.assumptions, *(line for one in page.sections for line in one.lines)]
        texts += [cell for table in page.tables for row in (table.columns, *table.rows) for cell in row]
        texts += [text for one in charts for text in (one.title, one.caption, *(line.label for line in one.series))]
        assert [one for one in texts if one not in shown] == []
        assert any(visible(name) in shown for name in NAMES)
        assert not set(HIDDEN) & set(shown)
        tab.evaluate("document.querySelectorAll('button').forEach(one => one.click())")  # sorts
        assert fits_a_phone(tab)
        assert tab.evaluate("window.taken") is None


def test_a_tooltip_shows_a_hostile_name_as_text(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page_html(*anything(tmp_path)), encoding="utf-8")
    with opened(path) as tab:
        for number, name in enumerate(map(visible, NAMES)):
            tab.mouse.move(*tab.evaluate(PLACE, [1.0 + number, number]))
            tab.locator(".bk-Tooltip:visible").get_by_text(name).first.wait_for()
        assert tab.evaluate("window.taken") is None


MARKUP = """<img src=x onerror=window.taken=1><script>window.taken=1</script>
<script src="data:,window.taken=1"></script><svg><animate onbegin=window.taken=1 attributeName=x dur=1s></svg>
<iframe srcdoc="<script>parent.taken=1</script>"></iframe>
<object data="data:text/html,<script>top.taken=1</script>"></object>
<base href="https://example.com"><a id=link href="javascript:window.taken=1">a</a><link rel=stylesheet href="https://example.com/a.css">"""
REFUSED = {"base-uri", "img-src", "object-src", "script-src-attr", "script-src-elem", "style-src-elem"}
"""Parts of the policy that refuse the markup."""


def test_the_policy_of_a_page_runs_no_script_that_got_into_it(tmp_path: Path) -> None:
    """Markup put into the finished file, as if a text had not been escaped: refused, and the figures draw."""
    page, charts = anything(tmp_path)
    path = tmp_path / "page.html"
    html = page_html(page, charts)
    path.write_text(html.replace("<main>", f"<main>{MARKUP}", 1), encoding="utf-8")
    (scripts,) = re.findall('script-src ([^"]*)', html)
    assert all(one.startswith("'sha256-") for one in unescape(scripts).split())  # no 'unsafe-inline', no 'unsafe-eval'
    requests, ended = list[str](), list[tuple[str, str | None]]()
    with open_tab() as tab:
        tab.on("request", lambda one: requests.append(one.url))
        tab.on("requestfinished", lambda one: ended.append((one.url, None)))
        tab.on("requestfailed", lambda one: ended.append((one.url, one.failure)))
        tab.add_init_script("refused = []; addEventListener('securitypolicyviolation', one => refused.push(one))")
        tab.goto(path.as_uri())
        tab.wait_for_function("window.Bokeh && Bokeh.documents.length === 1 && Bokeh.documents[0].is_idle")
        wait_until(lambda: set(tab.evaluate("refused.map(one => one.effectiveDirective)")) >= REFUSED, True)
        before = tab.evaluate("refused.length")
        tab.evaluate("document.getElementById('link').click()")
        wait_until(lambda: tab.evaluate("refused.length") > before, True)
        assert tab.evaluate("window.taken") is None
        wait_until(lambda: len(requests) - len(ended), 0)
    assert {why for url, why in ended if url.startswith("http")} == {"csp"}
