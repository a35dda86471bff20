"""Weight transports: every way from the trainer to the engines, published methods and our own, in one table.

A *transport* brings new weights to the engines. To add one, write a ``WeightTransport`` and, to train with it, the
``ends`` that it names (``backends/transfer/transport.py``). No other module compares the name of a transport: each asks
for the fact that it depends on. A transport of your own needs no change here either: ``train.transport`` or
``hardware.weight_sync = "package.module:ATTRIBUTE"`` in a run file names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pipelinerl.hardware.coefficients import Coefficients, Level
from pipelinerl.util.strict_model import Seconds, StrictModel
from pipelinerl.util.user_code import named_value

BF16_BYTES = 2
KEPT_FILES = 2
"""Published files that are kept: the newest, and one that engines may still be reading (count)."""
ROOT_LAW = "sync_s_per_root_gb"
"""Coefficient of the published methods: seconds of a synchronization over the root of its GB."""


class WeightTransferConfig(StrictModel):
    """Seconds between an optimizer step and engines that sample with its weights."""

    publish_s: Seconds = 0.0
    """Seconds the trainer stands still to publish."""
    transfer_s: Seconds = 0.0
    """Seconds from the publication until the weights are at the engines, which generate meanwhile."""
    pause_s: Seconds = 0.0
    """Seconds an engine stands still to load them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Facts of a run that the seconds of an update depend on."""

    num_bytes: float
    """Weights in bf16 (bytes)."""
    gathered_s: float
    """Gathering the ranks' parts of them (seconds)."""
    tensor_parallel: int
    """Accelerators of an engine (count)."""
    colocated: bool
    """Whether engines and trainer share their accelerators."""
    compared_s: float = 0.0
    """Comparing the ranks' parts of them with those published last (seconds)."""
    link: float = math.inf
    """Between two kinds of accelerators (bytes/s)."""
    coefficients: Coefficients

    @property
    def snapshot_s(self) -> float:
        """Gathering the weights and copying them to the host's memory (seconds)."""
        return self.gathered_s + self.num_bytes / self.coefficients.host_bandwidth

    @property
    def loading_s(self) -> float:
        """Copying an accelerator's share from the host's memory, with the pause for it (seconds)."""
        return self.num_bytes / self.tensor_parallel / self.coefficients.host_bandwidth + self.coefficients.pause_s


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShare:
    """Facts of one machine that the memory of a transport depends on."""

    num_bytes: float
    """Weights in bf16 (bytes)."""
    sends: bool
    """Whether rank 0 of the trainer is on it."""
    workers: int
    """Workers of engines on it (count)."""
    folder_in_memory: bool
    """Whether ``train.weights_folder`` is in its memory."""


def _root_of_bytes(route: Route) -> WeightTransferConfig:
    """Return the seconds of published synchronizations: as the root of the bytes, whatever the link.

    The trainer stands still until the end, engines for ``pause_share`` of it. Colocated, nothing else goes on. A link
    between two kinds of accelerators carries the weights once at least.
    """
    values = route.coefficients
    total_s = max(values.sync_s_per_root_gb * math.sqrt(route.num_bytes / 1e9), route.num_bytes / route.link)
    paused_s = total_s * (1.0 if route.colocated else values.pause_share)
    return WeightTransferConfig(publish_s=total_s, transfer_s=total_s - paused_s, pause_s=paused_s + values.pause_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTransport:
    """A method of weight transfer: the facts that planning, simulation and training depend on."""

    name: str
    """Its name in tables; the run file's, if it is in ``PUBLISHED`` or ``OURS``. ``Weights.location`` begins with
    it."""
    description: str
    """The way, and who stands still meanwhile, in a line."""
    seconds: Callable[[Route], WeightTransferConfig] = _root_of_bytes
    """Returns who waits how long."""
    coefficients: tuple[str, ...] = (ROOT_LAW,)
    """Coefficients that ``seconds`` reads; the least known one decides its uncertainty."""
    levels: Mapping[Level, float] = field(default_factory=dict)
    """``sync_s_per_root_gb`` of a published method. Empty: the level's."""
    source: str = ""
    """Measurements behind ``levels``."""
    host_bytes: Callable[[HostShare], float] = lambda _: 0.0
    """Returns the memory of a machine that weights on their way take (bytes)."""
    colocated: bool = False
    """Whether it serves engines that share their accelerators with the trainer."""
    grouped: bool = False
    """Whether trainer and engines form a group of processes that the weights are sent through."""
    keeps_shards: bool = False
    """Whether each rank keeps its part of the published weights on its accelerator."""
    in_folder: bool = False
    """Whether engines read the weights in ``train.weights_folder``."""
    ends: str = ""
    """``package.module:ATTRIBUTE`` of its ``TransportEnds``. Empty: it can be simulated only."""

    def stated(self, level: Level) -> dict[str, float]:
        """Return the method's own values of coefficients, by name."""
        return {ROOT_LAW: self.levels[level]} if self.levels else {}


UNKNOWN = WeightTransport(name="unknown", description="a published method, with the wide band of all of them")


PUBLISHED = tuple(
    WeightTransport(name=name, description=description, levels=dict(zip(Level, seconds, strict=True)), source=source)
    for name, seconds, description, source in (
        ("reshard", (0.06, 0.09, 0.63), "shard to shard over NCCL",
         "NeMo-RL: 4B to 671B in 0.3 to 2.8 s, fp8 30B in 3.5 s"),
        ("checkpoint_engine", (0.24, 0.39, 1.1), "MoonshotAI's checkpoint-engine",
         "106B to 671B in 3.5 to 12 s; inside verl 30B in 4.4 s, 235B in 24 s"),
        ("rdma", (0.31, 0.9, 1.6), "between all GPUs at once by NCCL, NIXL or Mooncake",
         "verl's checkpoint engine of 2026: 30B in 5.9 to 7 s; prime-rl: 744B in 8.6 s; J for the slow end"),
        ("changed_values", (0.6, 0.84, 1.0), "changed values only, by a folder or from one rank",
         "verl: 8B to 72B in 2.2 to 12.5 s"),
        ("refit", (0.34, 1.3, 2.2), "colocated: gathered, and handed over by CUDA IPC",
         "27B in 2.5 s (miles), 70B in 14 to 26 s (NeMo-RL)"),
        ("bucketed", (1.1, 2.0, 7.6), "buckets of tensors, one after another",
         "30B in 16 s, 355B in 48 s, 1T in 190 to 240 s (slime), 975B in 49 s (miles)"),
        ("tensor_by_tensor", (1.0, 2.4, 35.0), "one tensor after another",
         "0.6B in 1.2 s (MarinSkyRL), 30B in 16 s, 235B in 59 s (verl), 16B in 200 s"),
        ("full_broadcast", (1.5, 4.1, 9.6), "everything from one rank to every engine",
         "verl: 7B in 5.8 s, 8B in 10 to 39 s, 30B in 32 to 43 s, 72B in 29 s"),
    )
)  # fmt: skip
"""Methods of other systems, which can be simulated: ``hardware.weight_sync``. Sources: docs/hardware.md."""


def _file_seconds(route: Route) -> WeightTransferConfig:
    file_s = route.num_bytes / route.coefficients.file_bandwidth
    published_s = route.snapshot_s + file_s
    return WeightTransferConfig(publish_s=published_s, transfer_s=published_s, pause_s=file_s + route.loading_s)


def _broadcast_seconds(route: Route) -> WeightTransferConfig:
    sent_s = route.snapshot_s + route.num_bytes / route.coefficients.stream_bandwidth
    return WeightTransferConfig(publish_s=route.snapshot_s, transfer_s=sent_s, pause_s=route.loading_s)


ADAM_STEP = {Level.OPTIMISTIC: 0.1, Level.CENTRAL: 0.23, Level.PESSIMISTIC: 0.65}
"""Mean step of AdamW, beta1 0.9, over the learning rate: TRL's 0.6 % at 1e-6 (20 MB of Qwen3-0.6B, 6 bytes a number);
between 0.18, gradients without a direction, and 0.28, with a mean of 0.3 deviations; 3 % of verl and slime."""
WEIGHT_SD = 0.02
"""Standard deviation of the weights, about normal, of a language model."""


def changed_share(learning_rate: float, level: Level) -> float:
    """Return the share of bf16 numbers that an optimizer step changes, with fp32 master weights.

    A number changes if its master weight crosses a rounding border: with probability step / spacing, as it lies
    anywhere between two. From 2^e to 2^(e+1) the spacing is 2^(e-7). At 1e-6 this gives 1.2 %, at 1e-5 8 %. Published:
    1 % (TRL; PULSE, arXiv 2602.03839, 0.5B to 7B), 1 to 3 % (verl). AdamW on normal weights: 0.9 to 1.4 %, at 1e-5 6.6
    to 9.2 %; in the first ten steps more, at most 2 and 16 %.
    """
    step, exponents = ADAM_STEP[level] * learning_rate, range(-100, 4)
    below = [math.erf(2.0**e / WEIGHT_SD / math.sqrt(2)) for e in (*exponents, exponents.stop)]
    return sum(min(1.0, step / 2.0 ** (e - 7)) * (below[e + 101] - below[e + 100]) for e in exponents)


SHARE_METRIC = "weights/delta_share"
"""Metric of a real run: that share of a published version; 0 or none if all numbers were sent."""
CHANGE_BYTES = 3
"""Of a changed bf16 number: its distance from the one before, and its value."""
LONGEST_GAP = 255
"""Distance that a byte holds; a number in between is sent where there is a longer one (count)."""
LARGEST_DELTA = 1 / 4
"""Share of all weights' bytes up to which changes are sent; there is room for as many behind a row."""


def delta_bytes(route: Route) -> float:
    """Return the bytes of a delta whose changes are spread evenly; of all weights, if a delta would be too large."""
    share = route.coefficients.changed_share
    if CHANGE_BYTES / BF16_BYTES * share > LARGEST_DELTA:
        return route.num_bytes
    sent_share = share / -math.expm1(LONGEST_GAP * math.log1p(-share))  # a gap g needs the ceiling of g / 255 numbers
    return route.num_bytes * CHANGE_BYTES / BF16_BYTES * sent_share


def _delta_seconds(route: Route) -> WeightTransferConfig:
    sent_bytes = delta_bytes(route)
    if sent_bytes == route.num_bytes:
        return _broadcast_seconds(route)
    copied_s = sent_bytes / route.coefficients.host_bandwidth
    published_s = route.gathered_s + route.compared_s + copied_s
    sent_s = published_s + sent_bytes / route.coefficients.delta_bandwidth
    return WeightTransferConfig(publish_s=published_s, transfer_s=sent_s, pause_s=copied_s + route.coefficients.pause_s)


def _file_bytes(host: HostShare) -> float:
    num_files = 1 + KEPT_FILES if host.folder_in_memory else 0  # a new one beside those kept
    return host.sends * (1 + num_files) * host.num_bytes


def _broadcast_bytes(host: HostShare) -> float:
    return bool(host.sends or host.workers) * host.num_bytes  # engines beside rank 0 read its row


def _delta_bytes(host: HostShare) -> float:
    return (1 + LARGEST_DELTA) * _broadcast_bytes(host)


FILE = WeightTransport(
    name="file",
    description="a file: the trainer stands still to write it, engines to read and verify it",
    seconds=_file_seconds,
    coefficients=("host_bandwidth", "file_bandwidth"),
    host_bytes=_file_bytes,
    colocated=True,
    in_folder=True,
    ends="backends.transfer.file:FILE",
)
BROADCAST = WeightTransport(
    name="broadcast",
    description="a snapshot in rank 0's host memory, sent to every machine while engines generate and ranks train",
    seconds=_broadcast_seconds,
    coefficients=("host_bandwidth", "stream_bandwidth"),
    host_bytes=_broadcast_bytes,
    grouped=True,
    ends="backends.transfer.broadcast:BROADCAST",
)
DELTA = WeightTransport(
    name="delta",
    description="changed numbers only, sent to every machine and patched there while engines generate and ranks train",
    seconds=_delta_seconds,
    coefficients=("changed_share", "delta_bandwidth", "host_bandwidth"),
    host_bytes=_delta_bytes,
    grouped=True,
    keeps_shards=True,
    ends="backends.transfer.broadcast:DELTA",
)
OURS = (FILE, BROADCAST, DELTA)
"""Transports of ``pipelinerl train``, simulated as well: ``train.transport``."""


def find_transport(name: str, *, key: str, among: tuple[WeightTransport, ...]) -> WeightTransport:
    """Return one of ``among``, or of ``package.module:ATTRIBUTE``; ConfigError, which names ``key``, if none."""
    return named_value(name, {one.name: one for one in among}, WeightTransport, key=key)


def chosen_transport(name: str | None, *, on_gpus: bool, colocated: bool) -> WeightTransport:
    """Return the named transport, else ``delta`` on GPUs and ``file`` on CPU; ``file`` where it cannot colocate."""
    chosen = find_transport(name, key="transport", among=OURS) if name else DELTA if on_gpus else FILE
    return chosen if chosen.colocated or not colocated else FILE
