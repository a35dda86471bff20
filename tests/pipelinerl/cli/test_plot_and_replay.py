"""`pipelinerl plot`, `timeline`, `replay` and `drift`: what reads the folders of runs."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from command_line import TINY, Command, Result, assert_fails
from run_folders import everything_in

import analysis.chart
import analysis.plot
import analysis.timeline
from pipelinerl.util.strict_model import MOST


@pytest.mark.slow
def test_plot_draws_runs_side_by_side_where_it_is_told_to(
    command: Command, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(analysis.plot, "save_figures", lambda *_, **__: [])
        for lag in (1, 2):
            out = tmp_path / f"lag{lag}"
            assert command("simulate", tiny, "--set", f"scheduler.max_lag={lag}", "--out", out).status == 0
    monkeypatch.setattr(analysis.chart, "DPI", 20)
    result = command("plot", tmp_path / "lag1", tmp_path / "lag2", "--out", tmp_path / "new" / "figures")
    assert (result.status, result.err) == (0, "")
    paths = [Path(line) for line in result.out.splitlines()]
    assert sorted(paths) == sorted((tmp_path / "new" / "figures").iterdir())
    names = {path.name for path in paths}
    assert {"lag_by_step.png", "timeline_lag1.pdf", "timeline_lag2.pdf", "throughput_against_max_lag.png"} <= names
    assert not (tmp_path / "lag1" / "figures").exists()


@pytest.mark.parametrize(
    ("folders", "words"),
    [
        (("none",), "cannot read {tmp}/none/summary.json: "),
        (("run", "no_profile"), "cannot read {tmp}/no_profile/profile.json: "),
        (("run", "run"), "run folders must be different, got {tmp}/run, {tmp}/run"),
        (("comparison",), "{tmp}/comparison/comparison.json has no arm yet"),
        (("run", "comparison"), "DIR... must be runs or a single comparison, got 2 with {tmp}/comparison"),
    ],
)
def test_folders_that_cannot_be_drawn_have_status_2_and_nothing_is_written(
    command: Command, tmp_path: Path, finished: Path, folders: tuple[str, ...], words: str
) -> None:
    shutil.copytree(finished, tmp_path / "no_profile", ignore=shutil.ignore_patterns("profile.json"))
    (tmp_path / "comparison").mkdir()
    (tmp_path / "comparison" / "comparison.json").write_text(
        '{"baseline": "a", "scenarios": [], "failures": [], "complete": true}'
    )
    before = everything_in(tmp_path)
    assert_fails(command("plot", *(tmp_path / folder for folder in folders)), 2, words.format(tmp=tmp_path))
    assert everything_in(tmp_path) == before


@pytest.mark.parametrize("words", [("report", "--out", "a.md"), ("plot",), ("replay",), ("calibrate",), ("simulate",)])
def test_a_path_longer_than_any_file_has_is_a_short_line(command: Command, words: tuple[str, ...]) -> None:
    result = command(words[0], "a" * 5000, *words[1:])
    assert_fails(result, 2, "File name too long")
    assert len(result.err) < 1100


@pytest.mark.slow(seconds=40)
def test_a_run_of_a_million_steps_is_read(command: Command, tmp_path: Path, finished: Path) -> None:
    """As many as a run file allows; a row more is refused before the others are read into memory."""
    header, first, *_ = (finished / "steps.csv").read_text().splitlines(keepends=True)
    rest = first.partition(",")[2]
    (finished / "steps.csv").write_text(header + "".join(f"{step},{rest}" for step in range(1, MOST + 1)))
    for name, out in (("plot", "figures"), ("report", "page.md"), ("timeline", "timeline.json")):
        result = command(name, finished, "--out", tmp_path / out)
        assert result.status == 0, result.err
    with (finished / "steps.csv").open("a") as file:
        file.write(f"{MOST + 1},{rest}")
    assert_fails(
        command("report", finished, "--out", tmp_path / "more.md"),
        2,
        "steps.csv must have at most 1,000,000 optimizer steps",
    )


def test_figures_that_cannot_be_written_have_status_2(
    command: Command, finished: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # from here on figures are drawn
    line = f"--out must be a folder that can be written, got {tiny}: File exists"
    assert_fails(command("plot", finished, "--out", tiny), 2, line)
    assert tiny.read_text() == TINY


# --------------------------------------------------------------------------------------- timeline


def test_timeline_says_what_is_in_its_file_and_where_to_go_on_if_it_is_full(
    command: Command, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    out = tmp_path / "trace.json"
    result = command("timeline", finished, "--out", out)
    assert (result.status, result.err) == (0, "")
    steps, rollouts = summary["optimizer_steps"], summary["rollouts"]["finished"]
    assert result.out.startswith(f"{out}: {steps} optimizer steps, {rollouts} rollouts finished, ")
    assert result.out.count("\n") == 1
    assert json.loads(out.read_text())["displayTimeUnit"] == "ms"
    monkeypatch.setattr(analysis.timeline, "MAX_ENTRIES", 0)
    result = command("timeline", finished, "--out", out)
    assert result.out.splitlines()[1:] == ["cut at 0 s, where the file is full: go on with --begin 0"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--begin", 2, "--end", 1), "--end must be after --begin, got 2 and 1"),
        (("--begin", 1e9), "--begin must be before the end of the run, "),
        (("--out", "{tmp}/none/t.json"), "--out must be a file in a folder that exists, got {tmp}/none/t.json"),
        (("--out", "{tmp}"), "--out must be a file in a folder that exists, got {tmp}"),
    ],
)
def test_a_timeline_that_cannot_be_made_is_one_line(
    command: Command, finished: Path, tmp_path: Path, options: tuple[object, ...], words: str
) -> None:
    given = [str(one).format(tmp=tmp_path) for one in ("--out", tmp_path / "trace.json", *options)]
    assert_fails(command("timeline", finished, *given), 2, words.format(tmp=tmp_path))


# ----------------------------------------------------------------------------------------- replay


def test_replay_says_identical_and_how_much_it_compared(command: Command, finished: Path) -> None:
    lines = gzip.decompress((finished / "trace.jsonl.gz").read_bytes()).decode().splitlines()
    num_commands = sum('"command"' in line for line in lines)
    num_events = len(lines) - 1 - num_commands
    text = f"identical: {num_commands} commands from {num_events} events\n"
    both = text + "identical: summary.json\nidentical: steps.csv\n"
    assert command("replay", finished) == Result(0, both, "")
    (finished / "steps.csv").unlink()
    less = text + "identical: summary.json\nnot compared: steps.csv is not beside the trace\n"
    assert command("replay", finished / "trace.jsonl.gz") == Result(0, less, "")


def test_replay_of_a_run_that_ended_before_it_began_has_nothing_to_compare(command: Command, finished: Path) -> None:
    trace = finished / "trace.jsonl.gz"
    trace.write_bytes(gzip.compress(gzip.decompress(trace.read_bytes()).splitlines(keepends=True)[0]))
    assert command("replay", finished) == Result(0, "nothing to compare: the run ended before it began\n", "")


def test_replay_of_a_changed_command_says_where_with_status_1(command: Command, finished: Path) -> None:
    path = finished / "trace.jsonl.gz"
    lines = gzip.decompress(path.read_bytes()).decode().splitlines(keepends=True)
    number = next(number for number, line in enumerate(lines) if '"StartTraining"' in line)
    lines[number] = lines[number].replace('"version":0', '"version":1')
    path.write_bytes(gzip.compress("".join(lines).encode()))
    result = command("replay", finished)
    assert (result.status, result.err) == (1, "")
    assert result.out.startswith(f"different: line {number + 1}, after RolloutFinished(")
    assert result.out.count("\n") == 1


def test_a_missing_or_broken_trace_has_status_2(command: Command, finished: Path, tmp_path: Path) -> None:
    path, timeline = finished / "trace.jsonl.gz", ("timeline", finished, "--out", tmp_path / "timeline.json")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    for arguments in (timeline, ("replay", finished)):
        assert_fails(command(*arguments), 2, f"{path} is cut off after line ")
    path.unlink()
    for arguments in (timeline, ("replay", finished)):
        assert_fails(command(*arguments), 2, f"cannot read trace {path}: No such file or directory")


def test_a_drift_model_is_not_checked_with_a_run_that_has_not_learned(
    command: Command, tmp_path: Path, finished: Path
) -> None:
    for path in finished.glob("*.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 1, "ess/token_raw": 0.9, "ess/lag_1": 0.9}\n')
    result = command("drift", tmp_path, "--check", finished)
    assert_fails(result, 2, f"--check needs runs that learned, got {finished.name}, whose metrics have no ESS")
