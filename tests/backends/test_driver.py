"""The real world's driver on an engine and a trainer in memory: nothing is lost, nothing counted twice, all replays."""

from __future__ import annotations

import asyncio
import csv
import json
import math
import signal
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.errors import BackendError, ConfigError, RunFailedError, TrainerLostError
from pipelinerl.records.run_folder import TRACE_FILE
from pipelinerl.records.trace import Trace, replay
from pipelinerl.rl.tasks import Problem
from pipelinerl.scheduler.events import (
    PublishWeights,
    RolloutFinished,
    StartRollout,
    WeightsLoaded,
)

pytest.importorskip("torch")  # TensorBoard's writer is torch's
pytest.importorskip("tensorboard")

from in_memory import KINDS, Interrupts, Killer, Letters, Shared, config_of, parts_of, run
from ledger_check import check_ledger, records

from backends.checkpoint import FOLDER, read_newest
from backends.driver import Driver
from backends.event_loop import EventLoop
from backends.fake import DRIFT, FakeEngine, FakeTrainer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


# -------------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("weight_update", KINDS)
def test_a_pipeline_run_keeps_its_books_under_every_weight_update(tmp_path, weight_update):
    config = config_of(weight_update=weight_update)
    parts = parts_of(config)
    summary = run(config, tmp_path / "run", parts)
    check_ledger(tmp_path / "run", config, summary)
    assert parts.trainer.version == config.optimizer_steps
    assert [len(batch) for batch in parts.trainer.trained] == [8] * 6
    assert summary.complete


def test_an_in_flight_update_shows_in_the_spans(tmp_path):
    config = config_of(steps=10, longest=40, slots=16)
    out = tmp_path / "run"
    run(config, out, parts_of(config))
    spans = [row.event.spans for row in records(out) if isinstance(row.event, RolloutFinished)]
    assert any(len(one.versions) > 1 for one in spans)


def test_under_wait_no_answer_spans_two_versions(tmp_path):
    config = config_of(steps=10, longest=40, slots=16, weight_update="wait")
    out = tmp_path / "run"
    run(config, out, parts_of(config))
    spans = [row.event.spans for row in records(out) if isinstance(row.event, RolloutFinished)]
    assert all(len(one.versions) == 1 for one in spans)


def test_an_aborting_update_has_rollouts_go_on_with_the_tokens_they_have(tmp_path):
    config = config_of(steps=10, longest=40, slots=16, weight_update="abort")
    out = tmp_path / "run"
    summary = run(config, out, parts_of(config))
    again = [row.command for row in records(out) if isinstance(row.command, StartRollout) and row.command.kept_tokens]
    assert again
    assert summary.rollouts.interruptions >= len(again)
    check_ledger(out, config, summary)


@pytest.mark.parametrize("steps_per_rl_step", [1, 3])
def test_a_conventional_run_trains_batch_i_at_lag_i(tmp_path, steps_per_rl_step):
    config = config_of(kind="conventional", optimizer_steps_per_rl_step=steps_per_rl_step)
    out = tmp_path / "run"
    summary = run(config, out, parts_of(config))
    check_ledger(out, config, summary)
    with (out / "steps.csv").open() as file:
        lags = [float(row["lag_mean"]) for row in csv.DictReader(file)]
    assert lags == [step % steps_per_rl_step for step in range(6)]


@pytest.mark.parametrize("steps_per_rl_step", [1, 2])
def test_a_one_step_off_run_trains_batch_i_at_lag_g_plus_i(tmp_path, steps_per_rl_step):
    """6 steps; in the first RL step the lag is i."""
    config = config_of(kind="one_step_off", optimizer_steps_per_rl_step=steps_per_rl_step)
    parts = parts_of(config)
    summary = run(config, tmp_path / "run", parts)
    check_ledger(tmp_path / "run", config, summary)
    with (tmp_path / "run" / "steps.csv").open() as rows:
        lags = [float(row["lag_mean"]) for row in csv.DictReader(rows)]
    assert lags == {1: [0, 1, 1, 1, 1, 1], 2: [0, 1, 2, 3, 2, 3]}[steps_per_rl_step]
    assert [len(batch) for batch in parts.trainer.trained] == [8] * 6


@pytest.mark.parametrize("weight_update", KINDS)
@pytest.mark.parametrize("every", [2, 4])
def test_a_run_that_publishes_now_and_then_keeps_its_books(tmp_path, every, weight_update):
    config = config_of(publish_every=every, max_lag=every, weight_update=weight_update)
    summary = run(config, tmp_path / "run", parts_of(config))
    check_ledger(tmp_path / "run", config, summary)
    rows = records(tmp_path / "run")
    versions = [0, *(row.command.version for row in rows if isinstance(row.command, PublishWeights))]
    assert len(versions) > 1
    for last, version in pairwise(versions):  # once in K steps, or made up for later
        assert version // every > last // every
    assert summary.lag.max <= every


def test_micro_batches_stream_into_one_step(tmp_path):
    config = config_of(micro_batch_size=4)
    parts = parts_of(config)
    summary = run(config, tmp_path / "run", parts)
    check_ledger(tmp_path / "run", config, summary)
    assert [len(batch) for batch in parts.trainer.trained] == [8] * 6


@pytest.mark.parametrize("on_stale", ["train", "drop", "requeue"])
def test_no_trained_token_is_older_than_max_lag(tmp_path, on_stale):
    config = config_of(max_lag=1, on_stale=on_stale, steps=8)
    summary = run(config, tmp_path / "run", parts_of(config))
    check_ledger(tmp_path / "run", config, summary)
    assert summary.lag.max <= 1


def test_the_effective_sample_size_is_that_of_the_fake_drift(tmp_path):
    """Weights are exp(-DRIFT * lag), so within one lag all are equal: ESS 1; conventional G=1 has lag 0 only."""
    config = config_of(kind="conventional")
    summary = run(config, tmp_path / "run", parts_of(config))
    assert summary.ess.mean == summary.ess.min == pytest.approx(1.0, abs=1e-12)
    assert summary.mismatch.kl == summary.mismatch.log_ratio_abs_max_at_lag_0 == 0.0
    mixed = config_of(steps=10, longest=40, slots=16)
    summary = run(mixed, tmp_path / "mixed", parts_of(mixed))
    assert all(ess == pytest.approx(1.0, abs=1e-5) for ess in summary.ess.by_lag.values())  # float32 inside
    largest = summary.lag.max * DRIFT
    assert math.exp(-largest) < summary.ess.mean <= 1.0


# ------------------------------------------------------------------------------------------ faults


@pytest.mark.parametrize("weight_update", KINDS)
def test_a_run_survives_the_loss_of_an_engine(tmp_path, weight_update):
    config = config_of(weight_update=weight_update, longest=40, slots=16)
    parts = parts_of(config)
    parts.trainer = Killer(train_batch_size=8, at=2, do=parts.engines[1].die)
    summary = run(config, tmp_path / "run", parts)
    check_ledger(tmp_path / "run", config, summary)
    assert summary.engine_restarts == 1
    assert [engine.num_started for engine in parts.engines] == [1, 2]


def test_an_engine_that_is_lost_too_often_ends_the_run(tmp_path):
    config = config_of(train={"engine": {"restarts": 0}}, steps=50, longest=40)
    parts = parts_of(config)
    parts.trainer = Killer(train_batch_size=8, at=2, do=parts.engines[1].die)
    with pytest.raises(BackendError, match="engine lost"):
        run(config, tmp_path / "run", parts)
    done = json.loads((tmp_path / "run" / "summary.json").read_text())["optimizer_steps"]
    assert done >= 2
    again = config_of(train={"engine": {"restarts": 1}}, steps=50, longest=40)
    summary = run(again, tmp_path / "run", parts_of(again), resume=True)  # the trainer was well: nothing is lost
    check_ledger(tmp_path / "run", again, summary)


def test_a_reward_that_raises_fails_its_rollout_and_the_run_goes_on(tmp_path):
    config = config_of(steps=5)
    parts = parts_of(config, task=Letters(raises_every=3))
    summary = run(config, tmp_path / "run", parts)
    check_ledger(tmp_path / "run", config, summary)
    assert summary.rollouts.failed > 0


def test_a_reward_that_is_not_a_number_fails_its_rollout(tmp_path):
    class Nan(Letters):
        def reward(self, problem, answer):
            return math.nan if problem.expected % 2 else 1.0

    config = config_of(steps=3)
    summary = run(config, tmp_path / "run", parts_of(config, task=Nan()))
    assert summary.rollouts.failed > 0


def test_a_reward_that_takes_for_ever_fails_its_rollout(tmp_path):
    class Slow(Letters):
        def reward(self, problem, answer):
            time.sleep(0.3 if problem.expected == 0 else 0.0)
            return 1.0

    config = config_of(steps=3, train={"task": {"name": "arithmetic", "reward_timeout_s": 0.05}})
    parts = parts_of(config, task=Slow(), trainer=FakeTrainer(train_batch_size=8, train_s=0.1))
    summary = run(config, tmp_path / "run", parts)
    assert summary.rollouts.failed > 0


def test_a_prompt_that_is_too_long_fails_its_rollouts(tmp_path):
    class Long(Letters):
        def problem(self, index, *, held_out):
            return Problem("x" * (200 if index % 2 else 3), index)

    config = config_of(steps=3, train={"task": {"name": "arithmetic", "max_prompt_tokens": 100}})
    summary = run(config, tmp_path / "run", parts_of(config, task=Long()))
    assert summary.rollouts.failed > 0


def test_a_run_whose_rewards_all_fail_is_stalled(tmp_path):
    config = config_of(discard_limit=50)
    with pytest.raises(RunFailedError, match=r"stalled: .*discard_limit = 50"):
        run(config, tmp_path / "run", parts_of(config, task=Letters(raises_every=1)))


def test_an_engine_that_is_lost_asleep_is_started_again(tmp_path):
    config = config_of(kind="conventional")
    parts = parts_of(config)
    parts.trainer = Killer(train_batch_size=8, at=2, do=parts.engines[1].die)
    summary = run(config, tmp_path / "run", parts)
    check_ledger(tmp_path / "run", config, summary)
    assert summary.engine_restarts == 1


class Exporter(FakeTrainer):
    """Does something when it exports."""

    def __init__(self, *args, do, **kwargs):
        super().__init__(*args, **kwargs)
        self.do = do

    async def export(self, folder):
        await super().export(folder)
        self.do()


@pytest.mark.parametrize("kind", ["pipeline", "conventional"])
def test_the_evaluation_after_the_run_survives_the_loss_of_an_engine(tmp_path, kind):
    config = config_of(kind=kind, train={"evaluation": {"problems": 8}})
    parts = parts_of(config)
    parts.trainer = Exporter(train_batch_size=8, do=parts.engines[1].die)
    summary = run(config, tmp_path / "run", parts)
    assert summary.evaluation.success_after is not None
    assert parts.engines[1].num_started == 2


def test_ctrl_c_ends_the_evaluation_after_the_run_and_the_model_is_there(tmp_path):
    config = config_of(longest=40, train={"evaluation": {"problems": 50}})
    out = tmp_path / "run"
    parts = parts_of(config)
    parts.trainer = Exporter(train_batch_size=8, do=lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(RunFailedError, match="--resume evaluates again"):
        run(config, out, parts)
    assert (out / "model" / "fake.json").exists()
    assert run(config, out, parts_of(config), resume=True).evaluation.success_after is not None


@pytest.mark.parametrize("error", [RuntimeError("no reward today"), SystemExit("no reward at all")])
def test_a_held_out_problem_whose_reward_raises_counts_as_not_solved(tmp_path, error):
    class Moody(Letters):
        def reward(self, problem, answer):
            if problem.prompt.startswith("held out") and problem.expected % 2:
                raise error
            return 1.0

    config = config_of(steps=2, train={"evaluation": {"problems": 8}})
    summary = run(config, tmp_path / "run", parts_of(config, task=Moody()))
    assert summary.evaluation.to_dict() == {"success_before": 0.5, "success_after": 0.5}


def test_a_reward_that_never_returns_keeps_neither_the_others_nor_the_end_waiting(tmp_path):
    over = threading.Event()

    class Hangs(Letters):
        def reward(self, problem, answer):
            if problem.expected < 3:  # 12 rollouts, more than there are threads
                over.wait(30)
            return super().reward(problem, answer)

    config = config_of(steps=3, train={"task": {"name": "arithmetic", "reward_timeout_s": 0.05}})
    summary = run(config, tmp_path / "run", parts_of(config, task=Hangs()))
    assert summary.rollouts.failed >= 8
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "reward")
    over.set()


@pytest.mark.parametrize("micro_batch_size", [4, 8])
def test_a_colocated_trainer_has_its_memory_back_whenever_it_works(tmp_path, micro_batch_size):
    config = config_of(kind="conventional", steps=8, micro_batch_size=micro_batch_size)
    out = tmp_path / "run"

    task = Interrupts(when=lambda problem: problem.expected == 5)  # engines generate
    with pytest.raises(RunFailedError, match="interrupted"):
        run(config, out, parts_of(config, task=task, trainer=Shared(train_batch_size=8)))

    class Killed(Killer, Shared):
        pass

    killer = Killed(train_batch_size=8, at=5, do=lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(RunFailedError, match="interrupted"):
        run(config, out, parts_of(config, trainer=killer), resume=True)
    summary = run(config, out, parts_of(config, trainer=Shared(train_batch_size=8)), resume=True)
    check_ledger(out, config, summary)


# --------------------------------------------------------------------------------- checkpoints


def interrupted(config, out, *, at):
    """Run until Ctrl-C comes while step ``at`` is being trained."""
    parts = parts_of(config)
    parts.trainer = Killer(train_batch_size=8, at=at, do=lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(RunFailedError, match="interrupted"):
        run(config, out, parts)
    return parts


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipeline", "conventional", "one_step_off"])
@pytest.mark.parametrize("weight_update", KINDS)
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tmp_path, kind, weight_update):
    config = config_of(
        steps=20, kind=kind, weight_update=weight_update, longest=40, slots=16, optimizer_steps_per_rl_step=2
    )
    out = tmp_path / "run"
    interrupted(config, out, at=3)
    assert replay(Trace(out / TRACE_FILE)).difference is None
    parts = parts_of(config)
    summary = run(config, out, parts, resume=True)
    check_ledger(out, config, summary)
    assert parts.trainer.version == config.optimizer_steps
    assert 0 < len(parts.trainer.trained) <= 17  # what was done before the checkpoint is not done again


def test_an_interrupted_run_goes_on_between_two_publications(tmp_path):
    config = config_of(steps=20, longest=40, slots=16, publish_every=4, max_lag=3)
    interrupted(config, tmp_path / "run", at=6)
    summary = run(config, tmp_path / "run", parts_of(config), resume=True)
    check_ledger(tmp_path / "run", config, summary)
    assert summary.lag.max <= 3


def test_an_interrupt_between_micro_batches_loses_no_rollout(tmp_path):
    config = config_of(micro_batch_size=4, longest=40, slots=16)
    out = tmp_path / "run"
    interrupted(config, out, at=3)
    parts = parts_of(config)
    summary = run(config, out, parts, resume=True)
    check_ledger(out, config, summary)
    assert all(len(batch) == 8 for batch in parts.trainer.trained)


def test_after_a_lost_trainer_the_run_goes_on_from_the_last_checkpoint(tmp_path):
    def die():
        raise TrainerLostError("rank 0 is dead")

    config = config_of(steps=9, longest=40, slots=16, train={"checkpoint": {"every": 2}})
    out = tmp_path / "run"
    parts = parts_of(config)
    parts.trainer = Killer(train_batch_size=8, at=5, do=die)
    with pytest.raises(TrainerLostError, match="rank 0 is dead"):
        run(config, out, parts)
    assert sorted(path.name for path in (out / FOLDER).iterdir()) == ["step_000002", "step_000004"]
    parts = parts_of(config)
    summary = run(config, out, parts, resume=True)
    assert len(parts.trainer.trained) == 5
    check_ledger(out, config, summary)


def test_going_on_samples_nothing_before_the_engines_have_the_published_weights(tmp_path):
    """Every span of the whole trace names a version that its engine had reported, or was about to report."""
    config = config_of(longest=40, slots=16)
    out = tmp_path / "run"
    interrupted(config, out, at=3)
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
def test_an_interrupt_while_one_engine_is_late_with_an_update_gives_all_engines_the_newest_weights(tmp_path):
    """Going on reports the late engine; the answer is a publication, which no engine may be said to have."""
    config = config_of(steps=12, longest=20, slots=16)
    out = tmp_path / "run"
    parts = parts_of(config)
    parts.engines[0] = FakeEngine(num_slots=16, update_s=60.0)
    trainer = parts.trainer
    parts.task = Interrupts(when=lambda _: trainer.version >= 2)
    with pytest.raises(RunFailedError, match="interrupted"):
        run(config, out, parts)
    state = read_newest(out, config).state
    assert state.pending is None
    assert state.scheduler.loaded[0] < state.scheduler.loaded[1] < state.version
    check_ledger(out, config, run(config, out, parts_of(config), resume=True))


def test_a_checkpoint_holds_the_problem_of_every_rollout_in_progress(tmp_path, monkeypatch):
    """Also of those that were started at the very instant it was written."""
    config = config_of()
    out = tmp_path / "run"
    carry_out_all, run_driver = EventLoop._carry_out_all, Driver.run
    drivers = []

    async def run_known(driver):
        drivers.append(driver)
        await run_driver(driver)

    def carried_out_and_interrupted(loop, commands):
        carry_out_all(loop, commands)
        drivers[0].interrupt()

    monkeypatch.setattr(Driver, "run", run_known)
    monkeypatch.setattr(EventLoop, "_carry_out_all", carried_out_and_interrupted)
    with pytest.raises(RunFailedError, match="interrupted"):
        run(config, out, parts_of(config))
    monkeypatch.undo()
    state = read_newest(out, config).state
    assert len(state.in_flight) == 12
    assert state.in_flight.keys() <= state.rollouts.keys()
    check_ledger(out, config, run(config, out, parts_of(config), resume=True))


def test_a_complete_run_that_goes_on_evaluates_and_exports_again(tmp_path):
    config = config_of(train={"evaluation": {"problems": 4}})
    out = tmp_path / "run"
    first = run(config, out, parts_of(config))
    (out / "model" / "fake.json").unlink()
    parts = parts_of(config)
    again = run(config, out, parts, resume=True)
    assert parts.trainer.trained == []
    assert (out / "model" / "fake.json").exists()
    assert again == first
    check_ledger(out, config, again)


def test_a_stalled_run_that_goes_on_is_stalled(tmp_path):
    config = config_of(discard_limit=50)
    for resume in (False, True):
        with pytest.raises(RunFailedError, match="stalled"):
            run(config, tmp_path / "run", parts_of(config, task=Letters(raises_every=1)), resume=resume)


def test_the_evaluation_before_the_run_is_in_the_summary_of_a_resumed_one(tmp_path):
    config = config_of(steps=8, train={"evaluation": {"problems": 4}})
    out = tmp_path / "run"
    interrupted(config, out, at=3)
    assert json.loads((out / "summary.json").read_text())["evaluation"].keys() == {"success_before"}
    summary = run(config, out, parts_of(config), resume=True)
    assert summary.evaluation.to_dict().keys() == {"success_before", "success_after"}


def test_a_kill_while_a_checkpoint_replaces_one_of_its_version_leaves_one(tmp_path, monkeypatch):
    config = config_of(steps=9, train={"checkpoint": {"every": 1, "keep": 1}})
    out = tmp_path / "run"
    rename = Path.rename

    def killed(path, target):
        if path.name == "partial" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            raise KeyboardInterrupt  # after Ctrl-C: its second one
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    parts = parts_of(config)
    parts.trainer = Killer(train_batch_size=8, at=3, do=lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        run(config, out, parts)
    monkeypatch.undo()
    assert read_newest(out, config).state.version >= 3
    check_ledger(out, config, run(config, out, parts_of(config), resume=True))


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path):
    config = config_of()
    out = tmp_path / "run"
    interrupted(config, out, at=2)
    with pytest.raises(ConfigError, match=r"step_00000\d was written with scheduler.train_batch_size=8, got 16"):
        read_newest(out, config_of(batch=16))
    read_newest(out, config_of(train={"checkpoint": {"every": 7}}))  # may differ


def test_without_a_checkpoint_there_is_nothing_to_go_on_from(tmp_path):
    with pytest.raises(ConfigError, match="--resume needs a checkpoint"):
        read_newest(tmp_path, config_of())


def test_a_broken_checkpoint_is_named(tmp_path):
    folder = tmp_path / FOLDER / "step_000001"
    folder.mkdir(parents=True)
    (folder / "run.pickle").write_bytes(b"not a pickle")
    with pytest.raises(ConfigError, match=r"run\.pickle cannot be read"):
        read_newest(tmp_path, config_of())


# ------------------------------------------------------------------------------------------ chance


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    weight_update=st.sampled_from(KINDS),
    kind=st.sampled_from(["pipeline", "conventional"]),
    group=st.sampled_from([1, 2, 4]),
    micro=st.booleans(),
    slots=st.integers(1, 20),
    longest=st.integers(1, 40),
    max_lag=st.sampled_from([None, 1, 2]),
    on_stale=st.sampled_from(["train", "drop", "requeue"]),
    kills=st.lists(st.tuples(st.integers(0, 1), st.floats(0, 0.02)), max_size=3),
    raises_every=st.sampled_from([0, 5]),
    reference_dies_s=st.none() | st.floats(0, 0.02),
)
def test_the_books_are_right_whatever_dies(
    tmp_path_factory,
    weight_update,
    kind,
    group,
    micro,
    slots,
    longest,
    max_lag,
    on_stale,
    kills,
    raises_every,
    reference_dies_s,
):
    config = config_of(
        kind=kind,
        weight_update=weight_update,
        group=group,
        slots=slots,
        longest=longest,
        max_lag=max_lag,
        on_stale=on_stale,
        train={"engine": {"restarts": 10}, "loss": {"kl_coefficient": 0.0 if reference_dies_s is None else 0.1}},
        **({"micro_batch_size": 4} if micro else {}),
    )
    parts = parts_of(config, task=Letters(raises_every=raises_every))

    class Kills(FakeTrainer):
        async def start(self):
            for engine, delay_s in kills:
                asyncio.get_running_loop().call_later(delay_s, parts.engines[engine].die)
            if parts.reference is not None:
                asyncio.get_running_loop().call_later(reference_dies_s, parts.reference.die)

    parts.trainer = Kills(train_batch_size=8, kl_coefficient=config.train.loss.kl_coefficient)
    out = tmp_path_factory.mktemp("chance") / "run"
    summary = run(config, out, parts)
    check_ledger(out, config, summary)
    if max_lag is not None:
        assert summary.lag.max <= max_lag
