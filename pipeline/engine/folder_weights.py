"""Initial weights out of a Hugging Face folder: of each parameter the part that a rank holds, and no more.

Files are mapped; of each tensor the rows and columns of the part are read, and nothing else.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from pipeline.base.problems import job_error
from pipeline.hugging_face.safetensors_files import stored_tensors
from pipeline.hugging_face.tensor_map import OUTPUT, TIED, Block, Entry, tensor_map
from pipeline.job.initial_weights import NO_COPY, NO_COPY_REMEDY, SAMPLE_BYTES, SAMPLES, full_name
from pipeline.model.config import ModelConfig
from pipeline.parallel.parameters import Slicing

NAN_REMEDY = "These weights cannot be trained: give those of an earlier moment, or of another model"


class FolderWeights:
    """The weights in a folder, under our names and in our layout.

    Raises:
        ValueError, OSError: they cannot be read; `folder_weights_problems` says it beforehand.
    """

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        stored = stored_tensors(folder)
        # Their full name -> the file, and the name in it.
        self._places = {full_name(name, stored, model): (each.file, name) for name, each in stored.items()}
        self._entries = {entry.name: entry for entry in tensor_map(model)}
        self._open = functools.cache(_open)

    @property
    def fingerprint(self) -> str:
        """Equal on hosts that see the same files, by their names, sizes and a sample of their content."""
        digest = hashlib.sha256()
        for file in sorted({file for file, _ in self._places.values()}):
            size = file.stat().st_size
            digest.update(f"{file.name} {size} ".encode())
            with file.open("rb") as stream:
                for index in range(SAMPLES):
                    stream.seek(size * index // SAMPLES)
                    digest.update(stream.read(SAMPLE_BYTES))
        return digest.hexdigest()

    def part(self, name: str, slicing: Slicing, parts: int, index: int) -> Tensor:
        """Slice `index` of `parts` of a parameter, in fp32; all of it where it is not sliced.

        Raises:
            JobError: values are infinite or no numbers, or a tied output layer is no copy of the embedding.
            ValueError: the parameter has another shape here.
        """
        entry = self._entries[name]
        if entry.shape != slicing.full_shape:
            raise ValueError(
                f"{name} has the shape {slicing.full_shape}, and the folder's makes {entry.shape}"
            )
        order, columns = entry.order, slice(None)
        if slicing.dim == 0:
            order = order.reshape(parts, -1)[index]
        elif slicing.dim == 1:
            width = slicing.full_shape[1] // parts
            columns = slice(index * width, (index + 1) * width)
        values = self._gather(entry, order, columns)
        if name == TIED and OUTPUT in self._places:
            self._require_copy(entry, order, values)
        # torch's constructors are replaced by ones in the compute type while ZeRO-3 builds the model; this
        # one is not.
        return torch.from_numpy(values)

    def _gather(self, entry: Entry, order: np.ndarray, columns: slice) -> np.ndarray:
        """The rows of the blocks with these numbers, zeros for -1."""
        shape = (len(order),) if entry.columns is None else (len(order), len(range(entry.columns)[columns]))
        values = np.zeros(shape, dtype=np.float32)
        begin = 0
        for block in entry.blocks:
            wanted = np.flatnonzero((order >= begin) & (order < begin + block.rows))
            if len(wanted):
                # Our order keeps the rows of a block in theirs, so that a part of ours has a range of each.
                first, end = int(order[wanted[0]]) - begin, int(order[wanted[-1]]) - begin + 1
                values[wanted] = self._read(block, entry, first, end, columns)
            begin += block.rows
        return values

    def _read(self, block: Block, entry: Entry, first: int, end: int, columns: slice) -> np.ndarray:
        """Rows ``first .. end - 1`` of a block."""
        file, name = self._places[block.tensor]
        rows, stored = slice(block.first + first, block.first + end), self._open(file).get_slice(name)
        if entry.columns is None:
            values = stored[rows]
        else:
            values = stored[columns, rows].t() if entry.transposed else stored[rows, columns]
        if not torch.isfinite(values).all():
            rule = f"holds values in {name} that are infinite or no numbers"
            raise job_error("model", str(file), rule, NAN_REMEDY)
        return values.float().numpy()

    def _require_copy(self, entry: Entry, order: np.ndarray, values: np.ndarray) -> None:
        output = Entry(OUTPUT, (Block(OUTPUT, 0, entry.blocks[0].rows),), entry.columns, order=entry.order)
        if not np.array_equal(self._gather(output, order, slice(None)), values):
            file, _ = self._places[OUTPUT]
            raise job_error("model", str(file), NO_COPY, NO_COPY_REMEDY)


def _open(file: Path) -> Any:
    return safe_open(str(file), framework="pt")
