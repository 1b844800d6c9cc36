"""Token files in Megatron's indexed layout, opened: ours or another program's, and PREFIX.json.

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

import hashlib
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from pipeline.base.json_reader import saved_json
from pipeline.base.problems import Problem, job_error
from pipeline.base.words import few
from pipeline.data.corpus import Skipped
from pipeline.data.losses import TOLD, Losses

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = {6: "float64", 7: "float32"}
_CODES = {np.dtype(name): code for code, name in DTYPES.items()}
LONGEST_SEQUENCE = (1 << 31) - 1
# Entries handled at once, so that memory does not grow with the corpus.
_CHUNK = 1 << 20
# Files up to this many bytes are hashed whole; of larger ones, blocks at even distances.
_READ_WHOLE = 64 << 20
_BLOCK = 1 << 14
_BLOCKS = 256


class FormatError(ValueError):
    """The two files do not follow the format, or do not belong together."""


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


def read_index(path: Path) -> Index:
    """Map an index; its arrays are checked later, see `document_offsets`.

    Raises:
        FormatError: another kind of file, another version, ids that are no integers, or a wrong length.
        OSError: it cannot be read.
    """
    with path.open("rb") as stream:
        head = stream.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise FormatError(f"{path.name} does not begin like an index of tokens")
    _, version, code, sequences, boundaries = HEADER.unpack(head)
    if version != VERSION:
        raise FormatError(f"{path.name} has version {version}, and only version {VERSION} is supported")
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


class TokenError(RuntimeError):
    """The tokens cannot be trained on: ids beyond the vocabulary, or files that changed during the run."""


@dataclass(frozen=True)
class WatchedFile:
    """A file's state when it was opened: bytes, time of the last change in nanoseconds, and inode."""

    path: Path
    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> WatchedFile:
        """`path` as it is now.

        Raises:
            OSError: it cannot be found.
        """
        status = path.stat()
        return cls(path, status.st_size, status.st_mtime_ns, status.st_ino)

    def check(self) -> None:
        """Takes two microseconds, so that every batch can call it.

        Raises:
            TokenError: the file was written to, replaced or removed.
        """
        try:
            now = WatchedFile.of(self.path)
        except OSError as error:
            raise TokenError(f"{self.path} cannot be read any more ({error.strerror})") from error
        if now != self:
            raise TokenError(
                f"{self.path} changed during the run ({self.size:,} bytes when it was opened, {now.size:,} "
                f"now): its samples are no longer those of the sample order"
            )


@dataclass(frozen=True)
class TokenFile:
    """The tokens of a corpus.

    Attributes:
        tokens: [tokens], memory-mapped and read-only; or several files one after the other, `JoinedTokens`.
        offsets: Document j is ``tokens[offsets[j]:offsets[j + 1]]``; [documents + 1] int64.
        fingerprint: Hash of offsets and tokens: equal on two hosts that hold the same data. Of files over
            64 MB it covers the sizes and 256 blocks of 16 KB.
        tokenizer_hash: Identity of the tokenizer that made them; None without a description.
        vocab_size: That tokenizer's; None likewise.
        max_token: Highest id; of large files without a description, in the blocks of the fingerprint.
        skipped: Files and records that gave no document; the first of them.
        num_skipped: How many there were.
        remarks: What else is to be said of them.
    """

    tokens: np.ndarray | JoinedTokens
    offsets: np.ndarray
    fingerprint: str
    tokenizer_hash: str | None = None
    vocab_size: int | None = None
    max_token: int = 0
    skipped: tuple[Skipped, ...] = ()
    num_skipped: int = 0
    remarks: tuple[str, ...] = ()

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def parts(self) -> tuple[np.ndarray, ...]:
        """The arrays of its files."""
        return self.tokens.parts if isinstance(self.tokens, JoinedTokens) else (self.tokens,)


class JoinedTokens:
    """Several token arrays one after the other, to be read in slices."""

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self.parts = tuple(parts)
        self._begins = np.cumsum([0, *(len(part) for part in parts)])

    def __len__(self) -> int:
        return int(self._begins[-1])

    def __getitem__(self, place: slice) -> np.ndarray:
        begin, end, _ = place.indices(len(self))
        number = int(np.searchsorted(self._begins[1:-1], begin, side="right"))
        pieces = []
        while True:
            first = int(self._begins[number])
            pieces.append(self.parts[number][begin - first : max(end - first, 0)])
            begin = first + len(self.parts[number])
            number += 1
            if begin >= end or number == len(self.parts):
                # One piece unless the slice crosses from file to file, which no document does.
                return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def open_token_file(prefix: str) -> TokenFile:
    """Map ``PREFIX.bin`` with the documents of ``PREFIX.idx``.

    Raises:
        JobError: a file is missing or damaged, or the two do not belong together.
    """
    path = Path(f"{prefix}.bin")
    with _explained(prefix):
        index = read_index(Path(f"{prefix}.idx"))
        size = path.stat().st_size
        offsets = document_offsets(index, size)
        count = size // index.dtype.itemsize
        tokens = _mapped_tokens(path, index.dtype) if count else np.empty(0, index.dtype)
        content = list(_content(path, size))
        description = _description(Path(f"{prefix}.json"))
        fingerprint = _fingerprint(index, offsets, size, content)
        tokenizer = description.get("tokenizer", {})
        skipped = tuple(Skipped(**entry) for entry in description.get("skipped", ()))
        return TokenFile(
            tokens,
            offsets,
            fingerprint,
            tokenizer.get("identity"),
            tokenizer.get("vocab_size"),
            description["max_token"] if "max_token" in description else _highest(content, index.dtype),
            skipped,
            description.get("num_skipped", len(skipped)),
            remarks(description),
        )


def is_quick_to_open(prefix: str) -> bool:
    """Whether ``PREFIX.idx`` is read in a fraction of a second."""
    return Path(f"{prefix}.idx").stat().st_size <= _READ_WHOLE


def count_tokens(prefix: str) -> int:
    """The tokens of ``PREFIX.bin``, by its size and the first bytes of its index.

    Raises:
        JobError: as `open_token_file`, as far as these show it.
    """
    with _explained(prefix):
        return Path(f"{prefix}.bin").stat().st_size // read_index(Path(f"{prefix}.idx")).dtype.itemsize


@contextmanager
def _explained(prefix: str) -> Iterator[None]:
    """Turns what is wrong with token files into a problem."""
    try:
        yield
    except FileNotFoundError as error:
        rule = f"{error.filename} is missing; token files are PREFIX.bin and PREFIX.idx, both"
        raise job_error("data", prefix, rule, "Restore that file, or prepare again") from error
    except (OSError, FormatError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        rule = f"cannot be used: {error}" if isinstance(error, FormatError) else f"is damaged ({reason})"
        raise job_error("data", prefix, rule, "Download or prepare both files again") from error


def join_token_files(names: Sequence[str], files: Sequence[TokenFile]) -> TokenFile:
    """All documents of several token files as those of one.

    Args:
        names: Of the files, for messages.
        files: Of one tokenizer.

    Raises:
        JobError: two of them were made with different tokenizers.
    """
    if len(files) == 1:
        return files[0]
    known = {
        file.tokenizer_hash: name for name, file in zip(names, files, strict=True) if file.tokenizer_hash
    }
    if len(known) > 1:
        made = few(f"{name} with {identity}" for identity, name in known.items())
        rule = f"the sources were made with different tokenizers: {made}"
        raise job_error("data", " ".join(names), rule, "Prepare them with one tokenizer")
    begins = np.cumsum([0, *(int(file.offsets[-1]) for file in files)])
    ends = [file.offsets[1:] + begin for file, begin in zip(files, begins[:-1], strict=True)]
    fingerprint = hashlib.blake2b("".join(file.fingerprint for file in files).encode(), digest_size=16)
    return TokenFile(
        JoinedTokens([part for file in files for part in file.parts]),
        np.concatenate([[0], *ends]).astype(np.int64),
        fingerprint.hexdigest(),
        next(iter(known), None),
        max((file.vocab_size for file in files if file.vocab_size is not None), default=None),
        max(file.max_token for file in files),
        tuple(entry for file in files for entry in file.skipped),
        sum(file.num_skipped for file in files),
        tuple(dict.fromkeys(line for file in files for line in file.remarks)),
    )


def token_problems(name: str, file: TokenFile, identity: str, vocab_size: int) -> list[Problem]:
    """Why these tokens cannot be read as those of a tokenizer with this identity and that many ids."""
    if file.tokenizer_hash not in (None, identity):
        rule = f"was made with the tokenizer {file.tokenizer_hash}, and the run's is {identity}"
        remedy = "Give that tokenizer with --tokenizer, or prepare the data with the run's"
        return [Problem("data", name, rule, remedy)]
    if file.max_token >= vocab_size or file.max_token < 0:
        rule = f"holds the token id {file.max_token}, and the tokenizer has ids 0 .. {vocab_size - 1}"
        return [Problem("data", name, rule, "Give the tokenizer that made it with --tokenizer")]
    return []


def remarks(description: Mapping[str, Any]) -> tuple[str, ...]:
    """Sentences about tokens, from their PREFIX.json; none of files without the counts."""
    lines = []
    if count := description.get("end_markers", 0):
        lines.append(
            f"WARNING: the text has the end of a document written out as letters, {count:,} times; they are "
            "encoded as letters and end nothing. If they stand between documents, give them with "
            "--document_separator"
        )
    losses = Losses(
        *(description.get(key, 0) for key in ("lost_characters", "unknown_tokens")),
        description.get("lost_examples", ""),
    )
    sizes = description.get("characters", 0), description.get("tokens", 0)
    if losses.share(*sizes) >= TOLD:
        lines.append(f"WARNING: {losses.told(*sizes)}. A tokenizer made for such text keeps it")
    return tuple(lines)


def described_remarks(prefix: str) -> tuple[str, ...]:
    """Sentences about the tokens of ``PREFIX``, which are not opened.

    Raises:
        JobError: PREFIX.json is damaged.
    """
    try:
        return remarks(_description(Path(f"{prefix}.json")))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        rule = f"{prefix}.json is damaged ({type(error).__name__}: {error})"
        raise job_error("data", prefix, rule, "Download or prepare the files again") from error


def _description(path: Path) -> dict[str, Any]:
    """PREFIX.json; empty where there is none, as beside other programs' files."""
    if not path.exists():
        return {}
    content = saved_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is no description of tokens")
    return content if str(content.get("format", "")).startswith("MMIDIDX") else {}


def _mapped_tokens(path: Path, dtype: np.dtype) -> np.ndarray:
    tokens = np.memmap(path, dtype, "r")
    if path.stat().st_size > _READ_WHOLE and isinstance(tokens.base, mmap.mmap):
        # Samples are read at random places: reading ahead at each would read many times what is used.
        tokens.base.madvise(mmap.MADV_RANDOM)
    return tokens


def _content(path: Path, size: int) -> Iterator[bytes]:
    """A small file whole; of a large one, blocks at even distances, the first and the last among them."""
    with path.open("rb", buffering=0) as stream:
        if size <= _READ_WHOLE:
            yield stream.read()
            return
        # Read, not mapped: a page fault in a large file costs milliseconds, for the pages around it.
        for place in np.linspace(0, (size - _BLOCK) // _BLOCK, _BLOCKS).astype(np.int64).tolist():
            yield os.pread(stream.fileno(), _BLOCK, place * _BLOCK)
        yield os.pread(stream.fileno(), _BLOCK, size - _BLOCK)


def _highest(content: Sequence[bytes], dtype: np.dtype) -> int:
    """The highest id, negative if any is."""
    parts = [np.frombuffer(block, dtype) for block in content if block]
    lowest = min((int(part.min()) for part in parts), default=0)
    return lowest if lowest < 0 else max((int(part.max()) for part in parts), default=0)


def _fingerprint(index: Index, offsets: np.ndarray, size: int, content: Sequence[bytes]) -> str:
    state = hashlib.blake2b(f"{index.dtype.str} {len(offsets)} {size}".encode(), digest_size=16)
    bounds = memoryview(np.ascontiguousarray(offsets, dtype="<i8")).cast("B")
    if len(bounds) <= _READ_WHOLE:
        state.update(bounds)
    else:
        for place in np.linspace(0, len(bounds) - _BLOCK, _BLOCKS).astype(np.int64).tolist():
            state.update(bounds[place : place + _BLOCK])
    for block in content:
        state.update(block)
    return state.hexdigest()
