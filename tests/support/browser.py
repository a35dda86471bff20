"""A headless Chromium for the tests of pages."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
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

LIMIT_MS = 300_000
"""How long a browser may take to start and a page to do what it is waited for: 30 s otherwise, on any machine (ms)."""
PATIENT = """() => {
  const [view] = Bokeh.index.query(one => one.canvas_view !== undefined)
  const gestures = view.canvas_view.ui_event_bus.ui_gestures.constructor
  gestures.press_threshold = 2 ** 31 - 1
  gestures.doubletap_threshold = 0
}"""
"""Whatever the time between them, a button that goes down and up is one click, and down, moved and up a drag: Bokeh
takes it for a long press after 0.3 s, in which a busy machine may not get from the one to the other."""


@contextmanager
def open_tab() -> Iterator[Any]:
    """Open an empty page."""
    from playwright.sync_api import sync_playwright

    assert CHROMIUM is not None
    own = {"LD_LIBRARY_PATH": str(OURS / "lib"), "FONTCONFIG_FILE": str(OURS / "fonts.conf")}
    env = {**os.environ, **(own if OURS in Path(CHROMIUM).parents else {})}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], env=env, timeout=LIMIT_MS)
        tab = browser.new_page(viewport={"width": 1000, "height": 900})
        tab.set_default_timeout(LIMIT_MS)
        yield tab
        browser.close()


def wait_until(look: Callable[[], Any], wanted: Any) -> None:
    """Wait until a page shows what it must: it may do what it is asked after it has answered, and while it is drawn."""
    end = time.monotonic() + LIMIT_MS / 1000
    while (seen := look()) != wanted and time.monotonic() < end:
        time.sleep(0.02)
    assert seen == wanted


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
        tab.evaluate(PATIENT)
        yield tab
    assert (requests, complaints) == ([path.as_uri()], [])
