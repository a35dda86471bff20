"""An edited trace is refused in one line, unless the edit is without effect on every command and every number."""

import json
import os
import random
import shutil
from functools import cache
from pathlib import Path

import pytest
from in_memory import config_of, interrupted, parts_of, turns_of
from in_memory import run as run_real
from traces import CASES, lines_of, recorded, rewritten

from backends.driver.checkpoint import read_newest
from pipelinerl.errors import TraceError
from pipelinerl.records.recording import replay_run
from pipelinerl.records.run_folder import SUMMARY_FILE, TRACE_FILE
from pipelinerl.records.trace import Trace

TURNS = (
    "environment={count=6, step_s=0.2, failure_rate=0.1, retries=1,"
    " turns={kind='lognormal', mean=2.0, max=4, observation_tokens=5, observation_max=20, context_max=300}}",
)
SIMULATED = {
    "simulated, preempted": ("scheduler.weight_update=recompute", "hardware.kv_cache_tokens=100"),
    "simulated, aborted": ("scheduler.max_lag=1", "scheduler.on_stale=requeue", "scheduler.weight_update=abort"),
    "simulated, turns": TURNS,
}
REAL = {
    "real": config_of(steps=5, longest=30, slots=10, weight_update="abort"),
    "real, turns": turns_of(steps=4),
}


@cache
def _folder(name: str, under: Path) -> Path:
    out = under / name.replace(", ", "_")
    if name in SIMULATED:
        recorded(out, *SIMULATED[name])
    else:
        run_real(REAL[name], out, parts_of(REAL[name], step_s=0.0005))
    return out


@pytest.fixture(scope="module", params=[*SIMULATED, *REAL])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _folder(request.param, tmp_path_factory.getbasetemp())


def refusal(out: Path, lines: list[str]) -> str | None:
    """Return what is said of other lines in the place of a folder's trace."""
    edited = out.with_name(out.name + "_edited")
    edited.mkdir(exist_ok=True)
    for path in out.glob("*.*"):
        if path.name != TRACE_FILE:
            shutil.copy(path, edited)
    try:
        said = replay_run(Trace(rewritten(edited / TRACE_FILE, lines))).difference
    except TraceError as error:
        said = str(error)
    assert said is None or (said.count("\n") == 0 and len(said) < 900)
    return said


def of(out: Path, *kinds: str) -> list[tuple[int, dict]]:
    found = [(number, json.loads(line)) for number, line in enumerate(lines_of(out / TRACE_FILE))]
    return [(number, one) for number, one in found if one.get("event") in kinds]


def with_line(out: Path, number: int, one: dict) -> list[str]:
    lines = lines_of(out / TRACE_FILE)
    return [*lines[:number], json.dumps(one), *lines[number + 1 :]]


def trained(out: Path) -> set[int]:
    return {
        i for line in lines_of(out / TRACE_FILE) if '"StartTraining"' in line for i in json.loads(line)["rollout_ids"]
    }


def test_an_unedited_folder_is_accepted_and_both_files_are_compared(folder: Path) -> None:
    result = replay_run(Trace(folder / TRACE_FILE))
    assert (result.difference, result.compared) == (None, ("summary.json", "steps.csv"))


def test_every_event_is_needed_and_none_can_come_twice(folder: Path) -> None:
    """Six of each kind. Without effect: a score of a rollout never trained on, or the last loads, that never come."""
    ids, last = trained(folder), max(one["version"] for _, one in of(folder, "WeightsLoaded"))
    lines, draw = lines_of(folder / TRACE_FILE), random.Random(0)
    kinds = {one["event"] for line in lines if "event" in (one := json.loads(line))}
    for kind in sorted(kinds):
        some = of(folder, kind)
        for number, one in draw.sample(some, min(6, len(some))):
            idle = (kind == "RolloutScored" and one["rollout_id"] not in ids) or one.get("version") == last
            assert idle or refusal(folder, lines[:number] + lines[number + 1 :]) is not None, one
            assert refusal(folder, [*lines[: number + 1], *lines[number:]]) is not None, one


def test_rewards_versions_and_tokens_of_trained_rollouts_cannot_change(folder: Path) -> None:
    ids, draw = trained(folder), random.Random(1)
    for kind in ("RolloutFinished", "RolloutScored"):
        some = [(number, one) for number, one in of(folder, kind) if one["rollout_id"] in ids]
        for number, one in draw.sample(some, min(6, len(some))):
            if one.get("reward") is not None:
                assert refusal(folder, with_line(folder, number, one | {"reward": one["reward"] + 0.25})) is not None
            for place, (version, start, end) in enumerate(one.get("spans", ())):
                others = [[version + 1, start, end], [version - 1, start, end], [version, start, end + 1]]
                for other in others:
                    spans = [*one["spans"][:place], other, *one["spans"][place + 1 :]]
                    assert refusal(folder, with_line(folder, number, one | {"spans": spans})) is not None, (one, spans)
            if len(one.get("spans", ())) > 1:  # a token less at the first version, one more at the second
                (a, b, c), (d, e, f), *rest = one["spans"]
                spans = [[a, b, c - 1], [d, e - 1, f], *rest]
                assert refusal(folder, with_line(folder, number, one | {"spans": spans})) is not None, (one, spans)


def test_tokens_of_any_rollout_cannot_change(folder: Path) -> None:
    draw = random.Random(2)
    for kind in ("RolloutFinished", "TurnFinished", "RolloutAborted"):
        some = [(number, one) for number, one in of(folder, kind) if one["spans"]]
        for number, one in draw.sample(some, min(6, len(some))):
            for change in (-1, 1):
                version, start, end = one["spans"][-1]
                spans = [*one["spans"][:-1], [version, start, end + change]]
                assert refusal(folder, with_line(folder, number, one | {"spans": spans})) is not None, (one, spans)
            spans = [[10**6, *one["spans"][0][1:]], *one["spans"][1:]]  # never published
            assert refusal(folder, with_line(folder, number, one | {"spans": spans})) is not None, one


def test_time_cannot_go_backwards(folder: Path) -> None:
    lines, draw = lines_of(folder / TRACE_FILE), random.Random(3)
    for number in draw.sample(range(2, len(lines)), 6):
        one = json.loads(lines[number])
        if one["t"] > 0:
            said = refusal(folder, with_line(folder, number, one | {"t": json.loads(lines[number - 1])["t"] - 1e-6}))
            assert said is not None
            assert "t must be at least" in said


def test_seconds_of_trainer_and_engines_cannot_change(folder: Path) -> None:
    for kind, key in (("TrainingFinished", "train_s"), ("WeightsPublished", "publish_s")):
        for number, one in of(folder, kind)[:5]:
            assert refusal(folder, with_line(folder, number, one | {key: one[key] + 0.01})) is not None, one


def test_read_tokens_never_fall_and_stay_within_the_context(folder: Path) -> None:
    """Between its neighbours a number decides where caches have room, or nothing."""
    before: dict[int, int] = {}
    for number, one in of(folder, "ObservationReady")[:12]:
        least = before.get(one["rollout_id"], 0)
        for read in (least - 1, 10**6):
            assert refusal(folder, with_line(folder, number, one | {"read_tokens": read})) is not None, one
        before[one["rollout_id"]] = one["read_tokens"]


def test_tokens_of_a_preemption_lie_between_those_before_and_after(folder: Path) -> None:
    for number, one in of(folder, "RolloutPreempted")[:5]:
        for tokens in (-1, 10**6):
            assert refusal(folder, with_line(folder, number, one | {"num_tokens": tokens})) is not None, one


def test_edited_numbers_beside_the_trace_are_named(folder: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(folder, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints")))
    summary = json.loads((out / SUMMARY_FILE).read_text())
    (out / SUMMARY_FILE).write_text(json.dumps(summary | {"tokens_trained": summary["tokens_trained"] + 1}))
    said = replay_run(Trace(out / TRACE_FILE)).difference
    assert (
        said
        == f"summary.json: tokens_trained is {summary['tokens_trained'] + 1}, by the trace {summary['tokens_trained']}"
    )
    rows = (out / "steps.csv").read_text().splitlines(keepends=True)
    (out / "steps.csv").write_text("".join(rows[:-1]))
    assert "steps.csv has" in (replay_run(Trace(out / TRACE_FILE)).difference or "")


def test_the_tokens_that_a_rollout_keeps_cannot_change(folder: Path) -> None:
    """Also where the versions stay and the number of all tokens is the same."""
    spans_of: dict[int, list] = {}
    for number, one in of(folder, "RolloutAborted", "TurnFinished", "RolloutFinished"):
        kept = spans_of.get(one["rollout_id"])
        if (
            kept
            and len(one["spans"]) > len(kept)
            and one["spans"][: len(kept)] == kept
            and kept[-1][2] - kept[-1][1] > 1
        ):
            spans = [list(span) for span in one["spans"]]
            spans[len(kept) - 1][2] -= 1
            spans[len(kept)][1] -= 1
            assert "must keep" in (refusal(folder, with_line(folder, number, one | {"spans": spans})) or ""), one
        spans_of[one["rollout_id"]] = one["spans"]


def test_a_run_that_was_killed_right_after_a_checkpoint_raises_no_false_alarm(tmp_path: Path) -> None:
    """Its trace ends with rollouts in progress, its steps.csv may go on; there is no summary."""
    config, out = config_of(steps=6, train={"checkpoint": {"every": 2, "keep": 3}}), tmp_path / "run"
    run_real(config, out, parts_of(config))
    for folder in ("step_000006", "step_000004"):
        shutil.rmtree(out / "checkpoints" / folder)
    (out / SUMMARY_FILE).unlink()
    size, _ = read_newest(out, config).recording.files[TRACE_FILE]
    os.truncate(out / TRACE_FILE, size)
    result = replay_run(Trace(out / TRACE_FILE))
    assert (result.difference, result.compared) == (None, ("steps.csv",))


@pytest.mark.parametrize("overrides", [*CASES, TURNS], ids=" ".join)
def test_no_simulated_schedule_raises_a_false_alarm(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    result = replay_run(Trace(recorded(tmp_path, *overrides)))
    assert (result.difference, len(result.compared)) == (None, 2)


REAL_KINDS = [
    {"kind": kind, "weight_update": weight_update, "optimizer_steps_per_rl_step": 2}
    for kind in ("pipeline", "conventional", "one_step_off", "partial_rollouts")
    for weight_update in ("abort", "wait")
]


@pytest.mark.slow
@pytest.mark.parametrize("setting", REAL_KINDS, ids=str)
def test_no_real_schedule_raises_a_false_alarm_interrupted_and_resumed(tmp_path: Path, setting: dict) -> None:
    config, out = config_of(steps=8, longest=30, slots=12, **setting), tmp_path / "run"
    interrupted(config, out, at=3)
    for _ in range(2):
        result = replay_run(Trace(out / TRACE_FILE))
        assert (result.difference, len(result.compared)) == (None, 2)
        run_real(config, out, parts_of(config), resume=True)
