"""The batches of one data rank, read ahead by a thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Protocol

import numpy as np

from pipeline.data.batch import StepBatch, micro_batch
from pipeline.data.packing import Samples

# A waiting thread looks this often, in seconds, whether the other side is gone.
_POLL = 0.1


class BatchSizes(Protocol):
    """The job's batch arithmetic: train = micro * accumulation * data parallel size."""

    @property
    def train_batch_size(self) -> int: ...

    @property
    def micro_batch_size(self) -> int: ...

    @property
    def accumulation_steps(self) -> int: ...


class SampleOrder(Protocol):
    """An endless order of samples: a `Blend`, or a single `PackedDataset`."""

    @property
    def sequence_length(self) -> int: ...

    def read(self, positions: Sequence[int] | np.ndarray) -> Samples:
        """The samples at `positions` of the order, from 0 on."""


def read_step(
    dataset: SampleOrder, batch: BatchSizes, data_rank: int, data_size: int, first: int
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

    Sequence, tensor and pipeline peers build it with the same arguments and get the same batches. The
    thread starts with the first batch asked for, and keeps at most `prefetch` steps ready. An error
    while reading is raised by ``next``; use it as a context manager, or call `close`.

    Attributes:
        data_time: Seconds that the last ``next`` waited.

    Raises:
        ValueError: the batch sizes do not multiply, the rank does not exist, or `start` is negative.
    """

    def __init__(
        self,
        dataset: SampleOrder,
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
