"""Collectives with gradients: values against the definition, gradients against one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.engine.distributed import start_distributed
from pipeline.parallel import collectives
from tests.harness import run_ranks
from tests.parity.ranks import TIMEOUT

RANKS = 3


def _start() -> tuple[int, dist.ProcessGroup]:
    start_distributed("cpu", 0, TIMEOUT)
    return dist.get_rank(), dist.group.WORLD


def value(rank: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def copy_and_reduce_rank() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rank, group = _start()
    x = value(99, 4).requires_grad_()
    y = collectives.copy_to(x, group) * value(rank, 4)
    (y.sum() * (rank + 1) + x.sum()).backward()  # x also has a branch that is not summed
    z = value(rank, 4).requires_grad_()
    total = collectives.reduce_from(z * 2, group)
    (total * value(50, 4)).sum().backward()
    return y.detach(), x.grad, total.detach(), z.grad


def test_copy_to_sums_gradients_and_reduce_from_sums_values():
    results = run_ranks(copy_and_reduce_rank, RANKS)
    x = value(99, 4)
    grad = sum(value(rank, 4) * (rank + 1) for rank in range(RANKS)) + 1
    total = sum(value(rank, 4) * 2 for rank in range(RANKS))
    for rank, (y, x_grad, summed, z_grad) in enumerate(results):
        assert torch.equal(y, x * value(rank, 4))
        torch.testing.assert_close(x_grad, grad)
        torch.testing.assert_close(summed, total)
        torch.testing.assert_close(z_grad, 2 * value(50, 4))


def residual_rank() -> Tensor:
    """A gradient tensor that autograd shares between two branches must not be reduced in place."""
    _, group = _start()
    x = torch.ones(2, requires_grad=True)
    (x + collectives.copy_to(x, group)).sum().backward()
    return x.grad


def test_a_residual_branch_keeps_its_own_gradient():
    for gradient in run_ranks(residual_rank, RANKS):
        assert gradient.tolist() == [1.0 + RANKS] * 2


def all_to_all_rank() -> tuple[Tensor, Tensor, Tensor]:
    rank, group = _start()
    whole = value(7, 2, 6, 9, 4)  # [b, t, heads, d]
    mine = whole.chunk(RANKS, 1)[rank].clone().requires_grad_()
    heads = collectives.all_to_all(mine, group, split_dim=2, join_dim=1)
    back = collectives.all_to_all(heads, group, split_dim=1, join_dim=2)
    (heads * value(8, 2, 6, 9, 4).chunk(RANKS, 2)[rank]).sum().backward()
    return heads.detach(), back.detach(), mine.grad


def test_all_to_all_trades_sequence_for_heads_and_back():
    whole, weight = value(7, 2, 6, 9, 4), value(8, 2, 6, 9, 4)
    for rank, (heads, back, gradient) in enumerate(run_ranks(all_to_all_rank, RANKS)):
        assert torch.equal(heads, whole.chunk(RANKS, 2)[rank])
        assert torch.equal(back, whole.chunk(RANKS, 1)[rank])
        assert torch.equal(gradient, weight.chunk(RANKS, 1)[rank])


def test_without_a_group_nothing_happens():
    x = torch.ones(2)
    assert collectives.copy_to(x, None) is x
    assert collectives.reduce_from(x, None) is x
    assert collectives.all_to_all(x, None, 0, 0) is x
    assert collectives.all_reduce(x, None) is x
