"""Parameters in a row of bytes, and the row that several processes see."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from backends.transfer.row import (  # noqa: E402
    ALIGNMENT_BYTES,
    SharedRow,
    cuts,
    digest,
    have_pages,
    layout,
    machine,
    parameters_of,
    row_bytes,
    view_of,
)
from backends.transfer.verify import as_bytes  # noqa: E402
from pipelinerl.errors import BackendError  # noqa: E402

CPU = torch.device("cpu")
DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "int8", "uint8", "bool", "complex64", "float8_e4m3fn")
Tensors = dict[str, "torch.Tensor"]


@st.composite
def tensors_of_all_kinds(draw: Any) -> Tensors:
    """Parameters of random bytes, so NaN of all kinds among them; some transposed, some without elements."""
    names = draw(st.lists(st.text(min_size=1), unique=True, min_size=1, max_size=6))
    made = {}
    for name in names:
        dtype = getattr(torch, draw(st.sampled_from(DTYPES)))
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        content = draw(st.binary(min_size=num_bytes, max_size=num_bytes))
        if dtype is torch.bool:
            content = bytes(byte & 1 for byte in content)
        row = torch.tensor(list(content), dtype=torch.uint8)
        made[name] = row.view(dtype).reshape(shape)
        if draw(st.booleans()) and made[name].dim() > 1:
            made[name] = made[name].transpose(0, -1)
    return made


@given(tensors=tensors_of_all_kinds(), bucket_bytes=st.integers(1, 200))
def test_a_row_holds_parameters_bit_for_bit_and_buckets_cover_it(tensors: Tensors, bucket_bytes: int) -> None:
    places = layout(parameters_of(tensors))
    assert [place.name for place in places] == sorted(tensors)
    assert all(place.begin % ALIGNMENT_BYTES == 0 for place in places)
    row = torch.empty(row_bytes(places), dtype=torch.uint8)
    for place in places:
        view_of(row, place).copy_(tensors[place.name])
    whole = torch.cat([row[begin:end] for begin, end in cuts(row.numel(), bucket_bytes)] or [row])
    assert torch.equal(whole, row)
    seen = {place.name: view_of(whole, place) for place in places}
    assert parameters_of(seen) == parameters_of(tensors)
    assert all(as_bytes(seen[name]).tolist() == as_bytes(tensors[name]).tolist() for name in tensors)


def test_a_layout_is_in_the_order_given_and_aligned() -> None:
    places = layout([("b", "uint8", (3,)), ("a", "bfloat16", (2, 5)), ("c", "float32", ())])
    assert [(place.name, place.begin, place.end) for place in places] == [("b", 0, 3), ("a", 16, 36), ("c", 48, 52)]


def test_a_digest_is_of_names_types_shapes_and_checksums_also_from_json() -> None:
    parameters, sums = [("a", "float32", (2, 3)), ("b", "float32", (6,))], [1, -2]
    from_json = [["a", "float32", [2, 3]], ["b", "float32", [6]]]
    assert digest(parameters, sums) == digest(from_json, sums)
    others = [
        digest(parameters, [1, 2]),
        digest(parameters, [-2, 1]),
        digest([("a", "float32", (3, 2)), parameters[1]], sums),
        digest([("a", "bfloat16", (2, 3)), parameters[1]], sums),
        digest([("c", "float32", (2, 3)), parameters[1]], sums),
    ]
    assert len({digest(parameters, sums), *others}) == 6


def _in_another_process(path: str, results: Any) -> None:
    row = SharedRow.open(path, 100, CPU)
    seen = machine(), row.label, row.row.tolist()
    row.row[0] = 77
    row.label = "from there"
    row.close()
    results.put(seen)


def test_a_row_is_seen_by_another_process_of_this_machine_and_has_no_name_in_a_file_system(spawned: Any) -> None:
    row = SharedRow.make(100, CPU)
    assert row.label == ""
    row.row.copy_(torch.arange(100, dtype=torch.uint8))
    row.label = "7 abc"
    assert spawned(_in_another_process, row.path).get(timeout=600) == (machine(), "7 abc", list(range(100)))
    assert (int(row.row[0]), row.label) == (77, "from there")
    assert os.readlink(row.path).startswith("/memfd:")
    row.close()
    row.close()
    assert not os.path.exists(row.path)


@pytest.mark.parametrize("num_bytes", [1, 3 * mmap.PAGESIZE, 40 * mmap.PAGESIZE + 1])
def test_pages_that_are_to_be_pinned_are_there_before(num_bytes: int) -> None:
    file = os.memfd_create("test")
    os.truncate(file, num_bytes)
    assert os.fstat(file).st_blocks == 0
    have_pages(file)
    pages = -(-num_bytes // mmap.PAGESIZE)
    assert os.fstat(file).st_blocks * 512 == pages * mmap.PAGESIZE  # st_blocks: of 512 bytes
    assert os.pread(file, num_bytes, 0) == bytes(num_bytes)
    os.close(file)


def test_a_row_that_is_smaller_or_missing_is_refused() -> None:
    row = SharedRow.make(100, CPU)
    with pytest.raises(BackendError, match="cannot be seen: it is smaller"):
        SharedRow.open(row.path, 5000, CPU)
    row.close()
    with pytest.raises(BackendError, match=r"cannot be seen: .*No such file"):
        SharedRow.open(row.path, 100, CPU)


def test_a_process_that_ends_with_a_row_prints_nothing() -> None:
    kept = "import sys, torch; from backends.transfer import row as shared_row; sys.kept = sys.modules['__main__']"
    code = f"{kept}; row = shared_row.SharedRow.make(1, torch.device('cpu'))"  # it goes when modules have gone
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
