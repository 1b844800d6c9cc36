"""Parameters: drawn whole, then sliced. The one place that knows a parameter's name and its slicing.

Two words for a part of the state, here and in checkpoints:

    slice   consecutive elements of one parameter: what a tensor rank holds of it, or a range of that
    shard   what one rank keeps and updates of the state: a flat tensor with slices of many parameters

Their values come from a `Source`, which gives a rank its part, or are drawn. The full tensor is drawn from a
generator seeded by (seed, parameter name), so initial weights are the same in every layout: no rank's draw
depends on which other layers it holds. numpy draws them, because ZeRO-3's construction context replaces
torch's constructors by ones in the compute type.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.parallel.context import Parallel


class Slicing(NamedTuple):
    """How a parameter is divided over the tensor ranks.

    Attributes:
        full_shape: The shape at tensor size 1.
        dim: The dimension that is divided into equal contiguous slices; None where every rank holds all.
    """

    full_shape: tuple[int, ...]
    dim: int | None

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.full_shape)


class Source(Protocol):
    """Where initial values come from that are not drawn."""

    def part(self, name: str, slicing: Slicing, parts: int, index: int) -> Tensor:
        """Slice `index` of `parts` of the parameter, in fp32; all of it where ``slicing.dim`` is None."""


def slicing_of(parameter: nn.Parameter) -> Slicing:
    """How `ParameterFactory` sliced it; every parameter of a model has one."""
    return parameter.slicing  # type: ignore[attr-defined,no-any-return]


@dataclass(frozen=True)
class ParameterFactory:
    """Makes parameters under a name prefix, as ``make = factory.under("2").under("attention")``.

    Attributes:
        source: Gives the values of all parameters; None: they are drawn, or constant.
    """

    seed: int
    parallel: Parallel
    prefix: str = ""
    source: Source | None = None

    def under(self, name: str) -> ParameterFactory:
        """The factory for a submodule called `name`."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def normal(self, name: str, shape: tuple[int, ...], std: float, dim: int | None = None) -> nn.Parameter:
        """Drawn from N(0, std^2) for the full `shape`, then sliced along `dim`."""

        def draw() -> np.ndarray:
            seeds = np.random.SeedSequence([self.seed, zlib.crc32(f"{self.prefix}{name}".encode())])
            full = np.random.Generator(np.random.PCG64(seeds)).standard_normal(shape, dtype=np.float32)
            return full * np.float32(std)

        return self._make(name, shape, dim, draw)

    def constant(
        self, name: str, shape: tuple[int, ...], value: float, dim: int | None = None
    ) -> nn.Parameter:
        """Filled with `value`."""
        return self._make(name, shape, dim, lambda: np.full(shape, value, dtype=np.float32))

    def _make(
        self, name: str, shape: tuple[int, ...], dim: int | None, draw: Callable[[], np.ndarray]
    ) -> nn.Parameter:
        parts, index = self.parallel.mesh.tensor, self.parallel.coordinates.tensor
        slicing = Slicing(shape, dim if parts > 1 else None)
        if self.source is not None:
            part = self.source.part(f"{self.prefix}{name}", slicing, parts, index)
        else:
            full = torch.from_numpy(draw())
            # A copy: a view would keep the whole.
            part = full if slicing.dim is None else full.chunk(parts, slicing.dim)[index].clone()
        parameter = nn.Parameter(part)
        parameter.slicing = slicing  # type: ignore[attr-defined]
        return parameter


def mark_counted_once(module: nn.Module, parallel: Parallel) -> None:
    """Mark which parameters this rank adds to the global gradient norm, so that each counts once.

    DeepSpeed sums squared norms over pipeline x tensor ranks. It reads ``p.model_parallel`` (count here) on
    ranks other than the first and ``p.ds_pipe_replicated`` (a tied copy, never count) in most of its
    optimizers, but only the former in the fp32 clip without ZeRO. A sliced parameter counts on every tensor
    rank, a replicated one on tensor rank 0, a tied one on the stage that owns it.
    """
    first = parallel.coordinates.tensor == 0
    for parameter in module.parameters():
        replica = getattr(parameter, "ds_pipe_replicated", False)
        counted = not replica and (first or slicing_of(parameter).dim is not None)
        parameter.model_parallel = counted  # type: ignore[attr-defined]
