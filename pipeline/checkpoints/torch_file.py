"""Files in torch's own format: written in two phases, and read without running what they hold.

`torch.save` pickles an object and writes the storages of its tensors in one go. A save needs the two apart:
the size before the first byte, to see whether there is space; and the values of this moment, while the file
is written later by a thread, under the pickle that names the device they came from. `torch.save` cannot be
stopped in between, and of copies in host memory it would write another pickle. `torch.load` reads the result
as it reads what `torch.save` writes.

A pickle may call anything when it is read. So every file of a checkpoint is read by torch's restricted
unpickler (``weights_only=True``), which knows tensors and plain values, and here the few types in `ALLOWED`
that DeepSpeed puts beside them. A file that asks for anything else is refused before it is read, with the
names that it asks for; ``--allow_pickle MODULE.NAME`` allows one of them. torch itself never allows functions
of `os` and `sys`.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.serialization import (
    get_unsafe_globals_in_checkpoint,
    location_tag,
    normalize_storage_type,
    safe_globals,
)

from pipeline.base.problems import JobError, Problem, job_error
from pipeline.base.words import few
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

    Attributes:
        storages: Those of the object, not copies, until a snapshot replaces them.

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
        head = {
            "data.pkl": self.pickle,
            ".format_version": _FORMAT_VERSION,
            ".storage_alignment": str(_ALIGNMENT),
            "byteorder": sys.byteorder,
        }
        for record, content in head.items():
            archive.write_record(record, content, len(content))
        for key, storage in self.storages.items():
            if stream.failure is not None:
                return
            archive.write_record(f"data/{key}", storage.cpu(), storage.nbytes())

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


# Types without behaviour on construction: numbers, their names, and where a parameter is in a flat tensor.
ALLOWED = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)

# The list of allowed names is one for the whole process, and threads read files at the same time.
_TORCH_LIST = threading.Lock()


def foreign_names(path: Path, allowed: Collection[str] = ()) -> list[str]:
    """What a file asks for beyond tensors, plain values, `ALLOWED` and `allowed`; nothing of it is run.

    Raises:
        ValueError: it is no file of torch's.
    """
    try:
        asked = get_unsafe_globals_in_checkpoint(path)
    except (RuntimeError, ValueError, EOFError, IndexError, KeyError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is no file that torch wrote ({type(error).__name__}: {error})") from error
    return sorted(set(asked) - {*ALLOWED, *allowed})


def load_torch_file(
    path: str | Path, map_location: Any = "cpu", *, mmap: bool = False, allowed: Collection[str] = ()
) -> Any:
    """The content of a file that torch wrote.

    Args:
        map_location: As of `torch.load`.
        mmap: Map tensors instead of reading them.
        allowed: Names beyond `ALLOWED`, from ``--allow_pickle``.

    Raises:
        JobError: it asks for something foreign, or for something that torch never allows, or a name of
            `allowed` cannot be imported.
        ValueError: it is no file of torch's.
    """
    path = Path(path)
    if foreign := foreign_names(path, allowed):
        raise JobError([foreign_problem(path, foreign)])
    names = [_imported(name) for name in (*ALLOWED, *allowed)]
    try:
        with _TORCH_LIST, safe_globals(names):
            return torch.load(path, map_location=map_location, mmap=mmap, weights_only=True)
    except pickle.UnpicklingError as error:
        rule = f"cannot be read safely ({_reason(error)})"
        raise job_error("resume", str(path), rule, "Resume from another checkpoint") from error


def _reason(error: pickle.UnpicklingError) -> str:
    """torch's message without its advice, which is to read the file unsafely, and its links."""
    paragraphs = [line.strip() for line in str(error).splitlines() if line.strip()]
    return paragraphs[1] if len(paragraphs) > 2 else paragraphs[0]


def foreign_problem(path: Path, names: Sequence[str]) -> Problem:
    """A file that is refused because of what it asks for."""
    listed = few(names)
    rule = f"would call {listed} when it is read, which no checkpoint of this pipeline holds"
    remedy = f"If you know why it does, and trust it: --allow_pickle {' '.join(names)}"
    return Problem("resume", str(path), rule, remedy)


def _imported(name: str) -> tuple[Callable[..., Any], str]:
    """What a dotted name means, with the name under which files ask for it."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute), name
    except (ImportError, AttributeError, ValueError) as error:
        rule = f"there is no such thing ({type(error).__name__}: {error})"
        raise job_error("allow_pickle", name, rule, "Correct --allow_pickle") from error
