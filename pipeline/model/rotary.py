"""Rotary position embedding (Su et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor


class Rotary:
    """Rotates queries and keys by their position; one per model, so that its layers share the table.

    Pair i of a head, the channels (i, i + d / 2), turns by position * theta^(-2 i / d) (equation 15, in the
    pairing that Llama uses). Everything is computed in fp32: in bf16, positions above 256 would collide.
    """

    def __init__(self, head_dim: int, theta: float) -> None:
        self.head_dim, self.theta = head_dim, theta
        self._table: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """[b, heads, t, d] at `positions`, [b, t] below t; None: 0 .. t - 1 in each row. In x's type."""
        cos, sin = self._cos_sin(x.shape[2], x.device)
        if positions is not None:
            cos, sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    def _cos_sin(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Of each position and pair, [length, d / 2] each; kept until the length or device changes."""
        if self._table is None or self._table[0].shape[0] != length or self._table[0].device != device:
            # Made outside any construction context, and never part of a gradient.
            with torch.no_grad():
                pairs = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32)
                frequencies = self.theta ** (-pairs / self.head_dim)
                positions = torch.arange(length, device=device, dtype=torch.float32)
                angles = torch.outer(positions, frequencies)
                self._table = (angles.cos(), angles.sin())
        return self._table
