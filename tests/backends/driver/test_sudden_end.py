"""A reward in the driver's threads that ends the process: another process says it, and finished work stays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from in_memory import config_of

from backends.driver.checkpoint import read_newest
from backends.fake import FakeBackend
from backends.run import train
from pipelinerl.records.steps import STEPS_FILE, read_steps

SCRIPT = """
import sys
from pathlib import Path
from backends.fake import FakeBackend
from backends.run import train
from pipelinerl.config.run import RunConfig
train(RunConfig.model_validate_json(sys.argv[2]), out=Path(sys.argv[1]), backend=FakeBackend())
"""


def config():
    task = {"name": "games:Ends"}
    return config_of(steps=40, train={"task": task, "checkpoint": {"every": 1}})


@pytest.mark.parametrize(("way", "status"), [("exit", 3), ("fault", -11)])
def test_a_reward_that_ends_the_process_costs_a_line_and_what_was_finished_is_kept(out, way, status):
    tests = Path(__file__).parents[2]
    path = os.pathsep.join(map(str, (tests.parent, tests / "support")))
    environment = os.environ | {"PIPELINERL_TEST_ENDS": way, "PYTHONPATH": path}
    words = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(out), config().model_dump_json(exclude_none=True)]
    ended = subprocess.run(words, check=False, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == status
    assert ended.stderr.startswith("pipelinerl: the run's process has ended without a word: ")
    assert ended.stderr.count("\n") == 1
    done = read_newest(out, config()).state.version
    assert len(read_steps(out / STEPS_FILE)) >= done > 0
    assert train(config(), out=out, resume=True, backend=FakeBackend()).optimizer_steps == 40


def test_a_run_that_ends_with_words_has_no_other_line(out, capfd):
    train(config(), out=out, backend=FakeBackend())
    assert "pipelinerl" not in capfd.readouterr().err
