"""Text to token ids and back. `tokenizers` is imported only to encode.

Every tokenizer offers the same few members (`Tokenizer`); the byte tokenizer is the default, because
it needs no file, no training and no download, and encodes every text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from pipeline.base.problems import JobError, Problem, job_error
from pipeline.base.words import cut
from pipeline.data.losses import LossCounter, Losses
from pipeline.data.markers import without_markers
from pipeline.data.tokenizer_folder import (
    BYTES,
    MALFORMED,
    SAVE_AGAIN,
    TOKENIZER,
    TokenizerFacts,
    tokenizer_facts,
    write_tokenizer_folder,
)


class Tokenizer(Protocol):
    """What the data pipeline needs of a tokenizer. Objects can be sent to other processes.

    Attributes:
        identity: Names everything that changes the ids of a text; part of the token cache's identity.
        vocab_size: Ids are 0 .. vocab_size - 1.
        end_of_document: The id that is appended to every document.
        facts: What its files say.
        cuts_at_lines: A text cut before a line break that follows a letter or digit has the ids of the
            parts; so a document too long for memory can be encoded part by part.
    """

    identity: str
    vocab_size: int
    end_of_document: int
    facts: TokenizerFacts
    cuts_at_lines: bool

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, [tokens], without an end-of-document id."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each."""

    def losses(self, texts: Sequence[str], ids: Sequence[np.ndarray]) -> Losses:
        """What `ids`, as `encode_batch` gave them, do not keep of `texts`."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of `tokens`, for display."""

    def num_bytes(self, tokens: np.ndarray) -> int:
        """Bytes of the text of a document's `tokens`, in UTF-8; the end of a document has none."""

    def save(self, folder: Path) -> None:
        """Write it as a folder that ``transformers.AutoTokenizer`` and `load_tokenizer` open."""


class ByteTokenizer:
    """Ids 0-255 are the bytes of the UTF-8 text; 256 ends a document.

    `facts`: of the folder that it was read from, if it was.
    """

    identity = BYTES
    vocab_size = 257
    end_of_document = 256
    cuts_at_lines = True

    def __init__(self, facts: TokenizerFacts | None = None) -> None:
        self.facts = facts or tokenizer_facts(None)

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, [tokens] uint16.

        Raises:
            UnicodeEncodeError: a lone surrogate, which UTF-8 has no bytes for.
        """
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each."""
        return [self.encode(text) for text in texts]

    def losses(self, texts: Sequence[str], ids: Sequence[np.ndarray]) -> Losses:
        """None: every text has bytes."""
        return Losses()

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

    def num_bytes(self, tokens: np.ndarray) -> int:
        """Bytes of the text of a document's `tokens`."""
        return int(np.count_nonzero(tokens != self.end_of_document))

    def save(self, folder: Path) -> None:
        """Write the same tokenizer in the form of the `tokenizers` library."""
        write_tokenizer_folder(folder, self.facts.json, self.facts.eos_token, self.facts.files)


def load_tokenizer(name: str | None) -> Tokenizer:
    """The tokenizer called `name`: ``bytes`` (also for None), or a Hugging Face folder.

    Raises:
        JobError: there is no such folder, or it lacks what is needed.
    """
    return from_facts(tokenizer_facts(name))


def from_facts(facts: TokenizerFacts) -> Tokenizer:
    """The tokenizer that a folder's files describe."""
    if facts.identity == BYTES:
        return ByteTokenizer(facts)
    return HuggingFaceTokenizer(facts)


def vocabulary_problems(tokenizer: Tokenizer, vocab_size: int) -> tuple[Problem, ...]:
    """A model must have a row for every id that the tokenizer can give."""
    if tokenizer.vocab_size <= vocab_size:
        return ()
    rule = f"the tokenizer ({tokenizer.identity}) has ids 0 .. {tokenizer.vocab_size - 1}"
    return (Problem("model: vocab_size", vocab_size, rule, f"Set it to at least {tokenizer.vocab_size}"),)


# Cases, blanks, characters of one to four bytes.
_PROBE = "A probe:\n\tfor  Each_2 in [x, Y]:  caf\u00e9 \u2014 \u8a9e \U0001f642\n"


def unlike_its_text(tokenizer: Tokenizer) -> str | None:
    """Why the length of a text cannot be known from its ids; None where decoding gives back what was encoded,
    as byte-level tokenizers do."""
    try:
        decoded = tokenizer.decode(tokenizer.encode(_PROBE).tolist())
    except JobError as error:
        return error.problems[0].rule
    return None if decoded == _PROBE else f"the tokenizer decodes {_PROBE!r} as {decoded!r}"


class HuggingFaceTokenizer:
    """Ids of a tokenizer.json, plain: no special tokens put around a text, no truncation, no padding.

    The text of a marker (special tokens, and those of end, beginning, padding, unknown) inside a document
    is encoded as the text it is. A document can therefore not end itself.

    Raises:
        JobError: the library cannot read the file.
    """

    def __init__(self, facts: TokenizerFacts) -> None:
        self.facts = facts
        self.identity = facts.identity
        self.vocab_size = facts.vocab_size
        self.end_of_document = facts.end_of_document
        from tokenizers import Tokenizer as Backend

        self._dtype = np.uint16 if facts.vocab_size <= 1 << 16 else np.int32
        try:
            # The library first: it checks the form of what is read after it.
            self.backend = self._decoder = Backend.from_str(facts.json)
            plain = without_markers(facts.json, facts.markers)
            if plain is not facts.json:
                self.backend = Backend.from_str(plain)
        except Exception as error:  # the library raises plain Exception
            if not isinstance(error, MALFORMED) and type(error) is not Exception:
                raise
            rule = f"{TOKENIZER} cannot be read: {error}"
            raise job_error("tokenizer", facts.name, rule, SAVE_AGAIN) from error
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True
        self.cuts_at_lines = self._cuts_at_lines()

    def __reduce__(self) -> tuple[type[HuggingFaceTokenizer], tuple[TokenizerFacts]]:
        return HuggingFaceTokenizer, (self.facts,)

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, [tokens], of the narrowest type of token files."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each, on the library's threads.

        Raises:
            JobError: text without an id, where the model has no unknown token either.
        """
        try:
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:
            if type(error) is not Exception:  # what the library raises, and nothing else
                raise
            raise JobError([self._no_id(texts, error)]) from error
        return [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]

    def losses(self, texts: Sequence[str], ids: Sequence[np.ndarray]) -> Losses:
        """What `ids`, as `encode_batch` gave them, do not keep of `texts`."""
        return self._count_losses(texts, ids)

    @cached_property
    def _count_losses(self) -> LossCounter:
        # As the library writes it: what it may lack, as the type of the model, is there.
        return LossCounter(self.backend, json.loads(self.backend.to_str()))

    def _no_id(self, texts: Sequence[str], error: Exception) -> Problem:
        """The problem of text without an id; names the first such word."""
        word = next((word for text in texts for word in text.split() if not self._has_ids(word)), None)
        rule = "has no unknown token, and no id for " + ("its text" if word is None else repr(cut(word)))
        remedy = (
            f"Name one of its tokens as unknown in {TOKENIZER} (unk_token of its model, unk_id of a "
            "Unigram), or give a tokenizer that was made for such text"
        )
        return Problem("tokenizer", self.facts.name, f"{rule} ({error})", remedy)

    def _has_ids(self, word: str) -> bool:
        try:
            self.backend.encode(word, add_special_tokens=False)
        except Exception as error:
            if type(error) is not Exception:
                raise
            return False
        return True

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of `tokens`; special tokens are shown."""
        return self._decoder.decode([int(token) for token in tokens], skip_special_tokens=False)

    def num_bytes(self, tokens: np.ndarray) -> int:
        """Bytes of the text of a document's `tokens`, in UTF-8; see `unlike_its_text`."""
        return len(self.decode(tokens[tokens != self.end_of_document]).encode("utf-8", errors="replace"))

    def save(self, folder: Path) -> None:
        """Write the files of its folder as they were, with what AutoTokenizer needs."""
        write_tokenizer_folder(folder, self.facts.json, self.facts.eos_token, self.facts.files)

    def _cuts_at_lines(self) -> bool:
        """Whether the texts below, where a mark of the beginning or a merge over lines would show, have
        the ids of their parts."""
        for left, right in (("word", "\nnext"), ("end 12", "\n\n  indented"), ("a", "\n")):
            try:
                parts = np.concatenate(self.encode_batch([left, right]))
                if not np.array_equal(self.encode(left + right), parts):
                    return False
            except JobError:
                return False  # no ids for these words, which the data may well not have
        return True
