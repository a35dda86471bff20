"""The analytic model beside a simulated comparison, where both speak of the same thing."""

from __future__ import annotations

import numpy as np

from analysis.read import RateCurves
from pipelinerl.config.resolve import resolved_hardware
from pipelinerl.config.run import RunConfig
from pipelinerl.hardware.tables import UtilisationDecode
from pipelinerl.hardware.utilisation import fitted_utilisation, read_utilisation
from pipelinerl.theory.lengths import lengths_from, uniform_lengths
from pipelinerl.theory.paper import Setting, throughput_against_lag

NUM_LAGS = 24
"""Points of a curve (count)."""


def analytic_curves(config: RunConfig, *, largest_lag: float) -> RateCurves | None:
    """Return the paper's Fig 9 for a run file: throughput in tokens/flash against max lag, both methods.

    Args:
        config: A run file in the paper's mode (``decode.kind = "utilisation"``), with fixed or uniform lengths.
        largest_lag: Where the curves end (optimizer steps).

    Returns:
        The curves, or None where appendix A does not describe the run.
    """
    decode, length = config.hardware.decode, config.workload.length
    if not isinstance(decode, UtilisationDecode) or length.kind not in ("fixed", "uniform"):
        return None
    lengths = uniform_lengths(length.max) if length.kind == "uniform" else lengths_from([length.max])
    setting = Setting(
        curve=fitted_utilisation() if decode.table is None else read_utilisation(decode.table),
        lengths=lengths,
        accelerators=config.cluster.accelerators,
        train_batch_size=config.scheduler.train_batch_size,
        training_flashes_per_token=resolved_hardware(config).training.token_s / decode.flash_s,
    )
    lags = np.unique(np.geomspace(1, max(2.0, largest_lag), NUM_LAGS).round().astype(int))
    points = throughput_against_lag(setting, [int(lag) for lag in lags])
    return RateCurves(
        max_lag=np.array([point.max_lag for point in points], dtype=float),
        pipeline=np.array([point.pipeline.rates.total for point in points]),
        conventional=np.array([point.conventional.total for point in points]),
    )
