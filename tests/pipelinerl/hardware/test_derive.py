"""The hardware model by hand, and its band."""

import math

import numpy as np
import pytest
from derived import H100, QWEN7B, derived, plain, step_ms
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.hardware.catalogue import Precision, find_gpu, find_model, gpu_names, in_engine, model_names
from pipelinerl.hardware.coefficients import Level, coefficients
from pipelinerl.hardware.costs import PhaseSwitchConfig
from pipelinerl.hardware.derive import (
    derive_training,
    head_exchange_seconds,
    kept_numbers,
    kv_cache_tokens,
    training_memory,
)
from pipelinerl.hardware.transport import BROADCAST, DELTA, OURS, changed_share, find_transport


def test_a_decode_step_by_hand():
    """Without losses: 7 070 619 136 parameters read, 2 bytes each, at 3.35e12 bytes/s, 4.2213 ms; KV cache of 64 * 4096
    tokens of 57 344 bytes, 4.4873 ms.
    """
    read = 7_615_616_512 - 152064 * 3584
    hardware = derived(values=plain())
    assert step_ms(hardware, 64, 4096) == pytest.approx((2 * read + 64 * 4096 * 57344) / 3.35e9)
    assert step_ms(hardware, 64, 4096) == pytest.approx(4.2213 + 4.4873, abs=1e-3)
    assert step_ms(hardware, 512, 0) == pytest.approx(2 * read * 512 / 989e9)  # products: above 295 sequences


def test_overheads_of_a_decode_step_by_hand():
    """1 ms and 28 layers of 10 us; 64 sequences of 5 us; with two accelerators 56 all-reduces of 3 us and of 2 bytes *
    3584 numbers per sequence, once back and forth over half of the data, at 450 GB/s.
    """
    values = plain(step_overhead_s=1e-3, layer_overhead_s=1e-5, sequence_overhead_s=5e-6, allreduce_s=3e-6)
    one, two = derived(values=values).decode, derived(values=values, tensor_parallel=2).decode
    assert one.step_overhead_s == pytest.approx(1.28e-3)
    assert one.sequence_overhead_s == pytest.approx(5e-6)
    assert two.step_overhead_s == pytest.approx(1.28e-3 + 56 * 3e-6)
    assert two.sequence_overhead_s == pytest.approx(5e-6 + 56 * 3584 * 2 / 450e9)
    slower = values.model_copy(update={"allreduce_share": 0.5, "node_allreduce_s": 6e-5})
    over_nodes = derived(values=slower, tensor_parallel=16).decode  # 2 * 15/16 of the data, at half of 50 GB/s
    assert over_nodes.step_overhead_s == pytest.approx(1.28e-3 + 56 * 6e-5)
    assert over_nodes.sequence_overhead_s == pytest.approx(5e-6 + 56 * 2 * 15 / 16 * 3584 * 2 / 25e9)


def test_the_state_of_linear_attention_is_read_and_written_for_every_sequence():
    """48 delta nets of 48 heads of 128 x 128 numbers of fp32, 151 MB, twice, at half of 3.35 TB/s: 0.18 ms each."""
    model = find_model("Qwen3.5-27B")
    assert model.state_bytes == 48 * 48 * 128 * 128 * 4
    decode = derived(model=model, values=plain(kv_efficiency=0.5)).decode
    assert decode.sequence_overhead_s == pytest.approx(2 * model.state_bytes / (0.5 * 3.35e12))
    assert decode.sequence_overhead_s == pytest.approx(0.18e-3, rel=0.01)


def test_a_layer_of_experts_takes_a_floor():
    """45 us in each of the 48 layers of 30B-A3B, however few sequences; none in a dense model."""
    floors = {
        name: step_ms(derived(model=find_model(name), values=plain(expert_layer_s=45e-6)), 8, 100)
        - step_ms(derived(model=find_model(name), values=plain()), 8, 100)
        for name in ("Qwen3-30B-A3B", "Qwen2.5-7B")
    }
    assert floors == pytest.approx({"Qwen3-30B-A3B": 48 * 0.045, "Qwen2.5-7B": 0.0}, abs=1e-9)


@pytest.mark.parametrize(("batch", "share"), [(1, 8 / 128), (2, 1 - (120 / 128) ** 2), (10**4, 1.0)])
def test_a_batch_reads_the_experts_that_its_sequences_meet(batch, share):
    """One sequence meets 8 of 128, two 15.5, many all."""
    qwen30b = find_model("Qwen3-30B-A3B")
    hardware = derived(H100.model_copy(update={"bf16_flops": 1e17}), qwen30b, values=plain())
    dense = qwen30b.parameters - qwen30b.embedding_parameters - qwen30b.expert_parameters
    read = 2 * (dense + share * qwen30b.expert_parameters)
    assert step_ms(hardware, batch, 0) == pytest.approx(read / 3.35e9)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    gpu=st.sampled_from(gpu_names()),
    model=st.sampled_from(model_names()),
    tensor_parallel=st.sampled_from([1, 2, 4, 8]),
    batch=st.integers(1, 1024),
    context=st.integers(0, 20_000),
)
def test_the_band_is_ordered_and_steps_grow(gpu, model, tensor_parallel, batch, context):
    """Optimistic is fastest and pessimistic slowest, whatever runs; more sequences or context never take less time."""
    steps = []
    for level in Level:
        hardware = derived(find_gpu(gpu), find_model(model), tensor_parallel=tensor_parallel, level=level)
        steps.append(step_ms(hardware, batch, context, tensor_parallel=tensor_parallel))
        assert step_ms(hardware, batch + 1, context, tensor_parallel=tensor_parallel) >= steps[-1]
        assert step_ms(hardware, batch, context + 1, tensor_parallel=tensor_parallel) >= steps[-1]
    assert steps == sorted(steps)


def test_prefill_by_hand():
    """Two accelerators: half the products each, and 56 all-reduces of 7168 bytes per token at 450 GB/s."""
    prefill = derived(values=plain(), tensor_parallel=2).prefill
    products_s = 2 * (7_615_616_512 - 152064 * 3584) / (2 * 989e12)
    assert prefill.token_s == pytest.approx(products_s + 56 * 7168 / 450e9)
    assert prefill.token_squared_s == pytest.approx(2 * 28 * 3584 / (2 * 989e12))


def test_training_by_hand():
    """Without losses: 6 * 7.6156e9 / 989e12 s per token; attention 6 * 28 * 3584 / 989e12 per squared token."""
    training = derive_training(H100, QWEN7B, training_accelerators=1, coefficients=plain())
    assert training.token_s == pytest.approx(6 * 7_615_616_512 / 989e12)
    slower = H100.model_copy(update={"training_factor": 0.5})
    half = derive_training(slower, QWEN7B, training_accelerators=1, coefficients=plain())
    assert half.token_s == pytest.approx(2 * training.token_s)
    assert training.token_squared_s == pytest.approx(6 * 28 * 3584 / 989e12, rel=1e-4)
    assert training.step_s == pytest.approx(28 * 7_615_616_512 / 3.35e12)
    assert training.micro_batch_s == 0.0


def test_activations_and_gathers_by_hand():
    """Kept per token and layer 4*3584 + 2*3584 + 2*512 + 4*18944 = 98 304 numbers of 2 bytes, moved ten times; eight
    bytes per parameter gathered over eight links of 50 GB/s, once in 16 384 tokens and half once more.
    """
    assert kept_numbers(QWEN7B) == 98_304
    values = plain(activation_traffic=10.0, gather_exposed=1.0)
    training = derive_training(H100, QWEN7B, training_accelerators=64, coefficients=values)
    gather_s = 8 * 7_615_616_512 / 400e9
    expected = 6 * 7_615_616_512 / 989e12 + 10 * 2 * 28 * 98_304 / 3.35e12 + gather_s / 16_384
    assert training.token_s == pytest.approx(expected)
    assert training.micro_batch_s == pytest.approx(gather_s / 2)


@pytest.mark.parametrize(
    ("changed", "passes"),
    [
        ({"recomputation": 1.0}, 4),
        ({"extra_forward_passes": 2.0}, 5),
        ({"extra_forward_passes": 2.0, "log_probability_cost": 1.24}, 5.48),
    ],
)
def test_every_forward_pass_more_is_a_third_more(changed, passes):
    values = plain(activation_traffic=7.0)
    plainly = derive_training(H100, QWEN7B, training_accelerators=1, coefficients=values)
    more = derive_training(H100, QWEN7B, training_accelerators=1, coefficients=values.model_copy(update=changed))
    assert more.token_s == pytest.approx(plainly.token_s * passes / 3)
    assert more.token_squared_s == pytest.approx(plainly.token_squared_s * passes / 3)


def test_training_of_adapters_by_hand():
    """Rank 16 of a 7B: 16 * 28 * (2 (3584 + 3584) + 2 (3584 + 512) + 3 (3584 + 18944)) = 40 370 176 parameters.

    Of six FLOP per parameter and token two go with the gradients of the weights, and two per adapter come back. bf16
    weights are gathered twice, of adapters also gradients in fp32.
    """
    adapters, whole = 16 * 28 * (2 * 7168 + 2 * 4096 + 3 * 22528), 7_615_616_512
    assert QWEN7B.adapter_parameters(16) == adapters == 40_370_176
    values = plain(adapter_rank=16.0, gather_exposed=1.0, pack_tokens=1000.0)
    training = derive_training(H100, QWEN7B, training_accelerators=64, coefficients=values)
    gather_s = (4 * whole + 4 * adapters) / 400e9
    assert training.token_s == pytest.approx((4 * whole + 2 * adapters) / 989e12 + gather_s / 1000)
    assert training.token_squared_s == pytest.approx(6 * 28 * 3584 / 989e12, rel=1e-4)
    assert training.step_s == pytest.approx(28 * adapters / 64 / 3.35e12)
    memory = training_memory(QWEN7B, accelerators=4, zero_stage=2, adapter_rank=16)
    assert memory.states == pytest.approx(2 * whole + 14 * adapters / 4)
    sent, all_sent = (derived(values=plain(adapter_rank=rank), transport=BROADCAST).weights for rank in (16.0, 0.0))
    assert sent.publish_s == pytest.approx(all_sent.publish_s * adapters / whole)


def test_experts_exchange_tokens_inside_a_node_or_between_nodes():
    """30B: 489 GB of states fit into eight of 86 GB: eight copies at 450 GB/s. 235B does not: four at 50 GB/s.

    Three of DeepSeek's 61 layers are dense, and exchange nothing.
    """
    for name, layers, copies, link in (
        ("Qwen3-30B-A3B", 48, 8, 450e9),
        ("Qwen3-235B-A22B", 94, 4, 50e9),
        ("DeepSeek-V3", 58, 4, 50e9),
    ):
        model = find_model(name)
        off, on = (
            derive_training(H100, model, training_accelerators=64, coefficients=plain(exchange_exposed=share))
            for share in (0.0, 1.0)
        )
        expected = 4 * layers * copies * model.width * 2 / link
        assert on.token_s - off.token_s == pytest.approx(expected, rel=1e-6)


def test_ranks_that_share_rows_exchange_heads_over_nvlink() -> None:
    """7B: 28 layers, 3584 numbers of queries and of results, 4 heads of keys and of values of 128, for 8 ranks twice.

    Forward, backward, and forward again where it is recomputed; one part of k stays.
    """
    for shared, heads in ((2, 4), (4, 4), (8, 8)):
        alone, together = (
            derive_training(
                H100, QWEN7B, training_accelerators=64, coefficients=plain(recomputation=0.5), sequence_parallel=size
            )
            for size in (1, shared)
        )
        sent = 2 * 28 * (2 * 3584 + 2 * heads * 128) * (shared - 1) / shared
        assert together.token_s - alone.token_s == pytest.approx(2.5 * sent / 450e9, rel=1e-6)
        assert together.model_copy(update={"token_s": alone.token_s}) == alone


def test_a_row_on_more_than_a_node_goes_over_the_network() -> None:
    seconds = [head_exchange_seconds(H100, QWEN7B, accelerators=size) for size in (8, 16)]
    assert seconds[1] / seconds[0] == pytest.approx((15 / 14) * (7168 + 16 * 256) / (7168 + 8 * 256) * 450 / 50)


def test_the_attentions_output_is_kept_twice_where_rows_are_shared() -> None:
    alone, shared = (
        training_memory(QWEN7B, accelerators=8, pack_tokens=1000, recomputation=0.25, sequence_parallel=size)
        for size in (1, 4)
    )
    assert shared.activations - alone.activations == pytest.approx(1000 * 2 * 3584 * (0.75 * 28 + 0.25))


def test_sequences_are_shared_by_at_most_those_that_train():
    assert [derived(trainers=n, level=Level.OPTIMISTIC).training.sequence_accelerators for n in (2, 8, 64)] == [2, 8, 8]
    assert derived(trainers=64).training.sequence_accelerators == 1


@settings(derandomize=True, deadline=None, max_examples=60)
@given(gpu=st.sampled_from(gpu_names()), model=st.sampled_from(model_names()), trainers=st.sampled_from([1, 8, 64]))
def test_the_band_of_everything_else_is_ordered(gpu, model, trainers):
    seconds = []
    for level in Level:
        it = derived(find_gpu(gpu), find_model(model), trainers=trainers, colocated=True, level=level)
        training = it.training.model_dump()
        assert training.pop("sequence_accelerators") == (min(8, trainers) if level is Level.OPTIMISTIC else 1)
        parts = [*training.values(), *it.weights.model_dump().values()]
        seconds.append([*parts, *it.switch.model_dump().values(), *it.prefill.model_dump().values()])
    for fast, middle, slow in zip(*seconds, strict=True):
        assert fast <= middle <= slow


def test_a_synchronization_lasts_as_the_root_of_its_bytes():
    """2 s per root of a GB and 15.23 GB: 7.8 s. Apart, engines pause for 0.3 of it; colocated, nobody does anything."""
    values = plain(sync_s_per_root_gb=2.0, pause_share=0.3, pause_s=0.02)
    sync_s = 2.0 * (2 * 7.615616512) ** 0.5
    apart, colocated = (derived(values=values, colocated=here).weights for here in (False, True))
    assert sync_s == pytest.approx(7.806, abs=1e-3)
    assert tuple(apart.model_dump().values()) == pytest.approx((sync_s, 0.7 * sync_s, 0.3 * sync_s + 0.02))
    assert tuple(colocated.model_dump().values()) == pytest.approx((sync_s, 0.0, sync_s + 0.02))


@pytest.mark.parametrize(
    ("transport", "trainers", "zero_stage", "seconds"),
    [
        # Gathered over eight links of 50 GB/s: 0.038 s. To the host: 1.523 s. One stream: 7.616 s. Half each: 0.762 s.
        pytest.param("broadcast", 16, 3, (1.561, 1.561 + 7.616, 0.762 + 0.02), id="staged"),
        pytest.param("broadcast", 16, 2, (1.523, 1.523 + 7.616, 0.762 + 0.02), id="nothing to gather"),
        pytest.param("broadcast", 1, 3, (1.523, 1.523 + 7.616, 0.762 + 0.02), id="nobody to gather from"),
        # Of 7.6156e9 numbers 1 % change. Gaps above 255 in 0.99^255 = 7.71 % of cases: 82.52e6 numbers of 3 bytes,
        # 0.2476 GB; 0.0248 s over PCIe, 0.2476 s on the way. Compared by 16 ranks: 16 bytes a number, 0.0023 s.
        pytest.param("delta", 16, 3, (0.0651, 0.0651 + 0.2476, 0.0248 + 0.02), id="changed"),
        pytest.param("delta", 1, 3, (0.0611, 0.0611 + 0.2476, 0.0248 + 0.02), id="changed, one rank"),
        # Written and read at 1 GB/s: 15.231 s each.
        pytest.param("file", 16, 3, (16.792, 16.792, 15.231 + 0.762 + 0.02), id="paused"),
    ],
)
def test_a_transport_lasts_as_its_bytes_over_its_bandwidths(transport, trainers, zero_stage, seconds):
    """15.231 GB. Staged, the trainer waits for its snapshot only and an engine for the load; paused, for all of it."""
    rates = {"host": 10e9, "stream": 2e9, "file": 1e9, "delta": 1e9}
    values = plain(**{f"{name}_bandwidth": rate for name, rate in rates.items()}, pause_s=0.02)
    way = find_transport(transport, key="transport", among=OURS)
    got = derived(tensor_parallel=2, trainers=trainers, values=values, zero_stage=zero_stage, transport=way).weights
    assert (got.publish_s, got.transfer_s, got.pause_s) == pytest.approx(seconds, abs=1e-3)


@pytest.mark.parametrize(("share", "all_travel"), [(0.166, False), (0.167, True), (1.0, True)])
def test_changes_of_more_than_a_quarter_of_the_bytes_travel_as_all_weights(share, all_travel):
    """3 bytes of a change, 2 of a number: a sixth of the numbers."""
    values = plain(changed_share=share)
    delta, broadcast = (derived(values=values, transport=one).weights for one in (DELTA, BROADCAST))
    assert (delta == broadcast) is all_travel


@pytest.mark.parametrize("rate", [1e-6, 1e-5, 1e-4])
def test_the_share_of_changed_numbers_is_that_of_weights_rounded_to_bf16(rate):
    """A million normal weights, half of which move up, half down, rounded to the nearest upper half of an fp32.

    Fails for 1 seed in 10^6 if the code is right: 4.9 standard deviations of the number that change.
    """
    number, (step, level) = 10**6, (0.23 * rate, Level.CENTRAL)
    before = np.random.default_rng(0).normal(0.0, 0.02, number)
    after = before + np.where(np.arange(number) % 2, step, -step)
    rounded = [(one.astype(np.float32).view(np.uint32) + 0x8000) >> 16 for one in (before, after)]
    changed, expected = np.mean(rounded[0] != rounded[1]), changed_share(rate, level)
    assert abs(changed - expected) < 4.9 * math.sqrt(expected / number)


def test_an_assumed_learning_rate_is_in_the_levels_of_the_changed_share():
    """And the published shares are in the band: 1 % (TRL, PULSE) to 3 % (verl), 7 to 12 % at ten times the rate."""
    ends = [changed_share(1e-6, level) for level in Level]
    assert [coefficients(level).changed_share for level in Level] == pytest.approx(ends, rel=0.01)
    assert ends[0] < 0.01 < ends[1] < 0.02 < ends[2] < 0.03
    assert 0.07 < changed_share(1e-5, Level.CENTRAL) < 0.12


def test_the_switch_moves_the_trainers_states():
    """16 bytes per parameter over eight accelerators at 10 GB/s, both ways; none if trainer and engines are apart."""
    values = plain(switch_to_training_s=1.0, switch_to_generation_s=2.0)
    moved_s = 16 * 7_615_616_512 / 8 / 1e10
    switch = derived(values=values, colocated=True).switch
    assert (switch.to_training_s, switch.to_generation_s) == pytest.approx((1 + moved_s, 2 + moved_s))
    assert derived(values=values).switch == PhaseSwitchConfig()


def test_a_separate_trainer_takes_longer_by_its_other_work():
    """All its seconds, by the same share; a colocated one has that in the phase switch."""
    values = coefficients(Level.CENTRAL, {"training_rest_share": 0.25})
    apart, alone = (derived(values=values, colocated=colocated).training for colocated in (False, True))
    assert apart == alone.on_slower_accelerators(1.25)


@pytest.mark.parametrize(("name", "peak"), [("H100", 1979e12), ("A100", 312e12)])
def test_an_engine_in_fp8_reads_half_the_bytes_at_the_peak_of_fp8(name, peak):
    """Weights and cache by a key of their own; the trainer and the transfer stay in bf16. An A100 has no fp8."""
    gpu, model = find_gpu(name), QWEN7B
    bf16, weights, cache = (
        derived(gpu, values=plain(), engine=in_engine(gpu, model, *formats))
        for formats in (
            (Precision.BF16, Precision.BF16), (Precision.FP8, Precision.BF16), (Precision.BF16, Precision.FP8),
        )
    )  # fmt: skip
    assert (weights.decode.bytes_per_parameter, weights.decode.peak_flops) == (1.0, peak)
    assert (weights.training, weights.weights, cache.decode.bytes_per_parameter) == (bf16.training, bf16.weights, 2.0)
    assert cache.decode.kv_bytes_per_token == model.kv_bytes_per_token / 2
    more = weights.kv_cache_tokens - bf16.kv_cache_tokens
    assert more == pytest.approx(model.parameters / model.kv_bytes_per_token, abs=1)
    assert cache.kv_cache_tokens == pytest.approx(2 * bf16.kv_cache_tokens, abs=1)


def test_states_of_linear_attention_leave_less_for_the_cache():
    """By hand: 256 states of 151 MB beside the weights of Qwen3.5-27B, two H100 without losses; room for one rollout of
    the longest stays, and more than one state's is not asked of a model without them.
    """
    model = find_model("Qwen3.5-27B")
    known = {"tensor_parallel": 2, "coefficients": plain()}
    free = 2 * H100.memory_bytes - 2 * model.parameters
    for sequences in (1, 256):
        left = (free - sequences * model.state_bytes) / model.kv_bytes_per_token
        assert kv_cache_tokens(H100, model, **known, sequences=sequences) == math.floor(left)
    assert kv_cache_tokens(H100, model, **known, sequences=10**4, longest=5000) == 5000
    assert kv_cache_tokens(H100, QWEN7B, **known, sequences=10**4) == kv_cache_tokens(H100, QWEN7B, **known)


def test_engines_of_another_kind_have_its_times_and_memory_and_the_trainer_keeps_its_own():
    mixed = derived(engine=(find_gpu("H20"), QWEN7B), tensor_parallel=2)
    engines, trainer = (derived(find_gpu(gpu), tensor_parallel=2) for gpu in ("H20", "H100"))
    for name in ("decode", "prefill", "kv_cache_tokens"):
        assert getattr(mixed, name) == getattr(engines, name) != getattr(trainer, name), name
    assert mixed.training == trainer.training != engines.training


@pytest.mark.parametrize(("trains", "generates"), [("H100", "L40S"), ("L40S", "H100")])
def test_weights_cross_between_two_kinds_over_the_slower_link(trains, generates):
    """Without other losses, by hand: an L40S has one link of 25 GB/s, 15.23 GB of weights need 0.609 s, whichever side
    it is on; a node of H100s 400 GB/s. Of one kind the link is in what was measured. One stream uses one link.
    """
    gpu, other = find_gpu(trains), find_gpu(generates)
    assert derived(gpu, values=plain(), engine=(other, QWEN7B)).weights.publish_s == pytest.approx(0.6092, abs=1e-4)
    hopper = (find_gpu("H20"), QWEN7B)
    assert derived(values=plain(), engine=hopper).weights.publish_s == pytest.approx(2 * 7_615_616_512 / 400e9)
    assert derived(gpu, values=plain()).weights.publish_s == 0.0
    slow, values = other.model_copy(update={"network": 1e9}), plain(stream_bandwidth=2e9)
    sent = derived(gpu, values=values, engine=(slow, QWEN7B), transport=BROADCAST).weights
    assert sent.transfer_s - sent.publish_s == pytest.approx(2 * 7.615616512)
