"""Write the generated parts of docs/: tables of keys, the picture of the rooms; ``--check`` names stale pages.

    python scripts/doc_tables.py [--check]

A table is between ``<!-- table: NAME -->`` and ``<!-- end -->``. The rows of a table of keys come from the fields of a
pydantic model: key, type and range, default, and the docstring of the field. The picture comes from the imports.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipelinerl.calibration.log import LoggedStep
from pipelinerl.config.run import ClusterConfig, RunConfig, SchedulerConfig
from pipelinerl.records.comparison_report import ComparisonReport, EnvironmentsReport
from pipelinerl.records.plan_report import PlanReport
from pipelinerl.records.profile_report import FigureData
from pipelinerl.records.reports import RunIdentity, RunMeasurements, RunReport, RunTotals
from pipelinerl.records.steps import StepRow
from pipelinerl.records.validation_report import ValidationReport
from pipelinerl.util.strict_model import Report
from sim.planning.space import NOT_SEARCHED

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGES = ("pipelinerl", "sim", "backends", "analysis")
TABLE = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
OF_THEIR_OWN = ("train", "plan")
"""Tables of the run file that other pages show."""
SAME = {
    "policy.loss": "As `train.loss`, without `kl_coefficient`, `teacher`, `value_coefficient`.",
    "plan.speculate": "As `engine.speculation`.",
}
"""Tables of the run file with keys that another table shows."""
ELSEWHERE: dict[type[BaseModel], str] = {
    RunReport: "summary.json",
    ClusterConfig: "[cluster]",
    SchedulerConfig: "[scheduler]",
}
"""Parts of reports that have their own tables."""
REPORTS: dict[str, tuple[type[BaseModel], ...]] = {
    "summary.json": (RunIdentity, RunTotals),
    "summary.json, measured": (RunMeasurements,),
    "steps.csv": (StepRow,),
    "profile.json": (FigureData,),
    "comparison.json": (ComparisonReport,),
    "plan.json": (PlanReport,),
    "environments.json": (EnvironmentsReport,),
    "validation.json": (ValidationReport,),
    "logged step": (LoggedStep,),
}
"""The models of each report."""
BRIEF = (
    "summary.json",
    "summary.json, measured",
    "comparison.json",
    "environments.json",
    "profile.json",
    "plan.json",
    "validation.json",
)
"""Reports with a row per top-level key; the Python page has the nested keys."""
ROOFLINE = "roofline"
"""Kind of decode step whose keys are usually derived; they share a row."""
GUARD = 1e5
"""Larger limits only prevent overflow; a sentence of the page has them."""


def allowed(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """Return the values that a JSON schema allows, in words."""
    schema = {**schema, **definitions.get(schema.get("$ref", "").rpartition("/")[2], {})}
    if "anyOf" in schema:
        *others, schema = [one for one in schema["anyOf"] if one.get("type") != "null"]
        if others:
            return ", ".join(allowed(one, definitions) for one in [*others, schema])
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    words = {"integer": "integer", "number": "number", "boolean": "true, false", "string": "text"}
    words |= {"object": "table"}
    limits = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
    bounds = [f"{sign} {schema[key]:g}" for key, sign in limits if key in schema and schema[key] < GUARD]
    if "minimum" in schema and schema.get("maximum", GUARD) < GUARD:
        bounds = [f"{schema['minimum']:g}–{schema['maximum']:g}"]
    return " ".join([words.get(schema.get("type", ""), "list"), ", ".join(bounds)]).strip()


def shown_default(field: FieldInfo) -> str:
    """Return the default of a key."""
    if field.is_required():
        return "required"
    match field.get_default(call_default_factory=True):
        case None:
            return "none"
        case bool() as value:
            return str(value).lower()
        case float() as value:
            return f"{value:g}"
        case list() | dict() as value if not value:
            return "none"
        case value:
            return str(value)


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the models of an annotation: ``Model``, ``Model | None``, ``list[Model]``, a union tagged by kind."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for one in get_args(annotation) for model in models_in(one)]


def container(annotation: Any) -> Any:
    """Return ``list`` or ``dict`` for an annotation of one, perhaps optional, else None."""
    origin = get_origin(annotation)
    if origin in (list, tuple):
        return list
    if origin is dict:
        return dict
    inner = () if origin is Annotated else get_args(annotation)
    return next((found for one in inner if (found := container(one)) is not None), None)


def key_rows(model: type[BaseModel], prefix: str = "", kind: str = "") -> list[str]:
    """Return a row per key of a configuration: key, allowed values and default, meaning."""
    rows: list[str] = []
    schema, texts = model.model_json_schema(), meanings(model)
    for name, field in model.model_fields.items():
        inner, key, meaning = models_in(field.annotation), f"{prefix}{name}", texts.get(name, "")
        if key in SAME:
            rows.append(f"| `{key}` | table; none | {SAME[key]} |")
        elif len(inner) > 1:  # tagged by kind
            kinds = [get_args(one.model_fields["kind"].annotation)[0] for one in inner]
            rows.append(f"| `{key}.kind` | {', '.join(kinds)}; none | {meaning} |")
            for one, its_kind in zip(inner, kinds, strict=True):
                if its_kind == ROOFLINE:
                    file = one.__module__.replace(".", "/")
                    rows.append(
                        f"| `{key}` | table; none | {its_kind}: the fields of `{one.__name__}` in `{file}.py`. |"
                    )
                else:
                    rows += key_rows(one, f"{key}.", its_kind)[1:]
        elif inner:
            rows += key_rows(inner[0], f"{key}[]." if container(field.annotation) is list else f"{key}.")
        else:
            meaning = re.sub(r" \((?:no unit|count)\)", "", f"{kind}: {meaning}" if kind else meaning)
            range_ = allowed(schema["properties"][name], schema.get("$defs", {}))
            rows.append(f"| `{key}` | {range_}; {shown_default(field)} | {meaning} |")
    return rows


def run_file_table(table: str | None) -> list[str]:
    """Return the keys of one table of the run file; None: of all tables that no other page shows."""
    shown: dict[tuple[str, str], list[str]] = {}
    for row in key_rows(RunConfig):
        key, rest = row.removeprefix("| ").split(" | ", 1)
        root = key.strip("`").partition(".")[0]
        if (root if root in OF_THEIR_OWN else None) == table:
            shown.setdefault((root, rest), []).append(key)  # keys of the same meaning share a row
    rows = [f"| {', '.join(keys)} | {rest}" for (_, rest), keys in shown.items()]
    return ["| key | value; default | meaning |", "|---|---|---|", *rows]


def knob_table() -> list[str]:
    """Return the keys that change throughput or lag and that ``plan`` does not search, with the reasons."""
    keys: dict[str, list[str]] = {}
    for key, why in NOT_SEARCHED.items():
        keys.setdefault(why, []).append(f"`{key}`")
    return ["| not searched | why |", "|---|---|", *(f"| {', '.join(those)} | {why} |" for why, those in keys.items())]


def meanings(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring of each field of a model, inherited ones included."""
    texts: dict[str, str] = {}
    for cls in reversed([base for base in model.__mro__ if base.__module__.startswith("pipelinerl.")]):
        (definition,) = ast.parse(inspect.getsource(cls)).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in pairwise(definition.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    texts[name] = " ".join(words.replace("``", "`").split())
    return texts


def report_rows(
    models: tuple[type[BaseModel], ...],
    shown: dict[type[BaseModel], str] | None = None,
    prefix: str = "",
    brief: bool = False,
    names: bool = False,
) -> list[str]:
    """Return a row per key of a report: key, meaning with its unit. A repeated table has only its new keys.

    Args:
        models: Models whose fields are the keys.
        shown: Models shown before, with the place of their rows.
        prefix: Text before each key.
        brief: One row per key.
        names: A row names the nested keys.
    """
    shown = dict(ELSEWHERE) if shown is None else shown
    rows: list[str] = []
    for model in models:
        known = next((base for base in model.__mro__ if base in shown), None)
        inherited, texts = known.model_fields if known is not None else {}, meanings(model)
        for base in model.__mro__[: model.__mro__.index(Report)] if issubclass(model, Report) else ():
            shown.setdefault(base, prefix.removesuffix(".").removesuffix("[]").removesuffix(".*"))
        for name, field in model.model_fields.items():
            if name in inherited:
                continue
            inner, key, meaning = models_in(field.annotation), f"{prefix}{name}", texts[name]
            known = next((base for base in inner[0].__mro__ if base in shown), None) if inner else None
            if known is not None:
                more = ", and:" if not brief and len(inner[0].model_fields) > len(known.model_fields) else "."
                meaning += f" Keys as in `{shown[known]}`{more}"
            holds = container(field.annotation)
            alone = brief or holds is not None
            if inner and names and known is not inner[0]:
                keys = [f"`{one}`" for one in inner[0].model_fields if known is None or one not in known.model_fields]
                meaning += f" {'Keys' if known is None else 'And'}: {', '.join(keys)}."
            if not inner or alone or known is not None:
                rows.append(f"| `{key}` | {meaning} |")
            if inner and known is not inner[0]:
                below = {list: "[].", dict: ".*."}.get(holds, ".")
                # Also for keys that are not shown: this finds a key without a docstring.
                under = report_rows((inner[0],), shown, key + below)
                rows += [] if alone else under
    return rows


def room_of(parts: tuple[str, ...]) -> str:
    """Return the room of a module, given the parts of its name: a folder of the core or of sim, or a package."""
    match parts:
        case ("pipelinerl", "cli" | "api", *_) | ("pipelinerl",):
            return "cli, api"
        case ("pipelinerl", room, *_):
            return room
        case ("sim", "planning" | "validation" as room, *_):
            return f"sim/{room}"
        case (package, *_):
            return package
        case _:
            raise ValueError(f"no module is called {parts}")


def reached() -> dict[str, set[str]]:
    """Return the rooms that each room imports from."""
    rooms: dict[str, set[str]] = {}
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        own = room_of(tuple(part for part in path.relative_to(ROOT).with_suffix("").parts if part != "__init__"))
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        names = [
            (*node.module.split("."), alias.name)
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        ]
        rooms.setdefault(own, set()).update({room_of(name) for name in names if name[0] in PACKAGES} - {own})
    return rooms


def picture() -> list[str]:
    """Return the rooms as a Mermaid diagram. An arrow leads to an imported room.

    Arrows that follow from others are left out: if A imports B and B imports C, A may import C too.
    """
    rooms = reached()
    try:
        order = list(TopologicalSorter(rooms).static_order())
    except CycleError as error:
        raise SystemExit(f"rooms import each other in a circle: {' -> '.join(error.args[1])}") from None
    below: dict[str, set[str]] = {}
    for room in order:  # lowest layer first
        below[room] = rooms[room].union(*(below[near] for near in rooms[room]))
    arrows = [
        (room, near)
        for room in rooms
        for near in sorted(rooms[room])
        if not any(near in below[other] for other in rooms[room] - {near})
    ]
    names = {room: re.sub(r"\W+", "_", room) for room in rooms}
    boxes = [f'    {name}["{room}"]' for room, name in sorted(names.items())]
    lines = [f"    {names[room]} --> {names[near]}" for room, near in sorted(arrows)]
    return ["```mermaid", "graph TD", *boxes, *lines, "```"]


def table_of(name: str) -> list[str]:
    """Return the lines of a table.

    Raises:
        SystemExit: If no table has this name.
    """
    if name == "run":
        return run_file_table(None)
    if name == "knobs":
        return knob_table()
    if name == "rooms":
        return picture()
    if name in REPORTS:
        return [
            "| key | meaning |",
            "|---|---|",
            *report_rows(REPORTS[name], brief=name in BRIEF, names=name == "summary.json"),
        ]
    if name in OF_THEIR_OWN:
        return run_file_table(name)
    raise SystemExit(f"docs name a table that nobody makes: {name}")


def updated(text: str) -> str:
    """Return a page with fresh tables."""
    return TABLE.sub(lambda found: found[1] + "\n".join(table_of(found[2])) + "\n" + found[3], text)


def main(arguments: list[str]) -> int:
    """Write the pages with stale tables; with ``--check`` name them and return 1 if there are any."""
    stale = []
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (new := updated(text)) != text:
            stale.append(page)
            if arguments != ["--check"]:
                page.write_text(new, encoding="utf-8")
    for page in stale:
        done = "stale, run make docs" if arguments == ["--check"] else "written"
        print(f"docs/{page.relative_to(DOCS).as_posix()}: {done}")
    return int(bool(stale) and arguments == ["--check"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
