"""Runs with a policy: only the schedule decides, the trace is complete, and the policy learns."""

import csv
import gc
import gzip
import json
import re
import sys
from contextlib import suppress
from itertools import takewhile

import numpy as np
import pytest
from learning_run import BASE, MAX, TURNS, config_with
from recorded_run import Recorded
from refusals import message
from step_by_step import StepByStepEngine

from pipelinerl.config.run import parse_run
from pipelinerl.errors import ConfigError, RunFailedError, install
from pipelinerl.records.trace import Trace, replay
from pipelinerl.scheduler.events import (
    DiscardRollouts,
    RolloutAborted,
    RolloutFinished,
    StartRollout,
    StartTraining,
    VersionSpans,
)
from sim.cluster import SimulatedCluster
from sim.engine import ClosedFormEngine
from sim.interface import Request
from sim.learning.tasks import END, Calculator, problem
from sim.planning.answer import plan
from sim.planning.simulate import HowToPlan
from sim.run import simulate

torch = pytest.importorskip("torch")

from sim.learning.loop import (  # noqa: E402
    Learner,
    one_thread,
    relearn,
)


def rows_of(folder):
    with (folder / "steps.csv").open() as file:
        return list(csv.DictReader(file))


def learned(config, folder):
    """Run with a trace; return the summary."""
    return simulate(config, out=folder, trace=True)


# ---------------------------------------------------------------------------------------------- whole runs


@pytest.mark.slow
@pytest.mark.parametrize("base", [BASE, TURNS], ids=["one turn", "turns"])
def test_the_same_seed_gives_the_same_bytes_and_another_one_others(tmp_path, base):
    for name in ("one", "two"):
        summary = learned(config_with(base=base), tmp_path / name)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == ["metrics.jsonl", "profile.json", "run.toml", "steps.csv", "summary.json", "trace.jsonl.gz"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    assert simulate(config_with("seed=1", base=base)).weights_sha256 != summary.weights_sha256


def learned_with(make, config):
    """The events and commands of a run with these engines, and the weights at its end."""
    recorded = Recorded()
    with one_thread():
        learner = Learner(config)
        SimulatedCluster(config, engine_factory=make, policy=learner).run(recorded)
    return recorded.entries, learner.fingerprint()


@pytest.mark.slow
@pytest.mark.parametrize("small_cache", [False, True])
@pytest.mark.parametrize(
    ("base", "update"),
    [
        *((BASE, update) for update in ("keep", "recompute", "abort", "wait")),
        *((TURNS, update) for update in ("keep", "recompute")),
    ],
)
def test_engines_in_closed_form_and_step_by_step_learn_the_same(base, update, small_cache):
    """Also where the KV cache is so small that rollouts are preempted and start over."""
    limit = [f"hardware.kv_cache_tokens={120 if base is TURNS else 80}"] if small_cache else []
    config = config_with(f"scheduler.weight_update={update}", *limit, "optimizer_steps=4", base=base)
    closed, step_by_step = (learned_with(make, config) for make in (ClosedFormEngine, StepByStepEngine))
    assert closed == step_by_step
    versions = [len(event.spans.versions) for _, event in closed[0] if isinstance(event, RolloutFinished)]
    assert (max(versions) > (2 if base is TURNS else 1)) == (update != "wait")


@pytest.mark.slow
@pytest.mark.parametrize("update", ["keep", "recompute"])
@pytest.mark.parametrize("base", [BASE, TURNS], ids=["one turn", "turns"])
def test_engines_that_draft_learn_the_same_in_closed_form_and_step_by_step(tmp_path, base, update):
    """Tokens are the policy's own: at lag 0 engine and trainer agree as without drafts, to rounding."""
    drafts = "engine.speculation={method='ngram', tokens=2, acceptance=0.6, decay=0.8, refresh_every=2, off_above=6}"
    config = config_with(f"scheduler.weight_update={update}", drafts, "optimizer_steps=4", base=base)
    closed, step_by_step = (learned_with(make, config) for make in (ClosedFormEngine, StepByStepEngine))
    assert closed == step_by_step
    summary = learned(config, tmp_path / "run")
    assert summary.tokens_per_step > 1
    assert abs(summary.mismatch.kl_at_lag_0) < 1e-9


SMALL_CACHE = ("hardware.kv_cache_tokens=60", "policy.learning_rate=1e-2", "optimizer_steps=10")


@pytest.mark.slow
@pytest.mark.parametrize("update", ["keep", "recompute", "abort"])
@pytest.mark.parametrize(
    ("base", "overrides"),
    [
        (BASE, ()),
        (BASE, ("seed=1", *SMALL_CACHE)),
        (BASE, ("seed=2", *SMALL_CACHE)),
        (TURNS, ("policy.learning_rate=1e-2", "optimizer_steps=12")),
    ],
    ids=["one turn", "preempted", "preempted, another seed", "turns"],
)
def test_the_trace_alone_gives_the_learned_weights_to_the_last_bit(tmp_path, base, overrides, update):
    """The trace names where a rollout lost its keys and values; under ``keep`` older weights had computed them."""
    summary = learned(config_with(f"scheduler.weight_update={update}", *overrides, base=base), tmp_path)
    assert summary.rollouts.preemptions > 10 or "hardware.kv_cache_tokens=60" not in overrides
    assert base is BASE or summary.environments.turns_mean > 1.2
    trace = Trace(tmp_path / "trace.jsonl.gz")
    assert replay(trace).difference is None
    again = relearn(trace)
    assert again.fingerprint() == summary.weights_sha256
    assert again.answers.versions == set(range(summary.optimizer_steps))


def test_a_trace_without_its_preemptions_is_one_line(tmp_path):
    learned(config_with("seed=1", *SMALL_CACHE), tmp_path)
    path = tmp_path / "trace.jsonl.gz"
    lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
    path.write_bytes(gzip.compress(b"".join(line for line in lines if b"RolloutPreempted" not in line)))
    with pytest.raises(RunFailedError, match=r"different: rollout \d+ has \d+ tokens in the trace and \d+ when"):
        relearn(Trace(path))


def test_a_trace_without_a_policy_cannot_be_learned_again(tmp_path):
    data = {key: value for key, value in BASE.items() if key != "policy"}
    simulate(parse_run(data), out=tmp_path, trace=True)
    with pytest.raises(ConfigError, match="without \\[policy\\]"):
        relearn(Trace(tmp_path / "trace.jsonl.gz"))


@pytest.mark.parametrize("base", [BASE, pytest.param(TURNS, marks=pytest.mark.slow)], ids=["one turn", "turns"])
def test_without_lag_pipeline_and_conventional_learn_the_same(tmp_path, base):
    """And sampling and training have the same log-probabilities: an ESS of 1, with observations too."""
    pipeline = learned(config_with("scheduler.max_lag=0", base=base), tmp_path / "pipeline")
    conventional = learned(config_with("scheduler.kind=conventional", base=base), tmp_path / "conventional")
    rewards = [[row["reward_mean"] for row in rows_of(tmp_path / name)] for name in ("pipeline", "conventional")]
    assert rewards[0] == rewards[1]
    assert pipeline.weights_sha256 == conventional.weights_sha256
    for summary in (pipeline, conventional):
        assert summary.ess.min == pytest.approx(1, abs=1e-6)
        assert summary.ess.sequence_mean == pytest.approx(1, abs=1e-6)


def test_conventional_steps_have_an_ess_of_1_at_lag_0_and_less_behind(tmp_path):
    steps = "scheduler.optimizer_steps_per_rl_step=3"
    summary = learned(config_with("scheduler.kind=conventional", steps, "policy.learning_rate=1e-2"), tmp_path)
    by_lag = summary.ess.by_lag
    assert list(by_lag) == [0, 1, 2]
    assert by_lag[0] == pytest.approx(1, abs=1e-6)
    assert 1 > by_lag[1] > by_lag[2] > 0


def test_the_ledger_and_the_metrics_report_the_same_rewards_and_lengths(tmp_path):
    summary = learned(config_with(), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line, row in zip(lines, rows_of(tmp_path), strict=True):
        assert line["reward/mean"] == float(row["reward_mean"])
        assert line["length/mean"] == float(row["length_mean"])
        assert line["lag/max"] == float(row["lag_max"])
        assert 0 < line["ess/token_raw"] <= line["ess/token_truncated"] + 1e-9 <= 1 + 1e-9
        assert f"ess/lag_{row['lag_max']}" in line
    assert summary.ess.min == min(line["ess/token_raw"] for line in lines)
    assert summary.reward.first == lines[0]["reward/mean"]


@pytest.mark.slow
def test_an_observation_is_the_sum_in_the_turn_before_and_is_not_trained_on(monkeypatch):
    """Every answer that is trained on, word by word: turns end with END, then comes the calculator's word."""
    seen, trained = [], []
    loss = Learner._loss  # the only place that has all answers of a batch

    def noted(self, rollout_ids, version):
        seen.extend((number, self.answers.answer(number)) for number in rollout_ids)
        value = loss(self, rollout_ids, version)
        trained.append(sum(self._spans[number].num_tokens for number in rollout_ids))
        return value

    monkeypatch.setattr(Learner, "_loss", noted)
    report = simulate(config_with(base=TURNS))
    task, turns_seen = Calculator(6), 0
    for number, draft in seen:
        assert draft.prompt == problem(task, seed=0, prompt_id=number // 4)
        words, generated = draft.word_L[: draft.length].tolist(), draft.generated_L[: draft.length]
        observed = np.flatnonzero(~generated).tolist()
        turn_starts = [0, *(place + 1 for place in observed)]
        for start, place in zip(turn_starts, observed, strict=False):
            assert words[start + 2] == END
            assert [words[place]] == task.observe(words[start:place])
        last = words[turn_starts[-1] :]
        assert task.observe(last) is None or len(turn_starts) == 6
        assert len(last) <= 4
        turns_seen = max(turns_seen, len(turn_starts))
    assert turns_seen > 2
    assert sum(trained) == sum(draft.num_generated for _, draft in seen)
    assert report.environments.turns_mean > 1.2


def test_an_environment_that_fails_costs_its_group_and_the_trace_is_learned_again(tmp_path):
    config = config_with("environment.failure_rate=0.05", "environment.retries=0", "optimizer_steps=8", base=TURNS)
    summary = learned(config, tmp_path)
    assert summary.environments.errors > 3
    assert relearn(Trace(tmp_path / "trace.jsonl.gz")).fingerprint() == summary.weights_sha256


def test_each_step_trains_exactly_the_batch_the_scheduler_chose(tmp_path, monkeypatch):
    seen = []
    train = Learner.train
    monkeypatch.setattr(Learner, "train", lambda self, command: (seen.append(command), train(self, command)))
    learned(config_with("scheduler.micro_batch_size=8"), tmp_path)
    commands = [one.command for one in Trace(tmp_path / "trace.jsonl.gz").records()]
    assert seen == [one for one in commands if isinstance(one, StartTraining)]
    assert len(seen) == 12


def test_micro_batches_add_up_to_the_same_step(monkeypatch):
    """What the optimizer gets, not clipped, of the first optimizer step at once and in parts."""
    seen = []

    def step(optimizer):
        seen.append([one.grad.clone() for group in optimizer.param_groups for one in group["params"]])

    with one_thread():
        learners = {
            size: Learner(config_with("scheduler.kind=conventional", "policy.gradient_clip=1e9")) for size in (16, 4)
        }
        monkeypatch.setattr(torch.optim.Adam, "step", step)  # not before the base model is there, which takes steps too
        for size, learner in learners.items():
            for number in range(16):
                learner.answers.ask(number, number // 4)
                request = Request(number, learner.prompt_tokens, MAX)
                learner.answers.begin(request, 0)
                learner.finished(number, VersionSpans((0,), (request.length,)))
            for end in range(size, 17, size):
                learner.train(StartTraining(tuple(range(end - size, end)), 0, completes_step=end == 16))
    at_once, in_parts = seen
    assert max(float(gradient.abs().max()) for gradient in at_once) > 1e-3
    for whole, summed in zip(at_once, in_parts, strict=True):
        assert torch.allclose(whole, summed, atol=1e-6)


@pytest.mark.parametrize(
    "override",
    [f"policy.loss.kind={kind}" for kind in ("reinforce", "plain", "sequence", "ppo", "cispo", "gspo", "topr")]
    + [f"policy.task={task}" for task in ("addition", "reverse", "chain")],
)
def test_every_loss_and_task_runs(override):
    summary = simulate(config_with("policy.size=4", override, "optimizer_steps=3"))
    assert summary.optimizer_steps == 3
    assert 0 <= summary.reward.last <= 1


@pytest.mark.slow
def test_rollouts_given_up_are_forgotten():
    """Rollouts dropped for their age, and aborted ones, leave nothing behind but answers generated ahead.

    An answer that was forgotten cannot be had; spans that were are referred to by their event alone.
    """
    config = config_with("scheduler.max_lag=1", "scheduler.on_stale=drop", "hardware.training.step_s=0.05")
    with one_thread():
        learner, recorded = Learner(config), Recorded()
        SimulatedCluster(config, policy=learner).run(recorded)
    finished = {event.rollout_id for event in recorded.of(RolloutFinished)}
    for command in recorded.of(StartTraining, DiscardRollouts):
        finished.difference_update(command.rollout_ids)
    # Aborted by the end of the run.
    unfinished = takewhile(lambda event: isinstance(event, RolloutAborted), reversed(recorded.events))
    assert has_answers(learner, recorded) <= finished | {event.rollout_id for event in unfinished}
    ended = recorded.of(RolloutFinished)
    others = [
        one for one in gc.get_referrers(*(event.spans for event in ended)) if not isinstance(one, RolloutFinished)
    ]
    kept = {id(held) for one in others for held in gc.get_referents(one)}
    assert {event.rollout_id for event in ended if id(event.spans) in kept} <= finished


def has_answers(learner, recorded):
    """Ids of started rollouts that the learner still has an answer of."""
    found = set()
    for rollout_id in {command.rollout_id for command in recorded.of(StartRollout)}:
        with suppress(KeyError):
            learner.answers.answer(rollout_id)
            found.add(rollout_id)
    return found


@pytest.mark.slow
def test_it_learns():
    """Mean reward of the first step, and of the last tenth. Of 14 seeds: 0.763 ± 0.050 and 0.963 ± 0.012.

    The bound is 3.1 standard deviations above the one and 3.6 below the other: another seed, or rounding that differs
    from ours, fails this in 1 case of 900.
    """
    task = ["policy.task=reverse", "policy.size=4", "policy.width=32", "scheduler.train_batch_size=32"]
    start = ["policy.warm_start.steps=75", "policy.warm_start.batch_size=64"]
    summary = simulate(config_with(*task, *start, "policy.learning_rate=2e-3", "optimizer_steps=100"))
    assert summary.reward.first < 0.92 < summary.reward.last


SMALL_TASK = (
    "policy.task=reverse",
    "policy.size=4",
    "policy.width=32",
    "policy.learning_rate=2e-3",
    "policy.warm_start.steps=150",
    "policy.warm_start.batch_size=64",
    "scheduler.train_batch_size=32",
    "cluster.generation_accelerators=3",
    "optimizer_steps=48",
)


@pytest.mark.slow
def test_the_pipeline_learns_as_much_per_sample_as_small_rl_steps_and_sooner_and_large_ones_learn_less():
    """The claims of docs/learning.md on lag, on a task of a second per run; arms are paired seed by seed.

    False alarms, by the spread of 14 seeds: of reward against G = 4, -0.001 ± 0.008 (standard deviation) per seed, 3.7
    standard errors of four; of G = 16, 0.065 ± 0.036, 3.6; of the time, 1.53 ± 0.03, no seed in thousands.
    So rounding that differs from ours fails this in fewer than 1 case in 1000.
    """
    rows = {"pipeline": [], 4: [], 16: []}
    for seed in range(4):
        for arm, steps in rows.items():
            lag = "scheduler.kind=conventional", f"scheduler.optimizer_steps_per_rl_step={arm}"
            steps.append([])
            overrides = SMALL_TASK if arm == "pipeline" else (*SMALL_TASK, *lag)
            simulate(config_with(*overrides, f"seed={seed}"), on_step=steps[-1].append)
    reward = {arm: [sum(row.reward_mean for row in seed) / 48 for seed in seeds] for arm, seeds in rows.items()}
    mean = {arm: sum(seeds) / 4 for arm, seeds in reward.items()}
    assert mean["pipeline"] == pytest.approx(mean[4], abs=0.015)
    assert mean["pipeline"] > mean[16]
    for own, other in zip(rows["pipeline"], rows[4], strict=True):
        assert other[-1].time_s > 1.3 * own[-1].time_s


# ------------------------------------------------------------------------------------------- wrong input


NEEDS_TURNS = "policy.task must be 'calculator' with an [environment], and another without, got "
OF_CALCULATOR = "must hold the right answers of policy.task='calculator' with policy.size=6, "


@pytest.mark.parametrize(
    ("base", "override", "line"),
    [
        (BASE, "policy.size=10",
            "workload.length.max must hold the longest right answer of policy.task='chain' with policy.size=10, "
            "13 tokens, got max=12"),
        (BASE, "hardware.kv_cache_tokens=18",
            "hardware.kv_cache_tokens must hold a prompt of policy.task and workload.length.max, 19 tokens in all, "
            "got kv_cache_tokens=18"),
        (BASE, "policy.heads=3", "run: policy.heads must divide width, got heads=3, width=16"),
        (BASE, "policy.loss.value_coefficient=0.5",
            "run: policy.loss.value_coefficient must be left out: the policy has no other model and no value head"),
        (BASE, "policy.warm_start.learning_rate=1e30",
            "policy.warm_start.learning_rate is too large: the base model is not finite, got learning_rate=1e+30"),
        (BASE, "policy.task=calculator", f"{NEEDS_TURNS}'calculator' without one"),
        (TURNS, "policy.task=chain", f"{NEEDS_TURNS}'chain' with one"),
        (TURNS, "workload.length.max=2", f"workload.length.max {OF_CALCULATOR}3, got 2"),
        (TURNS, "environment.turns.max=5", f"environment.turns.max {OF_CALCULATOR}6, got 5"),
        (TURNS, "environment.turns.context_max=29", f"environment.turns.context_max {OF_CALCULATOR}30, got 29"),
    ],
)  # fmt: skip
def test_a_policy_that_does_not_fit_is_one_line_and_no_run(tmp_path, base, override, line):
    assert message(lambda: simulate(config_with(override, base=base), out=tmp_path / "run")) == line
    assert not (tmp_path / "run").exists()


def test_a_plan_has_no_policy(tmp_path):
    assert message(plan, config_with(), HowToPlan(out=tmp_path / "plan")) == (
        "plan simulates without [policy], with the lengths of [workload]: remove the table, and give workload.length "
        "as a run with it has them, got policy.task='chain'"
    )


def test_a_run_that_diverges_is_an_error_and_its_steps_are_kept_and_learned_again(tmp_path):
    with pytest.raises(RunFailedError, match=r"diverged: .* is (nan|inf) in optimizer step \d; .*") as caught:
        learned(config_with("policy.learning_rate=1e30"), tmp_path)
    assert "\n" not in str(caught.value)
    steps = int(str(caught.value).split("optimizer step ")[1][0]) - 1
    assert 0 < steps == len(rows_of(tmp_path))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["optimizer_steps"], summary["complete"]) == (steps, False)
    assert relearn(Trace(tmp_path / "trace.jsonl.gz")).fingerprint() == summary["weights_sha256"]


def test_without_torch_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [one for one in sys.modules if one.startswith("sim.learning.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=re.escape(install("learn"))):
        simulate(config_with())
