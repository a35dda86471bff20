"""What holds for all tests."""

import signal

import pytest
from hypothesis import settings
from in_this_process import InThisProcess

# Failures of the shipped contract suite then show values, as those of test modules do.
pytest.register_assert_rewrite("backends.contract")

# Machines are noisy, and tests do not time: an example may take as long as it takes.
settings.register_profile("pipelinerl", deadline=None)
settings.load_profile("pipelinerl")

# Tests press Ctrl-C, which a process started in the background of a script ignores, with all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons run in this process."""
    monkeypatch.setattr("sim.parallel.ProcessPoolExecutor", InThisProcess)
