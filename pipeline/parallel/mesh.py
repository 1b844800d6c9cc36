"""The rank grid: world = pipeline x data x sequence x tensor. No torch, pure arithmetic.

The axes are ordered by how often and how much their ranks talk, the chattiest innermost, so that
consecutive ranks (which a hostfile puts on one host) carry the heaviest traffic:

    axis      used for                                             traffic
    pipeline  stages of consecutive layers                         activations, stage to stage
    data      replicas on other samples; ZeRO shards over it       gradients, once per step
    sequence  slices of the same samples (Ulysses all-to-all)      q, k, v, context, per layer
    tensor    slices of the same weights                           activations, 4 x per layer

For 2 x 2 x 2 x 2 the grid is ``arange(16).reshape(2, 2, 2, 2)``:

    pipeline 0                                pipeline 1
      data 0                data 1              data 0 ...
        seq 0: [ 0  1]        seq 0: [ 4  5]      seq 0: [ 8  9]   <- a row is a tensor group
        seq 1: [ 2  3]        seq 1: [ 6  7]      seq 1: [10 11]

DeepSpeed knows three axes (pipe, data, model). Sequence is folded into its data axis
(its data rank = data * sequence_size + sequence), because gradients are summed over both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

AXES = ("pipeline", "data", "sequence", "tensor")


class Coordinates(NamedTuple):
    """Where one rank sits on each axis, counted from 0."""

    pipeline: int
    data: int
    sequence: int
    tensor: int


@dataclass(frozen=True)
class Mesh:
    """The sizes of the four axes, and every rank group that follows from them.

    Raises:
        ValueError: a size below 1.
    """

    pipeline: int = 1
    data: int = 1
    sequence: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis, size in zip(AXES, self.shape, strict=True):
            if size < 1:
                raise ValueError(f"{axis} parallel size = {size}: must be at least 1")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.pipeline, self.data, self.sequence, self.tensor)

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data * self.sequence * self.tensor

    @property
    def replicas(self) -> int:
        """Ranks that hold the same slice of the weights: DeepSpeed's data axis, ZeRO's shards."""
        return self.data * self.sequence

    @property
    def grid(self) -> np.ndarray:
        """Global ranks, [pipeline, data, sequence, tensor]."""
        return np.arange(self.world_size).reshape(self.shape)

    def coordinates(self, rank: int) -> Coordinates:
        """The position of global rank `rank`."""
        return Coordinates(*(int(i) for i in np.unravel_index(rank, self.shape)))

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Every group whose members differ along `axes` only, e.g. ``groups("data", "sequence")``.

        Members are in rank order; the groups are a partition of the world. Every rank gets the same
        list in the same order, as process-group creation needs it.
        """
        varying = [AXES.index(axis) for axis in axes]
        fixed = [i for i in range(len(AXES)) if i not in varying]
        rows = self.grid.transpose(*fixed, *sorted(varying))
        size = int(np.prod([self.shape[i] for i in varying], dtype=int))
        return tuple(tuple(int(rank) for rank in row) for row in rows.reshape(-1, size))
