"""Rows of published runs: what their words mean, and what is wrong with a file."""

from __future__ import annotations

import pytest

from pipelinerl.errors import ConfigError
from pipelinerl.published import Mode, PublishedRun, read_published_runs
from sim.published import as_subject
from sim.validate import shipped_runs

HEADER = "id,source,evidence,hw,model,mode,gpus_total,step_s,staleness_setting,note\n"


def run(**values):
    return PublishedRun(**{"id": "a", "source": "s"} | values)


@pytest.mark.parametrize(
    ("mode", "schedule"),
    [
        ("colocate sync", Mode.SYNC),
        ("sync bf16", Mode.SYNC),
        ("colocate_async", Mode.PARTIAL),
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
        (HEADER + ",s,,,,,,,,\n", "row 1, id must not be empty"),
        (HEADER + "a,s,,,,,-8,,,\n", "row 1, gpus_total must be above 0, got '-8'"),
        (HEADER + "a,s,,,,,8.5,,,\n", "row 1, gpus_total must be a whole number, got '8.5'"),
        (HEADER + "a,s,,,,,8,1..2,,\n", "row 1, step_s must be a number, got '1..2'"),
        (HEADER + "a,s,,,,,,,,\n" * 2, "id must be different in every row, got 'a' 2 times"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path, text, message):
    path = tmp_path / "runs.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"^[^\n]*$") as caught:
        read_published_runs(path)
    assert message in str(caught.value)


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
    with pytest.raises(ConfigError, match="Frobnicator"):
        as_subject(run(mode="sync", model="Frobnicator", gpus_total=8, max_len=10, prompts_per_step=8), [])
