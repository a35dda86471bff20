"""Norms, rotary embeddings, SwiGLU and the output layer's softmax, each in one pass over memory.

Eager torch reads and writes memory at every operation; of a 7B that takes a third as long as its products. Here all
between two products is one function that reads its inputs once and writes its outputs once, forward and backward;
``torch.compile`` makes kernels of these functions, for all layers and any number of tokens. Linear layers stay modules:
ZeRO-3's hooks gather their weights as before.

Not Liger's kernels: a further package, for GPUs and listed models only, and none gives a token's log-probability with
its entropy. Not whole layers compiled: hooks would break their graphs. Methods of a policy's modules are replaced, no
class: other models of the process stay as they are.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable

from pipelinerl.errors import ConfigError
from pipelinerl.rl.losses import Softmax

# Legend of shapes: R rows (tokens, of all heads or experts); H numbers of each; N tokens; A heads; D numbers of a head;
# C tokens of a chunk; V words. All is computed in float32 at least, and rounded once, to the type of the inputs.

LOG = logging.getLogger("pipelinerl")
CHUNK_TOKENS = 4096
"""Tokens whose logits exist at a time, in the type of the weights, whose gradient is added up as often."""
ROTARY = "apply_rotary_pos_emb"
"""Function of transformers that attention calls by this name."""
LEAST_ROWS = 1024
"""Of a compiled function (count)."""
MOST_VARIANTS = 64
"""Of a compiled function: widths, types, modes (count)."""
Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes a function of one pass."""


def norm(x_RH: torch.Tensor, weight_1H: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the root-mean-square norm and the factor of each row, shape [R, 1]."""
    exact_RH = _exact(x_RH)
    factor_R1 = (exact_RH.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (weight_1H * (exact_RH * factor_R1)).to(x_RH.dtype), factor_R1


def norm_gradient(upstream_RH: Any, x_RH: Any, weight_1H: Any, factor_R1: Any) -> Any:
    """Return the gradient of ``norm`` by its input."""
    normed_RH, scaled_RH = _exact(x_RH) * factor_R1, _exact(upstream_RH) * weight_1H
    mean_R1 = (scaled_RH * normed_RH).mean(-1, keepdim=True)
    return (factor_R1 * (scaled_RH - normed_RH * mean_R1)).to(x_RH.dtype)


def norm_weight_gradient(upstream_RH: Any, x_RH: Any, factor_R1: Any) -> Any:
    """Return the gradient of ``norm`` by its weight, shape [H]: a sum over rows, so a pass of its own."""
    return (_exact(upstream_RH) * (_exact(x_RH) * factor_R1)).sum(0).to(x_RH.dtype)


def gated(gate_RH: torch.Tensor, up_RH: torch.Tensor) -> Any:
    """Return SwiGLU: silu(gate) up."""
    exact_RH = _exact(gate_RH)
    return (exact_RH * exact_RH.sigmoid() * up_RH).to(up_RH.dtype)


def gated_gradient(upstream_RH: Any, gate_RH: Any, up_RH: Any) -> tuple[Any, Any]:
    """Return the gradients of ``gated``."""
    upstream_RH, exact_RH, dtype = _exact(upstream_RH), _exact(gate_RH), up_RH.dtype
    sigmoid_RH = exact_RH.sigmoid()
    slope_RH = sigmoid_RH * (1 + exact_RH * (1 - sigmoid_RH))
    return (upstream_RH * up_RH * slope_RH).to(dtype), (upstream_RH * exact_RH * sigmoid_RH).to(dtype)


def gated_halves(pair_RH: torch.Tensor) -> Any:
    """Return SwiGLU of both side by side, as experts have them."""
    return gated(*pair_RH.chunk(2, -1))


def gated_halves_gradient(upstream_RH: Any, pair_RH: Any) -> Any:
    """Return the gradient of ``gated_halves``."""
    return torch.cat(gated_gradient(upstream_RH, *pair_RH.chunk(2, -1)), -1)


def rotated(query_NAD: Any, key_NAD: Any, cos_ND: Any, sin_ND: Any) -> tuple[Any, Any]:
    """Return queries and keys, turned by the angles of their positions."""
    cos, sin = cos_ND.chunk(2, -1), sin_ND.chunk(2, -1)
    return _turned(query_NAD, cos, sin), _turned(key_NAD, cos, sin)


def rotated_gradient(query_NAD: Any, key_NAD: Any, cos_ND: Any, sin_ND: Any) -> tuple[Any, Any]:
    """Return the gradients of ``rotated``, turned back."""
    cos, sin = cos_ND.chunk(2, -1), [-one for one in reversed(sin_ND.chunk(2, -1))]
    return _turned(query_NAD, cos, sin), _turned(key_NAD, cos, sin)


def chunk_logprobs(logits_CV: torch.Tensor, token_C: torch.Tensor, temperature: float) -> tuple[Any, Any, Any]:
    """Return log-probabilities of tokens, entropies, and logarithms of the sums that normalize them (nats)."""
    scaled_CV = _exact(logits_CV) / temperature
    top_C1 = scaled_CV.amax(-1, keepdim=True)
    below_CV = scaled_CV - top_C1
    power_CV = below_CV.exp()
    total_C = power_CV.sum(-1)
    log_total_C = total_C.log()
    logprob_C = below_CV.gather(1, token_C[:, None])[:, 0] - log_total_C
    return logprob_C, log_total_C - (power_CV * below_CV).sum(-1) / total_C, top_C1[:, 0] + log_total_C


def chunk_gradient(logits_CV: Any, token_C: Any, scale_C: Any, temperature: float, normal_C: Any) -> Any:
    """Write (1[v = token] - softmax_v) scale over the logits; return them."""
    softmax_CV = (_exact(logits_CV) / temperature - normal_C[:, None]).exp()
    hit_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == token_C[:, None]
    return logits_CV.copy_((hit_CV.to(softmax_CV.dtype) - softmax_CV) * scale_C[:, None])


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _turned(x_NAD: torch.Tensor, cos: Any, sin: Any) -> torch.Tensor:
    """Turn by angles given in halves, of shape [N, D / 2]."""
    first, second = _exact(x_NAD).chunk(2, -1)
    (cos_0, cos_1), (sin_0, sin_1) = ([half[:, None] for half in halves] for halves in (cos, sin))
    return torch.cat((first * cos_0 - second * sin_0, second * cos_1 + first * sin_1), -1).to(x_NAD.dtype)


def compiled(
    function: Callable[..., Any], backend: str = "inductor", least_rows: int = LEAST_ROWS
) -> Callable[..., Any]:
    """Compile a function of tensors for any number of rows; their other sizes are constants of its kernels.

    Fewer than ``least_rows`` are computed as they are: the compiler would choose kernels for them, and keep these for
    all others. More variants than the limit end the run: eager, they would take memory that nobody has counted.
    """
    torch._dynamo.config.recompile_limit = MOST_VARIANTS
    run = torch.compile(function, backend=backend, dynamic=False, fullgraph=True)

    def on_rows(*arguments: Any) -> Any:
        own = [one.detach() if isinstance(one, torch.Tensor) else one for one in arguments]
        if own[0].shape[0] < least_rows:
            return function(*own)
        for one in own:
            if isinstance(one, torch.Tensor):
                torch._dynamo.maybe_mark_dynamic(one, 0)
        return run(*own)

    return on_rows


def check_compiler(device: Literal["cpu", "gpu"]) -> None:
    """Raise ConfigError on a machine without what ``torch.compile`` needs: a compiler, for GPUs Python's headers."""
    variable, names = ("CXX", ("g++",)) if device == "cpu" else ("CC", ("gcc", "clang"))
    there = any(map(shutil.which, (os.environ.get(variable, ""), *names)))
    missing = [] if there else [f"{' or '.join(names)}, or {variable}"]
    if device == "gpu" and not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        missing.append("Python.h (python3-dev)")
    if missing:
        raise ConfigError(
            f"train.trainer.fused must be false: torch.compile needs {' and '.join(missing)}, and this machine has none"
        )


class _OnePass(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to mypy
    """A function that also returns what its gradient needs, and the gradient."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], gradient: Callable[..., Any], *inputs: torch.Tensor) -> Any:
        outputs, kept = function(*inputs)
        ctx.save_for_backward(*kept)
        ctx.gradient = gradient
        return outputs

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch is Any to mypy
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        return None, None, *ctx.gradient(*(one.contiguous() for one in upstream), *ctx.saved_tensors)


def _norm_method(compiler: Compiler) -> Callable[..., Any]:
    forward, by_input, by_weight = compiler(norm), compiler(norm_gradient), compiler(norm_weight_gradient)

    def gradient(upstream_RH: Any, x_RH: Any, weight_H: Any, factor_R1: Any) -> Any:
        own_H = by_weight(upstream_RH, x_RH, factor_R1) if weight_H.requires_grad else None
        return by_input(upstream_RH, x_RH, weight_H[None], factor_R1), own_H

    def method(self: Any, hidden_states: torch.Tensor) -> Any:
        def function(x_RH: torch.Tensor, weight_H: torch.Tensor) -> Any:
            normed_RH, factor_R1 = forward(x_RH, weight_H[None], self.variance_epsilon)
            return normed_RH, (x_RH, weight_H, factor_R1)

        x_RH = hidden_states.reshape(-1, hidden_states.shape[-1])
        return _OnePass.apply(function, gradient, x_RH, self.weight).view_as(hidden_states)

    return method


def _gated_method(compiler: Compiler) -> Callable[..., Any]:
    forward, backward = compiler(gated), compiler(gated_gradient)

    def method(self: Any, x: torch.Tensor) -> Any:
        pair = (one.reshape(-1, one.shape[-1]) for one in (self.gate_proj(x), self.up_proj(x)))
        product_RH = _OnePass.apply(lambda *pair: (forward(*pair), pair), backward, *pair)
        return self.down_proj(product_RH.view(*x.shape[:-1], -1))

    return method


def _halves_method(compiler: Compiler) -> Callable[..., Any]:
    forward, backward = compiler(gated_halves), compiler(gated_halves_gradient)
    function, gradient = lambda pair: (forward(pair), (pair,)), lambda *given: (backward(*given),)
    return lambda _, pair: _OnePass.apply(function, gradient, pair)


def _rotary(compiler: Compiler) -> Callable[..., Any]:
    forward, backward = compiler(rotated), compiler(rotated_gradient)

    def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        given = *(one.squeeze(0).transpose(0, 1).contiguous() for one in (q, k)), cos.squeeze(0), sin.squeeze(0)
        function, gradient = lambda *given: (forward(*given), given[2:]), lambda *given: (*backward(*given), None, None)
        return tuple(one.transpose(0, 1)[None] for one in _OnePass.apply(function, gradient, *given))

    return rotate


def fuse(policy: Any, compiler: Compiler = compiled) -> Softmax:
    """Have modules of a policy do in one pass what is above; return the output layer's softmax. Rows have no padding.

    Modules are known by results: on random numbers their class and ours agree. Others stay, with a warning.
    """
    rotate, examples = _rotary(compiler), {type(module): module for module in policy.modules()}
    methods = {kind: _fused_method(kind, one, compiler, rotate) for kind, one in examples.items()}
    others = [kind.__name__ for kind, method in methods.items() if not method]
    if eager := [name for name in others if re.search("Norm|MLP|Experts|Attention", name)]:
        _warn_once(f"train.trainer.fused does not know {', '.join(eager)}: no change there")
    for module in policy.modules():
        for name, method in methods[type(module)].items():
            setattr(module, name, MethodType(method, module))
    return Softmax(compiler(chunk_logprobs), compiler(chunk_gradient), CHUNK_TOKENS, num_kept=1)


@cache
def _warn_once(text: str) -> None:
    LOG.warning("%s", text)


def _fused_method(kind: Any, example: Any, compiler: Compiler, rotate: Callable[..., Any]) -> dict[str, Any]:
    """Return a method in place of one of the class, by name, or none."""
    generator = torch.Generator().manual_seed(0)
    numbers, weight, angle = (
        torch.randn(size, generator=generator, device="cpu") for size in ((1, 2, 3, 8), (8,), (1, 3, 8))
    )
    stand_in = SimpleNamespace(weight=weight, gate_proj=lambda x: x[..., :4], up_proj=lambda x: x[..., 4:])
    stand_in.down_proj = torch.nn.Identity()
    vars(stand_in).update({name: getattr(example, name, None) for name in ("variance_epsilon", "act_fn")})
    for name, make in (("forward", _norm_method), ("forward", _gated_method), ("_apply_gate", _halves_method)):
        if _agree(getattr(kind, name, None), make(lambda function: function), stand_in, numbers):
            return {name: make(compiler)}
    forward = kind.forward
    if ROTARY in getattr(getattr(forward, "__code__", None), "co_names", ()):
        given = (numbers, numbers[:, :1], angle.cos(), angle.sin())
        theirs = forward.__globals__[ROTARY]
        if _agree(theirs, _rotary(lambda function: function), *given):

            def turn(*given: Any, **named: Any) -> Any:
                """Turn whole heads; a part of each, or by settings, as it was."""
                ours = not named and len(given) == 4 and given[2].shape[-1] == given[0].shape[-1]
                return (rotate if ours else theirs)(*given, **named)

            named = forward.__globals__ | {ROTARY: turn}
            method = FunctionType(forward.__code__, named, forward.__name__, forward.__defaults__, forward.__closure__)
            method.__kwdefaults__ = forward.__kwdefaults__
            return {"forward": method}
    return {}


def _agree(theirs: Any, ours: Callable[..., Any], *given: Any) -> bool:
    try:
        torch.testing.assert_close(theirs(*given), ours(*given))
    except Exception:  # another kind of module may fail in any way
        return False
    return True
