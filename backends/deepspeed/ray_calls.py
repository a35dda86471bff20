"""Calls of Ray actors that are awaited together, for trainer and reference model."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from pipelinerl.util.user_code import kind_and_line


def future_of(call: Any) -> asyncio.Future[Any]:
    """Return a call's future. Its exception counts as seen: when an actor fails, others fail unawaited."""
    future = asyncio.wrap_future(call.future())
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def explain_fault(fault: BaseException) -> tuple[str, str]:
    """Return "died" or "failed", and the reason in one line."""
    cause = fault.cause if isinstance(fault, RayTaskError) else fault
    what = "died" if isinstance(fault, RayActorError) else "failed"
    return what, kind_and_line(cause)
