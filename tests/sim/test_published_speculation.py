"""Published numbers of speculative decoding in RL, from their inputs; docs/simulator.md names the missing ones."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from pipelinerl.config.run import RunConfig, parse_run
from pipelinerl.hardware.costs import Decode, DecodeStep, Speculation, tokens_per_step
from sim.planning.answer import gains_by_batch
from sim.planning.screen import Screener, own_candidate
from sim.planning.space import SearchSpace
from sim.run import simulate


def gain(decode: dict[str, object], batch: int, *, tokens: int, acceptance: float, cost: float = 0.0) -> float:
    """Return the speed with drafts over that without, at a batch without context."""
    model = TypeAdapter(Decode).validate_python(decode)
    law = Speculation(tokens, cost, None, (acceptance,))
    plain = DecodeStep(model, tensor_parallel=1, most=batch)
    return plain.of(batch, 0) / DecodeStep(model, tensor_parallel=1, most=batch, speculation=law).of(batch, 0)


ARENO = {"kind": "affine", "step_s": (8.2 - 0.6 / 63) * 1e-3, "sequence_s": 0.6e-3 / 63}


def test_areno_an_h200_has_a_ceiling_of_1_3_to_2_2_at_64_sequences():
    """AReno #545: Llama-3.1-8B on one H200, a step of 8.2 ms at 1 sequence and 8.8 ms at 64; the ceiling follows from
    accepted lengths, which are not given: three drafts with an acceptance of 0.4 to 0.7 give 1.6 to 2.5 tokens. Near
    the tail it is close to that length."""
    plain = DecodeStep(TypeAdapter(Decode).validate_python(ARENO), tensor_parallel=1, most=64)
    assert (plain.of(1, 0), plain.of(64, 0)) == pytest.approx((8.2e-3, 8.8e-3))
    ceiling = [gain(ARENO, 64, tokens=3, acceptance=one) for one in (0.4, 0.7)]
    assert 1.3 <= ceiling[0] < ceiling[1] <= 2.2
    assert gain(ARENO, 1, tokens=3, acceptance=0.7) == pytest.approx(tokens_per_step(0.7, 3), rel=0.005)


FASTRL = {1: (8.45, 3.9), 6: (8.85, 4.5), 12: (8.99, 4.9)}
"""fastrl #7: H20, Qwen2.5-7B, two GPUs, two tokens verified: forward time with and without (ms) by batch."""


@pytest.mark.parametrize(("batch", "times_ms"), FASTRL.items())
def test_fastrl_on_an_h20_a_drafter_that_takes_two_passes_does_not_pay(batch, times_ms):
    """A step gives two tokens at most, and takes 2.17, 1.97 and 1.83 times as long: two passes of the drafter of 0.42
    to 0.58 steps each. It gains from an acceptance of 0.97 on at 6 sequences, of 0.83 at 12, and never alone. The
    accepted length is not given."""
    with_ms, plain_ms = times_ms
    flat = {"kind": "affine", "step_s": plain_ms * 1e-3}
    gains = [gain(flat, batch, tokens=1, acceptance=one, cost=with_ms / plain_ms - 1) for one in (0.8, 1.0)]
    assert gains[0] == pytest.approx(1.8 * plain_ms / with_ms)
    assert gains[0] < 1
    assert (gains[1] > 1) is (batch > 1)


def run_of(gpu: str) -> RunConfig:
    return parse_run(
        {
            "optimizer_steps": 100,
            "cluster": {"accelerators": 8, "generation_accelerators": 4},
            "scheduler": {"train_batch_size": 64, "generation_batch_size": 64},
            "workload": {"group_size": 1, "prompt_tokens": 100, "length": {"kind": "uniform", "max": 400}},
            "hardware": {"gpu": gpu, "model": "Qwen2.5-7B"},
            "engine": {"speculation": {"method": "eagle", "tokens": 3, "acceptance": 0.6, "draft_cost": 0.05}},
        }
    )


def test_an_h20_loses_from_a_far_smaller_batch_than_an_h100():
    """UniRL #94 says that speculation can be 50 % slower on H20 (no inputs). Of the catalogue: 148 TFLOP/s to 4 TB/s,
    against 989 to 3.35: verification is bound by compute eight times as early."""
    losses = {}
    for gpu in ("H20", "H100"):
        config = run_of(gpu)
        space = SearchSpace.of(config)
        gains_B = gains_by_batch(own_candidate(space), config.speculation, Screener(config, space.answers))
        losses[gpu] = next((batch for batch, one in enumerate(gains_B.tolist(), 1) if one < 1), len(gains_B))
    assert losses["H20"] < 64
    assert losses["H100"] > 4 * losses["H20"]


def end_to_end(share: float, tokens: int, acceptance: float) -> float:
    """Return the speed of a synchronous run with drafts over that without, if generation takes this share of a step.

    Steps of 10 ms whatever they hold, answers of 16,000 tokens, all at once.
    """
    seconds = 160.0 * (1 - share) / share
    tables = {
        "optimizer_steps": 4,
        "cluster": {"accelerators": 8},
        "scheduler": {"kind": "conventional", "train_batch_size": 64, "generation_batch_size": 8},
        "workload": {"group_size": 1, "prompt_tokens": 0, "length": {"kind": "fixed", "max": 16_000}},
        "hardware": {
            "decode": {"kind": "affine", "step_s": 0.01},
            "training": {"token_s": 0.0, "step_s": seconds},
        },
    }
    drafts = {"engine": {"speculation": {"method": "eagle3", "tokens": tokens, "acceptance": acceptance}}}
    plain, fast = (simulate(parse_run(one)).duration_s for one in (tables, {**tables, **drafts}))
    return plain / fast


@pytest.mark.parametrize(("share", "whole"), [(0.65, 1.41), (0.72, 1.47)])
def test_nvidia_a_rollout_of_1_8_is_1_4_to_1_5_end_to_end(share, whole):
    """arXiv:2604.26779: Qwen3-8B, generation 65 to 72 % of a synchronous step, 1.8 times as fast: by Amdahl's law 1.41
    to 1.47. Simulated with 1.8 tokens a step that cost nothing: k = 1, a = 0.8. The slowest of 64 answers takes 1 %
    longer than the mean one."""
    assert 1 / (1 - share + share / 1.8) == pytest.approx(whole, abs=0.005)
    assert end_to_end(share, 1, 0.8) == pytest.approx(whole, rel=0.015)


def test_tlt_1_7_end_to_end_needs_rollouts_twice_as_fast():
    """arXiv:2511.16665: 1.7 end to end, the tail over 80 % of a step: by Amdahl's law 1 / (1/1.7 - 0.2) * 0.8 = 2.06 in
    rollouts. Accepted length, batch and cost of the drafter are not given; 2.06 tokens a step that cost nothing are
    k = 3 with an acceptance of 0.56. The slowest of 64 answers takes 1.5 % longer than the mean one."""
    needed = 0.8 / (1 / 1.7 - 0.2)
    assert needed == pytest.approx(2.06, abs=0.005)
    assert tokens_per_step(0.5625, 3) == pytest.approx(needed, rel=0.002)
    assert end_to_end(0.8, 3, 0.5625) == pytest.approx(1.7, rel=0.015)
