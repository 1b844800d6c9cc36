"""The feed-forward layer: GELU or SwiGLU."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from pipeline.model.config import ModelConfig
from pipeline.parallel.parameters import ParameterFactory
from pipeline.parallel.tensor import ColumnParallelLinear, RowParallelLinear


class MLP(nn.Module):
    """[b, t, hidden] -> [b, t, hidden] through an inner width of ffn (cut over tensor ranks).

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
