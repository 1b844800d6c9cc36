"""Safetensors files, written tensor by tensor: the header first, then each tensor as it comes.

The library's own writer wants all tensors of a file in memory at once, up to 5 GB of them; here it is one.
Its reader, and that of transformers, read what is written here.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pipeline.checkpoints.export.checkpoint_tensors import rounded
from pipeline.hugging_face.safetensors_files import INDEX, SIZES, WEIGHTS

Shape = tuple[int, ...]
FORMATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def write_weights(
    folder: Path,
    shapes: Mapping[str, Shape],
    values: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    largest_file: int,
) -> list[Path]:
    """Write tensors into as many files as are needed, and an index if there are several.

    Args:
        shapes: Of all tensors, in the order in which they are written.
        values: The same names in the same order, with the tensors; each is taken when its turn comes.
        dtype: Format to write.
        largest_file: Bytes of tensors in one file; a larger tensor has one to itself.

    Returns:
        The files of weights, which are on the disk; the index may not be yet.

    Raises:
        JobError: the format does not reach as far as a value does.
        ValueError: `values` are not the tensors that `shapes` announced.
        OSError: the disk is full, or cannot be written.
    """
    plan = _divide(shapes, SIZES[FORMATS[dtype]], largest_file)
    names = [WEIGHTS]
    if len(plan) > 1:
        names = [f"model-{number:05}-of-{len(plan):05}.safetensors" for number in range(1, len(plan) + 1)]
    remaining = iter(values)
    for name, tensors in zip(names, plan, strict=True):
        _write_file(folder / name, {each: shapes[each] for each in tensors}, remaining, dtype)
    if len(plan) > 1:
        _write_index(folder / INDEX, dict(zip(names, plan, strict=True)), _size(shapes, dtype))
    return [folder / name for name in names]


def _divide(shapes: Mapping[str, Shape], width: int, largest: int) -> list[list[str]]:
    """Names for each file, in order."""
    files: list[list[str]] = [[]]
    room = largest
    for name, shape in shapes.items():
        size = math.prod(shape) * width
        if size > room and files[-1]:
            files.append([])
            room = largest
        files[-1].append(name)
        room -= size
    return files


def _write_file(
    path: Path, shapes: Mapping[str, Shape], values: Iterator[tuple[str, Tensor]], dtype: torch.dtype
) -> None:
    with path.open("wb") as file:
        file.write(_header(shapes, dtype))
        for name, shape in shapes.items():
            given, tensor = next(values, ("nothing", torch.empty(0)))
            if (given, tuple(tensor.shape)) != (name, shape):
                raise ValueError(f"{given} {list(tensor.shape)} comes where {name} {list(shape)} belongs")
            file.write(_bytes(rounded(name, tensor, dtype)))
        file.flush()
        os.fsync(file.fileno())


def _bytes(tensor: Tensor) -> memoryview:
    """A tensor's values in their order."""
    flat = tensor.contiguous().view(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # as bytes, because numpy knows no bfloat16


def _header(shapes: Mapping[str, Shape], dtype: torch.dtype) -> bytes:
    """Length and JSON, padded with spaces so that the tensors begin at a multiple of 8."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + _size({name: shape}, dtype)
        header[name] = {"dtype": FORMATS[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _size(shapes: Mapping[str, Shape], dtype: torch.dtype) -> int:
    return sum(map(math.prod, shapes.values())) * SIZES[FORMATS[dtype]]


def _write_index(path: Path, files: Mapping[str, Sequence[str]], size: int) -> None:
    places = {tensor: name for name, tensors in files.items() for tensor in tensors}
    content = {"metadata": {"total_size": size}, "weight_map": places}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
