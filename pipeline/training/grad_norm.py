"""The global gradient norm where DeepSpeed has none of its own: fp32 weights without ZeRO.

DeepSpeed's clip for that case is skipped when clipping is off and does not report the norm.
"""

from __future__ import annotations

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
