"""The script of a GPU session, at tiny sizes on CPU."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import gpu_session

from pipelinerl.config.run import load_run


def found_by(part: str, out: Path) -> dict[str, Any]:
    gpu_session.main(["--part", part, "--out", str(out), "--tiny"])
    return json.loads((out / f"{part}.json").read_text(encoding="utf-8"))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of the compiler
def test_passes_count_their_products(tmp_path: Path) -> None:
    """By hand: 128 tokens through 2 layers of 36,864 numbers, 6 FLOP each; 112 answer tokens through an output layer of
    64 x 64, 8 FLOP each, since it is computed again.
    """
    found = found_by("train", tmp_path)
    assert found["flop"] == 6 * 128 * 2 * 36_864 + 8 * 112 * 64 * 64
    assert min(found[f"{way}_{again}_s"] for way in ("eager", "fused") for again in (0, 1, 2)) > 0


def test_a_delta_takes_three_bytes_a_change_and_steps_change_a_few_numbers(tmp_path: Path) -> None:
    """1.5 % of 100,000 numbers, and 2.2 % more for long gaps: 4,598 bytes; z = 4.9 of 38 numbers.

    Steps begin with bf16 weights, so more numbers change in the first ones.
    """
    found = found_by("delta", tmp_path)
    assert found["equal"]
    assert found["delta_bytes"] == pytest.approx(4598, abs=4.9 * 38 * 3)
    assert 0.001 < found["changed_shares"][-1] < found["changed_shares"][0] < 0.05


@pytest.mark.parametrize("part", ["mixture", "control"])
def test_whole_runs_have_settings_that_a_run_file_allows(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ran(command: list[str], **_: Any) -> None:
        run = load_run(command[4], [one.removeprefix("--set=") for one in command if one.startswith("--set=")])
        assert (Path(run.train_table.model.path) / "tokenizer.json").is_file()
        out = Path(command[command.index("--out") + 1])
        out.mkdir()
        (out / "summary.json").write_text("{}", encoding="utf-8")
        (out / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n', encoding="utf-8")

    monkeypatch.setattr(subprocess, "run", ran)
    assert found_by(part, tmp_path)["last_step"] == {"step": 2}


@pytest.mark.real
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_rank_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    assert found_by("checkpoint", tmp_path)["snapshot_1_s"] > 0
