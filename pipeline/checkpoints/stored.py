"""A checkpoint of any layout, read parameter by parameter, without a process group.

`shards.json` beside the manifest says which part of which parameter lies where in which file; the ranks that
wrote the files knew. Reading follows it: nothing here depends on how DeepSpeed cuts and names things.
"""

from __future__ import annotations

import json
import mmap
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed.checkpoint.constants import LOSS_SCALER, OPTIMIZER_STATE_DICT
from torch import Tensor

from pipeline.checkpoints.manifest import SHARDS
from pipeline.checkpoints.unpickling import load_torch_file
from pipeline.parallel.parameters import Cut

MASTER = "master"  # among the names of the optimizer's tensors (exp_avg, ...): the weights themselves


class Location(NamedTuple):
    """A value in a checkpoint: ``torch.load(file)[keys[0]][keys[1]]...``."""

    file: str
    keys: tuple[str | int, ...]


class Slice(NamedTuple):
    """Elements ``start .. start + numel - 1`` of part `index` of `parts`, into which a parameter is cut along
    dimension `dim`; each part flattened by itself. `dim` None: it is whole."""

    dim: int | None
    parts: int
    index: int
    start: int
    numel: int


class StoredFragment(NamedTuple):
    """Elements from `start` on of a flattened part of a parameter, at `offset` in the tensors of a shard.

    Its optimizer state is a dict at one location, or has one for each of its values.
    """

    start: int
    numel: int
    offset: int
    weights_at: Location
    state_at: Location | dict[str, Location]


Part = list[StoredFragment]  # of a parameter, in order: the whole, or what a tensor rank holds


class StoredState:
    """The fp32 weights and optimizer state in a checkpoint folder.

    Args:
        allowed: Names that its files may ask for, from ``--allow_pickle``.

    Raises:
        RuntimeError: what the ranks wrote does not cover a parameter exactly once.
    """

    def __init__(self, path: Path, allowed: Collection[str] = ()) -> None:
        self.path, self._allowed = path, allowed
        content = json.loads((path / SHARDS).read_text(encoding="utf-8"))
        self.skipped_steps: int = content["skipped_steps"]
        self._index = content
        self.ranks: list[dict[str, Any]] = content["ranks"]
        self.cuts: dict[str, Cut] = {}
        for rank in self.ranks:
            for name, (shape, dim) in rank["parameters"].items():
                self.cuts[name] = Cut(tuple(shape), dim)
        self._parts = {name: _checked(name, cut, parts) for name, (cut, parts) in self._fragments().items()}
        self._opened: dict[str, Any] = {}

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
        file, _ = next(shard for rank in self.ranks for shard in rank["shards"])["weights_at"]
        return self._value(Location(file, (OPTIMIZER_STATE_DICT, LOSS_SCALER)))

    def read(self, name: str, key: str, wanted: Slice) -> Tensor:
        """Values of a parameter, [numel] fp32: its weights for the key `MASTER`, else optimizer state.

        Only what is asked for is read, but where rows of a matrix cut by columns are put together from
        another number of parts: those are assembled as a whole.
        """
        return standing_alone(self.view(name, key, wanted))

    def view(self, name: str, key: str, wanted: Slice) -> Tensor:
        """As `read`, but values that lie in one fragment are not copied: they are part of the mapped file."""
        parts = self._parts[name]
        shape, stored_dim = self.cuts[name]
        dim = wanted.dim if stored_dim is None else stored_dim
        if len(parts) == wanted.parts:
            return self._range(parts[wanted.index], key, wanted.start, wanted.numel)
        if dim == 0:  # parts follow each other
            length = torch.Size(shape).numel()
            joined = _joined(parts, length // len(parts))
            return self._range(
                joined, key, wanted.index * (length // wanted.parts) + wanted.start, wanted.numel
            )
        whole = self._whole(parts, key, shape, dim)
        part = whole.chunk(wanted.parts, dim)[wanted.index].flatten()
        return part[wanted.start : wanted.start + wanted.numel]

    def _whole(self, parts: Sequence[Part], key: str, shape: Sequence[int], dim: int) -> Tensor:
        whole = _pages(torch.Size(shape).numel()).view(shape)
        for part, target in zip(parts, whole.chunk(len(parts), dim), strict=True):
            target.copy_(self._range(part, key, 0, target.numel()).view(target.shape))
        return whole

    def _range(self, fragments: Part, key: str, start: int, numel: int) -> Tensor:
        """Elements ``start .. start + numel - 1`` of what the fragments, in order, make up."""
        index = bisect_right([fragment.start for fragment in fragments], start) - 1
        first = fragments[index]
        if start + numel <= first.start + first.numel:
            return self._tensor(first, key).narrow(0, first.offset + start - first.start, numel).float()
        values = _pages(numel)
        done = 0
        while done < numel:
            fragment = fragments[index]
            inside = start + done - fragment.start
            count = min(fragment.numel - inside, numel - done)
            flat = self._tensor(fragment, key)
            values[done : done + count] = flat.narrow(0, fragment.offset + inside, count)
            done += count
            index += 1
        return values

    def _tensor(self, fragment: StoredFragment, key: str) -> Tensor:
        """The flat tensor that a fragment lies in."""
        if key == MASTER:
            return self._value(fragment.weights_at).detach().flatten()
        at = fragment.state_at
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

    def _fragments(self) -> dict[str, tuple[Cut, list[Part]]]:
        """Of each parameter its cut and, for each part, the fragments in order.

        A tied weight is taken from the first stage that holds it, one that is not cut from the first tensor
        rank: the others hold copies.
        """
        found: dict[str, dict[tuple[int, int], list[StoredFragment]]] = defaultdict(lambda: defaultdict(list))
        for rank in self.ranks:
            for name, fragment in _stored_fragments(rank):
                found[name][rank["stage"], rank["tensor"]].append(fragment)
        fragments = {}
        for name, cut in self.cuts.items():
            holders = sorted(found[name])
            used = [at for at in holders if at[0] == holders[0][0]][: None if cut.dim is not None else 1]
            fragments[name] = (cut, [sorted(found[name][at], key=attrgetter("start")) for at in used])
        return fragments


def standing_alone(values: Tensor) -> Tensor:
    """Values that are all that their storage holds: themselves, or a copy where they are a view of more."""
    if values.untyped_storage().nbytes() == values.nbytes:
        return values
    return _pages(values.numel()).copy_(values)


def _pages(numel: int) -> Tensor:
    """Room for fp32 values, in pages that go back to the system with the tensor.

    From the heap, blocks of many sizes would be taken one after the other, few of which fit where another has
    been: it grows to several times what is in use at any moment.
    """
    if numel == 0:
        return torch.empty(0)
    pages = mmap.mmap(-1, 4 * numel, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.float32)


def _stored_fragments(rank: Mapping[str, Any]) -> Iterator[tuple[str, StoredFragment]]:
    for shard in rank["shards"]:
        weights, state = _location(shard["weights_at"]), shard["state_at"]
        state = {k: _location(at) for k, at in state.items()} if isinstance(state, dict) else _location(state)
        for name, start, numel, offset in shard["fragments"]:
            yield name, StoredFragment(start, numel, offset, weights, state)


def _location(entry: Sequence[Any]) -> Location:
    file, keys = entry
    return Location(file, tuple(keys))


def _checked(name: str, cut: Cut, parts: list[Part]) -> list[Part]:
    """The parts, of which each must be there from its first element to its last."""
    total = torch.Size(cut.full_shape).numel()
    covered = 0
    for part in parts:
        end = 0
        for fragment in part:
            if fragment.start != end:
                raise RuntimeError(f"{SHARDS} does not cover {name} once: {fragment.start} follows {end}")
            end += fragment.numel
        covered += end
    if covered != total:
        raise RuntimeError(f"{SHARDS} covers {covered} of the {total} elements of {name}")
    return parts


def _joined(parts: Sequence[Part], length: int) -> Part:
    """The fragments of all parts, each `length` long, counted from the beginning of the first."""
    return [
        fragment._replace(start=fragment.start + index * length)
        for index, part in enumerate(parts)
        for fragment in part
    ]
