"""Verify answers with math-verify, in child processes that can be killed.

math-verify evaluates an answer. For ``9^{9^{9^{9}}}`` this never ends and may hold the interpreter's lock, so a
thread that did it could stop the whole run. Limits, in the order in which they act:

limit                                   kept by                                 then the child process
──────────────────────────────────────  ──────────────────────────────────────  ─────────────────────────
a third of ``VERIFY_LIMIT_S``, a step   math-verify's alarm                     goes on with the next
``VERIFY_LIMIT_S``                      the caller                              is killed
``VERIFY_LIMIT_S`` and 1 s, processor   the kernel, also without a caller       ends

Each child process serves one answer at a time, so killing one touches no other answer. A child also ends when its
standard input closes: none outlives the process that started it, however that ended, by more than the last limit.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable
from multiprocessing.connection import wait

VERIFY_LIMIT_S = 10.0
"""Longest verification of one answer (s)."""
START_LIMIT_S = 60.0
"""Longest start of a child process (s)."""
MAX_PROCESSES = min(4, os.cpu_count() or 1)
"""Answers verified at a time (count)."""


class Verifiers:
    """Verifies answers in child processes, which are started when they are needed. Any thread may call it.

    The child processes end with this object. A pickled copy has none.
    """

    def __init__(self) -> None:
        self._free = threading.BoundedSemaphore(MAX_PROCESSES)
        self._idle: list[_Child] = []  # each operation on these two is atomic
        self._children: set[_Child] = set()
        weakref.finalize(self, _end, self._children)  # also runs when the interpreter ends

    def __reduce__(self) -> tuple[type[Verifiers], tuple[()]]:
        return Verifiers, ()

    @property
    def pids(self) -> set[int]:
        """Process ids of the child processes."""
        return {child.pid for child in list(self._children)}

    def verify(self, expected: str, answer: str) -> bool | None:
        """Return whether an answer equals the expected one. One that takes too long does not.

        Neither does one that a child process does not survive, in a second try with a new process.

        Args:
            expected: A text with the expected expression, marked as mathematics.
            answer: A text with an expression.

        Returns:
            None: The expected answer cannot be read.

        Raises:
            RuntimeError: If math-verify raised an error, or no process of it can be started.
        """
        with self._free:
            try:
                try:
                    return self._ask(self._idle_child() or self._new_child(), expected, answer)
                except EOFError:  # it may have been killed long before this answer
                    return self._ask(self._new_child(), expected, answer)
            except (TimeoutError, EOFError):
                return False

    def _idle_child(self) -> _Child | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _new_child(self) -> _Child:
        """Start a child process and let it verify one answer, so that it loads math-verify."""
        child = _Child()
        self._children.add(child)
        try:
            verdict = child.ask("$1$", "$1$", limit_s=START_LIMIT_S)
        except BaseException as error:
            self._discard(child)
            if isinstance(error, TimeoutError):
                raise RuntimeError(f"a process for math-verify was not ready after {START_LIMIT_S:g} s") from error
            if isinstance(error, EOFError):
                raise RuntimeError("a process for math-verify ended at its start; see its error above") from error
            raise
        if verdict is not True:
            self._discard(child)
            raise RuntimeError("math-verify must find that 1 is equal to 1")
        return child

    def _ask(self, child: _Child, expected: str, answer: str) -> bool | None:
        try:
            verdict = child.ask(expected, answer, limit_s=VERIFY_LIMIT_S)
        except BaseException:  # its next reply may belong to this request
            self._discard(child)
            raise
        self._idle.append(child)
        return verdict

    def _discard(self, child: _Child) -> None:
        child.end()
        self._children.discard(child)


class _Child:
    """A child process; requests and replies are lines of JSON."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-m", "pipelinerl.rl.math_verifier"],  # not the caller's main
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
            process_group=0,  # so that Ctrl-C reaches only the caller
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, expected: str, answer: str, *, limit_s: float) -> bool | None:
        """Return the child's verdict.

        Raises:
            TimeoutError: If it takes too long.
            EOFError: If the child has ended.
            RuntimeError: If math-verify raised an error.
        """
        try:
            self._requests.write(json.dumps([expected, answer, limit_s]).encode() + b"\n")
            self._requests.flush()
        except BrokenPipeError as error:
            raise EOFError from error
        if not wait([self._replies.fileno()], limit_s):
            raise TimeoutError
        line = self._replies.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(f"math-verify: {reply['error']}")
        verdict: bool | None = reply["verdict"]
        return verdict

    def end(self) -> None:
        """Kill the process, and wait until it has gone."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):  # a request that it did not read
            self._requests.close()
        self._replies.close()
        self._process.wait()


def _end(children: Iterable[_Child]) -> None:
    for child in list(children):
        child.end()


def _serve() -> None:
    """Answer requests on standard input until it closes: the main function of a child process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process even if it holds the lock
    logging.disable()
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # prints of libraries do not reach the pipe
    for line in sys.stdin.buffer:
        expected, answer, limit_s = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, limit_s + 1)
        reply: dict[str, bool | str | None]
        try:
            reply = {"verdict": _verdict(expected, answer, step_s=max(1, int(limit_s / 3)))}
        except Exception as error:  # the caller raises it
            reply = {"error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(json.dumps(reply).encode() + b"\n")


def _verdict(expected: str, answer: str, *, step_s: int) -> bool | None:
    """Return whether an answer equals the expected one; None if that cannot be read."""
    from math_verify import parse, verify  # only child processes load it, at their first answer

    gold = parse(expected, parsing_timeout=step_s)
    if not gold:
        return None
    found = parse(answer, parsing_timeout=step_s)
    return bool(verify(gold, found, timeout_seconds=step_s))


if __name__ == "__main__":
    _serve()
