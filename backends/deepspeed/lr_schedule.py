"""The learning rate over a run."""

from __future__ import annotations

import math
from collections.abc import Callable

from pipelinerl.config.train import OptimizerConfig


def learning_rate_factor(config: OptimizerConfig, *, optimizer_steps: int) -> Callable[[int], float]:
    """Return the share of the largest learning rate that an optimizer step is made with.

    With k steps done, w steps of warm-up, and K in all: (k + 1) / w for k < w; from then on, with
    x = (k - w) / (K - w), 1 (constant), 1 - x (linear) or (1 + cos(pi x)) / 2 (cosine). So no step is made with a
    rate of zero: it is reached when step K - 1, the last, is done.

    Args:
        config: Schedule and warm-up.
        optimizer_steps: K, steps of the whole run.

    Returns:
        A function of k (optimizer steps done) with values in [0, 1].
    """

    def factor(done: int) -> float:
        if done < config.warmup_steps:
            return (done + 1) / config.warmup_steps
        share = min(1.0, (done - config.warmup_steps) / max(1, optimizer_steps - config.warmup_steps))
        match config.schedule:
            case "constant":
                return 1.0
            case "linear":
                return 1.0 - share
            case "cosine":
                return (1.0 + math.cos(math.pi * share)) / 2

    return factor
