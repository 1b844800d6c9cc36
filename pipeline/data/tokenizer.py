"""Text to token ids and back. No torch; `tokenizers` only where a Hugging Face tokenizer is used.

Every tokenizer offers the same few members (`Tokenizer`); the byte tokenizer is the default, because
it needs no file, no training and no download, and knows every text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from pipeline.base.problems import Problem
from pipeline.data.tokenizer_files import (
    BYTES,
    TokenizerFacts,
    byte_tokenizer_json,
    read_tokenizer_folder,
    write_tokenizer_folder,
)


class Tokenizer(Protocol):
    """What the data pipeline needs of a tokenizer. Objects can be sent to other processes.

    Attributes:
        identity: Names everything that changes the ids of a text; part of the token cache's identity.
        vocab_size: Ids are 0 .. vocab_size - 1.
        end_of_document: The id that is appended to every document.
        cuts_at_lines: A text cut before a line break that follows a letter or digit has the ids of the
            parts; so a document too long for memory can be encoded part by part.
    """

    identity: str
    vocab_size: int
    end_of_document: int
    cuts_at_lines: bool

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, [tokens], without an end-of-document id."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of `tokens`, for display."""

    def save(self, folder: Path) -> None:
        """Write it as a folder that ``transformers.AutoTokenizer`` and `load_tokenizer` open."""


class ByteTokenizer:
    """Ids 0-255 are the bytes of the UTF-8 text; 256 ends a document."""

    identity = BYTES
    vocab_size = 257
    end_of_document = 256
    cuts_at_lines = True

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, [tokens] uint16.

        Raises:
            UnicodeEncodeError: a lone surrogate, which UTF-8 has no bytes for.
        """
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each."""
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of `tokens`; the end of a document is an empty line.

        Bytes that are not UTF-8 (a model's sample may hold or stop at half a character) are shown as
        the replacement character U+FFFD.

        Raises:
            ValueError: an id outside 0 .. 256.
        """
        pieces = bytearray()
        for token in tokens:
            if not 0 <= token <= self.end_of_document:
                raise ValueError(f"token id {token}: the byte tokenizer has ids 0 .. {self.end_of_document}")
            pieces += b"\n\n" if token == self.end_of_document else bytes((token,))
        return pieces.decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        """Write the same tokenizer in the form of the `tokenizers` library."""
        write_tokenizer_folder(folder, byte_tokenizer_json(), "<|endoftext|>")


def load_tokenizer(name: str | None) -> Tokenizer:
    """The tokenizer called `name`: ``bytes`` (also for None), or a Hugging Face folder.

    Raises:
        JobError: there is no such folder, or it lacks what is needed.
    """
    if name is None or name == BYTES:
        return ByteTokenizer()
    return from_facts(read_tokenizer_folder(name))


def from_facts(facts: TokenizerFacts) -> Tokenizer:
    """The tokenizer that a folder's files describe."""
    if facts.identity == BYTES:
        return ByteTokenizer()
    from pipeline.data.hugging_face_tokenizer import HuggingFaceTokenizer

    return HuggingFaceTokenizer(facts)


def vocabulary_problems(tokenizer: Tokenizer, vocab_size: int) -> tuple[Problem, ...]:
    """A model must have a row for every id that the tokenizer can give."""
    if tokenizer.vocab_size <= vocab_size:
        return ()
    rule = f"the tokenizer ({tokenizer.identity}) has ids 0 .. {tokenizer.vocab_size - 1}"
    return (Problem("model: vocab_size", vocab_size, rule, f"Set it to at least {tokenizer.vocab_size}"),)
