"""The paper's case study, appendix A.4."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pipelinerl.hardware.utilisation import UtilisationCurve, fitted_utilisation
from pipelinerl.theory.lengths import uniform_lengths
from pipelinerl.theory.paper import Setting

TAU = 4.918  # flashes per token: 128 / 26.02 = 84 / 17.08, paper A.4
LINEAR = UtilisationCurve(lambda h: np.full_like(h, 467.1))  # U(h) = h / 467.1


def case_study(**changes: Any) -> Setting:
    """Paper A.4: N = B = 128, lengths uniform on 1..2048."""
    return dataclasses.replace(Setting(fitted_utilisation(), uniform_lengths(2048), 128, 128, TAU), **changes)
