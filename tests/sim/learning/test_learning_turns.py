"""A policy that learns in turns: who sampled what, what is trained on, and that the trace says all."""

import json

import numpy as np
import pytest
from learning_run import TURNS, config_with
from refusals import message

from pipelinerl.records.trace import Trace, replay
from pipelinerl.scheduler.events import ObservationReady, RolloutFinished, TurnFinished
from sim.learning.tasks import END, Calculator, problem
from sim.run import simulate

torch = pytest.importorskip("torch")

from sim.learning.loop import Learner  # noqa: E402
from sim.learning.relearn import relearn  # noqa: E402


def in_turns(*overrides):
    return config_with(*overrides, base=TURNS)


@pytest.mark.slow
@pytest.mark.parametrize("update", ["keep", "abort"])
def test_the_trace_alone_gives_the_learned_weights_to_the_last_bit_in_turns(tmp_path, update):
    config = in_turns(f"scheduler.weight_update={update}", "policy.learning_rate=1e-2", "optimizer_steps=12")
    summary = simulate(config, out=tmp_path, trace=True)
    trace = Trace(tmp_path / "trace.jsonl.gz")
    assert replay(trace).difference is None
    again = relearn(trace)
    assert again.fingerprint() == summary.weights_sha256
    turns = [event for event in (one.event for one in trace.records()) if isinstance(event, TurnFinished)]
    assert len({turn.rollout_id for turn in turns}) > 20


@pytest.mark.slow
def test_what_is_observed_is_the_sum_of_what_was_written_and_is_not_trained_on(monkeypatch):
    """Every answer that is trained on, word by word: turns end with END, then comes the calculator's word."""
    seen, trained = [], []
    loss = Learner._loss  # the only place that has all answers of a batch

    def noted(self, rollout_ids, version):
        seen.extend((number, self.answers.answer(number)) for number in rollout_ids)
        value = loss(self, rollout_ids, version)
        trained.append(sum(self._spans[number].num_tokens for number in rollout_ids))
        return value

    monkeypatch.setattr(Learner, "_loss", noted)
    report = simulate(in_turns())
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


def test_log_probabilities_of_generated_tokens_are_those_of_training_at_lag_0(tmp_path):
    """No lag, no update in between: an ESS of 1, over tokens and over whole answers, whatever was observed."""
    report = simulate(in_turns("scheduler.kind=conventional"), out=tmp_path, trace=True)
    assert report.ess.min == pytest.approx(1, abs=1e-6)
    assert report.ess.sequence_mean == pytest.approx(1, abs=1e-6)
    tokens = [len(one.event.spans.versions) for one in Trace(tmp_path / "trace.jsonl.gz").records()
              if isinstance(one.event, RolloutFinished)]  # fmt: skip
    assert set(tokens) == {1}


@pytest.mark.slow
def test_without_lag_pipeline_and_conventional_learn_the_same_in_turns():
    assert (
        simulate(in_turns("scheduler.max_lag=0")).weights_sha256
        == simulate(in_turns("scheduler.kind=conventional")).weights_sha256
    )


def test_an_environment_that_fails_costs_its_group_and_the_trace_is_learned_again(tmp_path):
    config = in_turns("environment.failure_rate=0.05", "environment.retries=0", "optimizer_steps=8")
    summary = simulate(config, out=tmp_path, trace=True)
    assert summary.environments.errors > 3
    assert relearn(Trace(tmp_path / "trace.jsonl.gz")).fingerprint() == summary.weights_sha256


def test_the_same_seed_gives_the_same_bytes_in_turns(tmp_path):
    for name in ("one", "two"):
        simulate(in_turns(), out=tmp_path / name, trace=True)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name
    assert json.loads((tmp_path / "one" / "summary.json").read_text())["weights_sha256"]
    first = next(one.event for one in Trace(tmp_path / "one" / "trace.jsonl.gz").records() if one.event)
    assert isinstance(first, ObservationReady)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (("policy.task=chain",),
            "policy.task must be 'calculator' with an [environment], and another without, got 'chain' with one"),
        (("workload.length.max=2",),
            "workload.length.max must hold the right answers of policy.task='calculator' with policy.size=6, 3, got 2"),
        (("environment.turns.max=5",),
            "environment.turns.max must hold the right answers of policy.task='calculator' with policy.size=6, 6, "
            "got 5"),
        (("environment.turns.context_max=29",),
            "environment.turns.context_max must hold the right answers of policy.task='calculator' with "
            "policy.size=6, 30, got 29"),
    ],
)  # fmt: skip
def test_a_policy_that_cannot_do_its_task_in_turns_is_one_line(overrides, line):
    assert message(simulate, in_turns(*overrides)) == line


def test_a_calculator_needs_an_environment():
    assert message(simulate, config_with("policy.task=calculator")) == (
        "policy.task must be 'calculator' with an [environment], and another without, got 'calculator' without one"
    )
