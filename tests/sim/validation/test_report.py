"""The report of a validation: errors, pairs in order, assumptions, and what is printed."""

import pytest

from pipelinerl.cli.render_validation import print_validation
from pipelinerl.records.validation_report import PredictedRow, UnusableRow, ValidationReport
from pipelinerl.records.validation_table import validation_markdown
from sim.validation.report import validation_report


def predicted(name, measured, predicted, *, family="f", quantity="s/step", assumed=()):
    return PredictedRow(
        id=name, family=family, mode="", quantity=quantity, gpus=None, answer_tokens=None, measured=measured,
        predicted=predicted, low=0.0, high=0.0, inputs=(), fitted_to=(), assumed=assumed, alone=None, alone_low=None,
        alone_high=None, error=predicted / measured - 1,
    )  # fmt: skip


def test_errors_and_orders_are_counted():
    rows = [predicted("a", 10, 11), predicted("b", 20, 15), predicted("c", 30, 12), predicted("d", 1, 1, family="g")]
    result = validation_report([*rows, UnusableRow(id="e", reason="no")])
    assert result.summary.median_error == pytest.approx(0.175)
    assert result.summary.within_30_percent == 0.75
    assert [pair.in_order for pair in result.pairs] == [True, True, False]  # ab, ac, bc
    assert "- `e`: no" in validation_markdown(result)
    assert ValidationReport.from_dict(result.to_dict(), name="validation.json") == result
    assert "alone" in result.to_dict()["rows"][0]


def test_without_rows_there_are_no_errors():
    summary = validation_report([]).summary
    assert (summary.rows, summary.pairs) == (0, 0)
    assert {value for _, value in summary} == {0, None}


def test_assumptions_stand_beside_the_prediction(capsys):
    first = predicted("a", 10, 11, quantity="tokens/s", assumed=("an H100", "mean length"))
    result = validation_report([first, predicted("b", 10, 11, assumed=("mean length",))])
    assert "| an H100; mean length | 0 |" in validation_markdown(result)
    print_validation(result)
    assert "assumed: mean length: a, b\n" in capsys.readouterr().out
