"""The packed numbers of finished rollouts against a dictionary of plain values."""

import math
import pickle

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pipelinerl.records.step_ledger import FinishedRollouts
from pipelinerl.scheduler.events import VersionSpans

rising = st.lists(st.integers(1, 2**40), min_size=1, max_size=6, unique=True).map(sorted)
rollouts = st.tuples(rising, rising, st.integers(0, 2**40), st.none() | st.floats(allow_nan=False)).map(
    lambda drawn: (VersionSpans(tuple(drawn[0][: len(drawn[1])]), tuple(drawn[1][: len(drawn[0])])), drawn[2], drawn[3])
)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), rollouts),
        st.tuples(st.just("score"), st.tuples(st.integers(0), st.floats(allow_nan=False))),
        st.tuples(st.just("remove"), st.integers(0)),
        st.tuples(st.just("take"), st.lists(st.integers(0), min_size=1, max_size=5)),
    ),
    max_size=60,
)


def check_taken(taken, expected):
    """Compare what was gathered of some rollouts with their values, in the order asked for."""
    pieces = [
        (start, end, version, finish_version)
        for spans, finish_version, _ in expected
        for start, end, version in zip((0, *spans.ends), spans.ends, spans.versions, strict=False)
    ]
    columns = (taken.starts_N, taken.ends_N, taken.versions_N, taken.finish_versions_N)
    assert list(zip(*(one.tolist() for one in columns), strict=True)) == pieces
    rewards = [math.nan if reward is None else reward for _, _, reward in expected]
    assert taken.rewards_M == pytest.approx(rewards, abs=0, rel=0, nan_ok=True)


@given(operations=operations)
def test_rollouts_come_out_as_they_were_put_in_in_any_order(operations):
    finished, model = FinishedRollouts(), {}
    for number, (what, value) in enumerate(operations):
        ids = list(model)
        if what == "add":
            finished.add(number, *value)
            model[number] = value
        elif not ids:
            continue
        elif what == "score":
            pick, reward = value
            rollout_id = ids[pick % len(ids)]
            finished.score(rollout_id, reward)
            model[rollout_id] = (*model[rollout_id][:2], reward)
        elif what == "remove":
            rollout_id = ids[value % len(ids)]
            assert finished.remove(rollout_id) == model.pop(rollout_id)[0].num_tokens
        else:
            chosen = list(dict.fromkeys(ids[pick % len(ids)] for pick in value))
            check_taken(finished.take(chosen), [model.pop(rollout_id) for rollout_id in chosen])
        assert len(finished) == len(model)
        assert all((one in finished) == (one in model) for one in range(number + 1))


def test_nothing_is_kept_of_what_was_taken_or_removed():
    finished = FinishedRollouts()
    empty = pickle.dumps(finished)
    for rollout_id in range(50):
        finished.add(rollout_id, VersionSpans((1, 2, 3), (10, 20, 30)), 3, 1.0)
    finished.take(range(25))
    for rollout_id in range(25, 50):
        finished.remove(rollout_id)
    assert pickle.dumps(finished) == empty


def test_a_rollout_that_does_not_wait_is_not_found():
    finished = FinishedRollouts()
    finished.add(1, VersionSpans((0,), (5,)), 0, None)
    for call in (finished.remove, lambda one: finished.score(one, 1.0), lambda one: finished.take([one])):
        with pytest.raises(KeyError):
            call(2)
    assert 1 in finished
    assert finished.remove(1) == 5
