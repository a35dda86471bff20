"""Measure what vLLM's processes spend per decode step, sequence and request, in processor time, on a CPU.

    python scripts/front_end_cost.py models/tiny_arithmetic

Processor time hardly depends on what else the machine does. Every row is a load of requests of one length, so many at a
time; least squares over the rows gives the three costs of each process. Prompts are short: a prompt cut into chunks
kills vLLM 0.32 on CPUs where requests have seeds.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import time
from typing import Any

import numpy as np

from backends.vllm.process import VLLMSettings, end_processes, make_llm, process_tree
from pipelinerl.calibration.least_squares import Column, fit

LOADS = ((128, 3, 2000), (64, 3, 1500), (16, 3, 600), (128, 40, 512), (64, 40, 320), (16, 40, 96), (128, 160, 128))
"""Requests at a time (count), answers of each (tokens), requests in all (count)."""
PROMPT_TOKENS = 5
"""Length of every prompt (tokens)."""


async def measured(model: str) -> None:
    """Print the costs of each process."""
    before = set(multiprocessing.active_children())
    longest = PROMPT_TOKENS + max(tokens for _, tokens, _ in LOADS)
    llm = make_llm(VLLMSettings(engine_id=0, model_path=model, num_slots=128, max_tokens=longest, device="cpu"))
    processes = process_tree(before)
    await load(llm, (32, 4, 128), 0)
    rows, spent = [], []
    for number, one in enumerate(LOADS * 2, start=1):
        begin = processor_s(processes)
        steps = await load(llm, one, number)
        rows.append((steps, one[1] * one[2], one[2]))
        spent.append([end_s - begin_s for begin_s, end_s in zip(begin, processor_s(processes), strict=True)])
    llm.shutdown()
    factors = np.array(rows, dtype=np.float64)
    for name, seconds in zip(["front end", *(one.name() for one in processes)], np.array(spent).T, strict=True):
        columns = [Column(what, factors[:, index]) for index, what in enumerate(("step", "sequence", "request"))]
        found = fit(columns, np.maximum(seconds, 0.01))
        costs = ", ".join(f"{1e6 * value:.1f} us a {what}" for what, value in found.values.items())
        print(f"{name}: {costs}; error {found.mean_error:.0%}")
    end_processes(processes)


def processor_s(processes: list[Any]) -> list[float]:
    """Return the processor time of this process, and of others, so far (seconds)."""
    return [time.process_time(), *(sum(one.cpu_times()[:2]) for one in processes)]


async def load(llm: Any, one: tuple[int, int, int], number: int) -> int:
    """Generate; return about how many decode steps that takes."""
    from vllm.inputs import tokens_input  # noqa: PLC0415 - once the settings are in the environment
    from vllm.sampling_params import RequestOutputKind, SamplingParams  # noqa: PLC0415

    at_a_time, tokens, requests = one
    room = asyncio.Semaphore(at_a_time)

    async def request(index: int) -> None:
        parameters = SamplingParams(
            max_tokens=tokens, seed=index, logprobs=0, detokenize=False, ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        async with room:
            async for _ in llm.generate(tokens_input([1] * PROMPT_TOKENS), parameters, request_id=f"{number}-{index}"):
                pass

    await asyncio.gather(*(request(index) for index in range(requests)))
    return round(requests / at_a_time * tokens)


if __name__ == "__main__":
    asyncio.run(measured(sys.argv[1]))
