"""Faults of a schedule: the same file in the simulator and in the real driver with parts in memory."""

import asyncio
import json
import signal
import sys
from dataclasses import replace

import pytest
import virtual_clock
from in_memory import Killer, config_of, interrupt, parts_of, run, run_checked
from ledger_check import records

import backends.vllm.process
from backends.driver.faults import check_faults
from backends.fake import FakeCodec, FakeEngine, FakeTrainer
from backends.interface import GenerateRequest
from backends.interface import Parts as DriverParts
from backends.vllm.process import slow_down
from pipelinerl.config.faults import FaultConfig
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError, RunFailedError, TrainerLostError
from pipelinerl.records.recording import replay_run
from pipelinerl.records.run_folder import TRACE_FILE
from pipelinerl.records.trace import Trace
from pipelinerl.scheduler.events import (
    EngineJoined,
    EngineLeaving,
    EngineLeft,
    RolloutAborted,
    StartTraining,
    TrainingFinished,
)
from sim.run import simulate

CHECKPOINTS = {"checkpoint": {"every": 1}, "trainer": {"restarts": 3}}


def with_faults(*faults, train=CHECKPOINTS, **keys):
    """A run with these faults, and with the tables that their simulation needs; engines start at once."""
    config = config_of(**{"longest": 40, "slots": 16, "steps": 12, **keys}, train=train)
    data = json.loads(config.model_dump_json(exclude_none=True))
    data["fleet"] = {"start_s": 0.0, "trainer": {"checkpoint_every_s": 0.01, "restart_s": 1.0}}
    return RunConfig.model_validate_json(json.dumps(data | {"faults": faults}))


def story(out):
    """What happens to engines, after how many steps each leaves; the rollouts trained on."""
    step, changes, trained = 0, [], []
    for row in records(out):
        if isinstance(row.event, TrainingFinished):
            step = row.event.version
        elif isinstance(row.event, EngineLeaving):
            changes.append(("leaves", row.event.engine, step))
        elif isinstance(row.event, EngineLeft | EngineJoined):
            changes.append((type(row.event).__name__, row.event.engine))
        if isinstance(row.command, StartTraining):
            trained += row.command.rollout_ids
    return changes, trained


def test_the_same_faults_are_the_same_story_in_both_worlds(tmp_path):
    """A killed engine, a cut one, the trainer, a slow engine, one that stands still, a killed one.

    Engines get new ids in the order of their joins, and in a real run other places when the trainer is lost.
    """
    config = with_faults(
        {"kind": "kill", "engine": 1, "step": 2},
        {"kind": "cut", "engine": 0, "step": 4},
        {"kind": "kill", "rank": 0, "step": 6},
        {"kind": "slow", "step": 7, "seconds": 0.01, "factor": 2.0},
        {"kind": "stop", "step": 8, "seconds": 0.01},
        {"kind": "kill", "engine": 1, "step": 9},
    )
    simulated = simulate(config, out=tmp_path / "simulated", trace=True)
    real = run_checked(config, tmp_path / "real")
    stories = [story(tmp_path / name) for name in ("simulated", "real")]
    for changes, trained in stories:
        assert changes == [
            *(("leaves", 1, 2), ("EngineLeft", 1), ("EngineJoined", 2)),
            *(("leaves", 0, 4), ("EngineLeft", 0), ("EngineJoined", 3)),
            *(("leaves", last := changes[6][1], 9), ("EngineLeft", last), ("EngineJoined", 4)),
        ]
        assert len(set(trained)) == len(trained) == 12 * 8
    assert simulated.capacity.trainer.failures == real.trainer_restarts == 1
    for name in ("simulated", "real"):
        assert replay_run(Trace(tmp_path / name / TRACE_FILE)).difference is None


def test_a_cut_engine_never_loads_the_version_of_its_step(tmp_path):
    config = with_faults({"kind": "cut", "engine": 1, "step": 3})
    run_checked(config, tmp_path / "run")
    updates = [row.event for row in records(tmp_path / "run") if getattr(row.event, "engine", None) == 1]
    assert max(getattr(one, "version", 0) for one in updates) == 2


@pytest.mark.parametrize("kind", ["kill", "cut"])
def test_a_fault_comes_once_although_its_step_is_made_again(tmp_path, kind):
    """Without a checkpoint since step 2 the killed trainer makes steps 3 to 5 again."""
    faults = {"kind": kind, "engine": 0, "step": 4}, {"kind": "kill", "rank": 0, "step": 5}
    config = with_faults(*faults, train={"checkpoint": {"every": 2}, "trainer": {"restarts": 1}})
    summary = run_checked(config, tmp_path / "run")
    assert summary.trainer_restarts == 1
    lines = (tmp_path / "run" / "logs" / "faults.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == [kind, "kill"]


def test_a_full_disk_ends_the_run_and_resume_goes_on_without_it(tmp_path):
    config = with_faults({"kind": "disk_full", "step": 5}, {"kind": "kill", "engine": 0, "step": 9})
    with pytest.raises(RunFailedError, match=r"trace.jsonl.gz: No space left on device"):
        run(config, tmp_path / "run", parts_of(config))
    assert [row.event.version for row in records(tmp_path / "run") if isinstance(row.event, TrainingFinished)][-1] == 5
    run_checked(config, tmp_path / "run", resume=True)
    changes, _ = story(tmp_path / "run")
    assert changes[0] == ("leaves", 0, 9)


def test_faults_may_be_left_out_or_changed_when_a_run_is_resumed(tmp_path):
    config = with_faults({"kind": "disk_full", "step": 3})
    with pytest.raises(RunFailedError):
        run(config, tmp_path / "run", parts_of(config))
    others = [FaultConfig(kind="kill", engine=0, step=1), FaultConfig(kind="kill", engine=1, step=8)]
    run_checked(config.model_copy(update={"faults": others}), tmp_path / "run", resume=True)
    assert [one[1:] for one in story(tmp_path / "run")[0] if one[0] == "leaves"] == [(1, 8)]  # step 1 is over


def test_a_fault_at_a_second_comes_then(tmp_path):
    """The first requests would take for ever."""
    config = with_faults({"kind": "kill", "engine": 0, "second": 0.05})
    parts = parts_of(config)
    parts.engines[0] = FirstStands(num_slots=16)
    run_checked(config, tmp_path / "run", parts)
    left = [row for row in records(tmp_path / "run") if isinstance(row.event, EngineLeaving)]
    assert [row.event.engine for row in left] == [0]
    assert left[0].time_s >= 0.05


class FirstStands(FakeEngine):
    """Makes no step until it is started again."""

    async def start(self):
        self._step_s = 1e9 if not self.num_started else 0.0
        await super().start()


def test_a_killed_engine_keeps_the_tokens_that_it_has_reported(tmp_path):
    """It reports every 3, and makes steps between those of the trainer: it is the slower of the two."""
    config = with_faults({"kind": "kill", "engine": 0, "step": 2})
    parts = parts_of(config)
    parts.engines = [FakeEngine(num_slots=16, step_s=1e-3, stream_tokens=3, endless=True) for _ in parts.engines]
    run_checked(config, tmp_path / "run", parts)
    aborted = [row.event for row in records(tmp_path / "run") if isinstance(row.event, RolloutAborted)]
    known = [one.spans.num_tokens for one in aborted if one.engine == 0]
    assert any(known)
    assert all(tokens % 3 == 0 for tokens in known)


def test_the_trainer_cannot_go_on_without_a_checkpoint(tmp_path):
    config = with_faults({"kind": "kill", "rank": 0, "step": 2}, train={"trainer": {"restarts": 3}})
    with pytest.raises(TrainerLostError):
        run(config, tmp_path / "run", parts_of(config))


def test_an_interrupted_run_has_had_the_faults_of_its_steps(tmp_path):
    config = with_faults({"kind": "kill", "engine": 0, "step": 2})
    parts = parts_of(config, trainer=Killer(train_batch_size=8, at=5, do=interrupt))
    with pytest.raises(RunFailedError, match="interrupted"):
        run(config, tmp_path / "run", parts)
    run_checked(config, tmp_path / "run", resume=True)
    assert [one for one in story(tmp_path / "run")[0] if one[0] == "leaves"] == [("leaves", 0, 2)]


def test_a_backend_that_knows_no_faults_is_refused_before_the_run():
    class Bare:
        """An engine or a trainer, of which nothing is called."""

    config = with_faults({"kind": "kill", "engine": 1, "step": 1})
    parts = DriverParts(
        engines={0: FakeEngine(), 1: Bare()}, trainer=FakeTrainer(train_batch_size=8), codec=FakeCodec()
    )
    with pytest.raises(ConfigError, match="faults need a backend that carries them out, got Bare"):
        check_faults(config, parts)
    check_faults(config.model_copy(update={"faults": None}), parts)
    with pytest.raises(ConfigError, match="got Bare"):
        check_faults(with_faults({"kind": "kill", "rank": 0, "step": 1}), replace(parts, trainer=Bare()))


# ------------------------------------------------------------------------------------------- engines and processes


@pytest.mark.parametrize(
    ("fault", "end_s"),
    [
        (None, 10.0),
        ({"kind": "stop", "seconds": 7.0}, 17.0),
        ({"kind": "slow", "seconds": 1000.0, "factor": 3.0}, 30.0),
        ({"kind": "slow", "seconds": 5.0, "factor": 3.0}, 3 + 3 + 8.0),  # the steps that begin at 0 s and 3 s
    ],
)
def test_an_engine_in_memory_is_as_slow_as_a_simulated_one(fault, end_s):
    """An answer of 10 tokens, a second each."""

    async def answered():
        engine = FakeEngine(step_s=1.0, endless=True)
        await engine.start()
        if fault is not None:
            suffers = asyncio.create_task(engine.suffer(FaultConfig(**fault, step=1)))
            await asyncio.sleep(0)
        await engine.generate(GenerateRequest(0, (1,), 10, seed=0, temperature=1.0))
        end_s = asyncio.get_running_loop().time()
        if fault is not None:
            suffers.cancel()
        await engine.shutdown()
        return end_s

    assert virtual_clock.run(answered()) == pytest.approx(end_s)


class Processes:
    """Stands in for psutil and time: a process with a child, signals and sleeps in order."""

    NoSuchProcess, STATUS_ZOMBIE = ProcessLookupError, "zombie"

    def __init__(self, *, ends_at=float("inf")):
        self.now_s, self.ends_at, self.log = 0.0, ends_at, []

    def Process(self, pid):
        return One(self, pid)

    def sleep(self, seconds):
        self.log.append(round(seconds, 9))
        self.now_s += seconds

    def monotonic(self):
        return self.now_s


class One:
    def __init__(self, world, pid):
        self.world, self.pid = world, pid

    def children(self, *, recursive):
        assert recursive
        return [One(self.world, self.pid + 1)]

    def send_signal(self, number):
        self.world.log.append((number, self.pid))

    def is_running(self):
        return self.world.now_s < self.world.ends_at

    def status(self):
        return "sleeping"


STOP, GO, KILL = ([(number, pid) for pid in (7, 8)] for number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL))


@pytest.mark.parametrize(
    ("seconds", "factor", "ends_at", "log"),
    [
        (0.25, float("inf"), 9.0, [*STOP, 0.1, *STOP, 0.1, *STOP, 0.05, *GO]),
        (0.2, 4.0, 9.0, [*STOP, 0.075, *GO, 0.025, *STOP, 0.075, *GO, 0.025, *GO]),
        (9.0, float("inf"), 0.1, [*STOP, 0.1, *STOP, *GO, *KILL]),  # its children would stand still for ever
    ],
)
def test_processes_run_their_share_of_the_time_and_then_go_on(monkeypatch, seconds, factor, ends_at, log):
    world = Processes(ends_at=ends_at)
    monkeypatch.setitem(sys.modules, "psutil", world)
    monkeypatch.setattr(backends.vllm.process, "time", world)
    slow_down(7, seconds, factor)
    assert world.log == log
