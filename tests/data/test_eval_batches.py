import itertools

import numpy as np
import pytest

from pipeline.data.loader import PADDING_SAMPLE, EvalBatches, MicroBatch
from pipeline.data.packing import PackedDataset, Packing


def held_out(num_tokens: int = 59) -> PackedDataset:
    """8 samples of 8 labels for 59 tokens: 58 labels, so the last sample has 2."""
    return PackedDataset(np.arange(num_tokens), np.array([0, num_tokens]), [0], Packing(8, 1, keep_tail=True))


def unmasked_labels(batches: list[MicroBatch]) -> list[int]:
    return sorted(label for batch in batches for label in batch.labels[batch.mask].tolist())


@pytest.mark.parametrize(("micro", "data"), list(itertools.product((1, 2, 3, 5, 20), (1, 2, 3, 4))))
@pytest.mark.parametrize("num_samples", [1, 5, 8, 100])
def test_same_samples_in_every_layout(micro: int, data: int, num_samples: int) -> None:
    dataset = held_out()
    shares = [EvalBatches(dataset, num_samples, micro, rank, data) for rank in range(data)]
    batches = [batch for share in shares for batch in share]
    expected = dataset.read(np.arange(min(num_samples, 8)))
    rows = [index for batch in batches for index in batch.samples if index != PADDING_SAMPLE]
    assert sorted(rows) == sorted(expected.indices.tolist())
    assert unmasked_labels(batches) == sorted(
        label
        for row, count in zip(expected.tokens, expected.num_labels, strict=True)
        for label in row[1 : count + 1].tolist()
    )
    assert len({len(share) for share in shares}) == 1
    assert shares[0]
    assert {tuple(batch.tokens.shape) for batch in batches} == {(micro, 8)}


def test_all_samples_hold_each_label_of_the_set_once() -> None:
    assert unmasked_labels(list(EvalBatches(held_out(), 100, 3, 0, 1))) == list(range(1, 59))


def test_rows_of_padding_are_empty() -> None:
    batches = EvalBatches(held_out(), 1, 2, 1, 2)
    assert [batch.samples for batch in batches] == [(PADDING_SAMPLE, PADDING_SAMPLE)]
    assert not batches[0].mask.any()
    assert not batches[0].tokens.any()


@pytest.mark.parametrize("arguments", [(0, 1, 0, 1), (1, 0, 0, 1), (1, 1, 1, 1), (1, 1, -1, 1)])
def test_wrong_sizes(arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        EvalBatches(held_out(), *arguments)
