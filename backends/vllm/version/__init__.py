"""All that holds for one version of vLLM only: its arguments, its calls, its classes, the form of its answers.

Another version: change this folder and the pins in ``pyproject.toml``, then run the tests of ``tests/backends/vllm``
that are marked ``real``. The worker's ends of the transports have the methods that its ``WeightTransferEngine`` asks
for; ``offline.py`` uses its plainest interface. Importing these modules does not load vLLM.
"""
