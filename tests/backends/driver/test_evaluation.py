"""Evaluations beside the run, on engines and a trainer in memory: they disturb nothing, and say what they measured."""

import asyncio
import json

import pytest
from in_memory import (
    KINDS,
    Asked,
    Killer,
    Letters,
    Shared,
    config_of,
    interrupt,
    interrupted,
    parts_of,
    run,
    run_checked,
)
from ledger_check import metrics_of, records
from refusals import message

from backends.driver.evaluation import Evaluation, evaluation_slots
from backends.driver.metrics import PER_STEP
from backends.fake import FakeEngine
from backends.preflight import evaluation_task
from pipelinerl.rl.problems import Problem
from pipelinerl.rl.tasks import Arithmetic
from pipelinerl.scheduler.events import StartRollout

EVERY_3 = {"evaluation": {"problems": 8, "every": 3}}


class HalfRight(Letters):
    """Held-out problems of even numbers are solved, whatever is answered."""

    def problem(self, index, *, held_out):
        return Problem("held out" if held_out else f"problem {index}", index)

    def reward(self, problem, answer):
        return float(problem.expected % 2 == 0) if problem.prompt == "held out" else super().reward(problem, answer)


class Seen(Asked):
    """Has a slot more for evaluations, whose answers take longer; sleeps only when nothing is in progress."""

    def __init__(self, *, num_slots, **settings):
        super().__init__(num_slots=num_slots + 1, **settings)

    @property
    def held_out(self):
        return [one for one in self.requests if one.rollout_id < 0]

    async def generate(self, request):
        answer = await super().generate(request)
        if request.rollout_id < 0:
            await asyncio.sleep(0.005)
        return answer

    async def sleep(self):
        assert not self._sequences
        await super().sleep()


def seen(config, **parts):
    return parts_of(config, task=HalfRight(), engine=Seen, **parts)


@pytest.mark.parametrize("weight_update", KINDS)
def test_an_evaluation_beside_a_pipeline_is_in_no_count_and_names_its_versions(out, weight_update):
    config = config_of(steps=12, longest=40, weight_update=weight_update, train=EVERY_3)
    parts = seen(config)
    summary = run_checked(config, out, parts)
    during = summary.evaluation.during or ()  # where engines are slow, one is in progress when the next is due
    assert [one.step for one in during] == sorted({3, 6, 9} & {one.step for one in during})  # 12: after the run
    for one in during:
        assert one.success == 0.5
        assert one.step <= one.version_min <= one.version_max <= 12
    assert summary.evaluation.success_before == summary.evaluation.success_after == 0.5
    commands = [row.command for row in records(out) if isinstance(row.command, StartRollout)]
    assert min(one.rollout_id for one in commands) >= 0
    assert sum(len(engine.held_out) for engine in parts.engines) >= 8 * (2 + len(during))
    logged = [line for line in metrics_of(out) if "evaluation/success" in line]
    assert [line["evaluation/step"] for line in logged] == [one.step for one in during][: len(logged)]
    assert all(line["step"] > line["evaluation/step"] for line in logged)


def test_where_engines_and_trainer_take_turns_training_waits_for_the_evaluation(out):
    config = config_of(kind="conventional", optimizer_steps_per_rl_step=2, steps=8, train=EVERY_3)
    parts = seen(config, trainer=Shared(train_batch_size=8))
    during = run_checked(config, out, parts).evaluation.during
    assert [(one.step, one.version_min, one.version_max) for one in during] == [(3, 4, 4), (6, 6, 6)]


def test_an_evaluation_samples_in_its_own_way(out):
    train = {"evaluation": {"problems": 4, "every": 2, "temperature": 0.0, "max_tokens": 3}}
    config = config_of(train=train)
    parts = seen(config)
    run(config, out, parts)
    requests = [one for engine in parts.engines for one in engine.held_out]
    assert {(one.temperature, one.max_new_tokens) for one in requests} == {(0.0, 3)}


def test_an_engine_that_is_lost_in_an_evaluation_answers_after_its_restart(out):
    class Dies(Seen):
        async def generate(self, request):
            if len(self.held_out) == 6 and self.num_started == 1:  # 4 before the run
                self.die()
            return await super().generate(request)

    config = config_of(steps=9, train=EVERY_3)
    parts = seen(config)
    parts.engines[0] = Dies(num_slots=6)
    summary = run_checked(config, out, parts)
    assert summary.engine_restarts == 1
    assert {one.success for one in summary.evaluation.during} == {0.5}


def test_ctrl_c_ends_an_evaluation_beside_the_run_and_the_run_goes_on_without_it(out):
    config = config_of(steps=12, train=EVERY_3)
    parts = seen(config, trainer=Killer(train_batch_size=8, at=5, do=interrupt))

    class Slow(Seen):
        async def generate(self, request):
            if request.rollout_id < 0 and len(self.held_out) >= 4:  # 4 before the run
                await asyncio.sleep(60.0)
            return await super().generate(request)

    parts.engines[0] = Slow(num_slots=6)
    interrupted(config, out, parts)
    assert json.loads((out / "summary.json").read_text())["evaluation"].keys() == {"success_before"}
    resumed = seen(config)
    evaluation = run_checked(config, out, resumed, resume=True).evaluation
    during = evaluation.during or ()  # one in progress at the last step does not end
    assert 1 <= sum(len(engine.held_out) for engine in resumed.engines) / 8 - len(during) < 3  # none before
    assert evaluation.success_before == evaluation.success_after == 0.5
    assert {one.step for one in during} <= {6, 9}


def test_ctrl_c_ends_a_run_whose_training_waits_for_an_evaluation_that_does_not_end(out, monkeypatch):
    config, finished = config_of(kind="conventional", steps=8, train=EVERY_3), Evaluation.finished
    parts = seen(config, trainer=Shared(train_batch_size=8))

    class Hangs(Seen):
        hangs = False

        async def generate(self, request):
            if request.rollout_id < 0 and len(self.held_out) >= 4 and not self.hangs:  # 4 before the run
                self.hangs = True
                await asyncio.wait_for(asyncio.Event().wait(), 20.0)
            return await super().generate(request)

    async def is_waited_for(evaluation):
        if parts.engines[0].hangs:
            interrupt()
        await finished(evaluation)

    parts.engines[0] = Hangs(num_slots=6)
    monkeypatch.setattr(Evaluation, "finished", is_waited_for)
    interrupted(config, out, parts)
    monkeypatch.undo()
    assert json.loads((out / "summary.json").read_text())["evaluation"].keys() == {"success_before"}
    assert parts.trainer.version == 4
    run_checked(config, out, seen(config, trainer=Shared(train_batch_size=8)), resume=True)


def test_engines_have_an_eighth_more_slots_for_evaluations_beside_the_run():
    assert [evaluation_slots(config_of(slots=slots, train=EVERY_3)) for slots in (1, 8, 9, 64)] == [1, 1, 2, 8]
    assert evaluation_slots(config_of(slots=64, train={"evaluation": {"problems": 8}})) == 0


def samples(out):
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


def test_some_answers_of_every_step_are_kept_with_rewards_and_versions(out):
    config = config_of(steps=4, train={"evaluation": {"problems": 8}})
    run(config, out, parts_of(config, task=HalfRight()))
    kept = samples(out)
    trained = [one for one in kept if not one["held_out"]]
    assert [one["step"] for one in trained] == [step for step in (1, 2, 3, 4) for _ in range(PER_STEP)]
    assert trained[0]["prompt"] != trained[1]["prompt"]  # of two groups
    for one in trained:
        share = one["answer"].count("b") / max(1, len(one["answer"]))
        assert one["reward"] == share
        assert max(one["versions"]) < one["step"]
    assert [(one["step"], one["reward"]) for one in kept if one["held_out"]] == [(0, 1.0), (0, 1.0), (4, 1.0), (4, 1.0)]


def test_a_temperature_that_engines_would_change_is_refused():
    with pytest.raises(ValueError, match=r"temperature must be 0 or at least 0\.01, got 0\.001"):
        config_of(train={"evaluation": {"temperature": 0.001}})


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"problems": 0, "every": 2}, "every needs train.evaluation.problems of at least 1, got problems=0"),
        ({"max_tokens": 13}, "train.evaluation.max_tokens must be at most workload.length.max = 12, got 13"),
        ({"settings": {"largest_operand": 3}}, "at most the task's 1 held-out problems, got 2"),
        ({"settings": {"color": "red"}}, "train.evaluation.settings must suit arithmetic"),
    ],
)
def test_an_evaluation_that_the_task_cannot_give(train, words):
    config = config_of(train={"evaluation": {"problems": 2, **train}})
    assert words in message(evaluation_task, config, Arithmetic())


def test_other_settings_make_another_task():
    config = config_of(train={"evaluation": {"problems": 5, "settings": {"operators": "*"}}})
    assert "*" in evaluation_task(config, Arithmetic()).problem(0, held_out=True).prompt
    task = Arithmetic()
    assert evaluation_task(config_of(), task) is task


class Asleep(FakeEngine):
    """Answers only while it is awake. The second of two dies in an update; its restart loads when the first sleeps."""

    def __init__(self, first=None):
        super().__init__(num_slots=6, step_s=0.001)
        self.first, self.sleeps, self.dies = first, asyncio.Event(), first is not None

    async def generate(self, request):
        assert not self.sleeps.is_set()
        return await super().generate(request)

    async def update(self, weights, weight_update):
        if self.dies:
            self.dies = False
            self.die()
        elif self.num_started == 2 and weights.version == 1:
            await self.first.sleeps.wait()
        return await super().update(weights, weight_update)

    async def sleep(self):
        self.sleeps.set()

    async def wake(self):
        self.sleeps.clear()


def test_no_evaluation_begins_while_engines_sleep(out):
    """All engines have its weights only when the last to load them joins, while the other sleeps."""
    config = config_of(kind="conventional", steps=3, train={"evaluation": {"problems": 4, "every": 1}})
    parts = parts_of(config)
    parts.engines = [first := Asleep(), Asleep(first)]
    summary = run_checked(config, out, parts)
    assert [one.step for one in summary.evaluation.during][-1] >= 2
