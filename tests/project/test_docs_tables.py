"""The tables of the documentation have every key of run files, results and metrics, and every choice."""

import gzip
import json
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from contextlib import closing
from typing import get_args

import pytest
from pages import ENVIRONMENT, EXAMPLES, FENCE, PAGES, ROOT, first_cells, flat, section

from backends.fake import FakeBackend
from backends.owner import driving
from backends.run import drive
from pipelinerl.config.run import load_run
from pipelinerl.records.reports import EvaluationPoint
from pipelinerl.records.steps import COLUMNS
from pipelinerl.records.trace import TraceWriter
from pipelinerl.rl.config import LossConfig
from pipelinerl.scheduler import events
from sim.run import simulate

CONCEPTS = "docs/concepts.md"
QUICKSTART = EXAMPLES / "quickstart.toml"

# -------------------------------------------------------------------------------- the keys of a run file


def doc_tables(root, *arguments):
    """Run the script that makes the tables; return its exit status and output."""
    command = [sys.executable, root / "scripts" / "doc_tables.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout or done.stderr


def test_generated_tables_are_fresh():
    assert doc_tables(ROOT, "--check") == (0, "")


def test_a_stale_table_is_named_and_made_anew(tmp_path):
    """On a copy of the script and a page with one wrong row."""
    for folder in ("scripts", "docs"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "scripts" / "doc_tables.py", tmp_path / "scripts")
    page, right = tmp_path / "docs" / "planning.md", PAGES["docs/planning.md"]
    page.write_text(right.replace("| `plan.budget` | number > 0; none |", "| `plan.budget` | text |"))
    assert doc_tables(tmp_path, "--check") == (1, "docs/planning.md: stale, run make docs\n")
    assert doc_tables(tmp_path) == (0, "docs/planning.md: written\n")
    assert doc_tables(tmp_path, "--check") == (0, "")
    assert page.read_text() == right


def test_every_key_of_every_report_has_a_meaning():
    """Also of reports without a table here: the Python page of the site shows the meanings."""
    script = runpy.run_path(str(ROOT / "scripts" / "doc_tables.py"))
    assert all(len(script["table_of"](name)) > 3 for name in script["REPORTS"])


def test_keys_of_the_examples_are_in_the_table():
    """The script makes the tables from the models; the examples are files that load."""
    headings = {"simulator": "RUN.toml", "training_reference": "[train]", "planning": "[plan]"}
    known = {key for page, of in headings.items() for key in first_cells(f"docs/{page}.md", f"Every key of {of}")}
    examples = sorted(EXAMPLES.glob("*.toml"))
    assert len(examples) > 1
    for path in examples:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        tables = ("compare.arms", "compare.scenarios", "fleet.groups")
        values = flat(data)
        keys = [key for key in values if key not in tables]
        keys += [f"{table}[].{key}" for table in tables for one in values.get(table, []) for key in one]
        keys = [re.sub(r"^(train\.task\.settings|policy\.loss)\..*", r"\1", key) for key in keys]  # rows of a table
        assert set(keys) <= known, path.name


COEFFICIENTS = ("docs/measurements/coefficients.md", "Coefficients of the main example")


def coefficients():
    """The rows of the page: key and three values; an empty cell stands for the central value."""
    return re.findall(r"^\| `([^`]+)` \| (.*?) ?\| (.*?) ?\| (.*?) ?\|", section(*COEFFICIENTS), re.MULTILINE)


def numbers_of(example, overrides=()):
    """The numbers of the hardware tables of an example."""
    used = flat(load_run(EXAMPLES / example, overrides).hardware.model_dump(mode="json", exclude_unset=True))
    return {key: value for key, value in used.items() if not isinstance(value, str)}


def test_coefficients_of_the_long_example_are_those_of_the_page():
    """Every number of the hardware tables, scenario by scenario."""
    columns = ("optimistic", "central", "pessimistic")
    example = "qwen7b_128_h100_long.toml"
    scenarios = tomllib.loads((EXAMPLES / example).read_text(encoding="utf-8"))["compare"]["scenarios"]
    assert {scenario["name"] for scenario in scenarios} >= set(columns)
    for scenario in scenarios:
        column = columns.index(scenario["name"]) if scenario["name"] in columns else 1
        listed = {key: float(cells[column] or cells[1]) for key, *cells in coefficients()}
        assert numbers_of(example, scenario.get("set", [])) == listed


def test_coefficients_of_the_main_example_are_those_of_the_page():
    """The central column with the values that the second table replaces, in the arm "pipeline"."""
    replaced = re.findall(r"^\| `([^`]+)` \| ([\d.e-]+) \| [^|]+ \|$", section(*COEFFICIENTS), re.MULTILINE)
    central = {key: float(cells[1]) for key, *cells in coefficients()}
    assert len(replaced) > 2
    assert [key for key, value in replaced if central[key] == float(value)] == []
    example = "qwen7b_128_h100.toml"
    pipeline, *_ = tomllib.loads((EXAMPLES / example).read_text(encoding="utf-8"))["compare"]["arms"]
    assert numbers_of(example, pipeline["set"]) == central | {key: float(value) for key, value in replaced}


# ---------------------------------------------------------------------------------- the results of a run

TINY = ("optimizer_steps=4", "scheduler.train_batch_size=16", "scheduler.generation_batch_size=8")
RUNS = {
    "pipeline": [],
    "conventional": ["scheduler.kind=conventional"],
    "paper mode": ['hardware.decode={ kind = "utilisation", flash_s = 1.54e-5 }'],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folders of tiny runs, by name."""
    base = tmp_path_factory.mktemp("runs")
    length = 'workload.length={ kind = "uniform", max = 64 }'
    for name, overrides in RUNS.items():
        simulate(load_run(QUICKSTART, [*TINY, length, *overrides]), out=base / name, trace=True)
    return {name: base / name for name in RUNS}


@pytest.fixture(scope="module")
def real_folder(tmp_path_factory):
    """The folder of a run of the real driver with engine and trainer in memory."""
    from in_memory import Letters  # skips without torch

    config = load_run(EXAMPLES / "tiny_arithmetic.toml", [*TINY, "train.evaluation.problems=4"])
    folder = tmp_path_factory.mktemp("real") / "run"
    with FakeBackend().open(config) as parts, driving(folder) as lock:
        drive(config, parts=parts, task=Letters(), lock=lock)
    return folder


def undocumented(data, listed, prefix=""):
    """The keys of a report without a row; the row of a table covers keys without rows of their own."""
    if isinstance(data, list):
        return [key for one in data for key in undocumented(one, listed, f"{prefix[:-1]}[].") if isinstance(one, dict)]
    if not isinstance(data, dict):
        return []
    own = {key: inner for key, inner in data.items() if f"{prefix}{key}" not in listed}
    leaves = [f"{prefix}{key}" for key, inner in own.items() if not isinstance(inner, (dict, list))]
    return leaves + [name for key, inner in own.items() for name in undocumented(inner, listed, f"{prefix}{key}.")]


def test_a_key_without_a_row_is_found():
    assert undocumented({"a": {"b": 1}, "c": [{"d": 2, "e": 3}], "f": 4}, {"a", "c[].d"}) == ["f", "c[].e"]


@pytest.mark.parametrize("file", ["summary.json", "profile.json"])
def test_every_key_that_a_run_writes_has_a_row(folders, file):
    listed = first_cells(CONCEPTS, file)
    assert [undocumented(json.loads((path / file).read_text()), listed) for path in folders.values()] == 3 * [[]]


def test_columns_of_the_steps_are_those_of_the_page():
    assert set(COLUMNS) == set(first_cells(CONCEPTS, "steps.csv"))


def test_files_of_a_run_folder_are_those_of_the_page(folders):
    written = {path.name for folder in folders.values() for path in folder.iterdir()}
    assert sorted(first_cells(CONCEPTS, "The folder of a run")) == sorted(written | {"figures/"})


WARNS = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TensorBoard does


@WARNS
def test_every_key_that_a_real_run_writes_has_a_row(real_folder):
    headings = ("summary.json", "summary.json of a real run, and of one that learned")
    listed = {key for heading in headings for key in first_cells(CONCEPTS, heading)}
    assert undocumented(json.loads((real_folder / "summary.json").read_text()), listed) == []


@WARNS
def test_metrics_are_those_of_the_pages(real_folder):
    """Keys of lag 0 stand for every lag, ``train/loss`` for a loss; evaluations, drafts, deltas, masks have theirs."""
    lines = [json.loads(line) for line in (real_folder / "metrics.jsonl").read_text().splitlines()]
    written = {re.sub(r"(ess/lag_)\d+$", r"\g<1>0", key) for line in lines for key in line}
    of_all = {key for key in written if not key.startswith("train/") or key == "train/loss"}
    of_all |= {f"evaluation/{name}" for name in EvaluationPoint.model_fields}
    of_all |= {"engines/tokens_per_step", "weights/delta_share", "weights/delta_bytes", "mismatch/masked_share"}
    assert sorted(first_cells(CONCEPTS, "metrics.jsonl")) == sorted(of_all)
    watched = first_cells("docs/training_reference.md", "Numbers to watch")
    assert len(watched) > 8
    written |= json.loads((real_folder / "summary.json").read_text()).keys()
    assert [key for key in watched if key not in written and not key.startswith("train/")] == []


@WARNS
def test_files_of_a_real_run_are_those_of_the_page(real_folder, folders):
    of_all = {path.name for path in folders["pipeline"].iterdir()}
    written = {path.name + "/" * path.is_dir() for path in real_folder.iterdir()}
    assert sorted(first_cells(CONCEPTS, "The folder of a real run")) == sorted(written - of_all)


# ------------------------------------------------------------------------------ events, choices, losses


def test_events_and_commands_are_those_of_the_page():
    page = section(CONCEPTS, "Events and commands")
    names = [kind.__name__ for kind in (*get_args(events.Event), *get_args(events.Command))]
    assert [name for name in names if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    "choice",
    [events.WeightUpdate, events.OnStale, events.OnFull, events.DiscardReason, events.StopReason],
    ids=lambda choice: choice.__name__,
)
def test_every_choice_is_explained(choice):
    assert [one.value for one in choice if f"`{one.value}`" not in PAGES[CONCEPTS]] == []


def test_every_loss_and_every_mask_is_on_the_page_of_reference():
    losses = get_args(LossConfig.model_fields["kind"].annotation)
    masks, _ = get_args(LossConfig.model_fields["mask"].annotation)
    assert sorted(first_cells("docs/training_reference.md", "Losses")) == sorted([*losses, *get_args(masks)])


def test_the_shown_trace_lines_are_as_written(tmp_path):
    """The two lines on the page are as a trace has them, but for spaces."""
    shown = FENCE.search(section(CONCEPTS, "trace.jsonl.gz"))[3].splitlines()
    spans = events.VersionSpans((3, 4), (100, 180))
    with closing(TraceWriter(tmp_path / "trace", load_run(QUICKSTART))) as writer:
        writer.event(12.5, events.RolloutFinished(7, 0, spans))
        writer.command(12.5, events.StartRollout(71, 8, 0))
    written = gzip.decompress((tmp_path / "trace").read_bytes()).splitlines()
    assert [json.loads(line) for line in shown] == [json.loads(line) for line in written[1:]]
