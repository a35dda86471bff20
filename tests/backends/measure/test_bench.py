"""Measuring on the CPU at hand, with sizes of a few tokens."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import Command
from refusals import message

from pipelinerl.calibration.calibrate import calibrate_table
from pipelinerl.calibration.table import COLUMNS
from pipelinerl.hardware.utilisation import read_utilisation

torch = pytest.importorskip("torch")

from tiny_measure import SHAPE, TINY, measure_little  # noqa: E402 - needs torch

from backends.measure import bench as measuring  # noqa: E402
from backends.measure.bench import Bench, PlainModel, PlainShape, Sizes, measure, parameter_count  # noqa: E402


@pytest.fixture
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Measure a tiny model on one thread."""
    measure_little(monkeypatch)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def plain(shape: PlainShape = SHAPE) -> Any:
    torch.manual_seed(0)
    return PlainModel(shape, device=torch.device("cpu"), dtype=torch.float32)


def rows_in(out: Path) -> list[dict[str, str]]:
    with (out / "step_times.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.usefixtures("tiny_shape")
def test_all_tables_are_written_and_calibrate_reads_them(tmp_path: Path) -> None:
    said: list[str] = []
    done = measure(tmp_path / "out", device="cpu", sizes=TINY, on_progress=said.append)
    assert done["rows"] == {"matmul": 3, "decode": 4, "prefill": 3, "train": 3}
    assert done["complete"]
    assert len(said) == 13
    rows = rows_in(tmp_path / "out")
    assert tuple(rows[0]) == COLUMNS
    assert [(int(row["batch"]), int(row["ctx"])) for row in rows if row["kind"] == "decode"] == list(TINY.decode)
    assert [row["tokens"] for row in rows if row["kind"] == "train"] == ["8", "32", "128"]
    assert all(float(row["seconds"]) > 0 for row in rows if row["kind"] != "matmul")
    assert max(float(row["utilisation"]) for row in rows if row["kind"] == "matmul") == 1.0  # the best is the peak
    assert read_utilisation(tmp_path / "out" / "utilisation.csv").step_flashes(1) >= 1.0
    assert {"decode", "prefill", "training"} <= set(calibrate_table(tmp_path / "out" / "step_times.csv").table)
    conditions = json.loads((tmp_path / "out" / "conditions.json").read_text())
    assert conditions["rows"] == done["rows"]
    assert conditions["dtype"] == "float32"
    assert conditions["parameters"] == parameter_count(SHAPE)
    assert "holds step_times.csv" in message(measure, tmp_path / "out", device="cpu", sizes=TINY)


@pytest.mark.usefixtures("tiny_shape")
def test_the_command_measures_and_tells_its_progress(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "CPU_SIZES", TINY)
    result = command("measure", "--device", "cpu", "--out", tmp_path / "out")
    assert (result.status, result.out.count("\n")) == (0, 1)
    assert "3 of matmul, 4 of decode, 3 of prefill, 3 of train" in result.out
    assert result.err.count("pipelinerl: decode: batch") == 4


@pytest.mark.usefixtures("tiny_shape")
def test_what_is_measured_before_an_interrupt_is_kept(tmp_path: Path) -> None:
    def stop(text: str) -> None:
        if text.startswith("decode"):
            raise KeyboardInterrupt

    done = measure(tmp_path, device="cpu", sizes=TINY, on_progress=stop)
    assert not done["complete"]
    assert done["rows"] == {"matmul": 3, "decode": 1}
    assert len(rows_in(tmp_path)) == 4


def test_decoding_token_by_token_is_a_whole_pass_at_every_place() -> None:
    model, token_BL = plain(), torch.randint(50, (3, 7))
    with torch.inference_mode():
        expected_BL = (torch.nn.functional.rms_norm(model.hidden(token_BL), (32,)) @ model.head).argmax(dim=-1)
        cache = model.empty_cache(3, 0)
        for place in range(7):
            assert torch.equal(model.decode(token_BL[:, place], cache), expected_BL[:, place])
            longer = model.empty_cache(3, place + 1)
            for (k, v), (old_k, old_v) in zip(longer, cache, strict=True):
                k[:, :, :-1], v[:, :, :-1] = old_k, old_v
            cache = longer


def test_the_model_has_the_parameters_that_are_counted() -> None:
    # per layer: 32 x (32 + 2 x 16) + 32 x 32 + 32 x 128 + 64 x 32 = 9216; embeddings 2 x 50 x 32
    assert parameter_count(SHAPE) == 2 * 9216 + 3200
    assert sum(parameter.numel() for parameter in plain().parameters()) == parameter_count(SHAPE)


def test_a_training_step_lowers_the_loss() -> None:
    model, token_BL = plain(), torch.randint(50, (2, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.loss(token_BL)
    before.backward()
    optimizer.step()
    assert model.loss(token_BL) < before


def test_the_median_of_the_timed_calls_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    bench = Bench("cpu", Sizes(products=(), decode=(), prefill=(), train=(), warm_up=2, repeats=3, least_s=0.0))
    times = iter([0.5, 0.1, 0.2])
    monkeypatch.setattr(bench, "_once", lambda work: (work(), next(times))[1])
    assert bench.seconds(lambda: calls.append(1)) == 0.2
    assert len(calls) == 5


def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "--device must be cpu or auto here, got gpu" in message(measure, tmp_path, device="gpu")


def test_a_model_without_a_config_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "/config.json: No such file" in message(measure, out, device="cpu", model=tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "lacks 'num_attention_heads'" in message(measure, out, device="cpu", model=tmp_path)
    assert not out.exists()


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")  # vLLM and torch warn of much
def test_decode_steps_are_measured_in_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM generates; the times are those of a steady machine, since differences of real ones may be negative."""
    pytest.importorskip("vllm")
    from tiny_model import make_tiny_model

    from backends.vllm.offline import OfflineEngine

    generate_s, forgets = OfflineEngine.generate_s, []

    def steady_s(engine: OfflineEngine, batch: int, prompt_tokens: int, new_tokens: int, *, forget: bool) -> float:
        assert generate_s(engine, batch, prompt_tokens, new_tokens, forget=forget) > 0
        forgets.append(forget)
        return 1.0 + 0.01 * new_tokens

    monkeypatch.setattr(OfflineEngine, "generate_s", steady_s)
    monkeypatch.setattr(measuring, "MOST_READ", 50)  # 1 prompt of 8 tokens is read anew, 8 are not
    make_tiny_model(tmp_path / "model", fit_steps=1)
    sizes = replace(TINY, decode=((1, 32), (8, 32)), repeats=2)
    done = measure(tmp_path / "out", device="cpu", model=tmp_path / "model", sizes=sizes)
    assert done["decode_by"] == "vllm"
    rows = rows_in(tmp_path / "out")
    assert [float(row["seconds"]) for row in rows if row["kind"] == "decode"] == [0.01, 0.01]
    assert [(int(row["batch"]), float(row["seconds"])) for row in rows if row["kind"] == "request"] == [(1, 1.0)]
    assert forgets == 6 * [True] + 6 * [False]
