"""Utilisation: the fitted curve has the printed values, a measured table is interpolated."""

import math
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import message

from pipelinerl.hardware.utilisation import fitted_utilisation, read_utilisation


@pytest.mark.parametrize(
    ("h", "printed", "digits"),
    [
        (1, 0.0021, 4), (32, 0.069, 3), (64, 0.137, 3), (96, 0.204, 3), (128, 0.269, 3), (160, 0.330, 3),
        (192, 0.384, 3), (224, 0.431, 3), (256, 0.470, 3), (320, 0.525, 3), (384, 0.557, 3), (512, 0.588, 3),
        (1024, 0.608, 3),
    ],
)  # fmt: skip
def test_fitted_curve_has_the_printed_values(h, printed, digits):
    """Half a digit, plus the rounding of a = 467.1 flashes: 0.05/467.1."""
    rounding = 0.5 * 10**-digits + printed * 0.05 / 467.1
    assert fitted_utilisation().utilisation(h) == pytest.approx(printed, abs=rounding)


def test_step_of_no_sequence_costs_nothing_and_has_no_utilisation():
    curve = fitted_utilisation()
    assert curve.step_flashes(0) == 0.0
    assert curve.utilisation(0) == 0.0
    assert curve.step_flashes(np.array([0, 1])).tolist() == [0.0, pytest.approx(467.1, rel=1e-6)]


@pytest.mark.parametrize("h", [-1, math.nan, math.inf])
def test_curve_refuses_numbers_that_cannot_count_sequences(h):
    with pytest.raises(ValueError, match="h must be finite and at least 0, got"):
        fitted_utilisation().step_flashes(h)
    with pytest.raises(ValueError, match="h must be finite and at least 0, got"):
        fitted_utilisation().utilisation(np.array([1.0, h]))


@given(h=st.floats(0.001, 1e6), more=st.floats(1.001, 2))
def test_fitted_curve_rises_to_its_plateau_and_never_loses_on_a_larger_step(h, more):
    curve = fitted_utilisation()
    assert 0 < curve.utilisation(h) <= curve.utilisation(h * more) * (1 + 1e-12) <= 0.61 * (1 + 1e-11)
    assert curve.step_flashes(h) <= curve.step_flashes(h * more) * (1 + 1e-12)
    assert curve.step_flashes(h) >= max(467.1, h / 0.61) * (1 - 1e-12)


def test_curves_cross_process_borders(tmp_path):
    table = tmp_path / "u.csv"
    table.write_text("batch,utilisation\n1,0.01\n100,0.5\n", encoding="utf-8")
    for curve in (fitted_utilisation(), read_utilisation(table)):
        assert pickle.loads(pickle.dumps(curve)).step_flashes(7) == curve.step_flashes(7)


def write(folder: Path, text: str) -> Path:
    path = folder / "u.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_table_interpolates_the_step_cost_and_holds_its_ends(tmp_path):
    """By hand: costs at the rows are 2/0.01 = 200, 60/0.2 = 300, 100/0.2 = 500 flashes."""
    curve = read_utilisation(write(tmp_path, "batch,utilisation\n2,0.01\n60,0.2\n\n100,0.2\n"))
    steps = curve.step_flashes(np.array([0.5, 1, 2, 31, 60, 80, 100, 200]))
    assert steps == pytest.approx([200, 200, 200, 250, 300, 400, 500, 1000])
    assert curve.utilisation(1000) == pytest.approx(0.2)


@settings(deadline=None)  # it writes files
@given(
    shares=st.lists(st.floats(0.001, 1), min_size=2, max_size=6),
    gaps=st.lists(st.floats(0.1, 100), min_size=6, max_size=6),
    h=st.floats(0.01, 1000),
)
def test_table_stays_between_its_rows(tmp_path_factory, shares, gaps, h):
    batch = 1 + np.cumsum(gaps[: len(shares)])
    rows = "".join(f"{float(b)!r},{u!r}\n" for b, u in zip(batch, shares, strict=True))
    curve = read_utilisation(write(tmp_path_factory.mktemp("table"), "batch,utilisation\n" + rows))
    assert curve.utilisation(h) <= max(shares) * (1 + 1e-12)
    if h >= batch[0]:
        assert curve.utilisation(h) >= min(shares) * (1 - 1e-12)
    assert curve.utilisation(batch) == pytest.approx(shares)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("batch,utilisation\n0.5,0.1\n", " line 2: batch must be a number of at least 1, got '0.5'"),
        ("batch,utilisation\n2,0.1\n2,0.2\n", " line 3: batch must rise from row to row, got 2 after 2"),
        ("batch,utilisation\n2,0\n", " line 2: utilisation must be a number above 0 and at most 1, got '0'"),
        ("batch,utilisation\n2,38\n", " line 2: utilisation must be a number above 0 and at most 1, got '38'"),
        ("batch,utilisation\n2,0.1\n\n", ": the table must have at least 2 rows, got 1"),
    ],
)
def test_faulty_table_is_refused_with_file_line_and_rule(tmp_path, text, line):
    path = write(tmp_path, text)
    assert message(read_utilisation, path) == f"{path}{line}"
