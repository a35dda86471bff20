"""GPU memory of a trainer rank, counted before anything starts.

The model is made on torch's device ``meta`` and trained on one pack (two seconds for a 7B); all that lives meanwhile is
counted; attention is the variable-length kernel's own description of itself. DeepSpeed's and FSDP2's share follow from
their settings; waste of the allocator, CUDA and NCCL are outside of ``memory_share``. Routers are taken to send as many
tokens to every rank that shares the experts.

The planner's formula (``pipelinerl/hardware/derive.py``) is for trainers in general: for a 7B with activation
checkpointing it is 3 % below, without it 18 % above what is fused and 15 % below what is not. It assumes gradients of 2
bytes, while ours are added up in float32.
"""

from __future__ import annotations

import bisect
import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import Linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import AutoConfig, AutoModelForCausalLM

from backends.interface import Share
from backends.lora import TARGETS, adapter_shapes, adapter_weights, add_adapters
from backends.this_machine import memory_bytes
from backends.trainer.attention import register_packed_attention, sequence_arguments
from backends.trainer.fsdp2.experts import experts_of
from backends.trainer.model import (
    REDUCE_BUCKET,
    WHOLE_PARAMETERS,
    PolicyModel,
    buckets,
    decoder_layers,
    policy_weights,
    recompute,
    saved_shapes,
    trained_parameters,
)
from backends.trainer.replay import Replay
from backends.trainer.sequence_parallel import SIZES, SequenceGroup, divides, spread
from backends.transfer.verify import checkpoint_shapes
from pipelinerl.config.resolve import named_hardware
from pipelinerl.config.run import RunConfig
from pipelinerl.config.train import LoraConfig, TrainerConfig
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.coefficients import coefficients
from pipelinerl.hardware.transport import BF16_BYTES, BROADCAST, FILE, HostShare
from pipelinerl.util.user_code import first_line


class LiveBytes(TorchDispatchMode):  # type: ignore[misc]  # torch is Any to mypy
    """Counts the bytes of all tensors that are made while it is entered, for as long as they live.

    Temporary memory inside an operation is not seen, nor fragmentation. Views of ``known`` tensors count nothing.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._within = False
        self._known = [tensor.untyped_storage() for tensor in known]  # held, so that none takes the place of another
        self._seen = {id(storage) for storage in self._known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count its outputs."""
        made = func(*args, **(kwargs or {}))
        if not self._within:
            tree_map_only(torch.Tensor, self._count, made)
        return made

    def as_one(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function as one operation."""
        self._within = True
        try:
            made = function(*args)
        finally:
            self._within = False
        return tree_map_only(torch.Tensor, self._count, made)

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in self._seen:
            self._seen.add(id(storage))
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, id(storage), storage.nbytes())
        return tensor

    def _free(self, name: int, num_bytes: int) -> None:
        self._seen.discard(name)
        self.now -= num_bytes


ASSUMED_MEMORY_BYTES = 80e9
"""Of an unknown GPU: an H100."""
SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers that keep packed sequences apart."""
PACK_SIZES = 16
"""Among which the largest that fits is looked for."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one rank."""

    states: float
    """Weights (bf16), gradients, master weights and two Adam moments (float32), as far as they are spread."""
    workspace: float
    """Parameters that have been put together, gradients on their way, a reference model, published weights."""
    activations: float
    sending: float = 0.0
    """A gathered bucket of weights, and a rank's new part of it with the comparison, while nothing is trained."""

    @property
    def total(self) -> float:
        """Peak."""
        return self.states + self.workspace + max(self.activations, self.sending)


def pack_activations(
    policy: Any,
    pack_tokens: int,
    *,
    checkpointing: bool | int,
    value_head: bool = False,
    backward: bool = True,
    sequence_parallel: int = 1,
    fused: bool = False,
) -> int:
    """Train on one sequence of so many tokens, nearly all generated; return the memory needed (bytes).

    Weights and gradients do not count, but for the gradients of one layer. ``policy`` is best on ``meta``, where it
    may be one of ``sequence_parallel`` ranks of a sequence of so many times these tokens.
    """
    recompute(policy, checkpointing)
    if sequence_parallel > 1:
        spread(policy, SequenceGroup(sequence_parallel))
    live: LiveBytes
    device = policy.device
    compiler = (lambda function: lambda *args: live.as_one(function, *args)) if fused else None
    model = PolicyModel(policy, temperature=1.0, value_head=value_head, compiler=compiler).to(device)
    for _, parameter in trained_parameters(model):  # DeepSpeed takes a gradient away when it is made
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    tokens, answers = (torch.zeros(num, dtype=torch.int64, device=device) for num in (pack_tokens, pack_tokens - 1))
    row = {"token_N": tokens, "position_N": tokens, "predictor_M": answers, "answer_M": answers}
    longest = pack_tokens * sequence_parallel
    boundary = torch.tensor([0, longest], dtype=torch.int32, device=device)
    known = [*model.parameters(), *model.buffers(), tokens, answers, boundary]
    with torch.set_grad_enabled(backward), LiveBytes(known) as live:
        logprob_M, _, value_M = model(**row, boundary=boundary, longest=longest)
        if backward:
            (logprob_M.sum() if value_M is None else (logprob_M + value_M).sum()).backward()
    return int(live.peak)


def check_trainable(model_config: Any) -> None:
    """Check that the trainer implements the model; else ``ConfigError``.

    Nothing but attention may carry state from token to token, and logits must be last hidden states times one matrix.
    """
    others = sorted(set(getattr(model_config.get_text_config(), "layer_types", None) or ()) - SUPPORTED_LAYERS)
    if others:
        raise ConfigError(f"train.model.path: the trainer packs sequences, and layers of {others[0]} would mix them")
    try:
        plain = _logits_are_plain(on_meta(model_config, torch.bfloat16))
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise ConfigError(
            f"train.model.path: the trainer cannot use model_type={model_config.model_type!r}: {first_line(error)}"
        ) from None
    if not plain:
        raise ConfigError(
            "train.model.path: the trainer computes logits as last hidden state times output layer; those of "
            f"model_type={model_config.model_type!r} are scaled, capped or biased besides, not supported"
        )


def check_routers(model_config: Any) -> None:
    """Check that the routers of a model can replay the engine's choices; else ``ConfigError``."""
    policy = on_meta(model_config, torch.bfloat16)
    replay = Replay(policy)
    if replay.num_experts:
        shape = (2, len(decoder_layers(policy)), policy.config.num_experts_per_tok)
        replay.routed_NLK = torch.zeros(shape, dtype=torch.int64, device="meta")
        _of_two_tokens(policy.base_model)
    if not replay.replaced:
        why = "has routers that do not choose by topk" if replay.num_experts else "has no experts"
        raise ConfigError(
            f"train.trainer.router_replay must be false for a model that {why}, model_type="
            f"{model_config.model_type!r}, got true"
        )


ROUTERS = ("gate", "shared_expert_gate", "router")
"""Names of linear layers of mixtures that have no adapter."""


def check_adapters(model_config: Any, path: str, lora: LoraConfig) -> None:
    """Check that all linear layers of decoder layers can have adapters, as named in the files; ``ConfigError``."""
    policy = on_meta(model_config, torch.bfloat16)
    add_adapters(policy, lora)
    linear = [name for layer in decoder_layers(policy) for name, one in layer.named_modules() if type(one) is Linear]
    others = {name for name in linear if not name.endswith((".base", *ROUTERS)) and "expert" not in name}
    kind, why = f"model_type={model_config.model_type!r}", ""
    if others:
        why = f"its layers have {', '.join(sorted(others)[:3])} besides"
    elif {name: tuple(one.shape) for name, one in adapter_weights(policy).items()} != adapter_shapes(
        checkpoint_shapes(path), lora.rank
    ):
        why = "its layers have other names in memory than in its files"
    if why or not linear:
        raise ConfigError(f"train.lora is for models with layers {', '.join(TARGETS)}, got {kind}: {why or 'none'}")


def _logits_are_plain(policy: Any) -> bool:
    head, seen = policy.get_output_embeddings(), dict[str, Any]()
    policy.base_model.register_forward_hook(lambda _, __, output: seen.update(hidden=output.last_hidden_state))
    head.register_forward_hook(lambda _, inputs, output: seen.update(input=inputs[0], logits=output))
    output = _of_two_tokens(policy)
    before, after = (seen[name].untyped_storage()._cdata for name in ("hidden", "input"))
    return getattr(head, "bias", None) is None and before == after and output.logits is seen["logits"]


def _of_two_tokens(model: Any) -> Any:
    """Return the output of a model on ``meta`` for two tokens."""
    tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    boundary = torch.zeros(2, dtype=torch.int32, device="meta")
    with torch.no_grad():
        return model(input_ids=tokens, position_ids=tokens, use_cache=False, **sequence_arguments(boundary, 2))


def on_meta(model_config: Any, dtype: torch.dtype) -> Any:
    """Return the model on torch's device ``meta``."""
    with torch.device("meta"):
        attention = register_packed_attention()
        return AutoModelForCausalLM.from_config(model_config, dtype=dtype, attn_implementation=attention).train()


def of_deepspeed(policy: Any, trainer: TrainerConfig, ranks: int) -> Footprint:
    """Return DeepSpeed's own share: ``activations`` are the weights that it keeps between the passes."""
    numels = [parameter.numel() for _, parameter in trained_parameters(policy)]
    trained, stage = sum(numels), trainer.zero_stage
    num = sum(parameter.numel() for parameter in policy.parameters())
    spread = [ranks if stage >= least else 1 for least in (3, 2, 1)]
    in_weights = 2 * (1 + (stage == 2))  # with ZeRO-2 one is filled while another is reduced
    workspace = (in_weights + 4) * min(trained, max(REDUCE_BUCKET, *numels))  # in the weights' type, and in float32
    kept = 0.0
    if stage == 3:  # weights that were gathered for a layer stay until its backward pass, unless it is recomputed
        workspace += 2 * min(num, WHOLE_PARAMETERS)
        layers = [layer for layer in decoder_layers(policy) if not layer.gradient_checkpointing]
        kept = 2 * sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    return Footprint(2 * num / spread[0] + 4 * trained / spread[1] + 12 * trained / spread[2], workspace, kept)


def of_fsdp2(policy: Any, trainer: TrainerConfig, ranks: int) -> Footprint:
    """Return FSDP2's own share.

    In the backward pass these are whole at once: the weights of two layers, the gradient of one, and the gradient of
    the layer before it in float32, which is being reduced. Weights outside the layers stay whole, with their gradient,
    until the end of the pass; they are reduced in float32 when activations and layers are gone (``sending``).
    ``activations`` hold the tokens that travel to experts and back.
    """
    each, layers = trainer.expert_parallel, decoder_layers(policy)
    parts = {id(one): each for layer in layers for experts in experts_of(layer) for one in experts.parameters()}
    states = 0.0
    for one in policy.parameters():
        rows, sharers = (number // parts.get(id(one), 1) for number in (len(one), ranks))
        states += (16 if one.requires_grad else 4) * one.numel() / len(one) * -(-rows // sharers)
    whole = [sum(one.numel() / parts.get(id(one), 1) for one in layer.parameters()) for layer in layers]
    in_layers = {id(one) for layer in layers for one in layer.parameters()}
    others = sum(one.numel() for one in policy.parameters() if id(one) not in in_layers)
    moved = 0.0
    if each > 1:
        moved = 2 * 2 * policy.config.num_experts_per_tok * policy.config.hidden_size * trainer.pack_tokens
    return Footprint(states, (2 + 2 + 2 + 4) * max(whole) + (2 + 2) * others, moved, 4 * others)


Own = Callable[[Any, TrainerConfig, int], Footprint]
"""A trainer's own share: ``of_deepspeed``, ``of_fsdp2``."""


def footprint(config: RunConfig, model_config: Any, own: Own = of_deepspeed, **changed: Any) -> Footprint:
    """Return a rank's GPU memory, with some keys of ``train.trainer`` changed; see the head of this file."""
    trainer, loss, ranks = (
        config.train_table.trainer.model_copy(update=changed),
        config.train_table.loss,
        config.trainer_ranks,
    )
    policy = on_meta(model_config, torch.bfloat16)
    if config.train_table.lora is not None:
        add_adapters(policy, config.train_table.lora)
    workspace, fused = 0.0, trainer.fuses(config.train_table.device)
    if loss.needs_reference:  # a replica of the reference model, which keeps what its forward passes have taken
        teacher = None if loss.teacher is None else AutoConfig.from_pretrained(loss.teacher)
        reference = on_meta(teacher or model_config, torch.bfloat16)
        workspace += 2 * sum(parameter.numel() for parameter in reference.parameters())
        workspace += pack_activations(reference, trainer.row_tokens, checkpointing=False, backward=False, fused=fused)
    activations = pack_activations(
        policy,
        trainer.pack_tokens,
        checkpointing=trainer.activation_checkpointing,
        value_head=loss.value_coefficient > 0,
        sequence_parallel=trainer.sequence_parallel,
        fused=fused,
    )
    share = own(policy, trainer, ranks)  # after ``pack_activations`` has chosen the layers to recompute
    transport = config.train_table.chosen_transport(colocated=config.colocated)
    trained = sum(parameter.numel() for _, parameter in trained_parameters(policy))
    sharded = transport.keeps_shards / ranks
    bucket = max(sum(one.nbytes for one in part.values()) for part in buckets(dict(trained_parameters(policy))))
    sending = ((trainer.zero_stage == 3) + 2 * sharded) * bucket  # of a shard the new one, and its comparison
    workspace += share.workspace + 2 * trained * sharded
    return Footprint(share.states, workspace, activations + share.activations, max(sending, share.sending))


def recomputed_layers(config: RunConfig, model_config: Any, memory: float, own: Own = of_deepspeed) -> int:
    """Return the fewest layers to recompute for a rank to fit into a GPU (bytes); all, where that is not enough."""
    values = coefficients(config.hardware.level)
    usable = values.memory_share * memory - config.colocated * values.memory_reserve_bytes  # of a sleeping engine

    def fits(number: int) -> bool:
        return footprint(config, model_config, own, activation_checkpointing=number).total <= usable

    return bisect.bisect_left(range(len(decoder_layers(on_meta(model_config, torch.bfloat16)))), True, key=fits)


def check_memory(config: RunConfig, model_config: Any, own: Own = of_deepspeed) -> None:
    """Check that a rank fits into the memory of its GPU; the ``ConfigError`` names the key to change first."""
    trainer, memory, whose = config.train_table.trainer, *_gpu_memory(config)
    usable = coefficients(config.hardware.level).memory_share * memory

    needs = partial(footprint, config, model_config, own)
    now = needs()
    if now.total <= usable:
        return
    shares = partial(divides, config, model_config)
    key, value, then = _remedy(config, needs, usable, shares)
    raise ConfigError(
        f"train.trainer.{key} must be {value}, got {key}={str(getattr(trainer, key)).lower()}: training on a pack of "
        f"{trainer.pack_tokens} tokens needs {now.total / 1e9:.1f} GB a GPU (activations {now.activations / 1e9:.1f}, "
        f"states {now.states / 1e9:.1f}, workspace {now.workspace / 1e9:.1f}); of the {memory / 1e9:.0f} GB of {whose} "
        f"it may use {usable / 1e9:.0f}{then}"
    )


def _remedy(
    config: RunConfig, needs: Callable[..., Footprint], usable: float, shares: Callable[[int], bool]
) -> tuple[str, str, str]:
    trainer, best = config.train_table.trainer, {"activation_checkpointing": True, "zero_stage": 3}
    if trainer.activation_checkpointing is not True:
        total = needs(activation_checkpointing=True).total
        if total <= usable:
            return "activation_checkpointing", "true", f"; with it {total / 1e9:.1f} GB are needed"
    if trainer.zero_stage < 3:
        total = needs(**best).total
        if total <= usable:
            return "zero_stage", "3", f"; with it {total / 1e9:.1f} GB are needed"
    own, longest = trainer.sequence_parallel, -(-config.room_tokens // trainer.sequence_parallel)
    if needs(**best, pack_tokens=longest).total > usable:
        for size in (size for size in SIZES if size > own and shares(size)):
            part = -(-config.room_tokens // size)
            if needs(**best, pack_tokens=part, sequence_parallel=size).total <= usable:
                also = f"with pack_tokens={part}, zero_stage=3 and activation_checkpointing=true"
                return "sequence_parallel", f"{size} {also}", ""
        then = (
            f"; even {longest} tokens, the longest rollout, do not fit: more GPUs (cluster.accelerators) are needed, "
        )
        return "pack_tokens", "smaller", then + "or shorter answers (workload.length.max)"
    packs = range(longest, trainer.pack_tokens, 1 + (trainer.pack_tokens - longest) // PACK_SIZES)
    fitting = bisect.bisect_right(packs, usable, key=lambda tokens: needs(**best, pack_tokens=tokens).total)
    return "pack_tokens", f"at most {packs[fitting - 1]} with zero_stage=3 and activation_checkpointing=true", ""


def _gpu_memory(config: RunConfig) -> tuple[float, str]:
    if (named := named_hardware(config.hardware)) is not None:
        return named[0].memory_bytes, f"hardware.gpu={config.hardware.gpu!r}"
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory, torch.cuda.get_device_name(0)
    return ASSUMED_MEMORY_BYTES, "an H100 (assumed; hardware.gpu with hardware.model names another)"


# --------------------------------------------------------------------------------- host memory
# Weights in transfer, the states of the ranks while a checkpoint is written, and parameters that a rank holds whole
# while it loads. Checked before Ray starts where all runs on this machine, else when Ray has placed the run.

SHARED_MEMORY = "/dev/shm"
"""For files of weights and NCCL's buffers."""
STATE_BYTES = 12
"""Of a parameter in a checkpoint: float32 master and two moments."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory of a run's parts on one machine (bytes)."""

    weights: float
    """Rank 0's snapshots, and weights arriving for engines."""
    checkpoint: float
    """Copies of the states of the ranks."""
    loading: float
    """Fused experts, whole on a rank while it loads, and freed before the rest is allocated."""

    @property
    def total(self) -> float:
        """Peak."""
        return max(self.loading, self.weights + self.checkpoint)


def shape_of(model_config: Any) -> PolicyModel:
    """Return the model without weights: it takes a second, so it is made once for all machines."""
    return PolicyModel(on_meta(model_config, torch.bfloat16), temperature=1.0, value_head=False)


def host_memory(config: RunConfig, model: PolicyModel, share: Share) -> HostMemory:
    """Return the host memory of a machine with this share of a run in bfloat16; ``model`` is from ``shape_of``."""
    shapes = {name: tuple(weight.shape) for name, weight in saved_shapes(model).items()}
    trained = sum(parameter.numel() for parameter in model.parameters())
    if config.train_table.lora is not None:
        shapes = adapter_shapes(shapes, config.train_table.lora.rank)
        trained = sum(map(math.prod, shapes.values()))
    transfer = HostShare(
        num_bytes=BF16_BYTES * sum(map(math.prod, shapes.values())),
        sends=share.leads,
        workers=share.workers,
        folder_in_memory=config.train_table.weights_folder.startswith(SHARED_MEMORY),
    )
    transport = config.train_table.chosen_transport(colocated=config.colocated)
    readers = int(share.leads) if config.train_table.trainer.zero_stage == 3 else share.ranks
    fused = readers * _fused_bytes(model)
    if config.train_table.loss.needs_reference:
        teacher = config.train_table.loss.teacher
        other = model if teacher is None else shape_of(AutoConfig.from_pretrained(teacher))
        fused += share.ranks * _fused_bytes(other)
    state = STATE_BYTES * trained
    return HostMemory(transport.host_bytes(transfer), state * share.ranks / config.trainer_ranks, fused)


def _fused_bytes(model: PolicyModel) -> int:
    """Return the bytes of weights that are put together while a model is loaded."""
    saved = saved_shapes(model)
    return sum(weight.nbytes for name, weight in policy_weights(model).items() if name not in saved)


def check_host_memory(config: RunConfig, model_config: Any, shares: Iterable[Share] | None = None) -> None:
    """Check the machines' host memory (``shares`` None: this one, in a private Ray); ``ConfigError`` names a key."""
    if shares is None:
        engines, ranks = config.generation_accelerators, config.trainer_ranks
        shares = [Share("this machine", memory_bytes(), engines, ranks, leads=True)]
        otherwise = "train.ray_address must lead to a cluster of more machines"
    else:
        otherwise = "train.ray_address must lead to machines of more memory"
    model = shape_of(model_config)
    for share in shares:
        needs = host_memory(config, model, share)
        if needs.total <= share.memory:
            continue
        what = (
            f"{needs.total / 1e9:.1f} GB of the memory of {share.machine} are needed, of {share.memory / 1e9:.0f} GB "
            f"(weights on their way {needs.weights / 1e9:.1f}, a checkpoint's copy {needs.checkpoint / 1e9:.1f}; "
            f"before, fused experts while they are loaded {needs.loading / 1e9:.1f})"
        )
        split = config.train_table.trainer.model_copy(update={"zero_stage": 3})
        remedies: dict[str, dict[str, Any]] = {"train.trainer.zero_stage must be 3": {"trainer": split}}
        if not config.colocated:
            remedies[f"train.transport must be {BROADCAST.name!r}"] = {"transport": BROADCAST.name}
        on_disk = f"train.transport must be {FILE.name!r} and train.weights_folder on a disk"
        remedies[on_disk] = {"transport": FILE.name, "weights_folder": "on a disk"}
        for remedy, changed in remedies.items():
            other = config.model_copy(update={"train": config.train_table.model_copy(update=changed)})
            if host_memory(other, model, share).total <= share.memory:
                raise ConfigError(f"{remedy}: {what}")
        raise ConfigError(f"{otherwise}: {what}")
