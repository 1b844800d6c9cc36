"""Bytes that training states take on one rank, by ZeRO stage. No torch.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 3:
weights, gradients and optimizer state of a model of P parameters on N data-parallel ranks take

    stage 0   w P     + g P     + k P          (the baseline)
    stage 1   w P     + g P     + k P / N      (P_os)
    stage 2   w P     + g P / N + k P / N      (P_os+g)
    stage 3   w P / N + g P / N + k P / N      (P_os+g+p)

bytes, with w = g = 2 and k = 12 in the paper's mixed precision (fp32 master weight and two Adam moments),
which is bf16 weights with gradients summed in bf16 here. The other formats follow from what DeepSpeed keeps:

    fp32                  w = g = 4; k = 8 at stage 0, where the weights are their own masters, else 12
    bf16, sums in fp32    g = 4; at stage 1 g = 6: the bf16 gradient stays beside its fp32 sum
    offloaded optimizer   at stage 1 the share of the gradient that the CPU updates with, 4 P / N, is added
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


def states(
    num_parameters: int, ranks: int, stage: int, compute: str, accumulation: str, offloaded: bool = False
) -> States:
    """What one rank holds of AdamW training when it is about to update.

    Args:
        num_parameters: Of the whole model, vocabulary padding included.
        ranks: That ZeRO shards over.
        stage: 0 to 3.
        compute: Format of weights.
        accumulation: Format of the gradients' sum.
        offloaded: The optimizer state is on the CPU.
    """
    masters = 0 if compute == "fp32" and stage == 0 else BYTES["fp32"]
    share = num_parameters / ranks
    gradients = BYTES[accumulation] * (share if stage >= 2 else num_parameters)
    if stage == 1 and accumulation != compute:
        gradients += BYTES[compute] * num_parameters
    if stage == 1 and offloaded:
        gradients += BYTES["fp32"] * share
    return States(
        parameters=BYTES[compute] * (share if stage >= 3 else num_parameters),
        gradients=gradients,
        optimizer=(masters + MOMENTS) * (share if stage >= 1 else num_parameters),
    )
