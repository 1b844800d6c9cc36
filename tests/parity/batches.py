"""Global batches with awkward masks, and each data rank's share of them."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.data.loader import MicroBatch
from tests.parity.cases import SEQUENCE, STEPS, Case

VOCABULARY = 257


class Batches(NamedTuple):
    """Global batches: tokens, labels int64 and mask bool, each [steps, batch, sequence]."""

    tokens: Tensor
    labels: Tensor
    mask: Tensor


@cache
def global_batches(rows: int) -> Batches:
    """The same batches for every layout.

    Masks by step, so that whatever is sliced, some rank once has nothing to predict:

        0   scattered holes, two rows empty
        1   first half of the rows empty: data rank 0, or the first micro-batches
        2   second half of the positions empty: the last sequence rank
        3   every other row empty: data rank 0 where micro-batches have one row
    """
    generator = torch.Generator().manual_seed(2024)
    text = torch.randint(VOCABULARY, (STEPS, rows, SEQUENCE + 1), generator=generator)
    mask = torch.rand((STEPS, rows, SEQUENCE), generator=generator) < 0.7
    mask[0, [0, 3]] = False
    mask[1, : rows // 2] = False
    mask[2, :, SEQUENCE // 2 :] = False
    mask[3, ::2] = False
    return Batches(text[..., :-1].contiguous(), text[..., 1:].contiguous(), mask)


def micro_batches(case: Case, step: int, data_rank: int) -> list[MicroBatch]:
    """What data rank `data_rank` reads: micro-batch m holds rows (m * data + rank) * micro_batch onwards."""
    batches, size = global_batches(case.batch), case.micro_batch
    share = []
    for index in range(case.accumulation):
        first = (index * case.data + data_rank) * size
        rows = slice(first, first + size)
        parts = (part[step, rows] for part in batches)
        share.append(MicroBatch(*parts, samples=tuple(range(first, first + size))))
    return share
