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
