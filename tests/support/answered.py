"""The end of a wait for several processes, held back until those that live have answered, however slow they are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def when_others_have_answered(silent: int) -> Iterator[None]:
    """Have time-outs of ``asyncio.wait`` for several calls begin when all but this one are answered."""
    wait = asyncio.wait

    async def patient(calls: Sequence[Any], **keywords: Any) -> Any:
        if keywords.get("timeout") is not None and isinstance(calls, list):
            await wait([call for number, call in enumerate(calls) if number != silent])
        return await wait(calls, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "wait", patient)
        yield
