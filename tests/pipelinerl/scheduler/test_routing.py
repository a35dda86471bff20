"""Which engine takes a rollout and its next turn: by hand, the laws of hashing, and that ``room`` is the default."""

from collections import Counter

import pytest
from scheduler_events import make, started, tokens

from pipelinerl.config.run import SchedulerConfig
from pipelinerl.scheduler.events import (
    EngineJoined,
    EngineLeaving,
    ObservationReady,
    RolloutFinished,
    Routing,
    StartRollout,
    TurnFinished,
)
from pipelinerl.scheduler.routing import HashRouter
from pipelinerl.scheduler.slots import EngineSlots

SLOTS = EngineSlots(1, slots_per_engine=1)
"""``hash`` does not look at them."""


def on_engines(num_engines, *, routing, slots=4, **sizes):
    """Return a function that reports an event to a scheduler of eight environments: starts, by engine."""
    sizes = {"environments": 8, "train_batch_size": 64, "generation_batch_size": slots, **sizes}
    scheduler = started(num_engines=num_engines, routing=routing, **sizes)

    def report(event):
        return [(one.rollout_id, one.engine) for one in scheduler.handle(event) if isinstance(one, StartRollout)]

    return report


def test_a_run_file_without_a_routing_is_one_with_room_and_does_not_show_it():
    sizes = {"train_batch_size": 1, "generation_batch_size": 1}
    assert SchedulerConfig(**sizes) == SchedulerConfig(**sizes, routing=Routing.ROOM)
    assert "routing" not in SchedulerConfig(**sizes).model_dump(mode="json")
    assert SchedulerConfig(**sizes, routing=Routing.HASH).model_dump(mode="json")["routing"] == "hash"


# ------------------------------------------------------------------------------------------------------ by hand


def test_most_free_takes_the_emptiest_engine_in_every_turn():
    report = on_engines(2, routing="most_free", kv_cache_tokens=1000)
    assert [report(ObservationReady(one, 10)) for one in range(3)] == [[(0, 0)], [(1, 1)], [(2, 0)]]
    report(TurnFinished(2, 0, tokens(0)))
    report(TurnFinished(0, 0, tokens(0)))
    assert report(ObservationReady(3, 10)) == [(3, 0)]
    assert report(ObservationReady(4, 10)) == [(4, 0)]  # engine 0 comes first of equals; then it has two
    assert report(ObservationReady(0, 10)) == [(0, 1)]  # though engine 0 has its cache and a free slot


def test_least_loaded_counts_tokens_in_progress_and_no_cache():
    report = on_engines(2, routing="least_loaded", kv_cache_tokens=1000)
    assert report(ObservationReady(0, 100)) == [(0, 0)]
    assert [report(ObservationReady(one, 30)) for one in (1, 2, 3)] == [[(1, 1)], [(2, 1)], [(3, 1)]]  # 100 and 90
    report(TurnFinished(0, 0, tokens(0)))  # one whose environment acts counts no more
    assert report(ObservationReady(4, 95)) == [(4, 0)]
    assert report(ObservationReady(0, 101)) == [(0, 1)]  # 95 and 90


def test_sticky_begins_where_fewest_are_open_and_waits_for_its_engine():
    report = on_engines(2, routing="sticky", slots=1, kv_cache_tokens=1000)
    assert [report(ObservationReady(one, 10)) for one in (0, 1, 2)] == [[(0, 0)], [(1, 1)], []]
    assert report(TurnFinished(0, 0, tokens(0))) == [(2, 0)]
    assert report(ObservationReady(0, 20)) == []
    assert report(TurnFinished(1, 1, tokens(0))) == []  # engine 1 is free, and not its own
    assert report(ObservationReady(3, 10)) == [(3, 1)]  # one is open there, two on engine 0
    assert report(TurnFinished(2, 0, tokens(0))) == [(0, 0)]


def test_cache_aware_stays_unless_load_outweighs_what_is_cached():
    """A token to prefill weighs as much as 16 in progress. Engines hold 1000 tokens."""
    report = on_engines(2, routing="cache_aware", kv_cache_tokens=1000)
    assert report(ObservationReady(0, 10)) == [(0, 0)]
    assert report(ObservationReady(1, 159)) == [(1, 1)]
    assert report(ObservationReady(2, 150)) == [(2, 0)]  # 160 in progress and 159
    assert report(ObservationReady(3, 1)) == [(3, 1)]
    report(TurnFinished(0, 0, tokens(0)))
    assert report(ObservationReady(4, 1)) == [(4, 0)]  # 150 and 160 in progress
    assert report(ObservationReady(0, 30)) == [(0, 0)]  # 151 - 16 x 10 cached = -9 against 160
    assert report(ObservationReady(5, 400)) == [(5, 1)]  # 181 and 160
    report(TurnFinished(3, 1, tokens(0)))
    assert report(ObservationReady(3, 2)) == [(3, 0)]  # 559 - 16 x 1 against 181


@pytest.mark.parametrize(("elsewhere", "engine"), [(500, 1), (700, 0)])
def test_cache_aware_expects_the_share_of_a_cache_that_others_leave(elsewhere, engine):
    """Engine 0 holds 1000 tokens, 960 of them in progress; 80 rest, 40 of each of two rollouts: half is expected.

    960 - 16 x 20 = 640. With all of it, 320, it would stay in both cases; with nothing, 960, it would move in both.
    """
    report = on_engines(2, routing="cache_aware", kv_cache_tokens=1000)
    sizes = [40, elsewhere, 40, 960]
    assert [report(ObservationReady(*one)) for one in enumerate(sizes)] == [[(0, 0)], [(1, 1)], [(2, 0)], [(3, 0)]]
    report(TurnFinished(0, 0, tokens(0)))
    report(TurnFinished(2, 0, tokens(0)))
    assert report(ObservationReady(0, 41)) == [(0, engine)]


def test_a_rollout_waits_for_the_engine_of_its_hash_while_others_are_idle():
    router = HashRouter(3)
    home = {one: router.begin(one, SLOTS) for one in range(8)}
    (crowded, _), *_ = Counter(home.values()).most_common()
    first, second, *_ = [one for one, engine in home.items() if engine == crowded]
    report = on_engines(3, routing="hash", slots=1, kv_cache_tokens=1000)
    assert report(ObservationReady(first, 10)) == [(first, crowded)]
    assert report(ObservationReady(second, 10)) == []
    assert report(TurnFinished(first, crowded, tokens(0))) == [(second, crowded)]


def test_rollouts_that_wait_for_an_engine_that_leaves_go_elsewhere():
    router = HashRouter(2)
    first, second = [one for one in range(8) if router.begin(one, SLOTS) == 1][:2]
    report = on_engines(2, routing="hash", slots=1, kv_cache_tokens=1000)
    assert report(ObservationReady(first, 10)) == [(first, 1)]
    assert report(ObservationReady(second, 10)) == []
    assert report(EngineLeaving(1)) == [(second, 0)]


def test_with_one_turn_as_many_rollouts_are_open_as_there_are_slots_each_at_its_hash():
    """80 on two engines of 40 slots; so the fuller engine has a queue, and the other one free slots."""
    scheduler, router = (
        make(num_engines=2, routing="hash", train_batch_size=64, generation_batch_size=40),
        HashRouter(2),
    )
    hashed = [router.begin(one, SLOTS) for one in range(80)]
    crowded = max((0, 1), key=hashed.count)
    commands = scheduler.start()
    assert all(one.engine == hashed[one.rollout_id] for one in commands)
    assert [sum(one.engine == engine for one in commands) for engine in (crowded, 1 - crowded)] == [
        40, hashed.count(1 - crowded)
    ]  # fmt: skip
    waiting = [one for one, engine in enumerate(hashed) if engine == crowded][40:]
    done = next(one.rollout_id for one in commands if one.engine == crowded)
    answer = scheduler.handle(RolloutFinished(done, crowded, tokens(0), 1.0))
    assert (answer[0].rollout_id, answer[0].engine) == (waiting[0], crowded)
    joined = scheduler.handle(EngineJoined(2, 0))
    router.add(2)
    assert {one.engine for one in joined} >= {2}
    assert all(one.engine == router.begin(one.rollout_id, SLOTS) for one in joined)


# --------------------------------------------------------------------------------------------- laws of hashing


def test_engines_that_join_or_leave_move_only_their_share():
    """Of 20,000 rollouts, 1/9 moves to the ninth engine, and no other: within z = 4.9, 1 hash in 10^6 fails."""
    router, number = HashRouter(8), 20_000
    before = [router.begin(one, SLOTS) for one in range(number)]
    router.add(8)
    with_nine = [router.begin(one, SLOTS) for one in range(number)]
    moved = [now for was, now in zip(before, with_nine, strict=True) if was != now]
    assert set(moved) == {8}
    assert len(moved) == pytest.approx(number / 9, abs=4.9 * (number * 8 / 81) ** 0.5)
    router.close(3)
    for was, now in zip(with_nine, (router.begin(one, SLOTS) for one in range(number)), strict=True):
        assert (was == now) == (was != 3)
    assert [router.go_on(one, 0, 10, SLOTS) for one in range(99)] == [router.begin(one, SLOTS) for one in range(99)]


def test_hashing_spreads_rollouts_as_balls_in_bins():
    """2,000 times 64 rollouts on 4 engines.

    Pearson's statistic has mean 3 and variance 6 (1 - 1/64): within z = 4.9, 1 hash in 10^6 fails. Engines in turn
    would give 0.
    """
    router, times, number, engines = HashRouter(4), 2000, 64, 4
    statistics = []
    for batch in range(times):
        counts = Counter(router.begin(batch * number + one, SLOTS) for one in range(number))
        statistics.append(sum((counts[engine] - number / engines) ** 2 for engine in range(engines)) * engines / number)
    assert sum(statistics) / times == pytest.approx(engines - 1, abs=4.9 * (6 * (1 - 1 / number) / times) ** 0.5)
