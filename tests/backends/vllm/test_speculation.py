"""An engine with an n-gram drafter keeps the promises of one without: real processes on CPU.

The model is untrained; at a low temperature it repeats itself, so drafts are accepted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import reduce
from operator import add
from typing import Any

import pytest
from character_model import make_model
from vllm_engine import PROMPT, REAL, Subject, settings

from backends.interface import Generated, GenerateRequest
from backends.vllm.engine import VLLMEngine
from pipelinerl.config.engine import SpeculationConfig
from pipelinerl.records.reports import DecodeSteps
from pipelinerl.scheduler.events import VersionSpans, WeightUpdate

pytestmark = REAL

OFF_ABOVE, TOKENS, COLD = 4, 3, 0.05


@pytest.fixture(scope="module")
def subject(run: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    folder = tmp_path_factory.mktemp("engine")
    model = make_model(folder / "model", seed=0, end_token=None)
    speculation = SpeculationConfig(method="ngram", tokens=TOKENS, off_above=OFF_ABOVE)
    engine = VLLMEngine(settings(folder / "model", speculation=speculation, kv_cache_use=True))
    subject = Subject(engine, folder, [model])
    run(subject.engine.start())
    yield subject
    run(subject.engine.shutdown())


async def answers(
    engine: VLLMEngine, num: int, tokens: int, *, temperature: float, prompt: tuple[int, ...] = PROMPT
) -> list[Generated]:
    """Return answers that are generated together."""
    requests = [GenerateRequest(one, prompt, tokens, seed=one, temperature=temperature) for one in range(num)]
    return await asyncio.gather(*map(engine.generate, requests))


def steps_of(some: list[Generated]) -> DecodeSteps:
    return reduce(add, (one.decode_steps for one in some if one.decode_steps), DecodeSteps())


def test_log_probabilities_of_drafted_tokens_are_the_model_s(subject: Subject, run: Any) -> None:
    some = run(answers(subject.engine, OFF_ABOVE, 200, temperature=COLD))
    steps = steps_of(some)
    assert 1.1 < steps.tokens / steps.sequences <= 1 + TOKENS  # some were accepted
    assert all(one.spans == VersionSpans((0,), (200,)) for one in some)
    assert max(subject.error(one, keep=False, temperature=COLD) for one in some) < 1e-4


def test_one_thread_of_the_engine_computes(subject: Subject, run: Any) -> None:
    """Numba looks up drafts. Its number of threads becomes that of OpenMP, whose threads wait for each other in loops.

    Seconds on a core while the engine answers: 0.85 for the thread that computes, 0.04 at most for one that sends or
    receives; with numba's default, on two cores, 0.99 for the thread that waits.
    """
    psutil = pytest.importorskip("psutil")
    core = psutil.Process(subject.engine._processes[0].pid)

    def seconds() -> dict[int, float]:
        return {one.id: one.user_time + one.system_time for one in core.threads()}

    before = seconds()
    run(answers(subject.engine, OFF_ABOVE, 400, temperature=COLD))
    spent = {thread: after - before.get(thread, 0.0) for thread, after in seconds().items()}
    assert spent.pop(core.pid) > 5 * max(spent.values())


def test_answers_carry_the_room_in_the_kv_cache(subject: Subject, run: Any) -> None:
    """Blocks of 128 tokens: two of each of the others, of which the last one ends alone."""
    cache = subject.engine._vllm.llm.vllm_config.cache_config
    some = run(answers(subject.engine, OFF_ABOVE, 200, temperature=1.0))
    blocks = [one.kv_cache_share * (cache.num_gpu_blocks - 1) for one in some]
    assert all(abs(one - round(one)) < 1e-3 and round(one) in range(0, 2 * OFF_ABOVE + 1, 2) for one in blocks)
    assert run(answers(subject.engine, 1, 5, temperature=1.0))[0].kv_cache_share == pytest.approx(0.0, abs=1e-9)
    of_an_evaluation = GenerateRequest(-1, PROMPT, 5, seed=0, temperature=1.0)
    assert run(subject.engine.generate(of_an_evaluation)).kv_cache_share is None


def test_nothing_is_drafted_in_larger_batches(subject: Subject, run: Any) -> None:
    some = run(answers(subject.engine, 2 * OFF_ABOVE, 100, temperature=COLD))
    steps = steps_of(some)
    assert steps.sequences > 700
    assert steps.tokens - steps.sequences < 4 * TOKENS * OFF_ABOVE  # at most those of the first and last few steps


def test_tokens_are_drawn_from_the_model_s_distribution(subject: Subject, run: Any) -> None:
    """The second token is drafted: the prompt has each word behind the last one, and then a likely word.

    Of 1,200 answers the number of second tokens that are the draft, and the sum of their log-probabilities, are within
    four standard deviations of what the model's probabilities give: false alarm below 2e-4.
    """
    import torch

    warm, last, words = 0.15, PROMPT[-1], torch.arange(2, 44)
    with torch.no_grad():
        likely_W = subject.versions[0](torch.stack([words * 0 + last, words], 1)).logits[:, -1].argmax(-1)
    prompt = (*(one for pair in zip(words.tolist(), likely_W.tolist(), strict=True) for one in (last, *pair)), last)
    some: list[Generated] = []
    for first in range(0, 1200, OFF_ABOVE):
        seeds = range(first, first + OFF_ABOVE)
        requests = [GenerateRequest(seed, prompt, 3, seed=seed, temperature=warm) for seed in seeds]
        some += run(gathered(subject.engine, requests))
    token_N3 = torch.tensor([one.tokens_T for one in some])
    with torch.no_grad():
        rows = torch.cat([torch.tensor(prompt).expand(len(some), -1), token_N3[:, :1]], 1)
        logp_NV = (subject.versions[0](rows).logits[:, -1] / warm).log_softmax(-1)
    p_NV = logp_NV.exp()
    draft_N = torch.tensor(
        [dict(zip(words.tolist(), likely_W.tolist(), strict=True)).get(int(one), 0) for one in token_N3[:, 0]]
    )
    drafted_N = p_NV.gather(1, draft_N[:, None])[:, 0]
    z_draft = (token_N3[:, 1].eq(draft_N).sum() - drafted_N.sum()) / (drafted_N * (1 - drafted_N)).sum().sqrt()
    mean_N = (p_NV * logp_NV).sum(-1)
    variance_N = (p_NV * logp_NV**2).sum(-1) - mean_N**2
    z_all = (logp_NV.gather(1, token_N3[:, 1:2])[:, 0] - mean_N).sum() / variance_N.sum().sqrt()
    assert drafted_N.mean() > 0.05  # drafts are accepted
    assert max(abs(float(z_draft)), abs(float(z_all))) < 4


async def gathered(engine: VLLMEngine, requests: list[GenerateRequest]) -> list[Generated]:
    return await asyncio.gather(*map(engine.generate, requests))


@pytest.mark.parametrize("kind", [WeightUpdate.KEEP, WeightUpdate.RECOMPUTE])
def test_versions_and_log_probabilities_hold_over_updates_in_flight(
    subject: Subject, run: Any, kind: WeightUpdate
) -> None:
    before = len(subject.versions) - 1
    some = run(updated(subject, kind))
    steps = steps_of(some)
    assert all(one.spans.versions == (before, before + 1) and not one.aborted for one in some)
    assert steps.tokens > steps.sequences
    keeps = kind is WeightUpdate.KEEP
    assert max(subject.error(one, keep=keeps, temperature=COLD) for one in some) < 1e-3
    assert min(subject.error(one, keep=not keeps, temperature=COLD) for one in some) > 0.01  # the test can tell


async def updated(subject: Subject, kind: WeightUpdate) -> list[Generated]:
    """Answers of 300 tokens, with an update once another has 40."""
    engine = subject.engine
    requests = [GenerateRequest(one, PROMPT, 300, seed=one, temperature=COLD) for one in range(OFF_ABOVE - 1)]
    tasks = [asyncio.create_task(engine.generate(one)) for one in requests]
    await engine.generate(GenerateRequest(100, PROMPT, 40, seed=100, temperature=1.0))
    await engine.update(subject.next_weights(), kind)
    return await asyncio.gather(*tasks)
