"""Print the size of the project by package and write the table into CONTRIBUTING.md: a mirror, not a gate.

    python scripts/size.py

*Code* counts lines that are neither blank, comment nor docstring. *Single importer*: a module that exactly one other
module imports, from the same folder; it may be a section of that importer. Pages are README and all of docs/.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("pipelinerl", "sim", "backends", "analysis")
MARKS = re.compile(r"(<!-- size -->\n).*?(<!-- end -->)", re.DOTALL)
IGNORED_TOKENS = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def modules(package: str) -> dict[str, Path]:
    """Return the Python files of a package by full name."""
    paths = sorted((ROOT / package).rglob("*.py"))
    return {
        path.relative_to(ROOT).as_posix().removesuffix(".py").replace("/", ".").removesuffix(".__init__"): path
        for path in paths
    }


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the lines of bare strings: docstrings of modules, functions and fields."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    return {
        line
        for node in nodes
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def counts(path: Path) -> tuple[int, int, int]:
    """Return the lines, lines of code and lines of docstring of a file."""
    source = path.read_text(encoding="utf-8")
    docs = docstring_lines(ast.parse(source))
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in IGNORED_TOKENS
        for line in range(token.start[0], token.end[0] + 1)
    }
    return source.count("\n"), len(code - docs), len(docs)


def single_importers(known: dict[str, Path]) -> list[str]:
    """Return the modules with exactly one importer, in their own folder."""
    importers: dict[str, set[str]] = defaultdict(set)
    for own, path in known.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Import(names=names):
                    targets = [alias.name for alias in names]
                case ast.ImportFrom(module=str(module), names=names):
                    targets = [f"{module}.{alias.name}" for alias in names] + [module]
                case _:
                    continue
            for target in targets:
                if target in known and target != own:
                    importers[target].add(own)
    return sorted(
        module
        for module, users in importers.items()
        if len(users) == 1
        and known[module].name != "__init__.py"
        and known[next(iter(users))].parent == known[module].parent
    )


def rows() -> list[str]:
    """Return the table, a row per package and its sums."""
    known = {package: modules(package) for package in PACKAGES}
    single = single_importers({name: path for paths in known.values() for name, path in paths.items()})
    table = ["| | files | lines | code | docstrings | single importer |", "|---|---|---|---|---|---|"]
    sums = [0, 0, 0, 0, 0]
    for package, paths in known.items():
        lines = [sum(column) for column in zip(*map(counts, paths.values()), strict=True)]
        row = [len(paths), *lines, sum(name.partition(".")[0] == package for name in single)]
        sums = [total + one for total, one in zip(sums, row, strict=True)]
        table.append(f"| `{package}/` | " + " | ".join(f"{one:,}" for one in row) + " |")
    table.append("| **packages** | " + " | ".join(f"**{one:,}**" for one in sums) + " |")
    tests = list(modules("tests").values())
    lines = [sum(column) for column in zip(*map(counts, tests), strict=True)]
    table.append(f"| `tests/` | {len(tests):,} | " + " | ".join(f"{one:,}" for one in lines) + " | |")
    pages = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in pages)
    return [*table, f"| pages | {len(pages)} | {words:,} words | | | |"]


def main() -> None:
    """Print the table and write it into CONTRIBUTING.md."""
    table = "\n".join(rows())
    print(table)
    page = ROOT / "CONTRIBUTING.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(MARKS.sub(lambda match: f"{match[1]}{table}\n{match[2]}", text), encoding="utf-8")


if __name__ == "__main__":
    main()
