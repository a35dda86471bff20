"""A Ray of our own under a run of parts in memory: who reaches it, and what is left when it ends, or is ended."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pwd
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

psutil = pytest.importorskip("psutil")
pytest.importorskip("ray")
pytest.importorskip("tensorboard")

from real_run import LIMIT_S, Process, python_path  # noqa: E402

from backends.owner import OWNER_FILE, temporary_folder, this_process  # noqa: E402
from backends.ray.cluster import LONGEST_TEMPORARY_FOLDER  # noqa: E402

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
    """Wait until a run has ended, with status 1 and without leaving anything; return its line on stderr.

    A slow one says how far it is, too.
    """
    status, stdout, stderr = run.end()
    assert (status, stdout) == (1, ""), stderr
    assert run.left_over() == []
    (line,) = (one for one in stderr.splitlines() if not one.startswith("0:"))
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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_machine_can_neither_list_nor_replace_nor_connect(run: Process) -> None:
    run.wait_for_step(1)
    (folder,) = Path(run.temporary).glob("pipelinerl-*")
    Path(run.temporary).chmod(0o1777)  # as /tmp
    run.wait_for(lambda: any("Monitor: Started" in log.read_text() for log in folder.rglob("monitor.log")), "monitor")
    assert [listens_at(monitor) for monitor in run.named("autoscaler")] == [set()]
    processes = [one for one, _ in run.tree()]
    sockets = sorted({one.laddr for process in processes for one in process.net_connections("unix") if one.laddr})
    assert {Path(path).name for path in sockets} == {"plasma_store", "raylet"}
    assert {process.environ()["TMPDIR"] for process in run.named("raylet")} == {str(folder)}  # vLLM's sockets go there
    room = LONGEST_TEMPORARY_FOLDER - len(run.temporary) + len(str(2**22)) - len(str(run.process.pid))
    assert max(map(len, sockets)) + room <= 107
    attempts = {
        "list": lambda: os.listdir(folder),
        "add": (folder / "ray" / "new").touch,
        "replace": lambda: folder.rename(folder.with_name("gone")),
        **{path: partial(connect, path) for path in sockets},
    }
    processes = multiprocessing.get_context("fork")
    refused = processes.SimpleQueue()
    stranger = processes.Process(target=as_nobody, args=(attempts, refused))
    stranger.start()
    stranger.join()
    assert {refused.get() for _ in attempts if not refused.empty()} == set(attempts)


def connect(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(path)


def as_nobody(attempts: dict[str, Callable[[], object]], refused: Any) -> None:
    """Try all as another user; put the names of those that were not permitted."""
    nobody = pwd.getpwnam("nobody")
    os.setgroups([])
    os.setegid(nobody.pw_gid)
    os.seteuid(nobody.pw_uid)
    for name, attempt in attempts.items():
        try:
            attempt()
        except PermissionError:
            refused.put(name)


def test_temporary_folders_of_this_users_dead_processes_go_and_no_others(tmp_path: Path) -> None:
    dead, elsewhere = this_process()._replace(began="0"), this_process()._replace(host="elsewhere", began="0")
    owners = {"dead": dead, "living": this_process(), "elsewhere": elsewhere, "unknown": None, "linked": dead}
    if os.geteuid() == 0:
        owners["of another user"] = dead
    for name, owner in owners.items():
        folder = tmp_path / ("linked" if name == "linked" else f"pipelinerl-{name}")
        (folder / "ray").mkdir(parents=True)
        if owner is not None:
            (folder / OWNER_FILE).write_text(json.dumps(owner._asdict()))
        if name == "of another user":
            os.chown(folder, pwd.getpwnam("nobody").pw_uid, -1)
    (tmp_path / "pipelinerl-linked").symlink_to(tmp_path / "linked")
    with temporary_folder(str(tmp_path)) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        left = {path.name.removeprefix("pipelinerl-") for path in tmp_path.iterdir() if path != folder}
        assert left == owners.keys() - {"dead"}
    assert (tmp_path / "linked" / "ray").is_dir()
    assert not folder.exists()


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
