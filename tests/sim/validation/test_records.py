"""Rows of published runs: what their words mean, and what is wrong with a file."""

from __future__ import annotations

import pytest

from pipelinerl.errors import ConfigError
from sim.validation.predict import shipped_runs
from sim.validation.reconstruct import as_subject
from sim.validation.records import Mode, PublishedRun, read_published_runs

HEADER = "id,source,evidence,hw,model,mode,gpus_total,step_s,staleness_setting,note\n"


def run(**values):
    return PublishedRun(**{"id": "a", "source": "s"} | values)


@pytest.mark.parametrize(
    ("mode", "schedule"),
    [
        ("colocate sync", Mode.SYNC),
        ("sync bf16", Mode.SYNC),
        ("colocate_async", Mode.PARTIAL),
        ("sync partial rollout", Mode.PARTIAL),
        ("one-step-off FSDP2", Mode.ONE_STEP_OFF),
        ("1-step-off", Mode.ONE_STEP_OFF),
        ("2-step-off", Mode.ASYNC),
        ("1off bf16", Mode.ASYNC),  # NeMo-RL's: a bound of age, no barrier
        ("8off bf16", Mode.ASYNC),
        ("fully_async partial_rollout", Mode.ASYNC),
        ("AReaL async", Mode.ASYNC),
        ("separate_async 2+2 nodes", Mode.ASYNC),
        ("PipelineRL k=8", Mode.ASYNC),
        ("hybrid engine", Mode.SYNC),
        ("baseline", None),
    ],
)
def test_the_mode_names_a_schedule(mode, schedule):
    assert run(mode=mode).schedule is schedule


@pytest.mark.parametrize(
    ("values", "schedule"),
    [
        ({"mode": "sync", "gpus_gen": 4, "gpus_train": 4}, Mode.APART),
        ({"mode": "sync", "gpus_total": 8, "gpus_train": 4}, Mode.APART),
        ({"mode": "sync", "gpus_total": 8, "gpus_gen": 8, "gpus_train": 8}, Mode.SYNC),
        ({"mode": "colocate sync", "gpus_gen": 4, "gpus_train": 4}, Mode.SYNC),
        ({"mode": "sync partial rollout", "gpus_gen": 4, "gpus_train": 4}, None),  # who generates would stand still
        ({"mode": "async", "gpus_gen": 4, "gpus_train": 4}, Mode.ASYNC),
    ],
)
def test_synchronous_on_separate_gpus_is_a_schedule_of_its_own(values, schedule):
    assert run(**values).schedule is schedule


@pytest.mark.parametrize(
    ("values", "bound"),
    [
        ({"staleness_setting": "staleness_threshold=0.5 sync_step=4"}, 0.5),
        ({"staleness_setting": "eta=8"}, 8.0),
        ({"staleness_setting": "max_trajectory_age_steps=1"}, 1.0),
        ({"staleness_setting": "max 16"}, 16.0),
        ({"staleness_setting": "0"}, 0.0),
        ({"mode": "4off"}, 4.0),
        ({"mode": "2-step-off"}, 2.0),
        ({"staleness_setting": "<= 4"}, 4.0),
        ({"staleness_setting": "4 steps"}, 4.0),
        ({"staleness_setting": "staleness<=2"}, 2.0),
        ({"staleness_setting": "4", "note": "max 8192 tokens"}, 4.0),
        ({"note": "max 8192 tokens, mean staleness 1.3"}, None),
        ({"staleness_setting": "steady"}, None),
    ],
)
def test_the_bound_of_staleness_has_many_names(values, bound):
    assert run(**values).staleness_rl_steps == bound


def test_seconds_come_from_the_columns_by_schedule():
    sync = run(mode="sync", gen_or_wait_s=10.0, update_s=5.0, old_logp_s=2.0, ref_s=1.0, step_s=20.0)
    assert (sync.generate_s, sync.train_s, sync.measured_step_s) == (10.0, 8.0, 20.0)
    waits = run(mode="async", gen_or_wait_s=10.0, total_h=2.0, steps=100)
    assert (waits.generate_s, waits.train_s, waits.measured_step_s) == (None, None, 72.0)


def test_sequences_and_limits_of_the_note_count():
    assert run(note="G-GBS=512 sequences", prompts_per_step=64).sequences_per_step == 512
    assert run(note="1,024 sequences").sequences_per_step == 1024
    packed = run(note="packs 4 sequences per row", prompts_per_step=64, n_per_prompt=16)
    assert packed.sequences_per_step == 1024
    assert run(prompts_per_step=64, note="mini=0").optimizer_steps_per_rl_step == 1
    assert run(prompts_per_step=64).sequences_per_step == 512  # 8 answers each, as usual
    assert run(prompts_per_step=64, n_per_prompt=32).sequences_per_step == 2048
    assert run(max_len=27648, note="ablation uses max_new 8192").longest_tokens == 8192
    mini = run(prompts_per_step=512, staleness_setting="sync_step=4 require_batches=4 mini=32")
    assert mini.optimizer_steps_per_rl_step == 16


@pytest.mark.parametrize(
    ("note", "number"),
    [
        ("max_new 16,384", 16384),
        ("max_new=1.5k", 1500),
        ("max_new 16K; GPU count", 16000),
        ("max_new 8192, then more", 8192),
        ("max_new 8192.", 8192),
        ("max_new 1,234,567", 1234567),
        ("max_new 16.384.000", None),
        ("max_new 1,5", None),
        ("max_new 16,38", None),
        ("max_new 8192x", None),
        ("max_new 4 kittens", 4),
        ("max_new 458 s", 458),
        ("max_new 458 ms", None),
        ("max_new 7.6 min", None),
        ("max_new 90%", None),
    ],
)
def test_a_number_in_a_note_is_read_as_a_whole_or_not_at_all(note, number):
    assert run(note=note).number_after("max_new") == number


def test_what_is_no_whole_number_of_tokens_or_sequences_is_not_taken_for_one():
    assert run(max_len=100, note="max_new 16.5").longest_tokens == 100
    assert run(max_len=100, note="max_new 16,384").longest_tokens == 16384
    assert run(prompts_per_step=64, note="16k sequences").sequences_per_step == 512
    assert run(prompts_per_step=64, note="1.024 sequences").sequences_per_step == 512
    assert run(prompts_per_step=64, n_per_prompt=8, note="1,024 sequences").sequences_per_step == 512
    assert run(mode="1.5-off").staleness_rl_steps is None


def test_the_shipped_rows_are_read(tmp_path):
    runs = {one.id: one for one in shipped_runs()}
    assert len(runs) == 40
    assert runs["applied_1"].number_after("rho") == 0.63  # its row has a comma too many
    assert runs["areal_eta8"].tok_s_total == 371700
    assert runs["olmo3_baseline"].avg_len is None  # words


@pytest.mark.parametrize(
    ("cell", "step_s"),
    [('"1,024.5"', 1024.5), ("n/a", None), ("-", None), ("nan", None), ("?", None), ("0", None), ("0.0", None)],
)
def test_a_cell_may_say_nothing_or_separate_thousands(tmp_path, cell, step_s):
    path = tmp_path / "runs.csv"
    path.write_text(HEADER + f"a,s,,H20,m,sync,8,{cell},,\n", encoding="utf-8-sig")  # as spreadsheets save it
    (row,) = read_published_runs(path)
    assert row.step_s == step_s


def test_a_comma_without_quotes_goes_back_to_the_evidence(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(HEADER + "a,s,blog, second hand,H20,m,sync,8,10,0,none\n")
    (row,) = read_published_runs(path)
    assert (row.hw, row.model, row.step_s, row.note) == ("H20", "m", 10.0, "none")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must have the columns id, source"),
        ("name,source\nx,y\n", "must have the columns id, source"),
        (HEADER, "must have the columns id, source, ... and a row"),
        (HEADER + ",s,,,,,,,,\n", "line 2, id must not be empty"),
        (HEADER + "a,s,,,,,-8,,,\n", "line 2, gpus_total must be above 0, got '-8'"),
        (HEADER + "a,s,,,,,8.5,,,\n", "line 2, gpus_total must be a whole number, got '8.5'"),
        (HEADER + "a,s,,,,,8,1..2,,\n", "line 2, step_s must be a number, got '1..2'"),
        (HEADER + "a,s,,,,,,,,\n" * 2, "id must be different in every row, got 'a' 2 times"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path, text, message):
    path = tmp_path / "runs.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"^[^\n]*$") as caught:
        read_published_runs(path)
    assert message in str(caught.value)


def test_an_open_quote_is_a_fault_and_does_not_swallow_the_rows_behind_it(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(HEADER + 'a,s,,H20,m,sync,8,10,0,"open\nb,s,,H20,m,sync,8,10,0,\n')
    with pytest.raises(ConfigError, match=r"runs\.csv line 3: not a comma-separated table: unexpected end of data"):
        read_published_runs(path)


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read published runs .*none\.csv: No such file"):
        read_published_runs(tmp_path / "none.csv")


def test_a_subject_takes_its_missing_workload_from_its_family():
    alone = run(mode="async", hw="H100", model="Qwen2.5-7B", gpus_total=16)
    sibling = run(
        id="b", mode="sync", hw="H100", model="Qwen2.5-7B", gpus_total=16, max_len=4096, avg_len=900.0,
        prompts_per_step=64, n_per_prompt=16, staleness_setting="mini=16",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="max_len is not published"):
        as_subject(alone, [alone])
    subject = as_subject(alone, [alone, sibling])
    assert (subject.longest_tokens, subject.mean_tokens, subject.sequences) == (4096, 900.0, 1024)
    assert subject.optimizer_steps == 4
    assert (subject.generating, subject.assumed) == (8, ("half of the GPUs generate",))


@pytest.mark.parametrize(
    ("hw", "name", "assumed"),
    [
        ("H100", "H100", False),
        ("8x NVIDIA H200 SXM", "H200", False),
        ("GB200 NVL72", "GB200", False),
        ("Abacus", "H100", True),
        ("", "H100", True),
    ],
)
def test_a_gpu_is_found_by_its_name_within_words(hw, name, assumed):
    one = run(mode="sync", hw=hw, model="Qwen2.5-7B", gpus_total=8, max_len=4096, prompts_per_step=64)
    subject = as_subject(one, [one])
    assert subject.gpu.name == name
    assert any("H100" in words for words in subject.assumed) is assumed


def test_the_cluster_is_the_sum_of_its_parts_and_without_a_size_only_ratios_count():
    base = {"mode": "async", "hw": "H100", "model": "Qwen2.5-7B", "max_len": 4096, "prompts_per_step": 64}
    parts = as_subject(run(gpus_gen=24, gpus_train=8, step_s=9.0, **base), [])
    assert (parts.accelerators, parts.generating, parts.scale_is_known) == (32, 24, True)
    assert not as_subject(run(gpus_total=32, total_h=9.0, steps=100, **base), []).scale_is_known
    assert not as_subject(run(step_s=9.0, **base), []).scale_is_known


def test_a_model_that_is_not_catalogued_is_stood_in_for_by_the_nearest():
    moe = run(mode="sync", hw="H100", model="Qwen9-31B-A3B", gpus_total=32, max_len=4096, prompts_per_step=64)
    assert as_subject(moe, [moe]).model.name == "Qwen3-30B-A3B"
    assert "Qwen3-30B-A3B for Qwen9-31B-A3B" in as_subject(moe, [moe]).assumed
    lower = run(mode="sync", hw="H100", model="gemma-2-9b-it", gpus_total=32, max_len=4096, prompts_per_step=64)
    assert any("for gemma-2-9b-it" in words for words in as_subject(lower, []).assumed)
    small = run(mode="sync", hw="H100", model="SmolLM-360M", gpus_total=8, max_len=4096, prompts_per_step=64)
    assert as_subject(small, []).model.name == "Qwen2.5-0.5B"


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            "Frobnicator",
            "model 'Frobnicator' is not in the catalogue and has no size in its name, such as 7B or 30B-A3B",
        ),
        ("Mixtral-8x7B", "model 'Mixtral-8x7B' is not in the catalogue and has no size in its name"),
        ("", "model is not published"),
    ],
)
def test_a_model_of_unknown_size_says_so(model, reason):
    one = run(mode="sync", model=model, gpus_total=8, max_len=10, prompts_per_step=8)
    with pytest.raises(ConfigError) as caught:
        as_subject(one, [])
    assert str(caught.value).startswith(reason)


def test_seconds_from_tokens_per_s_say_with_which_mean_length():
    base = {
        "mode": "sync",
        "hw": "H100",
        "model": "Qwen2.5-7B",
        "gpus_total": 8,
        "max_len": 5000,
        "prompts_per_step": 64,
    }
    assert as_subject(run(tok_s_total=9000.0, **base), []).assumed == (
        "8 answers per prompt", "mean length of 1,000 tokens, by which tokens/s become seconds"
    )  # fmt: skip
    assert "mean length" in as_subject(run(step_s=90.0, **base), []).assumed
    assert "mean length" not in as_subject(run(tok_s_total=9e3, avg_len=900.0, **base), []).assumed[-1]
