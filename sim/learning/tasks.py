"""Tasks for a small policy: prompts, rewards of answers, and demonstrations for its base model.

Prompts of a task have one length, shorter problems are filled up with blanks. An answer is a list of words; it ends
with ``END``, or without it where generation is cut. An answer of several turns is one list, too: each turn ends with
``END``, followed by the environment's word. Words 0 to 9 are digits (or letters); the others are below.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import numpy as np

from pipelinerl.config.run import PolicyConfig, RunConfig
from pipelinerl.errors import ConfigError
from sim.workload import named_stream

NUM_DIGITS = 10
BLANK, MARK, RESULT, END = 10, 11, 12, 13
"""Fills a prompt up; ends the prompt; announces the result; ends the answer."""
NUM_WORDS = 14
CHAIN_MODULUS = 6
"""Terms of ``chain`` are below it, sums are modulo it."""
DIRECT_SHARE = 0.7
"""Share of the demonstrations of ``chain`` that give the result at once, without steps."""
MISTAKES = 0.04
"""Chance of a wrong digit, per digit of a demonstration: the base model is to be good, not perfect."""
BREAKS = 0.04
"""Chance, per step of a demonstration of ``chain``, that its sum so far is given as the result."""


class _Written:
    """A task with one right answer, every word of which counts.

    As of all tasks, every prompt has ``prompt_tokens``, and the longest right answer, ``END`` included, has
    ``longest_answer`` tokens.
    """

    def _answer(self, prompt: Sequence[int]) -> list[int]:
        raise NotImplementedError

    def demonstrate(self, prompt: Sequence[int], stream: np.random.Generator) -> list[int]:
        """Return the answer, each digit or letter wrong with a chance of ``MISTAKES``."""
        return _with_mistakes(self._answer(prompt), stream)

    def is_right(self, prompt: Sequence[int], answer: Sequence[int]) -> bool:
        """Return whether every word is right."""
        return list(answer) == self._answer(prompt)


class Addition(_Written):
    """The sum of two numbers of ``size`` digits, lowest digit first: 47 + 85 is ``7 4 5 8``, answered ``2 3 1``."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.prompt_tokens = 2 * size + 1
        self.longest_answer = size + 2

    def draw(self, stream: np.random.Generator) -> tuple[int, ...]:
        """Return the prompt of a random problem."""
        return (*stream.integers(NUM_DIGITS, size=2 * self._size).tolist(), MARK)

    def _answer(self, prompt: Sequence[int]) -> list[int]:
        total, digits = 0, []
        for place in range(self._size):
            total += prompt[place] + prompt[self._size + place]
            digits.append(total % NUM_DIGITS)
            total //= NUM_DIGITS
        return [*digits, total, END]


class Reverse(_Written):
    """A word of 1 to ``size`` letters, backwards: copying with a transformation."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.prompt_tokens = size + 1
        self.longest_answer = size + 1

    def draw(self, stream: np.random.Generator) -> tuple[int, ...]:
        """Return the prompt of a random problem; blanks come first, so that the last letter has one place."""
        letters = stream.integers(NUM_DIGITS, size=int(stream.integers(1, self._size + 1))).tolist()
        return (*[BLANK] * (self._size - len(letters)), *letters, MARK)

    def _answer(self, prompt: Sequence[int]) -> list[int]:
        return [*[word for word in reversed(prompt) if word < NUM_DIGITS], END]


class Chain:
    """The sum, modulo ``CHAIN_MODULUS``, of 2 to ``size`` digits below it: a task on which long answers pay.

    An answer ends with ``RESULT``, a digit and ``END``; only that digit decides. The words before are free: steps,
    each the sum so far, make the result easy, but the base model mostly gives it at once and so is mostly wrong
    where there are many terms. The policy has to find out that longer answers are right more often.

    Short problems are more frequent than long ones, k terms as k^-1.5: lengths of answers spread as they do in
    reasoning, where the longest is many times the mean.
    """

    def __init__(self, size: int, modulus: int = CHAIN_MODULUS) -> None:
        self._size = size
        self._modulus = modulus
        frequency = np.where(np.arange(1, size + 1) < min(2, size), 0.0, np.arange(1.0, size + 1) ** -1.5)
        self._up_to = np.cumsum(frequency) / frequency.sum()
        self.prompt_tokens = size + 1
        self.longest_answer = size + 3

    def draw(self, stream: np.random.Generator) -> tuple[int, ...]:
        """Return the prompt of a random problem; blanks come last, so that term and step are always as far apart."""
        num_terms = 1 + int(np.searchsorted(self._up_to, stream.random(), side="right"))
        terms = stream.integers(self._modulus, size=num_terms).tolist()
        return (*terms, *[BLANK] * (self._size - len(terms)), MARK)

    def demonstrate(self, prompt: Sequence[int], stream: np.random.Generator) -> list[int]:
        """Return the result at once, with a chance of ``DIRECT_SHARE``, or steps with mistakes and breaks."""
        terms = [word for word in prompt if word < NUM_DIGITS]
        if stream.random() < DIRECT_SHARE:
            return [RESULT, sum(terms) % CHAIN_MODULUS, END]
        steps: list[int] = []
        total = 0
        for term in terms:
            total = (total + term) % CHAIN_MODULUS
            if stream.random() < MISTAKES:
                total = int(stream.integers(CHAIN_MODULUS))
            steps.append(total)
            if stream.random() < BREAKS:
                break
        return [*steps, RESULT, total, END]

    def is_right(self, prompt: Sequence[int], answer: Sequence[int]) -> bool:
        """Return whether the answer, or its last turn, ends with the right result."""
        total = sum(word for word in prompt if word < NUM_DIGITS) % self._modulus
        return list(answer[-3:]) == [RESULT, total, END]


class Calculator(Chain):
    """The sum, modulo 10, of 2 to ``size`` digits, with an environment that adds two: a task of several turns.

    A turn of two digits is a call, answered by their sum modulo 10. Any other turn is the last, and right if it is
    ``RESULT``, the sum and ``END``. So a sum of k digits takes k turns; the base model mostly gives the result at once,
    and is mostly wrong. The number of digits is drawn as in ``Chain``.
    """

    longest_turn = 3
    """Longest turn of a right answer (tokens)."""

    def __init__(self, size: int) -> None:
        super().__init__(size, NUM_DIGITS)
        self.longest_answer = 4 * size - 1  # a call has three words and an answer of one

    def observe(self, turn: Sequence[int]) -> list[int] | None:
        """Return the words that a turn is answered with; None: it is no call, and the episode is over."""
        if len(turn) != self.longest_turn or turn[-1] != END or max(turn[:2]) >= NUM_DIGITS:
            return None
        return [(turn[0] + turn[1]) % NUM_DIGITS]

    def demonstrate(self, prompt: Sequence[int], stream: np.random.Generator) -> list[int]:
        """Return the result at once, with a chance of ``DIRECT_SHARE``, or calls with mistakes and breaks."""
        terms = [word for word in prompt if word < NUM_DIGITS]
        words: list[int] = []
        total = terms[0]
        if stream.random() < DIRECT_SHARE:
            total, terms = sum(terms) % NUM_DIGITS, []
        for term in terms[1:]:
            call = _with_mistakes([total, term, END], stream)
            total = (call[0] + call[1]) % NUM_DIGITS
            words += [*call, total]
            if stream.random() < BREAKS:
                break
        return [*words, *_with_mistakes([RESULT, total, END], stream)]


TokenTask = Addition | Reverse | Chain


def _with_mistakes(answer: list[int], stream: np.random.Generator) -> list[int]:
    wrong = stream.random(len(answer)) < MISTAKES
    other = stream.integers(NUM_DIGITS, size=len(answer)).tolist()
    return [
        new if is_wrong and word < NUM_DIGITS else word
        for word, new, is_wrong in zip(answer, other, wrong, strict=True)
    ]


def make_task(config: PolicyConfig) -> TokenTask:
    """Return the task that a run file names."""
    match config.task:
        case "addition":
            return Addition(config.size)
        case "reverse":
            return Reverse(config.size)
        case "chain":
            return Chain(config.size)
        case "calculator":
            return Calculator(config.size)
        case _:
            assert_never(config.task)


def checked_task(config: RunConfig) -> TokenTask:
    """Return the task of a run, if its policy can do it.

    Raises ConfigError if the longest right answer is longer than answers may be, or never fits the KV cache.
    """
    assert config.policy is not None
    task, longest = make_task(config.policy), config.workload.length.max
    if isinstance(task, Calculator) or config.environment is not None:
        _check_turns(config, task)
        return task
    if task.longest_answer > longest:
        raise ConfigError(
            f"workload.length.max must hold the longest right answer of policy.task='{config.policy.task}' with "
            f"policy.size={config.policy.size}, {task.longest_answer} tokens, got max={longest}"
        )
    capacity = config.hardware.kv_cache_tokens
    if capacity is not None and task.prompt_tokens + longest > capacity:
        raise ConfigError(
            "hardware.kv_cache_tokens must hold a prompt of policy.task and workload.length.max, "
            f"{task.prompt_tokens + longest} tokens in all, got kv_cache_tokens={capacity}"
        )
    return task


def _check_turns(config: RunConfig, task: TokenTask) -> None:
    """Raise ConfigError if a policy cannot do its task in turns."""
    policy, environment = config.policy, config.environment
    assert policy is not None
    if environment is None or not isinstance(task, Calculator):
        raise ConfigError(
            "policy.task must be 'calculator' with an [environment], and another without, got "
            f"'{policy.task}' {'without' if environment is None else 'with'} one"
        )
    for key, least, got in (
        ("workload.length.max", task.longest_turn, config.workload.length.max),
        ("environment.turns.max", policy.size, environment.turns.max),
        ("environment.turns.context_max", task.prompt_tokens + task.longest_answer, environment.turns.context_max),
    ):
        if got < least:
            raise ConfigError(
                f"{key} must hold the right answers of policy.task='calculator' with policy.size={policy.size}, "
                f"{least}, got {got}"
            )


def problem(task: TokenTask, *, seed: int, prompt_id: int) -> tuple[int, ...]:
    """Return a prompt, a function of seed and ``prompt_id`` alone."""
    return task.draw(named_stream(seed, "problems", prompt_id))
