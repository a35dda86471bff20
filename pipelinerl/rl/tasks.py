"""Tasks of a run file: mathematics from a file, a user's own, and sums that a model of 80,000 parameters can do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping
from inspect import iscoroutinefunction
from multiprocessing.connection import wait
from numbers import Integral
from operator import add, mul, sub
from pathlib import Path
from typing import Any, cast

from pipelinerl.errors import ConfigError, install
from pipelinerl.rl.config import TaskConfig
from pipelinerl.rl.environments import Environment, Observation, Turn
from pipelinerl.rl.problems import Problem, Task, shuffled
from pipelinerl.util.arrays import check
from pipelinerl.util.read import parse_json, read_lines
from pipelinerl.util.user_code import first_line, kind_and_line, named_attribute

# math-verify in child processes that can be killed.
#
# math-verify evaluates an answer. For ``9^{9^{9^{9}}}`` this never ends and may hold the interpreter's lock, so a
# thread that did it could stop the whole run. Limits, in the order in which they act:
#
# limit                                   kept by                                 then the child process
# ──────────────────────────────────────  ──────────────────────────────────────  ─────────────────────────
# a third of ``VERIFY_LIMIT_S``, a step   math-verify's alarm                     goes on with the next
# ``VERIFY_LIMIT_S``                      the caller                              is killed
# ``VERIFY_LIMIT_S`` and 1 s, processor   the kernel, also without a caller       ends
#
# Each child process serves one answer at a time, so killing one touches no other answer. A child also ends when its
# standard input closes: none outlives the process that started it, however that ended, by more than the last limit.

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
        """Return whether an answer equals the expected one, texts with an expression; None: the latter is unreadable.

        False also if it takes too long, or ends two child processes, the second a new one. Raises RuntimeError if
        math-verify raised an error, or none of its processes can be started.
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
            [sys.executable, "-P", "-W", "ignore", "-m", "pipelinerl.rl.tasks"],  # not the caller's main
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
        """Return the verdict; TimeoutError, EOFError if the child has ended, RuntimeError if math-verify raised one."""
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
    from math_verify import parse, verify  # only child processes load it, at their first answer

    gold = parse(expected, parsing_timeout=step_s)
    if not gold:
        return None
    found = parse(answer, parsing_timeout=step_s)
    return bool(verify(gold, found, timeout_seconds=step_s))


if __name__ == "__main__":
    _serve()


BUILT_IN = "arithmetic, chain, math or package.module:attribute"
ENVIRONMENTS = "calculator or package.module:attribute"


class Math:
    """Questions and answers from a file; an answer is right if math-verify finds it equal to the expected one.

    math-verify runs in child processes, which end with the task. An answer that takes longer than ``VERIFY_LIMIT_S``,
    such as ``9^{9^{9^{9}}}``, is wrong: its process is killed, and no other answer is lost. On two slow shared cores
    a reward takes 0.4 to 3 ms for numbers and fractions, 0.6 s for the first one of each process.
    """

    def __init__(
        self,
        *,
        path: str,
        prompt_key: str = "problem",
        answer_key: str = "answer",
        template: str = "{problem}",
        split: str = "train",
        held_out_path: str | None = None,
        held_out_split: str = "test",
        held_out_share: float = 0.1,
        seed: int = 0,
    ) -> None:
        """Read the problems.

        Args:
            path: A JSONL file (``.jsonl``), a folder written by ``datasets`` (``save_to_disk``), or anything else
                that ``datasets.load_dataset`` accepts.
            prompt_key: Key or column of the question.
            answer_key: Key or column of the expected answer: an expression, or a text that ends in one.
            template: The prompt; ``{problem}`` stands for the question.
            split: Split to train on, where ``path`` has several.
            held_out_path: Where the held-out problems are. None: a share of ``path`` is held out. Questions that
                are also in ``path`` are not trained on.
            held_out_split: Split of ``held_out_path``.
            held_out_share: Share of the problems that is held out (in [0, 1)); without ``held_out_path`` only.
            seed: Shuffles the training problems, and decides which are held out.

        Raises:
            ConfigError: If a file is missing or broken, no problem is left to train on, a setting is out of range,
                or ``datasets`` or ``math-verify`` is not installed.
        """
        if "{problem}" not in template:
            raise ConfigError(f"train.task.settings.template must contain {{problem}}, got {template!r}")
        if not 0 <= held_out_share < 1:
            raise ConfigError(f"train.task.settings.held_out_share must be in [0, 1), got {held_out_share!r}")
        try:
            import math_verify  # noqa: F401 - the child processes use it
        except ImportError as error:
            raise _not_installed("math-verify", setting="name", value="math") from error
        self._verifiers = Verifiers()

        def problems(setting: str, where: str, part: str) -> list[Problem]:
            rows = _rows(setting, where, part)
            pairs = [_question(row, place, keys=(prompt_key, answer_key)) for place, row in rows]
            return [Problem(prompt=template.replace("{problem}", text), expected=answer) for text, answer in pairs]

        found = problems("path", path, split)
        order = [found[shuffled(place, count=len(found), seed=seed)] for place in range(len(found))]
        if held_out_path is None:
            size = int(held_out_share * len(order))
            self._held_out, rest = order[:size], order[size:]
        else:
            self._held_out, rest = problems("held_out_path", held_out_path, held_out_split), order
        known = {problem.prompt for problem in self._held_out}
        self._training = [problem for problem in rest if problem.prompt not in known]
        if not self._training:
            raise ConfigError(f"train.task.settings.path must have problems that are not held out, got {path!r}")
        self.num_held_out, self.num_training = len(self._held_out), len(self._training)

    def problem(self, index: int, *, held_out: bool) -> Problem:
        """Return the problem of an index (``problems``); ValueError if a held-out one is requested and none exists."""
        problems = self._held_out if held_out else self._training
        if not problems:
            raise ValueError("no problem is held out")
        return problems[index % len(problems)]

    def reward(self, problem: Problem, answer: str) -> float:
        """Return 1 if the answer equals the expected one, else 0, also if it cannot be read, or verified in time.

        Raises:
            ValueError: If the expected answer cannot be read.
            RuntimeError: If math-verify raised an error, or cannot be started.
        """
        plain = not any(mark in problem.expected for mark in ("$", "\\boxed", "\\(", "\\["))
        equal = self._verifiers.verify(f"${problem.expected}$" if plain else problem.expected, answer)
        if equal is None:
            raise ValueError(f"the expected answer must be an expression, got {problem.expected!r}")
        return float(equal)


# Sums of two numbers, a digit added again and again, and the environment of a calculator.


class _Listed:
    """A finite list of problems, shuffled by a seed; every tenth is held out."""

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._seed = seed
        self.num_held_out = count // 10
        self.num_training = count - self.num_held_out

    def _number(self, index: int, *, held_out: bool) -> int:
        """Return the problem of an index, in [0, count)."""
        place = index % self.num_held_out if held_out else self.num_held_out + index % self.num_training
        return shuffled(place, count=self._count, seed=self._seed)


_OPERATORS = {"+": add, "-": sub, "*": mul}


class Arithmetic(_Listed):
    """Sums, differences and products of two whole numbers: ``12+7=``, answered by ``19`` and nothing else.

    All ``len(operators) * (largest_operand + 1)**2`` problems are shuffled by ``seed``; every tenth is held out.
    ``7+12`` and ``12+7`` are two problems.
    """

    def __init__(self, *, largest_operand: int = 49, operators: str = "+", seed: int = 0) -> None:
        """Check the settings.

        Args:
            largest_operand: Operands are 0 to this, both included (no unit).
            operators: Some of ``+``, ``-`` and ``*``, each at most once.
            seed: Shuffles the problems, and so decides which are held out.

        Raises:
            ValueError: If there are fewer than 10 problems, or an operator is unknown, repeated or missing.
            TypeError: If a setting is of another type.
        """
        check_whole(largest_operand=largest_operand, seed=seed)
        check(largest_operand >= 3, "largest_operand must be at least 3", largest_operand)
        known = isinstance(operators, str) and operators and set(operators) <= _OPERATORS.keys()
        check(bool(known), "operators must be some of '+-*'", repr(operators))
        check(len(set(operators)) == len(operators), "operators must not repeat", repr(operators))
        self._operands = largest_operand + 1
        self._operators = operators
        super().__init__(len(operators) * self._operands**2, seed)

    def problem(self, index: int, *, held_out: bool) -> Problem:
        """Return the problem of an index; see ``pipelinerl/rl/problems.py``."""
        pair, operator = divmod(self._number(index, held_out=held_out), len(self._operators))
        left, right = divmod(pair, self._operands)
        sign = self._operators[operator]
        return Problem(prompt=f"{left}{sign}{right}=", expected=str(_OPERATORS[sign](left, right)))

    def reward(self, problem: Problem, answer: str) -> float:
        """Return 1 if the answer is the number, in its shortest form, up to surrounding space; else 0."""
        return float(answer.strip() == problem.expected)

    def worked_answer(self, problem: Problem) -> str:
        """Return the text of a right answer."""
        return str(problem.expected)


COUNTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOP"
"""Names of the steps, the last one first: one character each."""


class Chain(_Listed):
    """A digit added again and again, modulo 10, step by step: ``c7+5=`` is answered by ``c2b7a2``.

    The prompt names the first step, the digit to begin with and the digit to add; the answer names every step, the
    last one being ``a``. Only the result after ``a`` is judged, so the steps before it are the model's own reasoning:
    ``2 n`` tokens for n steps, if each character is a token.
    """

    def __init__(self, *, fewest_steps: int = 15, most_steps: int = len(COUNTERS), seed: int = 0) -> None:
        """Check the settings: steps of the shortest and of the longest problem; ``seed`` decides which are held out.

        Raises:
            ValueError: If the numbers of steps are not in order from 1 to 42.
            TypeError: If a setting is of another type.
        """
        check_whole(fewest_steps=fewest_steps, most_steps=most_steps, seed=seed)
        rule = f"fewest_steps and most_steps must be 1 to {len(COUNTERS)}, in order"
        check(1 <= fewest_steps <= most_steps <= len(COUNTERS), rule, f"{fewest_steps}, {most_steps}")
        self._fewest_steps = fewest_steps
        super().__init__(100 * (most_steps - fewest_steps + 1), seed)

    def problem(self, index: int, *, held_out: bool) -> Problem:
        """Return the problem of an index; see ``pipelinerl/rl/problems.py``."""
        steps, digits = divmod(self._number(index, held_out=held_out), 100)
        steps += self._fewest_steps
        start, added = divmod(digits, 10)
        return Problem(f"{COUNTERS[steps - 1]}{start}+{added}=", expected=f"a{(start + steps * added) % 10}")

    def reward(self, problem: Problem, answer: str) -> float:
        """Return 1 if the answer ends in the result of step ``a``, up to surrounding space; else 0."""
        return float(answer.strip().endswith(problem.expected))

    def worked_answer(self, problem: Problem) -> str:
        """Return the text of a right answer, all steps written out."""
        steps, start, added = COUNTERS.index(problem.prompt[0]) + 1, int(problem.prompt[1]), int(problem.prompt[3])
        return "".join(f"{COUNTERS[steps - step]}{(start + step * added) % 10}" for step in range(1, steps + 1))


def check_whole(**settings: object) -> None:
    """Raise TypeError if a setting is not a whole number."""
    for name, value in settings.items():
        if type(value) is not int:
            raise TypeError(f"{name} must be a whole number, got {value!r}")


# The environment of a calculator for two numbers at a time.

_CALL = re.compile(r"(\d{1,6})\+(\d{1,6})", re.ASCII)


class Calculator(_Listed):
    """Sums of some numbers, ``7+12+30=``, by a calculator that adds two of them.

    A turn ``7+12`` is answered by ``19,``. A turn ``=49`` is the result: it ends the episode, with reward 1 if it is
    right, else 0. Anything else is answered by ``?``. So n numbers take n turns.
    """

    def __init__(
        self, *, fewest: int = 2, most: int = 4, largest: int = 29, delay_s: float = 0.0, seed: int = 0
    ) -> None:
        """Check the settings.

        Args:
            fewest: Numbers of the shortest sum (count).
            most: Numbers of the longest sum, 2 to 8 (count).
            largest: The largest number, 9 to 999 (no unit).
            delay_s: Time in which the calculator answers (s).
            seed: Decides the sums.

        Raises:
            ValueError: If a setting is out of range.
            TypeError: If a setting is of another type.
        """
        check_whole(fewest=fewest, most=most, largest=largest, seed=seed)
        check(2 <= fewest <= most <= 8, "fewest and most must be 2 to 8, in order", f"{fewest}, {most}")
        check(9 <= largest <= 999, "largest must be 9 to 999", largest)
        check(0 <= delay_s < math.inf, "delay_s must be at least 0", delay_s)
        self._fewest, self._numbers, self._delay_s = fewest, largest + 1, delay_s
        self._terms: tuple[int, ...] = ()
        super().__init__((most - fewest + 1) * self._numbers**2, seed)  # of every length as many as sums of two

    def terms(self, index: int, *, held_out: bool) -> tuple[int, ...]:
        """Return the numbers of the sum of an index."""
        longer, pair = divmod(self._number(index, held_out=held_out), self._numbers**2)
        first = divmod(pair, self._numbers)
        rest = (
            shuffled(pair, count=self._numbers**2, seed=self._seed + 1 + one)
            for one in range(longer + self._fewest - 2)
        )
        return (*first, *(one % self._numbers for one in rest))

    def worked_episode(self, index: int) -> list[tuple[str, bool]]:
        """Return a right episode of a training sum: texts in their order, and whether each is the model's."""
        terms = self.terms(index, held_out=False)
        total, texts = terms[0], [("+".join(map(str, terms)) + "=", False)]
        for term in terms[1:]:
            texts += [(f"{total}+{term}", True), (f"{total + term},", False)]
            total += term
        return [*texts, (f"={total}", True)]

    async def reset(self, index: int, *, held_out: bool) -> str:
        """Return the sum."""
        self._terms = self.terms(index, held_out=held_out)
        return "+".join(map(str, self._terms)) + "="

    async def step(self, turn: Turn) -> Observation:
        """Answer a call, or judge a result."""
        await asyncio.sleep(self._delay_s)
        if turn.text.startswith("="):
            return Observation(reward=float(turn.text == f"={sum(self._terms)}"), done=True)
        call = _CALL.fullmatch(turn.text)
        return Observation("?" if call is None else f"{int(call[1]) + int(call[2])},")

    async def close(self) -> None:
        """Nothing is held."""


# Tasks and environments by the name in a run file.


def load_task(config: TaskConfig) -> Task:
    """Return the built-in task that ``train.task`` names, or the result of the user's class or function.

    Raises ConfigError, one line, if the name is no task's, it cannot be imported, or its settings are wrong.
    """
    known = {"arithmetic": Arithmetic, "chain": Chain, "math": Math}
    task = _made(known, config, allowed=BUILT_IN)
    if not (callable(getattr(task, "problem", None)) and callable(getattr(task, "reward", None))):
        turns = "; one with reset and step needs the table [environment]" if hasattr(task, "reset") else ""
        raise ConfigError(f"train.task.name must be a task with problem and reward, got {config.name!r}{turns}")
    _check_num_held_out(task, config.name)
    return cast(Task, task)


def load_environment(config: TaskConfig) -> Environment:
    """Return a new environment of the kind that ``train.task`` names; errors as of ``load_task``."""
    environment = _made({"calculator": Calculator}, config, allowed=ENVIRONMENTS)
    if not all(iscoroutinefunction(getattr(environment, name, None)) for name in ("reset", "step", "close")):
        raise ConfigError(
            "train.task.name must be an environment with async reset, step and close where there is a table "
            f"[environment], got {config.name!r}"
        )
    _check_num_held_out(environment, config.name)
    return cast(Environment, environment)


def _made(known: Mapping[str, Any], config: TaskConfig, *, allowed: str) -> Any:
    factory = known.get(config.name) or _factory(config.name, allowed)
    try:
        return factory(**config.settings)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"train.task.settings must suit {config.name}: {first_line(error)}, got {config.settings}"
        ) from error
    except Exception as error:  # the user's own task may raise anything
        raise ConfigError(f"train.task.name={config.name!r} cannot be made: {kind_and_line(error)}") from error


def _check_num_held_out(task: Any, name: str) -> None:
    try:
        count = task.num_held_out
    except Exception as error:  # the user's own property may raise anything
        reason = kind_and_line(error)
        raise ConfigError(f"train.task.name must be a task with num_held_out, got {name!r} ({reason})") from error
    if count is not None and not (isinstance(count, Integral) and int(count) >= 0):
        must = "must be a task whose num_held_out is a count of problems or None"
        raise ConfigError(f"train.task.name {must}, got {count!r} from {name!r}")


def _factory(name: str, allowed: str) -> Any:
    found = named_attribute(name, key="train.task.name", allowed=allowed)
    if not callable(found):
        raise ConfigError(f"train.task.name must be a class or a function, got {name!r}")
    return found


def _rows(setting: str, path: str, split: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of a file, each after its place in the file."""
    key = f"train.task.settings.{setting}"
    if not path.endswith(".jsonl"):
        yield from ((f"{path} row {row}", fields) for row, fields in enumerate(_data_set(key, path, split)))
        return
    for number, line in read_lines(Path(path), key):
        if not line.strip():
            continue
        row = parse_json(line, f"{path} line {number}")
        if not isinstance(row, dict):
            raise ConfigError(f"{path} line {number} must be a JSON object, got {line.strip()[:60]!r}")
        yield f"{path} line {number}", row


def _data_set(key: str, path: str, split: str) -> Iterable[Mapping[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise _not_installed("datasets", setting=key.removeprefix("train.task."), value=path) from error
    folder = Path(path)
    try:
        if (folder / "dataset_dict.json").exists():
            return cast("Iterable[Mapping[str, Any]]", datasets.load_from_disk(path)[split])
        if (folder / "state.json").exists():
            return cast("Iterable[Mapping[str, Any]]", datasets.load_from_disk(path))
        return cast("Iterable[Mapping[str, Any]]", datasets.load_dataset(path, split=split))
    except Exception as error:  # its errors have no common root
        reason = f"split {split!r}: {kind_and_line(error)}"
        raise ConfigError(f"{key} must be a file or data set that can be read, got {path!r} ({reason})") from error


def _question(row: Mapping[str, Any], place: str, *, keys: tuple[str, str]) -> tuple[str, str]:
    question, answer = (row.get(key) for key in keys)
    if not isinstance(question, str) or not question:
        raise ConfigError(f"{place} must have a text under {keys[0]!r} (prompt_key), got {question!r}")
    number = isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer)
    if not number and not (isinstance(answer, str) and answer.strip()):
        raise ConfigError(f"{place} must have a text or a number under {keys[1]!r} (answer_key), got {answer!r}")
    return question, str(answer)


def _not_installed(package: str, *, setting: str, value: str) -> ConfigError:
    return ConfigError(f"train.task.{setting}={value!r} needs {package}: {install('math')}")
