"""``import pipelinerl``: its names, their signatures, and what it does not load."""

import ast
import base64
import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_plan import priced_plan

import pipelinerl as prl
from pipelinerl.config.question import ask
from pipelinerl.config.run import RunConfig
from pipelinerl.pages.plans import what_if
from pipelinerl.records.plan_report import Assumed
from pipelinerl.records.run_folder import SUMMARY_FILE

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.toml"
ARMS = "compare={arms=[{name='one'}, {name='two', set=['scheduler.kind=conventional']}], baseline='two'}"
SMALL = ["optimizer_steps=4", "scheduler.train_batch_size=16"]
SIGNATURES = {
    "compare": "(run, *, out=None, workers=None)",
    "load_run": "(path, overrides=(), seed=None, *, hardware=None, faults=None)",
    "make_scheduler": (
        "(settings, *, optimizer_steps, num_engines, group_size, environments=None, kv_cache_tokens=None)"
    ),
    "plan": "(run=None, *, out=None, workers=None, **question)",
    "plot": "(folders, *, out=None)",
    "replay": "(folder)",
    "simulate": "(run, *, out=None, trace=False, on_step=None)",
}
TYPES = {
    "PipelineRLError", "ComparisonReport", "ConfigError", "PlanReport", "ReplayResult", "RunConfig", "RunFailedError",
    "RunReport", "ScheduleKind", "Scheduler", "SchedulerError", "TraceError",
}  # fmt: skip


def test_the_exported_names_and_signatures_are_these() -> None:
    assert set(prl.__all__) == {*SIGNATURES, *TYPES, "events", "__version__"}
    assert dir(prl) == sorted(prl.__all__)
    for name, shown in SIGNATURES.items():
        parameters = inspect.signature(getattr(prl, name)).parameters.values()
        bare = inspect.Signature([one.replace(annotation=inspect.Parameter.empty) for one in parameters])
        assert str(bare) == shown, name
    assert all(inspect.isclass(getattr(prl, name)) for name in TYPES)
    assert inspect.ismodule(prl.events)


def test_a_checker_sees_the_names_that_are_imported_late() -> None:
    tree = ast.parse((ROOT / "pipelinerl" / "__init__.py").read_text(encoding="utf-8"))
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = [(node.module, alias.name) for node in guarded.body for alias in node.names]
    assert sorted(name for _, name in seen) == sorted(set(prl.__all__) - {"__version__"})
    for module, name in seen:
        home = importlib.import_module(module)
        assert getattr(prl, name) is getattr(home, name), name


def test_every_public_function_says_what_it_raises() -> None:
    documented = [name for name in SIGNATURES if "Raises:" in (getattr(prl, name).__doc__ or "")]
    assert documented == sorted(set(SIGNATURES) - {"make_scheduler"})


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="simulat'"):
        _ = prl.simulat


def test_errors_are_pipelinerl_errors_and_that_of_input_is_a_value_error() -> None:
    assert all(issubclass(getattr(prl, name), prl.PipelineRLError) for name in TYPES if name.endswith("Error"))
    assert issubclass(prl.ConfigError, ValueError)


def test_a_run_file_is_simulated_kept_replayed_and_drawn(tmp_path: Path) -> None:
    run = prl.load_run(QUICKSTART, SMALL)
    report = prl.simulate(run, out=tmp_path / "run", trace=True)
    assert report.to_dict() == json.loads((tmp_path / "run" / SUMMARY_FILE).read_text(encoding="utf-8"))
    assert prl.simulate(str(tmp_path / "run" / "run.toml")).to_dict() == report.to_dict()  # a path stands for its run
    assert report.steps.tokens.sum() == report.tokens_trained
    assert prl.replay(tmp_path / "run").difference is None
    figures = prl.plot(tmp_path / "run", out=tmp_path / "figures")
    assert figures
    assert all(path.is_file() for path in figures)


def test_reports_show_themselves_and_become_frames(tmp_path: Path) -> None:
    run = prl.load_run(QUICKSTART, SMALL)
    report = prl.simulate(run)
    assert list(report.to_frame().tokens) == list(report.steps.tokens)
    comparison = prl.compare(prl.load_run(QUICKSTART, [*SMALL, ARMS]), workers=1)
    frame = comparison.to_frame()
    assert list(frame.arm) == ["one", "two"]
    assert frame.tokens_per_s[0] == comparison.arms[0].summary.tokens_per_s
    for shown, words in ((report, f"{report.tokens_per_s:,.0f} tokens/s"), (comparison, comparison.answer)):
        html = shown._repr_html_()
        assert words in html
        picture = re.search(r'src="data:image/png;base64,([^"]+)"', html)
        assert base64.b64decode(picture[1]).startswith(b"\x89PNG")
    assert report.lag._repr_html_() is None  # a part of a report is text


def test_a_question_is_that_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it assumes is in the result, and a notebook shows it, as the command prints it."""
    import sim.planning.answer

    asked, report = [], priced_plan()

    def searched(config: RunConfig, _how: object, **named: Any) -> tuple[prl.PlanReport, None]:
        asked.append(config)
        assert (named["whole"], named["effects"]) == (False, True)
        rows = [Assumed(key=one.key, value=one.value, instead=[]) for one in named["assumed"]]
        return report.model_copy(update={"assumed": rows}), None

    monkeypatch.setattr(sim.planning.answer, "searched", searched)
    question = {"model": "Qwen3-14B", "gpu": "H100", "accelerators": 64, "max_mean_lag": 4}
    answered = prl.plan(**question)
    (config,) = asked
    assert [one.key for one in answered.assumed] == [one.key for one in ask(question).assumed]
    shown = answered._repr_html_()
    assert all(line in shown for one in what_if(answered) for line in one.lines)
    assert (config.hardware.model, config.cluster.accelerators, config.plan.mean_lag_limit) == ("Qwen3-14B", 64, 4)


@pytest.mark.parametrize(
    ("question", "said"),
    [({"modle": "Qwen3-14B"}, "got modle"), ({"gpu": "H100,H200", "model": "Qwen3-14B"}, "got 2 cases")],
)
def test_a_question_that_plan_does_not_take_is_one_line(question: dict[str, str], said: str) -> None:
    with pytest.raises(prl.ConfigError, match=said):
        prl.plan(**question)


def test_import_loads_no_other_package_and_no_module_of_ours() -> None:
    program = "import sys, pipelinerl; print(*(name for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=ROOT)
    loaded = set(done.stdout.split())
    assert not loaded & {"torch", "simpy", "matplotlib", "numpy", "pydantic", "typer", "sim", "analysis", "backends"}
    assert {name for name in loaded if name.startswith("pipelinerl")} == {"pipelinerl"}


@pytest.mark.parametrize("package", ["pipelinerl", "sim", "backends", "analysis"])
def test_every_package_ships_its_types(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()
