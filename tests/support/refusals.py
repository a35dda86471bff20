"""The message of a refused input."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipelinerl.errors import ConfigError


def message(call: Callable[..., object], *arguments: object, **named: object) -> str:
    """The message of the ConfigError that a call raises: one line."""
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)
