"""Token files, opened: PREFIX.bin and PREFIX.idx, ours or another program's, and PREFIX.json. No torch."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.base.problems import JobError, Problem
from pipeline.data.corpus import Skipped
from pipeline.data.token_format import FormatError, Index, document_offsets, read_index

# Files up to this many bytes are hashed whole; of larger ones, blocks at even distances.
_READ_WHOLE = 64 << 20
_BLOCK = 1 << 14
_BLOCKS = 256


@dataclass(frozen=True)
class TokenFile:
    """The tokens of a corpus.

    Attributes:
        tokens: [tokens], memory-mapped and read-only; or several files behind one another, `JoinedTokens`.
        offsets: Document j is ``tokens[offsets[j]:offsets[j + 1]]``; [documents + 1] int64.
        fingerprint: Hash of offsets and tokens: equal on two hosts that hold the same data. Of files over
            64 MB it covers the sizes and 256 blocks of 16 KB.
        tokenizer_hash: Identity of the tokenizer that made them; None where no description says.
        vocab_size: That tokenizer's; None likewise.
        max_token: Highest id; of large files without a description, in the blocks of the fingerprint.
        skipped: Files and records that gave no document; the first of them.
        num_skipped: How many there were.
    """

    tokens: np.ndarray | JoinedTokens
    offsets: np.ndarray
    fingerprint: str
    tokenizer_hash: str | None = None
    vocab_size: int | None = None
    max_token: int = 0
    skipped: tuple[Skipped, ...] = ()
    num_skipped: int = 0

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1


class JoinedTokens:
    """Several token arrays behind one another, to be read in slices."""

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
        JobError: a file is missing, damaged, or not the other's.
    """
    path = Path(f"{prefix}.bin")
    try:
        index = read_index(Path(f"{prefix}.idx"))
        size = path.stat().st_size
        offsets = document_offsets(index, size)
        count = size // index.dtype.itemsize
        tokens = _mapped(path, index.dtype) if count else np.empty(0, index.dtype)
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
        )
    except FileNotFoundError as error:
        rule = f"{error.filename} is missing; token files are PREFIX.bin and PREFIX.idx, both"
        raise JobError([Problem("data", prefix, rule, "Bring back that file, or prepare again")]) from error
    except (OSError, FormatError, ValueError, KeyError, TypeError, AttributeError) as error:
        rule = f"cannot be used: {error}" if isinstance(error, FormatError) else _damaged(error)
        remedy = "Fetch or prepare both files again"
        raise JobError([Problem("data", prefix, rule, remedy)]) from error


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
        made = ", ".join(f"{name} with {identity}" for identity, name in known.items())
        rule = f"the sources were made with different tokenizers: {made}"
        raise JobError([Problem("data", " ".join(names), rule, "Prepare them with one tokenizer")])
    begins = np.cumsum([0, *(int(file.offsets[-1]) for file in files)])
    ends = [file.offsets[1:] + begin for file, begin in zip(files, begins[:-1], strict=True)]
    fingerprint = hashlib.blake2b("".join(file.fingerprint for file in files).encode(), digest_size=16)
    return TokenFile(
        JoinedTokens([_plain(file.tokens) for file in files]),
        np.concatenate([[0], *ends]).astype(np.int64),
        fingerprint.hexdigest(),
        next(iter(known), None),
        max((file.vocab_size for file in files if file.vocab_size is not None), default=None),
        max(file.max_token for file in files),
        tuple(entry for file in files for entry in file.skipped),
        sum(file.num_skipped for file in files),
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


def _plain(tokens: np.ndarray | JoinedTokens) -> np.ndarray:
    if isinstance(tokens, JoinedTokens):
        raise TypeError("joined token files cannot be joined again")
    return tokens


def _description(path: Path) -> dict[str, Any]:
    """PREFIX.json; empty where there is none, as beside other programs' files."""
    if not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is no description of tokens")
    return content if str(content.get("format", "")).startswith("MMIDIDX") else {}


def _damaged(error: Exception) -> str:
    return f"the token files are damaged ({type(error).__name__}: {error})"


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    tokens = np.memmap(path, dtype, "r")
    if path.stat().st_size > _READ_WHOLE and isinstance(tokens.base, mmap.mmap):
        # Samples lie anywhere: reading ahead at each of them would read many times what is used.
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
