r"""The KL study of the paper's section 5.1 on recorded runs that learned: a table on stdout.

    for seed in 0 1 2; do
        pipelinerl simulate examples/learning.toml --seed $seed --out runs/kl/$seed --set optimizer_steps=40 \
            --trace full
    done
    python scripts/kl_study.py runs/kl/* --start 0 30 --updates 8 --length 12 --sequences 300

All problems have a right answer with steps that is longer than ``--length``, so that most sequences reach it. Numbers
are geometric means over the runs; for three or more runs ratios have a 95 % interval.

Protocol. Given the weights C, C+1, ... C+g_max of consecutive optimizer steps, replay an in-flight schedule: a
sequence starts under C and gets the next weights every L/g_max tokens, the first interval twice as long. When C+g
has sampled its interval, the sequence has tokens of lag 0 to g. KL(mu || C+g) per token is measured, for tokens
sampled from mu in three ways:

* *stale*: keys and values stay as the weights of their time computed them;
* *recomputed*: all are computed again at each change of weights;
* *conventional*: C alone sampled the whole sequence.

The paper names no direction and prints no values. This one can be estimated from samples: the mean over tokens from mu
of the estimator r - 1 - log r, r = pi/mu.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch
from learning_intervals import print_table, ratio
from numpy.typing import NDArray

from pipelinerl.records.run_folder import TRACE_FILE
from pipelinerl.records.trace import Trace
from pipelinerl.rl.ess import ess_of_log_weights, kl_estimate
from sim.learning.loop import Draft, Sampler, one_thread, policy_shape, relearn
from sim.learning.policy import PolicyShape, Weights, forward
from sim.learning.tasks import BLANK, checked_task, problem

SEED = 12345
"""Seed of prompts and answers, different from the runs, whose prompts the policy has seen."""


BATCH = 64
"""Sequences read at a time (count)."""


@dataclass(frozen=True, slots=True)
class KlPoint:
    """Divergence per token (nats) and ESS (share of the tokens) at one lag, for the three ways to sample."""

    lag: int
    """Optimizer steps from the first weights to the compared policy."""
    tokens: int
    """Tokens that the stale sequences were measured on (count)."""
    stale_kl: float
    recomputed_kl: float
    conventional_kl: float
    stale_ess: float
    recomputed_ess: float
    conventional_ess: float


def kl_study(
    checkpoints: Sequence[Weights],
    *,
    shape: PolicyShape,
    sampler: Sampler,
    prompts: Sequence[tuple[int, ...]],
    length: int,
) -> list[KlPoint]:
    """Measure the divergence of mixed and of conventional sequences from the policy: a point per lag, 0 to g_max - 1.

    Args:
        checkpoints: Weights of g_max + 1 consecutive optimizer steps.
        shape: Sizes of the policy.
        sampler: Must keep caches.
        prompts: One sequence is sampled for each; those that end early count with the tokens they have.
        length: L, tokens over which the g_max updates are spread; at least g_max.

    Raises:
        ValueError: If there are fewer than two checkpoints, or ``length`` is too short for them.
    """
    most = len(checkpoints) - 1
    if most < 1 or length < most:
        raise ValueError(f"length must be at least {max(most, 1)} for {len(checkpoints)} checkpoints, got {length}")
    ends = [(lag + 2) * length // most for lag in range(most)]  # of the interval that C + lag samples
    max_tokens = shape.positions - len(prompts[0])

    def drafts() -> list[Draft]:
        return [Draft(number, prompt, max_tokens) for number, prompt in enumerate(prompts)]

    stale, recomputed, conventional = drafts(), drafts(), drafts()
    points = []
    for lag in range(most):
        for mixed, anew in ((stale, False), (recomputed, True)):
            going = [one for one in mixed if lag == 0 or one.length > ends[lag - 1]]
            for one in going:
                one.num_kept = ends[lag - 1] if lag else 0
                one.cache = None if anew else one.cache
            sampler.complete(checkpoints[lag], going)
        if lag == 0:
            sampler.complete(checkpoints[0], conventional)
        ratios = [
            _log_ratios(checkpoints[lag], shape, one, tokens=ends[lag], temperature=sampler.temperature)
            for one in (stale, recomputed, conventional)
        ]
        kl, ess = [kl_estimate(one) for one in ratios], [ess_of_log_weights(one) for one in ratios]
        points.append(KlPoint(lag, ratios[0].size, *kl, *ess))
    return points


@torch.inference_mode()  # type: ignore[untyped-decorator]  # torch is Any to mypy
def _log_ratios(
    weights: Weights, shape: PolicyShape, drafts: Sequence[Draft], *, tokens: int, temperature: float
) -> NDArray[np.float64]:
    """Return log pi - log mu of the first ``tokens`` tokens of every draft, one after the other (nats)."""
    found = []
    for start in range(0, len(drafts), BATCH):
        batch = drafts[start : start + BATCH]
        first = len(batch[0].prompt)
        word_BT = torch.zeros(len(batch), shape.positions, dtype=torch.int64)
        for place, draft in enumerate(batch):
            words = [*draft.prompt, *draft.word_L[: draft.length].tolist()]
            word_BT[place, : len(words)] = torch.tensor(words)
        logit_BTV, _ = forward(weights, shape, word_BT[:, :-1])
        logprob_BT = (logit_BTV / temperature).log_softmax(-1).gather(2, word_BT[:, 1:, None])[..., 0].numpy()
        for place, draft in enumerate(batch):
            num = min(tokens, draft.length)
            found.append(logprob_BT[place, first - 1 : first - 1 + num] - draft.logprob_L[:num])
    ratios: NDArray[np.float64] = np.concatenate(found).astype(np.float64)
    return ratios


def measured(folder: Path, options: argparse.Namespace) -> dict[tuple[int, int], KlPoint]:
    """Repeat the learning of a run; return its divergences by start and lag.

    Raises:
        SystemExit: If the run did not publish the requested versions.
    """
    trace = Trace(folder / TRACE_FILE)
    config = trace.config
    learner = relearn(trace)
    assert config.policy is not None
    task = checked_task(config)
    shape = policy_shape(config.policy, positions=task.prompt_tokens + config.workload.length.max)
    sampler = Sampler(
        shape,
        prompt_tokens=task.prompt_tokens,
        temperature=config.policy.temperature,
        seed=SEED,
        keep_caches=True,
    )
    drawn = (problem(task, seed=SEED, prompt_id=number) for number in count())
    long_enough = (one for one in drawn if len(one) - one.count(BLANK) - 1 >= options.length)
    prompts = list(islice(long_enough, options.sequences))
    points = {}
    for start in options.start:
        missing = set(range(start, start + options.updates + 1)) - learner.answers.versions
        if missing:
            raise SystemExit(
                f"{folder}: --start {start} --updates {options.updates} needs version {min(missing)}, not published"
            )
        weights = [learner.answers.weights(start + step) for step in range(options.updates + 1)]
        with one_thread():
            for point in kl_study(weights, shape=shape, sampler=sampler, prompts=prompts, length=options.length):
                points[start, point.lag] = point
    return points


def main() -> None:
    """Read the arguments, measure every run, and print a row per start and lag."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="+")
    parser.add_argument("--start", type=int, nargs="+", default=[0])
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--length", type=int, default=24)
    parser.add_argument("--sequences", type=int, default=600)
    options = parser.parse_args()
    runs = [measured(folder, options) for folder in options.folder]
    rows = []
    for start, lag in runs[0]:
        if lag:  # at lag 0 all three are the same policy
            points = [run[start, lag] for run in runs]
            stale, recomputed, conventional = (
                [getattr(one, name) for one in points] for name in ("stale_kl", "recomputed_kl", "conventional_kl")
            )
            ratios = [ratio(stale, recomputed), ratio(conventional, stale)]
            rows.append([f"{start}", f"{lag}", f"{np.exp(np.mean(np.log(stale))):.5f}", *ratios])
    print_table(["checkpoint", "lag", "KL stale", "stale / recomputed", "conventional / stale"], rows)


if __name__ == "__main__":
    main()
