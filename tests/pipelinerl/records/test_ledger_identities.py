"""The ledger of simulated runs: identities, sums over single rollouts, and the ledger of a written trace."""

import json
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_histories import play_to
from played_run import Keeping
from traces import recorded

from pipelinerl.config.run import parse_run
from pipelinerl.errors import RunFailedError
from pipelinerl.records.ledger import RunLedger
from pipelinerl.records.trace import Trace
from pipelinerl.scheduler.events import (
    OnFull,
    OnStale,
    RolloutAborted,
    RolloutFinished,
    StartTraining,
    TrainingFinished,
    WeightUpdate,
)
from sim.cluster import SimulatedCluster


@st.composite
def runs(draw):
    """Small runs of all kinds."""
    conventional = draw(st.booleans())
    group_size = draw(st.sampled_from([1, 2, 4]))
    batch = group_size * draw(st.integers(1, 4))
    scheduler = {
        "kind": "conventional" if conventional else "pipeline",
        "train_batch_size": batch,
        "generation_batch_size": draw(st.integers(1, 8)),
        "optimizer_steps_per_rl_step": draw(st.integers(1, 4)),
        "micro_batch_size": draw(st.sampled_from([batch, group_size])),
        "weight_update": draw(st.sampled_from(list(WeightUpdate))).value,
        "filter_no_signal": draw(st.booleans()) and group_size > 1 and not conventional,
    }
    if not conventional:
        scheduler["on_full"] = draw(st.sampled_from(list(OnFull))).value
        scheduler["on_stale"] = draw(st.sampled_from(list(OnStale))).value
        max_lag = draw(st.none() | st.integers(0, 3))
        if max_lag is not None and (max_lag or scheduler["on_stale"] == "train"):
            scheduler["max_lag"] = max_lag
    return {
        "seed": draw(st.integers(0, 99)),
        "optimizer_steps": draw(st.integers(1, 12)),
        "cluster": {"accelerators": 4, "generation_accelerators": draw(st.integers(1, 3))},
        "scheduler": scheduler,
        "workload": {"group_size": group_size, "prompt_tokens": 5, "length": {"kind": "uniform", "max": 40}},
        "hardware": {
            "decode": {"kind": "affine", "step_s": 0.01, "context_token_s": draw(st.sampled_from([0.0, 1e-5]))},
            "prefill": {"token_s": 1e-4},
            "kv_cache_tokens": draw(st.sampled_from([None, 60])),
            "training": {"token_s": draw(st.sampled_from([0.0, 1e-3])), "step_s": draw(st.sampled_from([0.0, 0.1]))},
            "weights": {"publish_s": draw(st.sampled_from([0.0, 0.05])), "pause_s": draw(st.sampled_from([0.0, 0.2]))},
            "latency": {"reward_s": draw(st.sampled_from([0.0, 0.1])), "dispatch_jitter_s": 0.01},
        },
    }


def kept(tables, *, stop_after=None):
    """The configuration of a simulated run and its ledger; the run is interrupted after so many steps."""
    config = parse_run(tables)
    cluster = SimulatedCluster(config)
    ledger = Keeping(
        num_engines=config.num_engines,
        colocated=config.colocated,
        longest=config.workload.length.max,
        on_step=lambda row: cluster.interrupt() if row.step == stop_after else None,
    )
    with nullcontext() if stop_after is None else pytest.raises(RunFailedError, match="interrupted"):
        cluster.run(ledger)
    return config, ledger


ENDS = ("trained", "discarded", "aborted", "failed", "unfinished")


def check_identities(ledger):
    """What holds for every run, whole or cut short."""
    summary, profile, rows = ledger.summary().to_dict(), ledger.figure_data().to_dict(), ledger.steps
    lag, tokens, rollouts = summary["lag"], summary["tokens"], summary["rollouts"]
    assert rollouts["started"] == sum(rollouts[end] for end in ENDS)
    assert tokens["generated"] == sum(tokens[end] for end in ENDS)
    assert min(*rollouts.values(), *tokens.values()) >= 0
    assert sum(summary["discarded_by_reason"].values()) == rollouts["discarded"]
    assert sum(summary["seconds"].values()) == pytest.approx(summary["duration_s"])
    assert lag["mean"] == pytest.approx(lag["in_flight_mean"] + lag["in_queue_mean"])
    for name, part in profile["lag_histogram"].items():
        assert sum(part) == tokens["trained"]
        mean = sum(steps * count for steps, count in enumerate(part)) / max(1, tokens["trained"])
        assert mean == pytest.approx(lag["mean" if name == "total" else f"{name}_mean"])
    assert sum(profile["lag_by_position"]["tokens"]) == tokens["trained"]
    pairs = zip(profile["lag_by_position"]["lag_mean"], profile["lag_by_position"]["tokens"], strict=True)
    assert sum((mean or 0.0) * count for mean, count in pairs) == pytest.approx(lag["mean"] * tokens["trained"])
    assert 0 <= summary["utilisation"]["generation"] <= 1 + 1e-9
    assert 0 <= summary["utilisation"]["training"] <= 1 + 1e-9
    assert [row.step for row in rows] == list(range(1, summary["optimizer_steps"] + 1))
    assert sum(row.tokens for row in rows) == tokens["trained"]
    assert sum(row.samples for row in rows) == rollouts["trained"]
    assert sum(row.tokens * row.lag_mean for row in rows) == pytest.approx(lag["mean"] * tokens["trained"])
    assert max((row.lag_max for row in rows), default=0) == lag["max"]
    assert all(row.lag_mean == pytest.approx(row.lag_in_flight_mean + row.lag_in_queue_mean) for row in rows)


def check_sums_of_single_rollouts(ledger):
    """Every token by hand: its lag from its span, its trainer version from the events before."""
    version, generated, finished, trained = 0, {}, {}, []
    for _, entry in ledger.entries:
        match entry:
            case RolloutFinished():
                generated[entry.rollout_id] = entry.spans.num_tokens
                finished[entry.rollout_id] = (entry.spans, version)
            case RolloutAborted():
                generated[entry.rollout_id] = entry.spans.num_tokens
            case TrainingFinished():
                version = entry.version
            case StartTraining():
                for rollout_id in entry.rollout_ids:
                    answer, version_then = finished[rollout_id]
                    for span, token_version in enumerate(answer.versions):
                        num_tokens = answer.ends[span] - (answer.ends[span - 1] if span else 0)
                        trained += [(entry.version - token_version, entry.version - version_then)] * num_tokens
    summary = ledger.summary().to_dict()
    assert summary["tokens"]["generated"] == sum(generated.values())
    assert summary["tokens"]["trained"] == len(trained)
    assert summary["lag"]["max"] == max(lag for lag, _ in trained)
    assert summary["lag"]["mean"] == pytest.approx(sum(lag for lag, _ in trained) / len(trained))
    assert summary["lag"]["in_queue_mean"] == pytest.approx(sum(queue for _, queue in trained) / len(trained))
    assert summary["lag"]["p95"] == sorted(lag for lag, _ in trained)[-(-95 * len(trained) // 100) - 1]


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=100)
@given(tables=runs())
def test_the_ledger_of_a_run_balances_and_is_the_sum_of_its_rollouts(tables):
    config, ledger = kept(tables)
    check_identities(ledger)
    check_sums_of_single_rollouts(ledger)
    summary, rows = ledger.summary().to_dict(), ledger.steps
    assert summary["complete"]
    assert summary["rollouts"]["trained"] == summary["optimizer_steps"] * config.scheduler.train_batch_size
    assert rows[-1].time_s == summary["duration_s"]
    assert sum(row.train_s for row in rows) == pytest.approx(summary["seconds"]["training"])
    assert sum(row.publish_s for row in rows) == pytest.approx(summary["seconds"]["publishing"])
    waited_s = summary["seconds"]["waiting_for_data"] + summary["seconds"]["generating"]
    assert sum(row.wait_s for row in rows) == pytest.approx(waited_s, abs=1e-9)


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=40)
@given(tables=runs(), stop_after=st.integers(1, 6))
def test_the_ledger_of_a_run_cut_short_balances(tables, stop_after):
    _, ledger = kept({**tables, "optimizer_steps": 12}, stop_after=stop_after)
    check_identities(ledger)
    assert ledger.summary().to_dict()["optimizer_steps"] == stop_after
    assert not ledger.summary().to_dict()["complete"]


@pytest.mark.parametrize("kind", ["pipeline", "conventional"])
@pytest.mark.parametrize("weight_update", WeightUpdate)
def test_the_ledger_of_a_written_trace_is_that_of_the_run(tmp_path, kind, weight_update):
    overrides = ("scheduler.optimizer_steps_per_rl_step=3", f"scheduler.weight_update={weight_update.value}")
    trace = Trace(recorded(tmp_path, f"scheduler.kind={kind}", *overrides, "optimizer_steps=15"))
    config = trace.config
    ledger = RunLedger(num_engines=config.num_engines, colocated=config.colocated, longest=config.workload.length.max)
    play_to(ledger, ((one.time_s, one.event if one.event is not None else one.command) for one in trace.records()))
    recomputed = ledger.summary().to_dict()
    report = json.loads((tmp_path / "summary.json").read_text())
    assert recomputed == {key: value for key, value in report.items() if key in recomputed}
    assert ledger.figure_data().to_dict() == json.loads((tmp_path / "profile.json").read_text())
