"""A folder has one driver: a second one is refused, a dead one is followed at once, a silent one after a limit."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import multiprocessing.connection
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import held_run
import pytest
from command_line import wait_for
from in_memory import config_of, parts_of, run  # skips without torch
from ledger_check import check_ledger
from refusals import message

from analysis import plot
from backends import owner
from backends.driver.checkpoint import FOLDER, read_newest
from backends.driver.metrics import TENSORBOARD_FOLDER, SamplesLog
from backends.fake import FakeEngine, FakeTrainer
from backends.owner import LIMIT_S, OWNER_FILE, DriverLock, driving, this_process
from pipelinerl.cli import main
from pipelinerl.config.run import load_run
from pipelinerl.errors import ConfigError, RunFailedError
from pipelinerl.records.reports import RunReport

HOST = socket.gethostname()
CONFIG = load_run(held_run.EXAMPLE, held_run.SETS)


@pytest.fixture
def start(out: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `pipelinerl train` into ``out``; see ``held_run``."""
    started = []

    def begin(*arguments: str, **held: Any) -> subprocess.Popen[str]:
        started.append(held_run.start(out, *arguments, **held))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def go(out: Path) -> None:
    Path(f"{out}.go").touch()


def wait_until_it_stands(process: subprocess.Popen[str], out: Path) -> None:
    wait_for(Path(f"{out}.go.stands").exists, process)


def stop(process: subprocess.Popen[str]) -> None:
    """Stop a process, and wait until all of its threads stand still."""
    process.send_signal(signal.SIGSTOP)
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])


def content(out: Path) -> dict[str, bytes]:
    """All files but those of TensorBoard, which have their driver's name."""
    names = {str(path.relative_to(out)): path for path in out.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in names.items() if not name.startswith(TENSORBOARD_FOLDER)}


def check_whole(out: Path, stdout: str) -> None:
    """A finished run, all its checkpoints whole, nothing of a driver left."""
    check_ledger(out, CONFIG, RunReport.from_dict(json.loads(stdout), name="stdout"))
    checkpoints = sorted(path.name for path in (out / FOLDER).iterdir())
    assert checkpoints == ["step_000002", "step_000004", "step_000006"]
    assert not list(out.glob("driver-*"))
    assert read_newest(out, CONFIG).state.version == 6


def refused(process: subprocess.Popen[str], first: subprocess.Popen[str]) -> None:
    """It ends with status 2 and one line that names the driver."""
    stdout, stderr = process.communicate()
    assert (stdout, process.returncode, stderr.count("\n")) == ("", 2, 1), stderr
    assert f": process {first.pid} on {HOST} (since 20" in stderr
    assert "drives it, last sign of life " in stderr


@pytest.mark.slow(seconds=30)
def test_a_second_new_run_is_refused_while_the_first_one_has_written_nothing_yet(out, start):
    first = start(opens=True)
    wait_until_it_stands(first, out)
    assert [path.name for path in out.iterdir()] == ["driver-1"]
    refused(start(), first)
    go(out)
    stdout, stderr = first.communicate()
    assert (first.returncode, stderr) == (0, "")
    check_whole(out, stdout)


@pytest.mark.slow(seconds=30)
def test_resume_is_refused_beside_a_living_driver_even_if_it_stands_still(out, start):
    first = start(save=4)
    wait_until_it_stands(first, out)
    stop(first)
    (lock,) = out.glob("driver-*")
    os.utime(lock, (1.0, 1.0))  # on the same machine it is seen to live, however silent
    before = content(out)
    refused(start("--resume"), first)
    assert content(out) == before
    first.send_signal(signal.SIGCONT)
    go(out)
    stdout, stderr = first.communicate()
    assert (first.returncode, stderr) == (0, "")
    check_whole(out, stdout)


@pytest.mark.slow(seconds=30)
def test_a_killed_driver_is_followed_at_once_in_one_line_and_what_it_left_unfinished_goes(out, start):
    first = start(save=4)
    wait_until_it_stands(first, out)
    first.kill()  # nobody waits for it yet: it stays as a zombie
    stdout, stderr = (second := start("--resume")).communicate()
    assert second.returncode == 0, stderr
    (line,) = stderr.splitlines()
    assert line.startswith(f"{out} is taken over from process {first.pid} on {HOST} (since 20")
    assert line.endswith("): dead")
    check_whole(out, stdout)


@pytest.mark.slow(seconds=30)
def test_a_driver_that_was_replaced_while_it_stood_still_writes_nothing_more_and_ends_in_one_line(out, start):
    """It is stopped inside a checkpoint, which it completes when it goes on; another machine has finished the run."""
    first = start(save=4)
    wait_until_it_stands(first, out)
    stop(first)
    (lock,) = out.glob("driver-*")
    silent_s = LIMIT_S + 1
    os.utime(lock, (time.time() - silent_s, time.time() - silent_s))
    stdout, stderr = (second := start("--resume", first=held_run.ELSEWHERE)).communicate()
    assert second.returncode == 0, stderr
    assert re.search(r": silent for \d+ s$", stderr)
    assert stderr.count("\n") == 1
    check_whole(out, stdout)
    before = content(out)
    go(out)
    first.send_signal(signal.SIGCONT)
    stdout, stderr = first.communicate()
    assert (first.returncode, stdout, stderr.count("\n")) == (1, "", 1), stderr
    assert stderr == f"pipelinerl: {out} has another driver: this one was silent for too long, and ends\n"
    assert content(out) == before


# ------------------------------------------------------------------------------------- in this process


def elsewhere(monkeypatch: pytest.MonkeyPatch, host: str = "elsewhere") -> None:
    """From now on this process is one of another machine."""
    me = this_process()
    monkeypatch.setattr(owner, "this_process", lambda: me._replace(host=host))


def silent(out: Path, seconds: float = LIMIT_S + 1) -> None:
    (path,) = out.glob("driver-*")
    at_s = path.stat().st_mtime - seconds
    os.utime(path, (at_s, at_s))


def test_a_driver_elsewhere_is_replaced_when_it_has_been_silent_for_the_limit_and_not_before(out, monkeypatch, caplog):
    with driving(out) as first:
        elsewhere(monkeypatch)
        for seconds in (0, LIMIT_S / 2):
            silent(out, seconds)
            assert "try again in 120 s" in message(DriverLock, out)
            first.check()
        silent(out)
        with driving(out) as second:
            assert len(caplog.messages) == 1
            with pytest.raises(RunFailedError, match="has another driver"):
                first.check()
            second.check()
    assert not out.exists()


def test_what_a_driver_has_left_that_nobody_can_read_is_replaced_after_the_limit(out):
    (out / "driver-7" / "id" / "checkpoint").mkdir(parents=True)
    (out / "driver-7" / OWNER_FILE).write_text("{")
    message(DriverLock, out)
    os.utime(out / "driver-7", (1.0, 1.0))
    with driving(out) as lock:
        lock.check()
        assert {path.name for path in out.rglob("*")} == {"driver-8", OWNER_FILE, lock.id}
    assert list(out.iterdir()) == []


def test_a_driver_whose_lock_was_removed_does_not_take_that_of_the_next_for_its_own(out, monkeypatch):
    with driving(out) as first:
        shutil.rmtree(out / "driver-1")
        elsewhere(monkeypatch)
        with driving(out) as second:
            with pytest.raises(RunFailedError, match="has another driver"):
                first.check()
            first.close()
            second.check()


@pytest.mark.parametrize("place", ["driver-1/owner.json", "driver-1", "."])
def test_a_file_system_that_fails_for_a_moment_does_not_end_a_driver_and_one_that_forgets_does(out, place):
    """Meanwhile a place is a link to itself, which nobody can follow."""
    with driving(out) as lock:
        path, away = out / place, out.with_name("away")
        path.rename(away)
        path.symlink_to(path.name)
        lock.check()
        path.unlink()
        with pytest.raises(RunFailedError, match="has another driver"):
            lock.check()
        away.rename(path)
        lock.check()


def test_a_driver_that_wakes_too_late_gives_way_and_its_taker_never_does(out, monkeypatch):
    """It wakes between its taker's judgement and the take-over."""
    with driving(out) as first:
        silent(out)
        elsewhere(monkeypatch)
        judged = DriverLock._check_ended

        def and_wakes(lock: DriverLock, last: Path) -> None:
            judged(lock, last)
            first.check()

        monkeypatch.setattr(DriverLock, "_check_ended", and_wakes)
        with driving(out) as second:
            with pytest.raises(RunFailedError, match="has another driver"):
                first.check()
            second.check()
    assert not out.exists()


@pytest.mark.parametrize("ended", [False, True])
def test_a_taker_that_is_late_finds_the_one_before_it_whatever_it_has_seen(out, monkeypatch, ended):
    """It saw a silent driver and no other one; meanwhile another has come, and has ended or not."""
    with driving(out) as first:
        silent(out)
        elsewhere(monkeypatch)
        judged = DriverLock._check_ended
        others: list[DriverLock] = []

        def and_comes(lock: DriverLock, last: Path) -> None:
            judged(lock, last)
            if not others:
                monkeypatch.setattr(DriverLock, "_check_ended", judged)
                others.append(DriverLock(out))
                if ended:
                    others[0].close()

        monkeypatch.setattr(DriverLock, "_check_ended", and_comes)
        if ended:
            DriverLock(out).close()
        else:
            assert "drives it" in message(DriverLock, out)
            others[0].check()
            others[0].close()
        with pytest.raises(RunFailedError, match="has another driver"):
            first.check()


def take(out: Path, begin: Any, all_done: Any, wins: Any) -> None:
    begin.wait()
    try:
        with driving(out):
            wins.put(os.getpid())
            all_done.wait()
    except ConfigError:
        all_done.wait()


@pytest.mark.slow(seconds=5)
def test_of_four_that_take_over_at_the_same_time_one_wins(out):
    """A dead driver's lock, processes of their own, forty times."""
    processes, dead = multiprocessing.get_context("fork"), this_process()._replace(began="0")
    for _ in range(40):
        (out / "driver-3").mkdir(parents=True)
        (out / "driver-3" / OWNER_FILE).write_text(json.dumps(dead._asdict()))
        begin, all_done, wins = processes.Barrier(4), processes.Barrier(4), processes.SimpleQueue()
        takers = [processes.Process(target=take, args=(out, begin, all_done, wins)) for _ in range(4)]
        for one in takers:
            one.start()
        for one in takers:
            one.join()
        assert [one.exitcode for one in takers] == [0] * 4
        assert wins.get() in {one.pid for one in takers}
        assert wins.empty()
        assert list(out.iterdir()) == []
        out.rmdir()


# ------------------------------------------------------------------------------------- files of a replaced driver

STEPS = config_of(
    steps=6, train={"checkpoint": {"every": 2, "keep": 3}, "evaluation": {"problems": 4, "every": 1, "max_tokens": 8}}
)


def replaced(out: Path, monkeypatch: pytest.MonkeyPatch, part: type, method: str, *, call: int = 0) -> bool:
    """Run; return whether it stood still, all of it, while another machine finished it, and changed nothing after that.

    It stands still in such a call of this method once there is a checkpoint: after ``check``, else before.
    """
    calls, before = itertools.count(), dict[str, bytes]()
    called, stood = getattr(part, method), threading.Event()

    def stands_still() -> None:
        if not stood.is_set() and any((out / FOLDER).glob("step_*")) and next(calls) == call:
            stood.set()
            silent(out)
            elsewhere(patch)
            with ThreadPoolExecutor(1) as another:  # while the loop of the first one waits here
                another.submit(run, STEPS, out, parts_of(STEPS), resume=True).result()
            before.update(content(out))

    def and_stands_still(*arguments: Any, **keys: Any) -> Any:
        if called is not DriverLock.check:
            stands_still()
        result = called(*arguments, **keys)
        if called is DriverLock.check:
            stands_still()
        return result

    async def at_once(work: Callable[..., Any], *arguments: Any) -> Any:
        return work(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, "HEARTBEAT_S", 1e6)
        patch.setattr(asyncio, "to_thread", at_once)  # all of it has one thread
        patch.setattr(part, method, and_stands_still)
        ended = ""
        try:
            run(STEPS, out, parts_of(STEPS))
        except RunFailedError as error:
            ended = str(error)
    if stood.is_set():
        assert ended == f"{out} has another driver: this one was silent for too long, and ends"
        assert content(out) == before
    return stood.is_set()


@pytest.mark.parametrize(
    ("part", "method"),
    [
        *((FakeTrainer, method) for method in ("train", "snapshot", "save", "export")),
        *((SamplesLog, method) for method in ("trained", "evaluated")),
        (FakeEngine, "update"),
    ],
)
def test_a_driver_that_is_replaced_changes_no_file_any_more_wherever_it_stood_still(out, monkeypatch, part, method):
    assert replaced(out, monkeypatch, part, method)


def test_not_even_if_it_is_replaced_right_after_a_look(tmp_path, monkeypatch):
    calls = itertools.count()
    while replaced(tmp_path / "run", monkeypatch, DriverLock, "check", call=next(calls)):
        shutil.rmtree(tmp_path / "run")
    assert next(calls) > 5  # two steps, a checkpoint, the model, the end


def test_a_checkpoint_with_the_scheduler_of_one_driver_and_the_weights_of_another_is_refused(out, tmp_path):
    """As two drivers wrote it into one folder: the manifest fits every file."""
    for folder in (out, tmp_path / "other"):
        run(STEPS, folder, parts_of(STEPS))
    newest = out / FOLDER / "step_000006"
    state = (tmp_path / "other" / FOLDER / newest.name / "run.pickle").read_bytes()
    (newest / "run.pickle").write_bytes(state)
    manifest = json.loads((newest / "manifest.json").read_text())
    manifest["files"]["run.pickle"] = hashlib.sha256(state).hexdigest()
    (newest / "manifest.json").write_text(json.dumps(manifest))
    assert read_newest(out, STEPS).state.version == 4


# ------------------------------------------------------------------------------------- many pairs


def one_of_a_pair(out: Path, arguments: list[str], begin: Any) -> None:
    """Run the command line in this forked process, with its output in files; the one that drives stands still."""
    warnings.simplefilter("ignore")
    for stream, descriptor in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{out}.{os.getpid()}.{stream}", os.O_CREAT | os.O_WRONLY), descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    held_run.installed(go=f"{out}.go", opens=True)
    plot.draw = lambda _: []
    sys.argv = ["pipelinerl", *held_run.command(out, *arguments)]
    begin.wait()
    main()


@pytest.mark.slow(seconds=120)
@pytest.mark.parametrize("arguments", [[], ["--resume"]], ids=str)
def test_of_twenty_pairs_of_drivers_started_at_once_one_runs_and_the_other_ends_in_one_line(tmp_path, arguments):
    """Whoever drives waits until the other one has ended. Those that resume find a run that was killed."""
    processes = multiprocessing.get_context("fork")
    killed = tmp_path / "killed"
    if arguments:
        process = held_run.start(killed, save=4)
        wait_until_it_stands(process, killed)
        process.kill()
        process.communicate()
    for number in range(20):
        out, begin = tmp_path / str(number), processes.Barrier(2)
        if arguments:
            shutil.copytree(killed, out)
        pair = [processes.Process(target=one_of_a_pair, args=(out, arguments, begin)) for _ in range(2)]
        for one in pair:
            one.start()
        multiprocessing.connection.wait([one.sentinel for one in pair])
        go(out)
        for one in pair:
            one.join()
        (runs,), (other,) = ([one for one in pair if one.exitcode == status] for status in (0, 2))
        said = {one: [Path(f"{out}.{one.pid}.{stream}").read_text() for stream in ("out", "err")] for one in pair}
        assert said[other][0] == ""
        assert said[other][1].count("\n") == 1
        assert " drives it, last sign of life " in said[other][1]
        check_whole(out, said[runs][0])
