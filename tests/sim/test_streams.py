"""Random streams: found by name and number, the same on every machine; delays of the way to the engines.

False-alarm rates say for how many seeds a test fails although the code is right; the seeds are fixed.
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.workload import DRAWS_PER_BLOCK, DispatchDelays, named_stream

Z = 4.9
"""A standard normal is farther from 0 once in a million."""


def first_draws(seed, name, block):
    return named_stream(seed, name, block).bit_generator.random_raw(2).tolist()


# --------------------------------------------------------------------------------------------- streams


def test_a_stream_is_the_same_on_every_machine():
    """PCG64, seeded with SeedSequence(seed, spawn_key=(crc32(name), block)); numpy keeps both as they are (NEP 19).

    Python's own hash of a name would differ between processes.
    """
    assert first_draws(0, "dispatch", 0) == [242758970538661268, 7655563256820012388]
    assert first_draws(7, "lengths", 3) == [6107615096109361439, 5311557322792646043]


def test_seed_name_and_block_each_make_another_stream():
    """720 streams, no first two 64-bit numbers twice: chance 720^2/2 / 2^128, never."""
    draws = {
        tuple(first_draws(seed, name, block))
        for seed in range(12)
        for name in ("prompts", "answers", "lengths", "rounding", "rewards", "dispatch")
        for block in range(10)
    }
    assert len(draws) == 12 * 6 * 10


@pytest.mark.parametrize("other", [(1, "lengths", 0), (0, "rewards", 0), (0, "lengths", 1)])
def test_streams_are_uncorrelated(other):
    """n = 100 000 pairs of uniforms: a correlation above 4.9/sqrt(n) = 1.5 % has a chance of 1 in 10^6."""
    n = 100_000
    one, two = (named_stream(*stream).random(n) for stream in ((0, "lengths", 0), other))
    assert abs(np.corrcoef(one, two)[0, 1]) < Z / math.sqrt(n)


# -------------------------------------------------------------------------------------- dispatch delays


def delays(*, fixed_s=0.0, jitter_s=0.0, group_size=8, seed=0):
    return DispatchDelays(fixed_s=fixed_s, jitter_s=jitter_s, group_size=group_size, seed=seed)


@pytest.mark.parametrize("group_size", [1, 8, 3, DRAWS_PER_BLOCK + 1])
def test_a_fixed_delay_is_that_of_every_rollout(group_size):
    """5 ms are 5 * 10^9 ticks."""
    assert delays(fixed_s=5e-3, group_size=group_size).group(10**6) == [5 * 10**9] * group_size


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=30)
@given(group_ids=st.lists(st.integers(0, 20 * DRAWS_PER_BLOCK), max_size=20), group_size=st.integers(1, 64))
def test_a_delay_does_not_depend_on_earlier_calls(group_ids, group_size):
    """More blocks than are kept, in any order."""
    one = delays(jitter_s=1e-3, group_size=group_size)
    asked = [one.group(group_id) for group_id in group_ids]
    assert asked == [delays(jitter_s=1e-3, group_size=group_size).group(group_id) for group_id in group_ids]
    assert all(len(group) == group_size for group in asked)


def test_the_jitter_is_exponential():
    """n = 80 000: the mean is within 4.9/sqrt(n) = 1.7 %, P(jitter > mean) = 1/e within 4.9 standard errors.

    Each fails for 1 seed in 10^6.
    """
    mean_s, n = 2e-3, 80_000
    one = delays(fixed_s=5e-3, jitter_s=mean_s)
    jitter_s = np.array([delay for group_id in range(n // 8) for delay in one.group(group_id)]) / 1e12 - 5e-3
    assert jitter_s.min() >= 0
    assert jitter_s.mean() == pytest.approx(mean_s, rel=Z / math.sqrt(n))
    share = math.exp(-1)
    assert (jitter_s > mean_s).mean() == pytest.approx(share, abs=Z * math.sqrt(share * (1 - share) / n))


def test_the_jitter_of_siblings_is_independent():
    """n = 40 000 pairs of siblings and of neighbouring groups: below 4.9/sqrt(n), 1 seed in 10^6 each."""
    n = 40_000
    one = delays(jitter_s=1.0, group_size=2)
    first, second = np.array([one.group(group_id) for group_id in range(n)], dtype=float).T
    assert abs(np.corrcoef(first, second)[0, 1]) < Z / math.sqrt(n)
    assert abs(np.corrcoef(first[1:], second[:-1])[0, 1]) < Z / math.sqrt(n)


def test_the_seed_changes_the_jitter():
    assert delays(jitter_s=1.0, seed=1).group(0) != delays(jitter_s=1.0, seed=2).group(0)
