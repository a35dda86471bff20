"""A policy in the loop: who samples what, that nothing but the schedule decides, and that it learns."""

from __future__ import annotations

import csv
import gzip
import json
import sys
from itertools import takewhile

import numpy as np
import pytest

from pipelinerl.config.run import RunConfig
from pipelinerl.config.run_file import parse_run, with_overrides
from pipelinerl.errors import ConfigError, RunFailedError
from pipelinerl.records.trace import Trace, replay
from pipelinerl.scheduler.events import DiscardRollouts, RolloutAborted, RolloutFinished, StartTraining, VersionSpans
from sim.cluster import SimulatedCluster
from sim.engine import ClosedFormEngine
from sim.learning.tasks import BLANK, END, MARK, RESULT, Addition, Chain, Reverse, make_task, problem
from sim.planning.search import plan
from sim.request import Request
from sim.run import simulate
from sim.step_by_step import StepByStepEngine

torch = pytest.importorskip("torch")

from sim.learning.kl_study import kl_study  # noqa: E402
from sim.learning.loop import Learner, one_thread  # noqa: E402
from sim.learning.policy import forward, initial_weights  # noqa: E402
from sim.learning.relearn import relearn  # noqa: E402
from sim.learning.sampling import ROWS, Draft, Sampler, uniforms  # noqa: E402
from sim.learning.warm_start import base_model, policy_shape  # noqa: E402

MAX = 12
BASE = {
    "optimizer_steps": 6,
    "cluster": {"accelerators": 4, "generation_accelerators": 2},
    "scheduler": {"train_batch_size": 16, "generation_batch_size": 12},
    "workload": {"group_size": 4, "length": {"kind": "fixed", "max": MAX}},
    "policy": {
        "task": "chain",
        "size": 6,
        "layers": 2,
        "width": 16,
        "heads": 2,
        "learning_rate": 3e-3,
        "warm_start": {"steps": 40, "batch_size": 32},
    },
    "hardware": {
        "decode": {"kind": "affine", "step_s": 0.1, "sequence_s": 0.003, "context_token_s": 1e-5},
        "prefill": {"token_s": 1e-4},
        "training": {"token_s": 3e-4, "step_s": 0.3},
        "weights": {"publish_s": 0.05, "pause_s": 0.02},
        "latency": {"dispatch_jitter_s": 0.01, "reward_s": 0.03},
    },
}


def config_with(*overrides: str) -> RunConfig:
    return parse_run(with_overrides(BASE, overrides))


def rows_of(folder):
    with (folder / "steps.csv").open() as file:
        return list(csv.DictReader(file))


def learned(config, folder):
    """Run with a trace; return the summary."""
    return simulate(config, out=folder, trace=True)


# ------------------------------------------------------------------------------------------- sampling


@pytest.fixture(scope="module")
def policy():
    """Shape and two versions of weights that differ."""
    config = config_with().policy
    shape = policy_shape(config, positions=make_task(config).prompt_tokens + MAX)
    with one_thread():
        old = base_model(config, positions=shape.positions)
        noise = initial_weights(shape, seed=5)
    return shape, old, {name: one + 0.1 * noise[name] for name, one in old.items()}


def sampler_for(shape, *, temperature=1.0, keep_caches=True):
    prompt_tokens = shape.positions - MAX
    return Sampler(shape, prompt_tokens=prompt_tokens, temperature=temperature, seed=3, keep_caches=keep_caches)


def drafts_of(numbers):
    task = Chain(6)
    return [Draft(number, problem(task, seed=3, prompt_id=number // 4), MAX) for number in numbers]


def content(draft):
    return draft.length, draft.word_L[: draft.length].tolist(), draft.logprob_L[: draft.length].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_of_sampling_are_those_of_training(policy, temperature):
    shape, weights, _ = policy
    drafts = drafts_of(range(20))
    sampler_for(shape, temperature=temperature).complete(weights, drafts)
    for draft in drafts:
        words = [*draft.prompt, *draft.word_L[: draft.length].tolist()]
        with torch.no_grad():
            logit_MTV, _ = forward(weights, shape, torch.tensor([words[:-1]]))
        logprob_TV = (logit_MTV[0, len(draft.prompt) - 1 :] / temperature).log_softmax(-1)
        again = logprob_TV.gather(1, torch.tensor(words[len(draft.prompt) :])[:, None])[:, 0]
        assert np.allclose(again.numpy(), draft.logprob_L[: draft.length], atol=1e-5, rtol=0)


def test_answers_end_with_end_or_at_the_limit(policy):
    shape, weights, _ = policy
    drafts = drafts_of(range(200))
    sampler_for(shape).complete(weights, drafts)
    for draft in drafts:
        words = draft.word_L[: draft.length].tolist()
        assert END not in words[:-1]
        assert words[-1] == END or draft.length == MAX
    assert len({draft.length for draft in drafts}) > 3


def test_an_answer_does_not_depend_on_what_it_is_sampled_beside(policy):
    """To the last bit: alone, in another order, and among more answers than there are rows."""
    shape, weights, _ = policy
    together = drafts_of(range(3 * ROWS))
    sampler_for(shape).complete(weights, together)
    backwards = drafts_of(reversed(range(3 * ROWS)))
    sampler_for(shape).complete(weights, backwards)
    assert [content(one) for one in together] == [content(one) for one in reversed(backwards)]
    for number in (0, 17, 3 * ROWS - 1):
        (alone,) = drafts_of([number])
        sampler_for(shape).complete(weights, [alone])
        assert content(alone) == content(together[number])


def cut(draft, num_kept, *, recompute=False):
    draft.num_kept = num_kept
    if recompute:
        draft.cache = None
    return draft


def test_going_on_with_the_same_weights_changes_nothing(policy):
    shape, weights, _ = policy
    whole, parts = drafts_of(range(30)), drafts_of(range(30))
    sampler_for(shape).complete(weights, whole)
    sampler_for(shape).complete(weights, parts)
    sampler_for(shape).complete(weights, [cut(one, 1 + one.length // 2) for one in parts if one.length > 3])
    assert [content(one) for one in parts] == [content(one) for one in whole]


def test_an_update_changes_no_token_before_it_and_its_kind_matters_after_it_only(policy):
    shape, old, new = policy
    before, kept, recomputed, fresh = (drafts_of(range(40)) for _ in range(4))
    for drafts in (before, kept, recomputed):
        sampler_for(shape).complete(old, drafts)
    places = [number for number, one in enumerate(before) if one.length > 4]
    sampler_for(shape).complete(new, [cut(kept[place], 3) for place in places])
    sampler_for(shape).complete(new, [cut(recomputed[place], 3, recompute=True) for place in places])
    sampler_for(shape).complete(new, fresh)
    changed = 0
    for place in places:
        first = content(before[place])
        for drafts in (kept, recomputed):
            assert content(drafts[place])[1][:3] == first[1][:3]
            assert content(drafts[place])[2][:3] == first[2][:3]
        # The token after the update: by the new weights, on the keys and values of the old or of the new ones.
        words = [*kept[place].prompt, *first[1][:3]]
        with torch.no_grad():
            logit_MTV, _ = forward(new, shape, torch.tensor([words]))
        logprob_V = logit_MTV[0, -1].log_softmax(-1)
        assert content(recomputed[place])[2][3] == pytest.approx(
            float(logprob_V[content(recomputed[place])[1][3]]), abs=1e-5
        )
        changed += abs(content(kept[place])[2][3] - float(logprob_V[content(kept[place])[1][3]])) > 1e-4
    assert changed > len(places) / 2


def test_the_random_number_of_a_token_is_a_function_of_seed_rollout_and_position():
    """Mean of 2 * 10^5 numbers within 4.9 sigma of a half: fails for 1 seed in 10^6 if the code is right."""
    rollout_R = np.arange(5000, dtype=np.uint64)
    drawn = uniforms(7, rollout_R, 40)
    assert drawn.dtype == np.float32
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert abs(float(drawn.mean(dtype=np.float64)) - 0.5) < 4.9 / np.sqrt(12 * drawn.size)
    assert abs(np.corrcoef(drawn[:, 0], drawn[:, 1])[0, 1]) < 4.9 / np.sqrt(5000)
    assert np.array_equal(uniforms(7, rollout_R[[4, 2]], 9), drawn[[4, 2], :9])
    assert not np.array_equal(uniforms(8, rollout_R, 40), drawn)
    assert np.array_equal(uniforms(2**70 + 8, rollout_R, 2), uniforms(8, rollout_R, 2))


# ---------------------------------------------------------------------------------------------- whole runs


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(tmp_path):
    for name in ("one", "two"):
        learned(config_with(), tmp_path / name)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == ["metrics.jsonl", "profile.json", "run.toml", "steps.csv", "summary.json", "trace.jsonl.gz"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    assert simulate(config_with("seed=1")).weights_sha256 != simulate(config_with()).weights_sha256


@pytest.mark.slow
@pytest.mark.parametrize("update", ["keep", "recompute", "abort", "wait"])
@pytest.mark.parametrize("capacity", [None, 80])
def test_engines_in_closed_form_and_step_by_step_learn_the_same(update, capacity):
    """Also where the KV cache is so small that rollouts are preempted and start over."""
    limit = [] if capacity is None else [f"hardware.kv_cache_tokens={capacity}"]
    config = config_with(f"scheduler.weight_update={update}", *limit, "optimizer_steps=4")
    seen = []
    for make in (ClosedFormEngine, StepByStepEngine):
        log = []
        recorder = type("Log", (), {"event": lambda _, *a: log.append(a), "command": lambda _, *a: log.append(a)})()  # noqa: B023
        with one_thread():
            learner = Learner(config)
            SimulatedCluster(config, engine_factory=make, policy=learner).run(recorder)
        seen.append((log, learner.fingerprint()))
    assert seen[0] == seen[1]
    versions = [len(event.spans.versions) for _, event in seen[0][0] if isinstance(event, RolloutFinished)]
    assert (max(versions) > 1) == (update != "wait")


@pytest.mark.parametrize("update", ["keep", "recompute", "abort"])
def test_the_trace_alone_gives_the_learned_weights_to_the_last_bit(tmp_path, update):
    summary = learned(config_with(f"scheduler.weight_update={update}"), tmp_path)
    trace = Trace(tmp_path / "trace.jsonl.gz")
    assert replay(trace).difference is None
    again = relearn(trace)
    assert again.fingerprint() == summary.weights_sha256
    assert again.answers.versions == set(range(6))


def test_a_run_that_diverged_is_learned_again_up_to_there(tmp_path):
    with pytest.raises(RunFailedError, match="diverged"):
        learned(config_with("policy.learning_rate=1e30"), tmp_path)
    recorded = json.loads((tmp_path / "summary.json").read_text())["weights_sha256"]
    assert relearn(Trace(tmp_path / "trace.jsonl.gz")).fingerprint() == recorded


SMALL_CACHE = ("hardware.kv_cache_tokens=60", "policy.learning_rate=1e-2", "optimizer_steps=10")


@pytest.mark.slow
@pytest.mark.parametrize("update", ["keep", "recompute", "abort"])
@pytest.mark.parametrize("seed", [1, 2])
def test_preempted_rollouts_are_learned_again_to_the_last_bit(tmp_path, update, seed):
    """The trace says where each lost its keys and values; under ``keep`` those of older versions are then gone."""
    summary = learned(config_with(f"seed={seed}", f"scheduler.weight_update={update}", *SMALL_CACHE), tmp_path)
    assert summary.rollouts.preemptions > 10
    trace = Trace(tmp_path / "trace.jsonl.gz")
    assert replay(trace).difference is None
    assert relearn(trace).fingerprint() == summary.weights_sha256


def test_a_trace_that_does_not_say_what_was_preempted_is_one_line(tmp_path):
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


def test_without_lag_pipeline_and_conventional_learn_the_same(tmp_path):
    pipeline = learned(config_with("scheduler.max_lag=0"), tmp_path / "pipeline")
    conventional = learned(config_with("scheduler.kind=conventional"), tmp_path / "conventional")
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


def test_the_books_and_the_metrics_tell_of_the_same_rewards_and_lengths(tmp_path):
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


def test_each_step_trains_exactly_the_batch_the_scheduler_chose(tmp_path, monkeypatch):
    seen = []
    train = Learner.train
    monkeypatch.setattr(Learner, "train", lambda self, command: (seen.append(command), train(self, command)))
    learned(config_with("scheduler.micro_batch_size=8"), tmp_path)
    commands = [one.command for one in Trace(tmp_path / "trace.jsonl.gz").records()]
    assert seen == [one for one in commands if isinstance(one, StartTraining)]
    assert len(seen) == 12


def test_micro_batches_add_up_to_the_same_step():
    """The whole batch of the first optimizer step at once, and in parts."""
    changed = "scheduler.kind=conventional"
    with one_thread():
        gradients = []
        for size in (16, 4):
            learner = Learner(config_with(changed))
            spans = {number: VersionSpans((0,), (1,)) for number in range(16)}
            for number in range(16):
                learner.answers.ask(number, number // 4)
                sequence = Request(number, learner.prompt_tokens, MAX)
                learner.answers.begin(sequence, 0)
                spans[number] = VersionSpans((0,), (sequence.length,))
                learner.finished(number, spans[number])
            for start in range(0, 16, size):
                numbers = tuple(range(start, start + size))
                learner.train(StartTraining(numbers, 0, completes_step=False))
            gradients.append({name: one.grad.clone() for name, one in learner._weights.items()})
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], atol=1e-6)


@pytest.mark.parametrize("kind", ["reinforce", "plain", "sequence", "ppo", "cispo", "gspo", "topr"])
def test_every_loss_runs(kind):
    summary = simulate(config_with(f"policy.loss.kind={kind}", "optimizer_steps=3"))
    assert summary.optimizer_steps == 3


@pytest.mark.parametrize("task", ["addition", "reverse", "chain"])
def test_every_task_runs(task):
    summary = simulate(config_with(f"policy.task={task}", "policy.size=4", "optimizer_steps=2"))
    assert 0 <= summary.reward.last <= 1


def test_what_is_given_up_is_forgotten():
    """Rollouts dropped for their age, and aborted ones, leave nothing behind but what was generated ahead."""
    config = config_with("scheduler.max_lag=1", "scheduler.on_stale=drop", "hardware.training.step_s=0.05")
    with one_thread():
        learner = Learner(config)
        events, commands = [], []
        keep = {"event": lambda _, __, event: events.append(event), "command": lambda _, __, one: commands.append(one)}
        SimulatedCluster(config, policy=learner).run(type("Log", (), keep)())
    finished = {event.rollout_id for event in events if isinstance(event, RolloutFinished)}
    for command in commands:
        if isinstance(command, StartTraining | DiscardRollouts):
            finished.difference_update(command.rollout_ids)
    unfinished = takewhile(lambda event: isinstance(event, RolloutAborted), reversed(events))  # by the end of the run
    assert set(learner.answers._drafts) <= finished | {event.rollout_id for event in unfinished}
    assert set(learner._spans) == set(learner._rewards) <= finished


@pytest.mark.slow
def test_it_learns():
    task = ["policy.task=reverse", "policy.size=4", "policy.width=32", "scheduler.train_batch_size=32"]
    start = ["policy.warm_start.steps=150", "policy.warm_start.batch_size=64"]
    summary = simulate(config_with(*task, *start, "policy.learning_rate=2e-3", "optimizer_steps=100"))
    assert summary.reward.first < 0.9
    assert summary.reward.last > 0.95


# ----------------------------------------------------------------------------------------- the KL study


@pytest.mark.slow
def test_the_kl_study_finds_no_divergence_without_change_and_the_right_order_with_it(policy):
    """Same weights: none of the three diverges. Weights that move: conventional data diverges most."""
    shape, old, new = policy
    prompts = [problem(Chain(6), seed=3, prompt_id=number) for number in range(150)]
    sampler = sampler_for(shape)
    for point in kl_study([old] * 4, shape=shape, sampler=sampler, prompts=prompts, length=6):
        for value in (point.stale_kl, point.recomputed_kl, point.conventional_kl):
            assert value == pytest.approx(0, abs=1e-9)
        assert point.stale_ess == pytest.approx(1, abs=1e-6)
    moving = [{name: old[name] + step / 3 * (new[name] - old[name]) for name in old} for step in range(4)]
    points = kl_study(moving, shape=shape, sampler=sampler, prompts=prompts, length=6)
    assert [point.lag for point in points] == [0, 1, 2]
    assert points[0].conventional_kl == pytest.approx(0, abs=1e-9)
    assert points[2].conventional_kl > points[1].conventional_kl > 1e-4
    assert points[2].recomputed_kl < points[2].conventional_kl
    assert points[2].stale_kl < points[2].conventional_kl


def test_a_kl_study_needs_a_token_per_update(policy):
    shape, old, _ = policy
    with pytest.raises(ValueError, match="length must be at least 3 for 4 checkpoints, got 2"):
        kl_study([old] * 4, shape=shape, sampler=sampler_for(shape), prompts=[(1,) * 7], length=2)


# ------------------------------------------------------------------------------------------------- tasks


def test_addition_by_hand():
    task = Addition(2)
    assert task.is_right((7, 4, 5, 8, MARK), [2, 3, 1, END])  # 47 + 85 = 132
    assert not task.is_right((7, 4, 5, 8, MARK), [2, 3, 1])
    assert not task.is_right((7, 4, 5, 8, MARK), [2, 4, 1, END])


def test_reverse_by_hand():
    assert Reverse(4).is_right((BLANK, 3, 1, 2, MARK), [2, 1, 3, END])
    assert not Reverse(4).is_right((BLANK, 3, 1, 2, MARK), [3, 1, 2, END])


def test_chain_by_hand():
    task, prompt = Chain(4), (3, 5, 2, BLANK, MARK)  # 10 modulo 6
    assert task.is_right(prompt, [RESULT, 4, END])
    assert task.is_right(prompt, [3, 2, 4, RESULT, 4, END])
    assert not task.is_right(prompt, [3, 2, 4, RESULT, 5, END])
    assert not task.is_right(prompt, [3, 2, 4, RESULT, 4])


@pytest.mark.parametrize("make", [Addition, Reverse, Chain])
@pytest.mark.parametrize("size", [1, 5])
def test_prompts_have_one_length_and_demonstrations_are_mostly_right(make, size):
    """Without mistakes an answer is right; the chance of none in 300 demonstrations being right is nil."""
    task, stream = make(size), np.random.default_rng(0)
    right = []
    for _ in range(300):
        prompt = task.draw(stream)
        assert len(prompt) == task.prompt_tokens
        answer = task.demonstrate(prompt, stream)
        assert len(answer) <= task.longest_answer
        right.append(task.is_right(prompt, answer))
    assert 0.6 < np.mean(right) < 1


# ------------------------------------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ("policy.size=10",),
            "workload.length.max must hold the longest right answer of policy.task='chain' with policy.size=10, "
            "13 tokens, got max=12",
        ),
        (
            ("hardware.kv_cache_tokens=18",),
            "hardware.kv_cache_tokens must hold a prompt of policy.task and workload.length.max, 19 tokens in all, "
            "got kv_cache_tokens=18",
        ),
    ],
)
def test_a_policy_and_a_run_that_do_not_fit_are_one_line(tmp_path, overrides, line):
    with pytest.raises(ConfigError) as caught:
        simulate(config_with(*overrides), out=tmp_path / "run")
    assert str(caught.value) == line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("policy.heads=3", "run: policy.heads must divide width, got heads=3, width=16"),
        (
            "policy.loss.value_coefficient=0.5",
            "run: policy.loss.value_coefficient must be 0: the policy has no reference model and no value head",
        ),
    ],
)
def test_a_policy_that_cannot_be_is_one_line(override, line):
    with pytest.raises(ConfigError) as caught:
        config_with(override)
    assert str(caught.value) == line


def test_a_base_model_that_is_not_finite_is_one_line(tmp_path):
    with pytest.raises(ConfigError) as caught:
        simulate(config_with("policy.warm_start.learning_rate=1e30"), out=tmp_path / "run")
    assert str(caught.value) == (
        "policy.warm_start.learning_rate is too large: the base model is not finite, got learning_rate=1e+30"
    )
    assert not (tmp_path / "run").exists()


def test_a_plan_has_no_policy(tmp_path):
    with pytest.raises(ConfigError) as caught:
        plan(config_with(), out=tmp_path / "plan")
    assert str(caught.value) == (
        "plan simulates without [policy], with the lengths of [workload]: remove the table, and give workload.length "
        "as a run with it has them, got policy.task='chain'"
    )


def test_a_run_that_diverges_says_so_and_keeps_what_it_has(tmp_path):
    with pytest.raises(RunFailedError, match=r"diverged: .* is (nan|inf) in optimizer step \d; .*") as caught:
        learned(config_with("policy.learning_rate=1e30"), tmp_path)
    assert "\n" not in str(caught.value)
    steps = int(str(caught.value).split("optimizer step ")[1][0]) - 1
    assert 0 < steps == len(rows_of(tmp_path))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["optimizer_steps"], summary["complete"]) == (steps, False)


def test_without_torch_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [one for one in sys.modules if one.startswith("sim.learning.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"pip install 'pipelinerl\[learn\]'"):
        simulate(config_with())
