"""The episodes of a small run, for tests of draws."""

from __future__ import annotations

from pipelinerl.config.run import parse_run
from sim.episodes import Episodes
from sim.workload import Workload


def episodes(turns, *, group_size=1, length_max=8, length=None, **environment):
    config = parse_run(
        {
            "optimizer_steps": 1,
            "cluster": {"accelerators": 2, "generation_accelerators": 1},
            "scheduler": {"train_batch_size": 4, "generation_batch_size": 1},
            "workload": {
                "group_size": group_size,
                "prompt_tokens": 10,
                "length": length or {"kind": "fixed", "max": length_max},
            },
            "hardware": {"decode": {"kind": "affine", "step_s": 1.0}, "training": {"token_s": 0.0}},
            "environment": {"count": 1, **environment, "turns": {"observation_max": 100, "context_max": 1000, **turns}},
        }
    )
    return Episodes(config, Workload(config.workload, seed=0))
