"""The manifest of a folder: the SHA-256 of every file below it. It is written last, when all of them are on disk.

A folder that agrees with its manifest is whole, to the last bit. What is on disk survives the loss of power: files are
told to be there (``fsync``), and so are the folders that name them.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MANIFEST_FILE = "manifest.json"
NUM_THREADS = 8
"""Files that are read at a time (count); while they are read and hashed Python is free for others."""


def seal(folder: Path) -> None:
    """Bring all files of a folder that is complete to disk, and then its manifest.

    Raises:
        OSError: A file cannot be read or written.
    """
    files = _files(folder)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        digests = dict(zip(files, pool.map(_settled, files.values()), strict=True))
    manifest = folder / MANIFEST_FILE
    manifest.write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    sync(manifest)
    for path in (*folder.rglob("*"), folder):
        if path.is_dir():
            sync(path)


def check_sealed(folder: Path) -> None:
    """Check that a folder is as it was sealed.

    Raises:
        ValueError: It is not: which file, and what is wrong with it.
        OSError: A file cannot be read.
    """
    files = _files(folder)
    manifest = files.pop(MANIFEST_FILE, None)
    if manifest is None:
        raise ValueError(f"{MANIFEST_FILE} is missing, so it was never complete")
    try:
        listed = dict(json.loads(manifest.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise ValueError(f"{MANIFEST_FILE} is broken") from None
    for name in sorted(listed.keys() ^ files.keys()):
        raise ValueError(f"{name} is {'missing' if name in listed else 'not in its manifest'}")
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for name, digest in zip(files, pool.map(_digest, files.values()), strict=True):
            if digest != listed[name]:
                raise ValueError(f"{name} is not as it was written (SHA-256)")


def sync(path: Path) -> None:
    """Return when a file, or the list of what is in a folder, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(folder: Path) -> dict[str, Path]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in paths}


def _settled(path: Path) -> str:
    sync(path)
    return _digest(path)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
