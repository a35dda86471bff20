"""Tables of step times: known coefficients come back, nonsense is refused."""

from pathlib import Path
from typing import Any

import pytest
from calibrated import GRID, NAMED, decode_rows, decode_s, numbers_of, run_of, table_of, undetermined

from pipelinerl.calibration.calibrate import calibrate_table
from pipelinerl.calibration.solve import HardwareFit
from pipelinerl.calibration.table import read_step_times
from pipelinerl.config.resolve import resolved_hardware
from pipelinerl.errors import ConfigError
from pipelinerl.hardware.catalogue import find_gpu, find_model
from pipelinerl.hardware.coefficients import Level, coefficients
from pipelinerl.hardware.costs import PrefillConfig, prefill_s
from pipelinerl.hardware.derive import derive_decode, derive_training


def test_equal_short_contexts_do_not_make_the_cache_slow(tmp_path: Path) -> None:
    rows = ["decode,1,1,10,,0.01,"] * 4
    result = calibrate_table(table_of(tmp_path / "t.csv", *rows), run_of(NAMED))
    assert "kv_efficiency" not in result.table["coefficients"]


def test_a_row_of_absurd_size_is_fitted_with_the_others(tmp_path: Path) -> None:
    rows = [f"decode,1,{batch},10,,0.01," for batch in (1, 2, 4, 10**15)]
    (part,) = calibrate_table(table_of(tmp_path / "t.csv", *rows), run_of(NAMED)).parts
    assert part.fit.rows == 4
    assert all(value >= 0 for value in part.fit.values.values())  # nan is not


def test_fewer_rows_of_a_table_than_accelerators_are_as_slow_as_one_each(tmp_path: Path) -> None:
    """As measured: one sequence on each of b accelerators of 8, in the time of one."""
    values = coefficients(Level.CENTRAL, {"training_mfu": 0.4})
    one = derive_training(find_gpu("H100"), find_model("Qwen2.5-7B"), training_accelerators=8, coefficients=values)

    def seconds(batch: int, tokens: int) -> float:
        work_s = one.token_s * tokens + one.token_squared_s * tokens**2
        return one.step_s + one.micro_batch_s + work_s * -(-batch // 8)

    sizes = [(batch, tokens) for batch in (1, 3, 8, 20, 64) for tokens in (512, 4096)]
    rows = [f"train,8,{batch},,{batch * tokens},{seconds(batch, tokens)!r}," for batch, tokens in sizes]
    result = calibrate_table(table_of(tmp_path / "t.csv", *rows), run_of(NAMED))
    assert result.table["coefficients"]["training_mfu"] == pytest.approx(0.4, rel=1e-3)
    assert result.parts[0].fit.max_error < 1e-6


def test_a_table_gives_back_its_line(tmp_path: Path) -> None:
    train = [
        f"train,2,{b},,{b * n},{1.0 + 2e-4 * b * n + 3e-8 * b * n * n!r}," for b, n in ((1, 512), (4, 512), (2, 4096))
    ]
    train.append(f"train,2,8,,8192,{1.0 + 2e-4 * 8192 + 3e-8 * 8192 * 1024!r},")
    path = table_of(tmp_path / "t.csv", *decode_rows(*GRID), *train)
    result = calibrate_table(path)
    assert numbers_of(result.table["decode"]) == pytest.approx(
        {"step_s": 5e-3, "sequence_s": 1e-5, "context_token_s": 2e-8}, rel=1e-5
    )
    training = result.table["training"]  # accelerator-seconds: two of them
    assert training["token_s"] == pytest.approx(4e-4, rel=1e-5)
    assert training["token_squared_s"] == pytest.approx(6e-8, rel=1e-5)
    assert training["step_s"] == pytest.approx(1.0, rel=1e-5)
    assert undetermined(result) == {"micro_batch_s": "cannot be told from step_s"}


def prefill_rows(token_s: float, token_squared_s: float) -> list[str]:
    sizes = ((1, 512), (1, 2048), (4, 512), (1, 8192))
    return [f"prefill,1,{b},,{b * n},{b * (token_s * n + token_squared_s * n * n)!r}," for b, n in sizes]


def test_prefill_rows_give_the_prefill_table(tmp_path: Path) -> None:
    result = calibrate_table(table_of(tmp_path / "t.csv", *prefill_rows(2e-5, 3e-10)))
    assert result.table["prefill"] == pytest.approx(
        {"sequence_s": 0.0, "token_s": 2e-5, "token_squared_s": 3e-10}, rel=1e-4, abs=1e-9
    )
    assert sum("was not measured" in note for note in result.notes) == 2  # decode, training


def test_prefill_rows_give_the_share_of_the_peak(tmp_path: Path) -> None:
    prefill = resolved_hardware(run_of(NAMED, "hardware.coefficients.prefill_mfu=0.5")).prefill
    rows = prefill_rows(prefill.token_s, prefill.token_squared_s)
    result = calibrate_table(table_of(tmp_path / "t.csv", *rows), run_of(NAMED))
    assert result.table["coefficients"] == pytest.approx({"prefill_mfu": 0.5})


@pytest.mark.parametrize("data", [None, NAMED], ids=["tables", "names"])
def test_seconds_of_requests_besides_prefill_are_the_front_ends(tmp_path: Path, data: dict[str, Any] | None) -> None:
    """1.5 ms for each request, and prefill as in the rows of prefill."""
    prefill = PrefillConfig(token_s=2e-5)
    run = None if data is None else run_of(data, "hardware.coefficients.prefill_mfu=0.5")
    if run is not None:
        prefill = resolved_hardware(run).prefill
    rows = prefill_rows(prefill.token_s, prefill.token_squared_s)
    for batch, tokens in ((1, 512), (8, 256), (32, 1024)):
        filled_s = prefill_s(prefill, sequences=batch, tokens=batch * tokens, squares=batch * tokens**2)
        rows.append(f"request,1,{batch},,{batch * tokens},{batch * 1.5e-3 + filled_s!r},")
    result = calibrate_table(table_of(tmp_path / "t.csv", *rows), run)
    assert result.table["latency"] == pytest.approx({"request_s": 1.5e-3}, rel=1e-3)


def test_products_are_reported_and_not_fitted(tmp_path: Path) -> None:
    result = calibrate_table(table_of(tmp_path / "t.csv", "matmul,,1,,,,0.1", "matmul,,64,,,,0.8"))
    assert "matmul: utilisation 0.80 at most, with 64 rows" in result.notes[0]
    assert not result.parts


def test_one_context_leaves_the_context_undetermined(tmp_path: Path) -> None:
    rows = decode_rows((1, 1024), (8, 1024), (32, 1024), (64, 1024))
    result = calibrate_table(table_of(tmp_path / "t.csv", *rows))
    assert undetermined(result) == {"context_token_s": "cannot be told from sequence_s"}


def test_two_engine_sizes_tell_weights_from_overhead(tmp_path: Path) -> None:
    run = run_of(
        NAMED, "hardware.coefficients={ weight_efficiency = 0.7, kv_efficiency = 0.6, step_overhead_s = 3e-3 }"
    )
    start = HardwareFit(run.hardware)
    assert start.named is not None
    rows = []
    for size in (1, 2, 4):
        decode = derive_decode(*start.named, tensor_parallel=size, coefficients=start.coefficients)
        rows += [f"decode,{size},{b},{ctx},,{decode_s(decode, size, b, b * ctx)!r}," for b, ctx in GRID]
    result = calibrate_table(table_of(tmp_path / "t.csv", *rows), run_of(NAMED))
    found = result.table["coefficients"]
    assert found["weight_efficiency"] == pytest.approx(0.7, rel=1e-3)
    assert found["kv_efficiency"] == pytest.approx(0.6, rel=1e-3)
    assert found["step_overhead_s"] == pytest.approx(3e-3, rel=1e-2)


def test_the_export_of_aiconfigurator_is_read_in_milliseconds(tmp_path: Path) -> None:
    path = tmp_path / "kernels.csv"
    rows = [f"Qwen2.5-7B,h100_sxm,1,{b},{ctx},{5 + 0.01 * b + 2e-5 * b * ctx}" for b, ctx in GRID]
    other = [f"Qwen2.5-7B,h200_sxm,1,{b},{ctx},{4 + 0.01 * b + 1e-5 * b * ctx}" for b, ctx in GRID]
    path.write_text("model,system,tp,batch,ctx,tpot_ms\n" + "\n".join(rows))
    assert calibrate_table(path).table["decode"]["step_s"] == pytest.approx(5e-3)
    path.write_text("model,system,tp,batch,ctx,tpot_ms\n" + "\n".join(rows + other))
    with pytest.raises(ConfigError, match="holds several series"):
        calibrate_table(path)
    result = calibrate_table(path, run_of(NAMED))
    assert result.notes == ["series: Qwen2.5-7B on h100_sxm"]
    assert result.parts[0].fit.rows == len(GRID)


HEADER = "kind,batch,ctx,tokens,seconds\n"
WRONG_TABLES = {
    "more sequences than tokens": (HEADER + "train,8,,4,1\n", "line 2: tokens are those of all sequences"),
    "missing cell": (HEADER + "decode,1,,,0.1\n", "line 2: a decode row needs ctx"),
    "too few rows": (HEADER + "decode,1,512,,0.1\n", "decode needs at least 4 rows, got 1"),
}


@pytest.mark.parametrize(("text", "message"), WRONG_TABLES.values(), ids=WRONG_TABLES.keys())
def test_a_wrong_table_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_step_times(path)


@pytest.mark.parametrize(
    ("column", "cell"),
    [
        ("accelerators", "0"), ("batch", "0"), ("batch", "1.5"), ("ctx", "-1"), ("tokens", "0"), ("tokens", "2.5"),
        ("seconds", "0"), ("seconds", "fast"), ("seconds", "inf"), ("utilisation", "0"), ("utilisation", "1.2"),
    ],
)  # fmt: skip
def test_a_cell_that_cannot_be_is_refused_by_column_and_value(tmp_path: Path, column: str, cell: str) -> None:
    row = {"kind": "decode", "batch": "1", "ctx": "512", "seconds": "0.1", column: cell}
    path = tmp_path / "t.csv"
    path.write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
    with pytest.raises(ConfigError, match=f"line 2: {column} must be .*, got '{cell}'"):
        read_step_times(path)


def test_milliseconds_are_noticed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"median of 5.*plausible are 1e-05 to 2 s; are they milliseconds"):
        calibrate_table(table_of(tmp_path / "t.csv", *decode_rows(*GRID, unit=1000)))
    with pytest.raises(ConfigError, match="units differ between rows"):
        calibrate_table(table_of(tmp_path / "t.csv", *decode_rows(*GRID), "decode,1,1,512,,5.0,"))


def test_times_that_the_gpu_cannot_reach_are_refused(tmp_path: Path) -> None:
    rows = [f"train,1,{b},,{1024 * b},{1e-3 * b}," for b in (1, 2, 4)]  # 1 M tokens/s of a 7B
    with pytest.raises(ConfigError, match=r"times the peak of H100 for Qwen2\.5-7B"):
        calibrate_table(table_of(tmp_path / "t.csv", *rows), run_of(NAMED))
    slow = decode_rows(*GRID, unit=200)
    with pytest.raises(ConfigError, match=r"decode seconds have a median of .* check unit, GPU and model"):
        calibrate_table(table_of(tmp_path / "t.csv", *slow), run_of(NAMED))


def test_engines_of_several_sizes_need_gpu_and_model(tmp_path: Path) -> None:
    rows = [*decode_rows(*GRID), *(row.replace("decode,1", "decode,2") for row in decode_rows(*GRID))]
    with pytest.raises(ConfigError, match="engines of 1, 2 accelerators: give --run"):
        calibrate_table(table_of(tmp_path / "t.csv", *rows))
