"""Memory of engines and trainers: by hand, and against published capacities."""

import pytest
from derived import H100, QWEN7B, plain

from pipelinerl.hardware.catalogue import find_gpu, find_model
from pipelinerl.hardware.coefficients import Level, coefficients
from pipelinerl.hardware.derive import kv_cache_tokens, pack_that_fits, training_memory


@pytest.mark.parametrize(
    ("model", "h100", "h200"),
    [
        ("Qwen2.5-0.5B", 5905, 10_700), ("Qwen2.5-1.5B", 2458, 4514), ("Qwen2.5-3B", 1828, 3427),
        ("Qwen2.5-7B", 1017, 2045), ("Qwen2.5-14B", 224, 524), ("Qwen2.5-32B", 31, 255), ("Llama-3.1-8B", 439, 888),
        ("Qwen3-8B", 388, 787),
    ],
)  # fmt: skip
def test_capacities_are_those_derived_elsewhere(model, h100, h200):
    """Thousands of tokens, 0.9 of the memory, 3.76 GB kept back; the lists are rounded."""
    for gpu, thousands in (("H100", h100), ("H200", h200)):
        tokens = kv_cache_tokens(
            find_gpu(gpu), find_model(model), tensor_parallel=1, coefficients=coefficients(Level.CENTRAL)
        )
        assert tokens == pytest.approx(thousands * 1000, rel=2e-3, abs=600)


def test_capacity_by_hand():
    """Without losses: (2 * 80 GiB - 15.231 GB) / 57 344 bytes."""
    tokens = kv_cache_tokens(H100, QWEN7B, tensor_parallel=2, coefficients=plain())
    assert tokens == int((2 * 85.899e9 - 2 * 7_615_616_512) / 57_344)


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer"),
    [(0, 2, 2, 12), (1, 2, 2, 1.5), (2, 2, 0.25, 1.5), (3, 0.25, 0.25, 1.5)],
)
def test_zero_spreads_states_over_eight_accelerators(stage, weights, gradients, optimizer):
    """Bytes per parameter: bf16 weights and gradients, fp32 master weights and two moments."""
    memory = training_memory(QWEN7B, accelerators=8, zero_stage=stage)
    per_parameter = [part / QWEN7B.parameters for part in (memory.weights, memory.gradients, memory.optimizer)]
    assert per_parameter == pytest.approx([weights, gradients, optimizer])
    assert memory.states == pytest.approx((weights + gradients + optimizer) * QWEN7B.parameters)


def test_activations_by_hand():
    """16 384 tokens: 28 layers of 3584 numbers and one layer of 98 304, or 28 of these; 1024 tokens' logits of
    152 064 entries and 10 bytes.
    """
    logits = 1024 * 152_064 * 10
    again, kept = (training_memory(QWEN7B, accelerators=8, recomputation=flag) for flag in (True, False))
    assert again.activations == 2 * 16_384 * (28 * 3584 + 98_304) + logits
    assert kept.activations == 2 * 16_384 * 28 * 98_304 + logits
    assert again.total == again.states + again.activations
    assert training_memory(QWEN7B, accelerators=8, pack_tokens=512).activations == (
        512 * (2 * (28 * 3584 + 98_304) + 152_064 * 10)
    )


def test_the_pack_that_fits_fills_the_memory():
    """7B on 8 of 85.9 GB: with stage 3, 90 % of them hold states, logits and this many tokens, and not more."""
    for stage, again in ((3, 1.0), (2, 1.0), (3, 0.0), (3, 0.5)):
        known = {"accelerators": 8, "zero_stage": stage, "recomputation": again}
        fits = pack_that_fits(QWEN7B, memory_bytes=0.9 * H100.memory_bytes, **known)
        assert training_memory(QWEN7B, pack_tokens=fits, **known).total == pytest.approx(0.9 * H100.memory_bytes)
    assert pack_that_fits(QWEN7B, memory_bytes=9e9, **known) < 0  # not even the states
