"""Tables under [hardware]: wrong ones are refused, and all of their times can be made longer."""

import pytest
from derived import run_data
from run_tables import faults

from pipelinerl.calibration.solve import DECODE_COEFFICIENTS, TRAINING_COEFFICIENTS
from pipelinerl.hardware.coefficients import SHARES_OF_PEAK, Coefficients
from pipelinerl.hardware.costs import (
    AffineDecode,
    PrefillConfig,
    RooflineDecode,
    TimedTable,
    TrainingConfig,
    UtilisationDecode,
)

ROOFLINE = RooflineDecode(
    kind="roofline", peak_flops=1e15, bandwidth=3e12, parameters_read=7e9, parameters_active=7e9, kv_bytes_per_token=5e4
)


@pytest.mark.parametrize("table", TimedTable.__subclasses__())
def test_every_field_is_in_one_class(table: type[TimedTable]) -> None:
    named = [*table.SECONDS, *table.RATES, *table.SHARES, *table.SIZES]
    assert sorted(named) == sorted(table.model_fields)
    assert {name for name in table.model_fields if name.endswith("_s")} == set(table.SECONDS)


def test_slower_accelerators_lower_the_peaks_and_slower_software_their_shares() -> None:
    accelerators, software = ROOFLINE.on_slower_accelerators(2.0), ROOFLINE.with_slower_software(2.0)
    overheads = {"step_overhead_s": 2.4e-3, "sequence_overhead_s": 2.14e-5}
    assert accelerators == ROOFLINE.model_copy(update={**overheads, "peak_flops": 5e14, "bandwidth": 1.5e12})
    shares = {"weight_efficiency": 0.36, "kv_efficiency": 0.375, "flops_efficiency": 0.35}
    assert software == ROOFLINE.model_copy(update={**overheads, **shares})
    assert ROOFLINE.with_slower_software(0.1).kv_efficiency == 1.0  # and no more


def test_tables_of_seconds_are_scaled_either_way() -> None:
    for table in (
        UtilisationDecode(kind="utilisation", flash_s=1.0),
        AffineDecode(kind="affine", step_s=1.0, sequence_s=2.0, context_token_s=3.0),
        PrefillConfig(sequence_s=1.0, token_s=2.0, token_squared_s=3.0),
        TrainingConfig(token_s=1.0, token_squared_s=2.0, step_s=3.0, micro_batch_s=4.0, sequence_accelerators=4),
    ):
        tripled = table.model_copy(update={name: 3 * getattr(table, name) for name in table.SECONDS})
        assert table.on_slower_accelerators(3.0) == table.with_slower_software(3.0) == tripled


def test_every_coefficient_that_is_fitted_is_a_time_or_a_share_of_a_peak() -> None:
    fitted = {*DECODE_COEFFICIENTS, *TRAINING_COEFFICIENTS, "layer_overhead_s", "prefill_mfu"}
    in_proportion = {name for name in fitted if name.endswith("_s")} | {"activation_traffic"}
    assert fitted - in_proportion == {*SHARES_OF_PEAK}
    assert fitted <= Coefficients.model_fields.keys()


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({}, "hardware.decode.experts_per_token is missing; "),
        ({"experts_per_token": 9, "expert_parameters": 1e9}, "hardware.decode.experts_per_token must be at most"),
        ({"bandwidth": 3350.0}, "hardware.decode.bandwidth must be from 1e+09 to 1e+18 bytes/s, got 3350; did you"),
        ({"bandwidth": 3.35e24}, "hardware.decode.bandwidth must be from 1e+09 to 1e+18 bytes/s, got 3.35e+24; did"),
        ({"peak_flops": 989.0}, "hardware.decode.peak_flops must be from 1e+09 to 1e+18 FLOP/s, got 989; did you"),
    ],
)
def test_a_roofline_with_half_of_its_experts_or_in_other_units_is_refused(changed, line):
    decode = {**ROOFLINE.model_dump(exclude_none=True), "experts": 8, **changed}
    assert line in "".join(faults(run_data(decode=decode, training={"token_s": 0.0})))


@pytest.mark.parametrize(
    ("hardware", "line"),
    [
        ({"gpu": "H100"}, "run: hardware.model is missing; hardware.gpu needs it"),
        ({"model": "Qwen2.5-7B"}, "run: hardware.gpu is missing; hardware.model needs it"),
        ({"training": {"token_s": 0.0}}, "run: hardware.decode is missing"),
        ({"decode": {"kind": "affine", "step_s": 1.0}}, "run: hardware.training is missing"),
        ({"decode": {"kind": "affine", "step_s": 1.0}, "training": {"token_s": 0.0}, "coefficients": {"pause_s": 1.0}},
            "run: hardware.coefficients needs hardware.gpu and hardware.model, which are missing"),
        ({"decode": {"kind": "affine", "step_s": 1.0}, "training": {"token_s": 0.0}, "generation_gpu": "H20"},
            "run: hardware.generation_gpu needs hardware.gpu and hardware.model, which are missing"),
        ({"gpu": "H100", "model": "Qwen2.5-7B", "coefficients": {"training_mfu": 31.0}},
            "run: hardware.coefficients.training_mfu must be at most 1, got 31"),
    ],
)  # fmt: skip
def test_wrong_hardware_is_one_line(hardware, line):
    assert faults(run_data(**hardware)) == [line]
