"""A Ray of our own, or the one that the run file names: started, closed to strangers, watched, and ended.

Theory of operation. A Ray of our own listens on this machine's loopback address only, and asks for a token of this run.
Its files, and sockets of engines, go into one temporary folder, which only this user reaches; Ray opens its own folders
to all. At the end its processes and their children are killed, in whatever state they are, and the folder is removed.
Ray reads most of its settings from the environment, which is restored. Its processes have groups of their own: a
signal to the group of this one (Slurm, ``timeout``, Ctrl-C) leaves them to us, and the run keeps a checkpoint.

Ray kills this process silently a minute after its head, the GCS, is gone: so the head is watched.
"""

from __future__ import annotations

import contextlib
import getpass
import logging
import os
import secrets
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
import ray._raylet
from ray._private import ray_constants, services

from backends.owner import temporary_folder
from pipelinerl.errors import ConfigError
from pipelinerl.util.user_code import kind_and_line

_raylet: Any = ray._raylet
LOG = logging.getLogger("pipelinerl")
SUBREAPER = "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper"
"""Ray ends the children of a dead actor."""
OBJECT_STORE_BYTES = 512 * 2**20
"""Of a Ray of our own: holds the samples on their way to the ranks."""
LONGEST_TEMPORARY_FOLDER = 18
"""Under it Ray's sockets, whose paths have 107 bytes at most, find room (characters)."""
END_TIMEOUT_S = 3.0
"""For processes to end after SIGTERM, and again after SIGKILL."""
GCS_TIMEOUT_S = 2.0
"""In which the GCS must take a connection."""


@contextlib.contextmanager
def ray_cluster(address: str | None) -> Iterator[Callable[[], str | None]]:
    """Join the Ray cluster at an address; None: start our own, on this machine, and end it. Yields ``Parts.lost``.

    ``ConfigError`` if the cluster cannot be reached, or ours not be started.
    """
    with contextlib.ExitStack() as stack:
        processes = _RaysProcesses()
        if address is None:
            stack.callback(processes.end)
            base = tempfile.gettempdir()
            folder = stack.enter_context(temporary_folder(base if len(base) <= LONGEST_TEMPORARY_FOLDER else "/tmp"))
            environment, options = _own(folder)
            stack.enter_context(_environment(environment))
            stack.enter_context(_own_group())
        else:
            options = {"address": address}
        stack.callback(ray.shutdown)
        try:
            ray.init(log_to_driver=False, configure_logging=False, **options)
        except Exception as error:  # Ray raises Exception itself where a process of it is slow to come up
            if address is None:
                raise ConfigError(f"no Ray could be started on this machine: {kind_and_line(error)}") from None
            raise ConfigError(
                f"train.ray_address must lead to a running Ray cluster, got {address!r}: {kind_and_line(error)}"
            ) from None
        if address is None:
            processes.started()
            stack.callback(processes.look)
        elif _raylet.get_authentication_mode() != _raylet.AuthenticationMode.TOKEN:
            LOG.warning("train.ray_address=%r asks for no token: whoever reaches it can run code there", address)
        # Ray prints on stdout that an actor died, whatever its settings: the summary goes there, the loss is logged.
        ray._private.worker._worker_logs_enabled = False
        with contextlib.suppress(ValueError):  # not the main thread
            # With the subreaper Ray has this process, too, ignore SIGCHLD: every subprocess would seem to end well.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

        def lost() -> str | None:
            processes.look()
            return _lost_head()

        yield lost


def _lost_head() -> str | None:
    """Return a message if the head of the cluster is gone; blocks for ``GCS_TIMEOUT_S`` at most."""
    address = ray.get_runtime_context().gcs_address
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=GCS_TIMEOUT_S).close()
    except OSError as error:
        return f"Ray's head (GCS) at {address} is gone: {error.strerror or kind_and_line(error)}"
    return None


def _own(folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    cache = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
    environment = {
        # What a killed actor has started must not outlive it: vLLM's processes are children of their actor.
        SUBREAPER: "true",
        ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",  # no machine but this one: so Ray takes the loopback address
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "AUTOSCALER_METRIC_PORT": "-1",  # none: it serves metrics without asking for the token
        "RAY_prestart_worker_first_driver": "0",  # actors need processes with variables of their own
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
        "_temp_dir": str(folder / "ray"),
    }
    return environment | {name: os.environ[name] for name in users}, options


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables temporarily; Ray rereads its cached settings."""
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
def _own_group() -> Iterator[None]:
    """Have Ray start each process in a group of its own, which its children share.

    Not in a session: Linux shares cores among sessions, whatever the niceness; engines would slow the driver.
    """
    popen: Any = services.ConsolePopen
    services.ConsolePopen = partial(popen, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = popen


class _RaysProcesses:
    """Processes of the private Ray cluster, told apart from other children of this process."""

    def __init__(self) -> None:
        self._me = psutil.Process()
        self._before = set(self._me.children(recursive=True))
        self._first: set[Any] = set()
        self._seen: set[Any] = set()

    def started(self) -> None:
        """Note Ray's first processes, once it has started: all children started until then."""
        self._first = set(self._me.children(recursive=True)) - self._before

    def look(self) -> None:
        """Note their new children: later these have no parent."""
        for process in self._first:
            with contextlib.suppress(psutil.Error):
                self._seen |= set(process.children(recursive=True))

    def end(self) -> None:
        """End remaining processes; resource trackers last, as they clean up after the others."""
        if not self._first:
            self.started()
        _, left = psutil.wait_procs(self._first | self._seen, timeout=END_TIMEOUT_S)
        for all_of_them in (False, True):
            for process in left:
                with contextlib.suppress(psutil.Error):
                    if all_of_them or not any("resource_tracker" in word for word in process.cmdline()):
                        process.kill()
            _, left = psutil.wait_procs(left, timeout=END_TIMEOUT_S)
