"""Rotary positions, plain or rescaled for sequences longer than those of the first training."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pipeline.model.config import ModelConfig, RopeScaling


class Rotary:
    """Rotates queries and keys by their position; one per model, so that its layers share the table.

    Pair i of a head, the channels (i, i + d / 2), turns by position * frequency i (Su et al. 2021, in the
    pairing that Llama uses). Everything is computed in fp32: in bf16, positions above 256 would collide.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
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
                positions = torch.arange(length, device=device, dtype=torch.float32)
                angles = torch.outer(positions, frequencies(self.config).to(device))
                size = amplitude(self.config.rope_scaling)
                self._table = (angles.cos() * size, angles.sin() * size)
        return self._table


def frequencies(config: ModelConfig) -> Tensor:
    """Of each pair, [d / 2] fp32, in radians per position: theta^(-2 i / d), rescaled as the model says.

    In the order of transformers' operations, and on the CPU as there: a rounding of 1e-7 grows to 0.01
    radians at position 100,000.
    """
    pairs = torch.arange(0, config.head_dim, 2, device="cpu", dtype=torch.float32)
    plain = 1.0 / config.rope_theta ** (pairs / config.head_dim)
    scaling = config.rope_scaling
    return plain if scaling is None else _RESCALED[scaling.rope_type](plain, scaling, config)


def amplitude(scaling: RopeScaling | None) -> float:
    """What rotated queries and keys are multiplied by: 1 but for yarn (Peng et al. 2023, equation 22), whose
    attention is sharper the longer the text."""
    if scaling is None or scaling.rope_type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return grown(scaling.mscale) / grown(scaling.mscale_all_dim)
    return grown(1.0)


def _linear(plain: Tensor, scaling: RopeScaling, config: ModelConfig) -> Tensor:
    """Positions are divided by the factor (Chen et al. 2023)."""
    return plain / scaling.factor


def _dynamic(plain: Tensor, scaling: RopeScaling, config: ModelConfig) -> Tensor:
    """Nothing changes up to max_position_embeddings, the longest sequence of training."""
    return plain


def _llama3(plain: Tensor, scaling: RopeScaling, config: ModelConfig) -> Tensor:
    """Llama 3.1: pairs that turn fewer than low_freq_factor times in the first training's length are divided
    by the factor, those of more than high_freq_factor turns stay, and between them the share is linear."""
    assert scaling.low_freq_factor is not None and scaling.high_freq_factor is not None
    wavelength = 2 * math.pi / plain
    turns = _first_length(scaling, config) / wavelength
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    between = (1 - share) * plain / scaling.factor + share * plain
    divided = torch.where(turns < scaling.low_freq_factor, plain / scaling.factor, between)
    return torch.where(turns > scaling.high_freq_factor, plain, divided)


def _yarn(plain: Tensor, scaling: RopeScaling, config: ModelConfig) -> Tensor:
    """Peng et al. 2023, section 3.2: as `_llama3`, but the share is linear in the pair's index."""
    fast, slow = scaling.beta_fast or 32, scaling.beta_slow or 1
    d, length = config.head_dim, _first_length(scaling, config)

    def pair_of(turns: float) -> float:
        return d * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = pair_of(fast), pair_of(slow)
    if scaling.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    width = high - low if high != low else 0.001  # a step
    kept = 1 - ((torch.arange(d // 2, device="cpu", dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / scaling.factor * (1 - kept) + plain * kept


def _first_length(scaling: RopeScaling, config: ModelConfig) -> int:
    """The longest sequence before the positions were rescaled."""
    return scaling.original_max_position_embeddings or config.max_position_embeddings


_RESCALED: dict[str, Callable[[Tensor, RopeScaling, ModelConfig], Tensor]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
