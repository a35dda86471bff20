"""The real driver in simulated time: its clock jumps to the next timer, so hours take milliseconds and no thread runs.

Engines, trainer, rewards and environments are in memory. A run is a function of its case (``fault_schedules.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import random
import selectors
import shutil
import signal
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
from fault_schedules import Case, Fault, Kind

import backends.driver.checkpoint
import backends.driver.lifecycle
import backends.driver.loop
import backends.run
import backends.workers.rewards
from backends.driver.checkpoint import FOLDER, CheckpointKeeper
from backends.driver.fleet import REQUEST, FleetRequest
from backends.fake import DRIFT, FakeCodec, FakeEngine, FakeReference, FakeTrainer
from backends.interface import AnswerLostError, GroupMembers, MoreEngines, Parts
from backends.owner import DriverLock, driver_folder
from backends.transfer.transport import REFUSED
from backends.workers.main import _answer
from pipelinerl.errors import BackendError, EngineLostError, TrainerLostError, TransferError
from pipelinerl.records.run_folder import cannot_write, writing
from pipelinerl.records.trace import TraceWriter
from pipelinerl.rl.config import TaskConfig
from pipelinerl.rl.segments import SegmentKind
from pipelinerl.rl.tasks import load_environment
from pipelinerl.scheduler.events import WeightUpdate

PATIENCE_S = 5000.0
"""Longest time without an optimizer step: above the sum of all time-outs of all faults of a case."""
MOST_TURNS = 200_000
"""Of the event loop without an optimizer step."""
GROUP_TIMEOUT_S = 120.0


class SuddenEnd(BaseException):
    """The process of the driver is gone."""


class Clock(selectors.DefaultSelector):
    """Jumps to the next timer when nothing is ready."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def select(self, timeout=None):
        world = self.world
        if timeout:
            world.now_s += timeout
        world.turns += 1
        if (world.gone or world.at_once) and not world.stopping:
            world.stopping = True
            raise SuddenEnd if world.gone else KeyboardInterrupt
        still = world.now_s - world.step_s > PATIENCE_S or world.turns > MOST_TURNS
        if (still or timeout is None) and not world.stopping:
            world.stopping = True
            raise AssertionError(f"stand-still since {world.step_s:.0f} s, now {world.now_s:.0f} s")
        return super().select(0)


class World:
    """All that is outside of the driver, over the attempts of a run (mutable)."""

    def __init__(self, case: Case, out: Path) -> None:
        self.case, self.config, self.out = case, case.config, out
        self.rng = random.Random(case.seed + 1)
        self.now_s, self.calls, self.due = 1000.0, Counter(), list(case.faults)
        self.kept: int | None = None  # version of the newest checkpoint
        self.made: list[tuple[int, ...]] = []  # rollouts of each optimizer step that the trainer has made
        self.versions: dict[int, list[int]] = {}  # that sampled the tokens of a rollout, when it was trained on
        self.answers: dict[tuple[int, int], list[list[int]]] = {}  # of (rollout, tokens before)
        self.aborts: set[int] = set()
        self.num_hit = self.num_attempts = 0
        self.log: list[str] = []
        self.broken: list[str] = []
        self.attempt()

    def attempt(self) -> None:
        """Begin anew, as a new process does."""
        self.num_attempts += 1
        self.armed, self.fired, self.no_starts = Counter(), Counter(), set()
        self.gone = self.at_once = self.stopping = self.disk_full = self.pressed = self.trainer_has_memory = False
        self.step_s, self.turns, self.leaked = self.now_s, 0, []
        slots = self.config.scheduler.generation_batch_size
        self.engines = [Engine(self, one, num_slots=slots) for one in range(self.config.num_engines)]
        self.trainer = Trainer(self)
        self.reference = Reference() if self.config.train_table.loss.needs_reference else None

    def parts(self) -> Parts:
        members = dict(enumerate(self.engines))
        more = None if self.config.colocated else MoreEngines(self.make_engine)
        group = GroupMembers(self.trainer, members, timeout_s=GROUP_TIMEOUT_S) if self.case.sends else None
        return Parts(
            members, self.trainer, FakeCodec(), reference=self.reference, group=group,
            launch=functools.partial(launched, self), more=more,
        )  # fmt: skip

    def make_engine(self, place: int) -> Engine:
        assert place == len(self.engines)
        self.engines.append(Engine(self, place, num_slots=self.config.scheduler.generation_batch_size))
        return self.engines[place]

    # ------------------------------------------------------------------------------------- faults

    async def sleep(self, call: str) -> None:
        await asyncio.sleep(self.seconds(call))

    def seconds(self, call: str) -> float:
        return self.case.mean_s[call] * self.rng.uniform(0.5, 1.5)

    def called(self, call: str) -> None:
        """Note a call, and let the faults come that are due at it."""
        self.calls[call] += 1
        for fault in [one for one in self.due if one.call == call and one.nth <= self.calls[call]]:
            loop = asyncio._get_running_loop()
            if loop is None and fault.kind not in (Kind.DISK_FULL, Kind.SUDDEN_END):
                continue  # the driver is not there yet: at the next call
            self.due.remove(fault)
            if fault.delay_s and loop is not None:
                loop.call_later(fault.delay_s, self.comes, fault)
            else:
                self.comes(fault)

    def comes(self, fault: Fault) -> None:
        self.log.append(f"{self.now_s:.3f} {fault.kind} {fault.engines} at {fault.call} {fault.nth}")
        self.fired[fault.kind] += 1
        match fault.kind:
            case Kind.KILL | Kind.HANG | Kind.SLOW:
                for engine in fault.engines:
                    self.engines[engine].suffer(fault)
            case Kind.LOSE_TRAINER:
                self.trainer.lost = True
            case Kind.LOSE_REFERENCE:
                if self.reference is not None:
                    self.reference.die()
            case Kind.DISK_FULL:
                self.disk_full = True
            case Kind.CTRL_C:
                self.press()
            case Kind.SUDDEN_END:
                self.end_suddenly()
            case Kind.ADD:
                self.ask(FleetRequest(add=fault.number))
            case Kind.DRAIN:
                hosts = [f"machine {engine}" for engine in fault.engines]
                self.ask(FleetRequest(drain=hosts, notice_s=fault.seconds))
            case _:
                self.armed[fault.kind] += fault.number

    def press(self) -> None:
        """Press Ctrl-C, which ends the driver at once if it is the second time."""
        if self.pressed:
            self.at_once = True
        elif signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            self.pressed, self.pressed_s = True, self.now_s
            signal.raise_signal(signal.SIGINT)

    def ask(self, request: FleetRequest) -> None:
        folder, unfinished = driver_folder(self.out), self.out.with_suffix(".request")
        if folder is not None and not self.disk_full:
            with unfinished.open("w") as file:
                file.write(request.model_dump_json())
            os.replace(unfinished, folder / f"{REQUEST}{len(self.log):06d}.json")  # a call of the driver it is not

    def takes(self, kind: Kind) -> bool:
        """Return whether a fault of this kind is to come now."""
        self.armed[kind] -= 1
        if self.armed[kind] >= 0:
            return True
        self.armed[kind] = 0
        return False

    def end_suddenly(self) -> None:
        """Keep the files as they are: nobody writes to them any more."""
        if not self.gone and self.out.exists():
            self.gone = True
            shutil.copytree(self.out, self.out.with_suffix(".left"))
            whole = [int(one.name.removeprefix("step_")) for one in (self.out / FOLDER).glob("step_??????")]
            self.kept_then = max(whole, default=None)  # perhaps one that its keeper has just moved there

    def must(self, condition: bool, what: str) -> None:
        """Note a broken promise, also if the driver catches the error."""
        if not condition:
            if not self.gone:  # else the end of the test's own event loop has come
                self.broken.append(what)
            raise AssertionError(what)

    def progress(self) -> None:
        self.step_s, self.turns = self.now_s, 0


class Engine(FakeEngine):
    """Can be lost at any moment, hang, be slow, refuse weights, fail to start."""

    def __init__(self, world: World, engine_id: int, **settings) -> None:
        self.world, self.id, self.host = world, engine_id, f"machine {engine_id}"
        self.slow_until_s, self.hangs, self.asleep, self.killed = 0.0, False, False, False
        self.joined_at = self.staged = None
        self.gone = asyncio.Event()
        super().__init__(**settings, stream_tokens=3)

    @property
    def _step_s(self) -> float:
        self.world.called("step")
        return self.world.seconds("step") * (20.0 if self.world.now_s < self.slow_until_s else 1.0)

    @_step_s.setter
    def _step_s(self, _: float) -> None: ...

    @property
    def _update_s(self) -> float:
        return self.world.seconds("update")

    @_update_s.setter
    def _update_s(self, _: float) -> None: ...

    def suffer(self, fault: Fault) -> None:
        match fault.kind:
            case Kind.SLOW:
                self.slow_until_s = self.world.now_s + fault.seconds
            case Kind.HANG if not self._lost:
                self.hangs = True
                self._loop.cancel()
                asyncio.get_running_loop().call_later(fault.seconds, self.die_if, self.num_started)
            case _:
                self.die()

    def die_if(self, num_started: int) -> None:
        if self.num_started == num_started:
            self.die()

    def die(self) -> None:
        self.world.num_hit += not self._lost  # losses of engines
        super().die()
        self.killed = True
        self.gone.set()

    async def answers(self) -> None:
        """Return if it answers; else raise when it is lost."""
        if self.hangs:
            await self.gone.wait()
        self._check()

    async def start(self) -> None:
        self.killed = False
        self.world.called("start")
        self.world.must(not self.world.trainer_has_memory, "an engine starts while the trainer has the memory")
        await self.world.sleep("start")
        if self.killed or self.world.takes(Kind.NO_START):
            self.world.no_starts.add(self.id)
            raise EngineLostError(f"engine start failed: engine={self.id}")
        self.hangs = self.asleep = False
        self.joined_at = self.staged = None
        self.gone = asyncio.Event()
        await super().start()

    async def generate(self, request):
        self.world.called("generate")
        self.world.must(not self.asleep, "a request while the engine sleeps")
        if self.world.takes(Kind.REFUSED):
            raise BackendError("the request is too long")
        answers = self.world.answers.setdefault((request.rollout_id, len(request.prompt_tokens)), [])
        try:
            answer = await super().generate(request)
        except AnswerLostError as error:
            answers.append(error.known.tokens_T.tolist())
            raise
        answers.append(answer.tokens_T.tolist())
        return answer

    async def abort(self, rollout_id):
        self.world.called("abort")
        self.world.aborts.add(rollout_id)
        await self.answers()
        await super().abort(rollout_id)

    async def update(self, weights, weight_update):
        self.world.called("update")
        await self.answers()
        self.world.must(not self.asleep, "an update while the engine sleeps")
        self.world.must(weights.version >= self._weights.version, "an older version")
        self.world.must(weights.version <= self.world.trainer.version, "a version that the trainer has not made")
        self.world.must(weight_update is not WeightUpdate.WAIT or not self._sequences, "a request is in progress")
        if self.world.case.sends and self.staged != weights.version:
            self.die()
            raise EngineLostError(f"engine lost: engine={self.id} has {self.staged}, not {weights.version}")
        if not self.world.case.sends and self.world.takes(Kind.DAMAGED):
            await asyncio.sleep(self._update_s)
            raise TransferError(f"version {weights.version} is damaged")
        if not self.world.case.sends and self.world.takes(Kind.NOT_SENT):
            await asyncio.sleep(self._update_s)
            self.die()
        times = await super().update(weights, weight_update)
        await self.answers()
        return times

    async def sleep(self):
        self.world.called("sleep")
        await self.answers()
        if self.world.config.colocated:
            self.world.must(not self._sequences, "an engine falls asleep with a request")
            await self.world.sleep("sleep")
            await self.answers()
            self.asleep = True

    async def wake(self):
        self.world.called("sleep")
        self.world.must(not self.world.trainer_has_memory, "an engine wakes beside the trainer")
        await self.answers()
        await self.world.sleep("sleep")
        await self.answers()
        self.asleep = False

    async def shutdown(self):
        self.world.called("shutdown")
        self.die()
        await self.world.sleep("shutdown")

    async def until_lost(self) -> None:
        await self.gone.wait()

    async def join_group(self, rendezvous, *, first_worker):
        await self.answers()
        self.joined_at = rendezvous


class Trainer(FakeTrainer):
    """Checks each sample against what engines have answered."""

    def __init__(self, world: World) -> None:
        config = world.config
        self.world, self.lost, self.busy, self.num_opened = world, False, set(), 0
        self.rendezvous, self.members, self.aborted = "", [], None
        super().__init__(
            train_batch_size=config.scheduler.train_batch_size, kl_coefficient=config.train_table.loss.kl_coefficient
        )

    @contextlib.contextmanager
    def working(self, call: str, *but_not: str):
        self.world.called(call)
        self.world.must(not self.busy & {call, *but_not}, f"{call} while {self.busy}")
        if call in ("train", "publish", "snapshot", "export") and self.world.config.colocated:
            self.world.must(self.world.trainer_has_memory and self.alone(), f"{call} without memory")
        self.check()
        self.busy.add(call)
        try:
            yield
            self.check()
        finally:
            self.busy.discard(call)

    def alone(self) -> bool:
        return all(one.asleep or one._lost for one in self.world.engines)

    def check(self) -> None:
        if self.lost:
            raise TrainerLostError("trainer lost: rank 0 is dead")

    async def start(self):
        self.lost, self.busy = False, set()
        self.world.trainer_has_memory = self.world.config.colocated
        await super().start()

    async def load(self, folder):
        await super().load(folder)
        self.world.must(self.version == self.world.kept, "not the newest checkpoint")

    async def train(self, samples, *, completes_step):
        with self.working("train", "publish", "snapshot", "export"):
            await self.world.sleep("train")
            for one in samples:
                self.look_at(one)
            result = await super().train(samples, completes_step=completes_step)
        if completes_step:
            self.world.made[self.version - 1 :] = [self.trained[-1]]
            self.world.progress()
        return result

    def look_at(self, sample) -> None:
        """All its tokens come from engines, and no lag is too large."""
        versions = [round((-1.0 - float(one)) / DRIFT) for one in sample.behaviour_logprob_T]
        most = self.world.config.scheduler.max_lag
        self.world.must(most is None or self.version - min(versions) <= most, f"lag of rollout {sample.rollout_id}")
        self.world.must(max(versions) <= self.version, "a version that was not there yet")
        self.world.versions[sample.rollout_id] = versions
        place = len(sample.prompt_P)
        for segment in sample.segments:
            tokens = segment.tokens.tolist()
            if segment.kind is SegmentKind.GENERATED:
                self.world.must(self.come(sample.rollout_id, place, tokens), f"tokens of rollout {sample.rollout_id}")
            place += len(tokens)

    def come(self, rollout_id: int, place: int, tokens: list[int]) -> bool:
        """Return whether tokens are whole answers of engines, one after the other."""
        known = self.world.answers.get((rollout_id, place), [])
        fits = {len(one) for one in known if one and tokens[: len(one)] == one}
        return not tokens or any(self.come(rollout_id, place + size, tokens[size:]) for size in fits)

    async def publish(self, version):
        with self.working("publish", "train", "snapshot", "join", *(["send"] if self.world.case.sends else [])):
            self.world.must(version <= self.version, "a version that was not there yet")
            await self.world.sleep("publish")
            return await super().publish(version)

    async def snapshot(self):
        with self.working("snapshot", "train", "publish"):
            await self.world.sleep("snapshot")
            await super().snapshot()

    async def save(self, folder):
        with self.working("save"), writing(folder):
            await self.world.sleep("save")
            await super().save(folder)

    async def export(self, folder):
        with self.working("export", "train"), writing(folder):
            await self.world.sleep("export")
            await super().export(folder)

    async def offload(self):
        self.world.trainer_has_memory = False

    async def reload(self):
        self.check()
        self.world.must(self.alone(), "the trainer wakes beside an engine")
        self.world.trainer_has_memory = True

    # ------------------------------------------------------------- its part in a group that weights are sent through

    async def open_group(self):
        self.world.must(not self.busy & {"send", "join"}, "a new group in a transfer")
        self.check()
        self.num_opened += 1
        self.rendezvous, self.aborted = f"rendezvous {self.num_opened}", asyncio.get_running_loop().create_future()
        return self.rendezvous

    async def abort_group(self, rendezvous, why):
        if rendezvous == self.rendezvous and not self.aborted.done():
            self.aborted.set_result(why)

    async def join_group(self, names, *, timeout_s):
        with self.working("join", "send"):
            await self.world.sleep("send")
            self.members = [one for one in self.world.engines if one.joined_at == self.rendezvous]
            await self.all_there(len(names) - 1)

    async def all_there(self, number: int) -> None:
        there = [one for one in self.members if one.joined_at == self.rendezvous and not one._lost and not one.hangs]
        if len(there) < number:
            done, _ = await asyncio.wait({self.aborted}, timeout=GROUP_TIMEOUT_S)
            raise TransferError(self.aborted.result() if done else f"no answer for {GROUP_TIMEOUT_S:g} s")

    async def send(self, weights):
        if not self.world.case.sends:
            return
        with self.working("send", "publish", "join"):
            await self.world.sleep("send")
            if self.world.takes(Kind.NOT_SENT):
                raise TransferError("the connection was reset")
            if self.world.takes(Kind.DAMAGED):
                raise TransferError(f"version {weights.version} {REFUSED}")
            await self.all_there(len(self.members))
            for one in self.members:
                one.staged = weights.version


class Reference(FakeReference):
    async def logprobs(self, samples):
        await asyncio.sleep(0.3)
        return await super().logprobs(samples)


class Rewards:
    """Stands in for ``RewardThreads``."""

    def __init__(self, world: World) -> None:
        self.world, self.room = world, asyncio.Semaphore(8)

    async def call(self, function, *arguments, timeout_s):
        async with self.room:
            self.world.called("reward")
            if self.world.takes(Kind.REWARD_RAISES):
                raise RuntimeError("no reward today")
            if self.world.takes(Kind.REWARD_HANGS):
                await asyncio.sleep(timeout_s)
                raise TimeoutError("no reward in time")
            await self.world.sleep("reward")
            return float(function(*arguments))

    def close(self) -> None: ...


class Worker:
    """Stands in for the process of an environment."""

    def __init__(self, world: World) -> None:
        self.world, self.alive, self.gone, self.environment = world, True, False, None

    async def exchange(self, line: bytes) -> bytes:
        self.world.called("reward")
        await self.world.sleep("reward")
        if not self.alive or self.world.takes(Kind.ENVIRONMENT_DIES):
            return b""
        if self.environment is None:
            self.environment = load_environment(TaskConfig.model_validate_json(line))
            return b"{}"
        if self.world.takes(Kind.REWARD_HANGS):
            await asyncio.sleep(1e9)
        if self.world.takes(Kind.REWARD_RAISES):
            return b'{"fault": "raised today"}'
        return json.dumps(await _answer(self.environment, json.loads(line))).encode()

    def kill(self) -> None:
        self.alive, self.gone = False, True

    async def end(self) -> None:
        self.kill()


async def launched(world: World, _kind: str, _log: Path | None) -> Worker:
    return Worker(world)


class AtOnce:
    """Stands in for ``ThreadPoolExecutor``."""

    def __init__(self, _: int) -> None: ...

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None: ...

    def map(self, function, values):
        return list(map(function, values))

    def submit(self, function, *arguments) -> Future:
        future = Future()
        future.set_result(function(*arguments))
        return future


def in_this_thread(world: World):
    """Stand in for ``asyncio.to_thread``, in simulated time."""

    def call(function, *arguments):
        result = function(*arguments)
        if getattr(function, "__func__", None) is CheckpointKeeper.keep:
            world.kept = arguments[0]
        return result

    async def to_thread(function, *arguments):
        try:
            await world.sleep("save")
        except asyncio.CancelledError:  # a thread goes on
            with contextlib.suppress(Exception):
                call(function, *arguments)
            raise
        return call(function, *arguments)

    return to_thread


def watched(world: World):
    """Have ``_driven`` note what it leaves."""
    driven = backends.run._driven

    def note(_, context) -> None:
        if "Task" in context["message"]:
            world.leaked.append(str(context))

    async def call(driver):
        asyncio.get_running_loop().set_exception_handler(note)
        try:
            await driven(driver)
        finally:
            for _ in range(3):
                await asyncio.sleep(0)
            world.leaked += [str(one) for one in asyncio.all_tasks() - {asyncio.current_task()}]

    return call


@contextlib.contextmanager
def disk(world: World):
    """Have a disk that can be full inside the block."""
    event, close = TraceWriter.event, TraceWriter.close
    full = OSError(28, "No space left on device")

    def checked(original):
        @functools.wraps(original)
        def call(path, *arguments, **settings):
            if world.out in Path(str(path)).parents:
                synced(path)
            return original(path, *arguments, **settings)

        return call

    def synced(_):
        world.called("disk")
        if world.disk_full:
            raise full

    def recorded(trace, time_s, content):
        if world.disk_full:
            raise cannot_write(trace._path, full)
        event(trace, time_s, content)

    def closed(trace):
        close(trace)
        if world.disk_full:
            raise cannot_write(trace._path, full)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TraceWriter, "event", recorded)
        patch.setattr(TraceWriter, "command", recorded)
        patch.setattr(TraceWriter, "close", closed)
        patch.setattr(os, "fsync", synced)
        for name in ("write_bytes", "mkdir", "rename"):
            patch.setattr(Path, name, checked(getattr(Path, name)))
        yield


@contextlib.contextmanager
def simulated(world: World):
    """Have the driver run in simulated time inside the block."""
    logger = logging.getLogger("pipelinerl")
    level = logger.level
    board = SimpleNamespace(add_scalar=lambda *_: None, close=lambda: None)
    with pytest.MonkeyPatch.context() as patch, disk(world):
        patch.setattr(selectors, "DefaultSelector", lambda: Clock(world))
        patch.setattr(time, "monotonic", lambda: world.now_s)
        patch.setattr(time, "perf_counter", lambda: world.now_s)
        patch.setattr(asyncio, "to_thread", in_this_thread(world))
        patch.setattr(backends.driver.loop, "busy_s", lambda: world.now_s)
        patch.setattr(backends.driver.lifecycle, "LOST_POLL_S", 60.0)
        patch.setattr(backends.driver.checkpoint, "ThreadPoolExecutor", AtOnce)
        patch.setattr(backends.workers.rewards, "RewardThreads", lambda: Rewards(world))
        patch.setattr("torch.utils.tensorboard.SummaryWriter", lambda *_, **__: board)
        patch.setattr(backends.run, "_driven", watched(world))
        patch.setattr(DriverLock, "_beat", lambda _: None)
        logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            logger.setLevel(level)
