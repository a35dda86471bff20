"""The table at the end of the benchmarks."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def table(request):
    """Rows of (name, value), printed after the last benchmark."""
    rows = []
    yield rows
    with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print("\n")
        for what, value in rows:
            print(f"{what:<72} {value:>16}")
