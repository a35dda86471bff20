"""What holds for all tests."""

from hypothesis import settings

# Machines are noisy, and tests do not time: an example may take as long as it takes.
settings.register_profile("pipelinerl", deadline=None)
settings.load_profile("pipelinerl")
