"""Counts what a forward and backward pass of the trainer multiplies and moves, eager and fused, without a GPU.

    python scripts/trainer_traffic.py [--ranks 8] [--model Qwen2.5-7B]

Printed: TFLOP of products, GB that all other operations read and write, and seconds of both, one after the other, at
``FLOP_PER_S`` and ``BYTES_PER_S``. Counted on torch's device ``meta``: a layer, and all but the layers. A fused
function counts as its inputs and outputs. Reduction of gradients and the optimizer are not counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import AutoConfig

from backends.trainer.footprint import on_meta, recomputed_layers
from backends.trainer.model import PolicyModel, recompute
from pipelinerl.config.run import load_run

FLOP_PER_S, BYTES_PER_S = 600e12, 2.6e12
"""Of an H100, in large products and in kernels that move memory."""
MEMORY_BYTES = 80 * 2**30
TOKENS, LONGEST = 16_384, 2048
"""Tokens of a pack, and of each sequence."""
EXAMPLE = Path(__file__).parents[1] / "examples" / "qwen7b_128_h100.toml"
DENSE = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size vocab_size"
MODELS: dict[str, dict[str, Any]] = {
    name: {"model_type": kind} | dict(zip(DENSE.split(), sizes, strict=True)) | more
    for name, kind, sizes, more in (
        ("Qwen2.5-1.5B", "qwen2", (1536, 28, 12, 2, 8960, 151_936), {"tie_word_embeddings": True}),
        ("Qwen2.5-7B", "qwen2", (3584, 28, 28, 4, 18_944, 152_064), {}),
        ("Qwen2.5-32B", "qwen2", (5120, 64, 40, 8, 27_648, 152_064), {}),
        (
            "Qwen3-30B-A3B", "qwen3_moe", (2048, 48, 32, 4, 6144, 151_936),
            {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128},
        ),
    )
}  # fmt: skip
PARTLY_READ = {torch.ops.aten.embedding, torch.ops.aten.gather, torch.ops.aten.index, torch.ops.aten.scatter_add_}
"""Of their first tensor no more than they give back, or are given."""
MOVES_NOTHING = {"_unsafe_view", "empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided"}
"""Beside views."""


class Counted(TorchDispatchMode):
    """Counts the FLOP of products, attention's causal ones too, and the bytes that all else reads and writes."""

    flop = moved_bytes = 0
    _within = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._within or (flop := product_flop(func, args, kwargs or {}, result)):
            self.flop += 0 if self._within else flop
        elif func._overloadpacket.__name__ not in MOVES_NOTHING and not any(
            one.alias_info and not one.alias_info.is_write for one in func._schema.arguments
        ):
            self._count((args[func._overloadpacket in PARTLY_READ :], kwargs, result))
        return result

    def as_one(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that reads its inputs and writes its outputs once."""
        self._within = True
        try:
            result = function(*args)
        finally:
            self._within = False
        self._count((args, result))
        return result

    def _count(self, tree: Any) -> None:
        tensors = [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]
        self.moved_bytes += sum(min(one.nbytes, one.untyped_storage().nbytes()) for one in tensors)


def product_flop(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Return the FLOP of an operation; 0: it is no product. Of attention, of equal sequences, half is masked."""
    name, formula = func._overloadpacket.__name__, flop_registry.get(func._overloadpacket)
    if name == "_grouped_mm":
        return 2.0 * args[0].numel() * args[1].shape[-1]
    if name == "_varlen_attn":  # two products
        return 2.0 * args[0].numel() * args[5]
    if name == "_varlen_attn_backward":  # five
        return 5.0 * args[1].numel() * args[8]
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=result))


@dataclass(frozen=True, slots=True)
class Work:
    """FLOP and bytes, of all but the layers, of a layer, and of one that is recomputed."""

    rest: tuple[float, float]
    kept: tuple[float, float]
    again: tuple[float, float]

    def of(self, layers: int, recomputed: int) -> tuple[float, float, float]:
        """Return FLOP, bytes, and seconds of both."""
        flop, num_bytes = (
            rest + (layers - recomputed) * kept + recomputed * again
            for rest, kept, again in zip(self.rest, self.kept, self.again, strict=True)
        )
        return flop, num_bytes, flop / FLOP_PER_S + num_bytes / BYTES_PER_S


def counted(shape: dict[str, Any], *, fused: bool) -> Work:
    """Count a pack of ``TOKENS``, each predicted."""

    def once(layers: int, recomputed: int) -> torch.Tensor:
        policy = on_meta(AutoConfig.for_model(**shape | {"num_hidden_layers": layers}), torch.bfloat16)
        recompute(policy, recomputed)
        with Counted() as count, torch.device("meta"):
            compiler = partial(partial, count.as_one) if fused else None
            model = PolicyModel(policy, temperature=1.0, value_head=False, compiler=compiler)
            tokens, boundary = torch.zeros(TOKENS, dtype=torch.int64), torch.zeros(TOKENS // LONGEST + 1)
            row = {"token_N": tokens, "position_N": tokens, "predictor_M": tokens, "answer_M": tokens}
            count.flop = count.moved_bytes = 0
            logprob_M, *_ = model(**row, boundary=boundary.int(), longest=LONGEST)
            logprob_M.sum().backward()
        return torch.tensor([count.flop, count.moved_bytes], dtype=torch.float64)

    one, kept, again = once(1, 0), once(2, 0) - once(1, 0), once(2, 2) - once(1, 1)
    return Work(*(tuple(part.tolist()) for part in (one - kept, kept, again)))


def needed(shape: dict[str, Any], *, fused: bool, ranks: int) -> int:
    """Return how many layers a rank of an 80 GB GPU recomputes with ZeRO-3."""
    sets = [f"cluster.accelerators={ranks + 1}", "cluster.generation_accelerators=1", "train.trainer.zero_stage=3"]
    config = load_run(
        EXAMPLE, [*sets, f"train.trainer.pack_tokens={TOKENS}", f"train.trainer.fused={str(fused).lower()}"]
    )
    return recomputed_layers(config, AutoConfig.for_model(**shape), MEMORY_BYTES)


def row(name: str, ranks: int) -> str:
    """Return the row of a model: of eager, then fused, all layers recomputed, then what memory needs."""
    cells, layers = [name], MODELS[name]["num_hidden_layers"]
    for fused in (False, True):
        work = counted(MODELS[name], fused=fused)
        for number in (layers, needed(MODELS[name], fused=fused, ranks=ranks)):
            flop, num_bytes, seconds = work.of(layers, number)
            cells.append(f"{number}:{flop / 1e12:.0f}/{num_bytes / 1e9:.0f}/{seconds:.2f}")
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--model", choices=MODELS, action="append")
    given = parser.parse_args(arguments)
    print("| layers:TFLOP/GB/s | eager | needed | fused | needed |\n|---|---|---|---|---|")
    for name in given.model or MODELS:
        print(row(name, given.ranks))


if __name__ == "__main__":
    main()
