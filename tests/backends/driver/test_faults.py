"""Faults in a run with parts in memory: what they cost, and what they do not."""

import asyncio
import math
import os
import threading
import time
from collections import Counter
from contextlib import closing
from functools import partial
from unittest.mock import AsyncMock

import pytest
from in_memory import (
    KINDS,
    Interrupts,
    Killer,
    Letters,
    Shared,
    config_of,
    interrupt,
    interrupted,
    parts_of,
    run,
    run_checked,
    turns_of,
)
from ledger_check import records

import backends.driver.engines
import backends.driver.lifecycle
import backends.driver.loop
from backends.driver.engines import EngineHandle, EnginePool
from backends.driver.tasks import LONGEST_TICK_S, DriverLoop
from backends.fake import FakeEngine, FakeReference, FakeTrainer
from backends.interface import Weights
from backends.workers.rewards import RewardThreads
from pipelinerl.errors import BackendError, EngineLostError, RunFailedError
from pipelinerl.records.run_folder import TRACE_FILE, cannot_write
from pipelinerl.records.trace import TraceWriter
from pipelinerl.scheduler.events import (
    AbortRollout,
    EngineJoined,
    EngineLeaving,
    EngineLeft,
    RolloutAborted,
    RolloutFailed,
    RolloutFinished,
    StartRollout,
    WeightsLoaded,
    WeightUpdate,
)

SETTINGS = [*({"weight_update": kind, "longest": 40, "slots": 16} for kind in KINDS), {"kind": "conventional"}]


@pytest.mark.parametrize("setting", SETTINGS, ids=[*KINDS, "asleep"])
def test_a_run_survives_the_loss_of_an_engine(out, setting):
    config = config_of(**setting)
    parts = parts_of(config)
    parts.trainer = Killer(train_batch_size=8, at=2, do=parts.engines[1].die)
    summary = run_checked(config, out, parts)
    assert summary.engine_restarts == 1
    assert [engine.num_started for engine in parts.engines] == [1, 2]


class Mortal(FakeEngine):
    """Reports every 4 tokens: of n it loses n mod 4. ``asked``: rollouts and prompts, of several engines.

    ``dies``: once, when an answer has nine tokens after its 20th request; ``known``: what was known by then.
    """

    def __init__(self, asked, *, dies, **settings):
        super().__init__(**settings, stream_tokens=4, endless=True)
        self.asked, self.known, self.left = asked, {}, 20 if dies else 0

    async def generate(self, request):
        self.asked.append((request.rollout_id, request.prompt_tokens))
        self.left -= 1
        if self.left == 0:
            self.watching = asyncio.create_task(self.watch())
        return await super().generate(request)

    async def watch(self):
        while all(len(one.tokens) < 9 for one in self._sequences.values()):
            await asyncio.sleep(0)
        prompts = dict(self.asked)
        self.known = {
            rollout_id: (*prompts[rollout_id], *one.tokens[: len(one.tokens) // 4 * 4])
            for rollout_id, one in self._sequences.items()
        }
        self.asked.clear()
        self.die()


@pytest.mark.parametrize("weight_update", KINDS)
def test_what_a_killed_engine_has_reported_is_not_generated_again(out, weight_update):
    """The next request of each of its rollouts has all of it in its prompt, and nothing else."""
    config = config_of(weight_update=weight_update, longest=40, slots=16)
    parts, asked = parts_of(config), []
    parts.engines = [Mortal(asked, dies=dies, num_slots=16) for dies in (False, True)]
    assert run_checked(config, out, parts).engine_restarts == 1
    known = parts.engines[1].known
    again = {rollout_id: prompt for rollout_id, prompt in reversed(asked) if rollout_id in known}
    assert again
    assert again == {rollout_id: known[rollout_id] for rollout_id in again}
    assert max(map(len, again.values())) >= len("problem 0") + 8


def test_losses_count_for_an_hour_and_per_engine(out, monkeypatch):
    """Two engines may be lost twice within an hour, whichever they are; the third time ends the run, which goes on."""
    config = config_of(train={"engine": {"restarts_per_hour": 1}}, steps=10, longest=40)

    def losing(*steps):
        def die():
            parts.engines[1].die()
            parts.trainer.at = next(losses, None)

        parts, losses = parts_of(config), iter(steps)
        parts.trainer = Killer(train_batch_size=8, at=next(losses), do=die)
        return parts

    with monkeypatch.context() as patch:
        patch.setattr(backends.driver.engines, "HOUR_S", 0.0)
        assert run_checked(config, out, losing(2, 4, 6)).engine_restarts == 3
    assert run_checked(config, out.with_name("two"), losing(2, 4)).engine_restarts == 2
    with pytest.raises(BackendError, match="engine lost"):
        run(config, out.with_name("three"), losing(2, 4, 6))
    run_checked(config, out.with_name("three"), resume=True)  # the trainer was well: nothing is lost


class Slow(FakeEngine):
    """Comes back when another engine has loaded at least three more versions."""

    def __init__(self, other, **settings):
        super().__init__(**settings)
        self.other, self.back_at = other, 0

    def die(self):
        self.back_at = self.other._weights.version + 3
        super().die()

    async def start(self):
        async with asyncio.timeout(300):
            while self.other._weights.version < self.back_at:
                await asyncio.sleep(0.001)
        await super().start()


@pytest.mark.parametrize("weight_update", KINDS)
def test_publications_do_not_wait_for_an_engine_that_is_being_started_again(out, weight_update):
    config = config_of(steps=16, weight_update=weight_update, longest=40, slots=16)
    parts = parts_of(config)
    parts.engines[1] = Slow(parts.engines[0], num_slots=16)
    parts.trainer = Killer(train_batch_size=8, at=2, do=parts.engines[1].die)
    assert run_checked(config, out, parts).engine_restarts == 1
    loaded, at_least = {0: [0], 1: [0]}, {}
    for row in records(out):
        match row.event or row.command:
            case EngineJoined(engine=engine, version=version):
                loaded[engine] = [version]
            case EngineLeft(engine=engine):
                assert engine == 1
                left = loaded[0][-1]
            case WeightsLoaded(engine=engine, version=version):
                loaded[engine].append(version)
            case StartRollout(rollout_id=rollout_id, engine=engine):
                at_least.setdefault(rollout_id, loaded[engine][-1])
            case RolloutFinished(rollout_id=rollout_id, spans=spans):
                assert spans.versions[0] >= at_least[rollout_id]
    assert all(versions == sorted(set(versions)) for versions in loaded.values())
    assert loaded.keys() == {0, 1, 2}
    assert loaded[2][0] >= left + 2  # it was back after three updates more; one may be under way


class Unlucky(FakeEngine):
    """Fails ``fails`` times to start, once it has been started ``after`` times."""

    def __init__(self, *, after=0, fails=1, **settings):
        super().__init__(**settings)
        self.after, self.fails = after, fails

    async def start(self):
        if self.num_started == self.after and self.fails:
            self.fails -= 1
            raise EngineLostError("engine start failed: no room")
        await super().start()


def test_an_engine_that_fails_its_first_start_is_started_once_more(out, caplog):
    config = config_of()
    parts = parts_of(config)
    parts.engines[1] = Unlucky(num_slots=config.scheduler.generation_batch_size)
    run_checked(config, out, parts)
    assert "engine 1 is started once more: engine start failed: no room" in caplog.text
    assert "given up" not in caplog.text
    assert [one.num_started for one in parts.engines] == [1, 1]


def test_what_keeps_all_engines_from_starting_is_not_tried_twice(out):
    config = config_of()
    with pytest.raises(EngineLostError, match="no room"):
        run(config, out, parts_of(config, engine=Unlucky))


@pytest.mark.parametrize("times", [0, 1])
@pytest.mark.parametrize("setting", SETTINGS, ids=[*KINDS, "asleep"])
def test_an_engine_that_cannot_be_started_leaves_and_the_run_goes_on(out, caplog, setting, times):
    """It leaves before it has answered, or once it is lost."""
    config = config_of(**setting, steps=20)
    parts = parts_of(config)
    parts.engines[1] = Unlucky(after=times, fails=9, num_slots=config.scheduler.generation_batch_size)
    if times:
        parts.trainer = Killer(train_batch_size=8, at=2, do=parts.engines[1].die)
    assert run_checked(config, out, parts).engine_restarts == 0
    assert "engine 1 given up: engine start failed: no room" in caplog.text
    assert parts.engines[0].num_started == 1
    events = [row.event for row in records(out)]
    changes = [one for one in events if isinstance(one, EngineJoined | EngineLeaving | EngineLeft)]
    assert changes == [EngineLeaving(1), EngineLeft(1)]
    finished = {one.engine for one in events if isinstance(one, RolloutFinished)}
    assert finished == ({0, 1} if times else {0})
    assert not any(getattr(one, "engine", None) == 1 for one in events[events.index(EngineLeft(1)) + 1 :])


def test_without_any_engine_the_run_fails(out):
    config = config_of(steps=50)
    parts = parts_of(config)
    parts.engines = [Unlucky(after=1, fails=9) for _ in range(2)]
    parts.trainer = Killer(train_batch_size=8, at=2, do=lambda: [engine.die() for engine in parts.engines])
    with pytest.raises(EngineLostError, match="engine start failed: no room"):
        run(config, out, parts)


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (Letters(raises_every=3), "no reward today"),
        (Letters(reward=lambda problem: math.nan if problem.expected % 2 else 1.0), "nan"),
        (Letters(odd_prompt="x" * 200), "its prompt has 200 tokens"),
        (Letters(odd_prompt=""), "its prompt has 0 tokens"),
    ],
    ids=["reward raises", "reward is no number", "prompt is too long", "prompt is empty"],
)
def test_a_rollout_that_cannot_be_prompted_or_rewarded_fails_and_the_run_goes_on(out, caplog, task, says):
    config = config_of(steps=3, train={"task": {"name": "arithmetic", "max_prompt_tokens": 100}})
    parts = parts_of(config, task=task, trainer=FakeTrainer(train_batch_size=8, train_s=0.1))
    assert run_checked(config, out, parts).rollouts.failed > 0
    assert says in caplog.text


def test_a_failure_is_one_line_of_a_few_hundred_characters_however_long_its_message(out, caplog):
    def moody(problem):
        raise RuntimeError("no reward " * 100_000)

    with pytest.raises(RunFailedError, match="stalled"):
        run(config := config_of(discard_limit=50), out, parts_of(config, task=Letters(reward=moody)))
    assert 100 < max(map(len, caplog.messages)) < 500


def test_parts_that_are_starting_when_another_fails_have_ended_before_anything_is_shut_down(out):
    ended, seen = [], []

    class Late(FakeEngine):
        async def start(self):
            try:
                await asyncio.sleep(600)
            finally:
                ended.append(self)

    class Failing(FakeTrainer):
        async def start(self):
            await asyncio.sleep(0)
            raise BackendError("no trainer")

        async def shutdown(self):
            seen.append(len(ended))

    with pytest.raises(BackendError, match="no trainer"):
        run(config := config_of(), out, parts_of(config, engine=Late, trainer=Failing(train_batch_size=8)))
    assert seen == [2]


def test_an_engine_that_is_found_dead_after_the_last_step_keeps_the_evaluation_from_nothing(out, monkeypatch):
    """It has not answered the aborts of rollouts whose siblings had failed, nor those of the end."""
    monkeypatch.setattr(backends.driver.loop, "STOP_TIMEOUT_S", 0.05)

    class Deaf(FakeEngine):
        async def generate(self, request):
            if request.rollout_id >= 0:
                await gone.wait()
                raise EngineLostError("engine lost: it hangs")
            return await super().generate(request)

    gone = asyncio.Event()
    config = config_of(group=2, train={"evaluation": {"problems": 4}})
    parts = parts_of(config, task=Letters(raises_every=3))
    parts.engines[1] = Deaf(num_slots=6)
    parts.trainer = Killer(train_batch_size=8, on_export=gone.set)
    assert run(config, out, parts).evaluation.success_after is not None
    assert any(isinstance(row.command, AbortRollout) for row in records(out))


@pytest.mark.parametrize("kind", ["pipeline", "conventional"])
def test_the_evaluation_after_the_run_survives_the_loss_of_an_engine(out, kind):
    config = config_of(kind=kind, train={"evaluation": {"problems": 8}})
    parts = parts_of(config)
    parts.trainer = Killer(train_batch_size=8, on_export=parts.engines[1].die)
    summary = run(config, out, parts)
    assert summary.evaluation.success_after is not None
    assert parts.engines[1].num_started == 2


def test_ctrl_c_ends_the_evaluation_after_the_run_and_the_model_is_there(out):
    config = config_of(longest=40, train={"evaluation": {"problems": 50}})
    parts = parts_of(config)
    parts.trainer = Killer(train_batch_size=8, on_export=interrupt)
    with pytest.raises(RunFailedError, match="--resume evaluates again"):
        run(config, out, parts)
    assert (out / "model" / "fake.json").exists()
    assert run(config, out, parts_of(config), resume=True).evaluation.success_after is not None


@pytest.mark.parametrize("error", [RuntimeError("no reward today"), SystemExit("no reward at all")])
def test_a_held_out_problem_whose_reward_raises_counts_as_not_solved(out, error):
    def moody(problem):
        if problem.prompt.startswith("held out") and problem.expected % 2:
            raise error
        return 1.0

    config = config_of(steps=2, train={"evaluation": {"problems": 8}})
    summary = run(config, out, parts_of(config, task=Letters(reward=moody)))
    assert summary.evaluation.to_dict() == {"success_before": 0.5, "success_after": 0.5}


def test_a_reward_that_never_returns_keeps_neither_the_others_nor_the_end_waiting(out, monkeypatch):
    """The 12 rollouts of the first 3 groups hang, in 2 places: no other gets one before a rollout of each has failed,
    with which its group is given up.
    """
    monkeypatch.setattr("backends.workers.rewards.RewardThreads", partial(RewardThreads, 2))
    over = threading.Event()

    def hangs(problem):
        return float(problem.expected < 3 and over.wait(30))

    config = config_of(steps=3, train={"task": {"name": "arithmetic", "reward_timeout_s": 0.05}})
    summary = run(config, out, parts_of(config, task=Letters(reward=hangs)))
    assert summary.rollouts.failed >= 3
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "reward")
    over.set()


@pytest.mark.parametrize("micro_batch_size", [4, 8])
def test_a_colocated_trainer_has_its_memory_back_whenever_it_works(out, micro_batch_size):
    config = config_of(kind="conventional", steps=8, micro_batch_size=micro_batch_size)

    task = Interrupts(when=lambda problem: problem.expected == 5)  # engines generate
    interrupted(config, out, parts_of(config, task=task, trainer=Shared(train_batch_size=8)))

    killer = Shared(train_batch_size=8, at=5, do=interrupt)
    interrupted(config, out, parts_of(config, trainer=killer), resume=True)
    run_checked(config, out, parts_of(config, trainer=Shared(train_batch_size=8)), resume=True)


def test_a_task_that_gives_no_problem_ends_the_run_in_one_line(out):
    config, task = config_of(steps=3), Letters()
    task.problem = lambda index, *, held_out: {}["no such file"]
    line = r"^train\.task: problem\(0, held_out=False\) gives no prompt: KeyError: 'no such file'$"
    with pytest.raises(RunFailedError, match=line):
        run(config, out, parts_of(config, task=task))


def test_a_run_ends_when_what_all_parts_need_is_gone_and_not_at_the_first_doubt(out, monkeypatch):
    monkeypatch.setattr(backends.driver.lifecycle, "LOST_POLL_S", 0.01)
    answers = iter([None, "a hiccup", None, "the head is gone: no route"])
    config = config_of(steps=1000)
    parts = parts_of(config, trainer=FakeTrainer(train_batch_size=8, train_s=0.01))
    parts.lost = lambda: next(answers, "the head is gone: refused")
    with pytest.raises(BackendError, match=r"^the head is gone: refused; --resume goes on from the last checkpoint"):
        run(config, out, parts)


def test_rewards_in_processes_that_die_cost_their_groups_only(out):
    """Every seventh problem's reward kills its process: neither the driver nor another rollout notices."""
    task = {"name": "games:Judge", "settings": {"dies_every": 7}, "reward_workers": 2}
    config = config_of(train={"task": task, "evaluation": {"problems": 1}}, steps=2, group=2)
    summary = run_checked(config, out)
    started = [row.command for row in records(out) if isinstance(row.command, StartRollout)]
    prompts = {one.rollout_id: one.prompt_id for one in started}
    failed = {prompts[row.event.rollout_id] for row in records(out) if isinstance(row.event, RolloutFailed)}
    assert {one % 7 for one in failed} == {0}
    assert summary.rollouts.failed >= len(failed)
    assert summary.evaluation.success_after == 0.0  # held-out problems are asked there, too: that one dies


class Stopped(FakeTrainer):
    """An hour in which the driver is stopped, as by Ctrl-Z or SIGSTOP, in its third step, once ``begun`` is set."""

    def __init__(self, monkeypatch):
        super().__init__(train_batch_size=8)
        self.begun, self.over, self.hour_s, clock = threading.Event(), threading.Event(), 0.0, time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: clock() + self.hour_s)

    async def train(self, samples, *, completes_step):
        if self.version == 2 and not self.over.is_set():
            await asyncio.to_thread(self.begun.wait, 60)
            self.hour_s = 3600.0
            self.over.set()
        return await super().train(samples, completes_step=completes_step)


def test_an_hour_in_which_the_driver_is_stopped_counts_for_no_time_out(out, monkeypatch, caplog):
    """The clock has gone on, and a reward in progress has no answer yet."""
    trainer = Stopped(monkeypatch)

    def late(problem):
        if problem.expected >= 6:
            trainer.begun.set()
            trainer.over.wait(60)
        return 1.0

    config = config_of(train={"task": {"name": "arithmetic", "reward_timeout_s": 600}})
    assert run_checked(config, out, parts_of(config, task=Letters(reward=late), trainer=trainer)).rollouts.failed == 0
    assert "stood still for 3600 s" in caplog.text


def test_an_hour_in_which_the_driver_is_stopped_counts_for_the_life_of_no_rollout(out, monkeypatch):
    """Rollouts from the fifth batch on are in their first turn then; the hour ends in the third step."""
    trainer = Stopped(monkeypatch)

    class Late(FakeEngine):
        async def generate(self, request):
            if request.rollout_id >= 32:
                trainer.begun.set()
                await asyncio.to_thread(trainer.over.wait, 60)
            return await super().generate(request)

    config = turns_of(limits={"lifetime_s": 600})
    summary = run_checked(config, out, parts_of(config, trainer=trainer, engine=Late))
    assert (summary.environments.expired, summary.rollouts.failed) == (0, 0)
    assert summary.rollouts.finished > 32


def test_a_loop_that_one_call_holds_up_counts_no_more_of_it_than_that(monkeypatch, caplog):
    """The longest gap between two looks at the clock counts in full; anything above it not at all."""
    now_s = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    with closing(DriverLoop()) as loop:
        for gap_s, then_s in [(0.0, 0.0), (LONGEST_TICK_S, 10.0), (LONGEST_TICK_S + 1, 10.0), (1.0, 11.0)]:
            now_s[0] += gap_s
            assert loop.time() == then_s
    (line,) = caplog.messages
    assert line == "this process, or its event loop, stood still for 11 s; time-outs do not count them"


@pytest.mark.parametrize("group", [1, 4])
def test_a_run_whose_rewards_all_fail_says_so_and_then_ends_in_a_line(out, caplog, monkeypatch, group):
    monkeypatch.setattr("pipelinerl.scheduler.kinds.MANY_ROLLOUTS", 10)
    monkeypatch.setattr("pipelinerl.scheduler.kinds.MANY_BATCHES", 1)
    config = config_of(group=group, discard_limit=40)
    with pytest.raises(RunFailedError, match=r"^stalled: .* = 40 .*: a rollout of the group fails; mend train\.task"):
        run(config, out, parts_of(config, task=Letters(raises_every=1)))
    (line,) = [one.message for one in caplog.records if "without an optimizer step" in one.message]
    assert line.startswith("12 rollouts given up" if group == 4 else "11 rollouts given up")


@pytest.mark.parametrize("call", ["update", "sleep"])
def test_an_engine_that_is_lost_while_the_run_ends_is_not_called_again(monkeypatch, call):
    calls = []

    async def lost(*arguments):
        calls.append(arguments)
        assert len(calls) == 1
        pool.close()
        raise EngineLostError("engine lost: its machine is gone")

    async def main():
        await pool.start()
        await (pool.sleep() if call == "sleep" else pool.update(pool[0], Weights(1, "memory:1"), WeightUpdate.KEEP))

    monkeypatch.setattr(FakeEngine, call, lost)
    pool = EnginePool({0: FakeEngine()}, engine_ids=[0], restarts_per_hour=0, spawn=None, bring_back=None)
    asyncio.run(main())


def test_an_engine_that_is_lost_before_the_end_is_not_started_again(monkeypatch):
    async def shutdown(_):
        pool.close()

    async def main():
        await pool.start()
        pool.lost(pool[0], EngineLostError("engine lost: it does not run"))
        await restart[0]

    monkeypatch.setattr(FakeEngine, "shutdown", shutdown)
    restart, engine = [], FakeEngine()
    spawn = lambda work: restart.append(asyncio.ensure_future(work))  # noqa: E731
    pool = EnginePool({0: engine}, engine_ids=[0], restarts_per_hour=1, spawn=spawn, bring_back=None)
    asyncio.run(main())
    assert engine.num_started == 1


def test_an_engine_that_drains_for_two_ids_is_open_after_both():
    handle, is_open = EngineHandle(0, FakeEngine(), engine_id=0), []
    with handle.closed():
        with handle.closed():
            is_open.append(handle.open.is_set())
        is_open.append(handle.open.is_set())
    assert [*is_open, handle.open.is_set()] == [False, False, True]


def test_a_disk_that_is_full_at_the_end_keeps_no_part_from_being_shut_down(out, monkeypatch):
    """In this run rollouts are aborted by its interruption only."""
    config, event, ended = config_of(train={"loss": {"kl_coefficient": 0.1}}), TraceWriter.event, []

    def full(trace, time_s, one):
        if isinstance(one, RolloutAborted):
            raise cannot_write(out / TRACE_FILE, OSError(28, "No space left on device"))
        event(trace, time_s, one)

    monkeypatch.setattr(TraceWriter, "event", full)
    for part in (FakeEngine, FakeTrainer, FakeReference):
        monkeypatch.setattr(part, "shutdown", AsyncMock(side_effect=partial(ended.append, part)))
    parts = parts_of(config, trainer=Killer(train_batch_size=8, kl_coefficient=0.1, at=3, do=interrupt))
    with pytest.raises(RunFailedError, match=rf"^cannot write {out / TRACE_FILE}: No space left on device$"):
        run(config, out, parts)
    assert Counter(ended) == {FakeEngine: 2, FakeTrainer: 1, FakeReference: 1}


def test_a_trace_that_cannot_be_brought_to_disk_ends_the_run_with_the_error_of_the_disk(out, monkeypatch):
    """The end records the rollouts of a slow engine, after it."""
    fsync, config = os.fsync, config_of(group=1, train={"checkpoint": {"every": 2}})

    def failing(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(out / TRACE_FILE):
            raise OSError(5, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    parts = parts_of(config)
    parts.engines[1] = FakeEngine(num_slots=6, step_s=60.0)
    with pytest.raises(RunFailedError, match=rf"^cannot write {out / TRACE_FILE}: Input/output error$"):
        run(config, out, parts)
