"""What the engines of a real run answer last, held bit for bit to an engine that is started with the model it wrote.

Engines answer when they have started, and before they end. So a run that begins with that model shows it, too.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from vllm_engine import settings

from backends.interface import GenerateRequest
from backends.vllm.engine import VLLMEngine

NUM_PROBES = 4
TOKENS = 6

MODULE = """
import json
from pathlib import Path

import backends.ray.actors
import probes
from backends.ray.actors import RayEngine
from pipelinerl.errors import EngineLostError
from pipelinerl.rl.tasks import Arithmetic as Probed

start, shutdown = RayEngine.start, RayEngine.shutdown


async def tell(self, when):
    try:
        answers = await probes.answers(self)
    except EngineLostError:
        answers = []
    (Path(__file__).parent / f"{when}-{self._settings.engine_id}.json").write_text(json.dumps(answers))


async def start_and_tell(self):
    await start(self)
    backends.ray.actors.PLACING_S = 5.0  # one that is placed again, or nowhere
    await tell(self, "first")


async def tell_and_shut_down(self):
    if self._actor is not None:
        await tell(self, "last")
    await shutdown(self)


RayEngine.start, RayEngine.shutdown = start_and_tell, tell_and_shut_down
"""


async def answers(engine):
    """Tokens, log-probabilities and version of some answers, one after the other."""
    answered = []
    for number in range(NUM_PROBES):
        request = GenerateRequest(10**9 + number, (3, 13, 4, 16), TOKENS, seed=number, temperature=1.0)
        answer = await engine.generate(request)
        answered.append([answer.tokens_T.tolist(), answer.logprob_T.tobytes().hex(), answer.spans.versions[-1]])
    return answered


def probed(folder: Path) -> list[str]:
    """Settings of a run whose engines answer at their start and before they end, into this folder."""
    (folder / "probing.py").write_text(MODULE)
    return ["train.task.name=probing:Probed"]


def started_with(model: Path, *, workers: int) -> list[Any]:
    """What an engine answers that is started with the model."""
    cores = "|".join(map(str, range(workers)))
    changed = {"num_slots": 4, "max_tokens": 64, "tensor_parallel": workers, "cpu_cores": cores, "cpu_in_place": False}

    async def fresh():
        engine = VLLMEngine(settings(model, **changed))
        await engine.start()
        try:
            return await answers(engine)
        finally:
            await engine.shutdown()

    return asyncio.run(fresh())


def told(folder: Path, when: str, engine: int = 0) -> list[Any]:
    """What an engine of a run answered, ``first`` or ``last``."""
    return json.loads((folder / f"{when}-{engine}.json").read_text())


def check_probes(answered: list[Any], expected: list[Any]) -> None:
    """Hold what an engine has answered with weights that it was sent to what one answers that was started with them."""
    assert [one[:2] for one in answered] == [one[:2] for one in expected]
    assert all(version > 0 for *_, version in answered)
    assert all(version == 0 for *_, version in expected)
