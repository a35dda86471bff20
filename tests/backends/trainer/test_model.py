"""The model that a rank trains, as it is loaded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from backends.trainer.model import load_policy  # noqa: E402

STATUS = Path("/proc/self/status")


def own_bytes() -> int:
    """Return this process's memory that it shares with no other."""
    found = re.search(r"^RssAnon:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.skipif(not STATUS.exists(), reason="memory is told by Linux")
def test_the_ranks_of_a_machine_share_the_pages_of_the_weights_file(tmp_path: Path) -> None:
    """A rank maps the file, bit for bit, and has no copy of the model of its own in the host's memory."""
    config = transformers.LlamaConfig(
        vocab_size=40_000, hidden_size=512, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    saved = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    saved.save_pretrained(tmp_path)
    load_policy(str(tmp_path), device="cpu", dtype=torch.bfloat16)  # what is loaded once, is
    size, before = (tmp_path / "model.safetensors").stat().st_size, own_bytes()
    loaded = load_policy(str(tmp_path), device="cpu", dtype=torch.bfloat16)
    assert size > 80e6
    assert own_bytes() - before < 0.1 * size
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in saved.state_dict().items())
