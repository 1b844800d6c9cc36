"""Megatron's token files, read and written from the description of their format alone.

An oracle: it shares no code with the pipeline, uses `struct` and plain loops, and checks nothing.

    9 bytes "MMIDIDX" and two zeros; version 1 as uint64; one byte for the type of the ids; number of
    sequences and number of document boundaries as uint64; then for each sequence its length as int32, for
    each sequence its first byte in the .bin file as int64, for each boundary a sequence number as
    int64. Little-endian throughout.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

# struct's letters for the type codes of the ids.
LETTERS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}


def read_documents(prefix: Path | str) -> list[list[int]]:
    """The ids of each document."""
    index, tokens = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    assert index[:9] == b"MMIDIDX\0\0"
    version, code, num_sequences, num_boundaries = struct.unpack("<QBQQ", index[9:34])
    assert version == 1
    at = 34
    sizes = struct.unpack(f"<{num_sequences}i", index[at : at + 4 * num_sequences])
    at += 4 * num_sequences
    pointers = struct.unpack(f"<{num_sequences}q", index[at : at + 8 * num_sequences])
    at += 8 * num_sequences
    boundaries = struct.unpack(f"<{num_boundaries}q", index[at:])
    letter = LETTERS[code]
    sequences = []
    for size, pointer in zip(sizes, pointers, strict=True):
        end = pointer + size * struct.calcsize(f"<{letter}")
        sequences.append(list(struct.unpack(f"<{size}{letter}", tokens[pointer:end])))
    return [
        [token for sequence in sequences[boundaries[i] : boundaries[i + 1]] for token in sequence]
        for i in range(num_boundaries - 1)
    ]


def write_documents(prefix: Path | str, documents: Sequence[Sequence[Sequence[int]]], code: int = 8) -> None:
    """Write documents, each a list of sequences of ids."""
    letter = LETTERS[code]
    sequences = [sequence for document in documents for sequence in document]
    with Path(f"{prefix}.bin").open("wb") as stream:
        for sequence in sequences:
            stream.write(struct.pack(f"<{len(sequence)}{letter}", *sequence))
    boundaries, pointers, place = [0], [], 0
    for document in documents:
        boundaries.append(boundaries[-1] + len(document))
    for sequence in sequences:
        pointers.append(place)
        place += len(sequence) * struct.calcsize(f"<{letter}")
    with Path(f"{prefix}.idx").open("wb") as stream:
        stream.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sequences), len(boundaries)))
        for sequence in sequences:
            stream.write(struct.pack("<i", len(sequence)))
        for pointer in pointers:
            stream.write(struct.pack("<q", pointer))
        for boundary in boundaries:
            stream.write(struct.pack("<q", boundary))
