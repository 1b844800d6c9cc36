"""What one rank knows about the mesh: its coordinates and its process groups.

Layers receive this object and nothing else about parallelism. `Parallel.single()` is the degree-1 case:
no process group exists, every collective is the identity, and the model runs on one device.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from pipeline.parallel.mesh import Coordinates, Mesh

Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class Parallel:
    """One rank's place in the mesh.

    Attributes:
        mesh: The sizes of all axes.
        coordinates: This rank's index on each axis.
        tensor_group: Ranks holding the other slices of the same weights; None at size 1.
        sequence_group: Ranks holding the other slices of the same samples; None at size 1.
        replica_group: Ranks holding the same slice of the weights (data x sequence), over which
            gradients are summed; None at size 1.
        control_group: All ranks, on gloo, for small host-side agreements that must not wait for the
            device; None in a world of one.
    """

    mesh: Mesh
    coordinates: Coordinates
    tensor_group: Group = None
    sequence_group: Group = None
    replica_group: Group = None
    control_group: Group = None

    @classmethod
    def single(cls) -> Parallel:
        """One device, no process group."""
        return cls(Mesh(), Coordinates(0, 0, 0, 0))

    @classmethod
    def create(cls, mesh: Mesh, timeout: timedelta) -> Parallel:
        """Make the process groups of `mesh`. Collective: every rank calls it in the same order.

        Raises:
            ValueError: the world that is running is not the mesh's size.
        """
        rank, world = dist.get_rank(), dist.get_world_size()
        if world != mesh.world_size:
            raise ValueError(f"{world} ranks are running, but the mesh {mesh.shape} needs {mesh.world_size}")

        def group_along(*axes: str) -> Group:
            return _new_group(mesh.groups(*axes), rank, timeout)

        control = dist.new_group(backend="gloo", timeout=timeout) if world > 1 else None
        return cls(
            mesh=mesh,
            coordinates=mesh.coordinates(rank),
            tensor_group=group_along("tensor"),
            sequence_group=group_along("sequence"),
            replica_group=group_along("data", "sequence"),
            control_group=control,
        )

    @property
    def rank(self) -> int:
        """Global rank."""
        return int(self.mesh.grid[self.coordinates])


def _new_group(groups: tuple[tuple[int, ...], ...], rank: int, timeout: timedelta) -> Group:
    """The one of `groups` that holds `rank`. Every rank takes part in making each of them."""
    if len(groups[0]) == 1:
        return None
    made = {ranks: dist.new_group(ranks, timeout=timeout) for ranks in groups}
    return next(group for ranks, group in made.items() if rank in ranks)
