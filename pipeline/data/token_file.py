"""A folder with the tokens of a corpus, written once and memory-mapped. No torch.

tokens.bin    every document's ids and its end-of-document id, one after the other, little-endian
              uint16 (uint32 for vocabularies over 65,536)
index.json    where documents begin, what was skipped, and what the tokens were made from
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.data.corpus import Corpus, Skipped, TextFile, not_utf8
from pipeline.data.tokenizer import Tokenizer
from pipeline.job.problems import JobError, Problem

FORMAT = 1
_TOKENS = "tokens.bin"
_INDEX = "index.json"


@dataclass(frozen=True)
class TokenFile:
    """An opened token folder.

    Attributes:
        tokens: [tokens], memory-mapped, read-only.
        offsets: Document j is ``tokens[offsets[j]:offsets[j + 1]]``; [documents + 1] int64.
        names: The document's files.
        skipped: Files of the corpus that gave no document.
        fingerprint: Hash of tokens and offsets: equal on two hosts that hold the same data.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    names: tuple[str, ...]
    skipped: tuple[Skipped, ...]
    fingerprint: str

    @property
    def num_documents(self) -> int:
        return len(self.names)


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of the format's two types that holds every id."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def write_token_file(
    folder: Path, corpus: Corpus, tokenizer: Tokenizer, report: Callable[[str], None]
) -> None:
    """Tokenize `corpus` into `folder`, which exists and is empty, and force it to the disk.

    Raises:
        JobError: a named file that is not UTF-8 text, a file that cannot be read, or no document left.
        OSError: the disk is full, for example.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    fingerprint = hashlib.blake2b(digest_size=16)
    offsets, names, skipped, problems = [0], [], list(corpus.skipped), []
    with (folder / _TOKENS).open("wb") as stream:
        for file in corpus.files:
            try:
                tokens = _document(file, tokenizer, dtype)
            except UnicodeDecodeError as error:
                problems += [not_utf8(file.path, error)] if file.named else []
                skipped.append(Skipped(file.path, f"not UTF-8 at byte {error.start}"))
                continue
            stream.write(tokens.data)
            fingerprint.update(tokens.data)
            offsets.append(offsets[-1] + len(tokens))
            names.append(file.path)
        stream.flush()
        os.fsync(stream.fileno())
    if not names and not problems:
        problems = [Problem("data", corpus.name, "no file is UTF-8 text", "Convert the files to UTF-8")]
    if problems:
        raise JobError(problems)
    fingerprint.update(np.array(offsets, dtype="<i8").data)
    index = {
        "format": FORMAT,
        "dtype": dtype.str,
        "tokenizer": tokenizer.identity,
        "vocab_size": tokenizer.vocab_size,
        "fingerprint": fingerprint.hexdigest(),
        "offsets": offsets,
        "documents": names,
        "skipped": [asdict(entry) for entry in skipped],
    }
    _write_json(folder / _INDEX, index)
    sync_folder(folder)
    report(f"tokenized {len(names):,} documents into {offsets[-1]:,} tokens")


def open_token_file(folder: Path) -> TokenFile:
    """Map the tokens of `folder`.

    Raises:
        JobError: it is damaged: a file missing, the index unreadable, or the tokens of another size.
    """
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        dtype = np.dtype(index["dtype"])
        offsets = np.array(index["offsets"], dtype=np.int64)
        size = (folder / _TOKENS).stat().st_size
        if size != offsets[-1] * dtype.itemsize:
            raise ValueError(f"{_TOKENS} has {size} bytes, its index says {offsets[-1] * dtype.itemsize}")
        return TokenFile(
            np.memmap(folder / _TOKENS, dtype=dtype, mode="r"),
            offsets,
            tuple(index["documents"]),
            tuple(Skipped(**entry) for entry in index["skipped"]),
            index["fingerprint"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = f"the token cache is damaged ({type(error).__name__}: {error})"
        raise JobError(
            [Problem("data", str(folder), rule, "Delete this folder; it is made again")]
        ) from error


def _document(file: TextFile, tokenizer: Tokenizer, dtype: np.dtype) -> np.ndarray:
    return np.append(tokenizer.encode(file.read()), tokenizer.end_of_document).astype(dtype)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as stream:
        json.dump(content, stream)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to the disk; without this a rename may be lost in a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
