"""A check of the machines: versions, memory, links, kernels; and of one longest pack."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from backends.interface import PlaceFacts, RankFacts, Sample, SelfTest, TrainResult
from pipelinerl.config.resolve import named_coefficients
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.catalogue import Gpu, LanguageModel, find_model, gpu_of_device
from pipelinerl.hardware.coefficients import Coefficients, Level, coefficients
from pipelinerl.hardware.derive import NOTHING_BESIDE, derive_training, derive_transport, ring_bytes_s
from pipelinerl.hardware.transport import FILE, WeightTransferConfig
from pipelinerl.records.check_report import CheckRow, compared, unchecked, wrong
from pipelinerl.rl.segments import Segment, generated_tokens

NOT_KNOWN = "nothing: the hardware catalogue does not have this device"


@dataclass(frozen=True, slots=True)
class Expected:
    """The catalogue's expectation of a run on these machines: its central level; slow is below the pessimistic one."""

    config: RunConfig
    gpu: Gpu | None
    model: LanguageModel | None

    @classmethod
    def of(cls, config: RunConfig, device_name: str) -> Self:
        """Return expectations for a run on devices with this driver name."""
        try:
            model = find_model(f"{config.train_table.model.path}/config.json")
        except ConfigError:  # of a kind whose parameters the catalogue cannot count
            model = None
        return cls(config, gpu_of_device(device_name), model)

    def rate(self, what: str, gb_s: float, least: Callable[[Gpu, Coefficients], float], advice: str) -> CheckRow:
        """Return the row of a speed (GB/s), given the catalogue's (bytes/s)."""
        text = f"{gb_s:.3g} GB/s"
        if self.gpu is None:
            return CheckRow(what=what, measured=text, expected=NOT_KNOWN)
        central, floor = (least(self.gpu, self._values(level)) / 1e9 for level in (Level.CENTRAL, Level.PESSIMISTIC))
        expected = f"{central:.3g} GB/s; slow below {floor:.3g}"
        return compared(what, text, expected, slow=gb_s < floor, advice=advice)

    def seconds(
        self, what: str, text: str, seconds: float, most: Callable[[Coefficients], float], advice: str
    ) -> CheckRow:
        """Return the row of a time (seconds), given the catalogue's."""
        if self.gpu is None or self.model is None:
            return CheckRow(what=what, measured=text, expected=NOT_KNOWN)
        central, limit = (most(self._values(level)) for level in (Level.CENTRAL, Level.PESSIMISTIC))
        expected = f"{central:.3g} s; slow above {limit:.3g} s"
        return compared(what, text, expected, slow=seconds > limit, advice=advice)

    def pack_s(self, lengths: list[int], layers: float | None = None) -> Callable[[Coefficients], float]:
        """Return the seconds of one pack on every rank, so many layers recomputed (None: by the run file)."""

        def seconds(values: Coefficients) -> float:
            assert self.gpu is not None and self.model is not None  # noqa: PT018  # not a test
            ranks, shared = self.config.trainer_ranks, self.config.train_table.trainer.sequence_parallel
            known = {} if layers is None else {"recomputation": layers / self.model.layers}
            values = values.model_copy(update=NOTHING_BESIDE | known)
            cost = derive_training(
                self.gpu, self.model, training_accelerators=ranks, coefficients=values, sequence_parallel=shared
            )
            squares = sum(length**2 for length in lengths)
            return cost.micro_batch_s + (cost.token_s * sum(lengths) + cost.token_squared_s * squares) / shared

        return seconds

    def weights(self, values: Coefficients) -> WeightTransferConfig:
        """Return the seconds of a weight update by the run's transport."""
        assert self.gpu is not None and self.model is not None  # noqa: PT018
        return derive_transport(
            self.gpu,
            self.model,
            self.config.train_transport,
            tensor_parallel=self.config.cluster.tensor_parallel,
            training_accelerators=self.config.trainer_ranks,
            colocated=self.config.colocated,
            zero_stage=self.config.train_table.trainer.zero_stage,
            coefficients=values,
        )

    def usable_gb(self, memory_gb: float) -> float:
        """Return what may be used of a device's memory (GB)."""
        return self._values(Level.CENTRAL).memory_share * memory_gb

    def _values(self, level: Level) -> Coefficients:
        return coefficients(level, named_coefficients(self.config))


def reduce_bytes_s(*, one_node: bool) -> Callable[[Gpu, Coefficients], float]:
    """Return the bandwidth of the link in an all-reduce (bytes/s)."""
    return lambda gpu, values: values.allreduce_share * ring_bytes_s(gpu, one_node=one_node)


SOCKET = "Socket"
"""NCCL's name of plain TCP."""
ATTENTION_ERROR = {"cpu": 1e-5, "gpu": 2e-2}
"""Largest error of attention over its largest value: float32 and bfloat16 have 2^-24 and 2^-9, and some hops."""


def machine_rows(config: RunConfig, test: SelfTest, own: dict[str, str], weights_gb: float) -> list[CheckRow]:
    """Compare the reports of the machines; ``own`` are the driver's versions, ``weights_gb`` as engines hold them."""
    others = {
        f"{one.machine}: {name} {one.versions.get(name)}"
        for one in test.places
        for name in own.keys() | one.versions.keys()
        if one.versions.get(name) != own.get(name)
    }
    text = ", ".join(f"{name} {number}" for name, number in own.items())
    rows = [CheckRow(what="versions", measured=text, expected="the same on all machines")]
    if others:
        rows = [wrong("versions", f"{text}; but {', '.join(sorted(others))}", "install the same on all machines")]
    rows += [_machine_row(one) for one in test.places]
    if any(one.sees_folder is False for one in test.places):
        blind = ", ".join(one.machine for one in test.places if one.sees_folder is False)
        rows.append(
            wrong("--out", f"{blind} does not see it", "take a folder that all machines share: ranks write checkpoints")
        )
    writer = test.ranks[0].host if config.train_transport.in_folder else None  # only its machine has a copy
    having = [one for one in test.places if writer in (None, one.machine.split()[0])]
    free_gb = min((one.free_memory_gb for one in having), default=math.inf)
    if free_gb < weights_gb:
        advice = f"weights of {weights_gb:.1f} GB lie there in every update; with train.transport = {FILE.name!r} and "
        advice += "train.weights_folder on a disk on rank 0's machine only"
        rows.append(wrong("host memory", f"{free_gb:.1f} GB are free", advice))
    rows += _rank_rows(config, test.ranks, one_node=len(test.places) == 1)
    if test.to_engines_gb_s is not None:
        expected, size_gb = Expected.of(config, test.ranks[0].device), test.ranks[0].link_gb
        what = f"broadcast of {size_gb:.3g} GB to the engines' machines"
        advice = "look at the network that leads to rank 0's address: one stream of TCP, verified by the host's cores"
        rows.append(expected.rate(what, test.to_engines_gb_s, _stream_bytes_s, advice))
    return rows


def _stream_bytes_s(gpu: Gpu, values: Coefficients) -> float:
    return min(values.stream_bandwidth, gpu.network)


def _machine_row(one: PlaceFacts) -> CheckRow:
    gpus = f"; {'; '.join(one.gpus)}" if one.gpus else ""
    text = f"{one.free_memory_gb:.0f} of {one.memory_gb:.0f} GB free, {one.free_shared_gb:.0f} GB in /dev/shm{gpus}"
    return CheckRow(what=f"machine {one.machine}", measured=text)


def _rank_rows(config: RunConfig, ranks: Sequence[RankFacts], *, one_node: bool) -> list[CheckRow]:
    first, expected = ranks[0], Expected.of(config, ranks[0].device)
    most, errors = ATTENTION_ERROR[config.train_table.device], [one.attention_error for one in ranks]
    error = math.nan if any(map(math.isnan, errors)) else max(errors)
    text = f"{first.kernel}; differs from plain attention by {error:.1e} of its largest value"
    kernel = CheckRow(what="attention kernel", measured=text, expected=f"at most {most:.0e}")
    if not error <= most:
        kernel = wrong("attention kernel", text, f"at most {most:.0e} is rounding: torch and driver do not fit")
    rows = [kernel]
    if len({one.host for one in ranks}) > 1 and config.train_table.device == "gpu":
        rows.append(_network_row([one.network for one in ranks]))
    if all(one.same_checksum for one in ranks):
        rows.append(CheckRow(what="checksum of weights", measured="the same bits on device and host"))
    else:
        rows.append(wrong("checksum of weights", "other bits on device and host", "engines would refuse all weights"))
    if first.reduce_gb_s is None:
        rows.append(unchecked("all-reduce", "the trainer has one rank"))
    else:
        backend = "NCCL" if config.train_table.device == "gpu" else "gloo"
        advice = "look at NCCL_DEBUG=INFO: which network it takes, and whether over GPUDirect RDMA"
        reduced = [one.reduce_gb_s for one in ranks if one.reduce_gb_s is not None]
        sent = [one.broadcast_gb_s for one in ranks if one.broadcast_gb_s is not None]
        for what, speeds in (
            (f"all-reduce of {len(ranks)} ranks ({backend})", reduced),
            (f"broadcast of {first.link_gb:.3g} GB to {len(ranks)} ranks ({backend})", sent),
        ):
            rows.append(expected.rate(what, min(speeds), reduce_bytes_s(one_node=one_node), advice))
    if first.to_host_gb_s is not None:
        speed = min(one.to_host_gb_s for one in ranks if one.to_host_gb_s is not None)
        advice = "weights cross to the host at every update: look at PCIe lanes and at the NUMA node of the process"
        rows.append(expected.rate("GPU to pinned memory", speed, lambda _, values: values.host_bandwidth, advice))
    return rows


def _network_row(networks: Sequence[str | None]) -> CheckRow:
    what, text = "NCCL between machines", ", ".join(sorted({str(one) for one in networks}))
    if None in networks:
        return unchecked(what, "no log of NCCL", "leave NCCL_DEBUG and NCCL_DEBUG_FILE unset for the check")
    if SOCKET in networks:
        advice = "install libibverbs and give containers /dev/infiniband, --network host and --ulimit memlock=-1"
        return wrong(what, f"{text}: 5 to 20 times slower than RDMA", advice)
    return CheckRow(what=what, measured=text)


# -------------------------------------------------------------------------------------------- the longest pack


def longest_pack(config: RunConfig, prompt: Sequence[int]) -> tuple[list[Sample], list[int]]:
    """Return samples that fill every rank's longest row with repeated ``prompt``, and the lengths of a row (tokens)."""
    trainer, prompts = config.train_table.trainer, config.train_table.task.max_prompt_tokens
    longest = config.room_tokens
    lengths = [longest] * (trainer.row_tokens // longest)
    if (rest := trainer.row_tokens % longest) > 1:
        lengths.append(rest)

    def sample(number: int, length: int) -> Sample:
        token_N = np.resize(np.array(prompt, dtype=np.int64), length)
        num_prompt = min(prompts, length // 2)
        nothing_T = np.zeros(length - num_prompt, dtype=np.float32)
        return Sample(
            rollout_id=number,
            prompt_P=token_N[:num_prompt],
            segments=(Segment.generated(token_N[num_prompt:], nothing_T),),
            reward=0.0,
            advantage=0.0,
            reference_logprob_T=nothing_T,
        )

    on_all = [length for length in lengths for _ in range(config.trainer_ranks // trainer.sequence_parallel)]
    return [sample(-1 - number, length) for number, length in enumerate(on_all)], lengths


def taught(samples: Sequence[Sample], result: TrainResult) -> list[Sample]:
    """Return trained samples as if the policy had sampled them, all of them good: every loss has a gradient then."""
    return [
        replace(
            sample,
            segments=(Segment.generated(generated_tokens(sample.segments), logprob_T),),
            reward=1.0,
            advantage=1.0,
            reference_logprob_T=logprob_T,
        )
        for sample, logprob_T in zip(samples, result.logprob_T, strict=True)
    ]


def pack_rows(
    config: RunConfig, result: TrainResult, lengths: list[int], rank: RankFacts, preflight_gb: float | None
) -> list[CheckRow]:
    """Judge training on one longest pack (tokens); ``preflight_gb`` None: no estimate for this device."""
    expected, metrics = Expected.of(config, rank.device), result.metrics
    phases = {name: _slowest(metrics, f"{name}_s") for name in ("forward", "backward", "optimizer")}
    spent_s = sum(phases.values())
    times = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in phases.items())
    what = f"a pack of {sum(lengths)} tokens"
    if "flop_sum" in metrics and "peak_flops" in metrics and spent_s:
        mfu = metrics["flop_sum"] / config.trainer_ranks / spent_s / metrics["peak_flops"]
        times += f"; {mfu:.0%} of the peak FLOP/s"
    advice = "look at clocks and power (nvidia-smi -q -d PERFORMANCE), other processes, and the all-reduce above"
    pack_s = expected.pack_s(lengths, metrics.get("recomputed_layers"))
    rows = [expected.seconds(what, times, phases["forward"] + phases["backward"], pack_s, advice)]
    peak_gb = _slowest(metrics, "peak_memory_gb")
    if math.isnan(peak_gb):
        return rows
    text = f"{peak_gb:.2f} GB at most"
    if rank.total_gb is None or preflight_gb is None:
        return [*rows, CheckRow(what="  its memory", measured=text, expected="of the whole process")]
    usable_gb = expected.usable_gb(rank.total_gb)
    row = CheckRow(
        what="  its memory", measured=text, expected=f"preflight {preflight_gb:.1f} GB; {usable_gb:.0f} GB usable"
    )
    if peak_gb > usable_gb:
        row = wrong(row.what, f"{text} of {usable_gb:.0f} GB usable", "train.trainer.pack_tokens must be smaller")
    return [*rows, row]


def _slowest(metrics: dict[str, Any], name: str) -> float:
    return max((value for key, value in metrics.items() if key.rpartition("/")[2] == name), default=math.nan)
