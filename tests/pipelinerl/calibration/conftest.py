"""A traced run that several modules calibrate."""

from pathlib import Path

import pytest
from calibrated import RUN, run_of, traced


@pytest.fixture(scope="session")
def pipeline_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return traced(tmp_path_factory.mktemp("pipeline") / "run", run_of(RUN))
