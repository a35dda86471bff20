"""The whole check with parts in memory: what is written, and how a failure is told."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("tensorboard")

from in_memory import Letters, Shared, config_of, interrupt, turns_of
from refusals import message

from backends.check.run_check import MARKER, check
from backends.fake import FakeBackend, FakeEngine
from backends.interface import Parts, PlaceFacts, RankFacts, Sample, SelfTest, TrainResult, UpdateTimes, Weights
from pipelinerl.calibration.measured import merged, of_its_arm
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import RunInterruptedError, TrainerLostError
from pipelinerl.records.reports import CheckReport, CheckRow, Finding
from pipelinerl.records.run_folder import TRACE_FILE
from pipelinerl.records.trace import Trace
from pipelinerl.rl.problems import Problem
from pipelinerl.scheduler.events import WeightsLoaded, WeightUpdate

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TensorBoard's
ROOT = Path(__file__).parents[3]


class Machines(FakeBackend):
    """Parts in memory that measure themselves, and a trainer that does something when a step begins."""

    def __init__(self, *, at: int | None = None, do: Callable[[], None] | None = None) -> None:
        self.trainer = PackTrainer(train_batch_size=8, at=at, do=do)

    @contextmanager
    def open(self, config: RunConfig, *, logs: Path | None = None) -> Iterator[Parts]:
        async def self_test(num_bytes: int, marker: str | None) -> SelfTest:
            from backends.ray.placement import versions

            sees = None if marker is None else Path(marker).is_file()
            place = PlaceFacts("here", versions(), (), 100.0, 50.0, 50.0, sees)
            return SelfTest((place,), (RankFacts("CPU", "plain", 0.0, True, 1.0, 1.0, 0.064, None, None),), None)

        with super().open(config) as parts:
            yield replace(parts, trainer=self.trainer, self_test=self_test)


class PackTrainer(Shared):
    """Trains on the pack that is timed, which is no batch, too; only while it has its memory."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.packs: list[list[Sample]] = []

    async def train(self, samples: list[Sample], *, completes_step: bool) -> TrainResult:
        assert self.has_memory
        if samples[0].rollout_id < 0:
            self.packs.append(samples)
            given = [np.full(len(one.behaviour_logprob_T), -2.5, np.float32) for one in samples]
            return TrainResult(given, {"rank0/forward_s": 1.0, "rank0/backward_s": 2.0, "rank0/optimizer_s": 0.5})
        return await super().train(samples, completes_step=completes_step)


class Alike(Letters):
    def reward(self, problem: Problem, answer: str) -> float:
        return 1.0


LETTERS = {"task": {"name": "in_memory:Letters"}}


def checked(out: Path, backend: Machines, config: RunConfig | None = None) -> tuple[CheckReport, dict[str, CheckRow]]:
    report = check(config or config_of(train=LETTERS), out=out, backend=backend)
    return report, {row.what.strip(): row for row in report.rows}


def test_a_check_measures_then_makes_four_steps_and_leaves_what_a_plan_takes(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates, update = [], FakeEngine.update

    async def noted(engine: FakeEngine, weights: Weights, weight_update: WeightUpdate) -> UpdateTimes:
        updates.append(weights.version)
        return await update(engine, weights, weight_update)

    monkeypatch.setattr(FakeEngine, "update", noted)
    backend, config = Machines(), config_of(steps=50, train=LETTERS)
    report, rows = checked(out, backend, config)
    assert not report.wrong
    assert len(backend.trainer.trained) == 4
    # The first updates, which are slower, come before the run, and are not among the ones that are measured.
    assert updates[:2] == [0, 0]
    assert updates.count(0) == 2
    loaded = [one.event.version for one in Trace(out / TRACE_FILE).records() if isinstance(one.event, WeightsLoaded)]
    assert min(loaded) > 0
    made, timed = backend.trainer.packs  # the second one changes weights: on-policy, and all of it good
    assert {one.advantage for one in made} == {0.0}
    assert {one.advantage for one in timed} == {one.reward for one in timed} == {1.0}
    assert all((one.behaviour_logprob_T == -2.5).all() for one in timed)
    assert rows["a pack of 16384 tokens"].measured == "forward 1 s, backward 2 s, optimizer 0.5 s"
    assert rows["optimizer steps"].measured.startswith("4, ")
    assert rows["agreement"].finding is Finding.OK
    assert list(rows)[-1] == "hardware.toml"
    assert CheckReport.read(out / "check.json") == report
    assert not {"checkpoints", "model", MARKER} & {path.name for path in out.iterdir()}
    by_file, by_folder = (of_its_arm(config, [source]) for source in (out / "hardware.toml", out))
    assert by_file.hardware == by_folder.hardware != config.hardware
    assert merged(config, [out])[1].weights[False] == by_file.hardware.weights


def test_where_engines_and_trainer_take_turns_the_pack_is_trained_on_in_the_trainers_turn(out: Path) -> None:
    report, rows = checked(out, Machines(), config_of(kind="conventional", train=LETTERS))
    assert not report.wrong
    assert "a pack of 16384 tokens" in rows


def test_a_run_with_environments_is_checked(out: Path) -> None:
    report, rows = checked(out, Machines(), turns_of(settings={"turns": 2}, steps=50))
    assert not report.wrong
    assert rows["seconds of a step"].measured.startswith("mean ")
    assert rows["rewards"].measured.startswith("0 of 8 episodes with empty answers")
    assert rows["optimizer steps"].measured.startswith("4, ")


def test_a_run_that_fails_is_a_row_and_the_others_stay(out: Path) -> None:
    def die() -> None:
        raise TrainerLostError("trainer died: phase=train rank=3")

    report, rows = checked(out, Machines(at=1, do=die))
    assert report.wrong
    assert (rows["run"].finding, rows["run"].measured) == (Finding.WRONG, "trainer died: phase=train rank=3")
    assert rows["attention kernel"].finding is Finding.OK
    assert CheckReport.read(out / "check.json") == report


def test_rewards_that_are_all_alike_teach_nothing(out: Path) -> None:
    report, rows = checked(out, Machines(), config_of(train={"task": {"name": f"{__name__}:Alike"}}))
    assert rows["signal"].finding is Finding.WRONG
    assert report.wrong


def test_a_folder_that_holds_a_check_is_refused_and_ctrl_c_is_one_line(out: Path) -> None:
    with pytest.raises(RunInterruptedError, match="interrupted; the check is not complete"):
        checked(out, Machines(at=1, do=interrupt))
    assert not (out / "check.json").exists()
    assert "--out must be a folder without a run" in message(check, config_of(), out=out, backend=Machines())
    out.rename(out.with_name("old"))
    out.mkdir()
    (out / "hardware.toml").touch()
    assert "--out must be a folder without a hardware.toml" in message(check, config_of(), out=out, backend=Machines())


HIDE = """
import sys
for name in ("torch", "vllm", "deepspeed", "ray", "transformers", "tokenizers", "tensorboard", "psutil", "safetensors"):
    sys.modules[name] = None
sys.argv[1:] = ["train", f"examples/{sys.argv[1]}.toml", "--check", "--json"]
from pipelinerl.cli import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("example", "right"), [("tiny_arithmetic", "64 of 64"), ("tiny_tools", "8 of 8 worked")])
def test_without_the_packages_of_training_the_task_is_checked_and_the_rest_is_named(example: str, right: str) -> None:
    command = [sys.executable, "-c", HIDE, example]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    rows = {row["what"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows["rewards"]["measured"].startswith(right)
    assert rows["lengths in tokens"]["finding"] == "not checked"
    for what in ("machines and links", "training", "engines and weights"):
        assert rows[what]["finding"] == "not checked"
        assert rows[what]["measured"] == "torch, Ray, transformers, vLLM, DeepSpeed not installed"
        assert rows[what]["advice"] == "pip install -e '.[train-cpu]' in the project's folder"
