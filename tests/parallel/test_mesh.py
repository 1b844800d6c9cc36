"""The rank grid, against tables written by hand."""

from __future__ import annotations

import re

import pytest

from pipeline.parallel import mesh as mesh_module
from pipeline.parallel.mesh import AXES, Coordinates, Mesh

CUBE = Mesh(2, 2, 2, 2)

GROUPS = {
    ("tensor",): ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11), (12, 13), (14, 15)),
    ("sequence",): ((0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)),
    ("data",): ((0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15)),
    ("pipeline",): ((0, 8), (1, 9), (2, 10), (3, 11), (4, 12), (5, 13), (6, 14), (7, 15)),
    ("data", "sequence"): ((0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15)),
    ("pipeline", "tensor"): ((0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15)),
    ("pipeline", "sequence", "tensor"): ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)),
    AXES: (tuple(range(16)),),
}


@pytest.mark.parametrize("axes", GROUPS)
def test_groups_of_two_by_two_by_two_by_two(axes: tuple[str, ...]):
    assert CUBE.groups(*axes) == GROUPS[axes]
    assert CUBE.groups(*reversed(axes)) == GROUPS[axes]  # named in any order


def group_of(mesh: Mesh, rank: int, *axes: str) -> tuple[int, ...]:
    return next(group for group in mesh.groups(*axes) if rank in group)


def test_uneven_mesh():
    mesh = Mesh(pipeline=3, data=1, sequence=2, tensor=4)
    assert (mesh.world_size, mesh.replicas, mesh.shape) == (24, 2, (3, 1, 2, 4))
    assert mesh.coordinates(22) == Coordinates(pipeline=2, data=0, sequence=1, tensor=2)
    assert group_of(mesh, 22, "tensor") == (20, 21, 22, 23)
    assert group_of(mesh, 22, "sequence") == (18, 22)
    assert group_of(mesh, 22, "pipeline") == (6, 14, 22)
    assert group_of(mesh, 22, "data") == (22,)


@pytest.mark.parametrize("mesh", [Mesh(), CUBE, Mesh(3, 1, 2, 4), Mesh(1, 5, 1, 2)], ids=str)
def test_grid_and_coordinates_are_inverse_and_groups_partition_the_world(mesh: Mesh):
    for rank in range(mesh.world_size):
        assert mesh.grid[mesh.coordinates(rank)] == rank
    for axes in GROUPS:
        members = [rank for group in mesh.groups(*axes) for rank in group]
        assert sorted(members) == list(range(mesh.world_size))
        for rank in range(mesh.world_size):
            here = mesh.coordinates(rank)
            for peer in group_of(mesh, rank, *axes):
                there = mesh.coordinates(peer)
                differing = {axis for axis in AXES if getattr(here, axis) != getattr(there, axis)}
                assert differing <= set(axes)


def test_the_picture_in_the_documentation_is_the_grid():
    """Rows of the picture are [ranks] per data and sequence index: pipeline 0's, then pipeline 1's first."""
    rows = [
        tuple(int(number) for number in row.split())
        for row in re.findall(r"\[([\d ]+)\]", mesh_module.__doc__ or "")
    ]
    tensor_groups = CUBE.groups("tensor")
    assert set(rows) == {tensor_groups[i] for i in (0, 1, 2, 3, 4, 5)}


@pytest.mark.parametrize("axis", AXES)
def test_sizes_below_one_are_refused(axis: str):
    with pytest.raises(ValueError, match=f"{axis} parallel size = 0: must be at least 1"):
        Mesh(**{axis: 0})
