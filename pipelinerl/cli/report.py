"""``pipelinerl report``: a page to forward."""

from __future__ import annotations

import os
import webbrowser
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

from pipelinerl.cli.options import argument, option, refuse_no_file
from pipelinerl.cli.output import print_line, status
from pipelinerl.errors import ConfigError

if TYPE_CHECKING:
    from analysis.chart import Chart
    from pipelinerl.pages.page import Page

LEAST_MB = 100_000
"""Size from which on it is in MB, and below in kB (bytes)."""


def report(
    folders: Annotated[
        list[Path],
        argument(
            "DIR", "Folders of runs, simulated or real, of plans, or of one comparison, environments or validation."
        ),
    ],
    out: Annotated[Path, option("FILE", "page.html, or page.md for a pull request.", show_default=False)],
    show: Annotated[bool, option(None, "Open the page in the browser.", "--open")] = False,
) -> None:
    """Write one page: question, answer, interactive figures, tables, run file."""
    from pipelinerl.records.run_folder import writable

    if out.suffix not in (".html", ".md"):
        raise ConfigError(f"--out must end in .html or .md, got {out}")
    refuse_no_file(out)
    with status("making the page"):
        page, figures = _content(folders)
        if out.suffix == ".md":
            from pipelinerl.pages.page import page_markdown

            text = page_markdown(page)
        else:
            try:
                from analysis.page import page_html

                text = page_html(page, figures())
            except ModuleNotFoundError as error:
                name = error.name
                raise ConfigError(f"{name} is not installed; pip install {name}, or --out page.md") from None
    with writable(out, "file"):
        out.write_text(text, encoding="utf-8")
    size = len(text.encode())
    print_line(f"{out}: {size / 1e6:.2f} MB" if size >= LEAST_MB else f"{out}: {size / 1e3:.1f} kB")
    if show:
        webbrowser.open(out.resolve().as_uri())


def _content(folders: list[Path]) -> tuple[Page, Callable[[], list[Chart]]]:
    from analysis.read import read_comparison, read_run, read_runs
    from pipelinerl.pages import plans, runs
    from pipelinerl.records.comparison_report import EnvironmentsReport
    from pipelinerl.records.plan_report import PlanReport
    from pipelinerl.records.run_folder import COMPARISON_FILE, ENVIRONMENTS_FILE, PLAN_FILE, VALIDATION_FILE
    from pipelinerl.records.validation_report import ValidationReport

    kinds = (PLAN_FILE, ENVIRONMENTS_FILE, COMPARISON_FILE, VALIDATION_FILE)
    cases = _plans_in(folders)
    if len(cases) > 1:
        found = {one.name.replace("_", " "): PlanReport.read(one / PLAN_FILE) for one in cases}
        return plans.cases_page(found, cases), lambda: _figures().cases_charts(found)
    held = [(one, name) for one in folders for name in kinds if os.path.exists(one / name)]
    if not held:
        read = read_runs(folders)
        return runs.run_page({run.name: run.report for run in read}, folders), lambda: _page().run_charts(read)
    folder, file = held[0]
    if len(folders) > 1:
        raise ConfigError(f"DIR... must be runs or a single folder with a {file}, got {len(folders)} with {folder}")
    if file == PLAN_FILE:
        plan = PlanReport.read(folder / file)
        return plans.plan_page(plan, folder), lambda: [*_figures().plan_charts(plan).values()]
    if file == ENVIRONMENTS_FILE:
        numbers = EnvironmentsReport.read(folder / file)
        return runs.environments_page(numbers, folder), lambda: _figures().environments_charts(numbers)
    if file == VALIDATION_FILE:
        from pipelinerl.pages.evidence import validation_page

        validation = ValidationReport.read(folder / file)
        return validation_page(validation), lambda: [one for one in [_figures().validation_chart(validation)] if one]
    comparison = read_comparison(folder)
    arms = next(one.arms for one in comparison.scenarios if one.arms)
    shown = [read_run(folder / arm.folder, arm.name) for arm in arms]
    return runs.comparison_page(comparison, folder), lambda: _page().run_charts(shown, comparison)


def _plans_in(folders: list[Path]) -> list[Path]:
    """Return the folders of several plans, given or inside one folder, smallest cluster first."""
    from pipelinerl.records.run_folder import PLAN_FILE

    within = sorted(folders[0].glob(f"*/{PLAN_FILE}")) if len(folders) == 1 else []
    plans = [path.parent for path in within] or folders
    if not all(os.path.exists(one / PLAN_FILE) for one in plans):
        return []
    return sorted(plans, key=lambda one: [int(word) for word in one.name.split("_") if word.isdigit()])


def _page() -> ModuleType:
    from analysis import page

    return page


def _figures() -> ModuleType:
    from analysis import figures

    return figures
