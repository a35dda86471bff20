"""Checkpoints of runs with parts in memory: a resumed run loses nothing and does nothing twice."""

import asyncio
import contextlib
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from in_memory import (
    KINDS,
    Interrupts,
    Killer,
    Letters,
    config_of,
    interrupt,
    interrupted,
    parts_of,
    run,
    run_checked,
    turns_of,
)
from ledger_check import check_ledger, metrics_of, records
from refusals import message

from backends.driver.checkpoint import FOLDER, read_newest
from backends.driver.loop import EventLoop
from backends.fake import FakeBackend, FakeEngine, FakeTrainer
from backends.run import train
from pipelinerl.errors import (
    BackendError,
    ConfigError,
    EngineLostError,
    RunFailedError,
    TrainerLostError,
    TrainerUnplacedError,
)
from pipelinerl.records.recording import replay_run
from pipelinerl.records.run_folder import SUMMARY_FILE, TRACE_FILE
from pipelinerl.records.trace import Trace, replay
from pipelinerl.scheduler.events import (
    EngineJoined,
    EngineLeaving,
    EngineLeft,
    PublishWeights,
    RolloutFinished,
    Routing,
    StartRollout,
    WeightsLoaded,
)
from pipelinerl.scheduler.routing import HashRouter

KINDS_OF_RUN = [
    {"kind": kind, "weight_update": weight_update, "optimizer_steps_per_rl_step": 2}
    for kind in ("pipeline", "conventional", "one_step_off")
    for weight_update in KINDS
]


@pytest.mark.parametrize("make", [config_of, turns_of], ids=["one turn", "turns"])
@pytest.mark.parametrize("routing", Routing)
def test_real_rollouts_go_where_their_routing_says_and_a_resumed_run_goes_on(out, make, routing):
    """The trace replays. Three engines: every turn on the same under ``sticky``, under ``hash`` on that of the hash."""
    config = make(steps=6, engines=3, slots=4, routing=routing)
    interrupted(config, out)
    run_checked(config, out, resume=True)
    engines = {}
    for row in records(out):
        if isinstance(row.command, StartRollout):
            engines.setdefault(row.command.rollout_id, []).append(row.command.engine)
    if make is config_of:
        assert {one for several in engines.values() for one in several} == {0, 1, 2}
    if make is turns_of and routing in (Routing.STICKY, Routing.HASH):
        assert all(len(set(several)) == 1 for several in engines.values())
        assert max(map(len, engines.values())) > 1
    if routing is Routing.HASH:
        router = HashRouter(3)
        assert all(several[0] == router.go_on(one, 0, 0, None) for one, several in engines.items())


@pytest.mark.parametrize(
    ("setting", "at"),
    [
        *(pytest.param(setting, 3, marks=pytest.mark.slow) for setting in KINDS_OF_RUN),
        ({"publish_every": 4, "max_lag": 3}, 6),  # between two publications
        ({"micro_batch_size": 4}, 3),  # between two micro-batches
    ],
    ids=str,
)
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(out, setting, at):
    config = config_of(steps=20, longest=40, slots=16, **setting)
    interrupted(config, out, at=at)
    assert replay(Trace(out / TRACE_FILE)).difference is None
    parts = parts_of(config)
    summary = run_checked(config, out, parts, resume=True)
    assert parts.trainer.version == config.optimizer_steps
    assert 0 < len(parts.trainer.trained) <= 20 - at  # what was done before the checkpoint is not done again
    assert all(len(batch) == 8 for batch in parts.trainer.trained)
    assert summary.lag.max <= setting.get("max_lag", 20)


def test_the_model_is_exported_in_between(out):
    config = config_of(steps=5, train={"checkpoint": {"export_every": 2}})
    parts, exported = parts_of(config), []
    parts.trainer = Killer(train_batch_size=8, on_export=lambda: exported.append(parts.trainer.version))
    run_checked(config, out, parts)
    assert exported == [2, 4, 5]


class Dying(FakeTrainer):
    """Dies so many times when it is to begin a step; not before a checkpoint is complete, if it is given one."""

    def __init__(self, *, times, at=5, after=None):
        super().__init__(train_batch_size=8)
        self.times, self.at, self.after = times, at, after

    async def train(self, samples, *, completes_step):
        if self.version == self.at and self.times:
            while self.after is not None and not self.after.exists():
                await asyncio.sleep(0.01)
            self.times -= 1
            raise TrainerLostError("rank 0 is dead")
        return await super().train(samples, completes_step=completes_step)


def dying(config, out, *, times):
    return parts_of(config, trainer=Dying(times=times, after=out / FOLDER / "step_000004"))


def test_a_run_goes_on_by_itself_from_its_last_checkpoint_when_its_trainer_is_lost(out, caplog):
    config = config_of(steps=9, longest=40, slots=16, train={"checkpoint": {"every": 2}, "trainer": {"restarts": 2}})
    parts = dying(config, out, times=2)
    summary = run_checked(config, out, parts)
    assert summary.trainer_restarts == 2
    assert [engine.num_started for engine in parts.engines] == [3, 3]
    assert len(parts.trainer.trained) == 5 + 1 + 5  # steps 1 to 5, 5 again, 5 to 9
    assert [one for one in caplog.messages if "rank 0" in one] == ["rank 0 is dead; the run goes on from step 4"] * 2
    assert [one["restarts/trainer"] for one in metrics_of(out)] == [0] * 3 + [2] * 6  # step 4 was kept


def test_a_trainer_that_is_lost_too_often_ends_the_run_and_resume_goes_on(out):
    config = config_of(steps=9, longest=40, slots=16, train={"checkpoint": {"every": 2}, "trainer": {"restarts": 1}})
    with pytest.raises(TrainerLostError, match=r"^rank 0 is dead \(train.trainer.restarts=1 are used up\)$"):
        run(config, out, dying(config, out, times=2))
    assert read_newest(out, config).state.version == 4
    assert run_checked(config, out, dying(config, out, times=1), resume=True).trainer_restarts == 1


def test_a_trainer_that_is_lost_before_the_first_checkpoint_ends_the_run(out):
    config = config_of(steps=9)
    with pytest.raises(TrainerLostError, match=r"^rank 0 is dead$"):
        run(config, out, parts_of(config, trainer=Dying(times=1)))


class Homeless(FakeTrainer):
    """Has lost its accelerators in step 5: it cannot start again."""

    def __init__(self, after):
        super().__init__(train_batch_size=8)
        self.after, self.lost = after, False

    async def start(self):
        if self.lost:
            raise TrainerUnplacedError("trainer hangs: phase=placing")
        await super().start()

    async def train(self, samples, *, completes_step):
        if self.version == 5:
            while not self.after.exists():
                await asyncio.sleep(0.01)
            self.lost = True
            raise TrainerLostError("rank 3 is dead")
        return await super().train(samples, completes_step=completes_step)


class Shrinking(FakeBackend):
    """Its first trainer loses accelerators: ``there`` are left. It checks nothing but that ranks are an even number."""

    def __init__(self, out, there):
        super().__init__()
        self.out, self.there, self.ranks = out, there, []

    def check(self, config):
        if config.training_accelerators % 2:
            raise ConfigError("train.trainer.sequence_parallel must divide the ranks")

    @contextlib.contextmanager
    def open(self, config, *, logs=None):
        with super().open(config, logs=logs) as parts:
            self.ranks.append(config.training_accelerators)
            trainer = parts.trainer if len(self.ranks) > 1 else Homeless(self.out / FOLDER / "step_000004")
            yield replace(parts, trainer=trainer, accelerators=lambda: self.there)


def test_a_run_goes_on_with_as_many_ranks_as_there_are_accelerators_for(out, caplog):
    """Of 2 + 4 accelerators 2 + 3 are there; 3 ranks do not fit, 2 do."""
    config = wide_config(restarts=1)
    backend = Shrinking(out, there=5)
    summary = train(config, out=out, backend=backend)
    assert backend.ranks == [4, 2]
    check_ledger(out, config, summary)
    assert summary.trainer_restarts == 1
    assert "5 of 6 accelerators are there; the run goes on from step 4 with 2 of 4 ranks" in caplog.text


@pytest.mark.parametrize("there", [6, 3, 2])
def test_a_run_ends_if_other_ranks_would_not_help(out, there):
    """All accelerators are there; there are too few; there are engines only."""
    backend = Shrinking(out, there=there)
    with pytest.raises(TrainerUnplacedError, match=r"^trainer hangs: phase=placing$"):
        train(wide_config(restarts=1), out=out, backend=backend)
    assert backend.ranks == [4]
    assert read_newest(out, wide_config(restarts=1)).state.version == 4


def wide_config(*, restarts):
    settings = {"checkpoint": {"every": 2}, "trainer": {"restarts": restarts}}
    config = config_of(steps=9, longest=40, slots=16, train=settings)
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"accelerators": 6})})


def test_what_a_trainer_raises_on_purpose_ends_the_run(out):
    """It would raise it again."""

    def give_up():
        raise BackendError("the gradient was not finite")

    config = config_of(steps=9, train={"checkpoint": {"every": 1}})
    parts = parts_of(config, trainer=Killer(train_batch_size=8, at=5, do=give_up))
    with pytest.raises(BackendError, match=r"^the gradient was not finite$"):
        run(config, out, parts)
    again = replay_run(Trace(out / TRACE_FILE))  # its rollouts in progress were recorded as aborted
    assert (again.difference, again.compared) == (None, ("summary.json", "steps.csv"))
    assert [engine.num_started for engine in parts.engines] == [1, 1]


def test_going_on_samples_nothing_before_the_engines_have_the_published_weights(out):
    """Every span of the whole trace names a version that its engine had reported, or was about to report."""
    config = config_of(longest=40, slots=16)
    interrupted(config, out)
    run(config, out, parts_of(config), resume=True)
    published = 0
    for row in records(out):
        if isinstance(row.command, PublishWeights):
            published = row.command.version
        if isinstance(row.event, WeightsLoaded):
            assert row.event.version == published
        if isinstance(row.event, RolloutFinished):
            assert max(row.event.spans.versions) <= published


@pytest.mark.slow
def test_an_interrupt_while_one_engine_is_late_with_an_update_gives_all_engines_the_newest_weights(out):
    """Going on reports the late engine; the answer is a publication, which no engine may be said to have."""
    config = config_of(steps=12, longest=20, slots=16)
    parts = parts_of(config, task=Interrupts(when=lambda _: parts.trainer.version >= 2))
    parts.engines[0] = FakeEngine(num_slots=16, update_s=60.0)
    interrupted(config, out, parts)
    state = read_newest(out, config).state
    assert state.scheduler.loaded[0] < state.scheduler.loaded[1] < state.version
    run_checked(config, out, resume=True)


class Going(FakeEngine):
    """Is lost once, in its 10th request: then it cannot be started again, or does not end either."""

    def __init__(self, *, ends, **settings):
        super().__init__(**settings)
        self.ends, self.left, self.lost = ends, 10, False

    async def generate(self, request):
        self.left -= 1
        if self.left == 0:
            self.lost = True
            self.die()
        return await super().generate(request)

    async def start(self):
        if self.lost:
            raise EngineLostError("engine start failed: no room")
        await super().start()

    async def shutdown(self):
        if self.lost and not self.ends:
            self.lost = False  # the end of the run asks once more
            await asyncio.sleep(600)
        await super().shutdown()


@pytest.mark.parametrize(
    ("setting", "ends"),
    [
        ({"weight_update": "keep"}, True),
        ({"weight_update": "keep"}, False),
        ({"weight_update": "wait"}, True),
        ({"weight_update": "wait"}, False),
        (
            {"kind": "conventional"},
            True,
        ),  # colocated, an engine that does not end holds up the trainer, which must wait
    ],
)
def test_an_engine_that_was_gone_or_leaving_is_so_when_the_run_goes_on_and_its_place_has_a_new_one(out, setting, ends):
    config = config_of(steps=12, longest=40, slots=16, **setting)
    parts = parts_of(config, trainer=Killer(train_batch_size=8, at=6, do=interrupt))
    parts.engines[1] = Going(num_slots=16, ends=ends)
    interrupted(config, out, parts)
    state, num_records = read_newest(out, config).state, len(records(out))
    assert state.scheduler.loaded.keys() == {0}
    assert state.scheduler.leaving == (set() if ends else {1})
    run_checked(config, out, resume=True)
    changes = [one.event for one in records(out) if isinstance(one.event, EngineJoined | EngineLeaving | EngineLeft)]
    joined = EngineJoined(2, state.scheduler.published)
    assert changes == [EngineLeaving(1), EngineLeft(1), joined]
    finished = [row.event for row in records(out)[num_records:] if isinstance(row.event, RolloutFinished)]
    assert {one.engine for one in finished} == {0, 2}


def test_a_checkpoint_holds_the_problem_of_every_rollout_in_progress(out, monkeypatch):
    """Also of those that were started at the very instant it was written."""
    config, carry_out_all = config_of(), EventLoop._carry_out_all

    def carried_out_and_interrupted(loop, commands):
        carry_out_all(loop, commands)
        loop._tasks.ended.set()  # as Ctrl-C does

    with monkeypatch.context() as patch:
        patch.setattr(EventLoop, "_carry_out_all", carried_out_and_interrupted)
        interrupted(config, out, parts_of(config))
    state = read_newest(out, config).state
    assert len(state.in_flight) == 12
    assert state.in_flight.keys() <= state.rollouts.keys()
    run_checked(config, out, resume=True)


def test_a_complete_run_that_goes_on_evaluates_and_exports_again(out):
    config = config_of(train={"evaluation": {"problems": 4}})
    first = run(config, out, parts_of(config))
    (out / "model" / "fake.json").unlink()
    parts = parts_of(config)
    assert run_checked(config, out, parts, resume=True) == first
    assert parts.trainer.trained == []
    assert (out / "model" / "fake.json").exists()


def test_a_run_that_was_interrupted_or_complete_goes_on_as_a_longer_one(out, caplog):
    """Its trace replays as a whole. A rate that falls to the end is then another one, which is said."""
    train = {"optimizer": {"learning_rate": 1e-3, "schedule": "cosine"}}
    interrupted(config_of(steps=6, train=train), out, at=2)
    run_checked(config_of(steps=8, train=train), out, resume=True)
    assert "jumps to that of a run of 8 steps" in caplog.text
    assert "was written with optimizer_steps=8, got 7" in message(read_newest, out, config_of(steps=7, train=train))
    longer = config_of(steps=11, train=train)
    parts = parts_of(longer)
    run_checked(longer, out, parts, resume=True)
    assert len(parts.trainer.trained) == 3
    assert Trace(out / TRACE_FILE).config.optimizer_steps == 6  # replay learns of more from an event


def test_a_run_that_was_interrupted_in_its_last_step_and_completed_goes_on_as_a_longer_one(out):
    config = config_of(steps=4)
    interrupted(config, out, parts_of(config, trainer=Killer(train_batch_size=8, train_s=0.05, at=3, do=interrupt)))
    assert read_newest(out, config).state.version == 4
    run_checked(config, out, resume=True)
    run_checked(config_of(steps=6), out, resume=True)


def test_a_disk_that_refuses_to_move_the_summary_of_the_part_before_costs_a_line(out, monkeypatch):
    config, rename = config_of(), Path.rename
    interrupted(config, out)

    def full(path, target):
        if path == out / SUMMARY_FILE:
            raise OSError(28, "No space left on device")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", full)
    assert "No space left on device" in message(run, config, out, parts_of(config), resume=True)


@pytest.mark.parametrize("steps", [6, 7])
def test_the_end_of_a_conventional_run_is_no_end_but_that_of_one_step_off_is(out, steps):
    """Of 7 steps the last RL step has one. One step off generates nothing while it trains the last RL step."""
    shape = {"optimizer_steps_per_rl_step": 2}
    for kind in ("conventional", "one_step_off"):
        folder = out / kind
        run(config_of(steps=steps, kind=kind, **shape), folder, parts_of(config_of(kind=kind)))
        longer = config_of(steps=10, kind=kind, **shape)
        if kind == "one_step_off":
            rule = f"optimizer_steps must stay {steps}: step_00000{steps} ends there"
            assert rule in message(read_newest, folder, longer)
        else:
            assert run_checked(longer, folder, resume=True).lag.max == 1


def test_a_run_whose_rewards_all_fail_is_stalled_and_is_so_again_when_it_goes_on(out):
    config = config_of(discard_limit=50)
    for resume in (False, True):
        with pytest.raises(RunFailedError, match=r"stalled: .*discard_limit = 50"):
            run(config, out, parts_of(config, task=Letters(raises_every=1)), resume=resume)


def test_a_kill_while_a_checkpoint_replaces_one_of_its_version_leaves_one(out, monkeypatch):
    config = config_of(steps=9, train={"checkpoint": {"every": 1, "keep": 1}})
    rename = Path.rename

    def killed(path, target):
        if path.name == "checkpoint" and target.with_suffix(".before").exists():
            raise KeyboardInterrupt  # after Ctrl-C: its second one
        return rename(path, target)

    killer = Killer(train_batch_size=8, at=3, do=interrupt)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            run(config, out, parts_of(config, trainer=killer))
    assert read_newest(out, config).state.version >= 3
    run_checked(config, out, resume=True)


def test_sigterm_ends_a_run_as_ctrl_c_does(out):
    """What a job scheduler, ``timeout`` and a shutdown send; without a handler it would end this process."""
    config = config_of(steps=9)
    killer = Killer(train_batch_size=8, at=3, do=lambda: signal.raise_signal(signal.SIGTERM))
    interrupted(config, out, parts_of(config, trainer=killer))
    assert read_newest(out, config).state.version >= 3
    run_checked(config, out, resume=True)


def test_a_checkpoint_of_another_configuration_is_refused(out):
    config = config_of()
    interrupted(config, out)
    assert "was written with scheduler.train_batch_size=8, got 16" in message(read_newest, out, config_of(batch=16))
    read_newest(out, config_of(train={"checkpoint": {"every": 7}}))  # may differ


@pytest.mark.parametrize(
    ("resume", "says"),
    [
        (False, r"^interrupted before the first optimizer step$"),
        (True, r"^interrupted before anything new, after 3 optimizer steps; --resume goes on"),
    ],
)
def test_ctrl_c_while_engines_start_ends_at_once_and_says_how_far_the_run_is(out, resume, says):
    config = config_of(steps=3)
    if resume:
        run(config, out, parts_of(config))
    parts = parts_of(config)

    async def pressed():
        interrupt()
        await asyncio.sleep(600)

    parts.engines[0].start = pressed
    with pytest.raises(RunFailedError, match=says):
        run(config, out, parts, resume=resume)
    assert (out / FOLDER).exists() is resume


@pytest.mark.parametrize(("kind", "may"), [("pipeline", True), ("conventional", False)])
def test_a_run_may_go_on_with_more_ranks_but_not_with_more_engines(out, kind, may):
    config = config_of(kind=kind)
    interrupted(config, out, at=2)
    cluster = config.cluster.model_copy(update={"accelerators": config.cluster.accelerators + 2})
    changed = config.model_copy(update={"cluster": cluster})
    if may:
        run_checked(changed, out, resume=True)
    else:
        assert "was written with cluster.accelerators=2, got 4" in message(read_newest, out, changed)
