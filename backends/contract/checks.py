"""Helpers of the promises; plain asserts and numpy, so that a user's own suite needs nothing else."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

Of = TypeVar("Of")

PROMPT = (3, 13, 4, 11)
"""Tokens of the prompt that engines are asked to continue."""
BATCH = 8
"""Sequences per optimizer step (count)."""
ROUNDING = 1e-5
"""Largest difference of a log-probability that is computed in another order (nats)."""


def promises(contract: type) -> list[str]:
    """Return the names of a contract's promises, in order."""
    return [name for name, value in vars(contract).items() if inspect.iscoroutinefunction(value) and name[0] != "_"]


def check_close(actual: ArrayLike, expected: ArrayLike) -> None:
    """Check that log-probabilities are the same up to ``ROUNDING``."""
    one, other = np.asarray(actual, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    np.testing.assert_allclose(one, other, rtol=0, atol=ROUNDING, equal_nan=False)


FOLLOWING = ("loss", "kl_loss", "value_loss", "gradient_norm", "learning_rate")
"""Metrics that follow from weights and samples; the others are measured, or sums of their own."""


def check_metrics(actual: Mapping[str, float], expected: Mapping[str, float], *, rel: float) -> None:
    """Check that metrics have the same names and, those in ``FOLLOWING``, up to a share ``rel`` the same values."""
    assert actual.keys() == expected.keys()
    following = expected.keys() & set(FOLLOWING)
    one, other = (np.array([metrics[name] for name in following]) for metrics in (actual, expected))
    np.testing.assert_allclose(one, other, rtol=rel, atol=1e-12, equal_nan=False)


class OvertakenError(Exception):
    """What a promise is about had ended before the promise could show anything."""


TRIES = 10
"""Times that a promise is tried before it counts as broken (count)."""


def tried_again(promise: Callable[[Of], Awaitable[None]]) -> Callable[[Of], Awaitable[None]]:
    """Have a promise tried again where it was overtaken: the machine is slow, or stands still for seconds."""

    @functools.wraps(promise)
    async def until_shown(contract: Of) -> None:
        for _ in range(TRIES):
            with suppress(OvertakenError):
                return await promise(contract)
        raise AssertionError(f"{promise.__name__}: answers were whole too early, {TRIES} times")

    return until_shown


@contextmanager
def raises(error: type[Exception], *, but_not: type[Exception] | None = None, begins: str = "") -> Iterator[None]:
    """Check that the block raises an error, none of the kind ``but_not``, with a text that begins so."""
    raised: Exception | None = None
    try:
        yield
    except error as expected:
        raised = expected
    assert raised is not None, f"{error.__name__} was not raised"
    assert but_not is None or not isinstance(raised, but_not), repr(raised)
    assert str(raised).startswith(begins), repr(raised)
