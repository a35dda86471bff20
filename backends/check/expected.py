"""What the hardware catalogue expects of a machine: its central level; what is slower than its pessimistic is slow.

Nothing is expected of an accelerator that the catalogue does not know, such as a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from backends.preflight import trainer_ranks
from pipelinerl.config.resolve import stated_coefficients
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.catalogue import Gpu, LanguageModel, find_model, gpu_of_device
from pipelinerl.hardware.coefficients import Coefficients, Level, coefficients
from pipelinerl.hardware.derive import NOTHING_BESIDE, derive_training, derive_transport, ring_bytes_s
from pipelinerl.hardware.tables import WeightTransferConfig
from pipelinerl.records.check_report import CheckRow, Finding

NOT_KNOWN = "nothing: the hardware catalogue does not have this device"


@dataclass(frozen=True, slots=True)
class Expected:
    """A run on the machines at hand, as far as the catalogue knows them."""

    config: RunConfig
    gpu: Gpu | None
    model: LanguageModel | None

    @classmethod
    def of(cls, config: RunConfig, device_name: str) -> Self:
        """Return what is expected of a run on devices of this name, as their driver has it."""
        assert config.train is not None
        try:
            model = find_model(f"{config.train.model.path}/config.json")
        except ConfigError:  # of a kind whose parameters the catalogue cannot count
            model = None
        return cls(config, gpu_of_device(device_name), model)

    def rate(self, what: str, gb_s: float, least: Callable[[Gpu, Coefficients], float], advice: str) -> CheckRow:
        """Return the row of a speed (GB/s), given what the catalogue expects (bytes/s)."""
        text = f"{gb_s:.3g} GB/s"
        if self.gpu is None:
            return CheckRow(what=what, measured=text, expected=NOT_KNOWN)
        central, floor = (least(self.gpu, self._values(level)) / 1e9 for level in (Level.CENTRAL, Level.PESSIMISTIC))
        expected = f"{central:.3g} GB/s; slow below {floor:.3g}"
        return _row(what, text, expected, slow=gb_s < floor, advice=advice)

    def seconds(
        self, what: str, text: str, seconds: float, most: Callable[[Coefficients], float], advice: str
    ) -> CheckRow:
        """Return the row of a time (seconds), given what the catalogue expects."""
        if self.gpu is None or self.model is None:
            return CheckRow(what=what, measured=text, expected=NOT_KNOWN)
        central, limit = (most(self._values(level)) for level in (Level.CENTRAL, Level.PESSIMISTIC))
        expected = f"{central:.3g} s; slow above {limit:.3g} s"
        return _row(what, text, expected, slow=seconds > limit, advice=advice)

    def pack_s(self, lengths: list[int]) -> Callable[[Coefficients], float]:
        """Return the seconds of an optimizer step of one pack on every rank, without what is fixed (``step_s``)."""

        def seconds(values: Coefficients) -> float:
            assert self.gpu is not None and self.model is not None  # noqa: PT018  # not a test
            ranks = trainer_ranks(self.config)
            values = values.model_copy(update=NOTHING_BESIDE)
            cost = derive_training(self.gpu, self.model, training_accelerators=ranks, coefficients=values)
            squares = sum(length**2 for length in lengths)
            return cost.micro_batch_s + cost.token_s * sum(lengths) + cost.token_squared_s * squares

        return seconds

    def weights(self, values: Coefficients) -> WeightTransferConfig:
        """Return the seconds of a weight update by the run's transport."""
        assert self.gpu is not None and self.model is not None and self.config.train is not None  # noqa: PT018
        return derive_transport(
            self.gpu,
            self.model,
            self.config.train.chosen_transport(colocated=self.config.colocated),
            tensor_parallel=self.config.cluster.tensor_parallel,
            training_accelerators=trainer_ranks(self.config),
            zero_stage=self.config.train.trainer.zero_stage,
            coefficients=values,
        )

    def usable_gb(self, memory_gb: float) -> float:
        """Return what may be used of a device's memory (GB)."""
        return self._values(Level.CENTRAL).memory_share * memory_gb

    def _values(self, level: Level) -> Coefficients:
        return coefficients(level, stated_coefficients(self.config))


def reduce_bytes_s(*, one_node: bool) -> Callable[[Gpu, Coefficients], float]:
    """Return what an all-reduce makes of the link (bytes/s)."""
    return lambda gpu, values: values.allreduce_share * ring_bytes_s(gpu, one_node=one_node)


def _row(what: str, text: str, expected: str, *, slow: bool, advice: str) -> CheckRow:
    finding = Finding.SLOW if slow else Finding.OK
    return CheckRow(what=what, measured=text, expected=expected, finding=finding, advice=advice if slow else "")
