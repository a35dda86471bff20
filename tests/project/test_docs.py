"""Links, files, commands, code and functions that the pages name exist; notices and licence are complete."""

import doctest
import importlib.metadata
import re
import runpy
import subprocess
import sys

import pytest
import ready_queue
from page_commands import parsed
from pages import ENVIRONMENT, FENCE, PAGES, ROOT, section, text_of

import pipelinerl
from pipelinerl.hardware import utilisation
from pipelinerl.theory import lengths, paper

LINK = re.compile(r"\[[^\]]*\]\((?!https?://|mailto:)([^)\s]+)\)")
FOLDERS = "pipelinerl|sim|analysis|backends|docs|examples|tests|scripts|benchmarks"
PATH = re.compile(rf"(?<![\w/.*-])((?:{FOLDERS})/[\w./=+-]*\w)")


def anchors(text):
    """Return the anchors of the headings of a page as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(FENCE, "", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


SCRIPTS = [
    pytest.param(code, id=f"{page}:{number}")
    for page, text in PAGES.items()
    for number, (language, info, code) in enumerate(FENCE.findall(text))
    if language == "python" and ">>> " not in code and "no-run" not in info
]


def test_the_patterns_find_links_paths_and_scripts():
    assert sum(len(LINK.findall(text)) for text in PAGES.values()) > 10
    assert sum(len(PATH.findall(text)) for text in PAGES.values()) > 30
    assert SCRIPTS


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_somewhere(page):
    for target in LINK.findall(PAGES[page]):
        name, _, anchor = target.partition("#")
        linked = (ROOT / page).parent / name if name else ROOT / page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked.read_text(encoding="utf-8")), target


@pytest.mark.parametrize("page", PAGES)
def test_files_named_with_their_folder_exist(page):
    assert [name for name in PATH.findall(PAGES[page]) if not list(ROOT.glob(name))] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_table_has_a_header_and_rows(page):
    """A blank line inside a table ends it: what follows is shown as text."""
    tables = re.findall(r"(?:^\|.*\n)+", re.sub(FENCE, "", PAGES[page]), re.MULTILINE)
    assert [table for table in tables if not re.match(r".*\n\|[-| :]+\|\n\|", table)] == []


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if ">>> " in text])
def test_sessions_give_the_stored_output(page):
    assert doctest.testfile(str(ROOT / page), module_relative=False).failed == 0


@pytest.mark.parametrize("code", SCRIPTS)
def test_python_blocks_run(code, tmp_path):
    """Every block without a prompt runs as a script beside ``examples/``, unless its fence has ``no-run``."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_picture_has_the_command_that_draws_it():
    script = runpy.run_path(str(ROOT / "scripts" / "draw_figures.py"))
    assert {*script["DRAWN"], *script["PAGES"]} == {path.stem for path in (ROOT / "docs" / "figures").glob("*.png")}
    for line, _ in script["DRAWN"].values():
        parsed(f"pipelinerl {line}")
    assert script["main"](["nothing"]) == 2


def test_named_make_targets_exist():
    named = {name for text in PAGES.values() for name in re.findall(r"(?:^|`)make ([\w-]+)", text, re.M)}
    assert named >= {"check", "test"}
    assert [name for name in sorted(named) if f"\n{name}:" not in text_of("Makefile")] == []


def test_make_test_runs_all_real_tests():
    (folder,) = re.findall(r"pytest .* -m real (\S+)$", text_of("Makefile"), re.MULTILINE)
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if re.search(r"mark\.real\b", path.read_text())]
    assert len(marked) > 8
    assert [path for path in marked if not path.is_relative_to(ROOT / folder)] == []


def test_functions_named_on_the_analytic_page_exist():
    names = re.findall(r"`(\w+)` \|$", section("docs/analytic.md", "From equation to function"), re.MULTILINE)
    assert len(set(names)) > 8
    modules = (paper, lengths, ready_queue, utilisation)
    assert [name for name in names if not any(hasattr(module, name) for module in modules)] == []


def test_changelog_has_the_version_of_the_package_and_dates():
    headings = re.findall(r"^## (.*)$", PAGES["CHANGELOG.md"], re.MULTILINE)
    assert all(re.fullmatch(r"\[[\d.]+\] - (\d{4}-\d\d-\d\d|unreleased)", heading) for heading in headings)
    assert headings[0].startswith(f"[{pipelinerl.__version__}]")
    assert importlib.metadata.version("pipelinerl") == pipelinerl.__version__


def test_notice_names_every_source_of_the_shipped_sets():
    table = section("sim/data/README.md", "Sets and where they come from")
    sources = set(re.findall(r"https://github.com/[\w-]+/[\w-]+", table))
    assert len(sources) > 2
    assert [source for source in sorted(sources) if source not in text_of("NOTICE")] == []


def test_licence_is_the_whole_apache_licence():
    text = text_of("LICENSE")
    assert text.lstrip().startswith("Apache License")
    assert "TERMS AND CONDITIONS FOR USE, REPRODUCTION, AND DISTRIBUTION" in text
    assert [number for number in range(1, 10) if f"\n   {number}. " not in text] == []
    assert text.rstrip().endswith("limitations under the License.")
