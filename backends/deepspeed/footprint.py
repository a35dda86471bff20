"""What a rank of the trainer needs of a GPU's memory, counted before anything starts.

The model is made on torch's device ``meta``, where tensors have shapes and no numbers, and trained on one pack. All
that lives meanwhile is counted; attention is the variable-length kernel's own description of itself. Two seconds for
a 7B. What DeepSpeed holds besides follows from its settings. What an allocator wastes and what CUDA and NCCL take for
themselves is in the share of memory that is not given out (``memory_share``).

The planner's formula (``pipelinerl/hardware/memory.py``) is for trainers in general. For a 7B with activation
checkpointing it is 3 % below what is counted here, without it 15 %: it is meant for fused norms, while those of
transformers keep twice as much. Its gradients are of 2 bytes; ours are added up in float32.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from backends.deepspeed.attention import register_packed_attention, sequence_arguments
from backends.deepspeed.live_bytes import LiveBytes
from backends.deepspeed.policy_model import REDUCE_BUCKET, WHOLE_PARAMETERS, PolicyModel
from backends.preflight import trainer_ranks
from pipelinerl.config.resolve import named_hardware
from pipelinerl.config.run import RunConfig
from pipelinerl.config.train import TrainerConfig
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.coefficients import coefficients

ASSUMED_MEMORY_BYTES = 80e9
"""Memory of a GPU where neither the run file nor this machine tells (bytes): an H100."""
SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers that keep packed sequences apart."""
PACK_SIZES = 16
"""Sizes of packs among which the largest that fits is looked for (count)."""


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of the forward and backward pass of one pack, beside weights and gradients."""

    kept: int
    """From the forward pass for the backward pass."""
    peak: int
    """Most at once, the gradients of a layer included."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one rank."""

    states: float
    """Weights (bf16), gradients, master weights and two Adam moments (float32), as far as ZeRO spreads them."""
    workspace: float
    """Parameters that ZeRO-3 has put together, gradients on their way, a reference model."""
    activations: float
    """See ``Activations.peak``."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.states + self.workspace + self.activations


def pack_activations(policy: Any, pack_tokens: int, *, checkpointing: bool, value_head: bool = False) -> Activations:
    """Count what one sequence of ``pack_tokens`` tokens, nearly all of them generated, needs to be trained on.

    Args:
        policy: On the device ``meta``, in the type of its parameters.
        pack_tokens: Tokens of the pack.
        checkpointing: Whether layers are computed again in the backward pass.
        value_head: Whether there is one.
    """
    if checkpointing:
        policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = PolicyModel(policy, temperature=1.0, value_head=value_head).to("meta")
    for parameter in model.parameters():  # DeepSpeed takes a gradient away when it is made
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    tokens, answers = (torch.zeros(num, dtype=torch.int64, device="meta") for num in (pack_tokens, pack_tokens - 1))
    row = {"token_N": tokens, "position_N": tokens, "predictor_M": answers, "answer_M": answers}
    boundary = torch.zeros(2, dtype=torch.int32, device="meta")
    known = [*model.parameters(), *model.buffers(), tokens, answers, boundary]
    with LiveBytes(known) as live:
        logprob_M, entropy_M, value_M = model(**row, boundary=boundary, longest=pack_tokens)
        kept = live.now
        (logprob_M.sum() if value_M is None else (logprob_M + value_M).sum()).backward()
    del entropy_M
    return Activations(kept, live.peak)


def check_trainable(model_config: Any) -> None:
    """Check that the trainer computes what the model is.

    Nothing but attention may carry state from token to token, and logits must be last hidden states times one matrix.

    Raises:
        ConfigError: If it is otherwise, or the model cannot be made.
    """
    others = sorted(set(getattr(model_config, "layer_types", None) or ()) - SUPPORTED_LAYERS)
    if others:
        raise ConfigError(f"train.model.path: the trainer packs sequences, and layers of {others[0]} would mix them")
    try:
        plain = _logits_are_plain(on_meta(model_config, torch.bfloat16))
    except (RuntimeError, TypeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"train.model.path: the trainer cannot use model_type={model_config.model_type!r}: {reason}"
        ) from None
    if not plain:
        raise ConfigError(
            "train.model.path: the trainer computes logits as last hidden state times output layer; those of "
            f"model_type={model_config.model_type!r} are scaled, capped or biased besides, not supported"
        )


def _logits_are_plain(policy: Any) -> bool:
    head, seen = policy.get_output_embeddings(), dict[str, Any]()
    policy.base_model.register_forward_hook(lambda _, __, output: seen.update(hidden=output.last_hidden_state))
    head.register_forward_hook(lambda _, inputs, output: seen.update(input=inputs[0], logits=output))
    tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    boundary = torch.zeros(2, dtype=torch.int32, device="meta")
    with torch.no_grad():
        output = policy(input_ids=tokens, position_ids=tokens, use_cache=False, **sequence_arguments(boundary, 2))
    before, after = (seen[name].untyped_storage()._cdata for name in ("hidden", "input"))
    return getattr(head, "bias", None) is None and before == after and output.logits is seen["logits"]


def on_meta(model_config: Any, dtype: torch.dtype) -> Any:
    """Return the model on torch's device ``meta``, where it has shapes and no numbers."""
    with torch.device("meta"):
        attention = register_packed_attention()
        return AutoModelForCausalLM.from_config(model_config, dtype=dtype, attn_implementation=attention).train()


def footprint(
    model_config: Any, trainer: TrainerConfig, *, num_ranks: int, value_head: bool, reference: bool
) -> Footprint:
    """Return what a rank needs on a GPU; see the head of this file.

    Args:
        model_config: Of transformers.
        trainer: ZeRO's stage, pack, checkpointing.
        num_ranks: Ranks that ZeRO spreads the states over (count).
        value_head: Whether there is one.
        reference: Whether a replica of the reference model is on the same GPU.
    """
    policy = on_meta(model_config, torch.bfloat16)
    numels = [parameter.numel() for parameter in policy.parameters()]
    num, stage = sum(numels), trainer.zero_stage
    spread = [num_ranks if stage >= least else 1 for least in (3, 2, 1)]
    workspace = (2 + 4) * min(num, max(REDUCE_BUCKET, *numels))  # in the type of the weights, and in float32
    if stage == 3:
        workspace += 2 * min(num, WHOLE_PARAMETERS)
    if reference:
        workspace += 2 * num
    activations = pack_activations(
        policy, trainer.pack_tokens, checkpointing=trainer.activation_checkpointing, value_head=value_head
    )
    states = 2 * num / spread[0] + 4 * num / spread[1] + 12 * num / spread[2]
    return Footprint(states, workspace, activations.peak)


def footprint_of(config: RunConfig, model_config: Any, **changed: Any) -> Footprint:
    """Return what a rank of a run needs on a GPU, with some keys of ``train.trainer`` changed."""
    assert config.train is not None
    return footprint(
        model_config,
        config.train.trainer.model_copy(update=changed),
        num_ranks=trainer_ranks(config),
        value_head=config.train.loss.value_coefficient > 0,
        reference=config.train.loss.kl_coefficient > 0,
    )


def check_memory(config: RunConfig, model_config: Any) -> None:
    """Check that a rank of the trainer fits into the memory of its GPU.

    Raises:
        ConfigError: If it does not; it names the key to change first.
    """
    assert config.train is not None
    trainer, memory, whose = config.train.trainer, *_gpu_memory(config)
    usable = coefficients(config.hardware.level).memory_share * memory

    needs = partial(footprint_of, config, model_config)
    now = needs()
    if now.total <= usable:
        return
    key, value, then = _remedy(config, needs, usable)
    raise ConfigError(
        f"train.trainer.{key} must be {value}, got {key}={str(getattr(trainer, key)).lower()}: training on a pack of "
        f"{trainer.pack_tokens} tokens needs {now.total / 1e9:.1f} GB a GPU (activations {now.activations / 1e9:.1f}, "
        f"states {now.states / 1e9:.1f}, workspace {now.workspace / 1e9:.1f}); of the {memory / 1e9:.0f} GB of {whose} "
        f"it may use {usable / 1e9:.0f}{then}"
    )


def _remedy(config: RunConfig, needs: Callable[..., Footprint], usable: float) -> tuple[str, str, str]:
    """Return the key to change, what it must be, and what it would need then."""
    assert config.train is not None
    trainer, best = config.train.trainer, {"activation_checkpointing": True, "zero_stage": 3}
    if not trainer.activation_checkpointing:
        total = needs(activation_checkpointing=True).total
        if total <= usable:
            return "activation_checkpointing", "true", f"; with it {total / 1e9:.1f} GB are needed"
    if trainer.zero_stage < 3:
        total = needs(**best).total
        if total <= usable:
            return "zero_stage", "3", f"; with it {total / 1e9:.1f} GB are needed"
    longest = config.room_tokens
    if needs(**best, pack_tokens=longest).total > usable:
        then = (
            f"; even {longest} tokens, the longest rollout, do not fit: more GPUs (cluster.accelerators) are needed, "
        )
        return "pack_tokens", "smaller", then + "or shorter answers (workload.length.max)"
    packs = range(longest, trainer.pack_tokens, 1 + (trainer.pack_tokens - longest) // PACK_SIZES)
    fitting = bisect.bisect_right(packs, usable, key=lambda tokens: needs(**best, pack_tokens=tokens).total)
    return "pack_tokens", f"at most {packs[fitting - 1]} with zero_stage=3 and activation_checkpointing=true", ""


def _gpu_memory(config: RunConfig) -> tuple[float, str]:
    """Return the memory of a GPU (bytes), and whose it is."""
    named = named_hardware(config.hardware)
    if named is not None:
        return named[0].memory_bytes, f"hardware.gpu={config.hardware.gpu!r}"
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory, torch.cuda.get_device_name(0)
    return ASSUMED_MEMORY_BYTES, "an H100 (assumed; hardware.gpu with hardware.model names another)"
