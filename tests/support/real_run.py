"""`pipelinerl train` as a user runs it: a process of its own, whose whole tree dies with the test."""

import atexit
import contextlib
import getpass
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
from command_line import program, sets
from process_names import name_of

from backends.vllm.process import shared_memory_of
from pipelinerl.records.reports import RunReport

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_arithmetic.toml"
TOOLS = EXAMPLE.with_name("tiny_tools.toml")
UNDRAWN = "import analysis.plot; analysis.plot.draw = lambda folders: []"
"""A run draws its figures for five seconds; a test that wants them asks for them."""
SOCKETS = "VLLM_RPC_BASE_PATH"
"""Variable that says where vLLM's sockets are: a run decides itself, and removes them."""
LIMIT_S = 900.0
"""Longest wait for anything: it ends a test that hangs, on a machine however slow."""
LEFT_OVER_LIMIT_S = 60.0
"""Longest wait for what is about to go: Ray ends its processes behind the run's back."""


def python_path(folder):
    """Where a run finds modules: in this folder, here, and where this process does."""
    here = str(Path(__file__).parent)
    return os.pathsep.join((str(folder), here, *filter(None, [os.environ.get("PYTHONPATH")])))


def cached_model(folder, cache, name):
    """Put a model into a cache of Hugging Face (``HF_HOME``), as a download would; return its folder there."""
    place = cache / "hub" / f"models--{name.replace('/', '--')}"
    shutil.copytree(folder, place / "snapshots" / "1")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("1")
    return place / "snapshots" / "1"


class Process:
    """A run in a process of its own; all that it starts dies with the test."""

    def __init__(self, model, out, *overrides, resume=False, check=False, env=None, example=EXAMPLE, first=UNDRAWN):
        command = [*program(first), "train", str(example), "--out", str(out), "--json"]
        command += sets(f"train.model.path={model}", *overrides) + resume * ["--resume"] + check * ["--check"]
        self.out = out
        self.temporary = tempfile.mkdtemp(dir="/tmp")  # short, for sockets
        atexit.register(shutil.rmtree, self.temporary, ignore_errors=True)
        kernels = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"  # compiled ones stay for the next run
        own = {"TMPDIR": self.temporary, "TORCHINDUCTOR_CACHE_DIR": kernels}
        self.err = out.with_suffix(".stderr")
        with self.err.open("w") as stderr:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={name: value for name, value in os.environ.items() if name != SOCKETS} | own | (env or {}),
                start_new_session=True,
            )
        self.seen, self.shared = {}, set()

    def tree(self):
        """The processes it has started, by name: its descendants, and whoever has its temporary folder.

        A process whose parent has ended is nobody's descendant.
        """
        descendants = {one.pid for one in psutil.Process(self.process.pid).children(recursive=True)}
        for one in psutil.process_iter():
            try:
                if one.pid in descendants or one.environ().get("TMPDIR", "").startswith(self.temporary):
                    self.seen[one.pid] = (one, name_of(one))
            except psutil.Error:
                continue
        self.seen.pop(self.process.pid, None)
        return self.seen.values()

    def kill(self, name):
        """Kill the first process of this name; one look at the names of all may miss it."""
        self.wait_for(lambda: self.named(name), f"a process {name}")
        self.named(name)[0].kill()

    def named(self, name):
        return [one for one, what in self.tree() if name in what and one.is_running()]

    def in_its_group(self):
        """What it has started and what a signal to its process group would reach."""
        found = []
        for one, what in self.tree():
            with contextlib.suppress(ProcessLookupError):
                found += [what] * (os.getpgid(one.pid) == self.process.pid)
        return found

    def wait_for(self, condition, what):
        """Wait until something holds of a run that goes on."""
        over = time.monotonic() + LIMIT_S
        while not condition():
            assert self.process.poll() is None, f"no {what} among {self._names()}: " + self.last_words()
            assert time.monotonic() < over, f"no {what}: " + self.err.read_text()[-2000:]
            time.sleep(0.05)

    def _names(self):
        """What it has started, shortened: a failure that names them can be understood."""
        return sorted({what[:40] for _, what in self.seen.values()})

    def wait_for_line(self, text):
        """Wait until it has said this, on stderr."""
        self.wait_for(lambda: text in self.err.read_text(), text)

    def wait_for_step(self, step, **values):
        """Wait for a row of metrics, of this step or a later one, with these values."""
        path = self.out / "metrics.jsonl"

        def has_come():
            whole_lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
            rows = map(json.loads, whole_lines)
            return any(row["step"] >= step and values.items() <= row.items() for row in rows)

        self.wait_for(has_come, f"step {step} with {values}")
        self.shared |= shared_memory_of([one for one, _ in self.tree()])

    def last_words(self):
        """What a run that has ended said last: short enough to be shown whole by whoever reports the failure."""
        out, err = self.end()[1:]
        return "\n".join([f"the run ended with status {self.process.returncode}", *err.splitlines()[-15:], out[-200:]])

    def end(self):
        out, _ = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, out, self.err.read_text()

    def summary(self):
        """Wait for the end of a run that must succeed; return its report."""
        status, out, err = self.end()
        assert status == 0, out + err
        return RunReport.from_dict(json.loads(out), name="stdout")

    def left_over(self):
        """What is left of it: processes, shared memory, temporary files; those that are about to go have their time."""
        over = time.monotonic() + LEFT_OVER_LIMIT_S
        while (left := self._left()) and time.monotonic() < over:
            time.sleep(0.05)
        return left

    def _left(self):
        running = [
            what for one, what in self.seen.values() if one.is_running() and one.status() != psutil.STATUS_ZOMBIE
        ]
        files = [path for path in self.shared if os.path.exists(path)]
        return running + files + [str(path) for path in Path(self.temporary).iterdir()]
