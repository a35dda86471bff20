"""Rollouts with turns, driven for real on engines and a trainer in memory, with environments in processes."""

import asyncio
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from games import Game
from in_memory import KINDS, Asked, interrupted, parts_of, run, run_checked, turns_of
from ledger_check import records
from refusals import message

from backends.driver.rollouts import lag_of_tokens
from backends.fake import DRIFT, FakeCodec, FakeEngine, FakeTrainer, logprob
from backends.preflight import check_run, evaluation_task, task_of
from backends.workers import main as worker_main
from backends.workers.processes import LocalWorker
from pipelinerl.errors import RunFailedError
from pipelinerl.rl.environments import Observation
from pipelinerl.rl.segments import SegmentKind
from pipelinerl.scheduler.events import (
    EngineSeconds,
    ObservationReady,
    OpenEnvironment,
    RolloutFailed,
    RolloutFinished,
    StartRollout,
    TurnFinished,
)


class Recording(FakeTrainer):
    """Keeps what it is given."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.samples = []

    async def train(self, samples, *, completes_step):
        self.samples += samples
        return await super().train(samples, completes_step=completes_step)


def recorded(config):
    return parts_of(config, engine=Asked, trainer=Recording(train_batch_size=config.scheduler.train_batch_size))


@pytest.mark.parametrize("as_tokens", [False, True])
def test_a_rollout_is_generated_and_observed_segments_and_no_token_is_made_of_text_again(out, as_tokens):
    """Three turns; each answer has the length and the number of its turn. The next request is prompt and all of it."""
    config = turns_of(settings={"turns": 3, "as_tokens": as_tokens}, steps=3)
    parts = recorded(config)
    summary = run_checked(config, out, parts)
    assert summary.environments.turns_mean >= 3.0
    asked = {}
    for engine in parts.engines:
        for request in engine.requests:
            asked.setdefault(request.rollout_id, []).append(request.prompt_tokens)
    assert len(parts.trainer.samples) == 24
    for sample in parts.trainer.samples:
        kinds = [one.kind for one in sample.segments]
        assert kinds == [SegmentKind.GENERATED, SegmentKind.OBSERVED] * 2 + [SegmentKind.GENERATED]
        before, requests, answers = list(sample.prompt_P), [], []
        for number, one in enumerate(sample.segments):
            if one.kind is SegmentKind.GENERATED:
                requests.append(tuple(before))
                answers.append(one.tokens)
            else:
                turn, length = (number + 1) // 2, len(answers[-1])
                text = f"{len(FakeCodec().decode(answers[-1].tolist()))} {turn}"
                assert tuple(one.tokens) == ((length % 15, turn) if as_tokens else FakeCodec().encode(text))
                assert len(one.logprobs) == 0
            before += one.tokens.tolist()
        assert sorted(asked[sample.rollout_id], key=len) == requests
        assert sample.answer_T.tolist() == np.concatenate(answers).tolist()
        assert len(sample.behaviour_logprob_T) == len(sample.answer_T)


class Timed(Asked):
    """Says that each request was two seconds in prefill and one in decode."""

    async def generate(self, request):
        return replace(await super().generate(request), seconds=EngineSeconds(2.0, 1.0))


def test_prefill_and_decode_of_engines_that_tell_them_are_in_trace_and_report(out):
    """Every answer counts, those that were cut short, too; the replay of the trace gives the same report."""
    config = turns_of(settings={"turns": 3}, steps=3)
    parts = parts_of(config, engine=Timed)
    summary = run_checked(config, out, parts)
    seconds, finished = summary.environments.seconds, summary.rollouts.finished
    num_answers = sum(len(engine.answers) for engine in parts.engines)
    assert seconds.prefill * finished == pytest.approx(2.0 * num_answers)
    assert seconds.decode * finished == pytest.approx(1.0 * num_answers)
    assert seconds.prefill_share == pytest.approx(2 / 3)
    told = [one.seconds for one in (row.event for row in records(out)) if isinstance(one, TurnFinished)]
    assert set(told) == {EngineSeconds(2.0, 1.0)}


def test_every_generated_token_has_the_version_that_sampled_it(out):
    """In memory a log-probability says its version: the reported spans, counted over all turns, say the same."""
    config = turns_of(settings={"turns": 4, "delay_s": 0.01}, steps=8, longest=20)
    parts = recorded(config)
    run_checked(config, out, parts)
    spans = {row.event.rollout_id: row.event.spans for row in records(out) if isinstance(row.event, RolloutFinished)}
    for sample in parts.trainer.samples:
        told = -lag_of_tokens(spans[sample.rollout_id], 0)
        assert told.tolist() == np.rint((logprob(0) - sample.behaviour_logprob_T) / DRIFT).tolist()
    assert any(len(one.versions) > 1 for one in spans.values())


@pytest.mark.parametrize(
    "setting",
    [*({"weight_update": kind} for kind in KINDS), {"kind": "conventional"}, {"max_lag": 1, "on_stale": "drop"}],
    ids=[*KINDS, "conventional", "drop"],
)
def test_turns_are_scheduled_under_every_schedule_and_replayed(out, setting):
    config = turns_of(settings={"turns": 3}, steps=6, longest=20, **setting)
    summary = run_checked(config, out, parts_of(config, step_s=0.0005))
    happened = Counter(type(row.event or row.command) for row in records(out))
    assert happened[StartRollout] >= happened[TurnFinished] >= 3 * happened[RolloutFinished] >= 3 * 48
    assert happened[OpenEnvironment] == summary.rollouts.started
    assert summary.rollouts.failed == happened[RolloutFailed] == 0
    assert 0 < summary.environments.in_use_mean <= 4
    ready = Counter(row.event.rollout_id for row in records(out) if isinstance(row.event, ObservationReady))
    finished = [row.event for row in records(out) if isinstance(row.event, RolloutFinished)]
    assert {event.engine for event in finished} == {None}
    assert {ready[event.rollout_id] for event in finished} == {3}  # a reset, and two turns that others follow


def test_at_most_so_many_environments_are_open(out):
    config = turns_of(count=3, settings={"turns": 2}, steps=3)
    assert run_checked(config, out).environments.in_use_mean <= 3
    opened = [isinstance(row.command, OpenEnvironment) for row in records(out)]
    closed = [isinstance(row.event, RolloutFinished | RolloutFailed) for row in records(out)]
    assert max(np.cumsum(opened) - np.cumsum(closed)) <= 3 + 4  # a rollout is open until it is scored


@pytest.mark.parametrize(
    ("limits", "turns"),
    [({"most": 2}, 2), ({"context_max": 30, "longest": 8}, None), ({"observation_max": 1, "most": 3}, 3)],
    ids=["turns", "context", "observation"],
)
def test_an_episode_ends_where_it_is_cut(out, limits, turns):
    """The game would go on: 100 turns. Prompts have 9 or 10 tokens, observations 3 or more before the cut."""
    config = turns_of(settings={"turns": 100}, steps=2, **limits)
    parts = recorded(config)
    run_checked(config, out, parts)
    for sample in parts.trainer.samples:
        generated = [one for one in sample.segments if one.kind is SegmentKind.GENERATED]
        observed = [one for one in sample.segments if one.kind is SegmentKind.OBSERVED]
        assert sample.num_tokens <= limits.get("context_max", 200)
        assert sample.segments[-1].kind is SegmentKind.GENERATED
        assert all(len(one.tokens) <= limits.get("longest", 12) for one in generated)
        assert all(len(one.tokens) <= limits.get("observation_max", 10) for one in observed)
        assert turns is None or len(generated) == turns


def test_what_does_not_fit_turns_is_one_line():
    """Wrong input of a run file with an environment, found before anything starts."""
    kept = turns_of(limits={"prefix_cache": "kept"})
    assert "environment.prefix_cache must be 'salted' or 'off' for train" in message(check_run, kept)
    overlong = turns_of(train={"task": {"name": "games:Game", "overlong_tokens": 3}})
    assert "train.task.overlong_tokens must be 0 with an [environment]" in message(check_run, overlong)
    workers = turns_of(train={"task": {"name": "games:Game", "reward_workers": 1}})
    assert "train.task.reward_workers must be left out with an [environment]" in message(check_run, workers)
    assert "async reset, step and close" in message(task_of, turns_of(name="NEVER"))
    unknown = turns_of(train={"evaluation": {"problems": 1, "settings": {"turn": 2}}})
    assert "train.evaluation.settings must suit games:Game" in message(evaluation_task, unknown, None)
    many = turns_of(name="Three", train={"evaluation": {"problems": 4}})
    assert "at most the task's 3 held-out problems, got 4" in message(evaluation_task, many, None)


WAYS = {
    "dies": "its process ended in its step",
    "hangs": "its step took more than 1 s",
    "raises": "its step raised RuntimeError: no game today",
    "megabytes": "its step gave no observation: content must have at most 1048576 characters or tokens, got 5000000",
    "undecodable": "its step gave no observation: content must be text that UTF-8 can encode",
    "giant": "its step gave no observation: content must have tokens below 2147483648, got 9223372036854775808",
    "nonsense": "its step gave no observation: reward must be a finite number, got nan",
}


@pytest.mark.parametrize("kind", ["pipeline", "conventional"])
def test_environments_that_fail_cost_their_rollouts_only_and_are_counted(out, kind):
    """A tenth of all resets and steps fails, in every way there is: the run ends, its counts add up.

    Nothing is trained on half an episode: every sample has all of its turns.
    """
    settings = {"rate": 0.1, "ways": " ".join(WAYS), "turns": 2}
    limits = {"reset_timeout_s": 0.5, "step_timeout_s": 0.5}
    config = turns_of(name="Hostile", settings=settings, steps=10, group=2, kind=kind, limits=limits)
    parts = recorded(config)
    summary = run_checked(config, out, parts)
    failed = [row.event for row in records(out) if isinstance(row.event, RolloutFailed)]
    assert {event.engine for event in failed} == {None}
    assert len(failed) == summary.rollouts.failed > 0
    environments = summary.environments
    assert environments.timeouts + environments.errors == len(failed)
    assert min(environments.timeouts, environments.errors) > 0
    assert all(len(sample.segments) == 3 for sample in parts.trainer.samples)


@pytest.mark.parametrize("way", WAYS)
def test_each_failure_is_named(out, caplog, way):
    settings, limits = {"ways": way, "turns": 2}, {"step_timeout_s": 1.0} if way == "hangs" else {}
    config = turns_of(name="Hostile", settings=settings, steps=2, batch=2, group=2, count=2, limits=limits)
    environments = run_checked(config, out).environments
    assert f"rollout 0 failed: {WAYS[way]}" in caplog.text or f"rollout 1 failed: {WAYS[way]}" in caplog.text
    if way == "hangs":
        assert environments.timeouts >= 1 > environments.errors  # others, too, on a machine that stands still
    else:
        assert (environments.timeouts, environments.errors) == (0, 1)  # then its sibling is given up


def test_a_reset_that_fails_is_made_again(out):
    """Each of four environments fails at its first two resets: with eight retries all rollouts come through."""
    config = turns_of(name="Sleepy", settings={"turns": 1}, steps=2, count=4, limits={"retries": 8})
    summary = run_checked(config, out)
    assert summary.rollouts.failed == 0
    assert summary.environments.retries == summary.environments.errors >= 2


def test_a_rollout_that_lives_too_long_is_given_up_while_its_environment_acts_and_counted(out):
    """Each of a thousand turns takes 0.05 s: no rollout gets through, and only its life ends it."""
    config = turns_of(
        settings={"turns": 1000, "delay_s": 0.05}, most=1000, context_max=100_000, steps=1, discard_limit=20,
        limits={"lifetime_s": 0.4, "retries": 3},
    )  # fmt: skip
    with pytest.raises(RunFailedError, match=r"^stalled: more than scheduler\.discard_limit = 20 rollouts"):
        run(config, out, parts_of(config))
    environments = json.loads((out / "summary.json").read_text())["environments"]
    failed = [row.event.rollout_id for row in records(out) if isinstance(row.event, RolloutFailed)]
    assert environments["expired"] == len(failed) > 0
    assert environments["retries"] == environments["errors"] == environments["timeouts"] == 0


class Late(FakeEngine):
    """Gives each answer 0.6 s after it is made."""

    async def generate(self, request):
        answer = await super().generate(request)
        await asyncio.sleep(0.6)
        return answer


def test_a_turn_that_an_engine_ends_after_the_rollouts_life_is_not_acted_on(out, caplog):
    """Environments live for half a second, and answer at once; no answer of an engine comes that soon."""
    config = turns_of(settings={"turns": 1}, steps=1, longest=2, discard_limit=4, limits={"lifetime_s": 0.5}, count=2)
    with pytest.raises(RunFailedError, match="stalled"):
        run(config, out, parts_of(config, engine=Late))
    assert "failed: it has lived for more than 0.5 s (environment.lifetime_s)" in caplog.text
    assert not [row for row in records(out) if isinstance(row.event, RolloutFinished)]


def test_no_process_is_left_and_environments_are_closed(out, tmp_path):
    run_checked(turns_of(settings={"turns": 2, "pids": str(tmp_path)}, steps=2), out)
    assert list(tmp_path.iterdir()) == [out]


def test_an_environment_that_hangs_does_not_outlive_its_driver():
    """However the driver has ended, standard input closes then."""
    task = {"name": "games:Hostile", "settings": {"ways": "hangs", "rate": 1.0}}

    async def status():
        worker = await LocalWorker.launched(worker_main.ENVIRONMENT, None)
        assert await worker.exchange(json.dumps(task).encode() + b"\n") == b"{}\n"
        worker._process.stdin.write(b'{"index": 0, "held_out": false}\n')
        worker._process.stdin.close()
        return await worker._process.wait()

    assert asyncio.run(asyncio.wait_for(status(), worker_main.CLOSE_LIMIT_S + 600)) == 1


def test_a_resumed_run_gives_up_what_had_an_environment_and_goes_on(out):
    config = turns_of(settings={"turns": 3, "delay_s": 0.01}, steps=6)
    interrupted(config, out)
    summary = run_checked(config, out, parts_of(config), resume=True)
    failed = [row.event for row in records(out) if isinstance(row.event, RolloutFailed)]
    assert 0 < len(failed) == summary.rollouts.failed
    assert summary.environments.errors == 0


@pytest.mark.parametrize("kind", ["pipeline", "conventional"])
def test_held_out_problems_are_played_with_environments_of_their_own(out, kind):
    train = {"evaluation": {"problems": 5, "every": 2, "settings": {"turns": 2}}}
    config = turns_of(settings={"turns": 3}, steps=4, train=train, kind=kind)
    parts = recorded(config)
    summary = run_checked(config, out, parts)
    assert summary.evaluation.success_before is not None
    assert [point.step for point in summary.evaluation.during] == [2]
    asked = Counter(one.rollout_id for engine in parts.engines for one in engine.requests if one.rollout_id < 0)
    assert asked == dict.fromkeys(range(-5, 0), 2 * 3)  # two turns, before, beside and after
    texts = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert {one["prompt"].split()[0] for one in texts if one["held_out"]} == {"held"}
    assert all(one["prompt"].startswith("problem ") for one in texts if not one["held_out"])


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (Observation("text", 1, done=True), {"content": "text", "reward": 1.0, "done": True}),
        (Observation((np.int64(3), 4), np.float32(0.5)), {"content": [3, 4], "reward": 0.5, "done": False}),
        ("text", "step must return an Observation, got str"),
        (Observation(7), "content must be text or a tuple of tokens, got int"),
        (Observation((3, -1)), "content must be text or a tuple of tokens, got tuple"),
        (Observation((3, 1.5)), "content must be text or a tuple of tokens, got tuple"),
        (Observation("", "1"), "reward must be a finite number, got '1'"),
        (Observation("", "1" * 10**6), f"reward must be a finite number, got '{'1' * 99}"),
        (Observation("", float("inf")), "reward must be a finite number, got inf"),
        (Observation(done=1), "done must be true or false, got 1"),
    ],
)
def test_what_an_environment_may_answer(answer, says):
    class Says(Game):
        async def step(self, turn):
            return answer

    given = asyncio.run(worker_main._answer(Says(), {"tokens": [3], "text": "a"}))
    assert given == (says if isinstance(says, dict) else {"fault": f"gave no observation: {says}"})
