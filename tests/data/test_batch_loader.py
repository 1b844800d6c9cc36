"""Which rows a data rank gets, and the thread that reads them ahead."""

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from pipeline.data.loader import BatchLoader, MicroBatch, StepBatch, digest, read_step
from pipeline.data.packing import PackedDataset, Packing, Samples


@dataclass(frozen=True)
class Sizes:
    train_batch_size: int
    micro_batch_size: int
    accumulation_steps: int


# Every way to make a global batch of 12: (data ranks, micro-batch, accumulation steps).
LAYOUTS = [
    (d, m, 12 // (d * m)) for d, m in itertools.product((1, 2, 3, 4), (1, 2, 3, 6)) if 12 % (d * m) == 0
]


def make_dataset(seed: int = 5) -> PackedDataset:
    offsets = np.concatenate(([0], np.cumsum(np.random.default_rng(seed).integers(1, 40, size=30))))
    return PackedDataset(np.arange(offsets[-1], dtype=np.uint16), offsets, np.arange(30), Packing(8, seed))


def global_batch(data: int, micro: int, accumulation: int, first: int) -> tuple[np.ndarray, list[int]]:
    """Rows of all data ranks in the order of their positions, and their sample indices."""
    sizes = Sizes(12, micro, accumulation)
    shares = [read_step(make_dataset(), sizes, rank, data, first) for rank in range(data)]
    batches = [shares[rank].micro_batches[m] for m in range(accumulation) for rank in range(data)]
    rows = np.concatenate([np.hstack([b.tokens, b.labels[:, -1:]]) for b in batches])
    return rows, [index for b in batches for index in b.samples]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("first", [0, 12, 7, 10_000])
def test_layout_does_not_change_the_global_batch(layout: tuple[int, int, int], first: int) -> None:
    rows, indices = global_batch(*layout, first)
    expected = make_dataset().read(np.arange(first, first + 12))
    assert np.array_equal(rows, expected.tokens)
    assert indices == expected.indices.tolist()


def test_rows_take_their_documented_positions() -> None:
    dataset, first = make_dataset(), 40
    for rank, m, row in itertools.product(range(3), range(2), range(2)):
        share = read_step(dataset, Sizes(12, 2, 2), rank, 3, first)
        expected = dataset.read([first + (m * 3 + rank) * 2 + row])
        assert share.micro_batches[m].samples[row] == expected.indices[0]
        assert share.micro_batches[m].tokens[row].tolist() == expected.tokens[0, :-1].tolist()


def test_labels_are_the_next_tokens_and_all_count() -> None:
    share = read_step(make_dataset(), Sizes(4, 2, 2), 0, 1, 0)
    for batch in share.micro_batches:
        assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
        assert batch.tokens.dtype == batch.labels.dtype == torch.int64
        assert batch.mask.dtype == torch.bool
        assert batch.mask.all()
        assert batch.tokens.shape == batch.labels.shape == batch.mask.shape == (2, 8)
    assert (share.first_sample, share.num_samples, share.num_tokens) == (0, 4, 32)


@pytest.mark.parametrize("start", [0, 4, 36, 37, 1000])
def test_resuming_anywhere_continues_the_same_sequence(start: int) -> None:
    """Also across the edge of an epoch and with another batch size before the stop."""
    sizes = Sizes(4, 2, 2)
    with BatchLoader(make_dataset(), sizes, 0, 1, start) as loader:
        steps = list(itertools.islice(loader, 30))
    assert [step.first_sample for step in steps] == [start + 4 * i for i in range(30)]
    seen = [index for step in steps for batch in step.micro_batches for index in batch.samples]
    assert seen == make_dataset().read(np.arange(start, start + 120)).indices.tolist()


def test_resume_with_another_layout_and_batch_size_repeats_and_skips_nothing() -> None:
    seen: list[int] = []
    consumed = 0
    for data, micro, accumulation, steps in [(2, 2, 1, 5), (3, 1, 2, 4), (1, 5, 1, 20)]:
        sizes = Sizes(data * micro * accumulation, micro, accumulation)
        for step in range(steps):
            shares = [
                read_step(make_dataset(), sizes, rank, data, consumed + step * sizes.train_batch_size)
                for rank in range(data)
            ]
            for m in range(accumulation):
                seen += [index for share in shares for index in share.micro_batches[m].samples]
        consumed += steps * sizes.train_batch_size
    assert seen == make_dataset().read(np.arange(consumed)).indices.tolist()


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)


def thread_is_running() -> bool:
    return any(thread.name == "batch-loader" for thread in threading.enumerate())


class Failing(PackedDataset):
    """Reads `good` times, then fails."""

    def __init__(self, good: int) -> None:
        super().__init__(np.arange(100), np.array([0, 100]), [0], Packing(8, 0))
        self.left = good

    def read(self, positions: np.ndarray) -> Samples:
        if not self.left:
            raise OSError("the disk is gone")
        self.left -= 1
        return super().read(positions)


def test_an_error_in_the_thread_reaches_the_consumer_after_the_good_batches() -> None:
    loader = BatchLoader(Failing(good=3), Sizes(1, 1, 1), 0, 1)
    assert [next(loader).first_sample for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            next(loader)
    wait_until(lambda: not thread_is_running())
    assert not thread_is_running(), "nothing reads on after an error"
    loader.close()


class Counting(PackedDataset):
    """Counts its reads and can be slow."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__(np.arange(100), np.array([0, 100]), [0], Packing(8, 0))
        self.reads, self.seconds = 0, seconds

    def read(self, positions: np.ndarray) -> Samples:
        time.sleep(self.seconds)
        self.reads += 1
        return super().read(positions)


def test_reading_ahead_is_bounded() -> None:
    dataset = Counting()
    with BatchLoader(dataset, Sizes(1, 1, 1), 0, 1, prefetch=2) as loader:
        assert dataset.reads == 0, "nothing is read before the first batch is asked for"
        next(loader)
        wait_until(lambda: dataset.reads >= 4)
        time.sleep(0.3)
        assert dataset.reads == 4, "one taken, two in the queue, one in the thread's hands"


def test_waiting_is_measured() -> None:
    dataset = Counting(seconds=0.2)
    with BatchLoader(dataset, Sizes(1, 1, 1), 0, 1) as loader:
        next(loader)
        assert 0.15 <= loader.data_time < 5
        wait_until(lambda: dataset.reads >= 4)
        next(loader)
        assert loader.data_time < 0.1


def test_close_ends_the_thread_and_the_iteration() -> None:
    loader = BatchLoader(make_dataset(), Sizes(1, 1, 1), 0, 1)
    next(loader)
    assert thread_is_running()
    loader.close()
    loader.close()
    assert not thread_is_running()
    with pytest.raises(ValueError, match="closed"):
        next(loader)
    BatchLoader(make_dataset(), Sizes(1, 1, 1), 0, 1).close()


@pytest.mark.parametrize(
    ("sizes", "rank", "size", "start", "message"),
    [
        (Sizes(8, 2, 2), 0, 1, 0, r"8 is not micro-batch 2 \* accumulation steps 2 \* .* 1 = 4"),
        (Sizes(4, 2, 2), 1, 1, 0, r"data rank 1: must be in 0 \.\. 0"),
        (Sizes(4, 2, 2), 0, 1, -1, "start -1"),
    ],
)
def test_arguments_that_do_not_fit(sizes: Sizes, rank: int, size: int, start: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchLoader(make_dataset(), sizes, rank, size, start)


def changed(step: StepBatch, **fields: object) -> StepBatch:
    """`step` with other fields in its last micro-batch."""
    return replace(step, micro_batches=(*step.micro_batches[:-1], replace(step.micro_batches[-1], **fields)))


def test_digest_is_equal_for_peers_and_sees_every_difference() -> None:
    def share(rank: int = 0, first: int = 0) -> StepBatch:
        return read_step(make_dataset(), Sizes(8, 2, 2), rank, 2, first)

    step = share()
    last: MicroBatch = step.micro_batches[-1]
    tokens, labels, mask = last.tokens.clone(), last.labels.clone(), last.mask.clone()
    tokens[-1, -1] += 1
    labels[0, 0] += 1
    mask[1, 3] = False
    others = [
        share(rank=1),
        share(first=8),
        replace(step, first_sample=1),
        replace(step, micro_batches=step.micro_batches[::-1]),
        changed(step, tokens=tokens),
        changed(step, labels=labels),
        changed(step, mask=mask),
        changed(step, samples=(0, 1)),
    ]
    assert digest(step) == digest(share())
    values = {digest(other) for other in (step, *others)}
    assert len(values) == len(others) + 1
    assert all(0 <= value < 1 << 63 for value in values)
