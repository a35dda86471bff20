"""Engines that are added to a run in progress, and removed from it, with parts in memory."""

import asyncio
import json
from collections import defaultdict

import pytest
from in_memory import KINDS, Killer, config_of, interrupt, interrupted, parts_of, run_checked
from ledger_check import records
from refusals import message
from typer.testing import CliRunner

import backends.driver.engines
import backends.driver.lifecycle
from backends.driver.checkpoint import FOLDER
from backends.driver.fleet import FleetRequest, ask
from backends.fake import FakeEngine
from backends.interface import MoreEngines
from pipelinerl.cli.app import app
from pipelinerl.errors import ConfigError, EngineLostError, TrainerLostError, TransferError
from pipelinerl.scheduler.events import (
    EngineJoined,
    EngineLeaving,
    EngineLeft,
    RolloutAborted,
    RolloutFinished,
    StartRollout,
)


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(backends.driver.lifecycle, "LOST_POLL_S", 0.001)
    monkeypatch.setattr(backends.driver.engines, "RETRY_S", 0.001)


class Asking(Killer):
    """Asks the run in a folder at some versions; keeps the answers, or why there is none."""

    def __init__(self, out, requests, *, stops_at=None):
        super().__init__(at=stops_at, do=interrupt, train_batch_size=8)
        self.out, self.requests, self.answers = out, requests, []

    async def train(self, samples, *, completes_step):
        request = self.requests.pop(self.version, None)
        if request is not None:
            try:
                self.answers.append(await asyncio.to_thread(ask, self.out, request))
            except ConfigError as error:
                self.answers.append(str(error))
        return await super().train(samples, completes_step=completes_step)


class Named(FakeEngine):
    """Keeps, by rollout, its prompts, and these with its answers, in order."""

    host = ""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.prompts, self.texts = defaultdict(list), defaultdict(list)

    async def generate(self, request):
        self.prompts[request.rollout_id].append(request.prompt_tokens)
        answer = await super().generate(request)
        self.texts[request.rollout_id].append((*request.prompt_tokens, *answer.tokens_T.tolist()))
        return answer


def played(out, requests, *, hosts=("one", "two"), make=Named, **keys):
    """Run with these requests by version; return the trace, the parts and the answers."""
    config = config_of(steps=12, longest=40, **keys)
    parts = parts_of(config, trainer=Asking(out, requests), engine=Named, step_s=0.0005)
    for engine, host in zip(parts.engines, hosts, strict=False):
        engine.host = host

    def more(place):
        parts.engines.append(make(num_slots=6, step_s=0.0005))
        return parts.engines[place]

    parts.more = MoreEngines(more)
    parts.summary = run_checked(config, out, parts)
    return [row.event or row.command for row in records(out)], parts, parts.trainer.answers


def of(rows, kind):
    return [row for row in rows if isinstance(row, kind)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_added_engine_joins_with_the_newest_weights_and_generates(out, kind):
    rows, parts, ((*before, last),) = played(out, {2: FleetRequest(add=1)}, weight_update=kind)
    assert [(one.engine, one.state) for one in before] == [(0, "up"), (1, "up")]
    assert (last.place, last.engine, last.version) == (2, None, None)
    (joined,) = of(rows, EngineJoined)
    assert joined.engine == 2
    begun = {row.rollout_id for row in of(rows[rows.index(joined) :], StartRollout) if row.engine == 2}
    assert parts.engines[2].texts
    assert parts.engines[2].texts.keys() <= begun
    assert parts.summary.engine_restarts == 0


@pytest.mark.parametrize("kind", KINDS[:3])
def test_rollouts_of_an_engine_whose_notice_is_over_go_on_elsewhere_with_all_their_tokens(out, kind):
    """Engines get their prompt and all tokens that the removed one has answered, though it reports every 64."""
    always = {"ready_queue_size": 10_000, "weight_update": kind}  # an engine never waits, nor is it empty
    rows, parts, _ = played(out, {3: FleetRequest(drain=["1"], notice_s=0.0)}, **always)
    leaving, left = rows.index(EngineLeaving(1)), rows.index(EngineLeft(1))
    moved = [row for row in of(rows[leaving:left], RolloutAborted) if row.engine == 1]
    assert moved
    assert not [row for row in of(rows[leaving:], StartRollout) if row.engine == 1]
    stays, gone = parts.engines
    again = {row.rollout_id for row in moved if row.spans.num_tokens} & stays.prompts.keys()
    assert again
    for rollout_id in again:
        assert stays.prompts[rollout_id][0] == gone.texts[rollout_id][-1]


def test_rollouts_end_on_an_engine_within_its_notice(out):
    rows, *_ = played(out, {3: FleetRequest(drain=["1"], notice_s=60.0)})
    after = rows[rows.index(EngineLeaving(1)) : rows.index(EngineLeft(1))]
    assert [row for row in of(after, RolloutFinished) if row.engine == 1]
    assert not of(after, RolloutAborted)


def test_an_engine_takes_the_place_of_a_removed_one(out):
    requests = {2: FleetRequest(drain=["0"], notice_s=0.0), 5: FleetRequest(add=1), 9: FleetRequest()}
    rows, parts, answers = played(out, requests)
    assert [one.engine for one in of(rows, EngineJoined)] == [2]
    assert [(one.place, one.engine) for one in answers[-1]] == [(0, 2), (1, 1)]
    assert len(parts.engines) == 2


def test_all_engines_of_a_machine_leave(out):
    request = FleetRequest(drain=["spot-7"], notice_s=0.0)
    rows, _, answers = played(out, {3: request}, hosts=("a", "spot-7", "spot-7"), engines=3)
    assert [one.engine for one in of(rows, EngineLeft)] == [1, 2]
    assert {one.state for one in answers[0] if one.machine == "spot-7"} == {"is leaving"}


def test_an_added_engine_waits_for_its_accelerators(out):
    class Late(Named):
        async def start(self):
            await super().start()
            if self.num_started < 4:
                raise EngineLostError("placing: no answer")

    rows, parts, _ = played(out, {1: FleetRequest(add=1)}, make=Late)
    assert of(rows, EngineJoined)
    assert parts.engines[2].num_started == 4


def test_an_engine_whose_machine_is_gone_joins_again_when_there_is_one(out):
    """It cannot be started three times; that it was lost once is one restart."""

    class Gone(Named):
        async def start(self):
            await super().start()
            if 1 < self.num_started < 5:
                raise EngineLostError("placing: no answer")

    class Waits(Killer):
        async def train(self, samples, *, completes_step):
            while self.version == 6 and parts.engines[1].num_started < 5:
                await asyncio.sleep(0.001)
            return await super().train(samples, completes_step=completes_step)

    config = config_of(steps=12, longest=40)
    parts = parts_of(config, step_s=0.0005)
    parts.engines[1] = Gone(num_slots=6, step_s=0.0005)
    parts.trainer = Waits(train_batch_size=8, at=3, do=parts.engines[1].die)
    parts.more = MoreEngines(lambda _: Named())
    assert run_checked(config, out, parts).engine_restarts == 1
    assert sum(isinstance(row.event, EngineJoined) for row in records(out)) == 1


def test_a_machine_with_an_engine_that_starts_is_not_drained_by_half(out):
    class Slow(Named):
        """Dies at its fifth request; its restart ends when somebody has asked for its end."""

        host = "two"

        async def start(self):
            while self.num_started == 1 and not parts.trainer.answers:
                await asyncio.sleep(0.001)
            await super().start()

        async def generate(self, request):
            if len(self.prompts) == 5 and self.num_started == 1:
                self.die()
            return await super().generate(request)

    config = config_of(steps=12, longest=40)
    parts = parts_of(config, trainer=Asking(out, {3: FleetRequest(drain=["two"])}), step_s=0.0005)
    parts.engines[1] = Slow(num_slots=6, step_s=0.0005)
    parts.more = MoreEngines(lambda _: Named())
    run_checked(config, out, parts)
    assert parts.trainer.answers == ["--drain two: an engine starts there, place 1; ask again when it is up"]


def test_an_added_engine_that_cannot_load_is_tried_again_and_harms_nobody(out):
    """It refuses the bytes of four versions, as on a machine that does not see the folder of the weights."""

    class Blind(Named):
        async def update(self, weights, weight_update):
            if self.num_started < 5:
                raise TransferError("no such file")
            return await super().update(weights, weight_update)

    train = {"evaluation": {"problems": 4, "every": 2}}
    rows, parts, _ = played(out, {1: FleetRequest(add=1)}, make=Blind, train=train)
    assert parts.engines[2].num_started == 5
    assert of(rows, EngineJoined)
    assert parts.summary.evaluation.success_after is not None


def test_a_lost_trainer_brings_no_removed_engine_back(out):
    """It is lost while engine 1 has its notice, and while an added engine waits for its accelerators."""

    class Dies(Asking):
        async def train(self, samples, *, completes_step):
            if self.version == 5 and self.answers:
                while not (out / FOLDER / "step_000004").exists():
                    await asyncio.sleep(0.001)
                self.answers.clear()
                raise TrainerLostError("rank 0 is dead")
            return await super().train(samples, completes_step=completes_step)

    class Late(Named):
        async def start(self):
            await super().start()
            if parts.trainer.answers or self.num_started < 3:
                raise EngineLostError("placing: no answer")

    config = config_of(steps=12, longest=40, train={"checkpoint": {"every": 2}, "trainer": {"restarts": 1}})
    trainer = Dies(out, {3: FleetRequest(drain=["1"], notice_s=600.0, add=1)})
    parts = parts_of(config, trainer=trainer, engine=Named, step_s=0.0005)
    parts.engines[1] = Named(num_slots=6, step_s=1000.0)
    parts.more = MoreEngines(lambda _: Late(num_slots=6, step_s=0.0005))
    run_checked(config, out, parts)
    assert parts.engines[1].num_started == 1
    assert parts.more.vacant == {1}
    joined = [row.event.engine for row in records(out) if isinstance(row.event, EngineJoined)]
    assert len(joined) == 1


@pytest.mark.parametrize(
    ("request_", "fault"),
    [
        (FleetRequest(drain=["7"]), "--drain must be one of the engines 0, 1, or the machine of one, got 7"),
        (FleetRequest(drain=["0", "two"]), "--drain must leave an engine, got all 2"),
    ],
)
def test_a_request_that_cannot_be_carried_out_changes_nothing(out, request_, fault):
    rows, _, answers = played(out, {2: request_.model_copy(update={"add": 3})})
    assert answers == [fault]
    assert not of(rows, EngineJoined | EngineLeaving)


def test_a_request_that_the_run_cannot_read_is_answered_by_a_line(out):
    """As of a newer version of the command."""

    class Strange(FleetRequest):
        rename: str = "all"

    rows, _, (answer,) = played(out, {2: Strange(add=1)})
    assert "cannot read the request" in answer
    assert not of(rows, EngineJoined)


def test_engines_that_share_accelerators_stay(out):
    config = config_of(steps=6, kind="conventional")
    parts = parts_of(config, trainer=Asking(out, {2: FleetRequest(add=1)}))
    run_checked(config, out, parts)
    assert "share accelerators with the trainer" in parts.trainer.answers[0]


def test_a_resumed_run_has_the_engines_of_its_run_file(out):
    """One was removed before: it joins; one was added: it leaves."""
    for request, event in ((FleetRequest(drain=["1"], notice_s=0.0), EngineJoined), (FleetRequest(add=1), EngineLeft)):
        folder = out / event.__name__
        config = config_of(steps=12, longest=40)
        parts = parts_of(config, trainer=Asking(folder, {2: request}, stops_at=6), engine=Named, step_s=0.0005)
        parts.more = MoreEngines(lambda _: Named(num_slots=6))
        interrupted(config, folder, parts)
        run_checked(config, folder, resume=True)
        assert sum(isinstance(row.event, event) for row in records(folder)) == 1


def test_a_folder_without_a_driver_is_refused(out):
    out.mkdir()
    assert (
        message(ask, out, FleetRequest()) == f"DIR must be the folder of a run in progress, got {out}: no driver has it"
    )
    done = CliRunner().invoke(app, ["fleet", str(out), "--json"])
    assert isinstance(done.exception, ConfigError)


def test_the_command_shows_the_engines(out):
    class Commanding(Asking):
        async def train(self, samples, *, completes_step):
            if self.version == 3 and not self.answers:
                runner = CliRunner()
                for options in (["--json"], []):
                    done = await asyncio.to_thread(runner.invoke, app, ["fleet", str(self.out), *options])
                    self.answers.append(done.stdout)
            return await super().train(samples, completes_step=completes_step)

    config = config_of()
    parts = parts_of(config, trainer=Commanding(out, {}))
    run_checked(config, out, parts)
    rows, table = parts.trainer.answers
    assert [(one["engine"], one["place"], one["state"]) for one in json.loads(rows)] == [(0, 0, "up"), (1, 1, "up")]
    assert table.splitlines()[0].split() == ["engine", "place", "machine", "state", "version", "requests"]
    assert len(table.splitlines()) == 3
