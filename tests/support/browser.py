"""A headless Chromium for the tests of pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

OURS = Path(__file__).parents[2] / "build" / "chromium"
"""Where scripts/get_chromium.py puts one, with libraries and a font."""
CHROMIUM = shutil.which("chromium", path=OURS) or shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium; scripts/get_chromium.py"),
]


@contextmanager
def open_tab() -> Iterator[Any]:
    """Open an empty page."""
    from playwright.sync_api import sync_playwright

    assert CHROMIUM is not None
    own = {"LD_LIBRARY_PATH": str(OURS / "lib"), "FONTCONFIG_FILE": str(OURS / "fonts.conf")}
    env = {**os.environ, **(own if OURS in Path(CHROMIUM).parents else {})}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], env=env)
        yield browser.new_page(viewport={"width": 1000, "height": 900})
        browser.close()


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a page of ours; in the end it must have asked for no other file, and have had nothing to complain of."""
    requests: list[str] = []
    complaints: list[str] = []
    with open_tab() as tab:
        tab.on("request", lambda one: requests.append(one.url))
        tab.on("pageerror", lambda one: complaints.append(str(one)))
        tab.on("console", lambda one: complaints.append(one.text) if one.type in ("error", "warning") else None)
        tab.goto(path.as_uri())
        tab.wait_for_function("window.Bokeh && Bokeh.documents.length === 1 && Bokeh.documents[0].is_idle")
        yield tab
    assert (requests, complaints) == ([path.as_uri()], [])
