"""Folders with an owner: that of a run, which one driver at a time may write to, and temporary ones.

Theory of operation. The folder ``driver-N/`` of a run belongs to driver N; the highest N drives. One process makes N
+ 1 when driver N has ended, is dead, or was silent for ``LIMIT_S`` by the clock of the file system. Then it moves the
lower folders away. A driver writes unfinished files in its folder and moves them to their places, which fails once
the folder is away. The next driver gives every file that grows another inode (``Recording``). So a replaced driver
changes nothing more; it notices at its next sign of life.
"""

from __future__ import annotations

import contextlib
import json
import logging
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
from pipelinerl.records.run_folder import make_folder, writable
from pipelinerl.util.read import read_json

LOG = logging.getLogger("pipelinerl")
HEARTBEAT_S = 10.0
LIMIT_S = 120.0
"""Silence after which a driver counts as dead that this machine cannot see; NFS may remember a folder for 60 s."""
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

    def lives(self) -> bool | None:
        """Return whether it does; None: this process cannot see that one."""
        if not self.place or (self.host, self.place) != this_process()[:2]:
            return None
        return self.began == _began(self.pid)


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


def _owner_of(folder: Path) -> Owner | None:
    """Return who has a folder; None: it says nobody that can be read."""
    with contextlib.suppress(ConfigError, TypeError):
        return Owner(**read_json(folder / OWNER_FILE))
    return None


def _write_owner(folder: Path, owner: Owner) -> None:
    (folder / OWNER_FILE).write_text(json.dumps(owner._asdict()), encoding="utf-8")


def _numbered(folder: Path, number: int) -> Path:
    return folder / f"driver-{number}"


def _numbers(folder: Path) -> list[int]:
    names = [name.removeprefix("driver-") for name in os.listdir(folder) if name.startswith("driver-")]
    return sorted([0, *(int(name) for name in names if name.isdecimal())])


def driver_folder(folder: Path) -> Path | None:
    """Return the folder of the driver of a run's folder; None: it has none, or that is dead."""
    with contextlib.suppress(OSError):
        own = _numbered(folder, _numbers(folder)[-1])
        owner = _owner_of(own)
        return own if owner is not None and owner.lives() is not False else None
    return None


class DriverLock:
    """The right to write to the folder of a run; see ``driving``. ``id`` is its driver's.

    ``own`` is the folder of its driver. ``unfinished`` is one in it for what is not whole yet: nothing can be moved out
    of it when the right is lost.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.id, self._me = folder, secrets.token_hex(4), this_process()
        with writable(folder):
            self._number = self._taken()
            self.own = _numbered(self.folder, self._number)
            self.unfinished = self.own / self.id
            self.unfinished.mkdir()
            for number in _numbers(self.folder):
                with contextlib.suppress(FileNotFoundError):
                    if number < self._number:
                        _numbered(self.folder, number).rename(self.unfinished / f"{number}")
                        shutil.rmtree(self.unfinished / f"{number}", ignore_errors=True)
        self._closed = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def _taken(self) -> int:
        for _ in range(ATTEMPTS):
            last = _numbers(self.folder)[-1]
            self._check_ended(_numbered(self.folder, last))
            own = _numbered(self.folder, last + 1)
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                own.mkdir()
                _write_owner(own, self._me)
                if _numbers(self.folder)[-1] == last + 1:
                    return last + 1
                shutil.rmtree(own)
        raise ConfigError(f"--out must be a folder without another driver, got {self.folder}: several begin to use it")

    def _check_ended(self, last: Path) -> None:
        """Raise ``ConfigError`` if the driver of a folder lives, or may do so."""
        owner = _owner_of(last)
        with tempfile.TemporaryFile(dir=self.folder) as now:
            try:
                silent_s = max(0.0, os.fstat(now.fileno()).st_mtime - last.stat().st_mtime)
            except FileNotFoundError:
                return
        who = "a process" if owner is None else f"process {owner.pid} on {owner.host} (since {owner.since})"
        lives = None if owner is None else owner.lives()
        if lives or (lives is None and silent_s <= LIMIT_S):
            raise ConfigError(
                f"--out must be a folder without another driver, got {self.folder}: {who} drives it, last sign of life "
                f"{silent_s:.0f} s ago; wait for its end, or end it; if its machine is down, try again in {LIMIT_S:g} s"
            )
        why = f"silent for {silent_s:.0f} s" if lives is None else "dead"
        LOG.warning("%s is taken over from %s: %s", self.folder, who, why)

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            with contextlib.suppress(RunFailedError):
                self.check()

    def check(self) -> None:
        """Give a sign of life, and look; ``RunFailedError`` if another driver has taken over."""
        me = json.dumps(self._me._asdict()).encode()
        try:
            os.utime(self.own)
            if _numbers(self.folder)[-1] == self._number and (self.own / OWNER_FILE).read_bytes() == me:
                return
        except OSError as error:
            if not isinstance(error, FileNotFoundError):  # it may pass: the next look will tell
                return
        raise RunFailedError(f"{self.folder} has another driver: this one was silent for too long, and ends")

    def close(self) -> None:
        """End the right: the next driver need not wait."""
        self._closed.set()
        shutil.rmtree(self.unfinished, ignore_errors=True)
        if _owner_of(self.own) in (self._me, None):
            shutil.rmtree(self.own, ignore_errors=True)


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
            if left.lstat().st_uid == os.geteuid() and (owner := _owner_of(left)) and owner.lives() is False:
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="pipelinerl-", dir=where, ignore_cleanup_errors=True) as folder:
        _write_owner(Path(folder), this_process())
        yield Path(folder)
