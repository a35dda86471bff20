"""The promises of ``backends/contract``, kept by ranks of FSDP2."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from needs import need

need("ray", "deepspeed", "transformers")

from character_model import make_model  # noqa: E402
from tiny_trainer import trainer_contract  # noqa: E402

from backends.contract import TrainerContract, promises  # noqa: E402
from backends.trainer.fsdp2.rank import FSDP2Rank  # noqa: E402

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore")]  # Ray and torch warn of much
TIMEOUT_S = 1800
"""Longest that one promise may take (seconds): it ends one that hangs."""


@pytest.fixture(scope="module", params=[1, 2])
def contract(
    request: pytest.FixtureRequest, own_ray: None, run: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TrainerContract]:
    make_model(folder := tmp_path_factory.mktemp("fsdp2"))
    contract = trainer_contract(FSDP2Rank, folder, num_ranks=request.param)
    try:
        run(contract.trainer.start())
        yield contract
    finally:
        run(contract.trainer.shutdown())


@pytest.mark.parametrize("promise", promises(TrainerContract))
def test_every_promise_is_kept(contract: TrainerContract, run: Callable[..., Any], promise: str) -> None:
    run(asyncio.wait_for(getattr(contract, promise)(), TIMEOUT_S))
