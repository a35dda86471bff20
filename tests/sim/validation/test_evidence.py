"""Rows as they are collected: the meaning of their words, and what is wrong with a file of them."""

import csv

import pytest

from pipelinerl.errors import ConfigError
from sim.validation.evidence import AMOUNTS, COUNTS, TEXTS, number_after, translated
from sim.validation.predict import shipped_runs
from sim.validation.records import Schedule
from sim.validation.runs_file import read_published_runs

HEADER = "id,source,evidence,hw,model,mode,gpus_total,step_s,staleness_setting,note\n"


def run(**cells):
    return translated({"id": "a", "source": "s"} | cells, where="here")


def read(tmp_path, text, **options):
    path = tmp_path / "runs.csv"
    path.write_text(text, **options)
    return read_published_runs(path)


@pytest.mark.parametrize(
    ("mode", "schedule", "where_apart"),
    [
        ("colocate sync", Schedule.SYNC, Schedule.SYNC),
        ("hybrid engine", Schedule.SYNC, Schedule.SYNC),
        ("sync bf16", Schedule.SYNC, Schedule.SYNC_APART),
        ("on-policy", Schedule.SYNC, Schedule.SYNC_APART),
        ("colocate_async", Schedule.PARTIAL_ROLLOUTS, Schedule.PARTIAL_ROLLOUTS),
        ("colocated, partial rollouts", Schedule.PARTIAL_ROLLOUTS, Schedule.PARTIAL_ROLLOUTS),
        ("sync partial rollout", Schedule.PARTIAL_ROLLOUTS, None),  # the GPUs that generate would stand still
        ("one-step-off FSDP2", Schedule.ONE_STEP_OFF, Schedule.ONE_STEP_OFF),
        ("1-step-off", Schedule.ONE_STEP_OFF, Schedule.ONE_STEP_OFF),
        ("2-step-off", Schedule.ASYNC, Schedule.ASYNC),
        ("1off bf16", Schedule.ASYNC, Schedule.ASYNC),  # NeMo-RL's: a bound of age, no barrier
        ("8off bf16", Schedule.ASYNC, Schedule.ASYNC),
        ("fully_async partial_rollout", Schedule.ASYNC, Schedule.ASYNC),
        ("AReaL async", Schedule.ASYNC, Schedule.ASYNC),
        ("separate_async 2+2 nodes", Schedule.ASYNC, Schedule.ASYNC),
        ("PipelineRL k=8", Schedule.ASYNC, Schedule.ASYNC),
        ("+inflight updates", Schedule.ASYNC, Schedule.ASYNC),
        ("baseline", None, None),
    ],
)
def test_mode_and_gpus_name_a_schedule(mode, schedule, where_apart):
    assert run(mode=mode, gpus_total="8", gpus_gen="8", gpus_train="8").schedule is schedule
    apart = run(mode=mode, gpus_gen="4", gpus_train="4")
    assert (apart.schedule, apart.gpus) == (where_apart, 8)
    assert run(mode=mode, gpus_total="8", gpus_train="4").schedule is where_apart


@pytest.mark.parametrize(
    ("cells", "bound"),
    [
        ({"staleness_setting": "staleness_threshold=0.5 sync_step=4"}, 0.5),
        ({"staleness_setting": "eta=8"}, 8.0),
        ({"staleness_setting": "max_trajectory_age_steps=1"}, 1.0),
        ({"staleness_setting": "max 16"}, 16.0),
        ({"staleness_setting": "0"}, 0.0),
        ({"mode": "4off"}, 4.0),
        ({"mode": "2-step-off"}, 2.0),
        ({"mode": "1.5-off"}, None),
        ({"staleness_setting": "<= 4"}, 4.0),
        ({"staleness_setting": "4 steps"}, 4.0),
        ({"staleness_setting": "staleness<=2"}, 2.0),
        ({"staleness_setting": "4", "note": "max 8192 tokens"}, 4.0),
        ({"note": "max 8192 tokens, mean staleness 1.3"}, None),
        ({"staleness_setting": "steady"}, None),
    ],
)
def test_the_bound_of_staleness_has_many_names(cells, bound):
    assert run(**cells).max_staleness == bound


@pytest.mark.parametrize(
    ("cells", "generate_s", "wait_s"),
    [
        ({"mode": "sync"}, 10.0, None),
        ({"mode": "sync", "note": "generate_sequences 7"}, 10.0, None),
        ({"mode": "sync", "gpus_gen": "4", "gpus_train": "4"}, 10.0, None),
        ({"mode": "colocate_async"}, 10.0, None),
        ({"mode": "async"}, None, 10.0),
        ({"mode": "one-step-off", "note": "generate_sequences 458; wait 45"}, 458.0, 10.0),
    ],
)
def test_seconds_are_of_generation_or_of_waiting_by_schedule(cells, generate_s, wait_s):
    row = run(gen_or_wait_s="10", **cells)
    assert (row.generate_s, row.wait_s) == (generate_s, wait_s)


@pytest.mark.parametrize(
    ("cells", "field", "value"),
    [
        ({"note": "G-GBS=512 sequences", "prompts_per_step": "64"}, "sequences_per_step", 512),
        ({"note": "1,024 sequences"}, "sequences_per_step", 1024),
        (
            {"note": "packs 4 sequences per row", "prompts_per_step": "64", "n_per_prompt": "16"},
            "sequences_per_step",
            1024,
        ),
        ({"note": "16k sequences", "prompts_per_step": "64"}, "sequences_per_step", 512),  # 8 answers each, as usual
        ({"note": "1.024 sequences", "prompts_per_step": "64"}, "sequences_per_step", 512),
        ({"note": "ablation uses max_new 8192", "max_len": "27648"}, "max_len", 8192),
        ({"note": "max_new 16,384", "max_len": "100"}, "max_len", 16384),
        ({"note": "max_new 16.5", "max_len": "100"}, "max_len", 100),
        ({"staleness_setting": "sync_step=4 mini=32", "prompts_per_step": "512"}, "optimizer_steps_per_rl_step", 16),
        ({"note": "mini=0", "prompts_per_step": "64"}, "optimizer_steps_per_rl_step", 1),
        ({"note": "Megatron TP2PP2CP2EP4 (sp=4), vLLM TP4"}, "gpus_per_sequence", 4),
        ({"note": "sp=0"}, "gpus_per_sequence", 1),
        ({"source": "verl v1 async"}, "system", "verl"),
        ({"avg_len": "~14k (Olmo3 avg, not stated for this row)"}, "avg_len", None),
        ({"staleness_setting": "C=120 B=240 q=2 rho=0.63 Mtail=1.42"}, "in_flight", None),  # one number is missing
        ({"note": "trainer 2.75 samp/s, generator 1.95 samp/s"}, "trainer_samples_per_s", None),
        ({"note": "trainer 2 samp/s, generator 1 samp/s, trainer idle 0 %"}, "trainer_idle_share", None),
    ],
)
def test_sizes_are_read_from_words(cells, field, value):
    assert getattr(run(**cells), field) == value


@pytest.mark.parametrize(
    ("note", "number"),
    [
        ("max_new 16,384", 16384), ("max_new=1.5k", 1500), ("max_new 16K; GPU count", 16000),
        ("max_new 8192, then more", 8192), ("max_new 8192.", 8192), ("max_new 1,234,567", 1234567),
        ("max_new 16.384.000", None), ("max_new 1,5", None), ("max_new 16,38", None), ("max_new 8192x", None),
        ("max_new 4 kittens", 4), ("max_new 458 s", 458), ("max_new 458 ms", None), ("max_new 7.6 min", None),
        ("max_new 90%", None),
    ],
)  # fmt: skip
def test_a_number_in_a_note_is_read_as_a_whole_or_not_at_all(note, number):
    assert number_after("max_new", "eta=8", note) == number


def test_the_words_of_the_shipped_rows_mean_their_typed_columns(tmp_path):
    shipped = shipped_runs()
    path = tmp_path / "collected.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*TEXTS, *COUNTS, *AMOUNTS, "kind"], extrasaction="ignore")
        writer.writeheader()
        for one in shipped:
            seconds = one.generate_s if one.wait_s is None else one.wait_s
            other_names = {"gen_or_wait_s": seconds, "gen_tensor_parallel": one.gpus_per_engine, "kind": "step"}
            writer.writerow(one.model_dump(mode="json") | other_names)
    assert read_published_runs(path) == shipped


@pytest.mark.parametrize(
    ("cell", "step_s"),
    [('"1,024.5"', 1024.5), ("n/a", None), ("-", None), ("nan", None), ("?", None), ("0", None), ("0.0", None)],
)
def test_a_cell_may_say_nothing_or_separate_thousands(tmp_path, cell, step_s):
    (row,) = read(tmp_path, HEADER + f"a,s,,H20,m,sync,8,{cell},,\n", encoding="utf-8-sig")  # as spreadsheets save it
    assert row.step_s == step_s


def test_a_comma_without_quotes_goes_back_to_the_evidence(tmp_path):
    (row,) = read(tmp_path, HEADER + "a,s,blog, second hand,H20,m,sync,8,10,0,none\n")
    assert (row.evidence, row.hw, row.model, row.step_s, row.note) == ("blog, second hand", "H20", "m", 10.0, "none")


@pytest.mark.parametrize(
    "text", ["a,s,,H20\n", "a,s,,H20,,,,,,,more\n"], ids=["a short line is blank behind", "a long one is cut"]
)
def test_a_line_need_not_be_as_long_as_the_header(tmp_path, text):
    (row,) = read(tmp_path, HEADER.replace("evidence", "moe") + text)
    assert row == run(hw="H20")


@pytest.mark.parametrize("header", ["id,source,mode,gen_or_wait_s,value", "id,source,system,mode,gen_or_wait_s"])
def test_collected_columns_are_known_by_the_header_and_others_ignored(tmp_path, header):
    (row,) = read(tmp_path, f"{header}\na,verl v1,,,5\n")
    assert row.system == "verl"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,source\nx,y\n", "line 1: there must be columns id, source, ... and a row"),
        (HEADER, "line 1: there must be columns id, source, ... and a row"),
        (HEADER + ",s,,,,,,,,\n", "line 2: id must not be empty"),
        (HEADER + "a,s,,,,,-8,,,\n", "line 2: gpus_total must be above 0, got '-8'"),
        (HEADER + "a,s,,,,,8.5,,,\n", "line 2: gpus_total must be a whole number, got '8.5'"),
        (HEADER + "a,s,,,,,16k,,,\n", "line 2: gpus_total must be a number, got '16k'"),
        (HEADER + "a,s,,,,,8,1..2,,\n", "line 2: step_s must be a number, got '1..2'"),
        (HEADER + "a,s,,,,,,,C=1 B=1 q=2 rho=1 Mtail=0.5,measured 1\n", "line 2: tailness must be at least 1, got 0.5"),
        (HEADER + "a,s,,,,,,,,\n" * 2, "id must be different in every row, got 'a' 2 times"),
        (HEADER + 'a,s,,H20,m,sync,8,10,0,"open\nb,s,,H20,m,sync,8,10,0,\n', "line 3: not a comma-separated table: "),
    ],
)
def test_a_fault_is_named_by_its_place(tmp_path, text, message):
    with pytest.raises(ConfigError, match=r"^[^\n]*$") as caught:
        read(tmp_path, text)
    assert message in str(caught.value)
