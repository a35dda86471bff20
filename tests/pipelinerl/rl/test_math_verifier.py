"""Processes that verify answers: none hangs, none is lost, none is left behind."""

import gc
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from time import sleep

import pytest

from pipelinerl.rl import tasks as mathtask
from pipelinerl.rl.tasks import Verifiers

ROOT = Path(__file__).parents[3]

MATH_VERIFY = """
import itertools, os, signal

def parse(text, parsing_timeout):
    return [] if text == "unreadable" else [text]

def verify(gold, found, timeout_seconds):
    print("not for the caller")
    match found[0]:
        case "hang":
            open(f"{__file__}.{os.getpid()}", "w").close()
            sum(itertools.repeat(0))  # never ends, holds the lock, heeds no alarm
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise ZeroDivisionError("by zero")
    return gold == found
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the child processes import as math_verify."""
    path = tmp_path / "math_verify.py"
    path.write_text(MATH_VERIFY, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(mathtask, "VERIFY_LIMIT_S", 60.0)
    return path


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def hung(stand_in: Path) -> set[int]:
    """Ids of the processes that hang, or did."""
    return {int(path.suffix[1:]) for path in stand_in.parent.glob("math_verify.py.*")}


@pytest.mark.slow
def test_a_hanging_process_is_killed_and_no_other_answer_is_lost(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other answers are verified while two hang; only these two have a short limit."""
    monkeypatch.setattr(mathtask, "MAX_PROCESSES", 3)
    monkeypatch.setattr(mathtask, "VERIFY_LIMIT_S", 6.0)
    verifiers = Verifiers()
    answers = [*"1212", *"12" * 20]
    with ThreadPoolExecutor(8) as threads:
        hanging = [threads.submit(verifiers.verify, "1", "hang") for _ in range(2)]
        while len(hung(stand_in)) < 2 and not all(one.done() for one in hanging):
            sleep(0.01)
        monkeypatch.setattr(mathtask, "VERIFY_LIMIT_S", 60.0)
        verdicts = list(threads.map(verifiers.verify, repeat("1"), answers))
        assert verdicts == [answer == "1" for answer in answers]
        assert [one.result() for one in hanging] == [False, False]
        assert len(hung(stand_in)) == 2
        assert all(gone(pid) for pid in hung(stand_in))
        assert all(threads.map(verifiers.verify, repeat("1"), "1" * 8))
    pids = verifiers.pids
    assert 1 <= len(pids) <= 3
    del verifiers, threads
    gc.collect()
    assert all(gone(pid) for pid in pids)


def test_a_process_that_somebody_killed_costs_no_answer(stand_in: Path) -> None:
    verifiers = Verifiers()
    assert verifiers.verify("1", "1") is True
    (pid,) = verifiers.pids
    os.kill(pid, signal.SIGINT)
    assert verifiers.verify("1", "x" * 200_000) is False  # more than a pipe holds
    assert verifiers.pids == {pid}
    os.kill(pid, signal.SIGKILL)
    assert verifiers.verify("1", "1") is True
    assert len(verifiers.pids - {pid}) == 1


def test_an_answer_that_ends_two_processes_is_wrong(stand_in: Path) -> None:
    assert Verifiers().verify("1", "die") is False


def test_an_error_of_math_verify_is_reported(stand_in: Path) -> None:
    verifiers = Verifiers()
    assert verifiers.verify("unreadable", "1") is None
    with pytest.raises(RuntimeError, match="math-verify: ZeroDivisionError: by zero"):
        verifiers.verify("1", "raise")
    assert verifiers.verify("1", "1") is True


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("raise SystemExit(1)", "a process for math-verify ended at its start"),
        ("import time; time.sleep(60)", "a process for math-verify was not ready after 0.5 s"),
        (MATH_VERIFY + "verify = lambda *_, **__: False", "math-verify must find that 1 is equal to 1"),
    ],
)
def test_math_verify_that_cannot_be_started_is_an_error(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch, program: str, message: str
) -> None:
    stand_in.write_text(program, encoding="utf-8")
    monkeypatch.setattr(mathtask, "START_LIMIT_S", 0.5 if "sleep" in program else 60.0)
    verifiers = Verifiers()
    with pytest.raises(RuntimeError, match=message):
        verifiers.verify("1", "1")
    assert not verifiers.pids


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last_words", "status"),
    [
        ("", 0),
        ("raise SystemExit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("Thread(target=hang, daemon=True).start(); sleep(0.5)", 0),
        ("Thread(target=hang, daemon=True).start(); sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_no_process_outlives_its_caller(stand_in: Path, last_words: str, status: int) -> None:
    program = f"""
import os, signal, sys
from threading import Thread
from time import sleep
sys.path.insert(0, {str(stand_in.parent)!r})
from pipelinerl.rl import tasks as mathtask
verifiers = mathtask.Verifiers()
hang = lambda: verifiers.verify("1", "hang")
print(verifiers.verify("1", "1"), flush=True)
mathtask.VERIFY_LIMIT_S = 1.0
{last_words}
"""
    ended = subprocess.run(  # returns when nobody is left to write to the pipe of the errors
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT, timeout=600
    )
    assert (ended.returncode, ended.stdout) == (status, "True\n")
    assert "Traceback" not in ended.stderr
