"""vLLM's entry into this project: its processes call ``register`` when they start; loads neither torch nor vLLM.

The entry point is ``vllm.general_plugins`` in ``pyproject.toml``, so the project has to be installed.
"""

from __future__ import annotations

import os

from backends.vllm.version.workers import (
    EXPAND,
    IN_PLACE,
    expand_on_cpu,
    keep_parameters_in_place,
    register_receiver,
    sleep_in_waits,
)


def register() -> None:
    """Register the receiver of weights with this process's vLLM; a second call does nothing."""
    register_receiver("backends.vllm.receiver", "VLLMReceiver")
    sleep_in_waits()
    if IN_PLACE in os.environ:
        keep_parameters_in_place()
    if EXPAND in os.environ:
        expand_on_cpu()
