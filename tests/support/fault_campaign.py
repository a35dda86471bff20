"""One seed of the fault campaign: a run with its faults, resumed until it is done, and all that must hold of it."""

from __future__ import annotations

import json
import shutil
from itertools import chain
from pathlib import Path

from fault_schedules import Case, Kind, draw
from in_memory import Letters
from ledger_check import check_ledger, records
from simulated_run import SuddenEnd, World, simulated

from backends.driver.checkpoint import FOLDER, read_newest
from backends.interface import PUBLICATIONS
from backends.owner import driving
from backends.run import drive
from pipelinerl.errors import (
    ConfigError,
    EngineLostError,
    PipelineRLError,
    ReferenceLostError,
    RunFailedError,
    RunInterruptedError,
    TrainerLostError,
    TransferError,
)
from pipelinerl.records.recording import replay_run
from pipelinerl.records.run_folder import SUMMARY_FILE, TRACE_FILE
from pipelinerl.records.trace import Trace
from pipelinerl.scheduler.events import (
    AbortRollout,
    RolloutAborted,
    RolloutFailed,
    RolloutFinished,
    StartRollout,
    StartTraining,
    TurnFinished,
)


def run_seed(seed: int, folder: Path) -> World:
    """Run a seed in a new folder; ``AssertionError`` if something does not hold."""
    return run_case(draw(seed), folder)


def run_case(case: Case, folder: Path) -> World:
    out = folder / "run"
    world = World(case, out)
    with simulated(world):
        check_done(world, until_done(world))
        if case.more_steps:
            longer = {"optimizer_steps": case.config.optimizer_steps + case.more_steps}
            world.config = case.config.model_copy(update=longer)
            world.attempt()
            check_done(world, until_done(world))
    return world


def check_done(world: World, summary) -> None:
    """What must hold of the folder of a run that is done."""
    made = list(chain(*world.made))
    assert len(set(made)) == len(made), "a rollout is trained on twice"
    check_ledger(world.out, world.config, summary)
    check_trace(world)
    steps, out = world.config.optimizer_steps, world.out
    assert json.loads((out / "model" / "fake.json").read_text()) == {"version": steps}
    checkpoints = sorted(one.name for one in (out / FOLDER).iterdir())
    assert len(checkpoints) <= world.config.train_table.checkpoint.keep
    assert checkpoints[-1] == f"step_{steps:06d}"
    assert not list(out.glob("driver-*"))
    if world.config.train_table.evaluation.problems:
        assert summary.evaluation.success_after is not None
    costs = {Kind.REFUSED, Kind.REWARD_RAISES, Kind.REWARD_HANGS, Kind.ENVIRONMENT_DIES}
    if not any(one.kind in costs for one in world.case.faults) and world.config.environment is None:
        assert summary.rollouts.failed == 0, "a rollout fails without a fault of its own"


def until_done(world: World):
    for _ in range(len(world.case.faults) + 1):
        summary = attempt(world)
        if summary is not None:
            return summary
        world.attempt()
    raise AssertionError("more attempts than faults")


def attempt(world: World):
    """Run, or go on; return the summary if the run is done."""
    resume, summary = any((world.out / FOLDER).glob("step_*")), None
    if not resume and world.out.exists():
        assert world.kept is None, "a checkpoint is gone"
        shutil.rmtree(world.out)  # nothing to go on from
    config, task = world.config, Letters() if world.config.environment is None else None
    try:
        with driving(world.out) as lock:
            checkpoint = read_newest(world.out, config) if resume else None
            summary = drive(config, parts=world.parts(), task=task, lock=lock, checkpoint=checkpoint)
    except SuddenEnd:
        pass
    except KeyboardInterrupt:
        if not world.gone:
            world.log.append(f"{world.now_s:.3f} ends: at once")
            return None
    except PipelineRLError as error:
        if not world.gone:
            world.log.append(f"{world.now_s:.3f} ends: {type(error).__name__} {error}")
            check_end(world, error)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}") from error
    assert not world.broken, world.broken
    if world.gone:
        world.log.append(f"{world.now_s:.3f} gone")
        left_behind(world)
        return None
    assert not world.leaked, world.leaked
    assert all(one._lost for one in world.engines), "an engine is left over"
    if summary is None and not world.disk_full and (world.out / SUMMARY_FILE).exists():
        again = replay_run(Trace(world.out / TRACE_FILE))
        begun = again.num_events or again.num_commands  # else it ended before its scheduler began
        assert not begun or (again.difference, again.compared) == (None, ("summary.json", "steps.csv")), again
    return summary


def left_behind(world: World) -> None:
    """Have the files that a process left that is gone, as its machine finds them."""
    shutil.rmtree(world.out, ignore_errors=True)
    left = world.out.with_suffix(".left")
    left.rename(world.out)
    for owned in world.out.glob("driver-*"):
        shutil.rmtree(owned)
    world.kept = world.kept_then


def check_end(world: World, error: PipelineRLError) -> None:
    """An end in a line is allowed after its fault only."""
    fired, restarts = world.fired, world.config.train_table.trainer.restarts
    assert "\n" not in str(error)
    match error:
        case RunInterruptedError():
            assert fired[Kind.CTRL_C]
            assert str(error).startswith("interrupted before") or world.kept == world.trainer.version, "steps are lost"
            assert world.now_s - world.pressed_s <= longest_end_s(world), "Ctrl-C waits"
        case TrainerLostError():
            assert fired[Kind.LOSE_TRAINER]
            assert world.kept is None or fired[Kind.LOSE_TRAINER] > restarts
        case EngineLostError():
            most = world.config.train_table.engine.restarts_per_hour * len(world.engines)
            changed = fired[Kind.ADD] or fired[Kind.DRAIN]  # others have not joined yet, or have left
            none_starts = world.no_starts and (changed or len(world.no_starts) == len(world.engines))
            assert none_starts or world.num_hit > most
        case ReferenceLostError():
            assert fired[Kind.LOSE_REFERENCE] >= 2
        case TransferError():
            assert fired[Kind.DAMAGED]
            assert sum(one.number for one in world.case.faults if one.kind is Kind.DAMAGED) >= PUBLICATIONS
        case RunFailedError() | ConfigError() if "No space left on device" in str(error):
            assert world.disk_full
        case RunFailedError() if str(error).startswith("interrupted after the last"):
            assert fired[Kind.CTRL_C]
        case _:
            raise AssertionError(f"no fault explains {type(error).__name__}: {error}") from error


def longest_end_s(world: World) -> float:
    """Seconds from Ctrl-C to the end: calls of the trainer, two checkpoints, the memory handed over; no engine."""
    calls = {"train": 1, "publish": 1, "snapshot": 2, "save": 6, "export": 1, "sleep": 2, "shutdown": 2}
    return 3.0 * sum(number * world.case.mean_s[call] for call, number in calls.items())


def check_trace(world: World) -> None:
    """What a whole trace must say, beside ``check_ledger``."""
    running: dict[int, tuple[int, int]] = {}  # rollout -> engine, version published at its start
    aborting: dict[int, float] = {}
    batches: list[tuple[int, ...]] = [()]
    slots = world.config.scheduler.generation_batch_size
    for row in records(world.out):
        match row.event or row.command:
            case StartRollout(rollout_id=rollout_id, engine=engine):
                assert rollout_id not in running
                running[rollout_id] = engine, row.line
                assert sum(one == engine for one, _ in running.values()) <= slots
            case RolloutFinished() | TurnFinished() | RolloutAborted() | RolloutFailed() as event:
                if event.engine is not None:
                    assert running.pop(event.rollout_id)[0] == event.engine
                if isinstance(event, RolloutFinished):
                    began_s = aborting.get(event.rollout_id, row.time_s)
                    assert began_s == row.time_s or event.rollout_id in world.aborts, "an abort is forgotten"
                    spans = event.spans
                    starts = (0, *spans.ends[:-1])
                    pieces = zip(spans.versions, starts, spans.ends, strict=True)
                    versions = list(chain(*([version] * (end - start) for version, start, end in pieces)))
                    assert world.versions.get(event.rollout_id, versions) == versions or (
                        event.rollout_id not in set(chain(*world.made))
                    )
            case AbortRollout(rollout_id=rollout_id):
                assert rollout_id in running
                aborting[rollout_id] = row.time_s
            case StartTraining(rollout_ids=rollout_ids, completes_step=completes_step):
                batches[-1] += rollout_ids
                if completes_step:
                    batches.append(())
    assert batches.pop() == ()
    assert world.made == batches, "the trainer has made other steps than recorded"
