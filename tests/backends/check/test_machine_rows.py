"""What the check says of machines and links: against the catalogue, by hand; and the pack that fills every rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.check.run_check import Expected, longest_pack, machine_rows, pack_rows
from backends.interface import PlaceFacts, RankFacts, SelfTest, TrainResult
from backends.trainer.packing import pack
from pipelinerl.config.run import RunConfig, load_run
from pipelinerl.hardware.catalogue import find_gpu, find_model
from pipelinerl.hardware.coefficients import Level, coefficients
from pipelinerl.hardware.derive import head_exchange_seconds
from pipelinerl.records.reports import CheckRow, Finding

EXAMPLE = Path(__file__).parents[3] / "examples" / "qwen7b_128_h100.toml"
OWN = {"python": "3.11.9", "torch": "2.13.0"}
PLACE = PlaceFacts(
    machine="a", versions=OWN, gpus=(), memory_gb=1000.0, free_memory_gb=500.0, free_shared_gb=400.0, sees_folder=True
)  # fmt: skip
RANK = RankFacts(
    device="NVIDIA H100 80GB HBM3", kernel="varlen", attention_error=2e-3, same_checksum=True, reduce_gb_s=100.0,
    broadcast_gb_s=100.0, link_gb=1.0, to_host_gb_s=20.0, total_gb=85.9,
)  # fmt: skip


def run(*sets: str) -> RunConfig:
    return load_run(EXAMPLE, list(sets))


def rows(
    place: dict[str, Any] | None = None,
    rank: dict[str, Any] | None = None,
    *sets: str,
    more: tuple[PlaceFacts, ...] = (),
    to_engines_gb_s: float | None = 2.0,
) -> dict[str, CheckRow]:
    places, ranks = (replace(PLACE, **place or {}), *more), (RANK, replace(RANK, **rank or {}))
    return {row.what: row for row in machine_rows(run(*sets), SelfTest(places, ranks, to_engines_gb_s), OWN, 15.2)}


def test_machines_that_are_as_they_should_be() -> None:
    assert {row.finding for row in rows().values()} == {Finding.OK}


@pytest.mark.parametrize(
    ("place", "rank", "what"),
    [
        ({"versions": {**OWN, "torch": "2.12.0"}}, {}, "versions"),
        ({"sees_folder": False}, {}, "--out"),
        ({"free_memory_gb": 15.0}, {}, "host memory"),
        ({}, {"attention_error": 0.5}, "attention kernel"),
        ({}, {"attention_error": float("nan")}, "attention kernel"),
        ({}, {"same_checksum": False}, "checksum of weights"),
    ],
)
def test_what_is_wrong_with_a_machine(place: dict[str, Any], rank: dict[str, Any], what: str) -> None:
    found = {name: row.finding for name, row in rows(place, rank).items()}
    assert [name for name, finding in found.items() if finding is Finding.WRONG] == [what]


@pytest.mark.parametrize(
    ("networks", "finding"),
    [(("IB", "IB"), Finding.OK), (("IB", "Socket"), Finding.WRONG), (("Socket", None), Finding.UNCHECKED)],
)
def test_nccl_on_sockets_between_machines_is_wrong(networks: tuple[str | None, ...], finding: Finding) -> None:
    """Without a rank on another machine nothing is sent over it."""
    ranks = tuple(replace(RANK, host=host, network=network) for host, network in zip("ab", networks, strict=True))
    found = {row.what: row for row in machine_rows(run(), SelfTest((PLACE,), ranks, None), OWN, 15.2)}
    assert found["NCCL between machines"].finding is finding
    one = tuple(replace(rank, host="a") for rank in ranks)
    assert "NCCL between machines" not in {
        row.what for row in machine_rows(run(), SelfTest((PLACE,), one, None), OWN, 0)
    }


@pytest.mark.parametrize(
    ("transport", "short", "is_wrong"), [("file", "a", True), ("file", "b", False), ("delta", "b", True)]
)
def test_files_of_weights_need_room_on_the_machine_of_rank_0_only(transport: str, short: str, is_wrong: bool) -> None:
    places = [
        replace(PLACE, machine=f"{name} 10.0.0.1", free_memory_gb=15.0 if name == short else 500.0) for name in "ab"
    ]
    ranks = (replace(RANK, host="a"),)
    found = machine_rows(run(f"train.transport={transport}"), SelfTest(tuple(places), ranks, None), OWN, 15.2)
    assert ("host memory" in [row.what for row in found]) is is_wrong


def test_a_link_below_the_pessimistic_level_is_slow() -> None:
    """H100: NVLink 450 GB/s, 8 links of 50 GB/s between nodes; an all-reduce reaches 0.35 of it, 0.2 at worst."""
    name = "all-reduce of 2 ranks (NCCL)"
    for link, measured in ((name, "reduce_gb_s"), ("broadcast of 1 GB to 2 ranks (NCCL)", "broadcast_gb_s")):
        assert rows()[link].expected == "158 GB/s; slow below 90"
        assert [rows(rank={measured: speed})[link].finding for speed in (89.0, 91.0)] == [Finding.SLOW, Finding.OK]
    assert rows(more=(replace(PLACE, machine="b"),))[name].expected == "140 GB/s; slow below 80"
    slow = rows(rank={"to_host_gb_s": 9.0})["GPU to pinned memory"]
    assert (slow.finding, slow.expected) == (Finding.SLOW, "25 GB/s; slow below 10")


def test_the_way_to_the_engines_is_compared_with_one_stream() -> None:
    """1.6e9 bytes/s, 1.0e9 at worst, of the catalogue's coefficients."""
    what = "broadcast of 1 GB to the engines' machines"
    found = [rows(to_engines_gb_s=speed) for speed in (1.1, 0.9, None)]
    assert found[0][what].expected == "1.6 GB/s; slow below 1"
    assert [one[what].finding for one in found[:2]] == [Finding.OK, Finding.SLOW]
    assert what not in found[2]


def test_nothing_is_expected_of_what_the_catalogue_does_not_know() -> None:
    test = SelfTest((PLACE,), (replace(RANK, device="CPU", to_host_gb_s=None),), None)
    (found,) = [row for row in machine_rows(run(), test, OWN, 0.0) if row.what.startswith("all-reduce")]
    assert (found.finding, found.expected[:7]) == (Finding.OK, "nothing")


def test_the_pack_takes_at_least_its_flop_at_the_peak_and_is_slow_when_it_takes_far_more() -> None:
    """8 FLOP per parameter and token with recomputation, of 7.6e9 parameters at 989e12 FLOP/s: 1.0 s for 16384."""
    config = run()
    expected = Expected(config, find_gpu("H100"), find_model("Qwen2.5-7B"))
    lengths = [9216, 7168]
    least_s = 8 * 7.6e9 * 16384 / 989e12
    row = expected.seconds("pack", "", 0.0, expected.pack_s(lengths), "")
    central_s, limit_s = (float(part.rpartition(" s")[0]) for part in row.expected.split("; slow above "))
    assert least_s < central_s < 3 * least_s
    for seconds, finding in ((0.99 * limit_s, Finding.OK), (1.01 * limit_s, Finding.SLOW)):
        assert expected.seconds("pack", "", seconds, expected.pack_s(lengths), "").finding is finding


def test_layers_that_are_not_recomputed_save_their_share_of_a_quarter() -> None:
    """Of four passes the fourth, without gathers and what a micro-batch costs besides."""
    expected, passes = Expected(run(), find_gpu("H100"), find_model("Qwen2.5-7B")), {"recomputation": 0.75}
    passes |= {"gather_exposed": 0.0, "training_micro_batch_s": 0.0}
    values = coefficients(Level.CENTRAL, passes)
    none, half, every, stated = (expected.pack_s([16384], layers)(values) for layers in (0, 14, 28, None))
    assert [none / every, half / every, stated / every] == pytest.approx([3 / 4, 3.5 / 4, 3.75 / 4])


def test_a_row_of_two_ranks_takes_as_long_as_half_of_it_on_one_and_the_exchange_of_heads() -> None:
    gpu, model, values = find_gpu("H100"), find_model("Qwen2.5-7B"), coefficients(Level.CENTRAL, {"recomputation": 1.0})
    one, two = (Expected(run(f"train.trainer.sequence_parallel={size}"), gpu, model) for size in (1, 2))
    more_s = two.pack_s([8192] * 4)(values) - one.pack_s([8192] * 2)(values)
    assert more_s == pytest.approx(3 * 16384 * head_exchange_seconds(gpu, model, accelerators=2))


@given(
    pack_tokens=st.integers(20, 3000),
    prompt=st.integers(1, 10),
    longest=st.integers(2, 10),
    ranks=st.integers(1, 5),
    shared=st.integers(1, 3),
)
def test_the_longest_pack_is_one_full_row_on_every_rank(
    pack_tokens: int, prompt: int, longest: int, ranks: int, shared: int
) -> None:
    """Or on every ``shared`` ranks, which hold so many times the tokens."""
    config = run(
        f"train.trainer.pack_tokens={pack_tokens}",
        f"train.task.max_prompt_tokens={prompt}",
        "train.task.overlong_tokens=0",
        f"workload.length={{kind='fixed', max={longest}}}",
        f"cluster.accelerators={48 + ranks * shared}",
        f"train.trainer.sequence_parallel={shared}",
    )
    samples, lengths = longest_pack(config, [7, 8, 9])
    row_tokens = pack_tokens * shared
    rows = pack(samples, pack_tokens=row_tokens, num_ranks=ranks)
    assert [len(own) for own in rows] == [1] * ranks
    assert all(row_tokens - 1 <= sum(lengths) == len(own[0].token_N) <= row_tokens for own in rows)


def test_the_memory_of_a_pack_is_compared_with_what_the_gpu_has() -> None:
    def rows_at(peak_gb: float) -> list[CheckRow]:
        times = {f"rank0/{name}_s": 1.0 for name in ("forward", "backward", "optimizer")}
        result = TrainResult([], times | {"rank0/peak_memory_gb": peak_gb, "rank1/peak_memory_gb": 1.0})
        return pack_rows(run(), result, [16384], RANK, 15.3)

    times, memory = rows_at(20.0)
    assert times.measured == "forward 1 s, backward 1 s, optimizer 1 s"
    assert (memory.measured, memory.expected) == ("20.00 GB at most", "preflight 15.3 GB; 77 GB usable")
    assert [rows_at(peak)[1].finding for peak in (20.0, 80.0)] == [Finding.OK, Finding.WRONG]
