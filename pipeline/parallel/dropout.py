"""Dropout whose mask is a function of where an element is in the whole job, not of any generator's state.

The mask of an element is a hash of (seed, step, sample of the global batch, layer, position, channel).
So it is the same in every layout: sequence ranks draw different masks for their different positions,
tensor ranks the same mask where activations are replicated, recomputation repeats the forward's mask, and
a resumed run continues exactly, with no generator state to save.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from pipeline.parallel.context import Parallel

_MASK = 0xFFFFFFFF


def mix(x: Tensor | int) -> Tensor | int:
    """A 32-bit hash, elementwise: the finalizer of MurmurHash3 (A. Appleby, public domain).

    int64 holds the 32-bit values; a product may wrap around modulo 2^64, which leaves its low 32 bits right.
    """
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def combine(x: Tensor | int, y: Tensor | int) -> Tensor | int:
    """A 32-bit hash of two 32-bit values; tensors broadcast."""
    return mix((mix(x) * 0x9E3779B1 + y) & _MASK)


@dataclass
class DropoutClock:
    """Which step the engine is in, and the rows of a micro-batch; one per model, shared by its layers."""

    seed: int
    micro_batch_size: int
    step: int = 0


class Steps(Protocol):
    """Whatever changes its `step` when micro-batches begin anew."""

    step: int


@dataclass
class MicroBatchCounter:
    """Counts a layer's forward passes within a step: the pipelines run micro-batches in order."""

    clock: Steps
    _step: int = -1
    _next: int = field(default=0)

    def advance(self) -> int:
        """The index of the micro-batch whose forward begins now."""
        if self.clock.step != self._step:
            self._step, self._next = self.clock.step, 0
        self._next += 1
        return self._next - 1


def dropout_keys(
    clock: DropoutClock, parallel: Parallel, micro_batch: int, site: int, rows: int, device: torch.device
) -> Tensor:
    """One 32-bit key for each row of a micro-batch, [rows, 1, 1].

    Row r is sample (micro_batch * data_size + data_rank) * micro_batch_size + r of the step's global batch.
    `site` numbers the places in the model where dropout acts.
    """
    first = (micro_batch * parallel.mesh.data + parallel.coordinates.data) * clock.micro_batch_size
    samples = torch.arange(first, first + rows, device=device).view(-1, 1, 1)
    return combine(combine(combine(clock.seed & _MASK, clock.step), site), samples)


def dropout(x: Tensor, rate: float, keys: Tensor, first_position: int) -> Tensor:
    """Zero elements of [b, t, channels] at `rate` and scale the rest by 1 / (1 - rate)."""
    return x * keep_mask(x.shape, rate, keys, first_position).to(x.dtype).div_(1.0 - rate)


def keep_mask(shape: torch.Size, rate: float, keys: Tensor, first_position: int) -> Tensor:
    """True where an element is kept, [b, t, channels], for keys [b, 1, 1]."""
    _, length, channels = shape
    positions = torch.arange(first_position, first_position + length, device=keys.device).view(1, -1, 1)
    by_position = combine(keys, positions)
    hashes = combine(by_position, torch.arange(channels, device=keys.device).view(1, 1, -1))
    return hashes >= int(rate * 2**32)
