"""Broken files of every kind, for every command that reads them: one line, status 2, soon, in little memory.

``BROKEN_FILES=2000 python -m pytest tests/project/test_broken_files.py`` tries as many; each seed is one of them.
"""

from __future__ import annotations

import gzip
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import TINY, Command

from pipelinerl.config.run import load_run
from sim.run import simulate

NUMBER = int(os.environ.get("BROKEN_FILES", "120"))
MOST_S, MOST_KB = 2.0, 500_000
"""Of one command: seconds of the processor, beyond the imports, and kilobytes."""
TOKENS = [
    *(b"nan", b"-1", b"1e999", b"9" * 5000, b"null", b"{}", b"[]", b'"\\ud800"', b"\x00", b"\xff", b"\r", b"\x1b[2J"),
    *(b"<img src=x onerror=alert(1)>", b"true", b",", b"=", b'"', b"[" * 5000, b"a." * 5000, b"../../etc", b""),
]
LOG = b"".join(
    b"step:%d - timing_s/step:60.0 - timing_s/gen:30.0 - timing_s/update_actor:20 - perf/total_num_tokens:51200 - "
    b"response_length/mean:100.0 - response_length/max:400.0 - prompt_length/mean:100.0\n" % number
    for number in range(1, 4)
)
TIMES = b"kind,batch,ctx,seconds\n" + b"".join(b"decode,%d,%d,0.0%d\n" % (n, 100 * n, n + 10) for n in range(1, 9))
METRICS = b"".join(
    b'{"step": %d, "reward/mean": 0.5, "ess/lag_0": 0.9, "ess/token_raw": 0.9}\n' % n for n in range(1, 7)
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file of every kind, all whole."""
    root = tmp_path_factory.mktemp("whole")
    (root / "run.toml").write_text(TINY)
    simulate(load_run(root / "run.toml"), out=root / "run", trace=True)
    (root / "run" / "metrics.jsonl").write_bytes(METRICS)
    (root / "verl.log").write_bytes(LOG)
    (root / "times.csv").write_bytes(TIMES)
    (root / "lengths.csv").write_text("prompt_id,response_tokens,prompt_tokens\n1,5,9\n1,6,9\n2,7,9\n2,8,9\n")
    return root


SIMULATE = ("simulate", "run.toml")
LENGTHS = ("--set", "workload.length.kind=empirical", "--set", "workload.length.source=lengths.csv")
READERS: list[tuple[str, tuple[str, ...]]] = [
    ("run.toml", SIMULATE),
    ("run/summary.json", ("report", "run", "--out", "page.md")),
    ("run/profile.json", ("report", "run", "--out", "page.md")),
    ("run/steps.csv", ("report", "run", "--out", "page.md")),
    ("run/metrics.jsonl", ("report", "run", "--out", "page.md")),
    ("run/trace.jsonl.gz", ("replay", "run")),
    ("run/trace.jsonl.gz", ("timeline", "run", "--out", "timeline.json")),
    ("run/trace.jsonl.gz", ("calibrate", "run")),
    ("times.csv", ("calibrate", "times.csv")),
    ("lengths.csv", (*SIMULATE, *LENGTHS)),
    ("verl.log", ("calibrate", "--from", "verl", "verl.log", "--run", "run.toml")),
    ("run.toml", (*SIMULATE, "--hardware", "run.toml")),
]  # fmt: skip


def edited(data: bytes, chance: random.Random) -> bytes:
    """Return bytes with one to four changes: flipped, cut, doubled, spliced, of another type or size."""
    for _ in range(chance.randint(1, 4)):
        at, to = sorted(chance.randrange(len(data) + 1) for _ in range(2))
        match chance.randrange(6):
            case 0 if at < len(data):
                data = data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
            case 1:
                data = data[:at]
            case 2:
                data = data[:to] + data[at:]
            case 3:
                data = data[:at] + data[to:]
            case 4:
                data = data[:at] + chance.choice(TOKENS) + data[at:]
            case _:
                words = data.split(b" ")
                words[chance.randrange(len(words))] = chance.choice(TOKENS)
                data = b" ".join(words)
    return data


def huge(path: Path, chance: random.Random) -> None:
    path.write_bytes(
        chance.choice([b"[" * 10**6, b"a" * 10**7, b"{}," * 10**6, b"\n" * 10**6, b"a=1\n" * 10**6, bytes(10**7)])
    )


def replaced_by(make: Callable[[Path], object]) -> Callable[[Path, random.Random], None]:
    def replace(path: Path, _: random.Random) -> None:
        path.unlink()
        make(path)

    return replace


PLACES: list[Callable[[Path, random.Random], None]] = [
    huge,
    replaced_by(lambda path: path.mkdir()),
    replaced_by(os.mkfifo),
    replaced_by(lambda path: path.symlink_to("/dev/zero")),
    replaced_by(lambda path: path.symlink_to(path)),
    replaced_by(lambda path: None),
    replaced_by(lambda path: path.touch()),
]


def memory_kb(name: str) -> int:
    """Return a figure of this process from the kernel (kB)."""
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(f"{name}:")]
    return int(line.split()[1])


@pytest.mark.slow(seconds=60)
def test_a_broken_file_is_one_line(
    whole: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    faults, refused = [], 0
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: this process has run other tests
    before_kb = memory_kb("VmRSS")
    for seed in range(NUMBER):
        chance = random.Random(seed)
        name, arguments = READERS[seed % len(READERS)]
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(whole, work)
        monkeypatch.chdir(work)
        path = work / name
        if chance.random() < 0.2:
            chance.choice(PLACES)(path, chance)
        elif path.suffix == ".gz" and chance.random() < 0.8:
            path.write_bytes(gzip.compress(edited(gzip.decompress(path.read_bytes()), chance), 1))
        else:
            path.write_bytes(edited(path.read_bytes(), chance))
        begin_s = time.process_time()
        try:
            result = command(*arguments)
        except BaseException as error:  # what the command line would show as a traceback
            faults.append(f"seed {seed}, {name}, {arguments[0]}: {error!r}"[:300])
            continue
        took_s = time.process_time() - begin_s
        # A file may be valid after its change, and a changed run may differ, stall or be another one.
        lines = [line for line in result.err.splitlines() if not line.startswith("pipelinerl: warning: ")]
        told = result.status in (0, 1) or (result.status == 2 and lines and not result.out)
        if not told or any(len(line) > 1100 for line in lines) or took_s > MOST_S:
            faults.append(f"seed {seed}, {name}, {arguments[0]}: {result.status}, {took_s:.1f} s, {result.err[:300]}")
        refused += result.status == 2
    assert not faults, "\n".join(faults)
    assert refused > NUMBER / 3
    assert memory_kb("VmHWM") - before_kb < MOST_KB
