"""Staleness in the ready queue under fluctuations: limits by hand, and a simulation of the queue group by group."""

import math

import numpy as np
import pytest
from ready_queue import poisson_queue_staleness


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
def test_the_chain_agrees_with_a_simulated_queue(rate_ratio, batches):
    expected = simulated_staleness(rate_ratio, batches * 16, 16, trainings=20_000)
    staleness = poisson_queue_staleness(rate_ratio=rate_ratio, queue_batches=batches, groups_per_batch=16)
    assert staleness == pytest.approx(expected, rel=0.03)


def test_a_queue_of_one_batch_by_hand():
    """Nothing is ever left over: E[min(A, 2)] / 2 with A Poisson of mean 1 is (p1 + 2 (1 - p0 - p1)) / 2."""
    p = math.exp(-1)
    staleness = poisson_queue_staleness(rate_ratio=0.5, queue_batches=1, groups_per_batch=2)
    assert staleness == pytest.approx((p + 2 * (1 - 2 * p)) / 2)
