"""Weights in files: whole or not at all, and every fault is named before anything is loaded."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

from backends.transfer.file import read_verified, write_weights  # noqa: E402
from backends.transfer.verify import checkpoint_shapes, checksum  # noqa: E402
from pipelinerl.errors import BackendError  # noqa: E402

Tensors = dict[str, "torch.Tensor"]


def tensors() -> Tensors:
    return {"a.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b.bias": torch.ones(4).bfloat16()}


def shapes(of: Tensors) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in of.items()}


def test_a_checksum_is_the_sha256_of_the_bytes_in_row_major_order() -> None:
    assert checksum(torch.tensor([1, 2], dtype=torch.uint8)) == hashlib.sha256(b"\x01\x02").hexdigest()
    matrix = tensors()["a.weight"]
    assert checksum(matrix.t()) == checksum(matrix.t().contiguous()) != checksum(matrix)
    assert checksum(torch.tensor(1.0)) == checksum(torch.ones(1))


def test_tensors_are_read_bit_for_bit_and_stay_when_the_file_is_replaced(tmp_path: Path) -> None:
    written = tensors()
    expected = write_weights(tmp_path / "weights", written)
    read = read_verified(tmp_path / "weights", expected, shapes(written))
    assert expected == {name: checksum(tensor) for name, tensor in written.items()}
    assert all(torch.equal(read[name], written[name]) and read[name].dtype == written[name].dtype for name in written)
    write_weights(tmp_path / "weights", {name: tensor * 2 for name, tensor in written.items()})
    assert all(checksum(read[name]) == expected[name] for name in written)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write_weights(tmp_path / "weights", tensors())
    before = (tmp_path / "weights").read_bytes()
    shared = torch.ones(2)
    with pytest.raises(RuntimeError, match="share memory"):
        write_weights(tmp_path / "weights", {"a": shared, "b": shared})
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
    assert (tmp_path / "weights").read_bytes() == before


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "weights"
    with pytest.raises(BackendError, match=rf"^cannot write {path}: .*No such file"):
        write_weights(path, tensors())


def test_every_fault_of_a_file_is_named(tmp_path: Path) -> None:
    path, written = tmp_path / "weights", tensors()
    right, model = write_weights(path, written), shapes(written)

    def check(file: Path, expected: dict[str, str], shapes: dict[str, tuple[int, ...]], text: str) -> None:
        with pytest.raises(BackendError, match=text):
            read_verified(file, expected, shapes)

    check(path, right, {**model, "c": (1,)}, r"lack 1 of 3 parameters: c$")
    check(path, right, {"a.weight": (2, 3)}, r"have unknown 1 of 1 parameters: b.bias$")
    check(path, {"a.weight": right["a.weight"]}, model, r"have no checksum for 1 of 2 parameters: b.bias$")
    check(path, right, {**model, "a.weight": (3, 2)}, r"have a wrong shape in 1 of 2 parameters: a.weight$")
    check(tmp_path / "missing", right, model, r"cannot be read: .*missing")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # one bit
    path.write_bytes(content)
    check(path, right, model, r"have a wrong checksum in 1 of 2 parameters: ")
    path.write_bytes(content[:-1])
    check(path, right, model, "cannot be read")
    safetensors_torch.save_file({"a.weight": written["a.weight"], "b.biar": written["b.bias"]}, path)
    check(path, right, model, r"have no checksum for 1 of 2 parameters: b.biar$")
    safetensors_torch.save_file({"a.weight": written["a.weight"]}, path)
    check(path, right, model, r"have a wrong checksum in 1 of 2 parameters: b.bias$")


def test_the_models_names_come_from_one_file_or_from_all_that_the_index_lists(tmp_path: Path) -> None:
    written = tensors()
    with pytest.raises(BackendError, match=r"model.safetensors is not there"):
        checkpoint_shapes(tmp_path)
    safetensors_torch.save_file(written, tmp_path / "model.safetensors")
    assert checkpoint_shapes(tmp_path) == shapes(written)
    (tmp_path / "model.safetensors").unlink()
    for number, (name, tensor) in enumerate(written.items()):
        safetensors_torch.save_file({name: tensor}, tmp_path / f"model-{number}.safetensors")
    index = '{"weight_map": {"a.weight": "model-0.safetensors", "b.bias": "model-1.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert checkpoint_shapes(tmp_path) == shapes(written)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(BackendError, match=r"model-1.safetensors is not there"):
        checkpoint_shapes(tmp_path)
