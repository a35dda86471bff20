"""The documentation says what is there: links, files, commands, code, and the keys of every file."""

import csv
import doctest
import gzip
import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest
import typer

import pipelinerl
from backends.fake import FakeBackend
from backends.run import drive
from pipelinerl import cli
from pipelinerl.config.run_file import load_run
from pipelinerl.hardware import utilisation
from pipelinerl.records.trace import TraceWriter
from pipelinerl.rl.config import LossConfig
from pipelinerl.rl.tasks import Problem
from pipelinerl.scheduler import events
from pipelinerl.theory import lengths, paper
from sim.run import simulate

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "sim" / "data" / "README.md"])
"""Every page: those of the root, of docs/, and of the shipped data."""

LINK = re.compile(r"\[[^\]]*\]\((?!https?://|mailto:)([^)\s]+)\)")
FOLDERS = "pipelinerl|sim|analysis|backends|docs|examples|tests|scripts|benchmarks"
PATH = re.compile(rf"(?<![\w/.*-])((?:{FOLDERS})/[\w./=+-]*\w)")
FENCE = re.compile(r"^```(\S*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:^|&& )(?:\$ )?(pipelinerl (?:\\\n|(?!&&)[^\n])*)", re.MULTILINE)


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def page_id(path):
    return str(path.relative_to(ROOT))


def section(text, heading):
    """Return what stands under a heading, up to the next of the same or a higher level."""
    (start,) = [match for match in re.finditer(r"^(#+) (.+)$", text, re.MULTILINE) if match[2] == heading]
    after = text[start.end() :]
    end = re.search(rf"^#{{1,{len(start[1])}}} ", after, re.MULTILINE)
    return after[: end.start()] if end else after


def first_cells(table):
    """Return the names in code font in the first cells of the rows of a table."""
    return re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)


def anchors(text):
    """Return the anchors of the headings of a page as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(FENCE, "", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code_blocks(language):
    """Return page, info string and content of every fenced block of a language."""
    return [
        (page, info.strip(), content)
        for page in PAGES
        for found, info, content in FENCE.findall(page.read_text(encoding="utf-8"))
        if found == language
    ]


def dotted(tables):
    """Return the dotted keys of nested tables."""
    return [
        f"{key}.{rest}" if rest else key
        for key, inner in tables.items()
        for rest in (dotted(inner) if isinstance(inner, dict) else [""])
    ]


# ----------------------------------------------------------------------------------- links and files


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_relative_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(linked.read_text(encoding="utf-8")), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_named_with_their_folder_exist(page):
    text = page.read_text(encoding="utf-8")
    missing = [name for name in PATH.findall(text) if not list(ROOT.glob(name.rstrip("/")))]
    assert missing == []


def test_there_are_links_and_files_to_check():
    pages = [page.read_text(encoding="utf-8") for page in PAGES]
    assert sum(len(LINK.findall(text)) for text in pages) > 10
    assert sum(len(PATH.findall(text)) for text in pages) > 30


# ---------------------------------------------------------------------------------- code and commands


@pytest.mark.parametrize("page", [page for page in PAGES if ">>> " in page.read_text(encoding="utf-8")], ids=page_id)
def test_sessions_give_the_stored_output(page):
    result = doctest.testfile(str(page), module_relative=False)
    assert result.failed == 0


SCRIPTS = [
    pytest.param(content, id=f"{page_id(page)}:{number}")
    for number, (page, info, content) in enumerate(code_blocks("python"))
    if ">>> " not in content and "no-run" not in info
]


@pytest.mark.parametrize("code", SCRIPTS)
def test_python_blocks_run(code, tmp_path):
    """Every block without a prompt is a script that runs beside ``examples/``, unless its fence says ``no-run``."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_there_is_code_to_run():
    assert len(SCRIPTS) > 0
    assert len(COMMANDS) > 3


COMMANDS = [
    pytest.param(shlex.split(line.replace("\\\n", " "), comments=True)[1:], id=f"{page_id(page)}: {line[:60]}")
    for language in ("", "console", "bash", "sh")
    for page, _, content in code_blocks(language)
    for line in COMMAND.findall(content)
]
"""Arguments of every command line in a block of a shell or of no language."""


@pytest.mark.parametrize("arguments", COMMANDS)
def test_commands_are_understood(arguments):
    """Options and arguments are parsed as on the command line; a run file in it is loaded with its overrides."""
    command = typer.main.get_command(cli.app).commands[arguments[0]]
    with command.make_context(arguments[0], arguments[1:]) as context:
        values = context.params
    if "run" in values and str(values["run"]).startswith("examples/"):
        assert load_run(ROOT / values["run"], values["overrides"], values["seed"]).optimizer_steps >= 1


def test_make_knows_the_targets_that_are_named():
    named = {
        name for page in PAGES for name in re.findall(r"(?:^|`)make (\w+)", page.read_text(encoding="utf-8"), re.M)
    }
    assert named >= {"check", "test"}
    assert [name for name in sorted(named) if f"\n{name}:" not in text_of("Makefile")] == []


# -------------------------------------------------------------------------------- the keys of a run file


KEY_TABLES = {
    "simulator": "Every key of RUN.toml",
    "training": "Every key of [train]",
    "planning": "Every key of [plan]",
}
"""The pages with tables of keys of the run file, and their headings."""


def test_generated_tables_are_fresh():
    command = [sys.executable, "scripts/doc_tables.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_stale_table_is_named_and_made_anew(tmp_path):
    """A copy of the project's script and one page, of which one row is wrong."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "scripts" / "doc_tables.py").write_text(text_of("scripts/doc_tables.py"))
    page = tmp_path / "docs" / "planning.md"
    page.write_text(text_of("docs/planning.md").replace("| `plan.budget` | number > 0 |", "| `plan.budget` | text |"))
    for arguments, status, said in (
        (["--check"], 1, "docs/planning.md: stale, run make docs\n"),
        ([], 0, "docs/planning.md: written\n"),
        (["--check"], 0, ""),
    ):
        command = [sys.executable, tmp_path / "scripts" / "doc_tables.py", *arguments]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (status, said), done.stderr
    assert page.read_text() == text_of("docs/planning.md")


def test_keys_of_the_examples_are_in_the_table():
    """The tables are made by a script; here they are held to files that are known to load."""
    tables = [section(text_of(f"docs/{page}.md"), heading) for page, heading in KEY_TABLES.items()]
    known = {key for table in tables for key in first_cells(table)}
    examples = sorted((ROOT / "examples").glob("*.toml"))
    assert len(examples) > 1
    for path in examples:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        compare = data.pop("compare", {})
        keys = dotted(data) + [f"compare.{key}" for key in compare if key not in ("arms", "scenarios")]
        for what in ("arms", "scenarios"):
            keys += [f"compare.{what}[].{key}" for variant in compare.get(what, []) for key in variant]
        keys = [re.sub(r"^(train\.task\.settings)\..*", r"\1", key) for key in keys]  # a task's own
        assert set(keys) <= known, path.name


def test_coefficients_of_the_main_example_are_those_of_the_page():
    """Every number of the hardware tables, scenario by scenario; an empty cell stands for the central value."""
    table = section(text_of("docs/simulator.md"), "Coefficients of the main example")
    columns = ("optimistic", "central", "pessimistic")
    cells = {
        row[0]: row[1:4] for row in re.findall(r"^\| `([^`]+)` \| (.*?) ?\| (.*?) ?\| (.*?) ?\|", table, re.MULTILINE)
    }
    path = ROOT / "examples" / "qwen7b_128_h100.toml"
    scenarios = tomllib.loads(path.read_text(encoding="utf-8"))["compare"]["scenarios"]
    assert {scenario["name"] for scenario in scenarios} >= set(columns)
    for scenario in scenarios:
        column = columns.index(scenario["name"]) if scenario["name"] in columns else 1
        listed = {key: float(row[column] or row[1]) for key, row in cells.items()}
        used = flat(load_run(path, scenario.get("set", [])).hardware.model_dump(mode="json", exclude_unset=True))
        assert {key: value for key, value in used.items() if not isinstance(value, str)} == listed


def flat(tables):
    return {
        f"{key}.{rest}" if rest else key: value
        for key, inner in tables.items()
        for rest, value in (flat(inner).items() if isinstance(inner, dict) else [("", inner)])
    }


# ---------------------------------------------------------------------------------- the keys of results

TINY = [
    "optimizer_steps=4",
    "scheduler.train_batch_size=16",
    "scheduler.generation_batch_size=8",
    'workload.length={ kind = "uniform", max = 64 }',
]
QUICKSTART = ROOT / "examples" / "quickstart.toml"
RUNS = {
    "pipeline": [],
    "conventional": ["scheduler.kind=conventional"],
    "paper mode": ['hardware.decode={ kind = "utilisation", flash_s = 1.54e-5 }'],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folders of tiny runs of each sort."""
    base = tmp_path_factory.mktemp("runs")
    for name, overrides in RUNS.items():
        simulate(load_run(QUICKSTART, [*TINY, *overrides]), out=base / name, trace=True)
    return {name: base / name for name in RUNS}


def rows_of(heading):
    """The keys of a report on the page; ``a[].b`` is in every element of ``a``."""
    return set(first_cells(section(text_of("docs/concepts.md"), heading)))


def undocumented(data, listed, prefix=""):
    """The keys of a report that have no row; a row of a table without rows of its own is of the table."""
    if isinstance(data, list):
        return [key for one in data for key in undocumented(one, listed, f"{prefix[:-1]}[].") if isinstance(one, dict)]
    if not isinstance(data, dict):
        return []
    own = {key: inner for key, inner in data.items() if f"{prefix}{key}" not in listed}
    leaves = [f"{prefix}{key}" for key, inner in own.items() if not isinstance(inner, (dict, list))]
    return leaves + [name for key, inner in own.items() for name in undocumented(inner, listed, f"{prefix}{key}.")]


def test_every_key_that_a_run_writes_has_a_row(folders):
    for folder in folders.values():
        assert undocumented(json.loads((folder / "summary.json").read_text()), rows_of("summary.json")) == []
        assert undocumented(json.loads((folder / "profile.json").read_text()), rows_of("profile.json")) == []
        with (folder / "steps.csv").open(newline="") as file:
            assert set(next(csv.reader(file))) == rows_of("steps.csv")


def test_a_key_without_a_row_is_found():
    assert undocumented({"a": {"b": 1}, "c": [{"d": 2, "e": 3}], "f": 4}, {"a", "c[].d"}) == ["f", "c[].e"]


def test_files_of_a_run_folder_are_those_of_the_page(folders):
    listed = first_cells(section(text_of("docs/concepts.md"), "The folder of a run"))
    written = {path.name for folder in folders.values() for path in folder.iterdir()}
    assert sorted(listed) == sorted(written | {"figures/"})


def test_events_and_commands_are_those_of_the_page():
    page = section(text_of("docs/concepts.md"), "Events and commands")
    names = [kind.__name__ for kind in (*get_args(events.Event), *get_args(events.Command))]
    assert [name for name in names if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    "choice",
    [events.WeightUpdate, events.OnStale, events.OnFull, events.DiscardReason, events.StopReason],
    ids=lambda choice: choice.__name__,
)
def test_every_choice_is_explained(choice):
    page = text_of("docs/concepts.md")
    assert [one.value for one in choice if f"`{one.value}`" not in page] == []


def test_the_shown_trace_lines_are_as_written(tmp_path):
    """The two lines on the page, decoded and written again, are the same but for spaces."""
    shown = FENCE.search(section(text_of("docs/concepts.md"), "trace.jsonl.gz"))[3].splitlines()
    spans = events.VersionSpans((3, 4), (100, 180))
    with TraceWriter(tmp_path / "trace", load_run(QUICKSTART)) as writer:
        writer.event(12.5, events.RolloutFinished(7, 0, spans))
        writer.command(12.5, events.StartRollout(71, 8, 0))
    written = gzip.decompress((tmp_path / "trace").read_bytes()).splitlines()
    assert [json.loads(line) for line in shown] == [json.loads(line) for line in written[1:]]


# ------------------------------------------------------------------------------ the results of a real run


class Ones:
    """A task for engines that generate letters at random."""

    num_held_out = None

    def problem(self, index, *, held_out):
        return Problem("?", index)

    def reward(self, problem, answer):
        return float(len(answer) > 2)


@pytest.fixture(scope="module")
def real_folder(tmp_path_factory):
    """The folder of a run of the real driver, on an engine and a trainer in memory."""
    pytest.importorskip("torch")  # TensorBoard's writer is torch's
    pytest.importorskip("tensorboard")
    path, folder = ROOT / "examples" / "tiny_arithmetic.toml", tmp_path_factory.mktemp("real") / "run"
    sizes = ["scheduler.train_batch_size=16", "scheduler.generation_batch_size=8", "train.evaluation.problems=4"]
    config = load_run(path, ["optimizer_steps=6", *sizes])
    with FakeBackend().open(config) as parts:
        drive(config, parts=parts, task=Ones(), out=folder)
    return folder


WARNS = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TensorBoard does
LAG_KEY = re.compile(r"(ess/lag_|ess\.by_lag\.)\d+$")
"""A key per lag; the pages have that of lag 0."""


@WARNS
def test_every_key_that_a_real_run_writes_has_a_row(real_folder):
    listed = rows_of("summary.json") | rows_of("summary.json of a real run, and of one that learned")
    assert undocumented(json.loads((real_folder / "summary.json").read_text()), listed) == []


@WARNS
def test_keys_of_metrics_are_those_of_the_page(real_folder):
    listed = first_cells(section(text_of("docs/concepts.md"), "metrics.jsonl"))
    lines = [json.loads(line) for line in (real_folder / "metrics.jsonl").read_text().splitlines()]
    written = {LAG_KEY.sub(r"\g<1>0", key) for line in lines for key in line}
    assert sorted(listed) == sorted(key for key in written if not key.startswith("train/") or key == "train/loss")


@WARNS
def test_metrics_named_on_the_training_page_are_written(real_folder):
    listed = first_cells(section(text_of("docs/training.md"), "Numbers to watch"))
    assert len(listed) > 8
    lines = [json.loads(line) for line in (real_folder / "metrics.jsonl").read_text().splitlines()]
    written = {key for line in lines for key in line} | {*json.loads((real_folder / "summary.json").read_text())}
    assert [key for key in listed if key not in written and not key.startswith("train/")] == []


@WARNS
def test_files_of_a_real_run_are_those_of_the_page(real_folder, folders):
    listed = first_cells(section(text_of("docs/concepts.md"), "The folder of a real run"))
    of_all = {path.name for path in folders["pipeline"].iterdir()}
    written = {path.name + "/" * path.is_dir() for path in real_folder.iterdir()}
    assert sorted(listed) == sorted(written - of_all)


def test_every_loss_is_on_the_training_page():
    listed = first_cells(section(text_of("docs/training.md"), "Losses"))
    assert sorted(listed) == sorted(get_args(LossConfig.model_fields["kind"].annotation))


# ------------------------------------------------------------------------------------------- the rest


def test_functions_named_on_the_analytic_page_exist():
    page = text_of("docs/analytic.md")
    table = section(page, "From equation to function")
    named = re.findall(r"`(\w+)` \|$|`(\w+)` \|\n", table, re.MULTILINE)
    names = {one or other for one, other in named}
    assert len(names) > 8
    assert [name for name in names if not any(hasattr(module, name) for module in (paper, lengths, utilisation))] == []


def test_changelog_has_the_version_of_the_package_and_dates():
    headings = re.findall(r"^## (.*)$", text_of("CHANGELOG.md"), re.MULTILINE)
    assert all(re.fullmatch(r"\[[\d.]+\] - (\d{4}-\d\d-\d\d|unreleased)", heading) for heading in headings)
    assert headings[0].startswith(f"[{pipelinerl.__version__}]")
    assert importlib.metadata.version("pipelinerl") == pipelinerl.__version__


def test_notice_names_every_source_of_the_shipped_sets():
    table = section(text_of("sim/data/README.md"), "Sets and where they come from")
    sources = set(re.findall(r"https://github.com/[\w-]+/[\w-]+", table))
    assert len(sources) > 2
    assert [source for source in sorted(sources) if source not in text_of("NOTICE")] == []


def test_licence_is_the_whole_apache_licence():
    text = text_of("LICENSE")
    assert text.lstrip().startswith("Apache License")
    assert "TERMS AND CONDITIONS FOR USE, REPRODUCTION, AND DISTRIBUTION" in text
    assert [number for number in range(1, 10) if f"\n   {number}. " not in text] == []
    assert text.rstrip().endswith("limitations under the License.")
