"""Reference log-probabilities in a run with fakes: waits for them, and losses of the model."""

import asyncio
import math

import numpy as np
import pytest
from in_memory import Asked, Interrupts, Killer, Shared, config_of, interrupt, interrupted, parts_of, run, run_checked
from ledger_check import metrics_of, records
from virtual_clock import run as run_at_once

from backends.driver.checkpoint import read_newest
from backends.driver.preprocessing import Preprocessing
from backends.driver.rollouts import RolloutData
from backends.driver.tasks import RunTasks
from backends.fake import DRIFT, FakeReference, FakeTrainer, logprob
from pipelinerl.errors import ReferenceLostError
from pipelinerl.records.run_folder import TRACE_FILE
from pipelinerl.records.trace import Trace, replay
from pipelinerl.rl.problems import Problem
from pipelinerl.rl.segments import Segment
from pipelinerl.scheduler.events import RolloutFinished, RolloutScored, StartRollout, StartTraining

KL = 0.1


def kl_config(*, train=None, **changed):
    return config_of(train={"loss": {"kl_coefficient": KL}, **(train or {})}, **changed)


def check_divergence(out, *, steps):
    """All tokens of a step have log pi = -1 - DRIFT * version, and log ref = -1."""
    lines = metrics_of(out)
    assert len(lines) == steps
    for version, line in enumerate(lines):
        of_token = math.expm1(DRIFT * version) - DRIFT * version
        assert line["train/kl_loss"] == pytest.approx(KL * line["length/mean"] * of_token, rel=1e-3, abs=1e-9)


# ------------------------------------------------------------------------------------- the stage alone


def rollout(num_tokens):
    segment = Segment.generated(np.full(num_tokens, 2), np.full(num_tokens, -1.0, np.float32))
    return RolloutData(Problem("", 0), (1,), segments=(segment,))


def asked(reference, *, at_s, gives_up=()):
    """Ask for a rollout of n + 1 tokens at the n-th time, give some up after 20 ms; return what came, and when (s)."""

    async def one(stage, number, delay_s):
        await asyncio.sleep(delay_s)
        logprob_T = await stage.reference_logprobs(rollout(number + 1))
        return logprob_T, asyncio.get_running_loop().time()

    async def all_of_them():
        tasks, loop = RunTasks(), asyncio.get_running_loop()
        stage = Preprocessing(reference, spawn=tasks.spawn)
        await stage.start()
        start_s = loop.time()
        asking = [asyncio.create_task(one(stage, number, delay_s)) for number, delay_s in enumerate(at_s)]
        for number in gives_up:
            loop.call_later(0.02, asking.pop(number).cancel)
        answers = await tasks.unless_ended(asyncio.gather(*asking), "")
        await stage.shutdown()
        return [(logprob_T, done_s - start_s) for logprob_T, done_s in answers]

    return run_at_once(all_of_them())


def test_what_comes_while_a_batch_is_computed_is_the_next_batch():
    reference = FakeReference(batch_s=0.2)
    answers = asked(reference, at_s=[0.0, 0.05, 0.1, 0.15, 0.7])
    assert [len(logprob_T) for logprob_T, _ in answers] == [1, 2, 3, 4, 5]
    assert reference.batches == [1, 3, 1]
    assert [done_s for _, done_s in answers] == pytest.approx([0.2, 0.4, 0.4, 0.4, 0.9])


def test_a_rollout_that_is_given_up_does_not_keep_the_others_from_their_values():
    answers = asked(FakeReference(batch_s=0.05), at_s=[0.0, 0.0, 0.1], gives_up=[0])
    assert [logprob_T.tolist() for logprob_T, _ in answers] == [[-1.0] * 2, [-1.0] * 3]


class Mortal(FakeReference):
    """Dies in some of its batches, by number, repeated ones included; starts so many times only."""

    def __init__(self, *, dies_in=(), starts=9, **changed):
        super().__init__(**changed)
        self.dies_in, self.starts, self.num_asked = dies_in, starts, 0

    async def start(self):
        if self.num_started == self.starts:
            raise ReferenceLostError("reference model failed: phase=start")
        await super().start()

    async def logprobs(self, samples):
        self.num_asked += 1
        if self.num_asked in self.dies_in:
            asyncio.get_running_loop().call_soon(self.die)
        return await super().logprobs(samples)


def test_a_lost_reference_is_started_again_and_asked_the_same_again():
    reference = Mortal(dies_in={2}, batch_s=0.05)
    assert [len(logprob_T) for logprob_T, _ in asked(reference, at_s=[0.0, 0.02, 0.02])] == [1, 2, 3]
    assert (reference.batches, reference.num_started) == ([1, 2], 2)


@pytest.mark.parametrize("reference", [Mortal(dies_in={1, 2}), Mortal(dies_in={1, 3}), Mortal(dies_in={1}, starts=1)])
def test_a_reference_that_is_lost_again_is_given_up_with_one_line(reference):
    with pytest.raises(ReferenceLostError, match=r"^reference model (lost|failed): .*; go on from a checkpoint$"):
        asked(reference, at_s=[0.0, 0.05])


# -------------------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("kind", ["pipeline", "conventional", "one_step_off"])
def test_the_trainer_gets_the_log_probabilities_of_the_model_at_the_start(out, kind):
    config = kl_config(kind=kind, steps=8, longest=40, slots=16)
    parts = parts_of(config)
    run_checked(config, out, parts)
    check_divergence(out, steps=8)
    scored = sum(isinstance(row.event, RolloutScored) for row in records(out))
    assert scored <= sum(parts.reference.batches) <= scored + 16  # each once; some were asked for when the run ended


class Behind(FakeReference):
    """Takes for its first batch until the engines have given so many answers."""

    engines, most = (), 0

    async def logprobs(self, samples):
        while not self.batches and sum(len(engine.answers) for engine in self.engines) < self.most:
            await asyncio.sleep(0)
        return await super().logprobs(samples)


def test_a_slow_reference_delays_readiness_and_not_generation(out):
    config = kl_config(steps=4, slots=6, ready_queue_size=1000)
    parts = parts_of(config, engine=Asked, reference=Behind())
    parts.reference.engines, parts.reference.most = parts.engines, 5 * 6 * 2  # all slots several times over
    run(config, out, parts)
    kinds = [type(row.event or row.command) for row in records(out)]
    before = kinds[: kinds.index(RolloutScored)]
    assert before.count(RolloutFinished) >= parts.reference.most
    assert StartTraining not in before


@pytest.mark.parametrize("on_full", ["wait", "drop_oldest"])
def test_slots_and_ready_queue_bound_what_is_in_flight_and_scored_together(out, on_full):
    """2 * 6 slots and 8 places: 20 rollouts are answered before one is scored, and no more are open later."""
    config = kl_config(steps=3, slots=6, ready_queue_size=8, on_full=on_full)
    parts = parts_of(config, engine=Asked, reference=Behind())
    parts.reference.engines, parts.reference.most = parts.engines, 20
    run_checked(config, out, parts)
    num_open, most = 0, 0
    for row in records(out):
        num_open += isinstance(row.command, StartRollout) - isinstance(row.event, RolloutScored)
        most = max(most, num_open)
    assert most == 20


def test_a_reference_that_does_not_start_ends_the_run_with_its_line(out):
    config = kl_config()
    with pytest.raises(ReferenceLostError, match="reference model failed: phase=start"):
        run(config, out, parts_of(config, reference=Mortal(starts=0)))


@pytest.mark.parametrize("kind", ["pipeline", "conventional"])
def test_a_run_survives_one_loss_of_the_reference(out, kind):
    config = kl_config(kind=kind, steps=8)
    parts = parts_of(config)
    parts.trainer = Killer(train_batch_size=8, kl_coefficient=KL, at=3, do=parts.reference.die)
    run_checked(config, out, parts)
    check_divergence(out, steps=8)
    assert parts.reference.num_started == 2


@pytest.mark.parametrize("kind", ["pipeline", "conventional"])
@pytest.mark.parametrize("steps_per_rl_step", [1, 2])
def test_a_reference_that_is_lost_twice_ends_the_run_with_a_checkpoint(out, kind, steps_per_rl_step):
    config = kl_config(kind=kind, steps=12, longest=40, optimizer_steps_per_rl_step=steps_per_rl_step)
    parts = parts_of(config, reference=Mortal(dies_in={4, 5}))
    parts.trainer = Shared(train_batch_size=8, kl_coefficient=KL)  # has the memory only while it trains
    with pytest.raises(ReferenceLostError, match=r"; go on from a checkpoint$"):
        run(config, out, parts)
    assert replay(Trace(out / TRACE_FILE)).difference is None
    run_checked(config, out, resume=True)
    check_divergence(out, steps=12)


def test_a_reference_lost_while_the_trainer_works_loses_no_step(out):
    config = kl_config(steps=20, longest=40)
    parts = parts_of(config, reference=Mortal(batch_s=0.002, starts=1))
    parts.trainer = Killer(train_batch_size=8, train_s=0.1, kl_coefficient=KL, at=2, do=parts.reference.die)
    with pytest.raises(ReferenceLostError):
        run(config, out, parts)
    state = read_newest(out, config).state
    assert state.version == parts.trainer.version >= 3  # the step under way was finished: the checkpoint holds it
    run_checked(config, out, resume=True)


def test_a_reference_that_is_lost_when_the_run_is_over_ends_nothing(out):
    config = kl_config(steps=4, longest=40, train={"evaluation": {"problems": 4}})
    parts = parts_of(config, reference=Mortal(batch_s=0.05, starts=1))

    class LastStep(FakeTrainer):
        async def save(self, folder):
            parts.reference.die()  # in a batch
            await asyncio.sleep(0.1)
            await super().save(folder)

    parts.trainer = LastStep(train_batch_size=8, kl_coefficient=KL)
    assert run(config, out, parts).complete


# ------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("kind", ["pipeline", "conventional"])
def test_what_was_finished_keeps_its_log_probabilities_and_what_waited_for_them_asks_again(out, kind):
    config = kl_config(kind=kind, steps=12, slots=16)
    parts = parts_of(config, step_s=0.001, reference=FakeReference(batch_s=0.01))
    parts.trainer = Killer(train_batch_size=8, train_s=0.05, kl_coefficient=KL, at=3, do=interrupt)
    interrupted(config, out, parts)
    state = read_newest(out, config).state
    ready = {one: data for one, data in state.rollouts.items() if not math.isnan(data.reward)}
    assert ready or kind == "conventional"
    for data in ready.values():
        assert data.reference_logprob_T.tolist() == [logprob(0)] * len(data.tokens)
    for one in state.scoring:
        assert state.rollouts[one].reference_logprob_T is None
    run_checked(config, out, resume=True)
    check_divergence(out, steps=12)


def test_ctrl_c_while_rollouts_wait_for_the_reference(out):
    config = kl_config(steps=6)
    task = Interrupts(when=lambda problem: problem.expected == 3)
    interrupted(config, out, parts_of(config, task=task, reference=FakeReference(batch_s=60.0)))
    assert read_newest(out, config).state.scoring
    run_checked(config, out, resume=True)
    check_divergence(out, steps=6)
