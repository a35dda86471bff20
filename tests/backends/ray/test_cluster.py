"""A Ray of our own under a run of parts in memory: who reaches it, and what is left when it ends, or is ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import program

psutil = pytest.importorskip("psutil")
pytest.importorskip("ray")
pytest.importorskip("tensorboard")

pytestmark = pytest.mark.real
ROOT = Path(__file__).parents[3]
STRANGER = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"
STARTS_FOR_EVER = (
    "import on_ray; on_ray.install(); import time; import ray._private.node; "
    "ray._private.node.Node.start_ray_processes = lambda self: time.sleep(3600)"
)
"""Ray's head starts, its other processes do not."""
LIMIT_S = 600.0
"""Longest wait for anything: it ends a test that hangs."""


class Run:
    """`pipelinerl train` in a process group of its own, that heeds Ctrl-C."""

    def __init__(self, folder: Path, first: str = "import on_ray; on_ray.install()") -> None:
        self.out = folder / "out"
        first = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {first}"
        sets = ["optimizer_steps=1000000", "train.evaluation.problems=0"]
        self.temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # short, for sockets
        self.process = subprocess.Popen(
            [*program(first), "train", str(ROOT / "examples" / "tiny_arithmetic.toml"), "--out", str(self.out)]
            + [part for one in sets for part in ("--set", one)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests" / "support")))}
            | {"TMPDIR": str(self.temporary)},
        )
        self.seen: set[psutil.Process] = set()

    def children(self) -> dict[str, psutil.Process]:
        """The processes it has started, by name."""
        named = {}
        for one in psutil.Process(self.process.pid).children(recursive=True):
            self.seen.add(one)
            with contextlib.suppress(psutil.NoSuchProcess):  # Ray starts some for a moment
                named[one.name()] = one
        return named

    def until(self, condition: Callable[[], bool]) -> None:
        over = time.monotonic() + LIMIT_S
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < over
            time.sleep(0.02)

    def runs(self) -> None:
        self.until(lambda: (self.out / "metrics.jsonl").exists() and (self.out / "metrics.jsonl").stat().st_size > 0)
        self.children()

    def ends_in_one_line(self) -> str:
        """Wait until it has ended, with status 1 and without leaving anything; return what it said."""
        stdout, stderr = self.process.communicate(timeout=LIMIT_S)
        assert (self.process.returncode, stdout) == (1, ""), stderr
        over = time.monotonic() + LIMIT_S
        while [one for one in self.seen if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]:  # being killed
            assert time.monotonic() < over, self.seen
            time.sleep(0.02)
        assert list(self.temporary.iterdir()) == []
        (line,) = stderr.splitlines()
        return line


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    started = Run(tmp_path, *getattr(request, "param", ()))
    yield started
    for one in started.seen:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    started.process.kill()
    started.process.communicate()
    shutil.rmtree(started.temporary)


def connections_of(process: psutil.Process) -> list[Any]:
    """None, if it has ended meanwhile."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(process.net_connections("inet"))
    return []


def test_it_listens_on_loopback_and_wants_a_token_and_its_lost_head_ends_the_run(run: Run) -> None:
    run.runs()
    ports = {
        (one.laddr.ip.removeprefix("::ffff:"), one.laddr.port): name
        for name, process in [*run.children().items(), ("driver", psutil.Process(run.process.pid))]
        for one in connections_of(process)
        if one.status == psutil.CONN_LISTEN
    }
    assert {ip for ip, _ in ports} == {"127.0.0.1"}, ports
    (head,) = (f"{ip}:{port}" for (ip, port), name in ports.items() if name == "gcs_server")
    stranger = subprocess.run(
        [sys.executable, "-c", STRANGER, head], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert stranger.returncode != 0
    assert "AuthenticationError" in stranger.stderr
    run.children()["gcs_server"].kill()
    line = run.ends_in_one_line()
    assert line.startswith(f"pipelinerl: Ray's head (GCS) at {head} is gone: ")
    assert line.endswith("--resume goes on from the last checkpoint, if there is one")


@pytest.mark.parametrize("run", [(STARTS_FOR_EVER,)], indirect=True)
def test_ctrl_c_while_ray_starts(run: Run) -> None:
    run.until(lambda: "gcs_server" in run.children())
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.ends_in_one_line().startswith("pipelinerl: interrupted; --resume goes on from the last")
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
