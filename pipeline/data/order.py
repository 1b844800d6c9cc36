"""The order of documents and samples: permutations, sets of documents, and an epoch's index.

numpy promises stable streams for its bit generators only, not for `Generator.permutation`, and a run may be
resumed on another machine years later. So the order is computed with integer arithmetic alone.

    up to 2^20 numbers    number i gets a 64-bit hash, and the hashes are sorted: a table, in milliseconds
    more                  a keyed bijection, computed for the requested places: no table, whatever the size

The training documents are all that are not held out, stored as the complement, so
that a hundred million of them need no list on each rank.

The one list that an epoch needs is where each document begins in its shuffled stream: eight bytes per
document. A long one is written once per host and memory-mapped, so that its ranks share the pages; a short
one is made by each rank for itself.
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from pipeline.base.files import file_lock, remove_unfinished, replaced_atomically

# Constants of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
# Largest permutation that is a table: 8 MB.
TABLE_SIZE = 1 << 20
_HALF_ROUNDS = 6
# Numbers computed at a time: their temporaries stay in a core's cache.
_CHUNK = 1 << 14
# Documents from which on the index is a file: half a megabyte.
SHARED_SIZE = 1 << 16
_INDEX_CHUNK = 1 << 18
# Epochs whose files are kept: the one that runs, and the one before it, which a batch may still touch.
_KEPT = 2
_WAIT = 600.0


def permutation(size: int, *key: int | str) -> np.ndarray:
    """A shuffled 0 .. size - 1, [size] int64, chosen by `key` (such as a seed, a purpose, an epoch).

    Each step of SplitMix64 is a bijection of 64-bit integers, so distinct numbers get distinct hashes:
    there are no ties, and the sorted order does not depend on the sorting algorithm.
    """
    return np.argsort(_hashes(size, key)).astype(np.int64, copy=False)


class Order:
    """The permutation of 0 .. size - 1 that `key` chooses, as a function of places; costs 8 MB at most."""

    def __init__(self, size: int, *key: int | str) -> None:
        self.size = size
        self._table = permutation(size, *key) if size <= TABLE_SIZE else None
        bits = max(size - 1, 1).bit_length()
        self._shifts = np.uint64(bits - bits // 2), np.uint64(bits // 2)
        self._keys = _hashes(2 * _HALF_ROUNDS, (*key, "rounds")).reshape(_HALF_ROUNDS, 2)
        self._keys[:, 1] |= np.uint64(1)  # an odd factor loses no bit

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """The numbers at `places` (each 0 .. size - 1), int64 of the same length."""
        if self._table is not None:
            return self._table[places]
        numbers = np.asarray(places).astype(np.uint64)
        for begin in range(0, len(numbers), _CHUNK):
            self._walk(numbers[begin : begin + _CHUNK])
        return numbers.view(np.int64)

    def _walk(self, numbers: np.ndarray) -> None:
        """Map in place. The bijection is one of all b-bit numbers, and b is the least that holds `size`; what
        lands beyond it is mapped again until it does not, which keeps it a bijection (Black and Rogaway:
        Ciphers with Arbitrary Finite Domains, 2002). On average that is less than one time more."""
        self._mix(numbers)
        (beyond,) = np.nonzero(numbers >= self.size)
        while len(beyond):
            again = numbers[beyond]
            self._mix(again)
            numbers[beyond] = again
            beyond = beyond[again >= self.size]

    def _mix(self, numbers: np.ndarray) -> None:
        """A Feistel network in place: each half round adds a hash of one half's bits to the other half."""
        high, low = self._shifts
        left, right = numbers >> low, numbers & ((np.uint64(1) << low) - np.uint64(1))
        sides = ((left, right, high), (right, left, low))
        for index, (offset, factor) in enumerate(self._keys):
            changed, read, bits = sides[index % 2]
            mixed = (read + offset) * factor
            mixed ^= mixed >> np.uint64(32)
            mixed *= _MULTIPLIER_2
            mixed >>= np.uint64(64) - bits
            changed ^= mixed
        np.bitwise_or(left << low, right, out=numbers)


def _hashes(count: int, key: tuple[int | str, ...]) -> np.ndarray:
    """The first outputs of SplitMix64 from a start that `key` chooses, [count] uint64."""
    start = np.uint64(int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little"))
    state = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN + start
    state = (state ^ (state >> np.uint64(30))) * _MULTIPLIER_1
    state = (state ^ (state >> np.uint64(27))) * _MULTIPLIER_2
    return state ^ (state >> np.uint64(31))


class DocumentSet(Protocol):
    """Document ids, ascending: ``documents[numbers]`` are those at the places `numbers`."""

    def __len__(self) -> int: ...

    def __getitem__(self, numbers: np.ndarray) -> np.ndarray: ...


class Complement:
    """The documents 0 .. total - 1 without those `left_out` ([documents] int64, ascending).

    With 2 and 3 left out of 6, places 0 .. 3 hold 0 1 4 5: at place n, as many documents are missing before
    it as entries of left_out - arange = [2 2] are at most n.
    """

    def __init__(self, total: int, left_out: np.ndarray) -> None:
        self.left_out = left_out
        self._length = total - len(left_out)
        self._places = left_out - np.arange(len(left_out))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, numbers: np.ndarray) -> np.ndarray:
        if not len(self._places):
            return np.asarray(numbers, dtype=np.int64)
        # Searched in ascending order, which the processor's caches like: ten times as fast for millions.
        ascending = np.argsort(numbers)
        missing = np.empty(len(numbers), dtype=np.int64)
        missing[ascending] = np.searchsorted(self._places, numbers[ascending], side="right")
        return numbers + missing


def split_documents(num_documents: int, eval_fraction: float, seed: int) -> tuple[Complement, np.ndarray]:
    """The training documents and, ascending, the validation documents.

    A document is never in both. Validation has `eval_fraction` of the documents, rounded, but at least one,
    and training at least one. The split does not depend on epoch or layout.
    """
    if eval_fraction == 0:
        return Complement(num_documents, np.arange(0)), np.arange(0)
    count = min(max(round(num_documents * eval_fraction), 1), num_documents - 1)
    held_out = np.sort(Order(num_documents, seed, "held out")(np.arange(count)))
    return Complement(num_documents, held_out), held_out


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
            return np.concatenate(list(self._begins(epoch)))
        path = self._stem.with_name(f"{self._stem.name}.epoch{epoch}.npy")
        if not path.exists():
            # Quiet, as the work takes a few seconds only.
            with file_lock(self._stem.with_name(f"{self._stem.name}.lock"), _WAIT, quiet=True):
                if not path.exists():
                    self._write(path, epoch)
        return np.asarray(np.load(path, mmap_mode="r"))

    def _write(self, path: Path, epoch: int) -> None:
        """Write the file, which gets its name when it is complete. Called with the lock held."""
        remove_unfinished(path)
        header = {"descr": "<i8", "fortran_order": False, "shape": (len(self._documents) + 1,)}
        with replaced_atomically(path) as file:
            np.lib.format.write_array_header_1_0(file, header)
            for begins in self._begins(epoch):
                file.write(begins.astype("<i8", copy=False).data)
        for old in path.parent.glob(f"{glob.escape(self._stem.name)}.epoch*.npy"):
            if int(old.stem.rpartition("epoch")[2]) <= epoch - _KEPT:
                old.unlink()  # a rank that has it mapped keeps it

    def _begins(self, epoch: int) -> Iterator[np.ndarray]:
        """`begins` part by part, so that a long index never is in memory whole."""
        order, total = self.order(epoch), np.zeros(1, dtype=np.int64)
        yield total
        for first in range(0, len(self._documents), _INDEX_CHUNK):
            ids = self._documents[order(np.arange(first, min(first + _INDEX_CHUNK, len(self._documents))))]
            ends = total[-1] + np.cumsum(self._offsets[ids + 1] - self._offsets[ids])
            yield ends
            total = ends[-1:]
