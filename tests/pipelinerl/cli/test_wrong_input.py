"""Wrong input: exit status 2, a line per fault on stderr, nothing on stdout, nothing written.

The wording of a message is tested where it is made.
"""

from pathlib import Path

import pytest
from command_line import EMPIRICAL, TINY, Command, Result, assert_fails, sets
from run_folders import everything_in

from pipelinerl.cli import app as cli
from pipelinerl.errors import ConfigError

TURNS = "{kind='recorded', source='turns.jsonl', max=4, observation_max=9, context_max=99}"
FAULTS: dict[str, tuple[list[str], str]] = {
    "an unknown key": (sets("scheduler.max_lagg=3"), "tiny.toml: scheduler.max_lagg is"),
    "an override without =": (sets("scheduler.max_lag"), "--set must be KEY=VALUE"),
    "a prompt of the length file longer than the KV cache": (
        sets(EMPIRICAL, "workload.length.source=good.csv", "hardware.kv_cache_tokens=149"),
        "hardware.kv_cache_tokens must hold the longest prompt of workload.length.source and workload.length.max, 150 ",
    ),
    "a missing length file": (
        sets(EMPIRICAL, "workload.length.source=none.csv"), "workload.length.source {tmp}/none.csv",
    ),
    "a length file that is a folder": (sets(EMPIRICAL, "workload.length.source=folder.csv"), "cannot read trace"),
    "an unknown shipped set": (sets(EMPIRICAL, "workload.length.source=skythoughts"), "workload.length.source must be"),
    "a length file with a wrong cell": (
        sets(EMPIRICAL, "workload.length.source=cell.csv"), "cell.csv line 3: response_tok",
    ),
    "a file of turns with a wrong line": (sets(f"environment={{count=1, turns={TURNS}}}"), "turns.jsonl line 1: obs_"),
    "a missing utilisation table": (
        sets("hardware.decode={kind='utilisation', flash_s=1e-5, table='none.csv'}"),
        "utilisation table {tmp}/none.csv: ",
    ),
    "a wrong seed": (["--seed", "-1"], "tiny.toml: seed must "),
    "a folder that is taken": (["--out", "{tmp}/taken"], "--out must be a folder without a run, got {tmp}/taken, "),
    "a folder in a file": (["--out", "{tmp}/good.csv/x"], "--out must be a folder that can be written, got "),
}  # fmt: skip


@pytest.mark.parametrize("name", [("simulate", "--trace", "full"), ("compare",)])
@pytest.mark.parametrize(("arguments", "words"), FAULTS.values(), ids=FAULTS)
def test_a_wrong_value_writes_nothing(
    command: Command, tmp_path: Path, tiny: Path, arguments: list[str], words: str, name: tuple[str, ...]
) -> None:
    (tmp_path / "good.csv").write_text("prompt_id,response_tokens,prompt_tokens\n1,5,100\n")
    (tmp_path / "cell.csv").write_text("prompt_id,response_tokens\n1,5\n1,many\n")
    (tmp_path / "turns.jsonl").write_text(
        '{"group": 1, "stream": 0, "prompt_len": 9, "out_lens": [4], "obs_lens": [3], "tool_times": [1.5]}'
    )
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "steps.csv").write_text("precious")
    tiny.write_text(TINY + '\n[compare]\nbaseline = "a"\narms = [{ name = "a" }]\n')
    before = everything_in(tmp_path)
    given = [one.replace("{tmp}", str(tmp_path)) for one in arguments]
    assert_fails(command(*name, tiny, "--out", tmp_path / "out", *given), 2, words.format(tmp=tmp_path))
    assert everything_in(tmp_path) == before


def test_every_line_of_a_message_begins_with_the_name_of_the_program(
    command: Command, monkeypatch: pytest.MonkeyPatch, tiny: Path
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConfigError("one", "two")

    monkeypatch.setattr("pipelinerl.config.run.load_run", fail)
    assert command("simulate", tiny) == Result(2, "", "pipelinerl: one\npipelinerl: two\n")


@pytest.mark.parametrize("name", ["simulate", "compare"])
def test_a_run_file_that_cannot_be_read_writes_nothing(command: Command, tmp_path: Path, name: str) -> None:
    (tmp_path / "broken.toml").write_text("seed = 1\nseed two")
    for file, words in (("none.toml", "cannot read run file {}: "), ("broken.toml", "{} is not valid TOML: ")):
        result = command(name, tmp_path / file, "--out", tmp_path / "out")
        assert_fails(result, 2, words.format(tmp_path / file))
    assert [*everything_in(tmp_path)] == ["broken.toml"]


def test_a_folder_that_takes_no_files(
    command: Command, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path, _text: str, encoding: str) -> int:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "out").mkdir()
    monkeypatch.setattr(Path, "write_text", refuse)  # root, as which tests may run, may write anywhere
    line = f"--out must be a folder that can be written, got {tmp_path}/out: Permission denied"
    assert_fails(command("simulate", tiny, "--out", tmp_path / "out"), 2, line)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_trace_needs_a_folder(command: Command, tiny: Path) -> None:
    result = command("simulate", tiny, "--trace", "full")
    assert_fails(result, 2, "--trace full needs --out DIR to write the trace to")


COMMANDS = [one.callback.__name__ for one in cli.app.registered_commands if one.callback]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_parser_of_every_command_refuses_in_one_line(command: Command, name: str) -> None:
    assert_fails(command(name, "--colour", "red"), 2, "No such option: --colour; ", "--help")
    assert_fails(command(name, "--help=3"), 2, "Option '--help' does not take a value")
    if not command(name, "--help").out.splitlines()[0].endswith("..."):  # which means: any number of arguments
        needed = ["--out", "x"] if name in ("timeline", "measure", "export") else []
        assert_fails(command(name, "run", "again", *needed), 2, "Got unexpected extra argument(s) (")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("simulat",), "No such command 'simulat'. Did you mean 'simulate'? allowed: simulate, compare, plan, "),
        (("q",), "No such command 'q'; allowed: simulate, compare, plan, "),
        (("--versio",), "No such option: --versio; did you mean --version? allowed: --version, --help"),
        (("simulate",), "Missing argument 'RUN.toml': The run file."),
        (
            ("simulate", "run.toml", "--sed", "4"),
            "No such option: --sed; did you mean --seed? allowed: --set, --seed, ",
        ),
        (("simulate", "run.toml", "--seed"), "Option '--seed' requires an argument"),
        (("simulate", "run.toml", "--seed", "x"), '--seed must be a whole number, got "x"'),
        (("simulate", "run.toml", "--trace", "half"), "--trace: 'half' is not one of 'none', 'full'"),
        (("plan", "run.toml", "--workers", "0"), '--workers must be at least 1, got "0"'),
        (("timeline", "run", "--out", "x", "--end", "late"), '--end must be a number, got "late"'),
        (("report", "run"), "Missing option '--out': page.html, or page.md for a pull request."),
        (("replay", "one", "two"), "Got unexpected extra argument(s) (two); usage: pipelinerl replay [OPTIONS] {DIR}"),
    ],
)
def test_the_parser_refuses_in_one_line_with_key_value_and_allowed_values(
    command: Command, arguments: tuple[str, ...], line: str
) -> None:
    result = command(*arguments)
    assert_fails(result, 2)
    assert result.err.startswith(f"pipelinerl: {line}")
