"""Micro-benchmarks of the accelerator at hand: matrix products, decode steps, training steps.

Theory of operation. Every measurement is a function without arguments that is called a few times to warm up and then
several times between two synchronizations; the median counts. A GPU's events take the time, so that launches count
only where the device waits for them. Each number is written as soon as it is measured: Ctrl-C keeps it.

docs/calibration.md has the rows. ``utilisation``: FLOP/s of products (h x d)(d x d') of all matrices of a layer, for
h = 1 .. 1024, over the peak (the paper's U(h)); the peak is the catalogue's for a GPU that is in it, else the best that
was reached. ``decode``: vLLM generates twice, at two lengths; the difference of the times is divided by the difference
of the lengths. ``request`` is the rest of the shorter generation. Without vLLM a plain model in torch is timed.
``train``: forward and backward passes, and a step of Adam.
"""

from __future__ import annotations

import csv
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch.nn import functional

from pipelinerl.calibration.table import COLUMNS
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.catalogue import gpu_of_device
from pipelinerl.records.run_folder import make_folder, write_json
from pipelinerl.util.read import read_json

# Legend of shapes: B sequences; L tokens of each; C tokens of context of each; V words; D width; H heads; K heads of
# keys and values; E size of a head.

Cache = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class PlainShape:
    """Sizes of a model."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    """Width inside the feed-forward part."""
    vocabulary: int

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Read a Hugging Face model's shape; ``ConfigError`` if config.json lacks a size. Experts are not supported."""
        path = folder / "config.json"
        config = read_json(path, "--model")
        try:
            heads, width = int(config["num_attention_heads"]), int(config["hidden_size"])
            return cls(
                layers=int(config["num_hidden_layers"]),
                width=width,
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_size=int(config.get("head_dim") or width // heads),
                inner=int(config["intermediate_size"]),
                vocabulary=int(config["vocab_size"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--model must be a folder of a dense model, {path} lacks {error}") from None

    def products(self) -> list[tuple[int, int]]:
        """Return the sizes of the matrices of a layer."""
        attention, kv = self.heads * self.head_size, 2 * self.kv_heads * self.head_size
        return [
            (self.width, attention + kv),
            (attention, self.width),
            (self.width, 2 * self.inner),
            (self.inner, self.width),
        ]


def parameter_count(shape: PlainShape) -> int:
    """Return the number of parameters; input and output embeddings are separate."""
    return shape.layers * sum(rows * columns for rows, columns in shape.products()) + 2 * shape.vocabulary * shape.width


class PlainModel(torch.nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    """Attention with grouped heads and a gated feed-forward part per layer; no positions, no biases."""

    def __init__(self, shape: PlainShape, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape

        def matrix(rows: int, columns: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(rows, columns, device=device, dtype=dtype) / rows**0.5)

        self.embedding = matrix(shape.vocabulary, shape.width)
        self.head = matrix(shape.width, shape.vocabulary)
        layers = ([matrix(*size) for size in shape.products()] for _ in range(shape.layers))
        self.layers = torch.nn.ModuleList(torch.nn.ParameterList(layer) for layer in layers)

    def hidden(self, token_BL: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states of whole sequences, shape [B, L, D]."""
        x_BLD = self.embedding[token_BL]
        for layer in self.layers:
            x_BLD = self._layer(layer, x_BLD, None)
        return x_BLD

    def loss(self, token_BL: torch.Tensor) -> torch.Tensor:
        """Return the mean negative log-likelihood of every next token (nats)."""
        logit_BLV = _norm(self.hidden(token_BL[:, :-1])) @ self.head
        return functional.cross_entropy(logit_BLV.flatten(0, 1).float(), token_BL[:, 1:].flatten())

    def decode(self, token_B: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Return the likeliest next token of every sequence after one more; the last place of the cache is written."""
        x_BLD = self.embedding[token_B][:, None]
        for layer, kv in zip(self.layers, cache, strict=True):
            x_BLD = self._layer(layer, x_BLD, kv)
        return (_norm(x_BLD[:, 0]) @ self.head).argmax(dim=-1)

    def empty_cache(self, batch: int, ctx: int) -> Cache:
        """Return keys and values of ``ctx`` tokens of context and the one to come, each of shape [B, K, C + 1, E]."""
        shape = self.shape
        size = (batch, shape.kv_heads, ctx + 1, shape.head_size)
        like = self.embedding
        return [(like.new_zeros(size), like.new_zeros(size)) for _ in range(shape.layers)]

    def _layer(
        self, layer: torch.nn.ParameterList, x_BLD: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        shape = self.shape
        into, out, up, down = layer
        heads = (_norm(x_BLD) @ into).unflatten(-1, (-1, shape.head_size)).transpose(1, 2)
        q_BHLE, k_BKLE, v_BKLE = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        if kv is not None:
            kv[0][:, :, -1:], kv[1][:, :, -1:] = k_BKLE, v_BKLE
            k_BKLE, v_BKLE = kv
        attended = functional.scaled_dot_product_attention(
            q_BHLE, k_BKLE, v_BKLE, is_causal=kv is None, enable_gqa=shape.heads != shape.kv_heads
        )
        x_BLD = x_BLD + attended.transpose(1, 2).flatten(2) @ out
        gate, value = (_norm(x_BLD) @ up).chunk(2, dim=-1)
        return x_BLD + (functional.silu(gate) * value) @ down


def _norm(x: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:])


STEP_TIMES_FILE = "step_times.csv"
"""Read by ``calibrate``."""
UTILISATION_FILE = "utilisation.csv"
"""Read by ``hardware.decode`` of kind ``utilisation``."""
CONDITIONS_FILE = "conditions.json"
MOST_REPEATS = 200
"""Calls that are timed, at most."""
SEED = 0
MOST_READ = 65_536
"""Tokens of prompts that every generation of vLLM reads anew, at most; more stay in its cache."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes to measure."""

    products: tuple[int, ...]
    """Rows h of the matrix products."""
    decode: tuple[tuple[int, int], ...]
    """Sequences, tokens of context of each."""
    prefill: tuple[tuple[int, int], ...]
    """Sequences, tokens of each."""
    train: tuple[tuple[int, int], ...]
    """Sequences, tokens of each."""
    vllm_steps: tuple[int, int] = (8, 40)
    """The difference of two generations of so many tokens is timed."""
    warm_up: int = 2
    """Calls that are not timed."""
    repeats: int = 5
    """Calls that are timed, at least."""
    least_s: float = 0.2
    """Calls are timed until they have taken as long, or ``MOST_REPEATS``."""


GPU_SIZES = Sizes(
    products=tuple(2**power for power in range(11)),
    decode=tuple((batch, ctx) for batch in (1, 8, 32, 64, 128, 256) for ctx in (512, 2048, 8192)),
    prefill=((1, 512), (1, 2048), (1, 8192), (8, 1024)),
    train=((1, 2048), (2, 2048), (4, 2048), (1, 8192), (8, 1024)),
    warm_up=3,
    repeats=7,
)
CPU_SIZES = Sizes(
    products=tuple(2**power for power in range(11)),
    decode=tuple((batch, ctx) for batch in (1, 4, 16, 32, 64) for ctx in (64, 256, 1024)),
    prefill=((1, 64), (1, 256), (1, 1024), (4, 256)),
    train=((1, 128), (4, 128), (8, 128), (1, 512), (2, 512), (1, 1024)),
)
SHAPES = {
    "cpu": PlainShape(layers=4, width=512, heads=8, kv_heads=2, head_size=64, inner=1408, vocabulary=8192),
    "gpu": PlainShape(layers=28, width=1536, heads=12, kv_heads=2, head_size=128, inner=8960, vocabulary=151936),
}
"""Where no model is given: on a GPU the shape of Qwen2.5-1.5B."""


class Bench:
    """One accelerator and how time is taken on it."""

    def __init__(self, device: Literal["cpu", "gpu"], sizes: Sizes) -> None:
        self.device = torch.device("cuda" if device == "gpu" else "cpu")
        self.dtype = torch.bfloat16 if device == "gpu" else torch.float32
        self.sizes = sizes

    def seconds(self, work: Callable[[], Any]) -> float:
        """Return the median seconds of a call."""
        for _ in range(self.sizes.warm_up):
            work()
        times: list[float] = []
        while len(times) < self.sizes.repeats or (sum(times) < self.sizes.least_s and len(times) < MOST_REPEATS):
            times.append(self._once(work))
        return statistics.median(times)

    def _once(self, work: Callable[[], Any]) -> float:
        if self.device.type != "cuda":
            begin_s = time.perf_counter()
            work()
            return time.perf_counter() - begin_s
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def random(self, *shape: int) -> torch.Tensor:
        """Return a tensor of small normal numbers."""
        return torch.randn(*shape, device=self.device, dtype=self.dtype) / shape[-1] ** 0.5


def measure(
    out: Path,
    *,
    device: Literal["auto", "cpu", "gpu"] = "auto",
    model: Path | None = None,
    sizes: Sizes | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure the accelerator at hand and write the tables into ``out``; return the conditions, with the rows by kind.

    ``model``: folder in Hugging Face format, whose shape is measured, and itself if vLLM is installed; None:
    ``SHAPES``. ``sizes`` None: as fit the device.
    Raises ConfigError if there is no GPU where one is asked for, the model has no config.json that can be read, or the
    folder holds a table already.
    """
    chosen = _chosen(device)
    shape = SHAPES[chosen] if model is None else PlainShape.of(model)
    sizes = sizes or (GPU_SIZES if chosen == "gpu" else CPU_SIZES)
    for name in (STEP_TIMES_FILE, UTILISATION_FILE, CONDITIONS_FILE):
        if (out / name).exists():
            raise ConfigError(f"--out must be a folder without measurements, got {out}, which holds {name}")
    make_folder(out)
    torch.manual_seed(SEED)
    bench = Bench(chosen, sizes)
    engine = "vllm" if model is not None and _version("vllm") is not None else "torch"
    conditions = _conditions(bench, shape, model, engine)
    counts: Counter[str] = Counter()
    complete = False
    write_json(out / CONDITIONS_FILE, conditions)
    began_s = time.monotonic()
    with (out / STEP_TIMES_FILE).open("w", encoding="utf-8", newline="", buffering=1) as file:
        rows = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        rows.writeheader()
        with suppress(KeyboardInterrupt):  # what has been measured is kept
            for row in _rows(bench, shape, model if engine == "vllm" else None, out):
                rows.writerow({**row, "accelerators": 1})
                counts[row["kind"]] += 1
                what = ", ".join(f"{name} {value}" for name, value in row.items() if name != "kind")
                on_progress(f"{row['kind']}: {what}")
            complete = True
    conditions |= {
        "rows": dict(counts),
        "complete": complete,
        "seconds": round(time.monotonic() - began_s, 1),
        "load_after": round(os.getloadavg()[0], 2),
    }
    write_json(out / CONDITIONS_FILE, conditions)
    return conditions


def _rows(bench: Bench, shape: PlainShape, model: Path | None, out: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table; vLLM, which takes what memory is left, comes last."""
    yield from _utilisation_rows(bench, shape, out)
    plain = PlainModel(shape, device=bench.device, dtype=bench.dtype)
    if model is None:
        yield from _decode_rows(bench, plain)
    yield from _prefill_rows(bench, plain)
    yield from _train_rows(bench, plain)
    if model is not None:
        del plain
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
        yield from _vllm_rows(bench, model)


def _utilisation_rows(bench: Bench, shape: PlainShape, out: Path) -> Iterator[dict[str, Any]]:
    """Yield U(h) of the products of one layer, and write it as a table of its own."""
    weights = [bench.random(*size) for size in shape.products()]
    rates = []
    for height in bench.sizes.products:
        inputs = [bench.random(height, weight.shape[0]) for weight in weights]

        def products(inputs: list[torch.Tensor] = inputs) -> None:
            for one, weight in zip(inputs, weights, strict=True):
                one @ weight

        rates.append(2 * height * sum(weight.numel() for weight in weights) / bench.seconds(products))
    peak = max(_catalogue_peak(bench) or 0.0, *rates)
    with (out / UTILISATION_FILE).open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["batch", "utilisation"])
        for height, rate in zip(bench.sizes.products, rates, strict=True):
            table.writerow([height, f"{rate / peak:.6g}"])
    for height, rate in zip(bench.sizes.products, rates, strict=True):
        yield {"kind": "matmul", "batch": height, "utilisation": f"{rate / peak:.6g}"}


def _decode_rows(bench: Bench, plain: PlainModel) -> Iterator[dict[str, Any]]:
    for batch, ctx in bench.sizes.decode:
        token_B, seconds = torch.zeros(batch, dtype=torch.long, device=bench.device), None
        with torch.inference_mode(), suppress(torch.OutOfMemoryError):
            seconds = bench.seconds(partial(plain.decode, token_B, plain.empty_cache(batch, ctx)))
        if seconds is not None:
            yield {"kind": "decode", "batch": batch, "ctx": ctx, "seconds": f"{seconds:.6g}"}


def _vllm_rows(bench: Bench, model: Path) -> Iterator[dict[str, Any]]:
    """Yield decode steps of vLLM: the difference of a long and a short generation, over their further tokens.

    The rest of the short one is that of its requests; not where prompts stay in the cache. Prompts are ``ctx`` tokens
    less half of the further ones, so that ``ctx`` is the mean context while these are sampled.
    """
    from backends.vllm.offline import OfflineEngine

    few, many = bench.sizes.vllm_steps
    longest = max(ctx for _, ctx in bench.sizes.decode) + many
    engine = OfflineEngine(
        model,
        device="gpu" if bench.device.type == "cuda" else "cpu",
        num_slots=max(batch for batch, _ in bench.sizes.decode),
        max_tokens=longest,
    )
    try:
        for batch, ctx in bench.sizes.decode:
            prompt_tokens = max(1, ctx - (few + many) // 2)
            if not engine.holds(batch, prompt_tokens + many):
                continue  # the KV cache is too small for it
            times, reads = [], batch * prompt_tokens <= MOST_READ
            for number in range(1 + bench.sizes.repeats):
                short_s, long_s = (
                    engine.generate_s(batch, prompt_tokens, tokens, forget=reads) for tokens in (few, many)
                )
                if number:  # the first is a warm-up
                    step_s = (long_s - short_s) / (many - few)
                    times.append((step_s, short_s - few * step_s))
            seconds, request_s = (statistics.median(some) for some in zip(*times, strict=True))
            if seconds > 0:
                yield {"kind": "decode", "batch": batch, "ctx": ctx, "seconds": f"{seconds:.6g}"}
            if reads and request_s > 0:
                tokens = batch * prompt_tokens
                yield {"kind": "request", "batch": batch, "tokens": tokens, "seconds": f"{request_s:.6g}"}
    finally:
        engine.shutdown()


def _prefill_rows(bench: Bench, plain: PlainModel) -> Iterator[dict[str, Any]]:
    for batch, tokens in bench.sizes.prefill:
        token_BL, seconds = torch.zeros(batch, tokens, dtype=torch.long, device=bench.device), None
        with torch.inference_mode(), suppress(torch.OutOfMemoryError):
            seconds = bench.seconds(partial(plain.hidden, token_BL))
        if seconds is not None:
            yield {"kind": "prefill", "batch": batch, "tokens": batch * tokens, "seconds": f"{seconds:.6g}"}


def _train_rows(bench: Bench, plain: PlainModel) -> Iterator[dict[str, Any]]:
    """Weights, gradients and Adam's states are in the precision of the device."""
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-6)
    for batch, tokens in bench.sizes.train:
        token_BL = torch.randint(plain.shape.vocabulary, (batch, tokens), device=bench.device)

        def step(token_BL: torch.Tensor = token_BL) -> None:
            optimizer.zero_grad(set_to_none=True)
            plain.loss(token_BL).backward()
            optimizer.step()

        try:
            seconds = bench.seconds(step)
        except torch.OutOfMemoryError:
            optimizer.zero_grad(set_to_none=True)
            continue
        yield {"kind": "train", "batch": batch, "tokens": batch * tokens, "seconds": f"{seconds:.6g}"}


def _chosen(device: Literal["auto", "cpu", "gpu"]) -> Literal["cpu", "gpu"]:
    if device == "auto":
        return "gpu" if torch.cuda.is_available() else "cpu"
    if device == "gpu" and not torch.cuda.is_available():
        raise ConfigError("--device must be cpu or auto here, got gpu: torch finds no GPU")
    return device


def _catalogue_peak(bench: Bench) -> float | None:
    gpu = gpu_of_device(torch.cuda.get_device_name()) if bench.device.type == "cuda" else None
    return None if gpu is None else gpu.bf16_flops


def _conditions(bench: Bench, shape: PlainShape, model: Path | None, engine: str) -> dict[str, Any]:
    gpu = bench.device.type == "cuda"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if gpu else _cpu_name(),
        "peak_flops": _catalogue_peak(bench),
        "dtype": str(bench.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if gpu else None,
        "vllm": _version("vllm"),
        "decode_by": engine,
        "model": None if model is None else str(model),
        "shape": asdict(shape),
        "parameters": parameter_count(shape),
        "sizes": asdict(bench.sizes),
        "seed": SEED,
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    for name in (package, f"{package}-cpu"):
        with suppress(PackageNotFoundError):
            return version(name)
    return None
