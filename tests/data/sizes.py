"""Batch sizes for tests of the loader."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """train = micro * accumulation * data parallel size."""

    train_batch_size: int
    micro_batch_size: int
    accumulation_steps: int
