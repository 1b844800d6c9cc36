"""What a tokenizer does not keep of its texts: characters that no id stands for, or only the unknown one.

A character is lost where the normalizer or pre-tokenizer removes it, where the model has no id for it, and
where its word becomes the unknown token. White space is not counted: word tokenizers leave it out by design.
What is changed (to lower case, without its accent) is not lost.

Each distinct character is tried once, and texts are only counted, which takes a hundredth of the time of
encoding them. Losses of whole words, which depend on what stands around a character, are found by a sum: of
the units (characters, or a byte-level tokenizer's bytes) that the texts give to the model, less those of the
ids' pieces.
"""

from __future__ import annotations

import re
import string
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

# Shares of characters or ids from which losses are told, and from which tokens are not made unless asked for.
TOLD, REFUSED = 0.001, 0.2
# Examples of lost characters.
_SHOWN = 5
_ASCII = 128
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_WHOLE_WORDS = {"WordPiece", "WordLevel"}
# Normalizers that change each character by itself, and those that also compose it with marks behind it.
_BY_CHARACTER = {"BertNormalizer", "Lowercase", "NFD", "NFKD", "StripAccents", "Nmt", "Strip", "ByteLevel"}
_COMPOSING = {"NFC", "NFKC", "Precompiled"}


@dataclass(frozen=True)
class Losses:
    """What is not kept of some texts.

    Attributes:
        characters: How many are lost.
        unknown: How many ids are the unknown token.
        examples: Some of the characters, those lost most often first; none where whole words are unknown.
    """

    characters: int = 0
    unknown: int = 0
    examples: str = ""

    def __add__(self, other: Losses) -> Losses:
        examples = "".join(dict.fromkeys(self.examples + other.examples))[:_SHOWN]
        return Losses(self.characters + other.characters, self.unknown + other.unknown, examples)

    def share(self, characters: int, tokens: int) -> float:
        """The larger of the shares: of so many characters, and of so many ids."""
        return max(self.characters / max(characters, 1), self.unknown / max(tokens, 1))

    def told(self, characters: int, tokens: int) -> str:
        """A clause for messages."""
        shown = ", ".join(map(repr, self.examples))
        return (
            f"the tokenizer does not keep {self.characters:,} of {characters:,} characters "
            f"({self.characters / max(characters, 1):.2%})"
            + (f", {shown} among them" if shown else "")
            + f"; {self.unknown / max(tokens, 1):.2%} of the ids are its unknown token"
        )


class LossCounter:
    """Counts what a tokenizer of the `tokenizers` library loses.

    Args:
        backend: The library's object.
        content: Its tokenizer.json.
    """

    def __init__(self, backend: Any, content: Mapping[str, Any]) -> None:
        self._backend, self._content, model = backend, content, content["model"]
        self._unknown = _unknown_id(model)
        self._whole_words = model["type"] in _WHOLE_WORDS
        normalizers = list(_steps(content.get("normalizer")))
        steps = [*normalizers, *_steps(content.get("pre_tokenizer"))]
        self._removes_patterns = any("pattern" in step and _removes(step) for step in steps)
        kinds = {step["type"] for step in normalizers if not _by_character(step)}
        self._composes, self._replaces = bool(kinds), bool(kinds - _COMPOSING)
        white = [self._normalized(space) for space in string.whitespace]
        spaces = {
            *string.whitespace,
            *"".join(white),
            *"".join(map(self._split, [*white, *string.whitespace])),
        }
        alphabet = None if self._whole_words else _Alphabet(model)
        self._whole = _Characters(lambda text: self._split(self._normalized(text)), spaces, alphabet)
        self._normalizer = _Characters(self._normalized, spaces)
        self._after = _Characters(self._split, spaces, alphabet)

    def __call__(self, texts: Sequence[str], ids: Sequence[np.ndarray]) -> Losses:
        """What is lost of `texts`.

        Args:
            texts: As they were encoded.
            ids: Of each, [tokens].
        """
        if not texts:
            return Losses()
        tokens = np.concatenate(ids)
        unknown = 0 if self._unknown is None else int(np.count_nonzero(tokens == self._unknown))
        kept = None
        if self._removes_patterns or (self._whole_words and unknown):
            kept = int(self._sizes[tokens].sum())
        found = self._whole.count(texts)
        lost = found.num_lost + found.num_missing(kept)
        if lost and self._composes and (self._replaces or found.has_marks):
            # What characters become depends on those beside them: those of the normalized texts are counted.
            normalized = self._after.count([self._normalized(text) for text in texts])
            lost = self._normalizer.count(texts).num_lost
            lost += normalized.num_lost + normalized.num_missing(kept)
        return Losses(lost, unknown, found.examples)

    def _normalized(self, text: str) -> str:
        normalizer = self._backend.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)

    def _split(self, text: str) -> str:
        """What the model is given of a normalized text."""
        splitter = self._backend.pre_tokenizer
        return text if splitter is None else "".join(piece for piece, _ in splitter.pre_tokenize_str(text))

    @cached_property
    def _sizes(self) -> np.ndarray:
        """Units of each id's piece, [ids]; 0 of the unknown token."""
        model, found = self._content["model"], dict[int, int]()
        for piece, number in _vocabulary(model):
            is_byte = model.get("byte_fallback") and _byte_of(piece) is not None
            found[number] = 1 if is_byte else self._whole.size(_shorn(piece, model))
        for token in self._content["added_tokens"]:
            found[token["id"]] = self._whole.size(token["content"])
        if self._unknown is not None:
            found[self._unknown] = 0
        sizes = np.zeros(max(found, default=-1) + 1, np.int64)
        sizes[list(found)] = list(found.values())
        return sizes


class _Characters:
    """What becomes of each character, found out when it is first seen.

    Args:
        given: What steps of a tokenizer make of a text.
        spaces: What white space becomes.
        alphabet: What the model has ids for; None: not looked at.
    """

    def __init__(
        self, given: Callable[[str], str], spaces: set[str], alphabet: _Alphabet | None = None
    ) -> None:
        self._given, self._spaces, self._alphabet = given, spaces, alphabet
        # Units that the model gets of each, -1 where that is not known yet; whether it is lost.
        self._units = np.full(sys.maxunicode + 1, -1, np.int16)
        self._lost = np.zeros(sys.maxunicode + 1, bool)
        self._marks = np.zeros(sys.maxunicode + 1, bool)
        # Of ASCII: known to be white space; that, or to be kept as one unit.
        self._white: list[int] = []
        self._plain = b""

    def count(self, texts: Iterable[str]) -> _Counted:
        """The characters of `texts`."""
        data = "".join(texts).encode()
        # Most are of ASCII and known, and need not be told apart, which takes a third of the time.
        rest = data.translate(None, self._plain)
        codes = np.frombuffer(data, np.uint8)  # whose comparison is ten times as fast as bytes.count
        num_plain = len(data) - len(rest) - sum(int(np.count_nonzero(codes == each)) for each in self._white)
        counts = np.bincount(np.frombuffer(rest.decode().encode("utf-32-le"), "<u4"))
        letters = np.flatnonzero(counts)
        if len(new := letters[self._units[letters] < 0]):
            self._learn(new)
        of_letters = (table[letters] for table in (self._units, self._lost, self._marks))
        return _Counted(num_plain, letters, counts[letters], *of_letters)

    def _learn(self, letters: np.ndarray) -> None:
        for number in letters.tolist():
            self._units[number], self._lost[number] = self._try(chr(number))
            self._marks[number] = _is_mark(chr(number))
        units = np.where(self._lost, -1, self._units)[:_ASCII]
        self._white = np.flatnonzero(units == 0).tolist()
        self._plain = bytes([*self._white, *np.flatnonzero(units == 1).tolist()])

    def size(self, text: str) -> int:
        """Units of what the model gets."""
        return sum(unit not in self._spaces and not unit.isspace() for unit in text)

    def _try(self, letter: str) -> tuple[int, bool]:
        """The units of a character (0 where it is lost, or white space), and whether it is lost."""
        if letter in self._spaces:
            return 0, False
        between, without = self._given(f"a{letter}a"), self._given("aa")
        if letter.isspace():
            return max(self.size(between) - self.size(without), 0), False
        if between == without:
            return 0, True
        if self._alphabet is None:
            # Not less than 1, but for a mark that is composed; a pattern may have removed an "a" as well.
            return max(self.size(between) - self.size(without), int(not _is_mark(letter))), False
        units = [self._alphabet.units(unit) for unit in self._given(letter) if unit not in self._spaces]
        return sum(units) if all(units) else 0, not all(units)


@dataclass(frozen=True)
class _Counted:
    """The characters of some texts: how many are plain, of one unit; of others, [distinct characters] each,
    code, number, units, whether they are lost, and whether they may be composed with what stands before."""

    num_plain: int
    letters: np.ndarray
    counts: np.ndarray
    units: np.ndarray
    lost: np.ndarray
    marks: np.ndarray

    @property
    def num_lost(self) -> int:
        """Characters that are lost wherever they stand."""
        return int(self.counts[self.lost].sum())

    def num_missing(self, kept: int | None) -> int:
        """Characters of which nothing is among `kept` units; None: not counted. Where characters have several
        units, the mean is counted with."""
        if kept is None:
            return 0
        units = self.num_plain + int(self.counts @ self.units)
        characters = self.num_plain + int(self.counts[self.units > 0].sum())
        return max(round((units - kept) * characters / max(units, 1)), 0)

    @property
    def has_marks(self) -> bool:
        return bool(self.marks.any())

    @property
    def examples(self) -> str:
        """Lost characters, the most frequent first."""
        order = np.argsort(-self.counts[self.lost], kind="stable")[:_SHOWN]
        return "".join(map(chr, self.letters[self.lost][order].tolist()))


class _Alphabet:
    """The units for which a BPE or Unigram model has ids."""

    def __init__(self, model: Mapping[str, Any]) -> None:
        pieces = [piece for piece, _ in _vocabulary(model)]
        if model["type"] == "Unigram":
            self._units = set().union(*pieces)
        else:
            self._units = {unit for unit in (_shorn(piece, model) for piece in pieces) if len(unit) == 1}
        fallback = (_byte_of(piece) for piece in pieces) if model.get("byte_fallback") else ()
        self._bytes = {byte for byte in fallback if byte is not None}

    def units(self, unit: str) -> int:
        """1, or the bytes that stand for it; 0 where it has no id."""
        if unit in self._units:
            return 1
        needed = unit.encode()
        return len(needed) if self._bytes.issuperset(needed) else 0


def _unknown_id(model: Mapping[str, Any]) -> int | None:
    """The id of the unknown token; None where the model has none."""
    if model["type"] == "Unigram":
        return model.get("unk_id")
    return None if model.get("unk_token") is None else model["vocab"].get(model["unk_token"])


def _steps(*roots: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """The steps of normalizers and pre-tokenizers, sequences resolved."""
    for root in filter(None, roots):
        inner = root.get("normalizers", root.get("pretokenizers"))
        if inner is None:
            yield root
        else:
            yield from _steps(*inner)


def _removes(step: Mapping[str, Any]) -> bool:
    return step.get("content") == "" or step.get("behavior") == "Removed"


def _by_character(step: Mapping[str, Any]) -> bool:
    """Whether a normalizer makes of a text what it makes of its characters one by one, or removes some."""
    if step["type"] == "Replace":
        return step["content"] == "" or len(step["pattern"].get("String", "")) == 1
    return step["type"] in _BY_CHARACTER


def _is_mark(letter: str) -> bool:
    """Whether it may be composed with what stands before: marks, vowels and last consonants of Hangul."""
    return unicodedata.category(letter).startswith("M") or "\u1160" <= letter <= "\u11ff"


def _vocabulary(model: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, Mapping):
        return iter(vocabulary.items())
    return ((piece, number) for number, (piece, _) in enumerate(vocabulary))  # Unigram


def _shorn(piece: str, model: Mapping[str, Any]) -> str:
    """A piece without what marks its place in a word."""
    prefix, suffix = model.get("continuing_subword_prefix") or "", model.get("end_of_word_suffix") or ""
    return piece.removeprefix(prefix).removesuffix(suffix)


def _byte_of(piece: str) -> int | None:
    """The byte of a piece such as <0x0A>."""
    found = _BYTE.fullmatch(piece)
    return None if found is None else int(found[1], 16)
