"""The manifest of a folder: its format, and the SHA-256 of every file below it; written last, when all are on disk.

A folder that agrees with its manifest is whole, to the last bit. One of another format is not read at all. What is on
disk survives the loss of power: files are told to be there (``fsync``), and so are the folders that name them.
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


class OtherFormatError(Exception):
    """A folder was sealed by code that writes something else."""


def seal(folder: Path, *, format_number: int) -> None:
    """Bring all files of a folder that is complete to disk, and then its manifest.

    Args:
        folder: What is sealed.
        format_number: What the code that writes it calls its format.

    Raises:
        OSError: A file cannot be read or written.
    """
    files = _files(folder)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        digests = dict(zip(files, pool.map(_settled, files.values()), strict=True))
    manifest = folder / MANIFEST_FILE
    content = {"files": digests, "format": format_number}
    manifest.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    sync(manifest)
    for path in (*folder.rglob("*"), folder):
        if path.is_dir():
            sync(path)


def check_sealed(folder: Path, *, format_number: int) -> None:
    """Check that a folder is as it was sealed.

    Args:
        folder: What was sealed.
        format_number: The format that the code which reads it knows.

    Raises:
        OtherFormatError: It is of another format; 0 stands for one from before there were numbers.
        ValueError: It is not as it was sealed: which file, and what is wrong with it.
        OSError: A file cannot be read.
    """
    files = _files(folder)
    manifest = files.pop(MANIFEST_FILE, None)
    if manifest is None:
        raise ValueError(f"{MANIFEST_FILE} is missing, so it was never complete")
    listed, found = _read(manifest)
    if found != format_number:
        raise OtherFormatError(f"was written by another version of pipelinerl: format {found}, not {format_number}")
    for name in sorted(listed.keys() ^ files.keys()):
        raise ValueError(f"{name} is {'missing' if name in listed else 'not in its manifest'}")
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for name, digest in zip(files, pool.map(_digest, files.values()), strict=True):
            if digest != listed[name]:
                raise ValueError(f"{name} is not as it was written (SHA-256)")


def _read(manifest: Path) -> tuple[dict[str, str], int]:
    """Return the SHA-256 of every file by name, and the number of the format."""
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
        if all(isinstance(value, str) for value in content.values()):  # from before there were numbers
            return content, 0
        return dict(content["files"]), int(content["format"])
    except (ValueError, TypeError, AttributeError, KeyError):
        raise ValueError(f"{MANIFEST_FILE} is broken") from None


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
