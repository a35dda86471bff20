"""Who may import whom, read from the syntax trees; and what an import may load, seen in a fresh process."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("pipelinerl", "sim", "backends", "analysis")
TRAINING = {
    "torch",
    "vllm",
    "deepspeed",
    "ray",
    "transformers",
    "tokenizers",
    "safetensors",
    "psutil",
    "tensorboard",
    "wandb",
}
TRAINING |= {"datasets", "math_verify"}  # tasks
MAY_IMPORT = {
    "pipelinerl": {"pipelinerl", "numpy", "pydantic", "pydantic_core", "typer", "rich", "tomli_w"},
    "sim": {"pipelinerl", "sim", "numpy", "simpy", "ray"},  # Ray inside a function, for who has a cluster
    "backends": {"pipelinerl", "backends", "numpy"} | TRAINING,
    "analysis": {"pipelinerl", "analysis", "numpy", "matplotlib"},
}
PURE = ("errors", "events", "pool", "scheduler")
MAY_IMPORT_TORCH = ROOT / "pipelinerl" / "losses.py"  # of the core; nothing else of it imports this module
LEARNING = ROOT / "sim" / "learning"  # may import torch, but for its tasks; the rest of sim imports it inside functions
TORCH_FREE = {LEARNING / "__init__.py", LEARNING / "tasks.py"}
NOT_PURE = {"time", "asyncio", "random", "threading", "logging", "datetime", "os", "io", "pathlib", "socket"}
COMMAND_LINE = ROOT / "pipelinerl" / "cli.py"


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(path: Path, *, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top_level_only else ast.walk(tree)
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names.add(node.module or "")
    return names


def roots(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_it_may(package: str) -> None:
    allowed = MAY_IMPORT[package] | set(sys.stdlib_module_names)
    for path in modules(package):
        may = path == MAY_IMPORT_TORCH or (path.parent == LEARNING and path not in TORCH_FREE)
        torch = {"torch"} if may else set()
        assert roots(imported(path)) <= allowed | torch, path


def test_of_the_core_the_losses_alone_need_torch_and_no_other_module_needs_the_losses() -> None:
    names = {path: imported(path) for path in modules("pipelinerl")}
    assert [path for path in names if "torch" in roots(names[path])] == [MAY_IMPORT_TORCH]
    assert not [path for path in names if "pipelinerl.rl.losses" in names[path]]


def test_every_package_has_modules_to_check() -> None:
    assert all(modules(package) for package in PACKAGES)


@pytest.mark.parametrize("name", PURE)
def test_the_scheduler_has_no_clock_no_chance_and_no_files(name: str) -> None:
    names = roots(imported(ROOT / "pipelinerl" / f"{name}.py"))
    assert not names & NOT_PURE
    assert names <= {"pipelinerl"} | set(sys.stdlib_module_names)


def test_only_the_command_line_reaches_other_packages_and_only_inside_its_functions() -> None:
    strings = {
        node.value
        for node in ast.walk(ast.parse(COMMAND_LINE.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert {
        "sim.run",
        "sim.compare",
        "sim.planning.search",
        "analysis.plot",
        "analysis.validation",
    } <= strings  # loaded by name, when a command runs
    assert roots(imported(COMMAND_LINE, top_level_only=True)) <= {"pipelinerl", "typer"} | set(sys.stdlib_module_names)


def loaded_by(statement: str) -> set[str]:
    program = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=ROOT)
    return set(output.stdout.split())


def test_import_pipelinerl_loads_no_heavy_package() -> None:
    assert not loaded_by("import pipelinerl") & {"torch", "simpy", "matplotlib", "numpy", "pydantic", "typer"}


def test_importing_all_packages_loads_no_torch_and_no_pyplot() -> None:
    statement = "import pipelinerl, sim, sim.run, sim.compare, sim.planning.search, analysis, analysis.report, backends"
    assert not loaded_by(statement) & {"torch", "matplotlib.pyplot", "vllm", "deepspeed", "ray"}


def test_help_loads_no_simulator_and_no_figures() -> None:
    assert not loaded_by("import pipelinerl.cli") & {"torch", "simpy", "matplotlib", "vllm"}
