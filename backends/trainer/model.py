"""The model that a rank trains: a causal language model on packed rows, with a value head if wanted.

A row has no padding and no attention mask: the boundaries of its sequences go to every layer, whose attention keeps
each to itself (``attention.py``). This needs a model whose only state between tokens is attention.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer

from backends.lora import adapter_weights, add_adapters, has_adapters, save_folded
from backends.trainer.attention import check_kernel, register_packed_attention, sequence_arguments
from backends.trainer.fused import Compiler, fuse
from backends.trainer.packing import PackedRow
from pipelinerl.rl.losses import Softmax, token_logprobs

# Legend of shapes: N tokens of a row; M answer tokens of it (see packing.py); V words of the vocabulary;
# H width of the model.

CONVERSIONS = "_weight_conversions"
"""Attribute of a model: from the names of its checkpoint to those in memory; [] where they are the same."""
BUCKET_BYTES = 2**30
"""Parameters that are whole on the device at a time while weights are copied."""
REDUCE_BUCKET = 100_000_000
"""Gradients that are reduced at once (numbers); a larger parameter goes alone."""
WHOLE_PARAMETERS = 1_000_000_000
"""Parameters that ZeRO-3 keeps whole at once, at most (numbers)."""
PREFETCHED_PARAMETERS = 250_000_000
"""Of these, put together before they are used: a layer of a 7B (numbers)."""
LAYER = re.compile(r".*?\.\d+\.")
"""Beginning of the names of a layer's weights: a checkpoint may hold the weights of one layer in other pieces."""
TRAINED_DTYPES: dict[str, torch.dtype] = {"cpu": torch.float32, "gpu": torch.bfloat16}


Split = Callable[[torch.nn.Module, torch.dtype], None]
"""Splits the parameters of a model that is whole on rank 0 over the ranks, or makes ready for it, in a type."""


class Sharding(Protocol):
    """How the parameters of a model are split over the ranks."""

    def empty(self, weight: Any) -> torch.Tensor:
        """Return a weight, whole, in the type of training, on torch's device ``meta``."""

    def whole(self, weights: dict[str, Any]) -> AbstractContextManager[dict[str, Any]]:
        """Return a context that has the weights whole; all ranks enter it together."""


class Unsplit:
    """Every rank has the model whole."""

    def empty(self, weight: Any) -> torch.Tensor:
        """Return it; see ``Sharding``."""
        return torch.empty(weight.shape, dtype=weight.dtype, device="meta")

    def whole(self, weights: dict[str, Any]) -> AbstractContextManager[dict[str, Any]]:
        """Return them; see ``Sharding``."""
        return contextlib.nullcontext(weights)


class OutputLayer(torch.nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    """The model's last layer, which gives log-probabilities of tokens and no logits.

    A module of its own, with the parameter and the name of the layer that it replaces: DeepSpeed puts parameters
    together around the forward and backward passes of modules.
    """

    def __init__(self, head: torch.nn.Linear, *, temperature: float, softmax: Softmax | None) -> None:
        super().__init__()
        self.weight = head.weight
        self._temperature = temperature
        self._softmax = softmax

    def forward(self, hidden_MH: torch.Tensor, answer_M: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logprob_M and entropy_M (nats), float32; see ``token_logprobs``."""
        return token_logprobs(hidden_MH, self.weight, answer_M, temperature=self._temperature, softmax=self._softmax)


class PolicyModel(torch.nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    """Log-probabilities, entropies, and values, of the answer tokens of a row."""

    def __init__(
        self, policy: torch.nn.Module, *, temperature: float, value_head: bool, compiler: Compiler | None = None
    ) -> None:
        """Replace the output layer; a value head is a linear map from the last hidden state, at first 0 everywhere.

        ``compiler``: of ``fuse``. None: every operation by itself.
        """
        super().__init__()
        softmax = None if compiler is None else fuse(policy, compiler)
        self.policy = policy
        self.sharding: Sharding = Unsplit()
        self.value_head: torch.nn.Linear | None = None
        head = OutputLayer(policy.get_output_embeddings(), temperature=temperature, softmax=softmax)
        policy.set_output_embeddings(head)
        if value_head:
            self.value_head = torch.nn.Linear(policy.config.hidden_size, 1, dtype=policy.dtype)
            torch.nn.init.zeros_(self.value_head.weight)
            torch.nn.init.zeros_(self.value_head.bias)

    def forward(
        self,
        *,
        token_N: torch.Tensor,
        position_N: torch.Tensor,
        boundary: torch.Tensor,
        longest: int,
        predictor_M: torch.Tensor,
        answer_M: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return logprob_M, entropy_M (nats) and, with a value head, value_M, all float32; see ``row_tensors``."""
        output = self.policy.base_model(
            input_ids=token_N[None],
            position_ids=position_N[None],
            use_cache=False,
            **sequence_arguments(boundary, longest),
        )
        hidden_MH = output.last_hidden_state[0, predictor_M]
        logprob_M, entropy_M = self.policy.get_output_embeddings()(hidden_MH, answer_M)
        # A copy: FSDP2 refuses outputs that are views.
        value_M = None if self.value_head is None else self.value_head(hidden_MH)[:, 0].to(torch.float32, copy=True)
        return logprob_M, entropy_M, value_M


def load_policy(model_path: str, *, device: Literal["cpu", "gpu"], split: Split | None = None) -> torch.nn.Module:
    """Load a causal language model in training mode, into the host's memory.

    Weights stored in the type of training are mapped from their file: the ranks of a machine share its pages. With
    ``split`` all ranks load it together, and none ever has all weights in its own memory; but rank 0 has experts whole
    that are fused while they are loaded. Dropout is off: the trained policy is the one that samples. ``ConfigError`` if
    the GPU has no kernel for packed rows.
    """
    if device == "gpu":
        check_kernel(torch.device("cuda:0"))
    config = AutoConfig.from_pretrained(model_path)
    if hasattr(config, "attention_dropout"):
        config.attention_dropout = 0.0
    dtype, attention = TRAINED_DTYPES[device], register_packed_attention()
    if split is None or torch.distributed.get_rank() == 0:
        model = AutoModelForCausalLM.from_pretrained(
            model_path,
            config=config,
            dtype=dtype if split is None else "auto",  # as it is stored: split parameter by parameter
            attn_implementation=attention,
        )
    else:
        with no_init_weights():  # nothing is written into this memory, so there is none
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        model.tie_weights(recompute_mapping=False)  # not done above; all ranks must have as many parameters
    if split is not None:
        split(model, dtype)
        buffers = [dict(model.named_buffers())]  # only rank 0 has read the checkpoint
        torch.distributed.broadcast_object_list(buffers, src=0)
        for name, buffer in model.named_buffers():
            buffer.data = buffers[0][name].to("cpu" if device == "cpu" else "cuda:0")
        model.config.dtype = dtype
        names = [getattr(model, CONVERSIONS, None)]  # only a model that was read from its files has them
        torch.distributed.broadcast_object_list(names)
        setattr(model, CONVERSIONS, names[0])
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()


def decoder_layers(policy: Any) -> list[Any]:
    """Return the layers that the backward pass can recompute, the first one first."""
    return [module for module in policy.modules() if isinstance(module, GradientCheckpointingLayer)]


def recompute(policy: Any, wanted: bool | int) -> int:
    """Have the backward pass recompute the first layers, so many or all (true); return their number.

    The first: their backward pass comes last, when what later layers keep is free again.
    """
    layers = decoder_layers(policy)
    number = len(layers) if wanted is True else min(wanted, len(layers))
    if wanted:
        policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers[number:]:
        layer.gradient_checkpointing = False
    return number


def row_tensors(row: PackedRow, device: torch.device) -> dict[str, Any]:
    """Return the arguments of ``PolicyModel.forward`` for a row; ``boundary`` and ``longest``: see ``attention.py``."""
    lengths_S = row.lengths_S
    tensors = {
        name: torch.tensor(getattr(row, name), device=device)
        for name in ("token_N", "position_N", "predictor_M", "answer_M")
    }
    boundary = torch.tensor(np.cumsum([0, *lengths_S]), dtype=torch.int32, device=device)
    return tensors | {"boundary": boundary, "longest": int(lengths_S.max())}


def trained_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return name and parameter of all that is trained."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def policy_weights(model: PolicyModel) -> dict[str, Any]:
    """Return parameters (tied ones once) and buffers (biases that balance experts), by name; no value head.

    Of a model with adapters only these, by PEFT's names.
    """
    policy = model.policy
    if has_adapters(policy):
        return adapter_weights(policy)
    saved = policy.state_dict().keys() - set(policy._keys_to_ignore_on_save or ())
    named = {**dict(policy.named_parameters()), **dict(policy.named_buffers())}
    return {name: weight for name, weight in named.items() if name in saved}


def as_saved(model: PolicyModel, weights: dict[str, Any]) -> dict[str, Any]:
    """Return weights, layers whole, as ``save_pretrained`` writes them; in memory experts of a layer are one tensor."""
    if getattr(model.policy, CONVERSIONS, None) == [] or has_adapters(model.policy):
        return weights
    saved: dict[str, Any] = revert_weight_conversion(model.policy, weights)
    return saved


def saved_buckets(model: PolicyModel) -> list[dict[str, torch.Tensor]]:
    """Return the parts of ``gathered`` on torch's device ``meta``."""
    return [as_saved(model, bucket) for bucket in _empty_buckets(model)]


def _empty_buckets(model: PolicyModel) -> Iterator[dict[str, torch.Tensor]]:
    return buckets({name: model.sharding.empty(weight) for name, weight in policy_weights(model).items()})


def saved_shapes(model: PolicyModel) -> dict[str, torch.Tensor]:
    """Return the tensors of ``gathered`` on torch's device ``meta``, all together."""
    return {name: weight for bucket in saved_buckets(model) for name, weight in bucket.items()}


def copy_policy(model: PolicyModel, *, receive: bool) -> dict[str, torch.Tensor]:
    """Copy the weights into the host's memory by checkpoint name; all ranks together. Empty unless ``receive``."""
    copies: dict[str, torch.Tensor] = {}
    for bucket in gathered(model, receive=receive):
        copies |= {name: weight.detach().to("cpu", copy=True) for name, weight in bucket.items()}
    return copies


def gathered(model: PolicyModel, *, receive: bool) -> Iterator[dict[str, Any]]:
    """Yield the language model's weights under the names of a checkpoint, whole; all ranks together.

    Where they are split about ``BUCKET_BYTES`` at a time are whole, at least a layer, until the next part.
    Ranks that do not ``receive`` get nothing.
    """
    weights = policy_weights(model)
    for bucket in _empty_buckets(model):
        with model.sharding.whole({name: weights[name] for name in bucket}) as whole:
            yield as_saved(model, whole) if receive else {}


def buckets(weights: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield weights in parts of ``BUCKET_BYTES``, or of a layer that is larger; a layer stays together."""
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, weight in weights.items():
        layer = LAYER.match(name)
        layers.setdefault(layer[0] if layer else name, {})[name] = weight
    bucket: dict[str, torch.Tensor] = {}
    size_bytes = 0
    for layer_weights in layers.values():
        more_bytes = sum(one.nbytes for one in layer_weights.values())
        if bucket and size_bytes + more_bytes > BUCKET_BYTES:
            yield bucket
            bucket, size_bytes = {}, 0
        bucket |= layer_weights
        size_bytes += more_bytes
    yield bucket


def save_policy(model: PolicyModel, copies: dict[str, torch.Tensor], folder: Path) -> None:
    """Write the language model with the weights of ``copy_policy`` in Hugging Face format, without tokenizer.

    Adapters are added to the weights of the model at the start.
    """
    dtype = next(iter(copies.values())).dtype  # masters have another
    if has_adapters(model.policy):
        whole = AutoModelForCausalLM.from_pretrained(model.policy.name_or_path, dtype=dtype)
        add_adapters(whole, model.policy.lora)
        for name, weight in adapter_weights(whole).items():
            weight.data = copies[name]
        save_folded(whole, folder)
        return
    policy = model.policy
    policy.save_pretrained(folder, state_dict=copies, save_original_format=False)  # they have it already
    policy.config.dtype = dtype
    policy.config.save_pretrained(folder)
