"""The command line of a log: the walk of the documentation, files written, input refused; ``--hardware``."""

import json
import re
import shlex
from pathlib import Path

import pytest
from command_line import TINY, Command, assert_fails
from pages import EXAMPLES, section

from pipelinerl.config.run import load_run
from sim.planning.certainty import make_draws

WALK = section("docs/calibration.md", 'My log to "what if asynchronous, with staleness 2"')
LOG = EXAMPLES / "logs" / "verl_console.log"
NAMED = ("--model", "Qwen2.5-7B", "--gpu", "H100")
HARDWARE = """
[hardware]
decode = { kind = "affine", step_s = 0.02 }
training = { token_s = 1e-3 }
"""


FEW = tuple(
    part
    for one in (
        "scheduler.max_lag=2", "plan.tensor_parallel=[1]", "plan.generation_batch_size=[8,32]",
        "plan.generation_accelerators=[8]", "plan.optimizer_steps_per_rl_step=[1,2]", "plan.publish_every=[1]",
        "plan.simulate=3", "plan.simulate_steps=4",
    )
    for part in ("--set", one)
)  # fmt: skip
"""A small search with the limit of the page."""


@pytest.mark.slow(seconds=10)
def test_the_walk_from_a_log_to_what_if_asynchronous(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_this_process: None
) -> None:
    """``diagnose`` and ``plan`` of the calibrated run file have one number for asynchronous RL, with one band."""
    monkeypatch.setitem(make_draws.__kwdefaults__, "number", 16)
    commands, *tables = (block[1] for block in re.finditer(r"```(?:sh|text)\n(.*?)```", WALK, re.DOTALL))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    first, second = (shlex.split(line)[1:] for line in commands.splitlines())
    beside = command(*first, *FEW)
    assert beside.status == 0, beside.err
    assert beside.out.rpartition("\n")[0].endswith("what would make it faster: pipelinerl plan mine/run.toml")
    written = (tmp_path / "mine" / "run.toml").read_text()
    assert written.startswith("# Made from verl_console.log by pipelinerl calibrate --from verl.\n# lengths:")
    shown = command(*second, *FEW, "--out", "found")
    assert (shown.status, shown.err) == (0, beside.err)  # the same warning
    printed = beside.out + shown.out
    assert [line for table in tables for line in table.splitlines() if line not in printed.splitlines()] == []
    report = json.loads((tmp_path / "found" / "diagnosis.json").read_text())
    gain, plan = report["asynchronous"], json.loads(command("plan", "mine/run.toml", "--json").out)
    best = plan["families"]["pipeline"]
    assert gain["times"] == best["tokens_per_s"] / plan["own"]["tokens_per_s"]
    assert gain["band"] == best["over_own"]
    assert f"{gain['times']:.2f} times as fast ({gain['band']['low']:.2f} to {gain['band']['high']:.2f})" in shown.out
    again = command("plan", "found/run.toml", *(part for one in gain["set"] for part in ("--set", one)), "--json")
    rates = {one["label"]: one["tokens_per_s"] for one in plan["simulated"] + json.loads(again.out)["simulated"]}
    assert rates[f"{best['label']} (run file)"] == pytest.approx(rates[best["label"]])


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
        ((LOG, "--from", "verl", *NAMED, "--run", "2"), "--run must be at most 1, the runs in the log, got 2"),
        ((LOG, "--run", "2"), "--run 2 is a run of a log: it needs --from FORMAT"),
        ((LOG, "--from", "verl", "--run", "1", "--run", "2"), "--run must be one run file, one number from 1, or"),
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


def test_a_run_of_a_log_is_chosen_by_number_beside_a_run_file(command: Command, tmp_path: Path) -> None:
    """The second run's steps last 10 s longer: its phase switch is 13 s, and not 3 s."""
    text = LOG.read_text()
    longer = re.sub(r"timing_s/step:([\d.]+)", lambda found: f"timing_s/step:{float(found[1]) + 10}", text)
    (tmp_path / "two.log").write_text(text + longer)
    mine, switches = tmp_path / "mine", []
    for words in ((*NAMED, "--out", mine), (*NAMED, "--run", "1"), ("--run-file", mine / "run.toml", "--run", "1")):
        result = command("calibrate", tmp_path / "two.log", "--from", "verl", *words, "--json")
        assert result.status == 0, result.err
        log = json.loads(result.out)
        switches.append(log["hardware"]["switch"]["to_training_s"])
        assert log["assumed"][0].startswith("the log holds 2 runs: run ")
    assert switches == pytest.approx([13.0, 3.0, 3.0], abs=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((LOG, LOG), "diagnose takes one run folder alone, or logs with --from FORMAT"),
        ((LOG, *NAMED), "diagnose takes one run folder alone"),
        ((LOG, "--from", "verl"), "calibrate --from needs --run RUN.toml, or --model NAME and --gpu NAME"),
        (("nowhere",), "nowhere"),
    ],
)
def test_diagnose_refuses_what_it_cannot_read(command: Command, arguments: tuple[object, ...], message: str) -> None:
    assert_fails(command("diagnose", *arguments), 2, message)


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
