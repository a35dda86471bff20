"""Import rules between folders, read from syntax trees; packages that an import may load, in a fresh process."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from pages import ROOT

PACKAGES = ("pipelinerl", "sim", "backends", "analysis")
TRAINING = {
    *("torch", "vllm", "deepspeed", "ray", "transformers", "tokenizers", "safetensors", "psutil"),
    *("tensorboard", "wandb"),
    *("datasets", "math_verify"),  # tasks
}
MAY_IMPORT = {
    "pipelinerl": {"numpy", "pydantic", "pydantic_core", "typer", "rich", "tomli_w"},
    "sim": {"numpy", "simpy", "pydantic"},
    "backends": {"numpy"} | TRAINING,
    "analysis": {"numpy", "matplotlib", "bokeh", "jinja2", "pydantic"},
}
"""External packages; the modules below may also import torch."""
INSIDE_FUNCTIONS = {
    "pipelinerl": {"pandas", "datasets", "math_verify"},
    "sim": {"ray"},
    "backends": {"verifiers", "aiohttp", "websockets", "huggingface_hub", "flash_attn_interface"},
}
"""Optional packages, imported only inside the functions that use them."""
TORCH_OF_THE_CORE = tuple(f"pipelinerl/rl/{name}.py" for name in ("losses", "tensor_checks", "token_logprobs"))
MAY_IMPORT_TORCH = (*TORCH_OF_THE_CORE, "sim/learning/")
EXCEPT = ("sim/learning/__init__.py", "sim/learning/tasks.py")

REACHES_ALL = ("pipelinerl/cli/", "pipelinerl/api.py")
"""The command line and ``import pipelinerl`` import the other packages, inside functions only."""

PURE = "pipelinerl/scheduler"
"""This folder only decides: events in, commands out."""
NOT_PURE = {"time", "asyncio", "random", "threading", "logging", "datetime", "os", "io", "pathlib", "socket"}

LAYERS = (
    {"errors"},
    {"util"},
    {"scheduler"},
    {"hardware", "rl"},
    {"config"},
    {"records"},
    {"theory"},
    {"calibration"},
    {"pages"},
    {"cli"},
    {"api", "__main__"},
)
"""Folders of the core, lowest layer first."""


def modules(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found
    return found


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def imported(path: Path, *, top_level_only: bool = False) -> frozenset[str]:
    """Full names: ``a.b`` for both ``import a.b`` and ``from a import b``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names: set[str] = set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def roots(names: frozenset[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_permitted_packages(package: str) -> None:
    allowed = {"pipelinerl", package} | MAY_IMPORT[package] | set(sys.stdlib_module_names)
    for path in modules(package):
        name = name_of(path)
        torch = {"torch"} if name.startswith(MAY_IMPORT_TORCH) and name not in EXCEPT else set()
        others = INSIDE_FUNCTIONS.get(package, set()) | (set(PACKAGES) if name.startswith(REACHES_ALL) else set())
        assert roots(imported(path)) <= allowed | torch | others, path
        assert roots(imported(path, top_level_only=True)) <= allowed | torch, path


def test_no_other_module_of_the_core_imports_modules_that_need_torch() -> None:
    need_torch = tuple(name.removesuffix(".py").replace("/", ".") for name in TORCH_OF_THE_CORE)
    others = [path for path in modules("pipelinerl") if name_of(path) not in TORCH_OF_THE_CORE]
    assert not [path for path in others if any(name.startswith(need_torch) for name in imported(path))]


@pytest.mark.parametrize("path", modules(PURE), ids=lambda path: path.stem)
def test_the_scheduler_has_no_clock_randomness_or_files(path: Path) -> None:
    names = imported(path)
    assert not roots(names) & NOT_PURE
    assert roots(names) <= {"pipelinerl"} | set(sys.stdlib_module_names)
    ours = {name for name in names if name.startswith("pipelinerl")}
    assert all(name.startswith(("pipelinerl.scheduler.", "pipelinerl.errors.")) for name in ours)


@pytest.mark.parametrize(
    "path",
    [path for path in modules("pipelinerl") if path != ROOT / "pipelinerl" / "__init__.py"],
    ids=lambda path: path.relative_to(ROOT).with_suffix("").as_posix(),
)
def test_a_module_of_the_core_imports_from_its_own_layer_and_lower_ones(path: Path) -> None:
    own = path.relative_to(ROOT / "pipelinerl").parts[0].removesuffix(".py")
    layer = next(number for number, parts in enumerate(LAYERS) if own in parts)
    reached = {name.split(".")[1] for name in imported(path) if name.startswith("pipelinerl.")}
    assert reached - {own} <= set().union(*LAYERS[:layer])


def module_of(path: Path) -> str:
    return name_of(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")


ALL = {module_of(path): path for package in PACKAGES for path in modules(package)}


def test_no_imports_form_a_circle() -> None:
    """Imports inside functions count, too."""
    imports = {
        own: {name if name in ALL else name.rpartition(".")[0] for name in imported(path)} & ALL.keys() - {own}
        for own, path in ALL.items()
    }
    TopologicalSorter(imports).prepare()  # else an error names the circle


BY_STRING = {
    "pipelinerl": "loads its names at their first use; the type checker reads the same imports beside them",
    "pipelinerl.util.user_code": "loads objects that a run file names",
    "pipelinerl.rl.tasks": "starts itself with python -m in another process",
    "backends.vllm.plugin": "vLLM loads the class that receives weights by module and name",
}
"""Modules with an import that a type checker cannot follow, and the reason."""
IMPORTERS = {"import_module", "__import__", "import_string", "ImportString", "run_module", "resolve_name"}


def imports_by_string(source: str) -> bool:
    """Whether a module uses a function that imports by name, or has the name of one of our modules in a string."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) if name in IMPORTERS:
                return True
            case ast.Constant(value=str(text)) if text in ALL and ALL[text].stem != "__init__":  # a folder has data
                return True
    return False


def test_only_modules_with_a_reason_import_by_string() -> None:
    assert {own for own, path in ALL.items() if imports_by_string(path.read_text(encoding="utf-8"))} == set(BY_STRING)


def test_only_one_folder_depends_on_the_version_of_vllm() -> None:
    others = {
        "backends.vllm.offline",  # measures, with basic calls only
        "backends.vllm.tool_calls",  # runs in the processes of environments
    }
    users = {own for own, path in ALL.items() if "vllm" in roots(imported(path))}
    assert {own for own in users if not own.startswith("backends.vllm.version.")} == others
    assert users > others


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("pipelinerl", {"torch", "simpy", "matplotlib", "numpy", "pydantic", "typer"}),
        ("pipelinerl.cli", {"torch", "simpy", "matplotlib", "vllm"}),  # --help: no simulator, no figures
        ("analysis, analysis.read", {"matplotlib", "sim", "backends", "simpy", "torch"}),
        ("analysis.plot", {"matplotlib.pyplot", "sim", "backends", "simpy", "torch"}),
        (
            "pipelinerl, sim, sim.run, sim.compare, sim.planning.answer, analysis, analysis.plot, backends",
            {"torch", "matplotlib.pyplot", "vllm", "deepspeed", "ray"},
        ),
        ("backends.ray.actors", {"transformers", "vllm", "deepspeed"}),  # in every process of a real run
    ],
)
def test_an_import_loads_nothing_heavy(modules: str, heavy: set[str]) -> None:
    program = f"import sys, {modules}\nprint('\\n'.join(sys.modules))"
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=ROOT)
    assert not set(output.stdout.split()) & heavy


def test_files_of_users_are_read_by_the_shared_readers() -> None:
    """A reader with limits stands once. The rest are streams of processes, our own headers, and parts of the system."""
    readers = {"tomllib.", "csv.reader", "csv.DictReader", "json.load"}
    for package in PACKAGES:
        for path in modules(package):
            if name_of(path) != "pipelinerl/util/read.py":
                assert "tomllib" not in imported(path), path
                text = path.read_text(encoding="utf-8")
                assert not [one for one in readers if f"{one}(" in text], path
                assert not re.search(r"json\.loads\([^\n]*read_(text|bytes)\(", text) or "fake" in path.name, path
