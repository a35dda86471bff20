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
"""Folder of scripts/get_chromium.py: a browser with libraries and a font."""
CHROMIUM = shutil.which("chromium", path=OURS) or shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium; scripts/get_chromium.py"),
]

LIMIT_MS = 300_000
"""Limit of each wait for the browser or a page (ms); playwright's default of 30 s fails on slow machines."""
PATIENT = """() => {
  const [view] = Bokeh.index.query(one => one.canvas_view !== undefined)
  const gestures = view.canvas_view.ui_event_bus.ui_gestures.constructor
  gestures.press_threshold = 2 ** 31 - 1
  gestures.doubletap_threshold = 0
}"""
"""Turns off long presses and double taps in Bokeh: on a busy machine a click may take longer than the 0.3 s after which
Bokeh sees a long press."""


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
    """Wait until a page shows the wanted value: it may react after it has answered, and while it is drawn."""
    end = time.monotonic() + LIMIT_MS / 1000
    while (seen := look()) != wanted and time.monotonic() < end:
        time.sleep(0.02)
    assert seen == wanted


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open one of our pages; at the end, assert that it requested no other file and logged no error or warning."""
    requests: list[str] = []
    errors: list[str] = []
    with open_tab() as tab:
        tab.on("request", lambda one: requests.append(one.url))
        tab.on("pageerror", lambda one: errors.append(str(one)))
        tab.on("console", lambda one: errors.append(one.text) if one.type in ("error", "warning") else None)
        tab.goto(path.as_uri())
        tab.wait_for_function("window.Bokeh && Bokeh.documents.length === 1 && Bokeh.documents[0].is_idle")
        tab.evaluate(PATIENT)
        yield tab
    assert (requests, errors) == ([path.as_uri()], [])
