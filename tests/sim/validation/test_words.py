"""Words of published rows: precisions, what changes nothing, and what stands in for a limit."""

import pytest
from published import predicted, row

from pipelinerl.hardware.catalogue import Precision
from sim.validation.predict import shipped_runs
from sim.validation.reconstruct import reconstruct_run
from sim.validation.run_config import run_config
from sim.validation.words import precisions, unknown_words


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


def test_a_row_that_says_fp8_is_simulated_so():
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


def test_answers_per_prompt_are_said_where_only_their_product_is_published():
    one = next(one for one in shipped_runs() if one.id == "nemo_v0.6_H100_bf16_DeepSeek-V3_sync_256")
    assert "8 answers per prompt" in reconstruct_run(one, [one]).assumed
