"""A page to forward as one HTML file, with nothing to load from elsewhere: words, tables that sort, figures."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from importlib import resources

from bokeh.embed import file_html
from bokeh.resources import INLINE
from jinja2 import Environment

import pipelinerl
from analysis.interactive import Interactive, sortable
from pipelinerl.records.page import Page


def page_html(page: Page, figures: Sequence[Interactive]) -> str:
    """Return the text of the file.

    Args:
        page: Words and tables.
        figures: Drawn below them.
    """
    template = Environment(autoescape=True).from_string((resources.files("analysis") / "page.html").read_text("utf-8"))
    drawn = {f"table{number}": sortable(table) for number, table in enumerate(page.tables) if table.sortable}
    drawn |= {f"figure{number}": one.model for number, one in enumerate(figures)}
    for name, model in drawn.items():
        model.name = name
    link = "data:text/plain;base64," + b64encode((page.run_file or "").encode()).decode()
    words = {"page": page, "figures": figures, "run_file_link": link, "version": pipelinerl.__version__}
    text: str = file_html([*drawn.values()], INLINE, page.title, template=template, template_variables=words)
    return text
