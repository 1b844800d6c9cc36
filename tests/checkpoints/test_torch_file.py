"""A file in two phases is the file that torch.save writes, of the moment when it was planned."""

from __future__ import annotations

import io
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoints.files import digest_of
from pipeline.checkpoints.snapshot import SnapshotMemory
from pipeline.checkpoints.torch_file import PickledObject


def state() -> dict[str, Any]:
    """What optimizers and modules put into their states."""
    flat = torch.arange(10, dtype=torch.float32)
    return {
        "flat": flat,
        "views": [flat[2:5], flat[5:]],
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "half": torch.full((3,), 0.5, dtype=torch.bfloat16),
        "step": torch.tensor(7.0),
        "empty": torch.empty(0),
        "others": OrderedDict(betas=(0.9, 0.95), none=None),
        "transposed": torch.arange(6).reshape(2, 3).t(),
    }


def saved_by_torch(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(value, buffer)
    finally:
        torch.serialization.set_crc32_options(True)
    return buffer.getvalue()


def test_the_bytes_are_those_of_torch_save(tmp_path: Path):
    written = PickledObject(state()).write(tmp_path, "sub/file.pt")
    content = (tmp_path / "sub/file.pt").read_bytes()
    assert content == saved_by_torch(state())
    assert (written.name, written.bytes) == ("sub/file.pt", len(content))
    assert written.digest == digest_of(tmp_path / "sub/file.pt")


@pytest.mark.parametrize("mmap", [True, False])
def test_torch_loads_it(mmap: bool, tmp_path: Path):
    PickledObject(state()).write(tmp_path, "file.pt")
    loaded = torch.load(tmp_path / "file.pt", mmap=mmap, weights_only=True)
    assert torch.equal(loaded["views"][0], torch.tensor([2.0, 3.0, 4.0]))
    assert torch.equal(loaded["transposed"], state()["transposed"])
    assert loaded["others"] == state()["others"]


def test_a_snapshot_does_not_change_with_its_tensors(tmp_path: Path):
    value = state()
    file, memory = PickledObject(value), SnapshotMemory()
    memory.copy({"file.pt": file})
    for tensor in (value["flat"], value["half"], value["step"], value["parameter"].data):
        tensor.zero_()
    file.write(tmp_path, "file.pt")
    assert (tmp_path / "file.pt").read_bytes() == saved_by_torch(state())


def test_without_a_snapshot_it_does(tmp_path: Path):
    """The test above can fail."""
    value = state()
    file = PickledObject(value)
    value["flat"].zero_()
    file.write(tmp_path, "file.pt")
    assert (tmp_path / "file.pt").read_bytes() != saved_by_torch(state())


def test_the_next_snapshot_uses_the_same_memory():
    memory = SnapshotMemory()
    memory.copy({"file.pt": PickledObject(state())})
    size = memory.bytes
    places = {storage.data_ptr() for storage in memory._buffers.values()}
    memory.copy({"file.pt": PickledObject(state())})
    assert size == memory.bytes == sum(s.nbytes() for s in PickledObject(state()).storages.values())
    assert {storage.data_ptr() for storage in memory._buffers.values()} == places


def test_a_snapshot_of_another_size_gets_its_own(tmp_path: Path):
    memory = SnapshotMemory()
    memory.copy({"file.pt": PickledObject(torch.zeros(3))})
    file = PickledObject(torch.arange(5))
    memory.copy({"file.pt": file})
    file.write(tmp_path, "file.pt")
    assert torch.equal(torch.load(tmp_path / "file.pt"), torch.arange(5))


def test_the_size_is_known_before_and_is_no_less(tmp_path: Path):
    for value in (state(), {}, torch.zeros(100_000), [torch.zeros(1) for _ in range(100)]):
        file = PickledObject(value)
        written = file.write(tmp_path, "file.pt").bytes
        assert written <= file.bytes <= written + 5000 + 300 * len(file.storages)


def test_one_storage_under_two_types_is_refused_as_torch_does():
    numbers = torch.zeros(4)
    with pytest.raises(RuntimeError, match=r"torch.float32 and as torch.int32"):
        PickledObject([numbers, numbers.view(torch.int32)])


def test_what_cannot_be_pickled_is_refused():
    with pytest.raises((AttributeError, TypeError, ValueError)):
        PickledObject(lambda: None)
