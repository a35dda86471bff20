"""Where a rollout with turns begins, and when, by hand."""

import pytest
from scheduler_events import started, tokens

from pipelinerl.scheduler.events import ObservationReady, RolloutFinished, StartRollout, TurnFinished


def on_two_engines(**sizes):
    """Return a function that reports an event to a scheduler of two engines and six environments: starts, by engine."""
    scheduler = started(num_engines=2, environments=6, train_batch_size=64, **sizes)

    def report(event):
        return [(one.rollout_id, one.engine) for one in scheduler.handle(event) if isinstance(one, StartRollout)]

    return report


def test_rollouts_begin_where_contexts_are_short_and_wait_while_none_more_fits():
    """Room for 100 tokens an engine, and each rollout may become as long as the longest so far."""
    report = on_two_engines(kv_cache_tokens=100)
    assert report(ObservationReady(0, 40)) == [(0, 0)]
    assert report(ObservationReady(1, 30)) == [(1, 1)]  # though both engines have room
    assert report(ObservationReady(2, 30)) == [(2, 1)]  # 30 + 40 on engine 1, 40 + 40 on engine 0
    assert report(ObservationReady(3, 10)) == [(3, 0)]  # 40 + 40 on engine 0, 60 + 40 on engine 1
    assert report(ObservationReady(4, 1)) == [(4, 0)]  # 50 + 40
    assert report(TurnFinished(0, 0, tokens(0))) == []
    assert report(ObservationReady(5, 20)) == [(5, 0)]  # 51 + 40; a rollout whose environment acts counts on
    assert report(ObservationReady(0, 50)) == [(0, 0)]  # one that has begun does not wait for room
    # Now 82 tokens on engine 0 and 60 on engine 1; the longest has 51. Environments of the ended are given on.
    assert report(RolloutFinished(4, 0, tokens(0), 1.0)) == []
    assert report(ObservationReady(6, 5)) == []
    assert report(RolloutFinished(2, 1, tokens(0), 1.0)) == [(6, 1)]  # 30 + 51


def test_an_engine_without_a_rollout_takes_any():
    """A context longer than all there is room for: it will be refused elsewhere, not wait for ever."""
    report = on_two_engines(kv_cache_tokens=100)
    assert [report(ObservationReady(one, 99)) for one in range(3)] == [[(0, 0)], [(1, 1)], []]
    assert report(RolloutFinished(0, 0, tokens(0), 1.0)) == [(2, 0)]


@pytest.mark.parametrize("kv_cache_tokens", [None, 0])
def test_without_a_limit_or_without_caches_nobody_waits(kv_cache_tokens):
    """Without a limit the engine with the shortest contexts is taken; without caches that with most free slots."""
    report = on_two_engines(kv_cache_tokens=kv_cache_tokens)
    starts = [report(ObservationReady(one, 10**9 if one == 0 else 10)) for one in range(6)]
    engines = [0, 1, 1, 1, 1, 0] if kv_cache_tokens is None else [0, 1, 0, 1, 0, 1]
    assert starts == [[(one, engine)] for one, engine in enumerate(engines)]
