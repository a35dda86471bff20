"""Rollouts of one micro-batch, packed into rows of tokens and split over the trainer's ranks.

A row is one forward pass of one rank: whole sequences without padding; positions start at 0 in each. All ranks get the
same number of rows, because every row has collectives. As the i-th rows of all ranks run at the same time and the
longest sets the pace, rows of about the same length go together.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backends.interface import Sample
from pipelinerl.rl.segments import all_tokens, loss_mask

# Legend of shapes: N tokens of a row, prompts included; M generated tokens of a row, which are trained on;
# S sequences of a row; B samples; T generated tokens of one sample.


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Some whole sequences, one after the other. A row without any has one token and trains on nothing."""

    sample_index_S: tuple[int, ...]
    """Its sample, by index in the list that was packed, rising."""
    token_N: NDArray[np.int64]
    position_N: NDArray[np.int64]
    """In its sequence, from 0."""
    predictor_M: NDArray[np.int64]
    """Where in the row each generated token is predicted: the index of the token before it, rising."""
    answer_M: NDArray[np.int64]
    sequence_M: NDArray[np.int64]
    """0 to S - 1."""
    behaviour_logprob_M: NDArray[np.float32]
    """Under the weights that sampled it (nats)."""
    advantage_M: NDArray[np.float32]
    reward_M: NDArray[np.float32]
    reference_logprob_M: NDArray[np.float32] | None
    """Under the reference model or the teacher (nats). None: not computed."""
    routed_NLK: NDArray[np.int16] | None = None
    """See ``Sample``."""

    @property
    def lengths_S(self) -> NDArray[np.int64]:  # noqa: N802  # shape letter
        """Tokens of each sequence, shape [S]; 1 for the padding token of an empty row."""
        return np.diff(np.append(np.flatnonzero(self.position_N == 0), len(self.position_N)))

    def split(self, value_M: NDArray[np.float32]) -> dict[int, NDArray[np.float32]]:
        """Return a value of each generated token by sample: index of the sample -> shape [T]."""
        ends_S = np.bincount(self.sequence_M, minlength=len(self.sample_index_S)).cumsum()
        return dict(zip(self.sample_index_S, np.split(value_M, ends_S[:-1]), strict=True)) if len(ends_S) else {}


def pack(samples: Sequence[Sample], *, pack_tokens: int, num_ranks: int) -> list[list[PackedRow]]:
    """Pack samples into rows of nearly equal length, as many for every rank, at least one, of at most ``pack_tokens``.

    Begins with the fewest rows that could hold all tokens and gives each sample, longest first, to the shortest row;
    if that does not fit, again with one more row per rank. The same input gives the same rows. The tokens of two ranks
    differ by at most as much as two rows do.

    ``ValueError`` if a sample is longer than ``pack_tokens``, its prompt is empty, or it has not one reference
    log-probability for each generated token, or not one row of routes for each token, or none where another sample has
    them.
    """
    length_B = [sample.num_tokens for sample in samples]
    for sample, length in zip(samples, length_B, strict=True):
        if length > pack_tokens:
            raise ValueError(
                f"pack_tokens must be at least the length of every sequence, got pack_tokens={pack_tokens}, "
                f"rollout {sample.rollout_id} has {length} tokens"
            )
        if not len(sample.prompt_P):
            raise ValueError(f"prompt_P must have at least one token, rollout {sample.rollout_id} has none")
    with_reference = any(sample.reference_logprob_T is not None for sample in samples)
    for sample in samples if with_reference else ():
        given, wanted = sample.reference_logprob_T, sample.answer_T.shape
        if given is None or given.shape != wanted:
            has = "none" if given is None else f"shape {given.shape}"
            raise ValueError(f"reference_logprob_T must have shape {wanted}, rollout {sample.rollout_id} has {has}")
    with_routes = any(sample.routed_NLK is not None for sample in samples)
    for sample in samples if with_routes else ():
        num_routed = None if sample.routed_NLK is None else len(sample.routed_NLK)
        if num_routed != sample.num_tokens:
            raise ValueError(
                f"routed_NLK must have a row for each of {sample.num_tokens} tokens, rollout {sample.rollout_id} has "
                f"{num_routed or 'none'}"
            )
    longest_first = sorted(range(len(samples)), key=lambda index: (-length_B[index], index))
    rows_per_rank = max(1, -(-sum(length_B) // (pack_tokens * num_ranks)))
    while (rows := _fill(longest_first, length_B, pack_tokens, rows_per_rank * num_ranks)) is None:
        rows_per_rank += 1
    rows.sort(key=lambda row: -sum(length_B[index] for index in row))
    return [[_row(samples, indices) for indices in rows[rank::num_ranks]] for rank in range(num_ranks)]


def _fill(longest_first: list[int], length_B: list[int], pack_tokens: int, num_rows: int) -> list[list[int]] | None:
    """Return the samples of each row, or None if some sample fits into none."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    shortest = [(0, row) for row in range(num_rows)]  # heap of (tokens, row)
    for index in longest_first:
        tokens, row = shortest[0]
        if tokens + length_B[index] > pack_tokens:
            return None
        rows[row].append(index)
        heapq.heapreplace(shortest, (tokens + length_B[index], row))
    return rows


def _row(samples: Sequence[Sample], indices: list[int]) -> PackedRow:
    indices = sorted(indices)
    packed = [samples[index] for index in indices]
    if not packed:
        nothing, no_number = np.zeros(0, np.int64), np.zeros(0, np.float32)
        token = np.zeros(1, np.int64)
        return PackedRow((), token, token, nothing, nothing, nothing, no_number, no_number, no_number, no_number)
    parts = [part for sample in packed for part in (sample.prompt_P, all_tokens(sample.segments))]
    masks = [mask for one in packed for mask in (np.zeros(len(one.prompt_P), bool), loss_mask(one.segments))]
    token_N, trained_M = np.concatenate(parts), np.flatnonzero(np.concatenate(masks))
    lengths = [sample.num_tokens for sample in packed]
    sequence_M = np.repeat(np.arange(len(packed)), lengths)[trained_M]
    routes = [one.routed_NLK for one in packed if one.routed_NLK is not None]  # all or none
    references = [one.reference_logprob_T for one in packed if one.reference_logprob_T is not None]  # all or none
    return PackedRow(
        sample_index_S=tuple(indices),
        token_N=token_N,
        position_N=np.concatenate([np.arange(length) for length in lengths]),
        predictor_M=trained_M - 1,
        answer_M=token_N[trained_M],
        sequence_M=sequence_M,
        behaviour_logprob_M=np.concatenate([sample.behaviour_logprob_T for sample in packed]),
        advantage_M=np.array([sample.advantage for sample in packed], np.float32)[sequence_M],
        reward_M=np.array([sample.reward for sample in packed], np.float32)[sequence_M],
        reference_logprob_M=np.concatenate(references) if references else None,
        routed_NLK=np.concatenate(routes) if routes else None,
    )
