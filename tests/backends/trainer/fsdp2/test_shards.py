"""Pieces of parameters, and which ranks may share experts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from needs import need

need("torch", "transformers", "ray")

import torch  # noqa: E402
import transformers  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from model_configs import ARCHITECTURES  # noqa: E402

from backends.trainer.footprint import shape_of  # noqa: E402
from backends.trainer.fsdp2.experts import check_experts  # noqa: E402
from backends.trainer.fsdp2.rank import Shards  # noqa: E402
from pipelinerl.config.run import load_run  # noqa: E402
from pipelinerl.errors import ConfigError  # noqa: E402

EXAMPLE = Path(__file__).parents[4] / "examples" / "qwen30b_a3b_64_h100.toml"


@given(sharers=st.integers(1, 9), parts=st.integers(1, 5), rows=st.integers(1, 40), width=st.integers(1, 3))
def test_pieces_follow_one_another_from_part_to_part_and_cover_a_parameter_as_torch_chunks_it(
    sharers: int, parts: int, rows: int, width: int
) -> None:
    parameter = SimpleNamespace(
        device_mesh=SimpleNamespace(size=lambda: sharers), shape=(rows, width), numel=lambda: rows * width
    )
    shards = Shards(sharers * parts, torch.float32)
    at = 0
    for part in range(parts):
        lengths = [len(one) * width for one in torch.zeros(rows).chunk(sharers)]
        for chunk, length in enumerate([*lengths, *[0] * (sharers - len(lengths))]):
            assert shards.piece(parameter, chunk * parts + part) == (at, length)
            at += length
    assert at == parts * rows * width


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        ("train.trainer.expert_parallel=16", "must divide the 24 ranks of the trainer, got 16"),
        ("train.trainer.expert_parallel=3", "must divide the 128 experts of a layer, got 3"),
    ],
)
def test_ranks_that_cannot_share_experts_are_refused(sets: str, says: str) -> None:
    shape = ARCHITECTURES["Qwen3-30B-A3B"][0] | {"num_hidden_layers": 1}
    model = transformers.AutoConfig.for_model(**shape)
    with pytest.raises(ConfigError, match=f"^train.trainer.expert_parallel {says}$"):
        check_experts(load_run(EXAMPLE, [sets]), shape_of(model).policy)
