"""What a pass of the trainer multiplies and moves, against sums by hand; the table of its page."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import trainer_traffic
from trainer_traffic import MODELS, TOKENS, counted

PAGE = Path(__file__).parents[2] / "docs" / "measurements" / "one_h100.md"
WIDTH, FEED_FORWARD, KEYS, WORDS, LAYERS = 3584, 18_944, 512, 152_064, 28
"""Qwen2.5-7B."""
LINEAR = 2 * WIDTH * (WIDTH + KEYS) + 3 * WIDTH * FEED_FORWARD


def test_the_products_of_a_7b() -> None:
    """2 FLOP a weight and token forward, 4 backward, and 2 again but for the last product of a layer; the output layer
    8. Causal attention of 2048 tokens: 2 products of 1024 keys a query, 5 backward.
    """
    work = counted(MODELS["Qwen2.5-7B"], fused=True)
    attention = 2 * TOKENS * 1024 * WIDTH
    layer = TOKENS * (8 * LINEAR - 2 * WIDTH * FEED_FORWARD) + (2 + 2 + 5) * attention
    assert work.of(LAYERS, LAYERS)[0] == LAYERS * layer + 8 * TOKENS * WIDTH * WORDS
    assert work.kept[0] == TOKENS * 6 * LINEAR + (2 + 5) * attention


def test_a_7b_moves_a_third_when_fused() -> None:
    """A layer, in 2-byte numbers of a token. Forward: two norms (2 widths), two residual sums (3), queries and keys
    turned (2), SwiGLU (3 feed-forwards). Backward: norms by input (3) and by weight (2), five sums of gradients (3),
    turned back (2), SwiGLU (5), biases (1). Angles and factors of norms are below 1 %. The output layer: logits read;
    read and overwritten; four sums of the weights' gradient (2 + 4 + 4 bytes), first 0 (4, twice) and last rounded (6).
    """
    eager, fused = (counted(MODELS["Qwen2.5-7B"], fused=value) for value in (False, True))
    turned = 2 * (WIDTH + KEYS)
    forward = 2 * 2 * WIDTH + 2 * 3 * WIDTH + turned + 3 * FEED_FORWARD
    backward = 2 * 5 * WIDTH + 5 * 3 * WIDTH + turned + 5 * FEED_FORWARD + WIDTH + 2 * KEYS
    assert fused.kept[1] == pytest.approx(2 * TOKENS * (forward + backward), rel=0.01)
    assert fused.again[1] == pytest.approx(2 * TOKENS * (2 * forward + backward - WIDTH), rel=0.02)
    assert fused.rest[1] == pytest.approx(3 * 2 * TOKENS * WORDS + (4 * 10 + 8 + 6) * WORDS * WIDTH, rel=0.1)
    everything = [work.of(LAYERS, LAYERS)[1] / 1e9 for work in (eager, fused)]
    assert everything[0] == pytest.approx(1441, rel=0.05)  # counted before by another program
    assert everything[1] < 550


@pytest.mark.slow(seconds=8)
def test_the_table_of_the_page_is_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many recomputed layers as it says: to count these takes minutes."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    for name in MODELS:
        (line,) = (line for line in lines if line.startswith(f"| {name} | "))
        layers = {way: int(line.split("|")[cell].split(":")[0]) for way, cell in ((False, 3), (True, 5))}
        monkeypatch.setattr(trainer_traffic, "needed", lambda *_, fused, ranks, layers=layers: layers[fused])
        assert trainer_traffic.row(name, ranks=32) == line


def test_the_script_prints_a_row_for_each_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = MODELS["Qwen2.5-1.5B"] | {"num_hidden_layers": 3, "vocab_size": 1000}
    monkeypatch.setitem(MODELS, "Qwen2.5-1.5B", small)
    monkeypatch.setattr(trainer_traffic, "needed", lambda *_, fused, ranks: ranks - fused)
    trainer_traffic.main(["--model", "Qwen2.5-1.5B", "--ranks", "2"])
    cells = capsys.readouterr().out.splitlines()[2].split(" | ")
    assert [cell.split(":")[0] for cell in cells[1:]] == ["3", "2", "3", "1"]
