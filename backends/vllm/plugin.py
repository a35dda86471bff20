"""vLLM's entry into this project: its processes call ``register`` when they start; loads neither torch nor vLLM.

The entry point is ``vllm.general_plugins`` in ``pyproject.toml``, so the project has to be installed.
"""

from __future__ import annotations

import os

from backends.vllm.version import workers


def register() -> None:
    """Register the receiver of weights with this process's vLLM, and adapt it to a CPU; a second call does nothing."""
    workers.register_receiver("backends.vllm.receiver", "VLLMReceiver")
    workers.adapt_to_cpu()
    if workers.IN_PLACE in os.environ:
        workers.keep_parameters_in_place()
