"""The bound ``max_lag`` on every trained token, kept by waiting (``on_stale = "train"``): the rules and their proof.

Let m be ``max_lag``, B the train batch, v the version that the next batch is trained at, and e the oldest version on
any engine. The *bound* x of a group is a version that none of its tokens is older than: e when it is admitted, later
the oldest version that its engines report, which is not smaller. A group is in time for the batches at versions up to
x + m. A group is *live* from its admission until it is taken for training or cancelled. Let L(x) be the number of
live rollouts with a bound of at most x.

    gate:  admit a group only if afterwards   L(any) <= B (e + m - v + 1)
    safe:  take a batch only if afterwards    L(x) <= B max(0, x + m - v)   for every x

*Claim 1*: L(x) <= B max(0, x + m - v + 1) for every x. At the start nothing is live. An admission changes L(x) for
x >= e only, and there L(x) <= L(any) <= B (e + m - v + 1) <= B (x + m - v + 1). When a batch is taken, v rises by one,
and *safe* is the claim for the new v. A bound only rises and a cancelled group only leaves: L(x) falls.

*Claim 2*: the bound is kept. A group with bound x that is taken at version v was live, so 0 < L(x), so by claim 1
v <= x + m, and its oldest token has lag v - x <= m.

*Claim 3*: the trainer does not wait for ever, if started rollouts end. If all live groups were ready, taking the B
oldest rollouts would be safe: where L(x) <= B none with a bound of at most x is left; elsewhere L(x) falls by B, and
claim 1 gives the rest. So while no batch is safe, live rollouts are missing from the ready queue. They are in flight or
will start, since no rule stops admitted rollouts from starting, and they end. It remains to show that B rollouts become
live. If fewer are, the trainer will be idle; then a publication that is due goes out, or is under way, and arrives.
With K for ``publish_every``, one is due from the first multiple of K above the last published version on. So all
engines reach a version above v - K, and the gate admits at least B (m - K + 2) >= B live rollouts, since m >= K - 1
(``RunConfig`` refuses less: the batch before a publication is K - 1 versions ahead of the engines).

*Micro-batches*: of the batch at v only what is left of it counts. So each rule subtracts what has been taken already.

*RL steps* (``PartialRolloutScheduler``): G batches are chosen at once and trained at v .. v + G - 1. That is safe if
afterwards L(x) <= B max(0, x + m - (v + G) + 1) for every x. Claim 1 holds for all v in between, since v does not
change while the gate admits. In order of age, the live rollouts with a bound of at most x fit into the batches up to
version x + m. So if all live groups were ready, taking the G B oldest would be safe. There are as many: when all
engines have loaded v, the gate admits B (m + 1) >= G B, since m >= G - 1. The last RL step is always safe, as nothing
that it leaves has to be trained.

Cancelled groups leave L, so filtering never uses up the allowance. Right after a publication has arrived at v, the gate
admits up to B (m + 1) live rollouts; each step takes B of them while v rises by one; so B (m + 1), less those carried
over, are admitted until the next publication.

*Rejected*: to bound the lag at admission only, as capacity rules do. They bound the total, and an unlucky order of
finishing still breaks the bound.
"""

from __future__ import annotations

from collections.abc import Mapping


class LagBound:
    """Counts live rollouts; decides on admission and training (mutable, can be pickled). ``max_lag`` None: no bound."""

    def __init__(self, max_lag: int | None, *, train_batch_size: int) -> None:
        self._max_lag = max_lag
        self._batch = train_batch_size
        self._live: dict[int, int] = {}  # rollouts by bound
        self.num_live = 0

    def add(self, bound: int, num_rollouts: int) -> None:
        """Count rollouts that are live from now on; negative: no more."""
        self.num_live += num_rollouts
        count = self._live.get(bound, 0) + num_rollouts
        if count:
            self._live[bound] = count
        else:
            del self._live[bound]

    def admits(self, num_rollouts: int, *, bound: int, version: int, left: int) -> bool:
        """Return whether rollouts may be admitted: the gate. ``bound``: oldest version on any engine."""
        return self._max_lag is None or self.num_live + num_rollouts <= self._capacity(bound, version, left)

    def is_safe(self, taken: Mapping[int, int], *, version: int, left: int) -> bool:
        """Return whether all other live rollouts can be trained in time once ``taken`` (by bound) are. O(max_lag).

        ``version``: of the next batch then; ``left``: its rollouts not yet taken.
        """
        if self._max_lag is None:
            return True
        num_due = 0
        for bound in sorted(self._live):
            num_due += self._live[bound] - taken.get(bound, 0)
            if num_due > self._capacity(bound, version, left):
                return False
        return True

    def _capacity(self, bound: int, version: int, left: int) -> int:
        assert self._max_lag is not None
        num_later = bound + self._max_lag - version
        return left + self._batch * num_later if num_later >= 0 else 0
