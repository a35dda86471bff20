"""Workloads for tests, and checks of their draws."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from pipelinerl.config.run import LengthConfig, WorkloadConfig
from sim.workload import Workload

SHIPPED = "areal_deepscaler, areal_nemotron, rgym_llama_400, rgym_llama_800, skythought"

NUMBERED = "prompt_id,prompt_tokens,response_tokens,correct\n" + "".join(
    f"p{p},{10 + p},{100 * p + a},{a % 2}\n" for a in range(11) for p in range(1, 12)
)
"""11 prompts with 11 answers each, interleaved: answer a of prompt p has 100 p + a tokens and reward a mod 2."""


def workload(*, group_size=8, seed=1, prompt_tokens=0, success_rate=0.5, **length):
    config = WorkloadConfig(
        group_size=group_size,
        prompt_tokens=prompt_tokens,
        success_rate=success_rate,
        length=LengthConfig.model_validate(length),
    )
    return Workload(config, seed=seed)


def all_lengths(source, num_groups):
    """Lengths of the first groups, each of another prompt, shape [num_groups, group_size]."""
    return np.array([source.group(k, k).lengths for k in range(num_groups)])


def write(folder, text):
    path = Path(folder) / "mine.csv"
    path.write_text(text, encoding="utf-8")
    return str(path)


def drawn_from(folder, text, *, longest=5000, **changed):
    """A workload whose source is a file of this text."""
    return workload(kind="empirical", max=longest, source=write(folder, text), **changed)


def chi_square_p(observed, expected):
    """Chance of a statistic at least as large, for an even number n of degrees of freedom (closed form)."""
    observed = np.asarray(observed)
    half, half_df = float(((observed - expected) ** 2 / expected).sum()) / 2, (observed.size - 1) // 2
    assert observed.size % 2 == 1
    return math.exp(-half) * sum(half**i / math.factorial(i) for i in range(half_df))


def assert_mean(values, mean, *, z=4.9):
    """Fails for 1 seed in 10^6 if the mean is right: |mean of values - mean| <= z standard errors."""
    values = np.asarray(values, dtype=float)
    assert abs(values.mean() - mean) <= z * values.std(ddof=1) / math.sqrt(values.size)


def expected_longest(lengths, count):
    """E[max of count] = sum_i x_(i) C(i - 1, count - 1) / C(n, count), with the largest of the draw at rank i."""
    ways = sum(math.comb(rank, count - 1) * length for rank, length in enumerate(sorted(lengths)))
    return ways / math.comb(len(lengths), count)
