"""`pipelinerl export`: what it refuses; `test_run_losses` compares its model with that of the run."""

import pytest
from command_line import assert_fails
from in_memory import config_of  # skips without torch
from needs import need

need("transformers", "deepspeed", "ray")

from backends.driver.checkpoint import seal  # noqa: E402
from pipelinerl.config.run import dump_run  # noqa: E402


@pytest.fixture
def checkpoint(model_path, tmp_path):
    """A whole checkpoint without a part of any rank."""
    folder = tmp_path / "run" / "checkpoints" / "step_000002"
    (folder / "trainer").mkdir(parents=True)
    (folder / "run.pickle").write_bytes(b"is not read")
    (tmp_path / "run" / "run.toml").write_text(dump_run(config_of(train={"model": {"path": str(model_path)}})))
    seal(folder, {})
    return folder


def test_what_cannot_be_exported_is_one_line_and_nothing_is_written(checkpoint, tmp_path, command):
    out = tmp_path / "out"
    assert_fails(command("export", tmp_path / "run", "--out", out), 2, "CHECKPOINT must be a folder of checkpoints/")
    assert_fails(command("export", checkpoint, "--out", checkpoint), 2, "--out must be a new folder")
    assert_fails(command("export", checkpoint, "--out", out), 1, "trainer has no rank_*.safetensors")
    (checkpoint / "run.pickle").write_bytes(b"is now another")
    assert_fails(command("export", checkpoint, "--out", out), 2, "CHECKPOINT must be whole", "run.pickle is not as it")
    assert not out.exists()
