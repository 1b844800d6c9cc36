"""What blocks are made of beside attention: norms and the feed-forward layer."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from pipeline.model.config import ModelConfig
from pipeline.parallel import collectives
from pipeline.parallel.context import Group
from pipeline.parallel.parameters import ParameterFactory
from pipeline.parallel.tensor import ColumnParallelLinear, RowParallelLinear


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


class MLP(nn.Module):
    """[b, t, hidden] -> [b, t, hidden] through an inner width of ffn (sliced over tensor ranks).

    SwiGLU (Shazeer 2020) interleaves the rows of gate and up, (gate 0, up 0, gate 1, ...), so that a tensor
    rank's slice of the weight is contiguous and holds both halves of each inner unit.
    """

    def __init__(self, config: ModelConfig, make: ParameterFactory) -> None:
        super().__init__()
        self.activation = config.activation
        width, inner = config.hidden_size, config.ffn_hidden_size
        rows = 2 * inner if config.activation == "swiglu" else inner
        output_std = config.init_std / (2 * config.num_layers) ** 0.5
        self.up = ColumnParallelLinear(make.under("up"), width, rows, config.bias, config.init_std)
        self.down = RowParallelLinear(make.under("down"), inner, width, config.bias, output_std)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x)
        if self.activation == "swiglu":
            gate, up = inner.unflatten(-1, (-1, 2)).unbind(-1)
            return self.down(functional.silu(gate) * up)
        approximate = "tanh" if self.activation == "gelu_tanh" else "none"
        return self.down(functional.gelu(inner, approximate=approximate))
