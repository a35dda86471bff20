"""Rows of published runs: typed columns, what follows from them, and what is wrong with a file."""

from itertools import combinations

import pytest
from pydantic import ValidationError

from pipelinerl.errors import ConfigError
from sim.validation.predict import shipped_runs
from sim.validation.records import PublishedRun, Schedule
from sim.validation.runs_file import read_published_runs

HEADER = "id,system,hw,model,schedule,gpus_total,step_s,note\n"


def run(**values):
    return PublishedRun(**{"id": "a", "system": "s"} | values)


def test_seconds_come_from_the_columns():
    sync = run(schedule=Schedule.SYNC, generate_s=10.0, update_s=5.0, old_logp_s=2.0, ref_s=1.0, step_s=20.0)
    assert (sync.train_s, sync.measured_step_s, sync.training_is_input) == (8.0, 20.0, False)
    waits = run(schedule=Schedule.ASYNC, wait_s=10.0, total_h=2.0, steps=100)
    assert (waits.generate_s, waits.train_s, waits.measured_step_s) == (None, None, 72.0)
    assert run(schedule=Schedule.ASYNC, update_s=5.0).training_is_input


@pytest.mark.parametrize(
    ("values", "sequences"),
    [
        ({"answers_per_step": 512}, 512),
        ({"answers_per_step": 512, "prompts_per_step": 64}, 512),
        ({"prompts_per_step": 64}, 512),  # 8 answers each, as usual
        ({"prompts_per_step": 64, "n_per_prompt": 32}, 2048),
        ({"n_per_prompt": 32}, None),
    ],
)
def test_sequences_are_prompts_times_answers_or_stated(values, sequences):
    assert run(**values).sequences_per_step == sequences


@pytest.mark.parametrize(("each", "steps"), [(32, 16), (None, 1), (500, 1)])
def test_optimizer_steps_are_prompts_over_those_of_one(each, steps):
    assert run(prompts_per_step=512, prompts_per_optimizer_step=each).optimizer_steps_per_rl_step == steps


def test_gpus_and_tokens_are_those_of_the_whole_cluster():
    parts = run(gpus_gen=24, gpus_train=8, tok_s_per_gpu=10.0)
    assert (parts.gpus, parts.apart, parts.tokens_per_s) == (32, True, 320.0)
    assert not run(gpus_total=8, gpus_gen=8, gpus_train=8).apart


def job(row):
    """All that is published of a row but its version and its results; the stack of the trainer is in the mode."""
    cluster = (row.gpus, row.gpus_gen, row.gpus_per_engine, row.prompts_per_step, row.n_per_prompt, row.max_len)
    return (*row.family, row.mode, row.precision, row.schedule, row.max_staleness, *cluster)


def test_no_shipped_rows_are_one_job_in_two_versions_of_its_software_so_none_tells_what_a_version_is_worth():
    """``source`` names the version. Two jobs were run again, by others; the third pair is UniRL and verl."""
    rows = [row for row in shipped_runs() if row.avg_len is not None and row.measured_step_s is not None]
    same = [(one, other) for one, other in combinations(rows, 2) if job(one) == job(other)]
    assert [pair for pair in same if pair[0].source != pair[1].source] == []
    again = [(one.step_s, other.step_s) for one, other in same]
    assert again == [(147.0, 178.0), (230.0, 266.0), (64.0, 62.2)]


@pytest.mark.parametrize("schedule", list(Schedule))
def test_colocated_runs_have_no_gpus_of_their_own_for_either_part(schedule):
    values = {"schedule": schedule, "gpus_gen": 4, "gpus_train": 4}
    if schedule.colocated:
        with pytest.raises(ValidationError, match=f"schedule must be sync_apart, .* got '{schedule.value}'"):
            run(**values)
    else:
        assert run(**values).apart


def test_the_shipped_rows_are_read():
    runs = {one.id: one for one in shipped_runs()}
    assert len(runs) == 62
    assert runs["applied_1"].rate_ratio == 0.63
    assert runs["areal_eta8"].tok_s_total == 371700
    assert runs["olmo3_baseline"].avg_len is None  # the note has words about it
    assert runs["verl1off_fsdp_async"].generate_s == 458
    assert {one.schedule for one in runs.values()} == {None, *Schedule}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id,mode,staleness_setting\na,async,eta=8\n", "line 1: column system is missing; needed: id, system"),
        ("id,system,gen_or_wait_s\na,s,1\n", "line 1: 'gen_or_wait_s' is an unknown column; "),
        (HEADER + "a,s,H100,m,fully async,8,1,\n", "line 2: schedule must be one of sync, sync_apart, "),
        (HEADER + "a,s,H100,m,async,0,1,\n", "line 2: gpus_total must be a whole number of at least 1, got '0'"),
        (HEADER + 'a,s,H100,m,async,8,"1,024",\n', "line 2: step_s must be a number above 0, got '1,024'"),
        (HEADER + "a,s,,,,,,\n" * 2, ": id must be different in every row, got 'a' 2 times"),
    ],
)
def test_a_fault_is_named_by_its_place(tmp_path, text, message):
    path = tmp_path / "runs.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_published_runs(path)
    assert message in str(caught.value)


def test_empty_cells_are_not_published(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(HEADER + "a,s,H20,m,,,,\n")
    assert read_published_runs(path) == [run(hw="H20", model="m")]
