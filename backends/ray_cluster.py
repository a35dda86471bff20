"""A Ray of our own, or the one that the run file names: started, closed to strangers, watched, and ended.

Theory of operation. A Ray of our own listens on this machine's loopback address only, and everything that speaks to it
shows a token that is made for this process. What it and its processes write for themselves goes into one temporary
folder. In the end the processes that have been started since are ended, whatever has become of Ray, and the folder is
removed. Ray reads most of this from the environment, which is then as it was.

Ray ends this process without a word a minute after its head, the GCS, is gone. So ``lost`` looks after it.
"""

from __future__ import annotations

import contextlib
import getpass
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import ray
import ray._raylet
from ray._private import ray_constants
from ray.exceptions import RayError

from pipelinerl.errors import ConfigError
from pipelinerl.util.user_code import kind_and_line

_raylet: Any = ray._raylet
LOG = logging.getLogger("pipelinerl")
SUBREAPER = "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper"
"""Environment variable: Ray ends what a dead actor has started."""
OBJECT_STORE_BYTES = 512 * 2**20
"""Shared memory of a Ray of our own (bytes): holds the samples on their way to the ranks."""
LONGEST_TEMPORARY_FOLDER = 20
"""Longest path under which Ray's sockets, whose paths have 107 bytes at most, find room (characters)."""
END_TIMEOUT_S = 3.0
"""Seconds that processes have to be gone, once they were told, and again once they were killed."""
GCS_TIMEOUT_S = 2.0
"""Seconds in which the GCS must take a connection."""


@contextlib.contextmanager
def ray_cluster(address: str | None) -> Iterator[None]:
    """Join the Ray cluster at an address; None: start one of our own, on this machine, and end it.

    Raises:
        ConfigError: If the cluster cannot be reached, or ours not be started.
    """
    with contextlib.ExitStack() as stack:
        if address is None:
            stack.enter_context(_all_ended())
            folder = stack.enter_context(_temporary_folder())
            environment, options = _own(folder)
            stack.enter_context(_environment(environment))
        else:
            options = {"address": address}
        stack.callback(ray.shutdown)
        try:
            ray.init(log_to_driver=False, configure_logging=False, **options)
        except (ConnectionError, ValueError, RuntimeError, RayError) as error:
            if address is None:
                raise ConfigError(f"no Ray could be started on this machine: {kind_and_line(error)}") from None
            raise ConfigError(
                f"train.ray_address must lead to a running Ray cluster, got {address!r}: {kind_and_line(error)}"
            ) from None
        if address is not None and _raylet.get_authentication_mode() != _raylet.AuthenticationMode.TOKEN:
            LOG.warning("train.ray_address=%r asks for no token: whoever reaches it can run code there", address)
        # Ray prints on stdout that an actor died, whatever its settings: the summary goes there, the loss is logged.
        ray._private.worker._worker_logs_enabled = False
        with contextlib.suppress(ValueError):  # not the main thread
            # With the subreaper Ray has this process, too, ignore SIGCHLD: every subprocess would seem to end well.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        yield


def lost() -> str | None:
    """Say that the head of the Ray cluster is gone, if it is; blocks for ``GCS_TIMEOUT_S`` at most."""
    address = ray.get_runtime_context().gcs_address
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=GCS_TIMEOUT_S).close()
    except OSError as error:
        return f"Ray's head (GCS) at {address} is gone: {error.strerror or kind_and_line(error)}"
    return None


def _own(folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the environment in which a Ray of our own is started, and what is said to it."""
    cache = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
    environment = {
        # What a killed actor has started must not outlive it: vLLM's processes are children of their actor.
        SUBREAPER: "true",
        ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",  # no machine but this one: so Ray takes the loopback address
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "TMPDIR": str(folder),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHINDUCTOR_CACHE_DIR": cache,  # compiled kernels stay for the next run
    }
    if "lo" not in {name for _, name in socket.if_nameindex()}:
        del environment["GLOO_SOCKET_IFNAME"]
    users = {SUBREAPER, "RAY_AUTH_MODE", "TORCHINDUCTOR_CACHE_DIR", "GLOO_SOCKET_IFNAME"} & os.environ.keys()
    options = {
        "address": "local",
        "num_cpus": os.cpu_count(),
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": False,
        "_temp_dir": str(folder),
    }
    return environment | {name: os.environ[name] for name in users}, options


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while, and have Ray read anew what it has read from them before."""
    before = {name: os.environ.get(name) for name in values}
    cluster = ray_constants.ENABLE_RAY_CLUSTER

    def read_anew(*, one_machine: bool) -> None:
        ray_constants.ENABLE_RAY_CLUSTER = cluster and not one_machine
        _raylet.Config.initialize("")
        _raylet.AuthenticationTokenLoader.instance().reset_cache()

    os.environ.update(values)
    read_anew(one_machine=True)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        read_anew(one_machine=False)


@contextlib.contextmanager
def _temporary_folder() -> Iterator[Path]:
    base = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="pipelinerl-", dir=base if len(base) <= LONGEST_TEMPORARY_FOLDER else "/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _all_ended() -> Iterator[None]:
    """End the processes that have been started since, and theirs. Those that tidy up after others end by themselves."""
    me = psutil.Process()
    before = set(me.children(recursive=True))
    try:
        yield
    finally:
        left = set(me.children(recursive=True)) - before
        _, left = psutil.wait_procs(left, timeout=END_TIMEOUT_S)
        for once_more in (False, True):
            for process in left:
                with contextlib.suppress(psutil.Error):
                    if once_more or not any("resource_tracker" in word for word in process.cmdline()):
                        process.kill()
            _, left = psutil.wait_procs(left, timeout=END_TIMEOUT_S)
