"""What an engine keeps of rollouts between two turns, and what it drops first."""

from sim.costs import PrefillCost
from sim.prefix_cache import PrefixCache


def test_the_first_that_were_left_are_dropped_first_and_no_more_than_needed():
    cache = PrefixCache(100)
    for rollout_id in (3, 1, 2):
        cache.keep(rollout_id, 20)
    cache.make_room(40)
    assert list(cache.kept) == [3, 1, 2]
    cache.make_room(41)
    assert list(cache.kept) == [1, 2]
    cache.make_room(61)
    assert list(cache.kept) == [2]


def test_a_cache_is_given_away_once_and_left_again_last():
    cache = PrefixCache(100)
    cache.keep(1, 20)
    cache.keep(2, 30)
    assert (cache.take(1), cache.take(1)) == (20, 0)
    cache.keep(1, 25)
    assert list(cache.kept.items()) == [(2, 30), (1, 25)]
    cache.keep(2, 31)
    cache.make_room(100 - 56)
    assert list(cache.kept.items()) == [(1, 25), (2, 31)]
    cache.clear()
    assert cache.take(1) == 0


def test_prefill_in_two_parts_costs_one_fixed_part_more_than_in_one():
    """Attention reads all tokens before: n^2 = c^2 + (n^2 - c^2)."""
    cost = PrefillCost(7, 3, 2)
    assert cost.ticks(50) == 7 + 3 * 50 + 2 * 2500
    assert cost.ticks(20) + cost.ticks(50, 20) == cost.ticks(50) + 7
    assert cost.ticks(20, 20) == 0
