"""What a rank holds in memory: every tensor, by its purpose."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.engine.engine import TrainEngine


@dataclass(frozen=True)
class Held:
    """Bytes of one rank, on whatever device they are.

    Attributes:
        other: Everything else that Python holds: communication buckets, batches.
        by_device: Parameters, gradients and optimizer state, by device type.
    """

    parameters: int
    gradients: int
    optimizer: int
    other: int
    by_device: dict[str, int]


class Memory:
    """Addresses that are counted already, by device."""

    def __init__(self) -> None:
        self._counted: dict[str, list[tuple[int, int]]] = {}

    def add(self, tensor: Tensor) -> int:
        """Bytes of `tensor` that were not counted yet; they are from now on."""
        counted = self._counted.setdefault(str(tensor.device), [])
        begin = tensor.data_ptr()
        new = _outside(begin, begin + tensor.nbytes, counted)
        counted += new
        return sum(end - begin for begin, end in new)

    def add_all(self, tensors: Iterable[Tensor | None]) -> dict[str, int]:
        """The same for many, by device type."""
        sizes: dict[str, int] = {}
        for tensor in tensors:
            if tensor is not None and tensor.numel():
                sizes[tensor.device.type] = sizes.get(tensor.device.type, 0) + self.add(tensor)
        return sizes


def _outside(begin: int, end: int, ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The pieces of [begin, end) that none of `ranges` covers."""
    pieces = [(begin, end)]
    for low, high in ranges:
        pieces = [
            piece
            for first, last in pieces
            for piece in ((first, min(last, low)), (max(first, high), last))
            if piece[0] < piece[1]
        ]
    return pieces


def measure(engine: TrainEngine) -> Held:
    """What the engine holds now. Nothing counts twice: weights first, then optimizer state, gradients."""
    memory = Memory()
    parameters = memory.add_all(_parameters(engine))
    optimizer = memory.add_all(_optimizer_state(engine))
    gradients = memory.add_all(_gradients(engine))
    by_device: dict[str, int] = {}
    for sizes in (parameters, optimizer, gradients):
        for device, size in sizes.items():
            by_device[device] = by_device.get(device, 0) + size
    other = memory.add_all(_live_tensors())
    parts = (sum(sizes.values()) for sizes in (parameters, gradients, optimizer, other))
    return Held(*parts, by_device)


def _parameters(engine: TrainEngine) -> Iterator[Tensor | None]:
    """Weights of the forward pass; under ZeRO-3 the shards, and those that are whole at the moment."""
    for parameter in engine.module.parameters():
        yield getattr(parameter, "ds_tensor", None)
        yield parameter.data


def _optimizer_state(engine: TrainEngine) -> Iterator[Tensor | None]:
    """Master weights, moments and step counters of the torch optimizer below DeepSpeed's."""
    base = _base_optimizer(engine)
    # ZeRO-3 shows the torch optimizer one group at a time, and keeps the masters of all here.
    yield from tensors_in(getattr(engine.deepspeed.optimizer, "fp32_partitioned_groups_flat", None))
    for group in base.param_groups:
        yield from group["params"]
    for state in base.state.values():
        yield from (value for value in state.values() if torch.is_tensor(value))


def _base_optimizer(engine: TrainEngine) -> torch.optim.Optimizer:
    optimizer = engine.deepspeed.optimizer
    while not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


# Where DeepSpeed's optimizers keep gradients until the update.
_GRADIENT_ATTRIBUTES = (
    "averaged_gradients",
    "all_grad_tensors",
    "grad_partitions_flat_buffer",
    "fp32_groups_gradients_flat",
)


def _gradients(engine: TrainEngine) -> Iterator[Tensor | None]:
    """Wherever they may be; flat buffers and views into them alike."""
    for name in _GRADIENT_ATTRIBUTES:
        yield from tensors_in(getattr(engine.deepspeed.optimizer, name, None))
    for group in _base_optimizer(engine).param_groups:
        yield from (parameter.grad for parameter in group["params"])
    for parameter in engine.module.parameters():
        yield parameter.grad
        yield getattr(parameter, "grad_accum", None)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in nested lists, tuples and dicts."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def _live_tensors() -> Iterator[Tensor]:
    """The storages of all tensors that Python knows, as flat bytes."""
    for item in gc.get_objects():
        if isinstance(item, Tensor) and item.device.type != "meta":
            storage = item.untyped_storage()
            if storage.nbytes():
                yield torch.empty(0, dtype=torch.uint8, device=item.device).set_(storage)
