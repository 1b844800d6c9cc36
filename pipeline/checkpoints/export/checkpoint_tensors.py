"""The tensors of a Hugging Face model, out of a checkpoint of any layout, one parameter at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pipeline.base.problems import JobError, Problem
from pipeline.checkpoints.manifest import Checkpoint
from pipeline.checkpoints.stored import MASTER, StoredState
from pipeline.checkpoints.verification import Verifier
from pipeline.hugging_face.tensor_map import Entry, tensor_map
from pipeline.model.config import ModelConfig
from pipeline.parallel.context import Parallel


def verified_state(checkpoint: Checkpoint, allowed: Collection[str]) -> StoredState:
    """What a checkpoint holds, once the digest of each of its files has been seen to match.

    Args:
        allowed: Names that its files may ask for, from ``--allow_pickle``.

    Raises:
        JobError: a file is missing, damaged or foreign, or nothing says what lies where.
        RuntimeError: as `StoredState`.
    """
    path = str(checkpoint.path)
    if not checkpoint.has_shard_index:
        rule = "was saved by a version that did not write down what lies where in it"
        remedy = "Resume the run from it in its own layout, and save"
        raise JobError([Problem("checkpoint", path, rule, remedy)])
    if missing := checkpoint.missing:
        rule = (
            f"was written by hosts without a common file system, and {len(missing)} of its files are not here"
        )
        remedy = f"Copy {missing[0]} and the others from the hosts that wrote them into this folder"
        raise JobError([Problem("checkpoint", path, rule, remedy)])
    # All files are here, so that this one process may verify those of every host.
    verifier = Verifier(Parallel.single(), 0, allowed)
    if failure := verifier.failure(replace(checkpoint, shared=True)):
        raise JobError([Problem("checkpoint", path, failure, "Name another checkpoint")])
    return StoredState(checkpoint.path, allowed)


def tensors(model: ModelConfig, stored: StoredState) -> Iterator[tuple[str, Tensor]]:
    """Name and value, in fp32, of every tensor that transformers has for the model, by layer.

    Raises:
        RuntimeError: the checkpoint does not hold the model's parameters.
    """
    entries = tensor_map(model)
    shapes = {entry.name: entry.shape for entry in entries}
    held = {name: tuple(slicing.full_shape) for name, slicing in stored.slicings.items()}
    if shapes != held:
        differing = sorted(name for name in shapes | held if shapes.get(name) != held.get(name))
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
        raise JobError([Problem("dtype", "float16", rule, "Use --dtype bfloat16 or float32")])
    return values
