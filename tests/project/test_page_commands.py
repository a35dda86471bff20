"""Every command of every page runs unchanged, in the order of its page, in a reader's folder, only smaller.

The sizes below are smaller; command line, run file and files are the reader's. ``train`` drives engines and a trainer
in memory (tests marked *real* have vLLM and DeepSpeed), and no figures are drawn (tests/analysis draws them).
"""

from __future__ import annotations

import glob
import os
import re
import runpy
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import Command
from needs import need
from page_commands import SHELLS, lines_of, parsed, questions
from pages import EXAMPLES, FENCE, PAGES, ROOT, section

need("torch")
need("tensorboard")

from tiny_measure import TINY, measure_little  # noqa: E402 - needs torch
from tiny_model import RECIPES  # noqa: E402

from backends.fake import FakeBackend  # noqa: E402
from sim.planning.certainty import make_draws  # noqa: E402
from sim.validation.predict import shipped_runs  # noqa: E402

FEW = ("optimizer_steps=2",)
LEARNS = (
    *FEW, "policy.warm_start.steps=1", "compare.seeds=[0]", "scheduler.train_batch_size=8",
    "scheduler.generation_batch_size=8",
)  # fmt: skip
MAIN_RUN = (*FEW, "cluster.accelerators=16", "cluster.generation_accelerators=6", "scheduler.train_batch_size=128")
TINY_RUN = (*FEW, "scheduler.train_batch_size=16", "train.evaluation.problems=8")
SMALLER: dict[str, tuple[str, ...]] = {
    "agent_timeouts.toml": FEW,
    "agents.toml": (*FEW, "scheduler.train_batch_size=16", "environment.count=32", "plan.environments=[32]"),
    "appendix_a.toml": (*FEW, "workload.length.max=512"),
    "estimators.toml": LEARNS,
    "h100_by_name.toml": FEW,
    "learning.toml": LEARNS,
    "learning_turns.toml": LEARNS,
    "mine/run.toml": FEW,
    "my_run.toml": TINY_RUN,
    "plan_64_gpus.toml": ("plan.generation_accelerators=[40]",),
    "plan_qwen7b_128_h100.toml": (
        "cluster.accelerators=16", "cluster.generation_accelerators=8", "plan.generation_accelerators=[8]",
        "plan.optimizer_steps_per_rl_step=[16]", "scheduler.train_batch_size=128",
    ),
    "quickstart.toml": FEW,
    "qwen7b_128_h100.toml": MAIN_RUN,
    "qwen7b_128_h100_long.toml": MAIN_RUN,
    "recommended.toml": FEW,
    "routing.toml": (
        *FEW, "scheduler.train_batch_size=16", "environment.count=32", "compare.scenarios=[{name='as published'}]",
    ),
    "spot.toml": (*FEW, "scheduler.train_batch_size=128", "scheduler.generation_batch_size=8"),
    "tiny_arithmetic.toml": TINY_RUN,
    "tiny_tools.toml": (*TINY_RUN, "train.task.settings={}", "environment.count=8"),
}  # fmt: skip
"""Overrides that make a run smaller, by the end of the path of the run file."""
SMALLER_PLAN = ("plan.simulate=1", "plan.simulate_steps=4", "plan.generation_batch_size=[32]", "plan.publish_every=[1]")
"""Overrides of every plan."""
OF_A_RUN_FILE = ("simulate", "compare", "plan", "environments", "train", "diagnose", "share")
"""Commands with ``--set``."""
MEASUREMENTS = "docs/measurements/"
RUN = {page: text for page, text in PAGES.items() if not page.startswith(MEASUREMENTS)}
"""Pages whose commands run; commands of measurements need their machine and are only parsed."""
NOT_RUN = {
    "make test": "this is a part of it",
    "make check": "likewise",
    ". .venv/bin/activate": "the shell of a reader",
    "python3 -m venv": "the reader's environment",
    "pip install": "from the network, gigabytes, and the environment is there",
    "pip uninstall": "likewise",
    "pre-commit install": "the reader's git",
    "export ": "a cluster of several machines",
    "hf download": "likewise",
    "sbatch": "likewise; see tests/project/test_clusters.py",
    "tail -f": "likewise",
    "ray start": "likewise",
    "pipelinerl train my_run.toml --set train.ray_address=auto": "likewise; see tests/project/test_clusters.py",
    "pipelinerl fleet": "a run in progress; see tests/backends/driver/test_fleet.py",
    "until ": "a spot machine",
    "pipelinerl plan examples/plan_qwen7b_128_h100.toml --ray auto": "likewise; see tests/sim/planning/test_search.py",
}
"""Beginnings of lines that do not run here, with the reason."""
PUBLISHED = shipped_runs()
"""Published runs; ``validate`` gets the first three here."""
ELSEWHERE = set(questions())
"""Lines that tests/project/test_questions.py runs."""
STEP_TIMES = """kind,batch,ctx,tokens,accelerators,utilisation,seconds
decode,1,64,,1,,0.010
decode,32,64,,1,,0.012
decode,1,512,,1,,0.011
decode,32,512,,1,,0.013
train,1,,128,1,,0.020
train,4,,512,1,,0.062
train,8,,1024,1,,0.120
"""
BROUGHT = {
    "docs/agents.md": ["pipelinerl train examples/tiny_tools.toml --out runs/tools"],
    "docs/training_clusters.md": ["pipelinerl train examples/tiny_arithmetic.toml --out runs/mine"],
    "docs/training_faults.md": ["pipelinerl train examples/tiny_arithmetic.toml --out runs/tiny"],
    "docs/calibration.md": [
        "pipelinerl simulate examples/quickstart.toml --trace full --out runs/mine",
        "pipelinerl train examples/tiny_arithmetic.toml --out runs/tiny_again",
    ],
    "docs/questions.md": [
        "pipelinerl train my_run.toml --check --out check_pipeline",
        "pipelinerl train my_run.toml --set scheduler.kind=conventional --check --out check_conventional",
    ],
}
"""Commands that make a page's inputs, besides a run file and a table; they run first."""
NO_SIGNAL = "wrong, signal: nothing can be learned: take other problems, or another model"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's folder: the examples, the scripts and own files."""
    for name in ("examples", "scripts", "Makefile", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    run = (EXAMPLES / "tiny_arithmetic.toml").read_text(encoding="utf-8").replace('"arithmetic"', '"my_tasks:Reverse"')
    run = run.replace("max_prompt_tokens = 16", "max_prompt_tokens = 32")
    (tmp_path / "my_run.toml").write_text(run, encoding="utf-8")
    page = section("docs/training_task.md", "Your own task")
    (task,) = [block[3] for block in FENCE.finditer(page) if block[1] == "python"]
    (tmp_path / "my_tasks.py").write_text(task, encoding="utf-8")
    blocks = FENCE.finditer(section("docs/training_faults.md", "Faults on purpose"))
    (tmp_path / "faults.toml").write_text(next(one[3] for one in blocks if one[1] == "toml"), encoding="utf-8")
    (tmp_path / "step_times.csv").write_text(STEP_TIMES, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    return tmp_path


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch, in_this_process: None) -> None:
    """Training and measuring are small, and nothing is drawn."""
    for module in ("backends.run", "backends.check.run_check"):
        monkeypatch.setattr(f"{module}.backend_of", lambda _: FakeBackend())
    monkeypatch.setattr("backends.measure.bench.CPU_SIZES", TINY)
    measure_little(monkeypatch)
    monkeypatch.setitem(make_draws.__kwdefaults__, "number", 8)
    monkeypatch.setattr("sim.validation.predict.shipped_runs", lambda: PUBLISHED[:3])
    recipes = {name: replace(one, fit_steps=1, batch=8) for name, one in RECIPES.items()}
    monkeypatch.setattr("tiny_model.RECIPES", recipes)
    monkeypatch.setattr("analysis.plot.save_figures", lambda *_, **__: [])


def smaller(name: str, words: list[str]) -> list[str]:
    """Return the options that make a command smaller."""
    files = [values for end, values in SMALLER.items() for word in words if word.endswith(f"/{end}") or word == end]
    sets = [one for values in files for one in values] + [*(SMALLER_PLAN if name in ("plan", "diagnose") else ())]
    return [part for one in sets for part in ("--set", one)] if name in OF_A_RUN_FILE else []


def run_line(line: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a line as a shell would, with variables and wildcards expanded."""
    words = [os.path.expandvars(one) for one in shlex.split(line) if one != "..."]
    program, *words = [name for one in words for name in (sorted(glob.glob(one)) or [one])]
    match program:
        case "pipelinerl":
            result = command(*words, *smaller(words[0], words[1:]))
            if "--check" in words and result.status:  # the model in memory answers at random
                assert (NO_SIGNAL in result.out, result.out.count("\nwrong, ")) == (True, 1), (line, result)
            else:
                assert result.status == 0, (line, result.err)
        case "python":
            monkeypatch.setattr("sys.argv", words)
            try:
                runpy.run_path(words[0], run_name="__main__")
            except SystemExit as end:
                assert not end.code, (line, end.code)  # noqa: PT017 - what is not raised is right, too
        case "make":
            recipe = subprocess.run(["make", "-n", *words], capture_output=True, text=True, check=True).stdout
            for one in re.findall(r"^\S+/bin/((?:pipelinerl|python scripts/).*)$", recipe, re.MULTILINE):
                run_line(one, command, monkeypatch)
        case _:
            raise AssertionError(f"{line}: it runs here, or NOT_RUN says why not")


@pytest.mark.slow(seconds=10)  # each
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("folder", "in_memory")
@pytest.mark.parametrize("page", [page for page, text in RUN.items() if lines_of(text)])
def test_every_command_of_a_page_runs(command: Command, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, in order, so that a command may read files of earlier ones."""
    for line in dict.fromkeys([*BROUGHT.get(page, ()), *lines_of(PAGES[page])]):
        if line not in ELSEWHERE and not line.startswith(tuple(NOT_RUN)):
            run_line(line, command, monkeypatch)


def test_lines_that_do_not_run_are_on_a_page_and_are_parsed() -> None:
    lines = [line for text in PAGES.values() for line in lines_of(text)]
    assert len(set(lines)) > 90
    not_run = [next(one for one in lines if one.startswith(start)) for start in NOT_RUN]
    measured = [line for page, text in PAGES.items() if page not in RUN for line in lines_of(text)]
    assert len(measured) > 5
    for line in [*not_run, *measured]:
        if line.startswith("pipelinerl "):
            parsed(line)


def test_no_command_hides_in_a_block_of_another_language() -> None:
    """Blocks of "text" hold output."""
    others = [one[3] for text in PAGES.values() for one in FENCE.finditer(text) if one[1] not in (*SHELLS, "text")]
    assert [one for block in others for one in re.findall(r"^(?:\$ )?pipelinerl .*", block, re.MULTILINE)] == []
