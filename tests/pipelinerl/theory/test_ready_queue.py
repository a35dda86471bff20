"""Staleness in the ready queue under fluctuations: limits by hand, and a simulation of the queue group by group."""

import math

import numpy as np
import pytest
from ready_queue import poisson_queue_staleness


def staleness(rate_ratio, queue_batches, groups):
    return poisson_queue_staleness(rate_ratio=rate_ratio, queue_batches=queue_batches, groups_per_batch=groups)


def simulated_staleness(rate_ratio, capacity, groups, *, trainings, seed=0):
    """Mean versions between the arrival and the training of a group: one by one, first come, the oldest dropped."""
    generator = np.random.default_rng(seed)
    gaps = generator.exponential(1 / (rate_ratio * groups), size=3 * trainings * groups)
    arrivals = iter(np.cumsum(gaps))
    queue, now, waited = [], 0.0, []
    coming = next(arrivals)
    for version in range(trainings):
        while len(queue) < groups:  # the trainer waits
            queue.append(version)
            now, coming = max(now, coming), next(arrivals)
        waited += [version - one for one in queue[:groups]]
        del queue[:groups]
        now += 1.0
        while coming <= now:
            queue.append(version)
            queue = queue[-capacity:]
            coming = next(arrivals)
    return float(np.mean(waited))


@pytest.mark.parametrize(("rate_ratio", "batches"), [(0.6, 1), (0.9, 1), (0.9, 2), (0.95, 4)])
def test_it_is_what_a_queue_of_groups_gives(rate_ratio, batches):
    expected = simulated_staleness(rate_ratio, batches * 16, 16, trainings=20_000)
    assert staleness(rate_ratio, batches, 16) == pytest.approx(expected, rel=0.03)


def test_a_queue_of_one_batch_by_hand():
    """Nothing is ever left over: E[min(A, 2)] / 2 with A Poisson of mean 1 is (p1 + 2 (1 - p0 - p1)) / 2."""
    p = math.exp(-1)
    assert staleness(0.5, 1, 2) == pytest.approx((p + 2 * (1 - 2 * p)) / 2)


@pytest.mark.parametrize("batches", [1, 2, 8])
def test_without_fluctuations_it_is_rho_whatever_the_queue(batches):
    """Many groups per batch come evenly: the closed form's rho."""
    assert staleness(0.8, batches, 150) == pytest.approx(0.8, abs=0.002)


def test_a_larger_queue_is_staler_where_generation_is_nearly_as_fast():
    values = [staleness(0.95, batches, 16) for batches in (1, 2, 3, 5)]
    assert values == sorted(values)
    assert values[0] < 0.95 < values[1]


@pytest.mark.parametrize(("changes", "message"), [
    ({"rate_ratio": 1.1}, "rate_ratio must be above 0 and at most 1, got 1.1"),
    ({"groups_per_batch": 0}, "groups_per_batch must be at least 1, got 0"),
])  # fmt: skip
def test_what_is_out_of_range_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        poisson_queue_staleness(**{"rate_ratio": 0.5, "queue_batches": 1, "groups_per_batch": 4} | changes)
