"""Who may import whom, read from the syntax trees, by folder; and what an import may load, seen in a fresh process."""

from __future__ import annotations

import ast
import functools
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
    "datasets",  # tasks
    "math_verify",
}
MAY_IMPORT = {
    "pipelinerl": {"numpy", "pydantic", "pydantic_core", "typer", "rich", "tomli_w"},
    "sim": {"numpy", "simpy", "pydantic"},
    "backends": {"numpy"} | TRAINING,
    "analysis": {"numpy", "matplotlib", "bokeh", "jinja2", "pydantic"},
}
"""Packages from outside, by package; the modules below may import torch besides."""
INSIDE_FUNCTIONS = {
    "pipelinerl": {"pandas", "datasets", "math_verify"},
    "sim": {"ray"},
    "backends": {"verifiers", "aiohttp", "websockets"},
}
"""What they may import besides, where it is needed only: not everybody has it."""
TORCH_OF_THE_CORE = tuple(f"pipelinerl/rl/{name}.py" for name in ("losses", "tensor_checks", "token_logprobs"))
MAY_IMPORT_TORCH = (*TORCH_OF_THE_CORE, "sim/learning/")
MAY_NOT_AFTER_ALL = ("sim/learning/__init__.py", "sim/learning/tasks.py")

REACHES_ALL = ("pipelinerl/cli/", "pipelinerl/api.py")
"""Of the core, the command line and the front door import the other packages, inside functions only."""

PURE = "pipelinerl/scheduler"
"""All of this folder decides: events in, commands out."""
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
"""Folders of the core, from the ground up: each imports from itself and from lower storeys only."""


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


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
def test_a_package_imports_only_what_it_may(package: str) -> None:
    allowed = {"pipelinerl", package} | MAY_IMPORT[package] | set(sys.stdlib_module_names)
    for path in modules(package):
        name = name_of(path)
        torch = {"torch"} if name.startswith(MAY_IMPORT_TORCH) and name not in MAY_NOT_AFTER_ALL else set()
        others = INSIDE_FUNCTIONS.get(package, set()) | (set(PACKAGES) if name.startswith(REACHES_ALL) else set())
        assert roots(imported(path)) <= allowed | torch | others, path
        assert roots(imported(path, top_level_only=True)) <= allowed | torch, path


def test_no_other_module_of_the_core_imports_those_which_need_torch() -> None:
    need_torch = tuple(name.removesuffix(".py").replace("/", ".") for name in TORCH_OF_THE_CORE)
    others = [path for path in modules("pipelinerl") if name_of(path) not in TORCH_OF_THE_CORE]
    assert not [path for path in others if any(name.startswith(need_torch) for name in imported(path))]


def test_every_package_has_modules_to_check() -> None:
    assert all(modules(package) for package in (*PACKAGES, PURE))


@pytest.mark.parametrize("path", modules(PURE), ids=lambda path: path.stem)
def test_what_decides_has_no_clock_no_chance_and_no_files(path: Path) -> None:
    names = imported(path)
    assert not roots(names) & NOT_PURE
    assert roots(names) <= {"pipelinerl"} | set(sys.stdlib_module_names)
    ours = {name for name in names if name.startswith("pipelinerl")}
    assert all(name.startswith(("pipelinerl.scheduler.", "pipelinerl.errors.")) for name in ours)


def storey(path: Path) -> int:
    part = path.relative_to(ROOT / "pipelinerl").parts[0].removesuffix(".py")
    return next(number for number, parts in enumerate(LAYERS) if part in parts)


@pytest.mark.parametrize(
    "path",
    [path for path in modules("pipelinerl") if path != ROOT / "pipelinerl" / "__init__.py"],
    ids=lambda path: path.relative_to(ROOT).with_suffix("").as_posix(),
)
def test_a_module_of_the_core_imports_from_its_own_folder_and_from_lower_storeys(path: Path) -> None:
    own = path.relative_to(ROOT / "pipelinerl").parts[0].removesuffix(".py")
    reached = {name.split(".")[1] for name in imported(path) if name.startswith("pipelinerl.")}
    above = [part for part in reached - {own} if not any(part in parts for parts in LAYERS[: storey(path)])]
    assert not above


def module_of(path: Path) -> str:
    return name_of(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")


ALL = {module_of(path): path for package in PACKAGES for path in modules(package)}


def graph() -> dict[str, set[str]]:
    """Modules of all packages, and those that each imports, inside functions too."""
    return {
        own: {name if name in ALL else name.rpartition(".")[0] for name in imported(path)} & ALL.keys() - {own}
        for own, path in ALL.items()
    }


def test_no_import_goes_round_in_a_circle() -> None:
    imports = graph()
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for other in sorted(imports[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in imports:
        visit(module, ())


BY_STRING = {
    "pipelinerl": "its names are loaded at their first use; the type checker reads the same imports beside them",
    "pipelinerl.util.user_code": "finds what a user names in a run file",
    "pipelinerl.rl.tasks": "starts itself in a process of its own, with python -m",
    "backends.vllm.plugin": "vLLM takes the class that receives weights by the names of its module and itself",
}
"""Modules with an import that a checker cannot follow, and why."""
IMPORTERS = {"import_module", "__import__", "import_string", "ImportString", "run_module", "resolve_name"}


def imports_by_string(source: str) -> bool:
    """Whether a module calls, or imports, what imports by name, or holds the name of a module of ours in a string."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) if name in IMPORTERS:
                return True
            case ast.Constant(value=str(text)) if text in ALL and ALL[text].stem != "__init__":  # a folder has data
                return True
    return False


@pytest.mark.parametrize(
    "source",
    [
        "import importlib; importlib.import_module(name)",
        "from importlib import import_module as load",
        "__import__(name)",
        'loader("sim.run")',
    ],
)
def test_an_import_by_string_is_found(source: str) -> None:
    assert imports_by_string(source)


def test_only_modules_with_a_reason_import_by_string() -> None:
    assert {own for own, path in ALL.items() if imports_by_string(path.read_text(encoding="utf-8"))} == set(BY_STRING)


def test_what_holds_for_one_version_of_vllm_is_in_one_folder() -> None:
    others = {
        "backends.vllm.offline",  # for measuring: the plainest calls
        "backends.vllm.tool_calls",  # for environments, whose processes have no engine
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
    ],
)
def test_an_import_loads_nothing_heavy(modules: str, heavy: set[str]) -> None:
    program = f"import sys, {modules}\nprint('\\n'.join(sys.modules))"
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=ROOT)
    assert not set(output.stdout.split()) & heavy
