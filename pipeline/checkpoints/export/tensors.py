"""The tensors of a Hugging Face model: out of a checkpoint of any layout, and into safetensors files.

One tensor is in memory at a time. The library's own writer wants all those of a file at once, up to 5 GB of
them; its reader, and that of transformers, read what is written here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pipeline.base.problems import JobError, job_error
from pipeline.checkpoints.manifest import Checkpoint
from pipeline.checkpoints.resume import partial_problems
from pipeline.checkpoints.stored import MASTER, StoredState
from pipeline.checkpoints.verification import Verifier
from pipeline.hugging_face.safetensors_files import INDEX, SIZES, WEIGHTS
from pipeline.hugging_face.tensor_map import Entry, tensor_map
from pipeline.model.config import ModelConfig
from pipeline.parallel.context import Parallel

Shape = tuple[int, ...]
FORMATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def verified_state(checkpoint: Checkpoint, allowed: Collection[str]) -> StoredState:
    """What a checkpoint holds, once the digest of each of its files has been seen to match.

    Args:
        allowed: Names that its files may ask for, from ``--allow_pickle``.

    Raises:
        JobError: a file is missing, damaged or foreign, or it has no `shards.json`.
        RuntimeError: as `StoredState`.
    """
    if problems := partial_problems(checkpoint, "checkpoint"):
        raise JobError(problems)
    # All files are here, so that this one process may verify those of every host.
    verifier = Verifier(Parallel.single(), 0, allowed)
    if failure := verifier.failure(replace(checkpoint, shared=True)):
        raise job_error("checkpoint", str(checkpoint.path), failure, "Name another checkpoint")
    return StoredState(checkpoint.path, allowed)


def tensors(model: ModelConfig, stored: StoredState) -> Iterator[tuple[str, Tensor]]:
    """Name and value, in fp32, of every tensor that transformers has for the model, by layer.

    Raises:
        RuntimeError: the checkpoint does not hold the model's parameters.
    """
    entries = tensor_map(model)
    if differing := stored.differing({entry.name: entry.shape for entry in entries}):
        raise RuntimeError(f"{stored.path} holds other parameters than its model has: {differing}")
    for entry in entries:
        yield from _theirs(entry, stored.read(entry.name, MASTER).view(entry.shape))


def _theirs(entry: Entry, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of theirs that one parameter of ours is made of."""
    for name in entry.theirs:
        rows = entry.rows_of(name)
        turned = parameter.t() if entry.transposed else parameter
        dim = 1 if entry.transposed else 0
        if np.array_equal(rows, np.arange(len(rows))):
            # A table without its padding is the beginning of ours, which needs no copy.
            yield name, turned.narrow(dim, 0, len(rows))
        else:
            yield name, turned.index_select(dim, torch.from_numpy(rows))


def rounded(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in another format.

    Raises:
        JobError: the format does not reach as far as a value does. Of float32 and bfloat16, which reach
            equally far, each takes what the other holds.
    """
    values = tensor.to(dtype)
    if dtype == torch.float16 and not values.isfinite().all() and tensor.isfinite().all():
        rule = f"{name} has values up to {tensor.abs().max():g}, and float16 ends at 65504"
        raise job_error("dtype", "float16", rule, "Use --dtype bfloat16 or float32")
    return values


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
        The files of weights; neither they nor the index need be on the disk yet.

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
    for name, part in zip(names, plan, strict=True):
        _write_file(folder / name, {each: shapes[each] for each in part}, remaining, dtype)
    if len(plan) > 1:
        places = {tensor: name for name, part in zip(names, plan, strict=True) for tensor in part}
        index = {"metadata": {"total_size": _size(shapes, dtype)}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
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
