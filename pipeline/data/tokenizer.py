"""Text to token ids and back. No torch.

Every tokenizer offers the same few members (`Tokenizer`); the byte tokenizer is the default, because
it needs no file, no training and no download, and knows every text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from pipeline.job.problems import Problem


class Tokenizer(Protocol):
    """What the data pipeline needs of a tokenizer.

    Attributes:
        identity: Names everything that changes the ids of a text; part of the token cache's identity.
        vocab_size: Ids are 0 .. vocab_size - 1.
        end_of_document: The id that is appended to every document.
    """

    identity: str
    vocab_size: int
    end_of_document: int

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, [tokens], without an end-of-document id."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of `tokens`, for display."""


class ByteTokenizer:
    """Ids 0-255 are the bytes of the UTF-8 text; 256 ends a document."""

    identity = "bytes"
    vocab_size = 257
    end_of_document = 256

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, [tokens] uint16.

        Raises:
            UnicodeEncodeError: a lone surrogate, which UTF-8 has no bytes for.
        """
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

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


def vocabulary_problems(tokenizer: Tokenizer, vocab_size: int) -> tuple[Problem, ...]:
    """A model must have a row for every id that the tokenizer can give."""
    if tokenizer.vocab_size <= vocab_size:
        return ()
    rule = f"the tokenizer ({tokenizer.identity}) has ids 0 .. {tokenizer.vocab_size - 1}"
    return (Problem("model: vocab_size", vocab_size, rule, f"Set it to at least {tokenizer.vocab_size}"),)
