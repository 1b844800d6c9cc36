"""Where each document begins in an epoch's shuffled stream: the one list that an epoch needs. No torch.

Eight bytes per document. A long one is written once per host and memory-mapped, so that its ranks share
the pages; a short one is made by each rank for itself.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipeline.base.files import file_lock
from pipeline.data.document_sets import DocumentSet
from pipeline.data.shuffle import Order

# Documents from which on the index is a file: half a megabyte.
SHARED_SIZE = 1 << 16
_CHUNK = 1 << 18
# Epochs whose files are kept: the one that runs, and the one before it, which a batch may still touch.
_KEPT = 2
_WAIT = 600.0


class EpochIndexes:
    """Makes the indexes of one set of documents.

    Args:
        offsets: Document j is ``tokens[offsets[j]:offsets[j + 1]]``, [all documents + 1] int64.
        documents: The set.
        seed: Chooses the orders, together with the epoch.
        stem: Path that the shared files' names begin with, unlike that of any other set, seed or tokens;
            None keeps indexes of any length in memory.
    """

    def __init__(self, offsets: np.ndarray, documents: DocumentSet, seed: int, stem: Path | None) -> None:
        self._offsets, self._documents, self._seed = offsets, documents, seed
        self._stem = stem if len(documents) >= SHARED_SIZE else None

    def order(self, epoch: int) -> Order:
        """The order of the documents in `epoch`."""
        return Order(len(self._documents), self._seed, "documents", epoch)

    def begins(self, epoch: int) -> np.ndarray:
        """Places of the documents in the stream of `epoch`, and its length: [documents + 1] int64.

        Raises:
            TimeoutError: another process did not finish the file in time.
            OSError: the file cannot be written.
        """
        if self._stem is None:
            begins = np.empty(len(self._documents) + 1, dtype=np.int64)
            self._fill(begins, self.order(epoch))
            return begins
        path = self._path(epoch)
        if not path.exists():
            with file_lock(self._stem.with_name(f"{self._stem.name}.lock"), _WAIT, _silent):
                if not path.exists():
                    self._write(path, epoch)
        return np.asarray(np.load(path, mmap_mode="r"))

    def _path(self, epoch: int) -> Path:
        return self._stem.with_name(f"{self._stem.name}.epoch{epoch}.npy")

    def _write(self, path: Path, epoch: int) -> None:
        """Make the file, which appears when it is complete. Called with the lock held."""
        temporary = path.with_name(f"{self._stem.name}.partial")
        shape = (len(self._documents) + 1,)
        begins = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.int64, shape=shape)
        self._fill(begins, self.order(epoch))
        begins.flush()
        temporary.replace(path)
        for old in self._stem.parent.glob(f"{self._stem.name}.epoch*.npy"):
            if int(old.stem.rpartition("epoch")[2]) <= epoch - _KEPT:
                old.unlink()  # a rank that has it mapped keeps it

    def _fill(self, begins: np.ndarray, order: Order) -> None:
        begins[0] = 0
        for first in range(0, len(self._documents), _CHUNK):
            last = min(first + _CHUNK, len(self._documents))
            ids = self._documents[order(np.arange(first, last))]
            lengths = self._offsets[ids + 1] - self._offsets[ids]
            lengths[0] += begins[first]
            np.cumsum(lengths, out=begins[first + 1 : last + 1])


def _silent(_: str) -> None:
    """A wait for a few seconds' work is no news."""
