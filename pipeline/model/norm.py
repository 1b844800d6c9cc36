"""Layer norm and RMS norm, with the parameter names every layout shares."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from pipeline.model.config import ModelConfig
from pipeline.parallel import collectives
from pipeline.parallel.context import Group
from pipeline.parallel.parameters import ParameterFactory


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension (Ba et al. 2016)."""

    def __init__(self, make: ParameterFactory, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = make.constant("weight", (size,), 1.0)
        self.bias = make.constant("bias", (size,), 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019).

    `partial_over`: the group whose ranks apply the same weight to different inputs (heads, say), so that
    each computes a part of the weight's gradient; None where all ranks see the same inputs.
    """

    def __init__(self, make: ParameterFactory, size: int, eps: float, partial_over: Group = None) -> None:
        super().__init__()
        self.eps, self.partial_over = eps, partial_over
        self.weight = make.constant("weight", (size,), 1.0)

    def forward(self, x: Tensor) -> Tensor:
        weight = collectives.copy_to(self.weight, self.partial_over)
        return functional.rms_norm(x, weight.shape, weight, self.eps)


def norm_class(config: ModelConfig) -> type[LayerNorm] | type[RMSNorm]:
    """The norm that `config` names; both are built with (make, size, eps)."""
    return LayerNorm if config.norm == "layernorm" else RMSNorm
