"""Environments that fail, hang and are given up: by hand, against theory, and as RollArt measured it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from drawn_episodes import episodes
from played_run import Played, environment, fixed, play

from pipelinerl.config.environment import EnvironmentConfig
from pipelinerl.config.run import load_run
from pipelinerl.scheduler.events import EnvironmentFailed, EnvironmentFault, VersionSpans
from pipelinerl.util.lognormal import mean_of_cut
from sim.clock import TICKS_PER_S, Clock
from sim.episodes import Environments, Episode
from sim.interface import Request

TIMEOUT, ERROR, EXPIRED = EnvironmentFault
TURNS = {"kind": "lognormal", "mean": 1, "max": 1, "observation_max": 0, "context_max": 1}
EXAMPLES = Path(__file__).parents[2] / "examples"


class Alone:
    """The environment of one rollout, with a log of its reports and their times (s)."""

    def __init__(self, *, faults=None, **keys):
        ticks = [(seconds * TICKS_PER_S) for seconds in (5, 7)]
        tries = {turn: [(s * TICKS_PER_S, fault) for s, fault in one] for turn, one in (faults or {}).items()}
        episode = Episode(0, ends=(4, 8), observed=(0, 3), acting_ticks=tuple(ticks), faults=tries)
        self.clock, self.log, self.request = Clock(), [], Request(0, 0, 1)
        self.station = Environments(
            self.clock,
            EnvironmentConfig.model_validate({"count": 1, "turns": TURNS, **keys}),
            SimpleNamespace(episode=lambda rollout_id, prompt_id: episode),
            deliver=self.note,
            forget=self.forget,
        )
        self.station.open(self.request, 0)

    def note(self, event):
        extra = (event.fault, event.again) if isinstance(event, EnvironmentFailed) else ()
        self.log.append((self.clock.now / TICKS_PER_S, type(event).__name__, *extra))

    def forget(self, rollout_id):
        self.log.append((self.clock.now / TICKS_PER_S, "forgotten"))
        self.station.forget(rollout_id)

    def turn(self, num_tokens):
        return self.station.goes_on(0, self.request, VersionSpans((0,), (num_tokens,)))


def test_an_environment_that_fails_is_retried_and_then_given_up_by_hand():
    """A reset fails after 2 s, then takes 5; a step times out after 3 s, and fails after 1 more: once too often."""
    alone = Alone(faults={0: [(2, ERROR)], 1: [(3, TIMEOUT), (1, ERROR)]}, retries=1)
    alone.clock.run()
    assert alone.turn(4)
    alone.clock.run()
    assert alone.log == [
        (2.0, "EnvironmentFailed", ERROR, True),
        (7.0, "ObservationReady"),
        (7.0, "TurnFinished"),
        (10.0, "EnvironmentFailed", TIMEOUT, True),
        (11.0, "EnvironmentFailed", ERROR, False),
        (11.0, "forgotten"),
        (11.0, "RolloutFailed"),
    ]


def test_the_lifetime_cuts_the_action_of_the_environment():
    """Reset from 0 to 5 s; the step from 5 s on would last to 12, and is cut at 9."""
    alone = Alone(lifetime_s=9.0, retries=5)
    alone.clock.run()
    assert alone.turn(4)
    alone.clock.run()
    assert alone.log[2:] == [(9.0, "EnvironmentFailed", EXPIRED, False), (9.0, "forgotten"), (9.0, "RolloutFailed")]


@pytest.mark.parametrize(("ends_s", "finishes"), [(12, True), (13, False)])
def test_the_last_turn_must_end_within_the_lifetime(ends_s, finishes):
    alone = Alone(lifetime_s=12.0)
    alone.clock.run()
    assert alone.turn(4)
    alone.clock.run()
    assert alone.log[-1] == (12.0, "ObservationReady")  # 5 + 7 s
    if ends_s > 12:
        alone.clock.run(until=ends_s * TICKS_PER_S)
    assert alone.turn(8) is not finishes
    alone.clock.run()
    after = [(13.0, "TurnFinished"), (13.0, "EnvironmentFailed", EXPIRED, False), (13.0, "forgotten")]
    assert alone.log[3:] == ([] if finishes else [*after, (13.0, "RolloutFailed")])


# ------------------------------------------------------------------------------------- against theory


def cut_mean(mean, cv, most):
    log_sd = math.sqrt(math.log1p(cv**2))
    return mean_of_cut(math.log(mean) - log_sd**2 / 2, log_sd=log_sd, cut=most)


def above(mean, cv, most):
    log_sd = math.sqrt(math.log1p(cv**2))
    return math.erfc((math.log(most / mean) + log_sd**2 / 2) / log_sd / math.sqrt(2)) / 2


@pytest.mark.slow
@pytest.mark.parametrize("turn", [0, 1])
def test_tries_and_their_time_follow_theory(turn):
    """p = h + (1 - h) (P(T > tau) + P(T <= tau) f) a try: (1 - p^(R+1)) / (1 - p) of them, of E[min(T, tau)] each.

    The second is Wald's identity: whether there is another try depends on those before only. Of 20,000 rollouts, each
    mean within 4.5 of its standard errors: three false alarms in 100,000 seeds for the eight of both turns.
    """
    mean, cv, tau, hang, error, retries = ((9.0, 0.8, 20.0, 0.1, 0.2, 2), (4.0, 1.5, 5.0, 0.05, 0.2, 2))[turn]
    source = episodes(
        {"kind": "lognormal", "mean": 2.0, "max": 2},
        reset_s=9.0, reset_cv=0.8, reset_timeout_s=20.0, reset_hang_rate=0.1,
        step_s=4.0, step_cv=1.5, step_timeout_s=5.0, step_hang_rate=0.05, failure_rate=0.2, retries=2,
    )  # fmt: skip
    tries, seconds, timeouts, given_up = [], [], [], []
    for rollout_id in range(20_000):
        one = source.episode(rollout_id, rollout_id)
        if turn and len(one.faults.get(0, ())) > retries:
            continue  # it does not come to this turn
        failed = one.faults.get(turn, ())
        given_up.append(len(failed) > retries)
        tries.append(len(failed) + (not given_up[-1]))
        seconds.append((sum(t for t, _ in failed) + one.acting_ticks[turn] * (not given_up[-1])) / TICKS_PER_S)
        timeouts.append(sum(fault is TIMEOUT for _, fault in failed))
        assert all(ticks == tau * TICKS_PER_S for ticks, fault in failed if fault is TIMEOUT)
    slow = hang + (1 - hang) * above(mean, cv, tau)
    p = slow + (1 - slow) * error
    expected = (1 - p ** (retries + 1)) / (1 - p)
    once_s = hang * tau + (1 - hang) * cut_mean(mean, cv, tau)
    for values, theory in (
        (tries, expected), (seconds, expected * once_s), (timeouts, expected * slow), (given_up, p ** (retries + 1)),
    ):  # fmt: skip
        assert abs(np.mean(values) - theory) <= 4.5 * np.std(values) / len(values) ** 0.5


def test_a_run_counts_every_failure():
    """What was not tried again ended a rollout; with a limit on time, that of a failed one too."""
    run = play(
        60, batch=4, slots=8, length=fixed(3), environment=environment(
            count=8, turns=4, step_s=2.0, step_cv=1.0, step_timeout_s=6.0, step_hang_rate=0.02, failure_rate=0.05,
            retries=1, lifetime_s=28.0,
        ),
    )  # fmt: skip
    report, seen = run.summary().environments, [entry for _, entry in run.of(EnvironmentFailed)]
    assert min(report.timeouts, report.errors, report.expired, report.retries) > 0
    assert [report.timeouts, report.errors, report.expired] == [
        sum(one.fault is fault for one in seen) for fault in EnvironmentFault
    ]
    assert report.retries == sum(one.again for one in seen)
    assert report.timeouts + report.errors + report.expired - report.retries == run.summary().rollouts.failed


def test_a_recorded_step_takes_as_long_again(tmp_path):
    line = '{"group": 1, "stream": 0, "prompt_len": 10, "out_lens": [4, 6], "obs_lens": [3], "tool_times": [9.0]}'
    (tmp_path / "turns.jsonl").write_text(line, encoding="utf-8")
    recorded = {"kind": "recorded", "source": str(tmp_path / "turns.jsonl"), "max": 10}
    one = episodes(recorded, step_timeout_s=8.0, retries=2).episode(0, 0)
    assert one.faults == {1: [(8 * TICKS_PER_S, TIMEOUT)] * 3}
    hangs = episodes(recorded, step_timeout_s=10.0, step_hang_rate=0.5, retries=2)
    answers = [one for k in range(50) if len((one := hangs.episode(k, k)).faults.get(1, ())) < 3]
    assert {one.acting_ticks[1] for one in answers} == {9 * TICKS_PER_S}
    assert any(one.faults for one in answers)


# ------------------------------------------------------------------------------------- as published


@pytest.mark.slow
def test_a_time_out_lengthens_a_step_as_published():
    """RollArt (OSDI 2026, section 3.1): 366 s, and 513 s in the one step of ten that has a time-out.

    The first is fitted. The second follows: the batch waits for the one rollout whose reset took 300 s and then a
    usual one; 300 + 12 s are 78 % of its 400 s, as published. Within 10 %.
    """
    run = Played(load_run(EXAMPLES / "agent_timeouts.toml"))
    ends_s = np.array([row.time_s for row in run.steps])
    steps_s = np.diff(ends_s, prepend=0.0)
    times_s = [time_s for time_s, one in run.of(EnvironmentFailed) if one.fault is TIMEOUT]
    has_timeout = np.isin(np.arange(len(ends_s)), np.searchsorted(ends_s, times_s))
    assert 0.04 <= has_timeout.mean() <= 0.16  # 0.1 of 200: within 3 standard deviations
    assert steps_s[~has_timeout].mean() == pytest.approx(366, rel=0.02)
    assert steps_s[has_timeout].mean() == pytest.approx(513, rel=0.1)


@pytest.mark.parametrize(("sd_s", "published"), [(1.0, 1.23), (10.0, 2.27)])
def test_rollouts_that_wait_for_nobody_gain_as_much_as_published(tmp_path, sd_s, published):
    """RollArt (OSDI 2026): latencies of N(10, 1 to 10) s a step; each rollout for itself is 1.23 to 2.27 times as fast.

    As fast as what: a batch whose turns end together, each with its slowest environment. 128 rollouts of 30 turns of
    2 s (assumed). Simulated, the batch lasts as long as its longest rollout; the other time is added up here.
    """
    latencies_s = np.maximum(0.0, np.random.default_rng(0).normal(10.0, sd_s, (128, 29)))
    lines = [
        {"group": 0, "stream": k, "prompt_len": 1, "out_lens": [20] * 30, "obs_lens": [0] * 29, "tool_times": one}
        for k, one in enumerate(latencies_s.tolist())
    ]
    source = tmp_path / "turns.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    table = environment(count=128)
    table["turns"] = {"kind": "recorded", "source": str(source), "max": 30, "observation_max": 0, "context_max": 1000}
    run = play(
        1, batch=128, group_size=128, slots=128, length=fixed(20), kind="conventional", environment=table,
        hardware={"decode": {"kind": "affine", "step_s": 0.1}},
    )  # fmt: skip
    alone_s = 60.0 + latencies_s.sum(axis=1).max()
    assert run.summary().duration_s == pytest.approx(alone_s, rel=0.01)
    together_s = 60.0 + latencies_s.max(axis=0).sum()
    assert together_s / run.summary().duration_s == pytest.approx(published, rel=0.06)


@pytest.mark.slow
@pytest.mark.parametrize(("turns", "model_s", "acting_s"), [(64.8, 46.9, 0.61), (45.2, 32.6, 0.68)])
def test_rollouts_drawn_by_published_means_last_as_long_as_their_product(turns, model_s, acting_s):
    """DeepSWE (rllm #138): steps of a rollout, seconds of model and environment in a step, seconds of a rollout.

    Turns and their times are drawn independently, so by Wald's identity a rollout lasts turns * (model + environment)
    on average: 3079 and 1504 s. Published are 2676 and 1562 s: there long rollouts have other steps than short ones.
    """
    table = environment(count=200, turns=turns, step_s=acting_s, reset_s=acting_s, context_max=10**6)
    table["turns"] |= {"cv": 0.3, "max": 1000}
    run = play(
        1, batch=200, slots=200, length=fixed(round(10 * model_s)), kind="conventional", environment=table,
        hardware={"decode": {"kind": "affine", "step_s": 0.1}},
    )  # fmt: skip
    report = run.summary().environments
    seconds = report.seconds.engine + report.seconds.environment
    assert seconds == pytest.approx(report.turns_mean * (model_s + acting_s))
    assert report.turns_mean == pytest.approx(turns, rel=5 * 0.3 / 200**0.5)  # 5 standard errors
    assert report.seconds.environment / seconds == pytest.approx(acting_s / (model_s + acting_s))
