"""Help, installation, and what is missing without extras."""

import importlib.metadata
import json
import os
import pty
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from command_line import COMPARE, TINY, Command, all_of, program
from run_folders import everything_in

import pipelinerl.cli
from pipelinerl.cli.options import needs_extra
from pipelinerl.errors import ConfigError, install

ROOT = Path(__file__).parents[3]
EXTRAS = ("torch", "vllm", "ray", "deepspeed", "transformers", "datasets", "math_verify", "wandb", "tensorboard")


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_teaches_the_commands_and_where_to_start(command: Command, arguments: tuple[str, ...]) -> None:
    result = command(*arguments)
    text = result.out + result.err  # where it goes without a command depends on typer's version
    for word in ("simulate", "compare", "plot", "replay", "pipelinerl plan --model Qwen3-8B"):
        assert word in text
    assert "..." not in text.partition("Commands:")[2]  # no sentence is cut


def test_help_loads_the_commands_and_nothing_that_they_need() -> None:
    """Of our packages the command modules alone, and of others none but typer: imports of a command are inside it."""
    code = "import sys, atexit; atexit.register(lambda: print(*sys.modules, file=sys.stderr))"
    ended = subprocess.run([*program(code), "--help"], capture_output=True, text=True, check=True)
    loaded = set(ended.stderr.split())
    ours = {name for name in loaded if name.partition(".")[0] in {"pipelinerl", "analysis", "sim", "backends"}}
    assert {one for one in ours if not one.startswith("pipelinerl.cli")} == {"pipelinerl", "pipelinerl.errors"}
    assert not loaded & {"numpy", "pydantic", "rich", "matplotlib", "bokeh", "jinja2", "pipelinerl.cli.pages"}


def test_the_version_is_the_packages(command: Command) -> None:
    assert command("--version").out == f"pipelinerl {pipelinerl.__version__}\n"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("simulate", ("RUN.toml", "The run file.", "--set", "scheduler.max_lag=8", "--seed", "--out", "--json")),
        ("timeline", ("DIR", "--trace full", "--out", "--begin", "--end")),
    ],
)
def test_help_of_a_command_names_its_arguments_and_options(command: Command, name: str, words: tuple[str, ...]) -> None:
    result = command(name, "--help")
    assert (result.status, result.err) == (0, "")
    assert [word for word in words if word not in result.out] == []


def test_the_installed_command_is_this_one() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="pipelinerl")
    assert script.load() is pipelinerl.cli.main


def test_a_missing_package_is_one_line_that_names_the_extra_before_anything_is_done(tmp_path: Path) -> None:
    command = [*program("import sys; sys.modules['torch'] = None"), "measure", "--out", "out"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    line = f"pipelinerl: torch is not installed; install it with: {install('train-cpu')}\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", line)
    assert everything_in(tmp_path) == {}


def test_a_missing_module_is_called_by_its_full_name() -> None:
    with pytest.raises(ConfigError, match=r"^torch\._C is not installed.*\[learn\]"), needs_extra("learn"):
        raise ModuleNotFoundError("No module named 'torch._C'", name="torch._C")


WITHOUT_EXTRAS = f"""
import json, sys
sys.modules.update(dict.fromkeys({EXTRAS!r}))
import analysis.chart, sim.validation.predict
from pipelinerl.cli import main
analysis.chart.DPI = 20
sim.validation.predict.shipped_runs = list  # no other rows: each takes seconds
for command in json.loads(sys.argv[1]):
    sys.argv[1:] = command
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, command
"""


@pytest.mark.slow
def test_without_extras_simulate_compare_plan_plot_validate_and_replay_run(tmp_path: Path, tiny: Path) -> None:
    tiny.write_text(TINY + COMPARE + "[plan]\nsimulate = 2\nsimulate_steps = 6\n", encoding="utf-8")
    rows = tmp_path / "rows.csv"
    shipped = ROOT / "sim" / "validation" / "published_runs" / "runs.csv"
    rows.write_text("".join(shipped.read_text(encoding="utf-8").splitlines(keepends=True)[:2]), encoding="utf-8")
    commands = (
        ("simulate", tiny, "--out", "run", "--trace", "full"),
        ("compare", tiny, "--out", "compared"),
        ("plan", tiny, "--out", "planned", "--workers", "1"),
        ("plot", "run"),
        ("validate", rows),
        ("replay", "run"),
    )
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS, json.dumps(commands, default=str)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    told = re.sub(r"^\d+:\d\d:\d\d  .*\n", "", ended.stderr, flags=re.MULTILINE)  # progress, on a slow machine
    assert (ended.returncode, told) == (0, "")


def on_a_terminal(*words: object) -> tuple[int, str, bytes]:
    """Return status, stdout, and what a terminal as stderr shows."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    with (
        ThreadPoolExecutor(1) as thread,
        subprocess.Popen(
            [*program(), *map(str, words)], stdout=subprocess.PIPE, stderr=theirs, env=environment, text=True
        ) as process,
    ):
        os.close(theirs)
        shown = thread.submit(all_of, ours)  # meanwhile: one that nobody reads holds the program up once it is full
        out, _ = process.communicate()
    return process.returncode, out, shown.result()


def test_progress_goes_to_the_terminal_on_stderr_and_the_results_to_stdout(tmp_path: Path, tiny: Path) -> None:
    """A bar where something is counted, a line where nothing is."""
    status, out, shown = on_a_terminal("simulate", tiny, "--out", tmp_path / "out", "--trace", "full", "--json")
    assert (status, json.loads(out)["optimizer_steps"]) == (0, 6)
    assert b"optimizer steps" in shown
    assert b"6/6" in shown
    assert b"drawing figures" in shown
    status, out, shown = on_a_terminal("replay", tmp_path / "out")
    assert (status, out.split()[0], b"replaying" in shown) == (0, "identical:", True)


def test_the_current_folder_is_on_the_path_of_users_code(tmp_path: Path, tiny: Path) -> None:
    """A process that does not begin with that path, as the installed program."""
    (tmp_path / "mine.py").write_text("")
    words = [sys.executable, "-P", *program()[1:], "simulate", str(tiny), "--set", "scheduler.kind=mine:KIND"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "must name an attribute of mine" in done.stderr
