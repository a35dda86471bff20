"""Routing in simulated runs: Little's law, fairness, engines that come and go, and the collapse of hashing."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from played_run import Played, environment, fixed, oldest_trained, play, uniform

from pipelinerl.config.run import load_run
from pipelinerl.scheduler.events import (
    EngineJoined,
    EngineLeft,
    RolloutAborted,
    RolloutFailed,
    RolloutFinished,
    Routing,
    StartRollout,
    StartTraining,
    TurnFinished,
)
from sim.clock import TICKS_PER_S
from sim.engine import ClosedFormEngine
from sim.run import simulate

ROUTING = Path(__file__).parents[2] / "examples" / "routing.toml"
TURNS = {"turns": 4, "observation": 20, "context_max": 300, "step_s": 3.0, "prefix_cache": "kept"}
HARDWARE = {"prefill": {"token_s": 0.02}, "kv_cache_tokens": 500, "weights": {"pause_s": 0.5}}
AS_PUBLISHED = "routing.toml, as published"
COLUMNS = {
    "agents.toml": ["optimizer_steps=12"],
    AS_PUBLISHED: [],
    "skewed": next(one.set for one in load_run(ROUTING).compare.scenarios if one.name == "skewed"),
}
"""Overrides of each column of the table in docs/agents.md."""
ENDS = (TurnFinished, RolloutFinished, RolloutAborted, RolloutFailed)


def stays(run):
    """Seconds of each stay of a rollout on an engine, and the rollouts there over time: (time, engine, change)."""
    since, seconds, changes = {}, [], []
    for time_s, one in run.of(StartRollout, *ENDS):
        if isinstance(one, StartRollout):
            assert one.rollout_id not in since, "it starts twice"
            since[one.rollout_id] = time_s, one.engine
            changes.append((time_s, one.engine, 1))
        elif one.engine is not None:
            began_s, engine = since.pop(one.rollout_id)
            assert engine == one.engine
            seconds.append(time_s - began_s)
            changes.append((time_s, engine, -1))
    assert not since, "it ends never"
    return seconds, changes


@pytest.mark.parametrize("with_turns", [True, False])
@pytest.mark.parametrize("routing", Routing)
def test_littles_law_holds(routing, with_turns):
    """Mean rollouts in progress = stays per second x their mean time. The first is an integral over time.

    The report's seconds on engines, per finished rollout, give the same.
    """
    turns = environment(count=12, **TURNS) if with_turns else None
    run = play(6, batch=16, slots=3, engines=3, group_size=4, length=uniform(30), routing=routing, environment=turns,
               hardware=HARDWARE)  # fmt: skip
    seconds, changes = stays(run)
    end_s = run.entries[-1][0]
    in_progress, before_s, area = 0, 0.0, 0.0
    for time_s, _, change in changes:
        area += in_progress * (time_s - before_s)
        in_progress, before_s = in_progress + change, time_s
    rate, mean_s = len(seconds) / end_s, sum(seconds) / len(seconds)
    assert area / end_s == pytest.approx(rate * mean_s, rel=1e-9)
    assert area > 0
    if with_turns:
        report = run.summary()
        finished = report.rollouts.finished
        assert report.environments.seconds.engine * finished == pytest.approx(area, rel=1e-9)


def test_most_free_keeps_engines_within_one_slot_of_each_other():
    """Ten equal rollouts in progress on three engines of four slots: whenever all that has ended is replaced."""
    run = play(20, batch=9, slots=4, engines=3, length=fixed(10), routing="most_free",
               environment=environment(count=10, turns=1, reset_cv=1.0, reset_s=1.0))  # fmt: skip
    in_use, changes = [0, 0, 0], stays(run)[1]
    num_moments = 0
    for (time_s, engine, change), (next_s, *_) in pairwise(changes):
        in_use[engine] += change
        if next_s > time_s and sum(in_use) == 10:
            assert max(in_use) - min(in_use) <= 1
            num_moments += 1
    assert num_moments >= 5


@pytest.mark.parametrize("weight_update", ["keep", "recompute", "abort", "wait"])
@pytest.mark.parametrize("turns", [None, environment(count=12, **TURNS)], ids=["one turn", "turns"])
@pytest.mark.parametrize("routing", Routing)
def test_runs_end_within_max_lag_while_engines_come_and_go(routing, turns, weight_update):
    """Each rollout that starts on an engine ends there, is trained on once at most, and at a lag of 2 at most."""
    fleet = {
        "start_s": 5.0,
        "groups": [
            {"name": "own", "engines": 1},
            {"name": "spot", "kind": "spot", "engines": 2, "reclaim_hours": 0.02, "away_s": 20.0, "notice_s": 5.0},
        ],
    }
    run = play(8, batch=16, slots=3, engines=3, group_size=4, length=uniform(30), routing=routing, environment=turns,
               hardware=HARDWARE, fleet=fleet, max_lag=2, weight_update=weight_update)  # fmt: skip
    assert len(run.of(EngineJoined)) > 1 < len(run.of(EngineLeft))
    stays(run)
    assert len(set(run.trained)) == len(run.trained) == 8 * 16
    assert oldest_trained(run) <= 2


@pytest.mark.parametrize("kind", ["conventional", "one_step_off", "partial_rollouts"])
@pytest.mark.parametrize("turns", [None, environment(count=12, **TURNS)], ids=["one turn", "turns"])
@pytest.mark.parametrize("routing", Routing)
def test_every_kind_of_schedule_ends_under_every_routing(routing, turns, kind):
    run = play(4, batch=16, slots=3, engines=3, group_size=4, length=uniform(30), routing=routing, environment=turns,
               hardware=HARDWARE, kind=kind, optimizer_steps_per_rl_step=2)  # fmt: skip
    stays(run)
    assert len(set(run.trained)) == len(run.of(StartTraining)) * 16 == 4 * 16


def test_the_cached_share_is_that_of_all_tokens_at_the_starts_of_turns():
    """Two turns of 10 tokens and an observation of 20: 0 of 20 in the first, 30 of 50 in the second: 30 / 70."""
    turns = environment(count=1, turns=2, observation=20, prefix_cache="kept")
    turns["turns"]["cv"] = 0.0
    keys = {"batch": 1, "slots": 1, "length": fixed(10), "prompt_tokens": 20}
    assert play(4, **keys, environment=turns).cluster.measured().cached_share == pytest.approx(30 / 70)
    assert play(4, **keys, environment=turns | {"prefix_cache": "off"}).cluster.measured().cached_share == 0.0
    # Prefilled elsewhere: found there, where the engine had the cache of the first turn.
    apart = {"engines": 2, "generation": {"prefill": 1, "decode": 1}}
    shares = [play(4, **keys, **apart, environment=turns | {"prefix_cache": one}).cluster for one in ("kept", "off")]
    assert [one.measured().cached_share for one in shares] == pytest.approx([20 / 70, 0.0])
    assert play(4, **keys).cluster.measured().cached_share is None


# --------------------------------------------------------------------------------------- the collapse of hashing


@dataclass
class Watched:
    """The host of an engine, which notes each turn that ends: (s, engine, tokens at its start, those in the cache)."""

    host: object
    clock: object
    turns: list

    def rollout_finished(self, engine, request, spans):
        read = request.prompt_tokens + request.num_known
        self.turns.append((self.clock.now / TICKS_PER_S, engine, read, request.cached_tokens))
        self.host.rollout_finished(engine, request, spans)

    def __getattr__(self, name):
        return getattr(self.host, name)


def watched(overrides):
    """Return a run of the example, and its turns."""
    turns = []

    def make(clock, host, engine, settings):
        return ClosedFormEngine(clock, Watched(host, clock, turns), engine, settings)

    return Played(load_run(ROUTING, overrides), engine_factory=make), turns


def hits(turns, engine):
    """Share of tokens in the cache at the starts of turns on an engine."""
    read, cached = (sum(one[place] for one in turns if one[1] == engine) for place in (2, 3))
    return cached / read


def second_half(run, turns):
    end_s = run.entries[-1][0]
    return [one for one in turns if one[0] > end_s / 2]


def shares_of_rollouts(run):
    """Share of each engine in all rollouts in progress, over the second half."""
    end_s, area, count, before_s = run.entries[-1][0], defaultdict(float), defaultdict(int), 0.0
    for time_s, engine, change in stays(run)[1]:
        if time_s > end_s / 2:
            for one, number in count.items():
                area[one] += number * (time_s - max(before_s, end_s / 2))
        before_s = time_s
        count[engine] += change
    return {engine: part / sum(area.values()) for engine, part in area.items()}


@pytest.mark.slow(seconds=30)  # each
@pytest.mark.parametrize("routing", Routing)
def test_the_page_has_the_numbers_of_every_routing_and_hashing_of_sessions_collapses(routing):
    """docs/agents.md: tokens per second and cached share, of the two examples and the skewed scenario.

    prime-rl #3255: hits on the saturated engine fall from 98 % to 5 %, the others idle, a quarter of the speed. Here
    from 93 % to 0 %; the three others hold 6 % of the rollouts in progress together; 3.4 times slower.
    """
    page = (ROUTING.parents[1] / "docs" / "agents.md").read_text(encoding="utf-8")
    table = page.partition("<!-- routing -->")[2].splitlines()
    rows = {one: next(line for line in table if f"| `{one}` |" in line) for one in Routing}
    shown = []
    for column, overrides in COLUMNS.items():
        sets = [*overrides, f"scheduler.routing={routing}"]
        if column == AS_PUBLISHED:
            published, turns = watched(sets)
            speed, share = published.summary().tokens_per_s, published.cluster.measured().cached_share
        else:
            report = simulate(load_run(ROUTING.with_name("agents.toml") if column == "agents.toml" else ROUTING, sets))
            speed, share = report.tokens_per_s, report.cached_share
        shown += [f"{speed:,.0f}", f"{100 * share:.0f} %"]
    assert rows[routing] == f"| `{routing}` | {' | '.join(shown)} |"
    later = second_half(published, turns)
    by_engine = {engine: hits(later, engine) for engine in range(4)}
    if routing is Routing.HASH:
        saturated = min(by_engine, key=by_engine.get)
        assert hits(turns[600:1400], saturated) > 0.9  # rollouts begin in the first 600 turns
        assert by_engine.pop(saturated) < 0.05
        assert shares_of_rollouts(published)[saturated] > 0.9
    if routing not in (Routing.LEAST_LOADED, Routing.MOST_FREE):
        assert min(by_engine.values()) > 0.9
    if routing in (Routing.STICKY, Routing.ROOM, Routing.CACHE_AWARE):
        own, of_hash = (float(rows[one].split(" | ")[3].replace(",", "")) for one in (routing, Routing.HASH))
        assert own > 3.2 * of_hash
