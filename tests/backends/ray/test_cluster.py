"""A Ray of our own under a run of parts in memory: who reaches it, and what is left when it ends, or is ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

psutil = pytest.importorskip("psutil")
pytest.importorskip("ray")
pytest.importorskip("tensorboard")

from real_run import LIMIT_S, Process, python_path  # noqa: E402

pytestmark = pytest.mark.real
STRANGER = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"
ON_RAY = "import on_ray; on_ray.install()"
STARTS_FOR_EVER = (
    f"{ON_RAY}; import os, pathlib, time; import ray._private.node; ray._private.node.Node.start_ray_processes = "
    "lambda self: (pathlib.Path(os.environ['STARTING']).touch(), time.sleep(3600))"
)
"""Ray's head starts, its other processes do not."""


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Process]:
    sets = ["optimizer_steps=1000000", "train.evaluation.problems=0"]
    env = {"PYTHONPATH": python_path(tmp_path), "STARTING": str(tmp_path / "starting")}
    started = Process("nowhere", tmp_path / "out", *sets, env=env, first=getattr(request, "param", ON_RAY))
    yield started
    for one, _ in started.seen.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    started.process.kill()
    started.process.communicate()


def ends_in_one_line(run: Process) -> str:
    """Wait until a run has ended, with status 1 and without leaving anything; return its line on stderr."""
    status, stdout, stderr = run.end()
    assert (status, stdout) == (1, ""), stderr
    assert run.left_over() == []
    (line,) = stderr.splitlines()
    return line


def listens_at(process: psutil.Process) -> set[tuple[str, int]]:
    """Return addresses and ports; none if the process has ended meanwhile."""
    with contextlib.suppress(psutil.NoSuchProcess):
        listening = [one for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]
        return {(one.laddr.ip.removeprefix("::ffff:"), one.laddr.port) for one in listening}
    return set()


def test_it_listens_on_loopback_and_wants_a_token_and_its_lost_head_ends_the_run(run: Process) -> None:
    run.wait_for_step(1)
    processes = [psutil.Process(run.process.pid), *(one for one, _ in run.tree())]
    assert {ip for process in processes for ip, _ in listens_at(process)} == {"127.0.0.1"}
    ((ip, port),) = listens_at(run.named("gcs_server")[0])
    stranger = subprocess.run(
        [sys.executable, "-c", STRANGER, f"{ip}:{port}"], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert stranger.returncode != 0
    assert "AuthenticationError" in stranger.stderr
    run.kill("gcs_server")
    line = ends_in_one_line(run)
    assert line.startswith(f"pipelinerl: Ray's head (GCS) at {ip}:{port} is gone: ")
    assert line.endswith("--resume goes on from the last checkpoint, if there is one")


@pytest.mark.parametrize("run", [STARTS_FOR_EVER], indirect=True)
def test_ctrl_c_while_ray_starts(run: Process) -> None:
    run.wait_for((run.out.parent / "starting").exists, "head of Ray")
    assert run.named("gcs_server")
    os.killpg(run.process.pid, signal.SIGINT)
    assert ends_in_one_line(run).startswith("pipelinerl: interrupted; --resume goes on from the last")
    assert not run.out.exists()


@pytest.mark.parametrize("mode", ["TOKEN", "DISABLED"])
def test_a_cluster_that_asks_for_no_token_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    import ray
    from ray import _raylet

    from backends.ray.cluster import ray_cluster

    given = getattr(_raylet.AuthenticationMode, mode)
    monkeypatch.setattr(_raylet, "get_authentication_mode", lambda: given)
    monkeypatch.setattr(ray, "init", lambda **_: None)
    with ray_cluster("10.0.0.1:6379"):
        pass
    warning = "train.ray_address='10.0.0.1:6379' asks for no token: whoever reaches it can run code there"
    assert (warning in caplog.text) == (mode == "DISABLED")


def test_a_ray_that_does_not_come_up_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from backends.ray.cluster import ray_cluster
    from pipelinerl.errors import ConfigError

    def slow(**_: object) -> None:
        raise Exception("The current node timed out during startup.")  # Ray's own, after 30 s

    monkeypatch.setattr(ray, "init", slow)
    with pytest.raises(ConfigError, match=r"no Ray could be started on this machine: .*timed out"), ray_cluster(None):
        pass


def test_the_folder_of_published_weights_goes_with_the_run(tmp_path: Path) -> None:
    from in_memory import config_of

    from backends.ray.placement import weights_folder

    with weights_folder(config_of(train={"weights_folder": str(tmp_path)})) as folder:
        (folder / "version-1.safetensors").write_text("weights")
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []
