"""Faults drawn by a seed, in simulated time: the driver keeps its promises. And the campaign can fail."""

import os
import pickle
import shutil

import fault_campaign
import pytest
from fault_campaign import run_seed

from backends.driver.checkpoint import FOLDER, read_newest
from backends.driver.engines import EngineHandle
from backends.driver.loop import EventLoop
from backends.interface import UpdateTimes

NUM_SEEDS = int(os.environ.get("PIPELINERL_FAULT_SEEDS", "11"))


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_the_driver_keeps_its_promises_whatever_fails(tmp_path, seed):
    run_seed(seed, tmp_path)
    shutil.rmtree(tmp_path)


def test_a_run_is_a_function_of_its_seed(tmp_path):
    """Its trace bit for bit, and what came when, over several attempts."""
    traces, logs = zip(*(traced(tmp_path / name) for name in ("one", "two")), strict=True)
    assert traces[0] == traces[1]
    assert logs[0] == logs[1]
    assert any("ends:" in line for line in logs[0])


def traced(folder):
    log = run_seed(6, folder).log
    return (folder / "run" / "trace.jsonl.gz").read_bytes(), [line.replace(str(folder), "") for line in log]


# ------------------------------------------------- mistakes that it must find


def test_a_forgotten_abort_is_found(tmp_path, monkeypatch):
    async def forgets(self, command): ...

    monkeypatch.setattr(EventLoop, "_abort", forgets)
    with pytest.raises(AssertionError, match="an abort is forgotten"):
        run_seed(14, tmp_path)


def test_a_version_that_an_engine_skips_is_found(tmp_path, monkeypatch):
    load = EngineHandle.load

    async def skips(self, weights, weight_update):
        if weights.version != 2:
            return await load(self, weights, weight_update)
        self.version = 2
        return UpdateTimes(0.0, 0.0, 0.0)

    monkeypatch.setattr(EngineHandle, "load", skips)
    with pytest.raises(AssertionError, match="cannot handle the end of rollout"):
        run_seed(9, tmp_path)


def test_steps_that_are_made_twice_after_a_resume_are_found(tmp_path, monkeypatch):
    def older(out, config):
        first = min((out / FOLDER).glob("step_*"))
        return read_newest(out, config)._replace(state=pickle.loads((first / "run.pickle").read_bytes())["state"])

    monkeypatch.setattr(fault_campaign, "read_newest", older)
    with pytest.raises(AssertionError, match="trained on twice"):
        run_seed(37, tmp_path)
