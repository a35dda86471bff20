"""The trainer of a policy that learns during a simulated run; the simulated cluster calls it.

Simulated time decides which rollouts are trained on and which weights sample each token; the gradient of a micro-batch
is computed when its training starts, at the weights of that version; the last micro-batch makes the optimizer step.

Theory of operation. An engine must know when the next rollout in its batch finishes, so an answer is generated to its
end as soon as it joins a batch, by the weights that the engine then has (``begin``). When other weights arrive, tokens
that the engine has not made by then are thrown away and generated again (``go_on``), as in an engine that samples token
by token. With ``keep`` the keys and values of earlier tokens stay as older weights computed them. Wherever an engine
fills a cache anew (``recompute``; a rollout that was aborted or preempted joins again), its weights compute them again.

Rollouts start in the order of their numbers, so the first missing answer is generated together with a batch of the next
ones, once per version. Answers are functions of their rollout, prompt and weights (``sampling``): generating ahead does
not change them.

With turns, each turn is generated to its end when it joins a batch, on keys and values computed by the weights it
begins with, together with turns of other rollouts whose environments act.

The sampler works on ``ROWS`` rows of fixed sizes. The result of a row depends on its own content only, to the last
bit, and the random number of a token is a function of (seed, rollout, position). So an answer is a function of its
prompt, the weights that sample each of its tokens, and whether its KV cache was kept or computed again when they
changed. It does not depend on the other rows, on how many pieces it is generated in, or on how far ahead of simulated
time. Keys and values of an answer of n tokens reach to token n - 2: token n - 1 is read in the step that samples
token n.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from pipelinerl.config.environment import TurnsConfig
from pipelinerl.config.run import PolicyConfig, RunConfig
from pipelinerl.errors import ConfigError, RunFailedError
from pipelinerl.records.reports import Reached, RewardReport, RunMeasurements
from pipelinerl.records.steps import StepRow
from pipelinerl.records.trace import Trace
from pipelinerl.rl.ess import RatioMeans, RatioStats
from pipelinerl.rl.losses import policy_loss
from pipelinerl.rl.segments import leave_one_out
from pipelinerl.scheduler import events
from sim.interface import Request
from sim.learning.policy import Cache, PolicyShape, Weights, decode, forward, initial_weights, new_cache
from sim.learning.tasks import END, NUM_WORDS, Calculator, TokenTask, checked_task, make_task, problem
from sim.workload import named_stream

# Legend of shapes: M rows; L positions of an answer; T of prompt and answer; P of the prompt.

ROWS = 64
"""Answers sampled at a time (count)."""


class RowCache(NamedTuple):
    """One answer's keys and values, in a cache that it shares with others."""

    cache: Cache
    row: int


class Draft:
    """An answer: its tokens so far, and its further tokens under the present weights (mutable).

    An answer of several turns also holds the observations between them.
    """

    def __init__(
        self, rollout_id: int, prompt: tuple[int, ...], max_tokens: int, longest_turn: int | None = None
    ) -> None:
        self.rollout_id = rollout_id
        self.prompt = prompt
        self.word_L: NDArray[np.int64] = np.zeros(max_tokens, dtype=np.int64)
        self.logprob_L: NDArray[np.float32] = np.zeros(max_tokens, dtype=np.float32)
        self.generated_L: NDArray[np.bool_] = np.ones(max_tokens, dtype=np.bool_)  # False: observed
        self.num_kept = 0  # tokens that the next call of the sampler leaves as they are
        self.length = 0  # tokens when its turn is finished
        self.limit = min(longest_turn or max_tokens, max_tokens)  # tokens at which its turn is cut
        self.num_observed = 0  # tokens among them that were observed, all before its turn
        self.num_turns = 1  # turns so far
        self.turn_start = 0  # tokens before its turn
        self.cache: RowCache | None = None  # None: the next weights compute it again

    @property
    def num_generated(self) -> int:
        """Tokens that weights have sampled, when its turn is finished (count)."""
        return self.length - self.num_observed

    def observe(self, words: Sequence[int], *, longest_turn: int) -> None:
        """Begin another turn after an observation; its first weights recompute the cache."""
        first, self.length = self.length, self.length + len(words)
        self.word_L[first : self.length] = words
        self.generated_L[first : self.length] = False
        self.num_observed += len(words)
        self.num_turns += 1
        self.turn_start, self.cache = self.length, None
        self.limit = min(self.length + longest_turn, len(self.word_L))


class Sampler:
    """Completes the turns of drafts, on prompts of ``prompt_tokens``; ``shape`` has positions for prompt and answer.

    With ``keep_caches`` completed drafts keep their keys and values.
    """

    def __init__(
        self, shape: PolicyShape, *, prompt_tokens: int, temperature: float, seed: int, keep_caches: bool
    ) -> None:
        self._shape = shape
        self._prompt_tokens = prompt_tokens
        self._max_tokens = shape.positions - prompt_tokens
        self.temperature = temperature
        self._seed = seed
        self._keep_caches = keep_caches

    @torch.inference_mode()  # type: ignore[untyped-decorator]  # torch is Any to mypy
    def complete(self, weights: Weights, drafts: Sequence[Draft]) -> None:
        """Sample each draft to the end of its turn, after the tokens it keeps."""
        rows = _Rows(self._shape, longest=self._max_tokens)
        pending = deque(drafts)
        while pending or rows.num_active:
            if pending and rows.num_active <= ROWS // 2:
                rows.harvest(keep_caches=self._keep_caches)
                free = rows.free()
                loaded = [pending.popleft() for _ in range(min(len(free), len(pending)))]
                self._load(weights, rows, free[: len(loaded)], loaded)
            logit_MV = decode(weights, self._shape, rows.cache, word_M=rows.word_M, position_M=rows.position_M)
            rows.sample((logit_MV / self.temperature).log_softmax(-1))
        rows.harvest(keep_caches=self._keep_caches)

    def _load(self, weights: Weights, rows: _Rows, free: list[int], drafts: list[Draft]) -> None:
        self._fill_caches(weights, rows.cache, free, drafts)
        rollout_R = np.array([draft.rollout_id for draft in drafts], dtype=np.uint64)
        kept_R = torch.tensor([draft.num_kept for draft in drafts])
        longest = self._max_tokens
        rows.uniform_ML[free, :longest] = torch.from_numpy(uniforms(self._seed, rollout_R, longest))
        rows.answer_ML[free, :longest] = torch.from_numpy(np.stack([draft.word_L for draft in drafts]))
        rows.logprob_ML[free, :longest] = torch.from_numpy(np.stack([draft.logprob_L for draft in drafts]))
        rows.word_M[free] = torch.tensor([int(([*one.prompt, *one.word_L[: one.num_kept]])[-1]) for one in drafts])
        rows.index_M[free] = kept_R
        rows.position_M[free] = self._prompt_tokens - 1 + kept_R
        rows.limit_M[free] = torch.tensor([draft.limit for draft in drafts])
        rows.active_M[free] = True
        for row, draft in zip(free, drafts, strict=True):
            rows.owners[row] = draft

    def _fill_caches(self, weights: Weights, cache: Cache, rows: list[int], drafts: list[Draft]) -> None:
        """Fill the cache of each row up to the step that samples the draft's next token."""
        fresh = [(row, draft) for row, draft in zip(rows, drafts, strict=True) if not draft.num_kept]
        again = [(row, one) for row, one in zip(rows, drafts, strict=True) if one.num_kept and one.cache is None]
        self._prefill(weights, cache, fresh, length=self._prompt_tokens)
        self._prefill(weights, cache, again, length=self._shape.positions)
        kept = [(row, one.cache) for row, one in zip(rows, drafts, strict=True) if one.num_kept and one.cache]
        if kept:
            places = [row for row, _ in kept]
            cache.key_KMHDT[:, places] = torch.stack([one.cache.key_KMHDT[:, one.row] for _, one in kept], 1)
            cache.value_KMHTD[:, places] = torch.stack([one.cache.value_KMHTD[:, one.row] for _, one in kept], 1)

    def _prefill(self, weights: Weights, cache: Cache, pairs: list[tuple[int, Draft]], *, length: int) -> None:
        """Compute the keys and values of prompts and kept tokens, ``length`` positions of always ``ROWS`` rows."""
        if not pairs:
            return
        word_MT = torch.zeros(ROWS, length, dtype=torch.int64)
        for place, (_, draft) in enumerate(pairs):
            words = [*draft.prompt, *draft.word_L[: draft.num_kept].tolist()]
            word_MT[place, : len(words)] = torch.tensor(words)
        _, computed = forward(weights, self._shape, word_MT)
        rows = [row for row, _ in pairs]
        cache.key_KMHDT[:, rows, ..., :length] = computed.key_KMHDT[:, : len(rows)]
        cache.value_KMHTD[:, rows, :, :length] = computed.value_KMHTD[:, : len(rows)]


class _Rows:
    """The answers that are being sampled, a row each, and the inputs of the next step (mutable).

    A row without an answer, or whose answer has ended, is computed like any other. Its results are written where
    nothing reads them: behind the longest answer, and at the last position, whose key and value no step reads.
    """

    def __init__(self, shape: PolicyShape, *, longest: int) -> None:
        self._longest, self._last = longest, shape.positions - 1
        self._row_M = torch.arange(ROWS)
        self._length_M = torch.zeros(ROWS, dtype=torch.int64)
        self.cache = new_cache(shape, rows=ROWS)
        self.owners: list[Draft | None] = [None] * ROWS
        self.num_active = 0
        self.active_M = torch.zeros(ROWS, dtype=torch.bool)
        self.limit_M = torch.full((ROWS,), longest)  # tokens at which it is cut
        self.word_M = torch.zeros(ROWS, dtype=torch.int64)  # read next
        self.position_M = torch.full((ROWS,), self._last)  # where it stands
        self.index_M = torch.full((ROWS,), longest)  # of the token of the answer that is sampled next
        self.answer_ML = torch.zeros(ROWS, longest + 1, dtype=torch.int64)
        self.logprob_ML = torch.zeros(ROWS, longest + 1)
        self.uniform_ML = torch.zeros(ROWS, longest + 1)

    def sample(self, logprob_MV: torch.Tensor) -> None:
        """Sample the next token of every row."""
        row_M, index_M = self._row_M, self.index_M
        below_MV = logprob_MV.exp().cumsum(-1)
        drawn_M = self.uniform_ML[row_M, index_M] * below_MV[:, -1]
        self.word_M = (below_MV <= drawn_M[:, None]).sum(-1)
        self.answer_ML[row_M, index_M] = self.word_M
        self.logprob_ML[row_M, index_M] = logprob_MV[row_M, self.word_M]
        ended_M = self.active_M & ((self.word_M == END) | (index_M == self.limit_M - 1))
        self._length_M = torch.where(ended_M, index_M + 1, self._length_M)
        self.active_M = self.active_M & ~ended_M
        self.index_M = torch.where(self.active_M, index_M + 1, self._longest)
        self.position_M = torch.where(self.active_M, self.position_M + 1, self._last)
        self.num_active = int(self.active_M.sum())

    def free(self) -> list[int]:
        """Return the rows without an answer."""
        return [row for row, owner in enumerate(self.owners) if owner is None]

    def harvest(self, *, keep_caches: bool) -> None:
        """Hand finished rows to their drafts and free them."""
        running = self.active_M.tolist()
        pairs = [(row, one) for row, one in enumerate(self.owners) if one is not None and not running[row]]
        if not pairs:
            return
        rows = [row for row, _ in pairs]
        saved = Cache(self.cache.key_KMHDT[:, rows], self.cache.value_KMHTD[:, rows]) if keep_caches else None
        lengths = self._length_M.tolist()
        word_RL, logprob_RL = self.answer_ML[rows].numpy(), self.logprob_ML[rows].numpy()
        for place, (row, draft) in enumerate(pairs):
            self.owners[row] = None
            draft.length = lengths[row]
            draft.word_L, draft.logprob_L = word_RL[place, :-1], logprob_RL[place, :-1]
            draft.cache = None if saved is None else RowCache(saved, place)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seed: int, rollout_R: NDArray[np.uint64], positions: int) -> NDArray[np.float32]:
    """Return random numbers in [0, 1), multiples of 2^-24, shape [R, positions]: a hash of (seed, rollout, position).

    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators" (SplitMix64's mixing).
    """
    start = _mixed(np.array([seed % 2**64], dtype=np.uint64) + _GOLDEN)
    rollout_start_R = _mixed(rollout_R * _GOLDEN + start)
    position_L = np.arange(1, positions + 1, dtype=np.uint64) * _GOLDEN
    bits_RL = _mixed(rollout_start_R[:, None] + position_L)
    uniform_RL: NDArray[np.float32] = (bits_RL >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    return uniform_RL


def _mixed(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


JOINED_BEFORE = -1
"""In place of the tokens that a rollout had when it joined: if it joins again, its cache is computed again."""
PROMPTS_KEPT = 10_000
"""Prompts that are remembered (count)."""


class _Piece(NamedTuple):
    """Tokens of a rollout that one version sampled in a row, on one KV cache."""

    num_before: int
    """Tokens before them (count)."""
    version: int
    anew: bool
    """Whether this version computed the keys and values of the tokens before them."""


def _pieces(spans: events.VersionSpans, refills: Set[int], recompute: bool) -> list[_Piece]:
    """Cut the spans of a rollout where its keys and values were computed anew."""
    starts = dict(zip((0, *spans.ends[:-1]), spans.versions, strict=True))
    pieces: list[_Piece] = []
    for num_before in sorted(starts.keys() | refills):
        version = starts[num_before] if num_before in starts else pieces[-1].version
        pieces.append(_Piece(num_before, version, recompute or num_before in refills))
    return pieces


class LookaheadAnswers:
    """Keeps the answers of rollouts that are started and not yet trained on or given up.

    An answer has at most ``max_tokens``, all turns and observations together, a turn ``longest_turn``. ``turns``, if
    any, has the limits of the turns of a ``Calculator``. ``look_ahead`` rollouts usually start between two weight
    updates.
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        task: TokenTask,
        seed: int,
        group_size: int,
        max_tokens: int,
        longest_turn: int,
        turns: TurnsConfig | None,
        look_ahead: int,
        weights: Weights,
    ) -> None:
        self._sampler = sampler
        self._task = task
        self._seed = seed
        self._group_size = group_size
        self._max_tokens = max_tokens
        self._longest_turn = longest_turn
        self._turns = turns
        self._look_ahead = -(-look_ahead // ROWS) * ROWS  # a sampler's rows cost the same, used or not
        self._weights = {0: weights}
        self._prompts: dict[int, tuple[int, ...]] = {}  # by number; any may be missing
        self._prompt_ids: dict[int, int] = {}  # of rollouts that are asked for
        self._drafts: dict[int, Draft] = {}  # of rollouts that have joined a batch
        self._made_by: dict[int, tuple[int, int]] = {}  # version that made the last tokens of each, and its tokens then
        self._ahead: dict[int, dict[int, Draft]] = {0: {}}  # by version, of those that may join next
        self._between: dict[int, Draft] = {}  # of rollouts between two turns

    # ------------------------------------------------------------------------------------ from the simulated cluster

    def ask(self, rollout_id: int, prompt_id: int) -> None:
        """Note a rollout that is on its way to an engine."""
        self._prompt_ids[rollout_id] = prompt_id

    def publish(self, version: int, weights: Weights, *, oldest: int) -> None:
        """Keep the weights of a version; drop versions before ``oldest``, which no engine has any more."""
        self._weights[version], self._ahead[version] = weights, {}
        for old in [one for one in self._weights if one < oldest]:
            del self._weights[old], self._ahead[old]

    def weights(self, version: int) -> Weights:
        """Return the weights of a version that was published and has not been forgotten."""
        return self._weights[version]

    @property
    def versions(self) -> set[int]:
        """Versions whose weights are kept."""
        return set(self._weights)

    def answer(self, rollout_id: int) -> Draft:
        """Return a finished rollout, and free its cache."""
        draft = self._drafts[rollout_id]
        draft.cache = None
        return draft

    def forget(self, rollout_id: int) -> None:
        """Forget a rollout that will not be trained on, or has been."""
        self._prompt_ids.pop(rollout_id, None)
        self._drafts.pop(rollout_id, None)
        self._made_by.pop(rollout_id, None)
        self._between.pop(rollout_id, None)

    def end_turn(self, rollout_id: int) -> int | None:
        """Have the environment answer a turn; return the tokens of its answer. None: the rollout has finished."""
        draft = self._drafts[rollout_id]
        words = self._observation(draft)
        if words is None:
            return None
        draft.observe(words, longest_turn=self._longest_turn)
        self._between[rollout_id] = draft
        return len(words)

    def _observation(self, draft: Draft) -> list[int] | None:
        """Return the observation after a draft's turn; None: that turn is its last."""
        if self._turns is None or draft.num_turns == self._turns.max:
            return None
        assert isinstance(self._task, Calculator)
        words = self._task.observe(draft.word_L[draft.turn_start : draft.length].tolist())
        if words is None or draft.length + len(words) >= self._max_tokens:
            return None
        return words

    # ----------------------------------------------------------------------------------- from the engines

    def begin(self, request: Request, version: int) -> None:
        """Set the length of a rollout that joins a batch now; the same again if it is asked again."""
        rollout_id, num_tokens = request.rollout_id, request.spans.num_tokens
        if self._made_by.get(rollout_id) != (version, num_tokens):
            if num_tokens:
                self._go_on_anew(rollout_id, num_tokens, version)
            else:
                self._drafts[rollout_id] = self._fresh(rollout_id, version)
                self._made_by[rollout_id] = (version, 0)
        self._between.pop(rollout_id, None)
        self._finish(request)

    def go_on(self, requests: Sequence[Request], num_tokens: Sequence[int], version: int, *, recompute: bool) -> None:
        """Set the lengths of rollouts that have ``num_tokens`` (1 at least) and other weights from now on.

        ``recompute``: these weights compute the keys and values of these tokens again.
        """
        drafts = [self._cut(one.rollout_id, num) for one, num in zip(requests, num_tokens, strict=True)]
        for draft in drafts:
            assert recompute or draft.cache is not None  # the sampler keeps caches wherever engines do
            draft.cache = None if recompute else draft.cache
        self._sampler.complete(self._weights[version], drafts)
        for request in requests:
            self._finish(request)
            self._made_by[request.rollout_id] = (version, JOINED_BEFORE)

    # -------------------------------------------------------------------------------------- from a trace

    def restore(
        self, spans: Mapping[int, events.VersionSpans], refills: Mapping[int, Set[int]], *, recompute: bool
    ) -> None:
        """Generate rollouts again as engines have reported them: by the versions of their tokens (``spans``).

        ``refills``: at how many tokens each lost its keys and values, which were then computed anew, with
        ``recompute`` at every change of version.
        """
        pieces = {rollout_id: _pieces(one, refills[rollout_id], recompute) for rollout_id, one in spans.items()}
        for rollout_id in spans:
            self._drafts[rollout_id] = self._draft(rollout_id, self._prompt_ids[rollout_id])
        for place in range(max(len(one) for one in pieces.values())):
            by_version: dict[int, list[Draft]] = {}
            for rollout_id, one in pieces.items():
                if place < len(one):
                    piece = one[place]
                    if place and piece.num_before == self._drafts[rollout_id].num_generated:
                        self.end_turn(rollout_id)  # else it would have finished before
                    draft = self._cut(rollout_id, piece.num_before)
                    draft.cache = None if piece.anew else draft.cache
                    by_version.setdefault(piece.version, []).append(draft)
            for version, drafts in by_version.items():
                self._sampler.complete(self._weights[version], drafts)

    # ---------------------------------------------------------------------------------------- generation

    def _cut(self, rollout_id: int, num_tokens: int) -> Draft:
        draft = self._drafts[rollout_id]
        draft.num_kept = draft.num_observed + num_tokens
        return draft

    def _draft(self, rollout_id: int, prompt_id: int) -> Draft:
        return Draft(rollout_id, self._prompt(prompt_id), self._max_tokens, self._longest_turn)

    def _finish(self, request: Request) -> None:
        """Let a request end with its turn; set whether another follows."""
        draft = self._drafts[request.rollout_id]
        request.finish_at(draft.num_generated)
        request.goes_on = self._observation(draft) is not None

    def _go_on_anew(self, rollout_id: int, num_tokens: int, version: int) -> None:
        """Generate the turn of a rollout on a new cache, and the next turns of some whose environments act."""
        drafts = [self._cut(rollout_id, num_tokens)]
        self._made_by[rollout_id] = (version, num_tokens)
        for number, draft in self._between.items():
            made_by = (version, draft.turn_start - draft.num_observed)
            if len(drafts) < ROWS and number != rollout_id and self._made_by[number] != made_by:
                drafts.append(self._cut(number, made_by[1]))
                self._made_by[number] = made_by
        for draft in drafts:
            draft.cache = None
        self._sampler.complete(self._weights[version], drafts)

    def _fresh(self, rollout_id: int, version: int) -> Draft:
        """Return the answer of a starting rollout; generate the probable next ones in the same batch."""
        ahead, prompt_id = self._ahead[version], self._prompt_ids[rollout_id]
        draft = self._draft(rollout_id, prompt_id)
        found = ahead.pop(rollout_id, None)
        if found is not None and found.prompt == draft.prompt:
            return found
        drafts = [draft]
        group = rollout_id // self._group_size
        for number in range(rollout_id + 1, rollout_id + self._look_ahead):
            if number not in ahead and number not in self._drafts:
                probable = self._prompt_ids.get(number, prompt_id + number // self._group_size - group)
                ahead[number] = self._draft(number, probable)
                drafts.append(ahead[number])
        self._sampler.complete(self._weights[version], drafts)
        return draft

    def _prompt(self, prompt_id: int) -> tuple[int, ...]:
        prompt = self._prompts.get(prompt_id)
        if prompt is None:
            if len(self._prompts) > PROMPTS_KEPT:
                self._prompts.clear()
            prompt = self._prompts[prompt_id] = problem(self._task, seed=self._seed, prompt_id=prompt_id)
        return prompt


# Legend of shapes: B rollouts of a micro-batch; T positions; N flat tokens of answers.

BETAS = (0.9, 0.95)
"""Adam's decays (no unit)."""

LEVELS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
"""Mean rewards whose time is reported (no unit)."""
REACHED_STEPS = 8
"""Steps over which the mean reward is taken, to find when a level was reached (count)."""


class Learner:
    """A policy, its optimizer, and the answers it gives, of one run with the table ``policy``.

    Raises ConfigError if task and policy do not fit the run, or the base model is not finite.
    """

    def __init__(self, config: RunConfig) -> None:
        policy = config.policy
        assert policy is not None
        self._policy = policy
        self._task = checked_task(config)
        self._group_size = config.workload.group_size
        self._batch_size = config.scheduler.train_batch_size
        self.prompt_tokens = self._task.prompt_tokens
        longest_turn = config.workload.length.max
        turns = None if config.environment is None else config.environment.turns
        positions = self.prompt_tokens + longest_turn if turns is None else turns.context_max
        self._shape = policy_shape(policy, positions=positions)
        self._weights: Weights = base_model(policy, positions=positions)
        if not all(bool(torch.isfinite(one).all()) for one in self._weights.values()):
            raise ConfigError(
                "policy.warm_start.learning_rate is too large: the base model is not finite, got "
                f"learning_rate={policy.warm_start.learning_rate:g}"
            )
        for one in self._weights.values():
            one.requires_grad_()
        self._optimizer = torch.optim.Adam(self._weights.values(), lr=policy.learning_rate, betas=BETAS)
        keeps = not config.colocated and config.scheduler.weight_update is events.WeightUpdate.KEEP
        steps = config.scheduler.optimizer_steps_per_rl_step if config.colocated else 1
        self.answers = LookaheadAnswers(
            Sampler(
                self._shape,
                prompt_tokens=self.prompt_tokens,
                temperature=policy.temperature,
                seed=config.seed,
                keep_caches=keeps,
            ),
            task=self._task,
            seed=config.seed,
            group_size=self._group_size,
            max_tokens=positions - self.prompt_tokens,
            longest_turn=longest_turn,
            turns=turns,
            look_ahead=steps * self._batch_size,
            weights=self._snapshot(),
        )
        self._spans: dict[int, events.VersionSpans] = {}
        self._rewards: dict[int, float] = {}
        self._ratios = RatioStats(policy.loss)
        # Of the optimizer steps that are done: their ESS, their mean rewards, and when they were.
        self._ratio_means = RatioMeans()
        self._mean_rewards: list[float] = []
        self._times_s: list[float] = []

    # ------------------------------------------------------------------------ from the simulated cluster

    def finished(self, rollout_id: int, spans: events.VersionSpans) -> float:
        """Return the reward of a rollout that has its last token."""
        answer = self.answers.answer(rollout_id)
        assert answer.num_generated == spans.num_tokens  # engine and policy agree
        self._spans[rollout_id] = spans
        self._rewards[rollout_id] = float(self._task.is_right(answer.prompt, answer.word_L[: answer.length].tolist()))
        return self._rewards[rollout_id]

    def forget(self, rollout_id: int) -> None:
        """Forget a rollout that will not be trained on."""
        self.answers.forget(rollout_id)
        self._spans.pop(rollout_id, None)
        self._rewards.pop(rollout_id, None)

    def publish(self, version: int, *, oldest: int) -> None:
        """Keep the trainer's weights for the engines, as a version; no engine has one before ``oldest``."""
        self.answers.publish(version, self._snapshot(), oldest=oldest)

    def train(self, command: events.StartTraining) -> None:
        """Train on a micro-batch; step if it completes the batch. RunFailedError if loss or gradient is not finite."""
        rollout_ids = sorted(command.rollout_ids)  # sums do not depend on the order in which rollouts finished
        loss = self._loss(rollout_ids, command.version)
        if not math.isfinite(value := float(loss.detach())):
            raise self._diverged("the loss", value, command.version)
        loss.backward()
        for rollout_id in rollout_ids:
            self.forget(rollout_id)
        if command.completes_step:
            norm = float(torch.nn.utils.clip_grad_norm_(self._weights.values(), self._policy.gradient_clip))
            if not math.isfinite(norm):
                raise self._diverged("the norm of the gradient", norm, command.version)
            self._optimizer.step()
            self._optimizer.zero_grad()

    # ------------------------------------------------------------------------------------------- results

    def take_metrics(self, row: StepRow) -> dict[str, float]:
        """Return the metrics of a finished optimizer step, and reset them."""
        metrics = {
            "reward/mean": row.reward_mean,
            "length/mean": row.length_mean,
            "lag/mean": row.lag_mean,
            "lag/max": float(row.lag_max),
            **self._ratios.metrics(),
        }
        self._ratios = RatioStats(self._policy.loss)
        self._ratio_means.add(metrics)
        self._mean_rewards.append(row.reward_mean)
        self._times_s.append(row.time_s)
        return metrics

    def summary(self) -> RunMeasurements:
        """Return the part of the report that only a learning run has."""
        rewards = self._mean_rewards
        if not rewards:
            return RunMeasurements()
        ess, mismatch = self._ratio_means.summary()
        return RunMeasurements(
            ess=ess,
            mismatch=mismatch,
            reward=RewardReport(
                first=rewards[0],
                last=_mean(rewards[-max(1, len(rewards) // 10) :]),
                max=max(rewards),
                reached=self._reached(rewards),
            ),
            weights_sha256=self.fingerprint(),
        )

    def _reached(self, rewards: Sequence[float]) -> dict[str, Reached]:
        """Return when the mean reward of the last few steps first was at each level."""
        reached: dict[str, Reached] = {}
        for step in range(REACHED_STEPS, len(rewards) + 1):
            mean = _mean(rewards[step - REACHED_STEPS : step])
            for level in LEVELS:
                if mean >= level and f"{level:g}" not in reached:
                    samples = float(step * self._batch_size)
                    reached[f"{level:g}"] = Reached(time_s=self._times_s[step - 1], samples=samples)
        return reached

    def fingerprint(self) -> str:
        """Return the SHA-256 of the trained weights."""
        digest = hashlib.sha256()
        for name in sorted(self._weights):
            digest.update(self._weights[name].detach().numpy().tobytes())
        return digest.hexdigest()

    # --------------------------------------------------------------------------------------------- parts

    def _loss(self, rollout_ids: Sequence[int], version: int) -> torch.Tensor:
        """Return the loss of a micro-batch, and take note of its importance weights."""
        answers = [self.answers.answer(rollout_id) for rollout_id in rollout_ids]
        first, longest = self.prompt_tokens, max(answer.length for answer in answers)
        word_BT = torch.zeros(len(answers), first + longest, dtype=torch.int64)
        is_token_BT = torch.zeros(len(answers), longest, dtype=torch.bool)  # False: observed
        for place, answer in enumerate(answers):
            word_BT[place, :first] = torch.tensor(answer.prompt)
            word_BT[place, first : first + answer.length] = torch.from_numpy(answer.word_L[: answer.length])
            is_token_BT[place, : answer.length] = torch.from_numpy(answer.generated_L[: answer.length])
        logit_BTV, _ = forward(self._weights, self._shape, word_BT[:, :-1])
        logprob_BTV = (logit_BTV[:, first - 1 :] / self._policy.temperature).log_softmax(-1)
        logprob_BT = logprob_BTV.gather(2, word_BT[:, first:, None])[..., 0]
        logprob_N = logprob_BT[is_token_BT]
        behaviour_logprob_N = torch.from_numpy(
            np.concatenate([one.logprob_L[: one.length][one.generated_L[: one.length]] for one in answers])
        )
        lengths = [answer.num_generated for answer in answers]
        sequence_N = torch.repeat_interleave(torch.arange(len(answers)), torch.tensor(lengths))
        log_ratio_N = logprob_N.detach() - behaviour_logprob_N
        if not bool(torch.isfinite(log_ratio_N).all()):
            raise self._diverged("an importance weight", float("nan"), version)
        self._note_ratios(rollout_ids, log_ratio_N, lengths, version)
        loss_N = policy_loss(
            self._policy.loss,
            logprob_N=logprob_N,
            behaviour_logprob_N=behaviour_logprob_N,
            advantage_N=self._advantages(rollout_ids)[sequence_N],
            sequence_N=sequence_N,
            num_sequences=len(answers),
        )
        return loss_N.sum() / self._batch_size

    def _advantages(self, rollout_ids: Sequence[int]) -> torch.Tensor:
        """Return the advantage of each rollout: groups are trained whole, so siblings stand side by side."""
        rewards = [self._rewards[rollout_id] for rollout_id in rollout_ids]
        size = self._group_size
        groups = [leave_one_out(rewards[start : start + size]) for start in range(0, len(rewards), size)]
        return torch.from_numpy(np.concatenate(groups).astype(np.float32))

    def _note_ratios(
        self, rollout_ids: Sequence[int], log_ratio_N: torch.Tensor, lengths: Sequence[int], version: int
    ) -> None:
        for rollout_id, log_ratio_T in zip(
            rollout_ids, np.split(log_ratio_N.numpy(), np.cumsum(lengths)[:-1]), strict=True
        ):
            spans = self._spans[rollout_id]
            counts = np.diff(spans.ends, prepend=0)
            self._ratios.add(log_ratio_T, version - np.repeat(spans.versions, counts))

    def _snapshot(self) -> Weights:
        return {name: one.detach().clone() for name, one in self._weights.items()}

    def _diverged(self, what: str, value: float, version: int) -> RunFailedError:
        return RunFailedError(
            f"diverged: {what} is {value} in optimizer step {version + 1}; the policy cannot learn at this lag, "
            "or policy.learning_rate is too large"
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@contextmanager
def one_thread() -> Iterator[None]:
    """Have torch compute on one thread: the matrices are small, and more threads may change the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# -------------------------------------------------------------------------------------- base model

IGNORED = -100
"""Target of a position that is not learned."""


@lru_cache(maxsize=4)
def _made(policy_json: str, positions: int) -> Weights:
    config = PolicyConfig.model_validate_json(policy_json)
    task, start = make_task(config), config.warm_start
    shape = policy_shape(config, positions=positions)
    weights = initial_weights(shape, seed=start.seed % 2**63)
    for one in weights.values():
        one.requires_grad_()
    optimizer = torch.optim.Adam(weights.values(), lr=start.learning_rate, betas=(0.9, 0.98))
    for step in range(start.steps):
        for group in optimizer.param_groups:
            group["lr"] = start.learning_rate * min(1.0, (step + 1) / 20) * (1.0 - 0.9 * step / start.steps)
        word_BT, target_BT = _demonstrations(task, start.seed, step, start.batch_size)
        logit_BTV, _ = forward(weights, shape, word_BT)
        loss = functional.cross_entropy(logit_BTV.flatten(0, 1), target_BT.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
    return {name: one.detach() for name, one in weights.items()}


def base_model(config: PolicyConfig, *, positions: int) -> Weights:
    """Return fresh copies of the weights that every run of this policy starts from; made once per process.

    They depend on task, sizes (``positions``: longest prompt and answer together, in tokens) and ``warm_start`` only.
    """
    used = config.model_copy(update={"learning_rate": 1.0, "gradient_clip": 1.0, "temperature": 1.0})
    weights = _made(used.model_dump_json(exclude={"loss"}), positions)
    return {name: one.clone() for name, one in weights.items()}


def policy_shape(config: PolicyConfig, *, positions: int) -> PolicyShape:
    """Return the sizes of a policy."""
    return PolicyShape(
        words=NUM_WORDS, positions=positions, layers=config.layers, width=config.width, heads=config.heads
    )


def _demonstrations(task: TokenTask, seed: int, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the words of a batch of demonstrations and the word that is to follow each, shapes [B, T]."""
    stream = named_stream(seed, "demonstrations", step)
    prompts = [task.draw(stream) for _ in range(size)]
    rows = [[*prompt, *task.demonstrate(prompt, stream)] for prompt in prompts]
    length = max(map(len, rows)) - 1
    word_BT = torch.zeros(size, length, dtype=torch.int64)
    target_BT = torch.full((size, length), IGNORED)
    for place, row in enumerate(rows):
        word_BT[place, : len(row) - 1] = torch.tensor(row[:-1])
        first = task.prompt_tokens - 1
        target_BT[place, first : len(row) - 1] = torch.tensor(row[first + 1 :])
    target_BT[word_BT == END] = IGNORED  # tokens of the environment
    return word_BT, target_BT


# ------------------------------------------------------ learn again from a trace alone: without engines or a scheduler


def relearn(trace: Trace) -> Learner:
    """Return the learner of a recorded run as it was at the end, with the weights of every version.

    Tokens are sampled again by the versions that the spans name, and trained on in the recorded batches. The weights
    equal the run's to the last bit (``weights_sha256`` of its summary), also with preemptions or turns: the trace
    records where caches are refilled. A run that diverged is learned again up to the divergence.

    Raises:
        ConfigError: If the run had no policy.
        RunFailedError: If a rollout gets another length than it had: the trace is not complete, or another torch or
            processor sampled it.
        TraceError: If the trace is broken.
    """
    if trace.config.policy is None:
        raise ConfigError("the trace is of a run without [policy]: there is nothing to learn again")
    recompute = trace.config.scheduler.weight_update is not events.WeightUpdate.KEEP
    finished: dict[int, events.VersionSpans] = {}
    refills: dict[int, set[int]] = {}
    with one_thread():
        learner = Learner(trace.config)
        for record in trace.records():
            match record.event or record.command:
                case events.StartRollout() as command:
                    learner.answers.ask(command.rollout_id, command.prompt_id)
                case events.RolloutPreempted() | events.TurnFinished() as event:
                    refills.setdefault(event.rollout_id, set()).add(
                        event.num_tokens if isinstance(event, events.RolloutPreempted) else event.spans.num_tokens
                    )
                case events.RolloutFinished() as event:
                    finished[event.rollout_id] = event.spans
                case events.DiscardRollouts() as command:
                    for rollout_id in command.rollout_ids:
                        finished.pop(rollout_id, None)
                        refills.pop(rollout_id, None)
                        learner.forget(rollout_id)
                case events.StartTraining() as command:
                    spans = {rollout_id: finished.pop(rollout_id) for rollout_id in command.rollout_ids}
                    refilled = {rollout_id: refills.pop(rollout_id, set()) for rollout_id in spans}
                    learner.answers.restore(spans, refilled, recompute=recompute)
                    for rollout_id in command.rollout_ids:
                        _check_length(learner, rollout_id, spans[rollout_id].num_tokens)
                        learner.finished(rollout_id, spans[rollout_id])
                    try:
                        learner.train(command)
                    except RunFailedError:
                        break  # the run ended here too, with the weights before this step
                case events.PublishWeights() as command:
                    learner.publish(command.version, oldest=0)
    return learner


def _check_length(learner: Learner, rollout_id: int, num_tokens: int) -> None:
    again = learner.answers.answer(rollout_id).num_generated
    if again != num_tokens:
        raise RunFailedError(
            f"different: rollout {rollout_id} has {num_tokens} tokens in the trace and {again} when it is sampled "
            "again: the trace is not complete, or another torch or processor sampled it"
        )
