"""Fixtures of the tests of the driver and its parts."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where a run writes to; it is not there yet."""
    return tmp_path / "run"


@pytest.fixture(scope="module", autouse=True)
def no_rank() -> Iterator[None]:
    """Remove the environment variables of a rank in this process, which processes of later modules would inherit.

    Ray's variables stay: a process that has asked one Ray for a token asks every Ray.
    """
    yield
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of characters."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from character_model import make_model

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny")
    make_model(folder)
    return folder


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """One event loop for a module."""
    with asyncio.Runner() as runner:
        yield runner.run
    gc.collect()  # vLLM's client is in cycles; its sockets' warnings belong here


@pytest.fixture(scope="module")
def own_ray() -> Iterator[None]:
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="session", autouse=True)
def files_of_processes() -> Iterator[None]:
    """Remove the temporary files of the processes that tests start, sockets included, after the session."""
    tempfile.gettempdir()  # this process keeps its own
    folder = tempfile.mkdtemp(dir="/tmp")  # short, for sockets
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TMPDIR", "VLLM_RPC_BASE_PATH"):
            patch.setenv(name, folder)
        yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def subreaper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have Ray end the processes of its actors. This process ignores SIGCHLD then, and later tests would wait for
    children that are gone."""
    from backends.ray.cluster import SUBREAPER

    monkeypatch.setenv(SUBREAPER, "true")
    yield
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
