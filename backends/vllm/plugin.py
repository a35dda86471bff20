"""vLLM's entry into this project: its processes call ``register`` when they start.

The entry point is ``vllm.general_plugins`` in ``pyproject.toml``, so the project has to be installed. Importing
this module loads neither torch nor vLLM.
"""

from __future__ import annotations

import os

from backends.vllm.spawned import imported
from backends.vllm.version.workers import IN_PLACE, keep_parameters_in_place, register_transports

ENGINES = {
    "pipelinerl_file": ("backends.vllm.file_receiver", "FileTransferEngine"),
    "pipelinerl_broadcast": ("backends.vllm.broadcast_receiver", "BroadcastTransferEngine"),
    "pipelinerl_streamed": ("backends.vllm.stream_receiver", "StreamTransferEngine"),
}
"""Name under which vLLM knows a transport, ``pipelinerl_`` and ours: module and class of the worker's end."""


def register() -> None:
    """Make our transports known to this process's vLLM; a second call does nothing."""
    imported()
    register_transports(ENGINES)
    if IN_PLACE in os.environ:
        keep_parameters_in_place()
