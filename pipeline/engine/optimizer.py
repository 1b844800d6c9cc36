"""The torch optimizer that DeepSpeed wraps, and the gradient norm where DeepSpeed reports none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.job.job import OptimizerConfig
from pipeline.parallel.parameters import slicing_of


def build_optimizer(config: OptimizerConfig, module: nn.Module) -> torch.optim.Optimizer:
    """One of torch's optimizers over this rank's parameters.

    Weight decay acts on matrices only, not on biases and norms (GPT-3 paper, appendix B, leaves the choice
    open; this is the common one). Matrices are recognised by the full shape: ZeRO-3 has flattened its shards.
    """
    matrices, vectors = [], []
    for parameter in module.parameters():
        (matrices if len(slicing_of(parameter).full_shape) > 1 else vectors).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = _optimizer(config, groups)
    optimizer.register_load_state_dict_pre_hook(_keep_settings)
    return optimizer


def _optimizer(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if config.type == "SGD":
        return torch.optim.SGD(
            groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=config.fused
        )
    kind = torch.optim.AdamW if config.type == "AdamW" else torch.optim.Adam
    return kind(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=config.fused)


def _keep_settings(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Of a checkpoint, take the state but not the settings (weight decay, betas, ...): those are the JSON's,
    which may have changed since. Before the load, because `fused` decides where torch puts the state."""
    pairs = zip(optimizer.param_groups, saved["param_groups"], strict=True)
    return saved | {"param_groups": [{**now, "params": then["params"]} for now, then in pairs]}


def clip_global_norm(
    pairs: Sequence[tuple[nn.Parameter, Tensor]], group: dist.ProcessGroup, maximum: float
) -> Tensor:
    """Scale gradients in place to a global norm of at most `maximum` (0: leave them); return the norm.

    Args:
        pairs: This rank's parameters and their gradients. A parameter carries ``model_parallel``: whether
            this rank adds it to the sum.
        group: All ranks that hold other parameters of the same replica (pipeline x tensor).

    Returns:
        The norm before clipping, fp32, a scalar tensor, the same on every rank of the group. It is not finite
        where any gradient is not, whether or not it counts.
    """
    # What does not count is taken 0 times, and not left out: 0 times infinity is not finite.
    squares = [
        torch.linalg.vector_norm(gradient, dtype=torch.float32).square() * parameter.model_parallel
        for parameter, gradient in pairs
    ]
    total = torch.stack(squares).sum()
    dist.all_reduce(total, group=group)
    norm = total.sqrt()
    if maximum > 0.0:
        gradients = [gradient for _, gradient in pairs]
        torch._foreach_mul_(gradients, (maximum / (norm + 1e-6)).clamp(max=1.0))
    return norm
