"""The held-out samples as micro-batches of fixed shape."""

from __future__ import annotations

import numpy as np

from pipeline.data.batch import PADDING_SAMPLE, MicroBatch, micro_batch
from pipeline.data.packing import PackedDataset, Samples


def eval_batches(
    dataset: PackedDataset, num_samples: int, micro_batch_size: int, data_rank: int, data_size: int
) -> tuple[MicroBatch, ...]:
    """The first `num_samples` held-out samples (all, if there are fewer), the share of `data_rank`.

    Together the data ranks hold the same samples in every layout, each once. Every rank gets the same
    number of micro-batches, at least one, of the same shape; rows beyond the last sample are zeros
    with an empty mask, so a rank's share may hold no unmasked token at all.

    Raises:
        ValueError: a size below 1, or a rank that does not exist.
    """
    if min(num_samples, micro_batch_size, data_size) < 1 or not 0 <= data_rank < data_size:
        raise ValueError(
            f"num_samples {num_samples}, micro_batch_size {micro_batch_size} and data_size {data_size} "
            f"must be at least 1, and data_rank {data_rank} in 0 .. data_size - 1"
        )
    count = min(num_samples, dataset.samples_per_epoch)
    blocks = -(-count // (micro_batch_size * data_size)) * data_size
    return tuple(
        _padded(dataset, range(block * micro_batch_size, (block + 1) * micro_batch_size), count)
        for block in range(data_rank, blocks, data_size)
    )


def _padded(dataset: PackedDataset, positions: range, count: int) -> MicroBatch:
    """The samples at `positions`, with empty rows in place of those at `count` and beyond."""
    samples = dataset.read([position for position in positions if position < count])
    below = (0, len(positions) - len(samples.indices))
    optional = (samples.documents, samples.counted)
    return micro_batch(
        Samples(
            np.pad(samples.tokens, (below, (0, 0))),
            np.pad(samples.num_labels, below),
            np.pad(samples.indices, below, constant_values=PADDING_SAMPLE),
            *(None if each is None else np.pad(each, (below, (0, 0))) for each in optional),
        )
    )
