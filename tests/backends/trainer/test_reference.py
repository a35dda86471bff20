"""The real reference model: its values are transformers' own, and a process that dies or hangs is named."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from answered import when_others_have_answered

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("ray")
psutil = pytest.importorskip("psutil")

from tiny_trainer import TEMPERATURE, plain_logprob, samples  # noqa: E402

from backends.trainer.packing import pack  # noqa: E402
from backends.trainer.reference import RayReference, ReferenceModel, ReferenceSettings  # noqa: E402
from pipelinerl.errors import ReferenceLostError  # noqa: E402

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore")]  # Ray and torch warn of much


def settings(model_path: Path, *, temperature: float = TEMPERATURE, pack_tokens: int = 60) -> ReferenceSettings:
    return ReferenceSettings(
        device="cpu", model_path=str(model_path), temperature=temperature, pack_tokens=pack_tokens, timeout_s=600
    )


def expected(model_path: Path) -> list[np.ndarray]:
    """What transformers' own model gives at ``TEMPERATURE``, one sequence after the other."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path).eval()
    with torch.no_grad():
        return [plain_logprob(model, sample).numpy() for sample in samples()]


@pytest.mark.parametrize("pack_tokens", [40, 1000])  # a sequence a row, all in one
def test_values_are_those_of_transformers_at_the_temperature(model_path: Path, pack_tokens: int) -> None:
    model, other = (ReferenceModel(settings(model_path, temperature=at)) for at in (TEMPERATURE, 1.0))
    model.start()
    other.start()
    (rows,) = pack(samples(), pack_tokens=pack_tokens, num_ranks=1)
    values, others = model.logprobs(rows), other.logprobs(rows)
    for index, value_T in enumerate(expected(model_path)):
        assert values[index] == pytest.approx(value_T, abs=1e-5)
        assert np.abs(others[index] - value_T).max() > 1e-3


@pytest.mark.usefixtures("own_ray")
def test_replicas_share_a_batch_until_one_dies_and_go_on_when_started_again(model_path: Path) -> None:
    reference = RayReference(settings(model_path), [{"num_cpus": 1}] * 2)

    async def check() -> None:
        for value_T, wanted_T in zip(await reference.logprobs(samples()), expected(model_path), strict=True):
            assert value_T == pytest.approx(wanted_T, abs=1e-5)

    async def live() -> None:
        await reference.start()
        await check()
        with pytest.raises(ValueError, match="got pack_tokens=60, rollout 6 has 99 tokens"):
            await reference.logprobs([replace(samples()[6], prompt_P=np.ones(99 - len(samples()[6].answer_T)))])
        processes = [await one.__ray_call__.remote(lambda _: os.getpid()) for one in reference._replicas]
        os.kill(processes[1], signal.SIGKILL)
        with pytest.raises(
            ReferenceLostError, match=r"^reference model died: phase=logprobs replica=1 after \d+\.\d s: "
        ):
            await reference.logprobs(samples())
        await reference.shutdown()
        await reference.start()
        await check()
        await silence_is_named(reference)
        await asyncio.to_thread(
            psutil.wait_procs, [psutil.Process(one) for one in processes if psutil.pid_exists(one)], 600
        )
        assert not any(psutil.pid_exists(one) for one in processes)

    async def live_and_end() -> None:
        try:
            await live()
        finally:
            await reference.shutdown()
            await reference.shutdown()

    asyncio.run(live_and_end())


async def silence_is_named(reference: RayReference) -> None:
    usual, reference._settings = reference._settings, replace(reference._settings, timeout_s=1)
    process = await reference._replicas[0].__ray_call__.remote(lambda _: os.getpid())
    os.kill(process, signal.SIGSTOP)
    silence = r"^reference model hangs: phase=logprobs replicas=\[0\] after \d+\.\d s$"
    with pytest.raises(ReferenceLostError, match=silence), when_others_have_answered(0):
        await reference.logprobs(samples())
    os.kill(process, signal.SIGCONT)
    reference._settings = usual


@pytest.mark.usefixtures("own_ray")
def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    reference = RayReference(settings(tmp_path / "nothing"), [{"num_cpus": 1}])
    try:
        with pytest.raises(
            ReferenceLostError, match=r"^reference model failed: phase=start replica=0 .*nothing"
        ) as raised:
            asyncio.run(reference.start())
        assert "\n" not in str(raised.value)
    finally:
        asyncio.run(reference.shutdown())
