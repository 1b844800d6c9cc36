"""A checkpoint of any layout, read parameter by parameter, without a process group.

`shards.json` beside the manifest says which slice of which parameter is where in which file; the ranks that
wrote the files recorded it. Nothing here depends on how DeepSpeed shards and names things.
"""

from __future__ import annotations

import math
import mmap
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.base.json_reader import saved_json
from pipeline.checkpoints.manifest import SHARDS
from pipeline.checkpoints.torch_file import load_torch_file
from pipeline.parallel.parameters import Slicing

MASTER = "master"  # among the names of the optimizer's tensors (exp_avg, ...): the weights themselves


class Location(NamedTuple):
    """A value in a checkpoint: ``torch.load(file)[keys[0]][keys[1]]...``."""

    file: str
    keys: tuple[str | int, ...]


class Slice(NamedTuple):
    """Elements ``start .. start + numel - 1`` of part `index` of `parts`, into which a parameter is divided
    along dimension `dim` (None: not at all); each part flattened by itself."""

    dim: int | None
    parts: int
    index: int
    start: int
    numel: int


class StoredSlice(NamedTuple):
    """Elements from `start` on of what a tensor rank holds of a parameter, at `offset` in a shard's tensors.

    Its optimizer state is a dict at one location, or has one for each of its values.
    """

    start: int
    numel: int
    offset: int
    weights_at: Location
    state_at: Location | dict[str, Location]


Part = list[StoredSlice]  # in order: what a tensor rank holds of a parameter, or all of it


class StoredState:
    """The fp32 weights and optimizer state in a checkpoint folder.

    Args:
        allowed: Names that its files may ask for, from ``--allow_pickle``.

    Raises:
        RuntimeError: what the ranks wrote does not cover a parameter exactly once.
    """

    def __init__(self, path: Path, allowed: Collection[str] = ()) -> None:
        self.path, self._allowed = path, allowed
        content = saved_json(path / SHARDS)
        self.skipped_steps: int = content["skipped_steps"]
        self._index = content
        self.ranks: list[dict[str, Any]] = content["ranks"]
        self.slicings: dict[str, Slicing] = {}
        for rank in self.ranks:
            for name, (shape, dim) in rank["parameters"].items():
                self.slicings[name] = Slicing(tuple(shape), dim)
        self._parts = self._located()
        self._opened: dict[str, Any] = {}

    def differing(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Parameters that are not here in these shapes, or are here only."""
        held = {name: slicing.full_shape for name, slicing in self.slicings.items()}
        return sorted(name for name in held | shapes if held.get(name) != shapes.get(name))

    def state_names(self, name: str) -> list[str]:
        """Names of the optimizer's tensors for a parameter, such as ``exp_avg``; none for plain SGD."""
        return [key for key, value in self._state(name).items() if torch.is_tensor(value) and value.dim()]

    def scalars(self, name: str) -> dict[str, Any]:
        """What the optimizer keeps for a parameter beside tensors: Adam's step."""
        scalars = {k: v for k, v in self._state(name).items() if not torch.is_tensor(v) or not v.dim()}
        return {key: value for key, value in scalars.items() if value is not None}

    def loss_scaler(self) -> Any:
        """DeepSpeed's loss scaler, which is the same on all ranks of an fp16 job. None in a converted
        checkpoint of another format."""
        if "loss_scaler_at" in self._index:
            at = self._index["loss_scaler_at"]
            return None if at is None else self._value(_location(at))
        file, keys = next(shard for rank in self.ranks for shard in rank["shards"])["weights_at"]
        from deepspeed.checkpoint.constants import LOSS_SCALER  # here: it imports all of DeepSpeed

        return self._value(Location(file, (keys[0], LOSS_SCALER)))  # beside the masters

    def read(self, name: str, key: str, wanted: Slice | None = None) -> Tensor:
        """Values of a parameter, [numel] fp32: its weights for the key `MASTER`, else optimizer state.

        Only what is asked for is read, except where a matrix sliced along dimension 1 is wanted in another
        number of slices: it is assembled as a whole.

        Args:
            wanted: None: all of it.
        """
        values = self.view(name, key, wanted)
        if values.untyped_storage().nbytes() == values.nbytes:  # not a view of more
            return values
        return _pages(values.numel()).copy_(values)

    def view(self, name: str, key: str, wanted: Slice | None = None) -> Tensor:
        """As `read`, but values that are consecutive in a file are not copied: they are mapped from it."""
        parts, slicing = self._parts[name], self.slicings[name]
        wanted = wanted or Slice(None, 1, 0, 0, slicing.numel)
        dim = wanted.dim if slicing.dim is None else slicing.dim
        if len(parts) == wanted.parts:
            return self._range(parts[wanted.index], key, wanted.start, wanted.numel)
        if dim == 0:  # parts follow each other
            length = slicing.numel
            joined = _joined(parts, length // len(parts))
            start = wanted.index * (length // wanted.parts) + wanted.start
            return self._range(joined, key, start, wanted.numel)
        whole = self._whole(parts, key, slicing.full_shape, dim)
        part = whole.chunk(wanted.parts, dim)[wanted.index].flatten()
        return part[wanted.start : wanted.start + wanted.numel]

    def _whole(self, parts: Sequence[Part], key: str, shape: Sequence[int], dim: int) -> Tensor:
        whole = _pages(torch.Size(shape).numel()).view(shape)
        for part, target in zip(parts, whole.chunk(len(parts), dim), strict=True):
            target.copy_(self._range(part, key, 0, target.numel()).view(target.shape))
        return whole

    def _range(self, part: Part, key: str, start: int, numel: int) -> Tensor:
        """Elements ``start .. start + numel - 1`` of a part."""
        index = bisect_right(part, start, key=attrgetter("start")) - 1
        first = part[index]
        if start + numel <= first.start + first.numel:
            return self._tensor(first, key).narrow(0, first.offset + start - first.start, numel).float()
        values = _pages(numel)
        done = 0
        while done < numel:
            stored = part[index]
            inside = start + done - stored.start
            count = min(stored.numel - inside, numel - done)
            values[done : done + count] = self._tensor(stored, key).narrow(0, stored.offset + inside, count)
            done += count
            index += 1
        return values

    def _tensor(self, stored: StoredSlice, key: str) -> Tensor:
        """The flat tensor that a slice lies in."""
        if key == MASTER:
            return self._value(stored.weights_at).detach().flatten()
        at = stored.state_at
        value = self._value(at[key]) if isinstance(at, dict) else self._value(at)[key]
        return value.flatten()

    def _state(self, name: str) -> Mapping[str, Any]:
        """The state of the shard that a parameter begins in; empty where its optimizer has none."""
        at = self._parts[name][0][0].state_at
        if isinstance(at, dict):
            return {key: self._value(each) for key, each in at.items()}
        states = self._value(at._replace(keys=at.keys[:-1]))
        return states.get(at.keys[-1], {})

    def _value(self, at: Location) -> Any:
        value = self._content(at.file)
        for key in at.keys:
            value = value[key]
        return value

    def _content(self, file: str) -> Any:
        """A file of DeepSpeed's, whose tensors are mapped: the pages that are used are read when they are.

        No file stays mapped longer than this object lives. A cache around this method would refer to the
        object, and keep it and the files until some garbage collection.
        """
        if file not in self._opened:
            self._opened[file] = load_torch_file(self.path / file, mmap=True, allowed=self._allowed)
        return self._opened[file]

    def _located(self) -> dict[str, list[Part]]:
        """Of each parameter, by tensor rank, where it is stored.

        A tied weight is taken from the first stage that holds it, one that is not sliced from the first
        tensor rank: the others hold copies.
        """
        found: dict[str, dict[tuple[int, int], Part]] = defaultdict(lambda: defaultdict(list))
        for rank in self.ranks:
            for name, stored in _stored_slices(rank):
                found[name][rank["stage"], rank["tensor"]].append(stored)
        located = {}
        for name, slicing in self.slicings.items():
            holders = sorted(found[name])
            used = [at for at in holders if at[0] == holders[0][0]][: None if slicing.dim is not None else 1]
            located[name] = [sorted(found[name][at], key=attrgetter("start")) for at in used]
            _check_coverage(name, located[name], slicing.numel)
        return located


class StoredWeights:
    """A checkpoint's weights as those that an engine is built with; no optimizer state is read."""

    def __init__(self, stored: StoredState) -> None:
        self._stored = stored

    def part(self, name: str, slicing: Slicing, parts: int, index: int) -> Tensor:
        """Slice `index` of `parts` of a parameter, in fp32; all of it where it is not sliced."""
        shape = list(slicing.full_shape)
        if slicing.dim is None:
            parts, index = 1, 0
        else:
            shape[slicing.dim] //= parts
        wanted = Slice(slicing.dim, parts, index, 0, math.prod(shape))
        # In numpy's memory, as torch's constructors are replaced while ZeRO-3 builds the model.
        return torch.from_numpy(self._stored.view(name, MASTER, wanted).numpy().copy()).view(shape)


def _pages(numel: int) -> Tensor:
    """Room for fp32 values, in pages that go back to the system with the tensor.

    From the heap, blocks of many sizes would be taken one after the other, few of which fit where another has
    been: it grows to several times what is in use at any moment.
    """
    if numel == 0:
        return torch.empty(0)
    pages = mmap.mmap(-1, 4 * numel, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.float32)


def _stored_slices(rank: Mapping[str, Any]) -> Iterator[tuple[str, StoredSlice]]:
    for shard in rank["shards"]:
        weights, state = _location(shard["weights_at"]), shard["state_at"]
        state = {k: _location(at) for k, at in state.items()} if isinstance(state, dict) else _location(state)
        for name, start, numel, offset in shard["fragments"]:
            yield name, StoredSlice(start, numel, offset, weights, state)


def _location(entry: Sequence[Any]) -> Location:
    file, keys = entry
    return Location(file, tuple(keys))


def _check_coverage(name: str, parts: list[Part], total: int) -> None:
    """Each part must be there from its first element to its last, and all of them together are the whole."""
    covered = 0
    for part in parts:
        end = 0
        for stored in part:
            if stored.start != end:
                raise RuntimeError(f"{SHARDS} does not cover {name} once: {stored.start} follows {end}")
            end += stored.numel
        covered += end
    if covered != total:
        raise RuntimeError(f"{SHARDS} covers {covered} of the {total} elements of {name}")


def _joined(parts: Sequence[Part], length: int) -> Part:
    """The slices of all parts, each `length` long, counted from the beginning of the first."""
    return [
        stored._replace(start=stored.start + index * length)
        for index, part in enumerate(parts)
        for stored in part
    ]
