"""The page of a real run, with engine and trainer in memory, in a headless Chromium."""

from __future__ import annotations

from pathlib import Path

import in_memory
from browser import needs_browser, opened
from command_line import Command
from needs import need

need("playwright")
pytestmark = needs_browser


def test_the_page_of_a_real_run_opens_with_its_rewards(command: Command, tmp_path: Path) -> None:
    """The run ends before the browser starts: playwright holds the event loop."""
    config, page = in_memory.config_of(), tmp_path / "page.html"
    in_memory.run_checked(config, tmp_path / "tiny", in_memory.parts_of(config))
    assert command("report", tmp_path / "tiny", "--out", page).status == 0
    assert page.stat().st_size < 3e6
    with opened(page) as tab:
        assert tab.get_by_text("a real run: everything is measured").count() == 1
        tab.get_by_role("heading", name="Mean reward").wait_for()
        figures = tab.evaluate("Bokeh.documents[0].roots().filter(one => one.name.startsWith('figure')).length")
        assert tab.locator(".bk-Figure:visible").count() == figures > 3
