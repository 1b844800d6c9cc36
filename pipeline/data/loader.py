"""Micro-batches of packed samples: for training, read ahead by a thread, and for evaluation."""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pipeline.data.blend import Blend
from pipeline.data.packing import PackedDataset, Samples

PADDING_SAMPLE = -1
# Seconds between a waiting thread's checks whether the loader is closed.
_POLL = 0.1


@dataclass(frozen=True)
class MicroBatch:
    """Whole rows, before any slicing over sequence ranks.

    Attributes:
        tokens: [micro batch, sequence] int64.
        labels: [micro batch, sequence] int64, shifted already: labels[:, t] is the token after tokens[:, t].
        mask: [micro batch, sequence] bool; False where the label does not count in the loss.
        samples: Sample index of each row in its source: epoch * samples per epoch + number in the epoch; -1
            is a row of padding.
        documents: [micro batch, sequence] int64 document number of each token, counted from 0 in its row;
            None where attention sees whole rows. Stays on the host, where layouts are made from it.
        sources: Number of each row's source in the blend; empty where there is one source.
    """

    tokens: Tensor
    labels: Tensor
    mask: Tensor
    samples: tuple[int, ...]
    documents: Tensor | None = None
    sources: tuple[int, ...] = ()

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same with tokens, labels and mask on `device`."""
        moved = (each.to(device, non_blocking=True) for each in (self.tokens, self.labels, self.mask))
        return MicroBatch(*moved, self.samples, self.documents, self.sources)


@dataclass(frozen=True)
class StepBatch:
    """One data rank's share of a global batch.

    Attributes:
        micro_batches: One per gradient accumulation step.
        first_sample: Samples that the whole job had consumed before this step.
        num_samples: Samples of the whole job in this step; the next step starts after them.
        num_tokens: Input tokens of the whole job in this step, each counted once.
    """

    micro_batches: tuple[MicroBatch, ...]
    first_sample: int
    num_samples: int
    num_tokens: int


def micro_batch(samples: Samples) -> MicroBatch:
    """Shift and mask rows of packed tokens. Masks are made from positions, never from token ids."""
    rows = torch.from_numpy(samples.tokens)
    labels = rows[:, 1:].contiguous()
    mask = torch.arange(labels.shape[1]) < torch.from_numpy(samples.num_labels)[:, None]
    if samples.counted is not None:
        mask &= torch.from_numpy(samples.counted)
    documents = None
    if samples.documents is not None:
        documents = torch.from_numpy(samples.documents)[:, :-1].contiguous()
    sources = () if samples.sources is None else tuple(samples.sources.tolist())
    indices = tuple(samples.indices.tolist())
    return MicroBatch(rows[:, :-1].contiguous(), labels, mask, indices, documents, sources)


def digest(step: StepBatch) -> int:
    """A 63-bit hash of what the step holds, equal on every rank that must see the same samples.

    It covers tokens, labels, masks, documents, sample indices and the position in the order; it fits an int64
    tensor, and does not depend on the machine's byte order.
    """
    state = hashlib.blake2b(digest_size=8)
    state.update(np.array([step.first_sample, step.num_samples], dtype="<i8").tobytes())
    for batch in step.micro_batches:
        state.update(np.array([*batch.tokens.shape, *batch.samples, *batch.sources], dtype="<i8").tobytes())
        tensors = (batch.tokens, batch.labels, batch.mask, batch.documents)
        for tensor in (each for each in tensors if each is not None):
            state.update(tensor.cpu().numpy().astype("<i8", copy=False).tobytes())
    return int.from_bytes(state.digest(), "little") >> 1


class EvalBatches(Sequence[MicroBatch]):
    """The share of `data_rank` of the first `num_samples` validation samples (all, if there are fewer), each
    micro-batch read when it is asked for.

    Together the data ranks hold the same samples in every layout, each once. Every rank gets the same
    number of micro-batches, at least one, of the same shape; rows beyond the last sample are zeros
    with an empty mask, so a rank's share may hold no unmasked token at all.

    Args:
        num_samples: None: all.

    Raises:
        ValueError: a size below 1, or a rank that does not exist.
    """

    def __init__(
        self,
        dataset: PackedDataset,
        num_samples: int | None,
        micro_batch_size: int,
        data_rank: int,
        data_size: int,
    ) -> None:
        count = dataset.samples_per_epoch if num_samples is None else num_samples
        if min(count, micro_batch_size, data_size) < 1 or not 0 <= data_rank < data_size:
            raise ValueError(
                f"num_samples {num_samples}, micro_batch_size {micro_batch_size} and data_size {data_size} "
                f"must be at least 1, and data_rank {data_rank} in 0 .. data_size - 1"
            )
        self._dataset, self._rows = dataset, micro_batch_size
        self._count = min(count, dataset.samples_per_epoch)
        blocks = -(-self._count // (micro_batch_size * data_size)) * data_size
        self._blocks = range(data_rank, blocks, data_size)

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, place: Any) -> Any:
        """One micro-batch, or for a slice a tuple of them."""
        if isinstance(place, slice):
            return tuple(map(self._read, self._blocks[place]))
        return self._read(self._blocks[place])

    def _read(self, block: int) -> MicroBatch:
        positions = range(block * self._rows, (block + 1) * self._rows)
        return _padded(self._dataset, positions, self._count)


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


class BatchSizes(Protocol):
    """The job's batch arithmetic: train = micro * accumulation * data parallel size."""

    @property
    def train_batch_size(self) -> int: ...

    @property
    def micro_batch_size(self) -> int: ...

    @property
    def accumulation_steps(self) -> int: ...


def read_step(
    dataset: Blend | PackedDataset, batch: BatchSizes, data_rank: int, data_size: int, first: int
) -> StepBatch:
    """The share of `data_rank` in the global batch that starts after `first` consumed samples.

    Row r of micro-batch m takes position first + (m * data_size + data_rank) * micro_batch_size + r:
    with 2 data ranks, micro-batches of 2 and 2 accumulation steps, positions 0 .. 7 go to

        micro-batch 0: rank 0 [0 1] rank 1 [2 3]    micro-batch 1: rank 0 [4 5] rank 1 [6 7]
    """
    rows = np.arange(batch.micro_batch_size)
    blocks = range(data_rank, data_size * batch.accumulation_steps, data_size)
    return StepBatch(
        tuple(micro_batch(dataset.read(first + block * batch.micro_batch_size + rows)) for block in blocks),
        first_sample=first,
        num_samples=batch.train_batch_size,
        num_tokens=batch.train_batch_size * dataset.sequence_length,
    )


class BatchLoader:
    """Endless `StepBatch`es of one data rank, from `start` consumed samples on.

    Ranks that differ only in sequence, tensor or pipeline rank build it with the same arguments and get the
    same batches. The thread starts with the first ``next`` and keeps at most `prefetch` steps ready. An error
    while reading is raised by ``next``; use it as a context manager, or call `close`.

    Attributes:
        data_time: Seconds that the last ``next`` waited.

    Raises:
        ValueError: the batch sizes do not multiply, the rank does not exist, or `start` is negative.
    """

    def __init__(
        self,
        dataset: Blend | PackedDataset,
        batch: BatchSizes,
        data_rank: int,
        data_size: int,
        start: int = 0,
        prefetch: int = 2,
    ) -> None:
        product = batch.micro_batch_size * batch.accumulation_steps * data_size
        if batch.train_batch_size != product:
            raise ValueError(
                f"train batch size {batch.train_batch_size} is not micro-batch {batch.micro_batch_size} * "
                f"accumulation steps {batch.accumulation_steps} * data parallel size {data_size} = {product}"
            )
        if not 0 <= data_rank < data_size:
            raise ValueError(f"data rank {data_rank}: must be in 0 .. {data_size - 1}")
        if start < 0 or prefetch < 1:
            raise ValueError(f"start {start} must be at least 0, prefetch {prefetch} at least 1")
        self.data_time = 0.0
        self._read = lambda first: read_step(dataset, batch, data_rank, data_size, first)
        self._stride = batch.train_batch_size
        self._start = start
        self._ready: queue.Queue[StepBatch | BaseException] = queue.Queue(maxsize=prefetch)
        self._closed = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="batch-loader", daemon=True)

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        """The next step's batch.

        Raises:
            ValueError: the loader is closed.
            Exception: whatever reading the data raised, now and on every later call.
        """
        if self._closed.is_set():
            raise ValueError("the loader is closed")
        if self._failure is not None:
            raise self._failure
        if self._thread.ident is None:
            self._thread.start()
        begin = time.perf_counter()
        item = self._ready.get()
        self.data_time = time.perf_counter() - begin
        if isinstance(item, BaseException):
            self._failure = item
            raise item
        return item

    def close(self) -> None:
        """End the thread. Safe to call twice."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        first = self._start
        while not self._closed.is_set():
            try:
                item: StepBatch | BaseException = self._read(first)
            except BaseException as error:  # noqa: BLE001 - handed to the consumer, which raises it
                item = error
            self._put(item)
            if isinstance(item, BaseException):
                return
            first += self._stride

    def _put(self, item: StepBatch | BaseException) -> None:
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=_POLL)
                return
            except queue.Full:
                continue
