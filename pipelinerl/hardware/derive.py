"""The hardware model: memory, seconds and tokens from the figures of an accelerator and of a language model.

Every formula is on docs/hardware.md; every empirical number is in ``Coefficients``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipelinerl.errors import ConfigError
from pipelinerl.hardware.catalogue import Gpu, LanguageModel
from pipelinerl.hardware.coefficients import Coefficients
from pipelinerl.hardware.costs import PhaseSwitchConfig, PrefillConfig, ResolvedHardware, RooflineDecode, TrainingConfig
from pipelinerl.hardware.transport import BF16_BYTES, UNKNOWN, Route, WeightTransferConfig, WeightTransport

ZERO_STAGE = 3
"""Default where a run file states none."""
ROUNDING = 1e-9
"""By which a pack that just fits may be too large (no unit)."""


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Bytes per accelerator."""

    weights: float
    """bf16."""
    gradients: float
    """bf16."""
    optimizer: float
    """fp32: master weights and two Adam moments."""
    activations: float
    """bf16, kept for the backward pass of one pack; logits included."""

    @property
    def states(self) -> float:
        """All but the activations (bytes)."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """Sum (bytes)."""
        return self.states + self.activations


LOGITS_TOKENS = 1024
"""Tokens whose logits exist at once (count)."""
LOGIT_BYTES = 2 + 4 + 4
"""Bytes of one logit: bf16, fp32 for the softmax, and its gradient."""


def kept_numbers(model: LanguageModel) -> float:
    """Return the numbers that one layer keeps of one token for its backward pass.

    Two norms, in and out; queries and the attention's output; keys and values; of the feed-forward gate, up, their
    product before and after the activation.
    """
    kv_numbers = model.kv_bytes_per_token / (2 * model.layers)
    return 4 * model.width + 2 * model.attention_width + kv_numbers + 4 * model.feed_forward_width


def training_memory(
    model: LanguageModel,
    *,
    accelerators: int,
    zero_stage: int = ZERO_STAGE,
    pack_tokens: float = 16384,
    recomputation: float = 1.0,
    adapter_rank: float = 0.0,
    sequence_parallel: int = 1,
) -> TrainingMemory:
    """Return the memory of one accelerator that trains: model and gradients in bf16, optimizer states in fp32.

    ``zero_stage`` 0 spreads nothing over the ``accelerators``, 1 optimizer states, 2 gradients too, 3 weights too.
    ``pack_tokens``: of one forward and backward pass on one accelerator. ``recomputation``: share of the layers whose
    activations are computed again in the backward pass (no unit). ``adapter_rank``: of LoRA; 0: all weights.
    ``sequence_parallel``: accelerators of a row (count).
    """
    trained = trained_parameters(model, adapter_rank)
    spread = [accelerators if zero_stage >= stage else 1 for stage in (3, 2, 1)]
    logits = min(LOGITS_TOKENS, pack_tokens) * model.vocabulary * LOGIT_BYTES
    return TrainingMemory(
        weights=2 * model.parameters / spread[0],
        gradients=2 * trained / spread[1],
        optimizer=12 * trained / spread[2],
        activations=pack_tokens * _kept_bytes(model, recomputation, sequence_parallel) + logits,
    )


def trained_parameters(model: LanguageModel, adapter_rank: float) -> float:
    """Return the parameters that are trained and travel to the engines (count)."""
    return model.adapter_parameters(adapter_rank) if adapter_rank else model.parameters


def pack_that_fits(
    model: LanguageModel,
    *,
    memory_bytes: float,
    accelerators: int,
    zero_stage: int,
    recomputation: float,
    adapter_rank: float = 0.0,
) -> float:
    """Return the tokens of a pass that fits beside the states in ``memory_bytes``; 0 or less: the states do not fit."""
    nothing = training_memory(
        model, accelerators=accelerators, zero_stage=zero_stage, pack_tokens=0, adapter_rank=adapter_rank
    )
    logits = LOGITS_TOKENS * model.vocabulary * LOGIT_BYTES
    return (memory_bytes - nothing.states - logits) / _kept_bytes(model, recomputation)


def _kept_bytes(model: LanguageModel, recomputation: float, sequence_parallel: int = 1) -> float:
    """Return the bytes of one token until its backward pass: recomputed layers keep their input, and one all.

    Accelerators that share rows keep the attention's output twice: as it was sent, and as it came back.
    """
    again, inside = recomputation, kept_numbers(model) + (sequence_parallel > 1) * model.attention_width
    numbers = model.layers * (again * model.width + (1 - again) * inside) + again * inside
    return 2.0 * numbers


def kv_cache_tokens(
    gpu: Gpu,
    model: LanguageModel,
    *,
    tensor_parallel: int,
    coefficients: Coefficients,
    sequences: int = 1,
    longest: int = 0,
) -> int:
    """Return the tokens that the KV cache of one engine holds; 0 or less: the weights do not fit.

    ``model`` is as an engine has it (``in_engine``). ``sequences``: whose states of linear attention lie in the same
    memory (count). ``longest``: tokens returned at least, if they fit beside one sequence's states; then not every slot
    can be filled.
    """
    usable = coefficients.memory_share * gpu.memory_bytes - coefficients.memory_reserve_bytes
    free = usable * tensor_parallel - model.parameters * model.weight_bytes
    cached = model.cached_bytes(tensor_parallel)
    of_all, of_one = ((free - count * model.state_bytes) / cached for count in (sequences, 1))
    return math.floor(max(of_all, min(of_one, longest)))


def check_fits(
    gpu: Gpu, model: LanguageModel, *, tensor_parallel: int, coefficients: Coefficients, longest: int
) -> None:
    """Raise ConfigError if weights and the KV cache of one rollout of ``longest`` tokens do not fit into an engine."""
    if kv_cache_tokens(gpu, model, tensor_parallel=tensor_parallel, coefficients=coefficients) >= longest:
        return
    weights = model.parameters * model.weight_bytes
    kept = weights + model.state_bytes
    needed = kept + longest * model.cached_bytes(tensor_parallel)
    usable = coefficients.memory_share * gpu.memory_bytes - coefficients.memory_reserve_bytes
    sizes = (2**power for power in range(17))
    fits = (size for size in sizes if size * usable >= kept + longest * model.cached_bytes(size))
    least = next((f"the smallest that fits is tensor_parallel={size}" for size in fits), "none is large enough")
    raise ConfigError(
        f"cluster.tensor_parallel={tensor_parallel} is too small for {model.name} on {gpu.name}: weights of "
        f"{weights / 1e9:.1f} GB and the KV cache of one rollout of {longest} tokens need {needed / 1e9:.1f} GB, "
        f"{max(0.0, usable) * tensor_parallel / 1e9:.1f} GB are available; {least}"
    )


# ----------------------------------------------------------------------------------------- seconds


def derive_hardware(
    gpu: Gpu,
    model: LanguageModel,
    *,
    tensor_parallel: int,
    training_accelerators: int,
    colocated: bool,
    coefficients: Coefficients,
    zero_stage: int = ZERO_STAGE,
    engine: tuple[Gpu, LanguageModel] | None = None,
    sequences: int = 1,
    longest: int = 0,
    transport: WeightTransport = UNKNOWN,
    sequence_parallel: int = 1,
) -> ResolvedHardware:
    """Return all tables as explicit numbers.

    ``gpu`` and ``model`` are as the trainer has them (in bf16), ``engine`` as an engine has them (``in_engine``); None:
    the same. ``tensor_parallel``: accelerators of one engine. ``colocated``: the same accelerators generate and train
    in turn. ``zero_stage`` says which states the phase switch moves; the trainer's step is always that of stage 3.
    ``sequences``: of one engine, at most. ``longest``: tokens of the longest rollout, which always has room.
    ``sequence_parallel``: ranks of the trainer that share rows (count).
    """
    if colocated:
        coefficients = coefficients.model_copy(update=NOTHING_BESIDE)
    engine = engine or (gpu, model)
    link = math.inf
    if engine[0].name != gpu.name:  # two kinds share no node
        link = min(ring_bytes_s(one, one_node=False) for one in (gpu, engine[0]))
        network = min(gpu.network, engine[0].network)
        slower = {name: min(getattr(coefficients, name), network) for name in ONE_LINK}
        coefficients = coefficients.model_copy(update=slower)
    fits = kv_cache_tokens(
        *engine, tensor_parallel=tensor_parallel, coefficients=coefficients, sequences=sequences, longest=longest
    )
    switch = PhaseSwitchConfig()
    if colocated:  # the trainer's states come from the host's memory, and go back there
        states = training_memory(
            model,
            accelerators=training_accelerators,
            zero_stage=zero_stage,
            adapter_rank=coefficients.adapter_rank,
        ).states
        moved_s = states / coefficients.host_bandwidth
        switch = PhaseSwitchConfig(
            to_training_s=coefficients.switch_to_training_s + moved_s,
            to_generation_s=coefficients.switch_to_generation_s + moved_s,
        )
    decode = derive_decode(*engine, tensor_parallel=tensor_parallel, coefficients=coefficients)
    prefill = derive_prefill(*engine, tensor_parallel=tensor_parallel, coefficients=coefficients)
    rest = 1 + coefficients.generation_rest_share
    return ResolvedHardware(
        decode=decode.on_slower_accelerators(rest),
        prefill=prefill.on_slower_accelerators(rest),
        kv_cache_tokens=max(1, fits),
        training=derive_training(
            gpu,
            model,
            training_accelerators=training_accelerators,
            coefficients=coefficients,
            sequence_parallel=sequence_parallel,
        ),
        weights=derive_transport(
            gpu,
            model,
            transport,
            tensor_parallel=tensor_parallel,
            training_accelerators=training_accelerators,
            colocated=colocated,
            zero_stage=zero_stage,
            coefficients=coefficients,
            link=link,
        ),
        switch=switch,
    )


ONE_LINK = ("stream_bandwidth", "delta_bandwidth")
"""Bandwidths that the link between two kinds of accelerators limits."""


def derive_decode(
    gpu: Gpu, model: LanguageModel, *, tensor_parallel: int, coefficients: Coefficients
) -> RooflineDecode:
    """Return the decode step of an engine; routed experts are apart from the parameters that every step reads."""
    reductions = ALLREDUCES_PER_LAYER * model.layers if tensor_parallel > 1 else 0
    in_node = tensor_parallel <= gpu.gpus_per_node
    dense = model.parameters - model.embedding_parameters - model.expert_parameters
    return RooflineDecode(
        kind="roofline",
        peak_flops=gpu.bf16_flops,
        bandwidth=gpu.bandwidth,
        parameters_read=dense,
        parameters_active=model.active_parameters - model.embedding_parameters,
        bytes_per_parameter=model.weight_bytes,
        kv_bytes_per_token=model.cached_bytes(tensor_parallel),
        experts=model.experts or None,
        experts_per_token=model.experts_per_token or None,
        expert_parameters=model.expert_parameters or None,
        weight_efficiency=coefficients.weight_efficiency,
        kv_efficiency=coefficients.kv_efficiency,
        flops_efficiency=coefficients.flops_efficiency,
        step_overhead_s=coefficients.step_overhead_s
        + coefficients.layer_overhead_s * model.layers
        + (coefficients.allreduce_s if in_node else coefficients.node_allreduce_s) * reductions
        + coefficients.expert_layer_s * model.routed_layers,
        sequence_overhead_s=coefficients.sequence_overhead_s
        + 2 * model.state_bytes / (tensor_parallel * gpu.bandwidth * coefficients.kv_efficiency)  # read and written
        + reduction_seconds(gpu, model, tensor_parallel=tensor_parallel, coefficients=coefficients),
    )


ALLREDUCES_PER_LAYER = 2
"""Under tensor parallelism: after attention and after the feed-forward."""


def reduction_seconds(gpu: Gpu, model: LanguageModel, *, tensor_parallel: int, coefficients: Coefficients) -> float:
    """Return the seconds in which the bytes of one token's all-reduces, of all layers, pass the link of an engine."""
    link = gpu.nvlink if gpu.nvlink and tensor_parallel <= gpu.gpus_per_node else gpu.network
    sent_bytes = 2 * (tensor_parallel - 1) / tensor_parallel * model.width * BF16_BYTES
    return ALLREDUCES_PER_LAYER * model.layers * sent_bytes / (link * coefficients.allreduce_share)


def derive_prefill(
    gpu: Gpu, model: LanguageModel, *, tensor_parallel: int, coefficients: Coefficients
) -> PrefillConfig:
    """Return the prefill of one sequence: 2 FLOP per parameter and token, causal attention, all-reduces."""
    rate = tensor_parallel * gpu.bf16_flops * coefficients.prefill_mfu
    return PrefillConfig(
        token_s=2 * (model.active_parameters - model.embedding_parameters) / rate
        + reduction_seconds(gpu, model, tensor_parallel=tensor_parallel, coefficients=coefficients),
        token_squared_s=2 * model.layers * model.attention_width / rate,
    )


def derive_training(
    gpu: Gpu,
    model: LanguageModel,
    *,
    training_accelerators: int,
    coefficients: Coefficients,
    sequence_parallel: int = 1,
) -> TrainingConfig:
    """Return the trainer's step under ZeRO-3.

    Per token matrix products, moving activations through the memory, the exchange with experts (which recomputing is
    taken not to repeat), and a share of the gathers of a pass; per squared token attention; per micro-batch half a
    pass's gathers, for the last pass is half full; per optimizer step the optimizer states through the memory. Ranks
    that share rows (``sequence_parallel``) exchange heads besides. All of it lasts longer by a trainer's other work
    while generation goes on (``training_rest_share``).
    """
    passes = 3 + coefficients.recomputation + coefficients.log_probability_cost * coefficients.extra_forward_passes
    trained = trained_parameters(model, coefficients.adapter_rank)
    frozen = 1 - trained / model.parameters  # share of the products without gradients of the weights
    small = coefficients.expert_mfu_factor if model.experts else 1.0
    factor = (gpu.expert_training_factor if model.experts else None) or gpu.training_factor
    flops = gpu.bf16_flops * coefficients.training_mfu * factor
    products_s = 2 * model.active_parameters / flops
    moved = BF16_BYTES * kept_numbers(model) * model.layers * coefficients.activation_traffic
    kernel_flops = coefficients.attention_flops_per_byte * gpu.attention_factor * gpu.bandwidth
    attention_flops = 1 / (1 / flops + 1 / kernel_flops)
    gather_s = gather_seconds(gpu, model, accelerators=training_accelerators) * coefficients.gather_exposed
    gather_s *= 1 - frozen / 2  # half of it is gradients
    return TrainingConfig(
        token_s=(passes * (products_s + moved / 3 / gpu.bandwidth) - frozen * products_s) / small
        + coefficients.exchange_exposed * exchange_seconds(gpu, model)
        + gather_s / coefficients.pack_tokens
        + (2 + coefficients.recomputation) * head_exchange_seconds(gpu, model, accelerators=sequence_parallel),
        token_squared_s=2 * passes * model.layers * model.attention_width / attention_flops / small,
        step_s=coefficients.training_step_s + OPTIMIZER_BYTES * trained / training_accelerators / gpu.bandwidth,
        micro_batch_s=coefficients.training_micro_batch_s + gather_s / 2,
        sequence_accelerators=min(int(coefficients.sequence_accelerators), training_accelerators),
    ).on_slower_accelerators(1 + coefficients.training_rest_share)


NOTHING_BESIDE = {"training_rest_share": 0.0}
"""Of a colocated trainer: its other work is in the phase switch."""


GATHERED_BYTES = 8
"""Per parameter and pass: bf16 weights forward and backward, fp32 gradients."""
OPTIMIZER_BYTES = 28
"""Per parameter and optimizer step: three fp32 states read and written, bf16 gradient read, bf16 weight written."""


def gather_seconds(gpu: Gpu, model: LanguageModel, *, accelerators: int) -> float:
    """Return the seconds of one pass's gathers and reductions at link speed. Experts stay where they are."""
    if accelerators == 1:
        return 0.0
    link = ring_bytes_s(gpu, one_node=accelerators <= gpu.gpus_per_node)
    return GATHERED_BYTES * (model.parameters - model.expert_parameters) / link


def ring_bytes_s(gpu: Gpu, *, one_node: bool) -> float:
    """Return the bytes/s of a collective: those of NVLink, between nodes at most those of all links of a node."""
    inside = gpu.nvlink or gpu.network
    return inside if one_node else min(inside, gpu.gpus_per_node * gpu.network)


NODES_PER_TOKEN = 4
"""To which the experts of one token are limited, as in DeepSeek-V3's report."""


def exchange_seconds(gpu: Gpu, model: LanguageModel) -> float:
    """Return the seconds in which a token of training travels to its experts and back, forward and backward.

    Over NVLink to every expert if weights and optimizer states fit into one node, else over the network to every node.
    """
    if not model.experts:
        return 0.0
    state_bytes = training_memory(model, accelerators=gpu.gpus_per_node).states
    inside = bool(gpu.nvlink) and state_bytes < gpu.memory_bytes
    copies = model.experts_per_token if inside else min(model.experts_per_token, NODES_PER_TOKEN)
    return 4 * model.routed_layers * copies * model.width * BF16_BYTES / (gpu.nvlink if inside else gpu.network)


def head_exchange_seconds(gpu: Gpu, model: LanguageModel, *, accelerators: int) -> float:
    """Return the seconds in which one token's heads travel once to the accelerators of its row, and back, all layers.

    Of each rank's queries, keys, values and results (1 - 1/k) leave it; with fewer heads of keys than k, copies.
    Nothing hides it: attention waits for it. A backward pass exchanges as much as a forward pass.
    """
    link = gpu.nvlink if gpu.nvlink and accelerators <= gpu.gpus_per_node else gpu.network
    numbers_bytes = 2 * model.layers * model.attention_width * BF16_BYTES + model.cached_bytes(accelerators)
    return (1 - 1 / accelerators) * numbers_bytes / link


COMPARED_BYTES = 16
"""Through the memory per number that a rank compares with the one published last, all kernels together: a judgement."""


def derive_transport(
    gpu: Gpu,
    model: LanguageModel,
    transport: WeightTransport,
    *,
    tensor_parallel: int,
    training_accelerators: int,
    colocated: bool,
    zero_stage: int,
    coefficients: Coefficients,
    link: float = math.inf,
) -> WeightTransferConfig:
    """Return the weight transfer; ZeRO-3 gathers the parts first. ``link``: between accelerator kinds (bytes/s)."""
    trained = trained_parameters(model, coefficients.adapter_rank)
    num_bytes, spread = BF16_BYTES * trained, zero_stage == ZERO_STAGE and training_accelerators > 1
    one_node = training_accelerators <= gpu.gpus_per_node
    return transport.seconds(
        Route(
            num_bytes=num_bytes,
            gathered_s=num_bytes / ring_bytes_s(gpu, one_node=one_node) if spread else 0.0,
            compared_s=COMPARED_BYTES * trained / (training_accelerators * gpu.bandwidth),
            tensor_parallel=tensor_parallel,
            colocated=colocated,
            link=link,
            coefficients=coefficients,
        )
    )
