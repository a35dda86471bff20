"""Rows of published runs: typed columns, properties of a row, words of collected rows, faults of a file."""

from __future__ import annotations

import csv
import io
from itertools import combinations

import pytest
from published import predicted, row
from pydantic import ValidationError

from pipelinerl.errors import ConfigError
from pipelinerl.hardware.catalogue import Precision
from sim.validation.predict import run_config, shipped_runs
from sim.validation.reconstruct import reconstruct_run
from sim.validation.rows import (
    AMOUNTS,
    COUNTS,
    TEXTS,
    PublishedRun,
    Schedule,
    precisions,
    read_published_runs,
    settings_of,
    translated,
    unknown_words,
)

HEADER = "id,system,hw,model,schedule,gpus_total,step_s,note\n"
COLLECTED = "id,source,evidence,hw,model,mode,gpus_total,step_s,staleness_setting,note\n"


def run(**values):
    return PublishedRun(**{"id": "a", "system": "s"} | values)


def read(tmp_path, text, **options):
    path = tmp_path / "runs.csv"
    path.write_text(text, **options)
    return read_published_runs(path)


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
def test_optimizer_steps_are_prompts_of_an_rl_step_over_prompts_of_one(each, steps):
    assert run(prompts_per_step=512, prompts_per_optimizer_step=each).optimizer_steps_per_rl_step == steps


def test_gpus_and_tokens_are_of_the_whole_cluster():
    parts = run(gpus_gen=24, gpus_train=8, tok_s_per_gpu=10.0)
    assert (parts.gpus, parts.apart, parts.tokens_per_s) == (32, True, 320.0)
    assert not run(gpus_total=8, gpus_gen=8, gpus_train=8).apart


def test_no_shipped_rows_are_one_job_in_two_versions_of_its_software():
    """``source`` names the version. Two jobs were run again, by others; the third pair is UniRL and verl."""

    def job(one):  # all published settings but the version; the stack of the trainer is in the mode
        cluster = (one.gpus, one.gpus_gen, one.gpus_per_engine, one.prompts_per_step, one.n_per_prompt, one.max_len)
        return (*one.family, one.mode, one.precision, one.schedule, one.max_staleness, *cluster)

    rows = [one for one in shipped_runs() if one.avg_len is not None and one.measured_step_s is not None]
    same = [(one, other) for one, other in combinations(rows, 2) if job(one) == job(other)]
    assert all(one.source == other.source for one, other in same)
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
        ("name,source\nx,y\n", "line 1: there must be columns id, source, ... and a row"),
        (COLLECTED, "line 1: there must be columns id, source, ... and a row"),
        (COLLECTED + ",s,,,,,,,,\n", "line 2: id must not be empty"),
        (COLLECTED + "a,s,,,,,-8,,,\n", "line 2: gpus_total must be above 0, got '-8'"),
        (COLLECTED + "a,s,,,,,8.5,,,\n", "line 2: gpus_total must be a whole number, got '8.5'"),
        (COLLECTED + "a,s,,,,,16k,,,\n", "line 2: gpus_total must be a number, got '16k'"),
        (COLLECTED + "a,s,,,,,8,1..2,,\n", "line 2: step_s must be a number, got '1..2'"),
        (
            COLLECTED + "a,s,,,,,,,C=1 B=1 q=2 rho=1 Mtail=0.5,measured 1\n",
            "line 2: tailness must be at least 1, got 0.5",
        ),
        (COLLECTED + "a,s,,,,,,,,\n" * 2, "id must be different in every row, got 'a' 2 times"),
        (
            COLLECTED + 'a,s,,H20,m,sync,8,10,0,"open\nb,s,,H20,m,sync,8,10,0,\n',
            "line 3: not a comma-separated table: ",
        ),
    ],
)
def test_a_fault_is_named_by_its_place(tmp_path, text, message):
    with pytest.raises(ConfigError, match=r"^[^\n]*$") as caught:
        read(tmp_path, text)
    assert message in str(caught.value)


def test_empty_cells_are_not_published(tmp_path):
    assert read(tmp_path, HEADER + "a,s,H20,m,,,,\n") == [run(hw="H20", model="m")]


# Words of published rows: precisions, what changes nothing, and what stands in for a limit.


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("sync bf16", ()),
        ("one-step-off FSDP2", ()),
        ("fully_async partial_rollout", ()),
        ("separate_async 2+2 nodes", ()),
        ("1off bf16", ()),
        ("ours sync", ()),
        ("sync speculative decoding", ("speculative", "decoding")),
        ("sync bf16 DTensor", ("DTensor",)),
        ("sync agentic SWE-bench", ("agentic", "SWE-bench")),
    ],
)
def test_words_that_change_nothing_are_named(mode, words):
    one = row("a", "sync", mode=mode)
    assert unknown_words(one) == words
    said = [words for words in reconstruct_run(one, []).assumed if words.startswith("no effect")]
    assert said == [f"no effect of {word!r}" for word in words]


@pytest.mark.parametrize(
    ("precision", "mode", "formats", "said"),
    [
        ("bf16", "", (Precision.BF16, Precision.BF16), []),
        ("", "sync bf16", (Precision.BF16, Precision.BF16), []),
        ("", "", (Precision.BF16, Precision.BF16), ["bf16"]),
        ("bf16 (not stated)", "", (Precision.BF16, Precision.BF16), ["bf16"]),
        ("", "sync fp8", (Precision.FP8, Precision.BF16), ["training in bf16"]),
        ("bf16 training, fp8 generation", "", (Precision.FP8, Precision.BF16), []),
        ("fp8, fp8 KV cache", "", (Precision.FP8, Precision.FP8), ["training in bf16"]),
    ],
)
def test_precisions_are_read_or_assumed(precision, mode, formats, said):
    assumed = []
    assert precisions(row("a", "sync", precision=precision, mode=mode), assumed) == formats
    assert assumed == said


def test_a_row_in_fp8_is_simulated_in_fp8():
    def decode(precision):
        run = reconstruct_run(one := row("a", "sync", precision=precision), [one])
        known = {"generation": 1.0, "training": 1.0, "mean_tokens": 600.0, "rl_steps": 1}
        return run_config(run, **known, training_given=False, weights=True).hardware.decode

    assert decode("fp8").bytes_per_parameter == decode("bf16").bytes_per_parameter / 2


def test_without_a_limit_it_is_five_times_the_mean_and_the_row_is_not_alone():
    (one,) = predicted([row("a", "sync", max_len=None, avg_len=300.0, tok_s_total=9e3, step_s=None)])
    assert "limit of 1,500 tokens" in one.assumed
    assert one.alone is None


def test_tokens_per_second_with_a_limit_of_the_family_are_predicted():
    """The limit of a sibling makes seconds of them; before, the reason was that no tokens/s were published."""
    whole = row("whole", "sync", avg_len=None, tok_s_total=9e3)
    bare = row("bare", "sync", avg_len=None, max_len=None, gpus_total=16, tok_s_total=15e3)
    by_id = {one.id: one for one in predicted([whole, bare])}
    assert by_id["bare"].quantity == "tokens/s"
    assert by_id["bare"].fitted_to == ("whole",)


def test_answers_per_prompt_are_assumed_where_only_their_product_is_published():
    one = next(one for one in shipped_runs() if one.id == "nemo_v0.6_H100_bf16_DeepSeek-V3_sync_256")
    assert "8 answers per prompt" in reconstruct_run(one, [one]).assumed


# Rows as they are collected: the meaning of their words.


def collected(**cells):
    return translated({"id": "a", "source": "s"} | cells, where="here")


@pytest.mark.parametrize(
    ("mode", "schedule", "where_apart"),
    [
        ("colocate sync", Schedule.SYNC, Schedule.SYNC),
        ("sync bf16", Schedule.SYNC, Schedule.SYNC_APART),
        ("on-policy", Schedule.SYNC, Schedule.SYNC_APART),
        ("colocate_async", Schedule.PARTIAL_ROLLOUTS, Schedule.PARTIAL_ROLLOUTS),
        ("colocated, partial rollouts", Schedule.PARTIAL_ROLLOUTS, Schedule.PARTIAL_ROLLOUTS),
        ("sync partial rollout", Schedule.PARTIAL_ROLLOUTS, None),  # the GPUs that generate would stand still
        ("one-step-off FSDP2", Schedule.ONE_STEP_OFF, Schedule.ONE_STEP_OFF),
        ("2-step-off", Schedule.ASYNC, Schedule.ASYNC),
        ("1off bf16", Schedule.ASYNC, Schedule.ASYNC),  # NeMo-RL's: a bound of age, no barrier
        ("fully_async partial_rollout", Schedule.ASYNC, Schedule.ASYNC),
        ("separate_async 2+2 nodes", Schedule.ASYNC, Schedule.ASYNC),
        ("PipelineRL k=8", Schedule.ASYNC, Schedule.ASYNC),
        ("+inflight updates", Schedule.ASYNC, Schedule.ASYNC),
        ("baseline", None, None),
    ],
)
def test_mode_and_gpus_name_a_schedule(mode, schedule, where_apart):
    assert collected(mode=mode, gpus_total="8", gpus_gen="8", gpus_train="8").schedule is schedule
    apart = collected(mode=mode, gpus_gen="4", gpus_train="4")
    assert (apart.schedule, apart.gpus) == (where_apart, 8)
    assert collected(mode=mode, gpus_total="8", gpus_train="4").schedule is where_apart


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
    row = collected(gen_or_wait_s="10", **cells)
    assert (row.generate_s, row.wait_s) == (generate_s, wait_s)


@pytest.mark.parametrize(
    ("cells", "field", "value"),
    [
        ({"note": "G-GBS=512 sequences", "prompts_per_step": "64"}, "sequences_per_step", 512),
        ({"note": "packs 4 sequences per row", "prompts_per_step": "64", "n_per_prompt": "16"}, "sequences_per_step",
            1024),
        ({"note": "16k sequences", "prompts_per_step": "64"}, "sequences_per_step", 512),  # 8 answers each, as usual
        ({"note": "1.024 sequences", "prompts_per_step": "64"}, "sequences_per_step", 512),
        ({"note": "ablation uses max_new 8192", "max_len": "27648"}, "max_len", 8192),
        ({"note": "max_new 16.5", "max_len": "100"}, "max_len", 100),
        ({"staleness_setting": "sync_step=4 mini=32", "prompts_per_step": "512"}, "optimizer_steps_per_rl_step", 16),
        ({"note": "mini=0", "prompts_per_step": "64"}, "optimizer_steps_per_rl_step", 1),
        ({"note": "G-GBS=512 sequences, 4 mini-updates"}, "optimizer_steps_per_rl_step", 4),
        ({"note": "Megatron TP2PP2CP2EP4 (sp=4), vLLM TP4"}, "gpus_per_sequence", 4),
        ({"note": "sp=0"}, "gpus_per_sequence", 1),
        ({"source": "verl v1 async"}, "system", "verl"),
        ({"avg_len": "~14k (Olmo3 avg, not stated for this row)"}, "avg_len", None),
        ({"staleness_setting": "C=120 B=240 q=2 rho=0.63 Mtail=1.42"}, "in_flight", None),  # one number is missing
        ({"note": "trainer 2.75 samp/s, generator 1.95 samp/s"}, "trainer_samples_per_s", None),
        ({"note": "trainer 2 samp/s, generator 1 samp/s, trainer idle 0 %"}, "trainer_idle_share", None),
        ({"note": "trainer idle 40 %; generator 1-3 samp/s, trainer 2 samp/s"}, "generator_samples_per_s_high", 3.0),
        ({"note": "trainer 2 samp/s, generator 1-0 samp/s, trainer idle 5 %"}, "trainer_idle_share", None),
        ({"staleness_setting": "staleness_threshold=0.5 sync_step=4"}, "max_staleness", 0.5),
        ({"staleness_setting": "eta=8"}, "max_staleness", 8.0),
        ({"staleness_setting": "max_trajectory_age_steps=1"}, "max_staleness", 1.0),
        ({"staleness_setting": "max 16"}, "max_staleness", 16.0),
        ({"staleness_setting": "0"}, "max_staleness", 0.0),
        ({"mode": "4off"}, "max_staleness", 4.0),
        ({"mode": "2-step-off"}, "max_staleness", 2.0),
        ({"mode": "1.5-off"}, "max_staleness", None),
        ({"staleness_setting": "<= 4"}, "max_staleness", 4.0),
        ({"staleness_setting": "4 steps"}, "max_staleness", 4.0),
        ({"staleness_setting": "staleness<=2"}, "max_staleness", 2.0),
        ({"staleness_setting": "4", "note": "max 8192 tokens"}, "max_staleness", 4.0),
        ({"note": "max 8192 tokens, mean staleness 1.3"}, "max_staleness", None),
        ({"staleness_setting": "steady"}, "max_staleness", None),
    ],
)  # fmt: skip
def test_numbers_are_read_from_words(cells, field, value):
    assert getattr(collected(**cells), field) == value


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
    assert settings_of("eta=8", note).get("max_new") == number


def test_the_words_of_the_shipped_rows_mean_their_typed_columns(tmp_path):
    shipped = shipped_runs()
    file = io.StringIO()
    writer = csv.DictWriter(file, [*TEXTS, *COUNTS, *AMOUNTS, "kind"], extrasaction="ignore")
    writer.writeheader()
    for one in shipped:
        seconds = one.generate_s if one.wait_s is None else one.wait_s
        other_names = {"gen_or_wait_s": seconds, "gen_tensor_parallel": one.gpus_per_engine, "kind": "step"}
        writer.writerow(one.model_dump(mode="json") | other_names)
    assert read(tmp_path, file.getvalue()) == shipped


H20 = collected(hw="H20").model_dump()


@pytest.mark.parametrize(
    ("header", "line", "fields"),
    [
        *((COLLECTED, f"a,s,,H20,m,sync,8,{cell},,", {"step_s": step_s}) for cell, step_s in (
            ('"1,024.5"', 1024.5), ("n/a", None), ("-", None), ("nan", None), ("?", None), ("0", None), ("0.0", None))),
        pytest.param(COLLECTED, "a,s,blog, second hand,H20,m,sync,8,10,0,none",
            {"evidence": "blog, second hand", "hw": "H20", "model": "m", "step_s": 10.0, "note": "none"},
            id="a comma without quotes goes back to the evidence"),
        pytest.param(COLLECTED.replace("evidence", "moe"), "a,s,,H20", H20, id="a short line is blank behind"),
        pytest.param(COLLECTED.replace("evidence", "moe"), "a,s,,H20,,,,,,,more", H20, id="a long one is cut"),
        ("id,source,mode,gen_or_wait_s,value\n", "a,verl v1,,,5", {"system": "verl"}),
        ("id,source,system,mode,gen_or_wait_s\n", "a,verl v1,,,5", {"system": "verl"}),
    ],
)  # fmt: skip
def test_a_file_of_collected_columns_is_read_as_a_spreadsheet_saves_it(tmp_path, header, line, fields):
    (row,) = read(tmp_path, f"{header}{line}\n", encoding="utf-8-sig")
    assert row.model_dump().items() >= fields.items()
