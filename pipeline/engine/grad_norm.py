"""The global gradient norm where DeepSpeed's own will not do.

With fp32 weights and without ZeRO, DeepSpeed's clip is skipped when clipping is off and does not report the
norm: `clip_global_norm` replaces it. With ZeRO 1 over pipeline stages its sum can hang: `sum_norm_once`. With
bf16 weights over pipeline stages it fails where a stage has nothing to add: `add_nothing_as_zero`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def clip_global_norm(module: nn.Module, group: dist.ProcessGroup, maximum: float) -> Tensor:
    """Scale gradients in place to a global norm of at most `maximum` (0: leave them); return the norm.

    Args:
        module: Its parameters carry ``model_parallel``: whether this rank adds them to the sum.
        group: All ranks that hold other parameters of the same replica (pipeline x tensor).

    Returns:
        The norm before clipping, fp32, a scalar tensor, the same on every rank of the group.
    """
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    counted = [p.grad for p in module.parameters() if p.grad is not None and p.model_parallel]
    squares = [torch.linalg.vector_norm(g, dtype=torch.float32).square() for g in counted]
    total = torch.stack(squares).sum() if squares else torch.zeros((), device=gradients[0].device)
    dist.all_reduce(total, group=group)
    norm = total.sqrt()
    if maximum > 0.0:
        torch._foreach_mul_(gradients, (maximum / (norm + 1e-6)).clamp(max=1.0))
    return norm


def sum_norm_once(optimizer: Any) -> None:
    """Make ZeRO 1's optimizer sum its squared norm over pipeline and tensor ranks in one reduction.

    Its own way is one reduction for each parameter group. A stage with nothing but an embedding has no norms
    or biases, hence a group less than the others, which then wait for it without end.
    """
    local_norm, reduce = optimizer.scaled_global_norm, optimizer._model_parallel_all_reduce

    def scaled_global_norm(norm_type: int = 2) -> Tensor:
        optimizer._model_parallel_all_reduce = lambda tensor, op: None
        # What is not finite is infinite here, and so is the sum with it.
        squared = local_norm(norm_type).square()
        optimizer._model_parallel_all_reduce = reduce
        reduce(squared, dist.ReduceOp.SUM)
        return squared.sqrt()

    optimizer.scaled_global_norm = scaled_global_norm


def add_nothing_as_zero(optimizer: Any, device: torch.device) -> None:
    """Let a stage take part in the sum of DeepSpeed's bf16 optimizer though it counts no gradient itself: one
    with the output layer alone, whose weight is tied to the embedding and counts there."""
    gradients = optimizer.get_grads_for_norm

    def gradients_or_zero(for_clipping: bool = False) -> Any:
        found = gradients(for_clipping)
        return found if for_clipping or found[0] else ([torch.zeros(1, device=device)], found[1])

    optimizer.get_grads_for_norm = gradients_or_zero
