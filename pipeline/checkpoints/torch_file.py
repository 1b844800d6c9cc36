"""A file in torch's own format, in two phases: first what will be in it, then the writing.

`torch.save` pickles an object and writes the storages of its tensors in one go. A save needs the two apart:
the size before the first byte, to see whether there is space; and the values of this moment, while the file
is written later by a thread, under the pickle that names the device they came from. `torch.save` cannot be
stopped in between, and of copies in host memory it would write another pickle. `torch.load` reads the result
as it reads what `torch.save` writes.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.serialization import location_tag, normalize_storage_type

from pipeline.checkpoints.files import DigestStream, WrittenFile, synced

# What torch.save writes: the pickle protocol, the order and the alignment of storages.
_PROTOCOL = 2
_FORMAT_VERSION = "1"
_ALIGNMENT = 64
# The archive's own overhead: headers and padding of each record.
_RECORD_BYTES = 256

Storage = torch.UntypedStorage


class PickledObject:
    """An object as it will be written: its pickle, taken now, and the storages that the pickle refers to.

    The storages are those of the object, not copies, until `detach` has replaced them.

    Raises:
        pickle.PicklingError, RuntimeError: the object cannot be saved.
    """

    def __init__(self, value: Any) -> None:
        self.storages: dict[str, Storage] = {}
        self._keys: dict[int, str] = {}
        self._types: dict[int, torch.dtype] = {}
        buffer = io.BytesIO()
        _Pickler(buffer, self._persistent_id).dump(value)
        self.pickle = buffer.getvalue()

    @property
    def bytes(self) -> int:
        """Size of the file, from above."""
        records = sum(storage.nbytes() + _RECORD_BYTES for storage in self.storages.values())
        return records + len(self.pickle) + 16 * _RECORD_BYTES

    def detach(self, copies: Mapping[str, Storage]) -> None:
        """Let the file be written from these copies of the storages."""
        self.storages = dict(copies)

    def write(self, folder: Path, name: str) -> WrittenFile:
        """Write ``folder / name``; returns when it is on the disk.

        Raises:
            OSError: it cannot be written.
        """
        with synced(folder, name) as file:
            stream = DigestStream(file)
            archive = torch._C.PyTorchFileWriter(stream, False, _ALIGNMENT)  # no CRC: the digest covers all
            try:
                self._write_records(archive, stream)
            finally:  # else its destructor does this, when the file is closed
                archive.write_end_of_file()
            return stream.written(name)

    def _write_records(self, archive: Any, stream: DigestStream) -> None:
        for record, content in self._head().items():
            archive.write_record(record, content, len(content))
        for key, storage in self.storages.items():
            if stream.failure is not None:
                return
            archive.write_record(f"data/{key}", storage.cpu(), storage.nbytes())

    def _head(self) -> dict[str, bytes | str]:
        return {
            "data.pkl": self.pickle,
            ".format_version": _FORMAT_VERSION,
            ".storage_alignment": str(_ALIGNMENT),
            "byteorder": sys.byteorder,
        }

    def _persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        """How the pickle refers to a storage, which torch's loader understands; None for anything else."""
        if isinstance(value, torch.storage.TypedStorage):
            storage, dtype = value._untyped_storage, value.dtype
            kind, numel = getattr(torch, value._pickle_storage_type()), value._size()
        elif torch.is_storage(value):
            storage, dtype = value, torch.uint8
            kind, numel = normalize_storage_type(type(value)), value.nbytes()
        else:
            return None
        at = storage.data_ptr()
        if at != 0 and self._types.setdefault(at, dtype) != dtype:
            raise RuntimeError(f"one storage is seen as {self._types[at]} and as {dtype}")
        key = self._keys.setdefault(storage._cdata, str(len(self._keys)))
        self.storages[key] = storage
        return ("storage", kind, key, location_tag(storage), numel)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, persistent_id: Any) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self._refer = persistent_id

    def persistent_id(self, value: Any) -> Any:
        return self._refer(value)


class SnapshotMemory:
    """Memory on the host for the values of one moment, used again by the next save.

    It takes as many bytes as this rank's files have and keeps them: fresh memory costs several times what the
    copying costs. Copies from a GPU go to page-locked memory.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Storage] = {}

    @property
    def bytes(self) -> int:
        return sum(buffer.nbytes() for buffer in self._buffers.values())

    def copy(self, files: Mapping[str, PickledObject]) -> None:
        """Replace the storages of `files`, by name, with copies; complete when this returns.

        Raises:
            MemoryError, RuntimeError: there is no memory for them.
        """
        streams = set()
        for name, file in files.items():
            copies = {}
            for key, storage in file.storages.items():
                copies[key] = self._buffer((name, key), storage)
                copies[key].copy_(storage, non_blocking=True)
                if storage.device.type == "cuda":
                    streams.add(torch.cuda.current_stream(storage.device))
            file.detach(copies)
        for stream in streams:
            stream.synchronize()

    def _buffer(self, key: tuple[str, str], storage: Storage) -> Storage:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.nbytes() != storage.nbytes():
            pinned = storage.device.type == "cuda"
            fresh = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=pinned)
            buffer = self._buffers[key] = fresh.untyped_storage()
        return buffer
