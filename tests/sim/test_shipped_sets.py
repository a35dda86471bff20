"""The shipped sets of lengths and the script that makes them."""

import importlib.util
from itertools import combinations
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from workloads import SHIPPED, all_lengths, expected_longest, workload

from pipelinerl.config.run import parse_run
from sim.run import simulate
from sim.workload import read_source, shipped_sets

ROOT = Path(__file__).parents[2]


# --------------------------------------------------------------------------------------- shipped sets


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_length_sets", ROOT / "scripts" / "make_length_sets.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_shipped_sets_are_these():
    assert ", ".join(shipped_sets()) == SHIPPED


STATISTICS = {
    # prompts, answers, mean, median, cv, p95, longest, correct, longest of 8 over the mean of a prompt, of 32
    "rgym_llama_400": (70, 50, 573, 427, 0.80, 2047, 2048, 0.09, 2.04, 2.86),
    "rgym_llama_800": (70, 50, 396, 335, 0.63, 715, 2048, 0.09, 1.76, 2.74),
    "skythought": (30, 11, 16654, 8424, 0.81, 32459, 32467, 0.33, 1.78, None),
    "areal_deepscaler": (18, 32, 3173, 3117, 0.38, 5222, 7783, 0.87, 1.38, 1.64),
    "areal_nemotron": (15, 32, 4584, 4162, 0.41, 8085, 11936, 0.79, 1.44, 1.75),
}
"""Computed from the source table when it was collected, rounded to the last digit given."""


@pytest.mark.parametrize("name", STATISTICS)
def test_a_shipped_set_has_the_statistics_of_its_source(name):
    prompts, answers, mean, median, cv, p95, longest, correct, longest_of_8, longest_of_32 = STATISTICS[name]
    groups = [prompt.lengths for prompt in read_source(name)]
    lengths = np.concatenate(groups)
    assert [len(group) for group in groups] == [answers] * prompts
    assert lengths.mean() == pytest.approx(mean, abs=0.5)
    assert np.median(lengths) == pytest.approx(median, abs=0.5)
    assert lengths.std() / lengths.mean() == pytest.approx(cv, abs=0.005)
    assert np.quantile(lengths, 0.95) == pytest.approx(p95, abs=0.5)
    assert lengths.max() == longest
    assert np.concatenate([p.rewards for p in read_source(name)]).mean() == pytest.approx(correct, abs=0.005)
    for count, ratio in ((8, longest_of_8), (32, longest_of_32)):
        if ratio is not None:
            ratios = [expected_longest(group.tolist(), count) / group.mean() for group in groups]
            assert np.mean(ratios) == pytest.approx(ratio, abs=0.005)


def test_both_steps_of_rgym_llama_answer_the_same_prompts():
    early, late = ([p.prompt_tokens for p in read_source(f"rgym_llama_{step}")] for step in (400, 800))
    assert early == late
    assert (min(early), max(early)) == (18, 339)


def test_expected_longest_is_the_mean_over_all_subsets():
    lengths = [3, 1, 4, 1, 5]
    subsets = [max(subset) for subset in combinations(lengths, 3)]
    assert expected_longest(lengths, 3) == pytest.approx(np.mean(subsets))
    assert script().expected_longest(lengths, 3) == pytest.approx(np.mean(subsets))


def test_the_readme_of_the_sets_states_their_statistics():
    """Its summary tables hold the rows that the script prints for the files beside it."""
    make = script()
    readme = (ROOT / "sim" / "data" / "README.md").read_text(encoding="utf-8").splitlines()
    for name in shipped_sets():
        text = (ROOT / "sim" / "data" / f"{name}.csv").read_text(encoding="utf-8")
        rows = [tuple(map(int, line.split(","))) for line in text.splitlines()[1:]]
        for line in make.summary(name, rows):
            assert line in readme


SOURCE_TABLE = (
    "source_id,model,benchmark,prompt_id,sample_id,prompt_tokens,response_tokens,correct\n"
    + "".join(f"skythought,ckpt{c},aime,{p},0,{50 + p},{1000 * p + c},1\n" for c in range(8) for p in (3, 1))
    + "".join(
        f"{source},{model},{benchmark},{p},{a},{90 + p},{a},{a % 2}\n"
        for source, model in (
            ("rgym_llama", "Llama-3B-RG-step400"),
            ("rgym_llama", "Llama-3B-RG-step800"),
            ("areal_32", "DeepScaleR-1.5B-Preview"),
            ("areal_32", "OpenMath-Nemotron-1.5B"),
        )
        for benchmark in ("aime", "amc")
        for p in (0, 1)
        for a in range(8)
    )
)


def test_the_script_sorts_by_prompt_numbers_prompts_over_benchmarks_and_drops_the_rest(tmp_path, capsys):
    source = tmp_path / "response_lengths.csv"
    source.write_text(SOURCE_TABLE, encoding="utf-8")
    assert script().main([str(source), str(tmp_path)]) == 0
    sky = (tmp_path / "skythought.csv").read_text(encoding="utf-8").splitlines()
    assert sky[:3] + sky[9:10] == [
        "prompt_id,prompt_tokens,response_tokens,correct",
        "0,53,3000,1",
        "0,53,3001,1",
        "1,51,1000,1",
    ]
    rgym = (tmp_path / "rgym_llama_400.csv").read_text(encoding="utf-8").splitlines()
    assert [line.split(",")[0] for line in rgym[1::8]] == ["0", "1", "2", "3"]
    assert rgym[1:3] == ["0,90,1,0", "0,90,1,1"]  # 0 tokens count as 1
    assert "| `areal_nemotron` | 4 x 8 |" in capsys.readouterr().out
    assert {path.stem for path in tmp_path.glob("*.csv")} == {*shipped_sets(), "response_lengths"}


def test_the_script_rejects_wrong_arguments_and_a_table_without_a_set(tmp_path, capsys):
    source = tmp_path / "response_lengths.csv"
    source.write_text(SOURCE_TABLE.replace("skythought", "other"), encoding="utf-8")
    assert script().main([str(source)]) == 2
    assert script().main([str(source), str(tmp_path)]) == 2
    usage, missing = capsys.readouterr().err.splitlines()
    assert usage == "usage: make_length_sets.py SOURCE_TABLE.csv FOLDER"
    assert missing == f"{source}: the table has no rows with source_id='skythought', model=None"
    assert list(tmp_path.glob("*.csv")) == [source]


# ------------------------------------------------------------------- the tail, beside the log-normal of `validate`

BESIDE_LOG_NORMAL = {
    # tokens at which answers were stopped; log-normal with cv 1 over the set: longest of 8 of one prompt, of 16
    # prompts, seconds to generate 256 answers, 8 to a prompt
    "rgym_llama_400": (2048, 1.17, 1.00, 1.01),
    "rgym_llama_800": (2048, 1.43, 1.05, 1.01),
    "skythought": (32467, 1.17, 1.00, 0.87),
    "areal_deepscaler": (12000, 1.79, 1.70, 1.60),
    "areal_nemotron": (12000, 1.51, 1.12, 1.14),
}
"""docs/measurements/validation.md has their ranges."""


def longest_in_batch(name: str, prompts: int) -> float:
    """Expected longest answer of 8 each to some prompts of a set: the chance that none is longer, exactly."""
    groups = [np.sort(prompt.lengths) for prompt in read_source(name)]
    values = np.unique(np.concatenate(groups))
    none_longer = np.zeros(len(values))
    for group in groups:
        below = np.searchsorted(group, values, side="right")
        chance = np.prod([(below - k).clip(0) / (len(group) - k) for k in range(8)], axis=0)
        none_longer += chance / len(groups)
    return float((values * np.diff(none_longer**prompts, prepend=0.0)).sum())


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE_LOG_NORMAL)
def test_the_longest_of_a_batch_by_the_log_normal_is_no_shorter_than_real_ones(name):
    """With cv 1, the mean of the set and its limit, as `validate` simulates rows without published lengths."""
    limit, *tails, _ = BESIDE_LOG_NORMAL[name]
    mean = float(np.concatenate([prompt.lengths for prompt in read_source(name)]).mean())
    source = workload(kind="lognormal", mean=mean, cv=1.0, max=limit, group_size=8)
    drawn = all_lengths(source, 5000).ravel().tolist()
    of_a_prompt = [expected_longest(prompt.lengths.tolist(), 8) for prompt in read_source(name)]
    assert longest_in_batch(name, 1) == pytest.approx(np.mean(of_a_prompt))
    ratios = [expected_longest(drawn, 8 * prompts) / longest_in_batch(name, prompts) for prompts in (1, 16)]
    assert ratios == pytest.approx(tails, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE_LOG_NORMAL)
def test_a_synchronous_step_by_the_log_normal_lasts_as_long_as_by_real_answers_that_were_stopped(name):
    """Four engines of 64 slots, a 7B on H100; where two answers of five are stopped it is 13 % too short."""
    limit, *_, phase = BESIDE_LOG_NORMAL[name]
    mean = float(np.concatenate([prompt.lengths for prompt in read_source(name)]).mean())
    lengths = {"kind": "lognormal", "mean": mean, "cv": 1.0}, {"kind": "empirical", "source": name}

    def seconds(length: dict[str, object]) -> float:
        hardware = {"gpu": "H100", "model": "Qwen2.5-7B", "training": {"token_s": 0.0}, "weights": {}, "switch": {}}
        tables = {
            "optimizer_steps": 32,
            "cluster": {"accelerators": 4},
            "scheduler": {"kind": "conventional", "train_batch_size": 256, "generation_batch_size": 64},
            "workload": {"group_size": 8, "prompt_tokens": 150, "length": {**length, "max": limit}},
            "hardware": hardware,
        }
        return simulate(parse_run(tables)).duration_s

    assert seconds(lengths[0]) / seconds(lengths[1]) == pytest.approx(phase, abs=0.01)
