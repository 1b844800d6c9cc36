"""Bytes that training states take on one rank, by ZeRO stage. No torch.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 3:
weights, gradients and optimizer state of a model of P parameters on N data-parallel ranks take

    stage 0   w P     + g P     + k P          (the baseline)
    stage 1   w P     + g P     + k P / N      (P_os)
    stage 2   w P     + g P / N + k P / N      (P_os+g)
    stage 3   w P / N + g P / N + k P / N      (P_os+g+p)

bytes, with w = g = 2 and k = 12 in the paper's mixed precision (fp32 master weight and two Adam moments).
Here g is 4 where gradients are summed in fp32. In fp32 without ZeRO the weights are their own master copy and
k is 8; from stage 1 on DeepSpeed keeps a separate copy of its share in fp32 as well, so that k is 12.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
MOMENTS = 2 * BYTES["fp32"]
Part = Literal["parameters", "gradients", "optimizer"]


@dataclass(frozen=True)
class States:
    """Bytes on one rank."""

    parameters: float
    gradients: float
    optimizer: float


def states(num_parameters: int, ranks: int, stage: int, compute: str, accumulation: str) -> States:
    """What one rank holds of AdamW training when it is about to update.

    Args:
        num_parameters: Of the whole model, vocabulary padding included.
        ranks: That ZeRO shards over.
        stage: 0 to 3.
        compute: Format of weights.
        accumulation: Format of the gradients' sum.
    """
    master = 0 if stage == 0 and compute == "fp32" else BYTES["fp32"]
    if stage == 0 and compute != "fp32":
        master = BYTES["fp32"]
    share = num_parameters / ranks
    return States(
        parameters=BYTES[compute] * (share if stage >= 3 else num_parameters),
        gradients=BYTES[accumulation] * (share if stage >= 2 else num_parameters),
        optimizer=(master + MOMENTS) * (share if stage >= 1 else num_parameters),
    )
