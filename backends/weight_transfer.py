"""vLLM's entry into this project: its processes call ``register`` when they start.

The entry point is ``vllm.general_plugins`` in ``pyproject.toml``, so the project has to be installed. Importing
this module loads neither torch nor vLLM.
"""

from __future__ import annotations

FILE_TRANSPORT = "pipelinerl_file"
"""Name under which vLLM knows the transport of weights by file."""


def register() -> None:
    """Make the file transport known to this process's vLLM; a second call does nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    if FILE_TRANSPORT not in Factory._registry:
        Factory.register_engine(FILE_TRANSPORT, "backends.file_transfer", "FileTransferEngine")
