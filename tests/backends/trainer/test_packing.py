"""Packing conserves: every sequence is in one row, whole, with its numbers, and is trained on as if alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.interface import Sample
from backends.trainer.packing import PackedRow, pack
from pipelinerl.rl.segments import Segment, SegmentKind


def sample(rollout_id: int, prompt: int, answer: int) -> Sample:
    start = 1000 * rollout_id
    return Sample(
        rollout_id=rollout_id,
        prompt_P=np.arange(start, start + prompt),
        segments=(
            Segment.generated(
                np.arange(start + prompt, start + prompt + answer),
                -np.arange(1, answer + 1, dtype=np.float32) - rollout_id,
            ),
        ),
        reward=float(rollout_id),
        advantage=rollout_id / 2,
    )


lengths = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), max_size=30)


def samples_of(lengths_B: list[tuple[int, int]]) -> list[Sample]:
    return [sample(index, prompt, answer) for index, (prompt, answer) in enumerate(lengths_B)]


def packed(lengths_B: list[tuple[int, int]], pack_tokens: int, num_ranks: int) -> list[list[PackedRow]]:
    return pack(samples_of(lengths_B), pack_tokens=pack_tokens, num_ranks=num_ranks)


def test_two_sequences_make_one_row_and_observed_tokens_are_read_and_not_trained_on() -> None:
    said, seen, answer = np.array([3, 4]), np.array([5, 6, 7]), np.array([8])
    numbers = np.array([-1, -2], np.float32)
    segments = (Segment.generated(said, numbers), Segment.observed(seen), Segment.generated(answer, numbers[:1]))
    ((row,),) = pack([sample(0, 1, 1), replace(sample(1, 2, 1), segments=segments)], pack_tokens=10, num_ranks=1)[0:1]
    assert row.token_N.tolist() == [0, 1, 1000, 1001, 3, 4, 5, 6, 7, 8]
    assert row.position_N.tolist() == [0, 1, 0, 1, 2, 3, 4, 5, 6, 7]
    assert row.predictor_M.tolist() == [0, 3, 4, 8]
    assert row.answer_M.tolist() == [1, 3, 4, 8]
    assert row.sequence_M.tolist() == [0, 1, 1, 1]
    assert row.behaviour_logprob_M.tolist() == [-1, -1, -2, -1]
    assert row.advantage_M.tolist() == [0, 0.5, 0.5, 0.5]
    assert row.reward_M.tolist() == [0, 1, 1, 1]
    assert row.sample_index_S == (0, 1)
    assert {index: value.tolist() for index, value in row.split(row.answer_M).items()} == {0: [1], 1: [3, 4, 8]}


def test_a_rank_without_sequences_gets_an_empty_row() -> None:
    (_, (row,)) = packed([(2, 3)], 7, 2)
    assert (row.sample_index_S, row.token_N.tolist(), row.position_N.tolist()) == ((), [0], [0])
    assert row.split(row.reward_M) == {}


def test_few_sequences_are_spread_over_ranks_though_one_row_would_hold_them() -> None:
    rows = packed([(2, 2)] * 4, 100, 4)
    assert [[row.sample_index_S for row in rank] for rank in rows] == [[(0,)], [(1,)], [(2,)], [(3,)]]


def test_rows_of_like_length_run_at_the_same_time() -> None:
    rows = packed([(4, 4), (1, 1), (3, 4), (1, 2)], 8, 2)
    assert [[len(row.token_N) for row in rank] for rank in rows] == [[8, 3], [7, 2]]


@given(lengths, st.integers(24, 80), st.integers(1, 4), st.booleans())
def test_every_sequence_is_in_one_row_whole_with_its_numbers(
    lengths_B: list[tuple[int, int]], pack_tokens: int, num_ranks: int, with_reference: bool
) -> None:
    samples = samples_of(lengths_B)
    if with_reference:
        samples = [replace(one, reference_logprob_T=one.behaviour_logprob_T - 5) for one in samples]
    rows = [row for rank in pack(samples, pack_tokens=pack_tokens, num_ranks=num_ranks) for row in rank]
    assert sorted(index for row in rows for index in row.sample_index_S) == list(range(len(lengths_B)))
    for row in rows:
        assert np.array_equal(row.token_N[row.predictor_M + 1], row.answer_M)
        starts = np.flatnonzero(row.position_N == 0)
        sequences = np.split(row.token_N, starts[1:])
        answers, behaviour = row.split(row.answer_M), row.split(row.behaviour_logprob_M)
        if row.sample_index_S and with_reference:
            assert np.array_equal(row.reference_logprob_M, row.behaviour_logprob_M - 5)
        elif row.sample_index_S:
            assert row.reference_logprob_M is None
        for index, sequence in zip(row.sample_index_S, sequences, strict=False):
            expected = samples[index]
            assert np.array_equal(sequence, np.concatenate([expected.prompt_P, expected.answer_T]))
            assert np.array_equal(answers[index], expected.answer_T)
            assert np.array_equal(behaviour[index], expected.behaviour_logprob_T)
            assert set(row.split(row.advantage_M)[index]) == {np.float32(expected.advantage)}
            assert set(row.split(row.reward_M)[index]) == {np.float32(expected.reward)}
        assert np.array_equal(np.diff(row.position_N)[np.diff(row.position_N) != 1], 1 - np.diff(starts))


@given(lengths, st.integers(24, 80), st.integers(1, 4))
def test_rows_keep_the_limit_and_ranks_are_even(
    lengths_B: list[tuple[int, int]], pack_tokens: int, num_ranks: int
) -> None:
    ranks = packed(lengths_B, pack_tokens, num_ranks)
    tokens = [[len(row.token_N) if row.sample_index_S else 0 for row in rank] for rank in ranks]
    assert len(ranks) == num_ranks
    assert len({len(rank) for rank in ranks}) == 1
    assert all(0 <= length <= pack_tokens for rank in tokens for length in rank)
    totals, flat = [sum(rank) for rank in tokens], [length for rank in tokens for length in rank]
    assert sum(totals) == sum(prompt + answer for prompt, answer in lengths_B)
    assert max(totals) - min(totals) <= max(flat) - min(flat)


def scored(rollout_id: int, prompt: int, answer: int, scores: int) -> Sample:
    """A sample with the reference's log-probabilities of so many tokens."""
    return replace(sample(rollout_id, prompt, answer), reference_logprob_T=np.zeros(scores, np.float32))


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ([sample(0, 1, 1), sample(1, 2, 3)], r"got pack_tokens=4, rollout 1 has 5 tokens"),
        ([sample(0, 0, 1)], r"^prompt_P must have at least one token, rollout 0 has none"),
        (
            [replace(sample(0, 1, 3), routed_NLK=np.zeros((4, 2, 1), np.int16)), sample(1, 1, 2)],
            r"^routed_NLK must have a row for each of 3 tokens, rollout 1 has none$",
        ),
        (
            [replace(sample(0, 1, 3), routed_NLK=np.zeros((3, 2, 1), np.int16))],
            r"^routed_NLK must have a row for each of 4 tokens, rollout 0 has 3$",
        ),
        ([scored(0, 1, 3, 3), sample(1, 1, 2)], r"^reference_logprob_T must have shape \(2,\), rollout 1 has none$"),
        (
            [scored(0, 1, 3, 3), scored(1, 1, 2, 3)],
            r"^reference_logprob_T must have shape \(2,\), .* has shape \(3,\)$",
        ),
    ],
)
def test_a_sample_that_cannot_be_packed_is_named(samples: list[Sample], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        pack(samples, pack_tokens=4, num_ranks=1)


@pytest.mark.filterwarnings("ignore")
def test_a_gradient_is_of_generated_tokens_alone_and_all_others_are_read(model_path: Path) -> None:
    """Plain torch reads each sequence whole and keeps the terms of generated tokens only.

    Observed tokens are within four of the answers, and at the end of another, where they are no input of a prediction.
    """
    import torch
    import transformers
    from tiny_trainer import TEMPERATURE, plain_logprob, plain_loss, samples

    from backends.trainer.model import PolicyModel, load_policy, row_tensors

    batch = samples()
    batch[0] = replace(batch[0], segments=(*batch[0].segments, Segment.observed(np.array([5, 9, 7]))))
    assert sum(part.kind is SegmentKind.OBSERVED for one in batch for part in one.segments) == 5
    plain = transformers.AutoModelForCausalLM.from_pretrained(model_path).eval()
    logprob_M = torch.cat([plain_logprob(plain, one) for one in batch])
    expected = torch.autograd.grad(plain_loss(logprob_M, batch), list(plain.parameters()))
    model = PolicyModel(load_policy(str(model_path), device="cpu"), temperature=TEMPERATURE, value_head=False)
    ((row,),) = pack(batch, pack_tokens=400, num_ranks=1)
    packed_M, *_ = model(**row_tensors(row, torch.device("cpu")))
    gradients = torch.autograd.grad(plain_loss(packed_M, batch), list(model.parameters()))
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert torch.allclose(gradient, wanted, rtol=1e-4, atol=1e-5)
