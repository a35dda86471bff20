"""The answers of a run: which weights sample which token, generated ahead of simulated time.

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
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from pipelinerl.config.environment import TurnsConfig
from pipelinerl.scheduler.events import VersionSpans
from sim.interface import Request
from sim.learning.policy import Weights
from sim.learning.sampling import ROWS, Draft, Sampler
from sim.learning.tasks import Calculator, TokenTask, problem

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


def _pieces(spans: VersionSpans, refills: Set[int], recompute: bool) -> list[_Piece]:
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

    def restore(self, spans: Mapping[int, VersionSpans], refills: Mapping[int, Set[int]], *, recompute: bool) -> None:
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
