"""The command line of a log: the walk of the documentation, files written, input refused; ``--hardware``."""

import json
import re
import shlex
from pathlib import Path

import pytest
from command_line import TINY, Command, assert_fails
from pages import EXAMPLES, section

from pipelinerl.config.run import load_run

WALK = section("docs/calibration.md", 'My log to "what if asynchronous, with staleness 2"')
LOG = EXAMPLES / "logs" / "verl_console.log"
NAMED = ("--model", "Qwen2.5-7B", "--gpu", "H100")
HARDWARE = """
[hardware]
decode = { kind = "affine", step_s = 0.02 }
training = { token_s = 1e-3 }
"""


def tokens_per_s(printed: str) -> int:
    (found,) = re.findall(r"throughput +│ ([\d,]+) tokens/s", printed)
    return int(found.replace(",", ""))


@pytest.mark.slow
def test_the_walk_from_a_log_to_what_if_asynchronous(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (commands, table) = (re.search(rf"```{language}\n(.*?)```", WALK, re.DOTALL)[1] for language in ("sh", "text"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    first, second, third = (shlex.split(line)[1:] for line in commands.replace("\\\n", " ").splitlines())
    beside = command(*first)
    assert beside.status == 0, beside.err
    assert [line for line in table.splitlines() if line not in beside.out.splitlines()] == []
    written = (tmp_path / "mine" / "run.toml").read_text()
    assert written.startswith("# Made from verl_console.log by pipelinerl calibrate --from verl.\n# lengths:")
    as_it_was, what_if = (command(*words) for words in (second, third))
    speeds = [tokens_per_s(one.out) for one in (as_it_was, what_if)]
    assert [f"{speed:,}" in WALK.replace("\n", " ") for speed in speeds] == [True, True]
    assert f"**{speeds[1] / speeds[0]:.1f} times as many**" in WALK
    assert re.search(r"token lag .*max 2 ", what_if.out)
    proposed = beside.out.rpartition("what if asynchronous: pipelinerl ")[2]
    assert re.search(r"token lag .*max 2 ", command(*shlex.split(proposed)).out)
    log = json.loads(command(*first[:-2], "--json").out)
    assert log["beside"]["simulated"]["tokens_per_s"] == pytest.approx(speeds[0], rel=0.02)  # simulate agrees


@pytest.mark.slow
def test_hardware_alone_goes_to_a_file_or_to_the_terminal(command: Command, tmp_path: Path) -> None:
    result = command("calibrate", LOG, "--from", "verl", *NAMED, "--out", tmp_path / "mine.toml")
    assert (result.status, [one.name for one in tmp_path.iterdir()]) == (0, ["mine.toml"])
    shown = command("calibrate", LOG, "--from", "verl", *NAMED)
    assert shown.out.endswith((tmp_path / "mine.toml").read_text())
    assert "- cluster.tensor_parallel: not in the log, 1 taken" in shown.out
    again = command("calibrate", LOG, "--from", "verl", *NAMED, "--out", tmp_path / "mine.toml")
    assert (again.status, again.out, "which exists" in again.err) == (2, "", True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--from", "verl"), "--from verl needs the log"),
        ((LOG, "--from", "verll"), "got 'verll'; did you mean verl?"),
        ((LOG, "--from", "verl"), "calibrate --from needs --run RUN.toml, or --model NAME and --gpu NAME"),
        ((LOG, "--from", "verl", "--gpu", "H100"), "hardware.model is missing"),
        ((LOG, "--from", "verl", *NAMED, "--set", "workload.group=8"), "workload.group is an unknown key"),
        ((LOG, "--from", "verl", *NAMED, "--train-step-s", "3"), "calibrate takes --from with logs, or numbers"),
        ((LOG, "--from", "verl", "--run", "run.toml", *NAMED), "describe a job without --run RUN.toml"),
        ((LOG, *NAMED), "--model describes the job of a log: it needs --from FORMAT"),
        ((LOG, LOG), "calibrate takes one SOURCE, or several logs with --from FORMAT"),
        (("nowhere.log", "--from", "slime", *NAMED), "cannot read log nowhere.log"),
    ],
)
def test_wrong_use_ends_with_one_line_and_status_2(
    command: Command, arguments: tuple[object, ...], message: str
) -> None:
    assert_fails(command("calibrate", *arguments), 2, message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step,step_s,length_mean\n1,9,100\n", "--accelerators N is missing"),
        ("step,step_s,length_mean,accelerators\n1,9,100,8\n", "--set scheduler.train_batch_size=N is missing"),
    ],
)
def test_values_that_are_not_in_the_log_are_asked_for(
    command: Command, tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "a.csv").write_text(text)
    assert_fails(command("calibrate", tmp_path / "a.csv", "--from", "csv", *NAMED), 2, message)


def test_an_export_of_wandb_without_its_format_says_what_to_give(command: Command, tmp_path: Path) -> None:
    (tmp_path / "export.csv").write_text("_step,timing_s/gen\n1,2\n")
    assert_fails(command("calibrate", tmp_path / "export.csv"), 2, "is an export of W&B", "--from verl, nemo-rl")


# ------------------------------------------------------------------------------------------ --hardware


@pytest.mark.slow
@pytest.mark.parametrize("name", ["simulate", "compare", "plan"])
def test_a_hardware_file_takes_the_place_of_the_run_files_table(
    command: Command, tmp_path: Path, name: str, in_this_process: None
) -> None:
    """The run file's own hardware would be refused: a run without [hardware] at all is completed by the option."""
    (tmp_path / "hw.toml").write_text(HARDWARE)
    run, rest = tmp_path / "run.toml", TINY.partition("[hardware")[0]
    run.write_text(rest + '\n[compare]\nbaseline = "one"\narms = [{ name = "one" }]\n')
    assert command(name, run).status == 2
    result = command(name, run, "--hardware", tmp_path / "hw.toml", "--json")
    assert result.status == 0, result.err


def test_overrides_come_after_the_hardware_file(tmp_path: Path) -> None:
    (tmp_path / "hw.toml").write_text(HARDWARE)
    (tmp_path / "run.toml").write_text(TINY)
    loaded = load_run(tmp_path / "run.toml", ["hardware.training.token_s=0.5"], hardware=tmp_path / "hw.toml").hardware
    assert (loaded.decode.step_s, loaded.training.token_s, loaded.weights) == (0.02, 0.5, None)


def test_a_hardware_file_without_the_table_is_refused(command: Command, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(TINY)
    (tmp_path / "hw.toml").write_text("seed = 1\n")
    assert_fails(
        command("simulate", tmp_path / "run.toml", "--hardware", tmp_path / "hw.toml"),
        2,
        "must hold a table [hardware]",
    )
    assert_fails(
        command("simulate", tmp_path / "run.toml", "--hardware", "no.toml"), 2, "cannot read --hardware no.toml: "
    )
