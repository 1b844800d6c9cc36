"""The sequence slice and its exchange for heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipeline.engine.distributed import start_distributed
from pipeline.parallel.context import Parallel
from pipeline.parallel.mesh import Coordinates, Mesh
from pipeline.parallel.ulysses import first_position, gather_sequence, scatter_sequence, sequence_slice
from tests.harness import run_ranks
from tests.parity.ranks import TIMEOUT

B, T, D = 2, 8, 3


def values(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def per_head(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[b, t, groups, g + 2, d] -> q, k, v with one k and v for each query head, [b, t, heads, d]."""
    queries = qkv.shape[3] - 2
    k, v = (qkv[..., i, :].repeat_interleave(queries, 2) for i in (-2, -1))
    return qkv[..., :-2, :].flatten(2, 3), k, v


def exchange_rank(groups: int, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    start_distributed("cpu", 0, TIMEOUT)
    parallel = Parallel.create(Mesh(sequence=torch.distributed.get_world_size()), TIMEOUT)
    part = sequence_slice(values(B, T, groups, queries + 2, D), parallel).clone().requires_grad_()
    gathered = gather_sequence(part, parallel)
    q, k, v = per_head(gathered)
    context = scatter_sequence(q * k + v, parallel)
    weight = sequence_slice(values(B, T, groups * queries, D, seed=2), parallel)
    (context * weight).sum().backward()
    return gathered.detach(), context.detach(), part.grad


@pytest.mark.parametrize(
    ("ranks", "groups", "queries"),
    [(2, 2, 1), (2, 4, 2), (4, 4, 3), (4, 2, 2), (4, 1, 4), (2, 1, 6)],
)
def test_heads_see_whole_sequences_and_gradients_come_back(ranks: int, groups: int, queries: int):
    """Fewer groups than ranks: each rank has some of a group's queries and a copy of its k and v."""
    results = run_ranks(exchange_rank, ranks, groups, queries)
    whole = values(B, T, groups, queries + 2, D).requires_grad_()
    q, k, v = per_head(whole)
    context = q * k + v
    (context * values(B, T, groups * queries, D, seed=2)).sum().backward()
    for rank, (gathered, out, gradient) in enumerate(results):
        for mine, all_heads in zip(per_head(gathered), (q, k, v), strict=True):
            assert torch.equal(mine, all_heads.chunk(ranks, 2)[rank])
        torch.testing.assert_close(out, context.chunk(ranks, 1)[rank])
        torch.testing.assert_close(gradient, whole.grad.chunk(ranks, 1)[rank])


def test_slices_and_their_global_positions():
    mesh = Mesh(sequence=4)
    tokens = torch.arange(2 * 8).view(2, 8)
    for index in range(4):
        parallel = Parallel(mesh, Coordinates(0, 0, index, 0))
        part = sequence_slice(tokens, parallel)
        assert part.tolist() == [[2 * index, 2 * index + 1], [8 + 2 * index, 9 + 2 * index]]
        assert first_position(part.shape[1], parallel) == 2 * index
    assert first_position(8, Parallel.single()) == 0
