"""Staleness in the ready queue by the fluctuations of generation, which Applied Compute's closed form omits.

Derivation. Versions change when a training ends. A group in the queue at that moment gets a version staler, so with k
groups per batch the mean staleness in the queue is E[groups in the queue at the end of a training] / k (Little's law,
counted in versions). Let j be the groups that are left when a training starts. While it lasts, A groups come, rho k in
the mean; at its end there are N = min(j + A, K), K the queue's capacity. If N >= k the next training starts at once and
leaves N - k, else it waits for the missing groups and leaves none: j' = max(N - k, 0).

If groups come evenly, A = rho k < k, then j = 0 and N = rho k: the staleness is rho **whatever the queue's size**,
which is why the closed form has no q for rho < 1. The size matters only as A fluctuates. Groups that finish
independently of each other come as a Poisson process, the chain below; engines with full slots deliver more evenly, as
sequences that last long keep others from starting. So the truth lies between rho and this.
"""

from __future__ import annotations

import math

import numpy as np


def poisson_queue_staleness(*, rate_ratio: float, queue_batches: float, groups_per_batch: int) -> float:
    """Return the mean staleness in the ready queue if groups come as a Poisson process (optimizer steps).

    Groups that are dropped later, as the queue is full, count as well: few, for rates of at most 1.

    Args:
        rate_ratio: rho, sequences per second of generation over those of training; above 0, at most 1.
        queue_batches: q, capacity of the ready queue over the batch; less than 1 counts as 1.
        groups_per_batch: k (count).
    """
    k, mean = groups_per_batch, rate_ratio * groups_per_batch
    capacity = max(k, round(queue_batches * k))
    states = capacity - k + 1
    come = [math.exp(-mean + a * math.log(mean) - math.lgamma(a + 1)) for a in range(capacity + 1)]
    moves, at_end = np.zeros((states, states)), np.zeros(states)
    for left in range(states):
        groups = np.arange(left, capacity + 1)
        share = np.array(come[: len(groups)])
        share[-1] = 1 - share[:-1].sum()  # the queue is full
        at_end[left] = share @ groups
        np.add.at(moves[left], np.maximum(groups - k, 0), share)
    balance = np.vstack([(moves.T - np.eye(states))[:-1], np.ones(states)])
    stationary = np.linalg.solve(balance, np.eye(states)[-1])
    return float(stationary @ at_end) / k
