"""LoRA: adapters are trained, and only they travel to the engines; the weights of the model stay as they are.

A linear layer of a decoder layer, W of shape [O, I], becomes W x + (alpha / r) B (A x), with A [r, I] and B [O, r]. At
first B is 0, so version 0 is the model itself. These layers have no adapter: experts of mixtures, shared experts,
routers, embeddings and the output layer. Names and files follow Hugging Face's PEFT; vLLM reads them.

Source: Hu et al. 2021 (arXiv:2106.09685).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pipelinerl.config.train import LoraConfig

# Legend of shapes: O, I numbers out of and into a linear layer; r rank of an adapter.

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Names of the linear layers with an adapter."""
ADAPTED = re.compile(rf"(?!.*\.(?:shared_)?experts?\.).*\.layers\.\d+\..*\.({'|'.join(TARGETS)})")
"""Their whole names."""
PREFIX = "base_model.model."
"""Of PEFT's names."""
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_FOLDER = "adapter"
"""In the folder of a model that they have been added to."""
SEED = 0
"""Of the A of a new adapter: the same on all ranks."""


class LoraLinear(torch.nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    """A frozen linear layer with an adapter."""

    def __init__(self, base: torch.nn.Linear, lora: LoraConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.base, self.scale = base, lora.alpha / lora.rank
        like = {"dtype": base.weight.dtype, "device": base.weight.device}
        a_rI = torch.empty(lora.rank, base.in_features, **like)
        if a_rI.device.type != "meta":  # bounds as PEFT's
            bound = 1 / math.sqrt(base.in_features)
            a_rI.copy_(torch.empty(a_rI.shape).uniform_(-bound, bound, generator=generator))
        self.lora_A = torch.nn.Parameter(a_rI)
        self.lora_B = torch.nn.Parameter(torch.zeros(base.out_features, lora.rank, **like))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, shape [..., O]."""
        linear = torch.nn.functional.linear
        return self.base(x) + self.scale * linear(linear(x, self.lora_A), self.lora_B)


def add_adapters(policy: Any, lora: LoraConfig) -> None:
    """Freeze a model's weights and add new adapters."""
    policy.requires_grad_(False)
    policy.lora = lora
    generator = torch.Generator().manual_seed(SEED)
    for name, module in list(policy.named_modules()):
        if ADAPTED.fullmatch(name) and isinstance(module, torch.nn.Linear):
            policy.set_submodule(name, LoraLinear(module, lora, generator))


def has_adapters(policy: Any) -> bool:
    """Return whether a model has adapters."""
    return hasattr(policy, "lora")


def adapter_weights(policy: Any) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of the adapters by PEFT's names; empty if there are none."""
    return {
        f"{PREFIX}{name}.{part}.weight": getattr(module, part)
        for name, module in policy.named_modules()
        if isinstance(module, LoraLinear)
        for part in ("lora_A", "lora_B")
    }


def adapter_shapes(checkpoint: Mapping[str, tuple[int, ...]], rank: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of ``adapter_weights`` for a model whose checkpoint has these shapes."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in checkpoint.items():
        layer = name.removesuffix(".weight")
        if layer != name and ADAPTED.fullmatch(layer):
            shapes[f"{PREFIX}{layer}.lora_A.weight"] = (rank, shape[1])
            shapes[f"{PREFIX}{layer}.lora_B.weight"] = (shape[0], rank)
    return shapes


def save_adapters(folder: Path, tensors: Mapping[str, Any], lora: LoraConfig, *, model_path: str) -> None:
    """Write adapters as PEFT does, into a folder that is there."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model_path,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(TARGETS),
        "bias": "none",
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(folder / WEIGHTS_FILE))


def save_no_adapters(
    folder: Path, checkpoint: Mapping[str, tuple[int, ...]], lora: LoraConfig, *, model_path: str
) -> None:
    """Write adapters that change nothing. One layer is enough for vLLM; its A and B are 0."""
    shapes = adapter_shapes(checkpoint, lora.rank)
    first = {name: torch.zeros(shapes[name]) for name in list(shapes)[:2]}
    save_adapters(folder, first, lora, model_path=model_path)


def save_folded(policy: Any, folder: Path) -> None:
    """Write a model in the host's memory with its adapters added to the weights, in float32, and the adapters alone."""
    adapters, lora = adapter_weights(policy), policy.lora
    for name, module in list(policy.named_modules()):
        if isinstance(module, LoraLinear):
            weight = module.base.weight
            weight.data = (weight.float() + module.scale * module.lora_B.float() @ module.lora_A.float()).to(weight)
            policy.set_submodule(name, module.base)
    policy.save_pretrained(folder)
    (folder / ADAPTER_FOLDER).mkdir(exist_ok=True)
    save_adapters(folder / ADAPTER_FOLDER, adapters, lora, model_path=policy.name_or_path)
