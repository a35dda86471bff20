"""The driver on engines and a trainer in memory: nothing is lost, nothing counted twice, all replays."""

import csv
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from in_memory import KINDS, config_of, parts_of, run, run_checked
from ledger_check import records

from backends.fake import DRIFT, FakeEngine
from pipelinerl.scheduler.events import KVCacheUsed, PublishWeights, RolloutFinished, StartRollout


@pytest.mark.parametrize(
    "setting",
    [
        *({"weight_update": kind} for kind in KINDS),
        {"micro_batch_size": 4},  # two stream into one step
        *({"max_lag": 1, "on_stale": on_stale} for on_stale in ("train", "drop", "requeue")),
    ],
    ids=str,
)
def test_a_pipeline_run_keeps_its_ledger_and_its_bound_on_lag(out, setting):
    config = config_of(steps=8, **setting)
    parts = parts_of(config)
    summary = run_checked(config, out, parts)
    assert parts.trainer.version == config.optimizer_steps
    assert [len(batch) for batch in parts.trainer.trained] == [8] * 8
    assert summary.complete
    assert summary.lag.max <= setting.get("max_lag", 8)


class Full(FakeEngine):
    """Reports a KV cache that each request in progress fills by a tenth."""

    async def generate(self, request):
        answer = await super().generate(request)
        return replace(answer, kv_cache_share=min(1.0, len(self._sequences) / 10))


def test_sequences_in_progress_follow_the_room_that_engines_report(out):
    """Ten slots, of which 0.5 of the KV cache holds five: one at first, about as many once it is known."""
    config = config_of(steps=30, slots=10, longest=40, admission={"soft": 0.5, "hard": 0.9})
    run_checked(config, out, parts_of(config, engine=Full, step_s=0.001))
    in_progress, most, first = {0: set(), 1: set()}, [], 0
    for row in records(out):
        match row.command or row.event:
            case StartRollout(rollout_id=rollout_id, engine=engine):
                in_progress[engine].add(rollout_id)
                most.append(len(in_progress[engine]))
            case RolloutFinished(rollout_id=rollout_id, engine=engine):
                in_progress[engine].remove(rollout_id)
            case KVCacheUsed():
                first = first or max(most)
    assert first == 1
    assert 4 <= np.mean(most[len(most) // 2 :]) <= 6


@pytest.mark.parametrize("weight_update", ["keep", "wait"])
def test_an_answer_spans_two_versions_in_flight_and_never_under_wait(out, weight_update):
    config = config_of(steps=10, longest=40, slots=16, weight_update=weight_update)
    run(config, out, parts_of(config))
    spans = [row.event.spans for row in records(out) if isinstance(row.event, RolloutFinished)]
    assert any(len(one.versions) > 1 for one in spans) is (weight_update == "keep")


def test_an_aborting_update_has_rollouts_go_on_with_the_tokens_they_have(out):
    config = config_of(steps=10, longest=40, slots=16, weight_update="abort")
    summary = run_checked(config, out)
    again = [row.command for row in records(out) if isinstance(row.command, StartRollout) and row.command.kept_tokens]
    assert again
    assert summary.rollouts.interruptions >= len(again)


@pytest.mark.parametrize(
    ("kind", "steps_per_rl_step", "lags"),
    [
        ("conventional", 1, [0, 0, 0, 0, 0, 0]),  # batch i of an RL step has lag i
        ("conventional", 3, [0, 1, 2, 0, 1, 2]),
        ("one_step_off", 1, [0, 1, 1, 1, 1, 1]),  # lag G + i, but in the first RL step
        ("one_step_off", 2, [0, 1, 2, 3, 2, 3]),
    ],
)
def test_a_run_in_rounds_trains_every_batch_at_its_lag(out, kind, steps_per_rl_step, lags):
    config = config_of(kind=kind, optimizer_steps_per_rl_step=steps_per_rl_step)
    parts = parts_of(config)
    run_checked(config, out, parts)
    with (out / "steps.csv").open() as rows:
        assert [float(row["lag_mean"]) for row in csv.DictReader(rows)] == lags
    assert [len(batch) for batch in parts.trainer.trained] == [8] * 6


@pytest.mark.parametrize("weight_update", KINDS)
@pytest.mark.parametrize("every", [2, 4])
def test_a_run_that_publishes_now_and_then_keeps_its_ledger(out, every, weight_update):
    config = config_of(publish_every=every, max_lag=every, weight_update=weight_update)
    summary = run_checked(config, out)
    rows = records(out)
    versions = [0, *(row.command.version for row in rows if isinstance(row.command, PublishWeights))]
    assert len(versions) > 1
    for last, version in pairwise(versions):  # once in K steps, or made up for later
        assert version // every > last // every
    assert summary.lag.max <= every


def test_the_effective_sample_size_is_that_of_the_fake_drift(tmp_path, out):
    """Weights are exp(-DRIFT * lag), so within one lag all are equal: ESS 1; conventional G=1 has lag 0 only."""
    config = config_of(kind="conventional")
    summary = run(config, out, parts_of(config))
    assert summary.ess.mean == summary.ess.min == pytest.approx(1.0, abs=1e-12)
    assert summary.mismatch.kl == summary.mismatch.log_ratio_abs_max_at_lag_0 == 0.0
    mixed = config_of(steps=10, longest=40, slots=16)
    summary = run(mixed, tmp_path / "mixed", parts_of(mixed))
    assert all(ess == pytest.approx(1.0, abs=1e-5) for ess in summary.ess.by_lag.values())  # float32 inside
    largest = summary.lag.max * DRIFT
    assert math.exp(-largest) < summary.ess.mean <= 1.0
