"""Weights in the format that was asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.base.problems import JobError, Problem


def rounded(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in another format.

    Raises:
        JobError: the format does not reach as far as a value does. Of float32 and bfloat16, which reach
            equally far, each takes what the other holds.
    """
    values = tensor.to(dtype)
    if dtype == torch.float16 and not values.isfinite().all() and tensor.isfinite().all():
        rule = f"{name} has values up to {tensor.abs().max():g}, and float16 ends at 65504"
        raise JobError([Problem("dtype", "float16", rule, "Use --dtype bfloat16 or float32")])
    return values
