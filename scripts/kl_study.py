r"""The KL study of the paper's section 5.1 on recorded runs that learned: a table on stdout.

    for seed in 0 1 2; do
        pipelinerl simulate examples/learning.toml --seed $seed --out runs/kl/$seed --set optimizer_steps=40 \
            --trace full
    done
    python scripts/kl_study.py runs/kl/* --start 0 30 --updates 8 --length 12 --sequences 300

All problems have a right answer with steps that is longer than ``--length``, so that most sequences reach it. Numbers
are geometric means over the runs; for three or more runs ratios have a 95 % interval.
"""

from __future__ import annotations

import argparse
from itertools import count, islice
from pathlib import Path

import numpy as np
from learning_intervals import print_table, ratio

from pipelinerl.records.run_folder import TRACE_FILE
from pipelinerl.records.trace import Trace
from sim.learning.kl_study import KlPoint, kl_study
from sim.learning.loop import one_thread, policy_shape
from sim.learning.relearn import relearn
from sim.learning.sampling import Sampler
from sim.learning.tasks import BLANK, checked_task, problem

SEED = 12345
"""Seed of prompts and answers, different from the runs, whose prompts the policy has seen."""


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
