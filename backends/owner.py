"""Folders with an owner: that of a run, which one driver at a time may write to, and temporary ones.

Theory of operation. ``driver-N.lock`` in a run's folder names its driver N; the highest N drives. N + 1 is made, by one
only, when driver N has ended, is dead, or was silent for ``LIMIT_S``, by the clock of the file system. Its maker looks
again, and withdraws if driver N has given a sign of life meanwhile; driver N looks after each of them, and first of all
if it stood still: one gives way. What it may still write is lost: its unfinished checkpoint has another name by then,
and the next driver gives every file that is open another inode.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pipelinerl.errors import ConfigError, RunFailedError
from pipelinerl.records.run_folder import make_folder, unwritable
from pipelinerl.util.explain import cannot_write
from pipelinerl.util.read import parse_json

LOG = logging.getLogger("pipelinerl")
HEARTBEAT_S = 10.0
LIMIT_S = 120.0
"""Silence after which a driver counts as dead that this machine cannot see; NFS may remember a folder for 60 s."""
LEASE_S = LIMIT_S / 2
"""After a sign of life; then a driver looks before it writes."""
ATTEMPTS = 10
"""To become the driver while others come and go."""
OWNER_FILE = "owner.json"


class Owner(NamedTuple):
    """A process; ``place`` is the start of its machine and its namespace of numbers, ``began`` its own start."""

    host: str
    place: str
    pid: int
    began: str
    since: str

    @property
    def seen(self) -> bool:
        """Whether this process sees whether that one lives."""
        return bool(self.place) and (self.host, self.place) == this_process()[:2]

    @property
    def dead(self) -> bool:
        """Whether it is known to be dead."""
        return self.seen and self.began != _began(self.pid)


def this_process() -> Owner:
    """Return this process, since now."""
    place = ""  # where there is no Linux
    with contextlib.suppress(OSError):
        place = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return Owner(socket.gethostname(), place, os.getpid(), _began(os.getpid()), since)


def _began(pid: int) -> str:
    with contextlib.suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]  # ticks since the boot; killed, and its parent has not noticed
    return ""


def _read(path: Path) -> tuple[Owner | None, float | None]:
    """Return owner (None: unreadable) and time of the last sign of life (None: there is no such file)."""
    with contextlib.suppress(FileNotFoundError), path.open(encoding="utf-8") as file:
        with contextlib.suppress(ConfigError, ValueError, TypeError):
            return Owner(**parse_json(file.read(), "owner")), os.fstat(file.fileno()).st_mtime
        return None, os.fstat(file.fileno()).st_mtime
    return None, None


class DriverLock:
    """The right to write to the folder of a run; see ``driving``. ``id`` is its driver's."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.id, self._me = folder, secrets.token_hex(4), this_process()
        try:
            self._path = self._taken()
        except OSError as error:
            raise unwritable(folder, error) from None
        self._until_s, self._closed = time.monotonic() + LEASE_S, threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def _taken(self) -> Path:
        for _ in range(ATTEMPTS):
            last = self._last()
            alive_s = self._check_ended(self._lock(last))
            path = self._lock(last + 1)
            try:
                with path.open("x", encoding="utf-8") as file:
                    json.dump(self._me._asdict(), file)
            except FileExistsError:
                continue
            if self._last() == last + 1 and alive_s in (None, _read(self._lock(last))[1]):
                for old in self.folder.glob("driver-*.lock"):
                    if old != path:
                        old.unlink(missing_ok=True)
                return path
            path.unlink()
        raise ConfigError(f"--out must be a folder without another driver, got {self.folder}: several begin to use it")

    def _check_ended(self, path: Path) -> float | None:
        """Return the last sign of life of a driver that may live, but was silent; ``ConfigError`` if it lives."""
        owner, alive_s = _read(path)
        if alive_s is None:
            return None
        with tempfile.TemporaryFile(dir=self.folder) as now:
            silent_s = max(0.0, os.fstat(now.fileno()).st_mtime - alive_s)
        who = "a process" if owner is None else f"process {owner.pid} on {owner.host} (since {owner.since})"
        dead = owner is not None and owner.dead
        if not dead and (silent_s <= LIMIT_S or (owner is not None and owner.seen)):
            raise ConfigError(
                f"--out must be a folder without another driver, got {self.folder}: {who} drives it, last sign of life "
                f"{silent_s:.0f} s ago; wait for its end, or end it; if its machine is down, try again in {LIMIT_S:g} s"
            )
        why = "dead" if dead else f"silent for {silent_s:.0f} s"
        LOG.warning("%s is taken over from %s: %s", self.folder, who, why)
        return None if dead else alive_s

    def _lock(self, number: int) -> Path:
        return self.folder / f"driver-{number}.lock"

    def _last(self) -> int:
        names = [path.stem.removeprefix("driver-") for path in self.folder.glob("driver-*.lock")]
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            with contextlib.suppress(RunFailedError):
                self.check()

    def check(self) -> None:
        """Give a sign of life, and look; ``RunFailedError`` if another driver has taken over."""
        now_s = time.monotonic()
        try:
            with contextlib.suppress(FileNotFoundError):
                os.utime(self._path)
            replaced = self._lock(self._last()) != self._path or not self._mine()
        except OSError as error:
            raise cannot_write(self._path, error) from error
        self._until_s = -math.inf if replaced else now_s + LEASE_S
        if replaced:
            raise RunFailedError(f"{self.folder} has another driver: this one was silent for too long, and ends")

    def check_lease(self) -> None:
        """``check``, unless the last sign of life is recent."""
        if time.monotonic() > self._until_s:
            self.check()

    def close(self) -> None:
        """End the right: the next driver need not wait."""
        self._closed.set()
        with contextlib.suppress(OSError):
            if self._mine():
                self._path.unlink()

    def _mine(self) -> bool:
        return _read(self._path)[0] == self._me  # else somebody has removed the file of this driver


@contextlib.contextmanager
def driving(folder: Path) -> Iterator[DriverLock]:
    """Be the only driver of a folder, made if need be, and removed if it stays empty; ``ConfigError`` if another is."""
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    make_folder(folder)
    try:
        with contextlib.closing(DriverLock(folder)) as lock:
            yield lock
    finally:
        for one in made:
            with contextlib.suppress(OSError):  # it is not empty
                one.rmdir()


@contextlib.contextmanager
def temporary_folder(where: str) -> Iterator[Path]:
    """Make a folder that only this user reaches, and remove it in the end, with those of this user's dead processes."""
    for left in Path(where).glob("pipelinerl-*"):
        with contextlib.suppress(OSError):
            if left.lstat().st_uid != os.geteuid():
                continue
            owner, _ = _read(left / OWNER_FILE)
            if owner is not None and owner.dead:
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="pipelinerl-", dir=where, ignore_cleanup_errors=True) as folder:
        (Path(folder) / OWNER_FILE).write_text(json.dumps(this_process()._asdict()), encoding="utf-8")
        yield Path(folder)
