"""`pipelinerl train` as a user runs it: a process of its own, whose whole tree dies with the test."""

from __future__ import annotations

import getpass
import os
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
from command_line import program

from backends.vllm.process import shared_memory_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_arithmetic.toml"
TOOLS = EXAMPLE.with_name("tiny_tools.toml")
UNDRAWN = "import analysis.plot; analysis.plot.draw = lambda folders: []"
"""A run draws its figures for five seconds; a test that wants them asks for them."""
START_TIMEOUT_S = 300.0
RUN_TIMEOUT_S = 600.0


def options(model, *sets):
    overrides = (f"train.model.path={model}", *sets)
    return [part for one in overrides for part in ("--set", one)]


def python_path(folder):
    """Where a run finds modules: in this folder, here, and where this process does."""
    here = str(Path(__file__).parent)
    return os.pathsep.join((str(folder), here, *filter(None, [os.environ.get("PYTHONPATH")])))


class Process:
    """A run in a process of its own; all that it starts dies with the test."""

    def __init__(self, model, out, *sets, resume=False, check=False, env=None, example=EXAMPLE):
        command = [*program(UNDRAWN), "train", str(example), "--out", str(out)]
        command += [
            *options(model, *sets),
            "--json",
            *(["--resume"] if resume else []),
            *(["--check"] if check else []),
        ]
        self.out = out
        self.temporary = tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True)  # short, for sockets
        kernels = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"  # compiled ones stay for the next run
        own = {"TMPDIR": self.temporary.name, "TORCHINDUCTOR_CACHE_DIR": kernels}
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | own | (env or {}),
            start_new_session=True,
        )
        self.seen, self.shared = {}, set()

    def tree(self):
        """The processes it has started, by name."""
        root = psutil.Process(self.process.pid)
        for one in root.children(recursive=True):
            try:
                self.seen[one.pid] = (one, one.name() + " " + " ".join(one.cmdline()))
            except psutil.Error:
                continue
        return self.seen.values()

    def kill(self, name):
        """Kill the first process of this name; one look at the names of all may miss it."""
        over = time.monotonic() + START_TIMEOUT_S
        while not (victims := [one for one, what in self.tree() if name in what and one.is_running()]):
            assert self.process.poll() is None, self.last_words()
            assert time.monotonic() < over, sorted(what.strip()[:60] for _, what in self.tree())
            time.sleep(0.05)
        victims[0].kill()

    def wait_for_step(self, step):
        over = time.monotonic() + START_TIMEOUT_S
        metrics = self.out / "metrics.jsonl"
        while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
            assert self.process.poll() is None, self.last_words()
            assert time.monotonic() < over, "the run does not get on"
            time.sleep(0.05)
        self.shared |= shared_memory_of([one for one, _ in self.tree()])

    def last_words(self):
        """What a run that has ended said last: short enough to be shown whole by whoever reports the failure."""
        out, err = self.process.communicate()
        return "\n".join([f"the run ended with status {self.process.returncode}", *err.splitlines()[-15:], out[-200:]])

    def end(self):
        out, err = self.process.communicate(timeout=RUN_TIMEOUT_S)
        return self.process.returncode, out, err

    def left_over(self):
        """What is left of it some seconds after its end: processes, shared memory, temporary files."""
        _, alive = psutil.wait_procs([one for one, _ in self.seen.values()], timeout=20)
        running = [self.seen[one.pid][1] for one in alive if one.status() != psutil.STATUS_ZOMBIE]
        files = [path for path in self.shared if os.path.exists(path)]
        return running + files + [str(path) for path in Path(self.temporary.name).iterdir()]
