"""Collectives that autograd can differentiate.

Each is the identity when its group is None (size 1). `copy_to` and `reduce_from` are the pair f and g of
Megatron-LM (Shoeybi et al. 2019, section 3): one is the other's transpose.

    forward                      backward
    copy_to       identity       all-reduce       before a column-parallel product
    reduce_from   all-reduce     identity         after a row-parallel product
    all_to_all    split i, join j    split j, join i   around attention (Ulysses)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.parallel.context import Group


def all_reduce(tensor: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce `tensor` in place over `group` and return it. Not differentiable."""
    if group is not None:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


def _own_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy, made in one pass whatever the strides were."""
    return tensor.clone(memory_format=torch.contiguous_format)


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Autograd may hand the same gradient tensor to other branches (a residual sum does), so it
        # must not be reduced in place.
        return all_reduce(_own_copy(grad), ctx.group), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        return all_reduce(_own_copy(tensor), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, split_dim: int, join_dim: int) -> Tensor:
        ctx.group, ctx.split_dim, ctx.join_dim = group, split_dim, join_dim
        return _exchange(tensor, group, split_dim, join_dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grad, ctx.group, ctx.join_dim, ctx.split_dim), None, None, None


def _exchange(tensor: Tensor, group: Group, split_dim: int, join_dim: int) -> Tensor:
    """Send the i-th of equal parts along `split_dim` to rank i; join what arrives along `join_dim`."""
    size = dist.get_world_size(group)
    outgoing = torch.stack(tensor.chunk(size, dim=split_dim))  # [size, ...], part i for rank i
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group)
    return torch.cat(incoming.unbind(0), dim=join_dim)


def copy_to(tensor: Tensor, group: Group) -> Tensor:
    """Identity whose gradient is summed over `group`."""
    return tensor if group is None else _CopyTo.apply(tensor, group)


def reduce_from(tensor: Tensor, group: Group) -> Tensor:
    """Sum over `group`; the gradient passes unchanged."""
    return tensor if group is None else _ReduceFrom.apply(tensor, group)


def all_to_all(tensor: Tensor, group: Group, split_dim: int, join_dim: int) -> Tensor:
    """Trade a slice of `join_dim` for a slice of `split_dim`.

    `tensor` is split into as many equal parts along `split_dim` as the group has ranks; its size there
    must divide. ``[b, t / n, h, d]`` with split 2 and join 1 becomes ``[b, t, h / n, d]``.
    """
    return tensor if group is None else _AllToAll.apply(tensor, group, split_dim, join_dim)
