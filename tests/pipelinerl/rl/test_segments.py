"""Segments of a rollout: they join, and only generated tokens are trained on."""

import numpy as np

from pipelinerl.rl.segments import (
    Segment,
    SegmentKind,
    all_tokens,
    behaviour_logprobs,
    extended,
    generated_tokens,
    loss_mask,
    turn_of_tokens,
)


def said(*tokens: int) -> Segment:
    return Segment.generated(np.array(tokens, np.int64), -np.array(tokens, np.float32))


def test_tokens_of_one_kind_become_one_segment_and_none_adds_nothing() -> None:
    (whole,) = extended(extended(extended((), said()), said(1, 2)), said(3))
    assert (whole.kind, whole.tokens.tolist(), whole.logprobs.tolist()) == (
        SegmentKind.GENERATED,
        [1, 2, 3],
        [-1, -2, -3],
    )
    assert extended((whole,), said()) == (whole,)


def test_an_observation_ends_a_turn() -> None:
    seen = Segment.observed(np.array([9]))
    assert turn_of_tokens([seen, said(3), seen, said(1, 2)]).tolist() == [1, 2, 2]


def test_observed_tokens_have_no_log_probability_and_no_loss() -> None:
    segments = extended(extended(extended((), said(1, 2)), Segment.observed(np.array([7, 8]))), said(3))
    assert all_tokens(segments).tolist() == [1, 2, 7, 8, 3]
    assert generated_tokens(segments).tolist() == [1, 2, 3]
    assert loss_mask(segments).tolist() == [True, True, False, False, True]
    assert behaviour_logprobs(segments).tolist() == [-1, -2, -3]


def test_a_rollout_without_tokens_has_none_of_any_kind() -> None:
    assert [len(of(())) for of in (all_tokens, generated_tokens, loss_mask, behaviour_logprobs)] == [0, 0, 0, 0]
