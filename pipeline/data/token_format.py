"""Megatron's indexed token files: the layout of PREFIX.idx, read and written. No torch.

PREFIX.bin holds the ids of all sequences, one after the other, little-endian, nothing else. PREFIX.idx:

    9 bytes   b"MMIDIDX\\x00\\x00"
    8 bytes   version, 1                           uint64
    1 byte    code of the ids' type, see `DTYPES`
    8 bytes   S, number of sequences               uint64
    8 bytes   D, number of document boundaries     uint64, one more than there are documents
    4 S       tokens of each sequence              int32
    8 S       byte in PREFIX.bin where each begins int64
    8 D       sequence where each document begins, and S at last   int64

A document has one sequence here, or several where it is longer than an int32 can say. All numbers are
little-endian, all counts 64 bits.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = {6: "float64", 7: "float32"}
_CODES = {np.dtype(name): code for code, name in DTYPES.items()}
LONGEST_SEQUENCE = (1 << 31) - 1
# Entries handled at once, so that memory does not grow with the corpus.
_CHUNK = 1 << 20


class FormatError(ValueError):
    """The two files are not what the format says, or not of each other."""


@dataclass(frozen=True)
class Index:
    """A PREFIX.idx, memory-mapped.

    Attributes:
        dtype: Type of the ids in PREFIX.bin.
        sizes: [sequences] int32, in tokens.
        pointers: [sequences] int64, in bytes.
        documents: [documents + 1] int64, in sequences.
    """

    dtype: np.dtype
    sizes: np.ndarray
    pointers: np.ndarray
    documents: np.ndarray

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1


def read_index(path: Path) -> Index:
    """Map an index; its arrays are not looked at yet, see `document_offsets`.

    Raises:
        FormatError: another kind of file, another version, ids that are no integers, or a wrong length.
        OSError: it cannot be read.
    """
    with path.open("rb") as stream:
        head = stream.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise FormatError(f"{path.name} does not begin as an index of tokens does")
    _, version, code, sequences, boundaries = HEADER.unpack(head)
    if version != VERSION:
        raise FormatError(f"{path.name} has version {version}, and only version {VERSION} is known")
    if code not in DTYPES:
        raise FormatError(f"{path.name} says that ids are {_FLOATS.get(code, f'of type code {code}')}")
    expected = HEADER.size + 12 * sequences + 8 * boundaries
    if (size := path.stat().st_size) != expected:
        raise FormatError(
            f"{path.name} has {size:,} bytes, and {expected:,} by its own counts "
            f"({sequences:,} sequences, {boundaries:,} document boundaries)"
        )
    sizes = _mapped(path, "<i4", HEADER.size, sequences)
    pointers = _mapped(path, "<i8", HEADER.size + 4 * sequences, sequences)
    documents = _mapped(path, "<i8", HEADER.size + 12 * sequences, boundaries)
    return Index(np.dtype(DTYPES[code]), sizes, pointers, documents)


def document_offsets(index: Index, num_bytes: int) -> np.ndarray:
    """Where documents begin, and the end of the last, [documents + 1] int64, in tokens.

    Args:
        index: From `read_index`.
        num_bytes: Size of PREFIX.bin.

    Raises:
        FormatError: sequences that do not follow each other, documents out of order, or a PREFIX.bin of
            another size than the index describes.
    """
    total, width = 0, index.dtype.itemsize
    for begin in range(0, len(index.sizes), _CHUNK):
        sizes = index.sizes[begin : begin + _CHUNK].astype(np.int64)
        ends = np.cumsum(sizes)
        if sizes.min() < 0 or np.any(
            index.pointers[begin : begin + _CHUNK] != (total + ends - sizes) * width
        ):
            raise FormatError("the index is damaged: its sequences do not follow each other")
        total += int(ends[-1])
    if total * width != num_bytes:
        raise FormatError(
            f"the .bin file has {num_bytes:,} bytes, and its index says {total * width:,} "
            f"({total:,} tokens of {width} bytes)"
        )
    bounds = index.documents
    if not len(bounds) or bounds[0] != 0 or bounds[-1] != len(index.sizes) or np.any(np.diff(bounds) < 0):
        raise FormatError("the index is damaged: its documents are not in order")
    offsets = np.empty(len(bounds), dtype=np.int64)
    offsets[-1] = total
    offsets[:-1] = _begins(index, bounds[:-1], total)
    return offsets


def _begins(index: Index, sequences: np.ndarray, total: int) -> np.ndarray:
    """First token of each of `sequences`; one past the last, of an empty document, begins at `total`."""
    if len(sequences) == len(index.pointers) and np.array_equal(sequences, np.arange(len(sequences))):
        return index.pointers // index.dtype.itemsize  # one sequence a document, the usual case
    pointers = np.append(index.pointers, total * index.dtype.itemsize)
    return pointers[sequences] // index.dtype.itemsize


def write_index(stream: IO[bytes], dtype: np.dtype, lengths: np.ndarray) -> None:
    """Write the index of documents that follow each other.

    Args:
        stream: At its beginning.
        dtype: Of the ids.
        lengths: Tokens of each document, [documents] int64; memory-mapped where there are many.
    """
    sequences = len(lengths) + sum(int((-(-chunk // LONGEST_SEQUENCE) - 1).sum()) for chunk in _long(lengths))
    stream.write(HEADER.pack(MAGIC, VERSION, _CODES[dtype], sequences, len(lengths) + 1))
    for chunk in _sequence_chunks(lengths):
        stream.write(chunk.astype("<i4").tobytes())
    place = 0
    for chunk in _sequence_chunks(lengths):
        ends = place + np.cumsum(chunk)
        stream.write(((ends - chunk) * dtype.itemsize).astype("<i8").tobytes())
        place = int(ends[-1])
    number = 0
    stream.write(np.int64(0).astype("<i8").tobytes())
    for chunk in _chunks(lengths):
        ends = number + np.cumsum(_pieces(chunk))
        stream.write(ends.astype("<i8").tobytes())
        number = int(ends[-1])


def _chunks(lengths: np.ndarray) -> Iterator[np.ndarray]:
    for begin in range(0, len(lengths), _CHUNK):
        yield lengths[begin : begin + _CHUNK].astype(np.int64)


def _long(lengths: np.ndarray) -> Iterator[np.ndarray]:
    """The documents of more than one sequence, chunk by chunk."""
    for chunk in _chunks(lengths):
        yield chunk[chunk > LONGEST_SEQUENCE]


def _pieces(lengths: np.ndarray) -> np.ndarray:
    """Sequences of each document."""
    return np.maximum(-(-lengths // LONGEST_SEQUENCE), 1)


def _sequence_chunks(lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Tokens of each sequence."""
    for chunk in _chunks(lengths):
        pieces = _pieces(chunk)
        sizes = np.full(int(pieces.sum()), LONGEST_SEQUENCE, dtype=np.int64)
        sizes[np.cumsum(pieces) - 1] = chunk - (pieces - 1) * LONGEST_SEQUENCE
        yield sizes


def _mapped(path: Path, dtype: str, offset: int, count: int) -> np.ndarray:
    if not count:
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,))
