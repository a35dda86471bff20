"""What a test module needs, said without importing it: vLLM alone takes four seconds."""

from importlib.util import find_spec

import pytest


def need(*packages: str) -> None:
    """Skip the calling test module if a package is not installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}", allow_module_level=True)
