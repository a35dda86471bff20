"""What the engines of a real run answer last, held bit for bit to an engine that is started with the model it wrote."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from backends.interface import GenerateRequest
from backends.vllm.engine import VLLMEngine
from backends.vllm.process import VLLMSettings

NUM_PROBES = 4
TOKENS = 6

MODULE = """
import json
from pathlib import Path

import probes
from backends.vllm.ray_engine import RayEngine
from pipelinerl.errors import EngineLostError
from pipelinerl.rl.sums import Arithmetic as Probed

shutdown = RayEngine.shutdown


async def answer_first(self):
    if self._actor is not None:
        try:
            answers = await probes.answers(self)
        except EngineLostError:
            answers = []
        (Path(__file__).parent / f"engine-{self._settings.engine_id}.json").write_text(json.dumps(answers))
    await shutdown(self)


RayEngine.shutdown = answer_first
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
    """Settings of a run whose engines answer once more before they end, into this folder."""
    (folder / "probing.py").write_text(MODULE)
    return ["train.task.name=probing:Probed"]


def check_probes(folder: Path, model: Path, *, engines: int, workers: int) -> None:
    """Hold what the engines answered to what one answers that is started with the model."""
    cores = "|".join(str(worker) for worker in range(workers))
    settings = VLLMSettings(
        engine_id=9,
        model_path=str(model),
        num_slots=4,
        max_tokens=64,
        device="cpu",
        tensor_parallel=workers,
        cpu_cores=cores,
    )

    async def fresh():
        engine = VLLMEngine(settings)
        await engine.start()
        try:
            return await answers(engine)
        finally:
            await engine.shutdown()

    expected = asyncio.run(fresh())
    assert all(version == 0 for *_, version in expected)
    for engine in range(engines):
        answered = json.loads((folder / f"engine-{engine}.json").read_text())
        assert [one[:2] for one in answered] == [one[:2] for one in expected]
        assert all(version > 0 for *_, version in answered)
