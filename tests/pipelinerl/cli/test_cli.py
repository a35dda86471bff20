"""The command line as a user meets it: what it prints, what it leaves, and one clear line for all that is wrong."""

from __future__ import annotations

import copy
import csv
import gzip
import importlib.metadata
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import analysis.figures
import analysis.report
import sim.parallel
from pipelinerl import cli
from pipelinerl.cli.options import needs_extra
from pipelinerl.cli.render_comparison import print_comparison
from pipelinerl.cli.render_run import duration, print_summary
from pipelinerl.config.run_file import load_run
from pipelinerl.errors import ConfigError
from pipelinerl.records.run_folder import RunFolder

TINY = """
seed = 3
optimizer_steps = 6

[cluster]
accelerators = 4
generation_accelerators = 2

[scheduler]
train_batch_size = 4
generation_batch_size = 6
optimizer_steps_per_rl_step = 3

[workload]
group_size = 2
prompt_tokens = 10
length = { kind = "uniform", max = 50 }

[hardware]
decode = { kind = "affine", step_s = 0.01 }
training = { token_s = 1e-3 }
weights = { publish_s = 0.01, pause_s = 0.01 }
"""
COMPARE = """
[compare]
baseline = "conventional"
arms = [{ name = "pipeline" }, { name = "conventional", set = ["scheduler.kind=conventional"] }]
"""
STALLS = ("workload.success_rate=1.0", "scheduler.filter_no_signal=true", "scheduler.discard_limit=20")
ROOT = Path(__file__).parents[3]
EXTRAS = ("torch", "vllm", "ray", "deepspeed", "transformers", "datasets", "math_verify", "wandb", "tensorboard")
RUN_FILES = ["profile.json", "run.toml", "steps.csv", "summary.json"]


def program(first: str = "pass") -> list[str]:
    """Return how to start the program in a process of its own, after a statement."""
    return [sys.executable, "-c", f"{first}; from pipelinerl.cli import main; main()"]


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    status: int
    out: str
    err: str


Command = Callable[..., Result]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command line in this process."""
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["pipelinerl", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return Result(int(ended.value.code or 0), captured.out, captured.err)

    return call


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw nothing: it is most of the time of a short run."""
    monkeypatch.setattr(analysis.report, "save_figures", lambda *_, **__: [])


@pytest.fixture
def small_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw everything, but with few pixels."""
    monkeypatch.setattr(analysis.report, "DPI", 20)


class InThisProcess:
    """Runs what is submitted at once; processes are slow to start."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """As ``ProcessPoolExecutor``."""

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future

    def shutdown(self, **_: bool) -> None:
        """Nothing is left to end."""


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim.parallel, "ProcessPoolExecutor", InThisProcess)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def everything_in(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def sets(*overrides: str) -> list[str]:
    return [part for override in overrides for part in ("--set", override)]


def rows_of(folder: Path) -> list[dict[str, str]]:
    """Return the rows of steps.csv, each whole."""
    text = (folder / "steps.csv").read_text()
    assert text.endswith("\n")
    rows = list(csv.DictReader(text.splitlines(), strict=True))
    for row in rows:
        assert None not in row  # no cell too many
        assert None not in row.values()  # and none too few
    return rows


# ------------------------------------------------------------------------------------ wrong input

KEYS = (
    "discard_limit, filter_no_signal, generation_batch_size, kind, max_lag, micro_batch_size, on_full, on_stale, "
    "optimizer_steps_per_rl_step, partial_rollouts, publish_every, ready_queue_size, train_batch_size, weight_update"
)
SHIPPED = "shipped sets: areal_deepscaler, areal_nemotron, rgym_llama_400, rgym_llama_800, skythought"
EMPIRICAL = "workload.length.kind=empirical"
FAULTS: dict[str, tuple[tuple[str, ...], str]] = {
    "an unknown key": (
        ("scheduler.max_lagg=3",),
        f"tiny.toml: scheduler.max_lagg is an unknown key; did you mean max_lag? allowed: {KEYS}",
    ),
    "an unknown table": (
        ("schedule.max_lag=3",),
        "tiny.toml: schedule is an unknown key; did you mean scheduler? allowed: cluster, compare, drift, hardware, "
        "optimizer_steps, plan, policy, scheduler, seed, train, workload",
    ),
    "a wrong type": (
        ("scheduler.train_batch_size=many",),
        'tiny.toml: scheduler.train_batch_size must be a whole number, got "many"',
    ),
    "a word that is none of the choices": (
        ("scheduler.kind=async",),
        "tiny.toml: scheduler.kind must be pipeline, conventional, one_step_off, partial_rollouts or "
        "package.module:ATTRIBUTE, got 'async'",
    ),
    "a count of zero": (("optimizer_steps=0",), "tiny.toml: optimizer_steps must be at least 1, got 0"),
    "a negative count": (
        ("workload.group_size=-2",),
        "tiny.toml: workload.group_size must be at least 1, got -2",
    ),
    "I = N": (
        ("cluster.generation_accelerators=4",),
        "tiny.toml: cluster.generation_accelerators must be below cluster.accelerators, got "
        "generation_accelerators=4, accelerators=4",
    ),
    "I > N": (
        ("cluster.accelerators=1",),
        "tiny.toml: cluster.generation_accelerators must be below cluster.accelerators, got "
        "generation_accelerators=2, accelerators=1",
    ),
    "a group size that does not divide B": (
        ("workload.group_size=3",),
        "tiny.toml: scheduler.train_batch_size must be a multiple of workload.group_size, got train_batch_size=4, "
        "group_size=3",
    ),
    "a rollout longer than the KV cache can ever hold": (
        ("hardware.kv_cache_tokens=59",),
        "tiny.toml: hardware.kv_cache_tokens must hold the longest rollout, workload.prompt_tokens + "
        "workload.length.max = 60 tokens, got kv_cache_tokens=59",
    ),
    "a prompt in the length file longer than the KV cache can ever hold": (
        (EMPIRICAL, "workload.length.source=good.csv", "hardware.kv_cache_tokens=149"),
        "hardware.kv_cache_tokens must hold the longest prompt of workload.length.source and workload.length.max, "
        "150 tokens in all, got kv_cache_tokens=149",
    ),
    "a max_lag that no schedule can meet": (
        ("scheduler.kind=conventional", "scheduler.max_lag=1"),
        "tiny.toml: scheduler.max_lag cannot be met: a conventional RL step trains its last batch at lag "
        "optimizer_steps_per_rl_step - 1 = 2, got max_lag=1",
    ),
    "a missing length file": (
        (EMPIRICAL, "workload.length.source=none.csv"),
        f"cannot read workload.length.source {{tmp}}/none.csv: No such file or directory; {SHIPPED}",
    ),
    "a length file that is a folder": (
        (EMPIRICAL, "workload.length.source=folder.csv"),
        f"cannot read workload.length.source {{tmp}}/folder.csv: Is a directory; {SHIPPED}",
    ),
    "an unknown shipped set": (
        (EMPIRICAL, "workload.length.source=skythoughts"),
        "workload.length.source must be a shipped set or the path of a .csv file, got 'skythoughts'; did you mean "
        f"skythought? {SHIPPED}",
    ),
    "a length file with a wrong column": (
        (EMPIRICAL, "workload.length.source=header.csv"),
        "{tmp}/header.csv line 1: 'tokens' is an unknown column; did you mean prompt_tokens? allowed, with commas in "
        "between: prompt_id, response_tokens, prompt_tokens, correct",
    ),
    "a length file with a wrong cell": (
        (EMPIRICAL, "workload.length.source=cell.csv"),
        "{tmp}/cell.csv line 3: response_tokens must be a whole number from 0 to 1000000000, got 'many'",
    ),
    "a length file that is no text": (
        (EMPIRICAL, "workload.length.source=binary.csv"),
        "cannot read workload.length.source {tmp}/binary.csv: it is not UTF-8 text",
    ),
    "a missing utilisation table": (
        ("hardware.decode={kind='utilisation', flash_s=1e-5, table='none.csv'}",),
        "cannot read utilisation table {tmp}/none.csv: No such file or directory",
    ),
    "an override without =": (
        ("scheduler.max_lag",),
        "--set must be KEY=VALUE with a dotted key, got 'scheduler.max_lag'",
    ),
    "an override into something that is no table": (("seed.x=3",), "--set seed.x=3: seed is not a table"),
}


@pytest.mark.parametrize(("overrides", "line"), FAULTS.values(), ids=FAULTS)
def test_wrong_input_is_one_clear_line_status_2_and_nothing_written(
    command: Command, tmp_path: Path, tiny: Path, overrides: tuple[str, ...], line: str
) -> None:
    (tmp_path / "good.csv").write_text("prompt_id,response_tokens,prompt_tokens\n1,5,100\n")
    (tmp_path / "header.csv").write_text("prompt_id,tokens\n1,5\n")
    (tmp_path / "cell.csv").write_text("prompt_id,response_tokens\n1,5\n1,many\n")
    (tmp_path / "binary.csv").write_bytes(b"prompt_id,response_tokens\n\xff")
    (tmp_path / "folder.csv").mkdir()
    before = everything_in(tmp_path)
    line = f"pipelinerl: {line.format(tmp=tmp_path)}\n"
    result = command("simulate", tiny, *sets(*overrides), "--out", tmp_path / "out", "--trace", "full")
    assert result == Result(2, "", line)
    tiny.write_text(TINY + '\n[compare]\nbaseline = "a"\narms = [{ name = "a" }]\n')
    before["tiny.toml"] = tiny.read_bytes()
    result = command("compare", tiny, *sets(*overrides), "--out", tmp_path / "out")
    # A file is opened for each run of a comparison, whose line names the run.
    assert result in (Result(2, "", line), Result(2, "", line.replace(": ", ": scenario 'as given', arm 'a': ", 1)))
    assert everything_in(tmp_path) == before


def test_several_faults_are_a_line_each(command: Command, tiny: Path) -> None:
    assert command("simulate", tiny, *sets("seed=-1", "optimizer_steps=0")) == Result(
        2,
        "",
        "pipelinerl: tiny.toml: seed must be at least 0, got -1\n"
        "pipelinerl: tiny.toml: optimizer_steps must be at least 1, got 0\n",
    )


@pytest.mark.parametrize("name", ["simulate", "compare"])
def test_a_negative_seed_is_one_line(command: Command, tiny: Path, name: str) -> None:
    line = "pipelinerl: tiny.toml: seed must be at least 0, got -1\n"
    assert command(name, tiny, "--seed", "-1") == Result(2, "", line)


@pytest.mark.parametrize("name", ["simulate", "compare"])
@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("none.toml", "cannot read run file {tmp}/none.toml: No such file or directory"),
        ("", "cannot read run file {tmp}: Is a directory"),
        ("binary.toml", "cannot read run file {tmp}/binary.toml: it is not UTF-8 text"),
        ("broken.toml", "{tmp}/broken.toml is not valid TOML: Expected '=' after a key in a key/value pair (at line 2, "
         "column 6)"),
        ("key.toml", "key.toml: scheduler.lag is an unknown key; did you mean max_lag? allowed: " + KEYS),
    ],
)  # fmt: skip
def test_a_wrong_run_file_is_one_line(command: Command, tmp_path: Path, name: str, path: str, line: str) -> None:
    (tmp_path / "binary.toml").write_bytes(b"seed = \xff")
    (tmp_path / "broken.toml").write_text("seed = 1\nseed two")
    (tmp_path / "key.toml").write_text(TINY.replace("[workload]", "lag = 1\n[workload]"))
    before = everything_in(tmp_path)
    result = command(name, tmp_path / path, "--out", tmp_path / "out")
    assert result == Result(2, "", f"pipelinerl: {line.format(tmp=tmp_path)}\n")
    assert everything_in(tmp_path) == before


@pytest.mark.parametrize(
    ("table", "line"),
    [
        (
            '{ baseline = "a", arms = [{ name = "a" }, { name = "a" }] }',
            "tiny.toml: compare.arms must have different names, got ['a', 'a']",
        ),
        (
            '{ baseline = "b", arms = [{ name = "a" }] }',
            "tiny.toml: compare.baseline must be the name of an arm, got 'b'; allowed: ['a']",
        ),
        (
            '{ baseline = "a", arms = [{ name = "a" }], scenarios = [{ name = "s", set = ["scheduler.lag=1"] }] }',
            "scenario 's', arm 'a': scheduler.lag is an unknown key; did you mean max_lag? allowed: " + KEYS,
        ),
        (
            '{ baseline = "a", arms = [{ name = "a" }, { name = "b", set = ["max_lag"] }] }',
            "scenario 'as given', arm 'b': --set must be KEY=VALUE with a dotted key, got 'max_lag'",
        ),
        (
            '{ baseline = "a", arms = [{ name = "a", set = ["optimizer_steps=0"] }] }',
            "scenario 'as given', arm 'a': optimizer_steps must be at least 1, got 0",
        ),
    ],
)
def test_a_wrong_comparison_is_one_line(command: Command, tmp_path: Path, tiny: Path, table: str, line: str) -> None:
    tiny.write_text(f"compare = {table}\n{TINY}")
    before = everything_in(tmp_path)
    assert command("compare", tiny, "--out", tmp_path / "out") == Result(2, "", f"pipelinerl: {line}\n")
    assert everything_in(tmp_path) == before


HELD = "--out must be a folder without a run, got {tmp}/out, which holds "
UNWRITABLE = "--out must be a folder that can be written, got "


@pytest.mark.parametrize("name", ["simulate", "compare"])
@pytest.mark.parametrize(
    ("there", "out", "line"),
    [
        ("out/run.toml", "out", f"{HELD}run.toml"),
        ("out/comparison.json", "out", f"{HELD}comparison.json"),
        ("out/steps.csv", "out", f"{HELD}steps.csv"),
        ("out/summary.json", "out", f"{HELD}summary.json"),
        ("out/trace.jsonl.gz/x", "out", f"{HELD}trace.jsonl.gz"),
        ("out", "out", "--out must be a folder, got the file {tmp}/out"),
        ("file", "file/out", UNWRITABLE + "{tmp}/file/out: Not a directory"),
        ("file", "x" * 300, f"{UNWRITABLE}{{tmp}}/{'x' * 300}: File name too long"),
    ],
)
def test_an_output_folder_that_is_taken_or_cannot_be_written_is_one_line(
    command: Command, tmp_path: Path, tiny: Path, name: str, there: str, out: str, line: str
) -> None:
    (tmp_path / there).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / there).write_text("precious")
    before = everything_in(tmp_path)
    assert command(name, tiny, "--out", tmp_path / out) == Result(2, "", f"pipelinerl: {line.format(tmp=tmp_path)}\n")
    assert everything_in(tmp_path) == before


def test_a_folder_that_takes_no_files_is_one_line(
    command: Command, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path, _text: str, encoding: str) -> int:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "out").mkdir()
    monkeypatch.setattr(Path, "write_text", refuse)  # root, as which tests may run, may write anywhere
    line = f"pipelinerl: {UNWRITABLE}{tmp_path}/out: Permission denied\n"
    assert command("simulate", tiny, "--out", tmp_path / "out") == Result(2, "", line)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_trace_needs_a_folder(command: Command, tiny: Path) -> None:
    line = "pipelinerl: --trace full needs --out DIR to write the trace to\n"
    assert command("simulate", tiny, "--trace", "full") == Result(2, "", line)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("simulat",), "simulat"),
        (("simulate",), "RUN.toml"),
        (("simulate", "run.toml", "--colour"), "--colour"),
        (("simulate", "run.toml", "--seed", "x"), "--seed"),
        (("simulate", "run.toml", "--trace", "half"), "--trace"),
        (("compare", "run.toml", "--trace", "full"), "--trace"),
        (("plot",), "DIR"),
        (("replay", "one", "two"), "two"),
    ],
)
def test_an_unknown_command_or_option_is_named_with_status_2(
    command: Command, arguments: tuple[str, ...], word: str
) -> None:
    result = command(*arguments)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("Usage: ")
    last = result.err.splitlines()[-1]
    assert last.startswith("Error: ")
    assert word in last


# --------------------------------------------------------------------------------------- simulate


@pytest.fixture
def finished(command: Command, tmp_path: Path, tiny: Path, no_figures: None) -> Path:
    """A run folder with its trace."""
    assert command("simulate", tiny, "--out", tmp_path / "run", "--trace", "full").status == 0
    return tmp_path / "run"


def test_the_run_folder_holds_the_run_and_the_table_its_numbers(
    command: Command, tmp_path: Path, tiny: Path, no_figures: None
) -> None:
    result = command("simulate", tiny, "--out", tmp_path / "run")
    assert (result.status, result.err) == (0, "")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == RUN_FILES
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["optimizer_steps"], summary["complete"]) == (6, True)
    lag, rollouts = summary["lag"], summary["rollouts"]
    for number in (
        "tiny.toml: pipeline",
        f"{summary['tokens_per_s']:,.0f} tokens/s, {summary['samples_per_s']:,.1f} samples/s",
        f"mean {lag['mean']:.2f}, p95 {lag['p95']}, p99 {lag['p99']}, max {lag['max']}",
        f"{lag['in_flight_mean']:.2f} in flight, {lag['in_queue_mean']:.2f} in queue",
        f"training {summary['seconds']['training'] / summary['duration_s']:.0%}",
        f"generation {summary['utilisation']['generation']:.0%}, training {summary['utilisation']['training']:.0%}",
        summary["bottleneck"],
        duration(summary["duration_s"]),
        f"{rollouts['started']:,} started",
        f"{rollouts['trained']:,} trained",
    ):
        assert number in result.out
    rows = rows_of(tmp_path / "run")
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    assert sum(int(row["tokens"]) for row in rows) == summary["tokens_trained"]


def test_json_on_stdout_is_the_summary_of_the_folder(
    command: Command, tmp_path: Path, tiny: Path, no_figures: None
) -> None:
    result = command("simulate", tiny, "--json", "--out", tmp_path / "run")
    assert (result.status, result.err) == (0, "")
    assert json.loads(result.out) == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert json.loads(command("simulate", tiny, "--json").out) == json.loads(result.out)


def test_without_out_nothing_is_written(command: Command, tmp_path: Path, tiny: Path) -> None:
    before = everything_in(tmp_path)
    assert command("simulate", tiny).status == 0
    assert everything_in(tmp_path) == before


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes_in_every_file_and_figure(
    command: Command, tmp_path: Path, tiny: Path, small_figures: None
) -> None:
    """The folders have the same name, as figures name a run by its folder."""
    for name in ("first", "second"):
        assert command("simulate", tiny, "--out", tmp_path / name / "run", "--trace", "full").status == 0
    first = everything_in(tmp_path / "first" / "run")
    assert {*RUN_FILES, "trace.jsonl.gz", "figures/lag_by_step.png", "figures/time_split.pdf"} <= set(first)
    assert first == everything_in(tmp_path / "second" / "run")


def test_another_seed_gives_another_run_and_the_option_overrides_the_file(
    command: Command, tmp_path: Path, tiny: Path, no_figures: None
) -> None:
    for name, seed in (("a", ()), ("b", ("--seed", 4)), ("c", ("--seed", 3)), ("d", ("--set", "seed=4"))):
        assert command("simulate", tiny, *seed, "--out", tmp_path / name, "--trace", "full").status == 0
    a, b, c, d = (everything_in(tmp_path / name) for name in "abcd")
    assert a == c
    assert b == d
    for name in a:
        assert a[name] != b[name], name
    assert load_run(tmp_path / "b" / "run.toml").seed == 4


def test_the_run_file_of_the_folder_makes_the_same_run_again(
    command: Command, tmp_path: Path, tiny: Path, no_figures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.csv").write_text("prompt_id,response_tokens\n1,5\n1,50\n2,20\n")
    overrides = sets(EMPIRICAL, "workload.length.source=mine.csv", "scheduler.max_lag=2")
    assert command("simulate", tiny, *overrides, "--seed", 9, "--out", tmp_path / "a").status == 0
    monkeypatch.chdir("/")
    assert command("simulate", tmp_path / "a" / "run.toml", "--out", tmp_path / "b").status == 0
    assert everything_in(tmp_path / "a") == everything_in(tmp_path / "b")


def test_a_run_may_go_into_a_folder_that_holds_other_things(
    command: Command, tmp_path: Path, tiny: Path, no_figures: None
) -> None:
    assert command("simulate", tiny, "--out", tmp_path).status == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*RUN_FILES, "tiny.toml"])


def test_conventional_says_its_g_and_paper_mode_counts_in_flashes(command: Command, tiny: Path) -> None:
    overrides = sets("scheduler.kind=conventional", "hardware.decode={kind='utilisation', flash_s=0.001}")
    result = command("simulate", tiny, *overrides)
    summary = json.loads(command("simulate", tiny, *overrides, "--json").out)
    assert "tiny.toml: conventional G=3" in result.out
    assert summary["tokens_per_flash"] == pytest.approx(summary["tokens_per_s"] * 0.001)
    assert f"{summary['tokens_per_flash']:.2f} tokens/flash" in result.out


def test_a_run_that_fails_is_one_line_status_1_and_kept(command: Command, tmp_path: Path, tiny: Path) -> None:
    result = command("simulate", tiny, *sets(*STALLS), "--out", tmp_path / "run", "--trace", "full")
    assert result == Result(
        1,
        "",
        "pipelinerl: stalled: more than scheduler.discard_limit = 20 rollouts were given up without an optimizer "
        "step in between\n",
    )
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["complete"] is False
    assert command("replay", tmp_path / "run").status == 0


def test_a_full_disk_is_one_line_status_1(
    command: Command, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_folder: RunFolder, _row: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunFolder, "write_step", full)
    result = command("simulate", tiny, "--out", tmp_path / "run")
    assert result == Result(1, "", "pipelinerl: [Errno 28] No space left on device\n")


def test_a_file_that_may_not_grow_leaves_one_line_and_no_traceback(tmp_path: Path, tiny: Path) -> None:
    """The real thing, as far as a test may go: a limit on the size of files."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    command = [*program(limit), "simulate", tiny, "--out", tmp_path / "run", "--set", "optimizer_steps=100"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("pipelinerl: [Errno 27] File too large")
    assert ended.stderr.count("\n") == 1


# ---------------------------------------------------------------------------------------- compare


@pytest.mark.usefixtures("in_this_process", "no_figures")
def test_compare_prints_a_row_per_arm_and_keeps_what_it_prints(command: Command, tmp_path: Path, tiny: Path) -> None:
    tiny.write_text(TINY + COMPARE)
    result = command("compare", tiny, "--out", tmp_path / "out")
    assert (result.status, result.err) == (0, "")
    kept = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert "tiny.toml: speed-up over conventional" in result.out
    assert "as given" in result.out
    for arm in kept["scenarios"][0]["arms"]:
        (row,) = [line for line in result.out.splitlines() if line.startswith(arm["name"])]
        summary, seconds = arm["summary"], arm["summary"]["seconds"]
        shares = [
            f"{seconds[key] / summary['duration_s']:.0%}" if seconds[key] else "-"
            for key in ("generating", "training", "publishing", "waiting_for_data")
        ]
        assert row.split() == [
            arm["name"],
            f"{arm['speedup']:.2f}",
            f"{summary['tokens_per_s']:,.0f}",
            f"{summary['duration_s'] / 6:.4g}",
            f"{summary['lag']['mean']:.2f}",
            str(summary["lag"]["max"]),
            *shares,
        ]


@pytest.mark.usefixtures("in_this_process", "no_figures")
def test_json_of_compare_is_the_comparison_of_the_folder(command: Command, tmp_path: Path, tiny: Path) -> None:
    tiny.write_text(TINY + COMPARE)
    result = command("compare", tiny, "--json", "--seed", 8, "--out", tmp_path / "out")
    assert (result.status, result.err) == (0, "")
    assert json.loads(result.out) == json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert load_run(tmp_path / "out" / "as_given" / "pipeline" / "run.toml").seed == 8


@pytest.mark.usefixtures("in_this_process")
def test_without_a_compare_table_the_run_is_compared_with_conventional_rl(command: Command, tiny: Path) -> None:
    result = json.loads(command("compare", tiny, "--json").out)
    assert result["baseline"] == "conventional G=32"
    names = [arm["name"] for arm in result["scenarios"][0]["arms"]]
    assert names == ["pipeline (as given)", "conventional G=8", "conventional G=16", "conventional G=32"]


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process", "small_figures")
def test_the_same_comparison_gives_the_same_bytes_in_every_file_and_figure(
    command: Command, tmp_path: Path, tiny: Path
) -> None:
    tiny.write_text(TINY + COMPARE)
    for name in ("first", "second"):
        assert command("compare", tiny, "--out", tmp_path / name).status == 0
    first = everything_in(tmp_path / "first")
    assert {"comparison.json", "as_given/pipeline/steps.csv", "figures/speedup_by_scenario.png"} <= set(first)
    assert first == everything_in(tmp_path / "second")


@pytest.mark.usefixtures("in_this_process")
def test_paper_mode_is_compared_in_flashes_with_the_analytic_curves_beside_it(
    command: Command, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curves = []
    monkeypatch.setattr(analysis.report, "save_figures", lambda *_, **drawn: curves.append(drawn["curves"]) or [])
    tiny.write_text(TINY + COMPARE)
    flashes = "hardware.decode={kind='utilisation', flash_s=0.001}"
    result = command("compare", tiny, "--set", flashes, "--out", tmp_path / "out")
    assert result.status == 0
    assert "tok/flash" in result.out
    arms = json.loads((tmp_path / "out" / "comparison.json").read_text())["scenarios"][0]["arms"]
    assert f"{arms[0]['summary']['tokens_per_flash']:.2f}" in result.out
    assert curves[0].max_lag[0] == 1.0


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("has_baseline", [True, False])
def test_a_comparison_of_which_a_run_fails_shows_the_others_with_status_1(
    command: Command, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, has_baseline: bool
) -> None:
    """Where the baseline is among the failed there is no speed-up to draw, but all else."""
    monkeypatch.setattr(analysis.report, "DPI", 20)
    baseline = "pipeline" if has_baseline else "stalls"
    arms = f'[{{ name = "pipeline" }}, {{ name = "stalls", set = {json.dumps(STALLS)} }}]'
    tiny.write_text(f'{TINY}\n[compare]\nbaseline = "{baseline}"\narms = {arms}\n')
    result = command("compare", tiny, "--out", tmp_path / "out")
    assert result.status == 1
    assert result.err.startswith("pipelinerl: scenario 'as given', arm 'stalls': stalled: more than ")
    assert result.err.count("\n") == 1
    (row,) = [line for line in result.out.splitlines() if line.startswith("pipeline")]
    assert row.split()[1] == ("1.00" if has_baseline else "-")
    names = {path.stem for path in (tmp_path / "out" / "figures").iterdir()}
    assert "lag_by_step" in names
    assert ("speedup_by_scenario" in names) == has_baseline


@pytest.mark.usefixtures("in_this_process")
def test_the_first_scenario_with_a_finished_run_stands_for_all_in_the_figures_of_runs(
    command: Command, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []

    def draw(runs: list[Any], _folder: Path, *, comparison: Any, curves: Any, **_: Any) -> list[Path]:
        analysis.figures.speedup_by_scenario(comparison)  # it does without the missing arms
        drawn.append(([(run.name, run.summary["seed"]) for run in runs], list(comparison.scenarios), curves))
        return []

    monkeypatch.setattr(analysis.report, "save_figures", draw)
    scenarios = f'[{{ name = "stalls", set = {json.dumps(STALLS)} }}, {{ name = "goes well", set = ["seed=5"] }}]'
    tiny.write_text(TINY + COMPARE + f"scenarios = {scenarios}\n")
    result = command("compare", tiny, "--out", tmp_path / "out")
    assert drawn == [([("pipeline", 5), ("conventional", 5)], ["stalls", "goes well"], None)]
    assert (result.status, result.err.count("\n")) == (1, 2)
    assert result.err.startswith("pipelinerl: scenario 'stalls', arm 'conventional': stalled: ")


@pytest.mark.usefixtures("in_this_process")
def test_a_drift_model_is_not_checked_with_a_run_that_has_not_learned(
    command: Command, tmp_path: Path, finished: Path
) -> None:
    for path in finished.glob("*.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 1, "ess/token_raw": 0.9, "ess/lag_1": 0.9}\n')
    result = command("drift", tmp_path, "--check", finished)
    assert (result.status, result.out) == (2, "")
    assert result.err == (
        f"pipelinerl: --check needs runs that learned, got {finished.name}, whose metrics have no ESS\n"
    )


# ------------------------------------------------------------------------------------------- plot


def test_plot_prints_the_figures_it_has_drawn(command: Command, tmp_path: Path, finished: Path) -> None:
    paths = [finished / "figures" / "one.png"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(analysis.report, "save_figures", lambda *_, **__: paths)
        assert command("plot", finished) == Result(0, f"{paths[0]}\n", "")


@pytest.mark.slow
def test_plot_draws_runs_side_by_side_where_it_is_told_to(
    command: Command, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(analysis.report, "save_figures", lambda *_, **__: [])
        for lag in (1, 2):
            out = tmp_path / f"lag{lag}"
            assert command("simulate", tiny, "--set", f"scheduler.max_lag={lag}", "--out", out).status == 0
    monkeypatch.setattr(analysis.report, "DPI", 20)
    result = command("plot", tmp_path / "lag1", tmp_path / "lag2", "--out", tmp_path / "new" / "figures")
    assert (result.status, result.err) == (0, "")
    paths = [Path(line) for line in result.out.splitlines()]
    assert sorted(paths) == sorted((tmp_path / "new" / "figures").iterdir())
    names = {path.name for path in paths}
    assert {"lag_by_step.png", "timeline_lag1.pdf", "timeline_lag2.pdf", "throughput_against_max_lag.png"} <= names
    assert not (tmp_path / "lag1" / "figures").exists()


def broken_runs(folder: Path, run: Path) -> None:
    """Make folders that cannot be drawn out of one that can."""
    for name in ("no_step", "no_json", "no_profile", "text", "comparison", "baseless"):
        (folder / name).mkdir()
        for path in run.iterdir():
            (folder / name / path.name).write_bytes(path.read_bytes())
    steps = (run / "steps.csv").read_text()
    (folder / "no_step" / "steps.csv").write_text(steps.splitlines()[0] + "\n")
    (folder / "no_json" / "summary.json").write_text('{"scheduler": ')
    (folder / "no_profile" / "profile.json").unlink()
    (folder / "text" / "steps.csv").write_text("step\n1\n")
    summary = json.loads((run / "summary.json").read_text())
    (folder / "comparison" / "comparison.json").write_text('{"baseline": "a", "scenarios": []}')
    arm = {"name": "a", "folder": ".", "speedup": "fast", "summary": summary}
    scenarios = [{"name": "s", "arms": [arm]}]
    text = json.dumps({"baseline": "b", "scenarios": scenarios})
    (folder / "baseless" / "comparison.json").write_text(text)


@pytest.mark.parametrize(
    ("folders", "line"),
    [
        (("none",), "cannot read {tmp}/none/summary.json: No such file or directory"),
        (("x" * 300,), f"cannot read {{tmp}}/{'x' * 300}/summary.json: File name too long"),
        (("tiny.toml",), "cannot read {tmp}/tiny.toml/summary.json: Not a directory"),
        (("no_step",), "{tmp}/no_step/steps.csv has no optimizer step yet"),
        (
            ("no_json",),
            "{tmp}/no_json/summary.json is not valid JSON: Expecting value: line 1 column 15 (char 14)",
        ),
        (("no_profile",), "cannot read {tmp}/no_profile/profile.json: No such file or directory"),
        (("text",), "{tmp}/text/steps.csv lacks the columns time_s, samples, lag_mean, lag_max"),
        (("run", "no_profile"), "cannot read {tmp}/no_profile/profile.json: No such file or directory"),
        (("run", "run"), "run folders must be different, got {tmp}/run, {tmp}/run"),
        (("comparison",), "{tmp}/comparison/comparison.json has no arm yet"),
        (("baseless",), '{tmp}/baseless/comparison.json: speedup must be a number, got "fast"'),
        (
            ("run", "comparison"),
            "DIR... must be runs or a single comparison, got 2 with {tmp}/comparison",
        ),
    ],
)
def test_what_cannot_be_drawn_is_one_line_and_nothing_drawn(
    command: Command, tmp_path: Path, finished: Path, folders: tuple[str, ...], line: str
) -> None:
    broken_runs(tmp_path, finished)
    before = everything_in(tmp_path)
    result = command("plot", *(tmp_path / folder for folder in folders))
    assert result == Result(2, "", f"pipelinerl: {line.format(tmp=tmp_path)}\n")
    assert everything_in(tmp_path) == before


def test_figures_that_cannot_be_written_are_one_line(
    command: Command, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(analysis.report, "save_figures", lambda *_, **__: [])
        assert command("simulate", tiny, "--out", tmp_path / "run").status == 0
    line = f"pipelinerl: {UNWRITABLE}{tiny}: File exists\n"
    assert command("plot", tmp_path / "run", "--out", tiny) == Result(2, "", line)
    assert tiny.read_text() == TINY


# ----------------------------------------------------------------------------------------- replay


def test_replay_says_identical_and_how_much_it_compared(command: Command, finished: Path) -> None:
    lines = gzip.decompress((finished / "trace.jsonl.gz").read_bytes()).decode().splitlines()
    num_commands = sum('"command"' in line for line in lines)
    num_events = len(lines) - 1 - num_commands
    text = f"identical: {num_commands} commands from {num_events} events\n"
    assert command("replay", finished) == Result(0, text, "")
    assert command("replay", finished / "trace.jsonl.gz") == Result(0, text, "")


def test_replay_of_a_changed_command_says_where_with_status_1(command: Command, finished: Path) -> None:
    path = finished / "trace.jsonl.gz"
    lines = gzip.decompress(path.read_bytes()).decode().splitlines(keepends=True)
    number = next(number for number, line in enumerate(lines) if '"StartTraining"' in line)
    lines[number] = lines[number].replace('"version":0', '"version":1')
    path.write_bytes(gzip.compress("".join(lines).encode()))
    result = command("replay", finished)
    assert (result.status, result.err) == (1, "")
    assert result.out.startswith(f"different: line {number + 1}, after RolloutFinished(")
    assert "recorded StartTraining(" in result.out
    assert "version=1, completes_step=True), now StartTraining(" in result.out
    assert result.out.count("\n") == 1


def cut_off(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def with_garbage(path: Path) -> None:
    lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
    path.write_bytes(gzip.compress(b"".join([*lines[:4], b"garbage\n", *lines[5:]])))


def of_another_version(path: Path) -> None:
    text = gzip.decompress(path.read_bytes()).replace(b'"format_version":3', b'"format_version":9')
    path.write_bytes(gzip.compress(text))


@pytest.mark.parametrize(
    ("breakage", "line"),
    [
        (Path.unlink, "cannot read trace {path}: No such file or directory"),
        (cut_off, "{path} is cut off after line "),
        (with_garbage, "{path}, line 5: broken (Expecting value: line 1 column 1 (char 0))"),
        (of_another_version, "{path} has trace format version 9, this program reads 3"),
        (lambda path: path.write_text(TINY), "cannot read trace {path}: Not a gzipped file "),
    ],
)
def test_a_missing_or_broken_trace_is_one_line(
    command: Command, finished: Path, breakage: Callable[[Path], object], line: str
) -> None:
    path = finished / "trace.jsonl.gz"
    breakage(path)
    result = command("replay", finished)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith(f"pipelinerl: {line.format(path=path)}")
    assert result.err.count("\n") == 1


def test_replay_of_a_folder_that_is_not_there_is_one_line(command: Command, tmp_path: Path) -> None:
    line = f"pipelinerl: cannot read trace {tmp_path}/none: No such file or directory\n"
    assert command("replay", tmp_path / "none") == Result(2, "", line)


# -------------------------------------------------------------------------------- help and installation


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_help_teaches_the_commands_and_where_to_start(command: Command, arguments: tuple[str, ...]) -> None:
    result = command(*arguments)
    text = result.out + result.err  # where it goes without a command depends on typer's version
    for word in ("simulate", "compare", "plot", "replay", "pipelinerl simulate examples/quickstart.toml"):
        assert word in text


@pytest.mark.parametrize("name", ["simulate", "compare"])
def test_help_of_a_run_names_the_run_file_and_the_options(command: Command, name: str) -> None:
    result = command(name, "--help")
    assert (result.status, result.err) == (0, "")
    for word in ("RUN.toml", "The run file.", "--set", "scheduler.max_lag=8", "--seed", "--out", "--json"):
        assert word in result.out


@pytest.mark.parametrize(("name", "words"), [("plot", ("DIR...", "--out")), ("replay", ("DIR", "--trace full"))])
def test_help_of_what_reads_runs_names_the_folder(command: Command, name: str, words: tuple[str, ...]) -> None:
    result = command(name, "--help")
    assert (result.status, result.err) == (0, "")
    for word in words:
        assert word in result.out


def test_the_installed_command_is_this_one() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="pipelinerl")
    assert script.load() is cli.main


def test_a_missing_package_is_one_line_that_names_the_extra_before_anything_is_done(tmp_path: Path) -> None:
    command = [*program("import sys; sys.modules['torch'] = None"), "measure", "--out", "out"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    line = "pipelinerl: torch is not installed; install it with: pip install 'pipelinerl[train-cpu]'\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", line)
    assert everything_in(tmp_path) == {}


def test_a_missing_module_is_called_by_its_full_name() -> None:
    with pytest.raises(ConfigError, match=r"^torch\._C is not installed.*\[learn\]"), needs_extra("learn"):
        raise ModuleNotFoundError("No module named 'torch._C'", name="torch._C")


@pytest.mark.slow
def test_without_extras_simulate_compare_plan_plot_validate_and_replay_run(tmp_path: Path, tiny: Path) -> None:
    tiny.write_text(TINY + COMPARE + "[plan]\nsimulate = 2\nsimulate_steps = 6\n", encoding="utf-8")
    rows = tmp_path / "rows.csv"
    shipped = ROOT / "sim" / "validation" / "published_runs" / "runs.csv"
    rows.write_text("".join(shipped.read_text(encoding="utf-8").splitlines(keepends=True)[:2]), encoding="utf-8")
    blocked = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS!r}))"
    for arguments in (
        ("simulate", tiny, "--out", "run", "--trace", "full"),
        ("compare", tiny, "--out", "compared"),
        ("plan", tiny, "--out", "planned", "--workers", "1"),
        ("plot", "run"),
        ("validate", rows),
        ("replay", "run"),
    ):
        ended = subprocess.run(
            [*program(blocked), *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr


def test_progress_goes_to_the_terminal_on_stderr_and_the_results_to_stdout(tmp_path: Path, tiny: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(
        [*program(), "simulate", tiny, "--json"], stdout=subprocess.PIPE, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        assert process.stdout is not None
        summary = json.loads(process.stdout.read())
        shown = b""
        try:
            while chunk := os.read(ours, 4096):
                shown += chunk
        except OSError:  # Linux: the other end of the terminal is closed
            pass
        os.close(ours)
    assert process.returncode == 0
    assert summary["optimizer_steps"] == 6
    assert b"optimizer steps" in shown
    assert b"6/6" in shown


# --------------------------------------------------------------------------------------- cut short

ENDLESS = ("--set", "optimizer_steps=100000000")


def started(*arguments: object) -> subprocess.Popen[str]:
    """Start the program as a terminal does: in a process group of its own that heeds Ctrl-C."""
    return subprocess.Popen(
        [*program("import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


def has_rows(path: Path, number: int) -> bool:
    return path.exists() and path.read_bytes().count(b"\n") > number


def test_ctrl_c_leaves_what_was_finished_readable(command: Command, tmp_path: Path, tiny: Path) -> None:
    out = tmp_path / "run"
    process = started("simulate", tiny, *ENDLESS, "--out", out, "--trace", "full")
    wait_for(lambda: has_rows(out / "steps.csv", 3), process)
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    line = "pipelinerl: interrupted; what was finished is kept\n"
    assert (process.returncode, stdout, stderr) == (1, "", line)
    steps = [int(row["step"]) for row in rows_of(out)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 3
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["complete"], summary["optimizer_steps"]) == (False, len(steps))
    result = command("replay", out)
    assert result.status == 0
    assert result.out.startswith("identical: ")


def test_a_killed_run_leaves_whole_rows_of_the_steps_it_made(command: Command, tmp_path: Path, tiny: Path) -> None:
    out = tmp_path / "run"
    process = started("simulate", tiny, *ENDLESS, "--out", out, "--trace", "full")
    wait_for(lambda: has_rows(out / "steps.csv", 3), process)
    process.kill()
    process.communicate(timeout=60)
    steps = [int(row["step"]) for row in rows_of(out)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 3
    assert load_run(out / "run.toml").optimizer_steps == 100_000_000
    line = f"pipelinerl: cannot read {out}/summary.json: No such file or directory\n"
    assert command("plot", out) == Result(2, "", line)
    replayed = command("replay", out)
    assert (replayed.status, replayed.out, replayed.err.count("\n")) == (2, "", 1)


ONE_LONG = """
[compare]
baseline = "short"
arms = [{ name = "short" }, { name = "long", set = ["optimizer_steps=100000000"] }]
"""


@pytest.mark.slow
def test_ctrl_c_leaves_the_finished_runs_of_a_comparison(command: Command, tmp_path: Path, tiny: Path) -> None:
    tiny.write_text(TINY + ONE_LONG)
    out = tmp_path / "out"
    process = started("compare", tiny, "--out", out)
    wait_for((out / "as_given" / "short" / "summary.json").exists, process)
    wait_for(lambda: has_rows(out / "as_given" / "long" / "steps.csv", 3), process)
    time.sleep(0.2)  # for the news of the short run to arrive
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=120)
    line = "pipelinerl: interrupted; the runs that had ended are kept\n"
    assert (process.returncode, stderr) == (1, line)
    assert "short" in stdout
    assert "long" not in stdout
    comparison = json.loads((out / "comparison.json").read_text())
    assert [arm["name"] for arm in comparison["scenarios"][0]["arms"]] == ["short"]
    assert comparison["complete"] is False
    assert len(rows_of(out / "as_given" / "short")) == 6
    assert len(rows_of(out / "as_given" / "long")) >= 3
    line = f"--out must be a folder without a run, got {out}, which holds comparison.json"
    assert command("compare", tiny, "--out", out) == Result(2, "", f"pipelinerl: {line}\n")


@pytest.mark.slow
def test_the_workers_of_a_killed_comparison_end_too(tmp_path: Path, tiny: Path) -> None:
    tiny.write_text(TINY + ONE_LONG)
    steps = tmp_path / "out" / "as_given" / "long" / "steps.csv"
    process = started("compare", tiny, "--out", tmp_path / "out")
    wait_for(lambda: has_rows(steps, 3), process)
    process.kill()
    process.communicate(timeout=60)  # ends when the last worker has closed its end of stdout
    size = steps.stat().st_size
    time.sleep(0.2)
    assert steps.stat().st_size == size


# ----------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 ms"),
        (0.0025, "2.50 ms"),
        (1.999, "1,999.00 ms"),
        (2.0, "2.00 s"),
        (119.9, "119.90 s"),
        (120.0, "2.00 min"),
        (7199.0, "119.98 min"),
        (7200.0, "2.00 h"),
        (9e6, "2,500.00 h"),
    ],
)
def test_a_time_span_is_in_the_unit_that_reads_best(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.fixture
def summary(command: Command, tiny: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(command("simulate", tiny, "--json").out)
    return loaded


def test_an_incomplete_run_says_so(summary: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(summary, "run")
    assert "ended early" not in capsys.readouterr().out
    print_summary(summary | {"complete": False}, "run")
    assert "no: the run ended early" in capsys.readouterr().out


def test_a_run_of_no_time_at_all_has_a_table(summary: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    seconds = dict.fromkeys(summary["seconds"], 0.0)
    print_summary(summary | {"duration_s": 0.0, "seconds": seconds}, "run")
    assert "none" in capsys.readouterr().out


def one_arm(name: str, scenario: str, summary: dict[str, Any], baseline: str = "b") -> dict[str, Any]:
    arm = {"name": name, "folder": "x", "speedup": 1.5, "summary": summary}
    return {"baseline": baseline, "scenarios": [{"name": scenario, "arms": [arm]}]}


def test_names_are_printed_as_they_are(summary: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Square brackets are markup to rich, which drops what it knows and raises at a lone [/]."""
    print_comparison(one_arm("[red]x", "[/] y", summary, baseline="[bold]z"), "[blue]run.toml")
    print_summary(summary, "[/]run.toml")
    shown = capsys.readouterr().out
    for name in ("[red]x", "[/] y", "[blue]run.toml: speed-up over [bold]z", "[/]run.toml: pipeline"):
        assert name in shown


def test_a_long_name_gives_way_to_the_numbers(
    summary: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    large = copy.deepcopy(summary) | {"tokens_per_s": 123456789.0}
    print_comparison(one_arm("A" * 90, "Z" * 90, large), "run.toml")
    shown = capsys.readouterr().out
    assert any("123,456,789" in line and "1.50" in line for line in shown.splitlines())
    assert (shown.count("A"), shown.count("Z"), shown.count("…")) == (90, 90, 0)
    assert max(map(len, shown.splitlines())) <= 80


def test_an_arm_without_a_step_has_no_seconds_per_step(
    summary: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    print_comparison(one_arm("arm", "as given", summary | {"optimizer_steps": 0}), "run.toml")
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("arm")]
    assert row.split()[3] == "-"


def test_every_fault_of_a_message_is_a_line(command: Command, monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    def fail(*_: Any) -> None:
        raise ConfigError("one\ntwo")

    monkeypatch.setattr("pipelinerl.config.run_file.load_run", fail)
    assert command("simulate", tiny) == Result(2, "", "pipelinerl: one\npipelinerl: two\n")
