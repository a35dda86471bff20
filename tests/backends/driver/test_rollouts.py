"""The data of a rollout in several requests: the experts of each token as it was first computed with."""

from __future__ import annotations

import numpy as np

from backends.driver.rollouts import RolloutData
from backends.interface import Generated
from pipelinerl.rl.problems import Problem
from pipelinerl.scheduler.events import VersionSpans


def answer(num_tokens: int, routed_NLK: np.ndarray | None) -> Generated:
    tokens = np.ones(num_tokens, np.int64)
    spans = VersionSpans((0,), (num_tokens,))
    return Generated(tokens, tokens.astype(np.float32), spans, aborted=True, routed_NLK=routed_NLK)


def test_routes_of_several_requests_are_joined_and_the_last_token_has_none() -> None:
    """A prompt of 2 tokens and 3 of an answer: 4 are routed. Then 2 observed and 4 more: 10 of 11, the first 4 anew."""
    data = RolloutData(Problem("?", None), (1, 1))
    first = np.full((4, 2, 1), 1, np.uint8)
    data.extend(answer(3, first))
    sample = data.sample(0, 0.0)
    assert sample.routed_NLK is not None
    assert sample.routed_NLK[:, 0, 0].tolist() == [1, 1, 1, 1, -1]
    data.observe((5, 5))
    data.extend(answer(4, np.full((10, 2, 1), 255, np.uint8)))
    routed_NLK = data.sample(0, 0.0).routed_NLK
    assert routed_NLK is not None
    assert routed_NLK.shape == (11, 2, 1)
    assert routed_NLK[:, 1, 0].tolist() == [1] * 4 + [255] * 6 + [-1]


def test_an_engine_that_returns_no_routes_leaves_none() -> None:
    data = RolloutData(Problem("?", None), (1,))
    data.extend(answer(3, None))
    assert data.sample(0, 0.0).routed_NLK is None
