"""The KL study of the paper's section 5.1 on a recorded run that learned: a table on stdout.

    pipelinerl simulate examples/learning.toml --out runs/learning --trace full
    python scripts/kl_study.py runs/learning --start 0 70 140 --updates 8 --length 24 --sequences 600

All sequences are of problems whose right answer by steps is longer than ``--length``, so that most reach it.
"""

from __future__ import annotations

import argparse
from itertools import count, islice
from pathlib import Path

from pipelinerl.records.run_folder import TRACE_FILE
from pipelinerl.records.trace import Trace
from sim.learning.kl_study import kl_study
from sim.learning.loop import one_thread
from sim.learning.relearn import relearn
from sim.learning.sampling import Sampler
from sim.learning.tasks import BLANK, checked_task, problem
from sim.learning.warm_start import policy_shape

SEED = 12345
"""Seed of prompts and answers: not one of the run's, whose prompts the policy has seen."""


def main() -> None:
    """Read the arguments, learn the run again, and print a row per start and lag."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--start", type=int, nargs="+", default=[0])
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--length", type=int, default=24)
    parser.add_argument("--sequences", type=int, default=600)
    options = parser.parse_args()
    trace = Trace(options.folder / TRACE_FILE)
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
    print(
        "| start | lag | tokens | KL stale | KL recomputed | KL conventional | ESS stale | recomputed | conventional |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for start in options.start:
        missing = set(range(start, start + options.updates + 1)) - learner.answers.versions
        if missing:
            parser.error(f"--start {start} --updates {options.updates} needs version {min(missing)}, not published")
        weights = [learner.answers.weights(start + step) for step in range(options.updates + 1)]
        with one_thread():
            points = kl_study(weights, shape=shape, sampler=sampler, prompts=prompts, length=options.length)
        for one in points:
            kl = f"{one.stale_kl:.5f} | {one.recomputed_kl:.5f} | {one.conventional_kl:.5f}"
            ess = f"{one.stale_ess:.3f} | {one.recomputed_ess:.3f} | {one.conventional_ess:.3f}"
            print(f"| {start} | {one.lag} | {one.tokens} | {kl} | {ess} |")


if __name__ == "__main__":
    main()
